//! The trait of a backend, and the default that every backend gets: tensor operations.

use super::autodiff::Pass;
use super::fused::{
    self, AdamW, AdamWStep, Clip, ConvSplit, Embedding, GatedProduct, LinearCrossEntropy,
    LinearLayer, Moments, Normalization, Pack,
};
use super::mesa::{self, Normal};
use super::recurrence::Recurrence;
use super::reference;
use super::scan::{self, Scan, Scanned};
use burn::tensor::backend::Backend;
use burn::tensor::ops::{FloatTensor, IntTensor};
#[cfg(feature = "fusion")]
use std::{
    any::Any,
    sync::{Arc, Mutex, PoisonError},
};

/// Saved tensors: those that the forward pass keeps for the backward pass. Which, and how they lie, is
/// the backend's own affair. Empty if nothing was to be kept.
#[derive(Debug, Clone)]
pub struct Saved<T> {
    /// The tensors.
    pub tensors: Vec<T>,
    /// Saved tensors of the backend inside a fused stream.
    #[cfg(feature = "fusion")]
    pub hidden: Option<Hidden>,
}

impl<T> Default for Saved<T> {
    fn default() -> Self {
        Self::from(vec![])
    }
}

impl<T> From<Vec<T>> for Saved<T> {
    fn from(tensors: Vec<T>) -> Self {
        Self {
            tensors,
            #[cfg(feature = "fusion")]
            hidden: None,
        }
    }
}

/// Something of a type that only the backend who kept it knows.
#[cfg(feature = "fusion")]
#[derive(Debug, Clone)]
pub struct Hidden(pub(super) Arc<dyn Any + Send + Sync>);

#[cfg(feature = "fusion")]
impl Hidden {
    /// Takes out what was put in, an `Arc<Mutex<Option<T>>>`.
    pub(super) fn take<T: Send + 'static>(&self) -> T {
        let slot = self.0.downcast_ref::<Mutex<Option<T>>>().expect("its own backend's");
        let mut slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
        slot.take().expect("the forward pass ran, and a backward pass runs once")
    }
}

/// Result of a forward pass.
#[derive(Debug, Clone)]
pub struct Forward<T> {
    /// Outputs, `[B, T, H, V]`.
    pub o: T,
    /// State after the last token, `[B, H, K, V]`.
    pub state: T,
    /// For the backward pass.
    pub saved: Saved<T>,
}

/// How a backend computes the operations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Path {
    /// Burn's own tensor operations, chunk by chunk.
    TensorOps,
    /// Kernels written for these operations.
    Kernels,
}

impl core::fmt::Display for Path {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(match self {
            Path::TensorOps => "tensor ops",
            Path::Kernels => "kernels",
        })
    }
}

/// A Burn backend that can run the operations of [`ops`](super). Callers have checked shapes;
/// implementations need not.
pub trait LinearAttentionBackend: Backend {
    /// Whole sequences. `keep` asks for what the backward pass needs.
    fn chunkwise(x: Recurrence<FloatTensor<Self>>, keep: bool) -> Forward<FloatTensor<Self>> {
        reference::forward::<Self>(x, keep)
    }

    /// Gradients of every tensor that is there, from those of `o` and the last state; `None` where
    /// that output was not used.
    fn chunkwise_backward(
        x: Recurrence<FloatTensor<Self>>,
        saved: Saved<FloatTensor<Self>>,
        d_o: Option<FloatTensor<Self>>,
        d_state: Option<FloatTensor<Self>>,
    ) -> Recurrence<FloatTensor<Self>> {
        reference::backward::<Self>(x, saved, d_o, d_state)
    }

    /// One token: T is 1. Gives `o` and the next state.
    fn recurrent_step(x: Recurrence<FloatTensor<Self>>) -> (FloatTensor<Self>, FloatTensor<Self>) {
        reference::step::<Self>(x)
    }

    /// Rows normalised in one piece: `y`, and the sum where there is a residual. As every method that
    /// begins with `fused`: None where this backend, or the device, has no such piece for these tensors,
    /// and a backward pass where `keep` asks for one.
    fn fused_normalize(_x: Normalization<FloatTensor<Self>>, _keep: bool) -> Option<Pass<Self>> {
        None
    }

    /// A packed projection made into the inputs of a recurrence: one output for each entry of `columns`.
    fn fused_conv_split(_x: ConvSplit<FloatTensor<Self>>, _keep: bool) -> Option<Pass<Self>> {
        None
    }

    /// A product with an activated gate.
    fn fused_gated_product(_x: GatedProduct<FloatTensor<Self>>, _keep: bool) -> Option<Pass<Self>> {
        None
    }

    /// A linear layer.
    fn fused_linear(_x: LinearLayer<FloatTensor<Self>>, _keep: bool) -> Option<Pass<Self>> {
        None
    }

    /// Rows of a table.
    fn fused_embedding(
        _x: Embedding<FloatTensor<Self>, IntTensor<Self>>,
        _keep: bool,
    ) -> Option<Pass<Self>> {
        None
    }

    /// The loss of a last product.
    fn fused_cross_entropy(
        _x: LinearCrossEntropy<FloatTensor<Self>, IntTensor<Self>>,
        _keep: bool,
    ) -> Option<Pass<Self>> {
        None
    }

    /// Matrices side by side.
    fn fused_pack(_x: Pack<FloatTensor<Self>>, _keep: bool) -> Option<Pass<Self>> {
        None
    }

    /// Parameters after one step of AdamW.
    fn adamw_step(
        steps: Vec<AdamWStep<FloatTensor<Self>>>,
        adamw: AdamW,
        clip: Option<Clip<FloatTensor<Self>>>,
    ) -> Vec<(FloatTensor<Self>, Moments<FloatTensor<Self>>)> {
        fused::step_in_tensor_ops::<Self>(steps, adamw, clip)
    }

    /// The root of the sum of all squares, `[1]`.
    fn global_norm(gradients: Vec<FloatTensor<Self>>) -> FloatTensor<Self> {
        fused::norm_in_tensor_ops::<Self>(gradients)
    }

    /// The solutions of `x`, `[B, T, H, K]`. No gradient flows through them.
    fn solve(x: Normal<FloatTensor<Self>>) -> FloatTensor<Self> {
        mesa::solve::<Self>(x)
    }

    /// `found`, which solves the equations whose residuals are `x.rows`. Its gradient flows to
    /// those residuals alone, and there it is the solution of `x` with the gradient for right-hand
    /// sides.
    fn implicit(found: FloatTensor<Self>, _x: Normal<FloatTensor<Self>>) -> FloatTensor<Self> {
        found
    }

    /// Every h of a linear recurrence of vectors, `[B, T, C]`.
    fn linear_scan(x: Scan<FloatTensor<Self>>) -> FloatTensor<Self> {
        scan::forward::<Self>(x)
    }

    /// Gradients of all three inputs of the scan, from that of its output.
    fn linear_scan_backward(
        x: Scanned<FloatTensor<Self>>,
        d_h: FloatTensor<Self>,
    ) -> Scan<FloatTensor<Self>> {
        scan::backward::<Self>(x, d_h)
    }

    /// The way taken on this device.
    fn path(_device: &Self::Device) -> Path {
        Path::TensorOps
    }
}
