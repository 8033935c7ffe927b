//! Every file under configs/: it is a run, and the small ones run.

use crate::desk::{json, text};
use linattn::nn::mixers::MixerConfig;
use linattn_sweep::Published;
use linattn_tasks::TaskConfig;
use linattn_trainer::{RunConfig, host_memory, least_memory};
use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};
use toml::Value;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn configs() -> Vec<PathBuf> {
    fn walk(folder: &Path, list: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                walk(&path, list);
            } else if path.extension().is_some_and(|e| e == "toml") {
                list.push(path);
            }
        }
    }
    let mut list = vec![];
    walk(&root().join("configs"), &mut list);
    list.sort();
    list
}

/// Those that two cores train in minutes: one for every task, and every mixer and hybrid on one cell.
pub(crate) fn small() -> Vec<PathBuf> {
    let cells = ["configs/mqar", "configs/hybrids"].map(|folder| root().join(folder));
    let is_small = |path: &PathBuf| {
        path.file_name().is_some_and(|name| name == "small.toml")
            || cells.iter().any(|cell| path.parent() == Some(cell))
    };
    configs().into_iter().filter(is_small).collect()
}

/// Trains from the repository's folder, whose pages some of them read.
fn train(config: &Path, out: &Path, more: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_train"))
        .current_dir(root())
        .args(["--device", "cpu", "--progress", "quiet", "--config"])
        .arg(config)
        .arg("--out")
        .arg(out)
        .args(more)
        .output()
        .unwrap()
}

#[test]
fn every_config_is_a_run_of_its_own_name() {
    let mut names: HashMap<String, PathBuf> = HashMap::new();
    for path in configs() {
        let text = fs::read_to_string(&path).unwrap();
        let name = match text.contains("\"data/") {
            true => toml::from_str::<toml::Table>(&text).unwrap()["name"].as_str().unwrap().into(),
            false => RunConfig::read(&path, &[]).unwrap_or_else(|e| panic!("{e}")).name,
        };
        let twin = names.insert(name.clone(), path.clone());
        let main_job = path.parent() == Some(&root().join("configs"));
        let of_main_job =
            twin.as_ref().is_some_and(|t| t.parent() == Some(&root().join("configs")));
        assert!(
            twin.is_none() || main_job || of_main_job,
            "{} and {twin:?} both write runs/{name}",
            path.display(),
        );
    }
}

/// The folders that configs/README.md names, with stand-ins of the least that the real ones have: the
/// longest adjective and noun, essays for the longest haystack, and text.
fn stand_ins(folder: &Path) {
    let data = folder.join("data");
    for name in ["essays", "words", "text"] {
        fs::create_dir_all(data.join(name)).unwrap();
    }
    let put = |name: &str, text: String| fs::write(data.join(name), text).unwrap();
    let sentences = |topic: &str, count: usize| -> String {
        (0..count).map(|i| format!("Sentence {i} of {topic} says what it means. ")).collect()
    };
    for essay in 0..10 {
        put(&format!("essays/{essay}.txt"), sentences(&format!("essay {essay}"), 60));
    }
    for text in ["tinyshakespeare", "wikitext2-valid", "wikitext2-test"] {
        put(&format!("text/{text}.txt"), sentences(text, 200));
    }
    put("words/adjectivelist.txt", "heartbreaking\nold\n".into());
    let nouns: String = (0..20).map(|i| format!("noun{i}\n")).collect();
    put("words/nounlist.txt", format!("{nouns}cross-contamination\n"));
}

#[test]
fn configs_that_want_folders_run_where_these_are() {
    let folder = tempfile::tempdir().unwrap();
    stand_ins(folder.path());
    let train = |config: &Path, more: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_train"));
        command.current_dir(folder.path()).args(["--device", "cpu", "--progress", "quiet"]);
        let output = command.arg("--config").arg(config).args(more).output().unwrap();
        assert!(output.status.success(), "{}: {}", config.display(), text(&output.stderr));
    };
    let mut count = 0;
    for path in configs() {
        let config = fs::read_to_string(&path).unwrap();
        // Those that start from a run are tried in tests/fine_tuning.rs.
        if !config.contains("\"data/") || config.contains("from = \"runs/") {
            continue;
        }
        train(&path, &["--dry-run"]);
        let sets = match config.contains("[task.s_niah]") {
            true => {
                "task.s_niah.test=[{ needle = \"uuid_in_essays\", length = 1024, examples = 1 }]"
            }
            false => {
                "task.language_modelling.test=[{ text = [\"data/text/wikitext2-test.txt\"], \
                      length = 1024, examples = 1 }]"
            }
        };
        let validation = match config.contains("validation =") {
            true => "task.s_niah.validation=[]",
            false => "seed=1",
        };
        let few = "train={ steps = 1, batch_size = 1 }";
        let narrow = "model.d_model=32";
        train(&path, &["--set", few, "--set", narrow, "--set", sets, "--set", validation]);
        count += 1;
    }
    assert!(count >= 7, "{count} configs");
}

