//! A memory that is a SwiGLU network, and how its weights go on.
//! ```text
//! f(x)        = (silu(x W_0) * (x W_2)) W_1                      a = k W_0, b = k W_2, s = silu(a)
//! d(f . v)/dW_1 = (s b)^T v                                      h = v W_1^T
//! d(f . v)/dW_2 = k^T (h s)
//! d(f . v)/dW_0 = k^T (h b silu'(a))
//! ```

use super::fast_weights::{Piece, each_batch, in_a_row, zeros_like};
use super::muon::{LACT_STEPS, orthogonal};
use super::softmax::KeyValueCache;
use super::{KeptTensors, NetworkMemory, RecurrentState, StateTensors};
use crate::nn::NetworkState;
use crate::ops::{Along, in_one_row, stack};
use burn::tensor::activation::{sigmoid, silu};
use burn::tensor::{Tensor, backend::Backend};

/// Added to lengths before a division.
const EPSILON: f64 = 1e-5;
/// W_0, W_1 and W_2: inputs and outputs of each.
pub(crate) fn sizes(width: usize, inner: usize) -> [[usize; 2]; 3] {
    [[width, inner], [inner, width], [width, inner]]
}

/// Rows of each token, `[B, T, H, X]`.
pub(crate) struct Rows<B: Backend> {
    pub(crate) q: Tensor<B, 4>,
    pub(crate) k: Tensor<B, 4>,
    pub(crate) v: Tensor<B, 4>,
    /// Rates of W_0, W_1 and W_2.
    pub(crate) rates: Tensor<B, 4>,
    /// m, where there is momentum.
    pub(crate) momentum: Option<Tensor<B, 4>>,
}

/// A memory between two tokens.
pub(crate) struct SwigluMemory<B: Backend> {
    /// Of W_0, W_1 and W_2: the weights, the sums of the chunk so far, and with momentum the last change.
    pub(crate) weights: NetworkMemory<B>,
    /// The sum of m over the chunk so far, `[B, 1, H]`.
    pub(crate) carried: Option<Tensor<B, 3>>,
    /// Lengths that columns keep.
    pub(crate) lengths: Vec<Tensor<B, 4>>,
    /// Tokens of a chunk.
    pub(crate) size: usize,
    /// Whether changes are made orthogonal.
    pub(crate) muon: bool,
}

impl<B: Backend> SwigluMemory<B> {
    /// Outputs of a piece, `[B, tokens, H, K]`; the memory goes on to behind it.
    pub(crate) fn learn(&mut self, x: &Rows<B>, piece: Piece) -> Tensor<B, 4> {
        let of = |x: &Tensor<B, 4>| each_batch(piece.by_head(x)).collect::<Vec<_>>();
        let [q, k, v, rates] = [&x.q, &x.k, &x.v, &x.rates].map(of);
        let momentum = x.momentum.as_ref().map(of);
        let mut outputs = vec![];
        for (n, q) in q.into_iter().enumerate() {
            outputs.push(apply(q, &self.weights.start));
            let rates = [0, 1, 2].map(|i| rates[n].clone().narrow(3, i, 1));
            let new = ascent(k[n].clone(), v[n].clone(), rates, &self.weights.start);
            self.weights.running = plus(&self.weights.running, new);
            if let Some(momentum) = &momentum {
                let sum = momentum[n].clone().sum_along(2);
                let [batch, heads, _, _] = sum.dims();
                let sum: Tensor<B, 3> = in_one_row(sum).reshape([batch, 1, heads]);
                self.carried = Some(match self.carried.take() {
                    Some(before) => before + sum,
                    None => sum,
                });
            }
            if piece.ends {
                self.update();
            }
        }
        in_a_row(stack(outputs, 2))
    }

