//! An attachment to a process of a Garden server.
//!
//! ```text
//! main    client ──stdin, terminal size, signals──▶ server      until stdin is closed: the server
//! reads nothing after that
//!         client ◀──exit, or nothing if the server stops── server
//! stdout  client ◀──bytes── server      ends after the exit is known
//! stderr  client ◀──bytes── server
//! ```
//!
//! Invariants: the client sends nothing after it has closed standard input, because the server
//! would reset the connection and the exit would be lost. The client never shuts down only the
//! sending side of the main connection, because the server would treat it as gone.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, ready};

use bytes::{Buf, BytesMut};
use serde::Deserialize;
use serde_json::json;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt, ReadBuf};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::Mutex;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::error::Error;
use super::json::{NextError, Values};
use super::messages::{Signal, WindowSize};

/// Largest message of standard input, in bytes. Go clients use this size, and servers accept any.
const MAX_STDIN: usize = 32 << 10;

/// An attachment to a process. Dropping it detaches, and the process continues.
///
/// [`Process::wait`] discards output streams that the caller has not taken.
#[derive(Debug)]
pub struct Process {
    /// The id for attachments.
    pub id: String,
    /// The id of the output streams of this attachment.
    pub stream_id: String,
    /// Standard output or the terminal of the process. It must be read without pause: the server
    /// buffers 4000 writes and drops newer ones.
    pub stdout: Option<Output>,
    /// Standard error of the process.
    pub stderr: Option<Output>,
    both_ended: [CancellationToken; 2],
    main: OwnedReadHalf,
    values: Values,
    sending: Arc<Mutex<MessageWriter>>,
    outcome: Option<Result<Exit, String>>,
}

/// The exit of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exit {
    /// The exit code. For a process killed by a signal, 128 plus the signal, or -1 with houdini.
    pub status: i32,
}

/// The reason why the end of a process is unknown.
#[derive(Debug, thiserror::Error)]
pub enum WaitError {
    /// The server closed the connection. The process may still run: the caller should attach again.
    #[error("the server closed the attachment")]
    Detached,
    /// The connection broke.
    #[error("the connection to the process broke")]
    Connection(#[source] io::Error),
    /// The worker could not determine the exit.
    #[error("the worker cannot wait for the process: {0}")]
    Failed(String),
    /// The message does not follow the protocol of Garden.
    #[error("the message is not valid for a Garden server: {0}")]
    Protocol(String),
}

/// The reason why a message was not sent to a process.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// The attachment has ended.
    #[error("the attachment to the process has ended")]
    Detached,
    /// Standard input is closed. After that no message can be sent, not even a signal.
    #[error("standard input of the process is closed")]
    StdinClosed,
    /// The connection broke, possibly because the process ended.
    #[error("the connection to the process broke")]
    Connection(#[from] io::Error),
}

#[derive(Deserialize)]
struct First {
    process_id: String,
    stream_id: String,
}

#[derive(Deserialize)]
struct Message {
    #[serde(default)]
    exit_status: Option<i32>,
    #[serde(default)]
    error: Option<String>,
}

impl Process {
    /// Reads the first message on `main`, then opens both outputs.
    pub(super) async fn open<Opening>(
        main: TcpStream,
        beyond: BytesMut,
        outputs: impl FnOnce(String, String) -> Opening,
    ) -> Result<Self, Error>
    where
        Opening: Future<Output = Result<[(TcpStream, BytesMut); 2], Error>>,
    {
        let (mut main, half) = main.into_split();
        let sending = MessageWriter { half, pending: BytesMut::new(), stdin_closed: false };
        let mut values = Values::new(beyond);
        let First { process_id: id, stream_id } =
            values.next(&mut main).await.map_err(|error| match error {
                NextError::Ended => Error::broken(io::ErrorKind::UnexpectedEof.into()),
                NextError::Broken(error) => Error::broken(error),
                NextError::Malformed(error) => Error::Protocol(error),
            })?;

        let both_ended = [CancellationToken::new(), CancellationToken::new()];
        let [stdout, stderr] = outputs(id.clone(), stream_id.clone()).await?;
        let output = |(stream, beyond), ended: &CancellationToken| {
            Some(Output { stream, beyond, reading: Some(ended.clone().drop_guard()) })
        };
        Ok(Self {
            id,
            stream_id,
            stdout: output(stdout, &both_ended[0]),
            stderr: output(stderr, &both_ended[1]),
            both_ended,
            main,
            values,
            sending: Arc::new(Mutex::new(sending)),
            outcome: None,
        })
    }

    /// Returns a handle that sends messages to the process. It does not keep the attachment open.
    pub fn control(&self) -> Control {
        Control { process: self.id.clone(), sending: Arc::downgrade(&self.sending) }
    }

