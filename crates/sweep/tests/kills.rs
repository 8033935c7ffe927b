//! Sweeps that are killed, and sweeps that share a folder. The runs are threads of processes that
//! this program starts from itself.
#![allow(clippy::unwrap_used)] // a test that cannot go on has failed

use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use linattn_sweep::{Row, RowsFile, Shard};

mod support;

const WORKERS: usize = 3;

/// The sweep of the other tests with more seeds: 336 runs, so that every kill hits one at work.
fn long_sweep() -> String {
    let seeds: Vec<String> = (0..42).map(|seed| seed.to_string()).collect();
    support::SWEEP.replacen("[0, 1, 2]", &format!("[{}]", seeds.join(", ")), 1)
}

/// Starts `worker` below in a process of its own.
fn start(folder: &Path, shard: &str, milliseconds: &str) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["worker", "--exact", "--ignored", "--nocapture"])
        .envs([("SWEEP_SHARD", shard), ("SWEEP_MS", milliseconds)])
        .env("SWEEP_FOLDER", folder)
        .stdout(Stdio::null())
        .spawn()
        .unwrap()
}

#[test]
#[ignore = "the other tests start it, and say where"]
fn worker() {
    let say = |name| std::env::var(name).unwrap();
    let shard: Shard = say("SWEEP_SHARD").parse().unwrap();
    let milliseconds = say("SWEEP_MS").parse().unwrap();
    support::sweep(Path::new(&say("SWEEP_FOLDER")), WORKERS, shard, milliseconds).unwrap();
}

fn rows(folder: &Path) -> Vec<Row> {
    RowsFile::new(folder).load().unwrap().rows
}

/// All of a row but how long it took and where.
fn content(rows: &[Row]) -> BTreeSet<Vec<String>> {
    let columns = ["run", "status", "error", "mixer", "rate", "seed", "test/accuracy", "test/loss"];
    rows.iter().map(|row| columns.map(|column| row.text(column).to_string()).to_vec()).collect()
}

/// The rows of a sweep that nothing disturbed.
fn undisturbed(sweep: &str, runs: usize) -> BTreeSet<Vec<String>> {
    let folder = tempfile::tempdir().unwrap();
    support::write(folder.path(), sweep);
    let done = support::sweep(folder.path(), 1, Shard::WHOLE, 0).unwrap();
    assert_eq!((done.runs, done.finished, done.failed), (runs, runs, 2));
    let rows = rows(folder.path());
    assert_eq!(rows.len(), runs);
    content(&rows)
}

/// How much the runs have noted that began.
fn noted(folder: &Path) -> u64 {
    folder.join("runs/starts").metadata().map_or(0, |file| file.len())
}

/// Waits until one more run has begun: on a slow machine that takes its time, and a kill before it
/// would hit nothing.
fn wait_for_a_start(folder: &Path, before: u64) {
    let began = Instant::now();
    while noted(folder) == before {
        assert!(began.elapsed() < Duration::from_secs(30), "no run began within 30 seconds");
        sleep(Duration::from_millis(1));
    }
}

#[test]
fn twenty_kills_lose_no_row_and_repeat_only_what_was_running() {
    let folder = tempfile::tempdir().unwrap();
    support::write(folder.path(), &long_sweep());
    let mut before = 0;
    for kill in 0..20u64 {
        let noted_before = noted(folder.path());
        let mut child = start(folder.path(), "1/1", "12");
        wait_for_a_start(folder.path(), noted_before);
        // Scattered over the first run, what is written after it, and the next.
        sleep(Duration::from_millis(kill * 7919 % 16));
        child.kill().unwrap();
        child.wait().unwrap();
        let rows = rows(folder.path()).len();
        assert!((before..336).contains(&rows), "kill {kill}: {before} rows, then {rows}");
        before = rows;
    }
    assert!(start(folder.path(), "1/1", "1").wait().unwrap().success());
    assert_eq!(content(&rows(folder.path())), undisturbed(&long_sweep(), 336));
    let starts = fs::read_to_string(folder.path().join("runs/starts")).unwrap();
    let mut counts: HashMap<&str, usize> = HashMap::new();
    starts.lines().for_each(|id| *counts.entry(id).or_default() += 1);
    let repeated: usize = counts.values().map(|count| count - 1).sum();
    assert!((1..=20 * WORKERS).contains(&repeated), "{repeated} runs were repeated");
}

#[test]
fn shards_and_doubles_at_once_in_one_folder_give_the_rows_of_one_process() {
    for shards in [["1/2", "2/2"], ["1/1", "1/1"]] {
        let folder = tempfile::tempdir().unwrap();
        support::write(folder.path(), support::SWEEP);
        let children = shards.map(|shard| start(folder.path(), shard, "3"));
        for mut child in children {
            assert!(child.wait().unwrap().success());
        }
        assert_eq!(content(&rows(folder.path())), undisturbed(support::SWEEP, 24), "{shards:?}");
        let starts = fs::read_to_string(folder.path().join("runs/starts")).unwrap();
        assert_eq!(starts.lines().count(), 24, "{shards:?}: no run is done twice");
    }
}
