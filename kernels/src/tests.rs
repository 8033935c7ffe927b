//! Every variant against the f64 recurrences, on whatever device is there.

use crate::{
    Backward, Buffer, Chunkwise, Dims, Forward, Given, Inputs, Refusal, Variant, engine, forward,
    simple, step,
};
use cubecl::ir::{ElemType, FloatKind, StorageType};
use cubecl::prelude::*;
use cubecl::server::Handle;
use half::{bf16, f16};
use linattn_oracle as oracle;
use oracle::{Decay, DecayLevel, Family, Read, Recipe, Rng, Strength, Transition};

#[path = "varlen_tests.rs"]
mod varlen;

/// Type of the rows: log decays, beta and states are f32 always.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Rows {
    F32,
    F16,
    Bf16,
}

impl Rows {
    pub(crate) fn dtype(self) -> StorageType {
        let kind = match self {
            Rows::F32 => FloatKind::F32,
            Rows::F16 => FloatKind::F16,
            Rows::Bf16 => FloatKind::BF16,
        };
        StorageType::Scalar(ElemType::Float(kind))
    }

    pub(crate) fn bytes(self, x: &[f64]) -> Vec<u8> {
        match self {
            Rows::F32 => x.iter().flat_map(|x| (*x as f32).to_le_bytes()).collect(),
            Rows::F16 => x.iter().flat_map(|x| f16::from_f64(*x).to_le_bytes()).collect(),
            Rows::Bf16 => x.iter().flat_map(|x| bf16::from_f64(*x).to_le_bytes()).collect(),
        }
    }

    pub(crate) fn numbers(self, bytes: &[u8]) -> Vec<f64> {
        let two = bytes.chunks_exact(2).map(|b| [b[0], b[1]]);
        let four = bytes.chunks_exact(4).map(|b| [b[0], b[1], b[2], b[3]]);
        match self {
            Rows::F32 => four.map(|b| f64::from(f32::from_le_bytes(b))).collect(),
            Rows::F16 => two.map(|b| f16::from_le_bytes(b).to_f64()).collect(),
            Rows::Bf16 => two.map(|b| bf16::from_le_bytes(b).to_f64()).collect(),
        }
    }

    pub(crate) fn round(self, x: &mut [f64]) {
        for x in x {
            *x = match self {
                Rows::F32 => f64::from(*x as f32),
                Rows::F16 => f16::from_f64(*x).to_f64(),
                Rows::Bf16 => bf16::from_f64(*x).to_f64(),
            };
        }
    }
}

/// A case's tensors on a device.
struct Uploaded<'a, R: Runtime> {
    client: &'a ComputeClient<R>,
    rows: Rows,
    x: Inputs,
    variant: Variant,
    dims: Dims,
}

fn sizes_of(x: &oracle::Inputs) -> Dims {
    let oracle::Dims { batch, tokens, key_heads, heads, key_width, value_width } = x.dims;
    Dims { batch, tokens, key_heads, heads, key_width, value_width }
}

fn variant(x: &oracle::Inputs) -> Variant {
    Variant {
        decay: match &x.decay {
            None => crate::Decay::None,
            Some(Decay::Scalar(_)) => crate::Decay::Scalar,
            Some(Decay::Vector(_)) => crate::Decay::Vector,
        },
        transition: match &x.transition {
            Transition::Identity => crate::Transition::Identity,
            Transition::Delta { erase, .. } => crate::Transition::Delta { erase: erase.is_some() },
            Transition::LowRank { .. } => crate::Transition::LowRank,
        },
        read: match x.read {
            Read::After => crate::Read::After,
            Read::Before => crate::Read::Before,
        },
    }
}

impl<'a, R: Runtime> Uploaded<'a, R> {
    fn new(client: &'a ComputeClient<R>, x: &oracle::Inputs, rows: Rows) -> Self {
        let put = |values: &[f64], rows: Rows| client.create_from_slice(&rows.bytes(values));
        let (mut a, mut b, mut beta) = (None, None, None);
        match &x.transition {
            Transition::Identity => {}
            Transition::Delta { beta: share, erase } => {
                beta = Some(put(share, Rows::F32));
                a = erase.as_ref().map(|erase| put(erase, rows));
            }
            Transition::LowRank { a: of_a, b: of_b } => {
                (a, b) = (Some(put(of_a, rows)), Some(put(of_b, rows)));
            }
        }
        Self {
            client,
            rows,
            x: Inputs {
                q: put(&x.q, rows),
                k: put(&x.k, rows),
                v: put(&x.v, rows),
                a,
                b,
                g: x.decay.as_ref().map(|g| put(g.values(), Rows::F32)),
                beta,
                state: x.state.as_ref().map(|s| put(s, Rows::F32)),
            },
            variant: variant(x),
            dims: sizes_of(x),
        }
    }

    fn get(&self, buffer: &Buffer) -> Vec<f64> {
        self.read(buffer.handle.clone(), buffer.dtype)
    }

    fn read(&self, handle: Handle, dtype: StorageType) -> Vec<f64> {
        let bytes = self.client.read_one(handle).expect("the kernels ran");
        let rows = if dtype.size() == 4 { Rows::F32 } else { self.rows };
        rows.numbers(&bytes)
    }

    /// Sums the heads that share a key head.
    fn key_heads(&self, x: Vec<f64>) -> Vec<f64> {
        let Dims { key_heads, heads, key_width, .. } = self.dims;
        let group = heads / key_heads;
        let mut sum = vec![0.0; x.len() / group];
        for (i, row) in x.chunks_exact(key_width).enumerate() {
            for (d, x) in row.iter().enumerate() {
                sum[i / group * key_width + d] += x;
            }
        }
        sum
    }
}

