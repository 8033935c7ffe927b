use std::collections::HashMap;

use super::super::tests::{
    assert_near, assert_share, examples, figure, refused, scores, test_batch,
};
use super::*;
use crate::TaskConfig;

fn task(vocab: u32, length: usize) -> FuzzyInContextRecall {
    let config = FuzzyInContextRecallConfig::published(vocab, length, 12_800);
    FuzzyInContextRecall::new(&config, 0).unwrap()
}

fn motif(ids: &[u32]) -> Motif {
    let all = std::array::from_fn(|i| ids.get(i).copied().unwrap_or(NO_ID));
    Motif { ids: all, length: ids.len() }
}

/// Keys with their values, in the order of an example, without pads. The last value lacks its last
/// token.
fn pairs<'a>(task: &FuzzyInContextRecall, input: &'a [u32]) -> Vec<(&'a [u32], &'a [u32])> {
    let keys = task.motifs.keys;
    let input = &input[leading(input, task.motifs.pad)..];
    let runs: Vec<_> = input.chunk_by(|&a, &b| (a < keys) == (b < keys)).collect();
    runs.chunks(2).map(|pair| (pair[0], *pair.get(1).unwrap_or(&&[][..]))).collect()
}

// --- layout

fn worked_example() -> Draws {
    let probe = Pair { key: motif(&[2, 5, 0]), value: motif(&[9, 11]) };
    let other = Pair { key: motif(&[1, 4, 6]), value: motif(&[8]) };
    Draws { pairs: vec![probe, other], order: vec![1, 0, 1] }
}

#[test]
fn the_worked_example_is_laid_out_as_published() {
    let example = worked_example().lay_out(15, 24, Split::Test);
    let mut input = vec![15; 7];
    input.extend([1, 4, 6, 8, 2, 5, 0, 9, 11, 1, 4, 6, 8, 2, 5, 0, 9]);
    assert_eq!(example.input, input);
    let mut target = [None; 24];
    (target[18], target[22], target[23]) = (Some(8), Some(9), Some(11));
    assert_eq!(example.target, target);
    assert_eq!(worked_example().lay_out(15, 24, Split::Validation), example);
}

#[test]
fn training_asks_for_every_next_token_also_for_pads() {
    let example = worked_example().lay_out(15, 24, Split::Train);
    let mut next = example.input[1..].to_vec();
    next.push(11);
    assert_eq!(example.target, next.into_iter().map(Some).collect::<Vec<_>>());
    assert_eq!(example.target[5], Some(15));
}

#[test]
fn a_probe_that_was_never_shown_is_asked_for_all_the_same() {
    let draws = Draws { order: vec![1, 1], ..worked_example() };
    let example = draws.lay_out(15, 15, Split::Test);
    let input = [15, 15, 15, 1, 4, 6, 8, 1, 4, 6, 8, 2, 5, 0, 9];
    assert_eq!(example.input, input);
    let asked: Vec<_> = (0..15).filter(|&t| example.target[t].is_some()).collect();
    assert_eq!(asked, [9, 13, 14]);
}

#[test]
fn a_test_asks_for_values_of_keys_shown_before_and_for_the_probe() {
    for task in [task(16, 128), task(16, 1024), task(7, 64)] {
        for Example { input, target } in examples(&task, Split::Test, 100) {
            let mut shown = HashMap::new();
            let mut t = leading(&input, task.motifs.pad);
            let pairs = pairs(&task, &input);
            let last = pairs.len() - 1;
            for (i, (key, value)) in pairs.into_iter().enumerate() {
                t += key.len();
                let again = shown.insert(key, value).is_some() || i == last;
                for (j, &id) in value.iter().enumerate() {
                    assert_eq!(target[t + j - 1], again.then_some(id), "token {j} of pair {i}");
                }
                assert!((t - key.len()..t).skip(1).all(|t| target[t - 1].is_none()));
                t += value.len();
            }
            assert!(target[input.len() - 1].is_some(), "the probe's last token");
        }
    }
}

// --- distribution

#[test]
fn motifs_are_uniform_over_tuples_of_different_ids() {
    let mut rng = example_rng(*b"a motif\0", 0, Split::Train, 0, 0);
    let (mut counts, total) = (HashMap::new(), 60_000);
    for _ in 0..total {
        let ids: Vec<_> = Motif::draw(&mut rng, 7..11, 3..4).ids().to_vec();
        *counts.entry(ids).or_insert(0) += 1;
    }
    assert_eq!(counts.len(), 24);
    for (ids, count) in counts {
        assert!(ids[0] != ids[1] && ids[0] != ids[2] && ids[1] != ids[2]);
        assert_share(&format!("{ids:?}"), count, total, 1.0 / 24.0, 4.0);
    }
}

