//! Every mixer: forward equals steps, sequences can be cut, nothing looks ahead, gradients agree.

use crate::call::{download, upload};
use crate::support::{DrawnBy, alone};
use burn::backend::{Autodiff, Flex};
use burn::module::{AutodiffModule, Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{DType, Int, Tensor, TensorData, backend::Backend};
use linattn::backend::TrainBackend;
use linattn::nn::mixers::{Mixer, MixerConfig};
use linattn::nn::{
    Kept, KeptTensors, LanguageModel, LanguageModelConfig, Norm, NormKind, Rope, Shared,
    ShortConvolution, materialize,
};
use linattn_oracle::{Rng, assert_close};

pub(crate) type B = Autodiff<Flex>;
pub(crate) const D: usize = 24;
/// Everything here is computed in double precision: two ways that agree differ by rounding alone,
/// however much a random mixer cancels.
const LIMIT: f64 = 1e-10;

/// At least one config for each mixer, and one for each option.
pub(crate) const MIXERS: &[&str] = &[
    "gated_deltanet = { heads = 2 }",
    "gated_deltanet = { heads = 2, value_heads = 4, key_width = 6, expand_v = 1.5 }",
    "gated_deltanet = { heads = 3, conv_size = 0, output_gate = false, allow_neg_eigval = true }",
    "deltanet = { heads = 2 }",
    "deltanet = { heads = 2, exact_step = true }",
    "deltanet = { heads = 2, qk_activation = 'elu', exact_step = true, allow_neg_eigval = true, conv_size = 0 }",
    "deltanet = { heads = 2, qk_activation = 'relu', qk_norm = 'sum', use_beta = false }",
    "deltanet = { heads = 3, qk_activation = 'identity', conv_size = 0, preconditioner = true }",
    "deltanet = { heads = 2, key_width = 5, qk_activation = { dpfp = { nu = 3 } }, qk_norm = 'sum' }",
    "gated_deltanet = { heads = 2, value_heads = 4, preconditioner = true }",
    "gated_deltanet = { heads = 2, key_width = 4, qk_activation = { dpfp = { nu = 2 } }, exact_step = true, expand_v = 1.5 }",
    "deltanet = { heads = 1, value_heads = 3, conv_size = 2, output_gate = true, allow_neg_eigval = true }",
    "linear_attention = { heads = 2 }",
    "linear_attention = { heads = 2, feature_map = 'relu', normalize = true, output_norm = 'none', conv_size = 3 }",
    "linear_attention = { heads = 1, value_heads = 2, feature_map = 'identity', expand_v = 0.5 }",
    "linear_attention = { heads = 2, feature_map = 'taylor', key_width = 4, expand_v = 3.0, normalize = true, output_norm = 'none', denominator_eps = 1e-3 }",
    "linear_attention = { heads = 2, feature_map = 'learnable_square' }",
    "linear_attention = { heads = 2, output_norm = 'none' }",
    "linear_attention = { heads = 2, feature_map = 'learnable_square', tie_feature_map_qk = true, norm_eps = 1e-3 }",
    "linear_attention = { heads = 2, feature_map = { performer = { features = 10, seed = 3 } }, normalize = true, output_norm = 'none' }",
    "linear_attention = { heads = 2, key_width = 5, feature_map = { performer = {} } }",
    "linear_attention = { heads = 2, value_heads = 4, feature_map = { rfa = {} }, expand_v = 0.5 }",
    "linear_attention = { heads = 2, feature_map = { rfa = {} }, normalize = true, denominator_floor = 0.3, output_norm = 'none' }",
    "linear_attention = { heads = 1, value_heads = 2, feature_map = { rfa = { features = 9 } }, normalize = true, denominator_floor = 0.1, forget_gate = true, output_norm = 'none' }",
    "linear_attention = { heads = 2, forget_gate = true, conv_size = 3 }",
    "linear_attention = { heads = 1, value_heads = 2, feature_map = { cosformer = { length = 64 } }, normalize = true, output_norm = 'none' }",
    "linear_attention = { heads = 2, feature_map = 'hedgehog', normalize = true, output_norm = 'none' }",
    "linear_attention = { heads = 2, feature_map = 'hedgehog', tie_feature_map_qk = true, conv_size = 2 }",
    "linear_attention = { heads = 2, feature_map = { dijiang = { seed = 1 } }, normalize = true, output_norm = 'none' }",
    "linear_attention = { heads = 2, feature_map = { dpfp = { nu = 3 } }, norm_q = true, norm_k = true }",
    "linear_attention = { heads = 2, feature_map = 'elementwise_product' }",
    "linear_attention = { heads = 2, feature_map = 'elementwise_product', tie_feature_map_qk = true }",
    "retnet = { heads = 2 }",
    "retnet = { heads = 2, value_heads = 4, canon = 3 }",
    "retnet = { heads = 1, value_heads = 2, output_gate = false, expand_v = 1.0 }",
    "mamba2 = { d_state = 10, head_width = 8 }",
    "mamba2 = { d_state = 7, head_width = 12, groups = 2, conv_size = 2 }",
    "mamba2 = { d_state = 6, head_width = 8, groups = 2, group_norm = true }",
    "mamba2 = { d_state = 5, head_width = 8, conv_size = 1 }",
    "mamba2 = { d_state = 4, head_width = 6, heads = 6, groups = 3, group_norm = true, step_min = 0.002 }",
    "mamba2 = { d_state = 6, head_width = 8, rope = true }",
    "mamba3 = { d_state = 10, head_width = 8 }",
    "mamba3 = { d_state = 6, head_width = 12, groups = 2, rope_fraction = 1.0, output_norm = true, norm_eps = 1e-3 }",
    "mamba3 = { d_state = 8, expand = 1, head_width = 6, groups = 2, mimo_rank = 3 }",
    "mamba3 = { d_state = 4, head_width = 24, mimo_rank = 2, output_norm = true }",
    "deltaproduct = { heads = 2, allow_neg_eigval = false }",
    "deltaproduct = { heads = 2, householder_steps = 3, key_width = 6, expand_v = 0.5, conv_size = 0, forget_gate = true, output_gate = true }",
    "deltaproduct = { heads = 3, householder_steps = 1, conv_size = 2 }",
    "gla = { heads = 2 }",
    "gla = { heads = 3, key_width = 5, expand_v = 1.0, gate_low_rank = 3, gate_normalizer = 1.0, conv_size = 3, output_gate = false }",
    "hgrn2 = { heads = 2 }",
    "hgrn2 = { heads = 2, key_width = 6, expand_v = 1.5, lower_bound = 0.6, conv_size = 3 }",
    "rwkv6 = { heads = 2 }",
    "rwkv6 = { heads = 3, key_width = 6, expand_v = 0.5, mix_low_rank = 3, gate_low_rank = 5, norm_eps = 64e-5 }",
    "decaying_fast_weights = { heads = 2 }",
    "decaying_fast_weights = { heads = 3, key_width = 5, expand_v = 2.0, gate_normalizer = 16.0, conv_size = 3 }",
    "gateloop = { heads = 2 }",
    "gateloop = { heads = 3, key_width = 6, expand_v = 0.5, gate_normalizer = 1.0, conv_size = 3, output_gate = false }",
    "gsa = { heads = 2 }",
    "gsa = { heads = 3, slots = 5, expand_v = 0.5, gate_normalizer = 1.0, conv_size = 3 }",
    "cyfa = { heads = 2, slots = 8 }",
    "cyfa = { heads = 3, slots = 4, key_width = 5, expand_v = 2.0, conv_size = 0, norm_eps = 1e-3 }",
    "metala = { heads = 2 }",
    "metala = { heads = 3, key_width = 6, expand_v = 0.5, gate_normalizer = 1.0, self_augmentation = false, conv_size = 0 }",
    "gated_retention = { heads = 2 }",
    "gated_retention = { heads = 1, value_heads = 2, expand_v = 0.5, gate_normalizer = 1.0 }",
    "log_linear_attention = { heads = 2, levels = 7 }",
    "log_linear_attention = { heads = 3, key_width = 5, expand_v = 2.0, levels = 3, conv_size = 0, output_gate = false }",
    "log_linear_attention = { heads = 2, levels = 5, delta_rule = true, conv_size = 2, norm_eps = 1e-3 }",
    "lightning_attention = { heads = 2 }",
    "lightning_attention = { heads = 3, key_width = 5, decay_scale = 0.5 }",
    // Norms behind the denominator hide the input gates' bias unless the epsilon is felt.
    "mlstm = { heads = 2, input_gate_bias = -10.0, conv_size = 3 }",
    "mlstm = { heads = 3, key_width = 5, expand_v = 1.0, gate_cap = 0.0, norm_eps = 0.5 }",
    "mlstm_v1 = { heads = 2 }",
    "mlstm_v1 = { heads = 8, expand = 2.5, conv_size = 3, norm_eps = 0.5 }",
    "kda = { heads = 2 }",
    "kda = { heads = 2, value_heads = 4, preconditioner = true }",
    "kda = { heads = 2, value_heads = 4, key_width = 6, expand_v = 1.5, gate_rank = 5, conv_size = 0 }",
    "kda = { heads = 3, conv_size = 2, allow_neg_eigval = true }",
    "comba = { heads = 2 }",
    "comba = { heads = 1, value_heads = 3, key_width = 6, output_correction = 1.0, conv_size = 2 }",
    "comba = { heads = 3, expand_v = 0.5, conv_size = 0, output_gate = false, inner_decay = false, output_correction = 0.0 }",
    "comba = { heads = 1, value_heads = 2, output_correction = 0.5, norm_last = true }",
    "longhorn = { heads = 2 }",
    "longhorn = { heads = 1, value_heads = 2, key_width = 6, expand_v = 1.5, conv_size = 0, output_gate = false }",
    "gated_deltanet2 = { heads = 2 }",
    "gated_deltanet2 = { heads = 2, value_heads = 4, key_width = 6, expand_v = 1.5, gate_rank = 5, conv_size = 0 }",
    "gated_deltanet2 = { heads = 3, conv_size = 2, allow_neg_eigval = true }",
    "rwkv7 = { heads = 2 }",
    "rwkv7 = { heads = 3, key_width = 6, decay_rank = 4, rate_rank = 5, gate_rank = 6 }",
    "mesa_net = { heads = 2 }",
    "mesa_net = { heads = 3, key_width = 6, lambda_lower_bound = 0.5, cg_steps = 20, conv_size = 0, output_gate = true }",
    "mesa_net = { heads = 2, forget_gate = false, input_gate = false }",
    "gated_kalmanet = { heads = 2 }",
    "gated_kalmanet = { heads = 3, key_width = 6, ridge = 0.2, iterations = 7, conv_size = 0, output_gate = false, norm_eps = 1e-3 }",
    "hgrn = {}",
    "hgrn = { expand = 2, lower_bound = 0.6, conv_size = 3 }",
    "rg_lru = {}",
    "rg_lru = { width = 30, heads = 3, conv_size = 2 }",
    "rg_lru = { heads = 2, gelu_tanh = true, first_unscaled = true }",
    "lru = {}",
    "lru = { width = 10, r_min = 0.0, r_max = 0.5, max_phase = 0.3 }",
    "s4d = { d_state = 8 }",
    "s4d = { d_state = 6, spectrum = 'inv', discretization = 'bilinear', dt_min = 0.01, dt_max = 0.5 }",
    "mamba = {}",
    "mamba = { d_state = 5, expand = 1, conv_size = 2, dt_rank = 3, allow_neg_eigval = true }",
    "mamba = { d_state = 3, conv_size = 1 }",
    "qrnn = {}",
    "qrnn = { width = 10, window = 3 }",
    "qrnn = { window = 1 }",
    "rwkv4 = {}",
    "aft = {}",
    "aft = { form = { local = { window = 5, length = 64, rank = 3 } } }",
    "aft = { form = { local = { window = 50, length = 64 } } }",
    "aft = { form = { full = { length = 64, rank = 7 } } }",
    "lstm = {}",
    "lstm = { width = 10 }",
    "gru = {}",
    "gru = { width = 10 }",
    "goru = {}",
    "goru = { width = 10, capacity = 5 }",
    "slstm = { heads = 2 }",
    "slstm = { heads = 3, conv_size = 0, norm_eps = 1e-3 }",
    "base_conv = {}",
    "s4 = { d_state = 6 }",
    "h3 = { d_state = 4 }",
    "h3 = { head_width = 3, d_state = 6, dt_min = 0.01, dt_max = 0.5 }",
    "h3 = { head_width = 2, d_state = 6, learn_inputs = true }",
    "ttt = { heads = 2 }",
    "ttt = { heads = 3, mini_batch = 4, base_lr = 0.5, conv_size = 3, output_gate = true, rope_theta = 100.0 }",
    "ttt = { heads = 2, inner = 'mlp', mini_batch = 5, key_width = 6, output_gate = true }",
    "titans = { heads = 2 }",
    "titans = { heads = 3, key_width = 6, mini_batch = 4, base_lr = 0.5, conv_size = 0, output_gate = false, norm_eps = 1e-3 }",
    "titans = { heads = 2, inner = 'mlp', mini_batch = 5, conv_size = 3 }",
    "titans = { heads = 2, mini_batch = 5, attention = { heads = 3, window = 4, persistent = 3 } }",
    "titans = { conv_size = 0, output_gate = false, attention = { window = 40, persistent = 0 } }",
    "atlas = { heads = 2, key_width = 4, window = 3, mini_batch = 5 }",
    "atlas = { heads = 3, window = 9, mini_batch = 4, base_lr = 0.5, muon = false, conv_size = 0, output_gate = false, norm_eps = 1e-3 }",
    "atlas = { heads = 2, inner = 'mlp', key_width = 3, window = 1, momentum = false, muon = false, conv_size = 3 }",
    "atlas = { heads = 2, inner = 'mlp', key_width = 3, degree = 1, window = 4, mini_batch = 6, momentum = false }",
    "lact = { heads = 2, attention_heads = 3, mini_batch = 3, window = 5, base_lr = 0.1 }",
    "lact = { heads = 2, expand = 2, mini_batch = 4, window = 3, base_lr = 0.1, momentum = false, muon = true, qk_norm = false, rope_theta = 100.0 }",
    "lact = { heads = 1, mini_batch = 2, window = 40, muon = true, norm_eps = 1e-3 }",
    "pooling = {}",
    "pooling = { window = 6 }",
    "token_mlp = { length = 64 }",
    "hyena = { filter_order = 8 }",
    "hyena = { filter_order = 8, length = 64, learn_lags = true }",
    "hyena = { expand = 2, projection_groups = 2, conv_size = 2, filter_order = 4, filter_depth = 1, filter_frequency = 10.0, length = 64 }",
    "multihead_hyena = { group_width = 4 }",
    "multihead_hyena = { group_width = 8, conv_size = 2, filter_order = 4, filter_frequency = 5.0, length = 64 }",
    "base_conv = { implicit = true, length = 64 }",
    "attention = { heads = 4 }",
    "attention = { heads = 4, key_value_heads = 2, rope = false }",
    "attention = { heads = 4, window = 5 }",
    "attention = { heads = 6, key_value_heads = 2, rope = false, alibi = true }",
    "attention = { heads = 4, rope = false, alibi = true, window = 2 }",
    "attention = { heads = 4, key_value_heads = 2, stride = 4 }",
    "attention = { heads = 4, key_value_heads = 2, rope = false, cope = 6 }",
    "attention = { heads = 2, rope = false, cope = 3, window = 5 }",
    "attention = { heads = 2, rope = false, cope = 40, stride = 5 }",
    "attention = { heads = 4, key_value_heads = 2, qk_norm = true, norm_eps = 1e-4, qkv_bias = true, output_bias = true }",
    "attention = { heads = 3, rope_width = 4, qk_norm = true, qk_norm_kind = 'zero_centered_rms', output_gate = true }",
    "attention = { heads = 4, key_value_heads = 2, rope = false, qk_norm = true, qk_norm_span = 'projection', output_gate = true }",
    "attention = { heads = 4, key_value_heads = 2, window = 6, canon = 4 }",
    "attention = { heads = 2, rope = false, alibi = true, canon = 2 }",
    "forgetting_attention = { heads = 4 }",
    "forgetting_attention = { heads = 4, key_value_heads = 2, key_width = 5, qk_norm = true, output_gate = true }",
    "forgetting_attention = { heads = 4, key_value_heads = 2, qk_norm = true, output_gate = true, output_norm = true, key_shift = true, value_shift = true }",
    "forgetting_attention = { heads = 2, value_shift = true }",
    "mla = { heads = 2 }",
    "mla = { heads = 3, key_width = 5, rope_width = 4, value_width = 7, kv_rank = 9, q_rank = 6 }",
    "deltaformer = { heads = 2, chunk = 8 }",
    "deltaformer = { heads = 4, key_value_heads = 2, rope = false, qk_norm = true }",
    "path_attention = { heads = 2, chunk = 8 }",
    "path_attention = { heads = 4, key_value_heads = 2, key_width = 5, w_rank = 3, conv_size = 0, forget_gate = true, qk_norm = true }",
    "gau = {}",
    "gau = { key_width = 6, expand = 1, rope_theta = 100.0 }",
];

pub(crate) fn config(text: &str) -> MixerConfig {
    #[derive(serde::Deserialize)]
    struct Holder {
        mixer: MixerConfig,
    }
    let holder: Holder = toml::from_str(&format!("mixer.{text}")).unwrap();
    holder.mixer
}

/// Weights in double precision, matrices so many times as large.
struct Wide(f64);

impl<B: Backend> ModuleMapper<B> for Wide {
    fn map_float<const R: usize>(&mut self, param: Param<Tensor<B, R>>) -> Param<Tensor<B, R>> {
        let factor = if R == 2 { self.0 } else { 1.0 };
        param.map(|weight| (weight.cast(DType::F64) * factor).detach().require_grad())
    }
}

/// `module` with weights that are the same in each run but for their mean and deviation, for tests that a few
/// weights in a thousand would fail:
/// Burn's generator serves all threads of the process, so that no seed of it fixes what one test draws.
pub(crate) fn drawn_by<B: Backend, M: Module<B>>(seed: u64, module: M) -> M {
    module.map(&mut DrawnBy { rng: Rng::new(seed), deviation: None })
}

/// The module in double precision, with the same weights in each run but for their mean and deviation.
pub(crate) fn wide<B: Backend, M: Module<B>>(module: M) -> M {
    drawn_by(1, widened(module))
}

/// The module in double precision, with the weights that it has.
pub(crate) fn widened<B: Backend, M: Module<B>>(module: M) -> M {
    materialize::<B, M>(&module);
    module.map(&mut Wide(1.0))
}

/// The mixer with weights large enough for its gates to matter, and the same in each run
/// but for their mean and deviation.
pub(crate) fn mixer(text: &str) -> Mixer<B> {
    let mixer = config(text).init::<B>(D, &Default::default()).unwrap();
    materialize(&mixer);
    // Those that start by the fan-in are as large as it takes.
    let by_fan_in = ["mamba", "rg_lru", "mlstm_v1"].iter().any(|name| text.starts_with(name));
    drawn_by(1, mixer.map(&mut Wide(if by_fan_in { 1.5 } else { 8.0 })))
}

pub(crate) fn input(tokens: usize) -> Tensor<B, 3> {
    noise([2, tokens, D])
}

/// Normal noise, the same in each run of a test, other noise in each call.
fn noise<const R: usize>(shape: [usize; R]) -> Tensor<B, R> {
    thread_local!(static CALLS: std::cell::Cell<u64> = const { std::cell::Cell::new(0) });
    let call = CALLS.replace(CALLS.get() + 1);
    let mut rng = Rng::named(call, std::thread::current().name().unwrap_or_default());
    let values: Vec<f64> = (0..shape.iter().product()).map(|_| rng.normal()).collect();
    upload(&values, shape, DType::F64, &Default::default())
}

#[test]
fn every_mixer_is_tested_here() {
    let tested: Vec<&str> = MIXERS.iter().map(|text| config(text).name()).collect();
    for name in MixerConfig::NAMES {
        let reads = *name == "cross_attention";
        let in_models = MODELS.iter().any(|text| text.contains(&format!("mixer.{name} ")));
        assert!(tested.contains(name) || (reads && in_models), "{name} has no config in MIXERS");
    }
}

#[test]
fn forward_equals_steps() {
    for text in MIXERS {
        let (mixer, x) = (mixer(text), input(21));
        let (whole, last) = mixer.forward(x.clone(), None);
        let (mut outputs, mut state) = (vec![], None);
        for t in 0..21 {
            let (y, next) = mixer.step(x.clone().narrow(1, t, 1).squeeze_dim(1), state);
            outputs.push(y);
            state = Some(next);
        }
        assert_close(text, &download(whole), &download(Tensor::stack::<3>(outputs, 1)), LIMIT);
        // What comes next is the same too, so the states are.
        let next = input(1).squeeze_dim(1);
        let (a, _) = mixer.step(next.clone(), Some(last));
        let (b, _) = mixer.step(next, state);
        assert_close(text, &download(a), &download(b), LIMIT);
    }
}

#[test]
fn a_sequence_can_be_cut_anywhere() {
    for text in MIXERS {
        let (mixer, x) = (mixer(text), input(37));
        let want = download(mixer.forward(x.clone(), None).0);
        for cut in [1, 2, 3, 15, 16, 17, 36] {
            let (first, state) = mixer.forward(x.clone().narrow(1, 0, cut), None);
            let (rest, _) = mixer.forward(x.clone().narrow(1, cut, 37 - cut), Some(state));
            let got = download(Tensor::cat(vec![first, rest], 1));
            assert_close(&format!("{text}, cut at {cut}"), &want, &got, LIMIT);
        }
    }
}

#[test]
fn an_input_gate_of_e_to_the_200_overflows_nothing() {
    let mixer = mixer("mlstm = { heads = 2, input_gate_bias = 200.0, gate_cap = 0.0 }");
    let y = download(mixer.forward(input(21), None).0);
    assert!(y.iter().all(|y| y.is_finite()), "{y:?}");
    assert!(y.iter().any(|y| *y != 0.0));
}

#[test]
fn exponentials_of_keys_and_gates_overflow_nothing() {
    let local = "aft = { form = { local = { window = 3, length = 64 } } }";
    let full = "aft = { form = { full = { length = 64 } } }";
    for text in ["rwkv4 = {}", "aft = {}", local, full, "slstm = { heads = 2 }"] {
        for size in [1e3, 1e-3] {
            let (mixer, x) = (mixer(text), input(21) * size);
            let y = download(mixer.forward(x, None).0);
            assert!(y.iter().all(|y| y.is_finite()), "{text}: {y:?}");
            assert!(y.iter().any(|y| *y != 0.0), "{text}");
        }
    }
}

#[test]
fn configs_of_vectors_that_fit_nothing_are_refused_by_key() {
    for (text, key) in [
        ("hgrn = { lower_bound = 1.0 }", "hgrn.lower_bound"),
        ("hgrn = { expand = 0 }", "hgrn.expand"),
        ("rg_lru = { heads = 5 }", "rg_lru.heads"),
        ("rg_lru = { conv_size = 1 }", "rg_lru.conv_size"),
        ("lru = { r_min = 0.9, r_max = 0.5 }", "lru.r_max"),
        ("lru = { max_phase = 7.0 }", "lru.max_phase"),
        ("s4d = { d_state = 3 }", "s4d.d_state"),
        ("s4d = { dt_max = 0.0001 }", "s4d.dt_max"),
        ("mamba = { dt_rank = 0 }", "mamba.dt_rank"),
        ("mamba = { conv_size = 0 }", "mamba.conv_size"),
        ("mamba2 = { head_width = 8, conv_size = 0 }", "mamba2.conv_size"),
        ("mamba2 = { head_width = 8, d_state = 5, rope = true }", "mamba2.d_state"),
        ("mamba3 = { head_width = 7 }", "mamba3.head_width"),
        ("mamba3 = { head_width = 8, d_state = 5 }", "mamba3.d_state"),
        ("mamba3 = { head_width = 8, groups = 4 }", "mamba3.groups"),
        ("mamba3 = { head_width = 8, rope_fraction = 0.0 }", "mamba3.rope_fraction"),
        ("mamba3 = { head_width = 8, mimo_rank = 0 }", "mamba3.mimo_rank"),
        ("gated_kalmanet = { ridge = 0.0 }", "gated_kalmanet.ridge"),
        ("gated_kalmanet = { iterations = 0 }", "gated_kalmanet.iterations"),
        ("log_linear_attention = { levels = 1 }", "log_linear_attention.levels"),
        ("cyfa = { slots = 7 }", "cyfa.slots"),
        ("cyfa = { slots = 2 }", "cyfa.slots"),
        ("mlstm_v1 = { heads = 3 }", "mlstm_v1.heads"),
        ("mlstm_v1 = { conv_size = 1 }", "mlstm_v1.conv_size"),
        ("mlstm_v1 = { expand = 1e9 }", "mlstm_v1.expand"),
        ("attention = { dropout = 1.0 }", "attention.dropout"),
        ("qrnn = { window = 0 }", "qrnn.window"),
        ("aft = { form = { local = { window = 0, length = 64 } } }", "aft.form.local.window"),
        ("aft = { form = { full = { length = 64, rank = 0 } } }", "aft.form.full.rank"),
        ("lstm = { width = 0 }", "lstm.width"),
        ("gru = { width = 0 }", "gru.width"),
        ("goru = { width = 7 }", "goru.width"),
        ("goru = { capacity = 0 }", "goru.capacity"),
        ("pooling = { window = 1 }", "pooling.window"),
        ("token_mlp = { length = 0 }", "token_mlp.length"),
        ("gau = { key_width = 7 }", "gau.key_width"),
        ("gau = { expand = 0 }", "gau.expand"),
        ("attention = { stride = 1 }", "attention.stride"),
        ("attention = { stride = 4, window = 4 }", "attention.window"),
        ("attention = { cope = 8 }", "attention.rope"),
        ("attention = { rope = false, cope = 8, alibi = true }", "attention.alibi"),
        ("slstm = { heads = 7 }", "slstm.heads"),
        ("ttt = { heads = 5 }", "ttt.heads"),
        ("ttt = { key_width = 7 }", "ttt.key_width"),
        ("ttt = { mini_batch = 0 }", "ttt.mini_batch"),
        ("ttt = { base_lr = 0.0 }", "ttt.base_lr"),
        ("ttt = { conv_size = 1 }", "ttt.conv_size"),
        ("titans = { mini_batch = 0 }", "titans.mini_batch"),
        ("titans = { base_lr = -1.0 }", "titans.base_lr"),
        ("titans = { attention = { heads = 5 } }", "titans.attention.heads"),
        ("titans = { attention = { window = 1 } }", "titans.attention.window"),
        ("titans = { attention = { persistent = 10_000_000 } }", "titans.attention.persistent"),
        ("atlas = { degree = 3 }", "atlas.degree"),
        ("atlas = { key_width = 100_000 }", "atlas.key_width"),
        ("atlas = { window = 0 }", "atlas.window"),
        ("atlas = { mini_batch = 0 }", "atlas.mini_batch"),
        ("atlas = { base_lr = 0.0 }", "atlas.base_lr"),
        ("lact = { heads = 5 }", "lact.heads"),
        ("lact = { attention_heads = 5 }", "lact.attention_heads"),
        ("lact = { window = 0 }", "lact.window"),
        ("lact = { expand = 1_000_000 }", "lact.expand"),
        ("hyena = { group_width = 4 }", "hyena.group_width"),
        ("hyena = { projection_groups = 5 }", "hyena.projection_groups"),
        ("hyena = { length = 1 }", "hyena.length"),
        ("multihead_hyena = {}", "multihead_hyena.group_width"),
        ("multihead_hyena = { group_width = 7 }", "multihead_hyena.group_width"),
        ("base_conv = { implicit = true, length = 0 }", "base_conv.length"),
        ("h3 = { head_width = 5 }", "h3.head_width"),
        ("h3 = { d_state = 0 }", "h3.d_state"),
        ("s4 = { d_state = 3 }", "s4.d_state"),
        ("s4 = { dt_max = 0.0001 }", "s4.dt_max"),
    ] {
        let config = config(text);
        let error = config.init::<B>(D, &Default::default()).expect_err(text);
        assert_eq!(error.key, key);
        assert_eq!(config.cost(D, 30).expect_err(text).key, key);
    }
}

#[test]
fn a_mixer_with_a_fixed_size_state_steps_alike_wherever_it_stands() {
    for text in MIXERS {
        let model = model(&format!("[[layers]]\nmixer.{text}\n"));
        if !model.fixed_size_state() {
            continue;
        }
        let state = model.forward(ids(9), None).1;
        let step = |state| {
            let id = ids(9).narrow(1, 8, 1).squeeze_dim(1);
            download(model.step(id, Some(state)).0)
        };
        assert_eq!(step(state.clone()), step(state.with_position(1000)), "{text}");
        assert_eq!(state.bytes(), model.forward(ids(30), None).1.bytes(), "{text}");
    }
}

#[test]
fn the_mixers_that_count_their_tokens_are_these() {
    let counts = |text: &&&str| !mixer(text).fixed_size_state();
    let mut names: Vec<&str> =
        MIXERS.iter().filter(counts).map(|text| config(text).name()).collect();
    names.dedup();
    // Linear attention for the sake of its feature maps that see positions, Mamba-2 where it rotates.
    let rotating = ["linear_attention", "retnet", "mamba2", "gated_retention"];
    let by_levels = ["log_linear_attention"];
    let in_mini_batches = ["ttt", "titans", "atlas", "lact"];
    let biased = ["aft"];
    let convolving = ["token_mlp", "hyena", "multihead_hyena", "base_conv"];
    let growing =
        ["attention", "forgetting_attention", "mla", "deltaformer", "path_attention", "gau"];
    let all = [&rotating[..], &by_levels, &biased, &in_mini_batches, &convolving, &growing];
    assert_eq!(names, all.concat());
}

#[test]
fn nothing_looks_ahead() {
    for text in MIXERS {
        let (mixer, x) = (mixer(text), input(40));
        let want = mixer.forward(x.clone(), None).0.narrow(1, 0, 19);
        let changed = Tensor::cat(vec![x.narrow(1, 0, 19), input(21)], 1);
        let got = mixer.forward(changed, None).0.narrow(1, 0, 19);
        assert_close(text, &download(want), &download(got), LIMIT);
    }
}

#[test]
fn a_window_hides_what_lies_before_it_however_long_the_sequence() {
    let (mixer, x) = (mixer("attention = { heads = 2, window = 5 }"), input(300));
    let whole = mixer.forward(x.clone(), None).0;
    let (mut outputs, mut state) = (vec![], None);
    for from in (0..300).step_by(60) {
        let (y, next) = mixer.forward(x.clone().narrow(1, from, 60), state);
        outputs.push(y);
        state = Some(next);
    }
    assert_close("parts", &download(whole.clone()), &download(Tensor::cat(outputs, 1)), LIMIT);
    let changed = Tensor::cat(vec![input(150), x.narrow(1, 150, 150)], 1);
    let after = mixer.forward(changed, None).0;
    let from = |x: &Tensor<B, 3>, t| download(x.clone().narrow(1, t, 300 - t));
    assert_close("out of sight", &from(&whole, 154), &from(&after, 154), LIMIT);
    let (seen, other) = (from(&whole, 153), from(&after, 153));
    assert!(linattn_oracle::relative_error(&seen, &other) > 1e-3, "the window is 5 tokens");
}

#[test]
fn sequences_are_no_longer_than_the_positions_that_a_mixer_has_learnt() {
    for (text, key) in [
        ("aft = { form = { full = { length = 20 } } }", "aft.form.full.length"),
        ("aft = { form = { local = { window = 3, length = 20 } } }", "aft.form.local.length"),
        ("token_mlp = { length = 20 }", "token_mlp.length"),
    ] {
        assert_eq!(mixer(text).positions(), Some(20), "{text}");
        let layer = format!("[[layers]]\nmixer.{text}\n");
        assert_eq!(model(&layer).positions(), Some(20), "{text}");
        assert!(config(text).cost(D, 20).is_ok(), "{text}");
        assert_eq!(config(text).cost(D, 21).expect_err(text).key, key);
    }
}

#[test]
#[should_panic(expected = "position 21 of 20")]
fn what_lies_beyond_the_positions_of_a_mixer_is_no_number() {
    let _ = mixer("aft = { form = { full = { length = 20 } } }").forward(input(21), None);
}

/// Ids of a sequence, the same in every test.
pub(crate) fn ids(length: usize) -> Tensor<B, 2, Int> {
    let ids: Vec<i32> = (0..length as i32).map(|i| i * i * 7 % 11).collect();
    Tensor::from_data(TensorData::new(ids, [1, length]), &Default::default())
}

#[test]
fn future_tokens_do_not_change_past_logits() {
    for text in MIXERS {
        let config: LanguageModelConfig = toml::from_str(&format!(
            "d_model = 24\n[[layers]]\nrepeat = 2\nmlp = {{ swiglu = {{}} }}\nmixer.{text}\n"
        ))
        .unwrap();
        let model = wide(config.init::<B>(11, &Default::default()).unwrap());
        let noise = (ids(40).narrow(1, 19, 21) + 4).remainder_scalar(11);
        let changed = Tensor::cat(vec![ids(40).narrow(1, 0, 19), noise], 1);
        let past = |ids| download(model.forward(ids, None).0.narrow(1, 0, 19));
        assert_close(text, &past(ids(40)), &past(changed), LIMIT);
    }
}

#[test]
fn an_auto_encoder_answers_every_position_from_the_last_vector() {
    let _alone = alone();
    let config: LanguageModelConfig = toml::from_str(
        "d_model = 24\nhead = 'auto_encoder'\ntie_embeddings = false\nhead_bias = true\n\
         [[layers]]\nmixer.deltanet = { heads = 2 }\n",
    )
    .unwrap();
    let model = wide(config.init::<B>(11, &Default::default()).unwrap());
    assert!(model.needs_whole_sequences());
    let logits = download(model.forward(ids(9), None).0);
    let rows: Vec<&[f64]> = logits.chunks(11).collect();
    assert!(rows.windows(2).all(|pair| pair[0] != pair[1]), "positions differ");
    // The first answer changes with the last token: it is made from what the layers give there.
    let other = (ids(9).narrow(1, 8, 1) + 1).remainder_scalar(11);
    let changed = Tensor::cat(vec![ids(9).narrow(1, 0, 8), other], 1);
    let other = download(model.forward(changed, None).0);
    assert!(linattn_oracle::relative_error(rows[0], &other[..11]) > 1e-3);
    use burn::optim::GradientsParams;
    let weights = noise([1, 9, 11]);
    let loss = (model.forward(ids(9), None).0 * weights).sum();
    let gradients = GradientsParams::from_grads(loss.backward(), &model);
    for (name, gradient) in collect(&model, &gradients) {
        assert!(gradient.iter().any(|x| *x != 0.0), "{name} is not learnt");
    }
}

#[test]
fn one_householder_step_is_deltanet() {
    use linattn::nn::mixers::TokenMixer;
    let text = "key_width = 6, heads = 2, conv_size = 3, allow_neg_eigval = true";
    let delta = mixer(&format!("deltanet = {{ {text} }}"));
    let product = mixer(&format!("deltaproduct = {{ {text}, householder_steps = 1 }}"));
    // The two have the same parameters in the same order: each takes the other's values by name.
    let (Mixer::DeltaNet(delta), Mixer::DeltaProduct(product)) = (delta, product) else {
        panic!("other mixers");
    };
    let (mut values, mut names) = (Values::default(), Values::default());
    delta.visit(&mut values);
    product.visit(&mut names);
    let shapes = |v: &Values| v.0.iter().map(|(n, x)| (n.clone(), x.len())).collect::<Vec<_>>();
    assert_eq!(shapes(&values), shapes(&names));
    let product = product.map(&mut values);
    let x = input(13);
    let (want, got) = (delta.forward(x.clone(), None).0, product.forward(x, None).0);
    assert_close("one step", &download(want), &download(got), LIMIT);
}

/// Values of parameters by path, read from one module and written into another.
#[derive(Default)]
pub(crate) struct Values(Vec<(String, Vec<f64>)>, Vec<String>);

impl ModuleVisitor<B> for Values {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.1.push(name.to_string());
    }
    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.1.pop();
    }
    fn visit_float<const R: usize>(&mut self, param: &Param<Tensor<B, R>>) {
        self.0.push((self.1.join("."), download(param.val())));
    }
}

