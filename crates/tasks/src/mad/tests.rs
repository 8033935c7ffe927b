//! Promises that all six tasks share. Each has tests of its own besides.

use std::collections::HashSet;

use super::*;
use crate::{Batch, Example, Split, Tally, Task, TaskConfig, TaskError};

const SPLITS: [Split; 3] = [Split::Train, Split::Validation, Split::Test];

/// That `value` is `expected`, give or take `sigmas` standard errors `sd`.
#[track_caller]
pub(super) fn assert_near(what: &str, value: f64, expected: f64, sd: f64, sigmas: f64) {
    let near = (value - expected).abs() <= sigmas * sd;
    assert!(near, "{what}: {value:.5}, expected {expected:.5} +- {sd:.5}");
}

/// That `count` of `total` trials is what probability `p` gives.
#[track_caller]
pub(super) fn assert_share(what: &str, count: u64, total: u64, p: f64, sigmas: f64) {
    let sd = (p * (1.0 - p) / total as f64).sqrt();
    assert_near(what, count as f64 / total as f64, p, sd, sigmas);
}

/// The first `count` examples of the first set.
pub(super) fn examples(task: &dyn Task, split: Split, count: u64) -> impl Iterator<Item = Example> {
    (0..count).map(move |index| task.example(split, 0, index))
}

/// The first `rows` test examples.
pub(super) fn test_batch(task: &dyn Task, rows: u64) -> Batch {
    task.batch(Split::Test, 0, &Vec::from_iter(0..rows))
}

/// `[accuracy, micro_accuracy, exact]` of a solver that is shown a row up to the scored position.
pub(super) fn scores(
    task: &dyn Task,
    batch: &Batch,
    mut solve: impl FnMut(&[u32]) -> u32,
) -> [f64; 3] {
    let mut answer = |&position: &u32| {
        let position = position as usize;
        solve(&batch.input[position - position % batch.length..=position])
    };
    let predicted: Vec<_> = batch.scored.iter().map(&mut answer).collect();
    let mut tally = Tally::default();
    task.tally(batch, &predicted, &mut tally);
    ["accuracy", "micro_accuracy", "exact"].map(|name| tally.metric(name).unwrap())
}

/// A figure of the first test set (or another split's), and what it should be.
pub(super) fn figure(task: &dyn Task, split: Split, count: u64, name: &str) -> (f64, Option<f64>) {
    let figures = task.statistics(split, 0, count);
    let figure = figures.into_iter().find(|figure| figure.name == name).unwrap();
    (figure.value, figure.expected)
}

/// The key that a config's error names.
#[track_caller]
pub(super) fn refused(config: TaskConfig) -> String {
    let error = config.build(0).unwrap_err();
    let TaskError::Value { key, .. } = error else { panic!("{error}") };
    key
}

fn baselines() -> Vec<Setting> {
    let settings = published_settings().into_iter();
    settings.filter(|setting| setting.name.ends_with("/baseline")).collect()
}

/// Every list twice as long, and a validation list like the training list.
fn double<S: Clone>(train: &mut Vec<S>, validation: &mut Vec<S>, test: &mut Vec<S>) {
    train.extend(train.clone());
    test.extend(test.clone());
    *validation = train.clone();
}

fn doubled(mut config: TaskConfig) -> TaskConfig {
    match &mut config {
        TaskConfig::Compression(c) => double(&mut c.train, &mut c.validation, &mut c.test),
        TaskConfig::FuzzyInContextRecall(c) => double(&mut c.train, &mut c.validation, &mut c.test),
        TaskConfig::InContextRecall(c) => double(&mut c.train, &mut c.validation, &mut c.test),
        TaskConfig::Memorization(c) => double(&mut c.train, &mut c.validation, &mut c.test),
        TaskConfig::NoisyInContextRecall(c) => double(&mut c.train, &mut c.validation, &mut c.test),
        TaskConfig::SelectiveCopying(c) => double(&mut c.train, &mut c.validation, &mut c.test),
        other => panic!("{other:?} is not of MAD"),
    }
    config
}

