//! Taps and gradients against the formula in f64, and its differences.

use super::*;
use linattn_oracle::Rng;

/// Parameters of a model, one after another: log_dt, log_a_real, a_imag, c, b, d.
#[derive(Clone)]
struct Parameters {
    dims: Dims,
    steps: Steps,
    driven: bool,
    numbers: [Vec<f64>; 6],
}

impl Parameters {
    fn new(mut seed: u64, dims: Dims, steps: Steps, driven: bool) -> Self {
        let Dims { channels, modes, .. } = dims;
        let all = channels * modes;
        let [mut log_dt, mut log_a_real, mut a_imag] = [channels, all, all].map(|n| {
            seed += 1000;
            normal_numbers(seed, n)
        });
        log_dt.iter_mut().for_each(|x| *x = *x * 0.7 - 2.0);
        log_a_real.iter_mut().for_each(|x| *x = *x * 0.3 - 0.7);
        a_imag.iter_mut().enumerate().for_each(|(i, x)| *x = *x * 0.3 + 3.0 * (i % modes) as f64);
        let [c, b] = [1, 2].map(|n| normal_numbers(seed + 7 * n, 2 * all));
        let d = normal_numbers(seed + 3, channels);
        let mut numbers = [log_dt, log_a_real, a_imag, c, b, d];
        numbers.iter_mut().flatten().for_each(|x| *x = f64::from(*x as f32));
        Self { dims, steps, driven, numbers }
    }

    /// By its definition.
    fn taps(&self) -> Vec<f64> {
        let Dims { channels, modes, length } = self.dims;
        let [log_dt, log_a_real, a_imag, c, b, d] = &self.numbers;
        let mut taps = vec![0.0; length * channels];
        let times =
            |x: [f64; 2], y: [f64; 2]| [x[0] * y[0] - x[1] * y[1], x[0] * y[1] + x[1] * y[0]];
        let over = |x: [f64; 2], y: [f64; 2]| {
            let square = y[0] * y[0] + y[1] * y[1];
            times(x, [y[0] / square, -y[1] / square])
        };
        for channel in 0..channels {
            let dt = log_dt[channel].exp();
            for n in 0..modes {
                let (at, all) = (channel * modes + n, channels * modes);
                let pole = [-log_a_real[at].exp(), a_imag[at]];
                let (turn, q) = match self.steps {
                    Steps::Zoh => {
                        let (size, angle) = ((dt * pole[0]).exp(), dt * pole[1]);
                        let turn = [size * angle.cos(), size * angle.sin()];
                        (turn, over([turn[0] - 1.0, turn[1]], pole))
                    }
                    Steps::Bilinear => {
                        let h = [dt / 2.0 * pole[0], dt / 2.0 * pole[1]];
                        let below = [1.0 - h[0], -h[1]];
                        (over([1.0 + h[0], h[1]], below), over([dt, 0.0], below))
                    }
                };
                let b = if self.driven { [b[at], b[all + at]] } else { [1.0, 0.0] };
                let mut held = times(times([c[at], c[all + at]], b), q);
                for lag in 0..length {
                    taps[lag * channels + channel] += 2.0 * held[0];
                    held = times(held, turn);
                }
            }
            taps[channel] += d[channel];
        }
        taps
    }

    /// The gradient of `sum g taps` by differences.
    fn gradient(&self, which: usize, g: &[f64]) -> Vec<f64> {
        let step = 1e-6;
        let value = |i: usize, by: f64| {
            let mut moved = self.clone();
            moved.numbers[which][i] += by;
            moved.taps().iter().zip(g).map(|(tap, g)| tap * g).sum::<f64>()
        };
        let slope = |i| (value(i, step) - value(i, -step)) / (2.0 * step);
        (0..self.numbers[which].len()).map(slope).collect()
    }
}

