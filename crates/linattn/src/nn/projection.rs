//! Projections that read one input: the queries, keys, values and gates of a mixer.
//! ```text
//! y       = x [W_1 W_2 ..] + [b_1 b_2 ..]       one product, of weights packed side by side
//! outputs = conv_split(y)                       convolution, activation, norm of heads, beta, log decay
//! ```

use super::convolution::{ConvPast, ShortConvolution};
use super::log_decay::LogDecayParams;
use super::lora::add_side_by_side;
use super::mixer_input::MixerInput;
use super::{Kept, Linear};
use crate::ops::{
    self, Activation, Column, ColumnKind, ConvSplit, ConvStep, ConvolvedStep, HeadNorm,
    LinearAttentionBackend, QuantizedMatrix, SequenceLengths,
};
use burn::module::Param;
use burn::tensor::{DType, Tensor, TensorPrimitive, backend::Backend, ops::FloatTensor};

/// Columns of a packed projection are a multiple of this: matrix products read and write 16 bytes at once.
const ALIGNED: usize = 8;

/// A short convolution, and the name of its conv state.
pub(crate) type NamedConvolution<'a, B> = (Kept, &'a ShortConvolution<B>);

/// A projection, its short convolution where it has one, and the treatment of its columns.
pub(crate) struct Projection<'a, B: Backend> {
    linear: &'a Linear<B>,
    convolution: Option<NamedConvolution<'a, B>>,
    kind: ColumnKind,
    decay: Option<LogDecayParams<B>>,
}

impl<'a, B: Backend> Projection<'a, B> {
    /// `x W`, as it is.
    pub(crate) fn plain(linear: &'a Linear<B>) -> Self {
        Self { linear, convolution: None, kind: ColumnKind::Copy, decay: None }
    }

    /// `activation(conv(x W))`, with heads of some length where `norm` asks for it.
    pub(crate) fn convolved(
        linear: &'a Linear<B>,
        convolution: Option<NamedConvolution<'a, B>>,
        activation: Option<Activation>,
        norm: Option<HeadNorm>,
    ) -> Self {
        let kind = match (convolution, activation, norm) {
            (None, None, None) => ColumnKind::Copy,
            _ => ColumnKind::Conv { activation, norm },
        };
        Self { linear, convolution, kind, decay: None }
    }

    /// `scale * sigmoid(x W)`, in f32 at least.
    pub(crate) fn beta(linear: &'a Linear<B>, scale: f64) -> Self {
        Self { kind: ColumnKind::Beta { scale }, ..Self::plain(linear) }
    }

    /// The log decay of `x W`, in f32 at least. A mixer has one.
    pub(crate) fn log_decay(linear: &'a Linear<B>, decay: LogDecayParams<B>) -> Self {
        Self { kind: ColumnKind::LogDecay, decay: Some(decay), ..Self::plain(linear) }
    }

    fn width(&self) -> usize {
        self.linear.weight.dims()[1]
    }

    fn column(&self) -> Column {
        Column { width: self.width(), kind: self.kind }
    }

    fn is_convolved(&self) -> bool {
        matches!(self.kind, ColumnKind::Conv { .. })
    }

    /// W of its convolution.
    fn window(&self) -> Option<usize> {
        self.convolution.map(|(_, convolution)| convolution.weight.dims()[0])
    }
}

/// Heads of length `factor`, of `columns` columns in all.
pub(crate) fn head_norm(columns: usize, heads: usize, factor: f64) -> Option<HeadNorm> {
    Some(HeadNorm { width: columns / heads, factor })
}

