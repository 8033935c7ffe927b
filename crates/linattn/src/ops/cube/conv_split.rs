//! The columns of packed projections on Burn's CubeCL backends: convolutions, gates, and a token's step. `None` where the
//! kernels refuse.

use super::fused::{
    Backward, CubePass, as_given, flat, flat_zeros, handle, in_place, is_float, one_type, shaped,
};
use crate::ops::SequenceLengths;
use crate::ops::fused::{
    Column, ColumnKind, ConvSplit, ConvStates, ConvStep, ConvStepOutputs, ConvolvedStep,
    ConvolvedStepOutputs,
};
use burn::tensor::{DType, Shape};
use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use cubecl::server::Handle;
use linattn_kernels::fused::{conv_split as conv, conv_state};
use linattn_kernels::step::convolved;
use linattn_kernels::{Buffer, Dims, pointwise};
use std::borrow::Cow;

/// The treatment of columns in the kernels' words; `heads` share the rates of a log decay.
fn kind(kind: ColumnKind, heads: usize) -> conv::Kind {
    match kind {
        ColumnKind::Conv { activation, norm } => conv::Kind::Conv {
            activation: activation.map_or(pointwise::Activation::Identity, Into::into),
            head: norm.map(|norm| conv::Head {
                width: norm.width,
                factor: norm.factor,
                epsilon: 1e-6,
            }),
        },
        ColumnKind::Copy => conv::Kind::Copy,
        ColumnKind::Beta { scale } => conv::Kind::Beta { scale },
        ColumnKind::LogDecay => conv::Kind::LogDecay { heads },
    }
}

/// The parts of a packed projection.
fn parts<R: CubeRuntime>(columns: &[Column], a_log: &Option<CubeTensor<R>>) -> Vec<conv::Columns> {
    let heads = a_log.as_ref().map_or(1, |a_log| a_log.meta.shape()[0]);
    let columns = columns.iter();
    columns.map(|c| conv::Columns { width: c.width, kind: kind(c.kind, heads) }).collect()
}

fn output_type(kind: ColumnKind, rows: DType) -> DType {
    match kind {
        ColumnKind::Conv { .. } | ColumnKind::Copy => rows,
        ColumnKind::Beta { .. } | ColumnKind::LogDecay => DType::F32,
    }
}

fn conv_inputs<R: CubeRuntime>(x: &ConvSplit<CubeTensor<R>>) -> conv::Inputs<'_> {
    conv::Inputs {
        x: &x.x.handle,
        weight: handle(&x.weight),
        bias: handle(&x.bias),
        conv_state: handle(&x.conv_state),
        a_log: handle(&x.a_log),
        dt_bias: handle(&x.dt_bias),
        cu_seqlens: x.lengths.as_ref().map(SequenceLengths::cu_seqlens),
    }
}

pub(super) fn conv_split<R: CubeRuntime>(
    x: ConvSplit<CubeTensor<R>>,
    keep: bool,
) -> Option<CubePass<R>> {
    let places = x.refill(std::iter::repeat(()));
    let x = places.refill(x.into_vec().into_iter().map(flat));
    let dtype = x.x.dtype;
    let weights = one_type([&x.weight, &x.bias, &x.a_log, &x.dt_bias])?;
    let conv_state = x.conv_state.as_ref().map_or(dtype, |conv_state| conv_state.dtype);
    if !is_float(dtype) || conv_state != dtype {
        return None;
    }
    let (batch, tokens) = (x.x.meta.shape()[0], x.x.meta.shape()[1]);
    let window = x.weight.as_ref().map_or(1, |weight| weight.meta.shape()[0]);
    let dims = conv::Dims { batch, tokens, window };
    let types = conv::Types { rows: dtype.into(), weights: weights.into() };
    let columns = parts(&x.columns, &x.a_log);
    let client = x.x.client.clone();
    let done = conv::forward(&client, dims, &columns, conv_inputs(&x), types).ok()?;
    let output = |(buffer, column): (Buffer, &Column)| {
        let shape = Shape::from([batch, tokens, column.width]);
        shaped(&x.x, buffer, shape, output_type(column.kind, dtype))
    };
    let outputs = done.into_iter().zip(&x.columns).map(output).collect();
    let backward = keep.then(|| -> Backward<R> {
        Box::new(move |gradients, _| conv_split_backward(x, dims, types, gradients))
    });
    Some(CubePass::new(outputs, backward))
}

