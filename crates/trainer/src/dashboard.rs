//! Burn's terminal dashboard, driven from our own loop.

use crate::health::{RENDERER, harmless};
use crate::progress::{TrainReport, say, short};
use crate::terminal;
use burn::data::dataloader::Progress as Part;
use burn_train::metric::{
    MetricDefinition, MetricEntry, MetricId, NumericAttributes, NumericEntry, SerializedEntry,
};
use burn_train::renderer::tui::TuiMetricsRendererWrapper;
use burn_train::renderer::{
    EvaluationName, MetricState, MetricsRenderer, MetricsRendererEvaluation,
    MetricsRendererTraining, ProgressType, TrainingProgress,
};
use std::collections::{BTreeSet, HashSet};
use std::panic::{PanicHookInfo, set_hook, take_hook};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

pub use crate::terminal::{dashboard_is_up, restore_terminal};
pub(crate) use crate::terminal::{is_gone as terminal_is_gone, is_raw as is_alive};
pub use burn_train::Interrupter;

type Hook = Box<dyn Fn(&PanicHookInfo<'_>) + Send + Sync>;

/// Message that Burn's renderer panics with, in its own thread and in its caller's, after `q` and `k`.
const KILL: &str = "Killing training from user input.";

/// Burn's terminal dashboard, driven from our own loop.
pub(crate) struct Dashboard {
    /// Empty only while it is being dropped.
    renderer: Option<TuiMetricsRendererWrapper>,
    known: HashSet<String>,
    hook_before: Option<Arc<Hook>>,
    /// Goes when the renderer has gone.
    hushed: Option<terminal::Hushed>,
    /// Lines that stay when the dashboard goes: the last on training and on evaluation, and notes.
    last: [Option<String>; 3],
}

impl Dashboard {
    pub fn open(stop: &Interrupter) -> Option<Self> {
        terminal::remember();
        let hushed = Some(terminal::hush());
        let hook_before = Some(quiet_kills(stop));
        let renderer = Some(TuiMetricsRendererWrapper::new(stop.clone(), None));
        let (known, last) = (HashSet::new(), [const { None }; 3]);
        let dashboard = Self { renderer, known, hook_before, hushed, last };
        terminal::let_signals_through().then_some(dashboard)
    }

    pub fn train(&mut self, report: &TrainReport, start: u64, total: u64, line: &str) {
        self.last[0] = Some(line.to_string());
        let text = format!("{}, lr {}", short(report.loss), short(report.learning_rate));
        let state = self.state("loss", report.loss, text);
        self.renderer().update_train(state);
        // In these terms Burn's estimate of the time left is right after a resume too: one epoch,
        // which is what this process has to do.
        let done = report.step.saturating_sub(start);
        let progress = TrainingProgress {
            progress: Some(part(done, total.saturating_sub(start))),
            global_progress: part(1, 1),
            iteration: Some(done as usize),
        };
        let value =
            |tag: &str, value: u64| ProgressType::Value { tag: tag.into(), value: value as usize };
        let status = vec![
            ProgressType::Detailed { tag: "Step".into(), progress: part(report.step, total) },
            value("Epoch", report.epoch),
            value("Tokens/s", report.tokens_per_second as u64),
        ];
        self.renderer().render_train(progress, status);
    }

    pub fn evaluated(&mut self, metrics: &[(String, f64)], best: bool, line: &str) {
        self.last[1] = Some(line.to_string());
        let names: Vec<Name> = metrics.iter().map(|(name, _)| Name::parse(name)).collect();
        let sets = names.iter().filter_map(|name| name.set).collect::<BTreeSet<_>>().len();
        for (name, (_, value)) in names.iter().zip(metrics) {
            let best = if best { ", best" } else { "" };
            if name.has_room(sets) {
                let state = self.state(name.metric, *value, format!("{}{best}", short(*value)));
                self.send_evaluation(name, state);
            }
        }
    }

    fn send_evaluation(&mut self, name: &Name, state: MetricState) {
        match (name.split, name.set) {
            ("test", set) => {
                self.renderer().update_test(EvaluationName::new(set.unwrap_or("all")), state);
            }
            _ => self.renderer().update_valid(state),
        }
    }

    pub fn note(&mut self, text: &str) {
        self.last[2] = Some(text.to_string());
        let entry = self.entry("note", text.to_string());
        self.renderer().update_train(MetricState::Generic(entry));
    }

    /// A value to plot, or only its text where it is no number: one NaN spoils a whole plot.
    fn state(&mut self, name: &str, value: f64, text: String) -> MetricState {
        let entry = self.entry(name, text);
        match value.is_finite() {
            true => MetricState::Numeric(entry, NumericEntry::Value(value)),
            false => MetricState::Generic(entry),
        }
    }

    fn entry(&mut self, name: &str, text: String) -> MetricEntry {
        let id = MetricId::new(Arc::new(name.to_string()));
        if self.known.insert(name.to_string()) {
            let costs = ["loss", "perplexity", "bits_per_byte"];
            let higher_is_better = !costs.iter().any(|cost| name.ends_with(cost));
            self.renderer().register_metric(MetricDefinition {
                metric_id: id.clone(),
                name: name.to_string(),
                description: None,
                attributes: NumericAttributes { unit: None, higher_is_better }.into(),
            });
        }
        MetricEntry::new(id, SerializedEntry::new(text.clone(), text))
    }

    fn put_hook_back(&mut self) {
        drop(take_hook());
        // Ours and the renderer's are gone, and with them their shares of it, unless that was left
        // alone.
        match self.hook_before.take().map(Arc::try_unwrap) {
            Some(Ok(before)) => set_hook(before),
            Some(Err(shared)) => set_hook(Box::new(move |panic| shared(panic))),
            None => {}
        }
    }

    fn renderer(&mut self) -> &mut TuiMetricsRendererWrapper {
        self.renderer.as_mut().expect("`drop` alone takes it away")
    }
}

impl Drop for Dashboard {
    fn drop(&mut self) {
        if !self.renderer.take().is_none_or(close) {
            // Whatever that thread still comes to, it must find where to say so.
            std::mem::forget(self.hushed.take());
        }
        if !std::thread::panicking() {
            self.put_hook_back();
        }
        terminal::forget();
        drop(self.hushed.take());
        self.last.iter().flatten().for_each(|line| say(line));
    }
}

/// Has the renderer leave the screen, and waits for it. Once the terminal is gone it may read for ever
/// what never comes: then it is left alone, and the answer is false.
fn close(renderer: TuiMetricsRendererWrapper) -> bool {
    let (closed, waiting) = channel();
    let closing = std::thread::Builder::new().name("close".into()).spawn(move || {
        // Its `drop` says a last word to the renderer's thread, and may panic as all its calls.
        let _gone = harmless(|| drop(renderer));
        let _nobody_waits = closed.send(());
    });
    let patience = Duration::from_millis(50);
    while closing.is_ok() && waiting.recv_timeout(patience) == Err(RecvTimeoutError::Timeout) {
        if terminal::is_gone() {
            return waiting.recv_timeout(patience).is_ok();
        }
    }
    true
}

/// Makes of "kill" a request to stop, without the message of a panic. What else the renderer's thread
/// panics with is that the terminal is gone, and no failure of the run. Gives the hook from before.
fn quiet_kills(stop: &Interrupter) -> Arc<Hook> {
    let before: Arc<Hook> = Arc::new(take_hook());
    let (stop, others) = (stop.clone(), before.clone());
    set_hook(Box::new(move |panic| match panic.payload_as_str() {
        Some(KILL) => stop.stop(Some("Stopping training at once from user input.")),
        _ if std::thread::current().name() == Some(RENDERER) => {}
        _ => others(panic),
    }));
    before
}

/// The parts of a metric's name: `split/set/metric`, or `split/metric`.
struct Name<'a> {
    split: &'a str,
    set: Option<&'a str>,
    metric: &'a str,
}

