//! Attention Free Transformer. Recurrence, shapes and source: [`Aft`].

use super::{TokenMixer, linear_flops, scan_cost};
use crate::nn::convolution::ConvPast;
use crate::nn::layers::{INIT_STD, ResidualLinear, linear};
use crate::nn::pair_sums::{Biases, nothing, summed};
use crate::nn::projection::{Projection, project};
use crate::nn::{
    ConfigError, Cost, KeptTensors, Linear, RecurrentState, Shared, StateTensors, positive,
};
use crate::ops::{LinearAttentionBackend, accumulator, cat, typed};
use burn::module::{Initializer, Module, Param};
use burn::tensor::activation::sigmoid;
use burn::tensor::{Tensor, backend::Backend};
use serde::{Deserialize, Serialize};

/// Config of [`Aft`], the Attention Free Transformer. The layer's page has recurrence, shapes, errors and
/// source.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AftConfig {
    /// Which pairs of positions have a bias.
    pub form: AftForm,
}

/// Which pairs of positions have a bias: a name, or a table for those that have options.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum AftForm {
    /// None.
    #[default]
    Simple,
    /// A token and those just before it.
    Local {
        /// s: tokens that have a bias, the token itself and those just before it.
        window: usize,
        /// Positions that there are, at least the tokens of the longest sequence.
        length: usize,
        /// Width of u and p.
        #[serde(default = "usual_rank")]
        rank: usize,
    },
    /// All.
    Full {
        /// Positions that there are, at least the tokens of the longest sequence.
        length: usize,
        /// Width of u and p.
        #[serde(default = "usual_rank")]
        rank: usize,
    },
}

fn usual_rank() -> usize {
    128
}

impl AftForm {
    fn window(self) -> Option<usize> {
        match self {
            Self::Local { window, .. } => Some(window),
            _ => None,
        }
    }

    /// Positions, and the width of their vectors.
    fn table(self) -> Option<[usize; 2]> {
        match self {
            Self::Simple => None,
            Self::Local { length, rank, .. } | Self::Full { length, rank } => Some([length, rank]),
        }
    }

    /// Where its keys stand in a config.
    fn key(self) -> &'static str {
        match self {
            Self::Simple => "form.simple",
            Self::Local { .. } => "form.local",
            Self::Full { .. } => "form.full",
        }
    }

    fn check(self) -> Result<(), ConfigError> {
        positive("window", self.window().unwrap_or(1))?;
        let [length, rank] = self.table().unwrap_or([1, 1]);
        positive("length", length)?;
        positive("rank", rank).map(drop)
    }
}

/// Refuses sequences of `length` tokens where fewer positions are `known`.
pub(super) fn check_known(known: usize, length: usize) -> Result<(), ConfigError> {
    if length <= known {
        return Ok(());
    }
    let want = format!("at least {length}, the length of the longest sequence");
    Err(ConfigError::new("length", known, want))
}

impl AftConfig {
    pub(super) fn resolve(&self, d_model: usize) -> Result<usize, ConfigError> {
        self.form.check().map_err(|e| e.within(self.form.key()))?;
        positive("d_model", d_model)
    }

    /// Builds the layer for a model of width `d_model`.
    /// # Errors
    /// [`ConfigError`] names the first key that does not fit.
    pub fn init<B: Backend>(
        &self,
        d_model: usize,
        device: &B::Device,
    ) -> Result<Aft<B>, ConfigError> {
        self.resolve(d_model)?;
        let normal = Initializer::Normal { mean: 0.0, std: INIT_STD };
        let table = || self.form.table().map(|shape| normal.init(shape, device));
        Ok(Aft {
            q_proj: linear(d_model, d_model, device),
            k_proj: linear(d_model, d_model, device),
            v_proj: linear(d_model, d_model, device),
            query_positions: table(),
            key_positions: table(),
            o_proj: linear(d_model, d_model, device).into(),
            window: self.form.window(),
        })
    }

