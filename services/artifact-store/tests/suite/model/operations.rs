//! What may happen, as data: a list of operations is generated from a seed ([`super::generator`]), replayed with some left out, and printed as
//! Rust code.
//!
//! Operations name what they are about by small numbers, never by what an earlier one was answered. So one that is left out makes no
//! other meaningless: at worst those after it are refused, and the model says whether they may be.

/// How many workers there are.
pub(crate) const WORKERS: u8 = 3;

/// How many replicas of the store serve one database.
pub(crate) const REPLICAS: u8 = 2;

/// How many different contents there are.
pub(crate) const CONTENTS: u8 = 20;

/// From this one on, contents are trees that the store keeps itself.
pub(crate) const TREES: u8 = 100;

/// An artifact.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Artifact {
    /// One that is uploaded.
    Upload(u16),
    /// What the output of this workload becomes.
    Output(u16),
}

/// When a worker makes what it was told to make.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Make {
    Now,
    /// With a later [`Operation::Make`].
    Later,
    Never,
}

/// How a workload ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Status {
    Succeeded,
    Failed,
    Errored,
    Aborted,
}

/// Who uses a resource cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum User {
    OfBuild(u16),
    OfWorkload(u16),
}

/// What comes to own an output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Owner {
    ForBuild(u16),
    ForTask(u8),
    /// The resource cache that is made under this claim.
    UnderClaim(u16),
}

/// What a settlement names as outputs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Outputs {
    NoOutput,
    /// The candidate with this content.
    With(u8),
    /// The same, and what is to own it besides the build.
    Given(u8, Vec<Owner>),
}

impl Outputs {
    /// The candidate that is named, and what is to own it.
    pub(crate) fn candidate(&self) -> Option<(u8, &[Owner])> {
        match self {
            Self::NoOutput => None,
            Self::With(content) => Some((*content, &[])),
            Self::Given(content, owners) => Some((*content, owners)),
        }
    }
}

/// What is still on a worker when a new incarnation begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Left {
    Everything,
    Half,
    Nothing,
}

/// How a report that was begun comes to the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    Once,
    /// It comes once more, some time.
    Repeatedly,
    /// Cut off before its commit. It comes once more, some time.
    Cut,
}

/// What another team tries with what is not its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Trespass {
    Get(Artifact),
    Locate(Artifact),
    /// To find an artifact by its content.
    AdoptBytes(u8),
    Undelete(Artifact),
    Pin(Artifact),
    /// To have it copied to this worker.
    Plan(Artifact, u8),
    /// To make something from it on this worker.
    Prepare(Artifact, u8),
    Drop(Artifact, u8),
    Seal(Artifact, u8),
    /// To have it as a base resource type.
    PutType(Artifact),
    /// To give it to a build of the team that it is of.
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

