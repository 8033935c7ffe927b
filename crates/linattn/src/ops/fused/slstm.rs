//! sLSTM's recurrence, whose gates see the last output of their head.
//! ```text
//! i, f, z, o = x_t + h_{t-1} R
//! c_t        = sigmoid(f) c_{t-1} + e^i tanh(z)
//! n_t        = sigmoid(f) n_{t-1} + e^i
//! h_t        = sigmoid(o) c_t / n_t
//! ```
//! c and n are kept as e^m times smaller numbers, with `m_t = max(ln sigmoid(f_t) + m_{t-1}, i_t)`.
//! Source: Beck et al., arXiv 2405.04517.

use super::SlstmRecurrence;
use crate::ops::OpError;
use crate::ops::backend::LinearAttentionBackend;
use crate::ops::tensors::{accumulator, cat, each_part, primitive, tensor, typed};
use burn::tensor::activation::{log_sigmoid, sigmoid};
use burn::tensor::{Tensor, backend::Backend, ops::FloatTensor};

/// m before the first token: lower than any input gate.
pub(crate) const LOWEST: f64 = -1e30;

/// Vectors between two tokens, `[B, 1, H, D]` each.
#[derive(Debug, Clone)]
pub struct SlstmCells<B: Backend> {
    /// h.
    pub h: Tensor<B, 4>,
    /// c over e^m.
    pub c: Tensor<B, 4>,
    /// n over e^m.
    pub n: Tensor<B, 4>,
    /// m.
    pub m: Tensor<B, 4>,
}

impl<B: Backend> SlstmCells<B> {
    /// The cells before the first token of `x`, `[B, T, H, 4 D]`.
    fn fresh(x: &Tensor<B, 4>) -> Self {
        let [batch, _, heads, columns] = x.dims();
        let zeros = Tensor::zeros([batch, 1, heads, columns / 4], (&x.device(), x.dtype()));
        let m = zeros.full_like(LOWEST);
        Self { h: zeros.clone(), c: zeros.clone(), n: zeros, m }
    }

    /// The cells after one more token, `[B, 1, H, 4 D]`.
    fn advance(self, token: Tensor<B, 4>, r: &Tensor<B, 3>) -> Self {
        let Self { h, c, n, m } = self;
        let width = h.dims()[3];
        let rows = h.squeeze_dim::<3>(1).swap_dims(0, 1);
        let gates = token + rows.matmul(r.clone()).swap_dims(0, 1).unsqueeze_dim(1);
        let part = |j: usize| gates.clone().narrow(3, j * width, width);
        let (log_write, log_keep) = (part(0), log_sigmoid(part(1)));
        let largest = (log_keep.clone() + m.clone()).max_pair(log_write.clone()).detach();
        // In this order: the difference of two m is exact where they are close.
        let keep = (log_keep + (m - largest.clone())).exp();
        let write = (log_write - largest.clone()).exp();
        let c = keep.clone() * c + write.clone() * part(2).tanh();
        let n = keep * n + write;
        let h = sigmoid(part(3)) * c.clone() / n.clone();
        Self { h, c, n, m: largest }
    }
}

/// Inputs of [`slstm`].
#[derive(Debug, Clone)]
pub struct SlstmInputs<B: Backend> {
    /// i, f, z and o of each head, without what h adds to them, `[B, T, H, 4 D]`.
    pub x: Tensor<B, 4>,
    /// R, `[H, D, 4 D]`.
    pub r: Tensor<B, 3>,
    /// The cells before the first token; those of a new sequence if absent.
    pub state: Option<SlstmCells<B>>,
}

impl<B: Backend> SlstmInputs<B> {
    fn check(&self) -> Result<(), OpError> {
        let (op, [batch, _, heads, columns]) = ("slstm", self.x.dims());
        if self.x.dims().contains(&0) {
            return Err(OpError::Empty { op, tensor: "x", got: self.x.dims().into() });
        }
        let width = columns.div_ceil(4);
        let state = self.state.as_ref();
        let cells = state.map(|SlstmCells { h, c, n, m }| [("h", h), ("c", c), ("n", n), ("m", m)]);
        let cells = cells.into_iter().flatten();
        let cells =
            cells.map(|(name, cell)| (name, cell.dims().to_vec(), vec![batch, 1, heads, width]));
        let mut wanted = self.x.dims().to_vec();
        wanted[3] = 4 * width;
        let shapes = [
            ("x", self.x.dims().to_vec(), wanted),
            ("r", self.r.dims().to_vec(), vec![heads, width, 4 * width]),
        ];
        match shapes.into_iter().chain(cells).find(|(_, got, want)| got != want) {
            Some((tensor, got, want)) => Err(OpError::Shape { op, tensor, got, want }),
            None => Ok(()),
        }
    }
}

/// sLSTM's recurrence over whole sequences, one token included: h of every token, `[B, T, H, D]`, and the cells
/// after the last, in f32 (f64 where `x` is). Gradients reach all inputs but m, which h does not depend on.
/// # Errors
/// [`OpError`] names the first tensor that does not fit.
pub fn slstm<B: LinearAttentionBackend>(
    inputs: SlstmInputs<B>,
) -> Result<(Tensor<B, 4>, SlstmCells<B>), OpError> {
    inputs.check()?;
    let SlstmInputs { x, r, state } = inputs;
    let x = accumulator(x);
    let dtype = x.dtype();
    let state = state.map(|SlstmCells { h, c, n, m }| {
        // No gradient needs to be made for m.
        [h, c, n, m.detach()].map(|cell| primitive(typed(cell, dtype)))
    });
    let r = primitive(typed(r, dtype));
    Ok(run::<B>(SlstmRecurrence { x: primitive(x), r, state }))
}

fn run<B: LinearAttentionBackend>(
    x: SlstmRecurrence<FloatTensor<B>>,
) -> (Tensor<B, 4>, SlstmCells<B>) {
    let Some(pass) = B::fused_slstm(x.clone(), false) else { return in_tensor_ops::<B>(x) };
    let mut outputs = pass.outputs.into_iter().map(tensor::<B, 4>);
    let mut next = || outputs.next().expect("h, and the last c, n and m");
    let (h, c, n, m) = (next(), next(), next(), next().detach());
    let last = h.clone().narrow(1, h.dims()[1] - 1, 1);
    (h, SlstmCells { h: last, c, n, m })
}

/// The same, token by token.
pub(in crate::ops) fn in_tensor_ops<B: Backend>(
    x: SlstmRecurrence<FloatTensor<B>>,
) -> (Tensor<B, 4>, SlstmCells<B>) {
    let (tokens, r) = (tensor::<B, 4>(x.x), tensor::<B, 3>(x.r));
    let mut cells = match x.state {
        Some(state) => {
            let [h, c, n, m] = state.map(tensor::<B, 4>);
            SlstmCells { h, c, n, m: m.detach() }
        }
        None => SlstmCells::fresh(&tokens),
    };
    let mut outputs = Vec::with_capacity(tokens.dims()[1]);
    for token in each_part(tokens, 1) {
        cells = cells.advance(token, &r);
        outputs.push(cells.h.clone());
    }
    (cat(outputs, 1), cells)
}
