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
//!         producer planes this stage is not launched: [`produce_scores`] does its work in their cubes, or
//!         `produce_inverse` and `score_queries`.
//! Cost:   about C K multiplications a token and product; T another C^2 / 3.

use crate::chunkwise::arguments::{IntraChunkOut, Operands, StageTypes, Types};
use crate::chunkwise::chunk::{
    Place, Sizes, Sums, between, chunk_sums, own, request_log_decays, share_kept, since_start,
    sum_scalars, sum_vectors,
};
use crate::chunkwise::decay::{
    Mask, apply_decay_mask, decay_factors, decay_mask, erase_scale, from_start,
    intersects_lower_triangle, to_end, vector_from_start,
};
use crate::chunkwise::plan::{Plan, UNUSED, row_major, transposed};
use crate::chunkwise::varlen::own_chunk;
use crate::chunkwise::vector_decay::{
    Score, ScoreRows, add_near, add_scores as add_decayed_scores, block, no_scores,
};
use crate::tile::{
    Acc, Engine, INVERSE, Pair, Requested, SWIZZLED, SYSTEM_MEMORY, Swizzled, Zeros, begin_inverse,
    begin_split_inverse, column, commit_copies, fill_split_system, finish_inverse,
    finish_split_inverse, inside, lay, load, load_async, mul, multiply_by_warpgroups, own_element,
    put_out, request, room_for, row, row_in, set, split_system, store, swizzled, tile,
    tile_aligned, wait_for_factors, write_out_by_four, zeros,
};
use cubecl::prelude::*;

/// The kernel. F: the tensors' type; X: what tiles hold; E: numbers of tensors between stages.
#[cube(launch_unchecked)]
pub(crate) fn intra_chunk<F: Float, X: Float, E: Float, G: Size, N: Size, M: Size, T: Size>(
    x: &Operands<F, G>,
    out: &mut IntraChunkOut<E, T>,
    sizes: &Sizes,
    #[comptime] plan: Plan,
    #[define(F, X, E)] _types: [StorageType; 3],
    #[define(G, N, M, T)] _widths: [usize; 4],
) {
    let variant = comptime!(plan.variant);
    let place = own_chunk(sizes, plan);
    let mut rows = slices::<X, N>(plan);
    fill_scales(&mut rows.scales, &x.beta, &place, plan);
    let mut scores = no_scores(plan);
    if comptime!(plan.warpgroups) {
        copy_rows::<Types<F, X, E, G, N, M, N, T, T>>(&mut rows, x, &place, plan);
        if comptime!(variant.scalar()) {
            sum_scalars(&mut rows.sums, &x.scalar_g, &place.scalars, plan);
        }
        wait_for_factors(0usize);
        add_products::<X, N>(&mut scores, &rows, 0usize, plan);
    } else {
        add_slices::<Types<F, X, E, G, N, M, N, T, T>>(
            &mut scores,
            out,
            &mut rows,
            x,
            &place,
            plan,
        );
    }
    add_all_near(&mut scores, plan);
    let (sums, scales) = (&rows.sums, &rows.scales);
    write_scores::<Types<F, X, E, G, N, M, N, T, T>>(
        out,
        &mut scores,
        x,
        sums,
        scales,
        &place,
        plan,
    );
}

#[cube]
fn fill_scales(
    scales: &mut SharedMemory<f32>,
    beta: &Array<f32>,
    place: &Place,
    #[comptime] plan: Plan,
) {
    let i = UNIT_POS as usize;
    if i < comptime!(plan.chunk) {
        scales[i] = erase_scale(beta, &place.scalars, i, plan);
    }
}

