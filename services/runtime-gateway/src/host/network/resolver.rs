//! Names in private networks.
//!
//! A container asks the name servers that the machine asks, as long as it can reach them. It cannot reach those on the machine
//! itself (`systemd-resolved`, `dnsmasq`, the one of a container engine), nor those with an IPv6 address. Then it asks
//! [`Pool::resolver`], where every gateway with that pool passes questions on and answers back.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio_util::task::TaskTracker;

use super::Pool;
use crate::locks::held;

const FILE: &str = "/etc/resolv.conf";
/// Where `systemd-resolved` lists the servers that it asks itself.
const BEHIND_RESOLVED: &str = "/run/systemd/resolve/resolv.conf";
const PORT: u16 = 53;
/// Questions over UDP that are passed on at a time for one container. Further ones are dropped, and the asker asks again.
const QUESTIONS: usize = 32;
/// Connections over TCP at a time from one container. Further ones are closed.
const CONNECTIONS: usize = 8;
/// How long one name server may take. The C library waits 5 s.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long a connection with questions over TCP may last.
const CONNECTION: Duration = Duration::from_secs(10);
/// Pause after a failure to receive or accept.
const PAUSE: Duration = Duration::from_millis(100);

/// The `resolv.conf` of a container with a private network.
pub(in crate::host) fn configuration(pool: Pool) -> String {
    let own = fs::read_to_string(FILE).unwrap_or_default();
    let behind = fs::read_to_string(BEHIND_RESOLVED).ok();
    for text in [Some(&own), behind.as_ref()].into_iter().flatten() {
        let servers = name_servers(text);
        if !servers.is_empty() && servers.iter().all(|server| !is_out_of_reach(*server)) {
            return text.clone();
        }
    }
    let rest = own.lines().filter(|line| !is_name_server(line)).map(|line| format!("{line}\n"));
    format!("nameserver {}\n{}", pool.resolver(), rest.collect::<String>())
}

fn is_name_server(line: &str) -> bool {
    line.split_whitespace().next() == Some("nameserver")
}

fn name_servers(text: &str) -> Vec<IpAddr> {
    let lines = text.lines().filter(|line| is_name_server(line));
    lines.filter_map(|line| line.split_whitespace().nth(1)?.parse().ok()).collect()
}

/// Whether a container cannot ask that server: it is on this machine, or needs IPv6.
fn is_out_of_reach(server: IpAddr) -> bool {
    // An address is this machine's if a socket can have it.
    server.is_ipv6() || server.is_loopback() || UdpSocket::bind((server, 0)).is_ok()
}

/// How much of something each container has under way.
#[derive(Debug, Clone)]
struct Shares {
    each: usize,
    taken: Arc<Mutex<HashMap<IpAddr, usize>>>,
}

/// One of the share of a container, until it is dropped.
struct Share(Shares, IpAddr);

impl Shares {
    fn new(each: usize) -> Self {
        Self { each, taken: Arc::default() }
    }

    /// `None`: the container has all of its share under way.
    fn take(&self, container: IpAddr) -> Option<Share> {
        let mut taken = held(&self.taken);
        let count = taken.entry(container).or_default();
        if *count >= self.each {
            return None;
        }
        *count += 1;
        Some(Share(self.clone(), container))
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        let mut taken = held(&self.0.taken);
        if let Some(count) = taken.get_mut(&self.1) {
            *count -= 1;
            if *count == 0 {
                taken.remove(&self.1);
            }
        }
    }
}

