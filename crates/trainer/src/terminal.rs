//! The terminal under the dashboard, which may be closed at any time.
//!
//! The dashboard switches the terminal to raw mode, in which Ctrl-C is a key like any other, and
//! knows no such key. Here it becomes a signal again.

pub(crate) use system::{Hushed, forget, hush, is_gone, is_raw, let_signals_through, remember};
pub use system::{dashboard_is_up, restore_terminal};

#[cfg(unix)]
mod system {
    use nix::libc::_POSIX_VDISABLE;
    use nix::sys::termios::{
        LocalFlags, SetArg, SpecialCharacterIndices, Termios, tcgetattr, tcsetattr,
    };
    use nix::unistd::{dup2_stderr, write};
    use std::fs::{File, OpenOptions};
    use std::io::{stderr, stdin, stdout};
    use std::os::fd::{AsFd, OwnedFd};
    use std::sync::{Mutex, MutexGuard, PoisonError};
    use std::time::{Duration, Instant};

    /// The terminal's settings from before the dashboard, while there is one.
    static BEFORE: Mutex<Option<Termios>> = Mutex::new(None);

    fn before() -> MutexGuard<'static, Option<Termios>> {
        BEFORE.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn remember() {
        *before() = tcgetattr(stdin()).ok();
    }

    /// After the dashboard has closed. Had its thread died badly, the terminal would still be raw.
    pub(crate) fn forget() {
        if is_raw() {
            restore_terminal();
        }
        *before() = None;
    }

    /// Whether a dashboard has the terminal. What is printed meanwhile spoils it.
    pub fn dashboard_is_up() -> bool {
        before().is_some()
    }

    /// Gives the terminal back to the shell, if a dashboard has it. For a signal handler that is
    /// about to end the process; [`Progress`](crate::Progress) does it by itself.
    pub fn restore_terminal() {
        if let Some(settings) = before().take() {
            let leave_screen_and_show_cursor = b"\x1b[?1049l\x1b[?25h";
            // There is nobody to tell if the terminal is gone. Straight to it, since memory may be
            // gone too, while this thread writes through the standard library.
            let _set = tcsetattr(stdin(), SetArg::TCSANOW, &settings);
            let _left = write(stdout(), leave_screen_and_show_cursor);
        }
    }

    /// Whether the dashboard is alive: its thread sets raw mode, and leaves it when it ends or dies.
    pub(crate) fn is_raw() -> bool {
        tcgetattr(stdin()).is_ok_and(|now| !now.local_flags.contains(LocalFlags::ICANON))
    }

    /// Whether there is no terminal any more: its window was closed, or the connection to it lost.
    pub(crate) fn is_gone() -> bool {
        tcgetattr(stdin()).is_err()
    }

    /// Standard error, while nothing that is written there comes anywhere.
    pub(crate) struct Hushed(Option<OwnedFd>);

    /// Sends standard error nowhere, unless it is a file. The dashboard's libraries write there when
    /// the terminal is gone, and abort the process where they cannot.
    pub(crate) fn hush() -> Hushed {
        let known = || stderr().as_fd().try_clone_to_owned().ok();
        let is_file = |fd: OwnedFd| File::from(fd).metadata().is_ok_and(|data| data.is_file());
        if known().is_none_or(is_file) {
            return Hushed(None);
        }
        let nowhere = OpenOptions::new().write(true).open("/dev/null");
        let (Some(before), Ok(nowhere)) = (known(), nowhere) else { return Hushed(None) };
        match dup2_stderr(nowhere) {
            Ok(()) => Hushed(Some(before)),
            Err(_) => Hushed(None),
        }
    }

    impl Drop for Hushed {
        fn drop(&mut self) {
            if let Some(before) = self.0.take() {
                // There is nobody to tell.
                let _back = dup2_stderr(before);
            }
        }
    }

    /// Waits for raw mode, then lets Ctrl-C through. False if the dashboard did not come up.
    pub(crate) fn let_signals_through() -> bool {
        let patience = Instant::now() + Duration::from_millis(500);
        while !is_raw() {
            if Instant::now() > patience {
                return false;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        let _without_it_q_still_stops = enable_interrupt();
        true
    }

    fn enable_interrupt() -> nix::Result<()> {
        let mut settings = tcgetattr(stdin())?;
        settings.local_flags.insert(LocalFlags::ISIG | LocalFlags::NOFLSH);
        // Ctrl-Z and Ctrl-\ would leave the shell a terminal in raw mode.
        for key in [SpecialCharacterIndices::VSUSP, SpecialCharacterIndices::VQUIT] {
            settings.control_chars[key as usize] = _POSIX_VDISABLE;
        }
        tcsetattr(stdin(), SetArg::TCSANOW, &settings)
    }
}

/// Elsewhere the dashboard's `q` is the way to stop a run.
#[cfg(not(unix))]
mod system {
    /// Whether a dashboard has the terminal, as far as is known.
    pub fn dashboard_is_up() -> bool {
        false
    }

    /// Gives the terminal back to the shell; here the dashboard does so by itself.
    pub fn restore_terminal() {}

    pub(crate) fn remember() {}

    pub(crate) fn forget() {}

    pub(crate) fn is_raw() -> bool {
        true
    }

    pub(crate) fn let_signals_through() -> bool {
        true
    }

    pub(crate) fn is_gone() -> bool {
        false
    }

    pub(crate) struct Hushed;

    pub(crate) fn hush() -> Hushed {
        Hushed
    }
}
