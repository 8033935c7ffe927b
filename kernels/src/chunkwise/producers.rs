//! Producer planes of the state pass: the intra-chunk stage of an identity transition in the pass's own cubes.

use crate::chunkwise::chunk::{Sums, sum_by_plane, sums};
use crate::chunkwise::decay::{Mask, apply_decay_mask, decay_factors, from_start, to_end};
use crate::chunkwise::plan::{StatePlan, UNUSED, row_major, transposed};
use crate::chunkwise::state::StateEngine;
use crate::chunkwise::state_tiles::StateTiles;
use crate::tile::{Grid, mul, store_at, tile, zeros};
use cubecl::prelude::*;

/// Scores that producer planes leave for consumers: [`StatePlan::score_stages`] chunks of them, one being made while
/// one is read.
#[derive(CubeType)]
pub(crate) struct ProducerTiles<P: StateEngine> {
    pub a_qk: SharedMemory<Vector<P::E, P::M>>,
    /// Sums of g of the chunk whose scores are made, room for each producer's own.
    sums: Sums,
}

impl StatePlan {
    /// Numbers of A_qk, and of the sums of g.
    fn produced_numbers(&self) -> [usize; 2] {
        match (self.producers(), self.task.applies_a_qk(self.variant)) {
            (0, _) => [UNUSED, 1],
            (producers, true) => {
                [self.score_stages() * self.square_numbers(), producers * self.chunk]
            }
            (producers, false) => [UNUSED, producers * self.chunk],
        }
    }

    /// Bytes of [`producer_tiles`].
    pub fn produced_memory(&self) -> usize {
        let [scores, sums] = self.produced_numbers();
        scores * self.engine.bytes() + 4 * (2 * sums + 1)
    }
}

#[cube]
pub(crate) fn producer_tiles<P: StateEngine>(#[comptime] plan: StatePlan) -> ProducerTiles<P> {
    let [scores, of_decays] = comptime!(plan.produced_numbers());
    ProducerTiles::<P> { a_qk: tile::<P::E, P::M>(scores), sums: sums(of_decays, 1usize) }
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
