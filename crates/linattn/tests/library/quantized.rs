//! Weights of whole numbers: products are those of the numbers that they stand for, and a model with them is
//! the model that has those numbers.

use crate::call::download;
use crate::support::normal_by;
use burn::backend::Flex;
use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{DType, Int, Tensor, TensorData, backend::Backend};
use linattn::nn::{LanguageModel, LanguageModelConfig};
use linattn::ops::{GROUP, LinearAttentionBackend, QuantizedMatrix, WeightBits, quantized_linear};
use linattn_oracle::{Rng, assert_close};

const BITS: [WeightBits; 2] = [WeightBits::Int8, WeightBits::Int4];

fn matrix<B: Backend>(numbers: &[f32], size: [usize; 2], device: &B::Device) -> Tensor<B, 2> {
    Tensor::from_data(TensorData::new(numbers.to_vec(), size), device)
}

fn normal(seed: u64, count: usize) -> Vec<f32> {
    let mut random = Rng::new(seed);
    (0..count).map(|_| random.normal() as f32).collect()
}

fn quantized_numbers_are_near<B: LinearAttentionBackend>(device: &B::Device) {
    for (bits, [rows, columns]) in
        BITS.into_iter().flat_map(|bits| [(bits, [5, 3 * GROUP]), (bits, [5, 3 * GROUP - 5])])
    {
        let mut numbers = normal(3, rows * columns);
        numbers[GROUP..2 * GROUP].fill(0.0);
        numbers[2 * GROUP] = 1e4;
        let quantized =
            QuantizedMatrix::<B>::quantize(matrix(&numbers, [rows, columns], device), bits);
        assert_eq!((quantized.size(), quantized.bits()), ([rows, columns], bits));
        let of_a_number = if bits == WeightBits::Int8 { 8 } else { 4 };
        assert_eq!(quantized.bytes(), rows * 3 * GROUP * of_a_number / 8 + 4 * rows * 3);
        let whole = download(quantized.dequantize(DType::F32));
        for (row, got) in whole.chunks(columns).enumerate() {
            for (group, want) in numbers[row * columns..][..columns].chunks(GROUP).enumerate() {
                let largest = want.iter().fold(0.0_f32, |largest, x| largest.max(x.abs()));
                let step = largest / f32::from(bits.largest());
                for (x, y) in want.iter().zip(&got[group * GROUP..]) {
                    let moved = (f64::from(*x) - y).abs();
                    assert!(
                        moved <= 0.501 * f64::from(step),
                        "{bits:?}: {x} became {y}, step {step}"
                    );
                }
            }
        }
        let some = Tensor::<B, 1, Int>::from_data([4, 0, 4], device);
        let want: Vec<f64> =
            [4, 0, 4].iter().flat_map(|&row| &whole[row * columns..][..columns]).copied().collect();
        let some = quantized.rows(some);
        assert_eq!(some.size(), [3, columns]);
        assert_eq!(download(some.dequantize(DType::F32)), want);
    }
}

#[test]
fn a_quantized_number_is_half_a_step_from_what_it_was_at_most() {
    quantized_numbers_are_near::<Flex>(&Default::default());
}

/// Products of up to `most` rows, by one matrix and by several.
fn quantized_products_are_right<B: LinearAttentionBackend>(device: &B::Device, most: usize) {
    let shapes: [(&[usize], usize); 8] = [
        (&[1], 32),
        (&[3, 2], 64),
        (&[64], 32),
        (&[65, 32, 4], 96),
        (&[131], 768),
        (&[300], 1056),
        // Rows that end within a group.
        (&[7, 2], 3),
        (&[40], 1367),
    ];
    for bits in BITS {
        for (sizes, from) in shapes {
            let weight = |&to: &usize| {
                let weight = normal(7, to * from);
                QuantizedMatrix::<B>::quantize(matrix(&weight, [to, from], device), bits)
            };
            let weights: Vec<_> = sizes.iter().map(weight).collect();
            let given: Vec<_> = weights.iter().collect();
            let dequantized: Vec<f64> =
                weights.iter().flat_map(|w| download(w.dequantize(DType::F32))).collect();
            let to: usize = sizes.iter().sum();
            for rows in [1, 2, 5, most] {
                let numbers = normal(11, rows * from);
                let mut want = vec![];
                for x in numbers.chunks(from) {
                    let dot = |w: &[f64]| -> f64 {
                        w.iter().zip(x).map(|(&w, &x)| w * f64::from(x)).sum()
                    };
                    want.extend(dequantized.chunks(from).map(dot));
                }
                let x = TensorData::new(numbers, [rows, 1, from]);
                let x = Tensor::<B, 3>::from_data(x, device);
                let y = quantized_linear(x, &given).expect("a product of few rows");
                assert_eq!(y.dims(), [rows, 1, to]);
                let name = format!("{bits:?}, {rows} rows, {sizes:?} x {from}");
                assert_close(&name, &want, &download(y), 1e-6);
            }
            let many = Tensor::<B, 2>::zeros([most + 1, from], device);
            assert!(quantized_linear(many, &given).is_none(), "dequantising is as fast");
        }
    }
}

#[test]
fn quantized_products_are_those_of_the_dequantized_numbers_in_f64() {
    quantized_products_are_right::<Flex>(&Default::default(), 64);
}

