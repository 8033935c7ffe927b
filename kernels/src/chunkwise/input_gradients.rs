//! Input gradients, the last stage of the backward pass: dq, dk, da, db of all chunks at once.
//!
//! D_ij is the decay from j to i, S the state at the chunk's start, dS' the gradient of the state at its end.
//! dqk is the gradient of A_qk, dab that of strict(a|b), and so on (`d_scores`):
//! ```text
//! dqk = tril(dO U^T)        dab = strict(R U^T)          [C, C]   (low rank: dqk with v, and
//! dqb = tril(dO U^T)        dak = strict(R v^T)                    U in dqb and dab)
//! dq_i = sum_j D_ij (dqk_ij k_j + dqb_ij b_j) + e^{G_i} dO_i S^T
//! da_i = sum_j D_ij (dab_ij b_j + dak_ij k_j) + e^{G_i} R_i S^T
//! dk_j = sum_i D_ij (dqk_ij q_i + dak_ij a_i) + e^{G_C - G_j} v_j dS'^T
//! db_j = sum_i D_ij (dqb_ij q_i + dab_ij a_i) + e^{G_C - G_j} U_j dS'^T
//! ```
//! An identity transition has q and k alone, with U = v. The delta rule has a = -beta e and b = k:
//! `de = -beta da`, `dbeta = -e da + v R`, `dv = beta R`.
//!
//! Work: a cube a chunk of a (sequence, head), over slices of keys where its tiles are not in shared
//! memory whole (gradient_tiles.rs). One row's gradients after another, or all rows that read and then all that
//! write ([`Together`]). Which rows and terms there are: gradient_rows.rs; products: gradient_products.rs; dg and dbeta:
//! decay_gradients.rs.

use crate::chunkwise::arguments::{Gradients, Operands, RowPairs, SavedTensors, StageTypes, Types};
use crate::chunkwise::chunk::{
    Place, Sizes, Sums, between, chunk_sums, request_log_decays, share_kept, sum_vectors,
};
use crate::chunkwise::decay::{from_start, to_end, vector_from_start};
use crate::chunkwise::decay_gradients::{
    DecayTerm, PartialSums, TokenRows, ZeroExponents, add_through_end, add_through_slice,
    add_zero_exponents, beta_products, clear_d_decays, decay_products, partial_sums,
    write_d_values, write_scalar_d_g, write_vector_d_g,
};
use crate::chunkwise::gradient_products::{
    ValueProducts, add_by_warpgroups, add_product_over_tokens, value_products,
};
use crate::chunkwise::gradient_rows::{RowRole, Together};
use crate::chunkwise::gradient_slices::{lay_key_rows, load_key_rows, request_key_rows};
use crate::chunkwise::gradient_tiles::{
    GradientInputs, GradientTiles, copy_group_async, gradient_tiles, keys_tile, load_fragments,
};
use crate::chunkwise::plan::GradientPlan;
use crate::chunkwise::roles::{CopyGroup, Scored, TokenOffset};
use crate::chunkwise::score_gradients::{
    ScoreGradients, fill_weights, prepare, scale_erase_rows, score_gradients, scored_tile,
};
use crate::chunkwise::state::add;
use crate::chunkwise::varlen::own_chunk;
use crate::chunkwise::vector_decay::{AdjointRows, adjoint_by_blocks, adjoint_by_terms};
use crate::tile::{
    Acc, Pair, Requested, column, commit_copies, row_in, set, wait_for_copies, wait_for_factors,
    write_out_by_four, zeros,
};
use cubecl::prelude::*;

/// The input gradients of a chunk under way.
#[derive(CubeType)]
struct Chunk<P: StageTypes> {
    from: GradientInputs<P>,
    to: Gradients<P::F, P::G, P::W>,
    tiles: GradientTiles<P>,
    d_scores: ScoreGradients<P::X, P::M>,
    sums: Sums,
    sums_of_unit: PartialSums,
}

