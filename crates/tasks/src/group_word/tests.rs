use std::collections::HashSet;

use serde::de::value::{Error, MapDeserializer, StrDeserializer};

use super::*;
use crate::TaskConfig;

fn group(text: &str) -> Group {
    Group::parse(text).unwrap()
}

fn config(group: &str, length: usize) -> GroupWordConfig {
    let sets = vec![WordSet { length, examples: 10 }];
    GroupWordConfig { train: sets.clone(), test: sets, ..GroupWordConfig::deltaproduct(group) }
}

fn task(config: &GroupWordConfig) -> GroupWord {
    GroupWord::new(config, 0).unwrap()
}

fn train(task: &GroupWord, count: u64) -> impl Iterator<Item = Example> {
    (0..count).map(|index| task.example(Split::Train, 0, index))
}

fn some(ids: &[u32]) -> Vec<Option<u32>> {
    ids.iter().copied().map(Some).collect()
}

#[track_caller]
fn assert_near(what: &str, value: f64, want: f64, limit: f64) {
    assert!((value - want).abs() <= limit, "{what}: {value:.6}, expected {want:.6} +- {limit}");
}

// --- groups

const GROUPS: [(&str, usize); 13] = [
    ("S2", 2),
    ("S3", 6),
    ("S4", 24),
    ("S5", 120),
    ("A3", 3),
    ("A4", 12),
    ("A5", 60),
    ("Z2", 2),
    ("Z60", 60),
    ("Z2_x_S3", 12),
    ("S3_x_Z4", 24),
    ("A4_x_Z5", 60),
    ("Z2_x_Z3_x_S3", 36),
];

#[test]
fn every_group_keeps_the_axioms() {
    for (text, order) in GROUPS {
        let group = group(text);
        assert_eq!(group.order(), order, "{text}");
        for a in 0..order {
            assert_eq!((group.product(0, a), group.product(a, 0)), (a, a), "{text}");
            assert!((0..order).any(|b| group.product(a, b) == 0 && group.product(b, a) == 0));
            for (b, c) in (0..order).flat_map(|b| (0..order).map(move |c| (b, c))) {
                let left = group.product(group.product(a, b), c);
                assert_eq!(left, group.product(a, group.product(b, c)), "{text}: {a} {b} {c}");
            }
        }
    }
}

#[test]
fn the_largest_groups_are_built_whole() {
    for (text, order) in [("S6", 720), ("A6", 360), ("Z1024", 1024), ("S5_x_Z8", 960)] {
        let group = group(text);
        assert_eq!(group.order(), order, "{text}");
        for a in (0..order).step_by(37) {
            let row: HashSet<_> = (0..order).map(|b| group.product(a, b)).collect();
            let column: HashSet<_> = (0..order).map(|b| group.product(b, a)).collect();
            assert_eq!((row.len(), column.len()), (order, order), "{text}: {a}");
        }
    }
}

#[test]
fn s3_has_the_published_cayley_table() {
    let group = group("S3");
    let row = |a| (0..6).map(|b| group.product(a, b)).collect::<Vec<_>>();
    assert_eq!(row(0), [0, 1, 2, 3, 4, 5]);
    assert_eq!(row(1), [1, 0, 4, 5, 2, 3]);
    assert_eq!(row(2), [2, 3, 0, 1, 5, 4]);
    assert_eq!(row(3), [3, 2, 5, 4, 0, 1]);
    assert_eq!(row(4), [4, 5, 1, 0, 3, 2]);
    assert_eq!(row(5), [5, 4, 3, 2, 1, 0]);
}

#[test]
fn alternating_elements_are_the_even_ones_of_the_symmetric_group_in_its_order() {
    let (a5, s5) = (group("A5"), group("S5"));
    let ids: Vec<_> =
        (0..60).map(|a| (0..120).find(|&s| s5.name(s) == a5.name(a)).unwrap()).collect();
    assert_eq!(ids[..14], [0, 3, 4, 7, 8, 11, 12, 15, 16, 19, 20, 23, 25, 26]);
    for (a, b) in (0..60).flat_map(|a| (0..60).map(move |b| (a, b))) {
        assert_eq!(ids[a5.product(a, b)], s5.product(ids[a], ids[b]));
    }
}

#[test]
fn a_product_counts_its_right_factor_fastest() {
    let (product, z, s) = (group("Z4_x_S3"), group("Z4"), group("S3"));
    for (a, b) in (0..24).flat_map(|a| (0..24).map(move |b| (a, b))) {
        let want = 6 * z.product(a / 6, b / 6) + s.product(a % 6, b % 6);
        assert_eq!(product.product(a, b), want);
    }
}

