//! Every mixer on a GPU, beside the same weights on the processor: whole sequences, pieces and single tokens, and the
//! gradients of whole sequences.
//!
//! `cargo test` takes a few configs, since a GPU compiles each for seconds; `GPU_MIXERS=all` takes all of them, and
//! `GPU_MIXERS=3/8` the third eighth.

use crate::call::{download, upload};
use crate::layers::{D, MIXERS, collect, config};
use crate::support::normal_by;
use crate::weights::Weights;
use burn::backend::{Autodiff, Flex};
use burn::module::{Module, ModuleMapper, Param};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Tensor, backend::Backend};
use linattn::backend::TrainBackend;
use linattn::nn::materialize;
use linattn::nn::mixers::{Mixer, MixerConfig};
use linattn::ops::LinearAttentionBackend;
use linattn_oracle::{Rng, relative_error};
use std::panic::{AssertUnwindSafe, catch_unwind};

const TOKENS: usize = 14;
/// The same tokens, as a device gets them from a prompt and then one by one.
const PIECES: [usize; 5] = [5, 6, 1, 1, 1];

/// Configs that are tried where nothing is asked for: block-diagonal layers, windows of one token, padded values, sums
/// whose gradients lie permuted.
const ALWAYS: [&str; 5] = [
    "h3 = { head_width = 2, d_state = 6, learn_inputs = true }",
    "lstm = { width = 5 }",
    "mlstm_v1 = { heads = 2 }",
    "mamba = { d_state = 3, conv_size = 1 }",
    "slstm = { heads = 3, conv_size = 0, norm_eps = 1e-3 }",
];

/// All weights in another type.
struct Cast(DType);

impl<B: Backend> ModuleMapper<B> for Cast {
    fn map_float<const R: usize>(&mut self, param: Param<Tensor<B, R>>) -> Param<Tensor<B, R>> {
        param.map(|weight| weight.cast(self.0))
    }
}

/// The mixer with normal weights, large enough for its gates to matter.
fn fresh(config: &MixerConfig) -> Mixer<Flex> {
    let mixer = config.init::<Flex>(D, &Default::default()).unwrap();
    materialize(&mixer);
    normal_by(7, 0.3, mixer)
}

/// The same normal numbers on any device.
fn noise<B: Backend>(seed: u64, dtype: DType, device: &B::Device) -> Tensor<B, 3> {
    let mut rng = Rng::new(seed);
    let numbers: Vec<f64> = (0..2 * TOKENS * D).map(|_| rng.normal() as f32 as f64).collect();
    upload(&numbers, [2, TOKENS, D], dtype, device)
}

/// Outputs and gradients of a mixer, each with its name.
type Found = Vec<(String, Vec<f64>)>;

/// Outputs of the whole sequence, then those of its pieces.
fn outputs<B: LinearAttentionBackend>(mixer: &Mixer<B>, x: Tensor<B, 3>) -> Found {
    let (whole, _) = mixer.forward(x.clone(), None);
    let (mut at, mut state, mut pieces) = (0, None, vec![]);
    for tokens in PIECES {
        let piece = x.clone().narrow(1, at, tokens);
        let (y, next) = match tokens {
            1 => {
                let (y, next) = mixer.step(piece.squeeze_dim(1), state);
                (y.unsqueeze_dim(1), next)
            }
            _ => mixer.forward(piece, state),
        };
        (at, state) = (at + tokens, Some(next));
        pieces.push(y);
    }
    let pieces = download(Tensor::cat(pieces, 1));
    vec![("whole".into(), download(whole)), ("in pieces".into(), pieces)]
}

/// Gradients of a weighted sum of the outputs by inputs and weights.
fn gradients<B: TrainBackend>(mixer: &Mixer<B>, x: Tensor<B, 3>, weights: Tensor<B, 3>) -> Found {
    let x = x.require_grad();
    let (y, _) = mixer.forward(x.clone(), None);
    let found = (y * weights).sum().backward();
    let own = ("the gradient by inputs".into(), download(x.grad(&found).unwrap()));
    let found = collect::<B, _>(mixer, &GradientsParams::from_grads(found, mixer));
    let named = found.into_iter().map(|(name, d)| (format!("the gradient by {name}"), d));
    std::iter::once(own).chain(named).collect()
}

