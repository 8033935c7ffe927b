//! Slices of tiles of the input gradients, where shared memory has no room for whole matrices: operands of a product are
//! requested and then laid into tiles. Where the plan requests ahead, they are in registers while the product before is
//! made. Where tiles are whole, factors and states are there already, and nothing is done for them.

use crate::chunkwise::arguments::StageTypes;
use crate::chunkwise::gradient_products::ValueProducts;
use crate::chunkwise::gradient_tiles::{
    GradientInputs, GradientTiles, state_rows, state_tile, values_tile,
};
use crate::chunkwise::plan::GradientPlan;
use crate::chunkwise::roles::{Factors, Keys, Right, Side, States, Values};
use crate::tile::{Requested, lay, load, request, room_for, width_of};
use cubecl::prelude::*;

/// This unit's part of a slice of a value-wide matrix, requested and not yet waited for; the matrix is of the
/// tensors' type or of that between stages.
#[derive(CubeType)]
pub(crate) struct ComingValues<P: StageTypes> {
    of_tensors: Requested<P::F, P::G>,
    between: Requested<P::E, P::G>,
}

#[cube]
fn coming_values<P: StageTypes>(#[comptime] plan: GradientPlan) -> ComingValues<P> {
    let read = width_of::<P::G>();
    let all = comptime!(if plan.whole { 1 } else { plan.values_window().turns(read) });
    ComingValues::<P> {
        of_tensors: room_for::<P::F, P::G>(all),
        between: room_for::<P::E, P::G>(all),
    }
}

/// Requests columns `first..` of a value-wide matrix, [C, value_slice].
#[cube]
fn request_values<P: StageTypes>(
    coming: &mut ComingValues<P>,
    from: &GradientInputs<P>,
    first: usize,
    #[comptime] which: Values,
    #[comptime] plan: GradientPlan,
) {
    let window = comptime!(plan.values_window());
    let rows = &from.place.values;
    if comptime!(!plan.whole) {
        if comptime!(which == Values::V) {
            request::<P::F, P::G>(&mut coming.of_tensors, &from.x.v, rows, first, window);
        } else if comptime!(which == Values::DO) {
            request::<P::F, P::G>(&mut coming.of_tensors, &from.saved.d_o, rows, first, window);
        } else if comptime!(which == Values::U) {
            request::<P::E, P::G>(&mut coming.between, &from.saved.u, rows, first, window);
        } else {
            request::<P::E, P::G>(&mut coming.between, &from.saved.r, rows, first, window);
        }
    }
}

/// Puts a value-wide matrix into the tile of its place on a side.
#[cube]
fn lay_values<P: StageTypes>(
    tiles: &mut GradientTiles<P>,
    coming: &ComingValues<P>,
    #[comptime] which: Values,
    #[comptime] side: Side,
    #[comptime] place: usize,
    #[comptime] plan: GradientPlan,
) {
    let window = comptime!(plan.values_window());
    let mut to = values_tile::<P>(tiles, which, side, place, plan);
    if comptime!(which == Values::V || which == Values::DO) {
        lay::<P::F, P::G, P::E, P::L>(&mut to, &coming.of_tensors, window);
    } else {
        lay::<P::E, P::G, P::E, P::L>(&mut to, &coming.between, window);
    }
}

/// Makes room for the factors of one side.
#[cube]
fn push_factors<P: StageTypes>(
    coming: &mut Sequence<ComingValues<P>>,
    #[comptime] factors: Factors,
    #[comptime] plan: GradientPlan,
) {
    #[unroll]
    for _ in 0..comptime!(factors.len()) {
        coming.push(coming_values::<P>(plan));
    }
}

/// Requests columns `first..` of factors.
#[cube]
fn request_factors<P: StageTypes>(
    coming: &mut Sequence<ComingValues<P>>,
    from: &GradientInputs<P>,
    first: usize,
    #[comptime] factors: Factors,
    #[comptime] plan: GradientPlan,
) {
    #[unroll]
    for n in 0..comptime!(factors.len()) {
        request_values::<P>(coming.index_mut(n), from, first, comptime!(factors.get(n)), plan);
    }
}

