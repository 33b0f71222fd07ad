//! The model: who keeps what, and what is on the workers' disks. Pure; no call of the store is made here.
//!
//! What happened is told with [`State::accept`], together with what the store answered. The model never says what the store must do next,
//! for collections run at any time beside everything else; it says what must hold whenever they run. So each answer is judged by what
//! is *certain*: a refusal is wrong when what was asked for was certainly there and kept, and a success is wrong when it was certainly not. The
//! rest, such as an artifact that nobody keeps and nobody has collected yet, may be answered either way.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use domain::{ArtifactId, AttemptId, BuildId, TransferId, WorkerId, WorkloadId};
use rpc::pb::artifacts as pb;
use rpc::{Reason, Refusal};
use uuid::Uuid;

use super::operations::{Artifact, Left, Make, Operation, Outputs, Way};

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
    Adopted(Option<ArtifactId>),
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

#[derive(Debug, Clone)]
struct Build {
    ends_with: u16,
    keep: i64,
    term_ends_at: i64,
    bound: bool,
    /// When its workload was settled.
    settled_at: Option<i64>,
    deleted: bool,
}

#[derive(Debug, Clone, Default)]
struct Holder {
    settled: bool,
    pins: BTreeSet<Artifact>,
    /// Those that ended, and those that go on with their worker.
    attempts: BTreeMap<u8, Option<u8>>,
}

#[derive(Debug, Clone)]
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

#[derive(Debug, Clone)]
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
    revoked: bool,
    pub(crate) on_disk: bool,
    /// It was made so late that the store may have forgotten it before.
    pub(crate) late: bool,
}

#[derive(Debug, Clone)]
pub(crate) struct Container {
    worker: u8,
    attempt: (u16, u8),
    created: bool,
    revoked: bool,
    pub(crate) on_disk: bool,
    pub(crate) late: bool,
}

#[derive(Debug, Clone, Default)]
struct Worker {
    /// No report was judged since the incarnation began.
    unconfirmed: bool,
    /// What its gateway was told to make, and has not made yet.
    later: BTreeSet<Uuid>,
    /// What it was told to destroy, and has not destroyed yet.
    doomed: Vec<Uuid>,
}

/// Everything that is known.
#[derive(Debug, Clone)]
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

