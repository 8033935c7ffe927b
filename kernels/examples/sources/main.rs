//! Writes the HIP and CUDA source of every kernel, as ROCm and NVRTC would be given it, on a machine without a GPU.
//!
//! `cargo run -p linattn-kernels --example sources -- FOLDER [KxV ..]`
//!
//! Every variant is launched through the crate's own functions, forward, backward and one step, and so
//! are products of few rows and the layers around a recurrence, in f32, f16 and bf16, on a runtime that
//! compiles what it is asked to launch, keeps the text, and runs nothing. Its devices report what
//! CubeCL's runtimes report for an MI250 (gfx90a), an RX 7900 (gfx1100) and an H200 (sm_90), so chunks, tiles,
//! segments and engines are those of a real launch. FOLDER gets one file a kernel and `manifest.csv`;
//! `hip_check.sh` compiles those for HIP. Two folders tell what a change of the kernels changed.

mod fused;
mod matmul;
mod norms;
mod runtime;
mod target;

use cubecl::future::block_on;
use cubecl::ir::{ElemType, FloatKind, IntKind, StorageType};
use cubecl::prelude::*;
use cubecl::server::Handle;
use linattn_kernels::fused::conv_split;
use linattn_kernels::fused::gated_product::GateActivation;
use linattn_kernels::pointwise::Activation;
use linattn_kernels::quantized::{self, Bits};
use linattn_kernels::{
    Decay, Dims, Given, Inputs, Read, Refusal, Transition, Variant, backward, few_rows, forward,
    simple, step,
};
use runtime::Recorder;
use std::error::Error;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use target::{Cuda, Hip, Target};

const ROWS: [(&str, FloatKind); 3] =
    [("f32", FloatKind::F32), ("f16", FloatKind::F16), ("bf16", FloatKind::BF16)];
