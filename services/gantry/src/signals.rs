//! Signals that ask the command to end.

use anyhow::Context;
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::exit;

/// After SIGHUP.
const HUNG_UP: u8 = 129;

/// Catches Ctrl-C, SIGTERM and SIGHUP for as long as it lives.
pub(crate) struct Signals {
    interrupt: Signal,
    terminate: Signal,
    hangup: Signal,
}

impl Signals {
    pub(crate) fn catch() -> anyhow::Result<Self> {
        let catch = |kind| signal(kind).context("cannot catch signals");
        Ok(Self {
            interrupt: catch(SignalKind::interrupt())?,
            terminate: catch(SignalKind::terminate())?,
            hangup: catch(SignalKind::hangup())?,
        })
    }

    /// The exit code that the next signal asks for. Cancel safe.
    pub(crate) async fn next(&mut self) -> u8 {
        tokio::select! {
            _ = self.interrupt.recv() => exit::INTERRUPTED,
            _ = self.terminate.recv() => exit::TERMINATED,
            _ = self.hangup.recv() => HUNG_UP,
        }
    }
}
