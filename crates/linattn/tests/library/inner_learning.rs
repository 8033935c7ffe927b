//! Memories that learn inside a sequence: loops over tokens with the weights of every token formed, and Burn's
//! autodiff for the gradients of the inner losses.

use crate::call::{download, upload};
use crate::formulas::{
    Noisy, Rows, by_head, check, each, hold, normalized, rotated, sigmoid, silu, softplus,
    standardized, times, unit, weighed,
};
use crate::layers::{B, D, Weights, input, mixer};
use crate::support::alone;
use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{DType, Tensor};
use linattn_oracle::assert_close;

/// A matrix by rows.
#[derive(Debug, Clone)]
pub(crate) struct Matrix {
    numbers: Vec<f64>,
    columns: usize,
}

impl Matrix {
    fn rows(&self) -> usize {
        self.numbers.len() / self.columns
    }

    /// `x` times it.
    fn apply(&self, x: &[f64]) -> Vec<f64> {
        assert_eq!(x.len(), self.rows());
        let column =
            |j| x.iter().zip(self.numbers.chunks(self.columns)).map(|(x, r)| x * r[j]).sum();
        (0..self.columns).map(column).collect()
    }

    fn transposed(&self) -> Self {
        let (rows, columns) = (self.rows(), self.columns);
        let numbers = (0..rows * columns).map(|i| self.numbers[i % rows * columns + i / rows]);
        Self { numbers: numbers.collect(), columns: rows }
    }

    fn product(&self, by: &Self) -> Self {
        let rows = self.numbers.chunks(self.columns).flat_map(|row| by.apply(row));
        Self { numbers: rows.collect(), columns: by.columns }
    }

    fn zeros(&self) -> Self {
        Self { numbers: vec![0.0; self.numbers.len()], columns: self.columns }
    }

    /// `a` times it and `b` times another.
    fn mixed(&self, a: f64, b: f64, other: &Self) -> Self {
        let numbers = self.numbers.iter().zip(&other.numbers).map(|(x, y)| a * x + b * y);
        Self { numbers: numbers.collect(), columns: self.columns }
    }
}

pub(crate) fn mixed(a: f64, x: &[Matrix], b: f64, y: &[Matrix]) -> Vec<Matrix> {
    x.iter().zip(y).map(|(x, y)| x.mixed(a, b, y)).collect()
}

pub(crate) fn zeros(x: &[Matrix]) -> Vec<Matrix> {
    x.iter().map(Matrix::zeros).collect()
}

/// Head `head` of weights `weights.0`, `weights.1` .., whose widths of outputs are given.
pub(crate) fn of_head(w: &Weights, head: usize, heads: usize, columns: &[usize]) -> Vec<Matrix> {
    let matrix = |(layer, &columns): (usize, &usize)| {
        let all = w.get(&format!("weights.{layer}"));
        let size = all.len() / heads;
        Matrix { numbers: all[head * size..][..size].to_vec(), columns }
    };
    columns.iter().enumerate().map(matrix).collect()
}

fn tensor<const R: usize>(values: &[f64], shape: [usize; R]) -> Tensor<B, R> {
    upload(values, shape, DType::F64, &Default::default())
}

pub(crate) fn row(values: &[f64]) -> Tensor<B, 2> {
    tensor(values, [1, values.len()])
}

/// Gradients of a loss by weights, by Burn's autodiff.
pub(crate) fn gradients(
    weights: &[Matrix],
    loss: impl Fn(&[Tensor<B, 2>]) -> Tensor<B, 1>,
) -> Vec<Matrix> {
    let tensors: Vec<Tensor<B, 2>> =
        weights.iter().map(|w| tensor(&w.numbers, [w.rows(), w.columns]).require_grad()).collect();
    let found = loss(&tensors).backward();
    let of = |(x, w): (&Tensor<B, 2>, &Matrix)| Matrix {
        numbers: download(x.grad(&found).unwrap()),
        columns: w.columns,
    };
    tensors.iter().zip(weights).map(of).collect()
}

