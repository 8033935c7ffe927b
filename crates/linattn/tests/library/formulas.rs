//! Mixers are what their papers say: loops over tokens in double precision, written from the
//! formulas, with the weights of the mixer that they are compared with.

use crate::call::{download, upload};
use crate::layers::{B, D, Weights, input, log_sigmoid, mixer, wide};
use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{Tensor, backend::Backend};
use linattn::nn::Rwkv7MlpConfig;
use linattn::nn::mixers::Mixer;
use linattn_oracle::{Rng, assert_close};
use std::f64::consts::{FRAC_1_SQRT_2, PI};

/// Mixers compute in double precision here; their constants and angles are f32's.
const LIMIT: f64 = 1e-6;
pub(crate) const TOKENS: usize = 40;

/// A sequence, a row for each token.
pub(crate) type Rows = Vec<Vec<f64>>;

fn rows(x: Tensor<B, 3>) -> Rows {
    download(x).chunks(D).map(<[f64]>::to_vec).collect()
}

/// Parameters that are vectors, norms' weights among them, as no fresh model has them.
pub(crate) struct Noisy(Rng);

impl Noisy {
    pub(crate) fn new() -> Self {
        Self(Rng::named(1, "noise"))
    }
}

impl<B: Backend> ModuleMapper<B> for Noisy {
    fn map_float<const R: usize>(&mut self, param: Param<Tensor<B, R>>) -> Param<Tensor<B, R>> {
        if R != 1 {
            return param;
        }
        param.map(|weight| {
            let noisy: Vec<f64> =
                download(weight.clone()).iter().map(|x| x + 0.3 * self.0.normal()).collect();
            let noisy = upload(&noisy, weight.dims(), weight.dtype(), &weight.device());
            noisy.require_grad()
        })
    }
}

/// Holds `mixer` to what `formula` makes of its weights and a sequence.
pub(crate) fn hold(
    what: &str,
    mixer: &Mixer<B>,
    formula: impl FnOnce(&Weights, &[Vec<f64>]) -> Rows,
) {
    let x = input(TOKENS).narrow(0, 0, 1);
    // Names inside the mixer, without the mixer's own.
    let named = Weights::of(mixer).0.into_iter();
    let weights =
        Weights(named.map(|(name, x)| (name.split_once('.').unwrap().1.to_string(), x)).collect());
    let want = formula(&weights, &rows(x.clone())).concat();
    assert_close(what, &want, &download(mixer.forward(x, None).0), LIMIT);
}

pub(crate) fn check(text: &str, formula: impl FnOnce(&Weights, &[Vec<f64>]) -> Rows) {
    hold(text, &mixer(text), formula);
}

