//! Products by quantized matrices, and these as floats, against f64.

use super::*;
use crate::few_rows::tests::{gated_rows, normalized_rows, silu};
use crate::fused::gated_product::GateActivation;
use crate::refusal::F32;
use crate::tests::Rows;
use cubecl::ir::{ElemType, FloatKind, IntKind};
use linattn_oracle::{Rng, assert_close};

/// Limit on the relative error of rows of 16 bits.
const HALF: f64 = 6e-3;

/// K, rows of the matrices side by side, and rows of x; a compiler on a processor takes a second for each that is new.
type Case = (usize, &'static [usize], &'static [usize]);

const CASES: [Case; 9] = [
    (32, &[1], &[8]),
    (2080, &[130], &[1, 3, 8]),
    // More groups than wait in shared memory at once.
    (4160, &[40], &[1, 8]),
    (8256, &[40], &[1]),
    // Rows for all multiprocessors.
    (64, &[7000], &[1]),
    // A layer's projections, of which some fill no cube.
    (96, &[64, 128, 3], &[1, 3]),
    (32, &[2, 2, 2], &[1]),
    // Rows that end within a group.
    (1, &[5], &[1]),
    (1367, &[70, 33], &[1, 8]),
];
/// For types of 16 bits, whose products differ from those of f32 only where x is read and y written.
const HALF_CASES: [Case; 2] = [(2080, &[130], &[1, 8]), (1367, &[70, 33], &[3])];

/// A matrix as it is drawn: whole numbers, zeros behind the last of each row, and a scale for each group.
struct Drawn {
    inner: usize,
    values: Vec<i8>,
    scales: Vec<f32>,
}

impl Drawn {
    fn new(rng: &mut Rng, bits: Bits, [rows, inner]: [usize; 2]) -> Self {
        let largest = (1 << (bits.count() - 1)) - 1;
        let mut values = vec![];
        for _ in 0..rows {
            let whole = |x: f64| (x * f64::from(2 * largest + 1)) as i32 - largest;
            values.extend((0..inner).map(|_| whole(rng.uniform()) as i8));
            values.resize(values.len().next_multiple_of(GROUP), 0);
        }
        let scales = (0..values.len() / GROUP).map(|_| rng.normal() as f32).collect();
        Self { inner, values, scales }
    }

    /// The numbers that it stands for.
    fn numbers(&self) -> Vec<f64> {
        let of = |(i, &q): (usize, &i8)| f64::from(self.scales[i / GROUP]) * f64::from(q);
        let all: Vec<f64> = self.values.iter().enumerate().map(of).collect();
        let rows = all.chunks_exact(self.inner.next_multiple_of(GROUP));
        rows.flat_map(|row| &row[..self.inner]).copied().collect()
    }

    /// The words of the device, as the module says.
    fn words(&self, bits: Bits) -> Vec<u8> {
        let nibbles = |group: &[i8]| -> Vec<u8> {
            let (low, high) = group.split_at(GROUP / 2);
            let pairs = low.iter().zip(high);
            pairs.map(|(low, high)| (low + 8) as u8 | ((high + 8) as u8) << 4).collect()
        };
        match bits {
            Bits::Eight => self.values.iter().map(|&q| q as u8).collect(),
            Bits::Four => self.values.chunks_exact(GROUP).flat_map(nibbles).collect(),
        }
    }
}

/// `x W^T` in f64, of matrices side by side.
fn truth(inner: usize, x: &[f64], weights: &[Vec<f64>]) -> Vec<f64> {
    let rows = x.chunks_exact(inner);
    let dot = |x: &[f64], w: &[f64]| x.iter().zip(w).map(|(x, w)| x * w).sum::<f64>();
    rows.flat_map(|x| {
        weights.iter().flat_map(move |weight| weight.chunks_exact(inner).map(move |w| dot(x, w)))
    })
    .collect()
}

