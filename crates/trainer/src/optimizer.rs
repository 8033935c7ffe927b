//! AdamW over a model's weights: its state by their names, its groups, and its file.

use crate::config::{AdamWConfig, WeightDecay};
use crate::learner::Learner;
use crate::weights::is_variant;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::ops::FloatTensor;
use burn::tensor::{DType, Shape, Tensor, TensorData, TensorMetadata, TensorPrimitive};
use linattn::backend::TrainBackend;
use linattn::nn::ParamKind;
use linattn::ops::{AdamW, AdamWStep, Clip, Moments, adamw_step, global_norm};
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use std::collections::{BTreeMap, HashMap};
use std::path::Path;

type Inner<B> = <B as AutodiffBackend>::InnerBackend;
type InnerTensor<B> = FloatTensor<Inner<B>>;

/// AdamW. Weights that customarily do not decay are left alone where the config says so.
pub struct Optimizer<B: TrainBackend> {
    config: AdamWConfig,
    /// By a weight's name.
    moments: BTreeMap<String, Moments<InnerTensor<B>>>,
    /// Shapes of the parts of the first step.
    usual: Option<Vec<[usize; 3]>>,
}

/// A weight and its gradient.
struct Slot<B: TrainBackend> {
    id: ParamId,
    name: String,
    decays: bool,
    weight: InnerTensor<B>,
    gradient: InnerTensor<B>,
}

impl<B: TrainBackend> Optimizer<B> {
    /// A fresh optimizer.
    pub fn new(config: &AdamWConfig) -> Self {
        Self { config: config.clone(), moments: BTreeMap::new(), usual: None }
    }

    /// Whether the parts of a step have the shapes of the first step's.
    pub(crate) fn is_usual(&mut self, shapes: &[[usize; 3]]) -> bool {
        self.usual.get_or_insert_with(|| shapes.to_vec()) == shapes
    }

    /// One step, and the global gradient norm before it. The gradient is scaled down to `longest`, if it
    /// is longer: over all weights together, which keeps its direction. Nothing is read back.
    /// # Panics
    /// If there is no gradient.
    pub fn step(
        &mut self,
        learning_rate: f64,
        learner: Learner<B>,
        gradients: GradientsParams,
        longest: Option<f64>,
    ) -> (Learner<B>, Tensor<Inner<B>, 1>) {
        let slots = slots(&learner, gradients);
        let norm = global_norm::<Inner<B>>(slots.iter().map(|s| s.gradient.clone()).collect());
        let clip = longest.map(|longest| Clip { norm: norm.clone(), longest });
        let numbers = AdamW {
            learning_rate,
            beta_1: self.config.beta_1,
            beta_2: self.config.beta_2,
            epsilon: self.config.epsilon,
        };
        let all = matches!(self.config.decay, WeightDecay::All);
        let (mut steps, mut places) = (vec![], vec![]);
        for Slot { id, name, decays, weight, gradient } in slots {
            let decay = if all || decays { self.config.weight_decay } else { 0.0 };
            let moments = self.moments.remove(&name);
            steps.push(AdamWStep { parameter: weight, gradient, moments, decay });
            places.push((id, name));
        }
        let mut updated = HashMap::new();
        let done = adamw_step::<Inner<B>>(steps, numbers, clip);
        for ((id, name), (weight, moments)) in places.into_iter().zip(done) {
            updated.insert(id, weight);
            self.moments.insert(name, moments);
        }
        let learner = Module::<B>::map(learner, &mut Replace::<B>(updated));
        (learner, Tensor::from_primitive(TensorPrimitive::Float(norm)))
    }

    /// Writes its state to a safetensors file.
    pub fn save(&self, path: &Path) -> Result<(), String> {
        let mut tensors = vec![];
        for (name, Moments { first, second, time }) in &self.moments {
            for (kind, tensor) in [("first", first), ("second", second)] {
                let shape: Vec<usize> = tensor.shape().iter().copied().collect();
                tensors.push((format!("{kind}/{name}"), shape, bytes::<Inner<B>>(tensor.clone())?));
            }
            tensors.push((format!("time/{name}"), vec![1], (*time as f32).to_le_bytes().to_vec()));
        }
        let mut views = vec![];
        for (name, shape, bytes) in &tensors {
            let view = TensorView::new(Dtype::F32, shape.clone(), bytes);
            views.push((name.as_str(), view.map_err(|e| format!("{name}: {e}"))?));
        }
        let metadata = HashMap::from([("format".to_string(), "linattn".to_string())]);
        let file = safetensors::serialize(views, Some(metadata)).map_err(|e| e.to_string())?;
        std::fs::write(path, file).map_err(|e| e.to_string())
    }

    /// An optimizer with the state of a file that [`save`](Self::save) wrote, for the weights of
    /// `learner`.
    pub fn load(
        config: &AdamWConfig,
        learner: &Learner<B>,
        path: &Path,
        device: &B::Device,
    ) -> Result<Self, String> {
        let file = std::fs::read(path).map_err(|e| e.to_string())?;
        let tensors = SafeTensors::deserialize(&file).map_err(|e| {
            format!("{e}; optimizer states of linattn before 0.2 are no safetensors files")
        })?;
        let mut moments = BTreeMap::new();
        // Before the first step there is no state; after it every weight that learns has one.
        let weights = if tensors.is_empty() { vec![] } else { names(learner) };
        for (name, shape) in weights {
            let one = |kind: &str| -> Result<Vec<f32>, String> {
                let key = format!("{kind}/{name}");
                let found = tensors.tensor(&key).map_err(|_| format!("{key} is missing"))?;
                let want = if kind == "time" { vec![1] } else { shape.clone() };
                if found.dtype() != Dtype::F32 || found.shape() != want {
                    return Err(format!("{key} is {:?}, not {want:?} in F32", found.shape()));
                }
                let four = |b: &[u8]| f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
                Ok(found.data().chunks_exact(4).map(four).collect())
            };
            let tensor =
                |kind: &str| one(kind).map(|values| upload::<Inner<B>>(values, &shape, device));
            let (first, second) = (tensor("first")?, tensor("second")?);
            let time = one("time")?[0] as u32;
            moments.insert(name.clone(), Moments { first, second, time });
        }
        if let Some(name) = tensors.names().into_iter().find(|name| !belongs(name, &moments)) {
            return Err(format!("{name} is of no weight of the model"));
        }
        Ok(Self { config: config.clone(), moments, usual: None })
    }
}

