//! The columns of packed projections against f64 loops, on whatever device is there.

use super::parts::{Form, Pass};
use super::*;
use crate::pointwise::Activation;
use crate::tests::Rows;
use cubecl::ir::features::TypeUsage;
use linattn_oracle::{Rng, assert_close, relative_error};

/// Limits on the relative error.
const LIMIT_F32: f64 = 1e-5;
const LIMIT_HALF: f64 = 8e-3;

/// A projection, and which of its tensors are there.
#[derive(Debug, Clone)]
struct Case {
    dims: Dims,
    /// Tokens of each sequence in the one row; empty where rows of a batch are sequences.
    lengths: Vec<usize>,
    columns: Vec<Columns>,
    weighted: bool,
    biased: bool,
    has_conv_state: bool,
    /// A part whose gradient is absent.
    absent: Option<usize>,
}

/// All tensors, empty if absent; also their gradients.
#[derive(Debug, Clone, Default, PartialEq)]
struct Tensors {
    x: Vec<f64>,
    weight: Vec<f64>,
    bias: Vec<f64>,
    conv_state: Vec<f64>,
    a_log: Vec<f64>,
    dt_bias: Vec<f64>,
}

impl Tensors {
    fn each(&self) -> [(&'static str, &Vec<f64>); 6] {
        let Self { x, weight, bias, conv_state, a_log, dt_bias } = self;
        let names = ["x", "weight", "bias", "conv_state", "a_log", "dt_bias"];
        let mut tensors = [x, weight, bias, conv_state, a_log, dt_bias].into_iter();
        names.map(|name| (name, tensors.next().unwrap()))
    }

    fn each_mut(&mut self) -> [&mut Vec<f64>; 6] {
        let Self { x, weight, bias, conv_state, a_log, dt_bias } = self;
        [x, weight, bias, conv_state, a_log, dt_bias]
    }
}

fn sigmoid(z: f64) -> f64 {
    1.0 / (1.0 + (-z).exp())
}

fn softplus(z: f64) -> f64 {
    z.max(0.0) + (-z.abs()).exp().ln_1p()
}

/// An activation and its derivative.
fn activated(z: f64, activation: Activation) -> (f64, f64) {
    let s = sigmoid(z);
    match activation {
        Activation::Identity => (z, 1.0),
        Activation::Silu => (z * s, s * (1.0 + z * (1.0 - s))),
        Activation::Sigmoid => (s, s * (1.0 - s)),
    }
}

impl Case {
    fn all(&self) -> usize {
        self.columns.iter().map(|part| part.width).sum()
    }

    fn convolved(&self) -> usize {
        self.columns.iter().filter(|part| part.is_conv()).map(|part| part.width).sum()
    }

    /// Heads and columns of the log decays.
    fn decays(&self) -> (usize, usize) {
        let decays = self.columns.iter().find_map(|part| match part.kind {
            Kind::LogDecay { heads } => Some((heads, part.width)),
            _ => None,
        });
        decays.unwrap_or((0, 0))
    }

    /// One row of sequences of these lengths.
    fn of_lengths(&self, lengths: &[usize]) -> Self {
        let dims = Dims { batch: 1, tokens: lengths.iter().sum(), ..self.dims };
        Self { dims, lengths: lengths.to_vec(), ..self.clone() }
    }

    fn sequences(&self) -> usize {
        if self.lengths.is_empty() { self.dims.batch } else { self.lengths.len() }
    }

    /// N + 1 offsets, if sequences have lengths of their own.
    fn cu_seqlens(&self) -> Option<Vec<usize>> {
        let ends = (1..=self.lengths.len()).map(|n| self.lengths[..n].iter().sum());
        (!self.lengths.is_empty()).then(|| std::iter::once(0).chain(ends).collect())
    }

