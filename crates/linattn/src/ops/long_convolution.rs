//! Causal convolutions as long as the sequence: in one piece where a backend has one, or in blocks of products.
//!
//! With the sequence in blocks of C tokens, `X_j` `[C, N]` for each channel, and `M_m`, `[C, C]`, of the taps around
//! m C:
//! ```text
//! (M_m)_ij = h_{m C + i - j}                 zero where the index is below 0
//! Y_i      = sum_m M_m X_{i - m}
//! ```
//! That is T^2 / 2 multiplications a channel and sequence, all of them in products of matrices whose rows many
//! sequences share. An FFT made of products of DFT matrices, 2 T = a b, needs 8 T (a + b) for each of three
//! transforms: about as much at T = 1024. Gradients come by differentiating the products: of `x` by the
//! transposed matrices, of the taps by sums over diagonals.

use super::OpError;
use super::backend::{LinearAttentionBackend, LongConvolution, Path};
use super::tensors::{Along, accumulator, cat, primitive, tensor, typed};
use burn::tensor::{Tensor, backend::Backend};

/// Tokens of a block.
const BLOCK: usize = 128;

/// `y_t = sum_{s <= t} taps_{t - s} x_s`, each channel by itself. Gradients reach all inputs.
///
/// `x` is `[B, T, D]`, `taps` `[L, D]`, zero beyond L, `past` every input before `x`, `[B, P, D]`. Gives
/// `[B, T, D]` in the type of `x`, of sums in f32 at least.
/// # Errors
/// [`OpError`] names the first tensor that does not fit.
pub fn long_convolution<B: LinearAttentionBackend>(
    x: Tensor<B, 3>,
    taps: Tensor<B, 2>,
    past: Option<Tensor<B, 3>>,
) -> Result<Tensor<B, 3>, OpError> {
    let op = "long_convolution";
    let ([batch, tokens, channels], [length, _]) = (x.dims(), taps.dims());
    for (tensor, dims) in [("x", x.dims().as_slice()), ("taps", taps.dims().as_slice())] {
        if dims.contains(&0) {
            return Err(OpError::Empty { op, tensor, got: dims.to_vec() });
        }
    }
    let before = past.as_ref().map_or([batch, 1, channels], |past| past.dims());
    let shapes: [(&str, &[usize], &[usize]); 2] = [
        ("taps", &taps.dims(), &[length, channels]),
        ("past", &before, &[batch, before[1].max(1), channels]),
    ];
    for (tensor, got, want) in shapes {
        if got != want {
            return Err(OpError::Shape { op, tensor, got: got.into(), want: want.into() });
        }
    }
    let dtype = x.dtype();
    let all = match past {
        Some(past) => {
            let x = accumulator(x);
            cat(vec![typed(past, x.dtype()), x], 1)
        }
        None => x,
    };
    if let Some(y) = in_one_piece(&all, &taps, tokens) {
        return Ok(typed(y, dtype));
    }
    let all = accumulator(all);
    let taps = typed(taps, all.dtype());
    let y = match tokens {
        1 => last_token(all, taps),
        _ => in_blocks(all, taps, tokens),
    };
    Ok(typed(y, dtype))
}

/// Each channel of `x`, `[B, T, D]`, behind the tokens of `past`, `[B, W - 1, D]`, through the window of `weight`,
/// `[W, D]`, whose last row is for a token itself; nothing where this backend has no piece for it.
pub(super) fn through_window<B: LinearAttentionBackend>(
    x: &Tensor<B, 3>,
    weight: &Tensor<B, 2>,
    past: Option<&Tensor<B, 3>>,
) -> Option<Tensor<B, 3>> {
    let tokens = x.dims()[1];
    let before = past.map_or(0, |past| past.dims()[1]);
    if !is_worth_it(x, tokens, before + tokens) {
        return None;
    }
    let all = match past {
        Some(past) => cat(vec![past.clone(), x.clone()], 1),
        None => x.clone(),
    };
    in_one_piece(&all, &weight.clone().flip([0]), tokens)
}

/// Whether the last `tokens` of the tokens `seen` are most of them, and not for the loops of a processor.
fn is_worth_it<B: LinearAttentionBackend>(x: &Tensor<B, 3>, tokens: usize, seen: usize) -> bool {
    tokens > 1 && 2 * tokens >= seen && B::path(&x.device()) == Path::Kernels
}

/// The outputs of the last `tokens` tokens, where this backend has a piece for all of them, and they are most of them.
fn in_one_piece<B: LinearAttentionBackend>(
    all: &Tensor<B, 3>,
    taps: &Tensor<B, 2>,
    tokens: usize,
) -> Option<Tensor<B, 3>> {
    let ([_, seen, _], [length, _]) = (all.dims(), taps.dims());
    if !is_worth_it(all, tokens, seen) {
        return None;
    }
    let taps = accumulator(taps.clone());
    // A slice of all of it would cost the backward pass a tensor of zeros.
    let taps = if length > seen { taps.narrow(0, 0, seen) } else { taps };
    let x = LongConvolution { x: primitive(all.clone()), taps: primitive(taps) };
    let pass = B::fused_long_convolution(x, false)?;
    let y: Tensor<B, 3> = tensor(pass.outputs.into_iter().next()?);
    Some(if seen > tokens { y.narrow(1, seen - tokens, tokens) } else { y })
}

