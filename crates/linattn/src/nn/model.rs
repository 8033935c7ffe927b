//! A language model: token embedding, layers, norm, and logits over the vocabulary.

use super::auto_encoder::Decoder;
use super::block::{Block, BlockState, LayerConfig, LayerEntry, Residual};
use super::layers::{INIT_STD, Linear, Norm, NormKind, check_epsilon, linear, linear_with_bias};
use super::shared::{Shared, Sources};
use super::{ConfigError, Cost, LARGEST, positive};
use crate::ops::{self, LinearAttentionBackend};
use burn::module::{Initializer, Module, ModuleMapper, ModuleVisitor, Param};
use burn::nn::{Dropout, DropoutConfig, Embedding, EmbeddingConfig};
use burn::tensor::{DType, Int, Tensor, backend::Backend};
use serde::{Deserialize, Serialize};

/// A language model, as TOML spells it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LanguageModelConfig {
    /// D, width of the residual stream.
    pub d_model: usize,
    /// The layers, first to last.
    pub layers: Vec<LayerEntry>,
    /// Whether logits come from the embedding's own weights.
    #[serde(default = "yes")]
    pub tie_embeddings: bool,
    /// Whether a bias is added to the logits; only where embeddings are not tied.
    #[serde(default)]
    pub head_bias: bool,
    /// Source of the logits.
    #[serde(default)]
    pub head: HeadKind,
    /// The norm before mixers, MLPs and logits.
    #[serde(default)]
    pub norm: NormKind,
    /// Whether such a norm also stands between the embedding and the first layer, as in RWKV.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub pre_norm: bool,
    /// Added to a variance before its root.
    #[serde(default = "small")]
    pub norm_eps: f64,
    /// Standard deviation of fresh weights, embeddings and short convolutions aside (0.02 and
    /// 1 / sqrt(window)), and what a mixer draws on a scale of its own: see its file. Narrow models
    /// learn sooner with more than the customary 0.02.
    #[serde(default = "customary")]
    pub initializer_range: f64,
    /// Share of the embedded values that training sets to zero.
    #[serde(default)]
    pub embedding_dropout: f64,
}

/// Source of the logits of a position.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HeadKind {
    /// The layers' output at that position.
    #[default]
    Position,
    /// The layers' output at the last position alone, and the position's number: the sequence has to fit
    /// into one vector. Source: MAD, arXiv 2403.17844.
    AutoEncoder,
}

fn yes() -> bool {
    true
}

fn customary() -> f64 {
    INIT_STD
}

fn small() -> f64 {
    1e-5
}

impl LanguageModelConfig {
    /// Each layer with the key it stands under, repeated ones repeated.
    pub fn each_layer(&self) -> impl Iterator<Item = (String, &LayerConfig)> {
        let entries = self.layers.iter().enumerate();
        entries.flat_map(|(i, entry)| entry.each_layer(format!("layers[{i}]")))
    }

    /// How many layers there are, repeated ones counted.
    pub fn depth(&self) -> usize {
        self.layers.iter().fold(0, |sum, entry| sum.saturating_add(entry.depth()))
    }

    /// Checks what needs no device.
    fn check(&self) -> Result<(), ConfigError> {
        positive("d_model", self.d_model)?;
        check_epsilon(self.norm_eps)?;
        if self.layers.is_empty() {
            return Err(ConfigError::new("layers", "empty", "at least one [[layers]]"));
        }
        for (i, entry) in self.layers.iter().enumerate() {
            entry.check().map_err(|e| e.within(format!("layers[{i}]")))?;
        }
        if self.depth() > LARGEST {
            let got = format!("{} layers in all", self.depth());
            return Err(ConfigError::new("layers", got, format!("at most {LARGEST}")));
        }
        if !(self.initializer_range > 0.0 && self.initializer_range.is_finite()) {
            return Err(ConfigError::new("initializer_range", self.initializer_range, "above 0"));
        }
        if self.head_bias && self.tie_embeddings {
            let want = "false, unless tie_embeddings is false";
            return Err(ConfigError::new("head_bias", true, want));
        }
        if self.head == HeadKind::AutoEncoder
            && (!self.d_model.is_multiple_of(2) || self.d_model < 4)
        {
            return Err(ConfigError::new(
                "d_model",
                self.d_model,
                "even and at least 4 for the head `auto_encoder`",
            ));
        }
        if !(0.0..1.0).contains(&self.embedding_dropout) {
            let want = "at least 0 and below 1";
            return Err(ConfigError::new("embedding_dropout", self.embedding_dropout, want));
        }
        Ok(())
    }

