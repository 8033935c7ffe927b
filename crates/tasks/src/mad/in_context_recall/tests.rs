use std::collections::{HashMap, HashSet};

use super::super::tests::{
    assert_near, assert_share, examples, figure, refused, scores, test_batch,
};
use super::*;
use crate::TaskConfig;

fn plain(vocab: u32, length: usize) -> InContextRecall {
    let config = InContextRecallConfig::published(vocab, length, 12_800);
    InContextRecall::new(&config, 0).unwrap()
}

fn noisy(vocab: u32, length: usize, noise: f64) -> InContextRecall {
    let config = NoisyInContextRecallConfig::published(vocab, length, noise, 12_800);
    InContextRecall::noisy(&config, 0).unwrap()
}

/// The value that the key at the end of `read` had before.
fn look_up(read: &[u32]) -> u32 {
    let (key, before) = read.split_last().unwrap();
    before.chunks(2).find(|pair| pair[0] == *key).expect("only keys shown before are asked")[1]
}

// --- layout

#[test]
fn the_worked_example_is_laid_out_as_published() {
    let draws = || Draws { pairs: vec![[3, 12], [5, 9], [3, 12], [5, 9]] };
    let (train, test) = (draws().lay_out(8, Split::Train), draws().lay_out(8, Split::Test));
    assert_eq!(train.input, [3, 12, 5, 9, 3, 12, 5]);
    assert_eq!(train.target, [12, 5, 9, 3, 12, 5, 9].map(Some));
    assert_eq!(test.input, train.input);
    assert_eq!(test.target, [None, None, None, None, Some(12), None, Some(9)]);
    assert_eq!(draws().lay_out(8, Split::Validation), test);
}

#[test]
fn noise_is_read_and_never_asked_for_in_a_test() {
    let draws = || Draws { pairs: vec![[2, 9], [20, 20], [20, 20], [2, 9]] };
    let (train, test) = (draws().lay_out(8, Split::Train), draws().lay_out(8, Split::Test));
    assert_eq!(train.input, [2, 9, 20, 20, 20, 20, 2]);
    assert_eq!(train.target, [9, 20, 20, 20, 20, 2, 9].map(Some));
    assert_eq!(test.target, [None, None, None, None, None, None, Some(9)]);
}

#[test]
fn a_test_asks_for_every_key_shown_before_and_for_nothing_else() {
    for task in [plain(16, 128), plain(128, 1024), noisy(32, 128, 0.2), noisy(32, 128, 0.8)] {
        for Example { input, target } in examples(&task, Split::Test, 100) {
            let mut values = HashMap::new();
            for (t, (&id, &target)) in input.iter().zip(&target).enumerate() {
                let is_key = t % 2 == 0 && id < task.ids.keys;
                let value = input.get(t + 1).copied();
                let again = is_key.then(|| values.insert(id, value.or(target))).flatten().flatten();
                assert_eq!(target, again, "position {t}");
            }
            assert!(target.last().unwrap().is_some(), "the probe was shown");
        }
    }
}

#[test]
fn training_asks_for_every_next_token() {
    for task in [plain(16, 128), noisy(32, 128, 0.2)] {
        for Example { input, target } in examples(&task, Split::Train, 50) {
            assert!(input[1..].iter().zip(&target).all(|(&next, &target)| target == Some(next)));
            let (shown, probe) = (&input[..126], &input[..127]);
            assert_eq!(target[126], Some(look_up(probe)), "{shown:?}");
        }
    }
}

// --- distribution

