//! The forward pass: A_qk and T of a chunk, its pseudo-values and outputs, and the next state.

use cubecl::prelude::*;

/// Tokens of a chunk.
pub(super) const C: usize = 16;
/// Units of a cube.
pub(super) const UNITS: usize = 64;

/// Compile-time values of both kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Form {
    pub source: &'static str,
    pub k: usize,
    pub v: usize,
}

/// Inputs: q, k `[B, T, Hk, K]`, v `[B, T, H, V]`, g, beta `[B, T, H]`.
#[derive(CubeType, CubeLaunch)]
pub(super) struct Tensors {
    pub q: Array<f32>,
    pub k: Array<f32>,
    pub v: Array<f32>,
    pub g: Array<f32>,
    pub beta: Array<f32>,
    /// First state; backward the gradient of the last one. `[B, H, K, V]`.
    pub start: Array<f32>,
}

/// Results of the forward pass: o, the last state, S at the start of every chunk, U.
#[derive(CubeType, CubeLaunch)]
pub(super) struct Outputs {
    pub o: Array<f32>,
    pub end: Array<f32>,
    pub states: Array<f32>,
    pub u: Array<f32>,
}

/// Sizes that are no part of the compiled code.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct Sizes {
    pub tokens: u32,
    pub heads: u32,
    pub key_heads: u32,
}

/// A chunk of one head: row numbers of its first token in `[B T H]` and `[B T Hk]`, and from token to token.
#[derive(CubeType, Clone, Copy)]
pub(super) struct Chunk {
    pub row: usize,
    pub heads: usize,
    pub key_row: usize,
    pub key_heads: usize,
    pub tokens: usize,
    /// Number of its state in `[B, H, N]`.
    pub state: usize,
}

#[cube]
pub(super) fn chunk(sizes: &Sizes, c: usize) -> Chunk {
    let heads = sizes.heads as usize;
    let key_heads = sizes.key_heads as usize;
    let all = sizes.tokens as usize;
    let head = CUBE_POS_X as usize % heads;
    let token = CUBE_POS_X as usize / heads * all + c * C;
    Chunk {
        row: token * heads + head,
        heads,
        key_row: token * key_heads + head / (heads / key_heads),
        key_heads,
        tokens: min(all - c * C, C),
        state: CUBE_POS_X as usize * ((all - 1) / C + 1) + c,
    }
}

/// Row of token i in `[B T H]`: g, beta, v, o and gradients.
#[cube]
pub(super) fn row(chunk: &Chunk, i: usize) -> usize {
    chunk.row + i * chunk.heads
}

/// Row of token i in `[B T Hk]`: q and k.
#[cube]
pub(super) fn key_row(chunk: &Chunk, i: usize) -> usize {
    chunk.key_row + i * chunk.key_heads
}

/// G: [C], and A_qk, M, T: [C, C].
#[derive(CubeType)]
pub(super) struct Intra {
    pub g: SharedMemory<f32>,
    pub a_qk: SharedMemory<f32>,
    pub m: SharedMemory<f32>,
    pub t: SharedMemory<f32>,
}

#[cube]
pub(super) fn intra() -> Intra {
    Intra {
        g: SharedMemory::<f32>::new(C),
        a_qk: SharedMemory::<f32>::new(comptime!(C * C)),
        m: SharedMemory::<f32>::new(comptime!(C * C)),
        t: SharedMemory::<f32>::new(comptime!(C * C)),
    }
}

/// Intra-chunk: fills G, A_qk, M and T. Starts and ends with a barrier.
#[cube]
pub(super) fn fill_intra(to: &mut Intra, x: &Tensors, chunk: &Chunk, #[comptime] form: Form) {
    let unit = UNIT_POS as usize;
    sync_cube();
    if unit == 0 {
        let mut sum = 0.0f32;
        for i in 0..chunk.tokens {
            sum += x.g[row(chunk, i)];
            to.g[i] = sum;
        }
    }
    sync_cube();
    for turn in 0..comptime!(C * C / UNITS) {
        let n = turn * UNITS + unit;
        let i = n / C;
        let j = n % C;
        let mut qk = 0.0f32;
        let mut kk = 0.0f32;
        if i < chunk.tokens && j <= i {
            for d in 0..form.k {
                let k = x.k[key_row(chunk, j) * form.k + d];
                qk += x.q[key_row(chunk, i) * form.k + d] * k;
                kk += x.k[key_row(chunk, i) * form.k + d] * k;
            }
            let decay = f32::exp(to.g[i] - to.g[j]);
            qk *= decay;
            kk *= decay * x.beta[row(chunk, i)];
        }
        to.a_qk[n] = qk;
        to.m[n] = select(j < i, -kk, 0.0f32);
    }
    sync_cube();
    // T = I + M T: row after row, unit j has column j.
    if unit < C {
        for i in 0..C {
            let mut sum = select(i == unit, 1.0f32, 0.0f32);
            for l in 0..i {
                sum += to.m[i * C + l] * to.t[l * C + unit];
            }
            to.t[i * C + unit] = sum;
        }
    }
    sync_cube();
}

