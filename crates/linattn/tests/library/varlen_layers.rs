//! Layers and models over sequences of different lengths in one row: outputs, states and gradients are those that
//! each sequence gives by itself.

use crate::call::download;
use crate::layers::{B, D, MIXERS, ids, input, mixer, model};
use crate::support::alone;
use burn::tensor::{Int, Tensor};
use linattn::nn::mixers::{Mixer, MixerState, TokenMixer};
use linattn::nn::{LanguageModel, LanguageModelState, LengthsError, Shared, StateTensors};
use linattn::ops::SequenceLengths;
use linattn_oracle::assert_close;

const LENGTHS: [usize; 3] = [5, 1, 9];
/// Of the tokens that come after these.
const MORE: [usize; 3] = [2, 4, 1];
/// Double precision, as in [`layers`](crate::layers).
const LIMIT: f64 = 1e-10;

/// Outputs of two rows, one after the other, and the state of all sequences behind each.
type Outputs = (Vec<Tensor<B, 3>>, Vec<StateTensors<B>>);

fn row(tokens: &[usize]) -> Tensor<B, 3> {
    input(tokens.iter().sum()).narrow(0, 0, 1).detach().require_grad()
}

/// Both rows at once, the second from the states of the first.
fn packed(mixer: &Mixer<B>, rows: [&Tensor<B, 3>; 2]) -> (Outputs, MixerState<B>) {
    let [first, more] = [&LENGTHS, &MORE].map(|lengths| SequenceLengths::new(lengths));
    let (y, state) = mixer.forward_varlen(rows[0].clone(), &first, None).unwrap();
    let before = state.tensors();
    let (z, state) = mixer.forward_varlen(rows[1].clone(), &more, Some(state)).unwrap();
    ((vec![y, z], vec![before, state.tensors()]), state)
}

/// Each sequence by itself: outputs side by side, and its states.
fn one_by_one(mixer: &Mixer<B>, rows: [&Tensor<B, 3>; 2]) -> (Outputs, Vec<MixerState<B>>) {
    let (mut y, mut z, mut states, mut last) = (vec![], vec![], vec![], vec![]);
    let (mut at, mut then) = (0, 0);
    for (tokens, more) in LENGTHS.into_iter().zip(MORE) {
        let (first, state) = mixer.forward(rows[0].clone().narrow(1, at, tokens), None);
        states.push(state.tensors());
        let (next, state) = mixer.forward(rows[1].clone().narrow(1, then, more), Some(state));
        (at, then) = (at + tokens, then + more);
        y.push(first);
        z.push(next);
        last.push(state);
    }
    states.extend(last.iter().map(MixerState::tensors));
    ((vec![Tensor::cat(y, 1), Tensor::cat(z, 1)], states), last)
}

fn numbers(states: &[StateTensors<B>]) -> Vec<f64> {
    // By tensor, so that rows of several states and of one stand in the same order.
    let count = states[0].data().count();
    let of = |tensor: usize| {
        states.iter().flat_map(move |state| {
            let (_, data) = state.data().nth(tensor).unwrap();
            data.iter::<f64>().collect::<Vec<_>>()
        })
    };
    (0..count).flat_map(of).collect()
}

/// Gradients of both rows, of a loss that weighs each output differently.
fn gradients(rows: [&Tensor<B, 3>; 2], outputs: Vec<Tensor<B, 3>>) -> Vec<Vec<f64>> {
    let weighed = |y: Tensor<B, 3>| (y.clone() * (y * 3.0 + 1.0).cos()).sum();
    let gradients = (weighed(outputs[0].clone()) + weighed(outputs[1].clone())).backward();
    rows.iter().map(|x| download(x.grad(&gradients).unwrap())).collect()
}

#[test]
fn a_row_of_sequences_is_as_each_alone() {
    let _alone = alone();
    for text in MIXERS {
        let mixer = mixer(text);
        if !mixer.fixed_size_state() {
            continue;
        }
        let (x, more) = (row(&LENGTHS), row(&MORE));
        let ((got, got_states), state) = packed(&mixer, [&x, &more]);
        let ((want, want_states), states) = one_by_one(&mixer, [&x, &more]);
        for n in 0..2 {
            let what = format!("{text}, row {n}");
            assert_close(&what, &download(want[n].clone()), &download(got[n].clone()), LIMIT);
            let (of, own) = (&want_states[3 * n..3 * n + 3], &got_states[n..n + 1]);
            assert_close(&format!("{what}: states"), &numbers(of), &numbers(own), LIMIT);
        }
        let (want, got) = (gradients([&x, &more], want), gradients([&x, &more], got));
        for n in 0..2 {
            assert_close(&format!("{text}: gradient {n}"), &want[n], &got[n], LIMIT);
        }
        let token = input(3).narrow(0, 0, 1).squeeze_dim::<2>(0);
        let got = mixer.step(token.clone(), Some(state)).0;
        let steps = states.into_iter().enumerate();
        let steps =
            steps.map(|(n, state)| mixer.step(token.clone().narrow(0, n, 1), Some(state)).0);
        let want = Tensor::cat(steps.collect(), 0);
        assert_close(&format!("{text}: step"), &download(want), &download(got), LIMIT);
    }
}

