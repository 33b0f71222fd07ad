//! The model: who keeps what, and what is on the workers' disks. Pure; no call of the store is made here.
//!
//! What happened is told with [`State::accept`], together with what the store answered. The model never says what the store must do next,
//! for collections run at any time beside everything else; it says what must hold whenever they run. So each answer is judged by what
//! is *certain*: a refusal is wrong when what was asked for was certainly there and kept, and a success is wrong when it was certainly not. The
//! rest, such as an artifact that nobody keeps and nobody has collected yet, may be answered either way.

mod accept;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use domain::{ArtifactId, AttemptId, BuildId, TransferId, WorkerId, WorkloadId};
use rpc::Refusal;
use rpc::pb::artifacts as pb;
use uuid::Uuid;

use super::operations::Artifact;

/// An artifact that nobody ever owned goes after this many seconds.
pub(crate) const UNOWNED_TTL: i64 = 300;

/// A transfer's claim lasts this many seconds.
pub(crate) const CLAIM_TERM: i64 = 60;

/// What must not be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Violation(pub(crate) String);

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

pub(crate) type Accepted = Result<(), Violation>;

/// Fails with a violation unless something holds.
macro_rules! must {
    ($holds:expr, $($what:tt)+) => {
        if !$holds {
            return Err(Violation(format!($($what)+)));
        }
    };
}
pub(crate) use must;

/// What came of an operation.
#[derive(Debug, Clone)]
pub(crate) enum Outcome {
    /// It could not happen: what it is about was never made.
    Skipped,
    Done,
    Refused(Refusal),
    Adopted {
        artifact: Option<ArtifactId>,
        /// Who asked was not answered first, and perhaps adopted another.
        again: bool,
    },
    Planned {
        handle: Uuid,
        outcome: pb::PlanOutcome,
    },
    /// With the inputs that were asked for, in their order.
    Prepared {
        inputs: Vec<Artifact>,
        planned: pb::PrepareResponse,
    },
    Reported {
        response: pb::ReportResponse,
        standing: Standing,
    },
    NotReported {
        refusal: Refusal,
        standing: Standing,
    },
    /// What was handed out, in its order.
    Swept(Vec<Uuid>),
    /// What the gateway that was replaced was answered.
    Former(Vec<Option<Refusal>>),
}

