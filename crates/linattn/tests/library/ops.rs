//! The operations against the f64 recurrences: forward, every gradient, steps, cuts.

use crate::call::{Call, Rule, download, upload};
use crate::support::alone;
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{DType, Tensor};
use linattn::ops::{self, LinearAttentionBackend};
use linattn_oracle::{
    Complex, Decay, DecayLevel, Dims, Family, Gradients, Inputs, Output, Read, Recipe, Rng,
    ScanInputs, Strength, Transition, assert_close, backward, forward, linear_scan,
    linear_scan_backward, normals, slice_tokens,
};

/// Limits on RMS error over RMS truth.
pub const F32_LIMIT: f64 = 1e-5;

/// Which outputs the loss reads.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Reads {
    Outputs,
    State,
    Both,
}

/// Outputs over whole sequences, and the gradients of as much of `sum(d_o * o) + sum(d_state * state)` as
/// is read; of the state before the first token only if `x` has one.
pub fn differentiate<B: AutodiffBackend + LinearAttentionBackend>(
    device: &B::Device,
    x: &Inputs,
    reads: Reads,
    (d_o, d_state): (&[f64], &[f64]),
    dtype: DType,
) -> (Output, Gradients) {
    let _alone = alone();
    let input = Call::<B>::new(x, [dtype; 2], device).require_grad();
    let (o, state) = input.clone().run().unwrap();
    let output = Output { o: download(o.clone()), state: download(state.clone()) };
    let part = |y: Tensor<B, 4>, d: &[f64]| {
        let d = upload::<B, 4>(d, y.dims(), y.dtype(), device);
        (y * d).sum()
    };
    let loss = match reads {
        Reads::Outputs => part(o, d_o),
        Reads::State => part(state, d_state),
        Reads::Both => part(o, d_o) + part(state, d_state),
    };
    let found = loss.backward();
    let got4 = |x: &Tensor<B, 4>| download(x.grad(&found).expect("it has a gradient"));
    let got3 = |x: &Tensor<B, 3>| download(x.grad(&found).expect("it has a gradient"));
    let [erase, a, b] = input.rows().map(|rows| rows.map(got4));
    let gradients = Gradients {
        q: got4(&input.q),
        k: got4(&input.k),
        v: got4(&input.v),
        g: input.g.as_ref().map(|g| match g {
            ops::Decay::Scalar(g) => got3(g),
            ops::Decay::Vector(g) => got4(g),
        }),
        beta: input.beta().map(got3),
        erase,
        a,
        b,
        bonus: None,
        state: input.state.as_ref().map(got4).unwrap_or_default(),
    };
    (output, gradients)
}

/// Outputs of one token after another.
pub fn stepped<B: LinearAttentionBackend>(device: &B::Device, x: &Inputs) -> Output {
    let mut state = Call::<B>::new(x, [DType::F32; 2], device).state;
    let mut outputs = vec![];
    for t in 0..x.dims.tokens {
        let token = slice_tokens(x, t, t + 1, None);
        let token = Call { state, ..Call::new(&token, [DType::F32; 2], device) };
        let (o, next) = token.step().unwrap();
        outputs.push(o);
        state = Some(next);
    }
    Output { o: download(Tensor::cat(outputs, 1)), state: download(state.unwrap()) }
}

/// Forward and every gradient of one case, chunked, against the recurrence.
fn hold_to_oracle<B>(what: &str, x: &Inputs, reads: Reads, limit: f64, dtype: DType)
where
    B: AutodiffBackend + LinearAttentionBackend,
    B::Device: Default,
{
    hold_on::<B>(&Default::default(), what, x, reads, limit, dtype);
}

fn hold_on<B: AutodiffBackend + LinearAttentionBackend>(
    device: &B::Device,
    what: &str,
    x: &Inputs,
    reads: Reads,
    limit: f64,
    dtype: DType,
) {
    let truth = forward(x);
    let weights = |name: &str, n: usize, used: bool| -> Vec<f64> {
        let mut rng = Rng::named(7, name);
        (0..n).map(|_| if used { rng.normal() } else { 0.0 }).collect()
    };
    let d_o = weights("d_o", truth.o.len(), reads != Reads::State);
    let d_state = weights("d_state", truth.state.len(), reads != Reads::Outputs);
    let want = backward(x, &d_o, &d_state);

    let (got, gradients) = differentiate::<B>(device, x, reads, (&d_o, &d_state), dtype);
    assert_close(&format!("{what}: o"), &truth.o, &got.o, limit);
    assert_close(&format!("{what}: state"), &truth.state, &got.state, limit);
    let check = |name: &str, want: &[f64], got: &[f64]| {
        assert_close(&format!("{what}, {reads:?}: d{name}"), want, got, limit);
    };
    check("q", &want.q, &gradients.q);
    check("k", &want.k, &gradients.k);
    check("v", &want.v, &gradients.v);
    for (name, want, got) in [
        ("g", &want.g, &gradients.g),
        ("beta", &want.beta, &gradients.beta),
        ("erase", &want.erase, &gradients.erase),
        ("a", &want.a, &gradients.a),
        ("b", &want.b, &gradients.b),
    ] {
        assert_eq!(want.is_some(), got.is_some(), "{what}: d{name}");
        if let (Some(want), Some(got)) = (want, got) {
            check(name, want, got);
        }
    }
    if x.state.is_some() {
        check("state", &want.state, &gradients.state);
    }
}

