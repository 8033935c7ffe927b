use std::collections::HashSet;
use std::fs;
use std::io::Write;
use std::path::Path;

use sha2::{Digest, Sha256};
use tempfile::TempDir;

use super::prompt::{depth, largest};
use super::*;
use crate::TaskConfig;
use crate::corpus::collapse;
use crate::tokenizer::tests::write_small;

const EVERY: [Needle; 3] = [Needle::NumberInNoise, Needle::NumberInEssays, Needle::UuidInEssays];

/// Ten short essays of 16 sentences and one other text, in a folder that goes when it is dropped.
fn folder() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("essays")).unwrap();
    for essay in 0..10 {
        let sentence = |i| format!("Essay {essay} says in sentence {i} what it  means.\n");
        let text: String = (0..16).map(sentence).collect();
        fs::write(folder.path().join(format!("essays/{essay}.txt")), text).unwrap();
    }
    let sentence = |i| format!("Is line {i} of another text? ");
    fs::write(folder.path().join("other.txt"), (0..100).map(sentence).collect::<String>()).unwrap();
    folder
}

fn config(folder: &Path, track: Track) -> SNiahConfig {
    let needles = |length| {
        let set = |needle| NeedleSet { needle, length, adjacent: false, examples: 100 };
        EVERY.map(set).to_vec()
    };
    let train = |length| TrainSet {
        length,
        shortest: None,
        needles: EVERY.into(),
        text_share: None,
        examples: 1_000,
    };
    SNiahConfig {
        track,
        tokenizer: TokenizerConfig::Bytes,
        haystack: Some(folder.join("essays")),
        words: None,
        text: vec![folder.join("essays"), folder.join("other.txt")],
        train: vec![train(1024)],
        validation: needles(700),
        test: needles(1024),
    }
}

fn task(track: Track) -> SNiah {
    SNiah::new(&config(folder().path(), track), 0).unwrap()
}

fn noise_alone() -> SNiahConfig {
    let set =
        NeedleSet { needle: Needle::NumberInNoise, length: 1024, adjacent: false, examples: 9 };
    let train = TrainSet {
        length: 1024,
        shortest: None,
        needles: vec![Needle::NumberInNoise],
        text_share: None,
        examples: 9,
    };
    SNiahConfig {
        track: Track::Answer,
        tokenizer: TokenizerConfig::Bytes,
        haystack: None,
        words: None,
        text: Vec::new(),
        train: vec![train],
        validation: Vec::new(),
        test: vec![set],
    }
}

/// A needle sample's prompt and what is hidden in it; `None` for a window of text.
fn needle(task: &SNiah, split: Split, set: usize, index: u64) -> Option<(String, Hidden)> {
    match task.sample(split, set, index) {
        Sample::Needle { prompt, hidden } => Some((prompt, hidden)),
        Sample::Window(_) => None,
    }
}

fn needles(task: &SNiah, split: Split, count: u64) -> Vec<(String, Hidden)> {
    (0..count).filter_map(|index| needle(task, split, 0, index)).collect()
}

fn hidden(needle: Needle, place: f64) -> Hidden {
    Hidden { needle, key: "odd-lamp".into(), value: "1234567".into(), place, first: 0 }
}

fn context(prompt: &str) -> &str {
    let text = prompt.split_once('\n').unwrap().1;
    text.rsplit_once('\n').unwrap().0
}

/// That `count` of `total` trials is what probability `p` gives, within 4 standard deviations.
#[track_caller]
fn assert_share(what: &str, count: usize, total: usize, p: f64) {
    let share = count as f64 / total as f64;
    let sd = (p * (1.0 - p) / total as f64).sqrt();
    assert!((share - p).abs() <= 4.0 * sd, "{what}: {share:.4}, expected {p:.4} +- {sd:.4}");
}

// --- wording

#[test]
fn noise_reads_as_published() {
    let line = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back \
                again.";
    let want = format!(
        "A special magic number is hidden within the following text. Make sure to memorize it. I \
         will quiz you about the number afterwards.\n{line}\nOne of the special magic numbers for \
         odd-lamp is: 1234567.\n{line}\nWhat is the special magic number for odd-lamp mentioned in \
         the provided text? The special magic number for odd-lamp mentioned in the provided text is"
    );
    assert_eq!(hidden(Needle::NumberInNoise, 0.5).prompt(&Prose::default(), 2), want);
    assert_eq!(line.len(), 89);
}

