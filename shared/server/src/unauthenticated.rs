//! Limits of TCP connections that have not authenticated: their number and their duration.
//!
//! The listener requests a [`Probation`] for each accepted connection. When a limit is reached, the
//! oldest connection makes room for the new one. A stranger that fills the limits therefore cannot
//! lock out callers, because a caller authenticates at once. The admission layer ends the probation
//! when it admits the connection's first call. A connection fails when its probation lasts too
//! long, or when it must make room.
//!
//! Invariant: strangers at one address hold at most [`Limits::per_address`] descriptors, in
//! addition to closing connections. The [`Table`] enforces it. It contains each connection until
//! the connection authenticates or closes.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::{IpAddr, Ipv6Addr};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

/// Limits of connections that have not authenticated.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// Maximum time until the first admitted call of a connection.
    pub(crate) deadline: Duration,
    /// Maximum number of connections from one IPv4 address, or from one IPv6 network of 64 bits.
    pub(crate) per_address: usize,
    /// Maximum number of connections from all addresses. It must be well below 1024, the usual
    /// limit of descriptors.
    pub(crate) total: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { deadline: Duration::from_secs(10), per_address: 128, total: 512 }
    }
}

/// Minimum interval of warnings about connections that had to make room.
const WARNING_INTERVAL: Duration = Duration::from_secs(10);

/// The connections of a server that have not authenticated. All clones share the table.
#[derive(Debug, Clone)]
pub(crate) struct Unauthenticated {
    limits: Limits,
    table: Arc<Mutex<Table>>,
}

/// Connections by number. Later connections have higher numbers.
#[derive(Debug, Default)]
struct Table {
    next: u64,
    connections: BTreeMap<u64, Entry>,
    per_address: HashMap<IpAddr, BTreeSet<u64>>,
    /// Number of connections that had to make room since the last warning.
    closed: u64,
    warned_at: Option<Instant>,
}

#[derive(Debug)]
struct Entry {
    network: IpAddr,
    /// Closes the connection.
    close: oneshot::Sender<()>,
}

impl Unauthenticated {
    pub(crate) fn new(limits: Limits) -> Self {
        Self { limits, table: Arc::default() }
    }

    pub(crate) fn deadline(&self) -> Duration {
        self.limits.deadline
    }

    /// Counts a new connection from `address`. If a limit is reached, closes the oldest connection
    /// of this address or of all addresses.
    pub(crate) fn admit(&self, address: IpAddr) -> (Probation, CloseSignal) {
        let network = network(address);
        let (close, closed) = oneshot::channel();
        let mut table = lock(&self.table);
        let of_address = table.per_address.get(&network);
        let oldest_of_address = of_address.filter(|numbers| numbers.len() >= self.limits.per_address);
        let oldest_of_address = oldest_of_address.and_then(BTreeSet::first).copied();
        if let Some(oldest) = oldest_of_address {
            table.close(oldest, "connections of this address");
        } else if table.connections.len() >= self.limits.total
            && let Some(oldest) = table.connections.keys().next().copied()
        {
            table.close(oldest, "connections");
        }
        let number = table.next;
        table.next += 1;
        table.connections.insert(number, Entry { network, close });
        table.per_address.entry(network).or_default().insert(number);
        let ended = AtomicBool::new(false);
        (Probation(Arc::new(State { number, ended, table: self.table.clone() })), CloseSignal(closed))
    }

    #[cfg(test)]
    pub(crate) fn total(&self) -> usize {
        lock(&self.table).connections.len()
    }
}

