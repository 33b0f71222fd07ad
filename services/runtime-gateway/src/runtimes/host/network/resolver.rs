//! DNS for private networks.
//!
//! A container uses the name servers of the machine if it can reach them. It cannot reach servers
//! on the machine itself (`systemd-resolved`, `dnsmasq`, that of a container engine) or servers
//! with an IPv6 address. In that case it uses [`Pool::resolver`]. Every gateway with this pool
//! forwards the queries. In a network of [`super::slirp`], the program forwards them.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_util::task::TaskTracker;

use super::firewall::OF_CLOUDS;
use super::{Pool, slirp};
use crate::runtimes::host::unprivileged;
use crate::util::keyed_locks::lock;

const FILE: &str = "/etc/resolv.conf";
/// The file in which `systemd-resolved` lists its upstream servers.
const BEHIND_RESOLVED: &str = "/run/systemd/resolve/resolv.conf";
const PORT: u16 = 53;
/// Limit of concurrent UDP queries per container. Further ones are dropped, and the client repeats
/// them.
const QUESTIONS: usize = 32;
/// Limit of concurrent TCP connections per container. Further ones are closed.
const CONNECTIONS: usize = 8;
/// Timeout of one name server. The C library waits 5 s.
const PATIENCE: Duration = Duration::from_secs(2);
/// Timeout of a TCP connection.
const CONNECTION: Duration = Duration::from_secs(10);
/// Pause after a failure to receive or accept.
const PAUSE: Duration = Duration::from_millis(100);

/// The `resolv.conf` of a container with a private network.
pub(in crate::runtimes::host) fn configuration(pool: Pool) -> String {
    let own = fs::read_to_string(FILE).unwrap_or_default();
    let behind = fs::read_to_string(BEHIND_RESOLVED).ok();
    for text in [Some(&own), behind.as_ref()].into_iter().flatten() {
        let servers = name_servers(text);
        if !servers.is_empty() && servers.iter().all(|server| !is_out_of_reach(*server)) {
            return text.clone();
        }
    }
    let rest = own.lines().filter(|line| !is_name_server(line)).map(|line| format!("{line}\n"));
    let resolver = if unprivileged::is_active() { slirp::resolver(pool) } else { pool.resolver() };
    format!("nameserver {resolver}\n{}", rest.collect::<String>())
}

fn is_name_server(line: &str) -> bool {
    line.split_whitespace().next() == Some("nameserver")
}

fn name_servers(text: &str) -> Vec<IpAddr> {
    let lines = text.lines().filter(|line| is_name_server(line));
    lines.filter_map(|line| line.split_whitespace().nth(1)?.parse().ok()).collect()
}

/// Whether containers cannot reach a server: it is on this machine, is a cloud metadata service, or
/// needs IPv6.
fn is_out_of_reach(server: IpAddr) -> bool {
    let IpAddr::V4(address) = server else { return true };
    let is_in = |(network, bits): &(Ipv4Addr, u8)| {
        (address.to_bits() ^ network.to_bits()).checked_shr(32 - u32::from(*bits)).unwrap_or(0) == 0
    };
    // An address belongs to this machine if a socket can bind to it.
    server.is_loopback() || OF_CLOUDS.iter().any(is_in) || UdpSocket::bind((server, 0)).is_ok()
}

/// Number of operations in progress per container.
#[derive(Debug, Clone)]
struct OperationLimits {
    each: usize,
    taken: Arc<Mutex<HashMap<IpAddr, usize>>>,
}

/// One operation of a container, counted until it is dropped.
struct OperationPermit(OperationLimits, IpAddr);

impl OperationLimits {
    fn new(each: usize) -> Self {
        Self { each, taken: Arc::default() }
    }

    /// `None`: the container has reached its limit.
    fn take(&self, container: IpAddr) -> Option<OperationPermit> {
        let mut taken = lock(&self.taken);
        let count = taken.entry(container).or_default();
        if *count >= self.each {
            return None;
        }
        *count += 1;
        Some(OperationPermit(self.clone(), container))
    }
}

impl Drop for OperationPermit {
    fn drop(&mut self) {
        let mut taken = lock(&self.0.taken);
        if let Some(count) = taken.get_mut(&self.1) {
            *count -= 1;
            if *count == 0 {
                taken.remove(&self.1);
            }
        }
    }
}

