//! One layer of a model: a mixer, then an MLP, each with a norm before and a residual around.
//! ```text
//! x = x + mixer(canon(norm(x)))
//! x = x + mlp(canon(norm(x)))          canon(h) = h + conv(h), where asked for
//! ```

use super::canon::{Canon, CanonConfig, canon};
use super::convolution::Tails;
use super::layers::{Norm, NormKind};
use super::mixers::{Mixer, MixerConfig, MixerState};
use super::mlp::{Mlp, MlpConfig};
use super::model::Start;
use super::residual::Residual;
use super::{ConfigError, Cost, Shared};
use crate::ops::LinearAttentionBackend;
use burn::module::Module;
use burn::tensor::{Tensor, backend::Backend};
use serde::{Deserialize, Serialize};

/// Parts of a layer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerConfig {
    /// How many such layers stand in a row.
    #[serde(default = "one")]
    pub repeat: usize,
    /// The token mixer.
    pub mixer: MixerConfig,
    /// The channel mixer that follows the mixer.
    #[serde(default)]
    pub mlp: MlpConfig,
    /// Short convolutions before the mixer and in the MLP.
    #[serde(default, skip_serializing_if = "CanonConfig::is_none")]
    pub canon: CanonConfig,
}

/// A layer that is not repeated.
pub(super) fn one() -> usize {
    1
}

/// State of a layer between two tokens.
#[derive(Debug, Clone)]
pub struct BlockState<B: Backend> {
    /// The mixer's.
    pub mixer: MixerState<B>,
    /// The last inputs of the convolution before the mixer, `[B, W - 1, D]`, of the one before the
    /// MLP, and what the MLP itself saw last: of each convolution inside it, `[B, W - 1, width]`, or
    /// the last token, `[B, 1, D]`. Of those that there are.
    pub tails: Vec<Tensor<B, 3>>,
}

/// A mixer and an MLP, each with a norm before and a residual around. `D -> D`.
#[derive(Module, Debug)]
pub struct Block<B: Backend> {
    attn_norm: Norm<B>,
    attn: Mixer<B>,
    mlp: Option<Mlp<B>>,
    canon: Canon<B>,
}

impl LayerConfig {
    /// Checks every key, in a model of width `d_model` (`repeat` is the model's affair).
    /// # Errors
    /// [`ConfigError`] names the first key that does not fit.
    pub fn check(&self, d_model: usize) -> Result<(), ConfigError> {
        self.mixer.check(d_model).map_err(|e| e.within("mixer"))?;
        self.mlp.inner(d_model)?;
        self.canon.points(&self.mlp, d_model).map(drop)
    }

    /// Builds one such layer.
    /// # Errors
    /// As [`check`](Self::check).
    pub fn init<B: LinearAttentionBackend>(
        &self,
        d_model: usize,
        norm: NormKind,
        norm_eps: f64,
        device: &B::Device,
    ) -> Result<Block<B>, ConfigError> {
        let new_norm = || Norm::new(norm, d_model, norm_eps, device);
        Ok(Block {
            attn_norm: new_norm(),
            attn: self.mixer.init(d_model, device).map_err(|e| e.within("mixer"))?,
            mlp: self.mlp.init(d_model, new_norm, device)?,
            canon: self.canon.init(&self.mlp, d_model, device)?,
        })
    }

    /// Cost of one such layer.
    /// # Errors
    /// As [`init`](Self::init).
    pub fn cost(&self, d_model: usize, length: usize) -> Result<Cost, ConfigError> {
        let mut cost = self.mixer.cost(d_model, length).map_err(|e| e.within("mixer"))?;
        cost += self.mlp.cost(d_model)?;
        cost += self.canon.cost(&self.mlp, d_model)?;
        Ok(cost)
    }
}

impl<B: LinearAttentionBackend> Block<B> {
    /// The same layer with its linear layers started.
    pub(super) fn started(self, start: &Start) -> Self {
        let (attn, mlp) = (start.mixer(self.attn), self.mlp.map(|mlp| start.usual(mlp)));
        Self { attn, mlp, ..self }
    }

    /// Its mixer.
    pub fn mixer(&self) -> &Mixer<B> {
        &self.attn
    }

    /// Whole sequences: `x` is `[B, T, D]`; gives `[B, T, D]` and the state after token T. What layers
    /// read of one another comes and goes by `shared`, which starts empty before the first layer.
    /// # Panics
    /// If `state` is another kind of mixer's, or `shared` lacks what the mixer reads.
    pub fn forward(
        &self,
        x: Tensor<B, 3>,
        state: Option<BlockState<B>>,
        shared: &mut Shared<B>,
    ) -> (Tensor<B, 3>, BlockState<B>) {
        let (x, state) = self.run(Residual::new(x), state, shared);
        (x.sum(), state)
    }

    /// One token: `x` is `[B, D]`; gives `[B, D]` and the next state.
    /// # Panics
    /// As [`forward`](Self::forward).
    pub fn step(
        &self,
        x: Tensor<B, 2>,
        state: Option<BlockState<B>>,
        shared: &mut Shared<B>,
    ) -> (Tensor<B, 2>, BlockState<B>) {
        let (x, state) = self.forward(x.unsqueeze_dim(1), state, shared);
        (x.squeeze_dim(1), state)
    }

    /// As [`forward`](Self::forward); the layer's last output waits for the next norm.
    pub(super) fn run(
        &self,
        x: Residual<B>,
        state: Option<BlockState<B>>,
        shared: &mut Shared<B>,
    ) -> (Residual<B>, BlockState<B>) {
        let (mixer, before) = match state {
            Some(state) => (Some(state.mixer), state.tails),
            None => (None, vec![]),
        };
        let mut tails = Tails::after(before);
        let (h, x) = x.normalized(&self.attn_norm, self.attn.takes_bf16());
        let h = canon(self.canon.before_mixer.as_ref(), h, &mut tails);
        let (y, mixer) = self.attn.forward_shared(h, mixer, shared);
        let mut x = x.plus(y);
        if let Some(mlp) = &self.mlp {
            let (h, sum) = x.normalized(mlp.norm(), true);
            let y = mlp.forward(h, &self.canon, &mut tails);
            x = sum.plus(y);
        }
        (x, BlockState { mixer, tails: tails.into_next() })
    }
}
