use super::*;
use crate::Example;

/// Rows of one scored token each.
fn batch(targets: &[u32]) -> Batch {
    let row = |&target: &u32| Example { input: vec![0], target: vec![Some(target)] };
    Batch::stack(1, targets.iter().map(row))
}

fn metrics(targets: &[u32], predicted: &[u32]) -> Vec<f64> {
    let mut tally = Tally::default();
    add(&batch(targets), predicted, &mut tally);
    let names: Vec<_> = tally.metrics().iter().map(|(name, _)| name.to_string()).collect();
    assert_eq!(names, ["accuracy", "micro_accuracy", "exact"]);
    tally.metrics().into_iter().map(|(_, value)| value).collect()
}

#[test]
fn an_id_that_is_asked_often_weighs_no_more_than_a_rare_one() {
    let all_but_the_rare = metrics(&[3, 3, 3, 5], &[3, 3, 3, 3]);
    assert_eq!(all_but_the_rare, [0.5, 0.75, 0.75]);
}

#[test]
fn a_wrong_answer_that_nobody_is_asked_for_adds_a_zero() {
    assert_eq!(metrics(&[3, 3, 5, 5], &[3, 3, 5, 3])[0], (1.0 + 0.5) / 2.0);
    assert_eq!(metrics(&[3, 3, 5, 5], &[3, 3, 5, 9])[0], (1.0 + 0.5 + 0.0) / 3.0);
}

#[test]
fn rows_are_averaged_128_at_a_time_and_a_short_group_by_its_rows() {
    // 128 rows that ask 1 and 64 that ask 2, all answered with 1.
    let targets: Vec<u32> = (0..192).map(|row| 1 + u32::from(row >= 128)).collect();
    let want = (128.0 * 1.0 + 64.0 * 0.0) / 192.0;
    assert_eq!(metrics(&targets, &[1; 192]), [want, 128.0 / 192.0, 128.0 / 192.0]);
    // Averaged together they would be two ids, one of them always missed.
    assert_eq!(macro_average(&targets, &[1; 192]), 0.5);
}

#[test]
fn batches_of_a_multiple_of_128_rows_score_as_one() {
    let targets: Vec<u32> = (0..300).map(|row| row * row % 7).collect();
    let predicted: Vec<u32> =
        (0..300).map(|row| row * row % 7 + u32::from(row % 11 == 0)).collect();
    let (mut whole, mut parts) = (Tally::default(), Tally::default());
    add(&batch(&targets), &predicted, &mut whole);
    add(&batch(&targets[..256]), &predicted[..256], &mut parts);
    add(&batch(&targets[256..]), &predicted[256..], &mut parts);
    for name in ["accuracy", "micro_accuracy", "exact"] {
        let difference = whole.metric(name).unwrap() - parts.metric(name).unwrap();
        assert!(difference.abs() < 1e-12, "{name}: {difference}");
    }
}

#[test]
fn a_sequence_is_exact_only_if_all_of_it_is_right() {
    let row = |target: [u32; 2]| Example { input: vec![0; 2], target: target.map(Some).into() };
    let batch = Batch::stack(2, [row([1, 2]), row([1, 2])]);
    let mut tally = Tally::default();
    add(&batch, &[1, 2, 1, 1], &mut tally);
    assert_eq!(tally.metric("exact"), Some(0.5));
    assert_eq!(tally.metric("micro_accuracy"), Some(0.75));
}

#[test]
#[should_panic(expected = "the caller predicts every scored position")]
fn a_missing_prediction_is_refused() {
    add(&batch(&[1, 2]), &[1], &mut Tally::default());
}
