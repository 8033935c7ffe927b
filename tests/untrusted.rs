//! Files that others wrote, damaged or hostile: a parser takes them or refuses them. It never panics, and
//! never asks for memory without bounds.
//!
//! Each property starts from files that are right and changes them at random places: bits, spans, and
//! numbers for numbers that no size can be. `PROPTEST_CASES` says how many cases a property tries. On Linux
//! a process of its own runs them, whose memory the system limits to [`MOST_MEMORY`]; `--ignored` runs one
//! without the limit.

use crate::desk::{Desk, TINY};
use burn::backend::Flex;
use linattn::generate::{GenerateConfig, Next, Sequence, generate};
use linattn::nn::{LanguageModel, LanguageModelConfig};
use linattn_checkpoints::import;
use linattn_sweep::{RowsFile, Sweep, write_events};
use linattn_tasks::Tokenizer;
use linattn_trainer::{RunConfig, StoredModel, Which, read_summary};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::{RngAlgorithm, RngSeed, TestRng, TestRunner};
use safetensors::tensor::{SafeTensors, TensorView};
use std::collections::HashMap;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// Address space of the process that runs every property, in KiB: what the program itself takes, threads
/// and their stacks included, and a GiB for the parsers.
#[cfg(target_os = "linux")]
const MOST_MEMORY: u64 = 3 << 20;

/// Cases of a property unless `PROPTEST_CASES` says otherwise; slow ones have fewer.
fn cases(usual: u32) -> ProptestConfig {
    let asked = std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok());
    // The same cases in each run, and others in each run where somebody asks for a number of them.
    let rng_seed = if asked.is_some() { RngSeed::Random } else { RngSeed::Fixed(1) };
    let cases = asked.unwrap_or(usual);
    // A failure is shown with its change; no file of seeds is kept.
    ProptestConfig { cases, rng_seed, failure_persistence: None, ..ProptestConfig::default() }
}

