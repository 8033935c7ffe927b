//! Upper bounds of a run's sizes, checked before anything is made of it.

use crate::config_error::ConfigError;
use linattn_tasks::{Split, Task, TaskConfig};
use toml::Value;

/// Tokens of a sequence, ids of a vocabulary, and whatever else a task counts.
const LARGEST: i64 = 1 << 24;
/// Examples of a set.
const MOST_EXAMPLES: i64 = 1 << 40;
/// Positions in a batch have 32 bits.
const BATCH_TOKENS: u64 = u32::MAX as u64;

/// Refuses a task with numbers that no memory or time is enough for.
/// # Errors
/// [`ConfigError::Value`] names the first.
pub(crate) fn check_task(task: &TaskConfig) -> Result<(), ConfigError> {
    match Value::try_from(task) {
        Ok(value) => check_numbers("task", &value),
        // TOML's whole numbers end where those of a config do not.
        Err(e) => Err(ConfigError::value("task", e, format!("of numbers up to {MOST_EXAMPLES}"))),
    }
}

fn check_numbers(key: &str, value: &Value) -> Result<(), ConfigError> {
    match value {
        Value::Table(table) => table
            .iter()
            .try_for_each(|(name, value)| check_numbers(&format!("{key}.{name}"), value)),
        Value::Array(list) => list
            .iter()
            .enumerate()
            .try_for_each(|(i, value)| check_numbers(&format!("{key}[{i}]"), value)),
        Value::Integer(number) => {
            let most = if key.ends_with(".examples") { MOST_EXAMPLES } else { LARGEST };
            match *number <= most {
                true => Ok(()),
                false => Err(ConfigError::value(key, number, format!("at most {most}"))),
            }
        }
        _ => Ok(()),
    }
}

/// Refuses batches with more positions than a batch can have.
/// # Errors
/// [`ConfigError::Value`] names the key that makes them.
pub(crate) fn check_batches(
    batch_size: usize,
    of_tests: Option<usize>,
    task: &dyn Task,
) -> Result<(), ConfigError> {
    let ours = ("train.batch_size", batch_size as u64);
    let tests = of_tests.map_or(ours, |n| ("evaluate.batch_size", n as u64));
    for (split, (key, size)) in
        [(Split::Train, ours), (Split::Validation, tests), (Split::Test, tests)]
    {
        for set in task.sets(split) {
            let most = BATCH_TOKENS / (set.length as u64).max(1);
            if size.min(set.examples) > most {
                let want = format!("at most {most} with sequences of {} tokens", set.length);
                return Err(ConfigError::value(key, size, want));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use crate::config::RunConfig;
    use crate::cost::host_memory;

    fn run(change: &str) -> Result<RunConfig, String> {
        let text = "[task.mqar]\ntrain = [{ length = 16, pairs = 2, examples = 8 }]\n\
                    test = [{ length = 16, pairs = 2, examples = 8 }]\n\
                    [model]\nd_model = 8\n[[model.layers]]\nmixer.deltanet = {}\n\
                    [train]\nbatch_size = 4\nsteps = 3\n";
        let file = std::path::Path::new("x.toml");
        RunConfig::from_table(file, toml::from_str(text).unwrap(), &[change.to_string()])
            .map_err(|e| e.to_string())
    }

    #[test]
    fn numbers_that_nothing_can_hold_are_refused_by_key() {
        let set = |what: &str| format!("task.mqar.{what}");
        let huge = "length = 1_099_511_627_776, pairs = 2, examples = 8";
        let many = "length = 16, pairs = 2, examples = 9_223_372_036_854_775_807";
        for (change, key) in [
            (set(&format!("test=[{{ {huge} }}]")), "`task.mqar.test[0].length` is 1099511627776"),
            (set(&format!("train=[{{ {huge} }}]")), "`task.mqar.train[0].length`"),
            (set(&format!("test=[{{ {many} }}]")), "`task.mqar.test[0].examples`"),
            (set(&format!("train=[{{ {many} }}]")), "at most 1099511627776"),
            (set("vocab=4_000_000_000"), "`task.mqar.vocab` is 4000000000"),
        ] {
            let why = run(&change).unwrap_err();
            assert!(why.contains(key) && !why.contains('\n'), "{change}: {why}");
        }
        let parity = "task={ parity = { train = [{ sizes = [3, 9], examples = 8 }], \
                      test = [{ sizes = [3, 9_223_372_036_854_775_807], examples = 8 }] } }";
        let why = run(parity).unwrap_err();
        assert!(why.contains("`task.parity.test[0].sizes[1]`"), "{why}");
    }

    #[test]
    fn batches_have_fewer_positions_than_32_bits_count() {
        let long = "test=[{ length = 65536, pairs = 2, examples = 1_000_000 }], vocab = 70_000";
        let task = format!(
            "task={{ mqar = {{ train = [{{ length = 16, pairs = 2, examples = 8 }}], {long} }} }}"
        );
        let file = std::path::Path::new("x.toml");
        let good = run(&task).unwrap();
        let table = toml::from_str(&good.to_toml()).unwrap();
        let change = ["evaluate.batch_size=65_537".to_string()];
        let why = RunConfig::from_table(file, table, &change).unwrap_err().to_string();
        assert!(why.contains("`evaluate.batch_size` is 65537") && why.contains("65535"), "{why}");
    }

    #[test]
    fn what_a_run_keeps_in_memory_is_known_before() {
        let many = "task.mqar.train=[{ length = 16, pairs = 2, examples = 1_000_000_000_000 }]";
        let (bytes, key) = host_memory(&run(many).unwrap()).unwrap();
        assert!(bytes > 8e12 && key.contains("`train.order`"), "{bytes} {key}");
        assert!(host_memory(&run("seed=1").unwrap()).unwrap().0 < 1e4);
    }
}
