use std::collections::HashSet;

use super::super::tests::{assert_near, examples, figure, refused, scores, test_batch};
use super::*;
use crate::TaskConfig;

fn task(vocab: u32) -> Memorization {
    Memorization::new(&MemorizationConfig::published(vocab, 32, 256), 0).unwrap()
}

#[test]
fn the_worked_example_is_laid_out_as_published() {
    let example = Draws { keys: vec![1, 0, 2] }.lay_out(&[5, 3, 6], 7);
    assert_eq!(example.input, [1, 7, 0, 7, 2, 7]);
    assert_eq!(example.target, [None, Some(3), None, Some(5), None, Some(6)]);
}

#[test]
fn each_key_has_a_value_of_its_own() {
    for vocab in [3, 4, 5, 8, 256, 8191] {
        let values = task(vocab).values;
        let keys = (vocab - 1) / 2;
        assert_eq!(values.len(), keys as usize, "{vocab}");
        assert_eq!(values.iter().collect::<HashSet<_>>().len(), keys as usize, "{vocab}");
        assert!(values.iter().all(|value| (keys..vocab - 1).contains(value)), "{vocab}");
    }
}

#[test]
fn one_map_holds_for_every_seed_and_in_all_splits() {
    let config = MemorizationConfig::baseline();
    let validation = config.train.clone();
    let task = Memorization::new(&MemorizationConfig { validation, ..config.clone() }, 5).unwrap();
    let mut longer = config.clone();
    longer.train[0].length = 64;
    assert_eq!(task.values, Memorization::new(&longer, 5).unwrap().values);
    let other = Memorization::new(&config, 6).unwrap();
    assert_eq!(task.values, other.values);
    let first = |task: &Memorization| task.example(Split::Train, 0, 0).input;
    assert_ne!(first(&task), first(&other), "the examples are the seed's");
    for split in [Split::Train, Split::Validation, Split::Test] {
        for Example { input, target } in examples(&task, split, 50) {
            for (keys, values) in input.chunks(2).zip(target.chunks(2)) {
                assert_eq!(keys[1], 255);
                assert_eq!(values, [None, Some(task.values[keys[0] as usize])]);
            }
        }
    }
}

#[test]
fn every_value_is_equally_likely_to_belong_to_a_key() {
    // V = 8: 3 keys and 4 values.
    let (mut counts, seeds) = ([[0u64; 4]; 3], 4_000);
    for seed in 0..seeds {
        for (key, value) in draw_values(8, seed).into_iter().enumerate() {
            counts[key][value as usize - 3] += 1;
        }
    }
    for count in counts.as_flattened() {
        let sd = (0.25 * 0.75 / seeds as f64).sqrt();
        assert_near("share", *count as f64 / seeds as f64, 0.25, sd, 4.0);
    }
}

/// Fixed numbers of the published settings: (1 - 1/K)^4096 of K keys are never seen in training.
const COVERAGE: [(u32, f64); 6] =
    [(256, 1.0), (512, 1.0), (1024, 0.9997), (2048, 0.982), (4096, 0.865), (8192, 0.632)];

/// The standard error of a test's 20 480 draws of keys, and of the keys that training covers.
fn sd(coverage: f64, keys: u32) -> f64 {
    (coverage * (1.0 - coverage) * (1.0 / 20_480.0 + 1.0 / f64::from(keys))).sqrt()
}

#[test]
fn training_covers_as_many_keys_as_published() {
    let mut mean = 0.0;
    for (vocab, published) in COVERAGE {
        let task = task(vocab);
        let (shown, expected) = figure(&task, Split::Train, 256, "share of keys shown");
        let expected = expected.unwrap();
        assert!((expected - published).abs() < 5e-4, "{vocab}: {expected}");
        assert_near(&format!("{vocab}"), shown, expected, sd(expected, task.keys()) + 1e-6, 4.0);
        mean += expected / 6.0;
    }
    assert!((mean - 0.913).abs() < 5e-4, "{mean}");
}

#[test]
fn knowing_all_that_training_showed_scores_what_it_covers() {
    for (vocab, _) in COVERAGE {
        let task = task(vocab);
        let mut known = vec![None; task.values.len()];
        for Example { input, target } in examples(&task, Split::Train, 256) {
            for t in (0..32).step_by(2) {
                known[input[t] as usize] = target[t + 1];
            }
        }
        let solve = |read: &[u32]| known[read[read.len() - 2] as usize].unwrap_or(vocab - 1);
        let [accuracy, micro, _] = scores(&task, &test_batch(&task, 1_280), solve);
        let covered = known.iter().flatten().count() as f64 / known.len() as f64;
        let chance = (covered * (1.0 - covered) / 20_480.0).sqrt();
        assert_near(&format!("{vocab}"), micro, covered, chance, 4.0);
        // By key and not by draw the same share is right, but for chance and the id of ignorance.
        assert_near(&format!("{vocab}"), accuracy, covered, 0.01, 1.0);
    }
}

#[test]
fn one_and_the_same_value_scores_one_over_the_keys_and_the_spare_value_nothing() {
    let task = task(256);
    let batch = test_batch(&task, 1_280);
    let answered = task.values[7];
    let [accuracy, micro, exact] = scores(&task, &batch, |_| answered);
    assert!((accuracy - 1.0 / 127.0).abs() < 1e-12, "{accuracy}");
    assert_eq!(exact, 0.0);
    let sd = (1.0 / 127.0 * (126.0 / 127.0) / 20_480.0f64).sqrt();
    assert_near("micro", micro, 1.0 / 127.0, sd, 4.0);
    let spare = (127..255).find(|value| !task.values.contains(value)).unwrap();
    assert_eq!(scores(&task, &batch, |_| spare), [0.0; 3]);
}

#[test]
fn half_of_the_positions_are_scored() {
    let figure = figure(&task(256), Split::Test, 10, "scored positions, mean");
    assert_eq!(figure, (16.0, Some(16.0)));
}

#[test]
fn a_value_that_makes_no_task_is_refused_by_its_key() {
    type Spoil = fn(&mut MemorizationConfig);
    let cases: [(&str, Spoil); 4] = [
        ("task.memorization.vocab", |c| c.vocab = 2),
        ("task.memorization.train[0].length", |c| c.train[0].length = 31),
        ("task.memorization.test[0].length", |c| c.test[0].length = 0),
        ("task.memorization.test[0].examples", |c| c.test[0].examples = 0),
    ];
    for (want, spoil) in cases {
        let mut config = MemorizationConfig::baseline();
        spoil(&mut config);
        assert_eq!(refused(TaskConfig::Memorization(config)), want);
    }
}
