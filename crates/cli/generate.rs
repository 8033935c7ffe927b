//! `generate`: what a trained model writes after a prompt, and its state in a file.

use crate::device::{self, Choice, Job};
use crate::eval::checkpoint;
use crate::signals::{self, Asked};
use crate::train::guarded;
use crate::{BAD_INPUT, FAILED, INTERRUPTED, fail, output};
use linattn::generate::{
    Finish, GenerateConfig, GenerateError, Generated, Next, SamplingConfig, Sequence, Timing,
    Written, generate as write_texts,
};
use linattn::nn::{HeadKind, StateError, state_file};
use linattn::ops::LinearAttentionBackend;
use linattn_tasks::{TextStream, Tokenizer};
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
    /// The most tokens to write for each prompt
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u64).range(1..=1 << 32))]
    tokens: u64,
    /// Divisor of the logits; 0 always takes the likeliest token
    #[arg(long, default_value_t = 1.0)]
    temperature: f64,
    /// Only so many of the likeliest tokens can come next
    #[arg(long)]
    top_k: Option<usize>,
    /// Only the fewest likeliest tokens whose probabilities add up to this can come next
    #[arg(long, default_value_t = 1.0)]
    top_p: f64,
    /// Divides the logits of tokens that are there already
    #[arg(long, default_value_t = 1.0)]
    repetition_penalty: f64,
    /// Ends a text before this; can be given several times
    #[arg(long = "stop", value_name = "TEXT")]
    stops: Vec<String>,
    /// Where the random numbers start from
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Puts text and state into this file in the end
    #[arg(long, value_name = "FILE")]
    save_state: Option<PathBuf>,
    /// Goes on from a file of `--save-state`; prompts come after its text
    #[arg(long, value_name = "FILE")]
    state: Option<PathBuf>,
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
    let request = match Request::new(&args) {
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
    config: GenerateConfig,
}

/// Beginning of a text.
struct Prompt {
    text: String,
    ids: Vec<u32>,
}

impl<'a> Request<'a> {
    fn new(args: &'a GenerateArgs) -> Result<Self, Failure> {
        let config = GenerateConfig {
            new_tokens: args.tokens as usize,
            sampling: SamplingConfig {
                temperature: args.temperature,
                top_k: args.top_k,
                top_p: args.top_p,
                repetition_penalty: args.repetition_penalty,
                seed: args.seed,
            },
            keep_states: args.save_state.is_some(),
            ..GenerateConfig::default()
        };
        config.sampling.check().map_err(|e| Failure::Input(e.to_string()))?;
        let texts = prompts(args)?;
        if let Some(path) = &args.save_state {
            // Before the text is written, and not after.
            state_file(path).map_err(|e| Failure::Input(e.to_string()))?;
        }
        let model = StoredModel::open(&args.run, args.checkpoint)?;
        if model.config.head == HeadKind::AutoEncoder {
            return Err(GenerateError::AutoEncoder.into());
        }
        let tokenizer = tokenizer(&model)?;
        if args.stops.iter().any(String::is_empty) {
            return Err(Failure::Input("`--stop` is empty; it has to be some text".into()));
        }
        if tokenizer.is_none() && !args.stops.is_empty() {
            let why = "`--stop`: this model knows ids and no text; leave it out";
            return Err(Failure::Input(why.into()));
        }
        let prompts = texts.into_iter().map(|text| {
            let ids = encode(tokenizer.as_ref(), &text, model.vocab)?;
            Ok(Prompt { text, ids })
        });
        let prompts = prompts.collect::<Result<Vec<_>, Failure>>()?;
        Ok(Self { args, model, tokenizer, prompts, config })
    }

    /// The id that ends a text, where the model was trained here to write one.
    fn end(&self) -> Option<u32> {
        let ours = |tokenizer: &&Tokenizer| tokenizer.vocab() == self.model.vocab;
        self.tokenizer.as_ref().filter(ours).map(Tokenizer::end)
    }

