//! S-NIAH, the single needle in a haystack: a value is told once in a long text and asked for at the
//! end.
//! ```text
//! prompt   A special magic number is hidden within the following text. Make sure to memorize it. I
//!          will quiz you about the number afterwards.
//!          {haystack, and in it: One of the special magic numbers for {key} is: {value}.} What is
//!          the special magic number for {key} mentioned in the provided text? The special magic
//!          number for {key} mentioned in the provided text is
//! answer   a space and the value; a uuid is asked for as `uuid`
//! key      adjective-noun; training and evaluation share no noun
//! value    a number of 1000000..=9999999, or a random uuid of version 4
//!
//! noise    copies of one line; the needle is a line of its own before one of them, each as likely
//! essays   words, white space collapsed; sentences end at `[.?!] `, and the needle comes after a
//!          share of them that is uniform over round(100 k / 39) percent, k = 0..40
//!          training     words of the training text from a random one on
//!          evaluation   the first words of the corpus, the same for every sample
//!
//! input    start prompt answer end end ...     length: start + prompt + answer, as many lines or
//! target   ...  answer                         words as fit; then padding, which is not scored
//! ```
//! Teacher forcing asks for each id of the answer at the position before it: all right is what
//! greedy decoding that begins with the answer is. The published score is of a generated text, see
//! [`Task::question`]; the published length leaves 128 tokens for it, where ours leaves the answer's.
//!
//! One needle a text: its value is the only number or uuid of its kind there, so that a model that
//! copies whatever looks like a value answers rightly without the key. A score says that a value was
//! kept, over so much text and beside the text itself; it does not say that it was found by its key. MQAR
//! asks that.
//!
//! Source: arXiv 2404.06654 and github.com/NVIDIA/RULER for the wording and for evaluation, but for
//! two things: its sentences are split by NLTK, so that needles lie elsewhere by a few sentences, and
//! it reaches a length in steps of lines or words. Training, and what it may not see, is ours.

use std::path::PathBuf;

use rand::Rng;
use rand::seq::IndexedRandom;
use serde::{Deserialize, Serialize};

use crate::corpus::{Prose, TextFile, Windows, encode, join};
use crate::corpus::{read_folder, read_texts};
use crate::rng::example_rng;
use crate::sets::{Splits, check_sets, require};
use crate::tokenizer::{Tokenizer, TokenizerConfig};
use crate::{
    Batch, Example, Question, SetInfo, Split, Statistic, Tally, Task, TaskError, Text, statistics,
};

mod held_out;
mod prompt;
#[cfg(test)]
mod tests;
mod words;

use held_out::HeldOut;
pub use prompt::Needle;
use prompt::{Hidden, NOISE};
use words::Words;

/// The single needle in a haystack, as TOML spells it.
///
/// ```toml
/// [task.s_niah]
/// track = "everything"
/// haystack = "data/PaulGrahamEssays"
/// text = ["data/PaulGrahamEssays", "data/tinyshakespeare.txt"]
/// train = [{ length = 1024, needles = ["number_in_noise", "uuid_in_essays"], examples = 100_000 }]
/// test = [{ needle = "uuid_in_essays", length = 2048, examples = 500 }]
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SNiahConfig {
    /// Tokens that training is scored on. Evaluation is scored on the answer alone.
    pub track: Track,
    /// Unit of text that is a token. Default `bytes`, where lengths are bytes.
    #[serde(default)]
    pub tokenizer: TokenizerConfig,
    /// A folder of essays, `.txt` and sorted by name, for evaluation. Only the first eight are used;
    /// training never sees these, wherever their text stands.
    #[serde(default)]
    pub haystack: Option<PathBuf>,
    /// A folder with `adjectivelist.txt` and `nounlist.txt`. Default none: a small list of our own.
    #[serde(default)]
    pub words: Option<PathBuf>,
    /// Files, and folders of `.txt` files, to train with, one after another with white space
    /// collapsed. Wherever 13 words in a row are the first eight essays', whatever their case and
    /// punctuation, these words are left out; a file named here that has little else is refused.
    #[serde(default)]
    pub text: Vec<PathBuf>,
    /// Sets to learn from.
    pub train: Vec<TrainSet>,
    /// Sets to choose settings by. Default none.
    #[serde(default)]
    pub validation: Vec<NeedleSet>,
    /// Sets to report.
    pub test: Vec<NeedleSet>,
}

