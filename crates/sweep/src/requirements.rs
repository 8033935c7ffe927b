//! Requirements on a run's config, by dotted keys.
//! ```text
//! model.d_model                   a key; numbers are places in a list
//! model.layers.#                  how many entries a list or table has
//! model.layers.*.mixer.*.heads    each of these: all have to be as wanted
//!
//! wanted        accepted
//! 64            64; numbers may differ in the third digit
//! [64, 128]     either
//! [[3, 40]]     the list [3, 40]; tables and lists within are compared whole
//! "any"         whatever stands there, and not nothing
//! "none"        nothing stands there
//! ```
//! `model.layers` is looked at with every repeat and group written out, so that a place in it is a
//! layer. A resolved config leaves some keys out at their defaults: `absent` says what these are.

use toml::{Table, Value};

use crate::values::value_text;

/// A key that is not as wanted.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Departure {
    /// As the protocol has it.
    pub(crate) key: String,
    pub(crate) got: String,
    pub(crate) want: String,
}

/// A run's config, ready for requirements.
#[derive(Debug, Clone)]
pub(crate) struct View<'a> {
    config: Value,
    absent: &'a Table,
}

impl<'a> View<'a> {
    /// `absent` has the defaults of keys that a resolved config leaves out, by patterns with `*`.
    pub(crate) fn new(config: &Table, absent: &'a Table) -> Self {
        let mut config = config.clone();
        if let Some(Value::Table(model)) = config.get_mut("model")
            && let Some(Value::Array(layers)) = model.get_mut("layers")
        {
            *layers = written_out(layers);
        }
        Self { config: Value::Table(config), absent }
    }

    /// The first place that is not as wanted.
    pub(crate) fn departure(&self, key: &str, want: &Value) -> Option<Departure> {
        let mut places = vec![];
        find(Some(&self.config), &parts(key), String::new(), &mut places);
        let wrong = places.into_iter().find_map(|(path, value)| {
            let value = value.or_else(|| self.default(&path));
            (!accepts(want, value.as_ref())).then_some(value)
        })?;
        let got = wrong.map_or_else(|| "none".into(), |value| value_text(&value));
        Some(Departure { key: key.into(), got, want: value_text(want) })
    }

    /// Whether all of these are as wanted.
    pub(crate) fn fits(&self, wanted: &Table) -> bool {
        wanted.iter().all(|(key, want)| self.departure(key, want).is_none())
    }

    /// The names of all mixers.
    pub(crate) fn mixers(&self) -> Vec<String> {
        let mut places = vec![];
        find(Some(&self.config), &["model", "layers", "*", "mixer"], String::new(), &mut places);
        let tables = places.into_iter().filter_map(|(_, value)| match value {
            Some(Value::Table(mixer)) => Some(mixer),
            _ => None,
        });
        tables.flat_map(|mixer| mixer.keys().cloned().collect::<Vec<_>>()).collect()
    }

    fn default(&self, path: &str) -> Option<Value> {
        let path = parts(path);
        let fits = |pattern: &str| {
            let pattern = parts(pattern);
            let fits = |(pattern, part): (&&str, &&str)| *pattern == "*" || pattern == part;
            pattern.len() == path.len() && pattern.iter().zip(&path).all(fits)
        };
        self.absent.iter().find(|(pattern, _)| fits(pattern)).map(|(_, value)| value.clone())
    }
}

fn parts(key: &str) -> Vec<&str> {
    key.split('.').collect()
}

/// Every place that the parts of a key lead to, with what stands there.
fn find(
    value: Option<&Value>,
    parts: &[&str],
    path: String,
    to: &mut Vec<(String, Option<Value>)>,
) {
    let Some((part, rest)) = parts.split_first() else {
        return to.push((path, value.cloned()));
    };
    let below = |part: &str| if path.is_empty() { part.into() } else { format!("{path}.{part}") };
    match (*part, value) {
        ("*", Some(Value::Array(list))) if !list.is_empty() => {
            for (i, value) in list.iter().enumerate() {
                find(Some(value), rest, below(&i.to_string()), to);
            }
        }
        ("*", Some(Value::Table(table))) if !table.is_empty() => {
            table.iter().for_each(|(key, value)| find(Some(value), rest, below(key), to));
        }
        ("#", Some(Value::Array(list))) => count(list.len(), below(part), to),
        ("#", Some(Value::Table(table))) => count(table.len(), below(part), to),
        (part, Some(Value::Table(table))) => find(table.get(part), rest, below(part), to),
        (part, Some(Value::Array(list))) => {
            let value = part.parse().ok().and_then(|place: usize| list.get(place));
            find(value, rest, below(part), to);
        }
        (part, _) => find(None, rest, below(part), to),
    }
}

fn count(entries: usize, path: String, to: &mut Vec<(String, Option<Value>)>) {
    to.push((path, i64::try_from(entries).ok().map(Value::Integer)));
}

/// A model's layers one by one.
pub(crate) fn layers(config: &Table) -> Vec<Value> {
    match config.get("model").and_then(|model| model.get("layers")) {
        Some(Value::Array(layers)) => written_out(layers),
        _ => vec![],
    }
}

