//! Low-rank adapters in double precision: beside every projection of every mixer they add what a merged weight
//! has, and their gradients are those of finite differences.

use crate::call::{download, upload};
use crate::layers::{B, D, MIXERS};
use crate::support::{alone, normal_by};
use burn::module::{AutodiffModule, Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{DType, Int, Tensor, TensorData, backend::Backend};
use linattn::nn::{LanguageModel, LanguageModelConfig, LoraConfig, materialize};
use linattn::ops::LinearAttentionBackend;
use linattn_oracle::{Rng, assert_close};

const VOCAB: usize = 7;
const LIMIT: f64 = 1e-9;

/// Models whose gradients are looked at: packed projections and projections by themselves, MLPs both ways, and
/// layers that read their weights in parts.
const MODELS: &[&str] = &[
    "[[layers]]\nmixer.gated_deltanet = { heads = 2 }\nmlp.swiglu = {}\n\
     [[layers]]\nmixer.attention = { heads = 3, rope_width = 4, qk_norm = true, output_gate = true }\nmlp.swiglu = { bias = true }\n",
    "[[layers]]\nmixer.mamba2 = { d_state = 6, head_width = 8 }\nmlp.geglu = {}\n\
     [[layers]]\nmixer.mamba = {}\nmlp.relu2 = {}\n",
    "[[layers]]\nmixer.rwkv6 = { heads = 2 }\nmlp.rwkv6 = {}\n\
     [[layers]]\nmixer.rwkv7 = { heads = 2 }\nmlp.rwkv7 = {}\n",
    "[[layers]]\nmixer.mla = { heads = 2 }\nmlp.gelu = { bias = true }\n",
];

fn config(layers: &str) -> LanguageModelConfig {
    toml::from_str(&format!("d_model = {D}\n{layers}")).unwrap_or_else(|e| panic!("{layers}: {e}"))
}

fn lora(targets: Vec<String>) -> LoraConfig {
    LoraConfig { rank: 3, alpha: 4.5, targets }
}

/// The names of all projections, out of the error that lists them.
fn projections(config: &LanguageModelConfig) -> Vec<String> {
    let model = config.init::<B>(VOCAB, &Default::default()).unwrap();
    let refused = model.with_lora(&lora(vec!["absent".into()])).unwrap_err();
    assert_eq!((refused.key.as_str(), refused.got.as_str()), ("targets", "\"absent\""));
    let names = refused.want.split_once(": ").expect("a list").1;
    names.split(", ").map(String::from).collect()
}

/// Numbers in double precision, as large as it takes for all of them to matter; what learns stays what learns.
struct Wide(Rng);

impl<B: Backend> ModuleMapper<B> for Wide {
    fn map_float<const R: usize>(&mut self, param: Param<Tensor<B, R>>) -> Param<Tensor<B, R>> {
        let learns = param.val().is_require_grad();
        param.map(|weight| {
            let numbers = match learns {
                true => (0..weight.shape().num_elements()).map(|_| 0.3 * self.0.normal()).collect(),
                false => download(weight.clone()),
            };
            let wide = upload(&numbers, weight.dims(), DType::F64, &weight.device());
            wide.set_require_grad(learns)
        })
    }
}

/// A model in double precision with adapters that are no longer zero. All its numbers are the same in every run:
/// among numbers from Burn's generator a rectifier starts within a finite difference now and then.
fn adapted(text: &str, config: &LanguageModelConfig, lora: &LoraConfig) -> LanguageModel<B> {
    let model = config.init::<B>(VOCAB, &Default::default()).unwrap();
    let model = normal_by(3, 0.3, model).with_lora(lora).unwrap();
    materialize(&model);
    model.map(&mut Wide(Rng::named(1, text)))
}

fn ids<B: Backend>(tokens: usize) -> Tensor<B, 2, Int> {
    let ids: Vec<i32> = (0..2 * tokens as i32).map(|i| (i * i + i / 3) % VOCAB as i32).collect();
    Tensor::from_data(TensorData::new(ids, [2, tokens]), &Default::default())
}

fn by_steps<B: LinearAttentionBackend>(model: &LanguageModel<B>, tokens: usize) -> Vec<f64> {
    let (mut steps, mut state) = (vec![], None);
    for t in 0..tokens {
        let id = ids(tokens).narrow(1, t, 1).squeeze_dim(1);
        let (logits, next) = model.step(id, state);
        steps.push(logits);
        state = Some(next);
    }
    download(Tensor::stack::<3>(steps, 1))
}

#[test]
fn every_mixers_projections_take_adapters_that_merge_whole_and_by_steps() {
    for text in MIXERS {
        let config = config(&format!("[[layers]]\nmixer.{text}\nmlp.swiglu = {{}}\n"));
        let lora = lora(projections(&config));
        let model = adapted(text, &config, &lora).valid();
        let merged = model.clone().merged(&lora);
        assert!(merged.num_params() < model.num_params(), "{text}: adapters are gone");
        let want = download(merged.forward(ids(21), None).0);
        assert_close(text, &want, &download(model.forward(ids(21), None).0), LIMIT);
        assert_close(text, &want, &by_steps(&model, 21), LIMIT);
        // Beside the adapters the weights are as they were, and another answer.
        let zero = LoraConfig { alpha: 1e-300, ..lora.clone() };
        let plain = download(model.merged(&zero).forward(ids(21), None).0);
        let far = want.iter().zip(&plain).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        assert!(far > 1e-3, "{text}: the adapters do nothing: {far:.1e}");
    }
}

/// The `i`th of the parameters that learn, moved.
struct Moved<'a> {
    next: usize,
    direction: &'a [f64],
    step: f64,
}

