//! Inputs out of a seed: the same numbers everywhere, and numbers that f32 holds exactly, so that
//! a form in f32 starts from what the oracle starts from.

use crate::inputs::{Decay, Dims, Inputs, Read, Transition};
use crate::token::{add, dot, scaled, times};
use std::f64::consts::TAU;

/// A small generator of test data: SplitMix64. Equal seeds give equal numbers.
#[derive(Debug, Clone)]
pub struct Rng(u64);

impl Rng {
    /// Starts the sequence of `seed`.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Starts the sequence of `seed` for one `purpose`. What is drawn for one purpose moves nothing
    /// in another: inputs that differ in their decay share their keys.
    pub fn named(seed: u64, purpose: &str) -> Self {
        let fold = |hash, byte| mix(hash ^ u64::from(byte));
        Self(purpose.bytes().fold(mix(seed), fold))
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// Uniform between 0 and 1, both excluded; exact in f32.
    pub fn uniform(&mut self) -> f64 {
        let bits = self.next() >> 41; // 23 of them, and a half: 24 is what f32 holds
        (bits as f64 + 0.5) / (1u64 << 23) as f64
    }

    /// A whole number, both ends included.
    pub fn between(&mut self, from: usize, to: usize) -> usize {
        from + ((self.uniform() * (to - from + 1) as f64) as usize).min(to - from)
    }

    /// One of a list.
    /// # Panics
    /// If it is empty.
    pub fn of<T: Clone>(&mut self, list: &[T]) -> T {
        list[self.between(0, list.len() - 1)].clone()
    }

    /// True in that share of the calls.
    pub fn chance(&mut self, share: f64) -> bool {
        self.uniform() < share
    }

    /// Standard normal, rounded to f32.
    pub fn normal(&mut self) -> f64 {
        let radius = (-2.0 * self.uniform().ln()).sqrt();
        round(radius * (TAU * self.uniform()).cos())
    }
}

/// The finaliser of SplitMix64.
fn mix(z: u64) -> u64 {
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

fn round(x: f64) -> f64 {
    f64::from(x as f32)
}

/// Which recurrence to make inputs for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Family {
    /// [`Transition::Identity`].
    #[default]
    LinearAttention,
    /// [`Transition::Delta`].
    DeltaRule,
    /// [`Transition::LowRank`].
    LowRank,
}

/// Distribution of the log decay.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DecayLevel {
    /// There is none.
    #[default]
    None,
    /// All 0: has to give what no decay gives.
    KeepAll,
    /// Between -0.1 and -0.001; about one in sixteen near -2.
    Typical,
    /// All -50: a state of one token. Differences of sums of these overflow `exp` if formed badly.
    ForgetAll,
    /// 0, typical or -50, at random.
    Mixed,
}

impl DecayLevel {
    fn draw(self, rng: &mut Rng) -> f64 {
        match self {
            Self::None | Self::KeepAll => 0.0,
            Self::Typical if rng.uniform() < 1.0 / 16.0 => -2.0 + 0.1 * rng.normal(),
            Self::Typical => -0.001 * 100f64.powf(rng.uniform()),
            Self::ForgetAll => -50.0,
            Self::Mixed => match (3.0 * rng.uniform()) as u32 {
                0 => Self::KeepAll.draw(rng),
                1 => Self::Typical.draw(rng),
                _ => Self::ForgetAll.draw(rng),
            },
        }
    }
}

/// Distribution of the delta rule's beta, or of the in-context learning rate in the low-rank b.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Strength {
    /// All 0: nothing is erased, and the delta rule writes nothing.
    Zero,
    /// All 1: what was stored under a key is replaced.
    One,
    /// All 2: reflections, an eigenvalue of -1. Where the erase key reads before the decay (always,
    /// for the low-rank form), this can make S grow.
    Two,
    /// Uniform between 0 and 1.
    #[default]
    Typical,
}

impl Strength {
    fn draw(self, rng: &mut Rng) -> f64 {
        match self {
            Self::Zero => 0.0,
            Self::One => 1.0,
            Self::Two => 2.0,
            Self::Typical => rng.uniform(),
        }
    }
}

/// Recipe of [`Inputs::random`]. The default is linear attention without any extra.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Recipe {
    /// The recurrence.
    pub family: Family,
    /// The distribution of its log decay.
    pub decay: DecayLevel,
    /// Whether that is one number a row of S (else one a head).
    pub vector_decay: bool,
    /// Its beta or learning rate.
    pub strength: Strength,
    /// Whether erase rows are given: [`Family::DeltaRule`] only.
    pub erase: bool,
    /// Whether there is a bonus: [`Family::LinearAttention`] with [`Read::Before`] only.
    pub bonus: bool,
    /// Which state is read.
    pub read: Read,
    /// Whether there is a state before the first token.
    pub state: bool,
}

