//! Softmax and what stands beside it are what their papers say: loops over tokens in double precision, written
//! from the formulas, with the weights of the mixer that they are compared with.

use crate::call::download;
use crate::formulas::{Rows, TOKENS, by_head, check, dot, each, gelu, rotated, sigmoid, silu};
use crate::formulas::{times, unit, weighed};
use crate::layers::{B, D, Weights, input, mixer};
use crate::support::normal_by;
use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{DType, Tensor, TensorData};
use linattn::ops::{DeltaRuleInputs, delta_rule};
use linattn_oracle::assert_close;

/// Average of values so far for each channel, weighted by keys and by a bias of two positions.
fn aft_is(form: &str, bias: impl Fn(&[f64], &[f64], usize) -> f64) {
    check(&format!("aft = {{ {form} }}"), |w, rows| {
        let (mut keys, mut values, mut outputs) = (vec![], vec![], vec![]);
        for (t, x) in rows.iter().enumerate() {
            keys.push(w.linear("k_proj", x));
            values.push(w.linear("v_proj", x));
            let row = |name: &str, t: usize| {
                let table = w.0.get(name).cloned().unwrap_or_default();
                table[t * table.len() / 64..(t + 1) * table.len() / 64].to_vec()
            };
            let (u, ps) = (row("query_positions", t), (0..=t).map(|j| row("key_positions", j)));
            let biases: Vec<f64> = ps.enumerate().map(|(j, p)| bias(&u, &p, t - j)).collect();
            let mean: Vec<f64> = (0..D)
                .map(|c| {
                    let scores: Vec<f64> =
                        keys.iter().zip(&biases).map(|(k, b)| k[c] + b).collect();
                    let values: Vec<Vec<f64>> = values.iter().map(|v| vec![v[c]]).collect();
                    weighed(&scores, &values)[0]
                })
                .collect();
            let q = each(&w.linear("q_proj", x), sigmoid);
            outputs.push(w.linear("o_proj", &times(&q, &mean)));
        }
        outputs
    });
}

#[test]
fn aft_averages_values_by_keys_and_biases_of_positions() {
    aft_is("", |_, _, _| 0.0);
    aft_is("form = { full = { length = 64, rank = 7 } }", |u, p, _| dot(u, p));
    aft_is("form = { local = { window = 5, length = 64, rank = 7 } }", |u, p, back| {
        if back < 5 { dot(u, p) } else { 0.0 }
    });
}

/// Softmax attention of two heads, as wide as 12, whose scores are given by a query, all keys so far, and a function
/// for each.
fn attention_is(
    text: &str,
    rope: bool,
    scores: impl Fn(&Weights, &[f64], &[Vec<f64>]) -> Vec<Option<f64>>,
) {
    check(text, |w, rows| {
        let (mut keys, mut values) = (vec![vec![]; 2], vec![vec![]; 2]);
        let mut outputs = vec![];
        for (t, x) in rows.iter().enumerate() {
            let [q, k, v] = ["q_proj", "k_proj", "v_proj"].map(|name| w.linear(name, x));
            let mut o = vec![];
            for head in 0..2 {
                let part = |x: &[f64]| x[head * 12..][..12].to_vec();
                let turned = |x: &[f64]| if rope { rotated(&part(x), t) } else { part(x) };
                keys[head].push(turned(&k));
                values[head].push(part(&v));
                let seen = scores(w, &turned(&q), &keys[head]).into_iter().zip(&values[head]);
                let seen = seen.filter_map(|(score, v)| Some((score?, v.clone())));
                let (scores, values): (Vec<f64>, Rows) = seen.unzip();
                o.extend(weighed(&scores, &values));
            }
            outputs.push(w.linear("o_proj", &o));
        }
        outputs
    });
}

#[test]
fn a_strided_pattern_is_the_last_keys_and_each_so_many() {
    attention_is("attention = { heads = 2, stride = 4 }", true, |_, q, keys| {
        let last = keys.len() - 1;
        let seen = |j: usize| last - j < 4 || (last - j).is_multiple_of(4);
        let score = |(j, k): (usize, &Vec<f64>)| seen(j).then(|| dot(q, k) / 12f64.sqrt());
        keys.iter().enumerate().map(score).collect()
    });
}