/// Answers questions of containers, whose addresses are in `pool`, until this future is dropped. Several gateways share the address.
pub(in crate::host) async fn serve(pool: Pool) -> io::Result<()> {
    let questions =
        tokio::net::UdpSocket::from_std(UdpSocket::from(bound(pool.resolver(), libc::SOCK_DGRAM)?))?;
    let listener = std::net::TcpListener::from(bound(pool.resolver(), libc::SOCK_STREAM)?);
    let connections = tokio::net::TcpListener::from_std(listener)?;
    let (questions, tasks) = (Arc::new(questions), TaskTracker::new());
    let (asking, connected) = (Shares::new(QUESTIONS), Shares::new(CONNECTIONS));
    let mut buffer = vec![0; 1 << 16];
    loop {
        tokio::select! {
            asked = questions.recv_from(&mut buffer) => match asked {
                // Others than containers may send packets to this address, by way of the machine.
                Ok((_, from)) if !pool.contains(from.ip()) => {}
                Ok((length, from)) => {
                    let Some(share) = asking.take(from.ip()) else { continue };
                    let (question, questions) = (buffer[..length].to_vec(), Arc::clone(&questions));
                    tasks.spawn(async move {
                        let _share = share;
                        let Some(answer) = ask(&question).await else { return };
                        if let Err(error) = questions.send_to(&answer, from).await {
                            tracing::debug!(%error, %from, "cannot answer a question for a name");
                        }
                    });
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot receive questions for names");
                    tokio::time::sleep(PAUSE).await;
                }
            },
            accepted = connections.accept() => match accepted {
                Ok((_, from)) if !pool.contains(from.ip()) => {}
                Ok((mut connection, from)) => {
                    let Some(share) = connected.take(from.ip()) else { continue };
                    tasks.spawn(async move {
                        let _share = share;
                        let passed = tokio::time::timeout(CONNECTION, pass_on(&mut connection)).await;
                        if let Ok(Err(error)) = passed {
                            tracing::debug!(%error, %from, "cannot pass on questions for names");
                        }
                    });
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot accept questions for names");
                    tokio::time::sleep(PAUSE).await;
                }
            },
        }
    }
}

/// The servers that this machine asks now.
fn servers() -> Vec<SocketAddr> {
    let found = name_servers(&fs::read_to_string(FILE).unwrap_or_default());
    let found = if found.is_empty() { vec![IpAddr::V4(Ipv4Addr::LOCALHOST)] } else { found };
    found.into_iter().map(|server| SocketAddr::new(server, PORT)).collect()
}

async fn ask(question: &[u8]) -> Option<Vec<u8>> {
    for server in servers() {
        let asked = tokio::time::timeout(PATIENCE, ask_one(server, question)).await;
        if let Ok(Ok(answer)) = asked {
            return Some(answer);
        }
    }
    None
}

async fn ask_one(server: SocketAddr, question: &[u8]) -> io::Result<Vec<u8>> {
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

async fn pass_on(connection: &mut tokio::net::TcpStream) -> io::Result<()> {
    let mut failure = io::Error::from(io::ErrorKind::NotFound);
    for server in servers() {
        match tokio::time::timeout(PATIENCE, tokio::net::TcpStream::connect(server)).await {
            Ok(Ok(mut upstream)) => {
                return tokio::io::copy_bidirectional(connection, &mut upstream).await.map(|_| ());
            }
            Ok(Err(error)) => failure = error,
            Err(_) => failure = io::ErrorKind::TimedOut.into(),
        }
    }
    Err(failure)
}

/// A socket at the resolver's address, which need not be there yet, and which others may have too.
fn bound(address: Ipv4Addr, kind: libc::c_int) -> io::Result<OwnedFd> {
    let call = |result: libc::c_int| if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) };
    let flags = libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: takes no pointers, and the descriptor is new.
    let socket = unsafe { OwnedFd::from_raw_fd(call(libc::socket(libc::AF_INET, kind | flags, 0))?) };
    let size = |length: usize| libc::socklen_t::try_from(length).unwrap_or(0);
    for (level, option) in [
        (libc::IPPROTO_IP, libc::IP_FREEBIND),
        (libc::SOL_SOCKET, libc::SO_REUSEADDR),
        (libc::SOL_SOCKET, libc::SO_REUSEPORT),
    ] {
        let on: libc::c_int = 1;
        let value = (&raw const on).cast();
        // SAFETY: the value has the size that is said.
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
    // SAFETY: the address has the size that is said.
    call(unsafe { libc::bind(socket.as_raw_fd(), place, length) })?;
    if kind == libc::SOCK_STREAM {
        // SAFETY: takes no pointers.
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
    fn container_has_no_more_than_its_share() {
        let (shares, one, other) = (Shares::new(2), IpAddr::from([10, 0, 0, 1]), IpAddr::from([10, 0, 0, 2]));
        let (first, _second) = (shares.take(one), shares.take(one));
        assert!(first.is_some() && shares.take(one).is_none());
        assert!(shares.take(other).is_some(), "each has a share");
        drop(first);
        assert!(shares.take(one).is_some());
    }

    #[test]
    fn servers_of_this_machine_are_out_of_reach() {
        for server in ["127.0.0.53", "127.0.0.11", "::1", "2001:db8::1"] {
            assert!(is_out_of_reach(server.parse().expect("an address")), "{server}");
        }
        assert!(!is_out_of_reach("192.0.2.77".parse().expect("an address")));
    }
}
