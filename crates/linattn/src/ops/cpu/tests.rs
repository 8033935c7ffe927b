//! Every operation of this folder against the same one in tensor operations, in f64.

use super::super::SequenceLengths;
use super::super::backend::LinearAttentionBackend;
use super::super::fused::*;
use super::super::pass::Pass;
use super::super::recurrence::{Forward, LogDecay, Read, Recurrence, Transition};
use super::super::tensors::float_cat;
use burn::backend::autodiff::Autodiff;
use burn::tensor::ops::{FloatTensor, FloatTensorOps, ModuleOps};
use burn::tensor::{
    DType, Int, Tensor, TensorData, TensorMetadata, TensorPrimitive, backend::Backend,
};
use burn_flex::Flex;
use linattn_oracle::{Rng, assert_close};

type Graph = Autodiff<Flex>;
type Node = FloatTensor<Graph>;

/// How an input lies in memory.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Lies {
    InRows,
    Swapped,
    Narrowed,
}

pub(super) const ALL: [Lies; 3] = [Lies::InRows, Lies::Swapped, Lies::Narrowed];

/// A leaf and what is made of it.
pub(super) struct Input {
    leaf: Tensor<Graph, 1>,
    pub(super) node: Node,
}

pub(super) fn input(rng: &mut Rng, shape: &[usize], lies: Lies, dtype: DType) -> Input {
    let mut stored = shape.to_vec();
    let last = shape.len() - 1;
    match lies {
        Lies::InRows => {}
        Lies::Swapped => stored.swap(0, last),
        Lies::Narrowed => stored[last] += 3,
    }
    let count: usize = stored.iter().product();
    let values: Vec<f64> = (0..count).map(|_| rng.normal()).collect();
    let data = TensorData::new(values, [count]);
    let leaf = Tensor::<Graph, 1>::from_data(data, (&Default::default(), dtype)).require_grad();
    let node = Graph::float_reshape(leaf.clone().into_primitive().tensor(), stored.into());
    let node = match lies {
        Lies::InRows => node,
        Lies::Swapped => Graph::float_swap_dims(node, 0, last),
        Lies::Narrowed => {
            let part: Vec<_> = shape.iter().map(|&size| (0..size).into()).collect();
            Graph::float_slice(node, &part)
        }
    };
    Input { leaf, node }
}

fn values<B: Backend>(x: FloatTensor<B>) -> Vec<f64> {
    let count = x.shape().num_elements();
    let x =
        Tensor::<B, 1>::from_primitive(TensorPrimitive::Float(B::float_reshape(x, [count].into())));
    x.into_data().iter::<f64>().collect()
}

/// Outputs, and gradients of all leaves, of a loss that looks at the outputs in `seen`.
pub(super) fn run(
    inputs: Vec<Input>,
    seen: &[usize],
    f: impl FnOnce(Vec<Node>) -> Vec<Node>,
) -> (Vec<Vec<f64>>, Vec<Vec<f64>>) {
    let (leaves, nodes): (Vec<_>, Vec<_>) = inputs.into_iter().map(|x| (x.leaf, x.node)).unzip();
    let outputs = f(nodes);
    let mut loss: Option<Tensor<Graph, 1>> = None;
    for &i in seen {
        let (x, dtype) = (outputs[i].clone(), outputs[i].dtype());
        let count = x.shape().num_elements();
        let x = Graph::float_reshape(x, [count].into());
        let mut rng = Rng::new(100 + i as u64);
        let weights: Vec<f64> = (0..count).map(|_| rng.normal()).collect();
        let weights = TensorData::new(weights, [count]);
        let weights = Tensor::<Graph, 1>::from_data(weights, (&Default::default(), dtype));
        let part = (Tensor::from_primitive(TensorPrimitive::Float(x)) * weights).sum();
        loss = Some(loss.map_or(part.clone(), |loss| loss + part));
    }
    let gradients = loss.unwrap().backward();
    let of = |leaf: &Tensor<Graph, 1>| {
        let d = leaf.grad(&gradients).map(|d| d.into_data().iter::<f64>().collect());
        d.unwrap_or_else(|| vec![0.0; leaf.dims()[0]])
    };
    let found = leaves.iter().map(of).collect();
    (outputs.into_iter().map(values::<Graph>).collect(), found)
}