#[test]
fn keys_come_again_and_values_are_shared() {
    let (mut again, mut shared) = (0, 0);
    for Example { input, .. } in examples(&plain(16, 32), Split::Train, 200) {
        let pairs: Vec<_> = input.chunks_exact(2).map(|pair| (pair[0], pair[1])).collect();
        let keys: HashSet<_> = pairs.iter().map(|pair| pair.0).collect();
        let values: HashSet<_> = pairs.iter().map(|pair| pair.1).collect();
        assert!(keys.iter().all(|&key| key < 8) && values.iter().all(|&v| (8..16).contains(&v)));
        again += usize::from(keys.len() < pairs.len());
        shared += usize::from(values.len() < keys.len());
    }
    assert_eq!(again, 200, "15 pairs of 8 keys");
    assert!(shared > 100, "{shared}");
}

#[test]
fn each_key_is_equally_likely_whenever_and_each_value_for_a_new_key() {
    let (mut keys, mut values, total) = ([0; 4], [0; 4], 20_000);
    for Example { input, .. } in examples(&plain(8, 8), Split::Train, total) {
        keys[input[4] as usize] += 1;
        values[input[1] as usize - 4] += 1;
    }
    for id in 0..4 {
        assert_share(&format!("key {id}"), keys[id], total, 0.25, 4.0);
        assert_share(&format!("value {id}"), values[id], total, 0.25, 4.0);
    }
}

#[test]
fn the_probe_is_uniform_over_different_keys_however_often_they_were_shown() {
    // Among examples that show one key twice and another once, the rarer is asked half the time.
    let (mut rare, mut total) = (0, 0);
    for Example { input, .. } in examples(&plain(16, 8), Split::Test, 40_000) {
        let keys = [input[0], input[2], input[4]];
        let twice = keys.iter().find(|&a| keys.iter().filter(|&b| a == b).count() == 2);
        if let Some(twice) = twice {
            total += 1;
            rare += u64::from(input[6] != *twice);
        }
    }
    assert!(total > 10_000);
    assert_share("rare key", rare, total, 0.5, 4.0);
}

#[test]
fn a_test_scores_56_positions_in_the_published_baseline() {
    let (value, expected) = figure(&plain(16, 128), Split::Test, 4_000, "scored positions, mean");
    assert!((expected.unwrap() - 56.0).abs() < 0.005, "{expected:?}");
    // A key is unseen with probability (7/8)^63, so the number of them hardly varies.
    assert_near("scored", value, expected.unwrap(), 0.001, 1.0);
}

#[test]
fn scored_positions_and_noise_are_as_many_as_expected() {
    for (length, noise) in [(128, 0.2), (128, 0.4), (128, 0.6), (128, 0.8), (4, 0.5), (6, 0.9)] {
        let (task, count) = (noisy(32, length, noise), 20_000);
        for name in ["scored positions, mean", "share of noise pairs"] {
            let (value, expected) = figure(&task, Split::Test, count, name);
            // A pair more or less has a variance of noise (1 - noise), or 1/4 at most.
            let pairs = (length / 2 - 1) as f64;
            let sd = (0.25 * pairs / count as f64).sqrt();
            let sd = if name.starts_with("share") { sd / pairs } else { sd };
            assert_near(&format!("{name}, {length}, {noise}"), value, expected.unwrap(), sd, 4.0);
        }
    }
}

#[test]
fn of_the_pairs_one_in_the_published_baseline_is_spared_from_noise() {
    let (_, expected) = figure(&noisy(32, 128, 0.2), Split::Test, 1, "share of noise pairs");
    assert!((expected.unwrap() - 0.2 * 63.0 / 64.0).abs() < 1e-9);
    let (_, none) = figure(&plain(16, 128), Split::Test, 10, "share of noise pairs");
    assert_eq!(none, Some(0.0));
}

#[test]
fn noise_is_two_independent_ids_of_its_own() {
    let (mut counts, mut total) = ([[0; 16]; 16], 0);
    for Example { input, .. } in examples(&noisy(32, 128, 0.8), Split::Train, 2_000) {
        for pair in input.chunks_exact(2).filter(|pair| pair[0] >= 16) {
            counts[pair[0] as usize - 16][pair[1] as usize - 16] += 1;
            total += 1;
        }
    }
    for (a, b) in (0..256).map(|i| (i / 16, i % 16)) {
        assert_share(&format!("noise {a}, {b}"), counts[a][b], total, 1.0 / 256.0, 4.5);
    }
}

