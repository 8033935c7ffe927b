//! `convert`: checkpoints of other projects to folders of runs, and back.

use crate::device::{self, Job};
use crate::eval::checkpoint;
use crate::train::guarded;
use crate::{BAD_INPUT, FAILED, fail, memory, output};
use burn::module::Module;
use linattn::ops::LinearAttentionBackend;
use linattn_checkpoints::{
    CheckpointError, Exported, Imported, Outcome, Precision, export, export_adapters, import,
    import_with_adapters,
};
use linattn_trainer::{
    FolderError, ImportedModel, StoredError, StoredModel, TrainBackend, Which, companions,
    store_model,
};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Brings models of flash-linear-attention and of the Hugging Face hub here, and takes ours there.
#[derive(Debug, clap::Parser)]
#[command(name = "convert", version)]
pub struct ConvertArgs {
    #[command(subcommand)]
    direction: Direction,
}

#[derive(Debug, clap::Subcommand)]
enum Direction {
    /// Makes a run's folder of a checkpoint, for `eval` and `generate`
    Import(ImportArgs),
    /// Makes a checkpoint of a run's model
    Export(ExportArgs),
    /// Makes a run of ordinary weights of one with low-rank adapters: W + (alpha / rank) A B
    Merge(MergeArgs),
}

#[derive(Debug, clap::Args)]
struct MergeArgs {
    /// The folder of the run with adapters
    run: PathBuf,
    /// The new run's folder: runs/NAME
    #[arg(long)]
    out: PathBuf,
    /// Which of the run's checkpoints: best, last, or a step
    #[arg(long, default_value = "best", value_parser = checkpoint)]
    checkpoint: Which,
    /// Deletes the run in the new folder first
    #[arg(long)]
    overwrite: bool,
    /// Where the model is put together: cpu, cuda:N, rocm:N, vulkan:N or metal:N
    #[arg(long, default_value = "cpu")]
    device: String,
}

#[derive(Debug, clap::Args)]
struct ImportArgs {
    /// The folder with config.json and model.safetensors, or its parts with their index
    folder: PathBuf,
    /// A folder of Hugging Face's PEFT with low-rank adapters of that model, to be added to its weights
    #[arg(long)]
    adapters: Option<PathBuf>,
    /// The run's folder: runs/NAME
    #[arg(long)]
    out: PathBuf,
    /// Deletes the run in that folder first
    #[arg(long)]
    overwrite: bool,
    /// Where the model is put together: cpu, cuda:N, rocm:N, vulkan:N or metal:N
    #[arg(long, default_value = "cpu")]
    device: String,
}

#[derive(Debug, clap::Args)]
struct ExportArgs {
    /// The run's folder
    run: PathBuf,
    /// The checkpoint's folder
    #[arg(long)]
    out: PathBuf,
    /// The checkpoint's kind: gated_deltanet, gla, qwen3_5 ...; by default the one that the model came from,
    /// else the first that can say it
    #[arg(long)]
    family: Option<String>,
    /// Writes the run's low-rank adapters alone, as Hugging Face's PEFT reads them; their numbers are f32
    #[arg(long, conflicts_with = "dtype")]
    adapters: bool,
    /// Type that numbers are written as; a number that the type does not have is refused
    #[arg(long, value_enum, default_value_t = Numbers::F32)]
    dtype: Numbers,
    /// Which of the run's checkpoints: best, last, or a step
    #[arg(long, default_value = "best", value_parser = checkpoint)]
    checkpoint: Which,
    /// Replaces the checkpoint in that folder
    #[arg(long)]
    overwrite: bool,
    /// Where the model is put together: cpu, cuda:N, rocm:N, vulkan:N or metal:N
    #[arg(long, default_value = "cpu")]
    device: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Numbers {
    /// As they are
    F32,
    /// Rounded to 16 bits, of f32's range
    Bf16,
    /// Rounded to 16 bits, finer and of a smaller range
    F16,
}

impl From<Numbers> for Precision {
    fn from(numbers: Numbers) -> Self {
        match numbers {
            Numbers::F32 => Precision::F32,
            Numbers::Bf16 => Precision::Bf16,
            Numbers::F16 => Precision::F16,
        }
    }
}

/// Why a model stays where it is.
#[derive(Debug, thiserror::Error)]
enum ConvertError {
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error(transparent)]
    Stored(#[from] StoredError),
    #[error(transparent)]
    Folder(#[from] FolderError),
    #[error(
        "{path} holds no low-rank adapters; it has to be a run that was trained with `train.lora`"
    )]
    NoAdapters { path: PathBuf },
    #[error("{path} is the run itself; `--out` has to be another folder")]
    Itself { path: PathBuf },
}