fn quantized_products_are_right<R: Runtime>(
    client: &ComputeClient<R>,
    (rows, limit): (Rows, f64),
    cases: &[Case],
) {
    for bits in [Bits::Four, Bits::Eight] {
        for &(inner, sizes, counts) in cases {
            let mut rng = Rng::named(inner as u64, "quantized");
            let drawn: Vec<Drawn> =
                sizes.iter().map(|&rows| Drawn::new(&mut rng, bits, [rows, inner])).collect();
            let handles: Vec<[Handle; 2]> = drawn
                .iter()
                .map(|matrix| {
                    let scales = matrix.scales.iter().flat_map(|x| x.to_ne_bytes());
                    [matrix.words(bits), scales.collect()].map(|x| client.create_from_slice(&x))
                })
                .collect();
            let matrices: Vec<Matrix> = handles
                .iter()
                .zip(sizes)
                .map(|([values, scales], &rows)| Matrix { values, scales, rows })
                .collect();
            let numbers: Vec<Vec<f64>> = drawn.iter().map(Drawn::numbers).collect();
            for &count in counts {
                let mut x: Vec<f64> = (0..count * inner).map(|_| rng.normal()).collect();
                rows.round(&mut x);
                let of_x = client.create_from_slice(&rows.bytes(&x));
                let dims = Dims { rows: count, inner };
                // Alone, and with narrow matrices of floats behind them, whose rows are columns in `truth`.
                let mut narrow: Vec<Vec<f64>> = vec![];
                let behind = if inner > 1000 { &[&[][..], &[5, 16]][..] } else { &[&[][..]] };
                for &columns in behind {
                    for width in columns {
                        let numbers = (0..inner * width).map(|_| rng.normal());
                        let mut floats: Vec<f64> = numbers.collect();
                        rows.round(&mut floats);
                        narrow.push(floats);
                    }
                    // Rows lie three numbers further apart than they are long.
                    let apart = |(x, &width): (&Vec<f64>, &usize)| {
                        let rows_of_x = x.chunks_exact(width);
                        let all = rows_of_x.flat_map(|row| row.iter().copied().chain([9.0; 3]));
                        client.create_from_slice(&rows.bytes(&all.collect::<Vec<_>>()))
                    };
                    let handles: Vec<Handle> = narrow.iter().zip(columns).map(apart).collect();
                    let floats: Vec<Floats> = handles
                        .iter()
                        .zip(columns)
                        .map(|(numbers, &count)| Floats {
                            numbers,
                            columns: Columns { count, stride: count + 3 },
                        })
                        .collect();
                    let given = Matrices { bits, quantized: &matrices, floats: &floats };
                    let y = product(client, dims, rows.dtype(), Input::Rows(&of_x), given);
                    let y = y.expect("it fits").y;
                    assert_eq!(y.shape, [count, given.form().all_columns()]);
                    let got = rows.numbers(&client.read_one(y.handle).expect("the kernel ran"));
                    let turned = narrow.iter().zip(columns).map(|(floats, &columns)| {
                        let column = |c: usize| floats.iter().skip(c).step_by(columns);
                        (0..columns).flat_map(column).copied().collect()
                    });
                    let all: Vec<Vec<f64>> = numbers.iter().cloned().chain(turned).collect();
                    let name = format!("{bits:?}, {rows:?}, {dims:?}, {sizes:?}, {columns:?}");
                    assert_close(&name, &truth(inner, &x, &all), &got, limit);
                }
            }
            for (matrix, want) in matrices.iter().zip(&numbers) {
                let name = format!("{bits:?}, {inner}, {sizes:?}");
                let check = |asked: Option<super::Rows<'_>>, want: &[f64]| {
                    let floats = dequantize(client, inner, rows.dtype(), bits, *matrix, asked);
                    let floats = floats.expect("it fits");
                    assert_eq!(floats.shape, [want.len() / inner, inner]);
                    let got = client.read_one(floats.handle).expect("the kernel ran");
                    assert_close(&name, want, &rows.numbers(&got), limit);
                };
                check(None, want);
                // The last row, the first, one past the last and one before the first.
                let last = matrix.rows as i32 - 1;
                let ids = [last, 0, last + 7, -1].map(i32::to_ne_bytes);
                let ids = client.create_from_slice(ids.as_flattened());
                let dtype = StorageType::Scalar(ElemType::Int(IntKind::I32));
                let (ends, begins) = (&want[want.len() - inner..], &want[..inner]);
                check(
                    Some(super::Rows { ids: &ids, count: 4, dtype }),
                    &[ends, begins, ends, ends].concat(),
                );
            }
        }
    }
}

