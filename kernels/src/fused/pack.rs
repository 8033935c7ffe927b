//! Matrices side by side in one launch, and one launch back: weights that read one input make one product.
//! ```text
//! y [R, C]    = [x_1 | x_2 | .. | 0]  x_i: [R, C_i], type P; y: type F, padded with columns of zeros
//! dx_i        = columns of dy         back: dy of type F, dx_i of type P
//!
//! Work:   a unit a number of y. Bytes: one read and one write of each.
//! Edges:  1 to 8 matrices of any widths, which are compiled in; R is a run-time value.
//! ```

use super::column_sums::{check_matrix, grid};
use crate::SOURCE;
use crate::buffer::{Buffer, array, buffer, whole};
use crate::pointwise::UNITS;
use crate::refusal::{Refusal, check_type};
use cubecl::ir::StorageType;
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Most matrices of a launch.
pub const MOST: usize = 8;

/// Compile-time values of the kernels.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Form {
    source: &'static str,
    widths: Vec<usize>,
    /// Columns of zeros after the last matrix.
    padding: usize,
}

impl Form {
    fn columns(&self) -> usize {
        self.widths.iter().sum::<usize>() + self.padding
    }

    /// Columns before matrix n.
    fn before(&self, n: usize) -> usize {
        self.widths[..n].iter().sum()
    }
}

/// Types of the tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Types {
    /// P, of the matrices.
    pub matrices: StorageType,
    /// F, of what they make together.
    pub packed: StorageType,
}

fn plan<R: Runtime>(
    client: &ComputeClient<R>,
    rows: usize,
    (widths, padding): (&[usize], usize),
    types: Types,
) -> Result<(Form, CubeCount), Refusal> {
    check_type(client, types.matrices)?;
    check_type(client, types.packed)?;
    let (got, most) = (widths.len(), MOST);
    if got > most {
        return Err(Refusal::TooLarge { what: "matrices to pack", got, most });
    }
    let form = Form { source: SOURCE, widths: widths.to_vec(), padding };
    check_matrix(client, rows, form.columns())?;
    let cubes = grid(client, (rows * form.columns()).div_ceil(UNITS))?;
    Ok((form, cubes))
}

/// `[R, C]` of matrices and their widths, and of `padding` columns of zeros.
///
/// # Errors
/// [`Refusal`] names what the kernel cannot take; then nothing was launched.
pub fn pack<R: Runtime>(
    client: &ComputeClient<R>,
    rows: usize,
    matrices: &[(&Handle, usize)],
    padding: usize,
    types: Types,
) -> Result<Buffer, Refusal> {
    let widths: Vec<usize> = matrices.iter().map(|(_, width)| *width).collect();
    let (form, cubes) = plan(client, rows, (&widths, padding), types)?;
    let y = buffer(client, &[rows, form.columns()], types.packed);
    let mut given = SequenceArg::new();
    for (matrix, width) in matrices {
        given.push(array(matrix, rows * width));
    }
    // SAFETY: units past the last number do nothing; the caller promises the sizes.
    #[allow(unsafe_code)]
    unsafe {
        put_together::launch_unchecked::<R>(
            client,
            cubes,
            CubeDim::new_1d(UNITS as u32),
            given,
            whole(&y),
            rows as u32,
            form,
            [types.matrices, types.packed],
        );
    }
    Ok(y)
}

/// Gradients of the matrices, `[R, C_i]`, from that of [`pack`]'s output.
///
/// # Errors
/// As [`pack`].
pub fn unpack<R: Runtime>(
    client: &ComputeClient<R>,
    rows: usize,
    (widths, padding): (&[usize], usize),
    packed: &Handle,
    types: Types,
) -> Result<Vec<Buffer>, Refusal> {
    let (form, cubes) = plan(client, rows, (widths, padding), types)?;
    let new = |width: &usize| buffer(client, &[rows, *width], types.matrices);
    let matrices: Vec<Buffer> = widths.iter().map(new).collect();
    let mut found = SequenceArg::new();
    for matrix in &matrices {
        found.push(whole(matrix));
    }
    let numbers = rows * form.columns();
    // SAFETY: as in `pack`.
    #[allow(unsafe_code)]
    unsafe {
        take_apart::launch_unchecked::<R>(
            client,
            cubes,
            CubeDim::new_1d(UNITS as u32),
            array(packed, numbers),
            found,
            rows as u32,
            form,
            [types.matrices, types.packed],
        );
    }
    Ok(matrices)
}

