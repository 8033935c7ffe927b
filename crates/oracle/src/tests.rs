use super::*;
use crate::inputs::cut_tokens;

const DIMS: Dims =
    Dims { batch: 2, tokens: 4, key_heads: 1, heads: 2, key_width: 3, value_width: 2 };

/// Every recurrence there is, with every extra it allows, with each decay of `decays`.
fn recipes(decays: &[DecayLevel]) -> Vec<Recipe> {
    use Family::{DeltaRule, LinearAttention, LowRank};
    let plain = [
        Recipe::new(LinearAttention),
        Recipe { read: Read::Before, ..Recipe::new(LinearAttention) },
        Recipe { read: Read::Before, bonus: true, ..Recipe::new(LinearAttention) },
        Recipe::new(DeltaRule),
        Recipe { erase: true, ..Recipe::new(DeltaRule) },
        Recipe { read: Read::Before, ..Recipe::new(DeltaRule) },
        Recipe { read: Read::Before, erase: true, ..Recipe::new(DeltaRule) },
        Recipe::new(LowRank),
    ];
    let mut all = Vec::new();
    for recipe in plain {
        for (&decay, extras) in decays.iter().flat_map(|decay| (0..4).map(move |i| (decay, i))) {
            let (vector_decay, state) = (extras & 1 > 0, extras & 2 > 0);
            all.push(Recipe { decay, vector_decay, state, ..recipe });
        }
    }
    all.retain(|recipe| recipe.decay != DecayLevel::None || !recipe.vector_decay);
    all
}

/// The tensors of `x` under the names that [`named_gradients`] gives their gradients.
fn named_inputs(x: &mut Inputs) -> Vec<(&'static str, &mut Vec<f64>)> {
    let mut all = vec![("q", &mut x.q), ("k", &mut x.k), ("v", &mut x.v)];
    if let Some(Decay::Scalar(g) | Decay::Vector(g)) = &mut x.decay {
        all.push(("g", g));
    }
    match &mut x.transition {
        Transition::Identity => {}
        Transition::Delta { beta, erase } => {
            all.push(("beta", beta));
            all.extend(erase.as_mut().map(|erase| ("erase", erase)));
        }
        Transition::LowRank { a, b } => all.extend([("a", a), ("b", b)]),
    }
    all.extend(x.bonus.as_mut().map(|bonus| ("bonus", bonus)));
    all.extend(x.state.as_mut().map(|state| ("state", state)));
    all
}

fn named_gradients(grad: Gradients) -> Vec<(&'static str, Vec<f64>)> {
    let Gradients { q, k, v, g, beta, erase, a, b, bonus, state } = grad;
    let all = [
        ("q", Some(q)),
        ("k", Some(k)),
        ("v", Some(v)),
        ("g", g),
        ("beta", beta),
        ("erase", erase),
        ("a", a),
        ("b", b),
        ("bonus", bonus),
        ("state", Some(state)),
    ];
    all.into_iter().filter_map(|(name, x)| Some((name, x?))).collect()
}

fn normals(seed: u64, len: usize) -> Vec<f64> {
    let mut rng = Rng::new(seed);
    (0..len).map(|_| rng.normal()).collect()
}

/// A loss that sees every output: random weights of o and of the final state.
struct Loss {
    d_o: Vec<f64>,
    d_state: Vec<f64>,
}

impl Loss {
    fn new(dims: Dims) -> Self {
        Self { d_o: normals(1, dims.values_len()), d_state: normals(2, dims.state_len()) }
    }

    fn of(&self, x: &Inputs) -> f64 {
        let out = forward(x);
        token::dot(&out.o, &self.d_o) + token::dot(&out.state, &self.d_state)
    }

    /// Central differences with respect to input tensor number `tensor`.
    fn differences(&self, x: &Inputs, tensor: usize) -> Vec<f64> {
        const STEP: f64 = 1e-5; // rounding and the cubic term both stay near 1e-10
        let at = |i: usize, by: f64| {
            let mut x = x.clone();
            named_inputs(&mut x)[tensor].1[i] += by;
            self.of(&x)
        };
        let len = named_inputs(&mut x.clone())[tensor].1.len();
        (0..len).map(|i| (at(i, STEP) - at(i, -STEP)) / (2.0 * STEP)).collect()
    }
}

