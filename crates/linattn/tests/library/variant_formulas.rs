//! Variants of delta rules and of forgetting attention, held to loops over tokens in double precision.

use crate::call::{download, upload};
use crate::formulas::{
    check, dot, each, hold, normalized, sigmoid, silu, softplus, times, unit, weighed,
};
use crate::layers::{B, D, Weights, log_sigmoid, mixer};
use crate::support::{alone, normal_by};
use burn::tensor::{DType, Tensor};
use linattn::nn::FeatureMap;
use linattn::nn::mixers::MixerConfig;

const HEADS: usize = 2;

/// `k^T (v - e S)` into a memory K x V; gives `q S`.
fn delta(memory: &mut [f64], [k, e, v, q]: [&[f64]; 4], beta: f64) -> Vec<f64> {
    let width = v.len();
    let recall = |x: &[f64], memory: &[f64]| -> Vec<f64> {
        let cell = |j: usize| x.iter().enumerate().map(|(i, x)| x * memory[i * width + j]).sum();
        (0..width).map(cell).collect()
    };
    let known = recall(e, memory);
    for (i, k) in k.iter().enumerate() {
        for j in 0..width {
            memory[i * width + j] += beta * k * (v[j] - known[j]);
        }
    }
    recall(q, memory)
}

/// Head `h` of `heads`.
fn head(x: &[f64], h: usize, heads: usize) -> &[f64] {
    let width = x.len() / heads;
    &x[h * width..][..width]
}

/// Inputs of a head's delta rule at one token.
struct Token {
    q: Vec<f64>,
    k: Vec<f64>,
    /// The erasing vector.
    e: Vec<f64>,
    beta: f64,
    /// Share of each row of the memory that is kept.
    keep: Vec<f64>,
}

impl Token {
    /// Keys that are written and erase, and a memory that forgets nothing.
    fn plain(q: Vec<f64>, k: Vec<f64>, beta: f64) -> Self {
        let keep = vec![1.0; k.len()];
        Self { q, e: k.clone(), k, beta, keep }
    }
}

/// A DeltaNet whose heads `token` makes of raw queries and keys, token and head.
fn delta_net(
    w: &Weights,
    rows: &[Vec<f64>],
    mut token: impl FnMut(Vec<f64>, Vec<f64>, &[f64], usize) -> Token,
) -> Vec<Vec<f64>> {
    let convolved =
        |name: &str, seen: &[Vec<f64>]| match w.0.contains_key(&format!("{name}_conv1d.weight")) {
            true => w.convolution(&format!("{name}_conv1d"), seen),
            false => seen.last().expect("a token").clone(),
        };
    let value_width = w.get("o_norm.norm.gamma").len();
    let (mut seen, mut outputs) = ([vec![], vec![], vec![]], vec![]);
    let mut memories = vec![vec![]; HEADS];
    for x in rows {
        for (name, seen) in ["q", "k", "v"].into_iter().zip(&mut seen) {
            seen.push(w.linear(&format!("{name}_proj"), x));
        }
        let [q, k] = ["q", "k"]
            .into_iter()
            .zip(&seen)
            .map(|(name, seen)| convolved(name, seen))
            .collect::<Vec<_>>()
            .try_into()
            .expect("two");
        let v: Vec<f64> = each(&convolved("v", &seen[2]), silu);
        let mut o = vec![];
        for (h, memory) in memories.iter_mut().enumerate() {
            let [q, k]: [&[f64]; 2] = [head(&q, h, HEADS), head(&k, h, HEADS)];
            let Token { q, k, e, beta, keep } = token(q.to_vec(), k.to_vec(), x, h);
            memory.resize(k.len() * value_width, 0.0);
            for (row, keep) in memory.chunks_mut(value_width).zip(&keep) {
                row.iter_mut().for_each(|cell| *cell *= keep);
            }
            let scaled = each(&q, |q| q / (k.len() as f64).sqrt());
            let answer = delta(memory, [&k, &e, head(&v, h, HEADS), &scaled], beta);
            o.extend(times(&normalized(&answer, 1e-5), w.get("o_norm.norm.gamma")));
        }
        if w.0.contains_key("g_proj.weight") {
            o = times(&o, &each(&w.linear("g_proj", x), silu));
        } else if w.0.contains_key("g_proj.1.weight") {
            let gate = w.linear("g_proj.1", &w.linear("g_proj.0", x));
            o = times(&o, &each(&gate, sigmoid));
        }
        outputs.push(w.linear("o_proj", &o));
    }
    outputs
}

