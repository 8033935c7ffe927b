//! Buffers of the stages by name, as the kernels get them and as a forward pass saves them for the backward pass.

use crate::buffer::{Buffer, array, whole};
use crate::chunkwise::arguments::{IntraChunkOutLaunch, StatePassLaunch};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Shape of a buffer that is neither read nor written.
pub(crate) const UNUSED: [usize; 1] = [16];

/// Matrices that the intra-chunk stage leaves, by the names of [`IntraChunkOut`](super::arguments::IntraChunkOut).
pub(crate) struct Scores<T> {
    pub a_qk: T,
    pub a_qb: T,
    pub inverse: T,
    pub a_ak: T,
    pub a_ak_v: T,
    pub decay_factors: T,
    pub q: T,
    pub a: T,
    pub b: T,
    pub k: T,
    pub chunk_decay: T,
}

impl<T> Scores<T> {
    pub fn map<U>(self, mut f: impl FnMut(T) -> U) -> Scores<U> {
        Scores {
            a_qk: f(self.a_qk),
            a_qb: f(self.a_qb),
            inverse: f(self.inverse),
            a_ak: f(self.a_ak),
            a_ak_v: f(self.a_ak_v),
            decay_factors: f(self.decay_factors),
            q: f(self.q),
            a: f(self.a),
            b: f(self.b),
            k: f(self.k),
            chunk_decay: f(self.chunk_decay),
        }
    }
}

impl Scores<Buffer> {
    pub fn handles(&self) -> Scores<Handle> {
        let of = |buffer: &Buffer| buffer.handle.clone();
        Scores {
            a_qk: of(&self.a_qk),
            a_qb: of(&self.a_qb),
            inverse: of(&self.inverse),
            a_ak: of(&self.a_ak),
            a_ak_v: of(&self.a_ak_v),
            decay_factors: of(&self.decay_factors),
            q: of(&self.q),
            a: of(&self.a),
            b: of(&self.b),
            k: of(&self.k),
            chunk_decay: of(&self.chunk_decay),
        }
    }

    /// As the intra-chunk stage writes them.
    pub fn written<E: Float, M: Size, R: Runtime>(&self) -> IntraChunkOutLaunch<E, M, R> {
        IntraChunkOutLaunch::new(
            whole(&self.a_qk),
            whole(&self.a_qb),
            whole(&self.inverse),
            whole(&self.a_ak),
            whole(&self.a_ak_v),
            whole(&self.decay_factors),
            whole(&self.q),
            whole(&self.a),
            whole(&self.b),
            whole(&self.k),
            whole(&self.chunk_decay),
        )
    }
}

/// Tensors that a forward pass leaves for the backward pass.
pub(crate) struct Saved<T> {
    pub scores: Scores<T>,
    /// S of every chunk.
    pub states: T,
    /// U.
    pub block: T,
    /// M of every segment.
    pub transitions: T,
}

impl Saved<Buffer> {
    /// As a list, which [`Saved::restore`] reads.
    pub fn save(self) -> Vec<Buffer> {
        let mut list = vec![];
        self.scores.map(|buffer| list.push(buffer));
        list.extend([self.states, self.block, self.transitions]);
        list
    }
}

impl Saved<Handle> {
    /// # Panics
    /// If the list is not one that [`Saved::save`] gave.
    pub fn restore(list: &[Handle]) -> Self {
        let mut list = list.iter().cloned();
        let mut next = || list.next().expect("a forward pass saved it");
        let names = [(); 11].map(|()| next());
        let [a_qk, a_qb, inverse, a_ak, a_ak_v, decay_factors, q, a, b, k, chunk_decay] = names;
        Self {
            scores: Scores {
                a_qk,
                a_qb,
                inverse,
                a_ak,
                a_ak_v,
                decay_factors,
                q,
                a,
                b,
                k,
                chunk_decay,
            },
            states: next(),
            block: next(),
            transitions: next(),
        }
    }
}

/// Buffers of one launch of the state pass.
pub(crate) struct PassBuffers<'a> {
    /// The first state, if one is given.
    pub start: Option<(&'a Handle, usize)>,
    pub end: &'a Buffer,
    /// States and blocks.
    pub saved: [&'a Buffer; 2],
    pub transitions: &'a Buffer,
    /// o or dv.
    pub out: &'a Buffer,
}

impl PassBuffers<'_> {
    pub fn launch<E: Float, W: Size, R: Runtime>(&self) -> StatePassLaunch<E, W, R> {
        let (start, numbers) = self.start.unwrap_or((&self.end.handle, self.end.len()));
        let [states, block] = self.saved;
        StatePassLaunch::new(
            array(start, numbers),
            whole(self.end),
            whole(states),
            whole(block),
            whole(self.transitions),
        )
    }
}

/// Gradients that the state pass backward leaves.
pub(crate) struct PassGradients {
    /// dv of identity and low rank transitions.
    pub v: Buffer,
    /// dS of the start.
    pub start: Buffer,
    /// dS at the end of every chunk.
    pub states: Buffer,
    /// R.
    pub block: Buffer,
}

pub(crate) struct GradientBuffers {
    pub q: Buffer,
    pub k: Buffer,
    pub a: Buffer,
    pub b: Buffer,
    pub v: Buffer,
    pub g: Buffer,
    pub beta: Buffer,
}