/// Whether a report may still count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Standing {
    Good,
    /// A newer session has spoken.
    OfFormerSession,
    /// A newer report was judged.
    Overtaken,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Build {
    ends_with: u16,
    keep: i64,
    term_ends_at: i64,
    bound: bool,
    /// When its workload was settled.
    settled_at: Option<i64>,
    deleted: bool,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Holder {
    settled: bool,
    pins: BTreeSet<Artifact>,
    /// Those that ended, and those that go on with their worker.
    attempts: BTreeMap<u8, Option<u8>>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) sealed: Option<u8>,
    owners: BTreeSet<u16>,
    had_owner: bool,
    created_at: i64,
    /// The transfer that filled it was abandoned before it was sealed.
    abandoned: bool,
    /// It was seen marked, or was not seen any more.
    pub(crate) gone: bool,
    /// Made once more, perhaps after it had gone.
    pub(crate) doubtful: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Volume {
    worker: u8,
    /// What it holds or may come to hold.
    artifact: Option<Artifact>,
    /// What it starts with.
    from: Option<Artifact>,
    pub(crate) parent: Option<Uuid>,
    attempt: Option<(u16, u8)>,
    /// Until when its transfer may take. `None`: it is of no transfer.
    claimed_until: Option<i64>,
    complete: Option<u8>,
    /// It was a candidate, and is a replica.
    settled: bool,
    /// It was said to exist.
    created: bool,
    /// It is garbage whatever it was made for.
    pub(crate) revoked: bool,
    pub(crate) on_disk: bool,
    /// It was made so late that the store may have forgotten it before.
    pub(crate) late: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Container {
    worker: u8,
    attempt: (u16, u8),
    created: bool,
    revoked: bool,
    pub(crate) on_disk: bool,
    pub(crate) late: bool,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Worker {
    /// No report was judged since the incarnation began.
    unconfirmed: bool,
    /// What its gateway was told to make, and has not made yet.
    later: BTreeSet<Uuid>,
    /// What it was told to destroy, and has not destroyed yet.
    doomed: Vec<Uuid>,
}

/// Everything that is known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct State {
    /// Seconds since the beginning.
    pub(crate) now: i64,
    builds: BTreeMap<u16, Build>,
    holders: BTreeMap<u16, Holder>,
    pub(crate) artifacts: BTreeMap<Artifact, Record>,
    /// What each transfer fills, where, and with which volume.
    transfers: BTreeMap<u16, (Artifact, u8, Uuid)>,
    pub(crate) volumes: BTreeMap<Uuid, Volume>,
    pub(crate) containers: BTreeMap<Uuid, Container>,
    workers: Vec<Worker>,
}

// The ids that small numbers stand for.

fn id(kind: u128, number: u128) -> Uuid {
    // Of version 4, as far as anybody looks.
    Uuid::from_u128(kind << 96 | 0x4000_8000_0000_0000_0000 | number)
}

pub(crate) fn build_id(build: u16) -> BuildId {
    BuildId::from_uuid(id(1, build.into()))
}

pub(crate) fn workload_id(workload: u16) -> WorkloadId {
    WorkloadId::from_uuid(id(2, workload.into()))
}

pub(crate) fn attempt_id(workload: u16, attempt: u8) -> AttemptId {
    AttemptId::from_uuid(id(3, u128::from(workload) << 16 | u128::from(attempt)))
}

pub(crate) fn transfer_id(transfer: u16) -> TransferId {
    TransferId::from_uuid(id(4, transfer.into()))
}

pub(crate) fn worker_id(worker: u8) -> WorkerId {
    WorkerId::from_uuid(id(5, worker.into()))
}

pub(crate) fn artifact_id(artifact: Artifact) -> ArtifactId {
    match artifact {
        Artifact::Upload(upload) => ArtifactId::from_uuid(id(6, upload.into())),
        Artifact::Output(workload) => workload_id(workload).output_artifact("out"),
    }
}

impl State {
    pub(crate) fn new(workers: u8) -> Self {
        Self {
            now: 0,
            builds: BTreeMap::new(),
            holders: BTreeMap::new(),
            artifacts: BTreeMap::new(),
            transfers: BTreeMap::new(),
            volumes: BTreeMap::new(),
            containers: BTreeMap::new(),
            workers: vec![Worker::default(); usize::from(workers)],
        }
    }

    // What is certain.

    /// Whether a build certainly goes on.
    fn is_live(&self, build: u16) -> bool {
        self.builds.get(&build).is_some_and(|build| {
            !build.deleted && build.settled_at.is_none() && (build.bound || self.now < build.term_ends_at)
        })
    }

    /// Whether a build may go on: one whose term passed does until somebody collects.
    fn may_be_live(&self, build: u16) -> bool {
        self.builds.get(&build).is_some_and(|build| !build.deleted && build.settled_at.is_none())
    }

    /// Whether a build has certainly not let go.
    pub(crate) fn holds_on(&self, build: u16) -> bool {
        self.builds.get(&build).is_some_and(|build| {
            let ended_at = match (build.bound, build.settled_at) {
                (true, settled_at) => settled_at,
                (false, settled_at) => {
                    Some(settled_at.map_or(build.term_ends_at, |at| at.min(build.term_ends_at)))
                }
            };
            !build.deleted && ended_at.is_none_or(|at| self.now < at + build.keep)
        })
    }

    fn is_settled(&self, workload: u16) -> bool {
        self.holders.get(&workload).is_some_and(|holder| holder.settled)
    }

    /// Whether an attempt goes on, as far as the store was told.
    fn goes_on(&self, (workload, attempt): (u16, u8)) -> bool {
        !self.is_settled(workload)
            && self
                .holders
                .get(&workload)
                .is_some_and(|holder| holder.attempts.get(&attempt).is_some_and(Option::is_some))
    }

    /// What certainly keeps artifacts, for people.
    pub(crate) fn kept(&self) -> BTreeMap<Artifact, String> {
        let mut kept = BTreeMap::new();
        for (artifact, record) in &self.artifacts {
            if record.abandoned && record.sealed.is_none() {
                continue;
            }
            if let Some(build) = record.owners.iter().find(|build| self.holds_on(**build)) {
                kept.insert(*artifact, format!("build {build}"));
            } else if !record.had_owner && self.now < record.created_at + UNOWNED_TTL {
                kept.insert(*artifact, "its youth".to_owned());
            }
        }
        for (workload, holder) in &self.holders {
            kept.extend(holder.pins.iter().map(|artifact| (*artifact, format!("workload {workload}"))));
        }
        for (handle, volume) in &self.volumes {
            if let Some((attempt, from)) = volume.attempt.zip(volume.from)
                && !volume.revoked
                && self.goes_on(attempt)
            {
                kept.insert(from, format!("volume {handle}"));
            }
        }
        kept
    }

    fn is_kept(&self, artifact: Artifact) -> bool {
        self.kept().contains_key(&artifact)
    }

    pub(crate) fn sealed(&self, artifact: Artifact) -> Option<u8> {
        self.artifacts.get(&artifact)?.sealed
    }

    /// The volumes that certainly hold `content` for an artifact.
    pub(crate) fn replicas(&self, artifact: Artifact, content: u8) -> impl Iterator<Item = (Uuid, u8)> {
        let is_one = move |volume: &Volume| {
            volume.artifact == Some(artifact)
                && (volume.claimed_until.is_some() || volume.settled)
                && volume.complete == Some(content)
                && volume.on_disk
                && !volume.revoked
        };
        self.volumes.iter().filter(move |(_, volume)| is_one(volume)).map(|(id, volume)| (*id, volume.worker))
    }

    /// The artifact that a volume is a replica of, or shall be.
    pub(crate) fn holds_replica(&self, id: Uuid) -> Option<Artifact> {
        let volume =
            self.volumes.get(&id).filter(|volume| volume.claimed_until.is_some() || volume.settled)?;
        volume.artifact.filter(|_| volume.complete.is_some() && !volume.revoked)
    }

    /// Why a volume must not be marked. `None`: it may.
    pub(crate) fn need_of_volume(&self, id: Uuid, kept: &BTreeMap<Artifact, String>) -> Option<String> {
        let volume = self.volumes.get(&id)?;
        if volume.revoked {
            return None;
        }
        if let Some(attempt) = volume.attempt.filter(|_| !volume.settled) {
            return self.goes_on(attempt).then(|| format!("attempt {attempt:?}"));
        }
        let artifact = volume.artifact?;
        let keeper = kept.get(&artifact)?;
        let needed = match (self.sealed(artifact), volume.complete) {
            (Some(sealed), Some(content)) => sealed == content && volume.on_disk,
            // What arrived waits for its commit no longer than its artifact.
            (None, Some(_)) => volume.on_disk,
            (_, None) => volume.claimed_until.is_some_and(|until| self.now < until),
        };
        needed.then(|| format!("{artifact:?}, kept by {keeper}"))
    }

    /// Why a container must not be marked. `None`: it may.
    pub(crate) fn need_of_container(&self, id: Uuid) -> Option<String> {
        let container = self.containers.get(&id)?;
        let needed = !container.revoked && self.goes_on(container.attempt);
        needed.then(|| format!("attempt {:?}", container.attempt))
    }

    // What operations are about.

    pub(crate) fn pins_of(&self, workload: u16) -> Vec<Artifact> {
        self.holders.get(&workload).map(|holder| holder.pins.iter().copied().collect()).unwrap_or_default()
    }

    pub(crate) fn transfer(&self, transfer: u16) -> Option<(Artifact, u8, Uuid)> {
        self.transfers.get(&transfer).copied()
    }

    pub(crate) fn is_on_disk(&self, id: Uuid) -> bool {
        self.volumes.get(&id).is_some_and(|volume| volume.on_disk)
            || self.containers.get(&id).is_some_and(|container| container.on_disk)
    }

    /// The worker of an attempt that was prepared and goes on, and its output, if all that was made for it is on the disk.
    pub(crate) fn made_for(&self, workload: u16, attempt: u8) -> Option<(u8, Uuid)> {
        let of_attempt = || {
            self.volumes
                .iter()
                .filter(move |(_, volume)| volume.attempt == Some((workload, attempt)) && !volume.revoked)
        };
        let (output, volume) = of_attempt().find(|(_, volume)| volume.artifact.is_some())?;
        of_attempt().all(|(_, volume)| volume.on_disk).then_some((volume.worker, *output))
    }

    /// What a worker holds: volumes and containers.
    pub(crate) fn holdings(&self, worker: u8) -> (Vec<String>, Vec<String>) {
        let volumes = self.volumes.iter().filter(|(_, it)| it.worker == worker && it.on_disk);
        let containers = self.containers.iter().filter(|(_, it)| it.worker == worker && it.on_disk);
        (volumes.map(|(id, _)| id.to_string()).collect(), containers.map(|(id, _)| id.to_string()).collect())
    }

    /// The workloads that were not settled, those that end a build that owns something, or may, last.
    pub(crate) fn unsettled(&self) -> (Vec<u16>, Vec<u16>) {
        let ends_owner = |workload: &u16| {
            self.builds.iter().any(|(id, build)| {
                build.ends_with == *workload
                    && self.is_live(*id)
                    && build.bound
                    && self.artifacts.values().any(|record| record.owners.contains(id))
            })
        };
        let goes_on =
            self.holders.iter().filter(|(_, holder)| !holder.settled).map(|(workload, _)| *workload);
        goes_on.partition(|workload| !ends_owner(workload))
    }
}
