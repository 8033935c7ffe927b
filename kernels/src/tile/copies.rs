//! Rows of tensors to tiles in shared memory, and pairs of numbers to tiles and tensors.

use super::{Acc, Grid, Pair, column, copy_async_or_zeros, inside, put_four, row, swizzled};
use cubecl::prelude::*;

/// A tile in shared memory, `numbers` long.
#[cube]
pub(crate) fn tile<E: Float, N: Size>(#[comptime] numbers: usize) -> SharedMemory<Vector<E, N>> {
    // `ldmatrix` reads and asynchronous copies write 16 bytes, aligned.
    tile_aligned::<E, N>(numbers, 16usize)
}

/// The same, aligned to so many bytes.
#[cube]
pub(crate) fn tile_aligned<E: Float, N: Size>(
    #[comptime] numbers: usize,
    #[comptime] bytes: usize,
) -> SharedMemory<Vector<E, N>> {
    let width = N::value();
    SharedMemory::<Vector<E, N>>::new_aligned(comptime!(numbers / width), bytes)
}

/// A tile of so many numbers, aligned to so many bytes, or `shared` where a role has none of its own.
#[cube]
pub(crate) fn own_or<E: Float, N: Size>(
    shared: SharedMemory<Vector<E, N>>,
    #[comptime] numbers: Option<usize>,
    #[comptime] bytes: usize,
) -> SharedMemory<Vector<E, N>> {
    if comptime!(numbers.is_some()) {
        tile_aligned::<E, N>(comptime!(numbers.unwrap_or(1)), bytes)
    } else {
        shared
    }
}

/// The same tile, where two generic types are one.
#[cube]
#[allow(unused_variables)] // an intrinsic's
pub(crate) fn same_tile<X: Float, N: Size, Y: Float, M: Size>(
    tile: &SharedMemory<Vector<X, N>>,
) -> SharedMemory<Vector<Y, M>> {
    intrinsic!(|scope| {
        let [is, named] = [Vector::<X, N>::as_type(scope), Vector::<Y, M>::as_type(scope)];
        assert_eq!(is, named, "a tile has one type");
        tile.clone().expand.into()
    })
}

/// Where rows of one matrix lie in a tensor, all counted in numbers.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Rows {
    /// First number of the first row.
    pub start: usize,
    /// From one row to the next.
    pub stride: usize,
    /// Rows that exist; those after are read as zeros.
    pub valid: usize,
}

/// The part of a matrix that a tile holds. `columns` is a multiple of 16; columns of the tensor end
/// at `width`, and those after are read as zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Window {
    pub rows: usize,
    pub columns: usize,
    pub width: usize,
    /// Numbers from one row of the tile to the next.
    pub stride: usize,
    /// A factor of products of warpgroups, for [`load_async`] alone.
    pub swizzled: bool,
    /// Units that share it out, from unit `first` of the cube on, which is another than 0 for [`load_async`] alone.
    pub units: usize,
    pub first: usize,
}

impl Window {
    /// Vectors of `read` numbers that a unit loads.
    pub fn turns(&self, read: usize) -> usize {
        (self.rows * self.columns / read).div_ceil(self.units)
    }
}

/// Vectors of rows, requested and not yet waited for.
#[derive(CubeType)]
pub(crate) struct Requested<S: Float, G: Size> {
    /// As they are; one that is not used where they are held as words.
    vectors: Array<Vector<S, G>>,
    /// [`by_words`]: four for each vector, else one that is not used.
    words: Array<Vector<u32, Const<4>>>,
}

/// Whether vectors are held as words: eight numbers of 16 bits, which would take a register each by themselves.
#[cube]
fn by_words<S: Float, G: Size>() -> comptime_type!(bool) {
    let bytes = Vector::<S, G>::type_size();
    let numbers = G::value();
    comptime!(bytes == 16 && numbers == 8)
}

/// Room for so many vectors of a unit.
#[cube]
pub(crate) fn room_for<S: Float, G: Size>(#[comptime] turns: usize) -> Requested<S, G> {
    let by_words = by_words::<S, G>();
    Requested::<S, G> {
        vectors: Array::new(comptime!(if by_words { 1 } else { turns })),
        words: Array::new(comptime!(if by_words { turns } else { 1 })),
    }
}

/// Fills a tile with rows of `source`, from column `first` on.
#[cube]
pub(crate) fn load<S: Float, G: Size, E: Float, N: Size>(
    tile: &mut SharedMemory<Vector<E, N>>,
    source: &Array<Vector<S, G>>,
    rows: &Rows,
    first: usize,
    #[comptime] window: Window,
) {
    let read = G::value();
    #[unroll]
    for turn in 0..comptime!(window.turns(read)) {
        let mut coming = room_for::<S, G>(1usize);
        request_one::<S, G>(&mut coming, source, rows, first, turn, 0usize, window);
        lay_one::<S, G, E, N>(tile, &coming, turn, 0usize, window);
    }
}

