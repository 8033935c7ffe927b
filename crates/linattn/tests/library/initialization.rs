//! Fresh weights of a model: deviations, decays, steps and biases, as the sources of
//! the layers have them.

use crate::layers::{B, Weights};
use linattn::nn::{LanguageModelConfig, materialize};

/// Standard errors that a sample's deviation may be off by: one sample in 500 million is.
const STANDARD_ERRORS: f64 = 6.0;

/// Weights of a fresh model, by path.
struct Fresh(Weights);

fn config(text: &str) -> LanguageModelConfig {
    toml::from_str(&format!("d_model = 64\ntie_embeddings = false\n{text}")).unwrap()
}

fn fresh(text: &str) -> Fresh {
    let model = config(text).init::<B>(500, &Default::default()).unwrap();
    materialize(&model);
    Fresh(Weights::of(&model))
}

/// Two layers of a mixer without MLPs.
fn mixers(mixer: &str) -> Fresh {
    fresh(&format!("[[layers]]\nrepeat = 2\nmixer.{mixer}\n"))
}

impl Fresh {
    /// All numbers of the parameters whose path ends so.
    fn all(&self, end: &str) -> Vec<f64> {
        let found: Vec<_> = self.0.0.iter().filter(|(path, _)| path.ends_with(end)).collect();
        assert!(!found.is_empty(), "nothing ends with {end}: {:?}", self.0.0.keys());
        found.into_iter().flat_map(|(_, numbers)| numbers.clone()).collect()
    }

    /// Uniform within `bound`.
    #[track_caller]
    fn uniform(&self, end: &str, bound: f64) {
        let numbers = self.all(end);
        let (count, most) = (numbers.len() as f64, largest(&numbers));
        assert!(count >= 256.0, "{end}: {count} numbers say little");
        // All of n numbers are below this with probability e^-20.
        let least = bound * (1.0 - 20.0 / count);
        assert!(most <= bound * 1.000_001 && most > least, "{end}: {most} of {bound}");
        assert_near(end, &numbers, bound / 3f64.sqrt());
    }

    /// Normal, of that standard deviation.
    #[track_caller]
    fn normal(&self, end: &str, wanted: f64) {
        let numbers = self.all(end);
        assert!(numbers.len() >= 512, "{end}: {} numbers say little", numbers.len());
        assert_near(end, &numbers, wanted);
        // None of 512 is above this with probability 5e-7.
        assert!(largest(&numbers) > 2.2 * wanted, "{end} has tails");
    }

    #[track_caller]
    fn each(&self, end: &str, holds: impl Fn(f64) -> bool) {
        let numbers = self.all(end);
        assert!(numbers.iter().all(|&x| holds(x)), "{end}: {numbers:?}");
    }

    /// A, of its logarithm, uniform from `least` to 16.
    #[track_caller]
    fn rates(&self, least: f64) {
        let rates: Vec<f64> = self.all("a_log").iter().map(|x| x.exp()).collect();
        let (low, high) = rates.iter().fold((f64::MAX, 0f64), |(a, b), &x| (a.min(x), b.max(x)));
        let range = 16.0 - least;
        assert!(low >= least - 1e-5 && low < least + range / 20.0, "least A is {low}");
        assert!(high <= 16.0 + 1e-5 && high > 16.0 - range / 20.0, "largest A is {high}");
        let mean = rates.iter().sum::<f64>() / rates.len() as f64;
        assert!((mean - (16.0 + least) / 2.0).abs() < range / 8.0, "mean A is {mean}");
    }

    /// Steps, of the inverse of their softplus, log-uniform in 0.001 to 0.1.
    #[track_caller]
    fn steps(&self, end: &str) {
        let steps: Vec<f64> = self.all(end).iter().map(|x| x.exp().ln_1p()).collect();
        assert!(steps.iter().all(|x| (0.000_99..0.101).contains(x)), "{steps:?}");
        let mean = steps.iter().map(|x| x.ln()).sum::<f64>() / steps.len() as f64;
        assert!((mean - 0.01f64.ln()).abs() < 0.5, "mean log step {mean}");
    }
}

