//! One token of one head: its rows of every tensor, and the products a state takes part in.

use crate::inputs::{Decay, Inputs};
use std::ops::Range;

/// Token `t` of head `h` in batch row `b`.
#[derive(Clone, Copy)]
pub(crate) struct Token<'a> {
    pub(crate) x: &'a Inputs,
    pub(crate) b: usize,
    pub(crate) t: usize,
    pub(crate) h: usize,
}

impl<'a> Token<'a> {
    /// Where `[B, T, H]` keeps this token.
    pub(crate) fn scalar(self) -> usize {
        (self.b * self.x.dims.tokens + self.t) * self.x.dims.heads + self.h
    }

    /// Where `[B, T, Hk, K]` keeps this token; heads of a group share the place.
    pub(crate) fn keys(self) -> Range<usize> {
        row(self.x.dims.key_row(self.scalar()), self.x.dims.key_width)
    }

    /// Where `[B, T, H, V]` keeps this token.
    pub(crate) fn values(self) -> Range<usize> {
        row(self.scalar(), self.x.dims.value_width)
    }

    /// Where `[B, T, H, K]` keeps this token.
    pub(crate) fn rows(self) -> Range<usize> {
        row(self.scalar(), self.x.dims.key_width)
    }

    /// Where `[H, K]` keeps this head.
    pub(crate) fn head(self) -> Range<usize> {
        row(self.h, self.x.dims.key_width)
    }

    pub(crate) fn q(self) -> &'a [f64] {
        &self.x.q[self.keys()]
    }

    pub(crate) fn k(self) -> &'a [f64] {
        &self.x.k[self.keys()]
    }

    pub(crate) fn v(self) -> &'a [f64] {
        &self.x.v[self.values()]
    }

    /// The share each row of S keeps, `[K]`. Ones where there is no decay: multiplying by exactly
    /// 1 changes no bit, so that a decay of 0 and none at all are the same recurrence.
    pub(crate) fn kept(self) -> Vec<f64> {
        let width = self.x.dims.key_width;
        match &self.x.decay {
            None => vec![1.0; width],
            Some(Decay::Scalar(g)) => vec![g[self.scalar()].exp(); width],
            Some(Decay::Vector(g)) => g[self.rows()].iter().map(|g| g.exp()).collect(),
        }
    }

    /// This token's part of the delta rule.
    pub(crate) fn delta(self, beta: &[f64], erase: Option<&'a Vec<f64>>) -> Delta<'a> {
        let beta = beta[self.scalar()];
        let erase = erase.map_or(self.k(), |erase| &erase[self.rows()]);
        Delta { beta, erase, e: scaled(beta, erase), y: scaled(beta, self.v()) }
    }
}

/// The delta rule at one token: erase row and write value, with and without beta in them.
pub(crate) struct Delta<'a> {
    pub(crate) beta: f64,
    pub(crate) erase: &'a [f64],
    pub(crate) e: Vec<f64>,
    pub(crate) y: Vec<f64>,
}

impl Delta<'_> {
    /// The value to write, `u = y - e S`, `[V]`.
    pub(crate) fn correction(&self, s: &[f64]) -> Vec<f64> {
        let retrieved = read(&self.e, s);
        self.y.iter().zip(retrieved).map(|(y, retrieved)| y - retrieved).collect()
    }
}

fn row(index: usize, width: usize) -> Range<usize> {
    index * width..(index + 1) * width
}

/// `row S`, `[V]`.
pub(crate) fn read(row: &[f64], s: &[f64]) -> Vec<f64> {
    let width = s.len() / row.len();
    let mut retrieved = vec![0.0; width];
    for (x, s) in row.iter().zip(s.chunks_exact(width)) {
        add_scaled(&mut retrieved, *x, s);
    }
    retrieved
}

/// `S value^T`, `[K]`.
pub(crate) fn project(s: &[f64], value: &[f64]) -> Vec<f64> {
    s.chunks_exact(value.len()).map(|s| dot(s, value)).collect()
}

/// `S += row^T value`.
pub(crate) fn write(s: &mut [f64], row: &[f64], value: &[f64]) {
    for (x, s) in row.iter().zip(s.chunks_exact_mut(value.len())) {
        add_scaled(s, *x, value);
    }
}

/// `diag(kept) S`, `[K, V]`.
pub(crate) fn decayed(kept: &[f64], s: &[f64]) -> Vec<f64> {
    let width = s.len() / kept.len();
    s.iter().enumerate().map(|(i, s)| kept[i / width] * s).collect()
}

pub(crate) fn dot(x: &[f64], y: &[f64]) -> f64 {
    x.iter().zip(y).map(|(x, y)| x * y).sum()
}

/// Elementwise product.
pub(crate) fn times(x: &[f64], y: &[f64]) -> Vec<f64> {
    x.iter().zip(y).map(|(x, y)| x * y).collect()
}

pub(crate) fn scaled(by: f64, x: &[f64]) -> Vec<f64> {
    x.iter().map(|x| by * x).collect()
}

pub(crate) fn add(to: &mut [f64], x: &[f64]) {
    add_scaled(to, 1.0, x);
}

pub(crate) fn add_scaled(to: &mut [f64], by: f64, x: &[f64]) {
    for (to, x) in to.iter_mut().zip(x) {
        *to += by * x;
    }
}
