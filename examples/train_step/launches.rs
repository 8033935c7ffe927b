//! Launches of a step, from CubeCL's log of every launch.
//!
//! Logging changes what a step takes, and is chosen before a device is first used: a second process does it.

use std::collections::BTreeMap;
use std::error::Error;
use std::io;
use std::path::Path;
use std::process::Command;
use std::thread::sleep;
use std::time::Duration;

/// Steps that are counted.
pub const STEPS: usize = 4;
/// A log that has not grown for so long is complete: another thread writes it.
const QUIET: Duration = Duration::from_millis(500);
const LOG: &str = "launches.log";

/// A kernel's launches, and the time of all of them in microseconds.
#[derive(Debug, Default, Clone, Copy, PartialEq)]
struct Launched {
    count: usize,
    microseconds: f64,
}

/// Launches a step of this program with the arguments it was called with; standard error has them by kernel.
pub fn count() -> Result<usize, Box<dyn Error>> {
    let folder = tempfile::tempdir()?;
    let config = format!("[profiling]\nlogger = {{ level = \"basic\", file = \"{LOG}\" }}\n");
    std::fs::write(folder.path().join("cubecl.toml"), config)?;
    let log = folder.path().join(LOG);
    let output = Command::new(std::env::current_exe()?)
        .args(std::env::args_os().skip(1))
        .arg("--logged")
        .arg(&log)
        .current_dir(folder.path())
        .output()?;
    if !output.status.success() {
        let why = String::from_utf8_lossy(&output.stderr);
        return Err(format!("the process that counts ended with {}: {why}", output.status).into());
    }
    let from: usize = String::from_utf8(output.stdout)?.trim().parse()?;
    if !log.exists() {
        return Err("this device logs no launches".into());
    }
    let lines = std::fs::read_to_string(&log)?;
    let kernels = by_kernel(&lines[from..]);
    print(&kernels);
    Ok(kernels.values().map(|kernel| kernel.count).sum::<usize>() / STEPS)
}

/// Runs `steps` and prints how long `log` was before.
pub fn between(log: &Path, steps: impl FnOnce()) -> Result<(), Box<dyn Error>> {
    println!("{}", complete(log)?);
    steps();
    complete(log)?;
    Ok(())
}

/// Length of `log` in bytes once it does not grow any more; 0 where there is none.
fn complete(log: &Path) -> io::Result<u64> {
    let length = || match std::fs::metadata(log) {
        Err(why) if why.kind() == io::ErrorKind::NotFound => Ok(0),
        found => found.map(|found| found.len()),
    };
    let mut before = length()?;
    loop {
        sleep(QUIET);
        let now = length()?;
        if now == before {
            return Ok(now);
        }
        before = now;
    }
}

/// Of lines `| duration | name`, the name's first line alone.
fn by_kernel(log: &str) -> BTreeMap<&str, Launched> {
    let mut kernels = BTreeMap::<&str, Launched>::new();
    for line in log.lines() {
        let mut fields = line.strip_prefix("| ").into_iter().flat_map(|line| line.splitn(2, '|'));
        if let (Some(Some(microseconds)), Some(name)) = (fields.next().map(read), fields.next()) {
            let kernel = kernels.entry(name.trim()).or_default();
            kernel.count += 1;
            kernel.microseconds += microseconds;
        }
    }
    kernels
}

/// Microseconds of a duration as Rust's `Debug` writes it.
fn read(duration: &str) -> Option<f64> {
    let duration = duration.trim();
    let units = [("ns", 1e-3), ("\u{b5}s", 1.0), ("ms", 1e3), ("s", 1e6)];
    let (number, unit) =
        units.iter().find_map(|(name, unit)| Some((duration.strip_suffix(name)?, unit)))?;
    Some(number.parse::<f64>().ok()? * unit)
}

fn print(kernels: &BTreeMap<&str, Launched>) {
    let mut sorted: Vec<_> = kernels.iter().collect();
    sorted.sort_by(|a, b| b.1.microseconds.total_cmp(&a.1.microseconds));
    let a_step = |x: f64| x / STEPS as f64;
    eprintln!("launches a step, their microseconds, kernel");
    for (name, kernel) in sorted {
        eprintln!(
            "{:8.1} {:10.1} {name}",
            a_step(kernel.count as f64),
            a_step(kernel.microseconds)
        );
    }
    let sum = kernels.values().map(|kernel| kernel.microseconds).sum();
    eprintln!("{:19.1} in all", a_step(sum));
}
