//! Chat templates: a conversation as the text that its model was taught to go on from.
//!
//! A template is Jinja with what the transformers library gives it: blocks that leave no lines behind, loop
//! controls, the methods of Python's strings, `raise_exception`, `strftime_now`, and `tojson` as Python
//! spells it.

use crate::companions::TemplateText;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde};
use minijinja::{Environment, Error, ErrorKind, Value};
use minijinja_contrib::pycompat::unknown_method_callback;
use serde::Serialize;
use serde_json::ser::{CompactFormatter, Formatter, PrettyFormatter, Serializer};
use serde_json::{Map, json};
use std::io;
use std::path::PathBuf;

/// Steps that a template may take: far more than any conversation needs, and an end to loops in loops.
const FUEL: u64 = 5_000_000;
const NAME: &str = "chat";

/// Why a template gives no text.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TemplateError {
    /// It is no template.
    #[error("the chat template of {path} cannot be read: {why}")]
    Syntax {
        /// The file.
        path: PathBuf,
        /// The fault, and its line.
        why: String,
    },
    /// It raises an exception, or asks for what there is not.
    #[error("the chat template of {path} refuses the conversation: {why}")]
    Refused {
        /// The file.
        path: PathBuf,
        /// Its message.
        why: String,
    },
}

/// One turn of a conversation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Message {
    pub(crate) role: Role,
    pub(crate) content: String,
}

/// Whose turn it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Role {
    System,
    User,
    Assistant,
}

/// A template, ready for use.
pub(crate) struct Template {
    environment: Environment<'static>,
    path: PathBuf,
    /// Beside the conversation: special tokens, and what a person asked for.
    values: Map<String, serde_json::Value>,
}

impl Template {
    /// A template that sees `values` by their names.
    /// # Errors
    /// [`TemplateError::Syntax`] names the file and the line.
    pub(crate) fn new(
        template: TemplateText,
        values: Map<String, serde_json::Value>,
    ) -> Result<Self, TemplateError> {
        let TemplateText { path, text } = template;
        let environment = environment(plain_generation(&text))
            .map_err(|e| TemplateError::Syntax { path: path.clone(), why: said(&e) })?;
        Ok(Self { environment, path, values })
    }

    /// The conversation as text, and behind it the beginning of an answer where one is `wanted`.
    /// # Errors
    /// [`TemplateError::Refused`] if the template raises an exception.
    pub(crate) fn render(
        &self,
        messages: &[Message],
        wanted: bool,
    ) -> Result<String, TemplateError> {
        let mut context = Map::new();
        context.insert("tools".into(), json!(null));
        context.insert("documents".into(), json!(null));
        context.extend(self.values.clone());
        context.insert("messages".into(), json!(messages));
        context.insert("add_generation_prompt".into(), wanted.into());
        let rendered = self
            .environment
            .get_template(NAME)
            .and_then(|template| template.render(Value::from(Serde(context))));
        rendered.map_err(|e| TemplateError::Refused { path: self.path.clone(), why: said(&e) })
    }
}

fn environment(text: String) -> Result<Environment<'static>, Error> {
    let mut environment = Environment::new();
    environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    environment.set_fuel(Some(FUEL));
    environment.set_unknown_method_callback(unknown_method_callback);
    environment.add_function("raise_exception", raise_exception);
    environment.add_function("strftime_now", strftime_now);
    environment.add_filter("tojson", to_json);
    environment.add_template_owned(NAME, text)?;
    Ok(environment)
}

/// The message of an error, alone where the template raised it.
fn said(e: &Error) -> String {
    match (e.kind(), e.detail()) {
        (ErrorKind::EvalBlock | ErrorKind::InvalidOperation, Some(detail)) if raised(detail) => {
            detail[RAISED.len()..].to_string()
        }
        _ => e.to_string(),
    }
    .replace('\n', " ")
}

/// Marks messages of the template's own.
const RAISED: &str = "raised: ";

fn raised(detail: &str) -> bool {
    detail.starts_with(RAISED)
}

fn raise_exception(message: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, format!("{RAISED}{message}")))
}

