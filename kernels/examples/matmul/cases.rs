//! Products to time: shapes, layouts and types.

use cubecl::ir::{ElemType, FloatKind, StorageType};
use cubecl::zspace::{Shape, Strides};
use linattn_kernels::matmul::{Layout, Product};

/// One product.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    pub m: usize,
    pub k: usize,
    pub n: usize,
    pub lhs_transposed: bool,
    pub rhs_transposed: bool,
}

impl Case {
    /// `y = x W`, `x: [rows, inputs]`, `W: [inputs, outputs]`.
    fn y(rows: usize, inputs: usize, outputs: usize) -> Self {
        Self { m: rows, k: inputs, n: outputs, lhs_transposed: false, rhs_transposed: false }
    }

    /// `dx = dy W^T`.
    fn d_x(rows: usize, inputs: usize, outputs: usize) -> Self {
        Self { rhs_transposed: true, ..Self::y(rows, outputs, inputs) }
    }

    /// `dW = x^T dy`.
    fn d_w(rows: usize, inputs: usize, outputs: usize) -> Self {
        Self { lhs_transposed: true, ..Self::y(inputs, rows, outputs) }
    }

    pub fn name(&self) -> String {
        let Self { m, k, n, .. } = self;
        let side = |transposed| if transposed { "t" } else { "n" };
        format!("{m}x{k}x{n},{}{}", side(self.lhs_transposed), side(self.rhs_transposed))
    }

    /// Numbers in both sides and the output.
    pub fn lens(&self) -> [usize; 3] {
        [self.m * self.k, self.k * self.n, self.m * self.n]
    }

    pub fn flops(&self) -> f64 {
        2.0 * self.m as f64 * (self.k * self.n) as f64
    }

    /// Shape and strides of `[rows, columns]`.
    pub fn view(rows: usize, columns: usize, transposed: bool) -> (Shape, Strides) {
        let strides = if transposed { [1, rows] } else { [columns, 1] };
        (vec![rows, columns].into(), Strides::new(&strides))
    }

    /// The case in the library's words.
    pub fn product(&self, types: &Types) -> Product {
        let Self { m, k, n, .. } = *self;
        let lhs = Layout {
            stride: if self.lhs_transposed { m } else { k },
            along_k: !self.lhs_transposed,
        };
        let rhs = Layout {
            stride: if self.rhs_transposed { k } else { n },
            along_k: self.rhs_transposed,
        };
        let [input, output] = [types.input, types.output].map(storage);
        Product { m, n, k, lhs, rhs, input, output }
    }
}

/// The cases, most valuable first: small models, wide layers, the main job's.
pub fn cases() -> Vec<Case> {
    let layer = |rows, inputs, outputs| {
        [
            Case::y(rows, inputs, outputs),
            Case::d_x(rows, inputs, outputs),
            Case::d_w(rows, inputs, outputs),
        ]
    };
    let layers = [
        (16_384, 128, 8192),
        (65_536, 128, 520),
        (65_536, 128, 704),
        (65_536, 352, 128),
        (65_536, 128, 128),
        (16_384, 2048, 2048),
        (16_384, 2048, 6160),
        (16_384, 2048, 8192),
        (16_384, 128, 520),
        (16_384, 128, 704),
        (16_384, 128, 128),
        (16_384, 352, 128),
        (2048, 64, 272),
    ];
    layers.into_iter().flat_map(|(rows, inputs, outputs)| layer(rows, inputs, outputs)).collect()
}

/// Types of a product's numbers.
#[derive(Debug, Clone, Copy)]
pub struct Types {
    pub name: &'static str,
    /// Of both sides.
    pub input: FloatKind,
    pub output: FloatKind,
}

impl Types {
    pub const ALL: [Self; 3] = [
        Self { name: "bf16", input: FloatKind::BF16, output: FloatKind::BF16 },
        Self { name: "bf16-f32", input: FloatKind::BF16, output: FloatKind::F32 },
        Self { name: "tf32", input: FloatKind::F32, output: FloatKind::F32 },
    ];
}

/// The type in CubeCL's words.
pub fn storage(kind: FloatKind) -> StorageType {
    StorageType::Scalar(ElemType::Float(kind))
}
