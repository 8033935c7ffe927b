//! Times every operation on the shapes that its rivals are measured on, and holds one head of each to
//! the f64 recurrence.
//!
//! `cargo run --release -p linattn-kernels --features cuda --example bench -- cuda bf16 [op] [BxTxHxD,..]`
//! For `vulkan` in place of `cuda` build with `--features vulkan`, for `wgsl` without it. A shape may end with
//! another width of values, `8x2048x16x256x512`, and name key heads before those that share them, `8x2048x4/16x128`.
//! `64~4096x16x128` is one row of 64 sequences of 1 to 4096 tokens, drawn at random.
//!
//! One CSV row an operation and shape. Times are in milliseconds: `fwd_ms` and `fwd_bwd_ms` are the GPU's
//! time a call, of calls over rotated inputs that were all queued while the GPU was kept busy, so that
//! it never waits for the host. `call_..` is one call and a wait, median. `floor_..` is what the GPU would need
//! to read each input and write each output once at 4.30 TB/s, or for the plain recurrence's arithmetic
//! at 801 TFLOP/s, whichever is more. Bytes, FLOPs, how many times the floor a call takes, what one takes in a
//! row of calls without waits, and the error of each gradient go to stderr.

use cubecl::future::block_on;
use cubecl::ir::{ElemType, FloatKind, StorageType};
use cubecl::prelude::*;
use cubecl::server::Handle;
use cubecl::wgpu::WgpuRuntime;
use half::bf16;
use linattn_kernels::{
    Backward, Buffer, Chunkwise, Decay, Dims, Forward, Given, Inputs, Read, Refusal, Transition,
    Variant, launches,
};
use linattn_oracle as oracle;
use std::ops::Range;
use std::time::Instant;

const OPS: [&str; 6] =
    ["scalar_decay", "delta", "gated_delta", "vector_decay", "vector_delta", "dplr"];
/// B, T, H, D.
const SHAPES: &str = "8x2048x16x128,1x16384x16x128,32x2048x4x64,64x256x2x64,4x8192x8x256";
/// Copies of the inputs that calls take in turn.
const ROTATED: usize = 3;
/// Calls that wait at once, at most: drivers hold about a thousand launches.
const QUEUED: usize = 100;

fn variant(op: &str) -> Variant {
    let (decay, transition) = match op {
        "scalar_decay" => (Decay::Scalar, Transition::Identity),
        "delta" => (Decay::None, Transition::Delta { erase: false }),
        "gated_delta" => (Decay::Scalar, Transition::Delta { erase: false }),
        "vector_decay" => (Decay::Vector, Transition::Identity),
        "vector_delta" => (Decay::Vector, Transition::Delta { erase: false }),
        "dplr" => (Decay::Vector, Transition::LowRank),
        other => panic!("no operation {other:?}; there are {OPS:?}"),
    };
    Variant { decay, transition, read: Read::After }
}

fn recipe(op: &str) -> oracle::Recipe {
    let family = match variant(op).transition {
        Transition::Identity => oracle::Family::LinearAttention,
        Transition::Delta { .. } => oracle::Family::DeltaRule,
        Transition::LowRank => oracle::Family::LowRank,
    };
    let decay = if op == "delta" { oracle::DecayLevel::None } else { oracle::DecayLevel::Typical };
    let vector_decay = variant(op).decay == Decay::Vector;
    oracle::Recipe { decay, vector_decay, ..oracle::Recipe::new(family) }
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let device = args.first().map_or("cuda", String::as_str);
    let half = match args.get(1).map_or("bf16", String::as_str) {
        "bf16" => true,
        "f32" => false,
        other => panic!("no type {other:?}; there are bf16 and f32"),
    };
    let op = args.get(2).map_or("", String::as_str);
    let shape = args.get(3).map_or("", String::as_str);
    println!(
        "op,shape,dtype,device,fwd_ms,fwd_bwd_ms,call_fwd_ms,call_fwd_bwd_ms,floor_fwd_ms,\
         floor_fwd_bwd_ms,launches_fwd,launches_fwd_bwd,error_o,error_worst_gradient"
    );
    match device {
        #[cfg(feature = "cuda")]
        "cuda" => {
            all(&cubecl::cuda::CudaRuntime::client(&Default::default()), [device, op, shape], half)
        }
        "vulkan" | "wgsl" => {
            let client = WgpuRuntime::client(&Default::default());
            let wanted = if device == "vulkan" { "wgpu<spirv>" } else { "wgpu<wgsl>" };
            let name = WgpuRuntime::name(&client);
            assert_eq!(name, wanted, "`--features vulkan` is for vulkan, and not for wgsl");
            all(&client, [device, op, shape], half)
        }
        other => panic!("no device {other:?} in this build"),
    }
}

