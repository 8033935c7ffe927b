//! Refusals: why nothing was launched, and the checks that all kernels share.

use crate::variant::Dims;
use cubecl::ir::{ElemType, FloatKind, StorageType, UIntKind};
use cubecl::prelude::*;

/// Why nothing was launched.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Refusal {
    /// A width that no plan covers.
    Width {
        /// `K` or `V`.
        name: &'static str,
        /// Its size.
        got: usize,
        /// The widest that would do.
        most: usize,
    },
    /// There is nothing to compute.
    Empty {
        /// Sequences.
        batch: usize,
        /// Tokens of a sequence.
        tokens: usize,
    },
    /// More than the device takes at once, or than its counters or indices of 32 bits can hold.
    TooLarge {
        /// The quantity.
        what: &'static str,
        /// Its size.
        got: usize,
        /// The largest that would do.
        most: usize,
    },
    /// A type of number that the kernels do not take, or the device does not.
    Type {
        /// The type.
        got: StorageType,
    },
    /// Value heads cannot be shared out over key heads.
    Heads {
        /// Heads of values.
        heads: usize,
        /// Heads of keys.
        key_heads: usize,
    },
    /// The device has too little shared memory, or too few units a cube.
    Device {
        /// Bytes of shared memory a cube may have.
        shared_memory: usize,
        /// Units a cube may have.
        units: u32,
    },
    /// A product that is empty, or of more rows than the kernel for a few is for.
    Product {
        /// Rows.
        rows: usize,
        /// Length of the sum.
        inner: usize,
        /// Columns.
        columns: usize,
        /// Most rows.
        most: usize,
    },
    /// Cumulative lengths that do not divide one row of tokens into sequences.
    Lengths {
        /// Rows given.
        batch: usize,
        /// Tokens of a row.
        tokens: usize,
    },
    /// A tensor of the variant is missing, or one is given that the variant does not have.
    Tensor {
        /// The tensor.
        name: &'static str,
        /// Whether the variant has it.
        wanted: bool,
    },
}

impl core::fmt::Display for Refusal {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Width { name, got, most } => {
                write!(f, "{name} is {got}; the kernels take 1 to {most}")
            }
            Self::Empty { batch, tokens } => {
                write!(f, "{batch} sequences of {tokens} tokens; both have to be at least 1")
            }
            Self::TooLarge { what, got, most } => {
                write!(f, "{what}: {got}; the most on this device is {most}")
            }
            Self::Type { got } => {
                write!(
                    f,
                    "numbers of type {got}; the kernels take f32, and f16 and bf16 where the device has them"
                )
            }
            Self::Heads { heads, key_heads } => {
                write!(f, "{heads} value heads are no multiple of {key_heads} key heads")
            }
            Self::Device { shared_memory, units } => write!(
                f,
                "a cube may have {shared_memory} bytes of shared memory and {units} units on this \
                 device; no plan is so small"
            ),
            Self::Product { rows, inner, columns, most } => write!(
                f,
                "[{rows}, {inner}] times [{inner}, {columns}]; rows have to be 1 to {most}, the rest at \
                 least 1"
            ),
            Self::Lengths { batch, tokens } => write!(
                f,
                "cumulative lengths have to grow from 0 to the tokens of one row; there are {batch} rows of \
                 {tokens}"
            ),
            Self::Tensor { name, wanted: true } => write!(f, "`{name}` is missing"),
            Self::Tensor { name, wanted: false } => {
                write!(f, "`{name}` is given, and the variant has none")
            }
        }
    }
}

impl core::error::Error for Refusal {}

pub(crate) const U32: StorageType = StorageType::Scalar(ElemType::UInt(UIntKind::U32));
pub(crate) const F32: StorageType = StorageType::Scalar(ElemType::Float(FloatKind::F32));

/// The device has the type of the rows, at least to convert it.
pub(crate) fn check_type<R: Runtime>(
    client: &ComputeClient<R>,
    dtype: StorageType,
) -> Result<(), Refusal> {
    let known = matches!(
        dtype,
        StorageType::Scalar(ElemType::Float(FloatKind::F32 | FloatKind::F16 | FloatKind::BF16))
    );
    let usable = client.properties().type_usage(dtype);
    match known && usable.contains(cubecl::ir::features::TypeUsage::Conversion) {
        true => Ok(()),
        false => Err(Refusal::Type { got: dtype }),
    }
}

/// Key heads serve equally many value heads each, and there is something to compute.
pub(crate) fn check_heads(dims: Dims) -> Result<(), Refusal> {
    let Dims { batch, tokens, key_heads, heads, .. } = dims;
    if key_heads == 0 || !heads.is_multiple_of(key_heads) || heads == 0 {
        return Err(Refusal::Heads { heads, key_heads });
    }
    if batch == 0 || tokens == 0 {
        return Err(Refusal::Empty { batch, tokens });
    }
    Ok(())
}
