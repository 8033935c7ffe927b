//! Retrieval errors of `experiments/one_regression`: the operations against a loop in f64 and against theory.

#[path = "../examples/one_regression/retrieval.rs"]
mod retrieval;

use crate::support::alone;
use linattn_oracle::assert_close;
use retrieval::{
    ALL, KEY, Keys, Rule, SEEDS, VALUE, Writes, csv, errors, expected, newest, rows, spread,
};

/// `k S`.
fn answer(k: &[f64], s: &[f64]) -> Vec<f64> {
    (0..VALUE).map(|j| k.iter().zip(s.chunks(VALUE)).map(|(k, row)| k * row[j]).sum()).collect()
}

/// The mean error of one seed, one write after another.
fn in_a_loop(rule: Rule, keys: Keys, count: usize, seed: u64) -> f64 {
    let writes = Writes::new(seed, keys, count);
    let pairs: Vec<_> = writes.keys.chunks(KEY).zip(writes.values.chunks(VALUE)).collect();
    let mut s = vec![0.0; KEY * VALUE];
    for (k, v) in &pairs {
        let known = match rule {
            Rule::Hebb => vec![0.0; VALUE],
            Rule::Delta => answer(k, &s),
        };
        for (k, row) in k.iter().zip(s.chunks_mut(VALUE)) {
            row.iter_mut().zip(*v).zip(&known).for_each(|((s, v), known)| *s += k * (v - known));
        }
    }
    let range = newest(keys, count);
    let errors = pairs[range.clone()].iter().map(|(k, v)| {
        let size = |x: &[f64]| x.iter().map(|x| x * x).sum::<f64>();
        let off: Vec<f64> = answer(k, &s).iter().zip(*v).map(|(x, v)| x - v).collect();
        size(&off) / size(v)
    });
    errors.sum::<f64>() / range.len() as f64
}

#[test]
fn retrieval_errors_are_those_of_a_loop_in_f64() {
    let _alone = alone();
    let counts = [1, 7, KEY, KEY + 1, 200];
    for (rule, keys) in ALL {
        let found = errors(rule, keys, &counts, 2).unwrap();
        for (&count, found) in counts.iter().zip(&found) {
            let want: Vec<_> =
                (0..2).map(|seed| 1.0 + in_a_loop(rule, keys, count, seed)).collect();
            let found: Vec<_> = found.iter().map(|error| 1.0 + error).collect();
            assert_close(&format!("{rule}, {keys} keys, {count} writes"), &want, &found, 1e-6);
        }
    }
}

#[test]
fn retrieval_errors_are_those_that_theory_expects() {
    let _alone = alone();
    let counts = [2, 16, KEY, 2 * KEY, 4 * KEY];
    for (rule, keys) in ALL {
        let found = errors(rule, keys, &counts, SEEDS).unwrap();
        for (&count, errors) in counts.iter().zip(&found) {
            let ([mean, sd], want) = (spread(errors), expected(rule, keys, count));
            let deviation = sd / (SEEDS as f64).sqrt();
            assert!(
                (mean - want).abs() <= 4.0 * deviation + 1e-9,
                "{rule}, {keys} keys, {count} writes: {mean} +- {deviation}, expected {want}"
            );
        }
    }
}

#[test]
fn keys_at_right_angles_lose_nothing_and_are_overwritten_by_the_delta_rule_alone() {
    let _alone = alone();
    let counts = [1, KEY / 2, KEY, KEY + KEY / 2, 3 * KEY];
    let (hebb, delta) = (Rule::Hebb, Rule::Delta);
    for (rule, exact) in [(hebb, 3), (delta, counts.len())] {
        let found = errors(rule, Keys::Orthogonal, &counts, 4).unwrap();
        assert!(found[..exact].iter().flatten().all(|&error| error < 1e-10), "{rule}: {found:?}");
        assert!(found[exact..].iter().flatten().all(|&error| error > 0.4), "{rule}: {found:?}");
    }
}

#[test]
fn the_rows_of_one_regression_are_what_the_operations_give() {
    let _alone = alone();
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/experiments/one_regression/rows.csv");
    let text = std::fs::read_to_string(path).unwrap();
    let found = csv(&rows().unwrap());
    assert_eq!(found.lines().count(), text.lines().count());
    for (found, kept) in found.lines().zip(text.lines()) {
        for (found, kept) in found.split(',').zip(kept.split(',')) {
            match (found.parse::<f64>(), kept.parse::<f64>()) {
                (Ok(found), Ok(kept)) => assert!((found - kept).abs() < 1e-5, "{found}, {kept}"),
                _ => assert_eq!(found, kept),
            }
        }
    }
}
