//! Products of few rows against f64 sums, and what they keep in shared memory.

use super::*;
use crate::fused::gated_product::GateActivation;
use crate::refusal::F32;
use crate::tests::Rows;
use cubecl::ir::{ElemType, FloatKind};
use linattn_oracle::{Rng, assert_close};

/// Limit on the relative error of rows of 16 bits.
const HALF: f64 = 6e-3;

/// Columns of a matrix, and numbers from one of its rows to the next.
type ColumnsAndStride = (usize, usize);

/// K, the matrices side by side, and whether there is a bias.
const MATRICES: [(usize, &[ColumnsAndStride], bool); 12] = [
    (1, &[(1, 1)], true),
    (130, &[(37, 37)], true),
    (64, &[(96, 96)], false),
    (2048, &[(512, 512)], false),
    // Rows end in numbers that are not read.
    (200, &[(10, 16)], false),
    // More columns of x than wait in shared memory at once.
    (5000, &[(40, 40)], true),
    // Columns for all multiprocessors, and more a cube, of which the last has fewer.
    (24, &[(13000, 13000)], true),
    // A layer's projections, of which some fill no cube.
    (96, &[(64, 64), (128, 128), (8, 8), (8, 16)], false),
    (50, &[(3, 3), (1000, 1000), (1, 1)], true),
    (33, &[(2, 2); 8], true),
    // Columns for all multiprocessors again, and whole blocks of tensor cores, fewer than a cube has planes.
    (48, &[(13000, 13000)], true),
    (412, &[(24, 32), (4, 8), (72, 72)], true),
];

/// Matrices side by side, by their columns and strides.
type SideBySide<'a> = (&'a [Columns], &'a [Vec<f64>]);

/// `x [W_1 W_2 ..] + b` in f64.
fn truth(inner: usize, x: &[f64], (sizes, weights): SideBySide, bias: Option<&[f64]>) -> Vec<f64> {
    let mut y = vec![];
    for row in x.chunks_exact(inner) {
        let from = y.len();
        for (Columns { count, stride }, weight) in sizes.iter().zip(weights) {
            let mut sums = vec![0.0; *count];
            for (x, w) in row.iter().zip(weight.chunks_exact(*stride)) {
                sums.iter_mut().zip(w).for_each(|(sum, w)| *sum += x * w);
            }
            y.extend(sums);
        }
        let biases = bias.into_iter().flatten();
        y[from..].iter_mut().zip(biases).for_each(|(sum, bias)| *sum += bias);
    }
    y
}

/// Normal numbers that rows of this type hold.
fn drawn(rng: &mut Rng, rows: Rows, n: usize) -> Vec<f64> {
    let mut x: Vec<f64> = (0..n).map(|_| rng.normal()).collect();
    rows.round(&mut x);
    x
}

/// Products of few rows: tiles of every height, alone and several, of every matrix.
fn few_rows_are_right<R: Runtime>(client: &ComputeClient<R>, rows: Rows, limit: f64) {
    for (inner, matrices, biased) in MATRICES {
        let mut rng = Rng::named(inner as u64, "product");
        let mut draw = |n: usize| drawn(&mut rng, rows, n);
        let put = |x: &[f64]| client.create_from_slice(&rows.bytes(x));
        let sizes: Vec<Columns> =
            matrices.iter().map(|&(count, stride)| Columns { count, stride }).collect();
        let mut weights = vec![];
        for &Columns { count, stride } in &sizes {
            let mut weight = draw(inner * stride);
            weight.chunks_exact_mut(stride).for_each(|row| row[count..].fill(f64::NAN));
            weights.push(weight);
        }
        let columns = sizes.iter().map(|size| size.count).sum();
        let bias = biased.then(|| draw(columns));
        let handles: Vec<Handle> = weights.iter().map(|weight| put(weight)).collect();
        let of_weights: Vec<_> = handles.iter().zip(sizes.iter().copied()).collect();
        let of_bias = bias.as_deref().map(put);
        for count in [1, 2, 3, 8, 11, 33, 64, 65, 128] {
            // Only tensor cores take so many.
            let dims = Dims { rows: count, inner };
            if count > MOST_ROWS && check(client, dims, &sizes, rows.dtype()).is_err() {
                continue;
            }
            let x = draw(count * inner);
            let of_x = put(&x);
            let bias_given = of_bias.as_ref();
            let args = Args { x: Input::Rows(&of_x), weights: &of_weights, bias: bias_given };
            let y = product(client, dims, rows.dtype(), args).expect("it fits").y;
            assert_eq!(y.shape, [count, columns]);
            let got = rows.numbers(&client.read_one(y.handle).expect("the kernel ran"));
            let want = truth(inner, &x, (&sizes, &weights), bias.as_deref());
            assert_close(&format!("{rows:?}, {dims:?}, {matrices:?}"), &want, &got, limit);
        }
    }
}

