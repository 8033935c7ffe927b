//! docs/add_a_mixer.md shows what is compiled: `linattn` tests that mixer itself.

use toml::Table;

const GUIDE: &str = include_str!("../docs/add_a_mixer.md");
const FILE: &str = include_str!("../crates/linattn/src/nn/mixers/guide/learnt_decay.rs");
const LIST: &str = include_str!("../crates/linattn/src/nn/mixers/guide.rs");

/// The guide's blocks of code that are marked so.
fn blocks(mark: &str) -> Vec<String> {
    let fence = format!("```{mark}");
    let (mut lines, mut blocks) = (GUIDE.lines(), vec![]);
    while lines.any(|line| line == fence) {
        let block = lines.by_ref().take_while(|line| *line != "```");
        blocks.push(block.map(|line| format!("{line}\n")).collect());
    }
    blocks
}

#[test]
fn the_guide_shows_the_code_that_is_compiled() {
    assert_eq!(blocks("rust").join("\n"), FILE, "the guide's parts, and its file");
    let lines = blocks("rs");
    assert_eq!(lines.len(), 3, "modules, the list of mixers, the list of tests");
    for line in lines.iter().flat_map(|block| block.lines()) {
        let here = LIST.lines().any(|other| other.trim() == line);
        assert!(here, "{line:?} of the guide does not stand in guide.rs");
    }
}

#[test]
fn the_guide_shows_a_config_of_the_cell() {
    let cell = include_str!("../configs/mqar/deltanet.toml")
        .replace("# DeltaNet", "# Linear attention with a learnt decay")
        .replace("mixer.deltanet", "mixer.learnt_decay");
    assert_eq!(blocks("toml").concat(), cell);
    let run: Table = toml::from_str(&cell).unwrap();
    let want: Table = toml::from_str("learnt_decay = { heads = 4 }").unwrap();
    assert_eq!(run["model"]["layers"][0]["mixer"].as_table(), Some(&want));
}
