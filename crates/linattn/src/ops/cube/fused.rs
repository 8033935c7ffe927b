//! The layers around a recurrence on Burn's CubeCL backends. `None` where the kernels refuse: f64, a type
//! or cubes that the device does not have, nothing to do, or more than it can count.

use super::linear;
use super::rows::{entries_of, joined, rows_of, scaled, sum};
use crate::ops::fused::{
    Activation, Embedding, GateActivation, GatedProduct, GatedValue, LinearCrossEntropy,
    LinearLayer, Measure, Normalization, Pack, Rotary,
};
use crate::ops::pass::{BackwardPass, Pass};
use burn::tensor::{DType, Shape};
use burn_cubecl::kernel::{cast, into_contiguous};
use burn_cubecl::ops::numeric::{add, zeros_client};
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeRuntime, FloatElement, IntElement, element::BoolElement};
use cubecl::ir::StorageType;
use cubecl::server::Handle;
use linattn_kernels::fused::{
    argmax as largest, column_sums, cross_entropy as loss, embedding as table, gated_product, norm,
    pack as packing, rotary as rotation,
};
use linattn_kernels::{Buffer, pointwise};
use std::borrow::Cow;

impl From<Activation> for pointwise::Activation {
    fn from(activation: Activation) -> Self {
        match activation {
            Activation::Silu => Self::Silu,
            Activation::Sigmoid => Self::Sigmoid,
        }
    }
}

impl From<GateActivation> for gated_product::GateActivation {
    fn from(activation: GateActivation) -> Self {
        match activation {
            GateActivation::Silu => Self::Silu,
            GateActivation::Sigmoid => Self::Sigmoid,
            GateActivation::Softplus => Self::Softplus,
            GateActivation::LogSigmoid => Self::LogSigmoid,
            GateActivation::Gelu => Self::Gelu,
            GateActivation::GeluTanh => Self::GeluTanh,
            GateActivation::SquaredRelu => Self::SquaredRelu,
        }
    }
}

impl From<Measure> for norm::Measure {
    fn from(measure: Measure) -> Self {
        match measure {
            Measure::RootMeanSquare => Self::RootMeanSquare,
            Measure::Length => Self::Length,
            Measure::Standard => Self::Standard,
        }
    }
}

/// Bytes of a row of logits are a multiple of this, which products read and write at once.
const ALIGNED: usize = 16;
/// Numbers of logits that are made at once: 512 MB of bf16.
const LOGITS: usize = 1 << 28;

type Tensors<R> = Vec<CubeTensor<R>>;

/// A pass of CubeCL tensors, whatever the backend's element types.
pub(super) struct CubePass<R: CubeRuntime> {
    outputs: Tensors<R>,
    backward: Option<Backward<R>>,
}

pub(super) type Backward<R> =
    Box<dyn FnOnce(Vec<Option<CubeTensor<R>>>, &[bool]) -> Vec<Option<CubeTensor<R>>> + Send>;

impl<R: CubeRuntime> CubePass<R> {
    pub(super) fn new(outputs: Tensors<R>, backward: Option<Backward<R>>) -> Self {
        Self { outputs, backward }
    }

    pub(super) fn of<F, I, BT>(self) -> Pass<CubeBackend<R, F, I, BT>>
    where
        F: FloatElement,
        I: IntElement,
        BT: BoolElement,
    {
        let Self { outputs, backward } = self;
        let backward = backward.map(|backward| -> BackwardPass<CubeBackend<R, F, I, BT>> {
            Box::new(move |gradients, wanted| backward(gradients, wanted))
        });
        Pass { outputs, backward }
    }
}

/// A contiguous tensor, as the kernels count in whole tensors.
pub(super) fn flat<R: CubeRuntime>(x: CubeTensor<R>) -> CubeTensor<R> {
    into_contiguous(x)
}

/// As [`flat`], without a copy of the tensor where it is contiguous, as nearly always.
pub(super) fn in_place<R: CubeRuntime>(x: &CubeTensor<R>) -> Cow<'_, CubeTensor<R>> {
    match x.is_contiguous() {
        true => Cow::Borrowed(x),
        false => Cow::Owned(flat(x.clone())),
    }
}

