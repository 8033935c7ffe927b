//! How the columns are shared out over units: all of it is known when a kernel is compiled.

use super::inputs::{Columns, Dims, Head, Kind, Tensors, UNROLLED};
use crate::SOURCE;
use crate::pointwise::{Activation, UNITS};

/// Most units of a run, all of one plane.
const LANES: usize = 32;
/// Fewest units of a run with a window: more and shorter runs would read the tokens before them too often.
const FEWEST: usize = 16;
/// Most columns of a part without heads that one group of units takes.
const SLICE: usize = 128;

/// A launch, forward or backward; then by which outputs have a gradient.
#[derive(Debug, Clone, Copy)]
pub(super) enum Pass<'a> {
    Forward,
    Backward { given: &'a [bool] },
}

/// The work of a part. Numbers of type f32 are kept as bits: a cache key is to be compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Role {
    /// Convolution, activation and norm; a copy is neither.
    Rows { activation: Activation, head: Option<Norm> },
    /// A sigmoid times what these bits are.
    Beta { scale: u32 },
    /// `group` columns share a rate.
    Decay { group: usize },
}

/// Bits of the numbers of [`Head`]: a cache key is to be compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Norm {
    factor: u32,
    epsilon: u32,
}

impl Norm {
    pub fn new(head: Head) -> Self {
        let [factor, epsilon] = [head.factor, head.epsilon].map(|x| (x as f32).to_bits());
        Self { factor, epsilon }
    }

    pub fn factor(self) -> f32 {
        f32::from_bits(self.factor)
    }

    pub fn epsilon(self) -> f32 {
        f32::from_bits(self.epsilon)
    }
}

/// Columns of one kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Part {
    pub role: Role,
    /// First column of x.
    pub first: usize,
    pub width: usize,
    /// Columns of x.
    pub columns: usize,
    /// Columns of all convolutions.
    pub convolved: usize,
    /// Columns of a head, or of what a team has where there are no heads.
    pub block: usize,
    /// Numbers of a vector; 1 in gates.
    pub vector: usize,
    /// Vectors of a unit.
    pub vectors: usize,
    /// Units that share a block, a power of two.
    pub team: usize,
    /// Units of a run, a power of two.
    pub lanes: usize,
    /// First cube of a chunk, and how many there are.
    pub slot: usize,
    pub slots: usize,
    /// Cubes of a chunk, of all parts.
    pub all_slots: usize,
    /// Number of this output (backward: of its gradient) among those of its type. Zeros if `None`.
    pub tensor: Option<usize>,
    pub window: usize,
    pub weighted: bool,
    pub biased: bool,
    pub has_conv_state: bool,
    /// Number of this convolution, where each has weights and a conv state of its own and leaves the next.
    pub apart: Option<usize>,
    /// Whether sequences have lengths of their own.
    pub varlen: bool,
    /// Whether sequences are a token each.
    pub single: bool,
    /// Whether planes can add up.
    pub planes: bool,
    /// Whether gates reach numbers of x through a view of their own.
    pub numbers: bool,
    /// First column of the sums of gradients, columns from one sum to the next, and in all.
    pub sums: usize,
    pub sum_stride: usize,
    pub all_sums: usize,
}

impl Part {
    pub fn is_gate(&self) -> bool {
        !matches!(self.role, Role::Rows { .. })
    }

    pub fn activation(&self) -> Activation {
        match self.role {
            Role::Rows { activation, .. } => activation,
            _ => Activation::Identity,
        }
    }

    pub fn norm(&self) -> Option<Norm> {
        match self.role {
            Role::Rows { head, .. } => head,
            _ => None,
        }
    }

    /// Columns of x that share a rate of decay.
    pub fn group(&self) -> usize {
        match self.role {
            Role::Decay { group } => group,
            _ => 1,
        }
    }

    pub fn scale(&self) -> f32 {
        match self.role {
            Role::Beta { scale } => f32::from_bits(scale),
            _ => 1.0,
        }
    }

    pub fn is_decay(&self) -> bool {
        matches!(self.role, Role::Decay { .. })
    }

    /// Which of the weights, and of the conv states, is this convolution's.
    pub fn own_tensor(&self) -> usize {
        self.apart.unwrap_or(0)
    }

    /// The part's first column in its weights and conv states, and how many columns they have.
    pub fn in_tensor(&self) -> (usize, usize) {
        match self.apart {
            Some(_) => (0, self.width),
            None => (self.first, self.convolved),
        }
    }

