//! How keys of `config.json` are said in our words, in both directions.

/// Meaning of a key of `config.json` for our mixer. Defaults are JSON, for where the key is left out.
#[derive(Debug)]
pub(crate) enum Rule {
    /// Theirs, ours, default: one value under two names.
    Key(&'static str, &'static str, &'static str),
    /// One name, and the family's own default.
    Same(&'static str),
    /// Ours has this value.
    Ours(&'static str, &'static str),
    /// Theirs has to be one of these: ours has no other way.
    Only(&'static str, &'static [&'static str]),
    /// Theirs has to be as many as the heads, or left out.
    AsHeads(&'static str),
    /// `use_short_conv`, of this default, and `conv_size`: our `conv_size`.
    Convolution(&'static str),
    /// `expand_k` and `expand_v`, of these defaults, shares of the model's width: our `key_width` and
    /// `expand_v`.
    Shares(&'static str, &'static str),
    /// Theirs, default: our `key_width`, which says how many heads there are.
    Split(&'static str, &'static str),
    /// Theirs, ours, what is known, default: one value under two names, if it is one of these.
    OneOf(&'static str, &'static str, &'static [&'static str], &'static str),
    /// One name: ours is there only where it is true.
    Flag(&'static str),
    /// Theirs has to be what ours is already.
    Twin(&'static str, &'static str),
    /// Theirs has to be the model's width, in every layer.
    AllOfModel(&'static str),
    /// Theirs, ours, and our flag that is set where there are several.
    Groups(&'static str, &'static str, &'static str),
    /// `use_output_correction` and `correction_factor`: our `output_correction`.
    Correction,
}
