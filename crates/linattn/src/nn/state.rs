//! States as named tensors: how any of them is written to a file, joined with others along the batch,
//! and taken apart.
//! ```text
//! layers.3.mixer.memory    [B, H, K, V]      what a layer's mixer keeps, by the name of its field
//! layers.3.mixer.tails.0   [B, W - 1, C]     lists by number
//! layers.3.tails.0         [B, W - 1, C]     what convolutions of the layer, and its MLP, saw last
//! tokens                   [T]               ids of a text in the making, where the file has one
//! ```
//! A file is safetensors, its numbers f32 (f64 where the state is), so that f32 comes back to the last
//! bit. Its metadata has the key `linattn_state`: JSON with the kind of each layer's state, the tokens
//! that it has seen, and a CRC-32 of the rest of the file. Reading takes no more memory than the file,
//! the state and one tensor of it once more.

use super::block::BlockState;
use super::model::{LanguageModel, LanguageModelState};
use crate::ops::LinearAttentionBackend;
use burn::tensor::{DType, Int, Tensor, TensorData, backend::Backend};
use safetensors::{Dtype, SafeTensors, View};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::{self, File};
use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};

/// A kind of mixer state that can be taken apart into tensors and put together again. That is all that
/// saving, joining and selecting ask of it.
pub trait RecurrentState<B: Backend>: Sized {
    /// Its tensors, the batch first in each, under names that no two of them share; and the tokens
    /// it has seen, where it counts them.
    fn tensors(&self) -> StateTensors<B>;

    /// The state of such tensors.
    /// # Panics
    /// If they are not named as [`tensors`](Self::tensors) names them.
    fn from_tensors(tensors: StateTensors<B>) -> Self;
}

/// One tensor of a state, whatever its rank.
#[derive(Debug, Clone)]
struct Named<B: Backend> {
    name: String,
    /// `[B, ..]`.
    shape: Vec<usize>,
    /// The dimension that is longer the more tokens were seen.
    grows: Option<usize>,
    /// The numbers, a row for each sequence of the batch.
    rows: Tensor<B, 2>,
}

impl<B: Backend> Named<B> {
    /// Whether another has the same name and shape, however many sequences each has. Growing
    /// dimensions may differ where `grown` says so.
    fn fits(&self, name: &str, shape: &[usize], grown: bool) -> bool {
        let same = |(dim, (a, b)): (usize, (&usize, &usize))| {
            a == b || dim == 0 || (grown && self.grows == Some(dim) && *b > 0)
        };
        self.name == name
            && self.shape.len() == shape.len()
            && self.shape.iter().zip(shape).enumerate().all(same)
    }

    /// The same tensor with other sequences in it.
    fn with_rows(&self, rows: Tensor<B, 2>) -> Self {
        let mut shape = self.shape.clone();
        shape[0] = rows.dims()[0];
        Self { name: self.name.clone(), shape, grows: self.grows, rows }
    }
}

/// The tensors of a state, by name.
#[derive(Debug, Clone)]
pub struct StateTensors<B: Backend> {
    list: Vec<Named<B>>,
    position: Option<usize>,
}

impl<B: Backend> StateTensors<B> {
    /// No tensors yet, of a state that has seen `position` tokens; `None` if it does not count them.
    pub fn new(position: Option<usize>) -> Self {
        Self { list: vec![], position }
    }

    /// Adds a tensor, `[B, ..]`, whose size does not depend on the tokens seen.
    #[must_use]
    pub fn with<const D: usize>(self, name: &str, tensor: &Tensor<B, D>) -> Self {
        self.push(name.to_string(), tensor, None)
    }

    /// Adds a tensor, `[B, ..]`, whose dimension `dim` is longer the more tokens were seen.
    #[must_use]
    pub fn with_growing<const D: usize>(
        self,
        name: &str,
        tensor: &Tensor<B, D>,
        dim: usize,
    ) -> Self {
        self.push(name.to_string(), tensor, Some(dim))
    }

    /// Adds the tensors of a list, as `name.0`, `name.1` and so on.
    #[must_use]
    pub fn with_list<const D: usize>(self, name: &str, tensors: &[Tensor<B, D>]) -> Self {
        let one = |all: Self, (i, tensor): (usize, &Tensor<B, D>)| {
            all.push(format!("{name}.{i}"), tensor, None)
        };
        tensors.iter().enumerate().fold(self, one)
    }

    fn push<const D: usize>(
        mut self,
        name: String,
        tensor: &Tensor<B, D>,
        grows: Option<usize>,
    ) -> Self {
        let shape = tensor.dims();
        let row: usize = shape[1..].iter().product();
        let rows = tensor.clone().reshape([shape[0], row]);
        self.list.push(Named { name, shape: shape.to_vec(), grows, rows });
        self
    }

    /// Tokens seen; 0 if they are not counted.
    pub fn position(&self) -> usize {
        self.position.unwrap_or(0)
    }