/// Every operation and shape that is asked for; those left empty are all.
fn all<R: Runtime>(client: &ComputeClient<R>, [device, op, shape]: [&str; 3], half: bool) {
    for name in OPS.into_iter().filter(|name| op.is_empty() || *name == op) {
        for shape in shapes(shape) {
            Case { client, device, op: name, variant: variant(name), shape, half }.run();
        }
    }
}

/// Sizes of a case.
struct Shape {
    /// As it was asked for.
    text: String,
    dims: Dims,
    /// Offsets of sequences in one row.
    cu_seqlens: Option<Vec<usize>>,
}

/// The shapes of an argument; all of [`SHAPES`] where it is empty.
fn shapes(text: &str) -> Vec<Shape> {
    let text = if text.is_empty() { SHAPES } else { text };
    text.split(',')
        .map(|text| {
            Shape::read(text).unwrap_or_else(|| panic!("{text:?} is no shape; write BxTxHxD"))
        })
        .collect()
}

impl Shape {
    fn read(text: &str) -> Option<Self> {
        let whole = text.replacen('~', "x", 1);
        let fields: Vec<&str> = whole.split('x').collect();
        let (heads, widths) = (fields.get(2)?, fields.get(3..)?);
        let (key_heads, heads) = heads.split_once('/').unwrap_or((heads, heads));
        let number = |field: &str| field.parse::<usize>().ok();
        let [batch, tokens] = [number(fields[0])?, number(fields[1])?];
        let (key_width, value_width) = match widths {
            [width] => (number(width)?, number(width)?),
            [key_width, value_width] => (number(key_width)?, number(value_width)?),
            _ => return None,
        };
        let cu_seqlens = text.contains('~').then(|| row(batch, tokens));
        let (batch, tokens) = match &cu_seqlens {
            Some(offsets) => (1, offsets[batch]),
            None => (batch, tokens),
        };
        let (key_heads, heads) = (number(key_heads)?, number(heads)?);
        let dims = Dims { batch, tokens, key_heads, heads, key_width, value_width };
        Some(Self { text: text.into(), dims, cu_seqlens })
    }
}

/// Offsets of so many sequences of 1 to `longest` tokens.
fn row(sequences: usize, longest: usize) -> Vec<usize> {
    let mut rng = oracle::Rng::named(1, "lengths");
    let mut offsets = vec![0];
    for n in 0..sequences {
        offsets.push(offsets[n] + 1 + (rng.uniform() * longest as f64) as usize);
    }
    offsets
}

