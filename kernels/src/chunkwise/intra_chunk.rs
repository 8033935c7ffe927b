//! Intra-chunk: attention matrices and the UT transform of every chunk, all chunks at once.
//!
//! ```text
//! A_qk = tril(q|k)                               [C, C]   strict where queries read before the decay
//! T    = (I - strict(a|b))^-1                    [C, C]   UT transform; delta: a = -beta e, b = k
//! low rank: A_qb   = tril(q|b)                   [C, C]
//!           A_ak   = strict(a|k)                 [C, C]
//!           A_ak V                               [C, V]
//! scalar decay: e^G, e^{G_C - G} for the stages after this one, [5, C] (see `decay_factors`)
//! vector decay: q, a, b and k times these, and e^{G_C}, [K]
//! ```
//! Work:   a cube a chunk of a (sequence, head), over slices of keys. Where the state pass has
//!         producer planes this stage is not launched: [`produce_scores`] does its work in their cubes.
//! Cost:   about C K multiplications a token and product; T another C^2 / 3.

use crate::chunkwise::arguments::{IntraChunkOut, Operands};
use crate::chunkwise::chunk::{
    Place, Sizes, Sums, between, chunk_sums, own, place, since_start, sum_by_plane, sum_scalars,
    sum_vectors, sums,
};
use crate::chunkwise::plan::{Plan, row_major, transposed};
use crate::chunkwise::triangular_inverse::{invert, stride as inverse_stride};
use crate::chunkwise::vector_decay::{add_near, near_scores, scores as decayed_scores, seen};
use crate::tile::{
    Acc, Grid, Pair, Rows, column, fetch, inside, lay, load, mul, put, put_out, row, set, tile,
    zeros,
};
use cubecl::prelude::*;

/// Rows of a chunk's decay factors, C numbers each.
pub(crate) mod decay_factors {
    /// e^G of queries: factor of q S.
    pub const QUERY: usize = 0;
    /// e^G of erase keys: factor of a S, the delta rule's -beta included.
    pub const ERASE: usize = 1;
    /// e^{G_C - G}: share of a token's write that is left at the end of the chunk.
    pub const KEY_TO_END: usize = 2;
    /// e^G: share of the chunk's first state; the last entry is the chunk decay e^{G_C}.
    pub const FROM_START: usize = 3;
    /// beta: factor of v in a delta rule.
    pub const BETA: usize = 4;
    /// How many there are.
    pub const ROWS: usize = 5;
}