impl<B: Backend> ModuleMapper<B> for Moved<'_> {
    fn map_float<const R: usize>(&mut self, param: Param<Tensor<B, R>>) -> Param<Tensor<B, R>> {
        if !param.val().is_require_grad() {
            return param;
        }
        let count = param.val().shape().num_elements();
        let (from, step) = (self.next, self.step);
        self.next += count;
        param.map(|weight| {
            let direction = &self.direction[from..from + count];
            let moved = upload(direction, weight.dims(), DType::F64, &weight.device());
            (weight + moved * step).detach().require_grad()
        })
    }
}

/// Gradients of what learns, one after another; nothing else has any.
struct Found<'a>(&'a <B as burn::tensor::backend::AutodiffBackend>::Gradients, Vec<Vec<f64>>);

impl ModuleVisitor<B> for Found<'_> {
    fn visit_float<const R: usize>(&mut self, param: &Param<Tensor<B, R>>) {
        let value = param.val();
        match (value.is_require_grad(), value.grad(self.0)) {
            (true, Some(gradient)) => self.1.push(download(gradient)),
            (learns, gradient) => assert!(!learns && gradient.is_none(), "{learns}"),
        }
    }
}

fn loss(model: &LanguageModel<B>) -> Tensor<B, 1> {
    let hidden = model.hidden(ids(19), None).0;
    let logits = model.logits(hidden.clone());
    let mut rng = Rng::named(0, "cotangent");
    let numbers: Vec<f64> = (0..2 * 19 * VOCAB).map(|_| rng.normal()).collect();
    let cotangent = upload(&numbers, logits.dims(), DType::F64, &Default::default());
    // The loss of training too, which makes no gradient of a frozen table.
    let rows = model.rows_at(hidden, None);
    (logits * cotangent).sum() + model.cross_entropy(rows, ids(19).reshape([2 * 19]), 0.7)
}

#[test]
fn gradients_of_adapters_are_those_of_finite_differences() {
    let _alone = alone();
    for text in MODELS {
        let config = config(text);
        let lora = lora(projections(&config));
        let model = adapted(text, &config, &lora);
        let gradients = loss(&model).backward();
        let mut found = Found(&gradients, vec![]);
        Module::<B>::visit(&model, &mut found);
        let found = found.1;
        let count: usize = found.iter().map(Vec::len).sum();
        assert!(count > 100, "{text}: {count}");
        let mut rng = Rng::named(2, text);
        let mut from = 0;
        for (i, part) in found.iter().enumerate() {
            // Along one direction of one matrix.
            let mut direction = vec![0.0; count];
            direction[from..from + part.len()].iter_mut().for_each(|x| *x = rng.normal());
            let at = |step: f64| {
                let moved = Moved { next: 0, direction: &direction, step };
                let model = model.clone().map(&mut { moved });
                download(loss(&model))[0]
            };
            // Of the fourth order: errors of h^4, and rounding over h. Where a rectifier starts within h the error
            // is of the first order, so h is small.
            let h = 1e-6;
            let want = (8.0 * (at(h) - at(-h)) - (at(2.0 * h) - at(-2.0 * h))) / (12.0 * h);
            let got: f64 = part.iter().zip(&direction[from..]).map(|(g, d)| g * d).sum();
            let size: f64 = part.iter().map(|g| g * g).sum::<f64>().sqrt();
            assert!(size > 0.0, "{text}, matrix {i}: no gradient");
            assert!((want - got).abs() < 1e-6 * (1.0 + size), "{text}, matrix {i}: {want} {got}");
            from += part.len();
        }
    }
}

#[test]
fn adapters_start_from_the_model_as_it_was_and_freeze_it() {
    let config = config(MODELS[0]);
    let model = config.init::<B>(VOCAB, &Default::default()).unwrap();
    materialize(&model);
    let want = download(model.clone().forward(ids(9), None).0);
    let names = ["q_proj", "1.mlp.1.down_proj"].map(String::from);
    let adapted = model.clone().with_lora(&lora(names.into())).unwrap();
    assert_eq!(want, download(adapted.forward(ids(9), None).0));
    // q_proj of both layers, down_proj of the second: A and B of each.
    struct Learns(Vec<Vec<usize>>);
    impl ModuleVisitor<B> for Learns {
        fn visit_float<const R: usize>(&mut self, param: &Param<Tensor<B, R>>) {
            if param.val().is_require_grad() {
                self.0.push(param.dims().to_vec());
            }
        }
    }
    let mut learns = Learns(vec![]);
    Module::<B>::visit(&adapted, &mut learns);
    let ranks = learns.0.iter().filter(|shape| shape.len() == 2 && shape.contains(&3)).count();
    assert_eq!((learns.0.len(), ranks), (6, 6), "{:?}", learns.0);
    // A name that is the end of another's is another.
    for wrong in ["proj", "attn", "embeddings", "lm_head", "conv1d"] {
        let refused = model.clone().with_lora(&lora(vec!["q_proj".into(), wrong.into()]));
        let why = refused.unwrap_err().to_string();
        assert!(why.contains(&format!("`targets` is \"{wrong}\"")), "{why}");
        assert!(why.contains("down_proj") && why.contains("q_proj"), "{why}");
    }
    for (config, key) in [
        (LoraConfig { rank: 0, ..lora(vec!["q_proj".into()]) }, "rank"),
        (LoraConfig { alpha: 0.0, ..lora(vec!["q_proj".into()]) }, "alpha"),
        (LoraConfig { alpha: f64::NAN, ..lora(vec!["q_proj".into()]) }, "alpha"),
        (lora(vec![]), "targets"),
    ] {
        assert_eq!(model.clone().with_lora(&config).unwrap_err().key, key);
    }
}
