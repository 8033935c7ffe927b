//! The sets of a task, and what configs share.

use crate::{SetInfo, Split, TaskError};

/// Sets of every split. `S` is what the examples of one set have in common.
#[derive(Debug, Clone)]
pub(crate) struct Splits<S> {
    /// By the number of the split.
    sets: [Sets<S>; 3],
}

/// The sets of a split; `infos[i]` describes what `shapes[i]` draws.
#[derive(Debug, Clone)]
struct Sets<S> {
    infos: Vec<SetInfo>,
    shapes: Vec<S>,
}

impl<S> Splits<S> {
    /// Makes each set of the lists, training first, then validation, then test.
    pub(crate) fn new<C>(lists: [&[C]; 3], make: impl Fn(&C) -> (SetInfo, S)) -> Self {
        Self::by_split(lists, |_, set| make(set))
    }

    /// As [`Splits::new`], for a task that asks different things in different splits.
    pub(crate) fn by_split<C>(
        [train, validation, test]: [&[C]; 3],
        make: impl Fn(Split, &C) -> (SetInfo, S),
    ) -> Self {
        let sets = |split, list: &[C]| {
            let (infos, shapes) = list.iter().map(|set| make(split, set)).unzip();
            Sets { infos, shapes }
        };
        let (train, validation) = (sets(Split::Train, train), sets(Split::Validation, validation));
        Self { sets: [train, validation, sets(Split::Test, test)] }
    }

    /// Names and sizes of a split's sets.
    pub(crate) fn infos(&self, split: Split) -> &[SetInfo] {
        &self.sets[split as usize].infos
    }

    /// Values from which the examples of a set are drawn.
    pub(crate) fn shape(&self, split: Split, set: usize) -> &S {
        &self.sets[split as usize].shapes[set]
    }
}

/// Refuses a value of `key` unless it holds.
pub(crate) fn require(
    holds: bool,
    key: impl Into<String>,
    got: impl ToString,
    want: impl Into<String>,
) -> Result<(), TaskError> {
    if holds {
        return Ok(());
    }
    Err(TaskError::Value { key: key.into(), got: got.to_string(), want: want.into() })
}

/// Refuses a task whose training or test list is empty, and names each set by its key for `check`:
/// `task.parity.test[2]`.
pub(crate) fn check_sets<C>(
    task: &str,
    [train, validation, test]: [&[C]; 3],
    mut check: impl FnMut(&str, &C) -> Result<(), TaskError>,
) -> Result<(), TaskError> {
    for (name, list) in [("train", train), ("validation", validation), ("test", test)] {
        let needed = name != "validation";
        let key = format!("task.{task}.{name}");
        require(!(needed && list.is_empty()), key, "empty", "a list of one set or more")?;
        for (i, set) in list.iter().enumerate() {
            check(&format!("task.{task}.{name}[{i}]"), set)?;
        }
    }
    Ok(())
}