#[test]
fn keys_are_of_any_length_in_training_and_of_the_longest_in_a_test() {
    let task = task(16, 128);
    let (mut keys, mut values) = ([0u64; 4], [0u64; 4]);
    for Example { input, .. } in examples(&task, Split::Train, 20_000) {
        let (key, value) = pairs(&task, &input)[0];
        keys[key.len()] += 1;
        values[value.len()] += 1;
    }
    for length in 1..=3 {
        assert_share(&format!("keys of {length}"), keys[length], 20_000, 1.0 / 3.0, 4.0);
        assert_share(&format!("values of {length}"), values[length], 20_000, 1.0 / 3.0, 4.0);
    }
    for Example { input, .. } in examples(&task, Split::Test, 200) {
        assert!(pairs(&task, &input).iter().all(|(key, _)| key.len() == 3));
    }
}

#[test]
fn a_key_keeps_its_value_through_a_sequence() {
    // V = 7: six keys of three tokens, so nearly all come again.
    let task = task(7, 128);
    for Example { input, target } in examples(&task, Split::Test, 200) {
        let mut values: HashMap<&[u32], &[u32]> = HashMap::new();
        let mut pairs = pairs(&task, &input);
        let (probe, start) = pairs.pop().unwrap();
        for (key, value) in pairs {
            assert_eq!(*values.entry(key).or_insert(value), value);
        }
        let answer = [start, &[target[127].unwrap()]].concat();
        assert!(values.get(probe).is_none_or(|value| *value == answer));
    }
}

#[test]
fn pads_are_two_to_seven_and_each_number_occurs() {
    for split in [Split::Train, Split::Test] {
        let task = task(16, 128);
        assert_eq!(figure(&task, split, 5_000, "pads, fewest"), (2.0, Some(2.0)));
        assert_eq!(figure(&task, split, 5_000, "pads, most"), (7.0, Some(7.0)));
        let mut counts = [0; 8];
        for Example { input, .. } in examples(&task, split, 5_000) {
            counts[leading(&input, 15)] += 1;
        }
        assert!(counts[2..].iter().all(|&count| count > 0), "{split:?}: {counts:?}");
        assert_eq!(counts[..2], [0, 0]);
    }
}

#[test]
fn a_test_of_the_baseline_is_as_a_separate_implementation_counted_it() {
    let (task, count) = (task(16, 128), 50_000);
    let (scored, expected) = figure(&task, Split::Test, count, "scored positions, mean");
    assert_eq!(expected, Some(4.395));
    // 2.35 is the standard deviation of one sequence; the other count was over a million.
    let error = |sd: f64| sd * (1.0 / count as f64 + 1e-6).sqrt();
    assert_near("scored", scored, 4.395, error(2.35), 3.0);
    let (never, expected) = figure(&task, Split::Test, count, "share of probes never shown");
    assert_eq!(expected, Some(0.0229));
    assert_near("never shown", never, 0.0229, error((0.0229f64 * 0.9771).sqrt()), 3.0);
}

/// The last pair starts j tokens before the end with probability P(length >= j)/5, where lengths are
/// 4, 5 or 6. Of the places where the probe may be due, j + 1, j or j - 1 come after that start, for
/// probes of 4, 5 and 6 tokens. Of 238 266 keys hardly one is the probe's by chance.
#[test]
fn a_probe_is_never_shown_where_it_is_due_after_the_last_pair() {
    let starts = [1.0, 1.0, 1.0, 1.0, 2.0 / 3.0, 1.0 / 3.0].into_iter().enumerate();
    let j: f64 = starts.map(|(i, p)| (i + 1) as f64 * p / 5.0).sum();
    let expected = ((j + 1.0) / 120.0 + j / 118.0 + (j - 1.0) / 116.0) / 3.0;
    let (task, count) = (task(128, 128), 50_000);
    let (never, _) = figure(&task, Split::Test, count, "share of probes never shown");
    let sd = (expected * (1.0 - expected) / count as f64).sqrt();
    assert_near("never shown", never, expected, sd, 3.0);
}

#[test]
fn only_a_test_of_the_baseline_has_counted_figures() {
    let name = "share of probes never shown";
    assert_eq!(figure(&task(16, 256), Split::Test, 1, name).1, None);
    assert_eq!(figure(&task(16, 128), Split::Train, 1, name).1, None);
    let scored = "scored positions, mean";
    assert_eq!(figure(&task(16, 256), Split::Test, 1, scored).1, None);
    assert_eq!(figure(&task(16, 256), Split::Train, 9, scored), (256.0, Some(256.0)));
}

