//! The next states of short convolutions that read one packed projection, in one launch.
//! ```text
//! seen_i  = [state_i | columns of x]        tokens, oldest first; zeros for a state that is not there
//! next_i  = the last W - 1 tokens of seen_i
//!
//! x:       [B, T, P]         F    its first columns are those of the convolutions, in their order
//! state_i: [B, W - 1, C_i]   F
//! next_i:  [B, W - 1, C_i]   F
//!
//! Sequences of lengths of their own lie one after another in one row, B = 1, as `cu_seqlens` says; each has
//! states of its own, [N, W - 1, C_i].
//!
//! Work:   a unit a number of all next_i. Bytes: one read and one write of each.
//! Edges:  1 to 8 convolutions of one window W, whose widths are compiled in; B, T and P are run-time values.
//! ```

use super::column_sums::{check_matrix, grid};
use super::pack::MOST;
use crate::SOURCE;
use crate::buffer::{Buffer, array, buffer, whole};
use crate::pointwise::UNITS;
use crate::refusal::{Refusal, check_type};
use cubecl::ir::StorageType;
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Sizes of the projection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dims {
    /// B.
    pub batch: usize,
    /// T.
    pub tokens: usize,
    /// P.
    pub columns: usize,
}

/// Convolutions of one window.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Convolutions {
    /// C_i.
    pub widths: Vec<usize>,
    /// W, at least 2.
    pub window: usize,
}

/// Tensors, contiguous, shaped as the module says.
#[derive(Debug, Clone, Copy)]
pub struct Inputs<'a> {
    /// The packed projection.
    pub x: &'a Handle,
    /// A state for each convolution, or none at all.
    pub states: &'a [&'a Handle],
    /// N + 1 offsets, from 0 to T: where sequences of lengths of their own begin and end in the one row.
    pub cu_seqlens: Option<&'a [usize]>,
}

/// Compile-time values of the kernel.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Form {
    source: &'static str,
    widths: Vec<usize>,
    /// W - 1.
    kept: usize,
    /// Whether there are states from before.
    given: bool,
    /// Whether sequences have lengths of their own.
    varlen: bool,
}

impl Form {
    /// All columns, C.
    fn columns(&self) -> usize {
        self.before(self.widths.len())
    }

    /// Columns before those of convolution n.
    fn before(&self, n: usize) -> usize {
        self.widths[..n].iter().sum()
    }
}

/// `next_i` for each convolution.
///
/// # Errors
/// [`Refusal`] names what the kernel cannot take; then nothing was launched.
/// # Panics
/// If `cu_seqlens` does not divide one row of T tokens.
pub fn next_states<R: Runtime>(
    client: &ComputeClient<R>,
    dims: Dims,
    convolutions: &Convolutions,
    inputs: Inputs<'_>,
    dtype: StorageType,
) -> Result<Vec<Buffer>, Refusal> {
    let Convolutions { widths, window } = convolutions;
    let Inputs { x, states, cu_seqlens } = inputs;
    let form = Form {
        source: SOURCE,
        widths: widths.clone(),
        kept: window.saturating_sub(1),
        given: !states.is_empty(),
        varlen: cu_seqlens.is_some(),
    };
    let Dims { batch, tokens, columns } = dims;
    let divides = |offsets: &[usize]| {
        batch == 1 && offsets.is_sorted() && offsets.last() == Some(&tokens) && offsets[0] == 0
    };
    assert!(cu_seqlens.is_none_or(divides), "{cu_seqlens:?} divide {dims:?}");
    let sequences = cu_seqlens.map_or(batch, |offsets| offsets.len() - 1);
    let cubes = check(client, dims, sequences, &form, dtype)?;
    let new = |width: &usize| buffer(client, &[sequences, form.kept, *width], dtype);
    let next: Vec<Buffer> = widths.iter().map(new).collect();
    let (mut given, mut found) = (SequenceArg::new(), SequenceArg::new());
    for (n, (width, next)) in widths.iter().zip(&next).enumerate() {
        // A state that is not there: any tensor of this type would do, and none is read.
        let state = states.get(n).map(|state| array(state, sequences * form.kept * width));
        given.push(state.unwrap_or_else(|| array(x, 1)));
        found.push(whole(next));
    }
    let offsets = cu_seqlens.map(|offsets| {
        let numbers: Vec<u32> = offsets.iter().map(|&offset| offset as u32).collect();
        array(&client.create_from_slice(u32::as_bytes(&numbers)), numbers.len())
    });
    // SAFETY: units past the last number do nothing; the caller promises the sizes.
    #[allow(unsafe_code)]
    unsafe {
        keep_last::launch_unchecked::<R>(
            client,
            cubes,
            CubeDim::new_1d(UNITS as u32),
            array(x, batch * tokens * columns),
            given,
            found,
            offsets.into_iter().collect(),
            SizesLaunch::new(sequences as u32, tokens as u32, columns as u32),
            form,
            dtype,
        );
    }
    Ok(next)
}

