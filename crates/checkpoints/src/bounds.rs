//! Lower bounds of forget gates, which published HGRN models learn for all layers together.
//! ```text
//! there   x          [L, D]    s = softmax of x over layers;  b_l = s_1 + .. + s_l, and b_0 = 0
//! ours    p_l        [D]       b_l = sigmoid(p_l) for l > 0:  p_l = ln b_l - ln(1 - b_l)
//! ```
//! The way back is one of many, and rounds; so the checkpoint's own numbers are kept beside a model
//! that came from one, and go back as long as they are still the model's.

/// Our numbers for the layers after the first, each `[D]`, from `[L, D]`.
pub(crate) fn inverse_sigmoids(values: &[f32], layers: usize) -> Vec<Vec<f32>> {
    let width = values.len() / layers.max(1);
    let mut rows = vec![vec![0.0; width]; layers.saturating_sub(1)];
    for d in 0..width {
        let column: Vec<f64> = (0..layers).map(|l| f64::from(values[l * width + d])).collect();
        let top = column.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let shares: Vec<f64> = column.iter().map(|x| (x - top).exp()).collect();
        for (l, row) in rows.iter_mut().enumerate() {
            // 1 - b from the shares that are left, which keeps its small values exact.
            let below: f64 = shares[1..=l + 1].iter().sum();
            let above: f64 = shares[0] + shares[l + 2..].iter().sum::<f64>();
            row[d] = (below.ln() - above.ln()) as f32;
        }
    }
    rows
}

/// `[L, D]` that give these numbers but for rounding; None if a bound does not rise from layer to
/// layer, as theirs always do.
pub(crate) fn joint(rows: &[Vec<f32>]) -> Option<Vec<f32>> {
    let width = rows.first()?.len();
    let mut values = vec![0.0; (rows.len() + 1) * width];
    for d in 0..width {
        let sigmoid = |p: f64| 1.0 / (1.0 + (-p).exp());
        let mut before = 0.0;
        for (l, row) in rows.iter().enumerate() {
            let bound = sigmoid(f64::from(row[d]));
            if bound <= before {
                return None;
            }
            values[(l + 1) * width + d] = (bound - before).ln() as f32;
            before = bound;
        }
        let last = rows.last().map_or(0.0, |row| f64::from(row[d]));
        values[d] = sigmoid(-last).ln() as f32;
    }
    Some(values)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_are_the_running_sums_of_a_softmax() {
        let values = [0.3f32, -1.0, 0.5, 2.0, -0.7, 0.1];
        let rows = inverse_sigmoids(&values, 3);
        let exp: Vec<f64> = [0.3f64, 0.5, -0.7].iter().map(|x| x.exp()).collect();
        let sum: f64 = exp.iter().sum();
        for (l, want) in [(0, exp[1] / sum), (1, (exp[1] + exp[2]) / sum)] {
            let got = 1.0 / (1.0 + (-f64::from(rows[l][0])).exp());
            assert!((got - want).abs() < 1e-6, "{got} and {want}");
        }
    }

    #[test]
    fn there_and_back_is_the_same_but_for_rounding() {
        let rows = inverse_sigmoids(&[0.3, -1.0, 0.5, 2.0, -0.7, 0.1], 3);
        let again = inverse_sigmoids(&joint(&rows).expect("they rise"), 3);
        for (a, b) in rows.iter().flatten().zip(again.iter().flatten()) {
            assert!((a - b).abs() < 1e-5, "{a} and {b}");
        }
        assert_eq!(joint(&[vec![1.0], vec![0.5]]), None);
    }
}