const FAMILIES: [Family; 2] = [Family::LinearAttention, Family::DeltaRule];
const DECAYS: [DecayLevel; 5] = [
    DecayLevel::None,
    DecayLevel::KeepAll,
    DecayLevel::Typical,
    DecayLevel::ForgetAll,
    DecayLevel::Mixed,
];

fn recipe(family: Family, decay: DecayLevel, state: bool) -> Recipe {
    Recipe { decay, state, strength: Strength::Typical, ..Recipe::new(family) }
}

/// Every recurrence that the fastest path does not take, with its name.
fn general_recipes(decay: DecayLevel) -> Vec<(String, Recipe)> {
    let mut list = vec![];
    for family in [Family::LinearAttention, Family::DeltaRule, Family::LowRank] {
        for vector_decay in [false, true] {
            for erase in [false, true] {
                for read in [Read::After, Read::Before] {
                    let delta = family == Family::DeltaRule;
                    let plain = !vector_decay && !erase && read == Read::After;
                    let known =
                        (delta || !erase) && (family != Family::LowRank || read == Read::After);
                    if known && (!plain || family == Family::LowRank) {
                        let name = format!(
                            "{family:?}, {decay:?}, vector {vector_decay}, erase {erase}, {read:?}"
                        );
                        let recipe =
                            Recipe { vector_decay, erase, read, ..recipe(family, decay, true) };
                        list.push((name, recipe));
                    }
                }
            }
        }
    }
    list
}

/// Widths are those of `tests/fixtures/ops`: a device that is a CPU compiles each kernel once.
fn dims(tokens: usize) -> Dims {
    Dims { batch: 2, tokens, key_heads: 2, heads: 2, key_width: 16, value_width: 24 }
}

/// Nine steps of every kind against the recurrence.
fn hold_steps<B: LinearAttentionBackend>(device: &B::Device) {
    for decay in DECAYS {
        let plain = FAMILIES.map(|family| (format!("{family:?}"), recipe(family, decay, true)));
        for (name, recipe) in plain.into_iter().chain(general_recipes(decay)) {
            for start in [false, true] {
                let shared = Dims { key_heads: 1, heads: 3, ..dims(9) };
                let recipe = Recipe { state: start, ..recipe };
                let x = Inputs::random(19, shared, &recipe);
                let truth = forward(&x);
                let got = stepped::<B>(device, &x);
                let what = format!("{name}, {decay:?}, initial state {start}");
                assert_close(&format!("{what}: o"), &truth.o, &got.o, F32_LIMIT);
                assert_close(&format!("{what}: state"), &truth.state, &got.state, F32_LIMIT);
            }
        }
    }
}

/// The real parts, and the imaginary parts where numbers are complex.
fn parts(x: &[Complex], complex: bool) -> Vec<Vec<f64>> {
    let re = x.iter().map(|x| x.re).collect();
    match complex {
        true => vec![re, x.iter().map(|x| x.im).collect()],
        false => vec![re],
    }
}

/// A scan on a device, and each gradient of it, against the loop.
fn hold_scan<B: AutodiffBackend + LinearAttentionBackend>(
    device: &B::Device,
    dims: [usize; 3],
    complex: bool,
    dtype: DType,
    limit: f64,
) {
    let _alone = alone();
    let what = format!("{dims:?}, complex {complex}, {dtype:?}");
    let [batch, tokens, width] = dims;
    let x = ScanInputs::random(tokens as u64, dims, complex);
    let d_h = normals(&mut Rng::named(7, "d_h"), x.b.len(), complex);
    let want = linear_scan_backward(&x, &d_h);
    let put = |x: &[Complex], tokens: usize| -> Vec<Tensor<B, 3>> {
        let shape = [batch, tokens, width];
        parts(x, complex)
            .iter()
            .map(|x| upload::<B, 3>(x, shape, dtype, device).require_grad())
            .collect()
    };
    let (a, b, state) = (put(&x.a, tokens), put(&x.b, tokens), put(&x.state, 1));
    let pair = |x: &[Tensor<B, 3>]| ops::Complex { re: x[0].clone(), im: x[1].clone() };
    let (h, last) = match complex {
        true => {
            let (h, last) = ops::complex_scan(pair(&a), pair(&b), Some(pair(&state))).unwrap();
            (vec![h.re, h.im], vec![last.re, last.im])
        }
        false => {
            let state = Some(state[0].clone());
            let (h, last) = ops::linear_scan(a[0].clone(), b[0].clone(), state).unwrap();
            (vec![h], vec![last])
        }
    };
    for ((want, h), last) in parts(&linear_scan(&x), complex).iter().zip(&h).zip(last) {
        assert_close(&format!("{what}: h"), want, &download(h.clone()), limit);
        let end = download(h.clone().narrow(1, tokens - 1, 1));
        assert_close(&format!("{what}: last"), &end, &download(last), limit);
    }
    let weights = parts(&d_h, complex);
    let terms = h.into_iter().zip(&weights);
    let loss = terms
        .map(|(h, w)| (h * upload::<B, 3>(w, dims, dtype, device)).sum())
        .reduce(|x, y| x + y)
        .unwrap();
    let gradients = loss.backward();
    for (name, inputs, want) in [("a", a, want.a), ("b", b, want.b), ("state", state, want.state)] {
        for (input, want) in inputs.iter().zip(parts(&want, complex)) {
            let got = download(input.grad(&gradients).expect("it has a gradient"));
            assert_close(&format!("{what}: d{name}"), &want, &got, limit);
        }
    }
}

