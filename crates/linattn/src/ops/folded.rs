//! A product of a token's rows with the operation before it folded in.

use super::backend::LinearAttentionBackend;
use super::fused::GateActivation;
use super::quantized::{QuantizedMatrix, WeightBits};
use super::tensors::{primitive, tensor};
use burn::tensor::ops::FloatTensor;
use burn::tensor::{Tensor, TensorMetadata, backend::Backend};

/// What the product reads in place of x, `[.., K]`.
#[derive(Debug, Clone)]
pub enum FoldedInput<T> {
    /// `f(gate) value`, from gates in the first K columns and values in the others: `[.., 2 K]`.
    Gated {
        /// Gates and values.
        both: T,
        /// f.
        activation: GateActivation,
    },
    /// An RMS norm of `x + addend`.
    Normalized {
        /// `[.., K]`.
        x: T,
        /// `[.., K]`, if there is one.
        addend: Option<T>,
        /// `[K]`.
        weight: T,
        /// Added to the mean of squares.
        epsilon: f64,
    },
    /// An RMS norm of each head of `o`, times an activated gate.
    Heads {
        /// `[.., K]`.
        o: T,
        /// `[.., K]`, if there is one.
        gate: Option<(GateActivation, T)>,
        /// `[K / heads]`.
        weight: T,
        /// Added to the mean of squares.
        epsilon: f64,
        /// How many there are.
        heads: usize,
    },
}

#[cfg(feature = "cubecl")]
impl<T> FoldedInput<T> {
    /// The same of other tensors.
    pub(crate) fn map<U>(self, mut f: impl FnMut(T) -> U) -> FoldedInput<U> {
        match self {
            Self::Gated { both, activation } => FoldedInput::Gated { both: f(both), activation },
            Self::Normalized { x, addend, weight, epsilon } => FoldedInput::Normalized {
                x: f(x),
                addend: addend.map(&mut f),
                weight: f(weight),
                epsilon,
            },
            Self::Heads { o, gate, weight, epsilon, heads } => FoldedInput::Heads {
                o: f(o),
                gate: gate.map(|(activation, gate)| (activation, f(gate))),
                weight: f(weight),
                epsilon,
                heads,
            },
        }
    }

    /// All tensors.
    pub(crate) fn tensors(&self) -> Vec<&T> {
        match self {
            Self::Gated { both, .. } => vec![both],
            Self::Normalized { x, addend, weight, .. } => {
                [Some(x), addend.as_ref(), Some(weight)].into_iter().flatten().collect()
            }
            Self::Heads { o, gate, weight, .. } => {
                let gate = gate.as_ref().map(|(_, gate)| gate);
                [Some(o), gate, Some(weight)].into_iter().flatten().collect()
            }
        }
    }
}

/// The matrices of a product, side by side.
pub enum Matrices<'a, B: Backend> {
    /// `[K, N_i]`.
    Floats(Vec<FloatTensor<B>>),
    /// Quantized ones, and narrow ones behind them.
    Quantized {
        /// `[N_i, K]`, of the same bits.
        matrices: Vec<&'a QuantizedMatrix<B>>,
        /// `[K, N_i]`.
        floats: Vec<FloatTensor<B>>,
    },
}

impl<'a, B: LinearAttentionBackend> Matrices<'a, B> {
    /// Matrices `[K, N_i]`.
    pub(crate) fn of_floats(matrices: impl Iterator<Item = Tensor<B, 2>>) -> Self {
        Self::Floats(matrices.map(primitive).collect())
    }

    /// Matrices `[N_i, K]`, and `[K, N_i]` behind them.
    pub(crate) fn of_quantized(
        matrices: Vec<&'a QuantizedMatrix<B>>,
        floats: impl Iterator<Item = Tensor<B, 2>>,
    ) -> Self {
        Self::Quantized { matrices, floats: floats.map(primitive).collect() }
    }
}

