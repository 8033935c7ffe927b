//! The repository's own experiments say what their rows say.

use linattn_sweep::{Mode, experiments, page, report};
use std::path::Path;

fn of_the_repository(name: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(name)
}

#[test]
fn every_experiment_says_what_its_rows_say() {
    let mut seen = 0;
    for folder in experiments(&of_the_repository("experiments")).unwrap() {
        if !folder.join("rows.csv").exists() {
            continue; // it has not run
        }
        let report = report(&folder, Mode::Check, None).unwrap();
        assert!(report.changed.is_empty(), "make it anew: {:?}", report.changed);
        assert!(report.notes.is_empty(), "{}: {:?}", folder.display(), report.notes);
        seen += 1;
    }
    assert!(seen > 0, "there are experiments with rows");
}

#[test]
fn the_page_of_results_says_what_the_rows_say() {
    let changed = page(&of_the_repository("docs/results.md"), Mode::Check).unwrap().changed;
    assert!(changed.is_empty(), "make it anew: report --page docs/results.md");
}
