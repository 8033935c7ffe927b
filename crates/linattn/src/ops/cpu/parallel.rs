//! Work over several cores. It is cut by its sizes alone, so that the number of threads changes no bit.

use rayon::prelude::*;

/// Operations that are worth a thread's while.
const WORTH: usize = 32_768;

/// Runs `task` on every number below `count`, each of which is some `work` operations.
pub(super) fn for_each(count: usize, work: usize, task: impl Fn(usize) + Send + Sync) {
    let together = (WORTH / work.max(1)).max(1);
    match count > together {
        true => (0..count).into_par_iter().with_min_len(together).for_each(task),
        false => (0..count).for_each(task),
    }
}