/// Root of the mean square: nothing here has a mean of its own.
fn deviation(numbers: &[f64]) -> f64 {
    (numbers.iter().map(|x| x * x).sum::<f64>() / numbers.len() as f64).sqrt()
}

fn largest(numbers: &[f64]) -> f64 {
    numbers.iter().fold(0f64, |most, x| most.max(x.abs()))
}

#[track_caller]
fn assert_near(what: &str, numbers: &[f64], wanted: f64) {
    // A normal sample's; a uniform one's is smaller.
    let standard_error = (2.0 * numbers.len() as f64).powf(-0.5);
    let got = deviation(numbers);
    let is_near = (got / wanted - 1.0).abs() < STANDARD_ERRORS * standard_error;
    assert!(is_near, "{what}: deviation {got}, not {wanted}");
}

#[test]
fn mamba_starts_as_pytorch_draws_it() {
    let w = mixers("mamba = {}");
    w.uniform("in_proj.weight", 0.125);
    w.uniform("x_proj.weight", 128f64.powf(-0.5));
    w.uniform("dt_proj.weight", 0.5);
    w.steps("dt_proj.bias");
    w.uniform("conv1d.weight", 0.5);
    w.each("conv1d.bias", |x| x != 0.0 && x.abs() <= 0.5);
    w.each("Mamba.d", |d| d == 1.0);
    let rates = w.all("a_log");
    let near = |x: f64, n: usize| (x - (n as f64).ln()).abs() < 1e-6;
    assert!(rates.iter().enumerate().all(|(i, &x)| near(x, i % 16 + 1)), "1 to 16");
    // Two layers write twice to the residual stream where they have no MLP, else four times.
    w.uniform("out_proj.weight", (128f64 * 2.0).powf(-0.5));
    let with = |keys: &str, mlp: &str| {
        fresh(&format!("{keys}[[layers]]\nrepeat = 2\nmixer.mamba = {{}}\nmlp = {mlp}\n"))
    };
    with("", "{ swiglu = {} }").uniform("out_proj.weight", (128f64 * 4.0).powf(-0.5));
    let plain = with("initializer_range = 0.1\nrescale_residual = false\n", "'none'");
    plain.uniform("out_proj.weight", 128f64.powf(-0.5));
    plain.uniform("in_proj.weight", 0.125);
}

#[test]
fn mamba_2_starts_as_pytorch_draws_it() {
    let w = mixers("mamba2 = { head_width = 1, d_state = 16 }");
    w.uniform("in_proj.weight", 0.125);
    w.uniform("conv1d.weight", 0.5);
    w.each("conv1d.bias", |x| x != 0.0 && x.abs() <= 0.5);
    w.uniform("out_proj.weight", (128f64 * 2.0).powf(-0.5));
    w.steps("dt_bias");
    w.rates(1.0);
    w.each("Mamba2.d", |d| d == 1.0);
}

#[test]
fn rates_start_where_each_source_has_them() {
    let eight = |mixer: &str| fresh(&format!("[[layers]]\nrepeat = 8\nmixer.{mixer}\n"));
    for (mixer, least) in [
        ("gated_deltanet = { heads = 32 }", 0.0),
        ("deltaproduct = { heads = 32, forget_gate = true }", 0.0),
        ("comba = { heads = 32 }", 0.0),
        ("kda = { heads = 32 }", 1.0),
        ("gated_deltanet2 = { heads = 32 }", 1.0),
    ] {
        let w = eight(mixer);
        w.rates(least);
        w.steps("dt_bias");
    }
}

