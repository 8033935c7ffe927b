//! Sweeps as a person uses them, and every mistake they can make.
#![allow(clippy::unwrap_used)] // a test that cannot go on has failed

use std::fs;
use std::path::Path;

use std::sync::Mutex;

use linattn_sweep::{
    Assignment, ChildProcess, Ending, Mode, Only, Row, RowsFile, Runner, Shard, Stop, Sweep,
    SweepError, Warmed, dry_run, page, report,
};
use support::{BASE, Fake, SWEEP, job, sweep, write};
use tempfile::TempDir;
use toml::{Table, Value};

mod support;

fn folder(sweep: &str) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), sweep);
    folder
}

fn plan_error(text: &str) -> String {
    let folder = folder(text);
    let planned = Sweep::read(&folder.path().join("sweep.toml"))
        .and_then(|sweep| sweep.plan(&Fake { milliseconds: 0 }));
    planned.unwrap_err().to_string()
}

#[test]
fn a_mistake_in_the_sweep_is_named_with_its_key() {
    let replaced = |from: &str, to: &str| {
        assert!(SWEEP.contains(from), "{from}");
        plan_error(&SWEEP.replacen(from, to, 1))
    };
    for (from, to, wanted) in [
        ("rate = [0.1", "rat = [0.1", "`select.over` is rate; it has to be a key of the grid"),
        ("seed = [0, 1, 2]", "seed = []", "`grid.seed` is empty"),
        ("seed = [0, 1, 2]", "seed = 3", "`grid.seed` is 3; it has to be a list"),
        ("seed = [0, 1, 2]", "seed = [0, 0]", "`seed` is 0 twice"),
        ("seed = [0, 1, 2]", "seed = [0, \"x\"]", "`seed` is \"x\"; it has to be a integer"),
        ("seed = [0, 1, 2]", "seed = [0]\nsede = [1]", "there is no key `sede`"),
        ("seed = [0, 1, 2]", "seed = [0]\nwidth = [8]", "`width` is set by `mixer` and by `width`"),
        ("axis = \"mixer\"", "axis = \"status\"", "`variants.axis` is \"status\""),
        ("gate = true }", "gate = true }\nlabels = { a = \"b\" }", "other labels at `gated`"),
        ("scaled_down =", "# ", "`protocol` is missing"),
        ("scaled_down = \"", "scaled_down = \"\" # ", "`scaled_down` is empty"),
        (
            "scaled_down",
            "protocol = \"mda\"\nscaled_down",
            "`protocol` is mda; it has to be one of mqar",
        ),
        (
            "[grid]",
            "departs = { seed = \"x\" }\n[grid]",
            "`departs` is given; it has to be left out",
        ),
        ("[grid]", "one_learning_rate = \"x\"\n[grid]", "`one_learning_rate` is given"),
        ("rule =", "rul =", "unknown field `rul`"),
        ("\"published\"", "\"best\"", "unknown variant `best`"),
        ("\"published\"", "\"honest\"", "`evaluate.select_on` is missing"),
        ("[select]", "[limits]\nruns = 23\n[select]", "`limits.runs` is 23, and the grid has more"),
        ("[select]", "[limits]\nwall_minutes = 0\n[select]", "`limits.wall_minutes` is 0"),
        ("[select]", "[report]\ncolumns = \"task\"\n[select]", "`report.columns` is task"),
        ("[select]", "[report]\ncolumns = \"seed\"\n[select]", "`report.columns` is seed"),
        ("[select]", "[report]\ncompare = [\"s_niah_1\"]\n[select]", "no published number belongs"),
        ("[select]", "[report]\nalso = [\"loss\"]\n[select]", "`report.also` is loss"),
        ("[select]", "[variants_from]\nfolder = \"x\"\n[select]", "can't read"),
        (
            "over = [\"rate\"]",
            "repeat_chosen = true",
            "`select.repeat_chosen` is true; it has to be left out",
        ),
        (
            "[select]",
            "[[report.figures]]\nkind = \"over_length\"\n[select]",
            "`report.figures[0].metric` is missing; it has to be a metric with 1 `*`",
        ),
    ] {
        let message = replaced(from, to);
        assert!(message.contains(wanted), "{from} -> {to}: {message}");
    }
}

const FILES: &str = r#"
base = "base.toml"
scaled_down = "runs of a few milliseconds"

