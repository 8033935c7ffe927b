use super::*;
use crate::rows::RowsFile;
use std::fs;
use tempfile::TempDir;

/// Two mixers at two widths, two rates, two seeds.
const SWEEP: &str = r#"
base = "base.toml"
LABEL

[grid]
d_model = [64, 128]
"optimizer.learning_rate" = [1e-3, 1e-2]
seed = [0, 1]

[[variants]]
axis = "mixer"
name = "deltanet"
set = { mixer = "deltanet" }

[[variants]]
axis = "mixer"
name = "mamba2"
set = { mixer = "mamba2" }

[select]
rule = "RULE"
over = ["optimizer.learning_rate"]
replicate = "seed"

[report]
columns = "d_model"
names = { deltanet = "DeltaNet", mamba2 = "Mamba-2" }
MORE
"#;

const FULL: &str = "protocol = \"mqar_mix\"";
const BOTH: &str = "protocol = \"mqar_mix\"\nscaled_down = \"2 epochs of 32\"";
const OWN: &str = "scaled_down = \"our own cell\"";

fn folder(label: &str, rule: &str, more: &str) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let text = SWEEP.replace("LABEL", label).replace("RULE", rule).replace("MORE", more);
    fs::write(folder.path().join("sweep.toml"), text).unwrap();
    folder
}

/// Adds a row: its test and validation accuracy, or a failure.
fn add(folder: &TempDir, mixer: &str, d: &str, rate: &str, seed: &str, scores: Option<(f64, f64)>) {
    let sweep = Sweep::read(&folder.path().join("sweep.toml")).unwrap();
    let mut row = Row::default();
    row.set("run", format!("{mixer}-{d}-{rate}-{seed}"));
    row.set("protocol", sweep.label());
    row.set("status", if scores.is_some() { "completed" } else { "failed" });
    row.set("error", if scores.is_some() { "" } else { "loss | is no number" });
    row.set("mixer", mixer);
    row.set("d_model", d);
    row.set("optimizer.learning_rate", rate);
    row.set("seed", seed);
    if let Some((test, validation)) = scores {
        row.set("score_name", "accuracy");
        row.set("state_bytes", 8960);
        row.set("tokens", 1000);
        row.set("wall_seconds", 100.0 * test);
        row.set("test/accuracy", test);
        row.set("validation/accuracy", validation);
    }
    RowsFile::new(folder.path()).add(&row).unwrap();
}

/// Two seeds of DeltaNet at width 64 for each rate: the lower is better on validation.
fn add_two_rates(folder: &TempDir) {
    add(folder, "deltanet", "64", "0.001", "0", Some((0.70, 0.9)));
    add(folder, "deltanet", "64", "0.001", "1", Some((0.74, 0.9)));
    add(folder, "deltanet", "64", "0.01", "0", Some((0.80, 0.2)));
    add(folder, "deltanet", "64", "0.01", "1", Some((0.84, 0.2)));
}

fn readme(folder: &TempDir) -> String {
    report(folder.path(), Mode::Write, None).unwrap();
    fs::read_to_string(folder.path().join("README.md")).unwrap()
}

/// The cells of the line of a table that starts with these.
#[track_caller]
fn line<'a>(text: &'a str, start: &[&str]) -> Vec<&'a str> {
    let start = format!("| {} |", start.join(" | "));
    let found = text.lines().rfind(|line| line.starts_with(&start));
    found
        .unwrap_or_else(|| panic!("no {start} in {text}"))
        .trim_matches('|')
        .split('|')
        .map(str::trim)
        .collect()
}

#[test]
fn the_honest_rule_chooses_on_validation_and_the_published_one_on_the_test() {
    for (rule, wanted, rate, said) in [
        ("honest", "0.720 ± 0.028", "learning_rate 0.001", "the test was not looked at"),
        ("published", "0.820 ± 0.028", "learning_rate 0.01", "on the **test** sets"),
    ] {
        let folder = folder(OWN, rule, "");
        add_two_rates(&folder);
        let text = readme(&folder);
        let cells = line(&text, &["DeltaNet", "64"]);
        assert_eq!((cells[2], cells[4], cells[5]), (wanted, "2 of 2", rate), "{rule}");
        assert!(text.contains(said), "{text}");
    }
}