    /// Builds the model for ids 0 to `vocab` - 1. Weights that write to the residual stream start
    /// smaller by the root of the number of writes, so that the stream does not grow with depth.
    /// # Errors
    /// [`ConfigError`] names the first key that does not fit.
    pub fn init<B: LinearAttentionBackend>(
        &self,
        vocab: usize,
        device: &B::Device,
    ) -> Result<LanguageModel<B>, ConfigError> {
        self.cost(1)?; // every check of every layer, before anything is allocated
        let layers = self
            .each_layer()
            .map(|(key, layer)| {
                layer
                    .init(self.d_model, self.norm, self.norm_eps, device)
                    .map_err(|e| e.within(key))
            })
            .collect::<Result<Vec<_>, _>>()?;
        let residual_writes = 2 * layers.len();
        let model = LanguageModel {
            embeddings: EmbeddingConfig::new(vocab, self.d_model)
                .with_initializer(Initializer::Normal { mean: 0.0, std: INIT_STD })
                .init(device),
            dropout: DropoutConfig::new(self.embedding_dropout).init(),
            pre_norm: self
                .pre_norm
                .then(|| Norm::new(self.norm, self.d_model, self.norm_eps, device)),
            layers,
            norm: Norm::new(self.norm, self.d_model, self.norm_eps, device),
            lm_head: (!self.tie_embeddings).then(|| match self.head_bias {
                true => linear_with_bias(self.d_model, vocab, device),
                false => linear(self.d_model, vocab, device),
            }),
            decoder: (self.head == HeadKind::AutoEncoder)
                .then(|| Decoder::new(self.d_model, self.norm, self.norm_eps, device)),
            precision: None,
        };
        let linear = self.initializer_range / INIT_STD;
        let residual = linear / (residual_writes as f64).sqrt();
        Ok(model.map(&mut Rescale { linear, residual, path: vec![] }))
    }

    /// Cost of the layers over sequences of `length` tokens, embedding and logits aside.
    /// # Errors
    /// As [`init`](Self::init).
    pub fn cost(&self, length: usize) -> Result<Cost, ConfigError> {
        self.check()?;
        let (mut sum, mut sources) = (Cost::default(), Sources::default());
        for (key, layer) in self.each_layer() {
            sum += layer.cost(self.d_model, length).map_err(|e| e.within(&key))?;
            let read = sources.add(&layer.mixer, self.d_model);
            read.map_err(|e| e.within("mixer").within(&key))?;
        }
        Ok(sum)
    }
}

/// Scales fresh weights: those of projections whose output is added to the residual stream by
/// `residual`, those of other linear layers by `linear`.
struct Rescale {
    linear: f64,
    residual: f64,
    path: Vec<String>,
}

impl<B: Backend> ModuleMapper<B> for Rescale {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let named = |names: &[&str]| self.path.iter().any(|name| names.contains(&name.as_str()));
        let writes = ["o_proj", "out_proj", "down_proj"];
        // Matrices that no layer multiplies by: convolutions, and rows of numbers that are added to or
        // multiply each channel.
        let convolution = self.path.iter().any(|name| name.ends_with("conv1d") || name == "canon");
        let rows = ["x_bias", "bonus", "r_k", "a_log", "log_a_real", "a_imag"];
        // Drawn on a scale of their own: what makes Mamba's step sizes, and LRU's matrices.
        let scaled = named(&["dt_proj", "c_proj"]) || (named(&["Lru"]) && named(&["in_proj"]));
        let factor = match D {
            2 if named(&writes) => self.residual,
            2 if !convolution && !scaled && !named(&["embeddings"]) && !named(&rows) => self.linear,
            _ => return param,
        };
        // The product is no leaf of the autodiff graph any more, and would not be learnt.
        param.map(|weight| (weight * factor).detach().require_grad())
    }
}

