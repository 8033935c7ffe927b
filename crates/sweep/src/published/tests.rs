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
fn a_rate_written_with_more_digits_is_the_same_rate() {
    let list = Value::Array(vec![Value::Float(1e-4), Value::Float(4.64e-4)]);
    assert!(accepts(&list, &Value::Float(10f64.powf(-10.0 / 3.0))));
    assert!(accepts(&Value::Integer(0), &Value::Float(0.0)));
    assert!(!accepts(&list, &Value::Float(5e-4)));
    assert!(!accepts(&Value::String("fixed".into()), &Value::String("fresh".into())));
}
