//! The model: who keeps what, and what is on the workers' disks. Pure; no call of the store is made here.
//!
//! What happened is told with [`State::accept`], together with what the store answered. The model never says what the store must do next,
//! for collections run at any time beside everything else; it says what must hold whenever they run. So each answer is judged by what
//! is *certain*: a refusal is wrong when what was asked for was certainly there and kept, and a success is wrong when it was certainly not. The
//! rest, such as an artifact that nobody keeps and nobody has collected yet, may be answered either way.

mod accept;
mod aside;
mod base;
mod caches;
mod disposal;
mod owners;
mod trespass;
mod workers;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use domain::{ArtifactId, AttemptId, BuildId, ClaimId, Digest, TransferId, WorkerId, WorkloadId};
use rpc::Refusal;
use rpc::pb::artifacts as pb;
use uuid::Uuid;

use self::aside::Aside;
pub(crate) use self::aside::{Decision, Described, stray_id};
pub(crate) use self::caches::task_cache_ttl;
use self::caches::{ResourceCache, TaskCache};
use super::check::SIZE;
use super::operations::{Artifact, Owner, Status, TREES};
use crate::digest;

/// An artifact that nobody ever owned goes after this many seconds.
pub(crate) const UNOWNED_TTL: i64 = 300;

/// A transfer's claim lasts this many seconds.
pub(crate) const CLAIM_TERM: i64 = 60;

/// How long an attempt's container is there after its end, or after it was last touched, in seconds.
pub(crate) const GC_GRACE: i64 = 10;

/// A resource cache goes when it was unused for this many seconds.
pub(crate) const RESOURCE_CACHE_TTL: i64 = 120;

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
    /// Whether a build was given artifacts, or they were taken from it.
    Owned {
        answer: Result<(), Refusal>,
        /// Who asked was not answered first.
        again: bool,
    },
    Planned {
        handle: Uuid,
        outcome: pb::PlanOutcome,
    },
    /// A resource cache, and what is to be done about it.
    Asked {
        cache: Uuid,
        found: Found,
    },
    /// A task cache, and what it has.
    Task {
        cache: Uuid,
        artifact: Option<ArtifactId>,
    },
    /// What did not come to own an output.
    Settled {
        missing: Vec<Owner>,
    },
    /// Whether a workload may use task caches.
    Used {
        caches: Vec<(u8, Uuid)>,
        answer: Result<(), Refusal>,
    },
    /// With the inputs that were asked for, an output, and the task caches, in their order.
    Prepared {
        inputs: Vec<Artifact>,
        caches: Vec<(u8, Uuid)>,
        planned: pb::PrepareResponse,
    },
    /// With what the report named.
    Reported {
        response: pb::ReportResponse,
        standing: Standing,
        listed: Vec<Uuid>,
    },
    NotReported {
        refusal: Refusal,
        standing: Standing,
    },
    /// Whether these shall go.
    Disposed {
        containers: Vec<Uuid>,
        volumes: Vec<Uuid>,
        answer: Result<(), Refusal>,
    },
    /// What was handed out, in its order.
    Swept(Vec<Uuid>),
    /// Another team was answered, and learnt of what is not its own.
    Passed {
        learnt: bool,
    },
    /// What came of something that was set aside.
    Decided {
        about: Uuid,
        answer: Decision,
    },
    /// What the gateway that was replaced was answered.
    Former(Vec<Option<Refusal>>),
}

/// What was answered to who asked for a resource cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Found {
    Ready(ArtifactId),
    Yours,
    BeingMade(Uuid),
}

/// Whether a report may still count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Standing {
    Good,
    /// A newer session has spoken.
    OfFormerSession,
    /// A newer report was judged.
    Overtaken,
    /// Its worker was forgotten since it began.
    OfForgotten,
    /// Its worker is being forgotten.
    Doubtful,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Build {
    pub(crate) ends_with: u16,
    pub(crate) keep: i64,
    term_ends_at: i64,
    bound: bool,
    /// When its workload was settled, or its caller ended it, and how.
    ended: Option<(i64, Status)>,
    /// Its caller was told that it had not ended before.
    ended_by_caller: bool,
    deleted: bool,
    pub(crate) job: Option<(u8, u16)>,
}

