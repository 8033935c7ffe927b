//! Variants of layers that released models have, held to loops in double precision: gates and partial
//! rotations of attention, norms whose weights count from 1 or stand behind, scales and caps of whole models.

use crate::call::{download, upload};
use crate::formulas::{
    Rows, dot, each, hold, normalized, remember, rotated, sigmoid, silu, softplus, times, weighed,
};
use crate::layers::{B, D, Weights, ids, input, mixer, model, model_config, wide};
use crate::support::{alone, normal_by};
use burn::backend::Flex;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Int, Tensor, backend::Backend};
use linattn::nn::{LanguageModel, LayerConfig, NormKind, Shared};
use linattn_oracle::{Rng, assert_close};
use std::f64::consts::PI;

const LIMIT: f64 = 1e-6;

/// Adds noise of that size to every weight, the same noise in every call.
struct Nudge {
    size: f64,
    seen: u64,
}

impl Nudge {
    fn noise<Q: Backend, const R: usize>(&mut self, like: &Tensor<Q, R>) -> Tensor<Q, R> {
        let mut rng = Rng::named(self.seen, "nudge");
        self.seen += 1;
        let values: Vec<f64> = (0..like.shape().num_elements()).map(|_| rng.normal()).collect();
        upload(&values, like.dims(), DType::F64, &like.device())
    }
}

impl<Q: Backend> ModuleMapper<Q> for Nudge {
    fn map_float<const R: usize>(&mut self, param: Param<Tensor<Q, R>>) -> Param<Tensor<Q, R>> {
        let noise = self.noise(&param.val());
        param.map(|weight| (weight + noise * self.size).detach().require_grad())
    }
}

fn nudged<M: Module<B>>(module: M, size: f64) -> M {
    module.map(&mut Nudge { size, seen: 0 })
}

/// Holds a mixer with noise on every weight, those of norms too, to a formula.
fn check(text: &str, formula: impl FnOnce(&Weights, &[Vec<f64>]) -> Rows) {
    hold(text, &nudged(mixer(text), 0.2), formula);
}

/// Rows of all heads, softmax attention of the last of them over all.
fn attend(q: &[f64], keys: &[Vec<f64>], values: &[Vec<f64>], heads: usize) -> Vec<f64> {
    let width = q.len() / heads;
    let shared = keys[0].len() / width;
    let mut o = vec![];
    for head in 0..heads {
        let from = head / (heads / shared) * width;
        let part = |x: &[f64]| x[from..from + width].to_vec();
        let q = &q[head * width..][..width];
        let scores: Vec<f64> =
            keys.iter().map(|k| dot(q, &part(k)) / (width as f64).sqrt()).collect();
        o.extend(weighed(&scores, &values.iter().map(|v| part(v)).collect::<Vec<_>>()));
    }
    o
}

#[test]
fn attention_rotates_a_part_and_has_a_gate_and_norms_that_count_from_one() {
    let text = "attention = { heads = 3, rope_width = 4, qk_norm = true, norm_eps = 1e-3, \
                qk_norm_kind = 'zero_centered_rms', output_gate = true }";
    check(text, |w, rows| {
        let (mut keys, mut values, mut outputs) = (vec![], vec![], vec![]);
        for (t, x) in rows.iter().enumerate() {
            let turned = |name: &str| -> Vec<f64> {
                let gamma = each(w.get(&format!("{name}_norm.ZeroCenteredRms.gamma")), |g| 1.0 + g);
                let heads = w.linear(&format!("{name}_proj"), x);
                let heads = heads.chunks(8).map(|head| times(&normalized(head, 1e-3), &gamma));
                heads
                    .flat_map(|head| [rotated(&head[..4], t), head[4..].to_vec()].concat())
                    .collect()
            };
            let q = turned("q");
            keys.push(turned("k"));
            values.push(w.linear("v_proj", x));
            let gate = each(&w.linear("g_proj", x), sigmoid);
            outputs.push(w.linear("o_proj", &times(&attend(&q, &keys, &values, 3), &gate)));
        }
        outputs
    });
}

#[test]
fn attention_normalises_a_whole_projection() {
    let text = "attention = { heads = 4, key_value_heads = 2, rope = false, qk_norm = true, \
                qk_norm_span = 'projection' }";
    check(text, |w, rows| {
        let (mut keys, mut values, mut outputs) = (vec![], vec![], vec![]);
        for x in rows {
            let normed = |name: &str| -> Vec<f64> {
                let all = normalized(&w.linear(&format!("{name}_proj"), x), 1e-5);
                times(&all, w.get(&format!("{name}_norm.Rms.gamma")))
            };
            keys.push(normed("k"));
            values.push(w.linear("v_proj", x));
            outputs.push(w.linear("o_proj", &attend(&normed("q"), &keys, &values, 4)));
        }
        outputs
    });
}

