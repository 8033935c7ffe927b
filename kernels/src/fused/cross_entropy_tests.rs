//! Losses and gradients of logits against f64.

use super::*;
use crate::tests::Rows;
use cubecl::ir::{ElemType, IntKind};
use linattn_oracle::{Rng, assert_close};

const I32: StorageType = StorageType::Scalar(ElemType::Int(IntKind::I32));
const SCALE: f32 = 0.125;
const LOSS: Loss = Loss { scale: SCALE, gradient: true };

/// A device, and the type of logits.
struct Case<'a, R: Runtime> {
    client: &'a ComputeClient<R>,
    rows: Rows,
}

impl<R: Runtime> Case<'_, R> {
    fn put(&self, values: &[f64]) -> Handle {
        self.client.create_from_slice(&self.rows.bytes(values))
    }

    fn put_ids(&self, ids: &[i32]) -> Handle {
        let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        self.client.create_from_slice(&bytes)
    }

    fn bytes(&self, handle: &Handle) -> Vec<u8> {
        self.client.read_one(handle.clone()).expect("the kernels ran").to_vec()
    }

    fn types(&self) -> Types {
        Types { logits: self.rows.dtype(), bias: self.rows.dtype(), target: I32 }
    }

    /// Numbers from N(0, 9), as this type holds them.
    fn draw(&self, name: &str, numbers: usize) -> Vec<f64> {
        let mut rng = Rng::named(3, name);
        let mut values = (0..numbers).map(|_| 3.0 * rng.normal()).collect::<Vec<_>>();
        self.rows.round(&mut values);
        values
    }

    fn limit(&self) -> f64 {
        if self.rows == Rows::F32 { 1e-5 } else { 8e-3 }
    }
}