impl<'a> Name<'a> {
    fn parse(name: &'a str) -> Self {
        let (path, metric) = name.rsplit_once('/').unwrap_or(("", name));
        match path.split_once('/') {
            Some((split, set)) => Self { split, set: Some(set), metric },
            None => Self { split: path, set: None, metric },
        }
    }

    /// Whether the dashboard shows it, beside so many sets: it has few rows, and one colour for
    /// tests.
    fn has_room(&self, sets: usize) -> bool {
        match (self.set, sets) {
            (None, 1) => false, // it repeats that set
            (None, _) | (Some(_), 1) => true,
            (Some(_), sets) => sets <= 6 && self.split == "test" && self.metric != "loss",
        }
    }
}

/// `done` of `all`, where all is at least 1: it divides.
fn part(done: u64, all: u64) -> Part {
    Part { items_processed: done as usize, items_total: all.max(1) as usize }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_fall_into_split_set_and_metric() {
        let parts = |name| {
            let Name { split, set, metric } = Name::parse(name);
            (split, set, metric)
        };
        assert_eq!(parts("test/64x4/accuracy"), ("test", Some("64x4"), "accuracy"));
        assert_eq!(parts("test/a/b/loss"), ("test", Some("a/b"), "loss"));
        assert_eq!(parts("validation/loss"), ("validation", None, "loss"));
        assert_eq!(parts("loss"), ("", None, "loss"));
    }
}
