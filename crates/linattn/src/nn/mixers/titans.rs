//! Titans' neural memory. Recurrence, shapes and source: `pages/titans.md`, the page of [`Titans`].

use super::window_attention::{WindowAttention, WindowAttentionConfig};
use super::{TokenMixer, check_divisor, key_width, linear_flops};
use crate::nn::NetworkState;
use crate::nn::conv_qkv::{ConvQkv, Qkv};
use crate::nn::convolution::{ShortConvolution, check_window, convolution_cost};
use crate::nn::fast_weights::{
    InnerModel, Network, NetworkPast, Past, Piece, decays, each_batch, fresh, in_a_row, last_row,
    start, write, zeros_like,
};
use crate::nn::gated_output::GatedOutput;
use crate::nn::layers::{
    GatedRmsNorm, ResidualLinear, check_epsilon, linear, linear_with_bias, merge_heads, split_heads,
};
use crate::nn::projection::Projection;
use crate::nn::{ConfigError, Cost, Linear, NetworkMemory, Shared, positive};
use crate::ops::{self, Activation, LinearAttentionBackend, accumulator, cat, stack, typed};
use burn::module::{Initializer, Module, Param};
use burn::tensor::{Tensor, backend::Backend};
use serde::{Deserialize, Serialize};

const NETWORK: Network = Network { bias: false };
/// Of 1 - alpha: a fresh memory keeps 98 % of itself.
const KEEP_BIAS: f64 = 4.0;

/// Config of [`Titans`], Titans' neural memory. The layer's page has recurrence, shapes, errors and source.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TitansConfig {
    /// Heads, H.
    pub heads: usize,
    /// K, width of a key and of a value; d_model / heads by default.
    pub key_width: Option<usize>,
    /// The memory.
    pub inner: InnerModel,
    /// Tokens of a mini-batch. Changes results.
    pub mini_batch: usize,
    /// Largest theta.
    pub base_lr: f64,
    /// Tokens each short convolution sees, at least 2; 0 for none.
    pub conv_size: usize,
    /// Whether a gate multiplies the output.
    pub output_gate: bool,
    /// Attention through a window whose output the memory gates, as "memory as a gate" has it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attention: Option<WindowAttentionConfig>,
    /// Added to a mean square before its root.
    pub norm_eps: f64,
}

impl Default for TitansConfig {
    fn default() -> Self {
        Self {
            heads: 1,
            key_width: None,
            inner: InnerModel::default(),
            mini_batch: 16,
            base_lr: 0.1,
            conv_size: 4,
            output_gate: true,
            attention: None,
            norm_eps: 1e-5,
        }
    }
}

impl TitansConfig {
    /// K.
    pub(super) fn resolve(&self, d_model: usize) -> Result<usize, ConfigError> {
        positive("heads", self.heads)?;
        let width = key_width(self.key_width, d_model, self.heads)?;
        positive("mini_batch", self.mini_batch)?;
        check_divisor("base_lr", self.base_lr)?;
        check_window(self.conv_size, 0)?;
        check_epsilon(self.norm_eps)?;
        if let Some(attention) = &self.attention {
            attention.check(self.heads * width).map_err(|e| e.within("attention"))?;
        }
        Ok(width)
    }