/// Puts factors into the tiles of their side.
#[cube]
fn lay_factors<P: StageTypes>(
    tiles: &mut GradientTiles<P>,
    coming: &Sequence<ComingValues<P>>,
    #[comptime] side: Side,
    #[comptime] factors: Factors,
    #[comptime] plan: GradientPlan,
) {
    #[unroll]
    for n in 0..comptime!(factors.len()) {
        lay_values::<P>(tiles, coming.index(n), comptime!(factors.get(n)), side, n, plan);
    }
}

/// As [`ComingValues`], of a state.
#[cube]
fn coming_state<P: StageTypes>(#[comptime] plan: GradientPlan) -> Requested<P::E, P::G> {
    let read = width_of::<P::G>();
    let all = comptime!(if plan.whole { 1 } else { plan.states_window().turns(read) });
    room_for::<P::E, P::G>(all)
}

/// Requests a state's values from `first` on and keys from `key` on.
#[cube]
fn request_state<P: StageTypes>(
    coming: &mut Requested<P::E, P::G>,
    from: &GradientInputs<P>,
    first: usize,
    key: usize,
    #[comptime] which: States,
    #[comptime] plan: GradientPlan,
) {
    // Behind the last value there is none.
    let first = min(first, comptime!(plan.value_width));
    let rows = state_rows(&from.place, first, plan);
    let window = comptime!(plan.states_window());
    if comptime!(!plan.whole) {
        if comptime!(which == States::Start) {
            request::<P::E, P::G>(coming, &from.saved.states, &rows, key, window);
        } else {
            request::<P::E, P::G>(coming, &from.saved.d_states, &rows, key, window);
        }
    }
}

/// This unit's part of a slice of the operands of products over values: on the right there are factors or one state.
#[derive(CubeType)]
pub(crate) struct ComingOperands<P: StageTypes> {
    lefts: Sequence<ComingValues<P>>,
    rights: Sequence<ComingValues<P>>,
    states: Sequence<Requested<P::E, P::G>>,
}

/// Room for the operands.
#[cube]
pub(crate) fn coming_operands<P: StageTypes>(
    #[comptime] products: ValueProducts,
    #[comptime] plan: GradientPlan,
) -> ComingOperands<P> {
    let mut coming = ComingOperands::<P> {
        lefts: Sequence::new(),
        rights: Sequence::new(),
        states: Sequence::new(),
    };
    push_factors::<P>(&mut coming.lefts, comptime!(plan.lefts(products)), plan);
    match comptime!(plan.right(products)) {
        Right::Factors(factors) => {
            push_factors::<P>(&mut coming.rights, comptime!(factors), plan);
        }
        Right::State(_) => {
            coming.states.push(coming_state::<P>(plan));
        }
    }
    coming
}

/// Requests values `first..` of the operands, and keys `key..` of a state.
#[cube]
pub(crate) fn request_operands<P: StageTypes>(
    coming: &mut ComingOperands<P>,
    from: &GradientInputs<P>,
    first: usize,
    key: usize,
    #[comptime] products: ValueProducts,
    #[comptime] plan: GradientPlan,
) {
    let lefts = comptime!(plan.lefts(products));
    request_factors::<P>(&mut coming.lefts, from, first, lefts, plan);
    match comptime!(plan.right(products)) {
        Right::Factors(factors) => {
            request_factors::<P>(&mut coming.rights, from, first, comptime!(factors), plan);
        }
        Right::State(which) => {
            let state = coming.states.index_mut(0usize);
            request_state::<P>(state, from, first, key, comptime!(which), plan);
        }
    }
}