/// Limits on the relative error of outputs and of gradients.
#[derive(Clone, Copy)]
struct Limits {
    outputs: f64,
    gradients: f64,
}

const F32: Limits = Limits { outputs: 1e-5, gradients: 1e-5 };
const HALF: Limits = Limits { outputs: 6e-3, gradients: 1.2e-2 };

/// A case whose rows are what their type can hold.
fn rounded(x: &oracle::Inputs, rows: Rows) -> oracle::Inputs {
    let mut x = x.clone();
    rows.round(&mut x.q);
    rows.round(&mut x.k);
    rows.round(&mut x.v);
    match &mut x.transition {
        Transition::Identity => {}
        Transition::Delta { erase, .. } => {
            if let Some(erase) = erase {
                rows.round(erase);
            }
        }
        Transition::LowRank { a, b } => {
            rows.round(a);
            rows.round(b);
        }
    }
    x
}

/// The relative error.
fn error(want: &[f64], got: Vec<f64>) -> f64 {
    assert_eq!(want.len(), got.len(), "numbers: wanted, got");
    let size = want.iter().map(|x| x * x).sum::<f64>().sqrt();
    // Where the truth is nothing, rounding counts as nothing.
    let wrong = want.iter().zip(&got).map(|(w, g)| (w - g) * (w - g)).sum::<f64>().sqrt();
    if wrong <= 1e-12 * (want.len() as f64).sqrt() { 0.0 } else { wrong / size }
}

/// Outputs, last states and gradients of a case.
struct Truth {
    o: Vec<f64>,
    state: Vec<f64>,
    d: oracle::Gradients,
}

/// A case, and the gradients that its backward pass starts from.
struct Case {
    x: oracle::Inputs,
    rows: Rows,
    d_o: Vec<f64>,
    d_state: Vec<f64>,
}

impl Case {
    /// Of `x`, in what the type of its rows can hold.
    fn new(x: &oracle::Inputs, rows: Rows, states: usize) -> Self {
        let x = rounded(x, rows);
        let oracle::Dims { batch, tokens, heads, key_width, value_width, .. } = x.dims;
        let mut rng = Rng::named(7, "gradients");
        let mut draw = |n: usize| (0..n).map(|_| rng.normal()).collect::<Vec<_>>();
        let mut d_o = draw(batch * tokens * heads * value_width);
        rows.round(&mut d_o);
        let d_state = draw(states * heads * key_width * value_width);
        Self { x, rows, d_o, d_state }
    }

    fn truth(&self) -> Truth {
        let truth = oracle::forward(&self.x);
        let d = oracle::backward(&self.x, &self.d_o, &self.d_state);
        Truth { o: truth.o, state: truth.state, d }
    }

    /// The worst relative errors of outputs, states and gradients.
    fn errors<R: Runtime>(
        &self,
        up: &Uploaded<'_, R>,
        planned: &Chunkwise<R>,
        truth: Truth,
    ) -> Vec<(&'static str, f64)> {
        let (client, want) = (up.client, truth.d);
        let got = planned.forward(&up.x, true);
        let saved: Vec<Handle> = got.saved.iter().map(|b| b.handle.clone()).collect();
        let d_o = client.create_from_slice(&self.rows.bytes(&self.d_o));
        let d_state = client.create_from_slice(&Rows::F32.bytes(&self.d_state));
        let given = Given { x: &up.x, saved: &saved, d_o: &d_o, d_state: Some(&d_state) };
        let d = planned.backward(given);
        let Backward { q, k, v, a, b, g, beta, state } = d;
        let mut all = vec![
            ("o", error(&truth.o, up.get(&got.o))),
            ("state", error(&truth.state, up.get(&got.state))),
            ("dq", error(&want.q, up.key_heads(up.get(&q)))),
            ("dk", error(&want.k, up.key_heads(up.get(&k)))),
            ("dv", error(&want.v, up.get(&v))),
            ("dstate", error(&want.state, up.get(&state))),
        ];
        let optional = [
            ("da", a, want.a.or(want.erase)),
            ("db", b, want.b),
            ("dg", g, want.g),
            ("dbeta", beta, want.beta),
        ];
        if planned.has_own_inference() {
            let got = planned.forward(&up.x, false);
            all.push(("o of inference", error(&truth.o, up.get(&got.o))));
            all.push(("state of inference", error(&truth.state, up.get(&got.state))));
        }
        for (name, got, want) in optional {
            assert_eq!(got.is_some(), want.is_some(), "{name}");
            if let (Some(got), Some(want)) = (got, want) {
                all.push((name, error(&want, up.get(&got))));
            }
        }
        all
    }
}

/// The worst relative errors of one case: outputs (and state), gradients. Sequences are cut into
/// `segments`, or as fits the device.
fn errors<R: Runtime>(
    client: &ComputeClient<R>,
    x: &oracle::Inputs,
    rows: Rows,
    segments: Option<usize>,
) -> Vec<(&'static str, f64)> {
    let case = Case::new(x, rows, x.dims.batch);
    let up = Uploaded::new(client, &case.x, rows);
    let planned = Chunkwise::new(client, up.variant, up.dims, rows.dtype()).expect("it fits");
    case.errors(&up, &planned.in_segments(segments), case.truth())
}

#[track_caller]
fn hold<R: Runtime>(
    client: &ComputeClient<R>,
    what: &str,
    x: &oracle::Inputs,
    rows: Rows,
    limits: Limits,
) {
    hold_cut(client, what, x, rows, limits, None);
}

