//! Display of a run under way: Burn's dashboard on a terminal, plain lines elsewhere.

use crate::dashboard::{Dashboard, Interrupter, is_alive, terminal_is_gone};
use crate::health::harmless;
use std::ffi::OsStr;
use std::fmt;
use std::io::{IsTerminal, Write, stderr, stdin, stdout};
use std::time::{Duration, Instant};

/// How a run shows itself.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ProgressStyle {
    /// The dashboard where there is a terminal to read from and to write to, else lines; lines without the feature
    /// `dashboard`.
    #[default]
    Auto,
    /// The dashboard; lines where there is no such terminal, or no feature `dashboard`.
    Tui,
    /// Lines on standard error, for people and for logs.
    Lines,
    /// Nothing.
    Quiet,
}

/// The view of one run. Dropping it closes the dashboard and gives the terminal back.
pub struct Progress {
    total: u64,
    pace: Pace,
    view: View,
    stop: Interrupter,
}

/// Whether a terminal of this kind has a screen to draw on. Windows names none, and draws.
fn can_draw(kind: Option<&OsStr>) -> bool {
    cfg!(windows) || kind.is_some_and(|kind| !kind.is_empty() && kind != "dumb")
}

enum View {
    /// The dashboard opens with the first numbers. Before them there is nothing to see, and its
    /// arrow keys would panic for want of a plot.
    Soon,
    Dashboard(Dashboard),
    Lines(Lines),
    Quiet,
}

impl fmt::Debug for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Progress").field("total", &self.total).finish_non_exhaustive()
    }
}

impl Progress {
    /// Shows a run of `total_steps`, of which `start_step` were done before. The training loop
    /// watches `stop`; the dashboard sets it when someone asks it to quit.
    pub fn new(total_steps: u64, start_step: u64, style: ProgressStyle, stop: Interrupter) -> Self {
        let draws = can_draw(std::env::var_os("TERM").as_deref());
        let terminal = draws && stdin().is_terminal() && stdout().is_terminal();
        let view = match style {
            ProgressStyle::Quiet => View::Quiet,
            ProgressStyle::Auto | ProgressStyle::Tui if terminal => View::Soon,
            _ => View::Lines(Lines::default()),
        };
        Self { total: total_steps, pace: Pace::new(start_step, Instant::now()), view, stop }
    }

    /// After a training step: its number, from 1, its epoch, and what was measured.
    pub fn train(
        &mut self,
        step: u64,
        epoch: u64,
        loss: f64,
        learning_rate: f64,
        tokens_per_second: f64,
    ) {
        let now = Instant::now();
        self.pace.first.get_or_insert((step, now));
        let report = TrainReport { step, epoch, loss, learning_rate, tokens_per_second };
        let (total, start) = (self.total, self.pace.start.0);
        let line = report.line(total, self.pace.time_left(step, total, now));
        if !self.on_dashboard(|dashboard| dashboard.train(&report, start, total, &line))
            && let View::Lines(lines) = &mut self.view
            && lines.due(now, step >= total)
        {
            say(&line);
        }
    }

    /// After an evaluation. Metrics have names like `test/64x4/accuracy`, and `test/accuracy` where
    /// it counts over all sets.
    pub fn evaluated(&mut self, step: u64, metrics: &[(String, f64)], best: bool) {
        let line = evaluation_line(step, metrics, best);
        if !self.on_dashboard(|dashboard| dashboard.evaluated(metrics, best, &line))
            && let View::Lines(_) = self.view
        {
            say(&line);
        }
    }

    /// A line for the person: "checkpoint at step 200".
    pub fn note(&mut self, text: &str) {
        if matches!(self.view, View::Soon) {
            return say(text); // stays readable above the dashboard, and after it
        }
        if !self.on_dashboard(|dashboard| dashboard.note(text))
            && let View::Lines(_) = self.view
        {
            say(text);
        }
    }

    /// Closes the view. The last numbers stay on the terminal.
    pub fn finish(self) {}

