//! The one place where commands write to standard output and standard error.
//!
//! Their reader may have gone: a pipe's other end, or a terminal that was closed. That ends no command
//! before its work is done, and is no failure. A full disk is one, of standard output.

use crate::exit::FAILED;
use std::fmt::Display;
use std::io::{self, BufWriter, ErrorKind, StdoutLock, Write, stderr, stdout};
use std::process::ExitCode;

/// Writes `text` to standard output, at once.
/// # Errors
/// The system's error; [`nobody_reads`] tells whether it matters.
pub(crate) fn write(text: &str) -> io::Result<()> {
    let mut out = stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush())
}

/// Standard output, for much at once. What comes of it goes to [`ended`].
pub(crate) fn buffered() -> BufWriter<StdoutLock<'static>> {
    BufWriter::new(stdout().lock())
}

/// Writes `text` to standard output and gives the command's exit code.
pub(crate) fn show(text: &str) -> ExitCode {
    ended(write(text))
}

/// The exit code of a command whose last act was to write: 0 done, 1 it could not be written.
pub(crate) fn ended(written: io::Result<()>) -> ExitCode {
    match written {
        Err(e) if !nobody_reads(&e) => fail(FAILED, &format!("can't write the output: {e}")),
        _ => ExitCode::SUCCESS,
    }
}

/// A line on standard error. If nobody can read it, the command goes on all the same.
pub(crate) fn note(line: &str) {
    // Whole, so that lines of several processes do not mix.
    let _unread = stderr().lock().write_all(format!("{line}\n").as_bytes());
}

/// Says what went wrong, and gives the exit code for it.
pub(crate) fn fail(code: u8, error: &dyn Display) -> ExitCode {
    note(&format!("error: {error}"));
    ExitCode::from(code)
}

/// Asks a person, on standard error, without an end of the line.
pub(crate) fn prompt(text: &str) {
    let mut err = stderr().lock();
    let _unread = err.write_all(text.as_bytes()).and_then(|()| err.flush());
}

/// Whether standard output failed for want of a reader who wants more, such as `head`.
pub(crate) fn nobody_reads(e: &io::Error) -> bool {
    e.kind() == ErrorKind::BrokenPipe || terminal_is_closed(e)
}

/// A closed terminal fails as a broken disk does.
#[cfg(unix)]
fn terminal_is_closed(e: &io::Error) -> bool {
    use std::os::{fd::AsFd, unix::fs::FileTypeExt};
    let is_device = || {
        let file = std::fs::File::from(stdout().as_fd().try_clone_to_owned().ok()?);
        Some(file.metadata().ok()?.file_type().is_char_device())
    };
    e.raw_os_error() == Some(nix::libc::EIO) && is_device() == Some(true)
}

#[cfg(not(unix))]
fn terminal_is_closed(_e: &io::Error) -> bool {
    false
}
