//! Standard input that is forwarded to a process.
//!
//! A separate thread reads it, because a read from a terminal cannot be interrupted. The command
//! never waits for that thread.

use std::collections::VecDeque;
use std::io::{self, IsTerminal, Read};

use bytes::Bytes;
use rustix::event::{PollFd, PollFlags, poll};
use tokio::sync::mpsc;

/// Size of one read, in bytes.
const PIECE: usize = 256 << 10;

/// Returns whether standard input can be forwarded. A terminal belongs to the foreground process
/// group; a read in the background would stop `gantry`.
pub(crate) fn is_readable() -> bool {
    let stdin = io::stdin();
    !stdin.is_terminal()
        || rustix::termios::tcgetpgrp(&stdin).is_ok_and(|group| group == rustix::process::getpgrp())
}

/// Reader of standard input, with the pieces that the process has not taken yet.
pub(crate) struct Stdin {
    pieces: mpsc::Receiver<Bytes>,
    /// Pieces that were read but not taken, each with its offset in the input.
    kept: VecDeque<(u64, Bytes)>,
    read: u64,
    ended: bool,
}

impl Stdin {
    /// Starts reading.
    pub(crate) fn read() -> Self {
        let (sender, pieces) = mpsc::channel(2);
        std::thread::spawn(move || read_all(&sender));
        Self { pieces, kept: VecDeque::new(), read: 0, ended: false }
    }

    /// Reader of pieces that a test sends.
    #[cfg(test)]
    pub(crate) fn from(pieces: mpsc::Receiver<Bytes>) -> Self {
        Self { pieces, kept: VecDeque::new(), read: 0, ended: false }
    }

    /// Returns the offset up to which input was read.
    pub(crate) fn position(&self) -> u64 {
        self.read
    }

    /// Returns whether the input has ended.
    pub(crate) fn ended(&self) -> bool {
        self.ended
    }

    /// Reads the next piece, and returns it with its offset. The piece is kept until it is taken.
    /// `None`: the input has ended. Cancel safe.
    pub(crate) async fn next(&mut self) -> Option<(u64, Bytes)> {
        match self.pieces.recv().await {
            Some(piece) => {
                let at = self.read;
                self.read += piece.len() as u64;
                self.kept.push_back((at, piece.clone()));
                Some((at, piece))
            }
            None => {
                self.ended = true;
                None
            }
        }
    }

    /// Drops the pieces that the process has taken, which are those before `offset`.
    pub(crate) fn drop_taken(&mut self, offset: u64) {
        while self.kept.front().is_some_and(|(at, piece)| at + piece.len() as u64 <= offset) {
            self.kept.pop_front();
        }
    }

    /// Returns the pieces that were read but not taken.
    pub(crate) fn kept(&self) -> impl Iterator<Item = (u64, Bytes)> {
        self.kept.iter().cloned()
    }
}

fn read_all(pieces: &mpsc::Sender<Bytes>) {
    let mut stdin = io::stdin().lock();
    loop {
        let mut piece = vec![0; PIECE];
        match stdin.read(&mut piece) {
            Ok(0) => return,
            Ok(length) => {
                piece.truncate(length);
                piece.shrink_to_fit();
                if pieces.blocking_send(piece.into()).is_err() {
                    return;
                }
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                // Another process that shares the file has made it non-blocking.
                _ = poll(&mut [PollFd::new(&io::stdin(), PollFlags::IN)], None);
            }
            // A closed or broken standard input has ended.
            Err(_) => return,
        }
    }
}
