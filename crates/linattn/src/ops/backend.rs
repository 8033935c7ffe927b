//! For authors of backends: the trait of a backend, whose default is tensor operations, and what its methods take
//! and give.

pub use super::folded::{FoldedInput, FoldedOutput, Matrices};
pub use super::fused::{
    Activation, Column, ColumnKind, ConvSplit, ConvStates, ConvStep, ConvStepOutputs,
    ConvolvedStep, ConvolvedStepOutputs, DiagonalTaps, Discretization, Embedding, GateActivation,
    GatedProduct, GatedValue, HeadNorm, LinearCrossEntropy, LinearLayer, LongConvolution, LstmCell,
    LstmRecurrence, MOST_PACKED, Measure, Normalization, Pack, Rotary, Seen, SelectiveScan,
    SoftmaxRows, Ttt,
};
pub use super::halving::{Scan, ScanField};
pub use super::pass::{BackwardPass, Pass};
pub use super::recurrence::{Dims, Forward, LogDecay, Recurrence, Saved, Transition};

use super::fused::{self, AdamW, AdamWStep, Clip, Moments};
use super::quantized::QuantizedMatrix;
use super::tensors::{primitive, tensor};
use super::{halving, reference};
use burn::tensor::backend::Backend;
use burn::tensor::ops::{FloatTensor, IntTensor};
use burn::tensor::{DType, Int, Shape, Tensor};

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

/// An operation that is composed of the methods of [`LinearAttentionBackend`], with a backward pass of its own.
pub trait Composite {
    /// Its outputs and, where it is to `keep` what that needs, its backward pass.
    fn run<B: LinearAttentionBackend>(self, inputs: Vec<FloatTensor<B>>, keep: bool) -> Pass<B>;
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

    /// Whether a linear layer's product takes a weight that lies transposed as it is.
    fn takes_transposed() -> bool {
        false
    }

    /// Whether it multiplies by quantized matrices.
    fn takes_quantized() -> bool {
        false
    }

    /// `x [W_1^T W_2^T .. U_1 ..]` over the last dimension of `x` for quantized `W_i` of the same bits and narrow `U_i`
    /// of floats, [`MOST_PACKED`] at most: None where this backend has no such product, or dequantising the
    /// matrices is as fast. No gradient flows through it.
    fn quantized_linear(
        _x: FloatTensor<Self>,
        _weights: &[&QuantizedMatrix<Self>],
        _floats: &[FloatTensor<Self>],
    ) -> Option<FloatTensor<Self>> {
        None
    }

    /// `x [W_1 W_2 ..]` with what comes before it folded in, for a few tokens: None where this backend has no such
    /// product for these tensors, or two operations are faster. No gradient flows through it.
    fn folded_product(
        _x: FoldedInput<FloatTensor<Self>>,
        _matrices: Matrices<'_, Self>,
    ) -> Option<FoldedOutput<FloatTensor<Self>>> {
        None
    }

    /// The place of the largest number of each row of `[M, N]`, `[M]`: None where this backend has no kernel for it.
    fn argmax_of_rows(_x: FloatTensor<Self>) -> Option<IntTensor<Self>> {
        None
    }

    /// A quantized matrix as floats, `[rows, columns]`.
    fn dequantized(matrix: &QuantizedMatrix<Self>, dtype: DType) -> FloatTensor<Self> {
        primitive(matrix.dequantized_by_host(dtype))
    }

    /// Rows of a quantized matrix by number, `[M]`, as floats, `[M, columns]`, in one piece; `None` where this backend has
    /// no such operation.
    fn dequantized_rows(
        _matrix: &QuantizedMatrix<Self>,
        _rows: IntTensor<Self>,
        _dtype: DType,
    ) -> Option<FloatTensor<Self>> {
        None
    }

    /// `x [W_1 W_2 ..]` over the last dimension of `x`, of at most [`MOST_PACKED`] matrices, which are read where
    /// they lie: None where this backend has no such product for these tensors, or `x` has so many rows that
    /// packing the matrices costs little. No gradient flows through it.
    fn side_by_side(
        _x: FloatTensor<Self>,
        _weights: &[FloatTensor<Self>],
    ) -> Option<FloatTensor<Self>> {
        None
    }

    /// The next states of convolutions in one piece, `[B, W - 1, C_i]` each: None where this backend has no such
    /// piece for these tensors. No gradient flows through it.
    fn conv_states(_x: &ConvStates<FloatTensor<Self>>) -> Option<Vec<FloatTensor<Self>>> {
        None
    }

