//! The operations on Burn's CubeCL backends: as kernels, and as tensor operations where the kernels
//! refuse (f64; over whole sequences keys wider than 256, and values wider than 4096; products of more than 64 rows, or 128 of 16 bits on tensor cores).
//! fused.rs has the layers around a recurrence, linear.rs matrix products, block_linear.rs those of blocks.

mod block_linear;
mod conv_split;
mod diagonal_taps;
mod folded;
mod fused;
mod linear;
mod long_convolution;
mod lstm;
mod optimizer;
mod quantized;
mod rows;
mod selective_scan;
mod softmax;
mod ttt;

use super::backend::{FoldedInput, FoldedOutput, LinearAttentionBackend, Matrices, Path};
use super::fused::{
    AdamW, AdamWStep, Clip, ConvSplit, ConvStates, ConvStep, ConvStepOutputs, ConvolvedStep,
    ConvolvedStepOutputs, DiagonalTaps, Embedding, GatedProduct, LinearCrossEntropy, LinearLayer,
    LongConvolution, LstmRecurrence, Moments, Normalization, Pack, Rotary, SelectiveScan,
    SoftmaxRows, Ttt, norm_in_tensor_ops, step_in_tensor_ops,
};
use super::pass::Pass;
use super::quantized::QuantizedMatrix;
use super::recurrence::{Dims, Forward, Hidden, LogDecay, Read, Recurrence, Saved, Transition};
use super::reference;
use super::tensors::{Along, primitive, tensor};
use burn::tensor::ops::{FloatTensor, IntTensor};
use burn::tensor::{DType, FloatDType, Shape};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::ops::numeric::zeros_client;
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeRuntime, FloatElement, IntElement, element::BoolElement};
use cubecl::ir::{ElemType, FloatKind, StorageType};
use cubecl::prelude::ComputeClient;
use cubecl::server::Handle;
use linattn_kernels as kernels;
use linattn_kernels::step::Step;
use linattn_kernels::{Chunkwise, few_rows};
use std::sync::Arc;

