//! Selective scans and their gradients against f64 loops.

use super::*;
use linattn_oracle::{Rng, assert_close};

/// B, T, I and N.
const SIZES: [[usize; 4]; 7] = [
    [2, 1, 3, 1],
    [1, 5, 20, 16],
    [2, 9, 5, 4],
    [1, 3, 300, 2],
    [1, 6, 2, 64],
    [2, 17, 17, 16],
    [1, 4, 3, 256],
];

/// So many channels that a unit takes more of a state.
const MANY: [[usize; 4]; 6] = [
    [128, 5, 257, 16],
    [128, 3, 512, 8],
    [16, 2, 512, 64],
    [1, 9, 32768, 16],
    [32, 6, 513, 32],
    [2, 3, 1025, 256],
];

/// One scan in f64, tensors as the module says.
struct Case {
    dims: Dims,
    signed: bool,
    x: Vec<f64>,
    dt: Vec<f64>,
    a: Vec<f64>,
    b: Vec<f64>,
    c: Vec<f64>,
    state: Option<Vec<f64>>,
    d_y: Option<Vec<f64>>,
    d_state: Option<Vec<f64>>,
}

/// x, dt, A, b, c, state.
type Six = [Vec<f64>; 6];

impl Case {
    fn new([batch, tokens, channels, states]: [usize; 4], whole: bool) -> Self {
        let mut rng = Rng::named((tokens * channels + states) as u64, "selective scan");
        let mut draw = |n: usize| (0..n).map(|_| f64::from(rng.normal() as f32)).collect();
        let rows = batch * tokens;
        let (x, b, c) = (draw(rows * channels), draw(rows * states), draw(rows * states));
        let (dt, a): (Vec<f64>, Vec<f64>) = (draw(rows * channels), draw(channels * states));
        let positive = |x: Vec<f64>| x.into_iter().map(|x| f64::from(x.abs() as f32)).collect();
        let (dt, a): (Vec<f64>, Vec<f64>) = (positive(dt), positive(a));
        Self {
            dims: Dims { batch, tokens, channels, states },
            signed: whole,
            x,
            dt,
            a: a.into_iter().map(|a| -a).collect(),
            b,
            c,
            state: whole.then(|| draw(batch * channels * states)),
            d_y: Some(draw(rows * channels)),
            d_state: whole.then(|| draw(batch * channels * states)),
        }
    }

    /// e^{dt A} and the share kept.
    fn kept(&self, row: usize, i: usize, n: usize) -> (f64, f64) {
        let Dims { channels, states, .. } = self.dims;
        let e = (self.dt[row * channels + i] * self.a[i * states + n]).exp();
        (e, if self.signed { 2.0 * e - 1.0 } else { e })
    }

    /// The state before each token and after the last, of one number.
    fn states(&self, sequence: usize, i: usize, n: usize) -> Vec<f64> {
        let Dims { tokens, channels, states, .. } = self.dims;
        let at = (sequence * channels + i) * states + n;
        let mut all = vec![self.state.as_ref().map_or(0.0, |state| state[at])];
        for row in sequence * tokens..(sequence + 1) * tokens {
            let c = row * channels + i;
            let added = self.dt[c] * self.x[c] * self.b[row * states + n];
            all.push(self.kept(row, i, n).1 * all[all.len() - 1] + added);
        }
        all
    }

    /// y, the last state, and the gradients of x, dt, A, b, c and the state.
    fn truth(&self) -> (Vec<f64>, Vec<f64>, Six) {
        let Dims { batch, tokens, channels, states } = self.dims;
        let mut y = vec![0.0; self.x.len()];
        let mut last = vec![];
        let zeros = |x: &Vec<f64>| vec![0.0; x.len()];
        let mut d = [&self.x, &self.dt, &self.a, &self.b, &self.c].map(zeros).to_vec();
        d.push(vec![0.0; batch * channels * states]);
        for s in 0..batch {
            for (i, n) in (0..channels).flat_map(|i| (0..states).map(move |n| (i, n))) {
                let h = self.states(s, i, n);
                let at = (s * channels + i) * states + n;
                last.push(h[tokens]);
                let mut d_h = self.d_state.as_ref().map_or(0.0, |d_state| d_state[at]);
                for t in (0..tokens).rev() {
                    let row = s * tokens + t;
                    let (of_i, of_n) = (row * channels + i, row * states + n);
                    let (x, dt, a) = (self.x[of_i], self.dt[of_i], self.a[i * states + n]);
                    let (b, c) = (self.b[of_n], self.c[of_n]);
                    let d_y = self.d_y.as_ref().map_or(0.0, |d_y| d_y[of_i]);
                    y[of_i] += c * h[t + 1];
                    d_h += d_y * c;
                    let (e, kept) = self.kept(row, i, n);
                    let d_exponent = d_h * h[t] * e * if self.signed { 2.0 } else { 1.0 };
                    d[0][of_i] += d_h * dt * b;
                    d[1][of_i] += d_exponent * a + d_h * x * b;
                    d[2][i * states + n] += d_exponent * dt;
                    d[3][of_n] += d_h * dt * x;
                    d[4][of_n] += d_y * h[t + 1];
                    d_h *= kept;
                }
                d[5][at] = d_h;
            }
        }
        (y, last, d.try_into().expect("six gradients"))
    }
}

