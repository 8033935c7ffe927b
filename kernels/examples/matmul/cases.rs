//! Matrix products to time: shapes, layouts and types.

use cubecl::ir::{ElemType, FloatKind, StorageType};
use cubecl::zspace::{Shape, Strides};
use cubek::matmul::definition::MatmulGlobalElems;

/// One product, or a batch of them.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    pub batch: usize,
    pub m: usize,
    pub k: usize,
    pub n: usize,
    pub lhs_transposed: bool,
    pub rhs_transposed: bool,
}

impl Case {
    /// `y = x W`, `x: [rows, inputs]`, `W: [inputs, outputs]`.
    fn y(rows: usize, inputs: usize, outputs: usize) -> Self {
        let [m, k, n] = [rows, inputs, outputs];
        Self { batch: 1, m, k, n, lhs_transposed: false, rhs_transposed: false }
    }

    /// `dx = dy W^T`.
    fn d_x(rows: usize, inputs: usize, outputs: usize) -> Self {
        Self { rhs_transposed: true, ..Self::y(rows, outputs, inputs) }
    }

    /// `dW = x^T dy` with split-K: one product for each of `slices` slices of the rows.
    fn d_w(rows: usize, inputs: usize, outputs: usize, slices: usize) -> Self {
        Self { batch: slices, lhs_transposed: true, ..Self::y(inputs, rows / slices, outputs) }
    }

    pub fn name(&self) -> String {
        let Self { batch, m, k, n, .. } = self;
        let side = |transposed| if transposed { "t" } else { "n" };
        let batch = if *batch > 1 { format!("b{batch}") } else { String::new() };
        format!("{m}x{k}x{n}{batch},{}{}", side(self.lhs_transposed), side(self.rhs_transposed))
    }

    /// Numbers in both sides and the output.
    pub fn lens(&self) -> [usize; 3] {
        [self.m * self.k, self.k * self.n, self.m * self.n].map(|len| len * self.batch)
    }

    pub fn flops(&self) -> f64 {
        2.0 * (self.batch * self.m) as f64 * (self.k * self.n) as f64
    }

    /// Shape and strides of `[rows, columns]`, with the batch in front where there is one.
    pub fn view(&self, rows: usize, columns: usize, transposed: bool) -> (Shape, Strides) {
        let inner = if transposed { [1, rows] } else { [columns, 1] };
        let (mut shape, mut strides) = (vec![rows, columns], inner.to_vec());
        if self.batch > 1 {
            shape.insert(0, self.batch);
            strides.insert(0, rows * columns);
        }
        (shape.into(), Strides::new(&strides))
    }
}

/// The cases, most valuable first: a table for a small model, then wide layers, then split-K's other settings.
pub fn cases() -> Vec<Case> {
    let layer = |rows, inputs, outputs, slices| {
        let sides = [Case::y(rows, inputs, outputs), Case::d_x(rows, inputs, outputs)];
        sides.into_iter().chain([Case::d_w(rows, inputs, outputs, slices)])
    };
    let more = |rows, inputs, outputs, slices: &'static [usize]| {
        slices.iter().map(move |slices| Case::d_w(rows, inputs, outputs, *slices))
    };
    let mut all: Vec<Case> = Vec::new();
    all.extend(layer(65_536, 128, 516, 64));
    all.extend(layer(65_536, 128, 704, 32));
    all.extend(layer(65_536, 352, 128, 64));
    all.extend(layer(16_384, 128, 8192, 2));
    all.extend(layer(16_384, 2048, 2048, 1));
    all.extend(layer(16_384, 2048, 8192, 1));
    all.extend(more(16_384, 128, 8192, &[1, 4, 8]));
    all.extend(layer(16_384, 128, 516, 32));
    all.extend(layer(16_384, 128, 704, 32));
    all.extend(layer(2048, 64, 270, 32));
    all.extend(more(2048, 64, 270, &[1, 4, 16, 64, 128]));
    all.extend(more(65_536, 128, 516, &[16, 32, 128]));
    all
}

/// Types of a product's numbers.
#[derive(Debug, Clone, Copy)]
pub struct Types {
    pub name: &'static str,
    /// Of both sides, in memory.
    pub input: FloatKind,
    /// Of the output, in memory.
    pub output: FloatKind,
    /// Type of the inputs in forced blueprints: they convert nothing, and tensor cores read f32 as TF32.
    pub forced: FloatKind,
    /// No tensor cores.
    pub exact: bool,
}

const BF16: Types = Types {
    name: "bf16",
    input: FloatKind::BF16,
    output: FloatKind::BF16,
    forced: FloatKind::BF16,
    exact: false,
};
const BF16_F32: Types = Types { name: "bf16-f32", output: FloatKind::F32, ..BF16 };
const TF32: Types = Types {
    name: "tf32",
    input: FloatKind::F32,
    output: FloatKind::F32,
    forced: FloatKind::TF32,
    exact: false,
};
const F32: Types = Types { name: "f32", forced: FloatKind::F32, exact: true, ..TF32 };

impl Types {
    /// Gradients of weights are summed up in f32, so split-K writes f32.
    pub fn of(case: &Case) -> Vec<Self> {
        match case.batch > 1 {
            true => vec![BF16_F32, TF32, F32],
            false => vec![BF16, TF32, BF16_F32, F32],
        }
    }
}

/// The type in cubek's words.
pub fn storage(kind: FloatKind) -> StorageType {
    StorageType::Scalar(ElemType::Float(kind))
}

/// Types in memory.
pub fn globals(input: FloatKind, output: FloatKind) -> MatmulGlobalElems {
    let [input, output] = [input, output].map(storage);
    MatmulGlobalElems { lhs: input, rhs: input, out: output }
}
