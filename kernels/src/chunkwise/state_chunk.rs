//! One chunk of the state pass, forward and backward.

use crate::chunkwise::arguments::StatePass;
use crate::chunkwise::chunk::Place;
use crate::chunkwise::decay::decay_factors;
use crate::chunkwise::plan::StatePlan;
use crate::chunkwise::producers::ProducerTiles;
use crate::chunkwise::state::{
    Block, State, StateEngine, add, reduce_split_k, scale_tokens, state_products,
    write_block_through,
};
use crate::chunkwise::state_tiles::{
    PassInputs, StateTiles, load_a_ak_v, load_a_of_u, load_chunk, load_erase_rows, load_key_rows,
    load_query_rows, load_square, load_values, load_write_rows,
};
use crate::tile::{Acc, Pair, set, zeros};
use cubecl::prelude::*;

/// Tensors that a pass writes.
#[derive(CubeType)]
pub(crate) struct PassOutputs<P: StateEngine> {
    pub tensors: StatePass<P::E, P::W>,
    /// o, or dv backward.
    pub values: Array<Vector<P::F, P::W>>,
}

/// A pass under way.
#[derive(CubeType)]
pub(crate) struct Pass<P: StateEngine> {
    pub from: PassInputs<P>,
    pub to: PassOutputs<P>,
    pub tiles: StateTiles<P>,
    pub produced: ProducerTiles<P>,
    /// U forward, R backward.
    pub block: Block<P>,
    pub state: State<P>,
}

/// One chunk forward.
#[cube]
pub(crate) fn chunk_forward<P: StateEngine>(
    pass: &mut Pass<P>,
    place: &Place,
    #[comptime] plan: StatePlan,
) {
    let variant = comptime!(plan.variant);
    let outputs = comptime!(!plan.task.local());
    load_chunk::<P>(&mut pass.tiles, &pass.from, place, plan);
    if comptime!(plan.task.save && outputs) {
        let first = pass.from.first;
        P::save_chunk_state(&pass.state, &mut pass.to.tensors.states, place.index, first, plan);
    }
    let fragments = comptime!(if outputs { plan.block_fragments() } else { 0 });
    let mut out = zeros(fragments);
    if comptime!(variant.solves()) {
        solve_forward::<P>(&mut out, pass, place, plan);
    } else {
        P::load_block(&mut pass.block, &pass.tiles.values, pass.tiles.at_values, plan);
    }
    P::publish(&mut pass.block, plan);
    if comptime!(outputs) {
        read_out::<P>(&mut out, pass, place, plan);
        if comptime!(!variant.low_rank()) {
            // Before the write: its registers are free then.
            write_output::<P>(pass, &out, place, plan);
        }
    }
    decay_state::<P>(pass, place, plan);
    scale::<P>(&mut pass.block.acc, &pass.tiles, comptime!(decay_factors::KEY_TO_END), plan);
    P::publish(&mut pass.block, plan);
    for slice in 0..comptime!(plan.key_slices()) {
        load_write_rows::<P>(&mut pass.tiles, &pass.from, place, slice, plan);
        let at = pass.tiles.at_rows;
        P::outer_update(&mut pass.state, &pass.tiles.write_rows, at, &pass.block, slice, plan);
    }
    if comptime!(variant.low_rank()) {
        add_values::<P>(&mut out, pass, place, plan);
        if comptime!(outputs) {
            write_output::<P>(pass, &out, place, plan);
        }
    }
}

