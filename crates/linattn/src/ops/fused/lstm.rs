//! The recurrences of LSTM and sLSTM, whose gates see the last output of their head.
//! ```text
//! i, f, z, o = x_t + h_{t-1} R
//!
//! LSTM:   c_t = sigmoid(f) c_{t-1} + sigmoid(i) tanh(z)
//!         h_t = sigmoid(o) tanh(c_t)
//! sLSTM:  c_t = sigmoid(f) c_{t-1} + e^i tanh(z)
//!         n_t = sigmoid(f) n_{t-1} + e^i
//!         h_t = sigmoid(o) c_t / n_t
//! ```
//! sLSTM's c and n are kept as e^m times smaller numbers, with `m_t = max(ln sigmoid(f_t) + m_{t-1}, i_t)`.
//! Sources: Hochreiter and Schmidhuber 1997 with the forget gate of Gers et al. 2000; Beck et al., arXiv 2405.04517.

use super::{LinearLayer, LstmCell, LstmRecurrence, linear};
use crate::ops::OpError;
use crate::ops::backend::LinearAttentionBackend;
use crate::ops::tensors::{accumulator, cat, each_part, primitive, tensor, typed};
use burn::tensor::activation::{log_sigmoid, sigmoid};
use burn::tensor::{Tensor, backend::Backend, ops::FloatTensor};

/// m before the first token: lower than any input gate.
pub(crate) const LOWEST: f64 = -1e30;

/// LSTM's vectors between two tokens, `[B, 1, H, D]` each.
#[derive(Debug, Clone)]
pub struct LstmCells<B: Backend> {
    /// h.
    pub h: Tensor<B, 4>,
    /// c.
    pub c: Tensor<B, 4>,
}

/// sLSTM's vectors between two tokens, `[B, 1, H, D]` each.
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

