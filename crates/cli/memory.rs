//! Memory of this computer: how much can be had, and the end of a command that gets no more of it.
//!
//! Data that do not fit are refused before they are read. Where memory ends all the same, Rust would abort;
//! here the command says so in a line and fails.

use crate::exit::FAILED;
use mimalloc::MiMalloc;
use std::alloc::{GlobalAlloc, Layout};
use std::io::Write;
use std::sync::OnceLock;

/// Bytes of memory that can be had, where the system tells: the least of what is free, what this process
/// may still address, and what a container may hold.
pub(crate) fn free() -> Option<f64> {
    [available(), addressable(), contained()].into_iter().flatten().reduce(f64::min)
}

fn available() -> Option<f64> {
    kibibytes("/proc/meminfo", "MemAvailable:")
}

fn addressable() -> Option<f64> {
    let limits = std::fs::read_to_string("/proc/self/limits").ok()?;
    let limit = limits.lines().find_map(|line| line.strip_prefix("Max address space"))?;
    let limit: f64 = limit.split_whitespace().next()?.parse().ok()?;
    Some((limit - kibibytes("/proc/self/status", "VmSize:")?).max(0.0))
}

fn contained() -> Option<f64> {
    std::fs::read_to_string("/sys/fs/cgroup/memory.max").ok()?.trim().parse().ok()
}

/// The number that stands after `name`, in bytes.
fn kibibytes(file: &str, name: &str) -> Option<f64> {
    let text = std::fs::read_to_string(file).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    let kibibytes: f64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kibibytes * 1024.0)
}

/// For people.
pub(crate) fn gibibytes(bytes: f64) -> f64 {
    bytes / f64::from(1 << 30)
}

/// Advice for whoever runs out of memory.
static ADVICE: OnceLock<&str> = OnceLock::new();

/// Adds to what is said where memory ends. The first call counts.
pub(crate) fn advise(advice: &'static str) {
    let _first = ADVICE.set(advice);
}

/// The advice that [`advise`] was given.
pub(crate) fn advice() -> &'static str {
    ADVICE.get().copied().unwrap_or("something smaller would do")
}

/// mimalloc, and one line in place of an abort. Code that could go on without the memory it asked for ends
/// here too: nobody can tell the two apart.
pub(crate) struct Allocator;

#[allow(unsafe_code)] // there is no other way to make an allocator
// SAFETY: mimalloc does all of it as it was asked to, and no null pointer is given out.
unsafe impl GlobalAlloc for Allocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller keeps what the trait asks for, which is what mimalloc asks for.
        got(unsafe { MiMalloc.alloc(layout) }, layout.size())
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as above.
        got(unsafe { MiMalloc.alloc_zeroed(layout) }, layout.size())
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: as above; all memory is mimalloc's.
        unsafe { MiMalloc.dealloc(memory, layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: as above.
        got(unsafe { MiMalloc.realloc(memory, layout, size) }, size)
    }
}

fn got(memory: *mut u8, size: usize) -> *mut u8 {
    if memory.is_null() {
        out_of_memory(size);
    }
    memory
}

/// Ends the process. Nothing here may allocate, or wait for a lock that this thread may hold.
#[cold]
fn out_of_memory(size: usize) -> ! {
    let mut line = [0; 400];
    let mut rest = &mut line[..];
    let wanted = gibibytes(size as f64);
    let _as_much_as_fits =
        writeln!(rest, "error: out of memory: {wanted:.3} GiB more are not there; {}", advice());
    let length = 400 - rest.len();
    end(&line[..length])
}

#[cfg(unix)]
fn end(line: &[u8]) -> ! {
    linattn_trainer::restore_terminal();
    let _unread = nix::unistd::write(std::io::stderr(), line);
    // SAFETY: it comes from nowhere back, and runs nothing of this process any more.
    #[allow(unsafe_code)]
    unsafe {
        nix::libc::_exit(FAILED.into())
    }
}

#[cfg(not(unix))]
fn end(line: &[u8]) -> ! {
    let _unread = std::io::stderr().write_all(line);
    std::process::exit(FAILED.into())
}