/// `[.., inner]` times `[inner, ..]`.
fn multiply(a: &[f64], b: &[f64], inner: usize) -> Vec<f64> {
    let columns = b.len() / inner;
    let number = |row: &[f64], j: usize| -> f64 {
        row.iter().enumerate().map(|(k, x)| x * b[k * columns + j]).sum()
    };
    let rows = a.chunks_exact(inner);
    rows.flat_map(|row| (0..columns).map(|j| number(row, j)).collect::<Vec<_>>()).collect()
}

/// Rows of `columns` numbers as columns.
fn turned(x: &[f64], columns: usize) -> Vec<f64> {
    (0..columns).flat_map(|j| x.iter().skip(j).step_by(columns).copied()).collect()
}

/// A linear layer's product of few rows and of more, by a matrix that lies upright or turned, and its
/// gradients; `limit` is for Burn's products.
fn hold_affine<B: LinearAttentionBackend>(device: &B::Device, limit: f64) {
    type Tracked<T> = burn::backend::Autodiff<T>;
    let _alone = alone();
    for ([batch, tokens], from, to) in
        [([1, 1], 64, 96), ([3, 1], 130, 37), ([2, 32], 40, 24), ([5, 13], 20, 12)]
    {
        let rows = batch * tokens;
        let mut rng = Rng::named(to as u64, "affine");
        let mut draw = |n: usize| -> Vec<f64> { (0..n).map(|_| rng.normal()).collect() };
        let (x, d_y) = (draw(rows * from), draw(rows * to));
        let (weight, bias) = (draw(from * to), draw(to));
        let (shape, f32) = ([batch, tokens, from], DType::F32);
        let mut truth = multiply(&x, &weight, from);
        truth.chunks_exact_mut(to).for_each(|y| y.iter_mut().zip(&bias).for_each(|(y, b)| *y += b));

        let run = |weight: Tensor<B, 2>| {
            let bias = Some(upload(&bias, [to], f32, device));
            download(ops::affine(upload(&x, shape, f32, device), weight, bias).unwrap())
        };
        let own = if rows <= 64 { F32_LIMIT } else { limit };
        let what = format!("{rows} rows, {from} to {to}");
        assert_close(&what, &truth, &run(upload(&weight, [from, to], f32, device)), own);
        let lying = upload::<B, 2>(&turned(&weight, to), [to, from], f32, device).transpose();
        assert_close(&format!("{what}, turned"), &truth, &run(lying), limit);

        let input = upload::<Tracked<B>, 3>(&x, shape, f32, device).require_grad();
        let matrix = upload::<Tracked<B>, 2>(&weight, [from, to], f32, device).require_grad();
        let added = upload::<Tracked<B>, 1>(&bias, [to], f32, device).require_grad();
        let y = ops::affine(input.clone(), matrix.clone(), Some(added.clone())).unwrap();
        let weights = upload::<Tracked<B>, 3>(&d_y, [batch, tokens, to], f32, device);
        let gradients = (y * weights).sum().backward();
        let d_x = download(input.grad(&gradients).unwrap());
        let d_weight = download(matrix.grad(&gradients).unwrap());
        let d_bias = download(added.grad(&gradients).unwrap());
        for (name, want, got) in [
            ("x", multiply(&d_y, &turned(&weight, to), to), d_x),
            ("weight", multiply(&turned(&x, from), &d_y, rows), d_weight),
            ("bias", multiply(&vec![1.0; rows], &d_y, rows), d_bias),
        ] {
            assert_close(&format!("{what}: d{name}"), &want, &got, limit);
        }
    }
}

#[cfg(feature = "cpu")]
mod on_cpu {
    use super::*;
    use burn::backend::{Autodiff, Flex};

    type B = Autodiff<Flex>;

    #[test]
    fn chunks_agree_with_the_recurrence_at_every_length() {
        for tokens in [1, 7, 8, 15, 16, 17, 63, 64, 65, 130] {
            for family in FAMILIES {
                for decay in DECAYS {
                    let what = format!("{family:?}, {decay:?}, T={tokens}");
                    let x =
                        Inputs::random(tokens as u64, dims(tokens), &recipe(family, decay, true));
                    hold_to_oracle::<B>(&what, &x, Reads::Both, F32_LIMIT, DType::F32);
                }
            }
        }
    }

    #[test]
    fn every_other_recurrence_agrees_at_every_length() {
        for tokens in [1, 2, 15, 16, 17, 40] {
            for decay in DECAYS {
                for (what, recipe) in general_recipes(decay) {
                    let what = format!("{what}, T={tokens}");
                    let dims = Dims { key_heads: 1, ..dims(tokens) };
                    let x = Inputs::random(tokens as u64, dims, &recipe);
                    hold_to_oracle::<B>(&what, &x, Reads::Both, F32_LIMIT, DType::F32);
                    hold_to_oracle::<B>(&what, &x, Reads::Both, 1e-12, DType::F64);
                }
            }
        }
    }

    #[test]
    fn every_other_recurrence_is_exact_in_double_precision_at_every_width() {
        for (key_width, value_width) in [(12, 20), (1, 1), (5, 7)] {
            for (what, recipe) in general_recipes(DecayLevel::Mixed) {
                let what = format!("{what}, K={key_width}, V={value_width}");
                let dims = Dims { key_heads: 1, key_width, value_width, ..dims(35) };
                let x = Inputs::random(41, dims, &recipe);
                hold_to_oracle::<B>(&what, &x, Reads::Both, 1e-12, DType::F64);
            }
        }
    }