/// The operation in one piece against that in tensor operations, for inputs that lie in any way, and
/// losses that see any of the outputs.
fn check(
    name: &str,
    shapes: &[&[usize]],
    outputs: usize,
    piece: impl Fn(Vec<Node>) -> Option<Pass<Graph>>,
    reference: impl Fn(Vec<Node>) -> Vec<Node>,
) {
    for (n, lies) in ALL.into_iter().enumerate() {
        let seen: Vec<usize> = match n {
            0 => (0..outputs).collect(),
            n => vec![(n - 1) % outputs],
        };
        let inputs = || {
            let mut rng = Rng::named(n as u64, name);
            shapes.iter().map(|shape| input(&mut rng, shape, lies, DType::F64)).collect()
        };
        let (want, d_want) = run(inputs(), &seen, &reference);
        let (got, d_got) = run(inputs(), &seen, |x| piece(x).expect("a piece").outputs);
        for (i, (want, got)) in want.iter().zip(&got).enumerate() {
            assert_close(&format!("{name}, {lies:?}, output {i}"), want, got, 1e-12);
        }
        for (i, (want, got)) in d_want.iter().zip(&d_got).enumerate() {
            assert_close(&format!("{name}, {lies:?}, gradient {i}"), want, got, 1e-10);
        }
    }
}

fn of<const D: usize>(x: Tensor<Graph, D>) -> Node {
    x.into_primitive().tensor()
}

fn some_of(mut x: impl Iterator<Item = Node>, there: bool) -> Option<Node> {
    there.then(|| x.next().unwrap())
}

#[test]
fn norms_are_those_of_tensor_operations() {
    for measure in [Measure::RootMeanSquare, Measure::Length, Measure::Standard] {
        for (rows, width, parts) in
            [(3, 5, 0b0000), (67, 33, 0b1111), (500, 16, 0b0010), (9, 64, 0b1001)]
        {
            let has = |i: usize| parts >> i & 1 == 1;
            let (all_rows, row) = ([2, rows, width], [width]);
            let all = [&all_rows[..], &row[..], &row[..], &all_rows[..]];
            let mut shapes = vec![&all_rows[..]];
            shapes.extend((0..4).filter(|&i| has(i)).map(|i| all[i]));
            let norm = |x: Vec<Node>| {
                let mut x = x.into_iter();
                Normalization {
                    x: x.next().unwrap(),
                    residual: some_of(&mut x, has(0)),
                    weight: some_of(&mut x, has(1)),
                    bias: some_of(&mut x, has(2)),
                    gate: some_of(&mut x, has(3)),
                    activation: if width == 33 { Activation::Sigmoid } else { Activation::Silu },
                    measure,
                    epsilon: 1e-3,
                    factor: if width == 16 { 1.0 } else { 0.3 },
                    dtype: DType::F64,
                }
            };
            let outputs = 1 + usize::from(has(0));
            let name = format!("{measure:?} of {rows} x {width}, {parts:b}");
            check(
                &name,
                &shapes,
                outputs,
                |x| Graph::fused_normalize(norm(x), false),
                |x| {
                    let (y, h) = normalize_in_tensor_ops::<Graph, 3>(norm(x));
                    std::iter::once(y).chain(h).map(of).collect()
                },
            );
        }
    }
}

const GATES: [GateActivation; 7] = [
    GateActivation::Silu,
    GateActivation::Sigmoid,
    GateActivation::Softplus,
    GateActivation::LogSigmoid,
    GateActivation::Gelu,
    GateActivation::GeluTanh,
    GateActivation::SquaredRelu,
];

