//! Garbage rules: which artifacts, volumes and containers are garbage, and why.
//!
//! All rules are pure functions from facts to a verdict. No other code of the store decides what is
//! garbage.
//!
//! An artifact is garbage when no workload pins it, no transfer or attempt reads or fills it, and
//! every owner has let go ([`crate::policy::retention`]). An artifact that never had an owner is
//! garbage after a fixed time. An open artifact whose upload was given up is garbage at once,
//! because nothing can seal it any more. A volume is garbage with its artifact or its attempt,
//! children before parents. A container is garbage after a grace period, which begins at the end of
//! its attempt or at its last interactive use. If its worker needs disk space, it is garbage at the
//! end of its attempt, unless it is in use.
//!
//! [`crate::gc`] gathers the facts while it holds the locks of the judged rows. A verdict to keep
//! says when to check again.

use std::fmt;
use std::time::Duration;

use domain::{BuildId, CacheId, Timestamp, TransferId, VolumeHandle, WorkerId, WorkloadId};
use uuid::Uuid;

/// Settings of the garbage rules.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Policy {
    /// Time after creation after which an artifact that never had an owner is garbage.
    pub(crate) unowned_ttl: Duration,
    /// Time after the end of an attempt for which its containers and volumes are kept.
    pub(crate) gc_grace: Duration,
    /// Whether the worker of the judged containers and volumes needs disk space. Only those that
    /// are used interactively are then kept after the end of their attempt.
    pub(crate) needs_space: bool,
}

/// Time for which a container counts as used after its last interactive use was reported. Gateways
/// report a use once per minute.
const USE_TERM: Duration = Duration::from_secs(180);

impl Policy {
    /// Returns the reason of the marks of containers and volumes of ended attempts.
    fn end_reason(&self) -> MarkReason {
        if self.needs_space { MarkReason::DiskSpace } else { MarkReason::AttemptEnded }
    }
}

/// Facts about an unmarked artifact.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ArtifactFacts {
    pub(crate) created_at: Timestamp,
    /// Whether it ever had an owner.
    pub(crate) had_owner: bool,
    /// Until when it needs no owner.
    pub(crate) kept_until: Option<Timestamp>,
    /// Whether it is open, the claim of a transfer that filled it has expired, and no other volume
    /// has its bytes or may get them.
    pub(crate) given_up: bool,
    pub(crate) held: HoldFlags,
}

/// Kinds of references that hold an artifact.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct HoldFlags {
    /// An owner has not let go.
    pub(crate) owned: bool,
    /// A workload pins it.
    pub(crate) pinned: bool,
    /// A live volume of an attempt starts with its bytes.
    pub(crate) used: bool,
    /// An unfinished transfer fills or copies it.
    pub(crate) transferred: bool,
}

/// Facts about an unmarked container.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ContainerFacts {
    /// When its attempt ended. `None` if it has not ended.
    pub(crate) attempt_ended_at: Option<Timestamp>,
    /// When it was last used interactively.
    pub(crate) touched_at: Option<Timestamp>,
}

/// Facts about an unmarked volume.
#[derive(Debug, Clone, Copy)]
pub(crate) struct VolumeFacts {
    /// Whether a copy-on-write child of it is not garbage.
    pub(crate) has_live_child: bool,
    pub(crate) lifetime: VolumeLifetime,
}

/// The artifact or attempt with which a volume is deleted.
#[derive(Debug, Clone, Copy)]
pub(crate) enum VolumeLifetime {
    /// For a replica, complete or not.
    OfArtifact {
        /// Whether the artifact is marked or gone.
        artifact_marked: bool,
        /// When the claim of its transfer expires. `None` if it is complete.
        claimed_until: Option<Timestamp>,
    },
    /// For an input, a scratch volume, or an output that is not settled.
    OfAttempt {
        /// When the attempt ended. `None` if it has not ended.
        ended_at: Option<Timestamp>,
        /// Whether the attempt's container is not garbage yet.
        has_live_container: bool,
    },
}

