//! Text that models write: the same as one forward pass gives, whatever stands beside it, wherever it is
//! put away; and chosen as the config says.

use crate::call::download;
use crate::layers::{MIXERS, wide};
use burn::backend::Flex;
use burn::tensor::{Int, Tensor, TensorData};
use linattn::generate::{
    Finish, GenerateConfig, GenerateError, Generated, Next, SamplingConfig, Sequence, Written,
    draw, generate,
};
use linattn::nn::{LanguageModel, LanguageModelConfig, LanguageModelState, StateError};
use linattn_oracle::assert_close;
use std::fs;
use std::path::Path;
use tempfile::TempDir;

type B = Flex;
const VOCAB: usize = 11;
/// Models compute in double precision here.
const LIMIT: f64 = 1e-10;

/// A model of two such layers, drawn loudly enough for its words to vary.
fn model(mixer: &str) -> LanguageModel<B> {
    let text = format!(
        "d_model = 24\ninitializer_range = 0.2\ntie_embeddings = false\n\
         [[layers]]\nrepeat = 2\nmlp = {{ swiglu = {{}} }}\nmixer.{mixer}\n"
    );
    from_text(&text)
}

fn from_text(text: &str) -> LanguageModel<B> {
    let config: LanguageModelConfig = toml::from_str(text).unwrap();
    wide(config.init(VOCAB, &Default::default()).unwrap())
}

/// One of each kind of state, and of what stands beside it.
const KINDS: &[&str] = &[
    "[[layers]]\nmixer.gated_deltanet = { heads = 2 }\n[[layers]]\nmixer.mlstm = { heads = 2 }\n",
    "[[layers]]\nmixer.gsa = { heads = 2, conv_size = 3 }\n[[layers]]\nmixer.base_conv = {}\n",
    "[[layers]]\nmixer.attention = { heads = 4 }\n[[layers]]\nmixer.retnet = { heads = 2 }\n",
    "[[layers]]\nmixer.attention = { heads = 4, window = 5 }\n",
    "[[layers]]\nmixer.forgetting_attention = { heads = 4 }\n",
    "positions = 200\n[[layers]]\nmixer.attention = { heads = 4, rope = false }\n",
    "[[layers]]\nrepeat = 2\nmixer.rwkv7 = { heads = 2 }\nmlp = { rwkv7 = { width = 40 } }\n",
];

fn of_kind(layers: &str) -> LanguageModel<B> {
    from_text(&format!("d_model = 24\ninitializer_range = 0.2\ntie_embeddings = false\n{layers}"))
}

fn prompt(length: usize) -> Vec<u32> {
    (0..length as u32).map(|i| (i * i * 7 + i) % VOCAB as u32).collect()
}

fn sampled(seed: u64) -> SamplingConfig {
    SamplingConfig { seed, ..Default::default() }
}

fn run(
    model: &LanguageModel<B>,
    sequences: Vec<Sequence<B>>,
    sampling: SamplingConfig,
    new_tokens: usize,
) -> Generated<B> {
    let config = GenerateConfig { sampling, new_tokens, ..Default::default() };
    generate(model, sequences, &config, &Default::default(), |_| Next::Continue).unwrap()
}

/// Text that is written after one prompt.
fn alone(
    model: &LanguageModel<B>,
    sequence: Sequence<B>,
    sampling: SamplingConfig,
    new_tokens: usize,
) -> Vec<u32> {
    run(model, vec![sequence], sampling, new_tokens).rows[0].new_tokens().to_vec()
}

fn ids(tokens: &[u32]) -> Tensor<B, 2, Int> {
    let ids: Vec<i32> = tokens.iter().map(|&id| id as i32).collect();
    Tensor::from_data(TensorData::new(ids, [1, tokens.len()]), &Default::default())
}

/// Every tensor of a state.
fn numbers(state: &LanguageModelState<B>) -> Vec<f64> {
    let layers = state.tensors();
    let data = layers.iter().flat_map(|layer| layer.data());
    data.flat_map(|(_, data)| data.iter::<f64>().collect::<Vec<_>>()).collect()
}

