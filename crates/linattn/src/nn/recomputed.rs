//! Gradients layer by layer, with activations of one layer at a time.
//! ```text
//! forward    x_0 = embed(ids), x_1 = layer_1(x_0), .., x_L       without a graph; every x_i is kept
//! backward   layer_i(x_{i-1}) once more, with a graph, from the gradient of x_i to that of x_{i-1}
//! ```
//! The operations are those of one graph of the whole model. Gradients that meet in one tensor may be added in
//! another order, so that two ways differ by rounding. Source: Chen et al., arXiv 1604.06174.

use super::model::LanguageModel;
use super::residual::Residual;
use super::shared::Shared;
use crate::backend::TrainBackend;
use burn::module::AutodiffModule;
use burn::tensor::{Int, Tensor};

impl<B: TrainBackend> LanguageModel<B> {
    /// The loss that `loss` makes of what [`hidden`](Self::hidden) gives, and its gradients in parts: `each`
    /// is handed those of the logits, then of each layer, the last first, then of the embedding. A weight that
    /// is used twice has two parts.
    ///
    /// Layers must neither read of one another nor draw random numbers: see
    /// [`can_recompute`](super::LanguageModelConfig::can_recompute).
    pub fn differentiate_by_layers(
        &self,
        ids: Tensor<B, 2, Int>,
        loss: impl FnOnce(Tensor<B, 3>) -> Tensor<B, 1>,
        mut each: impl FnMut(B::Gradients),
    ) -> Tensor<B::InnerBackend, 1> {
        let plain = self.valid();
        let mut x = plain.entered(plain.embed(ids.clone().inner(), &None, None));
        let mut inputs = vec![];
        for block in &plain.layers {
            inputs.push(x.clone());
            x = block.run(x, None, &mut Shared::default().without_states()).0;
        }
        let leaf = Residual::<B>::leaf(x);
        let loss = loss(self.left(leaf.clone()));
        let value = loss.clone().inner();
        let mut gradients = loss.backward();
        let mut d_x = leaf.gradients(&mut gradients);
        each(gradients);
        for (block, input) in self.layers.iter().zip(inputs).rev() {
            let leaf = Residual::<B>::leaf(input);
            let y = block.run(leaf.clone(), None, &mut Shared::default().without_states()).0;
            let mut gradients = y.weighed(d_x).backward();
            d_x = leaf.gradients(&mut gradients);
            each(gradients);
        }
        if self.learns_to_embed() {
            each(self.entered(self.embed(ids, &None, None)).weighed(d_x).backward());
        }
        value
    }

    /// Whether anything before the first layer learns.
    fn learns_to_embed(&self) -> bool {
        let tables = [Some(&self.embeddings), self.positions.as_ref()];
        let mut tables = tables.into_iter().flatten();
        tables.any(|table| table.weight.val().is_require_grad())
            || self.pre_norm.as_ref().is_some_and(super::Norm::learns)
    }
}