    /// The state of `--state` with each prompt after it, or each prompt alone.
    fn sequences<B: LinearAttentionBackend>(
        &self,
        model: &linattn::nn::LanguageModel<B>,
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
        let timing = &done.timing;
        let speed = |rate: Option<f64>| rate.map_or("-".to_string(), |rate| format!("{rate:.1}"));
        output::note(&format!(
            "prompt {} tokens, {} tokens/s; decoding {} tokens/s; state {} bytes a text; \
             {choice}, {}",
            timing.prompt_tokens,
            speed(rate(timing.prompt_tokens, timing.prompt_seconds)),
            speed(rate(timing.step_tokens, timing.step_seconds)),
            timing.state_bytes,
            done.path,
        ));
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

fn rate(tokens: usize, seconds: f64) -> Option<f64> {
    (tokens > 0 && seconds > 0.0).then(|| tokens as f64 / seconds)
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
        let why = "there is no prompt; give --prompt, --prompt-file or --state";
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
        let model = request.model.load::<B>(device)?;
        let sequences = request.sequences(&model, device)?;
        let mut pages: Vec<Page<'_>> = sequences.iter().map(|_| Page::new(request)).collect();
        let (end, streams) = (request.end(), request.streams());
        let mut failed = None;
        let on_token = |Written { row, id, .. }: Written<'_>| {
            let page = &mut pages[row];
            if Some(id) == end {
                return Next::FinishRow;
            }
            let new = page.push(id);
            if streams && let Err(e) = output::write(&new) {
                failed = Some(e);
                return Next::FinishAll;
            }
            match page.stopped {
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
            shown: page.text,
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

/// One text on its way from ids to what is shown.
struct Page<'a> {
    /// `None` for ids.
    stream: Option<TextStream<'a>>,
    stops: &'a [String],
    /// Text that may be shown, and behind it a possible beginning of a stop.
    text: String,
    shown: usize,
    stopped: bool,
}

impl<'a> Page<'a> {
    fn new(request: &'a Request<'_>) -> Self {
        Self {
            stream: request.tokenizer.as_ref().map(Tokenizer::stream),
            stops: &request.args.stops,
            text: String::new(),
            shown: 0,
            stopped: false,
        }
    }

    /// Adds a token; gives what can be shown now.
    fn push(&mut self, id: u32) -> String {
        let new = match &mut self.stream {
            Some(stream) => stream.push(id),
            None if self.text.is_empty() => id.to_string(),
            None => format!(" {id}"),
        };
        self.add(&new, false)
    }

    /// Gives what is left to show in the end.
    fn finish(&mut self) -> String {
        let rest = self.stream.take().map(TextStream::finish).unwrap_or_default();
        self.add(&rest, true)
    }

    fn add(&mut self, new: &str, last: bool) -> String {
        if self.stopped {
            return String::new();
        }
        self.text.push_str(new);
        let fresh = &self.text[self.shown..];
        let cut = self.stops.iter().filter_map(|stop| fresh.find(stop.as_str())).min();
        let show = match cut {
            Some(at) => at,
            None if last => fresh.len(),
            None => fresh.len() - begun(fresh, self.stops),
        };
        let piece = fresh[..show].to_string();
        self.shown += show;
        if cut.is_some() {
            self.stopped = true;
            self.text.truncate(self.shown);
        }
        piece
    }
}

/// How much of the end of a text may be the beginning of a stop.
fn begun(text: &str, stops: &[String]) -> usize {
    let ends = |stop: &String| {
        let longest = (stop.len() - 1).min(text.len());
        let begins = |length: &usize| {
            let from = text.len() - length;
            text.is_char_boundary(from) && stop.starts_with(&text[from..])
        };
        (1..=longest).rev().find(begins)
    };
    stops.iter().filter_map(ends).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The text shown after each piece, and in the end.
    fn shown(stops: &[&str], pieces: &[&str]) -> (Vec<String>, bool) {
        let stops: Vec<String> = stops.iter().map(|stop| stop.to_string()).collect();
        let mut page =
            Page { stream: None, stops: &stops, text: String::new(), shown: 0, stopped: false };
        let mut shown: Vec<String> = pieces.iter().map(|piece| page.add(piece, false)).collect();
        shown.push(page.add("", true));
        assert_eq!(shown.concat(), page.text);
        (shown, page.stopped)
    }

    #[test]
    fn a_stop_cuts_the_text_before_it_and_nothing_of_it_is_shown() {
        let (text, stopped) = shown(&["\n\n"], &["a\n", "b\n", "\nc", "d"]);
        assert_eq!((text.concat().as_str(), stopped), ("a\nb", true));
        assert_eq!(text[0], "a", "the line end may be half of a stop");
        let (text, stopped) = shown(&["END", "EN."], &["xE", "N", "Dy"]);
        assert_eq!((text.concat().as_str(), stopped), ("x", true));
        let (text, _) = shown(&["yyz", "b"], &["ayyb", "yyz"]);
        assert_eq!(text.concat(), "ayy", "the first of several");
    }

    #[test]
    fn what_only_looked_like_a_stop_is_shown_in_the_end() {
        let (text, stopped) = shown(&["END"], &["E", "N", "E", "N"]);
        assert_eq!((text.concat().as_str(), stopped), ("ENEN", false));
        assert_eq!(text, ["", "", "EN", "", "EN"]);
        let (text, _) = shown(&["é!"], &["é", "é", "é"]);
        assert_eq!(text, ["", "é", "é", "é"]);
    }
}
