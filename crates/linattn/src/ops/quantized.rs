//! Matrices of whole numbers: weights that only decode, at a byte or half a byte each.
//! ```text
//! W[r, c] = s[r, c / 32] q[r, c]      q: -127 to 127, or -7 to 7; a scale s for each 32 numbers of a row
//! y[r]    = sum_c W[r, c] x[c]        read from memory: q and s alone
//! ```
//! Rows are a layer's outputs and columns its inputs. Eight bits cost 9 bits a number with the scales, four
//! bits 5.

use burn::tensor::quantization::{
    BlockSize, QuantLevel, QuantScheme, QuantStore, QuantValue, QuantizedBytes,
};
use burn::tensor::{DType, Tensor, TensorData, backend::Backend};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Numbers of a row that share a scale.
pub const GROUP: usize = 32;
/// Bytes of a group of four bits each.
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

    /// As Burn says it: the largest number of a group takes the largest place.
    pub(crate) fn scheme(self) -> QuantScheme {
        let value = match self {
            Self::Int8 => QuantValue::Q8S,
            Self::Int4 => QuantValue::Q4S,
        };
        QuantScheme::default()
            .with_value(value)
            .with_level(QuantLevel::Block(BlockSize::new([GROUP as u8])))
            .with_store(QuantStore::Native)
    }
}

/// A matrix of whole numbers with their scales. Copies share it.
#[derive(Debug, Clone)]
pub struct QuantizedMatrix {
    size: [usize; 2],
    bits: WeightBits,
    /// Row after row. Of four bits, a group's first half is in the low halves of 16 bytes, counted from -8.
    values: Arc<Vec<u8>>,
    /// A row's, one for each group.
    scales: Arc<Vec<f32>>,
}

impl QuantizedMatrix {
    /// Whether a matrix of so many columns can be quantized.
    pub fn takes(columns: usize) -> bool {
        columns > 0 && columns.is_multiple_of(GROUP)
    }

    /// Quantises `[rows, columns]`.
    /// # Panics
    /// If it [takes](Self::takes) no such matrix.
    pub fn quantize<B: Backend>(matrix: Tensor<B, 2>, bits: WeightBits) -> Self {
        let columns = matrix.dims()[1];
        assert!(Self::takes(columns), "{columns} columns; they have to be a multiple of {GROUP}");
        Self::of_quantized(matrix.quantize_dynamic(&bits.scheme()).into_data())
            .expect("it has just been quantised")
    }

    /// A matrix that Burn has quantised by [`WeightBits::scheme`]; nothing for any other.
    pub(crate) fn of_quantized(data: TensorData) -> Option<Self> {
        let DType::QFloat(scheme) = data.dtype else { return None };
        let bits = match scheme.value {
            QuantValue::Q8S => WeightBits::Int8,
            QuantValue::Q4S => WeightBits::Int4,
            _ => return None,
        };
        let size: [usize; 2] = data.shape.to_vec().try_into().ok()?;
        let num_elements = data.num_elements();
        let bytes = QuantizedBytes { bytes: data.into_bytes(), scheme, num_elements };
        let (numbers, scales) = bytes.into_vec_i8();
        let values = match bits {
            WeightBits::Int8 => numbers.into_iter().map(|x| x as u8).collect(),
            WeightBits::Int4 => halves(&numbers),
        };
        let scales = scales.scales;
        (scales.len() * GROUP == num_elements).then(|| Self {
            size,
            bits,
            values: Arc::new(values),
            scales: Arc::new(scales),
        })
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
        self.values.len() + size_of::<f32>() * self.scales.len()
    }

    /// The quantized numbers, row after row.
    pub(crate) fn values(&self) -> &[u8] {
        &self.values
    }

    /// The scales, row after row.
    pub(crate) fn scales(&self) -> &[f32] {
        &self.scales
    }

    /// A row as it was, but for rounding.
    /// # Panics
    /// If there is no such row.
    pub fn row(&self, row: usize) -> Vec<f32> {
        let [rows, columns] = self.size;
        assert!(row < rows, "row {row} of {rows}");
        let mut numbers = vec![0.0; columns];
        self.fill(row, &mut numbers);
        numbers
    }

    /// The whole matrix, `[rows, columns]`.
    pub fn dequantize<B: Backend>(&self, device: &B::Device) -> Tensor<B, 2> {
        let [rows, columns] = self.size;
        let mut numbers = vec![0.0; rows * columns];
        for (row, numbers) in numbers.chunks_exact_mut(columns).enumerate() {
            self.fill(row, numbers);
        }
        Tensor::from_data(TensorData::new(numbers, self.size), device)
    }

    fn fill(&self, row: usize, numbers: &mut [f32]) {
        let [rows, columns] = self.size;
        let groups = columns / GROUP;
        let scales = &self.scales[row * groups..][..groups];
        let width = self.values.len() / rows;
        let values = &self.values[row * width..][..width];
        let (numbers, _) = numbers.as_chunks_mut::<GROUP>();
        let groups = numbers.iter_mut().zip(scales);
        match self.bits {
            WeightBits::Int8 => {
                for ((numbers, scale), group) in groups.zip(values.as_chunks::<GROUP>().0) {
                    for (number, &x) in numbers.iter_mut().zip(group) {
                        *number = scale * f32::from(x as i8);
                    }
                }
            }
            WeightBits::Int4 => {
                for ((numbers, scale), group) in groups.zip(values.as_chunks::<HALF>().0) {
                    let (low, high) = numbers.split_at_mut(HALF);
                    for ((low, high), &pair) in low.iter_mut().zip(high).zip(group) {
                        *low = scale * f32::from((pair & 15) as i8 - 8);
                        *high = scale * f32::from((pair >> 4) as i8 - 8);
                    }
                }
            }
        }
    }
}

/// Two numbers to a byte, each half of a group after the other.
fn halves(numbers: &[i8]) -> Vec<u8> {
    let place = |x: i8| (x + 8) as u8;
    let pair = |group: &[i8]| -> Vec<u8> {
        let (low, high) = group.split_at(HALF);
        low.iter().zip(high).map(|(&low, &high)| place(low) | place(high) << 4).collect()
    };
    numbers.chunks_exact(GROUP).flat_map(pair).collect()
}
