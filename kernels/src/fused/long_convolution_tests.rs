//! Long convolutions and their gradients against f64.

use super::*;
use crate::fused::sandbox::{Sandbox, everywhere};
use crate::tests::Rows;
use linattn_oracle::assert_close;

fn limit(rows: Rows) -> f64 {
    if rows == Rows::F32 { 1e-6 } else { 8e-3 }
}

/// Calls `each` with the places of y, of the tap and of x of every product.
fn products(dims: Dims, mut each: impl FnMut(usize, usize, usize)) {
    let Dims { batch, tokens, channels, length } = dims;
    for row in 0..batch * tokens {
        for lag in 0..length.min(row % tokens + 1) {
            for d in 0..channels {
                each(row * channels + d, lag * channels + d, (row - lag) * channels + d);
            }
        }
    }
}

fn convolutions_are_right<R: Runtime>(sandbox: &Sandbox<'_, R>, dims: Dims) {
    let (client, dtype) = (sandbox.client, sandbox.rows.dtype());
    let x = sandbox.draw("x", dims.numbers(), sandbox.rows);
    let d_y = sandbox.draw("dy", dims.numbers(), sandbox.rows);
    let taps = sandbox.draw("taps", dims.length * dims.channels, Rows::F32);
    let (mut y, mut d_x, mut d_taps) =
        (vec![0.0; x.len()], vec![0.0; x.len()], vec![0.0; taps.len()]);
    products(dims, |of_y, of_tap, of_x| {
        y[of_y] += taps[of_tap] * x[of_x];
        d_x[of_x] += taps[of_tap] * d_y[of_y];
        d_taps[of_tap] += d_y[of_y] * x[of_x];
    });
    // What is behind a tensor's end is no number: devices that read zeros there would hide that it is read.
    let behind = |numbers: &[f64]| [numbers, &vec![f64::NAN; 16 * dims.channels]].concat();
    let [of_x, of_d_y] = [&x, &d_y].map(|numbers| sandbox.put(&behind(numbers), sandbox.rows));
    let of_taps = sandbox.put(&behind(&taps), Rows::F32);
    let what = |name| format!("{name}, {dims:?}, {:?}", sandbox.rows);
    for pairs in [false, true] {
        for (name, from, back, want) in [("y", &of_x, false, &y), ("dx", &of_d_y, true, &d_x)] {
            let got = convolve_in(client, dims, [from, &of_taps], [back, pairs], dtype);
            let got = got.expect("it is taken");
            assert_eq!(got.shape, [dims.batch, dims.tokens, dims.channels]);
            assert_close(&what(name), want, &sandbox.get(&got), limit(sandbox.rows));
        }
        let got = tap_gradients_in(client, dims, [&of_x, &of_d_y], pairs, dtype);
        let got = got.expect("it is taken");
        assert_eq!(got.shape, [dims.length, dims.channels]);
        assert_close(&what("dtaps"), &d_taps, &sandbox.get(&got), 2e-6);
    }
}

fn all_are_right<R: Runtime>(sandbox: &Sandbox<'_, R>) {
    for [batch, tokens, channels, length] in [
        [1, 1, 1, 1],
        [2, 16, 3, 16],
        [3, 17, 5, 17],
        [2, 33, 40, 7],
        [1, 50, 2, 18],
        [70, 40, 1, 33],
        [2, 300, 7, 300],
        [3, 48, 64, 32],
        [2, 64, 96, 64],
    ] {
        convolutions_are_right(sandbox, Dims { batch, tokens, channels, length });
    }
}

/// Where units are many they get pairs of tiles.
fn pairs_are_chosen<R: Runtime>(client: &ComputeClient<R>) {
    let of = |batch| pairs(client, batch, 32, 512);
    assert_eq!([of(1), of(1 << 16)], [false, true]);
}

/// Sums of taps by several units each.
fn splits_are_summed<R: Runtime>(client: &ComputeClient<R>) {
    let dims = Dims { batch: 600, tokens: 5, channels: 3, length: 4 };
    convolutions_are_right(&Sandbox { client, rows: Rows::F32 }, dims);
}

fn refusals<R: Runtime>(client: &ComputeClient<R>) {
    let x = client.empty(64);
    let run = |batch, tokens, length| {
        let dims = Dims { batch, tokens, channels: 2, length };
        let forward = convolve(client, dims, &x, &x, false, Rows::F32.dtype()).err();
        let gradient = tap_gradients(client, dims, &x, &x, Rows::F32.dtype()).err();
        assert_eq!(forward, gradient);
        forward
    };
    assert_eq!(run(0, 4, 4), Some(Refusal::Empty { batch: 0, tokens: 2 }));
    for length in [0, 5] {
        assert_eq!(
            run(1, 4, length),
            Some(Refusal::TooLarge { what: "taps", got: length, most: 4 })
        );
    }
}

#[test]
fn long_convolutions_are_right_in_every_type() {
    crate::tests::on_wgpu::with_client(|client| everywhere(client, all_are_right));
}

#[test]
fn gradients_of_taps_are_summed_over_units() {
    crate::tests::on_wgpu::with_client(pairs_are_chosen);
    crate::tests::on_wgpu::with_client(splits_are_summed);
}

#[test]
fn what_cannot_be_convolved_is_refused() {
    crate::tests::on_wgpu::with_client(refusals);
}

#[cfg(feature = "cuda")]
#[test]
fn long_convolutions_are_right_in_every_type_on_cuda() {
    crate::tests::on_cuda::with_client(|client| everywhere(client, all_are_right));
    crate::tests::on_cuda::with_client(splits_are_summed);
}
