//! AdamW over many tensors in few launches, and the global gradient norm.
