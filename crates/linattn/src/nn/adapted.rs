//! Models with low-rank adapters: attached to projections, and merged into their weights.

use super::ConfigError;
use super::lora::{LoraConfig, LowRankAdapter, change_next};
use super::model::LanguageModel;
use super::parameter::is_projection;
use crate::ops::LinearAttentionBackend;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{Tensor, backend::Backend};
use std::collections::{BTreeMap, BTreeSet};

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
        (of_layer && is_projection(&self.container, last)).then(|| rest.join("."))
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
                change_next(Some(low));
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
        change_next::<B>(None);
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