#[test]
fn products_with_a_gate_are_those_of_tensor_operations() {
    for activation in GATES {
        for shape in [[3, 5, 7], [2, 300, 16], [1, 1, 1]] {
            let two = |x: Vec<Node>| {
                let [gate, value] = x.try_into().unwrap();
                GatedProduct { gate, value: GatedValue::Tensor(value), activation }
            };
            let one = |value: GatedValue<Node>| {
                move |mut x: Vec<Node>| GatedProduct {
                    gate: x.remove(0),
                    value: value.clone(),
                    activation,
                }
            };
            let name = format!("{activation:?} {shape:?}");
            let reference = |p| vec![of(gated_in_tensor_ops::<Graph, 3>(p))];
            let piece = |x| Graph::fused_gated_product(two(x), false);
            check(&name, &[&shape, &shape], 1, piece, |x| reference(two(x)));
            let packed = [shape[0], shape[1], 2 * shape[2]];
            let halves = one(GatedValue::Packed);
            let piece = |x| Graph::fused_gated_product(halves(x), false);
            check(&format!("{name}, halves"), &[&packed], 1, piece, |x| reference(halves(x)));
            let alone = one(GatedValue::Number(-0.7));
            let piece = |x| Graph::fused_gated_product(alone(x), false);
            check(&format!("{name}, alone"), &[&shape], 1, piece, |x| reference(alone(x)));
        }
    }
}

#[test]
fn rotated_rows_are_those_of_tensor_operations() {
    for ([batch, tokens, heads, width], half) in
        [([2, 5, 3, 8], 4), ([1, 70, 2, 10], 3), ([3, 1, 1, 2], 1), ([2, 300, 4, 16], 8)]
    {
        let (x, table) = ([batch, tokens, heads, width], [2, tokens, half]);
        let rotary = |x: Vec<Node>| {
            let [x, table] = x.try_into().unwrap();
            Rotary { x, table }
        };
        // No gradient is taken of the table.
        let reference = |x| {
            let Rotary { x, table } = rotary(x);
            vec![of(rotary_in_tensor_ops::<Graph>(Rotary { x, table: Graph::float_detach(table) }))]
        };
        let piece = |x| Graph::fused_rotary(rotary(x), false);
        check(&format!("rotation, {x:?}, {half}"), &[&x, &table], 1, piece, reference);
    }
}

#[test]
fn shares_are_those_of_tensor_operations() {
    let causal = |window| Seen::Causal { window };
    for (shape, seen) in [
        ([2, 3, 5, 5], causal(None)),
        ([1, 2, 33, 70], causal(Some(8))),
        ([2, 1, 1, 9], causal(Some(20))),
        ([1, 1, 300, 300], causal(Some(1))),
        ([2, 5, 3, 129], Seen::All),
    ] {
        let rows = |x: Vec<Node>| SoftmaxRows { scores: x.into_iter().next().unwrap(), seen };
        let reference = |x| vec![of(softmax_in_tensor_ops::<Graph, 4>(rows(x)))];
        let piece = |x| Graph::fused_softmax(rows(x), false);
        check(&format!("shares, {shape:?}, {seen:?}"), &[&shape], 1, piece, reference);
    }
}

#[test]
fn linear_layers_are_those_of_tensor_operations() {
    for (rows, from, to, biased) in [(3, 5, 7, true), (600, 9, 33, false), (1, 64, 1030, true)] {
        let layer = |x: Vec<Node>| {
            let mut x = x.into_iter();
            let (rows, weight) = (x.next().unwrap(), x.next().unwrap());
            LinearLayer { x: rows, weight, bias: x.next() }
        };
        let (x, weight, bias) = ([2, rows, from], [from, to], [to]);
        let mut shapes = vec![&x[..], &weight[..]];
        shapes.extend(biased.then_some(&bias[..]));
        let name = format!("{rows} rows, {from} to {to}");
        check(
            &name,
            &shapes,
            1,
            |x| Graph::fused_linear(layer(x), false),
            |x| {
                let LinearLayer { x, weight, bias } = layer(x);
                vec![Graph::linear(x, weight, bias)]
            },
        );
    }
}

