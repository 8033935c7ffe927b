use super::*;

/// A sweep of one axis `model`, whose columns are `task`.
fn sweep(more: &str) -> Sweep {
    let text = format!(
        "base = \"x.toml\"\nscaled_down = \"a test\"\n[select]\nrule = \"published\"\n\
         over = [\"optimizer.learning_rate\"]\nreplicate = \"seed\"\n[report]\n\
         columns = \"task\"\naverage = [\"setting\"]\n{more}"
    );
    Sweep { config: toml::from_str(&text).unwrap(), folder: "x".into() }
}

fn run(settings: &[(&str, &str)], config: &str) -> PlannedRun {
    let settings = settings.iter().map(|(key, value)| (key.to_string(), value.to_string()));
    let config = toml::from_str(config).unwrap();
    PlannedRun { id: "x".into(), settings: settings.collect(), config }
}

/// The departure at a key.
fn at(protocol: &str, key: &str, runs: &[PlannedRun]) -> Option<String> {
    let protocol = Published::embedded().protocol(protocol).unwrap();
    let found = departures(&sweep(""), protocol, runs);
    let found = found.into_iter().find(|(departure, _)| departure.key == key);
    found.map(|(departure, at)| format!("{}, not {}, {at}", departure.got, departure.want))
}

#[test]
fn settings_are_those_of_the_protocol_and_all_of_them() {
    let mad = Published::embedded().protocol("mad").unwrap();
    assert_eq!(mad.settings.len(), 66);
    let run_of = |i: usize, task: &Table| {
        let task = format!("[task]\n{}", toml::to_string(task).unwrap().replace("[", "[task."));
        let task = task.replace("[task.[task.", "[[task."); // lists of sets
        let (i, mut run) = (i.to_string(), run(&[("model", "X"), ("setting", "0")], &task));
        run.settings[1].1 = i;
        run
    };
    let tasks: Vec<Table> = mad.settings.clone();
    let all: Vec<PlannedRun> = tasks.iter().enumerate().map(|(i, task)| run_of(i, task)).collect();
    assert_eq!(at("mad", "settings", &all), None);
    let most = at("mad", "settings", &all[1..]).unwrap();
    assert_eq!(most, "65 of 66, not all 66, for X");
    let one: Vec<PlannedRun> = (0..66).map(|i| run_of(i, &tasks[0])).collect();
    assert_eq!(at("mad", "settings", &one).unwrap(), "1 of 66, not all 66, for X");
    let mut other = all.clone();
    let text = toml::to_string(&other[3].config).unwrap();
    assert!(text.contains("vocab = 128"), "{text}");
    other[3].config = toml::from_str(&text.replace("vocab = 128", "vocab = 127")).unwrap();
    let why = at("mad", "settings", &other).unwrap();
    assert!(why.contains("127") && why.contains("one of its 66"), "{why}");
}

#[test]
fn a_column_holds_its_runs_to_what_it_is_called() {
    let brackets = |multiplication: bool, column: &str| {
        let task = format!("brackets = true, multiplication = {multiplication}");
        let config = format!("task.modular_arithmetic = {{ {task} }}");
        run(&[("model", "X"), ("task", column)], &config)
    };
    let key = "task.modular_arithmetic.multiplication";
    let at = |run| at("formal_languages", key, &[run]);
    assert_eq!(at(brackets(false, "brackets")), None);
    assert_eq!(at(brackets(true, "brackets_multiplication")), None);
    let why = at(brackets(true, "brackets")).unwrap();
    assert_eq!(why, "true, not false, in the run model = X, task = brackets");
}

#[test]
fn each_mixer_is_held_to_its_own_frame() {
    let mix = |mixer: &str, norm: &str, mlp: &str| {
        let layer = format!("{{ repeat = 2, mixer = {{ {mixer} = {{}} }}, mlp = \"{mlp}\" }}");
        run(&[("model", "X")], &format!("model = {{ norm = \"{norm}\", layers = [{layer}] }}"))
    };
    let departs = |mixer, norm, mlp| {
        let run = || [mix(mixer, norm, mlp)];
        let at = |key| at("mqar_mix", key, &run()).is_some();
        (at("model.norm"), at("model.layers.*.mlp"))
    };
    assert_eq!(departs("deltanet", "layer", "identity"), (false, false));
    assert_eq!(departs("deltanet", "rms", "none"), (true, true));
    assert_eq!(departs("mamba2", "rms", "none"), (false, false));
    assert_eq!(departs("mamba2", "layer", "identity"), (true, true));
}

#[test]
fn a_line_holds_its_runs_to_what_it_is_called() {
    let key = "model.layers.1.mixer.deltanet.heads";
    let at = |name: &str, mixer: &str| {
        let layers = format!("[{{ mixer = {{ base_conv = {{}} }} }}, {{ mixer = {{ {mixer} }} }}]");
        let config = format!("model = {{ layers = {layers} }}");
        at("mqar_mix", key, &[run(&[("model", name)], &config)])
    };
    assert_eq!(at("DeltaNet", "deltanet = { heads = 2 }"), None);
    assert_eq!(at("ours", "gated_deltanet = { heads = 1 }"), None);
    for mixer in ["deltanet = { heads = 4 }", "gated_deltanet = { heads = 2 }"] {
        assert!(at("DeltaNet", mixer).is_some(), "{mixer}");
    }
}

#[test]
fn every_value_that_the_best_was_chosen_among_has_a_run_in_every_cell() {
    let rates = ["1e-3", "3.16e-3", "1e-2", "3.16e-2"];
    let runs = |model: &'static str, rates: &[&str]| -> Vec<PlannedRun> {
        let run = |rate: &&str| {
            let settings = [("model", model), ("optimizer.learning_rate", *rate)];
            run(&settings, &format!("optimizer.learning_rate = {rate}"))
        };
        rates.iter().map(run).collect()
    };
    let key = "optimizer.learning_rate";
    assert_eq!(at("mqar_mix", key, &runs("X", &rates)), None);
    let both = [runs("X", &rates), runs("Y", &rates[..3])].concat();
    let why = at("mqar_mix", key, &both).unwrap();
    assert!(why.starts_with("never 0.0316, not each of") && why.ends_with("at model = Y"), "{why}");
    let other = [runs("X", &rates), runs("X", &["2e-3"])].concat();
    assert!(at("mqar_mix", key, &other).unwrap().starts_with("0.002, not [0.001"));
}

#[test]
fn fewer_replicates_than_published_depart() {
    let runs = |seeds: &[&str]| -> Vec<PlannedRun> {
        seeds.iter().map(|seed| run(&[("model", "X"), ("seed", seed)], "")).collect()
    };
    assert_eq!(at("group_words", "replicates", &runs(&["0", "1", "2"])), None);
    let why = at("group_words", "replicates", &runs(&["0", "1"])).unwrap();
    assert_eq!(why, "2, not 3, at model = X");
}

#[test]
fn a_choice_by_one_replicate_departs_where_all_of_them_chose() {
    let mut sweep = sweep("");
    let runs = [run(&[("model", "X"), ("seed", "0")], "")];
    let mut departs = |protocol: &str, repeat_chosen: bool| {
        sweep.config.select.repeat_chosen = repeat_chosen;
        let protocol = Published::embedded().protocol(protocol).unwrap();
        let found = departures(&sweep, protocol, &runs);
        found.iter().any(|(departure, _)| departure.key == "select.repeat_chosen")
    };
    assert!(departs("formal_languages", true) && !departs("formal_languages", false));
    assert!(!departs("mqar_mix", true), "one seed chose there");
}
