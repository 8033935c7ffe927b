//! Cost of a run, counted before it starts.

use crate::config::{ConfigError, RunConfig};
use crate::learner::TensorBatch;
use crate::schedule::Plan;
use crate::train::build;
use burn::module::Module;
use linattn::ops::LinearAttentionBackend;
use linattn_tasks::Split;

/// Cost of a run, without training.
#[derive(Debug, Clone, serde::Serialize)]
pub struct DryRun {
    /// Weights that are learnt.
    pub parameters: usize,
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
    /// Bytes of weights, gradients and optimizer state.
    pub parameter_memory: u64,
    /// Bytes that one step's intermediate results take, roughly.
    pub activation_memory: u64,
}

/// Builds model and first batch, and counts.
/// # Errors
/// [`ConfigError`] names the first key that does not fit.
pub fn dry_run<B: LinearAttentionBackend>(
    run: &RunConfig,
    device: &B::Device,
) -> Result<DryRun, ConfigError> {
    let task = run.task.build(run.seed)?;
    let learner = build::<B>(run, task.vocab(), device)?;
    let mut plan = Plan::new(run, task.as_ref());
    let pick = plan.pick(0);
    let batch = task.batch(Split::Train, pick.set, &pick.indices);
    let _on_device = TensorBatch::<B>::new(&batch, 1.0, device);
    let longest = task.sets(Split::Test).iter().map(|set| set.length).max().unwrap_or(1);
    let (cost, at_length) = (run.model.cost(longest)?, run.model.cost(batch.length)?);
    let parameters = learner.num_params();
    let (tokens, scored) = (batch.input.len(), batch.scored.len());
    let width = run.model.d_model as u128;
    let head = (2 * width * task.vocab() as u128 * scored as u128 / tokens.max(1) as u128) as u64;
    let part = (tokens / run.train.accumulate) as u64;
    // Each result of a projection is kept for the backward pass, and about as much again for norms,
    // gates and convolutions; logits exist three times: as such, normalised, and as a gradient.
    let per_token = 4 * 4 * at_length.flops_per_token / (2 * run.model.d_model as u64);
    let logits = (12 * (scored / run.train.accumulate) as u64).saturating_mul(task.vocab() as u64);
    Ok(DryRun {
        parameters,
        state_bytes: cost.state_bytes,
        flops_per_token: at_length.flops_per_token + head,
        batch_tokens: tokens,
        batch_scored: scored,
        steps: plan.total_steps,
        parameter_memory: 4 * 4 * parameters as u64,
        activation_memory: part.saturating_mul(per_token).saturating_add(logits),
    })
}

/// Memory in bytes that a run needs at the very least: weights, gradients and optimizer state, and for
/// one part of a step the residual stream of every layer and the logits. Nothing is allocated.
/// # Errors
/// [`ConfigError`] names the first key that does not fit.
pub fn least_memory(run: &RunConfig) -> Result<f64, ConfigError> {
    let task = run.task.build(run.seed)?;
    let width = run.model.d_model as f64;
    let tables = if run.model.tie_embeddings { 1.0 } else { 2.0 };
    // A weight is a multiplication and an addition; up to half of the rest is the recurrence.
    let layers = run.model.cost(1)?.flops_per_token as f64 / 4.0;
    let weights = tables * width * task.vocab() as f64 + layers;
    let rows = (run.train.batch_size / run.train.accumulate) as f64;
    let depth = run.model.depth();
    let largest = task.sets(Split::Train).iter().map(|set| {
        let stream = set.length as f64 * width * depth as f64;
        rows * (stream + 3.0 * set.scored as f64 * task.vocab() as f64)
    });
    Ok(4.0 * (4.0 * weights + largest.fold(0.0, f64::max)))
}