#[test]
fn a_setting_that_fails_for_a_seed_gives_way_to_one_that_does_not() {
    let folder = folder(OWN, "published", "");
    add(&folder, "deltanet", "64", "0.001", "0", Some((0.70, 0.0)));
    add(&folder, "deltanet", "64", "0.001", "1", Some((0.74, 0.0)));
    add(&folder, "deltanet", "64", "0.01", "0", Some((0.99, 0.0)));
    add(&folder, "deltanet", "64", "0.01", "1", None);
    let text = readme(&folder);
    let cells = line(&text, &["DeltaNet", "64"]);
    assert_eq!((cells[2], cells[4]), ("0.720 ± 0.028", "2 of 2, 1 failed"));
    assert!(
        text.contains("optimizer.learning_rate = 0.01, seed = 1: loss \\| is no number"),
        "{text}"
    );
}

#[test]
fn a_missing_validation_score_is_no_choice() {
    let folder = folder(OWN, "honest", "");
    add_two_rates(&folder);
    let path = folder.path().join("rows.csv");
    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, text.replacen("validation/accuracy", "validation/loss", 1)).unwrap();
    let message = report(folder.path(), Mode::Check, None).unwrap_err().to_string();
    assert!(
        message.contains("`validation/accuracy`, which the row of run deltanet-64"),
        "{message}"
    );
}

#[test]
fn an_empty_cell_says_why() {
    let folder = folder(OWN, "published", "");
    add(&folder, "deltanet", "64", "0.001", "0", None);
    add(&folder, "deltanet", "128", "0.001", "0", Some((0.5, 0.5)));
    let text = readme(&folder);
    assert_eq!(line(&text, &["DeltaNet", "64"])[2], "none, 1 failed");
    assert_eq!(line(&text, &["Mamba-2", "64"])[2], "no rows yet");
    let half = line(&text, &["DeltaNet", "128"]);
    assert_eq!((half[2], half[4]), ("0.500", "1 of 2"));
    assert!(text.contains("Runs: 2 of 16, 1 of them failed"), "{text}");
}

#[test]
fn a_published_number_stands_beside_its_own_protocol_with_the_difference() {
    let folder = folder(FULL, "published", "");
    add_two_rates(&folder);
    let text = readme(&folder);
    let cells = line(&text, &["DeltaNet", "64"]);
    assert_eq!((cells[2], cells[8], cells[9]), ("0.820 ± 0.028", "0.793", "+0.027"));
    assert!(text.contains(
        "[1] HazyResearch/zoology README, recall over memory (read off a figure, within 0.005)"
    ));
    assert!(text.contains("best of 4 learning rates, chosen on the test set"), "{text}");
    assert_eq!(line(&text, &["Mamba-2", "64"])[8..], ["none published", "–"]);
}

#[test]
fn a_number_whose_rivals_wait_has_a_mark() {
    let folder = folder(FULL, "published", "");
    add(&folder, "deltanet", "64", "0.001", "0", Some((0.70, 0.9)));
    let chosen = |text: &str| line(text, &["DeltaNet", "64"])[5].to_string();
    let text = readme(&folder);
    assert!(text.contains("| DeltaNet | 0.700 † | no rows yet |"), "{text}");
    assert!(text.contains("† Chosen among fewer settings"), "{text}");
    assert_eq!(chosen(&text), "learning_rate 0.001, of 1 of 2 settings");
    // One that failed was tried.
    add(&folder, "deltanet", "64", "0.01", "0", None);
    let text = readme(&folder);
    assert!(text.contains("| DeltaNet | 0.700 | no rows yet |") && !text.contains('†'), "{text}");
    assert_eq!(chosen(&text), "learning_rate 0.001");
}

#[test]
fn a_scaled_down_number_has_its_label_and_no_difference() {
    let folder = folder(BOTH, "published", "[[report.figures]]\nkind = \"over_state\"");
    add_two_rates(&folder);
    let text = readme(&folder);
    let cells = line(&text, &["DeltaNet", "64"]);
    assert_eq!((cells.len(), cells[2], cells[8]), (9, "0.820 ± 0.028", "0.793"));
    assert!(text.contains("| ours, scaled down, mean ± sd |"), "{text}");
    assert!(text.contains("| published in full [1], **not comparable** |"), "{text}");
    assert!(text.contains("**scaled down**: 2 epochs of 32."), "{text}");
    let svg = fs::read_to_string(folder.path().join("over_state.svg")).unwrap();
    assert!(svg.contains("scaled down: 2 epochs of 32") && !svg.contains("rings are published"));
}

