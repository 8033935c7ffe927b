//! `generate`: what a trained model writes after a prompt, and its state in a file.

use crate::chat::{Broken, Chat, ChatError, ChatRequest, Interrupts};
use crate::companions::{CompanionError, Companions};
use crate::device::{self, Choice, Job};
use crate::eval::checkpoint;
use crate::page::Page;
use crate::sampling::{SamplingArgs, SamplingError};
use crate::signals::{self, Asked};
use crate::train::guarded;
use crate::{BAD_INPUT, FAILED, INTERRUPTED, fail, output};
use linattn::generate::{
    Finish, GenerateConfig, GenerateError, Generated, Next, Sequence, Timing, Written,
    generate as write_texts,
};
use linattn::nn::{HeadKind, LanguageModel, StateError, state_file};
use linattn::ops::{LinearAttentionBackend, WeightBits};
use linattn_tasks::Tokenizer;
use linattn_trainer::{Interrupter, StoredError, StoredModel, TrainBackend, Which};
use serde_json::{Value, json};
use std::io;
use std::path::PathBuf;
use std::process::ExitCode;

/// Lets a trained model write, token by token with its recurrent state. Where the model knows no
/// text, prompts are ids with spaces between, and so is what it writes.
#[derive(Debug, clap::Parser)]
#[command(name = "generate", version)]
pub struct GenerateArgs {
    /// The folder that `train` or `convert import` wrote
    #[arg(long)]
    run: PathBuf,
    /// Text to go on from; several are written in one batch
    #[arg(long = "prompt", value_name = "TEXT")]
    prompts: Vec<String>,
    /// One prompt more, from a file
    #[arg(long, value_name = "FILE")]
    prompt_file: Option<PathBuf>,
    /// Opens a conversation on the terminal, or with the lines of a pipe, by the model's chat template
    #[arg(long, conflicts_with_all = ["prompts", "prompt_file", "state", "save_state", "json"])]
    chat: bool,
    /// The system prompt: a text for the model before a conversation
    #[arg(long, value_name = "TEXT", requires = "chat")]
    system: Option<String>,
    /// A value that the chat template asks for, such as enable_thinking=false; can be given several times
    #[arg(long = "chat-value", value_name = "KEY=JSON", requires = "chat", value_parser = chat_value)]
    chat_values: Vec<(String, Value)>,
    /// The most tokens to write for each prompt: 200 by default, and 4096 for an answer in a conversation
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=1 << 32))]
    tokens: Option<u64>,
    #[command(flatten)]
    sampling: SamplingArgs,
    /// Ends a text before this; can be given several times
    #[arg(long = "stop", value_name = "TEXT")]
    stops: Vec<String>,
    /// Puts text and state into this file in the end
    #[arg(long, value_name = "FILE")]
    save_state: Option<PathBuf>,
    /// Goes on from a file of `--save-state`; prompts come after its text
    #[arg(long, value_name = "FILE")]
    state: Option<PathBuf>,
    /// Numbers that weights are held in: whole ones of 8 or 4 bits are read faster, and are rounded
    #[arg(long, value_enum, default_value_t = Weights::F32)]
    weights: Weights,
    /// Which checkpoint: best, last, or a step
    #[arg(long, default_value = "best", value_parser = checkpoint)]
    checkpoint: Which,
    /// auto, cpu, cuda:N, rocm:N, vulkan:N or metal:N
    #[arg(long, default_value = "auto")]
    device: String,
    /// Prints one JSON object in the end: texts, ids and figures
    #[arg(long)]
    json: bool,
}

/// Numbers of weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Weights {
    /// As they are
    F32,
    /// A byte each, and a scale for 32
    Int8,
    /// Half a byte each, and a scale for 32
    Int4,
}

impl Weights {
    /// The model with such weights.
    fn of<B: LinearAttentionBackend>(
        self,
        model: LanguageModel<B>,
    ) -> Result<LanguageModel<B>, Failure> {
        let bits = match self {
            Self::F32 => return Ok(model),
            Self::Int8 => WeightBits::Int8,
            Self::Int4 => WeightBits::Int4,
        };
        match B::takes_quantized() {
            true => Ok(model.quantized(bits)),
            false => {
                let why = "`--weights` of whole numbers are not there under Burn's fusion: add --device cpu, leave it out, or build without the feature `fusion`";
                Err(Failure::Input(why.into()))
            }
        }
    }
}

