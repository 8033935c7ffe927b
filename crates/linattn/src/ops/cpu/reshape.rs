//! Other shapes of the same numbers. What lies permuted is copied by runs, where Flex goes from number to number.

use super::tensors::contiguous;
use crate::ops::pass::{BackwardPass, Pass};
use burn::tensor::{Shape, TensorMetadata};
use burn_flex::{Flex, FlexTensor};

/// The numbers in another shape, in place where they lie so that this is possible.
pub(super) fn reshape(x: FlexTensor, shape: Shape, keep: bool) -> Pass<Flex> {
    let before = x.shape();
    let outputs = vec![reshaped(x, shape)];
    let backward = keep.then(|| -> BackwardPass<Flex> {
        Box::new(move |gradients, _| match gradients.into_iter().next().flatten() {
            Some(d) => vec![Some(reshaped(d, before))],
            None => vec![],
        })
    });
    Pass { outputs, backward }
}

fn reshaped(x: FlexTensor, shape: Shape) -> FlexTensor {
    match x.layout().reshape(shape.clone()) {
        Some(_) => x.reshape(shape),
        None => contiguous(x).reshape(shape),
    }
}