#[test]
fn a_uuid_is_told_in_the_plural_and_asked_for_in_the_singular() {
    let prompt = hidden(Needle::UuidInEssays, 0.0).prompt(&Prose::new("One. Two."), 2);
    let want = "A special magic uuid is hidden within the following text. Make sure to memorize it. \
                I will quiz you about the uuid afterwards.\n One of the special magic uuids for \
                odd-lamp is: 1234567. One. Two.\nWhat is the special magic uuid for odd-lamp \
                mentioned in the provided text? The special magic uuid for odd-lamp mentioned in \
                the provided text is";
    assert_eq!(prompt, want);
}

#[test]
fn the_answer_is_a_space_and_the_value_after_a_prompt_that_ends_in_is() {
    let task = task(Track::Answer);
    for set in 0..3 {
        let (prompt, hidden) = needle(&task, Split::Test, set, 0).unwrap();
        let text = task.text(Split::Test, set, 0).unwrap();
        assert!(prompt.ends_with(" in the provided text is"));
        assert_eq!((text.prompt, text.answer), (prompt, format!(" {}", hidden.value)));
    }
}

// --- haystacks and depth

#[test]
fn essays_are_cut_between_sentences_and_joined_by_spaces() {
    let prose = Prose::new("One  is.\nTwo?  Three! Four v5.2 ends");
    assert_eq!(prose.words(), 7);
    let cut = |depth| prose.cut(0, 7, depth);
    assert_eq!(cut(0), ("", "One is. Two? Three! Four v5.2 ends"));
    assert_eq!(cut(24), cut(0));
    assert_eq!(cut(25), ("One is.", "Two? Three! Four v5.2 ends"));
    assert_eq!(cut(99), ("One is. Two? Three!", "Four v5.2 ends"));
    assert_eq!(cut(100), ("One is. Two? Three! Four v5.2 ends", ""));
    assert_eq!(prose.cut(1, 3, 34), ("is.", "Two? Three!"));
    let context_at = |place| {
        let prompt = hidden(Needle::NumberInEssays, place).prompt(&prose, 2);
        context(&prompt).to_string()
    };
    let needle = "One of the special magic numbers for odd-lamp is: 1234567.";
    assert_eq!(context_at(0.0), format!(" {needle} One is."));
    assert_eq!(context_at(1.0), format!("One is. {needle} "));
}

#[test]
fn depths_in_essays_are_forty_even_steps() {
    let prose = Prose::new(&"Yes. ".repeat(100));
    let sentences = |k: usize| {
        let place = (k as f64 + 0.5) / 40.0;
        let prompt = hidden(Needle::NumberInEssays, place).prompt(&prose, 100);
        context(&prompt).split("One of").next().unwrap().matches("Yes.").count()
    };
    let depths: Vec<_> = (0..40).map(sentences).collect();
    assert_eq!(depths[..8], [0, 3, 5, 8, 10, 13, 15, 18]);
    assert_eq!(depths[36..], [92, 95, 97, 100]);
    assert_eq!(depths.iter().collect::<HashSet<_>>().len(), 40);
}

#[test]
fn a_needle_in_noise_comes_before_each_line_equally_often_and_never_last() {
    let task = SNiah::new(&noise_alone(), 0).unwrap();
    let (mut counts, total) = ([0; 8], 4_000);
    for (prompt, _) in needles(&task, Split::Test, total) {
        let lines: Vec<_> = context(&prompt).lines().collect();
        assert_eq!(lines.iter().filter(|line| **line == NOISE).count(), lines.len() - 1);
        // A long key may cost a line; samples of one size are counted.
        if lines.len() == 8 {
            counts[lines.iter().position(|line| *line != NOISE).unwrap()] += 1;
        }
    }
    let seen: usize = counts.iter().sum();
    assert!(seen > 1_000, "{counts:?}");
    for (line, &count) in counts.iter().enumerate() {
        assert_share(&format!("line {line}"), count, seen, if line < 7 { 1.0 / 7.0 } else { 0.0 });
    }
}

#[test]
fn evaluation_hides_needles_in_the_first_words_of_the_corpus() {
    let folder = folder();
    let task = SNiah::new(&config(folder.path(), Track::Answer), 0).unwrap();
    let essays = read_folder("x", &folder.path().join("essays")).unwrap();
    let corpus = collapse(&join(&essays));
    for (set, index) in (0..60).map(|i| (1 + i % 2, i as u64)) {
        let (prompt, hidden) = needle(&task, Split::Test, set, index).unwrap();
        let sentence = format!(
            "One of the special magic {}s for {} is: {}.",
            if set == 2 { "uuid" } else { "number" },
            hidden.key,
            hidden.value
        );
        let (before, after) = context(&prompt).split_once(&sentence).unwrap();
        let haystack = collapse(&[before, after].concat());
        assert!(corpus.starts_with(&haystack), "{haystack}");
    }
}

