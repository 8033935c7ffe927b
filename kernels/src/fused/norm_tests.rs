//! Norms and their gradients against f64.

use super::*;
use crate::fused::sandbox::{Sandbox, activated, everywhere, slope};
use crate::tests::Rows;
use cubecl::ir::{ElemType, UIntKind};
use linattn_oracle::{Rng, assert_close};

const F32_LIMIT: f64 = 1e-5;
const HALF: f64 = 8e-3;
const EPSILON: f64 = 1e-3;

/// A norm, and which tensors there are.
#[derive(Debug, Clone, Copy)]
struct Case {
    rows: usize,
    width: usize,
    measure: Measure,
    factor: f64,
    residual: bool,
    weighted: bool,
    biased: bool,
    gate: Option<Activation>,
    /// h has a gradient from elsewhere.
    given: bool,
}

const PLAIN: Case = Case {
    rows: 5,
    width: 37,
    measure: Measure::RootMeanSquare,
    factor: 1.0,
    residual: false,
    weighted: true,
    biased: false,
    gate: None,
    given: false,
};
const FULL: Case =
    Case { residual: true, biased: true, gate: Some(Activation::Silu), given: true, ..PLAIN };
const STANDARD: Case = Case { measure: Measure::Standard, biased: true, ..PLAIN };
const LENGTH: Case = Case { measure: Measure::Length, factor: 0.25, weighted: false, ..PLAIN };

/// Teams of 1 to 256 units, filled and not, of vectors of 1, 2 and 4 numbers.
const CASES: [Case; 16] = [
    PLAIN,
    FULL,
    STANDARD,
    LENGTH,
    Case { rows: 1, width: 1, ..FULL },
    Case { rows: 300, width: 3, measure: Measure::Standard, ..FULL },
    Case { rows: 70, width: 8, ..LENGTH },
    Case { rows: 33, width: 64, residual: true, given: true, ..PLAIN },
    Case { rows: 9, width: 128, gate: Some(Activation::Sigmoid), ..PLAIN },
    Case { rows: 20, width: 128, measure: Measure::Standard, ..FULL },
    Case { rows: 3, width: 130, gate: Some(Activation::Identity), ..LENGTH },
    Case { rows: 4, width: 256, weighted: false, biased: true, ..STANDARD },
    Case { rows: 6, width: 516, residual: true, ..STANDARD },
    Case { rows: 3, width: 2048, ..FULL },
    Case { rows: 2, width: 1021, given: true, ..LENGTH },
    Case { rows: 2, width: 8191, measure: Measure::Standard, ..FULL },
];

/// Numbers of a case, and of its gradients. What is not there is neutral.
#[derive(Clone)]
struct Numbers {
    x: Vec<f64>,
    residual: Vec<f64>,
    gate: Vec<f64>,
    weight: Vec<f64>,
    bias: Vec<f64>,
    d_y: Vec<f64>,
    d_h: Vec<f64>,
}

/// Outputs of a forward or a backward pass in f64.
struct Truth {
    y: Vec<f64>,
    h: Vec<f64>,
    d_h: Vec<f64>,
    d_gate: Vec<f64>,
    d_weight: Vec<f64>,
    d_bias: Vec<f64>,
}

impl Case {
    fn norm(&self) -> Norm {
        Norm {
            rows: self.rows,
            width: self.width,
            measure: self.measure,
            epsilon: EPSILON as f32,
            factor: self.factor as f32,
            activation: self.gate.unwrap_or(Activation::Silu),
        }
    }

    fn draw<R: Runtime>(
        &self,
        sandbox: &Sandbox<'_, R>,
        [x, residual, y, weights]: [Rows; 4],
    ) -> Numbers {
        let all = self.rows * self.width;
        let or = |there: bool, name: &str, numbers: usize, rows: Rows, neutral: f64| match there {
            true => sandbox.draw(name, numbers, rows),
            false => vec![neutral; numbers],
        };
        let wide = if self.residual { residual } else { x };
        let mut numbers = Numbers {
            x: sandbox.draw("x", all, x),
            residual: or(self.residual, "residual", all, residual, 0.0),
            gate: or(self.gate.is_some(), "gate", all, y, 0.0),
            weight: or(self.weighted, "weight", self.width, weights, 1.0),
            bias: or(self.biased, "bias", self.width, weights, 0.0),
            d_y: sandbox.draw("d_y", all, y),
            d_h: or(self.given, "d_h", all, wide, 0.0),
        };
        if self.rows > 1 {
            // Nothing to divide by but epsilon.
            numbers.x[..self.width].fill(0.0);
            numbers.residual[..self.width].fill(0.0);
        }
        numbers
    }

