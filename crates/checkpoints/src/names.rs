//! Names and layouts of weights: ours, and those of a checkpoint.
//! ```text
//! linear        [in, out]     there [out, in]
//! convolution   [W, D]        there [D, 1, W]
//! norms         gamma, beta   there weight, bias
//! ```

use crate::families::{Channels, Family, Frame};
use crate::format::Format;
use crate::hub::{Form, Rows, Theirs};
use crate::paths::{parameter, renamed};
use linattn::nn::{LayerConfig, ParamKind};

/// How numbers lie in a checkpoint, by our own order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Layout {
    /// In the same order.
    Same,
    /// As columns of ours.
    Transposed,
}

/// A weight of ours, there.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Place {
    /// Its tensor's name.
    pub(crate) name: String,
    /// Names that the tensor had in older checkpoints.
    pub(crate) old: Vec<String>,
    /// The weight's shape.
    pub(crate) shape: Vec<usize>,
    pub(crate) layout: Layout,
    /// Rows of the tensor that are the weight; all of them if absent.
    pub(crate) rows: Option<Rows>,
    /// Tensors which, one after another, hold it in these rows, however they are cut.
    pub(crate) cut: Option<(Vec<String>, Rows)>,
}

impl Place {
    /// Shape of the tensor.
    pub(crate) fn whole(&self) -> Vec<usize> {
        let mut shape = self.shape.clone();
        if let (Some(rows), Some(first)) = (&self.rows, shape.first_mut()) {
            *first = rows.total;
        }
        shape
    }
}

/// The model that names are looked up for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Names<'a> {
    pub(crate) format: Format,
    /// Every layer's config.
    pub(crate) layers: &'a [&'a LayerConfig],
    pub(crate) d_model: usize,
}

impl Names<'_> {
    /// Where the weight at `path` of the model stands. `module` is what holds it, `shape` its shape with
    /// us, and `gated` whether its mixer has an output gate. None for what has no place of its own there.
    pub(crate) fn place(
        &self,
        path: &[String],
        module: &str,
        shape: &[usize],
        gated: bool,
    ) -> Option<Place> {
        let path: Vec<&str> = path.iter().map(String::as_str).collect();
        let theirs = match self.format {
            Format::Fla(family) => {
                let (name, old) = names(family, &path, gated)?;
                Theirs { old, ..Theirs::plain(name) }
            }
            Format::Hub(hub) => hub.find(self.layers, self.d_model, &path)?,
        };
        let kind = ParamKind::of(module, path.last()?);
        let weight = path.last() == Some(&"weight");
        let (layout, shape) = match (theirs.form, module, shape) {
            (Form::Heads(heads), _, &[width]) => (Layout::Same, vec![heads, width / heads.max(1)]),
            (Form::Channels, _, &[width]) => (Layout::Same, vec![1, 1, width]),
            (Form::Usual, _, &[rows, columns]) if kind == ParamKind::Matrix => {
                (Layout::Transposed, vec![columns, rows])
            }
            (_, "Struct:ShortConvolution", &[width, channels]) if weight => {
                (Layout::Transposed, vec![channels, 1, width])
            }
            _ => (Layout::Same, shape.to_vec()),
        };
        let Theirs { name, old, rows, cut, .. } = theirs;
        Some(Place { name, old, shape, layout, rows, cut })
    }
}

fn names(family: &Family, path: &[&str], gated: bool) -> Option<(String, Vec<String>)> {
    let frame = &family.frame;
    let root = frame.root;
    let none = Vec::new;
    Some(match path {
        ["embeddings", kind] => {
            (format!("{root}.embeddings.{kind}"), vec![format!("{root}.embedding.{kind}")])
        }
        ["norm", kind] => (format!("{root}.{}.{}", frame.norm, parameter(kind)), none()),
        ["lm_head", kind] => (format!("lm_head.{kind}"), none()),
        ["pre_norm", kind] => (format!("{root}.layers.0.pre_norm.{}", parameter(kind)), none()),
        ["layers", i, "attn_norm", kind] => {
            (format!("{root}.layers.{i}.{}.{}", frame.mixer_norm, parameter(kind)), none())
        }
        ["layers", i, "mlp", "0", kind] => {
            (format!("{root}.layers.{i}.{}.{}", frame.mlp_norm, parameter(kind)), none())
        }
        ["layers", i, "mlp", "1", inner @ ..] => {
            let inner = renamed(inner, frame.mlp_names);
            (format!("{root}.layers.{i}.{}.{inner}", frame.mlp), none())
        }
        ["layers", _, "attn", "lower_bound"] => return None,
        ["layers", i, "attn", inner @ ..] => {
            let at = format!("{root}.layers.{i}.{}", frame.mixer);
            let mut names: Vec<String> =
                mixer_names(family, inner).iter().map(|name| format!("{at}.{name}")).collect();
            // Where there is no gate, there is no norm that has one in it.
            if !gated && family.name_without_gate.is_some() && names.len() > 1 {
                names.swap(0, 1);
            }
            let name = names.remove(0);
            (name, names)
        }
        _ => return None,
    })
}

