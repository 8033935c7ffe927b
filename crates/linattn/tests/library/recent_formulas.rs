//! Recent mixers are what their papers say: loops over tokens in double precision, written from the formulas, as in
//! formulas.rs.

use crate::call::download;
use crate::formulas::{
    Noisy, Rows, dot, each, hold, normalized, remember, sigmoid, silu, softplus, times, unit,
    weighed,
};
use crate::layers::{B, Weights, input, mixer};
use crate::support::{alone, normal_by};
use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{Distribution, Tensor, backend::Backend};
use linattn_oracle::assert_close;
use std::f64::consts::PI;

/// Biases and factors of rows, which are all alike in a fresh layer.
struct Uneven;

impl<B: Backend> ModuleMapper<B> for Uneven {
    fn map_float<const R: usize>(&mut self, param: Param<Tensor<B, R>>) -> Param<Tensor<B, R>> {
        let noise = |weight: Tensor<B, R>| weight.random_like(Distribution::Normal(0.0, 0.3));
        let uneven = |weight: Tensor<B, R>| (weight.clone() + noise(weight)).detach();
        if R == 3 { param.map(|weight| uneven(weight).require_grad()) } else { param }
    }
}

/// Channels i and i + K / 2 turned by an angle for each of the first pairs.
fn turned(x: &[f64], angles: &[f64]) -> Vec<f64> {
    let (half, mut y) = (x.len() / 2, x.to_vec());
    for (i, angle) in angles.iter().enumerate() {
        let (sin, cos) = angle.sin_cos();
        y[i] = x[i] * cos - x[i + half] * sin;
        y[i + half] = x[i] * sin + x[i + half] * cos;
    }
    y
}

#[test]
fn mamba3_writes_a_token_twice_and_turns_as_it_decays() {
    const H: usize = 3;
    const G: usize = 3;
    const K: usize = 8;
    const V: usize = 16;
    const S: usize = 2;
    for (rank, norm) in [(1, false), (3, false), (2, true)] {
        let text = format!(
            "mamba3 = {{ d_state = 8, head_width = 16, groups = 3, mimo_rank = {rank}, output_norm = {norm} }}"
        );
        hold(&text, &mixer(&text).map(&mut Noisy::new()).map(&mut Uneven), |w, rows| {
            let mut angles = [[0f64; S]; H];
            let mut memories = vec![vec![0f64; K * V]; H];
            let mut last: Vec<Vec<(Vec<f64>, Vec<f64>)>> = vec![vec![]; H];
            let token = |x: &Vec<f64>| {
                let mut rest = &w.linear("in_proj", x)[..];
                let mut part = |width: usize| {
                    let (head, tail) = rest.split_at(width);
                    rest = tail;
                    head.to_vec()
                };
                let (z, x) = (part(H * V), part(H * V));
                let (b, c) = (part(rank * G * K), part(rank * G * K));
                let (dt, a, share, turn) = (part(H), part(H), part(H), part(S));
                let mut y = vec![];
                for h in 0..H {
                    let dt = softplus(dt[h] + w.get("dt_bias")[h]);
                    let rate = if a[h] >= 0.0 { 1.0 + a[h] } else { 1.0 / (1.0 - a[h]) };
                    let (keep, now) = ((-rate * dt).exp(), sigmoid(share[h]) * dt);
                    for s in 0..S {
                        angles[h][s] += PI * turn[s].tanh() * dt;
                    }
                    let row = |x: &[f64], r: usize, name: &str| {
                        let x = normalized(&x[(r * G + h) * K..][..K], 1e-5);
                        let gamma = w.get(&format!("{name}_norm.gamma"));
                        let bias = &w.get(&format!("{name}_bias"))[(h * rank + r) * K..];
                        let x: Vec<f64> = (0..K).map(|i| x[i] * gamma[i] + bias[i]).collect();
                        turned(&x, &angles[h])
                    };
                    let factors = |name: &str, r: usize| match rank {
                        1 => vec![1.0; V],
                        _ => w.get(name)[(h * rank + r) * V..][..V].to_vec(),
                    };
                    let (x, z) = (&x[h * V..][..V], &z[h * V..][..V]);
                    let scaled = |x: &[f64], by: Vec<f64>| -> Vec<f64> {
                        (0..V).map(|j| x[j] * by[j]).collect()
                    };
                    let written: Vec<_> = (0..rank)
                        .map(|r| (row(&b, r, "b"), scaled(x, factors("mimo_x", r))))
                        .collect();
                    // The token before, then the decay, then the token itself.
                    let memory = &mut memories[h];
                    for (k, v) in &last[h] {
                        remember(memory, &[1.0; K], &each(k, |k| k * (dt - now)), v, k);
                    }
                    memory.iter_mut().for_each(|cell| *cell *= keep);
                    for (k, v) in &written {
                        remember(memory, &[1.0; K], &each(k, |k| k * now), v, k);
                    }
                    let mut sum = vec![0f64; V];
                    for (r, (_, v)) in written.iter().enumerate() {
                        let q = row(&c, r, "c");
                        let read = |j: usize| {
                            let column: Vec<f64> = (0..K).map(|i| memory[i * V + j]).collect();
                            dot(&q, &column) + w.get("d")[h] * v[j]
                        };
                        let mut o: Vec<f64> = (0..V).map(read).collect();
                        if norm {
                            o = scaled(
                                &normalized(&o, 1e-5),
                                w.get("norm.gamma")[h * V..].to_vec(),
                            );
                        }
                        let gate = each(&scaled(z, factors("mimo_z", r)), silu);
                        let o = scaled(&scaled(&o, gate), factors("mimo_o", r));
                        sum.iter_mut().zip(o).for_each(|(sum, o)| *sum += o);
                    }
                    y.extend(sum);
                    last[h] = written;
                }
                w.linear("out_proj", &y)
            };
            rows.iter().map(token).collect()
        });
    }
}