/// Layers one by one: those of groups in their place, and repeated ones repeated.
fn written_out(layers: &[Value]) -> Vec<Value> {
    let each = |layer: &Value| {
        let Value::Table(layer) = layer else { return vec![layer.clone()] };
        let mut layer = layer.clone();
        let repeat = layer.remove("repeat").and_then(|n| n.as_integer()).unwrap_or(1);
        let once = match layer.get("group") {
            Some(Value::Array(group)) => written_out(group),
            _ => vec![Value::Table(layer)],
        };
        std::iter::repeat_n(once, usize::try_from(repeat).unwrap_or(0))
            .flatten()
            .collect::<Vec<_>>()
    };
    layers.iter().flat_map(each).collect()
}

/// Whether a value may stand where `want` is wanted; no value is what stands where nothing does.
fn accepts(want: &Value, got: Option<&Value>) -> bool {
    match (want, got) {
        (Value::Array(list), got) => list.iter().any(|want| match want {
            Value::Array(_) => got.is_some_and(|got| same(want, got)),
            want => accepts(want, got),
        }),
        (Value::String(text), got) if text == "any" => got.is_some(),
        (Value::String(text), None) => text == "none",
        (want, Some(got)) => same(want, got),
        (_, None) => false,
    }
}

/// Whether two values are one to a person: 4.64e-4 and 10^(-10/3) are one learning rate.
pub(crate) fn same(one: &Value, other: &Value) -> bool {
    match (one, other, number(one), number(other)) {
        (_, _, Some(one), Some(other)) => (one - other).abs() <= 2e-3 * one.abs(),
        (Value::Array(one), Value::Array(other), ..) => {
            one.len() == other.len() && one.iter().zip(other).all(|(one, other)| same(one, other))
        }
        (Value::Table(one), Value::Table(other), ..) => {
            let known =
                |(key, value): (&String, &Value)| other.get(key).is_some_and(|o| same(value, o));
            one.len() == other.len() && one.iter().all(known)
        }
        _ => one == other,
    }
}

pub(crate) fn number(value: &Value) -> Option<f64> {
    value.as_float().or(value.as_integer().map(|n| n as f64))
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONFIG: &str = r#"
        [model]
        d_model = 64
        [[model.layers]]
        mixer.base_conv = { conv_size = 3 }
        [[model.layers]]
        repeat = 2
        group = [{ repeat = 1, mixer = { mamba = { heads = 2 } } }, { mixer = { gla = { heads = 4 } } }]
        [task.parity]
        train = [{ sizes = [3, 40], examples = 10 }]
    "#;

    /// Whether `key = want` holds in the config.
    fn holds(key: &str, want: &str) -> bool {
        let config: Table = toml::from_str(CONFIG).unwrap();
        let absent: Table =
            toml::from_str("\"model.layers.*.mixer.gla.gate\" = true\n\"train.clip\" = 0.5")
                .unwrap();
        let want: Table = toml::from_str(&format!("want = {want}")).unwrap();
        View::new(&config, &absent).departure(key, &want["want"]).is_none()
    }

    #[test]
    fn a_place_in_the_layers_is_a_layer() {
        assert!(holds("model.layers.#", "5"));
        assert!(holds("model.layers.0.mixer.base_conv.conv_size", "3"));
        assert!(holds("model.layers.1.mixer.mamba.heads", "2"));
        assert!(holds("model.layers.4.mixer.gla.heads", "4"));
        assert!(!holds("model.layers.3.mixer.gla.heads", "4"));
        assert!(!holds("model.layers.*.mixer.*.heads", "[2, 4]"), "the convolution has none");
        assert!(holds("model.layers.*.mixer.*.heads", "[2, 4, \"none\"]"));
        let config: Table = toml::from_str(CONFIG).unwrap();
        let mixers = View::new(&config, &Table::new()).mixers();
        assert_eq!(mixers, ["base_conv", "mamba", "gla", "mamba", "gla"]);
    }

    #[test]
    fn a_list_is_a_choice_and_a_list_in_it_is_a_list() {
        assert!(holds("model.d_model", "[32, 64]") && !holds("model.d_model", "[32, 128]"));
        assert!(holds("task.parity.train.0.sizes", "[[3, 40]]"));
        assert!(!holds("task.parity.train.0.sizes", "[3, 40]"));
        assert!(holds("task.parity.train", "[[{ sizes = [3, 40], examples = 10 }]]"));
        assert!(!holds("task.parity.train", "[[{ sizes = [3, 41], examples = 10 }]]"));
        assert!(!holds("task.parity.train", "[[{ sizes = [3, 40], examples = 10, more = 1 }]]"));
    }

    #[test]
    fn a_key_that_is_left_out_has_its_default_or_is_nothing() {
        assert!(holds("model.layers.2.mixer.gla.gate", "true"));
        assert!(!holds("model.layers.1.mixer.mamba.gate", "true"));
        assert!(holds("train.clip", "0.5") && !holds("train.clip", "\"none\""));
        assert!(holds("train.epochs", "\"none\"") && !holds("train.epochs", "\"any\""));
        assert!(holds("task.parity", "\"any\"") && !holds("task.mqar", "\"any\""));
        assert!(!holds("model.layers.9.mixer.gla.heads", "4"));
    }

    #[test]
    fn a_rate_written_with_more_digits_is_the_same_rate() {
        let list = Value::Array(vec![Value::Float(1e-4), Value::Float(4.64e-4)]);
        assert!(accepts(&list, Some(&Value::Float(10f64.powf(-10.0 / 3.0)))));
        assert!(accepts(&Value::Integer(0), Some(&Value::Float(0.0))));
        assert!(!accepts(&list, Some(&Value::Float(5e-4))));
        assert!(!accepts(&Value::String("fixed".into()), Some(&Value::String("fresh".into()))));
    }
}
