//! Clients of services.
//!
//! A client connects at its first call, and reconnects after a broken connection. Each call carries
//! the trace context of the current span and the credentials of [`Outgoing`].

use std::io;
use std::net::IpAddr;

use http::Uri;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::Endpoint;

pub use crate::outgoing::{INTERNAL_HEADER, Outgoing, PROXY_TICKET_HEADER, TICKET_HEADER};
use crate::replicas::{self, Replica, ReplicaChannel};

/// Client connection to a service. Cheap to clone.
pub type Peer = InterceptedService<ReplicaChannel, Outgoing>;

/// The address of a service is malformed.
#[derive(Debug, thiserror::Error)]
#[error(
    "cannot parse service address {address:?}: use unix:///path or http://host:port, with commas between replicas"
)]
pub struct AddressError {
    address: String,
}

/// Returns a client of the service at `address`: `unix:///path` or `http://host:port`, or several
/// replicas separated by commas. The client connects at its first call, and reconnects after a
/// broken connection.
///
/// The client connects to a random replica that is ready. If that replica does not answer,
/// disconnects, or rejects a call with `UNAVAILABLE`, the client connects to the next one. Replicas
/// therefore share the clients, and all calls of one client reach the same process while it is
/// ready.
pub fn peer(address: &str, outgoing: Outgoing) -> Result<Peer, AddressError> {
    let replicas = parse(address)?;
    let origin = match replicas.as_slice() {
        [Replica::Tcp(_)] => {
            Endpoint::from_shared(address.trim().to_owned()).map_err(|_| malformed(address))?
        }
        _ => Endpoint::from_static("http://replicas"),
    };
    let channel = ReplicaChannel::new(replicas, origin, outgoing.clone());
    Ok(InterceptedService::new(channel, outgoing))
}

/// Checks that a replica of the service at `address` accepts a connection.
///
/// # Errors
///
/// The address is malformed, or no replica accepts a connection within 5 s each.
pub async fn listens(address: &str) -> io::Result<()> {
    let replicas = parse(address).map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
    replicas::try_connect(&replicas).await
}

/// Returns `text` unchanged if [`peer`] accepts it as an address. Used for settings.
pub fn addresses(text: &str) -> Result<String, AddressError> {
    parse(text).map(|_| text.to_owned())
}

/// Whether a client of the service at `address` calls it over a network. A Unix socket and an
/// address of the loopback interface are on this machine.
#[must_use]
pub fn crosses_network(address: &str) -> bool {
    let is_far = |replica: &Replica| match replica {
        Replica::Unix(_) => false,
        Replica::Tcp(address) => {
            let host = address.rsplit_once(':').map_or(address.as_str(), |(host, _)| host);
            let ip = host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
            host != "localhost" && !ip.is_ok_and(|ip| ip.to_canonical().is_loopback())
        }
    };
    parse(address).is_ok_and(|replicas| replicas.iter().any(is_far))
}

fn malformed(address: &str) -> AddressError {
    AddressError { address: address.to_owned() }
}

fn parse(addresses: &str) -> Result<Vec<Replica>, AddressError> {
    let one = |address: &str| {
        if let Some(path) = address.strip_prefix("unix://") {
            return path.starts_with('/').then(|| Replica::Unix(path.into()));
        }
        let uri: Uri = address.parse().ok()?;
        let (scheme, host) = (uri.scheme_str()?, uri.host()?);
        // Reject a path, because it would be silently ignored.
        let plain = scheme == "http" && uri.path() == "/" && uri.query().is_none();
        plain.then(|| Replica::Tcp(format!("{host}:{}", uri.port_u16().unwrap_or(80))))
    };
    addresses.split(',').map(|address| one(address.trim()).ok_or_else(|| malformed(address))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_other_machines_are_behind_a_network() {
        for far in ["http://a:1", "http://192.0.2.1:7400", "http://[2001:db8::1]:1", "unix:///x,http://a:1"] {
            assert!(crosses_network(far), "{far}");
        }
        let near = [
            "unix:///x",
            "http://127.0.0.2:1",
            "http://localhost:1",
            "http://[::1]:1",
            "http://[::ffff:127.0.0.1]:1",
        ];
        for near in near {
            assert!(!crosses_network(near), "{near}");
        }
    }

    #[test]
    fn address_with_path_or_tls_is_rejected() {
        let tcp = |address: &str| Replica::Tcp(address.to_owned());
        assert_eq!(parse("http://a:1").ok(), Some(vec![tcp("a:1")]));
        assert_eq!(parse("http://a:1, http://[::1]:2").ok(), Some(vec![tcp("a:1"), tcp("[::1]:2")]));
        assert_eq!(parse("unix:///x,http://a").ok(), Some(vec![Replica::Unix("/x".into()), tcp("a:80")]));
        for malformed in ["", "a:1", "http://a:1,", "https://a:1", "unix://x", "http://a:1/path", "http://"] {
            assert!(parse(malformed).is_err(), "{malformed:?}");
        }
    }
}