/// The local time of day and date.
fn strftime_now(format: String) -> Result<String, Error> {
    jiff::fmt::strtime::format(&format, &jiff::Zoned::now()).map_err(|e| {
        Error::new(ErrorKind::InvalidOperation, format!("strftime_now({format:?}): {e}"))
    })
}

/// JSON as Python writes it: a space after commas and colons, and characters as they are.
fn to_json(value: Value, options: Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = options.get("indent")?;
    let _as_it_is: Option<bool> = options.get("ensure_ascii")?;
    options.assert_all_used()?;
    match indent {
        Some(width) => written(&value, PrettyFormatter::with_indent(" ".repeat(width).as_bytes())),
        None => written(&value, Spaced(CompactFormatter)),
    }
}

fn written(value: &Value, formatter: impl Formatter) -> Result<String, Error> {
    let failed = |why: String| Error::new(ErrorKind::BadSerialization, why);
    let mut bytes = vec![];
    value
        .serialize(&mut Serializer::with_formatter(&mut bytes, formatter))
        .map_err(|e| failed(e.to_string()))?;
    String::from_utf8(bytes).map_err(|e| failed(e.to_string()))
}

/// One line, a space after commas and colons.
struct Spaced(CompactFormatter);

impl Formatter for Spaced {
    fn begin_array_value<W: ?Sized + io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> io::Result<()> {
        writer.write_all(if first { b"" } else { b", " })
    }

    fn begin_object_key<W: ?Sized + io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> io::Result<()> {
        writer.write_all(if first { b"" } else { b", " })
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }
}

/// The same template without `{% generation %}` blocks, which mark answers for training and write
/// nothing: as blocks that are always entered, they trim what is around them all the same.
fn plain_generation(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, tag, after)) = next_tag(rest) {
        plain.push_str(before);
        let inner = tag[2..tag.len() - 2].trim_matches(['-', '+']).trim();
        plain.push_str(&match inner {
            "generation" => tag.replace("generation", "if true"),
            "endgeneration" => tag.replace("endgeneration", "endif"),
            _ => tag.to_string(),
        });
        rest = after;
    }
    plain + rest
}

