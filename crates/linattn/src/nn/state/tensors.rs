//! States as named tensors: taken apart and put together.

use super::kept::{Kept, KeptTensors};
use crate::ops::cat;
use burn::tensor::{Tensor, TensorData, backend::Backend};

/// The name of conv states among named tensors.
pub(crate) const CONV_STATES: &str = "conv_states";

/// A kind of mixer state that can be taken apart into tensors and put together again. That is all that
/// saving, joining and selecting ask of it.
pub trait RecurrentState<B: Backend>: Sized {
    /// Its tensors, the batch first in each, under names that no two of them share; and the tokens
    /// it has seen, where it counts them.
    fn tensors(&self) -> StateTensors<B>;

    /// The state of such tensors.
    /// # Panics
    /// If they are not named as [`tensors`](Self::tensors) names them.
    fn from_tensors(tensors: StateTensors<B>) -> Self;
}

/// One tensor of a state, whatever its rank.
#[derive(Debug, Clone)]
pub(super) struct Named<B: Backend> {
    pub(super) name: String,
    /// `[B, ..]`.
    pub(super) shape: Vec<usize>,
    /// The dimension that is longer the more tokens were seen.
    pub(super) grows: Option<usize>,
    /// The numbers, a row for each sequence of the batch.
    pub(super) rows: Tensor<B, 2>,
}

impl<B: Backend> Named<B> {
    /// Whether another has the same name and shape, however many sequences each has. Growing
    /// dimensions may differ where `grown` says so.
    pub(super) fn fits(&self, name: &str, shape: &[usize], grown: bool) -> bool {
        let same = |(dim, (a, b)): (usize, (&usize, &usize))| {
            a == b || dim == 0 || (grown && self.grows == Some(dim) && *b > 0)
        };
        self.name == name
            && self.shape.len() == shape.len()
            && self.shape.iter().zip(shape).enumerate().all(same)
    }

    /// The same tensor with other sequences in it.
    fn with_rows(&self, rows: Tensor<B, 2>) -> Self {
        let mut shape = self.shape.clone();
        shape[0] = rows.dims()[0];
        Self { name: self.name.clone(), shape, grows: self.grows, rows }
    }
}

/// The tensors of a state, by name.
#[derive(Debug, Clone)]
pub struct StateTensors<B: Backend> {
    pub(super) list: Vec<Named<B>>,
    pub(super) position: Option<usize>,
}

impl<B: Backend> StateTensors<B> {
    /// No tensors yet, of a state that has seen `position` tokens; `None` if it does not count them.
    pub fn new(position: Option<usize>) -> Self {
        Self { list: vec![], position }
    }

    /// Adds a tensor, `[B, ..]`, whose size does not depend on the tokens seen.
    #[must_use]
    pub fn with<const D: usize>(self, name: &str, tensor: &Tensor<B, D>) -> Self {
        self.push(name.to_string(), tensor, None)
    }

    /// Adds a tensor, `[B, ..]`, whose dimension `dim` is longer the more tokens were seen.
    #[must_use]
    pub fn with_growing<const D: usize>(
        self,
        name: &str,
        tensor: &Tensor<B, D>,
        dim: usize,
    ) -> Self {
        self.push(name.to_string(), tensor, Some(dim))
    }

    /// Adds the tensors of a list, as `name.0`, `name.1` and so on.
    #[must_use]
    pub fn with_list<const D: usize>(self, name: &str, tensors: &[Tensor<B, D>]) -> Self {
        let one = |all: Self, (i, tensor): (usize, &Tensor<B, D>)| {
            all.push(format!("{name}.{i}"), tensor, None)
        };
        tensors.iter().enumerate().fold(self, one)
    }

    /// Adds tensors that are kept by name, as `table.name` each.
    #[must_use]
    pub fn with_kept(self, table: &str, tensors: &KeptTensors<B>) -> Self {
        let one = |all: Self, (name, tensor): (Kept, &Tensor<B, 3>)| {
            all.push(format!("{table}.{}", name.name()), tensor, None)
        };
        tensors.iter().fold(self, one)
    }

    fn push<const D: usize>(
        mut self,
        name: String,
        tensor: &Tensor<B, D>,
        grows: Option<usize>,
    ) -> Self {
        let shape = tensor.dims();
        let row: usize = shape[1..].iter().product();
        let rows = tensor.clone().reshape([shape[0], row]);
        self.list.push(Named { name, shape: shape.to_vec(), grows, rows });
        self
    }

    /// Tokens seen; 0 if they are not counted.
    pub fn position(&self) -> usize {
        self.position.unwrap_or(0)
    }

    /// Names and numbers of all tensors, the numbers with a row for each sequence, `[B, ..]` made flat.
    pub fn data(&self) -> impl Iterator<Item = (&str, TensorData)> {
        self.list.iter().map(|tensor| (tensor.name.as_str(), tensor.rows.to_data()))
    }

