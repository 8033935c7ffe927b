//! Inputs of a recurrence, and the sizes on which they have to agree.

use std::ops::Range;

/// Sizes that all tensors of one call share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dims {
    /// Sequences, B.
    pub batch: usize,
    /// Tokens in a sequence, T. Zero is allowed: the state then comes back as it was.
    pub tokens: usize,
    /// Heads of q and k, Hk; H is a multiple of it.
    pub key_heads: usize,
    /// Heads of everything else, H: one state each.
    pub heads: usize,
    /// Width of a key, K: the rows of a state.
    pub key_width: usize,
    /// Width of a value, V: the columns of a state.
    pub value_width: usize,
}

impl Dims {
    /// Numbers in q or k, `[B, T, Hk, K]`.
    pub fn keys_len(&self) -> usize {
        self.batch * self.tokens * self.key_heads * self.key_width
    }

    /// Numbers in v or o, `[B, T, H, V]`.
    pub fn values_len(&self) -> usize {
        self.scalars_len() * self.value_width
    }

    /// Numbers in beta or a scalar decay, `[B, T, H]`.
    pub fn scalars_len(&self) -> usize {
        self.batch * self.tokens * self.heads
    }

    /// Numbers in a vector decay, the erase rows, a or b: `[B, T, H, K]`.
    pub fn rows_len(&self) -> usize {
        self.scalars_len() * self.key_width
    }

    /// Numbers in a state, `[B, H, K, V]`.
    pub fn state_len(&self) -> usize {
        self.batch * self.heads * self.head_state_len()
    }

    /// Numbers in the state of one head, `[K, V]`.
    fn head_state_len(&self) -> usize {
        self.key_width * self.value_width
    }

    /// Every (batch row, head), as the state stores them.
    pub(crate) fn states(self) -> impl Iterator<Item = (usize, usize)> {
        (0..self.batch).flat_map(move |b| (0..self.heads).map(move |h| (b, h)))
    }

    /// Where the state `[B, H, K, V]` keeps that of (batch row, head).
    pub(crate) fn state(&self, b: usize, h: usize) -> Range<usize> {
        let start = (b * self.heads + h) * self.head_state_len();
        start..start + self.head_state_len()
    }

    /// The row of q and k, of `[B T Hk]`, that goes with row `n` of v, of `[B T H]`.
    pub(crate) fn key_row(&self, n: usize) -> usize {
        let group = self.heads / self.key_heads;
        n / self.heads * self.key_heads + n % self.heads / group
    }

    #[track_caller]
    fn check(&self) {
        let &Self { batch, tokens: _, key_heads, heads, key_width, value_width } = self;
        let empty = [batch, key_heads, heads, key_width, value_width].contains(&0);
        assert!(!empty, "only `tokens` may be 0: {self:?}");
        assert!(heads.is_multiple_of(key_heads), "{heads} heads, {key_heads} key heads");
    }
}

/// How much of its state a head keeps: natural logs, at most 0 as a rule (0 keeps all, -0.69 half).
#[derive(Debug, Clone, PartialEq)]
pub enum Decay {
    /// One number a head, `[B, T, H]`, as in Mamba-2, arXiv 2405.21060.
    Scalar(Vec<f64>),
    /// One number a row of S, `[B, T, H, K]`, as in GLA, arXiv 2312.06635.
    Vector(Vec<f64>),
}

impl Decay {
    /// The logs, whichever shape they have.
    pub fn values(&self) -> &[f64] {
        let (Self::Scalar(g) | Self::Vector(g)) = self;
        g
    }
}

/// Which state is read: the one after this token's decay, or the one before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Read {
    /// [`Transition::Identity`] outputs, and [`Transition::Delta`] erases, from the decayed state;
    /// the output also sees this token's write.
    #[default]
    After,
    /// Both take S_{t-1} as the last token left it: RWKV-6's output (arXiv 2404.05892), and erasing
    /// before the decay. The output of [`Transition::Delta`] stays after the write.
    Before,
}

/// Change of the state by one token, besides decay.
#[derive(Debug, Clone, PartialEq)]
pub enum Transition {
    /// Adds `k^T v`: linear attention with or without decay.
    Identity,
    /// Moves the value retrieved by the erase key toward v by the share beta: DeltaNet,
    /// arXiv 2406.06484; with a decay Gated DeltaNet, arXiv 2412.06464.
    Delta {
        /// The share, `[B, T, H]`: 0 to 1, or to 2 for negative eigenvalues.
        beta: Vec<f64>,
        /// Erase keys, `[B, T, H, K]`, before beta; the keys if `None`.
        erase: Option<Vec<f64>>,
    },
    /// Adds `k^T v` and `b^T (a S_{t-1})`: RWKV-7, arXiv 2503.14456. [`Read::After`] only.
    LowRank {
        /// Rows that read the state before its decay, `[B, T, H, K]`.
        a: Vec<f64>,
        /// Rows under which the retrieved value is written, `[B, T, H, K]`.
        b: Vec<f64>,
    },
}

