//! Operations as data. The [generator](super::generator) creates lists from a seed. A list can be
//! replayed with parts left out, and printed as Rust code.
//!
//! Operations name their subjects by small numbers, never by earlier answers. If an operation is
//! left out, the others stay meaningful. At worst the store rejects later ones, and the model
//! decides whether it may.

/// Number of workers.
pub(crate) const WORKERS: u8 = 3;

/// Number of replicas of the store on one database.
pub(crate) const REPLICAS: u8 = 2;

/// Number of different contents.
pub(crate) const CONTENTS: u8 = 20;

/// First content that is a small tree in the store.
pub(crate) const TREES: u8 = 100;

/// As the attempt of [`Operation::Settle`]: all attempts of the workload that have not ended.
pub(crate) const EVERY_ATTEMPT: u8 = u8::MAX;

/// Number of an artifact.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Artifact {
    /// An uploaded artifact.
    Upload(u16),
    /// The artifact of this workload's output.
    Output(u16),
}

/// When a worker creates the items of an attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Make {
    Now,
    /// With a later [`Operation::Make`].
    Later,
    Never,
}

/// Status of a settled workload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Status {
    Succeeded,
    Failed,
    Errored,
    Aborted,
}

/// User of a resource cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum User {
    OfBuild(u16),
    OfWorkload(u16),
}

/// Owner of an output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Owner {
    ForBuild(u16),
    ForTask(u8),
    /// The resource cache that is made under this claim.
    UnderClaim(u16),
}

/// Outputs of a settlement.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Outputs {
    NoOutput,
    /// The candidate with this content.
    With(u8),
    /// The candidate with this content, with owners besides the build.
    Given(u8, Vec<Owner>),
}

impl Outputs {
    /// Returns the candidate and its owners.
    pub(crate) fn candidate(&self) -> Option<(u8, &[Owner])> {
        match self {
            Self::NoOutput => None,
            Self::With(content) => Some((*content, &[])),
            Self::Given(content, owners) => Some((*content, owners)),
        }
    }
}

/// What is left on a worker when a new incarnation begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Remains {
    Everything,
    Half,
    Nothing,
}

/// Delivery of a report.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Delivery {
    Once,
    /// Delivered twice, the second time later.
    Repeatedly,
    /// Cut off before its commit. Delivered again later.
    Cut,
}

/// Attempts of another team to access items.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Trespass {
    Get(Artifact),
    Locate(Artifact),
    /// Find an artifact by its content.
    AdoptBytes(u8),
    Undelete(Artifact),
    Pin(Artifact),
    /// Copy it to this worker.
    Plan(Artifact, u8),
    /// Start a volume with it on this worker.
    Prepare(Artifact, u8),
    Drop(Artifact, u8),
    Seal(Artifact, u8),
    /// Make it a base resource type.
    PutType(Artifact),
    /// Give it to a build of its team.
    AddOwner(Artifact, u16),
    RemoveOwner(Artifact, u16),
    EndBuild(u16),
    DeleteBuild(u16),
    AskCache(u8),
    RenewClaim(u16),
    PutCache(u16, Artifact),
    UseCache(u8),
    DeleteCache(u8),
    AskTask(u8),
    PublishTask(u8, Artifact),
    DeleteTask(u8),
}