/// `sweep` itself says what it would run, and whether that is what the sweep says of it.
/// Sets the whole number at `place`, counted through a config, and tells whether there is one.
fn enlarge(value: &mut Value, place: &mut usize, number: i64) -> bool {
    match value {
        Value::Integer(here) if *place == 0 => {
            *here = number;
            true
        }
        Value::Integer(_) => {
            *place -= 1;
            false
        }
        Value::Table(table) => table.iter_mut().any(|(_, value)| enlarge(value, place, number)),
        Value::Array(list) => list.iter_mut().any(|value| enlarge(value, place, number)),
        _ => false,
    }
}

/// Their products would overflow, or ask for more memory than there is.
#[test]
fn no_whole_number_of_a_config_is_too_large_to_be_refused_in_words() {
    for path in small() {
        let text = RunConfig::read(&path, &[]).unwrap().to_toml();
        for (place, number) in (0..).flat_map(|place| [1 << 40, i64::MAX].map(|n| (place, n))) {
            let mut changed: Value = toml::from_str(&text).unwrap();
            if !enlarge(&mut changed, &mut { place }, number) {
                break;
            }
            let Value::Table(table) = changed else { unreachable!("a file is a table") };
            if let Ok(run) = RunConfig::from_table(&path, table, &[]) {
                host_memory(&run).and_then(|_| least_memory(&run)).unwrap();
            }
        }
    }
}

#[test]
fn every_sweep_of_the_repository_can_be_planned() {
    let mut sweeps = vec![];
    for entry in fs::read_dir(root().join("experiments")).unwrap() {
        let sweep = entry.unwrap().path().join("sweep.toml");
        sweeps.extend(sweep.exists().then_some(sweep));
    }
    assert!(sweeps.len() >= 3, "{sweeps:?}");
    let folder = tempfile::tempdir().unwrap();
    stand_ins(folder.path());
    for sweep in sweeps {
        let mut command = Command::new(env!("CARGO_BIN_EXE_sweep"));
        command.current_dir(folder.path());
        let output = command.args(["--dry-run", "--config"]).arg(&sweep).output().unwrap();
        let said = text(&output.stderr);
        assert!(output.status.success(), "{}: {said}", sweep.display());
    }
}

/// The settings of MAD in `published.toml` and in the tasks are one list.
#[test]
fn the_published_settings_of_mad_are_the_tasks_own() {
    let protocol = Published::embedded().protocol("mad").unwrap();
    let tasks = linattn_tasks::mad::published_settings();
    assert_eq!((protocol.settings.len(), tasks.len()), (66, 66));
    for (ours, theirs) in tasks.iter().zip(&protocol.settings) {
        let theirs: linattn_tasks::TaskConfig = theirs.clone().try_into().unwrap();
        assert_eq!(ours.task, theirs, "{}", ours.name);
    }
}

