//! TTT-Linear against an f64 loop that forms every token's weights, and gradients against differences of it.

use super::*;
use linattn_oracle::{Rng, assert_close};

const EPSILON: f64 = 1e-6;
/// B, mini-batches, H, K and b.
const SIZES: [[usize; 5]; 5] =
    [[1, 1, 1, 4, 3], [2, 3, 2, 8, 4], [1, 2, 3, 30, 5], [2, 1, 1, 2, 1], [1, 2, 2, 64, 16]];
/// Of each tensor of a large case, numbers whose gradients are checked.
const CHECKED: usize = 10;
/// Names of the inputs, in the order of [`Case::inputs`].
const NAMES: [&str; 8] = ["q", "k", "v", "rate", "t", "gamma", "beta", "W"];

type Eight = [Vec<f64>; 8];

struct Case {
    dims: Dims,
    inputs: Eight,
    d_y: Option<Vec<f64>>,
    d_weights: Option<Vec<f64>>,
}

impl Case {
    fn new([batch, batches, heads, width, rows]: [usize; 5], given: [bool; 2]) -> Self {
        let mut rng = Rng::named((width * rows + batches) as u64, "TTT-Linear");
        let mut draw = |n: usize, mean: f32, size: f32| -> Vec<f64> {
            (0..n).map(|_| f64::from(mean + size * rng.normal() as f32)).collect()
        };
        let dims = Dims { batch, tokens: batches * rows, heads, width, rows };
        let positive = |x: Vec<f64>| x.into_iter().map(f64::abs).collect();
        let rates = batch * dims.tokens * heads;
        let inputs = [
            draw(dims.numbers(), 0.0, 1.0),
            draw(dims.numbers(), 0.0, 1.0),
            draw(dims.numbers(), 0.0, 1.0),
            positive(draw(rates, 0.0, 0.5 / width as f32)),
            positive(draw(rows, 0.0, 0.5)),
            draw(heads * width, 1.0, 0.2),
            draw(heads * width, 0.0, 0.2),
            draw(dims.weights(), 0.0, 0.5),
        ];
        let [d_y, d_weights] = [dims.numbers(), dims.weights()].map(|n| draw(n, 0.0, 1.0));
        let [with_y, with_weights] = given;
        let (d_y, d_weights) = (with_y.then_some(d_y), with_weights.then_some(d_weights));
        Self { dims, inputs, d_y, d_weights }
    }

    /// y, and W over c after the last token.
    fn run(&self, [q, k, v, rate, scale, gamma, beta, weights]: &Eight) -> [Vec<f64>; 2] {
        let Dims { batch, tokens, heads, width, rows } = self.dims;
        let mut y = vec![0.0; q.len()];
        let mut last = vec![];
        for (sequence, head) in (0..batch).flat_map(|b| (0..heads).map(move |h| (b, h))) {
            let size = (width + 1) * width;
            let mut now = weights[(sequence * heads + head) * size..][..size].to_vec();
            let mut start = now.clone();
            let mut sum = vec![0.0; size];
            let of_head = |x: &[f64]| x[head * width..][..width].to_vec();
            let (gamma, beta) = (of_head(gamma), of_head(beta));
            for t in 0..tokens {
                let row = (sequence * tokens + t) * heads + head;
                let part = |x: &[f64]| x[row * width..][..width].to_vec();
                let (q, k, v) = (part(q), part(k), part(v));
                if t % rows == 0 {
                    (start, sum) = (now, vec![0.0; size]);
                }
                let slope = slope(&applied(&start, &k), &gamma, |j| v[j] - k[j] - beta[j]);
                for (from, x) in k.iter().copied().chain([1.0]).enumerate() {
                    for (to, slope) in slope.iter().enumerate() {
                        sum[from * width + to] += rate[row] * x * slope;
                    }
                }
                let by = scale[t % rows];
                now = start.iter().zip(&sum).map(|(w, sum)| w - by * sum).collect();
                let o = applied(&now, &q);
                let size = root_mean_square(&o);
                for j in 0..width {
                    y[row * width + j] = q[j] + gamma[j] * o[j] / size + beta[j];
                }
            }
            last.extend(now);
        }
        [y, last]
    }