fn normal_numbers(seed: u64, count: usize) -> Vec<f64> {
    let mut rng = Rng::named(seed, "diagonal taps");
    (0..count).map(|_| rng.normal()).collect()
}

fn bytes(numbers: &[f64]) -> Vec<u8> {
    numbers.iter().flat_map(|x| (*x as f32).to_ne_bytes()).collect()
}

#[track_caller]
fn hold<R: Runtime>(client: &ComputeClient<R>, what: &str, want: &[f64], got: Buffer, limit: f64) {
    let got = client.read_one(got.handle).expect("the kernel ran");
    let got: Vec<f64> =
        got.as_chunks().0.iter().map(|x| f64::from(f32::from_ne_bytes(*x))).collect();
    assert_eq!(want.len(), got.len(), "{what}");
    let size = want.iter().map(|x| x * x).sum::<f64>().sqrt();
    let error = want.iter().zip(&got).map(|(x, y)| (x - y) * (x - y)).sum::<f64>().sqrt();
    assert!(error <= limit * size, "{what}: off by {error:e} of {size:e}");
}

fn models_are_right<R: Runtime>(client: &ComputeClient<R>) {
    let sizes = [[1, 1, 1], [3, 2, 5], [17, 19, 70], [5, 32, 1030], [33, 16, 64]];
    for ([channels, modes, length], seed) in sizes.into_iter().zip(1..) {
        let dims = Dims { channels, modes, length };
        for (steps, driven) in [(Steps::Zoh, false), (Steps::Zoh, true), (Steps::Bilinear, true)] {
            let model = Parameters::new(seed, dims, steps, driven);
            let name = format!("{dims:?}, {steps:?}, {driven}");
            // A rounded angle is as far off as it is often turned.
            let limit = 2e-5 + 1e-6 * length as f64;
            let handles = model.numbers.each_ref().map(|x| client.create_from_slice(&bytes(x)));
            let [log_dt, log_a_real, a_imag, c, b, d] = &handles;
            let b = driven.then_some(b);
            let inputs = Inputs { log_dt, log_a_real, a_imag, c, b, d };
            let found = taps(client, dims, steps, inputs).expect("it fits");
            assert_eq!(found.shape, [length, channels]);
            hold(client, &name, &model.taps(), found, limit);

            let g = normal_numbers(seed + 100, length * channels);
            let g: Vec<f64> = g.into_iter().map(|x| f64::from(x as f32)).collect();
            let given = client.create_from_slice(&bytes(&g));
            let found = gradients(client, dims, steps, inputs, &given).expect("it fits");
            let Gradients { log_dt, log_a_real, a_imag, c, b, d } = found;
            assert_eq!(b.is_some(), driven);
            let all = [Some(log_dt), Some(log_a_real), Some(a_imag), Some(c), b, Some(d)];
            for (which, found) in all.into_iter().enumerate() {
                let Some(found) = found else { continue };
                // Of the largest model a few numbers would take minutes in f64.
                if length * channels * modes > 100_000 && which != 0 && which != 5 {
                    continue;
                }
                hold(client, &format!("{name}, {which}"), &model.gradient(which, &g), found, limit);
            }
        }
    }
    let nothing = client.empty(4);
    let inputs = Inputs {
        log_dt: &nothing,
        log_a_real: &nothing,
        a_imag: &nothing,
        c: &nothing,
        b: None,
        d: &nothing,
    };
    let dims = Dims { channels: 1, modes: 0, length: 1 };
    let got = taps(client, dims, Steps::Zoh, inputs).expect_err("refused");
    assert!(matches!(got, Refusal::Empty { .. } | Refusal::TooLarge { .. }), "{got}");
}

#[test]
fn taps_of_diagonal_models_are_right() {
    crate::tests::on_wgpu::with_client(models_are_right);
}

#[cfg(feature = "cuda")]
#[test]
fn taps_of_diagonal_models_are_right_on_cuda() {
    crate::tests::on_cuda::with_client(models_are_right);
}
