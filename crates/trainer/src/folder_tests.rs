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
    let (mut folder, _) = RunFolder::open(root, run, Start::New, &[]).unwrap();
    folder.append(&serde_json::json!({ "step": 1 })).unwrap();
    save(&folder, 1, "weights").unwrap();
}

fn refusal(root: &Path, run: &RunConfig, start: Start) -> String {
    RunFolder::open(root, run, start, &[]).unwrap_err().to_string()
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
    let (folder, found) = RunFolder::open(desk.path(), &other, Start::Overwrite, &[]).unwrap();
    assert!(found.is_none());
    save(&folder, 1, "others").unwrap();
    let newest = checkpoint::newest(desk.path()).unwrap().unwrap();
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
    RunFolder::open(desk.path(), &run, Start::New, &[]).unwrap();
}

#[test]
fn advice_leads_to_a_start_and_not_in_a_circle() {
    let (desk, run, _) = desk();
    let why = refusal(desk.path(), &run, Start::Resume);
    assert!(why.contains("leave out --resume"), "{why}");
    drop(RunFolder::open(desk.path(), &run, Start::New, &[]).unwrap());
    for start in [Start::New, Start::Resume] {
        let why = refusal(desk.path(), &run, start);
        assert!(why.contains("without a checkpoint") && why.contains("--overwrite"), "{why}");
    }
    RunFolder::open(desk.path(), &run, Start::Overwrite, &[]).unwrap();
}

#[test]
fn a_folder_has_one_writer_and_the_others_are_told_who_it_is() {
    let (desk, run, other) = desk();
    let (folder, _) = RunFolder::open(desk.path(), &run, Start::New, &[]).unwrap();
    save(&folder, 1, "weights").unwrap();
    for start in [Start::New, Start::Resume, Start::Overwrite] {
        let why = refusal(desk.path(), &other, start);
        assert!(why.contains(&format!("process {} is writing", std::process::id())), "{why}");
    }
    let arrival = Arrival { config: String::new(), tokenizer: None, companions: &[], kept: None };
    let why = write_arrival(desk.path(), true, &arrival, |_| Ok(())).unwrap_err().to_string();
    assert!(why.contains("is writing"), "{why}");
    drop(folder);
    RunFolder::open(desk.path(), &run, Start::Resume, &[]).unwrap();
}

#[cfg(unix)] // elsewhere files that are open stay
#[test]
fn a_run_whose_folder_was_deleted_writes_nothing_into_the_next_ones() {
    let (desk, run, other) = desk();
    let root = desk.path().join("run");
    let (folder, _) = RunFolder::open(&root, &run, Start::New, &[]).unwrap();
    fs::remove_dir_all(&root).unwrap();
    assert!(matches!(save(&folder, 1, "weights"), Err(FolderError::Lost { .. })));
    let (_theirs, _) = RunFolder::open(&root, &other, Start::New, &[]).unwrap();
    assert!(matches!(save(&folder, 1, "weights"), Err(FolderError::Lost { .. })));
    assert!(folder.write_summary(&serde_json::json!({})).is_err());
    assert!(checkpoint::list(&root).unwrap().is_empty() && read_summary(&root).is_none());
}

/// Puts other bytes in a file's place.
fn change(path: &Path, change: impl Fn(&mut Vec<u8>)) -> Vec<u8> {
    let good = fs::read(path).unwrap();
    let mut bad = good.clone();
    change(&mut bad);
    assert_ne!(bad, good);
    fs::write(path, bad).unwrap();
    good
}

#[test]
fn metrics_that_are_not_those_of_the_checkpoint_are_refused_and_left_alone() {
    let (desk, run, _) = desk();
    run_in(desk.path(), &run);
    let path = desk.path().join(METRICS);
    let changes: [fn(&mut Vec<u8>); 4] = [
        |bytes| bytes.clear(),
        |bytes| bytes.truncate(5),
        |bytes| bytes[3] ^= 1,
        |bytes| bytes.insert(0, b' '),
    ];
    for bad in changes {
        let good = change(&path, bad);
        let changed = fs::read(&path).unwrap();
        let why = refusal(desk.path(), &run, Start::Resume);
        assert!(why.contains("metrics.jsonl is corrupt"), "{why}");
        assert_eq!(fs::read(&path).unwrap(), changed);
        fs::write(&path, good).unwrap();
    }
    let kept = change(&path, |bytes| bytes.extend(b"{\"step\":2}\n{\"ste"));
    RunFolder::open(desk.path(), &run, Start::Resume, &[]).unwrap();
    assert_eq!(fs::read(&path).unwrap(), kept, "what came after the checkpoint is cut off");
}

