//! The recurrences, backwards: each line of a token's step turned round, last line first.
//!
//! `d_x` is the gradient of the loss with respect to `x`. Two rules do nearly all of it:
//! ```text
//! o = r S       d_r = S d_o^T      d_S += r^T d_o
//! S += r^T w    d_r = d_S w^T      d_w  = r d_S
//! ```

use crate::inputs::{Decay, Inputs, Read, Transition, check_len};
use crate::token::{Token, add, add_scaled, decayed, dot, project, read, scaled, times, write};
use std::ops::Range;

/// Gradients of a loss with respect to each input, in the shape of that input.
#[derive(Debug, Clone, PartialEq)]
pub struct Gradients {
    /// Of the (scaled) queries, `[B, T, Hk, K]`, summed over the heads of a group.
    pub q: Vec<f64>,
    /// Of the keys, `[B, T, Hk, K]`, summed over the heads of a group; where the keys erase, with
    /// their share in that.
    pub k: Vec<f64>,
    /// Of the values, `[B, T, H, V]`.
    pub v: Vec<f64>,
    /// Of the log decay, `[B, T, H]` or `[B, T, H, K]`, if there is one.
    pub g: Option<Vec<f64>>,
    /// Of the delta rule's beta, `[B, T, H]`.
    pub beta: Option<Vec<f64>>,
    /// Of the delta rule's erase rows, `[B, T, H, K]`, if they were given.
    pub erase: Option<Vec<f64>>,
    /// Of the low-rank transition's a, `[B, T, H, K]`.
    pub a: Option<Vec<f64>>,
    /// Of the low-rank transition's b, `[B, T, H, K]`.
    pub b: Option<Vec<f64>>,
    /// Of the bonus, `[H, K]`, if there is one; summed over batch and tokens.
    pub bonus: Option<Vec<f64>>,
    /// Of the states before the first token, `[B, H, K, V]`, also where they were zeros.
    pub state: Vec<f64>,
}

impl Gradients {
    fn zeros(x: &Inputs) -> Self {
        let like = |data: &Vec<f64>| vec![0.0; data.len()];
        let (mut beta, mut erase, mut a, mut b) = (None, None, None, None);
        match &x.transition {
            Transition::Identity => {}
            Transition::Delta { beta: share, erase: rows } => {
                (beta, erase) = (Some(like(share)), rows.as_ref().map(like));
            }
            Transition::LowRank { a: reads, b: writes } => {
                (a, b) = (Some(like(reads)), Some(like(writes)));
            }
        }
        let g = x.decay.as_ref().map(|g| vec![0.0; g.values().len()]);
        let bonus = x.bonus.as_ref().map(like);
        let state = vec![0.0; x.dims.state_len()];
        Self { q: like(&x.q), k: like(&x.k), v: like(&x.v), g, beta, erase, a, b, bonus, state }
    }
}

/// Gradients of a loss whose gradients with respect to what [`forward`](crate::forward) gives are
/// `d_o`, `[B, T, H, V]`, and `d_state`, `[B, H, K, V]`.
///
/// Keeps every state of one head at a time: (T + 1) K V numbers.
/// # Panics
/// If the tensors do not fit together, or there is no such recurrence.
#[track_caller]
pub fn backward(x: &Inputs, d_o: &[f64], d_state: &[f64]) -> Gradients {
    x.check();
    let d = x.dims;
    check_len("d_o", d_o, d.values_len());
    check_len("d_state", d_state, d.state_len());
    let (start, mut grad) = (x.start(), Gradients::zeros(x));
    for (b, h) in d.states() {
        let mut states = vec![start[d.state(b, h)].to_vec()]; // S_0 .. S_T
        for t in 0..d.tokens {
            states.push(Token { x, b, t, h }.advance(&states[t]));
        }
        let mut d_s = d_state[d.state(b, h)].to_vec();
        for t in (0..d.tokens).rev() {
            let token = Token { x, b, t, h };
            let step = Step { token, before: &states[t], after: &states[t + 1] };
            d_s = step.reverse(&d_o[token.values()], d_s, &mut grad);
        }
        grad.state[d.state(b, h)].copy_from_slice(&d_s);
    }
    grad
}

/// A token with the states around it.
struct Step<'a> {
    token: Token<'a>,
    before: &'a [f64],
    after: &'a [f64],
}

/// Gradients of the two states that S_t is made of.
struct StateGradients {
    /// Of S_{t-1}, where it is used undecayed.
    before: Vec<f64>,
    /// Of D_t S_{t-1}. S_t is this and what was written, so it begins as the gradient of S_t.
    kept: Vec<f64>,
}

