//! `config.json` as a model's config.

use super::import::read as read_family;
use super::keys::{Keys, without_infinities};
use crate::faults::Faults;
use crate::format::Format;
use crate::tensors::Tensors;
use linattn::nn::LanguageModelConfig;
use serde_json::{Map, Value};

/// A `config.json` as read: the layout, rows of the embedding where it says so, and the model.
pub(crate) type Said = (Format, Option<usize>, LanguageModelConfig);

/// Reads a `config.json` beside `tensors`. None where not even the layout is known, or no model could be
/// so large.
pub(crate) fn import(text: &str, tensors: &Tensors, faults: &mut Faults) -> Option<Said> {
    let table: Map<String, Value> = match serde_json::from_str(&without_infinities(text)) {
        Ok(table) => table,
        Err(e) => {
            faults.push(format!("config.json: {e}"));
            return None;
        }
    };
    match Format::of(&table, tensors) {
        Ok(format) => read(format, &table, faults),
        Err(fault) => {
            faults.push(fault);
            None
        }
    }
}

/// Reads the table of a `config.json` of a layout.
pub(super) fn read(
    format: Format,
    table: &Map<String, Value>,
    faults: &mut Faults,
) -> Option<Said> {
    let mut keys = Keys::new(table, faults);
    let read = match format {
        Format::Fla(family) => read_family(&mut keys, family),
        Format::Hub(hub) => (hub.read)(&mut keys),
    };
    keys.complain_of_unseen();
    let read = read?;
    match serde_json::from_value(read.config) {
        Ok(config) => Some((format, read.vocab, config)),
        Err(e) => {
            faults.push(format!("config.json: {e}"));
            None
        }
    }
}