#[test]
fn griffins_block_starts_from_unit_variance() {
    let w = fresh(
        "[[layers]]\nrepeat = 8\nmixer.rg_lru = { heads = 2, width = 96 }\nmlp = { geglu = {} }\n",
    );
    w.normal("linear_x.weight", 0.125);
    w.normal("linear_y.weight", 0.125);
    w.normal("conv1d.weight", (0.01f64 / 4.0).sqrt());
    w.normal("a_gate.weight", 48f64.powf(-0.5));
    w.normal("input_gate.weight", 48f64.powf(-0.5));
    w.normal("out_proj.weight", (2.0f64 / 8.0 / 96.0).sqrt());
    for bias in ["linear_x.bias", "linear_y.bias", "conv1d.bias", "a_gate.bias", "out_proj.bias"] {
        w.each(bias, |x| x == 0.0);
    }
    let softplus = |x: f64| x.exp().ln_1p();
    w.each("a_param", |a| (0.8999..0.9991).contains(&(-8.0 * softplus(a)).exp()));
}

#[test]
fn the_first_mlstm_starts_small_behind_closed_gates() {
    let w = fresh("[[layers]]\nrepeat = 4\nmixer.mlstm_v1 = { heads = 4 }\n");
    let small = (2.0f64 / (5.0 * 64.0)).sqrt();
    for matrix in ["up_proj.weight", ".q.weight", ".k.weight", ".v.weight"] {
        w.normal(matrix, small);
    }
    w.normal("down_proj.weight", 2.0 / 4.0 / 64f64.sqrt());
    w.each("igate_preact.weight", |x| x == 0.0);
    w.each("fgate_preact.weight", |x| x == 0.0);
    w.each("igate_preact.bias", |x| x != 0.0 && x.abs() < 0.6);
    assert_eq!(w.all("fgate_preact.bias"), [3.0, 4.0, 5.0, 6.0].repeat(4));
    w.each("skip", |x| x == 1.0);
}

#[test]
fn memories_that_learn_start_as_their_sources_have_them() {
    let w = fresh(
        "[[layers]]\nrepeat = 8\nmixer.ttt = { heads = 2, inner = 'mlp', output_gate = true }\n",
    );
    // The last row is a bias of zeros.
    w.normal("weights.0", 0.02 * (32f64 / 33.0).sqrt());
    w.normal("weights.1", 0.02 * (128f64 / 129.0).sqrt());
    w.normal("rate_proj.weight", 0.02);
    for zeros in ["rate_proj.bias", "place_scale", "ttt_norm_bias"] {
        w.each(zeros, |x| x == 0.0);
    }
    w.each("ttt_norm_weight", |x| x == 1.0);
    let w = mixers("titans = { heads = 2 }");
    w.normal("weights.0", 0.02);
    w.each("keep_proj.bias", |x| x == 4.0);
    w.each("momentum_proj.bias", |x| x == 0.0);
    let w = mixers("titans = { attention = { persistent = 64 } }");
    w.normal("attention.persistent", 0.02);
    let w = mixers("atlas = { heads = 2, inner = 'mlp' }");
    w.normal("weights.0", 0.02);
    w.normal("weights.1", 0.02);
    w.each("coefficients", |x| x == 1.0);
    w.each("keep_proj.bias", |x| x == 4.0);
    let w = mixers("lact = { heads = 2, expand = 2 }");
    w.normal("weights.0", 32f64.powf(-0.5));
    w.normal("weights.1", 64f64.powf(-0.5));
    w.normal("weights.2", 32f64.powf(-0.5));
    w.each("k_scale", |x| x == 1.0);
    w.each("k_offset", |x| x == 0.0);
}