pub(super) fn conv_step<R: CubeRuntime>(
    x: &ConvStep<CubeTensor<R>>,
) -> Option<ConvStepOutputs<CubeTensor<R>>> {
    let all = |tensors: &[CubeTensor<R>]| tensors.iter().cloned().map(flat).collect::<Vec<_>>();
    let [weights, biases, states] =
        [&x.weights, &x.biases, &x.conv_states].map(|tensors| all(tensors));
    let [a_log, dt_bias] = [&x.a_log, &x.dt_bias].map(|tensor| tensor.clone().map(flat));
    let packed = flat(x.x.clone());
    let dtype = packed.dtype;
    let of_weights = one_type(
        &weights
            .iter()
            .chain(&biases)
            .chain(&a_log)
            .chain(&dt_bias)
            .cloned()
            .map(Some)
            .collect::<Vec<_>>(),
    )?;
    if !is_float(dtype) || states.iter().any(|state| state.dtype != dtype) {
        return None;
    }
    let (batch, window) = (packed.meta.shape()[0], weights.first()?.meta.shape()[0]);
    let handles =
        [&weights, &biases, &states].map(|t| t.iter().map(|t| &t.handle).collect::<Vec<_>>());
    let [weights, biases, conv_states] = &handles;
    let inputs = conv::Inputs {
        x: &packed.handle,
        weight: None,
        bias: None,
        conv_state: None,
        a_log: handle(&a_log),
        dt_bias: handle(&dt_bias),
        cu_seqlens: None,
    };
    let apart = conv::Apart { weights, biases, conv_states };
    let dims = conv::Dims { batch, tokens: 1, window };
    let types = conv::Types { rows: dtype.into(), weights: of_weights.into() };
    let columns = parts(&x.columns, &a_log);
    let (outputs, next) = conv::step(&packed.client, dims, &columns, inputs, apart, types).ok()?;
    let output = |(buffer, column): (Buffer, &Column)| {
        let shape = Shape::from([batch, 1, column.width]);
        shaped(&packed, buffer, shape, output_type(column.kind, dtype))
    };
    let state = |(buffer, column): (Buffer, &Column)| {
        shaped(&packed, buffer, Shape::from([batch, window - 1, column.width]), dtype)
    };
    Some(ConvStepOutputs {
        outputs: outputs.into_iter().zip(&x.columns).map(output).collect(),
        conv_states: next.into_iter().zip(&x.columns).map(state).collect(),
    })
}

fn conv_split_backward<R: CubeRuntime>(
    x: ConvSplit<CubeTensor<R>>,
    dims: conv::Dims,
    types: conv::Types,
    gradients: Vec<Option<CubeTensor<R>>>,
) -> Vec<Option<CubeTensor<R>>> {
    let rows = x.x.dtype;
    let given: Vec<Option<CubeTensor<R>>> = gradients
        .into_iter()
        .zip(&x.columns)
        .map(|(d, column)| d.map(|d| as_given(d, output_type(column.kind, rows))))
        .collect();
    let d_out: Vec<Option<&Handle>> = given.iter().map(handle).collect();
    let done = conv::backward(
        &x.x.client,
        dims,
        &parts(&x.columns, &x.a_log),
        conv_inputs(&x),
        &d_out,
        types,
    )
    .expect("the forward pass took these sizes and types");
    let like = |like: &Option<CubeTensor<R>>, buffer: Option<Buffer>| {
        let like = like.as_ref()?;
        Some(buffer.map(|buffer| shaped(like, buffer, like.meta.shape().clone(), like.dtype)))
    };
    let d_x = shaped(&x.x, done.x, x.x.meta.shape().clone(), rows);
    let mut found = vec![Some(d_x)];
    found.extend(like(&x.weight, done.weight));
    found.extend(like(&x.bias, done.bias));
    found.extend(like(&x.conv_state, done.conv_state));
    found.extend(like(&x.a_log, done.a_log));
    found.extend(like(&x.dt_bias, done.dt_bias));
    found
}

