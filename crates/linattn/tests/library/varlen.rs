//! Sequences of different lengths in one row give what each gives by itself: outputs, last states and gradients.

use crate::support::alone;
use burn::tensor::{Distribution, Tensor, backend::AutodiffBackend};
use linattn::backend::Autodiff;
use linattn::ops::{
    self, Decay, DeltaRuleInputs, LinearAttentionBackend, LinearAttentionInputs, LowRankInputs,
    OpError, OpResult, SequenceLengths,
};
use linattn_oracle::assert_close;

/// Shorter than a block, of one token, of whole chunks, and longer.
const LENGTHS: [usize; 5] = [19, 1, 64, 5, 40];
/// Hk, H, K, V: widths of `tests/fixtures/ops`, whose kernels other tests compile too.
const SIZES: [usize; 4] = [1, 2, 16, 24];
const LIMIT: f64 = 1e-5;

#[derive(Debug, Clone, Copy, PartialEq)]
enum Rule {
    LinearAttention,
    Delta,
    Erase,
    LowRank,
}

/// Tensors of a call: rows along tokens, and the states of all sequences.
#[derive(Clone)]
struct Call<B: AutodiffBackend> {
    rule: Rule,
    vector: bool,
    /// q, k, v, two rows of keys' width for each value head, log decays.
    rows: Vec<Tensor<B, 4>>,
    /// beta, and a log decay for each head.
    gates: Vec<Tensor<B, 3>>,
    state: Option<Tensor<B, 4>>,
}

fn random<B: AutodiffBackend, const D: usize>(
    shape: [usize; D],
    low: f64,
    high: f64,
) -> Tensor<B, D> {
    Tensor::random(shape, Distribution::Uniform(low, high), &Default::default()).require_grad()
}

impl<B: AutodiffBackend + LinearAttentionBackend> Call<B> {
    fn new(rule: Rule, vector: bool, with_state: bool) -> Self {
        let [key_heads, heads, keys, values] = SIZES;
        let tokens = LENGTHS.iter().sum();
        let rows = |heads, width| random([1, tokens, heads, width], -0.4, 0.4);
        let own = || rows(heads, keys);
        let decays = random([1, tokens, heads, keys], -1.0, 0.0);
        let state = [LENGTHS.len(), heads, keys, values];
        Self {
            rule,
            vector,
            rows: vec![
                rows(key_heads, keys),
                rows(key_heads, keys),
                rows(heads, values),
                own(),
                own(),
                decays,
            ],
            gates: vec![
                random([1, tokens, heads], 0.1, 0.9),
                random([1, tokens, heads], -1.0, 0.0),
            ],
            state: with_state.then(|| random(state, -1.0, 1.0)),
        }
    }

    /// The tokens of one sequence, from its state.
    fn sequence(&self, n: usize, first: usize, tokens: usize) -> Self {
        let cut = |x: &Tensor<B, 4>| x.clone().narrow(1, first, tokens);
        Self {
            rows: self.rows.iter().map(cut).collect(),
            gates: self.gates.iter().map(|x| x.clone().narrow(1, first, tokens)).collect(),
            state: self.state.as_ref().map(|state| state.clone().narrow(0, n, 1)),
            ..self.clone()
        }
    }

    fn run(&self, lengths: Option<&SequenceLengths>) -> OpResult<B> {
        let [q, k, v, a, b, g] = std::array::from_fn(|n| self.rows[n].clone());
        let [beta, scalar] = std::array::from_fn(|n| self.gates[n].clone());
        let g = Some(if self.vector { Decay::Vector(g) } else { Decay::Scalar(scalar) });
        let state = self.state.clone();
        match self.rule {
            Rule::LinearAttention => {
                let x = LinearAttentionInputs { g, ..LinearAttentionInputs::new(q, k, v) };
                match lengths {
                    Some(lengths) => ops::linear_attention_varlen(x, lengths, state),
                    None => ops::linear_attention(x, state),
                }
            }
            Rule::Delta | Rule::Erase => {
                let erase = (self.rule == Rule::Erase).then_some(a);
                let x = DeltaRuleInputs { g, erase, ..DeltaRuleInputs::new(q, k, v, beta) };
                match lengths {
                    Some(lengths) => ops::delta_rule_varlen(x, lengths, state),
                    None => ops::delta_rule(x, state),
                }
            }
            Rule::LowRank => {
                let x = LowRankInputs { q, k, v, a, b, g };
                match lengths {
                    Some(lengths) => ops::low_rank_varlen(x, lengths, state),
                    None => ops::low_rank(x, state),
                }
            }
        }
    }

