//! Every mixer: forward equals steps, sequences can be cut, nothing looks ahead, gradients agree.

use crate::support::download;
use burn::backend::{Autodiff, Flex};
use burn::tensor::{Distribution, Int, Tensor, TensorData, backend::Backend};
use linattn::nn::mixers::{Mixer, MixerConfig};
use linattn::nn::{LanguageModelConfig, Rope, ShortConvolution, force};
use linattn_oracle::assert_close;

type B = Autodiff<Flex>;
const D: usize = 24;
const LIMIT: f64 = 1e-5;

/// At least one config for each mixer, and one for each option.
const MIXERS: &[&str] = &[
    "gated_deltanet = { heads = 2 }",
    "gated_deltanet = { heads = 2, value_heads = 4, key_width = 6, expand_v = 1.5, chunk = 16 }",
    "gated_deltanet = { heads = 3, conv_size = 0, output_gate = false, allow_neg_eigval = true }",
    "deltanet = { heads = 2, chunk = 8 }",
    "deltanet = { heads = 1, value_heads = 3, conv_size = 2, output_gate = true, allow_neg_eigval = true }",
    "linear_attention = { heads = 2 }",
    "linear_attention = { heads = 2, feature_map = 'relu', normalize = true, conv_size = 3 }",
    "linear_attention = { heads = 1, value_heads = 2, feature_map = 'identity', expand_v = 0.5 }",
    "retnet = { heads = 2, chunk = 16 }",
    "retnet = { heads = 1, value_heads = 2, output_gate = false, expand_v = 1.0 }",
    "mamba2 = { d_state = 10, head_width = 8 }",
    "mamba2 = { d_state = 7, head_width = 12, groups = 2, conv_size = 2, chunk = 16 }",
    "mamba2 = { d_state = 6, head_width = 8, groups = 2, group_norm = true }",
    "deltaproduct = { heads = 2, allow_neg_eigval = false }",
    "deltaproduct = { heads = 2, householder_steps = 3, key_width = 6, expand_v = 0.5, conv_size = 0, forget_gate = true, output_gate = true }",
    "deltaproduct = { heads = 3, householder_steps = 1, conv_size = 2, chunk = 8 }",
    "gla = { heads = 2 }",
    "gla = { heads = 3, key_width = 5, expand_v = 1.0, gate_low_rank = 3, gate_normalizer = 1.0, conv_size = 3, output_gate = false, chunk = 8 }",
    "hgrn2 = { heads = 2 }",
    "hgrn2 = { heads = 2, key_width = 6, expand_v = 1.5, lower_bound = 0.6, conv_size = 3, chunk = 16 }",
    "rwkv6 = { heads = 2 }",
    "rwkv6 = { heads = 3, key_width = 6, expand_v = 0.5, mix_low_rank = 3, gate_low_rank = 5, norm_eps = 64e-5, chunk = 8 }",
    "gsa = { heads = 2 }",
    "gsa = { heads = 3, slots = 5, expand_v = 0.5, gate_normalizer = 1.0, conv_size = 3, chunk = 32 }",
    "metala = { heads = 2 }",
    "metala = { heads = 3, key_width = 6, expand_v = 0.5, gate_normalizer = 1.0, self_augmentation = false, conv_size = 0, chunk = 8 }",
    "gated_retention = { heads = 2 }",
    "gated_retention = { heads = 1, value_heads = 2, expand_v = 0.5, gate_normalizer = 1.0, chunk = 16 }",
    "lightning_attention = { heads = 2 }",
    "lightning_attention = { heads = 3, key_width = 5, decay_scale = 0.5, chunk = 8 }",
    // Norms behind the denominator hide the input gates' bias unless the epsilon is felt.
    "mlstm = { heads = 2, input_gate_bias = -10.0, conv_size = 3 }",
    "mlstm = { heads = 3, key_width = 5, expand_v = 1.0, gate_cap = 0.0, norm_eps = 0.5, chunk = 8 }",
    "kda = { heads = 2 }",
    "kda = { heads = 2, value_heads = 4, key_width = 6, expand_v = 1.5, gate_rank = 5, conv_size = 0, chunk = 16 }",
    "kda = { heads = 3, conv_size = 2, allow_neg_eigval = true }",
    "comba = { heads = 2 }",
    "comba = { heads = 1, value_heads = 3, key_width = 6, output_correction = 1.0, conv_size = 2, chunk = 16 }",
    "comba = { heads = 3, expand_v = 0.5, conv_size = 0, output_gate = false, inner_decay = false, output_correction = 0.0 }",
    "comba = { heads = 1, value_heads = 2, output_correction = 0.5, norm_last = true, chunk = 16 }",
    "longhorn = { heads = 2, chunk = 16 }",
    "longhorn = { heads = 1, value_heads = 2, key_width = 6, expand_v = 1.5, conv_size = 0, output_gate = false }",
    "gated_deltanet2 = { heads = 2 }",
    "gated_deltanet2 = { heads = 2, value_heads = 4, key_width = 6, expand_v = 1.5, gate_rank = 5, conv_size = 0, chunk = 16 }",
    "gated_deltanet2 = { heads = 3, conv_size = 2, allow_neg_eigval = true }",
    "rwkv7 = { heads = 2 }",
    "rwkv7 = { heads = 3, key_width = 6, decay_rank = 4, rate_rank = 5, gate_rank = 6, chunk = 16 }",
    "base_conv = {}",
    "attention = { heads = 4 }",
    "attention = { heads = 4, key_value_heads = 2, rope = false }",
    "attention = { heads = 4, window = 5 }",
    "attention = { heads = 6, key_value_heads = 2, rope = false, alibi = true }",
    "attention = { heads = 4, rope = false, alibi = true, window = 2 }",
    "forgetting_attention = { heads = 4 }",
    "forgetting_attention = { heads = 4, key_value_heads = 2, key_width = 5, qk_norm = true, output_gate = true }",
];

