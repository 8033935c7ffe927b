//! Tokens from packed projections against f64 loops, on whatever device is there.

use super::*;
use crate::fused::sandbox::{Sandbox, activated, everywhere, sigmoid};
use crate::tests::Rows;
use linattn_oracle::assert_close;

/// A mixer's token.
#[derive(Debug, Clone)]
struct Case {
    dims: Dims,
    window: usize,
    activation: Activation,
    normed: [bool; 2],
    delta: bool,
    decays: bool,
    biased: bool,
    given: bool,
    copied: usize,
}

/// All tensors, empty if absent.
#[derive(Debug, Clone)]
struct Tensors {
    y: Vec<f64>,
    weights: [Vec<f64>; 3],
    biases: [Vec<f64>; 3],
    conv_states: [Vec<f64>; 3],
    a_log: Vec<f64>,
    dt_bias: Vec<f64>,
    state: Vec<f64>,
}

const EPSILON: f64 = 1e-6;
const SCALE: f64 = 2.0;

impl Case {
    fn factor(&self, n: usize) -> f64 {
        [(self.dims.key_width as f64).powf(-0.5), 1.0][n]
    }

    /// The place of beta, of decays and of what is copied, behind the convolutions and a column that nobody reads.
    fn places(&self) -> [usize; 3] {
        let first = widths(self.dims).iter().sum::<usize>() + 1;
        let heads = self.dims.heads;
        let copied = first + usize::from(self.delta) * heads;
        [first, copied + self.copied, copied]
    }

    fn columns(&self) -> Columns {
        let [beta, decay, copied] = self.places();
        let head =
            |n| Head { width: self.dims.key_width, factor: self.factor(n), epsilon: EPSILON };
        Columns {
            all: decay + self.dims.heads,
            window: self.window,
            activations: [self.activation; 3],
            norms: [0, 1].map(|n| self.normed[n].then(|| head(n))),
            beta: self.delta.then_some((beta, SCALE)),
            decay: self.decays.then_some(decay),
            copied: copied..copied + self.copied,
        }
    }

    fn draw<R: Runtime>(&self, sandbox: &Sandbox<'_, R>, weights: Rows) -> Tensors {
        let Dims { batch, heads, key_width, value_width, .. } = self.dims;
        let three = |name: &str, there: bool, rows: usize, of: Rows| {
            let draw = |(n, width)| sandbox.draw(&format!("{name} {n}"), rows * width, of);
            let mut n = 0;
            widths(self.dims).map(|width| {
                n += 1;
                if there { draw((n, width)) } else { vec![] }
            })
        };
        let gates = usize::from(self.decays) * heads;
        Tensors {
            y: sandbox.draw("y", batch * self.columns().all, sandbox.rows),
            weights: three("weights", true, self.window, weights),
            biases: three("biases", self.biased, 1, weights),
            conv_states: three("states", self.given, batch * (self.window - 1), sandbox.rows),
            a_log: sandbox.draw("a_log", gates, weights),
            dt_bias: sandbox.draw("dt_bias", gates, weights),
            state: sandbox.draw("S", batch * heads * key_width * value_width, Rows::F32),
        }
    }

    /// A convolution's channels of one sequence, before any norm, and its next conv state.
    fn convolved(&self, of: &Tensors, n: usize, batch: usize) -> [Vec<f64>; 2] {
        let (widths, kept) = (widths(self.dims), self.window - 1);
        let (width, first) = (widths[n], widths[..n].iter().sum::<usize>());
        let line = self.columns().all;
        let newest = &of.y[batch * line + first..][..width];
        let before = match self.given {
            true => of.conv_states[n][batch * kept * width..][..kept * width].to_vec(),
            false => vec![0.0; kept * width],
        };
        let seen = [&before, newest].concat();
        let channel = |c: usize| {
            let bias = of.biases[n].get(c).copied().unwrap_or(0.0);
            let taps = (0..self.window).map(|w| of.weights[n][w * width + c] * seen[w * width + c]);
            activated(bias + taps.sum::<f64>(), self.activation)
        };
        [(0..width).map(channel).collect(), seen[width..].to_vec()]
    }