    /// Names and numbers of all tensors, the numbers with a row for each sequence, `[B, ..]` made flat.
    pub fn data(&self) -> impl Iterator<Item = (&str, TensorData)> {
        self.list.iter().map(|tensor| (tensor.name.as_str(), tensor.rows.to_data()))
    }

    /// Takes a tensor out.
    /// # Panics
    /// If there is none of that name, or it has another rank.
    pub fn take<const D: usize>(&mut self, name: &str) -> Tensor<B, D> {
        self.take_if_any(name).unwrap_or_else(|| panic!("a state has a tensor `{name}`"))
    }

    /// As [`take`](Self::take), where there is one of that name.
    /// # Panics
    /// If it has another rank.
    pub fn take_if_any<const D: usize>(&mut self, name: &str) -> Option<Tensor<B, D>> {
        let place = self.list.iter().position(|tensor| tensor.name == name)?;
        let Named { shape, rows, .. } = self.list.remove(place);
        let shape: [usize; D] = shape.try_into().expect("a state's tensor keeps its rank");
        Some(rows.reshape(shape))
    }

    /// Takes the tensors of a list out.
    pub fn take_list<const D: usize>(&mut self, name: &str) -> Vec<Tensor<B, D>> {
        (0..).map_while(|i| self.take_if_any(&format!("{name}.{i}"))).collect()
    }

    /// The same, every name below `table`.
    fn within(mut self, table: &str) -> Self {
        self.list.iter_mut().for_each(|tensor| tensor.name = format!("{table}.{}", tensor.name));
        self
    }

    /// Those below `table`, by their names there.
    fn out_of(mut self, table: &str) -> Self {
        self.list.retain_mut(|tensor| {
            let rest = tensor.name.strip_prefix(table).and_then(|rest| rest.strip_prefix('.'));
            match rest.map(str::to_string) {
                Some(rest) => {
                    tensor.name = rest;
                    true
                }
                None => false,
            }
        });
        self
    }

    /// Every tensor, given its place in the list, with other sequences in it.
    fn map(&self, f: impl Fn(usize, &Named<B>) -> Tensor<B, 2>) -> Self {
        let one = |(place, tensor): (usize, &Named<B>)| tensor.with_rows(f(place, tensor));
        Self { list: self.list.iter().enumerate().map(one).collect(), position: self.position }
    }
}

impl<B: Backend> BlockState<B> {
    /// Its tensors: those of the mixer below `mixer`, and `tails`.
    pub fn tensors(&self) -> StateTensors<B> {
        self.mixer.tensors().within("mixer").with_list("tails", &self.tails)
    }

    /// A state of the same kind, of other tensors.
    fn of(&self, mut tensors: StateTensors<B>) -> Self {
        let tails = tensors.take_list("tails");
        Self { mixer: self.mixer.of(tensors.out_of("mixer")), tails }
    }
}

/// Why a state cannot be read, written, or put beside another.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StateError {
    /// A file that holds no state, or cannot be read.
    #[error("can't read a state from {path}: {why}")]
    Read {
        /// The file.
        path: PathBuf,
        /// The fault.
        why: String,
    },
    /// A file that cannot be written.
    #[error("can't write a state to {path}: {why}")]
    Write {
        /// The file.
        path: PathBuf,
        /// The fault.
        why: String,
    },
    /// A state of more layers, or fewer.
    #[error("the state has {got} layers; it has to have {want}, as the model has")]
    Layers {
        /// Layers of the state.
        got: usize,
        /// Layers that would do.
        want: usize,
    },
    /// A state of other learnt positions.
    #[error("the state's position is {got}; it has to be {want}")]
    Position {
        /// Tokens that it has seen, where the model has learnt positions.
        got: String,
        /// Values that would be accepted.
        want: String,
    },
    /// A layer whose state does not fit.
    #[error("layer {layer} of the state: `{tensor}` is {got}; it has to be {want}")]
    Layer {
        /// Which layer, from 0.
        layer: usize,
        /// Its tensor, or what else of it.
        tensor: String,
        /// The state that was given.
        got: String,
        /// The state that would be accepted.
        want: String,
    },
}

impl StateError {
    fn layer(
        layer: usize,
        tensor: impl Into<String>,
        got: impl Into<String>,
        want: impl Into<String>,
    ) -> Self {
        Self::Layer { layer, tensor: tensor.into(), got: got.into(), want: want.into() }
    }
}

impl<B: Backend> LanguageModelState<B> {
    /// The tensors of each layer.
    pub fn tensors(&self) -> Vec<StateTensors<B>> {
        self.layers.iter().map(BlockState::tensors).collect()
    }

    /// A state of the same kind whose layers have other tensors.
    fn of(&self, tensors: impl IntoIterator<Item = StateTensors<B>>) -> Self {
        let layers = self.layers.iter().zip(tensors).map(|(layer, t)| layer.of(t)).collect();
        Self { layers, position: self.position }
    }

    /// Sequences in the batch.
    pub fn rows(&self) -> usize {
        let first = self.layers.iter().find_map(|layer| layer.tensors().list.into_iter().next());
        first.map_or(0, |tensor| tensor.shape[0])
    }

