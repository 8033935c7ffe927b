//! Burn's NdArray, which runs every operation as tensor operations.

use super::backend::LinearAttentionBackend;
use burn::backend::NdArray;

impl LinearAttentionBackend for NdArray {}