/// This unit's vectors of [`load`], [`Window::turns`] of them; 0 where there is no row or column.
#[cube]
pub(crate) fn request<S: Float, G: Size>(
    coming: &mut Requested<S, G>,
    source: &Array<Vector<S, G>>,
    rows: &Rows,
    first: usize,
    #[comptime] window: Window,
) {
    let read = G::value();
    #[unroll]
    for turn in 0..comptime!(window.turns(read)) {
        request_one::<S, G>(coming, source, rows, first, turn, turn, window);
    }
}

/// Writes the vectors of [`request`] to a tile.
#[cube]
pub(crate) fn lay<S: Float, G: Size, E: Float, N: Size>(
    tile: &mut SharedMemory<Vector<E, N>>,
    coming: &Requested<S, G>,
    #[comptime] window: Window,
) {
    let read = G::value();
    #[unroll]
    for turn in 0..comptime!(window.turns(read)) {
        lay_one::<S, G, E, N>(tile, coming, turn, turn, window);
    }
}

/// Vector `turn` of this unit's share of a window, to place `to` of what is requested.
#[cube]
fn request_one<S: Float, G: Size>(
    coming: &mut Requested<S, G>,
    source: &Array<Vector<S, G>>,
    rows: &Rows,
    first: usize,
    #[comptime] turn: usize,
    #[comptime] to: usize,
    #[comptime] window: Window,
) {
    let read = G::value();
    let by_words = by_words::<S, G>();
    let share = own_element(turn, window.rows, comptime!(window.columns / read), window.units);
    let (i, c) = (share.row, share.column);
    let there = share.there && i < rows.valid && first + c * read < comptime!(window.width);
    // Rows begin with whole vectors.
    let at = (rows.start + first) / read + c + i * (rows.stride / read);
    if comptime!(by_words) {
        let mut x = Vector::<u32, Const<4>>::new(0u32);
        if there {
            x = Vector::reinterpret(source[at]);
        }
        coming.words[to] = x;
    } else {
        let mut x = Vector::<S, G>::new(S::new(0.0));
        if there {
            x = source[at];
        }
        coming.vectors[to] = x;
    }
}

/// An element of a matrix that a cube's units share out.
#[derive(CubeType)]
pub(crate) struct Element {
    pub row: usize,
    pub column: usize,
    /// Whether it is one: the last units of the last turn may have none.
    pub there: bool,
}

/// Element `turn` of this unit's share of a matrix of so many rows and columns. Units that are whole rows keep their
/// column, so that addresses only grow by whole rows.
#[cube]
pub(crate) fn own_element(
    #[comptime] turn: usize,
    #[comptime] rows: usize,
    #[comptime] columns: usize,
    #[comptime] units: usize,
) -> Element {
    let unit = UNIT_POS as usize;
    let n = unit + comptime!(turn * units);
    let mut row = n / columns;
    let mut column = n % columns;
    if comptime!(units.is_multiple_of(columns)) {
        row = unit / columns + comptime!(turn * (units / columns));
        column = unit % columns;
    }
    let mut there = true.runtime();
    if comptime!(!(rows * columns).is_multiple_of(units)) {
        there = n < comptime!(rows * columns);
    }
    Element { row, column, there }
}

/// Writes vector `turn` of this unit's share, at place `from` of what was requested.
#[cube]
fn lay_one<S: Float, G: Size, E: Float, N: Size>(
    tile: &mut SharedMemory<Vector<E, N>>,
    coming: &Requested<S, G>,
    #[comptime] turn: usize,
    #[comptime] from: usize,
    #[comptime] window: Window,
) {
    let read = G::value();
    let held = N::value();
    let by_words = by_words::<S, G>();
    let share = own_element(turn, window.rows, comptime!(window.columns / read), window.units);
    if share.there {
        let at = share.row * comptime!(window.stride) + share.column * read;
        if comptime!(by_words && read == held) {
            // Tile and tensor are of one type.
            tile[at / held] = Vector::<E, N>::reinterpret(coming.words[from]);
        } else if comptime!(by_words) {
            lay_down::<S, G, E, N>(tile, Vector::reinterpret(coming.words[from]), at);
        } else {
            lay_down::<S, G, E, N>(tile, coming.vectors[from], at);
        }
    }
}

/// Writes a vector to a tile, `at` numbers after its start.
#[cube]
fn lay_down<S: Float, G: Size, E: Float, N: Size>(
    tile: &mut SharedMemory<Vector<E, N>>,
    x: Vector<S, G>,
    at: usize,
) {
    let read = G::value();
    let held = N::value();
    if comptime!(read == held) {
        tile[at / held] = Vector::<E, N>::cast_from(x);
    } else {
        #[unroll]
        for l in 0..read {
            tile[at + l] = Vector::<E, N>::cast_from(x[l]);
        }
    }
}

