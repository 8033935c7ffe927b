//! Cost of a run, counted before it starts.

use crate::config::{ConfigError, Precision, RunConfig};
use crate::learner::TensorBatch;
use crate::schedule::Plan;
use crate::stored::StoredError;
use crate::train::{build, build_from};
use crate::weights::{self, Part};
use burn::module::Module;
use linattn::nn::ConfigError as ModelError;
use linattn::ops::LinearAttentionBackend;
use linattn_tasks::Split;

/// Cost of a run, without training.
#[derive(Debug, Clone, serde::Serialize)]
pub struct DryRun {
    /// Weights of the model.
    pub parameters: usize,
    /// Those of them that are learnt.
    pub learnt: usize,
    /// Bytes of state a sequence, at the longest test length.
    pub state_bytes: u64,
    /// Floating-point operations of a forward pass over one token, logits at scored positions only.
    pub flops_per_token: u64,
    /// Tokens of the first batch.
    pub batch_tokens: usize,
    /// Scored positions of the first batch.
    pub batch_scored: usize,
    /// Optimizer steps of the run.
    pub steps: u64,
    /// Bytes of weights.
    pub weight_memory: u64,
    /// Bytes of gradients.
    pub gradient_memory: u64,
    /// Bytes of optimizer state.
    pub optimizer_memory: u64,
    /// Bytes of all three.
    pub parameter_memory: u64,
    /// Bytes that one step's intermediate results take, roughly.
    pub activation_memory: u64,
}

/// Builds model and first batch, and counts.
/// # Errors
/// [`StoredError`] names the first key that does not fit, or what is wrong with the run to start from.
pub fn dry_run<B: LinearAttentionBackend>(
    run: &RunConfig,
    device: &B::Device,
) -> Result<DryRun, StoredError> {
    let task = run.task.build(run.seed).map_err(ConfigError::from)?;
    let learner = match &run.base {
        None => build::<B>(run, task.vocab(), device)?,
        Some(base) => build_from(run, &base.open()?, device)?,
    };
    let mut plan = Plan::new(run, task.as_ref());
    let batch = plan.batch_indices(0);
    let batch = task.batch(Split::Train, batch.set, &batch.indices);
    let _on_device = TensorBatch::<B>::new(&batch, 1.0, device);
    let longest = task.sets(Split::Test).iter().map(|set| set.length).max().unwrap_or(1);
    let cost = run.model.cost(longest).map_err(ConfigError::from)?;
    let at_length = run.model.cost(batch.length).map_err(ConfigError::from)?;
    let (tokens, scored) = (batch.input.len(), batch.scored.len());
    let (width, vocab) = (run.model.d_model as u128, run.vocab(task.vocab()) as u128);
    let head = (2 * width * vocab * scored as u128 / tokens.max(1) as u128) as u64;
    let (parameters, learnt) =
        (learner.num_params(), weights::count(&learner.model, Part::of(run)));
    let sizes = [4 * parameters, 4 * learnt, 8 * learnt].map(|bytes| bytes as u64);
    let part = BatchPart {
        tokens: (tokens / run.train.accumulate) as u64,
        scored: (scored / run.train.accumulate) as u64,
        length: batch.length,
    };
    Ok(DryRun {
        parameters,
        learnt,
        state_bytes: cost.state_bytes,
        flops_per_token: at_length.flops_per_token + head,
        batch_tokens: tokens,
        batch_scored: scored,
        steps: plan.total_steps,
        weight_memory: sizes[0],
        gradient_memory: sizes[1],
        optimizer_memory: sizes[2],
        parameter_memory: sizes.iter().sum(),
        activation_memory: activations(run, vocab as u64, &part).map_err(ConfigError::from)?,
    })
}

/// A part of a step's batch.
struct BatchPart {
    tokens: u64,
    scored: u64,
    /// Of a sequence.
    length: usize,
}

