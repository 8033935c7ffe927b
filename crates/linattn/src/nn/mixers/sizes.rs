//! Sizes that follow from the keys of a config, and what parts of a mixer cost.

use crate::nn::{ConfigError, Cost, LARGEST, positive};

/// Value heads, and heads of queries and keys, must divide.
pub(super) fn check_heads(heads: usize, value_heads: Option<usize>) -> Result<usize, ConfigError> {
    positive("heads", heads)?;
    let value_heads = positive("value_heads", value_heads.unwrap_or(heads))?;
    if value_heads.is_multiple_of(heads) {
        return Ok(value_heads);
    }
    Err(ConfigError::new("value_heads", value_heads, format!("a multiple of heads = {heads}")))
}

/// K: as given, or an even share of the model's width.
pub(super) fn key_width(
    given: Option<usize>,
    d_model: usize,
    heads: usize,
) -> Result<usize, ConfigError> {
    match given {
        Some(width) => positive("key_width", width),
        None if d_model.is_multiple_of(heads) && d_model > 0 => Ok(d_model / heads),
        None => Err(ConfigError::new(
            "heads",
            heads,
            format!("a divisor of d_model = {d_model}, unless `key_width` is given"),
        )),
    }
}

/// K: as given, or half of an even share of the model's width, as where keys are half as wide as values.
pub(super) fn half_key_width(
    given: Option<usize>,
    d_model: usize,
    heads: usize,
) -> Result<usize, ConfigError> {
    match given {
        Some(width) => positive("key_width", width),
        None if d_model.is_multiple_of(2 * heads) && d_model > 0 => Ok(d_model / (2 * heads)),
        None => Err(ConfigError::new(
            "heads",
            heads,
            format!("a divisor of half of d_model = {d_model}, unless `key_width` is given"),
        )),
    }
}

/// Refuses a divisor that is not above 0.
pub(super) fn check_divisor(key: &str, value: f64) -> Result<(), ConfigError> {
    match value > 0.0 && value.is_finite() {
        true => Ok(()),
        false => Err(ConfigError::new(key, value, "above 0")),
    }
}

/// V = K * `expand_v`, a whole number but for the rounding of `expand_v`: no share of 7 is 29.
pub(super) fn value_width(key_width: usize, expand_v: f64) -> Result<usize, ConfigError> {
    let product = key_width as f64 * expand_v;
    let width = product.round();
    if (1.0..=LARGEST as f64).contains(&width) && (product - width).abs() <= 1e-9 * width {
        return Ok(width as usize);
    }
    let want = format!("such that {key_width} (the key width) times it is a whole number above 0");
    Err(ConfigError::new("expand_v", expand_v, want))
}

/// Widths that follow from a config.
#[derive(Debug, Clone, Copy)]
pub(super) struct Widths {
    /// Value heads.
    pub(super) heads: usize,
    /// Of one head.
    pub(super) key: usize,
    pub(super) value: usize,
    /// Of all heads.
    pub(super) keys: usize,
    pub(super) values: usize,
}

/// The widths of queries, keys and values, from the keys of a config that bear on them.
pub(super) fn head_widths(
    heads: usize,
    value_heads: Option<usize>,
    given: Option<usize>,
    expand_v: f64,
    d_model: usize,
) -> Result<Widths, ConfigError> {
    let value_heads = check_heads(heads, value_heads)?;
    let key = key_width(given, d_model, heads)?;
    let value = value_width(key, expand_v)?;
    let (keys, values) = (heads * key, value_heads * value);
    Ok(Widths { heads: value_heads, key, value, keys, values })
}

/// Inner width `expand * d_model`, and heads of `head_width` that it falls into.
pub(super) fn expanded_heads(
    expand: usize,
    head_width: usize,
    d_model: usize,
) -> Result<(usize, usize), ConfigError> {
    let inner = positive("expand", expand)? * d_model;
    if inner.is_multiple_of(positive("head_width", head_width)?) {
        return Ok((inner, inner / head_width));
    }
    let want = format!("a divisor of expand * d_model = {inner}");
    Err(ConfigError::new("head_width", head_width, want))
}

/// Groups of heads that share B and C must divide the heads.
pub(super) fn check_groups(groups: usize, heads: usize) -> Result<(), ConfigError> {
    match heads.is_multiple_of(positive("groups", groups)?) {
        true => Ok(()),
        false => Err(ConfigError::new("groups", groups, format!("a divisor of the {heads} heads"))),
    }
}

/// State and arithmetic of a memory of `heads` matrices K x V: decay, write, read, and for a delta
/// rule the answer that is subtracted.
pub(super) fn memory_cost(heads: usize, key_width: usize, value_width: usize, delta: bool) -> Cost {
    let size = (heads * key_width * value_width) as u64;
    Cost { state_bytes: 4 * size, flops_per_token: size * if delta { 7 } else { 5 } }
}

/// State and arithmetic of a linear recurrence of `channels` numbers: decay and write.
pub(super) fn scan_cost(channels: usize) -> Cost {
    Cost { state_bytes: 4 * channels as u64, flops_per_token: 2 * channels as u64 }
}

/// The width of a recurrence: as given, or the model's.
pub(super) fn recurrent_width(given: Option<usize>, d_model: usize) -> Result<usize, ConfigError> {
    positive("width", given.unwrap_or(d_model))
}

/// Width of one of `heads` blocks that `width` falls into.
pub(super) fn block_width(heads: usize, width: usize) -> Result<usize, ConfigError> {
    match positive("width", width)?.is_multiple_of(positive("heads", heads)?) {
        true => Ok(width / heads),
        false => Err(ConfigError::new("heads", heads, format!("a divisor of the width, {width}"))),
    }
}

/// Multiplications and additions of a linear layer, for one token.
pub(super) fn linear_flops(from: usize, to: usize) -> u64 {
    2 * from as u64 * to as u64
}