/// The kernel. F: the tensors' type; E: numbers of tensors between stages, and of values and states in tiles; X: keys and
/// gradients of scores in tiles. Widths: [`StageTypes`].
#[cube(launch_unchecked)]
#[allow(unused_mut)] // it marks what is written
#[allow(clippy::too_many_arguments)] // widths of vectors
pub(crate) fn input_gradients<
    F: Float,
    X: Float,
    E: Float,
    G: Size,
    N: Size,
    M: Size,
    L: Size,
    T: Size,
    W: Size,
>(
    x: Operands<F, G>,
    pairs: RowPairs<F, T>,
    saved: SavedTensors<F, E, G>,
    mut out: Gradients<F, G, W>,
    sizes: &Sizes,
    #[comptime] plan: GradientPlan,
    #[define(F, X, E)] _types: [StorageType; 3],
    #[define(G, N, M, L, T, W)] _widths: [usize; 6],
) {
    let place = own_chunk(sizes, comptime!(*plan));
    let from = inputs::<Types<F, X, E, G, N, M, L, T, W>>(x, pairs, saved, place);
    let mut chunk = chunk::<Types<F, X, E, G, N, M, L, T, W>>(from, out, plan);
    gradients_of_chunk::<Types<F, X, E, G, N, M, L, T, W>>(&mut chunk, plan);
}

#[cube]
fn gradients_of_chunk<P: StageTypes>(chunk: &mut Chunk<P>, #[comptime] plan: GradientPlan) {
    if comptime!(plan.whole) {
        whole::<P>(chunk, plan);
    } else {
        in_slices::<P>(chunk, plan);
    }
    write_d_g_and_d_values::<P>(chunk, plan);
}

#[cube]
fn inputs<P: StageTypes>(
    x: Operands<P::F, P::G>,
    pairs: RowPairs<P::F, P::T>,
    saved: SavedTensors<P::F, P::E, P::G>,
    place: Place,
) -> GradientInputs<P> {
    GradientInputs::<P> { x, pairs, saved, place }
}

#[cube]
fn chunk<P: StageTypes>(
    from: GradientInputs<P>,
    to: Gradients<P::F, P::G, P::W>,
    #[comptime] plan: GradientPlan,
) -> Chunk<P> {
    Chunk::<P> {
        from,
        to,
        sums: chunk_sums(comptime!(plan.by_blocks()), comptime!(*plan)),
        tiles: gradient_tiles::<P>(plan),
        d_scores: score_gradients::<P::X, P::M>(plan),
        sums_of_unit: partial_sums(plan),
    }
}

/// All gradients of rows, from tiles of all values: three groups of copies are under way from the start, or two where S and
/// dS' take turns in one tile.
#[cube]
fn whole<P: StageTypes>(chunk: &mut Chunk<P>, #[comptime] plan: GradientPlan) {
    copy_and_commit::<P>(chunk, 0usize, comptime!(CopyGroup::Values), plan);
    copy_group_async::<P>(&mut chunk.tiles, &chunk.from, 0usize, comptime!(CopyGroup::Start), plan);
    copy_and_commit::<P>(chunk, 0usize, comptime!(CopyGroup::Keys), plan);
    if comptime!(!plan.one_state) {
        copy_and_commit::<P>(chunk, 0usize, comptime!(CopyGroup::End), plan);
    }
    prepare::<P>(&mut chunk.d_scores, &mut chunk.tiles, &mut chunk.sums, &chunk.from, plan);
    wait_for(comptime!(if plan.one_state { 1usize } else { 2usize }), plan);
    fill_weights::<P>(&mut chunk.d_scores, &mut chunk.tiles, &chunk.from, &chunk.sums, plan);
    if comptime!(plan.one_state) {
        key_slices_of_one_state::<P>(chunk, plan);
    } else if comptime!(plan.key_slices() == 1) {
        wait_for(1usize, plan);
        let d_erase = query_and_erase_gradients::<P>(chunk, 0usize, plan);
        wait_for(0usize, plan);
        key_and_write_gradients::<P>(&d_erase, chunk, 0usize, plan);
    } else {
        key_slices::<P>(chunk, plan);
    }
}