/// As [`load`], from `at` numbers into the tile on and without waiting: copies of a vector of the tensor, whose numbers
/// are of the tile's type.
#[cube]
pub(crate) fn load_async<S: Float, G: Size, E: Float, N: Size>(
    tile: &mut SharedMemory<Vector<E, N>>,
    at: usize,
    source: &Array<Vector<S, G>>,
    rows: &Rows,
    first: usize,
    #[comptime] window: Window,
) {
    let read = G::value();
    let held = N::value();
    let bytes = Vector::<S, G>::type_size();
    let across = comptime!(window.columns / read);
    // Every unit stays in its column, so that addresses only ever grow by whole rows.
    let down = comptime!(window.units / across);
    let mut unit = UNIT_POS as usize;
    if comptime!(window.first > 0) {
        unit -= comptime!(window.first);
    }
    let i = unit / across;
    let c = unit % across;
    let from = (rows.start + first) / read + i * (rows.stride / read) + c;
    let step = rows.stride / read * down;
    let row_vectors = comptime!(if window.swizzled { 8 } else { window.stride / held });
    let mut to = at / held + i * row_vectors + c * comptime!(read / held);
    if comptime!(window.swizzled) {
        comptime!(assert!(read == 8 && held == 8 && down.is_multiple_of(8)));
        to = at / held + swizzled(i, c, comptime!(window.rows));
    }
    #[unroll]
    for turn in 0..comptime!(window.rows.div_ceil(down)) {
        let row = i + comptime!(turn * down);
        let mut in_window = true.runtime();
        if comptime!(!window.units.is_multiple_of(across)) {
            in_window = i < down;
        }
        if comptime!((turn + 1) * down > window.rows) {
            in_window = in_window && row < comptime!(window.rows);
        }
        if in_window {
            let to = to + comptime!(turn * down * row_vectors);
            copy_async_or_zeros(source, from + step * turn, tile, to, row < rows.valid, bytes);
        }
    }
}

/// Writes a pair into a tile, `offset` numbers after `at`: as it is where vectors hold two (both are even
/// then), one by one where they hold one.
#[cube]
pub(crate) fn put<E: Float, M: Size>(
    tile: &mut SharedMemory<Vector<E, M>>,
    at: usize,
    #[comptime] offset: usize,
    x: Pair,
) {
    let width = M::value();
    if comptime!(width == 1) {
        tile[at + offset] = Vector::<E, M>::cast_from(x[0usize]);
        tile[at + comptime!(offset + 1)] = Vector::<E, M>::cast_from(x[1usize]);
    } else {
        tile[at / 2 + comptime!(offset / 2)] = Vector::<E, M>::cast_from(x);
    }
}

/// As [`put`], into a tensor whose rows may end before the pair does: `room` numbers are left.
#[cube]
pub(crate) fn put_out<S: Float, M: Size>(
    tensor: &mut Array<Vector<S, M>>,
    at: usize,
    x: Pair,
    room: usize,
) {
    let width = M::value();
    if comptime!(width == 1) {
        if room > 0 {
            tensor[at] = Vector::<S, M>::cast_from(x[0usize]);
        }
        if room > 1 {
            tensor[at + 1] = Vector::<S, M>::cast_from(x[1usize]);
        }
    } else if room > 0 {
        tensor[at / 2] = Vector::<S, M>::cast_from(x);
    }
}

/// Writes a product to rows of a tensor, from column `first` on; columns of the tensor end at
/// `width`.
#[cube]
pub(crate) fn write_out<E: Float, M: Size>(
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
pub(crate) fn store_at<X: Float, M: Size>(
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

/// As [`write_out`], four numbers a vector where a unit can exchange them with its neighbour: in whole sectors.
#[cube]
pub(crate) fn write_out_by_four<F: Float, W: Size>(
    out: &mut Array<Vector<F, W>>,
    acc: &Acc,
    rows: &Rows,
    first: usize,
    #[comptime] width: usize,
    #[comptime] grid: Grid,
) {
    let four = W::value();
    if comptime!(four == 4) {
        let across = comptime!(grid.fragment_columns());
        let lane = UNIT_POS as usize % 32;
        let top = row(0usize, 0usize, grid);
        let columns = UNIT_POS as usize / comptime!(32 * grid.down())
            * comptime!(grid.n / grid.across())
            + lane % 2 * 8
            + lane % 4 / 2 * 4;
        let start = (rows.start + top * rows.stride + first + columns) / 4;
        if inside(0usize, grid) {
            #[unroll]
            for r in 0..comptime!(grid.fragment_rows()) {
                #[unroll]
                for h in 0..2usize {
                    let down = comptime!(grid.step(r * across, h)[0]);
                    let there = top + down < rows.valid;
                    let at = start + rows.stride / 4 * down;
                    #[unroll]
                    for c in 0..comptime!(across / 2) {
                        let left = acc.index(comptime!(r * across + 2 * c))[h];
                        let right = acc.index(comptime!(r * across + 2 * c + 1))[h];
                        let at = at + comptime!(c * 4);
                        // The last slice of a row may be wider than what is left of it; slices begin at multiples of n.
                        let there = if comptime!(width.is_multiple_of(grid.n)) {
                            there
                        } else {
                            there && first + columns + comptime!(c * 16) < width
                        };
                        put_four::<F, W>(out, at, left, right, there, 1u32);
                    }
                }
            }
        }
    } else {
        write_out::<F, W>(out, acc, rows, first, width, grid);
    }
}

/// Numbers of a vector.
#[cube]
pub(crate) fn width_of<N: Size>() -> comptime_type!(usize) {
    N::value()
}
