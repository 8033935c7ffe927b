//! Settings of runs and values of configs, as rows and people have them.

use toml::{Table, Value};

/// Columns and values.
pub(crate) type Settings = Vec<(String, String)>;

/// A value as the rows have it: strings without quotes, all else as TOML.
pub(crate) fn value_text(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// The value at a dotted path; numbers are places in lists.
pub(crate) fn lookup<'a>(config: &'a Table, key: &str) -> Option<&'a Value> {
    let (first, rest) = match key.split_once('.') {
        Some((first, rest)) => (first, Some(rest)),
        None => (key, None),
    };
    let mut value = config.get(first)?;
    for part in rest.into_iter().flat_map(|rest| rest.split('.')) {
        value = match value {
            Value::Table(table) => table.get(part)?,
            Value::Array(list) => list.get(part.parse::<usize>().ok()?)?,
            _ => return None,
        };
    }
    Some(value)
}

/// `mixer = deltanet, seed = 0`.
pub(crate) fn describe(settings: &[(String, String)]) -> String {
    let parts: Vec<String> =
        settings.iter().map(|(key, value)| format!("{key} = {value}")).collect();
    if parts.is_empty() { "no changes".into() } else { parts.join(", ") }
}