/// Everything a recurrence takes.
#[derive(Debug, Clone, PartialEq)]
pub struct Inputs {
    /// The sizes.
    pub dims: Dims,
    /// Queries, `[B, T, Hk, K]`, already scaled (by K^-1/2 as a rule).
    pub q: Vec<f64>,
    /// Keys, `[B, T, Hk, K]`; of length 1 for [`Transition::Delta`], or S can grow without end.
    pub k: Vec<f64>,
    /// Values, `[B, T, H, V]`.
    pub v: Vec<f64>,
    /// The decay; `None` keeps all.
    pub decay: Option<Decay>,
    /// The rest of what a token does to the state.
    pub transition: Transition,
    /// Which state is read.
    pub read: Read,
    /// Weights u of the token's own key and value in its output, `[H, K]`, as in RWKV-6
    /// (arXiv 2404.05892). [`Transition::Identity`] with [`Read::Before`] only.
    pub bonus: Option<Vec<f64>>,
    /// States before the first token, `[B, H, K, V]`; zeros if `None`.
    pub state: Option<Vec<f64>>,
}

impl Inputs {
    /// The states before the first token, `[B, H, K, V]`.
    pub(crate) fn start(&self) -> Vec<f64> {
        self.state.clone().unwrap_or_else(|| vec![0.0; self.dims.state_len()])
    }

    /// Panics where the inputs do not fit together: whoever built them made a mistake.
    #[track_caller]
    pub(crate) fn check(&self) {
        let d = &self.dims;
        d.check();
        check_len("q", &self.q, d.keys_len());
        check_len("k", &self.k, d.keys_len());
        check_len("v", &self.v, d.values_len());
        check_some("bonus", &self.bonus, d.heads * d.key_width);
        check_some("state", &self.state, d.state_len());
        match &self.decay {
            None => {}
            Some(Decay::Scalar(g)) => check_len("a scalar decay", g, d.scalars_len()),
            Some(Decay::Vector(g)) => check_len("a vector decay", g, d.rows_len()),
        }
        self.check_transition();
    }

    #[track_caller]
    fn check_transition(&self) {
        let d = &self.dims;
        let before = self.read == Read::Before;
        match &self.transition {
            Transition::Identity => {
                let fits = self.bonus.is_none() || before;
                assert!(fits, "a bonus needs `Read::Before`: after its write a token sees itself");
                return;
            }
            Transition::Delta { beta, erase } => {
                check_len("beta", beta, d.scalars_len());
                check_some("erase", erase, d.rows_len());
            }
            Transition::LowRank { a, b } => {
                assert!(!before, "`Transition::LowRank` has no `Read::Before`");
                check_len("a", a, d.rows_len());
                check_len("b", b, d.rows_len());
            }
        }
        assert!(self.bonus.is_none(), "a bonus needs `Transition::Identity`");
    }
}

#[track_caller]
pub(crate) fn check_len(what: &str, got: &[f64], want: usize) {
    assert_eq!(got.len(), want, "numbers in {what}: got, wanted");
}

#[track_caller]
fn check_some(what: &str, got: &Option<Vec<f64>>, want: usize) {
    if let Some(got) = got {
        check_len(what, got, want);
    }
}

/// Tokens `from..to` of every sequence, starting from `state` (zeros if `None`, whatever `x` has).
///
/// Running the pieces of a sequence, each from the state that the last one left, has to give what
/// the whole sequence gives.
/// # Panics
/// If there are no such tokens, or the tensors of `x` do not fit together.
#[track_caller]
pub fn slice_tokens(x: &Inputs, from: usize, to: usize, state: Option<Vec<f64>>) -> Inputs {
    x.check();
    let d = x.dims;
    assert!(from <= to && to <= d.tokens, "tokens {from}..{to} of {}", d.tokens);
    let cut = |data: &Vec<f64>| cut_tokens(data, d, from, to);
    let piece = Inputs {
        dims: Dims { tokens: to - from, ..d },
        q: cut(&x.q),
        k: cut(&x.k),
        v: cut(&x.v),
        decay: x.decay.as_ref().map(|decay| match decay {
            Decay::Scalar(g) => Decay::Scalar(cut(g)),
            Decay::Vector(g) => Decay::Vector(cut(g)),
        }),
        transition: match &x.transition {
            Transition::Identity => Transition::Identity,
            Transition::Delta { beta, erase } => {
                Transition::Delta { beta: cut(beta), erase: erase.as_ref().map(cut) }
            }
            Transition::LowRank { a, b } => Transition::LowRank { a: cut(a), b: cut(b) },
        },
        read: x.read,
        bonus: x.bonus.clone(),
        state,
    };
    piece.check();
    piece
}

/// Tokens `from..to` of a tensor `[B, T, ..]`.
pub(crate) fn cut_tokens(data: &[f64], d: Dims, from: usize, to: usize) -> Vec<f64> {
    let sequence = data.len() / d.batch;
    let token = sequence.checked_div(d.tokens).unwrap_or(0);
    let piece = |b| &data[b * sequence + from * token..b * sequence + to * token];
    (0..d.batch).flat_map(piece).copied().collect()
}
