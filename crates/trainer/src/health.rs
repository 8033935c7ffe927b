//! Failures that a device keeps to itself.
//!
//! CubeCL does a device's work in a thread of its own. Memory that this thread does not get ends in a panic
//! there, which CubeCL catches; work that needs that memory is left out, and what is read back afterwards was
//! never written. A program that trains therefore notes every panic, and a run in which one happened keeps
//! nothing from then on.

use burn::tensor::backend::Backend;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, PanicHookInfo, catch_unwind};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The thread that Burn's renderer draws in.
pub(crate) const RENDERER: &str = "train-renderer";

static NOTED: Mutex<Vec<String>> = Mutex::new(vec![]);

fn noted() -> MutexGuard<'static, Vec<String>> {
    NOTED.lock().unwrap_or_else(PoisonError::into_inner)
}

thread_local! {
    static HARMLESS: Cell<bool> = const { Cell::new(false) };
}

/// Catches a panic that is no failure of the run, such as one of the display.
pub(crate) fn harmless<T>(work: impl FnOnce() -> T) -> Option<T> {
    HARMLESS.set(true);
    let result = catch_unwind(AssertUnwindSafe(work));
    HARMLESS.set(false);
    result.ok()
}

/// Notes a panic, unless it is of the display. For the hook of a program that trains.
pub fn note_panic(panic: &PanicHookInfo<'_>) {
    if HARMLESS.get() || std::thread::current().name() == Some(RENDERER) {
        return;
    }
    let why = panic.payload_as_str().unwrap_or("no reason given");
    let place = panic.location().map(|place| format!(" ({place})")).unwrap_or_default();
    noted().push(format!("{why}{place}"));
}

/// Panics of any thread of this process, from one moment on, as far as they are noted.
#[derive(Debug, Clone, Copy)]
pub struct Panics {
    before: usize,
}

impl Panics {
    /// Those that come.
    pub fn from_now() -> Self {
        Self { before: noted().len() }
    }

    /// The first of them: its reason and place.
    pub fn first(self) -> Option<String> {
        noted().get(self.before).cloned()
    }

    /// All of them so far, the first one first.
    pub fn all(self) -> Vec<String> {
        noted().get(self.before..).unwrap_or_default().to_vec()
    }

    /// # Panics
    /// If there is one: numbers that a device gave since are worth nothing.
    pub(crate) fn check(self) {
        if let Some(why) = self.first() {
            panic!("{why}");
        }
    }

    /// Waits for the devices.
    /// # Panics
    /// If one of them has not done all of its work.
    pub(crate) fn settle<B: Backend>(self, devices: &[B::Device]) {
        let failed = devices.iter().find_map(|device| B::sync(device).err());
        self.check();
        if let Some(why) = failed {
            panic!("{why}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::backend::Flex;
    use std::panic::{set_hook, take_hook};

    #[test]
    fn a_panic_of_a_thread_that_nobody_asks_is_a_panic_of_the_run() {
        set_hook(Box::new(note_panic));
        let panics = Panics::from_now();
        let settle = || catch_unwind(|| panics.settle::<Flex>(&[Default::default()]));
        assert!(settle().is_ok());
        assert!(harmless(|| panic!("the display is gone")).is_none());
        assert!(settle().is_ok());
        let thread = std::thread::spawn(|| panic!("Out of Memory"));
        assert!(thread.join().is_err());
        assert!(settle().is_err());
        assert!(catch_unwind(|| panics.check()).is_err());
        let _ours = take_hook();
        assert!(panics.all().len() >= 3, "{:?}", panics.all());
        assert!(panics.first().unwrap().starts_with("Out of Memory (crates/trainer/src/health.rs"));
    }
}
