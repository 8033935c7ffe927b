//! Offsets of a chunk in the tensors, and cumulative decay within it.

use crate::chunkwise::plan::Plan;
use crate::tile::{Pair, Rows};
use cubecl::prelude::*;

/// Sizes that are no part of the compiled code.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Sizes {
    pub tokens: u32,
    pub heads: u32,
    pub key_heads: u32,
    pub chunks: u32,
    /// Chunks of a segment.
    pub segment: u32,
    /// Where sequences have lengths of their own: the table of varlen.rs.
    pub table: Array<u32>,
}

/// One chunk of one head of one sequence.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Place {
    /// Rows of q and k, `[B, T, Hk, K]`.
    pub keys: Rows,
    /// Rows of v and o, `[B, T, H, V]`.
    pub values: Rows,
    /// Rows of a, b and a vector decay, `[B, T, H, K]`.
    pub rows: Rows,
    /// Numbers of a token and head, `[B, T, H]`: a scalar decay, and beta.
    pub scalars: Rows,
    /// Number of the chunk among all, `[B, H, chunks]`, or `[H, chunks]` of all sequences.
    pub index: usize,
    /// Tokens it has.
    pub valid: usize,
}

/// Offsets of one (sequence, head), common to its chunks: computed once, because they take divisions.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct HeadOffsets {
    pub tokens: usize,
    pub heads: usize,
    pub key_heads: usize,
    pub head: usize,
    pub key_head: usize,
    /// Its sequence's first token, of all sequences' tokens.
    pub first: usize,
    /// Its first chunk, of all chunks.
    pub chunks: usize,
}

/// (Sequence, head) `batch_head` where all sequences have one length.
#[cube]
pub(crate) fn head_offsets(sizes: &Sizes, batch_head: usize) -> HeadOffsets {
    let heads = sizes.heads as usize;
    let key_heads = sizes.key_heads as usize;
    let tokens = sizes.tokens as usize;
    let head = batch_head % heads;
    HeadOffsets {
        tokens,
        heads,
        key_heads,
        head,
        key_head: head / (heads / key_heads),
        first: batch_head / heads * tokens,
        chunks: batch_head * sizes.chunks as usize,
    }
}

/// A chunk of a (sequence, head).
#[cube]
pub(crate) fn place_in(head_offsets: &HeadOffsets, chunk: usize, #[comptime] plan: Plan) -> Place {
    let token = chunk * comptime!(plan.chunk);
    let valid = min(head_offsets.tokens - token, comptime!(plan.chunk));
    let first = head_offsets.first + token;
    let token_head = first * head_offsets.heads + head_offsets.head;
    Place {
        keys: Rows {
            start: (first * head_offsets.key_heads + head_offsets.key_head)
                * comptime!(plan.key_width),
            stride: head_offsets.key_heads * comptime!(plan.key_width),
            valid,
        },
        values: Rows {
            start: token_head * comptime!(plan.value_width),
            stride: head_offsets.heads * comptime!(plan.value_width),
            valid,
        },
        rows: Rows {
            start: token_head * comptime!(plan.key_width),
            stride: head_offsets.heads * comptime!(plan.key_width),
            valid,
        },
        scalars: Rows { start: token_head, stride: head_offsets.heads, valid },
        index: head_offsets.chunks + chunk,
        valid,
    }
}

/// A matrix of its own for every chunk, `[B, H, chunks, rows, columns]`.
#[cube]
pub(crate) fn own(place: &Place, #[comptime] rows: usize, #[comptime] columns: usize) -> Rows {
    Rows { start: place.index * comptime!(rows * columns), stride: columns, valid: rows }
}

/// Sums of log decays from the start of the chunk up to and with each token, [C] or [C, columns], in
/// two parts: `coarse` in sixteenths, whose sums are exact, and the small rest, `fine`. A difference
/// of two sums is then as exact between small log decays behind one of -50 as anywhere else.
#[derive(CubeType)]
pub(crate) struct Sums {
    pub coarse: SharedMemory<f32>,
    pub fine: SharedMemory<f32>,
    /// Where a stage needs them under a vector decay: e^g of each token, shaped as the sums. A decay over a few
    /// tokens is a product of these, without an exponential.
    pub decays: SharedMemory<f32>,
}

/// Room for so many sums and decays.
#[cube]
pub(crate) fn sums(#[comptime] numbers: usize, #[comptime] decays: usize) -> Sums {
    Sums {
        coarse: SharedMemory::<f32>::new(numbers),
        fine: SharedMemory::<f32>::new(numbers),
        decays: SharedMemory::<f32>::new(decays),
    }
}

/// Room for the sums of a chunk, under a vector decay those of one slice of keys.
#[cube]
pub(crate) fn chunk_sums(#[comptime] with_decays: bool, #[comptime] plan: Plan) -> Sums {
    let [numbers, decays] = comptime!(plan.sums_numbers(with_decays));
    sums(numbers, decays)
}