/// Zeros on the device of `like`, in one piece: on CUDA and ROCm rows of a new tensor may have gaps between them, which
/// nothing has written.
pub(super) fn flat_zeros<R: CubeRuntime>(like: &CubeTensor<R>, shape: Shape) -> CubeTensor<R> {
    flat(zeros_client(like.client.clone(), like.device.clone(), shape, DType::F32))
}

/// [`flat`] of several; `None` where one is not f32.
pub(super) fn flat_f32<R: CubeRuntime>(tensors: Vec<CubeTensor<R>>) -> Option<Vec<CubeTensor<R>>> {
    let tensors: Vec<_> = tensors.into_iter().map(flat).collect();
    tensors.iter().all(|tensor| tensor.dtype == DType::F32).then_some(tensors)
}

/// A buffer as a tensor of another shape, on the device of `like`.
pub(super) fn shaped<R: CubeRuntime>(
    like: &CubeTensor<R>,
    buffer: Buffer,
    shape: Shape,
    dtype: DType,
) -> CubeTensor<R> {
    CubeTensor::new_contiguous(
        like.client.clone(),
        like.device.clone(),
        shape,
        buffer.handle,
        dtype,
    )
}

/// Rows and width of a tensor.
fn rows<R: CubeRuntime>(x: &CubeTensor<R>) -> Option<(usize, usize)> {
    let width = *x.meta.shape().last()?;
    Some((x.meta.shape().num_elements().checked_div(width)?, width))
}

pub(super) fn handle<R: CubeRuntime>(x: &Option<CubeTensor<R>>) -> Option<&Handle> {
    x.as_ref().map(|x| &x.handle)
}

pub(super) fn is_float(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::F16 | DType::BF16)
}

/// The one type of weights, f32 where there are none; None where they differ.
pub(super) fn one_type<'a, R: CubeRuntime>(
    weights: impl IntoIterator<Item = &'a Option<CubeTensor<R>>>,
) -> Option<DType> {
    let mut types = weights.into_iter().flatten().map(|x| x.dtype);
    let first = types.next().unwrap_or(DType::F32);
    (is_float(first) && types.all(|dtype| dtype == first)).then_some(first)
}

/// A gradient in the type that the kernels take it in, contiguous.
pub(super) fn as_given<R: CubeRuntime>(gradient: CubeTensor<R>, dtype: DType) -> CubeTensor<R> {
    flat(if gradient.dtype == dtype { gradient } else { cast(gradient, dtype) })
}

pub(super) fn normalize<R: CubeRuntime>(
    n: Normalization<CubeTensor<R>>,
    keep: bool,
) -> Option<CubePass<R>> {
    let places = n.refill(std::iter::repeat(()));
    let n = places.refill(n.into_vec().into_iter().map(flat));
    let (count, width) = rows(&n.x)?;
    let weights = one_type([&n.weight, &n.bias])?;
    let of_h = n.residual.as_ref().map_or(n.x.dtype, |residual| residual.dtype);
    let gate = n.gate.as_ref().map_or(n.dtype, |gate| gate.dtype);
    if ![n.x.dtype, of_h, n.dtype].into_iter().all(is_float) || gate != n.dtype {
        return None;
    }
    let sizes = norm::Norm {
        rows: count,
        width,
        measure: n.measure.into(),
        epsilon: n.epsilon as f32,
        factor: n.factor as f32,
        activation: n.activation.into(),
    };
    let types = norm::Types {
        x: n.x.dtype.into(),
        residual: of_h.into(),
        y: n.dtype.into(),
        weights: weights.into(),
    };
    let inputs = norm::Inputs {
        x: &n.x.handle,
        residual: handle(&n.residual),
        gate: handle(&n.gate),
        weight: handle(&n.weight),
        bias: handle(&n.bias),
    };
    let client = n.x.client.clone();
    let done = norm::forward(&client, sizes, types, inputs).ok()?;
    let shape = n.x.meta.shape().clone();
    let y = shaped(&n.x, done.y, shape.clone(), n.dtype);
    let h = done.h.map(|h| shaped(&n.x, h, shape.clone(), of_h));
    let outputs = std::iter::once(y).chain(h.clone()).collect();
    let backward = keep.then(|| -> Backward<R> {
        let of_x = n.x.dtype;
        let saved = Saved { h: h.unwrap_or_else(|| n.x.clone()), of_x, n, sizes, types };
        Box::new(move |gradients, _| saved.backward(gradients))
    });
    Some(CubePass { outputs, backward })
}