[variants_from]
folder = "configs"
axis = "mixer"

[select]
rule = "published"
"#;

#[test]
fn the_configs_of_a_folder_are_variants() {
    let folder = folder(FILES);
    let configs = folder.path().join("configs");
    fs::create_dir_all(configs.join("others")).unwrap();
    let put = |name: &str, text: &str| fs::write(configs.join(name), text).unwrap();
    put("gated.toml", "seed = 0\nrate = 0.5\nwidth = 16\ngate = true\n");
    put("plain.toml", BASE);
    put("notes.md", "no config");
    put("others/small.toml", "rate = 0.25\n");
    let read = || Sweep::read(&folder.path().join("sweep.toml"));
    let plan = read().unwrap().plan(&Fake { milliseconds: 0 }).unwrap();
    let runs: Vec<_> = plan.runs.iter().map(|run| (run.describe(), &run.config)).collect();
    assert_eq!(runs.len(), 2);
    assert_eq!(runs[0].0, "mixer = gated");
    assert_eq!(runs[0].1["width"].as_integer(), Some(16));
    assert_eq!(runs[0].1["gate"].as_bool(), Some(true));
    assert_eq!((runs[1].0.as_str(), runs[1].1["width"].as_integer()), ("mixer = plain", Some(4)));

    let keys = FILES.replace("axis =", "keys = [\"width\"]\naxis =");
    fs::write(folder.path().join("sweep.toml"), &keys).unwrap();
    let plan = read().unwrap().plan(&Fake { milliseconds: 0 }).unwrap();
    let gated = &plan.runs[0].config;
    assert_eq!((gated["width"].as_integer(), gated["gate"].as_bool()), (Some(16), Some(false)));
    fs::write(folder.path().join("sweep.toml"), keys.replace("width", "depth")).unwrap();
    let message = read().unwrap_err().to_string();
    assert!(message.contains("`variants_from.keys` is depth, which "), "{message}");
    fs::write(folder.path().join("sweep.toml"), FILES).unwrap();

    put("short.toml", "seed = 0\nwidth = 8\ngate = true\n");
    let message = read().unwrap_err().to_string();
    assert!(message.contains("short.toml, which has no `rate`"), "{message}");
    fs::remove_dir_all(&configs).unwrap();
    fs::create_dir_all(&configs).unwrap();
    let message = read().unwrap_err().to_string();
    assert!(message.contains("`variants_from.folder` is"), "{message}");
}

/// Notes the configs that it is given; the gated one fails.
#[derive(Default)]
struct Noting(Mutex<Vec<Table>>);

impl Runner for Noting {
    fn resolve(&self, base: &Path, overrides: &[(String, Value)]) -> Result<Table, String> {
        Fake { milliseconds: 0 }.resolve(base, overrides)
    }

    fn run(&self, run: &Assignment, _stop: &Stop) -> Result<Ending, String> {
        assert!(run.anew && run.out.is_dir(), "a run that nobody has begun");
        self.0.lock().unwrap().push(run.config.clone());
        match run.config["gate"].as_bool() {
            Some(true) => Err("does not compile".into()),
            _ => Ok(Ending::Done(serde_json::Value::Null)),
        }
    }
}

#[test]
fn each_model_is_warmed_once_and_leaves_nothing() {
    let folder = folder(SWEEP);
    let sweep = Sweep::read(&folder.path().join("sweep.toml")).unwrap();
    let plan = sweep.plan(&Fake { milliseconds: 0 }).unwrap();
    let job = job(&sweep, &plan, 3, Shard::WHOLE);
    let (runner, mut said) = (Noting::default(), vec![]);
    let warmed = job.warm(&runner, &mut |line| said.push(line.to_string())).unwrap();
    // Rates are no learning rates of an optimizer here, so only seeds are alike.
    assert_eq!(warmed, Warmed { models: 8, done: 4, failed: 4 });
    let configs = runner.0.into_inner().unwrap();
    assert!(configs.len() == 8 && configs.iter().all(|config| !config.contains_key("seed")));
    assert!(configs.iter().all(|config| config["name"].as_str().is_some_and(|id| id.len() == 12)));
    assert_eq!(said[0], "8 models have runs to do");
    assert_eq!(said.iter().filter(|line| line.ends_with(": does not compile")).count(), 4);
    assert!(said.iter().any(|line| line.starts_with("4/8: ")), "{said:?}");
    assert!(!folder.path().join("rows.csv").exists());
    assert_eq!(fs::read_dir(&job.out).unwrap().count(), 0);

    let done = job.run(&Fake { milliseconds: 0 }, &mut |_| ()).unwrap();
    assert!(done.complete());
    let nothing = job.warm(&Noting::default(), &mut |_| ()).unwrap();
    assert_eq!(nothing, Warmed::default());
}

