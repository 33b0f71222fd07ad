//! What is garbage, and why: pure functions from what is known to a verdict. Nothing else in the store decides it.
//!
//! An artifact goes when nothing pins it, no live volume of an attempt is made from it, and every owner has let go; one that nobody
//! ever owned goes when it is old. Volumes go with their artifact or with their attempt, children before parents; a container goes
//! a grace after its attempt ended.
//!
//! [`crate::collect`] gathers the facts twice: to find candidates, and again behind the locks.

use std::fmt;
use std::time::Duration;

use domain::{BuildId, Timestamp, VolumeHandle, WorkloadId};
use uuid::Uuid;

/// The settings that decide about garbage.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Policy {
    /// An artifact that nobody ever owned goes this long after it was made.
    pub(crate) unowned_ttl: Duration,
    /// What belongs to an attempt goes this long after it ended.
    pub(crate) gc_grace: Duration,
}

/// What is known of an artifact that has not been marked.
#[derive(Debug, Clone)]
pub(crate) struct ArtifactFacts {
    pub(crate) created_at: Timestamp,
    /// Whether anybody ever owned it.
    pub(crate) had_owner: bool,
    pub(crate) owners: Vec<OwnerFacts>,
    pub(crate) pinned_by: Vec<WorkloadId>,
    /// Live volumes of attempts that start with its bytes.
    pub(crate) used_by: Vec<VolumeHandle>,
}

/// What is known of an owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct OwnerFacts {
    pub(crate) build: BuildId,
    /// When it lets go. `None`: it has not ended.
    pub(crate) kept_until: Option<Timestamp>,
}

impl OwnerFacts {
    fn holds_on(&self, now: Timestamp) -> bool {
        self.kept_until.is_none_or(|until| until > now)
    }
}

/// What is known of a container that has not been marked.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ContainerFacts {
    /// When its attempt ended. `None`: it goes on.
    pub(crate) attempt_ended_at: Option<Timestamp>,
}

/// What is known of a volume that has not been marked.
#[derive(Debug, Clone, Copy)]
pub(crate) struct VolumeFacts {
    /// A copy-on-write child of it is not garbage.
    pub(crate) has_live_child: bool,
    pub(crate) belongs: Belongs,
}

/// What a volume lives and dies with.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Belongs {
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
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Verdict<K> {
    /// No: this keeps it.
    Keep(K),
    /// Yes.
    Mark(Why),
}

/// Why something is garbage, for people.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Why {
    NeverOwned,
    OwnersLetGo,
    TransferAbandoned,
    ClaimRanOut,
    OtherBytesSealed,
    ArtifactDeleted,
    AttemptEnded,
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NeverOwned => "nobody ever owned it, and it is old",
            Self::OwnersLetGo => "every build that owned it has let go",
            Self::TransferAbandoned => "its transfer was abandoned",
            Self::ClaimRanOut => "its transfer stopped without an end",
            Self::OtherBytesSealed => "its artifact was sealed with other bytes",
            Self::ArtifactDeleted => "its artifact is deleted",
            Self::AttemptEnded => "its attempt has ended",
        })
    }
}

/// What keeps an artifact, for people.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Keeper {
    Pin(WorkloadId),
    Build(BuildId),
    Volume(VolumeHandle),
    /// Nobody ever owned it, and it is young.
    Youth,
}

impl fmt::Display for Keeper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pin(workload) => write!(f, "pinned by {workload}"),
            Self::Build(build) => write!(f, "build {build}"),
            Self::Volume(volume) => write!(f, "volume {volume}, which is made from it"),
            Self::Youth => f.write_str("nobody: it goes when it is old"),
        }
    }
}

/// Whether a build has not let go of an artifact yet.
pub(crate) fn has_live_owner(facts: &ArtifactFacts, now: Timestamp) -> bool {
    facts.owners.iter().any(|owner| owner.holds_on(now))
}

/// Judges an artifact.
pub(crate) fn artifact(facts: &ArtifactFacts, now: Timestamp, policy: &Policy) -> Verdict<Vec<Keeper>> {
    let mut keepers: Vec<Keeper> = facts
        .owners
        .iter()
        .filter(|owner| owner.holds_on(now))
        .map(|owner| Keeper::Build(owner.build))
        .collect();
    keepers.extend(facts.pinned_by.iter().copied().map(Keeper::Pin));
    keepers.extend(facts.used_by.iter().copied().map(Keeper::Volume));
    if !facts.had_owner && facts.created_at + policy.unowned_ttl > now {
        keepers.push(Keeper::Youth);
    }
    match keepers.is_empty() {
        false => Verdict::Keep(keepers),
        true if facts.had_owner => Verdict::Mark(Why::OwnersLetGo),
        true => Verdict::Mark(Why::NeverOwned),
    }
}

