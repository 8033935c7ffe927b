//! The place of each row's largest number.
//! ```text
//! place_m = the least n with x_mn = max_n x_mn
//!
//! x:     [M, N]  F
//! place: [M]     an integer
//!
//! Work:   a cube a row. A unit has every 256th vector, and requests AHEAD of them at once. Pairs of number and place meet
//!         in shared memory.
//! Cost:   M N numbers are read once.
//! Edges:  vectors past the end repeat the last one. NaN, and what is not above the least finite f32, is never the largest;
//!         a row of nothing else has place 0.
//! ```

use super::embedding::{check_ids, check_numbers, grid, vector_width};
use crate::SOURCE;
use crate::buffer::{Buffer, array, buffer, whole};
use crate::pointwise::UNITS;
use crate::refusal::{Refusal, check_type};
use cubecl::ir::StorageType;
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Vectors that a unit requests before it uses the first.
const AHEAD: usize = 8;

/// Compile-time values of the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Form {
    source: &'static str,
    /// Numbers of a vector.
    vector: usize,
}

/// The places of the largest numbers of `rows` rows of `columns` numbers, in type `places`, an integer.
///
/// # Errors
/// [`Refusal`] names what the kernel cannot take; then nothing was launched.
pub fn argmax<R: Runtime>(
    client: &ComputeClient<R>,
    [rows, columns]: [usize; 2],
    x: &Handle,
    [dtype, places]: [StorageType; 2],
) -> Result<Buffer, Refusal> {
    check_type(client, dtype)?;
    check_ids(client, places)?;
    check_numbers(rows, columns)?;
    let vector = vector_width(client, columns, &[(x, dtype)]);
    let found = buffer(client, &[rows], places);
    // SAFETY: cubes past the last row do nothing, and vectors past a row's end are its last one.
    #[allow(unsafe_code)]
    unsafe {
        largest_of_rows::launch_unchecked::<R>(
            client,
            grid(client, rows)?,
            CubeDim::new_1d(UNITS as u32),
            array(x, rows * columns / vector),
            whole(&found),
            rows as u32,
            (columns / vector) as u32,
            Form { source: SOURCE, vector },
            dtype,
            places,
            vector,
        );
    }
    Ok(found)
}

/// The kernel.
#[cube(launch_unchecked)]
fn largest_of_rows<F: Float, I: Int, N: Size>(
    x: &Array<Vector<F, N>>,
    places: &mut Array<I>,
    rows: u32,
    vectors: u32,
    #[comptime] form: Form,
    #[define(F)] _dtype: StorageType,
    #[define(I)] _integer: StorageType,
    #[define(N)] _vector: usize,
) {
    let (row, unit) = (CUBE_POS, UNIT_POS as usize);
    let vectors = vectors as usize;
    if row < rows as usize {
        let mut best = f32::min_value();
        let mut place = 0u32;
        let mut values = Array::<Vector<F, N>>::new(AHEAD);
        for turn in 0..(vectors - 1) / comptime!(UNITS * AHEAD) + 1 {
            #[unroll]
            for n in 0..AHEAD {
                let at = turn * comptime!(UNITS * AHEAD) + comptime!(n * UNITS) + unit;
                values[n] = x[row * vectors + min(at, vectors - 1)];
            }
            #[unroll]
            for n in 0..AHEAD {
                let at = turn * comptime!(UNITS * AHEAD) + comptime!(n * UNITS) + unit;
                let first = min(at, vectors - 1) * comptime!(form.vector);
                let vector = Vector::<f32, N>::cast_from(values[n]);
                #[unroll]
                for l in 0..comptime!(form.vector) {
                    let larger = vector[l] > best;
                    best = select(larger, vector[l], best);
                    place = select(larger, (first + l) as u32, place);
                }
            }
        }
        let mut bests = SharedMemory::<f32>::new(UNITS);
        let mut found = SharedMemory::<u32>::new(UNITS);
        bests[unit] = best;
        found[unit] = place;
        sync_cube();
        #[unroll]
        for level in 1..comptime!(UNITS.ilog2() + 1) {
            let half = comptime!(UNITS >> level);
            if unit < half {
                let (other, at) = (bests[unit + half], found[unit + half]);
                let larger = other > bests[unit] || (other == bests[unit] && at < found[unit]);
                bests[unit] = select(larger, other, bests[unit]);
                found[unit] = select(larger, at, found[unit]);
            }
            sync_cube();
        }
        if unit == 0 {
            places[row] = I::cast_from(found[0]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::refusal::{F32, U32};
    use cubecl::ir::{ElemType, IntKind};

    /// By its definition.
    fn truth(rows: &[Vec<f32>]) -> Vec<i32> {
        let place = |row: &Vec<f32>| {
            let (mut best, mut place) = (f32::MIN, 0);
            for (n, &x) in row.iter().enumerate() {
                if x > best {
                    (best, place) = (x, n as i32);
                }
            }
            place
        };
        rows.iter().map(place).collect()
    }

    fn places_are_right<R: Runtime>(client: &ComputeClient<R>) {
        let i32 = StorageType::Scalar(ElemType::Int(IntKind::I32));
        for (rows, columns) in [(1, 1), (3, 7), (2, 1024), (5, 2050), (1, 32_000), (300, 12)] {
            let number = |m: usize, n: usize| ((m * 7919 + n * 104_729) % 1000) as f32 - 500.0;
            let row = |m: usize| (0..columns).map(|n| number(m, n)).collect();
            let mut x: Vec<Vec<f32>> = (0..rows).map(row).collect();
            // The first of several that are equal, the last of all, one beside NaN, and nothing else.
            x[0][columns - 1] = 1e3;
            if columns > 5 {
                let last = rows - 1;
                (x[last][3], x[last][5]) = (2e3, 2e3);
                x[last][0] = f32::NAN;
            }
            let bytes: Vec<u8> = x.iter().flatten().flat_map(|x| x.to_ne_bytes()).collect();
            let given = client.create_from_slice(&bytes);
            let got = argmax(client, [rows, columns], &given, [F32, i32]).expect("it fits");
            let got = client.read_one(got.handle).expect("the kernel ran");
            let got: Vec<i32> =
                got.as_chunks().0.iter().map(|place| i32::from_ne_bytes(*place)).collect();
            assert_eq!(got, truth(&x), "{rows} x {columns}");
        }
        let nothing = client.create_from_slice(&[0; 8]);
        let of_nan = client.create_from_slice(&f32::NAN.to_ne_bytes().repeat(2));
        let got = argmax(client, [1, 2], &of_nan, [F32, U32]).expect("it fits");
        let got = client.read_one(got.handle).expect("the kernel ran");
        assert_eq!(got.to_vec(), [0; 4]);
        for (size, types, want) in [
            ([0, 2], [F32, i32], "0 sequences"),
            ([2, 1], [F32, F32], "numbers of type"),
            ([2, 1], [i32, i32], "numbers of type"),
            ([1 << 16, 1 << 16], [F32, i32], "numbers in a tensor"),
        ] {
            let got = argmax(client, size, &nothing, types).expect_err("refused").to_string();
            assert!(got.contains(want), "{got:?} does not say {want:?}");
        }
    }

    #[test]
    fn places_of_the_largest_are_right() {
        crate::tests::on_wgpu::with_client(places_are_right);
    }

    #[cfg(feature = "cuda")]
    #[test]
    fn places_of_the_largest_are_right_on_cuda() {
        crate::tests::on_cuda::with_client(places_are_right);
    }
}
