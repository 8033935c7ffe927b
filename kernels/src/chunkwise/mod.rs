//! The chunkwise algorithm: three stages on the device, and the host's side of them.
//!
//! ```text
//! intra_chunk        A_qk, T and decay factors of every chunk      vector_decay
//! state_pass         S from chunk to chunk, and the outputs        state_chunk, state, state_tiles,
//!                                                                  producers, sequence_parallel
//! input_gradients    dq, dk, da, db, and dg, dbeta                 gradient_rows, gradient_products,
//!                                                                  gradient_tiles, gradient_slices,
//!                                                                  score_gradients, decay_gradients
//!
//! chunk, decay       offsets of a chunk, its decay                 all stages
//! varlen             sequences with lengths of their own           all stages
//! arguments, roles   tensors of the kernels, names of matrices     all stages
//! plan, task         compile-time values                           all stages
//! choose, buffers,   plans of a device, buffers and launches       host
//! launch
//! ```

mod arguments;
mod buffers;
pub(crate) mod choose;
#[cfg(test)]
mod choose_tests;
mod chunk;
mod decay;
mod decay_gradients;
mod gradient_products;
mod gradient_rows;
mod gradient_slices;
mod gradient_tiles;
mod input_gradients;
mod intra_chunk;
pub(crate) mod launch;
mod plan;
mod producers;
mod roles;
mod score_gradients;
mod sequence_parallel;
mod state;
mod state_chunk;
mod state_pass;
mod state_tiles;
mod task;
mod varlen;
mod vector_decay;
