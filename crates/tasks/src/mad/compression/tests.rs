use super::super::tests::{assert_share, examples, figure, refused, scores, test_batch};
use super::*;
use crate::TaskConfig;

fn baseline() -> Compression {
    Compression::new(&CompressionConfig::baseline(), 0).unwrap()
}

#[test]
fn the_worked_example_is_laid_out_as_published() {
    let example = Draws { ids: vec![3, 0, 14, 7, 7] }.lay_out(15);
    assert_eq!(example.input, [3, 0, 14, 7, 7, 15]);
    assert_eq!(example.target, [3, 0, 14, 7, 7, 15].map(Some));
}

#[test]
fn training_and_test_ask_for_the_whole_sequence() {
    for split in [Split::Train, Split::Test] {
        for Example { input, target } in examples(&baseline(), split, 50) {
            assert_eq!(target, input.iter().copied().map(Some).collect::<Vec<_>>());
            assert_eq!(input.iter().position(|&id| id == 15), Some(31));
        }
    }
}

#[test]
fn every_id_but_the_last_is_equally_likely_at_each_place() {
    let (mut counts, total) = ([[0; 15]; 31], 20_000);
    for Example { input, .. } in examples(&baseline(), Split::Train, total) {
        (0..31).for_each(|t| counts[t][input[t] as usize] += 1);
    }
    for (t, id) in (0..31).flat_map(|t| (0..15).map(move |id| (t, id))) {
        assert_share(&format!("id {id} at {t}"), counts[t][id], total, 1.0 / 15.0, 4.5);
    }
}

#[test]
fn always_answering_the_last_token_is_right_once_a_sequence() {
    let task = baseline();
    let score = scores(&task, &test_batch(&task, 1_280), |_| 15);
    assert_eq!(score, [1.0 / 16.0, 1.0 / 32.0, 0.0]);
}

#[test]
fn repeating_each_token_scores_one() {
    let task = baseline();
    let score = scores(&task, &test_batch(&task, 128), |read| *read.last().unwrap());
    assert_eq!(score, [1.0; 3]);
}

#[test]
fn figures_are_as_expected() {
    let task = baseline();
    assert_eq!(figure(&task, Split::Test, 100, "scored positions, mean"), (32.0, Some(32.0)));
    assert_eq!(figure(&task, Split::Test, 100, "different answers"), (16.0, Some(16.0)));
    // One example of 31 ids of 1 000 repeats few of them.
    let large = Compression::new(&CompressionConfig::published(1_001, 32, 1), 0).unwrap();
    let (_, expected) = figure(&large, Split::Test, 1, "different answers");
    let want = 1.0 + 1_000.0 * (1.0 - 0.999f64.powi(31));
    assert!((expected.unwrap() - want).abs() < 1e-6);
}

#[test]
fn a_value_that_makes_no_task_is_refused_by_its_key() {
    type Spoil = fn(&mut CompressionConfig);
    let cases: [(&str, Spoil); 4] = [
        ("task.compression.vocab", |c| c.vocab = 1),
        ("task.compression.train[0].length", |c| c.train[0].length = 1),
        ("task.compression.test[0].length", |c| c.test[0].length = 0),
        ("task.compression.test[0].examples", |c| c.test[0].examples = 0),
    ];
    for (want, spoil) in cases {
        let mut config = CompressionConfig::baseline();
        spoil(&mut config);
        assert_eq!(refused(TaskConfig::Compression(config)), want);
    }
}