    #[test]
    fn small_gates_keep_their_digits_beside_large_ones() {
        for (what, recipe) in general_recipes(DecayLevel::Typical) {
            let mut x = Inputs::random(37, dims(40), &recipe);
            if let Some(Decay::Scalar(g) | Decay::Vector(g)) = &mut x.decay {
                // The spacing of f32 at 3000 is 2e-4: a difference of sums with such a log decay would be
                // that far off. Columns forget at tokens of their own.
                let columns = g.len() / (x.dims.batch * x.dims.tokens);
                let forgets = |at: usize| (at / columns + at % columns).is_multiple_of(3);
                for (at, g) in g.iter_mut().enumerate() {
                    *g = if forgets(at) { -3000.0 } else { *g };
                }
            }
            hold_to_oracle::<B>(&what, &x, Reads::Both, F32_LIMIT, DType::F32);
        }
    }

    #[test]
    fn the_algebra_is_exact_in_double_precision() {
        for family in FAMILIES {
            for decay in DECAYS {
                let what = format!("{family:?}, {decay:?}");
                let x = Inputs::random(3, dims(130), &recipe(family, decay, true));
                hold_to_oracle::<B>(&what, &x, Reads::Both, 1e-12, DType::F64);
            }
        }
    }

    #[test]
    fn gradients_are_right_whichever_output_is_read() {
        for family in FAMILIES {
            for reads in [Reads::Outputs, Reads::State] {
                for state in [false, true] {
                    let what = format!("{family:?}, state {state}");
                    let x =
                        Inputs::random(5, dims(70), &recipe(family, DecayLevel::Typical, state));
                    hold_to_oracle::<B>(&what, &x, reads, F32_LIMIT, DType::F32);
                }
            }
        }
    }

    #[test]
    fn every_strength_of_correction_is_right() {
        for strength in [Strength::Zero, Strength::One, Strength::Two] {
            for decay in [DecayLevel::None, DecayLevel::Typical] {
                let recipe = Recipe { strength, ..recipe(Family::DeltaRule, decay, true) };
                let x = Inputs::random(11, dims(65), &recipe);
                let what = format!("{strength:?}, {decay:?}");
                hold_to_oracle::<B>(&what, &x, Reads::Both, F32_LIMIT, DType::F32);
            }
        }
    }

    #[test]
    fn odd_widths_and_shared_key_heads_are_right() {
        for (key_heads, heads, key_width, value_width) in
            [(1, 1, 1, 1), (1, 3, 5, 7), (2, 4, 33, 1), (3, 3, 1, 17), (2, 6, 20, 24)]
        {
            for family in FAMILIES {
                let dims = Dims { batch: 2, tokens: 37, key_heads, heads, key_width, value_width };
                let x = Inputs::random(13, dims, &recipe(family, DecayLevel::Typical, true));
                let what = format!("{family:?}, {dims:?}");
                hold_to_oracle::<B>(&what, &x, Reads::Both, F32_LIMIT, DType::F32);
            }
        }
    }

    #[test]
    fn equal_keys_do_not_break_the_triangular_inverse() {
        let mut x =
            Inputs::random(17, dims(130), &recipe(Family::DeltaRule, DecayLevel::None, true));
        let row = x.k[..x.dims.key_width].to_vec();
        x.k = row.iter().copied().cycle().take(x.k.len()).collect();
        if let Transition::Delta { beta, .. } = &mut x.transition {
            beta.fill(1.0);
        }
        hold_to_oracle::<B>("equal keys", &x, Reads::Outputs, F32_LIMIT, DType::F32);
    }

    #[test]
    fn steps_agree_with_the_recurrence() {
        hold_steps::<B>(&Default::default());
    }

    #[test]
    fn a_sequence_can_be_cut_anywhere_and_its_state_handed_over() {
        let device = Default::default();
        for family in FAMILIES {
            let x = Inputs::random(23, dims(70), &recipe(family, DecayLevel::Mixed, true));
            let truth = forward(&x);
            for cut in [1, 15, 16, 17, 64, 69] {
                let first = slice_tokens(&x, 0, cut, x.state.clone());
                let (o1, s) = Call::<B>::new(&first, [DType::F32; 2], &device).run().unwrap();
                let rest = slice_tokens(&x, cut, 70, None);
                let rest = Call::<B>::new(&rest, [DType::F32; 2], &device);
                let (o2, s) = Call { state: Some(s), ..rest }.run().unwrap();
                let what = format!("{family:?}, cut at {cut}");
                let o = download(Tensor::cat(vec![o1, o2], 1));
                assert_close(&what, &truth.o, &o, F32_LIMIT);
                assert_close(&what, &truth.state, &download(s), F32_LIMIT);
            }
        }
    }

    #[test]
    fn a_gate_of_zero_gives_the_ungated_result_bit_for_bit() {
        let device = Default::default();
        for family in FAMILIES {
            let run = |decay| {
                let x = Inputs::random(29, dims(130), &recipe(family, decay, true));
                let (o, s) = Call::<B>::new(&x, [DType::F32; 2], &device).run().unwrap();
                (o.into_data(), s.into_data())
            };
            assert_eq!(run(DecayLevel::KeepAll), run(DecayLevel::None), "{family:?}");
        }
    }

