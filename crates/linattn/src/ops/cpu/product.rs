//! Matrix products, in pieces over all cores.

use super::parallel::for_each;
use super::real::Real;
use super::shared::{Fresh, Shared};

/// Rows and columns of a piece of a result.
const PIECE: [usize; 2] = [128, 1024];
/// Rows of a piece of a product by blocks, which are small.
const ROWS: usize = 512;
/// Terms of a piece of a sum.
const TERMS: usize = 256;
/// Pieces of a sum at most.
const SLICES: usize = 16;

/// A matrix that lies in a slice in any order.
#[derive(Clone, Copy)]
pub(super) struct Matrix<'a, R> {
    data: &'a [R],
    size: [usize; 2],
    strides: [usize; 2],
}

impl<'a, R> Matrix<'a, R> {
    /// `[rows, columns]`, row by row.
    /// # Panics
    /// If there are not that many numbers.
    pub(super) fn new(data: &'a [R], [rows, columns]: [usize; 2]) -> Self {
        assert_eq!(data.len(), rows * columns, "{rows} rows of {columns} columns");
        Self { data, size: [rows, columns], strides: [columns, 1] }
    }

    /// `[rows, columns]` from the first number of `data` on, one row and one column `strides` further.
    /// # Panics
    /// If there are not that many numbers.
    pub(super) fn with_strides(data: &'a [R], size: [usize; 2], strides: [usize; 2]) -> Self {
        if !size.contains(&0) {
            let last = (size[0] - 1) * strides[0] + (size[1] - 1) * strides[1];
            assert!(last < data.len(), "{size:?} with strides {strides:?} within the slice");
        }
        Self { data, size, strides }
    }

    /// Rows and columns.
    pub(super) fn size(self) -> [usize; 2] {
        self.size
    }

    /// Whether the numbers of a row are side by side.
    pub(super) fn lies_by_rows(self) -> bool {
        self.strides[1] == 1
    }

    /// The rows of a matrix that lies row by row.
    pub(super) fn each_row(self) -> impl Iterator<Item = &'a [R]> {
        debug_assert_eq!(self.strides[1], 1);
        let [rows, columns] = self.size;
        (0..rows).map(move |i| &self.data[i * self.strides[0]..][..columns])
    }

    /// Rows become columns.
    pub(super) fn transposed(self) -> Self {
        let ([rows, columns], [down, right]) = (self.size, self.strides);
        Self { size: [columns, rows], strides: [right, down], ..self }
    }

    /// `count` rows from `first`.
    pub(super) fn rows(self, first: usize, count: usize) -> Self {
        assert!(first + count <= self.size[0], "rows within the matrix");
        Self { data: &self.data[first * self.strides[0]..], size: [count, self.size[1]], ..self }
    }

    /// `count` columns from `first`.
    pub(super) fn columns(self, first: usize, count: usize) -> Self {
        self.transposed().rows(first, count).transposed()
    }
}

/// Whether a product takes the place of what was there, or is added to it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Put {
    Instead,
    OnTop,
}

/// A matrix to fill, by its first number and the numbers from row to row.
struct Target<R> {
    first: *mut R,
    stride: usize,
}

/// `to = x y`, or `to += x y`.
/// # Safety
/// As many rows as `x` has, `stride` apart, and in each as many numbers as `y` has columns can be written
/// from `first` on, by nobody else meanwhile.
#[allow(unsafe_code)]
unsafe fn multiply<R: Real>(to: Target<R>, x: Matrix<'_, R>, y: Matrix<'_, R>, put: Put) {
    let ([m, k], [inner, n]) = (x.size, y.size);
    assert_eq!(k, inner, "columns of x are rows of y");
    let [x_strides, y_strides] = [x.strides, y.strides].map(|s| s.map(|s| s as isize));
    let (keep, before) = match put {
        Put::Instead => (false, R::ZERO),
        Put::OnTop => (true, R::ONE),
    };
    // SAFETY: a matrix's slice holds all of its rows and columns; the caller answers for the target.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            to.first,
            1,
            to.stride as isize,
            keep,
            x.data.as_ptr(),
            x_strides[1],
            x_strides[0],
            y.data.as_ptr(),
            y_strides[1],
            y_strides[0],
            before,
            R::ONE,
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
}

/// `to = x y`, or `to += x y`, on this thread.
/// # Panics
/// If sizes do not go together.
pub(super) fn product_here<R: Real>(to: &mut [R], x: Matrix<'_, R>, y: Matrix<'_, R>, put: Put) {
    assert_eq!(to.len(), x.size[0] * y.size[1], "rows of x times columns of y");
    let to = Target { first: to.as_mut_ptr(), stride: y.size[1] };
    // SAFETY: `to` has a row for every row of `x`, each as wide as `y`.
    #[allow(unsafe_code)]
    unsafe {
        multiply(to, x, y, put);
    }
}

/// A piece of a result: the place of its first number, and the product that it is.
struct Piece<'a, R> {
    row: usize,
    column: usize,
    x: Matrix<'a, R>,
    y: Matrix<'a, R>,
}