#[test]
fn training_hides_needles_at_random_places_of_the_training_text() {
    let task = task(Track::Answer);
    let text = &task.training().0.text;
    let mut starts = HashSet::new();
    for (prompt, hidden) in needles(&task, Split::Train, 300) {
        if hidden.needle.in_essays() {
            let (before, after) = context(&prompt).split_once("One of the special").unwrap();
            let after = after.split_once(&format!("{}.", hidden.value)).unwrap().1;
            assert!(text.contains(before.trim()) && text.contains(after.trim()));
            starts.insert(hidden.first);
        }
    }
    assert!(starts.len() > 100, "{} places", starts.len());
}

// --- length

#[test]
fn a_sample_holds_as_many_lines_or_words_as_fit() {
    let folder = folder();
    for length in [520, 777, 1024] {
        let mut config = config(folder.path(), Track::Answer);
        config.test.iter_mut().for_each(|set| set.length = length);
        let task = SNiah::new(&config, 0).unwrap();
        for (set, index) in (0..90).map(|i| (i % 3, i as u64)) {
            let (prompt, hidden) = needle(&task, Split::Test, set, index).unwrap();
            let used = 1 + prompt.len() + hidden.answer().len();
            let unit = if set == 0 { NOISE.len() + 1 } else { "sentence ".len() + 1 };
            assert!(used <= length && used + unit > length, "{used} of {length}, set {set}");
            let example = task.example(Split::Test, set, index);
            let last = hidden.value.bytes().last().map(u32::from);
            assert_eq!((example.input.len(), Some(example.input[used - 1])), (length, last));
            assert!(example.input[used..].iter().all(|&id| id == 257));
        }
    }
}

#[test]
fn a_set_with_a_shortest_length_has_all_lengths_from_it_on() {
    let mut config = config(folder().path(), Track::Answer);
    config.train[0].needles = vec![Needle::NumberInEssays];
    config.train[0].shortest = Some(520);
    // The folder is gone by now, so it is made again.
    let folder = folder();
    config.haystack = Some(folder.path().join("essays"));
    config.text = vec![folder.path().join("other.txt")];
    let task = SNiah::new(&config, 0).unwrap();
    let used = |(prompt, hidden): (String, Hidden)| 1 + prompt.len() + hidden.answer().len();
    let sizes: Vec<_> = needles(&task, Split::Train, 2_000).into_iter().map(used).collect();
    assert!(sizes.iter().all(|size| (500..=1024).contains(size)));
    let short = sizes.iter().filter(|size| **size < 770).count();
    assert_share("below the middle", short, sizes.len(), 0.5);
}

#[test]
fn the_search_finds_the_largest_size_from_any_guess() {
    for (limit, guess) in (0..40).flat_map(|limit| (0..45).map(move |guess| (limit, guess))) {
        assert_eq!(largest(guess, 35, |size| size <= limit), limit.min(35), "{limit} {guess}");
    }
    assert_eq!(largest(3, 0, |_| true), 0);
}

// --- keys and values

#[test]
fn values_are_seven_digits_or_uuids_of_version_4() {
    let rng = &mut example_rng(*b"s_niah\0\0", 0, Split::Test, 0, 0);
    let mut variants = HashSet::new();
    for _ in 0..2_000 {
        let number: u32 = draw_value(Needle::NumberInEssays, rng).parse().unwrap();
        assert!((1_000_000..=9_999_999).contains(&number));
        let uuid = draw_value(Needle::UuidInEssays, rng);
        let parts: Vec<_> = uuid.split('-').collect();
        assert_eq!(parts.iter().map(|part| part.len()).collect::<Vec<_>>(), [8, 4, 4, 4, 12]);
        assert!(uuid.chars().all(|c| c == '-' || c.is_ascii_digit() || ('a'..='f').contains(&c)));
        assert!(parts[2].starts_with('4'));
        variants.insert(parts[3].chars().next().unwrap());
    }
    assert_eq!(variants, HashSet::from(['8', '9', 'a', 'b']));
}

#[test]
fn training_and_evaluation_share_no_noun() {
    let task = task(Track::Answer);
    let nouns = |split| {
        let noun =
            |(_, hidden): (String, Hidden)| hidden.key.split_once('-').unwrap().1.to_string();
        needles(&task, split, 3_000).into_iter().map(noun).collect::<HashSet<_>>()
    };
    let (learnt, asked) = (nouns(Split::Train), nouns(Split::Test));
    assert!(learnt.is_disjoint(&asked) && nouns(Split::Validation).is_disjoint(&learnt));
    assert_eq!(learnt.len(), task.words.learnt.len());
    assert_eq!(asked.len(), task.words.held_out.len());
}