    /// Builds the layer for a model of width `d_model`.
    /// # Errors
    /// [`ConfigError`] names the first key that does not fit.
    pub fn init<B: Backend>(
        &self,
        d_model: usize,
        device: &B::Device,
    ) -> Result<Titans<B>, ConfigError> {
        let width = self.resolve(d_model)?;
        let keys = self.heads * width;
        let project = || linear(d_model, keys, device);
        let conv = || ShortConvolution::optional(keys, self.conv_size, device);
        let gate = || linear_with_bias(d_model, self.heads, device);
        let bias = Initializer::Constant { value: KEEP_BIAS }.init([self.heads], device);
        let layers = self.inner.layers(width, width).into_iter();
        Ok(Titans {
            q_proj: project(),
            k_proj: project(),
            v_proj: project(),
            q_conv1d: conv(),
            k_conv1d: conv(),
            v_conv1d: conv(),
            rate_proj: gate(),
            momentum_proj: gate(),
            keep_proj: Linear { bias: Some(bias), ..gate() },
            weights: layers.map(|size| fresh(self.heads, size, NETWORK, device)).collect(),
            g_proj: self.output_gate.then(project),
            o_norm: GatedRmsNorm::new(width, self.norm_eps, device),
            o_proj: linear(keys, d_model, device).into(),
            attention: self.attention.map(|branch| branch.init([d_model, keys], device)),
            a_norm: self.attention.map(|_| GatedRmsNorm::new(width, self.norm_eps, device)),
            heads: self.heads,
            mini_batch: self.mini_batch,
            base_lr: self.base_lr,
        })
    }

    /// Cost in a model of width `d_model`.
    /// # Errors
    /// As [`init`](Self::init).
    pub fn cost(&self, d_model: usize, _length: usize) -> Result<Cost, ConfigError> {
        let width = self.resolve(d_model)?;
        let keys = self.heads * width;
        let layers = self.inner.layers(width, width);
        let (weights, inner) = NETWORK.cost(&layers, self.heads, self.mini_batch);
        let inward = keys * if self.output_gate { 4 } else { 3 } + 3 * self.heads;
        let mut cost = Cost {
            state_bytes: 4 * 3 * weights,
            flops_per_token: inner + linear_flops(d_model, inward) + linear_flops(keys, d_model),
        };
        cost += convolution_cost(self.conv_size, 3 * keys);
        if let Some(branch) = &self.attention {
            cost += branch.cost([d_model, keys]);
        }
        Ok(cost)
    }
}

#[doc = include_str!("pages/titans.md")]
#[derive(Module, Debug)]
pub struct Titans<B: Backend> {
    q_proj: Linear<B>,
    k_proj: Linear<B>,
    v_proj: Linear<B>,
    q_conv1d: Option<ShortConvolution<B>>,
    k_conv1d: Option<ShortConvolution<B>>,
    v_conv1d: Option<ShortConvolution<B>>,
    rate_proj: Linear<B>,
    momentum_proj: Linear<B>,
    keep_proj: Linear<B>,
    /// The memory at the start, `[H, from, to]` for each layer.
    weights: Vec<Param<Tensor<B, 3>>>,
    g_proj: Option<Linear<B>>,
    o_norm: GatedRmsNorm<B>,
    o_proj: ResidualLinear<B>,
    attention: Option<WindowAttention<B>>,
    a_norm: Option<GatedRmsNorm<B>>,
    #[module(skip)]
    heads: usize,
    #[module(skip)]
    mini_batch: usize,
    #[module(skip)]
    base_lr: f64,
}

/// Numbers of each token and head, `[B, T, H, 1]`.
struct Rates<B: Backend> {
    theta: Tensor<B, 4>,
    log_eta: Tensor<B, 4>,
    log_keep: Tensor<B, 4>,
}

impl<B: LinearAttentionBackend> TokenMixer<B> for Titans<B> {
    type State = NetworkState<B>;
    const COUNTS_TOKENS: bool = true;
    const TAKES_BF16: bool = true;

