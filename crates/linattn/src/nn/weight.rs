//! Weights of linear layers: parameters, or quantized once they only decode.

use crate::ops::{self, LinearAttentionBackend, QuantizedMatrix, WeightBits};
use burn::module::{
    AutodiffModule, Content, HasAutodiffModule, Module, ModuleDisplay, ModuleDisplayDefault,
    ModuleMapper, ModuleVisitor, Param,
};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{Tensor, TensorPrimitive};

/// A weight `[from, to]`. To visitors, mappers and files it is the parameter that it holds.
///
/// A mapper that gives the weight's transpose, quantised by [`WeightBits`], quantises it: from then on it has no
/// parameter any more, cannot be learnt or saved, and answers only.
#[derive(Debug, Clone)]
pub struct Weight<B: Backend> {
    /// Of no numbers where the weight is quantized.
    param: Param<Tensor<B, 2>>,
    /// `[to, from]`.
    quantized: Option<QuantizedMatrix>,
}

impl<B: Backend> Weight<B> {
    /// `[from, to]`, dequantized where it is quantized.
    pub fn val(&self) -> Tensor<B, 2> {
        match &self.quantized {
            Some(quantized) => quantized.dequantize(&self.param.val().device()).transpose(),
            None => self.param.val(),
        }
    }

    /// `[from, to]`.
    pub fn dims(&self) -> [usize; 2] {
        match &self.quantized {
            Some(quantized) => {
                let [to, from] = quantized.size();
                [from, to]
            }
            None => self.param.dims(),
        }
    }

    /// Whether it is quantized.
    pub fn is_quantized(&self) -> bool {
        self.quantized.is_some()
    }

    /// The same, of a parameter that was changed by a mapper.
    fn mapped(param: Param<Tensor<B, 2>>) -> Self {
        // A weight that is still to be drawn is not drawn for this.
        if !param.is_initialized() {
            return param.into();
        }
        let value = param.val().into_primitive();
        let TensorPrimitive::QFloat(quantized) = value else { return param.into() };
        let transposed = Tensor::<B, 2>::from_primitive(TensorPrimitive::QFloat(quantized));
        let device = transposed.device();
        let quantized = QuantizedMatrix::of_quantized(transposed.into_data())
            .expect("weights are quantised as `WeightBits` says");
        Self { param: nothing(param, &device), quantized: Some(quantized) }
    }
}

/// The same parameter without numbers.
pub(crate) fn nothing<B: Backend>(
    param: Param<Tensor<B, 2>>,
    device: &B::Device,
) -> Param<Tensor<B, 2>> {
    let (id, _, mapper) = param.consume();
    Param::from_mapped_value(id, Tensor::zeros([0, 0], device), mapper)
}

impl<B: LinearAttentionBackend> Weight<B> {
    /// `x W + bias` over the last dimension of `x`.
    /// # Panics
    /// If `x` is not as wide as the weight.
    pub(crate) fn affine<const D: usize>(
        &self,
        x: Tensor<B, D>,
        bias: Option<Tensor<B, 1>>,
    ) -> Tensor<B, D> {
        if let Some(quantized) = &self.quantized
            && let Some(y) = ops::quantized_linear(x.clone(), quantized)
        {
            return match bias {
                Some(bias) => y + ops::typed(bias, x.dtype()).unsqueeze(),
                None => y,
            };
        }
        ops::affine(x, self.val(), bias).expect("`x` has the width that the layer was made for")
    }
}

impl<B: Backend> From<Param<Tensor<B, 2>>> for Weight<B> {
    fn from(param: Param<Tensor<B, 2>>) -> Self {
        Self { param, quantized: None }
    }
}

impl<B: Backend> Module<B> for Weight<B> {
    type Record = <Param<Tensor<B, 2>> as Module<B>>::Record;

    fn collect_devices(&self, devices: Vec<B::Device>) -> Vec<B::Device> {
        self.param.collect_devices(devices)
    }

    fn fork(self, device: &B::Device) -> Self {
        Self { param: self.param.fork(device), ..self }
    }

    fn to_device(self, device: &B::Device) -> Self {
        Self { param: self.param.to_device(device), ..self }
    }

    fn visit<V: ModuleVisitor<B>>(&self, visitor: &mut V) {
        self.param.visit(visitor);
    }

    fn map<M: ModuleMapper<B>>(self, mapper: &mut M) -> Self {
        if self.quantized.is_some() {
            return self;
        }
        Self::mapped(Module::<B>::map(self.param, mapper))
    }

    fn load_record(self, record: Self::Record) -> Self {
        Self::from(self.param.load_record(record))
    }

    fn into_record(self) -> Self::Record {
        self.param.into_record()
    }
}

impl<B: AutodiffBackend> AutodiffModule<B> for Weight<B> {
    type InnerModule = Weight<B::InnerBackend>;

    fn valid(&self) -> Self::InnerModule {
        Weight { param: self.param.valid(), quantized: self.quantized.clone() }
    }

    fn from_inner(module: Self::InnerModule) -> Self {
        Self { param: Param::from_inner(module.param), quantized: module.quantized }
    }
}

impl<B: AutodiffBackend> HasAutodiffModule<B> for Weight<B::InnerBackend> {
    type TrainModule = Weight<B>;
}

impl<B: Backend> ModuleDisplayDefault for Weight<B> {
    fn content(&self, content: Content) -> Option<Content> {
        self.param.content(content)
    }
}

impl<B: Backend> ModuleDisplay for Weight<B> {}

/// Quantises the weights of linear layers that are wide enough to be worth it; gates of a few numbers stay.
pub(crate) struct WeightQuantizer {
    bits: WeightBits,
    /// Names, and the containers that they stand in.
    place: Vec<(String, String)>,
}

/// Outputs of a layer that is worth quantising.
const LEAST_OUTPUTS: usize = 32;

impl WeightQuantizer {
    pub(crate) fn new(bits: WeightBits) -> Self {
        Self { bits, place: vec![] }
    }

    fn quantises(&self, shape: &[usize]) -> bool {
        let is_layer = self.place.last().is_some_and(|(name, holder)| {
            name == "weight"
                && ["Struct:Linear", "Struct:ResidualLinear", "Struct:ScaledLinear"]
                    .contains(&holder.as_str())
        });
        matches!(shape, &[from, to] if QuantizedMatrix::takes(from) && to >= LEAST_OUTPUTS)
            && is_layer
    }
}

impl<B: Backend> ModuleMapper<B> for WeightQuantizer {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.place.push((name.to_string(), container.to_string()));
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.place.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        if !self.quantises(&param.dims()) {
            return param;
        }
        let (id, weight, mapper) = param.consume();
        let transposed = weight.detach().swap_dims(0, 1);
        let quantized = transposed.quantize_dynamic(&self.bits.scheme());
        Param::from_mapped_value(id, quantized, mapper)
    }
}
