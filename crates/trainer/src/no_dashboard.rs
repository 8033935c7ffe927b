//! A request to stop with the methods of Burn's, and a dashboard that never opens: what a build without the feature
//! `dashboard` has.

use crate::progress::TrainReport;
use std::convert::Infallible;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// A request to stop, which a run looks for after each step. Copies share it.
#[derive(Debug, Clone, Default)]
pub struct Interrupter {
    stopped: Arc<AtomicBool>,
    message: Arc<Mutex<Option<String>>>,
}

impl Interrupter {
    /// None so far.
    pub fn new() -> Self {
        Self::default()
    }

    /// Asks the run to stop, for a reason.
    pub fn stop(&self, reason: Option<&str>) {
        self.stopped.store(true, Ordering::Relaxed);
        if let Some(reason) = reason {
            *self.message.lock().unwrap_or_else(PoisonError::into_inner) = Some(reason.into());
        }
    }

    /// Takes the request back.
    pub fn reset(&self) {
        self.stopped.store(false, Ordering::Relaxed);
    }

    /// Whether someone has asked.
    pub fn should_stop(&self) -> bool {
        self.stopped.load(Ordering::Relaxed)
    }

    /// The last reason.
    pub fn get_message(&self) -> Option<String> {
        self.message.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// None, ever.
pub(crate) struct Dashboard(Infallible);

impl Dashboard {
    pub fn open(_stop: &Interrupter) -> Option<Self> {
        None
    }

    pub fn train(&mut self, _report: &TrainReport, _start: u64, _total: u64, _line: &str) {
        match self.0 {}
    }

    pub fn evaluated(&mut self, _metrics: &[(String, f64)], _best: bool, _line: &str) {
        match self.0 {}
    }

    pub fn note(&mut self, _text: &str) {
        match self.0 {}
    }
}

pub(crate) fn is_alive() -> bool {
    false
}

pub(crate) fn terminal_is_gone() -> bool {
    false
}

/// Whether a dashboard has the terminal: never.
pub fn dashboard_is_up() -> bool {
    false
}

/// Gives the terminal back to the shell, where a dashboard has it: nothing to do.
pub fn restore_terminal() {}