    /// The number whose gradients the kernel is to find.
    fn loss(&self, inputs: &Eight) -> f64 {
        let dot = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(x, y)| x * y).sum::<f64>();
        let [y, last] = self.run(inputs);
        let with = |d: &Option<Vec<f64>>, x: &[f64]| d.as_ref().map_or(0.0, |d| dot(d, x));
        with(&self.d_y, &y) + with(&self.d_weights, &last)
    }

    /// The gradient of one number.
    fn difference(&self, tensor: usize, place: usize) -> f64 {
        let near = if NAMES[tensor] == "rate" { 1e-4 / self.dims.width as f64 } else { 1e-4 };
        difference(near, |step| {
            let mut inputs = self.inputs.clone();
            inputs[tensor][place] += step;
            self.loss(&inputs)
        })
    }
}

/// The slope of a loss at 0, from four numbers around it: the error that is left is of the fourth order.
pub(in crate::fused) fn difference(near: f64, loss: impl Fn(f64) -> f64) -> f64 {
    let slope = |near: f64| (loss(near) - loss(-near)) / (2.0 * near);
    (4.0 * slope(near) - slope(2.0 * near)) / 3.0
}

/// `[x, 1]` times W over c.
pub(in crate::fused) fn applied(weights: &[f64], x: &[f64]) -> Vec<f64> {
    let width = weights.len() / (x.len() + 1);
    let rows = x.iter().copied().chain([1.0]).zip(weights.chunks(width));
    rows.fold(vec![0.0; width], |sum, (x, row)| {
        sum.iter().zip(row).map(|(sum, w)| sum + x * w).collect()
    })
}

pub(in crate::fused) fn root_mean_square(x: &[f64]) -> f64 {
    (x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64 + EPSILON).sqrt()
}

/// The inner loss's gradient by Z.
pub(in crate::fused) fn slope(z: &[f64], gamma: &[f64], target: impl Fn(usize) -> f64) -> Vec<f64> {
    let size = root_mean_square(z);
    let x: Vec<f64> = z.iter().map(|z| z / size).collect();
    let h: Vec<f64> = (0..z.len()).map(|j| gamma[j] * (gamma[j] * x[j] - target(j))).collect();
    let mean = |x: &mut dyn Iterator<Item = f64>| x.sum::<f64>() / z.len() as f64;
    let (of_h, along) =
        (mean(&mut h.iter().copied()), mean(&mut h.iter().zip(&x).map(|(h, x)| h * x)));
    h.iter().zip(&x).map(|(h, x)| (h - of_h - x * along) / size).collect()
}

