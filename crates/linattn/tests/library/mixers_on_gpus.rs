//! Every mixer on a GPU, beside the same weights on the processor: whole sequences, pieces and single tokens.
//!
//! `cargo test` takes a few configs, since a GPU compiles each for seconds; `GPU_MIXERS=all` takes all of them, and
//! `GPU_MIXERS=3/8` the third eighth.

use crate::call::{download, upload};
use crate::layers::{D, MIXERS, config};
use crate::support::normal_by;
use crate::weights::Weights;
use burn::backend::Flex;
use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{DType, Tensor, backend::Backend};
use linattn::nn::materialize;
use linattn::nn::mixers::{Mixer, MixerConfig};
use linattn::ops::LinearAttentionBackend;
use linattn_oracle::{Rng, relative_error};
use std::panic::{AssertUnwindSafe, catch_unwind};

const TOKENS: usize = 14;
/// The same tokens, as a device gets them from a prompt and then one by one.
const PIECES: [usize; 5] = [5, 6, 1, 1, 1];

/// Configs that are tried whatever part is: block-diagonal layers, windows of one token, padded values.
const ALWAYS: [&str; 3] = [
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

/// Outputs of the whole sequence, then those of its pieces.
fn outputs<B: LinearAttentionBackend>(
    mixer: &Mixer<B>,
    dtype: DType,
    device: &B::Device,
) -> [Vec<f64>; 2] {
    let mut rng = Rng::new(11);
    let numbers: Vec<f64> = (0..2 * TOKENS * D).map(|_| rng.normal() as f32 as f64).collect();
    let x: Tensor<B, 3> = upload(&numbers, [2, TOKENS, D], dtype, device);
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
    [download(whole), download(Tensor::cat(pieces, 1))]
}

/// Outputs of a device that differ from the processor's beyond the rounding of f32, a line each.
fn differences<B: LinearAttentionBackend>(text: &str, device: &B::Device, limit: f64) -> String {
    let config = config(text);
    let narrow = fresh(&config);
    let mut weights = Weights::default();
    narrow.visit(&mut weights);
    let there = config.init::<B>(D, device).unwrap();
    materialize(&there);
    let there = there.map(&mut weights);
    let here = Default::default();
    let rounded = outputs(&narrow, DType::F32, &here);
    let truth = outputs(&narrow.map(&mut Cast(DType::F64)), DType::F64, &here);
    let found = outputs(&there, DType::F32, device);
    let mut said = String::new();
    for (n, what) in ["whole", "in pieces"].into_iter().enumerate() {
        let error = relative_error(&truth[n], &found[n]);
        let usual = relative_error(&truth[n], &rounded[n]);
        if error.is_nan() || error > limit.max(10.0 * usual) {
            said += &format!("{text}, {what}: {error:.1e} off, {usual:.1e} on the processor\n");
        }
    }
    said
}

/// The configs that `GPU_MIXERS` asks for.
fn asked() -> Vec<&'static str> {
    let part = match std::env::var("GPU_MIXERS").as_deref() {
        Ok("all") => (1, 1),
        Ok(part) => {
            let (n, of) = part.split_once('/').expect("GPU_MIXERS is `all` or `n/of`");
            (n.parse().unwrap(), of.parse().unwrap())
        }
        Err(_) => (1, 16),
    };
    let within = |n: &usize| n % part.1 + 1 == part.0 || ALWAYS.contains(&MIXERS[*n]);
    (0..MIXERS.len()).filter(within).map(|n| MIXERS[n]).collect()
}

/// `limit` is of a config by itself; one whose f32 is worse on the processor too is held to that.
fn all_agree<B: LinearAttentionBackend>(device: &B::Device, limit: f64) {
    let list = asked();
    let failed: String = list
        .iter()
        .map(|text| {
            let run = AssertUnwindSafe(|| differences::<B>(text, device, limit));
            catch_unwind(run).unwrap_or_else(|_| format!("{text}: panic\n"))
        })
        .collect();
    println!("{} configs, {} outputs differ\n{failed}", list.len(), failed.lines().count());
    assert!(failed.is_empty(), "{failed}");
}

#[cfg(feature = "wgpu")]
#[test]
fn agree_with_the_processor_on_wgpu() {
    if let Some(device) = crate::support::wgpu() {
        all_agree::<burn::backend::Wgpu>(&device, 1e-5);
    }
}

/// Burn multiplies f32 matrices in TF32 on CUDA.
#[cfg(feature = "cuda")]
#[test]
fn agree_with_the_processor_on_cuda() {
    if let Some(device) = crate::support::cuda() {
        all_agree::<burn::backend::Cuda>(&device, 3e-2);
    }
}