fn gelu(x: Tensor<B, 2>) -> Tensor<B, 2> {
    let inner =
        (x.clone() + x.clone().powf_scalar(3.0) * 0.044715) * (2.0 / std::f64::consts::PI).sqrt();
    x * 0.5 * (inner.tanh() + 1.0)
}

/// A network of one layer, or of two with GELU between them; each with a bias in its last row, or without.
pub(crate) fn network(x: &[f64], weights: &[Tensor<B, 2>], bias: bool) -> Tensor<B, 2> {
    let mut x = row(x);
    for (layer, weight) in weights.iter().enumerate() {
        if layer > 0 {
            x = gelu(x);
        }
        let from = weight.dims()[0] - usize::from(bias);
        let z = x.matmul(weight.clone().narrow(0, 0, from));
        x = if bias { z + weight.clone().narrow(0, from, 1) } else { z };
    }
    x
}

/// The same, of numbers.
pub(crate) fn answer(x: &[f64], weights: &[Matrix], bias: bool) -> Vec<f64> {
    let tensors: Vec<_> =
        weights.iter().map(|w| tensor(&w.numbers, [w.rows(), w.columns])).collect();
    download(network(x, &tensors, bias))
}

fn layer_norm(x: Tensor<B, 2>, gamma: &[f64], beta: &[f64]) -> Tensor<B, 2> {
    let centred = x.clone() - x.mean_dim(1);
    let size = ((centred.clone() * centred.clone()).mean_dim(1) + 1e-6).sqrt();
    centred / size * row(gamma) + row(beta)
}

pub(crate) fn plus(a: &[f64], b: &[f64]) -> Vec<f64> {
    a.iter().zip(b).map(|(a, b)| a + b).collect()
}

fn gelu_of(x: &[f64]) -> Vec<f64> {
    download(gelu(row(x)))
}

/// Test-time training with every token's weights formed.
fn ttt(w: &Weights, rows: &[Vec<f64>], heads: usize, size: usize, columns: &[usize]) -> Rows {
    let width = columns[columns.len() - 1];
    let shared = w.0.contains_key("q_conv1d.weight");
    let projected: Rows = rows.iter().map(|x| w.linear("q_proj", x)).collect();
    let mut start: Vec<_> = (0..heads).map(|h| of_head(w, h, heads, columns)).collect();
    let mut now = start.clone();
    let mut sums: Vec<_> = start.iter().map(|s| zeros(s)).collect();
    let mut outputs = vec![];
    for (t, x) in rows.iter().enumerate() {
        let place = t % size;
        let (q, k) = match shared {
            true => (
                w.convolution("q_conv1d", &projected[..=t]),
                w.convolution("k_conv1d", &projected[..=t]),
            ),
            false => (projected[t].clone(), w.linear("k_proj", x)),
        };
        let [q, k] = [q, k].map(|x| by_head(&x, heads, |x| rotated(x, place)));
        let v = w.linear("v_proj", x);
        let rates = each(&w.linear("rate_proj", x), |z| sigmoid(z) / width as f64);
        let scale = (1.0 / (place + 1) as f64 + w.get("place_scale")[place]).max(0.0);
        let mut o = vec![];
        for head in 0..heads {
            let part = |x: &[f64]| x[head * width..][..width].to_vec();
            let (q, k, v) = (part(&q), part(&k), part(&v));
            let gamma = part(w.get("ttt_norm_weight"));
            let beta = part(w.get("ttt_norm_bias"));
            let target: Vec<f64> = v.iter().zip(&k).map(|(v, k)| v - k).collect();
            if place == 0 {
                start[head] = now[head].clone();
                sums[head] = zeros(&sums[head]);
            }
            let found = gradients(&start[head], |weights| {
                let error = layer_norm(network(&k, weights, true), &gamma, &beta) - row(&target);
                (error.clone() * error).sum() * 0.5
            });
            sums[head] = mixed(1.0, &sums[head], rates[head], &found);
            now[head] = mixed(1.0, &start[head], -scale, &sums[head]);
            let z = row(&answer(&q, &now[head], true));
            o.extend(plus(&q, &download(layer_norm(z, &gamma, &beta))));
        }
        let o = standardized(&o, 1e-6);
        let o = plus(&times(&o, w.get("post_norm.Layer.gamma")), w.get("post_norm.Layer.beta"));
        let o = match w.0.contains_key("g_proj.weight") {
            true => times(&o, &gelu_of(&w.linear("g_proj", x))),
            false => o,
        };
        outputs.push(w.linear("o_proj", &o));
    }
    outputs
}