#[test]
fn linear_layers_of_blocks_are_those_of_tensor_operations() {
    for (tokens, heads, from, to, biased) in
        [(3, 2, 5, 7, true), (600, 16, 4, 4, false), (1, 3, 64, 33, true), (700, 1, 6, 2, true)]
    {
        let layer = |x: Vec<Node>| {
            let mut x = x.into_iter();
            let (rows, weight) = (x.next().unwrap(), x.next().unwrap());
            LinearLayer { x: rows, weight, bias: x.next() }
        };
        let (x, weight, bias) = ([2, tokens, heads * from], [heads, from, to], [heads * to]);
        let mut shapes = vec![&x[..], &weight[..]];
        shapes.extend(biased.then_some(&bias[..]));
        let name = format!("{tokens} tokens, {heads} times {from} to {to}");
        let reference = |x| vec![of(block_linear_in_tensor_ops::<Graph>(layer(x)))];
        check(&name, &shapes, 1, |x| Graph::fused_block_linear(layer(x), false), reference);
    }
}

#[test]
fn other_shapes_have_the_same_numbers() {
    for (before, after) in [
        ([3, 4, 5, 6], vec![12, 30]),
        ([2, 1, 7, 16], vec![2, 7, 16]),
        ([4, 3, 1, 2], vec![2, 2, 3, 2]),
        ([2, 3, 4, 5], vec![2, 3, 20]),
    ] {
        // Behind it dimensions change places, so that its gradient lies permuted.
        let last = after.len() - 1;
        let swapped = |x| Graph::float_swap_dims(x, 0, last);
        let of_one = |x: Vec<Node>| x.into_iter().next().unwrap();
        let piece = |x| {
            let pass = Graph::fused_reshape(of_one(x), after.clone().into(), false)?;
            Some(Pass { outputs: pass.outputs.into_iter().map(swapped).collect(), ..pass })
        };
        let reference = |x| vec![swapped(Graph::float_reshape(of_one(x), after.clone().into()))];
        check(&format!("{before:?} as {after:?}"), &[&before], 1, piece, reference);
    }
}

#[test]
fn packed_matrices_are_those_of_tensor_operations() {
    let pack = |matrices| Pack { matrices, padding: 0, dtype: DType::F64 };
    check(
        "pack",
        &[&[5, 3], &[5, 1], &[5, 40]],
        1,
        |x| Graph::fused_pack(pack(x), false),
        |x| vec![float_cat::<Graph>(x, 1)],
    );
}

#[test]
fn recurrences_of_lstm_and_slstm_are_those_of_tensor_operations() {
    let sizes = [[1, 1, 1, 1], [6, 5, 2, 3], [9, 4, 1, 20], [4, 3, 2, 33], [2, 7, 3, 16]];
    let cells = [LstmCell::Sigmoid, LstmCell::Exponential];
    for ([batch, tokens, heads, width], cell) in
        sizes.into_iter().flat_map(|sizes| cells.map(|cell| (sizes, cell)))
    {
        let vectors = cell.vectors();
        let [x, r] = [&[batch, tokens, heads, 4 * width][..], &[heads, width, 4 * width]];
        let cells = [batch, 1, heads, width];
        for state in [false, true] {
            let mut shapes = vec![x, r];
            shapes.extend([&cells[..]; 4].into_iter().take(if state { vectors } else { 0 }));
            let given = |x: Vec<Node>| {
                let mut x = x.into_iter();
                let mut next = || x.next().unwrap();
                let (x, r) = (next(), next());
                // n, a sum of exponentials, is more than 0.
                let state = state.then(|| match cell {
                    LstmCell::Sigmoid => vec![next(), next()],
                    LstmCell::Exponential => {
                        vec![next(), next(), Graph::float_exp(next()), next()]
                    }
                });
                LstmRecurrence { cell, x, r, state }
            };
            let reference = |x| {
                let (h, last) = lstm_in_tensor_ops::<Graph>(given(x));
                [h].into_iter().chain(last.into_iter().skip(1)).map(of).collect()
            };
            let name = format!("{cell:?}, {batch} x {tokens} x {heads} x {width}, {state}");
            check(&name, &shapes, vectors, |x| Graph::fused_lstm(given(x), false), reference);
        }
    }
}

