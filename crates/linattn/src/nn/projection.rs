//! Projections that read one input: the queries, keys, values and gates of a mixer.

use super::Linear;
use super::convolution::ShortConvolution;
use crate::ops::{
    self, Activation, Column, ColumnKind, ConvSplit, HeadNorm, LinearAttentionBackend,
};
use burn::module::Param;
use burn::tensor::{Tensor, TensorPrimitive, backend::Backend, ops::FloatTensor};

/// A projection, its short convolution where it has one, and the treatment of its columns.
pub(crate) struct Projection<'a, B: Backend> {
    pub(crate) linear: &'a Linear<B>,
    pub(crate) convolution: Option<&'a ShortConvolution<B>>,
    pub(crate) kind: ColumnKind,
}

impl<'a, B: Backend> Projection<'a, B> {
    /// SiLU after the convolution, or after the projection alone.
    pub(crate) fn silu(
        linear: &'a Linear<B>,
        convolution: &'a Option<ShortConvolution<B>>,
        norm: Option<HeadNorm>,
    ) -> Self {
        let kind = ColumnKind::Conv { activation: Some(Activation::Silu), norm };
        Self { linear, convolution: convolution.as_ref(), kind }
    }

    /// Columns that no convolution sees.
    pub(crate) fn plain(linear: &'a Linear<B>, kind: ColumnKind) -> Self {
        Self { linear, convolution: None, kind }
    }

    fn width(&self) -> usize {
        self.linear.weight.dims()[1]
    }

    fn column(&self) -> Column {
        Column { width: self.width(), kind: self.kind }
    }

    fn is_convolved(&self) -> bool {
        matches!(self.kind, ColumnKind::Conv { .. })
    }
}

/// Columns of a packed projection are a multiple of this: matrix products read and write 16 bytes at once.
const ALIGNED: usize = 8;

/// Rows of one head, of length `factor`.
pub(crate) fn head_norm(columns: usize, heads: usize, factor: f64) -> Option<HeadNorm> {
    Some(HeadNorm { width: columns / heads, factor })
}

/// ln A and the bias of step sizes, which a log decay goes by.
pub(crate) struct DecayParams<'a, B: Backend> {
    pub(crate) a_log: &'a Param<Tensor<B, 1>>,
    pub(crate) dt_bias: &'a Param<Tensor<B, 1>>,
}

