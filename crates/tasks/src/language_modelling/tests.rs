use std::collections::HashSet;
use std::fs;

use tempfile::TempDir;

use super::*;
use crate::TaskConfig;
use crate::tokenizer::tests::write_small;

/// `abcdefghij`, and a folder of two files that spell `klmno`.
fn folder() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("ten.txt"), "abcdefghij").unwrap();
    fs::create_dir(folder.path().join("more")).unwrap();
    fs::write(folder.path().join("more/b.txt"), "no").unwrap();
    fs::write(folder.path().join("more/a.txt"), "klm").unwrap();
    fs::write(folder.path().join("more/a.md"), "XYZ").unwrap();
    folder
}

fn config(folder: &TempDir) -> LanguageModellingConfig {
    let ten = || vec![folder.path().join("ten.txt")];
    LanguageModellingConfig {
        tokenizer: TokenizerConfig::Bytes,
        train: vec![TextSet { text: ten(), length: 4, examples: Some(1_000) }],
        validation: vec![TextSet { text: ten(), length: 9, examples: None }],
        test: vec![TextSet {
            text: vec![folder.path().join("ten.txt"), folder.path().join("more")],
            length: 4,
            examples: None,
        }],
    }
}

fn task() -> LanguageModelling {
    LanguageModelling::new(&config(&folder()), 0).unwrap()
}

fn show(task: &LanguageModelling, ids: impl IntoIterator<Item = u32>) -> String {
    task.tokenizer.decode(&Vec::from_iter(ids))
}

#[test]
fn evaluation_covers_the_text_once_and_asks_for_all_but_its_first_token() {
    let task = task();
    assert_eq!(task.sets(Split::Test)[0].examples, 4);
    let examples: Vec<_> = (0..4).map(|index| task.example(Split::Test, 0, index)).collect();
    let inputs: Vec<_> = examples.iter().map(|e| show(&task, e.input.clone())).collect();
    assert_eq!(inputs, ["abcd", "efgh", "ijkl", "mn"]);
    let targets: Vec<_> =
        examples.iter().map(|e| show(&task, e.target.iter().flatten().copied())).collect();
    assert_eq!(targets, ["bcde", "fghi", "jklm", "no"]);
    assert_eq!(examples[3].input[2..], [257, 257]);
    assert_eq!(examples[3].target[2..], [None, None]);
}

#[test]
fn a_window_that_ends_with_the_text_is_not_padded() {
    let task = task();
    assert_eq!(task.sets(Split::Validation)[0].examples, 1);
    let example = task.example(Split::Validation, 0, 0);
    assert_eq!(show(&task, example.input), "abcdefghi");
    assert!(example.target.iter().all(Option::is_some));
}

#[test]
fn training_starts_at_each_place_equally_often() {
    let task = task();
    let (mut counts, total) = ([0u32; 6], 6_000);
    for index in 0..total {
        let Example { input, target } = task.example(Split::Train, 0, index);
        counts[input[0] as usize - 97] += 1;
        (0..4).for_each(|t| assert_eq!(target[t], Some(input[0] + t as u32 + 1)));
    }
    // Of 6 000 trials, 1 000 +- 29 each.
    assert!(counts.iter().all(|count| count.abs_diff(1_000) < 4 * 29), "{counts:?}");
}

#[test]
fn uniform_guessing_takes_eight_bits_a_byte_and_a_perplexity_of_256() {
    let task = task();
    let mut tally = Tally::default();
    for part in [10, 4] {
        let nats = f64::from(part) * 256f64.ln();
        task.tally_loss(Split::Test, 0, nats, part as u64, &mut tally);
    }
    assert!((tally.metric(task.score_name()).unwrap() - 8.0).abs() < 1e-12);
    assert!((tally.metric("perplexity").unwrap() - 256.0).abs() < 1e-9);
    assert_eq!(task.goal(), Goal::Lowest);
}

#[test]
fn bits_are_shared_among_the_bytes_that_tokens_stand_for() {
    let folder = folder();
    let path = folder.path().join("tokenizer.json");
    write_small(&path);
    fs::write(folder.path().join("ten.txt"), "the other the").unwrap();
    let mut config = config(&folder);
    config.tokenizer = TokenizerConfig::File(path);
    config.test[0] = TextSet { text: config.train[0].text.clone(), length: 2, examples: None };
    config.validation.clear();
    let task = LanguageModelling::new(&config, 0).unwrap();
    let ids: Vec<_> = (0..3).map(|i| show(&task, task.example(Split::Test, 0, i).input)).collect();
    assert_eq!(ids, ["the ", "othe", "r"]);
    // `the| |o|the|r| the`: five targets that stand for 10 bytes.
    let mut tally = Tally::default();
    task.tally_loss(Split::Test, 0, 30.0 * 2f64.ln(), 5, &mut tally);
    assert!((tally.metric("bits_per_byte").unwrap() - 3.0).abs() < 1e-12);
    assert!((tally.metric("perplexity").unwrap() - 64.0).abs() < 1e-9);
}

