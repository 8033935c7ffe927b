//! Test-time training. Recurrence, shapes and source: `pages/ttt.md`, the page of [`Ttt`].

use super::retnet::{check_rotated, check_theta};
use super::{TokenMixer, check_divisor, key_width, linear_flops};
use crate::nn::NetworkState;
use crate::nn::convolution::{ShortConvolution, check_window, convolution_cost};
use crate::nn::fast_weights::{
    InnerModel, Network, NetworkPast, Past, Piece, each_batch, fresh, heads_in_front, in_a_row,
    last_row, regression_slope, start, write, zeros_like,
};
use crate::nn::layers::{
    Norm, NormKind, ResidualLinear, linear, linear_with_bias, merge_heads, rms_normalize,
    split_heads,
};
use crate::nn::projection::{Projection, project_all};
use crate::nn::{ConfigError, Cost, Kept, Linear, NetworkMemory, Rope, Shared, positive};
use crate::ops::{
    self, Along, GateActivation, LinearAttentionBackend, TttInputs, accumulator, cat, stack, ttt,
    typed,
};
use burn::module::{Initializer, Module, Param};
use burn::tensor::{Tensor, backend::Backend};
use serde::{Deserialize, Serialize};

/// Added to variances before their roots.
const EPSILON: f64 = 1e-6;
const NETWORK: Network = Network { bias: true };

/// Config of [`Ttt`], test-time training. The layer's page has recurrence, shapes, errors and source.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TttConfig {
    /// Heads, H.
    pub heads: usize,
    /// K, width of a key and of a value, even; d_model / heads by default.
    pub key_width: Option<usize>,
    /// The memory.
    pub inner: InnerModel,
    /// b, tokens of a mini-batch. Changes results.
    pub mini_batch: usize,
    /// Factor of all inner learning rates.
    pub base_lr: f64,
    /// Tokens that the convolutions of queries and keys see, at least 2, which then share one projection; 0
    /// for a projection of each and no convolution.
    pub conv_size: usize,
    /// Whether a gate multiplies the output.
    pub output_gate: bool,
    /// Base of the rotation's wavelengths.
    pub rope_theta: f64,
}

impl Default for TttConfig {
    fn default() -> Self {
        Self {
            heads: 1,
            key_width: None,
            inner: InnerModel::default(),
            mini_batch: 16,
            base_lr: 1.0,
            conv_size: 0,
            output_gate: false,
            rope_theta: 10_000.0,
        }
    }
}

impl TttConfig {
    /// K.
    pub(super) fn resolve(&self, d_model: usize) -> Result<usize, ConfigError> {
        positive("heads", self.heads)?;
        let width = key_width(self.key_width, d_model, self.heads)?;
        check_rotated("key_width", width)?;
        positive("mini_batch", self.mini_batch)?;
        check_divisor("base_lr", self.base_lr)?;
        check_theta(self.rope_theta)?;
        check_window(self.conv_size, 0)?;
        Ok(width)
    }

    /// Builds the layer for a model of width `d_model`.
    /// # Errors
    /// [`ConfigError`] names the first key that does not fit.
    pub fn init<B: Backend>(
        &self,
        d_model: usize,
        device: &B::Device,
    ) -> Result<Ttt<B>, ConfigError> {
        let width = self.resolve(d_model)?;
        let keys = self.heads * width;
        let shared = self.conv_size > 0;
        let project = || linear(d_model, keys, device);
        let conv = || shared.then(|| ShortConvolution::new(keys, self.conv_size, true, device));
        let layers = self.inner.layers(width, width).into_iter();
        Ok(Ttt {
            q_proj: project(),
            k_proj: (!shared).then(project),
            v_proj: project(),
            q_conv1d: conv(),
            k_conv1d: conv(),
            rate_proj: linear_with_bias(d_model, self.heads, device),
            place_scale: Initializer::Zeros.init([self.mini_batch], device),
            weights: layers.map(|size| fresh(self.heads, size, NETWORK, device)).collect(),
            ttt_norm_weight: Initializer::Ones.init([keys], device),
            ttt_norm_bias: Initializer::Zeros.init([keys], device),
            post_norm: Norm::new(NormKind::Layer, keys, EPSILON, device),
            g_proj: self.output_gate.then(|| linear(d_model, keys, device)),
            o_proj: linear(keys, d_model, device).into(),
            heads: self.heads,
            rate: self.base_lr / width as f64,
            rope: Rope::whole(self.rope_theta),
        })
    }

