//! A memory that learns from a window of tokens at once: the Omega rule, with momentum and Muon's steps. Mini-batches
//! of it are products of matrices.
//! ```text
//! U_t = sum_{i = t-c+1 .. t} gamma_i G_i      G_i = d(1/2 |M(k_i) - v_i|^2) / dM at the mini-batch's start
//! S   = eta S - U
//! M   = keep M + rate O(S)                    O: Muon's steps, or nothing
//! ```
//! Inside a mini-batch, from M_0 and S_0; W_ij is gamma_j for the c tokens up to i and else 0, so that rows stand for
//! the mini-batch's tokens, columns for these and the c - 1 before them:
//! ```text
//! A_ij = keep_i .. keep_{j+1}, E_ij = eta_i .. eta_{j+1} for j <= i, both over whole mini-batches A_i0, E_i0
//! S_i  = E_i0 S_0 - sum_j (E W)_ij G_j
//! M_i  = A_i0 M_0 + sum_j A_ij rate_j O(S_j)
//!      = A_i0 M_0 + (A rate E_.0)_i S_0 - sum_j (A rate E W)_ij G_j    where O is nothing: no S_j is formed
//! ```
//! Without momentum S_0 is 0 and E is 1.

use super::NetworkMemory;
use super::fast_weights::{
    Factors, Network, Past, Piece, decays, each_batch, in_a_row, last_row, sums, write,
};
use super::muon::{self, JORDAN_STEPS, orthogonal};
use crate::ops::stack;
use burn::tensor::{Tensor, backend::Backend};

/// A network without biases.
pub(crate) const NETWORK: Network = Network { bias: false };

/// Rows of each token, `[B, T, H, X]`.
pub(crate) struct Rows<B: Backend> {
    pub(crate) q: Tensor<B, 4>,
    /// Behind those of the c - 1 tokens before the first, as the next two.
    pub(crate) k: Tensor<B, 4>,
    pub(crate) v: Tensor<B, 4>,
    pub(crate) gamma: Tensor<B, 4>,
    pub(crate) rate: Tensor<B, 4>,
    pub(crate) log_keep: Tensor<B, 4>,
    /// Where there is momentum.
    pub(crate) log_eta: Option<Tensor<B, 4>>,
}

/// How a memory learns.
#[derive(Debug, Clone, Copy)]
pub(crate) struct OmegaRule {
    /// c.
    pub(crate) window: usize,
    /// Tokens of a mini-batch.
    pub(crate) mini_batch: usize,
    /// Whether steps are made orthogonal.
    pub(crate) muon: bool,
}

/// Numbers of a mini-batch's C tokens: `[B, H, C, X]`.
struct Shares<B: Backend> {
    /// A rate.
    step: Tensor<B, 4>,
    /// A_.0.
    keep: Tensor<B, 4>,
    /// E W.
    followed: Tensor<B, 4>,
    /// E_.0, where there is momentum.
    follow: Option<Tensor<B, 4>>,
}

impl OmegaRule {
    /// Tokens before a mini-batch that its first token learns from.
    pub(crate) fn before(self) -> usize {
        self.window - 1
    }

    /// Weights of a memory, and floating-point operations of a token.
    pub(crate) fn cost(self, layers: &[[usize; 2]], heads: usize) -> (u64, u64) {
        let keys = self.mini_batch + self.before();
        let (weights, flops) = NETWORK.cost(layers, heads, keys);
        // The sums of gradients, their steps, and these weighed: a matrix for each token.
        let formed = 2 * (keys + self.mini_batch) as u64 * weights
            + heads as u64 * layers.iter().copied().map(muon::flops).sum::<u64>();
        (weights, flops + if self.muon { formed } else { 0 })
    }

    /// Outputs of a piece, `[B, tokens, H, V]`; `memory`, whose `running` weights are M and whose `momentum` is S, goes
    /// on to behind it.
    pub(crate) fn learn<B: Backend>(
        self,
        x: &Rows<B>,
        piece: Piece,
        memory: &mut NetworkMemory<B>,
    ) -> Tensor<B, 4> {
        let queries = each_batch(piece.by_head(&x.q));
        let mut outputs = vec![];
        for (n, (q, shares)) in queries.zip(self.shares(x, piece)).enumerate() {
            let [k, v] = [&x.k, &x.v].map(|x| self.seen(x, piece, n));
            let factors = NETWORK.gradients(k.clone(), &memory.start, |z| z - v);
            outputs.push(match self.muon {
                true => orthogonal_steps(q, &factors, shares, memory),
                false => plain_steps((q, k), &factors, shares, memory),
            });
            if piece.ends {
                memory.start.clone_from(&memory.running);
            }
        }
        in_a_row(stack(outputs, 2))
    }

    /// The rows of `x` that mini-batch `n` of a piece learns from, `[B, H, C + c - 1, X]`.
    fn seen<B: Backend>(self, x: &Tensor<B, 4>, piece: Piece, n: usize) -> Tensor<B, 4> {
        let from = piece.from + n * piece.rows;
        x.clone().narrow(1, from, piece.rows + self.before()).swap_dims(1, 2)
    }

