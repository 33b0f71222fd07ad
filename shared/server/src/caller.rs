//! Who calls: how a caller transport the server, and the budget that its connection has.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::Semaphore;

use crate::unauthenticated::Probation;

/// Most bytes that count on one connection.
pub(crate) const MAX_PARTIAL_BYTES: usize = 256 << 20;
/// The budget is counted in pieces of so many bytes.
pub(crate) const BUDGET_UNIT: usize = 1 << 10;

/// The budget for messages that have arrived in part, of one connection.
#[derive(Debug, Clone)]
pub(crate) struct MessageBudget(pub(crate) Arc<Semaphore>);

impl Default for MessageBudget {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(MAX_PARTIAL_BYTES / BUDGET_UNIT)))
    }
}

/// How a caller transport the server. In the extensions of every request.
#[derive(Debug, Clone)]
pub struct Caller {
    transport: Transport,
    /// For messages on its connection.
    budget: MessageBudget,
    has_hung_up: Arc<AtomicBool>,
}

#[derive(Debug, Clone)]
pub(crate) enum Transport {
    Tcp(Probation),
    /// Over a Unix socket, as a user who may call.
    Unix,
}

impl Caller {
    /// Whether the caller needs no token, for it came over a Unix socket.
    pub(crate) fn is_local(&self) -> bool {
        matches!(self.transport, Transport::Unix)
    }

    pub(crate) fn budget(&self) -> MessageBudget {
        self.budget.clone()
    }

    pub(crate) fn new(transport: Transport) -> Self {
        Self { transport, budget: MessageBudget::default(), has_hung_up: Arc::default() }
    }

    pub(crate) fn with_hang_up(self, has_hung_up: Arc<AtomicBool>) -> Self {
        Self { has_hung_up, ..self }
    }

    /// Whether the caller's end of the connection was closed. A caller that merely does not answer any more has not hung up.
    #[must_use]
    pub fn has_hung_up(&self) -> bool {
        self.has_hung_up.load(Ordering::Relaxed)
    }

    /// Keeps the caller's connection open from now on. For a service that has verified a ticket of the caller.
    pub fn authenticated(&self) {
        if let Transport::Tcp(probation) = &self.transport {
            probation.end();
        }
    }

    #[cfg(test)]
    pub(crate) fn over_tcp(probation: Probation) -> Self {
        Self::new(Transport::Tcp(probation))
    }

    #[cfg(test)]
    pub(crate) fn over_unix() -> Self {
        Self::new(Transport::Unix)
    }
}