fn config(text: &str) -> MixerConfig {
    #[derive(serde::Deserialize)]
    struct Holder {
        mixer: MixerConfig,
    }
    let holder: Holder = toml::from_str(&format!("mixer.{text}")).unwrap();
    holder.mixer
}

/// The mixer with weights large enough for its gates to matter.
fn mixer(text: &str) -> Mixer<B> {
    use burn::module::{Module, ModuleMapper, Param};
    struct Louder;
    impl<B: Backend> ModuleMapper<B> for Louder {
        fn map_float<const R: usize>(&mut self, param: Param<Tensor<B, R>>) -> Param<Tensor<B, R>> {
            let factor = if R == 2 { 8.0 } else { 1.0 };
            param.map(|weight| (weight * factor).detach().require_grad())
        }
    }
    let mixer = config(text).init::<B>(D, &Default::default()).unwrap();
    force(&mixer);
    mixer.map(&mut Louder)
}

fn input(tokens: usize) -> Tensor<B, 3> {
    Tensor::random([2, tokens, D], Distribution::Normal(0.0, 1.0), &Default::default())
}

#[test]
fn every_mixer_is_tested_here() {
    let tested: Vec<&str> = MIXERS.iter().map(|text| config(text).name()).collect();
    for name in MixerConfig::NAMES {
        assert!(tested.contains(name), "{name} has no config in MIXERS");
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
fn nothing_looks_ahead() {
    for text in MIXERS {
        let (mixer, x) = (mixer(text), input(40));
        let want = mixer.forward(x.clone(), None).0.narrow(1, 0, 19);
        let changed = Tensor::cat(vec![x.narrow(1, 0, 19), input(21)], 1);
        let got = mixer.forward(changed, None).0.narrow(1, 0, 19);
        assert_close(text, &download(want), &download(got), 1e-6);
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

/// Ids of a sequence, the same in every test.
fn ids(length: usize) -> Tensor<B, 2, Int> {
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
        let model = config.init::<B>(11, &Default::default()).unwrap();
        let noise = (ids(40).narrow(1, 19, 21) + 4).remainder_scalar(11);
        let changed = Tensor::cat(vec![ids(40).narrow(1, 0, 19), noise], 1);
        let past = |ids| download(model.forward(ids, None).0.narrow(1, 0, 19));
        assert_close(text, &past(ids(40)), &past(changed), 1e-6);
    }
}

#[test]
fn an_auto_encoder_answers_every_position_from_the_last_vector() {
    let config: LanguageModelConfig = toml::from_str(
        "d_model = 24\nhead = 'auto_encoder'\ntie_embeddings = false\nhead_bias = true\n\
         [[layers]]\nmixer.deltanet = { heads = 2 }\n",
    )
    .unwrap();
    let model = config.init::<B>(11, &Default::default()).unwrap();
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
    let weights = Tensor::random([1, 9, 11], Distribution::Default, &Default::default());
    let loss = (model.forward(ids(9), None).0 * weights).sum();
    let gradients = GradientsParams::from_grads(loss.backward(), &model);
    for (name, gradient) in collect(&model, &gradients) {
        assert!(gradient.iter().any(|x| *x != 0.0), "{name} is not learnt");
    }
}

#[test]
fn one_householder_step_is_deltanet() {
    use burn::module::Module;
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
struct Values(Vec<(String, Vec<f64>)>, Vec<String>);

impl burn::module::ModuleVisitor<B> for Values {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.1.push(name.to_string());
    }
    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.1.pop();
    }
    fn visit_float<const R: usize>(&mut self, param: &burn::module::Param<Tensor<B, R>>) {
        self.0.push((self.1.join("."), download(param.val())));
    }
}

impl burn::module::ModuleMapper<B> for Values {
    fn map_float<const R: usize>(
        &mut self,
        param: burn::module::Param<Tensor<B, R>>,
    ) -> burn::module::Param<Tensor<B, R>> {
        let (_, values) = self.0.remove(0);
        param.map(|old| {
            let values: Vec<f32> = values.iter().map(|&x| x as f32).collect();
            Tensor::from_data(TensorData::new(values, old.dims()), &old.device()).require_grad()
        })
    }
}

#[test]
fn gradients_through_chunks_equal_gradients_through_steps() {
    use burn::optim::GradientsParams;
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
            assert_close(&format!("{text}: {name}"), want, got, 5e-5);
        }
    }
}

