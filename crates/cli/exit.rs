//! Exit codes of the commands; 0 is for success.

/// Someone's mistake, said in one line; exit code 2.
pub(crate) const BAD_INPUT: u8 = 2;
/// The run itself failed; exit code 1.
pub(crate) const FAILED: u8 = 1;
/// Stopped by Ctrl-C, with everything saved; exit code 130, as shells have it.
pub(crate) const INTERRUPTED: u8 = 130;