#[test]
fn another_number_in_a_checkpoints_state_is_refused() {
    let (desk, run, _) = desk();
    run_in(desk.path(), &run);
    let path = desk.path().join("checkpoints/step-0000000001/state.json");
    let good = fs::read_to_string(&path).unwrap();
    for (there, other) in [
        ("\"step\": 1", "\"step\": 2"),
        ("\"best_step\": 0", "\"best_step\": 1"),
        ("\"tokens\": 0", "\"tokens\": 9"),
        ("\"stopped_early\": false", "\"stopped_early\": true"),
    ] {
        assert!(good.contains(there), "{good}");
        fs::write(&path, good.replace(there, other)).unwrap();
        let why = refusal(desk.path(), &run, Start::Resume);
        assert!(why.contains("state.json is corrupt"), "{other}: {why}");
        assert!(why.contains("no checkpoint before it; --overwrite"), "{why}");
    }
    // Every single bit: it is refused, or says the same.
    for bit in 0..8 * good.len() {
        let mut bytes = good.clone().into_bytes();
        bytes[bit / 8] ^= 1 << (bit % 8);
        fs::write(&path, &bytes).unwrap();
        if let Ok(found) = checkpoint::newest(desk.path()) {
            assert_eq!(found.unwrap().position.step, 1, "{}", String::from_utf8_lossy(&bytes));
        }
    }
    fs::write(&path, &good).unwrap();
    fs::rename(path.parent().unwrap(), desk.path().join("checkpoints/step-0000000007")).unwrap();
    let why = refusal(desk.path(), &run, Start::Resume);
    assert!(why.contains("it is of step 1"), "{why}");
}

#[test]
fn a_checkpoint_that_lacks_a_file_is_named_with_what_would_do() {
    let (desk, run, _) = desk();
    run_in(desk.path(), &run);
    let (folder, _) = RunFolder::open(desk.path(), &run, Start::Resume, &[]).unwrap();
    save(&folder, 2, "weights").unwrap();
    drop(folder);
    let second = desk.path().join("checkpoints/step-0000000002");
    fs::remove_file(second.join("optimizer.safetensors")).unwrap();
    let why = refusal(desk.path(), &run, Start::Resume);
    assert!(why.contains("optimizer.safetensors is corrupt: it is missing"), "{why}");
    assert!(why.contains("step-0000000002 to resume from the checkpoint before it"), "{why}");
    fs::remove_dir_all(second).unwrap();
    let (_, found) = RunFolder::open(desk.path(), &run, Start::Resume, &[]).unwrap();
    assert_eq!(found.unwrap().position.step, 1);
}

#[test]
fn what_a_cut_left_is_cleared_away_by_the_next_run() {
    let (desk, run, _) = desk();
    run_in(desk.path(), &run);
    let litter = ["checkpoints/unfinished", "checkpoints/removed"];
    let files = [
        "summary.json.unfinished",
        "config.toml.unfinished",
        "tokenizer.json.unfinished",
        ".unfinished-curve.png",
        ".unfinished-curve.svg",
        ".events.out.tfevents.0000000000.linattn.unfinished",
        "checkpoints/step-0000000001/state.json.unfinished",
    ];
    for start in [Start::Resume, Start::Overwrite] {
        for folder in litter {
            fs::create_dir_all(desk.path().join(folder)).unwrap();
            fs::write(desk.path().join(folder).join("model.safetensors"), "half").unwrap();
        }
        for file in files {
            fs::write(desk.path().join(file), "{").unwrap();
        }
        RunFolder::open(desk.path(), &run, start, &[]).unwrap();
        for left in litter.iter().chain(&files) {
            assert!(!desk.path().join(left).exists(), "{start:?}: {left}");
        }
    }
}

#[test]
fn an_evaluation_that_was_due_is_put_into_its_checkpoint_and_nothing_else_is() {
    let (desk, run, _) = desk();
    let (mut folder, _) = RunFolder::open(desk.path(), &run, Start::New, &[]).unwrap();
    let due = Position { step: 4, evaluation_due: true, ..Position::default() };
    let write = |text: &'static str| {
        move |model: &Path, optimizer: &Path| {
            let written = fs::write(model, text).and_then(|()| fs::write(optimizer, text));
            written.map_err(|e| e.to_string())
        }
    };
    folder.save(&due, write("a")).unwrap();
    folder.append(&serde_json::json!({ "step": 4 })).unwrap();
    let done = Position { best_step: 4, evaluation_due: false, ..due.clone() };
    folder.save(&done, write("b")).unwrap();
    folder.save(&Position { best_step: 3, ..done.clone() }, write("c")).unwrap();
    drop(folder);
    let (_, found) = RunFolder::open(desk.path(), &run, Start::Resume, &[]).unwrap();
    let found = found.unwrap();
    assert_eq!(found.position.best_step, 4);
    assert_eq!(fs::read_to_string(found.model()).unwrap(), "a");
    assert_eq!(fs::read_to_string(desk.path().join(METRICS)).unwrap(), "{\"step\":4}\n");
}