pub(super) fn conv_states<R: CubeRuntime>(
    x: &ConvStates<CubeTensor<R>>,
) -> Option<Vec<CubeTensor<R>>> {
    let ConvStates { x, widths, window, states, lengths } = x;
    let (dtype, x) = (x.dtype, flat(x.clone()));
    let there = states.is_empty() || states.len() == widths.len();
    if !is_float(dtype) || !there || states.iter().any(|state| state.dtype != dtype) {
        return None;
    }
    let states: Vec<_> = states.iter().cloned().map(flat).collect();
    let handles: Vec<&Handle> = states.iter().map(|state| &state.handle).collect();
    let [batch, tokens, columns] = [0, 1, 2].map(|d| x.meta.shape[d]);
    let dims = conv_state::Dims { batch, tokens, columns };
    let convolutions = conv_state::Convolutions { widths: widths.clone(), window: *window };
    let cu_seqlens = lengths.as_ref().map(SequenceLengths::cu_seqlens);
    let inputs = conv_state::Inputs { x: &x.handle, states: &handles, cu_seqlens };
    let next =
        conv_state::next_states(&x.client, dims, &convolutions, inputs, dtype.into()).ok()?;
    let sequences = lengths.as_ref().map_or(batch, SequenceLengths::count);
    let shape = |width: usize| Shape::from([sequences, window - 1, width]);
    let next = next.into_iter().zip(widths);
    Some(next.map(|(next, width)| shaped(&x, next, shape(*width), dtype)).collect())
}

/// Sizes of a token's recurrence, and its columns in the kernel's words; `None` where there are others than it has.
fn memory_columns<T>(
    x: &ConvolvedStep<T>,
    [batch, all, window]: [usize; 3],
) -> Option<(Dims, convolved::Columns)> {
    let (convolutions, others) = x.token.columns.split_at_checked(convolved::CONVOLUTIONS)?;
    let mut places = convolved::Columns {
        all,
        window,
        activations: [pointwise::Activation::Identity; convolved::CONVOLUTIONS],
        norms: [None; 2],
        beta: None,
        decay: None,
        copied: 0..0,
    };
    let per_head = |n: usize, heads: usize| {
        let width: usize = convolutions[n].width;
        width.is_multiple_of(heads).then_some(width / heads)
    };
    let (key_width, value_width) = (per_head(0, x.key_heads)?, per_head(2, x.heads)?);
    if per_head(1, x.key_heads)? != key_width {
        return None;
    }
    for (n, column) in convolutions.iter().enumerate() {
        let conv::Kind::Conv { activation, head } = kind(column.kind, x.heads) else { return None };
        places.activations[n] = activation;
        match (places.norms.get_mut(n), head) {
            (Some(norm), Some(head)) if head.width == key_width => *norm = Some(head),
            (_, Some(_)) => return None,
            (_, None) => {}
        }
    }
    let mut first: usize = convolutions.iter().map(|column| column.width).sum();
    for column in others {
        let one_a_head = column.width == x.heads;
        match column.kind {
            ColumnKind::Beta { scale } if one_a_head && places.beta.is_none() => {
                places.beta = Some((first, scale));
            }
            ColumnKind::LogDecay if one_a_head && places.decay.is_none() => {
                places.decay = Some(first);
            }
            ColumnKind::Copy if places.copied.is_empty() => {
                places.copied = first..first + column.width;
            }
            _ => return None,
        }
        first += column.width;
    }
    let (key_heads, heads) = (x.key_heads, x.heads);
    Some((Dims { batch, tokens: 1, key_heads, heads, key_width, value_width }, places))
}

