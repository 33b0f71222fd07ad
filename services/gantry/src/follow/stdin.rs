//! Standard input that is forwarded to a process.
//!
//! A separate thread reads it, because a read from a terminal cannot be interrupted. The command
//! never waits for that thread.

use std::collections::VecDeque;
use std::io::{self, IsTerminal, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tokio::sync::{Notify, mpsc, watch};

use crate::cli::detach_keys::DetachKeys;
use crate::follow::answers::AnswerFilter;
use crate::follow::keys::KeyFilter;
use crate::render::terminal;

/// Size of one read, in bytes.
const PIECE: usize = 256 << 10;
/// Maximum number of pieces that wait to be sent. A piece of a terminal is often a single key, and
/// the detach keys are recognized only if the keys before them were read.
const KEYS: usize = 1024;
/// Time after which input is passed on that may begin the detach keys.
const WITHHOLD: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };
/// Time for which the process may take the input before the detach keys.
const TAKE_LIMIT: Duration = Duration::from_secs(1);

/// Returns whether standard input can be forwarded. A terminal belongs to the foreground process
/// group; a read in the background would stop `gantry`.
pub(crate) fn is_readable() -> bool {
    let stdin = io::stdin();
    !stdin.is_terminal() || terminal::is_foreground(&stdin)
}

/// Reader of standard input, with the pieces that the process has not taken yet.
pub(crate) struct Stdin {
    pieces: mpsc::Receiver<Bytes>,
    /// Pieces that were read but not taken, each with its offset in the input.
    kept: VecDeque<(u64, Bytes)>,
    read: u64,
    ended: bool,
    /// Set if a person types the input.
    keyboard: Option<DetachRequest>,
}

/// Request of the person at the terminal to detach.
#[derive(Clone)]
pub(crate) struct DetachRequest {
    made: watch::Receiver<bool>,
    /// Notified when the process has taken all input before the request.
    all_taken: Arc<Notify>,
    /// Names of the detach keys.
    keys: String,
    /// Whether answers of the terminal to queries are dropped.
    drops_answers: Arc<AtomicBool>,
}

impl DetachRequest {
    /// Waits for the request, and a moment until the process has taken the input before it.
    pub(crate) async fn wait(mut self) {
        if self.made.wait_for(|made| *made).await.is_err() {
            return std::future::pending().await;
        }
        // The caller leaves in any case.
        _ = tokio::time::timeout(TAKE_LIMIT, self.all_taken.notified()).await;
    }
}

impl Stdin {
    /// Starts reading.
    pub(crate) fn read() -> Self {
        let (sender, pieces) = mpsc::channel(2);
        std::thread::spawn(move || read_all(&sender));
        Self::new(pieces, None)
    }

    /// Starts reading what a person types. `keys` are no input. With `drops_answers`, answers of
    /// the terminal to queries are no input either, until [`Self::drops_answers`] is reset.
    pub(crate) fn read_keyboard(keys: &DetachKeys, drops_answers: bool) -> Self {
        let (sender, pieces) = mpsc::channel(KEYS);
        let (made, request) = watch::channel(false);
        let drops_answers = Arc::new(AtomicBool::new(drops_answers));
        let filters = (AnswerFilter::default(), drops_answers.clone(), KeyFilter::new(keys));
        std::thread::spawn(move || read_keys(&sender, filters, &made));
        Self::new(
            pieces,
            Some(DetachRequest {
                made: request,
                all_taken: Arc::default(),
                keys: keys.to_string(),
                drops_answers,
            }),
        )
    }

    fn new(pieces: mpsc::Receiver<Bytes>, keyboard: Option<DetachRequest>) -> Self {
        Self { pieces, kept: VecDeque::new(), read: 0, ended: false, keyboard }
    }

    /// Reader of pieces that a test sends.
    #[cfg(test)]
    pub(crate) fn from(pieces: mpsc::Receiver<Bytes>) -> Self {
        Self::new(pieces, None)
    }

    /// Reader of keys that a test types. The test requests to detach with the returned sender.
    #[cfg(test)]
    pub(crate) fn typed(pieces: mpsc::Receiver<Bytes>) -> (Self, watch::Sender<bool>) {
        let (made, request) = watch::channel(false);
        let (all_taken, drops_answers) = Default::default();
        let request = DetachRequest { made: request, all_taken, keys: String::new(), drops_answers };
        (Self::new(pieces, Some(request)), made)
    }

