//! Errors of the operations.

/// Why an operation refused its input. Nothing was computed.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum OpError {
    /// A tensor's shape does not go with the others.
    #[error("{op}: `{tensor}` is {got:?}, expected {want:?} to go with the others")]
    Shape {
        /// The operation.
        op: &'static str,
        /// The tensor.
        tensor: &'static str,
        /// Its shape.
        got: Vec<usize>,
        /// The shape that would do.
        want: Vec<usize>,
    },
    /// A dimension is empty.
    #[error("{op}: `{tensor}` is {got:?}; every dimension has to be at least 1")]
    Empty {
        /// The operation.
        op: &'static str,
        /// The tensor.
        tensor: &'static str,
        /// Its shape.
        got: Vec<usize>,
    },
    /// Value heads cannot be shared out over key heads.
    #[error("{op}: {heads} value heads are no multiple of {key_heads} key heads")]
    Heads {
        /// The operation.
        op: &'static str,
        /// Heads of `v`.
        heads: usize,
        /// Heads of `q` and `k`.
        key_heads: usize,
    },
    /// A convolution that sees nothing but the token itself.
    #[error("{op}: a window of {window} tokens; it has to be at least 2")]
    Window {
        /// The operation.
        op: &'static str,
        /// The window asked for.
        window: usize,
    },
    /// A recurrent step was given more than one token.
    #[error("{op}: a step takes one token, got {tokens}")]
    Step {
        /// The operation.
        op: &'static str,
        /// Tokens given.
        tokens: usize,
    },
    /// Cumulative lengths that are none.
    #[error("{op}: cumulative lengths {got:?} have to begin with 0 and grow with every sequence")]
    Lengths {
        /// The operation.
        op: &'static str,
        /// The cumulative lengths.
        got: Vec<usize>,
    },
    /// Lengths that do not add up to the tokens there are.
    #[error("{op}: lengths of {got} tokens in all, where the tensors have {tokens}")]
    Tokens {
        /// The operation.
        op: &'static str,
        /// Tokens of the tensors.
        tokens: usize,
        /// Tokens of all sequences.
        got: usize,
    },
    /// Lengths beside more than one row.
    #[error("{op}: sequences with lengths of their own lie in one row, and there are {batch}")]
    Rows {
        /// The operation.
        op: &'static str,
        /// Rows given.
        batch: usize,
    },
}
