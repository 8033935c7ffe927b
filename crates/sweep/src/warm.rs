//! Compiling before a sweep: each model that has runs to do takes a few steps, and is tested.
//!
//! Kernels depend on sizes, so batches, lengths and test sets are those of the runs. Runs that differ in seed,
//! learning rate, weight decay or schedule alone have the same kernels.

use std::fs::{self, File};
use std::path::Path;
use std::sync::mpsc;
use std::sync::{Mutex, PoisonError};
use std::thread;

use toml::{Table, Value};

use crate::runner::{Assignment, Ending};
use crate::{PlannedRun, Runner, SweepError, SweepJob};

/// Steps of a model: the second one starts from the moments that the first one left.
const STEPS: i64 = 2;

/// Counts of models whose kernels were to be compiled.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Warmed {
    /// Models with runs that have no row.
    pub models: usize,
    /// Models that took their steps.
    pub done: usize,
    /// Models that could not.
    pub failed: usize,
}

/// A model, and the first of its runs.
type Model<'a> = (&'a PlannedRun, Table);

impl SweepJob<'_> {
    /// Has the models of this shard's runs without a row take their steps, so that the kernels are kept which the
    /// runs need. Neither rows nor runs are written. `show` gets a line for each model.
    /// # Errors
    /// [`SweepError`] as [`run`](Self::run). A model that fails is a line and no error.
    pub fn warm(
        &self,
        runner: &dyn Runner,
        show: &mut dyn FnMut(&str),
    ) -> Result<Warmed, SweepError> {
        let models = self.models()?;
        // Others may warm other parts of the sweep.
        let out = self.out.join(format!("warm-{}", std::process::id()));
        fs::create_dir_all(&out).map_err(SweepError::io("create", &out))?;
        let mut warmed = Warmed { models: models.len(), ..Warmed::default() };
        show(&format!("{} models have runs to do", warmed.models));
        let queue = Mutex::new(models.iter());
        let next = || queue.lock().unwrap_or_else(PoisonError::into_inner).next();
        thread::scope(|scope| {
            let (sender, results) = mpsc::channel();
            for device in self.devices.iter().flat_map(|d| std::iter::repeat_n(d, self.jobs)) {
                let (sender, next, out) = (sender.clone(), &next, &out);
                scope.spawn(move || {
                    while let Some(model) = next().filter(|_| !self.stop.no_more()) {
                        let result = self.few_steps(runner, model, device, out);
                        let _nobody_listens_after_an_error =
                            sender.send((model.0.describe(), result));
                    }
                });
            }
            drop(sender);
            for (model, result) in results {
                match result {
                    Ok(Ending::Done(_)) => {
                        warmed.done += 1;
                        show(&format!("{}/{}: {model}", warmed.done, warmed.models));
                    }
                    Ok(Ending::Interrupted) => {}
                    Err(why) => {
                        warmed.failed += 1;
                        show(&format!("failed: {model}: {why}"));
                    }
                }
            }
        });
        fs::remove_dir_all(&out).map_err(SweepError::io("remove", &out))?;
        Ok(warmed)
    }

    /// The models of the runs that have no row, each once.
    fn models(&self) -> Result<Vec<Model<'_>>, SweepError> {
        let mut models: Vec<Model> = vec![];
        for run in self.open()? {
            let config = alike(&run.config);
            if models.iter().all(|(_, known)| *known != config) {
                models.push((run, config));
            }
        }
        Ok(models)
    }

    fn few_steps(
        &self,
        runner: &dyn Runner,
        (run, config): &Model,
        device: &str,
        out: &Path,
    ) -> Result<Ending, String> {
        let mut config = config.clone();
        config.insert("name".into(), run.id.clone().into());
        let lock = File::create(out.join(format!("{}.lock", run.id)));
        let lock = lock.map_err(|e| format!("can't lock {}: {e}", out.display()))?;
        let (id, threads) = (&run.id, self.threads);
        let assignment =
            Assignment { config: &config, id, out, device, threads, lock: &lock, anew: true };
        runner.run(&assignment, &self.stop)
    }
}

/// A run's config for a few steps, the same for all runs that need the same kernels.
fn alike(config: &Table) -> Table {
    let mut config = config.clone();
    for key in ["name", "seed", "schedule"] {
        config.remove(key);
    }
    if let Some(optimizer) = config.get_mut("optimizer").and_then(Value::as_table_mut) {
        optimizer.remove("learning_rate");
        optimizer.remove("weight_decay");
    }
    if let Some(train) = config.get_mut("train").and_then(Value::as_table_mut) {
        train.remove("epochs");
        train.insert("steps".into(), STEPS.into());
    }
    config
}

#[cfg(test)]
mod tests {
    use super::alike;

    #[test]
    fn runs_of_one_model_are_alike() {
        let run = |seed: i64, rate: f64, width: i64| {
            let text = format!(
                "name = 'a'\nseed = {seed}\n[model]\nd_model = {width}\n[train]\nepochs = 4\nbatch_size = 8\n\
                 [optimizer]\nlearning_rate = {rate}\nbeta_1 = 0.9\n[schedule]\nwarmup_steps = 100\n"
            );
            alike(&text.parse().unwrap())
        };
        let first = run(1, 0.1, 64);
        assert_eq!(first, run(2, 0.01, 64));
        assert_ne!(first, run(1, 0.1, 32));
        let wanted = "[model]\nd_model = 64\n[train]\nbatch_size = 8\nsteps = 2\n[optimizer]\nbeta_1 = 0.9\n";
        assert_eq!(first, wanted.parse().unwrap());
    }
}
