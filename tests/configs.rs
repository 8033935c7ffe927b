//! Every file under configs/: it is a run, and the small ones run.

use crate::desk::{json, text};
use linattn::nn::mixers::MixerConfig;
use linattn_trainer::{ConfigError, RunConfig};
use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

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
fn small() -> Vec<PathBuf> {
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
        match RunConfig::read(&path, &[]) {
            Ok(run) => {
                let twin = names.insert(run.name.clone(), path.clone());
                let main_job = path.parent() == Some(&root().join("configs"));
                let of_main_job =
                    twin.as_ref().is_some_and(|t| t.parent() == Some(&root().join("configs")));
                assert!(
                    twin.is_none() || main_job || of_main_job,
                    "{} and {twin:?} both write runs/{}",
                    path.display(),
                    run.name
                );
            }
            // Text that is not ours to keep here: the error says where it would have to be.
            Err(ConfigError::File(e)) => {
                let said = e.to_string();
                assert!(said.contains("data/"), "{}: {said}", path.display());
            }
            Err(e) => panic!("{}: {e}", path.display()),
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
        let name = format!("  mixer = {}", path.file_stem().unwrap().to_string_lossy());
        assert!(planned.lines().any(|line| line.ends_with(&name)), "{name}: {planned}");
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
        let few = ["--set", "train={ steps = 2, batch_size = 4 }", "--overwrite"];
        let output = train(&path, folder.path(), &few);
        assert!(output.status.success(), "{}: {}", path.display(), text(&output.stderr));
        let name = RunConfig::read(&path, &[]).unwrap().name;
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
