//! Faults of a checkpoint, all of which are said at once.

/// Everything that is wrong, one sentence each.
pub(crate) type Faults = Vec<String>;