#[test]
fn gradients_are_central_differences_in_every_combination() {
    let loss = Loss::new(DIMS);
    for recipe in recipes(&[DecayLevel::None, DecayLevel::Typical, DecayLevel::Mixed]) {
        for (seed, key_heads) in [1, 2].into_iter().enumerate() {
            let mut x = Inputs::random(seed as u64, Dims { key_heads, ..DIMS }, &recipe);
            let got = named_gradients(backward(&x, &loss.d_o, &loss.d_state));
            x.state.get_or_insert_with(|| vec![0.0; DIMS.state_len()]); // so that it can be moved
            let names: Vec<_> = named_inputs(&mut x).into_iter().map(|(name, _)| name).collect();
            assert_eq!(names, got.iter().map(|(name, _)| *name).collect::<Vec<_>>());
            for (tensor, (name, got)) in got.iter().enumerate() {
                let what = format!("{name}, {key_heads} key heads, {recipe:?}");
                assert_close(&what, &loss.differences(&x, tensor), got, 1e-8);
            }
        }
    }
}

#[test]
fn a_sequence_can_be_cut_anywhere() {
    let dims = Dims { tokens: 5, ..DIMS };
    for recipe in
        recipes(&[DecayLevel::None, DecayLevel::Typical, DecayLevel::Mixed, DecayLevel::ForgetAll])
    {
        let x = Inputs::random(3, dims, &recipe);
        let whole = forward(&x);
        for cut in 0..=dims.tokens {
            let first = forward(&slice_tokens(&x, 0, cut, x.state.clone()));
            let last = forward(&slice_tokens(&x, cut, dims.tokens, Some(first.state)));
            assert_eq!(first.o, cut_tokens(&whole.o, dims, 0, cut), "{recipe:?}");
            assert_eq!(last.o, cut_tokens(&whole.o, dims, cut, dims.tokens), "{recipe:?}");
            assert_eq!(last.state, whole.state, "{recipe:?}");
        }
    }
}

#[test]
fn gradients_pass_a_cut_through_the_state() {
    let dims = Dims { tokens: 5, ..DIMS };
    let (loss, cut) = (Loss::new(dims), 2);
    for recipe in recipes(&[DecayLevel::None, DecayLevel::Typical]) {
        let x = Inputs::random(4, dims, &recipe);
        let [from, to] = [(0, cut), (cut, dims.tokens)].map(|(from, to)| {
            let state = forward(&slice_tokens(&x, 0, from, x.state.clone())).state;
            (slice_tokens(&x, from, to, Some(state)), cut_tokens(&loss.d_o, dims, from, to))
        });
        let last = backward(&to.0, &to.1, &loss.d_state);
        let first = backward(&from.0, &from.1, &last.state);
        let whole = backward(&x, &loss.d_o, &loss.d_state);
        assert_eq!(first.state, whole.state, "{recipe:?}");
        assert_eq!(first.k, cut_tokens(&whole.k, dims, 0, cut), "{recipe:?}");
        assert_eq!(last.k, cut_tokens(&whole.k, dims, cut, dims.tokens), "{recipe:?}");
    }
}

#[test]
fn a_decay_of_zero_equals_none_to_the_last_bit() {
    let bits = |x: &[f64]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    let loss = Loss::new(DIMS);
    for recipe in recipes(&[DecayLevel::KeepAll]) {
        let decayed = Inputs::random(5, DIMS, &recipe);
        let plain = Inputs { decay: None, ..decayed.clone() };
        assert_eq!(plain, Inputs::random(5, DIMS, &Recipe { decay: DecayLevel::None, ..recipe }));
        let (want, got) = (forward(&plain), forward(&decayed));
        assert_eq!(bits(&want.o), bits(&got.o), "{recipe:?}");
        assert_eq!(bits(&want.state), bits(&got.state), "{recipe:?}");
        let [want, got] = [&plain, &decayed].map(|x| backward(x, &loss.d_o, &loss.d_state));
        let got = named_gradients(Gradients { g: None, ..got });
        for ((name, want), (_, got)) in named_gradients(want).iter().zip(&got) {
            assert_eq!(bits(want), bits(got), "{name}, {recipe:?}");
        }
    }
}

/// Decay over tokens `from..=to` of row `d` of a state, from the logs, not token by token.
fn decay_between(x: &Inputs, (b, h, d): (usize, usize, usize), from: usize, to: usize) -> f64 {
    let Dims { tokens, heads, key_width, .. } = x.dims;
    let place = |t: usize| (b * tokens + t) * heads + h;
    let g = |t: usize| match &x.decay {
        None => 0.0,
        Some(Decay::Scalar(g)) => g[place(t)],
        Some(Decay::Vector(g)) => g[place(t) * key_width + d],
    };
    (from..to + 1).map(g).sum::<f64>().exp()
}