    /// Cost in a model of width `d_model`.
    /// # Errors
    /// As [`init`](Self::init).
    pub fn cost(&self, d_model: usize, _length: usize) -> Result<Cost, ConfigError> {
        let width = self.resolve(d_model)?;
        let (keys, layers) = (self.heads * width, self.inner.layers(width, width));
        let (weights, inner) = NETWORK.cost(&layers, self.heads, self.mini_batch);
        let projections = 2 + usize::from(self.conv_size == 0) + usize::from(self.output_gate);
        let inward = keys * projections + self.heads;
        let mut cost = Cost {
            state_bytes: 4 * 2 * weights,
            flops_per_token: inner + linear_flops(d_model, inward) + linear_flops(keys, d_model),
        };
        // Two convolutions of one input, whose conv state is kept once.
        cost += convolution_cost(self.conv_size, keys);
        cost.flops_per_token += convolution_cost(self.conv_size, keys).flops_per_token;
        Ok(cost)
    }
}

#[doc = include_str!("pages/ttt.md")]
#[derive(Module, Debug)]
pub struct Ttt<B: Backend> {
    q_proj: Linear<B>,
    k_proj: Option<Linear<B>>,
    v_proj: Linear<B>,
    q_conv1d: Option<ShortConvolution<B>>,
    k_conv1d: Option<ShortConvolution<B>>,
    rate_proj: Linear<B>,
    /// Added to 1 / i, `[b]`.
    place_scale: Param<Tensor<B, 1>>,
    /// The memory at the start, `[H, from + 1, to]` for each layer.
    weights: Vec<Param<Tensor<B, 3>>>,
    ttt_norm_weight: Param<Tensor<B, 1>>,
    ttt_norm_bias: Param<Tensor<B, 1>>,
    post_norm: Norm<B>,
    g_proj: Option<Linear<B>>,
    o_proj: ResidualLinear<B>,
    #[module(skip)]
    heads: usize,
    #[module(skip)]
    rate: f64,
    #[module(skip)]
    rope: Rope,
}

/// Queries, keys, values and rates of each token, `[B, T, H, X]`, in f32 at least.
type Tokens<B> = [Tensor<B, 4>; 4];

impl<B: LinearAttentionBackend> TokenMixer<B> for Ttt<B> {
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
        let mut past = NetworkPast::of(state, || self.start(batch));
        let (rows, gate) = self.project(&x, &mut past);
        let size = self.place_scale.dims()[0];
        let outputs = Piece::all(past.position, tokens, size)
            .into_iter()
            .map(|piece| self.learn(&rows, piece, &mut past.memory))
            .collect();
        let o = typed(merge_heads(cat(outputs, 1)), dtype);
        let o = self.post_norm.forward(o);
        let o = match gate {
            Some(gate) => ops::gate(o, gate, GateActivation::GeluTanh),
            None => o,
        };
        (self.o_proj.forward(o), past.then(tokens))
    }
}

impl<B: LinearAttentionBackend> Ttt<B> {
    /// The learnt weights without their outputs' means, and no gradients.
    fn start(&self, batch: usize) -> NetworkMemory<B> {
        let mut weights = start(&self.weights, batch);
        let last = weights.pop().map(|last| last.clone() - last.mean_along(3));
        weights.extend(last);
        NetworkMemory { running: zeros_like(&weights), start: weights, momentum: vec![] }
    }

    /// Rows of each token of `x`, and its gate.
    fn project(
        &self,
        x: &Tensor<B, 3>,
        past: &mut NetworkPast<B>,
    ) -> (Tokens<B>, Option<Tensor<B, 3>>) {
        let mut list = vec![
            Projection::plain(&self.q_proj),
            Projection::plain(&self.v_proj),
            Projection::beta(&self.rate_proj, self.rate),
        ];
        list.extend([&self.k_proj, &self.g_proj].into_iter().flatten().map(Projection::plain));
        let mut outputs = project_all(x, list, &mut past.conv_states).into_iter();
        let mut next = || outputs.next().expect("an output for each projection");
        let (q, v, rate) = (next(), next(), next());
        let (q, k) = match (&self.q_conv1d, &self.k_conv1d) {
            (Some(of_q), Some(of_k)) => {
                let lengths = past.conv_states.lengths().cloned();
                past.conv_states.through(Kept::Query, |conv_state| {
                    let (k, _) = of_k.run(q.clone(), conv_state.clone(), None, lengths.as_ref());
                    let (q, conv_state) = of_q.run(q, conv_state, None, lengths.as_ref());
                    ((q, k), conv_state)
                })
            }
            _ => (q, next()),
        };
        let gate = self.g_proj.is_some().then(&mut next);
        ([q, k, v, rate].map(|x| accumulator(split_heads(x, self.heads))), gate)
    }