#[test]
fn runs_that_would_be_one_run_are_refused() {
    let variant = "[[variants]]\naxis = \"mixer\"\nname = \"again\"\nset = { width = 8 }\n[select]";
    let message = plan_error(&SWEEP.replacen("[select]", variant, 1));
    assert!(message.contains("one run twice: mixer = plain"), "{message}");
}

#[test]
fn a_protocol_that_is_named_is_followed_or_scaled_down() {
    let full = SWEEP.replacen(
        "scaled_down = \"runs of a few milliseconds\"",
        "protocol = \"mqar_mix\"",
        1,
    );
    let message = plan_error(&full);
    assert!(message.contains("`task.mqar.vocab` is none in the run mixer = plain"), "{message}");
    assert!(message.contains("it has to be 8192 under the protocol `mqar_mix`"), "{message}");
    assert!(message.contains("(as `task.mqar.filler`, "), "{message}");
    let cut = full.replacen("\n\n[grid]", "\nscaled_down = \"a test\"\n\n[grid]", 1);
    let message = plan_error(&cut);
    assert!(
        message.contains("`departs` is without `task.mqar.vocab` (none, not 8192"),
        "{message}"
    );
    let message = plan_error(&full.replacen("mqar_mix", "s_niah", 1));
    assert!(message.contains("7.8e20 FLOPs") && message.contains("`scaled_down`"), "{message}");
    let message = plan_error(
        &SWEEP.replacen("[select]", "[report]\ncompare = [\"mad_x\"]\n[select]", 1).replacen(
            "scaled",
            "protocol = \"mad\"\nscaled",
            1,
        ),
    );
    assert!(message.contains("mad_deltanet_paper, mad_rwkv7_paper"), "{message}");
}

#[test]
fn a_second_go_skips_what_has_a_row_and_a_failed_run_is_a_row_until_it_is_retried() {
    let folder = folder(SWEEP);
    let go = || sweep(folder.path(), 2, Shard::WHOLE, 0).unwrap();
    let (first, second) = (go(), go());
    assert_eq!((first.finished, first.failed, first.complete()), (24, 2, true));
    assert_eq!((second.skipped, second.finished, second.complete()), (24, 0, true));
    let rows = RowsFile::new(folder.path()).load().unwrap().rows;
    let failed: Vec<&Row> = rows.iter().filter(|row| row.failed()).collect();
    assert_eq!(failed[0].text("error"), "the loss is no number");
    assert_eq!((failed[0].text("commit"), failed[0].text("device")), ("abc", "cpu"));
    let read = Sweep::read(&folder.path().join("sweep.toml")).unwrap();
    let runner = Fake { milliseconds: 0 };
    let plan = read.plan(&runner).unwrap();
    let mut again = job(&read, &plan, 2, Shard::WHOLE);
    again.retry_failed = true;
    assert_eq!(again.run(&runner, &mut |_| {}).unwrap().finished, 2);
    assert_eq!(RowsFile::new(folder.path()).load().unwrap().rows.len(), 24);
}

#[test]
fn rows_stand_in_the_order_of_the_plan_whichever_run_ends_first() {
    let folder = folder(SWEEP);
    for shard in ["2/3", "3/3", "1/3"] {
        sweep(folder.path(), 5, shard.parse().unwrap(), 1).unwrap();
    }
    let read = Sweep::read(&folder.path().join("sweep.toml")).unwrap();
    let plan = read.plan(&Fake { milliseconds: 0 }).unwrap();
    let wanted: Vec<&str> = plan.runs.iter().map(|run| run.id.as_str()).collect();
    let rows = RowsFile::new(folder.path()).load().unwrap().rows;
    assert_eq!(rows.iter().map(Row::id).collect::<Vec<_>>(), wanted);
}

