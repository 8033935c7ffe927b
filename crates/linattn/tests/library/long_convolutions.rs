//! Convolutions as long as the sequence: the operation, and the layers that are made of it, against sums over all
//! earlier tokens.

use crate::call::{download, upload};
use crate::formulas::{Noisy, Rows, TOKENS, check, each, gated, hold, product, quotient, times};
use crate::layers::{B, D, Weights, input, mixer};
use crate::support::alone;
#[cfg(feature = "wgpu")]
use burn::backend::{Autodiff, Wgpu};
use burn::module::Module;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{DType, Tensor};
#[cfg(feature = "wgpu")]
use linattn::ops::backend::LongConvolution;
use linattn::ops::{self, LinearAttentionBackend};
use linattn_oracle::{Rng, assert_close};
use std::f64::consts::PI;

/// Numbers on a device, in a type.
struct Place<'a, B: Backend> {
    device: &'a B::Device,
    dtype: DType,
}

impl<B: Backend> Place<'_, B> {
    fn noise<const R: usize>(&self, seed: u64, shape: [usize; R]) -> (Vec<f64>, Tensor<B, R>) {
        let mut rng = Rng::named(seed, "long convolution");
        let values: Vec<f64> = (0..shape.iter().product()).map(|_| rng.normal()).collect();
        let tensor = upload(&values, shape, self.dtype, self.device);
        (values, tensor)
    }
}