impl Build {
    /// When it ended if nobody said so before its term was over, and whether it did not succeed.
    fn end(&self) -> Option<(i64, bool)> {
        let ended = self.ended.map(|(at, status)| (at, matches!(status, Status::Failed | Status::Errored)));
        // One that is not bound may have been ended by its term.
        let in_time = |(at, _): &(i64, bool)| *at < self.term_ends_at || self.ended_by_caller;
        if self.bound { ended } else { ended.filter(in_time).or(Some((self.term_ends_at, false))) }
    }

    /// Whether it is not known if its term ended it, or its workload without success.
    fn is_in_doubt(&self) -> bool {
        let unsuccessful =
            self.ended.is_some_and(|(_, status)| matches!(status, Status::Failed | Status::Errored));
        unsuccessful && self.end().is_some_and(|(_, unsuccessful)| !unsuccessful)
    }
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Holder {
    settled_at: Option<i64>,
    pins: BTreeSet<Artifact>,
    /// The task caches that it uses.
    caches: BTreeMap<u8, Uuid>,
    /// Those that ended, and those that go on with their worker.
    attempts: BTreeMap<u8, Option<u8>>,
    /// When each ended.
    ended: BTreeMap<u8, i64>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) sealed: Option<u8>,
    owners: BTreeSet<u16>,
    /// Builds that certainly do not own it any more.
    pub(crate) taken_from: BTreeSet<u16>,
    had_owner: bool,
    created_at: i64,
    /// The transfer that filled it was abandoned before it was sealed.
    pub(crate) abandoned: bool,
    /// It is kept until then, by nobody.
    kept_until: i64,
    /// It came back: what of it is marked still stays so.
    pub(crate) restored: Option<Restored>,
    /// It came back once, perhaps.
    came_back: bool,
    /// It was seen marked, or was not seen any more.
    pub(crate) gone: bool,
    /// Made once more, perhaps after it had gone.
    pub(crate) doubtful: bool,
}

impl Record {
    /// Whether a call that makes an upload, open or of a tree with `content`, says what made this one.
    fn is_made_of(&self, content: Option<u8>) -> bool {
        self.sealed.filter(|content| *content >= TREES) == content
    }

    /// A build owns it from now on.
    fn own(&mut self, build: u16) {
        self.owners.insert(build);
        self.taken_from.remove(&build);
        self.had_owner = true;
    }
}

/// Whether an artifact was deleted before it came back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Restored {
    Perhaps,
    Certainly,
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
    pub(crate) claimed_until: Option<i64>,
    complete: Option<u8>,
    /// It was a candidate, and is a replica.
    settled: bool,
    /// It was said to exist.
    created: bool,
    /// It is garbage whatever it was made for.
    pub(crate) revoked: bool,
    /// It is, for it was dropped: it may come back when nothing else has the bytes.
    pub(crate) dropped: bool,
    pub(crate) on_disk: bool,
    /// It was made so late that the store may have forgotten it before.
    pub(crate) late: bool,
}

impl Volume {
    /// Whether it is there for an artifact, and for no attempt.
    pub(crate) fn is_replica(&self) -> bool {
        self.claimed_until.is_some() || self.settled
    }