/// Starts copying all keys of every operand.
#[cube]
fn copy_rows<P: StageTypes>(
    to: &mut Slices<P::X, P::N>,
    x: &Operands<P::F, P::G>,
    place: &Place,
    #[comptime] plan: Plan,
) {
    let window = comptime!(plan.factor(plan.key_window()));
    load_async::<P::F, P::G, P::X, P::N>(&mut to.q, 0usize, &x.q, &place.keys, 0usize, window);
    load_async::<P::F, P::G, P::X, P::N>(&mut to.k, 0usize, &x.k, &place.keys, 0usize, window);
    if comptime!(plan.variant.own_a()) {
        load_async::<P::F, P::G, P::X, P::N>(&mut to.a, 0usize, &x.a, &place.rows, 0usize, window);
    }
    if comptime!(plan.variant.low_rank()) {
        load_async::<P::F, P::G, P::X, P::N>(&mut to.b, 0usize, &x.b, &place.rows, 0usize, window);
    }
    commit_copies();
}

/// Adds one slice of keys after another to all scores.
#[cube]
fn add_slices<P: StageTypes>(
    scores: &mut Sequence<Score>,
    out: &mut IntraChunkOut<P::E, P::T>,
    rows: &mut Slices<P::X, P::N>,
    x: &Operands<P::F, P::G>,
    place: &Place,
    #[comptime] plan: Plan,
) {
    let variant = comptime!(plan.variant);
    if comptime!(variant.scalar() && plan.key_slices() > 1) {
        sum_scalars(&mut rows.sums, &x.scalar_g, &place.scalars, plan);
    }
    let mut coming = nothing_coming::<P::F, P::G>(plan);
    if comptime!(variant.vector()) {
        request_slices::<P::F, P::G>(&mut coming, x, place, 0usize, plan);
    }
    for slice in 0..comptime!(plan.key_slices()) {
        let first = slice * comptime!(plan.key_slice);
        if comptime!(!variant.vector()) {
            request_slices::<P::F, P::G>(&mut coming, x, place, first, plan);
        }
        lay_slices::<P>(rows, &coming, x, place, first, plan);
        if comptime!(variant.vector()) {
            // The next slice is under way while this one is multiplied.
            let next = first + comptime!(plan.key_slice);
            request_slices::<P::F, P::G>(&mut coming, x, place, next, plan);
        }
        add_products::<P::X, P::N>(scores, rows, first, plan);
        if comptime!(variant.vector()) {
            write_scaled::<P::X, P::E, P::N, P::T>(out, rows, place, first, plan);
        }
    }
}

/// A slice of keys of every operand, [C, key_slice], and the sums of log decays.
#[derive(CubeType)]
struct Slices<X: Float, N: Size> {
    q: SharedMemory<Vector<X, N>>,
    k: SharedMemory<Vector<X, N>>,
    a: SharedMemory<Vector<X, N>>,
    b: SharedMemory<Vector<X, N>>,
    /// -beta in a delta rule, else 1, [C].
    scales: SharedMemory<f32>,
    sums: Sums,
}

/// Tiles of the intra-chunk stage, in numbers.
struct Tiles {
    /// q and k, each.
    rows: usize,
    a: usize,
    b: usize,
    /// Low rank: A_ak and a slice of v.
    square: usize,
    values: usize,
    /// M and T of the inverse, each.
    inverse: usize,
    /// Near scores of a vector decay.
    exchange: usize,
}

impl Plan {
    fn intra_chunk_tiles(&self) -> Tiles {
        let own = |there: bool, numbers: usize| if there { numbers } else { UNUSED };
        let low_rank = self.variant.low_rank();
        let window = self.factor(self.key_window());
        let rows = window.rows * window.stride;
        Tiles {
            rows,
            a: own(self.variant.own_a(), rows),
            b: own(low_rank, rows),
            square: own(low_rank, self.square_numbers()),
            values: own(low_rank, self.value_numbers()),
            inverse: own(
                self.variant.solves() && self.engine != Engine::Mma,
                self.chunk * self.inverse().stride(),
            ),
            exchange: own(self.by_blocks(), self.near_numbers()),
        }
    }

