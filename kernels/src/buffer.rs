//! Buffers of a device, and kernel arguments made of them.

use cubecl::ir::StorageType;
use cubecl::prelude::*;
use cubecl::server::{Handle, MemoryLayoutDescriptor};

/// A tensor that was made here: contiguous.
#[derive(Debug, Clone)]
pub struct Buffer {
    /// The memory.
    pub handle: Handle,
    /// The shape.
    pub shape: Vec<usize>,
    /// The type.
    pub dtype: StorageType,
}

impl Buffer {
    pub(crate) fn len(&self) -> usize {
        self.shape.iter().product()
    }
}

/// A buffer that a kernel is to fill.
pub(crate) fn buffer<R: Runtime>(
    client: &ComputeClient<R>,
    shape: &[usize],
    dtype: StorageType,
) -> Buffer {
    let numbers: usize = shape.iter().product();
    let bytes = numbers * dtype.size();
    // Tests fill every buffer with NaN, so that what a kernel forgets to write is seen.
    let handle = match cfg!(test) {
        true => client.create_from_slice(&vec![0xff; bytes]),
        false => client.empty(bytes),
    };
    Buffer { handle, shape: shape.to_vec(), dtype }
}

/// Most bytes of a buffer that shares its memory, and of memory that is shared.
const SMALL: usize = 256 << 10;
const SHARED: usize = 8 << 20;

/// Buffers that a kernel is to fill, of so many numbers each, which nearly always live and die together: small ones
/// share memory, which is free again when all are, because asking for each by itself is what the host of a small
/// model does for a tenth of its time.
pub(crate) fn buffers<R: Runtime>(
    client: &ComputeClient<R>,
    wanted: &[(usize, StorageType)],
) -> Vec<Buffer> {
    let bytes = |place: &usize| wanted[*place].0 * wanted[*place].1.size();
    let (small, large): (Vec<usize>, Vec<usize>) =
        (0..wanted.len()).partition(|place| bytes(place) <= SMALL);
    let mut made: Vec<(usize, Buffer)> = large
        .into_iter()
        .map(|place| (place, buffer(client, &[wanted[place].0], wanted[place].1)))
        .collect();
    for places in small.chunks(SHARED / SMALL) {
        let of_places: Vec<_> = places.iter().map(|&place| wanted[place]).collect();
        made.extend(places.iter().copied().zip(together(client, &of_places)));
    }
    made.sort_by_key(|(place, _)| *place);
    made.into_iter().map(|(_, buffer)| buffer).collect()
}

/// Buffers that a kernel is to fill, of so many numbers each, by one request: they share memory, which is free again when
/// all are.
pub(crate) fn together<R: Runtime>(
    client: &ComputeClient<R>,
    wanted: &[(usize, StorageType)],
) -> Vec<Buffer> {
    let sizes = || wanted.iter().map(|(numbers, dtype)| numbers * dtype.size());
    let descriptor = |bytes: usize| MemoryLayoutDescriptor::contiguous([bytes].into(), 1);
    let layouts = match cfg!(test) {
        true => {
            let fill = vec![0xff; sizes().max().unwrap_or(0)];
            let filled = sizes().map(|bytes| (descriptor(bytes), &fill[..bytes])).collect();
            client.create_tensors_from_slices(filled)
        }
        false => client.empty_tensors(sizes().map(descriptor).collect()),
    };
    let made = wanted.iter().zip(layouts);
    made.map(|(&(numbers, dtype), layout)| Buffer {
        handle: layout.memory,
        shape: vec![numbers],
        dtype,
    })
    .collect()
}

/// A whole tensor, as an argument.
pub(crate) fn whole<R: Runtime>(buffer: &Buffer) -> ArrayArg<R> {
    array(&buffer.handle, buffer.len())
}

pub(crate) fn array<R: Runtime>(handle: &Handle, len: usize) -> ArrayArg<R> {
    // SAFETY: callers pass the length that the memory was made for, or less.
    #[allow(unsafe_code)]
    unsafe {
        ArrayArg::from_raw_parts(handle.clone(), len)
    }
}
