//! Copies in flight on this streamer: who waits for each, and how far it is.
//!
//! A copy is made by a task of its own. It ends when all is copied, or when the last caller that waits for it leaves. A later caller starts
//! another one, which learns from the artifact store whether the old one goes on or has ended. Invariant: a copy that somebody waits for
//! is in the table, and one that nobody waits for is stopped.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use domain::{ArtifactId, Timestamp, TransferId, VolumeHandle, WorkerId};
use tokio::sync::watch;

use crate::peers::PeerError;

/// What is copied, for whom, and where to.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct CopyRequest {
    pub(crate) team: String,
    pub(crate) artifact: ArtifactId,
    pub(crate) worker: WorkerId,
}

/// Which way bytes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Route {
    #[default]
    Unknown,
    /// From one gateway to the other.
    Peer,
    /// From one worker to the other, past their gateways.
    Workers,
    /// From the artifact store, by way of this streamer.
    Store,
    /// Another streamer knows.
    Elsewhere,
}

/// How far a copy is, in bytes of content.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Progress {
    pub(crate) done: u64,
    pub(crate) total: u64,
    pub(crate) saved: u64,
    pub(crate) per_second: u64,
    pub(crate) route: Route,
    pub(crate) from: Option<WorkerId>,
}

/// A copy, as those who wait for it see it.
#[derive(Debug, Clone)]
pub(crate) enum CopyState {
    Running(Progress),
    Ended(Result<CompleteCopy, CopyError>),
}

/// A copy whose bytes are there.
#[derive(Debug, Clone)]
pub(crate) struct CompleteCopy {
    pub(crate) volume: VolumeHandle,
    /// How far the copy was. `None`: nothing had to be copied.
    pub(crate) progress: Option<Progress>,
}

/// The bytes cannot be brought there. Everybody who waits gets the same error.
#[derive(Debug, Clone, thiserror::Error)]
pub(crate) enum CopyError {
    /// The team has no such artifact, or its bytes are not final.
    #[error("no sealed artifact {0} in this team")]
    NotFound(ArtifactId),
    /// Every replica is gone.
    #[error("no replica of artifact {0} is left")]
    NoReplica(ArtifactId),
    /// A call to another service failed.
    #[error(transparent)]
    Peer(#[from] PeerError),
    /// The gateway of the worker ended the call without an answer.
    #[error("the gateway of worker {0} broke off")]
    Cut(WorkerId),
    /// The worker has written something else than it was sent.
    #[error("worker {0} has unpacked something else than it was sent")]
    OtherBytes(WorkerId),
    /// A caller cancelled it.
    #[error("the transfer was cancelled")]
    Cancelled,
    /// Nobody waits for it.
    #[error("nobody waits for the transfer any more")]
    Abandoned,
    /// This process stops.
    #[error("the streamer is stopping")]
    Stopping,
}

/// Whether a copy is to go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Intent {
    Continue,
    /// Nobody waits for it any more.
    Abandon,
    /// A caller cancelled it.
    Cancel,
}

/// The copies in flight. Clones share them.
#[derive(Clone, Default)]
pub(crate) struct InFlight(Arc<Mutex<HashMap<CopyRequest, Entry>>>);

struct Entry {
    transfer: TransferId,
    since: Timestamp,
    waiting: usize,
    intent: watch::Sender<Intent>,
    states: watch::Receiver<CopyState>,
}

/// A copy, as its task has it.
pub(crate) struct CopyTask {
    pub(crate) request: CopyRequest,
    pub(crate) transfer: TransferId,
    pub(crate) intent: watch::Receiver<Intent>,
    states: watch::Sender<CopyState>,
    in_flight: InFlight,
}

/// A copy, for lists.
#[derive(Debug, Clone)]
pub(crate) struct CopyInfo {
    pub(crate) request: CopyRequest,
    pub(crate) transfer: TransferId,
    pub(crate) since: Timestamp,
    pub(crate) progress: Progress,
}

