//! Scales: a range of values, and the places that carry a number.

/// A scale from `low` to `high`; on a logarithmic one these are powers of two.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Axis {
    pub(crate) low: f64,
    high: f64,
    log: bool,
    pub(crate) ticks: Vec<(f64, String)>,
}

impl Axis {
    /// Zero to one, further where values are.
    pub(crate) fn shares(values: impl Iterator<Item = f64> + Clone) -> Self {
        let low = values.clone().fold(0.0, f64::min);
        let high = values.fold(1.0, f64::max);
        let step = nice_step((high - low) / 8.0);
        let ticks = multiples(low, high, step).into_iter().map(|v| (v, decimal(v, step))).collect();
        Self { low, high: high + 0.02 * (high - low), log: false, ticks }
    }

    /// Zero to the largest value; `most` numbers.
    pub(crate) fn counts(values: impl Iterator<Item = f64>, most: f64) -> Self {
        let high = values.fold(1.0, f64::max);
        let step = nice_step(high / most).max(1.0);
        let ticks = multiples(0.0, high, step).into_iter().map(|v| (v, count(v))).collect();
        Self { low: 0.0, high, log: false, ticks }
    }

    /// Over powers of two, for values above zero.
    pub(crate) fn powers(values: impl Iterator<Item = f64> + Clone, most: f64) -> Self {
        let low = values.clone().filter(|v| *v > 0.0).reduce(f64::min).unwrap_or(1.0).log2() - 0.5;
        let high = values.reduce(f64::max).unwrap_or(2.0).max(2.0).log2().max(low) + 0.5;
        let step = ((high - low) / most).ceil().max(1.0);
        let powers = multiples(low, high, step).into_iter();
        let ticks = powers.map(|power| (power.exp2(), bytes(power.exp2()))).collect();
        Self { low, high, log: true, ticks }
    }

    /// Around values of any size.
    pub(crate) fn around(values: impl Iterator<Item = f64> + Clone) -> Self {
        let (low, high) = extent(values);
        let room = match (0.06 * (high - low)).max(0.02 * high.abs()) {
            0.0 => 1.0, // only zeros
            room => room,
        };
        let high = high + room;
        // A loss has a natural end at zero: show it where it is near.
        let low = if low >= 0.0 && low < 0.4 * high { 0.0 } else { low - room };
        let ticks = labelled(low, high, nice_step((high - low) / 5.0));
        Self { low, high, log: false, ticks }
    }

    /// Over decimal logarithms: numbers at the powers of ten, and between them where these are few.
    pub(crate) fn of_logarithms(values: impl Iterator<Item = f64> + Clone) -> Self {
        let (low, high) = extent(values);
        let room = if high > low { 0.04 * (high - low) } else { 0.5 };
        let (low, high) = (low - room, high + room);
        let every = ((high - low) / 6.0).ceil().max(1.0);
        let between: &[f64] =
            if multiples(low, high, every).len() < 4 { &[1.0, 3.0] } else { &[1.0] };
        let ticks = multiples(low.floor(), high, every)
            .into_iter()
            .flat_map(|power| between.iter().map(move |&digit| (power, digit)))
            .map(|(power, digit)| (power + digit.log10(), power_label(power, digit)))
            .filter(|(value, _)| (low..=high).contains(value))
            .collect();
        Self { low, high, log: false, ticks }
    }

    /// The share of the way from one end to the other.
    pub(crate) fn share(&self, value: f64) -> f64 {
        let value = if self.log { value.log2() } else { value };
        (value - self.low) / (self.high - self.low)
    }
}

/// 1, 2 or 5 times a power of ten: `least`, or the next above.
fn nice_step(least: f64) -> f64 {
    let power = 10f64.powf(least.log10().floor());
    let digits = [1.0, 2.0, 5.0].into_iter().find(|digit| digit * power >= least * 0.999);
    digits.unwrap_or(10.0) * power
}