/// One thing that happens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Operation {
    /// Times are in seconds.
    PutBuild {
        build: u16,
        ends_with: u16,
        keep: u32,
        term: u32,
        /// The job that it is a build of, and its number there.
        job: Option<(u8, u16)>,
    },
    /// Its caller says how a build ended.
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
    /// A tree that is an artifact at once.
    HandOver {
        upload: u16,
        owner: Option<u16>,
        content: u8,
    },
    /// Several at once, all or none.
    CreateAll {
        uploads: Vec<u16>,
        owner: Option<u16>,
    },
    /// A build owns these besides whatever owns them, all or none.
    AddOwner {
        artifacts: Vec<Artifact>,
        build: u16,
    },
    /// They are taken from a build, all or none.
    RemoveOwner {
        artifacts: Vec<Artifact>,
        build: u16,
    },
    /// A transfer fills an open artifact, or copies a sealed one.
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
    /// A deleted artifact comes back if it can. Without an owner it is kept for some seconds.
    Undelete {
        artifact: Artifact,
        owner: Option<u16>,
        keep: u32,
    },
    /// The replicas on a worker are dropped, those that are the last only by force.
    Drop {
        artifact: Artifact,
        worker: u8,
        force: bool,
    },
    /// Somebody wants a resource cache, for a use or not, and would make it under this claim.
    AskCache {
        cache: u8,
        claim: u16,
        user: Option<User>,
    },
    RenewClaim {
        claim: u16,
    },
    /// Whoever has the claim has made the cache.
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
    /// An artifact is a base resource type of a worker from now on, or its certs.
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
    /// With an input of everything that the workload pinned, an output that starts as the first of them, and the task caches that it uses.
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
    /// The output has its final bytes.
    Finish {
        workload: u16,
        attempt: u8,
        content: u8,
    },
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
    /// Somebody is attached to its container.
    Touch {
        workload: u16,
        attempt: u8,
    },
    /// Its gateway could not make it.
    Fail {
        workload: u16,
        attempt: u8,
    },
    /// Its container shall go, says its gateway, or an operator.
    MarkContainer {
        workload: u16,
        attempt: u8,
        gateway: bool,
    },
    /// The same of one of its volumes.
    MarkVolume {
        workload: u16,
        attempt: u8,
        which: u8,
        gateway: bool,
    },
    Collect,
    /// A gateway takes a token, and lists what its worker holds.
    BeginReport {
        worker: u8,
    },
    /// One of the reports of the worker that were begun comes to the store.
    Report {
        worker: u8,
        which: u8,
        way: Way,
    },
    /// A gateway takes what was handed out, and perhaps destroys it.
    Sweep {
        worker: u8,
        destroy: bool,
    },
    /// A worker makes what it was told to make later.
    Make {
        worker: u8,
    },
    /// The stream of a gateway breaks off.
    Reconnect {
        worker: u8,
    },
    /// Another gateway speaks for what a worker holds.
    NewSession {
        worker: u8,
    },
    /// A machine starts again: its containers are gone, and perhaps its volumes.
    NewIncarnation {
        worker: u8,
        left: Left,
    },
    /// Somebody says that a worker is gone for good: by force even if it has the last replica of something.
    ForgetWorker {
        worker: u8,
        force: bool,
    },
    /// A worker holds a volume that the store never heard of: a replica that was made after a backup.
    Stray {
        worker: u8,
        upload: u16,
        content: u8,
    },
    /// A worker shows that the store came out of a backup. Its rows stay as they are: what it does not know comes with [`Operation::Stray`].
    NewLife {
        worker: u8,
    },
    /// A gateway says what the volumes are that are set aside.
    Describe {
        worker: u8,
    },
    /// One of the volumes that are set aside becomes what it was. Without an owner it is kept for some seconds.
    AdoptAside {
        which: u8,
        owner: Option<u16>,
        keep: u32,
    },
    /// One of the things that are set aside becomes garbage.
    PurgeAside {
        which: u8,
    },
    /// Another team tries something.
    Trespass(Trespass),
    /// The gateway that was replaced wakes up.
    Former {
        worker: u8,
    },
    Advance {
        seconds: u32,
    },
    /// A replica of the store is killed, and started again.
    Kill {
        replica: u8,
    },
    /// At most four, at the same time.
    Together(Vec<Operation>),
}

impl Operation {
    /// Whether it may come once more at any time, as callers do who were not answered.
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

    /// Whether it may happen beside others: what changes a worker's disk by itself is done in turn, and so is that of which nothing would tell
    /// what it came before: the end of a use, and the loss of replicas. What another team may depends on what was there before it tried.
    pub(crate) fn may_be_joined(&self) -> bool {
        let in_turn = matches!(self, Self::ReleaseCache { .. } | Self::Drop { .. } | Self::Trespass(_));
        (self.may_be_repeated() && !in_turn)
            || matches!(self, Self::Collect | Self::Report { .. } | Self::BeginReport { .. })
            || matches!(self, Self::Describe { .. } | Self::AdoptAside { .. } | Self::PurgeAside { .. })
    }
}

/// Operations as Rust code, for `cases.rs`.
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