pub(in crate::fused) fn numbers<R: Runtime>(
    client: &ComputeClient<R>,
    buffer: &Buffer,
) -> Vec<f64> {
    let bytes = client.read_one(buffer.handle.clone()).expect("the kernel ran");
    let four = |b: &[u8]| f64::from(f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
    bytes.chunks_exact(4).map(four).collect()
}

/// Sums over sequences, `[B, numbers]`.
pub(in crate::fused) fn summed(parts: Vec<f64>, numbers: usize) -> Vec<f64> {
    let mut sums = vec![0.0; numbers];
    for part in parts.chunks_exact(numbers) {
        sums.iter_mut().zip(part).for_each(|(sum, x)| *sum += x);
    }
    sums
}

fn is_right<R: Runtime>(client: &ComputeClient<R>, sizes: [usize; 5], given: [bool; 2]) {
    let case = Case::new(sizes, given);
    let put = |x: &Vec<f64>| {
        let bytes: Vec<u8> = x.iter().flat_map(|&x| (x as f32).to_le_bytes()).collect();
        client.create_from_slice(&bytes)
    };
    let handles = case.inputs.each_ref().map(put);
    let [q, k, v, rate, scale, norm_weight, norm_bias, weights] = &handles;
    let x = Inputs { q, k, v, rate, scale, norm_weight, norm_bias, weights, epsilon: EPSILON };
    let kept = forward(client, case.dims, &x, true).expect("it fits");
    let what = |name: &str| format!("{name} of {sizes:?}, {given:?}");
    let [y, last] = case.run(&case.inputs);
    assert_close(&what("y"), &y, &numbers(client, &kept.y), 2e-6);
    assert_close(&what("the last W"), &last, &numbers(client, &kept.weights), 2e-6);
    if sizes == SIZES[0] {
        let alone = forward(client, case.dims, &x, false).expect("it fits");
        assert!(alone.starts.is_none());
        assert_eq!(numbers(client, &alone.y), numbers(client, &kept.y));
        assert_eq!(numbers(client, &alone.weights), numbers(client, &kept.weights));
    }

    let starts = &kept.starts.as_ref().expect("they were asked for").handle;
    let [d_y, d_weights] = [&case.d_y, &case.d_weights].map(|d| d.as_ref().map(put));
    let given = Given { starts, d_y: d_y.as_ref(), d_weights: d_weights.as_ref() };
    let found = backward(client, case.dims, &x, given).expect("it fits");
    let Gradients { q, k, v, rate, scale, norm_weight, norm_bias, weights } = &found;
    let all = [q, k, v, rate, scale, norm_weight, norm_bias, weights];
    for (tensor, (name, buffer)) in NAMES.into_iter().zip(all).enumerate() {
        let wanted = case.inputs[tensor].len();
        let got = summed(numbers(client, buffer), wanted);
        let size = got.iter().map(|x| x * x).sum::<f64>().sqrt() / (wanted as f64).sqrt();
        let all_few = case.dims.numbers() <= 256;
        let step = if all_few { 1 } else { (wanted / CHECKED).max(1) | 1 };
        for place in (0..wanted).step_by(step) {
            let (want, got) = (case.difference(tensor, place), got[place]);
            let error = (want - got).abs();
            assert!(error <= 2e-5 * size, "{}, {place}: {got}, not {want}", what(name));
        }
    }
}

fn are_right<R: Runtime>(client: &ComputeClient<R>) {
    for sizes in SIZES {
        is_right(client, sizes, [true, true]);
    }
    for given in [[true, false], [false, true]] {
        is_right(client, SIZES[0], given);
    }
}

#[test]
fn mini_batches_and_their_gradients_are_right() {
    crate::tests::on_wgpu::with_client(are_right);
}

#[cfg(feature = "cuda")]
#[test]
fn mini_batches_and_their_gradients_are_right_on_cuda() {
    crate::tests::on_cuda::with_client(|client| {
        are_right(client);
        // More shared memory than other devices have.
        is_right(client, [1, 2, 2, 128, 16], [true, true]);
        is_right(client, [1, 2, 1, 64, 32], [true, true]);
    });
}

#[test]
fn mini_batches_that_do_not_fit_are_refused() {
    crate::tests::on_wgpu::with_client(|client| {
        let good = Dims { batch: 1, tokens: 8, heads: 2, width: 8, rows: 4 };
        let why = |dims| check(client, dims).expect_err("refused").to_string();
        assert_eq!(check(client, good), Ok(()));
        assert!(matches!(check(client, Dims { tokens: 0, ..good }), Err(Refusal::Empty { .. })));
        assert!(matches!(check(client, Dims { tokens: 9, ..good }), Err(Refusal::Lengths { .. })));
        assert!(why(Dims { width: 129, ..good }).contains("channels of a head"));
        assert!(why(Dims { tokens: 1 << 28, ..good }).contains("numbers in a tensor"));
        let far = Dims { tokens: 1 << 12, rows: 1 << 12, ..good };
        assert!(matches!(check(client, far), Err(Refusal::Device { .. })));
    });
}
