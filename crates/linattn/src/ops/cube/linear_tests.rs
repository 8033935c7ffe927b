use super::*;

const H200: Device = Device { multiprocessors: 132, shared_memory: 232_448 };
const BF16: StorageType = StorageType::Scalar(ElemType::Float(FloatKind::BF16));

fn forward(rows: usize, inputs: usize, outputs: usize, dtype: StorageType) -> Problem {
    let aligned = [inputs, outputs].iter().all(|width| (width * dtype.size()).is_multiple_of(16));
    let (lhs, rhs) = (MatrixLayout::RowMajor, MatrixLayout::RowMajor);
    Problem { batch: 1, m: rows, n: outputs, k: inputs, lhs, rhs, dtype, aligned }
}

#[test]
fn the_layers_of_a_small_model_waste_few_columns() {
    let [qkv, mlp] = [516, 704].map(|outputs| forward(65_536, 128, outputs, BF16));
    assert_eq!(choose(&qkv, H200), Some((Reader::Simple, ODD)));
    assert_eq!(choose(&mlp, H200), Some((Reader::DoubleAsync, ODD)));
}

#[test]
fn a_wide_layer_takes_the_tiling_with_the_least_traffic() {
    let wide = forward(16_384, 2048, 2048, BF16);
    assert_eq!(choose(&wide, H200), Some((Reader::DoubleAsync, SQUARE)));
}

#[test]
fn few_rows_take_small_tiles() {
    let few = forward(2048, 64, 270, F32);
    assert_eq!(choose(&few, H200).map(|(_, tiling)| tiling), Some(SMALL));
}

#[test]
fn what_the_shared_memory_does_not_hold_is_left_to_cubek() {
    let small = Device { shared_memory: 48 << 10, ..H200 };
    assert_eq!(choose(&forward(16_384, 2048, 2048, BF16), small), None);
}

#[test]
fn double_precision_is_left_to_cubek() {
    let f64 = StorageType::Scalar(ElemType::Float(FloatKind::F64));
    assert_eq!(choose(&forward(16_384, 128, 128, f64), H200), None);
}

#[test]
fn slices_give_every_multiprocessor_a_cube_and_no_more() {
    assert_eq!(slices(65_536, 128, 516, 132), 32);
    assert_eq!(slices(65_536, 352, 128, 132), 64);
    assert_eq!(slices(16_384, 128, 8192, 132), 4);
    assert_eq!(slices(16_384, 2048, 2048, 132), 1);
}

#[test]
fn slices_are_not_shorter_than_pays() {
    assert_eq!(slices(2048, 64, 270, 132), 8);
    assert_eq!(slices(100, 64, 64, 132), 1);
}
