//! The reference against the f64 recurrence: outputs and every gradient, whatever the length of a chunk.

use super::*;
use burn::tensor::{DType, TensorData};
use burn_flex::{Flex, FlexTensor};
use linattn_oracle::{
    self as oracle, DecayLevel, Dims, Family, Inputs, Recipe, Rng, Strength, assert_close,
};

fn upload<const D: usize>(values: &[f64], shape: [usize; D]) -> FlexTensor {
    let data = TensorData::new(values.to_vec(), shape);
    primitive(Tensor::<Flex, D>::from_data(data, (&Default::default(), DType::F64)))
}

fn download(x: FlexTensor) -> Vec<f64> {
    x.into_data().iter::<f64>().collect()
}

fn uploaded(x: &Inputs) -> Recurrence<FlexTensor> {
    let Dims { batch, tokens, key_heads, heads, key_width, value_width } = x.dims;
    let scalars = |values: &[f64]| upload(values, [batch, tokens, heads]);
    let rows = |values: &[f64]| upload(values, [batch, tokens, heads, key_width]);
    let keys = [batch, tokens, key_heads, key_width];
    let read = match x.read {
        oracle::Read::After => Read::After,
        oracle::Read::Before => Read::Before,
    };
    Recurrence {
        q: upload(&x.q, keys),
        k: upload(&x.k, keys),
        v: upload(&x.v, [batch, tokens, heads, value_width]),
        decay: x.decay.as_ref().map(|decay| match decay {
            oracle::Decay::Scalar(g) => LogDecay::Scalar(scalars(g)),
            oracle::Decay::Vector(g) => LogDecay::Vector(rows(g)),
        }),
        transition: match &x.transition {
            oracle::Transition::Identity => Transition::Identity { read },
            oracle::Transition::Delta { beta, erase } => {
                Transition::Delta { beta: scalars(beta), erase: erase.as_deref().map(rows), read }
            }
            oracle::Transition::LowRank { a, b } => Transition::LowRank { a: rows(a), b: rows(b) },
        },
        state: x.state.as_ref().map(|s| upload(s, [batch, heads, key_width, value_width])),
        lengths: None,
    }
}

/// Every recurrence, with its name.
fn recipes(decay: DecayLevel) -> Vec<(String, Recipe)> {
    let mut list = vec![];
    for family in [Family::LinearAttention, Family::DeltaRule, Family::LowRank] {
        for (vector_decay, erase) in [(false, false), (true, false), (false, true), (true, true)] {
            for read in [oracle::Read::After, oracle::Read::Before] {
                let known = (family == Family::DeltaRule || !erase)
                    && (family != Family::LowRank || read == oracle::Read::After);
                if known {
                    let name = format!(
                        "{family:?}, {decay:?}, vector {vector_decay}, erase {erase}, {read:?}"
                    );
                    let recipe = Recipe {
                        decay,
                        vector_decay,
                        erase,
                        read,
                        state: true,
                        strength: Strength::Typical,
                        ..Recipe::new(family)
                    };
                    list.push((name, recipe));
                }
            }
        }
    }
    list
}