/// Every tiling of tensor cores that this device takes, of rows and columns that fill no tile.
fn tilings_are_right<R: Runtime>(client: &ComputeClient<R>) {
    let (rows, dims) = (Rows::Bf16, Dims { rows: 61, inner: 408 });
    let sizes = [Columns { count: 24, stride: 32 }, Columns { count: 136, stride: 136 }];
    let mut rng = Rng::named(7, "tilings");
    let mut draw = |n: usize| drawn(&mut rng, rows, n);
    let put = |x: &[f64]| client.create_from_slice(&rows.bytes(x));
    let weights: Vec<_> = sizes.iter().map(|size| draw(dims.inner * size.stride)).collect();
    let x = draw(dims.rows * dims.inner);
    let want = truth(dims.inner, &x, (&sizes, &weights), None);
    let (x, weights): (Handle, Vec<Handle>) = (put(&x), weights.iter().map(|w| put(w)).collect());
    let product = Product::new(client, dims, Reading::Rows, &sizes, rows.dtype());
    let Ok(product) = product else { return };
    let unsound = Tiling { rows: 12, width: 4, planes: 8, ahead: 2 };
    assert!(product.clone().tiled(client, unsound).expect("it fits").is_none());
    for rows_of_cube in [8, 16, 32, 64] {
        for (width, planes, ahead) in [(2, 4, 3), (4, 8, 2), (8, 8, 2), (8, 4, 1), (4, 16, 4)] {
            let tiling = Tiling { rows: rows_of_cube, width, planes, ahead };
            let Some(tiled) = product.clone().tiled(client, tiling).expect("it fits") else {
                return;
            };
            let weights: Vec<_> = weights.iter().collect();
            let y = tiled.launch(client, Input::Rows(&x), &weights, None).y;
            let got = rows.numbers(&client.read_one(y.handle).expect("the kernel ran"));
            assert_close(&format!("{tiling:?}"), &want, &got, HALF);
        }
    }
}