/// U = T (beta v + A~ S), or T (A_ak v + A~ S). Where the state is read once for both, `out` gets Q~ S.
#[cube]
fn solve_forward<P: StateEngine>(
    out: &mut Acc,
    pass: &mut Pass<P>,
    place: &Place,
    #[comptime] plan: StatePlan,
) {
    let variant = comptime!(plan.variant);
    let fragments = comptime!(plan.block_fragments());
    let mut retrieved = zeros(fragments);
    if comptime!(plan.inverts_ahead()) {
        let (tiles, state) = (&pass.tiles, &pass.state);
        let (erase, query, at) = (&tiles.erase_rows, &tiles.query_rows, tiles.at_rows);
        state_products::<P>(&mut retrieved, out, erase, query, at, state, plan);
    } else {
        for slice in 0..comptime!(plan.key_slices()) {
            load_erase_rows::<P>(&mut pass.tiles, &pass.from, place, slice, plan);
            let rows = &pass.tiles.erase_rows;
            P::state_product(&mut retrieved, rows, pass.tiles.at_rows, &pass.state, slice, plan);
        }
    }
    reduce_split_k(&mut retrieved, &mut pass.state.scratch, 0usize, true, plan);
    let (tiles, block) = (&mut pass.tiles, &mut pass.block);
    scale::<P>(&mut retrieved, tiles, comptime!(decay_factors::ERASE), plan);
    if comptime!(variant.low_rank()) {
        load_a_ak_v::<P>(tiles, &pass.from, place, plan);
        P::load_block(block, &tiles.a_ak_v, tiles.at_values, plan);
    } else {
        // After the product, whose operands need the registers.
        P::load_block(block, &tiles.values, tiles.at_values, plan);
        scale::<P>(&mut block.acc, tiles, comptime!(decay_factors::BETA), plan);
    }
    add(&mut block.acc, &retrieved, fragments);
    solve::<P>(pass, place, false, plan);
    if comptime!(plan.task.save && !plan.task.local()) {
        save_block::<P>(pass, place, plan);
    }
}

/// The block, multiplied by T or (`adjoint`) T^T.
#[cube]
fn solve<P: StateEngine>(
    pass: &mut Pass<P>,
    place: &Place,
    #[comptime] adjoint: bool,
    #[comptime] plan: StatePlan,
) {
    load_square::<P>(&mut pass.tiles.inverse, &pass.from.intra.inverse, place, plan);
    P::publish(&mut pass.block, plan);
    let mut solved = zeros(comptime!(plan.block_fragments()));
    let at = pass.tiles.at_square;
    if comptime!(plan.inverts_ahead()) {
        let t = &pass.produced.inverse;
        P::block_product::<P::M>(&mut solved, t, at, &pass.block, adjoint, plan);
    } else {
        let t = &pass.tiles.inverse;
        P::block_product::<P::N>(&mut solved, t, at, &pass.block, adjoint, plan);
    }
    replace(&mut pass.block.acc, &solved, plan);
}

/// Q~ S + A_qk U, of a low rank transition A_qb U.
#[cube]
fn read_out<P: StateEngine>(
    out: &mut Acc,
    pass: &mut Pass<P>,
    place: &Place,
    #[comptime] plan: StatePlan,
) {
    if comptime!(!plan.inverts_ahead()) {
        for slice in 0..comptime!(plan.key_slices()) {
            load_query_rows::<P>(&mut pass.tiles, &pass.from, place, slice, plan);
            let at = pass.tiles.at_rows;
            P::state_product_out(out, &pass.tiles.query_rows, at, &pass.state, slice, plan);
        }
    }
    // Of warpgroups both planes have all tokens, and store a part of them.
    let from = comptime!(if plan.warpgroups { 0 } else { plan.output_fragments() });
    let fresh = comptime!(!plan.variant.solves());
    reduce_split_k(out, &mut pass.state.scratch, from, fresh, plan);
    scale_rows::<P>(out, &pass.tiles, plan);
    load_a_of_u::<P>(&mut pass.tiles, &pass.from, place, plan);
    let at = pass.tiles.at_square;
    if comptime!(plan.inverts_ahead()) {
        P::block_product_out::<P::M>(out, &pass.produced.a_qk, 0usize, &pass.block, plan);
    } else if comptime!(plan.producers() > 0) {
        P::block_product_out::<P::M>(out, &pass.produced.a_qk, at, &pass.block, plan);
    } else {
        P::block_product_out::<P::N>(out, &pass.tiles.a_of_u, at, &pass.block, plan);
    }
}

