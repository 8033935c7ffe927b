//! Times matrix products on the shapes of a linear layer and its gradients, on one CUDA device: the
//! library's table, each tiling by itself, and what Burn would run (cubek's own choice).
//!
//! `cargo run --release -p linattn-kernels --features cuda --example matmul -- [options]`
//!
//! ```text
//! --filter A|B   only rows whose `shape,layout,types,way` contains A or B; may be given several times
//! --tilings      every tiling too, and for gradients of weights several numbers of slices
//! --seconds N    starts no row after N seconds (240)
//! --peak         only what `mma.sync` reaches with both sides in registers
//! ```
//!
//! One CSV row a product and way. `shape` is MxKxN. `layout` is n or t for each side: t is a transposed
//! view. `types` names input and output. `ms` is the GPU's time a product: the median of rows of calls over
//! rotated buffers, queued behind a busy GPU. `max_relative_error` is the largest error of sampled entries
//! over the RMS of an f64 product. `experiments/speed/matmul.py` has torch's rows.

mod cases;
mod gpu;
mod peak;

use cases::{Case, Types, cases, storage};
use cubecl::cuda::CudaRuntime;
use cubecl::prelude::*;
use gpu::{Gpu, Way};
use linattn_kernels::matmul::Tiling;
use std::time::Instant;

/// Rows and columns of a cube, bytes along K, planes, stages.
const TILINGS: [([usize; 2], usize, [usize; 2], usize); 13] = [
    ([128, 256], 64, [2, 4], 4),
    ([256, 128], 64, [4, 2], 4),
    ([128, 128], 128, [2, 4], 3),
    ([128, 128], 128, [2, 2], 3),
    ([128, 128], 64, [2, 2], 4),
    ([128, 128], 128, [2, 2], 2),
    ([128, 64], 128, [2, 2], 3),
    ([128, 64], 128, [2, 2], 2),
    ([64, 64], 128, [2, 2], 3),
    ([128, 128], 128, [2, 4], 2),
    ([128, 128], 128, [4, 2], 3),
    ([64, 128], 128, [2, 2], 3),
    ([64, 128], 128, [1, 4], 3),
];

struct Options {
    filters: Vec<String>,
    tilings: bool,
    seconds: f64,
    peak: bool,
}

impl Options {
    fn read() -> Self {
        let mut options = Self { filters: Vec::new(), tilings: false, seconds: 240.0, peak: false };
        let mut args = std::env::args().skip(1);
        while let Some(name) = args.next() {
            let mut value = || args.next().unwrap_or_else(|| panic!("{name} takes a value"));
            match name.as_str() {
                "--filter" => options.filters.push(value()),
                "--tilings" => options.tilings = true,
                "--peak" => options.peak = true,
                "--seconds" => options.seconds = value().parse().expect("seconds are a number"),
                other => panic!("no option {other}"),
            }
        }
        options
    }

    fn wants(&self, text: &str) -> bool {
        self.filters.iter().all(|filter| filter.split('|').any(|part| text.contains(part)))
    }

    /// Ways to compute a product, and their names.
    fn ways(&self, case: &Case, types: &Types) -> Vec<(String, Way)> {
        let mut all = vec![("table".into(), Way::Table), ("cubek".into(), Way::Cubek)];
        if !self.tilings {
            return all;
        }
        let slices: &[usize] = if case.lhs_transposed { &[1, 4, 8, 16, 32, 64] } else { &[1, 4] };
        for ([m, n], bytes, planes, stages) in TILINGS {
            let k = bytes / storage(types.input).size();
            let tiles = case.m.div_ceil(m) * case.n.div_ceil(n);
            let tiling = Tiling { m, n, k, planes, stages };
            // Slices are for few tiles and long sums.
            for slices in slices.iter().filter(|s| **s == 1 || tiles * **s <= 1056) {
                if case.k / slices >= 256 || *slices == 1 {
                    let [down, across] = planes;
                    let name = format!("{m}x{n}x{bytes}b_{down}x{across}_s{stages}_k{slices}");
                    all.push((name, Way::Tiling(tiling, *slices)));
                }
            }
        }
        all
    }
}

fn main() {
    let options = Options::read();
    let client = CudaRuntime::client(&Default::default());
    if options.peak {
        return peak::print(&client);
    }
    let gpu = Gpu::new(client);
    let began = Instant::now();
    println!("shape,layout,types,way,ms,tflops,max_relative_error");
    for case in cases() {
        for types in Types::ALL {
            let mut ways = options.ways(&case, &types);
            let key = format!("{},{}", case.name(), types.name);
            ways.retain(|(name, _)| options.wants(&format!("{key},{name}")));
            if ways.is_empty() {
                continue;
            }
            let tensors = gpu.tensors(&case, &types);
            for (name, way) in ways {
                if began.elapsed().as_secs_f64() > options.seconds {
                    return eprintln!("out of time before {key},{name}");
                }
                match gpu.measure(way, &case, &types, &tensors) {
                    Ok(measured) => {
                        let (ms, error) = (measured.milliseconds, measured.error);
                        let speed = case.flops() / ms / 1e9;
                        println!("{key},{name},{ms:.4},{speed:.1},{error:.1e}");
                    }
                    Err(why) => eprintln!("{key},{name}: {}", why.replace('\n', " ")),
                }
            }
        }
    }
}
