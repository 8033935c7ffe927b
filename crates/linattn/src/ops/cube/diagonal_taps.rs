//! The taps of diagonal state-space models on Burn's CubeCL backends. `None` where parameters are not f32, or there is
//! more than the kernels can count.

use super::fused::{Backward, CubePass, as_given, flat_f32, only, shaped};
use crate::ops::fused::{DiagonalTaps, Discretization};
use burn::tensor::{DType, Shape};
use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use linattn_kernels::fused::diagonal_taps::{self as kernels, Dims, Gradients, Inputs, Steps};

pub(super) fn diagonal_taps<R: CubeRuntime>(
    x: DiagonalTaps<CubeTensor<R>>,
    keep: bool,
) -> Option<CubePass<R>> {
    let places = x.refill(std::iter::repeat(()));
    let x = places.refill(flat_f32(x.into_vec())?);
    let (length, steps) = (x.length, Steps::from(x.steps));
    let [channels, modes] = [0, 1].map(|d| x.log_a_real.meta.shape()[d]);
    let dims = Dims { channels, modes, length };
    let client = x.log_dt.client.clone();
    let taps = kernels::taps(&client, dims, steps, inputs(&x)).ok()?;
    let outputs = vec![shaped(&x.log_dt, taps, Shape::from([length, channels]), DType::F32)];
    let backward = keep.then(|| -> Backward<R> {
        Box::new(move |gradients, _| {
            let d_taps = as_given(only(gradients), DType::F32);
            let found = kernels::gradients(&client, dims, steps, inputs(&x), &d_taps.handle);
            let found = found.expect("the forward pass took these sizes");
            let Gradients { log_dt, log_a_real, a_imag, c, b, d } = found;
            let all = [log_dt, log_a_real, a_imag, c, d].into_iter().chain(b);
            let of = |buffer: linattn_kernels::Buffer| {
                let shape = Shape::from(buffer.shape.clone());
                Some(shaped(&x.log_dt, buffer, shape, DType::F32))
            };
            all.map(of).collect()
        })
    });
    Some(CubePass::new(outputs, backward))
}

/// The kernels' inputs.
fn inputs<R: CubeRuntime>(x: &DiagonalTaps<CubeTensor<R>>) -> Inputs<'_> {
    Inputs {
        log_dt: &x.log_dt.handle,
        log_a_real: &x.log_a_real.handle,
        a_imag: &x.a_imag.handle,
        c: &x.c.handle,
        b: x.b.as_ref().map(|b| &b.handle),
        d: &x.d.handle,
    }
}

impl From<Discretization> for Steps {
    fn from(steps: Discretization) -> Self {
        match steps {
            Discretization::Zoh => Self::Zoh,
            Discretization::Bilinear => Self::Bilinear,
        }
    }
}