#[test]
fn rows_of_a_table_are_those_of_tensor_operations() {
    for (count, width, many) in [(7, 3, 20), (100, 16, 700), (3, 1, 1)] {
        let mut rng = Rng::new(5);
        let ids: Vec<i32> = (0..many).map(|_| (rng.uniform() * count as f64) as i32).collect();
        let ids =
            Tensor::<Graph, 1, Int>::from_data(TensorData::new(ids, [many]), &Default::default());
        let rows = |mut x: Vec<Node>| {
            let ids = ids.clone().into_primitive();
            Embedding { table: x.remove(0), ids, dtype: DType::F64 }
        };
        let name = format!("{many} rows of {count} x {width}");
        check(
            &name,
            &[&[count, width]],
            1,
            |x| Graph::fused_embedding(rows(x), false),
            |x| {
                let e = rows(x);
                vec![Graph::float_select(e.table, 0, e.ids)]
            },
        );
    }
}

#[test]
fn losses_are_those_of_tensor_operations() {
    for (many, vocab, width, by_rows, biased) in
        [(5, 7, 3, true, false), (70, 300, 9, false, true), (300, 40, 16, true, true)]
    {
        let mut rng = Rng::new(6);
        let target: Vec<i32> = (0..many).map(|_| (rng.uniform() * vocab as f64) as i32).collect();
        let target = TensorData::new(target, [many]);
        let target = Tensor::<Graph, 1, Int>::from_data(target, &Default::default());
        let loss = |x: Vec<Node>| {
            let mut x = x.into_iter();
            let (hidden, weight) = (x.next().unwrap(), x.next().unwrap());
            let target = target.clone().into_primitive();
            LinearCrossEntropy {
                hidden,
                weight,
                by_rows,
                bias: x.next(),
                target,
                scale: 0.1,
                frozen: false,
            }
        };
        let weight = if by_rows { [vocab, width] } else { [width, vocab] };
        let (hidden, bias) = ([many, width], [vocab]);
        let mut shapes = vec![&hidden[..], &weight[..]];
        shapes.extend(biased.then_some(&bias[..]));
        let name = format!("loss of {many} x {vocab} x {width}");
        check(
            &name,
            &shapes,
            1,
            |x| Graph::fused_cross_entropy(loss(x), false),
            |x| vec![of(cross_entropy_in_tensor_ops::<Graph>(loss(x)))],
        );
    }
}

/// Columns of a packed projection, with a log decay of `heads` heads.
fn columns(heads: usize) -> Vec<Column> {
    let conv = |activation, norm| ColumnKind::Conv { activation, norm };
    let unit = Some(HeadNorm { width: 5, factor: 0.4 });
    vec![
        Column { width: 10, kind: conv(Some(Activation::Silu), unit) },
        Column { width: 5, kind: conv(None, unit) },
        Column { width: 7, kind: conv(Some(Activation::Sigmoid), None) },
        Column { width: 1, kind: conv(None, None) },
        Column { width: 3, kind: ColumnKind::Copy },
        Column { width: heads, kind: ColumnKind::Beta { scale: 2.0 } },
        Column { width: 2 * heads, kind: ColumnKind::LogDecay },
    ]
}