    /// The columns of each convolution, of rows of all of them.
    fn apart(&self, rows: &[f64]) -> Vec<Vec<f64>> {
        let mut first = 0;
        let convolutions = self.columns.iter().filter(|part| part.is_conv());
        let mut part = |part: &Columns| {
            let columns = first..first + part.width;
            first = columns.end;
            let rows = rows.chunks(self.convolved());
            rows.flat_map(|row| row[columns.clone()].to_vec()).collect()
        };
        convolutions.map(&mut part).collect()
    }

    /// The conv state after one token of each sequence.
    fn next_conv_state(&self, of: &Tensors) -> Vec<f64> {
        let (before, c) = (self.dims.window - 1, self.convolved());
        let mut next = vec![];
        for (b, x) in of.x.chunks(self.all()).enumerate() {
            let mut seen = match self.has_conv_state {
                true => of.conv_state[b * before * c..][..before * c].to_vec(),
                false => vec![0.0; before * c],
            };
            seen.extend(&x[..c]);
            next.extend(&seen[c..]);
        }
        next
    }

    fn draw(&self, rows: Rows, weights: Rows) -> Tensors {
        let Dims { batch, tokens, window } = self.dims;
        let mut rng = Rng::named(5, "projection");
        let mut draw = |there: bool, numbers: usize, kind: Rows| {
            let mut values: Vec<f64> =
                (0..if there { numbers } else { 0 }).map(|_| rng.normal()).collect();
            kind.round(&mut values);
            values
        };
        let c = self.convolved();
        let (heads, steps) = self.decays();
        Tensors {
            x: draw(true, batch * tokens * self.all(), rows),
            weight: draw(self.weighted, window * c, weights),
            bias: draw(self.biased, c, weights),
            conv_state: draw(self.has_conv_state, self.sequences() * (window - 1) * c, rows),
            a_log: draw(true, heads, weights),
            dt_bias: draw(true, steps, weights),
        }
    }

    fn draw_gradients(&self, rows: Rows) -> Vec<Vec<f64>> {
        let mut rng = Rng::named(6, "gradients");
        let numbers = self.dims.batch * self.dims.tokens;
        let part = |(n, part): (usize, &Columns)| {
            let mut values: Vec<f64> = (0..numbers * part.width).map(|_| rng.normal()).collect();
            match part.is_gate() {
                true => Rows::F32.round(&mut values),
                false => rows.round(&mut values),
            }
            if self.absent == Some(n) {
                values.fill(0.0);
            }
            values
        };
        self.columns.iter().enumerate().map(part).collect()
    }

    /// Where in x or in the conv state is what the convolution sees at `at` W - 1 tokens before the first.
    fn seen(&self, b: usize, at: usize, column: usize) -> Result<usize, usize> {
        let before = self.dims.window - 1;
        match at.checked_sub(before) {
            Some(t) => Ok((b * self.dims.tokens + t) * self.all() + column),
            None => Err((b * before + at) * self.convolved() + column),
        }
    }

    fn seen_value(&self, of: &Tensors, b: usize, at: usize, column: usize) -> f64 {
        match self.seen(b, at, column) {
            Ok(n) => of.x[n],
            Err(n) => of.conv_state.get(n).copied().unwrap_or(0.0),
        }
    }

    fn z(&self, of: &Tensors, b: usize, t: usize, column: usize) -> f64 {
        let c = self.convolved();
        let bias = of.bias.get(column).copied().unwrap_or(0.0);
        if !self.weighted {
            return bias + of.x[(b * self.dims.tokens + t) * self.all() + column];
        }
        let taps = (0..self.dims.window)
            .map(|w| of.weight[w * c + column] * self.seen_value(of, b, t + w, column));
        bias + taps.sum::<f64>()
    }

