//! The operations against another library's own results: outputs, last state, every gradient.
//! tests/fixtures/README.md says where the numbers come from, and what each file's inputs are.

use crate::call::{download, upload};
use crate::ops::{F32_LIMIT, Reads, differentiate, stepped};
use crate::support::{Numbers, alone, safetensors};
use burn::module::{ModuleMapper, Param};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{DType, Tensor};
use linattn::nn::mixers::{ForgettingAttentionConfig, TokenMixer};
use linattn::ops::LinearAttentionBackend;
use linattn_oracle::{
    Decay, Dims, Gradients, Inputs, Output, Read, Transition, assert_close, backward, forward,
    relative_error,
};
use std::path::Path;

const TOKENS: usize = 70;
const HEADS: usize = 2;
const KEY: usize = 16;
const VALUE: usize = 24;
/// Rounding of the files themselves to f32.
const FILE_LIMIT: f64 = 1e-6;

/// Every file that is a recurrence; `fox` is softmax attention.
const CASES: [&str; 12] = [
    "linear_attn",
    "simple_gla",
    "gla",
    "delta_rule",
    "delta_rule_neg",
    "gated_delta_rule",
    "gated_delta_rule_neg",
    "kda",
    "gdn2",
    "comba_chunk",
    "comba_recurrent",
    "dplr",
];

fn folder() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/ops"))
}

fn file(name: &str) -> Numbers {
    safetensors(&folder().join(format!("{name}.safetensors")))
}

fn scale() -> f64 {
    (KEY as f64).powf(-0.5)
}

fn times(x: &[f64], y: &[f64]) -> Vec<f64> {
    assert_eq!(x.len(), y.len());
    x.iter().zip(y).map(|(x, y)| x * y).collect()
}

fn plus(x: &[f64], y: &[f64]) -> Vec<f64> {
    assert_eq!(x.len(), y.len());
    x.iter().zip(y).map(|(x, y)| x + y).collect()
}

fn scaled(by: f64, x: &[f64]) -> Vec<f64> {
    x.iter().map(|x| by * x).collect()
}

/// A file's recurrence in our terms.
fn inputs(case: &str, given: &Numbers) -> Inputs {
    let get = |name: &str| given[name].clone();
    let scalar = || Some(Decay::Scalar(get("g")));
    let vector = || Some(Decay::Vector(get("g_rows")));
    let delta = |beta: &str| Transition::Delta { beta: get(beta), erase: None };
    let (decay, transition) = match case {
        "linear_attn" => (None, Transition::Identity),
        "simple_gla" => (scalar(), Transition::Identity),
        "gla" => (vector(), Transition::Identity),
        "delta_rule" => (None, delta("beta")),
        "delta_rule_neg" => (None, delta("beta_wide")),
        "gated_delta_rule" => (scalar(), delta("beta")),
        "gated_delta_rule_neg" => (scalar(), delta("beta_wide")),
        "kda" => (vector(), delta("beta")),
        "gdn2" => {
            let erase = Some(times(&given["b"], &given["k_unit"]));
            (vector(), Transition::Delta { beta: vec![1.0; TOKENS * HEADS], erase })
        }
        "comba_chunk" | "comba_recurrent" => {
            (scalar(), Transition::Delta { beta: get("beta"), erase: Some(get("p")) })
        }
        "dplr" => (vector(), Transition::LowRank { a: get("alpha"), b: get("beta_rows") }),
        _ => panic!("no recurrence {case}"),
    };
    let (q, k) = match transition {
        Transition::Delta { .. } => ("q_unit", "k_unit"),
        _ => ("q", "k"),
    };
    Inputs {
        dims: Dims {
            batch: 1,
            tokens: TOKENS,
            key_heads: HEADS,
            heads: HEADS,
            key_width: KEY,
            value_width: VALUE,
        },
        q: scaled(scale(), &given[q]),
        k: get(k),
        v: if case == "gdn2" { times(&given["w"], &given["v"]) } else { get("v") },
        decay,
        transition,
        read: if case == "comba_chunk" { Read::Before } else { Read::After },
        bonus: None,
        state: None,
    }
}

/// The gradients of a file's own inputs, by their names in it, from those of ours.
fn gradients(case: &str, given: &Numbers, d: Gradients) -> Vec<(&'static str, Vec<f64>)> {
    let mut list = vec![("dq", scaled(scale(), &d.q))];
    if case == "gdn2" {
        let erase = d.erase.expect("it erases with rows of its own");
        list.push(("dk", plus(&d.k, &times(&erase, &given["b"]))));
        list.push(("db", times(&erase, &given["k_unit"])));
        list.push(("dv", times(&d.v, &given["w"])));
        list.push(("dw", times(&d.v, &given["v"])));
        list.push(("dg", d.g.expect("it decays")));
        return list;
    }
    list.extend([("dk", d.k), ("dv", d.v)]);
    let g = if matches!(case, "gla" | "dplr") { "dgk" } else { "dg" };
    let rest = [(g, d.g), ("dbeta", d.beta), ("dp", d.erase), ("dalpha", d.a), ("dbeta", d.b)];
    list.extend(rest.into_iter().filter_map(|(name, d)| Some((name, d?))));
    list
}