    /// o, S', the next conv states and what is copied.
    fn truth(&self, of: &Tensors) -> [Vec<f64>; 6] {
        let Dims { batch, key_heads, heads, key_width, value_width, .. } = self.dims;
        let mut found: [Vec<f64>; 6] = Default::default();
        for b in 0..batch {
            let line = &of.y[b * self.columns().all..][..self.columns().all];
            let [beta_at, decay_at, copied_at] = self.places();
            let mut rows = vec![];
            for n in 0..3 {
                let [values, next] = self.convolved(of, n, b);
                rows.push(values);
                found[2 + n].extend(next);
            }
            for h in 0..heads {
                let group = h / (heads / key_heads);
                let head = |n: usize| {
                    let x = &rows[n][group * key_width..][..key_width];
                    let squares: f64 = x.iter().map(|x| x * x).sum();
                    let scale = self.factor(n) / (squares + EPSILON).sqrt();
                    x.iter()
                        .map(|x| if self.normed[n] { x * scale } else { *x })
                        .collect::<Vec<_>>()
                };
                let (q, k) = (head(0), head(1));
                let decay = match self.decays {
                    true => {
                        let z = line[decay_at + h] + of.dt_bias[h];
                        (-of.a_log[h].exp() * (z.max(0.0) + (-z.abs()).exp().ln_1p())).exp()
                    }
                    false => 1.0,
                };
                let state = &of.state[(b * heads + h) * key_width * value_width..];
                let mut next = vec![0.0; key_width * value_width];
                for j in 0..value_width {
                    let column = |i: usize| decay * state[i * value_width + j];
                    let mut u = rows[2][h * value_width + j];
                    if self.delta {
                        let retrieved: f64 = (0..key_width).map(|i| k[i] * column(i)).sum();
                        u = SCALE * sigmoid(line[beta_at + h]) * (u - retrieved);
                    }
                    let mut read = 0.0;
                    for i in 0..key_width {
                        next[i * value_width + j] = column(i) + k[i] * u;
                        read += q[i] * next[i * value_width + j];
                    }
                    found[0].push(read);
                }
                found[1].extend(next);
            }
            found[5].extend(&line[copied_at..copied_at + self.copied]);
        }
        found
    }
}

fn is_right<R: Runtime>(sandbox: &Sandbox<'_, R>, case: &Case, weights: Rows) {
    let of = case.draw(sandbox, weights);
    let (rows, columns) = (sandbox.rows, case.columns());
    let three = |tensors: &[Vec<f64>; 3], of: Rows| tensors.each_ref().map(|t| sandbox.put(t, of));
    let y = sandbox.put(&of.y, rows);
    let taps = three(&of.weights, weights);
    let biases = case.biased.then(|| three(&of.biases, weights));
    let conv_states = case.given.then(|| three(&of.conv_states, rows));
    let decay = case.decays.then(|| [&of.a_log, &of.dt_bias].map(|x| sandbox.put(x, weights)));
    let state = sandbox.put(&of.state, Rows::F32);
    let inputs = Inputs {
        y: &y,
        weights: taps.each_ref(),
        biases: biases.as_ref().map(|x| x.each_ref()),
        conv_states: conv_states.as_ref().map(|x| x.each_ref()),
        decay: decay.as_ref().map(|x| x.each_ref()),
        state: &state,
    };
    let types = Types { rows: rows.dtype(), weights: weights.dtype() };
    let got = launch(sandbox.client, case.dims, &columns, inputs, types).expect("it fits");
    let [o, next, q, k, v, copied] = case.truth(&of);
    let what = |name: &str| format!("{name}, {rows:?}, {weights:?}, {case:?}");
    let limit = if rows == Rows::F32 { 1e-5 } else { 8e-3 };
    assert_close(&what("o"), &o, &sandbox.get(&got.o), limit);
    assert_close(&what("S"), &next, &sandbox.get(&got.state), 1e-5);
    for (n, (state, want)) in got.conv_states.iter().zip([q, k, v]).enumerate() {
        assert_eq!(sandbox.get(state), want, "{}", what(&format!("conv state {n}")));
    }
    let got = got.copied.as_ref().map(|copied| sandbox.get(copied));
    assert_eq!(got.unwrap_or_default(), copied, "{}", what("copied"));
}