const F32: usize = 4;

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1);
    let Some(folder) = args.next() else {
        eprintln!("usage: sources FOLDER [KxV ..]");
        return ExitCode::from(2);
    };
    let shapes: Result<Vec<_>, _> = args.map(|text| shape(&text)).collect();
    let written = shapes.and_then(|shapes| {
        let shapes = if shapes.is_empty() { vec![[64, 64]] } else { shapes };
        write(Path::new(&folder), &shapes)
    });
    match written {
        Ok((files, 0)) => {
            println!("{files} kernels in {folder}");
            ExitCode::SUCCESS
        }
        Ok((files, failed)) => {
            eprintln!("error: {failed} kernels have no source; {files} do, in {folder}");
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn shape(text: &str) -> Result<[usize; 2], Box<dyn Error>> {
    let (keys, values) =
        text.split_once('x').ok_or_else(|| format!("`{text}` is no shape KxV, such as 64x64"))?;
    Ok([keys.parse()?, values.parse()?])
}

/// Writes all sources; how many there are, and how many kernels have none.
fn write(folder: &Path, shapes: &[[usize; 2]]) -> Result<(usize, usize), Box<dyn Error>> {
    let mut book = Book {
        folder: folder.to_path_buf(),
        manifest: "file,arch,rows,shape,variant,kernel,units,shared_bytes\n".into(),
        files: 0,
        failed: 0,
    };
    write_for::<Hip>(&mut book, shapes)?;
    write_for::<Cuda>(&mut book, shapes)?;
    std::fs::write(folder.join("manifest.csv"), &book.manifest)?;
    Ok((book.files, book.failed))
}

/// Writes the sources for all GPUs of a language.
fn write_for<T: Target>(book: &mut Book, shapes: &[[usize; 2]]) -> Result<(), Box<dyn Error>> {
    for &arch in T::ALL {
        std::fs::create_dir_all(book.folder.join(arch.name()))?;
        let client = Recorder::client(&arch);
        for (rows, kind) in ROWS {
            let dtype = StorageType::Scalar(ElemType::Float(kind));
            for &[keys, values] in shapes {
                let case = Case::new(&client, dtype, keys, values);
                let shape = format!("{keys}x{values}");
                for variant in variants() {
                    let page = Page { arch, rows, shape: &shape, variant: &name(variant) };
                    case.run(variant, |launched| book.enter(&page, launched, &client))?;
                    // A device that says how many multiprocessors it has may cut a long sequence in segments.
                    let long = Case { dims: Dims { tokens: 4096, ..case.dims }, ..case };
                    long.run(variant, |launched| {
                        book.enter(&page, &format!("-long{launched}"), &client)
                    })?;
                    // Compiled once for all shapes whose keys a step cuts into equally many slices.
                    case.step(variant)?;
                    book.enter(&page, "", &client)?;
                }
            }
            layers(book, &client, arch, (rows, dtype))?;
        }
    }
    Ok(())
}

/// Writes the sources of products of few rows and the layers around a recurrence, of one width, though it decides
/// how many numbers a unit of a product reads at once.
fn layers<T: Target>(
    book: &mut Book,
    client: &ComputeClient<Recorder<T>>,
    arch: T,
    (rows, dtype): (&str, StorageType),
) -> Result<(), Box<dyn Error>> {
    let case = Case::new(client, dtype, 64, 64);
    for count in [1, 2, 4, 8, 64] {
        for (biased, launched) in [(false, ""), (true, "-bias")] {
            case.product(count, 1, biased)?;
            let page = Page { arch, rows, shape: "any", variant: &format!("{count}_rows") };
            book.enter(&page, launched, client)?;
        }
        case.product(count, 3, false)?;
        let page = Page { arch, rows, shape: "any", variant: &format!("{count}_rows") };
        book.enter(&page, "-side_by_side", client)?;
        if count <= few_rows::MOST_FOLDED {
            case.folded_products(count, |launched| book.enter(&page, launched, client))?;
        }
        let quantized = [(Bits::Four, "int4"), (Bits::Eight, "int8")];
        for (bits, name) in quantized.into_iter().filter(|_| count <= quantized::MOST_ROWS) {
            case.quantized_product(count, 3, bits)?;
            let page = Page { arch, rows, shape: "any", variant: &format!("{count}_rows_{name}") };
            book.enter(&page, "-side_by_side", client)?;
        }
    }
    let page = |variant| Page { arch, rows, shape: "any", variant };
    let fused = fused::Fused { client, dtype };
    fused.all(|launched| book.enter(&page("fused"), launched, client))?;
    let norms = norms::Norms { client, dtype };
    norms.all(|launched| book.enter(&page("norms"), launched, client))?;
    case.conv_split(|launched| book.enter(&page("conv_split"), launched, client))?;
    let products = matmul::Products { client, dtype };
    products.all(|launched| book.enter(&page("matmul"), launched, client))?;
    if rows == "f32" {
        let page = Page { arch, rows, shape: "64x64", variant: "simple" };
        case.simple(|launched| book.enter(&page, launched, client))?;
    }
    Ok(())
}

/// All of them, once each: [`Read`] changes nothing in a low rank transition.
fn variants() -> Vec<Variant> {
    let transitions = [
        Transition::Identity,
        Transition::Delta { erase: false },
        Transition::Delta { erase: true },
        Transition::LowRank,
    ];
    let mut all = vec![];
    for decay in [Decay::None, Decay::Scalar, Decay::Vector] {
        for transition in transitions {
            for read in [Read::After, Read::Before] {
                if transition != Transition::LowRank || read == Read::After {
                    all.push(Variant { decay, transition, read });
                }
            }
        }
    }
    all
}

fn name(variant: Variant) -> String {
    let decay = match variant.decay {
        Decay::None => "none",
        Decay::Scalar => "scalar",
        Decay::Vector => "vector",
    };
    let transition = match variant.transition {
        Transition::Identity => "identity",
        Transition::Delta { erase: false } => "delta",
        Transition::Delta { erase: true } => "delta_erase",
        Transition::LowRank => "low_rank",
    };
    let read = match variant.read {
        Read::After => "after",
        Read::Before => "before",
    };
    format!("{decay}-{transition}-{read}")
}

/// Where a kernel belongs.
struct Page<'a, T> {
    arch: T,
    rows: &'a str,
    shape: &'a str,
    variant: &'a str,
}

struct Book {
    folder: PathBuf,
    manifest: String,
    files: usize,
    failed: usize,
}

impl Book {
    /// Writes down what was compiled since the last call; `launched` says what was special about the
    /// launch.
    fn enter<T: Target>(
        &mut self,
        page: &Page<'_, T>,
        launched: &str,
        client: &ComputeClient<Recorder<T>>,
    ) -> Result<(), Box<dyn Error>> {
        block_on(client.sync())?;
        let Page { arch, rows, shape, variant } = page;
        let arch = arch.name();
        for compiled in client.info().take() {
            let kernel = match compiled {
                Ok(kernel) => kernel,
                Err(why) => {
                    eprintln!("{arch} {rows} {shape} {variant}{launched}: {why}");
                    self.failed += 1;
                    continue;
                }
            };
            let file = format!(
                "{arch}/{rows}-{shape}-{variant}-{}{launched}.{}",
                kernel.name,
                T::EXTENSION
            );
            let path = self.folder.join(&file);
            std::fs::write(&path, &kernel.source)
                .map_err(|error| format!("{}: {error}", path.display()))?;
            writeln!(
                self.manifest,
                "{file},{arch},{rows},{shape},{variant},{}{launched},{},{}",
                kernel.name, kernel.units, kernel.shared_bytes
            )?;
            self.files += 1;
        }
        Ok(())
    }
}

/// Launches of one size. Memory is named, not there.
#[derive(Clone, Copy)]
struct Case<'a, T: Target> {
    client: &'a ComputeClient<Recorder<T>>,
    dtype: StorageType,
    dims: Dims,
}

