//! Finite groups by their Cayley tables.
//! ```text
//! S<n>   permutations of 1..n, written as the list of images, in lexicographic order; 0 is the identity
//! A<n>   its even ones, in the same order
//! Z<n>   0..n, added mod n; taken as rotations of n points
//! G_x_H  pairs: g * |H| + h, acting on the points of G and of H side by side
//!
//! a o b of permutations applies b first: i -> a[b[i]].
//! ```

use std::collections::HashMap;

/// A finite group whose elements are `0..order`, 0 the identity.
#[derive(Debug, Clone)]
pub(super) struct Group {
    /// Name of each element, for people.
    names: Vec<String>,
    /// How many points each element moves.
    moved: Vec<usize>,
    /// `a o b` at `a * order + b`.
    table: Vec<u16>,
}

/// The most elements: their table is 2 MiB, what a core's own cache holds.
const MOST: usize = 1024;

impl Group {
    /// Syntax that [`Group::parse`] reads.
    pub(super) const SYNTAX: &str =
        "S<n>, A<n>, Z<n> or some of them joined by `_x_`, with 2 to 1024 elements together";

    /// The group of that name, where it has as many elements as it may.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let mut group = Self::cyclic(1);
        for factor in text.split("_x_") {
            let factor = Self::factor(factor)?;
            if group.order() * factor.order() > MOST {
                return None;
            }
            group = if group.order() == 1 { factor } else { group.times(&factor) };
        }
        (group.order() > 1).then_some(group)
    }

    fn factor(text: &str) -> Option<Self> {
        let (kind, n) = (text.get(..1)?, text.get(1..)?);
        let digits = n.bytes().all(|byte| byte.is_ascii_digit());
        let n = n.parse().ok().filter(|&n| digits && n >= 1)?;
        let permutations = || (n <= 6).then(|| permutations(n));
        match kind {
            "S" => Some(Self::of_permutations(permutations()?)),
            "A" => {
                let even = permutations()?.into_iter().filter(|p| inversions(p).is_multiple_of(2));
                Some(Self::of_permutations(even.collect()))
            }
            "Z" => (n <= MOST).then(|| Self::cyclic(n)),
            _ => None,
        }
    }

    /// A set of permutations that holds the product of any two, the identity first.
    fn of_permutations(elements: Vec<Vec<usize>>) -> Self {
        let ids: HashMap<_, _> = elements.iter().zip(0u16..).collect();
        let moved = |p: &Vec<usize>| (0..p.len()).filter(|&point| p[point] != point).count();
        let composed = |a: &[usize], b: &[usize]| b.iter().map(|&i| a[i]).collect::<Vec<_>>();
        let pairs = elements.iter().flat_map(|a| elements.iter().map(move |b| (a, b)));
        Self {
            names: elements.iter().map(|p| cycles(p)).collect(),
            moved: elements.iter().map(moved).collect(),
            table: pairs.map(|(a, b)| ids[&composed(a, b)]).collect(),
        }
    }

    fn cyclic(n: usize) -> Self {
        let pairs = (0..n).flat_map(|a| (0..n).map(move |b| (a, b)));
        Self {
            names: (0..n).map(|a| a.to_string()).collect(),
            moved: (0..n).map(|a| if a == 0 { 0 } else { n }).collect(),
            table: pairs.map(|(a, b)| ((a + b) % n) as u16).collect(),
        }
    }

    fn times(&self, other: &Self) -> Self {
        let (n, order) = (other.order(), self.order() * other.order());
        let element = |a: usize| (a / n, a % n);
        let pairs = (0..order).flat_map(|a| (0..order).map(move |b| (element(a), element(b))));
        let product = |((a, c), (b, d))| self.product(a, b) * n + other.product(c, d);
        let name = |(a, b): (usize, usize)| format!("{}:{}", self.names[a], other.names[b]);
        let moved = |(a, b): (usize, usize)| self.moved[a] + other.moved[b];
        Self {
            names: (0..order).map(element).map(name).collect(),
            moved: (0..order).map(element).map(moved).collect(),
            table: pairs.map(|pair| product(pair) as u16).collect(),
        }
    }

    pub(super) fn order(&self) -> usize {
        self.names.len()
    }

    /// `a o b`.
    pub(super) fn product(&self, a: usize, b: usize) -> usize {
        usize::from(self.table[a * self.order() + b])
    }

    pub(super) fn name(&self, element: usize) -> &str {
        &self.names[element]
    }

    /// Elements that move no more than `most` points, ascending.
    pub(super) fn moving(&self, most: usize) -> Vec<u32> {
        (0..).zip(&self.moved).filter(|(_, moved)| **moved <= most).map(|(id, _)| id).collect()
    }
}

/// The permutations of 0..n as lists of images, in lexicographic order.
fn permutations(n: usize) -> Vec<Vec<usize>> {
    let mut lists = vec![Vec::new()];
    for _ in 0..n {
        let longer = |list: &Vec<usize>| {
            let list = list.clone();
            let free = (0..n).filter(|i| !list.contains(i)).collect::<Vec<_>>();
            free.into_iter().map(move |i| [&list[..], &[i]].concat())
        };
        lists = lists.iter().flat_map(longer).collect();
    }
    lists
}

fn inversions(permutation: &[usize]) -> usize {
    let later = |(i, a): (usize, &usize)| permutation[i..].iter().filter(|b| *b < a).count();
    permutation.iter().enumerate().map(later).sum()
}

/// A permutation in cycle notation, of the points from 1: `(1 2)(3 5 4)`, or `e` if none moves.
fn cycles(permutation: &[usize]) -> String {
    let (mut seen, mut text) = (vec![false; permutation.len()], String::new());
    for start in 0..permutation.len() {
        let mut cycle = Vec::new();
        let mut point = start;
        while !std::mem::replace(&mut seen[point], true) {
            cycle.push((point + 1).to_string());
            point = permutation[point];
        }
        if cycle.len() > 1 {
            text += &format!("({})", cycle.join(" "));
        }
    }
    if text.is_empty() { "e".into() } else { text }
}