/// Rows that a product makes of its inputs.
fn inputs_are_read<R: Runtime>(client: &ComputeClient<R>) {
    for (inner, count, heads) in [(32, 1, 4), (4160, 2, 5), (96, 8, 1), (45, 1, 9)] {
        let mut rng = Rng::named(inner as u64, "quantized inputs");
        let drawn = Drawn::new(&mut rng, Bits::Four, [70, inner]);
        let put = |x: &[f64]| client.create_from_slice(&Rows::F32.bytes(x));
        let scales: Vec<u8> = drawn.scales.iter().flat_map(|x| x.to_ne_bytes()).collect();
        let [values, scales] =
            [drawn.words(Bits::Four), scales].map(|x| client.create_from_slice(&x));
        let matrix = Matrix { values: &values, scales: &scales, rows: 70 };
        let mut draw = |n: usize| {
            let mut x: Vec<f64> = (0..n).map(|_| rng.normal()).collect();
            Rows::F32.round(&mut x);
            x
        };
        let (x, addend) = (draw(count * inner), draw(count * inner));
        let (both, weight) = (draw(2 * count * inner), draw(inner));
        let sum: Vec<f64> = x.iter().zip(&addend).map(|(x, addend)| x + addend).collect();
        let [of_x, of_addend, of_both, of_weight] = [&x, &addend, &both, &weight].map(|x| put(x));
        let (addend_given, weight_given, epsilon) = (Some(&of_addend), &of_weight, 1e-2);
        let normal =
            Input::Normalized { x: &of_x, addend: addend_given, weight: weight_given, epsilon };
        let gated = Input::Gated { both: &of_both, activation: GateActivation::Silu };
        let gate = addend_given.map(|gate| (gate, GateActivation::Silu));
        let heads_given = Input::Heads { o: &of_x, gate, weight: weight_given, epsilon, heads };
        let of_heads = normalized_rows(&x, &weight[..inner / heads], f64::from(epsilon));
        let of_heads = of_heads.iter().zip(&addend).map(|(o, gate)| o * silu(*gate)).collect();
        for (input, read) in [
            (gated, gated_rows(inner, &both)),
            (heads_given, of_heads),
            (normal, normalized_rows(&sum, &weight, f64::from(epsilon))),
        ] {
            let dims = Dims { rows: count, inner };
            let given = Matrices { bits: Bits::Four, quantized: &[matrix], floats: &[] };
            let got = product(client, dims, F32, input, given).expect("it fits");
            let numbers = |buffer: Buffer| {
                Rows::F32.numbers(&client.read_one(buffer.handle).expect("the kernel ran"))
            };
            let want = truth(inner, &read, &[drawn.numbers()]);
            let name = format!("{dims:?}, {:?}", input.reading());
            assert_close(&name, &want, &numbers(got.y), 1e-6);
            let added = input.reading() == Reading::Normalized { added: true };
            assert_eq!(got.sum.is_some(), added, "{name}");
            got.sum.into_iter().for_each(|got| assert_close(&name, &sum, &numbers(got), 1e-7));
        }
    }
}

/// The same in 16 bits, where the device has the type.
fn quantized_half_rows<R: Runtime>(client: &ComputeClient<R>) {
    for rows in [Rows::F16, Rows::Bf16] {
        let form = Form { bits: Bits::Eight, rows: vec![1], floats: vec![] };
        match check(client, Dims { rows: 1, inner: GROUP }, form, rows.dtype()) {
            Ok(()) => quantized_products_are_right(client, (rows, HALF), &HALF_CASES),
            Err(why) => assert_eq!(why, Refusal::Type { got: rows.dtype() }),
        }
    }
}

/// Products that the kernel is not for.
fn refused_products<R: Runtime>(client: &ComputeClient<R>) {
    let good = Dims { rows: 1, inner: 64 };
    let f64 = StorageType::Scalar(ElemType::Float(FloatKind::F64));
    for (dims, rows, dtype, want) in [
        (Dims { rows: 0, ..good }, &[8][..], F32, "[0, 64] times [64, 8]; rows have to be 1 to 8"),
        (Dims { rows: 9, ..good }, &[8], F32, "[9, 64] times [64, 8]"),
        (Dims { inner: 0, ..good }, &[8], F32, "the rest at least 1"),
        (good, &[1 << 26], F32, "numbers in a tensor"),
        (good, &[], F32, "the rest at least 1"),
        (good, &[8, 0], F32, "the rest at least 1"),
        (good, &[8; 9], F32, "matrices side by side"),
        (good, &[8], f64, "the kernels take f32"),
    ] {
        let form = Form { bits: Bits::Four, rows: rows.to_vec(), floats: vec![] };
        let got = check(client, dims, form, dtype).expect_err("refused").to_string();
        assert!(got.contains(want), "{got:?} does not say {want:?}");
    }
    for (columns, want) in [
        (&[8, 0][..], "the rest at least 1"),
        (&[65], "columns of a matrix of floats"),
        (&[1; 8], "matrices side by side"),
    ] {
        let floats = columns.iter().map(|&count| Columns { count, stride: count });
        let form = Form { bits: Bits::Four, rows: vec![8], floats: floats.collect() };
        let got = check(client, good, form, F32).expect_err("refused").to_string();
        assert!(got.contains(want), "{got:?} does not say {want:?}");
    }
}

