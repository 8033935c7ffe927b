//! Softmax attention of some queries over all keys so far: the parts that mixers of that kind share.
//! ```text
//! o = softmax(q k^T / sqrt(K) + b) v        over the keys that are seen; b: what their scores gain and lose
//! ```

use super::layers::{merge_heads, rms_norm, split_heads};
use super::state::CONV_STATES;
use super::{ConfigError, KeptTensors, RecurrentState, Rope, StateTensors, positive};
use crate::ops::{self, LinearAttentionBackend, Seen, accumulator, cat, typed};
use burn::nn::{RmsNorm, RmsNormConfig};
use burn::tensor::{Tensor, backend::Backend};

/// Tokens of a windowed sequence that are worked off together, at least.
const PIECE: usize = 128;

/// Heads of keys and values: as given, or as many as there are of queries.
pub(crate) fn check_shared(heads: usize, shared: Option<usize>) -> Result<usize, ConfigError> {
    positive("heads", heads)?;
    let shared = positive("key_value_heads", shared.unwrap_or(heads))?;
    if heads.is_multiple_of(shared) {
        return Ok(shared);
    }
    let want = format!("a divisor of heads = {heads}");
    Err(ConfigError::new("key_value_heads", shared, want))
}

/// Every key and value that a later token may see: a state that grows with the sequence, unless
/// there is a window.
#[derive(Debug, Clone)]
pub struct KeyValueCache<B: Backend> {
    /// `[B, Hk, T, K]`, rotated. With a window, the last of them, one less than it has tokens.
    pub keys: Tensor<B, 4>,
    /// `[B, Hk, T, K]`.
    pub values: Tensor<B, 4>,
    /// Tokens seen.
    pub position: usize,
    /// The last inputs of Canon layers, of those that there are.
    pub conv_states: KeptTensors<B>,
}

impl<B: Backend> RecurrentState<B> for KeyValueCache<B> {
    fn tensors(&self) -> StateTensors<B> {
        StateTensors::new(Some(self.position))
            .with_growing("keys", &self.keys, 2)
            .with_growing("values", &self.values, 2)
            .with_kept(CONV_STATES, &self.conv_states)
    }

    fn from_tensors(mut tensors: StateTensors<B>) -> Self {
        let (position, conv_states) = (tensors.position(), tensors.take_kept(CONV_STATES));
        Self { keys: tensors.take("keys"), values: tensors.take("values"), position, conv_states }
    }
}

impl<B: Backend> KeyValueCache<B> {
    /// `before`, and then these.
    pub(crate) fn after(before: Option<Self>, keys: Tensor<B, 4>, values: Tensor<B, 4>) -> Self {
        let tokens = keys.dims()[2];
        match before {
            Some(before) => Self {
                keys: cat(vec![before.keys, keys], 2),
                values: cat(vec![before.values, values], 2),
                position: before.position + tokens,
                conv_states: before.conv_states,
            },
            None => Self { keys, values, position: tokens, conv_states: KeptTensors::default() },
        }
    }

    /// The part of the cache that later tokens see through `window`.
    fn within(self, window: Option<usize>) -> Self {
        let tokens = self.keys.dims()[2];
        match window {
            Some(window) if tokens >= window => {
                let last = |x: Tensor<B, 4>| x.narrow(2, tokens + 1 - window, window - 1);
                Self { keys: last(self.keys), values: last(self.values), ..self }
            }
            _ => self,
        }
    }
}

/// Attention of queries over keys and values, `[B, .., T, ..]` each and in this order, and over a cache before
/// them. `weigh` is given queries, a cache, and what they see of it, and gives their outputs, `[B, .., H V]`. Gives
/// these, and what of the cache is left after them.
pub(crate) fn through_window<B: Backend>(
    [q, k, v]: [Tensor<B, 4>; 3],
    window: Option<usize>,
    state: Option<KeyValueCache<B>>,
    weigh: impl Fn(Tensor<B, 4>, &KeyValueCache<B>, Seen) -> Tensor<B, 3>,
) -> (Tensor<B, 3>, KeyValueCache<B>) {
    let tokens = q.dims()[2];
    // Through a window, a long sequence is seen piece by piece: the scores outside are not formed.
    let piece = window.map_or(tokens, |window| window.max(PIECE));
    in_pieces(tokens, piece, state, |(from, size), before| {
        let part = |x: &Tensor<B, 4>| x.clone().narrow(2, from, size);
        let q = part(&q);
        let cache = KeyValueCache::after(before, part(&k), part(&v));
        (weigh(q, &cache, Seen::Causal { window }), cache.within(window))
    })
}

/// RMSNorm with a weight for every channel of a head, if it is `wanted`.
pub(crate) fn head_norm<B: Backend>(
    wanted: bool,
    width: usize,
    epsilon: f64,
    device: &B::Device,
) -> Option<RmsNorm<B>> {
    wanted.then(|| RmsNormConfig::new(width).with_epsilon(epsilon).init(device))
}

