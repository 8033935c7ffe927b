//! TTT-MLP against an f64 loop that forms every token's weights, and gradients against differences of it.

use super::ttt_linear::tests::{applied, difference, numbers, root_mean_square, slope, summed};
use super::*;
use linattn_oracle::{Rng, assert_close};

const EPSILON: f64 = 1e-6;
/// B, mini-batches, H, K, F / K and b: runs that end early, and more rows than a unit has sums of.
const ODD: [usize; 6] = [2, 2, 2, 14, 4, 9];
/// The smallest, for what does not depend on sizes.
const SMALL: [usize; 6] = [1, 2, 1, 2, 2, 1];
/// Of each tensor of a large case, numbers whose gradients are checked.
const CHECKED: usize = 10;
/// Names of the inputs, in the order of [`Case::inputs`].
const NAMES: [&str; 9] = ["q", "k", "v", "rate", "t", "gamma", "beta", "W1", "W2"];

type Nine = [Vec<f64>; 9];

struct Case {
    dims: Dims,
    inputs: Nine,
    d_y: Option<Vec<f64>>,
    d_weights: [Option<Vec<f64>>; 2],
}

impl Case {
    fn new([batch, batches, heads, width, expand, rows]: [usize; 6], given: [bool; 3]) -> Self {
        let mut rng = Rng::named((width * rows + batches) as u64, "TTT-MLP");
        let mut draw = |n: usize, mean: f32, size: f32| -> Vec<f64> {
            (0..n).map(|_| f64::from(mean + size * rng.normal() as f32)).collect()
        };
        let tokens = batches * rows;
        let dims = Dims { rows: ttt_linear::Dims { batch, tokens, heads, width, rows }, expand };
        let hidden = dims.hidden();
        let positive = |x: Vec<f64>| x.into_iter().map(f64::abs).collect();
        let (rates, pairs) = (batch * tokens * heads, batch * heads);
        let all = rates * width;
        let layers = [(width + 1) * hidden, (hidden + 1) * width].map(|n| n * pairs);
        let inputs = [
            draw(all, 0.0, 1.0),
            draw(all, 0.0, 1.0),
            draw(all, 0.0, 1.0),
            positive(draw(rates, 0.0, 0.5 / width as f32)),
            positive(draw(rows, 0.0, 0.5)),
            draw(heads * width, 1.0, 0.2),
            draw(heads * width, 0.0, 0.2),
            draw(layers[0], 0.0, 0.5),
            draw(layers[1], 0.0, 0.5),
        ];
        let [with_y, with_first, with_second] = given;
        let mut drawn = |there: bool, n: usize| there.then(|| draw(n, 0.0, 1.0));
        let d_y = drawn(with_y, all);
        let d_weights = [drawn(with_first, layers[0]), drawn(with_second, layers[1])];
        Self { dims, inputs, d_y, d_weights }
    }