/// The settings of the runs in the order in which they began.
fn starts(folder: &Path) -> Vec<String> {
    let read = Sweep::read(&folder.join("sweep.toml")).unwrap();
    let plan = read.plan(&Fake { milliseconds: 0 }).unwrap();
    let text = fs::read_to_string(folder.join("runs/starts")).unwrap();
    let run = |id: &str| plan.runs.iter().find(|run| run.id == id).unwrap();
    text.lines().map(|id| run(id).describe()).collect()
}

#[test]
fn every_model_runs_once_before_any_runs_again() {
    let folder = folder(SWEEP);
    sweep(folder.path(), 1, Shard::WHOLE, 0).unwrap();
    let starts = starts(folder.path());
    assert_eq!(starts[0], "mixer = plain, rate = 0.1, seed = 0");
    assert_eq!(starts[1], "mixer = gated, rate = 0.1, seed = 0");
    assert_eq!(starts[2], "mixer = plain, rate = 0.2, seed = 0");
    assert_eq!(starts[8], "mixer = plain, rate = 0.1, seed = 1");
    assert_eq!(starts.len(), 24);
}

#[test]
fn further_seeds_repeat_the_chosen_setting_alone() {
    let folder = folder(&SWEEP.replacen("replicate", "repeat_chosen = true\nreplicate", 1));
    let read = Sweep::read(&folder.path().join("sweep.toml")).unwrap();
    let plan = read.plan(&Fake { milliseconds: 0 }).unwrap();
    let text = dry_run(&read, &plan, &[], &Only::default()).unwrap().to_string();
    assert!(text.contains("12 of 12 runs to do"), "{text}");
    assert!(text.contains("mixer = gated, seed = 2, rate as chosen"), "{text}");
    let done = sweep(folder.path(), 2, Shard::WHOLE, 0).unwrap();
    assert_eq!((done.runs, done.finished, done.failed, done.complete()), (12, 12, 0, true));
    let last: Vec<String> = starts(folder.path()).split_off(8);
    assert!(last.iter().all(|run| run.contains("rate = 0.1, seed = ")), "{last:?}");
    let again = sweep(folder.path(), 2, Shard::WHOLE, 0).unwrap();
    assert_eq!((again.skipped, again.finished, again.complete()), (12, 0, true));
    report(folder.path(), Mode::Write, None).unwrap();
    let text = fs::read_to_string(folder.path().join("README.md")).unwrap();
    assert!(text.contains("- Runs: 12 of 12, 0 of them failed."), "{text}");
    assert!(text.contains("the others repeat what it chose"), "{text}");
    assert!(text.contains("0.910 ± 0.010 | 0.900 to 0.920 | 3 of 3 | rate 0.1 |"), "{text}");
}

#[test]
fn a_choice_that_waits_for_a_run_is_not_repeated() {
    let folder = folder(&SWEEP.replacen("replicate", "repeat_chosen = true\nreplicate", 1));
    let done = sweep(folder.path(), 2, "1/2".parse().unwrap(), 0).unwrap();
    assert!(!starts(folder.path()).iter().any(|run| !run.ends_with("seed = 0")));
    assert!(!done.complete(), "{done:?}");
    let rest = sweep(folder.path(), 2, Shard::WHOLE, 0).unwrap();
    assert!(rest.complete(), "{rest:?}");
    assert_eq!(RowsFile::new(folder.path()).load().unwrap().rows.len(), 12);
}

#[test]
fn a_part_is_named_by_what_its_runs_have() {
    let folder = folder(SWEEP);
    let read = Sweep::read(&folder.path().join("sweep.toml")).unwrap();
    let runner = Fake { milliseconds: 0 };
    let plan = read.plan(&runner).unwrap();
    let only = |texts: &[&str]| {
        let texts: Vec<String> = texts.iter().map(|text| text.to_string()).collect();
        Only::new(&texts, &plan.runs)
    };
    let mut part = job(&read, &plan, 2, Shard::WHOLE);
    part.only = only(&["mixer=plain", "seed=0", "seed=1"]).unwrap();
    assert_eq!(part.run(&runner, &mut |_| {}).unwrap().finished, 8);
    let text = dry_run(&read, &plan, &[], &part.only).unwrap().to_string();
    assert!(text.contains("8 of 8 runs to do"), "{text}");
    for (text, wanted) in [
        ("mixer=plane", "it has to be mixer= and one of gated; plain"),
        ("mixr=plain", "one of the keys mixer, rate, seed"),
        ("plain", "one of the keys mixer, rate, seed"),
    ] {
        let message = only(&[text]).unwrap_err().to_string();
        assert!(message.contains(wanted), "{text}: {message}");
    }
}

