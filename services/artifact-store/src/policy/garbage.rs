//! What is garbage, and why: pure functions from what is known to a verdict. Nothing else in the store decides it.
//!
//! An artifact goes when nothing pins it, nothing is being made from it or into it, and every owner has let go ([`crate::policy::retention`]); one that
//! never had an owner goes when it is old. Volumes go with their artifact or with their attempt, children before parents; a container goes
//! a grace after its attempt ended, or after it was last used interactively.
//!
//! [`crate::gc`] gathers the facts behind the locks of what it judges. What is kept is looked at again: a verdict says when.

use std::fmt;
use std::time::Duration;

use domain::{BuildId, CacheId, Timestamp, TransferId, VolumeHandle, WorkerId, WorkloadId};
use uuid::Uuid;

/// The settings that decide about garbage.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Policy {
    /// An artifact that never had an owner goes this long after it was made.
    pub(crate) unowned_ttl: Duration,
    /// What belongs to an attempt goes this long after it ended.
    pub(crate) gc_grace: Duration,
}

/// What is known of an artifact that has not been marked.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ArtifactFacts {
    pub(crate) created_at: Timestamp,
    /// Whether it ever had an owner.
    pub(crate) had_owner: bool,
    /// Until when it needs no owner.
    pub(crate) kept_until: Option<Timestamp>,
    pub(crate) held: HoldFlags,
}

/// What holds an artifact.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct HoldFlags {
    /// An owner that has not let go.
    pub(crate) owned: bool,
    /// A workload pins it.
    pub(crate) pinned: bool,
    /// A live volume of an attempt starts with its bytes.
    pub(crate) used: bool,
    /// A transfer that goes on fills or copies it.
    pub(crate) transferred: bool,
}

/// What is known of a container that has not been marked.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ContainerFacts {
    /// When its attempt ended. `None`: it goes on.
    pub(crate) attempt_ended_at: Option<Timestamp>,
    /// When it was last used interactively.
    pub(crate) touched_at: Option<Timestamp>,
}

/// What is known of a volume that has not been marked.
#[derive(Debug, Clone, Copy)]
pub(crate) struct VolumeFacts {
    /// A copy-on-write child of it is not garbage.
    pub(crate) has_live_child: bool,
    pub(crate) belongs: Belonging,
}

/// What a volume lives and dies with.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Belonging {
    /// A replica, complete or on its way.
    ToArtifact {
        /// The artifact is marked or gone.
        artifact_marked: bool,
        /// Until when its transfer may take. `None`: it is complete.
        claimed_until: Option<Timestamp>,
    },
    /// An input, or an output that is not settled.
    ToAttempt {
        /// When it ended. `None`: it goes on.
        ended_at: Option<Timestamp>,
        /// Its container is not garbage yet.
        has_live_container: bool,
    },
}

/// Whether something is garbage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Not now.
    Keep(NextLook),
    /// Yes.
    Mark(MarkReason),
}

/// When to look again at what is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NextLook {
    /// When what keeps it says so: that does not end unseen.
    WhenTold,
    /// Then.
    At(Timestamp),
    /// After a while: what keeps it may end unseen, or end without a word.
    Later,
}

/// Why something is garbage, for people.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum MarkReason {
    NeverOwned,
    OwnersLetGo,
    TransferAbandoned,
    ClaimRanOut,
    OtherBytesSealed,
    ArtifactDeleted,
    AttemptEnded,
    ImportReplaced,
}

impl fmt::Display for MarkReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NeverOwned => "it never had an owner, and it is old",
            Self::OwnersLetGo => "every owner of it has let go",
            Self::TransferAbandoned => "its transfer was abandoned",
            Self::ClaimRanOut => "its transfer stopped without an end",
            Self::OtherBytesSealed => "its artifact was sealed with other bytes",
            Self::ArtifactDeleted => "its artifact is deleted",
            Self::AttemptEnded => "its attempt has ended",
            Self::ImportReplaced => "its worker brings along something else now",
        })
    }
}

/// One thing that was marked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Collected {
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

/// One thing that keeps an artifact.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Keeper {
    pub(crate) what: KeeperKind,
    /// As far as it is known. `None`: not before something happens.
    pub(crate) until: Option<Timestamp>,
}

/// What keeps an artifact.
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
    /// What a worker brings along is imported into this volume.
    Import(VolumeHandle),
    /// It never had an owner, and it is young.
    Youth,
    /// A caller asked for that.
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
            Self::Transfer(transfer) => write!(f, "transfer {transfer}, which goes on"),
            Self::Import(volume) => write!(f, "volume {volume}, into which it is imported"),
            Self::Youth => f.write_str("no owner: it goes when it is old"),
            Self::Reprieve => f.write_str("no owner: it is kept for a while"),
        }
    }
}