/// The kernel. F: the tensors' type; X: what tiles hold; E: what is kept for the next stages.
#[cube(launch_unchecked)]
pub(crate) fn intra_chunk<F: Float, X: Float, E: Float, G: Size, N: Size, M: Size>(
    x: &Operands<F, G>,
    out: &mut IntraChunkOut<E, M>,
    sizes: &Sizes,
    #[comptime] plan: Plan,
    #[define(F, X, E)] _types: [StorageType; 3],
    #[define(G, N, M)] _widths: [usize; 3],
) {
    let variant = comptime!(plan.variant);
    let place = place(sizes, CUBE_POS_Y as usize, CUBE_POS_X as usize, plan);
    let grid = comptime!(plan.pairs());
    let fragments = comptime!(grid.fragments());
    let numbers = comptime!(plan.chunk * plan.stride(plan.key_slice));
    let mut q = tile::<X, N>(numbers);
    let mut k = tile::<X, N>(numbers);
    let mut a = tile::<X, N>(comptime!(if variant.own_a() { numbers } else { 16 }));
    let mut b = tile::<X, N>(comptime!(if variant.low_rank() { numbers } else { 16 }));
    let mut sums = chunk_sums(comptime!(plan.has_near_scores()), plan);
    if comptime!(variant.scalar() && plan.key_slices() > 1) {
        sum_scalars(&mut sums, &x.g, &place.gates, plan);
    }
    let mut qk = zeros(fragments);
    let mut ab = zeros(comptime!(if variant.solves() { fragments } else { 0 }));
    let mut qb = zeros(comptime!(if variant.low_rank() { fragments } else { 0 }));
    let mut ak = zeros(comptime!(if variant.low_rank() { fragments } else { 0 }));
    let mut near_qk = near_scores(true, plan);
    let mut near_ab = near_scores(comptime!(variant.solves()), plan);
    let mut near_qb = near_scores(comptime!(variant.low_rank()), plan);
    let mut near_ak = near_scores(comptime!(variant.low_rank()), plan);
    for slice in 0..comptime!(plan.key_slices()) {
        let first = slice * comptime!(plan.key_slice);
        let window = comptime!(plan.key_window());
        if comptime!(variant.vector()) {
            sync_cube();
            load::<F, G, X, N>(&mut q, &x.q, &place.keys, first, window);
            load::<F, G, X, N>(&mut k, &x.k, &place.keys, first, window);
        } else {
            let queries = fetch::<F, G>(&x.q, &place.keys, first, window);
            let keys = fetch::<F, G>(&x.k, &place.keys, first, window);
            if comptime!(variant.scalar() && plan.key_slices() == 1) {
                // While rows are on their way.
                sum_scalars(&mut sums, &x.g, &place.gates, plan);
            }
            sync_cube();
            lay::<F, G, X, N>(&mut q, &queries, window);
            lay::<F, G, X, N>(&mut k, &keys, window);
        }
        if comptime!(variant.own_a()) {
            load::<F, G, X, N>(&mut a, &x.a, &place.rows, first, comptime!(plan.key_window()));
        }
        if comptime!(variant.low_rank()) {
            load::<F, G, X, N>(&mut b, &x.b, &place.rows, first, comptime!(plan.key_window()));
        }
        if comptime!(variant.vector()) {
            let decays = comptime!(plan.has_near_scores());
            sum_vectors::<G>(&mut sums, &x.gates, &place.rows, first, decays, plan);
        }
        sync_cube();
        let query_before = comptime!(variant.reads_before());
        let erase_before = comptime!(variant.erases_before());
        product::<X, N>(&mut qk, &mut near_qk, &q, &k, &sums, query_before, plan);
        if comptime!(variant.low_rank()) {
            product::<X, N>(&mut qb, &mut near_qb, &q, &b, &sums, query_before, plan);
            product::<X, N>(&mut ab, &mut near_ab, &a, &b, &sums, erase_before, plan);
            product::<X, N>(&mut ak, &mut near_ak, &a, &k, &sums, erase_before, plan);
        } else if comptime!(variant.own_a()) {
            product::<X, N>(&mut ab, &mut near_ab, &a, &k, &sums, erase_before, plan);
        } else if comptime!(variant.solves()) {
            product::<X, N>(&mut ab, &mut near_ab, &k, &k, &sums, erase_before, plan);
        }
        if comptime!(variant.vector()) {
            keep_scaled::<X, E, N, M>(out, &q, &k, &a, &b, &sums, &place, first, plan);
        }
    }
    if comptime!(plan.has_near_scores()) {
        let mut exchange = SharedMemory::<f32>::new(comptime!(plan.near_memory() / 4));
        add_near(&mut qk, &mut near_qk, &mut exchange, plan);
        if comptime!(variant.solves()) {
            add_near(&mut ab, &mut near_ab, &mut exchange, plan);
        }
        if comptime!(variant.low_rank()) {
            add_near(&mut qb, &mut near_qb, &mut exchange, plan);
            add_near(&mut ak, &mut near_ak, &mut exchange, plan);
        }
    }
    let query_before = comptime!(variant.reads_before());
    let alike =
        comptime!(variant.scalar() && variant.solves() && query_before == variant.erases_before());
    if comptime!(alike) {
        apply_decay_mask_to_both(&mut qk, &mut ab, &sums, query_before, plan);
    } else {
        apply_decay_mask(&mut qk, &sums, 0usize, query_before, query_before, plan);
    }
    keep_square::<E, M>(&mut out.a_qk, &qk, &place, plan);
    if comptime!(variant.low_rank()) {
        apply_decay_mask(&mut qb, &sums, 0usize, query_before, query_before, plan);
        keep_square::<E, M>(&mut out.a_qb, &qb, &place, plan);
        apply_decay_mask(&mut ak, &sums, 0usize, true, true, plan);
        keep_square::<E, M>(&mut out.a_ak, &ak, &place, plan);
        keep_a_ak_v::<F, X, E, G, N, M>(&mut out.a_ak_v, &ak, &x.v, &place, plan);
    }
    if comptime!(variant.solves()) {
        if comptime!(!alike) {
            apply_decay_mask(
                &mut ab,
                &sums,
                0usize,
                true,
                comptime!(variant.erases_before()),
                plan,
            );
        }
        keep_inverse::<E, M>(&mut out.inverse, &ab, &x.beta, &place, plan);
    }
    keep_decay_factors(&mut out.decay_factors, &sums, &x.beta, &place, plan);
}