impl Table {
    /// Closes the connection `number`, and logs that too many `what` have not authenticated.
    fn close(&mut self, number: u64, what: &str) {
        let Some(Entry { network, close }) = self.remove(number) else { return };
        // The receiver is gone if the connection is just closing.
        _ = close.send(());
        self.closed += 1;
        let now = Instant::now();
        if self.warned_at.is_none_or(|warned_at| now.duration_since(warned_at) >= WARNING_INTERVAL) {
            tracing::warn!(
                peer.network = %network,
                connections.total = self.connections.len(),
                connections.closed = self.closed,
                "closed the oldest of too many {what} that have not authenticated"
            );
            (self.closed, self.warned_at) = (0, Some(now));
        }
    }

    fn remove(&mut self, number: u64) -> Option<Entry> {
        let entry = self.connections.remove(&number)?;
        if let Some(of_address) = self.per_address.get_mut(&entry.network) {
            of_address.remove(&number);
            if of_address.is_empty() {
                self.per_address.remove(&entry.network);
            }
        }
        Some(entry)
    }
}

/// The time before a connection authenticates. All clones belong to the same connection.
#[derive(Debug, Clone)]
pub(crate) struct Probation(Arc<State>);

#[derive(Debug)]
struct State {
    number: u64,
    /// Whether the probation has ended. Later calls of the connection check this without locking
    /// the table.
    ended: AtomicBool,
    table: Arc<Mutex<Table>>,
}

impl Probation {
    /// Ends the probation: the connection has authenticated, or is closed.
    pub(crate) fn end(&self) {
        if !self.0.ended.swap(true, Ordering::Relaxed) {
            lock(&self.0.table).remove(self.0.number);
        }
    }

    #[cfg(test)]
    pub(crate) fn has_ended(&self) -> bool {
        self.0.ended.load(Ordering::Relaxed)
    }
}

/// Signals a connection that it must make room for another one.
#[derive(Debug)]
pub(crate) struct CloseSignal(oneshot::Receiver<()>);

impl CloseSignal {
    /// Returns `Pending` during the probation, then `true` if the connection must close, or `false`
    /// if it has authenticated. Must not be called again after that.
    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<bool> {
        Pin::new(&mut self.0).poll(cx).map(|signal| signal.is_ok())
    }
}

/// Returns the IPv4 address, or the IPv6 network of 64 bits, that one host may control.
fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() & (u128::MAX << 64)).into(),
        address @ IpAddr::V4(_) => address,
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use super::*;

    impl CloseSignal {
        fn is_closed(&mut self) -> bool {
            self.poll(&mut Context::from_waker(Waker::noop())) == Poll::Ready(true)
        }
    }

    #[test]
    fn oldest_connection_makes_room_for_new_one() {
        let limits = Limits { per_address: 2, total: 3, ..Limits::default() };
        let connections = Unauthenticated::new(limits);
        let admit = |address: &str| connections.admit(address.parse().expect("an address"));
        let mut first = admit("192.0.2.1");
        let mut second = admit("::ffff:192.0.2.1");
        let mut other = admit("2001:db8::1");
        assert!(!first.1.is_closed());
        let mut third = admit("192.0.2.1");
        assert!(first.1.is_closed(), "the oldest connection of a full address is closed");
        assert!(!second.1.is_closed() && !other.1.is_closed());
        let mut last = admit("198.51.100.1");
        assert!(second.1.is_closed(), "the oldest connection of a full server is closed");
        assert_eq!(connections.total(), 3);

        other.0.end();
        assert!(other.0.has_ended() && connections.total() == 2);
        let again = (admit("2001:db8::2:1"), admit("2001:db8::1:0:0:1"));
        assert!(!other.1.is_closed(), "an authenticated connection makes no room");
        assert!(third.1.is_closed() && !last.1.is_closed());
        // The end of a connection that has made room already changes nothing.
        for (probation, _) in [first, second, third] {
            probation.end();
        }
        assert_eq!(connections.total(), 3);
        last.0.end();
        for (probation, _) in [again.0, again.1] {
            probation.end();
        }
        assert_eq!(connections.total(), 0);
        assert!(lock(&connections.table).per_address.is_empty(), "empty addresses are removed");
    }
}
