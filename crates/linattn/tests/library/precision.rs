//! Mixers and MLPs in 16 bits beside weights of 32: outputs and gradients stay near those of f32.

use crate::call::{download, upload};
use crate::layers::{D, MIXERS, MODELS};
use crate::support::alone;
use burn::backend::{Autodiff, Flex};
use burn::module::{AutodiffModule, Module, ModuleMapper, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Int, Tensor, backend::Backend};
use linattn::nn::mixers::{Mixer, MixerConfig};
use linattn::nn::{LanguageModelConfig, materialize};
use linattn_oracle::{Rng, relative_error};

type B = Autodiff<Flex>;

/// bf16 keeps eight bits: each number is off by up to 0.4 %, and errors add up over a mixer.
const OUTPUTS: f64 = 0.04;
const GRADIENTS: f64 = 0.15;
const OF_NARROW_HEADS: f64 = 0.5;
/// Draws of weights and inputs whose median error counts.
const DRAWS: usize = 9;

/// Weights drawn anew from a seed, matrices so many times as large: fresh ones come from a generator that other tests
/// draw from at the same time. Weights that are all alike stay so.
struct Larger(f64, Rng);

impl<B: Backend> ModuleMapper<B> for Larger {
    fn map_float<const R: usize>(&mut self, param: Param<Tensor<B, R>>) -> Param<Tensor<B, R>> {
        param.map(|weight| {
            let numbers = download(weight.clone());
            if R != 2 && numbers.iter().all(|x| *x == numbers[0]) {
                return weight.detach().require_grad();
            }
            let count = numbers.len() as f64;
            let mean = if R == 2 { 0.0 } else { numbers.iter().sum::<f64>() / count };
            let square = numbers.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / count;
            let deviation = square.sqrt() * if R == 2 { self.0 } else { 1.0 };
            let drawn: Vec<f64> =
                numbers.iter().map(|_| mean + deviation * self.1.normal()).collect();
            let drawn = upload(&drawn, weight.dims(), DType::F32, &weight.device());
            drawn.detach().require_grad()
        })
    }
}

fn config(text: &str) -> MixerConfig {
    #[derive(serde::Deserialize)]
    struct Holder {
        mixer: MixerConfig,
    }
    let holder: Holder = toml::from_str(&format!("mixer.{text}")).unwrap();
    holder.mixer
}

fn mixer(text: &str, draw: u64) -> Mixer<B> {
    let mixer = config(text).init::<B>(D, &Default::default()).unwrap();
    materialize(&mixer);
    let own_scale = ["mamba", "rg_lru", "mlstm_v1"].iter().any(|name| text.starts_with(name));
    let rng = Rng::named(draw, text);
    mixer.map(&mut Larger(if own_scale { 1.0 } else { 5.0 }, rng))
}

/// Normal noise that bf16 holds.
fn noise(seed: u64, shape: [usize; 3]) -> Tensor<B, 3> {
    let mut rng = Rng::named(seed, "precision");
    let values: Vec<f64> = (0..shape.iter().product()).map(|_| rng.normal()).collect();
    let x: Tensor<B, 3> = upload(&values, shape, DType::F32, &Default::default());
    x.cast(DType::BF16).cast(DType::F32)
}

/// All gradients of a module, one after another.
fn gradients<M: AutodiffModule<B>>(module: &M, loss: Tensor<B, 1>) -> Vec<f64> {
    struct All(GradientsParams, Vec<f64>);
    impl ModuleVisitor<B> for All {
        fn visit_float<const R: usize>(&mut self, param: &Param<Tensor<B, R>>) {
            let gradient = self.0.get::<Flex, R>(param.id).unwrap();
            assert_eq!(gradient.dtype(), DType::F32, "gradients have their weights' type");
            self.1.extend(download(gradient));
        }
    }
    let mut all = All(GradientsParams::from_grads(loss.backward(), module), vec![]);
    module.visit(&mut all);
    all.1
}

/// Relative errors of outputs and of gradients in bf16.
fn rounding(text: &str, draw: u64) -> (f64, f64) {
    let mixer = mixer(text, draw);
    let (x, weights) = (noise(draw, [2, 21, D]), noise(10 + draw, [2, 21, D]));
    let of = |dtype| {
        let y = mixer.forward(x.clone().cast(dtype), None).0;
        assert_eq!(y.dtype(), dtype, "{text}");
        let y = y.cast(DType::F32);
        (download(y.clone()), gradients(&mixer, (y * weights.clone()).sum()))
    };
    let ((y, d), (near_y, near_d)) = (of(DType::F32), of(DType::BF16));
    (relative_error(&y, &near_y), relative_error(&d, &near_d))
}