    /// c, r, and the factor of a sum over a row.
    fn statistics(&self, h: &[f64]) -> (Vec<f64>, f64, f64) {
        let width = h.len() as f64;
        let centered = self.measure == Measure::Standard;
        let mean = if centered { h.iter().sum::<f64>() / width } else { 0.0 };
        let c: Vec<f64> = h.iter().map(|h| h - mean).collect();
        let share = if self.measure == Measure::Length { 1.0 } else { 1.0 / width };
        let square = c.iter().map(|c| c * c).sum::<f64>() * share;
        (c, 1.0 / (square + f64::from(EPSILON as f32)).sqrt(), share)
    }

    fn open(&self, gate: f64) -> [f64; 2] {
        self.gate.map_or([1.0, 0.0], |f| [activated(gate, f), slope(gate, f)])
    }

    /// `y` of one row.
    fn row(&self, h: &[f64], gate: &[f64], weight: &[f64], bias: &[f64]) -> Vec<f64> {
        let (c, r, _) = self.statistics(h);
        let z = |n: usize| c[n] * r * self.factor * weight[n] + bias[n];
        (0..h.len()).map(|n| z(n) * self.open(gate[n])[0]).collect()
    }

    /// The adjoint, written out; `the_adjoint_is_that_of_the_forward_pass` compares it with differences.
    fn truth(&self, x: &Numbers, round: impl Fn(&mut [f64])) -> Truth {
        let width = self.width;
        let mut h: Vec<f64> = x.x.iter().zip(&x.residual).map(|(x, y)| x + y).collect();
        round(&mut h);
        let (mut y, mut d_h, mut d_gate) = (vec![], vec![], vec![]);
        let (mut d_weight, mut d_bias) = (vec![0.0; width], vec![0.0; width]);
        for row in 0..self.rows {
            let at = row * width..(row + 1) * width;
            let (h, gate, d_y) = (&h[at.clone()], &x.gate[at.clone()], &x.d_y[at.clone()]);
            y.extend(self.row(h, gate, &x.weight, &x.bias));
            let (c, r, share) = self.statistics(h);
            let mut d_n = vec![];
            for n in 0..width {
                let normal = c[n] * r * self.factor;
                let [open, slope] = self.open(gate[n]);
                let d_z = d_y[n] * open;
                d_gate.push(d_y[n] * (normal * x.weight[n] + x.bias[n]) * slope);
                d_weight[n] += d_z * normal;
                d_bias[n] += d_z;
                d_n.push(d_z * x.weight[n] * self.factor);
            }
            let along = d_n.iter().zip(&c).map(|(d, c)| d * c).sum::<f64>() * r * r * share;
            let mean = match self.measure {
                Measure::Standard => d_n.iter().sum::<f64>() * share,
                _ => 0.0,
            };
            d_h.extend(
                (0..width).map(|n| r * (d_n[n] - c[n] * along - mean) + x.d_h[at.start + n]),
            );
        }
        Truth { y, h, d_h, d_gate, d_weight, d_bias }
    }

    /// The number whose gradients are those of `truth`.
    fn loss(&self, x: &Numbers) -> f64 {
        let Truth { y, h, .. } = self.truth(x, |_| {});
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        dot(&y, &x.d_y) + dot(&h, &x.d_h)
    }
}