/// Rows that a product makes of its inputs: gates times values, and RMS norms of a sum, of a tensor alone and of heads.
fn inputs_are_read<R: Runtime>(client: &ComputeClient<R>, rows: Rows, limit: f64) {
    for (inner, count, heads) in
        [(1, 1, 1), (64, 8, 64), (300, 3, 3), (5000, 2, 8), (2100, 9, 5), (512, 1, 2)]
    {
        let dims = Dims { rows: count, inner };
        let mut rng = Rng::named(inner as u64, "inputs");
        let mut draw = |n: usize| drawn(&mut rng, rows, n);
        let put = |x: &[f64]| client.create_from_slice(&rows.bytes(x));
        let sizes = [Columns { count: 24, stride: 24 }, Columns { count: 16, stride: 16 }];
        let weights = sizes.map(|size| draw(inner * size.count));
        let handles = weights.each_ref().map(|weight| put(weight));
        let of_weights: Vec<_> = handles.iter().zip(sizes).collect();
        let (x, addend) = (draw(count * inner), draw(count * inner));
        let (both, weight) = (draw(2 * count * inner), draw(inner));
        let mut sum: Vec<f64> = x.iter().zip(&addend).map(|(x, addend)| x + addend).collect();
        rows.round(&mut sum);
        let [of_x, of_addend, of_both, of_weight] = [&x, &addend, &both, &weight].map(|x| put(x));
        let epsilon = 1e-2;
        let normal = |addend| Input::Normalized { x: &of_x, addend, weight: &of_weight, epsilon };
        let gated = Input::Gated { both: &of_both, activation: GateActivation::Silu };
        let of_heads = |gate: bool| {
            let gate = gate.then_some((&of_addend, GateActivation::Silu));
            Input::Heads { o: &of_x, gate, weight: &of_weight, epsilon, heads }
        };
        let heads_alone = normalized_rows(&x, &weight[..inner / heads], f64::from(epsilon));
        let gated_heads =
            heads_alone.iter().zip(&addend).map(|(o, gate)| o * silu(*gate)).collect();
        for (input, read) in [
            (gated, gated_rows(inner, &both)),
            (of_heads(true), gated_heads),
            (of_heads(false), heads_alone),
            (normal(Some(&of_addend)), normalized_rows(&sum, &weight, f64::from(epsilon))),
            (normal(None), normalized_rows(&x, &weight, f64::from(epsilon))),
        ] {
            let args = Args { x: input, weights: &of_weights, bias: None };
            let got = product(client, dims, rows.dtype(), args).expect("it fits");
            let name = format!("{rows:?}, {dims:?}, {:?}", input.reading());
            let numbers = |buffer: Buffer| {
                rows.numbers(&client.read_one(buffer.handle).expect("the kernel ran"))
            };
            let want = truth(inner, &read, (&sizes, &weights), None);
            assert_close(&name, &want, &numbers(got.y), limit);
            let added = input.reading() == Reading::Normalized { added: true };
            assert_eq!(got.sum.is_some(), added, "{name}");
            if let Some(got) = got.sum {
                assert_close(&format!("{name}: the sum"), &sum, &numbers(got), 1e-7);
            }
        }
    }
}

/// `silu(gate) value` of gates and values, `[M, 2 K]`.
pub(crate) fn gated_rows(inner: usize, both: &[f64]) -> Vec<f64> {
    let rows = both.chunks_exact(2 * inner).flat_map(|row| {
        let (gates, values) = row.split_at(inner);
        gates.iter().zip(values).map(move |(gate, value)| silu(*gate) * value)
    });
    rows.collect()
}

/// `z sigmoid(z)`.
pub(crate) fn silu(z: f64) -> f64 {
    z / (1.0 + (-z).exp())
}

/// An RMS norm of the rows of `x`, as wide as `weight`.
pub(crate) fn normalized_rows(x: &[f64], weight: &[f64], epsilon: f64) -> Vec<f64> {
    let rows = x.chunks_exact(weight.len()).flat_map(|row| {
        let mean = row.iter().map(|x| x * x).sum::<f64>() / row.len() as f64;
        row.iter().zip(weight).map(move |(x, w)| x * w / (mean + epsilon).sqrt())
    });
    rows.collect()
}

/// The same in 16 bits, where the device has the type.
fn inputs_of_16_bits<R: Runtime>(client: &ComputeClient<R>) {
    let (dims, column) = (Dims { rows: 1, inner: 1 }, Columns { count: 1, stride: 1 });
    for rows in [Rows::F16, Rows::Bf16] {
        if check(client, dims, &[column], rows.dtype()).is_ok() {
            inputs_are_read(client, rows, HALF);
        }
    }
}

/// The same in 16 bits, where the device has the type.
fn few_half_rows<R: Runtime>(client: &ComputeClient<R>) {
    let (dims, column) = (Dims { rows: 1, inner: 1 }, Columns { count: 1, stride: 1 });
    for rows in [Rows::F16, Rows::Bf16] {
        match check(client, dims, &[column], rows.dtype()) {
            Ok(()) => few_rows_are_right(client, rows, HALF),
            Err(why) => assert_eq!(why, Refusal::Type { got: rows.dtype() }),
        }
    }
}