/// This unit's column of `x.start`, as the first state.
#[cube]
pub(super) fn load_state(
    x: &Tensors,
    #[comptime] given: bool,
    #[comptime] form: Form,
) -> SharedMemory<f32> {
    let numbers = comptime!(form.k * form.v);
    let v = UNIT_POS as usize;
    let mut s = SharedMemory::<f32>::new(numbers);
    if v < form.v {
        for d in 0..form.k {
            let mut number = 0.0f32;
            if comptime!(given) {
                number = x.start[CUBE_POS_X as usize * numbers + d * form.v + v];
            }
            s[d * form.v + v] = number;
        }
    }
    s
}

/// Tiles of the forward pass, in shared memory.
#[derive(CubeType)]
struct Tiles {
    intra: Intra,
    /// S, [K, V], and U, [C, V].
    s: SharedMemory<f32>,
    u: SharedMemory<f32>,
}

/// The forward pass.
#[cube(launch_unchecked)]
pub(super) fn simple_forward(
    x: &Tensors,
    out: &mut Outputs,
    sizes: &Sizes,
    #[comptime] given: bool,
    #[comptime] form: Form,
) {
    let numbers = comptime!(form.k * form.v);
    let v = UNIT_POS as usize;
    let mut tiles = Tiles {
        intra: intra(),
        s: load_state(x, given, form),
        u: SharedMemory::<f32>::new(comptime!(C * form.v)),
    };
    for c in 0..(sizes.tokens as usize - 1) / C + 1 {
        let chunk = chunk(sizes, c);
        fill_intra(&mut tiles.intra, x, &chunk, form);
        if v < form.v {
            forward_column(&mut tiles, x, out, &chunk, form);
        }
    }
    if v < form.v {
        for d in 0..form.k {
            out.end[CUBE_POS_X as usize * numbers + d * form.v + v] = tiles.s[d * form.v + v];
        }
    }
}

/// One chunk forward, for this unit's column of S, U and O.
#[cube]
fn forward_column(
    tiles: &mut Tiles,
    x: &Tensors,
    out: &mut Outputs,
    chunk: &Chunk,
    #[comptime] form: Form,
) {
    let v = UNIT_POS as usize;
    // beta (V - e^G K S); and O = e^G Q S.
    for i in 0..chunk.tokens {
        let mut read = 0.0f32;
        let mut retrieved = 0.0f32;
        for d in 0..form.k {
            let state = tiles.s[d * form.v + v];
            read += x.q[key_row(chunk, i) * form.k + d] * state;
            retrieved += x.k[key_row(chunk, i) * form.k + d] * state;
        }
        let at = row(chunk, i);
        let decay = f32::exp(tiles.intra.g[i]);
        tiles.u[i * form.v + v] = x.beta[at] * (x.v[at * form.v + v] - decay * retrieved);
        out.o[at * form.v + v] = decay * read;
    }
    // U = T beta (V - e^G K S), in place: T is lower triangular, so the last row comes first.
    for back in 0..chunk.tokens {
        let i = chunk.tokens - 1 - back;
        let mut sum = 0.0f32;
        for j in 0..i + 1 {
            sum += tiles.intra.t[i * C + j] * tiles.u[j * form.v + v];
        }
        tiles.u[i * form.v + v] = sum;
        out.u[row(chunk, i) * form.v + v] = sum;
    }
    // O += A_qk U.
    for i in 0..chunk.tokens {
        let mut sum = 0.0f32;
        for j in 0..i + 1 {
            sum += tiles.intra.a_qk[i * C + j] * tiles.u[j * form.v + v];
        }
        out.o[row(chunk, i) * form.v + v] += sum;
    }
    // S' = e^{G_C} S + (e^{G_C - G} K)^T U. S is saved.
    let last = tiles.intra.g[chunk.tokens - 1];
    for d in 0..form.k {
        let at = d * form.v + v;
        out.states[chunk.state * comptime!(form.k * form.v) + at] = tiles.s[at];
        let mut sum = f32::exp(last) * tiles.s[at];
        for j in 0..chunk.tokens {
            let k = x.k[key_row(chunk, j) * form.k + d];
            sum += f32::exp(last - tiles.intra.g[j]) * k * tiles.u[j * form.v + v];
        }
        tiles.s[at] = sum;
    }
}
