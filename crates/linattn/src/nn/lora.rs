//! Low-rank adapters of linear layers: weights that are there stay as they are, and a product of two thin
//! matrices beside each is learnt. Source: Hu et al., arXiv 2106.09685.
//! ```text
//! y = x W + b + (alpha / r) (x A) B        A: [from, r]   B: [r, to]
//! ```
//! A starts uniform within 1 / sqrt(from), as in Hugging Face's PEFT, and B at zero: the model starts as it
//! was.

use super::weight::Weight;
use super::{ConfigError, positive};
use crate::ops::{self, LinearAttentionBackend, cat};
use burn::module::{
    AutodiffModule, Content, Devices, Initializer, Module, ModuleDisplay, ModuleDisplayDefault,
    ModuleMapper, ModuleVisitor, Param,
};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{DType, Tensor};
use serde::{Deserialize, Serialize};
use std::any::Any;
use std::cell::Cell;

/// Low-rank adapters, as TOML spells them: `{ rank = 8, alpha = 16.0, targets = ["q_proj"] }`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LoraConfig {
    /// r, inner width of an adapter.
    #[serde(default = "rank")]
    pub rank: usize,
    /// Factor of an adapter's output, times r.
    #[serde(default = "alpha")]
    pub alpha: f64,
    /// Projections that get one: names, `q_proj`, or the ends of paths, `0.attn.q_proj`.
    pub targets: Vec<String>,
}

fn rank() -> usize {
    8
}

fn alpha() -> f64 {
    8.0
}

impl LoraConfig {
    /// Factor of an adapter's output.
    pub fn scale(&self) -> f64 {
        self.alpha / self.rank as f64
    }

    /// Checks every key but the names of the targets, which a model knows.
    /// # Errors
    /// [`ConfigError`] names the first key that does not fit.
    pub fn check(&self) -> Result<(), ConfigError> {
        positive("rank", self.rank)?;
        if !(self.alpha > 0.0 && self.alpha.is_finite()) {
            return Err(ConfigError::new("alpha", self.alpha, "above 0"));
        }
        match self.targets.is_empty() {
            true => Err(ConfigError::new("targets", "empty", "at least one projection's name")),
            false => Ok(()),
        }
    }

    /// The first target that a path of a model's projection ends with.
    pub(super) fn target(&self, path: &str) -> Option<&String> {
        let ends = |target: &&String| match path.strip_suffix(target.as_str()) {
            Some(before) => before.is_empty() || before.ends_with('.'),
            None => false,
        };
        self.targets.iter().find(ends)
    }
}

/// The adapter of a linear layer.
#[derive(Module, Debug)]
pub struct LowRankAdapter<B: Backend> {
    /// A, `[from, r]`.
    pub lora_a: Param<Tensor<B, 2>>,
    /// B, `[r, to]`.
    pub lora_b: Param<Tensor<B, 2>>,
    #[module(skip)]
    scale: f64,
}

impl<B: Backend> LowRankAdapter<B> {
    pub(super) fn new([from, to]: [usize; 2], config: &LoraConfig, device: &B::Device) -> Self {
        let bound = (from as f64).powf(-0.5);
        let lora_a =
            Initializer::Uniform { min: -bound, max: bound }.init([from, config.rank], device);
        let lora_b = Initializer::Zeros.init([config.rank, to], device);
        Self { lora_a, lora_b, scale: config.scale() }
    }

    /// B times the scale: its columns `parts`, each given by its first and its width, from column `before`
    /// on, zeros in all other of `total` columns.
    fn widening(&self, parts: &[(usize, usize)], before: usize, total: usize) -> Tensor<B, 2> {
        let up = self.lora_b.val() * self.scale;
        let zeros = |width| Tensor::zeros([up.dims()[0], width], (&up.device(), up.dtype()));
        let width: usize = parts.iter().map(|(_, width)| width).sum();
        let behind = total - before - width;
        let columns = parts.iter().map(|&(first, width)| up.clone().narrow(1, first, width));
        let mut all: Vec<_> = (before > 0).then(|| zeros(before)).into_iter().collect();
        all.extend(columns);
        all.extend((behind > 0).then(|| zeros(behind)));
        cat(all, 1)
    }
}

/// Place of a linear layer's adapter, which most have none in.
#[derive(Debug, Clone)]
pub struct Adapter<B: Backend>(Option<LowRankAdapter<B>>);

impl<B: Backend> Default for Adapter<B> {
    fn default() -> Self {
        Self(None)
    }
}

impl<B: Backend> Adapter<B> {
    /// Whether there is none.
    pub(super) fn is_none(&self) -> bool {
        self.0.is_none()
    }
}