/// A norm's forward pass, as its backward pass needs it.
struct Saved<R: CubeRuntime> {
    n: Normalization<CubeTensor<R>>,
    h: CubeTensor<R>,
    of_x: DType,
    sizes: norm::Norm,
    types: norm::Types,
}

impl<R: CubeRuntime> Saved<R> {
    fn backward(self, gradients: Vec<Option<CubeTensor<R>>>) -> Vec<Option<CubeTensor<R>>> {
        let Self { n, h, of_x, sizes, types } = self;
        let mut gradients = gradients.into_iter();
        let (d_y, d_h) = (gradients.next().flatten(), gradients.next().flatten());
        let d_h = d_h.map(|d_h| as_given(d_h, h.dtype));
        let Some(d_y) = d_y else {
            // Nobody used the normalised rows: the sum's gradient goes on to both of its terms.
            let narrow = d_h.clone().map(|d_h| as_given(d_h, of_x));
            let rest = n.refill(std::iter::repeat(())).into_vec().len() - 2;
            return [narrow, d_h].into_iter().chain((0..rest).map(|_| None)).collect();
        };
        let d_y = as_given(d_y, n.dtype);
        let given = norm::Given {
            h: &h.handle,
            residual: n.residual.is_some(),
            gate: handle(&n.gate),
            weight: handle(&n.weight),
            bias: handle(&n.bias),
            d_y: &d_y.handle,
            d_h: handle(&d_h),
        };
        let done = norm::backward(&h.client, sizes, types, given)
            .expect("the forward pass took these sizes and types");
        let shape = h.meta.shape().clone();
        let rows = |buffer: Buffer, dtype| shaped(&h, buffer, shape.clone(), dtype);
        let columns = |buffer: Option<Buffer>, like: &Option<CubeTensor<R>>| {
            let like = like.as_ref()?;
            Some(shaped(like, buffer?, like.meta.shape().clone(), like.dtype))
        };
        let x = rows(done.x, h.dtype);
        let narrow = done.x_narrow.map_or_else(|| x.clone(), |narrow| rows(narrow, of_x));
        let gate = done.gate.map(|gate| rows(gate, n.dtype));
        let mut found = vec![Some(narrow)];
        found.extend(n.residual.as_ref().map(|_| Some(x)));
        found.extend(n.weight.as_ref().map(|_| columns(done.weight, &n.weight)));
        found.extend(n.bias.as_ref().map(|_| columns(done.bias, &n.bias)));
        found.extend(n.gate.as_ref().map(|_| gate));
        found
    }
}

pub(super) fn gated<R: CubeRuntime>(
    x: GatedProduct<CubeTensor<R>>,
    keep: bool,
) -> Option<CubePass<R>> {
    let x = x.refill(x.clone().into_vec().into_iter().map(flat));
    let GatedProduct { gate, value, activation } = x;
    let dtype = gate.dtype;
    let one_type = match &value {
        GatedValue::Tensor(value) => value.dtype == dtype,
        GatedValue::Packed | GatedValue::Number(_) => true,
    };
    if !is_float(dtype) || !one_type {
        return None;
    }
    let (count, width) = rows(&gate)?;
    let (width, factor) = match value {
        GatedValue::Packed => (width / 2, 1.0),
        GatedValue::Tensor(_) => (width, 1.0),
        GatedValue::Number(factor) => (width, factor as f32),
    };
    let sizes =
        gated_product::GatedProduct { rows: count, width, activation: activation.into(), factor };
    let storage: StorageType = dtype.into();
    let done =
        gated_product::forward(&gate.client, sizes, operands(&gate, &value), storage).ok()?;
    let mut shape = gate.meta.shape().clone();
    let last = shape.num_dims() - 1;
    shape[last] = width;
    let outputs = vec![shaped(&gate, done, shape, dtype)];
    let backward = keep.then(|| -> Backward<R> {
        Box::new(move |gradients, _| {
            let d_y = as_given(only(gradients), dtype);
            let given = operands(&gate, &value);
            let done = gated_product::backward(&gate.client, sizes, given, &d_y.handle, storage)
                .expect("the forward pass took these sizes and this type");
            let like = |buffer| Some(shaped(&gate, buffer, gate.meta.shape().clone(), dtype));
            match done {
                gated_product::Operands::Packed(gate) | gated_product::Operands::Alone(gate) => {
                    vec![like(gate)]
                }
                gated_product::Operands::Separate { gate, value } => {
                    vec![like(gate), like(value)]
                }
            }
        })
    });
    Some(CubePass { outputs, backward })
}