/// B, Hk, H, K, V.
fn dims([batch, key_heads, heads, key_width, value_width]: [usize; 5]) -> Dims {
    Dims { batch, tokens: 1, key_heads, heads, key_width, value_width }
}

/// Rows in one slice and in many, in one turn and in two that do and do not stay in registers; widths that end inside
/// a slice's rows and inside a cube's columns; grouped heads.
fn cases() -> Vec<Case> {
    let case = Case {
        dims: dims([2, 2, 2, 16, 40]),
        window: 4,
        activation: Activation::Silu,
        normed: [true; 2],
        delta: true,
        decays: true,
        biased: false,
        given: true,
        copied: 80,
    };
    let of = |sizes| Case { dims: dims(sizes), ..case.clone() };
    let linear = Case { delta: false, ..of([2, 1, 2, 37, 33]) };
    vec![
        Case { decays: false, biased: true, window: 2, ..of([3, 1, 3, 5, 37]) },
        Case { given: false, copied: 0, ..of([1, 2, 4, 130, 33]) },
        Case { normed: [true, false], copied: 7, ..of([2, 1, 1, 256, 5]) },
        Case { copied: 5000, ..of([40, 2, 4, 256, 64]) },
        Case { normed: [false, true], window: 3, ..linear.clone() },
        Case {
            normed: [false; 2],
            decays: false,
            activation: Activation::Identity,
            ..linear.clone()
        },
        Case { activation: Activation::Sigmoid, window: UNROLLED, ..linear },
        case,
    ]
}

/// The tests of one device, whose client `with_client` has.
macro_rules! each_kernel {
    () => {
        #[test]
        fn tokens_are_right() {
            with_client(|client| {
                everywhere(client, |sandbox| {
                    for case in cases() {
                        is_right(sandbox, &case, Rows::F32);
                    }
                    let last = cases().pop().expect("there are cases");
                    is_right(sandbox, &last, sandbox.rows);
                });
            });
        }

        #[test]
        fn what_the_kernel_cannot_take_is_refused() {
            with_client(refusals);
        }
    };
}

fn refusals<R: Runtime>(client: &ComputeClient<R>) {
    let x = client.create_from_slice(&[0; 64]);
    let f32 = Rows::F32.dtype();
    let last = cases().pop().expect("there are cases");
    let inputs = Inputs {
        y: &x,
        weights: [&x; 3],
        biases: None,
        conv_states: None,
        decay: Some([&x; 2]),
        state: &x,
    };
    let run = |case: &Case| {
        let types = Types { rows: f32, weights: f32 };
        launch(client, case.dims, &case.columns(), inputs, types).err()
    };
    let wide = Case { dims: dims([1, 1, 1, 300, 4]), ..last.clone() };
    assert_eq!(run(&wide), Some(Refusal::Width { name: "K", got: 300, most: WIDEST }));
    let long = Case { window: 9, ..last.clone() };
    assert_eq!(run(&long), Some(Refusal::Width { name: "window", got: 9, most: UNROLLED }));
    let two = Dims { tokens: 2, ..last.dims };
    let tokens = Refusal::TooLarge { what: "tokens of a step", got: 2, most: 1 };
    assert_eq!(run(&Case { dims: two, ..last }), Some(tokens));
}

#[cfg(feature = "cuda")]
mod on_cuda {
    use super::*;
    use crate::tests::on_cuda::with_client;

    each_kernel!();
}

mod on_wgpu {
    use super::*;
    use crate::tests::on_wgpu::with_client;

    each_kernel!();
}