/// `acc += X Y^T` over one slice of keys, decayed term by term if the decay is a vector.
#[cube]
fn product<X: Float, N: Size>(
    acc: &mut Acc,
    near: &mut Array<f32>,
    x: &SharedMemory<Vector<X, N>>,
    y: &SharedMemory<Vector<X, N>>,
    sums: &Sums,
    #[comptime] before: bool,
    #[comptime] plan: Plan,
) {
    if comptime!(plan.variant.vector()) {
        decayed_scores::<X, N>(acc, near, x, y, sums, before, plan);
    } else {
        let slice = comptime!(plan.key_slice);
        let spec = comptime!(plan.mul(plan.pairs(), slice, row_major(slice), transposed(slice)));
        mul::<X, N, N>(acc, x, 0usize, y, 0usize, spec);
    }
}

/// Decay mask at (i, j): e^{G_i - G_j} of a scalar decay, 1 of another, 0 above the diagonal (`strict`: and on
/// it). `before`: row i sees the sums of the token before it.
#[cube]
pub(crate) fn decay_mask(
    sums: &Sums,
    i: usize,
    j: usize,
    #[comptime] strict: bool,
    #[comptime] before: bool,
    #[comptime] plan: Plan,
) -> f32 {
    let mut kept = 1.0f32;
    if comptime!(plan.variant.scalar()) {
        kept = f32::exp(between(sums, seen(i, before), j));
    }
    if comptime!(strict) { select(i > j, kept, 0.0f32) } else { select(i >= j, kept, 0.0f32) }
}

/// Multiplies every score by its [`decay_mask`]; the chunk's sums begin at `at`.
#[cube]
fn apply_decay_mask(
    acc: &mut Acc,
    sums: &Sums,
    at: usize,
    #[comptime] strict: bool,
    #[comptime] before: bool,
    #[comptime] plan: Plan,
) {
    let grid = comptime!(plan.pairs());
    #[unroll]
    for f in 0..comptime!(grid.fragments()) {
        let j = at + column(f, grid);
        let mut low = true;
        // Producers skip whole planes or nothing, and a vector decay has no exponentials here.
        if comptime!(plan.producers == 0 && !plan.variant.vector()) {
            low = intersects_lower_triangle(f, j - at, grid);
        }
        #[unroll]
        for h in 0..2usize {
            let mut x = Pair::new(0.0);
            if low {
                let i = at + min(row(f, h, grid), comptime!(plan.chunk - 1));
                x = acc.index(f)[h];
                #[unroll]
                for l in 0..2usize {
                    x[l] = x[l] * decay_mask(sums, i, j + l, strict, before, plan);
                }
            }
            set(acc.index_mut(f), h, x);
        }
    }
}

/// Whether a unit has anything on or below the diagonal in fragment `f`, whose first column is `j`.
/// Planes whose whole fragment lies above save its exponentials.
#[cube]
pub(crate) fn intersects_lower_triangle(
    #[comptime] f: usize,
    j: usize,
    #[comptime] grid: Grid,
) -> bool {
    row(f, 1usize, grid) >= j
}

