//! Times products of few rows by the matrices of decoders of width 2048, alone and side by side as layers have them, and
//! holds the first numbers of each to f64 sums.
//!
//! `cargo run --release -p linattn-kernels --features cuda --example few_rows -- cuda`
//! For `vulkan` in place of `cuda` build with `--features vulkan`, for `wgsl` without it.
//!
//! Of one row, matrices of 4 and 8 bits too; of 64 and more, the product for many rows beside it.
//!
//! With `tilings` behind the device, every tiling of tensor cores in place of the one that is chosen; with `units`,
//! every way to deal a matrix out among cubes and units, up to 4 rows.
//!
//! One CSV row a type, matrix, number of rows and tiling. `us` is a queue of calls over matrices that L2 does
//! not hold together, and one wait, divided by the calls: the GPU's microseconds, or the host's where
//! these are more. `gb_s` are the bytes of the matrix over that time.

use cubecl::future::block_on;
use cubecl::ir::{ElemType, FloatKind, StorageType};
use cubecl::prelude::*;
use cubecl::server::Handle;
use cubecl::wgpu::WgpuRuntime;
use half::bf16;
use linattn_kernels::few_rows::{Columns, Dims, Input, Product, Reading, Tiling};
use linattn_kernels::matmul::{self, Layout};
use linattn_kernels::quantized::{self, Bits};
use std::time::Instant;

/// K and N.
const MATRICES: [[usize; 2]; 8] = [
    [2048, 2048],
    [2048, 4096],
    [2048, 5632],
    [2048, 8208],
    [2048, 10_928],
    [5464, 2048],
    [5632, 2048],
    [2048, 32_000],
];
const ROWS: [usize; 6] = [1, 4, 8, 16, 64, 128];
/// Bytes of matrices that calls take in turn.
const ROTATED: usize = 256 << 20;
/// Calls that are timed.
const CALLS: usize = 400;

fn main() {
    let device = std::env::args().nth(1).unwrap_or_else(|| "cuda".to_string());
    println!("type,rows,inner,columns,device,tiling,us,gb_s,error");
    match device.as_str() {
        #[cfg(feature = "cuda")]
        "cuda" => all(&cubecl::cuda::CudaRuntime::client(&Default::default()), &device),
        "vulkan" | "wgsl" => {
            let client = WgpuRuntime::client(&Default::default());
            let wanted = if device == "vulkan" { "wgpu<spirv>" } else { "wgpu<wgsl>" };
            let name = WgpuRuntime::name(&client);
            assert_eq!(name, wanted, "`--features vulkan` is for vulkan, and not for wgsl");
            all(&client, &device);
        }
        other => panic!("no device {other:?} in this build"),
    }
}

fn all<R: Runtime>(client: &ComputeClient<R>, device: &str) {
    for kind in [FloatKind::F32, FloatKind::BF16] {
        for [inner, columns] in MATRICES {
            let matrix = bytes(kind, inner * columns);
            let copies = (ROTATED / matrix.len() + 1).max(2);
            let copies: Vec<Handle> =
                (0..copies).map(|_| client.create_from_slice(&matrix)).collect();
            for rows in ROWS {
                one(client, device, kind, [rows, inner, columns], &copies);
            }
        }
    }
    for bits in [Bits::Four, Bits::Eight] {
        for sizes in MATRICES {
            quantized(client, device, bits, sizes);
        }
    }
}

/// What stands behind the device.
fn asked() -> Option<String> {
    std::env::args().nth(2)
}

/// Products of one row by quantized matrices, of words that are any.
fn quantized<R: Runtime>(client: &ComputeClient<R>, device: &str, bits: Bits, sizes: [usize; 2]) {
    let dtype = StorageType::Scalar(ElemType::Float(FloatKind::F32));
    let [inner, columns] = sizes;
    let groups = inner.div_ceil(quantized::GROUP) * columns;
    let [values, scales] = [groups * 4 * bits.words(), groups * 4];
    let copies = (ROTATED / values + 1).max(2);
    let copies: Vec<[Handle; 2]> = (0..copies)
        .map(|_| [vec![0x5au8; values], vec![0; scales]].map(|x| client.create_from_slice(&x)))
        .collect();
    let x = client.create_from_slice(&bytes(FloatKind::F32, inner));
    let matrix = |n: usize| {
        let [values, scales] = &copies[n % copies.len()];
        quantized::Matrix { values, scales, rows: columns }
    };
    let dims = Dims { rows: 1, inner };
    let form = quantized::Form { bits, rows: vec![columns], floats: vec![] };
    let product = quantized::Product::new(client, dims, Reading::Rows, form, dtype)
        .expect("the device takes it");
    let mut ways = vec![("chosen".to_string(), product.clone())];
    if asked().as_deref() == Some("units") {
        for lanes in [4, 8, 16, 32, 64] {
            for deep in [1, 2, 4] {
                for ahead in [1, 2, 4] {
                    let way = product.clone().dealt([lanes, deep, ahead]);
                    ways.extend(way.map(|way| (format!("{lanes} lanes x {deep} x {ahead}"), way)));
                }
            }
        }
    }
    for (name, way) in ways {
        let us = microseconds(client, copies.len(), |n| {
            let given = quantized::Matrices { bits, quantized: &[matrix(n)], floats: &[] };
            drop(way.launch(client, Input::Rows(&x), given));
        });
        let read = (values + scales) as f64 / us / 1e3;
        println!("{} bits,1,{inner},{columns},{device},{name},{us:.2},{read:.0},", bits.count());
    }
}

