//! The model: references to artifacts, and contents of the workers' disks. It makes no calls to the
//! store.
//!
//! [`State::accept`] receives each operation with the store's answer. The model does not predict
//! the store's next step, because collections run at any time. It knows facts that must always
//! hold.
//!
//! An answer is judged by *certain* facts. A rejection is wrong if the item certainly existed and
//! was kept. A success is wrong if it certainly did not exist. In all other cases, for example an
//! unreferenced artifact that may be collected, both answers are permitted.

mod accept;
mod base;
mod caches;
mod disposal;
mod orphans;
mod owners;
mod trespass;
mod workers;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use domain::{ArtifactId, AttemptId, BuildId, ClaimId, Digest, TransferId, WorkerId, WorkloadId};
use rpc::Refusal;
use rpc::pb::artifacts as pb;
use uuid::Uuid;

pub(crate) use self::caches::task_cache_ttl;
use self::caches::{ResourceCache, TaskCache};
use self::orphans::Orphans;
pub(crate) use self::orphans::{Decision, OrphanDescription, stray_id};
use super::check::SIZE;
use super::operations::{Artifact, Outputs, Owner, Status, TREES};
use crate::digest;

/// Time after which an artifact that never had an owner is deleted, in seconds.
pub(crate) const UNOWNED_TTL: i64 = 300;

/// Term of the claim of a transfer, in seconds.
pub(crate) const CLAIM_TERM: i64 = 60;

/// Time for which an attempt's container stays after its end or last touch, in seconds.
pub(crate) const GC_GRACE: i64 = 10;

/// Time without use after which a resource cache is deleted, in seconds.
pub(crate) const RESOURCE_CACHE_TTL: i64 = 120;

/// A contradiction between the store and the model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Violation(pub(crate) String);

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

pub(crate) type Accepted = Result<(), Violation>;

/// Fails with a violation unless a condition holds.
macro_rules! must {
    ($holds:expr, $($what:tt)+) => {
        if !$holds {
            return Err(Violation(format!($($what)+)));
        }
    };
}
pub(crate) use must;

/// Result of an operation.
#[derive(Debug, Clone)]
pub(crate) enum Outcome {
    /// Impossible, because its subject was never created.
    Skipped,
    Done,
    Refused(Refusal),
    Adopted {
        artifact: Option<ArtifactId>,
        /// Whether the call was repeated, so that the first one may have adopted another artifact.
        again: bool,
    },
    /// Result of changing the owners of artifacts.
    Owned {
        answer: Result<(), Refusal>,
        /// Whether the call was repeated.
        again: bool,
    },
    Planned {
        handle: Uuid,
        outcome: pb::PlanOutcome,
    },
    /// A resource cache, and its state for the caller.
    Asked {
        cache: Uuid,
        found: CacheOutcome,
    },
    /// A task cache, and its version.
    Task {
        cache: Uuid,
        artifact: Option<ArtifactId>,
    },
    /// Owners that were missing.
    Settled {
        missing: Vec<Owner>,
        /// Whether another settlement came before.
        differs: bool,
    },
    /// Result of using task caches.
    Used {
        caches: Vec<(u8, Uuid)>,
        answer: Result<(), Refusal>,
    },
    /// The inputs, the output, and the task caches, in order.
    Prepared {
        inputs: Vec<Artifact>,
        caches: Vec<(u8, Uuid)>,
        planned: pb::PrepareResponse,
    },
    /// Result of a report, with its contents.
    Reported {
        response: pb::ReportResponse,
        validity: ReportValidity,
        listed: Vec<Uuid>,
    },
    NotReported {
        refusal: Refusal,
        validity: ReportValidity,
    },
    /// Result of marking these items.
    Disposed {
        containers: Vec<Uuid>,
        volumes: Vec<Uuid>,
        answer: Result<(), Refusal>,
    },
    /// Handed-out items, in order.
    Swept(Vec<Uuid>),
    /// Another team received items that are not its own.
    Passed {
        learnt: bool,
    },
    /// Result of a decision about an orphan.
    Decided {
        about: Uuid,
        answer: Decision,
    },
    /// Answers to the gateway of the former session.
    Former(Vec<Option<Refusal>>),
}

