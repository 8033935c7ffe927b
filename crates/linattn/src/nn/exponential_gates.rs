//! Memories that are written by exponentials of any size: kept as e^m times smaller ones.
//! ```text
//! C_t = e^{l_t} C_{t-1} + e^{i_t} z_t              l_t <= 0
//! m_t = max(l_t + m_{t-1}, i_t)
//! C_t / e^{m_t} = e^{l_t + m_{t-1} - m_t} (C_{t-1} / e^{m_{t-1}}) + e^{i_t - m_t} z_t
//! ```
//! m does not depend on the memory: with L the running sum of l, it is `L_t + max(m_0, max_{j <= t} i_j - L_j)`.

use super::Kept;
use super::convolution::ConvPast;
use super::recurrence::linear_attention;
use crate::ops::{self, LOWEST, LinearAttentionBackend, accumulator, cat, typed};
use burn::tensor::{Tensor, backend::Backend};

/// Columns that tensor cores take at a time.
const ALIGNED: usize = 16;

/// Gates over e^m, `[B, T, H]`.
pub(crate) struct Stabilised<B: Backend> {
    /// g: log decay of the memory.
    pub(crate) keep: Tensor<B, 3>,
    /// Factor of the keys.
    pub(crate) write: Tensor<B, 3>,
    /// m.
    pub(crate) largest: Tensor<B, 3>,
    /// m of the last token, `[B, 1, H]`.
    pub(crate) last: Tensor<B, 3>,
}

/// `before` is the last m so far, `[B, 1, H]`, 0 if absent.
pub(crate) fn stabilise<B: Backend>(
    log_keep: Tensor<B, 3>,
    log_write: Tensor<B, 3>,
    before: Option<Tensor<B, 3>>,
) -> Stabilised<B> {
    let [batch, tokens, heads] = log_keep.dims();
    let kept = log_keep.clone().detach().cumsum(1);
    let first = before.unwrap_or_else(|| kept.clone().narrow(1, 0, 1).zeros_like());
    let written = (log_write.clone().detach() - kept.clone()).cummax(1);
    let largest = kept + written.max_pair(first.clone().expand([batch, tokens, heads]));
    let last = largest.clone().narrow(1, tokens - 1, 1);
    let earlier = cat(vec![first, largest.clone()], 1).narrow(1, 0, tokens);
    Stabilised {
        // In this order: the difference of two m is exact where they are close.
        keep: log_keep + (earlier - largest.clone()),
        write: (log_write - largest.clone()).exp(),
        largest,
        last,
    }
}

/// Inputs of mLSTM's recurrence: `[B, T, H, ..]`.
pub(crate) struct Asked<B: Backend> {
    /// Before it is divided by sqrt(K).
    pub(crate) q: Tensor<B, 4>,
    pub(crate) k: Tensor<B, 4>,
    pub(crate) v: Tensor<B, 4>,
    /// i.
    pub(crate) log_write: Tensor<B, 3>,
    /// ln sigmoid(f).
    pub(crate) log_keep: Tensor<B, 3>,
}

impl<B: LinearAttentionBackend> Asked<B> {
    /// h, `[B, T, H, V]`, and the memory after token T, `[B, H, K, V + 1]`. m, `[B, 1, H]`, is kept as
    /// [`Kept::Maximum`].
    pub(crate) fn answer(
        self,
        memory: Option<Tensor<B, 4>>,
        conv_states: &mut ConvPast<B>,
    ) -> (Tensor<B, 4>, Tensor<B, 4>) {
        let Self { q, k, v, log_write, log_keep } = self;
        let Stabilised { keep, write, largest, last } =
            stabilise(log_keep, log_write, conv_states.draw(Kept::Maximum));
        conv_states.keep(Kept::Maximum, last);
        let (scale, value_width, dtype) = ((q.dims()[3] as f64).powf(-0.5), v.dims()[3], v.dtype());
        let k = k * typed(write, dtype).unsqueeze_dim::<4>(3);
        // n is one more column of the memory, written with a value of 1; zeros behind it let kernels take whole tiles.
        let padding = match (v.dims()[1], ops::path::<B>(&v.device())) {
            (2.., ops::Path::Kernels) => {
                (value_width + 1).next_multiple_of(ALIGNED) - value_width - 1
            }
            _ => 0,
        };
        let ones = v.clone().narrow(3, 0, 1).ones_like();
        let v = padded(vec![v, ones], padding);
        let inputs = ops::LinearAttentionInputs::new(q * scale, k, v).with_decay(keep);
        let memory = memory.map(|memory| padded(vec![memory], padding));
        let (o, memory) = linear_attention(inputs, memory, None);
        let memory = match padding {
            0 => memory,
            _ => memory.narrow(3, 0, value_width + 1),
        };
        let o = accumulator(o);
        let written = o.clone().narrow(3, value_width, 1).abs();
        let least = largest.neg().exp().unsqueeze_dim::<4>(3);
        let h = o.narrow(3, 0, value_width) / (written.max_pair(least) + 1e-6);
        (typed(h, dtype), memory)
    }
}

/// `parts`, `[B, T, H, ..]`, side by side, and `count` columns of zeros behind them.
fn padded<B: Backend>(mut parts: Vec<Tensor<B, 4>>, count: usize) -> Tensor<B, 4> {
    if count > 0 {
        let [batch, tokens, heads, _] = parts[0].dims();
        let options = (&parts[0].device(), parts[0].dtype());
        parts.push(Tensor::zeros([batch, tokens, heads, count], options));
    }
    match parts.len() {
        1 => parts.remove(0),
        _ => cat(parts, 3),
    }
}

/// Sums of values and of their weights up to each token, over the exponential of a running maximum.
pub(crate) struct Sums<B: Backend> {
    /// a and b over e^m, `[B, T, 2 D]`.
    pub(crate) all: Tensor<B, 3>,
    /// m, `[B, T, D]`.
    pub(crate) largest: Tensor<B, 3>,
    /// The memory before the first token.
    pub(crate) before: (Tensor<B, 3>, Tensor<B, 3>),
    /// The memory after the last: a and b over e^m, `[B, 1, 2 D]`, and m, `[B, 1, D]`.
    pub(crate) next: [(Kept, Tensor<B, 3>); 2],
}

/// The sums of `e^k v` and of `e^k`, which keep `e^log_keep` of themselves with each token: all in f32 at least,
/// `[B, T, D]`.
pub(crate) fn exponential_sums<B: LinearAttentionBackend>(
    log_keep: Tensor<B, 3>,
    k: Tensor<B, 3>,
    v: Tensor<B, 3>,
    memory: Option<(Tensor<B, 3>, Tensor<B, 3>)>,
) -> Sums<B> {
    let (sums, lowest) = memory.unwrap_or_else(|| {
        let first = k.clone().detach().narrow(1, 0, 1);
        (cat(vec![first.zeros_like(); 2], 2), first.full_like(LOWEST))
    });
    let log_keep = log_keep.expand(k.dims());
    let Stabilised { keep, write, largest, last } = stabilise(log_keep, k, Some(lowest.clone()));
    let keep = keep.exp();
    let written = cat(vec![write.clone() * v, write], 2);
    let (all, next) =
        ops::linear_scan(cat(vec![keep.clone(), keep], 2), written, Some(sums.clone()))
            .expect("the projections made the shapes");
    Sums { all, largest, before: (sums, lowest), next: [(Kept::Sums, next), (Kept::Maximum, last)] }
}
