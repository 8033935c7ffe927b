//! The device's side: inputs, launches, the check against f64, and times.

use crate::cases::{Case, Types, storage};
use cubecl::future::block_on;
use cubecl::ir::FloatKind;
use cubecl::prelude::*;
use cubecl::server::Handle;
use cubek::matmul::definition::{MatmulElems, MatmulGlobalElems};
use cubek::matmul::launch::{Strategy, launch_ref};
use cubek::std::InputBinding;
use half::bf16;
use linattn_kernels::matmul::{Tiling, matmul, matmul_with};
use std::cell::Cell;
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

/// Words of the block of random numbers that inputs repeat: a prime.
const BLOCK: usize = 524_287;
/// Bytes that calls in a row go through at least, so that they do not find their inputs in the L2 cache.
const ROTATED: usize = 150 << 20;
/// Calls that wait at once, at most: drivers hold about a thousand launches.
const QUEUED: f64 = 60.0;
/// Seconds of calls in a row.
const ROW: f64 = 0.01;
/// Samples of a check, in rows and columns.
const SAMPLES: [usize; 2] = [4, 96];

/// How a product is computed.
#[derive(Debug, Clone, Copy)]
pub enum Way {
    /// As the library chooses.
    Table,
    /// A tiling, and slices of K.
    Tiling(Tiling, usize),
    /// As Burn would: cubek's own choice.
    Cubek,
}

pub struct Gpu<R: Runtime> {
    client: ComputeClient<R>,
    /// Turns of the kernel that keeps the GPU busy while calls are queued.
    turns: Cell<u32>,
}

/// The inputs of a case, several times over, and its outputs.
pub struct Tensors {
    copies: Vec<[Handle; 3]>,
    /// The block that each side repeats.
    blocks: [Vec<f64>; 2],
}

/// Figures of a strategy.
pub struct Measured {
    pub milliseconds: f64,
    pub error: f64,
}

/// The block of random numbers of one side, as words and as the numbers they hold.
fn block(seed: u64, kind: FloatKind) -> (Vec<u32>, Vec<f64>) {
    let mut state = seed;
    // PCG's generator, of which the high bits are good.
    let mut random = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1_u64 << 23) as f32 - 1.0
    };
    if kind == FloatKind::F32 {
        let values: Vec<f32> = (0..BLOCK).map(|_| random()).collect();
        let words = values.iter().map(|x| x.to_bits()).collect();
        return (words, values.into_iter().map(f64::from).collect());
    }
    let values: Vec<bf16> = (0..2 * BLOCK).map(|_| bf16::from_f32(random())).collect();
    let word = |pair: &[bf16]| u32::from(pair[0].to_bits()) | u32::from(pair[1].to_bits()) << 16;
    (values.chunks_exact(2).map(word).collect(), values.iter().map(|x| x.to_f64()).collect())
}

/// Repeats a block of words.
#[cube(launch)]
fn repeat(block: &Array<u32>, out: &mut Array<u32>) {
    if ABSOLUTE_POS < out.len() {
        out[ABSOLUTE_POS] = block[ABSOLUTE_POS % block.len()];
    }
}

/// Takes about four cycles a turn.
#[cube(launch)]
fn keep_busy(out: &mut Array<f32>, turns: u32) {
    let mut x = out[0];
    for _ in 0..turns {
        x = x * 0.999f32 + 1.0f32;
    }
    out[0] = x;
}

fn array<R: Runtime>(handle: &Handle, len: usize) -> ArrayArg<R> {
    // SAFETY: every caller made the handle of at least `len` numbers.
    #[allow(unsafe_code)]
    unsafe {
        ArrayArg::from_raw_parts(handle.clone(), len)
    }
}

impl<R: Runtime> Gpu<R> {
    pub fn new(client: ComputeClient<R>) -> Self {
        Self { client, turns: Cell::new(1 << 18) }
    }

    fn wait(&self) -> Result<(), String> {
        block_on(self.client.sync()).map_err(|why| format!("{why:?}"))
    }

