//! Resource caches and task caches: certain owners, and permitted answers.

use std::collections::BTreeSet;

use domain::ArtifactId;
use rpc::Reason;
use uuid::Uuid;

use super::{
    Accepted, CLAIM_TERM, CacheOutcome, Outcome, RESOURCE_CACHE_TTL, State, Violation, artifact_id, claim_id,
    must,
};
use crate::model::operations::{Artifact, Owner, User};

/// A resource cache, as of its last answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ResourceCache {
    id: Uuid,
    claim: u16,
    claimed_until: i64,
    /// `None` while it is being made.
    artifact: Option<Artifact>,
    last_used: i64,
    users: BTreeSet<User>,
}

/// A task cache, as of its last answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct TaskCache {
    id: Uuid,
    artifact: Option<Artifact>,
    last_used: i64,
    /// Workloads.
    users: BTreeSet<u16>,
}

/// Time without use after which a task cache is deleted, in seconds.
pub(crate) fn task_cache_ttl(task: u8) -> i64 {
    40 + 60 * i64::from(task)
}

impl State {
    pub(crate) fn resource_cache(&self, cache: u8) -> Option<Uuid> {
        self.resource_caches.get(&cache).map(|cache| cache.id)
    }

    pub(crate) fn task_cache(&self, task: u8) -> Option<Uuid> {
        self.task_caches.get(&task).map(|cache| cache.id)
    }

    /// Returns the artifacts that caches certainly own, and the store's description of the cache.
    pub(crate) fn held_by_caches(&self) -> impl Iterator<Item = (Artifact, String)> {
        let of_resources = self.resource_caches.values().filter(|cache| self.is_there(cache));
        let of_resources =
            of_resources.filter_map(|cache| Some((cache.artifact?, format!("resource cache {}", cache.id))));
        let of_tasks = self.task_caches.iter().filter(|(task, cache)| self.is_task_there(**task, cache));
        let of_tasks =
            of_tasks.filter_map(|(_, cache)| Some((cache.artifact?, format!("task cache {}", cache.id))));
        of_resources.chain(of_tasks)
    }

    /// Returns whether a resource cache certainly exists: it was used recently, is used, or is
    /// being made.
    fn is_there(&self, cache: &ResourceCache) -> bool {
        match cache.artifact {
            None => self.now < cache.claimed_until,
            Some(_) => {
                let ends = cache.users.iter().map(|user| self.used_until(*user));
                let last = ends.fold(cache.last_used, Ord::max);
                self.now < last.saturating_add(RESOURCE_CACHE_TTL)
            }
        }
    }

    fn is_task_there(&self, task: u8, cache: &TaskCache) -> bool {
        let ends = cache.users.iter().map(|workload| self.used_until(User::OfWorkload(*workload)));
        self.now < ends.fold(cache.last_used, Ord::max).saturating_add(task_cache_ttl(task))
    }

    /// Returns until when a user certainly uses its caches.
    fn used_until(&self, user: User) -> i64 {
        match user {
            User::OfBuild(build) => self.holds_until(build).unwrap_or(i64::MIN),
            User::OfWorkload(workload) => {
                self.holders.get(&workload).map_or(i64::MIN, |holder| holder.settled_at.unwrap_or(i64::MAX))
            }
        }
    }

    /// Judges the answer to a user of a cache.
    fn judge_user(&self, user: User, outcome: &Outcome) -> Result<bool, Violation> {
        let may_go_on = match user {
            User::OfBuild(build) => self.may_be_live(build),
            User::OfWorkload(workload) => !self.is_settled(workload),
        };
        let goes_on = match user {
            User::OfBuild(build) => self.is_live(build),
            User::OfWorkload(_) => may_go_on,
        };
        if let Outcome::Refused(refusal) = outcome {
            let ended = refusal.is(Reason::OwnerEnded) || refusal.is(Reason::HolderSettled);
            must!(!(ended && goes_on), "its user has not ended");
            return Ok(ended);
        }
        must!(may_go_on, "its user has ended");
        Ok(false)
    }

    /// Records a workload that uses a cache.
    fn note_user(&mut self, user: User) {
        if let User::OfWorkload(workload) = user {
            self.holders.entry(workload).or_default();
        }
    }

    /// Checks that a cache has the artifact with this id.
    fn that_is(&self, id: ArtifactId, expected: Option<Artifact>) -> Accepted {
        let Some(expected) = expected else { return Err(Violation(format!("it was never given {id}"))) };
        must!(artifact_id(expected) == id, "it was given {expected:?}");
        let gone = self.artifacts.get(&expected).is_none_or(|record| record.gone);
        must!(!gone, "{expected:?} had gone");
        Ok(())
    }