/// Names of a mixer's weight, the usual one first.
fn mixer_names(family: &Family, inner: &[&str]) -> Vec<String> {
    let usual = renamed(inner, family.names);
    let mut names = vec![usual.clone()];
    if let Some((gated, plain)) = family.name_without_gate
        && let Some(kind) = usual.strip_prefix(gated)
    {
        names.push(format!("{plain}{kind}"));
    }
    for (new, old) in family.old_names {
        if usual == *new {
            names.push((*old).to_string());
        }
    }
    names
}

/// Where model, layers and their parts stand.
impl Frame {
    /// Mixer and SwiGLU in every layer.
    pub(crate) const USUAL: Frame = Frame {
        root: "model",
        norm: "norm",
        mixer_norm: "attn_norm",
        mixer: "attn",
        mlp_norm: "mlp_norm",
        mlp: "mlp",
        mlp_names: &[],
        channels: Channels::SwiGlu,
        layer_norm: false,
    };
    /// As Mamba has it: no MLP.
    pub(crate) const MAMBA: Frame = Frame {
        root: "backbone",
        norm: "norm_f",
        mixer_norm: "norm",
        mixer: "mixer",
        channels: Channels::None,
        ..Frame::USUAL
    };
    /// As RWKV-7 has it: a channel mix, LayerNorm.
    pub(crate) const RWKV: Frame = Frame {
        mlp_norm: "ffn_norm",
        mlp: "ffn",
        mlp_names: &[("down_proj", "value")],
        channels: Channels::Rwkv("rwkv7"),
        layer_norm: true,
        ..Frame::USUAL
    };
    /// As RWKV-6 has it: the same, and a gate on the channel mix.
    pub(crate) const RWKV6: Frame = Frame {
        mlp_names: &[
            ("x_k", "key.mu"),
            ("x_r", "receptance.mu"),
            ("key", "key.linear"),
            ("receptance", "receptance.linear"),
            ("down_proj", "value"),
        ],
        channels: Channels::Rwkv("rwkv6"),
        ..Frame::RWKV
    };
}

/// Numbers of a matrix `[rows, columns]` as one of `[columns, rows]`.
pub(crate) fn transpose(values: &[f32], rows: usize, columns: usize) -> Vec<f32> {
    let mut turned = Vec::with_capacity(values.len());
    for column in 0..columns {
        turned.extend((0..rows).map(|row| values[row * columns + column]));
    }
    turned
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::families::family;

    fn name(model: &str, path: &str) -> (String, Vec<String>) {
        let path: Vec<&str> = path.split('.').collect();
        names(family(model).expect("known"), &path, true).expect("it has a place")
    }

    #[test]
    fn names_are_the_published_ones() {
        for (model, ours, theirs) in [
            ("gla", "embeddings.weight", "model.embeddings.weight"),
            ("gla", "norm.gamma", "model.norm.weight"),
            ("gla", "layers.3.attn_norm.gamma", "model.layers.3.attn_norm.weight"),
            ("gla", "layers.3.mlp.0.gamma", "model.layers.3.mlp_norm.weight"),
            ("gla", "layers.3.mlp.1.up_proj.weight", "model.layers.3.mlp.up_proj.weight"),
            ("gla", "layers.3.attn.gk_proj.1.bias", "model.layers.3.attn.gk_proj.1.bias"),
            (
                "retnet",
                "layers.3.attn.g_norm.norm.gamma",
                "model.layers.3.attn.g_norm_swish_gate.weight",
            ),
            ("gsa", "layers.3.attn.g_norm.gamma", "model.layers.3.attn.g_norm.weight"),
            ("linear_attn", "layers.3.attn.norm.norm.gamma", "model.layers.3.attn.norm.weight"),
            ("gated_deltanet", "layers.3.attn.a_log", "model.layers.3.attn.A_log"),
            ("comba", "layers.3.attn.d", "model.layers.3.attn.D"),
            ("mamba2", "layers.3.attn.norm.gamma", "backbone.layers.3.mixer.norm.weight"),
            ("mamba2", "layers.3.attn_norm.gamma", "backbone.layers.3.norm.weight"),
            ("mamba2", "norm.gamma", "backbone.norm_f.weight"),
            ("rwkv7", "layers.3.mlp.1.down_proj.weight", "model.layers.3.ffn.value.weight"),
            ("rwkv7", "layers.3.attn.w_lora.lora.2.bias", "model.layers.3.attn.w_lora.lora.2.bias"),
            ("rwkv6", "layers.3.mlp.1.x_k", "model.layers.3.ffn.key.mu"),
            ("rwkv6", "layers.3.mlp.1.key.weight", "model.layers.3.ffn.key.linear.weight"),
            ("hgrn", "layers.3.attn.g_norm.norm.gamma", "model.layers.3.attn.g_norm.weight"),
            ("mamba", "layers.3.attn.dt_proj.bias", "backbone.layers.3.mixer.dt_proj.bias"),
            ("rwkv7", "pre_norm.beta", "model.layers.0.pre_norm.bias"),
        ] {
            assert_eq!(name(model, ours).0, theirs);
        }
        let (_, old) = name("delta_net", "layers.0.attn.o_norm.norm.gamma");
        assert_eq!(old, ["model.layers.0.attn.norm.weight"]);
    }

    #[test]
    fn a_matrix_turned_twice_is_itself() {
        let values: Vec<f32> = (0..6).map(|x| x as f32).collect();
        let turned = transpose(&values, 2, 3);
        assert_eq!(turned, [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]);
        assert_eq!(transpose(&turned, 3, 2), values);
    }
}
