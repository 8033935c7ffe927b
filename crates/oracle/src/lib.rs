//! The recurrences of linear attention in f64, one token after another, and their gradients.
//!
//! Nothing here is fast. Every faster form of these recurrences is held to this crate, so it stays
//! as near to the formulas as loops can be, and its gradients are the formulas run backwards token
//! by token: they share no algebra with the chunked forms they judge.
//!
//! ```text
//! A (batch row, head) owns a state S: [K, V]. For t = 1..T, with D_t = diag(exp(g_t)):
//!
//! Identity   S_t = D_t S_{t-1} + k_t^T v_t
//!            o_t = q_t S_t                                        Read::After
//!            o_t = q_t (S_{t-1} + diag(u) k_t^T v_t)              Read::Before; u is the bonus, or 0
//!
//! Delta      u_t = beta_t v_t - beta_t e_t (D_t S_{t-1})          Read::After
//!            u_t = beta_t v_t - beta_t e_t S_{t-1}                Read::Before
//!            S_t = D_t S_{t-1} + k_t^T u_t                        e_t is the erase row, k_t if not given
//!            o_t = q_t S_t
//!
//! LowRank    S_t = D_t S_{t-1} + b_t^T (a_t S_{t-1}) + k_t^T v_t
//!            o_t = q_t S_t
//! ```
//!
//! Vectors are rows, keys are the rows of S, and every tensor is a flat row-major `Vec<f64>`.
//! B is batch, T tokens, Hk key heads, H (value) heads, K key width and V value width. Value head j
//! uses the query and the key of key head j / (H / Hk).
//!
//! | system | transition | decay | source |
//! |---|---|---|---|
//! | Mamba-2 | `Identity` | scalar | arXiv 2405.21060 |
//! | GLA | `Identity` | vector | arXiv 2312.06635 |
//! | RWKV-6 | `Identity`, `Read::Before`, bonus | vector | arXiv 2404.05892 |
//! | DeltaNet | `Delta` | none | arXiv 2406.06484 |
//! | Gated DeltaNet | `Delta` | scalar | arXiv 2412.06464 |
//! | RWKV-7 | `LowRank` | vector | arXiv 2503.14456 |
//!
//! Some of these papers write S transposed, `[V, K]`.
//!
//! States that are vectors, each channel by itself, are [`linear_scan`].
//!
//! ```
//! use linattn_oracle::{DecayLevel, Dims, Family, Inputs, Recipe, assert_close, backward, forward};
//!
//! let dims = Dims { batch: 2, tokens: 7, key_heads: 1, heads: 2, key_width: 4, value_width: 3 };
//! let recipe = Recipe { decay: DecayLevel::Typical, ..Recipe::new(Family::DeltaRule) };
//! let x = Inputs::random(0, dims, &recipe);
//! let want = forward(&x);
//! assert_close("o", &want.o, &forward(&x).o, 1e-6); // the second one would come from a kernel
//! let d_state = vec![0.0; dims.state_len()];
//! let gradients = backward(&x, &vec![1.0; dims.values_len()], &d_state);
//! assert_eq!(gradients.k.len(), x.k.len());
//! ```
#![deny(missing_docs)]
#![forbid(unsafe_code)]

mod adjoint;
mod close;
mod inputs;
mod random;
mod recurrence;
mod scan;
mod skip;
#[cfg(test)]
mod tests;
mod token;

pub use adjoint::{Gradients, backward};
pub use close::{assert_close, relative_error};
pub use inputs::{Decay, Dims, Inputs, Read, Transition, slice_tokens};
pub use random::{DecayLevel, Family, Recipe, Rng, Strength};
pub use recurrence::{Output, forward};
pub use scan::{Complex, ScanInputs, linear_scan, linear_scan_backward, normals};
pub use skip::{skipped, skipped_without_adapter};

/// The README's examples are tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
