//! Gradients of the score blocks: products of value-wide matrices under the decay mask.

use crate::chunkwise::arguments::StageTypes;
use crate::chunkwise::chunk::{Sums, sum_scalars};
use crate::chunkwise::decay::{decay_mask, erase_scale, intersects_lower_triangle};
use crate::chunkwise::gradient_products::{ValueProducts, value_products};
use crate::chunkwise::gradient_tiles::{GradientInputs, GradientTiles};
use crate::chunkwise::plan::{GradientPlan, UNUSED};
use crate::chunkwise::roles::{Factors, Scored, Side, Values};
use crate::tile::{Acc, Grid, Pair, column, inside, row_in, set, store, tile};
use cubecl::prelude::*;

/// Rows of zero-exponent terms.
const ZERO_EXPONENT_ROWS: usize = 4;

/// Gradients of the score blocks. Their zero-exponent terms lie apart: no log decay touches them.
#[derive(CubeType)]
pub(crate) struct ScoreGradients<X: Float, M: Size> {
    qk: SharedMemory<Vector<X, M>>,
    qb: SharedMemory<Vector<X, M>>,
    ab: SharedMemory<Vector<X, M>>,
    ak: SharedMemory<Vector<X, M>>,
    /// Delta: ab times -beta. Not with warpgroups, which scale ab as they read it.
    scaled: SharedMemory<Vector<X, M>>,
    /// [4, C], in the order of [`Scored::zero_exponent_row`].
    pub zero_exponent: SharedMemory<f32>,
}

/// Scores whose gradients are made together: all where gradients of rows are, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum ScoresTogether {
    One(Scored),
    All,
}

impl GradientPlan {
    /// Whether the row on the left of these scores sees the token before it.
    pub fn before(&self, scored: Scored) -> bool {
        if scored.reads() { self.variant.reads_before() } else { self.variant.erases_before() }
    }

    /// Whether zero-exponent terms are taken out of the block.
    pub fn excludes_zero_exponents(&self, scored: Scored) -> bool {
        if scored.reads() { self.excludes_query_terms() } else { self.excludes_erase_terms() }
    }

    /// The value-wide matrix on one side of the product that is the gradient of scores.
    fn factor_of(&self, scored: Scored, side: Side) -> Values {
        let [left, right] = match scored {
            Scored::Qk => [Values::DO, self.key_values()],
            Scored::Qb => [Values::DO, Values::U],
            Scored::Ab | Scored::Scaled => [Values::R, Values::U],
            Scored::Ak => [Values::R, Values::V],
        };
        if side == Side::Left { left } else { right }
    }

    /// All scores, in the order in which their gradients are made.
    fn score_turns(&self) -> Vec<ScoresTogether> {
        match self.by_blocks() {
            true => vec![ScoresTogether::All],
            false => {
                self.scored(ScoresTogether::All).into_iter().map(ScoresTogether::One).collect()
            }
        }
    }

    fn scored(&self, scores: ScoresTogether) -> Vec<Scored> {
        match scores {
            ScoresTogether::One(scored) => vec![scored],
            ScoresTogether::All if self.variant.low_rank() => {
                vec![Scored::Qk, Scored::Qb, Scored::Ak, Scored::Ab]
            }
            ScoresTogether::All if self.variant.solves() => vec![Scored::Qk, Scored::Ab],
            ScoresTogether::All => vec![Scored::Qk],
        }
    }

    /// Factors on one side of the products that are the gradients of `scores`, each once.
    pub fn score_factors(&self, scores: ScoresTogether, side: Side) -> Factors {
        let mut each = Vec::new();
        for scored in self.scored(scores) {
            let factor = self.factor_of(scored, side);
            if !each.contains(&factor) {
                each.push(factor);
            }
        }
        Factors::of(&each)
    }

    /// The places of the factors of each of `scores` among those of their side.
    pub fn score_places(&self, scores: ScoresTogether) -> Vec<[usize; 2]> {
        let sides = [Side::Left, Side::Right];
        let place =
            |scored, side| self.score_factors(scores, side).place(self.factor_of(scored, side));
        self.scored(scores)
            .into_iter()
            .map(|scored| sides.map(|side| place(scored, side)))
            .collect()
    }