    /// Mask of scores of queries.
    pub fn query_mask(&self) -> Mask {
        let before = self.variant.reads_before();
        Mask { strict: before, before, by_fragment: true }
    }

    /// Mask of scores of erase keys.
    pub fn erase_mask(&self) -> Mask {
        Mask { strict: true, before: self.variant.erases_before(), by_fragment: true }
    }

    /// Bytes of shared memory of the intra-chunk stage.
    pub fn intra_chunk_memory(&self) -> usize {
        let Tiles { rows, a, b, square, values, inverse, exchange } = self.intra_chunk_tiles();
        let tiles = 2 * rows + a + b + square + values;
        let sums = self.sums_memory(false);
        let split = self.variant.solves() && self.engine == Engine::Mma;
        // Their tiles are aligned to more than others.
        let split = if split { SYSTEM_MEMORY + 2 * INVERSE + SWIZZLED } else { 0 };
        tiles * self.engine.bytes() + 4 * (2 * inverse + exchange + self.chunk) + sums + split
    }
}

#[cube]
fn slices<X: Float, N: Size>(#[comptime] plan: Plan) -> Slices<X, N> {
    let aligned = comptime!(plan.aligned());
    Slices::<X, N> {
        q: tile_aligned::<X, N>(comptime!(plan.intra_chunk_tiles().rows), aligned),
        k: tile_aligned::<X, N>(comptime!(plan.intra_chunk_tiles().rows), aligned),
        a: tile_aligned::<X, N>(comptime!(plan.intra_chunk_tiles().a), aligned),
        b: tile_aligned::<X, N>(comptime!(plan.intra_chunk_tiles().b), aligned),
        scales: SharedMemory::<f32>::new(comptime!(plan.chunk)),
        sums: chunk_sums(false, plan),
    }
}

/// This unit's part of a slice of every operand, requested and not yet waited for; a and b under a vector decay alone,
/// whose slices are narrow.
#[derive(CubeType)]
struct Coming<F: Float, G: Size> {
    q: Requested<F, G>,
    k: Requested<F, G>,
    a: Requested<F, G>,
    b: Requested<F, G>,
    /// Vector decay: log decays.
    g: Array<f32>,
}

#[cube]
fn nothing_coming<F: Float, G: Size>(#[comptime] plan: Plan) -> Coming<F, G> {
    let variant = comptime!(plan.variant);
    let read = G::value();
    let all = comptime!(plan.key_window().turns(read));
    let of_a = comptime!(if variant.vector() && variant.own_a() { all } else { 1 });
    let of_b = comptime!(if variant.vector() && variant.low_rank() { all } else { 1 });
    let of_g = comptime!(if variant.vector() { plan.run_length() } else { 1 });
    Coming::<F, G> {
        q: room_for::<F, G>(all),
        k: room_for::<F, G>(all),
        a: room_for::<F, G>(of_a),
        b: room_for::<F, G>(of_b),
        g: Array::new(of_g),
    }
}

/// Requests keys `first..first + key_slice`.
#[cube]
fn request_slices<F: Float, G: Size>(
    coming: &mut Coming<F, G>,
    x: &Operands<F, G>,
    place: &Place,
    first: usize,
    #[comptime] plan: Plan,
) {
    let variant = comptime!(plan.variant);
    let window = comptime!(plan.key_window());
    if comptime!(variant.vector()) {
        request_log_decays(&mut coming.g, &x.vector_g, &place.rows, first, plan);
    }
    request::<F, G>(&mut coming.q, &x.q, &place.keys, first, window);
    request::<F, G>(&mut coming.k, &x.k, &place.keys, first, window);
    if comptime!(variant.vector() && variant.own_a()) {
        request::<F, G>(&mut coming.a, &x.a, &place.rows, first, window);
    }
    if comptime!(variant.vector() && variant.low_rank()) {
        request::<F, G>(&mut coming.b, &x.b, &place.rows, first, window);
    }
}

