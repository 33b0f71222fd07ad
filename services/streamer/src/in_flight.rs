//! The copies in flight on this streamer, with their callers and their progress.
//!
//! Each copy has a task. It ends when everything is copied, or when the last caller leaves. A later
//! caller starts another copy. That one learns from the artifact store whether the earlier one
//! still runs.
//!
//! Invariant: a copy with callers is in the table, and a copy without callers is stopped.
//! [`Waiter`] enforces it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use domain::{ArtifactId, Timestamp, TransferId, VolumeHandle, WorkerId};
use tokio::sync::watch;

use crate::peers::PeerError;

/// The artifact, the team and the destination of a copy.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct CopyRequest {
    pub(crate) team: String,
    pub(crate) artifact: ArtifactId,
    pub(crate) worker: WorkerId,
}

/// The route of the bytes of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Route {
    #[default]
    Unknown,
    /// From one gateway to the other.
    Peer,
    /// Directly from one worker to the other.
    Workers,
    /// From the artifact store through this streamer.
    Store,
    /// From one gateway to the other through this streamer.
    Relay,
    /// Unknown, because another streamer makes the copy.
    Elsewhere,
}

/// The progress of a copy, in bytes of content.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Progress {
    pub(crate) done: u64,
    pub(crate) total: u64,
    pub(crate) saved: u64,
    pub(crate) per_second: u64,
    pub(crate) route: Route,
    pub(crate) from: Option<WorkerId>,
    /// Whether other workers can read the volume already.
    pub(crate) is_readable: bool,
}

/// The state of a copy, for its callers.
#[derive(Debug, Clone)]
pub(crate) enum CopyState {
    Running(Progress),
    Ended(Result<CompleteCopy, CopyError>),
}

/// A copy that is complete.
#[derive(Debug, Clone)]
pub(crate) struct CompleteCopy {
    pub(crate) volume: VolumeHandle,
    /// The last progress. `None`: nothing had to be copied.
    pub(crate) progress: Option<Progress>,
}

/// The reason why a copy failed. All callers receive the same error.
#[derive(Debug, Clone, thiserror::Error)]
pub(crate) enum CopyError {
    /// The team has no such artifact, or it is not sealed.
    #[error("team has no sealed artifact {0}")]
    NotFound(ArtifactId),
    /// All replicas are lost.
    #[error("cannot read artifact {0}: every replica is lost; make or upload it again")]
    NoReplica(ArtifactId),
    /// A call to another service failed.
    #[error(transparent)]
    Peer(#[from] PeerError),
    /// No source can be read.
    #[error("cannot copy the artifact from any worker: {failures}")]
    Sources {
        /// The error of each source, with the name and the address of its worker.
        failures: String,
        /// Metadata of the gateway's error.
        about: HashMap<String, String>,
    },
    /// Every worker with a replica is out of contact.
    #[error("cannot copy the artifact from any worker: {0}")]
    Silent(String),
    /// The gateway of the worker cannot be reached.
    #[error(
        "cannot copy the artifact to worker {name}: its gateway at {endpoint} cannot be reached: {error}"
    )]
    Unreachable {
        worker: WorkerId,
        /// Name of the worker.
        name: String,
        /// Address of its gateway.
        endpoint: String,
        error: String,
    },
    /// The gateway of the worker ended the call without a result.
    #[error("cannot copy the artifact: the gateway of worker {0} ended the call too early; try again")]
    Truncated(WorkerId),
    /// The worker unpacked a tree with another digest.
    #[error("cannot copy the artifact: worker {0} unpacked another tree; try again")]
    OtherBytes(WorkerId),
    /// A caller cancelled the copy.
    #[error("cannot finish the copy: a caller cancelled it; start it again")]
    Cancelled,
    /// All callers have left.
    #[error("the transfer was abandoned by its callers")]
    Abandoned,
    /// This process is stopping.
    #[error("the streamer is stopping")]
    Stopping,
}

/// Whether a copy continues.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Intent {
    Continue,
    /// All callers have left.
    Abandon,
    /// A caller cancelled the copy.
    Cancel,
}

/// Where a copy in flight gets its bytes, and where they can be read meanwhile.
#[derive(Debug, Clone)]
struct Link {
    /// Worker from which the copy is read, as chosen at its start.
    source: WorkerId,
    volume: VolumeHandle,
    /// Zone of the worker that is filled. Empty: no zone.
    zone: String,
}

/// A copy in flight from which another copy of the same artifact can be read.
#[derive(Debug, Clone)]
pub(crate) struct ReadableCopy {
    pub(crate) worker: WorkerId,
    pub(crate) volume: VolumeHandle,
    pub(crate) states: watch::Receiver<CopyState>,
}

/// The copies in flight. Clones share them.
#[derive(Clone, Default)]
pub(crate) struct InFlight(Arc<Mutex<HashMap<CopyRequest, Entry>>>);