/// The handle in an answer.
fn handle(text: &str) -> Result<Uuid, Violation> {
    Uuid::try_parse(text).map_err(|_| Violation(format!("{text:?} is no handle")))
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

    // What happened.

    /// Takes what the store answered to an operation, unless it must not have.
    pub(crate) fn accept(&mut self, operation: &Operation, outcome: &Outcome) -> Accepted {
        if matches!(outcome, Outcome::Skipped) {
            return Ok(());
        }
        self.judge(operation, outcome)
            .map_err(|Violation(why)| Violation(format!("{operation:?}: {why}; answered {outcome:?}")))
    }

    fn judge(&mut self, operation: &Operation, outcome: &Outcome) -> Accepted {
        use Operation as O;
        match *operation {
            O::PutBuild { build, ends_with, keep, term } => {
                self.put_build(build, ends_with, keep.into(), term.into(), outcome)
            }
            O::DeleteBuild { build } => self.delete_build(build, outcome),
            O::Create { upload, owner } => self.create(Artifact::Upload(upload), owner, outcome),
            O::Plan { transfer, artifact, worker, make } => {
                self.plan(transfer, artifact, worker, make, outcome)
            }
            O::Progress { transfer } => self.progress(transfer, outcome),
            O::Arrive { transfer, content } => self.arrive(transfer, content, outcome),
            O::Abandon { transfer } => self.abandon(transfer, outcome),
            O::Seal { upload, content } => self.seal(Artifact::Upload(upload), content, outcome),
            O::Adopt { content, owner } => self.adopt(content, owner, outcome),
            O::Accept { workload, ref pins, build } => self.pin(workload, pins, build, outcome),
            O::Prepare { workload, attempt, worker, make } => {
                self.prepare(workload, attempt, worker, make, outcome)
            }
            O::Prepared { workload, attempt } => self.prepared((workload, attempt), outcome),
            O::Finish { workload, attempt, content } => self.finish((workload, attempt), content, outcome),
            O::Settle { workload, attempt, outputs, build, .. } => {
                self.settle(workload, attempt, outputs, build, outcome)
            }
            O::EndAttempt { workload, attempt } => {
                must!(matches!(outcome, Outcome::Done), "an attempt can always be ended");
                self.holders.entry(workload).or_default().attempts.insert(attempt, None);
                Ok(())
            }
            O::Report { worker, way, .. } => self.report(worker, way, outcome),
            O::Sweep { worker, destroy } => self.sweep(worker, destroy, outcome),
            O::Make { worker } => {
                for id in std::mem::take(&mut self.workers[usize::from(worker)].later) {
                    self.appears(id, true);
                }
                Ok(())
            }
            O::Reconnect { worker } => {
                self.workers[usize::from(worker)].doomed.clear();
                Ok(())
            }
            O::NewSession { worker } => {
                self.new_session(worker);
                Ok(())
            }
            O::NewIncarnation { worker, left } => {
                self.new_incarnation(worker, left);
                Ok(())
            }
            O::Former { .. } => {
                let Outcome::Former(answers) = outcome else { return Ok(()) };
                let stale = |refusal: &Refusal| {
                    refusal.is(Reason::StaleSession) || refusal.is(Reason::StaleIncarnation)
                };
                must!(answers.iter().all(|answer| answer.as_ref().is_some_and(stale)), "it was replaced");
                Ok(())
            }
            O::Advance { seconds } => {
                self.now += i64::from(seconds);
                Ok(())
            }
            O::Collect | O::Kill { .. } | O::BeginReport { .. } => {
                must!(matches!(outcome, Outcome::Done), "it was refused");
                Ok(())
            }
            O::Together(_) => {
                Err(Violation("operations at the same time are accepted one by one".to_owned()))
            }
        }
    }

    fn put_build(&mut self, id: u16, ends_with: u16, keep: i64, term: i64, outcome: &Outcome) -> Accepted {
        let settled = self.is_settled(ends_with);
        if let Outcome::Refused(refusal) = outcome {
            let may = refusal.is(Reason::BuildEnded)
                && (settled || (self.builds.contains_key(&id) && !self.is_live(id)));
            must!(may, "nothing has ended it");
            return Ok(());
        }
        must!(!settled, "its workload was settled");
        must!(!self.builds.contains_key(&id) || self.may_be_live(id), "it has ended");
        let term_ends_at = self.now + term;
        let fresh = Build { ends_with, keep, term_ends_at, bound: false, settled_at: None, deleted: false };
        let build = self.builds.entry(id).or_insert(fresh);
        (build.keep, build.term_ends_at) = (keep, term_ends_at);
        Ok(())
    }

    fn delete_build(&mut self, id: u16, outcome: &Outcome) -> Accepted {
        match (self.builds.get_mut(&id), outcome) {
            (None, Outcome::Refused(refusal)) => {
                must!(refusal.is(Reason::BuildNotFound), "another reason");
                Ok(())
            }
            (Some(build), Outcome::Done) => {
                build.deleted = true;
                Ok(())
            }
            (Some(_), _) => Err(Violation("it is known".to_owned())),
            (None, _) => Err(Violation("it was never put".to_owned())),
        }
    }

    fn create(&mut self, artifact: Artifact, owner: Option<u16>, outcome: &Outcome) -> Accepted {
        let record = self.artifacts.get(&artifact);
        if let Outcome::Refused(refusal) = outcome {
            let owner_ended = owner.is_some_and(|build| !self.is_live(build));
            let another = record.is_some_and(|record| match owner {
                Some(build) => !(record.owners.contains(&build) && self.holds_on(build)),
                None => record.had_owner,
            });
            let may_be_deleting = record.is_some() && !self.is_kept(artifact);
            let may = (refusal.is(Reason::OwnerEnded) && owner_ended)
                || (refusal.is(Reason::ArtifactExists) && (another || may_be_deleting));
            must!(may, "it could be made, or was");
            return Ok(());
        }
        if record.is_some_and(|record| !record.gone) {
            // It is still there, or gone since we looked: then it is another now.
            if !self.is_kept(artifact)
                && let Some(record) = self.artifacts.get_mut(&artifact)
            {
                record.doubtful = true;
            }
            return Ok(());
        }
        must!(owner.is_none_or(|build| self.may_be_live(build)), "its owner has ended");
        self.artifacts.insert(artifact, self.open(owner));
        Ok(())
    }

    fn open(&self, owner: Option<u16>) -> Record {
        Record {
            sealed: None,
            owners: owner.into_iter().collect(),
            had_owner: owner.is_some(),
            created_at: self.now,
            abandoned: false,
            gone: false,
            doubtful: false,
        }
    }

    /// What was made once more had gone: it is another now.
    pub(crate) fn reopen(&mut self, artifact: Artifact) {
        if let Some(record) = self.artifacts.get_mut(&artifact) {
            (record.sealed, record.gone) = (None, false);
            // Which of the calls made it is not known, and so nothing keeps it for certain.
            record.owners.clear();
            record.had_owner = true;
        }
    }

    fn plan(
        &mut self,
        transfer: u16,
        artifact: Artifact,
        worker: u8,
        make: Make,
        outcome: &Outcome,
    ) -> Accepted {
        let (handle, planned) = match outcome {
            Outcome::Refused(refusal) => {
                let may = (refusal.is(Reason::ArtifactNotFound) && !self.is_kept(artifact))
                    || (refusal.is(Reason::Unavailable) && self.workers[usize::from(worker)].unconfirmed);
                must!(may, "there is nothing in its way");
                return Ok(());
            }
            Outcome::Planned { handle, outcome } => (*handle, *outcome),
            _ => return Err(Violation("no plan".to_owned())),
        };
        must!(self.artifacts.contains_key(&artifact), "the artifact was never made");
        let known = self.volumes.get(&handle);
        match planned {
            pb::PlanOutcome::Complete => {
                let sealed = self.sealed(artifact);
                let has = known.is_some_and(|volume| volume.complete.is_some() && volume.complete == sealed);
                must!(has, "no volume was completed under this handle");
            }
            pb::PlanOutcome::BeingMade => must!(known.is_some(), "nobody makes it"),
            _ => {
                let fresh = Volume {
                    worker,
                    artifact: Some(artifact),
                    from: None,
                    parent: None,
                    attempt: None,
                    claimed_until: None,
                    complete: None,
                    settled: false,
                    created: false,
                    revoked: false,
                    on_disk: false,
                    late: false,
                };
                let is_new = known.is_none();
                let now = self.now;
                let volume = self.volumes.entry(handle).or_insert(fresh);
                must!(volume.artifact == Some(artifact) && volume.worker == worker, "it is of another");
                must!(!volume.revoked, "it is garbage");
                volume.claimed_until = Some(now + CLAIM_TERM);
                self.transfers.insert(transfer, (artifact, worker, handle));
                self.make(worker, handle, make, is_new);
            }
        }
        Ok(())
    }

    fn progress(&mut self, transfer: u16, outcome: &Outcome) -> Accepted {
        let now = self.now;
        let Some((artifact, _, id)) = self.transfer(transfer) else {
            must!(!matches!(outcome, Outcome::Done), "it was never planned");
            return Ok(());
        };
        let kept = self.is_kept(artifact);
        let Some(volume) = self.volumes.get_mut(&id) else { return Ok(()) };
        let has_claim = volume.claimed_until.is_some_and(|until| now < until);
        match outcome {
            Outcome::Done => {
                must!(!volume.revoked, "it is garbage");
                volume.claimed_until = Some(now + CLAIM_TERM);
            }
            _ => must!(!(kept && has_claim && !volume.revoked), "its claim goes on"),
        }
        Ok(())
    }

    fn arrive(&mut self, transfer: u16, content: u8, outcome: &Outcome) -> Accepted {
        let Some((artifact, _, id)) = self.transfer(transfer) else { return Ok(()) };
        let (kept, sealed, now) = (self.is_kept(artifact), self.sealed(artifact), self.now);
        let Some(volume) = self.volumes.get_mut(&id) else {
            must!(!matches!(outcome, Outcome::Done), "it was forgotten");
            return Ok(());
        };
        if matches!(outcome, Outcome::Done) {
            must!(!volume.revoked, "it is garbage");
            must!(volume.complete.is_none_or(|complete| complete == content), "it has other bytes");
            must!(sealed.is_none_or(|sealed| sealed == content), "its artifact was sealed with other bytes");
            (volume.complete, volume.created, volume.late) = (Some(content), true, false);
            return Ok(());
        }
        let claimed = volume.claimed_until.is_some_and(|until| now < until);
        let certain = kept && !volume.revoked && (claimed || volume.complete == Some(content));
        let fits = sealed.is_none_or(|sealed| sealed == content)
            && volume.complete.is_none_or(|complete| complete == content);
        must!(!(certain && fits && !volume.late), "it is wanted");
        Ok(())
    }

    fn abandon(&mut self, transfer: u16, outcome: &Outcome) -> Accepted {
        must!(matches!(outcome, Outcome::Done), "a transfer can always be abandoned");
        let Some((artifact, _, id)) = self.transfer(transfer) else { return Ok(()) };
        let is_open = self.sealed(artifact).is_none();
        if let Some(volume) = self.volumes.get_mut(&id)
            && (is_open || volume.complete.is_none())
        {
            volume.revoked = true;
        }
        if let Some(record) = self.artifacts.get_mut(&artifact).filter(|_| is_open) {
            record.abandoned = true;
        }
        Ok(())
    }

    fn seal(&mut self, artifact: Artifact, content: u8, outcome: &Outcome) -> Accepted {
        let sealed = self.sealed(artifact);
        if let Outcome::Refused(refusal) = outcome {
            let may = match sealed {
                _ if refusal.is(Reason::ArtifactNotFound) => !self.is_kept(artifact),
                Some(sealed) => refusal.is(Reason::ArtifactSealed) && sealed != content,
                None => {
                    refusal.is(Reason::CandidateMissing) && self.replicas(artifact, content).next().is_none()
                }
            };
            must!(may, "there is nothing in its way");
            return Ok(());
        }
        must!(sealed.is_none_or(|sealed| sealed == content), "it was sealed with other bytes");
        let arrived = |volume: &Volume| volume.artifact == Some(artifact) && volume.complete == Some(content);
        must!(sealed.is_some() || self.volumes.values().any(arrived), "no such bytes arrived");
        for volume in self.volumes.values_mut() {
            let other = volume.complete.is_some_and(|complete| complete != content);
            if volume.artifact == Some(artifact) && volume.attempt.is_none() && other {
                volume.revoked = true;
            }
        }
        let Some(record) = self.artifacts.get_mut(&artifact) else {
            return Err(Violation("it was never made".to_owned()));
        };
        must!(!record.gone, "it had gone");
        record.sealed = Some(content);
        Ok(())
    }

    fn adopt(&mut self, content: u8, owner: Option<u16>, outcome: &Outcome) -> Accepted {
        match outcome {
            Outcome::Refused(refusal) => {
                let may = refusal.is(Reason::OwnerEnded) && owner.is_some_and(|build| !self.is_live(build));
                must!(may, "its owner goes on");
                Ok(())
            }
            Outcome::Adopted(Some(adopted)) => {
                let found = self.artifacts.iter_mut().find(|(id, _)| artifact_id(**id) == *adopted);
                let Some((_, record)) = found else { return Err(Violation("it was never made".to_owned())) };
                must!(record.sealed == Some(content), "it holds other bytes");
                must!(!record.gone, "it had gone");
                if let Some(build) = owner {
                    record.owners.insert(build);
                    record.had_owner = true;
                    must!(self.may_be_live(build), "its owner has ended");
                }
                Ok(())
            }
            Outcome::Adopted(None) => {
                let kept = self.kept();
                let all = self.artifacts.iter().filter(|(_, record)| record.sealed == Some(content));
                let all: Vec<_> = all.map(|(artifact, _)| *artifact).collect();
                let is_there = |artifact: &&Artifact| {
                    kept.contains_key(artifact)
                        && self
                            .replicas(**artifact, content)
                            .any(|(_, worker)| !self.workers[usize::from(worker)].unconfirmed)
                };
                // The store looks at the newest few.
                let found = all.iter().find(is_there).filter(|_| all.len() <= 10);
                must!(found.is_none(), "{found:?} holds it");
                Ok(())
            }
            _ => Err(Violation("no answer".to_owned())),
        }
    }

    fn pin(&mut self, workload: u16, pins: &[Artifact], build: Option<u16>, outcome: &Outcome) -> Accepted {
        if let Outcome::Refused(refusal) = outcome {
            let kept = self.kept();
            let is_there = |artifact: &Artifact| {
                let content = self.sealed(*artifact).filter(|_| kept.contains_key(artifact));
                content.is_some_and(|content| self.replicas(*artifact, content).next().is_some())
            };
            let may = (refusal.is(Reason::HolderSettled) && self.is_settled(workload))
                || (refusal.is(Reason::OwnerEnded) && build.is_some_and(|build| !self.is_live(build)))
                || (refusal.is(Reason::InputUnavailable) && !pins.iter().all(is_there));
            must!(may, "there is nothing in its way");
            return Ok(());
        }
        must!(!self.is_settled(workload), "it was settled");
        for artifact in pins {
            let record = self.artifacts.get(artifact);
            must!(
                record.is_some_and(|record| record.sealed.is_some() && !record.gone),
                "{artifact:?} is not there"
            );
        }
        if let Some(id) = build {
            must!(self.may_be_live(id), "its build has ended");
            if let Some(build) = self.builds.get_mut(&id).filter(|build| build.ends_with == workload) {
                build.bound = true;
            }
        }
        self.holders.entry(workload).or_default().pins.extend(pins);
        Ok(())
    }

    fn prepare(&mut self, workload: u16, attempt: u8, worker: u8, make: Make, outcome: &Outcome) -> Accepted {
        let on = self.holders.get(&workload).and_then(|holder| holder.attempts.get(&attempt)).copied();
        let (inputs, planned) = match outcome {
            Outcome::Refused(refusal) => {
                let ended = self.is_settled(workload) || on.is_some_and(|on| on != Some(worker));
                let pins = self.pins_of(workload);
                let kept = self.kept();
                let unkept = pins.iter().any(|artifact| !kept.contains_key(artifact));
                let may = (refusal.is(Reason::AttemptEnded) && ended)
                    || (refusal.is(Reason::InputUnavailable) && (unkept || ended))
                    || (refusal.is(Reason::Unavailable) && self.workers[usize::from(worker)].unconfirmed);
                must!(may, "there is nothing in its way");
                return Ok(());
            }
            Outcome::Prepared { inputs, planned } => (inputs, planned),
            _ => return Err(Violation("no plan".to_owned())),
        };
        must!(!self.is_settled(workload), "its workload was settled");
        must!(on.is_none_or(|on| on == Some(worker)), "it has ended, or is another worker's");
        self.holders.entry(workload).or_default().attempts.insert(attempt, Some(worker));

        let mut to_make = Vec::new();
        let unconfirmed = self.workers[usize::from(worker)].unconfirmed;
        // The output is the last, and starts as the first input.
        let sources = inputs.iter().copied().map(Some).chain([inputs.first().copied()]);
        must!(planned.volumes.len() == inputs.len() + 1, "volumes are missing");
        for (index, (volume, from)) in planned.volumes.iter().zip(sources).enumerate() {
            let id = handle(&volume.volume_handle)?;
            let parent = (!volume.parent_handle.is_empty()).then(|| handle(&volume.parent_handle));
            let parent = parent.transpose()?;
            if !volume.missing_artifact_id.is_empty()
                && let Some(from) = from
                && let Some(content) = self.sealed(from)
            {
                let here = self.replicas(from, content).find(|(_, on)| *on == worker);
                must!(here.is_none() || unconfirmed, "{from:?} is not missing: {here:?}");
            }
            if let Some(parent) = parent.filter(|_| !self.volumes.contains_key(&id)) {
                let fits = self.volumes.get(&parent).is_some_and(|parent| {
                    parent.worker == worker && parent.artifact == from && parent.complete.is_some()
                });
                must!(fits, "{parent} is no replica of {from:?} on this worker");
            }
            let artifact = (index == inputs.len()).then_some(Artifact::Output(workload));
            let fresh = Volume {
                worker,
                artifact,
                from,
                parent,
                attempt: Some((workload, attempt)),
                claimed_until: None,
                complete: None,
                settled: false,
                created: false,
                revoked: false,
                on_disk: false,
                late: false,
            };
            to_make.push((id, !self.volumes.contains_key(&id)));
            let known = self.volumes.entry(id).or_insert(fresh);
            must!(!known.revoked, "{id} is garbage");
            must!(known.attempt == Some((workload, attempt)), "{id} is of another");
            if !known.created {
                known.parent = parent;
            }
        }
        let container = handle(&planned.container_handle)?;
        let fresh = Container {
            worker,
            attempt: (workload, attempt),
            created: false,
            revoked: false,
            on_disk: false,
            late: false,
        };
        to_make.push((container, !self.containers.contains_key(&container)));
        let known = self.containers.entry(container).or_insert(fresh);
        must!(!known.revoked && known.attempt == (workload, attempt), "{container} is garbage, or another's");
        // What is missing is brought first, and then it is asked again.
        if planned.volumes.iter().all(|volume| volume.missing_artifact_id.is_empty()) {
            for (id, is_new) in to_make {
                self.make(worker, id, make, is_new);
            }
        }
        Ok(())
    }

    /// A gateway is told to make something.
    fn make(&mut self, worker: u8, id: Uuid, make: Make, is_new: bool) {
        match make {
            Make::Now => self.appears(id, !is_new),
            Make::Later if !self.is_on_disk(id) => {
                self.workers[usize::from(worker)].later.insert(id);
            }
            Make::Later | Make::Never => {}
        }
    }

    /// Something is on the disk from now on.
    fn appears(&mut self, id: Uuid, late: bool) {
        if let Some(volume) = self.volumes.get_mut(&id).filter(|volume| !volume.on_disk) {
            (volume.on_disk, volume.late) = (true, late);
        }
        if let Some(container) = self.containers.get_mut(&id).filter(|container| !container.on_disk) {
            (container.on_disk, container.late) = (true, late);
        }
    }

    fn prepared(&mut self, attempt: (u16, u8), outcome: &Outcome) -> Accepted {
        let revoked = !self.containers.values().any(|it| it.attempt == attempt && !it.revoked);
        if let Outcome::Refused(refusal) = outcome {
            let may = refusal.is(Reason::AttemptEnded) && (!self.goes_on(attempt) || revoked);
            must!(may, "it goes on");
            return Ok(());
        }
        must!(self.goes_on(attempt) && !revoked, "it has ended");
        for volume in self.volumes.values_mut().filter(|it| it.attempt == Some(attempt) && !it.revoked) {
            (volume.created, volume.late) = (true, false);
        }
        for container in self.containers.values_mut().filter(|it| it.attempt == attempt && !it.revoked) {
            (container.created, container.late) = (true, false);
        }
        Ok(())
    }

    /// The output of an attempt, as long as it is no garbage.
    fn output(&self, attempt: (u16, u8)) -> Option<Uuid> {
        let is_output =
            |volume: &Volume| volume.attempt == Some(attempt) && volume.artifact.is_some() && !volume.revoked;
        self.volumes.iter().find(|(_, volume)| is_output(volume)).map(|(id, _)| *id)
    }

    fn finish(&mut self, attempt: (u16, u8), content: u8, outcome: &Outcome) -> Accepted {
        let goes_on = self.goes_on(attempt);
        let output = self.output(attempt);
        let Some(volume) = output.and_then(|output| self.volumes.get_mut(&output)) else {
            must!(!matches!(outcome, Outcome::Done), "it has no output");
            return Ok(());
        };
        let other = volume.complete.is_some_and(|complete| complete != content);
        if let Outcome::Refused(refusal) = outcome {
            let may = (refusal.is(Reason::InvalidField) && other) || !goes_on || volume.late;
            must!(may, "it is wanted");
            return Ok(());
        }
        must!(!other, "it has other bytes");
        must!(goes_on || volume.settled || volume.complete.is_some(), "it has ended");
        (volume.complete, volume.created, volume.late) = (Some(content), true, false);
        Ok(())
    }

    fn settle(
        &mut self,
        workload: u16,
        attempt: u8,
        outputs: Outputs,
        build: Option<u16>,
        outcome: &Outcome,
    ) -> Accepted {
        if self.is_settled(workload) {
            must!(matches!(outcome, Outcome::Done), "a repeat is answered as the first call was");
            return Ok(());
        }
        let candidate = match outputs {
            Outputs::NoOutput => None,
            Outputs::With(content) => {
                let output = self.output((workload, attempt)).filter(|_| self.goes_on((workload, attempt)));
                let output = output.filter(|output| self.volumes[output].complete == Some(content));
                if let Outcome::Refused(refusal) = outcome {
                    let lost = output.is_none_or(|output| !self.volumes[&output].on_disk);
                    must!(refusal.is(Reason::CandidateMissing) && lost, "its candidate is there");
                    return Ok(());
                }
                must!(output.is_some(), "it has no such candidate");
                output.map(|output| (output, content))
            }
        };
        must!(matches!(outcome, Outcome::Done), "there is nothing in its way");
        if let Some((output, content)) = candidate {
            let owner = build.filter(|build| self.is_live(*build));
            let mut record = self.open(owner);
            // Whether one that may have ended owns it is not known, and so it is not known to be young.
            record.had_owner |= build.is_some_and(|build| self.may_be_live(build));
            record.sealed = Some(content);
            self.artifacts.insert(Artifact::Output(workload), record);
            if let Some(volume) = self.volumes.get_mut(&output) {
                volume.settled = true;
            }
        }
        let now = self.now;
        let holder = self.holders.entry(workload).or_default();
        holder.settled = true;
        holder.pins.clear();
        holder.attempts.values_mut().for_each(|on| *on = None);
        let ending = self.builds.values_mut().filter(|build| build.ends_with == workload);
        for build in ending.filter(|build| build.settled_at.is_none()) {
            build.settled_at = Some(now);
        }
        Ok(())
    }

    fn report(&mut self, worker: u8, way: Way, outcome: &Outcome) -> Accepted {
        let response = match outcome {
            Outcome::NotReported { refusal, standing } => {
                let may = match standing {
                    _ if refusal.is(Reason::ReportTruncated) => way == Way::Cut,
                    Standing::Good => false,
                    Standing::OfFormerSession => {
                        refusal.is(Reason::StaleSession) || refusal.is(Reason::StaleIncarnation)
                    }
                    Standing::Overtaken => refusal.is(Reason::StaleReport),
                };
                must!(may, "it is good");
                return Ok(());
            }
            Outcome::Reported { response, standing } => {
                must!(*standing == Standing::Good, "it is too late");
                must!(way != Way::Cut, "it was cut off");
                response
            }
            _ => return Err(Violation("no answer".to_owned())),
        };
        self.workers[usize::from(worker)].unconfirmed = false;
        for text in response.unknown_volume_handles.iter().chain(&response.unknown_container_handles) {
            let id = handle(text)?;
            if let Some(volume) = self.volumes.get_mut(&id).filter(|volume| volume.on_disk) {
                must!(volume.late, "{id} was forgotten although it was there");
                volume.on_disk = false;
            }
            if let Some(container) = self.containers.get_mut(&id).filter(|container| container.on_disk) {
                must!(container.late, "{id} was forgotten although it was there");
                container.on_disk = false;
            }
        }
        Ok(())
    }

    fn sweep(&mut self, worker: u8, destroy: bool, outcome: &Outcome) -> Accepted {
        let Outcome::Swept(handles) = outcome else {
            return Err(Violation("what is marked was not handed out".to_owned()));
        };
        let kept = self.kept();
        for id in handles {
            let need = self.need_of_volume(*id, &kept).or_else(|| self.need_of_container(*id));
            must!(need.is_none(), "{id} is handed out, and needed: {need:?}");
        }
        self.workers[usize::from(worker)].doomed.extend(handles);
        if !destroy {
            return Ok(());
        }
        for id in std::mem::take(&mut self.workers[usize::from(worker)].doomed) {
            let child = self.volumes.iter().find(|(_, it)| it.parent == Some(id) && it.on_disk && !it.late);
            must!(child.is_none(), "{id} is handed out before its child {child:?}");
            if let Some(volume) = self.volumes.get_mut(&id) {
                volume.on_disk = false;
            }
            if let Some(container) = self.containers.get_mut(&id) {
                container.on_disk = false;
            }
        }
        Ok(())
    }

    fn new_session(&mut self, worker: u8) {
        self.workers[usize::from(worker)].doomed.clear();
        for volume in self.volumes.values_mut().filter(|it| it.worker == worker && it.attempt.is_some()) {
            volume.revoked |= !volume.created;
        }
        for container in self.containers.values_mut().filter(|it| it.worker == worker) {
            container.revoked |= !container.created;
        }
    }

    fn new_incarnation(&mut self, worker: u8, left: Left) {
        let of_worker = &mut self.workers[usize::from(worker)];
        of_worker.doomed.clear();
        of_worker.later.clear();
        of_worker.unconfirmed = true;
        let mut count = 0;
        for volume in self.volumes.values_mut().filter(|it| it.worker == worker) {
            volume.revoked |= !volume.created;
            count += u32::from(volume.on_disk);
            volume.on_disk &= match left {
                Left::Everything => true,
                Left::Half => count.is_multiple_of(2),
                Left::Nothing => false,
            };
        }
        for container in self.containers.values_mut().filter(|it| it.worker == worker) {
            (container.revoked, container.on_disk) = (true, false);
        }
    }
}
