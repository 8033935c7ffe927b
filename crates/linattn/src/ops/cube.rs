//! The operations on Burn's CubeCL backends: as kernels, and as tensor operations where the kernels
//! refuse (f64, or keys and values wider than 256). cube_rowwise.rs has what stands around a recurrence.

use super::backend::{
    self, Forward, LinearAttentionBackend, Operands, Path, Read, Saved, primitive, tensor,
};
use super::convolution::{self, Convolution};
use super::rowwise::{self, Activation, Gated, LogDecay, Normalization};
use super::{cube_rowwise, recurrent};
use burn::tensor::{DType, FloatDType, Shape, ops::FloatTensor};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::ops::numeric::{empty_device_contiguous_dtype, zeros_client};
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeRuntime, FloatElement, IntElement, element::BoolElement};
use cubecl::CubeCount;
use cubecl::ir::{ElemType, FloatKind, StorageType};
use linattn_kernels as kernels;
use linattn_kernels::step::{self, Args, Dims};

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
        let [batch, _, key_heads, key_width] = tensor::<Self, 4>(x.q.clone()).dims();
        let [_, _, heads, value_width] = tensor::<Self, 4>(x.v.clone()).dims();
        let sizes = Dims { batch, key_heads, heads, key_width, value_width };
        let cubes = sizes.cubes(x.v.client.properties().hardware.max_cube_count);
        let scalar = x.g.as_ref().is_none_or(|g| g.meta.shape.num_dims() == 3);
        let written = scalar && x.a.is_none() && x.read == Read::After;
        match cubes {
            Some(cubes) if written && x.v.dtype != DType::F64 => {
                run(one_type::<Self>(x), sizes, cubes)
            }
            _ => recurrent::step::<Self>(x),
        }
    }

    fn convolve(
        c: Convolution<FloatTensor<Self>>,
        bias: Option<FloatTensor<Self>>,
        activation: Option<Activation>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        cube_rowwise::convolve(&c, bias.as_ref(), activation)
            .unwrap_or_else(|| convolution::convolve::<Self>(c, bias, activation))
    }

    fn normalize<const D: usize>(x: Normalization<FloatTensor<Self>>) -> FloatTensor<Self> {
        cube_rowwise::normalize(&x).unwrap_or_else(|| rowwise::normalize::<Self, D>(x))
    }

    fn gated_product<const D: usize>(x: Gated<FloatTensor<Self>>) -> FloatTensor<Self> {
        cube_rowwise::gated_product(&x).unwrap_or_else(|| rowwise::gated_product::<Self, D>(x))
    }

    fn log_decay(x: LogDecay<FloatTensor<Self>>) -> FloatTensor<Self> {
        cube_rowwise::log_decay(&x).unwrap_or_else(|| rowwise::log_decay::<Self>(x))
    }
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

/// One call of the chunked kernels.
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

    /// Whether the kernels take this.
    fn runs(&self, x: &Operands<CubeTensor<R>>) -> bool {
        let float = matches!(x.v.dtype, DType::F32 | DType::F16 | DType::BF16);
        let dtype = self.dtype.into();
        float && kernels::engine(&self.client, self.variant, self.dims, dtype).is_ok()
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

/// One launch. Gates and state are f32, the rest of one type.
fn run<R: CubeRuntime>(
    x: Operands<CubeTensor<R>>,
    sizes: Dims,
    cubes: CubeCount,
) -> (CubeTensor<R>, CubeTensor<R>) {
    let Dims { batch, heads, key_width, value_width, .. } = sizes;
    let [q, k, v] = [x.q, x.k, x.v].map(into_contiguous);
    let (client, device, dtype) = (v.client.clone(), v.device.clone(), v.dtype);
    // Not `empty_device_dtype`: on CUDA that pads rows, and the kernel counts in whole tensors.
    let new = |shape: [usize; 4], dtype| {
        let shape = Shape::from(shape);
        empty_device_contiguous_dtype(client.clone(), device.clone(), shape, dtype)
    };
    let state_shape = [batch, heads, key_width, value_width];
    let state = into_contiguous(x.state.unwrap_or_else(|| {
        zeros_client(client.clone(), device.clone(), Shape::from(state_shape), DType::F32)
    }));
    let (next, o) = (new(state_shape, DType::F32), new([batch, 1, heads, value_width], dtype));
    let args = Args {
        q: q.into_tensor_arg(),
        k: k.into_tensor_arg(),
        v: v.into_tensor_arg(),
        g: x.g.map(|g| into_contiguous(g).into_tensor_arg()),
        beta: x.beta.map(|beta| into_contiguous(beta).into_tensor_arg()),
        s: state.clone().into_tensor_arg(),
        s_next: next.clone().into_tensor_arg(),
        o: o.clone().into_tensor_arg(),
    };
    let stand_in = || state.clone().into_tensor_arg();
    step::launch(&client, cubes, sizes, args, stand_in, dtype.into());
    (o, next)
}