#[test]
fn a_prompt_and_64_tokens_are_what_one_forward_pass_says() {
    for mixer in MIXERS {
        let (model, prompt) = (model(mixer), prompt(21));
        // The last token is not read.
        let new_tokens = model.positions().map_or(64, |most| (most + 1 - prompt.len()).min(64));
        let length = prompt.len() + new_tokens;
        let config = GenerateConfig {
            sampling: SamplingConfig::greedy(),
            new_tokens,
            window: 8, // the prompt in three parts
            ..Default::default()
        };
        let device = Default::default();
        let start = vec![Sequence::new(prompt.clone())];
        let mut generated = generate(&model, start, &config, &device, |_| Next::Continue).unwrap();
        let row = generated.rows.remove(0);
        assert_eq!((row.new_tokens().len(), row.finish), (new_tokens, Finish::Length), "{mixer}");
        let read = (row.sequence.tokens().len(), row.sequence.read());
        assert_eq!(read, (length, length - 1), "{mixer}");

        let tokens = row.sequence.tokens().to_vec();
        // Where learnt positions end, nothing follows the whole sequence.
        let whole = model.positions().is_none_or(|most| most >= length);
        let forward = if whole { &tokens[..] } else { &tokens[..length - 1] };
        let logits = download(model.forward(ids(forward), None).0);
        let rows: Vec<&[f64]> = logits.chunks(VOCAB).collect();
        for (place, &id) in tokens.iter().enumerate().skip(prompt.len()) {
            let before = rows[place - 1];
            let largest = before.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let short = largest - before[id as usize];
            // Words are chosen by logits in f32.
            assert!(short <= 3e-7 * largest.abs().max(1.0), "{mixer}: token {place} by {short}");
        }
        // The state goes on to the logits of the whole sequence.
        if whole {
            let last = Tensor::from_data([tokens[length - 1] as i32], &device);
            let (next, _) = model.step(last, row.sequence.state().cloned());
            assert_close(mixer, rows[length - 1], &download(next), LIMIT);
        }
    }
}

#[test]
fn a_prompt_in_parts_of_any_length_leaves_the_state_of_one_read_at_once() {
    let device = Default::default();
    for kind in KINDS {
        let (model, prompt) = (of_kind(kind), prompt(61));
        let read = |window: usize| {
            let mut sequence = Sequence::new(prompt.clone());
            sequence.read_ahead(&model, window, &device).unwrap();
            assert_eq!((sequence.read(), sequence.tokens().len()), (61, 61));
            sequence
        };
        let whole = read(100);
        for window in [1, 7, 60, 61] {
            let parts = read(window);
            let (want, got) = (whole.state().unwrap(), parts.state().unwrap());
            assert_close(&format!("{kind}, {window}"), &numbers(want), &numbers(got), LIMIT);
        }
        // What was read ahead is not read again, and a copy goes on as the text does.
        let mut text = read(8);
        let refused =
            generate(&model, vec![text.clone()], &GenerateConfig::default(), &device, |_| {
                Next::Continue
            });
        assert_eq!(refused.unwrap_err(), GenerateError::Empty { row: 0 });
        text.extend(&[3, 1]);
        let got = run(&model, vec![text.clone()], sampled(2), 9);
        assert_eq!(got.timing.prompt_tokens, 2);
        let at_once = Sequence::new([&prompt[..], &[3, 1]].concat());
        let want = alone(&model, at_once, sampled(2), 9);
        assert_eq!(got.rows[0].new_tokens(), want, "{kind}");
        assert_eq!(alone(&model, text, sampled(2), 9), want, "{kind}");
    }
    let model = of_kind(KINDS[0]);
    let mut unknown = Sequence::new(vec![1, 11]);
    let refused = unknown.read_ahead(&model, 8, &device).unwrap_err();
    assert!(matches!(refused, GenerateError::Vocabulary { id: 11, .. }), "{refused}");
    let refused = Sequence::new(vec![1]).read_ahead(&model, 0, &device).unwrap_err();
    assert!(refused.to_string().contains("`window`"), "{refused}");
}