/// Sizes of a packed projection with its convolution.
struct Packed {
    batch: usize,
    tokens: usize,
    window: usize,
    biased: bool,
    has_conv_state: bool,
    lengths: Option<SequenceLengths>,
}

impl Packed {
    fn check(self) {
        let Self { batch, tokens, window, biased, has_conv_state, lengths } = self;
        let heads = 3;
        let (channels, packed) = (23, 26 + 3 * heads);
        let split = |x: Vec<Node>| {
            let mut x = x.into_iter();
            ConvSplit {
                x: x.next().unwrap(),
                weight: some_of(&mut x, window > 1),
                bias: some_of(&mut x, biased),
                conv_state: some_of(&mut x, has_conv_state),
                a_log: x.next(),
                dt_bias: x.next(),
                columns: columns(heads),
                lengths: lengths.clone(),
            }
        };
        let sequences = lengths.as_ref().map_or(batch, SequenceLengths::count);
        let (x, weight, bias) = ([batch, tokens, packed], [window, channels], [channels]);
        let (conv_state, a_log, dt_bias) =
            ([sequences, window - 1, channels], [heads], [2 * heads]);
        let mut shapes = vec![&x[..]];
        shapes.extend((window > 1).then_some(&weight[..]));
        shapes.extend(biased.then_some(&bias[..]));
        shapes.extend(has_conv_state.then_some(&conv_state[..]));
        shapes.extend([&a_log[..], &dt_bias[..]]);
        let name = format!("{batch} x {tokens}, window {window}, {lengths:?}");
        check(
            &name,
            &shapes,
            7,
            |x| Graph::fused_conv_split(split(x), false),
            |x| conv_split_in_tensor_ops::<Graph>(split(x)).into_iter().map(of).collect(),
        );
    }
}

#[test]
fn packed_projections_are_split_as_by_tensor_operations() {
    for (batch, tokens, window, biased, has_conv_state) in [
        (2, 5, 4, true, true),
        (3, 70, 3, false, false),
        (70, 2, 4, true, true),
        (1, 1, 4, false, true),
        (2, 3, 1, true, false),
    ] {
        Packed { batch, tokens, window, biased, has_conv_state, lengths: None }.check();
    }
}

#[test]
fn sequences_of_one_row_are_split_as_by_tensor_operations() {
    for (lengths, window, biased, has_conv_state) in [
        (&[5, 1, 2, 7][..], 4, true, true),
        (&[70, 3, 1, 130], 3, false, false),
        (&[1; 40], 4, false, true),
        (&[2], 4, true, true),
        (&[3, 2], 1, true, false),
    ] {
        let lengths = SequenceLengths::new(lengths);
        let (tokens, lengths) = (lengths.tokens(), Some(lengths));
        Packed { batch: 1, tokens, window, biased, has_conv_state, lengths }.check();
    }
}

#[test]
fn steps_of_adamw_are_those_of_tensor_operations() {
    let mut rng = Rng::new(7);
    let mut new = |shape: &[usize], lies| input(&mut rng, shape, lies, DType::F64).node.primitive;
    let positive = |x: FloatTensor<Flex>| Flex::float_mul(x.clone(), x);
    let mut steps = vec![];
    for (n, lies) in ALL.into_iter().enumerate() {
        let shape = [70, 70 + n];
        let moments = (n > 0).then(|| Moments {
            first: new(&shape, lies),
            second: positive(new(&shape, lies)),
            time: n as u32,
        });
        let (parameter, gradient) = (new(&shape, lies), new(&shape, lies));
        steps.push(AdamWStep { parameter, gradient, moments, decay: 0.1 * n as f64 });
    }
    let adamw = AdamW { learning_rate: 0.01, beta_1: 0.9, beta_2: 0.99, epsilon: 1e-8 };
    let gradients: Vec<_> = steps.iter().map(|step| step.gradient.clone()).collect();
    let norm = Flex::global_norm(gradients.clone());
    let want = norm_in_tensor_ops::<Flex>(gradients);
    assert_close("norm", &values::<Flex>(want), &values::<Flex>(norm.clone()), 1e-12);
    for clip in
        [None, Some(Clip { norm: norm.clone(), longest: 3.0 }), Some(Clip { norm, longest: 1e9 })]
    {
        let want = step_in_tensor_ops::<Flex>(steps.clone(), adamw, clip.clone());
        let got = Flex::adamw_step(steps.clone(), adamw, clip);
        for ((want, want_moments), (got, moments)) in want.into_iter().zip(got) {
            assert_eq!(want_moments.time, moments.time);
            for (name, want, got) in [
                ("parameter", want, got),
                ("first", want_moments.first, moments.first),
                ("second", want_moments.second, moments.second),
            ] {
                assert_close(name, &values::<Flex>(want), &values::<Flex>(got), 1e-12);
            }
        }
    }
}