    fn fill(&self, words: &[u32], out: &Handle, bytes: usize) {
        let raw: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let block = self.client.create_from_slice(&raw);
        let len = bytes / 4;
        let cubes = CubeCount::Static(len.div_ceil(256) as u32, 1, 1);
        let (block, out) = (array(&block, words.len()), array(out, len));
        repeat::launch(&self.client, cubes, CubeDim::new_1d(256), block, out);
    }

    pub fn tensors(&self, case: &Case, types: &Types) -> Tensors {
        let sizes = [types.input, types.input, types.output].map(|kind| storage(kind).size());
        let lens = case.lens();
        // A last odd number of two bytes would be no whole word.
        let bytes = [0, 1, 2].map(|n| (lens[n] * sizes[n]).next_multiple_of(4));
        let copies = ROTATED.div_ceil(bytes.iter().sum()).clamp(3, 64);
        let blocks = [1, 2].map(|seed| block(seed, types.input));
        let copies = (0..copies).map(|_| {
            let handles = bytes.map(|bytes| self.client.empty(bytes));
            for side in 0..2 {
                self.fill(&blocks[side].0, &handles[side], bytes[side]);
            }
            handles
        });
        Tensors { copies: copies.collect(), blocks: blocks.map(|(_, values)| values) }
    }

    fn launch(
        &self,
        way: Way,
        case: &Case,
        types: &Types,
        handles: &[Handle; 3],
    ) -> Result<Handle, String> {
        let product = case.product(types);
        let [lhs, rhs, out] = handles;
        let made = match way {
            Way::Cubek => {
                let run = || self.cubek(case, types, handles);
                let done = catch_unwind(AssertUnwindSafe(run));
                return done.unwrap_or(Err("it panicked".into())).map(|()| out.clone());
            }
            Way::Table => matmul(&self.client, lhs, rhs, product),
            Way::Tiling(tiling, slices) => {
                matmul_with(&self.client, lhs, rhs, product, tiling, slices)
            }
        };
        let made = made.map_err(|why| why.to_string())?;
        made.map(|y| y.handle).ok_or("not for this shape or device".to_string())
    }

    /// The product that Burn would run.
    fn cubek(&self, case: &Case, types: &Types, handles: &[Handle; 3]) -> Result<(), String> {
        let Case { m, k, n, .. } = *case;
        let binding = |handle: &Handle, rows, columns, transposed| {
            let (shape, strides) = Case::view(rows, columns, transposed);
            let handle = handle.clone().binding();
            TensorBinding::<R> { handle, strides, shape, runtime: PhantomData }
        };
        let [input, output] = [types.input, types.output].map(storage);
        let lhs = InputBinding::new(binding(&handles[0], m, k, case.lhs_transposed), input);
        let rhs = InputBinding::new(binding(&handles[1], k, n, case.rhs_transposed), input);
        let out = binding(&handles[2], m, n, false);
        let globals = MatmulGlobalElems { lhs: input, rhs: input, out: output };
        let mut elems = MatmulElems::from_globals(&globals);
        launch_ref(&Strategy::default(), &self.client, lhs, rhs, out, &mut elems)
            .map_err(|why| format!("{why}").trim().to_string())
    }

    /// Compiles and runs it once, checks the output, and times more calls.
    pub fn measure(
        &self,
        way: Way,
        case: &Case,
        types: &Types,
        x: &Tensors,
    ) -> Result<Measured, String> {
        let out = self.launch(way, case, types, &x.copies[0])?;
        self.wait()?;
        let error = self.error(case, types.output, &out, x)?;
        drop(out);
        let start = Instant::now();
        self.launch(way, case, types, &x.copies[1])?;
        self.wait()?;
        let calls = (ROW / start.elapsed().as_secs_f64()).clamp(3.0, QUEUED) as usize;
        let run = |n: usize| self.launch(way, case, types, &x.copies[n % x.copies.len()]).map(drop);
        let mut times = Vec::new();
        for _ in 0..3 {
            times.push(self.queued(calls, &run)?);
        }
        times.sort_by(f64::total_cmp);
        Ok(Measured { milliseconds: times[1], error })
    }