impl<B: Backend> Matrices<'_, B> {
    /// Panics where a matrix is not for rows of `inner` numbers, or bits differ.
    fn assert_fit(&self, inner: usize) {
        let (quantized, floats) = match self {
            Self::Floats(matrices) => (&[][..], matrices),
            Self::Quantized { matrices, floats } => (&matrices[..], floats),
        };
        let bits: Vec<WeightBits> = quantized.iter().map(|matrix| matrix.bits()).collect();
        assert!(bits.windows(2).all(|pair| pair[0] == pair[1]), "matrices have the same bits");
        let of_floats = floats.iter().map(|matrix| TensorMetadata::shape(matrix)[0]);
        let mut from = quantized.iter().map(|matrix| matrix.size()[1]).chain(of_floats);
        assert!(from.all(|from| from == inner), "x is as wide as each matrix");
    }
}

/// What a folded product gives.
#[derive(Debug, Clone)]
pub struct FoldedOutput<T> {
    /// `[.., N]`.
    pub y: T,
    /// `x + addend`, `[.., K]`, where something was added.
    pub sum: Option<T>,
}

/// `f(gate) value` times matrices side by side, gates and values being the halves of `both`, `[B, T, 2 K]`: `[B, T, N]`;
/// `None` where two operations are faster, or the backend has no such product.
/// # Panics
/// If `both` is not twice as wide as each matrix has rows.
pub(crate) fn gated_linear<B: LinearAttentionBackend>(
    both: Tensor<B, 3>,
    activation: GateActivation,
    matrices: Matrices<'_, B>,
) -> Option<Tensor<B, 3>> {
    let width = both.dims()[2];
    assert!(width.is_multiple_of(2), "a gate for each value");
    matrices.assert_fit(width / 2);
    let x = FoldedInput::Gated { both: primitive(both), activation };
    B::folded_product(x, matrices).map(|done| tensor(done.y))
}

/// `x + addend` through an RMS norm, times matrices side by side: `[B, T, N]`, and `x + addend`; `None` as for
/// [`gated_linear`].
/// # Panics
/// If `x` is not as wide as the norm's weight and each matrix, or not of the shape of `addend`.
pub(crate) fn normalized_linear<B: LinearAttentionBackend>(
    x: Tensor<B, 3>,
    addend: Option<Tensor<B, 3>>,
    (weight, epsilon): (Tensor<B, 1>, f64),
    matrices: Matrices<'_, B>,
) -> Option<(Tensor<B, 3>, Tensor<B, 3>)> {
    assert_eq!(weight.dims()[0], x.dims()[2], "x is as wide as its norm");
    assert!(addend.as_ref().is_none_or(|addend| addend.dims() == x.dims()), "both have one shape");
    matrices.assert_fit(x.dims()[2]);
    let alone = addend.is_none().then(|| x.clone());
    let input = FoldedInput::Normalized {
        x: primitive(x),
        addend: addend.map(primitive),
        weight: primitive(weight),
        epsilon,
    };
    let done = B::folded_product(input, matrices)?;
    let stream = done.sum.map(tensor).or(alone)?;
    Some((tensor(done.y), stream))
}

/// Each head of `o`, `[B, T, K]`, through an RMS norm, times an activated gate, times matrices side by side: `[B, T, N]`;
/// `None` as for [`gated_linear`].
/// # Panics
/// If heads do not divide K or are not as wide as the norm's weight, or `o` is not of the shape of the gate or not as
/// wide as each matrix has rows.
pub(crate) fn head_norm_linear<B: LinearAttentionBackend>(
    o: Tensor<B, 3>,
    heads: usize,
    gate: Option<(GateActivation, Tensor<B, 3>)>,
    (weight, epsilon): (Tensor<B, 1>, f64),
    matrices: Matrices<'_, B>,
) -> Option<Tensor<B, 3>> {
    let width = o.dims()[2];
    assert_eq!(heads * weight.dims()[0], width, "heads are as wide as their norm");
    assert!(
        gate.as_ref().is_none_or(|(_, gate)| gate.dims() == o.dims()),
        "a gate for each number"
    );
    matrices.assert_fit(width);
    let gate = gate.map(|(activation, gate)| (activation, primitive(gate)));
    let (o, weight) = (primitive(o), primitive(weight));
    let x = FoldedInput::Heads { o, gate, weight, epsilon, heads };
    B::folded_product(x, matrices).map(|done| tensor(done.y))
}