/// Runs the command and gives its exit code: 0 done, 1 failed, 2 bad input.
pub fn convert(args: ConvertArgs) -> ExitCode {
    match &args.direction {
        Direction::Import(args) => match fits_in_memory(&args.folder, memory::free()) {
            Ok(()) => carry(&args.device, args),
            Err(e) => fail(BAD_INPUT, &e),
        },
        Direction::Export(args) => carry(&args.device, args),
        Direction::Merge(args) => carry(&args.device, args),
    }
}

/// Refuses a checkpoint whose files, and the model beside them, do not fit into `free` bytes.
fn fits_in_memory(folder: &Path, free: Option<f64>) -> Result<(), String> {
    let length = |file: PathBuf| Some(std::fs::metadata(file).ok()?.len() as f64);
    let files = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|file| file.path());
    let tensors = files.filter(|file| file.extension().is_some_and(|end| end == "safetensors"));
    let needed = 2.0 * tensors.filter_map(length).sum::<f64>();
    match free.filter(|free| needed > *free) {
        None => Ok(()),
        Some(free) => Err(format!(
            "{} needs {:.1} GiB of memory at the least, twice its .safetensors files, and {:.1} GiB are \
             free; a computer with more would do",
            folder.display(),
            memory::gibibytes(needed),
            memory::gibibytes(free)
        )),
    }
}

/// Does a conversion on a device, and says what was done.
fn carry<J: Job<Output = Result<String, ConvertError>>>(device: &str, job: J) -> ExitCode {
    let choice = match device::choose(device) {
        Ok(choice) => choice,
        Err(e) => return fail(BAD_INPUT, &e),
    };
    choice.advise();
    match guarded(&choice, job) {
        Ok(Ok(done)) => output::show(&format!("{done}\n")),
        // A disk that is full is nobody's mistake.
        Ok(Err(e @ ConvertError::Folder(FolderError::Io { doing: "write", .. }))) => {
            fail(FAILED, &e)
        }
        Ok(Err(e)) => fail(BAD_INPUT, &e),
        Err(code) => code,
    }
}

impl Job for &ImportArgs {
    type Output = Result<String, ConvertError>;

    fn run<B: TrainBackend>(self, devices: &[B::Device]) -> Self::Output {
        let Imported { family, config, vocab, model, tokenizer, end_ids, kept, left_out } =
            self.read::<B::InnerBackend>(&devices[0])?;
        let imported = ImportedModel {
            config: &config,
            tokenizer: tokenizer.as_deref(),
            end_ids: &end_ids,
            companions: &companions(&self.folder),
            kept: kept.as_deref(),
        };
        store_model(&self.out, self.overwrite, &imported, &model)?;
        let text = if tokenizer.is_some() { "with" } else { "without" };
        let adapters = if self.adapters.is_some() { ", adapters in its weights" } else { "" };
        Ok(format!(
            "{family}, {} parameters, {vocab} token ids, {text} a tokenizer{adapters}, into {}{}",
            model.num_params(),
            self.out.display(),
            without(&left_out)
        ))
    }
}

impl ImportArgs {
    fn read<B: LinearAttentionBackend>(
        &self,
        device: &B::Device,
    ) -> Result<Imported<B>, CheckpointError> {
        match &self.adapters {
            Some(adapters) => import_with_adapters(&self.folder, adapters, device),
            None => import(&self.folder, device),
        }
    }
}

impl Job for &ExportArgs {
    type Output = Result<String, ConvertError>;