#[test]
fn a_name_that_is_no_group_of_2_to_1024_elements_is_refused() {
    let names = [
        "",
        "S",
        "5",
        "s5",
        "D4",
        "S5 ",
        "S+3",
        "S-3",
        "S0",
        "Z0",
        "S1",
        "A2",
        "Z1",
        "S7",
        "A7",
        "Z1025",
        "S5_x_Z9",
        "S3xS3",
        "S3_x_",
        "_x_S3",
        "Z99999999999999999999",
        "é5",
    ];
    for name in names {
        assert!(Group::parse(name).is_none(), "{name}");
    }
}

#[test]
fn people_read_elements_as_cycles() {
    let names = |text| {
        let group = group(text);
        (0..group.order()).map(|a| group.name(a).to_string()).collect::<Vec<_>>()
    };
    assert_eq!(names("S3"), ["e", "(2 3)", "(1 2)", "(1 2 3)", "(1 3 2)", "(1 3)"]);
    assert_eq!(names("S4")[7], "(1 2)(3 4)");
    assert_eq!(names("Z3"), ["0", "1", "2"]);
    assert_eq!(names("Z2_x_S3")[7], "1:(2 3)");
}

// --- layout

#[track_caller]
fn assert_word(group: &str, elements: &[u32], states: &[u32]) {
    let task = task(&config(group, elements.len()));
    let example = task.lay_out(elements, elements.len());
    let bos = task.group.order() as u32 + 1;
    assert_eq!(example.input, [&[bos], elements].concat(), "{group}");
    assert_eq!(example.target, some(&[&[bos], states].concat()), "{group}");
}

#[test]
fn the_worked_examples_are_laid_out_as_published() {
    assert_word("S3", &[1, 2, 3, 4, 5], &[1, 4, 0, 4, 2]);
    assert_word("S5", &[1, 2, 6, 24], &[1, 4, 18, 96]);
    assert_word("S5", &[119, 1, 2, 3], &[119, 118, 115, 119]);
    assert_word("S4", &[1, 2, 6, 23, 9], &[1, 4, 18, 14, 7]);
    assert_eq!(task(&config("S3", 5)).bos(), 7);
}

/// Rows of the file A5=3.csv in jopetty/word-problem.
#[test]
fn words_of_the_published_data_have_their_published_states() {
    assert_word("A5", &[17, 5, 57], &[17, 23, 24]);
    assert_word("A5", &[9, 8, 49], &[9, 7, 12]);
    assert_word("A5", &[7, 12, 26], &[7, 37, 32]);
    assert_word("A5", &[57, 45, 44], &[57, 29, 45]);
}

#[test]
fn with_tokens_to_spare_an_element_repeats_and_its_state_comes_with_the_last() {
    let task = task(&GroupWordConfig { tokens: 2, ..config("S3", 5) });
    let example = task.lay_out(&[1, 2, 3], 5);
    assert_eq!(example.input, [7, 1, 1, 2, 2, 3]);
    assert_eq!(example.target, some(&[7, 0, 1, 1, 4, 4]));
    let task = self::task(&GroupWordConfig { tokens: 4, ..config("S3", 9) });
    let example = task.lay_out(&[1, 2, 3], 9);
    assert_eq!(example.input, [7, 1, 1, 1, 1, 2, 2, 2, 2, 3]);
    assert_eq!(example.target, some(&[7, 0, 0, 0, 1, 1, 1, 1, 4, 4]));
}

/// Upstream makes all states, repeats them, and shifts them by n - 1 with zeros in front.
#[test]
fn tokens_to_spare_shift_the_states_as_published() {
    for (tokens, length) in [(1, 9), (2, 9), (3, 9), (4, 64), (5, 7), (7, 7)] {
        let task = task(&GroupWordConfig { tokens, ..config("A5", length) });
        for Example { input, target } in train(&task, 20) {
            let mut state = 0;
            let states = input[1..].chunks(tokens).flat_map(|element| {
                state = task.group.product(state, element[0] as usize);
                assert!(element.iter().all(|token| *token == element[0]));
                vec![state as u32; element.len()]
            });
            let states: Vec<_> = states.collect();
            let shifted = [&vec![0; tokens - 1][..], &states[..length + 1 - tokens]].concat();
            assert_eq!(target[1..], some(&shifted), "{tokens} tokens");
        }
    }
}

#[test]
fn a_new_element_multiplies_from_the_right() {
    let task = task(&config("S5", 40));
    for Example { input, target } in train(&task, 50) {
        for t in 1..=40 {
            let before = if t == 1 { 0 } else { target[t - 1].unwrap() };
            let state = task.group.product(before as usize, input[t] as usize);
            assert_eq!(target[t], Some(state as u32));
        }
    }
}

