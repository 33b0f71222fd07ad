//! Hijacked connections: the main connection of a Run or Attach request, and the connections that
//! fetch output.

use std::io::{self, Read};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rustix::process::Signal;
use serde_json::{Value, json};

use super::http::Connection;
use super::process::{Attachment, Process};
use super::routes::go_json;
use super::{Break, Manner, State, lock};

/// The last message of a main connection.
pub(super) fn last(process: &str, exit_status: Option<i32>, error: Option<&str>) -> Vec<u8> {
    #[derive(serde::Serialize)]
    struct ExitMessage<'a> {
        process_id: &'a str,
        #[serde(skip_serializing_if = "Option::is_none")]
        exit_status: Option<i32>,
        #[serde(skip_serializing_if = "Option::is_none")]
        error: Option<&'a str>,
    }
    go_json(&ExitMessage { process_id: process, exit_status, error })
}

/// Whether the server continues to read.
#[derive(PartialEq, Eq)]
enum Reading {
    On,
    /// The server leaves further input unread.
    Done,
}

/// Converts bytes to text as Go does. Each invalid UTF-8 byte becomes U+FFFD.
fn go_text(bytes: &[u8]) -> String {
    let mut text = String::new();
    for chunk in bytes.utf8_chunks() {
        text.push_str(chunk.valid());
        text.extend(chunk.invalid().iter().map(|_| char::REPLACEMENT_CHARACTER));
    }
    text
}

/// The length of the JSON object at the start of `bytes`, if it is complete.
fn object_length(bytes: &[u8]) -> Result<Option<usize>, ()> {
    let Some(start) = bytes.iter().position(|byte| !byte.is_ascii_whitespace()) else { return Ok(None) };
    if bytes[start] != b'{' {
        return Err(());
    }
    let (mut depth, mut in_string, mut escaped) = (0, false, false);
    for (at, byte) in bytes.iter().enumerate().skip(start) {
        match (in_string, byte) {
            (true, _) if escaped => escaped = false,
            (true, b'\\') => escaped = true,
            (_, b'"') => in_string = !in_string,
            (false, b'{') => depth += 1,
            (false, b'}') => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return Ok(Some(at + 1));
        }
    }
    Ok(None)
}

fn execute_message(process: &Process, manner: Manner, message: &Value) -> Reading {
    if let Some(tty) = message.get("tty").filter(|tty| !tty.is_null()) {
        let side =
            |name| tty["window_size"][name].as_u64().and_then(|side| u16::try_from(side).ok()).unwrap_or(0);
        process.resize(side("columns"), side("rows"));
        return Reading::On;
    }
    if message.get("source").is_some_and(Value::is_number) {
        return match message.get("data").and_then(Value::as_str) {
            Some(text) => {
                process.write_stdin(text.as_bytes());
                Reading::On
            }
            None => {
                process.close_stdin();
                Reading::Done
            }
        };
    }
    let signal = match message.get("signal").and_then(Value::as_u64) {
        Some(0) => Signal::TERM,
        Some(1) => Signal::KILL,
        _ => {
            process.close_stdin();
            return Reading::Done;
        }
    };
    // Concourse's containerd backend logs the failure and continues.
    if manner != Manner::Containerd && lock(&process.exit).is_none() {
        process.kill(signal);
    }
    Reading::On
}

/// Reads messages until standard input is closed or the client is gone.
fn read_messages(
    mut socket: &TcpStream,
    mut unread: Vec<u8>,
    process: &Process,
    manner: Manner,
    attachment: &Attachment,
) {
    let mut part = [0; 512];
    loop {
        let whole = object_length(&unread);
        let message = match whole {
            Ok(Some(length)) => {
                let object = unread.drain(..length).collect::<Vec<_>>();
                serde_json::from_str::<Value>(&go_text(&object)).map_err(|_| ())
            }
            Ok(None) => match socket.read(&mut part) {
                Ok(0) | Err(_) => Err(()),
                Ok(read) => {
                    unread.extend_from_slice(&part[..read]);
                    continue;
                }
            },
            Err(()) => Err(()),
        };
        match message {
            Ok(message) if execute_message(process, manner, &message) == Reading::On => {}
            Ok(_) => return,
            Err(()) => return attachment.client_gone.store(true, Ordering::SeqCst),
        }
    }
}

impl State {
    /// Creates a stream id before the process starts.
    pub(super) fn new_attachment(&self) -> (u64, Arc<Attachment>) {
        let id = self.next.fetch_add(1, Ordering::SeqCst);
        let attachment = Arc::new(Attachment::default());
        let mut streams = lock(&self.streams);
        streams.retain(|_, attachment| attachment.is_valid(self.times.stream_validity));
        streams.insert(id, Arc::clone(&attachment));
        (id, attachment)
    }

    /// Serves the rest of a main connection.
    pub(super) fn main_connection(
        &self,
        mut connection: Connection,
        status: u16,
        process: &Arc<Process>,
        stream: u64,
        attachment: &Arc<Attachment>,
    ) -> io::Result<()> {
        let first = go_json(&json!({"process_id": process.id, "stream_id": stream.to_string()}));
        connection.raw_head(status, "Content-Type: application/json\r\n", &first)?;

        let reader = {
            let (socket, process) = (Arc::clone(&connection.socket), Arc::clone(process));
            let (attachment, manner) = (Arc::clone(attachment), self.manner);
            let unread = std::mem::take(&mut connection.beyond);
            std::thread::spawn(move || read_messages(&socket, unread, &process, manner, &attachment))
        };
        loop {
            if let Some(how) = *lock(&attachment.broken) {
                match how {
                    Break::End => {
                        let _ = connection.socket.shutdown(Shutdown::Both);
                    }
                    Break::Reset => connection.reset(),
                    Break::Fail(error) => {
                        let _ = connection.write(&last(&process.id, None, Some(error)));
                        let _ = connection.socket.shutdown(Shutdown::Both);
                    }
                }
                break;
            }
            if let Some(exit) = *lock(&process.exit) {
                let _ = connection.write(&last(&process.id, Some(exit), None));
                // Wakes the reader. Unread input makes the close a reset, as with any server.
                let _ = connection.socket.shutdown(Shutdown::Read);
                break;
            }
            if attachment.client_gone.load(Ordering::SeqCst) || self.stopping.load(Ordering::SeqCst) {
                let _ = connection.socket.shutdown(Shutdown::Both);
                break;
            }
            std::thread::sleep(Duration::from_millis(3));
        }
        process.detach(attachment);
        attachment.close();
        // The reader may be blocked by the standard input of a running process.
        if lock(&process.exit).is_some() {
            let _ = reader.join();
        }
        Ok(())
    }

    /// Sends the output of a process. Only the stream id of the path counts. An unknown stream has
    /// no output.
    pub(super) fn output_connection(
        &self,
        connection: &Connection,
        stream: &str,
        is_stderr: bool,
    ) -> io::Result<()> {
        let attachment = stream.parse().ok().and_then(|id: u64| lock(&self.streams).get(&id).cloned());
        let attachment = attachment.filter(|attachment| attachment.is_valid(self.times.stream_validity));
        connection.raw_head(200, "", b"")?;
        let Some(attachment) = attachment else { return Ok(()) };
        let queue = if is_stderr { &attachment.stderr } else { &attachment.stdout };
        while let Some(write) = queue.pop() {
            connection.write(&write)?;
        }
        Ok(())
    }
}
