//! HTTP/1.1 with the exact bytes of Go's server.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use percent_encoding::percent_decode_str;
use rustix::net::sockopt;

pub(super) struct Request {
    pub method: String,
    /// The target of the request line, with the query.
    pub target: String,
    /// Decoded segments of the path.
    pub parts: Vec<String>,
    pub query: Vec<(String, String)>,
    pub body: Vec<u8>,
    pub close: bool,
}

pub(super) struct Connection {
    pub socket: Arc<TcpStream>,
    /// Bytes that were read after the last request.
    pub beyond: Vec<u8>,
    /// Whether answers are written byte by byte.
    pub dribble: bool,
    /// Whether answers are suppressed.
    pub mute: bool,
    /// The error to return after the request has been executed.
    pub failing: Option<String>,
}

fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

fn decoded(text: &str) -> String {
    percent_decode_str(text).decode_utf8_lossy().into_owned()
}

impl Connection {
    pub(super) fn new(socket: Arc<TcpStream>) -> Self {
        Self { socket, beyond: Vec::new(), dribble: false, mute: false, failing: None }
    }

    fn more(&mut self) -> io::Result<bool> {
        let mut part = [0; 4096];
        let read = (&*self.socket).read(&mut part)?;
        self.beyond.extend_from_slice(&part[..read]);
        Ok(read > 0)
    }

    /// Reads the next request. `None`: the client has closed the connection.
    pub(super) fn request(&mut self) -> io::Result<Option<Request>> {
        loop {
            let mut headers = [httparse::EMPTY_HEADER; 64];
            let mut head = httparse::Request::new(&mut headers);
            let parsed = head.parse(&self.beyond).map_err(|_| invalid("not an HTTP request"))?;
            let httparse::Status::Complete(length) = parsed else {
                if !self.more()? {
                    return Ok(None);
                }
                continue;
            };
            let named = |name: &str| {
                let header = head.headers.iter().find(|header| header.name.eq_ignore_ascii_case(name));
                header.map(|header| String::from_utf8_lossy(header.value).to_lowercase())
            };
            if named("host").is_none() {
                return Err(invalid("no host"));
            }
            let close = named("connection").is_some_and(|value| value.contains("close"));
            let body_length = named("content-length").map_or(Ok(0), |value| value.parse::<usize>());
            let body_length = body_length.map_err(|_| invalid("no length"))?;
            let method = head.method.unwrap_or_default().to_owned();
            let target = head.path.unwrap_or_default().to_owned();
            while self.beyond.len() < length + body_length {
                if !self.more()? {
                    return Ok(None);
                }
            }
            let body = self.beyond[length..length + body_length].to_vec();
            self.beyond.drain(..length + body_length);
            let (path, query) = target.split_once('?').unwrap_or((&target, ""));
            let parts = path.split('/').skip(1).map(decoded).collect();
            let pairs = query.split('&').filter(|pair| !pair.is_empty());
            let query = pairs.map(|pair| pair.split_once('=').unwrap_or((pair, "")));
            let query = query.map(|(key, value)| (decoded(key), decoded(value))).collect();
            return Ok(Some(Request { method, parts, query, body, close, target }));
        }
    }

    pub(super) fn write(&self, bytes: &[u8]) -> io::Result<()> {
        if self.mute {
            return Ok(());
        }
        let parts = if self.dribble { 1 } else { bytes.len().max(1) };
        bytes.chunks(parts).try_for_each(|part| (&*self.socket).write_all(part))
    }

    /// Sends an ordinary answer. Go chunks a body that is longer than its buffer.
    pub(super) fn answer(&self, status: u16, headers: &str, body: &[u8]) -> io::Result<()> {
        let mut answer =
            format!("HTTP/1.1 {status} {}\r\n{headers}Date: {}\r\n", reason(status), now()).into_bytes();
        if body.len() > 2048 {
            answer.extend_from_slice(
                format!("Transfer-Encoding: chunked\r\n\r\n{:x}\r\n", body.len()).as_bytes(),
            );
            answer.extend_from_slice(body);
            answer.extend_from_slice(b"\r\n0\r\n\r\n");
        } else {
            answer.extend_from_slice(format!("Content-Length: {}\r\n\r\n", body.len()).as_bytes());
            answer.extend_from_slice(body);
        }
        self.write(&answer)
    }

    /// Sends the head of a raw stream. The header for chunked encoding is wrong, as in Go, which
    /// writes it before the connection is hijacked.
    pub(super) fn raw_head(&self, status: u16, headers: &str, first: &[u8]) -> io::Result<()> {
        let date = now();
        let head = format!(
            "HTTP/1.1 {status} {}\r\n{headers}Date: {date}\r\nTransfer-Encoding: chunked\r\n\r\n",
            reason(status)
        );
        self.write(&[head.as_bytes(), first].concat())
    }

    /// Resets the connection.
    pub(super) fn reset(&self) {
        let _ = sockopt::set_socket_linger(&*self.socket, Some(std::time::Duration::ZERO));
        // Wakes the blocked reader, so that the last reference to the connection is dropped.
        let _ = self.socket.shutdown(Shutdown::Read);
    }
}

fn reason(status: u16) -> &'static str {
    match status {
        200 => "OK",
        201 => "Created",
        404 => "Not Found",
        405 => "Method Not Allowed",
        _ => "Internal Server Error",
    }
}

fn now() -> String {
    date(SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()))
}

/// Formats a date as in `Fri, 20 Nov 2026 09:32:17 GMT`.
fn date(seconds: u64) -> String {
    let (days, time) = (seconds / 86_400, seconds % 86_400);
    let weekday = ["Thu", "Fri", "Sat", "Sun", "Mon", "Tue", "Wed"][(days % 7) as usize];
    // Days since 1 March of year 0, in years that start in March, so that the leap day comes last.
    let day = days + 719_468;
    let (era, day) = (day / 146_097, day % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let of_month = day - (153 * month + 2) / 5 + 1;
    let names = ["Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec", "Jan", "Feb"];
    let year = era * 400 + year + u64::from(month >= 10);
    let (hour, minute, second) = (time / 3600, time / 60 % 60, time % 60);
    format!("{weekday}, {of_month:02} {} {year} {hour:02}:{minute:02}:{second:02} GMT", names[month as usize])
}

#[cfg(test)]
mod tests {
    use super::date;

    #[test]
    fn dates_match_the_calendar() {
        assert_eq!(date(0), "Thu, 01 Jan 1970 00:00:00 GMT");
        assert_eq!(date(1_795_167_137), "Fri, 20 Nov 2026 09:32:17 GMT");
        assert_eq!(date(1_709_251_199), "Thu, 29 Feb 2024 23:59:59 GMT");
        assert_eq!(date(1_735_689_600), "Wed, 01 Jan 2025 00:00:00 GMT");
    }
}