#[test]
fn rows_of_another_base_config_are_refused() {
    let folder = folder(SWEEP);
    sweep(folder.path(), 2, Shard::WHOLE, 0).unwrap();
    fs::write(folder.path().join("base.toml"), BASE.replace("width = 4", "width = 5")).unwrap();
    let error = sweep(folder.path(), 2, Shard::WHOLE, 0).unwrap_err();
    assert!(matches!(error, SweepError::OtherRows { what: "base config", .. }), "{error}");
    fs::write(folder.path().join("base.toml"), BASE.replace("\"base\"", "\"other\"")).unwrap();
    assert!(
        sweep(folder.path(), 2, Shard::WHOLE, 0).unwrap().complete(),
        "a name is no difference"
    );
}

#[test]
fn rows_of_another_protocol_are_refused_by_sweep_and_report() {
    let folder = folder(SWEEP);
    sweep(folder.path(), 2, Shard::WHOLE, 0).unwrap();
    let other = SWEEP.replacen("scaled_down", "protocol = \"mqar_512x80\"\nscaled_down", 1);
    write(folder.path(), &other);
    let errors = [
        sweep(folder.path(), 2, Shard::WHOLE, 0).unwrap_err(),
        report(folder.path(), Mode::Check, None).unwrap_err(),
    ];
    for error in errors {
        let message = error.to_string();
        assert!(
            message.contains("protocol is scaled down, this sweep has mqar_512x80, scaled down"),
            "{message}"
        );
    }
}

#[test]
fn a_file_cut_in_half_is_repaired_with_a_word_about_it_and_its_runs_are_done_again() {
    let folder = folder(SWEEP);
    sweep(folder.path(), 1, Shard::WHOLE, 0).unwrap();
    let path = folder.path().join("rows.csv");
    let whole = fs::read(&path).unwrap();
    fs::write(&path, &whole[..whole.len() / 2]).unwrap();
    let read = Sweep::read(&folder.path().join("sweep.toml")).unwrap();
    let runner = Fake { milliseconds: 0 };
    let plan = read.plan(&runner).unwrap();
    let mut said = vec![];
    let done =
        job(&read, &plan, 1, Shard::WHOLE).run(&runner, &mut |line| said.push(line.to_string()));
    assert!(said[0].contains("broke off in the middle of a line"), "{said:?}");
    let done = done.unwrap();
    assert!(done.skipped > 5 && done.finished > 5 && done.complete(), "{done:?}");
    assert_eq!(RowsFile::new(folder.path()).load().unwrap().rows.len(), 24);
}

#[test]
fn after_the_first_ctrl_c_runs_end_and_no_more_start() {
    let folder = folder(SWEEP);
    let read = Sweep::read(&folder.path().join("sweep.toml")).unwrap();
    let runner = Fake { milliseconds: 20 };
    let plan = read.plan(&runner).unwrap();
    let job = job(&read, &plan, 2, Shard::WHOLE);
    let done = job.run(&runner, &mut |line| {
        if line.starts_with("started") && !job.stop.no_more() {
            job.stop.press();
        }
    });
    let done = done.unwrap();
    assert!((1..24).contains(&done.finished) && !done.complete(), "{done:?}");
}

#[test]
fn after_the_time_that_a_sweep_may_take_no_more_runs_start() {
    let limit = "[limits]\nwall_minutes = 0.005\n[select]";
    let folder = folder(&SWEEP.replacen("[select]", limit, 1));
    let done = sweep(folder.path(), 2, Shard::WHOLE, 200).unwrap();
    assert!((2..10).contains(&done.finished) && !done.complete(), "{done:?}");
    let rest = sweep(folder.path(), 24, Shard::WHOLE, 0).unwrap();
    assert_eq!((rest.skipped, rest.complete()), (done.finished, true));
}

