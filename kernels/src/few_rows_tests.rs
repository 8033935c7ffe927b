//! Products of few rows against f64 sums, and what they keep in shared memory.

use super::*;
use crate::refusal::F32;
use crate::tests::Rows;
use cubecl::ir::{ElemType, FloatKind};
use linattn_oracle::{Rng, assert_close};

/// Limit on the relative error of rows of 16 bits.
const HALF: f64 = 6e-3;

/// K, N, from one row of W to the next, and whether there is a bias.
const MATRICES: [(usize, usize, usize, bool); 7] = [
    (1, 1, 1, true),
    (130, 37, 37, true),
    (64, 96, 96, false),
    (2048, 512, 512, false),
    // Rows end in numbers that are not read.
    (200, 10, 16, false),
    // More columns of x than wait in shared memory at once.
    (5000, 40, 40, true),
    // Columns for all multiprocessors, and more a cube, of which the last has fewer.
    (24, 13000, 13000, true),
];

/// `x W + b` in f64.
fn truth(dims: Dims, x: &[f64], weight: &[f64], bias: Option<&[f64]>) -> Vec<f64> {
    let mut y = vec![];
    for row in x.chunks_exact(dims.inner) {
        let mut sums = bias.map_or_else(|| vec![0.0; dims.columns], <[f64]>::to_vec);
        for (x, w) in row.iter().zip(weight.chunks_exact(dims.stride)) {
            sums.iter_mut().zip(w).for_each(|(sum, w)| *sum += x * w);
        }
        y.extend(sums);
    }
    y
}

/// Products of few rows: tiles of every height, alone and several, of every matrix.
fn few_rows_are_right<R: Runtime>(client: &ComputeClient<R>, rows: Rows, limit: f64) {
    for (inner, columns, stride, biased) in MATRICES {
        let mut rng = Rng::named(inner as u64, "product");
        let mut draw = |n: usize| {
            let mut x: Vec<f64> = (0..n).map(|_| rng.normal()).collect();
            rows.round(&mut x);
            x
        };
        let put = |x: &[f64]| client.create_from_slice(&rows.bytes(x));
        let mut weight = draw(inner * stride);
        weight.chunks_exact_mut(stride).for_each(|row| row[columns..].fill(f64::NAN));
        let bias = biased.then(|| draw(columns));
        let (of_weight, of_bias) = (put(&weight), bias.as_deref().map(put));
        for count in [1, 2, 3, 8, 33, 64] {
            let x = draw(count * inner);
            let dims = Dims { rows: count, inner, columns, stride };
            let of_x = put(&x);
            let args = Args { x: &of_x, weight: &of_weight, bias: of_bias.as_ref() };
            let y = product(client, dims, rows.dtype(), args).expect("it fits");
            assert_eq!(y.shape, [count, columns]);
            let got = rows.numbers(&client.read_one(y.handle).expect("the kernel ran"));
            let want = truth(dims, &x, &weight, bias.as_deref());
            assert_close(&format!("{rows:?}, {dims:?}"), &want, &got, limit);
        }
    }
}

/// The same in 16 bits, where the device has the type.
fn few_half_rows<R: Runtime>(client: &ComputeClient<R>) {
    let dims = Dims { rows: 1, inner: 1, columns: 1, stride: 1 };
    for rows in [Rows::F16, Rows::Bf16] {
        match check(client, dims, rows.dtype()) {
            Ok(()) => few_rows_are_right(client, rows, HALF),
            Err(why) => assert_eq!(why, Refusal::Type { got: rows.dtype() }),
        }
    }
}

/// Products that the kernel for few rows is not for.
fn refused_products<R: Runtime>(client: &ComputeClient<R>) {
    let good = Dims { rows: 1, inner: 8, columns: 8, stride: 8 };
    let f64 = StorageType::Scalar(ElemType::Float(FloatKind::F64));
    for (dims, dtype, want) in [
        (Dims { rows: 0, ..good }, F32, "[0, 8] times [8, 8]; rows have to be 1 to 64"),
        (Dims { rows: 65, ..good }, F32, "[65, 8] times [8, 8]"),
        (Dims { inner: 0, ..good }, F32, "the rest at least 1"),
        (Dims { inner: 1 << 20, stride: 1 << 13, ..good }, F32, "numbers in a tensor"),
        (good, f64, "the kernels take f32"),
    ] {
        let got = check(client, dims, dtype).expect_err("refused").to_string();
        assert!(got.contains(want), "{got:?} does not say {want:?}");
    }
}

/// Columns that no grid of this device counts.
fn too_many_columns_are_refused<R: Runtime>(client: &ComputeClient<R>) {
    let columns = u32::MAX as usize;
    let dims = Dims { rows: 1, inner: 1, columns, stride: columns };
    let split = Split::new(client, dims, F32, false);
    let cubes = client.properties().hardware.max_cube_count.0 as usize;
    let want = match split.cubes(dims)[0] > cubes {
        true => Err(Refusal::TooLarge {
            what: "columns",
            got: split.cubes(dims)[0] * split.columns(),
            most: cubes * split.columns(),
        }),
        false => Ok(()),
    };
    assert_eq!(check(client, dims, F32), want);
}

#[test]
fn shared_memory_holds_what_the_kernel_puts_there() {
    for (tile, ahead) in [(1, 16), (2, 16), (4, 8), (8, 8)] {
        for width in [1, 2, 4, 8] {
            for lanes in [4, 8, 16, 32] {
                let split =
                    Split { source: "", tile, width, lanes, ahead, numbers: 0, biased: false };
                for bytes in [16 << 10, 32 << 10, 48 << 10, 227 << 10] {
                    let split = split.in_memory(bytes);
                    assert!(split.shared_memory() <= bytes, "{split:?}");
                    assert!(split.batches() > 0, "{split:?}");
                    assert!(tile * split.span() <= split.numbers, "{split:?}: rows of x");
                    let sums = split.joined() * width * split.line();
                    assert!(sums <= split.numbers, "{split:?}: sums");
                    let roomy = bytes >= 4 * tile * width * split.line();
                    assert!(!roomy || split.joined() == tile, "{split:?}: all rows at once");
                }
            }
        }
    }
}

/// The tests of one device, whose client `with_client` has.
macro_rules! each_kernel {
    () => {
        #[test]
        fn products_of_few_rows_are_right() {
            with_client(|client| few_rows_are_right(client, Rows::F32, 1e-6));
        }

        #[test]
        fn products_of_few_rows_of_16_bits_are_right_or_refused() {
            with_client(few_half_rows);
        }

        #[test]
        fn what_does_not_fit_few_rows_is_refused() {
            with_client(|client| {
                refused_products(client);
                too_many_columns_are_refused(client);
            });
        }
    };
}

#[cfg(feature = "cuda")]
mod on_cuda {
    use super::*;
    use crate::tests::on_cuda::with_client;

    each_kernel!();
}

mod on_wgpu {
    use super::*;
    use crate::tests::on_wgpu::with_client;

    each_kernel!();
}
