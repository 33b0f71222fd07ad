//! Where a server listens: a Unix socket or a TCP port.
//!
//! A connection over a Unix socket is closed unless the user of its peer may call. A connection over TCP is closed unless a call of it is
//! admitted in time, and earlier when too many others come meanwhile.

use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Once};
use std::task::{Context, Poll};
use std::time::Duration;

use futures::Stream;
use rustix::process::geteuid;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpSocket, TcpStream, UnixListener, UnixStream};
use tokio::time::Sleep;
use tonic::transport::server::Connected;

use crate::caller::{Caller, Transport};
use crate::inherited;
use crate::unauthenticated::{CloseSignal, Probation, Unauthenticated};

/// A bound address.
#[derive(Debug)]
pub enum Listener {
    /// A port. Only a host with a token serves on it.
    Tcp(TcpListener),
    /// A port that asks for no token unless the host has one: every process that reaches it may call.
    InsecureTcp(TcpListener),
    /// A socket file, which whoever bound it removes.
    Unix(UnixListener),
}

/// How many callers may wait at a port until they are let in; the system may allow fewer (`net.core.somaxconn`). With the usual 128, connections
/// break when all gateways come back at once.
const BACKLOG: u32 = 4096;

/// Listens at a port, so that many callers may come at one moment.
pub fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    // A port that was just listened at is free, though some of its connections are still closing.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

impl Listener {
    /// The address as clients write it: `unix:///path` or `http://host:port`. One that listens on every address is reached by the name of
    /// the machine.
    pub fn endpoint(&self) -> io::Result<String> {
        match self {
            Self::Tcp(listener) | Self::InsecureTcp(listener) => {
                let address = listener.local_addr()?;
                if !address.ip().is_unspecified() {
                    return Ok(format!("http://{address}"));
                }
                let machine = rustix::system::uname();
                Ok(format!("http://{}:{}", machine.nodename().to_string_lossy(), address.port()))
            }
            Self::Unix(listener) => {
                let address = listener.local_addr()?;
                let path = address.as_pathname().ok_or_else(|| io::Error::other("the socket has no path"))?;
                Ok(format!("unix://{}", path.display()))
            }
        }
    }

    /// Whether callers need a token here.
    pub(crate) fn needs_token(&self) -> bool {
        matches!(self, Self::Tcp(_))
    }