/// Puts a slice of every operand, and the sums of its log decays, where all units find them. Barriers before and after.
#[cube]
fn lay_slices<P: StageTypes>(
    to: &mut Slices<P::X, P::N>,
    coming: &Coming<P::F, P::G>,
    x: &Operands<P::F, P::G>,
    place: &Place,
    first: usize,
    #[comptime] plan: Plan,
) {
    let variant = comptime!(plan.variant);
    let window = comptime!(plan.key_window());
    if comptime!(variant.scalar() && plan.key_slices() == 1) {
        // While rows are on their way.
        sum_scalars(&mut to.sums, &x.scalar_g, &place.scalars, plan);
    }
    sync_cube();
    lay::<P::F, P::G, P::X, P::N>(&mut to.q, &coming.q, window);
    lay::<P::F, P::G, P::X, P::N>(&mut to.k, &coming.k, window);
    if comptime!(variant.vector()) {
        if comptime!(variant.own_a()) {
            lay::<P::F, P::G, P::X, P::N>(&mut to.a, &coming.a, window);
        }
        if comptime!(variant.low_rank()) {
            lay::<P::F, P::G, P::X, P::N>(&mut to.b, &coming.b, window);
        }
        sum_vectors(&mut to.sums, &coming.g, false, plan);
    } else {
        if comptime!(variant.own_a()) {
            load::<P::F, P::G, P::X, P::N>(&mut to.a, &x.a, &place.rows, first, window);
        }
        if comptime!(variant.low_rank()) {
            load::<P::F, P::G, P::X, P::N>(&mut to.b, &x.b, &place.rows, first, window);
        }
        sync_cube();
    }
}

/// Adds one slice of keys to all scores.
#[cube]
fn add_products<X: Float, N: Size>(
    to: &mut Sequence<Score>,
    rows: &Slices<X, N>,
    first: usize,
    #[comptime] plan: Plan,
) {
    let variant = comptime!(plan.variant);
    if comptime!(variant.vector()) {
        let a = erase_rows::<X, N>(rows, plan);
        let rows_of_scores = ScoreRows::<X, N> { q: rows.q, a, k: rows.k, b: rows.b };
        let keys = min(comptime!(plan.key_width) - first, comptime!(plan.key_slice));
        add_decayed_scores::<X, N>(to, &rows_of_scores, &rows.sums, keys, plan);
    } else {
        product::<X, N>(to, &rows.q, &rows.k, comptime!(block::QK), plan);
        if comptime!(variant.low_rank()) {
            product::<X, N>(to, &rows.q, &rows.b, comptime!(block::QB), plan);
            product::<X, N>(to, &rows.a, &rows.b, comptime!(block::AB), plan);
            product::<X, N>(to, &rows.a, &rows.k, comptime!(block::AK), plan);
        } else if comptime!(variant.solves()) {
            let a = erase_rows::<X, N>(rows, plan);
            product::<X, N>(to, &a, &rows.k, comptime!(block::AB), plan);
        }
    }
}

/// The tile of a, or of k where a variant erases by it.
#[cube]
fn erase_rows<X: Float, N: Size>(
    rows: &Slices<X, N>,
    #[comptime] plan: Plan,
) -> SharedMemory<Vector<X, N>> {
    if comptime!(plan.variant.own_a()) { rows.a } else { rows.k }
}

