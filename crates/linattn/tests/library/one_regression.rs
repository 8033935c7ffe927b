//! Recurrences as steps and solutions of one regression, `docs/one_regression.md`: gradients of the losses by Burn's
//! autodiff, states by the operations.

use crate::call::{download, upload};
use crate::layers::{B, D, Weights, mixer};
use crate::support::alone;
use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{DType, Tensor, backend::Backend};
use linattn::nn::mixers::{Mixer, MixerState};
use linattn::ops::{self, DeltaRuleInputs, LinearAttentionInputs, MesaInputs, Read};
use linattn_oracle::{Rng, assert_close};

const KEY: usize = 5;
const VALUE: usize = 4;
const TOKENS: usize = 9;
const LIMIT: f64 = 1e-9;

fn tensor<const R: usize>(values: &[f64], shape: [usize; R]) -> Tensor<B, R> {
    upload(values, shape, DType::F64, &Default::default())
}

/// Keys, values, shares and decays of a sequence.
struct Sequence {
    k: Vec<f64>,
    v: Vec<f64>,
    beta: Vec<f64>,
    keep: Vec<f64>,
}

impl Sequence {
    /// Keys of length 1, or of any.
    fn new(unit: bool) -> Self {
        let mut rng = Rng::named(1, "one regression");
        let mut k: Vec<f64> = (0..TOKENS * KEY).map(|_| rng.normal()).collect();
        if unit {
            for k in k.chunks_mut(KEY) {
                let length = k.iter().map(|k| k * k).sum::<f64>().sqrt();
                k.iter_mut().for_each(|k| *k /= length);
            }
        }
        let v = (0..TOKENS * VALUE).map(|_| rng.normal()).collect();
        let share = |x: f64| 1.0 / (1.0 + (-x).exp());
        let beta = (0..TOKENS).map(|_| share(rng.normal())).collect();
        let keep = (0..TOKENS).map(|_| share(rng.normal() + 1.0)).collect();
        Self { k, v, beta, keep }
    }

    fn key(&self, t: usize) -> Tensor<B, 2> {
        tensor(&self.k[t * KEY..][..KEY], [1, KEY])
    }

    fn value(&self, t: usize) -> Tensor<B, 2> {
        tensor(&self.v[t * VALUE..][..VALUE], [1, VALUE])
    }

    /// `1/2 |v - k S|^2`.
    fn error(&self, t: usize, s: &Tensor<B, 2>) -> Tensor<B, 1> {
        let error = self.value(t) - self.key(t).matmul(s.clone());
        (error.clone() * error).sum() * 0.5
    }

    /// k, v, as the operations have them.
    fn rows(&self) -> (Tensor<B, 4>, Tensor<B, 4>) {
        (tensor(&self.k, [1, TOKENS, 1, KEY]), tensor(&self.v, [1, TOKENS, 1, VALUE]))
    }

    fn gate(&self, values: &[f64]) -> Tensor<B, 3> {
        tensor(values, [1, TOKENS, 1])
    }

    /// States by a rule for each token, from zero.
    fn states(&self, mut rule: impl FnMut(usize, Tensor<B, 2>) -> Tensor<B, 2>) -> Tensor<B, 2> {
        let zero = tensor(&[0.0; KEY * VALUE], [KEY, VALUE]);
        (0..TOKENS).fold(zero, |s, t| rule(t, s).detach())
    }

    /// Holds an operation's last state to a rule.
    fn hold(
        &self,
        what: &str,
        (_, state): (Tensor<B, 4>, Tensor<B, 4>),
        rule: impl FnMut(usize, Tensor<B, 2>) -> Tensor<B, 2>,
    ) {
        assert_close(what, &download(self.states(rule)), &download(state), LIMIT);
    }
}

/// The gradient of a loss of a memory.
fn gradient(s: &Tensor<B, 2>, loss: impl FnOnce(&Tensor<B, 2>) -> Tensor<B, 1>) -> Tensor<B, 2> {
    let s = s.clone().detach().require_grad();
    let found = loss(&s).backward();
    Tensor::from_inner(s.grad(&found).unwrap())
}

#[test]
fn hebb_follows_what_a_memory_and_a_value_have_in_common() {
    let _alone = alone();
    let x = Sequence::new(false);
    let (k, v) = x.rows();
    let op = ops::linear_attention(LinearAttentionInputs::new(k.clone(), k, v), None).unwrap();
    x.hold("S - d(-<k S, v>)", op, |t, s| {
        let loss = |s: &Tensor<B, 2>| -(x.key(t).matmul(s.clone()) * x.value(t)).sum();
        s.clone() - gradient(&s, loss)
    });
}

#[test]
fn the_delta_rule_takes_a_step_down_the_error() {
    let _alone = alone();
    let x = Sequence::new(true);
    let (k, v) = x.rows();
    let op = DeltaRuleInputs::new(k.clone(), k, v, x.gate(&x.beta));
    x.hold("S - beta d", ops::delta_rule(op, None).unwrap(), |t, s| {
        s.clone() - gradient(&s, |s| x.error(t, s)) * x.beta[t]
    });
}