    /// y, and the weights of both layers after the last token.
    fn run(&self, [q, k, v, rate, scale, gamma, beta, first, second]: &Nine) -> [Vec<f64>; 3] {
        let ttt_linear::Dims { batch, tokens, heads, width, rows } = self.dims.rows;
        let mut y = vec![0.0; q.len()];
        let mut last = [vec![], vec![]];
        for (sequence, head) in (0..batch).flat_map(|b| (0..heads).map(move |h| (b, h))) {
            let pair = sequence * heads + head;
            let mut now = [first, second].map(|all| {
                let size = all.len() / (batch * heads);
                all[pair * size..][..size].to_vec()
            });
            let mut start = now.clone();
            let mut sums = now.each_ref().map(|w| vec![0.0; w.len()]);
            let of_head = |x: &[f64]| x[head * width..][..width].to_vec();
            let (gamma, beta) = (of_head(gamma), of_head(beta));
            for t in 0..tokens {
                let row = (sequence * tokens + t) * heads + head;
                let part = |x: &[f64]| x[row * width..][..width].to_vec();
                let (q, k, v) = (part(q), part(k), part(v));
                if t % rows == 0 {
                    sums = now.each_ref().map(|w| vec![0.0; w.len()]);
                    start = now;
                }
                let z = applied(&start[0], &k);
                let a: Vec<f64> = z.iter().map(|&z| gelu(z)).collect();
                let target = |j: usize| v[j] - k[j] - beta[j];
                let outer = slope(&applied(&start[1], &a), &gamma, target);
                let rows_of_second = start[1].chunks(width);
                let inner: Vec<f64> = (z.iter().zip(rows_of_second))
                    .map(|(&z, w)| {
                        gelu_slope(z) * w.iter().zip(&outer).map(|(w, g)| w * g).sum::<f64>()
                    })
                    .collect();
                for (sum, (x, g)) in sums.iter_mut().zip([(&k, &inner), (&a, &outer)]) {
                    let xs = x.iter().copied().chain([1.0]);
                    for (x, sums) in xs.zip(sum.chunks_mut(g.len())) {
                        sums.iter_mut().zip(g).for_each(|(sum, g)| *sum += rate[row] * x * g);
                    }
                }
                let by = scale[t % rows];
                now = [0, 1].map(|layer: usize| {
                    let pairs = start[layer].iter().zip(&sums[layer]);
                    pairs.map(|(w, sum)| w - by * sum).collect::<Vec<f64>>()
                });
                let b: Vec<f64> = applied(&now[0], &q).into_iter().map(gelu).collect();
                let o = applied(&now[1], &b);
                let size = root_mean_square(&o);
                for j in 0..width {
                    y[row * width + j] = q[j] + gamma[j] * o[j] / size + beta[j];
                }
            }
            last.iter_mut().zip(now).for_each(|(last, now)| last.extend(now));
        }
        let [first, second] = last;
        [y, first, second]
    }

    /// The number whose gradients the kernel is to find.
    fn loss(&self, inputs: &Nine) -> f64 {
        let dot = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(x, y)| x * y).sum::<f64>();
        let [first, second] = &self.d_weights;
        let wanted = [&self.d_y, first, second].into_iter().zip(self.run(inputs));
        wanted.map(|(d, x)| d.as_ref().map_or(0.0, |d| dot(d, &x))).sum()
    }

    /// The gradient of one number.
    fn difference(&self, tensor: usize, place: usize) -> f64 {
        let near = if NAMES[tensor] == "rate" { 1e-4 / self.dims.rows.width as f64 } else { 1e-4 };
        difference(near, |step| {
            let mut inputs = self.inputs.clone();
            inputs[tensor][place] += step;
            self.loss(&inputs)
        })
    }
}

fn gelu(z: f64) -> f64 {
    0.5 * z * (1.0 + gelu_tanh(z))
}

fn gelu_slope(z: f64) -> f64 {
    let t = gelu_tanh(z);
    let steep = (2.0 / std::f64::consts::PI).sqrt() * (1.0 + 3.0 * 0.044_715 * z * z);
    0.5 * (1.0 + t) + 0.5 * z * (1.0 - t * t) * steep
}

fn gelu_tanh(z: f64) -> f64 {
    ((2.0 / std::f64::consts::PI).sqrt() * (z + 0.044_715 * z * z * z)).tanh()
}