/// State of a requested resource cache for the caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CacheOutcome {
    Ready(ArtifactId),
    Claimed,
    InProgress(Uuid),
}

/// Validity of a report.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReportValidity {
    Good,
    /// A newer session is recorded.
    OfFormerSession,
    /// A newer report was judged.
    Overtaken,
    /// Its worker was forgotten after it began.
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
    /// When and how its workload or its caller ended it.
    ended: Option<(i64, Status)>,
    /// Whether its caller ended it before anything else did.
    ended_by_caller: bool,
    deleted: bool,
    pub(crate) job: Option<(u8, u16)>,
}

impl Build {
    /// Returns when it ended, unless its term ended it earlier, and whether it failed.
    fn end(&self) -> Option<(i64, bool)> {
        let ended = self.ended.map(|(at, status)| (at, matches!(status, Status::Failed | Status::Errored)));
        // An unbound build may have been ended by its term.
        let in_time = |(at, _): &(i64, bool)| *at < self.term_ends_at || self.ended_by_caller;
        if self.bound { ended } else { ended.filter(in_time).or(Some((self.term_ends_at, false))) }
    }

    /// Returns whether its term may have ended it, or its workload failed.
    fn is_in_doubt(&self) -> bool {
        let unsuccessful =
            self.ended.is_some_and(|(_, status)| matches!(status, Status::Failed | Status::Errored));
        unsuccessful && self.end().is_some_and(|(_, unsuccessful)| !unsuccessful)
    }
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Holder {
    settled_at: Option<i64>,
    /// The settlement, if it had an output.
    settlement: Option<(Outputs, Status, Option<u16>)>,
    pins: BTreeSet<Artifact>,
    /// Task caches that it uses.
    caches: BTreeMap<u8, Uuid>,
    /// Attempts: ended ones, and active ones with their worker.
    attempts: BTreeMap<u8, Option<u8>>,
    /// When each attempt ended.
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
    /// Whether the transfer that filled it was abandoned before it was sealed.
    pub(crate) abandoned: bool,
    /// Until when it is kept without an owner.
    kept_until: i64,
    /// It was restored, and its marked replicas stay marked.
    pub(crate) restored: Option<Restored>,
    /// Whether it may have been restored once.
    came_back: bool,
    /// Whether it was seen marked, or was missing.
    pub(crate) gone: bool,
    /// Whether it was created again, perhaps after its deletion.
    pub(crate) doubtful: bool,
}

impl Record {
    /// Returns whether a call that creates an upload, open or of a tree with `content`, matches the
    /// first one.
    fn is_made_of(&self, content: Option<u8>) -> bool {
        self.sealed.filter(|content| *content >= TREES) == content
    }

