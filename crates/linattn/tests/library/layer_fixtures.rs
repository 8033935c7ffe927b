//! Layers against code of their authors: a layer takes the weights that theirs had, and answers as theirs did.
//! tests/fixtures/README.md says where the numbers come from.

use crate::call::{download, upload};
use burn::backend::Flex;
use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{DType, Tensor, backend::Backend};
use linattn::nn::materialize;
use linattn::nn::mixers::{Mixer, MixerConfig};
use linattn_oracle::assert_close;
use safetensors::tensor::{Dtype, SafeTensors};
use std::collections::BTreeMap;
use std::path::Path;

/// Layers compute in double precision here, as theirs did as far as they could: what is left is the
/// rounding of the files to f32, and of angles and constants.
const LIMIT: f64 = 1e-6;
/// Where rows are divided by their lengths: what is added before the division is small, and another number.
const LENGTHS_LIMIT: f64 = 1e-5;

/// Numbers by rows, the last index fastest.
#[derive(Debug, Clone, PartialEq)]
struct Array {
    shape: Vec<usize>,
    values: Vec<f64>,
}

impl Array {
    /// Places `places` of dimension `dim`, in this order.
    fn pick(&self, dim: usize, places: impl IntoIterator<Item = usize>) -> Self {
        let inner: usize = self.shape[dim + 1..].iter().product();
        let places: Vec<usize> = places.into_iter().collect();
        let blocks = self.values.chunks(self.shape[dim] * inner);
        let values = blocks
            .flat_map(|block| places.iter().flat_map(move |&i| &block[i * inner..(i + 1) * inner]))
            .copied()
            .collect();
        let mut shape = self.shape.clone();
        shape[dim] = places.len();
        Self { shape, values }
    }

    /// With the last two dimensions swapped.
    fn transposed(&self) -> Self {
        let [.., rows, columns] = self.shape[..] else { panic!("a matrix: {:?}", self.shape) };
        let matrices = self.values.chunks(rows * columns);
        let entries = (0..rows * columns).map(|i| i % rows * columns + i / rows);
        let values = matrices.flat_map(|m| entries.clone().map(move |i| m[i])).collect();
        let mut shape = self.shape.clone();
        let last = shape.len() - 1;
        shape.swap(last - 1, last);
        Self { shape, values }
    }

    /// `other` behind it, in the second last dimension.
    fn above(&self, other: &Self) -> Self {
        let [.., rows, columns] = self.shape[..] else { panic!("a matrix: {:?}", self.shape) };
        let [.., more, width] = other.shape[..] else { panic!("a matrix: {:?}", other.shape) };
        assert_eq!(columns, width);
        let pairs = self.values.chunks(rows * columns).zip(other.values.chunks(more * columns));
        let values = pairs.flat_map(|(a, b)| a.iter().chain(b)).copied().collect();
        let mut shape = self.shape.clone();
        shape[self.shape.len() - 2] += more;
        Self { shape, values }
    }

    fn each(&self, f: impl Fn(f64) -> f64) -> Self {
        let values = self.values.iter().map(|&x| f(x)).collect();
        Self { shape: self.shape.clone(), values }
    }

    fn shaped(&self, shape: impl Into<Vec<usize>>) -> Self {
        let shape = shape.into();
        assert_eq!(shape.iter().product::<usize>(), self.values.len());
        Self { shape, values: self.values.clone() }
    }
}

/// Weights of a file by their names there, and those of ours that were made from them.
struct Weights {
    theirs: BTreeMap<String, Array>,
    ours: BTreeMap<String, Array>,
}

