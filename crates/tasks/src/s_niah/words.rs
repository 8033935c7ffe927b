//! Words that keys are made of.

use std::path::Path;

use crate::TaskError;
use crate::corpus::read_file;

/// Adjectives, and nouns in two parts that share none.
#[derive(Debug, Clone)]
pub(super) struct Words {
    pub(super) adjectives: Vec<String>,
    /// Nouns to train with: nine of ten.
    pub(super) learnt: Vec<String>,
    /// Nouns to evaluate with: every tenth of the sorted list.
    pub(super) held_out: Vec<String>,
}

/// Every tenth noun is held out.
const HELD_OUT: usize = 10;

impl Words {
    /// The lists of a folder, or those below.
    pub(super) fn new(folder: Option<&Path>) -> Result<Self, TaskError> {
        let Some(folder) = folder else {
            return Ok(Self::split(built_in(ADJECTIVES), built_in(NOUNS)));
        };
        let adjectives = read_list(&folder.join("adjectivelist.txt"), 1)?;
        let nouns = read_list(&folder.join("nounlist.txt"), HELD_OUT)?;
        Ok(Self::split(adjectives, nouns))
    }

    fn split(adjectives: Vec<String>, nouns: Vec<String>) -> Self {
        let (mut learnt, mut held_out) = (Vec::new(), Vec::new());
        for (i, noun) in nouns.into_iter().enumerate() {
            let part = if i % HELD_OUT == HELD_OUT - 1 { &mut held_out } else { &mut learnt };
            part.push(noun);
        }
        Self { adjectives, learnt, held_out }
    }

    /// The nouns of both parts.
    pub(super) fn nouns(&self) -> impl Iterator<Item = &String> {
        self.learnt.iter().chain(&self.held_out)
    }
}

fn read_list(path: &Path, least: usize) -> Result<Vec<String>, TaskError> {
    const KEY: &str = "task.s_niah.words";
    const WANT: &str = "a folder with adjectivelist.txt and nounlist.txt, a word a line, would do \
                        (github.com/mrmaxguns/wonderwordsmodule has the published ones), or no \
                        `words` at all for a small list that is built in";
    let file = read_file(KEY, path).map_err(|error| match error {
        TaskError::File { path, why, .. } => TaskError::file(KEY, &path, format!("{why}; {WANT}")),
        other => other,
    })?;
    let words = sorted(file.text.lines());
    if words.len() < least {
        let why = format!("it has {} words, and {least} are needed; {WANT}", words.len());
        return Err(TaskError::file(KEY, path, why));
    }
    Ok(words)
}

fn built_in(words: &str) -> Vec<String> {
    sorted(words.split(' '))
}

/// The different words of a list, without white space around them.
fn sorted<'a>(words: impl Iterator<Item = &'a str>) -> Vec<String> {
    let words = words.map(str::trim).filter(|word| !word.is_empty());
    let mut words: Vec<_> = words.map(String::from).collect();
    words.sort();
    words.dedup();
    words
}

/// Adjectives, where no `words` are named.
const ADJECTIVES: &str = "\
amber ample arid autumn bitter blunt brave brief bright brisk broad calm \
candid clever cloudy coarse cosy crisp curious damp dapper deep dim distant \
dusty eager early faint fancy fierce firm fluffy foggy frank fresh frosty \
gentle glad glossy golden grand gritty hasty hazy heavy hidden hollow honest \
humble icy idle jolly keen lively lofty loyal lucky mellow mild misty \
modest muddy narrow neat noble odd pale patient plain polite proud quaint \
quick quiet rapid rare restless rough round rustic salty secret sharp shiny \
silent silver sleepy slender smooth snug solid sour spare steady steep stern \
sturdy subtle sunny swift tame tender thin tidy timid tiny tough vast \
vivid warm wary wild windy wise witty wooden young";

/// Nouns, where no `words` are named.
const NOUNS: &str = "\
acorn almond anchor anvil apron arrow attic axle badge bakery bamboo barn \
barrel basin basket beacon beaver bell bench blanket boulder bracelet bramble branch \
brick bridge broom bucket button cabin cable camel candle canoe canyon carpet \
carrot castle cellar chapel cherry chimney cliff clock clover coast cobweb comet \
compass copper cork corner cottage cradle crater creek cricket crown cup curtain \
daisy dancer desert diary dolphin donkey drawer drum eagle easel echo elbow \
engine falcon farmer feather fence ferry fiddle field flag flute forest fossil \
fountain fox gallery garden garlic gate geyser ginger glacier glove goblet grape \
gravel hammer hammock harbor harvest hedge heron hill honey hornet island ivory \
ivy jacket jar jungle kettle kitchen kite ladder lagoon lake lamp \
lantern leaf lemon letter lily lizard locket lodge magnet mango maple marble \
market meadow melon mirror mitten moss mountain nest oak oasis orchard \
otter owl oyster paddle parrot path pebble pencil pepper pigeon pillow pine \
pirate planet plum pocket pond poppy prairie puddle puppet quarry quilt rabbit \
raft raven ribbon river rocket roof rope saddle sailor satchel scarf shadow \
shell shovel sparrow spoon spring stable star stove sugar summit sunset table \
teapot temple thimble thunder ticket tiger timber tower trumpet tulip tunnel turtle \
valley velvet village violin wagon walnut wheel whistle willow window winter wizard \
yarn zebra";
