//! Times every operation on the shapes that its rivals are measured on, and holds one head of each to
//! the f64 recurrence.
//!
//! `cargo run --release -p linattn-kernels --features cuda --example bench -- cuda bf16 [op] [BxTxHxD,..]`
//! For `vulkan` in place of `cuda` build with `--features vulkan`, for `wgsl` without it.
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
    Backward, Buffer, Decay, Dims, Forward, Given, Inputs, Read, Transition, Variant, backward,
    engine, forward, launches,
};
use linattn_oracle as oracle;
use std::ops::Range;
use std::time::Instant;

const OPS: [&str; 6] =
    ["scalar_decay", "delta", "gated_delta", "vector_decay", "vector_delta", "dplr"];
/// B, T, H, D.
const SHAPES: [[usize; 4]; 5] = [
    [8, 2048, 16, 128],
    [1, 16384, 16, 128],
    [32, 2048, 4, 64],
    [64, 256, 2, 64],
    [4, 8192, 8, 256],
];
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
    let gate = if op == "delta" { oracle::Gate::None } else { oracle::Gate::Typical };
    let vector_decay = variant(op).decay == Decay::Vector;
    oracle::Recipe { gate, vector_decay, ..oracle::Recipe::new(family) }
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
        for [batch, tokens, heads, width] in shapes(shape) {
            let dims = Dims {
                batch,
                tokens,
                key_heads: heads,
                heads,
                key_width: width,
                value_width: width,
            };
            Case { client, device, op: name, variant: variant(name), dims, half }.run();
        }
    }
}

/// The shapes of an argument, `BxTxHxD,..`; all of [`SHAPES`] where it is empty.
fn shapes(text: &str) -> Vec<[usize; 4]> {
    let shape = |text: &str| {
        let sizes: Vec<usize> = text.split('x').map_while(|size| size.parse().ok()).collect();
        sizes.try_into().unwrap_or_else(|_| panic!("{text:?} is no shape; write BxTxHxD"))
    };
    match text {
        "" => SHAPES.to_vec(),
        text => text.split(',').map(shape).collect(),
    }
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
    // What it takes to compile is no part of what it takes.
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
    let variant = variant(op);
    let extra = if variant.transition == Transition::LowRank { 2.0 } else { 0.0 };
    let gates =
        match variant.decay {
            Decay::None => 0.0,
            Decay::Scalar => rows * 4.0,
            Decay::Vector => wide * 4.0,
        } + if matches!(variant.transition, Transition::Delta { .. }) { rows * 4.0 } else { 0.0 };
    let forward = (4.0 + extra) * wide * size as f64 + gates;
    let both = forward + (7.0 + 2.0 * extra) * wide * size as f64 + 2.0 * gates;
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
    dims: Dims,
    half: bool,
}