#[test]
fn a_text_that_is_put_away_goes_on_as_if_it_had_not_been() {
    let folder = TempDir::new().unwrap();
    for (i, kind) in KINDS.iter().enumerate() {
        let (model, path) = (of_kind(kind), folder.path().join(format!("{i}.state")));
        let sampling = SamplingConfig { repetition_penalty: 1.3, ..sampled(5) };
        let start = || Sequence::new(prompt(9)).with_stream(3);
        let whole = alone(&model, start(), sampling.clone(), 30);
        let mut first = run(&model, vec![start()], sampling.clone(), 12);
        let sequence = first.rows.remove(0).sequence;
        sequence.save(&path).unwrap();

        let loaded = Sequence::load(&path, &model, &Default::default()).unwrap();
        assert_eq!(loaded.tokens(), sequence.tokens());
        assert_eq!((loaded.read(), loaded.stream()), (20, 3));
        let (kept, back) = (sequence.state().unwrap(), loaded.state().unwrap());
        assert_eq!(numbers(kept), numbers(back), "{kind}: to the last bit");
        assert_eq!(kept.bytes(), back.bytes());
        let rest = alone(&model, loaded, sampling, 18);
        assert_eq!([sequence.tokens()[9..].to_vec(), rest].concat(), whole, "{kind}");
        // A state alone is a file too.
        kept.save_state(&path).unwrap();
        let alone = model.load_state(&path, &Default::default()).unwrap();
        assert_eq!(numbers(kept), numbers(&alone), "{kind}");
        let refused = Sequence::load(&path, &model, &Default::default()).unwrap_err();
        assert!(refused.to_string().contains("no text"), "{refused}");
    }
}

#[test]
fn a_batch_of_states_is_taken_apart_and_joined_without_a_change() {
    for kind in KINDS {
        let model = of_kind(kind);
        let tokens: Vec<i32> = (0..3 * 9).map(|i| i * 5 % VOCAB as i32).collect();
        let tokens =
            Tensor::<B, 2, Int>::from_data(TensorData::new(tokens, [3, 9]), &Default::default());
        let state = model.hidden(tokens.clone(), None).1;
        assert_eq!(state.rows(), 3);
        let parts: Vec<_> = (0..3).map(|row| state.select(&[row])).collect();
        assert_eq!(3 * parts[0].bytes(), state.bytes());
        let joined = LanguageModelState::cat(parts).unwrap();
        assert_eq!(numbers(&joined), numbers(&state), "{kind}");
        let turned = state.select(&[2, 0]);
        let own = tokens.clone().slice([2..3, 0..9]);
        let own = model.hidden(own, None).1;
        let (turned, own) = (numbers(&turned.select(&[0])), numbers(&own));
        assert_close(kind, &own, &turned, LIMIT);
        let shorter = model.hidden(tokens.slice([0..1, 0..4]), None).1;
        let refused = LanguageModelState::cat(vec![state, shorter]);
        if !model.fixed_size_state() {
            let Err(StateError::Layer { .. } | StateError::Position { .. }) = refused else {
                panic!("{kind}: {refused:?}")
            };
        }
    }
}