fn one<R: Runtime>(
    client: &ComputeClient<R>,
    device: &str,
    kind: FloatKind,
    sizes: [usize; 3],
    copies: &[Handle],
) {
    let dtype = StorageType::Scalar(ElemType::Float(kind));
    let [rows, inner, columns] = sizes;
    let (dims, matrix) = (Dims { rows, inner }, Columns { count: columns, stride: columns });
    let row = format!("{kind:?},{rows},{inner},{columns},{device}");
    let product = match Product::new(client, dims, Reading::Rows, &[matrix], dtype) {
        Ok(product) => product,
        Err(why) => {
            println!("{row},,refused: {why}");
            return;
        }
    };
    match asked().as_deref() {
        Some("tilings") => {}
        Some("units") if rows <= 4 => {
            for lanes in [2, 4, 8, 16, 32] {
                for ahead in [4, 8, 16] {
                    let Some(way) = product.clone().by_units(client, lanes, ahead) else {
                        continue;
                    };
                    let row = format!("{row},{lanes} lanes x {ahead}");
                    time(client, &row, &way, kind, sizes, copies);
                }
            }
            return;
        }
        _ => {
            time(client, &format!("{row},chosen"), &product, kind, sizes, copies);
            return by_tiles(client, &format!("{row},matmul"), dtype, sizes, copies);
        }
    }
    for tiling in tilings(rows) {
        if let Ok(Some(product)) = product.clone().tiled(client, tiling) {
            let Tiling { rows, width, planes, ahead } = tiling;
            let row = format!("{row},{rows}x{width}x{planes}x{ahead}");
            time(client, &row, &product, kind, sizes, copies);
        }
    }
}

/// Tilings of tensor cores for so many rows, of 8 at least.
fn tilings(rows: usize) -> Vec<Tiling> {
    let most = if rows < 8 { return vec![] } else { rows.next_power_of_two().min(64) };
    let mut tilings = vec![];
    for rows in [most, most / 2].into_iter().filter(|rows| *rows >= 8) {
        for width in [4, 8] {
            for planes in [8, 16] {
                tilings.extend([1, 2, 4].map(|ahead| Tiling { rows, width, planes, ahead }));
            }
        }
    }
    tilings
}

/// One row of the table.
fn time<R: Runtime>(
    client: &ComputeClient<R>,
    row: &str,
    product: &Product,
    kind: FloatKind,
    sizes: [usize; 3],
    copies: &[Handle],
) {
    let [rows, inner, columns] = sizes;
    let x = client.create_from_slice(&bytes(kind, rows * inner));
    let run = |n: usize| {
        let weights = [&copies[n % copies.len()]];
        product.launch(client, Input::Rows(&x), &weights, None).y.handle
    };
    let y = client.read_one(run(0)).expect("the kernel ran");
    let error = error(kind, sizes, &y);
    let us = microseconds(client, copies.len(), |n| drop(run(n)));
    let size = if kind == FloatKind::F32 { 4 } else { 2 };
    let read = (inner * columns * size) as f64 / us / 1e3;
    println!("{row},{us:.2},{read:.0},{error:.1e}");
}

/// One row of the table, of the product for many rows, where the device has it.
fn by_tiles<R: Runtime>(
    client: &ComputeClient<R>,
    row: &str,
    dtype: StorageType,
    [rows, inner, columns]: [usize; 3],
    copies: &[Handle],
) {
    let of_x = Layout { stride: inner, along_k: true };
    let of_w = Layout { stride: columns, along_k: false };
    let (m, n, k) = (rows, columns, inner);
    let product = matmul::Product { m, n, k, lhs: of_x, rhs: of_w, input: dtype, output: dtype };
    let x = client.create_from_slice(&vec![0; rows * inner * dtype.size()]);
    let run = |n: usize| matmul::matmul(client, &x, &copies[n % copies.len()], product);
    if rows >= 64 && matches!(run(0), Ok(Some(_))) {
        let us = microseconds(client, copies.len(), |n| drop(run(n)));
        println!("{row},{us:.2},{:.0},", (inner * columns * dtype.size()) as f64 / us / 1e3);
    }
}

/// Of a call, in a queue of them.
fn microseconds<R: Runtime>(client: &ComputeClient<R>, copies: usize, run: impl Fn(usize)) -> f64 {
    (0..copies).for_each(&run);
    block_on(client.sync()).expect("the kernels ran");
    let start = Instant::now();
    (0..CALLS).for_each(&run);
    block_on(client.sync()).expect("the kernels ran");
    start.elapsed().as_secs_f64() / CALLS as f64 * 1e6
}

/// Number `n` of any tensor: between -1 and 1, exact in bf16.
fn number(n: usize) -> f64 {
    ((n.wrapping_mul(2_654_435_761) >> 16) & 255) as f64 / 128.0 - 1.0
}

fn bytes(kind: FloatKind, numbers: usize) -> Vec<u8> {
    let all = (0..numbers).map(number);
    match kind {
        FloatKind::F32 => all.flat_map(|x| (x as f32).to_le_bytes()).collect(),
        _ => all.flat_map(|x| bf16::from_f64(x).to_le_bytes()).collect(),
    }
}

/// Relative error of the first columns of the last row.
fn error(kind: FloatKind, [rows, inner, columns]: [usize; 3], y: &[u8]) -> f64 {
    let row = rows - 1;
    let (mut wrong, mut size) = (0.0, 0.0);
    for column in 0..64 {
        let term = |k: usize| number(row * inner + k) * number(k * columns + column);
        let want: f64 = (0..inner).map(term).sum();
        let at = row * columns + column;
        let got = match kind {
            FloatKind::F32 => {
                let b = &y[4 * at..][..4];
                f64::from(f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
            }
            _ => bf16::from_le_bytes([y[2 * at], y[2 * at + 1]]).to_f64(),
        };
        wrong += (want - got).powi(2);
        size += want.powi(2);
    }
    f64::sqrt(wrong / size)
}
