//! How well a memory S, `[K, V]`, still answers for every key that was written to it: the mean of
//! `|k S - v|^2 / |v|^2` over all keys, v being the newest value of a key.
//!
//! Each seed is a sequence of a batch. Keys and values have length 1.

use burn::tensor::{Tensor, TensorData};
use linattn::backend::{Flex, FlexDevice};
use linattn::ops::{self, DeltaRuleInputs, LinearAttentionInputs, OpError, OpResult};
use linattn_oracle::Rng;
use std::fmt;

/// K, width of a key.
pub const KEY: usize = 64;
/// V, width of a value.
pub const VALUE: usize = 64;
/// Seeds of a mean.
pub const SEEDS: usize = 32;

/// How a value is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rule {
    /// `S + k^T v`: linear attention.
    Hebb,
    /// `S + k^T (v - k S)`: the delta rule at beta = 1.
    Delta,
}

/// Keys that are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keys {
    /// In any direction, each written once.
    Random,
    /// At right angles to each other, written in turn: from write K + 1 on, a key gets another value.
    Orthogonal,
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Hebb => "Hebb",
            Self::Delta => "delta rule",
        })
    }
}

impl fmt::Display for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Random => "random",
            Self::Orthogonal => "orthogonal",
        })
    }
}

/// Keys and values of one seed, row after row.
#[derive(Debug, Clone)]
pub struct Writes {
    /// `[writes, K]`.
    pub keys: Vec<f64>,
    /// `[writes, V]`.
    pub values: Vec<f64>,
}

impl Writes {
    /// The first `count` writes of a seed.
    pub fn new(seed: u64, kind: Keys, count: usize) -> Self {
        let (mut keys, mut values) = (Rng::named(seed, "keys"), Rng::named(seed, "values"));
        let keys = match kind {
            Keys::Random => (0..count).flat_map(|_| unit(&mut keys, KEY)).collect(),
            Keys::Orthogonal => basis(&mut keys).into_iter().cycle().take(count * KEY).collect(),
        };
        Self { keys, values: (0..count).flat_map(|_| unit(&mut values, VALUE)).collect() }
    }
}

/// A row of length 1 in any direction.
fn unit(rng: &mut Rng, width: usize) -> Vec<f64> {
    scaled((0..width).map(|_| rng.normal()).collect())
}

/// The row, at length 1.
fn scaled(mut row: Vec<f64>) -> Vec<f64> {
    let length = row.iter().map(|x| x * x).sum::<f64>().sqrt();
    row.iter_mut().for_each(|x| *x /= length);
    row
}

/// K rows at right angles, by Gram and Schmidt.
fn basis(rng: &mut Rng) -> Vec<f64> {
    let mut rows: Vec<f64> = vec![];
    while rows.len() < KEY * KEY {
        let mut new = unit(rng, KEY);
        for row in rows.chunks_exact(KEY) {
            let along: f64 = row.iter().zip(&new).map(|(x, y)| x * y).sum();
            new.iter_mut().zip(row).for_each(|(y, x)| *y -= along * x);
        }
        rows.extend(scaled(new));
    }
    rows
}

/// The writes whose values are the newest of their keys, after `count` writes.
pub fn newest(keys: Keys, count: usize) -> std::ops::Range<usize> {
    match keys {
        Keys::Random => 0..count,
        Keys::Orthogonal => count.saturating_sub(KEY)..count,
    }
}

/// The mean error of each of `counts`, which ascend, and of each seed from 0 to `seeds` - 1.
/// # Errors
/// [`OpError`] of the operations.
pub fn errors(
    rule: Rule,
    keys: Keys,
    counts: &[usize],
    seeds: usize,
) -> Result<Vec<Vec<f64>>, OpError> {
    let most = counts.last().copied().unwrap_or(0);
    let writes: Vec<_> = (0..seeds as u64).map(|seed| Writes::new(seed, keys, most)).collect();
    let rows = |width, of: fn(&Writes) -> &[f64]| {
        let values: Vec<f32> = writes.iter().flat_map(of).map(|&x| x as f32).collect();
        let data = TensorData::new(values, [seeds, most, 1, width]);
        Tensor::<Flex, 4>::from_data(data, &FlexDevice)
    };
    let (k, v) = (rows(KEY, |writes| &writes.keys), rows(VALUE, |writes| &writes.values));
    let (mut state, mut done, mut found) = (None, 0, vec![]);
    for &count in counts {
        let new = |x: &Tensor<Flex, 4>| x.clone().narrow(1, done, count - done);
        let next = write(rule, new(&k), new(&v), state)?.1;
        let range = newest(keys, count);
        let read = |x: &Tensor<Flex, 4>| {
            x.clone().narrow(1, range.start, range.len()).swap_dims(1, 2) // [seeds, 1, keys, ..]
        };
        found.push(error(read(&k).matmul(next.clone()), read(&v)));
        (state, done) = (Some(next), count);
    }
    Ok(found)
}

