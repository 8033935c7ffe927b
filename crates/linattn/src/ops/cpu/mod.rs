//! Loops for Burn's CPU backend, Flex: whole operations over slices, on all cores.
//!
//! Work is cut by its sizes and added up in a fixed order, so that results are the same to the bit on any
//! number of threads.
// Counted loops over arrays are what becomes vector instructions.
#![allow(clippy::needless_range_loop)]

mod block_linear;
mod conv_split;
mod cross_entropy;
mod embedding;
mod gated_product;
mod linear;
mod lstm;
mod matrix_state;
mod normalize;
mod one_row;
mod optimizer;
mod pack;
mod parallel;
mod product;
mod quantized;
mod real;
mod recurrence;
mod reshape;
mod rotary;
mod selective_scan;
mod shared;
mod softmax;
mod tensors;
#[cfg(test)]
mod tests;

pub(crate) use parallel::one_of_threads;

use super::backend::LinearAttentionBackend;
use super::fused::{
    self, AdamW, AdamWStep, Clip, ConvSplit, Embedding, GatedProduct, LinearCrossEntropy,
    LinearLayer, LstmRecurrence, Moments, Normalization, Pack, Rotary, SelectiveScan, SoftmaxRows,
};
use super::halving::{self, Scan};
use super::pass::Pass;
use super::quantized::QuantizedMatrix;
use super::recurrence::{Forward, Recurrence, Saved};
use super::reference;
use burn::tensor::Shape;
use burn::tensor::ops::FloatTensor;
use burn_flex::{Flex, FlexTensor};

impl LinearAttentionBackend for Flex {
    fn chunkwise(x: Recurrence<FlexTensor>, keep: bool) -> Forward<FlexTensor> {
        matrix_state::forward(&x, keep).unwrap_or_else(|| reference::forward::<Self>(x, keep))
    }

    fn chunkwise_backward(
        x: Recurrence<FlexTensor>,
        saved: Saved<FlexTensor>,
        d_o: Option<FlexTensor>,
        d_state: Option<FlexTensor>,
    ) -> Recurrence<FlexTensor> {
        matrix_state::backward(&x, &saved, d_o.clone(), d_state.clone())
            .unwrap_or_else(|| reference::backward::<Self>(x, saved, d_o, d_state))
    }

    fn recurrent_step(x: Recurrence<FlexTensor>) -> (FlexTensor, FlexTensor) {
        match matrix_state::forward(&x, false) {
            Some(Forward { o, state, .. }) => (o, state),
            None => reference::step::<Self>(x),
        }
    }

    fn fused_normalize(x: Normalization<FlexTensor>, keep: bool) -> Option<Pass<Self>> {
        normalize::normalize(x, keep)
    }

    fn fused_conv_split(x: ConvSplit<FlexTensor>, keep: bool) -> Option<Pass<Self>> {
        conv_split::conv_split(x, keep)
    }

    fn fused_gated_product(x: GatedProduct<FlexTensor>, keep: bool) -> Option<Pass<Self>> {
        gated_product::gated_product(x, keep)
    }

    fn fused_rotary(x: Rotary<FlexTensor>, keep: bool) -> Option<Pass<Self>> {
        rotary::rotary(x, keep)
    }

    fn fused_reshape(x: FlexTensor, shape: Shape, keep: bool) -> Option<Pass<Self>> {
        Some(reshape::reshape(x, shape, keep))
    }

    fn fused_softmax(x: SoftmaxRows<FlexTensor>, keep: bool) -> Option<Pass<Self>> {
        softmax::softmax(x, keep)
    }

    fn fused_linear(x: LinearLayer<FlexTensor>, keep: bool) -> Option<Pass<Self>> {
        linear::linear(x, keep)
    }

    fn fused_block_linear(x: LinearLayer<FlexTensor>, keep: bool) -> Option<Pass<Self>> {
        block_linear::block_linear(x, keep)
    }

    fn takes_transposed() -> bool {
        true
    }

    fn takes_quantized() -> bool {
        true
    }

    fn quantized_linear(
        x: FlexTensor,
        weights: &[&QuantizedMatrix<Self>],
        floats: &[FlexTensor],
    ) -> Option<FlexTensor> {
        // Another product costs a processor nothing.
        floats.is_empty().then(|| quantized::linear(x, weights)).flatten()
    }

    fn fused_embedding(x: Embedding<FlexTensor, FlexTensor>, keep: bool) -> Option<Pass<Self>> {
        embedding::embedding(x, keep)
    }

    fn fused_cross_entropy(
        x: LinearCrossEntropy<FlexTensor, FlexTensor>,
        keep: bool,
    ) -> Option<Pass<Self>> {
        cross_entropy::cross_entropy(x, keep)
    }

    fn fused_selective_scan(x: SelectiveScan<FlexTensor>, keep: bool) -> Option<Pass<Self>> {
        selective_scan::selective_scan(x, keep)
    }

    fn fused_lstm(x: LstmRecurrence<FlexTensor>, keep: bool) -> Option<Pass<Self>> {
        lstm::lstm(x, keep)
    }

    fn fused_pack(x: Pack<FlexTensor>, keep: bool) -> Option<Pass<Self>> {
        pack::pack(x, keep)
    }

    fn adamw_step(
        steps: Vec<AdamWStep<FlexTensor>>,
        adamw: AdamW,
        clip: Option<Clip<FlexTensor>>,
    ) -> Vec<(FlexTensor, Moments<FlexTensor>)> {
        optimizer::adamw_step(&steps, adamw, clip.as_ref())
            .unwrap_or_else(|| fused::step_in_tensor_ops::<Self>(steps, adamw, clip))
    }

    fn global_norm(gradients: Vec<FlexTensor>) -> FlexTensor {
        optimizer::global_norm(&gradients)
            .unwrap_or_else(|| fused::norm_in_tensor_ops::<Self>(gradients))
    }

    fn linear_scan(x: Scan<FloatTensor<Self>>) -> FloatTensor<Self> {
        halving::on_cpu::<Self>(x)
    }
}