    /// Takes a tensor out.
    /// # Panics
    /// If there is none of that name, or it has another rank.
    pub fn take<const D: usize>(&mut self, name: &str) -> Tensor<B, D> {
        self.take_if_any(name).unwrap_or_else(|| panic!("a state has a tensor `{name}`"))
    }

    /// As [`take`](Self::take), where there is one of that name.
    /// # Panics
    /// If it has another rank.
    pub fn take_if_any<const D: usize>(&mut self, name: &str) -> Option<Tensor<B, D>> {
        let place = self.list.iter().position(|tensor| tensor.name == name)?;
        let Named { shape, rows, .. } = self.list.remove(place);
        let shape: [usize; D] = shape.try_into().expect("a state's tensor keeps its rank");
        Some(rows.reshape(shape))
    }

    /// Takes the tensors of a list out.
    pub fn take_list<const D: usize>(&mut self, name: &str) -> Vec<Tensor<B, D>> {
        (0..).map_while(|i| self.take_if_any(&format!("{name}.{i}"))).collect()
    }

    /// Takes the tensors out that are kept below `table`.
    pub fn take_kept(&mut self, table: &str) -> KeptTensors<B> {
        let mut take = |name: Kept| self.take_if_any(&format!("{table}.{}", name.name()));
        Kept::ALL.iter().filter_map(|name| Some((*name, take(*name)?))).collect()
    }

    /// The same, every name below `table`.
    pub(super) fn within(mut self, table: &str) -> Self {
        self.list.iter_mut().for_each(|tensor| tensor.name = format!("{table}.{}", tensor.name));
        self
    }

    /// Those below `table`, by their names there.
    pub(super) fn out_of(mut self, table: &str) -> Self {
        self.list.retain_mut(|tensor| {
            let rest = tensor.name.strip_prefix(table).and_then(|rest| rest.strip_prefix('.'));
            match rest.map(str::to_string) {
                Some(rest) => {
                    tensor.name = rest;
                    true
                }
                None => false,
            }
        });
        self
    }

    /// The number of sequences in the first tensor that has not `want` of them, if there is one.
    pub(crate) fn rows_but(&self, want: usize) -> Option<usize> {
        self.list.iter().map(|tensor| tensor.shape[0]).find(|rows| *rows != want)
    }

    /// One sequence of it.
    pub(crate) fn row(&self, row: usize) -> Self {
        self.map(|_, tensor| tensor.rows.clone().narrow(0, row, 1))
    }

    /// The sequences of several states, which have the same tensors, in order. They have seen as many tokens as
    /// the one that has seen most.
    pub(crate) fn cat(states: &[Self]) -> Self {
        let all = |place: usize| states.iter().map(move |state| state.list[place].rows.clone());
        let joined = states[0].map(|place, _| cat(all(place).collect(), 0));
        let position = states.iter().filter_map(|state| state.position).max();
        Self { position, ..joined }
    }

    /// Every tensor, given its place in the list, with other sequences in it.
    pub(super) fn map(&self, f: impl Fn(usize, &Named<B>) -> Tensor<B, 2>) -> Self {
        let one = |(place, tensor): (usize, &Named<B>)| tensor.with_rows(f(place, tensor));
        Self { list: self.list.iter().enumerate().map(one).collect(), position: self.position }
    }
}

/// The shape that would do, the batch and growing dimensions left open.
pub(super) fn like<B: Backend>(tensor: &Named<B>) -> String {
    let open = |(dim, size): (usize, &usize)| match dim {
        0 => "rows".to_string(),
        dim if tensor.grows == Some(dim) => "tokens".to_string(),
        _ => size.to_string(),
    };
    let sizes: Vec<String> = tensor.shape.iter().enumerate().map(open).collect();
    format!("[{}]", sizes.join(", "))
}

/// Tokens seen, for an error.
pub(super) fn counted(position: Option<usize>) -> String {
    position.map_or("absent".into(), |position| position.to_string())
}

#[cfg(all(test, feature = "cpu"))]
mod tests {
    use super::*;
    use burn::backend::Flex;
    use std::collections::BTreeSet;

    #[test]
    fn what_is_kept_has_its_own_name_in_files() {
        let state = Tensor::<Flex, 3>::zeros([1, 3, 2], &Default::default());
        let kept = [(Kept::Value, state.clone()), (Kept::Query, state)].into_iter().collect();
        let tensors = StateTensors::new(None).with_kept(CONV_STATES, &kept);
        let names: Vec<&str> = tensors.data().map(|(name, _)| name).collect();
        assert_eq!(names, ["conv_states.q", "conv_states.v"]);
    }

    #[test]
    fn no_two_tensors_are_kept_under_one_name_in_files() {
        let names: BTreeSet<&str> = Kept::ALL.iter().map(|kept| kept.name()).collect();
        assert_eq!(names.len(), Kept::ALL.len());
    }
}