/// Products that the kernel for few rows is not for.
fn refused_products<R: Runtime>(client: &ComputeClient<R>) {
    let (good, eight) = (Dims { rows: 1, inner: 8 }, Columns { count: 8, stride: 8 });
    let f64 = StorageType::Scalar(ElemType::Float(FloatKind::F64));
    let far = Columns { count: 8, stride: 1 << 13 };
    let (one, none) = (vec![eight], Columns { count: 0, ..eight });
    for (dims, matrices, dtype, want) in [
        (Dims { rows: 0, ..good }, &one, F32, "[0, 8] times [8, 8]; rows have to be 1 to 64"),
        (Dims { rows: 65, ..good }, &one, F32, "[65, 8] times [8, 8]"),
        (Dims { inner: 0, ..good }, &one, F32, "the rest at least 1"),
        (Dims { inner: 1 << 20, ..good }, &vec![far], F32, "numbers in a tensor"),
        (good, &vec![], F32, "the rest at least 1"),
        (good, &vec![eight, none], F32, "the rest at least 1"),
        (good, &vec![eight; 9], F32, "matrices side by side"),
        (good, &one, f64, "the kernels take f32"),
    ] {
        let got = check(client, dims, matrices, dtype).expect_err("refused").to_string();
        assert!(got.contains(want), "{got:?} does not say {want:?}");
    }
    let (dims, many) = (Dims { inner: 65, ..good }, Reading::Heads { heads: 65, gate: None });
    let got = Product::new(client, dims, many, &one, F32).expect_err("refused").to_string();
    assert_eq!(got, "heads of an input: 65; the most on this device is 64");
}

/// Columns that no grid of this device counts.
fn too_many_columns_are_refused<R: Runtime>(client: &ComputeClient<R>) {
    let columns = u32::MAX as usize;
    let (dims, matrix) =
        (Dims { rows: 1, inner: 1 }, [Columns { count: columns, stride: columns }]);
    let split = Split::new(client, dims, Reading::Rows, &matrix, F32);
    let most = client.properties().hardware.max_cube_count.0 as usize;
    let got = cubes_across(&matrix, split.columns());
    let want = match got > most {
        true => Err(Refusal::TooLarge {
            what: "columns",
            got: got * split.columns(),
            most: most * split.columns(),
        }),
        false => Ok(()),
    };
    assert_eq!(check(client, dims, &matrix, F32), want);
}

#[test]
fn shared_memory_holds_what_the_kernel_puts_there() {
    for (tile, ahead) in [(1, 16), (2, 16), (4, 8), (8, 8)] {
        for width in [1, 2, 4, 8] {
            for lanes in [2, 4, 8, 16, 32] {
                let (source, numbers, matrices) = ("", 0, 1);
                let split = Split {
                    source,
                    tile,
                    width,
                    lanes,
                    ahead,
                    numbers,
                    matrices,
                    biased: false,
                    reading: Reading::Rows,
                    planes: false,
                };
                for bytes in [16 << 10, 32 << 10, 48 << 10, 227 << 10] {
                    let split = split.in_memory(bytes);
                    assert!(split.shared_memory() <= bytes, "{split:?}");
                    // Only so many groups of narrow cubes do not fit, and the rule leaves these out.
                    if lanes == 2 && split.batches() == 0 {
                        continue;
                    }
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

#[test]
fn tilings_on_an_h200_are_those_that_were_fastest() {
    for (rows, columns, want) in [
        (3, 2048, [8, 4, 16, 4]),
        (8, 5632, [8, 8, 16, 2]),
        (16, 32_000, [16, 8, 16, 2]),
        (64, 2048, [32, 4, 16, 4]),
        (64, 4096, [32, 8, 16, 1]),
        (64, 5632, [32, 8, 8, 2]),
        (128, 2 * 2048, [32, 8, 16, 1]),
        (33, 32_000, [64, 8, 8, 2]),
    ] {
        let found = Tiling::wide(rows, columns / 64, 132).unwrap_or_else(|| Tiling::narrow(rows));
        let [rows_of_cube, width, planes, ahead] = want;
        let want = Tiling { rows: rows_of_cube, width, planes, ahead };
        assert_eq!(found, want, "{rows} rows, {columns} columns");
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
        fn inputs_of_few_rows_are_read() {
            with_client(|client| inputs_are_read(client, Rows::F32, 1e-6));
            with_client(inputs_of_16_bits);
        }

        #[test]
        fn products_of_few_rows_of_16_bits_are_right_or_refused() {
            with_client(few_half_rows);
        }

        #[test]
        fn tilings_of_few_rows_are_right() {
            with_client(tilings_are_right);
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