/// Tokens that training is scored on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Track {
    /// The answer. A model may then learn to read nothing but needles.
    Answer,
    /// Every token, and the end after the answer; half of the examples are windows of plain text, so
    /// that a model's memory has to hold language too.
    Everything,
}

/// A set to learn from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainSet {
    /// Tokens of the longest sample: start, prompt and answer.
    pub length: usize,
    /// Samples are sized for a length uniform from this on. Default `length`.
    #[serde(default)]
    pub shortest: Option<usize>,
    /// Needles to hide; each entry is as likely.
    pub needles: Vec<Needle>,
    /// The share of examples that are windows of plain text. Default 0.5 on the track `everything`,
    /// else 0.
    #[serde(default)]
    pub text_share: Option<f64>,
    /// Examples in the set.
    pub examples: u64,
}

/// A set to evaluate with.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NeedleSet {
    /// The needle to hide.
    pub needle: Needle,
    /// Tokens of the longest sample: start, prompt and answer.
    pub length: usize,
    /// Whether the needle comes last, directly before the question: a check that a model can copy.
    /// Default no.
    #[serde(default)]
    pub adjacent: bool,
    /// Examples in the set.
    pub examples: u64,
}

/// Values that all examples of one set share.
#[derive(Debug, Clone, PartialEq)]
struct Shape {
    length: usize,
    shortest: usize,
    needles: Vec<Needle>,
    text_share: f64,
    adjacent: bool,
    everything: bool,
    examples: u64,
}

impl TrainSet {
    fn shape(&self, track: Track) -> Shape {
        let everything = track == Track::Everything;
        Shape {
            length: self.length,
            shortest: self.shortest.unwrap_or(self.length),
            needles: self.needles.clone(),
            text_share: self.text_share.unwrap_or(if everything { 0.5 } else { 0.0 }),
            adjacent: false,
            everything,
            examples: self.examples,
        }
    }
}

impl NeedleSet {
    fn shape(&self) -> Shape {
        Shape {
            length: self.length,
            shortest: self.length,
            needles: vec![self.needle],
            text_share: 0.0,
            adjacent: self.adjacent,
            everything: false,
            examples: self.examples,
        }
    }
}

impl Shape {
    fn info(&self) -> SetInfo {
        let kind = match self.needles[..] {
            _ if self.text_share == 1.0 => "text",
            [needle] if self.text_share == 0.0 => needle.name(),
            _ => "mixed",
        };
        let adjacent = if self.adjacent { "_adjacent" } else { "" };
        let name = format!("{kind}_{}{adjacent}", self.length);
        let answer = self.needles.iter().map(|needle| 1 + needle.value_length()).max();
        let scored = if self.everything { self.length } else { answer.unwrap_or(0) };
        SetInfo { name, length: self.length, examples: self.examples, scored }
    }

    fn in_essays(&self) -> bool {
        self.text_share < 1.0 && self.needles.iter().any(|needle| needle.in_essays())
    }

    fn needs_text(&self) -> bool {
        self.text_share > 0.0 || self.in_essays()
    }

    /// Checks that every set has to pass, whatever files there are.
    fn check(&self, at: &str, track: Track) -> Result<(), TaskError> {
        let needles = format!("{at}.needles");
        require(!self.needles.is_empty(), needles, "empty", "a list of one needle or more")?;
        let (share, key) = (self.text_share, format!("{at}.text_share"));
        require((0.0..=1.0).contains(&share), &key, share, "between 0 and 1")?;
        let scored = share == 0.0 || track == Track::Everything;
        require(scored, key, share, "0 on the track `answer`, as plain text has no answer")?;
        let (length, shortest) = (self.length, self.shortest);
        let want = format!("{length}, the set's length, at most");
        require(shortest <= length, format!("{at}.shortest"), shortest, want)?;
        require(self.examples >= 1, format!("{at}.examples"), self.examples, "1 or more")
    }

    /// That the shortest sample has room for its shell and a little haystack.
    fn check_room(&self, at: &str, sizes: &Sizes) -> Result<(), TaskError> {
        let least = self.needles.iter().map(|&needle| sizes.least(needle)).max().unwrap_or(1);
        let name = if self.shortest < self.length { "shortest" } else { "length" };
        let want = format!("{least} or more, to hold the longest key and a little haystack");
        require(self.shortest >= least, format!("{at}.{name}"), self.shortest, want)
    }
}

impl SNiahConfig {
    fn shapes(&self) -> [Vec<Shape>; 3] {
        let evaluation = |sets: &[NeedleSet]| sets.iter().map(NeedleSet::shape).collect();
        let train = self.train.iter().map(|set| set.shape(self.track)).collect();
        [train, evaluation(&self.validation), evaluation(&self.test)]
    }
}