#[test]
fn the_adjoint_is_that_of_the_forward_pass() {
    for (seed, case) in [FULL, STANDARD, LENGTH, CASES[5]].into_iter().enumerate() {
        let case = Case { rows: 2, width: 5, ..case };
        let mut rng = Rng::named(seed as u64, "numbers");
        let mut draw = |numbers| (0..numbers).map(|_| rng.normal()).collect::<Vec<_>>();
        let [x, residual, gate, d_y, d_h] = [(); 5].map(|()| draw(10));
        let [weight, bias] = [(); 2].map(|()| draw(5));
        let x = Numbers { x, residual, gate, weight, bias, d_y, d_h };
        let truth = case.truth(&x, |_| {});
        type Field = fn(&mut Numbers) -> &mut Vec<f64>;
        let fields: [(&str, &[f64], Field); 4] = [
            ("x", &truth.d_h, |x| &mut x.x),
            ("gate", &truth.d_gate, |x| &mut x.gate),
            ("weight", &truth.d_weight, |x| &mut x.weight),
            ("bias", &truth.d_bias, |x| &mut x.bias),
        ];
        for (name, want, field) in fields {
            let difference = |n: usize| {
                let loss = |step: f64| {
                    let mut moved = x.clone();
                    field(&mut moved)[n] += step;
                    case.loss(&moved)
                };
                (loss(1e-5) - loss(-1e-5)) / 2e-5
            };
            let got: Vec<f64> = (0..want.len()).map(difference).collect();
            if name != "gate" || case.gate.is_some() {
                assert_close(&format!("{case:?}: {name}"), want, &got, 1e-6);
            }
        }
    }
}

fn limit(dtype: StorageType) -> f64 {
    if dtype == F32 { F32_LIMIT } else { HALF }
}

fn case_is_right<R: Runtime>(sandbox: &Sandbox<'_, R>, case: &Case, kinds: [Rows; 4]) {
    let numbers = case.draw(sandbox, kinds);
    let [x, residual, y, weights] = kinds.map(Rows::dtype);
    let types = Types { x, residual, y, weights };
    let wide = if case.residual { kinds[1] } else { kinds[0] };
    let truth = case.truth(&numbers, |h| wide.round(h));
    let if_there = |there: bool, values: &[f64], rows| there.then(|| sandbox.put(values, rows));
    let gate = if_there(case.gate.is_some(), &numbers.gate, kinds[2]);
    let residual = if_there(case.residual, &numbers.residual, kinds[1]);
    let weight = if_there(case.weighted, &numbers.weight, kinds[3]);
    let bias = if_there(case.biased, &numbers.bias, kinds[3]);
    let on_x = sandbox.put(&numbers.x, kinds[0]);
    let inputs = Inputs {
        x: &on_x,
        residual: residual.as_ref(),
        gate: gate.as_ref(),
        weight: weight.as_ref(),
        bias: bias.as_ref(),
    };
    let what = format!("{case:?}, {kinds:?}");
    let check = |name: &str, want: &[f64], got: &Buffer| {
        let numbers = sandbox.get(got);
        assert_close(&format!("{what}: {name}"), want, &numbers, limit(got.dtype));
        numbers
    };
    let run = || forward(sandbox.client, case.norm(), types, inputs).expect("it is taken");
    let out = run();
    assert_eq!((out.y.dtype, out.h.is_some()), (types.y, case.residual), "{what}");
    let got = check("y", &truth.y, &out.y);
    assert_eq!(got, sandbox.get(&run().y), "{what}: the same bits");
    if let Some(h) = &out.h {
        assert_eq!(h.dtype, types.residual, "{what}");
        check("h", &truth.h, h);
    }

    let d_y = sandbox.put(&numbers.d_y, kinds[2]);
    let d_h = if_there(case.given, &numbers.d_h, wide);
    let given = Given {
        h: out.h.as_ref().map_or(&on_x, |h| &h.handle),
        residual: case.residual,
        gate: inputs.gate,
        weight: inputs.weight,
        bias: inputs.bias,
        d_y: &d_y,
        d_h: d_h.as_ref(),
    };
    let run = || backward(sandbox.client, case.norm(), types, given).expect("it is taken");
    let back = run();
    let again = run();
    assert_eq!(back.x.dtype, wide.dtype(), "{what}");
    assert_eq!(check("d_x", &truth.d_h, &back.x), sandbox.get(&again.x), "{what}: the same bits");
    assert_eq!(back.x_narrow.is_some(), wide != kinds[0], "{what}");
    let optional = [
        ("d_x, narrow", &truth.d_h, &back.x_narrow, &again.x_narrow),
        ("d_gate", &truth.d_gate, &back.gate, &again.gate),
        ("d_weight", &truth.d_weight, &back.weight, &again.weight),
        ("d_bias", &truth.d_bias, &back.bias, &again.bias),
    ];
    for (name, want, got, again) in optional {
        if let (Some(got), Some(again)) = (got, again) {
            assert_eq!(check(name, want, got), sandbox.get(again), "{what}, {name}: the same bits");
        }
    }
    assert_eq!(back.gate.is_some(), case.gate.is_some(), "{what}");
    assert_eq!(
        [back.weight.is_some(), back.bias.is_some()],
        [case.weighted, case.biased],
        "{what}"
    );
}