/// All gradients of rows, one slice of keys after another, of which the first is under way. The next slice is copied as soon
/// as tiles are through with one: its state while dS' is in use, the rest after that.
#[cube]
fn key_slices<P: StageTypes>(chunk: &mut Chunk<P>, #[comptime] plan: GradientPlan) {
    for slice in 0..comptime!(plan.key_slices()) {
        let first = slice * comptime!(plan.key_slice);
        let next = first + comptime!(plan.key_slice);
        let goes_on = next < comptime!(plan.key_width);
        wait_for(1usize, plan);
        let d_erase = query_and_erase_gradients::<P>(chunk, first, plan);
        wait_for(0usize, plan);
        if comptime!(plan.variant.scalar()) {
            add_through_slice::<P>(&mut chunk.sums_of_unit, &chunk.tiles, plan);
        }
        sync_cube();
        if goes_on {
            let group = comptime!(CopyGroup::Start);
            copy_group_async::<P>(&mut chunk.tiles, &chunk.from, next, group, plan);
        }
        key_and_write_gradients::<P>(&d_erase, chunk, first, plan);
        sync_cube();
        if goes_on {
            copy_and_commit::<P>(chunk, next, comptime!(CopyGroup::Keys), plan);
            copy_and_commit::<P>(chunk, next, comptime!(CopyGroup::End), plan);
        }
    }
}

/// As [`key_slices`], where dS' follows S into the same tile. What is waited for then, another cube of the multiprocessor
/// fills.
#[cube]
fn key_slices_of_one_state<P: StageTypes>(chunk: &mut Chunk<P>, #[comptime] plan: GradientPlan) {
    for slice in 0..comptime!(plan.key_slices()) {
        let first = slice * comptime!(plan.key_slice);
        let next = first + comptime!(plan.key_slice);
        wait_for(0usize, plan);
        let d_erase = query_and_erase_gradients::<P>(chunk, first, plan);
        sync_cube();
        copy_and_commit::<P>(chunk, first, comptime!(CopyGroup::End), plan);
        wait_for(0usize, plan);
        key_and_write_gradients::<P>(&d_erase, chunk, first, plan);
        if comptime!(plan.variant.scalar()) {
            let sums = &mut chunk.sums_of_unit;
            add_through_end::<P>(sums, &chunk.tiles, &chunk.from, first, plan);
        }
        sync_cube();
        if next < comptime!(plan.key_width) {
            let group = comptime!(CopyGroup::Start);
            copy_group_async::<P>(&mut chunk.tiles, &chunk.from, next, group, plan);
            copy_and_commit::<P>(chunk, next, comptime!(CopyGroup::Keys), plan);
        }
    }
}

/// Waits for all but the `later` groups of copies that were committed last.
#[cube]
fn wait_for(#[comptime] later: usize, #[comptime] plan: GradientPlan) {
    if comptime!(plan.warpgroups) {
        wait_for_factors(later);
    } else {
        wait_for_copies(later);
    }
}

/// Starts copying a group of tiles, which is one group of copies with what is not committed yet.
#[cube]
fn copy_and_commit<P: StageTypes>(
    chunk: &mut Chunk<P>,
    first: usize,
    #[comptime] group: CopyGroup,
    #[comptime] plan: GradientPlan,
) {
    copy_group_async::<P>(&mut chunk.tiles, &chunk.from, first, group, plan);
    commit_copies();
}

/// All gradients of rows, one slice of keys after another.
#[cube]
fn in_slices<P: StageTypes>(chunk: &mut Chunk<P>, #[comptime] plan: GradientPlan) {
    let vector = comptime!(plan.variant.vector());
    prepare::<P>(&mut chunk.d_scores, &mut chunk.tiles, &mut chunk.sums, &chunk.from, plan);
    fill_weights::<P>(&mut chunk.d_scores, &mut chunk.tiles, &chunk.from, &chunk.sums, plan);
    for slice in 0..comptime!(plan.key_slices()) {
        let first = slice * comptime!(plan.key_slice);
        if comptime!(vector) {
            let mut coming = Array::<f32>::new(comptime!(plan.run_length()));
            let rows = &chunk.from.place.rows;
            let g = &chunk.from.x.vector_g;
            request_log_decays(&mut coming, g, rows, first, comptime!(*plan));
            let decays = comptime!(plan.by_blocks());
            sum_vectors(&mut chunk.sums, &coming, decays, comptime!(*plan));
            clear_d_decays::<P>(&mut chunk.tiles, plan);
        }
        let d_erase = query_and_erase_gradients::<P>(chunk, first, plan);
        key_and_write_gradients::<P>(&d_erase, chunk, first, plan);
        if comptime!(vector) {
            let tiles = &mut chunk.tiles;
            write_vector_d_g::<P>(&mut chunk.to, tiles, &chunk.from, &chunk.sums, first, plan);
        }
    }
}

