use super::*;
use tempfile::TempDir;

/// A folder for a run, that run's config, and another run's.
fn desk() -> (TempDir, RunConfig, RunConfig) {
    let text = "[task.parity]\ntrain = [{ sizes = [2, 4], examples = 8 }]\n\
                test = [{ sizes = [2, 4], examples = 8 }]\n\
                [model]\nd_model = 8\n[[model.layers]]\nmixer.deltanet = {}\n\
                [train]\nbatch_size = 4\nsteps = 3\n";
    let run: RunConfig = toml::from_str(text).unwrap();
    let other = RunConfig { seed: 9, ..run.clone() };
    (tempfile::tempdir().unwrap(), run, other)
}

fn save(folder: &RunFolder, step: u64, weights: &str) -> Result<(), FolderError> {
    folder.save(&Position { step, ..Position::default() }, |model, optimizer| {
        let written = fs::write(model, weights).and_then(|()| fs::write(optimizer, "moments"));
        written.map_err(|e| e.to_string())
    })
}

/// A run with a line of metrics and a checkpoint, closed.
fn run_in(root: &Path, run: &RunConfig) {
    let (mut folder, _) = RunFolder::open(root, run, Start::New).unwrap();
    folder.append(&serde_json::json!({ "step": 1 })).unwrap();
    save(&folder, 1, "weights").unwrap();
}

fn refusal(root: &Path, run: &RunConfig, start: Start) -> String {
    RunFolder::open(root, run, start).unwrap_err().to_string()
}

#[test]
fn checkpoints_without_their_config_are_no_new_run_and_not_resumed() {
    let (desk, run, other) = desk();
    run_in(desk.path(), &run);
    fs::remove_file(desk.path().join(CONFIG)).unwrap();
    for start in [Start::New, Start::Resume] {
        let why = refusal(desk.path(), &other, start);
        assert!(why.contains("checkpoints of a run whose config.toml is gone"), "{why}");
        assert!(why.contains("--overwrite") && !why.contains("leave out"), "{why}");
    }
    let (folder, found) = RunFolder::open(desk.path(), &other, Start::Overwrite).unwrap();
    assert!(found.is_none());
    save(&folder, 1, "others").unwrap();
    let newest = newest_checkpoint(desk.path()).unwrap().unwrap();
    assert_eq!(fs::read_to_string(newest.model()).unwrap(), "others");
}

#[test]
fn metrics_without_their_config_are_not_deleted() {
    let (desk, run, _) = desk();
    fs::write(desk.path().join(METRICS), "{}\n").unwrap();
    let why = refusal(desk.path(), &run, Start::New);
    assert!(why.contains("metrics of a run whose config.toml is gone"), "{why}");
    assert_eq!(fs::read_to_string(desk.path().join(METRICS)).unwrap(), "{}\n");
    fs::write(desk.path().join(METRICS), "").unwrap();
    RunFolder::open(desk.path(), &run, Start::New).unwrap();
}

#[test]
fn advice_leads_to_a_start_and_not_in_a_circle() {
    let (desk, run, _) = desk();
    let why = refusal(desk.path(), &run, Start::Resume);
    assert!(why.contains("leave out --resume"), "{why}");
    drop(RunFolder::open(desk.path(), &run, Start::New).unwrap());
    for start in [Start::New, Start::Resume] {
        let why = refusal(desk.path(), &run, start);
        assert!(why.contains("without a checkpoint") && why.contains("--overwrite"), "{why}");
    }
    RunFolder::open(desk.path(), &run, Start::Overwrite).unwrap();
}

#[test]
fn a_folder_has_one_writer_and_the_others_are_told_who_it_is() {
    let (desk, run, other) = desk();
    let (folder, _) = RunFolder::open(desk.path(), &run, Start::New).unwrap();
    save(&folder, 1, "weights").unwrap();
    for start in [Start::New, Start::Resume, Start::Overwrite] {
        let why = refusal(desk.path(), &other, start);
        assert!(why.contains(&format!("process {} is writing", std::process::id())), "{why}");
    }
    let arrival = Arrival { config: String::new(), tokenizer: None, kept: None };
    let why = write_arrival(desk.path(), true, &arrival, |_| Ok(())).unwrap_err().to_string();
    assert!(why.contains("is writing"), "{why}");
    drop(folder);
    RunFolder::open(desk.path(), &run, Start::Resume).unwrap();
}

#[cfg(unix)] // elsewhere files that are open stay
#[test]
fn a_run_whose_folder_was_deleted_writes_nothing_into_the_next_ones() {
    let (desk, run, other) = desk();
    let root = desk.path().join("run");
    let (folder, _) = RunFolder::open(&root, &run, Start::New).unwrap();
    fs::remove_dir_all(&root).unwrap();
    assert!(matches!(save(&folder, 1, "weights"), Err(FolderError::Lost { .. })));
    let (_theirs, _) = RunFolder::open(&root, &other, Start::New).unwrap();
    assert!(matches!(save(&folder, 1, "weights"), Err(FolderError::Lost { .. })));
    assert!(folder.write_summary(&serde_json::json!({})).is_err());
    assert!(checkpoints(&root).unwrap().is_empty() && read_summary(&root).is_none());
}
