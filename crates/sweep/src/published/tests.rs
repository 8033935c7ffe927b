use super::*;

fn table(name: &str) -> &'static PublishedTable {
    Published::embedded().tables.iter().find(|table| table.name == name).unwrap()
}

#[test]
fn every_table_belongs_to_a_protocol_and_has_a_number_a_column() {
    let all = Published::embedded();
    for table in &all.tables {
        let name = &table.name;
        assert!(all.protocol(&table.protocol).is_some(), "{name}: {}", table.protocol);
        assert_eq!(all.tables.iter().filter(|other| other.name == *name).count(), 1, "{name}");
        for (model, list) in table.values.iter().chain(&table.spread).chain(&table.state_bytes) {
            assert_eq!(numbers(list).len(), table.columns.len(), "{name}, {model}");
        }
        let extra = table.spread.keys().chain(table.state_bytes.keys());
        assert!(extra.into_iter().all(|model| table.values.contains_key(model)), "{name}");
        assert!(table.values.is_empty() != table.points.is_empty(), "{name}");
        assert!(table.error.is_some() == (table.tag == Tag::Figure), "{name}");
    }
}

#[test]
fn no_number_leaves_its_range() {
    for table in &Published::embedded().tables {
        let shares = |model| table.columns.iter().filter_map(move |c| table.value(model, c));
        for model in table.models() {
            let points = table.over_state(model).into_iter().map(|(_, value)| value);
            for value in shares(model).chain(points) {
                let share = table.unit.share(value);
                assert!((0.0..=1.0).contains(&share), "{}, {model}: {value}", table.name);
            }
        }
    }
}

/// Each table's means against its own numbers, with what one rounding of each may do.
#[test]
fn published_means_are_the_means_of_their_columns() {
    let mut checked = 0;
    for table in &Published::embedded().tables {
        for (model, list) in &table.values {
            let values = numbers(list);
            let of = |means: bool| {
                let columns = table.columns.iter().zip(&values);
                let columns =
                    columns.filter(move |(column, _)| column.starts_with("Mean") == means);
                columns
                    .map(|(_, value)| *value)
                    .filter(|value| value.is_finite())
                    .collect::<Vec<_>>()
            };
            let (parts, means) = (of(false), of(true));
            if let [mean] = means[..] {
                let own = parts.iter().sum::<f64>() / parts.len() as f64;
                assert!(
                    (own - mean).abs() <= 0.1001,
                    "{}, {model}: {own:.3}, not {mean}",
                    table.name
                );
                checked += 1;
            }
        }
    }
    assert!(checked > 40, "{checked}");
}

/// Bytes of two layers in f32: a convolution that keeps three rows of width d, and the mixer's
/// state.
#[test]
fn state_sizes_follow_from_the_mixers() {
    let conv = |d: f64| 4.0 * 3.0 * d;
    let state = |model: &str, d: f64| match model {
        "DeltaNet" => 4.0 * 2.0 * (d / 2.0) * (d / 2.0),
        "Gated DeltaNet" => 4.0 * 2.0 * (d / 2.0) * d,
        "GLA" => 4.0 * 2.0 * (d / 4.0) * (d / 2.0),
        _ => 4.0 * (d / 64.0) * 64.0 * 64.0,
    };
    for model in ["DeltaNet", "Gated DeltaNet", "GLA", "RWKV-7"] {
        let points = table("mqar_mix_readme").over_state(model);
        let wanted = [64.0, 128.0, 256.0].map(|d| conv(d) + state(model, d));
        assert_eq!(points.iter().map(|p| p.0).collect::<Vec<_>>(), wanted, "{model}");
    }
}

#[test]
fn a_number_is_found_by_model_and_column_and_nothing_else_is() {
    let slices = table("formal_languages_slices");
    assert_eq!(slices.value("DeltaNet [-1, 1]", "arithmetic"), Some(66.4));
    assert_eq!(slices.spread("DeltaNet [-1, 1]", "arithmetic"), Some(8.8));
    assert_eq!(slices.spread("DeltaNet [-1, 1]", "parity"), None);
    assert_eq!(slices.value("S4D", "Mean"), None);
    assert_eq!(slices.value("DeltaNet", "arithmetic"), None);
    assert_eq!(table("mqar_mix_readme_points").over_state("Mamba").len(), 4);
}

#[test]
fn every_requirement_names_what_a_run_config_has_at_its_top() {
    for protocol in &Published::embedded().protocols {
        let cells = protocol.cells.iter().flat_map(|c| c.requires.keys().chain(c.fits.keys()));
        for key in protocol.requires.keys().chain(protocol.grid.keys()).chain(cells) {
            let top = key.split('.').next().unwrap();
            let known = ["seed", "task", "model", "train", "optimizer", "schedule", "evaluate"];
            assert!(known.contains(&top), "{}: {key}", protocol.name);
        }
        for cells in &protocol.cells {
            assert!(!cells.requires.is_empty(), "{}: {cells:?}", protocol.name);
            let all = Cells { requires: cells.requires.clone(), ..Cells::default() };
            assert!(*cells != all, "{}: belongs into `requires`: {all:?}", protocol.name);
        }
    }
}

/// A model or column of a protocol's tables that no cell speaks of would bind nothing to its name.
#[test]
fn cells_name_models_and_columns_that_are_published() {
    let all = Published::embedded();
    for protocol in &all.protocols {
        let tables: Vec<_> = all.tables.iter().filter(|t| t.protocol == protocol.name).collect();
        for cells in &protocol.cells {
            for column in &cells.columns {
                let known = tables.iter().any(|table| table.columns.contains(column));
                assert!(known, "{}: column {column}", protocol.name);
            }
            for section in &cells.sections {
                let known = tables.iter().any(|table| table.section.as_ref() == Some(section));
                assert!(known, "{}: section {section}", protocol.name);
            }
        }
        let reachable = protocol.out_of_reach.is_none();
        for model in tables.iter().flat_map(|table| table.models()).filter(|_| reachable) {
            let named = protocol.cells.iter().any(|cells| cells.models.contains(model));
            assert!(named, "{}: nothing holds a line called {model} to anything", protocol.name);
        }
    }
}
