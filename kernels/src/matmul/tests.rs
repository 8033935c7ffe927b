//! Products against f64, and the table's tilings.

use super::*;

const BF16: StorageType = StorageType::Scalar(ElemType::Float(FloatKind::BF16));

/// A product `[m, k] x [k, n]` whose sides lie as `y = x W`, `dx = dy W^T` or `dW = x^T dy`.
fn product([m, k, n]: [usize; 3], along_k: [bool; 2], input: StorageType) -> Product {
    let stride = |along_k: bool, outer: usize| if along_k { k } else { outer };
    let lhs = Layout { stride: stride(along_k[0], m), along_k: along_k[0] };
    let rhs = Layout { stride: stride(along_k[1], n), along_k: along_k[1] };
    Product { m, n, k, lhs, rhs, input, output: input }
}

const LAYOUTS: [[bool; 2]; 3] = [[true, false], [true, true], [false, false]];
const SHAPES: [[usize; 3]; 6] = [
    [65_536, 128, 520],
    [16_384, 128, 8192],
    [16_384, 8192, 128],
    [128, 65_536, 704],
    [2048, 2048, 2048],
    [8, 16, 8],
];

#[test]
fn tilings_of_the_table_fit() {
    for shape in SHAPES {
        for layout in LAYOUTS {
            for input in [BF16, F32] {
                let product = product(shape, layout, input);
                for memory in [99 << 10, 227 << 10] {
                    let tiling = Tiling::choose(&product, 132, memory).expect("one fits");
                    let form = product.form(tiling);
                    assert!(form.shared_memory() <= memory, "{product:?}");
                    assert_eq!(form.plane_rows() % 16 + form.plane_columns() % 16, 0, "{tiling:?}");
                    for side in [form.lhs_side(), form.rhs_side()] {
                        let across = side.columns / side.piece;
                        assert_eq!(side.units % across, 0, "{tiling:?}");
                        assert_eq!(side.rows % (side.units / across), 0, "{tiling:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn a_device_without_shared_memory_has_no_tiling() {
    assert_eq!(Tiling::choose(&product([64; 3], LAYOUTS[0], BF16), 132, 1 << 10), None);
}

#[test]
fn lanes_meet_no_bank_conflicts() {
    for tiling in TABLE {
        for layout in LAYOUTS {
            for input in [BF16, F32] {
                let size = input.size();
                let tiling = Tiling { k: tiling.k / size, ..tiling };
                let form = product([256; 3], layout, input).form(tiling);
                for side in [form.lhs_side(), form.rhs_side()] {
                    let bank = |place: usize| place * size / 4 % 32;
                    // `ldmatrix` reads 8 stored rows of 16 bytes at once; single loads are of 8 rows of A
                    // or columns of B, and 4 numbers along K.
                    let mut banks: Vec<usize> = match form.half {
                        true => (0..8).map(|row| bank(row * side.stride) / 4).collect(),
                        false => {
                            (0..32).map(|lane| bank(side.offset(lane / 4, lane % 4))).collect()
                        }
                    };
                    let lanes = banks.len();
                    banks.sort_unstable();
                    banks.dedup();
                    assert_eq!(banks.len(), lanes, "{side:?}");
                }
            }
        }
    }
}

#[test]
fn slices_cover_few_tiles_and_long_sums_alone() {
    let slices = |shape| {
        let product = product(shape, LAYOUTS[2], BF16);
        let tiling = Tiling::choose(&product, 132, 227 << 10).expect("one fits");
        product.slices(tiling, 132)
    };
    assert_eq!(slices([16_384, 128, 8192]), 1);
    assert!(slices([128, 65_536, 520]) >= 16);
}

#[test]
fn odd_sizes_are_left_to_others() {
    let taken = |shape| product(shape, LAYOUTS[0], BF16).aligned();
    assert!(taken([3, 16, 8]));
    assert!(!taken([3, 12, 8]));
    assert!(!taken([3, 16, 12]));
    assert!(!product([12, 16, 8], LAYOUTS[2], BF16).aligned());
}

#[test]
fn a_device_without_tensor_cores_is_left_to_others() {
    crate::tests::on_wgpu::with_client(|client| {
        let x = client.create_from_slice(&vec![0; 4 * 64 * 64]);
        let product = product([64; 3], LAYOUTS[0], F32);
        let y = matmul(client, &x, &x, product).expect("no refusal");
        assert_eq!(y.is_some(), supports(client, F32));
    });
}

#[cfg(feature = "cuda")]
mod on_cuda {
    use super::*;
    use crate::tests::on_cuda::with_client;
    use cubecl::cuda::CudaRuntime;
    use half::bf16;

    /// Numbers in [-1, 1) that bf16 and TF32 hold exactly.
    fn numbers(count: usize, seed: u64) -> Vec<f32> {
        let mut state = seed;
        let mut random = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            bf16::from_f32((state >> 40) as f32 / (1_u64 << 23) as f32 - 1.0).to_f32()
        };
        (0..count).map(|_| random()).collect()
    }

    fn bytes(x: &[f32], dtype: StorageType) -> Vec<u8> {
        match dtype.size() {
            2 => x.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect(),
            _ => x.iter().flat_map(|x| x.to_le_bytes()).collect(),
        }
    }

    fn read(bytes: &[u8], dtype: StorageType) -> Vec<f64> {
        let size = dtype.size();
        let number = |b: &[u8]| match size {
            2 => bf16::from_le_bytes([b[0], b[1]]).to_f64(),
            _ => f64::from(f32::from_le_bytes([b[0], b[1], b[2], b[3]])),
        };
        bytes.chunks_exact(size).map(number).collect()
    }

    fn is_right(client: &ComputeClient<CudaRuntime>, product: Product, slices: usize) {
        let Product { m, n, k, lhs, rhs, input, output } = product;
        let (a, b) = (numbers(m * k, 1), numbers(k * n, 2));
        let handle = |x: &[f32]| client.create_from_slice(&bytes(x, input));
        let (on_a, on_b) = (handle(&a), handle(&b));
        let at = |layout: Layout, outer: usize, inner: usize| match layout.along_k {
            true => outer * layout.stride + inner,
            false => inner * layout.stride + outer,
        };
        for tiling in TABLE {
            let tiling = Tiling { k: tiling.k / input.size(), ..tiling };
            let y = matmul_with(client, &on_a, &on_b, product, tiling, slices);
            let y = y.expect("no refusal").expect("it is taken");
            let got = read(&client.read_one(y.handle.clone()).expect("it is read"), output);
            assert_eq!(got.len(), m * n);
            for (place, got) in got.iter().enumerate() {
                let (row, column) = (place / n, place % n);
                let term = |i| f64::from(a[at(lhs, row, i)]) * f64::from(b[at(rhs, column, i)]);
                let want: f64 = (0..k).map(term).sum();
                let limit = if output.size() == 2 { 8e-3 } else { 1e-5 };
                let off = (got - want).abs();
                let scale = want.abs().max((k as f64).sqrt());
                assert!(off <= limit * scale, "{product:?} {tiling:?} {place}: {got}, {want}");
            }
        }
    }

    #[test]
    fn products_are_right() {
        with_client(|client| {
            for layout in LAYOUTS {
                for input in [BF16, F32] {
                    for shape in [[8, 16, 8], [136, 264, 72], [264, 40, 520], [64, 1024, 328]] {
                        let wide = product(shape, layout, input);
                        is_right(client, wide, 1);
                        is_right(client, Product { output: F32, ..wide }, 1);
                        is_right(client, wide, 4);
                    }
                }
            }
        });
    }

    #[test]
    fn the_same_bits_come_twice() {
        with_client(|client| {
            let product = product([128, 4096, 520], LAYOUTS[2], BF16);
            let handle =
                |count, seed| client.create_from_slice(&bytes(&numbers(count, seed), BF16));
            let (a, b) = (handle(128 * 4096, 1), handle(4096 * 520, 2));
            let run = || {
                let y = matmul(client, &a, &b, product).expect("no refusal").expect("it is taken");
                client.read_one(y.handle).expect("it is read").to_vec()
            };
            assert_eq!(run(), run());
        });
    }
}
