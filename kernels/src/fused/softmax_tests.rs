//! Softmax against f64.

use super::*;
use crate::fused::sandbox::{Sandbox, everywhere};
use crate::tests::Rows as Type;
use linattn_oracle::assert_close;

/// Whether row `row` sees key `j`.
fn sees(rows: Rows, row: usize, j: usize) -> bool {
    match rows.seen {
        Seen::All => true,
        Seen::Causal { window } => {
            let own = rows.keys - rows.queries + row % rows.queries;
            j <= own && own - j < window
        }
    }
}

/// Shares of scores, and the gradient of the scores.
fn in_f64(rows: Rows, x: &[f64], d_y: &[f64]) -> [Vec<f64>; 2] {
    let (mut y, mut d_x) = (vec![0.0; x.len()], vec![0.0; x.len()]);
    for row in 0..rows.count {
        let places = || (0..rows.keys).filter(|&j| sees(rows, row, j)).map(|j| row * rows.keys + j);
        let most = places().map(|i| x[i]).fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = places().map(|i| (x[i] - most).exp()).sum();
        places().for_each(|i| y[i] = (x[i] - most).exp() / sum);
        let mean: f64 = places().map(|i| y[i] * d_y[i]).sum();
        places().for_each(|i| d_x[i] = y[i] * (d_y[i] - mean));
    }
    [y, d_x]
}

fn rows_are_right<R: Runtime>(sandbox: &Sandbox<'_, R>, rows: Rows) {
    let client = sandbox.client;
    let mut x = sandbox.draw("x", rows.numbers(), Type::F32);
    // Far from 0, and some rows nearly one key's alone.
    x.iter_mut().for_each(|x| *x = f64::from((*x * 8.0 + 100.0) as f32));
    let d_y = sandbox.draw("d_y", rows.numbers(), Type::F32);
    let [y, d_x] = in_f64(rows, &x, &d_y);
    // What is not seen changes nothing.
    let hidden = |(i, x): (usize, &f64)| match sees(rows, i / rows.keys, i % rows.keys) {
        true => *x,
        false => 1e30,
    };
    let given: Vec<f64> = x.iter().enumerate().map(hidden).collect();
    let given = sandbox.put(&given, Type::F32);
    let got = forward(client, rows, &given).expect("it is taken");
    assert_close(&format!("{rows:?}"), &y, &sandbox.get(&got), 1e-6);
    let on_device = sandbox.put(&d_y, Type::F32);
    let got = backward(client, rows, &got.handle, &on_device).expect("it is taken");
    // Where a row is one key's alone, all but nothing is left of what cancels: errors are held to that too.
    let cancelling = || y.iter().zip(&d_y).map(|(y, d_y)| y * d_y);
    let [want, got] = [d_x, sandbox.get(&got)].map(|x| [x, cancelling().collect()].concat());
    assert_close(&format!("gradient, {rows:?}"), &want, &got, 2e-6);
}

fn all_are_right<R: Runtime>(sandbox: &Sandbox<'_, R>) {
    if sandbox.rows != Type::F32 {
        return;
    }
    // Odd rows and even ones, of a number, of less than a team, of a plane, of more, of a cube and of many turns.
    for (heads, queries, keys) in [
        (1, 1, 1),
        (3, 5, 5),
        (2, 3, 10),
        (2, 33, 33),
        (1, 7, 127),
        (2, 16, 128),
        (1, 3, 1001),
        (1, 2, 4100),
        (1, 2, 8192),
        (9, 96, 100),
        (40, 16, 128),
        (5, 3, 5000),
    ] {
        let windows = [1, 4, keys, keys + 9].map(|window| Seen::Causal { window });
        for seen in windows.into_iter().chain([Seen::All]) {
            rows_are_right(sandbox, Rows { count: heads * queries, queries, keys, seen });
        }
    }
}

fn refusals<R: Runtime>(client: &ComputeClient<R>) {
    let x = client.empty(64);
    let run =
        |count, queries, keys, seen| forward(client, Rows { count, queries, keys, seen }, &x).err();
    let causal = Seen::Causal { window: 4 };
    assert_eq!(run(0, 1, 4, Seen::All), Some(Refusal::Empty { batch: 0, tokens: 4 }));
    let too_wide = Refusal::Width { name: "S", got: 8193, most: WIDEST };
    assert_eq!(run(1, 1, 8193, causal), Some(too_wide));
    let why = run(3, 3, 2, causal).expect("refused").to_string();
    assert!(why.contains("queries that see themselves") && why.contains('2'), "{why}");
    assert!(run(3, 3, 3, Seen::Causal { window: 0 }).is_some());
}

#[test]
fn softmax_and_its_gradient_are_right() {
    crate::tests::on_wgpu::with_client(|client| everywhere(client, all_are_right));
}

#[test]
fn rows_that_are_too_wide_are_refused() {
    crate::tests::on_wgpu::with_client(refusals);
}

#[cfg(feature = "cuda")]
#[test]
fn softmax_and_its_gradient_are_right_on_cuda() {
    crate::tests::on_cuda::with_client(|client| everywhere(client, all_are_right));
}