    /// Columns of a unit.
    pub fn own(&self) -> usize {
        self.vectors * self.vector
    }

    /// Tokens before a run that it sees.
    pub fn before(&self) -> usize {
        self.window - 1
    }

    /// Tokens that a unit requests at once.
    pub fn tile(&self, backward: bool) -> usize {
        match (self.window <= UNROLLED && !self.single, backward) {
            (false, _) => 1,
            (true, false) => (16 / self.own()).clamp(1, 4),
            (true, true) => (8 / self.own()).clamp(1, 2),
        }
    }

    /// Runs of a cube.
    pub fn runs(&self) -> usize {
        UNITS / self.lanes
    }

    /// Columns of a cube.
    pub fn span(&self) -> usize {
        self.lanes / self.team * self.block
    }

    /// Whether every unit of every cube has columns, as many as the others.
    pub fn exact(&self) -> bool {
        self.block == self.team * self.own() && self.width.is_multiple_of(self.span())
    }

    /// Whether loops over the window are written out.
    pub fn written_out(&self) -> bool {
        self.window <= UNROLLED
    }

    /// Whether the gradient depends on x.
    pub fn reads_x(&self) -> bool {
        self.weighted || self.activation() != Activation::Identity || self.norm().is_some()
    }

    /// Gradients that are added up over tokens, each of as many numbers as a unit has.
    pub fn sum_count(&self) -> usize {
        match self.role {
            Role::Rows { .. } => {
                self.window * usize::from(self.weighted) + usize::from(self.biased)
            }
            Role::Beta { .. } => 0,
            Role::Decay { .. } => 2,
        }
    }

    /// Numbers in shared memory.
    fn shared(&self, backward: bool) -> usize {
        let sums = if self.norm().is_some() && self.team > 1 && !self.planes {
            UNITS * self.tile(backward) * (1 + usize::from(backward))
        } else {
            0
        };
        let staged = if backward && self.sum_count() > 0 { UNITS * self.own() } else { 0 };
        sums.max(staged)
    }
}

/// Compile-time values of a kernel.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Form {
    pub source: &'static str,
    pub parts: Vec<Part>,
    /// P, columns of x, and C, of all convolutions.
    pub columns: usize,
    pub convolved: usize,
    /// Numbers of a vector.
    pub vector: usize,
    /// Cubes of a chunk.
    pub slots: usize,
    /// Numbers in shared memory, at least 1.
    pub shared: usize,
    /// Columns of the sums of gradients.
    pub sums: usize,
    backward: bool,
}

impl Form {
    pub fn new(
        dims: Dims,
        columns: &[Columns],
        x: &Tensors<'_>,
        pass: Pass<'_>,
        widest: usize,
        planes: bool,
    ) -> Self {
        let (all, convolved) = (
            columns.iter().map(|part| part.width).sum(),
            columns.iter().filter(|part| part.is_conv()).map(|part| part.width).sum(),
        );
        let mut form = Self {
            source: SOURCE,
            parts: vec![],
            columns: all,
            convolved,
            vector: vector(columns, all, widest),
            slots: 0,
            shared: 1,
            sums: 0,
            backward: matches!(pass, Pass::Backward { .. }),
        };
        let mut first = 0;
        for (n, part) in columns.iter().enumerate() {
            let shared_out = form.part(dims, part, first, x, planes);
            let apart = (x.apart.is_some() && part.is_conv()).then_some(n);
            let tensor = match pass {
                Pass::Forward => Some(nth(columns, n, &[])),
                Pass::Backward { given } => given[n].then(|| nth(columns, n, given)),
            };
            form.slots += shared_out.slots;
            form.parts.push(Part { tensor, apart, ..shared_out });
            first += part.width;
        }
        form.finish(x);
        form
    }