/// dg of a scalar decay; dv and dbeta of a delta rule.
#[cube]
fn write_d_g_and_d_values<P: StageTypes>(chunk: &mut Chunk<P>, #[comptime] plan: GradientPlan) {
    let sums_of_unit = &chunk.sums_of_unit;
    if comptime!(plan.variant.scalar()) {
        let tiles = &mut chunk.tiles;
        write_scalar_d_g::<P>(&mut chunk.to, tiles, sums_of_unit, &chunk.from, &chunk.sums, plan);
    }
    if comptime!(plan.variant.delta()) {
        write_d_values::<P>(&mut chunk.to, &mut chunk.tiles, sums_of_unit, &chunk.from, plan);
    }
}

/// Multiplies gradients by e^{G_i}, or (`ends`) by e^{G_C - G_i}.
#[cube]
fn scale_by_decay(
    acc: &mut Acc,
    sums: &Sums,
    #[comptime] ends: bool,
    #[comptime] before: bool,
    #[comptime] plan: GradientPlan,
) {
    let grid = comptime!(plan.rows_grid());
    let stride = comptime!(plan.stride(plan.key_slice));
    #[unroll]
    for f in 0..comptime!(grid.fragments()) {
        let d = column(f, grid);
        #[unroll]
        for h in 0..2usize {
            let i = row_in(f, h, grid);
            let mut by = Pair::new(1.0f32);
            if comptime!(plan.variant.vector()) {
                #[unroll]
                for l in 0..2usize {
                    if comptime!(ends) {
                        let end = comptime!((plan.chunk - 1) * stride) + d + l;
                        by[l] = share_kept(between(sums, end, i * stride + d + l));
                    } else {
                        by[l] = vector_from_start(sums, i, d + l, before, comptime!(*plan));
                    }
                }
            } else if comptime!(ends) {
                by = Pair::new(to_end(sums, 0usize, i, comptime!(*plan)));
            } else {
                by = Pair::new(from_start(sums, 0usize, i, before, comptime!(*plan)));
            }
            let x = acc.index(f)[h] * by;
            set(acc.index_mut(f), h, x);
        }
    }
}

/// Gradients of one slice of the rows of `together`; those of e and of a delta rule's a before -beta.
#[cube]
fn gradients<P: StageTypes>(
    chunk: &mut Chunk<P>,
    first: usize,
    #[comptime] together: Together,
    #[comptime] plan: GradientPlan,
) -> Sequence<Acc> {
    let count = comptime!(plan.roles(together).len());
    // Where they are requested ahead: under way while the state is multiplied.
    let mut held = Sequence::<TokenRows>::new();
    #[unroll]
    for n in 0..count {
        let role = comptime!(plan.roles(together)[n]);
        held.push(held_rows::<P>(chunk, first, comptime!(plan.requests_ahead()), role, plan));
    }
    let coming = request_others::<P>(chunk, first, together, plan);
    let of_state = comptime!(ValueProducts::State(together));
    let mut accs = value_products::<P>(&mut chunk.tiles, &chunk.from, first, of_state, plan);
    #[unroll]
    for n in 0..count {
        let role = comptime!(plan.roles(together)[n]);
        let (acc, held) = (accs.index_mut(n), held.index(n));
        scale_state_term::<P>(acc, chunk, held, first, role, plan);
    }
    if comptime!(plan.by_blocks()) {
        let others = comptime!(plan.others(together).len());
        lay_key_rows::<P>(&mut chunk.tiles, &coming, others, plan);
        add_terms_of_blocks::<P>(&mut accs, chunk, together, plan);
    } else {
        let role = comptime!(plan.roles(together)[0]);
        add_terms::<P>(accs.index_mut(0usize), chunk, first, role, plan);
    }
    #[unroll]
    for n in 0..count {
        let role = comptime!(plan.roles(together)[n]);
        let (acc, held) = (accs.index_mut(n), held.index(n));
        finish_gradient::<P>(acc, chunk, held, first, role, plan);
    }
    accs
}