#[test]
fn the_built_in_words_are_different_and_split_nine_to_one() {
    let words = Words::new(None).unwrap();
    assert!(words.adjectives.len() >= 60 && words.nouns().count() >= 120);
    assert_eq!(words.nouns().collect::<HashSet<_>>().len(), words.nouns().count());
    assert_eq!(words.held_out.len(), words.nouns().count() / 10);
    let plain = |word: &String| word.bytes().all(|byte| byte.is_ascii_lowercase());
    assert!(words.nouns().chain(&words.adjectives).all(plain));
}

#[test]
fn word_lists_replace_the_built_in_words() {
    let folder = folder();
    let nouns: String = (0..20).map(|i| format!("thing{i:02} \n\n")).collect();
    fs::write(folder.path().join("nounlist.txt"), nouns).unwrap();
    fs::write(folder.path().join("adjectivelist.txt"), "big\nad hoc\nbig\n").unwrap();
    let words = Words::new(Some(folder.path())).unwrap();
    assert_eq!(words.adjectives, ["ad hoc", "big"]);
    assert_eq!(words.held_out, ["thing09", "thing19"]);
    let config = SNiahConfig { words: Some(folder.path().into()), ..noise_alone() };
    let task = SNiah::new(&config, 0).unwrap();
    for (_, hidden) in needles(&task, Split::Test, 20) {
        let (adjective, noun) = hidden.key.split_once('-').unwrap();
        assert!(["ad hoc", "big"].contains(&adjective) && ["thing09", "thing19"].contains(&noun));
    }
}

#[test]
fn splits_draw_values_from_streams_of_their_own() {
    let task = task(Track::Answer);
    let values = |split| {
        let drawn = needles(&task, split, 300).into_iter();
        drawn.map(|(_, hidden)| hidden.value).collect::<HashSet<_>>()
    };
    let (train, test) = (values(Split::Train), values(Split::Test));
    assert!(train.is_disjoint(&test) && values(Split::Validation).is_disjoint(&test));
}

// --- leakage

#[test]
fn the_first_eight_essays_are_never_trained_with() {
    let folder = folder();
    // The same text under other names: one essay, and all of them in one file.
    let essay = fs::read_to_string(folder.path().join("essays/3.txt")).unwrap();
    fs::write(folder.path().join("essays/copy.txt"), essay.replace("  ", " ")).unwrap();
    let all = join(&read_folder("x", &folder.path().join("essays")).unwrap());
    fs::write(folder.path().join("essays/more.txt"), format!("Look: {all}")).unwrap();
    // And the last third of one between other words, in capitals.
    let part = &essay[essay.len() * 2 / 3..].to_uppercase();
    let other = fs::read_to_string(folder.path().join("other.txt")).unwrap();
    fs::write(folder.path().join("other.txt"), format!("{other}{part}{other}")).unwrap();
    let task = SNiah::new(&config(folder.path(), Track::Everything), 0).unwrap();
    let text = &task.training().0.text;
    assert!(!(0..8).any(|essay| text.contains(&format!("Essay {essay} "))));
    assert!(!text.contains("ESSAY 3") && text.matches("line 99 of").count() == 2);
    assert!(text.contains("Essay 8 ") && text.contains("Essay 9 ") && text.contains("line 99 of"));
    assert!(!task.essays.prose.text.contains("Essay 8 "));
}

#[test]
fn an_essay_of_evaluation_that_training_names_is_refused() {
    let folder = folder();
    let mut config = config(folder.path(), Track::Answer);
    config.text.push(folder.path().join("essays/7.txt"));
    let error = SNiah::new(&config, 0).unwrap_err().to_string();
    assert!(error.starts_with("`task.s_niah.text` names ") && error.contains("7.txt"), "{error}");
    assert!(error.ends_with("which only evaluation may read; leave it out"), "{error}");
    config.text.pop();
    (8..10).for_each(|i| fs::remove_file(folder.path().join(format!("essays/{i}.txt"))).unwrap());
    config.text.pop();
    let error = SNiah::new(&config, 0).unwrap_err().to_string();
    assert!(error.ends_with("which only evaluation may read; add other text"), "{error}");
}

#[test]
fn an_evaluation_that_reaches_past_its_essays_is_refused() {
    let folder = folder();
    let mut config = config(folder.path(), Track::Answer);
    let tokens = SNiah::new(&config, 0).unwrap().essays.prose.text.len();
    config.test[1].length = tokens;
    SNiah::new(&config, 0).unwrap();
    config.test[1].length = tokens + 1;
    let error = SNiah::new(&config, 0).unwrap_err().to_string();
    assert!(error.contains(&format!("its first 8 essays have {tokens} tokens")), "{error}");
}

