//! Text that only evaluation reads, found wherever it stands.

use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};

use crate::corpus::TextFile;

/// So many words in a row that are an essay's are no accident. Essays of one author share shorter
/// runs: thanks to the same readers, and the names of the same companies.
pub(super) const RUN: usize = 13;

/// Every run of words of the essays that evaluation reads, by its hash. Case and punctuation do not
/// count, nor does white space.
#[derive(Debug, Clone, Default)]
pub(super) struct HeldOut {
    runs: HashSet<u64>,
}

impl HeldOut {
    pub(super) fn of(files: &[TextFile]) -> Self {
        let runs = files.iter().flat_map(|file| {
            let words = words(&file.text);
            words.windows(RUN).map(hash).collect::<Vec<_>>()
        });
        Self { runs: runs.collect() }
    }

    /// The text without its words that belong to such a run, by single spaces, and the share of words
    /// that are gone.
    pub(super) fn taken_out(&self, text: &str) -> (String, f64) {
        let pieces: Vec<&str> = text.split_whitespace().collect();
        let words = words(text);
        let mut gone = vec![false; pieces.len()];
        for run in words.windows(RUN).filter(|run| self.runs.contains(&hash(run))) {
            // A piece between two words of a run, a dash for instance, belongs to it.
            gone[run[0].place..=run[RUN - 1].place].fill(true);
        }
        let share = gone.iter().filter(|&&gone| gone).count() as f64 / pieces.len().max(1) as f64;
        let kept = pieces.iter().zip(&gone).filter(|(_, gone)| !**gone).map(|(piece, _)| *piece);
        (kept.collect::<Vec<_>>().join(" "), share)
    }
}

/// A word's letters and digits, in lower case, and which piece between white space it is.
struct Word {
    letters: String,
    place: usize,
}

fn words(text: &str) -> Vec<Word> {
    let word = |(place, piece): (usize, &str)| {
        let letters = piece.chars().filter(|c| c.is_alphanumeric());
        let letters: String = letters.flat_map(char::to_lowercase).collect();
        (!letters.is_empty()).then_some(Word { letters, place })
    };
    text.split_whitespace().enumerate().filter_map(word).collect()
}

fn hash(run: &[Word]) -> u64 {
    let mut hasher = DefaultHasher::new();
    run.iter().for_each(|word| word.letters.hash(&mut hasher));
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbered(from: usize, count: usize) -> String {
        (from..from + count).map(|i| format!("w{i} ")).collect()
    }

    fn held_out(text: &str) -> HeldOut {
        HeldOut::of(&[TextFile { path: "x.txt".into(), text: text.into() }])
    }

    #[test]
    fn a_run_is_found_at_any_place_in_any_dress_and_a_shorter_one_stays() {
        let held_out = held_out(&numbered(0, 40));
        for from in 0..=40 - RUN {
            let run = numbered(from, RUN).to_uppercase().replace(' ', ",\n -- ");
            let (left, share) = held_out.taken_out(&format!("before {run} after it"));
            assert_eq!(left, "before -- after it", "from {from}");
            assert!(share > 0.8, "{share}");
            let short = format!("before {}after", numbered(from, RUN - 1));
            assert_eq!(held_out.taken_out(&short), (short, 0.0));
        }
    }

    #[test]
    fn a_part_of_an_essay_goes_and_the_rest_of_the_file_stays() {
        let held_out = held_out(&numbered(0, 100));
        let text = format!("{}{}{}", numbered(500, 55), numbered(30, 45), numbered(700, 10));
        let (left, share) = held_out.taken_out(&text);
        assert_eq!(left, format!("{}{}", numbered(500, 55), numbered(700, 10)).trim_end());
        assert!((share - 45.0 / 110.0).abs() < 1e-12, "{share}");
    }
}