    fn run(
        &self,
        x: Tensor<B, 3>,
        state: Option<NetworkState<B>>,
        _shared: &mut Shared<B>,
    ) -> (Tensor<B, 3>, NetworkState<B>) {
        let ([batch, tokens, _], dtype) = (x.dims(), x.dtype());
        let mut past = NetworkPast::of(state, || {
            let weights = start(&self.weights, batch);
            let momentum = zeros_like(&weights);
            NetworkMemory { start: weights.clone(), running: weights, momentum }
        });
        let gates = [
            Projection::beta(&self.rate_proj, self.base_lr),
            Projection::plain(&self.momentum_proj),
            Projection::plain(&self.keep_proj),
        ];
        let gate = self.g_proj.as_ref().map(Projection::plain);
        let (Qkv { q, k, v }, [theta, eta, keep], [gate]) =
            self.qkv().project_some(&x, gates, [gate], &mut past.conv_states);
        let of_head = |x| split_heads(accumulator(x), self.heads);
        let rates = Rates {
            theta: of_head(theta),
            log_eta: ops::log_sigmoid(of_head(eta), 1.0),
            log_keep: ops::log_sigmoid(of_head(keep), 1.0),
        };
        let rows = [q, k, v].map(accumulator);
        let outputs = Piece::all(past.position, tokens, self.mini_batch)
            .into_iter()
            .map(|piece| learn(&rows, &rates, piece, &mut past.memory))
            .collect();
        let o = typed(cat(outputs, 1), dtype);
        let y = match (&self.attention, &self.a_norm) {
            (Some(branch), Some(norm)) => {
                let gate = gate.map(|gate| (Activation::Silu, split_heads(gate, self.heads)));
                let memory = merge_heads(self.o_norm.gated(o, gate));
                let a = branch.forward(&x, &mut past.conv_states, past.position);
                let a = split_heads(a, self.heads);
                GatedOutput::sigmoid(norm, &self.o_proj).forward(a, Some(memory))
            }
            _ => GatedOutput::silu(&self.o_norm, &self.o_proj).forward(o, gate),
        };
        (y, past.then(tokens))
    }
}

impl<B: LinearAttentionBackend> Titans<B> {
    fn qkv(&self) -> ConvQkv<'_, B> {
        let projections = [&self.q_proj, &self.k_proj, &self.v_proj];
        let convolutions = [&self.q_conv1d, &self.k_conv1d, &self.v_conv1d];
        ConvQkv::convolved(projections, convolutions, [self.heads; 3]).silu().unit(1.0)
    }
}

/// Outputs of a piece, `[B, tokens, H, K]`; `memory` goes on to behind it.
fn learn<B: Backend>(
    rows: &[Tensor<B, 4>; 3],
    rates: &Rates<B>,
    piece: Piece,
    memory: &mut NetworkMemory<B>,
) -> Tensor<B, 4> {
    let [q, k, v] = rows.each_ref().map(|rows| piece.by_head(rows));
    let theta = piece.by_head(&rates.theta).swap_dims(3, 4);
    let [(kept, keep), (followed, follow)] =
        [&rates.log_keep, &rates.log_eta].map(|log| decays(piece.by_head(log)));
    // E theta, A E theta, A E_.0
    let of_momentum = followed * theta;
    let of_memory = kept.clone().matmul(of_momentum.clone());
    let carried = kept.matmul(follow.clone());
    let met = q.clone().matmul(k.clone().transpose()) * of_memory.clone();
    let queries = each_batch(q).zip(each_batch(met));
    let shares = each_batch(of_memory).zip(each_batch(of_momentum));
    let factors = each_batch(keep).zip(each_batch(carried)).zip(each_batch(follow));

    let mut outputs = vec![];
    for (((q, (k, v)), (of_memory, of_momentum)), ((keep, carried), follow)) in
        queries.zip(each_batch(k).zip(each_batch(v))).zip(shares).zip(factors)
    {
        let NetworkMemory { start, running, momentum } = memory;
        let gradients = NETWORK.gradients(k, start, |z| z - v);
        let followed = [Past { tensors: momentum, keep: Some(follow) }];
        let next = write(&followed, &gradients, &last_row(&of_momentum));
        let past = [
            Past { tensors: running, keep: Some(keep) },
            Past { tensors: momentum, keep: Some(carried) },
        ];
        outputs.push(NETWORK.read(q, &past, &gradients, &of_memory));
        let after = write(&past, &gradients, &last_row(&of_memory));
        if piece.ends {
            start.clone_from(&after);
        }
        (*running, *momentum) = (after, next);
    }
    in_a_row(stack(outputs, 2))
}