/// Outputs and gradients of every operation, in f32.
fn everything() -> Vec<Vec<f64>> {
    let mut found = vec![];
    let mut one = |shapes: &[&[usize]], f: &dyn Fn(Vec<Node>) -> Option<Pass<Graph>>| {
        let mut rng = Rng::new(8);
        let new = |shape: &&[usize]| input(&mut rng, shape, Lies::InRows, DType::F32);
        let inputs = shapes.iter().map(new).collect();
        let (outputs, gradients) = run(inputs, &[0], |x| f(x).expect("a piece").outputs);
        found.extend(outputs.into_iter().chain(gradients));
    };
    one(&[&[6, 700, 24], &[24, 40], &[40]], &|x| {
        let [x, weight, bias] = x.try_into().unwrap();
        Graph::fused_linear(LinearLayer { x, weight, bias: Some(bias) }, false)
    });
    one(&[&[6, 700, 24], &[3, 8, 20], &[60]], &|x| {
        let [x, weight, bias] = x.try_into().unwrap();
        Graph::fused_block_linear(LinearLayer { x, weight, bias: Some(bias) }, false)
    });
    one(&[&[6, 700, 24], &[24]], &|x| {
        let [x, weight] = x.try_into().unwrap();
        let norm = Normalization {
            x,
            residual: None,
            weight: Some(weight),
            bias: None,
            gate: None,
            activation: Activation::Silu,
            measure: Measure::RootMeanSquare,
            epsilon: 1e-5,
            factor: 1.0,
            dtype: DType::F32,
        };
        Graph::fused_normalize(norm, false)
    });
    one(&[&[9, 150, 35], &[4, 23], &[3], &[6]], &|x| {
        let [x, weight, a_log, dt_bias] = x.try_into().unwrap();
        let (weight, a_log, dt_bias) = (Some(weight), Some(a_log), Some(dt_bias));
        let columns = columns(3);
        let (bias, conv_state, lengths) = (None, None, None);
        let split = ConvSplit { x, weight, bias, conv_state, a_log, dt_bias, columns, lengths };
        Graph::fused_conv_split(split, false)
    });
    one(&[&[1, 1350, 35], &[4, 23], &[5, 3, 23], &[3], &[6]], &|x| {
        let [x, weight, conv_state, a_log, dt_bias] = x.try_into().unwrap();
        let (weight, conv_state, a_log, dt_bias) =
            (Some(weight), Some(conv_state), Some(a_log), Some(dt_bias));
        let (bias, lengths) = (None, Some(SequenceLengths::new(&[700, 1, 2, 347, 300])));
        let columns = columns(3);
        let split = ConvSplit { x, weight, bias, conv_state, a_log, dt_bias, columns, lengths };
        Graph::fused_conv_split(split, false)
    });
    one(&[&[900, 16], &[300, 16]], &|x| {
        let [hidden, weight] = x.try_into().unwrap();
        let target = Tensor::<Graph, 1, Int>::zeros([900], &Default::default()).into_primitive();
        let (by_rows, bias, scale) = (true, None, 0.001);
        let loss =
            LinearCrossEntropy { hidden, weight, by_rows, bias, target, scale, frozen: false };
        Graph::fused_cross_entropy(loss, false)
    });
    one(&[&[5, 40, 2, 16], &[5, 40, 2, 16], &[5, 40, 6, 40], &[5, 40, 6], &[5, 40, 6]], &|x| {
        let [q, k, v, g, beta] = x.try_into().unwrap();
        let decay = Some(LogDecay::Scalar(Graph::float_neg(Graph::float_abs(g))));
        let beta = Graph::float_tanh(beta);
        let transition = Transition::Delta { beta, erase: None, read: Read::After };
        let x = Recurrence {
            q,
            k: Graph::float_tanh(k),
            v,
            decay,
            transition,
            state: None,
            lengths: None,
        };
        let Forward { o, state, .. } = Graph::chunkwise(x, false);
        Some(Pass::forward(vec![o, state]))
    });
    one(&[&[11, 30, 2, 64], &[2, 16, 64]], &|x| {
        let [x, r] = x.try_into().unwrap();
        let cell = LstmCell::Exponential;
        Graph::fused_lstm(LstmRecurrence { cell, x, r, state: None }, false)
    });
    found
}