/// The upper one, of an even number.
fn median(times: impl Iterator<Item = f64>) -> f64 {
    let mut times: Vec<f64> = times.collect();
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Milliseconds a call.
struct Times {
    /// The GPU's.
    queued: f64,
    /// In a row of calls without waits: the GPU's or the host's, whichever is more.
    in_a_row: f64,
    /// One call and a wait, median.
    alone: f64,
}

impl Times {
    fn of<R: Runtime>(client: &ComputeClient<R>, run: &dyn Fn(usize)) -> Self {
        let seconds = |calls: Range<usize>| {
            let start = Instant::now();
            calls.for_each(run);
            block_on(client.sync()).expect("the kernels ran");
            start.elapsed().as_secs_f64()
        };
        seconds(0..1);
        let calls = (0.15 / seconds(1..2)).clamp(5.0, QUEUED as f64) as usize;
        Self {
            queued: median((0..5).map(|_| queued(client, calls, run))),
            in_a_row: median((0..5).map(|_| seconds(0..calls) * 1e3 / calls as f64)),
            alone: median((0..21).map(|n| seconds(n..n + 1) * 1e3)),
        }
    }
}

/// The GPU's milliseconds a call: `calls` of them wait behind a kernel that only takes time, until the
/// host has queued the last.
fn queued<R: Runtime>(client: &ComputeClient<R>, calls: usize, run: &dyn Fn(usize)) -> f64 {
    let wait = || block_on(client.sync()).expect("the kernels ran");
    let busy = |turns: u32| {
        let out = client.empty(4);
        let start = Instant::now();
        // SAFETY: one unit writes the one number that `out` holds.
        #[allow(unsafe_code)]
        let out = unsafe { ArrayArg::from_raw_parts(out, 1) };
        keep_busy::launch(client, CubeCount::Static(1, 1, 1), CubeDim::new_1d(1), out, turns);
        // wgpu would send it only with the first calls behind it.
        client.flush().expect("it was launched");
        start
    };
    // The first launch compiles, which is no part of the time.
    busy(1);
    wait();
    let mut turns = 1_u32 << 20;
    loop {
        let start = busy(turns);
        wait();
        let alone = start.elapsed().as_secs_f64();
        let start = busy(turns);
        (0..calls).for_each(run);
        let host = start.elapsed().as_secs_f64();
        wait();
        let all = start.elapsed().as_secs_f64();
        if host < alone {
            return (all - alone) * 1e3 / calls as f64;
        }
        turns = turns.checked_mul(2).expect("the host queues calls within a minute");
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

/// Least work of a call: each input read and each output written once, and the arithmetic of the plain
/// recurrence.
#[derive(Clone, Copy)]
struct Work {
    bytes: f64,
    flops: f64,
}

impl Work {
    /// Milliseconds that an H200 takes for it.
    fn floor(self) -> f64 {
        (self.bytes / 4.30e9).max(self.flops / 801e9)
    }
}

/// The work of a forward pass, and of a forward and a backward pass.
fn work(op: &str, d: Dims, size: usize) -> [Work; 2] {
    let rows = (d.batch * d.tokens * d.heads) as f64;
    let wide = rows * d.key_width as f64;
    let values = rows * d.value_width as f64;
    let keys = wide * d.key_heads as f64 / d.heads as f64;
    let variant = variant(op);
    let extra = if variant.transition == Transition::LowRank { 2.0 } else { 0.0 };
    let scalars =
        match variant.decay {
            Decay::None => 0.0,
            Decay::Scalar => rows * 4.0,
            Decay::Vector => wide * 4.0,
        } + if matches!(variant.transition, Transition::Delta { .. }) { rows * 4.0 } else { 0.0 };
    // q, k, v, o; and again, dO and the gradients.
    let forward = (2.0 * keys + extra * wide + 2.0 * values) * size as f64 + scalars;
    let again = (4.0 * keys + 2.0 * extra * wide + 3.0 * values) * size as f64;
    let both = forward + again + 2.0 * scalars;
    let products = match variant.transition {
        Transition::Identity => 2.0,
        Transition::Delta { .. } => 3.0,
        Transition::LowRank => 4.0,
    };
    let flops = rows * products * 2.0 * (d.key_width * d.value_width) as f64;
    [Work { bytes: forward, flops }, Work { bytes: both, flops: 3.0 * flops }]
}

fn rounded(x: impl Iterator<Item = f64>, half: bool) -> Vec<f64> {
    x.map(|x| if half { bf16::from_f64(x).to_f64() } else { f64::from(x as f32) }).collect()
}

fn round(x: &mut oracle::Inputs) {
    let rows = |values: &mut Vec<f64>| *values = rounded(values.iter().copied(), true);
    rows(&mut x.q);
    rows(&mut x.k);
    rows(&mut x.v);
    if let oracle::Transition::LowRank { a, b } = &mut x.transition {
        rows(a);
        rows(b);
    }
}

/// One operation on one shape.
struct Case<'a, R: Runtime> {
    client: &'a ComputeClient<R>,
    device: &'a str,
    op: &'static str,
    variant: Variant,
    shape: Shape,
    half: bool,
}

impl<R: Runtime> Case<'_, R> {
    fn kind(&self) -> FloatKind {
        if self.half { FloatKind::BF16 } else { FloatKind::F32 }
    }

    fn dtype(&self) -> StorageType {
        StorageType::Scalar(ElemType::Float(self.kind()))
    }

    fn planned(&self) -> Result<Chunkwise<R>, Refusal> {
        let (client, variant, dims) = (self.client, self.variant, self.shape.dims);
        match &self.shape.cu_seqlens {
            Some(offsets) => Chunkwise::varlen(client, variant, dims, self.dtype(), offsets),
            None => Chunkwise::new(client, variant, dims, self.dtype()),
        }
    }

    /// Checks and times it, and prints its row.
    fn run(&self) {
        let Self { client, device, op, variant, half, .. } = *self;
        let (shape, dims) = (&self.shape.text, self.shape.dims);
        if let Err(why) = self.planned() {
            println!("{op},{shape},{:?},{device},refused: {why}", self.kind());
            return;
        }
        let calls = Calls::new(self);
        let [error_o, worst] = calls.errors();
        let forward = Times::of(client, &|n| drop(calls.forward(n, false)));
        let both = Times::of(client, &|n| drop(calls.both(n)));
        let [work, work_both] = work(op, dims, if half { 2 } else { 4 });
        let sequence = match self.shape.cu_seqlens {
            Some(_) => Dims { tokens: 1, ..dims },
            None => dims,
        };
        let [launched, launched_both] =
            launches(client, variant, sequence, self.dtype()).expect("it ran");
        println!(
            "{op},{shape},{},{device},{:.4},{:.4},{:.4},{:.4},{:.4},{:.4},{launched},{launched_both},{error_o:.1e},{worst:.1e}",
            if half { "bf16" } else { "f32" },
            forward.queued,
            both.queued,
            forward.alone,
            both.alone,
            work.floor(),
            work_both.floor(),
        );
        for (name, times, work) in [("fwd", forward, work), ("fwd_bwd", both, work_both)] {
            let Work { bytes, flops } = work;
            eprintln!(
                "  {op} {shape} {name}: {bytes:.3e} bytes, {flops:.3e} FLOPs, {:.1} x floor; \
                 {:.4} ms a call in a row, the host's time included",
                times.queued / work.floor(),
                times.in_a_row,
            );
        }
    }

    /// One head's numbers, for so many heads of all sequences.
    fn spread(&self, head: &[u8], row: usize, heads: usize) -> Handle {
        let batch = self.shape.dims.batch;
        let mut all = Vec::with_capacity(head.len() * heads * batch);
        for _ in 0..batch {
            for token in head.chunks_exact(row) {
                (0..heads).for_each(|_| all.extend_from_slice(token));
            }
        }
        self.client.create_from_slice(&all)
    }

    /// Rows of value heads.
    fn rows(&self, x: &[f64], width: usize) -> Handle {
        self.rows_of(x, width, self.shape.dims.heads)
    }

    fn rows_of(&self, x: &[f64], width: usize, heads: usize) -> Handle {
        if !self.half {
            return self.numbers(x, width, heads);
        }
        let bytes: Vec<u8> = x.iter().flat_map(|x| bf16::from_f64(*x).to_le_bytes()).collect();
        self.spread(&bytes, 2 * width, heads)
    }

    fn scalars(&self, x: &[f64], width: usize) -> Handle {
        self.numbers(x, width, self.shape.dims.heads)
    }

    fn numbers(&self, x: &[f64], width: usize, heads: usize) -> Handle {
        let bytes: Vec<u8> = x.iter().flat_map(|x| (*x as f32).to_le_bytes()).collect();
        self.spread(&bytes, 4 * width, heads)
    }

    fn upload(&self, x: &oracle::Inputs) -> Inputs {
        let Dims { key_heads, key_width: width, value_width, .. } = self.shape.dims;
        let (mut a, mut b, mut beta) = (None, None, None);
        match &x.transition {
            oracle::Transition::Identity => {}
            oracle::Transition::Delta { beta: share, .. } => beta = Some(self.scalars(share, 1)),
            oracle::Transition::LowRank { a: of_a, b: of_b } => {
                (a, b) = (Some(self.rows(of_a, width)), Some(self.rows(of_b, width)));
            }
        }
        let decay_width = if self.variant.decay == Decay::Vector { width } else { 1 };
        Inputs {
            q: self.rows_of(&x.q, width, key_heads),
            k: self.rows_of(&x.k, width, key_heads),
            v: self.rows(&x.v, value_width),
            a,
            b,
            g: x.decay.as_ref().map(|g| self.scalars(g.values(), decay_width)),
            beta,
            state: None,
        }
    }

    /// The first head of the first sequence.
    fn first_head(&self, x: &Buffer, width: usize) -> Vec<f64> {
        let bytes = self.client.read_one(x.handle.clone()).expect("the kernels ran");
        let size = x.dtype.size();
        let row = self.shape.dims.heads * width * size;
        bytes[..row * self.shape.dims.tokens]
            .chunks_exact(row)
            .flat_map(|token| {
                token[..width * size].chunks_exact(size).map(number).collect::<Vec<_>>()
            })
            .collect()
    }
}

/// One head's numbers in f64, and those of all heads on the device, several times over.
struct Calls<'a, R: Runtime> {
    case: &'a Case<'a, R>,
    sample: oracle::Inputs,
    d_o: Vec<f64>,
    copies: Vec<Inputs>,
    gradient: Handle,
}