    /// The outputs; with gradients of these, gradients of everything.
    fn run(&self, of: &Tensors, d_out: Option<&[Vec<f64>]>) -> (Vec<Vec<f64>>, Tensors) {
        if !self.lengths.is_empty() {
            return self.run_apart(of, d_out.expect("gradients of lengths are asked for"));
        }
        let mut d = Tensors::default();
        for (to, (_, from)) in d.each_mut().into_iter().zip(of.each()) {
            *to = vec![0.0; from.len()];
        }
        let mut out = vec![];
        let mut first = 0;
        for (n, part) in self.columns.iter().enumerate() {
            let mut y = vec![];
            for b in 0..self.dims.batch {
                for t in 0..self.dims.tokens {
                    let row = b * self.dims.tokens + t;
                    let zeros = vec![0.0; part.width];
                    let d_y = d_out.map_or(&zeros[..], |d| &d[n][row * part.width..][..part.width]);
                    y.extend(self.row(of, &mut d, (part, first), [b, t], d_y));
                }
            }
            out.push(y);
            first += part.width;
        }
        (out, d)
    }

    /// The sequences one by one: rows one after another, gradients of weights added up.
    fn run_apart(&self, of: &Tensors, d_out: &[Vec<f64>]) -> (Vec<Vec<f64>>, Tensors) {
        let mut out = vec![vec![]; self.columns.len()];
        let mut d = Tensors::default();
        let (kept, mut from) = ((self.dims.window - 1) * self.convolved(), 0);
        for (n, &tokens) in self.lengths.iter().enumerate() {
            let dims = Dims { tokens, ..self.dims };
            let alone = Case { dims, lengths: vec![], ..self.clone() };
            let rows = |x: &[f64], width: usize| x[from * width..][..tokens * width].to_vec();
            let conv_state =
                of.conv_state.get(n * kept..(n + 1) * kept).unwrap_or_default().to_vec();
            let of = Tensors { x: rows(&of.x, self.all()), conv_state, ..of.clone() };
            let parts = self.columns.iter().zip(d_out);
            let d_out: Vec<Vec<f64>> = parts.map(|(part, d)| rows(d, part.width)).collect();
            let (y, mut of_one) = alone.run(&of, Some(&d_out));
            out.iter_mut().zip(y).for_each(|(out, y)| out.extend(y));
            d.x.append(&mut of_one.x);
            d.conv_state.append(&mut of_one.conv_state);
            for (sum, (_, one)) in d.each_mut().into_iter().zip(of_one.each()) {
                sum.resize(sum.len().max(one.len()), 0.0);
                sum.iter_mut().zip(one).for_each(|(sum, one)| *sum += one);
            }
            from += tokens;
        }
        (out, d)
    }

    /// A row of the output of a part whose columns begin at `first`; adds to the gradients.
    fn row(
        &self,
        of: &Tensors,
        d: &mut Tensors,
        (part, first): (&Columns, usize),
        [b, t]: [usize; 2],
        d_y: &[f64],
    ) -> Vec<f64> {
        let at = (b * self.dims.tokens + t) * self.all() + first;
        let x = &of.x[at..][..part.width];
        match part.kind {
            Kind::Conv { activation, head } => {
                let z: Vec<f64> = (0..part.width).map(|j| self.z(of, b, t, first + j)).collect();
                let (y, d_z) = head_rows(&z, activation, head, d_y);
                for (j, d_z) in d_z.into_iter().enumerate() {
                    self.add(of, d, [b, t, first + j], d_z);
                }
                y
            }
            Kind::Copy => {
                d.x[at..][..part.width].copy_from_slice(d_y);
                x.to_vec()
            }
            Kind::Beta { scale } => {
                let gate = |(j, x): (usize, &f64)| {
                    let (y, slope) = activated(*x, Activation::Sigmoid);
                    d.x[at + j] = d_y[j] * scale * slope;
                    scale * y
                };
                x.iter().enumerate().map(gate).collect()
            }
            Kind::LogDecay { heads } => {
                let gate = |(j, x): (usize, &f64)| {
                    let h = j / (part.width / heads);
                    let (rate, z) = (of.a_log[h].exp(), x + of.dt_bias[j]);
                    let y = -rate * softplus(z);
                    d.x[at + j] = -d_y[j] * rate * sigmoid(z);
                    d.dt_bias[j] += d.x[at + j];
                    d.a_log[h] += d_y[j] * y;
                    y
                };
                x.iter().enumerate().map(gate).collect()
            }
        }
    }

