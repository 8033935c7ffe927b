//! Atlas and OmegaNet: loops over tokens with the weights of every token formed, and Burn's autodiff for the gradients
//! of the inner losses.

use crate::formulas::{Noisy, Rows, by_head, each, hold, normalized, sigmoid, silu, times, unit};
use crate::inner_learning::{
    JORDAN_STEPS, Matrix, answer, gradients, mixed, network, of_head, orthogonal, plus, row, zeros,
};
use crate::layers::{Weights, mixer};
use crate::support::alone;
use burn::module::Module;
use std::f64::consts::FRAC_1_SQRT_2;

/// Settings that the formula goes by.
struct Atlas {
    heads: usize,
    /// K.
    width: usize,
    /// c.
    window: usize,
    mini_batch: usize,
    base_lr: f64,
    muon: bool,
    deep: bool,
}

/// A token that is learnt from.
struct Seen {
    k: Vec<f64>,
    v: Vec<f64>,
    gamma: f64,
}

/// One head's memory in the course of a sequence.
struct Head {
    start: Vec<Matrix>,
    now: Vec<Matrix>,
    momentum: Vec<Matrix>,
    seen: Vec<Seen>,
}

/// Products of up to as many numbers of `x` as there are coefficients, but for one. Twins' factor is f32's, as in the
/// mixer: Muon's steps make small differences large.
fn polynomial(x: &[f64], c: &[f64]) -> Vec<f64> {
    let first = [c[0]].into_iter().chain(x.iter().map(|x| c[1] * x));
    let mut y: Vec<f64> = first.collect();
    let twin = f64::from(FRAC_1_SQRT_2 as f32);
    if let Some(c) = c.get(2) {
        for (i, a) in x.iter().enumerate() {
            for (j, b) in x.iter().enumerate().skip(i) {
                y.push(c * a * b * if i == j { twin } else { 1.0 });
            }
        }
    }
    y
}

impl Atlas {
    /// Sum over the window of gamma times the gradient of half a squared error, at the mini-batch's start.
    fn gradient(&self, head: &Head) -> Vec<Matrix> {
        let mut sum = zeros(&head.start);
        for seen in head.seen.iter().rev().take(self.window) {
            let found = gradients(&head.start, |weights| {
                let mut y = network(&seen.k, weights, false);
                if self.deep {
                    let first = &seen.k[1..][..self.width];
                    y = y + row(first);
                }
                let error = y - row(&seen.v);
                (error.clone() * error).sum() * 0.5
            });
            sum = mixed(1.0, &sum, seen.gamma, &found);
        }
        sum
    }

    fn outputs(&self, w: &Weights, rows: &[Vec<f64>]) -> Rows {
        let columns = if self.deep { vec![4 * self.width, self.width] } else { vec![self.width] };
        let fresh = |h| {
            let start = of_head(w, h, self.heads, &columns);
            Head { now: start.clone(), momentum: zeros(&start), start, seen: vec![] }
        };
        let mut heads: Vec<Head> = (0..self.heads).map(fresh).collect();
        let c = w.get("coefficients");
        let projected = ["q_proj", "k_proj", "v_proj"]
            .map(|name| rows.iter().map(|x| w.linear(name, x)).collect::<Rows>());
        let mut outputs = vec![];
        for (t, x) in rows.iter().enumerate() {
            let [q, k, v] = [0, 1, 2].map(|i| {
                let name = ["q_conv1d", "k_conv1d", "v_conv1d"][i];
                let mixed = match w.0.contains_key(&format!("{name}.weight")) {
                    true => w.convolution(name, &projected[i][..=t]),
                    false => projected[i][t].clone(),
                };
                each(&mixed, silu)
            });
            let [q, k] = [q, k].map(|x| by_head(&x, self.heads, unit));
            let gate = |name: &str| each(&w.linear(name, x), sigmoid);
            let (gamma, rate, keep) = (gate("context_proj"), gate("rate_proj"), gate("keep_proj"));
            let eta = match w.0.contains_key("momentum_proj.weight") {
                true => gate("momentum_proj"),
                false => vec![0.0; self.heads],
            };
            let mut o = vec![];
            for (h, head) in heads.iter_mut().enumerate() {
                let part = |x: &[f64]| x[h * self.width..][..self.width].to_vec();
                let [q, k] = [&q, &k].map(|x| polynomial(&part(x), c));
                if t % self.mini_batch == 0 {
                    head.start = head.now.clone();
                }
                head.seen.push(Seen { k, v: part(&v), gamma: gamma[h] / self.window as f64 });
                let found = self.gradient(head);
                head.momentum = mixed(eta[h], &head.momentum, -1.0, &found);
                let step = match self.muon {
                    true => head.momentum.iter().map(|s| orthogonal(s, JORDAN_STEPS)).collect(),
                    false => head.momentum.clone(),
                };
                head.now = mixed(keep[h], &head.now, self.base_lr * rate[h], &step);
                let mut read = answer(&q, &head.now, false);
                if self.deep {
                    read = plus(&read, &q[1..][..self.width]);
                }
                o.extend(times(&normalized(&read, 1e-5), w.get("o_norm.norm.gamma")));
            }
            let o = match w.0.contains_key("g_proj.weight") {
                true => times(&o, &each(&w.linear("g_proj", x), silu)),
                false => o,
            };
            outputs.push(w.linear("o_proj", &o));
        }
        outputs
    }
}

const SIZES: &str = "heads = 2, window = 5, mini_batch = 8, base_lr = 0.5";

const LINEAR: Atlas =
    Atlas { heads: 2, width: 12, window: 5, mini_batch: 8, base_lr: 0.5, muon: true, deep: false };

fn follows(options: &str, atlas: &Atlas) {
    let text = format!("atlas = {{ {SIZES}{options} }}");
    let mixer = mixer(&text).map(&mut Noisy::new());
    hold(&text, &mixer, |w, rows| atlas.outputs(w, rows));
}

#[test]
fn atlas_learns_from_a_window_with_momentum_and_muons_steps() {
    let _alone = alone();
    follows("", &LINEAR);
    let narrow = Atlas { width: 3, deep: true, ..LINEAR };
    follows(", key_width = 3, inner = 'mlp', output_gate = false", &narrow);
    follows(
        ", key_width = 4, momentum = false, degree = 1, conv_size = 0",
        &Atlas { width: 4, ..LINEAR },
    );
}

#[test]
fn without_muon_atlas_descends_and_without_momentum_it_is_omega_net() {
    let _alone = alone();
    let plain = Atlas { muon: false, ..LINEAR };
    follows(", muon = false", &plain);
    follows(", muon = false, momentum = false", &plain);
    let narrow = Atlas { width: 3, deep: true, ..plain };
    follows(", key_width = 3, inner = 'mlp', muon = false", &narrow);
    follows(", key_width = 3, inner = 'mlp', muon = false, momentum = false, degree = 1", &narrow);
}

#[test]
fn a_window_of_one_token_without_momentum_is_a_delta_rule() {
    let _alone = alone();
    let one = Atlas { window: 1, mini_batch: 1, muon: false, ..LINEAR };
    let text = "atlas = { heads = 2, window = 1, mini_batch = 1, base_lr = 0.5, muon = false, momentum = false }";
    hold(text, &mixer(text).map(&mut Noisy::new()), |w, rows| one.outputs(w, rows));
}