impl<R, F, I, BT> LinearAttentionBackend for CubeBackend<R, F, I, BT>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    fn chunkwise(x: Recurrence<FloatTensor<Self>>, keep: bool) -> Forward<FloatTensor<Self>> {
        match chunkwise(&x) {
            Some(kernels) => Launcher::of(&x).forward(kernels, one_type::<Self>(x), keep),
            None => reference::forward::<Self>(x, keep),
        }
    }

    fn chunkwise_backward(
        x: Recurrence<FloatTensor<Self>>,
        saved: Saved<FloatTensor<Self>>,
        d_o: Option<FloatTensor<Self>>,
        d_state: Option<FloatTensor<Self>>,
    ) -> Recurrence<FloatTensor<Self>> {
        // The forward pass's own plan: without one, tensor operations saved these tensors.
        let hidden = saved.hidden.clone();
        let Some(kernels) = hidden.as_ref().and_then(Hidden::get::<Chunkwise<R>>) else {
            return reference::backward::<Self>(x, saved, d_o, d_state);
        };
        let (types, dims) = (x.as_ref().map(|x| x.dtype), x.dims());
        let saved = saved.tensors.into_iter().map(|saved| saved.handle).collect::<Vec<_>>();
        let d = Launcher::of(&x).backward(kernels, one_type::<Self>(x), &saved, [d_o, d_state]);
        let keys = |d: FloatTensor<Self>| match dims.key_heads == dims.heads {
            true => d,
            false => {
                let [batch, tokens, key_heads, key_width] = dims.keys_shape();
                let grouped = [batch, tokens, key_heads, dims.heads / key_heads, key_width];
                let sum = tensor::<Self, 4>(d).reshape(grouped).sum_along(3);
                primitive(sum.squeeze_dim::<4>(3))
            }
        };
        let d = Recurrence { q: keys(d.q), k: keys(d.k), ..d };
        // Gradients have the type of what they are the gradients of.
        d.zip(types).map(|(d, dtype)| burn_cubecl::kernel::cast(d, dtype))
    }

    fn path(_device: &Self::Device) -> Path {
        Path::Kernels
    }

    fn recurrent_step(x: Recurrence<FloatTensor<Self>>) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let dims = sizes(&x);
        match Step::new(&x.v.client, variant(&x), dims, x.v.dtype.into()) {
            Ok(kernel) => Launcher::of(&x).step(&kernel, one_type::<Self>(x)),
            Err(_) => reference::step::<Self>(x),
        }
    }

    fn fused_linear(l: LinearLayer<FloatTensor<Self>>, keep: bool) -> Option<Pass<Self>> {
        // A gradient wants more than the product of a few rows.
        let weight = std::slice::from_ref(&l.weight);
        // One matrix has nothing to be packed with, and many rows are faster by tiles.
        let few = l.x.meta.shape().num_elements() <= few_rows::MOST_ROWS * l.weight.meta.shape()[0];
        if !keep
            && few
            && let Some(y) = product_of_few_rows(&l.x, weight, l.bias.as_ref())
        {
            return Some(Pass::forward(vec![y]));
        }
        fused::linear_layer(l, keep).map(fused::CubePass::of)
    }

    /// Where tensor cores do not take the product, cubek's default reads the view as Burn's own product does.
    fn takes_transposed() -> bool {
        true
    }

    fn side_by_side(
        x: FloatTensor<Self>,
        weights: &[FloatTensor<Self>],
    ) -> Option<FloatTensor<Self>> {
        let wide = loads_are_wide(weights);
        wide.then(|| product_of_few_rows(&x, weights, None)).flatten()
    }

    fn takes_quantized() -> bool {
        true
    }

    fn quantized_linear(
        x: FloatTensor<Self>,
        weights: &[&QuantizedMatrix<Self>],
        floats: &[FloatTensor<Self>],
    ) -> Option<FloatTensor<Self>> {
        quantized::linear(x, weights, floats)
    }

    fn folded_product(
        x: FoldedInput<FloatTensor<Self>>,
        matrices: Matrices<'_, Self>,
    ) -> Option<FoldedOutput<FloatTensor<Self>>> {
        folded::product(x, matrices)
    }

    fn argmax_of_rows(x: FloatTensor<Self>) -> Option<IntTensor<Self>> {
        fused::argmax(x, I::dtype())
    }

    fn dequantized(matrix: &QuantizedMatrix<Self>, dtype: DType) -> FloatTensor<Self> {
        quantized::dequantize(matrix, dtype)
    }

    fn dequantized_rows(
        matrix: &QuantizedMatrix<Self>,
        rows: IntTensor<Self>,
        dtype: DType,
    ) -> Option<FloatTensor<Self>> {
        quantized::rows(matrix, rows, dtype)
    }

    fn conv_states(x: &ConvStates<FloatTensor<Self>>) -> Option<Vec<FloatTensor<Self>>> {
        conv_split::conv_states(x)
    }

    fn conv_step(x: &ConvStep<FloatTensor<Self>>) -> Option<ConvStepOutputs<FloatTensor<Self>>> {
        conv_split::conv_step(x)
    }

    fn convolved_step(
        x: &ConvolvedStep<FloatTensor<Self>>,
    ) -> Option<ConvolvedStepOutputs<FloatTensor<Self>>> {
        conv_split::convolved_step(x)
    }

    fn fused_conv_split(x: ConvSplit<FloatTensor<Self>>, keep: bool) -> Option<Pass<Self>> {
        conv_split::conv_split(x, keep).map(fused::CubePass::of)
    }

    fn fused_normalize(x: Normalization<FloatTensor<Self>>, keep: bool) -> Option<Pass<Self>> {
        fused::normalize(x, keep).map(fused::CubePass::of)
    }

    fn fused_gated_product(x: GatedProduct<FloatTensor<Self>>, keep: bool) -> Option<Pass<Self>> {
        fused::gated(x, keep).map(fused::CubePass::of)
    }

    fn fused_embedding(
        x: Embedding<FloatTensor<Self>, IntTensor<Self>>,
        keep: bool,
    ) -> Option<Pass<Self>> {
        fused::embedding(x, keep).map(fused::CubePass::of)
    }

    fn fused_block_linear(x: LinearLayer<FloatTensor<Self>>, keep: bool) -> Option<Pass<Self>> {
        block_linear::block_linear(x, keep).map(fused::CubePass::of)
    }

    fn fused_long_convolution(
        x: LongConvolution<FloatTensor<Self>>,
        keep: bool,
    ) -> Option<Pass<Self>> {
        long_convolution::long_convolution(x, keep).map(fused::CubePass::of)
    }

    fn fused_diagonal_taps(x: DiagonalTaps<FloatTensor<Self>>, keep: bool) -> Option<Pass<Self>> {
        diagonal_taps::diagonal_taps(x, keep).map(fused::CubePass::of)
    }

    fn fused_softmax(x: SoftmaxRows<FloatTensor<Self>>, keep: bool) -> Option<Pass<Self>> {
        softmax::softmax(x, keep).map(fused::CubePass::of)
    }

    fn fused_rotary(x: Rotary<FloatTensor<Self>>, keep: bool) -> Option<Pass<Self>> {
        fused::rotary(x, keep).map(fused::CubePass::of)
    }

    fn fused_selective_scan(x: SelectiveScan<FloatTensor<Self>>, keep: bool) -> Option<Pass<Self>> {
        selective_scan::selective_scan(x, keep).map(fused::CubePass::of)
    }

    fn fused_lstm(x: LstmRecurrence<FloatTensor<Self>>, keep: bool) -> Option<Pass<Self>> {
        lstm::lstm(x, keep).map(fused::CubePass::of)
    }

    fn fused_ttt(x: Ttt<FloatTensor<Self>>, keep: bool) -> Option<Pass<Self>> {
        ttt::ttt(x, keep).map(fused::CubePass::of)
    }

    fn fused_pack(x: Pack<FloatTensor<Self>>, keep: bool) -> Option<Pass<Self>> {
        fused::pack(x, keep).map(fused::CubePass::of)
    }

    fn fused_cross_entropy(
        x: LinearCrossEntropy<FloatTensor<Self>, IntTensor<Self>>,
        keep: bool,
    ) -> Option<Pass<Self>> {
        fused::cross_entropy(x, keep).map(fused::CubePass::of)
    }

    fn adamw_step(
        steps: Vec<AdamWStep<FloatTensor<Self>>>,
        adamw: AdamW,
        clip: Option<Clip<FloatTensor<Self>>>,
    ) -> Vec<(FloatTensor<Self>, Moments<FloatTensor<Self>>)> {
        optimizer::step(&steps, adamw, clip.as_ref())
            .unwrap_or_else(|| step_in_tensor_ops::<Self>(steps, adamw, clip))
    }

    fn global_norm(gradients: Vec<FloatTensor<Self>>) -> FloatTensor<Self> {
        optimizer::norm(&gradients).unwrap_or_else(|| norm_in_tensor_ops::<Self>(gradients))
    }
}

