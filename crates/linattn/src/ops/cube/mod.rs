//! The operations on Burn's CubeCL backends: as kernels, and as tensor operations where the kernels
//! refuse (f64; over whole sequences keys and values wider than 256; products of more than 64 rows).
//! fused.rs has the layers around a recurrence, linear.rs matrix products.

mod fused;
mod linear;
mod optimizer;
mod rows;

use super::autodiff::Pass;
use super::backend::{Forward, LinearAttentionBackend, Path, Saved};
use super::fused::{
    AdamW, AdamWStep, Clip, ConvSplit, Embedding, GatedProduct, LinearCrossEntropy, LinearLayer,
    Moments, Normalization, Pack, norm_in_tensor_ops, step_in_tensor_ops,
};
use super::recurrence::{Dims, LogDecay, Read, Recurrence, Transition};
use super::reference;
use super::tensors::{primitive, tensor};
use burn::tensor::ops::{FloatTensor, IntTensor};
use burn::tensor::{DType, FloatDType, Shape};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::ops::numeric::zeros_client;
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeRuntime, FloatElement, IntElement, element::BoolElement};
use cubecl::ir::{ElemType, FloatKind, StorageType};
use linattn_kernels as kernels;
use linattn_kernels::few_rows;

impl<R, F, I, BT> LinearAttentionBackend for CubeBackend<R, F, I, BT>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    fn chunkwise(x: Recurrence<FloatTensor<Self>>, keep: bool) -> Forward<FloatTensor<Self>> {
        let call = Call::new(&x);
        match call.runs(&x) {
            true => call.forward(one_type::<Self>(x), keep),
            false => reference::forward::<Self>(x, keep),
        }
    }

    fn chunkwise_backward(
        x: Recurrence<FloatTensor<Self>>,
        saved: Saved<FloatTensor<Self>>,
        d_o: Option<FloatTensor<Self>>,
        d_state: Option<FloatTensor<Self>>,
    ) -> Recurrence<FloatTensor<Self>> {
        let call = Call::new(&x);
        if !call.runs(&x) {
            return reference::backward::<Self>(x, saved, d_o, d_state);
        }
        let types = x.as_ref().map(|x| x.dtype);
        let dims = x.dims();
        let d = call.backward(one_type::<Self>(x), saved, d_o, d_state);
        let keys = |d: FloatTensor<Self>| match dims.key_heads == dims.heads {
            true => d,
            false => {
                let [batch, tokens, key_heads, key_width] = dims.keys_shape();
                let grouped = [batch, tokens, key_heads, dims.heads / key_heads, key_width];
                let sum = tensor::<Self, 4>(d).reshape(grouped).sum_dim(3);
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
        let call = Call::new(&x);
        match call.steps() {
            true => call.step(one_type::<Self>(x)),
            false => reference::step::<Self>(x),
        }
    }

    fn fused_linear(l: LinearLayer<FloatTensor<Self>>, keep: bool) -> Option<Pass<Self>> {
        // A gradient wants more than the product of a few rows.
        if !keep && let Some(y) = linear_of_few_rows(&l) {
            return Some(Pass::forward(vec![y]));
        }
        fused::linear_layer(l, keep).map(fused::CubePass::of)
    }

    fn fused_conv_split(x: ConvSplit<FloatTensor<Self>>, keep: bool) -> Option<Pass<Self>> {
        fused::conv_split(x, keep).map(fused::CubePass::of)
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

/// `x W + b` by the kernel for a few rows; None where there are more, or types or memory are not as the
/// kernel takes them: W may be padded at the end of its rows, but not turned.
fn linear_of_few_rows<R: CubeRuntime>(l: &LinearLayer<CubeTensor<R>>) -> Option<CubeTensor<R>> {
    let LinearLayer { x, weight, bias } = l;
    let bias = bias.as_ref();
    let (mut shape, dtype) = (x.meta.shape.clone(), x.dtype);
    let last = shape.num_dims() - 1;
    let (inner, columns) = (weight.meta.shape[0], weight.meta.shape[1]);
    let (stride, step) = (weight.meta.strides[0], weight.meta.strides[1]);
    let float = matches!(dtype, DType::F32 | DType::F16 | DType::BF16);
    let alike = weight.dtype == dtype && bias.is_none_or(|bias| bias.dtype == dtype);
    if !float || !alike || step != 1 || stride < columns {
        return None;
    }
    let rows = shape[..last].iter().product();
    let dims = few_rows::Dims { rows, inner, columns, stride };
    few_rows::check(&x.client, dims, dtype.into()).ok()?;
    let (x, bias) = (into_contiguous(x.clone()), bias.cloned().map(into_contiguous));
    let args = few_rows::Args {
        x: &x.handle,
        weight: &weight.handle,
        bias: bias.as_ref().map(|bias| &bias.handle),
    };
    let y = few_rows::product(&x.client, dims, dtype.into(), args).expect("`check` was asked");
    shape[last] = columns;
    Some(CubeTensor::new_contiguous(x.client, x.device, shape, y.handle, dtype))
}

/// Everything in one type, that of v, but for gates and states, which are f32.
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

/// One call of the kernels.
struct Call<R: CubeRuntime> {
    client: cubecl::client::ComputeClient<R>,
    device: R::Device,
    dims: kernels::Dims,
    variant: kernels::Variant,
    dtype: DType,
}

impl<R: CubeRuntime> Call<R> {
    fn new(x: &Recurrence<CubeTensor<R>>) -> Self {
        let Dims { batch, tokens, key_heads, heads, key_width, value_width } = x.dims();
        Self {
            client: x.v.client.clone(),
            device: x.v.device.clone(),
            dims: kernels::Dims { batch, tokens, key_heads, heads, key_width, value_width },
            variant: variant(x),
            dtype: x.v.dtype,
        }
    }

    /// Whether the chunked kernels take this.
    fn runs(&self, x: &Recurrence<CubeTensor<R>>) -> bool {
        let float = matches!(x.v.dtype, DType::F32 | DType::F16 | DType::BF16);
        let dtype = self.dtype.into();
        float && kernels::engine(&self.client, self.variant, self.dims, dtype).is_ok()
    }

    /// Whether the kernel for one token takes this.
    fn steps(&self) -> bool {
        kernels::step::check(&self.client, self.dims, self.dtype.into()).is_ok()
    }

    fn inputs(x: Recurrence<CubeTensor<R>>) -> kernels::Inputs {
        let handle = |x| into_contiguous(x).handle;
        let Recurrence { q, k, v, decay, transition, state } = x.map(handle);
        let (a, b, beta) = match transition {
            Transition::Identity { .. } => (None, None, None),
            Transition::Delta { beta, erase, .. } => (erase, None, Some(beta)),
            Transition::LowRank { a, b } => (Some(a), Some(b), None),
        };
        kernels::Inputs { q, k, v, a, b, g: decay.map(LogDecay::into_inner), beta, state }
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

    fn forward(&self, x: Recurrence<CubeTensor<R>>, keep: bool) -> Forward<CubeTensor<R>> {
        let (variant, dims) = (self.variant, self.dims);
        let dtype = self.dtype.into();
        let done = kernels::forward(&self.client, variant, dims, dtype, &Self::inputs(x), keep)
            .expect("`runs` was asked");
        let tensors: Vec<_> = done.saved.into_iter().map(|saved| self.tensor(saved)).collect();
        let (o, state) = (self.tensor(done.o), self.tensor(done.state));
        Forward { o, state, saved: Saved::from(tensors) }
    }

    fn step(&self, x: Recurrence<CubeTensor<R>>) -> (CubeTensor<R>, CubeTensor<R>) {
        let kernels::Dims { batch, heads, key_width, value_width, .. } = self.dims;
        let state = x.state.unwrap_or_else(|| {
            let shape = Shape::from([batch, heads, key_width, value_width]);
            zeros_client(self.client.clone(), self.device.clone(), shape, DType::F32)
        });
        let x = Self::inputs(Recurrence { state: Some(state), ..x });
        let (variant, dims) = (self.variant, self.dims);
        let done = kernels::step::launch(&self.client, variant, dims, self.dtype.into(), &x)
            .expect("`steps` was asked");
        (self.tensor(done.o), self.tensor(done.state))
    }

    fn backward(
        &self,
        x: Recurrence<CubeTensor<R>>,
        saved: Saved<CubeTensor<R>>,
        d_o: Option<CubeTensor<R>>,
        d_state: Option<CubeTensor<R>>,
    ) -> Recurrence<CubeTensor<R>> {
        let saved: Vec<_> = saved.tensors.into_iter().map(|saved| saved.handle).collect();
        let places = x.as_ref().map(|_| ());
        let cast = |x: CubeTensor<R>, dtype| into_contiguous(burn_cubecl::kernel::cast(x, dtype));
        let d_o = match d_o {
            Some(d_o) => cast(d_o, self.dtype),
            None => {
                let shape = x.v.meta.shape.clone();
                let (client, device) = (self.client.clone(), self.device.clone());
                into_contiguous(zeros_client(client, device, shape, self.dtype))
            }
        };
        let d_state = d_state.map(|d| cast(d, DType::F32).handle);
        let (variant, dims) = (self.variant, self.dims);
        let call = kernels::Given { x: &Self::inputs(x), saved: &saved };
        let d_state = d_state.as_ref();
        let done = kernels::backward(
            &self.client,
            variant,
            dims,
            self.dtype.into(),
            call,
            &d_o.handle,
            d_state,
        )
        .expect("`runs` was asked");
        let given = "a gradient of each tensor that there is";
        let tensor = |buffer: Option<kernels::Buffer>| self.tensor(buffer.expect(given));
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
        }
    }
}