    /// Most factors on one side of products that are made together.
    pub fn most_factors(&self, side: Side) -> usize {
        let of = |scores| self.score_factors(scores, side).len();
        self.score_turns().into_iter().map(of).max().unwrap_or(1)
    }
}

impl GradientPlan {
    /// Numbers of the tile of a score block.
    fn score_numbers(&self, scored: Scored) -> usize {
        let there = match scored {
            Scored::Qk => true,
            Scored::Qb | Scored::Ak => self.variant.low_rank(),
            Scored::Ab => self.variant.solves(),
            // Warpgroups scale their left factor in registers.
            Scored::Scaled => self.variant.delta() && !self.warpgroups,
        };
        if there { self.square_numbers() } else { UNUSED }
    }

    /// Bytes of shared memory of the input gradients.
    pub fn gradients_memory(&self) -> usize {
        let scores = Scored::ALL.iter().map(|scored| self.score_numbers(*scored)).sum::<usize>();
        scores * self.engine.bytes()
            + 4 * ZERO_EXPONENT_ROWS * self.chunk
            + self.gradient_tile_memory()
            + self.sums_memory(self.by_blocks())
    }
}

/// Tiles of score gradients.
#[cube]
pub(crate) fn score_gradients<X: Float, M: Size>(
    #[comptime] plan: GradientPlan,
) -> ScoreGradients<X, M> {
    ScoreGradients::<X, M> {
        qk: tile::<X, M>(comptime!(plan.score_numbers(Scored::Qk))),
        qb: tile::<X, M>(comptime!(plan.score_numbers(Scored::Qb))),
        ab: tile::<X, M>(comptime!(plan.score_numbers(Scored::Ab))),
        ak: tile::<X, M>(comptime!(plan.score_numbers(Scored::Ak))),
        scaled: tile::<X, M>(comptime!(plan.score_numbers(Scored::Scaled))),
        zero_exponent: SharedMemory::<f32>::new(comptime!(ZERO_EXPONENT_ROWS * plan.chunk)),
    }
}

/// Fills scales, sums of g and zero-exponent terms. Ends with everything visible to all.
#[cube]
pub(crate) fn prepare<P: StageTypes>(
    d_scores: &mut ScoreGradients<P::X, P::M>,
    tiles: &mut GradientTiles<P>,
    sums: &mut Sums,
    from: &GradientInputs<P>,
    #[comptime] plan: GradientPlan,
) {
    let chunk = comptime!(plan.chunk);
    let unit = UNIT_POS as usize;
    let scalars = &from.place.scalars;
    if unit < chunk {
        tiles.scales[unit] = erase_scale(&from.x.beta, scalars, unit, comptime!(*plan));
        #[unroll]
        for n in 0..ZERO_EXPONENT_ROWS {
            d_scores.zero_exponent[unit + comptime!(n * chunk)] = 0.0f32;
        }
    }
    sync_cube();
    if comptime!(plan.variant.scalar()) {
        sum_scalars(sums, &from.x.scalar_g, scalars, comptime!(*plan));
    }
}

/// Gradients of the scores: `[C, C]` products of value-wide matrices.
#[cube]
pub(crate) fn fill_weights<P: StageTypes>(
    d_scores: &mut ScoreGradients<P::X, P::M>,
    tiles: &mut GradientTiles<P>,
    from: &GradientInputs<P>,
    sums: &Sums,
    #[comptime] plan: GradientPlan,
) {
    #[unroll]
    for turn in 0..comptime!(plan.score_turns().len()) {
        let scores = comptime!(plan.score_turns()[turn]);
        let products = comptime!(ValueProducts::Scores(scores));
        let mut accs = value_products::<P>(tiles, from, 0usize, products, plan);
        #[unroll]
        for n in 0..comptime!(plan.scored(scores).len()) {
            let scored = comptime!(plan.scored(scores)[n]);
            let acc = accs.index_mut(n);
            mask(acc, &mut d_scores.zero_exponent, sums, scored, plan);
            store_score_gradient::<P>(acc, d_scores, tiles, scored, plan);
        }
    }
    sync_cube();
}