/// `x [W_1 W_2 ..] + b` by the kernel for a few rows; None where there are more, or types or memory are not as
/// the kernel takes them: matrices may be padded at the end of their rows, but not turned.
fn product_of_few_rows<R: CubeRuntime>(
    x: &CubeTensor<R>,
    weights: &[CubeTensor<R>],
    bias: Option<&CubeTensor<R>>,
) -> Option<CubeTensor<R>> {
    let (mut shape, dtype) = (x.meta.shape.clone(), x.dtype);
    let last = shape.num_dims() - 1;
    let float = matches!(dtype, DType::F32 | DType::F16 | DType::BF16);
    if !float || weights.iter().chain(bias).any(|tensor| tensor.dtype != dtype) {
        return None;
    }
    if weights.iter().any(|weight| weight.meta.shape()[0] != shape[last]) {
        return None;
    }
    let matrices = weights.iter().map(columns).collect::<Option<Vec<_>>>()?;
    let dims = few_rows::Dims { rows: shape[..last].iter().product(), inner: shape[last] };
    let (client, rows) = (&x.client, few_rows::Reading::Rows);
    let product = few_rows::Product::new(client, dims, rows, &matrices, dtype.into()).ok()?;
    let (x, bias) = (into_contiguous(x.clone()), bias.cloned().map(into_contiguous));
    let weights: Vec<_> = weights.iter().map(|weight| &weight.handle).collect();
    let bias = bias.as_ref().map(|bias| &bias.handle);
    let y = product.launch(&x.client, few_rows::Input::Rows(&x.handle), &weights, bias).y;
    shape[last] = matrices.iter().map(|matrix| matrix.count).sum();
    Some(CubeTensor::new_contiguous(x.client, x.device, shape, y.handle, dtype))
}

