//! One token of linear attention or of the delta rule: decoding, in one launch.
//! ```text
//! Each (batch row, head) owns a memory S: [K, V].
//!     S   = e^g S                      forget            decay
//!     u   = v                          write value       no delta
//!     u   = beta (v - k S)             [V] error to fix  delta
//!     S   = S + k^T u                  write
//!     o   = q S                        [V] read, after the write
//!
//! q, k: [B, Hk, K]  F    value head j reads key head j / (H / Hk)
//! v, o: [B, H, V]   F
//! g, b: [B, H]      f32  natural log of the share kept; share of the error to correct
//! s:    [B, H, K, V] f32 read from `s`, written to `s_next`
//!
//! Work:   a unit a column of S: cube x is (row, head), cube y a run of UNITS columns. Units share
//!         nothing, so there is no barrier, no shared memory and no plane operation.
//! Cost:   about 7 K V flops for 8 K V bytes of state, once more read from cache; bound by memory.
//! Edges:  any K and V; columns past V return at once. K and V are run-time values: a new size
//!         compiles nothing.
//! Source: arXiv 2412.06464, whose S is ours transposed. No gradient: decoding has none.
//! ```

use cubecl::prelude::*;

/// Columns of a cube.
const UNITS: u32 = 32;

/// Sizes of one launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dims {
    /// B, sequences.
    pub batch: usize,
    /// Hk, heads of queries and keys.
    pub key_heads: usize,
    /// H, heads of values, a multiple of `key_heads`.
    pub heads: usize,
    /// K, width of a key.
    pub key_width: usize,
    /// V, width of a value.
    pub value_width: usize,
}

impl Dims {
    /// Cubes of a launch; `None` if the device's counters cannot hold them or an index into the
    /// state would pass 32 bits.
    pub fn cubes(&self, largest: (u32, u32, u32)) -> Option<CubeCount> {
        let x = u32::try_from(self.batch * self.heads).ok()?;
        let y = u32::try_from(self.value_width).ok()?.div_ceil(UNITS);
        let state = self.batch * self.heads * self.key_width * self.value_width;
        let fits = x <= largest.0 && y <= largest.1 && u32::try_from(state).is_ok();
        fits.then_some(CubeCount::Static(x, y, 1))
    }
}

/// Tensors of one launch, contiguous, shaped as the module says; `g` and `beta` where the operation
/// has them.
pub struct Args<R: Runtime> {
    /// Queries.
    pub q: TensorArg<R>,
    /// Keys.
    pub k: TensorArg<R>,
    /// Values.
    pub v: TensorArg<R>,
    /// Log decay.
    pub g: Option<TensorArg<R>>,
    /// Share of the error to correct.
    pub beta: Option<TensorArg<R>>,
    /// State before.
    pub s: TensorArg<R>,
    /// State after; filled.
    pub s_next: TensorArg<R>,
    /// Output; filled.
    pub o: TensorArg<R>,
}

/// Launches one step on tensors of type `dtype` (gates and states are f32). `stand_in` is any f32
/// tensor; it takes the place of gates that are not there, and is not read.
pub fn launch<R: Runtime>(
    client: &ComputeClient<R>,
    cubes: CubeCount,
    dims: Dims,
    args: Args<R>,
    stand_in: impl Fn() -> TensorArg<R>,
    dtype: StorageType,
) {
    let (decay, delta) = (args.g.is_some(), args.beta.is_some());
    // SAFETY: units past the last column stop, and all else stays within the sizes of `dims`, which
    // the caller promises; `decay` and `delta` say which stand-ins are not read.
    #[allow(unsafe_code)]
    unsafe {
        recurrent_step::launch_unchecked::<R>(
            client,
            cubes,
            CubeDim::new_1d(UNITS),
            args.q,
            args.k,
            args.v,
            args.g.unwrap_or_else(&stand_in),
            args.beta.unwrap_or_else(&stand_in),
            args.s,
            args.s_next,
            args.o,
            (dims.heads / dims.key_heads) as u32,
            dims.key_width as u32,
            dims.value_width as u32,
            decay,
            delta,
            dtype,
        );
    }
}

/// The kernel. `delta` and `decay` choose the parts that are compiled in; where a part is left out,
/// its tensor is not read.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)] // a launch takes what the kernel reads, one by one
fn recurrent_step<F: Float>(
    q: &Tensor<F>,
    k: &Tensor<F>,
    v: &Tensor<F>,
    g: &Tensor<f32>,
    beta: &Tensor<f32>,
    s: &Tensor<f32>,
    s_next: &mut Tensor<f32>,
    o: &mut Tensor<F>,
    group: u32,
    key_width: u32,
    value_width: u32,
    #[comptime] decay: bool,
    #[comptime] delta: bool,
    #[define(F)] _dtype: StorageType,
) {
    let row = CUBE_POS_X as usize;
    let column = (CUBE_POS_Y * CUBE_DIM_X + UNIT_POS_X) as usize;
    let width = value_width as usize;
    if column >= width {
        terminate!();
    }
    let keys = row / group as usize * key_width as usize;
    let start = row * key_width as usize * width + column;
    let mut kept = 1.0f32;
    if comptime!(decay) {
        kept = f32::exp(g[row]);
    }
    let mut u = f32::cast_from(v[row * width + column]);
    if comptime!(delta) {
        let mut answer = 0.0f32;
        for i in 0..key_width as usize {
            answer += f32::cast_from(k[keys + i]) * (kept * s[start + i * width]);
        }
        u = beta[row] * (u - answer);
    }
    let mut read = 0.0f32;
    for i in 0..key_width as usize {
        let at = start + i * width;
        let next = kept * s[at] + f32::cast_from(k[keys + i]) * u;
        s_next[at] = next;
        read += f32::cast_from(q[keys + i]) * next;
    }
    o[row * width + column] = F::cast_from(read);
}
