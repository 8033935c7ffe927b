//! A run's config as a file: read, with values put in place of its own.

use crate::base::Source;
use crate::bounds;
use crate::config::RunConfig;
use crate::config_error::{ConfigError, no_text, parse_error};
use serde::Deserialize;
use std::path::Path;
use toml::de::DeTable;
use toml::{Table, Value};

impl RunConfig {
    /// Reads a file, puts `overrides` (`key.of.table=value`) in place, and checks the whole.
    /// # Errors
    /// [`ConfigError`] names the file, the key, or the override, and what would do.
    pub fn read(path: &Path, overrides: &[String]) -> Result<Self, ConfigError> {
        let (text, table) = read_table(path)?;
        // From the text, of which the error shows the line.
        match overrides.is_empty() && !starts_elsewhere(&table) {
            true => toml::from_str::<Self>(&text)
                .map_err(|e| ConfigError::Parse { path: path.into(), why: parse_error(&e) })?
                .shaped(path, &table)?
                .checked(),
            false => Self::from_table(path, table, overrides),
        }
    }

    /// As [`read`](Self::read), for a run that goes on in its folder below `output`: the folder remembers
    /// the model that training started from, wherever that is now.
    /// # Errors
    /// As [`read`](Self::read).
    pub fn read_to_resume(
        path: &Path,
        overrides: &[String],
        output: &Path,
    ) -> Result<Self, ConfigError> {
        let (_, mut table) = read_table(path)?;
        overrides.iter().try_for_each(|given| set(&mut table, given))?;
        let own = match table.get("name").and_then(Value::as_str) {
            Some(name) if !name.is_empty() => output.join(name),
            _ => output.join(path.file_stem().unwrap_or_default()),
        };
        // The overrides stand in the table already, and are named if it is wrong.
        Self::settled(path, table, overrides, Some(&own))?.checked()
    }

    /// As [`read`](Self::read), from the text of the file `path`, already parsed.
    /// # Errors
    /// As [`read`](Self::read).
    pub fn from_table(
        path: &Path,
        table: Table,
        overrides: &[String],
    ) -> Result<Self, ConfigError> {
        Self::parsed(path, table, overrides)?.checked()
    }

    /// As [`from_table`](Self::from_table), before the task is made of the files that it names.
    pub(crate) fn parsed(
        path: &Path,
        mut table: Table,
        overrides: &[String],
    ) -> Result<Self, ConfigError> {
        overrides.iter().try_for_each(|given| set(&mut table, given))?;
        Self::settled(path, table, overrides, None)
    }

    /// As [`parsed`](Self::parsed), with the overrides in place, and the model that it starts from. `own` is
    /// the folder of a run to be resumed.
    fn settled(
        path: &Path,
        mut table: Table,
        overrides: &[String],
        own: Option<&Path>,
    ) -> Result<Self, ConfigError> {
        let source = Source::take(&mut table, own)?;
        let run = decode(&table).map_err(|e| wrong(path, overrides, &e))?;
        let mut run = run.shaped(path, &table)?;
        if let Some(source) = source {
            source.settle(&mut run, &table)?;
        }
        Ok(run)
    }

    /// With a name, and nothing in the wrong place of `given`, which it was made of.
    fn shaped(mut self, path: &Path, given: &Table) -> Result<Self, ConfigError> {
        if self.name.is_empty() {
            self.name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        }
        bounds::check_task(&self.task)?;
        let made = Value::try_from(&self).expect("a run config is a table");
        check_shape("", &Value::Table(given.clone()), &made)?;
        Ok(self)
    }
}

fn read_table(path: &Path) -> Result<(String, Table), ConfigError> {
    let bytes =
        std::fs::read(path).map_err(|source| ConfigError::Read { path: path.into(), source })?;
    let wrong = |why: String| ConfigError::Parse { path: path.into(), why };
    let text = String::from_utf8(bytes).map_err(|e| wrong(no_text(&e)))?;
    let table = toml::from_str::<Table>(&text).map_err(|e| wrong(parse_error(&e)))?;
    Ok((text, table))
}