/// Words of a haystack of essays at least; noise has a line.
const FEW_WORDS: &str = "a few of their words";

/// Least numbers of tokens that a sample takes.
#[derive(Debug)]
struct Sizes<'a> {
    tokenizer: &'a Tokenizer,
    /// The key with the most tokens.
    key: String,
}

impl<'a> Sizes<'a> {
    fn new(tokenizer: &'a Tokenizer, words: &Words) -> Self {
        let longest = |list: &mut dyn Iterator<Item = &String>| {
            list.max_by_key(|word| tokenizer.count(word)).cloned().unwrap_or_default()
        };
        let adjective = longest(&mut words.adjectives.iter());
        let key = format!("{adjective}-{}", longest(&mut words.nouns()));
        Self { tokenizer, key }
    }

    // A tokenizer from a file takes fewer tokens for some values than for others; none takes more
    // than a value has characters.
    fn least(&self, needle: Needle) -> usize {
        let (key, value) = (self.key.clone(), "0".repeat(needle.value_length()));
        let spare = value.len() - self.tokenizer.count(&value).min(value.len());
        let hidden = Hidden { needle, key, value, place: 0.0, first: 0 };
        let haystack = if needle.in_essays() { FEW_WORDS } else { NOISE };
        let line = self.tokenizer.count(haystack) + 1;
        let shell = hidden.prompt(&Prose::default(), 0) + &hidden.answer();
        1 + self.tokenizer.count(&shell) + line + 2 * spare
    }
}

/// The single needle in a haystack, checked and ready to draw from.
#[derive(Debug, Clone)]
pub struct SNiah {
    seed: u64,
    tokenizer: Tokenizer,
    words: Words,
    /// Haystacks of evaluation.
    essays: Essays,
    /// Haystacks of training, and the same text as ids.
    text: Option<(Prose, Windows)>,
    sets: Splits<Shape>,
}

impl SNiah {
    /// Reads the files, checks every value, then makes the task whose data follow from `seed`.
    /// # Errors
    /// [`TaskError`] names the first key that cannot be used.
    pub fn new(config: &SNiahConfig, seed: u64) -> Result<Self, TaskError> {
        let shapes = config.shapes();
        let lists = shapes.each_ref().map(Vec::as_slice);
        check_sets("s_niah", lists, |at, shape| shape.check(at, config.track))?;
        let tokenizer = Tokenizer::new(&config.tokenizer, "task.s_niah.tokenizer")?;
        let words = Words::new(config.words.as_deref())?;
        let sizes = Sizes::new(&tokenizer, &words);
        check_sets("s_niah", lists, |at, shape| shape.check_room(at, &sizes))?;
        let essays = Essays::new(config, &tokenizer, &shapes[1..])?;
        let text = training_text(config, &tokenizer, &shapes[0], &essays)?;
        let sets = Splits::new(lists, |shape| (shape.info(), shape.clone()));
        Ok(Self { seed, tokenizer, words, essays, text, sets })
    }
}

/// Essays that only evaluation reads.
const HELD_OUT: usize = 8;

const WHERE: &str = "the folder PaulGrahamEssays of \
                     github.com/gkamradt/LLMTest_NeedleInAHaystack is the published one";

/// The corpus of evaluation.
#[derive(Debug, Clone, Default)]
struct Essays {
    /// The first essays.
    prose: Prose,
    /// Texts that are not for training.
    held_out: HeldOut,
    /// Of the whole folder: files, bytes and words, and whether the files are called as published.
    files: usize,
    bytes: usize,
    words: usize,
    published: bool,
}

impl Essays {
    /// Reads the folder, if the config names one, and checks that it does for each evaluation set.
    fn new(
        config: &SNiahConfig,
        tokenizer: &Tokenizer,
        evaluation: &[Vec<Shape>],
    ) -> Result<Self, TaskError> {
        let Some(folder) = &config.haystack else {
            return check_no_essays(evaluation).map(|()| Self::default());
        };
        let key = "task.s_niah.haystack";
        let files = read_folder(key, folder).map_err(|error| match error {
            TaskError::File { key, path, why } => {
                TaskError::file(&key, &path, format!("{why}; {WHERE}"))
            }
            other => other,
        })?;
        let essays = Self::of(&files);
        let tokens = encode(tokenizer, &essays.prose.text, key, folder)?.tokens();
        let sets = evaluation.iter().flatten().filter(|shape| shape.in_essays());
        let longest = sets.map(|shape| shape.length).max().unwrap_or(0);
        if longest > tokens {
            let why = format!(
                "its first {HELD_OUT} essays have {tokens} tokens, a set has {longest}, and the \
                 essays after these may be trained with; shorten the set"
            );
            return Err(TaskError::file(key, folder, why));
        }
        Ok(essays)
    }

