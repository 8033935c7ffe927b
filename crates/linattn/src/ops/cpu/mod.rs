//! Loops for Burn's CPU backend, Flex: whole operations over slices, on all cores.
//!
//! Work is cut by its sizes and added up in a fixed order, so that results are the same to the bit on any
//! number of threads.

mod memory;
mod parallel;
mod real;
mod recurrence;
mod shared;
mod tensors;

use super::backend::{self, Forward, LinearAttentionBackend, Operands, Saved};
use super::recurrent;
use super::scan::{self, Scan};
use burn::tensor::ops::FloatTensor;
use burn_flex::{Flex, FlexTensor};

impl LinearAttentionBackend for Flex {
    fn chunkwise(x: Operands<FlexTensor>, chunk: usize, keep: bool) -> Forward<FlexTensor> {
        memory::forward(&x, keep).unwrap_or_else(|| backend::forward::<Self>(x, chunk, keep))
    }

    fn chunkwise_backward(
        x: Operands<FlexTensor>,
        saved: Saved<FlexTensor>,
        d_o: Option<FlexTensor>,
        d_state: Option<FlexTensor>,
        chunk: usize,
    ) -> Operands<FlexTensor> {
        memory::backward(&x, &saved, d_o.clone(), d_state.clone())
            .unwrap_or_else(|| backend::backward::<Self>(x, saved, d_o, d_state, chunk))
    }

    fn recurrent_step(x: Operands<FlexTensor>) -> (FlexTensor, FlexTensor) {
        match memory::forward(&x, false) {
            Some(Forward { o, state, .. }) => (o, state),
            None => recurrent::step::<Self>(x),
        }
    }

    fn linear_scan(x: Scan<FloatTensor<Self>>) -> FloatTensor<Self> {
        scan::on_cpu::<Self>(x)
    }
}
