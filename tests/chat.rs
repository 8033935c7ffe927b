//! Conversations: what a chat template makes of them is what the model reads, each part of it once.

use crate::desk::{Desk, text};
use crate::support::normal_by;
use burn::backend::Flex;
use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::Tensor;
use linattn::generate::{GenerateConfig, Next, SamplingConfig, Sequence, generate};
use linattn::nn::{LanguageModel, LanguageModelConfig};
use linattn_checkpoints::{Exported, Precision, export};
use linattn_tasks::Tokenizer;
use linattn_trainer::{ImportedModel, StoredModel, Which, companions, store_model};
use serde_json::json;
use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Output, Stdio};

const VOCAB: usize = 100;
/// Ids of the special tokens below.
const START: u32 = 98;
const END: u32 = 99;
const TOKENS: usize = 12;

/// Every turn between the two special tokens.
const PLAIN: &str = "{% for message in messages %}\n\
    {{- '<|start|>' + message.role + '\\n' + message.content + '<|end|>\\n' -}}\n\
    {% endfor %}\n\
    {% if add_generation_prompt %}\n{{- '<|start|>assistant\\n' -}}\n{% endif %}\n";

/// The same, which says former answers in other words.
fn retelling() -> String {
    PLAIN.replace(
        "message.content",
        "('(said) ' if message.role == 'assistant' else '') + message.content",
    )
}

fn tokenizer_json() -> String {
    let special = |id: u32, token: &str| {
        format!(
            r#"{{"id": {id}, "content": "{token}", "single_word": false, "lstrip": false,
                "rstrip": false, "normalized": false, "special": true}}"#
        )
    };
    let added = [special(START, "<|start|>"), special(END, "<|end|>")].join(", ");
    let plain = crate::untrusted::tokenizer_json();
    plain.replace(r#""added_tokens": []"#, &format!(r#""added_tokens": [{added}]"#))
}

fn config() -> LanguageModelConfig {
    toml::from_str(
        "d_model = 32\ninitializer_range = 0.2\ntie_embeddings = false\n\
         [[layers]]\nrepeat = 2\nmlp = { swiglu = {} }\nmixer.gla = { heads = 2 }\n",
    )
    .unwrap()
}

/// A folder `runs/tiny` with an untrained model that has these files beside it. Its weights are always the same:
/// one model in thousands writes `the` letter by letter, which its text does not tell.
fn desk(files: &[(&str, &str)], end_ids: &[u32]) -> Desk {
    let config = config();
    let model = config.init::<Flex>(VOCAB, &Default::default()).unwrap();
    desk_of(&config, &normal_by(1, 0.2, model), files, end_ids)
}

/// The same, with a model that writes nothing but `h`.
fn desk_of_one_letter(files: &[(&str, &str)]) -> Desk {
    struct Loud;
    impl ModuleMapper<Flex> for Loud {
        fn map_float<const D: usize>(
            &mut self,
            param: Param<Tensor<Flex, D>>,
        ) -> Param<Tensor<Flex, D>> {
            if param.dims()[..] != [VOCAB] {
                return param;
            }
            param.map(|bias| {
                let mut loud = [0.0_f32; VOCAB];
                loud[usize::from(b'h' - b'!')] = 1e3;
                let loud = Tensor::<Flex, 1>::from_data(loud, &bias.device());
                loud.reshape(bias.dims())
            })
        }
    }
    let config = LanguageModelConfig { head_bias: true, ..config() };
    let model = config.init::<Flex>(VOCAB, &Default::default()).unwrap();
    desk_of(&config, &model.map(&mut Loud), files, &[])
}