/// One operation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Operation {
    /// Times are in seconds.
    PutBuild {
        build: u16,
        ends_with: u16,
        keep: u32,
        term: u32,
        /// Job of the build, and number in the job.
        job: Option<(u8, u16)>,
    },
    /// The caller ends a build with a status.
    EndBuild {
        build: u16,
        status: Status,
    },
    DeleteBuild {
        build: u16,
    },
    Create {
        upload: u16,
        owner: Option<u16>,
    },
    /// Creates a sealed artifact of a tree.
    HandOver {
        upload: u16,
        owner: Option<u16>,
        content: u8,
    },
    /// Creates several artifacts, all or none.
    CreateAll {
        uploads: Vec<u16>,
        owner: Option<u16>,
    },
    /// Adds artifacts to a build, all or none.
    AddOwner {
        artifacts: Vec<Artifact>,
        build: u16,
    },
    /// Removes artifacts from a build, all or none.
    RemoveOwner {
        artifacts: Vec<Artifact>,
        build: u16,
    },
    /// Plans a transfer that fills an open artifact, or copies a sealed one.
    Plan {
        transfer: u16,
        artifact: Artifact,
        worker: u8,
        make: Make,
    },
    Progress {
        transfer: u16,
    },
    Arrive {
        transfer: u16,
        content: u8,
    },
    Abandon {
        transfer: u16,
    },
    Seal {
        upload: u16,
        content: u8,
    },
    Adopt {
        content: u8,
        owner: Option<u16>,
    },
    /// Restores a deleted artifact if possible. Without an owner it is kept for some seconds.
    Undelete {
        artifact: Artifact,
        owner: Option<u16>,
        keep: u32,
    },
    /// Drops the replicas on a worker. Only `force` drops the last replica.
    Drop {
        artifact: Artifact,
        worker: u8,
        force: bool,
    },
    /// Requests a resource cache, with or without a use, and a claim.
    AskCache {
        cache: u8,
        claim: u16,
        user: Option<User>,
    },
    RenewClaim {
        claim: u16,
    },
    /// The holder of the claim puts the cache.
    PutCache {
        claim: u16,
        artifact: Artifact,
    },
    UseCache {
        cache: u8,
        user: User,
    },
    ReleaseCache {
        cache: u8,
        user: User,
    },
    DeleteCache {
        cache: u8,
    },
    AskTask {
        task: u8,
    },
    PublishTask {
        task: u8,
        artifact: Artifact,
    },
    DeleteTask {
        task: u8,
    },
    Accept {
        workload: u16,
        pins: Vec<Artifact>,
        build: Option<u16>,
    },
    /// Makes an artifact a base resource type of a worker, or its certificates.
    PutBase {
        worker: u8,
        resource: Option<u8>,
        artifact: Artifact,
    },
    /// A workload uses task caches.
    UseTasks {
        workload: u16,
        tasks: Vec<u8>,
    },
    /// Prepares an attempt with an input of each pinned artifact, an output that starts as the
    /// first one, and the workload's task caches.
    Prepare {
        workload: u16,
        attempt: u8,
        worker: u8,
        make: Make,
    },
    Prepared {
        workload: u16,
        attempt: u8,
    },
    /// Completes the output.
    Finish {
        workload: u16,
        attempt: u8,
        content: u8,
    },
    /// Ends the workload, with an output of this attempt or of [`EVERY_ATTEMPT`].
    Settle {
        workload: u16,
        attempt: u8,
        status: Status,
        outputs: Outputs,
        build: Option<u16>,
    },
    EndAttempt {
        workload: u16,
        attempt: u8,
    },
    /// A user attaches to the container.
    Touch {
        workload: u16,
        attempt: u8,
    },
    /// The gateway fails to create the items.
    Fail {
        workload: u16,
        attempt: u8,
    },
    /// A gateway or operator marks the container.
    MarkContainer {
        workload: u16,
        attempt: u8,
        gateway: bool,
    },
    /// A gateway or operator marks one of the volumes.
    MarkVolume {
        workload: u16,
        attempt: u8,
        which: u8,
        gateway: bool,
    },
    Collect,
    /// A gateway takes a token, and lists the contents of its worker.
    BeginReport {
        worker: u8,
    },
    /// Delivers one of the begun reports of the worker.
    Report {
        worker: u8,
        which: u8,
        way: Delivery,
    },
    /// A gateway receives handed-out items, and may delete them.
    Sweep {
        worker: u8,
        destroy: bool,
    },
    /// A worker creates its delayed items.
    Make {
        worker: u8,
    },
    /// The stream of a gateway breaks.
    Reconnect {
        worker: u8,
    },
    /// Another gateway speaks for the worker.
    NewSession {
        worker: u8,
    },
    /// The machine restarts: its containers are gone, and perhaps its volumes.
    NewIncarnation {
        worker: u8,
        left: Remains,
    },
    /// Forgets a worker. With `force` even if it has a last replica.
    ForgetWorker {
        worker: u8,
        force: bool,
    },
    /// A worker has an unknown replica that was made after a backup.
    Stray {
        worker: u8,
        upload: u16,
        content: u8,
    },
    /// A worker proves that the store was restored from a backup. Its rows stay as they are.
    /// Unknown items come with [`Operation::Stray`].
    NewLife {
        worker: u8,
    },
    /// A gateway describes the orphaned volumes.
    Describe {
        worker: u8,
    },
    /// Adopts an orphaned volume. Without an owner its artifact is kept for some seconds.
    AdoptOrphan {
        which: u8,
        owner: Option<u16>,
        keep: u32,
    },
    /// Purges an orphan.
    PurgeOrphan {
        which: u8,
    },
    /// Another team tries to access an item.
    Trespass(Trespass),
    /// The gateway of the former session makes calls.
    Former {
        worker: u8,
    },
    Advance {
        seconds: u32,
    },
    /// Kills and restarts a replica of the store.
    Kill {
        replica: u8,
    },
    /// At most four concurrent operations.
    Together(Vec<Operation>),
}

