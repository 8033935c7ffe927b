//! Gated products and their gradients against f64.

use super::*;
use crate::fused::sandbox::{Sandbox, activated, everywhere, slope};
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

fn products_are_right<R: Runtime>(sandbox: &Sandbox<'_, R>, product: GatedProduct) {
    let GatedProduct { rows, width, activation } = product;
    let (client, dtype) = (sandbox.client, sandbox.rows.dtype());
    let mut both = sandbox.draw("both", 2 * rows * width, sandbox.rows);
    both[0] = -100.0;
    both[2 * width * (rows - 1)] = 100.0;
    let [gate, value] = unpacked(&both, width);
    let d_y = sandbox.draw("d_y", rows * width, sandbox.rows);
    let zip = || gate.iter().zip(&value).zip(&d_y);
    let want: Vec<f64> = zip().map(|((z, x), _)| activated(*z, activation) * x).collect();
    let want_gate: Vec<f64> = zip().map(|((z, x), d)| slope(*z, activation) * x * d).collect();
    let want_value: Vec<f64> = zip().map(|((z, _), d)| activated(*z, activation) * d).collect();

    let [on_both, on_gate, on_value, on_d_y] =
        [&both, &gate, &value, &d_y].map(|x| sandbox.put(x, sandbox.rows));
    let separate = Operands::Separate { gate: &on_gate, value: &on_value };
    for operands in [Operands::Packed(&on_both), separate] {
        let what = format!("{product:?}, {:?}, packed {}", sandbox.rows, operands.packed());
        let run = || forward(client, product, operands, dtype).expect("it is taken");
        let y = sandbox.get(&run());
        assert_close(&what, &want, &y, limit(sandbox.rows));
        assert_eq!(y, sandbox.get(&run()), "{what}: the same bits");
        let [d_gate, d_value] = match backward(client, product, operands, &on_d_y, dtype) {
            Ok(Operands::Packed(both)) => unpacked(&sandbox.get(&both), width),
            Ok(Operands::Separate { gate, value }) => [sandbox.get(&gate), sandbox.get(&value)],
            Err(refusal) => panic!("{what}: {refusal}"),
        };
        assert_close(&format!("{what}: d_gate"), &want_gate, &d_gate, limit(sandbox.rows));
        assert_close(&format!("{what}: d_value"), &want_value, &d_value, limit(sandbox.rows));
    }
}

const ACTIVATIONS: [Activation; 4] =
    [Activation::Silu, Activation::Sigmoid, Activation::Softplus, Activation::Identity];

fn all_are_right<R: Runtime>(sandbox: &Sandbox<'_, R>) {
    for (n, [rows, width]) in [[1, 1], [3, 5], [7, 128], [33, 18], [70, 36]].into_iter().enumerate()
    {
        let activation = ACTIVATIONS[n % 4];
        products_are_right(sandbox, GatedProduct { rows, width, activation });
    }
}

fn refusals<R: Runtime>(client: &ComputeClient<R>) {
    let x = client.empty(16);
    let run = |rows, width| {
        let product = GatedProduct { rows, width, activation: Activation::Silu };
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
