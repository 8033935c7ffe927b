//! The operations on Burn's CubeCL backends: as kernels, and as tensor operations where the kernels
//! refuse (f64; over whole sequences keys and values wider than 256; products of more than 64 rows).
//! fused.rs has the layers around a recurrence, linear.rs matrix products.

mod fused;
mod linear;
mod optimizer;
mod rows;

use super::autodiff::Pass;
use super::backend::{
    self, Forward, LinearAttentionBackend, Operands, Path, Read, Saved, primitive, tensor,
};
use super::fused::{
    AdamW, AdamWStep, Clip, ConvSplit, Embedding, GatedProduct, LinearCrossEntropy, LinearLayer,
    Moments, Normalization, Pack, norm_in_tensor_ops, step_in_tensor_ops,
};
use super::recurrent;
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
    fn chunkwise(
        x: Operands<FloatTensor<Self>>,
        chunk: usize,
        keep: bool,
    ) -> Forward<FloatTensor<Self>> {
        let call = Call::new(&x);
        match call.runs(&x) {
            true => call.forward(one_type::<Self>(x), keep),
            false => backend::forward::<Self>(x, chunk, keep),
        }
    }

    fn chunkwise_backward(
        x: Operands<FloatTensor<Self>>,
        saved: Saved<FloatTensor<Self>>,
        d_o: Option<FloatTensor<Self>>,
        d_state: Option<FloatTensor<Self>>,
        chunk: usize,
    ) -> Operands<FloatTensor<Self>> {
        let call = Call::new(&x);
        if !call.runs(&x) {
            return backend::backward::<Self>(x, saved, d_o, d_state, chunk);
        }
        let types: Vec<DType> = x.clone().into_vec().into_iter().map(|x| x.dtype).collect();
        let state = x.state.is_some();
        let d = call.backward(one_type::<Self>(x), saved, d_o, d_state);
        let [batch, tokens, heads, key_width] = tensor::<Self, 4>(d.q.clone()).dims();
        let key_heads = call.dims.key_heads;
        let keys = |d: FloatTensor<Self>| match key_heads == heads {
            true => d,
            false => {
                let grouped = [batch, tokens, key_heads, heads / key_heads, key_width];
                let sum = tensor::<Self, 4>(d).reshape(grouped).sum_dim(3);
                primitive(sum.squeeze_dim::<4>(3))
            }
        };
        let d = Operands { q: keys(d.q), k: keys(d.k), state: d.state.filter(|_| state), ..d };
        // Gradients have the type of what they are the gradients of.
        let mut types = types.into_iter();
        let mut next = || types.next().expect("a type for each tensor");
        let mut cast = |d: FloatTensor<Self>| burn_cubecl::kernel::cast(d, next());
        Operands {
            q: cast(d.q),
            k: cast(d.k),
            v: cast(d.v),
            a: d.a.map(&mut cast),
            b: d.b.map(&mut cast),
            g: d.g.map(&mut cast),
            beta: d.beta.map(&mut cast),
            state: d.state.map(&mut cast),
            read: d.read,
        }
    }

    fn path(_device: &Self::Device) -> Path {
        Path::Kernels
    }

    fn recurrent_step(x: Operands<FloatTensor<Self>>) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let call = Call::new(&x);
        match call.steps() {
            true => call.step(one_type::<Self>(x)),
            false => recurrent::step::<Self>(x),
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
fn one_type<B: LinearAttentionBackend>(x: Operands<FloatTensor<B>>) -> Operands<FloatTensor<B>> {
    let dtype = tensor::<B, 4>(x.v.clone()).dtype();
    let f32 = |x| B::float_cast(x, FloatDType::F32);
    let like_v = |x| primitive(tensor::<B, 4>(x).cast(dtype));
    Operands {
        q: like_v(x.q),
        k: like_v(x.k),
        v: x.v,
        a: x.a.map(like_v),
        b: x.b.map(like_v),
        g: x.g.map(f32),
        beta: x.beta.map(f32),
        state: x.state.map(f32),
        read: x.read,
    }
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
    fn new(x: &Operands<CubeTensor<R>>) -> Self {
        let (q, v) = (&x.q.meta.shape, &x.v.meta.shape);
        Self {
            client: x.v.client.clone(),
            device: x.v.device.clone(),
            dims: kernels::Dims {
                batch: q[0],
                tokens: q[1],
                key_heads: q[2],
                heads: v[2],
                key_width: q[3],
                value_width: v[3],
            },
            variant: kernels::Variant {
                decay: match &x.g {
                    Some(g) if g.meta.shape.num_dims() == 4 => kernels::Decay::Vector,
                    Some(_) => kernels::Decay::Scalar,
                    None => kernels::Decay::None,
                },
                transition: match (&x.beta, &x.b) {
                    (Some(_), _) => kernels::Transition::Delta { erase: x.a.is_some() },
                    (None, Some(_)) => kernels::Transition::LowRank,
                    (None, None) => kernels::Transition::Identity,
                },
                read: match x.read {
                    Read::After => kernels::Read::After,
                    Read::Before => kernels::Read::Before,
                },
            },
            dtype: x.v.dtype,
        }
    }

    /// Whether the chunked kernels take this.
    fn runs(&self, x: &Operands<CubeTensor<R>>) -> bool {
        let float = matches!(x.v.dtype, DType::F32 | DType::F16 | DType::BF16);
        let dtype = self.dtype.into();
        float && kernels::engine(&self.client, self.variant, self.dims, dtype).is_ok()
    }

    /// Whether the kernel for one token takes this.
    fn steps(&self) -> bool {
        kernels::step::check(&self.client, self.dims, self.dtype.into()).is_ok()
    }

    fn inputs(x: Operands<CubeTensor<R>>) -> kernels::Inputs {
        let handle = |x| into_contiguous(x).handle;
        kernels::Inputs {
            q: handle(x.q),
            k: handle(x.k),
            v: handle(x.v),
            a: x.a.map(handle),
            b: x.b.map(handle),
            g: x.g.map(handle),
            beta: x.beta.map(handle),
            state: x.state.map(handle),
        }
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

    fn forward(&self, x: Operands<CubeTensor<R>>, keep: bool) -> Forward<CubeTensor<R>> {
        let (variant, dims) = (self.variant, self.dims);
        let dtype = self.dtype.into();
        let done = kernels::forward(&self.client, variant, dims, dtype, &Self::inputs(x), keep)
            .expect("`runs` was asked");
        let tensors: Vec<_> = done.saved.into_iter().map(|saved| self.tensor(saved)).collect();
        let (o, state) = (self.tensor(done.o), self.tensor(done.state));
        Forward { o, state, saved: Saved::from(tensors) }
    }

    fn step(&self, x: Operands<CubeTensor<R>>) -> (CubeTensor<R>, CubeTensor<R>) {
        let kernels::Dims { batch, heads, key_width, value_width, .. } = self.dims;
        let state = x.state.unwrap_or_else(|| {
            let shape = Shape::from([batch, heads, key_width, value_width]);
            zeros_client(self.client.clone(), self.device.clone(), shape, DType::F32)
        });
        let x = Self::inputs(Operands { state: Some(state), ..x });
        let (variant, dims) = (self.variant, self.dims);
        let done = kernels::step::launch(&self.client, variant, dims, self.dtype.into(), &x)
            .expect("`steps` was asked");
        (self.tensor(done.o), self.tensor(done.state))
    }

    fn backward(
        &self,
        x: Operands<CubeTensor<R>>,
        saved: Saved<CubeTensor<R>>,
        d_o: Option<CubeTensor<R>>,
        d_state: Option<CubeTensor<R>>,
    ) -> Operands<CubeTensor<R>> {
        let saved: Vec<_> = saved.tensors.into_iter().map(|saved| saved.handle).collect();
        let read = x.read;
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
        let given = kernels::Given {
            x: &Self::inputs(x),
            saved: &saved,
            d_o: &d_o.handle,
            d_state: d_state.as_ref(),
        };
        let done = kernels::backward(&self.client, variant, dims, self.dtype.into(), given)
            .expect("`runs` was asked");
        Operands {
            q: self.tensor(done.q),
            k: self.tensor(done.k),
            v: self.tensor(done.v),
            a: done.a.map(|a| self.tensor(a)),
            b: done.b.map(|b| self.tensor(b)),
            g: done.g.map(|g| self.tensor(g)),
            beta: done.beta.map(|beta| self.tensor(beta)),
            state: Some(self.tensor(done.state)),
            read,
        }
    }
}