#[test]
fn without_states_positions_begin_anew_with_each_sequence() {
    let _alone = alone();
    let lengths = SequenceLengths::new(&LENGTHS);
    for text in MIXERS {
        let (mixer, x) = (mixer(text), row(&LENGTHS));
        let got = mixer.outputs_varlen(x.clone(), &lengths).unwrap();
        let alone = lengths
            .ranges()
            .map(|range| mixer.forward(x.clone().narrow(1, range.start, range.len()), None).0);
        let want = Tensor::cat(alone.collect(), 1);
        assert_close(text, &download(want.clone()), &download(got.clone()), LIMIT);
        let gradient = |y: Tensor<B, 3>| {
            let gradients = (y.clone() * (y * 3.0 + 1.0).cos()).sum().backward();
            download(x.grad(&gradients).unwrap())
        };
        assert_close(&format!("{text}: gradient"), &gradient(want), &gradient(got), LIMIT);
    }
}

#[test]
fn a_mixer_that_counts_tokens_refuses_states_by_its_name() {
    let lengths = SequenceLengths::new(&LENGTHS);
    for text in MIXERS {
        let mixer = mixer(text);
        let refused = mixer.forward_varlen(row(&LENGTHS), &lengths, None);
        assert_eq!(refused.is_err(), !mixer.fixed_size_state(), "{text}");
        let Err(why) = refused else { continue };
        let name = text.split(' ').next().unwrap();
        let LengthsError::Part { part, .. } = &why else { panic!("{text}: {why}") };
        assert_eq!(part, name);
        let start = format!("`{name}` does not take sequences of different lengths: its state has");
        assert!(why.to_string().starts_with(&start), "{why}");
    }
}

#[test]
fn a_layer_by_itself_takes_rows_of_sequences() {
    let Mixer::GatedDeltaNet(layer) = mixer("gated_deltanet = { heads = 2 }") else {
        panic!("another mixer")
    };
    let (x, lengths) = (row(&LENGTHS), SequenceLengths::new(&LENGTHS));
    let (y, state) = layer.forward_varlen(x.clone(), &lengths, None).unwrap();
    let last = layer.forward(x.clone().narrow(1, 6, 9), None);
    assert_close("outputs", &download(last.0), &download(y.narrow(1, 6, 9)), LIMIT);
    assert_eq!((state.memory.dims()[0], state.position), (3, 9));
    let why = layer.forward_varlen(x.clone(), &SequenceLengths::new(&[5, 10]), Some(state));
    assert_eq!(why.unwrap_err(), LengthsError::State { got: 3, want: 2 });
    let why = layer.outputs_varlen(x, &SequenceLengths::new(&[5, 9])).unwrap_err().to_string();
    assert_eq!(why, "forward_varlen: lengths of 14 tokens in all, where the tensors have 15");
    let why = layer.outputs_varlen(input(14), &SequenceLengths::new(&[5, 9])).unwrap_err();
    assert!(matches!(why, LengthsError::Row(_)), "{why}");
}

/// Of layers that take rows at once, of layers that take one sequence after another, with all that looks back.
const MODELS: &[&str] = &[
    "[[layers]]\nrepeat = 2\nmixer.gated_deltanet = { heads = 2 }\nmlp.swiglu = {}\n",
    "norm = 'layer'\npre_norm = true\n\
     [[layers]]\nmixer.rwkv7 = { heads = 2 }\nmlp.rwkv7 = {}\n\
     [[layers]]\nmixer.rwkv7 = { heads = 2, value_residual = true }\nmlp.rwkv7 = {}\n",
    "[[layers]]\nmixer.rwkv6 = { heads = 2 }\nmlp.rwkv6 = {}\n\
     [[layers]]\nmixer = 'none'\nmlp.rwkv6 = {}\n",
    "[[layers]]\nmixer.gla = { heads = 2 }\nmlp.swiglu = {}\ncanon = { before_mixer = 4, before_mlp = 3, inside_mlp = 2 }\n\
     [[layers]]\nmixer.mamba = { d_state = 4 }\nmlp.gelu = {}\n",
];

fn alone_in(
    model: &LanguageModel<B>,
    ids: &Tensor<B, 2, Int>,
) -> (Tensor<B, 3>, Vec<LanguageModelState<B>>) {
    let lengths = SequenceLengths::new(&LENGTHS);
    let sequences = lengths
        .ranges()
        .map(|range| model.forward(ids.clone().narrow(1, range.start, range.len()), None));
    let (logits, states): (Vec<_>, Vec<_>) = sequences.unzip();
    (Tensor::cat(logits, 1), states)
}