/// A change of a file, at a share of its length.
#[derive(Debug, Clone)]
pub(crate) enum Change {
    Flip(f64, u8),
    Delete(f64, usize),
    Repeat(f64, usize),
    Insert(f64, &'static str),
    Number(f64, &'static str),
    Cut(f64),
    /// A copy of one word in place of another, both at shares of their number.
    Word(f64, f64),
    /// A copy of one line before another.
    Line(f64, f64),
}

const PIECES: &[&str] = &[
    "[",
    "]",
    "{",
    "}",
    "\"",
    "=",
    ",",
    ":",
    "\n",
    ".",
    "-",
    "null",
    "nan",
    "\0",
    "\\",
    "é",
    "\u{1F600}",
    "[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[",
    "{\"a\":{\"a\":{\"a\":{\"a\":{\"a\":",
    "true",
    "1e400",
];
const NUMBERS: &[&str] = &[
    "0",
    "1",
    "-1",
    "2",
    "3",
    "7",
    "255",
    "65535",
    "65536",
    "1048576",
    "16777216",
    "16777217",
    "2147483647",
    "2147483648",
    "4294967295",
    "4294967296",
    "9007199254740993",
    "9223372036854775807",
    "9223372036854775808",
    "18446744073709551615",
    "1e18",
    "1e300",
    "-0.0",
    "0.5",
    "1e-300",
    "nan",
    "inf",
    "\"1\"",
    "[]",
    "{}",
    "true",
];

fn change() -> impl Strategy<Value = Change> {
    let at = || 0.0..1.0f64;
    let number = || prop::sample::select(NUMBERS);
    prop_oneof![
        2 => (at(), 0..8u8).prop_map(|(at, bit)| Change::Flip(at, bit)),
        1 => (at(), 1..40usize).prop_map(|(at, length)| Change::Delete(at, length)),
        1 => (at(), 1..40usize).prop_map(|(at, length)| Change::Repeat(at, length)),
        2 => (at(), prop::sample::select(PIECES)).prop_map(|(at, piece)| Change::Insert(at, piece)),
        6 => (at(), number()).prop_map(|(at, number)| Change::Number(at, number)),
        1 => at().prop_map(Change::Cut),
        2 => (at(), at()).prop_map(|(from, to)| Change::Word(from, to)),
        1 => (at(), at()).prop_map(|(from, to)| Change::Line(from, to)),
    ]
}

fn changes() -> impl Strategy<Value = Vec<Change>> {
    prop::collection::vec(change(), 1..4)
}

/// Changes out of a seed.
pub(crate) fn some_changes(seed: u64) -> Vec<Change> {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
    let mut runner = TestRunner::new_with_rng(ProptestConfig::default(), rng);
    changes().new_tree(&mut runner).unwrap().current()
}

pub(crate) fn apply(bytes: &[u8], changes: &[Change]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    for change in changes {
        let place = |share: &f64| ((share * bytes.len() as f64) as usize).min(bytes.len());
        match change {
            Change::Flip(at, bit) => {
                let at = place(at);
                if let Some(byte) = bytes.get_mut(at) {
                    *byte ^= 1 << bit;
                }
            }
            Change::Delete(at, length) => {
                let at = place(at);
                bytes.drain(at..(at + length).min(bytes.len()));
            }
            Change::Repeat(at, length) => {
                let at = place(at);
                let span = bytes[at..(at + length).min(bytes.len())].to_vec();
                bytes.splice(at..at, span);
            }
            Change::Insert(at, piece) => {
                let at = place(at);
                bytes.splice(at..at, piece.bytes());
            }
            Change::Number(at, number) => {
                let found = spans(&bytes, |byte| byte.is_ascii_digit());
                if let Some(span) = at_share(&found, *at) {
                    bytes.splice(span, number.bytes());
                }
            }
            Change::Cut(at) => bytes.truncate(place(at)),
            Change::Word(from, to) => {
                let found = spans(&bytes, |byte| byte.is_ascii_alphanumeric() || byte == b'_');
                if let (Some(from), Some(to)) = (at_share(&found, *from), at_share(&found, *to)) {
                    let word = bytes[from].to_vec();
                    bytes.splice(to, word);
                }
            }
            Change::Line(from, to) => {
                let found = spans(&bytes, |byte| byte != b'\n');
                if let (Some(from), Some(to)) = (at_share(&found, *from), at_share(&found, *to)) {
                    let line = [&bytes[from], b"\n"].concat();
                    bytes.splice(to.start..to.start, line);
                }
            }
        }
    }
    bytes
}

/// Where bytes of a kind stand.
fn spans(bytes: &[u8], kind: impl Fn(u8) -> bool) -> Vec<Range<usize>> {
    let mut found: Vec<Range<usize>> = vec![];
    for (i, _) in bytes.iter().enumerate().filter(|(_, byte)| kind(**byte)) {
        match found.last_mut() {
            Some(last) if last.end == i => last.end += 1,
            _ => found.push(i..i + 1),
        }
    }
    found
}

fn at_share(spans: &[Range<usize>], share: f64) -> Option<Range<usize>> {
    spans.get((share * spans.len() as f64) as usize).cloned()
}

/// A text that numbers are changed in, before its binary rest.
fn with_header(bytes: &[u8], changes: &[Change]) -> Vec<u8> {
    let Some((length, rest)) = bytes.split_first_chunk::<8>() else { return apply(bytes, changes) };
    let (header, data) = rest.split_at(u64::from_le_bytes(*length) as usize);
    let header = apply(header, changes);
    [&(header.len() as u64).to_le_bytes()[..], &header, data].concat()
}

fn root(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(name)
}

/// A file in a folder of its own, which is written anew for each case.
struct Place {
    folder: TempDir,
    file: PathBuf,
}

impl Place {
    fn of(name: &str) -> Self {
        let folder = TempDir::new().unwrap();
        Self { file: folder.path().join(name), folder }
    }

    fn put(&self, bytes: &[u8]) -> &Path {
        fs::write(&self.file, bytes).unwrap();
        &self.file
    }
}

/// One line, or what a parser of TOML shows: nothing of Rust's.
fn is_for_people(error: &str) -> bool {
    !error.is_empty() && !error.contains("Os {") && !error.contains("Error {")
}

const CONFIGS: &[&str] = &[
    "configs/gated_deltanet.toml",
    "configs/hybrids/jamba.toml",
    "configs/hybrids/rwkv7_full.toml",
    "configs/hybrids/canon.toml",
    "configs/mqar/mamba2.toml",
    "configs/mqar/performer.toml",
    "configs/mqar/deltaproduct.toml",
    "configs/state_tracking/s3/small.toml",
    "configs/state_tracking/parity/small.toml",
    "configs/lm/small.toml",
];

#[cfg_attr(target_os = "linux", ignore = "run under a limit of memory")]
#[test]
fn run_configs_are_taken_or_refused() {
    let texts: Vec<Vec<u8>> = CONFIGS.iter().map(|name| fs::read(root(name)).unwrap()).collect();
    let place = Place::of("run.toml");
    proptest!(cases(60), |(which in 0..texts.len(), changes in changes())| {
        match RunConfig::read(place.put(&apply(&texts[which], &changes)), &[]) {
            Ok(run) => {
                let again: RunConfig = toml::from_str(&run.to_toml()).unwrap();
                prop_assert_eq!(again.to_toml(), run.to_toml());
            }
            Err(e) => prop_assert!(is_for_people(&e.to_string()), "{}", e),
        }
    });
}

#[cfg_attr(target_os = "linux", ignore = "run under a limit of memory")]
#[test]
fn sweeps_are_taken_or_refused() {
    let text = fs::read(root("experiments/smoke/sweep.toml")).unwrap();
    let place = Place::of("sweep.toml");
    proptest!(cases(60), |(changes in changes())| {
        if let Err(e) = Sweep::read(place.put(&apply(&text, &changes))) {
            prop_assert!(is_for_people(&e.to_string()), "{}", e);
        }
    });
}

#[cfg_attr(target_os = "linux", ignore = "run under a limit of memory")]
#[test]
fn rows_are_taken_or_refused() {
    let text = b"run,status,seed,task/length,test/a,error\n\
        a-1,completed,1,64,0.5,\nb-2,failed,2,64,,\"no, \"\"never\"\"\"\nc-3,completed,3,64,1e-3,\n";
    let place = Place::of("rows.csv");
    proptest!(cases(200), |(changes in changes())| {
        place.put(&apply(text, &changes));
        let rows = RowsFile::new(place.folder.path());
        match rows.load() {
            // What was mended stays as it is.
            Ok(first) => prop_assert_eq!(first.rows, rows.load().unwrap().rows),
            Err(e) => prop_assert!(is_for_people(&e.to_string()), "{}", e),
        }
    });
}

/// A byte-level tokenizer of single characters.
pub(crate) fn tokenizer_json() -> String {
    let mut vocab: Vec<String> = (b'!'..=b'~').map(|byte| (byte as char).to_string()).collect();
    vocab.extend(["Ġ", "Ċ", "th", "the"].map(String::from));
    let entries = vocab.iter().enumerate().map(|(id, token)| format!("{token:?}: {id}"));
    let bytes = r#"{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": true}"#;
    format!(
        r#"{{"version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
        "normalizer": null, "post_processor": null, "pre_tokenizer": {bytes}, "decoder": {bytes},
        "model": {{"type": "BPE", "dropout": null, "unk_token": null,
        "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": false,
        "byte_fallback": false, "ignore_merges": false, "vocab": {{{}}},
        "merges": [["t", "h"], ["th", "e"]]}}}}"#,
        entries.collect::<Vec<_>>().join(", ")
    )
}