/// Rows on the other side of `together`, requested; nothing where they are loaded when they are used.
#[cube]
fn request_others<P: StageTypes>(
    chunk: &Chunk<P>,
    first: usize,
    #[comptime] together: Together,
    #[comptime] plan: GradientPlan,
) -> Sequence<Requested<P::F, P::G>> {
    let mut coming = Sequence::<Requested<P::F, P::G>>::new();
    if comptime!(plan.by_blocks()) {
        #[unroll]
        for n in 0..comptime!(plan.others(together).len()) {
            let rows = comptime!(plan.others(together)[n]);
            coming.push(request_key_rows::<P>(&chunk.from, first, rows, plan));
        }
    }
    coming
}

/// A term with a state, times the decay between it and the row.
#[cube]
fn scale_state_term<P: StageTypes>(
    acc: &mut Acc,
    chunk: &mut Chunk<P>,
    held: &TokenRows,
    first: usize,
    #[comptime] role: RowRole,
    #[comptime] plan: GradientPlan,
) {
    let writes = comptime!(role.writes());
    let before = comptime!(plan.reads_state_before(role));
    scale_by_decay(acc, &chunk.sums, writes, before, plan);
    if comptime!(plan.has_decay() && writes) {
        let term = comptime!(DecayTerm::ChunkEnd);
        add_decay_products::<P>(chunk, acc, held, first, role, term, plan);
    }
}

/// Finishes a gradient whose terms are summed: adds its products to dG and dbeta, then the terms that dG must not see.
#[cube]
fn finish_gradient<P: StageTypes>(
    acc: &mut Acc,
    chunk: &mut Chunk<P>,
    held: &TokenRows,
    first: usize,
    #[comptime] role: RowRole,
    #[comptime] plan: GradientPlan,
) {
    if comptime!(plan.has_decay()) {
        let term = comptime!(plan.decay_term(role));
        add_decay_products::<P>(chunk, acc, held, first, role, term, plan);
    }
    add_zero_exponent_terms::<P>(acc, chunk, first, role, plan);
    if comptime!(role == RowRole::Erase && plan.variant.delta()) {
        if comptime!(plan.requests_ahead()) {
            beta_products(&mut chunk.sums_of_unit, acc, &held.rows, plan);
        } else {
            let own = held_rows::<P>(chunk, first, true, role, plan);
            beta_products(&mut chunk.sums_of_unit, acc, &own.rows, plan);
        }
    }
}

/// Rows of `role` where their gradients lie; none where they are not `wanted`.
#[cube]
fn held_rows<P: StageTypes>(
    chunk: &Chunk<P>,
    first: usize,
    #[comptime] wanted: bool,
    #[comptime] role: RowRole,
    #[comptime] plan: GradientPlan,
) -> TokenRows {
    let valid = chunk.from.place.valid;
    if comptime!(wanted) {
        let own = comptime!(plan.rows(role));
        let same = comptime!(TokenOffset::Same);
        let rows = load_fragments::<P>(&chunk.tiles, &chunk.from, first, own, same, plan);
        TokenRows { rows, valid }
    } else {
        TokenRows { rows: zeros(0usize), valid }
    }
}

/// Adds the products of rows of `role`, `held` where they are requested ahead, with what there is of their gradients
/// to dG.
#[cube]
fn add_decay_products<P: StageTypes>(
    chunk: &mut Chunk<P>,
    acc: &Acc,
    held: &TokenRows,
    first: usize,
    #[comptime] role: RowRole,
    #[comptime] term: DecayTerm,
    #[comptime] plan: GradientPlan,
) {
    if comptime!(plan.requests_ahead()) {
        let (sums, tiles) = (&mut chunk.sums_of_unit, &mut chunk.tiles);
        decay_products::<P>(sums, tiles, acc, held, term, plan);
    } else {
        let own = held_rows::<P>(chunk, first, true, role, plan);
        let (sums, tiles) = (&mut chunk.sums_of_unit, &mut chunk.tiles);
        decay_products::<P>(sums, tiles, acc, &own, term, plan);
    }
}

