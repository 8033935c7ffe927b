//! Tensors that a layer keeps of the tokens before, each under a name of its own.

use burn::tensor::{Tensor, backend::Backend};
use std::collections::BTreeMap;

/// One list of variants and the names that they have in files.
macro_rules! kept {
    ($($(#[$doc:meta])* $variant:ident => $name:literal,)+) => {
        /// The name of a tensor that a layer keeps of the tokens before.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[non_exhaustive]
        pub enum Kept {
            $($(#[$doc])* $variant,)+
        }

        impl Kept {
            /// Every name.
            pub const ALL: &[Self] = &[$(Self::$variant,)+];

            /// Its spelling in files.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)+
                }
            }
        }
    };
}

kept! {
    /// Last inputs of the short convolution of queries, `[B, W - 1, C]`, or of both where queries and keys convolve one
    /// projection.
    Query => "q",
    /// Last inputs of the short convolution of keys, `[B, W - 1, C]`; or the last key, `[B, 1, C]`.
    Key => "k",
    /// Last inputs of the short convolution of values, `[B, W - 1, C]`; or the last value, `[B, 1, C]`.
    Value => "v",
    /// Last inputs of the short convolution of reflections' directions, `[B, W - 1, C]`.
    Direction => "w",
    /// Last inputs of a mixer's only short convolution or window, or of HGRN's inputs, `[B, W - 1, C]`.
    Input => "x",
    /// Last inputs of the short convolution of forget gates, `[B, W - 1, C]`.
    Forget => "f",
    /// Last inputs of the Canon layer of queries, `[B, W - 1, C]`.
    CanonQuery => "canon_q",
    /// Last inputs of the Canon layer of keys, `[B, W - 1, C]`.
    CanonKey => "canon_k",
    /// Last inputs of the Canon layer of values, `[B, W - 1, C]`.
    CanonValue => "canon_v",
    /// Last inputs of the Canon layer before a mixer, `[B, W - 1, D]`.
    CanonMixer => "canon_mixer",
    /// Last inputs of the Canon layer before an MLP, `[B, W - 1, D]`.
    CanonMlp => "canon_mlp",
    /// Last inputs of the Canon layer of an MLP's gate, `[B, W - 1, F]`.
    CanonGate => "canon_gate",
    /// Last inputs of the Canon layer of an MLP's up-projection, `[B, W - 1, F]`.
    CanonUp => "canon_up",
    /// Keys that a window still sees, `[B, W - 1, C]`.
    WindowKey => "window_k",
    /// Values that a window still sees, `[B, W - 1, C]`.
    WindowValue => "window_v",
    /// Gates of tokens that a window still sees, `[B, W - 1, H]`.
    WindowGate => "window_gate",
    /// The last token, `[B, 1, D]`, where the next one sees it.
    Token => "token",
    /// Angles so far, `[B, 1, C]`.
    Angles => "angles",
    /// Sums over the tokens so far (RWKV-4, AFT, preconditioners), or those of a chunk (LaCT), `[B, 1, C]`.
    Sums => "sums",
    /// The running maximum of exponents, `[B, 1, C]`.
    Maximum => "m",
    /// The hidden state, `[B, 1, C]`.
    Hidden => "h",
    /// The cell, `[B, 1, C]`.
    Cell => "c",
    /// The normaliser, `[B, 1, C]`.
    Normalizer => "n",
    /// Real parts of the memory, `[B, 1, C]`.
    Real => "re",
    /// Imaginary parts of the memory, `[B, 1, C]`.
    Imaginary => "im",
}

/// Tensors of a state, `[B, .., ..]` each, by what they are: their order means nothing.
#[derive(Debug, Clone)]
pub struct KeptTensors<B: Backend>(BTreeMap<Kept, Tensor<B, 3>>);

impl<B: Backend> KeptTensors<B> {
    /// The tensor that is kept as `name`.
    pub fn get(&self, name: Kept) -> Option<&Tensor<B, 3>> {
        self.0.get(&name)
    }

    /// Every name and its tensor.
    pub fn iter(&self) -> impl Iterator<Item = (Kept, &Tensor<B, 3>)> {
        self.0.iter().map(|(name, tensor)| (*name, tensor))
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Takes out the tensor that is kept as `name`.
    pub(crate) fn take(&mut self, name: Kept) -> Option<Tensor<B, 3>> {
        self.0.remove(&name)
    }

    /// Keeps a tensor.
    /// # Panics
    /// If a layer keeps two under one name: the second would be lost for the first.
    pub(crate) fn keep(&mut self, name: Kept, tensor: Tensor<B, 3>) {
        let other = self.0.insert(name, tensor);
        assert!(other.is_none(), "a layer keeps one tensor as `{}`", name.name());
    }
}

impl<B: Backend> Default for KeptTensors<B> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<B: Backend> FromIterator<(Kept, Tensor<B, 3>)> for KeptTensors<B> {
    fn from_iter<I: IntoIterator<Item = (Kept, Tensor<B, 3>)>>(tensors: I) -> Self {
        let mut all = Self::default();
        tensors.into_iter().for_each(|(name, tensor)| all.keep(name, tensor));
        all
    }
}