    fn of(files: &[TextFile]) -> Self {
        let first = &files[..files.len().min(HELD_OUT)];
        let named = |file: Option<&TextFile>, name: &str| {
            file.is_some_and(|file| file.path.file_name().is_some_and(|known| known == name))
        };
        let all = join(files);
        Self {
            prose: Prose::new(&join(first)),
            held_out: HeldOut::of(first),
            files: files.len(),
            bytes: all.len(),
            words: all.split_whitespace().count(),
            published: files.len() == 49
                && named(files.first(), "addiction.txt")
                && named(files.last(), "worked.txt"),
        }
    }

    /// The corpus, beside what is published of it.
    fn statistics(&self) -> Vec<Statistic> {
        let figures = [
            ("haystack files", self.files, 49.0),
            ("haystack bytes", self.bytes, 644_051.0),
            ("haystack words", self.words, 111_877.0),
        ];
        let figure = |(name, value, published)| Statistic {
            name: String::from(name),
            value: value as f64,
            expected: self.published.then_some(published),
        };
        figures.map(figure).into()
    }
}

fn check_no_essays(evaluation: &[Vec<Shape>]) -> Result<(), TaskError> {
    let needed = evaluation.iter().flatten().find(|shape| shape.in_essays());
    let name = needed.map_or("", |shape| shape.needles[0].name());
    let want = format!("a folder of .txt files for the sets of {name}; {WHERE}");
    require(needed.is_none(), "task.s_niah.haystack", "missing", want)
}

/// Text that training reads, if any of its sets does; text of the evaluation's essays is left out.
fn training_text(
    config: &SNiahConfig,
    tokenizer: &Tokenizer,
    train: &[Shape],
    essays: &Essays,
) -> Result<Option<(Prose, Windows)>, TaskError> {
    let key = "task.s_niah.text";
    let Some(longest) = train.iter().filter(|set| set.needs_text()).map(|set| set.length).max()
    else {
        return Ok(None);
    };
    let want = "a list of files and folders to train with, as a set has essays or plain text; \
                the folder that `haystack` names would do";
    require(!config.text.is_empty(), key, "empty", want)?;
    let prose = Prose::new(&join(&allowed(config, essays, key)?));
    let windows = encode(tokenizer, &prose.text, key, &config.text[0])?;
    if windows.tokens() <= longest {
        let tokens = windows.tokens();
        let why = format!("all text has {tokens} tokens, and more than {longest} are needed");
        return Err(TaskError::file(key, &config.text[0], why));
    }
    Ok(Some((prose, windows)))
}

/// The training files without what they have of the evaluation's essays.
fn allowed(config: &SNiahConfig, essays: &Essays, key: &str) -> Result<Vec<TextFile>, TaskError> {
    let mut files = vec![];
    for file in read_texts(key, &config.text)? {
        let (text, share) = essays.held_out.taken_out(&file.text);
        if share > 0.5 && config.text.contains(&file.path) {
            let why = format!(
                "most of it is text of the first {HELD_OUT} essays of `task.s_niah.haystack`, which \
                 only evaluation may read; leave it out"
            );
            return Err(TaskError::file(key, &file.path, why));
        }
        if !text.is_empty() {
            files.push(TextFile { text: text + "\n", ..file });
        }
    }
    if files.is_empty() {
        let why = format!(
            "it has no more than the first {HELD_OUT} essays of `task.s_niah.haystack`, which only \
             evaluation may read; add other text"
        );
        return Err(TaskError::file(key, &config.text[0], why));
    }
    Ok(files)
}

/// Source of an example.
#[derive(Debug)]
enum Sample {
    /// A window of the training text, by its first token.
    Window(usize),
    /// A needle in its haystack.
    Needle { prompt: String, hidden: Hidden },
}

impl SNiah {
    fn sample(&self, split: Split, set: usize, index: u64) -> Sample {
        let shape = self.sets.shape(split, set);
        let rng = &mut example_rng(*b"s_niah\0\0", self.seed, split, set, index);
        if rng.random_bool(shape.text_share) {
            return Sample::Window(self.training().1.draw(shape.length, rng));
        }
        let length = rng.random_range(shape.shortest..=shape.length);
        let hidden = self.hide(split, shape, rng);
        let prompt = hidden.fill(self.prose(split), &self.tokenizer, length);
        Sample::Needle { prompt, hidden }
    }