impl Recipe {
    /// `family` without any extra: no decay, reading after the write, starting from zeros.
    pub fn new(family: Family) -> Self {
        Self { family, ..Self::default() }
    }
}

/// The inputs of one seed.
struct Source {
    seed: u64,
    dims: Dims,
}

impl Inputs {
    /// Random inputs: normal, with keys and erase rows of length 1 for the delta rule. Each tensor
    /// depends on the seed, its own name and the part of the recipe about it.
    /// # Panics
    /// If there is no such recurrence.
    #[track_caller]
    pub fn random(seed: u64, dims: Dims, recipe: &Recipe) -> Self {
        let source = Source { seed, dims };
        let width = dims.key_width;
        let mut k = source.normals("k", dims.keys_len());
        if recipe.family == Family::DeltaRule {
            k = unit_rows(&k, width);
        }
        let scale = (width as f64).sqrt().recip();
        let x = Self {
            dims,
            q: source.fill("q", dims.keys_len(), |rng| scale * rng.normal()),
            v: source.normals("v", dims.values_len()),
            decay: source.decay(recipe),
            transition: source.transition(recipe, &k),
            k,
            read: recipe.read,
            bonus: recipe.bonus.then(|| source.normals("bonus", dims.heads * width)),
            state: recipe.state.then(|| source.normals("state", dims.state_len())),
        };
        x.check();
        x
    }
}

impl Source {
    fn fill(&self, name: &str, len: usize, mut draw: impl FnMut(&mut Rng) -> f64) -> Vec<f64> {
        let mut rng = Rng::named(self.seed, name);
        (0..len).map(|_| round(draw(&mut rng))).collect()
    }

    fn normals(&self, name: &str, len: usize) -> Vec<f64> {
        self.fill(name, len, Rng::normal)
    }

    fn decay(&self, recipe: &Recipe) -> Option<Decay> {
        let draw = |len| self.fill("g", len, |rng| recipe.decay.draw(rng));
        match (recipe.decay, recipe.vector_decay) {
            (DecayLevel::None, _) => None,
            (_, false) => Some(Decay::Scalar(draw(self.dims.scalars_len()))),
            (_, true) => Some(Decay::Vector(draw(self.dims.rows_len()))),
        }
    }

    #[track_caller]
    fn transition(&self, recipe: &Recipe, k: &[f64]) -> Transition {
        let strengths = |len| self.fill("strength", len, |rng| recipe.strength.draw(rng));
        let fits = !recipe.erase || recipe.family == Family::DeltaRule;
        assert!(fits, "erase rows need `Family::DeltaRule`, not {:?}", recipe.family);
        match recipe.family {
            Family::LinearAttention => Transition::Identity,
            Family::DeltaRule => Transition::Delta {
                beta: strengths(self.dims.scalars_len()),
                erase: recipe.erase.then(|| self.erase(k)),
            },
            // RWKV-7's a = -kappa and b = kappa * rate: with rates up to 1 it only ever removes.
            Family::LowRank => {
                let kappa = self.normals("kappa", self.dims.rows_len());
                let kappa = unit_rows(&kappa, self.dims.key_width);
                let b = times(&kappa, &strengths(self.dims.rows_len()));
                Transition::LowRank {
                    a: scaled(-1.0, &kappa),
                    b: b.into_iter().map(round).collect(),
                }
            }
        }
    }

    /// Erase rows of length 1 that lean toward their keys: without that, S grows token by token.
    fn erase(&self, k: &[f64]) -> Vec<f64> {
        let width = self.dims.key_width;
        let noise = unit_rows(&self.normals("erase", self.dims.rows_len()), width);
        let mut rows = scaled(0.5, &noise);
        for (n, row) in rows.chunks_exact_mut(width).enumerate() {
            let key = self.dims.key_row(n) * width;
            add(row, &k[key..key + width]);
        }
        unit_rows(&rows, width)
    }
}

/// Every row of `width`, brought to length 1 as far as f32 can.
fn unit_rows(x: &[f64], width: usize) -> Vec<f64> {
    let unit = |row: &[f64]| scaled(dot(row, row).sqrt().recip(), row);
    x.chunks_exact(width).flat_map(unit).map(round).collect()
}
