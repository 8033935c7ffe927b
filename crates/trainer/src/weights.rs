//! A model's weights in a file, each under its name: `layers.0.attn.q_proj.weight`.
//!
//! Names say where in the model a weight stands, and not which mixer holds it among those that there
//! are, so that files outlive new mixers. An optimizer knows weights by their ids, which follow from
//! the names.

use crate::config::RunConfig;
use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::tensor::{Element, Tensor, backend::Backend};
use burn_store::{
    ApplyResult, ModuleSnapshot, ModuleStore, PathFilter, SafetensorsStore, TensorSnapshot,
};
use linattn::nn::LanguageModel;
use std::collections::BTreeSet;
use std::path::Path;
use std::rc::Rc;

/// Parts of a model's weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    /// All of them.
    Whole,
    /// Those of low-rank adapters.
    Adapters,
}

impl Part {
    /// Of the model that a run trains.
    pub(crate) fn of(run: &RunConfig) -> Self {
        if run.train.lora.is_some() { Self::Adapters } else { Self::Whole }
    }

    fn filter(self) -> PathFilter {
        match self {
            Self::Whole => PathFilter::new().match_all(),
            Self::Adapters => PathFilter::new().with_predicate(|path, _| is_adapters(path)),
        }
    }

    fn holds(self, name: &str) -> bool {
        self == Self::Whole || is_adapters(name)
    }
}

fn is_adapters(name: &str) -> bool {
    name.ends_with(".lora_a") || name.ends_with(".lora_b")
}

/// Writes a part of the weights of `model` to a safetensors file.
pub(crate) fn save<B: Backend>(
    model: &LanguageModel<B>,
    part: Part,
    path: &Path,
) -> Result<(), String> {
    // One entry alone: of several, the order in the file would be drawn anew every time.
    let mut store = SafetensorsStore::from_file(path)
        .filter(part.filter())
        .skip_enum_variants(true)
        .overwrite(true)
        .clear_metadata()
        .metadata("format", "linattn");
    ModuleSnapshot::<B>::save_into(model, &mut store).map_err(|e| e.to_string())
}

/// `model` with the weights of a file that [`save`] wrote, to the last bit.
pub(crate) fn load<B: Backend>(
    mut model: LanguageModel<B>,
    part: Part,
    path: &Path,
) -> Result<LanguageModel<B>, String> {
    let mut store = SafetensorsStore::from_file(path);
    let stored = store.get_all_snapshots().map_err(|e| e.to_string())?;
    let snapshots = stored.values().map(for_backend::<B>).collect();
    let filter = Some(part.filter());
    let result = ModuleSnapshot::<B>::apply(&mut model, snapshots, filter, None, true);
    match complaints(&result, part) {
        None => Ok(model),
        Some(text) => Err(text),
    }
}

/// Numbers of a part of the weights of `model`.
pub(crate) fn count<B: Backend>(model: &LanguageModel<B>, part: Part) -> usize {
    let all = ModuleSnapshot::<B>::collect(model, Some(part.filter()), None, true);
    all.iter().map(|tensor| tensor.shape.iter().product::<usize>()).sum()
}

/// Sizes of the model in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sizes {
    /// Ids that it knows.
    pub(crate) vocab: usize,
    pub(crate) width: usize,
    pub(crate) layers: usize,
    /// Numbers in all.
    pub(crate) numbers: usize,
}

/// Sizes of a model as its file has them, before there is a model.
pub(crate) fn sizes(path: &Path) -> Result<Sizes, String> {
    let mut store = SafetensorsStore::from_file(path);
    let all = store.get_all_snapshots().map_err(|e| e.to_string())?;
    let &[vocab, width] = (match all.get("embeddings.weight") {
        Some(embeddings) => &embeddings.shape[..],
        None => return Err("no embeddings.weight".into()),
    }) else {
        return Err("embeddings.weight is no matrix".into());
    };
    let layers: BTreeSet<&str> =
        all.keys().filter_map(|name| name.strip_prefix("layers.")?.split('.').next()).collect();
    let size = |tensor: &TensorSnapshot| {
        tensor.shape.iter().fold(1_usize, |size, &side| size.saturating_mul(side))
    };
    let numbers = all.values().fold(0_usize, |sum, tensor| sum.saturating_add(size(tensor)));
    Ok(Sizes { vocab, width, layers: layers.len(), numbers })
}

/// The same numbers as the backend keeps them.
fn for_backend<B: Backend>(stored: &TensorSnapshot) -> TensorSnapshot {
    let (read, dtype) = (stored.clone_data_fn(), <B::FloatElem as Element>::dtype());
    TensorSnapshot::from_closure(
        Rc::new(move || read().map(|data| data.convert_dtype(dtype))),
        dtype,
        stored.shape.clone(),
        stored.path_stack.clone().unwrap_or_default(),
        stored.container_stack.clone().unwrap_or_default(),
        stored.tensor_id.unwrap_or_default(),
    )
}

