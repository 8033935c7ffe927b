//! How fast examples are made, in tokens a second: on one core, and on all of them.
//!
//! `cargo run --release -p linattn-tasks --example speed`
//!
//! Counted are the tokens of a set's full length, padding included, and separately those that are no
//! padding as far as the last scored position tells.

use linattn_tasks::mad::published_settings;
use linattn_tasks::{
    GroupWordConfig, ModularArithmeticConfig, MqarConfig, ParityConfig, Split, TaskConfig,
};
use std::time::{Duration, Instant};

const LEAST: Duration = Duration::from_millis(300);
const BATCH: u64 = 1024;

fn main() -> Result<(), linattn_tasks::TaskError> {
    println!("{:<44} {:>6} {:>14} {:>14}", "task", "length", "one core, M/s", "all cores, M/s");
    for (name, config) in tasks() {
        let task = config.build(0)?;
        let length = task.sets(Split::Train)[0].length;
        let one = rate(length, |first| {
            for index in first..first + BATCH {
                std::hint::black_box(task.example(Split::Train, 0, index));
            }
        });
        let all = rate(length, |first| {
            let indices: Vec<u64> = (first..first + BATCH).collect();
            std::hint::black_box(task.batch(Split::Train, 0, &indices));
        });
        println!("{name:<44} {length:>6} {one:>14.0} {all:>14.0}");
    }
    Ok(())
}

/// Million tokens a second.
fn rate(length: usize, make: impl Fn(u64)) -> f64 {
    make(0);
    let (started, mut batches) = (Instant::now(), 0);
    while started.elapsed() < LEAST {
        batches += 1;
        make(batches * BATCH);
    }
    (batches * BATCH) as f64 * length as f64 / started.elapsed().as_secs_f64() / 1e6
}

fn tasks() -> Vec<(String, TaskConfig)> {
    let mut list: Vec<(String, TaskConfig)> = vec![
        ("mqar 64x4".into(), TaskConfig::Mqar(MqarConfig::figure2(64, 4))),
        ("mqar 512x64".into(), TaskConfig::Mqar(MqarConfig::figure2(512, 64))),
        ("parity".into(), TaskConfig::Parity(ParityConfig::published())),
        (
            "modular arithmetic".into(),
            TaskConfig::ModularArithmetic(ModularArithmeticConfig::without_brackets()),
        ),
        (
            "modular arithmetic with brackets".into(),
            TaskConfig::ModularArithmetic(ModularArithmeticConfig::with_brackets(true)),
        ),
        ("S5 words".into(), TaskConfig::GroupWord(GroupWordConfig::deltaproduct("S5"))),
    ];
    let baseline = |name: &str| !name.contains('/') || name.ends_with("/baseline");
    let settings = published_settings().into_iter().filter(|setting| baseline(&setting.name));
    list.extend(settings.map(|setting| (setting.name, setting.task)));
    list
}