/// A run config of a table, by way of its text: a table's own deserializer would be a second copy of the code
/// that reads every config. An error names keys, since lines of that text are nobody's.
fn decode(table: &Table) -> Result<RunConfig, toml::de::Error> {
    let text = toml::to_string(table).expect("a table is TOML");
    RunConfig::deserialize(toml::Deserializer::from(DeTable::parse(&text)?))
}

/// Whether the model is that of another run.
fn starts_elsewhere(table: &Table) -> bool {
    table.get("model").is_some_and(|model| model.get("from").is_some())
}

/// A config that does not parse, with its overrides where there are some.
fn wrong(path: &Path, overrides: &[String], e: &toml::de::Error) -> ConfigError {
    let (path, why) = (path.into(), parse_error(e));
    let overrides: Vec<String> = overrides.iter().map(|given| format!("`--set {given}`")).collect();
    match overrides.is_empty() {
        true => ConfigError::Parse { path, why },
        false => ConfigError::ParseOverrides { path, overrides: overrides.join(" "), why },
    }
}

/// Puts one `key=value` in place. The value is TOML; what is no TOML is taken as a string.
fn set(table: &mut Table, given: &str) -> Result<(), ConfigError> {
    let wrong = |want: String| ConfigError::Override { given: given.to_string(), want };
    let (key, value) = given.split_once('=').ok_or_else(|| {
        wrong("it has to be key=value, for instance optimizer.learning_rate=1e-3".into())
    })?;
    let value = parse_value(value.trim()).map_err(&wrong)?;
    let keys: Vec<&str> = key.trim().split('.').collect();
    let Some((last, parents)) = keys.split_last() else { unreachable!("split gives one at least") };
    let mut root = Value::Table(std::mem::take(table));
    let mut at = &mut root;
    for key in parents {
        at = match at {
            Value::Table(table) => table.entry(*key).or_insert_with(|| Value::Table(Table::new())),
            Value::Array(list) => element(list, key).map_err(&wrong)?,
            _ => return Err(wrong(format!("`{key}` stands below a plain value"))),
        };
    }
    match at {
        Value::Table(table) => {
            table.insert((*last).to_string(), value);
        }
        Value::Array(list) => *element(list, last).map_err(&wrong)? = value,
        _ => return Err(wrong(format!("`{last}` stands below a plain value"))),
    }
    if let Value::Table(changed) = root {
        *table = changed;
    }
    Ok(())
}

fn element<'a>(list: &'a mut [Value], index: &str) -> Result<&'a mut Value, String> {
    let length = list.len();
    index
        .parse::<usize>()
        .ok()
        .and_then(|i| list.get_mut(i))
        .ok_or_else(|| format!("`{index}` has to be a place in a list of {length}, from 0"))
}

fn parse_value(text: &str) -> Result<Value, String> {
    match toml::from_str::<Table>(&format!("value = {text}")) {
        Ok(table) if table.len() > 1 => {
            Err("it has to be one value; --set once more is for another key".into())
        }
        Ok(mut table) => Ok(table.remove("value").unwrap_or_else(|| text.into())),
        Err(_) => Ok(text.into()),
    }
}

