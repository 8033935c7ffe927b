//! Tensors of an operation, as callers pass and get them.

use crate::buffer::Buffer;
use crate::refusal::Refusal;
use crate::variant::Variant;
use cubecl::server::Handle;

/// Tensors of an operation, contiguous. Rows are of one type; log decays, beta and states are f32.
#[derive(Debug, Clone)]
pub struct Inputs {
    /// Queries, `[B, T, Hk, K]`.
    pub q: Handle,
    /// Keys, `[B, T, Hk, K]`.
    pub k: Handle,
    /// Values, `[B, T, H, V]`.
    pub v: Handle,
    /// Erase rows of a delta rule, or a of a low rank transition: `[B, T, H, K]`.
    pub a: Option<Handle>,
    /// b of a low rank transition, `[B, T, H, K]`.
    pub b: Option<Handle>,
    /// Log decay, `[B, T, H]` or `[B, T, H, K]`.
    pub g: Option<Handle>,
    /// Share of the error to correct, `[B, T, H]`.
    pub beta: Option<Handle>,
    /// State before the first token, `[B, H, K, V]`; zeros if absent.
    pub state: Option<Handle>,
}

/// Results of a forward pass.
#[derive(Debug, Clone)]
pub struct Forward {
    /// Outputs, `[B, T, H, V]`.
    pub o: Buffer,
    /// State after the last token, `[B, H, K, V]`, f32.
    pub state: Buffer,
    /// For [`backward`](crate::backward), in its order; empty if nothing was to be kept.
    pub saved: Vec<Buffer>,
}

/// Tensors that a backward pass starts from.
#[derive(Debug, Clone, Copy)]
pub struct Given<'a> {
    /// The inputs of the forward pass.
    pub x: &'a Inputs,
    /// Memory of [`Forward::saved`].
    pub saved: &'a [Handle],
    /// Gradient of the outputs, `[B, T, H, V]`.
    pub d_o: &'a Handle,
    /// Gradient of the last state, `[B, H, K, V]`, f32; zeros if absent.
    pub d_state: Option<&'a Handle>,
}

/// Results of a backward pass. Rows are per value head: where heads share keys, those of q and k are
/// still to be added up.
#[derive(Debug, Clone)]
pub struct Backward {
    /// `[B, T, H, K]`.
    pub q: Buffer,
    /// `[B, T, H, K]`.
    pub k: Buffer,
    /// `[B, T, H, V]`.
    pub v: Buffer,
    /// `[B, T, H, K]`.
    pub a: Option<Buffer>,
    /// `[B, T, H, K]`.
    pub b: Option<Buffer>,
    /// As g of the inputs, f32.
    pub g: Option<Buffer>,
    /// `[B, T, H]`, f32.
    pub beta: Option<Buffer>,
    /// Of the state before the first token, `[B, H, K, V]`, f32.
    pub state: Buffer,
}

/// The tensors that the variant has are there, and no others.
pub(crate) fn check_tensors(variant: Variant, x: &Inputs) -> Result<(), Refusal> {
    let tensors = [
        ("a", x.a.is_some(), variant.own_a()),
        ("b", x.b.is_some(), variant.low_rank()),
        ("g", x.g.is_some(), variant.decay != crate::Decay::None),
        ("beta", x.beta.is_some(), variant.delta()),
    ];
    match tensors.into_iter().find(|(_, there, wanted)| there != wanted) {
        Some((name, _, wanted)) => Err(Refusal::Tensor { name, wanted }),
        None => Ok(()),
    }
}