impl ModuleMapper<B> for Values {
    fn map_float<const R: usize>(&mut self, param: Param<Tensor<B, R>>) -> Param<Tensor<B, R>> {
        let (_, values) = self.0.remove(0);
        param.map(|old| {
            let values = TensorData::new(values, old.dims());
            Tensor::from_data(values, (&old.device(), DType::F64)).require_grad()
        })
    }
}

#[test]
fn gradients_through_chunks_equal_gradients_through_steps() {
    use burn::optim::GradientsParams;
    let _alone = alone();
    for text in MIXERS {
        let (mixer, x) = (mixer(text), input(19));
        let weights = input(19);
        let (whole, _) = mixer.forward(x.clone(), None);
        let (mut outputs, mut state) = (vec![], None);
        for t in 0..19 {
            let (y, next) = mixer.step(x.clone().narrow(1, t, 1).squeeze_dim(1), state);
            outputs.push(y);
            state = Some(next);
        }
        let stepped: Tensor<B, 3> = Tensor::stack(outputs, 1);
        let gradients = |y: Tensor<B, 3>| {
            let gradients = (y * weights.clone()).sum().backward();
            GradientsParams::from_grads(gradients, &mixer)
        };
        let (want, got) =
            (collect(&mixer, &gradients(stepped)), collect(&mixer, &gradients(whole)));
        assert_eq!(want.len(), got.len(), "{text}: the same parameters have gradients");
        for ((name, want), (_, got)) in want.iter().zip(&got) {
            assert!(want.iter().any(|x| *x != 0.0), "{text}: {name} has no gradient");
            assert_close(&format!("{text}: {name}"), want, got, LIMIT);
        }
    }
}