    pub(super) fn ask_cache(
        &mut self,
        key: u8,
        claim: u16,
        user: Option<User>,
        outcome: &Outcome,
    ) -> Accepted {
        if let Some(user) = user
            && self.judge_user(user, outcome)?
        {
            return Ok(());
        }
        let Outcome::Asked { cache: id, found } = outcome else {
            return Err(Violation("there is nothing in its way".to_owned()));
        };
        must!(!self.deleted_caches.contains(id), "it was deleted");
        let before = self.resource_caches.get(&key);
        let known = before.filter(|cache| cache.id == *id).cloned();
        must!(
            known.is_some() || before.is_none_or(|before| !self.is_there(before)),
            "it is another now, and the one before is there: {before:?}"
        );
        let now = self.now;
        let mut cache = match (found, known) {
            (CacheOutcome::Ready(artifact), Some(known)) => {
                self.that_is(*artifact, known.artifact)?;
                ResourceCache { last_used: now, ..known }
            }
            (CacheOutcome::InProgress(other), Some(known)) => {
                let bytes = known.artifact.is_some_and(|artifact| self.has_bytes(artifact));
                must!(!bytes && claim_id(known.claim).uuid() == *other, "no claim makes it: {known:?}");
                known
            }
            (CacheOutcome::Claimed, known) => {
                let fresh = ResourceCache {
                    id: *id,
                    claim,
                    claimed_until: now + CLAIM_TERM,
                    artifact: None,
                    last_used: now,
                    users: BTreeSet::new(),
                };
                match known {
                    None => fresh,
                    Some(known) => {
                        let other =
                            known.claim != claim && known.artifact.is_none() && now < known.claimed_until;
                        must!(!other, "another claim makes it: {known:?}");
                        let bytes = known.artifact.is_some_and(|artifact| self.has_bytes(artifact));
                        must!(!bytes, "it has its bytes: {known:?}");
                        ResourceCache { last_used: known.last_used, users: known.users, ..fresh }
                    }
                }
            }
            (found, None) => {
                return Err(Violation(format!("it is {found:?}, and it was never requested before")));
            }
        };
        if let Some(user) = user {
            self.note_user(user);
            cache.users.insert(user);
        }
        self.resource_caches.insert(key, cache);
        Ok(())
    }

    /// Returns the cache that is or was made under a claim.
    fn of_claim(&self, claim: u16) -> Option<u8> {
        self.resource_caches.iter().find(|(_, cache)| cache.claim == claim).map(|(key, _)| *key)
    }

    pub(super) fn renew_claim(&mut self, claim: u16, outcome: &Outcome) -> Accepted {
        let key = self.of_claim(claim);
        if let Outcome::Refused(refusal) = outcome {
            let valid = key.is_some_and(|key| self.is_there(&self.resource_caches[&key]));
            must!(refusal.is(Reason::ClaimLost) && !valid, "it is valid");
            return Ok(());
        }
        let now = self.now;
        let Some(cache) = key.and_then(|key| self.resource_caches.get_mut(&key)) else {
            return Err(Violation("it was lost".to_owned()));
        };
        if cache.artifact.is_none() {
            cache.claimed_until = now + CLAIM_TERM;
        }
        Ok(())
    }

    pub(super) fn put_cache(&mut self, claim: u16, artifact: Artifact, outcome: &Outcome) -> Accepted {
        let key = self.of_claim(claim);
        let before = key.and_then(|key| self.resource_caches[&key].artifact);
        if let Outcome::Refused(refusal) = outcome {
            let valid = key.is_some_and(|key| self.is_there(&self.resource_caches[&key]));
            let fits = before.is_none() || before == Some(artifact);
            let may = (refusal.is(Reason::ClaimLost) && !(valid && fits))
                || (refusal.is(Reason::ArtifactNotFound)
                    && before.is_none()
                    && !self.is_kept_and_sealed(artifact));
            must!(may, "there is nothing in its way");
            return Ok(());
        }
        self.is_made(claim, artifact)
    }

    /// Records the artifact of the cache that is made under a claim.
    fn is_made(&mut self, claim: u16, artifact: Artifact) -> Accepted {
        let now = self.now;
        let key = self.of_claim(claim);
        let Some(cache) = key.and_then(|key| self.resource_caches.get_mut(&key)) else {
            return Err(Violation("its claim was lost".to_owned()));
        };
        match cache.artifact {
            None => {
                (cache.artifact, cache.last_used) = (Some(artifact), now);
                self.hand_over(artifact)
            }
            Some(has) => {
                must!(has == artifact, "it has {has:?}");
                Ok(())
            }
        }
    }

