//! What a person sees while a run goes on: Burn's dashboard on a terminal, plain lines elsewhere.

use burn::data::dataloader::Progress as Done;
use burn_train::Interrupter;
use burn_train::metric::{
    MetricDefinition, MetricEntry, MetricId, NumericAttributes, NumericEntry, SerializedEntry,
};
use burn_train::renderer::tui::TuiMetricsRendererWrapper;
use burn_train::renderer::{
    MetricState, MetricsRenderer, MetricsRendererTraining, ProgressType, TrainingProgress,
};
use std::collections::HashMap;
use std::io::{IsTerminal, stderr, stdin, stdout};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Which view.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProgressStyle {
    /// The dashboard where there is a terminal, else lines.
    Auto,
    /// The dashboard.
    Tui,
    /// Lines on standard error.
    Lines,
    /// Nothing.
    Quiet,
}

/// The view of one run.
pub struct Progress {
    total: u64,
    first: u64,
    started: Instant,
    view: View,
}

enum View {
    Tui(Box<Dashboard>),
    Lines { next: Instant },
    Quiet,
}

/// Time between two lines about training.
const LINE_EVERY: Duration = Duration::from_secs(2);

impl Progress {
    /// Shows a run of `total` steps, `first` of them done. The dashboard's `q` stops the run through
    /// `stop`, as Ctrl-C does.
    pub fn new(total: u64, first: u64, style: ProgressStyle, stop: Interrupter) -> Self {
        let terminal = stdout().is_terminal() && stdin().is_terminal() && stderr().is_terminal();
        let view = match style {
            ProgressStyle::Quiet => View::Quiet,
            ProgressStyle::Auto if !terminal => View::Lines { next: Instant::now() },
            ProgressStyle::Lines => View::Lines { next: Instant::now() },
            ProgressStyle::Auto | ProgressStyle::Tui => View::Tui(Box::new(Dashboard::new(stop))),
        };
        Self { total, first, started: Instant::now(), view }
    }

    /// After a training step.
    pub fn train(&mut self, step: u64, epoch: u64, loss: f64, rate: f64, tokens_per_second: f64) {
        let left = self.time_left(step);
        match &mut self.view {
            View::Tui(dashboard) => {
                let numbers =
                    [("Loss", loss), ("Learning rate", rate), ("Tokens/s", tokens_per_second)];
                dashboard.show(Split::Train, &numbers, step, self.total);
            }
            View::Lines { next } if *next <= Instant::now() => {
                *next = Instant::now() + LINE_EVERY;
                let percent = 100 * step / self.total.max(1);
                eprintln!(
                    "step {step}/{} ({percent} %), epoch {epoch}, loss {loss:.4}, learning rate \
                     {rate:.2e}, {tokens_per_second:.0} tokens/s, {left} left",
                    self.total
                );
            }
            View::Lines { .. } | View::Quiet => {}
        }
    }

    /// After an evaluation; `metrics` are named `split/metric` and `split/set/metric`.
    pub fn evaluated(&mut self, step: u64, metrics: &[(String, f64)], best: bool) {
        match &mut self.view {
            View::Tui(dashboard) => {
                let list: Vec<(&str, f64)> =
                    metrics.iter().map(|(name, value)| (name.as_str(), *value)).collect();
                dashboard.show(Split::Valid, &list, step, self.total);
            }
            View::Lines { .. } => {
                let list: Vec<String> =
                    headline(metrics).map(|(name, value)| format!("{name} {value:.4}")).collect();
                let best = if best { ", the best so far" } else { "" };
                eprintln!("step {step}: {}{best}", list.join(", "));
            }
            View::Quiet => {}
        }
    }

    /// Closes the view; a terminal is as it was before.
    pub fn finish(self) {
        if let View::Tui(dashboard) = self.view {
            dashboard.close();
        }
    }

    fn time_left(&self, step: u64) -> String {
        let done = step.saturating_sub(self.first).max(1) as f64;
        let left = self.total.saturating_sub(step) as f64;
        let seconds = (self.started.elapsed().as_secs_f64() / done * left).round() as u64;
        match (seconds / 3600, seconds / 60 % 60, seconds % 60) {
            (0, 0, s) => format!("{s} s"),
            (0, m, s) => format!("{m} min {s} s"),
            (h, m, _) => format!("{h} h {m} min"),
        }
    }
}