    #[test]
    fn half_precision_inputs_give_half_precision_outputs_and_an_f32_state() {
        let device = Default::default();
        for dtype in [DType::F16, DType::BF16] {
            for family in FAMILIES {
                let mut x =
                    Inputs::random(31, dims(40), &recipe(family, DecayLevel::Typical, false));
                let round = |values: &mut Vec<f64>| {
                    let data = burn::tensor::TensorData::new(values.clone(), [values.len()]);
                    *values = data.convert_dtype(dtype).iter::<f64>().collect();
                };
                round(&mut x.q);
                round(&mut x.k);
                round(&mut x.v);
                let truth = forward(&x);
                let mut input = Call::<B>::new(&x, [DType::F32; 2], &device);
                input.q = input.q.cast(dtype);
                input.k = input.k.cast(dtype);
                input.v = input.v.cast(dtype);
                let (o, s) = input.run().unwrap();
                assert_eq!((o.dtype(), s.dtype()), (dtype, DType::F32));
                let what = format!("{family:?}, {dtype:?}");
                assert_close(&what, &truth.o, &download(o), 5e-3);
                assert_close(&what, &truth.state, &download(s), F32_LIMIT);
            }
        }
    }

    #[test]
    fn half_precision_learns_from_outputs_and_states_at_once() {
        let _alone = alone();
        let device = Default::default();
        for dtype in [DType::F16, DType::BF16] {
            for family in FAMILIES {
                let x = Inputs::random(37, dims(20), &recipe(family, DecayLevel::Typical, false));
                let input = Call::<Autodiff<Flex>>::new(&x, [DType::F32; 2], &device);
                let [q, k, v] = [&input.q, &input.k, &input.v]
                    .map(|rows| rows.clone().detach().cast(dtype).require_grad());
                let leaf = v.clone();
                let (o, s) = Call { q, k, v, ..input }.run().unwrap();
                let gradients = (o.cast(DType::F32).sum() + s.sum()).backward();
                let Dims { batch, heads, key_width, value_width, tokens, .. } = x.dims;
                let ones = |n: usize| vec![1.0; batch * heads * value_width * n];
                let want = backward(&x, &ones(tokens), &ones(key_width)).v;
                let got = leaf.grad(&gradients).unwrap();
                assert_close(&format!("{family:?}, {dtype:?}"), &want, &download(got), 3e-2);
            }
        }
    }

    /// The gradient of `w . d_v`, where d_v is the gradient of all outputs' squares, against central
    /// differences.
    #[test]
    fn gradients_have_gradients() {
        let _alone = alone();
        type Once = Autodiff<Flex>;
        type Twice = Autodiff<Once>;
        let device = Default::default();
        for family in FAMILIES {
            let x = Inputs::random(43, dims(11), &recipe(family, DecayLevel::Typical, false));
            let normals = |name: &str, n: usize| {
                let mut rng = Rng::named(1, name);
                (0..n).map(|_| rng.normal()).collect::<Vec<f64>>()
            };
            let (w, way) = (normals("w", x.v.len()), normals("way", x.k.len()));
            let d_v = |by: f64| {
                let k = x.k.iter().zip(&way).map(|(k, way)| k + by * way).collect();
                let moved = Call::<Once>::new(&Inputs { k, ..x.clone() }, [DType::F64; 2], &device);
                let v = moved.v.clone().require_grad();
                let (o, _) = Call { v: v.clone(), ..moved }.run().unwrap();
                let d_v = download(v.grad(&o.square().sum().backward()).unwrap());
                d_v.iter().zip(&w).map(|(d, w)| d * w).sum::<f64>()
            };
            let want = (d_v(1e-5) - d_v(-1e-5)) / 2e-5;

            let input = Call::<Twice>::new(&x, [DType::F64; 2], &device);
            let k = upload::<Once, 4>(&x.k, input.k.dims(), DType::F64, &device).require_grad();
            let v = input.v.clone().require_grad();
            let there = Call { k: Tensor::from_inner(k.clone()), v: v.clone(), ..input };
            let (o, _) = there.run().unwrap();
            let d_v = v.grad(&o.square().sum().backward()).unwrap();
            let weights = upload::<Once, 4>(&w, d_v.dims(), DType::F64, &device);
            let d_k = download(k.grad(&(d_v * weights).sum().backward()).unwrap());
            let got: f64 = d_k.iter().zip(&way).map(|(d, way)| d * way).sum();
            assert_close(&format!("{family:?}"), &[want], &[got], 1e-6);
        }
    }

    #[test]
    fn scans_agree_with_the_loop_at_every_length() {
        for tokens in [1, 2, 3, 4, 5, 7, 8, 9, 31, 64, 65, 1000] {
            for complex in [false, true] {
                let device = Default::default();
                hold_scan::<B>(&device, [2, tokens, 5], complex, DType::F32, F32_LIMIT);
                hold_scan::<B>(&device, [1, tokens, 3], complex, DType::F64, 1e-12);
            }
        }
    }

    #[test]
    fn a_scan_steps_as_it_runs() {
        let device = Default::default();
        let x = ScanInputs::random(2, [2, 6, 3], false);
        let put = |x: &[Complex], tokens: usize| {
            upload::<B, 3>(&parts(x, false)[0], [2, tokens, 3], DType::F32, &device)
        };
        let (a, b, mut state) = (put(&x.a, 6), put(&x.b, 6), put(&x.state, 1));
        let (h, _) = ops::linear_scan(a.clone(), b.clone(), Some(state.clone())).unwrap();
        for t in 0..6 {
            let token = |x: &Tensor<B, 3>| x.clone().narrow(1, t, 1);
            state = ops::linear_scan_step(token(&a), token(&b), Some(state)).unwrap();
            let want = download(h.clone().narrow(1, t, 1));
            assert_close("a step", &want, &download(state.clone()), F32_LIMIT);
        }
        let text = ops::linear_scan_step(a, b, None).expect_err("six tokens").to_string();
        assert!(text.contains("one token, got 6"), "{text}");
    }