/// Writes to a memory, by the library's operation.
fn write(
    rule: Rule,
    k: Tensor<Flex, 4>,
    v: Tensor<Flex, 4>,
    state: Option<Tensor<Flex, 4>>,
) -> OpResult<Flex> {
    let [seeds, count, ..] = k.dims();
    match rule {
        Rule::Hebb => ops::linear_attention(LinearAttentionInputs::new(k.clone(), k, v), state),
        Rule::Delta => {
            let beta = Tensor::ones([seeds, count, 1], &k.device());
            ops::delta_rule(DeltaRuleInputs::new(k.clone(), k, v, beta), state)
        }
    }
}

/// The mean of `|answer - v|^2 / |v|^2` for each seed.
fn error(answer: Tensor<Flex, 4>, v: Tensor<Flex, 4>) -> Vec<f64> {
    let size = |x: Tensor<Flex, 4>| (x.clone() * x).sum_dim(3);
    let shares = size(answer - v.clone()) / size(v);
    shares.mean_dim(2).into_data().iter::<f64>().collect()
}

/// A line of rows.csv.
#[derive(Debug, Clone, Copy)]
pub struct Row {
    /// How values were written.
    pub rule: Rule,
    /// Under which keys.
    pub keys: Keys,
    /// How many.
    pub writes: usize,
    /// Mean error over seeds, and its standard deviation from one seed to another.
    pub error: [f64; 2],
}

/// Every rule and kind of keys, in the order of drawing.
pub const ALL: [(Rule, Keys); 4] = [
    (Rule::Hebb, Keys::Random),
    (Rule::Hebb, Keys::Orthogonal),
    (Rule::Delta, Keys::Random),
    (Rule::Delta, Keys::Orthogonal),
];

/// The experiment: up to 4 K writes.
/// # Errors
/// [`OpError`] of the operations.
pub fn rows() -> Result<Vec<Row>, OpError> {
    let counts: Vec<usize> = std::iter::once(1).chain((8..=4 * KEY).step_by(8)).collect();
    let mut rows = vec![];
    for (rule, keys) in ALL {
        let found = errors(rule, keys, &counts, SEEDS)?;
        let of =
            |(&writes, errors): (_, &Vec<f64>)| Row { rule, keys, writes, error: spread(errors) };
        rows.extend(counts.iter().zip(&found).map(of));
    }
    Ok(rows)
}

/// Mean and standard deviation.
pub fn spread(values: &[f64]) -> [f64; 2] {
    let count = values.len() as f64;
    let mean = values.iter().sum::<f64>() / count;
    let squares: f64 = values.iter().map(|x| (x - mean).powi(2)).sum();
    [mean, (squares / (count - 1.0)).sqrt()]
}

/// Rows as text, with the expected error of each.
pub fn csv(rows: &[Row]) -> String {
    let line = |&Row { rule, keys, writes, error: [error, sd] }: &Row| {
        let expected = expected(rule, keys, writes);
        format!("{rule},{keys},{writes},{error:.6},{sd:.6},{expected:.6}\n")
    };
    let head = "rule,keys,writes,error,sd,expected\n".to_string();
    head + &rows.iter().map(line).collect::<String>()
}

/// The error that is expected after `count` writes, over all keys and values of length 1.
///
/// A value that was written under another key k' is answered with the share (k k')^2, 1/K for random keys. With the
/// delta rule, a memory of squared size s takes a write as s (1 - 1/K) + 1, and y = |k S|^2 of a key that was written
/// before as y + (s + 2y) / (K (K + 2)) + (1 - 2y) / K, while k S keeps the share 1 - 1/K of its own value.
pub fn expected(rule: Rule, keys: Keys, count: usize) -> f64 {
    let (width, writes) = (KEY as f64, count as f64);
    match (rule, keys) {
        (Rule::Hebb, Keys::Random) => (writes - 1.0) / width,
        (Rule::Hebb, Keys::Orthogonal) => (writes - width).max(0.0) / width,
        (Rule::Delta, Keys::Orthogonal) => 0.0,
        (Rule::Delta, Keys::Random) => {
            let sum: f64 = (1..=count).map(|written| error_of(written, count)).sum();
            sum / writes
        }
    }
}

/// The delta rule's expected error, after `count` writes, of the random key of write number `written`.
fn error_of(written: usize, count: usize) -> f64 {
    let width = KEY as f64;
    let mut size = width * (1.0 - (1.0 - 1.0 / width).powi(written as i32));
    let (mut answer, mut own) = (1.0, 1.0);
    for _ in written..count {
        answer += (size + 2.0 * answer) / (width * (width + 2.0)) + (1.0 - 2.0 * answer) / width;
        size += 1.0 - size / width;
        own *= 1.0 - 1.0 / width;
    }
    1.0 - 2.0 * own + answer
}
