//! Signals that ask a command to end.

/// Kind of signal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Asked {
    /// Ctrl-C. A person may press it again.
    Key,
    /// An end to be prepared for: the terminal was closed, or the system shuts down. It may come
    /// several times, from the system and from the shell, and means no more then.
    End,
}

/// Calls `on` in a thread of its own for each signal. What `on` does first is to take note of it: what
/// it prints may find no reader.
/// # Errors
/// The system's error.
#[cfg(unix)]
pub(crate) fn watch(mut on: impl FnMut(Asked) + Send + 'static) -> std::io::Result<()> {
    use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
    let mut list = vec![SIGINT, SIGTERM];
    // `nohup` has it ignored, and means it. Ctrl-C is ignored by the background jobs of every script.
    if !is_ignored(SIGHUP) {
        list.push(SIGHUP);
    }
    let mut signals = signal_hook::iterator::Signals::new(list)?;
    std::thread::Builder::new().name("signals".into()).spawn(move || {
        for signal in signals.forever() {
            on(if signal == SIGINT { Asked::Key } else { Asked::End });
        }
    })?;
    Ok(())
}

#[cfg(unix)]
fn is_ignored(signal: i32) -> bool {
    use nix::libc::{SIG_IGN, sigaction};
    let mut now = std::mem::MaybeUninit::<sigaction>::zeroed();
    // SAFETY: without a new action, the call only writes the present one to where there is room for
    // it; all zeros are one too.
    #[allow(unsafe_code)]
    let now = unsafe {
        sigaction(signal, std::ptr::null(), now.as_mut_ptr());
        now.assume_init()
    };
    now.sa_sigaction == SIG_IGN
}

/// As elsewhere; every signal is Ctrl-C here.
/// # Errors
/// The system's error.
#[cfg(not(unix))]
pub(crate) fn watch(mut on: impl FnMut(Asked) + Send + 'static) -> Result<(), ctrlc::Error> {
    ctrlc::set_handler(move || on(Asked::Key))
}
