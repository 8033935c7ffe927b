//! Recent mixers are what their papers say: loops over tokens in double precision, written from the formulas, as in
//! formulas.rs.

use crate::formulas::{Noisy, dot, each, hold, normalized, remember, sigmoid, silu, softplus};
use crate::layers::mixer;
use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{Distribution, Tensor, backend::Backend};
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
        hold(&text, &mixer(&text).map(&mut Noisy).map(&mut Uneven), |w, rows| {
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