/// Serves DNS queries from addresses in `pool` until the future is dropped. Several gateways share
/// the address.
pub(in crate::runtimes::host) async fn serve(pool: Pool) -> io::Result<()> {
    let questions =
        tokio::net::UdpSocket::from_std(UdpSocket::from(bind_socket(pool.resolver(), libc::SOCK_DGRAM)?))?;
    let listener = std::net::TcpListener::from(bind_socket(pool.resolver(), libc::SOCK_STREAM)?);
    let connections = tokio::net::TcpListener::from_std(listener)?;
    let (questions, tasks) = (Arc::new(questions), TaskTracker::new());
    let (asking, connected) = (OperationLimits::new(QUESTIONS), OperationLimits::new(CONNECTIONS));
    let mut buffer = vec![0; 1 << 16];
    loop {
        tokio::select! {
            asked = questions.recv_from(&mut buffer) => match asked {
                // Other machines may send packets to this address through this machine.
                Ok((_, from)) if !pool.contains(from.ip()) => {}
                Ok((length, _)) if !is_question(&buffer[..length]) => {}
                Ok((length, from)) => {
                    let Some(share) = asking.take(from.ip()) else { continue };
                    let (question, questions) = (buffer[..length].to_vec(), Arc::clone(&questions));
                    tasks.spawn(async move {
                        let _share = share;
                        let Some(answer) = query_servers(&question).await else { return };
                        if let Err(error) = questions.send_to(&answer, from).await {
                            tracing::debug!(%error, %from, "cannot answer a DNS query");
                        }
                    });
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot receive DNS queries");
                    tokio::time::sleep(PAUSE).await;
                }
            },
            accepted = connections.accept() => match accepted {
                Ok((_, from)) if !pool.contains(from.ip()) => {}
                Ok((mut connection, from)) => {
                    let Some(share) = connected.take(from.ip()) else { continue };
                    tasks.spawn(async move {
                        let _share = share;
                        let passed = tokio::time::timeout(CONNECTION, forward_queries(&mut connection)).await;
                        if let Ok(Err(error)) = passed {
                            tracing::debug!(%error, %from, "cannot forward DNS queries");
                        }
                    });
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a TCP connection for DNS queries");
                    tokio::time::sleep(PAUSE).await;
                }
            },
        }
    }
}

/// The present name servers of this machine.
fn servers() -> Vec<SocketAddr> {
    let found = name_servers(&fs::read_to_string(FILE).unwrap_or_default());
    let found = if found.is_empty() { vec![IpAddr::V4(Ipv4Addr::LOCALHOST)] } else { found };
    found.into_iter().map(|server| SocketAddr::new(server, PORT)).collect()
}

async fn query_servers(question: &[u8]) -> Option<Vec<u8>> {
    for server in servers() {
        let asked = tokio::time::timeout(PATIENCE, query_server(server, question)).await;
        if let Ok(Ok(answer)) = asked {
            return Some(answer);
        }
    }
    None
}

async fn query_server(server: SocketAddr, question: &[u8]) -> io::Result<Vec<u8>> {
    let any: IpAddr =
        if server.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { std::net::Ipv6Addr::UNSPECIFIED.into() };
    let socket = tokio::net::UdpSocket::bind((any, 0)).await?;
    socket.connect(server).await?;
    socket.send(question).await?;
    let mut answer = vec![0; 1 << 16];
    let length = socket.recv(&mut answer).await?;
    answer.truncate(length);
    Ok(answer)
}