#[cfg_attr(target_os = "linux", ignore = "run under a limit of memory")]
#[test]
fn tokenizers_are_taken_or_refused() {
    let (text, place) = (tokenizer_json(), Place::of("tokenizer.json"));
    proptest!(cases(200), |(changes in changes())| {
        match Tokenizer::open(place.put(&apply(text.as_bytes(), &changes)), "tokenizer") {
            Ok(tokenizer) => {
                let ids = tokenizer.ids("the cat, 12 é\n").unwrap_or_default();
                prop_assert!(ids.iter().all(|&id| (id as usize) < tokenizer.vocab()));
                let _any_text = tokenizer.decode(&ids);
            }
            Err(e) => prop_assert!(is_for_people(&e.to_string()), "{}", e),
        }
    });
}

const CHECKPOINTS: [&str; 4] = ["GLA", "GatedDeltaNet", "Mamba2", "RWKV7"];

/// Copies of the checkpoints in which `name` is to be changed, and that file's right contents.
fn checkpoints(name: &str) -> Vec<(Place, Vec<u8>)> {
    let copy = |checkpoint| {
        let (from, place) = (root("tests/checkpoints").join(checkpoint), Place::of(name));
        for file in ["config.json", "model.safetensors"] {
            fs::copy(from.join(file), place.folder.path().join(file)).unwrap();
        }
        let right = fs::read(&place.file).unwrap();
        (place, right)
    };
    CHECKPOINTS.map(copy).into()
}

fn import_from(place: &Place) -> Result<(), String> {
    let imported = import::<Flex>(place.folder.path(), &Default::default());
    imported.map(|_| ()).map_err(|e| e.to_string())
}

#[cfg_attr(target_os = "linux", ignore = "run under a limit of memory")]
#[test]
fn configs_of_checkpoints_are_taken_or_refused() {
    let copies = checkpoints("config.json");
    proptest!(cases(40), |(which in 0..copies.len(), changes in changes())| {
        let (place, right) = &copies[which];
        place.put(&apply(right, &changes));
        if let Err(e) = import_from(place) {
            prop_assert!(is_for_people(&e) && !e.contains('\n'), "{}", e);
        }
    });
}

#[cfg_attr(target_os = "linux", ignore = "run under a limit of memory")]
#[test]
fn weights_of_checkpoints_are_taken_or_refused() {
    let copies = checkpoints("model.safetensors");
    proptest!(cases(40), |(which in 0..copies.len(), changes in changes())| {
        let (place, right) = &copies[which];
        place.put(&with_header(right, &changes));
        if let Err(e) = import_from(place) {
            prop_assert!(is_for_people(&e) && !e.contains('\n'), "{}", e);
        }
    });
}

