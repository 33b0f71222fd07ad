//! Limits of connections over TCP that have not authenticated: how many a server keeps open, and for how long.
//!
//! The listener asks for a [`Probation`] of each connection that it accepts, and closes a connection that gets none. The admission layer
//! ends the probation when the connection's first call is admitted. The connection breaks itself when its probation lasts too long.
//!
//! Invariant: a stranger holds at most [`Limits::per_address`] descriptors of the server. A [`Permit`], which counts its connection until
//! it is dropped, enforces it.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Limits of connections that have not authenticated.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// Time in which the first call of a connection must be admitted.
    pub(crate) deadline: Duration,
    /// Connections from one address; of IPv6, from one network of 64 bits.
    pub(crate) per_address: usize,
    /// Connections from all addresses. Well below 1024, the usual limit of descriptors of a process.
    pub(crate) total: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { deadline: Duration::from_secs(10), per_address: 128, total: 512 }
    }
}

/// Interval of warnings about connections that were closed at once.
const WARNING_INTERVAL: Duration = Duration::from_secs(10);

/// The connections of a server that have not authenticated. Clones count together.
#[derive(Debug, Clone)]
pub(crate) struct Unauthenticated {
    limits: Limits,
    counts: Arc<Mutex<Counts>>,
}

#[derive(Debug, Default)]
struct Counts {
    total: usize,
    per_address: HashMap<IpAddr, usize>,
    /// Connections that were closed since the last warning.
    closed: u64,
    warned_at: Option<Instant>,
}

impl Unauthenticated {
    pub(crate) fn new(limits: Limits) -> Self {
        Self { limits, counts: Arc::default() }
    }

    pub(crate) fn deadline(&self) -> Duration {
        self.limits.deadline
    }

    /// Counts a new connection from `address`. `None` if there are too many: the connection must be closed.
    pub(crate) fn admit(&self, address: IpAddr) -> Option<Probation> {
        let network = network(address);
        let mut counts = lock(&self.counts);
        let of_address = counts.per_address.get(&network).copied().unwrap_or(0);
        if counts.total >= self.limits.total || of_address >= self.limits.per_address {
            counts.closed += 1;
            let now = Instant::now();
            if counts.warned_at.is_none_or(|warned_at| now.duration_since(warned_at) >= WARNING_INTERVAL) {
                tracing::warn!(
                    peer.address = %address,
                    connections.of_address = of_address,
                    connections.total = counts.total,
                    connections.closed = counts.closed,
                    "closed connections: too many others have not authenticated yet"
                );
                (counts.closed, counts.warned_at) = (0, Some(now));
            }
            return None;
        }
        counts.total += 1;
        *counts.per_address.entry(network).or_default() += 1;
        let permit = Permit { network, counts: self.counts.clone() };
        Some(Probation(Arc::new(Mutex::new(Some(permit)))))
    }

    #[cfg(test)]
    pub(crate) fn total(&self) -> usize {
        lock(&self.counts).total
    }
}

/// The time of a connection before it authenticates. Clones are of the same connection.
#[derive(Debug, Clone)]
pub(crate) struct Probation(Arc<Mutex<Option<Permit>>>);

impl Probation {
    /// Ends the probation: the connection has authenticated, or is closed.
    pub(crate) fn end(&self) {
        lock(&self.0).take();
    }

    pub(crate) fn has_ended(&self) -> bool {
        lock(&self.0).is_none()
    }
}

/// Counts one connection as long as it exists.
#[derive(Debug)]
struct Permit {
    network: IpAddr,
    counts: Arc<Mutex<Counts>>,
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut counts = lock(&self.counts);
        counts.total -= 1;
        if let Entry::Occupied(mut of_address) = counts.per_address.entry(self.network) {
            *of_address.get_mut() -= 1;
            if *of_address.get() == 0 {
                of_address.remove();
            }
        }
    }
}

/// Returns what stands for all addresses that one host may have.
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
    use super::*;

    #[test]
    fn each_address_and_all_together_are_limited() {
        let limits = Limits { per_address: 2, total: 3, ..Limits::default() };
        let connections = Unauthenticated::new(limits);
        let admit = |address: &str| connections.admit(address.parse().expect("an address"));
        let first = admit("192.0.2.1").expect("the first");
        let second = admit("::ffff:192.0.2.1").expect("the second");
        assert!(admit("192.0.2.1").is_none(), "two of this address are open");
        let other = admit("2001:db8::1").expect("another address");
        assert!(admit("192.0.2.3").is_none(), "three are open");

        first.end();
        assert!(first.has_ended() && !second.has_ended());
        let again = admit("2001:db8::2:1").expect("one has authenticated");
        drop(second);
        assert!(admit("2001:db8::3:1").is_none(), "two of this network are open");
        drop((other, again));
        assert_eq!(connections.total(), 0);
        assert!(lock(&connections.counts).per_address.is_empty(), "addresses are forgotten");
    }
}