/// Low rank: `out += A_qk v` and S += K^^T v, which no a S enters.
#[cube]
fn add_values<P: StateEngine>(
    out: &mut Acc,
    pass: &mut Pass<P>,
    place: &Place,
    #[comptime] plan: StatePlan,
) {
    load_values::<P>(&mut pass.tiles, &pass.from, place, plan);
    P::load_block(&mut pass.block, &pass.tiles.values, pass.tiles.at_values, plan);
    P::publish(&mut pass.block, plan);
    if comptime!(!plan.task.local()) {
        load_square::<P>(&mut pass.tiles.a_of_v, &pass.from.intra.a_qk, place, plan);
        let at = pass.tiles.at_square;
        P::block_product_out::<P::N>(out, &pass.tiles.a_of_v, at, &pass.block, plan);
    }
    scale::<P>(&mut pass.block.acc, &pass.tiles, comptime!(decay_factors::KEY_TO_END), plan);
    P::publish(&mut pass.block, plan);
    for slice in 0..comptime!(plan.key_slices()) {
        load_key_rows::<P>(&mut pass.tiles, &pass.from, place, slice, plan);
        let at = pass.tiles.at_rows;
        P::outer_update(&mut pass.state, &pass.tiles.key_rows, at, &pass.block, slice, plan);
    }
}

/// One chunk backward.
#[cube]
pub(crate) fn chunk_backward<P: StateEngine>(
    pass: &mut Pass<P>,
    place: &Place,
    #[comptime] plan: StatePlan,
) {
    let variant = comptime!(plan.variant);
    load_chunk::<P>(&mut pass.tiles, &pass.from, place, plan);
    let outputs = comptime!(!plan.task.local());
    let with_a_qk = comptime!(plan.task.applies_a_qk(variant));
    if comptime!(outputs) {
        let first = pass.from.first;
        P::save_chunk_state(&pass.state, &mut pass.to.tensors.states, place.index, first, plan);
    }
    let fragments = comptime!(plan.block_fragments());
    let mut d_written = zeros(comptime!(if with_a_qk { fragments } else { 0 }));
    if comptime!(with_a_qk) {
        read_written::<P>(&mut d_written, pass, place, plan);
    }
    P::load_block(&mut pass.block, &pass.tiles.values, pass.tiles.at_values, plan);
    if comptime!(with_a_qk) {
        add_scores_adjoint::<P>(&mut d_written, pass, place, plan);
    }
    if comptime!(outputs && !variant.solves()) {
        // Before the write: its registers are free then.
        write_d_values::<P>(pass, &d_written, place, plan);
    }
    // Low rank: v is also written as it is, with k.
    let passes = comptime!(variant.low_rank() && outputs);
    let mut d_values = zeros(comptime!(if passes { fragments } else { 0 }));
    if comptime!(passes) {
        read_values::<P>(&mut d_values, pass, place, plan);
    }
    // dS += Q~^T dO.
    decay_state::<P>(pass, place, plan);
    scale::<P>(&mut pass.block.acc, &pass.tiles, comptime!(decay_factors::QUERY), plan);
    P::publish(&mut pass.block, plan);
    for slice in 0..comptime!(plan.key_slices()) {
        load_query_rows::<P>(&mut pass.tiles, &pass.from, place, slice, plan);
        let at = pass.tiles.at_rows;
        P::outer_update(&mut pass.state, &pass.tiles.query_rows, at, &pass.block, slice, plan);
    }
    if comptime!(variant.solves()) {
        solve_backward::<P>(&d_written, &mut d_values, pass, place, plan);
    }
}

/// B^ dS', in an identity transition K^ dS'.
#[cube]
fn read_written<P: StateEngine>(
    out: &mut Acc,
    pass: &mut Pass<P>,
    place: &Place,
    #[comptime] plan: StatePlan,
) {
    for slice in 0..comptime!(plan.key_slices()) {
        load_write_rows::<P>(&mut pass.tiles, &pass.from, place, slice, plan);
        let at = pass.tiles.at_rows;
        P::state_product(out, &pass.tiles.write_rows, at, &pass.state, slice, plan);
    }
    reduce_split_k(out, &mut pass.state.scratch, 0usize, true, plan);
    scale::<P>(out, &pass.tiles, comptime!(decay_factors::KEY_TO_END), plan);
}