/// Until when an artifact is kept though nothing holds it, and why.
pub(crate) fn unowned_keeper(facts: &ArtifactFacts, now: Timestamp, policy: &Policy) -> Option<Keeper> {
    let youth = (!facts.had_owner).then(|| (KeeperKind::Youth, facts.created_at + policy.unowned_ttl));
    let reprieve = facts.kept_until.map(|until| (KeeperKind::Reprieve, until));
    let longest = [youth, reprieve].into_iter().flatten().max_by_key(|(_, until)| *until);
    let (what, until) = longest.filter(|(_, until)| *until > now)?;
    Some(Keeper { what, until: Some(until) })
}

/// Judges an artifact.
pub(crate) fn artifact(facts: &ArtifactFacts, now: Timestamp, policy: &Policy) -> Verdict {
    let HoldFlags { owned, pinned, used, transferred } = facts.held;
    if owned {
        return Verdict::Keep(NextLook::WhenTold);
    }
    if pinned || used || transferred {
        return Verdict::Keep(NextLook::Later);
    }
    match unowned_keeper(facts, now, policy) {
        Some(Keeper { until: Some(until), .. }) => Verdict::Keep(NextLook::At(until)),
        _ if facts.had_owner => Verdict::Mark(MarkReason::OwnersLetGo),
        _ => Verdict::Mark(MarkReason::NeverOwned),
    }
}

/// Judges a container.
pub(crate) fn container(facts: &ContainerFacts, now: Timestamp, policy: &Policy) -> Verdict {
    let Some(ended_at) = facts.attempt_ended_at else { return Verdict::Keep(NextLook::WhenTold) };
    match grace_ends(ended_at, facts.touched_at, policy) {
        until if until > now => Verdict::Keep(NextLook::At(until)),
        _ => Verdict::Mark(MarkReason::AttemptEnded),
    }
}

/// When the grace of an attempt ends: some time after its end, or after its container was last used interactively.
pub(crate) fn grace_ends(ended_at: Timestamp, touched_at: Option<Timestamp>, policy: &Policy) -> Timestamp {
    touched_at.map_or(ended_at, |touched_at| touched_at.max(ended_at)) + policy.gc_grace
}

/// Judges a volume.
pub(crate) fn volume(facts: &VolumeFacts, now: Timestamp, policy: &Policy) -> Verdict {
    if facts.has_live_child {
        return Verdict::Keep(NextLook::Later);
    }
    match facts.belongs {
        Belonging::ToArtifact { artifact_marked: true, .. } => Verdict::Mark(MarkReason::ArtifactDeleted),
        Belonging::ToArtifact { claimed_until: Some(until), .. } if until <= now => {
            Verdict::Mark(MarkReason::ClaimRanOut)
        }
        Belonging::ToAttempt { ended_at: Some(_), has_live_container: true } => {
            Verdict::Keep(NextLook::Later)
        }
        Belonging::ToAttempt { ended_at: Some(ended_at), has_live_container: false } => {
            match ended_at + policy.gc_grace {
                until if until > now => Verdict::Keep(NextLook::At(until)),
                _ => Verdict::Mark(MarkReason::AttemptEnded),
            }
        }
        Belonging::ToArtifact { .. } | Belonging::ToAttempt { ended_at: None, .. } => {
            Verdict::Keep(NextLook::WhenTold)
        }
    }
}

/// When something goes that is kept until `last`, and why. `None`: not before something happens.
pub(crate) fn fate(last: Timestamp, judge: impl Fn(Timestamp) -> Verdict) -> Option<(Timestamp, MarkReason)> {
    let mut at = last;
    loop {
        match judge(at) {
            Verdict::Mark(why) => return Some((at, why)),
            Verdict::Keep(NextLook::At(next)) if next > at => at = next,
            Verdict::Keep(_) => return None,
        }
    }
}