// --- what is scored

#[test]
fn on_the_track_answer_nothing_but_the_answer_is_scored() {
    let task = task(Track::Answer);
    for index in 0..50 {
        let (_, hidden) = needle(&task, Split::Train, 0, index).unwrap();
        let example = task.example(Split::Train, 0, index);
        let scored: Vec<_> = example.target.iter().flatten().copied().collect();
        assert_eq!(task.tokenizer.decode(&scored), hidden.answer());
        let first = example.target.iter().position(Option::is_some).unwrap();
        assert_eq!(example.input[first], u32::from(b's'));
        assert_eq!(&example.input[first + 1..][..scored.len()], scored);
    }
}

#[test]
fn on_the_track_everything_each_token_has_the_next_as_its_target() {
    let task = task(Track::Everything);
    let mut windows = 0;
    for index in 0..200 {
        let Example { input, target } = task.example(Split::Train, 0, index);
        let scored = target.iter().take_while(|target| target.is_some()).count();
        assert!(target[scored..].iter().all(Option::is_none));
        (1..scored).for_each(|t| assert_eq!(target[t - 1], Some(input[t])));
        match needle(&task, Split::Train, 0, index) {
            Some((prompt, hidden)) => {
                assert_eq!(scored, 1 + prompt.len() + hidden.answer().len());
                assert_eq!((input[0], target[scored - 1]), (256, Some(257)));
            }
            None => {
                assert_eq!(scored, 1024);
                assert!(task.training().0.text.contains(&task.tokenizer.decode(&input)));
                windows += 1;
            }
        }
    }
    assert_share("windows", windows, 200, 0.5);
    let scored = |set| task.example(Split::Test, set, 0).target.iter().flatten().count();
    assert_eq!([scored(0), scored(1), scored(2)], [8, 8, 37]);
}

#[test]
fn needles_are_as_likely_as_they_are_listed() {
    let drawn = needles(&task(Track::Everything), Split::Train, 3_000);
    for kind in EVERY {
        let count = drawn.iter().filter(|(_, hidden)| hidden.needle == kind).count();
        assert_share(kind.name(), count, drawn.len(), 1.0 / 3.0);
    }
}

#[test]
fn a_question_is_what_the_input_begins_with() {
    let task = task(Track::Answer);
    for set in 0..3 {
        let (prompt, _) = needle(&task, Split::Test, set, 5).unwrap();
        let Question { prompt: ids, new_tokens } = task.question(Split::Test, set, 5).unwrap();
        assert_eq!((ids[0], new_tokens), (256, 128));
        assert_eq!(task.tokenizer.decode(&ids), prompt);
        assert!(task.example(Split::Test, set, 5).input.starts_with(&ids));
    }
}

#[test]
fn a_window_of_plain_text_asks_nothing() {
    let task = task(Track::Everything);
    let index = (0..).find(|i| needle(&task, Split::Train, 0, *i).is_none()).unwrap();
    assert_eq!(task.question(Split::Train, 0, index), None);
    assert_eq!(task.text(Split::Train, 0, index).unwrap().answer, "");
    let mut tally = Tally::default();
    task.tally_answer(Split::Train, 0, index, &[97], &mut tally);
    assert_eq!(tally.metrics(), []);
}

#[test]
fn a_generated_text_answers_wherever_the_value_stands() {
    for right in
        ["1234567", " is 1234567.", "9991234567999", "\n\t 1234567", "it\u{1}is\u{2}1234567"]
    {
        assert!(answers(right, "1234567"), "{right:?}");
    }
    for wrong in ["", "123456", "1 234567", "123\n4567", "123\u{0}4567"] {
        assert!(!answers(wrong, "1234567"), "{wrong:?}");
    }
    assert!(answers("THE 0AB4-CD", "0ab4-cd") && answers("0ab4-cd", "0AB4-CD"));
}

#[test]
fn a_generated_text_counts_up_to_the_end_id() {
    let task = task(Track::Answer);
    let (_, hidden) = needle(&task, Split::Test, 0, 4).unwrap();
    let score = |answer: &[u32]| {
        let mut tally = Tally::default();
        task.tally_answer(Split::Test, 0, 4, answer, &mut tally);
        tally.metric("substring_match")
    };
    let value = task.tokenizer.known(&hidden.answer()).ids;
    assert_eq!(score(&[&value[..], &[257, 0xff]].concat()), Some(1.0));
    assert_eq!(score(&[&[0xff][..], &value].concat()), Some(1.0));
    assert_eq!(score(&[&[257][..], &value].concat()), Some(0.0));
    assert_eq!(score(&[]), Some(0.0));
}