    fn one_by_one(&self) -> (Tensor<B, 4>, Tensor<B, 4>) {
        let mut first = 0;
        let sequence = |(n, &tokens): (usize, &usize)| {
            let x = self.sequence(n, first, tokens);
            first += tokens;
            x.run(None).unwrap()
        };
        let (o, states) = LENGTHS.iter().enumerate().map(sequence).unzip();
        (Tensor::cat(o, 1), Tensor::cat(states, 0))
    }

    /// Gradients of every tensor that the call reads, of a loss that weighs each number differently.
    fn gradients(&self, (o, state): &(Tensor<B, 4>, Tensor<B, 4>)) -> Vec<Vec<f64>> {
        let weighed = |x: &Tensor<B, 4>| (x.clone() * (x.clone() * 3.0 + 1.0).cos()).sum();
        let gradients = (weighed(o) + weighed(state)).backward();
        let rows = self.rows.iter().chain(&self.state).filter_map(|x| x.grad(&gradients));
        let gates = self.gates.iter().filter_map(|x| x.grad(&gradients));
        rows.map(numbers).chain(gates.map(numbers)).collect()
    }
}

fn numbers<B: burn::tensor::backend::Backend, const D: usize>(x: Tensor<B, D>) -> Vec<f64> {
    x.into_data().iter::<f64>().collect()
}

/// Every rule, with both decays, with and without states: a rule, a vector decay, first states.
fn every_case() -> Vec<(Rule, bool, bool)> {
    let rules = [Rule::LinearAttention, Rule::Delta, Rule::Erase, Rule::LowRank];
    let kinds = [(false, true), (true, false), (true, true)];
    rules.into_iter().flat_map(|rule| kinds.map(|(vector, state)| (rule, vector, state))).collect()
}

fn agrees<B: AutodiffBackend + LinearAttentionBackend>(cases: &[(Rule, bool, bool)]) {
    let _alone = alone();
    let lengths = SequenceLengths::new(&LENGTHS);
    for (rule, vector, with_state) in cases.iter().copied() {
        let call = Call::<B>::new(rule, vector, with_state);
        let (want, got) = (call.one_by_one(), call.run(Some(&lengths)).unwrap());
        let what = format!("{rule:?}, vector decay {vector}, states {with_state}");
        let pairs = [(&want.0, &got.0, "o"), (&want.1, &got.1, "state")];
        for (want, got, name) in pairs {
            let (want, got) = (numbers(want.clone()), numbers(got.clone()));
            assert_close(&format!("{what}: {name}"), &want, &got, LIMIT);
        }
        let (want, got) = (call.gradients(&want), call.gradients(&got));
        assert_eq!(want.len(), got.len(), "{what}");
        for (n, (want, got)) in want.iter().zip(&got).enumerate() {
            assert_close(&format!("{what}: gradient {n}"), want, got, LIMIT);
        }
    }
}

#[test]
fn rows_of_sequences_are_as_sequences_on_flex() {
    agrees::<Autodiff<linattn::backend::Flex>>(&every_case());
}

#[test]
fn rows_of_sequences_are_as_sequences_in_tensor_operations() {
    agrees::<Autodiff<linattn::backend::NdArray>>(&every_case());
}

#[cfg(feature = "wgpu")]
#[test]
fn rows_of_sequences_are_as_sequences_in_kernels() {
    if crate::support::wgpu().is_some() {
        // Each case compiles its kernels twice, which a device that is a CPU takes its time for.
        agrees::<Autodiff<burn::backend::Wgpu>>(&[(Rule::Delta, false, true)]);
    }
}

#[test]
fn lengths_that_divide_no_row_are_refused() {
    let call = Call::<Autodiff<linattn::backend::Flex>>::new(Rule::Delta, false, false);
    let op = "delta_rule_varlen";
    let refused = |lengths: &[usize]| call.run(Some(&SequenceLengths::new(lengths))).unwrap_err();
    let tokens = LENGTHS.iter().sum();
    assert_eq!(refused(&[100, 28]), OpError::Tokens { op, tokens, got: 128 });
    let got = vec![0, 129, 129];
    assert_eq!(refused(&[129, 0]), OpError::Lengths { op, got });
    let why = refused(&[]).to_string();
    assert_eq!(
        why,
        "delta_rule_varlen: cumulative lengths [0] have to begin with 0 and grow with every sequence"
    );
}