#[test]
fn a_published_number_stands_beside_no_other_score() {
    let label = "protocol = \"formal_languages_tagged\"\nscaled_down = \"2 steps\"";
    for (metric, beside) in [("scaled_accuracy", false), ("accuracy", true)] {
        let more = "metrics = { parity = \"test/METRIC\" }".replace("METRIC", metric);
        let folder = folder(label, "published", &more);
        let path = folder.path().join("sweep.toml");
        let text = fs::read_to_string(&path).unwrap().replace("columns = \"d_model\"\n", "");
        let text = text.replace("d_model = [64, 128]", "d_model = [64]");
        let text = text.replace("[report]", "[report]\nsection = \"d_model\"");
        fs::write(&path, text.replace("\"Mamba-2\"", "\"Mamba\"")).unwrap();
        add_two_rates(&folder);
        add(&folder, "mamba2", "64", "0.001", "0", Some((0.5, 0.5)));
        let text = readme(&folder);
        assert_eq!(text.contains("54.2") || text.contains("0.542"), beside, "{metric}: {text}");
        assert_eq!(text.contains("SLiCEs, table 2 (a third"), beside, "{metric}: {text}");
    }
}

#[test]
fn a_published_median_stands_beside_a_median_alone() {
    let label = "protocol = \"formal_languages\"\nscaled_down = \"2 steps\"";
    let tables = |statistic: &str| {
        let folder = folder(label, "published", &format!("statistic = \"{statistic}\""));
        let sweep = Sweep::read(&folder.path().join("sweep.toml")).unwrap();
        let tables = table::beside(&sweep, None).into_iter();
        tables.map(|table| table.name.clone()).collect::<Vec<_>>()
    };
    let has = |statistic: &str, name: &str| tables(statistic).iter().any(|table| table == name);
    assert!(has("best", "formal_languages_best") && !has("best", "formal_languages_median"));
    assert!(has("median", "formal_languages_median") && !has("median", "formal_languages_best"));
    assert_eq!(tables("mean"), ["formal_languages_best_xlstm"]);
}

#[test]
fn a_picture_waits_for_the_first_row() {
    let folder = folder(OWN, "published", "[[report.figures]]\nkind = \"over_state\"");
    assert!(readme(&folder).contains("no rows yet") && !readme(&folder).contains(".svg"));
    assert!(!folder.path().join("over_state.svg").exists());
    add_two_rates(&folder);
    assert!(readme(&folder).contains("](over_state.svg)"));
}

#[test]
fn a_picture_says_that_something_has_no_rows() {
    let folder = folder(OWN, "published", "[[report.figures]]\nkind = \"bars\"");
    add_two_rates(&folder);
    report(folder.path(), Mode::Write, None).unwrap();
    let svg = fs::read_to_string(folder.path().join("bars.svg")).unwrap();
    assert!(svg.contains("a cross has no rows yet"), "{svg}");
}

#[test]
fn what_departs_is_said_with_its_reason() {
    let label = format!("{BOTH}\ndeparts = {{ \"train.epochs\" = \"2, for the time it takes.\" }}");
    let folder = folder(&label, "published", "");
    add_two_rates(&folder);
    let wanted = "- Departs from the protocol in `train.epochs` (2, for the time it takes).\n";
    assert!(readme(&folder).contains(wanted));
}

#[test]
fn mixers_at_one_learning_rate_say_so_in_table_and_picture_or_are_refused() {
    let figure = "[[report.figures]]\nkind = \"over_state\"";
    let label = format!("{OWN}\none_learning_rate = \"a cell that all of them learn\"");
    for (label, fine) in [(OWN, false), (label.as_str(), true)] {
        let folder = folder(label, "published", figure);
        let path = folder.path().join("sweep.toml");
        let text = fs::read_to_string(&path).unwrap();
        let text = text.replace("set = { mixer = \"", "set = { \"model.layers.0.mixer\" = { ");
        let text = text.replace("net\" }", "net = {} } }").replace("mamba2\" }", "mamba2 = {} } }");
        let text = text.replace("over = [\"optimizer.learning_rate\"]\n", "");
        fs::write(&path, text.replace("[1e-3, 1e-2]", "[1e-3]")).unwrap();
        if !fine {
            let message = report(folder.path(), Mode::Write, None).unwrap_err().to_string();
            assert!(message.contains("`one_learning_rate` is missing"), "{message}");
            continue;
        }
        add(&folder, "deltanet", "64", "0.001", "0", Some((0.70, 0.9)));
        let text = readme(&folder);
        assert!(text.contains("| ours, scaled down, one learning rate, mean ± sd |"), "{text}");
        assert!(text.contains("**One learning rate for all mixers**: a cell that all"), "{text}");
        let svg = fs::read_to_string(folder.path().join("over_state.svg")).unwrap();
        assert!(svg.contains("one learning rate for all mixers"), "{svg}");
    }
}