/// Inputs of [`lstm`].
#[derive(Debug, Clone)]
pub struct LstmInputs<B: Backend> {
    /// i, f, z and o of each head, without what h adds to them, `[B, T, H, 4 D]`.
    pub x: Tensor<B, 4>,
    /// R, `[H, D, 4 D]`.
    pub r: Tensor<B, 3>,
    /// The cells before the first token; those of a new sequence if absent.
    pub state: Option<LstmCells<B>>,
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

/// LSTM's recurrence over whole sequences, one token included: h of every token, `[B, T, H, D]`, and the cells after
/// the last, in f32 (f64 where `x` is). Gradients reach all inputs.
/// # Errors
/// [`OpError`] names the first tensor that does not fit.
pub fn lstm<B: LinearAttentionBackend>(
    inputs: LstmInputs<B>,
) -> Result<(Tensor<B, 4>, LstmCells<B>), OpError> {
    let LstmInputs { x, r, state } = inputs;
    let state = state.map(|LstmCells { h, c }| vec![h, c]);
    let (outputs, last) = recurrence("lstm", LstmCell::Sigmoid, x, r, state)?;
    let [h, c] = last.try_into().expect("h and c");
    Ok((outputs, LstmCells { h, c }))
}

/// sLSTM's recurrence over whole sequences, one token included: h of every token, `[B, T, H, D]`, and the cells
/// after the last, in f32 (f64 where `x` is). Gradients reach all inputs but m, which h does not depend on.
/// # Errors
/// [`OpError`] names the first tensor that does not fit.
pub fn slstm<B: LinearAttentionBackend>(
    inputs: SlstmInputs<B>,
) -> Result<(Tensor<B, 4>, SlstmCells<B>), OpError> {
    let SlstmInputs { x, r, state } = inputs;
    // No gradient needs to be made for m.
    let state = state.map(|SlstmCells { h, c, n, m }| vec![h, c, n, m.detach()]);
    let (outputs, last) = recurrence("slstm", LstmCell::Exponential, x, r, state)?;
    let [h, c, n, m] = last.try_into().expect("h, c, n and m");
    Ok((outputs, SlstmCells { h, c, n, m: m.detach() }))
}

/// h of every token, and all vectors after the last.
type Outputs<B> = (Tensor<B, 4>, Vec<Tensor<B, 4>>);

fn recurrence<B: LinearAttentionBackend>(
    op: &'static str,
    cell: LstmCell,
    x: Tensor<B, 4>,
    r: Tensor<B, 3>,
    state: Option<Vec<Tensor<B, 4>>>,
) -> Result<Outputs<B>, OpError> {
    check(op, &x, &r, state.as_deref().unwrap_or_default())?;
    let x = accumulator(x);
    let dtype = x.dtype();
    let vectors =
        |state: Vec<_>| state.into_iter().map(|x| primitive(typed(x, dtype))).collect::<Vec<_>>();
    let (r, state) = (primitive(typed(r, dtype)), state.map(vectors));
    let x = LstmRecurrence { cell, x: primitive(x), r, state };
    let Some(pass) = B::fused_lstm(x.clone(), false) else { return Ok(in_tensor_ops::<B>(x)) };
    let mut outputs = pass.outputs.into_iter().map(tensor::<B, 4>);
    let h = outputs.next().expect("h comes first");
    let last = h.clone().narrow(1, h.dims()[1] - 1, 1);
    Ok((h, [last].into_iter().chain(outputs).collect()))
}

fn check<B: Backend>(
    op: &'static str,
    x: &Tensor<B, 4>,
    r: &Tensor<B, 3>,
    state: &[Tensor<B, 4>],
) -> Result<(), OpError> {
    let [batch, _, heads, columns] = x.dims();
    if x.dims().contains(&0) {
        return Err(OpError::Empty { op, tensor: "x", got: x.dims().into() });
    }
    let width = columns.div_ceil(4);
    let cells = ["h", "c", "n", "m"].into_iter().zip(state);
    let cells =
        cells.map(|(name, cell)| (name, cell.dims().to_vec(), vec![batch, 1, heads, width]));
    let mut wanted = x.dims().to_vec();
    wanted[3] = 4 * width;
    let shapes =
        [("x", x.dims().to_vec(), wanted), ("r", r.dims().to_vec(), vec![heads, width, 4 * width])];
    match shapes.into_iter().chain(cells).find(|(_, got, want)| got != want) {
        Some((tensor, got, want)) => Err(OpError::Shape { op, tensor, got, want }),
        None => Ok(()),
    }
}

/// The same, token by token.
pub(in crate::ops) fn in_tensor_ops<B: LinearAttentionBackend>(
    x: LstmRecurrence<FloatTensor<B>>,
) -> Outputs<B> {
    let (cell, tokens, r) = (x.cell, tensor::<B, 4>(x.x), tensor::<B, 3>(x.r));
    let mut state = match x.state {
        Some(state) => state.into_iter().map(tensor::<B, 4>).collect(),
        None => fresh(cell, &tokens),
    };
    let mut outputs = Vec::with_capacity(tokens.dims()[1]);
    for token in each_part(tokens, 1) {
        state = advance(cell, state, token, &r);
        outputs.push(state[0].clone());
    }
    (cat(outputs, 1), state)
}

/// The vectors before the first token of `x`, `[B, T, H, 4 D]`.
fn fresh<B: Backend>(cell: LstmCell, x: &Tensor<B, 4>) -> Vec<Tensor<B, 4>> {
    let [batch, _, heads, columns] = x.dims();
    let zeros = Tensor::zeros([batch, 1, heads, columns / 4], (&x.device(), x.dtype()));
    match cell {
        LstmCell::Sigmoid => vec![zeros; 2],
        LstmCell::Exponential => {
            let m = zeros.full_like(LOWEST);
            vec![zeros.clone(), zeros.clone(), zeros, m]
        }
    }
}

/// `h R`: `[B, 1, H, D]` to `[B, 1, H, 4 D]`.
fn by_head<B: LinearAttentionBackend>(h: Tensor<B, 4>, r: &Tensor<B, 3>) -> Tensor<B, 4> {
    if r.dims()[0] == 1 {
        let weight = primitive(r.clone().squeeze_dim::<2>(0));
        return linear(LinearLayer { x: primitive(h), weight, bias: None });
    }
    let rows = h.squeeze_dim::<3>(1).swap_dims(0, 1);
    rows.matmul(r.clone()).swap_dims(0, 1).unsqueeze_dim(1)
}

/// LSTM's vectors after a token, from its gates, `[B, 1, H, 4 D]`, and the c before it.
pub(crate) fn lstm_cells<B: Backend>(gates: Tensor<B, 4>, c: Tensor<B, 4>) -> LstmCells<B> {
    let width = c.dims()[3];
    let part = |j: usize| gates.clone().narrow(3, j * width, width);
    let c = sigmoid(part(1)) * c + sigmoid(part(0)) * part(2).tanh();
    LstmCells { h: sigmoid(part(3)) * c.clone().tanh(), c }
}

/// The vectors after one more token, `[B, 1, H, 4 D]`.
fn advance<B: LinearAttentionBackend>(
    cell: LstmCell,
    state: Vec<Tensor<B, 4>>,
    token: Tensor<B, 4>,
    r: &Tensor<B, 3>,
) -> Vec<Tensor<B, 4>> {
    let mut state = state.into_iter();
    let mut next = || state.next().expect("all vectors of a cell");
    let (h, c) = (next(), next());
    let width = h.dims()[3];
    let gates = token + by_head(h, r);
    if cell == LstmCell::Sigmoid {
        let LstmCells { h, c } = lstm_cells(gates, c);
        return vec![h, c];
    }
    let part = |j: usize| gates.clone().narrow(3, j * width, width);
    let (n, m) = (next(), next().detach());
    let (log_write, log_keep) = (part(0), log_sigmoid(part(1)));
    let largest = (log_keep.clone() + m.clone()).max_pair(log_write.clone()).detach();
    // In this order: the difference of two m is exact where they are close.
    let keep = (log_keep + (m - largest.clone())).exp();
    let write = (log_write - largest.clone()).exp();
    let c = keep.clone() * c + write.clone() * part(2).tanh();
    let n = keep * n + write;
    let h = sigmoid(part(3)) * c.clone() / n.clone();
    vec![h, c, n, largest]
}
