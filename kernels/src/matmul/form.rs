//! Compile-time form of a product.

/// How a product is shared out over cubes and planes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tiling {
    /// Rows of y of a cube.
    pub m: usize,
    /// Columns of y of a cube.
    pub n: usize,
    /// Numbers along K of a stage.
    pub k: usize,
    /// Planes of a cube, one below another and side by side.
    pub planes: [usize; 2],
    /// Stages in shared memory.
    pub stages: usize,
}

impl Tiling {
    /// `k` counts bytes, so that one tiling serves every type.
    pub(super) const fn new(
        [m, n]: [usize; 2],
        k: usize,
        planes: [usize; 2],
        stages: usize,
    ) -> Self {
        Self { m, n, k, planes, stages }
    }
}

/// Compile-time values of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Form {
    pub(super) source: &'static str,
    pub(super) tiling: Tiling,
    pub(super) lhs_along_k: bool,
    pub(super) rhs_along_k: bool,
    /// Inputs have 16 bits.
    pub(super) half: bool,
    /// Outputs have 16 bits.
    pub(super) narrow_out: bool,
}

/// One stage of one side in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Side {
    pub(super) along_k: bool,
    /// Stored rows, and numbers of each.
    pub(super) rows: usize,
    pub(super) columns: usize,
    /// Numbers from one stored row to the next.
    pub(super) stride: usize,
    /// Numbers of a copy.
    pub(super) piece: usize,
    /// Units of the cube.
    pub(super) units: usize,
}

impl Side {
    pub(super) fn new(form: &Form, outer: usize, along_k: bool) -> Self {
        let (k, piece) = (form.tiling.k, if form.half { 8 } else { 4 });
        let (rows, columns) = if along_k { (outer, k) } else { (k, outer) };
        // Rows of `ldmatrix` fall on banks of their own 16 bytes further each. Single loads of a lane are at
        // (lane / 4, lane % 4): 4 g + t along K, 8 t + g across.
        let padding = if form.half || !along_k { 8 } else { 4 };
        Self { along_k, rows, columns, stride: columns + padding, piece, units: form.units() }
    }

    /// Numbers of a stage.
    pub(super) fn numbers(&self) -> usize {
        self.rows * self.stride
    }

    /// Numbers from a place to one `outer` rows of a (columns of b) and `k` further.
    pub(super) fn offset(&self, outer: usize, k: usize) -> usize {
        if self.along_k { outer * self.stride + k } else { k * self.stride + outer }
    }
}

impl Form {
    pub(super) fn units(&self) -> usize {
        32 * self.tiling.planes[0] * self.tiling.planes[1]
    }

    pub(super) fn lhs_side(&self) -> Side {
        Side::new(self, self.tiling.m, self.lhs_along_k)
    }

    pub(super) fn rhs_side(&self) -> Side {
        Side::new(self, self.tiling.n, self.rhs_along_k)
    }

    /// Rows of y of a plane.
    pub(super) fn plane_rows(&self) -> usize {
        self.tiling.m / self.tiling.planes[0]
    }

    /// Columns of y of a plane.
    pub(super) fn plane_columns(&self) -> usize {
        self.tiling.n / self.tiling.planes[1]
    }

    /// 16 x 8 products of a plane.
    pub(super) fn fragments(&self) -> usize {
        self.plane_rows() / 16 * (self.plane_columns() / 8)
    }

    /// Numbers of a and of b in shared memory, all stages: what the kernel allocates.
    pub(super) fn staged_numbers(&self) -> [usize; 2] {
        [self.lhs_side(), self.rhs_side()].map(|side| self.tiling.stages * side.numbers())
    }

    /// Bytes of shared memory.
    pub(super) fn shared_memory(&self) -> usize {
        self.staged_numbers().iter().sum::<usize>() * if self.half { 2 } else { 4 }
    }
}