/// The projections of `x`, `[B, T, D]`, each through its convolution and treatment: `[B, T, width]` each.
pub(crate) fn project<B: LinearAttentionBackend, const N: usize>(
    x: &Tensor<B, 3>,
    projections: [Projection<'_, B>; N],
    conv_states: &mut ConvPast<B>,
) -> [Tensor<B, 3>; N] {
    let mut outputs = project_all(x, projections.into(), conv_states).into_iter();
    std::array::from_fn(|_| outputs.next().expect("an output for each projection"))
}

/// As [`project`], of any number of projections.
///
/// They are one product and one operation after it, if all convolutions have one window. A single token goes
/// through each projection by itself where the backend would have to pack the weights, which reads them twice.
pub(crate) fn project_all<B: LinearAttentionBackend>(
    x: &Tensor<B, 3>,
    projections: Vec<Projection<'_, B>>,
    conv_states: &mut ConvPast<B>,
) -> Vec<Tensor<B, 3>> {
    project_input(&mut MixerInput::of(x.clone()), projections, conv_states)
}

/// As [`project_all`], of an input whose norm may be still to come.
pub(crate) fn project_input<B: LinearAttentionBackend>(
    x: &mut MixerInput<'_, B>,
    projections: Vec<Projection<'_, B>>,
    conv_states: &mut ConvPast<B>,
) -> Vec<Tensor<B, 3>> {
    match Packed::of(x, &projections, conv_states) {
        Some(packed) => packed.outputs(conv_states),
        None => each_alone(x, &projections, conv_states),
    }
}

/// A memory whose recurrence is linear attention, or a delta rule where one of the projections is a beta.
pub(crate) struct TokenMemory<B: Backend> {
    pub(crate) key_heads: usize,
    pub(crate) heads: usize,
    /// `[B, H, K, V]`; nothing at the start of a sequence.
    pub(crate) state: Option<Tensor<B, 4>>,
}

/// Outputs of projections; or, of a token where the backend has such a launch, a memory's answer to them.
pub(crate) enum Projected<B: Backend, T> {
    Outputs(T),
    Answer {
        /// `[B, 1, H, V]`.
        o: Tensor<B, 4>,
        /// `[B, H, K, V]`.
        memory: Tensor<B, 4>,
        /// The one projection that is as it is, `[B, 1, width]`.
        copied: Option<Tensor<B, 3>>,
    },
}

impl<B: Backend, T> Projected<B, T> {
    /// The same with other outputs.
    pub(crate) fn map<U>(self, outputs: impl FnOnce(T) -> U) -> Projected<B, U> {
        match self {
            Self::Outputs(found) => Projected::Outputs(outputs(found)),
            Self::Answer { o, memory, copied } => Projected::Answer { o, memory, copied },
        }
    }
}

/// As [`project_input`], of projections whose first three are queries, keys and values; a single token's go through
/// `memory` in the same launch as their convolutions, where there is one and the backend has such a launch.
pub(crate) fn project_token<B: LinearAttentionBackend>(
    x: &mut MixerInput<'_, B>,
    projections: Vec<Projection<'_, B>>,
    memory: Option<TokenMemory<B>>,
    conv_states: &mut ConvPast<B>,
) -> Projected<B, Vec<Tensor<B, 3>>> {
    let Some(packed) = Packed::of(x, &projections, conv_states) else {
        return Projected::Outputs(each_alone(x, &projections, conv_states));
    };
    let answer = memory.and_then(|memory| packed.answer(memory, conv_states));
    answer.unwrap_or_else(|| Projected::Outputs(packed.outputs(conv_states)))
}

fn each_alone<B: LinearAttentionBackend>(
    x: &mut MixerInput<'_, B>,
    projections: &[Projection<'_, B>],
    conv_states: &mut ConvPast<B>,
) -> Vec<Tensor<B, 3>> {
    let x = x.take_rows();
    projections.iter().map(|one| alone(&x, one, conv_states)).collect()
}

/// Convolved projections have a convolution of one window, or none has; there is one log decay.
fn can_pack<B: Backend>(projections: &[Projection<'_, B>]) -> bool {
    let mut windows = projections.iter().filter(|p| p.is_convolved()).map(Projection::window);
    let first = windows.next();
    projections.len() <= ops::MOST_PACKED
        && windows.all(|window| Some(window) == first)
        && projections.iter().filter(|p| p.decay.is_some()).count() <= 1
}

/// All projections as one product, whose convolutions and gates are still to come.
struct Packed<'a, B: Backend> {
    y: Tensor<B, 3>,
    columns: Vec<Column>,
    /// Which projection the columns are those of.
    order: Vec<usize>,
    convolutions: Convolutions<'a, B>,
    decay: Option<LogDecayParams<B>>,
}

impl<'a, B: LinearAttentionBackend> Packed<'a, B> {
    /// Nothing where projections by themselves are faster, or have no form in common.
    fn of(
        x: &mut MixerInput<'_, B>,
        projections: &[Projection<'a, B>],
        conv_states: &mut ConvPast<B>,
    ) -> Option<Self> {
        if !can_pack(projections) {
            return None;
        }
        // Columns that are convolved come first; of the others quantized ones, so that each kind is one product.
        let is_float = |i: usize| projections[i].linear.weight.quantized().is_none();
        let mut order: Vec<usize> = (0..projections.len()).collect();
        order.sort_by_key(|&i| (!projections[i].is_convolved(), is_float(i)));
        let sorted: Vec<_> = order.iter().map(|&i| &projections[i]).collect();

        let columns: Vec<Column> = sorted.iter().map(|p| p.column()).collect();
        let linears: Vec<_> = sorted.iter().map(|p| p.linear).collect();
        let weights: Option<Vec<_>> = linears.iter().map(|linear| linear.weight_alone()).collect();
        let y = match weights.and_then(|weights| x.product(&weights)) {
            Some(y) => y,
            None => packed_product(&x.take_rows(), &linears, padding(&columns))?,
        };
        let convolutions = Convolutions::of(&sorted, conv_states);
        let decay = sorted.iter().find_map(|p| p.decay.clone());
        Some(Self { y, columns, order, convolutions, decay })
    }

    /// The answer of `memory` to a single token, in the launch that has the convolutions; nothing where this backend has
    /// none, or queries, keys and values are not the first columns.
    fn answer(
        &self,
        memory: TokenMemory<B>,
        conv_states: &mut ConvPast<B>,
    ) -> Option<Projected<B, Vec<Tensor<B, 3>>>> {
        if !self.order.starts_with(&[0, 1, 2]) {
            return None;
        }
        let Self { y, columns, convolutions, decay, .. } = self;
        let TokenMemory { key_heads, heads, state } = memory;
        let token = convolutions.token(y, columns.clone(), decay, conv_states)?;
        let state = state.map(inside);
        let answer = ops::convolved_step::<B>(&ConvolvedStep { token, key_heads, heads, state })?;
        convolutions.keep(answer.conv_states, conv_states);
        let (o, memory, copied) = (answer.o, answer.memory, answer.copied);
        Some(Projected::Answer { o, memory, copied })
    }

    /// An output for each projection, in the order in which these were given.
    fn outputs(self, conv_states: &mut ConvPast<B>) -> Vec<Tensor<B, 3>> {
        let Self { y, columns, order, convolutions, decay } = self;
        let outputs = match convolutions.step(&y, &columns, &decay, conv_states) {
            Some(outputs) => outputs,
            None => {
                let convolution = convolutions.packed(&y, conv_states);
                Split { y, columns, convolution, decay }.outputs()
            }
        };
        let mut sorted: Vec<_> = order.into_iter().zip(outputs).collect();
        sorted.sort_by_key(|(place, _)| *place);
        sorted.into_iter().map(|(_, output)| output).collect()
    }
}

/// Linear layers of one input as one product, and `padding` columns of zeros behind it where weights are packed;
/// nothing for a single token where they would have to be.
pub(crate) fn packed_product<B: LinearAttentionBackend, const D: usize>(
    x: &Tensor<B, D>,
    layers: &[&Linear<B>],
    padding: usize,
) -> Option<Tensor<B, D>> {
    let widths = layers.iter().map(|layer| layer.weight.dims()[1]);
    let biases = layers.iter().map(|layer| layer.bias.as_ref()).zip(widths.clone());
    let single = D <= 2 || x.dims()[D - 2] == 1;
    // Of several tokens matrices of 16 bits may be read where they lie, which tensor cores do, if all are floats: a product
    // of some would be in vain without that of the others.
    let floats = || layers.iter().all(|layer| layer.weight.quantized().is_none());
    let in_place = single || (x.dtype().size() == 2 && floats());
    let side_by_side = in_place.then(|| layers_side_by_side(x, layers)).flatten();
    let y = match side_by_side {
        Some(y) => match packed_bias(biases, 0, x.dtype()) {
            Some(bias) => y + bias.unsqueeze(),
            None => y,
        },
        None if single => return None,
        None => {
            let weights = layers.iter().map(|layer| layer.weight.val()).collect();
            let weight = ops::pack(weights, padding, x.dtype());
            let bias = packed_bias(biases, padding, x.dtype());
            ops::affine(x.clone(), weight, bias).expect("every layer reads `x`")
        }
    };
    let adapters: Vec<_> = layers.iter().map(|layer| &layer.adapter).zip(widths).collect();
    Some(add_side_by_side(y, x, &adapters))
}

/// Columns of zeros behind `columns`, for the product's sake.
pub(crate) fn padding(columns: &[Column]) -> usize {
    let width: usize = columns.iter().map(|column| column.width).sum();
    width.next_multiple_of(ALIGNED) - width
}

/// Biases side by side, zeros where there is none; nothing where none has one.
fn packed_bias<'a, B: LinearAttentionBackend>(
    biases: impl Iterator<Item = (Option<&'a Param<Tensor<B, 1>>>, usize)> + Clone,
    padding: usize,
    dtype: DType,
) -> Option<Tensor<B, 1>> {
    let given = biases.clone().find_map(|(bias, _)| bias)?.val();
    let row = |(bias, width): (Option<&Param<Tensor<B, 1>>>, usize)| match bias {
        Some(bias) => bias.val().unsqueeze::<2>(),
        None => Tensor::zeros([1, width], (&given.device(), given.dtype())),
    };
    Some(ops::pack(biases.map(row).collect(), padding, dtype).squeeze_dim(0))
}

/// The convolutions of the first columns of a packed projection, and the conv states before its tokens.
struct Convolutions<'a, B: Backend> {
    names: Vec<Kept>,
    layers: Vec<&'a ShortConvolution<B>>,
    before: Vec<Tensor<B, 3>>,
}

impl<'a, B: LinearAttentionBackend> Convolutions<'a, B> {
    fn of(projections: &[&Projection<'a, B>], conv_states: &mut ConvPast<B>) -> Self {
        let (names, layers): (Vec<_>, _) = projections.iter().filter_map(|p| p.convolution).unzip();
        let before = names.iter().filter_map(|name| conv_states.draw(*name)).collect();
        Self { names, layers, before }
    }

    /// A single token's convolutions, of these columns of `y`; nothing where there are none, or more tokens.
    fn token(
        &self,
        y: &Tensor<B, 3>,
        columns: Vec<Column>,
        decay: &Option<LogDecayParams<B>>,
        conv_states: &ConvPast<B>,
    ) -> Option<ConvStep<FloatTensor<B>>> {
        let biases: Vec<_> = self.layers.iter().filter_map(|c| c.bias.as_ref()).collect();
        let alike = biases.is_empty() || biases.len() == self.layers.len();
        let single = y.dims()[1] == 1 && conv_states.lengths().is_none();
        if self.layers.is_empty() || !alike || !single {
            return None;
        }
        Some(ConvStep {
            x: inside(y.clone()),
            weights: self.layers.iter().map(|c| inside(c.weight.val())).collect(),
            biases: biases.into_iter().map(|bias| inside(bias.val())).collect(),
            conv_states: self.before.iter().cloned().map(inside).collect(),
            a_log: decay.as_ref().map(|decay| inside(decay.a_log.clone())),
            dt_bias: decay.as_ref().map(|decay| inside(decay.dt_bias.clone())),
            columns,
        })
    }

    /// All outputs of a single token in one launch; nothing where this backend has none, or there are no convolutions.
    fn step(
        &self,
        y: &Tensor<B, 3>,
        columns: &[Column],
        decay: &Option<LogDecayParams<B>>,
        conv_states: &mut ConvPast<B>,
    ) -> Option<Vec<Tensor<B, 3>>> {
        let all = padded(columns, y.dims()[2]);
        let token = self.token(y, all, decay, conv_states)?;
        let [mut outputs, next] = ops::conv_step::<B>(&token)?;
        self.keep(next, conv_states);
        outputs.truncate(columns.len());
        Some(outputs)
    }

    /// Leaves the conv states after a token.
    fn keep(&self, next: Vec<Tensor<B, 3>>, conv_states: &mut ConvPast<B>) {
        self.names.iter().zip(next).for_each(|(name, state)| conv_states.keep(*name, state));
    }

    /// All of them as one, where there are any.
    fn packed(self, y: &Tensor<B, 3>, conv_states: &mut ConvPast<B>) -> Option<Convolution<B>> {
        let Self { names, layers, before } = self;
        let [window, _] = layers.first()?.weight.dims();
        let widths: Vec<usize> = layers.iter().map(|c| c.weight.dims()[1]).collect();
        let lengths = conv_states.lengths().cloned();
        conv_states.keep_last(y, window, (&names, &widths), &before);
        let weights: Vec<_> = layers.iter().map(|c| c.weight.val()).collect();
        let dtype = weights[0].dtype();
        let biases = layers.iter().map(|c| (c.bias.as_ref(), c.weight.dims()[1]));
        Some(Convolution {
            bias: packed_bias(biases, 0, dtype),
            weight: ops::pack(weights, 0, dtype),
            conv_state: (!before.is_empty()).then(|| side_by_side(before, y.dtype())),
            lengths,
        })
    }
}

/// `columns`, and those that are left of `all` as padding.
fn padded(columns: &[Column], all: usize) -> Vec<Column> {
    let mut columns = columns.to_vec();
    let padding = all - columns.iter().map(|column| column.width).sum::<usize>();
    if padding > 0 {
        columns.push(Column { width: padding, kind: ColumnKind::Copy });
    }
    columns
}

/// Linear layers of one input, for a single token: neighbours whose weights are kept alike as one product. Nothing
/// where this backend has no such product.
fn layers_side_by_side<B: LinearAttentionBackend, const D: usize>(
    x: &Tensor<B, D>,
    layers: &[&Linear<B>],
) -> Option<Tensor<B, D>> {
    let bits = |layer: &Linear<B>| layer.weight.quantized().map(QuantizedMatrix::bits);
    let runs: Vec<_> = layers.chunk_by(|a, b| bits(a) == bits(b)).collect();
    if let [quantized, floats] = runs[..]
        && let Some(y) = mixed(x, quantized, floats)
    {
        return Some(y);
    }
    // Floats come first: a backend without their product multiplies nothing in vain.
    let mut order: Vec<usize> = (0..runs.len()).collect();
    order.sort_by_key(|&i| bits(runs[i][0]).is_some());
    let products = order.into_iter().map(|i| Some((i, alike(x, runs[i])?)));
    let mut products: Vec<_> = products.collect::<Option<_>>()?;
    products.sort_by_key(|(place, _)| *place);
    let mut products: Vec<_> = products.into_iter().map(|(_, product)| product).collect();
    if products.len() == 1 {
        return products.pop();
    }
    Some(side_by_side(products, x.dtype()))
}

/// As [`layers_side_by_side`], of quantized layers and narrow ones of floats behind them, in one launch.
fn mixed<B: LinearAttentionBackend, const D: usize>(
    x: &Tensor<B, D>,
    quantized: &[&Linear<B>],
    floats: &[&Linear<B>],
) -> Option<Tensor<B, D>> {
    let matrices = quantized.iter().map(|layer| layer.weight.quantized());
    let matrices: Vec<_> = matrices.collect::<Option<_>>()?;
    if floats.iter().any(|layer| layer.weight.quantized().is_some()) {
        return None;
    }
    ops::mixed_linear(x.clone(), &matrices, floats.iter().map(|layer| layer.weight.val()))
}

/// As [`layers_side_by_side`], of layers that are all quantized, or all not.
fn alike<B: LinearAttentionBackend, const D: usize>(
    x: &Tensor<B, D>,
    layers: &[&Linear<B>],
) -> Option<Tensor<B, D>> {
    let quantized: Option<Vec<_>> = layers.iter().map(|layer| layer.weight.quantized()).collect();
    match quantized {
        Some(matrices) => ops::quantized_linear(x.clone(), &matrices),
        None => {
            let weights = layers.iter().map(|layer| layer.weight.val()).collect();
            ops::side_by_side(x.clone(), weights)
        }
    }
}

/// Tensors of as many rows, `[.., C_i]`, as one.
fn side_by_side<B: LinearAttentionBackend, const D: usize>(
    parts: Vec<Tensor<B, D>>,
    dtype: DType,
) -> Tensor<B, D> {
    let mut shape = parts[0].dims();
    let rows = parts.into_iter().map(|part| part.flatten::<2>(0, D - 2)).collect();
    let rows = ops::pack(rows, 0, dtype);
    shape[D - 1] = rows.dims()[1];
    rows.reshape(shape)
}

/// One projection by itself.
fn alone<B: LinearAttentionBackend>(
    x: &Tensor<B, 3>,
    projection: &Projection<'_, B>,
    conv_states: &mut ConvPast<B>,
) -> Tensor<B, 3> {
    let y = projection.linear.forward(x.clone());
    if projection.kind == ColumnKind::Copy {
        return y;
    }
    let convolution = projection.convolution.map(|c| Convolution::of(c, &y, conv_states));
    let (columns, decay) = (vec![projection.column()], projection.decay.clone());
    Split { y, columns, convolution, decay }.outputs().remove(0)
}

/// A convolution's weights, the tokens before, and the lengths of sequences in one row.
pub(crate) struct Convolution<B: Backend> {
    weight: Tensor<B, 2>,
    bias: Option<Tensor<B, 1>>,
    conv_state: Option<Tensor<B, 3>>,
    lengths: Option<SequenceLengths>,
}

impl<B: LinearAttentionBackend> Convolution<B> {
    /// Of the first columns of `y`, between a layer's conv states.
    pub(crate) fn of(
        (name, layer): NamedConvolution<'_, B>,
        y: &Tensor<B, 3>,
        conv_states: &mut ConvPast<B>,
    ) -> Self {
        let weight = layer.weight.val();
        let [window, width] = weight.dims();
        let lengths = conv_states.lengths().cloned();
        let conv_state = conv_states.draw(name);
        conv_states.keep_last(y, window, (&[name], &[width]), conv_state.as_slice());
        Self { weight, bias: layer.bias.as_ref().map(Param::val), conv_state, lengths }
    }
}

/// A packed projection, `[B, T, P]`, and the treatment of its columns; convolved ones come first, and columns
/// behind the last are padding.
pub(crate) struct Split<B: Backend> {
    pub(crate) y: Tensor<B, 3>,
    pub(crate) columns: Vec<Column>,
    pub(crate) convolution: Option<Convolution<B>>,
    pub(crate) decay: Option<LogDecayParams<B>>,
}

impl<B: LinearAttentionBackend> Split<B> {
    /// `[B, T, width]` for each entry of `columns`.
    pub(crate) fn outputs(self) -> Vec<Tensor<B, 3>> {
        let Self { y, columns, convolution, decay } = self;
        let (dtype, asked) = (y.dtype(), columns.len());
        let columns = padded(&columns, y.dims()[2]);
        let (weight, bias, conv_state, lengths) = match convolution {
            Some(Convolution { weight, bias, conv_state, lengths }) => {
                (Some(weight), bias, conv_state, lengths)
            }
            None => (None, None, None, None),
        };
        let (a_log, dt_bias) = match decay {
            Some(LogDecayParams { a_log, dt_bias }) => (Some(a_log), Some(dt_bias)),
            None => (None, None),
        };
        let mut outputs = ops::conv_split::<B>(ConvSplit {
            x: inside(y),
            weight: weight.map(inside),
            bias: bias.map(inside),
            conv_state: conv_state.map(|conv_state| inside(ops::typed(conv_state, dtype))),
            a_log: a_log.map(inside),
            dt_bias: dt_bias.map(inside),
            columns,
            lengths,
        });
        outputs.truncate(asked);
        outputs
    }
}

/// The columns of `y`, `[B, T, P]`, as tensors of their own, of these widths.
pub(crate) fn split_columns<B: LinearAttentionBackend, const N: usize>(
    y: Tensor<B, 3>,
    widths: [usize; N],
) -> [Tensor<B, 3>; N] {
    let columns = widths.map(|width| Column { width, kind: ColumnKind::Copy }).into();
    let mut outputs = Split { y, columns, convolution: None, decay: None }.outputs().into_iter();
    widths.map(|_| outputs.next().expect("an output for each width"))
}

/// The halves of `y`, `[B, T, 2 I]`: the first through a convolution, kept as [`Kept::Input`], and SiLU.
pub(crate) fn convolved_half<B: LinearAttentionBackend>(
    y: Tensor<B, 3>,
    convolution: &ShortConvolution<B>,
    conv_states: &mut ConvPast<B>,
) -> [Tensor<B, 3>; 2] {
    let width = y.dims()[2] / 2;
    let convolution = Some(Convolution::of((Kept::Input, convolution), &y, conv_states));
    let silu = ColumnKind::Conv { activation: Some(Activation::Silu), norm: None };
    let columns = [silu, ColumnKind::Copy].map(|kind| Column { width, kind }).into();
    let mut halves = Split { y, columns, convolution, decay: None }.outputs().into_iter();
    std::array::from_fn(|_| halves.next().expect("an output for each of two columns"))
}

fn inside<B: Backend, const D: usize>(x: Tensor<B, D>) -> FloatTensor<B> {
    match x.into_primitive() {
        TensorPrimitive::Float(x) => x,
        TensorPrimitive::QFloat(_) => unreachable!("weights and activations are not quantised"),
    }
}
