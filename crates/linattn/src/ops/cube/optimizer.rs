//! AdamW and the global gradient norm on CubeCL backends: several tensors a launch. `None` where the kernels
//! refuse.

use super::fused::{flat_zeros, in_place};
use crate::ops::fused::{AdamW, AdamWStep, Clip, Moments};
use burn::tensor::{DType, Shape};
use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use linattn_kernels::Buffer;
use linattn_kernels::fused::adamw;
use std::borrow::Cow;
use std::collections::BTreeMap;

type Done<R> = (CubeTensor<R>, Moments<CubeTensor<R>>);

fn one_type<'a, R: CubeRuntime>(
    tensors: impl IntoIterator<Item = &'a CubeTensor<R>>,
) -> Option<DType> {
    let mut types = tensors.into_iter().map(|x| x.dtype);
    let first = types.next()?;
    let known = matches!(first, DType::F32 | DType::F16 | DType::BF16);
    (known && types.all(|dtype| dtype == first)).then_some(first)
}

/// Contiguous tensors of one step.
struct Flat<'a, R: CubeRuntime> {
    parameter: Cow<'a, CubeTensor<R>>,
    gradient: Cow<'a, CubeTensor<R>>,
    first: Cow<'a, CubeTensor<R>>,
    second: Cow<'a, CubeTensor<R>>,
    decay: f64,
    time: u32,
}

impl<'a, R: CubeRuntime> Flat<'a, R> {
    fn new(step: &'a AdamWStep<CubeTensor<R>>) -> Self {
        let parameter = in_place(&step.parameter);
        let zeros = || Cow::Owned(flat_zeros(&parameter, parameter.meta.shape().clone()));
        let (first, second, time) = match &step.moments {
            Some(m) => (in_place(&m.first), in_place(&m.second), m.time),
            None => (zeros(), zeros(), 0),
        };
        let gradient = in_place(&step.gradient);
        Self { gradient, first, second, decay: step.decay, time: time + 1, parameter }
    }

    fn tensors(&self) -> adamw::Tensors<'_> {
        adamw::Tensors {
            param: &self.parameter.handle,
            gradient: &self.gradient.handle,
            m: &self.first.handle,
            v: &self.second.handle,
            len: self.parameter.meta.shape().num_elements(),
            decay: self.decay as f32,
        }
    }

    fn done(&self, updated: adamw::Updated) -> Done<R> {
        let shaped = |buffer: Buffer, like: &CubeTensor<R>| {
            let (client, device) = (like.client.clone(), like.device.clone());
            let shape: Shape = like.meta.shape().clone();
            CubeTensor::new_contiguous(client, device, shape, buffer.handle, like.dtype)
        };
        let (first, second) = (shaped(updated.m, &self.first), shaped(updated.v, &self.second));
        (shaped(updated.param, &self.parameter), Moments { first, second, time: self.time })
    }
}

pub(super) fn step<R: CubeRuntime>(
    steps: &[AdamWStep<CubeTensor<R>>],
    numbers: AdamW,
    clip: Option<&Clip<CubeTensor<R>>>,
) -> Option<Vec<Done<R>>> {
    let param = one_type(steps.iter().map(|step| &step.parameter))?;
    let gradient = one_type(steps.iter().map(|step| &step.gradient))?;
    let moments = steps.iter().filter_map(|step| step.moments.as_ref());
    let f32_moments = |m: &Moments<CubeTensor<R>>| [&m.first, &m.second].map(|x| x.dtype);
    let kept_in_f32 = moments.flat_map(f32_moments).all(|dtype| dtype == DType::F32);
    if !kept_in_f32 || clip.is_some_and(|clip| clip.norm.dtype != DType::F32) {
        return None;
    }
    let flat: Vec<Flat<'_, R>> = steps.iter().map(Flat::new).collect();
    // Corrections go by the steps that a parameter has made.
    let mut groups: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
    for (n, step) in flat.iter().enumerate() {
        groups.entry(step.time).or_default().push(n);
    }
    let types = adamw::Types { param: param.into(), gradient: gradient.into() };
    let clip =
        clip.map(|clip| adamw::Clip { norm: &clip.norm.handle, longest: clip.longest as f32 });
    let mut done: Vec<Option<Done<R>>> = flat.iter().map(|_| None).collect();
    for (time, places) in groups {
        let tensors: Vec<_> = places.iter().map(|n| flat[*n].tensors()).collect();
        let correction = |beta: f64| (1.0 - beta.powf(f64::from(time))) as f32;
        let hyper = adamw::Hyper {
            learning_rate: numbers.learning_rate,
            beta_1: numbers.beta_1 as f32,
            beta_2: numbers.beta_2 as f32,
            epsilon: numbers.epsilon as f32,
            correction_1: correction(numbers.beta_1),
            correction_2: correction(numbers.beta_2),
        };
        let client = &flat[places[0]].parameter.client;
        let updated = adamw::step(client, &tensors, hyper, clip, types).ok()?;
        for (n, updated) in places.into_iter().zip(updated) {
            done[n] = Some(flat[n].done(updated));
        }
    }
    done.into_iter().collect()
}

pub(super) fn norm<R: CubeRuntime>(gradients: &[CubeTensor<R>]) -> Option<CubeTensor<R>> {
    let dtype = one_type(gradients)?;
    let flat: Vec<_> = gradients.iter().map(in_place).collect();
    let given: Vec<_> = flat.iter().map(|x| (&x.handle, x.meta.shape().num_elements())).collect();
    let first = &flat[0];
    let norm = adamw::norm(&first.client, &given, dtype.into()).ok()?;
    let (client, device) = (first.client.clone(), first.device.clone());
    Some(CubeTensor::new_contiguous(client, device, Shape::from([1]), norm.handle, DType::F32))
}