#[test]
fn every_parameter_of_a_model_is_learnt() {
    use burn::optim::GradientsParams;
    let _alone = alone();
    for text in MIXERS {
        let layer = format!("d_model = 24\n[[layers]]\nmlp = {{ swiglu = {{}} }}\nmixer.{text}\n");
        let config: LanguageModelConfig =
            toml::from_str(&format!("tie_embeddings = false\n{layer}")).unwrap();
        let model = wide(config.init::<B>(7, &Default::default()).unwrap());
        let ids =
            Tensor::<B, 2, Int>::from_data([[1, 5, 2, 6, 0, 3, 4, 1, 2]], &Default::default());
        let logits = model.forward(ids, None).0;
        let weights = noise([1, 9, 7]);
        let gradients = GradientsParams::from_grads((logits * weights).sum().backward(), &model);
        for (name, gradient) in collect(&model, &gradients) {
            assert!(gradient.iter().any(|x| *x != 0.0), "{text}: {name} is not learnt");
        }
    }
}

/// The gradients of a module's parameters, by path.
pub(crate) fn collect<B: TrainBackend, M: Module<B>>(
    module: &M,
    gradients: &burn::optim::GradientsParams,
) -> Vec<(String, Vec<f64>)> {
    struct Collect<'a> {
        gradients: &'a burn::optim::GradientsParams,
        path: Vec<String>,
        found: Vec<(String, Vec<f64>)>,
    }
    impl<B: TrainBackend> ModuleVisitor<B> for Collect<'_> {
        fn enter_module(&mut self, name: &str, _container: &str) {
            self.path.push(name.to_string());
        }
        fn exit_module(&mut self, _name: &str, _container: &str) {
            self.path.pop();
        }
        fn visit_float<const R: usize>(&mut self, param: &Param<Tensor<B, R>>) {
            let gradient = self.gradients.get::<B::InnerBackend, R>(param.id);
            let gradient = gradient.unwrap_or_else(|| panic!("{:?} has no gradient", self.path));
            self.found.push((self.path.join("."), download(gradient)));
        }
    }
    let mut collect = Collect { gradients, path: vec![], found: vec![] };
    Module::<B>::visit(module, &mut collect);
    collect.found
}