impl<'a, R: Runtime> Calls<'a, R> {
    fn new(case: &'a Case<'a, R>) -> Self {
        let Dims { tokens, key_width, value_width, .. } = case.shape.dims;
        let one_head =
            oracle::Dims { batch: 1, tokens, key_heads: 1, heads: 1, key_width, value_width };
        let mut sample = oracle::Inputs::random(1, one_head, &recipe(case.op));
        if case.half {
            round(&mut sample);
        }
        let mut rng = oracle::Rng::named(1, "d_o");
        let d_o = rounded((0..tokens * value_width).map(|_| rng.normal()), case.half);
        let copies = (0..ROTATED).map(|_| case.upload(&sample)).collect();
        Self { case, sample, copies, gradient: case.rows(&d_o, value_width), d_o }
    }

    /// Call `n` forward. `keep`: for a backward pass.
    fn forward(&self, n: usize, keep: bool) -> Forward {
        self.case.planned().expect("it fits").forward(&self.copies[n % ROTATED], keep)
    }

    /// Call `n` forward and backward.
    fn both(&self, n: usize) -> (Buffer, Backward) {
        let planned = self.case.planned().expect("it fits");
        let x = &self.copies[n % ROTATED];
        let done = planned.forward(x, true);
        let saved: Vec<_> = done.saved.iter().map(|b| b.handle.clone()).collect();
        let given = Given { x, saved: &saved, d_o: &self.gradient, d_state: None };
        (done.o, planned.backward(given))
    }

