//! Linear attention of many memories: the further back tokens lie, the more of them share one.
//! ```text
//! level(i, j) = bits of i xor j, counted from 0; L - 1 at most       0 for the token itself
//! S_i         = T(S_{i-1}) + k_i^T u_i                               of every level, see below
//! o_i         = sum over levels l of w_i^l q_i S_i^l                 S^l: of the tokens j of level(i, j) = l
//! ```
//! T(S) is e^g S and u is v; or, by the delta rule, T(S) = e^g (I - beta k^T k) S and u = beta v. The levels of the
//! tokens before i are the blocks of a Fenwick tree, as long as the powers of 2 that i is a sum of: two blocks that
//! become one never part again, so their memories are added.
//! Source: log-linear attention, arXiv 2506.04761. A sequence is taken in pieces, each by matrices of its tokens.

use super::layers::each_part;
use crate::ops::{Along, LinearAttentionBackend, accumulator, cat, solve_unit_lower, typed};
use burn::tensor::{Int, Tensor, TensorData, backend::Backend};

/// Tokens of a piece.
const PIECE: usize = 32;

/// Keys, values, gates and queries of tokens.
#[derive(Clone)]
pub(crate) struct Leveled<B: Backend> {
    /// `[B, T, H, K]`.
    pub(crate) q: Tensor<B, 4>,
    pub(crate) k: Tensor<B, 4>,
    /// `[B, T, H, V]`.
    pub(crate) v: Tensor<B, 4>,
    /// How much of each level is read, `[B, T, H, L]`.
    pub(crate) weights: Tensor<B, 4>,
    /// Log decay, `[B, T, H]`.
    pub(crate) g: Tensor<B, 3>,
    /// Of the delta rule, `[B, T, H]`.
    pub(crate) beta: Option<Tensor<B, 3>>,
}

impl<B: LinearAttentionBackend> Leveled<B> {
    /// After `position` tokens, whose memories of levels 1 to L - 1 are side by side, `[B, H, K, (L - 1) V]`: outputs,
    /// `[B, T, H, V]` in f32 at least, and the memories after the last token.
    pub(crate) fn attend(
        self,
        position: usize,
        memory: Option<Tensor<B, 4>>,
    ) -> (Tensor<B, 4>, Tensor<B, 4>) {
        let ([batch, tokens, heads, width], levels) = (self.k.dims(), self.weights.dims()[3]);
        let size = [batch, heads, width, (levels - 1) * self.v.dims()[3]];
        let mut memory =
            memory.unwrap_or_else(|| Tensor::zeros(size, (&self.g.device(), self.g.dtype())));
        let mut outputs = vec![];
        for from in (0..tokens).step_by(PIECE) {
            let piece = self.piece(from, PIECE.min(tokens - from));
            let (o, next) = piece.attend(Blocks { levels, position: position + from }, memory);
            outputs.push(o);
            memory = next;
        }
        (cat(outputs, 1), memory)
    }

    fn piece(&self, from: usize, tokens: usize) -> Piece<B> {
        let rows =
            |x: &Tensor<B, 4>| accumulator(x.clone().narrow(1, from, tokens)).swap_dims(1, 2);
        let column = |x: &Tensor<B, 3>| rows(&x.clone().unsqueeze_dim(3));
        Piece {
            q: rows(&self.q),
            k: rows(&self.k),
            v: rows(&self.v),
            weights: rows(&self.weights),
            since_start: column(&self.g).cumsum(2),
            beta: self.beta.as_ref().map(column),
        }
    }
}

/// Some tokens, heads first: `[B, H, N, ..]`.
struct Piece<B: Backend> {
    q: Tensor<B, 4>,
    k: Tensor<B, 4>,
    v: Tensor<B, 4>,
    weights: Tensor<B, 4>,
    /// Log decay since the piece's start, `[B, H, N, 1]`.
    since_start: Tensor<B, 4>,
    beta: Option<Tensor<B, 4>>,
}

/// A piece as it acts on memories, were there one level only.
struct Matrices<B: Backend> {
    /// Weight of token j's value in token i's output, `[B, H, N, N]`.
    scores: Tensor<B, 4>,
    /// Each token's query to the memory before the piece, `[B, H, N, K]`.
    queries: Tensor<B, 4>,
    /// Key by which each token's value is in the memory after the piece, `[B, H, K, N]`.
    writes: Tensor<B, 4>,
    /// The delta rule's erasure of the memory before the piece, `[B, H, K, K]`.
    erased: Option<Tensor<B, 4>>,
}

impl<B: LinearAttentionBackend> Piece<B> {
    fn attend(self, blocks: Blocks, memory: Tensor<B, 4>) -> (Tensor<B, 4>, Tensor<B, 4>) {
        let ([batch, heads, tokens, value_width], width) = (self.v.dims(), self.k.dims()[3]);
        let (levels, device) = (blocks.levels - 1, self.v.device());
        let total = self.since_start.clone().narrow(2, tokens - 1, 1).exp();
        let Matrices { scores, queries, writes, erased } = self.matrices();

        let of_tokens = self.read_weights(blocks.of_tokens(tokens, &device));
        let within = (scores * of_tokens).matmul(self.v.clone());
        let of_memories = self.read_weights(blocks.of_memories(tokens, &device)).unsqueeze_dim(4);
        let answers = queries.matmul(memory.clone());
        let answers = answers.reshape([batch, heads, tokens, levels, value_width]);
        let before = (answers * of_memories).sum_along(3).squeeze_dim::<4>(3);

        let kept = memory.clone() * total;
        let kept = match erased {
            Some(erased) => kept - erased.matmul(memory),
            None => kept,
        };
        let kept = blocks.joined(kept.reshape([batch, heads, width, levels, value_width]), tokens);
        let after = typed(blocks.after(tokens, &device).float(), kept.dtype());
        let apart = self.v.unsqueeze_dim::<5>(3) * after;
        let added = writes.matmul(apart.reshape([batch, heads, tokens, levels * value_width]));
        let kept = kept.reshape([batch, heads, width, levels * value_width]);
        ((within + before).swap_dims(1, 2), kept + added)
    }