/// The grid of a launch, if the kernel takes this.
fn check<R: Runtime>(
    client: &ComputeClient<R>,
    dims: Dims,
    sequences: usize,
    form: &Form,
    dtype: StorageType,
) -> Result<CubeCount, Refusal> {
    check_type(client, dtype)?;
    let (got, most) = (form.widths.len(), MOST);
    if got > most {
        return Err(Refusal::TooLarge { what: "convolutions of a projection", got, most });
    }
    check_matrix(client, dims.batch * dims.tokens, dims.columns)?;
    check_matrix(client, sequences * form.kept, form.columns())?;
    grid(client, (sequences * form.kept * form.columns()).div_ceil(UNITS))
}

/// [`Dims`].
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Sizes {
    /// B or N.
    sequences: u32,
    tokens: u32,
    columns: u32,
}

/// The first row of a sequence, and its tokens.
#[cube]
fn rows_of(
    offsets: &Sequence<Array<u32>>,
    sequence: usize,
    sizes: &Sizes,
    #[comptime] varlen: bool,
) -> (usize, usize) {
    if comptime!(varlen) {
        let offsets = offsets.index(0usize);
        let start = offsets[sequence] as usize;
        (start, offsets[sequence + 1] as usize - start)
    } else {
        let tokens = sizes.tokens as usize;
        (sequence * tokens, tokens)
    }
}

