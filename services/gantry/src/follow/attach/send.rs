//! Sender of input and acknowledgements of one `Attach` call.

use std::time::Duration;

use rpc::pb::runtime::{Ack, AttachRequest, CloseStdin, StdinData, attach_request::Message};
use tokio::sync::{mpsc, watch};

use crate::follow::stdin::Stdin;
use crate::render::output::{CLOSED, Closed};

/// Maximum input in flight, in bytes. The gateway accepts no more.
const INPUT_IN_FLIGHT: u64 = 1 << 20;
/// Maximum input in flight, in messages. The gateway accepts no more, and a message may be a key.
const PIECES_IN_FLIGHT: usize = 256;
/// Bytes of output after which an acknowledgement is sent.
const ACK_EVERY: u64 = 512 << 10;

/// Amount of input that the process has taken, in bytes.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct InputPosition {
    pub(super) offset: u64,
    /// The process takes no more input.
    pub(super) ended: bool,
    /// Offset of standard output up to which the output is older than the call.
    pub(super) shown_before: u64,
}

/// Sender of input and acknowledgements.
pub(super) struct Sender {
    /// Offsets up to which stdout and stderr were written. `None`: output is not acknowledged.
    pub(super) written: Option<[watch::Receiver<u64>; 2]>,
    pub(super) closed: watch::Receiver<u64>,
    pub(super) taken: watch::Receiver<Option<InputPosition>>,
    pub(super) requests: mpsc::Sender<AttachRequest>,
}

impl Sender {
    /// Sends until the call ends. Resolves only when standard output is closed.
    pub(super) async fn run(self, stdin: Option<&mut Stdin>) -> Closed {
        let Self { written, mut closed, taken, requests } = self;
        let input = async {
            if let Some(stdin) = stdin {
                send_input(stdin, taken, &requests).await;
            }
            std::future::pending::<()>().await
        };
        let acks = async {
            if let Some([stdout, stderr]) = written {
                send_acks(stdout, stderr, &requests).await;
            }
            std::future::pending::<()>().await
        };
        tokio::select! {
            _ = closed.wait_for(|&written| written == CLOSED) => Closed,
            () = input => Closed,
            () = acks => Closed,
        }
    }
}

/// Sends input until all of it was sent, the process takes no more, or the call broke.
async fn send_input(
    stdin: &mut Stdin,
    mut taken: watch::Receiver<Option<InputPosition>>,
    requests: &mpsc::Sender<AttachRequest>,
) {
    let Ok(first) = taken.wait_for(Option::is_some).await.map(|taken| taken.unwrap_or_default()) else {
        return;
    };
    stdin.drop_taken(first.offset);
    let mut detach = stdin.detach_request();
    for (offset, data) in stdin.kept().collect::<Vec<_>>() {
        if requests.send(input(offset, data)).await.is_err() {
            return;
        }
    }
    while !stdin.ended() {
        let now = taken.borrow_and_update().unwrap_or_default();
        stdin.drop_taken(now.offset);
        if now.ended {
            return;
        }
        let in_flight = stdin.position().saturating_sub(now.offset);
        let room = in_flight < INPUT_IN_FLIGHT && stdin.kept().count() < PIECES_IN_FLIGHT;
        tokio::select! {
            changed = taken.changed() => if changed.is_err() { return },
            piece = stdin.next(), if room => if let Some((offset, data)) = piece
                && requests.send(input(offset, data)).await.is_err()
            {
                return;
            },
            () = Stdin::detach_requested(&mut detach) => {}
        }
    }
    // An error here means that the call broke. The next call sends the message again.
    _ = requests.send(request(Message::CloseStdin(CloseStdin {}))).await;
    while taken.changed().await.is_ok() {
        stdin.drop_taken(taken.borrow_and_update().unwrap_or_default().offset);
    }
}

/// Sends acknowledgements until the call broke.
async fn send_acks(
    mut stdout: watch::Receiver<u64>,
    mut stderr: watch::Receiver<u64>,
    requests: &mpsc::Sender<AttachRequest>,
) {
    let mut acknowledged = (0, 0);
    loop {
        let now = (*stdout.borrow_and_update(), *stderr.borrow_and_update());
        if now.0 == CLOSED || now.1 == CLOSED {
            return;
        }
        if now.0 >= acknowledged.0 + ACK_EVERY || now.1 >= acknowledged.1 + ACK_EVERY {
            let ack = Ack { stdout_offset: now.0, stderr_offset: now.1 };
            if requests.send(request(Message::Ack(ack))).await.is_err() {
                return;
            }
            acknowledged = now;
        }
        // Small amounts of output are acknowledged with a delay, together with the output that
        // follows.
        let pause = if now == acknowledged { Duration::MAX } else { Duration::from_millis(20) };
        tokio::select! {
            changed = stdout.changed() => if changed.is_err() { return },
            changed = stderr.changed() => if changed.is_err() { return },
            () = tokio::time::sleep(pause) => {
                let ack = Ack { stdout_offset: now.0, stderr_offset: now.1 };
                if requests.send(request(Message::Ack(ack))).await.is_err() {
                    return;
                }
                acknowledged = now;
            }
        }
    }
}

pub(super) fn request(message: Message) -> AttachRequest {
    AttachRequest { message: Some(message) }
}

fn input(offset: u64, data: bytes::Bytes) -> AttachRequest {
    request(Message::Stdin(StdinData { offset, data }))
}