/// Every number of a file against what `compute` makes of its inputs and of the gradients of `o` and
/// of the last state.
fn hold(
    case: &str,
    limit: f64,
    compute: impl FnOnce(&Inputs, (&[f64], &[f64])) -> (Output, Gradients),
) {
    let (given, want) = (file("inputs"), file(case));
    let upstream = (given["do"].as_slice(), given["dfinal_state"].as_slice());
    let (output, d) = compute(&inputs(case, &given), upstream);
    let mut got = vec![("o", output.o), ("final_state", output.state)];
    got.extend(gradients(case, &given, d));
    let mut names: Vec<&str> = got.iter().map(|(name, _)| *name).collect();
    names.sort();
    assert!(names.into_iter().eq(want.keys()), "{case}: all of {:?}", want.keys());
    for (name, got) in got {
        assert_close(&format!("{case}: {name}"), &want[name], &got, limit);
    }
}

/// Whole sequences on a device, and one token after another, as decoding does it:
/// without gradients.
fn hold_on<B>(device: &B::Device)
where
    B: AutodiffBackend<InnerBackend: LinearAttentionBackend> + LinearAttentionBackend,
{
    for case in CASES {
        hold(case, F32_LIMIT, |x, upstream| {
            differentiate::<B>(device, x, Reads::Both, upstream, DType::F32)
        });
        let want = file(case);
        let got = stepped::<B::InnerBackend>(device, &inputs(case, &file("inputs")));
        assert_close(&format!("{case}, stepped: o"), &want["o"], &got.o, F32_LIMIT);
        let state = format!("{case}, stepped: state");
        assert_close(&state, &want["final_state"], &got.state, F32_LIMIT);
    }
}

#[test]
fn every_file_is_held_to() {
    let entries = std::fs::read_dir(folder()).unwrap();
    let mut names: Vec<String> = entries
        .map(|entry| entry.unwrap().path().file_stem().unwrap().to_string_lossy().into_owned())
        .filter(|name| !["inputs", "fox"].contains(&name.as_str()))
        .collect();
    names.sort();
    let mut cases = CASES;
    cases.sort();
    assert_eq!(names, cases);
}

#[test]
fn the_recurrences_in_double_precision_agree() {
    for case in CASES {
        hold(case, FILE_LIMIT, |x, (d_o, d_state)| (forward(x), backward(x, d_o, d_state)));
    }
}

/// That library asks Comba's memory before the decay in its chunks, after it in its loop over tokens.
#[test]
fn the_two_forms_of_comba_are_told_apart() {
    let (given, want) = (file("inputs"), file("comba_recurrent"));
    let published = forward(&inputs("comba_chunk", &given)); // as the paper, and our layer
    for (name, got, apart) in
        [("o", published.o, 0.03..0.035), ("final_state", published.state, 0.075..0.085)]
    {
        let error = relative_error(&want[name], &got);
        assert!(apart.contains(&error), "{name}: {error}");
    }
}

/// Sets the projections of forgetting attention to pick from a row `[q, k, v, f]`, each with all its
/// heads. A head is VALUE wide for keys too, those of KEY filled up with zeros: its scores would be
/// divided by the larger width's root, so q is picked larger.
struct Pick {
    path: Vec<String>,
}

impl Pick {
    /// Rows, columns and values of the weight that is reached.
    fn entries(&self) -> Vec<(usize, usize, f64)> {
        let keys = |from: usize, value: f64| -> Vec<_> {
            let places = (0..HEADS).flat_map(|h| (0..KEY).map(move |i| (h, i)));
            places.map(|(h, i)| (from + h * KEY + i, h * VALUE + i, value)).collect()
        };
        let all = |from: usize, count: usize| -> Vec<_> {
            (0..count).map(|i| (from + i, i, 1.0)).collect()
        };
        match self.path[0].as_str() {
            "q_proj" => keys(0, (VALUE as f64 / KEY as f64).sqrt()),
            "k_proj" => keys(HEADS * KEY, 1.0),
            "v_proj" => all(2 * HEADS * KEY, HEADS * VALUE),
            "f_proj" => all(HEADS * (2 * KEY + VALUE), HEADS),
            "o_proj" => all(0, HEADS * VALUE),
            other => panic!("a parameter of {other}"),
        }
    }
}