fn desk_of(
    config: &LanguageModelConfig,
    model: &LanguageModel<Flex>,
    files: &[(&str, &str)],
    end_ids: &[u32],
) -> Desk {
    let desk = Desk::new();
    let beside = desk.path("beside");
    fs::create_dir(&beside).unwrap();
    fs::write(beside.join("tokenizer.json"), tokenizer_json()).unwrap();
    for (name, text) in files {
        fs::write(beside.join(name), text).unwrap();
    }
    let parts = ImportedModel {
        config,
        tokenizer: Some(&beside.join("tokenizer.json")),
        end_ids,
        companions: &companions(&beside),
        kept: None,
    };
    store_model(&desk.path("runs/tiny"), false, &parts, model).unwrap();
    desk
}

fn command(desk: &Desk, args: &[&str]) -> Command {
    let fixed = ["--run", "runs/tiny", "--device", "cpu", "--chat", "--temperature", "0"];
    desk.program(env!("CARGO_BIN_EXE_generate"), &[&fixed, args].concat())
}

/// The command with these lines on its standard input.
fn said(desk: &Desk, args: &[&str], lines: &str) -> Output {
    let mut command = command(desk, args);
    let pipes = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = pipes.spawn().unwrap();
    let mut input = child.stdin.take().unwrap();
    let _refused_before_it_is_read = input.write_all(lines.as_bytes());
    drop(input);
    child.wait_with_output().unwrap()
}

fn refused(output: &Output, parts: &[&str]) {
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.starts_with("error: ") && said.lines().count() == 1, "{said}");
    assert_eq!(text(&output.stdout), "");
    for part in parts {
        assert!(said.contains(part), "{said:?} does not say {part:?}");
    }
}

/// A model's own answers to texts that are read from their beginning.
struct Oracle {
    model: LanguageModel<Flex>,
    tokenizer: Tokenizer,
    ends: Vec<u32>,
}

impl Oracle {
    fn of(desk: &Desk, ends: &[u32]) -> Self {
        let stored = StoredModel::open(&desk.path("runs/tiny"), Which::Best).unwrap();
        let tokenizer = Tokenizer::open(stored.tokenizer.as_ref().unwrap(), "tokenizer").unwrap();
        let model = stored.load::<Flex>(&Default::default()).unwrap();
        Self { model, tokenizer, ends: ends.to_vec() }
    }

    fn count(&self, text: &str) -> usize {
        self.tokenizer.ids(text).unwrap().len()
    }

    /// The answer after this text, and whether an end token came.
    fn answer(&self, text: &str) -> (String, bool) {
        let config = GenerateConfig {
            new_tokens: TOKENS,
            sampling: SamplingConfig::greedy(),
            ..Default::default()
        };
        let start = vec![Sequence::new(self.tokenizer.ids(text).unwrap())];
        let hear = |written: linattn::generate::Written<'_>| match self.ends.contains(&written.id) {
            true => Next::FinishRow,
            false => Next::Continue,
        };
        let done = generate(&self.model, start, &config, &Default::default(), hear).unwrap();
        let mut ids = done.rows[0].new_tokens().to_vec();
        let ended = ids.last().is_some_and(|id| self.ends.contains(id));
        ids.truncate(ids.len() - usize::from(ended));
        (self.tokenizer.decode(&ids), ended)
    }
}

fn turn(role: &str, content: &str) -> String {
    format!("<|start|>{role}\n{content}<|end|>\n")
}

/// Tokens of prompts, as the last line of standard error counts them.
fn tokens_read(output: &Output) -> usize {
    let said = text(&output.stderr);
    let last = said.lines().last().unwrap_or_default().to_string();
    let count = last.strip_prefix("prompt ").and_then(|rest| rest.split(' ').next());
    count.and_then(|count| count.parse().ok()).unwrap_or_else(|| panic!("{said}"))
}

const QUESTIONS: [&str; 3] = ["the cat?", "on the mat, then", "why"];

