//! The README of `linattn`, followed from an empty folder.

use std::fs;
use std::path::Path;
use std::process::Command;

const README: &str = include_str!("../crates/linattn/README.md");

/// The README's first block of this kind.
fn block(kind: &str) -> &'static str {
    let (_, rest) = README.split_once(&format!("```{kind}\n")).unwrap();
    rest.split_once("```").unwrap().0
}

/// Versions that are not published yet are this repository's.
fn patches() -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let patch =
        |(name, folder): (&str, &str)| format!("{name} = {{ path = {:?} }}\n", root.join(folder));
    let crates = [("linattn", "crates/linattn"), ("linattn-kernels", "kernels")];
    format!("[patch.crates-io]\n{}", crates.map(patch).concat())
}

/// Builds and runs the README's program, with more features where `LINATTN_NEWCOMER` names one and its
/// backend, `cuda Cuda` for instance; and with Burn's own default features left out, as the README has it.
#[test]
#[ignore = "builds Burn anew, in some minutes: cargo test --test tests newcomer -- --ignored"]
fn a_newcomer_follows_the_readme_from_an_empty_folder() {
    let folder = tempfile::tempdir().unwrap();
    let (mut dependencies, mut program) = (block("toml").to_string(), block("rust").to_string());
    if let Ok(wanted) = std::env::var("LINATTN_NEWCOMER") {
        let (feature, backend) = wanted.split_once(' ').expect("a feature and its backend");
        let plain = "linattn = \"0.1\"";
        assert!(dependencies.contains(plain) && program.contains("{Autodiff, Flex}"));
        let chosen = format!("linattn = {{ version = \"0.1\", features = [{feature:?}] }}");
        dependencies = dependencies.replace(plain, &chosen);
        program = program
            .replace("{Autodiff, Flex}", &format!("{{Autodiff, {backend}}}"))
            .replace("Autodiff<Flex>", &format!("Autodiff<{backend}>"));
    }
    let package = "[package]\nname = \"newcomer\"\nversion = \"0.1.0\"\nedition = \"2024\"\n\n";
    let manifest = format!("{package}{dependencies}\n{}", patches());
    fs::write(folder.path().join("Cargo.toml"), manifest).unwrap();
    fs::create_dir(folder.path().join("src")).unwrap();
    fs::write(folder.path().join("src/main.rs"), program).unwrap();
    let mut cargo = Command::new(env!("CARGO"));
    // The builds of these tests and of a newcomer have nothing in common but the machine.
    cargo.current_dir(folder.path()).env("CARGO_TARGET_DIR", folder.path().join("target"));
    let output = cargo.args(["run", "--quiet"]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    let loss = |line: &str| line.rsplit_once("loss ").unwrap().1.trim().parse::<f32>().unwrap();
    let losses: Vec<f32> = said.lines().map(loss).collect();
    assert_eq!(losses.len(), 10, "{said}");
    assert!(losses[9] < losses[0], "{said}");
}