/// The kernel.
#[cube(launch_unchecked)]
fn keep_last<F: Float>(
    x: &Array<F>,
    states: &Sequence<Array<F>>,
    next: &mut Sequence<Array<F>>,
    offsets: &Sequence<Array<u32>>,
    sizes: &Sizes,
    #[comptime] form: Form,
    #[define(F)] _dtype: StorageType,
) {
    let (columns, kept) = comptime!((form.columns(), form.kept));
    let (row, column) = (ABSOLUTE_POS / columns, ABSOLUTE_POS % columns);
    let (sequence, place) = (row / kept, row % kept);
    if sequence < sizes.sequences as usize {
        let (start, tokens) = rows_of(offsets, sequence, sizes, comptime!(form.varlen));
        #[unroll]
        for n in 0..comptime!(form.widths.len()) {
            let before = comptime!(form.before(n));
            let width = comptime!(form.widths[n]);
            if column >= before && column < before + width {
                let mut value = F::new(0.0);
                // `tokens + place` is the place in `seen`.
                if tokens + place >= kept {
                    let token = tokens + place - kept;
                    value = x[(start + token) * sizes.columns as usize + column];
                } else if comptime!(form.given) {
                    let old = sequence * kept + tokens + place;
                    value = states.index(n)[old * width + column - before];
                }
                let states = next.index_mut(n);
                states[row * width + column - before] = value;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::refusal::F32;

    /// The next states of two convolutions of window 4 over 80 columns, by their definition.
    fn truth(
        cu_seqlens: &[usize],
        widths: [usize; 2],
        x: &[f32],
        states: Option<[&[f32]; 2]>,
    ) -> [Vec<f32>; 2] {
        [0, 1].map(|n| {
            let (before, width) = (n * widths[0], widths[n]);
            let mut next = vec![];
            for (s, rows) in cu_seqlens.windows(2).enumerate() {
                let mut seen = match states {
                    Some(states) => states[n][s * 3 * width..][..3 * width].to_vec(),
                    None => vec![0.0; 3 * width],
                };
                for t in rows[0]..rows[1] {
                    seen.extend(&x[t * 80 + before..][..width]);
                }
                next.extend(&seen[seen.len() - 3 * width..]);
            }
            next
        })
    }

    fn states_are_right<R: Runtime>(client: &ComputeClient<R>) {
        let widths = [5, 70];
        let convolutions = Convolutions { widths: widths.to_vec(), window: 4 };
        let bytes =
            |numbers: &[f32]| -> Vec<u8> { numbers.iter().flat_map(|x| x.to_le_bytes()).collect() };
        let ramp =
            |from: usize, n: usize| -> Vec<f32> { (0..n).map(|i| (from + i) as f32).collect() };
        let rows = |batch: usize, tokens: usize| {
            let dims = Dims { batch, tokens, columns: 80 };
            (dims, (0..=batch).map(|b| b * tokens).collect::<Vec<_>>(), false)
        };
        let of_lengths = |cu_seqlens: &[usize]| {
            let tokens = cu_seqlens[cu_seqlens.len() - 1];
            (Dims { batch: 1, tokens, columns: 80 }, cu_seqlens.to_vec(), true)
        };
        let cases = [
            rows(1, 1),
            rows(3, 1),
            rows(2, 2),
            rows(2, 3),
            rows(2, 9),
            of_lengths(&[0, 2]),
            of_lengths(&[0, 5, 6, 8, 11, 15]),
        ];
        for (dims, cu_seqlens, varlen) in cases {
            let x = ramp(1, dims.batch * dims.tokens * 80);
            let sequences = cu_seqlens.len() - 1;
            let states = widths.map(|width| ramp(100_000 + width, sequences * 3 * width));
            let of_x = client.create_from_slice(&bytes(&x));
            let of_states = states.each_ref().map(|state| client.create_from_slice(&bytes(state)));
            let of_states = of_states.each_ref();
            let before = [&states[0][..], &states[1][..]];
            for (given, before) in [(&of_states[..], Some(before)), (&[], None)] {
                let offsets = varlen.then_some(&cu_seqlens[..]);
                let inputs = Inputs { x: &of_x, states: given, cu_seqlens: offsets };
                let next = next_states(client, dims, &convolutions, inputs, F32);
                let next = next.expect("it fits");
                for (next, want) in next.iter().zip(truth(&cu_seqlens, widths, &x, before)) {
                    let got = client.read_one(next.handle.clone()).expect("the kernel ran");
                    assert_eq!(got.to_vec(), bytes(&want), "{cu_seqlens:?}, {}", given.len());
                }
            }
        }
    }

    #[test]
    fn states_of_convolutions_are_right() {
        crate::tests::on_wgpu::with_client(states_are_right);
    }

    #[cfg(feature = "cuda")]
    #[test]
    fn states_of_convolutions_are_right_on_cuda() {
        crate::tests::on_cuda::with_client(states_are_right);
    }

    #[test]
    fn convolutions_that_keep_nothing_are_refused() {
        crate::tests::on_wgpu::with_client(|client| {
            let x = client.empty(16);
            let dims = Dims { batch: 1, tokens: 1, columns: 4 };
            let run = |widths: Vec<usize>, window| {
                let convolutions = Convolutions { widths, window };
                let inputs = Inputs { x: &x, states: &[], cu_seqlens: None };
                next_states(client, dims, &convolutions, inputs, F32).err()
            };
            assert_eq!(run(vec![4], 1), Some(Refusal::Empty { batch: 0, tokens: 4 }));
            let (got, most) = (MOST + 1, MOST);
            let many = Refusal::TooLarge { what: "convolutions of a projection", got, most };
            assert_eq!(run(vec![1; got], 2), Some(many));
        });
    }
}