    /// Outputs of a piece, `[B, tokens, H, K]`; `memory` goes on to behind it.
    fn learn(&self, x: &Tokens<B>, piece: Piece, memory: &mut NetworkMemory<B>) -> Tensor<B, 4> {
        let [q, k, v, rate] = x;
        let [q, k] = [q, k].map(|rows| piece.rotated(self.rope, rows));
        let whole = [q.clone(), k.clone(), piece.of(v), piece.of(rate)];
        let found = || self.learn_in_one_piece(whole, piece, memory);
        if let Some(outputs) = piece.is_whole().then(found).flatten() {
            return outputs;
        }
        let [q, k] = [q, k].map(heads_in_front);
        let shape = [1, self.heads, 1, 1, q.dims()[4]];
        let gamma = self.ttt_norm_weight.val().reshape(shape);
        let beta = self.ttt_norm_bias.val().reshape(shape);
        let target = (piece.by_head(v) - k.clone() - beta.clone()) * gamma.clone();
        let squared: Tensor<B, 4> = (gamma.clone() * gamma.clone()).squeeze_dim(2);
        let rate = piece.by_head(rate).swap_dims(3, 4);
        let scale = piece.scales(self.place_scale.val()).reshape([1, 1, piece.rows, 1]);
        let lower = scale.clone().expand([1, 1, piece.rows, piece.rows]).tril(0);
        let share = rate.clone() * lower.unsqueeze_dim::<5>(2);
        let [queries, keys] = [q.clone(), k].map(|rows| NETWORK.rows(rows));
        let met = queries.clone().matmul(keys.clone().transpose()) * share.clone();

        let mut outputs = vec![];
        let queries = each_batch(queries).zip(each_batch(met));
        let tokens = queries.zip(each_batch(keys)).zip(each_batch(target));
        for (((q, k), target), (rate, share)) in tokens.zip(each_batch(rate).zip(each_batch(share)))
        {
            let NetworkMemory { start, running: sums, .. } = memory;
            let slope = |z| regression_slope(z, squared.clone(), target, EPSILON);
            let factors = NETWORK.gradients(k, start, slope);
            let first = Past { tensors: start, keep: None };
            let since = Past { tensors: sums, keep: Some(scale.clone()) };
            let past = if piece.place == 0 { vec![first] } else { vec![first, since] };
            outputs.push(NETWORK.read(q, &past, &factors, &share));
            let next = match piece.ends {
                true => (write(&past, &factors, &last_row(&share)), zeros_like(sums)),
                false => {
                    let sums = Past { tensors: sums, keep: None };
                    (start.clone(), write(&[sums], &factors, &rate))
                }
            };
            (*start, *sums) = next;
        }
        let normal = rms_normalize(stack::<B, _, 5>(outputs, 2), EPSILON);
        in_a_row(q + normal * gamma + beta)
    }

    /// The same for whole mini-batches, where the backend has that in one piece. `rows` are q and
    /// k, rotated, v and rates, `[B, batches, b, H, X]`.
    fn learn_in_one_piece(
        &self,
        rows: [Tensor<B, 5>; 4],
        piece: Piece,
        memory: &mut NetworkMemory<B>,
    ) -> Option<Tensor<B, 4>> {
        let [q, k, v, rate]: Tokens<B> = rows.map(|x| x.flatten(1, 2));
        let shape = [self.heads, q.dims()[3]];
        let norm = [&self.ttt_norm_weight, &self.ttt_norm_bias].map(|x| x.val().reshape(shape));
        let (outputs, last) = ttt(TttInputs {
            rows: [q, k, v],
            rate: rate.squeeze_dim(3),
            scale: piece.scales(self.place_scale.val()),
            norm,
            weights: memory.start.clone(),
            epsilon: EPSILON,
        })?;
        memory.start = last;
        Some(outputs)
    }
}
