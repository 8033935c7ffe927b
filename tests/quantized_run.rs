//! A model that has learnt, and what it loses by weights of whole numbers.

use crate::desk::Desk;
use burn::backend::Flex;
use burn::tensor::{Int, Tensor, TensorData};
use linattn::nn::LanguageModel;
use linattn::ops::WeightBits;
use linattn_oracle::Rng;
use linattn_trainer::{StoredModel, Which};
use std::fs;

type B = Flex;
const BITS: [WeightBits; 2] = [WeightBits::Int8, WeightBits::Int4];

/// A small model of bytes that learns letters and words in seconds.
const BYTES: &str = r#"
seed = 3
[task.language_modelling]
train = [{ text = ["text.txt"], length = 64, examples = 1600 }]
test = [{ text = ["text.txt"], length = 64, examples = 8 }]
[model]
d_model = 64
[[model.layers]]
repeat = 2
mixer.gated_deltanet = { heads = 2 }
mlp.swiglu = {}
[train]
steps = 200
batch_size = 8
[optimizer]
learning_rate = 5e-3
[evaluate]
every_steps = 200
"#;

/// Words in an order that follows from the ones before, but not always.
fn words() -> String {
    let list = ["the", "cat", "sat", "on", "a", "mat", "and", "so", "then", "it", "ran", "off"];
    let mut random = Rng::new(5);
    let mut place = 0;
    let mut next = || {
        let jump = (random.uniform() * 3.0) as usize;
        place = (place * 5 + 1 + jump) % list.len();
        list[place]
    };
    (0..9000).map(|_| next()).collect::<Vec<_>>().join(" ")
}

#[test]
fn a_trained_model_loses_little_by_quantising() {
    let desk = Desk::with(BYTES);
    let text = words();
    fs::write(desk.path("text.txt"), &text).unwrap();
    desk.run_well(&[]);
    let device = Default::default();
    let stored = StoredModel::open(&desk.path("runs/tiny"), Which::Best).unwrap();
    let model = || stored.load::<B>(&device).unwrap();
    let loss = |model: &LanguageModel<B>| -> f64 {
        let (rows, length) = (16, 128);
        let bytes = &text.as_bytes()[..rows * (length + 1)];
        let cut = |from: usize| -> Vec<i32> {
            let row = |row: &[u8]| {
                row[from..from + length].iter().map(|&b| i32::from(b)).collect::<Vec<_>>()
            };
            bytes.chunks(length + 1).flat_map(row).collect()
        };
        let ids = TensorData::new(cut(0), [rows, length]);
        let (hidden, _) = model.hidden(Tensor::<B, 2, Int>::from_data(ids, &device), None);
        let right =
            Tensor::<B, 1, Int>::from_data(TensorData::new(cut(1), [rows * length]), &device);
        let scale = 1.0 / (rows * length) as f64;
        f64::from(model.cross_entropy(model.rows_at(hidden, None), right, scale).into_scalar())
    };
    let whole = loss(&model());
    let [eight, four] = BITS.map(|bits| loss(&model().quantized(bits)));
    println!("nats a byte: {whole:.4} in f32, {eight:.4} in int8, {four:.4} in int4");
    assert!(whole < 1.2, "{whole}: it has learnt");
    assert!((eight - whole).abs() < 0.002, "{eight} in int8, {whole} in f32");
    assert!((four - whole).abs() < 0.02, "{four} in int4, {whole} in f32");
}
