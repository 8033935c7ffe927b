//! Checkpoints of models that are not flash-linear-attention's, by their `model_type` on the Hugging Face
//! hub: where their weights stand, and what their configs say in our words.

mod gemma;
mod keys;
mod layout;
mod mamba;
mod nemotron;
mod olmo;
mod qwen;
mod rwkv;
mod xlstm;

pub(crate) use layout::{ForeignConfig, Form, Hub, Rows, Theirs, View};

/// Every layout, the one to be preferred first where several say the same.
pub(crate) static FORMATS: &[&Hub] = &[
    &qwen::TEXT,
    &qwen::MULTIMODAL,
    &qwen::NEXT,
    &olmo::HYBRID,
    &mamba::MAMBA,
    &mamba::MAMBA2,
    &mamba::ORIGINAL,
    &gemma::RECURRENT,
    &nemotron::HYBRID,
    &rwkv::NATIVE,
    &xlstm::LARGE,
];
