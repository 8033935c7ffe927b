//! Ways to compute the gated delta rule over a sequence, each forwards alone and with its backward pass.

use burn::tensor::{Tensor, TensorData, backend::AutodiffBackend};
use linattn::backend::{Autodiff, LinearAttentionBackend};
use linattn::ops::{self, Decay, DeltaRuleInputs, OpError};
use linattn_oracle::Rng;
use std::fmt;

/// H, heads; K and V are equal, B is 1.
pub const HEADS: usize = 4;

/// A way to compute it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// `delta_rule`, as a model calls it: kernels on a GPU, chunk after chunk, and a loop over tokens on the CPU.
    Whole,
    /// `delta_rule` in chunks of tensor operations, on any device: what a graph within a graph is computed in.
    Chunks,
    /// `delta_rule_step`, a call a token, as decoding does.
    Steps,
}

impl Way {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Whole, Self::Chunks, Self::Steps];
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Whole => "one call",
            Self::Chunks => "chunks",
            Self::Steps => "steps",
        })
    }
}

/// The timed part of a training step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pass {
    /// The output and the last state.
    Forward,
    /// These, and the gradients of all inputs.
    Both,
}

impl fmt::Display for Pass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Forward => "forward",
            Self::Both => "forward+backward",
        })
    }
}

/// Numbers of a sequence, row after row.
pub struct Sequence {
    tokens: usize,
    width: usize,
    /// Queries, keys and values.
    rows: [Vec<f32>; 3],
    beta: Vec<f32>,
    log_decay: Vec<f32>,
}

/// A sequence's output and the gradient of its values, where there is one.
pub type Found<B> = (Tensor<B, 4>, Option<Tensor<B, 4>>);

impl Sequence {
    /// Of that many tokens and that head width.
    pub fn new(tokens: usize, width: usize) -> Self {
        let mut rng = Rng::named(tokens as u64, "sequence");
        let mut row = |length: f64| {
            let row: Vec<f64> = (0..width).map(|_| rng.normal()).collect();
            let size = row.iter().map(|x| x * x).sum::<f64>().sqrt();
            row.into_iter().map(|x| (length * x / size) as f32).collect::<Vec<_>>()
        };
        let lengths = [(width as f64).powf(-0.5), 1.0, 1.0];
        let rows = lengths.map(|length| (0..tokens * HEADS).flat_map(|_| row(length)).collect());
        let mut gate =
            |most: f64| (0..tokens * HEADS).map(|_| (most * rng.uniform()) as f32).collect();
        let (beta, log_decay) = (gate(1.0), gate(-0.1));
        Self { tokens, width, rows, beta, log_decay }
    }

    /// Its tokens and its head width.
    pub fn size(&self) -> [usize; 2] {
        [self.tokens, self.width]
    }

    /// On a device, from one token on and so many.
    fn upload<B: LinearAttentionBackend>(
        &self,
        device: &B::Device,
        first: usize,
        count: usize,
    ) -> DeltaRuleInputs<B> {
        let part =
            |x: &[f32], width: usize| x[first * HEADS * width..][..count * HEADS * width].to_vec();
        let rows = |x: &[f32]| {
            let data = TensorData::new(part(x, self.width), [1, count, HEADS, self.width]);
            Tensor::<B, 4>::from_data(data, device)
        };
        let gates = |x: &[f32]| {
            Tensor::<B, 3>::from_data(TensorData::new(part(x, 1), [1, count, HEADS]), device)
        };
        let [q, k, v] = [0, 1, 2].map(|i| rows(&self.rows[i]));
        DeltaRuleInputs::new(q, k, v, gates(&self.beta)).with_decay(gates(&self.log_decay))
    }
}

/// One of the ways on a device, ready to be called again and again.
pub type Call<B> = Box<dyn Fn() -> Result<Found<B>, OpError>>;

/// The call of a way and a pass.
pub fn call<B: LinearAttentionBackend>(
    (way, pass): (Way, Pass),
    x: &Sequence,
    device: &B::Device,
) -> Call<B> {
    match (way, pass) {
        (Way::Whole, Pass::Forward) => {
            let x = x.upload::<B>(device, 0, x.tokens);
            Box::new(move || Ok((ops::delta_rule(x.clone(), None)?.0, None)))
        }
        (Way::Whole, Pass::Both) => {
            let x = tracked(x.upload::<Autodiff<B>>(device, 0, x.tokens));
            Box::new(move || {
                let [o, d_v] = with_gradients(&x)?;
                Ok((o, Some(d_v)))
            })
        }
        (Way::Chunks, Pass::Forward) => {
            let x = tracked(x.upload::<Autodiff<Autodiff<B>>>(device, 0, x.tokens));
            Box::new(move || Ok((ops::delta_rule(x.clone(), None)?.0.inner().inner(), None)))
        }
        (Way::Chunks, Pass::Both) => {
            let x = tracked(x.upload::<Autodiff<Autodiff<B>>>(device, 0, x.tokens));
            Box::new(move || {
                let [o, d_v] = with_gradients(&x)?;
                Ok((o.inner(), Some(d_v.inner())))
            })
        }
        (Way::Steps, Pass::Forward) => {
            let one = |t| x.upload::<B>(device, t, 1);
            let tokens: Vec<_> = (0..x.tokens).map(one).collect();
            Box::new(move || Ok((in_steps(&tokens)?, None)))
        }
        (Way::Steps, Pass::Both) => {
            // A leaf a token: a gradient that reaches one long tensor through its parts costs T numbers a token.
            let one = |t| tracked(x.upload::<Autodiff<B>>(device, t, 1));
            let tokens: Vec<_> = (0..x.tokens).map(one).collect();
            Box::new(move || {
                let o = in_steps(&tokens)?;
                let mut gradients = o.clone().sum().backward();
                let d_v = tokens.iter().filter_map(|x| x.v.grad_remove(&mut gradients));
                Ok((o.inner(), Some(Tensor::cat(d_v.collect(), 1))))
            })
        }
    }
}

/// The inputs as leaves of a graph.
fn tracked<B: AutodiffBackend>(x: DeltaRuleInputs<B>) -> DeltaRuleInputs<B> {
    let DeltaRuleInputs { q, k, v, beta, erase, g, read } = x;
    let g = g.map(|g| match g {
        Decay::Scalar(g) => Decay::Scalar(g.require_grad()),
        Decay::Vector(g) => Decay::Vector(g.require_grad()),
    });
    let [q, k, v] = [q, k, v].map(Tensor::require_grad);
    DeltaRuleInputs { q, k, v, beta: beta.require_grad(), erase, g, read }
}

/// The output, and the gradient of its sum by the values.
fn with_gradients<A: AutodiffBackend + LinearAttentionBackend>(
    x: &DeltaRuleInputs<A>,
) -> Result<[Tensor<A::InnerBackend, 4>; 2], OpError> {
    let o = ops::delta_rule(x.clone(), None)?.0;
    let mut gradients = o.clone().sum().backward();
    let d_v = x.v.grad_remove(&mut gradients).expect("the values are leaves of the graph");
    Ok([o.inner(), d_v])
}

/// The output, token by token.
fn in_steps<B: LinearAttentionBackend>(
    tokens: &[DeltaRuleInputs<B>],
) -> Result<Tensor<B, 4>, OpError> {
    let (mut outputs, mut state) = (vec![], None);
    for token in tokens {
        let (o, next) = ops::delta_rule_step(token.clone(), state)?;
        outputs.push(o);
        state = Some(next);
    }
    Ok(Tensor::cat(outputs, 1))
}