    /// Milliseconds a call: `calls` of them wait behind a kernel that only takes time.
    fn queued(
        &self,
        calls: usize,
        run: &dyn Fn(usize) -> Result<(), String>,
    ) -> Result<f64, String> {
        let busy = || {
            let out = self.client.empty(4);
            let start = Instant::now();
            let one = CubeDim::new_1d(1);
            let out = array(&out, 1);
            let turns = self.turns.get();
            keep_busy::launch(&self.client, CubeCount::Static(1, 1, 1), one, out, turns);
            start
        };
        loop {
            let start = busy();
            self.wait()?;
            let alone = start.elapsed().as_secs_f64();
            let start = busy();
            (0..calls).try_for_each(run)?;
            let host = start.elapsed().as_secs_f64();
            self.wait()?;
            let all = start.elapsed().as_secs_f64();
            if host < alone {
                return Ok((all - alone) * 1e3 / calls as f64);
            }
            let longer = self.turns.get().checked_mul(2);
            self.turns.set(longer.ok_or("the host takes a minute to queue the calls")?);
        }
    }

    /// The largest error of sampled entries of the first output, over the RMS of an f64 product.
    fn error(
        &self,
        case: &Case,
        output: FloatKind,
        out: &Handle,
        x: &Tensors,
    ) -> Result<f64, String> {
        let [rows, columns] = SAMPLES;
        let columns = columns.min(case.n);
        let (mut worst, mut power) = (0.0_f64, 0.0);
        for sample in 0..rows {
            let row = sample * (case.m - 1) / (rows - 1);
            let got = self.row(case, output, out, row)?;
            let lhs = lhs_row(case, &x.blocks[0], row);
            for nth in 0..columns {
                let column = nth * (case.n - 1) / (columns - 1).max(1);
                let want = dot_column(case, &x.blocks[1], &lhs, column);
                // Not `max`, which would lose a NaN.
                let off = (got[column] - want).abs();
                worst = if off <= worst { worst } else { off };
                power += want * want;
            }
        }
        Ok(worst / (power / (rows * columns) as f64).sqrt())
    }

    /// Row `row` of the output.
    fn row(
        &self,
        case: &Case,
        output: FloatKind,
        out: &Handle,
        row: usize,
    ) -> Result<Vec<f64>, String> {
        let size = storage(output).size();
        let width = case.n * size;
        let behind = out.size() as usize - (row + 1) * width;
        let part = out.clone().offset_start((row * width) as u64).offset_end(behind as u64);
        let bytes = self.client.read_one(part).map_err(|why| format!("{why:?}"))?;
        let number = |bytes: &[u8]| match *bytes {
            [a, b] => bf16::from_le_bytes([a, b]).to_f64(),
            [a, b, c, d] => f64::from(f32::from_le_bytes([a, b, c, d])),
            _ => f64::NAN,
        };
        Ok(bytes[..width].chunks_exact(size).map(number).collect())
    }
}

/// A row of the left side.
fn lhs_row(case: &Case, block: &[f64], row: usize) -> Vec<f64> {
    let Case { m, k, .. } = *case;
    let place = |inner| if case.lhs_transposed { inner * m + row } else { row * k + inner };
    (0..k).map(|inner| block[place(inner) % block.len()]).collect()
}

/// A row times a column of the right side.
fn dot_column(case: &Case, block: &[f64], lhs: &[f64], column: usize) -> f64 {
    let Case { k, n, .. } = *case;
    let (first, step) = if case.rhs_transposed { (column * k, 1) } else { (column, n) };
    let (mut place, step) = (first % block.len(), step % block.len());
    let mut sum = 0.0;
    for x in lhs {
        sum += x * block[place];
        place += step;
        if place >= block.len() {
            place -= block.len();
        }
    }
    sum
}
