//! Work over several cores. It is cut by its sizes alone, so that the number of threads changes no bit.

use rayon::prelude::*;
use std::cell::Cell;

/// Operations that are worth a thread's while.
const WORTH: usize = 32_768;

thread_local! {
    /// Whether this thread does all pieces of its work itself.
    static ALONE: Cell<bool> = const { Cell::new(false) };
}

/// Puts the flag back, also where a panic passes.
struct Before(bool);

impl Drop for Before {
    fn drop(&mut self) {
        ALONE.set(self.0);
    }
}

/// Runs `run` on one of `threads` threads that work at the same time. Where they keep every core busy, work is
/// not divided further: waking others for pieces costs more than small pieces take.
pub(crate) fn one_of_threads<T>(threads: usize, run: impl FnOnce() -> T) -> T {
    let alone = threads > 1 && threads >= rayon::current_num_threads();
    let _before = Before(ALONE.replace(alone));
    run()
}

/// Runs `task` on every number below `count`, each of which is some `work` operations.
pub(super) fn for_each(count: usize, work: usize, task: impl Fn(usize) + Send + Sync) {
    let together = (WORTH / work.max(1)).max(1);
    match count > together && !ALONE.get() {
        true => (0..count).into_par_iter().with_min_len(together).for_each(task),
        false => (0..count).for_each(task),
    }
}