/// Judges a container.
pub(crate) fn container(facts: &ContainerFacts, now: Timestamp, policy: &Policy) -> Verdict<()> {
    match facts.attempt_ended_at {
        Some(ended_at) if ended_at + policy.gc_grace <= now => Verdict::Mark(Why::AttemptEnded),
        _ => Verdict::Keep(()),
    }
}

/// Judges a volume.
pub(crate) fn volume(facts: &VolumeFacts, now: Timestamp, policy: &Policy) -> Verdict<()> {
    if facts.has_live_child {
        return Verdict::Keep(());
    }
    match facts.belongs {
        Belongs::ToArtifact { artifact_marked: true, .. } => Verdict::Mark(Why::ArtifactDeleted),
        Belongs::ToArtifact { claimed_until: Some(until), .. } if until <= now => {
            Verdict::Mark(Why::ClaimRanOut)
        }
        Belongs::ToAttempt { ended_at: Some(ended_at), has_live_container: false }
            if ended_at + policy.gc_grace <= now =>
        {
            Verdict::Mark(Why::AttemptEnded)
        }
        _ => Verdict::Keep(()),
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

    fn unowned() -> ArtifactFacts {
        ArtifactFacts {
            created_at: at(0),
            had_owner: false,
            owners: Vec::new(),
            pinned_by: Vec::new(),
            used_by: Vec::new(),
        }
    }

    fn owned(kept_until: &[Option<Timestamp>]) -> ArtifactFacts {
        let owner =
            |kept_until: &Option<Timestamp>| OwnerFacts { build: BuildId::new(), kept_until: *kept_until };
        ArtifactFacts { had_owner: true, owners: kept_until.iter().map(owner).collect(), ..unowned() }
    }

    fn is_kept(facts: &ArtifactFacts, now: Timestamp) -> bool {
        matches!(artifact(facts, now, &POLICY), Verdict::Keep(_))
    }

    #[test]
    fn an_artifact_that_nobody_ever_owned_goes_when_it_is_old() {
        assert!(is_kept(&unowned(), at(99)));
        assert_eq!(artifact(&unowned(), at(100), &POLICY), Verdict::Mark(Why::NeverOwned));
    }

    #[test]
    fn an_artifact_goes_with_its_last_owner_however_young_it_is() {
        assert!(is_kept(&owned(&[None, Some(at(1))]), at(1000)));
        assert!(is_kept(&owned(&[Some(at(5)), Some(at(1))]), at(4)));
        let let_go = owned(&[Some(at(5)), Some(at(1))]);
        assert_eq!(artifact(&let_go, at(5), &POLICY), Verdict::Mark(Why::OwnersLetGo));
        assert_eq!(artifact(&owned(&[]), at(1), &POLICY), Verdict::Mark(Why::OwnersLetGo));
    }

    #[test]
    fn a_pin_or_a_volume_made_from_it_keeps_an_artifact() {
        let pinned = ArtifactFacts { pinned_by: vec![WorkloadId::new()], ..unowned() };
        assert!(is_kept(&pinned, at(1000)));
        let used = ArtifactFacts { used_by: vec![VolumeHandle::new()], ..unowned() };
        assert!(is_kept(&used, at(1000)));
    }

    #[test]
    fn a_container_goes_a_grace_after_its_attempt_ended() {
        let ended = ContainerFacts { attempt_ended_at: Some(at(5)) };
        assert_eq!(container(&ended, at(14), &POLICY), Verdict::Keep(()));
        assert_eq!(container(&ended, at(15), &POLICY), Verdict::Mark(Why::AttemptEnded));
        let going_on = ContainerFacts { attempt_ended_at: None };
        assert_eq!(container(&going_on, at(1000), &POLICY), Verdict::Keep(()));
    }

    #[test]
    fn a_volume_goes_with_what_it_belongs_to_and_after_its_children() {
        let judge =
            |belongs, has_live_child| volume(&VolumeFacts { has_live_child, belongs }, at(100), &POLICY);
        let replica = |artifact_marked, claimed_until| Belongs::ToArtifact { artifact_marked, claimed_until };
        let of_attempt = |ended_at, has_live_container| Belongs::ToAttempt { ended_at, has_live_container };

        assert_eq!(judge(replica(true, None), false), Verdict::Mark(Why::ArtifactDeleted));
        assert_eq!(judge(replica(true, None), true), Verdict::Keep(()));
        assert_eq!(judge(replica(false, None), false), Verdict::Keep(()));
        assert_eq!(judge(replica(false, Some(at(101))), false), Verdict::Keep(()));
        assert_eq!(judge(replica(false, Some(at(100))), false), Verdict::Mark(Why::ClaimRanOut));
        assert_eq!(judge(of_attempt(None, false), false), Verdict::Keep(()));
        assert_eq!(judge(of_attempt(Some(at(90)), true), false), Verdict::Keep(()));
        assert_eq!(judge(of_attempt(Some(at(91)), false), false), Verdict::Keep(()));
        assert_eq!(judge(of_attempt(Some(at(90)), false), false), Verdict::Mark(Why::AttemptEnded));
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