impl<'a, T: Target> Case<'a, T> {
    fn new(
        client: &'a ComputeClient<Recorder<T>>,
        dtype: StorageType,
        key_width: usize,
        value_width: usize,
    ) -> Self {
        let dims = Dims { batch: 1, tokens: 100, key_heads: 1, heads: 2, key_width, value_width };
        Self { client, dtype, dims }
    }

    fn inputs(&self, variant: Variant, given: bool) -> Inputs {
        let Dims { batch, tokens, key_heads, heads, key_width, value_width } = self.dims;
        let new = |numbers: usize, bytes: usize| self.client.empty(numbers * bytes);
        let rows =
            |heads: usize, width: usize| new(batch * tokens * heads * width, self.dtype.size());
        let scalars = |width: usize| new(batch * tokens * heads * width, F32);
        let delta = matches!(variant.transition, Transition::Delta { .. });
        let low_rank = variant.transition == Transition::LowRank;
        let own_a = low_rank || variant.transition == Transition::Delta { erase: true };
        Inputs {
            q: rows(key_heads, key_width),
            k: rows(key_heads, key_width),
            v: rows(heads, value_width),
            a: own_a.then(|| rows(heads, key_width)),
            b: low_rank.then(|| rows(heads, key_width)),
            g: match variant.decay {
                Decay::None => None,
                Decay::Scalar => Some(scalars(1)),
                Decay::Vector => Some(scalars(key_width)),
            },
            beta: delta.then(|| scalars(1)),
            state: given.then(|| new(batch * heads * key_width * value_width, F32)),
        }
    }

    /// Forward and backward, with and without what is compiled in when it is asked for; `enter` is
    /// called after each launch.
    fn run(
        &self,
        variant: Variant,
        mut enter: impl FnMut(&str) -> Result<(), Box<dyn Error>>,
    ) -> Result<(), Box<dyn Error>> {
        let Self { client, dtype, dims } = *self;
        for (given, keep, launched) in [
            (false, false, ""),
            (true, false, "-given"),
            (false, true, "-keep"),
            (true, true, "-given-keep"),
        ] {
            forward(client, variant, dims, dtype, &self.inputs(variant, given), keep)?;
            enter(launched)?;
        }
        let x = self.inputs(variant, true);
        let saved = forward(client, variant, dims, dtype, &x, true)?.saved;
        let saved: Vec<Handle> = saved.into_iter().map(|buffer| buffer.handle).collect();
        let d_state = x.state.as_ref();
        for (d_state, launched) in [(None, ""), (d_state, "-given")] {
            let given = Given { x: &x, saved: &saved, d_o: &x.v, d_state };
            backward(client, variant, dims, dtype, given)?;
            enter(launched)?;
        }
        Ok(())
    }