// --- inputs

/// The elements that words have.
fn seen(group: &str, inputs: WordInputs) -> HashSet<u32> {
    let task = task(&GroupWordConfig { inputs, ..config(group, 64) });
    train(&task, 50).flat_map(|example| example.input[1..].to_vec()).collect()
}

#[test]
fn restricted_inputs_are_the_published_ones() {
    assert_eq!(seen("S5", WordInputs::All).len(), 120);
    // The identity and 10 swaps; 20 cycles of three more.
    let swaps = seen("S5", WordInputs::Swaps);
    let s5 = group("S5");
    assert_eq!(swaps.len(), 11);
    assert!(swaps.iter().all(|&x| s5.product(x as usize, x as usize) == 0));
    assert_eq!(seen("S5", WordInputs::SwapsAnd3Cycles).len(), 31);
    assert_eq!(seen("S4", WordInputs::SwapsAnd3Cycles).len(), 1 + 6 + 8);
    assert_eq!(seen("A5", WordInputs::SwapsAnd3Cycles).len(), 1 + 20);
    assert_eq!(seen("S3_x_S3", WordInputs::Swaps).len(), 1 + 3 + 3);
}

#[test]
fn every_allowed_element_is_equally_likely_at_every_place() {
    let task = task(&GroupWordConfig { inputs: WordInputs::Swaps, ..config("S5", 4) });
    let mut counts = vec![[0u64; 120]; 5];
    for example in train(&task, 20_000) {
        (1..5).for_each(|t| counts[t][example.input[t] as usize] += 1);
    }
    for counts in &counts[1..] {
        // Ten degrees of freedom: 4 each would be a chance of one in 10^6.
        let chi_square = chi_square(counts, &task.state_shares(1));
        assert!(chi_square < 4.0, "{chi_square}");
    }
}

// --- score

/// Metrics of two words of 70, the second of which is answered wrongly at `wrong`.
fn score(report_every: usize, wrong: &[usize]) -> Vec<(String, f64)> {
    let task = task(&GroupWordConfig { report_every, ..config("S3", 70) });
    let batch = task.batch(Split::Test, 0, &[0, 1]);
    let mut predicted = batch.target.clone();
    wrong.iter().for_each(|t| predicted[71 + t] += 1);
    let mut tally = Tally::default();
    task.tally(&batch, &predicted, &mut tally);
    assert!(tally.metric(task.score_name()).is_some());
    tally.metrics().into_iter().map(|(name, value)| (name.to_string(), value)).collect()
}

fn named(list: &[(&str, f64)]) -> Vec<(String, f64)> {
    list.iter().map(|(name, value)| (name.to_string(), *value)).collect()
}

#[test]
fn one_mistake_costs_every_longer_prefix_and_no_shorter_one() {
    let scores = score(32, &[33]);
    assert_eq!(
        scores[3..],
        named(&[
            ("sequence_accuracy_32", 1.0),
            ("sequence_accuracy_64", 0.5),
            ("sequence_accuracy_70", 0.5),
        ])
    );
    assert_eq!(scores[2], ("exact".into(), 0.5));
    assert_eq!(score(32, &[32])[3].1, 0.5);
}

#[test]
fn the_beginning_of_a_sequence_counts_as_a_position() {
    let scores = score(35, &[0]);
    assert_eq!(scores[1].0, "token_accuracy");
    assert_near("tokens", scores[1].1, 141.0 / 142.0, 1e-12);
    assert_eq!(scores[3..], named(&[("sequence_accuracy_35", 0.5), ("sequence_accuracy_70", 0.5)]));
}

#[test]
fn a_word_shorter_than_a_report_is_reported_at_its_end() {
    let names: Vec<_> = score(100, &[]).into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["accuracy", "token_accuracy", "exact", "sequence_accuracy_70"]);
}

#[test]
fn the_share_of_whole_words_is_the_accuracy_at_the_full_length() {
    let task = task(&config("S5", 64));
    let mut rng = example_rng(*b"guessing", 0, Split::Test, 0, 0);
    let batch = task.batch(Split::Test, 0, &Vec::from_iter(0..200));
    let guess = |id: &u32| if rng.random_range(0..100) == 0 { 0 } else { *id };
    let predicted: Vec<_> = batch.target.iter().map(guess).collect();
    let mut tally = Tally::default();
    task.tally(&batch, &predicted, &mut tally);
    let exact = tally.metric("exact").unwrap();
    assert_eq!(tally.metric("sequence_accuracy_64"), Some(exact));
    assert!(exact < tally.metric("sequence_accuracy_32").unwrap());
}