#[test]
fn long_filters_and_state_spaces_start_as_their_sources_have_them() {
    use std::f64::consts::PI;
    let near = |x: f64, want: f64| (x / want - 1.0).abs() < 1e-6;
    let w = fresh("initializer = 'torch'\n[[layers]]\nrepeat = 4\nmixer.hyena = {}\n");
    w.uniform("filter.inner.0.weight", 3f64.powf(-0.5));
    w.uniform("filter.inner.1.weight", 0.125);
    w.uniform("filter.last.weight", 0.125);
    w.uniform("conv1d.weight", 3f64.powf(-0.5));
    w.each("filter.frequency", |x| x == 1.0);
    let w = fresh("[[layers]]\nrepeat = 8\nmixer.h3 = { head_width = 2, d_state = 16 }\n");
    w.uniform("shift.weight", 0.25);
    w.normal("shift_d", 1.0);
    w.normal("ssm.c", 0.5f64.sqrt());
    let frequencies = w.all("ssm.a_imag");
    let turns = frequencies.iter().enumerate();
    assert!(turns.clone().all(|(i, &x)| (x - PI * (i % 8) as f64).abs() < 1e-4), "{frequencies:?}");
    let w = fresh("[[layers]]\nrepeat = 8\nmixer.s4 = { d_state = 8 }\n");
    w.each("log_a_real", |x| near(x, 0.5f64.ln()));
    w.normal("S4.c", 0.5f64.sqrt());
    // HiPPO-LegS' own: the parts of V^* p and V^* b keep the vectors' lengths.
    let squares = |name: &str| w.all(name).iter().map(|x| 2.0 * x * x).sum::<f64>() / 512.0;
    assert!(near(squares("S4.p"), 32.0), "{}", squares("S4.p"));
    assert!(near(squares("S4.b"), 64.0), "{}", squares("S4.b"));
}

const TRANSFORMER: &str = "head_bias = true\npositions = 64\n[[layers]]\nrepeat = 2\n\
     mixer.attention = { heads = 4, output_bias = true }\nmlp = { swiglu = { width = 160 } }\n";

#[test]
fn linear_layers_start_normal_and_smaller_where_they_write() {
    let w = fresh(TRANSFORMER);
    for matrix in ["q_proj.weight", "up_proj.weight", "lm_head.weight", "embeddings.weight"] {
        w.normal(matrix, 0.02);
    }
    w.normal("positions.weight", 0.02);
    w.normal("o_proj.weight", 0.01);
    w.normal("down_proj.weight", 0.01);
    w.each("o_proj.bias", |x| x == 0.0);
    let w = fresh(&format!(
        "initializer_range = 0.1\nembedding_initializer_range = 0.5\nrescale_residual = false\n{TRANSFORMER}"
    ));
    w.normal("embeddings.weight", 0.5);
    w.normal("positions.weight", 0.5);
    for matrix in ["q_proj.weight", "o_proj.weight", "down_proj.weight", "lm_head.weight"] {
        w.normal(matrix, 0.1);
    }
}

#[test]
fn every_write_to_the_residual_stream_counts() {
    let layers = |mlp: &str| {
        fresh(&format!("[[layers]]\nrepeat = 2\nmixer.deltanet = {{ heads = 2 }}\nmlp = {mlp}\n"))
    };
    layers("'none'").normal("o_proj.weight", 0.02 / 2f64.sqrt());
    layers("'identity'").normal("o_proj.weight", 0.01);
}

#[test]
fn pytorchs_start_goes_by_the_fan_in() {
    let w = fresh(&format!("initializer = 'torch'\nrescale_residual = false\n{TRANSFORMER}"));
    for matrix in ["q_proj.weight", "o_proj.weight", "gate_proj.weight", "lm_head.weight"] {
        w.uniform(matrix, 0.125);
    }
    w.uniform("down_proj.weight", 160f64.powf(-0.5));
    w.normal("embeddings.weight", 0.02);
    // MAD's code sets them to zero after PyTorch drew them, Zoology's too.
    w.each("lm_head.bias", |x| x == 0.0);
    w.each("o_proj.bias", |x| x == 0.0);
    let rescaled = fresh(&format!("initializer = 'torch'\n{TRANSFORMER}"));
    rescaled.uniform("down_proj.weight", 160f64.powf(-0.5) / 2.0);
}

#[test]
fn starts_that_do_not_go_together_are_refused_by_key() {
    for (keys, key) in [
        ("initializer = 'torch'\ninitializer_range = 0.1\n", "initializer_range"),
        ("embedding_initializer_range = 0.0\n", "embedding_initializer_range"),
        ("positions = 63\n", "positions"),
    ] {
        let text = format!("{keys}[[layers]]\nmixer.attention = {{}}\n");
        assert_eq!(config(&text).cost(64).expect_err(keys).key, key);
    }
}
