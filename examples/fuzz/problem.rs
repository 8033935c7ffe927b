//! Inputs of a call, what is differentiated, and the truth of both in f64.

use linattn_oracle::{Decay, Dims, Inputs, Rng, Transition, backward, forward};

/// Numbers of several tensors, by name.
pub type Named = Vec<(&'static str, Vec<f64>)>;

/// Sequences (or one batch of them), and the weights of their outputs and last states in a loss.
#[derive(Debug, Clone)]
pub struct Problem {
    pub sequences: Vec<Inputs>,
    /// For each of `sequences`; none where nothing is differentiated.
    losses: Vec<Loss>,
}

/// Weights in a loss: none where a result has no part in it.
#[derive(Debug, Clone)]
struct Loss {
    d_o: Option<Vec<f64>>,
    d_state: Option<Vec<f64>>,
}

impl Problem {
    /// Without gradients.
    pub fn new(sequences: Vec<Inputs>) -> Self {
        Self { sequences, losses: vec![] }
    }

    /// Asks for gradients of a random loss of the outputs, of the states, or of both.
    pub fn differentiate(&mut self, seed: u64, outputs: bool, states: bool) {
        let mut rng = Rng::named(seed, "loss");
        let mut weights = |count: usize| (0..count).map(|_| rng.normal()).collect();
        let mut loss = |dims: Dims| Loss {
            d_o: outputs.then(|| weights(dims.values_len())),
            d_state: states.then(|| weights(dims.state_len())),
        };
        self.losses = self.sequences.iter().map(|x| loss(x.dims)).collect();
    }

    /// Weights of the outputs of all sequences.
    pub fn d_o(&self) -> Vec<f64> {
        self.losses.iter().flat_map(|loss| loss.d_o.clone().unwrap_or_default()).collect()
    }

    /// Weights of all last states.
    pub fn d_state(&self) -> Vec<f64> {
        self.losses.iter().flat_map(|loss| loss.d_state.clone().unwrap_or_default()).collect()
    }

    /// All sequences in one row, and their states in a batch.
    pub fn joined(&self) -> Inputs {
        let mut sequences = self.sequences.iter().cloned();
        let Some(mut all) = sequences.next() else { unreachable!("a case has a sequence") };
        for mut x in sequences {
            all.dims.tokens += x.dims.tokens;
            for (all, more) in tensors(&mut all).into_iter().zip(tensors(&mut x)) {
                all.append(more);
            }
        }
        all
    }

    /// Results and gradients in f64, by name; those of several sequences one after another.
    pub fn solve(&self) -> Named {
        let mut all: Named = vec![];
        for (n, x) in self.sequences.iter().enumerate() {
            for (at, (name, numbers)) in solve(x, self.losses.get(n)).into_iter().enumerate() {
                match all.get_mut(at) {
                    Some((_, all)) => all.extend(numbers),
                    None => all.push((name, numbers)),
                }
            }
        }
        all
    }

    /// The problem with every number off by a random share of itself, of that RMS; log decays as far as
    /// moves the decays by such a share.
    pub fn nearby(&self, share: f64, seed: u64) -> Self {
        let mut rng = Rng::named(seed, "nearby");
        let mut near = self.clone();
        for x in &mut near.sequences {
            if let Some(Decay::Scalar(g) | Decay::Vector(g)) = &mut x.decay {
                g.iter_mut().for_each(|g| *g += share * rng.normal());
            }
            // Log decays once more, by a share of themselves: sums of them are rounded.
            for tensor in tensors(x) {
                tensor.iter_mut().for_each(|number| *number *= 1.0 + share * rng.normal());
            }
        }
        for loss in &mut near.losses {
            for weights in loss.d_o.iter_mut().chain(&mut loss.d_state) {
                weights.iter_mut().for_each(|number| *number *= 1.0 + share * rng.normal());
            }
        }
        near
    }
}

/// Every tensor of a call, in one order.
fn tensors(x: &mut Inputs) -> Vec<&mut Vec<f64>> {
    let Inputs { q, k, v, decay, transition, bonus, state, .. } = x;
    let mut all = vec![q, k, v];
    all.extend(decay.as_mut().map(|(Decay::Scalar(g) | Decay::Vector(g))| g));
    match transition {
        Transition::Identity => {}
        Transition::Delta { beta, erase } => {
            all.push(beta);
            all.extend(erase);
        }
        Transition::LowRank { a, b } => all.extend([a, b]),
    }
    all.extend(bonus);
    all.extend(state);
    all
}

fn solve(x: &Inputs, loss: Option<&Loss>) -> Named {
    let truth = forward(x);
    let mut all = vec![("o", truth.o), ("state", truth.state)];
    let Some(loss) = loss else { return all };
    let weights = |given: &Option<Vec<f64>>, count| given.clone().unwrap_or(vec![0.0; count]);
    let d_o = weights(&loss.d_o, x.dims.values_len());
    let found = backward(x, &d_o, &weights(&loss.d_state, x.dims.state_len()));
    all.extend([("dq", found.q), ("dk", found.k), ("dv", found.v), ("dstate", found.state)]);
    let others = [
        ("derase", found.erase),
        ("da", found.a),
        ("db", found.b),
        ("dg", found.g),
        ("dbeta", found.beta),
    ];
    all.extend(others.into_iter().filter_map(|(name, numbers)| Some((name, numbers?))));
    all
}