fn small_model() -> LanguageModel<Flex> {
    let config: LanguageModelConfig = toml::from_str(
        "d_model = 8\n[[layers]]\nmixer.gated_deltanet = { heads = 2 }\n\
         [[layers]]\nmixer.attention = { heads = 2 }\n",
    )
    .unwrap();
    config.init(11, &Default::default()).unwrap()
}

/// The same state with other metadata and no checksum, which a file may lack.
fn without_checksum(bytes: &[u8], changes: &[Change]) -> Option<Vec<u8>> {
    let file = SafeTensors::deserialize(bytes).unwrap();
    let (_, header) = SafeTensors::read_metadata(bytes).unwrap();
    let text = &header.metadata().as_ref().unwrap()["linattn_state"];
    let mut value: serde_json::Value = serde_json::from_str(text).unwrap();
    value.as_object_mut().unwrap().remove("checksum").unwrap();
    let text = String::from_utf8(apply(value.to_string().as_bytes(), changes)).ok()?;
    let metadata = HashMap::from([("linattn_state".to_string(), text)]);
    let views: Vec<(String, TensorView<'_>)> = file.tensors();
    safetensors::serialize(views, Some(metadata)).ok()
}

#[cfg_attr(target_os = "linux", ignore = "run under a limit of memory")]
#[test]
fn states_are_taken_or_refused() {
    let (model, device, place) = (small_model(), Default::default(), Place::of("state"));
    let folder = TempDir::new().unwrap();
    let right = folder.path().join("right");
    let config = GenerateConfig { new_tokens: 3, keep_states: true, ..Default::default() };
    let written =
        generate(&model, vec![Sequence::new(vec![1, 2, 3])], &config, &device, |_| Next::Continue);
    written.unwrap().rows[0].sequence.save(&right).unwrap();
    let bytes = fs::read(&right).unwrap();
    proptest!(cases(150), |(changes in changes(), how in 0..3u8)| {
        let changed = match how {
            0 => Some(apply(&bytes, &changes)),
            1 => Some(with_header(&bytes, &changes)),
            _ => without_checksum(&bytes, &changes),
        };
        let Some(changed) = changed else { return Ok(()) };
        match Sequence::load(place.put(&changed), &model, &device) {
            Ok(text) => {
                let config = GenerateConfig { new_tokens: 2, ..Default::default() };
                let _any = generate(&model, vec![text], &config, &device, |_| Next::Continue);
            }
            Err(e) => prop_assert!(is_for_people(&e.to_string()), "{}", e),
        }
    });
}

/// A run that ended, to be damaged.
fn trained() -> Desk {
    let desk = Desk::with(&TINY.replace("epochs = 3", "steps = 5"));
    desk.run_well(&[]);
    desk
}

#[cfg_attr(target_os = "linux", ignore = "run under a limit of memory")]
#[test]
fn what_a_run_left_is_taken_or_refused() {
    let desk = trained();
    let folder = desk.path("runs/tiny");
    let checkpoint = "checkpoints/step-0000000005/";
    let names = [
        "config.toml",
        "summary.json",
        "metrics.jsonl",
        &format!("{checkpoint}state.json"),
        &format!("{checkpoint}model.safetensors"),
    ];
    let right: Vec<Vec<u8>> =
        names.iter().map(|name| fs::read(folder.join(name)).unwrap()).collect();
    proptest!(cases(100), |(which in 0..names.len(), changes in changes())| {
        let path = folder.join(names[which]);
        fs::write(&path, apply(&right[which], &changes)).unwrap();
        let _read = read_summary(&folder);
        if let Err(e) = write_events(&folder) {
            prop_assert!(is_for_people(&e.to_string()), "{}", e);
        }
        for which in [Which::Best, Which::Last, Which::Step(5)] {
            match StoredModel::open(&folder, which) {
                Ok(stored) => drop(stored.load::<Flex>(&Default::default())),
                Err(e) => prop_assert!(is_for_people(&e.to_string()), "{}", e),
            }
        }
        fs::write(&path, &right[which]).unwrap();
    });
}

/// All of the above in a process that gets no more memory than that.
#[cfg(target_os = "linux")]
#[test]
fn no_file_makes_a_parser_ask_for_memory_without_bounds() {
    let limited = format!(r#"ulimit -v {MOST_MEMORY} && exec "$0" "$@""#);
    let program = std::env::current_exe().unwrap();
    let output = std::process::Command::new("sh")
        .args(["-c", &limited])
        .arg(program)
        .args(["untrusted::", "--ignored", "--test-threads=1"])
        .env("RAYON_NUM_THREADS", "2")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    assert!(said.contains("8 passed"), "{said}");
}