/// Decision of a garbage rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Keep it, and check again at the given time.
    Keep(NextCheck),
    /// Mark it as garbage.
    Mark(MarkReason),
}

/// Time of the next check of something that is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NextCheck {
    /// After an event: the transaction that ends the reason to keep it schedules the check.
    OnEvent,
    /// At this time.
    At(Timestamp),
    /// After a fixed interval, because the reason to keep it may end without a notification.
    Later,
}

/// Reason of a mark, for people.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum MarkReason {
    NeverOwned,
    OwnersLetGo,
    TransferAbandoned,
    ClaimExpired,
    OtherBytesSealed,
    ArtifactDeleted,
    AttemptEnded,
    DiskSpace,
    ImportReplaced,
}

impl fmt::Display for MarkReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NeverOwned => "it never had an owner, and it is old",
            Self::OwnersLetGo => "every owner of it has let go",
            Self::TransferAbandoned => "its transfer was abandoned",
            Self::ClaimExpired => "the claim of its transfer expired",
            Self::OtherBytesSealed => "its artifact was sealed with other bytes",
            Self::ArtifactDeleted => "its artifact is deleted",
            Self::AttemptEnded => "its attempt has ended",
            Self::DiskSpace => "its attempt has ended, and its worker needed disk space",
            Self::ImportReplaced => "its worker now provides another version",
        })
    }
}

/// An item that a collection marked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CollectedItem {
    pub(crate) kind: Kind,
    pub(crate) id: Uuid,
    pub(crate) why: MarkReason,
    pub(crate) size_bytes: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Artifact,
    Volume,
    Container,
}

/// A reference that keeps an artifact.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Keeper {
    pub(crate) kind: KeeperKind,
    /// When the reference ends, if that is known.
    pub(crate) until: Option<Timestamp>,
}

/// Kind and id of a reference that keeps an artifact.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum KeeperKind {
    Pin(WorkloadId),
    Build(BuildId),
    ResourceCache(CacheId),
    TaskCache(CacheId),
    BaseResourceType(Uuid),
    ResourceCerts(WorkerId),
    Volume(VolumeHandle),
    Transfer(TransferId),
    /// An import of a worker-provided image fills this volume.
    Import(VolumeHandle),
    /// It never had an owner, and `unowned_ttl` has not passed.
    Unowned,
    /// A caller asked to keep it for a while.
    Reprieve,
}

impl fmt::Display for KeeperKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pin(workload) => write!(f, "pinned by {workload}"),
            Self::Build(build) => write!(f, "build {build}"),
            Self::ResourceCache(cache) => write!(f, "resource cache {cache}"),
            Self::TaskCache(cache) => write!(f, "task cache {cache}"),
            Self::BaseResourceType(id) => write!(f, "base resource type {id}"),
            Self::ResourceCerts(worker) => write!(f, "resource certs of worker {worker}"),
            Self::Volume(volume) => write!(f, "volume {volume}, which is made from it"),
            Self::Transfer(transfer) => write!(f, "transfer {transfer}, which is active"),
            Self::Import(volume) => write!(f, "volume {volume}, into which it is imported"),
            Self::Unowned => f.write_str("no owner: deleted when it is old"),
            Self::Reprieve => f.write_str("no owner: kept for a limited time"),
        }
    }
}

/// Returns until when, and why, an artifact without references is kept.
pub(crate) fn unowned_keeper(facts: &ArtifactFacts, now: Timestamp, policy: &Policy) -> Option<Keeper> {
    let youth = (!facts.had_owner).then(|| (KeeperKind::Unowned, facts.created_at + policy.unowned_ttl));
    let reprieve = facts.kept_until.map(|until| (KeeperKind::Reprieve, until));
    let longest = [youth, reprieve].into_iter().flatten().max_by_key(|(_, until)| *until);
    let (kind, until) = longest.filter(|(_, until)| *until > now)?;
    Some(Keeper { kind, until: Some(until) })
}

