//! A recurrence with a matrix for a state, as backends get it: which one it is, its tensors, and its results.

use super::error::OpError;
use super::lengths::SequenceLengths;
use burn::tensor::{Shape, TensorMetadata};
#[cfg(feature = "fusion")]
use std::sync::{Mutex, PoisonError};
#[cfg(feature = "cubecl")]
use std::{any::Any, sync::Arc};

/// Which state is read: the one after this token's decay, or the one before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Read {
    /// Outputs see this token's write, and a delta rule corrects the value retrieved from the decayed state.
    #[default]
    After,
    /// The state as the last token left it: linear attention's output is taken from there, as in
    /// RWKV-6 (arXiv 2404.05892), and a delta rule corrects the value retrieved from it, as in Comba (arXiv
    /// 2506.02475), whose output stays after the write.
    Before,
}

/// Log decay of the state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogDecay<T> {
    /// One number a token and head, `[B, T, H]`.
    Scalar(T),
    /// One number for each row of the state, `[B, T, H, K]`.
    Vector(T),
}

impl<T> LogDecay<T> {
    /// The same with `f` of the tensor.
    pub fn map<U>(self, f: impl FnOnce(T) -> U) -> LogDecay<U> {
        match self {
            Self::Scalar(g) => LogDecay::Scalar(f(g)),
            Self::Vector(g) => LogDecay::Vector(f(g)),
        }
    }

    /// The same with a reference to the tensor.
    pub fn as_ref(&self) -> LogDecay<&T> {
        match self {
            Self::Scalar(g) => LogDecay::Scalar(g),
            Self::Vector(g) => LogDecay::Vector(g),
        }
    }

    /// The tensor.
    pub fn into_inner(self) -> T {
        let (Self::Scalar(g) | Self::Vector(g)) = self;
        g
    }
}

/// Change of the state by a token, besides decay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transition<T> {
    /// Adds `k^T v`.
    Identity {
        /// The state that the output is taken from.
        read: Read,
    },
    /// Adds `beta k^T (v - e S)`: a delta rule.
    Delta {
        /// Share of the error to correct, `[B, T, H]`.
        beta: T,
        /// Erase keys e, `[B, T, H, K]`; the keys if absent.
        erase: Option<T>,
        /// The state that the erase key reads. The output is taken after the write.
        read: Read,
    },
    /// Adds `k^T v + b^T (a S)`, S being the state before its decay.
    LowRank {
        /// Rows that read the state, `[B, T, H, K]`.
        a: T,
        /// Rows under which the retrieved value is written, `[B, T, H, K]`.
        b: T,
    },
}

impl<T> Transition<T> {
    /// The same with `f` of every tensor.
    pub fn map<U>(self, mut f: impl FnMut(T) -> U) -> Transition<U> {
        match self {
            Self::Identity { read } => Transition::Identity { read },
            Self::Delta { beta, erase, read } => {
                Transition::Delta { erase: erase.map(&mut f), beta: f(beta), read }
            }
            Self::LowRank { a, b } => Transition::LowRank { a: f(a), b: f(b) },
        }
    }

    /// The same with references to the tensors.
    pub fn as_ref(&self) -> Transition<&T> {
        match self {
            Self::Identity { read } => Transition::Identity { read: *read },
            Self::Delta { beta, erase, read } => {
                Transition::Delta { beta, erase: erase.as_ref(), read: *read }
            }
            Self::LowRank { a, b } => Transition::LowRank { a, b },
        }
    }
}

/// Sizes of a recurrence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dims {
    /// B, rows of the batch.
    pub batch: usize,
    /// B, or N sequences in one row, with lengths of their own.
    pub sequences: usize,
    /// T, tokens of a sequence.
    pub tokens: usize,
    /// Hk, heads of queries and keys.
    pub key_heads: usize,
    /// H, heads of values, a multiple of `key_heads`.
    pub heads: usize,
    /// K, width of a key.
    pub key_width: usize,
    /// V, width of a value.
    pub value_width: usize,
}

impl Dims {
    /// Of q and k.
    pub fn keys_shape(&self) -> [usize; 4] {
        [self.batch, self.tokens, self.key_heads, self.key_width]
    }

    /// Of v and o.
    pub fn values_shape(&self) -> [usize; 4] {
        [self.batch, self.tokens, self.heads, self.value_width]
    }

    /// Of beta and a scalar decay.
    pub fn scalars_shape(&self) -> [usize; 3] {
        [self.batch, self.tokens, self.heads]
    }

