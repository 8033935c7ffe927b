//! Recurrences with a matrix for a state, over whole sequences or one token.
//!
//! ```text
//! S_t = e^{g_t} S_{t-1} + k_t^T u_t        [K, V]   forget, then write
//! o_t = q_t S_t                            [V]      read, after the write
//! u_t = v_t                                         linear_attention
//! u_t = beta_t (v_t - k_t e^{g_t} S_{t-1}) [V]      delta_rule
//! ```
//!
//! Sequences are worked off in chunks, so that nearly all arithmetic is matrix products; results do
//! not depend on the chunk beyond rounding. State, gates and sums are f32 whatever the inputs are
//! (f64 for f64 inputs).

mod autodiff;
mod backend;
mod chunkwise;
mod convolution;
#[cfg(feature = "cubecl")]
mod cube;
mod decay;
mod mask;
mod recurrent;
mod triangular;

pub use backend::{Forward, LinearAttentionBackend, Operands, Path, Saved};
pub use convolution::Convolution;

use backend::{primitive, tensor};
use burn::tensor::{Tensor, backend::Backend};

/// Chunk length that suits most sizes, in tokens.
pub const DEFAULT_CHUNK: usize = 64;
/// Chunk lengths that the operations take.
pub const CHUNKS: &[usize] = &[1, 2, 4, 8, 16, 32, 64, 128];

/// What an operation gives: its outputs, and the state after the last token.
pub type OpResult<B> = Result<(Tensor<B, 4>, Tensor<B, 4>), OpError>;

/// Inputs of [`linear_attention`].
#[derive(Debug, Clone)]
pub struct LinearAttention<B: Backend> {
    /// Queries, `[B, T, Hk, K]`, already scaled (by K^-1/2 as a rule).
    pub q: Tensor<B, 4>,
    /// Keys, `[B, T, Hk, K]`. Value head j reads key head j / (H / Hk).
    pub k: Tensor<B, 4>,
    /// Values, `[B, T, H, V]`.
    pub v: Tensor<B, 4>,
    /// Log decay per token and head, `[B, T, H]`: natural log of the share kept, at most 0.
    pub g: Option<Tensor<B, 3>>,
}

/// Inputs of [`delta_rule`]. Named, because `beta` and `g` have one shape: swapped, they would run
/// and be wrong.
#[derive(Debug, Clone)]
pub struct DeltaRule<B: Backend> {
    /// Queries, `[B, T, Hk, K]`, already scaled (by K^-1/2 as a rule).
    pub q: Tensor<B, 4>,
    /// Keys, `[B, T, Hk, K]`, of length 1: longer rows can make the state grow without end.
    pub k: Tensor<B, 4>,
    /// Values, `[B, T, H, V]`.
    pub v: Tensor<B, 4>,
    /// Share of the error to correct, `[B, T, H]`: 0 to 1, or to 2 for negative eigenvalues.
    pub beta: Tensor<B, 3>,
    /// Log decay per token and head, `[B, T, H]`: natural log of the share kept, at most 0.
    pub g: Option<Tensor<B, 3>>,
}

/// Why an operation refused its input. Nothing was computed.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum OpError {
    /// A tensor's shape does not go with the others.
    #[error("{op}: `{tensor}` is {got:?}, expected {want:?} to go with the others")]
    Shape {
        /// The operation.
        op: &'static str,
        /// The tensor.
        tensor: &'static str,
        /// Its shape.
        got: Vec<usize>,
        /// The shape that would do.
        want: Vec<usize>,
    },
    /// A dimension is empty.
    #[error("{op}: `{tensor}` is {got:?}; every dimension has to be at least 1")]
    Empty {
        /// The operation.
        op: &'static str,
        /// The tensor.
        tensor: &'static str,
        /// Its shape.
        got: Vec<usize>,
    },
    /// Value heads cannot be shared out over key heads.
    #[error("{op}: {heads} value heads are no multiple of {key_heads} key heads")]
    Heads {
        /// The operation.
        op: &'static str,
        /// Heads of `v`.
        heads: usize,
        /// Heads of `q` and `k`.
        key_heads: usize,
    },
    /// No such chunk length.
    #[error("{op}: a chunk of {chunk} tokens; it has to be one of {CHUNKS:?}")]
    Chunk {
        /// The operation.
        op: &'static str,
        /// The chunk asked for.
        chunk: usize,
    },
    /// A convolution that sees nothing but the token itself.
    #[error("{op}: a window of {window} tokens; it has to be at least 2")]
    Window {
        /// The operation.
        op: &'static str,
        /// The window asked for.
        window: usize,
    },
    /// A recurrent step was given more than one token.
    #[error("{op}: a step takes one token, got {tokens}")]
    Step {
        /// The operation.
        op: &'static str,
        /// Tokens given.
        tokens: usize,
    },
}

