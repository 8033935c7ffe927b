use super::*;

fn row(metrics: &[(&str, f64)]) -> Row {
    let mut row = Row::default();
    metrics.iter().for_each(|(name, value)| row.set(name, value));
    row
}

#[test]
fn a_star_stands_for_one_part_of_a_name_and_never_for_a_set() {
    let row = row(&[
        ("test/sequence_accuracy_32", 1.0),
        ("test/sequence_accuracy_512", 0.5),
        ("test/S5/sequence_accuracy_32", 0.2),
        ("test/sequence_accuracy_", 0.1),
        ("test/1024/exact_depth_00_10", 0.75),
    ]);
    let found = |pattern| matches(&row, pattern);
    let lengths = [(vec!["32".to_string()], 1.0), (vec!["512".into()], 0.5)];
    assert_eq!(found("test/sequence_accuracy_*"), lengths);
    let places = [(vec!["1024".to_string(), "00_10".into()], 0.75)];
    assert_eq!(found("test/*/exact_depth_*"), places);
    assert_eq!(found("test/nothing_*"), []);
}