fn hold(what: &str, x: &Inputs, chunk: usize) {
    let truth = oracle::forward(x);
    let normals = |name: &str, count: usize| -> Vec<f64> {
        let mut rng = Rng::named(7, name);
        (0..count).map(|_| rng.normal()).collect()
    };
    let d_o = normals("d_o", truth.o.len());
    let d_state = normals("d_state", truth.state.len());
    let want = oracle::backward(x, &d_o, &d_state);

    let given = uploaded(x);
    let Forward { o, state, saved } = forward_by::<Flex>(given.clone(), chunk, true);
    let d_outputs =
        [upload(&d_o, given.dims().values_shape()), upload(&d_state, given.dims().state_shape())];
    let d = backward_by::<Flex>(given, saved, d_outputs.map(Some), chunk).map(download);
    let check = |name: &str, want: &[f64], got: &[f64]| {
        assert_close(&format!("{what}, chunk {chunk}: {name}"), want, got, 1e-12);
    };
    check("o", &truth.o, &download(o));
    check("state", &truth.state, &download(state));
    check("dq", &want.q, &d.q);
    check("dk", &want.k, &d.k);
    check("dv", &want.v, &d.v);
    check("dstate", &want.state, &d.state.expect("recipes have a state"));
    let d_g = d.decay.map(LogDecay::into_inner);
    check("dg", &want.g.unwrap_or_default(), &d_g.unwrap_or_default());
    match d.transition {
        Transition::Identity { .. } => {}
        Transition::Delta { beta, erase, .. } => {
            check("dbeta", &want.beta.unwrap_or_default(), &beta);
            check("derase", &want.erase.unwrap_or_default(), &erase.unwrap_or_default());
        }
        Transition::LowRank { a, b } => {
            check("da", &want.a.unwrap_or_default(), &a);
            check("db", &want.b.unwrap_or_default(), &b);
        }
    }
}

#[test]
fn every_recurrence_is_exact_at_every_chunk() {
    let dims = Dims { batch: 2, tokens: 35, key_heads: 1, heads: 2, key_width: 5, value_width: 7 };
    for decay in [DecayLevel::None, DecayLevel::Typical, DecayLevel::ForgetAll, DecayLevel::Mixed] {
        for (what, recipe) in recipes(decay) {
            let x = Inputs::random(41, dims, &recipe);
            [1, 2, 8, 16, 64].into_iter().for_each(|chunk| hold(&what, &x, chunk));
        }
    }
}

#[test]
fn every_recurrence_is_exact_at_every_length_and_width() {
    for (tokens, key_width, value_width) in
        [(1, 3, 2), (2, 1, 1), (16, 4, 1), (17, 1, 5), (70, 6, 4)]
    {
        let dims = Dims { batch: 1, tokens, key_heads: 2, heads: 2, key_width, value_width };
        for (what, recipe) in recipes(DecayLevel::Mixed) {
            let x = Inputs::random(tokens as u64, dims, &recipe);
            let what = format!("{what}, T={tokens}, K={key_width}");
            hold(&what, &x, chunk_of(&uploaded(&x)));
        }
    }
}

/// A difference of sums with such log decays would have lost all digits of the small ones.
#[test]
fn small_decays_keep_their_digits_beside_large_ones() {
    let dims = Dims { batch: 2, tokens: 40, key_heads: 1, heads: 2, key_width: 5, value_width: 7 };
    for (what, recipe) in recipes(DecayLevel::Typical) {
        let mut x = Inputs::random(37, dims, &recipe);
        if let Some(oracle::Decay::Scalar(g) | oracle::Decay::Vector(g)) = &mut x.decay {
            let columns = g.len() / (x.dims.batch * x.dims.tokens);
            for (at, g) in g.iter_mut().enumerate() {
                // Columns forget at tokens of their own.
                if (at / columns + at % columns).is_multiple_of(3) {
                    *g = -1e12;
                }
            }
        }
        [16, 64].into_iter().for_each(|chunk| hold(&what, &x, chunk));
    }
}

#[test]
fn equal_keys_do_not_break_the_triangular_inverse() {
    let dims = Dims { batch: 1, tokens: 130, key_heads: 1, heads: 1, key_width: 6, value_width: 3 };
    let recipe = Recipe { decay: DecayLevel::None, ..Recipe::new(Family::DeltaRule) };
    let mut x = Inputs::random(17, dims, &Recipe { state: true, ..recipe });
    let row = x.k[..dims.key_width].to_vec();
    x.k = row.iter().copied().cycle().take(x.k.len()).collect();
    if let oracle::Transition::Delta { beta, .. } = &mut x.transition {
        beta.fill(1.0);
    }
    hold("equal keys", &x, 64);
}