impl InFlight {
    /// Waits for the copy of `request`, which `start` begins if none is in flight.
    pub(crate) fn join(&self, request: CopyRequest, start: impl FnOnce(CopyTask)) -> Waiter {
        let mut entries = self.entries();
        if let Some(entry) = entries.get_mut(&request) {
            entry.waiting += 1;
            let states = entry.states.clone();
            return Waiter { in_flight: self.clone(), transfer: entry.transfer, request, states };
        }
        let transfer = TransferId::new();
        let (intent, intents) = watch::channel(Intent::Continue);
        let (sender, states) = watch::channel(CopyState::Running(Progress::default()));
        let since = Timestamp::now();
        let entry = Entry { transfer, since, waiting: 1, intent, states: states.clone() };
        entries.insert(request.clone(), entry);
        drop(entries);
        start(CopyTask {
            request: request.clone(),
            transfer,
            intent: intents,
            states: sender,
            in_flight: self.clone(),
        });
        Waiter { in_flight: self.clone(), transfer, request, states }
    }

    /// All of them, the oldest first.
    pub(crate) fn list(&self) -> Vec<CopyInfo> {
        let entries = self.entries();
        let listed = entries.iter().filter_map(|(request, entry)| match &*entry.states.borrow() {
            CopyState::Running(progress) => Some(CopyInfo {
                request: request.clone(),
                transfer: entry.transfer,
                since: entry.since,
                progress: *progress,
            }),
            CopyState::Ended(_) => None,
        });
        let mut listed: Vec<_> = listed.collect();
        listed.sort_by_key(|listed| (listed.since, listed.transfer));
        listed
    }

    /// How many copies are read from each worker.
    pub(crate) fn readers(&self) -> HashMap<WorkerId, usize> {
        let mut readers = HashMap::new();
        for from in self.list().iter().filter_map(|listed| listed.progress.from) {
            *readers.entry(from).or_default() += 1;
        }
        readers
    }

    /// Stops a copy, if it is in flight.
    pub(crate) fn cancel(&self, transfer: TransferId) {
        if let Some(entry) = self.entries().values().find(|entry| entry.transfer == transfer) {
            entry.intent.send_replace(Intent::Cancel);
        }
    }

    fn remove(&self, request: &CopyRequest, transfer: TransferId) {
        let mut entries = self.entries();
        if entries.get(request).is_some_and(|entry| entry.transfer == transfer) {
            entries.remove(request);
        }
    }

    fn entries(&self) -> MutexGuard<'_, HashMap<CopyRequest, Entry>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl CopyTask {
    /// Publishes how far it is.
    pub(crate) fn publish(&self, progress: Progress) {
        self.states.send_replace(CopyState::Running(progress));
    }

    /// How many copies are read from each worker.
    pub(crate) fn readers(&self) -> HashMap<WorkerId, usize> {
        self.in_flight.readers()
    }

    /// Publishes how it ended. A later caller starts another copy.
    pub(crate) fn end(self, result: Result<CompleteCopy, CopyError>) {
        self.in_flight.remove(&self.request, self.transfer);
        self.states.send_replace(CopyState::Ended(result));
    }
}

/// A caller that waits for a copy, until it is dropped.
pub(crate) struct Waiter {
    in_flight: InFlight,
    transfer: TransferId,
    request: CopyRequest,
    pub(crate) states: watch::Receiver<CopyState>,
}

impl Drop for Waiter {
    fn drop(&mut self) {
        let mut entries = self.in_flight.entries();
        let Some(entry) = entries.get_mut(&self.request).filter(|entry| entry.transfer == self.transfer)
        else {
            return;
        };
        entry.waiting -= 1;
        if entry.waiting == 0 {
            entry.intent.send_if_modified(|intent| {
                let goes_on = *intent == Intent::Continue;
                if goes_on {
                    *intent = Intent::Abandon;
                }
                goes_on
            });
            entries.remove(&self.request);
        }
    }
}