impl<B: Backend> ModuleMapper<B> for Pick {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn map_float<const R: usize>(&mut self, param: Param<Tensor<B, R>>) -> Param<Tensor<B, R>> {
        if R == 1 {
            return param; // the gate's bias, fresh: zeros
        }
        let entries = self.entries();
        param.map(|old| {
            let dims = old.dims();
            let mut values = vec![0.0; dims.iter().product()];
            for (row, column, value) in entries {
                values[row * dims[R - 1] + column] = value;
            }
            upload::<B, R>(&values, dims, DType::F32, &old.device()).require_grad()
        })
    }
}

/// Softmax attention with forget gates, through its layer.
fn hold_fox<B: AutodiffBackend + LinearAttentionBackend>(device: &B::Device, limit: f64) {
    use burn::module::Module;
    let _alone = alone();
    let (given, want) = (file("inputs"), file("fox"));
    // The layer takes a sigmoid's logarithm: its inverse, and the inverse's slope.
    let f: Vec<f64> = given["g"].iter().map(|g| -(-g).exp_m1().ln()).collect();
    let slope: Vec<f64> = given["g"].iter().map(|g| -g.exp_m1()).collect();
    let parts = [(&given["q"], KEY), (&given["k"], KEY), (&given["v"], VALUE), (&f, 1)];
    let width = HEADS * parts.iter().map(|(_, width)| width).sum::<usize>();
    let rows: Vec<f64> = (0..TOKENS)
        .flat_map(|t| {
            let row = move |(x, width): &(&Vec<f64>, usize)| {
                x[t * HEADS * width..(t + 1) * HEADS * width].to_vec()
            };
            parts.iter().flat_map(row).collect::<Vec<f64>>()
        })
        .collect();

    let config =
        ForgettingAttentionConfig { heads: HEADS, key_width: Some(VALUE), ..Default::default() };
    let layer = config.init::<B>(width, device).unwrap().map(&mut Pick { path: vec![] });
    let x = upload::<B, 3>(&rows, [1, TOKENS, width], DType::F32, device).require_grad();
    let (y, _) = layer.forward(x.clone(), None);
    let o = y.narrow(2, 0, HEADS * VALUE);
    assert_close("o", &want["o"], &download(o.clone()), limit);

    let d_o = upload::<B, 3>(&given["do"], [1, TOKENS, HEADS * VALUE], DType::F32, device);
    let found = (o * d_o).sum().backward();
    let d = x.grad(&found).expect("it has a gradient");
    let mut from = 0;
    for (name, (_, width)) in ["dq", "dk", "dv", "dg"].into_iter().zip(parts) {
        let got = download(d.clone().narrow(2, from, HEADS * width));
        let want = match name {
            "dg" => times(&want[name], &slope),
            _ => want[name].clone(),
        };
        assert_close(name, &want, &got, limit);
        from += HEADS * width;
    }
}

#[cfg(feature = "cpu")]
mod on_cpu {
    use super::*;
    use burn::backend::{Autodiff, Flex};

    type B = Autodiff<Flex>;

    #[test]
    fn tensor_operations_agree() {
        hold_on::<B>(&Default::default());
    }

    #[test]
    fn tensor_operations_in_double_precision_agree_as_far_as_the_files_go() {
        for case in CASES {
            hold(case, FILE_LIMIT, |x, upstream| {
                let device = Default::default();
                differentiate::<B>(&device, x, Reads::Both, upstream, DType::F64)
            });
        }
    }

    #[test]
    fn forgetting_attention_agrees() {
        hold_fox::<B>(&Default::default(), F32_LIMIT);
    }
}

/// The same on GPUs; a module for each backend that is compiled in.
#[allow(unused_macros)]
macro_rules! on_gpu {
    ($module:ident, $backend:ty, $device:path, $softmax_limit:expr) => {
        mod $module {
            use super::*;
            use burn::backend::Autodiff;

            #[test]
            fn kernels_agree() {
                let Some(device) = $device() else { return };
                hold_on::<Autodiff<$backend>>(&device);
            }

            #[test]
            fn forgetting_attention_agrees() {
                let Some(device) = $device() else { return };
                hold_fox::<Autodiff<$backend>>(&device, $softmax_limit);
            }
        }
    };
}

#[cfg(feature = "wgpu")]
on_gpu!(on_wgpu, burn::backend::Wgpu, crate::support::wgpu, F32_LIMIT);
// Burn multiplies f32 matrices in TF32 on CUDA; the kernels do not.
#[cfg(feature = "cuda")]
on_gpu!(on_cuda, burn::backend::Cuda, crate::support::cuda, 2e-3);
