//! Buffers of a device, and kernel arguments made of them.

use cubecl::ir::StorageType;
use cubecl::prelude::*;
use cubecl::server::Handle;

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
