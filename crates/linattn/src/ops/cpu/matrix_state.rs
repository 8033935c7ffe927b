//! The recurrences with a matrix for a state on Flex's tensors.

use super::recurrence::{self, Given, Outputs};
use super::shared::Fresh;
use super::tensors::{Number, contiguous, maybe, one_type, slice, tensor, typed};
use crate::ops::recurrence::{Forward, Recurrence, Saved};
use burn::tensor::{DType, TensorMetadata};
use burn_flex::FlexTensor;

type Tensors = Recurrence<FlexTensor>;

/// The one type of all tensors.
fn dtype(x: &Tensors) -> Option<DType> {
    one_type(x.as_ref().into_list().1)
}

/// The forward pass; nothing where the tensors are of other types than f32 or f64, or of several.
pub(super) fn forward(x: &Tensors, keep: bool) -> Option<Forward<FlexTensor>> {
    typed!(dtype(x)?, forward_of(x.clone().map(contiguous), keep))
}

fn forward_of<R: Number>(x: Tensors, keep: bool) -> Forward<FlexTensor> {
    let dims = x.dims();
    let (mut o, mut last) =
        (Fresh::<R>::new(x.v.shape().num_elements()), Fresh::new(dims.states()));
    let states = recurrence::kept(&x, dims);
    let mut kept = keep.then(|| Fresh::new(states));
    let found = Outputs {
        o: o.shared(),
        last: last.shared(),
        kept: kept.as_mut().map(|kept| kept.shared()),
    };
    recurrence::forward(x.as_ref().map(slice), dims, found);
    let kept = kept.map(|kept| tensor(kept.filled(), [states]));
    Forward {
        o: tensor(o.filled(), dims.values_shape()),
        state: tensor(last.filled(), dims.state_shape()),
        saved: Saved::from(kept.into_iter().collect::<Vec<_>>()),
    }
}

/// The backward pass of what [`forward`] did.
pub(super) fn backward(
    x: &Tensors,
    saved: &Saved<FlexTensor>,
    d_o: Option<FlexTensor>,
    d_state: Option<FlexTensor>,
) -> Option<Tensors> {
    let given = [d_o, d_state].map(|d| d.map(contiguous));
    typed!(dtype(x)?, backward_of(x.clone().map(contiguous), saved, given))
}

fn backward_of<R: Number>(
    x: Tensors,
    saved: &Saved<FlexTensor>,
    [d_o, d_state]: [Option<FlexTensor>; 2],
) -> Tensors {
    let kept = saved.tensors.first().expect("a forward pass that keeps saves its states");
    let given = Given { kept: slice(kept), d_o: maybe(&d_o), d_state: maybe(&d_state) };
    let new = |x: &FlexTensor| Fresh::<R>::new(x.shape().num_elements());
    let (places, mut d) = x.as_ref().map(new).into_list();
    let into = places.clone().fill(d.iter_mut().map(Fresh::shared).collect());
    recurrence::backward(x.as_ref().map(slice), x.dims(), given, into);
    x.zip(places.fill(d)).map(|(x, d)| tensor(d.filled(), x.shape()))
}
