//! Matrices of whole numbers: weights that only decode, at a byte or half a byte each.
//! ```text
//! W[r, c] = s[r, c / 32] q[r, c]      q: -127 to 127, or -7 to 7; a scale s for each 32 numbers of a row
//! y[r]    = sum_c W[r, c] x[c]        read from memory: q and s alone
//! ```
//! Rows are a layer's outputs and columns its inputs; zeros fill the last group of a row up. Eight bits cost 9 bits a
//! number with the scales, four bits 5.

use super::tensors::{primitive, tensor};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::ops::{FloatTensor, IntTensor};
use burn::tensor::quantization::{
    BlockSize, QuantLevel, QuantScheme, QuantStore, QuantValue, QuantizedBytes,
};
use burn::tensor::{Bytes, DType, Int, Tensor, TensorData};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Numbers of a row that share a scale.
pub const GROUP: usize = 32;
/// Half of a group.
const HALF: usize = GROUP / 2;

/// Bits of a quantized number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WeightBits {
    /// A byte each.
    Int8,
    /// Two to a byte.
    Int4,
}

impl WeightBits {
    /// The largest number.
    pub fn largest(self) -> i8 {
        match self {
            Self::Int8 => 127,
            Self::Int4 => 7,
        }
    }

    /// How many.
    pub fn count(self) -> usize {
        match self {
            Self::Int8 => 8,
            Self::Int4 => 4,
        }
    }

    /// Words of a row of so many numbers.
    fn words(self, columns: usize) -> usize {
        groups(columns) * self.count()
    }

    /// As Burn says it, in words of 32 bits, which all its backends keep.
    fn scheme(self) -> QuantScheme {
        let value = match self {
            Self::Int8 => QuantValue::Q8S,
            Self::Int4 => QuantValue::Q4S,
        };
        QuantScheme::default()
            .with_value(value)
            .with_level(QuantLevel::Block(BlockSize::new([GROUP as u8])))
            .with_store(QuantStore::PackedU32(0))
    }
}

/// Numbers that are worth a thread of their own to round.
const FEWEST_ROUNDED: usize = 1 << 16;

/// Groups of a row of so many numbers.
fn groups(columns: usize) -> usize {
    columns.div_ceil(GROUP)
}

/// Whole numbers of a matrix, row after row of whole groups, and a scale for each group.
struct Rounded {
    numbers: Vec<i8>,
    scales: Vec<f32>,
}

/// Rounds a group, whose last numbers may be missing; gives its scale.
fn round_group(group: &[f32], numbers: &mut [i8; GROUP], bits: WeightBits) -> f32 {
    let most = group.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
    // A group of zeros has any scale.
    let largest = f32::from(bits.largest());
    let scale = if most > 0.0 { most / largest } else { 1.0 };
    for (number, x) in numbers.iter_mut().zip(group) {
        // Rounded as `round` does, but several numbers at once.
        let whole = (x / scale).clamp(-largest, largest);
        *number = (whole + 0.5_f32.copysign(whole)) as i32 as i8;
    }
    scale
}

impl Rounded {
    /// Of rows of so many columns, dealt out among the machine's threads. The largest number of a group takes the largest
    /// place.
    fn new(matrix: &[f32], columns: usize, bits: WeightBits) -> Self {
        let (rows, across) = (matrix.len() / columns, groups(columns));
        let mut numbers = vec![0; rows * across * GROUP];
        let mut scales = vec![0.0; rows * across];
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let each = rows.div_ceil(threads).max(FEWEST_ROUNDED.div_ceil(columns)).max(1);
        let parts = matrix.chunks(each * columns).zip(numbers.chunks_mut(each * across * GROUP));
        std::thread::scope(|threads| {
            for ((matrix, numbers), scales) in parts.zip(scales.chunks_mut(each * across)) {
                let groups = matrix.chunks_exact(columns).flat_map(|row| row.chunks(GROUP));
                let places = numbers.as_chunks_mut::<GROUP>().0.iter_mut().zip(scales);
                threads.spawn(|| {
                    for (group, (numbers, scale)) in groups.zip(places) {
                        *scale = round_group(group, numbers, bits);
                    }
                });
            }
        });
        Self { numbers, scales }
    }

    /// As Burn keeps a quantized tensor, whose rows are whole groups.
    fn data(self, [rows, columns]: [usize; 2], bits: WeightBits) -> TensorData {
        let pair = |pair: &[i8]| (pair[0] & 15) as u8 | ((pair[1] & 15) as u8) << 4;
        let bytes: Vec<u8> = match bits {
            WeightBits::Int8 => self.numbers.iter().map(|&x| x as u8).collect(),
            WeightBits::Int4 => self.numbers.chunks_exact(2).map(pair).collect(),
        };
        let scales = self.scales.iter().map(|scale| scale.to_bits());
        let all: Vec<u32> = words(&bytes).chain(scales).collect();
        let size = [rows, groups(columns) * GROUP];
        TensorData::from_bytes(Bytes::from_elems(all), size, DType::QFloat(bits.scheme()))
    }
}