/// A language model. Ids in, logits out.
#[derive(Module, Debug)]
pub struct LanguageModel<B: Backend> {
    embeddings: Embedding<B>,
    dropout: Dropout,
    pre_norm: Option<Norm<B>>,
    layers: Vec<Block<B>>,
    norm: Norm<B>,
    lm_head: Option<Linear<B>>,
    decoder: Option<Decoder<B>>,
    /// Type of products and recurrences; the weights' own if absent.
    #[module(skip)]
    precision: Option<DType>,
}

/// States of all layers between two tokens.
#[derive(Debug, Clone)]
pub struct LanguageModelState<B: Backend> {
    /// First layer first.
    pub layers: Vec<BlockState<B>>,
}

impl<B: LinearAttentionBackend> LanguageModel<B> {
    /// Whole sequences of ids, `[B, T]`. Gives logits, `[B, T, vocab]`, and the state after token T.
    /// # Panics
    /// If `state` is another model's.
    pub fn forward(
        &self,
        ids: Tensor<B, 2, Int>,
        state: Option<LanguageModelState<B>>,
    ) -> (Tensor<B, 3>, LanguageModelState<B>) {
        let (hidden, state) = self.hidden(ids, state);
        (self.logits(hidden), state)
    }

    /// As [`forward`](Self::forward) without the last product: `[B, T, D]`, normalised. What is
    /// wanted of it goes through [`logits`](Self::logits), which costs most where vocabularies are
    /// large.
    /// # Panics
    /// If `state` is another model's.
    pub fn hidden(
        &self,
        ids: Tensor<B, 2, Int>,
        state: Option<LanguageModelState<B>>,
    ) -> (Tensor<B, 3>, LanguageModelState<B>) {
        let x = ops::embedding(self.embeddings.weight.val(), ids);
        let run = |block: &Block<B>, x, state, shared: &mut Shared<B>| {
            block.forward_residual(x, state, shared)
        };
        let (x, state) = self.through_layers(self.dropout.forward(x), state, run);
        let x = match &self.decoder {
            Some(decoder) => Residual::new(decoder.forward(x.sum())),
            None => x,
        };
        (x.normalized(&self.norm, true).0, state)
    }

    /// Whether the logits of a position depend on what comes after it, as an auto-encoder's do: then
    /// there is no [`step`](Self::step), and a sequence cannot be cut.
    pub fn needs_whole_sequences(&self) -> bool {
        self.decoder.is_some()
    }

    /// How many ids it knows.
    pub fn vocab(&self) -> usize {
        self.embeddings.weight.dims()[0]
    }

    /// Whether sequences of different lengths can go on in one batch: see
    /// [`Mixer::ignores_position`](super::mixers::Mixer::ignores_position).
    pub fn ignores_position(&self) -> bool {
        self.layers.iter().all(|layer| layer.mixer().ignores_position())
    }

    /// One id each, `[B]`. Gives logits, `[B, vocab]`, and the next state.
    /// # Panics
    /// If `state` is another model's, or the model is an auto-encoder.
    pub fn step(
        &self,
        ids: Tensor<B, 1, Int>,
        state: Option<LanguageModelState<B>>,
    ) -> (Tensor<B, 2>, LanguageModelState<B>) {
        assert!(!self.needs_whole_sequences(), "an auto-encoder answers whole sequences");
        let x = ops::embedding(self.embeddings.weight.val(), ids.unsqueeze_dim(1));
        let run = |block: &Block<B>, x, state, shared: &mut Shared<B>| {
            block.step_residual(x, state, shared)
        };
        let (x, state) = self.through_layers(x, state, run);
        (self.logits(x.normalized(&self.norm, true).0).squeeze_dim(1), state)
    }

