//! The operations on Burn's CubeCL backends: the step as a kernel, the rest as tensor operations.

use super::backend::{LinearAttentionBackend, Operands, primitive, tensor};
use super::recurrent;
use burn::tensor::{DType, Shape, ops::FloatTensor};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::ops::numeric::{empty_device_contiguous_dtype, zeros_client};
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeRuntime, FloatElement, IntElement, element::BoolElement};
use cubecl::CubeCount;
use linattn_kernels::step::{self, Args, Dims};

impl<R, F, I, BT> LinearAttentionBackend for CubeBackend<R, F, I, BT>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    fn recurrent_step(x: Operands<FloatTensor<Self>>) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let [batch, _, key_heads, key_width] = tensor::<Self, 4>(x.q.clone()).dims();
        let [_, _, heads, value_width] = tensor::<Self, 4>(x.v.clone()).dims();
        let sizes = Dims { batch, key_heads, heads, key_width, value_width };
        let cubes = sizes.cubes(x.v.client.properties().hardware.max_cube_count);
        match cubes {
            Some(cubes) if x.v.dtype != DType::F64 => {
                let f32_3 = |x| primitive(tensor::<Self, 3>(x).cast(DType::F32));
                let f32_4 = |x| primitive(tensor::<Self, 4>(x).cast(DType::F32));
                let dtype = x.v.dtype;
                let like_v = |x| primitive(tensor::<Self, 4>(x).cast(dtype));
                let x = Operands {
                    q: like_v(x.q),
                    k: like_v(x.k),
                    v: x.v,
                    g: x.g.map(f32_3),
                    beta: x.beta.map(f32_3),
                    state: x.state.map(f32_4),
                };
                run(x, sizes, cubes)
            }
            _ => recurrent::step::<Self>(x),
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