    // Where a haystack starts is drawn last, so that the splits differ in no other draw.
    fn hide(&self, split: Split, shape: &Shape, rng: &mut impl Rng) -> Hidden {
        let needle = *shape.needles.choose(rng).expect("`check` asked for a needle");
        let nouns = if split == Split::Train { &self.words.learnt } else { &self.words.held_out };
        let word = |list: &[String], rng: &mut _| {
            list.choose(rng).expect("`Words` has some of each").clone()
        };
        let key = format!("{}-{}", word(&self.words.adjectives, rng), word(nouns, rng));
        let value = draw_value(needle, rng);
        let place = rng.random::<f64>();
        let place = if shape.adjacent { 1.0 } else { place };
        let random_start = split == Split::Train && needle.in_essays();
        let first = if random_start { self.draw_start(shape.length, rng) } else { 0 };
        Hidden { needle, key, value, place, first }
    }

    /// A word of the training text that at least `length` tokens follow.
    fn draw_start(&self, length: usize, rng: &mut impl Rng) -> usize {
        let (prose, windows) = self.training();
        let bytes = windows.bytes(0..windows.tokens() - length);
        rng.random_range(0..prose.words_from(bytes).max(1))
    }

    fn prose(&self, split: Split) -> &Prose {
        match (&self.text, split) {
            (Some((prose, _)), Split::Train) => prose,
            _ => &self.essays.prose,
        }
    }

    fn training(&self) -> &(Prose, Windows) {
        self.text.as_ref().expect("`training_text` read what the sets need")
    }

    /// The ids of a sample, and how many of them are the prompt's. Both are encoded in one go, as
    /// text is in training; an id that takes in the end of the prompt belongs to the answer.
    fn encode(&self, prompt: &str, answer: &str) -> (Vec<u32>, usize) {
        let text = self.tokenizer.known(&[prompt, answer].concat());
        let asked = 1 + text.ids_within(prompt.len());
        let mut ids = vec![self.tokenizer.start()];
        ids.extend(text.ids);
        (ids, asked)
    }

    fn lay_out(&self, shape: &Shape, prompt: &str, hidden: &Hidden) -> Example {
        let (mut input, asked) = self.encode(prompt, &hidden.answer());
        let end = self.tokenizer.end();
        let mut target: Vec<_> = input[1..].iter().copied().map(Some).collect();
        if shape.everything {
            target.push(Some(end));
        } else {
            target[..asked - 1].fill(None);
        }
        input.resize(shape.length, end);
        target.resize(shape.length, None);
        Example { input, target }
    }

    /// The prompt that a scored row reads up to its first answer, as text.
    fn read(&self, batch: &Batch, first: u32) -> String {
        let (row, t) = (first as usize / batch.length, first as usize % batch.length);
        self.tokenizer.decode(&batch.input[row * batch.length..][..=t])
    }
}

