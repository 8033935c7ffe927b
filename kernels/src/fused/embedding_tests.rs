//! Look-ups and their gradients against f64 sums.

use super::*;
use crate::tests::Rows;
use linattn_oracle::{Rng, assert_close};

const I32: StorageType = StorageType::Scalar(ElemType::Int(IntKind::I32));

/// A device, and the type of rows.
struct Case<'a, R: Runtime> {
    client: &'a ComputeClient<R>,
    rows: Rows,
}

impl<R: Runtime> Case<'_, R> {
    fn put(&self, values: &[f64]) -> Handle {
        self.client.create_from_slice(&self.rows.bytes(values))
    }

    fn put_ids(&self, ids: &[i32]) -> Handle {
        let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        self.client.create_from_slice(&bytes)
    }

    fn bytes(&self, buffer: &Buffer) -> Vec<u8> {
        self.client.read_one(buffer.handle.clone()).expect("the kernels ran").to_vec()
    }

    /// Numbers from N(0, 1), as this type holds them.
    fn draw(&self, name: &str, numbers: usize) -> Vec<f64> {
        let mut rng = Rng::named(3, name);
        let mut values = (0..numbers).map(|_| rng.normal()).collect::<Vec<_>>();
        self.rows.round(&mut values);
        values
    }
}

/// `test` in every type that the device has.
fn everywhere<R: Runtime>(client: &ComputeClient<R>, test: impl Fn(&Case<'_, R>)) {
    for rows in [Rows::F32, Rows::F16, Rows::Bf16] {
        if check_type(client, rows.dtype()).is_ok() {
            test(&Case { client, rows });
        }
    }
}

/// How often ids occur.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Skew {
    /// Equally often.
    None,
    /// Half of all positions have the same id.
    Half,
    /// Every position has another one, in rising order.
    Own,
    /// Some are no ids.
    Invalid,
}

fn ids(dims: Dims, skew: Skew) -> Vec<i32> {
    let mut rng = Rng::named(5, "ids");
    let mut any = |below: usize| ((rng.normal().abs() * 1e6) as usize % below) as i32;
    (0..dims.rows)
        .map(|n| match skew {
            Skew::None => any(dims.vocab),
            Skew::Half if n % 2 == 0 => dims.vocab as i32 / 2,
            Skew::Half => any(dims.vocab),
            Skew::Own => (n * dims.vocab / dims.rows) as i32,
            Skew::Invalid if n % 3 == 0 => [-1, dims.vocab as i32, i32::MIN][n / 3 % 3],
            Skew::Invalid => any(dims.vocab),
        })
        .collect()
}

const fn dims(rows: usize, vocab: usize, width: usize) -> Dims {
    Dims { rows, vocab, width }
}

fn gather_is_right<R: Runtime>(case: &Case<'_, R>, dims: Dims, out: Rows) {
    let table = case.draw("table", dims.vocab * dims.width);
    let ids = ids(dims, Skew::None);
    let types = Types { rows: case.rows.dtype(), ids: I32, out: out.dtype() };
    let y = gather(case.client, &case.put(&table), &case.put_ids(&ids), dims, types)
        .expect("nothing is wrong with it");
    let mut want: Vec<f64> = ids
        .iter()
        .flat_map(|id| table[*id as usize * dims.width..][..dims.width].to_vec())
        .collect();
    out.round(&mut want);
    let limit = if out == Rows::F32 { 0.0 } else { 8e-3 };
    assert_eq!(y.shape, [dims.rows, dims.width]);
    let got = out.numbers(&case.bytes(&y));
    assert_close(&format!("{dims:?}, {:?} to {out:?}", case.rows), &want, &got, limit);
}

fn invalid_ids_give_nan<R: Runtime>(case: &Case<'_, R>) {
    let dims = dims(9, 5, 8);
    let table = case.put(&vec![1.0; 40]);
    let types = Types { rows: case.rows.dtype(), ids: I32, out: case.rows.dtype() };
    let ids = ids(dims, Skew::Invalid);
    let y = gather(case.client, &table, &case.put_ids(&ids), dims, types).expect("it runs");
    for (n, row) in case.rows.numbers(&case.bytes(&y)).chunks_exact(8).enumerate() {
        assert!(row.iter().all(|x| x.is_nan() == (n % 3 == 0)), "row {n}: {row:?}");
    }
}

fn gradient_is_right<R: Runtime>(case: &Case<'_, R>, dims: Dims, skew: Skew, out: Rows) {
    let d_y = case.draw("d_y", dims.rows * dims.width);
    let ids = ids(dims, skew);
    let types = Types { rows: case.rows.dtype(), ids: I32, out: out.dtype() };
    let (on_d_y, on_ids) = (case.put(&d_y), case.put_ids(&ids));
    let run = || {
        let sums = table_gradient(case.client, &on_d_y, &on_ids, dims, types)
            .expect("nothing is wrong with it");
        assert_eq!(sums.shape, [dims.vocab, dims.width]);
        case.bytes(&sums)
    };
    let mut want = vec![0.0; dims.vocab * dims.width];
    for (id, row) in ids.iter().zip(d_y.chunks_exact(dims.width)) {
        if (0..dims.vocab as i32).contains(id) {
            let sums = &mut want[*id as usize * dims.width..][..dims.width];
            sums.iter_mut().zip(row).for_each(|(sum, x)| *sum += x);
        }
    }
    let limit = if out == Rows::F32 { 1e-5 } else { 8e-3 };
    let what = format!("{dims:?}, {skew:?}, {:?} to {out:?}", case.rows);
    let got = run();
    assert_close(&what, &want, &out.numbers(&got), limit);
    assert!(got == run(), "{what}: the same bits");
}