    /// Hands the dashboard to `tell`, if there is one. When it has died, lines take its place.
    fn on_dashboard(&mut self, tell: impl FnOnce(&mut Dashboard)) -> bool {
        if matches!(self.view, View::Soon) {
            self.view = match Dashboard::open(&self.stop) {
                Some(dashboard) => View::Dashboard(dashboard),
                None => View::Lines(Lines::default()),
            };
        }
        let View::Dashboard(dashboard) = &mut self.view else { return false };
        // Burn's renderer panics in its caller's thread once someone chose to kill the run.
        if is_alive() && harmless(|| tell(dashboard)).is_some() {
            return true;
        }
        self.view = View::Lines(Lines::default());
        if terminal_is_gone() {
            // Where the system sends a signal too, this is the same wish again.
            self.stop.stop(Some("the terminal was closed"));
        }
        false
    }
}

/// Numbers of a training step.
pub(crate) struct TrainReport {
    pub step: u64,
    pub epoch: u64,
    pub loss: f64,
    pub learning_rate: f64,
    pub tokens_per_second: f64,
}

impl TrainReport {
    fn line(&self, total: u64, left: Option<Duration>) -> String {
        let &Self { step, epoch, loss, learning_rate, tokens_per_second } = self;
        let width = total.to_string().len();
        let percent = 100.0 * step as f64 / total.max(1) as f64;
        let left = left.map(|left| format!(", {} left", duration(left))).unwrap_or_default();
        format!(
            "step {step:>width$}/{total} {percent:5.1}%, epoch {epoch}, loss {}, lr {}, {} \
             tokens/s{left}",
            short(loss),
            short(learning_rate),
            count(tokens_per_second),
        )
    }
}

fn evaluation_line(step: u64, metrics: &[(String, f64)], best: bool) -> String {
    let over_all = |name: &str| name.matches('/').count() <= 1;
    // Single sets only where no metric is over all of them.
    let single = !metrics.iter().any(|(name, _)| over_all(name));
    let shown = metrics.iter().filter(|(name, _)| single || over_all(name));
    let list: Vec<String> =
        shown.map(|(name, value)| format!("{name} {}", short(*value))).collect();
    let best = if best { " (best so far)" } else { "" };
    format!("evaluated at step {step}: {}{best}", list.join(", "))
}

/// When lines about training may be written.
#[derive(Default)]
struct Lines {
    last: Option<Instant>,
}

impl Lines {
    const EVERY: Duration = Duration::from_secs(2);

    fn due(&mut self, now: Instant, always: bool) -> bool {
        let due = always || self.last.is_none_or(|last| now.duration_since(last) >= Self::EVERY);
        if due {
            self.last = Some(now);
        }
        due
    }
}

/// How fast steps come.
struct Pace {
    start: (u64, Instant),
    /// The first report. Kernels are compiled and tuned before it, once.
    first: Option<(u64, Instant)>,
}

impl Pace {
    fn new(step: u64, now: Instant) -> Self {
        Self { start: (step, now), first: None }
    }

    fn time_left(&self, step: u64, total: u64, now: Instant) -> Option<Duration> {
        let (from, since) = self.first.filter(|first| step > first.0).unwrap_or(self.start);
        let done = step.checked_sub(from).filter(|&done| done > 0)?;
        let seconds = now.duration_since(since).as_secs_f64() / done as f64;
        Duration::try_from_secs_f64(seconds * total.saturating_sub(step) as f64).ok()
    }
}

/// Writes a line on standard error. If nobody can read it, the run goes on all the same.
pub(crate) fn say(line: &str) {
    let _unread = writeln!(stderr(), "{line}");
}

/// 0.9912, or 1.00e-4.
pub(crate) fn short(value: f64) -> String {
    match value.abs() {
        0.0 => "0".into(),
        1e-2..1e5 => format!("{value:.4}"),
        size if size.is_finite() => format!("{value:.2e}"),
        _ => value.to_string(),
    }
}

/// 950, 12.3k, 4.56M.
fn count(value: f64) -> String {
    match value {
        ..1e4 => format!("{value:.0}"),
        ..1e6 => format!("{:.1}k", value / 1e3),
        f64::INFINITY => "inf".into(),
        _ => format!("{:.2}M", value / 1e6),
    }
}

