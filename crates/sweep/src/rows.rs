//! `rows.csv`: a line for every run that ended, whole or not at all.
//!
//! Whoever writes holds the lock of `.rows.lock`, and writes a new file that takes the old one's
//! name: no cut leaves a part of a line here. A last line without its end, as a copy that broke off
//! or an editor leaves it, is a row if it has all columns; else whoever writes next removes it.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use serde_json::Value as Json;

use crate::{Plan, SweepError};

/// Keys of a summary about a run as a whole; its metrics follow, by their own names.
const SUMMARY: [&str; 11] = [
    "seed",
    "device",
    "path",
    "commit",
    "parameters",
    "state_bytes",
    "steps",
    "tokens",
    "tokens_per_second",
    "wall_seconds",
    "score_name",
];

/// Bytes of a column's name.
const LONGEST_NAME: usize = 1000;

/// A failed run's `status`. It has no metrics, and says why in `error`.
pub const FAILED: &str = "failed";

/// A run that ended: columns and their values, in order. An empty value is none.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Row(Vec<(String, String)>);

impl Row {
    /// Text of a column; empty if there is none.
    pub fn text(&self, column: &str) -> &str {
        self.0.iter().find(|(name, _)| name == column).map_or("", |(_, value)| value)
    }

    /// The number in a column, if there is one.
    pub fn number(&self, column: &str) -> Option<f64> {
        self.text(column).parse().ok().filter(|value: &f64| value.is_finite())
    }

    /// The run's id.
    pub fn id(&self) -> &str {
        self.text("run")
    }

    /// Whether the run failed.
    pub fn failed(&self) -> bool {
        self.text("status") == FAILED
    }

    /// The columns of its metrics, `split/..`, with their values.
    pub fn metrics(&self) -> impl Iterator<Item = (&str, &str)> {
        let metrics = self.0.iter().filter(|(name, _)| name.contains('/'));
        metrics.map(|(name, value)| (name.as_str(), value.as_str()))
    }

    /// Puts a value in a column, on one line.
    pub fn set(&mut self, column: &str, value: impl ToString) {
        let value = value.to_string().replace(['\n', '\r'], " ");
        match self.0.iter_mut().find(|(name, _)| name == column) {
            Some((_, old)) => *old = value,
            None => self.0.push((column.into(), value)),
        }
    }

    /// Adds what a run's summary says. A number that is none, as an infinite loss, stays empty.
    pub fn add_summary(&mut self, summary: &Json) {
        for key in SUMMARY {
            self.set(key, json_text(&summary[key]));
        }
        self.set("score", json_text(&summary["score"]));
        for (name, value) in summary["metrics"].as_object().into_iter().flatten() {
            self.set(name, json_text(value));
        }
    }
}

fn json_text(value: &Json) -> String {
    match value {
        Json::Null => String::new(),
        Json::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// A folder's table of rows.
#[derive(Debug, Clone)]
pub struct RowsFile {
    path: PathBuf,
    /// Runs whose rows stand first, in this order.
    order: Vec<String>,
}

/// The rows of a file, and what had to be mended to read them.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Rows {
    /// Columns, as the first line has them.
    pub columns: Vec<String>,
    /// The rows, as they stand there.
    pub rows: Vec<Row>,
    /// The fault of the last line, for a person.
    pub repair: Option<String>,
}

/// Outcome of adding a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Added {
    /// It stands in the file now.
    New,
    /// There is one of this run already, and it stays.
    Known,
}

impl RowsFile {
    /// The table in a folder, whether or not it is there yet.
    pub fn new(folder: &Path) -> Self {
        Self::at(&folder.join("rows.csv"))
    }

    /// Has rows stand in the order of a plan's runs, whichever ends first. Rows of other runs come
    /// after them, in the order in which they were written.
    pub fn in_order_of(self, plan: &Plan) -> Self {
        Self { order: plan.runs.iter().map(|run| run.id.clone()).collect(), ..self }
    }