/// Outputs of three projections with their convolutions at each token.
struct Convolved<'a> {
    w: &'a Weights,
    projected: [Rows; 3],
}

impl<'a> Convolved<'a> {
    fn of(w: &'a Weights, rows: &[Vec<f64>]) -> Self {
        let project = |name: &str| rows.iter().map(|x| w.linear(name, x)).collect();
        Self { w, projected: ["q_proj", "k_proj", "v_proj"].map(project) }
    }

    fn at(&self, t: usize) -> [Vec<f64>; 3] {
        let names = ["q_conv1d", "k_conv1d", "v_conv1d"];
        std::array::from_fn(|i| self.w.convolution(names[i], &self.projected[i][..=t]))
    }
}

/// `x m`, `m` of rows as wide as the result.
fn times_matrix(x: &[f64], m: &[f64]) -> Vec<f64> {
    let width = m.len() / x.len();
    (0..width).map(|j| (0..x.len()).map(|i| x[i] * m[i * width + j]).sum()).collect()
}

/// ln of what a head keeps, of a rate and a step.
fn log_decay(w: &Weights, x: &[f64], head: usize) -> f64 {
    let step = softplus(w.linear("a_proj", x)[head] + w.get("dt_bias")[head]);
    -w.get("a_log")[head].exp() * step
}

#[test]
fn gated_kalmanet_takes_queries_to_the_regression_by_a_share() {
    const K: usize = 12;
    let text = "gated_kalmanet = { heads = 2, conv_size = 3, ridge = 0.05, iterations = 9 }";
    hold(text, &mixer(text).map(&mut Noisy::new()), |w, rows| {
        let convolved = Convolved::of(w, rows);
        let mut keys = [[0f64; K * K]; 2];
        let mut values = [[0f64; K * K]; 2];
        let token = |(t, x): (usize, &Vec<f64>)| {
            let all = convolved.at(t).map(|x| each(&x, silu));
            let mut o = vec![];
            for h in 0..2 {
                let [q, k, v] = all.each_ref().map(|x| x[h * K..][..K].to_vec());
                let (q, k) = (unit(&q), unit(&k));
                let beta = sigmoid(w.linear("b_proj", x)[h]) + 1e-6;
                let alpha = sigmoid(w.linear("alpha_proj", x)[h]);
                let (k, v) = (each(&k, |k| k * beta), each(&v, |v| v * beta));
                let keep = [log_decay(w, x, h).exp(); K];
                remember(&mut keys[h], &keep, &k, &k, &q);
                remember(&mut values[h], &keep, &k, &v, &q);
                let norm = dot(&keys[h], &keys[h]).sqrt();
                let ridge = 0.05 * norm;
                // Chebyshev's iteration for eigenvalues from `ridge` to `ridge + norm`.
                let (step, spread) = (2.0 / (2.0 * ridge + norm), norm / (2.0 * ridge + norm));
                let (mut before, mut found) = (vec![0.0; K], each(&q, |q| step * q));
                let mut weight = 2.0;
                for _ in 0..9 {
                    weight = 1.0 / (1.0 - spread * spread / 4.0 * weight);
                    let image = times_matrix(&found, &keys[h]);
                    let next = (0..K).map(|i| {
                        let rest = image[i] + ridge * found[i] - q[i];
                        weight * (found[i] - step * rest - before[i]) + before[i]
                    });
                    let next = next.collect();
                    before = std::mem::replace(&mut found, next);
                }
                let x: Vec<f64> = (0..K).map(|i| q[i] + alpha * (found[i] - q[i])).collect();
                let read = each(&times_matrix(&x, &values[h]), |o| o / (K as f64).sqrt());
                let gamma = w.get("o_norm.norm.gamma");
                o.extend(times(&normalized(&read, 1e-6), gamma));
            }
            let gate = each(&w.linear("g_proj", x), silu);
            w.linear("o_proj", &times(&o, &gate))
        };
        rows.iter().enumerate().map(token).collect()
    });
}