    /// Records the owners that an output got, and the missing ones.
    pub(super) fn own_output(&mut self, output: Artifact, owners: &[Owner], missing: &[Owner]) -> Accepted {
        for owner in owners {
            let is_missing = missing.contains(owner);
            match *owner {
                Owner::ForBuild(build) if is_missing => {
                    must!(!self.is_live(build), "build {build} is open");
                }
                Owner::ForBuild(build) => {
                    must!(self.may_be_live(build), "build {build} has ended");
                    self.hand_over(output)?;
                    let record = self.artifacts.get_mut(&output);
                    if let Some(record) = record {
                        record.own(build);
                    }
                }
                Owner::ForTask(task) if is_missing => {
                    let there =
                        self.task_caches.get(&task).is_some_and(|cache| self.is_task_there(task, cache));
                    must!(!there, "task cache {task} is there");
                }
                Owner::ForTask(task) => self.publish(task, output)?,
                Owner::UnderClaim(claim) if is_missing => {
                    let cache = self.of_claim(claim).map(|key| &self.resource_caches[&key]);
                    let valid = cache.is_some_and(|cache| cache.artifact.is_none() && self.is_there(cache));
                    must!(!valid, "claim {claim} is valid");
                }
                Owner::UnderClaim(claim) => self.is_made(claim, output)?,
            }
        }
        Ok(())
    }

    pub(super) fn is_kept_and_sealed(&self, artifact: Artifact) -> bool {
        self.sealed(artifact).is_some() && self.is_kept(artifact)
    }

    /// Records that a cache or worker owns an artifact.
    pub(super) fn hand_over(&mut self, artifact: Artifact) -> Accepted {
        let record =
            self.artifacts.get_mut(&artifact).filter(|record| record.sealed.is_some() && !record.gone);
        let Some(record) = record else { return Err(Violation(format!("{artifact:?} is not there"))) };
        record.had_owner = true;
        Ok(())
    }

    pub(super) fn use_cache(&mut self, key: u8, user: User, outcome: &Outcome) -> Accepted {
        if self.judge_user(user, outcome)? {
            return Ok(());
        }
        let there = self.resource_caches.get(&key).is_some_and(|cache| self.is_there(cache));
        if let Outcome::Refused(refusal) = outcome {
            must!(refusal.is(Reason::CacheNotFound) && !there, "it is there");
            return Ok(());
        }
        let now = self.now;
        let Some(cache) = self.resource_caches.get_mut(&key) else {
            return Err(Violation("it was deleted".to_owned()));
        };
        cache.last_used = now;
        cache.users.insert(user);
        self.note_user(user);
        Ok(())
    }

    pub(super) fn release_cache(&mut self, key: u8, user: User, outcome: &Outcome) -> Accepted {
        must!(matches!(outcome, Outcome::Done), "a use can always be ended");
        // The store may have recorded an earlier end of the use.
        let used_until = Ord::min(self.used_until(user), self.now);
        if let Some(cache) = self.resource_caches.get_mut(&key)
            && cache.users.remove(&user)
        {
            cache.last_used = Ord::max(cache.last_used, used_until);
        }
        Ok(())
    }

    pub(super) fn delete_cache(&mut self, key: u8, outcome: &Outcome) -> Accepted {
        let Some(cache) = self.resource_caches.get(&key) else {
            let Outcome::Refused(refusal) = outcome else { return Err(Violation("it had gone".to_owned())) };
            must!(refusal.is(Reason::CacheNotFound), "another reason");
            return Ok(());
        };
        let may_be_used = |user: &User| match *user {
            User::OfBuild(build) => self.may_hold_on(build),
            User::OfWorkload(workload) => !self.is_settled(workload),
        };
        if let Outcome::Refused(refusal) = outcome {
            let may = (refusal.is(Reason::CacheInUse) && cache.users.iter().any(may_be_used))
                || (refusal.is(Reason::CacheNotFound) && !self.is_there(cache));
            must!(may, "no user uses it: {cache:?}");
            return Ok(());
        }
        // A cache with a lost claim may have been deleted. A caller that repeats its call takes
        // that for its own success.
        let user = cache.users.iter().find(|user| self.used_until(**user) > self.now);
        must!(user.is_none() || !self.is_there(cache), "it is used: {user:?}");
        self.deleted_caches.insert(cache.id);
        self.resource_caches.remove(&key);
        Ok(())
    }