impl Step<'_> {
    /// The gradient of S_{t-1}, from that of S_t by later tokens, `d_s`, and of o_t.
    fn reverse(&self, d_o: &[f64], d_s: Vec<f64>, grad: &mut Gradients) -> Vec<f64> {
        let mut d = StateGradients { before: vec![0.0; d_s.len()], kept: d_s };
        if self.token.outputs_before() {
            self.output(self.before, d_o, &mut d.before, grad);
            self.bonus(d_o, grad);
        } else {
            self.output(self.after, d_o, &mut d.kept, grad);
        }
        match &self.token.x.transition {
            Transition::Identity => self.plain_write(&d.kept, grad),
            Transition::Delta { beta, erase } => self.delta(beta, erase.as_ref(), &mut d, grad),
            Transition::LowRank { a, b } => {
                self.plain_write(&d.kept, grad);
                self.low_rank(a, b, &mut d, grad);
            }
        }
        self.decay(d, grad)
    }

    /// `o = q S`
    fn output(&self, s: &[f64], d_o: &[f64], d_s: &mut [f64], grad: &mut Gradients) {
        add(&mut grad.q[self.token.keys()], &project(s, d_o));
        write(d_s, self.token.q(), d_o);
    }

    /// `o += (q diag(u) k^T) v`
    fn bonus(&self, d_o: &[f64], grad: &mut Gradients) {
        let token = self.token;
        let Some(bonus) = &token.x.bonus else { return };
        let (q, k, u) = (token.q(), token.k(), &bonus[token.head()]);
        let d_share = dot(d_o, token.v());
        add_scaled(&mut grad.v[token.values()], dot(q, &times(u, k)), d_o);
        add_scaled(&mut grad.q[token.keys()], d_share, &times(u, k));
        add_scaled(&mut grad.k[token.keys()], d_share, &times(u, q));
        add_to(&mut grad.bonus, token.head(), &scaled(d_share, &times(q, k)));
    }

    /// `S += k^T v`
    fn plain_write(&self, d_s: &[f64], grad: &mut Gradients) {
        let token = self.token;
        add(&mut grad.k[token.keys()], &project(d_s, token.v()));
        add(&mut grad.v[token.values()], &read(token.k(), d_s));
    }

    /// `u = beta v - beta erase S`, then `S += k^T u`
    fn delta(
        &self,
        beta: &[f64],
        erase: Option<&Vec<f64>>,
        d: &mut StateGradients,
        grad: &mut Gradients,
    ) {
        let token = self.token;
        let delta = token.delta(beta, erase);
        let kept = decayed(&token.kept(), self.before);
        let (erased, d_erased) = match token.x.read {
            Read::After => (kept.as_slice(), None),
            Read::Before => (self.before, Some(&mut d.before)),
        };
        let u = delta.correction(erased);
        let d_u = read(token.k(), &d.kept);
        add(&mut grad.k[token.keys()], &project(&d.kept, &u));
        // Only now: `d.kept` may be `d_erased`, and was the gradient of S_t until here.
        write(d_erased.unwrap_or(&mut d.kept), &scaled(-1.0, &delta.e), &d_u);

        let d_e = scaled(-1.0, &project(erased, &d_u));
        let d_beta = dot(&d_e, delta.erase) + dot(&d_u, token.v());
        let d_erase = scaled(delta.beta, &d_e);
        add_scaled(&mut grad.v[token.values()], delta.beta, &d_u);
        add_to(&mut grad.beta, token.scalar()..token.scalar() + 1, &[d_beta]);
        match erase {
            Some(_) => add_to(&mut grad.erase, token.rows(), &d_erase),
            None => add(&mut grad.k[token.keys()], &d_erase),
        }
    }

    /// `z = a S_{t-1}`, then `S += b^T z`
    fn low_rank(&self, a: &[f64], b: &[f64], d: &mut StateGradients, grad: &mut Gradients) {
        let rows = self.token.rows();
        let (a, b) = (&a[rows.clone()], &b[rows.clone()]);
        let z = read(a, self.before);
        let d_z = read(b, &d.kept);
        add_to(&mut grad.b, rows.clone(), &project(&d.kept, &z));
        add_to(&mut grad.a, rows, &project(self.before, &d_z));
        write(&mut d.before, a, &d_z);
    }

    /// `D S_{t-1}` with D = diag(exp(g)), whose own gradient it leaves to g: exp is its derivative.
    fn decay(&self, d: StateGradients, grad: &mut Gradients) -> Vec<f64> {
        let token = self.token;
        let kept = token.kept();
        if let Some(decay) = &token.x.decay {
            let rows = times(&decayed(&kept, self.before), &d.kept);
            let d_g: Vec<f64> = rows.chunks_exact(rows.len() / kept.len()).map(sum).collect();
            match decay {
                Decay::Scalar(_) => {
                    add_to(&mut grad.g, token.scalar()..token.scalar() + 1, &[sum(&d_g)]);
                }
                Decay::Vector(_) => add_to(&mut grad.g, token.rows(), &d_g),
            }
        }
        let mut d_before = d.before;
        add(&mut d_before, &decayed(&kept, &d.kept));
        d_before
    }
}

fn sum(x: &[f64]) -> f64 {
    x.iter().sum()
}

/// Adds to a gradient that exists if its input does.
fn add_to(grad: &mut Option<Vec<f64>>, at: Range<usize>, x: &[f64]) {
    if let Some(grad) = grad {
        add(&mut grad[at], x);
    }
}
