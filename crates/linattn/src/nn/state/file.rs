//! States as safetensors files.

use super::StateError;
use super::tensors::{Named, StateTensors, counted, like};
use crate::nn::model::{LanguageModel, LanguageModelState};
use crate::ops::LinearAttentionBackend;
use burn::tensor::{DType, Int, Tensor, TensorData, backend::Backend};
use safetensors::{Dtype, SafeTensors, View};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::{self, File};
use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};

/// The metadata's key.
const KEY: &str = "linattn_state";
/// Ids of a text.
const TOKENS: &str = "tokens";
/// Of the format.
const VERSION: u32 = 2;
/// Tokens that a state can have seen; no text is as long.
const MOST_TOKENS: usize = 1 << 48;

/// A file's metadata about its state.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Header {
    version: u32,
    layers: Vec<LayerHeader>,
    /// Tokens seen, where the model has learnt positions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    position: Option<usize>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    text: Option<TextHeader>,
    /// CRC-32 of the header without it, as JSON, and of every tensor. It may be left out: what is written has it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    checksum: Option<u32>,
}

impl Header {
    /// The checksum of a file with this header and these tensors.
    fn checksum<V: View>(&self, tensors: &BTreeMap<String, V>) -> Result<u32, serde_json::Error> {
        let bare = Self { checksum: None, ..self.clone() };
        let mut hasher = crc32fast::Hasher::new();
        hasher.update(&serde_json::to_vec(&bare)?);
        for (name, tensor) in tensors {
            hasher.update(format!("{name} {} {:?}", tensor.dtype(), tensor.shape()).as_bytes());
            hasher.update(&tensor.data());
        }
        Ok(hasher.finalize())
    }
}

/// A file's metadata about a layer.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct LayerHeader {
    /// Kind of the mixer's state.
    kind: String,
    /// Tokens that it has seen.
    position: Option<usize>,
}

/// A file's metadata about its text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct TextHeader {
    /// How many of the tokens the state has seen.
    pub(crate) read: usize,
    /// Which random numbers it is sampled with.
    pub(crate) stream: u64,
}

/// A tensor of the file.
struct Stored {
    dtype: Dtype,
    shape: Vec<usize>,
    data: Vec<u8>,
}

impl View for Stored {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.data)
    }

    fn data_len(&self) -> usize {
        self.data.len()
    }
}

impl Stored {
    fn new<B: Backend>(tensor: &Named<B>) -> Self {
        let data = tensor.rows.to_data();
        let (dtype, bytes) = match data.dtype {
            DType::F64 => (Dtype::F64, data.iter::<f64>().flat_map(f64::to_le_bytes).collect()),
            _ => (Dtype::F32, data.iter::<f32>().flat_map(f32::to_le_bytes).collect()),
        };
        Self { dtype, shape: tensor.shape.clone(), data: bytes }
    }

    fn ids(ids: &[u32]) -> Self {
        let data = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        Self { dtype: Dtype::U32, shape: vec![ids.len()], data }
    }
}

/// Writes a state, and a text that goes with it. What was there stays until the new file is whole.
pub(crate) fn write<B: Backend>(
    path: &Path,
    state: &LanguageModelState<B>,
    text: Option<(&[u32], TextHeader)>,
) -> Result<(), StateError> {
    let refused = |why: String| StateError::Write { path: path.into(), why };
    let layers = state.tensors();
    let target = state_file(path)?;
    let header = Header {
        version: VERSION,
        layers: state
            .layers
            .iter()
            .zip(&layers)
            .map(|(layer, tensors)| LayerHeader {
                kind: layer.mixer.kind().to_string(),
                position: tensors.position,
            })
            .collect(),
        position: state.position,
        text: text.map(|(_, header)| header),
        checksum: None,
    };
    let mut list: BTreeMap<String, Stored> = BTreeMap::new();
    for (i, layer) in layers.iter().enumerate() {
        let named = |t: &Named<B>| (format!("layers.{i}.{}", t.name), Stored::new(t));
        list.extend(layer.list.iter().map(named));
    }
    list.extend(text.map(|(ids, _)| (TOKENS.to_string(), Stored::ids(ids))));
    let checksum = header.checksum(&list).map_err(|e| refused(e.to_string()))?;
    let header = Header { checksum: Some(checksum), ..header };
    let header = serde_json::to_string(&header).map_err(|e| refused(e.to_string()))?;
    let metadata = HashMap::from([(KEY.to_string(), header)]);
    let bytes = safetensors::serialize(list, Some(metadata)).map_err(|e| refused(e.to_string()))?;
    replace(&target, &bytes).map_err(|e| refused(e.to_string()))
}