#[test]
fn contextual_positions_count_what_gates_let_through() {
    attention_is("attention = { heads = 2, rope = false, cope = 6 }", false, |w, q, keys| {
        let table: Rows = w.get("cope.embeddings").chunks(12).map(<[f64]>::to_vec).collect();
        let (mut position, mut scores) = (0.0, vec![]);
        for k in keys.iter().rev() {
            let score = dot(q, k) / 12f64.sqrt();
            position = f64::min(position + sigmoid(score), 5.0);
            let (lower, rest) = (position.floor() as usize, position.fract());
            let at = |p: usize| dot(q, &table[p.min(5)]) / 12f64.sqrt();
            scores.push(Some(score + at(lower) * (1.0 - rest) + at(lower + 1) * rest));
        }
        scores.into_iter().rev().collect()
    });
}

#[test]
fn gau_squares_what_is_above_zero_inside_an_mlp() {
    check("gau = { key_width = 6 }", |w, rows| {
        let (mut keys, mut values, mut outputs): (Rows, Rows, Rows) = (vec![], vec![], vec![]);
        for (t, x) in rows.iter().enumerate() {
            let [u, v, z] =
                ["u_proj", "v_proj", "z_proj"].map(|name| each(&w.linear(name, x), silu));
            let of = |name: &str| {
                let scaled = times(&z, w.get(&format!("{name}_scale")));
                let offset = w.get(&format!("{name}_offset"));
                let moved: Vec<f64> = scaled.iter().zip(offset).map(|(a, b)| a + b).collect();
                rotated(&moved, t)
            };
            keys.push(of("k"));
            values.push(v);
            let q = of("q");
            let mut o = vec![0.0; 2 * D];
            for (k, v) in keys.iter().zip(&values) {
                let share = (dot(&q, k) / 6f64.sqrt()).max(0.0).powi(2) / (t + 1) as f64;
                o.iter_mut().zip(v).for_each(|(o, v)| *o += share * v);
            }
            outputs.push(w.linear("o_proj", &times(&u, &o)));
        }
        outputs
    });
}

#[test]
fn goru_turns_its_memory_by_pairs() {
    check("goru = { width = 10, capacity = 5 }", |w, rows| {
        let (mut h, mut outputs) = (vec![0f64; 10], vec![]);
        let angles = w.get("angles");
        for x in rows {
            let (a, b) = (w.linear("x_proj", x), w.linear("h_proj", &h));
            let mut turned = h.clone();
            for layer in 0..5 {
                for pair in 0..5 {
                    let i = (2 * pair + layer % 2) % 10;
                    let j = (i + 1) % 10;
                    let (sin, cos) = angles[layer * 5 + pair].sin_cos();
                    (turned[i], turned[j]) =
                        (turned[i] * cos - turned[j] * sin, turned[i] * sin + turned[j] * cos);
                }
            }
            let size = |x: &[f64]| dot(x, x).sqrt();
            assert!((size(&turned) - size(&h)).abs() < 1e-9, "a rotation keeps the length");
            for n in 0..10 {
                let r = sigmoid(a[n] + b[n] + w.get("reset_bias")[n]);
                let z = sigmoid(a[10 + n] + b[10 + n] + w.get("update_bias")[n]);
                let s = a[20 + n] + r * turned[n];
                let new = s.signum() * (s.abs() + w.get("threshold")[n]).max(0.0);
                h[n] = z * h[n] + (1.0 - z) * new;
            }
            outputs.push(w.linear("o_proj", &h));
        }
        outputs
    });
}

#[test]
fn pooling_is_the_mean_of_a_window_less_the_token() {
    check("pooling = { window = 4 }", |w, rows| {
        let at = |t: usize| {
            let seen = &rows[(t + 1).saturating_sub(4)..=t];
            let mean = |c: usize| seen.iter().map(|x| x[c]).sum::<f64>() / seen.len() as f64;
            (0..D).map(|c| w.get("scale")[c] * (mean(c) - rows[t][c])).collect()
        };
        (0..rows.len()).map(at).collect()
    });
}

