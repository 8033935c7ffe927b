//! Feature maps: each one's product of a query and a key is what its paper says.

use crate::call::{download, upload};
use crate::layers::widened;
use burn::backend::Flex;
use burn::tensor::DType;
use linattn::nn::FeatureMap;
use linattn::nn::mixers::MixerConfig;
use linattn_oracle::{assert_close, relative_error};

const K: usize = 6;
/// Features are computed in double precision here; their constants and angles are f32's.
const LIMIT: f64 = 1e-6;

fn map(text: &str) -> FeatureMap {
    #[derive(serde::Deserialize)]
    struct Holder {
        feature_map: FeatureMap,
    }
    toml::from_str::<Holder>(&format!("feature_map = {text}")).unwrap().feature_map
}

/// A dozen vectors within `size`, other ones for another `start`.
fn vectors(size: f64, start: usize) -> Vec<Vec<f64>> {
    let value = |n: usize| {
        let noise = ((n + start) as f64 * 12.9898).sin() * 43758.5453;
        size * (2.0 * (noise - noise.floor()) - 1.0)
    };
    (0..12).map(|t| (0..K).map(|i| f64::from(value(t * K + i) as f32)).collect()).collect()
}

/// The features of each vector, all at `position`.
fn features_at(map: FeatureMap, x: &[Vec<f64>], position: usize) -> Vec<Vec<f64>> {
    let map_of = widened(map.init::<Flex>(1, K, &Default::default()).unwrap());
    let row = |x: &Vec<f64>| {
        let x = upload::<Flex, 4>(x, [1, 1, 1, K], DType::F64, &Default::default());
        let features = download(map_of.forward(x, position));
        assert_eq!(features.len(), map.width(K), "{map:?}");
        features
    };
    x.iter().map(row).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// `f` of every query with every key.
fn pairs(q: &[Vec<f64>], k: &[Vec<f64>], f: impl Fn(&[f64], &[f64]) -> f64) -> Vec<f64> {
    q.iter().flat_map(|q| k.iter().map(|k| f(q, k)).collect::<Vec<_>>()).collect()
}

/// Products of features.
fn scores(map: FeatureMap, q: &[Vec<f64>], k: &[Vec<f64>]) -> Vec<f64> {
    pairs(&features_at(map, q, 0), &features_at(map, k, 0), dot)
}

fn relu(x: &[f64]) -> Vec<f64> {
    x.iter().map(|x| x.max(0.0)).collect()
}

#[test]
fn taylor_is_the_series_of_exp_up_to_the_square() {
    let (q, k) = (vectors(1.5, 0), vectors(1.5, 500));
    let want = pairs(&q, &k, |q, k| {
        let s = dot(q, k) / (K as f64).sqrt();
        1.0 + s + s * s / 2.0
    });
    assert_close("taylor", &want, &scores(map("'taylor'"), &q, &k), LIMIT);
    assert_eq!(map("'taylor'").width(16), 153, "as Based's keys of 16");
}

#[test]
fn a_fresh_learnable_square_squares_the_product_of_standardised_vectors() {
    let (q, k) = (vectors(2.0, 0), vectors(2.0, 500));
    let standard = |x: &[f64]| -> Vec<f64> {
        let mean = x.iter().sum::<f64>() / K as f64;
        let variance = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / K as f64;
        x.iter().map(|x| (x - mean) / (variance + 1e-5).sqrt()).collect()
    };
    let want = pairs(&q, &k, |q, k| dot(&standard(q), &standard(k)).powi(2) / K as f64);
    assert_close("square", &want, &scores(map("'learnable_square'"), &q, &k), LIMIT);
}

#[test]
fn performer_comes_close_to_exp_with_many_features() {
    let (q, k) = (vectors(0.7, 0), vectors(0.7, 500));
    let want = pairs(&q, &k, |q, k| (dot(q, k) / (K as f64).sqrt()).exp());
    let error = |features: usize| {
        let map = map(&format!("{{ performer = {{ features = {features} }} }}"));
        relative_error(&want, &scores(map, &q, &k))
    };
    let (few, many) = (error(8), error(4096));
    assert!(many < 0.05 && many < few / 3.0, "{many} with 4096 features, {few} with 8");
}

#[test]
fn random_fourier_features_come_close_to_a_gaussian_of_the_distance() {
    let unit = |x: Vec<f64>| -> Vec<f64> {
        let length = dot(&x, &x).sqrt();
        x.iter().map(|x| x / length).collect()
    };
    let (q, k) = (vectors(1.0, 0), vectors(1.0, 500));
    let [unit_q, unit_k] = [&q, &k].map(|x| x.iter().cloned().map(unit).collect::<Vec<Vec<f64>>>());
    let want = pairs(&unit_q, &unit_k, |q, k| (dot(q, k) - 1.0).exp());
    let map = map("{ rfa = { features = 4096 } }");
    let error = relative_error(&want, &scores(map, &q, &k));
    assert!(error < 0.05, "{error} with 4096 features");
    let own: Vec<f64> = features_at(map, &q, 0).iter().map(|x| dot(x, x)).collect();
    assert_close("a vector with itself", &[1.0; 12], &own, LIMIT);
}

#[test]
fn weights_of_cosformer_fall_as_a_quarter_of_a_cosine() {
    let (q, k) = (vectors(1.0, 0), vectors(1.0, 500));
    let map = map("{ cosformer = { length = 40 } }");
    for (i, j) in [(0, 0), (7, 3), (39, 38), (39, 0), (25, 5)] {
        let angle = std::f64::consts::FRAC_PI_2 * (i - j) as f64 / 40.0;
        let want = pairs(&q, &k, |q, k| dot(&relu(q), &relu(k)) * angle.cos());
        let got = pairs(&features_at(map, &q, i), &features_at(map, &k, j), dot);
        assert_close(&format!("query {i}, key {j}"), &want, &got, LIMIT);
    }
}

#[test]
fn a_fresh_hedgehog_is_a_softmax_of_a_vector_and_its_opposite() {
    let x = vectors(1.0, 0);
    for (x, got) in x.iter().zip(features_at(map("'hedgehog'"), &x, 0)) {
        let powers: Vec<f64> =
            x.iter().map(|x| 2.0 * x).chain(x.iter().map(|x| -2.0 * x)).collect();
        let sum: f64 = powers.iter().map(|x| x.exp()).sum();
        let want: Vec<f64> = powers.iter().map(|x| x.exp() / sum).collect();
        assert_close("hedgehog", &want, &got, LIMIT);
    }
}

#[test]
fn dijiang_is_an_exponential_of_scaled_cosine_coefficients() {
    let transform = |x: &[f64]| -> Vec<f64> {
        let angle =
            |i: usize, j: usize| std::f64::consts::PI * (j as f64 + 0.5) * i as f64 / K as f64;
        (0..K).map(|i| x.iter().enumerate().map(|(j, x)| x * angle(i, j).cos()).sum()).collect()
    };
    let x = vectors(1.0, 0);
    let logs: Vec<Vec<f64>> = features_at(map("{ dijiang = {} }"), &x, 0)
        .iter()
        .map(|x| x.iter().map(|x| x.ln()).collect())
        .collect();
    // One scale for each coefficient, the same for all vectors.
    let (first, of_first) = (&logs[0], transform(&x[0]));
    for (x, got) in x.iter().zip(&logs).skip(1) {
        let want: Vec<f64> = transform(x)
            .iter()
            .zip(first.iter().zip(&of_first))
            .map(|(c, (l, f))| c * l / f)
            .collect();
        assert_close("coefficients", &want, got, 1e-4);
    }
    let flat = features_at(map("{ dijiang = {} }"), &[vec![0.7; K]], 0);
    assert_close("a constant", &[1.0; K - 1], &flat[0][1..], LIMIT);
    assert!((flat[0][0] - 1.0).abs() > 1e-3, "the mean counts");
}

#[test]
fn dpfp_multiplies_neighbours_at_every_distance() {
    let x = vectors(1.0, 0);
    for nu in [1, 3, 2 * K - 1] {
        let map = map(&format!("{{ dpfp = {{ nu = {nu} }} }}"));
        assert_eq!(map.width(K), 2 * K * nu);
        for (x, got) in x.iter().zip(features_at(map, &x, 0)) {
            let both: Vec<f64> = x.iter().copied().chain(x.iter().map(|x| -x)).collect();
            let r = relu(&both);
            let product = |n: usize, i: usize| r[i] * r[(i + 2 * K - n) % (2 * K)];
            let want: Vec<f64> = (1..=nu)
                .flat_map(|n| (0..2 * K).map(move |i| (n, i)))
                .map(|(n, i)| product(n, i))
                .collect();
            assert_close("dpfp", &want, &got, LIMIT);
        }
    }
}

#[test]
fn an_elementwise_product_is_quadratic_along_every_line() {
    let (from, to) = (vectors(1.0, 0), vectors(1.0, 500));
    let line: Vec<Vec<f64>> = (0..4)
        .map(|n| from[0].iter().zip(&to[0]).map(|(a, b)| a + n as f64 * (b - a)).collect())
        .collect();
    // One map for all four: fresh ones would differ.
    let f = features_at(map("'elementwise_product'"), &line, 0);
    let want: Vec<f64> = (0..K).map(|i| f[0][i] - 3.0 * f[1][i] + 3.0 * f[2][i]).collect();
    assert_close("third difference", &want, &f[3], 1e-4);
    let bend = |i: usize| (f[0][i] - 2.0 * f[1][i] + f[2][i]).abs();
    assert!((0..K).any(|i| bend(i) > 1e-4), "no straight line");
}

#[test]
fn a_seed_gives_one_map() {
    let x = vectors(1.0, 0);
    for name in ["performer", "rfa", "dijiang"] {
        let of =
            |seed: u64| features_at(map(&format!("{{ {name} = {{ seed = {seed} }} }}")), &x, 0);
        assert_eq!(of(5), of(5), "{name}");
        assert_ne!(of(5), of(6), "{name}");
    }
}

#[derive(Debug, PartialEq, serde::Serialize, serde::Deserialize)]
struct Holder {
    mixer: MixerConfig,
}

/// The key that linear attention is refused for, at sequences of `length` tokens.
fn refused(options: &str, length: usize) -> String {
    let text = format!("mixer.linear_attention = {{ {options} }}");
    let holder: Holder = toml::from_str(&text).unwrap();
    holder.mixer.cost(24, length).unwrap_err().key
}

#[test]
fn performer_draws_as_many_vectors_as_its_estimate_wants() {
    for (width, features) in [(1, 1), (2, 2), (16, 45), (64, 267)] {
        assert_eq!(map("{ performer = {} }").width(width), features, "{width}");
    }
    assert_eq!(map("{ rfa = {} }").width(16), 32);
}

#[test]
fn a_denominator_and_a_norm_do_not_go_together() {
    assert_eq!(refused("normalize = true", 1), "linear_attention.normalize");
    let small = "normalize = true, output_norm = 'none', denominator_eps = 0.0";
    assert_eq!(refused(small, 1), "linear_attention.denominator_eps");
}

#[test]
fn only_positive_scores_are_divided_by_their_sum_without_a_floor() {
    for map in ["'identity'", "{ rfa = {} }", "'elementwise_product'"] {
        let key = refused(&format!("normalize = true, feature_map = {map}"), 1);
        assert_eq!(key, "linear_attention.feature_map", "{map}");
        let floor = "output_norm = 'none', normalize = true, denominator_floor = 0.1";
        let text = format!("mixer.linear_attention = {{ {floor}, feature_map = {map} }}");
        let holder: Holder = toml::from_str(&text).unwrap();
        assert!(holder.mixer.cost(24, 1).is_ok(), "{map}");
    }
    for floor in ["denominator_floor = 0.1", "normalize = true, denominator_floor = 0.0"] {
        assert_eq!(refused(floor, 1), "linear_attention.denominator_floor");
    }
    for map in ["'identity'", "'taylor'", "'learnable_square'", "{ dijiang = {} }"] {
        let key = refused(&format!("norm_k = true, feature_map = {map}"), 1);
        assert_eq!(key, "linear_attention.feature_map", "{map}");
    }
}

#[test]
fn options_that_do_not_fit_are_refused_by_name() {
    for (options, key) in [
        ("{ performer = { features = 0 } }", "performer.features"),
        ("{ rfa = { features = 0 } }", "rfa.features"),
        ("{ dpfp = { nu = 0 } }", "dpfp.nu"),
        ("{ dpfp = { nu = 48 } }", "dpfp.nu"),
        ("{ cosformer = { length = 0 } }", "cosformer.length"),
        ("{ cosformer = { length = 63 } }", "cosformer.length"),
    ] {
        let got = refused(&format!("feature_map = {options}"), 64);
        assert_eq!(got, format!("linear_attention.feature_map.{key}"), "{options}");
    }
    for unknown in ["'softmax'", "{ performer = { feature = 3 } }", "{ cosformer = {} }"] {
        let text = format!("mixer.linear_attention = {{ feature_map = {unknown} }}");
        assert!(toml::from_str::<toml::Table>(&text).is_ok());
        assert!(toml::from_str::<Holder>(&text).is_err(), "{unknown}");
    }
}

#[test]
fn feature_maps_are_written_as_they_are_read() {
    for map in ["'taylor'", "{ performer = { features = 9, seed = 2 } }", "{ rfa = {} }"] {
        let text = format!("mixer.linear_attention = {{ heads = 2, feature_map = {map} }}");
        let read: Holder = toml::from_str(&text).unwrap();
        let written = toml::to_string(&read).unwrap();
        assert_eq!(toml::from_str::<Holder>(&written).unwrap(), read, "{written}");
    }
}
