//! The recurrences of LSTM and sLSTM and their gradients against f64 loops.

use super::arguments::LOWEST;
use super::*;
use linattn_oracle::{Rng, assert_close};

/// B, T, H and D. Heads on both sides of the widths of a plane, of a cube's units, and of what registers
/// hold; batches that make cubes of one, two and four sequences.
const SIZES: [[usize; 4]; 10] = [
    [1, 1, 1, 1],
    [2, 5, 3, 5],
    [3, 4, 2, 8],
    [2, 9, 1, 33],
    [1, 3, 2, 64],
    [2, 3, 1, 65],
    [1, 2, 1, 130],
    [1, 2, 1, 256],
    [35, 3, 4, 3],
    [67, 3, 4, 6],
];

/// One recurrence in f64, tensors as the module says.
struct Case {
    dims: Dims,
    x: Vec<f64>,
    r: Vec<f64>,
    /// h, c and, of sLSTM, n and m.
    state: Option<Vec<Vec<f64>>>,
    d_h: Vec<f64>,
    /// Of c and, of sLSTM, n.
    d_last: Option<Vec<Vec<f64>>>,
}

/// Everything about a cell and a token that a pass back needs.
#[derive(Clone, Copy, Default)]
struct Numbers {
    h: f64,
    c: f64,
    n: f64,
    m: f64,
    /// i, f, z and o.
    gates: [f64; 4],
}