/// Someone's mistake, or a failure of ours.
enum Failure {
    Input(String),
    Output(String),
}

impl From<StoredError> for Failure {
    fn from(e: StoredError) -> Self {
        Self::Input(e.to_string())
    }
}

impl From<GenerateError> for Failure {
    fn from(e: GenerateError) -> Self {
        match e {
            GenerateError::NotFinite { .. } => Self::Output(e.to_string()),
            e => Self::Input(e.to_string()),
        }
    }
}

impl From<CompanionError> for Failure {
    fn from(e: CompanionError) -> Self {
        Self::Input(e.to_string())
    }
}

impl From<SamplingError> for Failure {
    fn from(e: SamplingError) -> Self {
        Self::Input(e.to_string())
    }
}

impl From<ChatError> for Failure {
    fn from(e: ChatError) -> Self {
        Self::Input(e.to_string())
    }
}

impl From<Broken> for Failure {
    fn from(e: Broken) -> Self {
        match e {
            Broken::Input(e) => Self::Input(e),
            Broken::Failed(e) => Self::Output(e),
        }
    }
}

impl From<StateError> for Failure {
    fn from(e: StateError) -> Self {
        match e {
            StateError::Write { .. } => Self::Output(e.to_string()),
            e => Self::Input(e.to_string()),
        }
    }
}

impl Failure {
    fn exit(self) -> ExitCode {
        match self {
            Self::Input(e) => fail(BAD_INPUT, &e),
            Self::Output(e) => fail(FAILED, &e),
        }
    }
}

/// Runs the command and gives its exit code: 0 done, 1 failed, 2 bad input, 130 interrupted.
pub fn generate(args: GenerateArgs) -> ExitCode {
    match args.chat {
        true => chat(&args),
        false => write(&args),
    }
}

/// Opens a conversation.
fn chat(args: &GenerateArgs) -> ExitCode {
    let opened = open_chat(args);
    let choice = match device::choose(&args.device) {
        Ok(choice) => choice,
        Err(e) => return fail(BAD_INPUT, &e),
    };
    let (chat, model) = match opened {
        Ok(opened) => opened,
        Err(e) => return e.exit(),
    };
    choice.advise();
    let interrupts = match Interrupts::watch() {
        Ok(interrupts) => interrupts,
        Err(e) => return fail(FAILED, &format!("can't watch for Ctrl-C: {e}")),
    };
    let talk = Talk { chat: &chat, model: &model, weights: args.weights, interrupts: &interrupts };
    match guarded(&choice, talk) {
        Ok(Ok((timing, path))) => {
            output::note(&figures(&timing, &choice, &path));
            ExitCode::SUCCESS
        }
        Ok(Err(e)) => e.exit(),
        Err(code) => code,
    }
}

/// The conversation that was asked for, and its model.
fn open_chat(args: &GenerateArgs) -> Result<(Chat<'_>, StoredModel), Failure> {
    let model = open_model(args)?;
    let config = config(args, &model)?;
    let tokenizer = tokenizer(&model)?;
    check_stops(args, tokenizer.as_ref())?;
    let ends = ends(&model, tokenizer.as_ref())?;
    let request = ChatRequest {
        folder: &args.run,
        system: args.system.as_deref(),
        values: &args.chat_values,
        stops: &args.stops,
    };
    Ok((Chat::new(request, &model, tokenizer, ends, config)?, model))
}

/// `enable_thinking=false`: a name, and JSON, or else a text.
fn chat_value(text: &str) -> Result<(String, Value), String> {
    let (key, value) = text.split_once('=').ok_or("it has to be KEY=JSON")?;
    let value = serde_json::from_str(value).unwrap_or_else(|_| Value::String(value.into()));
    Ok((key.into(), value))
}

/// Where a device's part of a conversation comes from.
struct Talk<'a> {
    chat: &'a Chat<'a>,
    model: &'a StoredModel,
    weights: Weights,
    interrupts: &'a Interrupts,
}

impl Job for Talk<'_> {
    type Output = Result<(Timing, String), Failure>;

    fn run<B: TrainBackend>(self, devices: &[B::Device]) -> Self::Output {
        let device = &devices[0];
        let model = self.weights.of(self.model.load::<B::InnerBackend>(device)?)?;
        let timing = self.chat.talk(&model, device, self.interrupts)?;
        Ok((timing, B::InnerBackend::path(device).to_string()))
    }
}

