//! Arguments of the kernels: groups of tensors that one stage writes and the next ones read.
//!
//! ```text
//! Operands        all stages          q, k, v, a, b, g, beta
//! IntraChunkOut   intra-chunk, out    A_qk, T, decay factors, ..
//! IntraChunk      state pass, in      the same
//! StatePass       state pass, out     S of every chunk, U or R, last state
//! SavedTensors    gradients, in       S, dS, U, R, dO
//! RowPairs        gradients, in       q, k, a, b again, two numbers a vector
//! Gradients       gradients, out      dq, dk, da, db, dv, dg, dbeta
//! ```

use cubecl::prelude::*;
use std::marker::PhantomData;

/// Types of a stage outside the state pass.
pub(crate) trait StageTypes: Send + Sync + 'static {
    /// Numbers of the operation's tensors.
    type F: Float;
    /// Numbers of keys and of scores in tiles.
    type X: Float;
    /// Numbers between stages.
    type E: Float;
    /// Width of a vector that is loaded.
    type G: Size;
    /// Width of a vector in a tile that is loaded, but for the next.
    type N: Size;
    /// Width of a vector in a tile of products.
    type M: Size;
    /// Input gradients: width of a vector in a tile of values or of a state, whose numbers are those between stages.
    type L: Size;
    /// Width of a vector of a tensor whose rows lie as accumulators do.
    type T: Size;
    /// Width of a vector that is written.
    type W: Size;
}

/// These types.
pub(crate) struct Types<F, X, E, G, N, M, L, T, W>(
    PhantomData<(F, X, E)>,
    PhantomData<(G, N, M, L, T, W)>,
);

impl<F, X, E, G, N, M, L, T, W> StageTypes for Types<F, X, E, G, N, M, L, T, W>
where
    F: Float,
    X: Float,
    E: Float,
    G: Size,
    N: Size,
    M: Size,
    L: Size,
    T: Size,
    W: Size,
{
    type F = F;
    type X = X;
    type E = E;
    type G = G;
    type N = N;
    type M = M;
    type L = L;
    type T = T;
    type W = W;
}

/// Tensors of the operation, as the kernels see them.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Operands<F: Float, G: Size> {
    pub q: Array<Vector<F, G>>,
    pub k: Array<Vector<F, G>>,
    /// The erase rows of a delta rule, or a.
    pub a: Array<Vector<F, G>>,
    pub b: Array<Vector<F, G>>,
    pub v: Array<Vector<F, G>>,
    /// Scalar decay: g, `[B, T, H]`.
    pub scalar_g: Array<f32>,
    /// Vector decay: g, `[B, T, H, K]`.
    pub vector_g: Array<f32>,
    pub beta: Array<f32>,
}

/// Outputs of the intra-chunk stage; two numbers a vector around a state pass on [`Mma`](crate::Engine::Mma).
#[derive(CubeType, CubeLaunch)]
pub(crate) struct IntraChunkOut<E: Float, T: Size> {
    pub a_qk: Array<Vector<E, T>>,
    pub a_qb: Array<Vector<E, T>>,
    pub inverse: Array<Vector<E, T>>,
    pub a_ak: Array<Vector<E, T>>,
    pub a_ak_v: Array<Vector<E, T>>,
    pub decay_factors: Array<f32>,
    /// Vector decay: q e^G, a e^G, b e^{G_C - G}, k e^{G_C - G}; `[B, T, H, K]`.
    pub q: Array<Vector<E, T>>,
    pub a: Array<Vector<E, T>>,
    pub b: Array<Vector<E, T>>,
    pub k: Array<Vector<E, T>>,
    /// Vector decay: e^{G_C}, `[B, H, chunks, K]`.
    pub chunk_decay: Array<f32>,
}

/// [`IntraChunkOut`], as the state pass reads it.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct IntraChunk<E: Float, G: Size> {
    pub a_qk: Array<Vector<E, G>>,
    pub a_qb: Array<Vector<E, G>>,
    pub inverse: Array<Vector<E, G>>,
    pub a_ak: Array<Vector<E, G>>,
    pub a_ak_v: Array<Vector<E, G>>,
    pub decay_factors: Array<f32>,
    pub q: Array<Vector<E, G>>,
    pub a: Array<Vector<E, G>>,
    pub b: Array<Vector<E, G>>,
    pub k: Array<Vector<E, G>>,
    pub chunk_decay: Array<f32>,
}

/// States and saved tensors of a pass.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct StatePass<E: Float, W: Size> {
    /// First state, `[B, H, K, V]`; of segments, one each, `[B, H, P, K, V]`.
    pub start: Array<f32>,
    /// Last state, `[B, H, K, V]`; in a local pass, the segments' first states.
    pub end: Array<f32>,
    /// [V, K] at the start of every chunk (forward), at its end (backward).
    pub states: Array<Vector<E, W>>,
    /// U or R, `[B, T, H, V]`.
    pub block: Array<Vector<E, W>>,
    /// Local passes: M^T and, if it is saved, M, each `[B, H, P, K, K]`; where nothing is solved its
    /// diagonal, `[B, H, P]` or `[B, H, P, K]`.
    pub transitions: Array<f32>,
}

/// Saved tensors of the state passes, and the gradient of the outputs.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct SavedTensors<F: Float, E: Float, G: Size> {
    pub d_o: Array<Vector<F, G>>,
    /// U, `[B, T, H, V]`; not read in an identity transition.
    pub u: Array<Vector<E, G>>,
    /// R, `[B, T, H, V]`; not read in an identity transition.
    pub r: Array<Vector<E, G>>,
    /// [V, K] at the start of every chunk.
    pub states: Array<Vector<E, G>>,
    /// Gradients of the states at the end of every chunk.
    pub d_states: Array<Vector<E, G>>,
}

/// Rows again, two numbers a vector around a state pass on [`Mma`](crate::Engine::Mma).
#[derive(CubeType, CubeLaunch)]
pub(crate) struct RowPairs<F: Float, T: Size> {
    pub q: Array<Vector<F, T>>,
    pub k: Array<Vector<F, T>>,
    pub a: Array<Vector<F, T>>,
    pub b: Array<Vector<F, T>>,
}

/// Outputs of the input gradients: all `[B, T, H, ..]`, key heads not yet summed up.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Gradients<F: Float, G: Size, W: Size> {
    pub q: Array<Vector<F, W>>,
    pub k: Array<Vector<F, W>>,
    pub a: Array<Vector<F, W>>,
    pub b: Array<Vector<F, W>>,
    pub v: Array<Vector<F, G>>,
    /// dg of a scalar or vector decay.
    pub g: Array<f32>,
    pub beta: Array<f32>,
}