    /// A table by its own path.
    pub(crate) fn at(path: &Path) -> Self {
        Self { path: path.into(), order: vec![] }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Reads all rows, and mends the last line where that is needed.
    /// # Errors
    /// [`SweepError::Rows`] names a line that no cut explains.
    pub fn load(&self) -> Result<Rows, SweepError> {
        let _lock = self.lock()?;
        let rows = self.view()?;
        if rows.repair.is_some() {
            self.rewrite(&rows)?;
        }
        Ok(rows)
    }

    /// Reads all rows and changes nothing.
    /// # Errors
    /// [`SweepError::Rows`] names a line that no cut explains.
    pub fn view(&self) -> Result<Rows, SweepError> {
        let bytes = match fs::read(&self.path) {
            Ok(bytes) => bytes,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Rows::default()),
            Err(e) => return Err(SweepError::io("read", &self.path)(e)),
        };
        let (lines, last) = split(&bytes);
        let mut rows = self.parse(lines)?;
        if last.is_empty() {
            return Ok(rows);
        }
        let (path, count) = (self.path.display(), rows.rows.len());
        let whole = self.parse(&[lines, last, b"\n"].concat()).ok();
        // Read and written again it is the same, or its quotes have no end.
        let is_whole = |all: &Rows| {
            let row = all.rows.last().filter(|_| all.rows.len() == count + 1);
            row.is_some_and(|row| record(&all.columns, row).strip_suffix(b"\n") == Some(last))
        };
        if let Some(all) = whole.filter(is_whole) {
            rows = all;
            let text = String::from_utf8_lossy(last);
            rows.repair = Some(format!("{path}: the last line has no end and counts: {text}"));
        } else {
            rows.repair = Some(format!(
                "{path} broke off in the middle of a line; its last {} bytes do not count, {count} \
                 rows are whole",
                last.len(),
            ));
        }
        Ok(rows)
    }

    /// Adds a row unless the run has one that did not fail. The row is on disk when this returns.
    /// # Errors
    /// [`SweepError`]; then the file is as it was.
    pub fn add(&self, row: &Row) -> Result<Added, SweepError> {
        let _lock = self.lock()?;
        let mut known = self.view()?;
        let place = known.rows.iter().position(|other| other.id() == row.id());
        if place.is_some_and(|place| !known.rows[place].failed()) {
            return Ok(Added::Known);
        }
        widen(&mut known.columns, row);
        match place {
            Some(place) => known.rows[place] = row.clone(),
            None => known.rows.push(row.clone()),
        }
        let last = self.order.len();
        let place = |row: &Row| self.order.iter().position(|id| id == row.id()).unwrap_or(last);
        known.rows.sort_by_cached_key(place);
        self.rewrite(&known)?;
        Ok(Added::New)
    }

    fn lock(&self) -> Result<File, SweepError> {
        let path = self.path.with_file_name(".rows.lock");
        let error = || SweepError::io("lock", &path);
        let options = OpenOptions::new().create(true).append(true).open(&path);
        let file = options.map_err(error())?;
        file.lock().map_err(error())?;
        Ok(file)
    }

    fn parse(&self, bytes: &[u8]) -> Result<Rows, SweepError> {
        let wrong =
            |line: usize, why: String| SweepError::Rows { path: self.path.clone(), line, why };
        let mut reader =
            csv::ReaderBuilder::new().has_headers(false).flexible(true).from_reader(bytes);
        let mut rows = Rows::default();
        for (i, record) in reader.records().enumerate() {
            let record = record.map_err(|e| wrong(i + 1, e.to_string()))?;
            let values: Vec<String> = record.iter().map(str::to_string).collect();
            if i == 0 {
                check_header(&values).map_err(|why| wrong(1, why))?;
                rows.columns = values;
                continue;
            }
            if values.len() != rows.columns.len() {
                let (have, want) = (values.len(), rows.columns.len());
                let why =
                    format!("{have} values for {want} columns; delete the line to repeat its run");
                return Err(wrong(i + 1, why));
            }
            let row = Row(rows.columns.iter().cloned().zip(values).collect());
            if rows.rows.iter().any(|other| other.id() == row.id()) {
                let why = format!("run {} is there twice; delete one of its lines", row.id());
                return Err(wrong(i + 1, why));
            }
            rows.rows.push(row);
        }
        Ok(rows)
    }

    fn rewrite(&self, rows: &Rows) -> Result<(), SweepError> {
        let mut text = match rows.columns.is_empty() {
            true => vec![],
            false => header(&rows.columns),
        };
        for row in &rows.rows {
            text.extend(record(&rows.columns, row));
        }
        replace(&self.path, &text)
    }
}