#[test]
fn a_model_steps_as_it_runs_forward_with_tied_and_with_own_logits() {
    for tie in [true, false] {
        let text = format!(
            "d_model = 24\ntie_embeddings = {tie}\nnorm = 'layer'\n\
             [[layers]]\nmixer.gated_deltanet = {{ heads = 2 }}\nmlp = {{ swiglu = {{}} }}\n\
             [[layers]]\nrepeat = 2\nmixer.attention = {{ heads = 2 }}\nmlp = 'identity'\n\
             [[layers]]\nmixer.rwkv7 = {{ heads = 2 }}\nmlp = {{ rwkv7 = {{}} }}\n"
        );
        let config: LanguageModelConfig = toml::from_str(&text).unwrap();
        let model = wide(config.init::<B>(11, &Default::default()).unwrap());
        let ids: Vec<i32> = (0..2 * 9).map(|i| i * 7 % 11).collect();
        let ids = Tensor::<B, 2, Int>::from_data(TensorData::new(ids, [2, 9]), &Default::default());
        let (want, _) = model.forward(ids.clone(), None);
        assert_eq!(want.dims(), [2, 9, 11]);
        let (mut outputs, mut state) = (vec![], None);
        for t in 0..9 {
            let (logits, next) = model.step(ids.clone().narrow(1, t, 1).squeeze_dim(1), state);
            outputs.push(logits);
            state = Some(next);
        }
        let got: Tensor<B, 3> = Tensor::stack(outputs, 1);
        assert_close("logits", &download(want), &download(got), LIMIT);
    }
}

