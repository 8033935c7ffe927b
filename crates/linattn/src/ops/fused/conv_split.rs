//! From a mixer's packed projection to the inputs of its recurrence: short convolution, activation, L2
//! norm of heads, beta and log decay.

use super::normalize::l2_normalize;
use super::{Column, ColumnKind, ConvSplit, ConvStep, ConvStepOutputs, ConvolvedStep, HeadNorm};
use crate::ops::backend::LinearAttentionBackend;
use crate::ops::tensors::{cat, softplus_in_tensor_ops, tensor};
use crate::ops::{accumulator, typed};
use burn::tensor::activation::sigmoid;
use burn::tensor::{Tensor, TensorMetadata, backend::Backend, ops::FloatTensor};
use std::ops::Range;

/// A tensor `[B, T, width]` for each entry of `columns`.
/// # Panics
/// If lengths do not divide the one row of `x`.
pub(crate) fn conv_split<B: LinearAttentionBackend>(
    x: ConvSplit<FloatTensor<B>>,
) -> Vec<Tensor<B, 3>> {
    if let Some(lengths) = &x.lengths {
        let shape = x.x.shape();
        let checked = lengths.check("conv_split", shape[0], shape[1]);
        checked.expect("callers have lengths of the one row that they give");
    }
    match B::fused_conv_split(x.clone(), false) {
        Some(pass) => pass.outputs.into_iter().map(tensor).collect(),
        None => conv_split_in_tensor_ops::<B>(x),
    }
}

/// As [`conv_split`], of one token, and the next conv states; nothing where this backend has no such launch.
pub(crate) fn conv_step<B: LinearAttentionBackend>(
    x: &ConvStep<FloatTensor<B>>,
) -> Option<[Vec<Tensor<B, 3>>; 2]> {
    let ConvStepOutputs { outputs, conv_states } = B::conv_step(x)?;
    Some([outputs, conv_states].map(|tensors| tensors.into_iter().map(tensor).collect()))
}

/// A memory's answer to a token, and the states for the next one.
pub(crate) struct Answer<B: Backend> {
    /// `[B, 1, H, V]`.
    pub(crate) o: Tensor<B, 4>,
    /// `[B, H, K, V]`.
    pub(crate) memory: Tensor<B, 4>,
    /// Of queries, keys and values, `[B, W - 1, C_i]`.
    pub(crate) conv_states: Vec<Tensor<B, 3>>,
    /// The columns that are copied, `[B, 1, width]`.
    pub(crate) copied: Option<Tensor<B, 3>>,
}

/// A token's convolutions and its step of the recurrence in one launch; nothing where this backend has none for these
/// tensors.
pub(crate) fn convolved_step<B: LinearAttentionBackend>(
    x: &ConvolvedStep<FloatTensor<B>>,
) -> Option<Answer<B>> {
    let done = B::convolved_step(x)?;
    Some(Answer {
        o: tensor(done.o),
        memory: tensor(done.state),
        conv_states: done.conv_states.into_iter().map(tensor).collect(),
        copied: done.copied.map(tensor),
    })
}

/// The convolution's sum over the first C columns of `x`, `[B, T, C]`.
fn convolved<B: Backend>(
    x: &ConvSplit<FloatTensor<B>>,
    packed: &Tensor<B, 3>,
    channels: usize,
) -> Tensor<B, 3> {
    let rows = packed.clone().narrow(2, 0, channels);
    let dtype = rows.dtype();
    let mut sum = match &x.weight {
        None => rows,
        Some(weight) => {
            let weight = typed(tensor::<B, 2>(weight.clone()), dtype);
            let conv_state =
                x.conv_state.clone().map(|conv_state| typed(tensor(conv_state), dtype));
            match &x.lengths {
                None => through_window(rows, &weight, conv_state),
                Some(lengths) => {
                    let alone = |(n, range): (usize, Range<usize>)| {
                        let conv_state =
                            conv_state.clone().map(|conv_state| conv_state.narrow(0, n, 1));
                        let rows = rows.clone().narrow(1, range.start, range.len());
                        through_window(rows, &weight, conv_state)
                    };
                    cat(lengths.ranges().enumerate().map(alone).collect(), 1)
                }
            }
        }
    };
    if let Some(bias) = &x.bias {
        sum = sum + typed(tensor::<B, 1>(bias.clone()), dtype).unsqueeze::<3>();
    }
    sum
}