/// Totals over a split, and single sets only where there are few.
fn headline(metrics: &[(String, f64)]) -> impl Iterator<Item = &(String, f64)> {
    metrics.iter().filter(|(name, _)| name.matches('/').count() == 1)
}

#[derive(Clone, Copy)]
enum Split {
    Train,
    Valid,
}

/// Burn's terminal dashboard, driven from our own loop.
struct Dashboard {
    /// Gone once someone chose "stop immediately" in it.
    renderer: Option<TuiMetricsRendererWrapper>,
    known: HashMap<String, MetricId>,
    stop: Interrupter,
}

impl Dashboard {
    fn new(stop: Interrupter) -> Self {
        let renderer = TuiMetricsRendererWrapper::new(stop.clone(), None);
        let_ctrl_c_through();
        Self { renderer: Some(renderer), known: HashMap::new(), stop }
    }

    fn show(&mut self, split: Split, numbers: &[(&str, f64)], step: u64, total: u64) {
        let Some(mut renderer) = self.renderer.take() else { return };
        let known = &mut self.known;
        // "Stop immediately" makes the renderer panic at its next call. Here it means: stop, saved.
        let shown = catch_unwind(AssertUnwindSafe(move || {
            for &(name, value) in numbers {
                let id = register(known, &mut renderer, name);
                let text = format!("{value:.4}");
                let entry = MetricEntry::new(id, SerializedEntry::new(text.clone(), text));
                let state = MetricState::Numeric(entry, NumericEntry::Value(value));
                match split {
                    Split::Train => renderer.update_train(state),
                    Split::Valid => renderer.update_valid(state),
                }
            }
            let done = Done::new(step as usize, total as usize);
            let progress = TrainingProgress {
                progress: Some(done.clone()),
                global_progress: done.clone(),
                iteration: Some(step as usize),
            };
            let tag = "Step".to_string();
            let status = vec![ProgressType::Detailed { tag, progress: done }];
            match split {
                Split::Train => renderer.render_train(progress, status),
                Split::Valid => renderer.render_valid(progress, status),
            }
            renderer
        }));
        match shown {
            Ok(renderer) => self.renderer = Some(renderer),
            Err(_) => self.stop.stop(Some("stopped in the dashboard")),
        }
    }

    fn close(mut self) {
        let renderer = self.renderer.take();
        // Dropping it asks it to close; the same panic may come once more.
        let _closed = catch_unwind(AssertUnwindSafe(move || drop(renderer)));
    }
}

fn register(
    known: &mut HashMap<String, MetricId>,
    renderer: &mut TuiMetricsRendererWrapper,
    name: &str,
) -> MetricId {
    if let Some(id) = known.get(name) {
        return id.clone();
    }
    let id = MetricId::new(Arc::new(name.to_string()));
    let higher_is_better = !name.ends_with("loss") && name != "Loss";
    renderer.register_metric(MetricDefinition {
        metric_id: id.clone(),
        name: name.to_string(),
        description: None,
        attributes: NumericAttributes { unit: None, higher_is_better }.into(),
    });
    known.insert(name.to_string(), id.clone());
    id
}

/// The dashboard switches the terminal to raw mode, in which Ctrl-C is a key like any other, and it
/// knows no such key. This switches the signal back on, once raw mode has come.
#[cfg(unix)]
fn let_ctrl_c_through() {
    use nix::sys::termios::{LocalFlags, SetArg, tcgetattr, tcsetattr};
    let patience = Instant::now() + Duration::from_millis(500);
    while Instant::now() < patience {
        let Ok(mut settings) = tcgetattr(stdin()) else { return };
        if !settings.local_flags.contains(LocalFlags::ICANON) {
            settings.local_flags.insert(LocalFlags::ISIG);
            // Without it `q` still stops the run.
            let _best_effort = tcsetattr(stdin(), SetArg::TCSANOW, &settings);
            return;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[cfg(not(unix))]
fn let_ctrl_c_through() {}