#[test]
fn an_mlp_that_sees_the_token_before_can_be_cut_and_is_learnt() {
    use burn::optim::GradientsParams;
    let _alone = alone();
    let config: LanguageModelConfig = toml::from_str(
        "d_model = 24\ntie_embeddings = false\n\
         [[layers]]\nmixer.deltanet = { heads = 2 }\nmlp = { rwkv7 = { width = 40 } }\n",
    )
    .unwrap();
    let model = wide(config.init::<B>(11, &Default::default()).unwrap());
    let (whole, _) = model.forward(ids(9), None);
    for cut in [1, 4, 8] {
        let (first, state) = model.forward(ids(9).narrow(1, 0, cut), None);
        let (rest, _) = model.forward(ids(9).narrow(1, cut, 9 - cut), Some(state));
        let got = download(Tensor::cat(vec![first, rest], 1));
        assert_close(&format!("cut at {cut}"), &download(whole.clone()), &got, LIMIT);
    }
    let weights = noise([1, 9, 11]);
    let gradients = GradientsParams::from_grads((whole * weights).sum().backward(), &model);
    for (name, gradient) in collect(&model, &gradients) {
        assert!(gradient.iter().any(|x| *x != 0.0), "{name} is not learnt");
    }
}

#[test]
fn the_state_that_a_config_announces_is_the_state_that_a_mixer_keeps() {
    for text in MIXERS {
        let (_, state) = mixer(text).forward(input(30), None);
        let values: usize = state.tensors().data().map(|(_, data)| data.num_elements()).sum();
        let announced = config(text).cost(D, 30).unwrap().state_bytes;
        assert_eq!(announced, 4 * values as u64 / 2, "{text}: bytes for one of two sequences");
    }
}

#[test]
fn rotation_makes_scores_depend_on_distance_alone() {
    let rope = Rope::whole(10_000.0);
    let (q, k) = (input(1).reshape([2, 1, 1, D]), input(1).reshape([2, 1, 1, D]));
    let score =
        |i, j| download((rope.forward(q.clone(), i) * rope.forward(k.clone(), j)).sum_dim(3));
    // Angles are f32.
    assert_close("distance 3", &score(3, 0), &score(103, 100), 1e-5);
    assert!(
        linattn_oracle::relative_error(&score(3, 0), &score(9, 0)) > 1e-2,
        "another distance gives another score"
    );
}

#[test]
fn a_norm_is_what_burn_makes_of_it() {
    let (epsilon, device) = (1e-3, Default::default());
    let norm = Norm::<B>::new(NormKind::Rms, D, epsilon, &device);
    let of_burn = burn::nn::RmsNormConfig::new(D).with_epsilon(epsilon).init::<B>(&device);
    let x = (input(10) * 0.1).cast(DType::F32);
    let (want, got) = (download(of_burn.forward(x.clone())), download(norm.forward(x)));
    // Sums of f32 in another order.
    assert_close("norm", &want, &got, 1e-6);
}

/// Training sets shares of the weights to zero and makes the others larger for it; nothing else does.
#[test]
fn dropout_of_attention_weights_is_for_training_and_keeps_the_mean() {
    let dropped = mixer("attention = { heads = 2, dropout = 0.3 }");
    let mut values = Values::default();
    dropped.visit(&mut values);
    let whole = mixer("attention = { heads = 2 }").map(&mut values);
    let x = input(5);
    let want = download(whole.forward(x.clone(), None).0);
    let tested = dropped.valid().forward(x.clone().inner(), None).0;
    assert_close("a test", &want, &download(tested), LIMIT);

    let mut mean = vec![0.0; want.len()];
    let draws = 600;
    for draw in 0..draws {
        let y = download(dropped.forward(x.clone(), None).0);
        if draw == 0 {
            assert!(linattn_oracle::relative_error(&want, &y) > 0.05, "something is dropped");
        }
        mean.iter_mut().zip(y).for_each(|(mean, y)| *mean += y / f64::from(draws));
    }
    assert_close("the mean of many", &want, &mean, 0.1);
}