/// Block `n` of the scores `+= X Y^T` over one slice of keys.
#[cube]
fn product<X: Float, N: Size>(
    scores: &mut Sequence<Score>,
    x: &SharedMemory<Vector<X, N>>,
    y: &SharedMemory<Vector<X, N>>,
    #[comptime] n: usize,
    #[comptime] plan: Plan,
) {
    let slice = comptime!(plan.key_slice);
    let grid = comptime!(plan.pairs());
    if comptime!(plan.warpgroups) {
        let acc = &mut scores.index_mut(n).acc;
        let layout = comptime!(Swizzled { rows: plan.chunk, transposed: true });
        multiply_by_warpgroups::<X, N>(acc, x, y, 0usize, comptime!(slice / 16), layout, grid);
    } else {
        let spec = comptime!(plan.mul(grid, slice, row_major(slice), transposed(slice)));
        mul::<X, N, N>(&mut scores.index_mut(n).acc, x, 0usize, y, 0usize, spec);
    }
}

/// Adds near scores to the fragments that they belong to.
#[cube]
fn add_all_near(scores: &mut Sequence<Score>, #[comptime] plan: Plan) {
    if comptime!(plan.by_blocks()) {
        let mut exchange = SharedMemory::<f32>::new(comptime!(plan.intra_chunk_tiles().exchange));
        #[unroll]
        for n in 0..scores.len() {
            add_near(scores.index_mut(n), &mut exchange, plan);
        }
    }
}

/// Masks all scores and writes what the next stages read of them.
#[cube]
fn write_scores<P: StageTypes>(
    out: &mut IntraChunkOut<P::E, P::T>,
    scores: &mut Sequence<Score>,
    x: &Operands<P::F, P::G>,
    sums: &Sums,
    scales: &SharedMemory<f32>,
    place: &Place,
    #[comptime] plan: Plan,
) {
    let variant = comptime!(plan.variant);
    let query_before = comptime!(variant.reads_before());
    let erase_before = comptime!(variant.erases_before());
    let (query_mask, erase_mask) = comptime!((plan.query_mask(), plan.erase_mask()));
    let alike = comptime!(variant.scalar() && variant.solves() && query_before == erase_before);
    if comptime!(alike) {
        apply_decay_mask_to_both(scores, sums, query_before, plan);
    } else {
        let qk = scores.index_mut(comptime!(block::QK));
        apply_decay_mask(&mut qk.acc, sums, 0usize, query_mask, plan);
    }
    if comptime!(variant.solves()) {
        let ab = scores.index_mut(comptime!(block::AB));
        if comptime!(!alike) {
            apply_decay_mask(&mut ab.acc, sums, 0usize, erase_mask, plan);
        }
        // With warpgroups registers hold scores through the inversion: units without a column write them meanwhile.
        if comptime!(!plan.warpgroups) {
            write_other_scores::<P>(out, scores, x, sums, scales, place, plan);
        }
        if comptime!(plan.engine == Engine::Mma) {
            let mut system = split_system::<P::E, P::M>(true);
            let mut t = tile_aligned::<P::E, P::M>(INVERSE, SWIZZLED);
            let ab = &scores.index(comptime!(block::AB)).acc;
            let grid = comptime!(plan.pairs());
            fill_split_system(&mut system, ab, scales, 0usize, false, grid);
            begin_split_inverse(&mut system, &mut t, 0usize, false);
            if comptime!(plan.warpgroups) {
                write_other_scores::<P>(out, scores, x, sums, scales, place, plan);
            }
            finish_split_inverse(&mut system, &mut t, 0usize, false);
            write_rounded_inverse::<P>(&mut out.inverse, &t, place, plan);
        } else {
            let ab = scores.index(comptime!(block::AB));
            let mut tiles = begin_inverse_of(&ab.acc, scales, plan);
            finish_inverse(&mut tiles.m, &mut tiles.t, comptime!(plan.inverse()));
            write_rows_of_inverse::<P::E, P::T>(&mut out.inverse, &tiles.t, place, plan);
        }
    } else {
        write_other_scores::<P>(out, scores, x, sums, scales, place, plan);
    }
}