fn gelu_tanh(x: f64) -> f64 {
    0.5 * x * (1.0 + ((2.0 / PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh())
}

#[test]
fn rg_lru_writes_the_first_token_as_it_is() {
    check("rg_lru = { heads = 3, gelu_tanh = true, first_unscaled = true }", |w, rows| {
        let (mut h, mut seen, mut outputs) = (vec![0f64; D], vec![], vec![]);
        for (t, x) in rows.iter().enumerate() {
            seen.push(w.linear("linear_x", x));
            let u = w.convolution("conv1d", &seen);
            let (r, i) = (w.blocks("a_gate", 3, &u), w.blocks("input_gate", 3, &u));
            for n in 0..D {
                let a = (-8.0 * softplus(w.get("a_param")[n]) * sigmoid(r[n])).exp();
                let scale = if t == 0 { 1.0 } else { (1.0 - a * a).max(1e-8).sqrt() };
                h[n] = a * h[n] + scale * sigmoid(i[n]) * u[n];
            }
            let gate = each(&w.linear("linear_y", x), gelu_tanh);
            outputs.push(w.linear("out_proj", &times(&h, &gate)));
        }
        outputs
    });
}

#[test]
fn mamba2_has_as_many_heads_as_asked_for_norms_of_groups_and_a_least_step() {
    let text = "mamba2 = { d_state = 4, head_width = 6, heads = 4, groups = 2, group_norm = true, \
                step_min = 0.05 }";
    // Noise of that size makes steps on both sides of the least.
    hold(text, &nudged(mixer(text), 1.0), |w, rows| {
        const I: usize = 24;
        let (mut memories, mut seen, mut outputs) = (vec![vec![0f64; 4 * 6]; 4], vec![], vec![]);
        let mut raised = 0;
        for x in rows {
            let projected = w.linear("in_proj", x);
            let (z, rest) = projected.split_at(I);
            seen.push(rest[..I + 16].to_vec());
            let mixed = each(&w.convolution("conv1d", &seen), silu);
            let mut o = vec![];
            for head in 0..4 {
                let step = softplus(rest[I + 16 + head] + w.get("dt_bias")[head]);
                raised += usize::from(step < 0.05);
                let step = step.max(0.05);
                let keep = (-step * w.get("a_log")[head].exp()).exp();
                let v = &mixed[head * 6..][..6];
                let group = head / 2;
                let (b, c) = (&mixed[I + group * 4..][..4], &mixed[I + 8 + group * 4..][..4]);
                let read = remember(&mut memories[head], &[keep; 4], b, &each(v, |v| v * step), c);
                o.extend(read.iter().zip(v).map(|(o, v)| o + w.get("d")[head] * v));
            }
            let gated = times(&o, &each(z, silu));
            let normed: Vec<f64> = gated.chunks(12).flat_map(|g| normalized(g, 1e-5)).collect();
            outputs.push(w.linear("out_proj", &times(&normed, w.get("norm.gamma"))));
        }
        assert!(raised > 0 && raised < 4 * rows.len(), "{raised} steps are raised");
        outputs
    });
}

#[test]
fn a_model_of_mlps_scales_its_embeddings_and_caps_its_logits() {
    let text = "norm = 'zero_centered_rms'\nembedding_scale = 1.5\nlogit_soft_cap = 0.5\n\
                [[layers]]\nmixer = 'none'\nmlp = { relu2 = { width = 10, bias = true } }\n\
                [[layers]]\nmixer = 'none'\npost_norm = true\n\
                mlp = { geglu = { width = 9, bias = true, gelu_tanh = true } }\n";
    let model = nudged(model(text), 0.3);
    let w = Weights::of(&model);
    let norm = |name: &str, x: &[f64]| {
        times(
            &normalized(x, 1e-5),
            &each(w.get(&format!("{name}.ZeroCenteredRms.gamma")), |g| 1.0 + g),
        )
    };
    let plus = |a: &[f64], b: &[f64]| -> Vec<f64> { a.iter().zip(b).map(|(a, b)| a + b).collect() };
    let row = |id: usize| -> Vec<f64> {
        let x = each(&w.get("embeddings.weight")[id * D..][..D], |x| x * 1.5);
        let mlp = |i: usize, name: &str| format!("layers.{i}.mlp.{name}");
        let h = norm(&mlp(0, "Gelu.0"), &x);
        let inner = each(&w.linear(&mlp(0, "Gelu.1.up_proj"), &h), |u| u.max(0.0).powi(2));
        let x = plus(&x, &w.linear(&mlp(0, "Gelu.1.down_proj"), &inner));
        let gate = each(&w.linear(&mlp(1, "SwiGlu.1.gate_proj"), &x), gelu_tanh);
        let inner = times(&gate, &w.linear(&mlp(1, "SwiGlu.1.up_proj"), &x));
        let y = norm(&mlp(1, "SwiGlu.0"), &w.linear(&mlp(1, "SwiGlu.1.down_proj"), &inner));
        let logits = w.linear("lm_head", &norm("norm", &plus(&x, &y)));
        each(&logits, |l| 0.5 * (l / 0.5).tanh())
    };
    let list: Vec<i64> = ids(12).into_data().iter::<i64>().collect();
    let want: Rows = list.iter().map(|id| row(*id as usize)).collect();
    assert_close("logits", &want.concat(), &download(model.forward(ids(12), None).0), LIMIT);

    let right: Vec<usize> = list.iter().map(|id| (*id as usize + 3) % 11).collect();
    let losses = want.iter().zip(&right).map(|(row, &id)| {
        let sum: f64 = row.iter().map(|l| l.exp()).sum();
        sum.ln() - row[id]
    });
    let targets: Vec<i32> = right.iter().map(|&id| id as i32).collect();
    let targets = Tensor::<B, 1, Int>::from_data(targets.as_slice(), &Default::default());
    let hidden = model.hidden(ids(12), None).0;
    let got = download(model.cross_entropy(model.rows_at(hidden, None), targets, 1.0 / 12.0));
    assert_close("loss", &[losses.sum::<f64>() / 12.0], &got, LIMIT);
}

#[test]
fn a_norm_behind_a_part_takes_what_it_adds() {
    let layer: LayerConfig = toml::from_str(
        "post_norm = true\nmixer.deltanet = { heads = 2 }\nmlp.swiglu = {}\ncanon.before_mlp = 2",
    )
    .unwrap();
    let block = layer.init::<B>(D, NormKind::Rms, 1e-3, &Default::default()).unwrap();
    let block = nudged(wide(block), 0.3);
    let w = Weights::of(&block);
    let x = input(9);
    let normed = |name: &str, y: Tensor<B, 3>| {
        let rows = download(y);
        let gamma = w.get(&format!("{name}.Rms.gamma"));
        rows.chunks(D).flat_map(|row| times(&normalized(row, 1e-3), gamma)).collect::<Vec<f64>>()
    };
    let mixed = block.mixer().unwrap().forward(x.clone(), None).0;
    let sum: Vec<f64> =
        download(x.clone()).iter().zip(normed("attn_norm", mixed)).map(|(x, y)| x + y).collect();
    let got = download(block.forward(x, None, &mut Shared::default()).0);
    // The MLP comes after; its norm is of what it adds, so rows differ from `sum` by rows of that size.
    let added: Vec<f64> = got.iter().zip(&sum).map(|(got, sum)| got - sum).collect();
    let gamma = w.get("mlp.SwiGlu.0.Rms.gamma");
    for row in added.chunks(D) {
        let plain: Vec<f64> = row.iter().zip(gamma).map(|(y, gamma)| y / gamma).collect();
        let square = dot(&plain, &plain) / D as f64;
        assert!((square - 1.0).abs() < 0.1, "a mean square of {square} behind the norm");
    }
}

/// Sum of products of gradients and the noise of [`Nudge`].
struct Along<'a> {
    gradients: &'a GradientsParams,
    nudge: Nudge,
    sum: f64,
}

impl ModuleVisitor<B> for Along<'_> {
    fn visit_float<const R: usize>(&mut self, param: &Param<Tensor<B, R>>) {
        let noise = download(self.nudge.noise(&param.val()));
        let gradient = self.gradients.get::<Flex, R>(param.id).expect("it is learnt");
        self.sum += dot(&download(gradient), &noise);
    }
}