#[test]
fn a_dry_run_says_unknown_until_something_was_measured() {
    let folder = folder(SWEEP);
    let read = Sweep::read(&folder.path().join("sweep.toml")).unwrap();
    let plan = read.plan(&Fake { milliseconds: 0 }).unwrap();
    let text = dry_run(&read, &plan, &[], &Only::default()).unwrap().to_string();
    assert!(text.contains("24 of 24 runs to do: 0s and 24 whose time is unknown"), "{text}");
    let mut row = Row::default();
    let run = &plan.runs[0];
    run.settings.iter().for_each(|(name, value)| row.set(name, value));
    row.set("run", &run.id);
    row.set("status", "completed");
    row.set("wall_seconds", 90.0);
    let text = dry_run(&read, &plan, &[row], &Only::default()).unwrap().to_string();
    assert!(text.contains("23 of 24 runs to do: 16m 30s and 12 whose time is unknown"), "{text}");
}

#[test]
fn shards_of_two_machines_are_joined_later_and_nothing_comes_twice() {
    let folders = [folder(SWEEP), folder(SWEEP)];
    for (folder, shard) in folders.iter().zip(["1/2", "2/2"]) {
        assert_eq!(sweep(folder.path(), 2, shard.parse().unwrap(), 0).unwrap().finished, 12);
    }
    let read = Sweep::read(&folders[0].path().join("sweep.toml")).unwrap();
    let plan = read.plan(&Fake { milliseconds: 0 }).unwrap();
    let other = folders[1].path().join("rows.csv");
    assert_eq!(read.join(&plan, &other).unwrap(), 12);
    assert_eq!(RowsFile::new(folders[0].path()).load().unwrap().rows.len(), 24);
    assert_eq!(read.join(&plan, &other).unwrap(), 0);
    let text = fs::read_to_string(&other).unwrap();
    fs::write(&other, text.replace(&plan.base, "abc")).unwrap();
    let error = read.join(&plan, &other).unwrap_err();
    assert!(matches!(error, SweepError::OtherRows { what: "base config", .. }), "{error}");
}

#[test]
fn a_label_is_a_column_that_follows_from_its_variant() {
    let labelled = SWEEP
        .replacen("set = { width = 8 }", "labels = { task = \"ICR\" }\nset = { width = 8 }", 1)
        .replacen("set = { width = 16", "labels = { task = \"Noisy\" }\nset = { width = 16", 1)
        .replacen("[select]", "[report]\ncolumns = \"task\"\naverage = [\"mixer\"]\n[select]", 1);
    let folder = folder(&labelled);
    assert!(sweep(folder.path(), 2, Shard::WHOLE, 0).unwrap().complete());
    report(folder.path(), Mode::Write, None).unwrap();
    let text = fs::read_to_string(folder.path().join("README.md")).unwrap();
    assert!(text.contains("| ICR | Noisy |"), "{text}");
    assert!(text.contains("| all | 0.910 ± 0.010 |"), "{text}");
}

#[test]
fn a_table_in_the_grid_is_one_value_on_one_line() {
    let folder = folder(&SWEEP.replacen("seed = [0, 1, 2]", "seed = [{ a = 1, b = [2, 3] }]", 1));
    let read = Sweep::read(&folder.path().join("sweep.toml")).unwrap();
    let message = read.plan(&Fake { milliseconds: 0 }).unwrap_err().to_string();
    assert!(message.contains("seed = { a = 1, b = [2, 3] }"), "{message}");
}

#[test]
fn a_part_of_a_sweep_is_a_number_of_how_many() {
    for text in ["0/2", "3/2", "1", "a/b", "1/0"] {
        assert!(text.parse::<Shard>().is_err(), "{text}");
    }
    assert!("2/2".parse::<Shard>().is_ok());
}

#[test]
fn a_report_made_anew_changes_nothing_until_a_row_does() {
    let folder = folder(SWEEP);
    sweep(folder.path(), 2, Shard::WHOLE, 0).unwrap();
    assert!(!report(folder.path(), Mode::Check, None).unwrap().changed.is_empty());
    report(folder.path(), Mode::Write, None).unwrap();
    assert_eq!(
        report(folder.path(), Mode::Check, None).unwrap().changed,
        Vec::<std::path::PathBuf>::new()
    );
    let path = folder.path().join("rows.csv");
    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, text.replacen("0.9,", "0.95,", 1).replacen(",0.9,", ",0.95,", 1)).unwrap();
    assert_eq!(
        report(folder.path(), Mode::Check, None).unwrap().changed,
        [folder.path().join("README.md")]
    );
}