/// Forwards TCP queries in order. Each has its length in front.
async fn forward_queries(connection: &mut tokio::net::TcpStream) -> io::Result<()> {
    let mut upstream = None;
    while let Some(question) = read_message(connection).await? {
        if !is_question(&question) {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let server = match &mut upstream {
            Some(server) => server,
            None => upstream.insert(connect_to_server().await?),
        };
        write_message(server, &question).await?;
        let Some(answer) = read_message(server).await? else { return Ok(()) };
        write_message(connection, &answer).await?;
    }
    Ok(())
}

async fn connect_to_server() -> io::Result<tokio::net::TcpStream> {
    let mut failure = io::Error::from(io::ErrorKind::NotFound);
    for server in servers() {
        match tokio::time::timeout(PATIENCE, tokio::net::TcpStream::connect(server)).await {
            Ok(Ok(upstream)) => return Ok(upstream),
            Ok(Err(error)) => failure = error,
            Err(_) => failure = io::ErrorKind::TimedOut.into(),
        }
    }
    Err(failure)
}

/// `None`: the peer has closed the connection.
async fn read_message(stream: &mut tokio::net::TcpStream) -> io::Result<Option<Vec<u8>>> {
    let length = match stream.read_u16().await {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        length => length?,
    };
    let mut message = vec![0; usize::from(length)];
    stream.read_exact(&mut message).await?;
    Ok(Some(message))
}

async fn write_message(stream: &mut tokio::net::TcpStream, message: &[u8]) -> io::Result<()> {
    let length = u16::try_from(message.len()).map_err(io::Error::other)?;
    stream.write_all(&[&length.to_be_bytes(), message].concat()).await
}

/// Whether a message is a query with one question that is not a zone transfer (RFC 1035). A server
/// on this machine may trust this machine more than containers.
fn is_question(message: &[u8]) -> bool {
    const HEADER: usize = 12;
    const TRANSFERS: [u16; 2] = [251, 252];
    let word = |at: usize| Some(u16::from_be_bytes([*message.get(at)?, *message.get(at + 1)?]));
    let is_query = word(2).is_some_and(|flags| flags & 0xf800 == 0);
    let mut at = HEADER;
    // Labels with their lengths, up to an empty one. A compressed label would refer to another
    // name, which a query does not have.
    while let Some(length) = message.get(at).copied().filter(|length| (1..64).contains(length)) {
        at += 1 + usize::from(length);
    }
    let is_one_name = word(4) == Some(1) && message.get(at) == Some(&0);
    is_query && is_one_name && word(at + 1).is_some_and(|kind| !TRANSFERS.contains(&kind))
}

/// A socket at the resolver's address, which may not exist yet, and which other processes may
/// share.
fn bind_socket(address: Ipv4Addr, kind: libc::c_int) -> io::Result<OwnedFd> {
    let call = |result: libc::c_int| if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) };
    let flags = libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: the call takes no pointers, and the descriptor is new.
    let socket = unsafe { OwnedFd::from_raw_fd(call(libc::socket(libc::AF_INET, kind | flags, 0))?) };
    let size = |length: usize| libc::socklen_t::try_from(length).unwrap_or(0);
    for (level, option) in [
        (libc::IPPROTO_IP, libc::IP_FREEBIND),
        (libc::SOL_SOCKET, libc::SO_REUSEADDR),
        (libc::SOL_SOCKET, libc::SO_REUSEPORT),
    ] {
        let on: libc::c_int = 1;
        let value = (&raw const on).cast();
        // SAFETY: the value has the stated size.
        call(unsafe { libc::setsockopt(socket.as_raw_fd(), level, option, value, size(size_of_val(&on))) })?;
    }
    let place = libc::sockaddr_in {
        sin_family: libc::sa_family_t::try_from(libc::AF_INET).unwrap_or(2),
        sin_port: PORT.to_be(),
        sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(address.octets()) },
        sin_zero: [0; 8],
    };
    let length = size(size_of_val(&place));
    let place = (&raw const place).cast();
    // SAFETY: the address has the stated size.
    call(unsafe { libc::bind(socket.as_raw_fd(), place, length) })?;
    if kind == libc::SOCK_STREAM {
        // SAFETY: the call takes no pointers.
        call(unsafe { libc::listen(socket.as_raw_fd(), 128) })?;
    }
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_servers_are_read() {
        let text = "# nameserver 9.9.9.9\nsearch example.org\nnameserver 192.0.2.1\n nameserver\t::1\nnameserver x\n";
        assert_eq!(
            name_servers(text),
            ["192.0.2.1".parse::<IpAddr>().expect("v4"), "::1".parse().expect("v6")]
        );
    }

    #[test]
    fn only_queries_are_forwarded() {
        let message = |flags: u16, questions: u16, kind: u16| {
            let mut message = vec![0, 1];
            for word in [flags, questions, 0, 0, 0] {
                message.extend(word.to_be_bytes());
            }
            message.extend(b"\x07example\x03org\0");
            message.extend(kind.to_be_bytes());
            message.extend([0, 1]);
            message
        };
        for kind in [1, 28, 255] {
            assert!(is_question(&message(0x0100, 1, kind)));
        }
        let (answer, update, notification) = (0x8000, 5 << 11, 4 << 11);
        for flags in [answer, update, notification] {
            assert!(!is_question(&message(flags, 1, 1)));
        }
        for (questions, kind) in [(0, 1), (2, 1), (1, 251), (1, 252)] {
            assert!(!is_question(&message(0x0100, questions, kind)));
        }
        let whole = message(0, 1, 1);
        assert!((0..whole.len() - 2).all(|end| !is_question(&whole[..end])), "each message is truncated");
        let mut compressed = whole;
        compressed[12] = 0xc0;
        assert!(!is_question(&compressed));
    }

    #[test]
    fn container_cannot_exceed_its_query_limit() {
        let (shares, one, other) =
            (OperationLimits::new(2), IpAddr::from([10, 0, 0, 1]), IpAddr::from([10, 0, 0, 2]));
        let (first, _second) = (shares.take(one), shares.take(one));
        assert!(first.is_some() && shares.take(one).is_none());
        assert!(shares.take(other).is_some(), "each container has a limit");
        drop(first);
        assert!(shares.take(one).is_some());
    }

    #[test]
    fn servers_of_this_machine_are_out_of_reach() {
        for server in ["127.0.0.53", "127.0.0.11", "::1", "2001:db8::1", "168.63.129.16", "169.254.169.254"] {
            assert!(is_out_of_reach(server.parse().expect("an address")), "{server}");
        }
        assert!(!is_out_of_reach("192.0.2.77".parse().expect("an address")));
    }
}