/// The sums of weighted tokens of rows that are a sequence each, without a bias.
fn through_window<B: Backend>(
    rows: Tensor<B, 3>,
    weight: &Tensor<B, 2>,
    conv_state: Option<Tensor<B, 3>>,
) -> Tensor<B, 3> {
    let ([batch, tokens, channels], window) = (rows.dims(), weight.dims()[0]);
    if window == 1 {
        return rows * weight.clone().unsqueeze::<3>();
    }
    let zeros = || Tensor::zeros([batch, window - 1, channels], (&rows.device(), rows.dtype()));
    let conv_state = conv_state.unwrap_or_else(zeros);
    let seen = cat(vec![conv_state, rows], 1);
    let tap = |w: usize| {
        let weight = weight.clone().narrow(0, w, 1).unsqueeze::<3>();
        seen.clone().narrow(1, w, tokens) * weight
    };
    (1..window).fold(tap(0), |sum, w| sum + tap(w))
}

/// [`conv_split`] in tensor operations.
pub(in crate::ops) fn conv_split_in_tensor_ops<B: LinearAttentionBackend>(
    x: ConvSplit<FloatTensor<B>>,
) -> Vec<Tensor<B, 3>> {
    let packed = tensor::<B, 3>(x.x.clone());
    let channels = x.convolved();
    let sum = (channels > 0).then(|| convolved(&x, &packed, channels));
    let mut from = 0;
    let mut take = |column: &Column| {
        let start = from;
        from += column.width;
        let of = |x: &Tensor<B, 3>| x.clone().narrow(2, start, column.width);
        match column.kind {
            ColumnKind::Conv { activation, norm } => {
                let z = of(sum.as_ref().expect("there are convolved columns"));
                let y = activation.map_or(z.clone(), |activation| activation.apply(z));
                norm.map_or(y.clone(), |norm| normalized_heads(y, norm))
            }
            ColumnKind::Copy => of(&packed),
            ColumnKind::Beta { scale } => sigmoid(accumulator(of(&packed))) * scale,
            ColumnKind::LogDecay => {
                let given = |x: &Option<FloatTensor<B>>| {
                    tensor::<B, 1>(x.clone().expect("a log decay has its parameters"))
                };
                log_decay(of(&packed), given(&x.a_log), given(&x.dt_bias))
            }
        }
    };
    x.columns.iter().map(&mut take).collect()
}

fn normalized_heads<B: LinearAttentionBackend>(y: Tensor<B, 3>, norm: HeadNorm) -> Tensor<B, 3> {
    let [batch, tokens, width] = y.dims();
    let heads: Tensor<B, 4> = y.reshape([batch, tokens, width / norm.width, norm.width]);
    l2_normalize(heads, norm.factor).reshape([batch, tokens, width])
}

/// In f32, or f64 for f64 rows: 16 bits hold too little of a logarithm near 0.
fn log_decay<B: Backend>(
    x: Tensor<B, 3>,
    a_log: Tensor<B, 1>,
    dt_bias: Tensor<B, 1>,
) -> Tensor<B, 3> {
    let x = accumulator(x);
    let rate = typed(a_log, x.dtype()).exp().neg();
    let step = softplus_in_tensor_ops(x.clone() + typed(dt_bias, x.dtype()).unsqueeze::<3>());
    let ([batch, tokens, width], [heads]) = (step.dims(), rate.dims());
    if width == heads {
        return step * rate.unsqueeze::<3>();
    }
    let by_head: Tensor<B, 4> = step.reshape([batch, tokens, heads, width / heads]);
    let g = by_head * rate.reshape([1, 1, heads, 1]);
    g.reshape([batch, tokens, width])
}
