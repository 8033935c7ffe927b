//! Doing the runs of a sweep: on several devices at once, again after a cut, beside other
//! processes.
//!
//! Runs are known by the hash of their config, so nothing is remembered but rows and run folders. A
//! worker takes a run by the lock of `OUT/ID.lock`, which ends with the last process that holds it,
//! looks once more whether it has a row, does it, and adds its row in the plan's place. Shards take
//! every n-th run. Workers are threads; what a run computes depends on none of the others.

use std::collections::VecDeque;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value as Json;

use crate::estimate::{Estimates, duration};
use crate::order::{Asked, Only, Order};
use crate::rows::{Added, FAILED, Row, RowsFile};
use crate::runner::{Assignment, Ending};
use crate::state_size::{PUBLISHED_BYTES, published_state_bytes};
use crate::{Plan, PlannedRun, Runner, Stop, Sweep, SweepError};

/// A sweep and how to go about it.
#[derive(Debug)]
pub struct SweepJob<'a> {
    /// The sweep to do.
    pub sweep: &'a Sweep,
    /// Its runs.
    pub plan: &'a Plan,
    /// Devices, each with as many workers as `jobs` says.
    pub devices: Vec<String>,
    /// Runs at once on one device.
    pub jobs: usize,
    /// Threads of the processor for one run's products; by default as many as there are cores.
    pub threads: Option<usize>,
    /// Which of the runs are done here.
    pub shard: Shard,
    /// The runs that are done here, by their settings.
    pub only: Only,
    /// The folder that gets one folder a run.
    pub out: PathBuf,
    /// Whether runs that failed before are tried again, from their start.
    pub retry_failed: bool,
    /// The commit, for rows of runs that failed before they could say it themselves.
    pub commit: Option<String>,
    /// How a person stops it.
    pub stop: Stop,
}

/// One of `count` parts of something that is numbered: every `count`-th from the `index`-th, from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shard {
    index: usize,
    count: usize,
}

impl Shard {
    /// All of it.
    pub const WHOLE: Self = Self { index: 1, count: 1 };

    /// Whether what stands at `place`, from 0, is of this part.
    pub fn takes(self, place: usize) -> bool {
        place % self.count == self.index - 1
    }
}

impl FromStr for Shard {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts =
            text.split_once('/').and_then(|(i, n)| Some((i.parse().ok()?, n.parse().ok()?)));
        match parts {
            Some((index, count)) if (1..=count).contains(&index) => Ok(Self { index, count }),
            _ => Err(format!("`{text}` is no shard; 1/4 is the first of four")),
        }
    }
}

/// Counts of a sweep's runs, after it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Done {
    /// Runs of this shard.
    pub runs: usize,
    /// Those that had a row before.
    pub skipped: usize,
    /// Of those, the failed: they are not tried again.
    pub failed_before: usize,
    /// Those that got a row now, failed ones too.
    pub finished: usize,
    /// Of those, the failed.
    pub failed: usize,
    /// Those that others did meanwhile.
    pub elsewhere: usize,
}

impl Done {
    /// Whether every run of the shard has a row.
    pub fn complete(&self) -> bool {
        self.skipped + self.finished + self.elsewhere == self.runs
    }
}

/// Message of a worker.
enum Event {
    Started(usize, String),
    Finished(usize, Box<Row>, Added),
    Elsewhere(usize),
    Interrupted(usize),
    Broken(SweepError),
}

/// A run that waits, and when to look at it; others hold the run if that is later than now.
type Waiting = (usize, Instant);

/// How long to leave a run alone that someone else does.
const PATIENCE: Duration = Duration::from_millis(300);