/// 41s, 5m 07s, 2h 30m, 3d 04h.
fn duration(duration: Duration) -> String {
    let seconds = duration.as_secs_f64().round() as u64;
    let (days, hours) = (seconds / 86_400, seconds / 3600 % 24);
    match (days, hours, seconds / 60 % 60) {
        (0, 0, 0) => format!("{seconds}s"),
        (0, 0, minutes) => format!("{minutes}m {:02}s", seconds % 60),
        (0, _, minutes) => format!("{hours}h {minutes:02}m"),
        _ => format!("{days}d {hours:02}h"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(metrics: &[(&str, f64)]) -> Vec<(String, f64)> {
        metrics.iter().map(|(name, value)| (name.to_string(), *value)).collect()
    }

    #[test]
    fn a_line_on_training_says_all_that_one_asks() {
        let (step, epoch, loss) = (200, 2, 3.41234);
        let report =
            TrainReport { step, epoch, loss, learning_rate: 1e-3, tokens_per_second: 12_345.0 };
        assert_eq!(
            report.line(10_000, Some(Duration::from_secs(312))),
            "step   200/10000   2.0%, epoch 2, loss 3.4123, lr 1.00e-3, 12.3k tokens/s, 5m 12s left"
        );
        assert!(report.line(200, None).ends_with("tokens/s"));
        assert!(report.line(0, None).starts_with("step 200/0"));
    }

    #[test]
    fn a_line_on_an_evaluation_names_single_sets_only_without_a_total() {
        let sets = named(&[("test/64x4/accuracy", 0.5), ("test/128x8/accuracy", 0.25)]);
        let line = evaluation_line(10, &sets, true);
        assert_eq!(
            line,
            "evaluated at step 10: test/64x4/accuracy 0.5000, test/128x8/accuracy 0.2500 (best so far)"
        );
        let both = named(&[("test/64x4/accuracy", 0.5), ("test/accuracy", 0.375)]);
        assert_eq!(evaluation_line(10, &both, false), "evaluated at step 10: test/accuracy 0.3750");
    }

    #[test]
    fn lines_come_every_two_seconds_and_at_the_end() {
        let (mut lines, start) = (Lines::default(), Instant::now());
        let mut due = |ms: u64, last| lines.due(start + Duration::from_millis(ms), last);
        let came = [due(0, false), due(1999, false), due(2000, false), due(2001, true)];
        assert_eq!(came, [true, false, true, true]);
    }

    #[test]
    fn time_left_counts_this_process_alone_and_leaves_out_its_warm_up() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut pace = Pace::new(900, start);
        assert_eq!(pace.time_left(900, 1000, at(5)), None);
        assert_eq!(pace.time_left(910, 1000, at(30)), Some(Duration::from_secs(270)));
        pace.first = Some((910, at(30)));
        assert_eq!(pace.time_left(920, 1000, at(31)), Some(Duration::from_secs(8)));
        assert_eq!(pace.time_left(1000, 1000, at(39)), Some(Duration::ZERO));
    }

    #[test]
    fn numbers_stay_short_whatever_they_are() {
        let values = [0.0, 0.99123, 1e-4, -2.5, 123_456.0, f64::NAN, f64::NEG_INFINITY];
        let texts = values.map(short);
        assert_eq!(texts, ["0", "0.9912", "1.00e-4", "-2.5000", "1.23e5", "NaN", "-inf"]);
        assert_eq!([950.0, 12_340.0, 4.56e6].map(count), ["950", "12.3k", "4.56M"]);
        let times = [0.4, 41.0, 307.0, 9000.0, 273_600.0].map(Duration::from_secs_f64);
        assert_eq!(times.map(duration), ["0s", "41s", "5m 07s", "2h 30m", "3d 04h"]);
    }

    #[cfg(not(windows))]
    #[test]
    fn a_terminal_without_a_screen_is_not_drawn_on() {
        let kinds = [None, Some(""), Some("dumb"), Some("xterm-256color"), Some("screen")];
        let draws = kinds.map(|kind| can_draw(kind.map(OsStr::new)));
        assert_eq!(draws, [false, false, false, true, true]);
    }

    #[test]
    fn a_quiet_view_and_lines_take_anything() {
        for style in [ProgressStyle::Quiet, ProgressStyle::Lines] {
            let mut progress = Progress::new(0, 5, style, Interrupter::new());
            progress.note("resumed");
            progress.train(3, 1, f64::NAN, 0.0, f64::INFINITY);
            progress.evaluated(3, &[], false);
            progress.finish();
        }
    }
}