fn belongs<T>(name: &str, moments: &BTreeMap<String, Moments<T>>) -> bool {
    name.split_once('/').is_some_and(|(_, weight)| moments.contains_key(weight))
}

fn bytes<B: Backend>(tensor: FloatTensor<B>) -> Result<Vec<u8>, String> {
    let numbers = tensor.shape().num_elements();
    let flat = B::float_reshape(tensor, Shape::from([numbers]));
    let data = Tensor::<B, 1>::from_primitive(TensorPrimitive::Float(flat))
        .try_into_data()
        .map_err(|e| format!("{e:?}"))?;
    Ok(data.iter::<f32>().flat_map(f32::to_le_bytes).collect())
}

fn upload<B: Backend>(values: Vec<f32>, shape: &[usize], device: &B::Device) -> FloatTensor<B> {
    B::float_from_data(TensorData::new(values, shape.to_vec()).convert_dtype(DType::F32), device)
}

/// Calls `each` with every weight that learns, its name, which says nothing of kinds of mixers, and its kind.
fn visit<B: TrainBackend>(learner: &Learner<B>, each: &mut dyn Each<B>) {
    struct Walk<'a, B: TrainBackend> {
        path: Vec<String>,
        kind: ParamKind,
        each: &'a mut dyn Each<B>,
    }
    impl<B: TrainBackend> ModuleVisitor<B> for Walk<'_, B> {
        fn enter_module(&mut self, name: &str, container: &str) {
            self.kind = ParamKind::of(container, name);
            if !is_variant(container) {
                self.path.push(name.to_string());
            }
        }
        fn exit_module(&mut self, _name: &str, container: &str) {
            if !is_variant(container) {
                self.path.pop();
            }
        }
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            let value = param.val();
            if value.is_require_grad() {
                let weight = value.inner().into_primitive().tensor();
                self.each.weight(&self.path, param.id, self.kind, weight);
            }
        }
    }
    // The model alone: a file says nothing of what trains it.
    let mut walk = Walk { path: vec![], kind: ParamKind::Vector, each };
    Module::<B>::visit(&learner.model, &mut walk);
}

trait Each<B: TrainBackend> {
    fn weight(&mut self, path: &[String], id: ParamId, kind: ParamKind, weight: InnerTensor<B>);
}

impl<B: TrainBackend, F: FnMut(&[String], ParamId, ParamKind, InnerTensor<B>)> Each<B> for F {
    fn weight(&mut self, path: &[String], id: ParamId, kind: ParamKind, weight: InnerTensor<B>) {
        self(path, id, kind, weight);
    }
}

/// Names and shapes of all weights that learn.
fn names<B: TrainBackend>(learner: &Learner<B>) -> Vec<(String, Vec<usize>)> {
    let mut found = vec![];
    let mut each = |path: &[String], _id: ParamId, _kind: ParamKind, weight: InnerTensor<B>| {
        found.push((path.join("."), weight.shape().iter().copied().collect()));
    };
    visit::<B>(learner, &mut each);
    found
}

/// Weights with a gradient.
fn slots<B: TrainBackend>(learner: &Learner<B>, gradients: GradientsParams) -> Vec<Slot<B>> {
    let mut gradients = take::<B>(learner, gradients);
    let mut slots = vec![];
    let mut each = |path: &[String], id: ParamId, kind: ParamKind, weight: InnerTensor<B>| {
        if let Some(gradient) = gradients.remove(&id) {
            let decays = kind == ParamKind::Matrix;
            slots.push(Slot { id, name: path.join("."), decays, weight, gradient });
        }
    };
    visit::<B>(learner, &mut each);
    slots
}

/// All gradients, whatever their rank.
fn take<B: TrainBackend>(
    learner: &Learner<B>,
    gradients: GradientsParams,
) -> HashMap<ParamId, InnerTensor<B>> {
    struct Take<B: TrainBackend>(GradientsParams, HashMap<ParamId, InnerTensor<B>>);
    impl<B: TrainBackend> ModuleVisitor<B> for Take<B> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            if let Some(gradient) = self.0.remove::<Inner<B>, D>(param.id) {
                self.1.insert(param.id, gradient.into_primitive().tensor());
            }
        }
    }
    let mut take = Take::<B>(gradients, HashMap::new());
    Module::<B>::visit(learner, &mut take);
    take.1
}

/// Puts new numbers in the place of weights.
struct Replace<B: TrainBackend>(HashMap<ParamId, InnerTensor<B>>);

impl<B: TrainBackend> ModuleMapper<B> for Replace<B> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let Some(new) = self.0.remove(&param.id) else { return param };
        let (id, old, mapper) = param.consume();
        let new = Tensor::<Inner<B>, D>::from_primitive(TensorPrimitive::Float(new));
        let new = Tensor::<B, D>::from_inner(new).set_require_grad(old.is_require_grad());
        Param::from_mapped_value(id, new, mapper)
    }
}

impl<B: TrainBackend> std::fmt::Debug for Optimizer<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Optimizer").field("weights", &self.moments.len()).finish()
    }
}