/// Differences between a file's weights and that part of a model's.
fn complaints(result: &ApplyResult, part: Part) -> Option<String> {
    let missing = result.missing.iter().filter(|(name, _)| part.holds(name));
    let missing = missing.map(|(name, _)| format!("{name} is missing"));
    let unknown = result.unused.iter().map(|name| format!("{name} is none of the model's"));
    let wrong = result.errors.iter().map(ToString::to_string);
    let all: Vec<String> = missing.chain(unknown).chain(wrong).collect();
    (!all.is_empty()).then(|| all.join("; "))
}

/// Whether a container is one of several kinds of the same thing, of which names say nothing.
pub(crate) fn is_variant(container: &str) -> bool {
    container.starts_with("Enum:")
}

/// `module` with ids that follow from its weights' names.
pub(crate) fn with_stable_ids<B: Backend, M: Module<B>>(module: M) -> M {
    struct Rename(Vec<String>);
    impl Rename {
        fn id(&self) -> ParamId {
            // FNV-1a.
            let hash = self.0.join(".").bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
                (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
            });
            ParamId::from(hash)
        }
    }
    impl<B: Backend> ModuleMapper<B> for Rename {
        fn enter_module(&mut self, name: &str, container: &str) {
            if !is_variant(container) {
                self.0.push(name.to_string());
            }
        }
        fn exit_module(&mut self, _name: &str, container: &str) {
            if !is_variant(container) {
                self.0.pop();
            }
        }
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
            let (_, weight, mapper) = param.consume();
            Param::from_mapped_value(self.id(), weight, mapper)
        }
    }
    module.map(&mut Rename(vec![]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::backend::Flex;
    use burn::module::ModuleVisitor;
    use linattn::nn::LanguageModelConfig;
    use std::collections::BTreeMap;

    fn model() -> LanguageModel<Flex> {
        let config: LanguageModelConfig = toml::from_str(
            "d_model = 8\ntie_embeddings = false\n\
             layers = [{ mixer.gated_deltanet = { heads = 2 }, mlp.swiglu = {} },\
                       { mixer.kda = { heads = 2 } }]",
        )
        .expect("a config");
        config.init(11, &Default::default()).expect("a model")
    }

    fn weights(model: &LanguageModel<Flex>) -> BTreeMap<String, Vec<u8>> {
        let list = ModuleSnapshot::<Flex>::collect(model, None, None, true);
        list.iter()
            .map(|s| (s.full_path(), s.to_data().expect("a weight").as_bytes().to_vec()))
            .collect()
    }

    #[test]
    fn weights_come_back_to_the_last_bit_under_names_without_the_mixers() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("model.safetensors");
        let first = model();
        save(&first, Part::Whole, &path).expect("writable");
        let second = load(model(), Part::Whole, &path).expect("the same model");
        assert_eq!(weights(&first), weights(&second));
        let names: Vec<String> = weights(&first).into_keys().collect();
        for name in ["layers.0.attn.q_proj.weight", "layers.0.mlp.0.gamma", "norm.gamma"] {
            assert!(names.contains(&name.to_string()), "{name} is not in {names:?}");
        }
        let sizes = sizes(&path).expect("a model");
        let numbers = weights(&first).values().map(|bytes| bytes.len() / 4).sum();
        assert_eq!(sizes, Sizes { vocab: 11, width: 8, layers: 2, numbers });
        let bytes = std::fs::read(&path).expect("a file");
        save(&second, Part::Whole, &path).expect("writable");
        assert_eq!(std::fs::read(&path).expect("a file"), bytes);
    }

    #[test]
    fn another_models_weights_are_refused_by_name() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("model.safetensors");
        save(&model(), Part::Whole, &path).expect("writable");
        let other: LanguageModelConfig =
            toml::from_str("d_model = 8\nlayers = [{ mixer.retnet = { heads = 2 } }]")
                .expect("a config");
        let other = other.init::<Flex>(11, &Default::default()).expect("a model");
        let refused = load(other, Part::Whole, &path);
        let text = refused.expect_err("other weights");
        assert!(text.contains("layers.0.attn.g_norm.norm.gamma is missing"), "{text}");
        assert!(text.contains("lm_head.weight is none of the model's"), "{text}");
    }

    #[test]
    fn ids_follow_from_names() {
        struct Ids(Vec<ParamId>);
        impl ModuleVisitor<Flex> for Ids {
            fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<Flex, D>>) {
                self.0.push(param.id);
            }
        }
        let ids = || {
            let mut ids = Ids(vec![]);
            with_stable_ids(model()).visit(&mut ids);
            ids.0
        };
        let mut once = ids();
        assert_eq!(once, ids());
        let count = once.len();
        once.sort_by_key(ParamId::val);
        once.dedup();
        assert_eq!(once.len(), count, "no two weights have one id");
    }
}