#[track_caller]
fn hold_cut<R: Runtime>(
    client: &ComputeClient<R>,
    what: &str,
    x: &oracle::Inputs,
    rows: Rows,
    limits: Limits,
    segments: Option<usize>,
) {
    for (name, error) in errors(client, x, rows, segments) {
        let outputs = ["o", "state", "o of inference", "state of inference"];
        let limit = if outputs.contains(&name) { limits.outputs } else { limits.gradients };
        assert!(error <= limit, "{what}: {name} is off by {error:.2e}, limit {limit:.0e}");
    }
}

/// Every decay and read position of one transition.
fn recipes(family: Family, erase: bool, decay: DecayLevel) -> Vec<Recipe> {
    let mut all = vec![];
    for vector_decay in [false, true] {
        for read in [Read::After, Read::Before] {
            let before = family == Family::LowRank && read == Read::Before;
            let unused = decay == DecayLevel::None && vector_decay;
            if !before && !unused {
                let strength = Strength::Typical;
                let recipe = Recipe { decay, vector_decay, read, erase, ..Recipe::new(family) };
                all.push(Recipe { strength, state: true, ..recipe });
            }
        }
    }
    all
}

fn dims(tokens: usize) -> oracle::Dims {
    oracle::Dims { batch: 2, tokens, key_heads: 1, heads: 2, key_width: 20, value_width: 12 }
}

const DECAYS: [DecayLevel; 5] = [
    DecayLevel::None,
    DecayLevel::KeepAll,
    DecayLevel::Typical,
    DecayLevel::Mixed,
    DecayLevel::ForgetAll,
];

/// Every variant of one transition, in f32.
fn every_variant<R: Runtime>(client: &ComputeClient<R>, family: Family, erase: bool) {
    for decay in DECAYS {
        for recipe in recipes(family, erase, decay) {
            let x = oracle::Inputs::random(3, dims(70), &recipe);
            hold(client, &format!("{recipe:?}"), &x, Rows::F32, F32);
        }
    }
}

/// Every variant of one transition, in f32, in segments.
fn every_cut<R: Runtime>(client: &ComputeClient<R>, family: Family, erase: bool) {
    for decay in [DecayLevel::None, DecayLevel::Typical, DecayLevel::Mixed] {
        for recipe in recipes(family, erase, decay) {
            cut(client, &Recipe { state: decay != DecayLevel::Mixed, ..recipe });
        }
    }
}

/// One variant in segments: the last is shorter, or of one chunk. Keys are wider than values, so that M
/// has more tiles than S. Widths are those of [`every_variant`], whose kernels are compiled already.
fn cut<R: Runtime>(client: &ComputeClient<R>, recipe: &Recipe) {
    let x = oracle::Inputs::random(3, dims(150), recipe);
    for segments in [2, 3, 5] {
        let what = format!("{segments} segments, {recipe:?}");
        hold_cut(client, &what, &x, Rows::F32, F32, Some(segments));
    }
}

/// Widths of all kinds, each with a length and heads: T, Hk, H, K, V.
const SIZES: [[usize; 5]; 10] = [
    [1, 1, 1, 1, 1],
    [7, 1, 3, 5, 7],
    [65, 2, 4, 33, 1],
    [100, 1, 2, 256, 128],
    [17, 3, 3, 16, 256],
    [130, 1, 1, 64, 64],
    [64, 1, 2, 128, 48],
    [330, 1, 2, 128, 128],
    [100, 1, 2, 64, 528],
    [130, 1, 2, 256, 512],
];

fn sizes<R: Runtime>(client: &ComputeClient<R>, sizes: &[[usize; 5]], rows: Rows, limits: Limits) {
    for (n, [tokens, key_heads, heads, key_width, value_width]) in sizes.iter().copied().enumerate()
    {
        let dims = oracle::Dims { batch: 1, tokens, key_heads, heads, key_width, value_width };
        let family = [Family::DeltaRule, Family::LinearAttention][n / 4 % 2];
        let recipe = Recipe { decay: DecayLevel::Typical, state: true, ..Recipe::new(family) };
        let x = oracle::Inputs::random(5, dims, &recipe);
        hold(client, &format!("{family:?}, {dims:?}"), &x, rows, limits);
    }
}

/// Lengths, batches and heads at random: none of them is compiled in, so that many can be tried.
fn random_shapes<R: Runtime>(client: &ComputeClient<R>) {
    for seed in 0..40 {
        let mut rng = Rng::named(seed, "shape");
        let mut draw = |n: usize| 1 + (rng.uniform() * n as f64) as usize;
        let (batch, tokens, key_heads, group) = (draw(3), draw(140), draw(2), draw(3));
        let shape = oracle::Dims { batch, key_heads, heads: key_heads * group, ..dims(tokens) };
        let decay = DECAYS[1 + seed as usize % 4];
        let state = draw(2) == 1;
        let recipe = Recipe { decay, state, ..Recipe::new(Family::DeltaRule) };
        let x = oracle::Inputs::random(seed, shape, &recipe);
        hold(client, &format!("seed {seed}: {shape:?}, {recipe:?}"), &x, Rows::F32, F32);
    }
}

/// Sizes of steps, B, Hk, H, K, V: keys in one slice and in many, in two turns and in three; widths
/// that end inside a slice's rows and inside a cube's columns.
const STEPS: [[usize; 5]; 3] = [[2, 1, 3, 5, 37], [1, 2, 4, 130, 33], [1, 1, 1, 300, 5]];

fn step_dims([batch, key_heads, heads, key_width, value_width]: [usize; 5]) -> oracle::Dims {
    oracle::Dims { batch, tokens: 3, key_heads, heads, key_width, value_width }
}

