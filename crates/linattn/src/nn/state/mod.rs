//! States as named tensors: how any of them is written to a file, joined with others along the batch,
//! and taken apart.
//! ```text
//! layers.3.mixer.memory            [B, H, K, V]      what a layer's mixer keeps, by the name of its field
//! layers.3.mixer.memory.start.0    [B, H, from, to]  lists by number
//! layers.3.mixer.conv_states.q     [B, W - 1, C]     tensors of a kind by what they are: see [`Kept`]
//! layers.3.conv_states.canon_mlp   [B, W - 1, D]     those of the layer and its MLP
//! tokens                           [T]               ids of a text in the making, where the file has one
//! ```
//! A file is safetensors, its numbers f32 (f64 where the state is), so that f32 comes back to the last
//! bit. Its metadata has the key `linattn_state`: JSON with the kind of each layer's state, the tokens
//! that it has seen, and a CRC-32 of the rest of the file. Reading takes no more memory than the file,
//! the state and one tensor of it once more.

mod file;
mod kept;
mod memories;
mod model;
mod tensors;

pub use file::state_file;
pub(crate) use file::{TextHeader, read, write};
pub use kept::{Kept, KeptTensors};
pub use memories::{NetworkMemory, NetworkState, VectorState};
pub(crate) use tensors::CONV_STATES;
pub use tensors::{RecurrentState, StateTensors};

use std::path::PathBuf;

/// Why a state cannot be read, written, or put beside another.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StateError {
    /// A file that holds no state, or cannot be read.
    #[error("can't read a state from {path}: {why}")]
    Read {
        /// The file.
        path: PathBuf,
        /// The fault.
        why: String,
    },
    /// A file that cannot be written.
    #[error("can't write a state to {path}: {why}")]
    Write {
        /// The file.
        path: PathBuf,
        /// The fault.
        why: String,
    },
    /// A state of more layers, or fewer.
    #[error("the state has {got} layers; it has to have {want}, as the model has")]
    Layers {
        /// Layers of the state.
        got: usize,
        /// Layers that would do.
        want: usize,
    },
    /// A state of other learnt positions.
    #[error("the state's position is {got}; it has to be {want}")]
    Position {
        /// Tokens that it has seen, where the model has learnt positions.
        got: String,
        /// Values that would be accepted.
        want: String,
    },
    /// A layer whose state does not fit.
    #[error("layer {layer} of the state: `{tensor}` is {got}; it has to be {want}")]
    Layer {
        /// Which layer, from 0.
        layer: usize,
        /// Its tensor, or what else of it.
        tensor: String,
        /// The state that was given.
        got: String,
        /// The state that would be accepted.
        want: String,
    },
}

impl StateError {
    pub(super) fn layer(
        layer: usize,
        tensor: impl Into<String>,
        got: impl Into<String>,
        want: impl Into<String>,
    ) -> Self {
        Self::Layer { layer, tensor: tensor.into(), got: got.into(), want: want.into() }
    }
}
