//! Messages about parts that a test leaves out.

use std::fmt::Display;
use std::io::Write;

/// Says on the terminal what the test that runs leaves out, and why. Not by `eprintln!`, which the test
/// harness hides where a test passes.
pub fn skipped(why: impl Display) {
    let thread = std::thread::current();
    let test = thread.name().unwrap_or("a test");
    let mut terminal = std::io::stderr();
    // Whoever has closed stderr does not want to know, which is no reason to fail.
    writeln!(terminal, "{test}, skipped: {why}").ok();
}

/// As [`skipped`], of a test that found no adapter.
/// # Panics
/// Where `LINATTN_REQUIRE_GPU` is set.
#[track_caller]
pub fn skipped_without_adapter() {
    assert!(
        std::env::var_os("LINATTN_REQUIRE_GPU").is_none(),
        "LINATTN_REQUIRE_GPU is set, and there is no adapter"
    );
    skipped("no adapter");
}