    /// The gated delta rule of `simple`, with and without a state to start from; `enter` is called after
    /// each pass.
    fn simple(
        &self,
        mut enter: impl FnMut(&str) -> Result<(), Box<dyn Error>>,
    ) -> Result<(), Box<dyn Error>> {
        for (given, launched) in [(false, ""), (true, "-given")] {
            let x = self.inputs(simple::VARIANT, given);
            let saved = simple::forward(self.client, self.dims, &x)?.saved;
            enter(launched)?;
            let saved: Vec<Handle> = saved.into_iter().map(|buffer| buffer.handle).collect();
            let d_state = x.state.as_ref();
            let given = Given { x: &x, saved: &saved, d_o: &x.v, d_state };
            simple::backward(self.client, self.dims, given)?;
            enter(launched)?;
        }
        Ok(())
    }

    /// A product of so many rows by so many square matrices.
    fn product(&self, rows: usize, matrices: usize, biased: bool) -> Result<(), Refusal> {
        let width = 2048;
        let dims = few_rows::Dims { rows, inner: width };
        let matrix = few_rows::Columns { count: width, stride: width };
        let new = |numbers: usize| self.client.empty(numbers * self.dtype.size());
        let (x, weight, bias) = (new(rows * width), new(width * width), new(matrices * width));
        let weights = vec![(&weight, matrix); matrices];
        let rows = few_rows::Input::Rows(&x);
        let args = few_rows::Args { x: rows, weights: &weights, bias: biased.then_some(&bias) };
        few_rows::product(self.client, dims, self.dtype, args).map(drop)
    }

    /// Products that read gates times values, an RMS norm of a sum, and one of heads; `enter` is called after each.
    fn folded_products(
        &self,
        rows: usize,
        mut enter: impl FnMut(&str) -> Result<(), Box<dyn Error>>,
    ) -> Result<(), Box<dyn Error>> {
        use few_rows::Input;
        let width = 2048;
        let new = |numbers: usize| self.client.empty(numbers * self.dtype.size());
        let (x, both, weight) = (new(rows * width), new(2 * rows * width), new(width));
        let (values, scales) = (new(width * width), new(width * width));
        let matrix = few_rows::Columns { count: width, stride: width };
        let quantized = quantized::Matrix { values: &values, scales: &scales, rows: width };
        let dims = few_rows::Dims { rows, inner: width };
        let gated = Input::Gated { both: &both, activation: GateActivation::Silu };
        let (addend, weight, epsilon) = (Some(&x), &weight, 1e-6);
        let normalized = Input::Normalized { x: &x, addend, weight, epsilon };
        let gate = Some((&x, GateActivation::Silu));
        let heads = Input::Heads { o: &x, gate, weight, epsilon, heads: 8 };
        let inputs = [(gated, "-gated"), (normalized, "-normalized"), (heads, "-heads")];
        for (input, name) in inputs {
            let args = few_rows::Args { x: input, weights: &[(&values, matrix)], bias: None };
            few_rows::product(self.client, dims, self.dtype, args)?;
            enter(name)?;
            let given =
                quantized::Matrices { bits: Bits::Four, quantized: &[quantized], floats: &[] };
            quantized::product(self.client, dims, self.dtype, input, given)?;
            enter(&format!("{name}-int4"))?;
        }
        Ok(())
    }