#[test]
fn linear_attention_is_attention_without_a_softmax() {
    let dims = Dims { key_heads: 2, heads: 4, ..DIMS };
    for recipe in recipes(&[DecayLevel::None, DecayLevel::Typical, DecayLevel::ForgetAll]) {
        if recipe.family != Family::LinearAttention || recipe.state {
            continue;
        }
        let x = Inputs::random(6, dims, &recipe);
        let mut want = vec![0.0; dims.values_len()];
        let before = usize::from(recipe.read == Read::Before);
        for (b, h) in dims.states() {
            let at = |t| token::Token { x: &x, b, t, h };
            for (t, j) in (0..dims.tokens).flat_map(|t| (0..=t).map(move |j| (t, j))) {
                let weight = |d: usize| match (&x.bonus, j == t) {
                    (Some(u), true) => u[h * dims.key_width + d],
                    (None, true) => 1.0 - before as f64,
                    (_, false) => decay_between(&x, (b, h, d), j + 1, t - before),
                };
                let weights: Vec<f64> = (0..dims.key_width).map(weight).collect();
                let score = token::dot(at(t).q(), &token::times(at(j).k(), &weights));
                token::add(&mut want[at(t).values()], &token::scaled(score, at(j).v()));
            }
        }
        assert_close(&format!("o, {recipe:?}"), &want, &forward(&x).o, 1e-14);
    }
}

#[test]
fn neighbouring_heads_share_a_key_head() {
    let dims = Dims { key_heads: 2, heads: 4, ..DIMS };
    let loss = Loss::new(dims);
    let shared = |j: usize| j / 2; // heads 0 and 1 read key head 0; heads 2 and 3 read key head 1
    for recipe in recipes(&[DecayLevel::Typical]) {
        let x = Inputs::random(11, dims, &recipe);
        let spread = |x: &[f64]| -> Vec<f64> {
            let heads = x.chunks(2 * dims.key_width).flat_map(|token| {
                (0..4).flat_map(move |j| &token[shared(j) * dims.key_width..][..dims.key_width])
            });
            heads.copied().collect()
        };
        let gather = |x: &[f64]| {
            let mut sums = vec![0.0; dims.keys_len()];
            for (i, row) in x.chunks(dims.key_width).enumerate() {
                let key = (i / 4 * 2 + shared(i % 4)) * dims.key_width;
                token::add(&mut sums[key..key + dims.key_width], row);
            }
            sums
        };
        let own = Dims { key_heads: 4, ..dims };
        let own = Inputs { dims: own, q: spread(&x.q), k: spread(&x.k), ..x.clone() };
        assert_eq!(forward(&own), forward(&x), "{recipe:?}");
        let [want, got] = [&own, &x].map(|x| backward(x, &loss.d_o, &loss.d_state));
        assert_close(&format!("q, {recipe:?}"), &gather(&want.q), &got.q, 1e-14);
        assert_close(&format!("k, {recipe:?}"), &gather(&want.k), &got.k, 1e-14);
    }
}

#[test]
fn full_strength_makes_a_key_answer_with_its_value() {
    let recipe = Recipe {
        decay: DecayLevel::Mixed,
        strength: Strength::One,
        ..Recipe::new(Family::DeltaRule)
    };
    let mut x = Inputs::random(7, Dims { key_heads: 2, ..DIMS }, &recipe);
    x.q = x.k.clone();
    assert_close("o", &x.v, &forward(&x).o, 1e-6); // keys have length 1 in f32 only
}

/// The delta rule `x` as a low-rank transition: a = -e D (-e where it erases before the decay),
/// b = k, v = y.
fn as_low_rank(x: &Inputs) -> Inputs {
    let Transition::Delta { beta, erase } = &x.transition else { panic!("no delta rule") };
    let (mut a, mut b, mut y) = (vec![], vec![], vec![]);
    let tokens = (0..x.dims.batch).flat_map(|b| (0..x.dims.tokens).map(move |t| (b, t)));
    for (row, t) in tokens {
        for h in 0..x.dims.heads {
            let token = token::Token { x, b: row, t, h };
            let delta = token.delta(beta, erase.as_ref());
            let kept = match x.read {
                Read::After => token.kept(),
                Read::Before => vec![1.0; x.dims.key_width],
            };
            a.extend(token::scaled(-1.0, &token::times(&delta.e, &kept)));
            b.extend(token.k());
            y.extend(delta.y);
        }
    }
    Inputs { v: y, transition: Transition::LowRank { a, b }, read: Read::After, ..x.clone() }
}