/// Text before the next block tag, the tag, and the text after it.
fn next_tag(text: &str) -> Option<(&str, &str, &str)> {
    let from = text.find("{%")?;
    let to = from + 2 + text[from + 2..].find("%}")? + 2;
    Some((&text[..from], &text[from..to], &text[to..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn template(text: &str) -> Result<Template, TemplateError> {
        let values = [("bos_token", json!("<s>")), ("enable_thinking", json!(false))];
        let values = values.map(|(key, value)| (key.to_string(), value)).into_iter().collect();
        Template::new(
            TemplateText { path: "chat_template.jinja".into(), text: text.into() },
            values,
        )
    }

    fn turns(turns: &[(Role, &str)]) -> Vec<Message> {
        turns
            .iter()
            .map(|(role, text)| Message { role: *role, content: text.to_string() })
            .collect()
    }

    fn rendered(text: &str, conversation: &[(Role, &str)]) -> String {
        let template = template(text).unwrap_or_else(|e| panic!("{e}"));
        template.render(&turns(conversation), true).unwrap_or_else(|e| panic!("{e}"))
    }

    fn refused(text: &str, conversation: &[(Role, &str)]) -> String {
        let template = template(text).unwrap_or_else(|e| panic!("{e}"));
        let e = template.render(&turns(conversation), true).expect_err("refused");
        e.to_string()
    }

    const TALK: [(Role, &str); 4] = [
        (Role::System, "Be brief."),
        (Role::User, "Hi  "),
        (Role::Assistant, "<think>\nA greeting.\n</think>\n\nHello!"),
        (Role::User, "Why?"),
    ];

    #[test]
    fn blocks_leave_no_lines_and_a_default_stands_in_for_a_system_message() {
        let text = "{% if messages[0].role != 'system' %}\n    {{ bos_token }}Default.\n{% endif %}\n\
                    {% for m in messages %}\n[{{ m['role'] }}]{{ m.content | trim }}\n\
                    {% if not loop.last %}---\n{% endif %}\n{% endfor %}\n\
                    {% if add_generation_prompt %}[assistant]{% endif %}";
        let talk = rendered(text, &TALK[..2]);
        assert_eq!(talk, "[system]Be brief.\n---\n[user]Hi\n[assistant]");
        assert_eq!(rendered(text, &TALK[1..2]), "    <s>Default.\n[user]Hi\n[assistant]");
    }

    #[test]
    fn answers_lose_their_thoughts_as_python_would_cut_them() {
        let text = "{%- set ns = namespace(last=-1) -%}\n\
            {%- for m in messages[::-1] -%}\n\
            {%- if m.role == 'user' and ns.last < 0 -%}{%- set ns.last = messages | length - 1 - loop.index0 -%}{%- break -%}{%- endif -%}\n\
            {%- endfor -%}\n\
            {%- macro turn(role, content) -%}<|{{ role }}|>{{ content }}<|end|>{%- endmacro -%}\n\
            {%- for m in messages -%}\n\
            {%- set content = m.content if m.content is string else '' -%}\n\
            {%- if m.role == 'assistant' and loop.index0 < ns.last and '</think>' in content -%}\n\
            {%- set content = content.split('</think>')[-1].lstrip('\\n') -%}\n\
            {%- endif -%}\n\
            {{- turn(m.role, content.rstrip()) -}}\n\
            {%- endfor -%}\n\
            {%- if add_generation_prompt -%}<|assistant|>{%- if enable_thinking is defined and not enable_thinking -%}<think></think>{%- endif -%}{%- endif -%}";
        assert_eq!(
            rendered(text, &TALK),
            "<|system|>Be brief.<|end|><|user|>Hi<|end|><|assistant|>Hello!<|end|><|user|>Why?<|end|>\
             <|assistant|><think></think>"
        );
        let open = &TALK[..3];
        assert!(rendered(text, open).contains("A greeting."), "the last answer is whole");
    }

    #[test]
    fn an_exception_of_the_template_is_its_own_words() {
        let alternating = "{% for m in messages %}\
            {% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate, got ' ~ m.role) }}{% endif %}\
            {{ m.content }}{% endfor %}";
        assert_eq!(
            refused(alternating, &TALK),
            "the chat template of chat_template.jinja refuses the conversation: \
             Roles must alternate, got system"
        );
        let why = refused("{{ messages[0].content.no_such_method() }}", &TALK);
        assert!(why.contains("no_such_method") && why.lines().count() == 1, "{why}");
        let endless =
            "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}";
        assert!(refused(endless, &TALK).contains("fuel"));
        let e = template("{% for m in messages %}\n{{ m.role }").err().expect("no template");
        assert!(
            e.to_string().starts_with("the chat template of chat_template.jinja cannot be read: ")
        );
    }

    #[test]
    fn json_is_spelt_as_python_spells_it() {
        let value = "{'b': [1, 2.5, true, none], 'a': 'é <&> \"q\"'}";
        assert_eq!(
            rendered(&format!("{{{{ {value} | tojson }}}}"), &[]),
            r#"{"b": [1, 2.5, true, null], "a": "é <&> \"q\""}"#
        );
        assert_eq!(
            rendered("{{ {'a': [1]} | tojson(indent=2) }}", &[]),
            "{\n  \"a\": [\n    1\n  ]\n}"
        );
        assert_eq!(
            rendered("{{ messages[0] | tojson }}", &TALK),
            r#"{"role": "system", "content": "Be brief."}"#
        );
        let nothing = "{{ tools is none }} {{ documents is none }} {{ 'x' if tools }}";
        assert_eq!(rendered(nothing, &[]), "True True ");
    }

    #[test]
    fn dates_are_of_today_and_marks_of_answers_write_nothing() {
        let year = jiff::Zoned::now().year();
        let date = rendered("{{ strftime_now('%Y|%d %b') }}", &[]);
        assert!(
            date.starts_with(&format!("{year}|")) || date.starts_with(&format!("{}|", year + 1))
        );
        assert!(refused("{{ strftime_now('%') }}", &[]).contains("strftime_now"));
        let marked = "{% for m in messages %}\n{% if m.role == 'assistant' %}\n{%- generation -%}\n {{ m.content }}\n{%- endgeneration %}\n{% endif %}\n{% endfor %}generation";
        assert_eq!(rendered(marked, &[(Role::Assistant, "yes")]), "yesgeneration");
    }
}