// --- randomness

#[test]
fn an_example_is_the_same_alone_in_any_order_and_in_a_batch() {
    let task = task(&config("S5", 12));
    let alone: Vec<_> = train(&task, 8).collect();
    for index in (0..8).rev() {
        assert_eq!(task.example(Split::Train, 0, index), alone[index as usize]);
    }
    let batch = task.batch(Split::Train, 0, &[5, 0, 5]);
    for (row, index) in [5, 0, 5].into_iter().enumerate() {
        assert_eq!(batch.input[row * 13..][..13], alone[index].input);
        assert_eq!(some(&batch.target[row * 13..][..13]), alone[index].target);
    }
}

#[test]
fn seed_split_set_and_index_each_change_the_example() {
    let mut config = config("S5", 30);
    config.train.push(config.train[0]);
    config.test = config.train.clone();
    config.validation = config.train.clone();
    let mut seen = HashSet::new();
    for seed in [0, 1, u64::MAX] {
        let task = GroupWord::new(&config, seed).unwrap();
        for split in [Split::Train, Split::Validation, Split::Test] {
            for (set, index) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
                let new = seen.insert(task.example(split, set, index).input);
                assert!(new, "{seed} {split:?} {set} {index}");
            }
        }
    }
}

#[test]
fn an_example_does_not_depend_on_the_rest_of_the_config() {
    let small = config("S4", 20);
    let mut large = GroupWordConfig { report_every: 3, ..small.clone() };
    large.train[0].examples = 7;
    large.train.push(WordSet { length: 99, examples: 1 });
    large.validation = large.train.clone();
    assert!(train(&task(&small), 5).eq(train(&task(&large), 5)));
}

/// Published results of ours mean these data: a change here, also by a dependency, makes them
/// impossible to repeat.
#[test]
fn the_data_of_seed_0_stay_what_they_were() {
    let inputs: Vec<_> = train(&task(&config("S5", 8)), 2).map(|example| example.input).collect();
    let first = [121, 112, 45, 82, 101, 60, 29, 56, 84];
    let second = [121, 38, 25, 6, 29, 55, 31, 116, 19];
    assert_eq!(inputs, [first, second]);
}

// --- statistics

#[test]
fn chi_square_sees_what_is_not_uniform_and_what_cannot_be() {
    assert_eq!(chi_square(&[0, 0], &[0.5, 0.5]), 0.0);
    assert_eq!(chi_square(&[10, 20], &[0.5, 0.5]), 100.0 / 30.0);
    assert_eq!(chi_square(&[15, 15, 0], &[0.5, 0.5, 0.0]), 0.0);
    assert_eq!(chi_square(&[15, 15, 1], &[0.5, 0.5, 0.0]), f64::INFINITY);
}

#[test]
fn states_have_their_exact_shares() {
    let swaps = GroupWordConfig { inputs: WordInputs::Swaps, ..config("S5", 3) };
    let shares = task(&swaps).state_shares(2);
    // Back after two: each of the 11 elements undoes itself.
    assert_near("identity after 2", shares[0], 1.0 / 11.0, 1e-12);
    assert_near("all", shares.iter().sum(), 1.0, 1e-12);
    let uniform = task(&config("A5", 3)).state_shares(1);
    assert!(uniform.iter().all(|share| (share - 1.0 / 60.0).abs() < 1e-12));
}

#[test]
fn elements_and_last_states_are_as_uniform_as_expected() {
    let four = GroupWordConfig { tokens: 4, ..config("S5", 64) };
    let swaps = GroupWordConfig { inputs: WordInputs::Swaps, ..config("S5", 3) };
    for config in [config("S3", 20), config("S4", 128), config("A5", 16), four, swaps] {
        let figures = task(&config).statistics(Split::Train, 0, 4_000);
        let of = |name: &str| figures.iter().find(|figure| figure.name.contains(name)).unwrap();
        for name in ["elements", "last states"] {
            let figure = of(name);
            // The smallest groups have 5 degrees of freedom, where 4 each is one chance in 600.
            assert!(figure.value < 4.0, "{}: {figure:?}", config.group);
            assert_eq!(figure.expected, Some(1.0));
        }
        let identity = of("identity");
        assert_near("identity", identity.value, identity.expected.unwrap(), 0.03);
    }
}

// --- config

