//! Sweeps over runs that take milliseconds.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::Path;
use std::thread::sleep;
use std::time::Duration;

use linattn_sweep::{
    Assignment, Done, Ending, Only, Plan, Runner, Shard, Stop, Sweep, SweepError, SweepJob,
};
use serde_json::json;
use toml::{Table, Value};

/// 24 runs.
pub const SWEEP: &str = r#"
base = "base.toml"
scaled_down = "runs of a few milliseconds"

[grid]
rate = [0.1, 0.2, 0.3, 0.4]
seed = [0, 1, 2]

[[variants]]
axis = "mixer"
name = "plain"
set = { width = 8 }

[[variants]]
axis = "mixer"
name = "gated"
set = { width = 16, gate = true }

[select]
rule = "published"
over = ["rate"]
replicate = "seed"
"#;

pub const BASE: &str = "name = \"base\"\nseed = 0\nrate = 0.5\nwidth = 4\ngate = false\n";

/// Puts a sweep into a folder.
pub fn write(folder: &Path, sweep: &str) {
    fs::write(folder.join("sweep.toml"), sweep).unwrap();
    fs::write(folder.join("base.toml"), BASE).unwrap();
}

/// Runs that only wait, and note in `starts` when they begin.
pub struct Fake {
    pub milliseconds: u64,
}

impl Runner for Fake {
    fn resolve(&self, base: &Path, overrides: &[(String, Value)]) -> Result<Table, String> {
        let text = fs::read_to_string(base).map_err(|e| e.to_string())?;
        let mut config: Table = toml::from_str(&text).map_err(|e| e.to_string())?;
        for (key, value) in overrides {
            let known = config.get(key).ok_or_else(|| format!("there is no key `{key}`"))?;
            if known.type_str() != value.type_str() {
                return Err(format!("`{key}` is {value}; it has to be a {}", known.type_str()));
            }
            config.insert(key.clone(), value.clone());
        }
        Ok(config)
    }

    fn run(&self, run: &Assignment, _stop: &Stop) -> Result<Ending, String> {
        let starts = OpenOptions::new().create(true).append(true).open(run.out.join("starts"));
        let noted = starts.and_then(|mut file| file.write_all(format!("{}\n", run.id).as_bytes()));
        noted.map_err(|e| e.to_string())?;
        sleep(Duration::from_millis(self.milliseconds));
        let number = |key: &str| run.config[key].as_float().unwrap_or(0.0);
        let seed = run.config["seed"].as_integer().unwrap_or(0);
        if number("rate") == 0.4 && seed == 2 {
            return Err("the loss is no number".into());
        }
        let accuracy = 1.0 - number("rate") + 0.01 * seed as f64;
        Ok(Ending::Done(json!({
            "status": "completed", "score": accuracy, "score_name": "accuracy", "seed": seed,
            "device": run.device, "steps": 10, "parameters": 100, "state_bytes": 64,
            "tokens": 1000, "wall_seconds": 0.5,
            "metrics": { "test/accuracy": accuracy, "test/loss": number("rate") },
        })))
    }
}

/// A whole sweep by `jobs` workers, without a word.
pub fn job<'a>(sweep: &'a Sweep, plan: &'a Plan, jobs: usize, shard: Shard) -> SweepJob<'a> {
    SweepJob {
        sweep,
        plan,
        devices: vec!["cpu".into()],
        jobs,
        threads: None,
        shard,
        only: Only::default(),
        out: sweep.folder.join("runs"),
        retry_failed: false,
        commit: Some("abc".into()),
        stop: Stop::default(),
    }
}

/// Does the sweep of a folder.
pub fn sweep(folder: &Path, jobs: usize, shard: Shard, ms: u64) -> Result<Done, SweepError> {
    let sweep = Sweep::read(&folder.join("sweep.toml"))?;
    let runner = Fake { milliseconds: ms };
    let plan = sweep.plan(&runner)?;
    job(&sweep, &plan, jobs, shard).run(&runner, &mut |_| {})
}