/// Adds the terms of a role's gradient within the chunk, one after another.
#[cube]
fn add_terms<P: StageTypes>(
    acc: &mut Acc,
    chunk: &mut Chunk<P>,
    first: usize,
    #[comptime] role: RowRole,
    #[comptime] plan: GradientPlan,
) {
    #[unroll]
    for n in 0..comptime!(plan.terms(role).len()) {
        let term = comptime!(plan.terms(role)[n]);
        let of = comptime!(term.rows);
        load_key_rows::<P>(&mut chunk.tiles, &chunk.from, first, of, plan);
        let rows = keys_tile::<P>(&chunk.tiles, of, 0usize, plan);
        let weights = scored_tile::<P::X, P::M>(&chunk.d_scores, comptime!(term.scored), plan);
        let of_y = comptime!(role.writes());
        if comptime!(plan.warpgroups) {
            let scaled = comptime!(term.scored == Scored::Scaled);
            let scales = &chunk.tiles.scales;
            add_by_warpgroups::<P::X, P::N, P::M>(acc, &weights, &rows, scales, of_y, scaled, plan);
        } else if comptime!(plan.variant.vector()) {
            let before = comptime!(plan.before(term.scored));
            let common = comptime!(*plan);
            adjoint_by_terms::<P::X, P::N, P::M>(
                acc,
                &weights,
                &rows,
                &chunk.sums,
                of_y,
                before,
                common,
            );
        } else {
            add_product_over_tokens::<P>(acc, &weights, &rows, of_y, plan);
        }
    }
}

/// Adds all terms within the chunk of the gradients of `together`, whose rows on the other side are in tiles.
#[cube]
fn add_terms_of_blocks<P: StageTypes>(
    accs: &mut Sequence<Acc>,
    chunk: &Chunk<P>,
    #[comptime] together: Together,
    #[comptime] plan: GradientPlan,
) {
    let others = comptime!(plan.others(together).len());
    let mut from =
        AdjointRows::<P::X, P::N, P::M> { weights: Sequence::new(), rows: Sequence::new() };
    #[unroll]
    for n in 0..others {
        let which = comptime!(plan.others(together)[n]);
        from.rows.push(keys_tile::<P>(&chunk.tiles, which, n, plan));
    }
    #[unroll]
    for kind in 0..comptime!(plan.roles(together).len()) {
        #[unroll]
        for n in 0..others {
            let scored = comptime!(plan.terms(plan.roles(together)[kind])[n].scored);
            from.weights.push(scored_tile::<P::X, P::M>(&chunk.d_scores, scored, plan));
        }
    }
    let adjoint = comptime!(plan.adjoint(together));
    let tokens = chunk.from.place.valid;
    let common = comptime!(*plan);
    adjoint_by_blocks::<P::X, P::N, P::M>(accs, &from, &chunk.sums, tokens, adjoint, common);
}

/// Adds the zero-exponent terms that dG must not see.
#[cube]
fn add_zero_exponent_terms<P: StageTypes>(
    acc: &mut Acc,
    chunk: &mut Chunk<P>,
    first: usize,
    #[comptime] role: RowRole,
    #[comptime] plan: GradientPlan,
) {
    let terms = ZeroExponents {
        terms: chunk.d_scores.zero_exponent,
        scales: chunk.tiles.scales,
        valid: chunk.from.place.valid,
    };
    #[unroll]
    for n in 0..comptime!(plan.terms(role).len()) {
        let term = comptime!(plan.terms(role)[n]);
        if comptime!(plan.excludes_zero_exponents(term.scored)) {
            let offset = comptime!(plan.offset(term, role.writes()));
            let of = comptime!(term.rows);
            let rows = load_fragments::<P>(&chunk.tiles, &chunk.from, first, of, offset, plan);
            add_zero_exponents(acc, &terms, &rows, comptime!(term.scored), offset, plan);
        }
    }
}

