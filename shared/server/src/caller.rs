//! Callers: the transport of a caller, and the message budget of its connection.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::Semaphore;

use crate::unauthenticated::Probation;

/// Maximum bytes of partial messages on one connection.
pub(crate) const MAX_PARTIAL_BYTES: usize = 256 << 20;
/// Bytes of one unit of the budget.
pub(crate) const BUDGET_UNIT: usize = 1 << 10;

/// The budget of one connection for partial messages.
#[derive(Debug, Clone)]
pub(crate) struct MessageBudget(pub(crate) Arc<Semaphore>);

impl Default for MessageBudget {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(MAX_PARTIAL_BYTES / BUDGET_UNIT)))
    }
}

/// The connection of a caller. Every request has it in its extensions.
#[derive(Debug, Clone)]
pub struct Caller {
    transport: Transport,
    /// Address, or user of a Unix socket.
    peer: Arc<str>,
    /// Budget for partial messages on the connection.
    budget: MessageBudget,
    has_hung_up: Arc<AtomicBool>,
}

#[derive(Debug, Clone)]
pub(crate) enum Transport {
    Tcp(Probation),
    /// A Unix socket, with a user that may call.
    Unix,
}

impl Caller {
    /// Whether the caller uses a Unix socket, and so needs no token.
    pub(crate) fn is_local(&self) -> bool {
        matches!(self.transport, Transport::Unix)
    }

    pub(crate) fn budget(&self) -> MessageBudget {
        self.budget.clone()
    }

    pub(crate) fn new(transport: Transport, peer: &str) -> Self {
        let (budget, has_hung_up) = (MessageBudget::default(), Arc::default());
        Self { transport, peer: peer.into(), budget, has_hung_up }
    }

    /// The other end of the connection, for logs: the address, or the user of a Unix socket.
    #[must_use]
    pub fn peer(&self) -> &str {
        &self.peer
    }

    pub(crate) fn with_hang_up(self, has_hung_up: Arc<AtomicBool>) -> Self {
        Self { has_hung_up, ..self }
    }

    /// Whether the caller has closed its end of the connection. This stays `false` for a caller
    /// that only stopped to answer.
    #[must_use]
    pub fn has_hung_up(&self) -> bool {
        self.has_hung_up.load(Ordering::Relaxed)
    }

    /// Marks the connection as authenticated, so that it stays open. A service calls this after it
    /// has verified a ticket.
    pub fn authenticated(&self) {
        if let Transport::Tcp(probation) = &self.transport {
            probation.end();
        }
    }

    #[cfg(test)]
    pub(crate) fn over_tcp(probation: Probation) -> Self {
        Self::new(Transport::Tcp(probation), "")
    }

    #[cfg(test)]
    pub(crate) fn over_unix() -> Self {
        Self::new(Transport::Unix, "")
    }
}
