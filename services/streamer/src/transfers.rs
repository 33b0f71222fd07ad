//! Copies under way on this streamer: who waits for each, and how far it is.
//!
//! A copy is made by a task of its own. It ends by itself, or when the last who waits for it leaves; who asks after that begins another,
//! which finds in the artifact store that the old one still goes on, or has ended. Invariant: a copy that somebody waits for is in the table,
//! and one that nobody waits for is told to end.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use domain::{ArtifactId, Timestamp, TransferId, WorkerId};
use tokio::sync::watch;

use crate::materialize::{Copied, CopyError};

/// What is copied, for whom, and where to.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Wanted {
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

/// What those who wait are told.
#[derive(Debug, Clone)]
pub(crate) enum State {
    Going(Progress),
    Done(Result<Copied, CopyError>),
}

/// Why a copy shall end before its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wish {
    GoOn,
    /// Nobody waits for it any more.
    Left,
    /// Somebody said so.
    Cancelled,
}

/// The copies under way. Clones share them.
#[derive(Clone, Default)]
pub(crate) struct Transfers(Arc<Mutex<HashMap<Wanted, Entry>>>);

struct Entry {
    transfer: TransferId,
    since: Timestamp,
    waiting: usize,
    wish: watch::Sender<Wish>,
    states: watch::Receiver<State>,
}

/// A copy, as its task has it.
pub(crate) struct Task {
    pub(crate) wanted: Wanted,
    pub(crate) transfer: TransferId,
    pub(crate) wish: watch::Receiver<Wish>,
    states: watch::Sender<State>,
    transfers: Transfers,
}

/// A copy that is listed.
#[derive(Debug, Clone)]
pub(crate) struct Listed {
    pub(crate) wanted: Wanted,
    pub(crate) transfer: TransferId,
    pub(crate) since: Timestamp,
    pub(crate) progress: Progress,
}

impl Transfers {
    /// Waits for the copy of `wanted`, which `start` begins where none is under way.
    pub(crate) fn join(&self, wanted: Wanted, start: impl FnOnce(Task)) -> Waiting {
        let mut entries = self.entries();
        if let Some(entry) = entries.get_mut(&wanted) {
            entry.waiting += 1;
            let states = entry.states.clone();
            return Waiting { transfers: self.clone(), transfer: entry.transfer, wanted, states };
        }
        let transfer = TransferId::new();
        let (wish, wished) = watch::channel(Wish::GoOn);
        let (told, states) = watch::channel(State::Going(Progress::default()));
        let since = Timestamp::now();
        let entry = Entry { transfer, since, waiting: 1, wish, states: states.clone() };
        entries.insert(wanted.clone(), entry);
        drop(entries);
        start(Task { wanted: wanted.clone(), transfer, wish: wished, states: told, transfers: self.clone() });
        Waiting { transfers: self.clone(), transfer, wanted, states }
    }

    /// All of them, the oldest first.
    pub(crate) fn list(&self) -> Vec<Listed> {
        let entries = self.entries();
        let listed = entries.iter().filter_map(|(wanted, entry)| match &*entry.states.borrow() {
            State::Going(progress) => Some(Listed {
                wanted: wanted.clone(),
                transfer: entry.transfer,
                since: entry.since,
                progress: *progress,
            }),
            State::Done(_) => None,
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

    /// Ends a copy, if it is under way.
    pub(crate) fn cancel(&self, transfer: TransferId) {
        if let Some(entry) = self.entries().values().find(|entry| entry.transfer == transfer) {
            entry.wish.send_replace(Wish::Cancelled);
        }
    }

    fn remove(&self, wanted: &Wanted, transfer: TransferId) {
        let mut entries = self.entries();
        if entries.get(wanted).is_some_and(|entry| entry.transfer == transfer) {
            entries.remove(wanted);
        }
    }

    fn entries(&self) -> MutexGuard<'_, HashMap<Wanted, Entry>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Task {
    /// Tells those who wait how far it is.
    pub(crate) fn tell(&self, progress: Progress) {
        self.states.send_replace(State::Going(progress));
    }

    /// How many copies are read from each worker.
    pub(crate) fn readers(&self) -> HashMap<WorkerId, usize> {
        self.transfers.readers()
    }

    /// Tells those who wait how it ended. Who asks from now on begins anew.
    pub(crate) fn end(self, result: Result<Copied, CopyError>) {
        self.transfers.remove(&self.wanted, self.transfer);
        self.states.send_replace(State::Done(result));
    }
}

/// Somebody who waits for a copy. Dropping it leaves.
pub(crate) struct Waiting {
    transfers: Transfers,
    transfer: TransferId,
    wanted: Wanted,
    pub(crate) states: watch::Receiver<State>,
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let mut entries = self.transfers.entries();
        let Some(entry) = entries.get_mut(&self.wanted).filter(|entry| entry.transfer == self.transfer)
        else {
            return;
        };
        entry.waiting -= 1;
        if entry.waiting == 0 {
            entry.wish.send_if_modified(|wish| {
                let goes_on = *wish == Wish::GoOn;
                if goes_on {
                    *wish = Wish::Left;
                }
                goes_on
            });
            entries.remove(&self.wanted);
        }
    }
}
