//! Producer planes of the state pass: the intra-chunk stage of an identity transition in the pass's own cubes, or of a delta
//! rule that erases by k. There consumers, who would have less to do, copy tiles and make A_qk.

use crate::chunkwise::chunk::{
    LaneSums, Sums, lane_sums, of_token, share_kept, store_lane_sums, sum_by_plane, sums,
};
use crate::chunkwise::decay::{
    MASK_BLOCK, Mask, apply_decay_mask, apply_mask_by_factors, decay_factors, from_start, to_end,
};
use crate::chunkwise::plan::{Plan, StatePlan, UNUSED, row_major, transposed};
use crate::chunkwise::state::StateEngine;
use crate::chunkwise::state_tiles::{PassInputs, StateTiles};
use crate::tile::{
    Acc, Grid, INVERSE, Pair, Rows, SYSTEM_MEMORY, SplitSystem, Swizzled, begin_split_inverse,
    fill_split_system, finish_split_inverse, mul, multiply_by_warpgroups, show_factors,
    split_system, store_at, store_swizzled, tile_aligned, zeros,
};
use cubecl::prelude::*;

/// Tiles that producer planes leave for consumers.
#[derive(CubeType)]
pub(crate) struct ProducerTiles<P: StateEngine> {
    /// Scores of [`StatePlan::score_stages`] chunks, one being made while one is read; where producers invert, of one, which
    /// consumers make.
    pub a_qk: SharedMemory<Vector<P::E, P::M>>,
    /// Sums of g of the chunk whose scores are made, room for each producer's own; where producers invert, of three chunks.
    sums: Sums,
    /// Of a delta rule: T of two chunks, each in large and small parts.
    pub inverse: SharedMemory<Vector<P::E, P::M>>,
    /// Of a delta rule: the chunk that is inverted.
    system: SplitSystem<P::E, P::M>,
}

impl StatePlan {
    /// Numbers of A_qk, and of the sums of g.
    fn produced_numbers(&self) -> [usize; 2] {
        if self.inverts_ahead() {
            return [self.square_numbers(), self.decay_factor_stages() * self.chunk];
        }
        match (self.producers(), self.task.applies_a_qk(self.variant)) {
            (0, _) => [UNUSED, 1],
            (producers, true) => {
                [self.score_stages() * self.square_numbers(), producers * self.chunk]
            }
            (producers, false) => [UNUSED, producers * self.chunk],
        }
    }

    /// Numbers of T.
    fn inverse_numbers(&self) -> usize {
        if self.inverts_ahead() { self.score_stages() * INVERSE } else { UNUSED }
    }

    /// Bytes of [`producer_tiles`].
    pub fn produced_memory(&self) -> usize {
        let [scores, sums] = self.produced_numbers();
        let inverse = match self.inverts_ahead() {
            true => self.inverse_numbers() * self.engine.bytes() + SYSTEM_MEMORY,
            false => 0,
        };
        scores * self.engine.bytes() + 4 * (2 * sums + 1) + inverse
    }
}

#[cube]
pub(crate) fn producer_tiles<P: StateEngine>(#[comptime] plan: StatePlan) -> ProducerTiles<P> {
    let [scores, of_decays] = comptime!(plan.produced_numbers());
    ProducerTiles::<P> {
        a_qk: tile_aligned::<P::E, P::M>(scores, comptime!(plan.aligned())),
        sums: sums(of_decays, 1usize),
        inverse: tile_aligned::<P::E, P::M>(
            comptime!(plan.inverse_numbers()),
            comptime!(plan.aligned()),
        ),
        system: split_system::<P::E, P::M>(comptime!(plan.inverts_ahead())),
    }
}

/// The intra-chunk stage of the chunk that the tiles point to: its [`decay_factors`] under a scalar decay, and A_qk if
/// the pass multiplies by it; a local pass reads the decay factors alone. No barrier: a reader waits for one.
#[cube]
pub(crate) fn produce_scores<P: StateEngine>(
    out: &mut ProducerTiles<P>,
    tiles: &mut StateTiles<P>,
    #[comptime] plan: StatePlan,
) {
    let with_a_qk = comptime!(plan.task.applies_a_qk(plan.variant));
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
            sum_by_plane(&mut out.sums, own, &tiles.log_decays, tiles.at_log_decays);
        }
        if makes_decay_factors {
            store_decay_factors::<P>(tiles, &out.sums, own, plan);
        }
    }
    if comptime!(with_a_qk) {
        if scores {
            let mut qk = zeros(comptime!(grid.fragments()));
            let spec = comptime!(plan.mul(grid, slice, row_major(slice), transposed(slice)));
            mul::<P::E, P::N, P::N>(
                &mut qk,
                &tiles.query_rows,
                tiles.at_rows,
                &tiles.key_rows,
                tiles.at_rows,
                spec,
            );
            // Planes skip all or nothing.
            let mask = comptime!(Mask { strict: before, before, by_fragment: false });
            apply_decay_mask(&mut qk, &out.sums, own, mask, comptime!(plan.of_producers()));
            let stride = comptime!(plan.stride(plan.chunk));
            store_at::<P::E, P::M>(&mut out.a_qk, tiles.at_square, &qk, stride, grid);
        }
    }
}

