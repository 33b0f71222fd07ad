//! An HTTP request and its response on a new connection, for both servers of a worker.
//!
//! There is no background task. The future of the response and the reader of its body drive the
//! connection. Dropping either of them closes it.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf, Bytes};
use http::{Request, StatusCode, header};
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use rustix::net::sockopt;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

const KEEP_ALIVE: Duration = Duration::from_secs(30);
const PLAIN: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.').remove(b'~');

/// Percent-encodes `text` for a path or a query.
pub(crate) fn encoded(text: &str) -> String {
    utf8_percent_encode(text, PLAIN).to_string()
}

/// The reason why a request has no response.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The connection broke. The worker may have executed the request.
    Lost(io::Error),
    /// The source of the request body failed.
    Source(io::Error),
    /// The response is not HTTP, or exceeds a size limit.
    Malformed(String),
    /// The address is invalid, and nothing was sent.
    Address,
}

/// Opens a connection. It may be idle for hours while a process runs or a volume is copied, so TCP
/// keepalive detects a lost worker.
pub(crate) async fn connect(address: &str, within: Duration) -> io::Result<TcpStream> {
    let late = || io::Error::new(io::ErrorKind::TimedOut, "timeout while connecting");
    let stream = tokio::time::timeout(within, TcpStream::connect(address)).await.map_err(|_| late())??;
    stream.set_nodelay(true)?;
    sockopt::set_socket_keepalive(&stream, true)?;
    sockopt::set_tcp_keepidle(&stream, KEEP_ALIVE)?;
    sockopt::set_tcp_keepintvl(&stream, KEEP_ALIVE)?;
    Ok(stream)
}

/// The body of a request.
pub(crate) enum Payload {
    /// A complete body, possibly empty.
    Whole(Bytes),
    /// A stream, sent in chunks.
    Stream(Pin<Box<dyn AsyncRead + Send>>),
}

impl Body for Payload {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        match &mut *self {
            Self::Whole(bytes) if bytes.is_empty() => Poll::Ready(None),
            Self::Whole(bytes) => Poll::Ready(Some(Ok(Frame::data(std::mem::take(bytes))))),
            Self::Stream(source) => {
                let mut chunk = vec![0; 64 * 1024];
                let mut buffer = ReadBuf::new(&mut chunk);
                ready!(source.as_mut().poll_read(cx, &mut buffer))?;
                let filled = buffer.filled().len();
                chunk.truncate(filled);
                Poll::Ready((filled > 0).then(|| Ok(Frame::data(chunk.into()))))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        matches!(self, Self::Whole(bytes) if bytes.is_empty())
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Whole(bytes) => SizeHint::with_exact(bytes.len() as u64),
            Self::Stream(_) => SizeHint::default(),
        }
    }
}

/// A connection that ignores write errors. The worker may have answered and closed the connection
/// before it had read the whole request, and its answer must still be read. Without an answer,
/// reading fails.
struct Socket {
    stream: TcpStream,
    unheard: bool,
}

impl AsyncRead for Socket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for Socket {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        if self.unheard {
            return Poll::Ready(Ok(buf.len()));
        }
        match ready!(Pin::new(&mut self.stream).poll_write(cx, buf)) {
            Ok(written) => Poll::Ready(Ok(written)),
            Err(_) => {
                self.unheard = true;
                Poll::Ready(Ok(buf.len()))
            }
        }
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        _ = ready!(Pin::new(&mut self.stream).poll_shutdown(cx));
        Poll::Ready(Ok(()))
    }
}

type Connection = Pin<Box<http1::Connection<TokioIo<Socket>, Payload>>>;

/// A response with an unread body.
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) body: AnswerBody,
}

/// The body of a response, and its connection.
pub(crate) struct AnswerBody {
    connection: Option<Connection>,
    incoming: Incoming,
    chunk: Bytes,
}

