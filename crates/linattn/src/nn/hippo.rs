//! HiPPO-LegS in the coordinates where it is a diagonal less a product of one vector.
//! ```text
//! A_nk  = -sqrt(2 n + 1) sqrt(2 k + 1) for n > k, -(n + 1) for n = k, 0 above; b_n = sqrt(2 n + 1)
//! A     = S - 1/2 I - p p^T                      p_n = sqrt(n + 1/2), S skew-symmetric
//! S v   = i w v                                  N / 2 pairs of w and -w, v and its conjugate
//! V^* A V = diag(-1/2 + i w) - (V^* p) (V^* p)^*
//! ```
//! -S^2 is symmetric with each w^2 twice. For x of length 1 with -S^2 x = w^2 x, y = S x / w is one too and at right
//! angles to x, and v = (x - i y) / sqrt(2). Source: arXiv 2111.00396, appendix C.

/// One of the N / 2 modes with w above 0; the others are conjugates.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Mode {
    /// w.
    pub(crate) frequency: f64,
    /// Of V^* p.
    pub(crate) p: [f64; 2],
    /// Of V^* b.
    pub(crate) b: [f64; 2],
}

/// The modes of N = 2 `modes` numbers, w from the least to the largest.
pub(crate) fn modes(modes: usize) -> Vec<Mode> {
    let size = 2 * modes;
    let p = |n: usize| (n as f64 + 0.5).sqrt();
    // A + p p^T + I / 2: below the diagonal -2 p_n p_k + p_n p_k.
    let skew = |n: usize, k: usize| p(n) * p(k) * ((n < k) as i32 - (n > k) as i32) as f64;
    let product =
        |f: &dyn Fn(usize) -> f64, row: usize| (0..size).map(|k| skew(row, k) * f(k)).sum::<f64>();
    let square: Vec<Vec<f64>> = (0..size)
        .map(|i| {
            (0..size).map(|j| (0..size).map(|k| skew(k, i) * skew(k, j)).sum::<f64>()).collect()
        })
        .collect();
    let (values, vectors) = symmetric_eigenvectors(square);
    let mut order: Vec<usize> = (0..size).collect();
    order.sort_by(|&a, &b| values[a].total_cmp(&values[b]));
    let mode = |place: usize| {
        let frequency = values[place].max(0.0).sqrt();
        let x = |k: usize| vectors[k][place];
        let y: Vec<f64> = (0..size).map(|row| product(&x, row) / frequency).collect();
        // v^* u of a real u: x . u + i y . u, over sqrt(2).
        let along = |u: &dyn Fn(usize) -> f64| {
            let half = 0.5f64.sqrt();
            let re: f64 = (0..size).map(|k| x(k) * u(k)).sum();
            let im: f64 = (0..size).map(|k| y[k] * u(k)).sum();
            [re * half, im * half]
        };
        Mode { frequency, p: along(&p), b: along(&|n| 2f64.sqrt() * p(n)) }
    };
    order.into_iter().step_by(2).map(mode).collect()
}

/// Eigenvalues, and eigenvectors as columns, of a symmetric matrix: Jacobi's rotations.
fn symmetric_eigenvectors(mut a: Vec<Vec<f64>>) -> (Vec<f64>, Vec<Vec<f64>>) {
    let size = a.len();
    let mut vectors: Vec<Vec<f64>> =
        (0..size).map(|i| (0..size).map(|j| f64::from(u8::from(i == j))).collect()).collect();
    let norm: f64 = a.iter().flatten().map(|x| x * x).sum();
    let off = |a: &[Vec<f64>]| -> f64 {
        (0..size).flat_map(|i| (0..i).map(move |j| (i, j))).map(|(i, j)| a[i][j] * a[i][j]).sum()
    };
    // Each sweep squares what is left, once that is small; 64 are far more than it takes.
    for _ in 0..64 {
        if off(&a) <= 1e-30 * norm {
            break;
        }
        for i in 1..size {
            for j in 0..i {
                rotate(&mut a, &mut vectors, i, j);
            }
        }
    }
    ((0..size).map(|i| a[i][i]).collect(), vectors)
}