/// One token after another, each from the state that the last one left: all outputs, the last state.
fn stepped<R: Runtime>(client: &ComputeClient<R>, x: &oracle::Inputs, rows: Rows) -> [Vec<f64>; 2] {
    let oracle::Dims { batch, tokens, heads, value_width, .. } = x.dims;
    let (mut last, mut state, mut outputs) = (None, vec![], vec![]);
    for t in 0..tokens {
        let token = oracle::slice_tokens(x, t, t + 1, x.state.clone());
        let mut up = Uploaded::new(client, &token, rows);
        if last.is_some() {
            up.x.state = last;
        }
        let next = step::launch(client, up.variant, up.dims, rows.dtype(), &up.x);
        let next = next.expect("it fits");
        outputs.push(up.get(&next.o));
        state = up.get(&next.state);
        last = Some(next.state.handle);
    }
    let row = heads * value_width;
    let of_sequence = |b: usize| outputs.iter().flat_map(move |o| &o[b * row..][..row]);
    [(0..batch).flat_map(of_sequence).copied().collect(), state]
}

/// Steps against the recurrence. States are f32 whatever rows are.
#[track_caller]
fn hold_steps<R: Runtime>(
    client: &ComputeClient<R>,
    what: &str,
    x: &oracle::Inputs,
    rows: Rows,
    limits: Limits,
) {
    let x = rounded(x, rows);
    let truth = oracle::forward(&x);
    let [o, state] = stepped(client, &x, rows);
    for (name, error, limit) in [
        ("o", error(&truth.o, o), limits.outputs),
        ("state", error(&truth.state, state), F32.outputs),
    ] {
        assert!(error <= limit, "{what}: {name} is off by {error:.2e}, limit {limit:.0e}");
    }
}

/// Steps of every variant of one transition.
fn every_step<R: Runtime>(
    client: &ComputeClient<R>,
    family: Family,
    erase: bool,
    rows: Rows,
    limits: Limits,
) {
    for sizes in STEPS {
        for decay in DECAYS {
            for recipe in recipes(family, erase, decay) {
                let x = oracle::Inputs::random(3, step_dims(sizes), &recipe);
                let what = format!("{rows:?}, {sizes:?}, {recipe:?}");
                hold_steps(client, &what, &x, rows, limits);
            }
        }
    }
}

/// Log decays whose exponential f32 does not hold.
fn forgetting_steps<R: Runtime>(client: &ComputeClient<R>) {
    for recipe in recipes(Family::DeltaRule, false, DecayLevel::ForgetAll) {
        let mut x = oracle::Inputs::random(3, step_dims(STEPS[0]), &recipe);
        if let Some(Decay::Scalar(g) | Decay::Vector(g)) = &mut x.decay {
            g.fill(-1000.0);
        }
        hold_steps(client, &format!("{recipe:?}"), &x, Rows::F32, F32);
    }
}

/// As [`refusals`], of steps.
fn step_refusals<R: Runtime>(client: &ComputeClient<R>) {
    let x = oracle::Inputs::random(1, dims(1), &Recipe::new(Family::LinearAttention));
    let up = Uploaded::new(client, &x, Rows::F32);
    let (good, f32) = (up.dims, Rows::F32.dtype());
    let f64 = StorageType::Scalar(ElemType::Float(FloatKind::F64));
    for (dims, dtype, want) in [
        (Dims { tokens: 2, ..good }, f32, "tokens of a step: 2; the most on this device is 1"),
        (Dims { value_width: 0, ..good }, f32, "V is 0"),
        (Dims { heads: 3, key_heads: 2, ..good }, f32, "3 value heads are no multiple of 2"),
        (Dims { key_width: 1 << 31, ..good }, f32, "numbers in a tensor"),
        (good, f64, "the kernels take f32"),
    ] {
        let got = step::check(client, dims, dtype).expect_err("refused").to_string();
        assert!(got.contains(want), "{got:?} does not say {want:?}");
    }
    let why = step::launch(client, up.variant, good, f32, &up.x).expect_err("refused");
    assert_eq!(why.to_string(), "`state` is missing");
    let decayed = Variant { decay: crate::Decay::Scalar, ..up.variant };
    let why = step::launch(client, decayed, good, f32, &up.x).expect_err("refused");
    assert_eq!(why.to_string(), "`g` is missing");
}

/// Rows of 16 bits, where the device has the type: WGSL has no bf16, and f16 with some adapters only.
fn half_rows<R: Runtime>(client: &ComputeClient<R>) {
    let recipe =
        Recipe { decay: DecayLevel::Typical, state: true, ..Recipe::new(Family::DeltaRule) };
    let x = oracle::Inputs::random(3, dims(70), &recipe);
    for rows in [Rows::F16, Rows::Bf16] {
        let dims = sizes_of(&x);
        match engine(client, variant(&x), dims, rows.dtype()) {
            Ok(_) => {
                hold(client, &format!("{rows:?}"), &x, rows, HALF);
                hold_steps(client, &format!("{rows:?}, steps"), &x, rows, HALF);
            }
            Err(why) => {
                assert_eq!(why, Refusal::Type { got: rows.dtype() });
                let one = Dims { tokens: 1, ..dims };
                assert_eq!(step::check(client, one, rows.dtype()), Err(why));
            }
        }
    }
}