/// Configs of published rows: of each protocol its models, each with its file. A file `-` says that there is no layer for it, or
/// that nobody knows how it was trained.
const PUBLISHED_ROWS: &[(&str, &[(&str, &str)])] = &[
    (
        "mqar_mix",
        &[
            ("DeltaNet", "mqar/mix/deltanet"),
            ("Gated DeltaNet", "mqar/mix/gated_deltanet"),
            ("GLA", "mqar/mix/gla"),
            ("RWKV-7", "mqar/mix/rwkv7"),
            ("Mamba-2", "mqar/mix/mamba2"),
            ("Mamba", "mqar/mix/mamba"),
            ("Based", "mqar/mix/based"),
            ("Attention", "mqar/mix/attention"),
            ("Sliding window", "mqar/mix/sliding_window"),
            ("H3", "mqar/mix/h3"),
            ("Hyena", "mqar/mix/hyena"),
        ],
    ),
    (
        "mqar_figure2",
        &[
            ("Attention", "mqar/512x64/attention"),
            ("RWKV-4", "mqar/512x64/rwkv4"),
            ("BaseConv", "mqar/512x64/base_conv"),
            ("H3", "mqar/512x64/h3"),
            ("Hyena", "mqar/512x64/hyena"),
        ],
    ),
    ("mqar_512x80", &[("Mamba", "mqar/512x80/mamba"), ("MetaLA", "mqar/512x80/metala")]),
    ("mqar_256_pairs", &[("RWKV-7", "-")]),
    (
        "mad",
        &[
            ("Transformer", "mad/*/attention"),
            ("Mamba", "mad/*/mamba"),
            ("Mamba-2", "mad/*/mamba2"),
            ("GLA", "mad/*/gla"),
            ("DeltaNet", "mad/*/deltanet"),
            ("Gated DeltaNet", "mad/*/gated_deltanet"),
            ("Gated DeltaProduct", "mad/*/deltaproduct_6"),
            ("RWKV-7", "mad/*/rwkv7"),
            ("PaTH attention", "mad/*/path_attention"),
            ("MesaNet", "mad/*/mesa_net"),
            ("mLSTM (fla)", "mad/*/mlstm"),
            ("mLSTM (NX-AI)", "mad/*/mlstm_v1"),
            ("xLSTM", "mad/*/mlstm"),
            ("GSA", "mad/*/gsa"),
            ("Hawk", "mad/*/hawk"),
            ("Hawk-MesaNet", "mad/*/hawk_mesa_net"),
            ("MetaLA", "mad/*/metala"),
            ("Hyena", "mad/*/hyena"),
            ("Multihead Hyena", "mad/*/multihead_hyena"),
            ("Titans", "-"),
            ("OmegaNet", "-"),
            ("Atlas", "-"),
            ("EFLA", "-"),
        ],
    ),
    (
        "formal_languages",
        &[
            ("Transformer", "state_tracking/parity/attention"),
            ("mLSTM", "state_tracking/parity/mlstm"),
            ("sLSTM", "state_tracking/parity/slstm"),
            ("Mamba [0, 1]", "state_tracking/parity/mamba"),
            ("Mamba [-1, 1]", "state_tracking/parity/mamba_neg_eigval"),
            ("DeltaNet [0, 1]", "state_tracking/parity/deltanet_no_neg_eigval"),
            ("DeltaNet [-1, 1]", "state_tracking/parity/deltanet"),
        ],
    ),
    (
        "formal_languages_curriculum",
        &[
            ("Mamba-2", "state_tracking/parity/mamba2"),
            ("Gated DeltaNet [-1, 1]", "state_tracking/parity/gated_deltanet"),
            ("Mamba-3", "-"),
            ("Mamba-3, standard RoPE", "-"),
            ("Mamba-3 without RoPE", "-"),
        ],
    ),
    (
        "formal_languages_tagged",
        &[
            ("LSTM", "state_tracking/tagged/lstm"),
            ("sLSTM", "state_tracking/tagged/slstm"),
            ("mLSTM", "state_tracking/tagged/mlstm"),
            ("xLSTM[1:1]", "state_tracking/tagged/xlstm"),
            ("DeltaNet [0, 1]", "state_tracking/tagged/deltanet"),
            ("DeltaNet [-1, 1]", "state_tracking/tagged/deltanet_neg_eigval"),
            ("Gated DeltaNet [0, 1]", "state_tracking/tagged/gated_deltanet"),
            ("Gated DeltaProduct [-1, 1], 2 steps", "state_tracking/tagged/gated_deltaproduct"),
            ("RWKV-7", "state_tracking/tagged/rwkv7"),
            ("Mamba", "state_tracking/tagged/mamba"),
            ("Transformer", "state_tracking/tagged/attention"),
            ("S4D", "state_tracking/tagged/s4d"),
            ("D-SLiCE", "-"),
        ],
    ),
    (
        "group_words",
        &[
            ("1 step", "state_tracking/s5/deltanet"),
            ("2 steps", "state_tracking/s3/deltaproduct"),
            ("3 steps", "state_tracking/s5/deltaproduct"),
            ("4 steps", "state_tracking/s5/deltaproduct"),
        ],
    ),
    (
        "s_niah",
        &[
            ("DeltaNet", "s_niah/scaled_down/deltanet"),
            ("Mamba-2", "s_niah/scaled_down/mamba2"),
            ("Gated DeltaNet", "s_niah/scaled_down/gated_deltanet"),
            ("Gated DeltaNet-2", "s_niah/scaled_down/gated_deltanet2"),
            ("KDA", "s_niah/scaled_down/kda"),
            ("Mamba-3 MIMO", "-"),
            ("Mamba-2, log-linear", "-"),
        ],
    ),
];