/// The gradient of a loss along a random direction of all weights is the loss's own slope there.
#[test]
fn gradients_of_variants_are_slopes_of_the_loss() {
    let _alone = alone();
    for text in &crate::layers::MODELS[crate::layers::MODELS.len() - 4..] {
        for tied in [false, true] {
            let config =
                linattn::nn::LanguageModelConfig { tie_embeddings: tied, ..model_config(text) };
            let start = config.init::<B>(11, &Default::default()).unwrap();
            let model = nudged(wide(normal_by(1, 0.1, start)), 0.05);
            let loss = |model: &LanguageModel<B>| {
                let hidden = model.hidden(ids(13), None).0;
                let targets = (ids(13) + 5).remainder_scalar(11).squeeze_dim(0);
                model.cross_entropy(model.rows_at(hidden, None), targets, 1.0)
            };
            let gradients = GradientsParams::from_grads(loss(&model).backward(), &model);
            let nudge = Nudge { size: 0.0, seen: 0 };
            let mut along = Along { gradients: &gradients, nudge, sum: 0.0 };
            model.visit(&mut along);
            let at = |size: f64| download(loss(&nudged(model.clone(), size)))[0];
            let step = 1e-6;
            let slope = (at(step) - at(-step)) / (2.0 * step);
            let off = (slope / along.sum - 1.0).abs();
            assert!(off < 1e-5, "{text}: a slope of {slope}, a gradient of {}", along.sum);
        }
    }
}
