//! Linear-attention operations and layers for [Burn](https://burn.dev).
//!
//! [`ops`] holds the recurrences as functions over `[B, T, H, D]` tensors, differentiable, each with
//! a recurrent step for decoding. [`nn`] builds mixers, blocks and language
//! models of them; every layer is a config, an `init`, a `forward` over whole sequences and a `step`
//! over one token, which agree with each other. [`generate`] writes with a language model, and keeps
//! its recurrent state in files. [`backend`] has Burn's backends that a build was given by its features.
//!
//! One alphabet is used everywhere: B batch, T tokens, H heads, K key width, V value width, D model
//! width. A head's memory S is `[K, V]`, keys are rows, and a query reads it as `o = q S`.
//!
//! ```
//! use burn::tensor::{Distribution, Tensor};
//! use linattn::backend::{Autodiff, Flex};
//! use linattn::nn::mixers::{GatedDeltaNetConfig, TokenMixer};
//!
//! type B = Autodiff<Flex>;
//! let device = Default::default();
//! let mixer = GatedDeltaNetConfig::new(2, 16).init::<B>(32, &device)?;
//! let x = Tensor::<B, 3>::random([4, 100, 32], Distribution::Default, &device); // [B, T, D]
//! let (y, state) = mixer.forward(x.clone(), None);
//! let gradients = y.sum().backward();
//! let (next, state) = mixer.step(x.narrow(1, 0, 1).squeeze_dim(1), Some(state)); // one token more
//! # Ok::<(), linattn::nn::ConfigError>(())
//! ```
//!
//! Threads of one process may learn side by side, each its own model. One rule of Burn 0.21 is theirs to keep:
//! `Tensor::cat`, `Tensor::stack` and `Tensor::roll` lose gradients without a word where another thread ends a
//! backward pass at that moment ([tracel-ai/burn#5573](https://github.com/tracel-ai/burn/issues/5573)). Layers and
//! operations of this crate hold what they join until it is joined, and a program's own have to:
//! `let held = parts.clone(); let joined = Tensor::cat(parts, 1); drop(held);`.
#![deny(missing_docs)]

pub mod backend;
pub mod generate;
pub mod nn;
pub mod ops;

/// The README's examples are tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