#[test]
fn all_ids_of_the_answer_have_to_be_right_and_each_depth_is_scored_alone() {
    let task = task(Track::Answer);
    let batch = task.batch(Split::Test, 1, &Vec::from_iter(0..60));
    let early = |index| depth(&needle(&task, Split::Test, 1, index).unwrap().0).unwrap() < 0.5;
    let mut predicted = batch.target.clone();
    (0..60).filter(|i| !early(*i as u64)).for_each(|i| predicted[8 * i + 7] ^= 1);
    let mut tally = Tally::default();
    task.tally(&batch, &predicted, &mut tally);
    let share = (0..60).filter(|i| early(*i)).count() as f64 / 60.0;
    assert_eq!(tally.metric(task.score_name()), Some(share));
    let depths: Vec<_> =
        tally.metrics().into_iter().filter(|(name, _)| name.starts_with("exact_depth_")).collect();
    assert!(depths.len() >= 8, "{depths:?}");
    for (name, score) in depths {
        let early = name < "exact_depth_50_60";
        assert_eq!(score, f64::from(early), "{name}");
    }
}

#[test]
fn a_needle_next_to_the_question_is_the_last_of_the_haystack() {
    let folder = folder();
    let mut config = config(folder.path(), Track::Answer);
    config.test.iter_mut().for_each(|set| set.adjacent = true);
    let task = SNiah::new(&config, 0).unwrap();
    for (set, index) in (0..30).map(|i| (i % 3, i as u64)) {
        let (prompt, hidden) = needle(&task, Split::Test, set, index).unwrap();
        assert!(context(&prompt).trim_end().ends_with(&format!(" is: {}.", hidden.value)));
    }
    let batch = task.batch(Split::Test, 0, &[0, 1, 2]);
    let mut tally = Tally::default();
    task.tally(&batch, &batch.target, &mut tally);
    assert_eq!(tally.metric("exact_depth_90_100"), Some(1.0));
    assert_eq!(task.sets(Split::Test)[0].name, "number_in_noise_1024_adjacent");
}

#[test]
fn depth_is_the_share_of_the_haystack_before_the_needle() {
    let prose = Prose::new(&"Yes. ".repeat(100));
    for (place, want) in [(0.0, 0.0), (0.51, 0.51), (1.0, 1.0)] {
        let got = depth(&hidden(Needle::NumberInEssays, place).prompt(&prose, 100)).unwrap();
        assert!((got - want).abs() < 0.02, "{got}");
    }
    assert_eq!(depth("no needle\nat all\nWhat is the special magic number"), None);
    assert_eq!(depth(""), None);
    assert_eq!([bucket(0.0), bucket(0.0999), bucket(0.1), bucket(1.0)], [0, 0, 1, 9]);
    assert_eq!([bucket_name(0), bucket_name(9)], ["00_10", "90_100"]);
}

// --- randomness

#[test]
fn an_example_is_the_same_alone_in_any_order_and_in_a_batch() {
    let task = task(Track::Everything);
    let batch = task.batch(Split::Train, 0, &[5, 0, 5]);
    for (row, index) in [5, 0, 5].into_iter().enumerate() {
        let alone = task.example(Split::Train, 0, index);
        assert_eq!(batch.input[row * 1024..][..1024], alone.input);
    }
}

#[test]
fn seed_split_set_and_index_each_change_the_example() {
    let mut config = noise_alone();
    config.train.push(config.train[0].clone());
    config.test.push(config.test[0].clone());
    config.validation = config.test.clone();
    let mut seen = HashSet::new();
    for seed in [0, 1, u64::MAX] {
        let task = SNiah::new(&config, seed).unwrap();
        for split in [Split::Train, Split::Validation, Split::Test] {
            for (set, index) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
                assert!(seen.insert(task.example(split, set, index).input), "{seed} {split:?}");
            }
        }
    }
}

/// Published results of ours mean these data: a change here, also by a dependency, makes them
/// impossible to repeat.
#[test]
fn the_data_of_seed_0_stay_what_they_were() {
    let task = SNiah::new(&noise_alone(), 0).unwrap();
    let drawn = |split| {
        let (prompt, hidden) = needle(&task, split, 0, 0).unwrap();
        let lines = context(&prompt).lines().count();
        (hidden.key, hidden.value, lines, (depth(&prompt).unwrap() * 10.0) as u32)
    };
    assert_eq!(drawn(Split::Train), ("lucky-pebble".into(), "2032799".into(), 8, 8));
    assert_eq!(drawn(Split::Test), ("cosy-maple".into(), "5433164".into(), 8, 1));
}

