//! Weights of linear layers: parameters, or quantized once they only decode.

use super::parameter::is_projection;
use crate::ops::{self, LinearAttentionBackend, QuantizedMatrix, WeightBits};
use burn::module::{
    AutodiffModule, Content, EmptyRecord, HasAutodiffModule, Module, ModuleDisplay,
    ModuleDisplayDefault, ModuleMapper, ModuleVisitor, Param,
};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{DType, Tensor};

/// A weight `[from, to]`. To visitors, mappers and files it is the parameter that it holds.
///
/// A mapper that gives the weight's transpose, quantised by [`WeightBits`], quantises it: from then on it has no
/// parameter any more, cannot be learnt or saved, and answers only.
#[derive(Debug, Clone)]
pub struct Weight<B: Backend> {
    /// Of no numbers where the weight is quantized.
    param: Param<Tensor<B, 2>>,
    /// `[to, from]`.
    quantized: Option<QuantizedMatrix<B>>,
}

impl<B: Backend> Weight<B> {
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

    /// The matrix `[to, from]` in its place, if it is quantized.
    pub(crate) fn quantized(&self) -> Option<&QuantizedMatrix<B>> {
        self.quantized.as_ref()
    }

    /// The same, of a parameter that was changed by a mapper, of so many inputs.
    fn mapped(param: Param<Tensor<B, 2>>, from: usize) -> Self {
        // A weight that is still to be drawn is not drawn for this.
        if !param.is_initialized() {
            return param.into();
        }
        let transposed = param.val();
        if !matches!(transposed.dtype(), DType::QFloat(_)) {
            return param.into();
        }
        let device = transposed.device();
        let quantized = QuantizedMatrix::of_tensor(transposed, from)
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
    // Not zeros: CUDA takes no launch of no cubes.
    Param::from_mapped_value(id, Tensor::empty([0, 0], device), mapper)
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
            && let Some(y) = ops::quantized_linear(x.clone(), &[quantized])
        {
            return match bias {
                Some(bias) => y + ops::typed(bias, x.dtype()).unsqueeze(),
                None => y,
            };
        }
        let weight = self.val_in(x.dtype());
        ops::affine(x, weight, bias).expect("`x` has the width that the layer was made for")
    }

    /// Weights that read one input, side by side: floats, or quantized ones of the same bits and floats behind them;
    /// nothing for any others.
    pub(crate) fn side_by_side<'a>(weights: &[&'a Self]) -> Option<ops::Matrices<'a, B>> {
        let bits = |weight: &Self| weight.quantized.as_ref().map(QuantizedMatrix::bits);
        let first = weights.iter().take_while(|weight| weight.quantized.is_some()).count();
        let (quantized, floats) = weights.split_at(first);
        let alike = quantized.windows(2).all(|pair| bits(pair[0]) == bits(pair[1]));
        if !alike || floats.iter().any(|weight| weight.quantized.is_some()) {
            return None;
        }
        let floats = floats.iter().map(|weight| weight.val());
        let matrices: Vec<_> = quantized.iter().filter_map(|weight| weight.quantized()).collect();
        Some(match matrices.is_empty() {
            true => ops::Matrices::of_floats(floats),
            false => ops::Matrices::of_quantized(matrices, floats),
        })
    }

    /// `[from, to]`, dequantized where it is quantized.
    pub fn val(&self) -> Tensor<B, 2> {
        self.val_in(DType::F32)
    }

    /// As [`val`](Self::val), in this type where it is dequantized.
    fn val_in(&self, dtype: DType) -> Tensor<B, 2> {
        match &self.quantized {
            Some(quantized) => quantized.dequantize(dtype).transpose(),
            None => self.param.val(),
        }
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
        Self { param: self.param.fork(device), quantized: self.quantized.fork(device) }
    }

    fn to_device(self, device: &B::Device) -> Self {
        Self { param: self.param.to_device(device), quantized: self.quantized.to_device(device) }
    }

    fn visit<V: ModuleVisitor<B>>(&self, visitor: &mut V) {
        self.param.visit(visitor);
    }

    fn map<M: ModuleMapper<B>>(self, mapper: &mut M) -> Self {
        if self.quantized.is_some() {
            return self;
        }
        let from = self.param.lazy_shape()[0];
        Self::mapped(Module::<B>::map(self.param, mapper), from)
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
        Weight { param: self.param.valid(), quantized: self.quantized.valid() }
    }

    fn from_inner(module: Self::InnerModule) -> Self {
        let quantized = Option::from_inner(module.quantized);
        Self { param: Param::from_inner(module.param), quantized }
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

/// A quantized matrix has no parameters: mappers and records leave it as it is.
impl<B: Backend> Module<B> for QuantizedMatrix<B> {
    type Record = EmptyRecord;

    fn collect_devices(&self, devices: Vec<B::Device>) -> Vec<B::Device> {
        devices
    }

    fn fork(self, device: &B::Device) -> Self {
        self.moved(device)
    }

    fn to_device(self, device: &B::Device) -> Self {
        self.moved(device)
    }

    fn visit<V: ModuleVisitor<B>>(&self, _visitor: &mut V) {}

    fn map<M: ModuleMapper<B>>(self, _mapper: &mut M) -> Self {
        self
    }

    fn load_record(self, _record: Self::Record) -> Self {
        self
    }

    fn into_record(self) -> Self::Record {
        EmptyRecord::new()
    }
}

impl<B: AutodiffBackend> AutodiffModule<B> for QuantizedMatrix<B> {
    type InnerModule = QuantizedMatrix<B::InnerBackend>;

    fn valid(&self) -> Self::InnerModule {
        self.inner()
    }

    fn from_inner(module: Self::InnerModule) -> Self {
        Self::of_inner(module)
    }
}

impl<B: AutodiffBackend> HasAutodiffModule<B> for QuantizedMatrix<B::InnerBackend> {
    type TrainModule = QuantizedMatrix<B>;
}

impl<B: Backend> ModuleDisplayDefault for QuantizedMatrix<B> {
    fn content(&self, content: Content) -> Option<Content> {
        let [rows, columns] = self.size();
        let bits = self.bits().count();
        content.add_formatted(&format!("[{rows}, {columns}] of {bits} bits")).optional()
    }
}

impl<B: Backend> ModuleDisplay for QuantizedMatrix<B> {}

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
        let is_layer = self.place.last().is_some_and(|(name, holder)| is_projection(holder, name));
        matches!(shape, &[from, to] if ops::quantizes(from) && to >= LEAST_OUTPUTS) && is_layer
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
        let quantized = ops::quantized_tensor(transposed, self.bits);
        Param::from_mapped_value(id, quantized, mapper)
    }
}
