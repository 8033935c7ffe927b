//! The backward pass: the adjoint of each line of the forward pass, last line first.

use super::forward::{
    C, Chunk, Form, Intra, Sizes, Tensors, UNITS, chunk, fill_intra, intra, key_row, load_state,
    row,
};
use cubecl::prelude::*;

/// Tensors that the backward pass reads besides inputs.
#[derive(CubeType, CubeLaunch)]
pub(super) struct Saved {
    pub states: Array<f32>,
    pub u: Array<f32>,
    pub d_o: Array<f32>,
}

/// Gradients of the inputs, all for each value head, and of the first state.
#[derive(CubeType, CubeLaunch)]
pub(super) struct Gradients {
    pub q: Array<f32>,
    pub k: Array<f32>,
    pub v: Array<f32>,
    pub g: Array<f32>,
    pub beta: Array<f32>,
    pub start: Array<f32>,
}

/// Shared memory of the backward pass.
#[derive(CubeType)]
struct Adjoint {
    intra: Intra,
    /// dS, [K, V], and R, [C, V].
    d_s: SharedMemory<f32>,
    r: SharedMemory<f32>,
    /// dA_qk and dM, each times D_ij = e^{G_i - G_j}, [C, C].
    d_qk: SharedMemory<f32>,
    d_m: SharedMemory<f32>,
    /// Terms of dG: of e^{G_i - G_j}, [C, C]; of e^{G_i} and e^{G_C - G_i}, [C]; of e^{G_C}, by column and token.
    pairs: SharedMemory<f32>,
    tokens: SharedMemory<f32>,
    ends: SharedMemory<f32>,
}

/// The backward pass, from the last chunk to the first.
#[cube(launch_unchecked)]
pub(super) fn simple_backward(
    x: &Tensors,
    saved: &Saved,
    out: &mut Gradients,
    sizes: &Sizes,
    #[comptime] given: bool,
    #[comptime] form: Form,
) {
    let numbers = comptime!(form.k * form.v);
    let v = UNIT_POS as usize;
    let chunks = (sizes.tokens as usize - 1) / C + 1;
    let mut adjoint = Adjoint {
        intra: intra(),
        d_s: load_state(x, given, form),
        r: SharedMemory::<f32>::new(comptime!(C * form.v)),
        d_qk: SharedMemory::<f32>::new(comptime!(C * C)),
        d_m: SharedMemory::<f32>::new(comptime!(C * C)),
        pairs: SharedMemory::<f32>::new(comptime!(C * C)),
        tokens: SharedMemory::<f32>::new(C),
        ends: SharedMemory::<f32>::new(comptime!(UNITS + C)),
    };
    for back in 0..chunks {
        let chunk = chunk(sizes, chunks - 1 - back);
        fill_intra(&mut adjoint.intra, x, &chunk, form);
        solve_column(&mut adjoint, x, saved, out, &chunk, form);
        sync_cube();
        score_gradients(&mut adjoint, saved, &chunk, form);
        sync_cube();
        token_gradients(&mut adjoint, x, saved, out, &chunk, form);
        sync_cube();
        decay_gradients(&adjoint, out, &chunk);
        state_gradient(&mut adjoint, x, saved, &chunk, form);
    }
    if v < form.v {
        for d in 0..form.k {
            let at = d * form.v + v;
            out.start[CUBE_POS_X as usize * numbers + at] = adjoint.d_s[at];
        }
    }
}

/// R and dv, and the column's part of e^{G_C} (S . dS').
#[cube]
fn solve_column(
    adjoint: &mut Adjoint,
    x: &Tensors,
    saved: &Saved,
    out: &mut Gradients,
    chunk: &Chunk,
    #[comptime] form: Form,
) {
    let v = UNIT_POS as usize;
    let last = adjoint.intra.g[chunk.tokens - 1];
    let mut through = 0.0f32;
    if v < form.v {
        // R' = A_qk^T dO + e^{G_C - G} K dS'.
        for j in 0..chunk.tokens {
            let mut sum = 0.0f32;
            for d in 0..form.k {
                sum += x.k[key_row(chunk, j) * form.k + d] * adjoint.d_s[d * form.v + v];
            }
            sum *= f32::exp(last - adjoint.intra.g[j]);
            for i in j..chunk.tokens {
                sum += adjoint.intra.a_qk[i * C + j] * saved.d_o[row(chunk, i) * form.v + v];
            }
            adjoint.r[j * form.v + v] = sum;
        }
        // R = T^T R', in place: the first row comes first.
        for j in 0..chunk.tokens {
            let mut sum = 0.0f32;
            for i in j..chunk.tokens {
                sum += adjoint.intra.t[i * C + j] * adjoint.r[i * form.v + v];
            }
            adjoint.r[j * form.v + v] = sum;
            out.v[row(chunk, j) * form.v + v] = x.beta[row(chunk, j)] * sum;
        }
        for d in 0..form.k {
            let at = d * form.v + v;
            through +=
                saved.states[chunk.state * comptime!(form.k * form.v) + at] * adjoint.d_s[at];
        }
    }
    adjoint.ends[v] = f32::exp(last) * through;
}