/// The output of the last token alone, `[B, 1, D]`.
fn last_token<B: Backend>(all: Tensor<B, 3>, taps: Tensor<B, 2>) -> Tensor<B, 3> {
    let seen = all.dims()[1];
    (all * of_length(taps, seen).flip([0]).unsqueeze::<3>()).sum_along(1)
}

/// The outputs of the last `tokens` tokens.
fn in_blocks<B: Backend>(all: Tensor<B, 3>, taps: Tensor<B, 2>, tokens: usize) -> Tensor<B, 3> {
    let [batch, seen, channels] = all.dims();
    let size = seen.min(BLOCK);
    let blocks = seen.div_ceil(size);
    let zeros = |shape: [usize; 3]| Tensor::<B, 3>::zeros(shape, (&all.device(), all.dtype()));
    // Zeros before the first token change nothing.
    let filled = blocks * size - seen;
    let x = match filled {
        0 => all.clone(),
        _ => cat(vec![zeros([batch, filled, channels]), all.clone()], 1),
    };
    let x = x.reshape([batch, blocks, size, channels]).permute([3, 2, 1, 0]);
    let x: Tensor<B, 3> = x.reshape([channels, size, blocks * batch]);

    let first = blocks - tokens.div_ceil(size);
    let wanted = blocks - first;
    let front = zeros_in_front(of_length(taps, blocks * size), size - 1);
    let block = |lag: usize| {
        let inputs = first.saturating_sub(lag);
        let count = blocks - lag - inputs;
        let part = x.clone().narrow(2, inputs * batch, count * batch);
        let y = toeplitz(front.clone().narrow(0, lag * size, 2 * size - 1)).matmul(part);
        match wanted - count {
            0 => y,
            late => cat(vec![zeros([channels, size, late * batch]), y], 2),
        }
    };
    let y = (1..blocks).fold(block(0), |y, lag| y + block(lag));
    let y = y.reshape([channels, size, wanted, batch]).permute([3, 2, 1, 0]);
    let y: Tensor<B, 3> = y.reshape([batch, wanted * size, channels]);
    y.narrow(1, wanted * size - tokens, tokens)
}

/// The first taps, or all of them and zeros: `[length, D]`.
fn of_length<B: Backend>(taps: Tensor<B, 2>, length: usize) -> Tensor<B, 2> {
    let [given, channels] = taps.dims();
    if given >= length {
        return taps.narrow(0, 0, length);
    }
    let zeros = Tensor::zeros([length - given, channels], (&taps.device(), taps.dtype()));
    cat(vec![taps, zeros], 0)
}

fn zeros_in_front<B: Backend>(taps: Tensor<B, 2>, count: usize) -> Tensor<B, 2> {
    if count == 0 {
        return taps;
    }
    let zeros = Tensor::zeros([count, taps.dims()[1]], (&taps.device(), taps.dtype()));
    cat(vec![zeros, taps], 0)
}

/// Weights of all S tokens in the sums of the last `tokens`, `[D, tokens, S]`, of `taps`, `[S, D]`; zero of later ones.
pub(crate) fn tap_matrices<B: Backend>(taps: Tensor<B, 2>, tokens: usize) -> Tensor<B, 3> {
    let [seen, _] = taps.dims();
    match tokens {
        // In this order: Burn 0.21 loses strides where a reshape adds dimensions to a column of one tap.
        1 => taps.flip([0]).unsqueeze_dim::<3>(1).swap_dims(0, 2),
        _ => toeplitz(zeros_in_front(taps, seen - 1)).narrow(1, seen - tokens, tokens),
    }
}

/// `[D, C, C]` whose entry (i, j) is `taps[C - 1 + i - j]`, of `[2 C - 1, D]`.
///
/// A row of the taps in reverse, one zero behind them, is written C times over; read again in rows one shorter, each
/// row begins one later. So there is no gathering, and no scattering in the backward pass.
fn toeplitz<B: Backend>(taps: Tensor<B, 2>) -> Tensor<B, 3> {
    let [width, channels] = taps.dims();
    let size = width.div_ceil(2);
    let row = taps.flip([0]).swap_dims(0, 1);
    let zero = Tensor::zeros([channels, 1], (&row.device(), row.dtype()));
    let row = cat(vec![row, zero], 1).unsqueeze_dim::<3>(1);
    let copies = row.expand([channels, size, 2 * size]).reshape([channels, 2 * size * size]);
    let skewed = copies.narrow(1, 0, size * width).reshape([channels, size, width]);
    skewed.narrow(2, size - 1, size)
}