#[test]
fn the_delta_rule_is_a_low_rank_transition() {
    for recipe in recipes(&[DecayLevel::None, DecayLevel::Typical, DecayLevel::Mixed]) {
        for strength in [Strength::Zero, Strength::One, Strength::Two, Strength::Typical] {
            if recipe.family == Family::DeltaRule {
                let x = Inputs::random(8, DIMS, &Recipe { strength, ..recipe });
                let (want, got) = (forward(&x), forward(&as_low_rank(&x)));
                assert_close(&format!("o, {strength:?}, {recipe:?}"), &want.o, &got.o, 1e-14);
                assert_close(&format!("state, {recipe:?}"), &want.state, &got.state, 1e-14);
            }
        }
    }
}

#[test]
fn random_inputs_are_exact_in_f32_and_rows_that_should_be_are_unit() {
    let dims = Dims { batch: 1, tokens: 300, key_heads: 1, heads: 2, key_width: 5, value_width: 1 };
    for recipe in recipes(&[DecayLevel::Typical, DecayLevel::Mixed]) {
        let mut x = Inputs::random(9, dims, &recipe);
        for (name, x) in named_inputs(&mut x) {
            assert!(x.iter().all(|x| x.is_finite() && f64::from(*x as f32) == *x), "{name}");
        }
        let unit = match &x.transition {
            Transition::Identity => continue,
            Transition::Delta { erase, .. } => erase.as_ref().unwrap_or(&x.k),
            Transition::LowRank { a, .. } => a,
        };
        let lengths: Vec<f64> = unit.chunks(5).map(|x| token::dot(x, x).sqrt()).collect();
        assert_close("lengths", &vec![1.0; lengths.len()], &lengths, 1e-7);
        let state = forward(&x).state;
        assert!(state.iter().all(|s| s.abs() < 100.0), "S grew, {recipe:?}");
    }
}

#[test]
fn the_generator_has_the_moments_it_claims_and_never_changes() {
    let mut rng = Rng::new(0);
    assert_eq!(rng.next(), 0xe220_a839_7b1d_cdaf); // SplitMix64's first number for seed 0
    let x: Vec<f64> = (0..100_000).map(|_| rng.normal()).collect();
    let u: Vec<f64> = (0..100_000).map(|_| rng.uniform()).collect();
    let moments = |x: &[f64]| [x.iter().sum::<f64>(), token::dot(x, x)].map(|sum| sum / 1e5);
    assert!(moments(&x)[0].abs() < 0.02);
    assert_close("variance", &[1.0], &moments(&x)[1..], 0.02);
    assert_close("uniform", &[1.0 / 2.0, 1.0 / 3.0], &moments(&u), 0.01);
    assert!(u.iter().all(|&u| 0.0 < u && u < 1.0));
}

#[test]
fn decays_are_what_they_say() {
    let draw = |decay| {
        let recipe = Recipe { decay, vector_decay: true, ..Recipe::default() };
        let x = Inputs::random(10, Dims { tokens: 1000, ..DIMS }, &recipe);
        x.decay.map(|decay| decay.values().to_vec()).unwrap_or_default()
    };
    let share = |g: &[f64], of: fn(f64) -> bool| {
        g.iter().filter(|&&g| of(g)).count() as f64 / g.len() as f64
    };
    assert!(draw(DecayLevel::None).is_empty());
    assert_eq!(share(&draw(DecayLevel::KeepAll), |g| g == 0.0), 1.0);
    assert_eq!(share(&draw(DecayLevel::ForgetAll), |g| g == -50.0), 1.0);
    let (typical, mixed) = (draw(DecayLevel::Typical), draw(DecayLevel::Mixed));
    let small = share(&typical, |g| (-0.1001..=-0.00099).contains(&g));
    let large = share(&typical, |g| (-2.7..-1.3).contains(&g));
    assert!((0.03..0.1).contains(&large) && small + large == 1.0, "{small} {large}");
    let thirds = [share(&mixed, |g| g == 0.0), share(&mixed, |g| g == -50.0)];
    assert!(thirds.iter().all(|third| (third - 1.0 / 3.0).abs() < 0.02), "{thirds:?}");
}