fn multiples(low: f64, high: f64, step: f64) -> Vec<f64> {
    let (first, last) = ((low / step - 1e-9).ceil(), (high / step + 1e-9).floor());
    (0..=(last - first).clamp(0.0, 50.0) as u32)
        .map(|i| (first + f64::from(i)) * step)
        .filter(|v| (low - step * 1e-6..=high + step * 1e-6).contains(v))
        .collect()
}

/// Least and greatest value; 0 and 1 where there is none.
pub(crate) fn extent(values: impl Iterator<Item = f64> + Clone) -> (f64, f64) {
    values.clone().reduce(f64::min).zip(values.reduce(f64::max)).unwrap_or((0.0, 1.0))
}

/// Multiples of `step`, with as many decimals as tell them apart.
fn labelled(low: f64, high: f64, step: f64) -> Vec<(f64, String)> {
    let digits = -step.log10().floor();
    let label = |v: f64| match digits {
        _ if v.abs() < step / 2.0 => "0".to_string(),
        d if d > 5.0 || low.abs().max(high.abs()) >= 1e5 => format!("{v:.1e}"),
        d => format!("{v:.*}", d.max(0.0) as usize),
    };
    multiples(low, high, step).into_iter().map(|v| (v, label(v))).collect()
}

fn power_label(power: f64, digit: f64) -> String {
    match power {
        -3.0..=4.0 => format!("{:.*}", (-power).max(0.0) as usize, digit * 10f64.powf(power)),
        _ => format!("{digit}e{power}"),
    }
}

fn decimal(value: f64, step: f64) -> String {
    let digits = (-step.log10().floor()).max(0.0) as usize;
    if value.abs() < step / 2.0 { "0".into() } else { format!("{value:.digits$}") }
}

/// 800, 1.5k, 20k, 3M.
fn count(value: f64) -> String {
    match value {
        ..1e4 => format!("{value}"),
        ..1e6 => format!("{}k", value / 1e3),
        ..1e9 => format!("{}M", value / 1e6),
        _ => format!("{:.0e}", value),
    }
}

/// 512, 4Ki, 2Mi, 1Gi.
fn bytes(value: f64) -> String {
    let power = (value.log2() / 10.0).floor().clamp(0.0, 4.0);
    let unit = ["", "Ki", "Mi", "Gi", "Ti"][power as usize];
    format!("{}{unit}", value / (10.0 * power).exp2())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_have_few_and_short_labels_at_any_size() {
        for exponent in 0..=15 {
            let high = 3.7 * 10f64.powi(exponent);
            let values = [0.3 * high, high];
            let scales = [
                Axis::counts(values.into_iter(), 9.0),
                Axis::powers(values.into_iter(), 9.0),
                Axis::shares(values.into_iter().map(|v| v / high)),
            ];
            for axis in scales {
                assert!((1..14).contains(&axis.ticks.len()), "{axis:?}");
                let inside = |v: f64| (-1e-9..=1.0 + 1e-9).contains(&axis.share(v));
                assert!(
                    axis.ticks.iter().all(|(v, label)| label.len() <= 8 && inside(*v)),
                    "{axis:?}"
                );
            }
        }
    }

    #[test]
    fn scales_of_losses_have_few_and_short_labels_at_any_size() {
        for exponent in -12..=18 {
            let high = 3.7 * 10f64.powi(exponent);
            let powers = [-3.0, f64::from(exponent.abs())];
            let scales = [
                Axis::around([0.3 * high, high].into_iter()),
                Axis::around([high].into_iter()),
                Axis::of_logarithms(powers.into_iter()),
            ];
            for Axis { low, high, ticks, .. } in scales {
                assert!((2..12).contains(&ticks.len()), "{low} to {high}: {ticks:?}");
                assert!(
                    ticks.iter().all(|(v, label)| label.len() <= 7 && (low..=high).contains(v))
                );
            }
        }
    }

    #[test]
    fn a_scale_of_shares_reaches_below_zero_where_scores_do() {
        assert_eq!(Axis::shares([0.2, 0.9].into_iter()).share(0.0), 0.0);
        assert!(Axis::shares([-0.1, 0.9].into_iter()).share(-0.1) >= 0.0);
    }
}