    /// Cost in a model of width `d_model`, over sequences of `length` tokens.
    /// # Errors
    /// As [`init`](Self::init); and sequences longer than there are positions.
    pub fn cost(&self, d_model: usize, length: usize) -> Result<Cost, ConfigError> {
        self.resolve(d_model)?;
        let mut cost = Cost::default();
        let mut kept = 0;
        if let Some([known, rank]) = self.form.table() {
            check_known(known, length).map_err(|e| e.within(self.form.key()))?;
            let pairs;
            (kept, pairs) = match self.form.window() {
                Some(window) => (window, window),
                // On average a token looks at half the sequence.
                None => (length, length.div_ceil(2)),
            };
            // The bias; and for each channel a sum, an exponential and two terms of sums.
            cost.flops_per_token += (pairs * (2 * rank + 5 * d_model)) as u64;
        }
        if !matches!(self.form, AftForm::Full { .. }) {
            cost += scan_cost(2 * d_model);
            cost.state_bytes += 4 * d_model as u64;
        }
        cost.state_bytes += 4 * (kept * 2 * d_model) as u64;
        cost.flops_per_token += linear_flops(d_model, 4 * d_model);
        Ok(cost)
    }
}

/// State of an Attention Free Transformer between two tokens.
#[derive(Debug, Clone)]
pub struct AftState<B: Backend> {
    /// Keys and values side by side, `[B, S, 2 D]`, of the tokens whose bias is learnt: all so far, or the last
    /// s, before the first of which stand keys of no weight. `None` in the simple form.
    pub recent: Option<Tensor<B, 3>>,
    /// Of all other tokens: sums of values and of weights over e^m, `[B, 1, 2 D]`, and m, `[B, 1, D]`. Empty in the
    /// full form.
    pub memory: KeptTensors<B>,
    /// Tokens seen.
    pub position: usize,
}

impl<B: Backend> RecurrentState<B> for AftState<B> {
    fn tensors(&self) -> StateTensors<B> {
        let tensors = StateTensors::new(Some(self.position)).with_kept("memory", &self.memory);
        match &self.recent {
            Some(recent) => tensors.with_growing("recent", recent, 1),
            None => tensors,
        }
    }

    fn from_tensors(mut tensors: StateTensors<B>) -> Self {
        let (position, memory) = (tensors.position(), tensors.take_kept("memory"));
        Self { recent: tensors.take_if_any("recent"), memory, position }
    }
}

