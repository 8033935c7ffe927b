//! Gradients made layer by layer are those of the whole graph.

use crate::call::download;
use crate::layers::{D, MIXERS, wide};
use crate::support::alone;
use burn::backend::{Autodiff, Flex};
use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::{GradientsAccumulator, GradientsParams};
use burn::tensor::{Int, Tensor, TensorData};
use linattn::backend::TrainBackend;
use linattn::nn::{LanguageModel, LanguageModelConfig, LoraConfig, materialize};
use linattn_oracle::assert_close;

const VOCAB: usize = 7;
const TOKENS: usize = 21;

fn config(text: &str) -> LanguageModelConfig {
    toml::from_str(&format!("d_model = {D}\n{text}")).unwrap_or_else(|e| panic!("{text}: {e}"))
}

fn ids<B: TrainBackend>(device: &B::Device) -> Tensor<B, 2, Int> {
    let ids: Vec<i32> = (0..2 * TOKENS as i32).map(|i| (i * i + i / 3) % VOCAB as i32).collect();
    Tensor::from_data(TensorData::new(ids, [2, TOKENS]), device)
}

/// The gradients of what learns, one after another.
struct Numbers<'a>(&'a GradientsParams, Vec<f64>);

impl<B: TrainBackend> ModuleVisitor<B> for Numbers<'_> {
    fn visit_float<const R: usize>(&mut self, param: &Param<Tensor<B, R>>) {
        let gradient = self.0.get::<B::InnerBackend, R>(param.id);
        assert_eq!(gradient.is_some(), param.val().is_require_grad());
        self.1.extend(gradient.into_iter().flat_map(download));
    }
}

/// The loss and all gradients.
fn found<B: TrainBackend>(
    model: &LanguageModel<B>,
    by_layers: bool,
    device: &B::Device,
) -> (Vec<f64>, Vec<f64>) {
    let loss = |hidden: Tensor<B, 3>| {
        let target = ids::<B>(device).reshape([2 * TOKENS]);
        model.cross_entropy(model.rows_at(hidden, None), target, 0.1)
    };
    let mut sum = GradientsAccumulator::new();
    let value = match by_layers {
        true => model.differentiate_by_layers(ids(device), loss, |gradients| {
            sum.accumulate(model, GradientsParams::from_grads(gradients, model));
        }),
        false => {
            let value = loss(model.hidden(ids(device), None).0);
            sum.accumulate(model, GradientsParams::from_grads(value.backward(), model));
            value.inner()
        }
    };
    let gradients = sum.grads();
    let mut numbers = Numbers(&gradients, vec![]);
    Module::<B>::visit(model, &mut numbers);
    (download(value), numbers.1)
}

fn agree<B: TrainBackend>(text: &str, model: &LanguageModel<B>, device: &B::Device, limit: f64) {
    let (loss, whole) = found(model, false, device);
    let (again, parts) = found(model, true, device);
    assert_close(text, &loss, &again, limit);
    assert_close(text, &whole, &parts, limit);
}

/// Layers whose sums, and what waits to be added to them, are passed on.
const MODELS: &[&str] = &[
    "pre_norm = true\npositions = 30\n[[layers]]\nrepeat = 3\nmixer.attention = { heads = 4 }\nmlp.gelu = {}\n",
    "tie_embeddings = false\nnorm = 'layer'\n[[layers]]\nrepeat = 2\nmixer.gated_deltanet = { heads = 2 }\nmlp.swiglu = {}\n",
    "[[layers]]\nmixer = 'none'\nmlp.relu2 = {}\n[[layers]]\nmixer.deltanet = { heads = 2 }\npost_norm = true\nmlp.swiglu = {}\n",
    "head = 'auto_encoder'\n[[layers]]\nrepeat = 2\nmixer.rwkv7 = { heads = 2 }\nmlp.rwkv7 = {}\n",
];

#[test]
fn layer_by_layer_every_mixer_finds_the_same_gradients() {
    let _alone = alone();
    let device = Default::default();
    let mixers = MIXERS.iter().map(|text| format!("[[layers]]\nrepeat = 2\nmixer.{text}\n"));
    for text in mixers.chain(MODELS.iter().map(|text| text.to_string())) {
        let model = config(&text).init::<Autodiff<Flex>>(VOCAB, &device).unwrap();
        agree(&text, &wide(model), &device, 1e-12);
    }
}

/// In f32, and with frozen weights, for which nothing is computed.
fn agrees_with_and_without_adapters<B: TrainBackend>(device: &B::Device, limit: f64) {
    let _alone = alone();
    let targets = ["q_proj", "v_proj", "up_proj"].map(String::from).into();
    let lora = LoraConfig { rank: 3, alpha: 6.0, targets };
    let model = config(MODELS[1]).init::<B>(VOCAB, device).unwrap();
    materialize(&model);
    agree("all weights", &model, device, limit);
    agree("adapters", &model.with_lora(&lora).unwrap(), device, limit);
}

#[test]
fn layer_by_layer_adapters_find_the_same_gradients() {
    agrees_with_and_without_adapters::<Autodiff<Flex>>(&Default::default(), 1e-6);
}

#[cfg(feature = "wgpu")]
#[test]
fn layer_by_layer_adapters_find_the_same_gradients_on_wgpu() {
    let Some(device) = crate::support::wgpu() else { return };
    agrees_with_and_without_adapters::<Autodiff<burn::backend::Wgpu>>(&device, 1e-5);
}

#[test]
fn layers_that_read_of_others_or_draw_are_refused_by_key() {
    for (text, key, part) in [
        ("embedding_dropout = 0.1\n[[layers]]\nmixer.deltanet = {}\n", "embedding_dropout", "0.1"),
        ("[[layers]]\nmixer.attention = { dropout = 0.1 }\n", "layers[0].mixer", "`dropout`"),
        (
            "[[layers]]\nmixer.attention = {}\n[[layers]]\nmixer.cross_attention = {}\n",
            "layers[1].mixer",
            "`cross_attention`",
        ),
        (
            "[[layers]]\nmixer.rwkv7 = {}\n[[layers]]\nmixer.rwkv7 = { value_residual = true }\n",
            "layers[1].mixer",
            "`value_residual`",
        ),
    ] {
        let error = config(text).can_recompute().unwrap_err();
        assert_eq!(error.key, key, "{error}");
        assert!(error.got.contains(part), "{error}");
    }
}
