//! The places of a state, and the engine of each.

use super::StateEngine;
use super::registers::InRegisters;
use super::shared::InSharedMemory;
use cubecl::prelude::*;

/// The place of a state.
pub(crate) trait StatePlace: Send + Sync + 'static {
    /// The engine of these types there.
    type Engine<F: Float, E: Float, G: Size, N: Size, M: Size, W: Size>: StateEngine<F = F, E = E, G = G, N = N, M = M, W = W>;
}

/// In registers.
pub(crate) struct RegisterState;

/// In shared memory.
pub(crate) struct SharedMemoryState;

impl StatePlace for RegisterState {
    type Engine<F: Float, E: Float, G: Size, N: Size, M: Size, W: Size> =
        InRegisters<F, E, G, N, M, W>;
}

impl StatePlace for SharedMemoryState {
    type Engine<F: Float, E: Float, G: Size, N: Size, M: Size, W: Size> =
        InSharedMemory<F, E, G, N, M, W>;
}