/// Judges an artifact.
pub(crate) fn artifact(facts: &ArtifactFacts, now: Timestamp, policy: &Policy) -> Verdict {
    let HoldFlags { owned, pinned, used, transferred } = facts.held;
    if facts.given_up && !(pinned || used || transferred) {
        return Verdict::Mark(MarkReason::ClaimExpired);
    }
    if owned {
        return Verdict::Keep(NextCheck::OnEvent);
    }
    if pinned || used || transferred {
        return Verdict::Keep(NextCheck::Later);
    }
    match unowned_keeper(facts, now, policy) {
        Some(Keeper { until: Some(until), .. }) => Verdict::Keep(NextCheck::At(until)),
        _ if facts.had_owner => Verdict::Mark(MarkReason::OwnersLetGo),
        _ => Verdict::Mark(MarkReason::NeverOwned),
    }
}

/// Judges a container.
pub(crate) fn container(facts: &ContainerFacts, now: Timestamp, policy: &Policy) -> Verdict {
    let Some(ended_at) = facts.attempt_ended_at else { return Verdict::Keep(NextCheck::OnEvent) };
    match grace_ends(ended_at, facts.touched_at, policy) {
        until if until > now => Verdict::Keep(NextCheck::At(until)),
        _ => Verdict::Mark(policy.end_reason()),
    }
}

/// Returns when the grace period of an attempt ends. It begins at the end of the attempt or at the
/// last interactive use of its container.
pub(crate) fn grace_ends(ended_at: Timestamp, touched_at: Option<Timestamp>, policy: &Policy) -> Timestamp {
    if policy.needs_space {
        return touched_at.map_or(ended_at, |touched_at| ended_at.max(touched_at + USE_TERM));
    }
    touched_at.map_or(ended_at, |touched_at| touched_at.max(ended_at)) + policy.gc_grace
}

/// Judges a volume.
pub(crate) fn volume(facts: &VolumeFacts, now: Timestamp, policy: &Policy) -> Verdict {
    if facts.has_live_child {
        return Verdict::Keep(NextCheck::Later);
    }
    match facts.lifetime {
        VolumeLifetime::OfArtifact { artifact_marked: true, .. } => {
            Verdict::Mark(MarkReason::ArtifactDeleted)
        }
        VolumeLifetime::OfArtifact { claimed_until: Some(until), .. } if until <= now => {
            Verdict::Mark(MarkReason::ClaimExpired)
        }
        VolumeLifetime::OfAttempt { ended_at: Some(_), has_live_container: true } => {
            Verdict::Keep(NextCheck::Later)
        }
        VolumeLifetime::OfAttempt { ended_at: Some(ended_at), has_live_container: false } => {
            match grace_ends(ended_at, None, policy) {
                until if until > now => Verdict::Keep(NextCheck::At(until)),
                _ => Verdict::Mark(policy.end_reason()),
            }
        }
        VolumeLifetime::OfArtifact { .. } | VolumeLifetime::OfAttempt { ended_at: None, .. } => {
            Verdict::Keep(NextCheck::OnEvent)
        }
    }
}

/// Returns when and why an item is marked that is kept until `last`. `None` if that depends on an
/// event.
pub(crate) fn predict_mark(
    last: Timestamp,
    judge: impl Fn(Timestamp) -> Verdict,
) -> Option<(Timestamp, MarkReason)> {
    let mut at = last;
    loop {
        match judge(at) {
            Verdict::Mark(why) => return Some((at, why)),
            Verdict::Keep(NextCheck::At(next)) if next > at => at = next,
            Verdict::Keep(_) => return None,
        }
    }
}