/// Refuses lists of values in place of tables, which name their values.
fn check_shape(key: &str, given: &Value, made: &Value) -> Result<(), ConfigError> {
    let below = |name: &str| match key {
        "" => name.to_string(),
        key => format!("{key}.{name}"),
    };
    match (given, made) {
        (Value::Array(_), Value::Table(_)) => {
            Err(ConfigError::value(key, given, "a table: { key = value }"))
        }
        (Value::Table(given), Value::Table(made)) => given
            .iter()
            .filter_map(|(name, given)| Some((name, given, made.get(name)?)))
            .try_for_each(|(name, given, made)| check_shape(&below(name), given, made)),
        (Value::Array(given), Value::Array(made)) => (0..)
            .zip(given.iter().zip(made))
            .try_for_each(|(i, (given, made))| check_shape(&format!("{key}[{i}]"), given, made)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "[task.mqar]\nvocab = 64\n\
                        train = [{ length = 16, pairs = 2, examples = 8 }]\n\
                        test = [{ length = 16, pairs = 2, examples = 8 }]\n\
                        [model]\nd_model = 8\n[[model.layers]]\nmixer.deltanet = {}\n\
                        [train]\nbatch_size = 4\nsteps = 3\n";

    fn refusal(change: &str) -> String {
        let table = toml::from_str(TEXT).unwrap();
        let run = RunConfig::from_table(Path::new("x.toml"), table, &[change.to_string()]);
        run.map(|run| run.to_toml()).unwrap_err().to_string()
    }

    #[test]
    fn a_config_that_is_no_text_is_refused_by_line() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.toml");
        std::fs::write(&path, b"seed = 3\n\n[task\xff.mqar]\n").unwrap();
        let why = RunConfig::read(&path, &[]).unwrap_err().to_string();
        assert!(why.contains("at line 3: it is no text"), "{why}");
    }

    #[test]
    fn nothing_is_taken_in_silence() {
        for (change, want) in [
            ("seed=1\nmodel.d_model=3", "it has to be one value"),
            ("name=a\nb", "`name`"),
            ("optimizer=[5.0]", "`optimizer` is [5.0]; it has to be a table"),
            ("train=[4]", "train"),
            ("task.mqar.test=[[16, 2, 8]]", "`task.mqar.test[0]` is [16, 2, 8]"),
            ("model.layers.0.mixer={ deltanet = [2] }", "`model.layers[0].mixer.deltanet` is [2]"),
        ] {
            let why = refusal(change);
            assert!(why.contains(want), "{change:?}: {why}");
        }
    }

    #[test]
    fn a_wrong_override_is_answered_by_its_keys_and_not_by_a_line() {
        let why = refusal("train.max_steps=3");
        assert!(why.contains("unknown field `max_steps`") && why.contains("in `train`"), "{why}");
        assert!(why.contains("--set train.max_steps=3") && !why.contains("line"), "{why}");
    }

    #[test]
    fn an_override_gives_what_the_same_text_gives() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.toml");
        // A key of the top behind tables, and numbers that are not short in every notation.
        for (key, value) in [
            ("seed", "7"),
            ("optimizer.learning_rate", "3.16e-2"),
            ("optimizer.epsilon", "1e-30"),
            ("optimizer.weight_decay", "0.30000000000000004"),
            ("task.mqar.train", "[{ length = 16, pairs = 3, examples = 18_000_000_000 }]"),
        ] {
            let table: Table = toml::from_str(TEXT).unwrap();
            let run = RunConfig::from_table(&path, table, &[format!("{key}={value}")]).unwrap();
            let (tables, last) = key.rsplit_once('.').unwrap_or(("", key));
            let line = format!("{last} = {value}\n");
            let text = match (tables, last) {
                ("", _) => format!("{line}{TEXT}"),
                ("task.mqar", _) => {
                    TEXT.replace("train = [{ length = 16, pairs = 2, examples = 8 }]\n", &line)
                }
                _ => format!("{TEXT}[{tables}]\n{line}"),
            };
            std::fs::write(&path, text).unwrap();
            assert_eq!(run, RunConfig::read(&path, &[]).unwrap(), "{key}");
        }
    }

    #[test]
    fn a_name_where_a_table_belongs_is_answered_with_the_table() {
        let why = refusal("model.layers.0.mixer=deltanet");
        assert!(why.contains("mixer.deltanet = {}") && !why.contains("variant"), "{why}");
        let why = refusal("model.layers.0.mixer={}");
        assert!(why.contains("one name has to stand here") && !why.contains("element,"), "{why}");
    }
}