#[test]
fn ttt_takes_a_step_for_each_token_from_its_mini_batchs_start() {
    let _alone = alone();
    for (text, heads, size, columns) in [
        ("ttt = { heads = 2, mini_batch = 8 }", 2, 8, vec![12]),
        ("ttt = { heads = 3, mini_batch = 4, conv_size = 3, output_gate = true }", 3, 4, vec![8]),
        ("ttt = { heads = 2, inner = 'mlp', mini_batch = 8 }", 2, 8, vec![48, 12]),
    ] {
        let mixer = mixer(text).map(&mut Noisy::new());
        hold(text, &mixer, |w, rows| ttt(w, rows, heads, size, &columns));
    }
}

#[test]
fn titans_descends_with_momentum_and_forgets() {
    let _alone = alone();
    for (text, bias_free, size) in [
        ("titans = { heads = 2, mini_batch = 8, base_lr = 0.5 }", vec![12], 8),
        (
            "titans = { heads = 2, inner = 'mlp', mini_batch = 5, base_lr = 0.5, conv_size = 0, output_gate = false }",
            vec![48, 12],
            5,
        ),
        (
            "titans = { heads = 2, base_lr = 0.5, attention = { heads = 3, window = 4, persistent = 2 } }",
            vec![12],
            16,
        ),
        (
            "titans = { heads = 2, base_lr = 0.5, output_gate = false, attention = { window = 5, persistent = 0 } }",
            vec![12],
            16,
        ),
    ] {
        let (columns, heads, width) = (bias_free, 2, 12);
        check(text, |w, rows| {
            let mut memory: Vec<_> = (0..heads).map(|h| of_head(w, h, heads, &columns)).collect();
            let mut start = memory.clone();
            let mut momentum: Vec<_> = memory.iter().map(|m| zeros(m)).collect();
            let projected = ["q_proj", "k_proj", "v_proj"]
                .map(|name| rows.iter().map(|x| w.linear(name, x)).collect::<Rows>());
            let mut outputs = vec![];
            for (t, x) in rows.iter().enumerate() {
                let seen = |i: usize| {
                    let name = ["q_conv1d", "k_conv1d", "v_conv1d"][i];
                    let mixed = match w.0.contains_key(&format!("{name}.weight")) {
                        true => w.convolution(name, &projected[i][..=t]),
                        false => projected[i][t].clone(),
                    };
                    each(&mixed, silu)
                };
                let [q, k] = [0, 1].map(|i| by_head(&seen(i), heads, unit));
                let v = seen(2);
                let gate = |name: &str| each(&w.linear(name, x), sigmoid);
                let (theta, eta, keep) =
                    (gate("rate_proj"), gate("momentum_proj"), gate("keep_proj"));
                let mut o = vec![];
                for head in 0..heads {
                    let part = |x: &[f64]| x[head * width..][..width].to_vec();
                    let (q, k, v) = (part(&q), part(&k), part(&v));
                    if t % size == 0 {
                        start[head] = memory[head].clone();
                    }
                    let found = gradients(&start[head], |weights| {
                        let error = network(&k, weights, false) - row(&v);
                        (error.clone() * error).sum() * 0.5
                    });
                    momentum[head] = mixed(eta[head], &momentum[head], -0.5 * theta[head], &found);
                    memory[head] = mixed(keep[head], &memory[head], 1.0, &momentum[head]);
                    o.extend(normalized(&answer(&q, &memory[head], false), 1e-5));
                }
                let o = match w.0.contains_key("g_proj.weight") {
                    true => times(&o, &each(&w.linear("g_proj", x), silu)),
                    false => o,
                };
                let o = match gated_window(text) {
                    Some([heads, window]) => {
                        let a = persistent_window(w, &rows[..=t], heads, window);
                        times(&by_head(&a, 2, |a| normalized(a, 1e-5)), &each(&o, sigmoid))
                    }
                    None => o,
                };
                outputs.push(w.linear("o_proj", &o));
            }
            outputs
        });
    }
}