    #[test]
    fn a_scan_over_a_hundred_thousand_tokens_counts_them() {
        let ones = Tensor::<B, 3>::ones([1, 100_000, 1], &Default::default());
        let (_, last) = ops::linear_scan(ones.clone(), ones.clone(), None).unwrap();
        assert_eq!(download(last), [100_000.0]);
        let (_, last) = ops::linear_scan(ones.clone().neg(), ones, None).unwrap();
        assert_eq!(download(last), [0.0]);
    }

    #[test]
    fn scans_refuse_shapes_by_name() {
        let ones = |tokens| Tensor::<B, 3>::ones([2, tokens, 3], &Default::default());
        let b = ops::linear_scan(ones(4), ones(5), None).expect_err("five tokens").to_string();
        assert!(b.contains("`b` is [2, 5, 3]"), "{b}");
        let state = ops::linear_scan(ones(4), ones(4), Some(ones(2)));
        let state = state.expect_err("two tokens").to_string();
        assert!(state.contains("`state` is [2, 2, 3]"), "{state}");
    }

    #[test]
    fn linear_layers_multiply_and_pass_gradients_on() {
        hold_affine::<Flex>(&Default::default(), F32_LIMIT);
    }

    #[test]
    fn linear_layers_take_a_vector_by_itself() {
        let device = Default::default();
        let x = Tensor::<Flex, 1>::from_floats([1.0, 2.0], &device);
        let weight = Tensor::<Flex, 2>::from_floats([[1.0, 0.0, 3.0], [0.5, 2.0, 0.0]], &device);
        assert_eq!(download(ops::affine(x, weight, None).unwrap()), [2.0, 4.0, 3.0]);
    }

    #[test]
    fn linear_layers_refuse_shapes_by_name() {
        let device = Default::default();
        let x = Tensor::<Flex, 3>::ones([2, 1, 3], &device);
        let weight = |from| Tensor::<Flex, 2>::ones([from, 5], &device);
        let narrow = ops::affine(x.clone(), weight(4), None).expect_err("3 of 4").to_string();
        assert!(narrow.contains("`x` is [2, 1, 3], expected [2, 1, 4]"), "{narrow}");
        let bias = Tensor::<Flex, 1>::ones([4], &device);
        let short = ops::affine(x, weight(3), Some(bias)).expect_err("4 of 5").to_string();
        assert!(short.contains("`bias` is [4], expected [5]"), "{short}");
    }

    #[test]
    fn shapes_that_do_not_fit_are_refused_by_name() {
        let device = Default::default();
        let good = || {
            let x =
                Inputs::random(1, dims(8), &recipe(Family::DeltaRule, DecayLevel::Typical, true));
            Call::<Flex>::new(&x, [DType::F32; 2], &device)
        };
        let refused = |change: &dyn Fn(&mut Call<Flex>)| {
            let mut input = good();
            change(&mut input);
            input.run().expect_err("it does not fit").to_string()
        };
        let scalar = |x: &Call<Flex>| match x.g.clone() {
            Some(ops::Decay::Scalar(g)) => g,
            _ => panic!("the recipe has a scalar decay"),
        };
        type Change<'a> = &'a dyn Fn(&mut Call<Flex>);
        let cases: [(&str, Change<'_>); 6] = [
            ("`k` is [2, 8, 2, 5]", &|x| x.k = x.k.clone().narrow(3, 0, 5)),
            ("`v` is [1, 8, 2, 24]", &|x| x.v = x.v.clone().narrow(0, 0, 1)),
            ("`g` is [2, 7, 2]", &|x| x.g = Some(scalar(x).narrow(1, 0, 7).into())),
            ("`beta` is [2, 8, 1]", &|x| {
                if let Rule::Delta { beta, .. } = &mut x.rule {
                    *beta = beta.clone().narrow(2, 0, 1);
                }
            }),
            ("`state` is [2, 2, 16, 3]", &|x| x.state = x.state.clone().map(|s| s.narrow(3, 0, 3))),
            ("no multiple of 2 key heads", &|x| x.v = x.v.clone().narrow(2, 0, 1)),
        ];
        for (want, change) in cases {
            let got = refused(change);
            assert!(got.contains(want), "{got:?} does not say {want:?}");
        }
        let text = good().step().expect_err("eight tokens").to_string();
        assert!(text.contains("one token, got 8"), "{text}");
    }
}

/// The Mesa layer: against equations solved by elimination, and against finite differences.
#[cfg(feature = "cpu")]
mod mesa {
    use super::*;
    use burn::backend::{Autodiff, Flex};
    use burn::tensor::backend::Backend;
    use ops::MesaInputs;

    const BATCH: usize = 2;
    const TOKENS: usize = 19;
    const HEADS: usize = 2;
    const K: usize = 5;
    const V: usize = 4;

    /// q, k, v, beta, g and lambda.
    type Values = [Vec<f64>; 6];