#[test]
fn an_exact_step_follows_the_equation_for_a_time_of_beta() {
    for (text, silu_keys) in [
        ("deltanet = { heads = 2, exact_step = true }", true),
        (
            "deltanet = { heads = 2, exact_step = true, qk_activation = 'identity', allow_neg_eigval = true, conv_size = 0 }",
            false,
        ),
    ] {
        check(text, |w, rows| {
            delta_net(w, rows, |q, k, x, h| {
                let map = |x: Vec<f64>| if silu_keys { each(&x, silu) } else { x };
                let k = map(k);
                let time = w.linear("b_proj", x)[h];
                let time = sigmoid(time) * if silu_keys { 1.0 } else { 2.0 };
                let length = dot(&k, &k);
                let beta = -(-time * length).exp_m1() / length;
                Token::plain(unit(&map(q)), k, beta)
            })
        });
    }
}

#[test]
fn the_exact_step_is_the_limit_of_many_short_ones() {
    let (k, v) = ([0.7, -0.4, 1.1], [0.3, -0.9]);
    let (length, time) = (dot(&k, &k), 0.8);
    let zero = [0.0; 3];
    let start = [0.5, -0.2, 0.1, 0.9, -0.6, 0.4];
    let mut exact = start.to_vec();
    delta(&mut exact, [&k, &k, &v, &zero], -(-time * length).exp_m1() / length);
    let steps = 1 << 20;
    let mut short = start.to_vec();
    for _ in 0..steps {
        delta(&mut short, [&k, &k, &v, &zero], time / f64::from(steps));
    }
    linattn_oracle::assert_close("exact step", &short, &exact, 2e-6);
}

#[test]
fn the_first_deltanet_has_keys_that_add_up_to_one() {
    let shares = |x: Vec<f64>| {
        let sum = x.iter().sum::<f64>() + 1e-6;
        each(&x, |x| x / sum)
    };
    let text = "deltanet = { heads = 2, qk_activation = 'elu', qk_norm = 'sum', use_beta = false }";
    check(text, |w, rows| {
        delta_net(w, rows, |q, k, _, _| {
            let made = |x: Vec<f64>| shares(each(&x, |x| if x > 0.0 { x + 1.0 } else { x.exp() }));
            Token::plain(made(q), made(k), 1.0)
        })
    });
    let text = "deltanet = { heads = 2, qk_activation = { dpfp = { nu = 2 } }, qk_norm = 'sum', conv_size = 0 }";
    check(text, |w, rows| {
        delta_net(w, rows, |q, k, x, h| {
            let made = |x: Vec<f64>| {
                let both = x.iter().copied().chain(x.iter().map(|x| -x));
                let r: Vec<f64> = both.map(|x| x.max(0.0)).collect();
                let n = r.len();
                let products = (1..=2).flat_map(|back| {
                    let r = &r;
                    (0..n).map(move |i| r[i] * r[(i + n - back) % n])
                });
                shares(products.collect())
            };
            Token::plain(made(q), made(k), sigmoid(w.linear("b_proj", x)[h]))
        })
    });
}

/// Preconditioned keys, of the sums A of squares so far.
fn preconditioned(w: &Weights, e: &[f64], sums: &mut [f64], x: &[f64], h: usize) -> Vec<f64> {
    let get = |name: &str| w.get(&format!("preconditioner.{name}"))[h];
    let project = |name: &str| w.linear(&format!("preconditioner.{name}"), x)[h];
    let step = softplus(project("a_atk_proj") + get("dt_bias_atk"));
    let keep = (-get("a_log_atk").exp() * step).exp();
    let share = sigmoid(project("b_atk_proj"));
    for (sum, k) in sums.iter_mut().zip(e) {
        *sum = keep * *sum + share * k * k;
    }
    let scale = |sum: &f64| {
        let r = (sum + 1e-6).ln() - get("log_atk_scale");
        1.5f64.powf(-r / (1.0 + r.abs()))
    };
    times(e, &sums.iter().map(scale).collect::<Vec<_>>())
}