    /// Adds an owning build.
    fn own(&mut self, build: u16) {
        self.owners.insert(build);
        self.taken_from.remove(&build);
        self.had_owner = true;
    }
}

/// Whether a restored artifact was deleted before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Restored {
    Perhaps,
    Certainly,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Volume {
    worker: u8,
    /// Artifact whose bytes it holds or may come to hold.
    artifact: Option<Artifact>,
    /// Artifact with which it starts.
    from: Option<Artifact>,
    pub(crate) parent: Option<Uuid>,
    attempt: Option<(u16, u8)>,
    /// End of its transfer's claim. `None` if it has no transfer.
    pub(crate) claimed_until: Option<i64>,
    complete: Option<u8>,
    /// Whether it was a candidate and is now a replica.
    settled: bool,
    /// Whether its creation was reported.
    created: bool,
    /// Whether it is garbage, regardless of its purpose.
    pub(crate) revoked: bool,
    /// Whether it is garbage because it was dropped. It is restored only if no other replica has
    /// the bytes.
    pub(crate) dropped: bool,
    pub(crate) on_disk: bool,
    /// Whether it was created so late that the store may have forgotten it.
    pub(crate) late: bool,
}

impl Volume {
    /// Returns whether it belongs to an artifact and not to an attempt.
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
    /// Whether no report was judged since the incarnation began.
    unconfirmed: bool,
    /// Whether it was forgotten and may not have registered since.
    silent: bool,
    /// Store life of its contents.
    life: u32,
    /// Items to create that are not created yet.
    later: BTreeSet<Uuid>,
    /// Items to delete that are not deleted yet.
    doomed: Vec<Uuid>,
}

/// All facts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct State {
    /// Seconds since the start.
    pub(crate) now: i64,
    builds: BTreeMap<u16, Build>,
    /// Highest number of each job that was put.
    jobs: BTreeMap<u8, u16>,
    resource_caches: BTreeMap<u8, ResourceCache>,
    task_caches: BTreeMap<u8, TaskCache>,
    /// Deleted caches.
    deleted_caches: BTreeSet<Uuid>,
    holders: BTreeMap<u16, Holder>,
    pub(crate) artifacts: BTreeMap<Artifact, Record>,
    /// Artifact, worker and volume of each transfer.
    transfers: BTreeMap<u16, (Artifact, u8, Uuid)>,
    pub(crate) volumes: BTreeMap<Uuid, Volume>,
    /// Replicas that certainly count when their artifacts are restored.
    pub(crate) sure: BTreeSet<Uuid>,
    pub(crate) containers: BTreeMap<Uuid, Container>,
    workers: Vec<Worker>,
    /// Contents of forgotten workers that were not checked yet.
    pub(crate) forgotten: BTreeSet<Uuid>,
    orphans: Orphans,
    /// Base resource types and certificates of workers.
    base: BTreeMap<(u8, Option<u8>), Artifact>,
    /// Number of ended store lives.
    life: u32,
}

// Ids of small numbers.

