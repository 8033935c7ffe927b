use std::collections::HashSet;

use super::*;
use crate::Split;

fn names() -> Vec<String> {
    published_settings().into_iter().map(|setting| setting.name).collect()
}

fn config(name: &str) -> TaskConfig {
    published_settings().into_iter().find(|setting| setting.name == name).unwrap().task
}

#[test]
fn there_are_as_many_settings_as_published() {
    let names = names();
    assert_eq!(names.len(), 66);
    assert_eq!(names.iter().collect::<HashSet<_>>().len(), 66);
    let count =
        |task: &str| names.iter().filter(|name| name.split('/').next() == Some(task)).count();
    assert_eq!(GRIDS.map(|grid| count(grid.task)), [11, 11, 11, 6, 14, 13]);
}

#[test]
fn each_grid_starts_with_the_baseline_of_its_config() {
    let baselines = [
        TaskConfig::Compression(CompressionConfig::baseline()),
        TaskConfig::FuzzyInContextRecall(FuzzyInContextRecallConfig::baseline()),
        TaskConfig::InContextRecall(InContextRecallConfig::baseline()),
        TaskConfig::Memorization(MemorizationConfig::baseline()),
        TaskConfig::NoisyInContextRecall(NoisyInContextRecallConfig::baseline()),
        TaskConfig::SelectiveCopying(SelectiveCopyingConfig::baseline()),
    ];
    for (grid, baseline) in GRIDS.iter().zip(baselines) {
        assert_eq!(grid.settings()[0].name, format!("{}/baseline", grid.task));
        assert_eq!(grid.settings()[0].task, baseline, "{}", grid.task);
    }
}

#[test]
fn no_two_settings_are_the_same() {
    let settings = published_settings();
    for (i, a) in settings.iter().enumerate() {
        assert!(settings[i + 1..].iter().all(|b| a.task != b.task), "{}", a.name);
    }
}

#[test]
fn a_setting_differs_from_its_baseline_in_the_knob_of_its_name_alone() {
    let want = NoisyInContextRecallConfig::published(32, 128, 0.6, 12_800);
    let noise = config("noisy_in_context_recall/noise_0.6");
    assert_eq!(noise, TaskConfig::NoisyInContextRecall(want));
    let want = SelectiveCopyingConfig::published(16, 256, 96, 12_800);
    assert_eq!(config("selective_copying/copy_96"), TaskConfig::SelectiveCopying(want));
    let want = CompressionConfig::published(16, 32, 800);
    assert_eq!(config("compression/examples_800"), TaskConfig::Compression(want));
    let want = InContextRecallConfig::published(16, 1024, 12_800);
    assert_eq!(config("in_context_recall/length_1024"), TaskConfig::InContextRecall(want));
    let want = MemorizationConfig::published(8192, 32, 256);
    assert_eq!(config("memorization/vocab_8192"), TaskConfig::Memorization(want));
}

#[test]
fn every_setting_tests_with_1280_examples_as_long_as_those_it_trains_with() {
    for Setting { name, task } in published_settings() {
        let task = task.build(0).unwrap();
        let (train, test) = (&task.sets(Split::Train)[0], &task.sets(Split::Test)[0]);
        assert_eq!((test.examples, &test.name), (1_280, &train.name), "{name}");
        assert_eq!(test.length, train.length, "{name}");
        assert!(task.sets(Split::Validation).is_empty(), "{name}");
    }
}