/// Writes decay factors, A_qk, which is masked, and what a low rank transition has besides.
#[cube]
fn write_other_scores<P: StageTypes>(
    out: &mut IntraChunkOut<P::E, P::T>,
    scores: &mut Sequence<Score>,
    x: &Operands<P::F, P::G>,
    sums: &Sums,
    scales: &SharedMemory<f32>,
    place: &Place,
    #[comptime] plan: Plan,
) {
    let variant = comptime!(plan.variant);
    let (query_mask, erase_mask) = comptime!((plan.query_mask(), plan.erase_mask()));
    write_decay_factors(&mut out.decay_factors, sums, scales, place, plan);
    write_square::<P::E, P::T>(&mut out.a_qk, &scores.index(comptime!(block::QK)).acc, place, plan);
    if comptime!(variant.low_rank()) {
        let qb = scores.index_mut(comptime!(block::QB));
        apply_decay_mask(&mut qb.acc, sums, 0usize, query_mask, plan);
        write_square::<P::E, P::T>(&mut out.a_qb, &qb.acc, place, plan);
        let ak = scores.index_mut(comptime!(block::AK));
        apply_decay_mask(&mut ak.acc, sums, 0usize, erase_mask, plan);
        write_square::<P::E, P::T>(&mut out.a_ak, &ak.acc, place, plan);
        write_a_ak_v::<P>(&mut out.a_ak_v, &ak.acc, &x.v, place, plan);
    }
}

/// [`apply_decay_mask`] for A_qk and for strict(a|b), which decay alike: one exponential for both.
#[cube]
fn apply_decay_mask_to_both(
    scores: &mut Sequence<Score>,
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
                let i = row_in(f, h, grid);
                x = scores.index(comptime!(block::QK)).acc.index(f)[h];
                y = scores.index(comptime!(block::AB)).acc.index(f)[h];
                #[unroll]
                for l in 0..2usize {
                    let decay = decay_mask(sums, i, j + l, before, before, plan);
                    x[l] = x[l] * decay;
                    y[l] = y[l] * select(i > j + l, decay, 0.0f32);
                }
            }
            set(scores.index_mut(comptime!(block::QK)).acc.index_mut(f), h, x);
            set(scores.index_mut(comptime!(block::AB)).acc.index_mut(f), h, y);
        }
    }
}

#[cube]
fn write_square<E: Float, T: Size>(
    out: &mut Array<Vector<E, T>>,
    acc: &Acc,
    place: &Place,
    #[comptime] plan: Plan,
) {
    let grid = comptime!(plan.pairs());
    let rows = own(place, comptime!(plan.chunk), comptime!(plan.chunk));
    write_out_by_four::<E, T>(out, acc, &rows, 0usize, comptime!(plan.chunk), grid);
}

/// strict(a|k) v, over slices of values.
#[cube]
fn write_a_ak_v<P: StageTypes>(
    out: &mut Array<Vector<P::E, P::T>>,
    acc: &Acc,
    v: &Array<Vector<P::F, P::G>>,
    place: &Place,
    #[comptime] plan: Plan,
) {
    let chunk = comptime!(plan.chunk);
    let columns = comptime!(plan.value_slice);
    let pairs = comptime!(plan.pairs());
    let mut square = tile::<P::X, P::M>(comptime!(plan.intra_chunk_tiles().square));
    let mut values = tile::<P::X, P::N>(comptime!(plan.intra_chunk_tiles().values));
    store::<P::X, P::M>(&mut square, acc, comptime!(plan.stride(chunk)), pairs);
    for slice in 0..comptime!(plan.value_slices()) {
        let first = slice * columns;
        sync_cube();
        let window = comptime!(plan.window(chunk, columns, plan.value_width));
        load::<P::F, P::G, P::X, P::N>(&mut values, v, &place.values, first, window);
        sync_cube();
        let grid = comptime!(plan.grid(chunk, columns));
        let mut local = zeros(comptime!(grid.fragments()));
        let spec = comptime!(plan.mul(grid, chunk, row_major(chunk), row_major(columns)));
        let spec = comptime!(spec.with_zeros(Zeros::Above));
        mul::<P::X, P::M, P::N>(&mut local, &square, 0usize, &values, 0usize, spec);
        write_out_by_four::<P::E, P::T>(
            out,
            &local,
            &place.values,
            first,
            comptime!(plan.value_width),
            grid,
        );
    }
}