/// Heads `x`, `[B, T, heads, X]`, as `[B, heads, T, X]`: normalised if there is a norm, then rotated if
/// there is a rotation, given with the position of the first token.
pub(crate) fn turned<B: LinearAttentionBackend>(
    x: Tensor<B, 4>,
    norm: &Option<RmsNorm<B>>,
    rotation: Option<(Rope, usize)>,
) -> Tensor<B, 4> {
    let x = match norm {
        Some(norm) => rms_norm(norm, x, None),
        None => x,
    };
    let x = match rotation {
        Some((rope, position)) => rope.forward(x, position),
        None => x,
    };
    x.swap_dims(1, 2)
}

/// Queries, keys and values of `heads` heads, `[B, H, T, K]` each, queries and keys rotated by their positions.
pub(crate) fn rotated_heads<B: LinearAttentionBackend>(
    [q, k, v]: [Tensor<B, 3>; 3],
    heads: usize,
    rotation: (Rope, usize),
) -> [Tensor<B, 4>; 3] {
    let [q, k] = [q, k].map(|x| turned(split_heads(x, heads), &None, Some(rotation)));
    [q, k, split_heads(v, heads).swap_dims(1, 2)]
}

/// Works `tokens` tokens off, `piece` at a time: `attend` is given a piece, `(first, how many)`,
/// and the state before it. Gives the outputs in a row, and the state after the last.
pub(crate) fn in_pieces<B: Backend, S>(
    tokens: usize,
    piece: usize,
    mut state: Option<S>,
    attend: impl Fn((usize, usize), Option<S>) -> (Tensor<B, 3>, S),
) -> (Tensor<B, 3>, S) {
    let mut outputs = vec![];
    for from in (0..tokens).step_by(piece) {
        let (o, next) = attend((from, piece.min(tokens - from)), state.take());
        outputs.push(o);
        state = Some(next);
    }
    (cat(outputs, 1), state.expect("a sequence has at least one token"))
}

/// Softmax attention of `q`, `[B, H, T, K]`, over the keys and values that are `seen`, `[B, Hk, S, ..]`, where
/// `bias`, `[.., .., .., T, S]`, is added to the scores of each group of heads. Gives `[B, T, H V]`.
pub(crate) fn weigh<B: LinearAttentionBackend>(
    q: Tensor<B, 4>,
    [keys, values]: [&Tensor<B, 4>; 2],
    bias: Option<Tensor<B, 5>>,
    seen: Seen,
) -> Tensor<B, 3> {
    let scores = scores(scaled(q), keys);
    let scores = match bias {
        Some(bias) => scores + bias,
        None => scores,
    };
    merge(gather(scores, values, seen))
}

/// Queries over sqrt(K).
pub(crate) fn scaled<B: Backend>(q: Tensor<B, 4>) -> Tensor<B, 4> {
    let scale = (q.dims()[3] as f64).powf(-0.5);
    q * scale
}

/// Products of `q`, `[B, H, T, K]`, with keys, `[B, Hk, S, K]`: `[B, Hk, H / Hk, T, S]`, in f32 at least.
pub(crate) fn scores<B: LinearAttentionBackend>(
    q: Tensor<B, 4>,
    keys: &Tensor<B, 4>,
) -> Tensor<B, 5> {
    let [batch, heads, tokens, width] = q.dims();
    let shared = keys.dims()[1];
    let q = ops::reshape(q, [batch, shared, heads / shared, tokens, width]);
    accumulator(q.matmul(keys.clone().unsqueeze_dim::<5>(2).transpose()))
}

/// Values, `[B, Hk, S, V]`, of those `seen`, weighed by the softmax of [`scores`]: `[B, H, T, V]`.
pub(crate) fn gather<B: LinearAttentionBackend>(
    scores: Tensor<B, 5>,
    values: &Tensor<B, 4>,
    seen: Seen,
) -> Tensor<B, 4> {
    blend(ops::softmax(scores, seen), values)
}

/// Values, `[B, Hk, S, V]`, in shares, `[B, Hk, H / Hk, T, S]`: `[B, H, T, V]`, in the type of the values.
pub(crate) fn blend<B: LinearAttentionBackend>(
    shares: Tensor<B, 5>,
    values: &Tensor<B, 4>,
) -> Tensor<B, 4> {
    let [batch, shared, group, tokens, _] = shares.dims();
    let o = typed(shares, values.dtype()).matmul(values.clone().unsqueeze_dim::<5>(2));
    ops::reshape(o, [batch, shared * group, tokens, values.dims()[3]])
}

/// `[B, H, T, V]` to `[B, T, H V]`.
pub(crate) fn merge<B: LinearAttentionBackend>(o: Tensor<B, 4>) -> Tensor<B, 3> {
    merge_heads(o.swap_dims(1, 2))
}