    fn values() -> Values {
        let mut rng = Rng::named(11, "mesa");
        let mut normal = |count: usize| -> Vec<f64> { (0..count).map(|_| rng.normal()).collect() };
        let scalars = BATCH * TOKENS * HEADS;
        let map = |x: Vec<f64>, f: fn(f64) -> f64| -> Vec<f64> { x.into_iter().map(f).collect() };
        [
            normal(scalars * K),
            map(normal(scalars * K), |x| 0.5 * x),
            normal(scalars * V),
            map(normal(scalars), |x| 1.0 / (1.0 + x.exp())),
            map(normal(scalars), |x| -0.3 * x.abs()),
            map(normal(HEADS * K), |x| 0.5 + x.abs()),
        ]
    }

    fn inputs<B: Backend>(x: &Values, dtype: DType) -> MesaInputs<B> {
        let device = B::Device::default();
        let rows = |x: &[f64], width| upload(x, [BATCH, TOKENS, HEADS, width], dtype, &device);
        let scalars = |x: &[f64]| upload(x, [BATCH, TOKENS, HEADS], dtype, &device);
        MesaInputs {
            q: rows(&x[0], K),
            k: rows(&x[1], K),
            v: rows(&x[2], V),
            beta: scalars(&x[3]),
            g: scalars(&x[4]),
            lambda: upload(&x[5], [HEADS, K], dtype, &device),
            iterations: 30,
        }
    }

    /// The layer over a sequence that is cut after 7 tokens: outputs, and the last state.
    fn in_two<B: LinearAttentionBackend>(x: &MesaInputs<B>) -> (Tensor<B, 4>, Tensor<B, 4>) {
        let part = |from, tokens| MesaInputs {
            q: x.q.clone().narrow(1, from, tokens),
            k: x.k.clone().narrow(1, from, tokens),
            v: x.v.clone().narrow(1, from, tokens),
            beta: x.beta.clone().narrow(1, from, tokens),
            g: x.g.clone().narrow(1, from, tokens),
            ..x.clone()
        };
        let (first, state) = ops::mesa(part(0, 7), None).unwrap();
        let (rest, state) = ops::mesa(part(7, TOKENS - 7), Some(state)).unwrap();
        (Tensor::cat(vec![first, rest], 1), state)
    }

    /// x with x A = b, by elimination; A is symmetric and positive definite.
    fn solve(mut a: Vec<f64>, mut b: Vec<f64>) -> Vec<f64> {
        for i in 0..K {
            for row in i + 1..K {
                let share = a[row * K + i] / a[i * K + i];
                (i..K).for_each(|column| a[row * K + column] -= share * a[i * K + column]);
                b[row] -= share * b[i];
            }
        }
        for i in (0..K).rev() {
            let known: f64 = (i + 1..K).map(|j| a[i * K + j] * b[j]).sum();
            b[i] = (b[i] - known) / a[i * K + i];
        }
        b
    }

    /// memory = keep memory + share left^T right
    fn write(memory: &mut [f64], keep: f64, share: f64, left: &[f64], right: &[f64]) {
        for (row, l) in memory.chunks_mut(right.len()).zip(left) {
            row.iter_mut().zip(right).for_each(|(m, r)| *m = keep * *m + share * l * r);
        }
    }

    /// Outputs by the definition.
    fn truth([q, k, v, beta, g, lambda]: &Values) -> Vec<f64> {
        let mut o = vec![0.0; BATCH * TOKENS * HEADS * V];
        for (b, h) in (0..BATCH).flat_map(|b| (0..HEADS).map(move |h| (b, h))) {
            let (mut of_keys, mut of_values) = (vec![0.0; K * K], vec![0.0; K * V]);
            for t in 0..TOKENS {
                let at = (b * TOKENS + t) * HEADS + h;
                let (key, value) = (&k[at * K..][..K], &v[at * V..][..V]);
                write(&mut of_keys, g[at].exp(), beta[at], key, key);
                write(&mut of_values, g[at].exp(), beta[at], key, value);
                let mut matrix = of_keys.clone();
                (0..K).for_each(|i| matrix[i * K + i] += lambda[h * K + i]);
                let x = solve(matrix, q[at * K..][..K].to_vec());
                for j in 0..V {
                    o[at * V + j] = (0..K).map(|i| x[i] * of_values[i * V + j]).sum();
                }
            }
        }
        o
    }

    #[test]
    fn every_output_solves_the_equations_so_far() {
        let values = values();
        for (dtype, limit) in [(DType::F64, 1e-9), (DType::F32, F32_LIMIT)] {
            let x = inputs::<Flex>(&values, dtype);
            let (whole, _) = ops::mesa(x.clone(), None).unwrap();
            let (cut, _) = in_two(&x);
            assert_close(&format!("whole, {dtype:?}"), &truth(&values), &download(whole), limit);
            assert_close(&format!("cut, {dtype:?}"), &truth(&values), &download(cut), limit);
        }
    }

    /// A number that depends on all outputs and the last state.
    fn loss<B: LinearAttentionBackend>(x: &MesaInputs<B>) -> Tensor<B, 1> {
        let weigh = |x: Tensor<B, 4>, name| {
            let mut rng = Rng::named(12, name);
            let count = x.shape().num_elements();
            let weights: Vec<f64> = (0..count).map(|_| rng.normal()).collect();
            let weights = upload(&weights, x.dims(), x.dtype(), &x.device());
            (x * weights).sum()
        };
        let (o, state) = in_two(x);
        weigh(o, "o") + weigh(state, "state")
    }