impl SweepJob<'_> {
    /// Does every run of the shard that has no row. `show` gets lines for a person.
    /// # Errors
    /// [`SweepError`] where the folder's rows are of another base config or protocol, or rows
    /// cannot be read or written. A run that fails is a row and no error.
    pub fn run(&self, runner: &dyn Runner, show: &mut dyn FnMut(&str)) -> Result<Done, SweepError> {
        let rows = self.sweep.rows(self.plan)?;
        if let Some(repair) = &rows.repair {
            show(repair);
        }
        fs::create_dir_all(&self.out).map_err(SweepError::io("create", &self.out))?;
        let left = self.left(&rows.rows)?;
        let estimates = Estimates::new(&self.sweep.config.select, &rows.rows);
        let (tally, open, began) = (left.tally, left.open, Instant::now());
        let mut watch = Watch { job: self, tally, estimates, open, running: vec![], began, show };
        watch.begin();
        self.work(runner, &left.now, &mut watch)?;
        if self.sweep.config.select.repeat_chosen && !self.over(began) {
            let repeats = watch.repeats(self.left(&self.sweep.rows(self.plan)?.rows)?);
            self.work(runner, &repeats, &mut watch)?;
        }
        Ok(watch.tally)
    }

    /// The runs of this shard that have no row.
    pub(crate) fn open(&self) -> Result<Vec<&PlannedRun>, SweepError> {
        let open = self.left(&self.sweep.rows(self.plan)?.rows)?.open;
        Ok(open.into_iter().map(|place| &self.plan.runs[place]).collect())
    }

    /// The runs of this shard, as the rows have them.
    fn left(&self, rows: &[Row]) -> Result<Left, SweepError> {
        let runs: Vec<_> = self.plan.runs.iter().map(|run| run.settings.clone()).collect();
        let order = Order::new(self.sweep, &runs, rows)?;
        let here = |i: &usize| self.shard.takes(*i) && self.only.takes(&self.plan.runs[*i]);
        let mine = order.sorted((0..runs.len()).filter(here));
        let row = |i: &usize| rows.iter().find(|row| row.id() == self.plan.runs[*i].id);
        let again = |row: &Row| row.failed() && self.retry_failed;
        let (done, open): (Vec<usize>, Vec<usize>) =
            mine.iter().partition(|i| row(i).is_some_and(|row| !again(row)));
        let failed_before = done.iter().filter(|i| row(i).is_some_and(Row::failed)).count();
        let tally =
            Done { runs: mine.len(), skipped: done.len(), failed_before, ..Done::default() };
        let wait = self.sweep.config.select.repeat_chosen;
        let (repeats, now) = open.iter().partition(|i| wait && order.repeats(**i));
        let repeats: Vec<usize> = repeats;
        let repeats = repeats.into_iter().filter(|&i| order.asked(i) == Asked::Yes).collect();
        Ok(Left { tally, open, now, repeats })
    }

    /// Has workers do these runs, and listens to them until they are gone.
    fn work(
        &self,
        runner: &dyn Runner,
        runs: &[usize],
        watch: &mut Watch,
    ) -> Result<(), SweepError> {
        let queue: Queue = Mutex::new(runs.iter().map(|&i| (i, Instant::now())).collect());
        let began = watch.began;
        thread::scope(|scope| {
            let (sender, events) = mpsc::channel();
            for device in self.devices.iter().flat_map(|d| std::iter::repeat_n(d, self.jobs)) {
                let worker = Worker { job: self, runner, device, queue: &queue, began };
                let sender = sender.clone();
                scope.spawn(move || worker.work(&sender));
            }
            drop(sender);
            loop {
                match events.recv_timeout(Duration::from_secs(30)) {
                    Ok(event) => watch.note(event)?,
                    Err(RecvTimeoutError::Timeout) => watch.look(),
                    Err(RecvTimeoutError::Disconnected) => return Ok(()),
                }
            }
        })
    }

    /// When no more runs start.
    fn over(&self, began: Instant) -> bool {
        let limit = self.sweep.config.limits.wall_minutes;
        self.stop.no_more() || limit.is_some_and(|m| began.elapsed().as_secs_f64() > 60.0 * m)
    }
}

/// Work of a shard.
struct Left {
    /// Before anything is done.
    tally: Done,
    /// All runs without a row.
    open: Vec<usize>,
    /// Those to do first.
    now: Vec<usize>,
    /// Those that repeat a setting that was chosen, to do after.
    repeats: Vec<usize>,
}

/// Runs that wait.
type Queue = Mutex<VecDeque<Waiting>>;

/// Does one run after another on one device.
struct Worker<'a> {
    job: &'a SweepJob<'a>,
    runner: &'a dyn Runner,
    device: &'a str,
    queue: &'a Queue,
    /// When the sweep did.
    began: Instant,
}

/// Next action of a worker.
enum Next {
    Run(usize),
    Later,
    Nothing,
}

