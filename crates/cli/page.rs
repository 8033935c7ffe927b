//! A text on its way from ids to what is shown.

use linattn_tasks::{TextStream, Tokenizer};

/// One text on its way from ids to what is shown.
pub(crate) struct Page<'a> {
    /// `None` for ids.
    stream: Option<TextStream<'a>>,
    stops: &'a [String],
    /// Text that may be shown, and behind it a possible beginning of a stop.
    text: String,
    shown: usize,
    stopped: bool,
}

impl<'a> Page<'a> {
    /// A text of ids where there is no tokenizer, that ends before any of `stops`.
    pub(crate) fn new(tokenizer: Option<&'a Tokenizer>, stops: &'a [String]) -> Self {
        Self {
            stream: tokenizer.map(Tokenizer::stream),
            stops,
            text: String::new(),
            shown: 0,
            stopped: false,
        }
    }

    /// Adds a token; gives what can be shown now.
    pub(crate) fn push(&mut self, id: u32) -> String {
        let new = match &mut self.stream {
            Some(stream) => stream.push(id),
            None if self.text.is_empty() => id.to_string(),
            None => format!(" {id}"),
        };
        self.add(&new, false)
    }

    /// Gives what is left to show in the end.
    pub(crate) fn finish(&mut self) -> String {
        let rest = self.stream.take().map(TextStream::finish).unwrap_or_default();
        self.add(&rest, true)
    }

    /// Whether a stop has come.
    pub(crate) fn has_stopped(&self) -> bool {
        self.stopped
    }

    /// All that was pushed, as far as a stop.
    pub(crate) fn text(&self) -> &str {
        &self.text
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