    /// Weights by level, `[B, H, N, X]`, of levels `[N, X]`.
    fn read_weights(&self, levels: Tensor<B, 2, Int>) -> Tensor<B, 4> {
        let [batch, heads, tokens, _] = self.weights.dims();
        let many = levels.dims()[1];
        let levels = levels.unsqueeze::<4>().expand([batch, heads, tokens, many]);
        self.weights.clone().gather(3, levels)
    }

    fn matrices(&self) -> Matrices<B> {
        let (g, tokens) = (self.since_start.clone(), self.k.dims()[2]);
        let lower = |strict: i64| {
            let ones = Tensor::<B, 2>::ones([tokens, tokens], (&g.device(), g.dtype()));
            ones.tril(strict).unsqueeze::<4>()
        };
        let decay = ((g.clone() - g.clone().swap_dims(2, 3)) * lower(0)).exp() * lower(0);
        let to_end = (g.clone().narrow(2, tokens - 1, 1) - g.clone()).exp();
        let keys = self.k.clone().swap_dims(2, 3);
        let scores = self.q.clone().matmul(keys.clone()) * decay.clone();
        let queries = self.q.clone() * g.clone().exp();
        let writes = (self.k.clone() * to_end).swap_dims(2, 3);
        let Some(beta) = self.beta.clone() else {
            return Matrices { scores, queries, writes, erased: None };
        };
        // Values that tokens write in the end: `solved` of values, less `retrieved` of the memory.
        let met = self.k.clone().matmul(keys) * decay * lower(-1) * beta.clone();
        let own = (lower(0) - lower(-1)) * beta.clone();
        let solved = solve_unit_lower(met.clone(), own);
        let retrieved = solve_unit_lower(met, self.k.clone() * g.exp() * beta);
        Matrices {
            queries: queries - scores.clone().matmul(retrieved.clone()),
            scores: scores.matmul(solved.clone()),
            erased: Some(writes.clone().matmul(retrieved)),
            writes: writes.matmul(solved),
        }
    }
}

/// The blocks of tokens that memories hold after so many.
#[derive(Clone, Copy)]
struct Blocks {
    /// L, the token itself among them.
    levels: usize,
    position: usize,
}

impl Blocks {
    /// level(i, j).
    fn level(self, i: usize, j: usize) -> usize {
        ((usize::BITS - (i ^ j).leading_zeros()) as usize).min(self.levels - 1)
    }

    /// A token of the block of this level, if it holds any.
    fn token(self, level: usize) -> Option<usize> {
        let last = level + 1 == self.levels;
        match self.position >> (level - 1) {
            0 => None,
            _ if last => Some(0),
            blocks if blocks % 2 == 0 => None,
            _ => Some(self.position >> level << level),
        }
    }

    /// Levels of the piece's tokens as each of them sees the others, `[N, N]`; what lies ahead is of none.
    fn of_tokens<B: Backend>(self, tokens: usize, device: &B::Device) -> Tensor<B, 2, Int> {
        let level = |i: usize, j: usize| self.level(self.position + i, self.position + j.min(i));
        table(tokens, tokens, level, device)
    }

    /// Levels of the memories as each token sees them, `[N, L - 1]`; an empty one has any.
    fn of_memories<B: Backend>(self, tokens: usize, device: &B::Device) -> Tensor<B, 2, Int> {
        let level = |i: usize, memory: usize| match self.token(memory + 1) {
            Some(token) => self.level(self.position + i, token),
            None => 0,
        };
        table(tokens, self.levels - 1, level, device)
    }

    /// 1 where a token of the piece is in the block of a level after it, else 0: `[1, 1, N, L - 1, 1]`.
    fn after<B: Backend>(self, tokens: usize, device: &B::Device) -> Tensor<B, 5, Int> {
        let next = self.position + tokens;
        let is = |i: usize, memory: usize| {
            usize::from(self.level(next, self.position + i) == memory + 1)
        };
        let table = table(tokens, self.levels - 1, is, device);
        table.reshape([1, 1, tokens, self.levels - 1, 1])
    }

    /// Memories, `[B, H, K, L - 1, V]`, added up to those of the blocks `tokens` later.
    fn joined<B: Backend>(self, memories: Tensor<B, 5>, tokens: usize) -> Tensor<B, 5> {
        let (next, parts) = (self.position + tokens, each_part(memories, 3));
        let of = |level: usize| {
            let here = (1..self.levels).filter(|&old| {
                self.token(old).is_some_and(|token| self.level(next, token) == level)
            });
            let sum = here.map(|old| parts[old - 1].clone()).reduce(|a, b| a + b);
            sum.unwrap_or_else(|| parts[0].zeros_like())
        };
        cat((1..self.levels).map(of).collect(), 3)
    }
}

/// Whole numbers of a row and a column.
fn table<B: Backend>(
    rows: usize,
    columns: usize,
    number: impl Fn(usize, usize) -> usize,
    device: &B::Device,
) -> Tensor<B, 2, Int> {
    let cells = (0..rows).flat_map(|i| (0..columns).map(move |j| (i, j)));
    let numbers: Vec<i32> = cells.map(|(i, j)| number(i, j) as i32).collect();
    Tensor::from_data(TensorData::new(numbers, [rows, columns]), device)
}