/// A matrix of whole numbers with their scales, on a device. Copies share it.
#[derive(Debug, Clone)]
pub struct QuantizedMatrix<B: Backend> {
    size: [usize; 2],
    bits: WeightBits,
    /// Read for every token: copies of tensors would be a part of its time.
    parts: Arc<Parts<B>>,
}

/// A matrix's numbers and scales, of one dimension each: a device may leave gaps between the rows of a matrix.
#[derive(Debug)]
struct Parts<B: Backend> {
    /// Row after row, numbers in words of 32 bits. Of eight bits one follows another. Of four bits a group's first half
    /// is in the low nibbles of its 16 bytes, counted from -8.
    values: IntTensor<B>,
    /// Row after row, f32.
    scales: FloatTensor<B>,
}

/// Whether a matrix of so many columns is worth quantizing: a scale serves most of a group.
pub(crate) fn quantizes(columns: usize) -> bool {
    columns >= GROUP
}

impl<B: Backend> QuantizedMatrix<B> {
    /// Quantises `[rows, columns]`, on the host.
    /// # Panics
    /// If there are no columns.
    pub fn quantize(matrix: Tensor<B, 2>, bits: WeightBits) -> Self {
        let (size, device) = (matrix.dims(), matrix.device());
        assert!(size[1] > 0, "a matrix of no columns has no groups");
        Self::of_rounded(rounded(matrix, bits), size, bits, &device)
    }

    /// A matrix of so many columns that [`quantized_tensor`] has made; nothing for any other.
    pub(crate) fn of_tensor(matrix: Tensor<B, 2>, columns: usize) -> Option<Self> {
        let device = matrix.device();
        let data = matrix.into_data();
        let DType::QFloat(scheme) = data.dtype else { return None };
        let bits = match scheme.value {
            QuantValue::Q8S => WeightBits::Int8,
            QuantValue::Q4S => WeightBits::Int4,
            _ => return None,
        };
        let [rows, whole]: [usize; 2] = data.shape.to_vec().try_into().ok()?;
        let num_elements = data.num_elements();
        let bytes = QuantizedBytes { bytes: data.into_bytes(), scheme, num_elements };
        let (numbers, scales) = bytes.into_vec_i8();
        let rounded = Rounded { numbers, scales: scales.scales };
        let fits = groups(columns) * GROUP == whole && rounded.scales.len() * GROUP == num_elements;
        fits.then(|| Self::of_rounded(rounded, [rows, columns], bits, &device))
    }

    fn of_rounded(
        rounded: Rounded,
        size: [usize; 2],
        bits: WeightBits,
        device: &B::Device,
    ) -> Self {
        let bytes: Vec<u8> = match bits {
            WeightBits::Int8 => rounded.numbers.into_iter().map(|x| x as u8).collect(),
            WeightBits::Int4 => nibbles(&rounded.numbers),
        };
        let values: Vec<u32> = words(&bytes).collect();
        let count = values.len();
        let values = TensorData::new(values, [count]);
        let count = rounded.scales.len();
        let scales = TensorData::new(rounded.scales, [count]);
        let values = Tensor::from_data(values, (device, DType::U32));
        Self::of_parts(size, bits, values, Tensor::from_data(scales, (device, DType::F32)))
    }

    fn of_parts(
        size: [usize; 2],
        bits: WeightBits,
        values: Tensor<B, 1, Int>,
        scales: Tensor<B, 1>,
    ) -> Self {
        let parts = Parts { values: values.into_primitive(), scales: primitive(scales) };
        Self { size, bits, parts: Arc::new(parts) }
    }

    /// Rows and columns.
    pub fn size(&self) -> [usize; 2] {
        self.size
    }

    /// Bits of a number.
    pub fn bits(&self) -> WeightBits {
        self.bits
    }

    /// Bytes that it takes.
    pub fn bytes(&self) -> usize {
        let [rows, columns] = self.size;
        rows * (4 * self.bits.words(columns) + size_of::<f32>() * groups(columns))
    }

    /// The quantized numbers and the scales, row after row.
    #[cfg(any(feature = "cpu", feature = "cubecl"))]
    pub(crate) fn primitives(&self) -> (&IntTensor<B>, &FloatTensor<B>) {
        (&self.parts.values, &self.parts.scales)
    }

    fn values(&self) -> Tensor<B, 1, Int> {
        Tensor::from_primitive(self.parts.values.clone())
    }

    fn scales(&self) -> Tensor<B, 1> {
        tensor(self.parts.scales.clone())
    }