/// Of several draws: where a head has three values their norm may divide by next to nothing, and one draw in twenty
/// is far off. NaN if one is.
fn median(mut values: [f64; DRAWS]) -> f64 {
    values.sort_by(f64::total_cmp);
    if values.iter().any(|value| value.is_nan()) { f64::NAN } else { values[DRAWS / 2] }
}

#[test]
fn sixteen_bits_change_mixers_by_their_rounding() {
    let _alone = alone();
    let (mut narrow, mut faults) = (vec![], vec![]);
    for text in MIXERS {
        let mixer = mixer(text, 1);
        if !mixer.takes_bf16() {
            continue;
        }
        narrow.push(config(text).name());
        let errors: [_; DRAWS] = std::array::from_fn(|draw| rounding(text, draw as u64));
        let (off, far) = (median(errors.map(|e| e.0)), median(errors.map(|e| e.1)));
        println!("outputs {off:.4}, gradients {far:.4}: {text}");
        // Products of products of small numbers cancel, and the norm behind them divides by what is left.
        let cancels = text.contains("elementwise_product");
        // So it does where a head has three values, and Muon divides by the singular values of a momentum that is
        // four numbers wide: 0.06 to 0.12 as a rule, and once in thirty runs above the others' limit.
        let few = text.contains("expand_v = 0.5")
            || text.starts_with("atlas = { heads = 2, key_width = 4");
        let most = if few { OF_NARROW_HEADS } else { GRADIENTS };
        if off.is_nan() || off > OUTPUTS || far.is_nan() || (far > most && !cancels) {
            faults.push(text);
        }
    }
    assert!(faults.is_empty(), "{faults:#?}");
    narrow.dedup();
    let others: Vec<_> = MixerConfig::NAMES.iter().filter(|name| !narrow.contains(name)).collect();
    let want = ["lru", "s4", "s4d", "lstm", "gru", "goru", "slstm", "cross_attention"];
    assert_eq!(others, want.each_ref());
}

#[test]
fn mixers_of_sixteen_bits_step_as_they_run_forward() {
    for text in MIXERS {
        let mixer = mixer(text, 1);
        if !mixer.takes_bf16() {
            continue;
        }
        let x = noise(3, [2, 9, D]).cast(DType::BF16);
        let (whole, _) = mixer.forward(x.clone(), None);
        let (mut outputs, mut state) = (vec![], None);
        for t in 0..9 {
            let (y, next) = mixer.step(x.clone().narrow(1, t, 1).squeeze_dim(1), state);
            outputs.push(y);
            state = Some(next);
        }
        let stepped = Tensor::stack::<3>(outputs, 1);
        let off = relative_error(&download(whole), &download(stepped));
        assert!(off < OUTPUTS, "{text}: steps are off by {off}");
    }
}

#[test]
fn whole_models_learn_in_sixteen_bits() {
    let _alone = alone();
    for text in MODELS {
        let config: LanguageModelConfig =
            toml::from_str(&format!("d_model = 24\ntie_embeddings = false\n{text}")).unwrap();
        let model = config.init::<B>(11, &Default::default()).unwrap();
        let ids = (0..20).map(|i| i * i * 7 % 11).collect::<Vec<i32>>();
        let ids = Tensor::<B, 1, Int>::from_data(ids.as_slice(), &Default::default());
        let loss = |model: &linattn::nn::LanguageModel<B>| {
            let (hidden, _) = model.hidden(ids.clone().unsqueeze(), None);
            model.cross_entropy(model.rows_at(hidden, None), ids.clone(), 1.0 / 20.0)
        };
        let want = loss(&model);
        let narrow = model.with_precision(DType::BF16);
        let got = loss(&narrow);
        let (a, b) = (download(want)[0], download(got.clone())[0]);
        assert!((a / b - 1.0).abs() < 0.01, "{text}: {a} and {b}");
        let gradients = gradients(&narrow, got);
        assert!(gradients.iter().all(|x| x.is_finite()), "{text}");
    }
}