/// `[rows, columns]` of `count` pieces, each of which takes some `work` operations, on all threads; a bias is added to
/// every row.
/// # Panics
/// If sizes do not go together, or pieces do not fill the result.
fn of_pieces<'a, R: Real>(
    [rows, columns]: [usize; 2],
    bias: Option<&[R]>,
    [count, work]: [usize; 2],
    piece: impl Fn(usize) -> Piece<'a, R> + Send + Sync,
) -> Vec<R> {
    let put = if bias.is_some() { Put::OnTop } else { Put::Instead };
    let mut found = Fresh::<R>::new(rows * columns);
    let shared = found.shared();
    for_each(count, work, |n| {
        let Piece { row, column, x, y } = piece(n);
        let (height, width) = (x.size[0], y.size[1]);
        // SAFETY: there is a row for every row of `x`, each as wide as `y`; the pieces of the callers do not overlap.
        #[allow(unsafe_code)]
        unsafe {
            let first = shared.unwritten((row * columns + column, [height, columns, width]));
            if let Some(bias) = bias {
                let bias = bias[column..][..width].as_ptr();
                (0..height)
                    .for_each(|i| bias.copy_to_nonoverlapping(first.add(i * columns), width));
            }
            multiply(Target { first, stride: columns }, x, y, put);
        }
    });
    found.filled()
}

/// `x y`, and a bias added to every row, on all threads.
/// # Panics
/// If sizes do not go together.
pub(super) fn product<R: Real>(x: Matrix<'_, R>, y: Matrix<'_, R>, bias: Option<&[R]>) -> Vec<R> {
    let ([rows, terms], columns) = (x.size, y.size[1]);
    let pieces = [rows.div_ceil(PIECE[0]), columns.div_ceil(PIECE[1])];
    let work = PIECE[0].min(rows) * PIECE[1].min(columns) * terms / 8;
    of_pieces([rows, columns], bias, [pieces[0] * pieces[1], work], |n| {
        let (row, column) = (n / pieces[1] * PIECE[0], n % pieces[1] * PIECE[1]);
        let (height, width) = (PIECE[0].min(rows - row), PIECE[1].min(columns - column));
        Piece { row, column, x: x.rows(row, height), y: y.columns(column, width) }
    })
}

/// As [`product`], through a block-diagonal matrix: columns of `x` for each block in turn.
/// # Panics
/// If sizes do not go together, or blocks are of different sizes.
pub(super) fn product_by_blocks<R: Real>(
    x: Matrix<'_, R>,
    blocks: &[Matrix<'_, R>],
    bias: Option<&[R]>,
) -> Vec<R> {
    let Some(&Matrix { size: [from, to], .. }) = blocks.first() else { return vec![] };
    let [rows, columns] = [x.size[0], blocks.len() * to];
    assert_eq!(x.size[1], blocks.len() * from, "columns of x for every block");
    let count = blocks.len() * rows.div_ceil(ROWS);
    let work = ROWS.min(rows) * from * to / 8;
    of_pieces([rows, columns], bias, [count, work], |n| {
        let (row, block) = (n / blocks.len() * ROWS, n % blocks.len());
        let x = x.rows(row, ROWS.min(rows - row)).columns(block * from, from);
        Piece { row, column: block * to, x, y: blocks[block] }
    })
}

/// `x^T y`, where both have many rows: sums over slices of them, added up in order.
/// # Panics
/// If sizes do not go together.
pub(super) fn sum_of_products<R: Real>(x: Matrix<'_, R>, y: Matrix<'_, R>) -> Vec<R> {
    let ([rows, width], columns) = (x.size, y.size[1]);
    let slice = rows.div_ceil(SLICES).max(TERMS);
    let count = rows.div_ceil(slice);
    let (size, mut parts) = (width * columns, Fresh::<R>::new(count * width * columns));
    let shared = parts.shared();
    for_each(count, slice * size / 8, |i| {
        let height = slice.min(rows - i * slice);
        let (x, y) = (x.rows(i * slice, height), y.rows(i * slice, height));
        // SAFETY: every slice has a row of its own, as long as the product has numbers.
        #[allow(unsafe_code)]
        unsafe {
            let first = shared.unwritten((i * size, [1, size, size]));
            multiply(Target { first, stride: columns }, x.transposed(), y, Put::Instead);
        }
    });
    sum_of_rows(parts.filled(), [count, size])
}

/// The sum of `count` rows of `width` numbers, which `fill` finds, in order.
pub(super) fn sum_of_slices<R: Real>(
    count: usize,
    width: usize,
    work: usize,
    fill: impl Fn(usize, &mut [R]) + Send + Sync,
) -> Vec<R> {
    let mut parts = Fresh::new(count * width);
    let shared = parts.shared();
    for_each(count, work, |i| {
        // SAFETY: every slice has a row of its own.
        #[allow(unsafe_code)]
        let mut row = unsafe { shared.rows((i * width, [1, width, width])) };
        fill(i, row.at(0));
    });
    sum_of_rows(parts.filled(), [count, width])
}

/// The sum of `count` rows of `width` numbers, in order.
fn sum_of_rows<R: Real>(parts: Vec<R>, [count, width]: [usize; 2]) -> Vec<R> {
    if count == 1 {
        return parts;
    }
    let mut sum = vec![R::ZERO; width];
    let piece = 4096;
    let shared = Shared::new(&mut sum);
    for_each(width.div_ceil(piece), count * piece / 4, |i| {
        let (first, some) = (i * piece, piece.min(width - i * piece));
        // SAFETY: pieces do not overlap.
        #[allow(unsafe_code)]
        let mut row = unsafe { shared.rows((first, [1, some, some])) };
        for part in parts.chunks_exact(width) {
            super::real::add(row.at(0), &part[first..first + some]);
        }
    });
    sum
}