// --- a tokenizer from a file

#[test]
fn lengths_are_tokens_where_a_tokenizer_is_named() {
    let folder = folder();
    let path = folder.path().join("tokenizer.json");
    write_small(&path);
    let mut config = config(folder.path(), Track::Everything);
    config.tokenizer = TokenizerConfig::File(path);
    let task = SNiah::new(&config, 0).unwrap();
    for (set, index) in (0..30).map(|i| (i % 3, i as u64)) {
        let example = task.example(Split::Test, set, index);
        let text = task.text(Split::Test, set, index).unwrap();
        let used = example.input.iter().take_while(|&&id| id != task.tokenizer.end()).count();
        let bytes = 1 + text.prompt.len() + text.answer.len();
        assert!(used < bytes && used <= 1024 && used + 100 > 1024, "{used} of {bytes}");
        let read = task.tokenizer.decode(&example.input);
        assert_eq!(read, [text.prompt, text.answer.clone()].concat());
        let scored: Vec<_> = example.target.iter().flatten().copied().collect();
        assert_eq!(task.tokenizer.decode(&scored), text.answer);
    }
    (0..50).for_each(|i| assert_eq!(task.example(Split::Train, 0, i).input.len(), 1024));
}

// --- config

#[test]
fn toml_takes_the_published_names_and_fills_in_the_rest() {
    let text = r#"
        [s_niah]
        track = "answer"
        train = [{ length = 512, needles = ["S-NIAH-1"], examples = 4 }]
        test = [{ needle = "number_in_noise", length = 1024, examples = 5 }]
    "#;
    let task = toml::from_str::<TaskConfig>(text).unwrap().build(0).unwrap();
    let want = SetInfo { name: "number_in_noise_512".into(), length: 512, examples: 4, scored: 8 };
    assert_eq!((task.sets(Split::Train), task.vocab()), (&[want][..], 258));
    let names = ["S-NIAH-1", "S-NIAH-2", "S-NIAH-3"].map(|name| {
        let text = format!("needle = \"{name}\"\nlength = 1\nexamples = 1");
        toml::from_str::<NeedleSet>(&text).unwrap().needle
    });
    assert_eq!(names, EVERY);
    let misspelt = text.replace("track", "tracks");
    assert!(toml::from_str::<TaskConfig>(&misspelt).unwrap_err().to_string().contains("tracks"));
}

#[test]
fn a_value_that_makes_no_task_is_refused_by_its_key() {
    type Spoil = fn(&mut SNiahConfig);
    let cases: [(&str, Spoil); 17] = [
        ("task.s_niah.train", |c| c.train.clear()),
        ("task.s_niah.test", |c| c.test.clear()),
        ("task.s_niah.train[0].needles", |c| c.train[0].needles.clear()),
        ("task.s_niah.train[0].length", |c| c.train[0].length = 400),
        ("task.s_niah.train[0].shortest", |c| c.train[0].shortest = Some(1025)),
        ("task.s_niah.train[0].shortest", |c| c.train[0].shortest = Some(0)),
        ("task.s_niah.train[0].examples", |c| c.train[0].examples = 0),
        ("task.s_niah.train[0].text_share", |c| c.train[0].text_share = Some(1.5)),
        ("task.s_niah.train[0].text_share", |c| c.train[0].text_share = Some(f64::NAN)),
        ("task.s_niah.train[0].text_share", |c| {
            (c.track, c.train[0].text_share) = (Track::Answer, Some(0.5));
        }),
        ("task.s_niah.test[2].length", |c| c.test[2].length = 100),
        ("task.s_niah.validation[1].examples", |c| c.validation[1].examples = 0),
        ("task.s_niah.text", |c| c.text.clear()),
        ("task.s_niah.text[1]", |c| c.text[1] = "nowhere.txt".into()),
        ("task.s_niah.haystack", |c| c.haystack = None),
        ("task.s_niah.haystack", |c| c.haystack = Some("nowhere".into())),
        ("task.s_niah.words", |c| c.words = Some("nowhere".into())),
    ];
    let folder = folder();
    for (want, spoil) in cases {
        let mut config = config(folder.path(), Track::Everything);
        spoil(&mut config);
        let refused = TaskConfig::SNiah(config).build(0).unwrap_err();
        let (TaskError::Value { key, .. } | TaskError::File { key, .. }) = &refused;
        assert_eq!(key, want, "{refused}");
    }
}