    pub(super) fn ask_task(&mut self, task: u8, outcome: &Outcome) -> Accepted {
        let Outcome::Task { cache: id, artifact } = outcome else {
            return Err(Violation("it can always be asked for".to_owned()));
        };
        must!(!self.deleted_caches.contains(id), "it was deleted");
        let before = self.task_caches.get(&task);
        let known = before.filter(|cache| cache.id == *id);
        let lost = known.is_none() && before.is_some_and(|before| self.is_task_there(task, before));
        must!(!lost, "it is another now, and the one before is there: {before:?}");
        let has = known.and_then(|cache| cache.artifact);
        match artifact {
            Some(artifact) => self.that_is(*artifact, has)?,
            None => must!(!has.is_some_and(|has| self.has_bytes(has)), "it has the bytes of {has:?}"),
        }
        let users = known.map(|cache| cache.users.clone()).unwrap_or_default();
        self.task_caches.insert(task, TaskCache { id: *id, artifact: has, last_used: self.now, users });
        Ok(())
    }

    pub(super) fn use_tasks(&mut self, workload: u16, outcome: &Outcome) -> Accepted {
        let Outcome::Used { caches, answer } = outcome else { return Err(Violation("no answer".to_owned())) };
        if let Err(refusal) = answer {
            let is_there = |(task, id): &(u8, Uuid)| {
                self.task_caches
                    .get(task)
                    .is_some_and(|cache| cache.id == *id && self.is_task_there(*task, cache))
            };
            let may = (refusal.is(Reason::HolderSettled) && self.is_settled(workload))
                || (refusal.is(Reason::InputUnavailable) && !caches.iter().all(is_there));
            must!(may, "there is nothing in its way");
            return Ok(());
        }
        must!(!self.is_settled(workload), "it was settled");
        let now = self.now;
        for (task, id) in caches {
            must!(!self.deleted_caches.contains(id), "{id} was deleted");
            if let Some(cache) = self.task_caches.get_mut(task).filter(|cache| cache.id == *id) {
                cache.last_used = now;
                cache.users.insert(workload);
            }
        }
        self.holders.entry(workload).or_default().caches.extend(caches.iter().copied());
        Ok(())
    }

    /// Returns the artifact with which a volume of a task cache starts: the version when the volume
    /// was first planned.
    pub(super) fn starts_with(
        &self,
        task: u8,
        cache: Uuid,
        volume: Uuid,
        parent: Option<Uuid>,
        missing: &str,
    ) -> Result<Option<Artifact>, Violation> {
        let of_parent = parent.and_then(|parent| self.volumes.get(&parent)?.artifact);
        let is_missing = |artifact: &&Artifact| artifact_id(**artifact).to_string() == missing;
        let from = of_parent.or_else(|| self.artifacts.keys().find(is_missing).copied());
        must!(from.is_some() || (parent.is_none() && missing.is_empty()), "its version was never made");
        if let Some(known) = self.volumes.get(&volume) {
            // A version that was missing may be gone by now.
            let same = from == known.from || (known.created && from.is_none());
            must!(same, "it started with {:?}", known.from);
            return Ok(known.from);
        }
        let cache = self.task_caches.get(&task).filter(|known| known.id == cache);
        let version = cache.and_then(|cache| cache.artifact);
        match from {
            Some(_) => must!(from == version, "its version is {version:?}"),
            None => {
                let there = cache.is_some_and(|cache| self.is_task_there(task, cache));
                must!(!(there && version.is_some_and(|it| self.has_bytes(it))), "{version:?} is its version");
            }
        }
        Ok(from)
    }

    pub(super) fn publish_task(&mut self, task: u8, artifact: Artifact, outcome: &Outcome) -> Accepted {
        let there = self.task_caches.get(&task).is_some_and(|cache| self.is_task_there(task, cache));
        if let Outcome::Refused(refusal) = outcome {
            let may = (refusal.is(Reason::CacheNotFound) && !there)
                || (refusal.is(Reason::ArtifactNotFound) && !self.is_kept_and_sealed(artifact));
            must!(may, "there is nothing in its way");
            return Ok(());
        }
        self.publish(task, artifact)
    }

    /// Records the latest version of a task cache.
    fn publish(&mut self, task: u8, artifact: Artifact) -> Accepted {
        let now = self.now;
        let Some(cache) = self.task_caches.get_mut(&task) else {
            return Err(Violation(format!("task cache {task} was deleted")));
        };
        (cache.artifact, cache.last_used) = (Some(artifact), now);
        self.hand_over(artifact)
    }

    pub(super) fn delete_task(&mut self, task: u8, outcome: &Outcome) -> Accepted {
        must!(matches!(outcome, Outcome::Done), "it can always be deleted");
        if let Some(cache) = self.task_caches.remove(&task) {
            self.deleted_caches.insert(cache.id);
        }
        Ok(())
    }
}
