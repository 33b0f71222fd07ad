//! Our standard input, as it is forwarded to a process.
//!
//! A thread of its own reads, for a read from a terminal cannot be interrupted; it is never waited for.

use std::collections::VecDeque;
use std::io::{self, IsTerminal, Read};

use bytes::Bytes;
use rustix::event::{PollFd, PollFlags, poll};
use tokio::sync::mpsc;

const PIECE: usize = 256 << 10;

/// Whether there is a standard input to forward. A terminal belongs to the process group in the foreground; reading from it in
/// the background would stop us.
pub(crate) fn is_readable() -> bool {
    let stdin = io::stdin();
    !stdin.is_terminal()
        || rustix::termios::tcgetpgrp(&stdin).is_ok_and(|group| group == rustix::process::getpgrp())
}

/// What is read, and what of it the process has not taken yet.
pub(crate) struct Stdin {
    pieces: mpsc::Receiver<Bytes>,
    /// Read and not yet taken, with where each piece stands in the whole of the input.
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

    /// What a sender says is read.
    #[cfg(test)]
    pub(crate) fn from(pieces: mpsc::Receiver<Bytes>) -> Self {
        Self { pieces, kept: VecDeque::new(), read: 0, ended: false }
    }

    /// Up to where input was read.
    pub(crate) fn position(&self) -> u64 {
        self.read
    }

    /// Whether there is no more.
    pub(crate) fn ended(&self) -> bool {
        self.ended
    }

    /// The next piece, and where it stands; it is kept until it is taken. `None`: there is no more. Cancel safe.
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

    /// The process has taken everything up to `offset`.
    pub(crate) fn taken(&mut self, offset: u64) {
        while self.kept.front().is_some_and(|(at, piece)| at + piece.len() as u64 <= offset) {
            self.kept.pop_front();
        }
    }

    /// What was read and not taken.
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
                // Somebody who shares the file has set it not to block.
                _ = poll(&mut [PollFd::new(&io::stdin(), PollFlags::IN)], None);
            }
            // A closed or broken standard input has no more to say.
            Err(_) => return,
        }
    }
}
