//! Queries, keys and values: a projection and a short convolution of each.
//! ```text
//! q, k, v = f(conv(x W))        f: SiLU, or nothing; heads of k and q of length 1 where asked for
//! q, k, v = h + conv(h)         of h = x W, in mixers with Canon layers
//! ```

use super::canon::CanonQkv;
use super::convolution::{ConvPast, ShortConvolution};
use super::layers::split_heads;
use super::mixer_input::MixerInput;
use super::projection::{
    Projected, Projection, TokenMemory, head_norm, project_input, project_token,
};
use super::{Kept, Linear};
use crate::ops::{Activation, HeadNorm, LinearAttentionBackend};
use burn::tensor::{Tensor, backend::Backend};

/// A projection, and its convolution where it has one.
type Convolved<'a, B> = (&'a Linear<B>, Option<&'a ShortConvolution<B>>);

/// The conv states of queries, keys and values.
const NAMES: [Kept; 3] = [Kept::Query, Kept::Key, Kept::Value];

/// Outputs of projections that a layer may lack.
pub(crate) type Optional<B, const M: usize> = [Option<Tensor<B, 3>>; M];

/// The layers that make queries, keys and values of one input.
pub(crate) struct ConvQkv<'a, B: Backend> {
    layers: [Convolved<'a, B>; 3],
    /// Of queries, of keys, of values.
    heads: [usize; 3],
    activations: [Option<Activation>; 3],
    norms: [Option<HeadNorm>; 3],
    canon: Option<&'a CanonQkv<B>>,
}

/// Queries, keys and values, `[B, T, heads, X]` each.
pub(crate) struct Qkv<B: Backend> {
    pub(crate) q: Tensor<B, 4>,
    pub(crate) k: Tensor<B, 4>,
    pub(crate) v: Tensor<B, 4>,
}

