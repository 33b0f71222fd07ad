//! Where a server listens: a Unix socket or a TCP port.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use futures::Stream;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpSocket, TcpStream, UnixListener, UnixStream};
use tonic::transport::server::Connected;

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
const WAITING: u32 = 4096;

/// Listens at a port, so that many callers may come at one moment.
pub fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    // A port that was just listened at is free, though some of its connections are still closing.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(WAITING)
}

/// How a caller reached us. In the extensions of every request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PeerKind {
    /// Over TCP.
    Tcp,
    /// Over the Unix socket, whose permissions say who may.
    Unix,
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

    pub(crate) fn incoming(self) -> impl Stream<Item = io::Result<Connection>> + Send {
        futures::stream::unfold(self, async |listener| {
            let accepted = match &listener {
                Self::Tcp(tcp) | Self::InsecureTcp(tcp) => match tcp.accept().await {
                    Ok((stream, _)) => stream.set_nodelay(true).map(|()| Connection::Tcp(stream)),
                    Err(error) => Err(error),
                },
                Self::Unix(unix) => unix.accept().await.map(|(stream, _)| Connection::Unix(stream)),
            };
            if accepted.is_err() {
                // As a rule no descriptor is free; asking again at once would only keep a processor busy.
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            Some((accepted, listener))
        })
    }
}

/// A connection that was accepted.
#[derive(Debug)]
pub(crate) enum Connection {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Connected for Connection {
    type ConnectInfo = PeerKind;

    fn connect_info(&self) -> PeerKind {
        match self {
            Self::Tcp(_) => PeerKind::Tcp,
            Self::Unix(_) => PeerKind::Unix,
        }
    }
}

impl AsyncRead for Connection {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_read(cx, buf),
            Self::Unix(stream) => Pin::new(stream).poll_read(cx, buf),
        }
    }
}

impl AsyncWrite for Connection {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_write(cx, buf),
            Self::Unix(stream) => Pin::new(stream).poll_write(cx, buf),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_write_vectored(cx, bufs),
            Self::Unix(stream) => Pin::new(stream).poll_write_vectored(cx, bufs),
        }
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_flush(cx),
            Self::Unix(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_shutdown(cx),
            Self::Unix(stream) => Pin::new(stream).poll_shutdown(cx),
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
}
