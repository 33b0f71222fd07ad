//! Signals that ask the command to end.

use anyhow::Context;
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::ending::exit_code;

/// After SIGHUP.
const HUNG_UP: u8 = 129;

/// Catches Ctrl-C, SIGTERM and SIGHUP for as long as it lives.
///
/// A signal that was ignored when the command started stays ignored: `nohup` and the `&` of a script say so that the command
/// goes on.
pub(crate) struct Signals {
    interrupt: Option<Signal>,
    terminate: Option<Signal>,
    hangup: Option<Signal>,
}

impl Signals {
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

    /// The exit code that the next signal asks for. Cancel safe.
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

/// Whether the command was started with a signal ignored.
fn is_ignored(kind: SignalKind) -> bool {
    let mut action = std::mem::MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: without a new action the call only writes the present one, for which there is room.
    let found = unsafe { libc::sigaction(kind.as_raw_value(), std::ptr::null(), action.as_mut_ptr()) };
    // SAFETY: all of it is initialized, and every value is one.
    found == 0 && unsafe { action.assume_init() }.sa_sigaction == libc::SIG_IGN
}