    fn run<B: TrainBackend>(self, devices: &[B::Device]) -> Self::Output {
        let stored = StoredModel::open(&self.run, self.checkpoint)?;
        if self.adapters {
            return self.adapters::<B::InnerBackend>(&stored, &devices[0]);
        }
        let model = stored.load::<B::InnerBackend>(&devices[0])?;
        let exported = Exported {
            model: &model,
            config: &stored.config,
            vocab: stored.vocab,
            tokenizer: stored.tokenizer.as_deref(),
            end_ids: &stored.end_ids,
            companions: &stored.companions,
            kept: stored.kept.as_deref(),
        };
        let (family, out) = (self.family.as_deref(), &self.out);
        let Outcome { family, left_out } =
            export(&exported, family, self.dtype.into(), out, self.overwrite)?;
        let (parameters, rest) = (model.num_params(), without(&left_out));
        Ok(format!("{family}, {parameters} parameters, into {}{rest}", out.display()))
    }
}

impl ExportArgs {
    /// Writes the adapters alone.
    fn adapters<B: LinearAttentionBackend>(
        &self,
        stored: &StoredModel,
        device: &B::Device,
    ) -> Result<String, ConvertError> {
        let Some(lora) = stored.adapters() else {
            return Err(ConvertError::NoAdapters { path: self.run.clone() });
        };
        let exported = Exported {
            model: &stored.load_with_adapters::<B>(device)?,
            config: &stored.config,
            vocab: stored.vocab,
            tokenizer: None,
            end_ids: &stored.end_ids,
            companions: &stored.companions,
            kept: stored.kept.as_deref(),
        };
        let family = self.family.as_deref();
        let family = export_adapters(&exported, lora, family, &self.out, self.overwrite)?;
        Ok(format!("{family}, adapters of rank {}, into {}", lora.rank, self.out.display()))
    }
}

impl Job for &MergeArgs {
    type Output = Result<String, ConvertError>;

    fn run<B: TrainBackend>(self, devices: &[B::Device]) -> Self::Output {
        let stored = StoredModel::open(&self.run, self.checkpoint)?;
        if stored.adapters().is_none() {
            return Err(ConvertError::NoAdapters { path: self.run.clone() });
        }
        if is_same(&self.run, &self.out) {
            return Err(ConvertError::Itself { path: self.run.clone() });
        }
        let model = stored.load::<B::InnerBackend>(&devices[0])?;
        let kept = stored.kept_bytes()?;
        let merged = ImportedModel {
            config: &stored.config,
            tokenizer: stored.tokenizer.as_deref(),
            end_ids: &stored.end_ids,
            companions: &stored.companions,
            kept: kept.as_deref(),
        };
        store_model(&self.out, self.overwrite, &merged, &model)?;
        Ok(format!("{} parameters, into {}", model.num_params(), self.out.display()))
    }
}

/// Whether both are one folder.
fn is_same(a: &Path, b: &Path) -> bool {
    matches!((a.canonicalize(), b.canonicalize()), (Ok(a), Ok(b)) if a == b)
}

/// Says which parts of a checkpoint are missing: the first two words of their tensors' names, and how many
/// tensors each has.
fn without(left_out: &[String]) -> String {
    let mut parts: BTreeMap<String, usize> = BTreeMap::new();
    for name in left_out {
        let part: Vec<&str> = name.split('.').take(2).collect();
        *parts.entry(part.join(".")).or_default() += 1;
    }
    let parts: Vec<String> =
        parts.iter().map(|(part, tensors)| format!("{part} ({tensors} tensors)")).collect();
    match parts.is_empty() {
        true => String::new(),
        false => format!("; without {}", parts.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_checkpoint_that_is_larger_than_the_memory_is_refused_by_folder() {
        let desk = tempfile::tempdir().expect("a folder");
        let part = desk.path().join("model-00001-of-00002.safetensors");
        std::fs::write(&part, [0; 600]).expect("writable");
        std::fs::write(desk.path().join("tokenizer.json"), [0; 600]).expect("writable");
        let fits = |free| fits_in_memory(desk.path(), free);
        assert_eq!((fits(Some(1200.0)), fits(None)), (Ok(()), Ok(())));
        let why = fits(Some(1199.0)).expect_err("too large");
        assert!(why.starts_with(&desk.path().display().to_string()), "{why}");
    }
}