impl Weights {
    pub(crate) fn get(&self, name: &str) -> &[f64] {
        &self.0[name]
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    /// The causal convolution of all rows, at the last of them.
    pub(crate) fn convolution(&self, name: &str, rows: &[Vec<f64>]) -> Vec<f64> {
        let channels = rows[0].len();
        let weight = self.get(&format!("{name}.weight"));
        let window = weight.len() / channels;
        let bias = self.0.get(&format!("{name}.bias"));
        (0..channels)
            .map(|c| {
                let seen = rows.iter().rev().take(window).enumerate();
                let products =
                    seen.map(|(back, row)| weight[(window - 1 - back) * channels + c] * row[c]);
                bias.map_or(0.0, |bias| bias[c]) + products.sum::<f64>()
            })
            .collect()
    }

    /// A linear layer of `heads` blocks on the diagonal.
    pub(crate) fn blocks(&self, name: &str, heads: usize, x: &[f64]) -> Vec<f64> {
        let weight = self.get(&format!("{name}.weight"));
        let (from, to) = (x.len() / heads, weight.len() / x.len());
        let bias = self.0.get(&format!("{name}.bias"));
        (0..heads * to)
            .map(|n| {
                let (first, j) = (n / to * from, n % to);
                let products = (0..from).map(|i| x[first + i] * weight[(first + i) * to + j]);
                bias.map_or(0.0, |bias| bias[n]) + products.sum::<f64>()
            })
            .collect()
    }
}

pub(crate) fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

pub(crate) fn silu(x: f64) -> f64 {
    x * sigmoid(x)
}

pub(crate) fn softplus(x: f64) -> f64 {
    x.exp().ln_1p()
}

/// By the series of the error function up to |x| = 6: its terms are at most e^18, and gone after 150.
pub(crate) fn gelu(x: f64) -> f64 {
    if x.abs() > 6.0 {
        return x.max(0.0);
    }
    let z = x * FRAC_1_SQRT_2;
    let (mut term, mut sum) = (z, z);
    for n in 1..150 {
        term *= -z * z / n as f64;
        sum += term / (2 * n + 1) as f64;
    }
    0.5 * x * (1.0 + sum * 2.0 / PI.sqrt())
}

pub(crate) fn each(x: &[f64], f: impl Fn(f64) -> f64) -> Vec<f64> {
    x.iter().map(|&x| f(x)).collect()
}

pub(crate) fn times(a: &[f64], b: &[f64]) -> Vec<f64> {
    a.iter().zip(b).map(|(a, b)| a * b).collect()
}

pub(crate) fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Of mean square 1.
pub(crate) fn normalized(x: &[f64], epsilon: f64) -> Vec<f64> {
    let size = (dot(x, x) / x.len() as f64 + epsilon).sqrt();
    each(x, |x| x / size)
}

/// Of mean 0 and variance 1.
pub(crate) fn standardized(x: &[f64], epsilon: f64) -> Vec<f64> {
    let mean = x.iter().sum::<f64>() / x.len() as f64;
    normalized(&each(x, |x| x - mean), epsilon)
}

/// Of length 1.
pub(crate) fn unit(x: &[f64]) -> Vec<f64> {
    let length = (dot(x, x) + 1e-6).sqrt();
    each(x, |x| x / length)
}

/// `f` of each of `heads` parts.
pub(crate) fn by_head(x: &[f64], heads: usize, f: impl Fn(&[f64]) -> Vec<f64>) -> Vec<f64> {
    x.chunks(x.len() / heads).flat_map(f).collect()
}

/// Numbers i and i + K / 2 turned by `t theta^{-2 i / K}`.
pub(crate) fn rotated(x: &[f64], t: usize) -> Vec<f64> {
    let half = x.len() / 2;
    let mut y = vec![0.0; x.len()];
    for i in 0..half {
        let (sin, cos) = (t as f64 * 10_000f64.powf(-(i as f64) / half as f64)).sin_cos();
        y[i] = x[i] * cos - x[i + half] * sin;
        y[i + half] = x[i] * sin + x[i + half] * cos;
    }
    y
}

/// Values weighed by the softmax of scores.
pub(crate) fn weighed(scores: &[f64], values: &[Vec<f64>]) -> Vec<f64> {
    let most = scores.iter().fold(f64::MIN, |a, &b| a.max(b));
    let shares = each(scores, |s| (s - most).exp());
    let sum: f64 = shares.iter().sum();
    (0..values[0].len())
        .map(|j| shares.iter().zip(values).map(|(s, v)| s / sum * v[j]).sum())
        .collect()
}

/// A memory K x V, whose row i keeps `keep[i]` and is written `k[i] v`; gives `q S`.
pub(crate) fn remember(
    memory: &mut [f64],
    keep: &[f64],
    k: &[f64],
    v: &[f64],
    q: &[f64],
) -> Vec<f64> {
    let mut o = vec![0.0; v.len()];
    for (i, row) in memory.chunks_mut(v.len()).enumerate() {
        for ((cell, v), o) in row.iter_mut().zip(v).zip(&mut o) {
            *cell = *cell * keep[i] + k[i] * v;
            *o += q[i] * *cell;
        }
    }
    o
}

#[test]
fn rwkv4_is_a_weighted_average() {
    check("rwkv4 = {}", |w, rows| {
        let (mut above, mut below, mut before) = (vec![0f64; D], vec![0f64; D], vec![0f64; D]);
        let mut outputs = vec![];
        for x in rows {
            let mixed = |name: &str| -> Vec<f64> {
                let mu = w.get(name);
                (0..D).map(|i| x[i] * mu[i] + before[i] * (1.0 - mu[i])).collect()
            };
            let k = w.linear("key", &mixed("time_mix_key"));
            let v = w.linear("value", &mixed("time_mix_value"));
            let r = each(&w.linear("receptance", &mixed("time_mix_receptance")), sigmoid);
            let mut o = vec![];
            for i in 0..D {
                let keep = (-w.get("time_decay")[i].exp()).exp();
                let own = (w.get("time_first")[i] + k[i]).exp();
                o.push(r[i] * (above[i] + own * v[i]) / (below[i] + own));
                above[i] = keep * above[i] + k[i].exp() * v[i];
                below[i] = keep * below[i] + k[i].exp();
            }
            outputs.push(w.linear("o_proj", &o));
            before.clone_from(x);
        }
        outputs
    });
}

#[test]
fn rwkv6_mixes_by_data_and_adds_a_bonus() {
    let text =
        "rwkv6 = { heads = 2, key_width = 6, expand_v = 0.5, mix_low_rank = 3, gate_low_rank = 5 }";
    check(text, |w, rows| {
        let (mut memories, mut before) = (vec![vec![0f64; 6 * 3]; 2], vec![0f64; D]);
        let mut outputs = vec![];
        for x in rows {
            let seen = |share: &[f64]| -> Vec<f64> {
                (0..D).map(|i| x[i] + (before[i] - x[i]) * share[i]).collect()
            };
            let low = w.linear("x_proj.0.linear", &seen(w.get("x_proj.0.mu")));
            let (low, widen) = (each(&low, f64::tanh), w.get("x_proj.2.weight"));
            let mixed = |j: usize| {
                let share = |i: usize| {
                    let sum: f64 = (3 * j..3 * j + 3).map(|n| low[n] * widen[n * D + i]).sum();
                    w.get("x_bias")[j * D + i] + sum
                };
                seen(&(0..D).map(share).collect::<Vec<_>>())
            };
            let r = w.linear("r_proj.linear", &mixed(0));
            let decay = each(&w.linear("w_proj.linear.lora.0", &mixed(1)), f64::tanh);
            let decay = w.linear("w_proj.linear.lora.2", &decay);
            let k = w.linear("k_proj.linear", &mixed(2));
            let v = w.linear("v_proj.linear", &mixed(3));
            let gate = each(&w.linear("g_proj.linear", &mixed(4)), silu);
            let mut o = vec![0f64; 2 * 3];
            for (head, memory) in memories.iter_mut().enumerate() {
                for i in 0..6 {
                    let n = head * 6 + i;
                    for j in 0..3 {
                        let (cell, written) = (&mut memory[i * 3 + j], k[n] * v[head * 3 + j]);
                        o[head * 3 + j] += r[n] * (*cell + w.get("bonus")[n] * written);
                        *cell = *cell * (-decay[n].exp()).exp() + written;
                    }
                }
            }
            let o = by_head(&o, 2, |o| standardized(o, 1e-5));
            outputs.push(w.linear("o_proj", &times(&o, &gate)));
            before.clone_from(x);
        }
        outputs
    });
}

#[test]
fn the_channel_mix_of_rwkv7_squares_what_is_above_zero() {
    let mlp = wide(Rwkv7MlpConfig::default().init::<B>(D, &Default::default()).unwrap());
    let (w, x) = (Weights::of(&mlp), input(TOKENS).narrow(0, 0, 1));
    let (mut before, mut want) = (vec![0f64; D], vec![]);
    for x in rows(x.clone()) {
        let mixed: Vec<f64> = (0..D).map(|i| x[i] + (before[i] - x[i]) * w.get("x_k")[i]).collect();
        let hidden = each(&w.linear("key", &mixed), |x| x.max(0.0).powi(2));
        want.extend(w.linear("down_proj", &hidden));
        before = x;
    }
    assert_close("channel mix", &want, &download(mlp.forward(x, None).0), LIMIT);
}

#[test]
fn mamba_has_steps_inputs_and_outputs_that_depend_on_the_data() {
    for negative in [false, true] {
        let text = format!("mamba = {{ d_state = 5, dt_rank = 3, allow_neg_eigval = {negative} }}");
        check(&text, |w, rows| {
            let (inner, size) = (2 * D, 5);
            let (mut memory, mut seen, mut outputs) = (vec![0f64; inner * size], vec![], vec![]);
            for x in rows {
                let both = w.linear("in_proj", x);
                seen.push(both[..inner].to_vec());
                let u = each(&w.convolution("conv1d", &seen), silu);
                let low = w.linear("x_proj", &u);
                let dt = each(&w.linear("dt_proj", &low[..3]), softplus);
                let (write, read) = (&low[3..3 + size], &low[3 + size..]);
                let mut o = vec![];
                for i in 0..inner {
                    let mut sum = w.get("d")[i] * u[i];
                    for n in 0..size {
                        let kept = (-dt[i] * w.get("a_log")[i * size + n].exp()).exp();
                        let kept = if negative { 2.0 * kept - 1.0 } else { kept };
                        let cell = &mut memory[i * size + n];
                        *cell = kept * *cell + dt[i] * write[n] * u[i];
                        sum += read[n] * *cell;
                    }
                    o.push(sum * silu(both[inner + i]));
                }
                outputs.push(w.linear("out_proj", &o));
            }
            outputs
        });
    }
}

#[test]
fn rg_lru_keeps_the_size_of_its_inputs() {
    check("rg_lru = { heads = 3, conv_size = 3 }", |w, rows| {
        let (mut h, mut seen, mut outputs) = (vec![0f64; D], vec![], vec![]);
        for x in rows {
            seen.push(w.linear("linear_x", x));
            let u = w.convolution("conv1d", &seen);
            let (r, i) = (w.blocks("a_gate", 3, &u), w.blocks("input_gate", 3, &u));
            for n in 0..D {
                let a = (-8.0 * softplus(w.get("a_param")[n]) * sigmoid(r[n])).exp();
                h[n] = a * h[n] + (1.0 - a * a).max(1e-8).sqrt() * sigmoid(i[n]) * u[n];
            }
            let gate = each(&w.linear("linear_y", x), gelu);
            outputs.push(w.linear("out_proj", &times(&h, &gate)));
        }
        outputs
    });
}

/// `(a + i b) (c + i d)`.
pub(crate) fn product([a, b]: [f64; 2], [c, d]: [f64; 2]) -> [f64; 2] {
    [a * c - b * d, a * d + b * c]
}

pub(crate) fn quotient(above: [f64; 2], [c, d]: [f64; 2]) -> [f64; 2] {
    let square = c * c + d * d;
    product(above, [c / square, -d / square])
}

/// e to a complex power.
fn power([a, b]: [f64; 2]) -> [f64; 2] {
    [a.exp() * b.cos(), a.exp() * b.sin()]
}

/// GELU, a projection to twice the width, and GLU: how LRU and S4D end.
pub(crate) fn gated(w: &Weights, u: &[f64]) -> Vec<f64> {
    let both = w.linear("out_proj", &each(u, gelu));
    times(&both[..D], &each(&both[D..], sigmoid))
}

#[test]
fn lru_turns_and_shrinks() {
    check("lru = { width = 10, r_min = 0.5 }", |w, rows| {
        let (mut h, mut outputs) = (vec![[0f64; 2]; 10], vec![]);
        for x in rows {
            let input = w.linear("in_proj", x);
            for n in 0..10 {
                let lambda = power([-w.get("nu_log")[n].exp(), w.get("theta_log")[n].exp()]);
                let scale = w.get("gamma_log")[n].exp();
                let [re, im] = product(lambda, h[n]);
                h[n] = [re + scale * input[n], im + scale * input[10 + n]];
            }
            let parts: Vec<f64> = h.iter().map(|h| h[0]).chain(h.iter().map(|h| h[1])).collect();
            let u: Vec<f64> = w
                .linear("c_proj", &parts)
                .iter()
                .enumerate()
                .map(|(i, u)| u + w.get("d")[i] * x[i])
                .collect();
            outputs.push(gated(w, &u));
        }
        outputs
    });
}

#[test]
fn s4d_is_the_convolution_with_its_kernel() {
    for (text, bilinear) in [
        ("s4d = { d_state = 6 }", false),
        ("s4d = { d_state = 6, spectrum = 'inv', discretization = 'bilinear' }", true),
    ] {
        check(text, |w, rows| {
            // 2 Re(sum over modes of C b a^l), a and b of one step.
            let mode = |channel: usize, n: usize| {
                let place = channel * 3 + n;
                let dt = w.get("ssm.log_dt")[channel].exp();
                let a = [-w.get("ssm.log_a_real")[place].exp(), w.get("ssm.a_imag")[place]];
                let c = [w.get("ssm.c")[place], w.get("ssm.c")[3 * D + place]];
                let scaled = [dt * a[0], dt * a[1]];
                let (step, drive) = match bilinear {
                    true => {
                        let below = [1.0 - scaled[0] / 2.0, -scaled[1] / 2.0];
                        let above = [1.0 + scaled[0] / 2.0, scaled[1] / 2.0];
                        (quotient(above, below), quotient([dt, 0.0], below))
                    }
                    false => {
                        let [re, im] = power(scaled);
                        ([re, im], quotient([re - 1.0, im], a))
                    }
                };
                (step, product(c, drive))
            };
            let mut kernels = vec![vec![0f64; TOKENS]; D];
            for (channel, kernel) in kernels.iter_mut().enumerate() {
                for n in 0..3 {
                    let (step, mut term) = mode(channel, n);
                    for k in kernel.iter_mut() {
                        *k += 2.0 * term[0];
                        term = product(term, step);
                    }
                }
            }
            let at = |t: usize| {
                let u = |c: usize| {
                    let past: f64 = (0..=t).map(|s| kernels[c][t - s] * rows[s][c]).sum();
                    past + w.get("ssm.d")[c] * rows[t][c]
                };
                gated(w, &(0..D).map(u).collect::<Vec<_>>())
            };
            (0..TOKENS).map(at).collect()
        });
    }
}

#[test]
fn qrnn_pools_with_forget_and_output_gates() {
    check("qrnn = { width = 10, window = 3 }", |w, rows| {
        let (mut c, mut outputs) = (vec![0f64; 10], vec![]);
        for t in 0..TOKENS {
            let at = |back: usize| if back > t { vec![0.0; D] } else { rows[t - back].clone() };
            let gates = w.linear("in_proj", &[at(2), at(1), at(0)].concat());
            let mut o = vec![];
            for n in 0..10 {
                let forget = sigmoid(gates[10 + n]);
                c[n] = forget * c[n] + (1.0 - forget) * gates[n].tanh();
                o.push(sigmoid(gates[20 + n]) * c[n]);
            }
            outputs.push(w.linear("o_proj", &o));
        }
        outputs
    });
}

#[test]
fn lstm_is_the_textbooks() {
    check("lstm = { width = 10 }", |w, rows| {
        let (mut h, mut c, mut outputs) = (vec![0f64; 10], vec![0f64; 10], vec![]);
        for x in rows {
            let (a, b) = (w.linear("x_proj", x), w.linear("h_proj", &h));
            let gate = |part: usize, n: usize| a[part * 10 + n] + b[part * 10 + n];
            for n in 0..10 {
                let (i, f, o) = (gate(0, n), gate(1, n), gate(3, n));
                c[n] = sigmoid(f) * c[n] + sigmoid(i) * gate(2, n).tanh();
                h[n] = sigmoid(o) * c[n].tanh();
            }
            outputs.push(w.linear("o_proj", &h));
        }
        outputs
    });
}

#[test]
fn gru_is_the_customary_one() {
    check("gru = { width = 10 }", |w, rows| {
        let (mut h, mut outputs) = (vec![0f64; 10], vec![]);
        for x in rows {
            let (a, b) = (w.linear("x_proj", x), w.linear("h_proj", &h));
            for n in 0..10 {
                let r = sigmoid(a[n] + b[n]);
                let z = sigmoid(a[10 + n] + b[10 + n]);
                let new = (a[20 + n] + r * b[20 + n]).tanh();
                h[n] = (1.0 - z) * new + z * h[n];
            }
            outputs.push(w.linear("o_proj", &h));
        }
        outputs
    });
}

/// Makes blocks on diagonals large enough for recurrent gates to matter.
struct Louder;

impl<B: Backend> ModuleMapper<B> for Louder {
    fn map_float<const R: usize>(&mut self, param: Param<Tensor<B, R>>) -> Param<Tensor<B, R>> {
        let factor = if R == 3 { 10.0 } else { 1.0 };
        param.map(|weight| (weight * factor).detach().require_grad())
    }
}

#[test]
fn slstm_divides_cells_by_what_was_written() {
    for (text, convolves) in
        [("slstm = { heads = 2 }", true), ("slstm = { heads = 3, conv_size = 0 }", false)]
    {
        let mixer = mixer(text).map(&mut Louder);
        let heads = if convolves { 2 } else { 3 };
        let width = D / heads;
        hold(text, &mixer, |w, rows| {
            let (mut h, mut c, mut n) = (vec![0f64; D], vec![0f64; D], vec![0f64; D]);
            let mut outputs = vec![];
            for (t, x) in rows.iter().enumerate() {
                let mixed = match convolves {
                    true => each(&w.convolution("conv1d", &rows[..=t]), silu),
                    false => x.clone(),
                };
                let inward = [("igate", &mixed), ("fgate", &mixed), ("zgate", x), ("ogate", x)]
                    .map(|(gate, x)| w.blocks(gate, heads, x));
                let back = w.blocks("recurrent", heads, &h);
                for j in 0..D {
                    let (head, cell) = (j / width, j % width);
                    let gate = |g: usize| inward[g][j] + back[(head * 4 + g) * width + cell];
                    let (keep, write) = (sigmoid(gate(1)), gate(0).exp());
                    c[j] = keep * c[j] + write * gate(2).tanh();
                    n[j] = keep * n[j] + write;
                    h[j] = sigmoid(gate(3)) * c[j] / n[j];
                }
                outputs.push(by_head(&h, heads, |h| standardized(h, 1e-5)));
            }
            outputs
        });
    }
}

#[test]
fn mlstm_divides_its_answers_by_what_was_written() {
    check("mlstm = { heads = 2, conv_size = 3 }", |w, rows| {
        let (mut memories, mut sums) = (vec![vec![0f64; 6 * 12]; 2], vec![vec![0f64; 6]; 2]);
        let mut outputs = vec![];
        for (t, x) in rows.iter().enumerate() {
            let mixed = each(&w.convolution("conv1d", &rows[..=t]), silu);
            let q = each(&w.linear("q", &mixed), |q| q / 6f64.sqrt());
            let (k, v) = (w.linear("k", &mixed), w.linear("v", x));
            let capped = |name: &str| each(&w.linear(name, x), |z| 15.0 * (z / 15.0).tanh());
            let (i, f) = (capped("igate_preact"), capped("fgate_preact"));
            let mut o = vec![];
            for head in 0..2 {
                let part = |x: &[f64], width: usize| x[head * width..][..width].to_vec();
                let (q, v, keep) = (part(&q, 6), part(&v, 12), [sigmoid(f[head]); 6]);
                let k = each(&part(&k, 6), |k| i[head].exp() * k);
                let above = remember(&mut memories[head], &keep, &k, &v, &q);
                let below = remember(&mut sums[head], &keep, &k, &[1.0], &q)[0];
                let h = each(&above, |h| h / below.abs().max(1.0));
                o.extend(standardized(&h, 1e-5));
            }
            let gate = each(&w.linear("ogate_preact", x), sigmoid);
            outputs.push(w.linear("out_proj", &times(&o, &gate)));
        }
        outputs
    });
}

/// Gates' weights, which start from zero, are numbers.
struct Open(Rng);

impl<B: Backend> ModuleMapper<B> for Open {
    fn map_float<const R: usize>(&mut self, param: Param<Tensor<B, R>>) -> Param<Tensor<B, R>> {
        param.map(|weight| {
            let mut numbers = download(weight.clone());
            if numbers.iter().all(|x| *x == 0.0) {
                numbers.iter_mut().for_each(|x| *x = 0.02 * self.0.normal());
            }
            upload(&numbers, weight.dims(), weight.dtype(), &weight.device()).require_grad()
        })
    }
}

#[test]
fn the_first_mlstm_goes_around_its_memory_and_gates_what_comes_of_it() {
    let text = "mlstm_v1 = { heads = 2, conv_size = 3 }";
    hold(text, &mixer(text).map(&mut Open(Rng::named(1, text))), |w, rows| {
        const I: usize = 64;
        let half = I / 2;
        let mut memories = vec![vec![0f64; half * half]; 2];
        let mut sums = vec![vec![0f64; half]; 2];
        let up: Vec<Vec<f64>> = rows.iter().map(|x| w.linear("up_proj", x)).collect();
        let inner: Vec<Vec<f64>> = up.iter().map(|x| x[..I].to_vec()).collect();
        let mut outputs = vec![];
        for t in 0..rows.len() {
            let mixed = each(&w.convolution("conv1d", &inner[..=t]), silu);
            let (q, k) = (w.blocks("q", I / 4, &mixed), w.blocks("k", I / 4, &mixed));
            let v = w.blocks("v", I / 4, &inner[t]);
            let all = [q.clone(), k.clone(), v.clone()].concat();
            let (i, f) = (w.linear("igate_preact", &all), w.linear("fgate_preact", &all));
            let mut o = vec![];
            for head in 0..2 {
                let part = |x: &[f64]| x[head * half..][..half].to_vec();
                let (v, keep) = (part(&v), vec![sigmoid(f[head]); half]);
                let q = each(&part(&q), |q| q / (half as f64).sqrt());
                let k = each(&part(&k), |k| i[head].exp() * k);
                let above = remember(&mut memories[head], &keep, &k, &v, &q);
                let below = remember(&mut sums[head], &keep, &k, &[1.0], &q)[0];
                o.extend(standardized(&each(&above, |h| h / below.abs().max(1.0)), 1e-5));
            }
            // The skip's weights are ones, as the norm's are.
            let o: Vec<f64> = o.iter().zip(&mixed).map(|(o, c)| o + c).collect();
            outputs.push(w.linear("down_proj", &times(&o, &each(&up[t][I..], silu))));
        }
        outputs
    });
}

#[test]
fn linear_attention_divides_by_the_sum_of_scores_and_no_norm_comes_after() {
    let text =
        "linear_attention = { normalize = true, denominator_eps = 0.25, output_norm = 'none' }";
    check(text, |w, rows| {
        let elu = |x: f64| if x > 0.0 { x + 1.0 } else { x.exp() };
        let (mut memory, mut sum) = (vec![0f64; D * D], vec![0f64; D]);
        let token = |x: &Vec<f64>| {
            let (q, k) = (each(&w.linear("q_proj", x), elu), each(&w.linear("k_proj", x), elu));
            let above = remember(&mut memory, &[1.0; D], &k, &w.linear("v_proj", x), &q);
            let below = remember(&mut sum, &[1.0; D], &k, &[1.0], &q)[0] + 0.25;
            w.linear("o_proj", &each(&above, |o| o / below))
        };
        rows.iter().map(token).collect()
    });
}

#[test]
fn one_tap_is_a_factor_and_a_bias_and_the_state_turns_where_asked_for() {
    for rope in [false, true] {
        let text =
            format!("mamba2 = {{ head_width = 48, d_state = 4, conv_size = 1, rope = {rope} }}");
        check(&text, |w, rows| {
            const I: usize = 48;
            let mut memory = vec![0f64; 4 * I];
            let token = |(t, x): (usize, &Vec<f64>)| {
                let projected = w.linear("in_proj", x);
                let (z, rest) = projected.split_at(I);
                let (taps, bias) = (w.get("conv1d.weight"), w.get("conv1d.bias"));
                let mixed: Vec<f64> =
                    (0..I + 8).map(|c| silu(rest[c] * taps[c] + bias[c])).collect();
                let dt = softplus(rest[I + 8] + w.get("dt_bias")[0]);
                let keep = (-dt * w.get("a_log")[0].exp()).exp();
                let v = each(&mixed[..I], |x| x * dt);
                let turned = |x: &[f64]| if rope { rotated(x, t) } else { x.to_vec() };
                let (b, c) = (turned(&mixed[I..I + 4]), turned(&mixed[I + 4..]));
                let o = remember(&mut memory, &[keep; 4], &b, &v, &c);
                let o: Vec<f64> =
                    o.iter().zip(&mixed).map(|(o, x)| o + w.get("d")[0] * x).collect();
                let y = normalized(&times(&o, &each(z, silu)), 1e-5);
                w.linear("out_proj", &y)
            };
            rows.iter().enumerate().map(token).collect()
        });
    }
}

#[test]
fn without_gates_mesa_net_is_recursive_least_squares() {
    let text = "mesa_net = { forget_gate = false, input_gate = false, conv_size = 3 }";
    check(text, |w, rows| {
        let ridge = each(w.get("lambda_params"), |x| softplus(x) + 0.25);
        let inverse = |i: usize| if i.is_multiple_of(D + 1) { 1.0 / ridge[i / D] } else { 0.0 };
        let (mut p, mut memory): (Vec<f64>, _) =
            ((0..D * D).map(inverse).collect(), vec![0f64; D * D]);
        let projected = ["q_proj", "k_proj"]
            .map(|name| rows.iter().map(|x| w.linear(name, x)).collect::<Rows>());
        let times_matrix = |x: &[f64], m: &[f64]| -> Vec<f64> {
            (0..D).map(|j| (0..D).map(|i| x[i] * m[i * D + j]).sum()).collect()
        };
        let mut outputs = vec![];
        for (t, x) in rows.iter().enumerate() {
            let seen = |i: usize| {
                let name = ["q_conv1d", "k_conv1d"][i];
                unit(&each(&w.convolution(name, &projected[i][..=t]), silu))
            };
            let (q, k, v) = (seen(0), seen(1), w.linear("v_proj", x));
            let along = times_matrix(&k, &p);
            let size = 1.0 + dot(&along, &k);
            let answer = times_matrix(&k, &memory);
            for i in 0..D {
                for j in 0..D {
                    p[i * D + j] -= along[i] * along[j] / size;
                    memory[i * D + j] += along[i] / size * (v[j] - answer[j]);
                }
            }
            outputs.push(w.linear("o_proj", &normalized(&times_matrix(&q, &memory), 1e-5)));
        }
        outputs
    });
}

/// One memory a head: `keep`, `k`, `v` and `q` fall into as many parts.
fn attended(memories: &mut [Vec<f64>], keep: &[f64], k: &[f64], v: &[f64], q: &[f64]) -> Vec<f64> {
    let heads = memories.len();
    let (key, value) = (k.len() / heads, v.len() / heads);
    let parts = memories.iter_mut().enumerate().map(|(head, memory)| {
        let keys = head * key..(head + 1) * key;
        let v = &v[head * value..(head + 1) * value];
        remember(memory, &keep[keys.clone()], &k[keys.clone()], v, &q[keys])
    });
    parts.collect::<Vec<_>>().concat()
}

#[test]
fn hgrn2_writes_what_it_forgets() {
    check("hgrn2 = { heads = 2, lower_bound = 0.3 }", |w, rows| {
        let (mut memories, mut outputs) = (vec![vec![0f64; 12 * 12]; 2], vec![]);
        for x in rows {
            let q = each(&w.linear("q_proj", x), |q| silu(q) / 12f64.sqrt());
            let f: Vec<f64> = w
                .linear("f_proj", x)
                .iter()
                .zip(w.get("lower_bound"))
                .map(|(&f, &b)| sigmoid(b) + (1.0 - sigmoid(b)) * sigmoid(f))
                .collect();
            let (k, v) = (each(&f, |f| 1.0 - f), w.linear("i_proj", x));
            let o = attended(&mut memories, &f, &k, &v, &q);
            outputs.push(w.linear("o_proj", &normalized(&o, 1e-5)));
        }
        outputs
    });
}

#[test]
fn hgrn_writes_what_it_forgets() {
    check("hgrn = { expand = 2, lower_bound = 0.6 }", |w, rows| {
        let (mut h, mut outputs) = (vec![0f64; 2 * D], vec![]);
        for x in rows {
            let (i, f, g) = (w.linear("i_proj", x), w.linear("f_proj", x), w.linear("g_proj", x));
            for n in 0..2 * D {
                let bound = sigmoid(w.get("lower_bound")[n]);
                let keep = bound + (1.0 - bound) * sigmoid(f[n]);
                h[n] = keep * h[n] + (1.0 - keep) * silu(i[n]);
            }
            outputs.push(w.linear("o_proj", &times(&normalized(&h, 1e-5), &each(&g, silu))));
        }
        outputs
    });
}

#[test]
fn metala_sees_itself_once_more() {
    check("metala = { heads = 2, gate_normalizer = 4.0, conv_size = 3 }", |w, rows| {
        let (mut memories, mut outputs) = (vec![vec![0f64; 6 * 12]; 2], vec![]);
        for t in 0..TOKENS {
            let x = each(&w.convolution("conv1d", &rows[..=t]), silu);
            let (q, v) = (w.linear("q_proj", &x), w.linear("v_proj", &x));
            let a = each(&w.linear("k_gate", &x), |a| (log_sigmoid(a) / 4.0).exp());
            let k = each(&a, |a| 1.0 - a);
            let scaled = each(&q, |q| q / 6f64.sqrt());
            let mut o = attended(&mut memories, &a, &k, &v, &scaled);
            let own = times(&times(&q, &k), w.get("aug_balance"));
            for (n, o) in o.iter_mut().enumerate() {
                let head = n / 12;
                let met: f64 = own[head * 6..][..6].iter().sum();
                *o += sigmoid(met * v[n]);
            }
            let o = by_head(&o, 2, |o| standardized(o, 1e-5));
            let gate = each(&w.linear("g_proj", &x), silu);
            outputs.push(w.linear("out_proj", &times(&o, &gate)));
        }
        outputs
    });
}

#[test]
fn gated_retention_rotates_and_decays() {
    check("gated_retention = { heads = 2, gate_normalizer = 4.0 }", |w, rows| {
        let (mut memories, mut outputs) = (vec![vec![0f64; 12 * 12]; 2], vec![]);
        for (t, x) in rows.iter().enumerate() {
            let q = by_head(&w.linear("q_proj", x), 2, |q| rotated(q, t));
            let q = each(&q, |q| q / 12f64.sqrt());
            let k = by_head(&w.linear("k_proj", x), 2, |k| rotated(k, t));
            let keep = each(&w.linear("gk_proj", x), |g| (log_sigmoid(g) / 4.0).exp());
            let keep: Vec<f64> = (0..24).map(|n| keep[n / 12]).collect();
            let o = attended(&mut memories, &keep, &k, &w.linear("v_proj", x), &q);
            let o = by_head(&o, 2, |o| normalized(o, 1e-5));
            let gate = each(&w.linear("g_proj", x), silu);
            outputs.push(w.linear("o_proj", &times(&o, &gate)));
        }
        outputs
    });
}

#[test]
fn lightning_attention_has_the_slopes_of_alibi() {
    check("lightning_attention = { heads = 3 }", |w, rows| {
        // For three heads: both slopes of two, and the first of four.
        let slopes = [1.0 / 16.0, 1.0 / 256.0, 1.0 / 4.0];
        let (mut memories, mut outputs) = (vec![vec![0f64; 8 * 8]; 3], vec![]);
        for x in rows {
            let qkv = each(&w.linear("qkv_proj", x), silu);
            let mut o = vec![];
            for (head, memory) in memories.iter_mut().enumerate() {
                let part = |j: usize| &qkv[(3 * head + j) * 8..][..8];
                let keep = [f64::exp(-slopes[head]); 8];
                o.extend(remember(memory, &keep, part(1), part(2), part(0)));
            }
            let gate = each(&w.linear("output_gate", x), sigmoid);
            outputs.push(w.linear("out_proj", &times(&normalized(&o, 1e-5), &gate)));
        }
        outputs
    });
}

#[test]
fn longhorn_answers_its_key_as_far_as_it_is_worth_it() {
    check("longhorn = { heads = 2, conv_size = 0 }", |w, rows| {
        let (mut memories, mut outputs) = (vec![vec![0f64; 12 * 12]; 2], vec![]);
        for x in rows {
            let [q, k, v] =
                ["q_proj", "k_proj", "v_proj"].map(|name| each(&w.linear(name, x), silu));
            let beta = each(&w.linear("b_proj", x), sigmoid);
            let mut o = vec![];
            for (head, memory) in memories.iter_mut().enumerate() {
                let part = |x: &[f64]| x[head * 12..][..12].to_vec();
                let (q, k, v) = (unit(&part(&q)), part(&k), part(&v));
                // Where the slope of |S - S_before|^2 + beta |v - k S|^2 is zero.
                let eps = beta[head] / (1.0 + beta[head] * dot(&k, &k));
                let known = remember(&mut memory.clone(), &[1.0; 12], &[0.0; 12], &v, &k);
                let missing: Vec<f64> = v.iter().zip(known).map(|(v, u)| eps * (v - u)).collect();
                let o_head = remember(memory, &[1.0; 12], &k, &missing, &q);
                o.extend(normalized(&o_head, 1e-5));
            }
            let gate = each(&w.linear("g_proj", x), silu);
            outputs.push(w.linear("o_proj", &times(&o, &gate)));
        }
        outputs
    });
}

#[test]
fn mla_makes_keys_and_values_of_a_latent() {
    let text = "mla = { heads = 2, kv_rank = 9, q_rank = 6, rope_width = 4, value_width = 7 }";
    check(text, |w, rows| {
        let up = |name: &str, x: &[f64]| {
            let narrow = w.linear(&format!("{name}.0"), x);
            w.linear(&format!("{name}.2"), &normalized(&narrow, 1e-5))
        };
        let (key, value) = (12, 7);
        let (mut keys, mut values, mut outputs) = (vec![vec![]; 2], vec![vec![]; 2], vec![]);
        for (t, x) in rows.iter().enumerate() {
            let (q, both) = (up("q_proj.Compressed", x), up("kv_proj", x));
            let shared = rotated(&w.linear("k_rope", x), t);
            let mut o = vec![];
            for head in 0..2 {
                let own = &both[head * (key + value)..][..key + value];
                keys[head].push([&own[..key], shared.as_slice()].concat());
                values[head].push(own[key..].to_vec());
                let q = &q[head * (key + 4)..][..key + 4];
                let q = [&q[..key], rotated(&q[key..], t).as_slice()].concat();
                let scores: Vec<f64> = keys[head].iter().map(|k| dot(&q, k) / 4.0).collect();
                o.extend(weighed(&scores, &values[head]));
            }
            outputs.push(w.linear("o_proj", &o));
        }
        outputs
    });
}

#[test]
fn deltaformer_writes_what_its_keys_do_not_recall() {
    check("deltaformer = { heads = 2, chunk = 8 }", |w, rows| {
        let (mut keys, mut news, mut outputs) = (vec![vec![]; 2], vec![vec![]; 2], vec![]);
        for (t, x) in rows.iter().enumerate() {
            let [q, k, v] = ["q_proj", "k_proj", "v_proj"].map(|name| w.linear(name, x));
            let mut o = vec![];
            for head in 0..2 {
                let part = |x: &[f64]| x[head * 12..][..12].to_vec();
                let (q, k) = (rotated(&part(&q), t), rotated(&part(&k), t));
                let score = |a: &[f64], keys: &[Vec<f64>]| -> Vec<f64> {
                    keys.iter().map(|k| dot(a, k) / 12f64.sqrt()).collect()
                };
                let mut new = part(&v);
                if t > 0 {
                    let known = weighed(&score(&k, &keys[head]), &news[head]);
                    new.iter_mut().zip(known).for_each(|(new, known)| *new -= known);
                }
                keys[head].push(k);
                news[head].push(new);
                o.extend(weighed(&score(&q, &keys[head]), &news[head]));
            }
            outputs.push(w.linear("o_proj", &o));
        }
        outputs
    });
}

#[test]
fn path_attention_reflects_queries_on_their_way_to_a_key() {
    for forgets in [false, true] {
        let text = format!(
            "path_attention = {{ heads = 2, w_rank = 3, chunk = 8, forget_gate = {forgets} }}"
        );
        check(&text, |w, rows| {
            let all = |name: &str| -> Rows { rows.iter().map(|x| w.linear(name, x)).collect() };
            let [q, k, v, beta] = ["q_proj", "k_proj", "v_proj", "bt_proj"].map(all);
            let narrow = all("w_proj.0");
            let plain: Rows = narrow.iter().map(|x| w.linear("w_proj.1", x)).collect();
            let at = |t: usize| each(&w.convolution("w_conv1d", &plain[..=t]), silu);
            let normals: Rows = (0..TOKENS).map(|t| by_head(&at(t), 2, unit)).collect();
            let gates = if forgets { all("g_proj") } else { vec![] };
            let mut outputs = vec![];
            for t in 0..TOKENS {
                let mut o = vec![];
                for head in 0..2 {
                    let part = |x: &[f64]| x[head * 12..][..12].to_vec();
                    let (mut q, mut kept) = (part(&q[t]), 0.0);
                    // From the query's own token back to the first.
                    let mut scores = vec![];
                    for j in (0..=t).rev() {
                        scores.push(dot(&q, &part(&k[j])) / 12f64.sqrt() + kept);
                        let (normal, strength) = (part(&normals[j]), 2.0 * sigmoid(beta[j][head]));
                        let met = strength * dot(&q, &normal);
                        q.iter_mut().zip(&normal).for_each(|(q, n)| *q -= met * n);
                        kept += if forgets { log_sigmoid(gates[j][head]) } else { 0.0 };
                    }
                    let values: Rows = (0..=t).rev().map(|j| part(&v[j])).collect();
                    o.extend(weighed(&scores, &values));
                }
                outputs.push(w.linear("o_proj", &o));
            }
            outputs
        });
    }
}