/// Heads and window of the attention that a memory gates.
fn gated_window(text: &str) -> Option<[usize; 2]> {
    let table: toml::Table = text.parse().unwrap();
    let attention = table["titans"].get("attention")?;
    let number = |key| attention.get(key).map_or(1, |x| x.as_integer().unwrap() as usize);
    Some(["heads", "window"].map(number))
}

/// Attention of the last of `rows` through a window, and over learnt tokens that are not rotated.
fn persistent_window(w: &Weights, rows: &[Vec<f64>], heads: usize, window: usize) -> Vec<f64> {
    let learnt = w.0.get("attention.persistent").map_or(&[][..], |p| p);
    let learnt: Vec<&[f64]> = learnt.chunks(D).collect();
    let from = rows.len().saturating_sub(window);
    let project = |name: &str, x: &[f64]| w.linear(&format!("attention.{name}"), x);
    let turn = |x: Vec<f64>, t: usize| by_head(&x, heads, |x| rotated(x, t));
    let now = rows.len() - 1;
    let q = turn(project("q_proj", &rows[now]), now);
    let seen = || (from..=now).map(|t| (&rows[t][..], t));
    let keys: Rows = (learnt.iter().map(|p| project("k_proj", p)))
        .chain(seen().map(|(x, t)| turn(project("k_proj", x), t)))
        .collect();
    let values: Rows = learnt
        .iter()
        .copied()
        .chain(seen().map(|(x, _)| x))
        .map(|x| project("v_proj", x))
        .collect();
    softmax_attention(&q, &keys, &values, heads)
}

/// Attention of one query over all keys, in each head.
fn softmax_attention(q: &[f64], keys: &[Vec<f64>], values: &[Vec<f64>], heads: usize) -> Vec<f64> {
    let width = q.len() / heads;
    let of_head = |head: usize| {
        let part = |x: &[f64]| x[head * width..][..width].to_vec();
        let met = |k: &Vec<f64>| times(&part(q), &part(k)).iter().sum::<f64>();
        let scores: Vec<f64> = keys.iter().map(|k| met(k) / (width as f64).sqrt()).collect();
        weighed(&scores, &values.iter().map(|v| part(v)).collect::<Rows>())
    };
    (0..heads).flat_map(of_head).collect()
}

/// Columns with other lengths.
fn resized(matrix: &Matrix, like: &Matrix) -> Matrix {
    let lengths = |m: &Matrix| -> Vec<f64> {
        m.transposed()
            .numbers
            .chunks(m.rows())
            .map(|c| c.iter().map(|x| x * x).sum::<f64>().sqrt())
            .collect()
    };
    let (have, want) = (lengths(matrix), lengths(like));
    let columns = matrix.columns;
    let numbers = matrix.numbers.iter().enumerate();
    let numbers = numbers.map(|(i, x)| x / (have[i % columns] + 1e-5) * want[i % columns]);
    Matrix { numbers: numbers.collect(), columns }
}

/// a, b, c of each of Muon's steps.
pub(crate) const JORDAN_STEPS: [[f64; 3]; 5] = [[3.4445, -4.7750, 2.0315]; 5];
const LACT_STEPS: [[f64; 3]; 5] = [
    [4.0848, -6.8946, 2.9270],
    [3.9505, -6.3029, 2.6377],
    [3.7418, -5.5913, 2.3037],
    [2.8769, -3.1427, 1.2046],
    [2.8366, -3.0525, 1.2012],
];