/// `out += A_qk^T dO`, of a low rank transition A_qb^T dO.
#[cube]
fn add_scores_adjoint<P: StateEngine>(
    out: &mut Acc,
    pass: &mut Pass<P>,
    place: &Place,
    #[comptime] plan: StatePlan,
) {
    load_a_of_u::<P>(&mut pass.tiles, &pass.from, place, plan);
    P::publish(&mut pass.block, plan);
    let at = pass.tiles.at_square;
    if comptime!(plan.producers() > 0) {
        P::block_product::<P::M>(out, &pass.produced.a_qk, at, &pass.block, true, plan);
    } else {
        P::block_product::<P::N>(out, &pass.tiles.a_of_u, at, &pass.block, true, plan);
    }
}

/// Low rank: K^ dS' + A_qk^T dO, the gradient of v but for what goes through the solve.
#[cube]
fn read_values<P: StateEngine>(
    out: &mut Acc,
    pass: &mut Pass<P>,
    place: &Place,
    #[comptime] plan: StatePlan,
) {
    for slice in 0..comptime!(plan.key_slices()) {
        load_key_rows::<P>(&mut pass.tiles, &pass.from, place, slice, plan);
        let at = pass.tiles.at_rows;
        P::state_product(out, &pass.tiles.key_rows, at, &pass.state, slice, plan);
    }
    reduce_split_k(out, &mut pass.state.scratch, 0usize, false, plan);
    scale::<P>(out, &pass.tiles, comptime!(decay_factors::KEY_TO_END), plan);
    load_square::<P>(&mut pass.tiles.a_of_v, &pass.from.intra.a_qk, place, plan);
    let at = pass.tiles.at_square;
    P::block_product::<P::N>(out, &pass.tiles.a_of_v, at, &pass.block, true, plan);
}

/// R = T^T R', dS += A~^T R, and of a low rank transition dv.
#[cube]
fn solve_backward<P: StateEngine>(
    d_written: &Acc,
    d_values: &mut Acc,
    pass: &mut Pass<P>,
    place: &Place,
    #[comptime] plan: StatePlan,
) {
    let outputs = comptime!(!plan.task.local());
    replace(&mut pass.block.acc, d_written, plan);
    solve::<P>(pass, place, true, plan);
    if comptime!(outputs) {
        save_block::<P>(pass, place, plan);
    }
    if comptime!(plan.variant.low_rank() && outputs) {
        load_square::<P>(&mut pass.tiles.a_ak, &pass.from.intra.a_ak, place, plan);
        P::publish(&mut pass.block, plan);
        let at = pass.tiles.at_square;
        P::block_product::<P::N>(d_values, &pass.tiles.a_ak, at, &pass.block, true, plan);
        write_d_values::<P>(pass, d_values, place, plan);
    }
    scale::<P>(&mut pass.block.acc, &pass.tiles, comptime!(decay_factors::ERASE), plan);
    P::publish(&mut pass.block, plan);
    for slice in 0..comptime!(plan.key_slices()) {
        load_erase_rows::<P>(&mut pass.tiles, &pass.from, place, slice, plan);
        let at = pass.tiles.at_rows;
        P::outer_update(&mut pass.state, &pass.tiles.erase_rows, at, &pass.block, slice, plan);
    }
}

#[cube]
fn replace(acc: &mut Acc, by: &Acc, #[comptime] plan: StatePlan) {
    #[unroll]
    for f in 0..comptime!(plan.block_fragments()) {
        set(acc.index_mut(f), 0usize, by.index(f)[0usize]);
        set(acc.index_mut(f), 1usize, by.index(f)[1usize]);
    }
}