#[test]
fn texts_of_a_batch_are_what_each_is_alone() {
    for kind in KINDS {
        let model = of_kind(kind);
        let lengths = [5, 9, 5, 1, 14];
        let start = |row: usize| Sequence::new(prompt(lengths[row])).with_stream(row as u64);
        let sampling = sampled(11);
        let batch: Vec<_> = (0..lengths.len()).map(start).collect();
        let batch = run(&model, batch, sampling.clone(), 20);
        for (row, got) in batch.rows.iter().enumerate() {
            let mut own = run(&model, vec![start(row)], sampling.clone(), 20);
            let own = own.rows.remove(0);
            assert_eq!(got.new_tokens(), own.new_tokens(), "{kind}, text {row}");
            let (got, own) = (&got.sequence, &own.sequence);
            assert_eq!(got.read(), own.read());
            let (got, own) = (got.state().unwrap(), own.state().unwrap());
            assert_close(kind, &numbers(own), &numbers(got), LIMIT);
        }
        let (a, b) = (batch.rows[0].new_tokens(), batch.rows[2].new_tokens());
        assert_ne!(a, b, "{kind}: one prompt, two streams");
    }
}

#[test]
fn texts_end_one_by_one_and_all_at_once() {
    let model = of_kind(KINDS[0]);
    let config =
        GenerateConfig { sampling: sampled(1), new_tokens: 12, ..GenerateConfig::default() };
    let texts = || (0..3).map(|row| Sequence::new(prompt(4 + row))).collect();
    let device = Default::default();
    let mut heard = vec![];
    let some = generate(&model, texts(), &config, &device, |Written { row, id, new }| {
        heard.push((row, id));
        assert_eq!(new.last(), Some(&id));
        if row == 1 && new.len() == 4 { Next::FinishRow } else { Next::Continue }
    })
    .unwrap();
    let lengths = some.rows.iter().map(|row| row.new_tokens().len());
    assert_eq!(lengths.collect::<Vec<_>>(), [12, 4, 12]);
    assert_eq!(some.rows[1].finish, Finish::Stopped);
    assert_eq!(heard.len(), 12 + 4 + 12);
    assert_eq!((some.timing.prompt_tokens, some.timing.step_tokens), (4 + 5 + 6, 25));
    // Its state is that of its own four tokens, however long the others went on.
    let own = run(&model, vec![Sequence::new(prompt(5))], sampled(1), 4);
    let state = |row: &linattn::generate::Row<B>| numbers(row.sequence.state().unwrap());
    assert_close("state", &state(&own.rows[0]), &state(&some.rows[1]), LIMIT);

    let all = generate(&model, texts(), &config, &device, |written| {
        if written.row == 1 && written.new.len() == 3 { Next::FinishAll } else { Next::Continue }
    })
    .unwrap();
    for row in &all.rows {
        assert_eq!((row.new_tokens().len(), row.finish), (3, Finish::Interrupted));
        assert_eq!(row.sequence.read() + 1, row.sequence.tokens().len());
    }
    let none = GenerateConfig { new_tokens: 0, ..config };
    let none = generate(&model, texts(), &none, &device, |_| panic!("no token")).unwrap();
    assert!(none.rows.iter().all(|row| row.new_tokens().is_empty()));
}

#[test]
fn what_cannot_be_written_is_refused_by_name() {
    let (model, device) = (of_kind(KINDS[0]), Default::default());
    let refuse = |sequences: Vec<Sequence<B>>, config: &GenerateConfig| {
        generate(&model, sequences, config, &device, |_| Next::Continue).unwrap_err().to_string()
    };
    let fine = GenerateConfig::default();
    let with = |sampling| GenerateConfig { sampling, ..GenerateConfig::default() };
    let some = || vec![Sequence::new(prompt(3))];
    let two = vec![Sequence::new(prompt(3)), Sequence::new(vec![])];
    assert!(refuse(two, &fine).contains("prompt 1 is empty"));
    let unknown = refuse(vec![Sequence::new(vec![1, 11])], &fine);
    assert!(unknown.contains("token 11") && unknown.contains("below 11"), "{unknown}");
    for (key, sampling) in [
        ("temperature", SamplingConfig { temperature: -1.0, ..Default::default() }),
        ("temperature", SamplingConfig { temperature: f64::NAN, ..Default::default() }),
        ("top_k", SamplingConfig { top_k: Some(0), ..Default::default() }),
        ("top_p", SamplingConfig { top_p: 0.0, ..Default::default() }),
        ("top_p", SamplingConfig { top_p: 1.1, ..Default::default() }),
        ("repetition_penalty", SamplingConfig { repetition_penalty: 0.0, ..Default::default() }),
    ] {
        let refused = refuse(some(), &with(sampling));
        assert!(refused.contains(&format!("`{key}`")), "{key}: {refused}");
    }
    let whole = from_text(
        "d_model = 24\nhead = 'auto_encoder'\n[[layers]]\nmixer.deltanet = { heads = 2 }\n",
    );
    let refused = generate(&whole, some(), &fine, &device, |_| Next::Continue).unwrap_err();
    assert_eq!(refused, GenerateError::AutoEncoder);
    // In single precision this is too much.
    let loud: LanguageModelConfig = toml::from_str(
        "d_model = 24\ninitializer_range = 1e30\n[[layers]]\nmixer.deltanet = { heads = 2 }\n\
         mlp = { swiglu = {} }\n",
    )
    .unwrap();
    let loud = loud.init(VOCAB, &device).unwrap();
    let refused = generate(&loud, some(), &fine, &device, |_| Next::Continue).unwrap_err();
    assert_eq!(refused, GenerateError::NotFinite { row: 0, place: 3 });
}