#[test]
fn state_has_two_counts_where_rows_have_them() {
    let folder = folder(FULL, "published", "[[report.figures]]\nkind = \"over_state\"");
    add_two_rates(&folder);
    let path = folder.path().join("rows.csv");
    assert!(!readme(&folder).contains("as published sizes count"));
    let rows = fs::read_to_string(&path).unwrap();
    let rows = rows.replace("state_bytes", "state_bytes,published_state_bytes");
    fs::write(&path, rows.replace("8960", "11008,8960")).unwrap();
    let text = readme(&folder);
    assert!(text.contains("| state, bytes | as published sizes count |"), "{text}");
    assert_eq!(line(&text, &["DeltaNet", "64"])[7..9], ["11008", "8960"]);
    let svg = fs::read_to_string(folder.path().join("over_state.svg")).unwrap();
    assert!(svg.contains("as published sizes count"), "{svg}");
}

#[test]
fn a_number_of_our_own_protocol_has_nothing_beside_it() {
    let folder = folder(OWN, "published", "");
    add_two_rates(&folder);
    let text = readme(&folder);
    assert!(text.contains("No published number belongs beside it.") && !text.contains("0.793"));
    assert_eq!(line(&text, &["DeltaNet", "64"]).len(), 8);
}

#[test]
fn a_mean_is_compared_only_with_a_mean_of_the_same_columns() {
    let names =
        ["Compress", "Fuzzy", "ICR", "Memorize", "Noisy", "SelCopy", "Mean"].map(String::from);
    let table = |name: &str| {
        crate::Published::embedded().tables.iter().find(|table| table.name == name).unwrap()
    };
    let mean = |name, ours: &[String]| comparable_value(table(name), "DeltaNet", "Mean", ours);
    assert_eq!(mean("mad_deltanet_paper", &names), Some(71.8));
    assert_eq!(mean("mad_deltanet_paper", &names[1..]), None);
    let fuzzy = comparable_value(table("mad_deltanet_paper"), "DeltaNet", "Fuzzy", &names[1..]);
    assert_eq!(fuzzy, Some(35.7));
    assert_eq!(mean("mad_mesanet_paper", &names), None);
}

#[test]
fn averages_are_over_replicates_that_every_setting_has() {
    let folder = folder(OWN, "published", "average = [\"mixer\"]\nmean = true");
    for (mixer, d, seed, value) in [
        ("deltanet", "64", "0", 0.2),
        ("deltanet", "64", "1", 0.4),
        ("mamba2", "64", "0", 0.6),
        ("mamba2", "64", "1", 0.6),
        ("deltanet", "128", "1", 0.9),
        ("mamba2", "128", "1", 0.7),
    ] {
        add(&folder, mixer, d, "0.001", seed, Some((value, value)));
    }
    let text = readme(&folder);
    assert_eq!(line(&text, &["all", "64"])[2], "0.450 ± 0.071");
    assert_eq!(line(&text, &["all", "128"])[2], "0.800");
    let mean = line(&text, &["all", "Mean"]);
    assert_eq!((mean[2], mean[4]), ("0.650", "1 of 2"), "seed 1 alone is in both");
}

#[test]
fn a_number_can_be_the_best_or_the_median_and_says_so() {
    for (statistic, wanted) in [("best", "0.840 ± 0.028"), ("median", "0.820 ± 0.028")] {
        let folder = folder(OWN, "published", &format!("statistic = \"{statistic}\""));
        add_two_rates(&folder);
        let text = readme(&folder);
        assert_eq!(line(&text, &["DeltaNet", "64"])[2], wanted);
        assert!(text.contains(&format!("ours, scaled down, {statistic} ± sd")), "{text}");
    }
}

#[test]
fn metrics_of_one_run_can_be_the_columns() {
    let more = "section = \"d_model\"\nunit = \"percent\"\n\
                metrics = { test = \"test/accuracy\", held = \"validation/accuracy\" }";
    let folder = folder(OWN, "published", more);
    let path = folder.path().join("sweep.toml");
    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, text.replace("columns = \"d_model\"\n", "")).unwrap();
    add_two_rates(&folder);
    let text = readme(&folder);
    assert!(text.contains("### 64") && text.contains("### 128"), "{text}");
    let cells = |at| text.lines().find(|l| l.starts_with(&format!("| DeltaNet | {at} |"))).unwrap();
    assert!(cells("test").contains("| 82.0 ± 2.8 |"), "{text}");
    assert!(cells("held").contains("| 20.0 ± 0.0 |"), "{text}");
}