struct Entry {
    transfer: TransferId,
    since: Timestamp,
    waiting: usize,
    /// `None`: its source is not chosen yet.
    link: Option<Link>,
    intent: watch::Sender<Intent>,
    states: watch::Receiver<CopyState>,
}

/// The task's side of a copy.
pub(crate) struct CopyTask {
    pub(crate) request: CopyRequest,
    pub(crate) transfer: TransferId,
    pub(crate) intent: watch::Receiver<Intent>,
    states: watch::Sender<CopyState>,
    in_flight: InFlight,
}

/// The description of a copy in a list.
#[derive(Debug, Clone)]
pub(crate) struct CopyInfo {
    pub(crate) request: CopyRequest,
    pub(crate) transfer: TransferId,
    pub(crate) since: Timestamp,
    pub(crate) progress: Progress,
}

impl InFlight {
    /// Joins the copy of `request`. If none is in flight, `start` starts one.
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
        let entry = Entry { transfer, since, waiting: 1, link: None, intent, states: states.clone() };
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

    /// Returns all copies, oldest first.
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

    /// Returns the number of copies that are read from each worker.
    pub(crate) fn readers(&self) -> HashMap<WorkerId, usize> {
        count_readers(&self.entries())
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

/// Counts the copies that are read from each worker, or will be.
fn count_readers(entries: &HashMap<CopyRequest, Entry>) -> HashMap<WorkerId, usize> {
    let mut readers = HashMap::new();
    for entry in entries.values() {
        let from = match &*entry.states.borrow() {
            CopyState::Running(progress) => progress.from,
            CopyState::Ended(_) => continue,
        };
        if let Some(from) = from.or_else(|| entry.link.as_ref().map(|link| link.source)) {
            *readers.entry(from).or_default() += 1;
        }
    }
    readers
}

impl CopyTask {
    /// Chooses the source of this copy: `best`, unless other copies are read from it and a copy in
    /// flight is idle. `volume` and `zone` are those of the destination. `is_near`: `best` is in
    /// that zone, so a copy in another zone is no alternative. Workers of `avoid` are not chosen.
    ///
    /// Copies that start at the same time thus form a chain. It has no circle, because only a copy
    /// whose source is chosen can be read.
    pub(crate) fn choose_source(
        &self,
        best: WorkerId,
        volume: VolumeHandle,
        zone: &str,
        is_near: bool,
        avoid: impl Fn(WorkerId) -> bool,
    ) -> Option<ReadableCopy> {
        let mut entries = self.in_flight.entries();
        let readers = count_readers(&entries);
        let is_idle = |worker: WorkerId| !readers.contains_key(&worker);
        let found = if is_idle(best) {
            None
        } else {
            let candidates = entries.iter().filter_map(|(request, entry)| {
                let link = entry.link.as_ref()?;
                let is_link_near = !zone.is_empty() && link.zone == zone;
                let is_same =
                    (&request.team, request.artifact) == (&self.request.team, self.request.artifact);
                let may_be_read = is_same
                    && request.worker != self.request.worker
                    && is_idle(request.worker)
                    && (is_link_near || !is_near)
                    && !avoid(request.worker);
                let (volume, states) = (link.volume, entry.states.clone());
                let copy = ReadableCopy { worker: request.worker, volume, states };
                may_be_read.then_some((!is_link_near, entry.since, copy))
            });
            candidates.min_by_key(|(is_far, since, _)| (*is_far, *since)).map(|(_, _, copy)| copy)
        };
        let source = found.as_ref().map_or(best, |copy| copy.worker);
        if let Some(entry) = entries.get_mut(&self.request).filter(|entry| entry.transfer == self.transfer) {
            entry.link = Some(Link { source, volume, zone: zone.to_owned() });
        }
        found
    }

    /// Publishes the progress.
    pub(crate) fn publish(&self, progress: Progress) {
        self.states.send_replace(CopyState::Running(progress));
    }

    /// Returns the number of copies that are read from each worker.
    pub(crate) fn readers(&self) -> HashMap<WorkerId, usize> {
        self.in_flight.readers()
    }

    /// Publishes the result. A later caller starts another copy.
    pub(crate) fn end(self, result: Result<CompleteCopy, CopyError>) {
        self.in_flight.remove(&self.request, self.transfer);
        self.states.send_replace(CopyState::Ended(result));
    }
}

/// A caller of a copy, until it is dropped.
pub(crate) struct Waiter {
    in_flight: InFlight,
    transfer: TransferId,
    request: CopyRequest,
    pub(crate) states: watch::Receiver<CopyState>,
}

impl Waiter {
    /// Waits for the result of the copy.
    pub(crate) async fn ended(mut self) -> Result<CompleteCopy, CopyError> {
        // A task that is dropped without a result has died.
        match self.states.wait_for(|state| matches!(state, CopyState::Ended(_))).await.as_deref() {
            Ok(CopyState::Ended(result)) => result.clone(),
            Ok(CopyState::Running(_)) | Err(_) => Err(CopyError::Abandoned),
        }
    }
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