/// Weights as [`LanguageModel::quantized`] rounds them.
struct Rounded {
    bits: WeightBits,
    place: Vec<(String, String)>,
    changed: usize,
}

impl<B: LinearAttentionBackend> ModuleMapper<B> for Rounded {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.place.push((name.to_string(), container.to_string()));
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.place.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let holder = self.place.last().map(|(_, holder)| holder.clone()).unwrap_or_default();
        let (table, layer) = (holder == "Struct:Embedding", holder.ends_with("Linear"));
        let dims = param.dims();
        let wide = match dims[..] {
            [_, width] if table => width >= GROUP,
            [from, to] if layer => from >= GROUP && to >= 32,
            _ => false,
        };
        if !wide {
            return param;
        }
        self.changed += 1;
        param.map(|weight| {
            let size = [dims[0], dims[1]];
            let weight: Tensor<B, 2> = weight.reshape(size);
            let rows =
                |x: Tensor<B, 2>| QuantizedMatrix::quantize(x, self.bits).dequantize(DType::F32);
            let rounded = if table { rows(weight) } else { rows(weight.transpose()).transpose() };
            rounded.reshape(dims)
        })
    }
}

fn quantized_models_have_rounded_weights<B: LinearAttentionBackend>(
    device: &B::Device,
    mixers: &[&str],
) {
    let mlps = ["swiglu = {}", "gelu = { bias = true }", "rwkv7 = {}", "swiglu = { bias = true }"];
    for (i, mixer) in mixers.iter().enumerate() {
        let text = format!(
            "d_model = 64\ntie_embeddings = {}\ninitializer_range = 0.1\n\
             [[layers]]\nrepeat = 2\nmlp.{}\nmixer.{mixer}\n",
            i % 2 == 0,
            mlps[i % mlps.len()]
        );
        let config: LanguageModelConfig = toml::from_str(&text).unwrap();
        for bits in BITS {
            // The first token's output is divided by its norm, which for a few weights in a thousand is next to nothing,
            // and rounding as large as it: so the weights are the same to the last bit in each run.
            let model: LanguageModel<B> = normal_by(1, 0.1, config.init(50, device).unwrap());
            let mut rounded = Rounded { bits, place: vec![], changed: 0 };
            let want = model.clone().map(&mut rounded);
            assert!(rounded.changed >= 5, "{mixer}: {} weights", rounded.changed);
            let before = model.num_params();
            let quantized = model.quantized(bits);
            assert_eq!(quantized.vocab(), 50);
            assert!(
                quantized.num_params() * 2 < before,
                "{mixer}: {} left",
                quantized.num_params()
            );
            // Rows that are multiplied as they are, and more.
            for rows in [1, 3, 6] {
                let ids: Vec<i32> = (0..rows * 12).map(|i| i * 7 % 50).collect();
                let ids = TensorData::new(ids, [rows as usize, 12]);
                let ids = Tensor::<B, 2, Int>::from_data(ids, device);
                let (want_logits, want_state) = want.forward(ids.clone(), None);
                let (logits, state) = quantized.forward(ids.clone(), None);
                let name = format!("{mixer}, {bits:?}, {rows} rows");
                assert_close(&name, &download(want_logits), &download(logits), 2e-5);
                let last = ids.narrow(1, 3, 1).squeeze_dim(1);
                let want_logits = want.step(last.clone(), Some(want_state)).0;
                let logits = quantized.step(last, Some(state)).0;
                assert_close(&name, &download(want_logits), &download(logits), 2e-5);
            }
            let hidden = Tensor::<B, 2>::ones([4, 64], device);
            let right = Tensor::<B, 1, Int>::from_data([1, 2, 3, 4], device);
            let loss = |model: &LanguageModel<B>| {
                download(model.cross_entropy(hidden.clone(), right.clone(), 0.25))
            };
            assert_close(mixer, &loss(&want), &loss(&quantized), 1e-5);
        }
    }
}

#[test]
fn a_quantized_model_is_the_model_of_its_rounded_weights() {
    let mixers = [
        "gated_deltanet = { heads = 2 }",
        "mamba2 = { heads = 4, head_width = 32 }",
        "gla = { heads = 2 }",
        "attention = { heads = 2 }",
        "rwkv7 = { heads = 2 }",
        "lru = {}",
        "rwkv6 = { heads = 2 }",
        "mlstm_v1 = { heads = 2 }",
    ];
    quantized_models_have_rounded_weights::<Flex>(&Default::default(), &mixers);
}

#[cfg(feature = "wgpu")]
mod on_wgpu {
    use super::*;
    use crate::support::wgpu;
    use linattn::backend::Wgpu;

    #[test]
    fn quantized_numbers_and_products_are_those_of_the_cpu() {
        let Some(device) = wgpu() else { return };
        quantized_numbers_are_near::<Wgpu>(&device);
        quantized_products_are_right::<Wgpu>(&device, 8);
    }

    #[test]
    fn a_quantized_model_is_the_model_of_its_rounded_weights() {
        let Some(device) = wgpu() else { return };
        quantized_models_have_rounded_weights::<Wgpu>(&device, &["gated_deltanet = { heads = 2 }"]);
    }
}