#[test]
fn a_model_takes_rows_of_sequences_and_goes_on_with_all_of_them() {
    let _alone = alone();
    let lengths = SequenceLengths::new(&LENGTHS);
    for text in MODELS {
        let (model, ids) = (model(text), ids(15));
        let (want, states) = alone_in(&model, &ids);
        let (got, state) = model.forward_varlen(ids.clone(), &lengths, None).unwrap();
        assert_close(text, &download(want), &download(got), LIMIT);
        assert_eq!(state.rows(), 3, "{text}");

        let next = ids.narrow(1, 3, 3).squeeze_dim::<1>(0);
        let steps = states.into_iter().enumerate();
        let steps = steps.map(|(n, state)| model.step(next.clone().narrow(0, n, 1), Some(state)).0);
        let want = Tensor::cat(steps.collect(), 0);
        let (got, state) = model.step(next, Some(state));
        assert_close(&format!("{text}: step"), &download(want), &download(got), LIMIT);

        let (one, two) = (SequenceLengths::new(&[15]), SequenceLengths::new(&[2, 4, 9]));
        assert!(model.forward_varlen(crate::layers::ids(15), &two, Some(state.clone())).is_ok());
        let why = model.forward_varlen(crate::layers::ids(15), &one, Some(state)).unwrap_err();
        assert_eq!(why, LengthsError::State { got: 3, want: 1 });
    }
}

#[test]
fn a_model_learns_from_rows_of_sequences_whatever_its_layers_count() {
    let _alone = alone();
    let lengths = SequenceLengths::new(&LENGTHS);
    let hybrid = "positions = 9\n[[layers]]\nmixer.gated_deltanet = { heads = 2 }\nmlp.swiglu = {}\n\
                  [[layers]]\nmixer.attention = { heads = 4, key_value_heads = 2, window = 3 }\nmlp.swiglu = {}\n";
    for text in MODELS.iter().chain(&[hybrid]) {
        let model = model(text);
        let got = model.logits(model.hidden_varlen(ids(15), &lengths).unwrap());
        let want = alone_in(&model, &ids(15)).0;
        assert_close(text, &download(want), &download(got), LIMIT);
    }
    let refused = |text: &str| model(text).check_varlen(true).unwrap_err();
    assert!(matches!(refused(hybrid), LengthsError::Part { part, .. } if part == "positions"));
    let rotating = hybrid.trim_start_matches("positions = 9\n");
    assert_eq!(
        refused(rotating).to_string(),
        "`layers[1].mixer.attention` does not take sequences of different lengths: its state has one count of \
         tokens for all rows; without states, `outputs_varlen` of layers and `hidden_varlen` of models take it"
    );
}

#[test]
fn parts_that_take_no_rows_of_sequences_are_named() {
    let cross = "[[layers]]\nmixer.attention = { heads = 2 }\n[[layers]]\nmixer.cross_attention = { heads = 2 }\n";
    let whole = "head = 'auto_encoder'\n[[layers]]\nmixer.deltanet = { heads = 2 }\n";
    let lengths = SequenceLengths::new(&LENGTHS);
    for (text, name) in [(cross, "layers[1].mixer.cross_attention"), (whole, "head")] {
        let why = model(text).hidden_varlen(ids(15), &lengths).unwrap_err();
        assert!(matches!(&why, LengthsError::Part { part, .. } if part == name), "{why}");
    }
    let why = model(MODELS[0]).hidden_varlen(ids(14), &lengths).unwrap_err();
    assert!(matches!(why, LengthsError::Row(_)), "{why}");
}

#[test]
fn a_block_takes_rows_of_sequences() {
    let text = format!("d_model = {D}\n{}", MODELS[0]);
    let config: linattn::nn::LanguageModelConfig = toml::from_str(&text).unwrap();
    let (_, layer) = config.each_layer().next().unwrap();
    let block = layer.init::<B>(D, config.norm, config.norm_eps, &Default::default()).unwrap();
    let block = crate::layers::wide(block);
    let (x, lengths) = (row(&LENGTHS), SequenceLengths::new(&LENGTHS));
    let (y, state) =
        block.forward_varlen(x.clone(), &lengths, None, &mut Shared::default()).unwrap();
    let outputs = block.outputs_varlen(x.clone(), &lengths, &mut Shared::default()).unwrap();
    let last = block.forward(x.narrow(1, 6, 9), None, &mut Shared::default()).0;
    assert_close("outputs", &download(last), &download(y.clone().narrow(1, 6, 9)), LIMIT);
    assert_close("without states", &download(y), &download(outputs), LIMIT);
    let token = input(3).narrow(0, 0, 1).squeeze_dim::<2>(0);
    assert_eq!(block.step(token, Some(state), &mut Shared::default()).0.dims(), [3, D]);
}