/// Nothing that does not fit is launched: each refusal names what is wrong.
fn refusals<R: Runtime>(client: &ComputeClient<R>) {
    let good = Dims { batch: 1, tokens: 8, key_heads: 1, heads: 2, key_width: 16, value_width: 16 };
    let decayed = Variant {
        decay: crate::Decay::Scalar,
        transition: crate::Transition::Identity,
        read: crate::Read::After,
    };
    let f32 = Rows::F32.dtype();
    let f64 = StorageType::Scalar(ElemType::Float(FloatKind::F64));
    let refused =
        |dims, dtype| engine(client, decayed, dims, dtype).expect_err("refused").to_string();
    for (dims, dtype, want) in [
        (Dims { key_width: 257, ..good }, f32, "K is 257; the kernels take 1 to 256"),
        (Dims { value_width: 4097, ..good }, f32, "V is 4097; the kernels take 1 to 4096"),
        (Dims { value_width: 0, ..good }, f32, "V is 0"),
        (Dims { heads: 3, key_heads: 2, ..good }, f32, "3 value heads are no multiple of 2"),
        (Dims { tokens: 0, ..good }, f32, "1 sequences of 0 tokens"),
        (Dims { batch: 40_000, ..good }, f32, "sequences x heads: 80000"),
        (Dims { tokens: 1 << 30, ..good }, f32, "numbers in a tensor"),
        (good, f64, "the kernels take f32"),
    ] {
        let got = refused(dims, dtype);
        assert!(got.contains(want), "{got:?} does not say {want:?}");
    }
    let x = oracle::Inputs::random(
        1,
        dims(8),
        &Recipe { decay: DecayLevel::Typical, ..Recipe::new(Family::LinearAttention) },
    );
    let up = Uploaded::new(client, &x, Rows::F32);
    let x = Inputs { g: None, ..up.x.clone() };
    let why = forward(client, up.variant, up.dims, f32, &x, false).expect_err("refused");
    assert_eq!(why.to_string(), "`g` is missing");
}

/// The simple kernels against the recurrence, and the fast ones against the simple ones, on the same buffers.
fn simple_is_right<R: Runtime>(client: &ComputeClient<R>) {
    for [tokens, key_heads, heads, key_width, value_width] in
        [[40, 1, 2, 20, 12], [65, 2, 4, 33, 64]]
    {
        let dims = oracle::Dims { batch: 2, tokens, key_heads, heads, key_width, value_width };
        for (decay, state) in
            [(DecayLevel::Typical, true), (DecayLevel::Mixed, true), (DecayLevel::KeepAll, false)]
        {
            let recipe = Recipe { decay, state, ..Recipe::new(Family::DeltaRule) };
            let x = rounded(&oracle::Inputs::random(3, dims, &recipe), Rows::F32);
            let what = format!("{dims:?}, {recipe:?}");
            simple_case_is_right(client, &what, &x);
        }
    }
    let dims =
        Dims { key_width: 65, ..sizes_of(&oracle::Inputs::random(1, dims(8), &with_decay())) };
    let up =
        Uploaded::new(client, &oracle::Inputs::random(1, self::dims(8), &with_decay()), Rows::F32);
    let why = simple::forward(client, dims, &up.x).expect_err("refused").to_string();
    assert_eq!(why, "K is 65; the kernels take 1 to 64");
}

fn with_decay() -> Recipe {
    Recipe { decay: DecayLevel::Typical, ..Recipe::new(Family::DeltaRule) }
}

fn simple_case_is_right<R: Runtime>(client: &ComputeClient<R>, what: &str, x: &oracle::Inputs) {
    let up = Uploaded::new(client, x, Rows::F32);
    assert_eq!(up.variant, simple::VARIANT, "{what}");
    let mut rng = Rng::named(7, "gradients");
    let mut draw = |n: usize| {
        let mut x: Vec<f64> = (0..n).map(|_| rng.normal()).collect();
        Rows::F32.round(&mut x);
        x
    };
    let truth = oracle::forward(x);
    let (d_o, d_state) = (draw(truth.o.len()), draw(truth.state.len()));
    let want = oracle::backward(x, &d_o, &d_state);
    let put = |x: &[f64]| client.create_from_slice(&Rows::F32.bytes(x));
    let (d_o, d_state) = (put(&d_o), put(&d_state));
    let handles = |saved: &[Buffer]| saved.iter().map(|b| b.handle.clone()).collect::<Vec<_>>();

    let f = simple::forward(client, up.dims, &up.x).expect("it fits");
    let saved = handles(&f.saved);
    let given = Given { x: &up.x, saved: &saved, d_o: &d_o, d_state: Some(&d_state) };
    let d = simple::backward(client, up.dims, given).expect("it fits");
    let simple = results(&up, &f, d);
    let dtype = Rows::F32.dtype();
    let planned = Chunkwise::new(client, up.variant, up.dims, dtype).expect("it fits");
    let f = planned.forward(&up.x, true);
    let saved = handles(&f.saved);
    let given = Given { x: &up.x, saved: &saved, d_o: &d_o, d_state: Some(&d_state) };
    let fast = results(&up, &f, planned.backward(given));

    let g = want.g.expect("it has a decay");
    let beta = want.beta.expect("it is a delta rule");
    let wanted = [truth.o, truth.state, want.q, want.k, want.v, g, beta, want.state];
    let names = ["o", "state", "dq", "dk", "dv", "dg", "dbeta", "dstate"];
    for (((name, want), simple), fast) in names.iter().zip(&wanted).zip(&simple).zip(fast) {
        let by = error(want, simple.clone());
        assert!(by <= 1e-5, "{what}: {name} of the simple kernels is off by {by:.2e}");
        let by = error(simple, fast);
        assert!(by <= 1e-5, "{what}: {name} of the fast kernels is off by {by:.2e}");
    }
}