#[test]
fn gated_deltanet_takes_the_step_from_a_memory_that_has_faded() {
    let _alone = alone();
    let x = Sequence::new(true);
    let (k, v) = x.rows();
    let log = x.keep.iter().map(|a| a.ln()).collect::<Vec<_>>();
    let op = DeltaRuleInputs::new(k.clone(), k, v, x.gate(&x.beta)).with_decay(x.gate(&log));
    x.hold("a S - beta d", ops::delta_rule(op, None).unwrap(), |t, s| {
        let faded = s * x.keep[t];
        faded.clone() - gradient(&faded, |s| x.error(t, s)) * x.beta[t]
    });
}

#[test]
fn longhorn_solves_for_the_nearest_memory_that_errs_less() {
    let _alone = alone();
    let x = Sequence::new(false);
    let (k, v) = x.rows();
    let size = |t: usize| x.k[t * KEY..][..KEY].iter().map(|k| k * k).sum::<f64>();
    let share: Vec<f64> = (0..TOKENS).map(|t| x.beta[t] / (1.0 + x.beta[t] * size(t))).collect();
    let mut states = vec![tensor(&[0.0; KEY * VALUE], [KEY, VALUE])];
    let mut state = None;
    for (t, share) in share.iter().enumerate() {
        let one = |x: &Tensor<B, 4>| x.clone().narrow(1, t, 1);
        let op = DeltaRuleInputs::new(one(&k), one(&k), one(&v), tensor(&[*share], [1, 1, 1]));
        let next = ops::delta_rule_step(op, state).unwrap().1;
        states.push(next.clone().reshape([KEY, VALUE]));
        state = Some(next);
    }
    // At a minimum of |S - S_before|^2 + beta |v - k S|^2 its gradient is zero.
    for t in 0..TOKENS {
        let slope = gradient(&states[t + 1], |s| {
            let moved = s.clone() - states[t].clone();
            (moved.clone() * moved).sum() + x.error(t, s) * 2.0 * x.beta[t]
        });
        let size = download(slope.abs().max())[0];
        assert!(size < LIMIT, "token {t}: a gradient of {size}");
        let before = gradient(&states[t], |s| x.error(t, s) * 2.0 * x.beta[t]);
        assert!(download(before.abs().max())[0] > 1e-3, "token {t}: there was something to learn");
    }
}

/// The memory that MesaNet reads: the outputs of unit vectors.
fn mesa_memory(x: &Sequence, log_keep: &[f64], ridge: f64, t: usize) -> Tensor<B, 2> {
    let part = |x: Tensor<B, 4>| x.narrow(1, 0, t + 1);
    let gate = |values: &[f64]| x.gate(values).narrow(1, 0, t + 1);
    let rows = (0..KEY).map(|i| {
        let (k, v) = x.rows();
        let mut unit = vec![0.0; TOKENS * KEY];
        (0..TOKENS).for_each(|t| unit[t * KEY + i] = 1.0);
        let op = MesaInputs {
            q: part(tensor(&unit, [1, TOKENS, 1, KEY])),
            k: part(k),
            v: part(v),
            beta: gate(&x.beta),
            g: gate(log_keep),
            lambda: tensor(&[ridge; KEY], [1, KEY]),
            iterations: 40,
        };
        let o = ops::mesa(op, None).unwrap().0;
        o.narrow(1, t, 1).reshape([1, VALUE])
    });
    Tensor::cat(rows.collect(), 0)
}

#[test]
fn mesa_solves_the_regression_on_all_tokens_so_far() {
    let _alone = alone();
    let x = Sequence::new(true);
    let log: Vec<f64> = x.keep.iter().map(|a| a.ln()).collect();
    for t in [0, 3, TOKENS - 1] {
        let s = mesa_memory(&x, &log, 0.7, t);
        let slope = gradient(&s, |s| {
            let ridge = (s.clone() * s.clone()).sum() * 0.35;
            (0..=t).fold(ridge, |sum, j| {
                let kept: f64 = x.keep[j + 1..=t].iter().product();
                sum + x.error(j, s) * (kept * x.beta[j])
            })
        });
        let size = download(slope.abs().max())[0];
        assert!(size < 1e-8, "token {t}: a gradient of {size}");
    }
}

