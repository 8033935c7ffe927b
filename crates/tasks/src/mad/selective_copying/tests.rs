use super::super::tests::{
    assert_near, assert_share, examples, figure, refused, scores, test_batch,
};
use super::*;
use crate::TaskConfig;

fn task(length: usize, copy: usize) -> SelectiveCopying {
    let config = SelectiveCopyingConfig::published(16, length, copy, 12_800);
    SelectiveCopying::new(&config, 0).unwrap()
}

#[test]
fn the_worked_example_is_laid_out_as_published() {
    let example = Draws { tokens: vec![4, 0, 9], blanks: vec![2, 1, 2] }.lay_out(16);
    assert_eq!(example.input, [14, 14, 4, 14, 0, 14, 14, 9, 15, 14, 14, 14]);
    let mut target = [None; 12];
    [target[9], target[10], target[11]] = [Some(4), Some(0), Some(9)];
    assert_eq!(example.target, target);
}

#[test]
fn the_tokens_are_asked_for_in_order_after_the_sign_in_training_and_test() {
    for (split, copy) in [(Split::Train, 16), (Split::Test, 16), (Split::Test, 96)] {
        for Example { input, target } in examples(&task(256, copy), split, 50) {
            let (read, written) = input.split_at(256 - copy);
            assert_eq!(read.last(), Some(&15));
            assert!(read[read.len() - 2] < 14, "no blank between the last token and the sign");
            assert!(written.iter().all(|&id| id == 14));
            let tokens: Vec<_> = read.iter().filter(|&&id| id < 14).copied().map(Some).collect();
            assert_eq!(target[256 - copy..], tokens);
            assert!(target[..256 - copy].iter().all(Option::is_none));
        }
    }
}

#[test]
fn blanks_choose_their_tokens_independently_and_evenly() {
    // 5 blanks before 3 tokens: multinomial, so each token has k of them with binomial probability.
    let (mut counts, total) = ([[0; 6]; 3], 30_000);
    for Example { input, .. } in examples(&task(12, 3), Split::Train, total) {
        let blanks = input[..8].split(|&id| id < 14).take(3).map(<[u32]>::len);
        blanks.enumerate().for_each(|(token, blanks)| counts[token][blanks] += 1);
    }
    let choose = [1.0, 5.0, 10.0, 10.0, 5.0, 1.0];
    for (token, blanks) in (0..3).flat_map(|token| (0..6).map(move |blanks| (token, blanks))) {
        let p = choose[blanks] * 2f64.powi(5 - blanks as i32) / 3f64.powi(5);
        let what = format!("{blanks} blanks before token {token}");
        assert_share(&what, counts[token][blanks], total, p, 4.0);
    }
}

#[test]
fn every_token_is_equally_likely() {
    let (mut counts, total) = ([0; 14], 5_000);
    for Example { target, .. } in examples(&task(256, 16), Split::Train, total) {
        target.iter().flatten().for_each(|&id| counts[id as usize] += 1);
    }
    for (id, count) in counts.into_iter().enumerate() {
        assert_share(&format!("id {id}"), count, 16 * total, 1.0 / 14.0, 4.0);
    }
}

#[test]
fn one_and_the_same_token_scores_one_in_fourteen_and_a_blank_nothing() {
    let task = task(256, 16);
    let batch = test_batch(&task, 1_280);
    let [accuracy, micro, exact] = scores(&task, &batch, |_| 3);
    assert!((accuracy - 1.0 / 14.0).abs() < 1e-12, "{accuracy}");
    assert_eq!(exact, 0.0);
    let right = (micro * 20_480.0).round() as u64;
    assert_share("micro", right, 20_480, 1.0 / 14.0, 4.0);
    assert_eq!(scores(&task, &batch, |_| 14), [0.0; 3]);
}

#[test]
fn copying_the_tokens_scores_one() {
    let task = task(256, 16);
    let copy = |read: &[u32]| {
        let written = read.len() - 1 - (256 - 16);
        *read.iter().filter(|&&id| id < 14).nth(written).unwrap()
    };
    assert_eq!(scores(&task, &test_batch(&task, 128), copy), [1.0; 3]);
}

#[test]
fn figures_are_as_expected() {
    let task = task(256, 16);
    assert_eq!(figure(&task, Split::Test, 100, "scored positions, mean"), (16.0, Some(16.0)));
    let (different, expected) = figure(&task, Split::Test, 100, "different answers");
    assert_eq!(different, 14.0);
    assert!((expected.unwrap() - 14.0).abs() < 1e-9);
    let (blanks, expected) =
        figure(&task, Split::Test, 4_000, "blanks before the first token, mean");
    assert_eq!(expected, Some(223.0 / 16.0));
    let sd = (223.0 / 16.0 * (15.0 / 16.0) / 4_000.0f64).sqrt();
    assert_near("blanks", blanks, 223.0 / 16.0, sd, 3.0);
}

#[test]
fn a_value_that_makes_no_task_is_refused_by_its_key() {
    type Spoil = fn(&mut SelectiveCopyingConfig);
    let cases: [(&str, Spoil); 6] = [
        ("task.selective_copying.vocab", |c| c.vocab = 2),
        ("task.selective_copying.train[0].length", |c| c.train[0].length = 3),
        ("task.selective_copying.train[0].copy", |c| c.train[0].copy = 128),
        ("task.selective_copying.test[0].copy", |c| c.test[0].copy = 0),
        ("task.selective_copying.test[0].copy", |c| c.test[0].copy = usize::MAX),
        ("task.selective_copying.test[0].examples", |c| c.test[0].examples = 0),
    ];
    for (want, spoil) in cases {
        let mut config = SelectiveCopyingConfig::baseline();
        spoil(&mut config);
        assert_eq!(refused(TaskConfig::SelectiveCopying(config)), want);
    }
}

#[test]
fn the_most_tokens_to_copy_leave_a_blank() {
    let Example { input, .. } = task(256, 127).example(Split::Test, 0, 0);
    assert_eq!(input[..129].iter().filter(|&&id| id == 14).count(), 1);
    let config = SelectiveCopyingConfig::published(3, 4, 1, 1);
    let smallest = SelectiveCopying::new(&config, 0).unwrap().example(Split::Test, 0, 0);
    assert_eq!(smallest.input, [1, 0, 2, 1]);
    let error = SelectiveCopying::new(&SelectiveCopyingConfig::published(16, 256, 128, 1), 0);
    let want = "`task.selective_copying.train[0].copy` is 128; it has to be between 1 and 127, so \
                that twice that, a sign and a blank fit";
    assert_eq!(error.unwrap_err().to_string(), want);
}