/// The steps towards the nearest orthogonal matrix.
pub(crate) fn orthogonal(matrix: &Matrix, steps: [[f64; 3]; 5]) -> Matrix {
    let size = matrix.numbers.iter().map(|x| x * x).sum::<f64>().sqrt() + 1e-7;
    let mut x = matrix.mixed(1.0 / size, 0.0, matrix);
    let wide = x.rows() <= x.columns;
    if !wide {
        x = x.transposed();
    }
    for [a, b, c] in steps {
        let square = x.product(&x.transposed());
        let factor = square.mixed(b, c, &square.product(&square));
        x = x.mixed(a, 1.0, &factor.product(&x));
    }
    if wide { x } else { x.transposed() }
}

/// Settings of LaCT that its formula goes by.
struct Lact {
    heads: usize,
    /// Of a head's keys.
    width: usize,
    /// Of the network.
    inner: usize,
    /// Tokens of a chunk.
    chunk: usize,
    window: usize,
    attention_heads: usize,
    muon: bool,
    momentum: bool,
}

impl Lact {
    /// Position t, by rotation.
    fn at(x: &[f64], t: usize) -> Vec<f64> {
        turned(x, t, 500_000.0)
    }

    /// Keys or queries of the attention.
    fn normalized(w: &Weights, x: Vec<f64>, name: &str) -> Vec<f64> {
        match w.0.get(&format!("{name}.gamma")) {
            Some(gamma) => times(&normalized(&x, 1e-5), gamma),
            None => x,
        }
    }

    /// Keys or queries of the network.
    fn moved(&self, w: &Weights, x: &[f64], name: &str, t: usize) -> Vec<f64> {
        let scaled = times(x, w.get(&format!("{name}_scale")));
        let x = each(&plus(&scaled, w.get(&format!("{name}_offset"))), silu);
        by_head(&x, self.heads, |x| Self::at(&unit(x), t))
    }

    /// Attention of the last token through the window.
    fn attended(&self, q: &[f64], keys: &Rows, values: &Rows) -> Vec<f64> {
        let from = keys.len().saturating_sub(self.window);
        let q = by_head(q, self.attention_heads, |x| Self::at(x, keys.len() - 1));
        softmax_attention(&q, &keys[from..], &values[from..], self.attention_heads)
    }

    /// Outputs of all tokens.
    fn outputs(&self, w: &Weights, rows: &[Vec<f64>]) -> Rows {
        let columns = [self.inner, self.width, self.inner];
        let fresh = |h| LactHead::new(of_head(w, h, self.heads, &columns));
        let mut heads: Vec<LactHead> = (0..self.heads).map(fresh).collect();
        let (mut keys, mut values) = (vec![], vec![]);
        let mut output = |(t, x): (usize, &Vec<f64>)| {
            let [q, k, v] = ["q_proj", "k_proj", "v_proj"].map(|name| w.linear(name, x));
            let (q, k) = (Self::normalized(w, q, "q_norm"), Self::normalized(w, k, "k_norm"));
            keys.push(by_head(&k, self.attention_heads, |k| Self::at(k, t)));
            values.push(v.clone());
            let mut o = self.attended(&q, &keys, &values);

            let (q, k) = (self.moved(w, &q, "q", t), self.moved(w, &k, "k", t));
            let v = each(&v, silu);
            let first_rate = 0.1f64.exp_m1().ln();
            let rates = each(&w.linear("lr_proj", x), |z| softplus(z + first_rate));
            let scale = each(&w.linear("scale_proj", x), silu);
            for (h, head) in heads.iter_mut().enumerate() {
                let own = h * self.width..(h + 1) * self.width;
                let read = times(&head.read(&q[own.clone()]), w.get("ttt_norm.norm.gamma"));
                for (o, read) in o[own.clone()].iter_mut().zip(read) {
                    *o += read * scale[h];
                }
                head.learn(&k[own.clone()], &v[own], &rates[h * 3..][..3]);
                if self.momentum {
                    head.carried += sigmoid(w.linear("momentum_proj", x)[h]);
                }
                if t % self.chunk == self.chunk - 1 {
                    head.end_chunk(self);
                }
            }
            w.linear("o_proj", &o)
        };
        rows.iter().enumerate().map(&mut output).collect()
    }
}