impl Operation {
    /// Returns whether the operation may be repeated at any time, like a call without an answer.
    pub(crate) fn may_be_repeated(&self) -> bool {
        matches!(
            self,
            Self::PutBuild { .. }
                | Self::EndBuild { .. }
                | Self::DeleteBuild { .. }
                | Self::Create { .. }
                | Self::HandOver { .. }
                | Self::CreateAll { .. }
                | Self::AddOwner { .. }
                | Self::RemoveOwner { .. }
                | Self::Plan { .. }
                | Self::Progress { .. }
                | Self::Arrive { .. }
                | Self::Abandon { .. }
                | Self::Seal { .. }
                | Self::Adopt { .. }
                | Self::Undelete { .. }
                | Self::Drop { .. }
                | Self::AskCache { .. }
                | Self::RenewClaim { .. }
                | Self::PutCache { .. }
                | Self::UseCache { .. }
                | Self::ReleaseCache { .. }
                | Self::DeleteCache { .. }
                | Self::AskTask { .. }
                | Self::PublishTask { .. }
                | Self::DeleteTask { .. }
                | Self::Accept { .. }
                | Self::UseTasks { .. }
                | Self::PutBase { .. }
                | Self::Prepare { .. }
                | Self::Prepared { .. }
                | Self::Finish { .. }
                | Self::Settle { .. }
                | Self::EndAttempt { .. }
                | Self::Touch { .. }
                | Self::Fail { .. }
                | Self::MarkContainer { .. }
                | Self::MarkVolume { .. }
                | Self::ForgetWorker { .. }
                | Self::Trespass(_)
        )
    }

    /// Returns whether the operation may run beside others. Changes of a worker's disk run alone,
    /// and so do operations whose order later answers would not reveal: ends of uses, and losses of
    /// replicas. The permissions of another team depend on the state before its attempt.
    pub(crate) fn may_be_joined(&self) -> bool {
        let in_turn = matches!(self, Self::ReleaseCache { .. } | Self::Drop { .. } | Self::Trespass(_));
        (self.may_be_repeated() && !in_turn)
            || matches!(self, Self::Collect | Self::Report { .. } | Self::BeginReport { .. })
            || matches!(self, Self::Describe { .. } | Self::AdoptOrphan { .. } | Self::PurgeOrphan { .. })
    }
}

/// Prints operations as Rust code, for `cases.rs`.
pub(crate) fn code(name: &str, operations: &[Operation]) -> String {
    let mut code = format!("async fn {name}(database: TestDatabase) {{\n    let operations = vec![\n");
    for operation in operations {
        // The only brackets are those of lists.
        let operation = format!("{operation:?}").replace('[', "vec![");
        code.push_str(&format!("        {operation},\n"));
    }
    code.push_str("    ];\n    replay(database, &operations).await;\n}\n");
    code
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_are_printed_as_code() {
        let operations = [
            Operation::Accept { workload: 1, pins: vec![Artifact::Upload(2)], build: None },
            Operation::Together(vec![Operation::Collect]),
        ];
        let expected = "async fn name(database: TestDatabase) {\n    let operations = vec![\n        \
                        Accept { workload: 1, pins: vec![Upload(2)], build: None },\n        \
                        Together(vec![Collect]),\n    ];\n    replay(database, &operations).await;\n}\n";
        assert_eq!(code("name", &operations), expected);
    }
}