    /// Bytes of all its tensors.
    pub fn bytes(&self) -> u64 {
        let size = |t: &Named<B>| (t.rows.shape().num_elements() * t.rows.dtype().size()) as u64;
        self.tensors().iter().flat_map(|layer| layer.list.iter().map(size)).sum()
    }

    /// The states of some sequences of the batch, in that order.
    /// # Panics
    /// If there is no such row.
    #[must_use]
    pub fn select(&self, rows: &[usize]) -> Self {
        let have = self.rows();
        assert!(rows.iter().all(|&row| row < have), "rows {rows:?} of a batch of {have}");
        let ids: Vec<i32> = rows.iter().map(|&row| row as i32).collect();
        let take = |_: usize, tensor: &Named<B>| {
            let data = TensorData::new(ids.clone(), [ids.len()]);
            let ids = Tensor::<B, 1, Int>::from_data(data, &tensor.rows.device());
            tensor.rows.clone().select(0, ids)
        };
        self.of(self.tensors().iter().map(|layer| layer.map(take)))
    }

    /// The sequences of several states in one batch, in order.
    /// # Errors
    /// [`StateError::Layer`] if they are of different models, or have seen different numbers of
    /// tokens and count them.
    /// # Panics
    /// If there are none.
    pub fn cat(states: Vec<Self>) -> Result<Self, StateError> {
        let [first, ..] = states.as_slice() else { panic!("a batch is of one state at least") };
        if let [_] = states.as_slice() {
            return Ok(first.clone());
        }
        if let Some(other) = states.iter().find(|state| state.position != first.position) {
            let (got, want) = (counted(other.position), counted(first.position));
            return Err(StateError::Position { got, want });
        }
        let parts: Vec<Vec<StateTensors<B>>> = states.iter().map(Self::tensors).collect();
        for other in &parts[1..] {
            check_alike(&parts[0], other)?;
        }
        let layer = |i: usize| {
            parts[0][i].map(|place, _| {
                Tensor::cat(parts.iter().map(|p| p[i].list[place].rows.clone()).collect(), 0)
            })
        };
        Ok(first.of((0..first.layers.len()).map(layer)))
    }

    /// The same state, which says it has seen `position` tokens. It then goes with states of other
    /// lengths, which is right only if every mixer of the model
    /// [`ignores_position`](LanguageModel::ignores_position).
    #[must_use]
    pub fn with_position(&self, position: usize) -> Self {
        let moved = |mut layer: StateTensors<B>| {
            layer.position = layer.position.map(|_| position);
            layer
        };
        let state = self.of(self.tensors().into_iter().map(moved));
        Self { position: self.position.map(|_| position), ..state }
    }

    /// Writes the state to a file. It comes back with [`LanguageModel::load_state`].
    /// # Errors
    /// [`StateError::Write`].
    pub fn save_state(&self, path: &Path) -> Result<(), StateError> {
        write(path, self, None)
    }
}

/// Refuses states that cannot stand in one batch.
fn check_alike<B: Backend>(
    first: &[StateTensors<B>],
    other: &[StateTensors<B>],
) -> Result<(), StateError> {
    if first.len() != other.len() {
        return Err(StateError::Layers { got: other.len(), want: first.len() });
    }
    for (layer, (a, b)) in first.iter().zip(other).enumerate() {
        if a.position != b.position {
            let seen = |x: &StateTensors<B>| format!("{} tokens", x.position());
            return Err(StateError::layer(layer, "position", seen(b), seen(a)));
        }
        if a.list.len() != b.list.len() {
            let count = |x: &StateTensors<B>| format!("{} tensors", x.list.len());
            return Err(StateError::layer(layer, "mixer", count(b), count(a)));
        }
        for (a, b) in a.list.iter().zip(&b.list) {
            if !a.fits(&b.name, &b.shape, false) {
                let got = format!("{:?}", b.shape);
                return Err(StateError::layer(layer, &b.name, got, like(a)));
            }
        }
    }
    Ok(())
}

/// The shape that would do, the batch and growing dimensions left open.
fn like<B: Backend>(tensor: &Named<B>) -> String {
    let open = |(dim, size): (usize, &usize)| match dim {
        0 => "rows".to_string(),
        dim if tensor.grows == Some(dim) => "tokens".to_string(),
        _ => size.to_string(),
    };
    let sizes: Vec<String> = tensor.shape.iter().enumerate().map(open).collect();
    format!("[{}]", sizes.join(", "))
}

/// The metadata's key.
const KEY: &str = "linattn_state";
/// Ids of a text.
const TOKENS: &str = "tokens";
/// Of the format.
const VERSION: u32 = 1;
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
    /// CRC-32 of the header without it, as JSON, and of every tensor. Files of older versions have none.
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
    // What a cut left; never what a link of that name leads to.
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

    // What a state of this model looks like.
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

/// Tokens seen, for an error.
fn counted(position: Option<usize>) -> String {
    position.map_or("absent".into(), |position| position.to_string())
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