    /// `[.., D]` from [`hidden`](Self::hidden) to `[.., vocab]`.
    pub fn logits<const D: usize>(&self, hidden: Tensor<B, D>) -> Tensor<B, D> {
        match &self.lm_head {
            Some(head) => head.forward(hidden),
            None => {
                let table = ops::typed(self.embeddings.weight.val(), hidden.dtype());
                burn::tensor::module::linear(hidden, table.transpose(), None)
            }
        }
    }

    /// Rows of `hidden`, `[B, T, D]`, at flat positions, `[M]`: `[M, D]`. All of them, in their order,
    /// where no positions are given.
    pub fn rows_at(
        &self,
        hidden: Tensor<B, 3>,
        positions: Option<Tensor<B, 1, Int>>,
    ) -> Tensor<B, 2> {
        let [batch, tokens, width] = hidden.dims();
        let rows = hidden.reshape([batch * tokens, width]);
        match positions {
            Some(positions) => ops::select_rows(rows, positions),
            None => rows,
        }
    }

    /// `scale` times the sum of the cross-entropies of rows from [`hidden`](Self::hidden), `[M, D]`, in
    /// nats, against the right ids, `[M]`: `[1]`, in f32 (f64 for f64 rows). Logits are not kept.
    pub fn cross_entropy(
        &self,
        hidden: Tensor<B, 2>,
        target: Tensor<B, 1, Int>,
        scale: f64,
    ) -> Tensor<B, 1> {
        let (weight, bias) = match &self.lm_head {
            Some(head) => ((head.weight.val(), false), head.bias.as_ref().map(Param::val)),
            None => ((self.embeddings.weight.val(), true), None),
        };
        ops::linear_cross_entropy(hidden, weight, bias, target, scale)
    }

    /// The same model with products and recurrences in type `precision` wherever a layer takes it: today
    /// DeltaNet, Gated DeltaNet, SwiGLU and GELU MLPs, and the logits. Weights, residual stream, norms'
    /// statistics, gates, states and losses stay in the weights' type.
    #[must_use]
    pub fn with_precision(self, precision: DType) -> Self {
        Self { precision: Some(precision), ..self }
    }

    fn through_layers(
        &self,
        mut x: Tensor<B, 3>,
        state: Option<LanguageModelState<B>>,
        run: impl Fn(
            &Block<B>,
            Residual<B>,
            Option<BlockState<B>>,
            &mut Shared<B>,
        ) -> (Residual<B>, BlockState<B>),
    ) -> (Residual<B>, LanguageModelState<B>) {
        if let Some(norm) = &self.pre_norm {
            x = norm.forward(x);
        }
        let dtype = self.precision.unwrap_or(x.dtype());
        let mut x = Residual::computed_in(x, dtype);
        let mut before = match state {
            Some(state) => {
                assert_eq!(state.layers.len(), self.layers.len(), "the state of another model");
                state.layers.into_iter().map(Some).collect()
            }
            None => vec![None; self.layers.len()],
        };
        let mut shared = Shared::default();
        let mut layers = Vec::with_capacity(self.layers.len());
        for (block, state) in self.layers.iter().zip(before.drain(..)) {
            let (y, state) = run(block, x, state, &mut shared);
            x = y;
            layers.push(state);
        }
        (x, LanguageModelState { layers })
    }
}

/// Draws every weight that is still to be drawn. Burn draws a weight at its first use; after this,
/// the random numbers that a model starts from depend on nothing that happens later.
pub fn force<B: Backend, M: Module<B>>(module: &M) {
    struct Touch;
    impl<B: Backend> ModuleVisitor<B> for Touch {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            let _drawn = param.val();
        }
    }
    module.visit(&mut Touch);
}