#[test]
fn learnt_positions_tell_the_same_token_apart() {
    let text = "[[layers]]\nmixer.attention = { rope = false }\n";
    let same = Tensor::<B, 2, Int>::zeros([1, 6], &Default::default());
    let logits = |model: LanguageModel<B>| {
        let y = download(model.forward(same.clone(), None).0);
        linattn_oracle::relative_error(&y[..11], &y[55..])
    };
    assert!(logits(model(text)) < LIMIT, "without positions every place is alike");
    assert!(logits(model(&format!("positions = 6\n{text}"))) > 1e-2, "with them none is");
}

#[test]
#[should_panic(expected = "position 7 of 6")]
fn what_lies_beyond_the_learnt_positions_is_no_number() {
    let model = model("positions = 6\n[[layers]]\nmixer.attention = { rope = false }\n");
    let _ = model.forward(Tensor::zeros([1, 7], &Default::default()), None);
}

#[test]
fn a_short_convolution_is_the_sum_it_says() {
    let layer = wide(ShortConvolution::<B>::new(3, 4, true, &Default::default()));
    let x = input(10).narrow(2, 0, 3);
    let (y, conv_state) = layer.forward(x.clone(), None);
    assert_eq!(conv_state.dims(), [2, 3, 3]);
    let (x, w) = (download(x), download(layer.weight.val()));
    let bias = download(layer.bias.as_ref().unwrap().val());
    let mut want = vec![];
    for b in 0..2i64 {
        for t in 0..10i64 {
            for d in 0..3i64 {
                let at = |t: i64| if t < 0 { 0.0 } else { x[((b * 10 + t) * 3 + d) as usize] };
                let sum: f64 = (0..4).map(|i| w[(i * 3 + d) as usize] * at(t - 3 + i)).sum();
                let z = sum + bias[d as usize];
                want.push(z / (1.0 + (-z).exp()));
            }
        }
    }
    assert_close("silu of the convolution", &want, &download(y), LIMIT);
}

/// Models for promises about whole models: layers that read of one another, groups, MLPs, Canon layers.
/// Weights are large enough for gates to matter.
pub(crate) const MODELS: &[&str] = &[
    "norm = 'layer'\npre_norm = true\n\
     [[layers]]\nmixer.rwkv7 = { heads = 2 }\nmlp = { rwkv7 = {} }\n\
     [[layers]]\nrepeat = 2\nmixer.rwkv7 = { heads = 2, value_residual = true }\nmlp = { rwkv7 = { width = 40 } }\n",
    "positions = 40\nfinal_norm = 'layer'\n\
     [[layers]]\nrepeat = 2\nmixer.attention = { heads = 2, rope = false }\n",
    "final_norm = 'none'\n[[layers]]\nrepeat = 2\nmixer.mamba = { conv_size = 1 }\n",
    "[[layers]]\nmixer.attention = { heads = 2 }\n\
     [[layers]]\nmixer.rwkv7 = { heads = 2 }\n\
     [[layers]]\nmixer.rwkv7 = { heads = 4, value_residual = true, value_rank = 3 }\n",
    "[[layers]]\nrepeat = 2\nmixer.gated_retention = { heads = 2 }\nmlp = { swiglu = {} }\n\
     [[layers]]\nmixer.attention = { heads = 4, key_value_heads = 2 }\nmlp = { swiglu = {} }\n\
     [[layers]]\nrepeat = 2\nmixer.cross_attention = { heads = 2, key_width = 6 }\nmlp = { swiglu = {} }\n",
    "[[layers]]\nmixer.attention = { heads = 2, window = 4 }\n\
     [[layers]]\nmixer.attention = { heads = 2, rope = false }\n\
     [[layers]]\nmixer.cross_attention = { heads = 2, rope = false }\n",
    "[[layers]]\nrepeat = 2\n\
     mixer.deltanet = { heads = 2 }\nmlp = { swiglu = { width = 20 } }\n\
     canon = { before_mixer = 4, before_mlp = 3, inside_mlp = 2 }\n",
    "[[layers]]\nmixer.attention = { heads = 2 }\nmlp = { gelu = { bias = true } }\n\
     canon = { inside_mlp = 4 }\n\
     [[layers]]\nmixer.rwkv6 = { heads = 2 }\nmlp = { rwkv6 = {} }\ncanon = { before_mlp = 2 }\n\
     [[layers]]\nmixer.retnet = { heads = 2 }\nmlp = 'identity'\ncanon = { before_mixer = 2 }\n",
    "[[layers]]\nrepeat = 2\ngroup = [\n\
     { repeat = 2, mixer.lightning_attention = { heads = 2 }, mlp = { geglu = {} } },\n\
     { mixer.attention = { heads = 2 }, mlp = { rwkv4 = { width = 30 } } },\n\
     { mixer.longhorn = { heads = 2 }, mlp = { gelu = { width = 30 } } },\n]\n",
    "norm = 'zero_centered_rms'\n\
     [[layers]]\nmixer.gated_deltanet = { heads = 2, value_heads = 4 }\nmlp = { swiglu = {} }\n\
     [[layers]]\nmixer.attention = { heads = 2, qk_norm = true, output_gate = true, rope_width = 4 }\nmlp = { swiglu = { bias = true } }\n",
    "[[layers]]\nmixer.deltanet = { heads = 2 }\nmlp = { swiglu = {} }\n\
     [[layers]]\nmixer.attention = { heads = 2 }\nmlp = { swiglu = {} }\npost_norm = true\n\
     [[layers]]\nmixer.deltanet = { heads = 2 }\npost_norm = true\ncanon = { before_mixer = 3 }\n",
    "embedding_scale = 4.9\nlogit_soft_cap = 3.0\nfinal_norm = 'zero_centered_rms'\n\
     [[layers]]\nmixer.rg_lru = { heads = 2, first_unscaled = true }\nmlp = { geglu = { bias = true, gelu_tanh = true } }\n\
     [[layers]]\nmixer.attention = { heads = 2, window = 4 }\nmlp = { geglu = { bias = true, gelu_tanh = true } }\n",
    "[[layers]]\nmixer.mamba2 = { d_state = 4, head_width = 8 }\n\
     [[layers]]\nmixer = 'none'\nmlp = { relu2 = { width = 30, bias = true } }\n\
     [[layers]]\nmixer.attention = { heads = 2, rope = false }\n",
];

pub(crate) fn model_config(text: &str) -> LanguageModelConfig {
    let head = "d_model = 24\ntie_embeddings = false\ninitializer_range = 0.1\n";
    toml::from_str(&format!("{head}{text}")).unwrap_or_else(|e| panic!("{text}: {e}"))
}

pub(crate) fn model(text: &str) -> LanguageModel<B> {
    let model = wide(model_config(text).init::<B>(11, &Default::default()).unwrap());
    materialize(&model);
    model
}

/// Logits of `ids`, token by token.
fn stepped(model: &LanguageModel<B>, ids: Tensor<B, 2, Int>) -> Tensor<B, 3> {
    let (mut outputs, mut state) = (vec![], None);
    for t in 0..ids.dims()[1] {
        let (logits, next) = model.step(ids.clone().narrow(1, t, 1).squeeze_dim(1), state);
        outputs.push(logits);
        state = Some(next);
    }
    Tensor::stack(outputs, 1)
}

#[test]
fn whole_models_step_as_they_run_forward_and_can_be_cut_anywhere() {
    for text in MODELS {
        let model = model(text);
        let want = download(model.forward(ids(21), None).0);
        assert_close(text, &want, &download(stepped(&model, ids(21))), LIMIT);
        for cut in [1, 2, 3, 16, 20] {
            let (first, state) = model.forward(ids(21).narrow(1, 0, cut), None);
            let (rest, _) = model.forward(ids(21).narrow(1, cut, 21 - cut), Some(state));
            let got = download(Tensor::cat(vec![first, rest], 1));
            assert_close(&format!("{text}, cut at {cut}"), &want, &got, LIMIT);
        }
    }
}

#[test]
fn whole_models_do_not_look_ahead() {
    for text in MODELS {
        let model = model(text);
        let noise = (ids(40).narrow(1, 19, 21) + 4).remainder_scalar(11);
        let changed = Tensor::cat(vec![ids(40).narrow(1, 0, 19), noise], 1);
        let past = |ids| download(model.forward(ids, None).0.narrow(1, 0, 19));
        assert_close(text, &past(ids(40)), &past(changed), LIMIT);
    }
}

#[test]
fn whole_models_are_learnt_and_through_steps_as_through_chunks() {
    use burn::optim::GradientsParams;
    let _alone = alone();
    for text in MODELS {
        let model = model(text);
        let weights = noise([1, 19, 11]);
        let gradients = |logits: Tensor<B, 3>| {
            let gradients = (logits * weights.clone()).sum().backward();
            collect(&model, &GradientsParams::from_grads(gradients, &model))
        };
        let want = gradients(stepped(&model, ids(19)));
        let got = gradients(model.forward(ids(19), None).0);
        assert_eq!(want.len(), got.len(), "{text}: the same parameters have gradients");
        for ((name, want), (_, got)) in want.iter().zip(&got) {
            assert!(got.iter().any(|x| *x != 0.0), "{text}: {name} is not learnt");
            assert_close(&format!("{text}: {name}"), want, got, LIMIT);
        }
    }
}

