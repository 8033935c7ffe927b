//! The operations on a fused stream: each is one opaque node, whose body runs on the backend inside.
//!
//! Bodies stay off the stream on purpose: it promises shapes and types before it computes anything,
//! and the kernels, or tensor operations that are not fused, are what the tests hold to the truth.

use super::backend::{LinearAttentionBackend, Path};
use super::fused::{self, LinearLayer};
use super::pass::Pass;
use super::recurrence::{Forward, Hidden, Recurrence, Saved};
use burn::tensor::{DType, Shape, TensorMetadata, ops::FloatTensor};
use burn_fusion::{
    Fusion, FusionBackend, FusionRuntime, FusionTensor,
    stream::{Operation, OperationStreams},
};
use burn_ir::{CustomOpIr, HandleContainer, OperationIr, TensorIr};
use linattn_kernels::few_rows::MOST_ROWS;
use std::marker::PhantomData;
use std::sync::{Arc, Mutex, PoisonError};

type Handles<B> =
    HandleContainer<<<B as FusionBackend>::FusionRuntime as FusionRuntime>::FusionHandle>;

/// A node of the stream: `body` gets the inputs of `description` and gives its outputs.
struct Node<B, F> {
    description: CustomOpIr,
    body: F,
    backend: PhantomData<fn() -> B>,
}

impl<B, F> std::fmt::Debug for Node<B, F> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.description.id)
    }
}

impl<B: FusionBackend, F> Operation<B::FusionRuntime> for Node<B, F>
where
    F: Fn(Vec<FloatTensor<B>>) -> Vec<FloatTensor<B>> + Send + Sync,
{
    fn execute(&self, handles: &mut Handles<B>) {
        let CustomOpIr { inputs, outputs, .. } = &self.description;
        let given = inputs.iter().map(|x| handles.get_float_tensor::<B>(x)).collect();
        let made = (self.body)(given);
        assert_eq!(made.len(), outputs.len(), "{self:?} gives what was promised");
        for (promised, made) in outputs.iter().zip(made) {
            let (shape, dtype) = (made.shape(), made.dtype());
            let promise = (&promised.shape, promised.dtype);
            assert_eq!((&shape, dtype), promise, "{self:?} gives what was promised");
            handles.register_float_tensor::<B>(&promised.id, made);
        }
    }
}

/// Puts a node on the stream of its inputs, of which there is one at least. `promises` are the
/// outputs' shapes and types.
fn node<B: FusionBackend, F>(
    name: &'static str,
    inputs: Vec<FusionTensor<B::FusionRuntime>>,
    promises: Vec<(Shape, DType)>,
    body: F,
) -> std::vec::IntoIter<FusionTensor<B::FusionRuntime>>
where
    F: Fn(Vec<FloatTensor<B>>) -> Vec<FloatTensor<B>> + Send + Sync + 'static,
{
    let client = inputs[0].client.clone();
    // Before the inputs are given away: a tensor knows its stream only while it is held.
    let streams = OperationStreams::with_inputs(inputs.iter());
    let outputs: Vec<_> = promises
        .into_iter()
        .map(|(shape, dtype)| TensorIr::uninit(client.create_empty_handle(), shape, dtype))
        .collect();
    let inputs: Vec<_> = inputs.into_iter().map(FusionTensor::into_ir).collect();
    let description = CustomOpIr::new(name, &inputs, &outputs);
    let node = Node::<B, F> { description: description.clone(), body, backend: PhantomData };
    client.register(streams, OperationIr::Custom(description), node).into_iter()
}

/// Shapes and types of `o` and the last state.
fn outputs<T: TensorMetadata>(x: &Recurrence<T>) -> Vec<(Shape, DType)> {
    let (dims, dtype) = (x.dims(), x.v.dtype());
    let of_state = if dtype == DType::F64 { dtype } else { DType::F32 };
    vec![(Shape::from(dims.values_shape()), dtype), (Shape::from(dims.state_shape()), of_state)]
}

const OUTPUTS: &str = "as many outputs as were promised";
const INPUTS: &str = "as many inputs as were given";