/// Writes after prompts.
fn write(args: &GenerateArgs) -> ExitCode {
    let request = match Request::new(args) {
        Ok(request) => request,
        Err(e) => return e.exit(),
    };
    let choice = match device::choose(&args.device) {
        Ok(choice) => choice,
        Err(e) => return fail(BAD_INPUT, &e),
    };
    choice.advise();
    let stop = Interrupter::new();
    // The first Ctrl-C ends the texts after their token, the second ends the program at once.
    let (stopped, mut pressed) = (stop.clone(), false);
    let watched = signals::watch(move |asked| {
        stopped.stop(Some("Ctrl-C"));
        if pressed && asked == Asked::Key {
            std::process::exit(INTERRUPTED.into());
        }
        pressed |= asked == Asked::Key;
    });
    if let Err(e) = watched {
        return fail(FAILED, &format!("can't watch for Ctrl-C: {e}"));
    }
    let done = match guarded(&choice, Generate { request: &request, stop: &stop }) {
        Ok(Ok(done)) => done,
        Ok(Err(e)) => return e.exit(),
        Err(code) => return code,
    };
    if let Err(e) = request.show(&done, &choice) {
        return e.exit();
    }
    match stop.should_stop() {
        true => ExitCode::from(INTERRUPTED),
        false => ExitCode::SUCCESS,
    }
}

/// A call of the command, checked as far as it can be without a device.
struct Request<'a> {
    args: &'a GenerateArgs,
    model: StoredModel,
    /// `None` where the model knows no text.
    tokenizer: Option<Tokenizer>,
    prompts: Vec<Prompt>,
    /// Ids that end a text.
    ends: Vec<u32>,
    config: GenerateConfig,
}

/// Beginning of a text.
struct Prompt {
    text: String,
    ids: Vec<u32>,
}

impl<'a> Request<'a> {
    fn new(args: &'a GenerateArgs) -> Result<Self, Failure> {
        let texts = prompts(args)?;
        if let Some(path) = &args.save_state {
            // Before the text is written, and not after.
            state_file(path).map_err(|e| Failure::Input(e.to_string()))?;
        }
        let model = open_model(args)?;
        let config = config(args, &model)?;
        let tokenizer = tokenizer(&model)?;
        check_stops(args, tokenizer.as_ref())?;
        let ends = ends(&model, tokenizer.as_ref())?;
        let prompts = texts.into_iter().map(|text| {
            let ids = encode(tokenizer.as_ref(), &text, model.vocab)?;
            Ok(Prompt { text, ids })
        });
        let prompts = prompts.collect::<Result<Vec<_>, Failure>>()?;
        Ok(Self { args, model, tokenizer, prompts, ends, config })
    }

    /// The state of `--state` with each prompt after it, or each prompt alone.
    fn sequences<B: LinearAttentionBackend>(
        &self,
        model: &LanguageModel<B>,
        device: &B::Device,
    ) -> Result<Vec<Sequence<B>>, Failure> {
        let Some(path) = &self.args.state else {
            let alone = |(i, prompt): (usize, &Prompt)| {
                Sequence::new(prompt.ids.clone()).with_stream(i as u64)
            };
            return Ok(self.prompts.iter().enumerate().map(alone).collect());
        };
        let before = Sequence::load(path, model, device)?;
        if self.prompts.is_empty() {
            return Ok(vec![before]);
        }
        let after = |(i, prompt): (usize, &Prompt)| {
            let stream = before.stream().wrapping_add(i as u64);
            let mut sequence = before.clone().with_stream(stream);
            sequence.extend(&prompt.ids);
            sequence
        };
        Ok(self.prompts.iter().enumerate().map(after).collect())
    }

    /// Prints the text, unless it was shown as it came, and the speed.
    fn show(&self, done: &Done, choice: &Choice) -> Result<(), Failure> {
        let text = match (self.args.json, self.streams()) {
            (true, _) => format!("{:#}\n", self.report(done, choice)),
            (false, true) => String::new(),
            (false, false) => {
                let lines = done.texts.iter().enumerate();
                lines.map(|(i, text)| format!("[{}] {}\n", i + 1, text.shown)).collect()
            }
        };
        written(output::write(&text))?;
        output::note(&figures(&done.timing, choice, &done.path));
        Ok(())
    }

    /// One text is shown as it comes.
    fn streams(&self) -> bool {
        !self.args.json && self.prompts.len() <= 1
    }

