//! Weights that go from one model to another, on another device.

use burn::module::{ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{Tensor, TensorData, backend::Backend};
use std::collections::VecDeque;

/// Weights of a model, first to last: taken from one by a visit, given to another by a map.
#[derive(Clone, Default)]
pub struct Weights(VecDeque<TensorData>);

impl<B: Backend> ModuleVisitor<B> for Weights {
    fn visit_float<const R: usize>(&mut self, param: &Param<Tensor<B, R>>) {
        self.0.push_back(param.val().into_data());
    }
}

impl<B: Backend> ModuleMapper<B> for Weights {
    fn map_float<const R: usize>(&mut self, param: Param<Tensor<B, R>>) -> Param<Tensor<B, R>> {
        let weight = self.0.pop_front().unwrap();
        let dtype = weight.dtype;
        param.map(|old| Tensor::from_data(weight, (&old.device(), dtype)).require_grad())
    }
}