#[test]
fn accuracy_counts_every_token_alike() {
    let task = task();
    let batch = task.batch(Split::Test, 0, &[0, 3]);
    assert_eq!(batch.target.len(), 6);
    let mut predicted = batch.target.clone();
    predicted[5] = 0;
    let mut tally = Tally::default();
    task.tally(&batch, &predicted, &mut tally);
    assert_eq!(tally.metrics(), [("accuracy", 5.0 / 6.0)]);
}

#[test]
fn fewer_examples_take_the_start_of_the_text() {
    let folder = folder();
    let mut config = config(&folder);
    config.test[0].examples = Some(2);
    let task = LanguageModelling::new(&config, 0).unwrap();
    assert_eq!(task.sets(Split::Test)[0].examples, 2);
    assert_eq!(task.text(Split::Test, 0, 1).unwrap().prompt, "efgh");
    let value = |name: &str| {
        let figures = task.statistics(Split::Test, 0, 2);
        figures.into_iter().find(|figure| figure.name == name).unwrap().value
    };
    assert_eq!((value("text tokens"), value("bytes a target")), (15.0, 1.0));
}

#[test]
fn seed_set_and_index_each_change_where_training_starts() {
    let folder = folder();
    fs::write(folder.path().join("ten.txt"), "x".repeat(1 << 20)).unwrap();
    let mut config = config(&folder);
    config.train.push(config.train[0].clone());
    let mut seen = HashSet::new();
    for seed in [0, 1] {
        let task = LanguageModelling::new(&config, seed).unwrap();
        for (set, index) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            assert!(seen.insert(task.start(Split::Train, set, index)));
        }
    }
}

#[test]
fn what_makes_no_task_is_refused_by_its_key() {
    type Spoil = fn(&mut LanguageModellingConfig);
    let cases: [(&str, Spoil); 10] = [
        ("train", |c| c.train.clear()),
        ("test", |c| c.test.clear()),
        ("train[0].length", |c| c.train[0].length = 0),
        ("train[0].text", |c| c.train[0].length = 10),
        ("train[0].examples", |c| c.train[0].examples = Some(0)),
        ("validation[0].text", |c| c.validation[0].text.clear()),
        ("validation[0].examples", |c| c.validation[0].examples = Some(2)),
        ("test[0].examples", |c| c.test[0].examples = Some(5)),
        ("test[0].text[1]", |c| c.test[0].text[1] = "nowhere".into()),
        ("tokenizer.file", |c| c.tokenizer = TokenizerConfig::File("nowhere".into())),
    ];
    let folder = folder();
    for (want, spoil) in cases {
        let mut config = config(&folder);
        spoil(&mut config);
        let refused = TaskConfig::LanguageModelling(config).build(0).unwrap_err();
        let (TaskError::Value { key, .. } | TaskError::File { key, .. }) = &refused;
        assert_eq!(*key, format!("task.language_modelling.{want}"), "{refused}");
    }
}

#[test]
fn an_error_about_a_file_says_what_is_wrong_with_it() {
    let folder = folder();
    let error = |name: &str| {
        let mut config = config(&folder);
        config.train[0].text = vec![folder.path().join(name)];
        LanguageModelling::new(&config, 0).unwrap_err().to_string()
    };
    fs::write(folder.path().join("latin.txt"), b"caf\xe9 noir").unwrap();
    fs::create_dir(folder.path().join("none")).unwrap();
    assert!(
        error("latin.txt").ends_with("latin.txt: byte 3 is not UTF-8; convert the file to UTF-8")
    );
    assert!(error("none").ends_with("none: it has no .txt file; put the text into some"));
    assert!(error("absent.txt").contains("absent.txt: No such file"));
    fs::write(folder.path().join("four.txt"), "four").unwrap();
    assert!(error("four.txt").ends_with("all text has 4 tokens, and more than 4 are needed"));
}

#[test]
fn toml_fills_in_bytes_and_the_whole_text() {
    let folder = folder();
    let path = folder.path().join("ten.txt");
    let text = format!(
        "[language_modelling]\ntokenizer = \"bytes\"\n\
         train = [{{ text = [{path:?}], length = 3, examples = 7 }}]\n\
         test = [{{ text = [{path:?}], length = 3 }}]"
    );
    let task = toml::from_str::<TaskConfig>(&text).unwrap().build(0).unwrap();
    let size = |split| (task.sets(split)[0].name.clone(), task.sets(split)[0].examples);
    assert_eq!(size(Split::Train), ("text_3".into(), 7));
    assert_eq!(size(Split::Test), ("text_3".into(), 3));
    assert!(toml::from_str::<TaskConfig>(&text.replace("length", "lenght")).is_err());
}