    fn report(&self, done: &Done, choice: &Choice) -> Value {
        let row = |(i, text): (usize, &Text)| {
            json!({
                "prompt": self.prompts.get(i).map(|prompt| &prompt.text),
                "text": text.shown,
                "ids": text.ids,
                "finish": text.finish,
            })
        };
        let timing = &done.timing;
        json!({
            "run": self.args.run,
            "checkpoint": self.model.checkpoint.position.step,
            "sampling": self.config.sampling,
            "texts": done.texts.iter().enumerate().map(row).collect::<Vec<_>>(),
            "prompt_tokens": timing.prompt_tokens,
            "prompt_tokens_per_second": rate(timing.prompt_tokens, timing.prompt_seconds),
            "decoding_tokens_per_second": rate(timing.step_tokens, timing.step_seconds),
            "state_bytes": timing.state_bytes,
            "device": choice.to_string(),
            "path": done.path,
            "version": env!("CARGO_PKG_VERSION"),
        })
    }
}

/// Work and speed of a generation in one line.
fn figures(timing: &Timing, choice: &Choice, path: &str) -> String {
    let speed = |rate: Option<f64>| rate.map_or("-".to_string(), |rate| format!("{rate:.1}"));
    format!(
        "prompt {} tokens, {} tokens/s; decoding {} tokens/s; state {} bytes a text; {choice}, {path}",
        timing.prompt_tokens,
        speed(rate(timing.prompt_tokens, timing.prompt_seconds)),
        speed(rate(timing.step_tokens, timing.step_seconds)),
        timing.state_bytes,
    )
}

fn rate(tokens: usize, seconds: f64) -> Option<f64> {
    (tokens > 0 && seconds > 0.0).then(|| tokens as f64 / seconds)
}

/// Length and sampling, checked.
fn config(args: &GenerateArgs, model: &StoredModel) -> Result<GenerateConfig, Failure> {
    let by_default = if args.chat { 4096 } else { 200 };
    Ok(GenerateConfig {
        new_tokens: args.tokens.unwrap_or(by_default) as usize,
        sampling: args.sampling.resolve(&Companions::of(model))?,
        keep_states: args.chat || args.save_state.is_some(),
        ..GenerateConfig::default()
    })
}

fn open_model(args: &GenerateArgs) -> Result<StoredModel, Failure> {
    let model = StoredModel::open(&args.run, args.checkpoint)?;
    match model.config.head {
        HeadKind::AutoEncoder => Err(GenerateError::AutoEncoder.into()),
        HeadKind::Position => Ok(model),
    }
}

fn check_stops(args: &GenerateArgs, tokenizer: Option<&Tokenizer>) -> Result<(), Failure> {
    if args.stops.iter().any(String::is_empty) {
        return Err(Failure::Input("`--stop` is empty; it has to be some text".into()));
    }
    if tokenizer.is_none() && !args.stops.is_empty() {
        let why = "`--stop`: this model knows ids and no text; leave it out";
        return Err(Failure::Input(why.into()));
    }
    Ok(())
}

/// Ids that end a text: the one that the model was trained here to write, and those that the checkpoint that
/// it came from says.
fn ends(model: &StoredModel, tokenizer: Option<&Tokenizer>) -> Result<Vec<u32>, Failure> {
    let companions = Companions::of(model);
    let ours = tokenizer.filter(|tokenizer| tokenizer.vocab() == model.vocab).map(Tokenizer::end);
    let spelt = companions.special_tokens()?.remove("eos_token");
    let spelt = spelt.and_then(|token| tokenizer?.id(&token));
    let theirs = model.end_ids.iter().copied().chain(companions.end_ids()?);
    Ok(theirs.chain(ours).chain(spelt).collect())
}

/// The prompts of the command line; none is needed where a state goes on.
fn prompts(args: &GenerateArgs) -> Result<Vec<String>, Failure> {
    let mut prompts = args.prompts.clone();
    if let Some(path) = &args.prompt_file {
        let text = std::fs::read_to_string(path)
            .map_err(|e| Failure::Input(format!("can't read {}: {e}", path.display())))?;
        prompts.push(text);
    }
    if prompts.is_empty() && args.state.is_none() {
        let why = "there is no prompt; give --prompt, --prompt-file, --state or --chat";
        return Err(Failure::Input(why.into()));
    }
    if args.save_state.is_some() && prompts.len() > 1 {
        let why = format!("`--save-state` keeps one text; got {} prompts", prompts.len());
        return Err(Failure::Input(why));
    }
    Ok(prompts)
}

