//! Size of the local terminal, which a process with a terminal follows.

use anyhow::Context;
use rpc::pb::scheduler::Terminal as TerminalSize;
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::render::terminal;

/// Watcher of the size of the local terminal.
pub(crate) struct Window {
    changes: Signal,
    /// Size that the process has. `None`: unknown.
    sent: Option<TerminalSize>,
    /// Whether it is unknown that the process has a terminal.
    is_guess: bool,
}

impl Window {
    /// Starts to watch. `sent` is the size with which the process starts, if this caller starts it.
    pub(crate) fn watch(sent: Option<TerminalSize>) -> anyhow::Result<Self> {
        let changes = signal(SignalKind::window_change()).context("cannot catch signals")?;
        Ok(Self { changes, sent, is_guess: false })
    }

    /// Starts to watch for a process that may have no terminal.
    pub(crate) fn guess() -> anyhow::Result<Self> {
        Ok(Self { is_guess: true, ..Self::watch(None)? })
    }

    /// Returns whether the process may have no terminal.
    pub(crate) fn is_guess(&self) -> bool {
        self.is_guess
    }

    /// Forgets which size the process has, because it is unknown whether a message arrived.
    pub(crate) fn forget(&mut self) {
        self.sent = None;
    }

    /// Waits until the process must have another size, and returns that size. Cancel safe.
    pub(crate) async fn next(&mut self) -> TerminalSize {
        loop {
            let now = terminal::size();
            if self.sent != Some(now) {
                self.sent = Some(now);
                return now;
            }
            if self.changes.recv().await.is_none() {
                std::future::pending::<()>().await;
            }
        }
    }
}