fn numbers<R: Runtime>(client: &ComputeClient<R>, buffer: &Buffer) -> Vec<f64> {
    let bytes = client.read_one(buffer.handle.clone()).expect("the kernel ran");
    let four = |b: &[u8]| f64::from(f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
    bytes.chunks_exact(4).map(four).collect()
}

/// Sums over parts, `[parts, numbers]`.
fn summed(parts: Vec<f64>, numbers: usize) -> Vec<f64> {
    let mut sums = vec![0.0; numbers];
    for part in parts.chunks_exact(numbers) {
        sums.iter_mut().zip(part).for_each(|(sum, x)| *sum += x);
    }
    sums
}

fn scans_are_right<R: Runtime>(client: &ComputeClient<R>) {
    let small = SIZES.into_iter().flat_map(|sizes| [(sizes, false), (sizes, true)]);
    for (n, (sizes, whole)) in
        small.chain(MANY.into_iter().zip([true, false, true, false, false, true])).enumerate()
    {
        let mut case = Case::new(sizes, whole);
        if n == 5 {
            case.d_y = None;
        }
        let put = |x: &Vec<f64>| {
            let bytes: Vec<u8> = x.iter().flat_map(|&x| (x as f32).to_le_bytes()).collect();
            client.create_from_slice(&bytes)
        };
        let [of_x, dt, a, b, c] = [&case.x, &case.dt, &case.a, &case.b, &case.c].map(put);
        let [state, d_y, d_state] =
            [&case.state, &case.d_y, &case.d_state].map(|x| x.as_ref().map(put));
        let (state, signed) = (state.as_ref(), case.signed);
        let x = Inputs { x: &of_x, dt: &dt, a: &a, b: &b, c: &c, state, signed };
        let kept = forward(client, case.dims, &x, true).expect("it fits");
        let alone = forward(client, case.dims, &x, false).expect("it fits");
        assert!(alone.h.is_none());
        let h = kept.h.as_ref().expect("it was asked for");
        let [batch, tokens, channels, states] = sizes;
        assert_eq!(h.shape, [batch, tokens.div_ceil(4), channels, states]);
        let given = Given { h: &h.handle, d_y: d_y.as_ref(), d_state: d_state.as_ref() };
        let found = backward(client, case.dims, &x, given).expect("it fits");
        let (y, last, wanted) = case.truth();
        let close = |name: &str, want: &[f64], got: &[f64]| {
            assert_close(&format!("{name} of {sizes:?}, {whole}"), want, got, 2e-6);
        };
        for outputs in [&kept, &alone] {
            close("y", &y, &numbers(client, &outputs.y));
            close("the state", &last, &numbers(client, &outputs.state));
        }
        let [of_x, dt, a, b, c, state] = &wanted;
        close("dx", of_x, &numbers(client, &found.x));
        close("ddt", dt, &numbers(client, &found.dt));
        close("dA", a, &summed(numbers(client, &found.a), a.len()));
        close("db", b, &summed(numbers(client, &found.b), b.len()));
        close("dc", c, &summed(numbers(client, &found.c), c.len()));
        close("dstate", state, &numbers(client, &found.state));
    }
}

#[test]
fn selective_scans_are_right() {
    crate::tests::on_wgpu::with_client(scans_are_right);
}

#[cfg(feature = "cuda")]
#[test]
fn selective_scans_are_right_on_cuda() {
    crate::tests::on_cuda::with_client(scans_are_right);
}

#[test]
fn scans_that_do_not_fit_are_refused() {
    crate::tests::on_wgpu::with_client(|client| {
        let good = Dims { batch: 1, tokens: 2, channels: 3, states: 4 };
        let why = |dims| check(client, dims).expect_err("refused").to_string();
        assert!(why(Dims { states: 3, ..good }).contains("a power of two"));
        assert!(why(Dims { states: 512, ..good }).contains("a power of two"));
        assert!(matches!(check(client, Dims { tokens: 0, ..good }), Err(Refusal::Empty { .. })));
        let far = Dims { tokens: 1 << 31, ..good };
        assert!(why(far).contains("numbers in a tensor"));
        assert_eq!(check(client, good), Ok(()));
    });
}