#[test]
fn a_state_that_does_not_fit_is_refused_by_layer_and_tensor() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("text.state");
    let own = of_kind(KINDS[0]);
    let mut generated = run(&own, vec![Sequence::new(prompt(5))], sampled(0), 3);
    generated.rows.remove(0).sequence.save(&path).unwrap();
    let refuse = |layers: &str| {
        let error = Sequence::load(&path, &of_kind(layers), &Default::default()).unwrap_err();
        error.to_string()
    };
    let (delta, mlstm) =
        ("[[layers]]\nmixer.gated_deltanet = { heads = 2", "[[layers]]\nmixer.mlstm = { heads = ");
    let cases = [
        (format!("{delta} }}\n{mlstm}3 }}\n"), vec!["layer 1", "mixer.memory", "[1, 2,"]),
        (
            format!("{delta}, conv_size = 3 }}\n{mlstm}2 }}\n"),
            vec!["layer 0", "mixer.conv_states.q"],
        ),
        (format!("{delta}, conv_size = 0 }}\n{mlstm}2 }}\n"), vec!["layers.0.mixer.conv_states"]),
        (
            format!("{delta} }}\nmlp = {{ rwkv7 = {{}} }}\n{mlstm}2 }}\n"),
            vec!["layer 0", "conv_states.token", "missing"],
        ),
        (format!("{delta} }}\n"), vec!["2 layers", "have 1"]),
        (KINDS[1].to_string(), vec!["layer 0", "kind", "Matrix", "Slots"]),
    ];
    for (layers, parts) in cases {
        let refused = refuse(&layers);
        for part in parts {
            assert!(refused.contains(part), "{layers}: {refused:?} does not say {part:?}");
        }
    }
    let refuse = |path: &Path| {
        let error = Sequence::load(path, &own, &Default::default()).unwrap_err().to_string();
        assert!(error.contains(path.to_str().unwrap()), "{error}");
    };
    let bytes = fs::read(&path).unwrap();
    for (name, bytes) in
        [("cut", &bytes[..bytes.len() - 5]), ("empty", &[][..]), ("text", &b"hello"[..])]
    {
        let path = folder.path().join(name);
        fs::write(&path, bytes).unwrap();
        refuse(&path);
    }
    refuse(&folder.path().join("nothing"));
    let nowhere = folder.path().join("none/text.state");
    let text = Sequence::load(&path, &own, &Default::default()).unwrap();
    assert!(matches!(text.save(&nowhere), Err(StateError::Write { .. })));
    let fresh = Sequence::<B>::new(prompt(2)).save(&path).unwrap_err();
    assert!(fresh.to_string().contains("no state yet"), "{fresh}");
    assert_eq!(fs::read(&path).unwrap(), bytes, "the file there is as it was");
}