/// T of a delta rule for the chunk that the tiles point to, and the decay factors of the next one. No barrier with consumers: a
/// reader waits for one.
#[cube]
pub(crate) fn produce_inverse<P: StateEngine>(
    out: &mut ProducerTiles<P>,
    tiles: &mut StateTiles<P>,
    from: &PassInputs<P>,
    next: &NextChunk,
    #[comptime] plan: StatePlan,
) {
    let of_producers = comptime!(plan.of_producers());
    let makes_scalars = next.there && prepares(plan);
    let mut rows = next.scalars;
    rows.valid = select(makes_scalars, rows.valid, 0usize);
    let coming = request_scalars(&from.x.scalar_g, &from.x.beta, &rows, plan);
    let keys = &tiles.key_rows;
    let mut system = scores_of::<P>(keys, keys, tiles.at_rows, of_producers);
    if makes_scalars {
        // These planes' part of the system is zero.
        store_scalars(&mut out.sums, &mut tiles.decay_factors, &coming, next.stage, plan);
    }
    let mask = comptime!(plan.erase_mask());
    mask_scores::<P>(&mut system, &out.sums, tiles, decay_factors::ERASE_ROW, mask, of_producers);
    let (to, t, at) = (&mut out.system, &mut out.inverse, tiles.at_square);
    let betas = tiles.at_decay_factors + comptime!(decay_factors::BETA * plan.chunk);
    let grid = comptime!(of_producers.pairs());
    fill_split_system(to, &system, &tiles.decay_factors, betas, true, grid);
    begin_split_inverse(to, t, at, true);
    finish_split_inverse(to, t, at, true);
}

/// Masks scores of the chunk that the tiles point to; row `rows` of the decay factors is that of the scores' rows.
#[cube]
fn mask_scores<P: StateEngine>(
    scores: &mut Acc,
    sums: &Sums,
    tiles: &StateTiles<P>,
    #[comptime] rows: usize,
    #[comptime] mask: Mask,
    #[comptime] plan: Plan,
) {
    let at = tiles.at_log_decays;
    if comptime!(plan.variant.scalar()) {
        let (table, from) = (&tiles.decay_factors, tiles.at_decay_factors);
        apply_mask_by_factors(scores, sums, at, table, from, rows, mask, plan);
    } else {
        apply_decay_mask(scores, sums, at, mask, plan);
    }
}

/// The chunk after the one that is inverted.
#[derive(CubeType)]
pub(crate) struct NextChunk {
    pub scalars: Rows,
    /// Its pipeline stage.
    pub stage: usize,
    pub there: bool,
}

/// Sums and decay factors of the first chunk.
#[cube]
pub(crate) fn prepare_first<P: StateEngine>(
    out: &mut ProducerTiles<P>,
    tiles: &mut StateTiles<P>,
    from: &PassInputs<P>,
    scalars: &Rows,
    #[comptime] plan: StatePlan,
) {
    if prepares(plan) {
        let coming = request_scalars(&from.x.scalar_g, &from.x.beta, scalars, plan);
        store_scalars(&mut out.sums, &mut tiles.decay_factors, &coming, 0usize, plan);
    }
}

/// Whether this unit's plane makes decay factors: one of the two whose part of the system is zero, the first those of blocks,
/// the second those of masks.
#[cube]
fn prepares(#[comptime] plan: StatePlan) -> bool {
    let first = comptime!(plan.decay_factor_producer());
    let plane = UNIT_POS as usize / 32;
    plane == first || plane == first + 1
}

/// Log decays and beta of this lane's two tokens, requested and not yet waited for.
#[derive(CubeType)]
struct Scalars {
    log_decays: Pair,
    betas: Pair,
}