#[test]
fn a_page_has_the_tables_of_the_folders_that_it_names() {
    let folder = folder(SWEEP);
    let file = folder.path().join("page.md");
    let marks = "# Page\n<!-- results:begin . -->\nold\n<!-- results:end -->\nafter\n";
    fs::write(&file, marks).unwrap();
    page(&file, Mode::Write).unwrap();
    let text = fs::read_to_string(&file).unwrap();
    assert!(text.contains("0 of 24 runs are done.") && text.contains("| plain | – |"), "{text}");
    sweep(folder.path(), 2, Shard::WHOLE, 0).unwrap();
    assert_eq!(page(&file, Mode::Check).unwrap().changed, std::slice::from_ref(&file));
    page(&file, Mode::Write).unwrap();
    let text = fs::read_to_string(&file).unwrap();
    assert!(text.contains("| plain | 0.910 ± 0.010 |"), "{text}");
    assert!(text.starts_with("# Page\n") && text.ends_with("-->\nafter\n"), "{text}");
    fs::write(&file, marks.replace("results:end", "results:and")).unwrap();
    let message = page(&file, Mode::Write).unwrap_err().to_string();
    assert!(message.contains("has no `<!-- results:end -->` of its own"), "{message}");
}

/// A run as a program: `sh` with a script that does as `train` does.
#[cfg(unix)]
mod children {
    use super::*;
    use std::process::Command;
    use std::thread::sleep;
    use std::time::{Duration, Instant};

    struct Scripted {
        child: ChildProcess,
        fake: Fake,
    }

    impl Runner for Scripted {
        fn resolve(
            &self,
            base: &Path,
            overrides: &[(String, toml::Value)],
        ) -> Result<toml::Table, String> {
            self.fake.resolve(base, overrides)
        }

        fn run(
            &self,
            run: &linattn_sweep::Assignment,
            stop: &Stop,
        ) -> Result<linattn_sweep::Ending, String> {
            self.child.run(run, stop)
        }
    }

    const ONE_RUN: &str =
        "base = \"base.toml\"\nscaled_down = \"x\"\n[select]\nrule = \"published\"\n";

    /// Finds its folder as `train` would, then does `body`.
    fn runner(folder: &Path, body: &str) -> Scripted {
        let summary = r#"{"status":"completed","steps":5,"metrics":{}}"#;
        let script = format!(
            "config=$2; device=$4; out=$6; how=$7\n\
             name=$(sed -n 's/^name = \"\\(.*\\)\"/\\1/p' \"$config\")\n\
             run=$out/$name; mkdir -p \"$run\"; echo \"$device $how\" >> \"$out/calls\"\n\
             finish() {{ echo '{summary}' > \"$run/summary.json\"; }}\n\
             {body}\n"
        );
        let path = folder.join("train.sh");
        fs::write(&path, script).unwrap();
        let arguments = vec![path.display().to_string()];
        let child = ChildProcess { program: "sh".into(), arguments };
        Scripted { child, fake: Fake { milliseconds: 0 } }
    }

    fn calls(folder: &Path) -> String {
        fs::read_to_string(folder.join("runs/calls")).unwrap()
    }

    fn go(folder: &Path, runner: &Scripted) -> linattn_sweep::Done {
        let sweep = Sweep::read(&folder.join("sweep.toml")).unwrap();
        let plan = sweep.plan(runner).unwrap();
        job(&sweep, &plan, 1, Shard::WHOLE).run(runner, &mut |_| {}).unwrap()
    }

    fn row(folder: &Path) -> Row {
        RowsFile::new(folder).load().unwrap().rows.remove(0)
    }

    #[test]
    fn a_program_gets_its_config_and_its_summary_becomes_the_row() {
        let folder = folder(ONE_RUN);
        assert!(go(folder.path(), &runner(folder.path(), "finish")).complete());
        assert_eq!(calls(folder.path()), "cpu --overwrite\n");
        let row = row(folder.path());
        assert_eq!(
            (row.text("status"), row.text("steps"), row.text("seed")),
            ("completed", "5", "")
        );
    }

    #[test]
    fn a_program_that_fails_leaves_its_last_word_in_the_row() {
        let folder = folder(ONE_RUN);
        for (body, wanted) in [
            ("echo working; echo 'error: out of memory'; echo bye; exit 1", "out of memory"),
            ("exit 3", "exit code 3, without a word"),
            ("kill -9 $$", "ended by a signal, without a word"),
            ("exit 0", "left no summary"),
        ] {
            let _no_rows_yet = fs::remove_file(folder.path().join("rows.csv"));
            assert_eq!(go(folder.path(), &runner(folder.path(), body)).failed, 1);
            let error = row(folder.path()).text("error").to_string();
            assert!(error.contains(wanted), "{error}");
        }
    }