/// `G_i - G_j`, the log decay from token `j` to token `i`; never above 0.
#[cube]
pub(crate) fn between(sums: &Sums, i: usize, j: usize) -> f32 {
    min((sums.coarse[i] - sums.coarse[j]) + (sums.fine[i] - sums.fine[j]), 0.0f32)
}

/// The row of sums that reader `i` sees: its own, or the one before it.
#[cube]
pub(crate) fn seen(i: usize, #[comptime] before: bool) -> usize {
    if comptime!(before) { max(i, 1usize) - 1 } else { i }
}

/// `G_i`, the log decay from the chunk's start to token `i`.
#[cube]
pub(crate) fn since_start(sums: &Sums, i: usize) -> f32 {
    sums.coarse[i] + sums.fine[i]
}

/// Sums of scalar log decays, [C]. Ends with everything visible to all.
#[cube]
pub(crate) fn sum_scalars(sums: &mut Sums, g: &Array<f32>, rows: &Rows, #[comptime] plan: Plan) {
    if comptime!(plan.has_planes()) {
        if UNIT_POS < 32 {
            let i = UNIT_POS as usize * 2;
            let (first, second) = (of_token(g, rows, i), of_token(g, rows, i + 1));
            scan(sums, i, first, second, i < comptime!(plan.chunk));
        }
        sync_cube();
    } else {
        sum_one_by_one(sums, g, rows, plan);
    }
}

/// The number of token `i`, a log decay or beta; 0 behind the last.
#[cube]
pub(crate) fn of_token(x: &Array<f32>, rows: &Rows, i: usize) -> f32 {
    let mut x_i = 0.0f32;
    if i < rows.valid {
        x_i = x[rows.start + i * rows.stride];
    }
    x_i
}

/// [`sum_scalars`] on devices whose planes are not known to be of 32.
#[cube]
fn sum_one_by_one(sums: &mut Sums, g: &Array<f32>, rows: &Rows, #[comptime] plan: Plan) {
    let i = UNIT_POS as usize;
    let g_i = of_token(g, rows, i);
    let coarse = f32::round(g_i * 16.0f32) * 0.0625f32;
    if i < comptime!(plan.chunk) {
        sums.coarse[i] = coarse;
        sums.fine[i] = g_i - coarse;
    }
    sync_cube();
    let mut a = 0.0f32;
    let mut b = 0.0f32;
    if i < comptime!(plan.chunk) {
        for j in 0..i + 1 {
            a += sums.coarse[j];
            b += sums.fine[j];
        }
    }
    sync_cube();
    if i < comptime!(plan.chunk) {
        sums.coarse[i] = a;
        sums.fine[i] = b;
    }
    sync_cube();
}

/// As [`sum_scalars`], by a plane of 32 for itself: two of 64 log decays a unit, which begin at `decays_at`;
/// the sums begin at `at`. Ends with everything visible to the plane.
#[cube]
pub(crate) fn sum_by_plane(
    sums: &mut Sums,
    at: usize,
    log_decays: &SharedMemory<f32>,
    decays_at: usize,
) {
    let i = UNIT_POS as usize % 32 * 2;
    scan(sums, at + i, log_decays[decays_at + i], log_decays[decays_at + i + 1], true);
    sync_plane();
}

/// Sums of up to 64 log decays by a plane of 32; this unit's two, `first` and `second`, have theirs at `at`, if
/// they are there.
#[cube]
fn scan(sums: &mut Sums, at: usize, first: f32, second: f32, there: bool) {
    let own = lane_sums(first, second);
    if there {
        store_lane_sums(sums, at, &own);
    }
}

/// [`Sums`] of a lane's two tokens.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct LaneSums {
    pub coarse: Pair,
    pub fine: Pair,
}

/// Writes a lane's sums, from `at` on.
#[cube]
pub(crate) fn store_lane_sums(sums: &mut Sums, at: usize, own: &LaneSums) {
    #[unroll]
    for l in 0..2usize {
        sums.coarse[at + l] = own.coarse[l];
        sums.fine[at + l] = own.fine[l];
    }
}

/// Sums of 64 log decays by a plane of 32, of which this unit has two, `first` and `second`.
#[cube]
pub(crate) fn lane_sums(first: f32, second: f32) -> LaneSums {
    let coarse_first = f32::round(first * 16.0f32) * 0.0625f32;
    let coarse_second = f32::round(second * 16.0f32) * 0.0625f32;
    let fine_first = first - coarse_first;
    let fine_second = second - coarse_second;
    let mut coarse = coarse_first + coarse_second;
    let mut fine = fine_first + fine_second;
    #[unroll]
    for n in 0..5usize {
        let back = comptime!(1u32 << n);
        let coarse_before = plane_shuffle_up(coarse, back);
        let fine_before = plane_shuffle_up(fine, back);
        let before = UNIT_POS % 32 >= back;
        coarse += select(before, coarse_before, 0.0f32);
        fine += select(before, fine_before, 0.0f32);
    }
    let mut own = LaneSums { coarse: Pair::empty(), fine: Pair::empty() };
    own.coarse[0] = coarse - coarse_second;
    own.coarse[1] = coarse;
    own.fine[0] = fine - fine_second;
    own.fine[1] = fine;
    own
}