fn is_right<R: Runtime>(client: &ComputeClient<R>, sizes: [usize; 6], given: [bool; 3]) {
    let case = Case::new(sizes, given);
    let put = |x: &Vec<f64>| {
        let bytes: Vec<u8> = x.iter().flat_map(|&x| (x as f32).to_le_bytes()).collect();
        client.create_from_slice(&bytes)
    };
    let handles = case.inputs.each_ref().map(put);
    let [q, k, v, rate, scale, norm_weight, norm_bias, weights, second] = &handles;
    let epsilon = EPSILON;
    let rows =
        ttt_linear::Inputs { q, k, v, rate, scale, norm_weight, norm_bias, weights, epsilon };
    let x = Inputs { rows, second };
    let kept = forward(client, case.dims, &x, true).expect("it fits");
    let what = |name: &str| format!("{name} of {sizes:?}, {given:?}");
    let [y, first, last] = case.run(&case.inputs);
    assert_close(&what("y"), &y, &numbers(client, &kept.y), 3e-6);
    for (name, want, got) in
        [("the last W1", first, &kept.weights[0]), ("the last W2", last, &kept.weights[1])]
    {
        assert_close(&what(name), &want, &numbers(client, got), 3e-6);
    }
    if sizes == SMALL {
        let alone = forward(client, case.dims, &x, false).expect("it fits");
        assert!(alone.starts.is_none());
        assert_eq!(numbers(client, &alone.y), numbers(client, &kept.y));
        for (alone, kept) in alone.weights.iter().zip(&kept.weights) {
            assert_eq!(numbers(client, alone), numbers(client, kept));
        }
    }

    let [first_starts, second_starts] = kept.starts.as_ref().expect("they were asked for");
    let put_some = |d: &Option<Vec<f64>>| d.as_ref().map(put);
    let (d_y, d_weights) = (put_some(&case.d_y), case.d_weights.each_ref().map(put_some));
    let given = Given {
        starts: [&first_starts.handle, &second_starts.handle],
        d_y: d_y.as_ref(),
        d_weights: d_weights.each_ref().map(Option::as_ref),
    };
    let found = backward(client, case.dims, &x, given).expect("it fits");
    let of = &found.rows;
    let all = [
        &of.q,
        &of.k,
        &of.v,
        &of.rate,
        &of.scale,
        &of.norm_weight,
        &of.norm_bias,
        &of.weights,
        &found.second,
    ];
    for (tensor, (name, buffer)) in NAMES.into_iter().zip(all).enumerate() {
        let wanted = case.inputs[tensor].len();
        let got = summed(numbers(client, buffer), wanted);
        let size = got.iter().map(|x| x * x).sum::<f64>().sqrt() / (wanted as f64).sqrt();
        let step = if wanted <= 256 { 1 } else { (wanted / CHECKED) | 1 };
        for place in (0..wanted).step_by(step) {
            let (want, got) = (case.difference(tensor, place), got[place]);
            let error = (want - got).abs();
            assert!(error <= 4e-5 * size, "{}, {place}: {got}, not {want}", what(name));
        }
    }
}

fn are_right<R: Runtime>(client: &ComputeClient<R>) {
    is_right(client, ODD, [true; 3]);
    is_right(client, SMALL, [true, true, false]);
    is_right(client, SMALL, [false, false, true]);
}

#[test]
fn networks_learn_and_their_gradients_are_right() {
    crate::tests::on_wgpu::with_client(are_right);
}

#[cfg(feature = "cuda")]
#[test]
fn networks_learn_and_their_gradients_are_right_on_cuda() {
    crate::tests::on_cuda::with_client(|client| {
        are_right(client);
        // More shared memory than other devices have.
        is_right(client, [1, 2, 2, 32, 4, 16], [true; 3]);
        is_right(client, [1, 2, 1, 64, 4, 16], [true; 3]);
    });
}

#[test]
fn networks_that_do_not_fit_are_refused() {
    crate::tests::on_wgpu::with_client(|client| {
        let rows = ttt_linear::Dims { batch: 1, tokens: 8, heads: 2, width: 8, rows: 4 };
        let good = Dims { rows, expand: 4 };
        let with = |rows| check(client, Dims { rows, ..good });
        assert_eq!(check(client, good), Ok(()));
        let none = ttt_linear::Dims { tokens: 0, ..rows };
        assert!(matches!(with(none), Err(Refusal::Empty { .. })));
        let cut = ttt_linear::Dims { tokens: 9, ..rows };
        assert!(matches!(with(cut), Err(Refusal::Lengths { .. })));
        let wide = |expand| check(client, Dims { expand, ..good });
        assert!(matches!(wide(0), Err(Refusal::Empty { .. })));
        assert!(
            wide(1 << 20).expect_err("refused").to_string().contains("hidden numbers of a head")
        );
        let far = ttt_linear::Dims { tokens: 1 << 12, rows: 1 << 12, ..rows };
        assert!(matches!(with(far), Err(Refusal::Device { .. })));
    });
}