#[test]
fn the_published_variants_build_with_the_published_sizes() {
    let set = |length: usize, examples| SetInfo {
        name: length.to_string(),
        length: length + 1,
        examples,
        scored: length + 1,
    };
    for (group, order) in [("S3", 6), ("S4", 24), ("A5", 60), ("S5", 120)] {
        let config = TaskConfig::GroupWord(GroupWordConfig::deltaproduct(group));
        let task = config.build(3).unwrap();
        assert_eq!(task.vocab(), order + 7, "{group}");
        assert_eq!(task.sets(Split::Train), [set(128, 2_000_000)]);
        assert_eq!(task.sets(Split::Test), [set(512, 500_000)]);
        assert_eq!(task.sets(Split::Validation), []);
    }
    for (inputs, tokens, length) in [
        (WordInputs::All, 1, 32),
        (WordInputs::Swaps, 1, 32),
        (WordInputs::SwapsAnd3Cycles, 1, 32),
        (WordInputs::All, 4, 64),
    ] {
        let task = task(&GroupWordConfig::s5(inputs, tokens));
        assert_eq!(task.vocab(), 127);
        assert_eq!(task.sets(Split::Train), [set(length, 1_600_000)]);
        assert_eq!(task.sets(Split::Test), [set(500, 40_000)]);
    }
}

#[test]
fn ids_after_the_elements_have_the_published_order() {
    let task = task(&config("S3", 2));
    let names: Vec<_> = (5..14).map(|id| task.token(id)).collect();
    assert_eq!(names, ["(1 3)", "PAD", "BOS", "UNK", "EOS", "SEP", "CLS", "MASK", "13"]);
}

#[test]
fn a_value_that_makes_no_task_is_refused_by_its_key() {
    type Spoil = fn(&mut GroupWordConfig);
    let cases: [(&str, Spoil); 11] = [
        ("task.group_word.group", |c| c.group = "S9".into()),
        ("task.group_word.group", |c| c.group = "Z1".into()),
        ("task.group_word.inputs", |c| (c.group, c.inputs) = ("A5".into(), WordInputs::Swaps)),
        ("task.group_word.inputs", |c| {
            (c.group, c.inputs) = ("Z5".into(), WordInputs::SwapsAnd3Cycles)
        }),
        ("task.group_word.tokens", |c| c.tokens = 0),
        ("task.group_word.report_every", |c| c.report_every = 0),
        ("task.group_word.train", |c| c.train.clear()),
        ("task.group_word.test", |c| c.test.clear()),
        ("task.group_word.test[0].length", |c| c.test[0].length = 0),
        ("task.group_word.validation[0].length", |c| (c.validation[0].length, c.tokens) = (3, 4)),
        ("task.group_word.train[0].examples", |c| c.train[0].examples = 0),
    ];
    for (want, spoil) in cases {
        let mut config = config("S5", 20);
        config.validation = config.train.clone();
        spoil(&mut config);
        let refused = TaskConfig::GroupWord(config).build(0).unwrap_err();
        let TaskError::Value { key, .. } = refused else { panic!("{refused}") };
        assert_eq!(key, want);
    }
}

#[test]
fn an_error_says_what_it_got_and_what_it_wants() {
    let error = GroupWord::new(&config("D4", 5), 0).unwrap_err();
    let want = "`task.group_word.group` is `D4`; it has to be S<n>, A<n>, Z<n> or some of them \
                joined by `_x_`, with 2 to 1024 elements together";
    assert_eq!(error.to_string(), want);
    let config = GroupWordConfig { inputs: WordInputs::Swaps, ..config("A5", 5) };
    let error = GroupWord::new(&config, 0).unwrap_err();
    let want = "`task.group_word.inputs` is swaps; it has to be one that leaves more than the \
                identity, as `all` does";
    assert_eq!(error.to_string(), want);
    let config = GroupWordConfig { tokens: 8, ..self::config("S3", 7) };
    let error = GroupWord::new(&config, 0).unwrap_err();
    let want = "`task.group_word.train[0].length` is 7; it has to be 8 or more, the `tokens` of an element";
    assert_eq!(error.to_string(), want);
}

#[test]
fn inputs_are_spelt_with_underscores_and_other_keys_refused() {
    let spelt = [
        ("all", WordInputs::All),
        ("swaps", WordInputs::Swaps),
        ("swaps_and_3_cycles", WordInputs::SwapsAnd3Cycles),
    ];
    for (text, inputs) in spelt {
        assert_eq!(WordInputs::deserialize(StrDeserializer::<Error>::new(text)), Ok(inputs));
    }
    let keys = MapDeserializer::<_, Error>::new([("k", 1)].into_iter());
    let refused = GroupWordConfig::deserialize(keys).unwrap_err().to_string();
    assert!(refused.starts_with("unknown field `k`, expected"), "{refused}");
}
