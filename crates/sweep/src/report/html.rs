//! One page for a browser, of pages in Markdown: pictures are in it, and nothing is loaded.

use std::fs;
use std::path::Path;

use data_encoding::BASE64;
use pulldown_cmark::{CowStr, Event, HeadingLevel, Options, Parser, Tag, TagEnd, html};

use crate::SweepError;
use crate::rows::replace;

const STYLE: &str = "
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff;
       max-width: 76rem; margin: 2rem auto; padding: 0 1rem; }
h1, h2, h3 { line-height: 1.2; }
section + section { border-top: 2px solid #ccc; margin-top: 3rem; padding-top: 1rem; }
.table { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; }
th, td { border: 1px solid #ccc; padding: 0.25rem 0.6rem; text-align: left; vertical-align: top; }
th { background: #f0f0f0; }
tbody tr:nth-child(even) { background: #fafafa; }
code, pre { font: 0.9em ui-monospace, monospace; background: #f4f4f4; }
pre { padding: 0.6rem; overflow-x: auto; }
img { max-width: 100%; height: auto; display: block; margin: 1rem 0; }
";

/// Writes `to`, one HTML page of all `sources`, each a file in Markdown. Their pictures become part of
/// the page; links to files beside them, which are not, become plain text.
/// # Errors
/// [`SweepError`] names a source or picture that cannot be read, or a picture of no known kind.
pub fn write_html(sources: &[impl AsRef<Path>], to: &Path) -> Result<(), SweepError> {
    let (mut contents, mut body) = (String::new(), String::new());
    for (number, source) in sources.iter().enumerate() {
        let source = source.as_ref();
        let text = fs::read_to_string(source).map_err(SweepError::io("read", source))?;
        let title = escaped(&title(&text).unwrap_or_else(|| source.display().to_string()));
        contents.push_str(&format!("<li><a href=\"#part-{number}\">{title}</a></li>\n"));
        let part = section(source, &text)?;
        body.push_str(&format!("<section id=\"part-{number}\">\n{part}</section>\n"));
    }
    let contents = match sources.len() {
        0 | 1 => String::new(),
        _ => format!("<nav><ul>\n{contents}</ul></nav>\n"),
    };
    let page = format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>linattn: report</title>\n<style>{STYLE}</style>\n</head>\n<body>\n\
         {contents}{body}</body>\n</html>\n"
    );
    replace(to, page.as_bytes())
}

/// The first heading's text.
fn title(text: &str) -> Option<String> {
    let mut events = Parser::new_ext(text, Options::empty());
    let heading =
        |event: Event| matches!(event, Event::Start(Tag::Heading { level: HeadingLevel::H1, .. }));
    events.by_ref().find(|event| heading(event.clone()))?;
    let inside = events.take_while(|event| !matches!(event, Event::End(TagEnd::Heading(_))));
    let words = inside.filter_map(|event| match event {
        Event::Text(text) | Event::Code(text) => Some(text.into_string()),
        _ => None,
    });
    Some(words.collect())
}

fn escaped(text: &str) -> String {
    let mut out = String::new();
    html::push_html(&mut out, std::iter::once(Event::Text(text.into())));
    out
}

fn section(source: &Path, text: &str) -> Result<String, SweepError> {
    let options = Options::ENABLE_TABLES | Options::ENABLE_STRIKETHROUGH;
    let mut events = vec![];
    // Of each link and picture that is open, whether its end is still to be written.
    let mut open: Vec<Option<TagEnd>> = vec![];
    for event in Parser::new_ext(text, options) {
        match event {
            // Marks of the report, and markup that is nobody's business here.
            Event::Html(_) | Event::InlineHtml(_) => {}
            Event::Start(Tag::Link { link_type, dest_url, title, id }) => {
                let kept = is_elsewhere(&dest_url) || dest_url.starts_with('#');
                open.push(kept.then_some(TagEnd::Link));
                if kept {
                    events.push(Event::Start(Tag::Link { link_type, dest_url, title, id }));
                }
            }
            Event::Start(Tag::Image { link_type, dest_url, title, id }) => {
                if is_elsewhere(&dest_url) {
                    // Nothing is loaded: the picture's text leads to it.
                    open.push(Some(TagEnd::Link));
                    events.push(Event::Start(Tag::Link { link_type, dest_url, title, id }));
                } else {
                    open.push(Some(TagEnd::Image));
                    let dest_url = CowStr::from(picture(source, &dest_url)?);
                    events.push(Event::Start(Tag::Image { link_type, dest_url, title, id }));
                }
            }
            Event::End(TagEnd::Link | TagEnd::Image) => {
                events.extend(open.pop().flatten().map(Event::End));
            }
            Event::Start(Tag::Table(alignment)) => {
                events.push(Event::Html("<div class=\"table\">".into()));
                events.push(Event::Start(Tag::Table(alignment)));
            }
            Event::End(TagEnd::Table) => {
                events.push(Event::End(TagEnd::Table));
                events.push(Event::Html("</div>\n".into()));
            }
            event => events.push(event),
        }
    }
    let mut out = String::new();
    html::push_html(&mut out, events.into_iter());
    Ok(out)
}

fn is_elsewhere(link: &str) -> bool {
    ["https://", "http://", "mailto:"].iter().any(|scheme| link.starts_with(scheme))
}

/// A picture beside its page, as an address that holds all of it.
fn picture(source: &Path, name: &str) -> Result<String, SweepError> {
    let path = source.parent().unwrap_or(Path::new("")).join(name);
    let kind = match path.extension().and_then(|end| end.to_str()) {
        Some("svg") => "svg+xml",
        Some("png") => "png",
        Some("jpg" | "jpeg") => "jpeg",
        _ => {
            let why = format!("the picture {name} has to be a .svg, .png or .jpg");
            return Err(SweepError::Readme { path: source.into(), why });
        }
    };
    let bytes = fs::read(&path).map_err(SweepError::io("read", &path))?;
    Ok(format!("data:image/{kind};base64,{}", BASE64.encode(&bytes)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = "\
# Who recalls & why?
<!-- report:begin x -->
- Runs: 3 of 3.

| model | score |
|---|---|
| `gla` | 0.5 |

![over the state](dots.svg)
![a badge](https://example.org/badge.svg)
<!-- report:end -->
See [rows](rows.csv), [the paper](https://arxiv.org/abs/2412.06464) and [below](#end).
";

    fn page(text: &str) -> Result<String, SweepError> {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("README.md"), text).unwrap();
        fs::write(folder.path().join("dots.svg"), "<svg/>").unwrap();
        let to = folder.path().join("out.html");
        let sources = vec![folder.path().join("README.md"); 2];
        write_html(&sources, &to).map(|()| fs::read_to_string(&to).unwrap())
    }

    #[test]
    fn a_page_holds_tables_and_pictures_and_loads_nothing() {
        let page = page(PAGE).unwrap();
        let section = |text: &str| assert_eq!(page.matches(text).count(), 2, "{text} in {page}");
        section("<div class=\"table\"><table>");
        section("<td><code>gla</code></td>");
        section(&format!("<img src=\"data:image/svg+xml;base64,{}\"", BASE64.encode(b"<svg/>")));
        section("<a href=\"https://example.org/badge.svg\">a badge</a>");
        section("<a href=\"https://arxiv.org/abs/2412.06464\">the paper</a>");
        section("<a href=\"#end\">below</a>");
        section("See rows, ");
        assert_eq!(page.matches("<img ").count(), 2, "no picture is loaded");
        assert!(!page.contains("report:begin") && !page.contains("rows.csv"), "{page}");
        assert!(page.contains("<a href=\"#part-1\">Who recalls &amp; why?</a>"), "{page}");
    }

    #[test]
    fn a_picture_that_is_not_there_is_named() {
        let why = |text: &str| page(text).unwrap_err().to_string();
        assert!(why("![a](none.svg)").contains("none.svg"));
        assert!(why("![a](film.mp4)").contains("film.mp4"));
    }
}