/// One head's network in the course of a sequence.
struct LactHead {
    first: Vec<Matrix>,
    weights: Vec<Matrix>,
    /// Of the chunk's gradients.
    sums: Vec<Matrix>,
    /// The change at the last chunk's end, and the share of it that goes on.
    last: Vec<Matrix>,
    carried: f64,
}

impl LactHead {
    fn new(first: Vec<Matrix>) -> Self {
        let (sums, last) = (zeros(&first), zeros(&first));
        Self { weights: first.clone(), first, sums, last, carried: 0.0 }
    }

    /// SwiGLU of `x`.
    fn network(x: &[f64], weights: &[Tensor<B, 2>]) -> Tensor<B, 2> {
        let gate = row(x).matmul(weights[0].clone());
        let open = burn::tensor::activation::silu(gate);
        (open * row(x).matmul(weights[2].clone())).matmul(weights[1].clone())
    }

    fn read(&self, q: &[f64]) -> Vec<f64> {
        let of = |w: &Matrix| tensor(&w.numbers, [w.rows(), w.columns]);
        let tensors: Vec<_> = self.weights.iter().map(of).collect();
        normalized(&download(Self::network(q, &tensors)), 1e-5)
    }

    fn learn(&mut self, k: &[f64], v: &[f64], rates: &[f64]) {
        let loss = |weights: &[Tensor<B, 2>]| (Self::network(k, weights) * row(v)).sum();
        let found = gradients(&self.weights, loss);
        let sums = self.sums.iter().zip(rates).zip(&found);
        self.sums = sums.map(|((sum, rate), found)| sum.mixed(1.0, *rate, found)).collect();
    }

    fn end_chunk(&mut self, lact: &Lact) {
        let mean = self.carried / lact.chunk as f64;
        self.last = mixed(1.0, &self.sums, mean, &self.last);
        let change = match lact.muon {
            true => self.last.iter().map(|x| orthogonal(x, LACT_STEPS)).collect(),
            false => self.last.clone(),
        };
        let next = mixed(1.0, &self.weights, 1.0, &change);
        self.weights = next.iter().zip(&self.first).map(|(m, w)| resized(m, w)).collect();
        self.sums = zeros(&self.sums);
        self.carried = 0.0;
        if !lact.momentum {
            self.last = zeros(&self.last);
        }
    }
}

#[test]
fn lact_goes_on_once_a_chunk_and_keeps_the_lengths_of_its_columns() {
    let _alone = alone();
    for (text, muon, momentum) in [
        (
            "lact = { heads = 2, attention_heads = 3, expand = 2, mini_batch = 8, window = 5, base_lr = 0.1 }",
            false,
            true,
        ),
        (
            "lact = { heads = 2, mini_batch = 8, window = 5, base_lr = 0.1, muon = true, momentum = false, qk_norm = false }",
            true,
            false,
        ),
    ] {
        let (inner, attention_heads) = if muon { (12, 1) } else { (24, 3) };
        let (heads, width, chunk, window) = (2, 12, 8, 5);
        let lact = Lact { heads, width, inner, chunk, window, attention_heads, muon, momentum };
        let mixer = mixer(text).map(&mut Noisy::new());
        hold(text, &mixer, |w, rows| lact.outputs(w, rows));
    }
}

/// Numbers i and i + K / 2 turned by `t theta^{-2 i / K}`.
fn turned(x: &[f64], t: usize, theta: f64) -> Vec<f64> {
    let half = x.len() / 2;
    let mut y = vec![0.0; x.len()];
    for i in 0..half {
        let (sin, cos) = (t as f64 * theta.powf(-(i as f64) / half as f64)).sin_cos();
        y[i] = x[i] * cos - x[i + half] * sin;
        y[i + half] = x[i] * sin + x[i + half] * cos;
    }
    y
}