#[test]
fn a_token_mlp_mixes_positions_of_each_channel() {
    check("token_mlp = { length = 64 }", |w, rows| {
        let layer = |name: &str, x: &[Vec<f64>], t: usize| -> Vec<f64> {
            let weights = &w.get(&format!("{name}.mixing"))[64 * t..][..=t];
            let bias = w.get(&format!("{name}.bias"))[t];
            (0..D)
                .map(|c| bias + weights.iter().zip(x).map(|(a, x)| a * x[c]).sum::<f64>())
                .collect()
        };
        let hidden: Rows = (0..rows.len()).map(|t| each(&layer("hidden", rows, t), gelu)).collect();
        (0..rows.len()).map(|t| layer("output", &hidden, t)).collect()
    });
}

/// Gives `bt_proj` weights of zero and biases so large that every beta is 2, and `w_proj` weights so large that
/// nothing added to the length of a row is felt.
struct FullReflections(Vec<String>);

impl ModuleMapper<B> for FullReflections {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.0.push(name.to_string());
    }
    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.0.pop();
    }
    fn map_float<const R: usize>(&mut self, param: Param<Tensor<B, R>>) -> Param<Tensor<B, R>> {
        let within = |layer: &str| self.0.iter().any(|name| name == layer);
        match (within("bt_proj"), within("w_proj")) {
            (true, _) if R == 1 => param.map(|x| (x.zeros_like() + 1e3).require_grad()),
            (true, _) => param.map(|x| x.zeros_like().require_grad()),
            (_, true) => param.map(|x| (x * 100.0).detach().require_grad()),
            _ => param,
        }
    }
}

/// Queries and keys that a delta rule took along from the first token, with rows w of length 1, beta 2 and nothing to
/// write, meet as those do that PaTH reflects on their way from one to the other: reflections undo themselves.
#[test]
fn path_attention_of_whole_reflections_is_attention_behind_a_delta_rule() {
    let text = "path_attention = { heads = 2, w_rank = 3, chunk = 8 }";
    let mixer = normal_by(1, 0.16, mixer(text)).map(&mut FullReflections(vec![]));
    let x = input(TOKENS).narrow(0, 0, 1);
    let rows: Rows = download(x.clone()).chunks(D).map(<[f64]>::to_vec).collect();
    let named = Weights::of(&mixer).0.into_iter();
    let w = Weights(named.map(|(n, x)| (n.split_once('.').unwrap().1.to_string(), x)).collect());

    let all = |name: &str| -> Rows { rows.iter().map(|x| w.linear(name, x)).collect() };
    let [q, k, v, narrow] = ["q_proj", "k_proj", "v_proj", "w_proj.0"].map(all);
    let plain: Rows = narrow.iter().map(|x| w.linear("w_proj.1", x)).collect();
    let at = |t: usize| each(&w.convolution("w_conv1d", &plain[..=t]), silu);
    let normals: Rows = (0..TOKENS).map(|t| by_head(&at(t), 2, unit)).collect();

    let device = Default::default();
    let heads = |rows: &Rows| -> Tensor<B, 4> {
        let data = TensorData::new(rows.concat(), [1, TOKENS, 2, 12]);
        Tensor::from_data(data, (&device, DType::F64))
    };
    let taken = |rows: &Rows| -> Rows {
        let (read, w) = (heads(rows), heads(&normals));
        let beta = Tensor::<B, 3>::full([1, TOKENS, 2], 2.0, (&device, DType::F64));
        let start = Tensor::<B, 2>::eye(12, &device).cast(DType::F64);
        let start = start.reshape([1, 1, 12, 12]).expand([1, 2, 12, 12]);
        let inputs = DeltaRuleInputs::new(read, w.clone(), w.zeros_like(), beta);
        let (o, _) = delta_rule(inputs, Some(start)).unwrap();
        download(o).chunks(24).map(<[f64]>::to_vec).collect()
    };
    let (q, k) = (taken(&q), taken(&k));
    let mut want = vec![];
    for (t, q) in q.iter().enumerate() {
        let mut o = vec![];
        for head in 0..2 {
            let part = |x: &[f64]| x[head * 12..][..12].to_vec();
            let score = |j: usize| dot(&part(q), &part(&k[j])) / 12f64.sqrt();
            let scores: Vec<f64> = (0..=t).map(score).collect();
            let values: Rows = (0..=t).map(|j| part(&v[j])).collect();
            o.extend(weighed(&scores, &values));
        }
        want.extend(w.linear("o_proj", &o));
    }
    assert_close(text, &want, &download(mixer.forward(x, None).0), 1e-6);
}