/// Columns of a matrix whose rows lie one after another.
fn columns<R: CubeRuntime>(weight: &CubeTensor<R>) -> Option<few_rows::Columns> {
    let (count, stride) = (weight.meta.shape[1], weight.meta.strides[0]);
    (weight.meta.strides[1] == 1 && stride >= count).then_some(few_rows::Columns { count, stride })
}

/// Least bytes of a matrix that are read at once. Narrower ones would slow the others down.
const LEAST_LOAD: usize = 8;

/// Whether matrices side by side are read in pieces that are wide enough.
fn loads_are_wide<R: CubeRuntime>(weights: &[CubeTensor<R>]) -> bool {
    weights.iter().all(|weight| {
        let width = LEAST_LOAD / weight.dtype.size();
        weight.meta.shape[1].is_multiple_of(width) && weight.meta.strides[0].is_multiple_of(width)
    })
}

/// Everything in one type, that of v, but for log decays, beta and states, which are f32.
fn one_type<B: LinearAttentionBackend>(
    x: Recurrence<FloatTensor<B>>,
) -> Recurrence<FloatTensor<B>> {
    let dtype = tensor::<B, 4>(x.v.clone()).dtype();
    let f32 = |x| B::float_cast(x, FloatDType::F32);
    let like_v = |x| primitive(tensor::<B, 4>(x).cast(dtype));
    Recurrence {
        q: like_v(x.q),
        k: like_v(x.k),
        v: x.v,
        decay: x.decay.map(|g| g.map(f32)),
        transition: match x.transition {
            Transition::Identity { read } => Transition::Identity { read },
            Transition::Delta { beta, erase, read } => {
                Transition::Delta { beta: f32(beta), erase: erase.map(like_v), read }
            }
            Transition::LowRank { a, b } => Transition::LowRank { a: like_v(a), b: like_v(b) },
        },
        state: x.state.map(f32),
        lengths: x.lengths,
    }
}

/// The kernels' name of a recurrence.
fn variant<T>(x: &Recurrence<T>) -> kernels::Variant {
    let of = |read| match read {
        Read::After => kernels::Read::After,
        Read::Before => kernels::Read::Before,
    };
    let (transition, read) = match &x.transition {
        Transition::Identity { read } => (kernels::Transition::Identity, of(*read)),
        Transition::Delta { erase, read, .. } => {
            (kernels::Transition::Delta { erase: erase.is_some() }, of(*read))
        }
        Transition::LowRank { .. } => (kernels::Transition::LowRank, kernels::Read::After),
    };
    let decay = match &x.decay {
        None => kernels::Decay::None,
        Some(LogDecay::Scalar(_)) => kernels::Decay::Scalar,
        Some(LogDecay::Vector(_)) => kernels::Decay::Vector,
    };
    kernels::Variant { decay, transition, read }
}

fn sizes<R: CubeRuntime>(x: &Recurrence<CubeTensor<R>>) -> kernels::Dims {
    let Dims { batch, tokens, key_heads, heads, key_width, value_width, .. } = x.dims();
    kernels::Dims { batch, tokens, key_heads, heads, key_width, value_width }
}

/// The kernels for whole sequences, if they take this.
fn chunkwise<R: CubeRuntime>(x: &Recurrence<CubeTensor<R>>) -> Option<Chunkwise<R>> {
    match x.v.dtype {
        DType::F32 | DType::F16 | DType::BF16 => {}
        _ => return None,
    }
    let (client, dtype) = (&x.v.client, x.v.dtype.into());
    let planned = match &x.lengths {
        Some(lengths) => {
            Chunkwise::varlen(client, variant(x), sizes(x), dtype, lengths.cu_seqlens())
        }
        None => Chunkwise::new(client, variant(x), sizes(x), dtype),
    };
    planned.ok()
}

fn handles<R: CubeRuntime>(x: Recurrence<CubeTensor<R>>) -> kernels::Inputs {
    let Recurrence { q, k, v, decay, transition, state, lengths: _ } =
        x.map(|x| into_contiguous(x).handle);
    let (a, b, beta) = match transition {
        Transition::Identity { .. } => (None, None, None),
        Transition::Delta { beta, erase, .. } => (erase, None, Some(beta)),
        Transition::LowRank { a, b } => (Some(a), Some(b), None),
    };
    kernels::Inputs { q, k, v, a, b, g: decay.map(LogDecay::into_inner), beta, state }
}