/// A model without a file has the ids of bytes if it has as many as there are.
fn tokenizer(model: &StoredModel) -> Result<Option<Tokenizer>, Failure> {
    match &model.tokenizer {
        Some(path) => {
            Tokenizer::open(path, "tokenizer").map(Some).map_err(|e| Failure::Input(e.to_string()))
        }
        None => Ok(Some(Tokenizer::bytes()).filter(|bytes| bytes.vocab() == model.vocab)),
    }
}

fn encode(tokenizer: Option<&Tokenizer>, text: &str, vocab: usize) -> Result<Vec<u32>, Failure> {
    let ids = match tokenizer {
        Some(tokenizer) => tokenizer
            .ids(text)
            .map_err(|e| Failure::Input(format!("`--prompt`: the tokenizer can't read it: {e}")))?,
        None => {
            let words = text.split(|c: char| c.is_whitespace() || c == ',');
            let id = |word: &str| {
                word.parse::<u32>().map_err(|_| {
                    let want = format!("this model knows the ids 0 to {}", vocab - 1);
                    Failure::Input(format!("`--prompt`: `{word}` is no id; {want}"))
                })
            };
            words.filter(|word| !word.is_empty()).map(id).collect::<Result<Vec<u32>, _>>()?
        }
    };
    match ids.is_empty() {
        true => Err(Failure::Input("`--prompt` is empty; it has to have a token at least".into())),
        false => Ok(ids),
    }
}

/// Where a device's part of the work comes from.
struct Generate<'a> {
    request: &'a Request<'a>,
    stop: &'a Interrupter,
}

/// Result of the command.
struct Done {
    texts: Vec<Text>,
    timing: Timing,
    path: String,
}

/// A text that was written.
struct Text {
    shown: String,
    ids: Vec<u32>,
    finish: Finish,
}

impl Job for Generate<'_> {
    type Output = Result<Done, Failure>;

    fn run<B: TrainBackend>(self, devices: &[B::Device]) -> Self::Output {
        self.write::<B::InnerBackend>(&devices[0])
    }
}

impl Generate<'_> {
    fn write<B: LinearAttentionBackend>(&self, device: &B::Device) -> Result<Done, Failure> {
        let request = self.request;
        let model = request.args.weights.of(request.model.load::<B>(device)?)?;
        let sequences = request.sequences(&model, device)?;
        let page = |_| Page::new(request.tokenizer.as_ref(), &request.args.stops);
        let mut pages: Vec<Page<'_>> = sequences.iter().map(page).collect();
        let streams = request.streams();
        let mut failed = None;
        let on_token = |Written { row, id, .. }: Written<'_>| {
            let page = &mut pages[row];
            if request.ends.contains(&id) {
                return Next::FinishRow;
            }
            let new = page.push(id);
            if streams && let Err(e) = output::write(&new) {
                failed = Some(e);
                return Next::FinishAll;
            }
            match page.has_stopped() {
                true => Next::FinishRow,
                false if self.stop.should_stop() => Next::FinishAll,
                false => Next::Continue,
            }
        };
        let generated = write_texts(&model, sequences, &request.config, device, on_token)?;
        if let (Some(path), [row]) = (&request.args.save_state, generated.rows.as_slice()) {
            row.sequence.save(path)?;
        }
        for page in pages.iter_mut() {
            let rest = page.finish();
            if streams && failed.is_none() {
                failed = output::write(&format!("{rest}\n")).err();
            }
        }
        written(failed.map_or(Ok(()), Err))?;
        let path = B::path(device).to_string();
        let Generated { rows, timing } = generated;
        let text = |(row, page): (linattn::generate::Row<B>, Page<'_>)| Text {
            ids: row.new_tokens().to_vec(),
            shown: page.text().to_string(),
            finish: row.finish,
        };
        Ok(Done { texts: rows.into_iter().zip(pages).map(text).collect(), timing, path })
    }
}

/// A reader that has seen enough, such as `head`, is no failure.
fn written(result: io::Result<()>) -> Result<(), Failure> {
    match result {
        Err(e) if !output::nobody_reads(&e) => {
            Err(Failure::Output(format!("can't write the text: {e}")))
        }
        _ => Ok(()),
    }
}