    /// Of each mini-batch of a piece.
    fn shares<B: Backend>(self, x: &Rows<B>, piece: Piece) -> Vec<Shares<B>> {
        let rate = piece.by_head(&x.rate).swap_dims(3, 4);
        let (kept, keep) = decays(piece.by_head(&x.log_keep));
        let mut eta = x.log_eta.as_ref().map(|log| {
            let (followed, follow) = decays(piece.by_head(log));
            each_batch(followed).zip(each_batch(follow))
        });
        let band = self.band(&x.gamma, piece.rows);
        let of = |(n, (step, keep)): (usize, (Tensor<B, 4>, Tensor<B, 4>))| {
            let window = self.seen(&x.gamma, piece, n).transpose() * band.clone();
            let (followed, follow) = match eta.as_mut().and_then(Iterator::next) {
                Some((followed, follow)) => (followed.matmul(window), Some(follow)),
                None => (window, None),
            };
            Shares { step, keep, followed, follow }
        };
        each_batch(kept * rate).zip(each_batch(keep)).enumerate().map(of).collect()
    }

    /// Ones where a token, a row of `rows`, learns from another, a column: `[1, 1, rows, rows + c - 1]`.
    fn band<B: Backend>(self, like: &Tensor<B, 4>, rows: usize) -> Tensor<B, 4> {
        let shape = [1, 1, rows, rows + self.before()];
        let ones = Tensor::<B, 4>::ones(shape, (&like.device(), like.dtype()));
        ones.triu(0).tril(self.before() as i64)
    }
}

/// Outputs of a mini-batch, `[B, H, C, V]`, and the memory behind it, where steps are sums of gradients.
fn plain_steps<B: Backend>(
    (q, k): (Tensor<B, 4>, Tensor<B, 4>),
    factors: &[Factors<B>],
    shares: Shares<B>,
    memory: &mut NetworkMemory<B>,
) -> Tensor<B, 4> {
    let Shares { step, keep, followed, follow } = shares;
    let of_memory = step.clone().matmul(followed.clone());
    let mut past = vec![Past { tensors: &memory.running, keep: Some(keep) }];
    let mut next = None;
    if let Some(follow) = follow {
        let carried = Some(step.matmul(follow.clone()));
        past.push(Past { tensors: &memory.momentum, keep: carried });
        let before = Past { tensors: &memory.momentum, keep: Some(follow) };
        next = Some(write(&[before], factors, &last_row(&followed)));
    }
    let met = q.clone().matmul(k.transpose()) * of_memory.clone();
    let y = NETWORK.read((q, met), &past, factors, &of_memory);
    memory.running = write(&past, factors, &last_row(&of_memory));
    if let Some(next) = next {
        memory.momentum = next;
    }
    y
}

/// The same where every token's step is made orthogonal, and with it every token's weights are formed.
fn orthogonal_steps<B: Backend>(
    q: Tensor<B, 4>,
    factors: &[Factors<B>],
    shares: Shares<B>,
    memory: &mut NetworkMemory<B>,
) -> Tensor<B, 4> {
    let Shares { step, keep, followed, follow } = shares;
    let each = |x: &Tensor<B, 4>| x.clone().unsqueeze_dim::<5>(2);
    let last = |x: &Tensor<B, 5>| -> Tensor<B, 4> {
        let tokens = x.dims()[2];
        x.clone().narrow(2, tokens - 1, 1).squeeze_dim(2)
    };
    let mut sums: Vec<_> = sums(factors, &followed).into_iter().map(Tensor::neg).collect();
    if let Some(follow) = follow {
        let follow = follow.unsqueeze_dim::<5>(4);
        let all = sums.into_iter().zip(&memory.momentum);
        sums = all.map(|(sum, before)| sum + each(before) * follow.clone()).collect();
        memory.momentum = sums.iter().map(last).collect();
    }
    let keep = keep.unsqueeze_dim::<5>(4);
    let weights = |(sum, now): (Tensor<B, 5>, &Tensor<B, 4>)| {
        let steps = weighed(&step, orthogonal(sum, JORDAN_STEPS));
        steps + each(now) * keep.clone()
    };
    let weights: Vec<_> = sums.into_iter().zip(&memory.running).map(weights).collect();
    memory.running = weights.iter().map(last).collect();
    NETWORK.apply_each(q, &weights)
}

/// Sums over matrices of C tokens, `[B, H, C, from, to]`, in these shares, `[B, H, C, C]`.
fn weighed<B: Backend>(shares: &Tensor<B, 4>, x: Tensor<B, 5>) -> Tensor<B, 5> {
    let shape @ [batch, heads, tokens, from, to] = x.dims();
    let flat: Tensor<B, 4> = x.reshape([batch, heads, tokens, from * to]);
    shares.clone().matmul(flat).reshape(shape)
}