/// Outputs and gradients of a mixer for a device, with the weights of `from`.
fn found<B: TrainBackend>(
    config: &MixerConfig,
    from: &Mixer<Flex>,
    dtype: DType,
    device: &B::Device,
) -> Found {
    let mut weights = Weights::default();
    from.visit(&mut weights);
    let there = config.init::<B::InnerBackend>(D, device).unwrap();
    materialize(&there);
    let mut found = outputs(&there.map(&mut weights.clone()), noise(11, dtype, device));
    let there = config.init::<B>(D, device).unwrap();
    materialize(&there);
    let [x, rows] = [11, 12].map(|seed| noise(seed, dtype, device));
    found.extend(gradients(&there.map(&mut weights), x, rows));
    found
}

/// Differences of a device from the processor beyond the rounding of f32, a line each.
fn differences<B: TrainBackend>(text: &str, device: &B::Device, limit: f64) -> String {
    let config = config(text);
    let narrow = fresh(&config);
    let here = Default::default();
    let rounded = found::<Autodiff<Flex>>(&config, &narrow, DType::F32, &here);
    let there = found::<B>(&config, &narrow, DType::F32, device);
    let wide = narrow.map(&mut Cast(DType::F64));
    let truth = found::<Autodiff<Flex>>(&config, &wide, DType::F64, &here);
    let mut said = String::new();
    for (((what, truth), (_, rounded)), (_, there)) in truth.iter().zip(&rounded).zip(&there) {
        let error = relative_error(truth, there);
        let usual = relative_error(truth, rounded);
        if error.is_nan() || error > limit.max(10.0 * usual) {
            said += &format!("{text}, {what}: {error:.1e} off, {usual:.1e} on the processor\n");
        }
    }
    said
}

/// The configs that `GPU_MIXERS` asks for.
fn asked() -> Vec<&'static str> {
    let (always, part) = match std::env::var("GPU_MIXERS").as_deref() {
        Ok("all") => (&[][..], (1, 1)),
        Ok(part) => {
            let (n, of) = part.split_once('/').expect("GPU_MIXERS is `all` or `n/of`");
            (&[][..], (n.parse().unwrap(), of.parse().unwrap()))
        }
        Err(_) => (&ALWAYS[..], (1, 32)),
    };
    let within = |n: &usize| n % part.1 + 1 == part.0 || always.contains(&MIXERS[*n]);
    (0..MIXERS.len()).filter(within).map(|n| MIXERS[n]).collect()
}

/// `limit` is of a config by itself; one whose f32 is worse on the processor too is held to that.
fn all_agree<B: TrainBackend>(device: &B::Device, limit: f64) {
    let list = asked();
    let failed: String = list
        .iter()
        .map(|text| {
            let run = AssertUnwindSafe(|| differences::<B>(text, device, limit));
            let said = catch_unwind(run).unwrap_or_else(|_| format!("{text}: panic\n"));
            println!("{text}: {} differences", said.lines().count());
            said
        })
        .collect();
    println!("{} configs, {} differences\n{failed}", list.len(), failed.lines().count());
    assert!(failed.is_empty(), "{failed}");
}

#[cfg(feature = "wgpu")]
#[test]
fn agree_with_the_processor_on_wgpu() {
    if let Some(device) = crate::support::wgpu() {
        all_agree::<Autodiff<burn::backend::Wgpu>>(&device, 1e-5);
    }
}

/// Burn multiplies f32 matrices in TF32 on CUDA.
#[cfg(feature = "cuda")]
#[test]
fn agree_with_the_processor_on_cuda() {
    if let Some(device) = crate::support::cuda() {
        all_agree::<Autodiff<burn::backend::Cuda>>(&device, 3e-2);
    }
}
