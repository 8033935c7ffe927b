//! `data`: what a task asks, for people to look at and for other programs to use.

use crate::eval::split;
use crate::{BAD_INPUT, fail, output};
use linattn_tasks::{Example, Split, Statistic, Task};
use linattn_trainer::{ConfigError, RunConfig};
use serde_json::json;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

/// Shows examples of a run's task as a person wants to see them, or writes them for another program.
#[derive(Debug, clap::Parser)]
#[command(name = "data", version)]
pub struct DataArgs {
    /// The run's TOML file
    #[arg(long)]
    config: PathBuf,
    /// Puts a value in place of the file's: task.mqar.filler=random
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// train, validation or test
    #[arg(long, default_value = "test", value_parser = split)]
    split: Split,
    /// Which set of the split, by its name; the first by default
    #[arg(long, value_name = "NAME")]
    subset: Option<String>,
    /// How many examples; more than the set has are drawn on
    #[arg(long, default_value_t = 5)]
    count: u64,
    /// The first example
    #[arg(long, default_value_t = 0)]
    first: u64,
    /// For people, or one JSON object a line: index, input, target (-100 where nothing is scored), and
    /// prompt and answer as text where there are any; of `--stats` name, value, expected
    #[arg(long, value_enum, default_value_t = Format::Text)]
    format: Format,
    /// Figures of `--count` examples beside what they should be, instead of the examples
    #[arg(long)]
    stats: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Format {
    /// For people
    Text,
    /// One JSON object a line
    Jsonl,
}

/// Runs the command and gives its exit code: 0 done, 1 failed, 2 bad input.
pub fn data(args: DataArgs) -> ExitCode {
    let task = match read_task(&args) {
        Ok(task) => task,
        Err(e) => return fail(BAD_INPUT, &e),
    };
    let set = match find_set(&args, task.as_ref()) {
        Ok(set) => set,
        Err(e) => return fail(BAD_INPUT, &e),
    };
    let mut out = output::buffered();
    let written = match args.stats {
        true => show_statistics(&args, task.as_ref(), set, &mut out),
        false => show_examples(&args, task.as_ref(), set, &mut out),
    };
    output::ended(written.and_then(|()| out.flush()))
}

/// Where examples end.
const MOST: u64 = 1 << 48;

fn read_task(args: &DataArgs) -> Result<Box<dyn Task>, ConfigError> {
    let run = RunConfig::read(&args.config, &args.overrides)?;
    Ok(run.task.build(run.seed)?)
}

fn find_set(args: &DataArgs, task: &dyn Task) -> Result<usize, String> {
    let most = MOST - args.count.min(MOST);
    if args.count > MOST || args.first > most {
        let DataArgs { first, count, .. } = args;
        return Err(format!("`--first` and `--count` are {first} and {count}; {MOST} is the last"));
    }
    let sets = task.sets(args.split);
    if sets.is_empty() {
        return Err(format!("`--split`: the task has no sets of {:?}", args.split).to_lowercase());
    }
    let names: Vec<&str> = sets.iter().map(|set| set.name.as_str()).collect();
    match &args.subset {
        Some(wanted) => names
            .iter()
            .position(|name| name == wanted)
            .ok_or_else(|| format!("`--subset` is {wanted}; it has to be one of {names:?}")),
        None => {
            if names.len() > 1 && !args.stats {
                let first = names[0];
                output::note(&format!("set {first} of {names:?}; `--subset NAME` shows another"));
            }
            Ok(0)
        }
    }
}

fn show_examples(
    args: &DataArgs,
    task: &dyn Task,
    set: usize,
    out: &mut impl Write,
) -> io::Result<()> {
    for index in args.first..args.first.saturating_add(args.count) {
        let example = task.example(args.split, set, index);
        match args.format {
            Format::Text => show(args, task, set, index, &example, out)?,
            Format::Jsonl => {
                let target: Vec<i64> =
                    example.target.iter().map(|t| t.map_or(-100, i64::from)).collect();
                let mut line = json!({ "index": index, "input": example.input, "target": target });
                if let Some(text) = task.text(args.split, set, index) {
                    line["text"] = text.prompt.into();
                    line["answer"] = text.answer.into();
                }
                writeln!(out, "{line}")?;
            }
        }
    }
    Ok(())
}

fn show(
    args: &DataArgs,
    task: &dyn Task,
    set: usize,
    index: u64,
    example: &Example,
    out: &mut impl Write,
) -> io::Result<()> {
    let scored = example.target.iter().flatten().count();
    let length = example.input.len();
    writeln!(out, "example {index}: {length} tokens, {scored} scored")?;
    match task.text(args.split, set, index) {
        Some(text) => {
            writeln!(out, "{}", text.prompt)?;
            if !text.answer.is_empty() {
                writeln!(out, "answer: {}", text.answer)?;
            }
            writeln!(out)
        }
        None => show_tokens(task, example, out),
    }
}

/// Columns of a line of tokens.
const LINE: usize = 96;

/// Tokens in lines, under each scored one its answer.
fn show_tokens(task: &dyn Task, example: &Example, out: &mut impl Write) -> io::Result<()> {
    let names: Vec<(String, String)> = example
        .input
        .iter()
        .zip(&example.target)
        .map(|(&id, target)| (task.token(id), target.map_or(".".into(), |t| task.token(t))))
        .collect();
    let widest = names.iter().map(|(a, b)| a.chars().count().max(b.chars().count())).max();
    let width = widest.unwrap_or(1) + 1;
    let a_line = ((LINE - 14) / width).max(1);
    for (line, names) in names.chunks(a_line).enumerate() {
        let row = |of: fn(&(String, String)) -> &String| -> String {
            names.iter().map(|pair| format!("{:>width$}", of(pair))).collect()
        };
        writeln!(out, "{:>6} input  {}", line * a_line, row(|pair| &pair.0))?;
        writeln!(out, "{:>6} answer {}", "", row(|pair| &pair.1))?;
    }
    writeln!(out)
}

fn show_statistics(
    args: &DataArgs,
    task: &dyn Task,
    set: usize,
    out: &mut impl Write,
) -> io::Result<()> {
    let figures = task.statistics(args.split, set, args.count);
    if args.format == Format::Jsonl {
        return figures.into_iter().try_for_each(|Statistic { name, value, expected }| {
            writeln!(out, "{}", json!({ "name": name, "value": value, "expected": expected }))
        });
    }
    let info = &task.sets(args.split)[set];
    writeln!(
        out,
        "{:?} set {}, {} tokens, vocabulary {}",
        args.split,
        info.name,
        info.length,
        task.vocab()
    )?;
    writeln!(out, "{:<48} {:>12} {:>12}", "", "counted", "expected")?;
    for Statistic { name, value, expected } in figures {
        let expected = expected.map_or(String::new(), |x| format!("{x:.4}"));
        writeln!(out, "{name:<48} {value:>12.4} {expected:>12}")?;
    }
    Ok(())
}