/// The kernel of [`pack`].
#[cube(launch_unchecked)]
fn put_together<P: Float, F: Float>(
    matrices: &Sequence<Array<P>>,
    packed: &mut Array<F>,
    rows: u32,
    #[comptime] form: Form,
    #[define(P, F)] _types: [StorageType; 2],
) {
    let columns = comptime!(form.columns());
    let (row, column) = (ABSOLUTE_POS / columns, ABSOLUTE_POS % columns);
    if row < rows as usize {
        #[unroll]
        for n in 0..comptime!(form.widths.len()) {
            let before = comptime!(form.before(n));
            let width = comptime!(form.widths[n]);
            if column >= before && column < before + width {
                let matrix = matrices.index(n);
                packed[ABSOLUTE_POS] = F::cast_from(matrix[row * width + column - before]);
            }
        }
        if column >= comptime!(form.before(form.widths.len())) {
            packed[ABSOLUTE_POS] = F::new(0.0);
        }
    }
}

/// The kernel of [`unpack`].
#[cube(launch_unchecked)]
fn take_apart<P: Float, F: Float>(
    packed: &Array<F>,
    matrices: &mut Sequence<Array<P>>,
    rows: u32,
    #[comptime] form: Form,
    #[define(P, F)] _types: [StorageType; 2],
) {
    let columns = comptime!(form.columns());
    let (row, column) = (ABSOLUTE_POS / columns, ABSOLUTE_POS % columns);
    if row < rows as usize {
        #[unroll]
        for n in 0..comptime!(form.widths.len()) {
            let before = comptime!(form.before(n));
            let width = comptime!(form.widths[n]);
            if column >= before && column < before + width {
                let matrix = matrices.index_mut(n);
                matrix[row * width + column - before] = P::cast_from(packed[ABSOLUTE_POS]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cubecl::ir::{ElemType, FloatKind};

    const F32: StorageType = StorageType::Scalar(ElemType::Float(FloatKind::F32));
    const TYPES: Types = Types { matrices: F32, packed: F32 };

    #[test]
    fn what_is_packed_comes_back() {
        crate::tests::on_wgpu::with_client(there_and_back);
    }

    #[test]
    fn what_cannot_be_packed_is_refused() {
        crate::tests::on_wgpu::with_client(|client| {
            let x = client.empty(16);
            let run = |rows, count| pack(client, rows, &vec![(&x, 1); count], 0, TYPES).err();
            let (got, most) = (MOST + 1, MOST);
            let many = Refusal::TooLarge { what: "matrices to pack", got, most };
            assert_eq!(run(1, got), Some(many));
            assert_eq!(run(0, 2), Some(Refusal::Empty { batch: 0, tokens: 2 }));
            assert_eq!(run(2, 0), Some(Refusal::Empty { batch: 2, tokens: 0 }));
        });
    }

    #[cfg(feature = "cuda")]
    #[test]
    fn what_is_packed_comes_back_on_cuda() {
        crate::tests::on_cuda::with_client(there_and_back);
    }

    fn there_and_back<R: Runtime>(client: &ComputeClient<R>) {
        let (rows, widths, padding) = (5, [3, 1, 70], 6);
        let matrix = |n: usize| -> Vec<f32> {
            (0..rows * widths[n]).map(|i| (1000 * n + i) as f32).collect()
        };
        let bytes =
            |numbers: &[f32]| -> Vec<u8> { numbers.iter().flat_map(|x| x.to_le_bytes()).collect() };
        let handles: Vec<Handle> =
            (0..3).map(|n| client.create_from_slice(&bytes(&matrix(n)))).collect();
        let given: Vec<_> = handles.iter().zip(widths).collect();
        let packed = pack(client, rows, &given, padding, TYPES).expect("a small matrix");
        let numbers = |handle: &Handle| client.read_one(handle.clone()).expect("the kernel ran");
        let want: Vec<f32> = (0..rows)
            .flat_map(|row| {
                let of = move |n: usize| {
                    let width = widths[n];
                    (0..width).map(move |c| (1000 * n + row * width + c) as f32)
                };
                (0..3).flat_map(of).chain([0.0; 6])
            })
            .collect();
        assert_eq!(numbers(&packed.handle).to_vec(), bytes(&want));
        let back =
            unpack(client, rows, (&widths, padding), &packed.handle, TYPES).expect("the same");
        for (n, found) in back.iter().enumerate() {
            assert_eq!(numbers(&found.handle).to_vec(), bytes(&matrix(n)));
        }
    }
}
