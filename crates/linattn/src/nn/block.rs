//! One layer of a model. Formula and shapes: [`Block`].

use super::canon::{Canon, CanonConfig, canon};
use super::convolution::ConvPast;
use super::layers::{Norm, NormKind};
use super::mixer_input::MixerInput;
use super::mixers::{Mixer, MixerConfig, MixerState};
use super::mlp::{Mlp, MlpConfig};
use super::residual::Residual;
use super::start::Start;
use super::{ConfigError, Cost, Kept, KeptTensors, Shared};
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
    /// Whether norms stand behind mixer and MLP, before their outputs are added, and not before them.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub post_norm: bool,
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
    pub conv_states: KeptTensors<B>,
}

/// One layer of a model: a mixer, then an MLP, each with a norm before and a residual around.
///
/// ```text
/// x = x + mixer(canon(norm(x)))
/// x = x + mlp(canon(norm(x)))          canon(h) = h + conv(h), where asked for
///
/// x = x + norm(mixer(canon(x)))        with `post_norm`: the norm behind, arXiv 2501.00656
/// x = x + norm(mlp(canon(x)))
/// ```
/// Either part may be missing.
/// # Shapes
/// Input and output are `[B, T, D]`, of one token `[B, D]`. The state is a [`BlockState`]: the mixer's, and
/// `conv_states` of the convolutions around it.
/// # Errors
/// [`LayerConfig::init`] gives a [`ConfigError`] with the first key that does not fit.
#[derive(Module, Debug)]
pub struct Block<B: Backend> {
    attn_norm: Option<Norm<B>>,
    attn: Option<Mixer<B>>,
    mlp: Option<Mlp<B>>,
    canon: Canon<B>,
    #[module(skip)]
    post_norm: bool,
}

impl LayerConfig {
    /// Checks every key, in a model of width `d_model` (`repeat` is the model's affair).
    /// # Errors
    /// [`ConfigError`] names the first key that does not fit.
    pub fn check(&self, d_model: usize) -> Result<(), ConfigError> {
        self.mixer.check(d_model).map_err(|e| e.within("mixer"))?;
        let channels = self.mlp.channels(d_model)?;
        if self.mixer == MixerConfig::None {
            self.check_alone()?;
        }
        self.canon.points(channels).map(drop)
    }

    /// Checks a layer without a mixer.
    fn check_alone(&self) -> Result<(), ConfigError> {
        if self.mlp == MlpConfig::None {
            return Err(ConfigError::new("mixer", "none", "a mixer, where `mlp` is \"none\" too"));
        }
        match self.canon.before_mixer {
            0 => Ok(()),
            given => {
                let want = "0 where `mixer` is \"none\"";
                Err(ConfigError::new("before_mixer", given, want).within("canon"))
            }
        }
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
        let attn = match &self.mixer {
            MixerConfig::None => None,
            mixer => Some(mixer.init(d_model, device).map_err(|e| e.within("mixer"))?),
        };
        Ok(Block {
            attn_norm: attn.is_some().then(new_norm),
            attn,
            mlp: self.mlp.init(d_model, new_norm, device)?,
            canon: self.canon.init(self.mlp.channels(d_model)?, device)?,
            post_norm: self.post_norm,
        })
    }

    /// Cost of one such layer.
    /// # Errors
    /// As [`init`](Self::init).
    pub fn cost(&self, d_model: usize, length: usize) -> Result<Cost, ConfigError> {
        let mut cost = self.mixer.cost(d_model, length).map_err(|e| e.within("mixer"))?;
        cost += self.mlp.cost(d_model)?;
        cost += self.canon.cost(self.mlp.channels(d_model)?)?;
        Ok(cost)
    }
}

impl<B: LinearAttentionBackend> Block<B> {
    /// The same layer with its linear layers started.
    pub(super) fn started(self, start: &Start) -> Self {
        let attn = self.attn.map(|mixer| start.mixer(mixer));
        let mlp = self.mlp.map(|mlp| start.usual(mlp));
        Self { attn, mlp, ..self }
    }

    /// Its mixer, where it has one.
    pub fn mixer(&self) -> Option<&Mixer<B>> {
        self.attn.as_ref()
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
            Some(state) => (Some(state.mixer), state.conv_states),
            None => (None, KeptTensors::default()),
        };
        let mut conv_states = ConvPast::after(before).among(shared);
        let (mut x, mut mixed) = (x, MixerState::nothing());
        if let (Some(norm), Some(attn)) = (&self.attn_norm, &self.attn) {
            let mut input = self.mixer_input(x, norm, attn.takes_bf16(), &mut conv_states);
            let (y, next) = attn.forward_input(&mut input, mixer, shared);
            (x, mixed) = (self.write(input.into_stream(), norm, y), next);
        }
        if let Some(mlp) = &self.mlp {
            x = match self.folded(&x, mlp) {
                Some(x) => x,
                None => {
                    let (h, sum) = self.read(x, mlp.norm(), true);
                    let y = mlp.forward(h, &self.canon, &mut conv_states);
                    self.write(sum, mlp.norm(), y)
                }
            };
        }
        (x, BlockState { mixer: mixed, conv_states: conv_states.into_next() })
    }

    /// The mixer's input: the stream before its norm, or rows where a Canon layer or no norm stands between.
    fn mixer_input<'a>(
        &self,
        x: Residual<B>,
        norm: &'a Norm<B>,
        narrow: bool,
        conv_states: &mut ConvPast<B>,
    ) -> MixerInput<'a, B> {
        let convolution = self.canon.before_mixer.as_ref();
        if !self.post_norm && convolution.is_none() {
            return MixerInput::normalized(x, norm, narrow);
        }
        let (h, sum) = self.read(x, norm, narrow);
        MixerInput::made((canon(convolution, h, Kept::CanonMixer, conv_states), sum))
    }

    /// The stream behind the MLP, where a backend has its norm and it at once.
    fn folded(&self, x: &Residual<B>, mlp: &Mlp<B>) -> Option<Residual<B>> {
        if self.post_norm {
            return None;
        }
        let (y, sum) = x.read_by(|stream, addend| mlp.folded(stream, addend, &self.canon))?;
        Some(sum.plus(y))
    }

    /// Input of a part, and the stream that its output is added to.
    fn read(&self, x: Residual<B>, norm: &Norm<B>, narrow: bool) -> (Tensor<B, 3>, Residual<B>) {
        match self.post_norm {
            true => x.summed(narrow),
            false => x.normalized(norm, narrow),
        }
    }

    /// The stream with the output of a part.
    fn write(&self, x: Residual<B>, norm: &Norm<B>, y: Tensor<B, 3>) -> Residual<B> {
        match self.post_norm {
            true => x.plus(norm.forward(y)),
            false => x.plus(y),
        }
    }
}