#[test]
fn a_conversation_is_answered_as_its_whole_text_and_every_token_is_read_once() {
    // Some models never write the end, others soon.
    for ends in [vec![END], (40..VOCAB as u32).collect()] {
        let listed = format!(r#"{{"eos_token_id": {ends:?}}}"#);
        let files = [("chat_template.jinja", PLAIN), ("generation_config.json", listed.as_str())];
        let desk = desk(&files, &[]);
        let oracle = Oracle::of(&desk, &ends);
        let (mut talk, mut want, mut read) = (turn("system", "Be brief."), String::new(), 0);
        let mut unread = talk.clone();
        for question in QUESTIONS {
            let new = turn("user", question) + "<|start|>assistant\n";
            talk += &new;
            unread += &new;
            let (answer, ended) = oracle.answer(&talk);
            read += oracle.count(&unread);
            want += &format!("{answer}\n");
            talk += &format!("{answer}<|end|>\n");
            // The last token that was written is read with the next question.
            unread = if ended { "<|end|>\n".into() } else { "?<|end|>\n".into() };
        }
        let tokens = TOKENS.to_string();
        let args = ["--system", "Be brief.", "--tokens", &tokens];
        let output = said(&desk, &args, &(QUESTIONS.join("\n\n") + "\n/exit\nnot read\n"));
        assert!(output.status.success(), "{}", text(&output.stderr));
        assert_eq!(text(&output.stdout), want);
        if ends == [END] {
            assert_eq!(tokens_read(&output), read, "{}", text(&output.stderr));
        }
    }
}

#[test]
fn a_template_that_retells_answers_is_read_again_from_the_last_question() {
    let template = retelling();
    let desk = desk(&[("chat_template.jinja", &template)], &[END]);
    let oracle = Oracle::of(&desk, &[END]);
    let (mut talk, mut want, mut read) = (String::new(), String::new(), 0);
    let mut asked = 0;
    for question in QUESTIONS {
        talk += &turn("user", question);
        let here = oracle.count(&talk);
        let opened = format!("{talk}<|start|>assistant\n");
        read += oracle.count(&opened) - asked;
        asked = here;
        let (answer, _) = oracle.answer(&opened);
        want += &format!("{answer}\n");
        talk += &turn("assistant", &format!("(said) {answer}"));
    }
    let tokens = TOKENS.to_string();
    let output = said(&desk, &["--tokens", &tokens], &QUESTIONS.join("\n"));
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!((text(&output.stdout), tokens_read(&output)), (want, read));
}

#[test]
fn a_template_and_end_tokens_go_there_and_back_as_they_came() {
    let config_json = r#"{"chat_template": [{"name": "tool_use", "template": "no"},
        {"name": "default", "template": "{{ messages[0].content }}"}], "eos_token": {"content": "<|end|>"}}"#;
    let files = [
        ("tokenizer_config.json", config_json),
        ("special_tokens_map.json", r#"{"bos_token": "<|start|>"}"#),
        ("generation_config.json", r#"{"eos_token_id": [99, 3]}"#),
        ("chat_template.jinja", PLAIN),
    ];
    let desk = Desk::new();
    for (name, files) in [("all", &files[..]), ("one", &files[..1]), ("none", &[])] {
        let there = desk.path(name);
        fs::create_dir_all(&there).unwrap();
        for (file, text) in files {
            fs::write(there.join(file), text).unwrap();
        }
        let config = config();
        let model = config.init::<Flex>(VOCAB, &Default::default()).unwrap();
        let end_ids: &[u32] = if name == "all" { &[99, 3] } else { &[7] };
        let exported = Exported {
            model: &model,
            config: &config,
            vocab: VOCAB,
            tokenizer: None,
            end_ids,
            companions: &[],
            kept: None,
        };
        export(&exported, None, Precision::F32, &there, true).unwrap();
        let back = format!("{name}-back");
        let convert = |args: &[&str]| {
            let output = desk.program(env!("CARGO_BIN_EXE_convert"), args).output().unwrap();
            assert!(output.status.success(), "{}", text(&output.stderr));
        };
        // Nothing of the model that was there before is left.
        convert(&["import", name, "--out", "runs/same", "--overwrite"]);
        convert(&["export", "runs/same", "--out", &back]);
        let listed = |folder: &Path| {
            companions(folder).iter().map(|path| path.file_name().unwrap().to_owned()).collect()
        };
        let names: Vec<_> = listed(&desk.path(&back));
        assert_eq!(names, listed(&there), "{name}");
        assert_eq!(names, listed(&desk.path("runs/same")), "{name}");
        for (file, text) in files {
            let got = fs::read_to_string(desk.path(&back).join(file)).unwrap();
            assert_eq!(&got, text, "{file}");
        }
        let [config, again] = [&there, &desk.path(&back)]
            .map(|folder| crate::desk::json(&folder.join("config.json"))["eos_token_id"].clone());
        assert_eq!(config, again);
        assert!(!config.is_null());
    }
}

#[test]
fn a_text_ends_at_the_tokens_that_its_checkpoint_says() {
    let all: Vec<u32> = (0..VOCAB as u32).collect();
    let listed = format!(r#"{{"eos_token_id": {all:?}}}"#);
    let args = ["--run", "runs/tiny", "--device", "cpu", "--prompt", "the cat", "--json"];
    for (desk, finish) in [
        (desk(&[], &[]), "length"),
        (desk(&[], &all), "stopped"),
        (desk(&[("generation_config.json", &listed)], &[]), "stopped"),
    ] {
        let output = desk.program(env!("CARGO_BIN_EXE_generate"), &args).output().unwrap();
        assert!(output.status.success(), "{}", text(&output.stderr));
        let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(report["texts"][0]["finish"], finish);
    }
}

#[test]
fn tokens_are_drawn_as_the_checkpoint_says_where_the_call_does_not() {
    let sampling = |file: Option<&str>, args: &[&str]| {
        let files: Vec<(&str, &str)> =
            file.map(|text| ("generation_config.json", text)).into_iter().collect();
        let desk = desk(&files, &[]);
        let fixed =
            ["--run", "runs/tiny", "--device", "cpu", "--prompt", "the cat", "--tokens", "2"];
        let args = [&fixed[..], &["--json"], args].concat();
        desk.program(env!("CARGO_BIN_EXE_generate"), &args).output().unwrap()
    };
    let drawn = r#"{"do_sample": true, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.1}"#;
    let likeliest = r#"{"do_sample": false, "temperature": 0.6, "top_p": null}"#;
    for (file, args, want) in [
        (None, &[][..], json!([1.0, null, 1.0, 1.0])),
        (Some(drawn), &[], json!([0.6, 20, 0.95, 1.1])),
        (Some(drawn), &["--temperature", "0.8", "--top-k", "0"], json!([0.8, null, 0.95, 1.1])),
        (Some(likeliest), &[], json!([0.0, null, 1.0, 1.0])),
        (Some(likeliest), &["--temperature", "2"], json!([2.0, null, 1.0, 1.0])),
    ] {
        let output = sampling(file, args);
        assert!(output.status.success(), "{}", text(&output.stderr));
        let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        let got = ["temperature", "top_k", "top_p", "repetition_penalty"];
        let got = got.map(|key| report["sampling"][key].clone());
        assert_eq!(json!(got), want, "{file:?} {args:?}");
    }
    for (file, named) in [
        (r#"{"top_k": -1}"#, "`top_k` is -1"),
        (r#"{"do_sample": "yes"}"#, "`do_sample` is \"yes\""),
        (r#"{"top_p": 7}"#, "top_p"),
    ] {
        refused(&sampling(Some(file), &[]), &["generation_config.json", named]);
    }
    let wrong = sampling(Some(r#"{"top_p": 7}"#), &["--temperature=-1"]);
    assert!(!text(&wrong.stderr).contains("generation_config.json"), "{}", text(&wrong.stderr));
}

#[test]
fn what_no_conversation_can_be_made_of_is_refused_in_a_line() {
    let none = desk(&[], &[]);
    refused(
        &said(&none, &[], "hi\n"),
        &["runs/tiny", "chat_template.jinja", "tokenizer_config.json"],
    );
    let strict = "{% if messages[0].role == 'system' %}{{ raise_exception('No system, please') }}{% endif %}\
                  {% for m in messages %}{{ m.content }}{% endfor %}";
    let strict = desk(&[("chat_template.jinja", strict)], &[]);
    let output = said(&strict, &["--system", "Be brief."], "hi\n");
    refused(&output, &["chat_template.jinja", "No system, please"]);
    assert!(said(&strict, &["--tokens", "2"], "hi\n").status.success());
    let wrong = desk(&[("tokenizer_config.json", r#"{"chat_template": 7}"#)], &[]);
    refused(&said(&wrong, &[], "hi\n"), &["tokenizer_config.json", "`chat_template` is 7"]);
    let wrong = desk(&[("tokenizer_config.json", "{")], &[]);
    refused(&said(&wrong, &[], "hi\n"), &["tokenizer_config.json", "no JSON object"]);
    let wrong = desk(&[("generation_config.json", r#"{"eos_token_id": "x"}"#)], &[]);
    refused(&said(&wrong, &[], "hi\n"), &["generation_config.json", "`eos_token_id`"]);
    for args in [["--prompt", "a"], ["--state", "a"], ["--save-state", "a"]] {
        assert_eq!(said(&none, &args, "hi\n").status.code(), Some(2), "{args:?}");
    }
}

#[test]
fn values_of_the_call_reach_the_template() {
    let template = "{{ messages[-1].content }}{{ 'thinking' if think }}{{ style }}";
    let desk = desk(&[("chat_template.jinja", template)], &[]);
    let args = ["--chat-value", "think=true", "--chat-value", "style=plain", "--tokens", "1"];
    let oracle = Oracle::of(&desk, &[]);
    let output = said(&desk, &args, "the cat");
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(tokens_read(&output), oracle.count("the catthinkingplain"));
}

#[cfg(unix)]
#[test]
fn ctrl_c_ends_an_answer_and_the_conversation_goes_on() {
    use std::io::Read;
    let desk = desk_of_one_letter(&[("chat_template.jinja", PLAIN)]);
    let mut command = command(&desk, &["--tokens", "100000000"]);
    let pipes = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = pipes.spawn().unwrap();
    let (mut input, mut out) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
    let id = child.id().to_string();
    for question in ["the cat\n", "and then?\n"] {
        input.write_all(question.as_bytes()).unwrap();
        let mut some = [0; 3];
        out.read_exact(&mut some).unwrap(); // the answer has begun
        assert_eq!(&some, b"hhh");
        let kill = ["-c", r#"kill -INT "$1""#, "sh", &id];
        assert!(Command::new("sh").args(kill).status().unwrap().success());
        let mut letter = [b'h'];
        while letter == [b'h'] {
            out.read_exact(&mut letter).unwrap();
        }
        assert_eq!(&letter, b"\n");
    }
    drop(input);
    let mut rest = vec![];
    out.read_to_end(&mut rest).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert!(rest.is_empty(), "{rest:?}");
}

#[test]
fn an_answer_in_other_ids_than_its_text_has_is_not_read_again() {
    // The tokenizer makes one token of the answer's first letter and the one before it.
    let template = PLAIN.replace("assistant\\n'", "assistant\\nt'").replace(
        "message.content",
        "('t' if message.role == 'assistant' else '') + message.content",
    );
    let desk = desk_of_one_letter(&[("chat_template.jinja", &template)]);
    let oracle = Oracle::of(&desk, &[]);
    assert_eq!(oracle.count("th"), 1);
    let (mut read, mut unread) = (0, String::new());
    for question in QUESTIONS {
        unread += &turn("user", question);
        read += oracle.count(&unread) + oracle.count("<|start|>assistant\nt");
        // The last letter that was written, and what ends the turn.
        unread = "h<|end|>\n".into();
    }
    let output = said(&desk, &["--tokens", "5"], &QUESTIONS.join("\n"));
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!((text(&output.stdout), tokens_read(&output)), ("hhhhh\n".repeat(3), read));
}