#[test]
fn every_published_row_has_a_config_or_no_layer() {
    let rows =
        |protocol: &str| PUBLISHED_ROWS.iter().find(|(name, _)| *name == protocol).unwrap().1;
    for table in &Published::embedded().tables {
        for model in table.values.keys().chain(table.points.keys()) {
            let known = rows(&table.protocol).iter().any(|(name, _)| name == model);
            assert!(known, "{model} of {} has no config and no word on it", table.name);
        }
    }
    let tasks: Vec<PathBuf> =
        fs::read_dir(root().join("configs/mad")).unwrap().map(|e| e.unwrap().path()).collect();
    assert_eq!(tasks.len(), 6);
    let files = PUBLISHED_ROWS.iter().flat_map(|(_, rows)| rows.iter().map(|(_, file)| *file));
    for file in files.filter(|file| *file != "-") {
        match file.strip_prefix("mad/*/") {
            None => assert!(root().join(format!("configs/{file}.toml")).exists(), "{file}"),
            Some(name) => tasks.iter().for_each(|task| {
                assert!(task.join(format!("{name}.toml")).exists(), "{}: {name}", task.display());
            }),
        }
    }
}

/// `sweep` itself says what it would run: every config of the cell, and so every mixer there is.
#[test]
fn the_zoo_runs_every_mixer() {
    let output = Command::new(env!("CARGO_BIN_EXE_sweep"))
        .args(["--dry-run", "--config"])
        .arg(root().join("experiments/zoo/sweep.toml"))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    let planned = text(&output.stdout);
    let mut mixers = vec![];
    for path in configs() {
        if path.parent() != Some(&root().join("configs/mqar")) {
            continue;
        }
        let name = format!("  mixer = {},", path.file_stem().unwrap().to_string_lossy());
        assert!(planned.lines().any(|line| line.contains(&name)), "{name}: {planned}");
        let run: toml::Table = toml::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
        for layer in run["model"]["layers"].as_array().unwrap() {
            mixers.extend(layer["mixer"].as_table().unwrap().keys().cloned());
        }
    }
    for name in MixerConfig::NAMES {
        assert!(mixers.iter().any(|mixer| mixer == name), "{name} has no config in configs/mqar");
    }
}

#[test]
fn every_small_variant_takes_its_first_steps() {
    let small = small();
    assert!(small.len() >= 20, "{} small configs", small.len());
    let folder = tempfile::tempdir().unwrap();
    for path in small {
        let config = RunConfig::read(&path, &[]).unwrap();
        let mut few = vec!["--set", "train={ steps = 2, batch_size = 4 }", "--overwrite"];
        if matches!(config.task, TaskConfig::Mqar(_)) {
            let test = "task.mqar.test=[{ length = 32, pairs = 4, examples = 20 }]";
            few.extend(["--set", test]);
        }
        let output = train(&path, folder.path(), &few);
        assert!(output.status.success(), "{}: {}", path.display(), text(&output.stderr));
        let name = config.name;
        let summary = json(&folder.path().join(name).join("summary.json"));
        assert_eq!(summary["status"], "completed", "{}", path.display());
        assert!(summary["score"].is_number(), "{}: {summary}", path.display());
    }
}

#[test]
#[ignore = "an hour; nightly"]
fn every_small_variant_ends_within_three_minutes() {
    let folder = tempfile::tempdir().unwrap();
    for path in small() {
        let started = Instant::now();
        let output = train(&path, folder.path(), &["--overwrite"]);
        assert!(output.status.success(), "{}: {}", path.display(), text(&output.stderr));
        let took = started.elapsed();
        eprintln!("{:.0} s  {}", took.as_secs_f64(), path.display());
        assert!(took < Duration::from_secs(180), "{}: {took:?}", path.display());
    }
}