/// Results by name.
type Found = Vec<(&'static str, Vec<f64>)>;

fn sigmoid(z: f64) -> f64 {
    1.0 / (1.0 + (-z).exp())
}

impl Case {
    fn new(cell: Cell, [batch, tokens, heads, width]: [usize; 4], whole: bool) -> Self {
        let mut rng = Rng::named((tokens * heads + width) as u64, "slstm");
        let mut draw = |count: usize, size: f64| -> Vec<f64> {
            (0..count).map(|_| f64::from((size * rng.normal()) as f32)).collect()
        };
        let dims = Dims { cell, batch, tokens, heads, width };
        let (cells, state) = (dims.cells(), dims.state());
        let x = draw(4 * cells, 1.5);
        let r = draw(dims.weights(), (width as f64).powf(-0.5));
        let written: Vec<f64> = draw(state, 1.0).iter().map(|n| 1.0 + n.abs()).collect();
        let [h, c, m] = [(); 3].map(|()| draw(state, 1.0));
        let d_last = [(); 2].map(|()| draw(state, 1.0));
        let n = written.iter().map(|&n| f64::from(n as f32)).collect();
        Self {
            dims,
            x,
            r,
            state: whole.then(|| Vec::from([h, c, n, m])).map(|x| of_cell(cell, x, 2)),
            d_h: draw(cells, 1.0),
            d_last: whole.then(|| Vec::from(d_last)).map(|x| of_cell(cell, x, 1)),
        }
    }

    /// The cell before the first token.
    fn start(&self, at: usize) -> Numbers {
        match &self.state {
            Some(state) => {
                let of = |which: usize| state.get(which).map_or(0.0, |x| x[at]);
                Numbers { h: of(0), c: of(1), n: of(2), m: of(3), gates: [0.0; 4] }
            }
            None => Numbers { m: f64::from(LOWEST), ..Numbers::default() },
        }
    }

    /// R of a head, from cell `e` to cell `d` of gate `g`.
    fn weight(&self, head: usize, e: usize, g: usize, d: usize) -> f64 {
        let width = self.dims.width;
        self.r[(head * width + e) * 4 * width + g * width + d]
    }

    /// Cells of one head of a sequence before the first token and after each.
    fn head(&self, b: usize, head: usize) -> Vec<Vec<Numbers>> {
        let Dims { tokens, heads, width, .. } = self.dims;
        let first = (b * heads + head) * width;
        let mut all = vec![(0..width).map(|d| self.start(first + d)).collect::<Vec<_>>()];
        for t in 0..tokens {
            let before = &all[t];
            let row = ((b * tokens + t) * heads + head) * 4 * width;
            let next = |d: usize| {
                let gates = std::array::from_fn(|g| {
                    let back = (0..width).map(|e| before[e].h * self.weight(head, e, g, d));
                    self.x[row + g * width + d] + back.sum::<f64>()
                });
                after(self.dims.cell, before[d], gates)
            };
            let next = (0..width).map(next).collect();
            all.push(next);
        }
        all
    }

    /// Outputs and gradients.
    fn truth(&self) -> (Found, Found) {
        let Dims { batch, tokens, heads, width, .. } = self.dims;
        let (cells, state) = (self.dims.cells(), self.dims.state());
        let mut h = vec![0.0; cells];
        let [mut c, mut n, mut m] = [(); 3].map(|()| vec![0.0; state]);
        let mut d_x = vec![0.0; 4 * cells];
        let mut d_state = [(); 3].map(|()| vec![0.0; state]);
        let mut before = vec![0.0; cells];
        for (b, head) in (0..batch).flat_map(|b| (0..heads).map(move |head| (b, head))) {
            let all = self.head(b, head);
            let first = (b * heads + head) * width;
            let place = |t: usize| ((b * tokens + t) * heads + head) * width;
            for d in 0..width {
                for t in 0..tokens {
                    h[place(t) + d] = all[t + 1][d].h;
                    before[((head * batch + b) * tokens + t) * width + d] = all[t][d].h;
                }
                let last = all[tokens][d];
                (c[first + d], n[first + d], m[first + d]) = (last.c, last.n, last.m);
            }
            // Gradients of h, through the gates of the token after, of c and of n.
            let of = |which: usize, d: usize| {
                self.d_last.as_ref().and_then(|x| x.get(which)).map_or(0.0, |x| x[first + d])
            };
            let mut carried: Vec<[f64; 3]> =
                (0..width).map(|d| [0.0, of(0, d), of(1, d)]).collect();
            for t in (0..tokens).rev() {
                let rows: Vec<[f64; 4]> = (0..width)
                    .map(|d| {
                        carried[d][0] += self.d_h[place(t) + d];
                        back(self.dims.cell, all[t][d], all[t + 1][d], &mut carried[d])
                    })
                    .collect();
                for (d, e) in (0..width).flat_map(|d| (0..width).map(move |e| (d, e))) {
                    for (g, x) in rows[d].iter().enumerate() {
                        carried[e][0] += x * self.weight(head, e, g, d);
                    }
                }
                for (d, row) in rows.iter().enumerate() {
                    for (g, x) in row.iter().enumerate() {
                        d_x[4 * place(t) + g * width + d] = *x;
                    }
                }
            }
            for d in 0..width {
                for (to, from) in d_state.iter_mut().zip(carried[d]) {
                    to[first + d] = from;
                }
            }
        }
        let [d_h, d_c, d_n] = d_state;
        let outputs = vec![("h", h), ("c", c), ("n", n), ("m", m)];
        let mut outputs = of_cell(self.dims.cell, outputs, 2);
        outputs.push(("h before", before));
        let gradients = vec![("dx", d_x), ("dh_0", d_h), ("dc_0", d_c), ("dn_0", d_n)];
        (outputs, of_cell(self.dims.cell, gradients, 3))
    }
}

/// What sLSTM has behind what both have.
fn of_cell<T>(cell: Cell, mut all: Vec<T>, both: usize) -> Vec<T> {
    if cell == Cell::Sigmoid {
        all.truncate(both);
    }
    all
}

/// The cell after a token.
fn after(kind: Cell, cell: Numbers, gates: [f64; 4]) -> Numbers {
    let [i, f, z, o] = gates;
    if kind == Cell::Sigmoid {
        let c = sigmoid(f) * cell.c + sigmoid(i) * z.tanh();
        return Numbers { h: sigmoid(o) * c.tanh(), c, gates, ..Numbers::default() };
    }
    let log_keep = -(-f).exp().ln_1p();
    let m = (log_keep + cell.m).max(i);
    let (keep, write) = ((log_keep + cell.m - m).exp(), (i - m).exp());
    let (c, n) = (keep * cell.c + write * z.tanh(), keep * cell.n + write);
    Numbers { h: sigmoid(o) * c / n, c, n, m, gates }
}

/// Gradients of the gates; `carried`, those of h, c and n after the token, becomes those before it, without
/// what comes through the gates.
fn back(kind: Cell, before: Numbers, cell: Numbers, carried: &mut [f64; 3]) -> [f64; 4] {
    let [i, f, z, o] = cell.gates;
    let [d_h, mut d_c, mut d_n] = *carried;
    let (open, z) = (sigmoid(o), z.tanh());
    if kind == Cell::Sigmoid {
        d_c += d_h * open * (1.0 - cell.c.tanh().powi(2));
        *carried = [0.0, d_c * sigmoid(f), 0.0];
        return [
            d_c * z * sigmoid(i) * sigmoid(-i),
            d_c * before.c * sigmoid(f) * sigmoid(-f),
            d_c * sigmoid(i) * (1.0 - z * z),
            d_h * cell.c.tanh() * open * (1.0 - open),
        ];
    }
    let (keep, write) = (sigmoid(f) * (before.m - cell.m).exp(), (i - cell.m).exp());
    d_c += d_h * open / cell.n;
    d_n -= d_h * cell.h / cell.n;
    *carried = [0.0, d_c * keep, d_n * keep];
    [
        (d_c * z + d_n) * write,
        (d_c * before.c + d_n * before.n) * keep * sigmoid(-f),
        d_c * write * (1.0 - z * z),
        d_h * cell.c / cell.n * open * (1.0 - open),
    ]
}

fn numbers<R: Runtime>(client: &ComputeClient<R>, buffer: &Buffer) -> Vec<f64> {
    let bytes = client.read_one(buffer.handle.clone()).expect("the kernel ran");
    let four = |b: &[u8]| f64::from(f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
    bytes.chunks_exact(4).map(four).collect()
}

/// Rows and columns of each block of R swapped.
fn transposed(r: &[f64], width: usize) -> Vec<f64> {
    let (block, columns) = (4 * width * width, 4 * width);
    let swapped = |at: usize| {
        let (head, column, row) = (at / block, at % block / width, at % width);
        r[head * block + row * columns + column]
    };
    (0..r.len()).map(swapped).collect()
}

/// Outputs and gradients of the kernels.
fn computed<R: Runtime>(client: &ComputeClient<R>, case: &Case, keep: bool) -> (Found, Found) {
    let put = |x: &Vec<f64>| {
        let bytes: Vec<u8> = x.iter().flat_map(|&x| (x as f32).to_le_bytes()).collect();
        client.create_from_slice(&bytes)
    };
    let [x, r, r_transposed, d_h] =
        [&case.x, &case.r, &transposed(&case.r, case.dims.width), &case.d_h].map(put);
    let put_all = |all: &Vec<Vec<f64>>| all.iter().map(put).collect::<Vec<_>>();
    let (state, d_last) = (case.state.as_ref().map(put_all), case.d_last.as_ref().map(put_all));
    let state = state.as_deref().map(|state| State {
        h: &state[0],
        c: &state[1],
        scale: (case.dims.cell == Cell::Exponential).then(|| [&state[2], &state[3]]),
    });
    let found = forward(client, case.dims, &Inputs { x: &x, r: &r, state }, keep).expect("it fits");
    let get = |name, buffer: &Buffer| (name, numbers(client, buffer));
    let mut outputs = vec![get("h", &found.h), get("c", &found.c)];
    if let Some([n, m]) = &found.scale {
        outputs.extend([get("n", n), get("m", m)]);
    }
    assert_eq!(found.kept.is_some(), keep);
    let Some(kept) = found.kept else { return (outputs, vec![]) };
    outputs.push(get("h before", &kept.before));
    let given = Given {
        saved: &kept.saved.handle,
        r_transposed: &r_transposed,
        c: state.map(|state| state.c),
        n: state.and_then(|state| Some(state.scale?[0])),
        d_h: Some(&d_h),
        d_c: d_last.as_ref().map(|d| &d[0]),
        d_n: d_last.as_ref().and_then(|d| d.get(1)),
    };
    let d = backward(client, case.dims, given).expect("it fits");
    let mut gradients = vec![get("dx", &d.x), get("dh_0", &d.h), get("dc_0", &d.c)];
    gradients.extend(d.n.as_ref().map(|d| get("dn_0", d)));
    (outputs, gradients)
}

fn recurrences_are_right<R: Runtime>(client: &ComputeClient<R>, cell: Cell) {
    for sizes in SIZES {
        for whole in [false, true] {
            let case = Case::new(cell, sizes, whole);
            let (outputs, gradients) = case.truth();
            let (alone, none) = computed(client, &case, false);
            assert!(none.is_empty());
            let (kept, found) = computed(client, &case, true);
            let close = |want: &Found, got: &Found, limit: f64| {
                for ((name, want), (_, got)) in want.iter().zip(got) {
                    let sizes = format!("{name} of {cell:?}, {sizes:?}, with a state: {whole}");
                    assert_close(&sizes, want, got, limit);
                }
            };
            close(&outputs, &alone, 2e-6);
            close(&outputs, &kept, 2e-6);
            close(&gradients, &found, 5e-6);
            assert_eq!((kept, found), computed(client, &case, true), "the same bits twice");
        }
    }
}

#[test]
fn lstm_recurrences_are_right() {
    crate::tests::on_wgpu::with_client(|client| recurrences_are_right(client, Cell::Sigmoid));
}

#[test]
fn slstm_recurrences_are_right() {
    crate::tests::on_wgpu::with_client(|client| recurrences_are_right(client, Cell::Exponential));
}

#[cfg(feature = "cuda")]
#[test]
fn lstm_and_slstm_recurrences_are_right_on_cuda() {
    crate::tests::on_cuda::with_client(|client| {
        recurrences_are_right(client, Cell::Sigmoid);
        recurrences_are_right(client, Cell::Exponential);
    });
}

#[test]
fn lstm_gates_of_any_size_overflow_nothing() {
    crate::tests::on_wgpu::with_client(|client| {
        for cell in [Cell::Sigmoid, Cell::Exponential] {
            let mut case = Case::new(cell, [2, 7, 2, 5], false);
            case.x.iter_mut().for_each(|x| *x *= 1e3);
            let (outputs, gradients) = computed(client, &case, true);
            for (name, x) in outputs.iter().chain(&gradients) {
                assert!(x.iter().all(|x| x.is_finite()), "{name} of {cell:?}: {x:?}");
            }
        }
    });
}

#[test]
fn lstm_recurrences_that_do_not_fit_are_refused() {
    crate::tests::on_wgpu::with_client(|client| {
        let good = Dims { cell: Cell::Sigmoid, batch: 1, tokens: 2, heads: 3, width: 4 };
        let why = |dims| check(client, dims).expect_err("refused").to_string();
        assert!(why(Dims { width: 257, ..good }).contains("cells of a head"));
        assert!(matches!(check(client, Dims { tokens: 0, ..good }), Err(Refusal::Empty { .. })));
        assert!(why(Dims { tokens: 1 << 31, ..good }).contains("numbers in a tensor"));
        assert_eq!(check(client, good), Ok(()));
    });
}
