//! Signals that ask `gantry` to end.

use anyhow::Context;
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::ending::exit_code;

/// Exit code after SIGHUP.
const HUNG_UP: u8 = 129;

/// Receiver of Ctrl-C, SIGTERM and SIGHUP.
///
/// A signal that was ignored when `gantry` started stays ignored, as `nohup` and the `&` of a
/// script intend.
pub(crate) struct Signals {
    interrupt: Option<Signal>,
    terminate: Option<Signal>,
    hangup: Option<Signal>,
}

impl Signals {
    /// Starts to catch the signals.
    pub(crate) fn catch() -> anyhow::Result<Self> {
        let catch = |kind: SignalKind| {
            if is_ignored(kind) {
                return Ok(None);
            }
            signal(kind).map(Some).context("cannot catch signals")
        };
        Ok(Self {
            interrupt: catch(SignalKind::interrupt())?,
            terminate: catch(SignalKind::terminate())?,
            hangup: catch(SignalKind::hangup())?,
        })
    }

    /// Waits for the next signal, and returns the exit code for it. Cancel safe.
    pub(crate) async fn next(&mut self) -> u8 {
        tokio::select! {
            () = received(&mut self.interrupt) => exit_code::INTERRUPTED,
            () = received(&mut self.terminate) => exit_code::TERMINATED,
            () = received(&mut self.hangup) => HUNG_UP,
        }
    }
}

async fn received(signal: &mut Option<Signal>) {
    match signal {
        Some(signal) => _ = signal.recv().await,
        None => std::future::pending().await,
    }
}

/// Returns whether `gantry` was started with this signal ignored.
fn is_ignored(kind: SignalKind) -> bool {
    let mut action = std::mem::MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: without a new action, the call only writes the current action into `action`.
    let found = unsafe { libc::sigaction(kind.as_raw_value(), std::ptr::null(), action.as_mut_ptr()) };
    // SAFETY: `action` is zeroed, and zeros are a valid `sigaction`.
    found == 0 && unsafe { action.assume_init() }.sa_sigaction == libc::SIG_IGN
}
