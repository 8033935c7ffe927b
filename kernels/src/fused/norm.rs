//! RMSNorm, LayerNorm and L2 norm with residual sum and gate, and their gradients.