#[test]
fn some_pair_is_shown_even_where_almost_all_is_noise() {
    for Example { input, target } in examples(&noisy(18, 4, 0.999_999), Split::Test, 2_000) {
        assert!(input[0] == 0 && input[1] == 1, "the only key and its only value: {input:?}");
        assert_eq!(target, [None, None, Some(1)]);
    }
}

// --- score

#[test]
fn a_dictionary_answers_everything() {
    for task in [plain(16, 128), plain(128, 128), noisy(32, 128, 0.2), noisy(32, 128, 0.8)] {
        assert_eq!(scores(&task, &test_batch(&task, 1_280), look_up), [1.0; 3]);
    }
}

#[test]
fn one_and_the_same_value_scores_one_in_eight_and_a_key_nothing() {
    let task = plain(16, 128);
    let batch = test_batch(&task, 1_280);
    let [accuracy, micro, exact] = scores(&task, &batch, |_| 11);
    assert_eq!((accuracy, exact), (1.0 / 8.0, 0.0));
    // A sequence asks for a key's value about seven times, so its 56 answers count as 8.
    assert_near("micro", micro, 1.0 / 8.0, (7.0 / 64.0 / (8.0 * 1_280.0f64)).sqrt(), 4.0);
    assert_eq!(scores(&task, &batch, |_| 2), [0.0; 3]);
}

// --- config

#[test]
fn a_value_that_makes_no_task_is_refused_by_its_key() {
    type Spoil = fn(&mut NoisyInContextRecallConfig);
    let cases: [(&str, Spoil); 7] = [
        ("task.noisy_in_context_recall.vocab", |c| c.vocab = 17),
        ("task.noisy_in_context_recall.train[0].length", |c| c.train[0].length = 127),
        ("task.noisy_in_context_recall.train[0].length", |c| c.train[0].length = 2),
        ("task.noisy_in_context_recall.train[0].noise", |c| c.train[0].noise = 1.0),
        ("task.noisy_in_context_recall.test[0].noise", |c| c.test[0].noise = f64::NAN),
        ("task.noisy_in_context_recall.test[0].noise", |c| c.test[0].noise = -0.1),
        ("task.noisy_in_context_recall.test[0].examples", |c| c.test[0].examples = 0),
    ];
    for (want, spoil) in cases {
        let mut config = NoisyInContextRecallConfig::baseline();
        spoil(&mut config);
        assert_eq!(refused(TaskConfig::NoisyInContextRecall(config)), want);
    }
}

#[test]
fn a_value_that_makes_no_task_without_noise_is_refused_by_its_key() {
    type Spoil = fn(&mut InContextRecallConfig);
    let cases: [(&str, Spoil); 3] = [
        ("task.in_context_recall.vocab", |c| c.vocab = 1),
        ("task.in_context_recall.test[0].length", |c| c.test[0].length = 5),
        ("task.in_context_recall.train[0].examples", |c| c.train[0].examples = 0),
    ];
    for (want, spoil) in cases {
        let mut config = InContextRecallConfig::baseline();
        spoil(&mut config);
        assert_eq!(refused(TaskConfig::InContextRecall(config)), want);
    }
}

#[test]
fn the_most_scored_positions_are_reached_where_there_is_one_key() {
    for (task, most) in [(plain(2, 8), 3), (noisy(18, 8, 0.0), 3)] {
        assert_eq!(
            (task.sets(Split::Test)[0].scored, task.sets(Split::Train)[0].scored),
            (most, 7)
        );
        let example = task.example(Split::Test, 0, 0);
        assert_eq!(example.input, [0, 1, 0, 1, 0, 1, 0]);
        assert_eq!(example.target.iter().flatten().count(), most);
    }
}