/// [`apply_decay_mask`] for A_qk and for strict(a|b), which decay alike: one exponential for both.
#[cube]
fn apply_decay_mask_to_both(
    qk: &mut Acc,
    ab: &mut Acc,
    sums: &Sums,
    #[comptime] before: bool,
    #[comptime] plan: Plan,
) {
    let grid = comptime!(plan.pairs());
    #[unroll]
    for f in 0..comptime!(grid.fragments()) {
        let j = column(f, grid);
        let low = intersects_lower_triangle(f, j, grid);
        #[unroll]
        for h in 0..2usize {
            let mut x = Pair::new(0.0);
            let mut y = Pair::new(0.0);
            if low {
                let i = min(row(f, h, grid), comptime!(plan.chunk - 1));
                x = qk.index(f)[h];
                y = ab.index(f)[h];
                #[unroll]
                for l in 0..2usize {
                    let kept = decay_mask(sums, i, j + l, before, before, plan);
                    x[l] = x[l] * kept;
                    y[l] = y[l] * select(i > j + l, kept, 0.0f32);
                }
            }
            set(qk.index_mut(f), h, x);
            set(ab.index_mut(f), h, y);
        }
    }
}

#[cube]
fn keep_square<E: Float, M: Size>(
    out: &mut Array<Vector<E, M>>,
    acc: &Acc,
    place: &Place,
    #[comptime] plan: Plan,
) {
    let grid = comptime!(plan.pairs());
    let rows = own(place, comptime!(plan.chunk), comptime!(plan.chunk));
    keep::<E, M>(out, acc, &rows, 0usize, comptime!(plan.chunk), grid);
}

/// Writes a product to rows of a tensor, from column `first` on; columns of the tensor end at
/// `width`.
#[cube]
pub(crate) fn keep<E: Float, M: Size>(
    out: &mut Array<Vector<E, M>>,
    acc: &Acc,
    rows: &Rows,
    first: usize,
    #[comptime] width: usize,
    #[comptime] grid: Grid,
) {
    #[unroll]
    for f in 0..comptime!(grid.fragments()) {
        if inside(f, grid) {
            let j = first + column(f, grid);
            #[unroll]
            for h in 0..2usize {
                let i = row(f, h, grid);
                if i < rows.valid && j < width {
                    put_out::<E, M>(
                        out,
                        rows.start + i * rows.stride + j,
                        acc.index(f)[h],
                        width - j,
                    );
                }
            }
        }
    }
}

/// strict(a|k) v, over slices of values.
#[cube]
fn keep_a_ak_v<F: Float, X: Float, E: Float, G: Size, N: Size, M: Size>(
    out: &mut Array<Vector<E, M>>,
    acc: &Acc,
    v: &Array<Vector<F, G>>,
    place: &Place,
    #[comptime] plan: Plan,
) {
    let chunk = comptime!(plan.chunk);
    let columns = comptime!(plan.value_slice);
    let pairs = comptime!(plan.pairs());
    let mut square = tile::<X, M>(comptime!(chunk * plan.stride(chunk)));
    let mut values = tile::<X, N>(comptime!(chunk * plan.stride(columns)));
    store::<X, M>(&mut square, acc, comptime!(plan.stride(chunk)), pairs);
    for slice in 0..comptime!(plan.value_slices()) {
        let first = slice * columns;
        sync_cube();
        let window = comptime!(plan.window(chunk, columns, plan.value_width));
        load::<F, G, X, N>(&mut values, v, &place.values, first, window);
        sync_cube();
        let grid = comptime!(plan.grid(chunk, columns));
        let mut local = zeros(comptime!(grid.fragments()));
        let spec = comptime!(plan.mul(grid, chunk, row_major(chunk), row_major(columns)));
        mul::<X, M, N>(&mut local, &square, 0usize, &values, 0usize, spec);
        keep::<E, M>(out, &local, &place.values, first, comptime!(plan.value_width), grid);
    }
}

/// Puts a product into a tile.
#[cube]
pub(crate) fn store<X: Float, M: Size>(
    tile: &mut SharedMemory<Vector<X, M>>,
    acc: &Acc,
    #[comptime] stride: usize,
    #[comptime] grid: Grid,
) {
    store_at::<X, M>(tile, 0usize, acc, stride, grid);
}