impl<B: LinearAttentionBackend> Adapter<B> {
    /// `x W + b`, and what the adapter adds.
    /// # Panics
    /// If the width of `x` is not that of the layer.
    pub(super) fn affine<const D: usize>(
        &self,
        x: Tensor<B, D>,
        weight: &Weight<B>,
        bias: Option<Tensor<B, 1>>,
    ) -> Tensor<B, D> {
        let product = |x, weight| {
            ops::affine(x, weight, None).expect("`x` has the width that the layer was made for")
        };
        match &self.0 {
            None => weight.affine(x, bias),
            Some(low) => {
                let y = weight.affine(x.clone(), bias);
                let inner = product(x, low.lora_a.val()) * low.scale;
                y + product(inner, low.lora_b.val())
            }
        }
    }

    /// W with the adapter's part, in type `dtype`.
    pub(super) fn matrix(&self, weight: Tensor<B, 2>, dtype: DType) -> Tensor<B, 2> {
        ops::typed(
            match &self.0 {
                None => weight,
                Some(low) => weight + low.lora_a.val().matmul(low.lora_b.val() * low.scale),
            },
            dtype,
        )
    }

    /// Columns of a packed product with what the adapter adds to them: its columns `parts`, each given by
    /// its first and its width, one after another.
    pub(super) fn add_parts<const D: usize>(
        &self,
        y: Tensor<B, D>,
        x: &Tensor<B, D>,
        parts: &[(usize, usize)],
    ) -> Tensor<B, D> {
        let Some(low) = &self.0 else { return y };
        let up = low.widening(parts, 0, y.dims()[D - 1]);
        add(y, x, low.lora_a.val(), up)
    }
}

/// Columns of a packed product with what the adapters of its layers add, each of its own width, side by side.
pub(super) fn add_side_by_side<B: LinearAttentionBackend, const D: usize>(
    y: Tensor<B, D>,
    x: &Tensor<B, D>,
    layers: &[(&Adapter<B>, usize)],
) -> Tensor<B, D> {
    let (mut before, total) = (0, y.dims()[D - 1]);
    let (mut narrowing, mut widening) = (vec![], vec![]);
    for (adapter, width) in layers {
        if let Some(low) = &adapter.0 {
            narrowing.push(low.lora_a.val());
            widening.push(low.widening(&[(0, *width)], before, total));
        }
        before += width;
    }
    match narrowing.is_empty() {
        true => y,
        false => add(y, x, cat(narrowing, 1), cat(widening, 0)),
    }
}

/// `y + x a b`.
fn add<B: LinearAttentionBackend, const D: usize>(
    y: Tensor<B, D>,
    x: &Tensor<B, D>,
    a: Tensor<B, 2>,
    b: Tensor<B, 2>,
) -> Tensor<B, D> {
    let inner = ops::affine(x.clone(), a, None).expect("the adapters read `x`");
    y + ops::affine(inner, b, None).expect("as wide as the adapters' inner width")
}

/// The new entry of a layer's place for an adapter.
struct Change<B: Backend>(Option<LowRankAdapter<B>>);

thread_local! {
    /// The [`Change`] for the layer that a mapper is in. Burn's mappers change parameters, and neither add
    /// nor remove any: a mapper leaves it here when it meets a layer's weight, and the place of
    /// the layer's adapter, which comes after it, takes it.
    static CHANGE: Cell<Option<Box<dyn Any>>> = const { Cell::new(None) };
}

/// Gives the next place of an adapter that a mapper comes to a new entry.
pub(super) fn change_next<B: Backend>(adapter: Option<LowRankAdapter<B>>) {
    CHANGE.set(Some(Box::new(Change(adapter))));
}

impl<B: Backend> Module<B> for Adapter<B> {
    type Record = <Option<LowRankAdapter<B>> as Module<B>>::Record;

    fn collect_devices(&self, devices: Devices<B>) -> Devices<B> {
        self.0.collect_devices(devices)
    }

    fn fork(self, device: &B::Device) -> Self {
        Self(self.0.fork(device))
    }

    fn to_device(self, device: &B::Device) -> Self {
        Self(self.0.to_device(device))
    }

    fn visit<V: ModuleVisitor<B>>(&self, visitor: &mut V) {
        self.0.visit(visitor);
    }

    fn map<M: ModuleMapper<B>>(self, mapper: &mut M) -> Self {
        let change = CHANGE.take().and_then(|change| change.downcast::<Change<B>>().ok());
        match change {
            Some(change) => Self(change.0),
            None => Self(Module::<B>::map(self.0, mapper)),
        }
    }

    fn load_record(self, record: Self::Record) -> Self {
        Self(self.0.load_record(record))
    }

    fn into_record(self) -> Self::Record {
        self.0.into_record()
    }
}

impl<B: AutodiffBackend> AutodiffModule<B> for Adapter<B> {
    type InnerModule = Adapter<B::InnerBackend>;

    fn valid(&self) -> Self::InnerModule {
        Adapter(self.0.valid())
    }

    fn from_inner(module: Self::InnerModule) -> Self {
        Self(AutodiffModule::<B>::from_inner(module.0))
    }
}

impl<B: Backend> ModuleDisplayDefault for Adapter<B> {
    fn content(&self, content: Content) -> Option<Content> {
        self.0.content(content)
    }
}

impl<B: Backend> ModuleDisplay for Adapter<B> {}