#[cube]
fn request_scalars(
    g: &Array<f32>,
    beta: &Array<f32>,
    rows: &Rows,
    #[comptime] plan: StatePlan,
) -> Scalars {
    let i = UNIT_POS as usize % 32 * 2;
    let mut log_decays = Pair::new(0.0);
    let mut betas = Pair::empty();
    #[unroll]
    for l in 0..2usize {
        if comptime!(plan.variant.scalar()) {
            log_decays[l] = of_token(g, rows, i + l);
        }
        betas[l] = of_token(beta, rows, i + l);
    }
    Scalars { log_decays, betas }
}

/// Sums and decay factors of a chunk in pipeline stage `stage`.
#[cube]
fn store_scalars(
    sums: &mut Sums,
    factors: &mut SharedMemory<f32>,
    coming: &Scalars,
    stage: usize,
    #[comptime] plan: StatePlan,
) {
    let chunk = comptime!(plan.chunk);
    let i = UNIT_POS as usize % 32 * 2;
    let own = lane_sums(coming.log_decays[0usize], coming.log_decays[1usize]);
    let to = stage * comptime!(plan.decay_factor_rows() * chunk) + i;
    let of_blocks = UNIT_POS as usize / 32 == comptime!(plan.decay_factor_producer());
    if of_blocks {
        if comptime!(plan.variant.scalar()) {
            store_lane_sums(sums, stage * chunk + i, &own);
        }
        store_block_factors(factors, to, coming, &own, plan);
    } else if comptime!(plan.variant.scalar()) {
        store_mask_factors(factors, to, &own, plan);
    }
}

/// A plane's sums: of the token before each of this lane's two, and of token n.
#[cube]
fn sums_before(own: &LaneSums) -> LaneSums {
    let mut before = *own;
    let coarse = plane_shuffle_up(own.coarse[1usize], 1u32);
    let fine = plane_shuffle_up(own.fine[1usize], 1u32);
    before.coarse[1] = own.coarse[0usize];
    before.fine[1] = own.fine[0usize];
    before.coarse[0] = coarse;
    before.fine[0] = fine;
    before
}

/// The sums of token `n`, whose number is odd, in both places.
#[cube]
fn sums_of(own: &LaneSums, #[comptime] n: usize) -> LaneSums {
    LaneSums {
        coarse: Pair::new(plane_broadcast(own.coarse[1usize], comptime!(n as u32 / 2))),
        fine: Pair::new(plane_broadcast(own.fine[1usize], comptime!(n as u32 / 2))),
    }
}

/// e^{G_x - G_y}, never above 1.
#[cube]
fn shares(x: &LaneSums, y: &LaneSums) -> Pair {
    let mut shares = (x.coarse - y.coarse) + (x.fine - y.fine);
    shares[0] = share_kept(min(shares[0], 0.0f32));
    shares[1] = share_kept(min(shares[1], 0.0f32));
    shares
}

/// e^G of two tokens, or (`before`) of the tokens before them, of which a chunk's first has none.
#[cube]
fn shares_of_start(own: &LaneSums, before: &LaneSums, #[comptime] earlier: bool) -> Pair {
    let sums = if comptime!(earlier) { before } else { own };
    let mut shares = sums.coarse + sums.fine;
    shares[0] = share_kept(shares[0]);
    shares[1] = share_kept(shares[1]);
    if comptime!(earlier) {
        shares[0] = select(UNIT_POS % 32 < 1, 1.0f32, shares[0]);
    }
    shares
}

/// Factors of rows of blocks, and beta.
#[cube]
fn store_block_factors(
    factors: &mut SharedMemory<f32>,
    to: usize,
    coming: &Scalars,
    own: &LaneSums,
    #[comptime] plan: StatePlan,
) {
    let variant = comptime!(plan.variant);
    let one = Pair::new(1.0);
    let (mut query, mut erase, mut to_end, mut from_start) = (one, one, one, one);
    if comptime!(variant.scalar()) {
        let before = sums_before(own);
        query = shares_of_start(own, &before, comptime!(variant.reads_before()));
        erase = shares_of_start(own, &before, comptime!(variant.erases_before()));
        from_start = shares_of_start(own, &before, false);
        to_end = shares(&sums_of(own, comptime!(plan.chunk - 1)), own);
    }
    store_pair(factors, to, decay_factors::QUERY, query, plan);
    store_pair(factors, to, decay_factors::ERASE, erase * coming.betas * Pair::new(-1.0), plan);
    store_pair(factors, to, decay_factors::KEY_TO_END, to_end, plan);
    store_pair(factors, to, decay_factors::FROM_START, from_start, plan);
    store_pair(factors, to, decay_factors::BETA, coming.betas, plan);
}