/// Writes a row's gradient; that of an erase key of a delta rule times -beta, which stays in `acc`.
#[cube]
fn write_gradient<P: StageTypes>(
    acc: &mut Acc,
    chunk: &mut Chunk<P>,
    first: usize,
    #[comptime] role: RowRole,
    #[comptime] plan: GradientPlan,
) {
    let grid = comptime!(plan.rows_grid());
    let width = comptime!(plan.key_width);
    let rows = chunk.from.place.rows;
    if comptime!(role == RowRole::Query) {
        write_out_by_four::<P::F, P::W>(&mut chunk.to.q, acc, &rows, first, width, grid);
    } else if comptime!(role == RowRole::Key) {
        write_out_by_four::<P::F, P::W>(&mut chunk.to.k, acc, &rows, first, width, grid);
    } else if comptime!(role == RowRole::Write) {
        write_out_by_four::<P::F, P::W>(&mut chunk.to.b, acc, &rows, first, width, grid);
    } else {
        if comptime!(plan.variant.delta()) {
            scale_erase_rows(acc, &chunk.tiles.scales, grid);
        }
        if comptime!(plan.variant.own_a()) {
            write_out_by_four::<P::F, P::W>(&mut chunk.to.a, acc, &rows, first, width, grid);
        }
    }
}

/// Writes the gradients of `together`.
#[cube]
fn write_gradients<P: StageTypes>(
    accs: &mut Sequence<Acc>,
    chunk: &mut Chunk<P>,
    first: usize,
    #[comptime] together: Together,
    #[comptime] plan: GradientPlan,
) {
    #[unroll]
    for n in 0..comptime!(plan.roles(together).len()) {
        let role = comptime!(plan.roles(together)[n]);
        write_gradient::<P>(accs.index_mut(n), chunk, first, role, plan);
    }
}

/// [`gradients`], which are written.
#[cube]
fn written_gradients<P: StageTypes>(
    chunk: &mut Chunk<P>,
    first: usize,
    #[comptime] together: Together,
    #[comptime] plan: GradientPlan,
) -> Sequence<Acc> {
    let mut accs = gradients::<P>(chunk, first, together, plan);
    write_gradients::<P>(&mut accs, chunk, first, together, plan);
    accs
}

/// Gradients of the rows that read the chunk's first state: dq and da. The last one of what is returned is de where the
/// erase key is k, to be added to dk.
#[cube]
fn query_and_erase_gradients<P: StageTypes>(
    chunk: &mut Chunk<P>,
    first: usize,
    #[comptime] plan: GradientPlan,
) -> Sequence<Acc> {
    if comptime!(plan.by_blocks()) {
        written_gradients::<P>(chunk, first, comptime!(Together::Readers), plan)
    } else {
        let query = comptime!(Together::One(RowRole::Query));
        let d_query = written_gradients::<P>(chunk, first, query, plan);
        if comptime!(plan.variant.solves()) {
            let erase = comptime!(Together::One(RowRole::Erase));
            written_gradients::<P>(chunk, first, erase, plan)
        } else {
            d_query
        }
    }
}

/// Gradients of the rows that write: dk, to which the last of `of_readers` is added if the erase key is k, and db.
#[cube]
fn key_and_write_gradients<P: StageTypes>(
    of_readers: &Sequence<Acc>,
    chunk: &mut Chunk<P>,
    first: usize,
    #[comptime] plan: GradientPlan,
) {
    let by_blocks = comptime!(plan.by_blocks());
    let together =
        comptime!(if by_blocks { Together::Writers } else { Together::One(RowRole::Key) });
    let mut accs = gradients::<P>(chunk, first, together, plan);
    if comptime!(plan.variant.delta() && !plan.variant.own_a()) {
        // By itself, or after dq.
        let d_erase = of_readers.index(comptime!(usize::from(by_blocks)));
        add(accs.index_mut(0usize), d_erase, comptime!(plan.rows_grid().fragments()));
    }
    write_gradients::<P>(&mut accs, chunk, first, together, plan);
    if comptime!(plan.variant.low_rank() && !by_blocks) {
        let write = comptime!(Together::One(RowRole::Write));
        let _d_write = written_gradients::<P>(chunk, first, write, plan);
    }
}