#[test]
fn preconditioned_keys_are_smaller_where_much_was_written() {
    for text in [
        "gated_deltanet = { heads = 2, preconditioner = true }",
        "deltanet = { heads = 2, preconditioner = true }",
        "kda = { heads = 2, preconditioner = true }",
    ] {
        check(text, |w, rows| {
            let width = D / HEADS;
            let mut sums = vec![vec![0.0; width]; HEADS];
            delta_net(w, rows, |q, k, x, h| {
                let e = unit(&each(&k, silu));
                let k = preconditioned(w, &e, &mut sums[h], x, h);
                let beta = sigmoid(w.linear("b_proj", x)[h]);
                let rate = |step: f64| (-w.get("a_log")[h].exp() * softplus(step)).exp();
                let keep = if text.starts_with("kda") {
                    let f = w.linear("f_proj.1", &w.linear("f_proj.0", x));
                    let rows = h * width..(h + 1) * width;
                    rows.map(|i| rate(f[i] + w.get("dt_bias")[i])).collect()
                } else if text.starts_with("gated") {
                    vec![rate(w.linear("a_proj", x)[h] + w.get("dt_bias")[h]); width]
                } else {
                    vec![1.0; width]
                };
                Token { q: unit(&each(&q, silu)), k, e, beta, keep }
            })
        });
    }
}

#[test]
fn random_feature_attention_writes_what_it_forgets_over_a_denominator_with_a_floor() {
    let rfa = FeatureMap::Rfa { features: Some(7), seed: 3 };
    let features = rfa.init::<B>(1, D / HEADS, &Default::default()).unwrap();
    let phi = |x: &[f64]| -> Vec<f64> {
        let shape = [1, 1, 1, x.len()];
        download(features.forward(upload(x, shape, DType::F64, &Default::default()), 0))
    };
    for (floor, gated) in [(1.2, false), (0.2, true)] {
        let text = format!(
            "linear_attention = {{ heads = 2, normalize = true, output_norm = 'none', forget_gate = {gated}, \
             denominator_floor = {floor}, feature_map = {{ rfa = {{ features = 7, seed = 3 }} }} }}"
        );
        hold(&text, &normal_by(1, 0.16, mixer(&text)), |w, rows| {
            let width = D / HEADS + 1;
            let mut memories = vec![vec![0.0; 14 * width]; HEADS];
            let (mut floored, mut outputs) = (0, vec![]);
            for x in rows {
                let [q, k, v] = ["q", "k", "v"].map(|name| w.linear(&format!("{name}_proj"), x));
                let mut o = vec![];
                for (h, memory) in memories.iter_mut().enumerate() {
                    let [q, k] = [&q, &k].map(|x| phi(head(x, h, HEADS)));
                    let v: Vec<f64> = head(&v, h, HEADS).iter().copied().chain([1.0]).collect();
                    let (keep, share) = match gated {
                        true => {
                            let gate = sigmoid(w.linear("f_proj", x)[h]);
                            (gate, 1.0 - gate)
                        }
                        false => (1.0, 1.0),
                    };
                    memory.iter_mut().for_each(|cell| *cell *= keep);
                    let answer = delta(memory, [&k, &vec![0.0; k.len()], &v, &q], share);
                    let sum = answer[width - 1];
                    floored += usize::from(sum < floor);
                    o.extend(each(&answer[..width - 1], |x| x / sum.max(floor)));
                }
                outputs.push(w.linear("o_proj", &o));
            }
            assert!(0 < floored && floored < rows.len() * HEADS, "{floored} at the floor");
            outputs
        });
    }
}

#[test]
fn the_pro_block_of_forgetting_attention_mixes_keys_and_values_with_those_before() {
    let text = "forgetting_attention = { heads = 2, qk_norm = true, output_gate = true, output_norm = true, \
                key_shift = true, value_shift = true }";
    check(text, |w, rows| {
        let width = D / HEADS;
        let (mut before, mut outputs) = ([vec![0.0; D], vec![0.0; D]], vec![]);
        let (mut keys, mut values, mut gates) = (vec![], vec![], vec![]);
        for x in rows {
            let mut shifted = ["k", "v"].into_iter().zip(&mut before).map(|(name, before)| {
                let now = w.linear(&format!("{name}_proj"), x);
                let share = each(&w.linear(&format!("{name}_shift_proj"), x), sigmoid);
                let mixed: Vec<f64> = (0..D)
                    .map(|i| share[i / width] * before[i] + (1.0 - share[i / width]) * now[i])
                    .collect();
                *before = now;
                mixed
            });
            let (k, v) = (shifted.next().expect("keys"), shifted.next().expect("values"));
            drop(shifted);
            let norm = |x: &[f64], name: &str| -> Vec<f64> {
                let heads = (0..HEADS).flat_map(|h| normalized(head(x, h, HEADS), 1e-5));
                times(&heads.collect::<Vec<_>>(), w.get(&format!("{name}_norm.gamma")))
            };
            let q = norm(&w.linear("q_proj", x), "q");
            keys.push(norm(&k, "k"));
            values.push(v);
            gates.push(each(&w.linear("f_proj", x), log_sigmoid));
            let mut o = vec![];
            for h in 0..HEADS {
                let score = |j: usize| {
                    let kept: f64 = gates[j + 1..].iter().map(|gate| gate[h]).sum();
                    dot(head(&q, h, HEADS), head(&keys[j], h, HEADS)) / (width as f64).sqrt() + kept
                };
                let scores: Vec<f64> = (0..keys.len()).map(score).collect();
                let values: Vec<Vec<f64>> =
                    values.iter().map(|v| head(v, h, HEADS).to_vec()).collect();
                o.extend(weighed(&scores, &values));
            }
            let gate = each(&w.linear("g_proj", x), sigmoid);
            outputs.push(w.linear("o_proj", &times(&norm(&o, "output"), &gate)));
        }
        outputs
    });
}