/// The rotation of coordinates i and j that makes their entry zero.
fn rotate(a: &mut [Vec<f64>], vectors: &mut [Vec<f64>], i: usize, j: usize) {
    if a[i][j] == 0.0 {
        return;
    }
    let ratio = (a[j][j] - a[i][i]) / (2.0 * a[i][j]);
    let tangent = ratio.signum() / (ratio.abs() + (1.0 + ratio * ratio).sqrt());
    let cos = 1.0 / (1.0 + tangent * tangent).sqrt();
    let sin = tangent * cos;
    let turn = |x: f64, y: f64| (cos * x - sin * y, sin * x + cos * y);
    for row in a.iter_mut().chain(vectors) {
        (row[i], row[j]) = turn(row[i], row[j]);
    }
    // j is below i.
    let (above, below) = a.split_at_mut(i);
    for (x, y) in below[0].iter_mut().zip(&mut above[j]) {
        (*x, *y) = turn(*x, *y);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `x` with `a x = y`, by elimination with pivots.
    fn solve(mut a: Vec<Vec<f64>>, mut y: Vec<f64>) -> Vec<f64> {
        let size = y.len();
        for column in 0..size {
            let pivot = (column..size)
                .max_by(|&i, &j| a[i][column].abs().total_cmp(&a[j][column].abs()))
                .unwrap_or(column);
            a.swap(column, pivot);
            y.swap(column, pivot);
            for row in 0..size {
                if row != column {
                    let factor = a[row][column] / a[column][column];
                    let above = a[column].clone();
                    a[row].iter_mut().zip(above).for_each(|(x, above)| *x -= factor * above);
                    y[row] -= factor * y[column];
                }
            }
        }
        (0..size).map(|i| y[i] / a[i][i]).collect()
    }

    /// `b^T (s - A)^-1 b` tells two systems apart whatever their coordinates.
    #[test]
    fn modes_are_the_matrix_in_other_coordinates() {
        let (half, size) = (8, 16);
        let root = |n: usize| (2.0 * n as f64 + 1.0).sqrt();
        let modes = modes(half);
        for s in [0.1, 1.0, 7.0, 90.0] {
            let legs = |n: usize, k: usize| match n.cmp(&k) {
                std::cmp::Ordering::Greater => root(n) * root(k),
                std::cmp::Ordering::Equal => n as f64 + 1.0 + s,
                std::cmp::Ordering::Less => 0.0,
            };
            let rows = |f: &dyn Fn(usize, usize) -> f64| -> Vec<Vec<f64>> {
                (0..size).map(|i| (0..size).map(|j| f(i, j)).collect()).collect()
            };
            let b: Vec<f64> = (0..size).map(root).collect();
            let want: f64 = solve(rows(&legs), b.clone()).iter().zip(&b).map(|(x, b)| x * b).sum();

            let part = |of: fn(&Mode) -> [f64; 2], i: usize| of(&modes[i % half])[i / half];
            let turned = |i: usize, j: usize| {
                let low_rank = 2.0 * part(|m| m.p, i) * part(|m| m.p, j);
                let block = match (i == j, i % half == j % half) {
                    (true, _) => s + 0.5,
                    (_, true) => modes[i % half].frequency * if i < j { 1.0 } else { -1.0 },
                    _ => 0.0,
                };
                block + low_rank
            };
            let b: Vec<f64> = (0..size).map(|i| part(|m| m.b, i)).collect();
            let solved = solve(rows(&turned), b.clone());
            let got: f64 = 2.0 * solved.iter().zip(&b).map(|(x, b)| x * b).sum::<f64>();
            assert!((got / want - 1.0).abs() < 1e-9, "s = {s}: {got} for {want}");
        }
    }
}