/// Decayed linear attention over whole sequences, `chunk` tokens at a time. Gradients reach every
/// tensor of `x`, and `state`.
///
/// Gives `o`, `[B, T, H, V]` in the type of `v`, and the state after the last token, `[B, H, K, V]`.
/// # Errors
/// [`OpError`] names the first tensor or number that does not fit.
/// # Source
/// Katharopoulos et al., arXiv 2006.16236; the scalar decay as in Mamba-2, arXiv 2405.21060.
pub fn linear_attention<B: LinearAttentionBackend>(
    x: LinearAttention<B>,
    state: Option<Tensor<B, 4>>,
    chunk: usize,
) -> OpResult<B> {
    let LinearAttention { q, k, v, g } = x;
    let beta = None;
    chunked("linear_attention", Checked { q, k, v, g, beta, state }, chunk)
}

/// The delta rule, gated if `g` is given, over whole sequences, `chunk` tokens at a time. Gradients
/// reach every tensor of `x`, and `state`.
///
/// Gives `o`, `[B, T, H, V]` in the type of `v`, and the state after the last token, `[B, H, K, V]`.
/// # Errors
/// [`OpError`] names the first tensor or number that does not fit.
/// # Source
/// Chunks as in DeltaNet, arXiv 2406.06484, with the decay of Gated DeltaNet, arXiv 2412.06464.
pub fn delta_rule<B: LinearAttentionBackend>(
    x: DeltaRule<B>,
    state: Option<Tensor<B, 4>>,
    chunk: usize,
) -> OpResult<B> {
    let DeltaRule { q, k, v, beta, g } = x;
    let beta = Some(beta);
    chunked("delta_rule", Checked { q, k, v, g, beta, state }, chunk)
}

/// One token of [`linear_attention`]: T is 1 in every tensor of `x`.
///
/// Gives `o`, `[B, 1, H, V]`, and the next state. Differentiable.
/// # Errors
/// As [`linear_attention`], and [`OpError::Step`] if T is not 1.
pub fn linear_attention_step<B: LinearAttentionBackend>(
    x: LinearAttention<B>,
    state: Option<Tensor<B, 4>>,
) -> OpResult<B> {
    let LinearAttention { q, k, v, g } = x;
    let beta = None;
    step("linear_attention_step", Checked { q, k, v, g, beta, state })
}

/// One token of [`delta_rule`]: T is 1 in every tensor of `x`.
///
/// Gives `o`, `[B, 1, H, V]`, and the next state. Differentiable.
/// # Errors
/// As [`delta_rule`], and [`OpError::Step`] if T is not 1.
pub fn delta_rule_step<B: LinearAttentionBackend>(
    x: DeltaRule<B>,
    state: Option<Tensor<B, 4>>,
) -> OpResult<B> {
    let DeltaRule { q, k, v, beta, g } = x;
    let beta = Some(beta);
    step("delta_rule_step", Checked { q, k, v, g, beta, state })
}