/// As [`store`], `at` numbers into the tile.
#[cube]
fn store_at<X: Float, M: Size>(
    tile: &mut SharedMemory<Vector<X, M>>,
    at: usize,
    acc: &Acc,
    #[comptime] stride: usize,
    #[comptime] grid: Grid,
) {
    let start = at + row(0usize, 0usize, grid) * stride + column(0usize, grid);
    #[unroll]
    for f in 0..comptime!(grid.fragments()) {
        if inside(f, grid) {
            #[unroll]
            for h in 0..2usize {
                let [down, right] = comptime!(grid.step(f, h));
                put::<X, M>(tile, start, comptime!(down * stride + right), acc.index(f)[h]);
            }
        }
    }
}

/// (I - strict(a|b))^-1, the delta rule's -beta put in front of a.
#[cube]
fn keep_inverse<E: Float, M: Size>(
    out: &mut Array<Vector<E, M>>,
    acc: &Acc,
    beta: &Array<f32>,
    place: &Place,
    #[comptime] plan: Plan,
) {
    let grid = comptime!(plan.pairs());
    let stride = comptime!(inverse_stride(&plan));
    let mut m = SharedMemory::<f32>::new(comptime!(plan.chunk * stride));
    let mut t = SharedMemory::<f32>::new(comptime!(plan.chunk * stride));
    #[unroll]
    for f in 0..comptime!(grid.fragments()) {
        if inside(f, grid) {
            let j = column(f, grid);
            #[unroll]
            for h in 0..2usize {
                let i = row(f, h, grid);
                let x = acc.index(f)[h] * Pair::new(erase_scale(beta, &place.gates, i, plan));
                m[i * stride + j] = x[0];
                m[i * stride + j + 1] = x[1];
            }
        }
    }
    invert::<E>(&mut m, &mut t, plan);
    let rows = own(place, comptime!(plan.chunk), comptime!(plan.chunk));
    let half = comptime!(plan.chunk / 2);
    let all = comptime!(plan.chunk * half);
    #[unroll]
    for turn in 0..comptime!(all.div_ceil(plan.units)) {
        let n = UNIT_POS as usize + comptime!(turn * plan.units);
        if n < all {
            let i = n / half;
            let j = n % half * 2;
            let mut x = Pair::empty();
            x[0] = t[i * stride + j];
            x[1] = t[i * stride + j + 1];
            put_out::<E, M>(out, rows.start + i * rows.stride + j, x, 2usize);
        }
    }
}

/// Factor of the erase key of token `i`: -beta in a delta rule.
#[cube]
pub(crate) fn erase_scale(
    beta: &Array<f32>,
    gates: &Rows,
    i: usize,
    #[comptime] plan: Plan,
) -> f32 {
    let mut scale = 1.0f32;
    if comptime!(plan.variant.delta()) {
        scale = 0.0f32;
        if i < gates.valid {
            scale = -beta[gates.start + i * gates.stride];
        }
    }
    scale
}

/// e^{G_i}, or e^{G_{i-1}} for a row that reads before its decay. The chunk's sums begin at `at`.
#[cube]
pub(crate) fn reach(
    sums: &Sums,
    at: usize,
    i: usize,
    #[comptime] before: bool,
    #[comptime] plan: Plan,
) -> f32 {
    let mut kept = 1.0f32;
    if comptime!(plan.variant.scalar()) {
        kept = f32::exp(since_start(sums, at + seen(i, before)));
        if comptime!(before) {
            kept = select(i == 0, 1.0f32, kept);
        }
    }
    kept
}

/// e^{G_C - G_i}. The chunk's sums begin at `at`.
#[cube]
pub(crate) fn left(sums: &Sums, at: usize, i: usize, #[comptime] plan: Plan) -> f32 {
    let mut kept = 1.0f32;
    if comptime!(plan.variant.scalar()) {
        kept = f32::exp(between(sums, at + comptime!(plan.chunk - 1), at + i));
    }
    kept
}