    /// Waits for the end of the process, and then for the end of its output. The caller must read
    /// each stream that it took to its end, or drop it.
    ///
    /// Cancel safe.
    pub async fn wait(&mut self) -> Result<Exit, WaitError> {
        let Self { stdout, stderr, main, values, outcome, both_ended, .. } = self;
        let mut untaken = std::pin::pin!(async {
            tokio::join!(discard(stdout), discard(stderr));
        });
        if outcome.is_none() {
            let mut discarded = false;
            let mut outcome_of = std::pin::pin!(read_outcome(main, values));
            *outcome = Some(loop {
                tokio::select! {
                    read = &mut outcome_of => break read?,
                    () = &mut untaken, if !discarded => discarded = true,
                }
            });
            if !discarded {
                untaken.await;
            }
        } else {
            untaken.await;
        }
        for ended in both_ended {
            ended.cancelled().await;
        }
        match outcome.clone() {
            Some(Ok(exit)) => Ok(exit),
            Some(Err(error)) => Err(WaitError::Failed(error)),
            None => Err(WaitError::Detached),
        }
    }
}

async fn discard(output: &mut Option<Output>) {
    if let Some(output) = output {
        let mut thrown = vec![0; 16 << 10];
        while output.read(&mut thrown).await.is_ok_and(|read| read > 0) {}
    }
}

/// Reads up to the message that ends a wait, and ignores other messages.
async fn read_outcome(
    main: &mut OwnedReadHalf,
    values: &mut Values,
) -> Result<Result<Exit, String>, WaitError> {
    loop {
        match values.next(main).await {
            Ok(Message { error: Some(error), .. }) => return Ok(Err(error)),
            Ok(Message { exit_status: Some(status), .. }) => return Ok(Ok(Exit { status })),
            Ok(Message { .. }) => {}
            Err(NextError::Ended) => return Err(WaitError::Detached),
            Err(NextError::Broken(error)) => return Err(WaitError::Connection(error)),
            Err(NextError::Malformed(error)) => return Err(WaitError::Protocol(error)),
        }
    }
}

/// An output stream of a process.
#[derive(Debug)]
pub struct Output {
    stream: TcpStream,
    beyond: BytesMut,
    /// Present until the end was read.
    reading: Option<DropGuard>,
}

impl AsyncRead for Output {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if !this.beyond.is_empty() {
            let length = buf.remaining().min(this.beyond.len());
            buf.put_slice(&this.beyond[..length]);
            this.beyond.advance(length);
            return Poll::Ready(Ok(()));
        }
        let (before, room) = (buf.filled().len(), buf.remaining());
        let read = ready!(Pin::new(&mut this.stream).poll_read(cx, buf));
        if read.is_err() || (room > 0 && buf.filled().len() == before) {
            this.reading = None;
        }
        Poll::Ready(read)
    }
}

#[derive(Debug)]
struct MessageWriter {
    /// Dropping this half shuts down the sending side. Only the process owns it, so it is dropped
    /// with the attachment and not before.
    half: OwnedWriteHalf,
    /// Messages that were begun. If a call is cancelled in the middle of a message, the next call
    /// sends the rest first.
    pending: BytesMut,
    stdin_closed: bool,
}

impl MessageWriter {
    async fn flush(&mut self) -> io::Result<()> {
        while !self.pending.is_empty() {
            // `write_buf` removes the written bytes from the buffer.
            self.half.write_buf(&mut self.pending).await?;
        }
        Ok(())
    }

    async fn send(&mut self, message: &serde_json::Value, closes: bool) -> Result<(), ControlError> {
        // Bytes of a cancelled call are sent first, even those of the closing message.
        self.flush().await?;
        if self.stdin_closed {
            return Err(ControlError::StdinClosed);
        }
        self.pending.extend_from_slice(message.to_string().as_bytes());
        self.pending.extend_from_slice(b"\n");
        self.stdin_closed = closes;
        Ok(self.flush().await?)
    }
}

/// Sends messages to a process.
#[derive(Clone, Debug)]
pub struct Control {
    process: String,
    sending: Weak<Mutex<MessageWriter>>,
}

impl Control {
    /// Writes `text` to standard input. Only text can be sent, because a server replaces every byte
    /// that is not UTF-8 by U+FFFD.
    ///
    /// A cancelled call has sent a part of `text` that ends between two characters.
    pub async fn write(&self, text: &str) -> Result<(), ControlError> {
        let sending = self.sending.upgrade().ok_or(ControlError::Detached)?;
        let mut sending = sending.lock().await;
        let mut rest = text;
        while !rest.is_empty() {
            let (part, after) = rest.split_at(rest.floor_char_boundary(MAX_STDIN));
            sending.send(&json!({"process_id": self.process, "source": 0, "data": part}), false).await?;
            rest = after;
        }
        Ok(())
    }

    /// Closes standard input. After that no message can be sent. A caller that may have to signal
    /// or resize must not close it.
    pub async fn close_stdin(&self) -> Result<(), ControlError> {
        self.send(json!({"process_id": self.process, "source": 0}), true).await
    }

    /// Changes the size of the terminal.
    pub async fn resize(&self, size: WindowSize) -> Result<(), ControlError> {
        self.send(json!({"process_id": self.process, "tty": {"window_size": size}}), false).await
    }

    /// Sends a signal to the process. A containerd worker ignores it.
    pub async fn signal(&self, signal: Signal) -> Result<(), ControlError> {
        let signal = match signal {
            Signal::Terminate => 0,
            Signal::Kill => 1,
        };
        self.send(json!({"process_id": self.process, "signal": signal}), false).await
    }

    async fn send(&self, message: serde_json::Value, closes: bool) -> Result<(), ControlError> {
        let sending = self.sending.upgrade().ok_or(ControlError::Detached)?;
        sending.lock().await.send(&message, closes).await
    }
}
