//! The published grid: each task's baseline, and one knob changed at a time.

use super::{
    CompressionConfig, FuzzyInContextRecallConfig, InContextRecallConfig, MemorizationConfig,
    NoisyInContextRecallConfig, SelectiveCopyingConfig,
};
use crate::TaskConfig;

#[cfg(test)]
mod tests;

/// One setting of the benchmark.
#[derive(Debug, Clone, PartialEq)]
pub struct Setting {
    /// The task and what differs from its baseline, for instance `in_context_recall/vocab_32` or
    /// `compression/baseline`.
    pub name: String,
    /// The task in this setting.
    pub task: TaskConfig,
}

/// All 66 published settings, task by task, each with its baseline first. The score of a task is the
/// mean over its settings, and the score of the benchmark the mean over the six tasks.
pub fn published_settings() -> Vec<Setting> {
    GRIDS.iter().flat_map(Grid::settings).collect()
}

/// Numbers in which settings differ. A task ignores the knobs that it does not have.
#[derive(Clone, Copy)]
struct Knobs {
    vocab: u32,
    length: usize,
    /// To train.
    examples: u64,
    noise: f64,
    copy: usize,
}

/// A task's baseline, and the values that its knobs take besides.
struct Grid {
    task: &'static str,
    make: fn(Knobs) -> TaskConfig,
    baseline: Knobs,
    vocab: &'static [u32],
    length: &'static [usize],
    examples: &'static [u64],
    noise: &'static [f64],
    copy: &'static [usize],
}

const FEWER: &[u64] = &[6_400, 3_200, 1_600, 800];
const RECALL: Knobs = Knobs { vocab: 16, length: 128, examples: 12_800, noise: 0.0, copy: 0 };

const GRIDS: [Grid; 6] = [
    Grid {
        task: "compression",
        make: |k| {
            TaskConfig::Compression(CompressionConfig::published(k.vocab, k.length, k.examples))
        },
        baseline: Knobs { length: 32, ..RECALL },
        vocab: &[32, 64, 128],
        length: &[64, 128, 256],
        examples: FEWER,
        noise: &[],
        copy: &[],
    },
    Grid {
        task: "fuzzy_in_context_recall",
        make: |k| {
            let config = FuzzyInContextRecallConfig::published(k.vocab, k.length, k.examples);
            TaskConfig::FuzzyInContextRecall(config)
        },
        baseline: RECALL,
        vocab: &[32, 64, 128],
        length: &[256, 512, 1024],
        examples: FEWER,
        noise: &[],
        copy: &[],
    },
    Grid {
        task: "in_context_recall",
        make: |k| {
            let config = InContextRecallConfig::published(k.vocab, k.length, k.examples);
            TaskConfig::InContextRecall(config)
        },
        baseline: RECALL,
        vocab: &[32, 64, 128],
        length: &[256, 512, 1024],
        examples: FEWER,
        noise: &[],
        copy: &[],
    },
    Grid {
        task: "memorization",
        make: |k| {
            TaskConfig::Memorization(MemorizationConfig::published(k.vocab, k.length, k.examples))
        },
        baseline: Knobs { vocab: 256, length: 32, examples: 256, ..RECALL },
        vocab: &[512, 1024, 2048, 4096, 8192],
        length: &[],
        examples: &[],
        noise: &[],
        copy: &[],
    },
    Grid {
        task: "noisy_in_context_recall",
        make: |k| {
            let config =
                NoisyInContextRecallConfig::published(k.vocab, k.length, k.noise, k.examples);
            TaskConfig::NoisyInContextRecall(config)
        },
        baseline: Knobs { vocab: 32, noise: 0.2, ..RECALL },
        vocab: &[48, 80, 144],
        length: &[256, 512, 1024],
        examples: FEWER,
        noise: &[0.4, 0.6, 0.8],
        copy: &[],
    },
    Grid {
        task: "selective_copying",
        make: |k| {
            let config = SelectiveCopyingConfig::published(k.vocab, k.length, k.copy, k.examples);
            TaskConfig::SelectiveCopying(config)
        },
        baseline: Knobs { length: 256, copy: 16, ..RECALL },
        vocab: &[32, 64, 128],
        length: &[512, 1024],
        examples: FEWER,
        noise: &[],
        copy: &[32, 64, 96],
    },
];

impl Grid {
    fn settings(&self) -> Vec<Setting> {
        let base = self.baseline;
        let named = |name: String, knobs| Setting {
            name: format!("{}/{name}", self.task),
            task: (self.make)(knobs),
        };
        let mut settings = vec![named("baseline".into(), base)];
        let vocab = |&vocab| named(format!("vocab_{vocab}"), Knobs { vocab, ..base });
        settings.extend(self.vocab.iter().map(vocab));
        let length = |&length| named(format!("length_{length}"), Knobs { length, ..base });
        settings.extend(self.length.iter().map(length));
        let examples =
            |&examples| named(format!("examples_{examples}"), Knobs { examples, ..base });
        settings.extend(self.examples.iter().map(examples));
        let noise = |&noise| named(format!("noise_{noise}"), Knobs { noise, ..base });
        settings.extend(self.noise.iter().map(noise));
        let copy = |&copy| named(format!("copy_{copy}"), Knobs { copy, ..base });
        settings.extend(self.copy.iter().map(copy));
        settings
    }
}