#[test]
fn every_parameter_of_a_model_is_learnt() {
    use burn::optim::GradientsParams;
    for text in MIXERS {
        let layer = format!("d_model = 24\n[[layers]]\nmlp = {{ swiglu = {{}} }}\nmixer.{text}\n");
        let config: LanguageModelConfig =
            toml::from_str(&format!("tie_embeddings = false\n{layer}")).unwrap();
        let model = config.init::<B>(7, &Default::default()).unwrap();
        let ids =
            Tensor::<B, 2, Int>::from_data([[1, 5, 2, 6, 0, 3, 4, 1, 2]], &Default::default());
        let logits = model.forward(ids, None).0;
        let weights = Tensor::random([1, 9, 7], Distribution::Default, &Default::default());
        let gradients = GradientsParams::from_grads((logits * weights).sum().backward(), &model);
        for (name, gradient) in collect(&model, &gradients) {
            assert!(gradient.iter().any(|x| *x != 0.0), "{text}: {name} is not learnt");
        }
    }
}

/// The gradients of a module's parameters, by path.
fn collect<M: burn::module::Module<B>>(
    module: &M,
    gradients: &burn::optim::GradientsParams,
) -> Vec<(String, Vec<f64>)> {
    use burn::module::{ModuleVisitor, Param};
    struct Collect<'a> {
        gradients: &'a burn::optim::GradientsParams,
        path: Vec<String>,
        found: Vec<(String, Vec<f64>)>,
    }
    impl ModuleVisitor<B> for Collect<'_> {
        fn enter_module(&mut self, name: &str, _container: &str) {
            self.path.push(name.to_string());
        }
        fn exit_module(&mut self, _name: &str, _container: &str) {
            self.path.pop();
        }
        fn visit_float<const R: usize>(&mut self, param: &Param<Tensor<B, R>>) {
            let gradient = self.gradients.get::<Flex, R>(param.id);
            let gradient = gradient.unwrap_or_else(|| panic!("{:?} has no gradient", self.path));
            self.found.push((self.path.join("."), download(gradient)));
        }
    }
    let mut collect = Collect { gradients, path: vec![], found: vec![] };
    module.visit(&mut collect);
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
        let model = config.init::<B>(11, &Default::default()).unwrap();
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
    let config: LanguageModelConfig = toml::from_str(
        "d_model = 24\ntie_embeddings = false\n\
         [[layers]]\nmixer.deltanet = { heads = 2 }\nmlp = { rwkv7 = { width = 40 } }\n",
    )
    .unwrap();
    let model = config.init::<B>(11, &Default::default()).unwrap();
    let (whole, _) = model.forward(ids(9), None);
    for cut in [1, 4, 8] {
        let (first, state) = model.forward(ids(9).narrow(1, 0, cut), None);
        let (rest, _) = model.forward(ids(9).narrow(1, cut, 9 - cut), Some(state));
        let got = download(Tensor::cat(vec![first, rest], 1));
        assert_close(&format!("cut at {cut}"), &download(whole.clone()), &got, LIMIT);
    }
    let weights = Tensor::random([1, 9, 11], Distribution::Default, &Default::default());
    let gradients = GradientsParams::from_grads((whole * weights).sum().backward(), &model);
    for (name, gradient) in collect(&model, &gradients) {
        assert!(gradient.iter().any(|x| *x != 0.0), "{name} is not learnt");
    }
}