/// e^g, the share that a log decay keeps, by the device's short exponential: on NVIDIA right to about 2e-7 (1 + |g|) of
/// itself.
#[cube(fast_math = FastMath::ReducedPrecision | FastMath::NotNaN | FastMath::NotInf)]
pub(crate) fn share_kept(log_decay: f32) -> f32 {
    f32::exp(log_decay)
}

/// Log decays of this unit's run of tokens of one key, of keys `first..first + key_slice`, requested and not yet waited
/// for; 0 where there is no token or key.
#[cube]
pub(crate) fn request_log_decays(
    coming: &mut Array<f32>,
    g: &Array<f32>,
    rows: &Rows,
    first: usize,
    #[comptime] plan: Plan,
) {
    let length = comptime!(plan.run_length());
    let d = first + UNIT_POS as usize % comptime!(plan.key_slice);
    let start = UNIT_POS as usize / comptime!(plan.key_slice) * length;
    #[unroll]
    for n in 0..length {
        let i = start + n;
        let mut g_i = 0.0f32;
        if i < rows.valid && d < comptime!(plan.key_width) {
            g_i = g[rows.start + i * rows.stride + d];
        }
        coming[n] = g_i;
    }
}

/// Sums of the log decays of [`request_log_decays`], [C, key_slice] in rows of the tiles' stride. Every unit sums its
/// run, and adds what the runs before it sum to. Ends with a barrier; where sums were there before, the caller has
/// one in front.
#[cube]
pub(crate) fn sum_vectors(
    sums: &mut Sums,
    coming: &Array<f32>,
    #[comptime] with_decays: bool,
    #[comptime] plan: Plan,
) {
    let stride = comptime!(plan.stride(plan.key_slice));
    let runs = comptime!(plan.runs());
    let length = comptime!(plan.run_length());
    let d = UNIT_POS as usize % comptime!(plan.key_slice);
    let run = UNIT_POS as usize / comptime!(plan.key_slice);
    let start = run * comptime!(length * stride) + d;
    let mut coarse = Array::<f32>::new(length);
    let mut fine = Array::<f32>::new(length);
    let mut coarse_sum = 0.0f32;
    let mut fine_sum = 0.0f32;
    #[unroll]
    for n in 0..length {
        let rounded = f32::round(coming[n] * 16.0f32) * 0.0625f32;
        coarse_sum += rounded;
        fine_sum += coming[n] - rounded;
        coarse[n] = coarse_sum;
        fine[n] = fine_sum;
    }
    if run < runs {
        let last = start + comptime!((length - 1) * stride);
        sums.coarse[last] = coarse_sum;
        sums.fine[last] = fine_sum;
    }
    sync_cube();
    let mut coarse_before = 0.0f32;
    let mut fine_before = 0.0f32;
    #[unroll]
    for before in 0..runs {
        if before < run {
            let last = d + comptime!(((before + 1) * length - 1) * stride);
            coarse_before += sums.coarse[last];
            fine_before += sums.fine[last];
        }
    }
    sync_cube();
    if run < runs {
        #[unroll]
        for n in 0..length {
            let at = start + comptime!(n * stride);
            sums.coarse[at] = coarse[n] + coarse_before;
            sums.fine[at] = fine[n] + fine_before;
            if with_decays {
                sums.decays[at] = share_kept(min(coming[n], 0.0f32));
            }
        }
    }
    sync_cube();
}

impl Plan {
    /// Numbers of a chunk's [`Sums`] in each of their two parts, and of its decays.
    pub fn sums_numbers(&self, with_decays: bool) -> [usize; 2] {
        let by_key = self.chunk * self.stride(self.key_slice);
        match self.variant.decay {
            crate::Decay::None => [1, 1],
            crate::Decay::Scalar => [self.chunk, 1],
            crate::Decay::Vector if with_decays => [by_key, by_key],
            crate::Decay::Vector => [by_key, 1],
        }
    }

    /// Bytes of [`chunk_sums`].
    pub fn sums_memory(&self, with_decays: bool) -> usize {
        let [numbers, decays] = self.sums_numbers(with_decays);
        4 * (2 * numbers + decays)
    }

    /// Runs of tokens that units sum a key's log decays in.
    pub fn runs(&self) -> usize {
        (1..=self.units / self.key_slice).rev().find(|n| self.chunk.is_multiple_of(*n)).unwrap_or(1)
    }

    /// Tokens of a run.
    pub fn run_length(&self) -> usize {
        self.chunk / self.runs()
    }
}
