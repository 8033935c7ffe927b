//! Keys that configs of several layouts share.

use super::layout::expand_v;
use crate::config::keys::{Keys, MOST_LAYERS};
use serde_json::{Value, json};

/// Names of an activation that is SiLU.
pub(super) const SILU: &[&str] = &["\"silu\"", "\"swish\""];
/// A flag that has to be false.
pub(super) const NO: &[&str] = &["false"];

impl Keys<'_> {
    /// `hidden_size` and `num_hidden_layers`; None where they have no bounds.
    pub(super) fn sizes(&mut self) -> Option<(usize, usize)> {
        let before = self.faults();
        let d_model = self.count("hidden_size", "null");
        let layers = self.count_to(MOST_LAYERS, "num_hidden_layers", "null");
        (self.faults() == before).then_some((d_model, layers))
    }

    /// A word for each of `layers` layers; `usual` where the key is left out.
    pub(super) fn words_of_layers(
        &mut self,
        key: &str,
        allowed: &[&str],
        layers: usize,
        usual: impl Fn(usize) -> &'static str,
    ) -> Vec<String> {
        if !self.has(key) {
            let _asked_for = self.get(key, "null");
            return (0..layers).map(|i| usual(i).to_string()).collect();
        }
        let words = self.words(key, allowed);
        if words.len() != layers && !words.is_empty() {
            let value = self.get(key, "null");
            self.fault(key, &value, format!("{layers} words, as many as `num_hidden_layers`"));
        }
        words
    }

    /// Base of the rotation and the share of a head that is rotated, which stand in `rope_parameters` or
    /// beside it. None where `rope_parameters` is null or has no base, and none stands beside it.
    pub(super) fn rotation(&mut self, usual_share: &str) -> Option<(f64, f64)> {
        self.only("rope_scaling", &["null"]);
        let pair = |keys: &mut Keys<'_>| {
            ["rope_theta", "partial_rotary_factor"].map(|key| match keys.has(key) {
                true => Some(keys.positive(key, "1.0")),
                false => {
                    let _asked_for = keys.get(key, "null");
                    None
                }
            })
        };
        // Sections of a rotation in three dimensions: of text all three are the position.
        let of_text = ["mrope_section", "mrope_interleaved"];
        let inner = self.table("rope_parameters", |keys| {
            keys.idle(&of_text);
            keys.only("rope_type", &["\"default\"", "null"]);
            pair(keys)
        });
        let [inner, outer] = [inner.unwrap_or_default(), pair(self)];
        for (key, (inner, outer)) in
            ["rope_theta", "partial_rotary_factor"].into_iter().zip(inner.into_iter().zip(outer))
        {
            if let (Some(inner), Some(outer)) = (inner, outer)
                && inner != outer
            {
                let want = format!("{inner}, as in `rope_parameters`");
                self.fault(key, &outer.into(), want);
            }
        }
        let usual = usual_share.parse().ok();
        let share = inner[1].or(outer[1]).or(usual).unwrap_or(1.0);
        inner[0].or(outer[0]).map(|theta| (theta, share))
    }

    /// Gated DeltaNet of the keys that start with `linear_`.
    pub(super) fn delta_net(&mut self, norm_eps: f64) -> Value {
        let [heads, value_heads, key, value, conv_size] = [
            "linear_num_key_heads",
            "linear_num_value_heads",
            "linear_key_head_dim",
            "linear_value_head_dim",
            "linear_conv_kernel_dim",
        ]
        .map(|name| self.count(name, if name.contains("conv") { "4" } else { "null" }));
        let mut mixer = json!({
            "heads": heads, "key_width": key, "expand_v": expand_v(key, value),
            "conv_size": conv_size, "output_gate": true, "norm_eps": norm_eps,
        });
        if value_heads != heads {
            mixer["value_heads"] = value_heads.into();
        }
        mixer
    }

    /// Attention of so many heads, `rope` given as [`rotation`](Self::rotation) gives it.
    pub(super) fn attention_heads(
        &mut self,
        head_width: Option<usize>,
        rope: Option<(f64, f64)>,
    ) -> Value {
        let heads = self.count("num_attention_heads", "null");
        let key_value_heads = match self.has("num_key_value_heads") {
            true => self.count("num_key_value_heads", "null"),
            false => {
                let _asked_for = self.get("num_key_value_heads", "null");
                heads
            }
        };
        let mut attention = json!({ "heads": heads, "rope": rope.is_some() });
        if key_value_heads != heads {
            attention["key_value_heads"] = key_value_heads.into();
        }
        if let Some(width) = head_width {
            attention["key_width"] = width.into();
        }
        if let Some((theta, share)) = rope {
            attention["rope_theta"] = theta.into();
            if let Some(width) = head_width.filter(|_| share != 1.0) {
                attention["rope_width"] = ((width as f64 * share) as usize).into();
            }
        }
        attention
    }
}

/// A rotation as `rope_parameters` says it, of an attention with every width spelled out.
pub(super) fn rope_parameters(attention: &Value) -> Value {
    let share = match (attention["rope_width"].as_f64(), attention["key_width"].as_f64()) {
        (Some(part), Some(width)) => part / width,
        _ => 1.0,
    };
    json!({
        "rope_type": "default", "rope_theta": attention["rope_theta"],
        "partial_rotary_factor": share,
    })
}
