//! TensorBoard's event files, from what a run wrote.
//!
//! ```text
//! file    records, one after another
//! record  length, u64 | masked CRC of the length, u32 | bytes | masked CRC of the bytes, u32
//! mask    ((crc >> 15) | (crc << 17)) + 0xa282ead8, of CRC-32C
//! bytes   a protocol buffer, Event: 1 wall_time, 2 step, 3 file_version, 5 summary
//!         summary: 1 value; value: 1 tag, 2 simple_value, 8 tensor, 9 metadata
//! ```
//! All little-endian. Source: TFRecord and the message definitions of tensorflow/tensorboard.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use serde_json::Value as Json;
use toml::{Table, Value};

use crate::SweepError;
use crate::config::read_toml;
use crate::rows::replace;

/// The file's name; a second writing takes the place of the first.
const NAME: &str = "events.out.tfevents.0000000000.linattn";

/// Writes a run's metrics and settings for TensorBoard into its own folder: scalars of every line
/// of `metrics.jsonl`, and `config.toml` as hyperparameters. Gives the file.
/// # Errors
/// [`SweepError`] where the folder is no run's, or cannot be written.
pub fn write_events(run_folder: &Path) -> Result<PathBuf, SweepError> {
    let path = run_folder.join("metrics.jsonl");
    let metrics = fs::read_to_string(&path).map_err(SweepError::io("read", &path))?;
    let config_path = run_folder.join("config.toml");
    let config: Table = read_toml(&config_path, "run config")?;
    let modified = fs::metadata(&config_path).and_then(|data| data.modified());
    let modified = modified.map_err(SweepError::io("read", &config_path))?;
    let began = modified.duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64());
    let mut file = record(&Message::default().double(1, began).text(3, "brain.Event:2").0);
    file.extend(record(&hyperparameters(&config, began)));
    // A line that a cut left unfinished is no metric.
    for line in metrics.lines().filter_map(|line| serde_json::from_str::<Json>(line).ok()) {
        file.extend(record(&scalars(&line, began)));
    }
    let path = run_folder.join(NAME);
    replace(&path, &file)?;
    Ok(path)
}

/// An event with every number of a line.
fn scalars(line: &Json, began: f64) -> Vec<u8> {
    let mut summary = Message::default();
    for (name, value) in line.as_object().into_iter().flatten() {
        let known = matches!(name.as_str(), "step" | "seconds");
        if let Some(value) = value.as_f64().filter(|_| !known) {
            let tag = if name.contains('/') { name.clone() } else { format!("train/{name}") };
            summary = summary.message(1, Message::default().text(1, &tag).float(2, value as f32));
        }
    }
    let seconds = line["seconds"].as_f64().unwrap_or(0.0);
    let event = Message::default().double(1, began + seconds);
    event.number(2, line["step"].as_u64().unwrap_or(0)).message(5, summary).0
}

/// An event as TensorBoard's page on hyperparameters reads it: the start of a session, with every
/// value of the config by its dotted path.
fn hyperparameters(config: &Table, began: f64) -> Vec<u8> {
    let mut values = vec![];
    leaves("", &Value::Table(config.clone()), &mut values);
    let mut session = Message::default();
    for (key, value) in values {
        let value = match value {
            Value::Integer(n) => Message::default().double(2, n as f64),
            Value::Float(x) => Message::default().double(2, x),
            Value::Boolean(yes) => Message::default().number(4, u64::from(yes)),
            other => Message::default().text(3, &crate::values::value_text(&other)),
        };
        session = session.message(1, Message::default().text(1, &key).message(2, value));
    }
    let session = session.double(5, began);
    let plugin = Message::default().number(1, 0).message(3, session);
    let plugin = Message::default().text(1, "hparams").message(2, plugin);
    let metadata = Message::default().message(1, plugin);
    // Every summary has to hold something; this is one zero.
    let shape = Message::default().message(2, Message::default().number(1, 1));
    let tensor = Message::default().number(1, 1).message(2, shape).bytes(5, &[0; 4]);
    let value = Message::default().text(1, "_hparams_/session_start_info");
    let value = value.message(8, tensor).message(9, metadata);
    Message::default().double(1, began).message(5, Message::default().message(1, value)).0
}

/// Plain values with their dotted paths.
fn leaves(above: &str, value: &Value, to: &mut Vec<(String, Value)>) {
    let below = |name: &str| if above.is_empty() { name.into() } else { format!("{above}.{name}") };
    match value {
        Value::Table(table) => table.iter().for_each(|(k, v)| leaves(&below(k), v, to)),
        Value::Array(list) => {
            list.iter().enumerate().for_each(|(i, v)| leaves(&below(&i.to_string()), v, to));
        }
        plain => to.push((above.into(), plain.clone())),
    }
}