/// Puts the operands into their tiles, between two barriers.
#[cube]
pub(crate) fn lay_operands<P: StageTypes>(
    tiles: &mut GradientTiles<P>,
    coming: &ComingOperands<P>,
    #[comptime] products: ValueProducts,
    #[comptime] plan: GradientPlan,
) {
    if comptime!(!plan.whole) {
        sync_cube();
        let lefts = comptime!(plan.lefts(products));
        lay_factors::<P>(tiles, &coming.lefts, comptime!(Side::Left), lefts, plan);
        match comptime!(plan.right(products)) {
            Right::Factors(factors) => {
                lay_factors::<P>(
                    tiles,
                    &coming.rights,
                    comptime!(Side::Right),
                    comptime!(factors),
                    plan,
                );
            }
            Right::State(which) => {
                let mut to = state_tile::<P>(tiles, comptime!(which));
                let window = comptime!(plan.states_window());
                lay::<P::E, P::G, P::E, P::L>(&mut to, coming.states.index(0usize), window);
            }
        }
        sync_cube();
    }
}

/// One slice of rows of keys, requested and not yet waited for. For gradients that are made together, which are sliced.
#[cube]
pub(crate) fn request_key_rows<P: StageTypes>(
    from: &GradientInputs<P>,
    first: usize,
    #[comptime] which: Keys,
    #[comptime] plan: GradientPlan,
) -> Requested<P::F, P::G> {
    let read = width_of::<P::G>();
    let window = comptime!(plan.key_window());
    let (keys, rows) = (&from.place.keys, &from.place.rows);
    let mut coming = room_for::<P::F, P::G>(comptime!(window.turns(read)));
    if comptime!(which == Keys::Q) {
        request::<P::F, P::G>(&mut coming, &from.x.q, keys, first, window);
    } else if comptime!(which == Keys::K) {
        request::<P::F, P::G>(&mut coming, &from.x.k, keys, first, window);
    } else if comptime!(which == Keys::A) {
        request::<P::F, P::G>(&mut coming, &from.x.a, rows, first, window);
    } else {
        request::<P::F, P::G>(&mut coming, &from.x.b, rows, first, window);
    }
    coming
}

/// Puts what [`request_key_rows`] asked for, `count` kinds of rows, into tiles between two barriers.
#[cube]
pub(crate) fn lay_key_rows<P: StageTypes>(
    tiles: &mut GradientTiles<P>,
    coming: &Sequence<Requested<P::F, P::G>>,
    #[comptime] count: usize,
    #[comptime] plan: GradientPlan,
) {
    let window = comptime!(plan.key_window());
    sync_cube();
    lay::<P::F, P::G, P::X, P::N>(&mut tiles.keys, coming.index(0usize), window);
    if comptime!(count > 1) {
        lay::<P::F, P::G, P::X, P::N>(&mut tiles.other_keys, coming.index(1usize), window);
    }
    sync_cube();
}

/// Loads one slice of rows of keys between two barriers.
#[cube]
pub(crate) fn load_key_rows<P: StageTypes>(
    tiles: &mut GradientTiles<P>,
    from: &GradientInputs<P>,
    first: usize,
    #[comptime] which: Keys,
    #[comptime] plan: GradientPlan,
) {
    if comptime!(!plan.whole) {
        let window = comptime!(plan.key_window());
        let (keys, rows) = (&from.place.keys, &from.place.rows);
        let to = &mut tiles.keys;
        sync_cube();
        if comptime!(which == Keys::Q) {
            load::<P::F, P::G, P::X, P::N>(to, &from.x.q, keys, first, window);
        } else if comptime!(which == Keys::K) {
            load::<P::F, P::G, P::X, P::N>(to, &from.x.k, keys, first, window);
        } else if comptime!(which == Keys::A) {
            load::<P::F, P::G, P::X, P::N>(to, &from.x.a, rows, first, window);
        } else {
            load::<P::F, P::G, P::X, P::N>(to, &from.x.b, rows, first, window);
        }
        sync_cube();
    }
}