/// Fills the chunk's [`decay_factors`].
#[cube]
fn keep_decay_factors(
    out: &mut Array<f32>,
    sums: &Sums,
    beta: &Array<f32>,
    place: &Place,
    #[comptime] plan: Plan,
) {
    let chunk = comptime!(plan.chunk);
    let i = UNIT_POS as usize;
    if i < chunk {
        let at = place.index * comptime!(decay_factors::ROWS * chunk) + i;
        let erase_before = comptime!(plan.variant.erases_before());
        out[at + comptime!(decay_factors::QUERY * chunk)] =
            reach(sums, 0usize, i, comptime!(plan.variant.reads_before()), plan);
        out[at + comptime!(decay_factors::ERASE * chunk)] =
            reach(sums, 0usize, i, erase_before, plan) * erase_scale(beta, &place.gates, i, plan);
        out[at + comptime!(decay_factors::KEY_TO_END * chunk)] = left(sums, 0usize, i, plan);
        out[at + comptime!(decay_factors::FROM_START * chunk)] =
            reach(sums, 0usize, i, false, plan);
        out[at + comptime!(decay_factors::BETA * chunk)] =
            -erase_scale(beta, &place.gates, i, plan);
    }
}

/// Scores that producer planes leave for consumers: [`plan.score_stages()`](Plan::score_stages) chunks of them,
/// one being made while one is read.
#[derive(CubeType)]
pub(crate) struct ProducerTiles<E: Float, M: Size> {
    pub a_qk: SharedMemory<Vector<E, M>>,
    /// Sums of g of the chunk whose scores are made, room for each producer's own.
    sums: Sums,
}

#[cube]
pub(crate) fn producer_tiles<E: Float, M: Size>(
    #[comptime] with_a_qk: bool,
    #[comptime] plan: Plan,
) -> ProducerTiles<E, M> {
    let scores = comptime!(plan.producers > 0);
    let square = comptime!(plan.score_stages() * plan.chunk * plan.stride(plan.chunk));
    ProducerTiles::<E, M> {
        a_qk: tile::<E, M>(comptime!(if scores && with_a_qk { square } else { 16 })),
        sums: sums(comptime!(if scores { plan.producers * plan.chunk } else { 1 }), 1usize),
    }
}

/// The intra-chunk stage of one chunk of linear attention, by [`Plan::producers`] planes of 32 of the state pass:
/// its [`decay_factors`] under a scalar decay, and A_qk if the pass multiplies by it (`with_a_qk`). `rows`,
/// `gates_at`, `square` and `scales_at` say where the chunk's numbers begin. No barrier: a reader waits for one.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn produce_scores<E: Float, N: Size, M: Size>(
    out: &mut ProducerTiles<E, M>,
    square: usize,
    scales: &mut SharedMemory<f32>,
    scales_at: usize,
    q: &SharedMemory<Vector<E, N>>,
    k: &SharedMemory<Vector<E, N>>,
    rows: usize,
    gates: &SharedMemory<f32>,
    gates_at: usize,
    #[comptime] with_a_qk: bool,
    #[comptime] plan: Plan,
) {
    let grid = comptime!(plan.of_producers().pairs());
    let slice = comptime!(plan.key_slice);
    let before = comptime!(plan.variant.reads_before());
    let plane = UNIT_POS as usize / 32;
    let own = plane * comptime!(plan.chunk);
    let makes_decay_factors = plane == comptime!(plan.decay_factor_producer());
    // No consumer reads blocks of A_qk above the diagonal.
    let scores = comptime!(with_a_qk) && plane_intersects_lower_triangle(grid);
    if comptime!(plan.variant.scalar()) {
        if scores || makes_decay_factors {
            sum_by_plane(&mut out.sums, own, gates, gates_at);
        }
        if makes_decay_factors {
            let i = UNIT_POS as usize % 32 * 2;
            #[unroll]
            for l in 0..2usize {
                let at = scales_at + i + l;
                scales[at + comptime!(decay_factors::QUERY * plan.chunk)] =
                    reach(&out.sums, own, i + l, before, plan);
                scales[at + comptime!(decay_factors::KEY_TO_END * plan.chunk)] =
                    left(&out.sums, own, i + l, plan);
                scales[at + comptime!(decay_factors::FROM_START * plan.chunk)] =
                    reach(&out.sums, own, i + l, false, plan);
            }
        }
    }
    if comptime!(with_a_qk) {
        if scores {
            let mut qk = zeros(comptime!(grid.fragments()));
            let spec = comptime!(plan.mul(grid, slice, row_major(slice), transposed(slice)));
            mul::<E, N, N>(&mut qk, q, rows, k, rows, spec);
            apply_decay_mask(
                &mut qk,
                &out.sums,
                own,
                before,
                before,
                comptime!(plan.of_producers()),
            );
            let stride = comptime!(plan.stride(plan.chunk));
            store_at::<E, M>(&mut out.a_qk, square, &qk, stride, grid);
        }
    }
}

