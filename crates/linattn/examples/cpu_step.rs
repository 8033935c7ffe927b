//! Times training steps of `configs/gated_deltanet.toml` on the CPU: forward pass, backward pass, AdamW.
//!
//! `taskset -c 0,1 cargo run --release -p linattn --example cpu_step`

use burn::backend::Autodiff;
use burn::backend::autodiff::grads::Gradients;
use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::tensor::{Int, Tensor, TensorData, TensorPrimitive};
use burn_flex::{Flex, FlexTensor};
use linattn::nn::{LanguageModel, LanguageModelConfig};
use linattn::ops::{AdamW, AdamWStep, Moments, adamw_step, global_norm};
use std::collections::HashMap;
use std::time::{Duration, Instant};

type Graph = Autodiff<Flex>;

const MODEL: &str = "
d_model = 64
[[layers]]
repeat = 2
mixer.gated_deltanet = { heads = 4, expand_v = 2.0, output_gate = false }
";
const VOCAB: usize = 512;
const BATCH: usize = 64;
const TOKENS: usize = 32;
/// Scored positions of a sequence.
const SCORED: usize = 4;
const STEPS: usize = 300;

/// Takes the gradient of every weight, or puts a new weight in its place.
enum Walk<'a> {
    Take(Gradients, Vec<(ParamId, FlexTensor, FlexTensor)>),
    Put(&'a mut HashMap<ParamId, FlexTensor>),
}

impl ModuleMapper<Graph> for Walk<'_> {
    fn map_float<const D: usize>(
        &mut self,
        param: Param<Tensor<Graph, D>>,
    ) -> Param<Tensor<Graph, D>> {
        let flat = |x: Tensor<Flex, D>| x.into_primitive().tensor();
        let (id, old, mapper) = param.consume();
        let new = match self {
            Walk::Take(gradients, found) => {
                if let Some(gradient) = old.grad_remove(gradients) {
                    found.push((id, flat(old.clone().inner()), flat(gradient)));
                }
                old
            }
            Walk::Put(new) => match new.remove(&id) {
                Some(new) => {
                    let new = Tensor::<Flex, D>::from_primitive(TensorPrimitive::Float(new));
                    Tensor::from_inner(new).require_grad()
                }
                None => old,
            },
        };
        Param::from_mapped_value(id, new, mapper)
    }
}

fn ints(values: impl Iterator<Item = usize>) -> Tensor<Graph, 1, Int> {
    let values: Vec<i32> = values.map(|x| x as i32).collect();
    let count = values.len();
    Tensor::from_data(TensorData::new(values, [count]), &Default::default())
}

fn step(
    model: LanguageModel<Graph>,
    moments: &mut HashMap<ParamId, Moments<FlexTensor>>,
    seed: usize,
    spent: &mut [Duration; 3],
) -> LanguageModel<Graph> {
    let begin = Instant::now();
    let ids = ints((0..BATCH * TOKENS).map(|i| (i * 7919 + seed * 31) % VOCAB));
    let place = |i: usize| i / SCORED * TOKENS + TOKENS - 1 - 2 * (i % SCORED);
    let (scored, target) =
        (ints((0..BATCH * SCORED).map(place)), ints((0..BATCH * SCORED).map(|i| i * 31 % VOCAB)));
    let (hidden, _) = model.hidden(ids.reshape([BATCH, TOKENS]), None);
    let rows = model.rows_at(hidden, Some(scored));
    let loss = model.cross_entropy(rows, target, 1.0 / (BATCH * SCORED) as f64);
    let forward = Instant::now();
    let mut walk = Walk::Take(loss.backward(), vec![]);
    let backward = Instant::now();
    let model = model.map(&mut walk);
    let Walk::Take(_, found) = walk else { unreachable!("it is still the same") };
    let norm = global_norm::<Flex>(found.iter().map(|(_, _, gradient)| gradient.clone()).collect());
    let (mut parameters, mut steps) = (vec![], vec![]);
    for (id, parameter, gradient) in found {
        let moments = moments.remove(&id);
        steps.push(AdamWStep { parameter, gradient, moments, decay: 0.1 });
        parameters.push(id);
    }
    let adamw = AdamW { learning_rate: 1e-3, beta_1: 0.9, beta_2: 0.999, epsilon: 1e-8 };
    let mut new = HashMap::new();
    for (id, (next, state)) in parameters.into_iter().zip(adamw_step::<Flex>(steps, adamw, None)) {
        new.insert(id, next);
        moments.insert(id, state);
    }
    let model = model.map(&mut Walk::Put(&mut new));
    drop(norm);
    spent[0] += forward - begin;
    spent[1] += backward - forward;
    spent[2] += backward.elapsed();
    model
}

fn main() {
    let config: LanguageModelConfig = toml::from_str(MODEL).expect("a model");
    let mut model = config.init::<Graph>(VOCAB, &Default::default()).expect("a model");
    let (mut moments, mut spent, mut times) = (HashMap::new(), [Duration::ZERO; 3], vec![]);
    for i in 0..STEPS {
        let begin = Instant::now();
        model = step(model, &mut moments, i, &mut spent);
        times.push(begin.elapsed());
    }
    times.sort();
    let ms = |time: Duration| 1e3 * time.as_secs_f64();
    let [forward, backward, optimizer] = spent.map(|time| ms(time) / STEPS as f64);
    println!(
        "{:.2} ms a step (median), {:.2} at least; forward {forward:.2}, backward {backward:.2}, \
         optimizer {optimizer:.2} (means); {:.0}k tokens/s",
        ms(times[STEPS / 2]),
        ms(times[0]),
        (BATCH * TOKENS) as f64 / times[STEPS / 2].as_secs_f64() / 1e3,
    );
}