impl Worker<'_> {
    fn work(&self, events: &Sender<Event>) {
        while !self.job.over(self.began) {
            let event = match self.next() {
                Next::Nothing => return,
                Next::Later => {
                    thread::sleep(Duration::from_millis(20));
                    continue;
                }
                Next::Run(run) => match self.attempt(run, events) {
                    Ok(Some(event)) => event,
                    Ok(None) => continue,
                    Err(e) => Event::Broken(e),
                },
            };
            if matches!(event, Event::Broken(_)) {
                self.waiting().clear(); // nobody starts one more
            }
            let _nobody_listens_after_an_error = events.send(event);
        }
    }

    fn waiting(&self) -> MutexGuard<'_, VecDeque<Waiting>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn next(&self) -> Next {
        let mut queue = self.waiting();
        let now = Instant::now();
        let due = queue.iter().position(|(_, when)| *when <= now);
        match due.and_then(|place| queue.remove(place)) {
            Some((run, _)) => Next::Run(run),
            None if queue.is_empty() => Next::Nothing,
            None => Next::Later,
        }
    }

    /// Does a run unless someone else has it or had it. Nothing if it has to wait.
    fn attempt(&self, place: usize, events: &Sender<Event>) -> Result<Option<Event>, SweepError> {
        let run = &self.job.plan.runs[place];
        let Some(lock) = self.take(run)? else {
            self.waiting().push_back((place, Instant::now() + PATIENCE));
            return Ok(None);
        };
        let rows = RowsFile::new(&self.job.sweep.folder).in_order_of(self.job.plan);
        let known = rows.load()?.rows.into_iter().find(|row| row.id() == run.id);
        let anew = known.as_ref().is_some_and(Row::failed) && self.job.retry_failed;
        if known.is_some() && !anew {
            return Ok(Some(Event::Elsewhere(place)));
        }
        let _nobody_listens = events.send(Event::Started(place, self.device.into()));
        let Some(row) = self.perform(run, &lock, anew) else {
            return Ok(Some(Event::Interrupted(place)));
        };
        let added = rows.add(&row)?;
        Ok(Some(Event::Finished(place, Box::new(row), added)))
    }

    /// The run's lock, unless another process has it.
    fn take(&self, run: &PlannedRun) -> Result<Option<File>, SweepError> {
        let path = self.job.out.join(format!("{}.lock", run.id));
        let file = OpenOptions::new().create(true).append(true).read(true).open(&path);
        let file = file.map_err(SweepError::io("lock", &path))?;
        match file.try_lock() {
            Ok(()) => Ok(Some(file)),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(e)) => Err(SweepError::io("lock", &path)(e)),
        }
    }

    /// The run's row, or nothing if it was interrupted.
    fn perform(&self, run: &PlannedRun, lock: &File, anew: bool) -> Option<Row> {
        let mut config = run.config.clone();
        config.insert("name".into(), run.id.clone().into());
        let began = Instant::now();
        let (id, out, device, threads) = (&run.id, &self.job.out, self.device, self.job.threads);
        let assignment = Assignment { config: &config, id, out, device, threads, lock, anew };
        let mut row = self.job.start_row(run);
        match self.runner.run(&assignment, &self.job.stop) {
            Ok(Ending::Done(summary)) => {
                row.set("status", summary["status"].as_str().unwrap_or("completed"));
                row.add_summary(&summary);
                if let Some(bytes) = published_state_bytes(&run.config) {
                    row.set(PUBLISHED_BYTES, bytes);
                }
            }
            Ok(Ending::Interrupted) => return None,
            Err(why) => {
                row.set("status", FAILED);
                row.set("error", why);
                row.set("device", self.device);
                row.set("commit", self.job.commit.as_deref().unwrap_or_default());
                row.set("wall_seconds", began.elapsed().as_secs_f64());
            }
        }
        Some(row)
    }
}

impl SweepJob<'_> {
    /// The columns that every row has, in their order.
    fn start_row(&self, run: &PlannedRun) -> Row {
        let mut row = Row::default();
        row.set("run", &run.id);
        row.set("base", &self.plan.base);
        row.set("protocol", self.sweep.label());
        row.set("status", "");
        row.set("error", "");
        for (name, value) in &run.settings {
            row.set(name, value);
        }
        if let Some(seed) = run.config.get("seed") {
            row.set("seed", seed);
        }
        row
    }
}

/// Counts, and tells a person.
struct Watch<'a> {
    job: &'a SweepJob<'a>,
    tally: Done,
    estimates: Estimates,
    /// Runs that have no row yet.
    open: Vec<usize>,
    /// Runs at work.
    running: Vec<usize>,
    began: Instant,
    show: &'a mut dyn FnMut(&str),
}