/// Puts the gradient of a score block into its tile, and that of a delta rule's erase keys times -beta into another.
#[cube]
fn store_score_gradient<P: StageTypes>(
    acc: &mut Acc,
    d_scores: &mut ScoreGradients<P::X, P::M>,
    tiles: &GradientTiles<P>,
    #[comptime] scored: Scored,
    #[comptime] plan: GradientPlan,
) {
    let grid = comptime!(plan.pairs());
    let stride = comptime!(plan.stride(plan.chunk));
    if comptime!(scored == Scored::Qk) {
        store::<P::X, P::M>(&mut d_scores.qk, acc, stride, grid);
    } else if comptime!(scored == Scored::Qb) {
        store::<P::X, P::M>(&mut d_scores.qb, acc, stride, grid);
    } else if comptime!(scored == Scored::Ak) {
        store::<P::X, P::M>(&mut d_scores.ak, acc, stride, grid);
    } else {
        store::<P::X, P::M>(&mut d_scores.ab, acc, stride, grid);
        if comptime!(plan.variant.delta() && !plan.warpgroups) {
            scale_erase_rows(acc, &tiles.scales, grid);
            store::<P::X, P::M>(&mut d_scores.scaled, acc, stride, grid);
        }
    }
}

/// Multiplies rows by -beta.
#[cube]
pub(crate) fn scale_erase_rows(acc: &mut Acc, scales: &SharedMemory<f32>, #[comptime] grid: Grid) {
    #[unroll]
    for f in 0..comptime!(grid.fragments()) {
        #[unroll]
        for h in 0..2usize {
            let i = row_in(f, h, grid);
            let scaled = acc.index(f)[h] * Pair::new(scales[i]);
            set(acc.index_mut(f), h, scaled);
        }
    }
}

/// Multiplies the gradient of a score block by the decay mask. Zero-exponent terms go to `zero_exponent` where there is
/// a log decay whose gradient they would enter.
#[cube]
fn mask(
    acc: &mut Acc,
    zero_exponent: &mut SharedMemory<f32>,
    sums: &Sums,
    #[comptime] scored: Scored,
    #[comptime] plan: GradientPlan,
) {
    let before = comptime!(plan.before(scored));
    let strict = comptime!(before || !scored.reads());
    let exclude = comptime!(plan.excludes_zero_exponents(scored));
    let grid = comptime!(plan.pairs());
    #[unroll]
    for f in 0..comptime!(grid.fragments()) {
        let j = column(f, grid);
        let low = intersects_lower_triangle(f, j, grid);
        #[unroll]
        for h in 0..2usize {
            let mut x = Pair::new(0.0);
            if low {
                let i = row_in(f, h, grid);
                x = acc.index(f)[h];
                #[unroll]
                for l in 0..2usize {
                    x[l] = x[l] * decay_mask(sums, i, j + l, strict, before, comptime!(*plan));
                    if comptime!(exclude) {
                        let zero = if comptime!(before) { j + l + 1 == i } else { j + l == i };
                        if zero {
                            if inside(f, grid) {
                                zero_exponent
                                    [comptime!(scored.zero_exponent_row() * plan.chunk) + i] = x[l];
                            }
                            x[l] = 0.0f32;
                        }
                    }
                }
            }
            set(acc.index_mut(f), h, x);
        }
    }
}

#[cube]
pub(crate) fn scored_tile<X: Float, M: Size>(
    d_scores: &ScoreGradients<X, M>,
    #[comptime] which: Scored,
    #[comptime] plan: GradientPlan,
) -> SharedMemory<Vector<X, M>> {
    if comptime!(which == Scored::Qk) {
        d_scores.qk
    } else if comptime!(which == Scored::Qb) {
        d_scores.qb
    } else if comptime!(which == Scored::Ak) {
        d_scores.ak
    } else if comptime!(which == Scored::Ab || plan.warpgroups) {
        d_scores.ab
    } else {
        d_scores.scaled
    }
}