/// M, and its inverse T in the making, [C, C].
#[derive(CubeType)]
struct InverseTiles {
    m: SharedMemory<f32>,
    t: SharedMemory<f32>,
}

/// Begins (I - strict(a|b))^-1, the delta rule's -beta put in front of a.
#[cube]
fn begin_inverse_of(acc: &Acc, scales: &SharedMemory<f32>, #[comptime] plan: Plan) -> InverseTiles {
    let grid = comptime!(plan.pairs());
    let inverse = comptime!(plan.inverse());
    let stride = comptime!(inverse.stride());
    let numbers = comptime!(plan.intra_chunk_tiles().inverse);
    let mut m = SharedMemory::<f32>::new_aligned(numbers, 16usize);
    let mut t = SharedMemory::<f32>::new_aligned(numbers, 16usize);
    #[unroll]
    for f in 0..comptime!(grid.fragments()) {
        if inside(f, grid) {
            let j = column(f, grid);
            #[unroll]
            for h in 0..2usize {
                let i = row(f, h, grid);
                let x = acc.index(f)[h] * Pair::new(scales[i]);
                m[i * stride + j] = x[0];
                m[i * stride + j + 1] = x[1];
            }
        }
    }
    begin_inverse(&m, &mut t, inverse);
    InverseTiles { m, t }
}

/// Rows of T out of its large parts, which are T, rounded.
#[cube]
fn write_rounded_inverse<P: StageTypes>(
    out: &mut Array<Vector<P::E, P::T>>,
    t: &SharedMemory<Vector<P::E, P::M>>,
    place: &Place,
    #[comptime] plan: Plan,
) {
    let chunk = comptime!(plan.chunk);
    let width = P::T::value();
    let across = comptime!(chunk / width);
    let rows = own(place, chunk, chunk);
    let written = t.to_slice().into_vectorized().with_vector_size::<P::T>();
    #[unroll]
    for turn in 0..comptime!(chunk * across / plan.units) {
        let share = own_element(turn, chunk, across, comptime!(plan.units));
        let j = share.column * width;
        let from = swizzled(share.row, j / 8, chunk) * 8 + j % 8;
        out[(rows.start + share.row * chunk + j) / width] = written[from / width];
    }
}

/// Rows of T, a pair of neighbouring columns a unit and turn.
#[cube]
fn write_rows_of_inverse<E: Float, T: Size>(
    out: &mut Array<Vector<E, T>>,
    t: &SharedMemory<f32>,
    place: &Place,
    #[comptime] plan: Plan,
) {
    let stride = comptime!(plan.inverse().stride());
    let rows = own(place, comptime!(plan.chunk), comptime!(plan.chunk));
    let half = comptime!(plan.chunk / 2);
    // Whole rows a turn, so that units keep their columns.
    let down = comptime!(plan.units / half);
    let i = UNIT_POS as usize / half;
    let j = UNIT_POS as usize % half * 2;
    #[unroll]
    for turn in 0..comptime!(plan.chunk.div_ceil(down)) {
        let row = i + comptime!(turn * down);
        if row < comptime!(plan.chunk) {
            let at = row * stride + j;
            let mut x = Pair::empty();
            x[0] = t[at];
            x[1] = t[at + 1];
            put_out::<E, T>(out, rows.start + row * rows.stride + j, x, 2usize);
        }
    }
}