/// Whether this unit's plane has anything on or below the diagonal of a [C, C] tile.
#[cube]
fn plane_intersects_lower_triangle(#[comptime] grid: Grid) -> bool {
    let plane = UNIT_POS as usize / 32;
    let down = comptime!(grid.down());
    let last_row = (plane % down + comptime!((grid.fragment_rows() - 1) * down)) * 16 + 15;
    last_row >= plane / down * comptime!(grid.n / grid.across())
}

/// One slice of q, a, b and k, each times its factor of a vector decay.
#[cube]
#[allow(clippy::too_many_arguments)]
fn keep_scaled<X: Float, E: Float, N: Size, M: Size>(
    out: &mut IntraChunkOut<E, M>,
    q: &SharedMemory<Vector<X, N>>,
    k: &SharedMemory<Vector<X, N>>,
    a: &SharedMemory<Vector<X, N>>,
    b: &SharedMemory<Vector<X, N>>,
    sums: &Sums,
    place: &Place,
    first: usize,
    #[comptime] plan: Plan,
) {
    let variant = comptime!(plan.variant);
    let stride = comptime!(plan.stride(plan.key_slice));
    let half = comptime!(plan.key_slice / 2);
    let all = comptime!(plan.chunk * half);
    let end = comptime!((plan.chunk - 1) * stride);
    #[unroll]
    for turn in 0..comptime!(all.div_ceil(plan.units)) {
        let n = UNIT_POS as usize + comptime!(turn * plan.units);
        let i = n / half;
        let d = n % half * 2;
        if n < all && i < place.valid && first + d < comptime!(plan.key_width) {
            let mut scaled_q = Pair::empty();
            let mut scaled_a = Pair::empty();
            let mut scaled_b = Pair::empty();
            let mut scaled_k = Pair::empty();
            #[unroll]
            for l in 0..2usize {
                let at = i * stride + d + l;
                let from_q = vector_reach(sums, i, d + l, comptime!(variant.reads_before()), plan);
                let from_a = vector_reach(sums, i, d + l, comptime!(variant.erases_before()), plan);
                let left = f32::exp(between(sums, end + d + l, at));
                scaled_q[l] = f32::cast_from(q[at]) * from_q;
                scaled_k[l] = f32::cast_from(k[at]) * left;
                if comptime!(variant.own_a()) {
                    scaled_a[l] = f32::cast_from(a[at]) * from_a;
                } else {
                    scaled_a[l] = f32::cast_from(k[at]) * from_a;
                }
                if comptime!(variant.low_rank()) {
                    scaled_b[l] = f32::cast_from(b[at]) * left;
                }
            }
            let at = place.rows.start + i * place.rows.stride + first + d;
            let room = comptime!(plan.key_width) - first - d;
            put_out::<E, M>(&mut out.q, at, scaled_q, room);
            put_out::<E, M>(&mut out.k, at, scaled_k, room);
            if comptime!(variant.solves()) {
                put_out::<E, M>(&mut out.a, at, scaled_a, room);
            }
            if comptime!(variant.low_rank()) {
                put_out::<E, M>(&mut out.b, at, scaled_b, room);
            }
        }
    }
    let d = UNIT_POS as usize;
    if d < comptime!(plan.key_slice) && first + d < comptime!(plan.key_width) {
        let total = f32::exp(since_start(sums, end + d));
        out.chunk_decay[place.index * comptime!(plan.key_width) + first + d] = total;
    }
}

/// As [`reach`], for key column `d` of a vector decay.
#[cube]
pub(crate) fn vector_reach(
    sums: &Sums,
    i: usize,
    d: usize,
    #[comptime] before: bool,
    #[comptime] plan: Plan,
) -> f32 {
    let stride = comptime!(plan.stride(plan.key_slice));
    let kept = f32::exp(since_start(sums, seen(i, before) * stride + d));
    if comptime!(before) { select(i == 0, 1.0f32, kept) } else { kept }
}
