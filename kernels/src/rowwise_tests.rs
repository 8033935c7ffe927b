//! Normalised rows, gates and short convolutions against f64, on whatever device is there.

use crate::convolution;
use crate::rowwise::{self, Activation, Measure};
use crate::tests::Rows;
use cubecl::ir::features::TypeUsage;
use cubecl::prelude::*;
use cubecl::server::Handle;
use linattn_oracle::{Rng, assert_close};

/// Limits on the relative error of rows. Gates are f32 whatever rows are.
const F32: f64 = 1e-6;
const HALF: f64 = 6e-3;
/// A unit in the last place of bf16: drivers of Vulkan may round toward zero, and NVIDIA's does.
const TOWARD_ZERO: f64 = 8e-3;

/// A device, a type of rows, and the largest grid of cubes that a launch may have.
struct Sandbox<'a, R: Runtime> {
    client: &'a ComputeClient<R>,
    rows: Rows,
    largest: (u32, u32, u32),
}

impl<R: Runtime> Sandbox<'_, R> {
    fn put(&self, values: &[f64]) -> Handle {
        self.client.create_from_slice(&self.rows.bytes(values))
    }

    /// Memory that a kernel has to fill.
    fn poisoned(&self, rows: Rows, numbers: usize) -> Handle {
        self.client.create_from_slice(&rows.bytes(&vec![f64::NAN; numbers]))
    }

    fn arg(&self, handle: &Handle, numbers: usize) -> TensorArg<R> {
        // SAFETY: the handle was made of as many numbers.
        #[allow(unsafe_code)]
        unsafe {
            TensorArg::from_raw_parts(handle.clone(), vec![1_usize].into(), vec![numbers].into())
        }
    }

    fn get(&self, rows: Rows, handle: Handle) -> Vec<f64> {
        rows.numbers(&self.client.read_one(handle).expect("the kernel ran"))
    }

    /// Numbers from N(0, 1), as this type holds them.
    fn draw(&self, name: &str, numbers: usize) -> Vec<f64> {
        let mut rng = Rng::named(3, name);
        let mut values = (0..numbers).map(|_| rng.normal()).collect::<Vec<_>>();
        self.rows.round(&mut values);
        values
    }

    fn limit(&self) -> f64 {
        match self.rows {
            Rows::F32 => F32,
            Rows::Bf16 if R::name(self.client).starts_with("wgpu") => TOWARD_ZERO,
            Rows::F16 | Rows::Bf16 => HALF,
        }
    }
}