impl<'a, B: Backend> ConvQkv<'a, B> {
    /// Projections alone, of so many heads of queries, of keys and of values.
    pub(crate) fn plain(projections: [&'a Linear<B>; 3], heads: [usize; 3]) -> Self {
        Self {
            layers: projections.map(|linear| (linear, None)),
            heads,
            activations: [None; 3],
            norms: [None; 3],
            canon: None,
        }
    }

    /// Canon layers after it all, where there are any.
    pub(crate) fn canon(self, canon: &'a Option<CanonQkv<B>>) -> Self {
        Self { canon: canon.as_ref(), ..self }
    }

    /// Projections with their convolutions, which SiLU follows; a projection without one is left as it is.
    pub(crate) fn convolved(
        projections: [&'a Linear<B>; 3],
        convolutions: [&'a Option<ShortConvolution<B>>; 3],
        heads: [usize; 3],
    ) -> Self {
        let [q, k, v] = convolutions.map(Option::as_ref);
        let [of_q, of_k, of_v] = projections;
        Self {
            layers: [(of_q, q), (of_k, k), (of_v, v)],
            activations: [q, k, v].map(|convolution| convolution.map(|_| Activation::Silu)),
            ..Self::plain(projections, heads)
        }
    }

    /// Activations in the place of the usual ones.
    pub(crate) fn activated(self, activations: [Option<Activation>; 3]) -> Self {
        Self { activations, ..self }
    }

    /// SiLU also where there is no convolution.
    pub(crate) fn silu(self) -> Self {
        self.activated([Some(Activation::Silu); 3])
    }

    /// Heads of queries of length `q`, those of keys of length 1.
    pub(crate) fn unit(self, q: f64) -> Self {
        let norm = |i: usize, factor| head_norm(self.width(i), self.heads[i], factor);
        Self { norms: [norm(0, q), norm(1, 1.0), None], ..self }
    }

    /// Heads of keys of length 1 and those of queries of length K^-1/2, the scale that scores have by
    /// custom.
    pub(crate) fn scaled(self) -> Self {
        let scale = ((self.width(0) / self.heads[0]) as f64).powf(-0.5);
        self.unit(scale)
    }

    /// Heads of queries of length K^-1/2, keys as they are.
    pub(crate) fn scaled_queries(self) -> Self {
        let scaled = self.scaled();
        Self { norms: [scaled.norms[0], None, None], ..scaled }
    }

    /// Heads of queries of length 1, keys as they are.
    pub(crate) fn unit_queries(self) -> Self {
        let norm = head_norm(self.width(0), self.heads[0], 1.0);
        Self { norms: [norm, None, None], ..self }
    }

    /// Columns of queries, keys or values.
    fn width(&self, i: usize) -> usize {
        self.layers[i].0.weight.dims()[1]
    }
}

impl<'a, B: LinearAttentionBackend> ConvQkv<'a, B> {
    /// Of `x`, `[B, T, D]`; and its other projections, `gates`, `[B, T, width]` each.
    pub(crate) fn project<const N: usize>(
        self,
        x: &Tensor<B, 3>,
        gates: [Projection<'a, B>; N],
        conv_states: &mut ConvPast<B>,
    ) -> (Qkv<B>, [Tensor<B, 3>; N]) {
        let (qkv, gates, []) = self.project_some(x, gates, [], conv_states);
        (qkv, gates)
    }

    /// As [`project`](Self::project), with `optional` projections where they are there.
    pub(crate) fn project_some<const N: usize, const M: usize>(
        self,
        x: &Tensor<B, 3>,
        gates: [Projection<'a, B>; N],
        optional: [Option<Projection<'a, B>>; M],
        conv_states: &mut ConvPast<B>,
    ) -> (Qkv<B>, [Tensor<B, 3>; N], Optional<B, M>) {
        self.project_input(&mut MixerInput::of(x.clone()), gates, optional, conv_states)
    }

    /// As [`project_some`](Self::project_some), of an input whose norm may be still to come.
    pub(crate) fn project_input<const N: usize, const M: usize>(
        self,
        x: &mut MixerInput<'_, B>,
        gates: [Projection<'a, B>; N],
        optional: [Option<Projection<'a, B>>; M],
        conv_states: &mut ConvPast<B>,
    ) -> (Qkv<B>, [Tensor<B, 3>; N], Optional<B, M>) {
        let (all, there, rest) = self.in_order(gates, optional);
        rest.of_outputs(project_input(x, all, conv_states), there, conv_states)
    }

    /// As [`project_input`](Self::project_input). `memory` is there where it takes queries, keys, values, beta and a log decay
    /// as these projections make them; what it answers to a token is then in the same launch, if the backend has one.
    pub(crate) fn answer<const M: usize>(
        self,
        x: &mut MixerInput<'_, B>,
        optional: [Option<Projection<'a, B>>; M],
        memory: Option<&Option<Tensor<B, 4>>>,
        conv_states: &mut ConvPast<B>,
    ) -> Projected<B, (Qkv<B>, Optional<B, M>)> {
        let [_, key_heads, heads] = self.heads;
        let memory = match self.canon {
            None => memory.map(|state| TokenMemory { key_heads, heads, state: state.clone() }),
            Some(_) => None,
        };
        let (all, there, rest) = self.in_order([], optional);
        project_token(x, all, memory, conv_states).map(|outputs| {
            let (qkv, [], optional) = rest.of_outputs(outputs, there, conv_states);
            (qkv, optional)
        })
    }

    /// All projections, which optional ones are there, and what is to be done behind them.
    fn in_order<const N: usize, const M: usize>(
        self,
        gates: [Projection<'a, B>; N],
        optional: [Option<Projection<'a, B>>; M],
    ) -> (Vec<Projection<'a, B>>, [bool; M], Rest<'a, B>) {
        let Self { layers, heads, activations, norms, canon } = self;
        let of = |i: usize| {
            let (linear, convolution) = layers[i];
            let convolution = convolution.map(|convolution| (NAMES[i], convolution));
            Projection::convolved(linear, convolution, activations[i], norms[i])
        };
        let there = optional.each_ref().map(Option::is_some);
        let all = (0..3).map(of).chain(gates).chain(optional.into_iter().flatten()).collect();
        (all, there, Rest { heads, canon })
    }
}

/// Heads and Canon layers of queries, keys and values, behind their projections.
struct Rest<'a, B: Backend> {
    heads: [usize; 3],
    canon: Option<&'a CanonQkv<B>>,
}

impl<B: LinearAttentionBackend> Rest<'_, B> {
    /// Queries, keys and values, gates, and optional outputs that are `there`, of all projections' outputs in order.
    fn of_outputs<const N: usize, const M: usize>(
        &self,
        outputs: Vec<Tensor<B, 3>>,
        there: [bool; M],
        conv_states: &mut ConvPast<B>,
    ) -> (Qkv<B>, [Tensor<B, 3>; N], Optional<B, M>) {
        let mut outputs = outputs.into_iter();
        let mut next = || outputs.next().expect("an output for each projection");
        let qkv: [Tensor<B, 3>; 3] = std::array::from_fn(|_| next());
        let gates = std::array::from_fn(|_| next());
        let optional = there.map(|there| there.then(&mut next));
        let [q, k, v] = match self.canon {
            Some(canon) => canon.forward(qkv, conv_states),
            None => qkv,
        };
        let [of_q, of_k, of_v] = self.heads;
        let qkv = Qkv { q: split_heads(q, of_q), k: split_heads(k, of_k), v: split_heads(v, of_v) };
        (qkv, gates, optional)
    }
}

#[cfg(all(test, feature = "cpu"))]
#[path = "conv_qkv_tests.rs"]
mod tests;
