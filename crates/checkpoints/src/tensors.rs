//! Tensors in safetensors files: one file, or several with an index that says which is where.

use crate::faults::Faults;
use half::{bf16, f16};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::ops::Range;
use std::path::Path;
use std::rc::Rc;

/// Numbers of a checkpoint that is written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Precision {
    /// 32 bits, as they are.
    #[default]
    F32,
    /// The upper 16 of the 32 bits, rounded.
    Bf16,
    /// IEEE half precision, rounded.
    F16,
}

impl Precision {
    /// As `config.json` names it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Precision::F32 => "float32",
            Precision::Bf16 => "bfloat16",
            Precision::F16 => "float16",
        }
    }

    fn dtype(self) -> Dtype {
        match self {
            Precision::F32 => Dtype::F32,
            Precision::Bf16 => Dtype::BF16,
            Precision::F16 => Dtype::F16,
        }
    }

    /// The number nearest to `x`, infinite where `x` is too large.
    fn round(self, x: f32) -> f32 {
        match self {
            Precision::F32 => x,
            Precision::Bf16 => bf16::from_f32(x).to_f32(),
            Precision::F16 => f16::from_f32(x).to_f32(),
        }
    }

    /// Refuses numbers that are not finite, or would not be any more. Small ones lose digits, which is
    /// what rounding is.
    fn check(self, name: &str, values: &[f32]) -> Result<(), String> {
        let Some(place) = values.iter().position(|&x| !self.round(x).is_finite()) else {
            return Ok(());
        };
        let (value, most) = (values[place], self.largest());
        let numbers = self.name();
        Err(match value.is_finite() {
            true => format!(
                "{name} is {value} at place {place}, and the largest {numbers} is {most}; a --dtype \
                 of a larger range would do"
            ),
            false => format!("{name} is {value} at place {place}; it has to be finite"),
        })
    }

    fn largest(self) -> f32 {
        match self {
            Precision::F32 => f32::MAX,
            Precision::Bf16 => bf16::MAX.to_f32(),
            Precision::F16 => f16::MAX.to_f32(),
        }
    }

    fn bytes(self, values: &[f32]) -> Vec<u8> {
        match self {
            Precision::F32 => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
            Precision::Bf16 => {
                values.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect()
            }
            Precision::F16 => values.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes()).collect(),
        }
    }
}

/// A tensor of a file that was read.
#[derive(Debug, Clone)]
pub(crate) struct Stored {
    file: Rc<Vec<u8>>,
    place: Range<usize>,
    dtype: Dtype,
    pub(crate) shape: Vec<usize>,
}

impl Stored {
    /// A tensor that stands in no file.
    pub(crate) fn of(values: &[f32], shape: Vec<usize>) -> Self {
        let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        Self { place: 0..bytes.len(), file: Rc::new(bytes), dtype: Dtype::F32, shape }
    }

    /// All its numbers; widening is exact.
    pub(crate) fn values(&self) -> Vec<f32> {
        self.numbers(&self.file[self.place.clone()])
    }

    /// The numbers of these rows, in this order.
    pub(crate) fn rows(&self, ranges: &[Range<usize>]) -> Vec<f32> {
        let bytes = &self.file[self.place.clone()];
        let width = bytes.len() / self.shape.first().copied().unwrap_or(1).max(1);
        let rows = ranges.iter().map(|range| &bytes[range.start * width..range.end * width]);
        rows.flat_map(|bytes| self.numbers(bytes)).collect()
    }

    fn numbers(&self, bytes: &[u8]) -> Vec<f32> {
        let pair = |b: &[u8]| u16::from_le_bytes([b[0], b[1]]);
        match self.dtype {
            Dtype::BF16 => {
                bytes.chunks_exact(2).map(|b| bf16::from_bits(pair(b)).to_f32()).collect()
            }
            Dtype::F16 => bytes.chunks_exact(2).map(|b| f16::from_bits(pair(b)).to_f32()).collect(),
            _ => {
                let four = |b: &[u8]| f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
                bytes.chunks_exact(4).map(four).collect()
            }
        }
    }
}

/// Tensors by their names.
pub(crate) type Tensors = BTreeMap<String, Stored>;

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

const WHOLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// Every tensor of a checkpoint's folder.
pub(crate) fn read(folder: &Path, faults: &mut Faults) -> Tensors {
    let mut tensors = Tensors::new();
    if folder.join(WHOLE).exists() || !folder.join(INDEX).exists() {
        read_file(folder, WHOLE, &mut tensors, faults);
        return tensors;
    }
    let index = match fs::read(folder.join(INDEX)) {
        Ok(text) => serde_json::from_slice::<Index>(&text).map_err(|e| e.to_string()),
        Err(e) => Err(e.to_string()),
    };
    let files: BTreeSet<String> = match index {
        Ok(index) => index.weight_map.into_values().collect(),
        Err(why) => {
            faults.push(format!("{INDEX}: {why}"));
            return tensors;
        }
    };
    for file in files {
        match file.contains(['/', '\\']) {
            true => faults.push(format!("{INDEX}: {file:?} is no file of the folder")),
            false => read_file(folder, &file, &mut tensors, faults),
        }
    }
    tensors
}

fn read_file(folder: &Path, name: &str, tensors: &mut Tensors, faults: &mut Faults) {
    let file = match fs::read(folder.join(name)) {
        Ok(bytes) => Rc::new(bytes),
        Err(e) => return faults.push(format!("{name}: {e}")),
    };
    let (length, metadata) = match SafeTensors::read_metadata(&file) {
        Ok(header) => header,
        Err(e) => return faults.push(format!("{name}: {e}; the file may be cut off")),
    };
    let first = 8 + length; // after the header and its own length
    for (key, info) in BTreeMap::from_iter(metadata.tensors()) {
        if !matches!(info.dtype, Dtype::F32 | Dtype::BF16 | Dtype::F16) {
            faults.push(format!("{key} is {:?}; it has to be F32, BF16 or F16", info.dtype));
            continue;
        }
        let place = first + info.data_offsets.0..first + info.data_offsets.1;
        let (dtype, shape) = (info.dtype, info.shape.clone());
        tensors.insert(key, Stored { file: file.clone(), place, dtype, shape });
    }
}

/// Name, shape and numbers of a tensor to be written.
pub(crate) type Written = (String, Vec<usize>, Vec<f32>);

/// The bytes of a file with these tensors, and with `words` beside them.
/// # Errors
/// Names the first tensor with a number that `precision` does not have.
pub(crate) fn to_bytes(
    tensors: &[Written],
    precision: Precision,
    words: &[(&str, String)],
) -> Result<Vec<u8>, String> {
    tensors.iter().try_for_each(|(name, _, values)| precision.check(name, values))?;
    let data: Vec<Vec<u8>> = tensors.iter().map(|(_, _, values)| precision.bytes(values)).collect();
    let mut views = vec![];
    for ((name, shape, _), bytes) in tensors.iter().zip(&data) {
        let view = TensorView::new(precision.dtype(), shape.clone(), bytes);
        views.push((name.as_str(), view.map_err(|e| format!("{name}: {e}"))?));
    }
    let mut metadata = HashMap::from([("format".to_string(), "pt".to_string())]);
    metadata.extend(words.iter().map(|(key, word)| ((*key).to_string(), word.clone())));
    safetensors::serialize(views, Some(metadata)).map_err(|e| e.to_string())
}

/// The tensors of one file, and the words beside them.
pub(crate) fn read_one(path: &Path) -> Result<(Tensors, HashMap<String, String>), String> {
    let (mut tensors, mut faults) = (Tensors::new(), Faults::default());
    let (folder, name) = (path.parent(), path.file_name());
    let (Some(folder), Some(name)) = (folder, name) else { return Err("it is no file".into()) };
    read_file(folder, &name.to_string_lossy(), &mut tensors, &mut faults);
    if !faults.is_empty() {
        return Err(faults.join("; "));
    }
    let file = fs::read(path).map_err(|e| e.to_string())?;
    let (_, metadata) = SafeTensors::read_metadata(&file).map_err(|e| e.to_string())?;
    Ok((tensors, metadata.metadata().clone().unwrap_or_default()))
}