    /// The same of quantized matrices, and one as floats.
    fn quantized_product(&self, rows: usize, matrices: usize, bits: Bits) -> Result<(), Refusal> {
        let width = 2048;
        let x = self.client.empty(rows * width * self.dtype.size());
        let values = self.client.empty(width * width * bits.count() / 8);
        let scales = self.client.empty(4 * width * width / quantized::GROUP);
        let matrix = quantized::Matrix { values: &values, scales: &scales, rows: width };
        let (dims, all) = (quantized::Dims { rows, inner: width }, vec![matrix; matrices]);
        let rows = few_rows::Input::Rows(&x);
        let floats = self.client.empty(width * 8 * self.dtype.size());
        let columns = few_rows::Columns { count: 8, stride: 8 };
        let floats = [quantized::Floats { numbers: &floats, columns }; 2];
        // Alone where there is one, and with what layers have beside several.
        let floats = if matrices > 1 { &floats[..] } else { &[] };
        let given = quantized::Matrices { bits, quantized: &all, floats };
        quantized::product(self.client, dims, self.dtype, rows, given)?;
        let ids = self.client.empty(4);
        let dtype = StorageType::Scalar(ElemType::Int(IntKind::I32));
        for rows in [None, Some(quantized::Rows { ids: &ids, count: 1, dtype })] {
            quantized::dequantize(self.client, width, self.dtype, bits, matrix, rows)?;
        }
        Ok(())
    }

    fn step(&self, variant: Variant) -> Result<(), Refusal> {
        let case = Self { dims: Dims { tokens: 1, ..self.dims }, ..*self };
        let x = case.inputs(variant, true);
        step::launch(case.client, variant, case.dims, case.dtype, &x).map(|_| ())
    }

    /// The columns of a packed projection, forward and backward, with all tensors and with the fewest;
    /// `enter` is called after each launch.
    fn conv_split(
        &self,
        mut enter: impl FnMut(&str) -> Result<(), Box<dyn Error>>,
    ) -> Result<(), Box<dyn Error>> {
        use conv_split::{Apart, Columns, Dims, Head, Inputs, Kind, Types};
        let head = Some(Head { width: 64, factor: 1.0, epsilon: 1e-6 });
        let conv = |head| Kind::Conv { activation: Activation::Silu, head };
        let columns = [
            (128, conv(head)),
            (128, conv(head)),
            (128, conv(None)),
            (2, Kind::Beta { scale: 1.0 }),
            (2, Kind::LogDecay { heads: 2 }),
            (128, Kind::Copy),
        ]
        .map(|(width, kind)| Columns { width, kind });
        let dims = Dims { batch: 1, tokens: 64, window: 4 };
        // The largest tensor is x.
        let [x, weight] = [self.dtype.size(), F32].map(|size| self.client.empty(64 * 516 * size));
        let weights = StorageType::Scalar(ElemType::Float(FloatKind::F32));
        let types = Types { rows: self.dtype, weights };
        let offsets = [0, 9, 64];
        let lengths = Some(&offsets[..]);
        let cases = [(true, None, "-all"), (false, None, ""), (true, lengths, "-lengths")];
        for (all, cu_seqlens, launched) in cases {
            let inputs = Inputs {
                x: &x,
                weight: Some(&weight),
                bias: all.then_some(&weight),
                conv_state: all.then_some(&x),
                a_log: Some(&weight),
                dt_bias: Some(&weight),
                cu_seqlens,
            };
            let d_out = [Some(&weight); 6];
            conv_split::forward(self.client, dims, &columns, inputs, types)?;
            conv_split::backward(self.client, dims, &columns, inputs, &d_out, types)?;
            enter(launched)?;
        }
        let (weights, states) = ([&weight; 3], [&x; 3]);
        let inputs = Inputs {
            x: &x,
            weight: None,
            bias: None,
            conv_state: None,
            a_log: Some(&weight),
            dt_bias: Some(&weight),
            cu_seqlens: None,
        };
        let apart = Apart { weights: &weights, biases: &[], conv_states: &states };
        let dims = Dims { tokens: 1, ..dims };
        conv_split::step(self.client, dims, &columns, inputs, apart, types)?;
        enter("-step")
    }
}