#[test]
fn the_state_that_a_config_announces_is_the_state_that_a_mixer_keeps() {
    use linattn::nn::mixers::MixerState;
    for text in MIXERS {
        let (_, state) = mixer(text).forward(input(30), None);
        let values = match state {
            MixerState::Matrix(s) => {
                s.memory.shape().num_elements()
                    + s.tails.iter().map(|t| t.shape().num_elements()).sum::<usize>()
            }
            MixerState::Slots(s) => {
                s.keys.shape().num_elements()
                    + s.values.shape().num_elements()
                    + s.tails.iter().map(|t| t.shape().num_elements()).sum::<usize>()
            }
            MixerState::Tail(tail) => tail.0.shape().num_elements(),
            MixerState::Cache(c) => c.keys.shape().num_elements() + c.values.shape().num_elements(),
            MixerState::Forgetting(c) => {
                c.keys.shape().num_elements()
                    + c.values.shape().num_elements()
                    + c.gates.shape().num_elements()
            }
        };
        let announced = config(text).cost(D, 30).unwrap().state_bytes;
        assert_eq!(announced, 4 * values as u64 / 2, "{text}: bytes for one of two sequences");
    }
}

#[test]
fn rotation_makes_scores_depend_on_distance_alone() {
    let rope = Rope { theta: 10_000.0 };
    let (q, k) = (input(1).reshape([2, 1, 1, D]), input(1).reshape([2, 1, 1, D]));
    let score =
        |i, j| download((rope.forward(q.clone(), i) * rope.forward(k.clone(), j)).sum_dim(3));
    assert_close("distance 3", &score(3, 0), &score(103, 100), 1e-4);
    assert!(
        linattn_oracle::relative_error(&score(3, 0), &score(9, 0)) > 1e-2,
        "another distance gives another score"
    );
}

#[test]
fn a_short_convolution_is_the_sum_it_says() {
    let layer = ShortConvolution::<B>::new(3, 4, true, &Default::default());
    let x = input(10).narrow(2, 0, 3);
    let (y, tail) = layer.forward(x.clone(), None);
    assert_eq!(tail.dims(), [2, 3, 3]);
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