/// A protocol buffer's message in the making. A field is its number and the kind of its bytes.
#[derive(Debug, Clone, Default)]
struct Message(Vec<u8>);

impl Message {
    fn key(mut self, field: u64, kind: u64) -> Self {
        self.varint(field << 3 | kind);
        self
    }

    /// Seven bits a byte, the lowest first; the top bit says that more follow.
    fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }

    fn number(self, field: u64, value: u64) -> Self {
        let mut message = self.key(field, 0);
        message.varint(value);
        message
    }

    fn double(self, field: u64, value: f64) -> Self {
        let mut message = self.key(field, 1);
        message.0.extend(value.to_le_bytes());
        message
    }

    fn float(self, field: u64, value: f32) -> Self {
        let mut message = self.key(field, 5);
        message.0.extend(value.to_le_bytes());
        message
    }

    fn bytes(self, field: u64, value: &[u8]) -> Self {
        let mut message = self.key(field, 2);
        message.varint(value.len() as u64);
        message.0.extend(value);
        message
    }

    fn text(self, field: u64, value: &str) -> Self {
        self.bytes(field, value.as_bytes())
    }

    fn message(self, field: u64, value: Self) -> Self {
        self.bytes(field, &value.0)
    }
}

fn record(bytes: &[u8]) -> Vec<u8> {
    let length = (bytes.len() as u64).to_le_bytes();
    let parts = [&length[..], &masked(&length), bytes, &masked(bytes)];
    parts.concat()
}

fn masked(bytes: &[u8]) -> [u8; 4] {
    crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8).to_le_bytes()
}

/// CRC-32 with Castagnoli's polynomial, bit by bit: event files are small.
fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0, |crc, &byte| {
        (0..8).fold(crc ^ u32::from(byte), |crc, _| {
            if crc & 1 == 1 { crc >> 1 ^ 0x82f6_3b78 } else { crc >> 1 }
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_are_those_of_rfc_3720() {
        let rising: Vec<u8> = (0..32).collect();
        let falling: Vec<u8> = (0..32).rev().collect();
        let vectors: [(&[u8], u32); 6] = [
            (b"", 0),
            (b"123456789", 0xe306_9283),
            (&[0; 32], 0x8a91_36aa),
            (&[0xff; 32], 0x62a8_ab43),
            (&rising, 0x46dd_794e),
            (&falling, 0x113f_db5c),
        ];
        for (bytes, wanted) in vectors {
            assert_eq!(crc32c(bytes), wanted, "{bytes:?}");
        }
    }

    #[test]
    fn numbers_take_seven_bits_a_byte() {
        assert_eq!(Message::default().number(1, 150).0, [0x08, 0x96, 0x01]);
        assert_eq!(Message::default().text(2, "testing").0, *b"\x12\x07testing");
        assert_eq!(Message::default().number(5, 0).0, [0x28, 0x00]);
    }

    /// Bytes of each record, with both checksums looked at.
    fn records(mut file: &[u8]) -> Vec<Vec<u8>> {
        let mut list = vec![];
        while !file.is_empty() {
            let length = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
            assert_eq!(file[8..12], masked(&file[..8]));
            let bytes = file[12..12 + length].to_vec();
            assert_eq!(file[12 + length..16 + length], masked(&bytes));
            list.push(bytes);
            file = &file[16 + length..];
        }
        list
    }

    #[test]
    fn every_whole_line_becomes_an_event_with_its_numbers() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("config.toml"), "seed = 3\nmodel.d_model = 64\n").unwrap();
        let lines = "{\"kind\":\"train\",\"step\":300,\"loss\":0.5,\"seconds\":1.5}\n\
                     {\"kind\":\"evaluation\",\"step\":300,\"test/accuracy\":0.25}\n{\"step\":4";
        fs::write(folder.path().join("metrics.jsonl"), lines).unwrap();
        let path = write_events(folder.path()).unwrap();
        assert_eq!(write_events(folder.path()).unwrap(), path);
        let records = records(&fs::read(path).unwrap());
        let has = |record: usize, text: &[u8]| {
            records[record].windows(text.len()).any(|window| window == text)
        };
        assert_eq!(records.len(), 4);
        assert!(has(0, b"brain.Event:2") && has(1, b"model.d_model") && has(1, b"hparams"));
        assert!(
            has(2, b"train/loss") && has(2, &0.5f32.to_le_bytes()) && has(2, &[0x10, 0xac, 0x02])
        );
        assert!(has(3, b"test/accuracy") && !has(3, b"kind"));
    }

    #[test]
    fn a_folder_that_is_no_run_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let message = write_events(folder.path()).unwrap_err().to_string();
        assert!(message.contains("metrics.jsonl"), "{message}");
    }
}