/// Orders volumes, each with its parent, so that children come before their parents. A parent that is not among them does not matter.
pub(crate) fn children_first(volumes: &[(Uuid, Option<Uuid>)]) -> Vec<Uuid> {
    use std::collections::HashMap;
    let parents: HashMap<Uuid, Option<Uuid>> = volumes.iter().copied().collect();
    let depth = |handle: Uuid| {
        let mut depth = 0;
        let mut at = handle;
        // A chain is no longer than all volumes, even where rows are wrong and form a ring.
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

    const POLICY: Policy =
        Policy { unowned_ttl: Duration::from_secs(100), gc_grace: Duration::from_secs(10) };

    fn at(seconds: i64) -> Timestamp {
        Timestamp(seconds * 1_000_000)
    }

    fn facts(had_owner: bool, held: HoldFlags) -> ArtifactFacts {
        ArtifactFacts { created_at: at(0), had_owner, kept_until: None, held }
    }

    #[test]
    fn an_artifact_goes_only_when_nothing_at_all_keeps_it() {
        for bits in 0..128 {
            let bit = |n: u32| bits & (1 << n) != 0;
            let held = HoldFlags { owned: bit(0), pinned: bit(1), used: bit(2), transferred: bit(3) };
            let (had_owner, old, reprieved) = (bit(4), bit(5), bit(6));
            let now = at(if old { 100 } else { 99 });
            let kept_until = reprieved.then(|| at(200));
            let facts = ArtifactFacts { kept_until, ..facts(had_owner, held) };
            let expected = if held.owned {
                Verdict::Keep(NextLook::WhenTold)
            } else if held != HoldFlags::default() {
                Verdict::Keep(NextLook::Later)
            } else if reprieved {
                Verdict::Keep(NextLook::At(at(200)))
            } else if had_owner {
                Verdict::Mark(MarkReason::OwnersLetGo)
            } else if old {
                Verdict::Mark(MarkReason::NeverOwned)
            } else {
                Verdict::Keep(NextLook::At(at(100)))
            };
            assert_eq!(artifact(&facts, now, &POLICY), expected, "{facts:?} at {now:?}");
        }
    }

    #[test]
    fn a_reprieve_lasts_as_long_as_it_was_given() {
        let reprieved = ArtifactFacts { kept_until: Some(at(50)), ..facts(true, HoldFlags::default()) };
        assert_eq!(artifact(&reprieved, at(49), &POLICY), Verdict::Keep(NextLook::At(at(50))));
        assert_eq!(artifact(&reprieved, at(50), &POLICY), Verdict::Mark(MarkReason::OwnersLetGo));
        let young = ArtifactFacts { had_owner: false, ..reprieved };
        assert_eq!(artifact(&young, at(50), &POLICY), Verdict::Keep(NextLook::At(at(100))));
    }

    #[test]
    fn a_container_goes_a_grace_after_its_attempt_ended() {
        let ended = ContainerFacts { attempt_ended_at: Some(at(5)), touched_at: None };
        assert_eq!(container(&ended, at(14), &POLICY), Verdict::Keep(NextLook::At(at(15))));
        assert_eq!(container(&ended, at(15), &POLICY), Verdict::Mark(MarkReason::AttemptEnded));
        let going_on = ContainerFacts { attempt_ended_at: None, touched_at: Some(at(5)) };
        assert_eq!(container(&going_on, at(1000), &POLICY), Verdict::Keep(NextLook::WhenTold));
    }

    #[test]
    fn a_container_that_was_touched_after_its_end_goes_a_grace_after_that() {
        let touched =
            |at_second| ContainerFacts { attempt_ended_at: Some(at(5)), touched_at: Some(at(at_second)) };
        assert_eq!(container(&touched(8), at(17), &POLICY), Verdict::Keep(NextLook::At(at(18))));
        assert_eq!(container(&touched(8), at(18), &POLICY), Verdict::Mark(MarkReason::AttemptEnded));
        assert_eq!(
            container(&touched(2), at(15), &POLICY),
            Verdict::Mark(MarkReason::AttemptEnded),
            "before its end"
        );
    }

    #[test]
    fn a_volume_goes_with_what_it_belongs_to_and_after_its_children() {
        let judge =
            |belongs, has_live_child| volume(&VolumeFacts { has_live_child, belongs }, at(100), &POLICY);
        let replica =
            |artifact_marked, claimed_until| Belonging::ToArtifact { artifact_marked, claimed_until };
        let of_attempt = |ended_at, has_live_container| Belonging::ToAttempt { ended_at, has_live_container };

        assert_eq!(judge(replica(true, None), false), Verdict::Mark(MarkReason::ArtifactDeleted));
        assert_eq!(judge(replica(true, None), true), Verdict::Keep(NextLook::Later));
        assert_eq!(judge(replica(false, None), false), Verdict::Keep(NextLook::WhenTold));
        assert_eq!(judge(replica(false, Some(at(101))), false), Verdict::Keep(NextLook::WhenTold));
        assert_eq!(judge(replica(false, Some(at(100))), false), Verdict::Mark(MarkReason::ClaimRanOut));
        assert_eq!(judge(of_attempt(None, false), false), Verdict::Keep(NextLook::WhenTold));
        assert_eq!(judge(of_attempt(Some(at(90)), true), false), Verdict::Keep(NextLook::Later));
        assert_eq!(judge(of_attempt(Some(at(91)), false), false), Verdict::Keep(NextLook::At(at(101))));
        assert_eq!(judge(of_attempt(Some(at(90)), false), false), Verdict::Mark(MarkReason::AttemptEnded));
    }

    #[test]
    fn children_come_before_their_parents_even_in_a_ring() {
        let [a, b, c, d] = std::array::from_fn(|_| Uuid::now_v7());
        let order = children_first(&[(a, None), (b, Some(a)), (c, Some(b)), (d, Some(Uuid::now_v7()))]);
        let place = |handle| order.iter().position(|other| *other == handle);
        assert!(place(c) < place(b) && place(b) < place(a) && place(d).is_some());
        assert_eq!(children_first(&[(a, Some(b)), (b, Some(a))]).len(), 2);
    }
}
