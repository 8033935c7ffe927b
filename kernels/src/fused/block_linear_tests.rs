//! Linear layers of blocks against f64.

use super::*;
use crate::fused::sandbox::{Sandbox, everywhere};
use crate::tests::Rows;
use linattn_oracle::assert_close;

fn limit(rows: Rows) -> f64 {
    if rows == Rows::F32 { 1e-6 } else { 8e-3 }
}

/// `y[n, h, j] = b[h, j] + sum_e x[n, h, e] W[h, e, j]`.
fn product(dims: Dims, x: &[f64], weight: &[f64], bias: Option<&[f64]>) -> Vec<f64> {
    let Dims { rows, heads, from, to } = dims;
    let mut y = vec![0.0; rows * heads * to];
    for (place, y) in y.iter_mut().enumerate() {
        let (row, h, j) = (place / (heads * to), place / to % heads, place % to);
        let terms =
            (0..from).map(|e| x[(row * heads + h) * from + e] * weight[(h * from + e) * to + j]);
        *y = bias.map_or(0.0, |bias| bias[h * to + j]) + terms.sum::<f64>();
    }
    y
}

/// `dW[h, e, j] = sum_n x[n, h, e] dy[n, h, j]`.
fn outer_products(dims: Dims, x: &[f64], d_y: &[f64]) -> Vec<f64> {
    let Dims { rows, heads, from, to } = dims;
    let mut d_w = vec![0.0; dims.weights()];
    for (place, d_w) in d_w.iter_mut().enumerate() {
        let (h, e, j) = (place / (from * to), place / to % from, place % to);
        let term = |row: usize| x[(row * heads + h) * from + e] * d_y[(row * heads + h) * to + j];
        *d_w = (0..rows).map(term).sum();
    }
    d_w
}

fn layer_is_right<R: Runtime>(sandbox: &Sandbox<'_, R>, dims: Dims, weights: Rows) {
    let Dims { rows, heads, from, to } = dims;
    let (client, kind) = (sandbox.client, sandbox.rows);
    let types = [kind.dtype(), weights.dtype()];
    let x = sandbox.draw("x", rows * heads * from, kind);
    let d_y = sandbox.draw("dy", rows * heads * to, kind);
    let weight = sandbox.draw("weight", dims.weights(), weights);
    let bias = sandbox.draw("bias", heads * to, weights);
    let put = |values: &[f64], kind| sandbox.put(values, kind);
    let (on_x, on_w, on_b) = (put(&x, kind), put(&weight, weights), put(&bias, weights));
    for bias in [None, Some(&bias)] {
        let what = format!("{dims:?}, {kind:?} by {weights:?}, bias {}", bias.is_some());
        let on_b = bias.map(|_| &on_b);
        let y = multiply(client, dims, &on_x, &on_w, on_b, types).expect("it is taken");
        assert_eq!(y.shape, [rows, heads, to]);
        let want = product(dims, &x, &weight, bias.map(Vec::as_slice));
        assert_close(&what, &want, &sandbox.get(&y), limit(kind));
    }
    let d_w = weight_gradient(client, dims, &on_x, &put(&d_y, kind), types).expect("it is taken");
    assert_eq!(d_w.shape, [heads, from, to]);
    let limit = limit(if weights == Rows::F32 { Rows::F32 } else { kind });
    let what = format!("{dims:?}, {kind:?} by {weights:?}, gradient of W");
    assert_close(&what, &outer_products(dims, &x, &d_y), &sandbox.get(&d_w), limit);
}

fn all_are_right<R: Runtime>(sandbox: &Sandbox<'_, R>) {
    for [rows, heads, from, to] in [
        [1, 1, 1, 1],
        [3, 2, 5, 3],
        [7, 64, 4, 4],
        [130, 4, 32, 128],
        [517, 3, 8, 6],
        [70, 2, 64, 64],
    ] {
        let dims = Dims { rows, heads, from, to };
        assert_eq!(dims.transposed().transposed(), dims);
        layer_is_right(sandbox, dims, Rows::F32);
        if sandbox.rows != Rows::F32 {
            layer_is_right(sandbox, dims, sandbox.rows);
        }
    }
}

fn refusals<R: Runtime>(client: &ComputeClient<R>) {
    let x = client.empty(64);
    let types = [Rows::F32.dtype(); 2];
    let run = |rows, from, to| {
        let dims = Dims { rows, heads: 1, from, to };
        let product = multiply(client, dims, &x, &x, None, types).err();
        assert_eq!(product, weight_gradient(client, dims, &x, &x, types).err());
        product.expect("refused")
    };
    assert_eq!(run(0, 4, 4), Refusal::Empty { batch: 0, tokens: 4 });
    assert_eq!(run(1, 0, 4), Refusal::Empty { batch: 1, tokens: 0 });
    assert_eq!(run(1, 4, 0), Refusal::Empty { batch: 1, tokens: 0 });
    let why = run(1, 64, 65).to_string();
    assert!(why.contains("numbers of a block: 4160") && why.contains("4096"), "{why}");
}

#[test]
fn layers_of_blocks_are_right_in_every_type() {
    crate::tests::on_wgpu::with_client(|client| everywhere(client, all_are_right));
}

#[test]
fn large_blocks_are_refused() {
    crate::tests::on_wgpu::with_client(refusals);
}

#[cfg(feature = "cuda")]
#[test]
fn layers_of_blocks_are_right_in_every_type_on_cuda() {
    crate::tests::on_cuda::with_client(|client| everywhere(client, all_are_right));
}