// --- what is promised of every example

#[test]
fn every_published_setting_keeps_the_sizes_that_it_promises() {
    for Setting { name, task } in published_settings() {
        let task = task.build(1).unwrap();
        for split in [Split::Train, Split::Test] {
            let info = &task.sets(split)[0];
            for Example { input, target } in examples(&*task, split, 20) {
                assert_eq!((input.len(), target.len()), (info.length, info.length), "{name}");
                let asked = target.iter().flatten();
                assert!((1..=info.scored).contains(&asked.clone().count()), "{name}");
                assert!(
                    input.iter().chain(asked).all(|&id| (id as usize) < task.vocab()),
                    "{name}"
                );
            }
        }
    }
}

#[test]
fn right_answers_score_one_in_every_published_setting() {
    for Setting { name, task } in published_settings() {
        let task = task.build(1).unwrap();
        let batch = test_batch(&*task, 200);
        let mut tally = Tally::default();
        task.tally(&batch, &batch.target.clone(), &mut tally);
        let ones = [("accuracy", 1.0), ("micro_accuracy", 1.0), ("exact", 1.0)];
        assert_eq!(tally.metrics(), ones, "{name}");
        assert_eq!(tally.metric(task.score_name()), Some(1.0), "{name}");
        assert_eq!(task.rows_of_a_score(), 128, "{name}");
    }
}

#[test]
fn every_id_has_a_name_of_its_own() {
    for Setting { name, task } in published_settings() {
        let task = task.build(1).unwrap();
        let names: HashSet<_> = (0..task.vocab() as u32).map(|id| task.token(id)).collect();
        assert_eq!(names.len(), task.vocab(), "{name}");
    }
}

#[test]
fn ids_are_named_by_what_they_mean() {
    let names = |setting: &Setting, ids: &[u32]| {
        let task = setting.task.build(0).unwrap();
        ids.iter().map(|&id| task.token(id)).collect::<Vec<_>>().join(" ")
    };
    let [compression, fuzzy, recall, memorization, noisy, copying] = &baselines()[..] else {
        panic!("six tasks")
    };
    assert_eq!(names(compression, &[0, 14, 15]), "0 14 compress");
    assert_eq!(names(fuzzy, &[0, 6, 7, 14, 15]), "k0 k6 v0 v7 pad");
    assert_eq!(names(recall, &[0, 7, 8, 15]), "k0 k7 v0 v7");
    assert_eq!(names(memorization, &[0, 126, 127, 254, 255]), "k0 k126 v0 v127 insert");
    assert_eq!(names(noisy, &[0, 7, 8, 15, 16, 31]), "k0 k7 v0 v7 noise0 noise15");
    assert_eq!(names(copying, &[0, 13, 14, 15]), "0 13 blank copy");
}

// --- randomness

#[test]
fn an_example_is_the_same_alone_in_any_order_and_in_a_batch() {
    for Setting { name, task } in baselines() {
        let task = task.build(0).unwrap();
        let alone: Vec<_> = examples(&*task, Split::Test, 8).collect();
        for index in (0..8).rev() {
            assert_eq!(task.example(Split::Test, 0, index), alone[index as usize], "{name}");
        }
        let length = task.sets(Split::Test)[0].length;
        let rows = [5, 0, 5].map(|index| alone[index].clone());
        assert_eq!(task.batch(Split::Test, 0, &[5, 0, 5]), Batch::stack(length, rows), "{name}");
    }
}

#[test]
fn seed_split_set_and_index_each_change_the_example() {
    for Setting { name, task: config } in baselines() {
        let config = doubled(config);
        let mut seen = HashSet::new();
        for seed in [0, 1, u64::MAX] {
            let task = config.build(seed).unwrap();
            for split in SPLITS {
                for (set, index) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
                    let new = seen.insert(task.example(split, set, index).input);
                    assert!(new, "{name}: {seed} {split:?} {set} {index}");
                }
            }
        }
    }
}