/// `test` in every type that the device has.
fn everywhere<R: Runtime>(client: &ComputeClient<R>, test: impl Fn(&Case<'_, R>)) {
    for rows in [Rows::F32, Rows::F16, Rows::Bf16] {
        if check_type(client, rows.dtype()).is_ok() {
            test(&Case { client, rows });
        }
    }
}

/// The loss of one row.
fn loss(z: &[f64], target: usize) -> f64 {
    let most = z.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = z.iter().map(|z| (z - most).exp()).sum();
    f64::from(SCALE) * (most + sum.ln() - z[target])
}

/// The gradient of [`loss`].
fn slope(z: &[f64], target: usize) -> Vec<f64> {
    let most = z.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = z.iter().map(|z| (z - most).exp()).sum();
    let share = |(n, z): (usize, &f64)| {
        f64::from(SCALE) * ((z - most).exp() / sum - f64::from(u8::from(n == target)))
    };
    z.iter().enumerate().map(share).collect()
}

#[test]
fn the_truth_is_its_own_gradient() {
    let z = [0.3, -1.2, 2.0, 0.0];
    for (n, want) in slope(&z, 1).into_iter().enumerate() {
        let at = |step: f64| {
            let mut z = z;
            z[n] += step;
            loss(&z, 1)
        };
        let got = (at(1e-5) - at(-1e-5)) / 2e-5;
        assert!((want - got).abs() < 1e-9, "{n}: {want}, {got}");
    }
}

fn losses_are_right<R: Runtime>(case: &Case<'_, R>, dims: Dims, biased: bool, offset: f64) {
    let Dims { rows: count, vocab, padding } = dims;
    let columns = vocab + padding;
    let mut logits = case.draw("logits", count * columns);
    logits.iter_mut().for_each(|z| *z += offset);
    case.rows.round(&mut logits);
    let bias = case.draw("bias", columns);
    let target: Vec<i32> = (0..count).map(|m| ((m * 31 + 7) % vocab) as i32).collect();
    let on_bias = case.put(&bias);
    let on_target = case.put_ids(&target);
    let run = |gradient| {
        let on_logits = case.put(&logits);
        let given = biased.then_some(&on_bias);
        let types = case.types();
        let inputs = Inputs { logits: &on_logits, bias: given, target: &on_target };
        let loss = losses(case.client, dims, inputs, Loss { gradient, ..LOSS }, types)
            .expect("nothing is wrong with it");
        assert_eq!(loss.shape, [count]);
        (case.bytes(&loss.handle), case.bytes(&on_logits))
    };
    let (mut want, mut want_slope) = (vec![], vec![]);
    for (row, target) in logits.chunks_exact(columns).zip(&target) {
        let add = |(z, b): (&f64, &f64)| if biased { z + b } else { *z };
        let z: Vec<f64> = row.iter().zip(&bias).map(add).take(vocab).collect();
        want.push(loss(&z, *target as usize));
        want_slope.extend(slope(&z, *target as usize));
        want_slope.extend(vec![0.0; padding]);
    }
    let what = format!("{dims:?}, bias {biased}, + {offset}, {:?}", case.rows);
    let (got, left) = run(true);
    // Logits are what they are: only the arithmetic counts, which is f32.
    assert_close(&what, &want, &Rows::F32.numbers(&got), 1e-5);
    let got_slope = case.rows.numbers(&left);
    if vocab > 1 {
        assert_close(&format!("{what}: gradient"), &want_slope, &got_slope, case.limit());
    }
    assert!((&got, &left) == (&run(true).0, &run(true).1), "{what}: the same bits");
    let (alone, unchanged) = run(false);
    assert!(alone == got && case.rows.numbers(&unchanged) == logits, "{what}: without gradient");
}

fn masked_logits_are_left_out<R: Runtime>(case: &Case<'_, R>) {
    let dims = Dims { rows: 1, vocab: 20, padding: 0 };
    let mut logits = case.draw("logits", 20);
    logits[3..9].fill(f64::NEG_INFINITY);
    let on_logits = case.put(&logits);
    let (target, types) = (case.put_ids(&[12]), case.types());
    let inputs = Inputs { logits: &on_logits, bias: None, target: &target };
    let got = losses(case.client, dims, inputs, LOSS, types).expect("nothing is wrong with it");
    let got = Rows::F32.numbers(&case.bytes(&got.handle));
    assert_close("masked", &[loss(&logits, 12)], &got, 1e-5);
    let left = case.rows.numbers(&case.bytes(&on_logits));
    assert_close("masked gradient", &slope(&logits, 12), &left, case.limit());
}

fn invalid_targets_are_seen<R: Runtime>(case: &Case<'_, R>) {
    let dims = Dims { rows: 4, vocab: 40, padding: 8 };
    let on_logits = case.put(&case.draw("logits", 4 * 48));
    let (target, types) = (case.put_ids(&[5, -1, 40, 39]), case.types());
    let inputs = Inputs { logits: &on_logits, bias: None, target: &target };
    let got = losses(case.client, dims, inputs, LOSS, types).expect("it runs");
    let got = Rows::F32.numbers(&case.bytes(&got.handle));
    let left = case.rows.numbers(&case.bytes(&on_logits));
    for (m, invalid) in [false, true, true, false].into_iter().enumerate() {
        assert_eq!(got[m].is_nan(), invalid, "loss {m}");
        let row = &left[m * 48..][..40];
        assert!(row.iter().all(|x| x.is_nan() == invalid), "gradient {m}");
    }
}

fn totals_are_right<R: Runtime>(client: &ComputeClient<R>) {
    let case = Case { client, rows: Rows::F32 };
    for len in [1, 255, 5000, 8192, 20_001, 70_000] {
        let x: Vec<f64> = case.draw("x", len).iter().map(|x| x.abs()).collect();
        let on_x = case.put(&x);
        let run = || case.bytes(&total(client, &on_x, len).expect("it fits").handle);
        let got = run();
        assert_close(&format!("{len}"), &[x.iter().sum()], &Rows::F32.numbers(&got), 1e-5);
        assert!(got == run(), "{len}: the same bits");
    }
    assert!(total(client, &case.put(&[0.0]), 0).is_err(), "nothing");
}

fn refusals<R: Runtime>(client: &ComputeClient<R>) {
    let x = client.empty(16);
    let types = Types { logits: F32, bias: F32, target: I32 };
    let run = |rows, vocab, types, biased: bool| {
        let inputs = Inputs { logits: &x, bias: biased.then_some(&x), target: &x };
        losses(client, Dims { rows, vocab, padding: 0 }, inputs, LOSS, types).err()
    };
    assert_eq!(run(0, 4, types, false), Some(Refusal::Empty { batch: 0, tokens: 4 }));
    assert_eq!(run(4, 0, types, false), Some(Refusal::Empty { batch: 4, tokens: 0 }));
    let padded = Dims { rows: 4, vocab: 0, padding: 8 };
    let inputs = Inputs { logits: &x, bias: None, target: &x };
    let none = losses(client, padded, inputs, LOSS, types).err();
    assert_eq!(none, Some(Refusal::Empty { batch: 4, tokens: 0 }), "padding alone");
    let (what, got, most) = ("numbers in a tensor", 1 << 32, u32::MAX as usize);
    let large = Some(Refusal::TooLarge { what, got, most });
    assert_eq!(run(1 << 16, 1 << 16, types, false), large);
    let logits = Types { logits: I32, ..types };
    assert_eq!(run(1, 4, logits, false), Some(Refusal::Type { got: I32 }));
    let target = Types { target: F32, ..types };
    assert_eq!(run(1, 4, target, false), Some(Refusal::Type { got: F32 }));
    let bias = Types { bias: I32, ..types };
    assert_eq!(run(1, 4, bias, true), Some(Refusal::Type { got: I32 }));
}

#[test]
fn teams_hold_rows_where_they_can() {
    let form = |vocab, width| {
        let form = Form::new(Dims { rows: 1, vocab, padding: 0 }, width, false, true);
        (form.team, form.held, form.whole)
    };
    assert_eq!(form(8192, 8), (256, 4, true));
    assert_eq!(form(8192, 4), (256, 8, true));
    assert_eq!(form(16, 8), (8, 1, true));
    assert_eq!(form(256, 4), (8, 8, true));
    assert_eq!(form(1, 1), (8, 1, true));
    assert_eq!(form(50_304, 8), (256, 4, false));
    assert_eq!(form(50_257, 1), (256, 8, false));
}

/// Rows that a few units hold, that a cube holds, and that are longer.
const SIZES: [Dims; 11] = [
    Dims { rows: 3, vocab: 1, padding: 0 },
    Dims { rows: 70, vocab: 16, padding: 0 },
    Dims { rows: 9, vocab: 37, padding: 0 },
    Dims { rows: 5, vocab: 260, padding: 0 },
    Dims { rows: 2, vocab: 1001, padding: 0 },
    Dims { rows: 2, vocab: 8192, padding: 0 },
    Dims { rows: 1, vocab: 10_002, padding: 0 },
    Dims { rows: 40, vocab: 127, padding: 1 },
    Dims { rows: 41, vocab: 13, padding: 3 },
    Dims { rows: 3, vocab: 67, padding: 5 },
    Dims { rows: 2, vocab: 10_001, padding: 7 },
];

/// The tests of one device, whose client `with_client` has.
macro_rules! each_kernel {
    () => {
        #[test]
        fn losses_and_gradients_are_those_of_the_formula() {
            with_client(|client| {
                everywhere(client, |case| {
                    for (n, dims) in SIZES.into_iter().enumerate() {
                        losses_are_right(case, dims, n % 2 == 0, 0.0);
                    }
                    losses_are_right(case, SIZES[1], true, 100.0);
                    losses_are_right(case, SIZES[6], false, -100.0);
                });
            });
        }

        #[test]
        fn logits_of_minus_infinity_count_as_nothing() {
            with_client(|client| everywhere(client, masked_logits_are_left_out));
        }

        #[test]
        fn targets_outside_the_vocabulary_give_nan() {
            with_client(|client| everywhere(client, invalid_targets_are_seen));
        }

        #[test]
        fn what_has_no_loss_is_refused() {
            with_client(refusals);
        }

        #[test]
        fn totals_of_any_length_are_right() {
            with_client(totals_are_right);
        }
    };
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
