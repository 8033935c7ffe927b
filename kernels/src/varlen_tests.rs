//! Sequences with lengths of their own in one row, against each of them in f64.

use super::*;

/// Shorter than a chunk, of one token, of whole chunks of every engine, and longer.
const LENGTHS: [usize; 7] = [33, 1, 64, 150, 5, 32, 65];

/// N + 1 offsets.
fn offsets(lengths: &[usize]) -> Vec<usize> {
    let mut all = vec![0];
    all.extend(lengths.iter().scan(0, |end, length| {
        *end += length;
        Some(*end)
    }));
    all
}

/// A row of sequences, each with a first state of its own where there are any.
fn row(recipe: &Recipe, dims: oracle::Dims, cu_seqlens: &[usize]) -> oracle::Inputs {
    let sequences = cu_seqlens.len() - 1;
    let dims = oracle::Dims { batch: 1, tokens: cu_seqlens[sequences], ..dims };
    let mut x = oracle::Inputs::random(11, dims, recipe);
    let states = oracle::Dims { batch: sequences, tokens: 1, ..dims };
    x.state = oracle::Inputs::random(12, states, recipe).state;
    x
}

/// Each sequence by itself, its numbers behind those of the one before.
fn truth(case: &Case, cu_seqlens: &[usize]) -> Truth {
    let oracle::Dims { heads, key_width, value_width, .. } = case.x.dims;
    let (memory, outputs) = (heads * key_width * value_width, heads * value_width);
    let row = oracle::Inputs { state: None, ..case.x.clone() };
    let mut of_sequences = cu_seqlens.windows(2).enumerate().map(|(n, pair)| {
        let own = n * memory..(n + 1) * memory;
        let state = case.x.state.as_ref().map(|states| states[own.clone()].to_vec());
        let x = oracle::slice_tokens(&row, pair[0], pair[1], state);
        let d_o = case.d_o[pair[0] * outputs..pair[1] * outputs].to_vec();
        let case = Case { x, rows: case.rows, d_o, d_state: case.d_state[own].to_vec() };
        case.truth()
    });
    let mut all = of_sequences.next().expect("a sequence");
    for Truth { o, state, d } in of_sequences {
        all.o.extend(o);
        all.state.extend(state);
        let to = &mut all.d;
        for (to, from) in
            [(&mut to.q, d.q), (&mut to.k, d.k), (&mut to.v, d.v), (&mut to.state, d.state)]
        {
            to.extend(from);
        }
        for (to, from) in [
            (&mut to.g, d.g),
            (&mut to.beta, d.beta),
            (&mut to.erase, d.erase),
            (&mut to.a, d.a),
            (&mut to.b, d.b),
        ] {
            to.iter_mut().for_each(|to| to.extend(from.iter().flatten()));
        }
    }
    all
}

#[track_caller]
fn hold_row<R: Runtime>(
    client: &ComputeClient<R>,
    recipe: &Recipe,
    dims: oracle::Dims,
    (rows, limits): (Rows, Limits),
) {
    let cu_seqlens = offsets(&LENGTHS);
    let case = Case::new(&row(recipe, dims, &cu_seqlens), rows, LENGTHS.len());
    let up = Uploaded::new(client, &case.x, rows);
    let planned = Chunkwise::varlen(client, up.variant, up.dims, rows.dtype(), &cu_seqlens);
    let truth = truth(&case, &cu_seqlens);
    for (name, error) in case.errors(&up, &planned.expect("it fits"), truth) {
        let outputs = ["o", "state", "o of inference", "state of inference"];
        let limit = if outputs.contains(&name) { limits.outputs } else { limits.gradients };
        let what = format!("{rows:?}, {dims:?}, {recipe:?}");
        assert!(error <= limit, "{what}: {name} is off by {error:.2e}, limit {limit:.0e}");
    }
}

/// Families, and whether the erase key has a tensor of its own.
pub(super) const FAMILIES: [(Family, bool); 4] = [
    (Family::LinearAttention, false),
    (Family::DeltaRule, false),
    (Family::DeltaRule, true),
    (Family::LowRank, false),
];

/// These families with scalar or vector decays.
pub(super) fn families<R: Runtime>(
    client: &ComputeClient<R>,
    families: &[(Family, bool)],
    vector_decays: &[bool],
) {
    for (family, erase) in families.iter().copied() {
        for vector_decay in vector_decays.iter().copied() {
            let recipe = Recipe { decay: DecayLevel::Typical, erase, ..Recipe::new(family) };
            let state = family != Family::DeltaRule || erase || !vector_decay;
            let recipe = Recipe { vector_decay, state, ..recipe };
            hold_row(client, &recipe, dims(1), (Rows::F32, F32));
        }
    }
}

/// A scalar and a vector decay in every family.
#[cfg(feature = "cuda")]
pub(super) fn every_family<R: Runtime>(client: &ComputeClient<R>) {
    families(client, &FAMILIES, &[false, true]);
}

/// Every plan of 16 bits: producer planes, several tiles of values, split-K.
#[cfg(feature = "cuda")]
pub(super) fn on_tensor_cores<R: Runtime>(client: &ComputeClient<R>) {
    for [key_width, value_width] in [[64, 64], [128, 256], [256, 64]] {
        for (n, (family, erase)) in FAMILIES.into_iter().enumerate() {
            let dims = oracle::Dims { key_width, value_width, ..dims(1) };
            let recipe = Recipe { decay: DecayLevel::Typical, state: true, ..Recipe::new(family) };
            let recipe = Recipe { vector_decay: n > 1, erase, ..recipe };
            hold_row(client, &recipe, dims, (Rows::Bf16, HALF));
        }
    }
}

pub(super) fn refusals<R: Runtime>(client: &ComputeClient<R>) {
    let x = oracle::Inputs::random(1, dims(8), &Recipe::new(Family::LinearAttention));
    let (variant, good) = (variant(&x), Dims { batch: 1, ..sizes_of(&x) });
    let refused = |dims, cu_seqlens: &[usize]| {
        let planned = Chunkwise::varlen(client, variant, dims, Rows::F32.dtype(), cu_seqlens);
        planned.err().map(|why| why.to_string())
    };
    assert_eq!(refused(good, &[0, 3, 8]), None);
    let why = "cumulative lengths have to grow from 0 to the tokens of one row";
    for (dims, cu_seqlens) in [
        (good, &[0, 3, 3, 8][..]),
        (good, &[0, 3]),
        (good, &[1, 8]),
        (good, &[]),
        (Dims { batch: 2, ..good }, &[0, 8]),
    ] {
        let got = refused(dims, cu_seqlens).expect("refused");
        assert!(got.starts_with(why), "{got}");
    }
}