#[test]
fn canon_layers_add_a_convolution_to_queries_keys_and_values() {
    check("attention = { heads = 2, rope = false, canon = 3 }", |w, rows| {
        let (mut seen, mut made) = ([vec![], vec![], vec![]], [vec![], vec![], vec![]]);
        let mut outputs = vec![];
        for x in rows {
            for (i, name) in ["q", "k", "v"].into_iter().enumerate() {
                seen[i].push(w.linear(&format!("{name}_proj"), x));
                let convolved = w.convolution(&format!("canon.{name}"), &seen[i]);
                let h = seen[i].last().expect("a token").iter();
                made[i].push(h.zip(convolved).map(|(h, c)| h + c).collect::<Vec<f64>>());
            }
            let [q, keys, values] = &made;
            let q = q.last().expect("a token");
            let mut o = vec![];
            for h in 0..HEADS {
                let of_head = |x: &Vec<f64>| head(x, h, HEADS).to_vec();
                let score = |k: &Vec<f64>| {
                    dot(head(q, h, HEADS), head(k, h, HEADS)) / ((D / HEADS) as f64).sqrt()
                };
                let scores: Vec<f64> = keys.iter().map(score).collect();
                o.extend(weighed(&scores, &values.iter().map(of_head).collect::<Vec<_>>()));
            }
            outputs.push(w.linear("o_proj", &o));
        }
        outputs
    });
}

#[test]
fn keys_of_length_zero_have_gradients() {
    for text in [
        "deltanet = { heads = 2, exact_step = true }",
        "deltanet = { heads = 2, qk_activation = 'relu', qk_norm = 'sum' }",
        "gated_deltanet = { heads = 2, preconditioner = true }",
        "linear_attention = { heads = 2, normalize = true, denominator_floor = 0.1, feature_map = 'relu', output_norm = 'none' }",
    ] {
        let _alone = alone();
        let x = Tensor::<B, 3>::zeros([1, 9, D], (&Default::default(), DType::F64)).require_grad();
        let y = mixer(text).forward(x.clone(), None).0;
        let gradient = x.grad(&y.clone().sum().backward()).expect("y depends on x");
        assert!(download(y).iter().all(|y| y.is_finite()), "{text}");
        assert!(download(gradient).iter().all(|d| d.is_finite()), "{text}");
    }
}

#[test]
fn variants_that_do_not_go_together_are_refused_by_key() {
    #[derive(serde::Deserialize)]
    struct Holder {
        mixer: MixerConfig,
    }
    for (text, key) in [
        ("deltanet = { qk_norm = 'sum' }", "deltanet.qk_norm"),
        ("deltanet = { qk_norm = 'sum', qk_activation = 'identity' }", "deltanet.qk_norm"),
        (
            "deltanet = { qk_norm = 'sum', qk_activation = 'elu', exact_step = true }",
            "deltanet.exact_step",
        ),
        ("deltanet = { exact_step = true, preconditioner = true }", "deltanet.preconditioner"),
        ("deltanet = { qk_activation = { dpfp = { nu = 0 } } }", "deltanet.qk_activation.dpfp.nu"),
        (
            "gated_deltanet = { qk_activation = { dpfp = { nu = 48 } } }",
            "gated_deltanet.qk_activation.dpfp.nu",
        ),
        ("attention = { canon = 1 }", "attention.canon"),
        ("retnet = { canon = 1 }", "retnet.canon"),
    ] {
        let holder: Holder = toml::from_str(&format!("mixer.{text}")).expect(text);
        assert_eq!(holder.mixer.cost(D, 8).expect_err(text).key, key, "{text}");
    }
    let unknown = "mixer.deltanet = { qk_activation = { dpfp = { mu = 1 } } }";
    assert!(toml::from_str::<Holder>(unknown).is_err());
}
