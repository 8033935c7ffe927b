//! Asynchronous copies from tensors to shared memory, in groups (`cp.async`, compute capability 8.0 on).
//!
//! ```text
//! copy_async      a unit starts one copy
//! commit_copies   what it has started since is a group
//! wait_for_copies all units: its groups are there, but for the last few
//! ```
//! CubeCL's own wrappers need `cuda::barrier`, whose headers NVRTC reads for 1.4 to 1.8 s in each kernel that has one,
//! more than most kernels take otherwise.

use super::ptx::{local, name, ptx, use_tile};
use cubecl::ir::{Scope, Variable};
use cubecl::prelude::*;

/// One copy of 4, 8 or 16 bytes, of which all or the first `read` are read; the rest is zeros.
fn copy(
    scope: &mut Scope,
    source: [Variable; 2],
    tile: [Variable; 2],
    bytes: usize,
    read: Option<Variable>,
) {
    assert!([4, 8, 16].contains(&bytes), "a copy has 4, 8 or 16 bytes");
    let [is, held] = [source[0], tile[0]].map(|array| array.ty.storage_type());
    assert_eq!(is, held, "copies change no number");
    assert!(bytes.is_multiple_of(tile[0].ty.size()), "a copy is whole vectors of a tile");
    // Past the first cache, where a copy is wide enough for that.
    let cache = if bytes == 16 { "cg" } else { "ca" };
    use_tile(scope, tile[0]);
    let [from, to] =
        [source, tile].map(|[what, at]| format!("{} + {}", name(what), local(scope, at)));
    let (operand, input) = match read {
        Some(read) => (", %2", format!(", \"r\"({})", local(scope, read))),
        None => ("", String::new()),
    };
    ptx(
        scope,
        &format!(
            "asm volatile(\"cp.async.{cache}.shared.global [%0], [%1], {bytes}{operand};\" :: \
             \"r\"(static_cast<uint32>(__cvta_generic_to_shared({to}))), \"l\"({from}){input} : \"memory\");"
        ),
    );
}

/// Starts copying so many bytes from number or vector `from` of a tensor to place `to` of a tile.
#[cube]
#[allow(unused_variables)] // an intrinsic's
pub(crate) fn copy_async<S: CubePrimitive, E: CubePrimitive>(
    source: &Array<S>,
    from: usize,
    tile: &mut SharedMemory<E>,
    to: usize,
    #[comptime] bytes: usize,
) {
    intrinsic!(|scope| {
        copy(scope, [*source.expand, *from.expand], [*tile.expand, *to.expand], bytes, None);
    })
}

/// As [`copy_async`], but zeros unless `there`.
#[cube]
pub(crate) fn copy_async_or_zeros<S: CubePrimitive, E: CubePrimitive>(
    source: &Array<S>,
    from: usize,
    tile: &mut SharedMemory<E>,
    to: usize,
    there: bool,
    #[comptime] bytes: usize,
) {
    // A copy of no bytes has an address all the same.
    let from = select(there, from, 0usize);
    let read = select(there, comptime!(bytes as u32), 0u32);
    copy_async_of::<S, E>(source, from, tile, to, read, bytes);
}

#[cube]
#[allow(unused_variables)] // an intrinsic's
fn copy_async_of<S: CubePrimitive, E: CubePrimitive>(
    source: &Array<S>,
    from: usize,
    tile: &mut SharedMemory<E>,
    to: usize,
    read: u32,
    #[comptime] bytes: usize,
) {
    intrinsic!(|scope| {
        let read = Some(*read.expand);
        copy(scope, [*source.expand, *from.expand], [*tile.expand, *to.expand], bytes, read);
    })
}

/// Makes a group of the copies that this unit has started since its last one.
#[cube]
pub(crate) fn commit_copies() {
    intrinsic!(|scope| ptx(scope, "asm volatile(\"cp.async.commit_group;\" ::: \"memory\");"))
}

/// Waits until the groups of all units are in shared memory, but for the `later` that each committed last. Every unit
/// has to call it.
#[cube]
pub(crate) fn wait_for_copies(#[comptime] later: usize) {
    wait_for_own_copies(later);
    sync_cube();
}

/// The same of this unit's own groups.
#[cube]
#[allow(unused_variables)] // an intrinsic's
pub(super) fn wait_for_own_copies(#[comptime] later: usize) {
    intrinsic!(|scope| {
        ptx(scope, &format!("asm volatile(\"cp.async.wait_group {later};\" ::: \"memory\");"));
    })
}