#[test]
fn other_sets_do_not_change_an_example() {
    for Setting { name, task: config } in baselines() {
        let (alone, among) = (config.build(3).unwrap(), doubled(config).build(3).unwrap());
        for split in [Split::Train, Split::Test] {
            assert!(examples(&*alone, split, 5).eq(examples(&*among, split, 5)), "{name}");
        }
    }
}

/// Published results of ours mean these data: a change here, also by a dependency, makes them
/// impossible to repeat.
#[test]
fn the_data_of_seed_0_stay_what_they_were() {
    let configs = [
        TaskConfig::Compression(CompressionConfig::published(16, 12, 1)),
        TaskConfig::FuzzyInContextRecall(FuzzyInContextRecallConfig::published(16, 24, 1)),
        TaskConfig::InContextRecall(InContextRecallConfig::published(16, 12, 1)),
        TaskConfig::Memorization(MemorizationConfig::published(16, 12, 1)),
        TaskConfig::NoisyInContextRecall(NoisyInContextRecallConfig::published(20, 12, 0.5, 1)),
        TaskConfig::SelectiveCopying(SelectiveCopyingConfig::published(16, 12, 3, 1)),
    ];
    let examples = configs.map(|config| config.build(0).unwrap().example(Split::Test, 0, 0));
    let (inputs, targets): (Vec<_>, Vec<_>) =
        examples.into_iter().map(|example| (example.input, example.target)).unzip();
    let first: [&[u32]; 6] = [
        &[5, 12, 0, 8, 13, 7, 6, 10, 0, 4, 10, 15],
        &[15, 15, 15, 6, 4, 5, 11, 9, 14, 1, 2, 3, 11, 8, 14, 2, 3, 6, 13, 8, 10, 0, 1, 6],
        &[1, 11, 5, 15, 3, 15, 6, 9, 3, 15, 6],
        &[4, 15, 4, 15, 0, 15, 1, 15, 2, 15, 1, 15],
        &[11, 6, 1, 3, 1, 3, 0, 3, 0, 3, 1],
        &[1, 14, 10, 14, 14, 14, 14, 7, 15, 14, 14, 14],
    ];
    assert_eq!(inputs, first);
    // The map of memorization is no part of an input, and one for all seeds.
    let target = targets[3].iter().flatten().copied().collect::<Vec<_>>();
    assert_eq!(target, [8, 8, 13, 14, 7, 14]);
}

// --- config

#[test]
fn a_task_needs_something_to_learn_from_and_something_to_report() {
    for Setting { name, task } in baselines() {
        let task_name = name.trim_end_matches("/baseline");
        for list in ["train", "test"] {
            assert_eq!(refused(without(task.clone(), list)), format!("task.{task_name}.{list}"));
        }
    }
}

fn without(mut config: TaskConfig, list: &str) -> TaskConfig {
    fn clear<S>(list: &str, train: &mut Vec<S>, test: &mut Vec<S>) {
        if list == "train" { train.clear() } else { test.clear() }
    }
    match &mut config {
        TaskConfig::Compression(c) => clear(list, &mut c.train, &mut c.test),
        TaskConfig::FuzzyInContextRecall(c) => clear(list, &mut c.train, &mut c.test),
        TaskConfig::InContextRecall(c) => clear(list, &mut c.train, &mut c.test),
        TaskConfig::Memorization(c) => clear(list, &mut c.train, &mut c.test),
        TaskConfig::NoisyInContextRecall(c) => clear(list, &mut c.train, &mut c.test),
        TaskConfig::SelectiveCopying(c) => clear(list, &mut c.train, &mut c.test),
        other => panic!("{other:?} is not of MAD"),
    }
    config
}
