//! docs/layers.md: what it calls a layer of another library is a layer here.

use linattn::nn::mixers::MixerConfig;
use serde::Deserialize;

const PAGE: &str = include_str!("../docs/layers.md");

/// The first two cells of each row of the table: `Layer(hidden_size=1024, ..)` and `mixer = { .. }`.
fn rows() -> Vec<(&'static str, &'static str)> {
    let (_, table) = PAGE.split_once("| fla, `fla.layers` | here, in a config |").unwrap();
    let lines = table.lines().skip(2).take_while(|line| line.starts_with('|'));
    let cells = |line: &'static str| {
        let mut cells = line.split('|').map(|cell| cell.trim().trim_matches('`'));
        (cells.nth(1).unwrap(), cells.next().unwrap())
    };
    lines.map(cells).collect()
}

#[test]
fn every_row_is_a_layer_of_that_width() {
    #[derive(Deserialize)]
    struct Holder {
        mixer: MixerConfig,
    }
    let rows = rows();
    assert!(rows.len() > 20, "{rows:?}");
    for (theirs, ours) in rows {
        let (_, width) = theirs.split_once("hidden_size=").expect(theirs);
        let digits = width.find(|c: char| !c.is_ascii_digit()).unwrap();
        let holder: Result<Holder, _> = toml::from_str(&format!("mixer.{ours}"));
        let mixer = holder.unwrap_or_else(|e| panic!("{ours}: {e}")).mixer;
        mixer.cost(width[..digits].parse().unwrap(), 16).unwrap_or_else(|e| panic!("{ours}: {e}"));
    }
}