#[test]
fn relative_error_propagates_nan_and_knows_zero() {
    assert_eq!(relative_error(&[3.0, 4.0], &[3.0, 4.0]), 0.0);
    assert_eq!(relative_error(&[3.0, 4.0], &[0.0, 0.0]), 1.0);
    assert_eq!(relative_error(&[0.0], &[0.0]), 0.0);
    assert_eq!(relative_error(&[0.0], &[1.0]), f64::INFINITY);
    assert!(relative_error(&[1.0], &[f64::NAN]).is_nan());
    assert!(relative_error(&[f64::NAN], &[1.0]).is_nan());
    assert_close("rounding around zero", &[0.0], &[1e-13], 0.0);
}

#[test]
#[should_panic(expected = "o: error NaN")]
fn nan_is_not_close() {
    assert_close("o", &[1.0, 2.0], &[1.0, f64::NAN], 1e9);
}

#[test]
#[should_panic(expected = "o: error NaN")]
fn nan_is_not_close_to_nan() {
    assert_close("o", &[f64::NAN], &[f64::NAN], 1e9);
}

#[test]
#[should_panic(expected = "o: error inf")]
fn nothing_is_close_to_infinity() {
    assert_close("o", &[f64::INFINITY], &[1.0], 1e-3);
}

#[test]
#[should_panic(expected = "o: lengths")]
fn lengths_have_to_agree() {
    assert_close("o", &[1.0, 2.0], &[1.0], 1e9);
}

#[test]
#[should_panic(expected = "numbers in beta")]
fn a_wrong_length_is_named() {
    let mut x = Inputs::random(0, DIMS, &Recipe::new(Family::DeltaRule));
    x.transition = Transition::Delta { beta: vec![1.0], erase: None };
    forward(&x);
}

#[test]
#[should_panic(expected = "a bonus needs `Transition::Identity`")]
fn the_delta_rule_has_no_bonus() {
    let recipe = Recipe { bonus: true, read: Read::Before, ..Recipe::new(Family::DeltaRule) };
    Inputs::random(0, DIMS, &recipe);
}

#[test]
#[should_panic(expected = "no `Read::Before`")]
fn a_low_rank_transition_is_read_after() {
    Inputs::random(0, DIMS, &Recipe { read: Read::Before, ..Recipe::new(Family::LowRank) });
}

#[test]
fn gradients_of_a_scan_are_central_differences() {
    const STEP: f64 = 1e-5;
    for complex in [false, true] {
        let x = ScanInputs::random(3, [2, 5, 3], complex);
        let weights = scan::normals(&mut Rng::new(4), x.b.len(), complex);
        let loss = |x: &ScanInputs| -> f64 {
            let h = linear_scan(x);
            h.iter().zip(&weights).map(|(h, w)| h.re * w.re + h.im * w.im).sum()
        };
        let gradients = linear_scan_backward(&x, &weights);
        type Part = fn(&mut ScanInputs) -> &mut Vec<Complex>;
        let parts: [(&str, Part); 3] =
            [("a", |x| &mut x.a), ("b", |x| &mut x.b), ("state", |x| &mut x.state)];
        for (name, part) in parts {
            for imaginary in [false, true].into_iter().filter(|imaginary| complex || !imaginary) {
                let slope = |i: usize| {
                    let at = |by: f64| {
                        let mut x = x.clone();
                        let number = &mut part(&mut x)[i];
                        *(if imaginary { &mut number.im } else { &mut number.re }) += by;
                        loss(&x)
                    };
                    (at(STEP) - at(-STEP)) / (2.0 * STEP)
                };
                let got = part(&mut gradients.clone()).clone();
                let want: Vec<f64> = (0..got.len()).map(slope).collect();
                let got: Vec<f64> =
                    got.iter().map(|x| if imaginary { x.im } else { x.re }).collect();
                assert_close(&format!("{name}, imaginary {imaginary}"), &want, &got, 1e-8);
            }
        }
    }
}

#[test]
fn a_scan_of_ones_counts() {
    let ones = vec![Complex { re: 1.0, im: 0.0 }; 4];
    let start = vec![Complex { re: 10.0, im: 0.0 }];
    let x = ScanInputs { dims: [1, 4, 1], a: ones.clone(), b: ones, state: start };
    let h: Vec<f64> = linear_scan(&x).iter().map(|h| h.re).collect();
    assert_eq!(h, [11.0, 12.0, 13.0, 14.0]);
}