    /// Adds the share of one gradient of z to the other gradients.
    fn add(&self, of: &Tensors, d: &mut Tensors, [b, t, column]: [usize; 3], d_z: f64) {
        if self.biased {
            d.bias[column] += d_z;
        }
        if !self.weighted {
            d.x[(b * self.dims.tokens + t) * self.all() + column] += d_z;
            return;
        }
        for w in 0..self.dims.window {
            let tap = w * self.convolved() + column;
            d.weight[tap] += d_z * self.seen_value(of, b, t + w, column);
            match self.seen(b, t + w, column) {
                Ok(n) => d.x[n] += d_z * of.weight[tap],
                Err(n) if self.has_conv_state => d.conv_state[n] += d_z * of.weight[tap],
                Err(_) => (),
            }
        }
    }
}

/// Activation and norm of a row: y, and the gradient of z.
fn head_rows(
    z: &[f64],
    activation: Activation,
    head: Option<Head>,
    d_y: &[f64],
) -> (Vec<f64>, Vec<f64>) {
    let width = head.map_or(z.len(), |head| head.width);
    let (mut y, mut d_z) = (vec![], vec![]);
    for (z, d_y) in z.chunks(width).zip(d_y.chunks(width)) {
        let value: Vec<f64> = z.iter().map(|z| activated(*z, activation).0).collect();
        let (scale, share) = head.map_or((1.0, 0.0), |head| {
            let square = value.iter().map(|y| y * y).sum::<f64>() + head.epsilon;
            let dot: f64 = value.iter().zip(d_y).map(|(y, d)| y * d).sum();
            (head.factor / square.sqrt(), dot / square)
        });
        for ((z, value), d_y) in z.iter().zip(&value).zip(d_y) {
            y.push(value * scale);
            d_z.push((d_y - value * share) * scale * activated(*z, activation).1);
        }
    }
    (y, d_z)
}

const EPSILON: f64 = 1e-3;

fn conv(width: usize, activation: Activation, head: usize) -> Columns {
    let head = (head > 0).then_some(Head { width: head, factor: 0.75, epsilon: EPSILON });
    Columns { width, kind: Kind::Conv { activation, head } }
}

fn copy(width: usize) -> Columns {
    Columns { width, kind: Kind::Copy }
}

fn beta(width: usize) -> Columns {
    Columns { width, kind: Kind::Beta { scale: 2.0 } }
}

fn decay(width: usize, heads: usize) -> Columns {
    Columns { width, kind: Kind::LogDecay { heads } }
}

/// Lengths that each case is run with.
const LENGTHS: [usize; 6] = [1, 2, 3, 5, 17, 40];

/// Sequences in one row that each case is run with.
const ROWS: [&[usize]; 4] = [&[1], &[5, 1, 2], &[3, 40, 1, 1, 2, 70, 17], &[1; 9]];

/// Everything at once, with vectors of one number or four.
fn mixer() -> Case {
    Case {
        dims: Dims { batch: 2, tokens: 40, window: 4 },
        lengths: vec![],
        columns: vec![
            conv(16, Activation::Silu, 8),
            conv(8, Activation::Silu, 8),
            conv(12, Activation::Silu, 0),
            beta(2),
            decay(2, 2),
            copy(8),
        ],
        weighted: true,
        biased: false,
        has_conv_state: true,
        absent: None,
    }
}

fn cases() -> Vec<Case> {
    use Activation::{Identity, Sigmoid, Silu};
    let case = |window, columns| Case {
        dims: Dims { batch: 2, tokens: 1, window },
        lengths: vec![],
        columns,
        weighted: true,
        biased: true,
        has_conv_state: true,
        absent: None,
    };
    vec![
        mixer(),
        // Odd heads and a window of two, none of them a conv state; a gradient that is not there.
        Case {
            has_conv_state: false,
            absent: Some(1),
            ..case(2, vec![conv(15, Sigmoid, 5), conv(3, Silu, 3), copy(7), beta(3)])
        },
        // No weights.
        Case {
            weighted: false,
            biased: false,
            has_conv_state: false,
            absent: Some(2),
            ..case(1, vec![conv(24, Silu, 12), conv(4, Identity, 0), decay(70, 7)])
        },
        // A window of one; heads of one number, and of many.
        Case {
            has_conv_state: false,
            ..case(1, vec![conv(2, Identity, 1), conv(130, Sigmoid, 65)])
        },
        // Vectors of four, and more columns than a group of units has.
        Case { biased: false, ..case(4, vec![conv(256, Silu, 256), conv(160, Silu, 0)]) },
        // A window that is not kept in registers.
        case(9, vec![conv(12, Silu, 4), conv(8, Identity, 0), copy(4)]),
        // No convolution.
        Case {
            weighted: false,
            biased: false,
            has_conv_state: false,
            ..case(1, vec![copy(5), beta(33), copy(6), beta(1)])
        },
    ]
}

/// A device and types.
struct Sandbox<'a, R: Runtime> {
    client: &'a ComputeClient<R>,
    rows: Rows,
    weights: Rows,
}