/// Writes a file under another name and renames it.
pub(crate) fn replace(path: &Path, bytes: &[u8]) -> Result<(), SweepError> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let draft = path.with_file_name(format!(".{name}.unfinished"));
    let written = File::create(&draft).and_then(|mut file| {
        file.write_all(bytes)?;
        file.sync_all()
    });
    written.and_then(|()| fs::rename(&draft, path)).map_err(SweepError::io("write", path))
}

fn check_header(columns: &[String]) -> Result<(), String> {
    if !columns.iter().any(|column| column == "run") {
        return Err("there is no column `run`; this is no table of a sweep's rows".into());
    }
    // Every row names its columns: names without bounds would be memory without bounds.
    if let Some(long) = columns.iter().find(|column| column.len() > LONGEST_NAME) {
        let length = long.len();
        return Err(format!(
            "a column's name has {length} bytes; it has to have {LONGEST_NAME} at most"
        ));
    }
    let twice = columns.iter().enumerate().find(|(i, column)| columns[..*i].contains(column));
    twice.map_or(Ok(()), |(_, column)| Err(format!("the column `{column}` is there twice")))
}

/// Whole lines, and what comes after them.
fn split(bytes: &[u8]) -> (&[u8], &[u8]) {
    bytes.split_at(bytes.iter().rposition(|&byte| byte == b'\n').map_or(0, |end| end + 1))
}

/// Adds the columns that a row brings.
fn widen(columns: &mut Vec<String>, row: &Row) {
    for (name, _) in &row.0 {
        if !columns.contains(name) {
            columns.push(name.clone());
        }
    }
}

fn header(columns: &[String]) -> Vec<u8> {
    line(columns.iter().map(String::as_str))
}

fn record(columns: &[String], row: &Row) -> Vec<u8> {
    line(columns.iter().map(|column| row.text(column)))
}

