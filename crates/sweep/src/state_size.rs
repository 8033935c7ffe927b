//! The bytes of a sequence's state as the published sizes of MQAR count them.
//! ```text
//! d wide, f32; K and V widths of a key and a value, H heads, N numbers a channel
//!
//! deltanet, gated_deltanet, gla, rwkv7    H K V
//! linear_attention                        H F V, F features a key
//! mamba, mamba2                           expand d N
//! base_conv                               conv_size d
//! ```
//! Convolutions before queries, keys and values, which a model needs to go on with all the same, are
//! left out, and so is everything that these formulas do not have: `state_bytes` counts them. Source:
//! the state sizes that HazyResearch/zoology prints beside its models.

use toml::Table;

use crate::requirements::layers;

/// The column of the rows.
pub(crate) const PUBLISHED_BYTES: &str = "published_state_bytes";

/// Bytes, if every layer's mixer is one that published sizes know.
pub(crate) fn published_state_bytes(config: &Table) -> Option<u64> {
    let d = config.get("model")?.get("d_model")?.as_integer()?;
    let mut sum = 0.0;
    for layer in layers(config) {
        let (name, mixer) = layer.get("mixer")?.as_table()?.iter().next()?;
        sum += numbers(name, mixer.as_table()?, d as f64)?;
    }
    (sum > 0.0).then_some(4 * sum as u64)
}

/// Numbers that a layer keeps.
fn numbers(name: &str, mixer: &Table, d: f64) -> Option<f64> {
    let number = |key: &str| mixer.get(key).and_then(crate::requirements::number);
    let heads = number("heads").unwrap_or(1.0);
    let half = if name == "gla" { 0.5 } else { 1.0 };
    let key = number("key_width").unwrap_or(half * d / heads);
    let twice = matches!(name, "gated_deltanet" | "gla");
    let value = key * number("expand_v").unwrap_or(if twice { 2.0 } else { 1.0 });
    // Values may have more heads than keys, which then have a state each.
    let heads = number("value_heads").unwrap_or(heads);
    match name {
        "deltanet" | "gated_deltanet" | "gla" => Some(heads * key * value),
        "rwkv7" => Some(heads * key * key),
        "linear_attention" => Some(heads * features(mixer, key)? * value),
        "mamba" | "mamba2" => Some(number("expand")? * d * number("d_state")?),
        "base_conv" => Some(number("conv_size")? * d),
        _ => None,
    }
}

/// Features of a key, for maps whose published sizes are known.
fn features(mixer: &Table, key: f64) -> Option<f64> {
    match mixer.get("feature_map")?.as_str()? {
        "elu" | "relu" | "identity" => Some(key),
        "taylor" => Some(1.0 + key + key * (key + 1.0) / 2.0),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Published;

    fn bytes(d: u32, layers: &str) -> Option<u64> {
        let text = format!("model = {{ d_model = {d}, layers = [{layers}] }}");
        published_state_bytes(&toml::from_str(&text).unwrap())
    }

    /// The sizes at which the published numbers are plotted.
    #[test]
    fn sizes_are_those_of_the_published_points() {
        let table = |name: &str| {
            Published::embedded().tables.iter().find(|table| table.name == name).unwrap()
        };
        let conv = "{ repeat = 1, mixer = { base_conv = { conv_size = 3 } } }";
        for (model, mixer) in [
            ("DeltaNet", "deltanet = { heads = 2, conv_size = 4 }"),
            ("Gated DeltaNet", "gated_deltanet = { heads = 2, conv_size = 4 }"),
            ("GLA", "gla = { heads = 2, expand_v = 2.0 }"),
        ] {
            for (d, (wanted, _)) in
                [64, 128, 256].into_iter().zip(table("mqar_mix_readme").over_state(model))
            {
                let layers = format!("{conv}, {{ repeat = 1, mixer = {{ {mixer} }} }}");
                assert_eq!(bytes(d, &layers), Some(wanted as u64), "{model} at {d}");
            }
        }
        let mamba = |d, n| {
            bytes(
                d,
                &format!(
                    "{{ repeat = 2, mixer = {{ mamba2 = {{ d_state = {n}, expand = 2 }} }} }}"
                ),
            )
        };
        let points = table("mqar_mix_readme_points").over_state("Mamba-2");
        for (d, n, place) in [(64, 8, 0), (64, 16, 1), (64, 24, 2), (256, 24, 6)] {
            assert_eq!(mamba(d, n), Some(points[place].0 as u64), "{d}, {n}");
        }
    }

    #[test]
    fn a_mixer_that_published_sizes_do_not_know_has_none() {
        assert_eq!(bytes(64, "{ mixer = { attention = { heads = 2 } } }"), None);
        assert_eq!(bytes(64, ""), None);
    }
}