    /// The rows of these numbers, `[M]`.
    pub fn rows(&self, rows: Tensor<B, 1, Int>) -> Self {
        let ([all, columns], [count]) = (self.size, rows.dims());
        let values: Tensor<B, 2, Int> = self.values().reshape([all, self.bits.words(columns)]);
        let scales: Tensor<B, 2> = self.scales().reshape([all, groups(columns)]);
        let values = values.select(0, rows.clone()).flatten(0, 1);
        let scales = scales.select(0, rows).flatten(0, 1);
        Self::of_parts([count, columns], self.bits, values, scales)
    }

    /// The same on another device.
    pub(crate) fn moved(&self, device: &B::Device) -> Self {
        let (values, scales) = (self.values().to_device(device), self.scales().to_device(device));
        Self::of_parts(self.size, self.bits, values, scales)
    }

    /// As floats by the host.
    pub(crate) fn dequantized_by_host(&self, dtype: DType) -> Tensor<B, 2> {
        let [rows, columns] = self.size;
        let (device, values) = (self.scales().device(), self.values().into_data());
        let scales = self.scales().into_data();
        let scales = scales.as_slice::<f32>().expect("scales are f32");
        let whole = groups(columns) * GROUP;
        let mut numbers = vec![0.0; rows * whole];
        fill(values.as_bytes(), scales, self.bits, &mut numbers);
        let rows = numbers.chunks_exact(whole);
        let numbers: Vec<f32> = rows.flat_map(|row| &row[..columns]).copied().collect();
        Tensor::from_data(TensorData::new(numbers, self.size), (&device, dtype))
    }
}

impl<B: AutodiffBackend> QuantizedMatrix<B> {
    pub(crate) fn inner(&self) -> QuantizedMatrix<B::InnerBackend> {
        let (values, scales) = (self.values().inner(), self.scales().inner());
        QuantizedMatrix::of_parts(self.size, self.bits, values, scales)
    }

    pub(crate) fn of_inner(matrix: QuantizedMatrix<B::InnerBackend>) -> Self {
        let values = Tensor::from_inner(matrix.values());
        Self::of_parts(matrix.size, matrix.bits, values, Tensor::from_inner(matrix.scales()))
    }
}

fn rounded<B: Backend>(matrix: Tensor<B, 2>, bits: WeightBits) -> Rounded {
    let columns = matrix.dims()[1];
    let data = matrix.into_data();
    match data.as_slice() {
        Ok(numbers) => Rounded::new(numbers, columns, bits),
        Err(_) => Rounded::new(&data.iter().collect::<Vec<f32>>(), columns, bits),
    }
}

/// `[rows, columns]` as one of Burn's quantized tensors, of columns that are whole groups, which a mapper can give to
/// [`QuantizedMatrix::of_tensor`].
pub(crate) fn quantized_tensor<B: Backend, const D: usize>(
    matrix: Tensor<B, D>,
    bits: WeightBits,
) -> Tensor<B, D> {
    let (size, device) = (matrix.dims(), matrix.device());
    let size = size.as_slice().try_into().expect("a matrix has two dimensions");
    let data = rounded(matrix.reshape(size), bits).data(size, bits);
    Tensor::from_data(data, &device)
}

/// Numbers of all groups, from bytes and scales.
fn fill(bytes: &[u8], scales: &[f32], bits: WeightBits, numbers: &mut [f32]) {
    let (numbers, _) = numbers.as_chunks_mut::<GROUP>();
    let groups = numbers.iter_mut().zip(scales);
    match bits {
        WeightBits::Int8 => {
            for ((numbers, scale), group) in groups.zip(bytes.as_chunks::<GROUP>().0) {
                for (number, &x) in numbers.iter_mut().zip(group) {
                    *number = scale * f32::from(x as i8);
                }
            }
        }
        WeightBits::Int4 => {
            for ((numbers, scale), group) in groups.zip(bytes.as_chunks::<HALF>().0) {
                let (low, high) = numbers.split_at_mut(HALF);
                for ((low, high), &pair) in low.iter_mut().zip(high).zip(group) {
                    *low = scale * f32::from((pair & 15) as i8 - 8);
                    *high = scale * f32::from((pair >> 4) as i8 - 8);
                }
            }
        }
    }
}

/// Words of 32 bits.
fn words(bytes: &[u8]) -> impl Iterator<Item = u32> {
    bytes.as_chunks().0.iter().map(|&word| u32::from_ne_bytes(word))
}

/// Two numbers to a byte, each half of a group after the other.
fn nibbles(numbers: &[i8]) -> Vec<u8> {
    let place = |x: i8| (x + 8) as u8;
    let mut bytes = Vec::with_capacity(numbers.len() / 2);
    for group in numbers.as_chunks::<GROUP>().0 {
        let (low, high) = group.split_at(HALF);
        bytes.extend(low.iter().zip(high).map(|(&low, &high)| place(low) | place(high) << 4));
    }
    bytes
}