/// A device, and the type of rows there.
struct Launcher<R: CubeRuntime> {
    client: ComputeClient<R>,
    device: R::Device,
    dtype: DType,
}

impl<R: CubeRuntime> Launcher<R> {
    fn of(x: &Recurrence<CubeTensor<R>>) -> Self {
        let v = &x.v;
        Self { client: v.client.clone(), device: v.device.clone(), dtype: v.dtype }
    }

    fn tensor(&self, buffer: kernels::Buffer) -> CubeTensor<R> {
        let dtype = match buffer.dtype {
            StorageType::Scalar(ElemType::Float(FloatKind::F16)) => DType::F16,
            StorageType::Scalar(ElemType::Float(FloatKind::BF16)) => DType::BF16,
            _ => DType::F32,
        };
        let shape = Shape::from(buffer.shape);
        let (client, device) = (self.client.clone(), self.device.clone());
        CubeTensor::new_contiguous(client, device, shape, buffer.handle, dtype)
    }

    fn zeros(&self, shape: impl Into<Shape>, dtype: DType) -> CubeTensor<R> {
        zeros_client(self.client.clone(), self.device.clone(), shape.into(), dtype)
    }

    fn forward(
        &self,
        kernels: Chunkwise<R>,
        x: Recurrence<CubeTensor<R>>,
        keep: bool,
    ) -> Forward<CubeTensor<R>> {
        let done = kernels.forward(&handles(x), keep);
        let tensors: Vec<_> = done.saved.into_iter().map(|saved| self.tensor(saved)).collect();
        let (o, state) = (self.tensor(done.o), self.tensor(done.state));
        let hidden = keep.then(|| Hidden(Arc::new(kernels)));
        Forward { o, state, saved: Saved { tensors, hidden } }
    }

    fn step(
        &self,
        kernel: &Step<R>,
        mut x: Recurrence<CubeTensor<R>>,
    ) -> (CubeTensor<R>, CubeTensor<R>) {
        let shape = x.dims().state_shape();
        let state = x.state.take().unwrap_or_else(|| self.zeros(shape, DType::F32));
        let done = kernel.run(&handles(x), &into_contiguous(state).handle);
        (self.tensor(done.o), self.tensor(done.state))
    }

    /// Gradients in the kernels' types, those of q and k for each value head.
    fn backward(
        &self,
        kernels: &Chunkwise<R>,
        x: Recurrence<CubeTensor<R>>,
        saved: &[Handle],
        [d_o, d_state]: [Option<CubeTensor<R>>; 2],
    ) -> Recurrence<CubeTensor<R>> {
        let cast = |x: CubeTensor<R>, dtype| into_contiguous(burn_cubecl::kernel::cast(x, dtype));
        let d_o = match d_o {
            Some(d_o) => cast(d_o, self.dtype),
            None => into_contiguous(self.zeros(x.dims().values_shape(), self.dtype)),
        };
        let d_state = d_state.map(|d| cast(d, DType::F32).handle);
        let places = x.as_ref().map(|_| ());
        let x = handles(x);
        let (d_o, d_state) = (&d_o.handle, d_state.as_ref());
        let done = kernels.backward(kernels::Given { x: &x, saved, d_o, d_state });
        let tensor = |buffer: Option<kernels::Buffer>| {
            self.tensor(buffer.expect("a gradient of each tensor that there is"))
        };
        Recurrence {
            q: self.tensor(done.q),
            k: self.tensor(done.k),
            v: self.tensor(done.v),
            decay: places.decay.map(|decay| decay.map(|()| tensor(done.g))),
            transition: match places.transition {
                Transition::Identity { read } => Transition::Identity { read },
                Transition::Delta { erase, read, .. } => Transition::Delta {
                    beta: tensor(done.beta),
                    erase: erase.map(|()| tensor(done.a)),
                    read,
                },
                Transition::LowRank { .. } => {
                    Transition::LowRank { a: tensor(done.a), b: tensor(done.b) }
                }
            },
            state: places.state.map(|()| self.tensor(done.state)),
            lengths: places.lengths,
        }
    }
}
