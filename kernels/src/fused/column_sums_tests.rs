//! Sums of columns against f64.

use super::*;
use crate::fused::sandbox::{Sandbox, everywhere};
use crate::tests::Rows;
use linattn_oracle::assert_close;

const SUMS: f64 = 1e-5;
const HALF: f64 = 8e-3;

fn truth(x: &[f64], columns: usize) -> Vec<f64> {
    let mut y = vec![0.0; columns];
    for row in x.chunks_exact(columns) {
        y.iter_mut().zip(row).for_each(|(y, x)| *y += x);
    }
    y
}

/// Rows and columns: one launch and two, all widths of vectors, one lane and many.
const SIZES: [[usize; 2]; 12] = [
    [1, 1],
    [3, 5],
    [33, 300],
    [2, 1026],
    [700, 6],
    [2000, 3],
    [9000, 4],
    [2100, 64],
    [601, 37],
    [40, 33_000],
    [3, 70_001],
    [2600, 130],
];

fn sums_are_right<R: Runtime>(sandbox: &Sandbox<'_, R>, rows: usize, columns: usize, to: Rows) {
    let x = sandbox.draw("x", rows * columns, sandbox.rows);
    let on_x = sandbox.put(&x, sandbox.rows);
    let [y, again] = [(); 2].map(|()| {
        column_sums(sandbox.client, &on_x, rows, columns, sandbox.rows.dtype(), to.dtype())
            .expect("it is taken")
    });
    let what = format!("[{rows}, {columns}], {:?} to {to:?}", sandbox.rows);
    assert_eq!((&y.shape, y.dtype), (&vec![columns], to.dtype()), "{what}");
    let limit = if to == Rows::F32 { SUMS } else { HALF };
    let got = sandbox.get(&y);
    assert_close(&what, &truth(&x, columns), &got, limit);
    assert_eq!(got, sandbox.get(&again), "{what}: the same bits");
}

fn parts_are_right<R: Runtime>(sandbox: &Sandbox<'_, R>) {
    for (rows, [first, second]) in [(5, [12, 12]), (600, [7, 7]), (33, [4, 300])] {
        let columns = first + second;
        let x = sandbox.draw("x", rows * columns, Rows::F32);
        let on_x = sandbox.put(&x, Rows::F32);
        let to = sandbox.rows.dtype();
        let y = column_sums_in_two(sandbox.client, &on_x, rows, [first, second], to);
        let [a, b] = y.expect("it is taken");
        let limit = if sandbox.rows == Rows::F32 { SUMS } else { HALF };
        let got = [sandbox.get(&a), sandbox.get(&b)].concat();
        assert_close(&format!("{rows}, {first} and {second}"), &truth(&x, columns), &got, limit);
        let y = column_sums_at_once(sandbox.client, &on_x, rows, columns, to).expect("it is taken");
        assert_close("at once", &truth(&x, columns), &sandbox.get(&y), limit);
    }
}

fn every_row_is_in_one_run<R: Runtime>(client: &ComputeClient<R>) {
    let x = client.empty(16);
    let split = |multiprocessors, rows, columns, width, dtype: Rows| {
        let x = Matrix { x: &x, rows, columns, dtype: dtype.dtype(), width };
        Split::new(multiprocessors, &x)
    };
    for multiprocessors in [1, 64, 132] {
        for [rows, columns] in [[1, 1], [65_536, 4], [65_536, 128], [32, 1_000_000], [2048, 1536]] {
            for (width, dtype) in [(1, Rows::F32), (4, Rows::F32), (1, Rows::Bf16)] {
                let split = split(multiprocessors, rows, columns.max(width), width, dtype);
                let Split { lanes, run, runs } = split;
                assert!(lanes.is_power_of_two() && lanes <= UNITS, "{split:?}");
                assert!(run * runs >= rows && run * (runs - 1) < rows, "{split:?}");
                assert!(runs <= MOST_RUNS, "{split:?}");
            }
        }
    }
    let f32 = |rows, columns| split(132, rows, columns, 4, Rows::F32);
    assert_eq!(f32(32, 1_000_000), Split { lanes: 256, run: 32, runs: 1 });
    assert_eq!(f32(2048, 1536), Split { lanes: 4, run: 2048, runs: 1 });
    assert_eq!(f32(65_536, 4), Split { lanes: 1, run: 2048, runs: 32 });
    assert_eq!(f32(65_536, 128), Split { lanes: 32, run: 128, runs: 512 });
    let bf16 = split(132, 2048, 1536, 4, Rows::Bf16);
    assert_eq!(bf16, Split { lanes: 8, run: 2048, runs: 1 });
}

fn refusals<R: Runtime>(client: &ComputeClient<R>) {
    let x = client.empty(16);
    let sums = |rows, columns| column_sums(client, &x, rows, columns, F32, F32).err();
    assert!(matches!(sums(0, 4), Some(Refusal::Empty { .. })));
    assert!(matches!(sums(4, 0), Some(Refusal::Empty { .. })));
    assert!(matches!(sums(1 << 16, 1 << 16), Some(Refusal::TooLarge { .. })));
}

/// The tests of one device, whose client `with_client` has.
macro_rules! each_kernel {
    ($runtime:ty) => {
        #[test]
        fn columns_are_summed() {
            with_client(|client: &ComputeClient<$runtime>| {
                everywhere(client, |sandbox| {
                    let most = if sandbox.rows == Rows::F32 { SIZES.len() } else { 5 };
                    for [rows, columns] in &SIZES[..most] {
                        sums_are_right(sandbox, *rows, *columns, Rows::F32);
                        if sandbox.rows != Rows::F32 {
                            sums_are_right(sandbox, *rows, *columns, sandbox.rows);
                        }
                    }
                });
            });
        }

        #[test]
        fn two_parts_are_summed() {
            with_client(|client: &ComputeClient<$runtime>| everywhere(client, parts_are_right));
        }

        #[test]
        fn runs_have_every_row() {
            with_client(every_row_is_in_one_run::<$runtime>);
        }

        #[test]
        fn what_cannot_be_summed_is_refused() {
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
