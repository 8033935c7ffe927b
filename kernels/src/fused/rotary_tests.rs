//! Rotations against f64.

use super::*;
use crate::fused::sandbox::{Sandbox, everywhere};
use crate::tests::Rows;
use linattn_oracle::assert_close;

fn limit(rows: Rows) -> f64 {
    if rows == Rows::F32 { 1e-6 } else { 8e-3 }
}

/// `x` turned by `angles`, `[T, R / 2]`.
fn turned(dims: Dims, x: &[f64], angles: &[f64]) -> Vec<f64> {
    let Dims { tokens, heads, width, rotated, .. } = dims;
    let half = rotated / 2;
    let mut y = x.to_vec();
    for (row, y) in y.chunks_exact_mut(width).enumerate() {
        for i in 0..half {
            let (sin, cos) = angles[row / heads % tokens * half + i].sin_cos();
            let (a, b) = (y[i], y[i + half]);
            (y[i], y[i + half]) = (a * cos - b * sin, a * sin + b * cos);
        }
    }
    y
}

fn rotations_are_right<R: Runtime>(sandbox: &Sandbox<'_, R>, dims: Dims) {
    let (client, dtype) = (sandbox.client, sandbox.rows.dtype());
    let x = sandbox.draw("x", dims.rows() * dims.width, sandbox.rows);
    let mut angles = sandbox.draw("angles", dims.tokens * dims.rotated / 2, Rows::F32);
    angles.iter_mut().for_each(|angle| *angle *= 10.0);
    let table = [f64::cos, f64::sin].into_iter().flat_map(|f| angles.iter().map(move |&a| f(a)));
    let table = sandbox.put(&table.collect::<Vec<_>>(), Rows::F32);
    let on_device = sandbox.put(&x, sandbox.rows);
    for back in [false, true] {
        let what = format!("{dims:?}, {:?}, back {back}", sandbox.rows);
        let by: Vec<f64> = angles.iter().map(|a| if back { -a } else { *a }).collect();
        let y = rotate(client, dims, &on_device, &table, back, dtype).expect("it is taken");
        assert_close(&what, &turned(dims, &x, &by), &sandbox.get(&y), limit(sandbox.rows));
    }
}

fn all_are_right<R: Runtime>(sandbox: &Sandbox<'_, R>) {
    for [batch, tokens, heads, width, rotated] in
        [[1, 1, 1, 2, 2], [2, 5, 3, 64, 64], [1, 7, 2, 24, 8], [3, 4, 1, 5, 4]]
    {
        rotations_are_right(sandbox, Dims { batch, tokens, heads, width, rotated });
    }
}

fn refusals<R: Runtime>(client: &ComputeClient<R>) {
    let x = client.empty(64);
    let run = |tokens, width, rotated| {
        let dims = Dims { batch: 1, tokens, heads: 1, width, rotated };
        rotate(client, dims, &x, &x, false, Rows::F32.dtype()).err()
    };
    assert_eq!(run(0, 4, 4), Some(Refusal::Empty { batch: 0, tokens: 4 }));
    assert_eq!(run(1, 0, 0), Some(Refusal::Empty { batch: 1, tokens: 0 }));
    for rotated in [0, 3, 6] {
        let why = run(1, 5, rotated).expect("refused").to_string();
        assert!(why.contains("an even number") && why.contains('4'), "{why}");
    }
}

#[test]
fn rotations_are_right_in_every_type() {
    crate::tests::on_wgpu::with_client(|client| everywhere(client, all_are_right));
}

#[test]
fn what_cannot_be_rotated_is_refused() {
    crate::tests::on_wgpu::with_client(refusals);
}

#[cfg(feature = "cuda")]
#[test]
fn rotations_are_right_in_every_type_on_cuda() {
    crate::tests::on_cuda::with_client(|client| everywhere(client, all_are_right));
}