/// Fills the chunk's [`decay_factors`], by units that have no column to invert.
#[cube]
fn write_decay_factors(
    out: &mut Array<f32>,
    sums: &Sums,
    scales: &SharedMemory<f32>,
    place: &Place,
    #[comptime] plan: Plan,
) {
    let chunk = comptime!(plan.chunk);
    comptime!(assert!(plan.units >= 2 * chunk));
    let unit = UNIT_POS as usize;
    if unit >= chunk && unit < comptime!(2 * chunk) {
        let i = unit - chunk;
        let at = place.index * comptime!(decay_factors::ROWS * chunk) + i;
        let erase_before = comptime!(plan.variant.erases_before());
        out[at + comptime!(decay_factors::QUERY * chunk)] =
            from_start(sums, 0usize, i, comptime!(plan.variant.reads_before()), plan);
        out[at + comptime!(decay_factors::ERASE * chunk)] =
            from_start(sums, 0usize, i, erase_before, plan) * scales[i];
        out[at + comptime!(decay_factors::KEY_TO_END * chunk)] = to_end(sums, 0usize, i, plan);
        out[at + comptime!(decay_factors::FROM_START * chunk)] =
            from_start(sums, 0usize, i, false, plan);
        out[at + comptime!(decay_factors::BETA * chunk)] = -scales[i];
    }
}

/// One slice of q, a, b and k, each times its factor of a vector decay.
#[cube]
fn write_scaled<X: Float, E: Float, N: Size, T: Size>(
    out: &mut IntraChunkOut<E, T>,
    rows: &Slices<X, N>,
    place: &Place,
    first: usize,
    #[comptime] plan: Plan,
) {
    let variant = comptime!(plan.variant);
    let sums = &rows.sums;
    let stride = comptime!(plan.stride(plan.key_slice));
    let half = comptime!(plan.key_slice / 2);
    let all = place.valid * half;
    let end = comptime!((plan.chunk - 1) * stride);
    for turn in 0..(all - 1) / comptime!(plan.units) + 1 {
        let n = UNIT_POS as usize + turn * comptime!(plan.units);
        let i = n / half;
        let d = n % half * 2;
        if n < all && first + d < comptime!(plan.key_width) {
            let mut scaled_q = Pair::empty();
            let mut scaled_a = Pair::empty();
            let mut scaled_b = Pair::empty();
            let mut scaled_k = Pair::empty();
            #[unroll]
            for l in 0..2usize {
                let at = i * stride + d + l;
                let from_q =
                    vector_from_start(sums, i, d + l, comptime!(variant.reads_before()), plan);
                let from_a =
                    vector_from_start(sums, i, d + l, comptime!(variant.erases_before()), plan);
                let to_end = share_kept(between(sums, end + d + l, at));
                scaled_q[l] = f32::cast_from(rows.q[at]) * from_q;
                scaled_k[l] = f32::cast_from(rows.k[at]) * to_end;
                if comptime!(variant.own_a()) {
                    scaled_a[l] = f32::cast_from(rows.a[at]) * from_a;
                } else {
                    scaled_a[l] = f32::cast_from(rows.k[at]) * from_a;
                }
                if comptime!(variant.low_rank()) {
                    scaled_b[l] = f32::cast_from(rows.b[at]) * to_end;
                }
            }
            let at = place.rows.start + i * place.rows.stride + first + d;
            let room = comptime!(plan.key_width) - first - d;
            put_out::<E, T>(&mut out.q, at, scaled_q, room);
            put_out::<E, T>(&mut out.k, at, scaled_k, room);
            if comptime!(variant.solves()) {
                put_out::<E, T>(&mut out.a, at, scaled_a, room);
            }
            if comptime!(variant.low_rank()) {
                put_out::<E, T>(&mut out.b, at, scaled_b, room);
            }
        }
    }
    let d = UNIT_POS as usize;
    if d < comptime!(plan.key_slice) && first + d < comptime!(plan.key_width) {
        let total = share_kept(since_start(sums, end + d));
        out.chunk_decay[place.index * comptime!(plan.key_width) + first + d] = total;
    }
}