/// P = (H + Lambda)^-1 by Sherman and Morrison, as the first Mesa layer has it (arXiv 2309.05858).
#[test]
fn without_decay_mesa_is_recursive_least_squares() {
    let _alone = alone();
    let x = Sequence::new(true);
    let ones = Sequence { beta: vec![1.0; TOKENS], ..Sequence::new(true) };
    let diagonal = |i: usize| if i.is_multiple_of(KEY + 1) { 1.0 / 0.7 } else { 0.0 };
    let mut p = tensor(&(0..KEY * KEY).map(diagonal).collect::<Vec<_>>(), [KEY, KEY]);
    let state = x.states(|t, s| {
        let k = x.key(t);
        let along = p.clone().matmul(k.clone().transpose()); // [K, 1]
        let size = (k.clone().matmul(along.clone()) + 1.0).reshape([1, 1]);
        p = p.clone() - along.clone().matmul(along.clone().transpose()) / size.clone();
        let error = x.value(t) - k.matmul(s.clone());
        s + (along / size).matmul(error)
    });
    let mesa = mesa_memory(&ones, &[0.0; TOKENS], 0.7, TOKENS - 1);
    assert_close("recursive least squares", &download(state), &download(mesa), 1e-8);
}

#[test]
fn comba_steps_from_a_fading_memory_by_what_the_whole_one_answers() {
    let _alone = alone();
    let x = Sequence::new(true);
    let (k, v) = x.rows();
    let log: Vec<f64> = x.keep.iter().map(|a| a.ln()).collect();
    let share = 0.6;
    let comba = |erase: Tensor<B, 4>| {
        let op = DeltaRuleInputs {
            erase: Some(erase),
            read: Read::Before,
            ..DeltaRuleInputs::new(k.clone(), k.clone(), v.clone(), x.gate(&x.beta))
                .with_decay(x.gate(&log))
        };
        ops::delta_rule(op, None).unwrap()
    };
    x.hold("a S - beta / c d", comba(k.clone() * share), |t, s| {
        let loss = |s: &Tensor<B, 2>| x.error(t, &(s.clone() * share));
        s.clone() * x.keep[t] - gradient(&s, loss) * (x.beta[t] / share)
    });
    // Where the share of the answer that comes off is the decay, it is Gated DeltaNet.
    let kept = x.gate(&x.keep).unsqueeze_dim::<4>(3);
    let gated = DeltaRuleInputs::new(k.clone(), k.clone(), v.clone(), x.gate(&x.beta))
        .with_decay(x.gate(&log));
    let (want, got) = (ops::delta_rule(gated, None).unwrap().1, comba(k.clone() * kept).1);
    assert_close("c = a", &download(want), &download(got), LIMIT);
}

/// Sets one parameter.
struct Set<'a>(&'a str, &'a [f64], Vec<String>);

impl<B: Backend> ModuleMapper<B> for Set<'_> {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.2.push(name.to_string());
    }
    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.2.pop();
    }
    fn map_float<const R: usize>(&mut self, param: Param<Tensor<B, R>>) -> Param<Tensor<B, R>> {
        if !self.2.join(".").ends_with(self.0) {
            return param;
        }
        param.map(|old| {
            let device = old.device();
            upload(self.1, old.dims(), DType::F64, &device).require_grad()
        })
    }
}

/// The key that token j's cache holds at the end is what DeltaNet has made of its write: PaTH weighs by softmax what
/// DeltaNet sums.
#[test]
fn path_whose_reflections_are_its_keys_scores_as_deltanet_remembers() {
    let text = "path_attention = { heads = 1, conv_size = 0, chunk = 8 }";
    let mixer: Mixer<B> = mixer(text);
    let named = Weights::of(&mixer).0.into_iter();
    let w = Weights(named.map(|(n, x)| (n.split_once('.').unwrap().1.to_string(), x)).collect());
    // Tokens are unit vectors, so that each has a row of a projection for its key.
    let one_hot = |t: usize| (0..D).map(|i| f64::from(u8::from(i == t))).collect::<Vec<_>>();
    // Without a convolution w has no activation either.
    let unit = |x: Vec<f64>| {
        let length = (x.iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt();
        x.iter().map(|x| x / length).collect::<Vec<f64>>()
    };
    let (mut keys, mut beta, mut tokens) = (vec![], vec![], vec![]);
    for t in 0..D {
        let x = one_hot(t);
        keys.extend(unit(w.linear("w_proj.1", &w.linear("w_proj.0", &x))));
        beta.push(2.0 / (1.0 + (-w.linear("bt_proj", &x)[0]).exp()));
        tokens.extend(x);
    }
    let mixer = mixer.map(&mut Set("k_proj.weight", &keys, vec![]));
    let (_, state) = mixer.forward(tensor(&tokens, [1, D, D]), None);
    let MixerState::Path(cache) = state else { panic!("another state") };

    // Values that are unit vectors over beta: column j of the memory is what is left of write j.
    let mut values = vec![0.0; D * D];
    (0..D).for_each(|t| values[t * D + t] = 1.0 / beta[t]);
    let k = tensor(&keys, [1, D, 1, D]);
    let v = tensor(&values, [1, D, 1, D]);
    let op = DeltaRuleInputs::new(k.clone(), k, v, tensor(&beta, [1, D, 1]));
    let memory = ops::delta_rule(op, None).unwrap().1;
    assert_close("keys", &download(memory.transpose()), &download(cache.keys), LIMIT);
}