impl Weights {
    fn open(file: &str) -> Self {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/layers");
        let bytes = std::fs::read(folder.join(format!("{file}.safetensors"))).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        let array = |name: &String| {
            let view = tensors.tensor(name).unwrap();
            assert_eq!(view.dtype(), Dtype::F32, "{name}");
            let four = |b: &[u8]| f64::from(f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
            let values = view.data().chunks_exact(4).map(four).collect();
            (name.clone(), Array { shape: view.shape().to_vec(), values })
        };
        let names: Vec<String> = tensors.names().into_iter().map(ToString::to_string).collect();
        Self { theirs: names.iter().map(array).collect(), ours: BTreeMap::new() }
    }

    /// One of theirs; each can be had once.
    fn take(&mut self, name: &str) -> Array {
        self.theirs.remove(name).unwrap_or_else(|| panic!("{name} is not in the file"))
    }

    fn give(&mut self, name: &str, array: Array) {
        assert!(self.ours.insert(name.to_string(), array).is_none(), "{name} is given twice");
    }

    /// Parameters that are the same here and there.
    fn same<S: AsRef<str>, const N: usize>(&mut self, pairs: [[S; 2]; N]) {
        for [ours, theirs] in pairs {
            let array = self.take(theirs.as_ref());
            self.give(ours.as_ref(), array);
        }
    }

    /// Linear layers, whose outputs are rows there, and columns here.
    fn linear<S: AsRef<str>, const N: usize>(&mut self, pairs: [[S; 2]; N]) {
        for [ours, theirs] in &pairs {
            let [ours, theirs] = [ours, theirs].map(S::as_ref);
            let weight = self.take(&format!("{theirs}.weight")).transposed();
            self.give(&format!("{ours}.weight"), weight);
            if let Some(bias) = self.theirs.remove(&format!("{theirs}.bias")) {
                self.give(&format!("{ours}.bias"), bias);
            }
        }
    }

    /// A short convolution, whose channels are rows there, and columns here.
    fn convolution(&mut self, ours: &str, theirs: &str) {
        let taps = self.take(&format!("{theirs}.weight"));
        let [channels, _, window] = taps.shape[..] else { panic!("{:?}", taps.shape) };
        self.give(&format!("{ours}.weight"), taps.shaped([channels, window]).transposed());
        if let Some(bias) = self.theirs.remove(&format!("{theirs}.bias")) {
            self.give(&format!("{ours}.bias"), bias);
        }
    }

    /// Blocks on the diagonal, whose outputs are rows there, and columns here.
    fn blocks<const N: usize>(&mut self, pairs: [[&str; 2]; N]) {
        for [ours, theirs] in pairs {
            let weight = self.take(&format!("{theirs}.weight")).transposed();
            self.give(&format!("{ours}.weight"), weight);
        }
    }
}

/// Gives a mixer its weights, by their paths inside it.
struct Given {
    weights: BTreeMap<String, Array>,
    path: Vec<String>,
}

impl<B: Backend> ModuleMapper<B> for Given {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn map_float<const R: usize>(&mut self, param: Param<Tensor<B, R>>) -> Param<Tensor<B, R>> {
        let name = self.path[1..].join("."); // without the mixer's own
        let weight = self.weights.remove(&name).unwrap_or_else(|| panic!("no {name} is given"));
        param.map(|old| {
            let long = |shape: &[usize]| -> Vec<usize> {
                shape.iter().copied().filter(|&size| size > 1).collect()
            };
            assert_eq!(long(&weight.shape), long(&old.dims()), "{name}");
            upload(&weight.values, old.dims(), DType::F64, &old.device())
        })
    }
}

/// Holds a mixer with the weights that `give` makes of a file's to the outputs in it, in sequences and in steps.
fn hold_within(limit: f64, file: &str, mixer: &str, give: impl FnOnce(&mut Weights)) {
    #[derive(serde::Deserialize)]
    struct Holder {
        mixer: MixerConfig,
    }
    let mut weights = Weights::open(file);
    let [x, want] = ["x", "y"].map(|name| weights.take(name));
    let [batch, tokens, width] = x.shape[..] else { panic!("{file}: x is {:?}", x.shape) };
    give(&mut weights);
    assert!(weights.theirs.is_empty(), "{file}: also has {:?}", weights.theirs.keys());

    let device = Default::default();
    let holder: Holder = toml::from_str(&format!("mixer.{mixer}")).unwrap();
    let mixer: Mixer<Flex> = holder.mixer.init(width, &device).unwrap();
    materialize(&mixer);
    let mut given = Given { weights: weights.ours, path: vec![] };
    let mixer = mixer.map(&mut given);
    assert!(given.weights.is_empty(), "{file}: no parameters {:?}", given.weights.keys());

    let x: Tensor<Flex, 3> = upload(&x.values, [batch, tokens, width], DType::F64, &device);
    let whole = mixer.forward(x.clone(), None).0;
    assert_close(file, &want.values, &download(whole), limit);
    let (mut outputs, mut state) = (vec![], None);
    for token in x.split(1, 1) {
        let (y, next) = mixer.step(token.squeeze_dim(1), state);
        outputs.push(y);
        state = Some(next);
    }
    let stepped: Tensor<Flex, 3> = Tensor::stack(outputs, 1);
    assert_close(&format!("{file}, stepped"), &want.values, &download(stepped), limit);
}

fn hold(file: &str, mixer: &str, give: impl FnOnce(&mut Weights)) {
    hold_within(LIMIT, file, mixer, give);
}

/// Where numbers of a head whose neighbours turn together stand if its halves do, of `heads` heads.
fn halves(heads: usize, width: usize) -> impl Iterator<Item = usize> + Clone {
    (0..heads * width).map(move |n| {
        let (head, i) = (n / width, n % width);
        head * width + 2 * (i % (width / 2)) + i / (width / 2)
    })
}

/// TTT, whose channels that turn together are neighbours there.
fn ttt(w: &mut Weights, layers: usize, width: usize, heads: usize) {
    let all = || halves(heads, width);
    for name in ["q_proj", "k_proj", "v_proj"] {
        if let Some(weight) = w.theirs.remove(&format!("{name}.weight")) {
            w.give(&format!("{name}.weight"), weight.pick(0, all()).transposed());
        }
    }
    for [ours, theirs] in [["q_conv1d", "conv_q"], ["k_conv1d", "conv_k"]] {
        if w.theirs.contains_key(&format!("{theirs}.weight")) {
            let taps = w.take(&format!("{theirs}.weight")).pick(0, all());
            let [channels, _, window] = taps.shape[..] else { panic!("{:?}", taps.shape) };
            w.give(&format!("{ours}.weight"), taps.shaped([channels, window]).transposed());
            let bias = w.take(&format!("{theirs}.bias")).pick(0, all());
            w.give(&format!("{ours}.bias"), bias);
        }
    }
    let rates = w.take("learnable_ttt_lr_weight");
    w.give("rate_proj.weight", rates.shaped([heads, heads * width]).transposed());
    let bias = w.take("learnable_ttt_lr_bias");
    w.give("rate_proj.bias", bias);
    w.same([["place_scale", "learnable_token_idx"]]);
    for layer in 0..layers {
        let [mut weight, mut bias] = ["W", "b"].map(|kind| w.take(&format!("{kind}{}", layer + 1)));
        if layer == 0 {
            weight = weight.pick(1, halves(1, width));
        }
        if layer == layers - 1 {
            [weight, bias] = [weight, bias].map(|x| x.pick(2, halves(1, width)));
        }
        w.give(&format!("weights.{layer}"), weight.above(&bias));
    }
    for name in ["ttt_norm_weight", "ttt_norm_bias"] {
        let norm = w.take(name).shaped([heads * width]).pick(0, all());
        w.give(name, norm);
    }
    for [ours, theirs] in [["gamma", "weight"], ["beta", "bias"]] {
        let norm = w.take(&format!("post_norm.{theirs}")).pick(0, all());
        w.give(&format!("post_norm.Layer.{ours}"), norm);
    }
    if let Some(gate) = w.theirs.remove("g_proj.weight") {
        w.give("g_proj.weight", gate.pick(0, all()).transposed());
    }
    let out = w.take("o_proj.weight").pick(1, all()).transposed();
    w.give("o_proj.weight", out);
}

#[test]
fn ttt_answers_as_its_authors() {
    hold(
        "ttt_linear",
        "ttt = { heads = 2, mini_batch = 4, base_lr = 0.5, conv_size = 3, output_gate = true }",
        |w| {
            ttt(w, 1, 6, 2);
        },
    );
    hold("ttt_mlp", "ttt = { heads = 2, inner = 'mlp', mini_batch = 4, base_lr = 0.5 }", |w| {
        ttt(w, 2, 6, 2);
    });
}

#[test]
fn lact_answers_as_its_authors() {
    let give = |w: &mut Weights| {
        let qkv = w.take("qkv.weight");
        for (part, name) in ["q_proj", "k_proj", "v_proj"].into_iter().enumerate() {
            let rows = qkv.pick(0, part * 12..(part + 1) * 12);
            w.give(&format!("{name}.weight"), rows.transposed());
        }
        for kind in ["scale", "offset"] {
            let both = w.take(&format!("qk_{kind}"));
            w.give(&format!("q_{kind}"), both.pick(1, [0]));
            w.give(&format!("k_{kind}"), both.pick(1, [1]));
        }
        for layer in 0..3 {
            let weight = w.take(&format!("w{layer}")).transposed();
            w.give(&format!("weights.{layer}"), weight);
        }
        w.same([["q_norm.gamma", "q_norm.weight"], ["k_norm.gamma", "k_norm.weight"]]);
        w.same([["ttt_norm.norm.gamma", "ttt_norm.weight"]]);
        w.linear([["lr_proj", "lr_proj"], ["scale_proj", "ttt_scale_proj"], ["o_proj", "o_proj"]]);
    };
    let keys = "heads = 2, attention_heads = 2, expand = 2, mini_batch = 4, window = 5";
    hold_within(LENGTHS_LIMIT, "lact", &format!("lact = {{ {keys} }}"), |w| {
        give(w);
        w.linear([["momentum_proj", "momentum_proj.0"]]);
    });
    hold_within(
        LENGTHS_LIMIT,
        "lact_muon",
        &format!("lact = {{ {keys}, momentum = false, muon = true }}"),
        give,
    );
}

#[test]
fn hyena_answers_as_its_authors() {
    let text = "hyena = { filter_order = 8, length = 32 }";
    hold("hyena", text, |w| {
        w.linear([["in_proj", "in_proj"], ["out_proj", "out_proj"]]);
        w.convolution("conv1d", "short_filter");
        for (ours, theirs) in ["inner.0", "inner.1", "inner.2", "last"].iter().zip([0, 2, 4, 6]) {
            let theirs = format!("filter_fn.implicit_filter.{theirs}");
            w.linear([[format!("filter.{ours}"), theirs]]);
        }
        w.same([["filter.frequency", "filter_fn.implicit_filter.1.freq"], ["d", "filter_fn.bias"]]);
    });
}

/// Real and imaginary parts, side by side in the last dimension there.
fn parts(complex: &Array) -> [Array; 2] {
    let last = complex.shape.len() - 1;
    [0, 1].map(|part| {
        let part = complex.pick(last, [part]);
        part.shaped(&complex.shape[..last])
    })
}

/// Real parts of each channel before its imaginary ones, `[D, N]`.
fn side_by_side(complex: &Array) -> Array {
    let [re, im] = parts(complex);
    let [.., channels, modes] = re.shape[..] else { panic!("{:?}", re.shape) };
    let both = re.shaped([channels, 1, modes]).above(&im.shaped([channels, 1, modes]));
    both.shaped([channels, 2 * modes])
}

/// All real parts before all imaginary ones, `[2, D, N / 2]`.
fn one_behind_the_other([re, im]: [Array; 2]) -> Array {
    let size = re.values.len();
    let both = re.shaped([1, size]).above(&im.shaped([1, size]));
    both.shaped([&[2][..], &re.shape[re.shape.len() - 2..]].concat())
}

#[test]
fn s4_and_s4d_answer_as_their_authors() {
    hold("s4d", "s4d = { d_state = 8 }", |w| {
        w.same([
            ["ssm.log_dt", "kernel.log_dt"],
            ["ssm.log_a_real", "kernel.log_A_real"],
            ["ssm.a_imag", "kernel.A_imag"],
            ["ssm.d", "D"],
            ["out_proj.bias", "output_linear.0.bias"],
        ]);
        let c = w.take("kernel.C");
        w.give("ssm.c", one_behind_the_other(parts(&c)));
        let out = w.take("output_linear.0.weight").shaped([12, 6]).transposed();
        w.give("out_proj.weight", out);
    });
    hold("s4", "s4 = { d_state = 8 }", |w| {
        w.same([
            ["log_dt", "layer.kernel.inv_dt"],
            ["log_a_real", "layer.kernel.A_real"],
            ["d", "layer.D"],
        ]);
        // The modes of positive frequencies here, their conjugates there.
        let frequencies = w.take("layer.kernel.A_imag").each(|x| -x);
        w.give("a_imag", frequencies);
        for name in ["p", "b", "c"] {
            let vector = w.take(&format!("layer.kernel.{}", name.to_uppercase()));
            w.give(name, side_by_side(&vector));
        }
        w.linear([["out_proj", "output_linear.0"]]);
    });
}

#[test]
fn h3_answers_as_its_authors() {
    let texts = [
        "h3 = { head_width = 2, d_state = 6 }",
        "h3 = { head_width = 2, d_state = 6, learn_inputs = true }",
    ];
    for (learnt, text) in [false, true].into_iter().zip(texts) {
        hold("h3", text, |w| give_h3(w, learnt));
    }
}

fn give_h3(w: &mut Weights, learnt: bool) {
    let names = [["q_proj"; 2], ["k_proj"; 2], ["v_proj"; 2]];
    w.linear(names);
    // The shift's input vector is the first unit vector here, unless it is learnt.
    let unit = w.take("ssm_k_kernel.kernel.B");
    assert!(unit.values.iter().enumerate().all(|(i, &x)| x == f64::from(u8::from(i % 6 == 0))));
    if learnt {
        w.give("shift_input", unit.shaped([8, 6]).transposed());
    }
    let taps = w.take("ssm_k_kernel.kernel.C").shaped([8, 6]).transposed();
    w.give("shift.weight", taps.pick(0, (0..6).rev()));
    w.same([
        ["shift_d", "ssm_k_D"],
        ["ssm.log_dt", "kernel.kernel.log_dt"],
        ["ssm.log_a_real", "kernel.kernel.inv_A_real"],
        ["ssm.a_imag", "kernel.kernel.A_imag"],
        ["ssm.d", "D"],
        ["out_proj.bias", "output_linear.bias"],
    ]);
    // So is the input vector of the diagonal model a factor of C.
    let ([b_re, b_im], [c_re, c_im]) = {
        let [b, c] = ["B", "C"].map(|name| w.take(&format!("kernel.kernel.{name}")));
        (parts(&b), parts(&c.shaped(&b.shape[..])))
    };
    if learnt {
        w.give("ssm.b", one_behind_the_other([b_re, b_im]));
        w.give("ssm.c", one_behind_the_other([c_re, c_im]));
    } else {
        let joined = |f: fn(f64, f64, f64, f64) -> f64| {
            let values = (0..12)
                .map(|i| f(b_re.values[i], b_im.values[i], c_re.values[i], c_im.values[i]))
                .collect();
            Array { shape: b_re.shape.clone(), values }
        };
        let re = joined(|b_re, b_im, c_re, c_im| b_re * c_re - b_im * c_im);
        let im = joined(|b_re, b_im, c_re, c_im| b_re * c_im + b_im * c_re);
        w.give("ssm.c", one_behind_the_other([re, im]));
    }
    // Outputs of all heads stand beside each other there, those of one head here.
    let out = w.take("output_linear.weight").pick(1, (0..8).map(|n| n % 2 * 4 + n / 2));
    w.give("out_proj.weight", out.transposed());
}

#[test]
fn the_first_xlstm_answers_as_its_authors() {
    hold("mlstm_v1", "mlstm_v1 = { heads = 2, conv_size = 3 }", |w| {
        w.linear([
            ["up_proj", "proj_up"],
            ["igate_preact", "mlstm_cell.igate"],
            ["fgate_preact", "mlstm_cell.fgate"],
            ["down_proj", "proj_down"],
        ]);
        w.convolution("conv1d", "conv1d.conv");
        w.blocks([["q", "q_proj"], ["k", "k_proj"], ["v", "v_proj"]]);
        let norm = w.take("mlstm_cell.outnorm.weight").each(|x| 1.0 + x);
        w.give("multihead_norm.weight", norm);
        w.same([["skip", "learnable_skip"]]);
    });
    hold("slstm", "slstm = { heads = 2, conv_size = 3 }", |w| {
        w.convolution("conv1d", "conv1d.conv");
        // The first two have each other's names there.
        w.blocks([["igate", "fgate"], ["fgate", "igate"], ["zgate", "zgate"], ["ogate", "ogate"]]);
        let recurrent = w.take("slstm_cell._recurrent_kernel_").transposed();
        w.give("recurrent.weight", recurrent);
        // Input gates have no bias here: outputs do not depend on it.
        let bias = w.take("slstm_cell._bias_").shaped([4, 8]);
        for (gate, name) in [(1, "fgate"), (2, "zgate"), (3, "ogate")] {
            w.give(&format!("{name}.bias"), bias.pick(0, [gate]));
        }
        let norm = w.take("group_norm.weight").each(|x| 1.0 + x);
        w.give("group_norm.weight", norm);
    });
}

fn identity(size: usize) -> Array {
    let values = (0..size * size).map(|i| f64::from(u8::from(i % size == i / size))).collect();
    Array { shape: vec![size, size], values }
}

#[test]
fn lstm_and_gru_answer_as_pytorch() {
    let matrices = |w: &mut Weights| {
        for part in ["x", "h"] {
            let letter = if part == "x" { "i" } else { "h" };
            let weight = w.take(&format!("weight_{letter}h_l0")).transposed();
            w.give(&format!("{part}_proj.weight"), weight);
        }
        w.give("o_proj.weight", identity(6)); // none there
    };
    hold("lstm", "lstm = {}", |w| {
        matrices(w);
        let [x, h] = ["bias_ih_l0", "bias_hh_l0"].map(|name| w.take(name));
        let values = x.values.iter().zip(&h.values).map(|(x, h)| x + h).collect();
        w.give("x_proj.bias", Array { values, ..x });
    });
    hold("gru", "gru = {}", |w| {
        matrices(w);
        w.same([["x_proj.bias", "bias_ih_l0"], ["h_proj.bias", "bias_hh_l0"]]);
    });
}

#[test]
fn aft_answers_as_another_implementation() {
    let matrices = |w: &mut Weights| {
        w.linear([
            ["q_proj", "to_q"],
            ["k_proj", "to_k"],
            ["v_proj", "to_v"],
            ["o_proj", "project"],
        ]);
    };
    hold("aft_simple", "aft = {}", matrices);
    for (file, form) in [
        ("aft_full", "full = { length = 12, rank = 12 }"),
        ("aft_local", "local = { window = 4, length = 12, rank = 12 }"),
    ] {
        hold(file, &format!("aft = {{ form = {{ {form} }} }}"), |w| {
            matrices(w);
            // In one piece there.
            w.same([["query_positions", "wbias"]]);
            w.give("key_positions", identity(12));
        });
    }
}

#[test]
fn rwkv4_answers_as_in_transformers() {
    hold("rwkv4", "rwkv4 = {}", |w| {
        w.linear([["key"; 2], ["value"; 2], ["receptance"; 2], ["o_proj", "output"]]);
        let names = ["time_decay", "time_first", "time_mix_key", "time_mix_value"];
        w.same(names.map(|name| [name; 2]));
        w.same([["time_mix_receptance"; 2]]);
    });
}

#[test]
fn lightning_attention_answers_as_in_transformers() {
    // The second of three layers: 1 - 1 / (2 + 1e-5) + 1e-5.
    let text =
        "lightning_attention = { heads = 2, decay_scale = 0.5000124999875, norm_eps = 1e-6 }";
    hold("lightning_attention", text, |w| {
        w.linear([["qkv_proj"; 2], ["output_gate"; 2], ["out_proj"; 2]]);
        w.same([["norm.gamma", "norm.weight"]]);
    });
}

#[test]
fn mla_answers_as_in_transformers() {
    let keys = "key_width = 3, rope_width = 4, value_width = 5, kv_rank = 6, q_rank = 6";
    hold("mla", &format!("mla = {{ heads = 2, {keys}, norm_eps = 1e-6 }}"), |w| {
        // Channels that turn together are neighbours there.
        let queries = (0..2).flat_map(|head| {
            let rotated = halves(1, 4).map(|i| 3 + i);
            (0..3).chain(rotated).map(move |i| head * 7 + i)
        });
        let up = w.take("q_b_proj.weight").pick(0, queries).transposed();
        w.give("q_proj.Compressed.2.weight", up);
        w.linear([["q_proj.Compressed.0", "q_a_proj"], ["kv_proj.2", "kv_b_proj"], ["o_proj"; 2]]);
        w.same([
            ["q_proj.Compressed.1.gamma", "q_a_layernorm.weight"],
            ["kv_proj.1.gamma", "kv_a_layernorm.weight"],
        ]);
        let both = w.take("kv_a_proj_with_mqa.weight");
        w.give("kv_proj.0.weight", both.pick(0, 0..6).transposed());
        w.give("k_rope.weight", both.pick(0, halves(1, 4).map(|i| 6 + i)).transposed());
    });
}

#[test]
fn rwkv6_answers_as_its_authors() {
    let keys = "heads = 2, expand_v = 1.0, mix_low_rank = 3, gate_low_rank = 3, norm_eps = 64e-5";
    hold("rwkv6", &format!("rwkv6 = {{ {keys} }}"), |w| {
        // Shares of r, w, k, v and g here, of w, k, v, r and g there.
        let order = [3, 0, 1, 2, 4];
        let columns = order.into_iter().flat_map(|j| j * 3..(j + 1) * 3);
        let narrow = w.take("tm_w1").pick(1, columns);
        w.give("x_proj.0.linear.weight", narrow);
        let widen = w.take("tm_w2").pick(0, order).shaped([15, 8]);
        w.give("x_proj.2.weight", widen);
        let shares = ["r", "w", "k", "v", "g"].map(|j| w.take(&format!("{j}_maa")).shaped([1, 8]));
        let all = shares.into_iter().reduce(|all, share| all.above(&share)).unwrap();
        w.give("x_bias", all);
        w.same([
            ["x_proj.0.mu", "x_maa"],
            ["w_proj.linear.lora.0.weight", "td_w1"],
            ["w_proj.linear.lora.2.weight", "td_w2"],
            ["w_proj.linear.lora.2.bias", "time_decay"],
            ["bonus", "time_first"],
            ["g_norm.gamma", "ln_w"],
            ["g_norm.beta", "ln_b"],
        ]);
        for name in ["r", "k", "v", "g"] {
            let weight = w.take(&format!("{name}w")).transposed();
            w.give(&format!("{name}_proj.linear.weight"), weight);
        }
        let out = w.take("ow").transposed();
        w.give("o_proj.weight", out);
    });
}

#[test]
fn multihead_hyena_answers_as_in_mad() {
    hold(
        "multihead_hyena",
        "multihead_hyena = { group_width = 2, filter_order = 8, length = 32 }",
        |w| {
            // Keys and values change places: a group's outer product is the other way round.
            let places = || (0..8).chain(16..24).chain(8..16);
            let weight = w.take("in_proj.weight").pick(0, places()).transposed();
            w.give("in_proj.weight", weight);
            let taps = w.take("short_filter.weight").pick(0, places()).shaped([24, 3]).transposed();
            w.give("conv1d.weight", taps);
            for [ours, theirs] in [["in_proj.bias"; 2], ["conv1d.bias", "short_filter.bias"]] {
                let bias = w.take(theirs).pick(0, places());
                w.give(ours, bias);
            }
            for (ours, theirs) in ["inner.0", "inner.1", "inner.2", "last"].iter().zip([0, 2, 4, 6])
            {
                let theirs = format!("long_conv.filter.implicit_filter.{theirs}");
                w.linear([[format!("filter.{ours}"), theirs]]);
            }
            w.same([["filter.frequency", "long_conv.filter.implicit_filter.1.freq"]]);
            w.same([["d", "long_conv.bias"]]);
            w.linear([["out_proj"; 2]]);
        },
    );
}

#[test]
fn qrnn_answers_as_its_authors() {
    hold("qrnn", "qrnn = {}", |w| {
        // The token itself comes first there.
        let weight = w.take("linear.weight").pick(1, (6..12).chain(0..6)).transposed();
        // f is the share that is kept here, as in the paper, and that is written there.
        let turned = |x: &Array| {
            let values = x.values.iter().enumerate();
            let values = values.map(|(i, &x)| if i / 6 % 3 == 1 { -x } else { x }).collect();
            Array { shape: x.shape.clone(), values }
        };
        w.give("in_proj.weight", turned(&weight));
        let bias = w.take("linear.bias");
        w.give("in_proj.bias", turned(&bias));
        w.give("o_proj.weight", identity(6)); // none there
    });
}

#[test]
fn path_attention_answers_as_in_flash_linear_attention() {
    let keys =
        "heads = 4, key_width = 4, key_value_heads = 2, w_rank = 4, conv_size = 0, chunk = 8";
    for (file, forget_gate) in [("path_attention", false), ("path_fox", true)] {
        let text = format!("path_attention = {{ {keys}, forget_gate = {forget_gate} }}");
        hold_within(LENGTHS_LIMIT, file, &text, |w| {
            w.same(["q", "k", "v", "o"].map(|x| [format!("{x}_proj.weight"), x.to_string()]));
            w.same([["w_proj.0.weight", "w1"], ["w_proj.1.weight", "w2"]]);
            w.same([["bt_proj.weight", "b"], ["bt_proj.bias", "b_bias"]]);
            if forget_gate {
                w.same([["g_proj.weight", "g"], ["g_proj.bias", "g_bias"]]);
            }
        });
    }
}

#[test]
fn log_linear_attention_answers_as_in_flash_linear_attention() {
    let keys = "heads = 2, key_width = 4, levels = 6, conv_size = 0, output_gate = false";
    hold("log_linear_attention", &format!("log_linear_attention = {{ {keys} }}"), |w| {
        let names = ["q", "k", "v", "a", "l", "o"];
        w.same(names.map(|x| [format!("{x}_proj.weight"), x.to_string()]));
        w.same([["a_log", "A_log"], ["dt_bias"; 2], ["level_scale", "scale"]]);
        w.same([["o_norm.norm.gamma", "norm"]]);
    });
}

#[test]
fn lru_answers_as_another_implementation() {
    hold("lru", "lru = { width = 5 }", |w| {
        let [b_re, b_im, c_re, c_im] = ["B_re", "B_im", "C_re", "C_im"].map(|name| w.take(name));
        w.give("in_proj.weight", b_re.above(&b_im).transposed());
        // The sign of the product of two imaginary parts is in the weights here.
        w.give("c_proj.weight", c_re.transposed().above(&c_im.transposed().each(|x| -x)));
        let names = ["nu_log", "theta_log", "gamma_log"];
        w.same(names.map(|name| [name; 2]));
        w.same([["d", "D"]]);
        let [out, gate] = ["out1", "out2"].map(|name| w.take(&format!("{name}.kernel")));
        let both = out.transposed().above(&gate.transposed());
        w.give("out_proj.weight", both.transposed());
        let [out, gate] = ["out1", "out2"].map(|name| w.take(&format!("{name}.bias")));
        let both = out.shaped([1, 6]).above(&gate.shaped([1, 6])).shaped([12]);
        w.give("out_proj.bias", both);
    });
}

#[test]
fn base_conv_and_based_answer_as_in_zoology() {
    hold("base_conv", "base_conv = {}", |w| {
        w.linear([["projection"; 2]]);
        w.convolution("conv1d", "conv.conv");
    });
    hold("base_conv_implicit", "base_conv = { implicit = true, length = 32 }", |w| {
        w.linear([["projection"; 2], ["filter.0", "conv.mlp.0"], ["filter.1", "conv.mlp.2"]]);
    });
    let keys = "heads = 2, key_width = 4, feature_map = 'taylor', normalize = true, \
        denominator_eps = 1e-12, output_norm = 'none'";
    hold("based", &format!("linear_attention = {{ {keys} }}"), |w| {
        w.linear(["q", "k", "v", "o"].map(|x| [format!("{x}_proj"), format!("proj_{x}")]));
    });
}

#[test]
fn a_preconditioned_delta_rule_answers_as_in_flash_linear_attention() {
    let keys = "heads = 2, value_heads = 4, key_width = 4, expand_v = 1.0, conv_size = 0, \
        output_gate = false, preconditioner = true";
    hold("preconditioned_gated_deltanet", &format!("gated_deltanet = {{ {keys} }}"), |w| {
        let names = ["q", "k", "v", "a", "b", "o"];
        w.same(names.map(|x| [format!("{x}_proj.weight"), x.to_string()]));
        w.same([["a_log", "A_log"], ["dt_bias"; 2], ["o_norm.norm.gamma", "norm"]]);
        let names = ["a_atk", "b_atk"];
        w.same(names.map(|x| [format!("preconditioner.{x}_proj.weight"), x.to_string()]));
        w.same([
            ["preconditioner.a_log_atk", "A_log_atk"],
            ["preconditioner.dt_bias_atk", "dt_bias_atk"],
            ["preconditioner.log_atk_scale", "log_atk_scale"],
        ]);
    });
}