/// The backward pass goes through inner gradients: it is the slope that two evaluations nearby show.
#[test]
fn outer_gradients_go_through_inner_ones() {
    let _alone = alone();
    struct Moved<'a>(&'a mut dyn FnMut(usize) -> Vec<f64>);
    impl ModuleMapper<B> for Moved<'_> {
        fn map_float<const R: usize>(&mut self, param: Param<Tensor<B, R>>) -> Param<Tensor<B, R>> {
            param.map(|weight| {
                let shape = weight.dims();
                let step = (self.0)(shape.iter().product());
                (weight + tensor(&step, shape)).detach().require_grad()
            })
        }
    }
    struct Along<'a>(burn::optim::GradientsParams, &'a mut dyn FnMut(usize) -> Vec<f64>, f64);
    impl burn::module::ModuleVisitor<B> for Along<'_> {
        fn visit_float<const R: usize>(&mut self, param: &Param<Tensor<B, R>>) {
            let gradient = self.0.get::<burn::backend::Flex, R>(param.id).unwrap();
            let step = (self.1)(gradient.shape().num_elements());
            self.2 += times(&download(gradient), &step).iter().sum::<f64>();
        }
    }
    for text in [
        "ttt = { heads = 2, mini_batch = 4, conv_size = 3, output_gate = true }",
        "ttt = { heads = 2, inner = 'mlp', mini_batch = 4 }",
        "titans = { heads = 2, mini_batch = 4, base_lr = 0.5 }",
        "titans = { heads = 2, inner = 'mlp', mini_batch = 4, base_lr = 0.5 }",
        "atlas = { heads = 2, key_width = 3, window = 3, mini_batch = 4, base_lr = 0.5 }",
        "atlas = { heads = 2, inner = 'mlp', key_width = 3, window = 3, mini_batch = 4, momentum = false }",
        "atlas = { heads = 2, window = 3, mini_batch = 4, base_lr = 0.5, muon = false }",
        "atlas = { heads = 2, inner = 'mlp', key_width = 3, window = 6, mini_batch = 4, muon = false, momentum = false }",
        "lact = { heads = 2, mini_batch = 4, window = 3, base_lr = 0.1 }",
        "lact = { heads = 2, mini_batch = 4, window = 3, base_lr = 0.1, muon = true }",
    ] {
        let (mixer, x, weights) = (mixer(text).map(&mut Noisy::new()), input(14), input(14));
        // The same direction each time, of numbers without a pattern.
        let direction = |size: f64| {
            let mut n = 0u64;
            move |count: usize| -> Vec<f64> {
                let mut next = || {
                    n += 1;
                    ((n as f64 * 12.9898).sin() * 43_758.545_3).rem_euclid(1.0) - 0.5
                };
                (0..count).map(|_| next() * size).collect()
            }
        };
        let loss = |mixer: &linattn::nn::mixers::Mixer<B>| {
            (mixer.forward(x.clone(), None).0 * weights.clone()).sum()
        };
        let found = loss(&mixer).backward();
        let found = burn::optim::GradientsParams::from_grads(found, &mixer);
        let mut step = direction(1.0);
        let mut along = Along(found, &mut step, 0.0);
        mixer.visit(&mut along);
        let slope = |near: f64| {
            let [above, below] = [near, -near].map(|size| {
                let mut step = direction(size);
                download(loss(&mixer.clone().map(&mut Moved(&mut step))))[0]
            });
            (above - below) / (2.0 * near)
        };
        // Richardson's extrapolation: what is left of a slope's error is of the fourth order.
        let slope = (4.0 * slope(5e-6) - slope(1e-5)) / 3.0;
        assert_close(text, &[along.2], &[slope], 1e-5);
    }
}