impl AsyncRead for AnswerBody {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        loop {
            if !this.chunk.is_empty() {
                let size = this.chunk.len().min(buf.remaining());
                buf.put_slice(&this.chunk[..size]);
                this.chunk.advance(size);
                return Poll::Ready(Ok(()));
            }
            if let Some(connection) = &mut this.connection
                && connection.as_mut().poll(cx).is_ready()
            {
                // The body reports errors of the connection as well.
                this.connection = None;
            }
            match ready!(Pin::new(&mut this.incoming).poll_frame(cx)) {
                None => return Poll::Ready(Ok(())),
                Some(Err(error)) => return Poll::Ready(Err(connection_error(error))),
                Some(Ok(frame)) => this.chunk = frame.into_data().unwrap_or_default(),
            }
        }
    }
}

impl AnswerBody {
    /// Reads the whole body, if it has at most `limit` bytes.
    pub(crate) async fn whole(self, limit: u64) -> Result<Vec<u8>, Failure> {
        let mut bytes = Vec::new();
        self.take(limit + 1).read_to_end(&mut bytes).await.map_err(Failure::Lost)?;
        if bytes.len() as u64 > limit {
            return Err(Failure::Malformed(format!("a body of more than {limit} bytes")));
        }
        Ok(bytes)
    }
}

/// Sends `request` to the server at `authority` over `stream`, and waits for the head of the
/// response.
pub(crate) async fn send(
    stream: TcpStream,
    authority: &str,
    mut request: Request<Payload>,
) -> Result<Answer, Failure> {
    let host = authority.parse().map_err(|_| Failure::Address)?;
    request.headers_mut().insert(header::HOST, host);
    let socket = TokioIo::new(Socket { stream, unheard: false });
    let (mut sender, connection) = http1::handshake(socket).await.map_err(failure)?;
    let mut connection = Some(Box::pin(connection));
    let mut answer = Box::pin(sender.send_request(request));
    let answer = std::future::poll_fn(|cx| {
        if let Some(open) = &mut connection
            && open.as_mut().poll(cx).is_ready()
        {
            // The connection has delivered its data or its error.
            connection = None;
        }
        answer.as_mut().poll(cx)
    });
    let (head, incoming) = answer.await.map_err(failure)?.into_parts();
    Ok(Answer { status: head.status, body: AnswerBody { connection, incoming, chunk: Bytes::new() } })
}

fn connection_error(error: hyper::Error) -> io::Error {
    match failure(error) {
        Failure::Lost(error) | Failure::Source(error) => error,
        Failure::Malformed(text) => io::Error::other(text),
        Failure::Address => io::ErrorKind::Other.into(),
    }
}

fn failure(error: hyper::Error) -> Failure {
    let source = std::error::Error::source(&error).and_then(|source| source.downcast_ref::<io::Error>());
    let kind = match source {
        Some(source) if error.is_user() => {
            return Failure::Source(io::Error::new(source.kind(), source.to_string()));
        }
        _ if error.is_parse() => return Failure::Malformed(error.to_string()),
        Some(source) => source.kind(),
        None if error.is_incomplete_message() => io::ErrorKind::UnexpectedEof,
        None => io::ErrorKind::Other,
    };
    Failure::Lost(io::Error::new(kind, error))
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt;
    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn idle_connection_is_probed() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let stream = connect(&address, Duration::from_secs(10)).await.unwrap();
        assert!(sockopt::socket_keepalive(&stream).unwrap());
        assert_eq!(sockopt::tcp_keepidle(&stream).unwrap(), KEEP_ALIVE);
        assert_eq!(sockopt::tcp_keepintvl(&stream).unwrap(), KEEP_ALIVE);
    }

    #[tokio::test]
    async fn answer_is_read_after_peer_closed_early() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let mut socket = Socket { stream, unheard: false };
        let (mut peer, _) = listener.accept().await.unwrap();
        socket.write_all(&[0; 1000]).await.unwrap();
        peer.readable().await.unwrap();
        peer.write_all(b"answer").await.unwrap();
        drop(peer); // Unread bytes make the close a reset.

        while !socket.unheard {
            socket.write_all(&[0; 1000]).await.expect("to fail to be heard is no failure");
        }

        let mut answer = [0; 6];
        socket.read_exact(&mut answer).await.unwrap();
        assert_eq!(&answer, b"answer");
    }
}
