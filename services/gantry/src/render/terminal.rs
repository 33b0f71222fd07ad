//! Terminal of the caller: its size, and raw mode.
//!
//! In raw mode the terminal passes each key unchanged and acts on none, because the terminal of a
//! remote process acts on them. [`RawMode`] restores the earlier mode when it is dropped. The panic
//! hook restores the mode before it prints, whichever thread panics.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, Once, PoisonError};

use rpc::pb::scheduler::Terminal as TerminalSize;
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};

/// Size of a terminal that does not say its own.
const DEFAULT_SIZE: TerminalSize = TerminalSize { rows: 24, columns: 80 };

/// The terminal in raw mode, with its earlier mode.
static CHANGED: Mutex<Option<(OwnedFd, Termios)>> = Mutex::new(None);

fn changed() -> MutexGuard<'static, Option<(OwnedFd, Termios)>> {
    CHANGED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the size of the terminal at standard input, output or error, or a usual size if none of
/// them knows it.
pub(crate) fn size() -> TerminalSize {
    let sizes = [tcgetwinsize(io::stdin()), tcgetwinsize(io::stdout()), tcgetwinsize(io::stderr())];
    let known = sizes.into_iter().flatten().find(|size| size.ws_row > 0 && size.ws_col > 0);
    known.map_or(DEFAULT_SIZE, |size| TerminalSize { rows: size.ws_row.into(), columns: size.ws_col.into() })
}

/// Returns whether this is a terminal from which this process may read. A read in the background
/// would stop the process.
pub(crate) fn is_foreground(terminal: impl AsFd) -> bool {
    rustix::termios::tcgetpgrp(terminal).is_ok_and(|group| group == rustix::process::getpgrp())
}

/// Returns whether the terminal is in raw mode. A new line then needs a carriage return.
pub(crate) fn is_raw() -> bool {
    changed().is_some()
}

/// Raw mode of a terminal. At most one terminal has it.
pub(crate) struct RawMode(());

impl RawMode {
    /// Sets a terminal to raw mode.
    pub(crate) fn enter(terminal: impl AsFd) -> io::Result<Self> {
        static HOOK: Once = Once::new();
        HOOK.call_once(|| {
            let print = std::panic::take_hook();
            std::panic::set_hook(Box::new(move |panic| {
                restore();
                print(panic);
            }));
        });
        let terminal = terminal.as_fd().try_clone_to_owned()?;
        let before = tcgetattr(&terminal)?;
        let mut raw = before.clone();
        raw.make_raw();
        // The lock is held, so that a panic meanwhile restores the mode.
        let mut changed = changed();
        tcsetattr(&terminal, OptionalActions::Now, &raw)?;
        *changed = Some((terminal, before));
        Ok(Self(()))
    }
}

impl Drop for RawMode {
    fn drop(&mut self) {
        restore();
    }
}

fn restore() {
    if let Some((terminal, before)) = changed().take() {
        // An error means that the terminal is gone.
        _ = tcsetattr(&terminal, OptionalActions::Now, &before);
    }
}

#[cfg(test)]
mod tests {
    use rustix::termios::LocalModes;

    use super::*;

    // One test, because a process has only one terminal in raw mode.
    #[test]
    fn mode_is_restored_after_end_and_panic() {
        let (_ours, terminal) = testing::terminal::open(24, 80).expect("a terminal");
        let has = |modes: LocalModes| tcgetattr(&terminal).expect("a terminal").local_modes.contains(modes);
        let cooked = LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG;
        assert!(has(cooked) && !is_raw());

        let raw = RawMode::enter(&terminal).expect("a terminal");
        assert!(!has(LocalModes::ICANON) && !has(LocalModes::ECHO) && !has(LocalModes::ISIG) && is_raw());
        drop(raw);
        assert!(has(cooked) && !is_raw());

        // Another thread panics, and its panic unwinds nothing here.
        let _raw = RawMode::enter(&terminal).expect("a terminal");
        assert!(std::thread::spawn(|| panic!("as planned")).join().is_err());
        assert!(has(cooked) && !is_raw());
    }

    #[test]
    fn file_is_no_terminal() {
        let file = std::fs::File::open("/dev/null").expect("there");
        assert!(RawMode::enter(&file).is_err());
    }
}