impl<B: FusionBackend + LinearAttentionBackend> LinearAttentionBackend for Fusion<B> {
    /// Saved tensors of the backend inside never enter the stream, which would have to know their shapes:
    /// they wait where the backward pass's node finds them.
    fn chunkwise(x: Recurrence<FloatTensor<Self>>, keep: bool) -> Forward<FloatTensor<Self>> {
        let promises = outputs(&x);
        let (places, list) = x.into_list();
        let kept = Arc::new(Mutex::new(None::<Saved<FloatTensor<B>>>));
        let slot = kept.clone();
        let mut made = node::<B, _>("chunkwise", list, promises, move |tensors| {
            let Forward { o, state, saved } = B::chunkwise(places.clone().fill(tensors), keep);
            if keep {
                *slot.lock().unwrap_or_else(PoisonError::into_inner) = Some(saved);
            }
            vec![o, state]
        });
        let (o, state) = (made.next().expect(OUTPUTS), made.next().expect(OUTPUTS));
        // The output goes along, so that the stream runs the forward pass before the backward pass.
        let saved = match keep {
            true => Saved { tensors: vec![o.clone()], hidden: Some(Hidden(kept)) },
            false => Saved::default(),
        };
        Forward { o, state, saved }
    }

    fn chunkwise_backward(
        x: Recurrence<FloatTensor<Self>>,
        saved: Saved<FloatTensor<Self>>,
        d_o: Option<FloatTensor<Self>>,
        d_state: Option<FloatTensor<Self>>,
    ) -> Recurrence<FloatTensor<Self>> {
        let (with_o, with_state) = (d_o.is_some(), d_state.is_some());
        let (places, list) = x.into_list();
        let promises = list.iter().map(|x| (x.shape(), x.dtype())).collect();
        let count = list.len();
        let inputs = list.into_iter().chain(d_o).chain(d_state).chain(saved.tensors).collect();
        let hidden = saved.hidden.expect("a forward pass that keeps leaves this");
        let of_inputs = places.clone();
        let made = node::<B, _>("chunkwise_backward", inputs, promises, move |tensors| {
            let mut tensors = tensors.into_iter();
            let x = of_inputs.clone().fill(tensors.by_ref().take(count).collect());
            let d_o = with_o.then(|| tensors.next().expect(INPUTS));
            let d_state = with_state.then(|| tensors.next().expect(INPUTS));
            let saved = hidden.take::<Saved<FloatTensor<B>>>();
            B::chunkwise_backward(x, saved, d_o, d_state).into_list().1
        });
        places.fill(made.collect())
    }

    fn recurrent_step(x: Recurrence<FloatTensor<Self>>) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let promises = outputs(&x);
        let (places, list) = x.into_list();
        let mut made = node::<B, _>("recurrent_step", list, promises, move |tensors| {
            let (o, state) = B::recurrent_step(places.clone().fill(tensors));
            vec![o, state]
        });
        (made.next().expect(OUTPUTS), made.next().expect(OUTPUTS))
    }

    /// A few rows are the affair of the backend inside. More of them are a product on the stream, which
    /// what comes after it can be fused with.
    fn fused_linear(l: LinearLayer<FloatTensor<Self>>, keep: bool) -> Option<Pass<Self>> {
        let LinearLayer { x, weight, bias } = l;
        let (mut shape, dtype) = (x.shape(), x.dtype());
        let last = shape.num_dims() - 1;
        let rows: usize = shape[..last].iter().product();
        if keep || rows > MOST_ROWS || weight.dtype() != dtype {
            return None;
        }
        shape[last] = weight.shape()[1];
        let inputs = [x, weight].into_iter().chain(bias).collect();
        let made = node::<B, _>("linear", inputs, vec![(shape, dtype)], |tensors| {
            let mut tensors = tensors.into_iter();
            let (x, weight) = (tensors.next().expect(INPUTS), tensors.next().expect(INPUTS));
            let l = LinearLayer { x, weight, bias: tensors.next() };
            vec![fused::linear_primitive::<B>(l)]
        });
        Some(Pass::forward(made.collect()))
    }

    fn path(device: &Self::Device) -> Path {
        B::path(device)
    }
}
