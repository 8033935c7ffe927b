//! Arguments of the command line, and the command that repeats a case.

use burn::tensor::DType;
use clap::Parser;
use linattn_sweep::Shard;

/// Random calls of the recurrences against f64.
#[derive(Debug, Clone, Parser)]
pub struct Args {
    /// auto, cpu (or flex), cuda:N, rocm:N, vulkan:N (or wgpu) or metal:N
    #[arg(long, default_value = "auto")]
    pub device: String,
    /// Cases to try
    #[arg(long, default_value_t = 300, value_parser = clap::value_parser!(u64).range(1..))]
    pub cases: u64,
    /// Seed of the first case; the next has the next
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Draws widths of keys and values from 1 to 256
    #[arg(long, conflicts_with = "widths")]
    pub free_widths: bool,
    /// Widths of keys and values to draw from, such as 64x64,128x256
    #[arg(long, value_delimiter = ',', value_parser = widths)]
    pub widths: Vec<(usize, usize)>,
    /// Runs the cases of one part of the kernels, I/N
    #[arg(long, default_value = "1/1")]
    pub shard: Shard,
    /// Types of q, k and v to draw from: f32, bf16, f16
    #[arg(long, value_delimiter = ',', default_values_t = [String::from("f32")])]
    pub types: Vec<String>,
    /// Runs every case as sequences of different lengths in one row
    #[arg(long)]
    pub packed: bool,
    /// The most sequences in a batch
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=1 << 16))]
    pub batch: u64,
}

/// Widths of keys and values, such as 64x128.
fn widths(text: &str) -> Result<(usize, usize), String> {
    let (k, v) = text.split_once('x').ok_or("it has to be two widths, such as 64x128")?;
    let width = |text: &str| match text.parse() {
        Ok(width @ 1..=256) => Ok(width),
        _ => Err(format!("a width is 1 to 256, not `{text}`")),
    };
    Ok((width(k)?, width(v)?))
}

impl Args {
    /// Types of q, k and v.
    pub fn dtypes(&self) -> Result<Vec<DType>, String> {
        let dtype = |name: &String| match name.as_str() {
            "f32" => Ok(DType::F32),
            "bf16" => Ok(DType::BF16),
            "f16" => Ok(DType::F16),
            other => Err(format!("`--types` has `{other}`; it has to be of f32, bf16 and f16")),
        };
        self.types.iter().map(dtype).collect()
    }

    /// The command that runs the case of `seed` alone.
    pub fn again(&self, seed: u64) -> String {
        let named: Vec<String> = self.widths.iter().map(|(k, v)| format!("{k}x{v}")).collect();
        let widths = match self.free_widths {
            true => " --free-widths".into(),
            false if named.is_empty() => String::new(),
            false => format!(" --widths {}", named.join(",")),
        };
        let features = if cfg!(feature = "cuda") { " --features cuda" } else { "" };
        let packed = if self.packed { " --packed" } else { "" };
        let (device, types, batch) = (&self.device, self.types.join(","), self.batch);
        format!(
            "cargo run --release --example fuzz{features} -- --device {device} --types {types} \
             --batch {batch} --cases 1 --seed {seed}{widths}{packed}"
        )
    }
}