impl Watch<'_> {
    fn begin(&mut self) {
        let Done { runs, skipped, .. } = self.tally;
        let workers = self.job.devices.len() * self.job.jobs;
        let devices = self.job.devices.join(", ");
        (self.show)(&format!(
            "{runs} runs, {skipped} of them done before; {workers} at once on {devices}"
        ));
    }

    /// Takes up the runs that repeat what was chosen meanwhile.
    fn repeats(&mut self, left: Left) -> Vec<usize> {
        let known = self.tally.finished + self.tally.elsewhere;
        self.tally.runs = left.tally.runs;
        self.tally.skipped = left.tally.skipped.saturating_sub(known);
        self.open = left.open;
        left.repeats
    }

    fn note(&mut self, event: Event) -> Result<(), SweepError> {
        match event {
            Event::Started(place, device) => {
                self.running.push(place);
                let run = self.job.plan.runs[place].describe();
                (self.show)(&format!("started on {device}: {run}"));
            }
            Event::Finished(place, row, added) => self.finished(place, &row, added),
            Event::Elsewhere(place) => {
                self.tally.elsewhere += 1;
                self.open.retain(|&open| open != place);
            }
            Event::Interrupted(place) => {
                self.running.retain(|&running| running != place);
                let run = self.job.plan.runs[place].describe();
                (self.show)(&format!("interrupted, it goes on next time: {run}"));
            }
            Event::Broken(e) => return Err(e),
        }
        Ok(())
    }

    fn finished(&mut self, place: usize, row: &Row, added: Added) {
        match added {
            Added::New => self.tally.finished += 1,
            Added::Known => self.tally.elsewhere += 1,
        }
        self.tally.failed += usize::from(row.failed());
        self.open.retain(|&open| open != place);
        self.running.retain(|&running| running != place);
        self.estimates.add(row);
        let run = self.job.plan.runs[place].describe();
        let text = match row.failed() {
            true => format!("failed: {run}: {}", row.text("error")),
            false => format!(
                "{run}: {} {} after {} steps, {}",
                row.text("score_name"),
                short(row.number("score")),
                row.text("steps"),
                row.number("wall_seconds").map_or("unknown time".into(), duration),
            ),
        };
        (self.show)(&text);
        self.progress();
    }

    /// Where each run at work is, then the sweep as a whole.
    fn look(&mut self) {
        for &place in &self.running {
            let run = &self.job.plan.runs[place];
            if let Some(at) = last_metrics(&self.job.out.join(&run.id).join("metrics.jsonl")) {
                (self.show)(&format!("{at}: {}", run.describe()));
            }
        }
        self.progress();
    }

    /// How far it is, how fast it goes, and how long it will take.
    fn progress(&mut self) {
        let Done { runs, skipped, finished, failed, elsewhere, failed_before: _ } = self.tally;
        let minutes = self.began.elapsed().as_secs_f64() / 60.0;
        let runs_open = self.open.iter().map(|&place| &self.job.plan.runs[place]);
        let workers = (self.job.devices.len() * self.job.jobs) as f64;
        let left = match self.estimates.total(runs_open) {
            Some(seconds) => format!("about {} left", duration(seconds / workers)),
            None => "time left unknown".into(),
        };
        (self.show)(&format!(
            "{}/{runs} runs, {failed} failed, {:.1} a minute, {left}",
            skipped + finished + elsewhere,
            finished as f64 / minutes.max(1e-9),
        ));
    }
}

/// `at step 300, loss 0.5230`, from the last line of a run's metrics; nothing where there is none.
fn last_metrics(path: &Path) -> Option<String> {
    const TAIL: u64 = 1 << 14;
    let mut file = File::open(path).ok()?;
    let length = file.metadata().ok()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(TAIL))).ok()?;
    let mut tail = vec![];
    file.read_to_end(&mut tail).ok()?;
    let tail = String::from_utf8_lossy(&tail);
    // The run may be in the middle of its last line, and the first one begins before the tail.
    let mut lines = tail.lines().rev().filter_map(|l| serde_json::from_str::<Json>(l).ok());
    let line = lines.find(|line| line["step"].is_u64())?;
    let loss = line["loss"].as_f64().map(|loss| format!(", loss {loss:.4}")).unwrap_or_default();
    Some(format!("at step {}{loss}", line["step"]))
}

fn short(value: Option<f64>) -> String {
    value.map_or_else(|| "unknown".into(), |value| format!("{value:.4}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_is_where_its_last_whole_line_says() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        assert_eq!(last_metrics(&path), None, "no file yet");
        let line = |step: usize| format!("{{\"kind\":\"train\",\"step\":{step},\"loss\":0.5}}\n");
        let long: String = (1..=2000).map(line).collect();
        fs::write(&path, format!("{long}{{\"step\":9")).unwrap();
        assert_eq!(last_metrics(&path).as_deref(), Some("at step 2000, loss 0.5000"));
        fs::write(&path, "{\"step\":7,\"test/accuracy\":0.25}\n").unwrap();
        assert_eq!(last_metrics(&path).as_deref(), Some("at step 7"));
    }
}