    /// Of erase keys, a, b and a vector decay.
    pub fn rows_shape(&self) -> [usize; 4] {
        [self.batch, self.tokens, self.heads, self.key_width]
    }

    /// Of the states of all sequences.
    pub fn state_shape(&self) -> [usize; 4] {
        [self.sequences, self.heads, self.key_width, self.value_width]
    }
}

/// One recurrence over some tokens, or the gradients of its tensors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Recurrence<T> {
    /// Queries, `[B, T, Hk, K]`.
    pub q: T,
    /// Keys, `[B, T, Hk, K]`.
    pub k: T,
    /// Values, `[B, T, H, V]`.
    pub v: T,
    /// Decay; all is kept if absent.
    pub decay: Option<LogDecay<T>>,
    /// The rest of what a token does to the state.
    pub transition: Transition<T>,
    /// State before the first token, `[B, H, K, V]`, or `[N, H, K, V]` of N sequences in one row; zeros if absent.
    pub state: Option<T>,
    /// Lengths of sequences that lie one after another in one row: B is 1. Else a row is a sequence.
    pub lengths: Option<SequenceLengths>,
}

impl<T> Recurrence<T> {
    /// The same with `f` of every tensor.
    pub fn map<U>(self, mut f: impl FnMut(T) -> U) -> Recurrence<U> {
        Recurrence {
            q: f(self.q),
            k: f(self.k),
            v: f(self.v),
            decay: self.decay.map(|g| g.map(&mut f)),
            transition: self.transition.map(&mut f),
            state: self.state.map(f),
            lengths: self.lengths,
        }
    }

    /// The same with references to the tensors.
    pub fn as_ref(&self) -> Recurrence<&T> {
        Recurrence {
            q: &self.q,
            k: &self.k,
            v: &self.v,
            decay: self.decay.as_ref().map(LogDecay::as_ref),
            transition: self.transition.as_ref(),
            state: self.state.as_ref(),
            lengths: self.lengths.clone(),
        }
    }

    /// The tensors as a list, and the place of each in it: for what knows lists alone, such as a graph.
    pub fn into_list(self) -> (Recurrence<usize>, Vec<T>) {
        let mut list = vec![];
        let places = self.map(|x| {
            list.push(x);
            list.len() - 1
        });
        (places, list)
    }

    /// Each tensor beside that of `other` in its place.
    /// # Panics
    /// If one of the two has a tensor that the other has not.
    pub fn zip<U>(self, other: Recurrence<U>) -> Recurrence<(T, U)> {
        let (places, others) = other.into_list();
        let (own, list) = self.into_list();
        assert_eq!(own, places, "tensors of one recurrence");
        let mut pairs = list.into_iter().zip(others);
        own.map(|_| pairs.next().expect("a pair for each place"))
    }
}

impl Recurrence<usize> {
    /// The tensors of a list, each in the place that [`Recurrence::into_list`] found.
    /// # Panics
    /// If the list is shorter than that one.
    pub fn fill<U>(self, list: Vec<U>) -> Recurrence<U> {
        let mut list: Vec<Option<U>> = list.into_iter().map(Some).collect();
        self.map(|place| list[place].take().expect("each place once"))
    }
}

impl<T: TensorMetadata> Recurrence<T> {
    /// The sizes, by those of q and v.
    pub fn dims(&self) -> Dims {
        let (q, v) = (self.q.shape(), self.v.shape());
        Dims {
            batch: q[0],
            sequences: self.lengths.as_ref().map_or(q[0], SequenceLengths::count),
            tokens: q[1],
            key_heads: q[2],
            heads: v[2],
            key_width: q[3],
            value_width: v[3],
        }
    }

    /// The tensors beside q, each with its name in the operation and the shape that it has to have.
    fn shapes(&self) -> Vec<(&'static str, &T, Shape)> {
        let dims = self.dims();
        let (scalars, rows) = (Shape::from(dims.scalars_shape()), Shape::from(dims.rows_shape()));
        let of_keys = ("k", &self.k, Shape::from(dims.keys_shape()));
        let mut list = vec![of_keys, ("v", &self.v, Shape::from(dims.values_shape()))];
        match &self.transition {
            Transition::Identity { .. } => {}
            Transition::Delta { beta, erase, .. } => {
                list.extend(erase.as_ref().map(|erase| ("erase", erase, rows.clone())));
                list.push(("beta", beta, scalars.clone()));
            }
            Transition::LowRank { a, b } => {
                list.extend([("a", a, rows.clone()), ("b", b, rows.clone())]);
            }
        }
        list.extend(self.decay.as_ref().map(|decay| match decay {
            LogDecay::Scalar(g) => ("g", g, scalars),
            LogDecay::Vector(g) => ("g", g, rows),
        }));
        list.extend(
            self.state.as_ref().map(|state| ("state", state, Shape::from(dims.state_shape()))),
        );
        list
    }