/// Table rows and columns in one tile and in several, one split and many, blocks that are full and not.
const GRADIENTS: [(Dims, Skew); 9] = [
    (dims(1, 1, 1), Skew::None),
    (dims(70, 3, 5), Skew::None),
    (dims(300, 50, 64), Skew::Invalid),
    (dims(2100, 16, 32), Skew::Half),
    (dims(2500, 300, 40), Skew::Half),
    (dims(64, 200, 96), Skew::Own),
    (dims(1500, 700, 20), Skew::None),
    (dims(40, 30, 300), Skew::None),
    (dims(130, 20, 256), Skew::Half),
];

#[test]
fn sizes_that_no_index_holds_are_refused() {
    assert_eq!(check_numbers(0, 5), Err(Refusal::Empty { batch: 0, tokens: 5 }));
    assert!(check_numbers(1 << 16, 1 << 16).is_err(), "indices of 33 bits");
    assert!(check_numbers(65_535, 65_537).is_ok(), "all of 32 bits");
}

#[test]
fn splits_are_many_where_rows_are() {
    let form = |units, tile| Form { source: "", units, tile };
    let splits = |form: Form, dims: Dims| dims.rows.div_ceil(form.share(dims));
    assert_eq!(splits(form(128, 32), dims(65_536, 8192, 128)), 16);
    assert_eq!(splits(form(128, 16), dims(16_384, 16, 128)), 256);
    assert_eq!(splits(form(256, 16), dims(65_536, 8192, 512)), 16, "none longer than 4096");
    assert_eq!(splits(form(256, 16), dims(65_536, 50_000, 2048)), 1);
    assert_eq!(splits(form(128, 32), dims(2048, 16_384, 128)), 1, "more rows than positions");
    assert_eq!(splits(form(32, 1), dims(1, 1, 1)), 1);
}

#[test]
fn tiles_are_as_large_as_shared_memory_allows() {
    let tile = |memory, dims| {
        let form = Form::new(dims, memory)?;
        assert!(form.shared_memory() <= memory, "{form:?}");
        Some([form.units, form.tile])
    };
    let table = dims(2048, 8192, 128);
    assert_eq!(tile(227 << 10, table), Some([128, 32]));
    assert_eq!(tile(32 << 10, table), Some([128, 32]));
    assert_eq!(tile(16 << 10, table), Some([128, 20]));
    assert_eq!(tile(8 << 10, table), None, "the list alone takes half");
    assert_eq!(tile(8 << 10, dims(2048, 3, 128)), Some([128, 3]), "a small table");
}

/// The tests of one device, whose client `with_client` has.
macro_rules! each_kernel {
    () => {
        #[test]
        fn rows_are_looked_up() {
            with_client(|client| {
                everywhere(client, |case| {
                    for dims in [dims(1, 1, 1), dims(300, 7, 12), dims(33, 90, 128)] {
                        gather_is_right(case, dims, Rows::F32);
                        gather_is_right(case, dims, case.rows);
                    }
                    if case.rows != Rows::F32 {
                        let single = Case { client, rows: Rows::F32 };
                        gather_is_right(&single, dims(300, 7, 12), case.rows);
                    }
                    invalid_ids_give_nan(case);
                });
            });
        }

        #[test]
        fn gradients_of_tables_are_sums_of_rows() {
            with_client(|client| {
                everywhere(client, |case| {
                    for (dims, skew) in GRADIENTS {
                        gradient_is_right(case, dims, skew, Rows::F32);
                    }
                    gradient_is_right(case, GRADIENTS[2].0, Skew::Half, case.rows);
                    gradient_is_right(case, GRADIENTS[6].0, Skew::Half, case.rows);
                });
            });
        }

        #[test]
        fn types_that_are_none_of_ids_are_refused() {
            with_client(|client| {
                let (f32, dims) = (Rows::F32.dtype(), dims(1, 1, 1));
                let handle = client.create_from_slice(&[0; 4]);
                let types = Types { rows: f32, ids: f32, out: f32 };
                let refusal = gather(client, &handle, &handle, dims, types).unwrap_err();
                assert_eq!(refusal, Refusal::Type { got: f32 });
                let types = Types { rows: I32, ids: I32, out: f32 };
                let refusal = table_gradient(client, &handle, &handle, dims, types).unwrap_err();
                assert_eq!(refusal, Refusal::Type { got: I32 });
            });
        }
    };
}

#[cfg(feature = "cuda")]
mod on_cuda {
    use super::*;
    use crate::tests::on_cuda::with_client;

    each_kernel!();
}

mod on_wgpu {
    use super::*;
    use crate::tests::on_wgpu::with_client;

    each_kernel!();
}
