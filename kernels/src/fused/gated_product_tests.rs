//! Gated products and their gradients against f64.

use super::*;
use crate::fused::sandbox::{Sandbox, difference, everywhere, sigmoid};
use crate::tests::Rows;
use linattn_oracle::assert_close;

/// Gate and value of packed rows.
fn unpacked(x: &[f64], width: usize) -> [Vec<f64>; 2] {
    let half = |from: usize| {
        x.chunks_exact(2 * width).flat_map(|row| row[from..from + width].to_vec()).collect()
    };
    [half(0), half(width)]
}

fn limit(rows: Rows) -> f64 {
    if rows == Rows::F32 { 1e-6 } else { 8e-3 }
}

/// The normal distribution's share below `z`, by Simpson's rule: right to 1e-12 where |z| is at most 9.
fn normal_share(z: f64) -> f64 {
    const PIECES: usize = 2000;
    let z = z.clamp(-9.0, 9.0);
    let step = z / PIECES as f64;
    let weight = |n: usize| match n {
        0 | PIECES => 1.0,
        _ if n % 2 == 1 => 4.0,
        _ => 2.0,
    };
    let density = |x: f64| (-0.5 * x * x).exp() / std::f64::consts::TAU.sqrt();
    let sum: f64 = (0..=PIECES).map(|n| weight(n) * density(n as f64 * step)).sum();
    0.5 + sum * step / 3.0
}

/// f of `z` and its derivative.
fn activated(z: f64, activation: GateActivation) -> [f64; 2] {
    let softplus = |z: f64| z.max(0.0) + (-z.abs()).exp().ln_1p();
    let f = |z: f64| match activation {
        GateActivation::Silu => z * sigmoid(z),
        GateActivation::Sigmoid => sigmoid(z),
        GateActivation::Softplus => softplus(z),
        GateActivation::LogSigmoid => -softplus(-z),
        GateActivation::Gelu => z * normal_share(z),
        GateActivation::GeluTanh => {
            0.5 * z
                * (1.0 + (std::f64::consts::FRAC_2_PI.sqrt() * (z + 0.044715 * z.powi(3))).tanh())
        }
        GateActivation::SquaredRelu => z.max(0.0).powi(2),
    };
    // A difference would go across the place where the rectifier starts.
    let slope = match activation {
        GateActivation::SquaredRelu => 2.0 * z.max(0.0),
        _ => difference(z, f),
    };
    [f(z), slope]
}

fn products_are_right<R: Runtime>(sandbox: &Sandbox<'_, R>, product: GatedProduct) {
    let GatedProduct { rows, width, activation, factor } = product;
    let (client, dtype) = (sandbox.client, sandbox.rows.dtype());
    let mut both = sandbox.draw("both", 2 * rows * width, sandbox.rows);
    // The square of 100 is more than others add up to.
    let large = if activation == GateActivation::SquaredRelu { 3.0 } else { 100.0 };
    both[0] = -large;
    both[2 * width * (rows - 1)] = large;
    let [gate, value] = unpacked(&both, width);
    let d_y = sandbox.draw("d_y", rows * width, sandbox.rows);
    let open: Vec<[f64; 2]> = gate.iter().map(|z| activated(*z, activation)).collect();
    let want = |value: &[f64]| {
        let zip = || open.iter().zip(value).zip(&d_y);
        let y: Vec<f64> = zip().map(|(([f, _], x), _)| f * x).collect();
        let d_gate: Vec<f64> = zip().map(|(([_, slope], x), d)| slope * x * d).collect();
        let d_value: Vec<f64> = zip().map(|(([f, _], _), d)| f * d).collect();
        [y, d_gate, d_value]
    };

    let [on_both, on_gate, on_value, on_d_y] =
        [&both, &gate, &value, &d_y].map(|x| sandbox.put(x, sandbox.rows));
    let separate = Operands::Separate { gate: &on_gate, value: &on_value };
    for operands in [Operands::Packed(&on_both), separate, Operands::Alone(&on_gate)] {
        let what = format!("{product:?}, {:?}, {:?}", sandbox.rows, operands.layout());
        let run = || forward(client, product, operands, dtype).expect("it is taken");
        let alone = vec![f64::from(factor); rows * width];
        let is_alone = operands.layout() == Layout::Alone;
        let [want, want_gate, want_value] = want(if is_alone { &alone } else { &value });
        let y = sandbox.get(&run());
        assert_close(&what, &want, &y, limit(sandbox.rows));
        assert_eq!(y, sandbox.get(&run()), "{what}: the same bits");
        let (d_gate, d_value) = match backward(client, product, operands, &on_d_y, dtype) {
            Ok(Operands::Packed(both)) => {
                let [gate, value] = unpacked(&sandbox.get(&both), width);
                (gate, Some(value))
            }
            Ok(Operands::Separate { gate, value }) => {
                (sandbox.get(&gate), Some(sandbox.get(&value)))
            }
            Ok(Operands::Alone(gate)) => (sandbox.get(&gate), None),
            Err(refusal) => panic!("{what}: {refusal}"),
        };
        assert_close(&format!("{what}: d_gate"), &want_gate, &d_gate, limit(sandbox.rows));
        assert_eq!(d_value.is_none(), is_alone, "{what}");
        if let Some(d_value) = d_value {
            assert_close(&format!("{what}: d_value"), &want_value, &d_value, limit(sandbox.rows));
        }
    }
}

