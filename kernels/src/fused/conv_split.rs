//! The packed projection of a mixer: short convolution, SiLU, L2 norm of heads, beta and log decay.