pub(super) fn rotary<R: CubeRuntime>(x: Rotary<CubeTensor<R>>, keep: bool) -> Option<CubePass<R>> {
    let (x, table) = (flat(x.x), flat(x.table));
    let dtype = x.dtype;
    if !is_float(dtype) || table.dtype != DType::F32 {
        return None;
    }
    let shape = x.meta.shape().clone();
    let [batch, tokens, heads, width] = [0, 1, 2, 3].map(|d| shape[d]);
    let rotated = 2 * table.meta.shape[2];
    let dims = rotation::Dims { batch, tokens, heads, width, rotated };
    let turn = move |x: &CubeTensor<R>, table: &CubeTensor<R>, back| {
        rotation::rotate(&x.client, dims, &x.handle, &table.handle, back, dtype.into())
    };
    let y = turn(&x, &table, false).ok()?;
    let outputs = vec![shaped(&x, y, shape.clone(), dtype)];
    let backward = keep.then(|| -> Backward<R> {
        Box::new(move |gradients, _| {
            let d_y = as_given(only(gradients), dtype);
            let d_x = turn(&d_y, &table, true).expect("the forward pass took these sizes");
            vec![Some(shaped(&d_y, d_x, shape, dtype))]
        })
    });
    Some(CubePass { outputs, backward })
}

fn operands<'a, R: CubeRuntime>(
    gate: &'a CubeTensor<R>,
    value: &'a GatedValue<CubeTensor<R>>,
) -> gated_product::Operands<&'a Handle> {
    let gate = &gate.handle;
    match value {
        GatedValue::Tensor(value) => {
            gated_product::Operands::Separate { gate, value: &value.handle }
        }
        GatedValue::Packed => gated_product::Operands::Packed(gate),
        GatedValue::Number(_) => gated_product::Operands::Alone(gate),
    }
}

/// The gradient of an operation's only output.
pub(super) fn only<R: CubeRuntime>(gradients: Vec<Option<CubeTensor<R>>>) -> CubeTensor<R> {
    gradients.into_iter().next().flatten().expect("its output was used")
}

/// `[.., W]` as `[N, W]`: the same memory.
fn matrix<R: CubeRuntime>(x: CubeTensor<R>, count: usize, width: usize) -> CubeTensor<R> {
    let x = flat(x);
    let shape = Shape::from([count, width]);
    CubeTensor::new_contiguous(x.client, x.device, shape, x.handle, x.dtype)
}

pub(super) fn linear_layer<R: CubeRuntime>(
    l: LinearLayer<CubeTensor<R>>,
    keep: bool,
) -> Option<CubePass<R>> {
    let LinearLayer { x, weight, bias } = l;
    let dtype = x.dtype;
    let (count, inner) = rows(&x)?;
    let of_bias = bias.as_ref().map_or(dtype, |bias| bias.dtype);
    if ![dtype, weight.dtype, of_bias].into_iter().all(is_float) {
        return None;
    }
    let columns = weight.meta.shape()[1];
    let mut shape = x.meta.shape().clone();
    let last = shape.num_dims() - 1;
    shape[last] = columns;
    let (own, of_x) = (weight.dtype, x.meta.shape().clone());
    let weight = if own == dtype { weight } else { cast(weight, dtype) };
    let x = matrix(x, count, inner);
    let mut y = linear::linear(x.clone(), weight.clone(), dtype);
    if let Some(bias) = &bias {
        let row = as_given(bias.clone(), dtype);
        y = add(y, reshaped(row, Shape::from([1, columns])));
    }
    let outputs = vec![reshaped(y, shape)];
    let backward = keep.then(|| -> Backward<R> {
        Box::new(move |gradients, wanted| {
            let d_y = matrix(as_given(only(gradients), dtype), count, columns);
            let d_x = wanted[0]
                .then(|| reshaped(linear::linear_x_gradient(d_y.clone(), weight, dtype), of_x));
            let d_bias = bias.map(|bias| {
                let (from, to) = (dtype.into(), bias.dtype.into());
                let sums =
                    column_sums::column_sums(&d_y.client, &d_y.handle, count, columns, from, to)
                        .expect("the product took these sizes and types");
                Some(shaped(&d_y, sums, Shape::from([columns]), bias.dtype))
            });
            let d_weight = wanted[1].then(|| linear::linear_weight_gradient(x, d_y, own));
            [d_x, d_weight].into_iter().chain(d_bias).collect()
        })
    });
    Some(CubePass { outputs, backward })
}