/// o, the last state and all gradients.
fn results<R: Runtime>(up: &Uploaded<'_, R>, f: &Forward, d: Backward) -> [Vec<f64>; 8] {
    let of = |buffer: Option<Buffer>| up.get(&buffer.expect("the variant has it"));
    let (q, k) = (up.key_heads(up.get(&d.q)), up.key_heads(up.get(&d.k)));
    let (v, state) = (up.get(&d.v), up.get(&d.state));
    [up.get(&f.o), up.get(&f.state), q, k, v, of(d.g), of(d.beta), state]
}

/// A test for each transition, so that they run side by side: on a device that is a CPU, compiling is
/// what takes time. The slowest there can be marked.
macro_rules! each_transition {
    ($(#[$slow:meta])?) => {
        #[test]
        fn what_does_not_fit_is_refused() {
            with_client(|client| {
                refusals(client);
                step_refusals(client);
            });
        }

        #[test]
        fn steps_of_linear_attention_are_right() {
            with_client(|client| every_step(client, Family::LinearAttention, false, Rows::F32, F32));
        }

        #[test]
        fn steps_of_the_delta_rule_are_right() {
            with_client(|client| {
                every_step(client, Family::DeltaRule, false, Rows::F32, F32);
                forgetting_steps(client);
            });
        }

        #[test]
        fn steps_of_the_delta_rule_with_erase_rows_are_right() {
            with_client(|client| every_step(client, Family::DeltaRule, true, Rows::F32, F32));
        }

        #[test]
        fn steps_of_low_rank_transitions_are_right() {
            with_client(|client| every_step(client, Family::LowRank, false, Rows::F32, F32));
        }

        #[test]
        fn any_length_batch_and_heads_are_right() {
            with_client(random_shapes);
        }

        #[test]
        fn linear_attention_is_right() {
            with_client(|client| every_variant(client, Family::LinearAttention, false));
        }

        #[test]
        fn linear_attention_is_right_in_segments() {
            with_client(|client| every_cut(client, Family::LinearAttention, false));
        }

        #[test]
        fn offsets_that_divide_no_row_are_refused() {
            with_client(varlen::refusals);
        }

        #[test]
        fn the_simple_kernels_are_right() {
            with_client(simple_is_right);
        }

        #[test]
        fn the_delta_rule_is_right() {
            with_client(|client| every_variant(client, Family::DeltaRule, false));
        }

        #[test]
        $(#[$slow])?
        fn the_delta_rule_is_right_in_segments() {
            with_client(|client| every_cut(client, Family::DeltaRule, false));
        }

        #[test]
        fn the_delta_rule_with_erase_rows_is_right() {
            with_client(|client| every_variant(client, Family::DeltaRule, true));
        }

        #[test]
        $(#[$slow])?
        fn the_delta_rule_with_erase_rows_is_right_in_segments() {
            with_client(|client| every_cut(client, Family::DeltaRule, true));
        }

        #[test]
        fn low_rank_transitions_are_right() {
            with_client(|client| every_variant(client, Family::LowRank, false));
        }

        #[test]
        $(#[$slow])?
        fn low_rank_transitions_are_right_in_segments() {
            with_client(|client| every_cut(client, Family::LowRank, false));
        }
    };
}

#[cfg(feature = "cuda")]
pub(crate) mod on_cuda {
    use super::*;
    use crate::Engine;
    use crate::chunkwise::choose::plans;
    use cubecl::cuda::CudaRuntime;

    fn client() -> ComputeClient<CudaRuntime> {
        CudaRuntime::client(&Default::default())
    }

    pub(crate) fn with_client(test: impl FnOnce(&ComputeClient<CudaRuntime>)) {
        test(&client());
    }

    each_transition!();

    const TRANSITIONS: [(Family, bool); 4] = [
        (Family::LinearAttention, false),
        (Family::DeltaRule, false),
        (Family::DeltaRule, true),
        (Family::LowRank, false),
    ];

    #[track_caller]
    fn has_tensor_cores(client: &ComputeClient<CudaRuntime>, x: &oracle::Inputs, rows: Rows) {
        let used = engine(client, variant(x), sizes_of(x), rows.dtype());
        assert_eq!(used, Ok(Engine::Mma), "this GPU has no tensor cores for {rows:?}");
    }

    /// Every variant of one transition in 16 bits.
    fn variants(family: Family, erase: bool) {
        let client = client();
        let dims = oracle::Dims {
            batch: 2,
            tokens: 150,
            key_heads: 1,
            heads: 2,
            key_width: 64,
            value_width: 48,
        };
        for rows in [Rows::Bf16, Rows::F16] {
            for decay in [DecayLevel::None, DecayLevel::Typical, DecayLevel::Mixed] {
                for recipe in recipes(family, erase, decay) {
                    let x = oracle::Inputs::random(3, dims, &recipe);
                    has_tensor_cores(&client, &x, rows);
                    hold(&client, &format!("{rows:?} {recipe:?}"), &x, rows, HALF);
                }
            }
        }
    }

    /// Every variant of one transition with split-K: one head, and two that share a key head,
    /// of 48 columns, so that there are three planes to a share.
    fn wide_keys(family: Family, erase: bool) {
        let client = client();
        for [heads, key_width, value_width] in [[1, 256, 64], [2, 160, 48]] {
            let dims = oracle::Dims { heads, key_width, value_width, ..dims(150) };
            for recipe in recipes(family, erase, DecayLevel::Typical) {
                let x = oracle::Inputs::random(3, dims, &recipe);
                let plans = plans(&client, variant(&x), sizes_of(&x), Rows::Bf16.dtype());
                assert_eq!(plans.map(|plans| plans.state_pass.split_k), Ok(2), "{recipe:?}");
                hold(&client, &format!("{key_width}, {recipe:?}"), &x, Rows::Bf16, HALF);
            }
        }
    }

    /// Every variant of one transition where a slice of keys or of values is not filled.
    fn partly_filled_slices(family: Family, erase: bool) {
        let client = client();
        // Last: a chunk of two tokens.
        for [tokens, key_width, value_width] in [[150, 16, 16], [150, 48, 80], [130, 80, 64]] {
            let dims = oracle::Dims { key_width, value_width, ..dims(tokens) };
            for recipe in recipes(family, erase, DecayLevel::Typical) {
                let x = oracle::Inputs::random(3, dims, &recipe);
                has_tensor_cores(&client, &x, Rows::Bf16);
                hold(&client, &format!("{key_width}, {recipe:?}"), &x, Rows::Bf16, HALF);
            }
        }
    }

    /// Every variant of one transition in segments.
    fn segments(family: Family, erase: bool) {
        let client = client();
        // Tiles of 16, of 64 in local passes and 128 in state passes, and several of both.
        // Last: split-K.
        for [key_width, value_width] in [[64, 48], [128, 128], [64, 256], [256, 64]] {
            let dims = oracle::Dims { batch: 1, key_width, value_width, ..dims(800) };
            for recipe in recipes(family, erase, DecayLevel::Typical) {
                let x = oracle::Inputs::random(3, dims, &recipe);
                has_tensor_cores(&client, &x, Rows::Bf16);
                for segments in [2, 4, 10] {
                    let what = format!("{segments} segments, {key_width}, {recipe:?}");
                    hold_cut(&client, &what, &x, Rows::Bf16, HALF, Some(segments));
                }
            }
        }
    }

    /// A test for each transition: there are many kernels to compile.
    macro_rules! on_tensor_cores {
        ($($name:ident: $family:ident, $erase:literal;)*) => {$(
            mod $name {
                use super::*;

                #[test]
                fn variants_are_right_on_tensor_cores() {
                    variants(Family::$family, $erase);
                }

                #[test]
                fn wide_keys_are_right_on_tensor_cores() {
                    wide_keys(Family::$family, $erase);
                }

                #[test]
                fn partly_filled_slices_are_right_on_tensor_cores() {
                    partly_filled_slices(Family::$family, $erase);
                }

                #[test]
                fn segments_are_right_on_tensor_cores() {
                    segments(Family::$family, $erase);
                }
            }
        )*};
    }
    on_tensor_cores! {
        linear_attention: LinearAttention, false;
        the_delta_rule: DeltaRule, false;
        the_delta_rule_with_erase_rows: DeltaRule, true;
        low_rank_transitions: LowRank, false;
    }

    /// A delta rule whose forward pass is one launch where it saves nothing: a consumer warpgroup of each width of keys, and
    /// two where many heads fill the device.
    #[test]
    fn inference_in_one_launch_is_right() {
        let client = client();
        for (batch, tokens, key_width, value_width) in
            [(1, 260, 64, 64), (1, 150, 128, 64), (50, 70, 128, 128), (50, 70, 64, 128)]
        {
            let dims = oracle::Dims { batch, key_width, value_width, ..dims(tokens) };
            for rows in [Rows::Bf16, Rows::F16] {
                for decay in [DecayLevel::None, DecayLevel::Typical, DecayLevel::Mixed] {
                    for recipe in recipes(Family::DeltaRule, false, decay) {
                        let x = oracle::Inputs::random(3, dims, &recipe);
                        let (variant, sizes) = (variant(&x), sizes_of(&x));
                        let planned = Chunkwise::new(&client, variant, sizes, rows.dtype());
                        let planned = planned.expect("it fits");
                        // Other GPUs have no warpgroups, and vector decays are f32 around the pass.
                        if !planned.has_own_inference() {
                            continue;
                        }
                        hold(&client, &format!("{rows:?} {dims:?} {recipe:?}"), &x, rows, HALF);
                    }
                }
            }
        }
    }

    #[test]
    fn f32_takes_tensor_cores() {
        for (family, erase) in TRANSITIONS {
            for recipe in recipes(family, erase, DecayLevel::Typical) {
                let x = oracle::Inputs::random(3, dims(150), &recipe);
                let used = engine(&client(), variant(&x), sizes_of(&x), Rows::F32.dtype());
                assert_eq!(used, Ok(Engine::Tf32), "{recipe:?}");
            }
        }
    }

    #[test]
    fn steps_of_16_bits_are_right() {
        for rows in [Rows::Bf16, Rows::F16] {
            for (family, erase) in TRANSITIONS {
                every_step(&client(), family, erase, rows, HALF);
            }
        }
    }

    #[test]
    fn few_heads_are_right() {
        // On a device of many multiprocessors these are cut without being told to.
        for (tokens, rows, limits) in [(2500, Rows::F32, F32), (5000, Rows::Bf16, HALF)] {
            let dims = oracle::Dims { batch: 1, heads: 1, ..dims(tokens) };
            let dims = oracle::Dims { key_width: 64, value_width: 64, ..dims };
            for family in [Family::LinearAttention, Family::DeltaRule] {
                let recipe =
                    Recipe { decay: DecayLevel::Typical, state: true, ..Recipe::new(family) };
                let x = oracle::Inputs::random(5, dims, &recipe);
                hold(&client(), &format!("{family:?}, {dims:?}"), &x, rows, limits);
            }
        }
    }

    /// Of whole tiles, whose state passes copy ahead where a system is solved, and have 128 values where many heads fill the
    /// device.
    #[test]
    fn f32_of_whole_tiles_is_right() {
        for [key_width, value_width] in [[64, 64], [128, 64], [48, 32]] {
            let dims = oracle::Dims { key_width, value_width, ..dims(150) };
            for decay in [DecayLevel::None, DecayLevel::Mixed] {
                for recipe in recipes(Family::DeltaRule, false, decay) {
                    let x = oracle::Inputs::random(3, dims, &recipe);
                    hold(&client(), &format!("{recipe:?}, {dims:?}"), &x, Rows::F32, F32);
                }
            }
        }
        let many = oracle::Dims { batch: 50, key_width: 128, value_width: 128, ..dims(70) };
        let recipe = Recipe { decay: DecayLevel::Typical, ..Recipe::new(Family::LinearAttention) };
        let x = oracle::Inputs::random(3, many, &recipe);
        hold(&client(), &format!("{recipe:?}, {many:?}"), &x, Rows::F32, F32);
    }

    /// Gradients of rows that are made together, in several slices of keys and of values.
    #[test]
    fn f32_in_slices_is_right_under_a_vector_decay() {
        let dims = oracle::Dims { key_width: 48, value_width: 80, ..dims(130) };
        for (family, erase) in TRANSITIONS {
            for recipe in recipes(family, erase, DecayLevel::Mixed) {
                if recipe.vector_decay {
                    let x = oracle::Inputs::random(3, dims, &recipe);
                    hold(&client(), &format!("{recipe:?}, {dims:?}"), &x, Rows::F32, F32);
                }
            }
        }
    }

    #[test]
    fn odd_sizes_are_right() {
        let client = client();
        sizes(&client, &SIZES, Rows::F32, F32);
        sizes(&client, &SIZES, Rows::Bf16, HALF);
    }

    #[test]
    fn sequences_of_any_length_in_one_row_are_right() {
        varlen::every_family(&client());
    }

    #[test]
    fn rows_of_sequences_are_right_on_tensor_cores() {
        varlen::on_tensor_cores(&client());
    }
}

/// The first adapter of wgpu: through SPIR-V with the feature `vulkan`, else through WGSL, which is what
/// Metal, DirectX 12 and browsers are given.
pub(crate) mod on_wgpu {
    use super::*;
    use cubecl::device::Device;
    use cubecl::wgpu::{AutoGraphicsApi, GraphicsApi, WgpuDevice, WgpuRuntime};
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

    /// Tests at work on each of two devices.
    static AT_WORK: [AtomicUsize; 2] = [const { AtomicUsize::new(0) }; 2];

    /// A device compiles for all who use it on one thread. An adapter that is a processor has two names, so it
    /// is two devices, which two tests have compile side by side.
    struct Turn(usize);

    impl Turn {
        fn of_the_idler() -> Self {
            let [first, second] = AT_WORK.each_ref().map(|tests| tests.load(Relaxed));
            let turn = usize::from(second < first);
            AT_WORK[turn].fetch_add(1, Relaxed);
            Self(turn)
        }

        fn device(&self) -> WgpuDevice {
            match self.0 {
                0 => WgpuDevice::DefaultDevice,
                _ => WgpuDevice::Cpu,
            }
        }
    }

    impl Drop for Turn {
        fn drop(&mut self) {
            AT_WORK[self.0].fetch_sub(1, Relaxed);
        }
    }

    /// Without an adapter a test is skipped, visibly; where `LINATTN_REQUIRE_GPU` is set, it fails.
    /// Features are shared with whatever is built along with this crate, so a caller who wants one
    /// language of the two says so in `LINATTN_SHADERS`, `spirv` or `wgsl`.
    pub(crate) fn with_client(test: impl FnOnce(&ComputeClient<WgpuRuntime>)) {
        let adapters = WgpuRuntime::enumerate_all_devices(&AutoGraphicsApi::backend());
        if adapters.is_empty() {
            oracle::skipped_without_adapter();
            return;
        }
        let turn = (adapters == [WgpuDevice::Cpu.to_id()]).then(Turn::of_the_idler);
        let device = turn.as_ref().map_or(WgpuDevice::DefaultDevice, Turn::device);
        let client = WgpuRuntime::client(&device);
        if let Ok(wanted) = std::env::var("LINATTN_SHADERS") {
            assert_eq!(WgpuRuntime::name(&client), format!("wgpu<{wanted}>"), "this build");
        }
        test(&client);
    }

    each_transition!(#[ignore = "half an hour of compilation on a CPU; run on a GPU, with --ignored"]);

    #[test]
    fn a_scalar_decay_with_a_solve_is_right_in_segments() {
        with_client(|client| {
            cut(client, &Recipe { decay: DecayLevel::Typical, ..Recipe::new(Family::DeltaRule) })
        });
    }

    #[test]
    fn a_vector_decay_with_a_solve_is_right_in_segments() {
        let recipe =
            Recipe { decay: DecayLevel::Mixed, vector_decay: true, ..Recipe::new(Family::LowRank) };
        with_client(|client| cut(client, &recipe));
    }

    #[test]
    fn sequences_of_any_length_in_one_row_are_right() {
        // Every kernel is compiled anew for them: two families have all of the code.
        with_client(|client| varlen::families(client, &varlen::FAMILIES[1..2], &[false]));
        with_client(|client| varlen::families(client, &varlen::FAMILIES[3..], &[true]));
    }

    #[test]
    fn odd_sizes_are_right() {
        // Each width is compiled anew, which a device that is a CPU takes its time for.
        with_client(|client| sizes(client, &[&SIZES[..5], &SIZES[8..9]].concat(), Rows::F32, F32));
    }

    #[test]
    fn rows_of_16_bits_are_right_or_refused() {
        with_client(half_rows);
    }
}