#[test]
fn the_state_that_a_config_announces_is_the_state_that_a_model_keeps() {
    use linattn::nn::mixers::MixerState;
    for text in MODELS {
        let (_, state) = model(text).forward(ids(30), None);
        let mut values = 0;
        for layer in state.layers {
            let numbers = |kept: &KeptTensors<B>| {
                kept.iter().map(|(_, tensor)| tensor.shape().num_elements()).sum::<usize>()
            };
            values += numbers(&layer.conv_states);
            values += match layer.mixer {
                MixerState::Matrix(s) => s.memory.shape().num_elements() + numbers(&s.conv_states),
                MixerState::Vector(s) => numbers(&s.memory) + numbers(&s.conv_states),
                MixerState::Cache(c) => 2 * c.keys.shape().num_elements(),
                MixerState::Nothing(_) => 0,
                other => panic!("{text}: {other:?}"),
            };
        }
        let announced = model_config(text).cost(30).unwrap().state_bytes;
        assert_eq!(announced, 4 * values as u64, "{text}");
    }
}

#[test]
fn the_value_residual_falls_back_on_the_first_values() {
    let residual = mixer("rwkv7 = { heads = 2, value_residual = true }");
    let mut values = Values::default();
    residual.visit(&mut values);
    values.0.retain(|(name, _)| !name.contains("v_lora"));
    let plain = mixer("rwkv7 = { heads = 2 }").map(&mut values);
    assert!(values.0.is_empty(), "every other parameter is the same");

    let (x, mut shared) = (input(13), Shared::default());
    let want = download(plain.forward_shared(x.clone(), None, &mut shared).0);
    // Between its own values and the same ones there is nothing to choose.
    let got = download(residual.forward_shared(x.clone(), None, &mut shared).0);
    assert_close("the same values", &want, &got, LIMIT);
    shared.first_values = Some(input(13));
    let other = download(residual.forward_shared(x, None, &mut shared).0);
    assert!(linattn_oracle::relative_error(&want, &other) > 1e-2, "other values are felt");
}

#[test]
fn cross_attention_asks_what_attention_keeps() {
    let attention = mixer("attention = { heads = 4, key_value_heads = 2 }");
    let mut values = Values::default();
    attention.visit(&mut values);
    values.0.retain(|(name, _)| name.contains("q_proj") || name.contains("o_proj"));
    let cross = mixer("cross_attention = { heads = 4 }").map(&mut values);

    let (x, mut shared) = (input(13), Shared::default());
    let (_, state) = attention.forward(x.clone().narrow(1, 0, 6), None);
    let rest = x.narrow(1, 6, 7);
    let (want, _) = attention.forward_shared(rest.clone(), Some(state), &mut shared);
    let (got, _) = cross.forward_shared(rest, None, &mut shared);
    assert_close("the same queries", &download(want), &download(got), LIMIT);
}

#[test]
fn a_canon_layer_of_zeros_is_none() {
    let layer = "[[layers]]\nmixer.deltanet = { heads = 2 }\nmlp = { swiglu = {} }\n";
    let canon =
        model(&format!("{layer}canon = {{ before_mixer = 4, before_mlp = 4, inside_mlp = 4 }}\n"));
    let mut values = Values::default();
    canon.visit(&mut values);
    let of_canon = |name: &str| name.contains("canon");
    let mut others = Values(values.0.iter().filter(|v| !of_canon(&v.0)).cloned().collect(), vec![]);
    let plain = model(layer).map(&mut others);
    let mut felt = 0;
    for (name, values) in &mut values.0 {
        if of_canon(name) {
            felt += 1;
            values.fill(0.0);
        }
    }
    assert_eq!(felt, 4, "one before the mixer, one before the MLP, two inside");
    let want = download(plain.forward(ids(13), None).0);
    let loud = download(canon.forward(ids(13), None).0);
    assert!(linattn_oracle::relative_error(&want, &loud) > 1e-2, "convolutions are felt");
    let silent = canon.map(&mut values);
    assert_close("zeros", &want, &download(silent.forward(ids(13), None).0), LIMIT);
}

#[test]
fn a_group_is_its_layers_in_a_row() {
    let mlp = "mlp = { gelu = {} }";
    let group = model_config(&format!(
        "[[layers]]\nrepeat = 2\ngroup = [\n\
         {{ repeat = 3, mixer.deltanet = {{ heads = 2 }} }},\n\
         {{ mixer.attention = {{ heads = 2 }}, {mlp} }},\n]\n"
    ));
    let once = format!(
        "[[layers]]\nrepeat = 3\nmixer.deltanet = {{ heads = 2 }}\n\
         [[layers]]\nmixer.attention = {{ heads = 2 }}\n{mlp}\n"
    );
    let row = model_config(&format!("{once}{once}"));
    assert_eq!((group.depth(), row.depth()), (8, 8));
    assert_eq!(group.cost(7).unwrap(), row.cost(7).unwrap());
    let written = toml::to_string(&group).unwrap();
    assert_eq!(toml::from_str::<LanguageModelConfig>(&written).unwrap(), group, "{written}");
}