/// Multiplies each token's row of a block by its entry in row `which` of the decay factors.
#[cube]
fn scale<P: StateEngine>(
    acc: &mut Acc,
    tiles: &StateTiles<P>,
    #[comptime] which: usize,
    #[comptime] plan: StatePlan,
) {
    let by_beta = comptime!(
        which == decay_factors::BETA || (which == decay_factors::ERASE && plan.variant.delta())
    );
    if comptime!(plan.variant.scalar() || by_beta) {
        let at = tiles.at_decay_factors + comptime!(which * plan.chunk);
        scale_tokens::<P>(acc, &tiles.decay_factors, at, plan);
    }
}

/// Decays the state over the chunk.
#[cube]
fn decay_state<P: StateEngine>(pass: &mut Pass<P>, place: &Place, #[comptime] plan: StatePlan) {
    let total = chunk_decay::<P>(&pass.tiles, plan);
    let totals = &pass.from.intra.chunk_decay;
    P::decay_state(&mut pass.state, total, totals, chunk_decays_at(place, plan), plan);
}

/// e^{G_C} of a scalar decay.
#[cube]
pub(crate) fn chunk_decay<P: StateEngine>(
    tiles: &StateTiles<P>,
    #[comptime] plan: StatePlan,
) -> f32 {
    tiles.decay_factors[tiles.at_decay_factors
        + comptime!(decay_factors::FROM_START * plan.chunk + plan.chunk - 1)]
}

/// First of a chunk's e^{G_C} of a vector decay.
#[cube]
pub(crate) fn chunk_decays_at(place: &Place, #[comptime] plan: StatePlan) -> usize {
    place.index * comptime!(plan.key_width)
}

/// Multiplies the rows of an output block by the queries' decay.
#[cube]
fn scale_rows<P: StateEngine>(acc: &mut Acc, tiles: &StateTiles<P>, #[comptime] plan: StatePlan) {
    if comptime!(plan.warpgroups) {
        scale::<P>(acc, tiles, comptime!(decay_factors::QUERY), plan);
    } else if comptime!(plan.variant.scalar()) {
        #[unroll]
        for f in 0..comptime!(plan.output_fragments()) {
            #[unroll]
            for h in 0..2usize {
                let i = P::output_row(f, h, plan);
                let at = tiles.at_decay_factors + comptime!(decay_factors::QUERY * plan.chunk) + i;
                let x = acc.index(f)[h] * Pair::new(tiles.decay_factors[at]);
                set(acc.index_mut(f), h, x);
            }
        }
    }
}

/// Writes outputs.
#[cube]
fn write_output<P: StateEngine>(
    pass: &mut Pass<P>,
    out: &Acc,
    place: &Place,
    #[comptime] plan: StatePlan,
) {
    let first = pass.from.first;
    let rows = &place.values;
    if comptime!(plan.writes_through_values()) {
        let (tile, at) = (&mut pass.tiles.values, pass.tiles.at_values);
        write_block_through::<P, P::F>(&mut pass.to.values, out, tile, at, rows, first, plan);
    } else {
        P::write_output::<P::F>(&mut pass.to.values, out, rows, first, plan);
    }
}

/// Writes gradients of values.
#[cube]
fn write_d_values<P: StateEngine>(
    pass: &mut Pass<P>,
    d_values: &Acc,
    place: &Place,
    #[comptime] plan: StatePlan,
) {
    let first = pass.from.first;
    P::write_block::<P::F>(&mut pass.to.values, d_values, &place.values, first, plan);
}

/// Saves U or R.
#[cube]
fn save_block<P: StateEngine>(pass: &mut Pass<P>, place: &Place, #[comptime] plan: StatePlan) {
    let first = pass.from.first;
    let (to, rows) = (&mut pass.to.tensors.block, &place.values);
    if comptime!(plan.writes_through_values()) {
        let (tile, at) = (&mut pass.tiles.values, pass.tiles.at_values);
        write_block_through::<P, P::E>(to, &pass.block.acc, tile, at, rows, first, plan);
    } else {
        P::write_block::<P::E>(to, &pass.block.acc, rows, first, plan);
    }
}