impl<R: Runtime> Sandbox<'_, R> {
    fn put(&self, rows: Rows, values: &[f64]) -> Option<Handle> {
        (!values.is_empty()).then(|| self.client.create_from_slice(&rows.bytes(values)))
    }

    fn get(&self, buffer: &Buffer) -> Vec<f64> {
        let all = [Rows::F32, Rows::F16, Rows::Bf16];
        let rows = all.into_iter().find(|rows| rows.dtype() == buffer.dtype).unwrap();
        rows.numbers(&self.client.read_one(buffer.handle.clone()).expect("the kernel ran"))
    }

    /// Outputs, and gradients of everything. `widest` is the longest vector, if not the usual one.
    fn run(
        &self,
        case: &Case,
        of: &Tensors,
        d_out: &[Vec<f64>],
        widest: Option<usize>,
    ) -> (Vec<Vec<f64>>, Tensors) {
        let Self { client, rows, weights } = *self;
        let kinds = [rows, weights, weights, rows, weights, weights];
        let mut on = of.each().into_iter().zip(kinds).map(|((_, v), kind)| self.put(kind, v));
        let [x, weight, bias, conv_state, a_log, dt_bias] =
            core::array::from_fn(|_| on.next().flatten());
        let cu_seqlens = case.cu_seqlens();
        let inputs = Inputs {
            x: x.as_ref().expect("x"),
            weight: weight.as_ref(),
            bias: bias.as_ref(),
            conv_state: conv_state.as_ref(),
            a_log: a_log.as_ref(),
            dt_bias: dt_bias.as_ref(),
            cu_seqlens: cu_seqlens.as_deref(),
        };
        let types = Types { rows: rows.dtype(), weights: weights.dtype() };
        let columns = &case.columns;
        let on_d: Vec<Option<Handle>> = (columns.iter().zip(d_out).enumerate())
            .map(|(n, (part, d))| {
                let kind = if part.is_gate() { Rows::F32 } else { rows };
                self.put(kind, d).filter(|_| case.absent != Some(n))
            })
            .collect();
        let d_y: Vec<Option<&Handle>> = on_d.iter().map(Option::as_ref).collect();
        let (out, d) = match widest {
            None => (
                forward(client, case.dims, columns, inputs, types),
                backward(client, case.dims, columns, inputs, &d_y, types),
            ),
            Some(widest) => {
                let given: Vec<bool> = d_y.iter().map(Option::is_some).collect();
                let x = inputs.into();
                let form = |pass| Form::new(case.dims, columns, &x, pass, widest, false);
                let call = |pass| Call::new(client, case.dims, columns, x, types, form(pass));
                (
                    call(Pass::Forward).map(|call| call.forward().0),
                    call(Pass::Backward { given: &given }).and_then(|call| call.backward(&d_y)),
                )
            }
        };
        let (out, d) = (out.expect("forward"), d.expect("backward"));
        let get = |buffer: &Option<Buffer>| buffer.as_ref().map_or(vec![], |b| self.get(b));
        let gradients = Tensors {
            x: self.get(&d.x),
            weight: get(&d.weight),
            bias: get(&d.bias),
            conv_state: get(&d.conv_state),
            a_log: get(&d.a_log),
            dt_bias: get(&d.dt_bias),
        };
        (out.iter().map(|buffer| self.get(buffer)).collect(), gradients)
    }

    /// Outputs and next conv states of one token, from tensors of each convolution by itself.
    fn step(&self, case: &Case, of: &Tensors) -> [Vec<Vec<f64>>; 2] {
        let Self { client, rows, weights } = *self;
        let put = |kind: Rows, values: &[f64]| -> Vec<Handle> {
            let parts = case.apart(values);
            parts.iter().filter_map(|part| self.put(kind, part)).collect()
        };
        let (weight, bias) = (put(weights, &of.weight), put(weights, &of.bias));
        let conv_state = put(rows, &of.conv_state);
        let each = [&weight, &bias, &conv_state].map(|handles| handles.iter().collect::<Vec<_>>());
        let [weights_of, biases_of, conv_states_of] = &each;
        let [x, a_log, dt_bias] = [(rows, &of.x), (weights, &of.a_log), (weights, &of.dt_bias)]
            .map(|(kind, values)| self.put(kind, values));
        let inputs = Inputs {
            x: x.as_ref().expect("x"),
            weight: None,
            bias: None,
            conv_state: None,
            a_log: a_log.as_ref(),
            dt_bias: dt_bias.as_ref(),
            cu_seqlens: None,
        };
        let apart = Apart { weights: weights_of, biases: biases_of, conv_states: conv_states_of };
        let types = Types { rows: rows.dtype(), weights: weights.dtype() };
        let (out, next) =
            super::step(client, case.dims, &case.columns, inputs, apart, types).expect("a step");
        [out, next].map(|buffers| buffers.iter().map(|buffer| self.get(buffer)).collect())
    }

    fn step_is_right(&self, case: &Case) {
        let of = case.draw(self.rows, self.weights);
        let (want, _) = case.run(&of, None);
        let [got, next] = self.step(case, &of);
        let what = format!("{case:?}, {:?}", self.rows);
        for (n, (want, got)) in want.iter().zip(&got).enumerate() {
            let gate = case.columns[n].is_gate();
            let limit = if gate || self.rows == Rows::F32 { LIMIT_F32 } else { LIMIT_HALF };
            assert_close(&format!("part {n} of {what}"), want, got, limit);
        }
        let want = case.apart(&case.next_conv_state(&of));
        assert_eq!(
            next.iter().map(Vec::len).sum::<usize>(),
            want.iter().map(Vec::len).sum::<usize>()
        );
        for (n, (want, got)) in want.iter().zip(&next).enumerate() {
            assert_eq!(want, got, "the conv state of part {n} of {what}");
        }
    }

    fn is_right(&self, case: &Case, widest: Option<usize>) {
        let of = case.draw(self.rows, self.weights);
        let d_out = case.draw_gradients(self.rows);
        let (want, d_want) = case.run(&of, Some(&d_out));
        let (got, d_got) = self.run(case, &of, &d_out, widest);
        let what = format!("{case:?}, {:?} and {:?}", self.rows, self.weights);
        let limit = |kind: Rows| if kind == Rows::F32 { LIMIT_F32 } else { LIMIT_HALF };
        for (n, (want, got)) in want.iter().zip(&got).enumerate() {
            let kind = if case.columns[n].is_gate() { Rows::F32 } else { self.rows };
            assert_close(&format!("part {n} of {what}"), want, got, limit(kind));
        }
        let kinds = [self.rows, self.weights, self.weights, self.rows, self.weights, self.weights];
        for (((name, want), (_, got)), kind) in
            d_want.each().into_iter().zip(d_got.each()).zip(kinds)
        {
            assert_close(&format!("d {name} of {what}"), want, got, limit(kind));
        }
    }
}