fn id(kind: u128, number: u128) -> Uuid {
    // Has the form of a version 4 UUID.
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

/// Returns a small tree with the size of all other contents.
pub(crate) fn tree(content: u8) -> pb::SmallTree {
    let what = pb::small_tree_entry::Content::File(vec![content; usize::try_from(SIZE).expect("few")].into());
    let file = pb::SmallTreeEntry { path: "file".into(), content: Some(what), ..Default::default() };
    pb::SmallTree { entries: vec![file] }
}

/// Returns the digest of a content.
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
            orphans: Orphans::default(),
            base: BTreeMap::new(),
            life: 0,
        }
    }

    // Certain facts.

    /// Returns the builds that certainly own an artifact.
    pub(crate) fn owners(&self, artifact: Artifact) -> impl Iterator<Item = u16> {
        let owners =
            self.artifacts.get(&artifact).into_iter().flat_map(|record| record.owners.iter().copied());
        owners.filter(|build| self.holds_on(*build))
    }

    /// Returns whether a build is certainly open.
    fn is_live(&self, build: u16) -> bool {
        self.builds.get(&build).is_some_and(|build| {
            !build.deleted && build.ended.is_none() && (build.bound || self.now < build.term_ends_at)
        })
    }

    /// Returns whether a build may be open. A build with an expired term is open until a
    /// collection.
    fn may_be_live(&self, build: u16) -> bool {
        self.builds.get(&build).is_some_and(|build| !build.deleted && build.ended.is_none())
    }

    /// Returns whether a build may not have let go. An end after its term may have come before the
    /// collector, and the clock may be slightly ahead of the model.
    fn may_hold_on(&self, build: u16) -> bool {
        let Some(build) = self.builds.get(&build).filter(|build| !build.deleted) else { return false };
        let Some((at, status)) = build.ended else { return true };
        let is_unsuccessful = matches!(status, Status::Failed | Status::Errored);
        (is_unsuccessful && self.is_latest_of_its_job(build)) || self.now <= at + build.keep
    }

    fn is_latest_of_its_job(&self, build: &Build) -> bool {
        build.job.is_some_and(|(job, number)| self.jobs.get(&job).is_some_and(|latest| *latest == number))
    }

    /// Returns whether a build has certainly not let go.
    pub(crate) fn holds_on(&self, build: u16) -> bool {
        self.holds_until(build).is_some_and(|until| self.now < until)
    }

    /// Returns until when a build certainly holds on. `None` if it does not.
    fn holds_until(&self, build: u16) -> Option<i64> {
        let build = self.builds.get(&build).filter(|build| !build.deleted)?;
        let Some((at, unsuccessful)) = build.end() else { return Some(i64::MAX) };
        Some(if unsuccessful && self.is_latest_of_its_job(build) { i64::MAX } else { at + build.keep })
    }

    /// Returns the ended builds that hold on as the latest of their jobs.
    pub(crate) fn latest_of_their_jobs(&self) -> Vec<u16> {
        let endless = |(id, build): &(&u16, &Build)| {
            build.ended.is_some() && self.holds_until(**id).is_some_and(|until| until == i64::MAX)
        };
        self.builds.iter().filter(endless).map(|(id, _)| *id).collect()
    }

    /// Returns the builds whose kind of end is unknown.
    pub(crate) fn in_doubt(&self) -> Vec<u16> {
        let doubtful = |(_, build): &(&u16, &Build)| !build.deleted && build.is_in_doubt();
        self.builds.iter().filter(doubtful).map(|(id, _)| *id).collect()
    }

    fn is_settled(&self, workload: u16) -> bool {
        self.holders.get(&workload).is_some_and(|holder| holder.settled_at.is_some())
    }

    /// Returns whether an attempt is active, as far as the store knows.
    fn goes_on(&self, (workload, attempt): (u16, u8)) -> bool {
        !self.is_settled(workload)
            && self
                .holders
                .get(&workload)
                .is_some_and(|holder| holder.attempts.get(&attempt).is_some_and(Option::is_some))
    }

    /// Returns whether items of an attempt certainly stay: it is active, or in its grace period.
    fn keeps(&self, attempt: (u16, u8)) -> bool {
        let mut containers = self.containers.values().filter(|it| it.attempt == attempt && !it.revoked);
        self.goes_on(attempt) || containers.any(|container| self.is_in_grace(container))
    }

    fn is_in_grace(&self, container: &Container) -> bool {
        let (workload, attempt) = container.attempt;
        let ended = self.holders.get(&workload).and_then(|holder| holder.ended.get(&attempt));
        ended.is_some_and(|at| self.now < Ord::max(*at, container.touched_at) + GC_GRACE)
    }

    /// Returns whether a volume is a replica of an artifact that may have been deleted before, with
    /// its parent.
    pub(crate) fn came_back(&self, id: Uuid) -> bool {
        let artifact = self.volumes.get(&id).filter(|volume| volume.is_replica()).and_then(|it| it.artifact);
        artifact.and_then(|artifact| self.artifacts.get(&artifact)).is_some_and(|record| record.came_back)
    }

    /// Returns the open artifacts whose uploads a collection may have given up: a claim has
    /// expired, and no other volume has the bytes or may get them.
    pub(crate) fn given_up(&self) -> BTreeSet<Artifact> {
        let is_expired = |volume: &Volume| {
            volume.complete.is_none() && volume.claimed_until.is_some_and(|until| until <= self.now)
        };
        let may_be_sealed = |volume: &Volume| {
            !volume.revoked
                && (volume.complete.is_some() || volume.claimed_until.is_none_or(|until| self.now < until))
        };
        let of = |artifact: Artifact| self.volumes.values().filter(move |volume| volume.is_of(artifact));
        let expired =
            self.volumes.values().filter(|volume| is_expired(volume)).filter_map(|volume| volume.artifact);
        expired
            .filter(|artifact| self.sealed(*artifact).is_none() && !of(*artifact).any(may_be_sealed))
            .collect()
    }

    /// Returns the artifacts that are certainly kept, with the reason for people.
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

    /// Returns whether an artifact has certain bytes: in the store, or on a worker that has
    /// reported.
    pub(super) fn has_bytes(&self, artifact: Artifact) -> bool {
        let Some(content) = self.sealed(artifact) else { return false };
        let confirmed = |(_, worker): (Uuid, u8)| !self.workers[usize::from(worker)].unconfirmed;
        content >= TREES || self.replicas(artifact, content).any(confirmed)
    }

    /// Returns the volumes that certainly have `content` for an artifact.
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

    /// Returns whether a volume is complete, was not dropped, and is on a worker that has reported.
    pub(crate) fn is_sure(&self, volume: &Volume) -> bool {
        let sealed = volume.artifact.and_then(|artifact| self.sealed(artifact));
        let is_whole =
            volume.complete.is_some() && volume.complete == sealed && volume.on_disk && !volume.late;
        volume.is_replica()
            && is_whole
            && !volume.revoked
            && !self.workers[usize::from(volume.worker)].unconfirmed
    }

    /// Returns the artifact of which a volume is or will be a replica.
    pub(crate) fn holds_replica(&self, id: Uuid) -> Option<Artifact> {
        let volume = self.volumes.get(&id).filter(|volume| volume.is_replica())?;
        volume.artifact.filter(|_| volume.complete.is_some() && !volume.revoked)
    }

    /// Returns why a volume must not be marked. `None` if it may be.
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
            // A complete volume of an open artifact waits for the commit as long as its artifact
            // exists.
            (None, Some(_)) => volume.on_disk,
            (_, None) => volume.claimed_until.is_some_and(|until| self.now < until),
        };
        needed.then(|| format!("{artifact:?}, kept by {keeper}"))
    }

    /// Returns why a container must not be marked. `None` if it may be.
    pub(crate) fn need_of_container(&self, id: Uuid) -> Option<String> {
        let container = self.containers.get(&id)?;
        let needed = !container.revoked && self.keeps(container.attempt);
        needed.then(|| format!("attempt {:?}", container.attempt))
    }

    // Subjects of operations.

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

    /// Returns the worker of an active, prepared attempt, and its output, if all of its items are
    /// on the disk.
    pub(crate) fn made_for(&self, workload: u16, attempt: u8) -> Option<(u8, Uuid)> {
        let of_attempt = || {
            self.volumes
                .iter()
                .filter(move |(_, volume)| volume.attempt == Some((workload, attempt)) && !volume.revoked)
        };
        let (output, volume) = of_attempt().find(|(_, volume)| volume.artifact.is_some())?;
        of_attempt().all(|(_, volume)| volume.on_disk).then_some((volume.worker, *output))
    }

    /// Returns the worker of an attempt whose container is on the disk.
    pub(crate) fn container_of(&self, workload: u16, attempt: u8) -> Option<u8> {
        let is_of = |it: &&Container| it.attempt == (workload, attempt) && !it.revoked && it.on_disk;
        self.containers.values().find(is_of).map(|container| container.worker)
    }

    /// Returns a build as it was put.
    pub(crate) fn build(&self, build: u16) -> Option<&Build> {
        self.builds.get(&build)
    }

    /// Returns the volumes and containers on a worker.
    pub(crate) fn holdings(&self, worker: u8) -> (Vec<String>, Vec<String>) {
        let volumes = self.volumes.iter().filter(|(_, it)| it.worker == worker && it.on_disk);
        let containers = self.containers.iter().filter(|(_, it)| it.worker == worker && it.on_disk);
        (volumes.map(|(id, _)| id.to_string()).collect(), containers.map(|(id, _)| id.to_string()).collect())
    }

    /// Returns the items that workers create later.
    pub(crate) fn to_be_made(&self) -> BTreeSet<Uuid> {
        self.workers.iter().flat_map(|worker| worker.later.iter().copied()).collect()
    }

    /// Returns unsettled workloads. Those that end a build which may own something are in the
    /// second list.
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
