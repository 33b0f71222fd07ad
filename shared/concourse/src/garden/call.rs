//! HTTP/1.1 with a Garden server: ordinary requests, and requests that hijack the connection.

use std::io;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use hyper::{Method, Request, StatusCode};
use rustix::net::sockopt;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::error::Error;
use crate::exchange::{self, Failure, Payload, encoded};

/// Limit of the body of an ordinary response, in bytes. The largest are lists of containers and
/// their metrics.
const MAX_BODY: u64 = 32 << 20;
/// Limit of the body of an error response, in bytes, for a request that hijacks the connection.
const MAX_ERROR: usize = 1 << 20;
const MAX_HEAD: usize = 64 << 10;
/// Size of the kernel's send buffer, in bytes. Requests are small.
const SEND_BUFFER: usize = 128 << 10;

/// Joins `parts` into a path. An empty part would name another route, and is rejected.
pub(super) fn path(parts: &[&str]) -> Result<String, Error> {
    if parts.contains(&"") {
        return Err(Error::Refused("a name must not be empty"));
    }
    Ok(parts.iter().flat_map(|part| ["/".to_owned(), encoded(part)]).collect())
}

/// Opens a connection for a call or a stream.
pub(super) async fn connect(address: &str, within: Duration) -> Result<TcpStream, Error> {
    let stream = exchange::connect(address, within).await.map_err(Error::unsent)?;
    // A process that does not read must block its writer. Without this limit, megabytes of input
    // would wait in the buffer.
    let bounded = sockopt::set_socket_send_buffer_size(&stream, SEND_BUFFER);
    bounded.map_err(|error| Error::unsent(error.into()))?;
    Ok(stream)
}

/// Makes an ordinary call on a new connection. Returns the body of a success.
pub(super) async fn call(
    stream: TcpStream,
    address: &str,
    method: &Method,
    target: &str,
    body: Option<&Bytes>,
) -> Result<Bytes, Error> {
    let mut request =
        Request::builder().method(method).uri(target).header(hyper::header::CONNECTION, "close");
    if body.is_some() {
        request = request.header(hyper::header::CONTENT_TYPE, "application/json");
    }
    let request = request.body(Payload::Whole(body.cloned().unwrap_or_default()));
    let request =
        request.map_err(|_| Error::Refused("the method, path and headers form no valid request"))?;
    let answer = exchange::send(stream, address, request).await.map_err(failed)?;
    let status = answer.status;
    let body = answer.body.whole(MAX_BODY).await.map_err(failed)?;
    if status.is_success() { Ok(body.into()) } else { Err(Error::from_answer(status.as_u16(), &body)) }
}

fn failed(failure: Failure) -> Error {
    match failure {
        Failure::Lost(error) | Failure::Source(error) => Error::broken(error),
        Failure::Malformed(text) => Error::Protocol(text),
        Failure::Address => Error::Refused("the address is not a host and a port"),
    }
}

/// Sends a request that hijacks the connection. Returns the bytes that were read after the head of
/// the response.
///
/// The head claims `Transfer-Encoding: chunked`. This is wrong for a stream, and correct for a long
/// error.
pub(super) async fn take_over(
    stream: &mut TcpStream,
    address: &str,
    method: &Method,
    target: &str,
    body: Option<&Bytes>,
    expected: StatusCode,
) -> Result<BytesMut, Error> {
    let mut request = format!("{method} {target} HTTP/1.1\r\nHost: {address}\r\n").into_bytes();
    if let Some(body) = body {
        let length = format!("Content-Type: application/json\r\nContent-Length: {}\r\n", body.len());
        request.extend_from_slice(length.as_bytes());
    }
    request.extend_from_slice(b"\r\n");
    request.extend_from_slice(body.map_or(&[], |body| body));
    stream.write_all(&request).await.map_err(Error::broken)?;

    let mut read = BytesMut::with_capacity(4096);
    let head = loop {
        if let Some(head) = parse_head(&read)? {
            break head;
        }
        if read.len() > MAX_HEAD {
            return Err(Error::Protocol(format!("a head of more than {MAX_HEAD} bytes")));
        }
        more(stream, &mut read).await?;
    };
    let mut beyond = read.split_off(head.length);
    if head.status == expected.as_u16() {
        return Ok(beyond);
    }
    if (200..300).contains(&head.status) {
        return Err(Error::Protocol(format!("status {} instead of {expected}", head.status)));
    }
    let body = error_body(stream, &mut beyond, &head).await?;
    Err(Error::from_answer(head.status, &body))
}

struct Head {
    length: usize,
    status: u16,
    chunked: bool,
    content_length: Option<usize>,
}

fn parse_head(read: &[u8]) -> Result<Option<Head>, Error> {
    let mut headers = [httparse::EMPTY_HEADER; 64];
    let mut response = httparse::Response::new(&mut headers);
    let length = match response.parse(read) {
        Ok(httparse::Status::Complete(length)) => length,
        Ok(httparse::Status::Partial) => return Ok(None),
        Err(error) => return Err(Error::Protocol(format!("not an HTTP response: {error}"))),
    };
    let status = response.code.ok_or_else(|| Error::Protocol("the response has no status".to_owned()))?;
    let named = |name: &str| {
        let header = response.headers.iter().find(|header| header.name.eq_ignore_ascii_case(name));
        header.and_then(|header| std::str::from_utf8(header.value).ok())
    };
    Ok(Some(Head {
        length,
        status,
        chunked: named("transfer-encoding").is_some_and(|coding| coding.eq_ignore_ascii_case("chunked")),
        content_length: named("content-length").and_then(|length| length.trim().parse().ok()),
    }))
}

async fn more(stream: &mut TcpStream, read: &mut BytesMut) -> Result<(), Error> {
    match stream.read_buf(read).await {
        Ok(0) => {
            Err(Error::broken(io::Error::new(io::ErrorKind::UnexpectedEof, "the response is truncated")))
        }
        Ok(_) => Ok(()),
        Err(error) => Err(Error::broken(error)),
    }
}

async fn error_body(stream: &mut TcpStream, read: &mut BytesMut, head: &Head) -> Result<BytesMut, Error> {
    let too_long = || Error::Protocol(format!("an error of more than {MAX_ERROR} bytes"));
    if !head.chunked {
        // A Go server sends a length with every short response.
        let length = head.content_length.unwrap_or(0);
        if length > MAX_ERROR {
            return Err(too_long());
        }
        while read.len() < length {
            more(stream, read).await?;
        }
        return Ok(read.split_to(length));
    }
    let mut body = BytesMut::new();
    loop {
        let (start, size) = loop {
            match httparse::parse_chunk_size(read) {
                Ok(httparse::Status::Complete((start, size))) => break (start, size),
                Ok(httparse::Status::Partial) if read.len() < 1024 => more(stream, read).await?,
                _ => return Err(Error::Protocol("a chunk without a size".to_owned())),
            }
        };
        let size = usize::try_from(size).map_err(|_| too_long())?;
        if size == 0 {
            return Ok(body);
        }
        if body.len().saturating_add(size) > MAX_ERROR {
            return Err(too_long());
        }
        while read.len() < start + size + 2 {
            more(stream, read).await?;
        }
        body.extend_from_slice(&read[start..start + size]);
        let _ = read.split_to(start + size + 2);
    }
}