    /// The first sequence's tokens: all, or those of the first of a row.
    fn first_sequence(&self) -> usize {
        let Shape { dims, cu_seqlens, .. } = &self.case.shape;
        cu_seqlens.as_ref().map_or(dims.tokens, |offsets| offsets[1])
    }

    /// Relative errors of the first head: of o, and of the gradient that is furthest off.
    fn errors(&self) -> [f64; 2] {
        let Case { op, variant, shape, .. } = self.case;
        let Dims { key_width: width, value_width, .. } = shape.dims;
        let tokens = self.first_sequence();
        let (o, d) = self.both(0);
        let error = |want: &[f64], got: &Buffer, width: usize| {
            let got = &self.case.first_head(got, width)[..tokens * width];
            let wrong: f64 = want.iter().zip(got).map(|(w, g)| (w - g) * (w - g)).sum();
            (wrong / want.iter().map(|w| w * w).sum::<f64>()).sqrt()
        };
        let sample = oracle::slice_tokens(&self.sample, 0, tokens, None);
        let d_o = &self.d_o[..tokens * value_width];
        let want = oracle::backward(&sample, d_o, &vec![0.0; width * value_width]);
        let decay_width = if variant.decay == Decay::Vector { width } else { 1 };
        let gradients = [
            ("dq", Some(&want.q), Some(&d.q), width),
            ("dk", Some(&want.k), Some(&d.k), width),
            ("dv", Some(&want.v), Some(&d.v), value_width),
            ("dg", want.g.as_ref(), d.g.as_ref(), decay_width),
            ("dbeta", want.beta.as_ref(), d.beta.as_ref(), 1),
            ("da", want.a.as_ref(), d.a.as_ref(), width),
            ("db", want.b.as_ref(), d.b.as_ref(), width),
        ];
        let mut worst = 0.0_f64;
        for (name, want, got, width) in gradients {
            if let (Some(want), Some(got)) = (want, got) {
                let error = error(want, got, width);
                eprintln!("  {op} {} {name}: off by {error:.2e}", shape.text);
                worst = worst.max(error);
            }
        }
        [error(&oracle::forward(&sample).o, &o, value_width), worst]
    }
}

fn number(bytes: &[u8]) -> f64 {
    match *bytes {
        [a, b] => bf16::from_le_bytes([a, b]).to_f64(),
        [a, b, c, d] => f64::from(f32::from_le_bytes([a, b, c, d])),
        _ => panic!("numbers have two or four bytes"),
    }
}