/// Attention Free Transformer (AFT): an average of all values so far for each channel, weighted by
/// exponentials.
///
/// A weight is the exponential of a key and of a learnt bias of the two positions.
///
/// # Recurrence
/// ```text
/// q, k, v = x W
/// w_tj    = u_t p_j^T                         full: for all pairs of positions
///         = u_t p_j^T if t - j < s, else 0    local
///         = 0                                 simple
/// a_t     = sum_{j <= t} e^{k_j + w_tj} v_j,  b_t = sum_{j <= t} e^{k_j + w_tj}        channel by channel
/// y       = (sigmoid(q) a / b) W_o
/// ```
/// ```text
/// x_t, position ──> q, k, v, u, p
///                     ┌─ write, recent ─┐   ┌─ write, sums ┐
/// a, b, recent ──────>│ append k, v     │──>│ a + e^k v    │──┬──> a, b, recent
///                     │ drop the oldest │   │ b + e^k      │  │
///                     └─────────────────┘   └──────────────┘  │
///                 ┌─ read ─────────────────────────────────┐  │
///  y_t <── W_o <──│ a, b and recent, weighted by e^{k + w} │<─┘
///                 │ sigmoid(q) a / b                       │
///                 └────────────────────────────────────────┘
/// ```
/// The last s tokens, which have a bias, are kept with their keys and values, and taken pair by pair, T S
/// numbers a channel for S of them. A token that is dropped from them is written to the sums a and b: a
/// recurrence, RWKV-4's without its decay. In the simple form a token is written at once, in the full form
/// none is dropped. Sums are kept over the exponential of their largest term, through which no gradient is
/// taken. A model knows as many positions as `length` says, and no more.
/// # Shapes and units
/// Input and output are `[B, T, D]`. The state is an [`AftState`]: `memory`, a and b over e^m, `[B, 1, 2 D]`,
/// and m, `[B, 1, D]`; `recent`, keys and values of tokens that have a bias, `[B, S, 2 D]`, which grows with
/// T in the full form; `position`, tokens seen. k and w are natural logs of a token's weight.
/// # Errors
/// [`AftConfig::init`] gives a [`ConfigError`] with the first key that does not fit: a `window`, `length` or
/// `rank` of 0 or a width of 0. `cost` refuses sequences longer than there are positions; `run` panics where
/// one goes past them.
/// # Source
/// Zhai et al., arXiv 2105.14103, whose biases are factored like this, with the future hidden.
#[derive(Module, Debug)]
pub struct Aft<B: Backend> {
    q_proj: Linear<B>,
    k_proj: Linear<B>,
    v_proj: Linear<B>,
    /// u, `[positions, rank]`.
    query_positions: Option<Param<Tensor<B, 2>>>,
    /// p, `[positions, rank]`.
    key_positions: Option<Param<Tensor<B, 2>>>,
    o_proj: ResidualLinear<B>,
    #[module(skip)]
    window: Option<usize>,
}

impl<B: LinearAttentionBackend> TokenMixer<B> for Aft<B> {
    type State = AftState<B>;
    const COUNTS_TOKENS: bool = true;
    const TAKES_BF16: bool = true;

    fn counts_tokens(&self) -> bool {
        self.query_positions.is_some()
    }

    fn positions(&self) -> Option<usize> {
        self.query_positions.as_ref().map(|table| table.dims()[0])
    }

    fn run(
        &self,
        x: Tensor<B, 3>,
        state: Option<AftState<B>>,
        _shared: &mut Shared<B>,
    ) -> (Tensor<B, 3>, AftState<B>) {
        let (tokens, dtype) = (x.dims()[1], x.dtype());
        let projections = [&self.q_proj, &self.k_proj, &self.v_proj].map(Projection::plain);
        let [q, k, v] = project(&x, projections, &mut ConvPast::none());
        let new = cat(vec![accumulator(k), accumulator(v)], 2);
        let (recent, sums, position) = match state {
            Some(AftState { recent, memory, position }) => (recent, memory, position),
            None => (self.window.map(|window| nothing(&new, window)), KeptTensors::default(), 0),
        };
        let all = match recent {
            Some(recent) => cat(vec![recent, new], 1),
            None => new,
        };
        let state = |recent, memory| AftState { recent, memory, position: position + tokens };
        let (mean, state) = match (self.biases(), self.window) {
            (None, _) => {
                let (partial, sums) = summed(all, sums);
                (partial.mean(), state(None, sums))
            }
            (Some(biases), None) => {
                let near = biases.paired(&all, position, tokens, None);
                (near.mean(), state(Some(all), KeptTensors::default()))
            }
            (Some(biases), Some(window)) => {
                let (far, sums) = summed(all.clone().narrow(1, 0, tokens), sums);
                let near = biases.paired(&all, position, tokens, Some(window));
                let recent = all.narrow(1, tokens, window);
                (near.with(far).mean(), state(Some(recent), sums))
            }
        };
        (self.o_proj.forward(sigmoid(q) * typed(mean, dtype)), state)
    }
}

impl<B: Backend> Aft<B> {
    fn biases(&self) -> Option<Biases<B>> {
        let (queries, keys) = (self.query_positions.as_ref()?, self.key_positions.as_ref()?);
        Some(Biases { queries: queries.val(), keys: keys.val() })
    }
}