#[test]
fn a_state_of_another_version_is_refused_by_its_version() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("text.state");
    let model = of_kind(KINDS[0]);
    let mut generated = run(&model, vec![Sequence::new(prompt(5))], sampled(0), 3);
    generated.rows.remove(0).sequence.save(&path).unwrap();
    let mut bytes = fs::read(&path).unwrap();
    // JSON within JSON.
    let escaped = br#"version\":2"#;
    let at = bytes.windows(escaped.len()).position(|part| part == escaped).unwrap();
    bytes[at + escaped.len() - 1] = b'1';
    fs::write(&path, bytes).unwrap();
    let refused = Sequence::load(&path, &model, &Default::default()).unwrap_err().to_string();
    assert!(refused.contains("its version is 1, not 2"), "{refused}");
}

/// Every eleventh byte of a state, a bit of each: refused, or nothing that counts.
#[test]
fn a_bit_that_flips_in_a_state_is_no_other_text() {
    let folder = TempDir::new().unwrap();
    let (path, other) = (folder.path().join("text.state"), folder.path().join("flipped.state"));
    let model = of_kind(KINDS[0]);
    let mut generated = run(&model, vec![Sequence::new(prompt(5))], sampled(0), 3);
    let right = generated.rows.remove(0).sequence;
    right.save(&path).unwrap();
    let bytes = fs::read(&path).unwrap();
    let mut refused = 0;
    for place in (0..bytes.len()).step_by(11) {
        let mut flipped = bytes.clone();
        flipped[place] ^= 1 << (place % 8);
        fs::write(&other, flipped).unwrap();
        match Sequence::load(&other, &model, &Default::default()) {
            Ok(read) => {
                let (read_state, state) = (read.state().unwrap(), right.state().unwrap());
                assert_eq!((read.tokens(), read.read()), (right.tokens(), right.read()), "{place}");
                assert_eq!(read.stream(), right.stream(), "{place}");
                assert_eq!(numbers(read_state), numbers(state), "{place}");
            }
            Err(_) => refused += 1,
        }
    }
    let tried = bytes.len().div_ceil(11);
    assert!(refused * 10 > tried * 9, "{refused} of {tried} refused");
}

const LOGITS: [f32; 6] = [0.5, -1.0, 2.0, 2.0, -0.25, 1.0];

fn softmax(logits: &[f64]) -> Vec<f64> {
    let sum: f64 = logits.iter().map(|x| x.exp()).sum();
    logits.iter().map(|x| x.exp() / sum).collect()
}

fn ids_of(candidates: Vec<(u32, f64)>) -> Vec<u32> {
    candidates.into_iter().map(|(id, _)| id).collect()
}

#[test]
fn candidates_are_the_softmax_of_what_is_left() {
    let candidates = |sampling: SamplingConfig| sampling.candidates(&LOGITS, []).unwrap();
    let wide: Vec<f64> = LOGITS.iter().map(|&x| f64::from(x) / 0.7).collect();
    let all = candidates(SamplingConfig { temperature: 0.7, ..Default::default() });
    assert_eq!(ids_of(all.clone()), [0, 1, 2, 3, 4, 5]);
    let p: Vec<f64> = all.iter().map(|(_, p)| *p).collect();
    assert_close("temperature", &softmax(&wide), &p, 1e-12);

    let three = candidates(SamplingConfig { top_k: Some(3), ..Default::default() });
    assert_eq!(ids_of(three.clone()), [2, 3, 5], "of equals the lower id first");
    let p: Vec<f64> = three.iter().map(|(_, p)| *p).collect();
    assert_close("top_k", &softmax(&[2.0, 2.0, 1.0]), &p, 1e-12);
    let one = candidates(SamplingConfig { top_k: Some(1), ..Default::default() });
    assert_eq!(one, [(2, 1.0)]);
    assert_eq!(candidates(SamplingConfig::greedy()), one, "top_k = 1 is greedy");
    let many = candidates(SamplingConfig { top_k: Some(60), ..Default::default() });
    assert_eq!(many.len(), 6);
}