/// Causal depthwise convolution over time, `y_t = sum_w weight_w * x_{t-W+1+w}`, each channel by
/// itself. Gradients reach all inputs.
///
/// `x` is `[B, T, D]`, `weight` `[W, D]` with the newest token's row last, W at least 2, `tail` the W - 1 tokens
/// before `x`, `[B, W - 1, D]`, zeros if absent. Gives `[B, T, D]` and the next tail.
/// # Errors
/// [`OpError`] names the first tensor that does not fit.
pub fn short_convolution<B: LinearAttentionBackend>(
    x: Tensor<B, 3>,
    weight: Tensor<B, 2>,
    tail: Option<Tensor<B, 3>>,
) -> Result<(Tensor<B, 3>, Tensor<B, 3>), OpError> {
    let op = "short_convolution";
    let ([batch, tokens, channels], [width, _]) = (x.dims(), weight.dims());
    for (tensor, dims) in [("x", x.dims().as_slice()), ("weight", weight.dims().as_slice())] {
        if dims.contains(&0) {
            return Err(OpError::Empty { op, tensor, got: dims.to_vec() });
        }
    }
    if width < 2 {
        return Err(OpError::Window { op, window: width });
    }
    let before = [batch, width - 1, channels];
    let tail = tail.unwrap_or_else(|| Tensor::zeros(before, (&x.device(), x.dtype())));
    let shapes: [(&str, &[usize], &[usize]); 2] =
        [("weight", &weight.dims(), &[width, channels]), ("tail", &tail.dims(), &before)];
    for (tensor, got, want) in shapes {
        if got != want {
            return Err(OpError::Shape { op, tensor, got: got.into(), want: want.into() });
        }
    }
    // The last W - 1 tokens of what was seen, which may reach back into the old tail.
    let next = match tokens < width {
        true => convolution::seen(tail.clone(), x.clone()).narrow(1, tokens, width - 1),
        false => x.clone().narrow(1, tokens + 1 - width, width - 1),
    };
    let inputs = Convolution { x: primitive(x), weight: primitive(weight), tail: primitive(tail) };
    Ok((tensor(B::short_convolution(inputs)), next))
}

/// The way the operations take on this backend: written kernels or tensor operations.
pub fn path<B: LinearAttentionBackend>(device: &B::Device) -> Path {
    B::path(device)
}

/// Every tensor of either family, before its shapes were looked at.
struct Checked<B: Backend> {
    q: Tensor<B, 4>,
    k: Tensor<B, 4>,
    v: Tensor<B, 4>,
    g: Option<Tensor<B, 3>>,
    beta: Option<Tensor<B, 3>>,
    state: Option<Tensor<B, 4>>,
}

impl<B: Backend> Checked<B> {
    fn check(&self, op: &'static str) -> Result<(), OpError> {
        let [batch, tokens, key_heads, key_width] = self.q.dims();
        let [_, _, heads, value_width] = self.v.dims();
        for (name, x) in [("q", &self.q), ("v", &self.v)] {
            if x.dims().contains(&0) {
                return Err(OpError::Empty { op, tensor: name, got: x.dims().to_vec() });
            }
        }
        if !heads.is_multiple_of(key_heads) {
            return Err(OpError::Heads { op, heads, key_heads });
        }
        let same = |tensor, got: &[usize], want: &[usize]| {
            let shape = || OpError::Shape { op, tensor, got: got.into(), want: want.into() };
            if got == want { Ok(()) } else { Err(shape()) }
        };
        same("k", &self.k.dims(), &[batch, tokens, key_heads, key_width])?;
        same("v", &self.v.dims(), &[batch, tokens, heads, value_width])?;
        for (name, x) in [("g", &self.g), ("beta", &self.beta)] {
            if let Some(x) = x {
                same(name, &x.dims(), &[batch, tokens, heads])?;
            }
        }
        match &self.state {
            Some(s) => same("state", &s.dims(), &[batch, heads, key_width, value_width]),
            None => Ok(()),
        }
    }

    fn operands(self) -> Operands<burn::tensor::ops::FloatTensor<B>> {
        Operands {
            q: primitive(self.q),
            k: primitive(self.k),
            v: primitive(self.v),
            g: self.g.map(primitive),
            beta: self.beta.map(primitive),
            state: self.state.map(primitive),
        }
    }
}

fn chunked<B: LinearAttentionBackend>(
    op: &'static str,
    x: Checked<B>,
    chunk: usize,
) -> OpResult<B> {
    x.check(op)?;
    if !CHUNKS.contains(&chunk) {
        return Err(OpError::Chunk { op, chunk });
    }
    // A chunk longer than the sequence would only compute padding.
    let chunk = chunk.min(x.q.dims()[1].next_power_of_two());
    let Forward { o, state, .. } = B::chunkwise(x.operands(), chunk, false);
    Ok((tensor(o), tensor(state)))
}

fn step<B: LinearAttentionBackend>(op: &'static str, x: Checked<B>) -> OpResult<B> {
    x.check(op)?;
    match x.q.dims()[1] {
        1 => {
            let (o, state) = B::recurrent_step(x.operands());
            Ok((tensor(o), tensor(state)))
        }
        tokens => Err(OpError::Step { op, tokens }),
    }
}
