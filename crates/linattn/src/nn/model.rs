//! A language model: token embedding, layers, norm, and logits over the vocabulary.

use super::auto_encoder::Decoder;
use super::block::{Block, BlockState, LayerConfig};
use super::layer_list::LayerEntry;
use super::layers::{
    FinalNormKind, INIT_STD, InitializerKind, Linear, Norm, NormKind, check_epsilon, linear,
    linear_with_bias,
};
use super::mixers::{Mixer, MixerConfig, Stack};
use super::mlp::MlpConfig;
use super::residual::Residual;
use super::shared::Shared;
use super::sources::Sources;
use super::start::Start;
use super::weight::{WeightQuantizer, nothing};
use super::{ConfigError, Cost, LARGEST, positive};
use crate::ops::{self, LinearAttentionBackend, QuantizedMatrix, SequenceLengths, WeightBits, cat};
use burn::module::{Initializer, Module, ModuleVisitor, Param};
use burn::nn::{Dropout, DropoutConfig, Embedding, EmbeddingConfig};
use burn::tensor::activation::log_softmax;
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
    /// The norm before the logits, where it is another.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub final_norm: Option<FinalNormKind>,
    /// Whether such a norm also stands between the embedding and the first layer, as in RWKV.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub pre_norm: bool,
    /// Added to a variance before its root.
    #[serde(default = "small")]
    pub norm_eps: f64,
    /// How linear layers start. What a mixer draws on a scale of its own is its own affair: see its
    /// file.
    #[serde(default, skip_serializing_if = "InitializerKind::is_normal")]
    pub initializer: InitializerKind,
    /// Standard deviation of fresh linear layers, where they are normal. Narrow models learn sooner with
    /// more than the customary 0.02.
    #[serde(default = "customary")]
    pub initializer_range: f64,
    /// Standard deviation of fresh embeddings, of ids and of positions, which are normal.
    #[serde(default = "customary", skip_serializing_if = "is_customary")]
    pub embedding_initializer_range: f64,
    /// Whether projections into the residual stream start smaller, by the root of the number of writes
    /// to it: one a mixer, one an MLP.
    #[serde(default = "yes", skip_serializing_if = "Clone::clone")]
    pub rescale_residual: bool,
    /// How many positions have a learnt vector that is added to the embeddings, which is the longest
    /// sequence there may be; 0 for none.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub positions: usize,
    /// Share of the embedded values that training sets to zero.
    #[serde(default)]
    pub embedding_dropout: f64,
    /// Factor of the embedded values; logits from the same weights know nothing of it.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub embedding_scale: f64,
    /// Bound c of the logits, which become c tanh(l / c); none by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub logit_soft_cap: Option<f64>,
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

fn is_zero(count: &usize) -> bool {
    *count == 0
}

fn one() -> f64 {
    1.0
}

fn is_one(factor: &f64) -> bool {
    *factor == 1.0
}