/// A tensor for queries, one for keys and one for values; `None` where there are more or fewer.
fn three<R: CubeRuntime>(
    tensors: &[CubeTensor<R>],
) -> Option<[Cow<'_, CubeTensor<R>>; convolved::CONVOLUTIONS]> {
    let tensors: &[_; convolved::CONVOLUTIONS] = tensors.try_into().ok()?;
    Some(tensors.each_ref().map(in_place))
}

/// As [`three`], or none at all.
fn three_or_none<R: CubeRuntime>(
    tensors: &[CubeTensor<R>],
) -> Option<Option<[Cow<'_, CubeTensor<R>>; convolved::CONVOLUTIONS]>> {
    match tensors.is_empty() {
        true => Some(None),
        false => three(tensors).map(Some),
    }
}

pub(super) fn convolved_step<R: CubeRuntime>(
    x: &ConvolvedStep<CubeTensor<R>>,
) -> Option<ConvolvedStepOutputs<CubeTensor<R>>> {
    let token = &x.token;
    let y = in_place(&token.x);
    let (dtype, batch) = (y.dtype, y.meta.shape()[0]);
    let window = token.weights.first()?.meta.shape()[0];
    let (dims, columns) = memory_columns(x, [batch, y.meta.shape()[2], window])?;
    let weights = three(&token.weights)?;
    let biases = three_or_none(&token.biases)?;
    let conv_states = three_or_none(&token.conv_states)?;
    let decay = match (&token.a_log, &token.dt_bias) {
        (Some(a_log), Some(dt_bias)) => Some([a_log, dt_bias].map(in_place)),
        _ => None,
    };
    let parameters = weights.iter().chain(biases.iter().flatten()).chain(decay.iter().flatten());
    let of_weights = weights[0].dtype;
    let alike = is_float(of_weights) && parameters.map(|x| x.dtype).all(|it| it == of_weights);
    let in_rows = conv_states.iter().flatten().zip(&token.columns).all(|(state, column)| {
        let shape = Shape::from([batch, window - 1, column.width]);
        state.dtype == dtype && *state.meta.shape() == shape
    });
    let one_a_head = decay.iter().flatten().all(|x| x.meta.shape().num_elements() == dims.heads);
    let shape = Shape::from([batch, dims.heads, dims.key_width, dims.value_width]);
    let memory = x.state.as_ref();
    let memory = memory.is_none_or(|s| s.dtype == DType::F32 && *s.meta.shape() == shape);
    let fits = alike && in_rows && one_a_head && memory && is_float(dtype);
    if !fits || decay.is_some() != columns.decay.is_some() {
        return None;
    }
    let state = match &x.state {
        Some(state) => in_place(state),
        None => Cow::Owned(flat_zeros(&y, shape.clone())),
    };
    fn handles<'a, const N: usize, R: CubeRuntime>(
        tensors: &'a [Cow<'_, CubeTensor<R>>; N],
    ) -> [&'a Handle; N] {
        tensors.each_ref().map(|tensor| &tensor.handle)
    }
    let inputs = convolved::Inputs {
        y: &y.handle,
        weights: handles(&weights),
        biases: biases.as_ref().map(handles),
        conv_states: conv_states.as_ref().map(handles),
        decay: decay.as_ref().map(handles),
        state: &state.handle,
    };
    let types = convolved::Types { rows: dtype.into(), weights: of_weights.into() };
    let done = convolved::launch(&y.client, dims, &columns, inputs, types).ok()?;
    let rows = |buffer: Buffer, shape: Shape| shaped(&y, buffer, shape, dtype);
    let kept = |buffer: Buffer| {
        let shape = Shape::from(buffer.shape.clone());
        rows(buffer, shape)
    };
    Some(ConvolvedStepOutputs {
        o: rows(done.o, Shape::from([batch, 1, dims.heads, dims.value_width])),
        state: shaped(&y, done.state, shape, DType::F32),
        conv_states: done.conv_states.into_iter().map(kept).collect(),
        copied: done
            .copied
            .map(|copied| rows(copied, Shape::from([batch, 1, columns.copied.len()]))),
    })
}
