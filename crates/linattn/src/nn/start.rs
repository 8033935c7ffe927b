//! The start of a model's linear layers.

use super::layers::{InitializerKind, torch_uniform};
use super::mixers::{Mixer, Stack};
use crate::ops::LinearAttentionBackend;
use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{Tensor, backend::Backend};

/// Start of the linear layers of a model. They are built with weights N(0, 0.02^2), or on a scale of their
/// own.
pub(super) struct Start {
    pub(super) initializer: InitializerKind,
    /// Factor of normal weights.
    pub(super) scale: f64,
    /// None where projections into the residual stream are as any other.
    pub(super) stack: Option<Stack>,
}

impl Start {
    /// Layers that start as the model says.
    pub(super) fn usual<B: Backend, M: Module<B>>(&self, module: M) -> M {
        let shrink = self.stack.map_or(1.0, |stack| (stack.writes as f64).powf(-0.5));
        module.map(&mut StartMapper { start: self, own_scale: false, shrink, place: vec![] })
    }

    /// A mixer, which may start on a scale of its own.
    pub(super) fn mixer<B: LinearAttentionBackend>(&self, mixer: Mixer<B>) -> Mixer<B> {
        let shrink = self.stack.map_or(1.0, |stack| mixer.shrink(stack));
        let own_scale = mixer.scales_itself();
        mixer.map(&mut StartMapper { start: self, own_scale, shrink, place: vec![] })
    }
}

/// Gives linear layers their start.
struct StartMapper<'a> {
    start: &'a Start,
    /// Whether all of them have a scale of their own.
    own_scale: bool,
    /// Factor of weights that write to the residual stream.
    shrink: f64,
    /// Names, and the containers that they stand in.
    place: Vec<(String, String)>,
}

impl StartMapper<'_> {
    fn matrix<B: Backend, const D: usize>(&self, fresh: Tensor<B, D>) -> Tensor<B, D> {
        match self.start.initializer {
            _ if self.own_scale => fresh,
            InitializerKind::Normal => fresh * self.start.scale,
            InitializerKind::Torch => torch_uniform(&fresh),
        }
    }
}

impl<B: Backend> ModuleMapper<B> for StartMapper<'_> {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.place.push((name.to_string(), container.to_string()));
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.place.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let place = self.place.last().map(|(name, holder)| (name.as_str(), holder.as_str()));
        let factor = match place {
            Some(("weight", "Struct:ResidualLinear")) => self.shrink,
            Some(("weight", "Struct:Linear")) if !self.own_scale => 1.0,
            _ => return param,
        };
        // The product is no leaf of the autodiff graph any more, and would not be learnt.
        param.map(|fresh| (self.matrix(fresh) * factor).detach().require_grad())
    }
}