/// Bytes of the intermediate results of a part of a step, roughly. Each result of a projection is kept for the
/// backward pass, and about as much again for norms, gates and convolutions, and so are the projections'
/// weights, packed side by side; logits exist three times: as such, normalised, and as a gradient.
fn activations(run: &RunConfig, vocab: u64, part: &BatchPart) -> Result<u64, ModelError> {
    let (width, narrow) = (run.model.d_model as u64, run.train.precision == Precision::Bf16);
    let mut layers = vec![];
    for (key, layer) in run.model.each_layer() {
        let flops = layer.cost(run.model.d_model, part.length).map_err(|e| e.within(key))?;
        let results = 4 * 4 * (flops.flops_per_token / (2 * width));
        // A weight is a multiplication and an addition.
        let packed = flops.flops_per_token / 2 * if narrow { 2 } else { 4 };
        layers.push(part.tokens.saturating_mul(results).saturating_add(packed));
    }
    let layers = match run.train.checkpoint_activations {
        true => {
            // Both parts of the stream before every layer, and all of one layer.
            let kept = part.tokens.saturating_mul(8 * width * layers.len() as u64);
            layers.into_iter().max().unwrap_or(0).saturating_add(kept)
        }
        false => layers.into_iter().fold(0, u64::saturating_add),
    };
    let table = if narrow { 2 * vocab * width } else { 0 };
    Ok(layers.saturating_add(12 * part.scored.saturating_mul(vocab)).saturating_add(table))
}

/// Memory in bytes that a run needs at the very least: weights, gradients and optimizer state, and for
/// one part of a step the residual stream of every layer and the logits. Nothing is allocated.
/// # Errors
/// [`ConfigError`] names the first key that does not fit.
pub fn least_memory(run: &RunConfig) -> Result<f64, ConfigError> {
    let task = run.task.build(run.seed)?;
    let (width, vocab) = (run.model.d_model as f64, run.vocab(task.vocab()) as f64);
    let tables = if run.model.tie_embeddings { 1.0 } else { 2.0 };
    // A weight is a multiplication and an addition; up to half of the rest is the recurrence.
    let layers = run.model.cost(1)?.flops_per_token as f64 / 4.0;
    let weights = tables * width * vocab + layers;
    let rows = (run.train.batch_size / run.train.accumulate) as f64;
    let depth = run.model.depth();
    let largest = task.sets(Split::Train).iter().map(|set| {
        let stream = set.length as f64 * width * depth as f64;
        rows * (stream + 3.0 * set.scored as f64 * vocab)
    });
    // Weights that stay as they are have neither gradients nor optimizer state.
    let each = if run.train.lora.is_some() { 1.0 } else { 4.0 };
    Ok(4.0 * (each * weights + largest.fold(0.0, f64::max)))
}

/// Bytes of this computer's memory that a run needs at the very least for what is never on a device:
/// the order of the examples, and one batch. With the key that most of it is for.
/// # Errors
/// [`ConfigError`] names the first key that does not fit.
pub fn host_memory(run: &RunConfig) -> Result<(f64, &'static str), ConfigError> {
    let task = run.task.build(run.seed)?;
    let examples = task.sets(Split::Train).iter().map(|set| set.examples as f64).sum::<f64>();
    let order = match run.train.order {
        crate::Order::Shuffled => 8.0 * examples,
        crate::Order::Fixed | crate::Order::Fresh => 0.0,
    };
    let tests = run.evaluate.batch_size.unwrap_or(run.train.batch_size);
    let splits =
        [(Split::Train, run.train.batch_size), (Split::Validation, tests), (Split::Test, tests)];
    let sets = splits.iter().flat_map(|&(split, rows)| {
        task.sets(split).iter().map(move |set| (set, (rows as u64).min(set.examples)))
    });
    // An id a position; where an answer is asked for, its place and the answer too.
    let bytes = sets.map(|(set, rows)| rows as f64 * (4 * set.length + 8 * set.scored) as f64);
    let batch = bytes.fold(0.0, f64::max);
    let key = if order > batch {
        "fewer `examples` to learn from, or `train.order` = \"fixed\","
    } else {
        "a smaller `train.batch_size`, `evaluate.batch_size` or length of the task"
    };
    Ok((order + batch, key))
}