impl<R: Runtime> Case<'_, R> {
    fn kind(&self) -> FloatKind {
        if self.half { FloatKind::BF16 } else { FloatKind::F32 }
    }

    fn dtype(&self) -> StorageType {
        StorageType::Scalar(ElemType::Float(self.kind()))
    }

    /// B, T, H and D.
    fn shape(&self) -> String {
        let Dims { batch, tokens, heads, key_width, .. } = self.dims;
        format!("{batch}x{tokens}x{heads}x{key_width}")
    }

    /// Checks and times it, and prints its row.
    fn run(&self) {
        let Self { client, device, op, variant, dims, half } = *self;
        let shape = self.shape();
        if let Err(why) = engine(client, variant, dims, self.dtype()) {
            println!("{op},{shape},{:?},{device},refused: {why}", self.kind());
            return;
        }
        let calls = Calls::new(self);
        let [error_o, worst] = calls.errors();
        let forward = Times::of(client, &|n| drop(calls.forward(n, false)));
        let both = Times::of(client, &|n| drop(calls.both(n)));
        let [work, work_both] = work(op, dims, if half { 2 } else { 4 });
        let [launched, launched_both] =
            launches(client, variant, dims, self.dtype()).expect("it ran");
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

    /// One head's numbers, for all heads of all sequences.
    fn spread(&self, head: &[u8], row: usize) -> Handle {
        let mut all = Vec::with_capacity(head.len() * self.dims.heads * self.dims.batch);
        for _ in 0..self.dims.batch {
            for token in head.chunks_exact(row) {
                (0..self.dims.heads).for_each(|_| all.extend_from_slice(token));
            }
        }
        self.client.create_from_slice(&all)
    }

    fn rows(&self, x: &[f64], width: usize) -> Handle {
        if !self.half {
            return self.gates(x, width);
        }
        let bytes: Vec<u8> = x.iter().flat_map(|x| bf16::from_f64(*x).to_le_bytes()).collect();
        self.spread(&bytes, 2 * width)
    }

    fn gates(&self, x: &[f64], width: usize) -> Handle {
        let bytes: Vec<u8> = x.iter().flat_map(|x| (*x as f32).to_le_bytes()).collect();
        self.spread(&bytes, 4 * width)
    }

    fn upload(&self, x: &oracle::Inputs) -> Inputs {
        let width = self.dims.key_width;
        let (mut a, mut b, mut beta) = (None, None, None);
        match &x.transition {
            oracle::Transition::Identity => {}
            oracle::Transition::Delta { beta: share, .. } => beta = Some(self.gates(share, 1)),
            oracle::Transition::LowRank { a: of_a, b: of_b } => {
                (a, b) = (Some(self.rows(of_a, width)), Some(self.rows(of_b, width)));
            }
        }
        let gate = if self.variant.decay == Decay::Vector { width } else { 1 };
        Inputs {
            q: self.rows(&x.q, width),
            k: self.rows(&x.k, width),
            v: self.rows(&x.v, width),
            a,
            b,
            g: x.decay.as_ref().map(|g| self.gates(g.values(), gate)),
            beta,
            state: None,
        }
    }

    /// The first head of the first sequence.
    fn first_head(&self, x: &Buffer, width: usize) -> Vec<f64> {
        let bytes = self.client.read_one(x.handle.clone()).expect("the kernels ran");
        let size = x.dtype.size();
        let row = self.dims.heads * width * size;
        bytes[..row * self.dims.tokens]
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
        let Dims { tokens, key_width: width, .. } = case.dims;
        let one_head = oracle::Dims {
            batch: 1,
            tokens,
            key_heads: 1,
            heads: 1,
            key_width: width,
            value_width: width,
        };
        let mut sample = oracle::Inputs::random(1, one_head, &recipe(case.op));
        if case.half {
            round(&mut sample);
        }
        let mut rng = oracle::Rng::named(1, "d_o");
        let d_o = rounded((0..tokens * width).map(|_| rng.normal()), case.half);
        let copies = (0..ROTATED).map(|_| case.upload(&sample)).collect();
        Self { case, sample, copies, gradient: case.rows(&d_o, width), d_o }
    }

    /// Call `n` forward. `keep`: for a backward pass.
    fn forward(&self, n: usize, keep: bool) -> Forward {
        let Case { client, variant, dims, .. } = *self.case;
        let x = &self.copies[n % ROTATED];
        forward(client, variant, dims, self.case.dtype(), x, keep).expect("it fits")
    }

    /// Call `n` forward and backward.
    fn both(&self, n: usize) -> (Buffer, Backward) {
        let Case { client, variant, dims, .. } = *self.case;
        let done = self.forward(n, true);
        let saved: Vec<_> = done.saved.iter().map(|b| b.handle.clone()).collect();
        let x = &self.copies[n % ROTATED];
        let given = Given { x, saved: &saved, d_o: &self.gradient, d_state: None };
        let d = backward(client, variant, dims, self.case.dtype(), given);
        (done.o, d.expect("it fits"))
    }

    /// Relative errors of the first head: of o, and of the gradient that is furthest off.
    fn errors(&self) -> [f64; 2] {
        let Case { op, variant, dims: Dims { key_width: width, .. }, .. } = *self.case;
        let (o, d) = self.both(0);
        let error = |want: &[f64], got: &Buffer, width: usize| {
            let got = self.case.first_head(got, width);
            let wrong: f64 = want.iter().zip(&got).map(|(w, g)| (w - g) * (w - g)).sum();
            (wrong / want.iter().map(|w| w * w).sum::<f64>()).sqrt()
        };
        let want = oracle::backward(&self.sample, &self.d_o, &vec![0.0; width * width]);
        let gate_width = if variant.decay == Decay::Vector { width } else { 1 };
        let gradients = [
            ("dq", Some(&want.q), Some(&d.q), width),
            ("dk", Some(&want.k), Some(&d.k), width),
            ("dv", Some(&want.v), Some(&d.v), width),
            ("dg", want.g.as_ref(), d.g.as_ref(), gate_width),
            ("dbeta", want.beta.as_ref(), d.beta.as_ref(), 1),
            ("da", want.a.as_ref(), d.a.as_ref(), width),
            ("db", want.b.as_ref(), d.b.as_ref(), width),
        ];
        let mut worst = 0.0_f64;
        for (name, want, got, width) in gradients {
            if let (Some(want), Some(got)) = (want, got) {
                let error = error(want, got, width);
                eprintln!("  {op} {} {name}: off by {error:.2e}", self.case.shape());
                worst = worst.max(error);
            }
        }
        [error(&oracle::forward(&self.sample).o, &o, width), worst]
    }
}

fn number(bytes: &[u8]) -> f64 {
    match *bytes {
        [a, b] => bf16::from_le_bytes([a, b]).to_f64(),
        [a, b, c, d] => f64::from(f32::from_le_bytes([a, b, c, d])),
        _ => panic!("numbers have two or four bytes"),
    }
}
