//! Low-rank adapters of linear layers: weights that are there stay as they are, and a product of two thin
//! matrices beside each is learnt. Source: Hu et al., arXiv 2106.09685.
//! ```text
//! y = x W + b + (alpha / r) (x A) B        A: [from, r]   B: [r, to]
//! ```
//! A starts uniform within 1 / sqrt(from), as in Hugging Face's PEFT, and B at zero: the model starts as it
//! was.

use super::model::LanguageModel;
use super::weight::Weight;
use super::{ConfigError, positive};
use crate::ops::{self, LinearAttentionBackend};
use burn::module::{
    AutodiffModule, Content, Devices, Initializer, Module, ModuleDisplay, ModuleDisplayDefault,
    ModuleMapper, ModuleVisitor, Param,
};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{DType, Tensor};
use serde::{Deserialize, Serialize};
use std::any::Any;
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};

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
    fn target(&self, path: &str) -> Option<&String> {
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
    fn new([from, to]: [usize; 2], config: &LoraConfig, device: &B::Device) -> Self {
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
        Tensor::cat(all, 1)
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
        false => add(y, x, Tensor::cat(narrowing, 1), Tensor::cat(widening, 0)),
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
    /// nor remove any: a mapper of this file leaves it here when it meets a layer's weight, and the place of
    /// the layer's adapter, which comes after it, takes it.
    static CHANGE: Cell<Option<Box<dyn Any>>> = const { Cell::new(None) };
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

/// Layers that have a place for an adapter, as Burn's mappers spell their types.
const ADAPTABLE: [&str; 3] = ["Struct:Linear", "Struct:ResidualLinear", "Struct:ScaledLinear"];

/// Way to a parameter. Kinds of the same thing, as enums have them, are no part of it.
#[derive(Default)]
struct Way {
    names: Vec<String>,
    container: String,
}

impl Way {
    fn enter(&mut self, name: &str, container: &str) {
        if !container.starts_with("Enum:") {
            self.names.push(name.to_string());
        }
        self.container = container.to_string();
    }

    fn exit(&mut self, container: &str) {
        if !container.starts_with("Enum:") {
            self.names.pop();
        }
    }

    /// The projection of a layer whose weight this is.
    fn projection(&self) -> Option<String> {
        let (last, rest) = self.names.split_last()?;
        let of_layer = rest.first().is_some_and(|first| first == "layers");
        let weight = last == "weight" && ADAPTABLE.contains(&self.container.as_str());
        (of_layer && weight).then(|| rest.join("."))
    }
}

/// Puts adapters in their places and freezes all else.
struct Attach<'a> {
    config: &'a LoraConfig,
    way: Way,
    met: BTreeSet<String>,
    names: BTreeSet<String>,
}

impl<B: Backend> ModuleMapper<B> for Attach<'_> {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.way.enter(name, container);
    }

    fn exit_module(&mut self, _name: &str, container: &str) {
        self.way.exit(container);
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let param = param.set_require_grad(false);
        if let Some(path) = self.way.projection() {
            // `layers.0.attn.q_proj`, `layers.0.mlp.1.up_proj`: what is the same in every layer.
            let own = path.split('.').skip(if path.contains(".mlp.") { 4 } else { 3 });
            self.names.insert(own.collect::<Vec<_>>().join("."));
            if let (Some(target), &[from, to]) = (self.config.target(&path), &param.dims()[..]) {
                self.met.insert(target.clone());
                let low = LowRankAdapter::<B>::new([from, to], self.config, &param.device());
                CHANGE.set(Some(Box::new(Change(Some(low)))));
            }
        }
        param
    }
}

/// Adds the adapters' products, by their layers, to the weights.
struct Merge<B: Backend> {
    products: BTreeMap<String, Tensor<B, 2>>,
    way: Way,
}

impl<B: Backend> ModuleMapper<B> for Merge<B> {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.way.enter(name, container);
    }

    fn exit_module(&mut self, _name: &str, container: &str) {
        self.way.exit(container);
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let product = self.way.projection().and_then(|path| self.products.remove(&path));
        let Some(product) = product else { return param };
        CHANGE.set(Some(Box::new(Change::<B>(None))));
        param.map(|weight| {
            let shape = weight.dims();
            (weight + product.reshape(shape)).detach()
        })
    }
}

/// Finds the products of adapters by their layers' paths.
struct Products<B: Backend> {
    scale: f64,
    way: Way,
    narrowing: Option<Tensor<B, 2>>,
    found: BTreeMap<String, Tensor<B, 2>>,
}

impl<B: Backend> ModuleVisitor<B> for Products<B> {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.way.enter(name, container);
    }

    fn exit_module(&mut self, _name: &str, container: &str) {
        self.way.exit(container);
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let (&[rows, columns], [path @ .., _, name]) = (&param.dims()[..], &self.way.names[..])
        else {
            return;
        };
        let matrix = || param.val().reshape([rows, columns]);
        match (self.way.container.as_str(), name.as_str()) {
            ("Struct:LowRankAdapter", "lora_a") => self.narrowing = Some(matrix()),
            ("Struct:LowRankAdapter", "lora_b") => {
                let narrowing = self.narrowing.take().expect("A stands before B");
                self.found.insert(path.join("."), narrowing.matmul(matrix() * self.scale));
            }
            _ => {}
        }
    }
}

impl<B: LinearAttentionBackend> LanguageModel<B> {
    /// The same model with fresh adapters on the projections that `config` names. They alone learn.
    /// # Errors
    /// [`ConfigError`] names the first key that does not fit, and the projections that there are.
    pub fn with_lora(self, config: &LoraConfig) -> Result<Self, ConfigError> {
        config.check()?;
        let (met, names) = (BTreeSet::new(), BTreeSet::new());
        let mut attach = Attach { config, way: Way::default(), met, names };
        let model = Module::<B>::map(self, &mut attach);
        let unknown: Vec<String> = config
            .targets
            .iter()
            .filter(|target| !attach.met.contains(*target))
            .map(|target| format!("{target:?}"))
            .collect();
        match unknown.is_empty() {
            true => Ok(model),
            false => {
                let names = attach.names.into_iter().collect::<Vec<_>>().join(", ");
                let want = format!("names of the model's projections: {names}");
                Err(ConfigError::new("targets", unknown.join(", "), want))
            }
        }
    }

    /// The same model with `W + (alpha / r) A B` in the place of W and its adapter.
    #[must_use]
    pub fn merged(self, config: &LoraConfig) -> Self {
        let (way, found) = (Way::default(), BTreeMap::new());
        let mut products = Products { scale: config.scale(), way, narrowing: None, found };
        Module::<B>::visit(&self, &mut products);
        let mut merge = Merge { products: products.found, way: Way::default() };
        Module::<B>::map(self, &mut merge)
    }
}