    /// The connections that are accepted. Those over TCP count as `unauthenticated` until one of their calls is admitted.
    pub(crate) fn incoming(
        self,
        unauthenticated: Unauthenticated,
    ) -> impl Stream<Item = io::Result<Connection>> + Send {
        let unmapped = unmapped_user();
        futures::stream::unfold(self, move |listener| {
            let unauthenticated = unauthenticated.clone();
            async move {
                let accepted = loop {
                    leave_files_for_work(&listener).await;
                    let accepted = match &listener {
                        Self::Tcp(tcp) | Self::InsecureTcp(tcp) => {
                            let accepted = tcp.accept().await;
                            accepted
                                .map(|(stream, peer)| Tcp::new(stream, peer, &unauthenticated))
                                .map(|tcp| tcp.map(Io::Tcp).map(Connection::from))
                        }
                        Self::Unix(unix) => unix.accept().await.map(|(stream, _)| {
                            let may_call = check_user(&stream, unmapped);
                            may_call.then(|| Io::Unix(stream).into())
                        }),
                    };
                    if let Some(accepted) = accepted.transpose() {
                        break accepted;
                    }
                };
                if accepted.is_err() {
                    // As a rule no descriptor is free; asking again at once would only keep a processor busy.
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
                Some((accepted, listener))
            }
        })
    }
}

/// Waits while less than a quarter of this process's open files are free: connections would take the files that their calls need.
async fn leave_files_for_work(listener: &Listener) {
    let listener = match listener {
        Listener::Tcp(tcp) | Listener::InsecureTcp(tcp) => tcp.as_fd(),
        Listener::Unix(unix) => unix.as_fd(),
    };
    static LOGGED: Once = Once::new();
    while inherited::are_files_scarce(listener) {
        LOGGED.call_once(|| {
            tracing::warn!("new connections wait: most of the files that this process may open are open");
        });
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Whether the user of the process at the other end of `stream` may call. Logs a refusal.
fn check_user(stream: &UnixStream, unmapped: Option<u32>) -> bool {
    let own = geteuid().as_raw();
    match stream.peer_cred() {
        Ok(peer) if is_trusted(peer.uid(), own, unmapped) => true,
        Ok(peer) => {
            tracing::warn!(
                peer.uid = peer.uid(),
                peer.pid = peer.pid(),
                "closed a connection over the Unix socket: only user {own} and root may call"
            );
            false
        }
        Err(error) => {
            tracing::warn!(%error, "closed a connection over the Unix socket: its user is unknown");
            false
        }
    }
}

/// Whether the user `peer` may call a service that runs as the user `own`.
fn is_trusted(peer: u32, own: u32, unmapped: Option<u32>) -> bool {
    Some(peer) != unmapped && (peer == own || peer == 0)
}

/// Returns the user id that stands for all users without an id in our user namespace. `None` if every user has one.
fn unmapped_user() -> Option<u32> {
    const DEFAULT: u32 = 65_534;
    let map = std::fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    if map.split_whitespace().eq(["0", "0", "4294967295"]) {
        return None;
    }
    let id = std::fs::read_to_string("/proc/sys/kernel/overflowuid").ok();
    Some(id.and_then(|id| id.trim().parse().ok()).unwrap_or(DEFAULT))
}

/// A connection that was accepted.
#[derive(Debug)]
pub(crate) struct Connection {
    io: Io,
    /// Whether its peer has closed it.
    has_hung_up: Arc<AtomicBool>,
}

impl From<Io> for Connection {
    fn from(io: Io) -> Self {
        Self { io, has_hung_up: Arc::default() }
    }
}

/// How a connection carries bytes.
#[derive(Debug)]
enum Io {
    Tcp(Tcp),
    Unix(UnixStream),
}

/// A connection over TCP, which breaks when its probation lasts too long, and when it must make room for another one.
#[derive(Debug)]
pub(crate) struct Tcp {
    stream: TcpStream,
    probation: Probation,
    state: ConnectionState,
}

/// How it is with a connection.
#[derive(Debug)]
enum ConnectionState {
    OnProbation { deadline: Pin<Box<Sleep>>, close: CloseSignal },
    Authenticated,
    Broken,
}

impl Tcp {
    /// Counts the connection of `peer` as unauthenticated. `None` if the peer has gone.
    pub(crate) fn new(
        stream: TcpStream,
        peer: SocketAddr,
        unauthenticated: &Unauthenticated,
    ) -> Option<Self> {
        // That fails once the peer has gone.
        stream.set_nodelay(true).ok()?;
        let (probation, close) = unauthenticated.admit(peer.ip());
        let deadline = Box::pin(tokio::time::sleep(unauthenticated.deadline()));
        Some(Self { stream, probation, state: ConnectionState::OnProbation { deadline, close } })
    }

    pub(crate) fn caller(&self) -> Caller {
        Caller::new(Transport::Tcp(self.probation.clone()))
    }

    /// Fails if the connection has not authenticated, and its deadline has passed or another one needs its room.
    fn check(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        match &mut self.state {
            ConnectionState::Authenticated => return Ok(()),
            ConnectionState::OnProbation { deadline, close } => match close.poll(cx) {
                Poll::Ready(false) => {
                    self.state = ConnectionState::Authenticated;
                    return Ok(());
                }
                Poll::Pending if deadline.as_mut().poll(cx).is_pending() => return Ok(()),
                Poll::Pending | Poll::Ready(true) => self.state = ConnectionState::Broken,
            },
            ConnectionState::Broken => {}
        }
        let message = "no call of this connection was admitted in time";
        Err(io::Error::new(io::ErrorKind::TimedOut, message))
    }
}

impl Drop for Tcp {
    fn drop(&mut self) {
        // Calls that are still answered have the probation, too.
        self.probation.end();
    }
}

impl Connected for Connection {
    type ConnectInfo = Caller;

    fn connect_info(&self) -> Caller {
        let caller = match &self.io {
            Io::Tcp(tcp) => tcp.caller(),
            Io::Unix(_) => Caller::new(Transport::Unix),
        };
        caller.with_hang_up(self.has_hung_up.clone())
    }
}

impl AsyncRead for Tcp {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        this.check(cx)?;
        Pin::new(&mut this.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for Tcp {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        // A peer that reads nothing must not outlast the deadline.
        this.check(cx)?;
        Pin::new(&mut this.stream).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        this.check(cx)?;
        Pin::new(&mut this.stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(cx)
    }
}

impl AsyncRead for Connection {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = buf.filled().len();
        let read = match &mut this.io {
            Io::Tcp(tcp) => Pin::new(tcp).poll_read(cx, buf),
            Io::Unix(stream) => Pin::new(stream).poll_read(cx, buf),
        };
        let is_open = match &read {
            Poll::Pending => true,
            Poll::Ready(Ok(())) => buf.filled().len() > before || buf.remaining() == 0,
            Poll::Ready(Err(_)) => false,
        };
        if !is_open {
            this.has_hung_up.store(true, Ordering::Relaxed);
        }
        read
    }
}

impl AsyncWrite for Connection {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        match &mut self.get_mut().io {
            Io::Tcp(tcp) => Pin::new(tcp).poll_write(cx, buf),
            Io::Unix(stream) => Pin::new(stream).poll_write(cx, buf),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match &mut self.get_mut().io {
            Io::Tcp(tcp) => Pin::new(tcp).poll_write_vectored(cx, bufs),
            Io::Unix(stream) => Pin::new(stream).poll_write_vectored(cx, bufs),
        }
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.get_mut().io {
            Io::Tcp(tcp) => Pin::new(tcp).poll_flush(cx),
            Io::Unix(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.get_mut().io {
            Io::Tcp(tcp) => Pin::new(tcp).poll_shutdown(cx),
            Io::Unix(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn many_may_come_at_one_moment() {
        let listener = bind(([127, 0, 0, 1], 0).into()).expect("a port");
        let address = listener.local_addr().expect("bound");
        // Nobody lets them in.
        let allowed = std::fs::read_to_string("/proc/sys/net/core/somaxconn").expect("the system says so");
        let many = allowed.trim().parse::<usize>().expect("a number").min(400);
        let come = futures::future::join_all((0..many).map(|_| TcpStream::connect(address)));
        let came = tokio::time::timeout(Duration::from_secs(20), come).await.expect("all are in line");
        assert!(came.iter().all(Result::is_ok), "{came:?}");
    }

    #[test]
    fn only_own_user_and_root_are_trusted() {
        for (peer, trusted) in [(1000, true), (0, true), (1001, false), (65_534, false)] {
            assert_eq!(is_trusted(peer, 1000, None), trusted, "{peer}");
            assert_eq!(is_trusted(peer, 1000, Some(65_534)), trusted, "{peer}");
        }
        assert!(is_trusted(65_534, 65_534, None));
        assert!(!is_trusted(65_534, 65_534, Some(65_534)), "it may be any user");
    }
}