    /// A single token's convolutions and their next states in one piece: None where this backend has no such piece for
    /// these tensors. No gradient flows through it.
    fn conv_step(_x: &ConvStep<FloatTensor<Self>>) -> Option<ConvStepOutputs<FloatTensor<Self>>> {
        None
    }

    /// As [`conv_step`](Self::conv_step), with the step of the recurrence behind it in the same piece.
    fn convolved_step(
        _x: &ConvolvedStep<FloatTensor<Self>>,
    ) -> Option<ConvolvedStepOutputs<FloatTensor<Self>>> {
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

    /// A block-diagonal linear layer: x is `[B, T, H from]`, its weight `[H, from, to]`, its bias `[H to]`, and what
    /// comes out `[B, T, H to]`.
    fn fused_block_linear(_x: LinearLayer<FloatTensor<Self>>, _keep: bool) -> Option<Pass<Self>> {
        None
    }

    /// Rows rotated by their positions. A backward pass gives the gradient of the rows alone.
    fn fused_rotary(_x: Rotary<FloatTensor<Self>>, _keep: bool) -> Option<Pass<Self>> {
        None
    }

    /// A convolution as long as its sequences. The gradient of its taps is of their type.
    fn fused_long_convolution(
        _x: LongConvolution<FloatTensor<Self>>,
        _keep: bool,
    ) -> Option<Pass<Self>> {
        None
    }

    /// The taps of a diagonal state-space model.
    fn fused_diagonal_taps(_x: DiagonalTaps<FloatTensor<Self>>, _keep: bool) -> Option<Pass<Self>> {
        None
    }

    /// The same numbers in another shape. Worth it where a backend copies what lies permuted faster than Burn.
    fn fused_reshape(_x: FloatTensor<Self>, _shape: Shape, _keep: bool) -> Option<Pass<Self>> {
        None
    }

    /// Softmax of rows of scores, causal where asked for.
    fn fused_softmax(_x: SoftmaxRows<FloatTensor<Self>>, _keep: bool) -> Option<Pass<Self>> {
        None
    }

    /// Mamba's recurrence: y and the state after the last token.
    fn fused_selective_scan(
        _x: SelectiveScan<FloatTensor<Self>>,
        _keep: bool,
    ) -> Option<Pass<Self>> {
        None
    }

    /// LSTM's or sLSTM's recurrence: h of every token, and c and, of sLSTM, n and m after the last. A gradient of m is 0.
    fn fused_lstm(_x: LstmRecurrence<FloatTensor<Self>>, _keep: bool) -> Option<Pass<Self>> {
        None
    }

    /// Test-time training: the output of every token, its query included, and each layer's weights after the last.
    fn fused_ttt(_x: Ttt<FloatTensor<Self>>, _keep: bool) -> Option<Pass<Self>> {
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

    /// Every h of a linear recurrence of vectors, `[B, T, C]`.
    fn linear_scan(x: Scan<FloatTensor<Self>>) -> FloatTensor<Self> {
        halving::forward::<Self>(x)
    }

    /// Outputs of an operation that is composed of the methods above. A backend that differentiates makes it a node of
    /// its graph; no other has a reason to write this method.
    fn composite(
        operation: impl Composite,
        inputs: Vec<FloatTensor<Self>>,
    ) -> Vec<FloatTensor<Self>> {
        operation.run::<Self>(inputs, false).outputs
    }

    /// The way taken on this device.
    fn path(_device: &Self::Device) -> Path {
        Path::TensorOps
    }
}

impl<B: LinearAttentionBackend> QuantizedMatrix<B> {
    /// The whole matrix as it was, but for rounding: `[rows, columns]`, in f32, f16 or bf16.
    pub fn dequantize(&self, dtype: DType) -> Tensor<B, 2> {
        tensor(B::dequantized(self, dtype))
    }

    /// These rows, `[M]` to `[M, columns]`, as [`dequantize`](Self::dequantize) gives them.
    pub fn dequantize_rows(&self, rows: Tensor<B, 1, Int>, dtype: DType) -> Tensor<B, 2> {
        match B::dequantized_rows(self, rows.clone().into_primitive(), dtype) {
            Some(floats) => tensor(floats),
            None => self.rows(rows).dequantize(dtype),
        }
    }
}