#[test]
fn top_p_keeps_the_fewest_that_are_enough() {
    let all = softmax(&LOGITS.map(f64::from));
    let order = [2, 3, 5, 0, 4, 1];
    for top_p in [0.01, 0.2, 0.37, 0.5, 0.75, 0.9, 0.99, 0.999] {
        let sampling = SamplingConfig { top_p, ..Default::default() };
        let kept = sampling.candidates(&LOGITS, []).unwrap();
        let ids = ids_of(kept.clone());
        assert_eq!(ids, order[..ids.len()]);
        let sum = |ids: &[u32]| ids.iter().map(|&id| all[id as usize]).sum::<f64>();
        assert!(sum(&ids) >= top_p, "{top_p}: {ids:?} are too few");
        assert!(sum(&ids[..ids.len() - 1]) < top_p, "{top_p}: {ids:?} are too many");
        let shares: f64 = kept.iter().map(|(_, p)| p).sum();
        assert!((shares - 1.0).abs() < 1e-12);
    }
    // After top_k, as shares of what that leaves.
    let both = SamplingConfig { top_k: Some(3), top_p: 0.5, ..Default::default() };
    assert_eq!(ids_of(both.candidates(&LOGITS, []).unwrap()), [2, 3]);
}

#[test]
fn a_penalty_divides_what_is_above_zero_and_multiplies_what_is_below() {
    let sampling = SamplingConfig { repetition_penalty: 1.5, ..Default::default() };
    let p = |seen: &[u32]| -> Vec<f64> {
        let candidates = sampling.candidates(&LOGITS, seen.iter().copied()).unwrap();
        candidates.into_iter().map(|(_, p)| p).collect()
    };
    let want = softmax(&[0.5, -1.5, 2.0 / 1.5, 2.0, -0.25, 1.0]);
    assert_close("seen once", &want, &p(&[2, 1]), 1e-7);
    assert_close("seen often", &want, &p(&[2, 1, 2, 2, 1]), 1e-7);
    let greedy = SamplingConfig { temperature: 0.0, ..sampling.clone() };
    assert_eq!(ids_of(greedy.candidates(&LOGITS, [2]).unwrap()), [3]);
    for bad in [f32::NAN, f32::INFINITY] {
        assert_eq!(sampling.candidates(&[0.0, bad], []), None);
    }
    let never = [f32::NEG_INFINITY, 0.0];
    assert_eq!(sampling.candidates(&never, []).unwrap(), [(0, 0.0), (1, 1.0)]);
}

#[test]
fn samples_are_spread_as_their_probabilities() {
    let sampling = SamplingConfig { temperature: 1.3, top_k: Some(5), ..sampled(17) };
    let candidates = sampling.candidates(&LOGITS, []).unwrap();
    let count = 40_000;
    let mut seen = [0.0; LOGITS.len()];
    for place in 0..count {
        let draw = draw(sampling.seed, 2, place);
        assert!((0.0..1.0).contains(&draw));
        seen[sampling.choose(&LOGITS, [], draw).unwrap() as usize] += 1.0 / count as f64;
    }
    assert_eq!(seen[1], 0.0, "cut off by top_k");
    for (id, p) in candidates {
        let spread = (p * (1.0 - p) / count as f64).sqrt();
        let share = seen[id as usize];
        assert!((share - p).abs() < 5.0 * spread, "{id}: {share}, not {p}");
    }
    assert_eq!(sampling.choose(&LOGITS, [], 1.0 - f64::EPSILON), Some(4), "the last candidate");
    let draws = [draw(1, 0, 0), draw(2, 0, 0), draw(1, 1, 0), draw(1, 0, 1), draw(1, 0, 0)];
    assert_eq!(draws[0], draws[4]);
    assert!((1..4).all(|i| draws[i] != draws[0]), "{draws:?}");
}
