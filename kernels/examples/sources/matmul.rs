//! Matrix products on tensor cores, where the target has them.

use crate::runtime::Recorder;
use crate::target::Target;
use cubecl::ir::{ElemType, FloatKind, StorageType};
use cubecl::prelude::*;
use linattn_kernels::matmul::{Layout, Product, matmul, supports};
use std::error::Error;

const F32: StorageType = StorageType::Scalar(ElemType::Float(FloatKind::F32));

/// Products of one type.
pub struct Products<'a, T: Target> {
    pub client: &'a ComputeClient<Recorder<T>>,
    pub dtype: StorageType,
}

impl<T: Target> Products<'_, T> {
    /// Launches all; `enter` is called after each.
    pub fn all(
        &self,
        mut enter: impl FnMut(&str) -> Result<(), Box<dyn Error>>,
    ) -> Result<(), Box<dyn Error>> {
        if !supports(self.client, self.dtype) {
            return Ok(());
        }
        // y = x W, dx = dy W^T and dW = x^T dy: many tiles, one column of them, few, and split-K.
        for (layout, along_k) in [("y", [true, false]), ("dx", [true, true]), ("dw", [false; 2])] {
            for [m, k, n] in
                [[16_384, 128, 8192], [65_536, 128, 128], [64, 128, 64], [128, 65_536, 704]]
            {
                for (name, output) in [("", self.dtype), ("-f32", F32)] {
                    let stride = |along_k: bool, outer: usize| if along_k { k } else { outer };
                    let lhs = Layout { stride: stride(along_k[0], m), along_k: along_k[0] };
                    let rhs = Layout { stride: stride(along_k[1], n), along_k: along_k[1] };
                    let product = Product { m, n, k, lhs, rhs, input: self.dtype, output };
                    let memory = |numbers: usize| self.client.empty(numbers * self.dtype.size());
                    matmul(self.client, &memory(m * k), &memory(k * n), product)?
                        .ok_or("an aligned product is taken")?;
                    enter(&format!("-{layout}-{m}x{k}x{n}{name}"))?;
                }
            }
        }
        Ok(())
    }
}
