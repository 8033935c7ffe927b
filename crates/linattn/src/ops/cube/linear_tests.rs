use super::*;

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