/// The probe is due uniformly, so where it is shown early it is shown before many pairs.
#[test]
fn the_probe_is_due_anywhere() {
    let (task, count) = (task(128, 128), 20_000);
    let (mut first, mut total) = (0, 0);
    for Example { input, .. } in examples(&task, Split::Test, count) {
        let pairs = pairs(&task, &input);
        let probe = pairs[pairs.len() - 1].0;
        first += u64::from(pairs[0].0 == probe);
        total += 1;
    }
    // It comes first only if due at 0, for 238 266 keys hardly ever repeat: the mean of 1/(L - 2P)
    // over P of 4, 5 and 6.
    let p = (1.0 / 120.0 + 1.0 / 118.0 + 1.0 / 116.0) / 3.0;
    assert_share("probe first", first, total, p, 4.0);
}

// --- score

/// The next token of the last value as it was shown before, or the pad where it was not.
fn look_up(task: &FuzzyInContextRecall, read: &[u32]) -> u32 {
    let mut pairs = pairs(task, read);
    let (key, start) = pairs.pop().unwrap();
    let shown = pairs.into_iter().find(|pair| pair.0 == key);
    shown.map_or(task.motifs.pad, |(_, value)| value[start.len()])
}

#[test]
fn a_dictionary_answers_everything_but_the_probes_never_shown() {
    for task in [task(16, 128), task(16, 13), task(32, 256)] {
        let batch = test_batch(&task, 1_280);
        let [_, micro, exact] = scores(&task, &batch, |read| look_up(&task, read));
        let mut answerable = 0;
        let mut unanswerable_tokens = 0;
        for Example { input, target } in examples(&task, Split::Test, 1_280) {
            if task.motifs.is_answerable(&input) {
                answerable += 1;
            } else {
                let probe = pairs(&task, &input).last().unwrap().1.len() + 1;
                assert!(target[input.len() - probe..].iter().all(Option::is_some));
                unanswerable_tokens += probe;
            }
        }
        assert!(answerable < 1_280);
        assert_eq!(exact, f64::from(answerable) / 1_280.0);
        let scored = batch.scored.len();
        assert_eq!(micro, (scored - unanswerable_tokens) as f64 / scored as f64);
    }
}

#[test]
fn one_and_the_same_value_token_scores_one_in_eight_and_a_pad_nothing() {
    let task = task(16, 128);
    let batch = test_batch(&task, 1_280);
    let [accuracy, micro, _] = scores(&task, &batch, |_| 9);
    assert_eq!(accuracy, 1.0 / 8.0);
    // Values of up to three tokens, asked mostly once: correlated no more than by exclusion.
    let sd = (7.0 / 64.0 / batch.scored.len() as f64).sqrt();
    assert_near("micro", micro, 1.0 / 8.0, sd, 4.0);
    assert_eq!(scores(&task, &batch, |_| 15), [0.0; 3]);
}

// --- config

#[test]
fn no_example_scores_more_positions_than_promised() {
    for (vocab, key_motif, value_motif) in [(3, 1, 1), (4, 1, 2), (9, 1, 4), (9, 4, 1), (7, 3, 3)] {
        let length = 2 * (key_motif + value_motif) + 9;
        let config = FuzzyInContextRecallConfig {
            key_motif,
            value_motif,
            ..FuzzyInContextRecallConfig::published(vocab, length, 1)
        };
        let task = FuzzyInContextRecall::new(&config, 0).unwrap();
        let scored = |example: Example| example.target.iter().flatten().count();
        let most = examples(&task, Split::Test, 2_000).map(scored).max().unwrap();
        let promised = task.sets(Split::Test)[0].scored;
        assert!(most <= promised, "{vocab} {key_motif} {value_motif}: {most} of {promised}");
        assert!(examples(&task, Split::Train, 200).map(scored).all(|scored| scored == length));
    }
}

#[test]
fn a_value_that_makes_no_task_is_refused_by_its_key() {
    type Spoil = fn(&mut FuzzyInContextRecallConfig);
    let cases: [(&str, Spoil); 7] = [
        ("task.fuzzy_in_context_recall.vocab", |c| c.vocab = 6),
        ("task.fuzzy_in_context_recall.vocab", |c| {
            (c.vocab, c.key_motif, c.value_motif) = (7, 1, 4)
        }),
        ("task.fuzzy_in_context_recall.key_motif", |c| c.key_motif = 0),
        ("task.fuzzy_in_context_recall.key_motif", |c| c.key_motif = 5),
        ("task.fuzzy_in_context_recall.value_motif", |c| c.value_motif = usize::MAX),
        ("task.fuzzy_in_context_recall.train[0].length", |c| c.train[0].length = 12),
        ("task.fuzzy_in_context_recall.test[0].examples", |c| c.test[0].examples = 0),
    ];
    for (want, spoil) in cases {
        let mut config = FuzzyInContextRecallConfig::baseline();
        spoil(&mut config);
        assert_eq!(refused(TaskConfig::FuzzyInContextRecall(config)), want);
    }
    assert!(FuzzyInContextRecall::new(&FuzzyInContextRecallConfig::published(7, 13, 1), 0).is_ok());
}