fn is_customary(range: &f64) -> bool {
    *range == customary()
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

    /// Whether training draws random numbers.
    pub fn has_dropout(&self) -> bool {
        let drops =
            |mixer: &MixerConfig| matches!(mixer, MixerConfig::Attention(a) if a.dropout > 0.0);
        self.embedding_dropout > 0.0 || self.each_layer().any(|(_, layer)| drops(&layer.mixer))
    }

    /// The key and the value that keep layers from being computed twice: those that read of earlier ones,
    /// and those that draw random numbers.
    pub fn can_recompute(&self) -> Result<(), ConfigError> {
        if self.embedding_dropout > 0.0 {
            let want = "0 where layers are computed twice";
            return Err(ConfigError::new("embedding_dropout", self.embedding_dropout, want));
        }
        for (key, layer) in self.each_layer() {
            let reads = match &layer.mixer {
                MixerConfig::Attention(a) if a.dropout > 0.0 => "`dropout`",
                MixerConfig::Rwkv7(config) if config.value_residual => "`value_residual`",
                MixerConfig::CrossAttention(_) => "`cross_attention`",
                _ => continue,
            };
            let want = "one that computes the same twice, from its input alone";
            let got = format!("one with {reads}");
            return Err(ConfigError::new("mixer", got, want).within(key));
        }
        Ok(())
    }

    /// Checks every key, those of the layers too.
    /// # Errors
    /// [`ConfigError`] names the first key that does not fit.
    pub fn check(&self) -> Result<(), ConfigError> {
        self.check_own()?;
        let mut sources = Sources::default();
        for (key, layer) in self.each_layer() {
            layer.check(self.d_model).map_err(|e| e.within(&key))?;
            let read = sources.add(&layer.mixer, self.d_model);
            read.map_err(|e| e.within("mixer").within(&key))?;
        }
        Ok(())
    }

    /// Checks the keys beside the layers.
    fn check_own(&self) -> Result<(), ConfigError> {
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
        check_range("initializer_range", self.initializer_range)?;
        check_range("embedding_initializer_range", self.embedding_initializer_range)?;
        check_range("embedding_scale", self.embedding_scale)?;
        self.logit_soft_cap.map_or(Ok(()), |cap| check_range("logit_soft_cap", cap))?;
        if self.initializer == InitializerKind::Torch && self.initializer_range != INIT_STD {
            let want = "left out where `initializer` is \"torch\", whose range the fan-in says";
            return Err(ConfigError::new("initializer_range", self.initializer_range, want));
        }
        if self.positions > LARGEST {
            let want = format!("at most {LARGEST}");
            return Err(ConfigError::new("positions", self.positions, want));
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

    /// The norm before the logits, if there is one.
    fn last_norm(&self) -> Option<NormKind> {
        self.final_norm.map_or(Some(self.norm), FinalNormKind::norm)
    }

    /// Builds the model for ids 0 to `vocab` - 1. Weights that write to the residual stream start
    /// smaller by the root of the number of writes, so that the stream does not grow with depth, unless
    /// `rescale_residual` is false.
    /// # Errors
    /// [`ConfigError`] names the first key that does not fit.
    pub fn init<B: LinearAttentionBackend>(
        &self,
        vocab: usize,
        device: &B::Device,
    ) -> Result<LanguageModel<B>, ConfigError> {
        self.check()?;
        let layers = self
            .each_layer()
            .map(|(key, layer)| {
                layer
                    .init(self.d_model, self.norm, self.norm_eps, device)
                    .map_err(|e| e.within(key))
            })
            .collect::<Result<Vec<_>, _>>()?;
        let table = |rows| {
            EmbeddingConfig::new(rows, self.d_model)
                .with_initializer(Initializer::Normal {
                    mean: 0.0,
                    std: self.embedding_initializer_range,
                })
                .init(device)
        };
        let model = LanguageModel {
            embeddings: table(vocab),
            quantized_embeddings: None,
            positions: (self.positions > 0).then(|| table(self.positions)),
            dropout: DropoutConfig::new(self.embedding_dropout).init(),
            pre_norm: self
                .pre_norm
                .then(|| Norm::new(self.norm, self.d_model, self.norm_eps, device)),
            layers,
            norm: self.last_norm().map(|norm| Norm::new(norm, self.d_model, self.norm_eps, device)),
            lm_head: (!self.tie_embeddings).then(|| match self.head_bias {
                true => linear_with_bias(self.d_model, vocab, device),
                false => linear(self.d_model, vocab, device),
            }),
            decoder: (self.head == HeadKind::AutoEncoder)
                .then(|| Decoder::new(self.d_model, self.norm, self.norm_eps, device)),
            embedding_scale: self.embedding_scale,
            logit_soft_cap: self.logit_soft_cap,
            precision: None,
            recomputes: false,
        };
        Ok(model.started(&self.start()))
    }

    fn start(&self) -> Start {
        let writes = self.each_layer().map(|(_, layer)| {
            usize::from(layer.mixer != MixerConfig::None)
                + usize::from(layer.mlp != MlpConfig::None)
        });
        let stack = Stack { layers: self.depth(), writes: writes.sum() };
        Start {
            initializer: self.initializer,
            scale: self.initializer_range / INIT_STD,
            stack: self.rescale_residual.then_some(stack),
        }
    }

    /// Cost of the layers over sequences of `length` tokens, embedding and logits aside.
    /// # Errors
    /// As [`init`](Self::init).
    pub fn cost(&self, length: usize) -> Result<Cost, ConfigError> {
        self.check()?;
        if self.positions > 0 && self.positions < length {
            let want = format!("0, or at least {length}, the length of the longest sequence");
            return Err(ConfigError::new("positions", self.positions, want));
        }
        let mut sum = Cost::default();
        for (key, layer) in self.each_layer() {
            sum += layer.cost(self.d_model, length).map_err(|e| e.within(&key))?;
        }
        Ok(sum)
    }
}

fn check_range(key: &str, range: f64) -> Result<(), ConfigError> {
    match range > 0.0 && range.is_finite() {
        true => Ok(()),
        false => Err(ConfigError::new(key, range, "above 0")),
    }
}

/// A language model: token embedding, layers, norm, and logits over the vocabulary.
/// # Shapes
/// Ids are `[B, T]`, each from 0 to `vocab` - 1; logits are `[B, T, vocab]`, natural logs up to a constant.
/// The state is a [`LanguageModelState`], a [`BlockState`] for each layer.
/// # Errors
/// [`LanguageModelConfig::init`] gives a [`ConfigError`] with the first key that does not fit.
#[derive(Module, Debug)]
pub struct LanguageModel<B: Backend> {
    pub(super) embeddings: Embedding<B>,
    /// In place of the embeddings of a model that only decodes.
    quantized_embeddings: Option<QuantizedMatrix<B>>,
    pub(super) positions: Option<Embedding<B>>,
    dropout: Dropout,
    pub(super) pre_norm: Option<Norm<B>>,
    pub(super) layers: Vec<Block<B>>,
    norm: Option<Norm<B>>,
    lm_head: Option<Linear<B>>,
    decoder: Option<Decoder<B>>,
    #[module(skip)]
    embedding_scale: f64,
    #[module(skip)]
    logit_soft_cap: Option<f64>,
    /// Type of products and recurrences; the weights' own if absent.
    #[module(skip)]
    precision: Option<DType>,
    /// Whether gradients are made layer by layer.
    #[module(skip)]
    recomputes: bool,
}

/// States of all layers between two tokens.
#[derive(Debug, Clone)]
pub struct LanguageModelState<B: Backend> {
    /// First layer first.
    pub layers: Vec<BlockState<B>>,
    /// Tokens seen, where the model has learnt positions.
    pub position: Option<usize>,
}

impl<B: LinearAttentionBackend> LanguageModel<B> {
    /// The same model with its linear layers started.
    fn started(self, start: &Start) -> Self {
        let Self { layers, lm_head, decoder, .. } = self;
        Self {
            layers: layers.into_iter().map(|block| block.started(start)).collect(),
            lm_head: lm_head.map(|head| start.usual(head)),
            decoder: decoder.map(|decoder| start.usual(decoder)),
            ..self
        }
    }

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
        self.hidden_among(ids, state, Shared::default())
    }

    /// As [`hidden`](Self::hidden), of whole sequences and without their states, as in training.
    pub fn hidden_alone(&self, ids: Tensor<B, 2, Int>) -> Tensor<B, 3> {
        self.hidden_among(ids, None, Shared::default().without_states()).0
    }

    /// As [`hidden`](Self::hidden), of sequences of different lengths where `shared` has them.
    pub(super) fn hidden_among(
        &self,
        ids: Tensor<B, 2, Int>,
        state: Option<LanguageModelState<B>>,
        shared: Shared<B>,
    ) -> (Tensor<B, 3>, LanguageModelState<B>) {
        let x = self.embed(ids, &state, shared.lengths.as_ref());
        let (x, state) = self.through_layers(self.dropout.forward(x), state, shared);
        (self.left(x), state)
    }

    /// Everything behind the layers, but the logits.
    pub(super) fn left(&self, x: Residual<B>) -> Tensor<B, 3> {
        self.normalized(match &self.decoder {
            Some(decoder) => Residual::new(decoder.forward(x.sum())),
            None => x,
        })
    }

    /// Embedded ids as the first layer reads them.
    pub(super) fn entered(&self, x: Tensor<B, 3>) -> Residual<B> {
        let x = match &self.pre_norm {
            Some(norm) => norm.forward(x),
            None => x,
        };
        let dtype = self.precision.unwrap_or(x.dtype());
        Residual::computed_in(x, dtype)
    }

    /// Ids, `[B, T]`, as vectors, `[B, T, D]`, which know their position where that is learnt; from 0 in each
    /// sequence where there are lengths.
    pub(super) fn embed(
        &self,
        ids: Tensor<B, 2, Int>,
        state: &Option<LanguageModelState<B>>,
        lengths: Option<&SequenceLengths>,
    ) -> Tensor<B, 3> {
        let (tokens, device) = (ids.dims()[1], ids.device());
        let x = match &self.quantized_embeddings {
            Some(quantized) => quantized_rows(quantized, ids),
            None => ops::embedding(self.embeddings.weight.val(), ids),
        };
        let x = if self.embedding_scale == 1.0 { x } else { x * self.embedding_scale };
        let Some(positions) = &self.positions else { return x };
        let (first, table) = (seen(state), positions.weight.val());
        let longest = lengths.map_or(tokens, SequenceLengths::longest);
        let (last, known) = (first + longest, table.dims()[0]);
        assert!(last <= known, "position {last} of {known} that the model has learnt");
        let all = Tensor::<B, 1, Int>::arange(first as i64..last as i64, &device);
        let places = match lengths {
            Some(lengths) => {
                cat(lengths.lengths().map(|own| all.clone().narrow(0, 0, own)).collect(), 0)
            }
            None => all,
        };
        x + ops::embedding(table, places.unsqueeze_dim(0))
    }

    /// Output of the layers, through the last norm where there is one.
    fn normalized(&self, x: Residual<B>) -> Tensor<B, 3> {
        match &self.norm {
            Some(norm) => x.normalized(norm, true).0,
            None => x.sum(),
        }
    }

    /// Whether the logits of a position depend on what comes after it, as an auto-encoder's do: then
    /// there is no [`step`](Self::step), and a sequence cannot be cut.
    pub fn needs_whole_sequences(&self) -> bool {
        self.decoder.is_some()
    }

    /// How many ids it knows.
    pub fn vocab(&self) -> usize {
        match &self.quantized_embeddings {
            Some(quantized) => quantized.size()[0],
            None => self.embeddings.weight.dims()[0],
        }
    }

    /// How many positions it, or one of its mixers, has learnt, where it has: no sequence may be longer.
    pub fn positions(&self) -> Option<usize> {
        let own = self.positions.as_ref().map(|table| table.weight.dims()[0]);
        let mixers = self.layers.iter().filter_map(Block::mixer);
        mixers.filter_map(Mixer::positions).chain(own).min()
    }

    /// Whether sequences of different lengths can go on in one batch: see
    /// [`Mixer::fixed_size_state`](super::mixers::Mixer::fixed_size_state).
    pub fn fixed_size_state(&self) -> bool {
        let counted = self.positions.is_some();
        let mut mixers = self.layers.iter().filter_map(Block::mixer);
        !counted && mixers.all(Mixer::fixed_size_state)
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
        let device = ids.device();
        let run = |(ids, state)| self.run_step(ids, state);
        match self.fixed_size_state() {
            // Each step allocates the sizes of the one before: a persistent pool costs the host less than cutting
            // pages.
            true => B::memory_persistent_allocations(&device, (ids, state), run),
            false => run((ids, state)),
        }
    }

    fn run_step(
        &self,
        ids: Tensor<B, 1, Int>,
        state: Option<LanguageModelState<B>>,
    ) -> (Tensor<B, 2>, LanguageModelState<B>) {
        let x = self.embed(ids.unsqueeze_dim(1), &state, None);
        let (x, state) = self.through_layers(x, state, Shared::default());
        (self.logits(self.normalized(x)).squeeze_dim(1), state)
    }

    /// `[.., D]` from [`hidden`](Self::hidden) to `[.., vocab]`.
    pub fn logits<const D: usize>(&self, hidden: Tensor<B, D>) -> Tensor<B, D> {
        let logits = match &self.lm_head {
            Some(head) => head.forward(hidden),
            None => self.tied_logits(hidden),
        };
        match self.logit_soft_cap {
            Some(cap) => (logits / cap).tanh() * cap,
            None => logits,
        }
    }

    /// Logits from the embedding's own weights.
    fn tied_logits<const D: usize>(&self, hidden: Tensor<B, D>) -> Tensor<B, D> {
        let quantized = self.quantized_embeddings.as_ref();
        if let Some(logits) =
            quantized.and_then(|table| ops::quantized_linear(hidden.clone(), &[table]))
        {
            return logits;
        }
        let table = ops::typed(self.table(), hidden.dtype());
        match B::takes_transposed() {
            true => ops::affine(hidden, table.transpose(), None)
                .expect("`hidden` is as wide as the embedding"),
            false => burn::tensor::module::linear(hidden, table.transpose(), None),
        }
    }

    /// The embedding's weights, `[vocab, D]`.
    fn table(&self) -> Tensor<B, 2> {
        match &self.quantized_embeddings {
            Some(quantized) => quantized.dequantize(DType::F32),
            None => self.embeddings.weight.val(),
        }
    }

    /// The same model with weights of `bits` in its linear layers, embeddings and logits, to decode with: it
    /// cannot be learnt or saved. Layers of fewer outputs or inputs than a [`GROUP`](ops::GROUP) has, and what is no
    /// linear layer, stay as they are.
    #[must_use]
    pub fn quantized(self, bits: WeightBits) -> Self {
        let mut model = self.map(&mut WeightQuantizer::new(bits));
        let table = model.embeddings.weight.val();
        if ops::quantizes(table.dims()[1]) {
            let device = table.device();
            model.quantized_embeddings = Some(QuantizedMatrix::quantize(table.detach(), bits));
            model.embeddings.weight = nothing(model.embeddings.weight, &device);
        }
        model
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
    /// nats, against the right ids, `[M]`: `[1]`, in f32 (f64 for f64 rows). Logits are not kept, unless
    /// they have a soft cap.
    pub fn cross_entropy(
        &self,
        hidden: Tensor<B, 2>,
        target: Tensor<B, 1, Int>,
        scale: f64,
    ) -> Tensor<B, 1> {
        if self.logit_soft_cap.is_some() {
            let logits = ops::accumulator(self.logits(hidden));
            let right = log_softmax(logits, 1).gather(1, target.unsqueeze_dim(1));
            return ops::sum_in_order(right) * -scale;
        }
        let (weight, bias) = match &self.lm_head {
            Some(head) => ((head.weight.val(), false), head.bias.as_ref().map(Param::val)),
            None => ((self.table(), true), None),
        };
        ops::linear_cross_entropy(hidden, weight, bias, target, scale)
    }

    /// The same model with products and recurrences in type `precision` in the logits, in MLPs and in every
    /// mixer that takes it: see [`Mixer::takes_bf16`](super::mixers::Mixer::takes_bf16). Weights, residual
    /// stream, norms' statistics, gates, memories and losses stay in the weights' type.
    #[must_use]
    pub fn with_precision(self, precision: DType) -> Self {
        Self { precision: Some(precision), ..self }
    }

    /// The same model, to be trained with activations of one layer at a time: see
    /// [`differentiate_by_layers`](Self::differentiate_by_layers).
    #[must_use]
    pub fn with_recomputation(self, recomputes: bool) -> Self {
        Self { recomputes, ..self }
    }

    /// Whether it is to be trained so.
    pub fn recomputes(&self) -> bool {
        self.recomputes
    }

    fn through_layers(
        &self,
        x: Tensor<B, 3>,
        state: Option<LanguageModelState<B>>,
        mut shared: Shared<B>,
    ) -> (Residual<B>, LanguageModelState<B>) {
        let position = self.positions.as_ref().map(|_| seen(&state) + x.dims()[1]);
        let mut x = self.entered(x);
        let mut before = match state {
            Some(state) => {
                assert_eq!(state.layers.len(), self.layers.len(), "the state of another model");
                state.layers.into_iter().map(Some).collect()
            }
            None => vec![None; self.layers.len()],
        };
        let mut layers = Vec::with_capacity(self.layers.len());
        for (block, state) in self.layers.iter().zip(before.drain(..)) {
            let (y, state) = block.run(x, state, &mut shared);
            x = y;
            layers.push(state);
        }
        (x, LanguageModelState { layers, position })
    }
}

/// Rows of a quantized table by number, `[B, T]` to `[B, T, D]`.
fn quantized_rows<B: LinearAttentionBackend>(
    table: &QuantizedMatrix<B>,
    ids: Tensor<B, 2, Int>,
) -> Tensor<B, 3> {
    let ([batch, tokens], width) = (ids.dims(), table.size()[1]);
    let rows = table.dequantize_rows(ids.reshape([batch * tokens]), DType::F32);
    rows.reshape([batch, tokens, width])
}

/// Tokens that a model with learnt positions has seen.
fn seen<B: Backend>(state: &Option<LanguageModelState<B>>) -> usize {
    state.as_ref().and_then(|state| state.position).unwrap_or(0)
}

/// Draws every weight that is still to be drawn. Burn draws a weight at its first use; after this,
/// the random numbers that a model starts from depend on nothing that happens later.
pub fn materialize<B: Backend, M: Module<B>>(module: &M) {
    struct Touch;
    impl<B: Backend> ModuleVisitor<B> for Touch {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            let _drawn = param.val();
        }
    }
    module.visit(&mut Touch);
}