    #[test]
    fn an_interrupted_program_has_no_row_and_goes_on_next_time() {
        let folder = folder(ONE_RUN);
        let cut =
            "mkdir -p \"$run/checkpoints/step-0000000005\"; : > \"$run/config.toml\"; exit 130";
        let done = go(folder.path(), &runner(folder.path(), cut));
        assert_eq!((done.finished, done.complete()), (0, false));
        assert!(go(folder.path(), &runner(folder.path(), "finish")).complete());
        assert_eq!(calls(folder.path()), "cpu --overwrite\ncpu --resume\n");
    }

    #[test]
    fn checkpoints_whose_config_is_gone_are_nothing_to_go_on_from() {
        let folder = folder(ONE_RUN);
        let cut = "mkdir -p \"$run/checkpoints/step-0000000005\"; exit 130";
        assert!(!go(folder.path(), &runner(folder.path(), cut)).complete());
        assert!(go(folder.path(), &runner(folder.path(), "finish")).complete());
        assert_eq!(calls(folder.path()), "cpu --overwrite\ncpu --overwrite\n");
    }

    #[test]
    fn runs_that_failed_before_are_counted_as_failures_of_the_sweep() {
        let folder = folder(ONE_RUN);
        go(folder.path(), &runner(folder.path(), "exit 3"));
        let done = go(folder.path(), &runner(folder.path(), "finish"));
        assert_eq!((done.failed, done.failed_before, done.complete()), (0, 1, true));
    }

    /// Whether a file is there within half a minute.
    fn appears(path: &Path) -> bool {
        let began = Instant::now();
        while !path.exists() && began.elapsed() < Duration::from_secs(30) {
            sleep(Duration::from_millis(5));
        }
        path.exists()
    }

    /// The loop has an end because a shell cannot trap a signal that was ignored when it started.
    #[test]
    fn a_second_ctrl_c_asks_the_program_to_stop() {
        let folder = folder(ONE_RUN);
        let body = "trap 'exit 130' INT; : > \"$out/ready\"; turn=0\n\
                    while [ $turn -lt 1500 ]; do turn=$((turn + 1)); sleep 0.02; done";
        let runner = runner(folder.path(), body);
        let sweep = Sweep::read(&folder.path().join("sweep.toml")).unwrap();
        let plan = sweep.plan(&runner).unwrap();
        let job = job(&sweep, &plan, 1, Shard::WHOLE);
        let stop = job.stop.clone();
        let ready = folder.path().join("runs/ready");
        let presses = std::thread::spawn(move || {
            let begun = appears(&ready);
            stop.press();
            stop.press();
            begun
        });
        let done = job.run(&runner, &mut |_| {}).unwrap();
        assert!(presses.join().unwrap(), "the program never began");
        assert_eq!((done.finished, done.complete()), (0, false));
    }

    /// A killed sweep leaves its program at work. Whoever comes next waits for it.
    #[test]
    fn a_program_whose_sweep_died_is_not_started_twice() {
        let folder = folder(ONE_RUN);
        let out = folder.path().join("runs");
        fs::create_dir(&out).unwrap();
        let runner = runner(folder.path(), "finish");
        let sweep = Sweep::read(&folder.path().join("sweep.toml")).unwrap();
        let id = sweep.plan(&runner).unwrap().runs.remove(0).id;
        let lock = fs::File::create(out.join(format!("{id}.lock"))).unwrap();
        lock.lock().unwrap();
        let summary = out.join(&id).join("summary.json");
        fs::create_dir(out.join(&id)).unwrap();
        let script = format!(
            "sleep 0.4; echo '{{\"status\":\"completed\",\"steps\":7}}' > {}",
            summary.display()
        );
        let mut orphan = Command::new("sh").args(["-c", &script]).stdin(lock).spawn().unwrap();
        let began = Instant::now();
        assert!(go(folder.path(), &runner).complete());
        assert!(began.elapsed() > Duration::from_millis(300), "it waited");
        assert_eq!(row(folder.path()).text("steps"), "7");
        assert!(!out.join("calls").exists(), "nothing was started");
        orphan.wait().unwrap();
    }
}