fn draw_value(needle: Needle, rng: &mut impl Rng) -> String {
    if needle != Needle::UuidInEssays {
        return rng.random_range(1_000_000..=9_999_999).to_string();
    }
    let mut bits: u128 = rng.random();
    bits = bits & !(0xf << 76) | 0x4 << 76; // the version
    bits = bits & !(0b11 << 62) | 0b10 << 62; // the variant
    let hex = format!("{bits:032x}");
    [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-")
}

/// Whether a generated text answers, as published: control characters are line breaks, white space
/// around it and case don't count, and the value may stand anywhere, also within longer digits.
fn answers(written: &str, value: &str) -> bool {
    let line = |c: char| if c < ' ' { '\n' } else { c };
    let written: String = written.trim().chars().map(line).collect();
    written.trim().to_lowercase().contains(&value.to_lowercase())
}

/// Parts of the haystack that have a score of their own.
const BUCKETS: usize = 10;

fn bucket(depth: f64) -> usize {
    ((depth * BUCKETS as f64) as usize).min(BUCKETS - 1)
}

/// `00_10` for the first tenth, and so on.
fn bucket_name(bucket: usize) -> String {
    let percent = 100 / BUCKETS;
    format!("{:02}_{}", bucket * percent, (bucket + 1) * percent)
}

impl Task for SNiah {
    fn vocab(&self) -> usize {
        self.tokenizer.vocab()
    }

    fn sets(&self, split: Split) -> &[SetInfo] {
        self.sets.infos(split)
    }

    fn example(&self, split: Split, set: usize, index: u64) -> Example {
        let shape = self.sets.shape(split, set);
        match self.sample(split, set, index) {
            Sample::Window(start) => {
                self.training().1.example(start, shape.length, self.tokenizer.end())
            }
            Sample::Needle { prompt, hidden } => self.lay_out(shape, &prompt, &hidden),
        }
    }

    /// Besides [`Tally::add_sequences`], `exact_depth_00_10` to `exact_depth_90_100`: `exact` among
    /// needles with that share, in percent, of the haystack's bytes before them.
    fn tally(&self, batch: &Batch, predicted: &[u32], tally: &mut Tally) {
        tally.add_sequences(batch, predicted);
        for row in batch.scored_rows() {
            // A row that is scored on everything has read no needle at its first target.
            if let Some(depth) = prompt::depth(&self.read(batch, batch.scored[row.start])) {
                let exact = predicted[row.clone()] == batch.target[row];
                let name = format!("exact_depth_{}", bucket_name(bucket(depth)));
                tally.add(name, f64::from(exact), 1);
            }
        }
    }

    fn score_name(&self) -> &'static str {
        "exact"
    }

    fn token(&self, id: u32) -> String {
        self.tokenizer.token(id)
    }

    /// A window of plain text has an empty answer.
    fn text(&self, split: Split, set: usize, index: u64) -> Option<Text> {
        let length = self.sets.shape(split, set).length;
        Some(match self.sample(split, set, index) {
            Sample::Window(start) => {
                let prompt = self.tokenizer.decode(self.training().1.ids(start, length));
                Text { prompt, answer: String::new() }
            }
            Sample::Needle { prompt, hidden } => Text { prompt, answer: hidden.answer() },
        })
    }

    /// The prompt, and 128 tokens as published; a window of plain text asks nothing.
    fn question(&self, split: Split, set: usize, index: u64) -> Option<Question> {
        let Sample::Needle { prompt, hidden } = self.sample(split, set, index) else { return None };
        let (mut ids, asked) = self.encode(&prompt, &hidden.answer());
        ids.truncate(asked);
        Some(Question { prompt: ids, new_tokens: 128 })
    }

    /// Counts `substring_match`; what a model writes after the end id is not read.
    fn tally_answer(
        &self,
        split: Split,
        set: usize,
        index: u64,
        answer: &[u32],
        tally: &mut Tally,
    ) {
        if let Sample::Needle { hidden, .. } = self.sample(split, set, index) {
            let written = answer.split(|&id| id == self.tokenizer.end()).next().unwrap_or(&[]);
            let right = answers(&self.tokenizer.decode(written), &hidden.value);
            tally.add("substring_match", f64::from(right), 1);
        }
    }

    fn statistics(&self, split: Split, set: usize, count: u64) -> Vec<Statistic> {
        let shape = self.sets.shape(split, set);
        let (mut sizes, mut depths, mut windows) = (Vec::new(), [0u64; BUCKETS], 0u64);
        for index in 0..count {
            match self.sample(split, set, index) {
                Sample::Window(_) => windows += 1,
                Sample::Needle { prompt, .. } => {
                    sizes.push(prompt.len());
                    depths[bucket(prompt::depth(&prompt).expect("it has a needle"))] += 1;
                }
            }
        }
        let mut figures = statistics::common((0..count).map(|i| self.example(split, set, i)));
        let share = windows as f64 / count.max(1) as f64;
        figures.push(Statistic::expected("share of text windows", share, shape.text_share));
        figures.extend(size_statistics(&sizes));
        for (i, needles) in depths.into_iter().enumerate() {
            let share = needles as f64 / sizes.len().max(1) as f64;
            let name = format!("share of needles at depth {}", bucket_name(i));
            figures.push(Statistic::new(name, share));
        }
        figures.extend(self.essays.statistics());
        figures
    }
}

fn size_statistics(sizes: &[usize]) -> Vec<Statistic> {
    let mean = sizes.iter().sum::<usize>() as f64 / sizes.len().max(1) as f64;
    let edge = |size: Option<&usize>| size.copied().unwrap_or(0) as f64;
    vec![
        Statistic::new("prompt bytes, mean", mean),
        Statistic::new("prompt bytes, least", edge(sizes.iter().min())),
        Statistic::new("prompt bytes, most", edge(sizes.iter().max())),
    ]
}