/// The projections of `x`, `[B, T, D]`, each through its convolution and treatment: `[B, T, width]` each.
/// Tails of convolutions come from `before`, the next ones go to `tails`, in the order of `projections`.
///
/// Over several tokens the projections are one product and one operation after it, if all convolutions have
/// one window. A single token goes through each projection by itself: packing would read all weights
/// twice.
pub(crate) fn project<B: LinearAttentionBackend>(
    x: &Tensor<B, 3>,
    projections: &[Projection<'_, B>],
    decay: Option<&DecayParams<'_, B>>,
    before: &mut impl Iterator<Item = Tensor<B, 3>>,
    tails: &mut Vec<Tensor<B, 3>>,
) -> Vec<Tensor<B, 3>> {
    let parts: Vec<(Column, Option<Tensor<B, 3>>)> = projections
        .iter()
        .map(|p| (p.column(), p.convolution.and_then(|_| before.next())))
        .collect();
    match x.dims()[1] > 1 && can_pack(projections) {
        true => packed(x, projections, decay, parts, tails),
        false => one_by_one(x, projections, decay, parts, tails),
    }
}

/// Convolved columns come first, and all of them have a convolution of one window, or none has.
fn can_pack<B: Backend>(projections: &[Projection<'_, B>]) -> bool {
    let convolved = projections.iter().take_while(|p| p.is_convolved()).count();
    let window = |p: &Projection<'_, B>| p.convolution.map(|c| c.weight.dims()[0]);
    let first = projections.first().and_then(window);
    projections.len() <= ops::MOST_PACKED
        && projections[convolved..].iter().all(|p| !p.is_convolved())
        && projections[..convolved].iter().all(|p| window(p) == first)
        && projections.iter().all(|p| p.linear.bias.is_none())
        && projections.iter().all(|p| p.convolution.is_none_or(|c| c.bias.is_none()))
}

type Part<B> = (Column, Option<Tensor<B, 3>>);

fn packed<B: LinearAttentionBackend>(
    x: &Tensor<B, 3>,
    projections: &[Projection<'_, B>],
    decay: Option<&DecayParams<'_, B>>,
    parts: Vec<Part<B>>,
    tails: &mut Vec<Tensor<B, 3>>,
) -> Vec<Tensor<B, 3>> {
    let weights = projections.iter().map(|p| p.linear.weight.val()).collect();
    let width: usize = projections.iter().map(Projection::width).sum();
    let padding = width.next_multiple_of(ALIGNED) - width;
    let weight = ops::pack(weights, padding, x.dtype());
    let y = ops::affine(x.clone(), weight, None).expect("every projection reads `x`");
    let convolutions: Vec<_> = projections.iter().filter_map(|p| p.convolution).collect();
    let taps: Vec<_> = convolutions.iter().map(|c| c.weight.val()).collect();
    let mut columns: Vec<Column> = parts.iter().map(|(column, _)| *column).collect();
    if padding > 0 {
        columns.push(Column { width: padding, kind: ColumnKind::Copy });
    }
    let mut tail = None;
    if let Some(first) = taps.first() {
        let window = first.dims()[0];
        let mut from = 0;
        for ((column, tail), _) in parts.iter().zip(&convolutions) {
            tails.push(ops::next_conv_state(&y, tail.clone(), (from, column.width), window));
            from += column.width;
        }
        let before: Vec<_> = parts.into_iter().filter_map(|(_, tail)| tail).collect();
        tail = (!before.is_empty()).then(|| Tensor::cat(before, 2));
    }
    let dtype = x.dtype();
    let weight = (!taps.is_empty()).then(|| {
        let own = taps[0].dtype();
        inside(ops::pack(taps, 0, own))
    });
    let mut outputs = ops::conv_split::<B>(ConvSplit {
        x: inside(y),
        weight,
        bias: None,
        tail: tail.map(|tail| inside(ops::typed(tail, dtype))),
        a_log: decay.map(|decay| inside(decay.a_log.val())),
        dt_bias: decay.map(|decay| inside(decay.dt_bias.val())),
        columns,
    });
    outputs.truncate(projections.len());
    outputs
}

fn one_by_one<B: LinearAttentionBackend>(
    x: &Tensor<B, 3>,
    projections: &[Projection<'_, B>],
    decay: Option<&DecayParams<'_, B>>,
    parts: Vec<Part<B>>,
    tails: &mut Vec<Tensor<B, 3>>,
) -> Vec<Tensor<B, 3>> {
    let mut one = |p: &Projection<'_, B>, (column, tail): Part<B>| {
        let y = p.linear.forward(x.clone());
        let weight = p.convolution.map(|c| c.weight.val());
        if let Some(weight) = &weight {
            let part = (0, column.width);
            tails.push(ops::next_conv_state(&y, tail.clone(), part, weight.dims()[0]));
        }
        if column.kind == ColumnKind::Copy {
            return y;
        }
        let decay = decay.filter(|_| column.kind == ColumnKind::LogDecay);
        let dtype = y.dtype();
        let mut outputs = ops::conv_split::<B>(ConvSplit {
            x: inside(y),
            weight: weight.map(inside),
            bias: p.convolution.and_then(|c| c.bias.as_ref()).map(|bias| inside(bias.val())),
            tail: tail.map(|tail| inside(ops::typed(tail, dtype))),
            a_log: decay.map(|decay| inside(decay.a_log.val())),
            dt_bias: decay.map(|decay| inside(decay.dt_bias.val())),
            columns: vec![column],
        });
        outputs.remove(0)
    };
    let mut outputs = vec![];
    for (projection, part) in projections.iter().zip(parts) {
        outputs.push(one(projection, part));
    }
    outputs
}

fn inside<B: Backend, const D: usize>(x: Tensor<B, D>) -> FloatTensor<B> {
    match x.into_primitive() {
        TensorPrimitive::Float(x) => x,
        TensorPrimitive::QFloat(_) => unreachable!("weights and activations are not quantised"),
    }
}