#[test]
fn an_error_says_where_the_published_files_are() {
    let folder = folder();
    let error = |change: fn(&mut SNiahConfig)| {
        let mut config = config(folder.path(), Track::Answer);
        change(&mut config);
        SNiah::new(&config, 0).unwrap_err().to_string()
    };
    let essays = "github.com/gkamradt/LLMTest_NeedleInAHaystack is the published one";
    assert!(error(|c| c.haystack = None).ends_with(essays));
    assert!(error(|c| c.haystack = Some("nowhere".into())).ends_with(essays));
    let words = error(|c| c.words = Some("nowhere".into()));
    assert!(
        words.contains("nowhere/adjectivelist.txt") && words.contains("wonderwords"),
        "{words}"
    );
    let short = error(|c| c.train[0].length = 9);
    assert!(short.contains("is 9; it has to be ") && short.contains("the longest key"), "{short}");
    let text = error(|c| c.text.truncate(0));
    assert!(text.contains("`task.s_niah.text` is empty; it has to be a list of files"), "{text}");
}

#[test]
fn text_that_is_too_short_or_no_text_is_refused() {
    let folder = folder();
    let path = folder.path().join("bad.txt");
    let error = |bytes: &[u8]| {
        fs::write(&path, bytes).unwrap();
        let mut config = config(folder.path(), Track::Answer);
        config.text = vec![path.clone()];
        SNiah::new(&config, 0).unwrap_err().to_string()
    };
    assert!(error(b"ok \xff").contains("bad.txt: byte 3 is not UTF-8"));
    assert!(error(b"Short.").contains("all text has 6 tokens, and more than 1024 are needed"));
}

#[test]
fn noise_needs_no_folder_and_the_least_length_draws() {
    let mut config = noise_alone();
    let least = |key: TaskError| match key {
        TaskError::Value { want, .. } => want.split(' ').next().unwrap().parse::<usize>().unwrap(),
        other => panic!("{other}"),
    };
    config.test[0].length = 1;
    let length = least(SNiah::new(&config, 0).unwrap_err());
    config.test[0].length = length;
    let task = SNiah::new(&config, 0).unwrap();
    for (prompt, _) in needles(&task, Split::Test, 500) {
        assert!(context(&prompt).contains(NOISE));
    }
    config.test[0].length = length - 1;
    assert_eq!(least(SNiah::new(&config, 0).unwrap_err()), length);
}

// --- figures

#[test]
fn statistics_name_sizes_depths_and_the_share_of_text() {
    let task = task(Track::Everything);
    let figures = task.statistics(Split::Train, 0, 400);
    let figure = |name: &str| figures.iter().find(|figure| figure.name == name).unwrap();
    let share = figure("share of text windows");
    assert_share(&share.name, (share.value * 400.0).round() as usize, 400, 0.5);
    assert_eq!(share.expected, Some(0.5));
    let size = |name: &str| figure(&format!("prompt bytes, {name}")).value;
    assert!(size("least") < size("mean") && size("mean") < size("most") && size("most") < 1024.0);
    let depths = (0..BUCKETS).map(|i| format!("share of needles at depth {}", bucket_name(i)));
    assert!((depths.map(|name| figure(&name).value).sum::<f64>() - 1.0).abs() < 1e-9);
    assert_eq!(figure("haystack files").value, 10.0);
    assert_eq!(figure("haystack words").expected, None);
}

/// Needs the published essays: their folder is named by `LINATTN_ESSAYS`.
#[test]
fn the_published_corpus_is_as_published() {
    let Some(folder) = std::env::var_os("LINATTN_ESSAYS").map(PathBuf::from) else {
        // Not `eprintln!`, which the test harness hides where a test passes.
        let mut terminal = std::io::stderr();
        writeln!(terminal, "skipped: LINATTN_ESSAYS names no folder of essays").unwrap();
        return;
    };
    let files = read_folder("LINATTN_ESSAYS", &folder).unwrap();
    let all = join(&files);
    let sha: String = Sha256::digest(&all).iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(sha, "b3a70ebc054f2eab5057baf3c4b7e857711472be8086240a516fd29b648ad857");
    assert!(all.starts_with("July 2010What hard liquor, cigarettes, heroin, and crack have in"));
    assert_eq!(collapse(&all).chars().count(), 639_676);
    let essays = Essays::of(&files);
    for figure in essays.statistics() {
        assert_eq!(Some(figure.value), figure.expected, "{}", figure.name);
    }
    assert_eq!(files[..8].iter().map(|file| file.text.len()).sum::<usize>(), 102_353);
    for file in &files[8..] {
        let (_, share) = essays.held_out.taken_out(&file.text);
        assert!(share < 0.02, "{}: {share}", file.path.display());
    }
    for file in &files[..8] {
        assert_eq!(essays.held_out.taken_out(&file.text), (String::new(), 1.0));
    }
}