#[test]
fn lines_stand_by_their_score_and_say_what_they_took() {
    let more = "sort = true\nalso = [\"wall_seconds\", \"steps\"]";
    let folder = folder(OWN, "published", more);
    let order = |text: &str| {
        let at = |name: &str| text.find(&format!("| {name} | 64 |")).unwrap();
        at("DeltaNet") < at("Mamba-2")
    };
    add(&folder, "mamba2", "64", "0.001", "0", Some((0.5, 0.5)));
    assert!(!order(&readme(&folder)), "no score comes last");
    add(&folder, "deltanet", "64", "0.001", "0", Some((0.75, 0.1)));
    add(&folder, "deltanet", "64", "0.001", "1", Some((0.25, 0.1)));
    assert!(order(&readme(&folder)), "of equals the sweep's first");
    add(&folder, "mamba2", "64", "0.001", "1", Some((1.0, 0.5)));
    let text = readme(&folder);
    assert!(!order(&text), "{text}");
    assert!(text.contains("| state, bytes | seconds | steps |"), "{text}");
    assert_eq!(line(&text, &["Mamba-2", "64"])[8..], ["75", "–"]);
    let path = folder.path().join("sweep.toml");
    let sweep = fs::read_to_string(&path).unwrap().replace("rule =", "lowest = true\nrule =");
    fs::write(&path, sweep).unwrap();
    assert!(order(&readme(&folder)), "less is better");
}

#[test]
fn text_around_the_marks_stays_and_marks_that_are_no_pair_are_refused() {
    let put = |readme: &str| put_between_marks(readme, "x", "new\n");
    let begin = "<!-- report:begin x -->";
    assert_eq!(
        put(&format!("a\n{begin}\nold\n{END}\nb\n")).unwrap(),
        format!("a\n{begin}\nnew\n{END}\nb\n")
    );
    assert_eq!(put("a\n").unwrap(), format!("a\n\n{begin}\nnew\n{END}\n"));
    for broken in [
        format!("{begin}\n"),
        format!("{END}\n"),
        format!("{END}\n{begin}\n"),
        format!("{begin}{begin}{END}"),
        format!("<!-- report:begin y -->{END}"),
    ] {
        assert!(put(&broken).is_err(), "{broken}");
    }
}

#[test]
fn curves_come_from_run_folders_and_stay_when_these_are_gone() {
    let folder = folder(OWN, "published", "[[report.figures]]\nkind = \"learning_curves\"");
    add_two_rates(&folder);
    let runs = folder.path().join("runs");
    let run = runs.join("deltanet-64-0.01-0");
    fs::create_dir_all(&run).unwrap();
    let lines: String =
        (1..=250).map(|i| format!("{{\"step\":{i},\"test/accuracy\":0.5}}\n")).collect();
    fs::write(run.join("metrics.jsonl"), lines).unwrap();
    report(folder.path(), Mode::Write, Some(&runs)).unwrap();
    let csv = || fs::read_to_string(folder.path().join("curves.csv")).unwrap();
    let first = csv();
    assert!(
        first.ends_with("deltanet-64-0.01-0,250,0.5\n") && first.lines().count() <= 102,
        "{first}"
    );
    fs::remove_dir_all(&runs).unwrap();
    report(folder.path(), Mode::Write, Some(&runs)).unwrap();
    assert_eq!(csv(), first);
    assert!(report(folder.path(), Mode::Check, None).unwrap().changed.is_empty());
    fs::write(folder.path().join("curves.csv"), "run,step,score\na,b\n").unwrap();
    let message = report(folder.path(), Mode::Check, None).unwrap_err().to_string();
    assert!(message.contains("curves.csv, line 2"), "{message}");
}

#[test]
fn rows_of_runs_that_are_not_asked_for_are_left_out_and_mentioned() {
    let folder = folder(OWN, "published", "");
    add_two_rates(&folder);
    add(&folder, "deltanet", "64", "0.5", "0", Some((1.0, 1.0)));
    let text = readme(&folder);
    assert_eq!(line(&text, &["DeltaNet", "64"])[2], "0.820 ± 0.028");
    let report = report(folder.path(), Mode::Check, None).unwrap();
    assert_eq!(report.notes, ["1 rows are of runs that sweep.toml does not ask for"]);
}
