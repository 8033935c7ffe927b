//! Compile-time numbers of the kernels, and tensors that TTT-Linear's do not have.

use super::super::ttt_linear::{self, arguments as linear};
use crate::SOURCE;
use cubecl::prelude::*;

/// Rows whose sums a unit has at once: with more, kernels would get no faster, since a number of a row is read for each
/// product of two, and compile for longer.
const AT_ONCE: usize = 8;
/// Tiles `[b, F]` of a pass back, which it has beside those of TTT-Linear; forward has fewer.
const WIDE_TILES: usize = 7;

/// Compile-time values of the kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Form {
    /// Of rows of K numbers, with what is kept and given; a gradient of weights is never given there.
    pub(super) head: linear::Form,
    /// Of rows of F numbers, for as many units.
    pub(super) wide: linear::Form,
    /// Whether there are gradients of the last weights of each layer.
    pub(super) there: [bool; 2],
}

impl Form {
    /// For `units` units, a multiple of F, which is one of K.
    pub(super) fn new(of: ttt_linear::Dims, hidden: usize, units: usize) -> Self {
        let rows = |width: usize| linear::Form {
            source: SOURCE,
            width,
            rows: of.rows,
            parts: units / width,
            keep: false,
            given: [false; 2],
        };
        let (head, wide) = (rows(of.width), rows(hidden));
        Self { head, wide, there: [false; 2] }
    }

    /// Numbers of W1 over c1, and of W2 over c2.
    pub(super) fn weights(&self) -> [usize; 2] {
        let (inner, outer) = (self.head.width, self.wide.width);
        [(inner + 1) * outer, (outer + 1) * inner]
    }

    /// From K to F numbers, by W1 or by the transpose of W2.
    pub(super) fn widen(&self, way: Way) -> Product {
        Product { from: self.head, to: self.wide, way }
    }

    /// From F to K numbers, by W2 or by the transpose of W1.
    pub(super) fn narrow(&self, way: Way) -> Product {
        Product { from: self.wide, to: self.head, way }
    }

    /// Bytes of shared memory of a pass back.
    pub(super) fn bytes(&self) -> usize {
        let rows = self.head.rows;
        self.head.bytes() + 4 * (WIDE_TILES * self.wide.tile() + rows * rows)
    }
}

/// How a product takes a matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Way {
    /// As it is, with the bias behind it.
    Biased,
    /// As it is and without the bias, added to what is there.
    Added,
    /// Its transpose.
    Transposed,
    /// Its transpose, added to what is there.
    TransposedAdded,
}

/// Compile-time values of a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Product {
    /// Of the rows.
    pub(super) from: linear::Form,
    /// Of the result.
    pub(super) to: linear::Form,
    pub(super) way: Way,
}

impl Product {
    pub(super) fn transposed(&self) -> bool {
        matches!(self.way, Way::Transposed | Way::TransposedAdded)
    }

    pub(super) fn added(&self) -> bool {
        matches!(self.way, Way::Added | Way::TransposedAdded)
    }

    /// Numbers of a row that a unit sums over.
    pub(super) fn run(&self) -> usize {
        self.from.width.div_ceil(self.to.parts)
    }

    /// Rows whose sums a unit has at once.
    pub(super) fn at_once(&self) -> usize {
        self.to.rows.min(AT_ONCE)
    }

    /// Numbers of the matrix.
    pub(super) fn matrix(&self) -> usize {
        self.from.width * self.to.width
    }
}

/// Outputs of the second layer.
#[derive(CubeType, CubeLaunch)]
pub(super) struct LayerArrays {
    pub(super) weights: Array<f32>,
    pub(super) starts: Array<f32>,
}