fn reshaped<R: CubeRuntime>(x: CubeTensor<R>, shape: Shape) -> CubeTensor<R> {
    let x = flat(x);
    CubeTensor::new_contiguous(x.client, x.device, shape, x.handle, x.dtype)
}

/// Places, `[M]`, in an integer type.
pub(super) fn argmax<R: CubeRuntime>(x: CubeTensor<R>, places: DType) -> Option<CubeTensor<R>> {
    let dtype = x.dtype;
    if !is_float(dtype) {
        return None;
    }
    let x = into_contiguous(x);
    let size = [x.meta.shape()[0], x.meta.shape()[1]];
    let types = [dtype.into(), places.into()];
    let done = largest::argmax(&x.client, size, &x.handle, types).ok()?;
    Some(shaped(&x, done, Shape::from([size[0]]), places))
}

pub(super) fn embedding<R: CubeRuntime>(
    e: Embedding<CubeTensor<R>, CubeTensor<R>>,
    keep: bool,
) -> Option<CubePass<R>> {
    let (rows, ids) = (flat(e.table), flat(e.ids));
    let (own, dtype) = (rows.dtype, e.dtype);
    if !is_float(own) || !is_float(dtype) {
        return None;
    }
    let (vocab, width) = (rows.meta.shape()[0], rows.meta.shape()[1]);
    let count = ids.meta.shape().num_elements();
    let dims = table::Dims { rows: count, vocab, width };
    let (id, to) = (ids.dtype.into(), dtype.into());
    let types = table::Types { rows: own.into(), ids: id, out: to };
    let done = table::gather(&rows.client, &rows.handle, &ids.handle, dims, types).ok()?;
    let outputs = vec![shaped(&rows, done, Shape::from([count, width]), dtype)];
    let backward = keep.then(|| -> Backward<R> {
        Box::new(move |gradients, _| {
            let d_y = as_given(only(gradients), dtype);
            let types = table::Types { rows: to, ids: id, out: own.into() };
            let (d_y, ids) = (&d_y.handle, &ids.handle);
            let done = table::table_gradient(&rows.client, d_y, ids, dims, types)
                .expect("the forward pass took these sizes and types");
            vec![Some(shaped(&rows, done, rows.meta.shape().clone(), own))]
        })
    });
    Some(CubePass { outputs, backward })
}