    /// Returns the request to detach. `None`: no person types the input.
    pub(crate) fn detach_request(&self) -> Option<DetachRequest> {
        self.keyboard.clone()
    }

    /// Returns whether answers of the terminal to queries are dropped now. `None`: they never are.
    pub(crate) fn drops_answers(&self) -> Option<Arc<AtomicBool>> {
        let drops = self.keyboard.as_ref().map(|request| request.drops_answers.clone());
        drops.filter(|drops| drops.load(Ordering::Relaxed))
    }

    /// Returns a hint at the detach keys for messages. Ctrl-C does not end `gantry` in raw mode.
    pub(crate) fn hint_at_keys(&self) -> String {
        let keys = self.keyboard.as_ref().map(|request| &request.keys).filter(|keys| !keys.is_empty());
        keys.map(|keys| format!("; leave with {keys}")).unwrap_or_default()
    }

    /// Waits for a request to detach. Cancel safe.
    pub(crate) async fn detach_requested(request: &mut Option<DetachRequest>) {
        if let Some(DetachRequest { made, .. }) = request
            && made.changed().await.is_ok()
        {
            return;
        }
        // The input has ended.
        std::future::pending().await
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
    ///
    /// A file that is sent again is skipped up to `offset`. Keys are never skipped: they follow the
    /// input that other callers have sent before.
    pub(crate) fn drop_taken(&mut self, offset: u64) {
        while self.kept.front().is_some_and(|(at, piece)| at + piece.len() as u64 <= offset) {
            self.kept.pop_front();
        }
        let Some(DetachRequest { made, all_taken, .. }) = &self.keyboard else { return };
        if self.kept.is_empty() {
            self.read = self.read.max(offset);
        }
        if *made.borrow() && self.kept.is_empty() && self.pieces.is_empty() {
            all_taken.notify_one();
        }
    }

    /// Returns the pieces that were read but not taken.
    pub(crate) fn kept(&self) -> impl Iterator<Item = (u64, Bytes)> {
        self.kept.iter().cloned()
    }
}

fn read_all(pieces: &mpsc::Sender<Bytes>) {
    let mut stdin = io::stdin().lock();
    while let Some(piece) = read_piece(&mut stdin)
        && pieces.blocking_send(piece.into()).is_ok()
    {}
}

/// Reads the next piece. `None`: the input has ended.
fn read_piece(stdin: &mut io::StdinLock) -> Option<Vec<u8>> {
    let mut piece = vec![0; PIECE];
    loop {
        match stdin.read(&mut piece) {
            Ok(0) => return None,
            Ok(length) => {
                piece.truncate(length);
                piece.shrink_to_fit();
                return Some(piece);
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                // Another process that shares the file has made it non-blocking.
                _ = poll(&mut [PollFd::new(&io::stdin(), PollFlags::IN)], None);
            }
            // A closed or broken standard input has ended.
            Err(_) => return None,
        }
    }
}

fn read_keys(
    pieces: &mpsc::Sender<Bytes>,
    (mut answers, drops_answers, mut filter): (AnswerFilter, Arc<AtomicBool>, KeyFilter),
    detach: &watch::Sender<bool>,
) {
    let input = io::stdin();
    let mut stdin = input.lock();
    let send = |input: Vec<u8>| input.is_empty() || pieces.blocking_send(input.into()).is_ok();
    loop {
        let wait = (filter.is_withholding() || answers.is_withholding()).then_some(&WITHHOLD);
        let mut ready = [PollFd::new(&input, PollFlags::IN)];
        if poll(&mut ready, wait) == Ok(0) {
            let (mut input, _) = filter.filter(&answers.release());
            input.extend(filter.release());
            if !send(input) {
                return;
            }
            continue;
        }
        let Some(piece) = read_piece(&mut stdin) else {
            // An error means that the call has ended.
            _ = send(filter.release());
            return;
        };
        let piece = if drops_answers.load(Ordering::Relaxed) {
            answers.filter(&piece)
        } else {
            [answers.release(), piece].concat()
        };
        let (input, is_detached) = filter.filter(&piece);
        if !send(input) {
            return;
        }
        if is_detached {
            detach.send_replace(true);
            // The input has not ended, so its sender must live on.
            loop {
                std::thread::park();
            }
        }
    }
}
