//! Who calls: how a caller reached the server, and the room that its connection has.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::Semaphore;

use crate::unauthenticated::Probation;

/// Most bytes that count on one connection.
pub(crate) const ROOM: usize = 256 << 20;
/// The room is counted in pieces of so many bytes.
pub(crate) const PIECE: usize = 1 << 10;

/// The room for messages that have arrived in part, of one connection.
#[derive(Debug, Clone)]
pub(crate) struct Room(pub(crate) Arc<Semaphore>);

impl Default for Room {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(ROOM / PIECE)))
    }
}

/// How a caller reached the server. In the extensions of every request.
#[derive(Debug, Clone)]
pub struct Caller {
    reached: Reached,
    /// For messages on its connection.
    room: Room,
    has_hung_up: Arc<AtomicBool>,
}

#[derive(Debug, Clone)]
pub(crate) enum Reached {
    Tcp(Probation),
    /// Over a Unix socket, as a user who may call.
    Unix,
}

impl Caller {
    /// Whether the caller needs no token, for it came over a Unix socket.
    pub(crate) fn is_local(&self) -> bool {
        matches!(self.reached, Reached::Unix)
    }

    pub(crate) fn room(&self) -> Room {
        self.room.clone()
    }

    pub(crate) fn new(reached: Reached) -> Self {
        Self { reached, room: Room::default(), has_hung_up: Arc::default() }
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
        if let Reached::Tcp(probation) = &self.reached {
            probation.end();
        }
    }

    #[cfg(test)]
    pub(crate) fn over_tcp(probation: Probation) -> Self {
        Self::new(Reached::Tcp(probation))
    }

    #[cfg(test)]
    pub(crate) fn over_unix() -> Self {
        Self::new(Reached::Unix)
    }
}