    pub(crate) fn is_of(&self, artifact: Artifact) -> bool {
        self.artifact == Some(artifact)
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Container {
    worker: u8,
    attempt: (u16, u8),
    touched_at: i64,
    created: bool,
    revoked: bool,
    pub(crate) on_disk: bool,
    pub(crate) late: bool,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Worker {
    /// No report was judged since the incarnation began.
    unconfirmed: bool,
    /// It was forgotten, and perhaps has not spoken since.
    silent: bool,
    /// The life of the store that what it holds is of.
    life: u32,
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
    /// The highest number of each job that was ever put.
    jobs: BTreeMap<u8, u16>,
    resource_caches: BTreeMap<u8, ResourceCache>,
    task_caches: BTreeMap<u8, TaskCache>,
    /// Caches that were deleted.
    deleted_caches: BTreeSet<Uuid>,
    holders: BTreeMap<u16, Holder>,
    pub(crate) artifacts: BTreeMap<Artifact, Record>,
    /// What each transfer fills, where, and with which volume.
    transfers: BTreeMap<u16, (Artifact, u8, Uuid)>,
    pub(crate) volumes: BTreeMap<Uuid, Volume>,
    /// Replicas that certainly count when something comes back.
    pub(crate) sure: BTreeSet<Uuid>,
    pub(crate) containers: BTreeMap<Uuid, Container>,
    workers: Vec<Worker>,
    /// What was on a worker that was forgotten, until it was looked whether it is.
    pub(crate) forgotten: BTreeSet<Uuid>,
    aside: Aside,
    /// The base resource types of workers, and their certs.
    base: BTreeMap<(u8, Option<u8>), Artifact>,
    /// How many lives of the store are over.
    life: u32,
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

pub(crate) fn claim_id(claim: u16) -> ClaimId {
    ClaimId::from_uuid(id(7, claim.into()))
}

pub(crate) fn artifact_id(artifact: Artifact) -> ArtifactId {
    match artifact {
        Artifact::Upload(upload) => ArtifactId::from_uuid(id(6, upload.into())),
        Artifact::Output(workload) => workload_id(workload).output_artifact("out"),
    }
}

/// A tree that is handed over, of as many bytes as anything else has.
pub(crate) fn tree(content: u8) -> pb::SmallTree {
    let what = pb::small_tree_entry::What::File(vec![content; usize::try_from(SIZE).expect("few")].into());
    let file = pb::SmallTreeEntry { path: "file".into(), what: Some(what), ..Default::default() };
    pb::SmallTree { entries: vec![file] }
}

/// The digest of a content.
pub(crate) fn digest_of(content: u8) -> Digest {
    match content {
        TREES.. => rpc::small_tree::parse("tree", &tree(content)).expect("a tree").digest(),
        _ => digest(content.into()),
    }
}

impl State {
    pub(crate) fn new(workers: u8) -> Self {
        Self {
            now: 0,
            builds: BTreeMap::new(),
            jobs: BTreeMap::new(),
            resource_caches: BTreeMap::new(),
            task_caches: BTreeMap::new(),
            deleted_caches: BTreeSet::new(),
            holders: BTreeMap::new(),
            artifacts: BTreeMap::new(),
            transfers: BTreeMap::new(),
            volumes: BTreeMap::new(),
            sure: BTreeSet::new(),
            containers: BTreeMap::new(),
            workers: vec![Worker::default(); usize::from(workers)],
            forgotten: BTreeSet::new(),
            aside: Aside::default(),
            base: BTreeMap::new(),
            life: 0,
        }
    }

    // What is certain.

    /// Which builds certainly own an artifact.
    pub(crate) fn owners(&self, artifact: Artifact) -> impl Iterator<Item = u16> {
        let owners =
            self.artifacts.get(&artifact).into_iter().flat_map(|record| record.owners.iter().copied());
        owners.filter(|build| self.holds_on(*build))
    }

    /// Whether a build certainly goes on.
    fn is_live(&self, build: u16) -> bool {
        self.builds.get(&build).is_some_and(|build| {
            !build.deleted && build.ended.is_none() && (build.bound || self.now < build.term_ends_at)
        })
    }

    /// Whether a build may go on: one whose term passed does until somebody collects.
    fn may_be_live(&self, build: u16) -> bool {
        self.builds.get(&build).is_some_and(|build| !build.deleted && build.ended.is_none())
    }

    /// Whether a build may not have let go: who ended it after its term was perhaps before the collector, and the clock may be ahead of what the
    /// model knows by less than it counts in.
    fn may_hold_on(&self, build: u16) -> bool {
        let Some(build) = self.builds.get(&build).filter(|build| !build.deleted) else { return false };
        let Some((at, status)) = build.ended else { return true };
        let is_unsuccessful = matches!(status, Status::Failed | Status::Errored);
        (is_unsuccessful && self.is_latest_of_its_job(build)) || self.now <= at + build.keep
    }

    fn is_latest_of_its_job(&self, build: &Build) -> bool {
        build.job.is_some_and(|(job, number)| self.jobs.get(&job).is_some_and(|latest| *latest == number))
    }

    /// Whether a build has certainly not let go.
    pub(crate) fn holds_on(&self, build: u16) -> bool {
        self.holds_until(build).is_some_and(|until| self.now < until)
    }

    /// Until when a build holds on for certain: without end if it is far away. `None`: it does not.
    fn holds_until(&self, build: u16) -> Option<i64> {
        let build = self.builds.get(&build).filter(|build| !build.deleted)?;
        let Some((at, unsuccessful)) = build.end() else { return Some(i64::MAX) };
        Some(if unsuccessful && self.is_latest_of_its_job(build) { i64::MAX } else { at + build.keep })
    }

    /// The builds that hold on without end though they have ended, each as the latest of its job.
    pub(crate) fn latest_of_their_jobs(&self) -> Vec<u16> {
        let endless = |(id, build): &(&u16, &Build)| {
            build.ended.is_some() && self.holds_until(**id).is_some_and(|until| until == i64::MAX)
        };
        self.builds.iter().filter(endless).map(|(id, _)| *id).collect()
    }

    /// The builds of which it is not known how they ended, and so how long they hold on.
    pub(crate) fn in_doubt(&self) -> Vec<u16> {
        let doubtful = |(_, build): &(&u16, &Build)| !build.deleted && build.is_in_doubt();
        self.builds.iter().filter(doubtful).map(|(id, _)| *id).collect()
    }

    fn is_settled(&self, workload: u16) -> bool {
        self.holders.get(&workload).is_some_and(|holder| holder.settled_at.is_some())
    }

    /// Whether an attempt goes on, as far as the store was told.
    fn goes_on(&self, (workload, attempt): (u16, u8)) -> bool {
        !self.is_settled(workload)
            && self
                .holders
                .get(&workload)
                .is_some_and(|holder| holder.attempts.get(&attempt).is_some_and(Option::is_some))
    }

    /// Whether what was made for an attempt stays for certain: it goes on, or its end, or the last touch of its container, was not long ago.
    fn keeps(&self, attempt: (u16, u8)) -> bool {
        let mut containers = self.containers.values().filter(|it| it.attempt == attempt && !it.revoked);
        self.goes_on(attempt) || containers.any(|container| self.is_in_grace(container))
    }

    fn is_in_grace(&self, container: &Container) -> bool {
        let (workload, attempt) = container.attempt;
        let ended = self.holders.get(&workload).and_then(|holder| holder.ended.get(&attempt));
        ended.is_some_and(|at| self.now < Ord::max(*at, container.touched_at) + GC_GRACE)
    }

    /// Whether a volume is a replica of an artifact that may have been deleted before, and its parent with it.
    pub(crate) fn came_back(&self, id: Uuid) -> bool {
        let artifact = self.volumes.get(&id).filter(|volume| volume.is_replica()).and_then(|it| it.artifact);
        artifact.and_then(|artifact| self.artifacts.get(&artifact)).is_some_and(|record| record.came_back)
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
            } else if self.now < record.kept_until {
                kept.insert(*artifact, "its reprieve".to_owned());
            }
        }
        for (workload, holder) in &self.holders {
            kept.extend(holder.pins.iter().map(|artifact| (*artifact, format!("workload {workload}"))));
        }
        for (handle, volume) in &self.volumes {
            if let Some((attempt, from)) = volume.attempt.zip(volume.from)
                && !volume.revoked
                && self.keeps(attempt)
            {
                kept.insert(from, format!("volume {handle}"));
            }
        }
        kept.extend(self.held_by_caches());
        kept.extend(self.base.iter().map(|(of, artifact)| (*artifact, format!("worker and type {of:?}"))));
        kept
    }

    fn is_kept(&self, artifact: Artifact) -> bool {
        self.kept().contains_key(&artifact)
    }

    pub(crate) fn sealed(&self, artifact: Artifact) -> Option<u8> {
        self.artifacts.get(&artifact)?.sealed
    }

    /// Whether an artifact has bytes that are certainly answered: the store has them itself, or a worker whose volumes are known.
    pub(super) fn has_bytes(&self, artifact: Artifact) -> bool {
        let Some(content) = self.sealed(artifact) else { return false };
        let confirmed = |(_, worker): (Uuid, u8)| !self.workers[usize::from(worker)].unconfirmed;
        content >= TREES || self.replicas(artifact, content).any(confirmed)
    }

    /// The volumes that certainly hold `content` for an artifact.
    pub(crate) fn replicas(&self, artifact: Artifact, content: u8) -> impl Iterator<Item = (Uuid, u8)> {
        let is_one = move |volume: &Volume| {
            volume.is_of(artifact)
                && volume.is_replica()
                && volume.complete == Some(content)
                && volume.on_disk
                && !volume.revoked
        };
        self.volumes.iter().filter(move |(_, volume)| is_one(volume)).map(|(id, volume)| (*id, volume.worker))
    }

    /// Whether a volume has all bytes of its artifact, was not dropped, and is on a worker that has told what it holds.
    pub(crate) fn is_sure(&self, volume: &Volume) -> bool {
        let sealed = volume.artifact.and_then(|artifact| self.sealed(artifact));
        let is_whole =
            volume.complete.is_some() && volume.complete == sealed && volume.on_disk && !volume.late;
        volume.is_replica()
            && is_whole
            && !volume.revoked
            && !self.workers[usize::from(volume.worker)].unconfirmed
    }

    /// The artifact that a volume is a replica of, or shall be.
    pub(crate) fn holds_replica(&self, id: Uuid) -> Option<Artifact> {
        let volume = self.volumes.get(&id).filter(|volume| volume.is_replica())?;
        volume.artifact.filter(|_| volume.complete.is_some() && !volume.revoked)
    }

    /// Why a volume must not be marked. `None`: it may.
    pub(crate) fn need_of_volume(&self, id: Uuid, kept: &BTreeMap<Artifact, String>) -> Option<String> {
        let volume = self.volumes.get(&id)?;
        if volume.revoked {
            return None;
        }
        if let Some(attempt) = volume.attempt.filter(|_| !volume.settled) {
            return self.keeps(attempt).then(|| format!("attempt {attempt:?}"));
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
        let needed = !container.revoked && self.keeps(container.attempt);
        needed.then(|| format!("attempt {:?}", container.attempt))
    }

    // What operations are about.

    pub(crate) fn pins_of(&self, workload: u16) -> Vec<Artifact> {
        self.holders.get(&workload).map(|holder| holder.pins.iter().copied().collect()).unwrap_or_default()
    }

    pub(crate) fn caches_of(&self, workload: u16) -> Vec<(u8, Uuid)> {
        let caches = self.holders.get(&workload).into_iter().flat_map(|holder| &holder.caches);
        caches.map(|(task, id)| (*task, *id)).collect()
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

    /// The worker of an attempt whose container is on the disk.
    pub(crate) fn container_of(&self, workload: u16, attempt: u8) -> Option<u8> {
        let is_of = |it: &&Container| it.attempt == (workload, attempt) && !it.revoked && it.on_disk;
        self.containers.values().find(is_of).map(|container| container.worker)
    }

    /// A build, as it was put.
    pub(crate) fn build(&self, build: u16) -> Option<&Build> {
        self.builds.get(&build)
    }

    /// What a worker holds: volumes and containers.
    pub(crate) fn holdings(&self, worker: u8) -> (Vec<String>, Vec<String>) {
        let volumes = self.volumes.iter().filter(|(_, it)| it.worker == worker && it.on_disk);
        let containers = self.containers.iter().filter(|(_, it)| it.worker == worker && it.on_disk);
        (volumes.map(|(id, _)| id.to_string()).collect(), containers.map(|(id, _)| id.to_string()).collect())
    }

    /// What workers were told to make later.
    pub(crate) fn to_be_made(&self) -> BTreeSet<Uuid> {
        self.workers.iter().flat_map(|worker| worker.later.iter().copied()).collect()
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
        let goes_on = self
            .holders
            .iter()
            .filter(|(_, holder)| holder.settled_at.is_none())
            .map(|(workload, _)| *workload);
        goes_on.partition(|workload| !ends_owner(workload))
    }
}