pub(super) fn pack<R: CubeRuntime>(x: Pack<CubeTensor<R>>, keep: bool) -> Option<CubePass<R>> {
    let matrices: Vec<CubeTensor<R>> = x.matrices.into_iter().map(flat).collect();
    let first = matrices.first()?.clone();
    let own = first.dtype;
    let alike = matrices.iter().all(|matrix| matrix.dtype == own);
    if !alike || !is_float(own) || !is_float(x.dtype) {
        return None;
    }
    let rows = first.meta.shape()[0];
    let width = |matrix: &CubeTensor<R>| matrix.meta.shape()[1];
    let widths: Vec<usize> = matrices.iter().map(width).collect();
    let given: Vec<_> = matrices.iter().map(|m| (&m.handle, width(m))).collect();
    let types = packing::Types { matrices: own.into(), packed: x.dtype.into() };
    let done = packing::pack(&first.client, rows, &given, x.padding, types).ok()?;
    let shape = Shape::from([rows, widths.iter().sum::<usize>() + x.padding]);
    let outputs = vec![shaped(&first, done, shape, x.dtype)];
    let backward = keep.then(|| -> Backward<R> {
        // A gradient of full precision stays so on its way to the weights.
        Box::new(move |gradients, _| {
            let d_y = flat(only(gradients));
            let types = packing::Types { matrices: own.into(), packed: d_y.dtype.into() };
            let packed = (&widths[..], x.padding);
            let done = packing::unpack(&d_y.client, rows, packed, &d_y.handle, types)
                .expect("the forward pass took these sizes and types");
            let shaped = |(buffer, width): (Buffer, &usize)| {
                Some(shaped(&d_y, buffer, Shape::from([rows, *width]), own))
            };
            done.into_iter().zip(&widths).map(shaped).collect()
        })
    });
    Some(CubePass { outputs, backward })
}

/// One piece of rows: their losses, and gradients where they are asked for.
struct Piece<R: CubeRuntime> {
    losses: Buffer,
    hidden: Option<CubeTensor<R>>,
    weight: Option<CubeTensor<R>>,
    bias: Option<CubeTensor<R>>,
}

pub(super) fn cross_entropy<R: CubeRuntime>(
    x: LinearCrossEntropy<CubeTensor<R>, CubeTensor<R>>,
    keep: bool,
) -> Option<CubePass<R>> {
    let LinearCrossEntropy { hidden, weight, by_rows, bias, target, scale, frozen } = x;
    let (hidden, weight, target) = (flat(hidden), flat(weight), flat(target));
    let (dtype, own) = (hidden.dtype, weight.dtype);
    let of_bias = bias.as_ref().map_or(DType::F32, |bias| bias.dtype);
    if ![dtype, own, of_bias].into_iter().all(is_float) {
        return None;
    }
    let (count, width) = (hidden.meta.shape()[0], hidden.meta.shape()[1]);
    let vocab = weight.meta.shape()[usize::from(!by_rows)];
    let padding = vocab.next_multiple_of(ALIGNED / dtype.size()) - vocab;
    let most = (LOGITS / (vocab + padding)).max(1).min(count);
    let narrow = with_padding(weight, vocab, padding, by_rows, dtype)?;
    // `[D, V + padding]`, whichever way it lies.
    let columns = if by_rows { linear::transposed(narrow) } else { narrow };
    let bias = match bias.map(flat) {
        Some(bias) => Some(with_padding(bias, vocab, padding, true, of_bias)?),
        None => None,
    };
    let call = Loss { columns, bias, padding, by_rows, own, scale: scale as f32, keep, frozen };
    let (mut d_hidden, mut losses) = (vec![], vec![]);
    let (mut d_weight, mut d_bias) = (None, None);
    for from in (0..count).step_by(most) {
        let rows = most.min(count - from);
        let part = rows_of(&hidden, from, rows);
        let piece = call.piece(part, &entries_of(&target, from, rows), [rows, vocab])?;
        losses.push((piece.losses, rows));
        d_hidden.extend(piece.hidden);
        d_weight = sum(d_weight, piece.weight);
        d_bias = sum(d_bias, piece.bias);
    }
    let total = |(buffer, rows): (Buffer, usize)| {
        let sum = loss::total(&hidden.client, &buffer.handle, rows).ok()?;
        Some(shaped(&hidden, sum, Shape::from([1]), DType::F32))
    };
    let losses: Option<Vec<_>> = losses.into_iter().map(total).collect();
    let loss = losses?.into_iter().fold(None, |all, part| sum(all, Some(part)))?;
    let backward = keep.then(|| -> Backward<R> {
        let d_hidden = joined(d_hidden, Shape::from([count, width]));
        Box::new(move |gradients, _| {
            let factor = only(gradients);
            let times = |d: CubeTensor<R>| Some(scaled(d, &factor));
            let mut found = vec![times(d_hidden), d_weight.and_then(&times)];
            found.extend(d_bias.map(times));
            found
        })
    });
    Some(CubePass { outputs: vec![loss], backward })
}