#[test]
fn the_number_of_threads_changes_no_bit() {
    let with = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
        pool.expect("a few threads").install(everything)
    };
    let (one, three) = (with(1), with(3));
    assert!(one.iter().flatten().all(|x| x.is_finite()));
    assert!(one == three, "the same bits on one thread and on three");
}

#[test]
fn powers_of_e_are_exact_to_two_units_in_the_last_place() {
    use super::real::Real;
    for i in 0..200_000 {
        let x = -86.0 + 174.7 * (i as f32 / 200_000.0);
        let (want, got) = (f64::from(x).exp(), f64::from(Real::exp(x)));
        assert!((got / want - 1.0).abs() < 2.4e-7, "e^{x} is {want}, not {got}");
    }
    assert_eq!(Real::exp(0f32), 1.0);
    assert_eq!(Real::exp(f32::NEG_INFINITY), 0.0);
    assert_eq!(Real::exp(f32::INFINITY), f32::INFINITY);
    assert_eq!(Real::exp(89f32), f32::INFINITY);
    assert!(Real::exp(f32::NAN).is_nan());
}

#[test]
fn tangents_and_logarithms_of_sigmoids_are_exact_to_a_few_units_in_the_last_place() {
    use super::real::Real;
    for i in 0..200_000 {
        for size in [1e-3, 1.0, 40.0] {
            let x = size * (i as f32 / 100_000.0 - 1.0);
            let close = |name: &str, want: f64, got: f32| {
                let error = (f64::from(got) - want).abs();
                let limit = if name == "erf" { 5e-7 } else { 4e-7 };
                assert!(error <= limit * want.abs(), "{name} of {x} is {want}, not {got}");
            };
            let wide = f64::from(x);
            close("tanh", wide.tanh(), Real::tanh(x));
            close("log sigmoid", Real::log_sigmoid(wide), Real::log_sigmoid(x));
            close("erf", Real::erf(wide), Real::erf(x));
            assert!(Real::erf(x).abs() <= 1.0, "erf of {x}");
        }
    }
    assert_eq!([Real::erf(1e9f32), Real::erf(-1e9f32)], [1.0, -1.0]);
    assert!(Real::erf(f32::NAN).is_nan());
    assert_eq!([Real::tanh(1e9f32), Real::tanh(-1e9f32)], [1.0, -1.0]);
    assert_eq!(Real::log_sigmoid(-1e9f32), -1e9);
    assert!(Real::tanh(f32::NAN).is_nan() && Real::log_sigmoid(f32::NAN).is_nan());
}