/// All in one type, and rows of 16 bits beside a residual and weights of f32.
fn all_are_right<R: Runtime>(sandbox: &Sandbox<'_, R>) {
    let rows = sandbox.rows;
    if rows == Rows::F32 {
        CASES.iter().for_each(|case| case_is_right(sandbox, case, [rows; 4]));
        return;
    }
    for case in [CASES[1], CASES[3], CASES[9]] {
        case_is_right(sandbox, &case, [rows, Rows::F32, rows, Rows::F32]);
        case_is_right(sandbox, &case, [rows; 4]);
    }
    case_is_right(sandbox, &FULL, [Rows::F32, rows, Rows::F32, rows]);
}

/// More rows than one round of the cubes that write partial sums.
fn long_runs_are_right<R: Runtime>(sandbox: &Sandbox<'_, R>) {
    if sandbox.rows == Rows::F32 {
        let rows = 2 * CUBES * multiprocessors(sandbox.client) * 4 + 3;
        case_is_right(sandbox, &Case { rows, width: 300, ..STANDARD }, [Rows::F32; 4]);
    }
}

#[test]
fn runs_have_every_row() {
    for [rows, teams, most] in [[1, 1, 1], [65_536, 16, 528], [2048, 1, 528], [37, 4, 5]] {
        let [run, cubes] = runs(rows, teams, most);
        assert!(run * cubes * teams >= rows && run * (cubes - 1) * teams < rows);
        assert!(cubes <= most);
    }
    assert_eq!(runs(65_536, 16, 528), [8, 512]);
    assert_eq!(runs(2048, 16, 528), [1, 128]);
    assert_eq!([1, 2, 3, 32, 37, 512, 8191].map(team), [1, 1, 2, 16, 32, 256, 256]);
}

fn refusals<R: Runtime>(client: &ComputeClient<R>) {
    let x = client.empty(16);
    let inputs = Inputs { x: &x, residual: None, gate: None, weight: None, bias: None };
    let types = Types { x: F32, residual: F32, y: F32, weights: F32 };
    let run = |rows, width| {
        let norm = Norm { rows, width, ..PLAIN.norm() };
        forward(client, norm, types, inputs).err()
    };
    assert_eq!(run(0, 8), Some(Refusal::Empty { batch: 0, tokens: 8 }));
    assert_eq!(run(8, 0), Some(Refusal::Empty { batch: 8, tokens: 0 }));
    let got = WIDEST + 1;
    assert_eq!(run(1, got), Some(Refusal::Width { name: "W", got, most: WIDEST }));
    let (got, most) = (1 << 32, u32::MAX as usize);
    let what = "numbers in a tensor";
    assert_eq!(run(1 << 20, 1 << 12), Some(Refusal::TooLarge { what, got, most }));
    let integers = StorageType::Scalar(ElemType::UInt(UIntKind::U32));
    for types in [
        Types { x: integers, ..types },
        Types { residual: integers, ..types },
        Types { y: integers, ..types },
        Types { weights: integers, ..types },
    ] {
        let why = forward(client, PLAIN.norm(), types, inputs).err();
        assert_eq!(why, Some(Refusal::Type { got: integers }), "{types:?}");
    }
}

/// The tests of one device, whose client `with_client` has.
macro_rules! each_kernel {
    ($runtime:ty) => {
        #[test]
        fn norms_and_their_gradients_are_right() {
            with_client(|client: &ComputeClient<$runtime>| everywhere(client, all_are_right));
        }

        #[test]
        fn runs_of_many_rows_are_right() {
            with_client(|client: &ComputeClient<$runtime>| everywhere(client, long_runs_are_right));
        }

        #[test]
        fn what_cannot_be_normalised_is_refused() {
            with_client(refusals::<$runtime>);
        }
    };
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