fn all_are_right<R: Runtime>(sandbox: &Sandbox<'_, R>) {
    let sizes = [[70, 36], [3, 5], [7, 128], [33, 18], [70, 37], [9, 24], [40, 10]];
    for ([rows, width], activation) in sizes.into_iter().zip(GateActivation::ALL) {
        products_are_right(sandbox, GatedProduct { rows, width, activation, factor: -0.7 });
    }
    let smallest =
        GatedProduct { rows: 1, width: 1, activation: GateActivation::Silu, factor: 1.0 };
    products_are_right(sandbox, smallest);
}

/// Each number by itself: shaders have no `ln(1 + e)`, and logarithms near 1 lose what e is small by.
fn logarithms_keep_their_digits<R: Runtime>(client: &ComputeClient<R>) {
    let sandbox = Sandbox { client, rows: Rows::F32 };
    let z: Vec<f64> = (-48..=112).map(|n| f64::from(n) / 4.0).collect();
    let on_z = sandbox.put(&z, Rows::F32);
    for activation in [GateActivation::Softplus, GateActivation::LogSigmoid] {
        let product = GatedProduct { rows: 1, width: z.len(), activation, factor: 1.0 };
        let y = forward(client, product, Operands::Alone(&on_z), Rows::F32.dtype());
        for (z, got) in z.iter().zip(sandbox.get(&y.expect("it is taken"))) {
            let [want, _] = activated(*z, activation);
            let off = (got / want - 1.0).abs();
            assert!(off < 1e-5, "{activation:?} of {z} is {want}, not {got}");
        }
    }
}

/// A gate that is no number leaves no number behind, forward and backward.
fn what_is_no_number_stays_none<R: Runtime>(client: &ComputeClient<R>) {
    let sandbox = Sandbox { client, rows: Rows::F32 };
    let [z, d] = [f64::NAN, 1.0].map(|x| sandbox.put(&[x], Rows::F32));
    for activation in GateActivation::ALL {
        let product = GatedProduct { rows: 1, width: 1, activation, factor: 1.0 };
        let (operands, dtype) = (Operands::Alone(&z), Rows::F32.dtype());
        let y = sandbox.get(&forward(client, product, operands, dtype).expect("it is taken"));
        let Ok(Operands::Alone(d_z)) = backward(client, product, operands, &d, dtype) else {
            panic!("{activation:?}: no gradient")
        };
        assert!(y[0].is_nan() && sandbox.get(&d_z)[0].is_nan(), "{activation:?}: {y:?}");
    }
}

fn refusals<R: Runtime>(client: &ComputeClient<R>) {
    let x = client.empty(16);
    let run = |rows, width| {
        let product = GatedProduct { rows, width, activation: GateActivation::Silu, factor: 1.0 };
        forward(client, product, Operands::Packed(&x), Rows::F32.dtype()).err()
    };
    assert_eq!(run(0, 4), Some(Refusal::Empty { batch: 0, tokens: 8 }));
    assert_eq!(run(4, 0), Some(Refusal::Empty { batch: 4, tokens: 0 }));
    let (what, got, most) = ("numbers in a tensor", 1 << 32, u32::MAX as usize);
    assert_eq!(run(1 << 16, 1 << 15), Some(Refusal::TooLarge { what, got, most }));
}

/// The tests of one device, whose client `with_client` has.
macro_rules! each_kernel {
    ($runtime:ty) => {
        #[test]
        fn gated_products_and_their_gradients_are_right() {
            with_client(|client: &ComputeClient<$runtime>| everywhere(client, all_are_right));
        }

        #[test]
        fn logarithms_keep_the_digits_of_small_numbers() {
            with_client(logarithms_keep_their_digits::<$runtime>);
        }

        #[test]
        fn gates_that_are_no_numbers_are_seen() {
            with_client(what_is_no_number_stays_none::<$runtime>);
        }

        #[test]
        fn what_cannot_be_multiplied_is_refused() {
            with_client(refusals::<$runtime>);
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