    /// A part, but for what depends on the others.
    fn part(
        &self,
        dims: Dims,
        part: &Columns,
        first: usize,
        x: &Tensors<'_>,
        planes: bool,
    ) -> Part {
        let conv = part.is_conv();
        let window = if conv { dims.window } else { 1 };
        let role = match part.kind {
            Kind::Conv { activation, head } => Role::Rows { activation, head: head.map(Norm::new) },
            Kind::Copy => Role::Rows { activation: Activation::Identity, head: None },
            Kind::Beta { scale } => Role::Beta { scale: (scale as f32).to_bits() },
            Kind::LogDecay { heads } => Role::Decay { group: part.width / heads },
        };
        let vector = if part.is_gate() { 1 } else { self.vector };
        let block = match part.kind {
            Kind::Conv { head: Some(head), .. } => head.width,
            _ if part.is_gate() => part.width.min(LANES),
            _ => part.width.min(SLICE),
        };
        let all = block / vector;
        let vectors = all.div_ceil(LANES);
        let team = all.div_ceil(vectors).next_power_of_two();
        let blocks = part.width.div_ceil(block);
        let fewest = if window > 1 { FEWEST } else { 1 };
        let lanes = (team * blocks.next_power_of_two()).clamp(fewest, LANES);
        let slots = blocks.div_ceil(lanes / team);
        Part {
            role,
            first,
            width: part.width,
            columns: self.columns,
            convolved: self.convolved,
            block,
            vector,
            vectors,
            team,
            lanes,
            slot: self.slots,
            slots,
            all_slots: 0,
            tensor: None,
            window,
            weighted: conv && !x.weights().is_empty(),
            biased: conv && !x.biases().is_empty(),
            has_conv_state: conv && window > 1 && !x.conv_states().is_empty(),
            apart: None,
            varlen: x.cu_seqlens.is_some(),
            single: dims.tokens == 1,
            planes,
            numbers: self.vector > 1,
            sums: 0,
            sum_stride: 0,
            all_sums: 0,
        }
    }

    /// Offsets of parts among each other. The sums: W C of weights, C of the bias, then of `dt_bias` and, by
    /// columns, of `a_log`.
    fn finish(&mut self, x: &Tensors<'_>) {
        let (backward, convolved) = (self.backward, self.convolved);
        let conv = self.parts.iter().filter(|part| part.weighted || part.biased);
        let decays = conv.map(Part::sum_count).max().unwrap_or(0) * convolved;
        let steps = self.parts.iter().find(|part| part.is_decay()).map_or(0, |part| part.width);
        debug_assert_eq!(x.a_log.is_some(), steps > 0);
        self.sums = decays + 2 * steps;
        self.shared = self.parts.iter().map(|part| part.shared(backward)).max().unwrap_or(0).max(1);
        for part in &mut self.parts {
            part.all_slots = self.slots;
            part.all_sums = self.sums;
            (part.sums, part.sum_stride) =
                if part.is_decay() { (decays, steps) } else { (part.first, convolved) };
        }
    }

    /// Whether x has a second view, of single numbers.
    pub fn has_numbers(&self) -> bool {
        self.vector > 1 && self.parts.iter().any(Part::is_gate)
    }

    /// Tensors of a launch, at most.
    pub fn bindings(&self, x: &Tensors<'_>) -> usize {
        let rates = [x.a_log, x.dt_bias].into_iter().flatten().count();
        let convolutions = [x.weights(), x.biases(), x.conv_states()]
            .iter()
            .map(|tensors| tensors.len())
            .sum::<usize>();
        let next = x.apart.map_or(0, |apart| apart.weights.len());
        let inputs = rates + convolutions + next;
        let views = 1 + usize::from(self.has_numbers());
        let gradients = if self.backward { views + 2 } else { 0 };
        let table = usize::from(x.cu_seqlens.is_some());
        // One more has the sizes.
        1 + views + inputs + table + self.parts.len() + gradients
    }
}

/// How many parts before the `n`th have outputs of the same type (and are `given`, if anything is).
fn nth(columns: &[Columns], n: usize, given: &[bool]) -> usize {
    let gates = columns[n].is_gate();
    let before = columns[..n].iter().enumerate();
    before
        .filter(|(m, part)| part.is_gate() == gates && given.get(*m).is_none_or(|given| *given))
        .count()
}

/// The longest vector of up to `widest` numbers that cuts no part of rows and no head in two.
fn vector(columns: &[Columns], all: usize, widest: usize) -> usize {
    let divides = |vector: &usize| {
        let mut first = 0;
        all.is_multiple_of(*vector)
            && columns.iter().all(|part| {
                let start = first;
                first += part.width;
                let head = match part.kind {
                    Kind::Conv { head: Some(head), .. } => head.width,
                    _ => part.width,
                };
                part.is_gate() || (start | part.width | head).is_multiple_of(*vector)
            })
    };
    [4, 2].into_iter().filter(|vector| *vector <= widest).find(divides).unwrap_or(1)
}