    /// Whether the tensors go together.
    pub(super) fn check(&self, op: &'static str) -> Result<(), OpError> {
        for (tensor, x) in [("q", &self.q), ("v", &self.v)] {
            let got = x.shape().to_vec();
            if got.contains(&0) {
                return Err(OpError::Empty { op, tensor, got });
            }
        }
        let Dims { batch, tokens, key_heads, heads, .. } = self.dims();
        if !heads.is_multiple_of(key_heads) {
            return Err(OpError::Heads { op, heads, key_heads });
        }
        if let Some(lengths) = &self.lengths {
            lengths.check(op, batch, tokens)?;
        }
        match self.shapes().into_iter().find(|(_, x, want)| x.shape() != *want) {
            Some((tensor, x, want)) => {
                let (got, want) = (x.shape().to_vec(), want.to_vec());
                Err(OpError::Shape { op, tensor, got, want })
            }
            None => Ok(()),
        }
    }
}

/// Saved tensors: those that the forward pass keeps for the backward pass. Which, and how they lie, is
/// the backend's own affair. Empty if nothing was to be kept.
#[derive(Debug, Clone)]
pub struct Saved<T> {
    /// The tensors.
    pub tensors: Vec<T>,
    /// The plan of kernels, or all that the backend inside a fused stream saved.
    #[cfg(feature = "cubecl")]
    pub hidden: Option<Hidden>,
}

impl<T> Default for Saved<T> {
    fn default() -> Self {
        Self::from(vec![])
    }
}

impl<T> From<Vec<T>> for Saved<T> {
    fn from(tensors: Vec<T>) -> Self {
        Self {
            tensors,
            #[cfg(feature = "cubecl")]
            hidden: None,
        }
    }
}

/// Something of a type that only the backend who kept it knows.
#[cfg(feature = "cubecl")]
#[derive(Debug, Clone)]
pub struct Hidden(pub(super) Arc<dyn Any + Send + Sync>);

#[cfg(feature = "cubecl")]
impl Hidden {
    /// The `T` that was put in, if it was one.
    pub(super) fn get<T: Send + Sync + 'static>(&self) -> Option<&T> {
        self.0.downcast_ref()
    }

    /// Takes out what was put in, an `Arc<Mutex<Option<T>>>`.
    #[cfg(feature = "fusion")]
    pub(super) fn take<T: Send + 'static>(&self) -> T {
        let slot = self.0.downcast_ref::<Mutex<Option<T>>>().expect("its own backend's");
        let mut slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
        slot.take().expect("the forward pass ran, and a backward pass runs once")
    }
}

/// Result of a forward pass.
#[derive(Debug, Clone)]
pub struct Forward<T> {
    /// Outputs, `[B, T, H, V]`.
    pub o: T,
    /// State after the last token, `[B, H, K, V]`.
    pub state: T,
    /// For the backward pass.
    pub saved: Saved<T>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> [Recurrence<&'static str>; 4] {
        let of = |transition| Recurrence {
            q: "q",
            k: "k",
            v: "v",
            decay: Some(LogDecay::Vector("g")),
            transition,
            state: Some("state"),
            lengths: None,
        };
        let read = Read::Before;
        [
            of(Transition::Identity { read }),
            of(Transition::Delta { beta: "beta", erase: None, read }),
            of(Transition::Delta { beta: "beta", erase: Some("erase"), read }),
            of(Transition::LowRank { a: "a", b: "b" }),
        ]
    }

    #[test]
    fn a_list_of_the_tensors_fills_their_places_again() {
        for (x, count) in all().into_iter().zip([5, 6, 7, 7]) {
            let (places, list) = x.clone().into_list();
            assert_eq!(list.len(), count);
            assert_eq!(places.clone().fill(list), x);
            let (_, places) = places.into_list();
            assert_eq!(places, (0..count).collect::<Vec<_>>());
        }
    }

    #[test]
    fn pairs_are_of_the_same_place() {
        for x in all() {
            let named = x.clone().map(|name| (name, name.len()));
            assert_eq!(x.clone().zip(x.map(str::len)), named);
        }
    }

    #[test]
    #[should_panic(expected = "tensors of one recurrence")]
    fn tensors_of_two_recurrences_are_no_pairs() {
        let [_, on_keys, erasing, _] = all();
        on_keys.zip(erasing);
    }
}