    /// The end of a chunk.
    fn update(&mut self) {
        let mut change = std::mem::take(&mut self.weights.running);
        self.weights.running = zeros_like(&change);
        if let Some(sum) = self.carried.take() {
            self.carried = Some(sum.zeros_like());
            let [batch, _, heads] = sum.dims();
            let mean: Tensor<B, 4> = in_one_row(sum).reshape([batch, heads, 1, 1]);
            let mean = mean / self.size as f64;
            let kept =
                self.weights.momentum.iter().map(|last| last.clone() * mean.clone()).collect();
            change = plus(&change, kept);
            self.weights.momentum.clone_from(&change);
        }
        if self.muon {
            change = change.into_iter().map(|x| orthogonal(x, LACT_STEPS)).collect();
        }
        let next = plus(&self.weights.start, change).into_iter().zip(&self.lengths);
        self.weights.start =
            next.map(|(weight, wanted)| with_lengths(weight, wanted.clone())).collect();
    }
}

fn plus<B: Backend>(a: &[Tensor<B, 4>], b: Vec<Tensor<B, 4>>) -> Vec<Tensor<B, 4>> {
    a.iter().zip(b).map(|(a, b)| a.clone() + b).collect()
}

/// f of rows, `[B, H, C, K]`.
fn apply<B: Backend>(x: Tensor<B, 4>, weights: &[Tensor<B, 4>]) -> Tensor<B, 4> {
    let gate = silu(x.clone().matmul(weights[0].clone()));
    (gate * x.matmul(weights[2].clone())).matmul(weights[1].clone())
}

/// The sum over tokens of `rates[n] d(f(k) . v) / dW_n`, for each n; rates are `[B, H, C, 1]`.
fn ascent<B: Backend>(
    k: Tensor<B, 4>,
    v: Tensor<B, 4>,
    rates: [Tensor<B, 4>; 3],
    weights: &[Tensor<B, 4>],
) -> Vec<Tensor<B, 4>> {
    let a = k.clone().matmul(weights[0].clone());
    let b = k.clone().matmul(weights[2].clone());
    let open = sigmoid(a.clone());
    let s = a.clone() * open.clone();
    let slope = open.clone() * (a * (open.neg() + 1.0) + 1.0);
    let h = v.clone().matmul(weights[1].clone().transpose());
    let [of_0, of_1, of_2] = rates;
    let sum = |x: Tensor<B, 4>, g: Tensor<B, 4>| x.transpose().matmul(g);
    vec![
        sum(k.clone() * of_0, h.clone() * b.clone() * slope),
        sum(s.clone() * b * of_1, v),
        sum(k * of_2, h * s),
    ]
}

/// Lengths of columns, `[B, H, 1, to]`.
pub(crate) fn lengths<B: Backend>(weight: &Tensor<B, 4>) -> Tensor<B, 4> {
    // The gradient of a root at zero is no number.
    ((weight.clone() * weight.clone()).sum_along(2) + f64::from(f32::MIN_POSITIVE)).sqrt()
}

/// `weight` with columns of these lengths.
fn with_lengths<B: Backend>(weight: Tensor<B, 4>, wanted: Tensor<B, 4>) -> Tensor<B, 4> {
    let have = lengths(&weight) + EPSILON;
    weight * (wanted / have)
}

/// State of [`Lact`](super::mixers::Lact).
#[derive(Debug, Clone)]
pub struct LactState<B: Backend> {
    /// W (`start`), the sums of the chunk so far (`running`), and D (`momentum`); with momentum, the sum of m so far,
    /// `[B, 1, H]`, among `conv_states`.
    pub memory: NetworkState<B>,
    /// Keys and values that attention may still see.
    pub cache: KeyValueCache<B>,
}

impl<B: Backend> RecurrentState<B> for LactState<B> {
    fn tensors(&self) -> StateTensors<B> {
        self.memory.tensors().with_growing("keys", &self.cache.keys, 2).with_growing(
            "values",
            &self.cache.values,
            2,
        )
    }

    fn from_tensors(mut tensors: StateTensors<B>) -> Self {
        let (keys, values) = (tensors.take("keys"), tensors.take("values"));
        let memory = NetworkState::from_tensors(tensors);
        let cache = KeyValueCache {
            keys,
            values,
            position: memory.position,
            conv_states: KeptTensors::default(),
        };
        Self { memory, cache }
    }
}