/// Factors of masks, by blocks of 16.
#[cube]
fn store_mask_factors(
    factors: &mut SharedMemory<f32>,
    to: usize,
    own: &LaneSums,
    #[comptime] plan: StatePlan,
) {
    let variant = comptime!(plan.variant);
    let (query, erase) = comptime!((variant.reads_before(), variant.erases_before()));
    let before = sums_before(own);
    let block = UNIT_POS as usize % 32 / comptime!(MASK_BLOCK / 2);
    let mut reference = sums_of(own, comptime!(MASK_BLOCK - 1));
    #[unroll]
    for n in 1..4usize {
        let last = sums_of(own, comptime!(n * MASK_BLOCK - 1));
        let up_to = comptime!(decay_factors::UP_TO_BLOCK + n - 1);
        store_pair(factors, to, up_to, shares(&last, own), plan);
        reference.coarse[0] = select(block == n, last.coarse[0], reference.coarse[0]);
        reference.fine[0] = select(block == n, last.fine[0], reference.fine[0]);
    }
    reference.coarse[1] = reference.coarse[0];
    reference.fine[1] = reference.fine[0];
    let of_query = if comptime!(query) { &before } else { own };
    let of_erase = if comptime!(erase) { &before } else { own };
    store_pair(factors, to, decay_factors::QUERY_ROW, shares(of_query, &reference), plan);
    store_pair(factors, to, decay_factors::ERASE_ROW, shares(of_erase, &reference), plan);
}

/// Writes two tokens' numbers of row `which` of the decay factors.
#[cube]
fn store_pair(
    factors: &mut SharedMemory<f32>,
    to: usize,
    #[comptime] which: usize,
    x: Pair,
    #[comptime] plan: StatePlan,
) {
    let at = to + comptime!(which * plan.chunk);
    factors[at] = x[0];
    factors[at + 1] = x[1];
}

/// A_qk of the chunk that the tiles point to, by consumers, who meet here.
#[cube]
pub(crate) fn score_queries<P: StateEngine>(
    out: &mut ProducerTiles<P>,
    tiles: &StateTiles<P>,
    #[comptime] plan: StatePlan,
) {
    let of_consumers = comptime!(plan.of_consumers());
    let (queries, keys) = (&tiles.query_rows, &tiles.key_rows);
    let mut qk = scores_of::<P>(queries, keys, tiles.at_rows, of_consumers);
    let mask = comptime!(plan.query_mask());
    mask_scores::<P>(&mut qk, &out.sums, tiles, decay_factors::QUERY_ROW, mask, of_consumers);
    store_swizzled::<P::E, P::M>(&mut out.a_qk, 0usize, &qk, comptime!(of_consumers.pairs()));
    show_factors(comptime!(of_consumers.first), comptime!(of_consumers.units));
}

/// X Y^T of rows that begin `at` numbers into their tiles.
#[cube]
fn scores_of<P: StateEngine>(
    x: &SharedMemory<Vector<P::E, P::N>>,
    y: &SharedMemory<Vector<P::E, P::N>>,
    at: usize,
    #[comptime] plan: Plan,
) -> Acc {
    let grid = comptime!(plan.pairs());
    let layout = comptime!(Swizzled { rows: plan.chunk, transposed: true });
    let mut acc = zeros(comptime!(grid.fragments()));
    let steps = comptime!(plan.key_slice / 16);
    multiply_by_warpgroups::<P::E, P::N>(&mut acc, x, y, at, steps, layout, grid);
    acc
}

/// Two tokens' decay factors by each lane; the chunk's sums begin at `own`.
#[cube]
fn store_decay_factors<P: StateEngine>(
    tiles: &mut StateTiles<P>,
    sums: &Sums,
    own: usize,
    #[comptime] plan: StatePlan,
) {
    let chunk = comptime!(plan.chunk);
    let before = comptime!(plan.variant.reads_before());
    let i = UNIT_POS as usize % 32 * 2;
    #[unroll]
    for l in 0..2usize {
        let at = tiles.at_decay_factors + i + l;
        let factors = &mut tiles.decay_factors;
        factors[at + comptime!(decay_factors::QUERY * chunk)] =
            from_start(sums, own, i + l, before, comptime!(*plan));
        factors[at + comptime!(decay_factors::KEY_TO_END * chunk)] =
            to_end(sums, own, i + l, comptime!(*plan));
        factors[at + comptime!(decay_factors::FROM_START * chunk)] =
            from_start(sums, own, i + l, false, comptime!(*plan));
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