/// Layers as TOML, and how the error begins that refuses them.
type Refused = (String, &'static str);

const DELTA: &str = "[[layers]]\nmixer.deltanet = {}\n";

fn attention(keys: &str) -> String {
    format!("[[layers]]\nmixer.attention = {{ heads = 4, {keys} }}\n")
}

/// Layers that read of earlier ones.
fn refused_sharing() -> Vec<Refused> {
    let cross = |keys: &str| format!("[[layers]]\nmixer.cross_attention = {{ {keys} }}\n");
    let both = |a: &str, b: &str| format!("{}{}", attention(a), cross(b));
    vec![
        (
            "[[layers]]\nmixer.rwkv7 = { value_residual = true }\n".to_string(),
            "`layers[0].mixer.rwkv7.value_residual` is true",
        ),
        (
            "[[layers]]\nmixer.rwkv7 = { value_rank = 4 }\n".into(),
            "`layers[0].mixer.rwkv7.value_rank` is 4",
        ),
        (
            "[[layers]]\nmixer.rwkv7 = {}\n\
             [[layers]]\nmixer.rwkv7 = { heads = 2, key_width = 8, value_residual = true }\n"
                .into(),
            "`layers[1].mixer.rwkv7.key_width` is 8; it has to be 24",
        ),
        (cross("heads = 4"), "`layers[0].mixer.cross_attention` is without keys and values"),
        (
            both("window = 8", "heads = 4"),
            "`layers[1].mixer.cross_attention` is without keys and values",
        ),
        (
            both("rope = false, alibi = true", "heads = 4, rope = false"),
            "`layers[1].mixer.cross_attention` is without keys and values",
        ),
        (
            both("key_value_heads = 4", "heads = 2, key_width = 6"),
            "`layers[1].mixer.cross_attention.heads` is 2; it has to be a multiple of 4",
        ),
        (
            both("key_value_heads = 2", "heads = 2"),
            "`layers[1].mixer.cross_attention.key_width` is 12; it has to be 6",
        ),
        (
            both("rope = true", "heads = 4, rope = false"),
            "`layers[1].mixer.cross_attention.rope` is false; it has to be true",
        ),
        (
            both("rope = true", "heads = 4, rope_theta = 500.0"),
            "`layers[1].mixer.cross_attention.rope_theta` is 500; it has to be 10000",
        ),
        (
            both("rope_width = 2", "heads = 4"),
            "`layers[1].mixer.cross_attention.rope` is true; it has to be false after rotation of 2",
        ),
    ]
}

/// Keys of one mixer.
fn refused_mixers() -> Vec<Refused> {
    vec![
        (
            attention("rope_width = 3"),
            "`layers[0].mixer.attention.rope_width` is 3; it has to be even",
        ),
        (
            attention("rope_width = 8"),
            "`layers[0].mixer.attention.rope_width` is 8; it has to be from 2 to 6",
        ),
        (
            attention("rope = false, rope_width = 2"),
            "`layers[0].mixer.attention.rope_width` is 2; it has to be left out",
        ),
        (
            attention("qk_norm_span = 'projection'"),
            "`layers[0].mixer.attention.qk_norm` is false; it has to be true where",
        ),
        (
            "[[layers]]\nmixer.mamba2 = { head_width = 8, step_min = -1.0 }\n".into(),
            "`layers[0].mixer.mamba2.step_min` is -1; it has to be at least 0",
        ),
    ]
}

/// Canon layers and MLPs.
fn refused_around_mixers() -> Vec<Refused> {
    vec![
        (
            format!("{DELTA}canon = {{ before_mixer = 1 }}\n"),
            "`layers[0].canon.before_mixer` is 1; it has to be 0, or from 2",
        ),
        (
            format!("{DELTA}canon = {{ before_mlp = 4 }}\n"),
            "`layers[0].canon.before_mlp` is 4; it has to be 0 where there is no `mlp`",
        ),
        (
            format!("{DELTA}mlp = {{ rwkv7 = {{}} }}\ncanon = {{ inside_mlp = 4 }}\n"),
            "`layers[0].canon.inside_mlp` is 4; it has to be 0, unless",
        ),
        (format!("{DELTA}mlp = {{ gelu = {{ width = 0 }} }}\n"), "`layers[0].mlp.gelu.width` is 0"),
        (
            "[[layers]]\nmixer = 'none'\n".into(),
            "`layers[0].mixer` is none; it has to be a mixer, where `mlp`",
        ),
        (
            "[[layers]]\nmixer = 'none'\nmlp = { relu2 = {} }\ncanon = { before_mixer = 3 }\n"
                .into(),
            "`layers[0].canon.before_mixer` is 3; it has to be 0 where `mixer`",
        ),
        (
            format!("{DELTA}mlp = {{ swiglu = {{ gelu_tanh = true }} }}\n"),
            "`layers[0].mlp.swiglu.gelu_tanh` is true",
        ),
    ]
}

/// Keys of the model, and groups.
fn refused_models() -> Vec<Refused> {
    vec![
        (format!("embedding_scale = 0.0\n{DELTA}"), "`embedding_scale` is 0; it has to be above 0"),
        (format!("logit_soft_cap = -3.0\n{DELTA}"), "`logit_soft_cap` is -3; it has to be above 0"),
        ("[[layers]]\ngroup = []\n".into(), "`layers[0].group` is empty"),
        (
            format!("{DELTA}[[layers]]\ngroup = [{{ repeat = 0, mixer.deltanet = {{}} }}]\n"),
            "`layers[1].group[0].repeat` is 0",
        ),
        (
            "[[layers]]\ngroup = [{ mixer.deltanet = {} }, { mixer.gla = { heads = 5 } }]\n".into(),
            "`layers[0].group[1].mixer.gla.heads` is 5",
        ),
        (
            "[[layers]]\nrepeat = 1_000_000\n\
             group = [{ repeat = 1_000_000, mixer.deltanet = {} }]\n"
                .into(),
            "`layers` is 1000000000000 layers in all",
        ),
    ]
}

#[test]
fn layers_that_do_not_fit_together_are_refused_with_the_key() {
    let cases = [refused_sharing(), refused_mixers(), refused_around_mixers(), refused_models()];
    for (text, want) in cases.concat() {
        let said = model_config(&text).cost(8).unwrap_err().to_string();
        assert!(said.starts_with(want), "{text}: {said}");
        let init = model_config(&text).init::<B>(11, &Default::default());
        assert_eq!(init.map(|_| ()).unwrap_err().to_string(), said);
    }
}

#[test]
fn an_entry_of_layers_is_a_layer_or_a_group() {
    let parse = |layer: &str| {
        toml::from_str::<LanguageModelConfig>(&format!("d_model = 24\n[[layers]]\n{layer}\n"))
    };
    assert!(parse("group = [{ mixer.deltanet = {} }]").is_ok());
    for (layer, want) in [
        ("repeat = 2", "a `mixer`, or a `group`"),
        ("mixer.deltanet = {}\ngroup = [{ mixer.deltanet = {} }]", "only `repeat`"),
        ("mlp = 'identity'\ngroup = [{ mixer.deltanet = {} }]", "only `repeat`"),
        ("group = [{ repeat = 2 }]", "missing field `mixer`"),
        ("group = [{ group = [] }]", "unknown field `group`"),
        ("mixer.deltanet = {}\nmpl = 'none'", "unknown field `mpl`"),
        ("mixer.deltanet = {}\ncanon = { before = 4 }", "unknown field `before`"),
    ] {
        let said = parse(layer).unwrap_err().to_string();
        assert!(said.contains(want), "{layer}: {said}");
    }
}

/// A module's parameters by path, and what its linear layers make of one token in f64.
pub(crate) struct Weights(pub(crate) std::collections::HashMap<String, Vec<f64>>);

impl Weights {
    pub(crate) fn of<M: Module<B>>(module: &M) -> Self {
        let mut values = Values::default();
        module.visit(&mut values);
        Self(values.0.into_iter().collect())
    }

    pub(crate) fn linear(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let weight = &self.0[&format!("{name}.weight")];
        let width = weight.len() / x.len();
        let bias = self.0.get(&format!("{name}.bias"));
        (0..width)
            .map(|j| {
                let products = x.iter().enumerate().map(|(i, x)| x * weight[i * width + j]);
                bias.map_or(0.0, |bias| bias[j]) + products.sum::<f64>()
            })
            .collect()
    }

    /// RMSNorm with fresh weights, then the output projection.
    fn output(&self, o: &[f64]) -> Vec<f64> {
        let size = (o.iter().map(|o| o * o).sum::<f64>() / o.len() as f64 + 1e-5).sqrt();
        self.linear("o_proj", &o.iter().map(|o| o / size).collect::<Vec<_>>())
    }
}

pub(crate) fn log_sigmoid(x: f64) -> f64 {
    -(-x).exp().ln_1p()
}

#[test]
fn rows_and_columns_of_decaying_fast_weights_decay() {
    let mixer = mixer("decaying_fast_weights = { key_width = 5, expand_v = 2.0 }");
    let Mixer::DecayingFastWeights(layer) = &mixer else { panic!("another mixer") };
    let (weights, x) = (Weights::of(layer), input(70).narrow(0, 0, 1));
    let (mut memory, mut want) = (vec![0f64; 5 * 10], vec![]);
    for x in download(x.clone()).chunks(D) {
        let [q, k, v, f, z] =
            ["q_proj", "k_proj", "v_proj", "f_proj", "z_proj"].map(|name| weights.linear(name, x));
        let mut o = vec![0f64; 10];
        for i in 0..5 {
            for j in 0..10 {
                let decay = (log_sigmoid(f[i]) + log_sigmoid(z[j]).max(-4.0)).exp();
                let cell = &mut memory[i * 10 + j];
                *cell = *cell * decay + k[i] * v[j];
                o[j] += q[i] * *cell / 5f64.sqrt();
            }
        }
        want.extend(weights.output(&o));
    }
    assert_close("the recurrence", &want, &download(mixer.forward(x, None).0), LIMIT);
}

#[test]
fn closed_columns_of_decaying_fast_weights_overflow_nothing() {
    let mixer = mixer("decaying_fast_weights = { heads = 2, gate_normalizer = 0.001 }");
    let y = download(mixer.forward(input(70), None).0);
    assert!(y.iter().all(|y| y.is_finite()), "{y:?}");
    assert!(y.iter().any(|y| *y != 0.0));
}

#[test]
fn the_memory_of_gateloop_decays_and_turns() {
    let mixer = mixer("gateloop = { key_width = 6, output_gate = false, gate_normalizer = 4.0 }");
    let Mixer::GateLoop(layer) = &mixer else { panic!("another mixer") };
    let (weights, x) = (Weights::of(layer), input(70).narrow(0, 0, 1));
    // Real and imaginary parts, [K / 2, V] each.
    let (mut memory, mut want) = (vec![[0f64; 2]; 3 * 6], vec![]);
    for x in download(x.clone()).chunks(D) {
        let [q, k, v, a, theta] = ["q_proj", "k_proj", "v_proj", "a_proj", "theta_proj"]
            .map(|name| weights.linear(name, x));
        let mut o = vec![0f64; 6];
        for i in 0..3 {
            let decay = (log_sigmoid(a[i]) / 4.0).exp();
            let (real, imaginary) = (decay * theta[i].cos(), decay * theta[i].sin());
            for j in 0..6 {
                let [x, y] = memory[i * 6 + j];
                let x_next = real * x - imaginary * y + k[i] * v[j];
                let y_next = real * y + imaginary * x + k[i + 3] * v[j];
                memory[i * 6 + j] = [x_next, y_next];
                o[j] += (q[i] * x_next + q[i + 3] * y_next) / 6f64.sqrt();
            }
        }
        want.extend(weights.output(&o));
    }
    assert_close("the recurrence", &want, &download(mixer.forward(x, None).0), LIMIT);
}

#[test]
fn the_angles_of_gateloop_stay_within_a_turn() {
    use linattn::nn::mixers::MixerState;
    let (mixer, mut state) = (mixer("gateloop = { heads = 2 }"), None);
    for _ in 0..8 {
        let (_, next) = mixer.forward(input(64) * 4.0, state);
        let MixerState::Matrix(kept) = &next else { panic!("another state") };
        let angles = download(kept.conv_states.get(Kept::Angles).unwrap().clone());
        assert!(angles.iter().all(|angle| angle.abs() < 3.15), "{angles:?}");
        state = Some(next);
    }
}

/// Their group norms are over two numbers then, which Burn's own refuses.
#[test]
fn models_of_two_channels_take_one_token() {
    for mixer in ["rwkv6 = { heads = 1 }", "rwkv6 = { heads = 2 }", "rwkv7 = { heads = 1 }"] {
        let text = format!("d_model = 2\n[[layers]]\nmixer.{mixer}\n");
        let config: LanguageModelConfig = toml::from_str(&text).unwrap();
        let model: LanguageModel<Flex> = config.init(5, &Default::default()).unwrap();
        let ids = |ids: &[i32]| {
            let data = TensorData::new(ids.to_vec(), [1, ids.len()]);
            Tensor::<Flex, 2, Int>::from_data(data, &Default::default())
        };
        let (whole, _) = model.forward(ids(&[3, 1]), None);
        let (first, state) = model.forward(ids(&[3]), None);
        let (second, _) = model.step(ids(&[1]).squeeze_dim(0), Some(state));
        let parts = [download(first), download(second)].concat();
        assert_close(mixer, &download(whole), &parts, 1e-5);
    }
}