/// `test` in every type that the device has, in one row of cubes and in several.
fn everywhere<R: Runtime>(client: &ComputeClient<R>, test: impl Fn(&Sandbox<'_, R>)) {
    let properties = client.properties();
    for rows in [Rows::F32, Rows::F16, Rows::Bf16] {
        let usable = properties.type_usage(rows.dtype()).contains(TypeUsage::Conversion);
        assert!(usable || rows != Rows::F32, "every device has f32");
        for largest in [properties.hardware.max_cube_count, (2, 65_535, 1)] {
            if usable {
                test(&Sandbox { client, rows, largest });
            }
        }
    }
}

fn sigmoid(z: f64) -> f64 {
    1.0 / (1.0 + (-z).exp())
}

fn activated(z: f64, activation: Activation) -> f64 {
    match activation {
        Activation::Identity => z,
        Activation::Silu => z * sigmoid(z),
        Activation::Sigmoid => sigmoid(z),
        Activation::Softplus => z.max(0.0) + (-z.abs()).exp().ln_1p(),
    }
}

/// Rows to normalise: their number and width, and what is done to them.
#[derive(Debug, Clone, Copy)]
struct Case {
    rows: usize,
    width: usize,
    measure: Measure,
    factor: f64,
    weighted: bool,
    gate: Option<Activation>,
}

const PLAIN: Case = Case {
    rows: 3,
    width: 37,
    measure: Measure::RootMeanSquare,
    factor: 1.0,
    weighted: true,
    gate: None,
};

const CASES: [Case; 7] = [
    PLAIN,
    Case { rows: 1, width: 1, ..PLAIN },
    Case { rows: 35, width: 5, measure: Measure::Length, factor: 0.25, weighted: false, ..PLAIN },
    Case { rows: 9, width: 130, gate: Some(Activation::Silu), ..PLAIN },
    Case { rows: 5, width: 300, weighted: false, gate: Some(Activation::Sigmoid), ..PLAIN },
    Case { rows: 4, width: 2048, ..PLAIN },
    Case { rows: 1, width: 2048, measure: Measure::Length, factor: -3.0, ..PLAIN },
];

const EPSILON: f64 = 1e-5;

fn normalized(case: &Case, x: &[f64], weight: &[f64], gate: &[f64]) -> Vec<f64> {
    let mut y = vec![];
    for (x, gate) in x.chunks_exact(case.width).zip(gate.chunks_exact(case.width)) {
        let sum: f64 = x.iter().map(|x| x * x).sum();
        let square = match case.measure {
            Measure::RootMeanSquare => sum / case.width as f64,
            Measure::Length => sum,
        };
        let scale = case.factor / (square + EPSILON).sqrt();
        for ((x, weight), gate) in x.iter().zip(weight).zip(gate) {
            let weight = if case.weighted { *weight } else { 1.0 };
            y.push(x * scale * weight * case.gate.map_or(1.0, |f| activated(*gate, f)));
        }
    }
    y
}

fn rows_are_right<R: Runtime>(sandbox: &Sandbox<'_, R>, case: &Case) {
    let &Case { rows, width, measure, factor, weighted, gate: activation } = case;
    let all = rows * width;
    let (mut x, weight, gate) =
        (sandbox.draw("x", all), sandbox.draw("weight", width), sandbox.draw("gate", all));
    if rows > 1 {
        x[..width].fill(0.0); // nothing to divide by but epsilon
    }
    let [on_x, on_weight, on_gate] = [&x, &weight, &gate].map(|values| sandbox.put(values));
    let y = sandbox.poisoned(sandbox.rows, all);
    let sizes = rowwise::Rows {
        rows,
        width,
        measure,
        epsilon: EPSILON,
        factor,
        activation: activation.unwrap_or(Activation::Identity),
    };
    let args = rowwise::RowArgs {
        x: sandbox.arg(&on_x, all),
        weight: weighted.then(|| sandbox.arg(&on_weight, width)),
        gate: activation.map(|_| sandbox.arg(&on_gate, all)),
        y: sandbox.arg(&y, all),
    };
    let cubes = sizes.cubes(sandbox.largest).expect("it fits");
    let stand_in = || sandbox.arg(&on_x, all);
    rowwise::normalize(sandbox.client, cubes, sizes, args, stand_in, sandbox.rows.dtype());
    let want = normalized(case, &x, &weight, &gate);
    let what = format!("{case:?}, {:?}, {:?}", sandbox.rows, sandbox.largest);
    assert_close(&what, &want, &sandbox.get(sandbox.rows, y), sandbox.limit());
}

/// Also for step sizes of 6e-6, which are all digits that `1 + e^z` has no place for.
fn decays_are_right<R: Runtime>(sandbox: &Sandbox<'_, R>, rows: usize, width: usize, heads: usize) {
    let mut x: Vec<f64> =
        (0..rows * width).map(|n| -12.0 + 40.0 * n as f64 / (rows * width) as f64).collect();
    sandbox.rows.round(&mut x);
    let (a_log, dt_bias) = (sandbox.draw("a_log", heads), sandbox.draw("dt_bias", width));
    let [on_x, on_a_log, on_bias] = [&x, &a_log, &dt_bias].map(|values| sandbox.put(values));
    let g = sandbox.poisoned(Rows::F32, x.len());
    let sizes = rowwise::Decays { rows, width, heads };
    let args = rowwise::DecayArgs {
        x: sandbox.arg(&on_x, x.len()),
        a_log: sandbox.arg(&on_a_log, heads),
        dt_bias: sandbox.arg(&on_bias, width),
        g: sandbox.arg(&g, x.len()),
    };
    let cubes = sizes.cubes(sandbox.largest).expect("it fits");
    rowwise::log_decay(sandbox.client, cubes, sizes, args, sandbox.rows.dtype());
    let want = |(n, x): (usize, &f64)| {
        let column = n % width;
        let z = x + dt_bias[column];
        -a_log[column / (width / heads)].exp() * (z.max(0.0) + (-z.abs()).exp().ln_1p())
    };
    let want: Vec<f64> = x.iter().enumerate().map(want).collect();
    let got = sandbox.get(Rows::F32, g);
    let what =
        format!("{rows} x {width}, {heads} heads, {:?}, {:?}", sandbox.rows, sandbox.largest);
    assert_close(&what, &want, &got, F32);
    for (want, got) in want.iter().zip(&got) {
        assert!((want - got).abs() <= 1e-5 * want.abs(), "{what}: {got:e} for {want:e}");
    }
}

fn products_are_right<R: Runtime>(
    sandbox: &Sandbox<'_, R>,
    numbers: usize,
    activation: Activation,
) {
    let (x, mut gate) = (sandbox.draw("x", numbers), sandbox.draw("gate", numbers));
    gate[0] = -100.0;
    gate[numbers - 1] = 100.0;
    let [on_x, on_gate] = [&x, &gate].map(|values| sandbox.put(values));
    let y = sandbox.poisoned(sandbox.rows, numbers);
    let args = rowwise::ProductArgs {
        x: sandbox.arg(&on_x, numbers),
        gate: sandbox.arg(&on_gate, numbers),
        y: sandbox.arg(&y, numbers),
    };
    let cubes = rowwise::product_cubes(numbers, sandbox.largest).expect("it fits");
    rowwise::gated_product(sandbox.client, cubes, numbers, activation, args, sandbox.rows.dtype());
    let want: Vec<f64> = x.iter().zip(&gate).map(|(x, z)| x * activated(*z, activation)).collect();
    let what = format!("{numbers}, {activation:?}, {:?}, {:?}", sandbox.rows, sandbox.largest);
    assert_close(&what, &want, &sandbox.get(sandbox.rows, y), sandbox.limit());
}

/// Sizes of a convolution, and whether it has a bias.
fn convolutions() -> Vec<(convolution::Dims, bool)> {
    let dims = |[batch, tokens, channels, window]: [usize; 4], activation| convolution::Dims {
        batch,
        tokens,
        channels,
        window,
        activation,
    };
    vec![
        (dims([2, 1, 5, 4], Activation::Silu), true),
        (dims([1, 1, 2048, 4], Activation::Silu), false),
        (dims([2, 2, 37, 4], Activation::Identity), false), // fewer tokens than the conv state has
        (dims([3, 9, 130, 3], Activation::Silu), true),
        (dims([1, 4, 6, 2], Activation::Sigmoid), true),
        (dims([2, 20, 5, 12], Activation::Silu), false), // too wide to be written out
    ]
}

fn convolutions_are_right<R: Runtime>(
    sandbox: &Sandbox<'_, R>,
    dims: convolution::Dims,
    biased: bool,
) {
    let convolution::Dims { batch, tokens, channels, window, activation } = dims;
    let before = window - 1;
    let [all, conv_state_size] = [tokens, before].map(|tokens| batch * tokens * channels);
    let (x, conv_state) = (sandbox.draw("x", all), sandbox.draw("conv_state", conv_state_size));
    let (weight, bias) =
        (sandbox.draw("weight", window * channels), sandbox.draw("bias", channels));
    let [on_x, on_conv_state, on_weight, on_bias] =
        [&x, &conv_state, &weight, &bias].map(|v| sandbox.put(v));
    let (y, next) =
        (sandbox.poisoned(sandbox.rows, all), sandbox.poisoned(sandbox.rows, conv_state_size));
    let args = convolution::Args {
        x: sandbox.arg(&on_x, all),
        weight: sandbox.arg(&on_weight, weight.len()),
        bias: biased.then(|| sandbox.arg(&on_bias, channels)),
        conv_state: sandbox.arg(&on_conv_state, conv_state_size),
        y: sandbox.arg(&y, all),
        next: sandbox.arg(&next, conv_state_size),
    };
    let cubes = dims.cubes(sandbox.largest).expect("it fits");
    let stand_in = || sandbox.arg(&on_x, all);
    convolution::launch(sandbox.client, cubes, dims, args, stand_in, sandbox.rows.dtype());

    let seen = |b: usize, at: usize, channel: usize| match at.checked_sub(before) {
        Some(t) => x[(b * tokens + t) * channels + channel],
        None => conv_state[(b * before + at) * channels + channel],
    };
    let (mut want, mut want_next) = (vec![], vec![]);
    for b in 0..batch {
        for n in 0..(tokens + before) * channels {
            let (at, channel) = (n / channels, n % channels);
            if at >= tokens {
                want_next.push(seen(b, at, channel));
                continue;
            }
            let taps =
                (0..window).map(|w| weight[w * channels + channel] * seen(b, at + w, channel));
            let sum = taps.sum::<f64>() + if biased { bias[channel] } else { 0.0 };
            want.push(activated(sum, activation));
        }
    }
    let what = format!("{dims:?}, bias {biased}, {:?}, {:?}", sandbox.rows, sandbox.largest);
    assert_close(&what, &want, &sandbox.get(sandbox.rows, y), sandbox.limit());
    assert_eq!(want_next, sandbox.get(sandbox.rows, next), "{what}: the next conv state");
}

#[test]
fn what_no_launch_can_hold_is_refused() {
    let rows = |rows, width| rowwise::Rows {
        rows,
        width,
        measure: Measure::Length,
        epsilon: EPSILON,
        factor: 1.0,
        activation: Activation::Identity,
    };
    let large = (65_535, 65_535, 65_535);
    assert!(rows(65_536 * 8, 32).cubes(large).is_some(), "a second row of cubes");
    for (n, width) in [(0, 8), (8, 0), (1 << 16, 1 << 16)] {
        assert!(rows(n, width).cubes(large).is_none(), "{n} rows of {width}");
    }
    assert!(rows(100, 2048).cubes((3, 33, 1)).is_none(), "100 cubes on 99 places");
    assert!(rows(100, 2048).cubes((3, 34, 1)).is_some(), "100 cubes on 102 places");
    assert!(rowwise::product_cubes(0, large).is_none(), "nothing");
    assert!(rowwise::product_cubes(1 << 32, large).is_none(), "indices of 33 bits");
    let (dims, _) = convolutions()[0];
    assert!(convolution::Dims { tokens: 0, ..dims }.cubes(large).is_none(), "no token");
    assert!(convolution::Dims { tokens: 1 << 31, ..dims }.cubes(large).is_none(), "too many");
}

/// The tests of one device, whose client `with_client` has.
macro_rules! each_kernel {
    ($runtime:ty) => {
        fn on_devices(test: impl Fn(&Sandbox<'_, $runtime>)) {
            with_client(|client| everywhere(client, test));
        }

        #[test]
        fn rows_of_any_width_are_normalised() {
            on_devices(|sandbox| CASES.iter().for_each(|case| rows_are_right(sandbox, case)));
        }

        #[test]
        fn small_steps_decay_as_exactly_as_large_ones() {
            on_devices(|sandbox| {
                for [rows, width, heads] in [[1, 3, 3], [5, 37, 37], [7, 130, 10]] {
                    decays_are_right(sandbox, rows, width, heads);
                }
            });
        }

        #[test]
        fn gates_multiply() {
            on_devices(|sandbox| {
                for numbers in [5, 256, 2049] {
                    products_are_right(sandbox, numbers, Activation::Silu);
                    products_are_right(sandbox, numbers, Activation::Sigmoid);
                }
            });
        }

        #[test]
        fn convolutions_of_any_size_hand_their_conv_state_on() {
            on_devices(|sandbox| {
                for (dims, biased) in convolutions() {
                    convolutions_are_right(sandbox, dims, biased);
                }
            });
        }
    };
}

#[cfg(feature = "cuda")]
mod on_cuda {
    use super::*;
    use crate::tests::on_cuda::with_client;

    each_kernel!(cubecl::cuda::CudaRuntime);
}

mod on_wgpu {
    use super::*;
    use crate::tests::on_wgpu::with_client;

    each_kernel!(cubecl::wgpu::WgpuRuntime);
}