/// Values with commas between, quoted where they have to be. No value has a line's end within.
fn line<'a>(values: impl Iterator<Item = &'a str>) -> Vec<u8> {
    let mut writer = csv::Writer::from_writer(vec![]);
    let written = writer.write_record(values);
    debug_assert!(written.is_ok(), "a list takes every byte");
    writer.into_inner().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use tempfile::TempDir;

    fn row(id: &str, values: &[(&str, &str)]) -> Row {
        let mut row = Row::default();
        row.set("run", id);
        row.set("status", "completed");
        values.iter().for_each(|(column, value)| row.set(column, value));
        row
    }

    fn folder(rows: &[Row]) -> (TempDir, RowsFile) {
        let folder = tempfile::tempdir().unwrap();
        let file = RowsFile::new(folder.path());
        rows.iter().for_each(|row| assert_eq!(file.add(row).unwrap(), Added::New));
        (folder, file)
    }

    fn text(file: &RowsFile) -> String {
        fs::read_to_string(file.path()).unwrap()
    }

    #[test]
    fn a_new_metric_widens_the_table_and_leaves_older_rows_empty_there() {
        let (_folder, file) = folder(&[row("a", &[("test/x", "1")]), row("b", &[("test/y", "2")])]);
        assert_eq!(text(&file), "run,status,test/x,test/y\na,completed,1,\nb,completed,,2\n");
    }

    #[test]
    fn any_text_comes_back_as_one_line() {
        let wild = "a \"b\", c\nd\re";
        let (_folder, file) = folder(&[row("a", &[("error", wild)]), row("b", &[("error", "x")])]);
        assert_eq!(text(&file).lines().count(), 3);
        assert_eq!(file.load().unwrap().rows[0].text("error"), "a \"b\", c d e");
    }

    #[test]
    fn a_file_cut_at_any_byte_keeps_every_whole_row_and_says_what_it_lost() {
        let rows = [row("a", &[("error", "x, \"y\"")]), row("b", &[]), row("c", &[("error", "z")])];
        let (_folder, file) = folder(&rows);
        let whole = fs::read(file.path()).unwrap();
        for length in 0..whole.len() {
            fs::write(file.path(), &whole[..length]).unwrap();
            let (lines, last) = split(&whole[..length]);
            let read = file.load().unwrap();
            let lines = lines.iter().filter(|&&byte| byte == b'\n').count();
            // Where all columns are there, nobody can tell that the last value is not whole.
            let counts = lines > 0 && last.iter().filter(|&&byte| byte == b',').count() >= 2;
            let wanted = lines.saturating_sub(1);
            let wanted = wanted..=wanted + usize::from(counts);
            assert!(wanted.contains(&read.rows.len()), "cut at {length}: {}", read.rows.len());
            if whole[length..].starts_with(b"\n") && lines > 0 {
                assert_eq!(read.rows.len(), lines, "cut at {length}");
            }
            assert_eq!(read.repair.is_none(), last.is_empty(), "cut at {length}");
            assert_eq!(file.load().unwrap().repair, None, "repaired once, cut at {length}");
            for row in &rows {
                file.add(row).unwrap();
            }
            assert_eq!(file.load().unwrap().rows.len(), 3, "cut at {length}");
        }
    }

    #[test]
    fn a_last_row_that_lacks_its_end_alone_is_kept_and_gets_it() {
        let (_folder, file) =
            folder(&[row("a", &[("error", "x, y")]), row("b", &[("test/x", "1")])]);
        let whole = text(&file);
        fs::write(file.path(), whole.trim_end()).unwrap();
        let read = file.view().unwrap();
        assert_eq!((read.rows.len(), text(&file).as_str()), (2, whole.trim_end()));
        assert!(read.repair.is_some_and(|said| said.contains("b,completed,,1")));
        file.load().unwrap();
        assert_eq!(text(&file), whole);
    }

    #[test]
    fn a_file_is_whole_at_every_moment_in_which_a_row_is_added() {
        let (folder, file) = folder(&[row("a", &[])]);
        let add = |i: usize| file.add(&row(&format!("r{i}"), &[("test/x", "0.25")])).unwrap();
        std::thread::scope(|scope| {
            let adding = scope.spawn(|| (0..60).for_each(|i| assert_eq!(add(i), Added::New)));
            while !adding.is_finished() {
                assert_eq!(file.view().unwrap().repair, None);
            }
        });
        assert_eq!(file.load().unwrap().rows.len(), 61);
        let left = fs::read_dir(folder.path()).unwrap().count();
        assert_eq!(left, 2, "the table and its lock");
    }

    #[test]
    fn a_look_at_a_cut_file_leaves_it_as_it_is() {
        let (_folder, file) = folder(&[row("a", &[])]);
        fs::write(file.path(), "run,status\na").unwrap();
        assert!(file.view().unwrap().rows.is_empty());
        assert_eq!(text(&file), "run,status\na");
    }

    #[test]
    fn a_run_has_one_row_and_a_failed_one_gives_way() {
        let (_folder, file) = folder(&[row("a", &[("status", FAILED)]), row("b", &[])]);
        assert_eq!(file.add(&row("a", &[])).unwrap(), Added::New);
        assert_eq!(file.add(&row("a", &[("status", FAILED)])).unwrap(), Added::Known);
        assert_eq!(text(&file), "run,status\na,completed\nb,completed\n");
    }

    #[test]
    fn what_no_cut_explains_is_refused_by_its_line() {
        let (_folder, file) = folder(&[row("a", &[])]);
        for (text, wanted) in [
            ("run,status\na,completed,3\n", "line 2: 3 values for 2 columns"),
            ("run,status\na,x\na,y\n", "line 3: run a is there twice"),
            ("step,loss\n1,2\n", "no column `run`"),
            ("run,status,status\n", "the column `status` is there twice"),
            ("run\n\u{0}\n\u{0},\n", "line 3"),
        ] {
            fs::write(file.path(), text).unwrap();
            let message = file.load().unwrap_err().to_string();
            assert!(message.contains(wanted), "{message}");
        }
    }

    #[test]
    fn a_summary_fills_its_columns_and_a_number_that_is_none_stays_empty() {
        let mut row = Row::default();
        row.add_summary(&json!({
            "seed": 3, "steps": 10, "score": null, "score_name": "accuracy",
            "metrics": { "test/loss": 0.5, "test/accuracy": null },
        }));
        assert_eq!((row.number("seed"), row.number("test/loss")), (Some(3.0), Some(0.5)));
        assert_eq!(
            (row.text("device"), row.text("test/accuracy"), row.text("score")),
            ("", "", "")
        );
        assert_eq!(row.metrics().count(), 2);
    }
}
