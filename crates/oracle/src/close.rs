//! When two results count as equal.

/// Root of the mean square.
fn rms(x: impl ExactSizeIterator<Item = f64>) -> f64 {
    let count = x.len().max(1) as f64;
    (x.map(|x| x * x).sum::<f64>() / count).sqrt()
}

/// RMS of `got - want`, and of `want`.
#[track_caller]
fn error_and_size(want: &[f64], got: &[f64]) -> (f64, f64) {
    assert_eq!(want.len(), got.len(), "lengths: wanted, got");
    let error = want.iter().zip(got).map(|(want, got)| got - want);
    (rms(error), rms(want.iter().copied()))
}

/// RMS of the error over RMS of the truth: 0 where nothing differs, even if all is zero; infinite
/// where only the truth is zero; NaN if there is one on either side.
/// # Panics
/// If the lengths differ.
#[track_caller]
pub fn relative_error(want: &[f64], got: &[f64]) -> f64 {
    let (error, size) = error_and_size(want, got);
    if error == 0.0 { 0.0 } else { error / size }
}

/// Panics unless the RMS of the error is at most `limit` times that of the truth, or rounding
/// (1e-12). NaN and infinity are never close, not even to themselves.
/// # Panics
/// Also if the lengths differ.
#[track_caller]
pub fn assert_close(what: &str, want: &[f64], got: &[f64], limit: f64) {
    assert_eq!(want.len(), got.len(), "{what}: lengths, wanted and got");
    let (error, size) = error_and_size(want, got);
    // An infinite truth would allow an infinite error, so finite is asked for first.
    assert!(
        error.is_finite() && error <= limit * size + 1e-12,
        "{what}: error {error:.2e} against {size:.2e}, limit {limit:.0e}; worst {}",
        worst(want, got)
    );
}

/// The entry that differs most, NaN before all.
fn worst(want: &[f64], got: &[f64]) -> String {
    let error = |i: &usize| (got[*i] - want[*i]).abs();
    match (0..want.len()).max_by(|i, j| error(i).total_cmp(&error(j))) {
        Some(i) => format!("at {i}: wanted {:e}, got {:e}", want[i], got[i]),
        None => "nowhere".to_string(),
    }
}
