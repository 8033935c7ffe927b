//! Norms, gated products and sums of columns.

use crate::runtime::Recorder;
use crate::target::Target;
use cubecl::ir::{ElemType, FloatKind, StorageType};
use cubecl::prelude::*;
use cubecl::server::Handle;
use linattn_kernels::fused::column_sums::column_sums;
use linattn_kernels::fused::gated_product::{self, GateActivation, GatedProduct, Operands};
use linattn_kernels::fused::norm::{self, Measure, Norm, Types};
use linattn_kernels::pointwise::Activation;
use std::error::Error;

const F32: StorageType = StorageType::Scalar(ElemType::Float(FloatKind::F32));
const ROWS: usize = 64;

/// Norms, gated products and sums of columns, launched on rows of one type.
pub struct Norms<'a, T: Target> {
    pub client: &'a ComputeClient<Recorder<T>>,
    pub dtype: StorageType,
}

/// Tensors of a norm that may not be there.
#[derive(Clone, Copy)]
struct Options {
    residual: bool,
    gate: Option<Activation>,
    biased: bool,
}

impl<T: Target> Norms<'_, T> {
    /// Launches all; `enter` is called after each.
    pub fn all(
        &self,
        mut enter: impl FnMut(&str) -> Result<(), Box<dyn Error>>,
    ) -> Result<(), Box<dyn Error>> {
        // A team within a plane, one of several planes, and vectors of one number.
        for width in [64, 2048, 37] {
            for measure in [Measure::RootMeanSquare, Measure::Length, Measure::Standard] {
                let biased = measure == Measure::Standard;
                for (residual, gate) in [(true, None), (false, Some(Activation::Silu))] {
                    self.norm(width, measure, Options { residual, gate, biased })?;
                    let gate = gate.map_or("none".into(), |gate| format!("{gate:?}"));
                    enter(&format!("-{width}-{measure:?}-residual_{residual}-gate_{gate}"))?;
                }
            }
        }
        for activation in GateActivation::ALL {
            self.gated_products(64, activation, &mut enter)?;
        }
        self.gated_products(37, GateActivation::Silu, &mut enter)?;
        for columns in [4, 37, 1536] {
            let (rows, x) = (65_536, self.memory(65_536 * columns));
            column_sums(self.client, &x, rows, columns, self.dtype, F32)?;
            enter(&format!("-{columns}"))?;
        }
        Ok(())
    }

    fn norm(&self, width: usize, measure: Measure, options: Options) -> Result<(), Box<dyn Error>> {
        let Options { residual, gate, biased } = options;
        let norm = Norm {
            rows: ROWS,
            width,
            measure,
            epsilon: 1e-5,
            factor: 1.0,
            activation: gate.unwrap_or(Activation::Identity),
        };
        let types = Types { x: self.dtype, residual: F32, y: self.dtype, weights: F32 };
        let wide = self.client.empty(ROWS * width * F32.size());
        let inputs = norm::Inputs {
            x: &wide,
            residual: residual.then_some(&wide),
            gate: gate.map(|_| &wide),
            weight: Some(&wide),
            bias: biased.then_some(&wide),
        };
        norm::forward(self.client, norm, types, inputs)?;
        let given = norm::Given {
            h: &wide,
            residual,
            gate: inputs.gate,
            weight: inputs.weight,
            bias: inputs.bias,
            d_y: &wide,
            d_h: residual.then_some(&wide),
        };
        norm::backward(self.client, norm, types, given)?;
        Ok(())
    }

    /// Gated products of every layout; `enter` is called after each.
    fn gated_products(
        &self,
        width: usize,
        activation: GateActivation,
        mut enter: impl FnMut(&str) -> Result<(), Box<dyn Error>>,
    ) -> Result<(), Box<dyn Error>> {
        let product = GatedProduct { rows: ROWS, width, activation, factor: 1.0 };
        let x = self.memory(2 * ROWS * width);
        let layouts = [
            ("packed", Operands::Packed(&x)),
            ("separate", Operands::Separate { gate: &x, value: &x }),
            ("alone", Operands::Alone(&x)),
        ];
        for (layout, operands) in layouts {
            gated_product::forward(self.client, product, operands, self.dtype)?;
            gated_product::backward(self.client, product, operands, &x, self.dtype)?;
            enter(&format!("-{activation:?}-{width}-{layout}"))?;
        }
        Ok(())
    }

    fn memory(&self, numbers: usize) -> Handle {
        self.client.empty(numbers * self.dtype.size())
    }
}
