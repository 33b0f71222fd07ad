//! Listeners of a server on Unix sockets and TCP ports.
//!
//! The listener closes a connection over a Unix socket if the user of its peer may not call. A
//! connection over TCP is closed if none of its calls is admitted in time, or if too many other
//! connections arrive before that.

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
    /// A TCP port. A host without a token does not serve on it.
    Tcp(TcpListener),
    /// A TCP port on which a host without a token admits every caller.
    InsecureTcp(TcpListener),
    /// A Unix socket. The code that bound it removes the socket file.
    Unix(UnixListener),
}

/// Maximum number of connections that wait for their acceptance. The system may allow fewer
/// (`net.core.somaxconn`). With the usual 128, connections fail when all gateways reconnect at
/// once.
const BACKLOG: u32 = 4096;

/// Binds a TCP port, with a backlog for many simultaneous connections.
pub fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    // The port may be bound again while connections of an earlier listener are still closing.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

impl Listener {
    /// Returns the address for clients: `unix:///path` or `http://host:port`. The host is the name
    /// of the machine if the port is bound on all addresses.
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

    /// Whether callers need a token.
    pub(crate) fn needs_token(&self) -> bool {
        matches!(self, Self::Tcp(_))
    }

    /// The connections that are accepted. Those over TCP count as `unauthenticated` until one of
    /// their calls is admitted.
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
                    // The usual cause is a lack of descriptors. An immediate retry would only use
                    // processor time.
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
                Some((accepted, listener))
            }
        })
    }
}

/// Waits while less than a quarter of this process's file descriptors are free. The calls of open
/// connections need them.
async fn leave_files_for_work(listener: &Listener) {
    let listener = match listener {
        Listener::Tcp(tcp) | Listener::InsecureTcp(tcp) => tcp.as_fd(),
        Listener::Unix(unix) => unix.as_fd(),
    };
    static LOGGED: Once = Once::new();
    while inherited::are_files_scarce(listener) {
        LOGGED.call_once(|| {
            tracing::warn!("delaying new connections: less than a quarter of the file descriptors are free");
        });
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Whether the user of the peer of `stream` may call. Logs a rejection.
fn check_user(stream: &UnixStream, unmapped: Option<u32>) -> bool {
    let own = geteuid().as_raw();
    match stream.peer_cred() {
        Ok(peer) if is_trusted(peer.uid(), own, unmapped) => true,
        Ok(peer) => {
            tracing::warn!(
                peer.uid = peer.uid(),
                peer.pid = peer.pid(),
                "rejected a connection over the Unix socket: only user {own} and root may call"
            );
            false
        }
        Err(error) => {
            tracing::warn!(%error, "rejected a connection over the Unix socket: its user is unknown");
            false
        }
    }
}

/// Whether the user `peer` may call a service that runs as the user `own`.
fn is_trusted(peer: u32, own: u32, unmapped: Option<u32>) -> bool {
    Some(peer) != unmapped && (peer == own || peer == 0)
}

/// Returns the user id that represents all users without an id in this user namespace. `None` if
/// every user has an id.
fn unmapped_user() -> Option<u32> {
    const DEFAULT: u32 = 65_534;
    let map = std::fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    if map.split_whitespace().eq(["0", "0", "4294967295"]) {
        return None;
    }
    let id = std::fs::read_to_string("/proc/sys/kernel/overflowuid").ok();
    Some(id.and_then(|id| id.trim().parse().ok()).unwrap_or(DEFAULT))
}

/// An accepted connection.
#[derive(Debug)]
pub(crate) struct Connection {
    io: Io,
    /// Whether the peer has closed the connection.
    has_hung_up: Arc<AtomicBool>,
}

impl From<Io> for Connection {
    fn from(io: Io) -> Self {
        Self { io, has_hung_up: Arc::default() }
    }
}

/// The transport of a connection.
#[derive(Debug)]
enum Io {
    Tcp(Tcp),
    Unix(UnixStream),
}

/// A connection over TCP. It fails when its probation lasts too long, or when it must make room for
/// another connection.
#[derive(Debug)]
pub(crate) struct Tcp {
    stream: TcpStream,
    peer: SocketAddr,
    probation: Probation,
    state: ConnectionState,
}

/// The authentication state of a connection.
#[derive(Debug)]
enum ConnectionState {
    OnProbation { deadline: Pin<Box<Sleep>>, close: CloseSignal },
    Authenticated,
    Broken,
}

impl Tcp {
    /// Counts the connection of `peer` as unauthenticated. Returns `None` if the peer has closed
    /// it.
    pub(crate) fn new(
        stream: TcpStream,
        peer: SocketAddr,
        unauthenticated: &Unauthenticated,
    ) -> Option<Self> {
        // This fails if the peer has closed the connection.
        stream.set_nodelay(true).ok()?;
        let (probation, close) = unauthenticated.admit(peer.ip());
        let deadline = Box::pin(tokio::time::sleep(unauthenticated.deadline()));
        Some(Self { stream, peer, probation, state: ConnectionState::OnProbation { deadline, close } })
    }

    pub(crate) fn caller(&self) -> Caller {
        Caller::new(Transport::Tcp(self.probation.clone()), &self.peer.to_string())
    }

    /// Fails if the connection has not authenticated, and its deadline has passed or it must make
    /// room.
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
        let message = "cannot keep the connection: none of its calls was admitted in time";
        Err(io::Error::new(io::ErrorKind::TimedOut, message))
    }
}

impl Drop for Tcp {
    fn drop(&mut self) {
        // Calls in flight hold clones of the probation, so its drop alone would not end it.
        self.probation.end();
    }
}

impl Connected for Connection {
    type ConnectInfo = Caller;

    fn connect_info(&self) -> Caller {
        let caller = match &self.io {
            Io::Tcp(tcp) => tcp.caller(),
            Io::Unix(unix) => {
                let user = unix.peer_cred().map(|peer| format!("uid {}", peer.uid()));
                Caller::new(Transport::Unix, &user.unwrap_or_default())
            }
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
        // The deadline must also apply to a peer that does not read.
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
    async fn many_connections_may_arrive_at_once() {
        let listener = bind(([127, 0, 0, 1], 0).into()).expect("a port");
        let address = listener.local_addr().expect("bound");
        // The listener accepts no connection.
        let allowed = std::fs::read_to_string("/proc/sys/net/core/somaxconn").expect("a limit");
        let count = allowed.trim().parse::<usize>().expect("a number").min(400);
        let connect = futures::future::join_all((0..count).map(|_| TcpStream::connect(address)));
        let connected =
            tokio::time::timeout(Duration::from_secs(20), connect).await.expect("all connections wait");
        assert!(connected.iter().all(Result::is_ok), "{connected:?}");
    }

    #[test]
    fn only_own_user_and_root_are_trusted() {
        for (peer, trusted) in [(1000, true), (0, true), (1001, false), (65_534, false)] {
            assert_eq!(is_trusted(peer, 1000, None), trusted, "{peer}");
            assert_eq!(is_trusted(peer, 1000, Some(65_534)), trusted, "{peer}");
        }
        assert!(is_trusted(65_534, 65_534, None));
        assert!(!is_trusted(65_534, 65_534, Some(65_534)), "the id may represent any user");
    }
}