/// After many iterations the gradient of exact solutions is that of the mixer.
#[test]
fn the_gradient_of_gated_kalmanet_is_that_of_its_solutions() {
    let _alone = alone();
    let mixer = normal_by(1, 0.16, mixer("gated_kalmanet = { heads = 2, iterations = 150 }"));
    let (x, weights, along) = (input(11).require_grad(), input(11), input(11));
    let loss = |x: Tensor<B, 3>| (mixer.forward(x, None).0 * weights.clone()).sum();
    let gradients = loss(x.clone()).backward();
    let gradient = Tensor::<B, 3>::from_inner(x.grad(&gradients).unwrap());
    let slope = download((gradient * along.clone()).sum());
    let at = |step: f64| download(loss(x.clone().detach() + along.clone() * step))[0];
    let slope_of = |near: f64| (at(near) - at(-near)) / (2.0 * near);
    // Richardson's extrapolation: what is left of a slope's error is of the fourth order.
    let found = (4.0 * slope_of(5e-6) - slope_of(1e-5)) / 3.0;
    assert_close("slope", &[found], &slope, 1e-5);
}

#[test]
fn log_linear_attention_adds_memories_up_as_a_counter_carries() {
    const K: usize = 12;
    const LEVELS: usize = 5;
    for delta in [false, true] {
        let text = format!(
            "log_linear_attention = {{ heads = 2, levels = {LEVELS}, delta_rule = {delta}, conv_size = 3 }}"
        );
        hold(&text, &mixer(&text).map(&mut Noisy::new()), |w, rows| {
            let convolved = Convolved::of(w, rows);
            // Of levels 1 to L - 1: a memory, or none.
            let mut levels: [[Option<Vec<f64>>; LEVELS - 1]; 2] = Default::default();
            let token = |(t, x): (usize, &Vec<f64>)| {
                let all = convolved.at(t).map(|x| each(&x, silu));
                let mut o = vec![];
                for h in 0..2 {
                    let [q, k, v] = all.each_ref().map(|x| x[h * K..][..K].to_vec());
                    let (q, k) = if delta { (unit(&q), unit(&k)) } else { (q, k) };
                    let beta = if delta { sigmoid(w.linear("b_proj", x)[h]) } else { 1.0 };
                    let keep = log_decay(w, x, h).exp();
                    for memory in levels[h].iter_mut().flatten() {
                        let met = times_matrix(&k, memory);
                        for (cell, place) in memory.iter_mut().zip(0..) {
                            let erased =
                                if delta { beta * k[place / K] * met[place % K] } else { 0.0 };
                            *cell = keep * (*cell - erased);
                        }
                    }
                    let mut carried = vec![0.0; K * K];
                    remember(&mut carried, &[1.0; K], &each(&k, |k| beta * k), &v, &q);
                    let read = |level: usize, memory: &[f64]| {
                        let place = h * LEVELS + level;
                        let scale = w.get("level_scale")[place];
                        let weight = softplus(scale * w.linear("l_proj", x)[place]);
                        let scale = weight / (K as f64).sqrt();
                        each(&times_matrix(&q, memory), |o| o * scale)
                    };
                    let mut sum = read(0, &carried);
                    for (level, memory) in levels[h].iter().enumerate() {
                        if let Some(memory) = memory {
                            let o = read(level + 1, memory);
                            sum.iter_mut().zip(o).for_each(|(sum, o)| *sum += o);
                        }
                    }
                    // One more token: full levels are carried on to the first that is free, or to the last.
                    for (level, place) in levels[h].iter_mut().enumerate() {
                        if let Some(memory) = place.take() {
                            carried = carried.iter().zip(&memory).map(|(a, b)| a + b).collect();
                            if level + 2 < LEVELS {
                                continue;
                            }
                        }
                        *place = Some(carried);
                        break;
                    }
                    let gamma = w.get("o_norm.norm.gamma");
                    o.extend(times(&normalized(&sum, 1e-5), gamma));
                }
                let gate = each(&w.linear("g_proj", x), silu);
                w.linear("o_proj", &times(&o, &gate))
            };
            rows.iter().enumerate().map(token).collect()
        });
    }
}