    #[test]
    fn gradients_are_those_of_exact_solutions() {
        let _alone = alone();
        let values = values();
        let x = inputs::<Autodiff<Flex>>(&values, DType::F64);
        let x = MesaInputs {
            q: x.q.require_grad(),
            k: x.k.require_grad(),
            v: x.v.require_grad(),
            beta: x.beta.require_grad(),
            g: x.g.require_grad(),
            lambda: x.lambda.require_grad(),
            ..x
        };
        let d = loss(&x).backward();
        let gradients: Values = [
            download(x.q.grad(&d).unwrap()),
            download(x.k.grad(&d).unwrap()),
            download(x.v.grad(&d).unwrap()),
            download(x.beta.grad(&d).unwrap()),
            download(x.g.grad(&d).unwrap()),
            download(x.lambda.grad(&d).unwrap()),
        ];
        for (i, name) in ["q", "k", "v", "beta", "g", "lambda"].into_iter().enumerate() {
            let mut rng = Rng::named(13, name);
            let direction: Vec<f64> = values[i].iter().map(|_| rng.normal()).collect();
            let moved = |by: f64| {
                let mut values = values.clone();
                values[i].iter_mut().zip(&direction).for_each(|(x, d)| *x += by * d);
                download(loss(&inputs::<Flex>(&values, DType::F64)))[0]
            };
            let want = (moved(1e-5) - moved(-1e-5)) / 2e-5;
            let got: f64 = gradients[i].iter().zip(&direction).map(|(g, d)| g * d).sum();
            assert_close(name, &[want], &[got], 1e-6);
        }
    }

    #[test]
    fn what_does_not_fit_is_refused_by_name() {
        let good = || inputs::<Flex>(&values(), DType::F32);
        let said = |x: MesaInputs<Flex>| ops::mesa(x, None).unwrap_err().to_string();
        let few = MesaInputs { lambda: good().lambda.narrow(1, 0, 3), ..good() };
        assert!(said(few).contains("`lambda` is [2, 3]"));
        let short = MesaInputs { beta: good().beta.narrow(1, 0, 3), ..good() };
        assert!(said(short).contains("`beta` is [2, 3, 2]"));
        let many = ops::mesa_step(good(), None).unwrap_err().to_string();
        assert!(many.contains("one token, got 19"), "{many}");
    }
}

/// The same on GPUs; a module for each backend that is compiled in.
#[allow(unused_macros)]
macro_rules! on_gpu {
    ($module:ident, $backend:ty, $device:path, $limit:expr) => {
        mod $module {
            use super::*;
            use burn::backend::Autodiff;

            #[test]
            fn the_step_kernel_agrees_with_the_recurrence() {
                let Some(device) = $device() else { return };
                hold_steps::<$backend>(&device);
            }

            #[test]
            fn linear_layers_multiply_and_pass_gradients_on() {
                let Some(device) = $device() else { return };
                hold_affine::<$backend>(&device, $limit);
            }

            #[test]
            fn chunks_agree_with_the_recurrence() {
                let Some(device) = $device() else { return };
                for family in FAMILIES {
                    for (decay, tokens) in [(DecayLevel::None, 17), (DecayLevel::Mixed, 70)] {
                        let what = format!("{family:?}, {decay:?}, T={tokens}");
                        let recipe = recipe(family, decay, true);
                        let x = Inputs::random(tokens as u64, dims(tokens), &recipe);
                        let (reads, dtype) = (Reads::Both, DType::F32);
                        let limit = F32_LIMIT;
                        hold_on::<Autodiff<$backend>>(&device, &what, &x, reads, limit, dtype);
                    }
                }
            }

            #[test]
            fn gradients_are_right_whichever_output_is_read_and_with_shared_key_heads() {
                let Some(device) = $device() else { return };
                for family in FAMILIES {
                    for reads in [Reads::Outputs, Reads::State] {
                        let dims = Dims { key_heads: 1, ..dims(40) };
                        let x =
                            Inputs::random(5, dims, &recipe(family, DecayLevel::Typical, false));
                        let what = format!("{family:?}");
                        let (limit, dtype) = (F32_LIMIT, DType::F32);
                        hold_on::<Autodiff<$backend>>(&device, &what, &x, reads, limit, dtype);
                    }
                }
            }

            #[test]
            fn scans_agree_with_the_loop() {
                let Some(device) = $device() else { return };
                for tokens in [1, 2, 33, 70] {
                    for complex in [false, true] {
                        let (dims, dtype) = ([2, tokens, 5], DType::F32);
                        hold_scan::<Autodiff<$backend>>(&device, dims, complex, dtype, F32_LIMIT);
                    }
                }
            }

            #[test]
            fn widths_that_no_kernel_takes_go_through_tensor_operations() {
                let Some(device) = $device() else { return };
                let dims = Dims { key_width: 260, ..dims(20) };
                let x =
                    Inputs::random(6, dims, &recipe(Family::DeltaRule, DecayLevel::Typical, true));
                hold_on::<Autodiff<$backend>>(
                    &device,
                    "K = 260",
                    &x,
                    Reads::Both,
                    $limit,
                    DType::F32,
                );
            }
        }
    };
}

#[cfg(feature = "wgpu")]
on_gpu!(on_wgpu, burn::backend::Wgpu, crate::support::wgpu, F32_LIMIT);
// Burn multiplies f32 matrices in TF32 on CUDA, ten bits of mantissa: chunks made of its products
// cannot be closer than this there.
#[cfg(feature = "cuda")]
on_gpu!(on_cuda, burn::backend::Cuda, crate::support::cuda, 2e-3);