/// Orders volumes, each given with its parent, so that children come before their parents. Parents
/// outside the list are ignored.
pub(crate) fn children_first(volumes: &[(Uuid, Option<Uuid>)]) -> Vec<Uuid> {
    use std::collections::HashMap;
    let parents: HashMap<Uuid, Option<Uuid>> = volumes.iter().copied().collect();
    let depth = |handle: Uuid| {
        let mut depth = 0;
        let mut at = handle;
        // A chain is no longer than the number of volumes. The limit ends the loop on corrupt rows
        // that form a ring.
        while let Some(Some(parent)) = parents.get(&at)
            && depth <= volumes.len()
        {
            depth += 1;
            at = *parent;
        }
        depth
    };
    let mut ordered: Vec<_> =
        volumes.iter().map(|(handle, _)| (std::cmp::Reverse(depth(*handle)), *handle)).collect();
    ordered.sort_unstable();
    ordered.into_iter().map(|(_, handle)| handle).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const POLICY: Policy = Policy {
        unowned_ttl: Duration::from_secs(100),
        gc_grace: Duration::from_secs(10),
        needs_space: false,
    };

    fn at(seconds: i64) -> Timestamp {
        Timestamp(seconds * 1_000_000)
    }

    fn facts(had_owner: bool, held: HoldFlags) -> ArtifactFacts {
        ArtifactFacts { created_at: at(0), had_owner, kept_until: None, given_up: false, held }
    }

    #[test]
    fn artifact_is_marked_when_nothing_keeps_it() {
        for bits in 0..256 {
            let bit = |n: u32| bits & (1 << n) != 0;
            let held = HoldFlags { owned: bit(0), pinned: bit(1), used: bit(2), transferred: bit(3) };
            let (had_owner, old, reprieved, given_up) = (bit(4), bit(5), bit(6), bit(7));
            let now = at(if old { 100 } else { 99 });
            let kept_until = reprieved.then(|| at(200));
            let facts = ArtifactFacts { kept_until, given_up, ..facts(had_owner, held) };
            let expected = if given_up && !(held.pinned || held.used || held.transferred) {
                Verdict::Mark(MarkReason::ClaimExpired)
            } else if held.owned {
                Verdict::Keep(NextCheck::OnEvent)
            } else if held != HoldFlags::default() {
                Verdict::Keep(NextCheck::Later)
            } else if reprieved {
                Verdict::Keep(NextCheck::At(at(200)))
            } else if had_owner {
                Verdict::Mark(MarkReason::OwnersLetGo)
            } else if old {
                Verdict::Mark(MarkReason::NeverOwned)
            } else {
                Verdict::Keep(NextCheck::At(at(100)))
            };
            assert_eq!(artifact(&facts, now, &POLICY), expected, "{facts:?} at {now:?}");
        }
    }

    #[test]
    fn artifact_is_kept_until_its_reprieve_ends() {
        let reprieved = ArtifactFacts { kept_until: Some(at(50)), ..facts(true, HoldFlags::default()) };
        assert_eq!(artifact(&reprieved, at(49), &POLICY), Verdict::Keep(NextCheck::At(at(50))));
        assert_eq!(artifact(&reprieved, at(50), &POLICY), Verdict::Mark(MarkReason::OwnersLetGo));
        let young = ArtifactFacts { had_owner: false, ..reprieved };
        assert_eq!(artifact(&young, at(50), &POLICY), Verdict::Keep(NextCheck::At(at(100))));
    }

    #[test]
    fn container_is_marked_after_grace_of_its_attempt() {
        let ended = ContainerFacts { attempt_ended_at: Some(at(5)), touched_at: None };
        assert_eq!(container(&ended, at(14), &POLICY), Verdict::Keep(NextCheck::At(at(15))));
        assert_eq!(container(&ended, at(15), &POLICY), Verdict::Mark(MarkReason::AttemptEnded));
        let going_on = ContainerFacts { attempt_ended_at: None, touched_at: Some(at(5)) };
        assert_eq!(container(&going_on, at(1000), &POLICY), Verdict::Keep(NextCheck::OnEvent));
    }

    #[test]
    fn container_grace_restarts_at_interactive_use() {
        let touched =
            |at_second| ContainerFacts { attempt_ended_at: Some(at(5)), touched_at: Some(at(at_second)) };
        assert_eq!(container(&touched(8), at(17), &POLICY), Verdict::Keep(NextCheck::At(at(18))));
        assert_eq!(container(&touched(8), at(18), &POLICY), Verdict::Mark(MarkReason::AttemptEnded));
        assert_eq!(
            container(&touched(2), at(15), &POLICY),
            Verdict::Mark(MarkReason::AttemptEnded),
            "before its end"
        );
    }

    #[test]
    fn unused_container_has_no_grace_if_its_worker_needs_space() {
        let policy = Policy { needs_space: true, ..POLICY };
        let judge = |touched_at, now| {
            let facts = ContainerFacts { attempt_ended_at: Some(at(5)), touched_at };
            container(&facts, at(now), &policy)
        };
        assert_eq!(judge(None, 5), Verdict::Mark(MarkReason::DiskSpace));
        assert_eq!(judge(Some(at(4)), 5), Verdict::Keep(NextCheck::At(at(184))), "it is in use");
        assert_eq!(judge(Some(at(4)), 184), Verdict::Mark(MarkReason::DiskSpace));
        let going_on = ContainerFacts { attempt_ended_at: None, touched_at: None };
        assert_eq!(container(&going_on, at(1000), &policy), Verdict::Keep(NextCheck::OnEvent));
        let lifetime = VolumeLifetime::OfAttempt { ended_at: Some(at(5)), has_live_container: false };
        let left = VolumeFacts { has_live_child: false, lifetime };
        assert_eq!(volume(&left, at(5), &policy), Verdict::Mark(MarkReason::DiskSpace));
    }

    #[test]
    fn volume_is_marked_with_its_owner_after_children() {
        let judge =
            |lifetime, has_live_child| volume(&VolumeFacts { has_live_child, lifetime }, at(100), &POLICY);
        let replica =
            |artifact_marked, claimed_until| VolumeLifetime::OfArtifact { artifact_marked, claimed_until };
        let of_attempt =
            |ended_at, has_live_container| VolumeLifetime::OfAttempt { ended_at, has_live_container };

        assert_eq!(judge(replica(true, None), false), Verdict::Mark(MarkReason::ArtifactDeleted));
        assert_eq!(judge(replica(true, None), true), Verdict::Keep(NextCheck::Later));
        assert_eq!(judge(replica(false, None), false), Verdict::Keep(NextCheck::OnEvent));
        assert_eq!(judge(replica(false, Some(at(101))), false), Verdict::Keep(NextCheck::OnEvent));
        assert_eq!(judge(replica(false, Some(at(100))), false), Verdict::Mark(MarkReason::ClaimExpired));
        assert_eq!(judge(of_attempt(None, false), false), Verdict::Keep(NextCheck::OnEvent));
        assert_eq!(judge(of_attempt(Some(at(90)), true), false), Verdict::Keep(NextCheck::Later));
        assert_eq!(judge(of_attempt(Some(at(91)), false), false), Verdict::Keep(NextCheck::At(at(101))));
        assert_eq!(judge(of_attempt(Some(at(90)), false), false), Verdict::Mark(MarkReason::AttemptEnded));
    }

    #[test]
    fn children_precede_parents_even_in_a_ring() {
        let [a, b, c, d] = std::array::from_fn(|_| Uuid::now_v7());
        let order = children_first(&[(a, None), (b, Some(a)), (c, Some(b)), (d, Some(Uuid::now_v7()))]);
        let place = |handle| order.iter().position(|other| *other == handle);
        assert!(place(c) < place(b) && place(b) < place(a) && place(d).is_some());
        assert_eq!(children_first(&[(a, Some(b)), (b, Some(a))]).len(), 2);
    }
}