#[test]
fn cyfa_turns_slots_by_a_clock() {
    const K: usize = 12;
    const M: usize = 6;
    const TIMES: usize = M - 1;
    let text = "cyfa = { heads = 2, slots = 6, conv_size = 3 }";
    hold(text, &mixer(text).map(&mut Noisy::new()).map(&mut Uneven), |w, rows| {
        let convolved = Convolved::of(w, rows);
        let (mut keys, mut values) = ([[0f64; K * M]; 2], [[0f64; M * K]; 2]);
        let mut clocks = [0f64; 2];
        let size = |pair: usize| (if pair == 0 { 1.0 } else { 2.0 } / TIMES as f64).sqrt();
        let phase = |pair: usize, time: f64| 2.0 * PI * pair as f64 * time / TIMES as f64;
        let token = |(t, x): (usize, &Vec<f64>)| {
            let all = convolved.at(t);
            let mut o = vec![];
            for h in 0..2 {
                let [q, k, v] = all.each_ref().map(|x| x[h * K..][..K].to_vec());
                let q = times(&normalized(&q, 1e-5), w.get("q_norm.gamma"));
                let k = times(&normalized(&k, 1e-5), w.get("k_norm.gamma"));
                clocks[h] += sigmoid(w.linear("d_proj", x)[h]);
                let beta = sigmoid(w.linear("b_proj", x)[h]);
                let angles: Vec<f64> = (0..M / 2).map(|pair| phase(pair, clocks[h])).collect();
                let back = each(&angles, |angle| -angle);
                let first: Vec<f64> =
                    (0..M).map(|i| if i < M / 2 { beta * size(i) } else { 0.0 }).collect();
                let atom = turned(&first, &back);
                let keep = log_decay(w, x, h).exp();
                let scores = remember(&mut keys[h], &[keep; K], &k, &atom, &q);
                let scores = turned(&each(&scores, |s| s / (K as f64).sqrt()), &angles);
                // A row of the table for each relative time.
                let basis = |time: usize, i: usize| {
                    let angle = phase(i % (M / 2), time as f64);
                    size(i % (M / 2)) * if i < M / 2 { angle.cos() } else { angle.sin() }
                };
                let readout = &w.get("readout")[h * TIMES * TIMES..][..TIMES * TIMES];
                let table: Rows = readout
                    .chunks(TIMES)
                    .map(|row| {
                        (0..M).map(|i| (0..TIMES).map(|s| row[s] * basis(s, i)).sum()).collect()
                    })
                    .collect();
                let logits: Vec<f64> = table.iter().map(|row| dot(row, &scores)).collect();
                let shares = turned(&weighed(&logits, &table), &back);
                let read = remember(&mut values[h], &[keep; M], &atom, &v, &shares);
                let read = normalized(&each(&read, |o| o * TIMES as f64), 1e-5);
                o.extend(times(&read, w.get("o_norm.norm.gamma")));
            }
            let gate = w.linear("g_proj.1", &w.linear("g_proj.0", x));
            w.linear("o_proj", &times(&o, &each(&gate, sigmoid)))
        };
        rows.iter().enumerate().map(token).collect()
    });
}