/// The file that a state is written to where `path` is asked for: `path`, or where a link leads.
/// # Errors
/// [`StateError::Write`] if something else than a file is there, a device or a folder: a new file would
/// take its place.
pub fn state_file(path: &Path) -> Result<PathBuf, StateError> {
    let refused = |why: &str| StateError::Write { path: path.into(), why: why.into() };
    let target = match fs::canonicalize(path) {
        Ok(target) => target,
        Err(e) if e.kind() == ErrorKind::NotFound => path.into(),
        Err(e) => return Err(refused(&e.to_string())),
    };
    match fs::symlink_metadata(&target) {
        Ok(there) if !there.is_file() => Err(refused("it is no file; another name would do")),
        _ => Ok(target),
    }
}

/// Writes a file beside `path` and gives it that name.
fn replace(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let mut draft = path.as_os_str().to_owned();
    draft.push(".unfinished");
    // A draft that was cut short goes. Of a link the link itself goes, never the file behind it.
    if let Err(e) = fs::remove_file(&draft)
        && e.kind() != ErrorKind::NotFound
    {
        return Err(e);
    }
    let write = |mut file: File| file.write_all(bytes).and_then(|()| file.sync_all());
    let written = File::create_new(&draft).and_then(write).and_then(|()| fs::rename(&draft, path));
    if written.is_err() {
        let _on_a_full_disk_it_is_in_the_way = fs::remove_file(&draft);
    }
    written
}

/// A state that was read, and the text that goes with it.
pub(crate) type Loaded<B> = (LanguageModelState<B>, Option<(Vec<u32>, TextHeader)>);

impl<B: LinearAttentionBackend> LanguageModel<B> {
    /// Reads a state that [`LanguageModelState::save_state`] wrote, of a model of the same config.
    /// # Errors
    /// [`StateError`] names the file, or the layer and the tensor that does not fit.
    pub fn load_state(
        &self,
        path: &Path,
        device: &B::Device,
    ) -> Result<LanguageModelState<B>, StateError> {
        Ok(read(self, path, device)?.0)
    }
}

/// Reads a file that [`write()`] wrote.
pub(crate) fn read<B: LinearAttentionBackend>(
    model: &LanguageModel<B>,
    path: &Path,
    device: &B::Device,
) -> Result<Loaded<B>, StateError> {
    let refused = |why: String| StateError::Read { path: path.into(), why };
    let bytes = fs::read(path).map_err(|e| refused(e.to_string()))?;
    let whole = |e: safetensors::SafeTensorError| refused(format!("it is no whole file: {e}"));
    let (_, metadata) = SafeTensors::read_metadata(&bytes).map_err(whole)?;
    let file = SafeTensors::deserialize(&bytes).map_err(whole)?;
    let header = metadata.metadata().as_ref().and_then(|metadata| metadata.get(KEY));
    let header = header.ok_or_else(|| refused(format!("its metadata have no `{KEY}`")))?;
    let header: Header = serde_json::from_str(header).map_err(|e| refused(e.to_string()))?;
    if header.version != VERSION {
        return Err(refused(format!("its version is {}, not {VERSION}", header.version)));
    }
    if header.checksum.is_some() {
        let tensors = BTreeMap::from_iter(file.tensors());
        let got = header.checksum(&tensors).map_err(|e| refused(e.to_string()))?;
        if Some(got) != header.checksum {
            let want = header.checksum.unwrap_or_default();
            return Err(refused(format!("its checksum is {got:08x}, not {want:08x}")));
        }
    }

    // A fresh state shows which tensors a state of this model has.
    let ids = Tensor::<B, 2, Int>::zeros([1, 1], device);
    let (_, fresh) = model.hidden(ids, None);
    let mut reading = Reading { file: &file, rows: None, used: BTreeSet::new(), device };
    if header.position.is_some() != fresh.position.is_some() {
        let want = wanted_position(fresh.position).to_string();
        return Err(StateError::Position { got: counted(header.position), want });
    }
    let layers = reading.state(&header.layers, &fresh)?;
    let state = LanguageModelState { position: header.position, ..layers };
    let text = match header.text {
        None => None,
        Some(text) => {
            let ids = file.tensor(TOKENS).map_err(|e| refused(e.to_string()))?;
            reading.used.insert(TOKENS.to_string());
            if ids.dtype() != Dtype::U32 {
                return Err(refused(format!("its `{TOKENS}` are of type {}", ids.dtype())));
            }
            let id = |bytes: &[u8]| u32::from_le_bytes(bytes.try_into().unwrap_or_default());
            let ids: Vec<u32> = ids.data().chunks_exact(4).map(id).collect();
            if text.read > ids.len() || text.read == 0 || state.rows() != 1 {
                let why = format!("{} of {} tokens read", text.read, ids.len());
                return Err(refused(format!("its text and its state disagree: {why}")));
            }
            Some((ids, text))
        }
    };
    let unknown = file.names().into_iter().filter(|name| !reading.used.contains(*name)).min();
    match unknown {
        Some(name) => Err(refused(format!("the model has no `{name}`"))),
        None => Ok((state, text)),
    }
}