/// dA_qk and dM, and the terms of dG of each e^{G_i - G_j}: none on the diagonal, where the exponent is 0.
#[cube]
fn score_gradients(adjoint: &mut Adjoint, saved: &Saved, chunk: &Chunk, #[comptime] form: Form) {
    for turn in 0..comptime!(C * C / UNITS) {
        let n = turn * UNITS + UNIT_POS as usize;
        let i = n / C;
        let j = n % C;
        let mut by_o = 0.0f32;
        let mut by_r = 0.0f32;
        let mut decay = 0.0f32;
        if i < chunk.tokens && j <= i {
            for v in 0..form.v {
                let u = saved.u[row(chunk, j) * form.v + v];
                by_o += saved.d_o[row(chunk, i) * form.v + v] * u;
                by_r += adjoint.r[i * form.v + v] * u;
            }
            decay = f32::exp(adjoint.intra.g[i] - adjoint.intra.g[j]);
        }
        let term = by_o * adjoint.intra.a_qk[n] + by_r * adjoint.intra.m[n];
        adjoint.d_qk[n] = by_o * decay;
        adjoint.d_m[n] = select(j < i, by_r * decay, 0.0f32);
        adjoint.pairs[n] = select(j < i, term, 0.0f32);
    }
}

/// dq, dk and dbeta of token i, by unit i.
#[cube]
fn token_gradients(
    adjoint: &mut Adjoint,
    x: &Tensors,
    saved: &Saved,
    out: &mut Gradients,
    chunk: &Chunk,
    #[comptime] form: Form,
) {
    let i = UNIT_POS as usize;
    if i < chunk.tokens {
        let at = row(chunk, i);
        let beta = x.beta[at];
        let from_start = f32::exp(adjoint.intra.g[i]);
        let to_end = f32::exp(adjoint.intra.g[chunk.tokens - 1] - adjoint.intra.g[i]);
        let mut d_beta = 0.0f32;
        let mut of_token = 0.0f32;
        let mut of_end = 0.0f32;
        for d in 0..form.k {
            // With a state: e^{G_i} dO_i S^T, e^{G_i} R_i S^T, e^{G_C - G_i} U_i dS'^T; a = -beta k.
            let mut d_q = 0.0f32;
            let mut d_a = 0.0f32;
            let mut d_k = 0.0f32;
            for v in 0..form.v {
                let s = saved.states[chunk.state * comptime!(form.k * form.v) + d * form.v + v];
                d_q += saved.d_o[at * form.v + v] * s;
                d_a += adjoint.r[i * form.v + v] * s;
                d_k += saved.u[at * form.v + v] * adjoint.d_s[d * form.v + v];
            }
            d_q *= from_start;
            d_a *= from_start;
            d_k *= to_end;
            let q = x.q[key_row(chunk, i) * form.k + d];
            let k = x.k[key_row(chunk, i) * form.k + d];
            of_token += q * d_q - beta * k * d_a - k * d_k;
            of_end += k * d_k;
            // With other tokens.
            for j in 0..i + 1 {
                let key = x.k[key_row(chunk, j) * form.k + d];
                d_q += adjoint.d_qk[i * C + j] * key;
                d_a += adjoint.d_m[i * C + j] * key;
            }
            for l in i..chunk.tokens {
                let key = key_row(chunk, l) * form.k + d;
                d_k += adjoint.d_qk[l * C + i] * x.q[key];
                d_k -= adjoint.d_m[l * C + i] * x.beta[row(chunk, l)] * x.k[key];
            }
            out.q[at * form.k + d] = d_q;
            out.k[at * form.k + d] = d_k - beta * d_a;
            d_beta -= k * d_a;
        }
        for v in 0..form.v {
            d_beta += x.v[at * form.v + v] * adjoint.r[i * form.v + v];
        }
        out.beta[at] = d_beta;
        adjoint.tokens[i] = of_token;
        adjoint.ends[UNITS + i] = of_end;
    }
}

/// dg_t: the sum of dG_i from t on, and of the terms of the chunk's end.
#[cube]
fn decay_gradients(adjoint: &Adjoint, out: &mut Gradients, chunk: &Chunk) {
    if UNIT_POS == 0 {
        let mut sum = 0.0f32;
        for n in 0..UNITS + chunk.tokens {
            sum += adjoint.ends[n];
        }
        for back in 0..chunk.tokens {
            let i = chunk.tokens - 1 - back;
            sum += adjoint.tokens[i];
            for j in 0..chunk.tokens {
                sum += adjoint.pairs[i * C + j] - adjoint.pairs[j * C + i];
            }
            out.g[row(chunk, i)] = sum;
        }
    }
}

/// dS = e^{G_C} dS' + (e^G Q)^T dO - (e^G beta K)^T R, this unit's column.
#[cube]
fn state_gradient(
    adjoint: &mut Adjoint,
    x: &Tensors,
    saved: &Saved,
    chunk: &Chunk,
    #[comptime] form: Form,
) {
    let v = UNIT_POS as usize;
    if v < form.v {
        let last = adjoint.intra.g[chunk.tokens - 1];
        for d in 0..form.k {
            let mut sum = f32::exp(last) * adjoint.d_s[d * form.v + v];
            for i in 0..chunk.tokens {
                let at = row(chunk, i);
                let key = key_row(chunk, i) * form.k + d;
                let read = x.q[key] * saved.d_o[at * form.v + v];
                let erased = x.beta[at] * x.k[key] * adjoint.r[i * form.v + v];
                sum += f32::exp(adjoint.intra.g[i]) * (read - erased);
            }
            adjoint.d_s[d * form.v + v] = sum;
        }
    }
}