fn sums_and_gradients_are_right<B>(place: &Place<'_, B>, limit: f64)
where
    B: AutodiffBackend + LinearAttentionBackend,
{
    let _alone = alone();
    let (batch, channels) = (2, 3);
    for (past, tokens, length) in [
        (0, 1, 1),
        (0, 7, 9),
        (5, 1, 6),
        (5, 4, 3),
        (0, 128, 128),
        (0, 300, 300),
        (170, 131, 301),
        (300, 2, 302),
        (131, 200, 50),
    ] {
        let seen = past + tokens;
        let (all, x) = place.noise(1, [batch, seen, channels]);
        let (taps, h) = place.noise(2, [length, channels]);
        let (weights, dy) = place.noise(3, [batch, tokens, channels]);
        let (x, h) = (x.require_grad(), h.require_grad());
        let before = (past > 0).then(|| x.clone().narrow(1, 0, past));
        let y =
            ops::long_convolution(x.clone().narrow(1, past, tokens), h.clone(), before).unwrap();
        let gradients = (y.clone() * dy).sum().backward();

        let at = |b: usize, t: usize, c: usize| (b * seen + t) * channels + c;
        let mut want = vec![0.0; batch * tokens * channels];
        let (mut dx, mut dh) = (vec![0.0; all.len()], vec![0.0; taps.len()]);
        for b in 0..batch {
            for t in past..seen {
                for c in 0..channels {
                    let out = (b * tokens + t - past) * channels + c;
                    for s in (0..=t).filter(|s| t - s < length) {
                        let tap = (t - s) * channels + c;
                        want[out] += taps[tap] * all[at(b, s, c)];
                        dx[at(b, s, c)] += taps[tap] * weights[out];
                        dh[tap] += all[at(b, s, c)] * weights[out];
                    }
                }
            }
        }
        let what = format!("{tokens} tokens behind {past}, {length} taps");
        assert_close(&what, &want, &download(y), limit);
        assert_close(&what, &dx, &download(x.grad(&gradients).unwrap()), limit);
        assert_close(&what, &dh, &download(h.grad(&gradients).unwrap()), limit);
    }
}

#[test]
fn a_long_convolution_is_the_sum_it_says_and_so_are_its_gradients() {
    let place = Place::<B> { device: &Default::default(), dtype: DType::F64 };
    sums_and_gradients_are_right(&place, 1e-12);
}

#[cfg(feature = "wgpu")]
#[test]
fn a_long_convolution_on_a_gpu_is_the_sum_it_says_and_so_are_its_gradients() {
    let Some(device) = crate::support::wgpu() else { return };
    let place = Place::<Autodiff<Wgpu>> { device: &device, dtype: DType::F32 };
    let x: Tensor<Wgpu, 3> = upload(&[0.5; 8], [1, 4, 2], DType::F32, &device);
    let taps: Tensor<Wgpu, 2> = upload(&[0.5; 6], [3, 2], DType::F32, &device);
    let given =
        LongConvolution { x: x.into_primitive().tensor(), taps: taps.into_primitive().tensor() };
    let taken = <Wgpu as LinearAttentionBackend>::fused_long_convolution(given, false).is_some();
    assert!(taken || cfg!(feature = "fusion"), "the kernels take this");
    sums_and_gradients_are_right(&place, 2e-6);
}

#[test]
fn tensors_that_do_not_fit_a_long_convolution_are_named() {
    let place = Place::<B> { device: &Default::default(), dtype: DType::F64 };
    let x = |shape: [usize; 3]| place.noise(4, shape).1;
    let taps = |shape: [usize; 2]| place.noise(5, shape).1;
    let said = |x, taps, past| ops::long_convolution::<B>(x, taps, past).unwrap_err().to_string();
    let error = said(x([2, 5, 3]), taps([5, 4]), None);
    assert!(error.contains("`taps`") && error.contains("[5, 3]"), "{error}");
    let error = said(x([2, 5, 3]), taps([5, 3]), Some(x([1, 2, 3])));
    assert!(error.contains("`past`") && error.contains("[2, 2, 3]"), "{error}");
    let error = said(x([2, 5, 3]), taps([0, 3]), None);
    assert!(error.contains("`taps`"), "{error}");
}

/// Features of a lag, shares of `length`.
fn features(lag: usize, length: usize) -> [f64; 3] {
    let angle = 1e-4 * 2.0 * PI * lag as f64 / length as f64;
    [lag as f64 / (length - 1) as f64, angle.cos(), -angle.sin()]
}

/// Hyena's taps of a lag. Learnt features change no decay.
fn taps(w: &Weights, lag: usize, depth: usize, length: usize, channels: usize) -> Vec<f64> {
    let z = features(lag, length);
    let frequency = w.get("filter.frequency");
    let mut x = match w.has("filter.lags") {
        true => w.get("filter.lags")[3 * lag..][..3].to_vec(),
        false => z.to_vec(),
    };
    for layer in 0..=depth {
        let y = w.linear(&format!("filter.inner.{layer}"), &x);
        x = times(&y, frequency).iter().map(|x| x.sin()).collect();
    }
    let (slow, fast) = (0.01f64.ln().abs() / 1.5, 0.01f64.ln().abs() / 0.3);
    let decay = |c: usize| {
        let share = c as f64 / (channels.max(2) - 1) as f64;
        (-(slow + (fast - slow) * share) * z[0]).exp()
    };
    w.linear("filter.last", &x).iter().enumerate().map(|(c, h)| h * decay(c)).collect()
}

#[test]
fn hyena_convolves_between_two_gates() {
    for (text, inner, repeats, length) in [
        ("hyena = { filter_order = 8, filter_frequency = 3.0, length = 50 }", D, 1, 50),
        ("hyena = { filter_order = 8, length = 50, learn_lags = true }", D, 1, 50),
        (
            "hyena = { expand = 2, projection_groups = 3, conv_size = 4, filter_order = 4, filter_depth = 1, length = 64 }",
            2 * D,
            3,
            64,
        ),
    ] {
        let depth = if repeats == 1 { 2 } else { 1 };
        hold(text, &mixer(text).map(&mut Noisy::new()), |w, rows| {
            let filter: Rows = (0..TOKENS).map(|lag| taps(w, lag, depth, length, inner)).collect();
            let projected: Rows =
                rows.iter().map(|x| w.linear("in_proj", x).repeat(repeats)).collect();
            let (mut seen, mut outputs): (Rows, Rows) = (vec![], vec![]);
            for t in 0..TOKENS {
                let all = w.convolution("conv1d", &projected[..=t]);
                let (q, rest) = all.split_at(inner);
                seen.push(times(&rest[..inner], &rest[inner..]));
                let o = |c: usize| {
                    let past: f64 = (0..=t).map(|s| filter[t - s][c] * seen[s][c]).sum();
                    q[c] * (past + w.get("d")[c] * seen[t][c])
                };
                outputs.push(w.linear("out_proj", &(0..inner).map(o).collect::<Vec<_>>()));
            }
            outputs
        });
    }
}

#[test]
fn multihead_hyena_convolves_outer_products() {
    let text = "multihead_hyena = { group_width = 4, filter_order = 6, length = 50 }";
    hold(text, &mixer(text).map(&mut Noisy::new()), |w, rows| {
        let (groups, width) = (D / 4, 4);
        let filter: Rows = (0..TOKENS).map(|lag| taps(w, lag, 2, 50, groups)).collect();
        let projected: Rows = rows.iter().map(|x| w.linear("in_proj", x)).collect();
        let (mut products, mut outputs): (Rows, Rows) = (vec![], vec![]);
        for t in 0..TOKENS {
            let all = w.convolution("conv1d", &projected[..=t]);
            let (q, k, v) = (&all[..D], &all[D..2 * D], &all[2 * D..]);
            // Of each group a matrix, in a row.
            let cell = |i: usize| {
                let (g, a, b) = (i / 16, i / 4 % 4, i % 4);
                k[g * width + a] * v[g * width + b]
            };
            products.push((0..groups * 16).map(cell).collect());
            let memory = |i: usize| {
                let g = i / 16;
                let past: f64 = (0..=t).map(|s| filter[t - s][g] * products[s][i]).sum();
                past + w.get("d")[g] * products[t][i]
            };
            let o = |n: usize| {
                let (g, b) = (n / width, n % width);
                (0..width).map(|a| q[g * width + a] * memory(g * 16 + a * 4 + b)).sum()
            };
            outputs.push(w.linear("out_proj", &(0..D).map(o).collect::<Vec<f64>>()));
        }
        outputs
    });
}

#[test]
fn an_implicit_base_conv_has_taps_from_a_network() {
    check("base_conv = { implicit = true, length = 50 }", |w, rows| {
        let filter: Rows = (0..TOKENS)
            .map(|lag| {
                let hidden = w.linear("filter.0", &features(lag, 50));
                w.linear("filter.1", &each(&hidden, |x| x.max(0.0)))
            })
            .collect();
        let at = |t: usize| {
            let gate = w.linear("projection", &rows[t]);
            let y = |c: usize| {
                let past: f64 = (0..=t).map(|s| filter[t - s][c] * rows[s][c]).sum();
                (past + rows[t][c]) * gate[c] + rows[t][c]
            };
            (0..D).map(y).collect()
        };
        (0..TOKENS).map(at).collect()
    });
}

/// Steps and inputs of modes by the trapezoidal rule.
fn bilinear(dt: f64, a: [f64; 2]) -> ([f64; 2], [f64; 2]) {
    let below = [1.0 - dt * a[0] / 2.0, -dt * a[1] / 2.0];
    let above = [1.0 + dt * a[0] / 2.0, dt * a[1] / 2.0];
    (quotient(above, below), quotient([dt, 0.0], below))
}

#[test]
fn h3_shifts_keys_and_remembers_outer_products() {
    let plain = "h3 = { head_width = 2, d_state = 6, dt_min = 0.05, dt_max = 0.5 }";
    let learnt = plain.replace(" }", ", learn_inputs = true }");
    for text in [plain, &learnt] {
        hold(text, &mixer(text).map(&mut Noisy::new()), h3_by_token);
    }
}

fn h3_by_token(w: &Weights, rows: &[Vec<f64>]) -> Rows {
    let (heads, modes) = (D / 2, 3);
    let [q, k, v] = ["q_proj", "k_proj", "v_proj"]
        .map(|name| rows.iter().map(|x| w.linear(name, x)).collect::<Rows>());
    // Of each head 2 x 2 products, of each as many modes.
    let mut memory = vec![[0f64; 2]; heads * 4 * modes];
    let mut outputs = vec![];
    for t in 0..TOKENS {
        // shift_l = sum_n e_n s_{n+l}, e the first unit vector where it is not learnt; the last tap is s_0.
        let taps = w.get("shift.weight");
        let input = |n: usize, c: usize| match w.has("shift_input") {
            true => w.get("shift_input")[n * D + c],
            false => f64::from(u8::from(n == 0)),
        };
        let shift = |l: usize, c: usize| -> f64 {
            (0..6 - l).map(|n| input(n, c) * taps[(5 - n - l) * D + c]).sum()
        };
        let shifted =
            |c: usize| -> f64 { (0..6.min(t + 1)).map(|l| shift(l, c) * k[t - l][c]).sum() };
        let shifted: Vec<f64> = (0..D).map(shifted).collect();
        let own = times(&k[t], w.get("shift_d"));
        let key: Vec<f64> = shifted.iter().zip(&own).map(|(a, b)| a + b).collect();
        let mut o = vec![0.0; D];
        for cell in 0..heads * 4 {
            let (head, a, b) = (cell / 4, cell / 2 % 2, cell % 2);
            let written = key[head * 2 + a] * v[t][head * 2 + b];
            let mut y = w.get("ssm.d")[head] * written;
            for n in 0..modes {
                let place = head * modes + n;
                let pole = [-w.get("ssm.log_a_real")[place].exp(), w.get("ssm.a_imag")[place]];
                let (step, mut drive) = bilinear(w.get("ssm.log_dt")[head].exp(), pole);
                if w.has("ssm.b") {
                    let b = [0, heads * modes].map(|part| w.get("ssm.b")[part + place]);
                    drive = product(drive, b);
                }
                let h = &mut memory[cell * modes + n];
                let kept = product(step, *h);
                *h = [kept[0] + drive[0] * written, kept[1] + drive[1] * written];
                let c = [w.get("ssm.c")[place], w.get("ssm.c")[heads * modes + place]];
                y += 2.0 * product(c, *h)[0];
            }
            o[head * 2 + b] += q[t][head * 2 + a] * y;
        }
        outputs.push(w.linear("out_proj", &o));
    }
    outputs
}

/// `x` with `a x = y`, complex, by elimination; a is far from singular.
fn solve(mut a: Vec<Vec<[f64; 2]>>, mut y: Vec<[f64; 2]>) -> Vec<[f64; 2]> {
    let minus = |x: [f64; 2], y: [f64; 2]| [x[0] - y[0], x[1] - y[1]];
    for column in 0..y.len() {
        for row in (0..y.len()).filter(|row| *row != column) {
            let factor = quotient(a[row][column], a[column][column]);
            let above = a[column].clone();
            for (x, above) in a[row].iter_mut().zip(above) {
                *x = minus(*x, product(factor, above));
            }
            y[row] = minus(y[row], product(factor, y[column]));
        }
    }
    (0..y.len()).map(|i| quotient(y[i], a[i][i])).collect()
}

#[test]
fn s4_has_a_diagonal_less_a_product_over_modes_and_conjugates() {
    check("s4 = { d_state = 6, dt_min = 0.05, dt_max = 0.5 }", |w, rows| {
        let modes = 3;
        let mut outputs = vec![vec![0.0; D]; TOKENS];
        for channel in 0..D {
            let dt = w.get("log_dt")[channel].exp();
            // All N modes, conjugates behind.
            let all = |name: &str| -> Vec<[f64; 2]> {
                let parts = &w.get(name)[channel * 2 * modes..][..2 * modes];
                let sign = |i: usize| if i < modes { 1.0 } else { -1.0 };
                (0..2 * modes)
                    .map(|i| [parts[i % modes], sign(i) * parts[modes + i % modes]])
                    .collect()
            };
            let (p, b, c) = (all("p"), all("b"), all("c"));
            let pole = |i: usize| {
                let place = channel * modes + i % modes;
                let frequency = w.get("a_imag")[place];
                [-w.get("log_a_real")[place].exp(), if i < modes { frequency } else { -frequency }]
            };
            // 1 + factor A
            let matrix = |factor: f64| -> Vec<Vec<[f64; 2]>> {
                let entry = |i: usize, j: usize| {
                    let low = product(p[i], [p[j][0], -p[j][1]]);
                    let (diagonal, one) = if i == j { (pole(i), 1.0) } else { ([0.0; 2], 0.0) };
                    [one + factor * (diagonal[0] - low[0]), factor * (diagonal[1] - low[1])]
                };
                (0..2 * modes).map(|i| (0..2 * modes).map(|j| entry(i, j)).collect()).collect()
            };
            let (ahead, behind) = (matrix(dt / 2.0), matrix(-dt / 2.0));
            let mut h = vec![[0f64; 2]; 2 * modes];
            for (t, x) in rows.iter().enumerate() {
                let right = (0..2 * modes).map(|i| {
                    let kept = ahead[i].iter().zip(&h).map(|(a, h)| product(*a, *h));
                    let kept = kept.fold([0.0; 2], |a, b| [a[0] + b[0], a[1] + b[1]]);
                    [kept[0] + dt * b[i][0] * x[channel], kept[1] + dt * b[i][1] * x[channel]]
                });
                h = solve(behind.clone(), right.collect());
                let read: f64 = c.iter().zip(&h).map(|(c, h)| product(*c, *h)[0]).sum();
                outputs[t][channel] = read + w.get("d")[channel] * x[channel];
            }
        }
        outputs.iter().map(|u| gated(w, u)).collect()
    });
}

/// Cuts within blocks and between them.
#[test]
fn one_long_sequence_and_its_parts_meet_in_blocks() {
    for text in [
        "hyena = {}",
        "multihead_hyena = { group_width = 8 }",
        "base_conv = { implicit = true }",
        "h3 = { head_width = 2, d_state = 6 }",
        "s4 = { d_state = 6 }",
        "s4d = { d_state = 6 }",
    ] {
        let (mixer, x) = (mixer(text), input(300));
        let want = download(mixer.forward(x.clone(), None).0);
        let (mut outputs, mut state) = (vec![], None);
        for (from, size) in [(0, 129), (129, 1), (130, 140), (270, 30)] {
            let (y, next) = mixer.forward(x.clone().narrow(1, from, size), state);
            outputs.push(y);
            state = Some(next);
        }
        assert_close(text, &want, &download(Tensor::cat(outputs, 1)), 1e-10);
    }
}