/// A matrix with `padding` zeros behind the V that it has of rows or of columns, in another type.
fn with_padding<R: CubeRuntime>(
    x: CubeTensor<R>,
    vocab: usize,
    padding: usize,
    by_rows: bool,
    dtype: DType,
) -> Option<CubeTensor<R>> {
    if padding == 0 {
        return Some(if x.dtype == dtype { x } else { cast(x, dtype) });
    }
    let types = packing::Types { matrices: x.dtype.into(), packed: dtype.into() };
    let numbers = x.meta.shape().num_elements();
    // Rows lie one behind another: all of them are one row.
    let (rows, width) = if by_rows { (1, numbers) } else { (numbers / vocab, vocab) };
    let behind = padding * (width / vocab);
    let done = packing::pack(&x.client, rows, &[(&x.handle, width)], behind, types).ok()?;
    let mut shape = x.meta.shape().to_vec();
    shape[if by_rows { 0 } else { 1 }] += padding;
    Some(shaped(&x, done, shape.into(), dtype))
}

/// The last product and its loss.
struct Loss<R: CubeRuntime> {
    /// `[D, V + padding]`.
    columns: CubeTensor<R>,
    /// `[V + padding]`.
    bias: Option<CubeTensor<R>>,
    padding: usize,
    by_rows: bool,
    /// Type of the weight itself.
    own: DType,
    scale: f32,
    keep: bool,
    /// Whether the weight's gradient is not asked for.
    frozen: bool,
}

impl<R: CubeRuntime> Loss<R> {
    fn piece(
        &self,
        hidden: CubeTensor<R>,
        target: &CubeTensor<R>,
        [rows, vocab]: [usize; 2],
    ) -> Option<Piece<R>> {
        let dtype = hidden.dtype;
        let of_bias = self.bias.as_ref().map_or(DType::F32, |bias| bias.dtype);
        let types =
            loss::Types { logits: dtype.into(), bias: of_bias.into(), target: target.dtype.into() };
        let logits = flat(linear::product(hidden.clone(), self.columns.clone(), dtype));
        let inputs = loss::Inputs {
            logits: &logits.handle,
            bias: handle(&self.bias),
            target: &target.handle,
        };
        let kind = loss::Loss { scale: self.scale, gradient: self.keep };
        let dims = loss::Dims { rows, vocab, padding: self.padding };
        let losses = loss::losses(&hidden.client, dims, inputs, kind, types).ok()?;
        if !self.keep {
            return Some(Piece { losses, hidden: None, weight: None, bias: None });
        }
        let weight = match (self.frozen, self.by_rows) {
            (true, _) => None,
            (_, true) => {
                let all = linear::linear_weight_gradient(logits.clone(), hidden.clone(), self.own);
                Some(rows_of(&flat(all), 0, vocab))
            }
            (_, false) => {
                let all = linear::linear_weight_gradient(hidden.clone(), logits.clone(), self.own);
                Some(self.without_padding(flat(all), vocab)?)
            }
        };
        let bias = match &self.bias {
            Some(bias) => {
                let (from, to) = (dtype.into(), bias.dtype.into());
                let (client, columns) = (&hidden.client, vocab + self.padding);
                let sums =
                    column_sums::column_sums(client, &logits.handle, rows, columns, from, to);
                let sums = shaped(bias, sums.ok()?, Shape::from([columns]), bias.dtype);
                Some(entries_of(&sums, 0, vocab))
            }
            None => None,
        };
        let hidden = linear::linear_x_gradient(logits, self.columns.clone(), dtype);
        Some(Piece { losses, hidden: Some(hidden), weight, bias })
    }

    /// The first V columns.
    fn without_padding(&self, x: CubeTensor<R>, vocab: usize) -> Option<CubeTensor<R>> {
        if self.padding == 0 {
            return Some(x);
        }
        let (rows, types) = (x.meta.shape()[0], x.dtype.into());
        let types = packing::Types { matrices: types, packed: types };
        let packed = (&[vocab][..], self.padding);
        let done = packing::unpack(&x.client, rows, packed, &x.handle, types).ok()?;
        Some(shaped(&x, done.into_iter().next()?, Shape::from([rows, vocab]), x.dtype))
    }
}
