//! Layers: mixers, and what turns them into a language model.
//!
//! Every config is plain data that serde reads, refuses unknown keys, and checks itself in `init`
//! before anything is allocated. Every layer has `forward` over whole sequences and `step` over one
//! token; both take the state so far (`None` at the start) and give the next, and agree with each
//! other wherever a sequence is cut.

mod adapted;
mod auto_encoder;
mod block;
mod canon;
mod conv_qkv;
mod convolution;
mod delta_keys;
mod denominator;
mod diagonal_ssm;
mod erased;
mod exponential_gates;
mod fast_weights;
mod features;
mod fenwick;
mod gated_output;
mod hippo;
mod key_preconditioner;
mod layer_list;
mod layers;
mod lengths;
mod log_decay;
mod long_filter;
mod lora;
mod mixer_input;
pub mod mixers;
mod mlp;
mod model;
mod muon;
mod omega_memory;
mod pair_sums;
mod parameter;
mod projection;
mod recomputed;
mod recurrence;
mod reflections;
mod residual;
mod rope;
mod score_bias;
mod shared;
mod softmax;
mod sources;
mod start;
pub(crate) mod state;
mod swiglu_memory;
mod trapezoid;
mod varlen;
mod weight;

pub use auto_encoder::Decoder;
pub use block::{Block, BlockState, LayerConfig};
pub use canon::{Canon, CanonConfig, CanonQkv};
pub use convolution::ShortConvolution;
pub use delta_keys::{QkActivation, QkNorm};
pub use erased::Erased;
pub use features::{FeatureMap, Features};
pub use key_preconditioner::KeyPreconditioner;
pub use layer_list::{LayerEntry, LayerGroup};
pub use layers::{
    BlockDiagonal, FinalNormKind, GatedRmsNorm, InitializerKind, Linear, Norm, NormKind,
    ResidualLinear, ScaledLinear, ZeroCenteredRmsNorm, l2_normalize,
};
pub use lengths::LengthsError;
pub use lora::{Adapter, LoraConfig, LowRankAdapter};
pub use mixer_input::MixerInput;
pub use mlp::{
    GeluMlp, GeluMlpConfig, Mlp, MlpConfig, Rwkv6Mlp, Rwkv7Mlp, Rwkv7MlpConfig, SwiGlu,
    SwiGluConfig,
};
pub use model::{HeadKind, LanguageModel, LanguageModelConfig, LanguageModelState, materialize};
pub use parameter::ParamKind;
pub use rope::Rope;
pub use shared::Shared;
pub use state::{
    Kept, KeptTensors, NetworkMemory, NetworkState, RecurrentState, StateError, StateTensors,
    VectorState, state_file,
};
pub use weight::Weight;

use std::fmt::Display;

/// A config that no layer can be built from. Nothing was allocated.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("`{key}` is {got}; it has to be {want}")]
pub struct ConfigError {
    /// The key, with the tables it stands in.
    pub key: String,
    /// Its value.
    pub got: String,
    /// The values that would be accepted.
    pub want: String,
}

impl ConfigError {
    /// `key` is `got`, and has to be `want`.
    pub fn new(key: impl Display, got: impl Display, want: impl Display) -> Self {
        Self { key: key.to_string(), got: got.to_string(), want: want.to_string() }
    }

    /// The same error, its key inside `table`.
    #[must_use]
    pub fn within(mut self, table: impl Display) -> Self {
        self.key = format!("{table}.{}", self.key);
        self
    }
}

/// Cost of a layer, for one sequence.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Cost {
    /// Bytes that have to be kept between two steps, in f32, after `length` tokens.
    pub state_bytes: u64,
    /// Floating-point operations of a forward pass over one token: a multiplication and an addition
    /// are two.
    pub flops_per_token: u64,
}

impl std::ops::AddAssign for Cost {
    fn add_assign(&mut self, other: Self) {
        self.state_bytes += other.state_bytes;
        self.flops_per_token += other.flops_per_token;
    }
}

/// Whether a key of a config has the value that it has when left out, and is left out again.
pub(crate) fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// Larger sizes are slips of the pen, and their products would not fit the counts of a cost.
pub(crate) const LARGEST: usize = 1 << 20;

/// `value` if it is at least 1, and no slip of the pen.
pub(crate) fn positive(key: &str, value: usize) -> Result<usize, ConfigError> {
    match value {
        0 => Err(ConfigError::new(key, 0, "at least 1")),
        1..=LARGEST => Ok(value),
        value => Err(ConfigError::new(key, value, format!("at most {LARGEST}"))),
    }
}

/// Tokens that a layer may solve for together.
const CHUNKS: [usize; 8] = [1, 2, 4, 8, 16, 32, 64, 128];
/// Of these the number that suits most sizes.
pub(crate) const DEFAULT_CHUNK: usize = 64;

/// A number of tokens to solve for together.
pub(crate) fn check_chunk(chunk: usize) -> Result<usize, ConfigError> {
    match CHUNKS.contains(&chunk) {
        true => Ok(chunk),
        false => Err(ConfigError::new("chunk", chunk, format!("one of {CHUNKS:?}"))),
    }
}