/// `test` for every type that the device has.
fn everywhere<R: Runtime>(client: &ComputeClient<R>, test: impl Fn(&Sandbox<'_, R>)) {
    let has =
        |rows: &Rows| client.properties().type_usage(rows.dtype()).contains(TypeUsage::Conversion);
    for rows in [Rows::F32, Rows::F16, Rows::Bf16].into_iter().filter(has) {
        test(&Sandbox { client, rows, weights: Rows::F32 });
    }
}

/// The gradients above, against central differences.
#[test]
fn the_truth_is_a_gradient() {
    for case in cases() {
        let case = Case { dims: Dims { tokens: 3, ..case.dims }, ..case };
        let of = case.draw(Rows::F32, Rows::F32);
        let d_out = case.draw_gradients(Rows::F32);
        let loss = |of: &Tensors| -> f64 {
            let (out, _) = case.run(of, None);
            out.iter().flatten().zip(d_out.iter().flatten()).map(|(y, d)| y * d).sum()
        };
        let (_, want) = case.run(&of, Some(&d_out));
        for (n, (name, want)) in want.each().into_iter().enumerate() {
            let got: Vec<f64> = (0..want.len())
                .step_by(1 + want.len() / 50)
                .map(|i| {
                    let mut moved = of.clone();
                    let mut at = |by: f64| {
                        moved.each_mut()[n][i] += by;
                        loss(&moved)
                    };
                    let (above, below) = (at(1e-5), at(-2e-5));
                    (above - below) / 2e-5
                })
                .collect();
            let want: Vec<f64> = want.iter().copied().step_by(1 + want.len() / 50).collect();
            assert!(relative_error(&want, &got) < 1e-6, "{name} of {case:?}: {want:?}, {got:?}");
        }
    }
}

/// The tests of one device, whose client `with_client` has.
macro_rules! each_kernel {
    ($runtime:ty) => {
        fn on_devices(test: impl Fn(&Sandbox<'_, $runtime>)) {
            with_client(|client| everywhere(client, test));
        }

        #[test]
        fn columns_of_any_kind_and_their_gradients_are_right() {
            on_devices(|sandbox| {
                for case in cases() {
                    for tokens in LENGTHS {
                        let dims = Dims { tokens, ..case.dims };
                        sandbox.is_right(&Case { dims, ..case.clone() }, None);
                    }
                }
            });
        }

        #[test]
        fn sequences_of_one_row_are_as_if_alone() {
            on_devices(|sandbox| {
                let sees_others = |case: &Case| case.dims.window > 1 && case.all() < 100;
                let narrow = cases().into_iter().filter(sees_others);
                for case in narrow.chain([Case { has_conv_state: false, ..mixer() }]) {
                    for lengths in ROWS {
                        sandbox.is_right(&case.of_lengths(lengths), None);
                    }
                }
            });
        }

        #[test]
        fn vectors_and_numbers_of_one_matrix_are_right() {
            with_client(|client| {
                let sandbox = Sandbox { client, rows: Rows::F32, weights: Rows::F32 };
                for widest in [1, 2, 4] {
                    sandbox.is_right(&mixer(), Some(widest));
                }
            });
        }

        #[test]
        fn gradients_of_weights_are_sums_over_many_cubes() {
            with_client(|client| {
                let sandbox = Sandbox { client, rows: Rows::F32, weights: Rows::F32 };
                let columns = vec![conv(4, Activation::Silu, 4), decay(6, 2)];
                let dims = Dims { batch: 150, tokens: 2, window: 2 };
                sandbox.is_right(&Case { dims, columns, ..mixer() }, None);
            });
        }

        #[test]
        fn weights_may_have_the_type_of_the_rows() {
            on_devices(|sandbox| {
                let sandbox = Sandbox { weights: sandbox.rows, ..*sandbox };
                sandbox.is_right(&Case { biased: true, ..mixer() }, None);
            });
        }

        #[test]
        fn single_tokens_with_tensors_of_each_convolution_are_right() {
            on_devices(|sandbox| {
                let steps = cases().into_iter().filter(|case| case.weighted);
                for case in steps.filter(|case| case.dims.window <= UNROLLED) {
                    let dims = Dims { batch: 3, tokens: 1, ..case.dims };
                    let case = Case { dims, lengths: vec![], ..case };
                    sandbox.step_is_right(&case);
                    sandbox.step_is_right(&Case { has_conv_state: false, biased: true, ..case });
                }
            });
        }

        #[test]
        fn the_same_inputs_give_the_same_bits() {
            on_devices(|sandbox| {
                let case = Case { biased: true, ..mixer() };
                let of = case.draw(sandbox.rows, sandbox.weights);
                let d_out = case.draw_gradients(sandbox.rows);
                let first = sandbox.run(&case, &of, &d_out, None);
                assert_eq!(first, sandbox.run(&case, &of, &d_out, None));
            });
        }

        #[test]
        fn what_no_launch_can_hold_is_refused() {
            with_client(refusals);
        }
    };
}

fn refusals<R: Runtime>(client: &ComputeClient<R>) {
    let x = client.create_from_slice(&[0; 16]);
    let (weight, bias, conv_state, a_log, dt_bias) = (None, None, None, None, None);
    let inputs = Inputs { x: &x, weight, bias, conv_state, a_log, dt_bias, cu_seqlens: None };
    let f32 = Rows::F32.dtype();
    let types = Types { rows: f32, weights: f32 };
    let dims = Dims { batch: 1, tokens: 1, window: 1 };
    let run = |dims, columns: &[Columns]| forward(client, dims, columns, inputs, types).err();
    assert_eq!(
        run(Dims { tokens: 0, ..dims }, &[copy(4)]),
        Some(Refusal::Empty { batch: 1, tokens: 0 })
    );
    let missing = |name| Some(Refusal::Tensor { name, wanted: true });
    let silu = Activation::Silu;
    assert_eq!(run(Dims { window: 4, ..dims }, &[conv(4, silu, 0)]), missing("weight"));
    assert_eq!(run(dims, &[decay(2, 2)]), missing("a_log"));
    let wide = Refusal::Width { name: "head", got: 300, most: crate::WIDEST };
    assert_eq!(run(dims, &[conv(300, silu, 300)]), Some(wide));
    let with_conv_state = Inputs { conv_state: Some(&x), ..inputs };
    let unwanted = Refusal::Tensor { name: "conv_state", wanted: false };
    assert_eq!(forward(client, dims, &[copy(4)], with_conv_state, types).err(), Some(unwanted));
    let large = Dims { batch: 1 << 16, tokens: 1 << 14, window: 1 };
    assert!(matches!(run(large, &[copy(4)]), Some(Refusal::TooLarge { .. })));
    let many = vec![copy(4); 2000];
    assert!(matches!(run(dims, &many), Some(Refusal::TooLarge { .. })), "too many tensors");
}

#[cfg(feature = "cuda")]
mod on_cuda {
    use super::*;
    use crate::tests::on_cuda::with_client;

    each_kernel!(cubecl::cuda::CudaRuntime);
}

mod on_wgpu {
    use super::*;
    use crate::tests::on_wgpu::with_client;

    each_kernel!(cubecl::wgpu::WgpuRuntime);
}