/// A file on its way to a state.
struct Reading<'a, B: Backend> {
    file: &'a SafeTensors<'a>,
    /// Sequences of the batch, once a tensor was read.
    rows: Option<usize>,
    used: BTreeSet<String>,
    device: &'a B::Device,
}

impl<B: Backend> Reading<'_, B> {
    fn state(
        &mut self,
        layers: &[LayerHeader],
        fresh: &LanguageModelState<B>,
    ) -> Result<LanguageModelState<B>, StateError> {
        if layers.len() != fresh.layers.len() {
            return Err(StateError::Layers { got: layers.len(), want: fresh.layers.len() });
        }
        let mut read = vec![];
        for (i, (header, fresh)) in layers.iter().zip(&fresh.layers).enumerate() {
            let kind = fresh.mixer.kind();
            if header.kind != kind {
                return Err(StateError::layer(i, "kind", &header.kind, kind));
            }
            let wanted = fresh.tensors();
            let position = header.position;
            let counted = |p: Option<usize>| p.map_or("absent".into(), |p| p.to_string());
            if position.is_some() != wanted.position.is_some() {
                let want = wanted_position(wanted.position);
                return Err(StateError::layer(i, "position", counted(position), want));
            }
            if position.is_some_and(|position| position > MOST_TOKENS) {
                let (got, want) = (counted(position), format!("at most {MOST_TOKENS}"));
                return Err(StateError::layer(i, "position", got, want));
            }
            let list = wanted.list.iter().map(|tensor| self.tensor(i, tensor));
            let list = list.collect::<Result<Vec<_>, _>>()?;
            check_grown(i, &list)?;
            read.push(StateTensors { list, position });
        }
        Ok(fresh.of(read))
    }

    /// The file's tensor in place of `fresh`, the one that a model has after a token.
    fn tensor(&mut self, layer: usize, fresh: &Named<B>) -> Result<Named<B>, StateError> {
        let name = format!("layers.{layer}.{}", fresh.name);
        let wrong = |got: String| StateError::layer(layer, &fresh.name, got, like(fresh));
        let view = self.file.tensor(&name).map_err(|_| wrong("missing".to_string()))?;
        let shape = view.shape().to_vec();
        let rows = shape.first().copied().unwrap_or(0);
        let same_rows = rows > 0 && *self.rows.get_or_insert(rows) == rows;
        if !fresh.fits(&fresh.name, &shape, true) || !same_rows {
            return Err(wrong(format!("{shape:?}")));
        }
        let numbers = [rows, shape[1..].iter().product()];
        let bytes = view.data();
        let data = match view.dtype() {
            Dtype::F32 => {
                let number = |b: &[u8]| f32::from_le_bytes(b.try_into().unwrap_or_default());
                TensorData::new(bytes.chunks_exact(4).map(number).collect::<Vec<_>>(), numbers)
            }
            Dtype::F64 => {
                let number = |b: &[u8]| f64::from_le_bytes(b.try_into().unwrap_or_default());
                TensorData::new(bytes.chunks_exact(8).map(number).collect::<Vec<_>>(), numbers)
            }
            other => return Err(wrong(format!("of type {other}"))),
        };
        self.used.insert(name);
        let dtype = fresh.rows.dtype();
        let rows = Tensor::from_data(data.convert_dtype(dtype), (self.device, dtype));
        Ok(Named { shape, rows, ..fresh.clone() })
    }
}

/// A file's entry that a fresh state with `position` asks for.
fn wanted_position(position: Option<usize>) -> &'static str {
    if position.is_some() { "a number" } else { "absent" }
}

/// Checks that tensors of a layer that grow have grown together.
fn check_grown<B: Backend>(layer: usize, list: &[Named<B>]) -> Result<(), StateError> {
    let mut growing = list.iter().filter_map(|t| Some((t, t.shape[t.grows?])));
    let Some((_, tokens)) = growing.next() else { return Ok(()) };
    match growing.find(|(_, other)| *other != tokens) {
        Some((tensor, other)) => {
            let count = |n: usize| format!("of {n} tokens");
            Err(StateError::layer(layer, &tensor.name, count(other), count(tokens)))
        }
        None => Ok(()),
    }
}

impl<B: Backend> LanguageModelState<B> {
    /// Writes the state to a file. It comes back with [`LanguageModel::load_state`].
    /// # Errors
    /// [`StateError::Write`].
    pub fn save_state(&self, path: &Path) -> Result<(), StateError> {
        write(path, self, None)
    }
}