/// Every way to deal a product out gives the same numbers.
fn every_deal_is_right<R: Runtime>(client: &ComputeClient<R>) {
    let [rows, inner] = [77, 2100];
    for bits in [Bits::Four, Bits::Eight] {
        let mut rng = Rng::named(5, "deals");
        let drawn = Drawn::new(&mut rng, bits, [rows, inner]);
        let scales: Vec<u8> = drawn.scales.iter().flat_map(|x| x.to_ne_bytes()).collect();
        let [values, scales] = [drawn.words(bits), scales].map(|x| client.create_from_slice(&x));
        let matrix = Matrix { values: &values, scales: &scales, rows };
        let mut x: Vec<f64> = (0..inner).map(|_| rng.normal()).collect();
        Rows::F32.round(&mut x);
        let of_x = client.create_from_slice(&Rows::F32.bytes(&x));
        let want = truth(inner, &x, &[drawn.numbers()]);
        let dims = Dims { rows: 1, inner };
        let form = Form { bits, rows: vec![rows], floats: vec![] };
        let product = Product::new(client, dims, Reading::Rows, form, F32);
        let product = product.expect("it fits");
        for deal in [[16, 1, 1], [16, 2, 2], [32, 2, 4], [64, 4, 2], [128, 8, 1], [256, 1, 1]] {
            let name = format!("{bits:?}, {deal:?}");
            let Some(product) = product.clone().dealt(deal) else {
                assert_eq!(deal[0], 256, "{name}: there is room");
                continue;
            };
            let given = Matrices { bits, quantized: &[matrix], floats: &[] };
            let y = product.launch(client, Input::Rows(&of_x), given).y.handle;
            let got = Rows::F32.numbers(&client.read_one(y).expect("the kernel ran"));
            assert_close(&name, &want, &got, 1e-6);
        }
    }
}

#[test]
fn every_split_that_is_chosen_fits() {
    for (bits, tile) in [(Bits::Four, 1), (Bits::Eight, 2), (Bits::Four, 4), (Bits::Eight, 8)] {
        for (room, padded) in [(NUMBERS, false), (NUMBERS, true), (MORE_NUMBERS, true)] {
            let split = Split {
                source: "",
                bits,
                tile,
                lanes: 16,
                deep: [2, 4, 2, 1][tile.ilog2() as usize],
                ahead: 1,
                room,
                padded,
                planes: false,
                matrices: 1,
                floats: 0,
                reading: Reading::Rows,
            };
            for most in (0..9).map(|power| 1 << power).filter(|most| *most <= split.span()) {
                for lanes in [16, 32, 64, 128] {
                    let split = split.in_lanes(lanes, most);
                    // No rule takes more lanes than groups, but for the fewest.
                    assert!(lanes > most.max(16) || split.fits(), "{split:?}");
                }
            }
        }
    }
}

/// The tests of one device, whose client `with_client` has.
macro_rules! each_kernel {
    () => {
        #[test]
        fn products_by_quantized_matrices_are_right() {
            with_client(|client| quantized_products_are_right(client, (Rows::F32, 1e-6), &CASES));
        }

        #[test]
        fn every_deal_of_a_quantized_product_is_right() {
            with_client(every_deal_is_right);
        }

        #[test]
        fn inputs_of_quantized_products_are_read() {
            with_client(inputs_are_read);
        }

        #[test]
        fn products_of_16_bits_by_quantized_matrices_are_right_or_refused() {
            with_client(quantized_half_rows);
        }

        #[test]
        fn what_does_not_fit_quantized_matrices_is_refused() {
            with_client(refused_products);
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
