//! Dimensions of a grid: keys and axes, each with its values.

use toml::{Table, Value};

use crate::SweepError;
use crate::state_size::PUBLISHED_BYTES;
use crate::values::value_text;

/// Columns of the rows that no axis can be called.
const RESERVED: [&str; 19] = [
    "run",
    "base",
    "protocol",
    "status",
    "error",
    "device",
    "path",
    "commit",
    "parameters",
    "state_bytes",
    PUBLISHED_BYTES,
    "steps",
    "tokens",
    "tokens_per_second",
    "wall_seconds",
    "score_name",
    "score",
    "seconds",
    "config",
];

/// A key of the grid, or an axis, with its values in order.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Dimension {
    /// The column of the rows.
    pub(crate) name: String,
    pub(crate) choices: Vec<Choice>,
}

impl Dimension {
    /// Its own column, and those of its labels.
    fn columns(&self) -> impl Iterator<Item = &String> {
        self.choices[0].settings.iter().map(|(column, _)| column)
    }
}

/// One value of a dimension.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Choice {
    /// As the rows have it: the dimension's column first, then those of labels.
    pub(crate) settings: Vec<(String, String)>,
    /// Values in place of the base's.
    pub(crate) overrides: Vec<(String, Value)>,
}

/// Adds the grid's keys. `a.b = [..]` and `"a.b" = [..]` are one thing to people.
pub(crate) fn flatten(
    above: &str,
    table: &Table,
    to: &mut Vec<Dimension>,
) -> Result<(), SweepError> {
    for (key, value) in table {
        let name = if above.is_empty() { key.clone() } else { format!("{above}.{key}") };
        match value {
            Value::Table(inner) => flatten(&name, inner, to)?,
            Value::Array(list) if !list.is_empty() => {
                let choice = |value: &Value| Choice {
                    settings: vec![(name.clone(), value_text(value))],
                    overrides: vec![(name.clone(), value.clone())],
                };
                let choices = list.iter().map(choice).collect();
                to.push(Dimension { name, choices });
            }
            Value::Array(_) => {
                let want = "a list of one value or more";
                return Err(SweepError::value(format!("grid.{name}"), "empty", want));
            }
            other => {
                let want = "a list of one value or more";
                return Err(SweepError::value(format!("grid.{name}"), other, want));
            }
        }
    }
    Ok(())
}

pub(crate) fn check_names(dimensions: &[Dimension]) -> Result<(), SweepError> {
    let mut seen: Vec<&String> = vec![];
    for dimension in dimensions {
        for name in dimension.columns() {
            if RESERVED.contains(&name.as_str()) || name.contains('/') || name.is_empty() {
                let want = "a name that is no column of the rows, and without `/`";
                return Err(SweepError::value("variants.axis", format!("{name:?}"), want));
            }
            if seen.contains(&name) {
                let want = "one key of the grid, one axis or one label";
                return Err(SweepError::value(name, "given twice", want));
            }
            seen.push(name);
        }
        check_choices(dimension)?;
    }
    Ok(())
}

/// Refuses a value that is there twice, and a label that only some variants of an axis have.
fn check_choices(dimension: &Dimension) -> Result<(), SweepError> {
    let columns: Vec<&String> = dimension.columns().collect();
    for (i, choice) in dimension.choices.iter().enumerate() {
        let (name, value) = &choice.settings[0];
        if dimension.choices[..i].iter().any(|other| other.settings[0].1 == *value) {
            return Err(SweepError::value(
                name,
                format!("{value} twice"),
                "a list without repeats",
            ));
        }
        if !choice.settings.iter().map(|(column, _)| column).eq(columns.iter().copied()) {
            let got = format!("other labels at `{value}` than at the first");
            let want = "variants with the same labels in the same order";
            return Err(SweepError::value(format!("variants.{name}"), got, want));
        }
    }
    Ok(())
}

/// Refuses two dimensions that set one key: which of them would hold is nobody's business to guess.
pub(crate) fn check_conflicts(dimensions: &[Dimension]) -> Result<(), SweepError> {
    let keys = |dimension: &Dimension| -> Vec<String> {
        let overrides = dimension.choices.iter().flat_map(|choice| &choice.overrides);
        overrides.map(|(key, _)| key.clone()).collect()
    };
    let within = |a: &str, b: &str| a == b || a.starts_with(&format!("{b}."));
    for (i, dimension) in dimensions.iter().enumerate() {
        for (other, a) in
            dimensions[..i].iter().flat_map(|o| keys(dimension).into_iter().map(move |a| (o, a)))
        {
            if keys(other).iter().any(|b| within(&a, b) || within(b, &a)) {
                let got = format!("set by `{}` and by `{}`", other.name, dimension.name);
                return Err(SweepError::value(a, got, "set by one of them"));
            }
        }
    }
    Ok(())
}

pub(crate) fn known(key: &str, name: &str, dimensions: &[Dimension]) -> Result<(), SweepError> {
    let names: Vec<&str> =
        dimensions.iter().flat_map(Dimension::columns).map(String::as_str).collect();
    match names.contains(&name) {
        true => Ok(()),
        false => {
            let want = format!("a key of the grid, an axis or a label: {}", names.join(", "));
            Err(SweepError::value(key, name, want))
        }
    }
}
