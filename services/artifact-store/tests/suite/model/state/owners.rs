//! Builds, and changes of the owners of existing artifacts.

use rpc::{Reason, Refusal};

use super::{Accepted, Build, Outcome, Record, Restored, State, Violation, must};
use crate::model::operations::{Artifact, Status, TREES};

impl State {
    pub(super) fn put_build(&mut self, id: u16, fresh: Build, outcome: &Outcome) -> Accepted {
        let settled = self.is_settled(fresh.ends_with);
        let mut others = self.builds.iter().filter(|(other, _)| **other != id).map(|(_, other)| other);
        let taken = fresh.job.is_some() && others.any(|other| other.job == fresh.job);
        if let Outcome::Refused(refusal) = outcome {
            let may = (refusal.is(Reason::BuildEnded)
                && (settled || (self.builds.contains_key(&id) && !self.is_live(id))))
                || (refusal.is(Reason::BuildExists) && taken);
            must!(may, "nothing has ended it");
            return Ok(());
        }
        must!(!settled, "its workload was settled");
        must!(!taken, "its number is that of another build");
        must!(!self.builds.contains_key(&id) || self.may_be_live(id), "it has ended");
        if let Some((job, number)) = fresh.job {
            let latest = self.jobs.entry(job).or_insert(number);
            *latest = Ord::max(*latest, number);
        }
        let (keep, term_ends_at) = (fresh.keep, fresh.term_ends_at);
        let build = self.builds.entry(id).or_insert(fresh);
        (build.keep, build.term_ends_at) = (keep, term_ends_at);
        Ok(())
    }

    pub(super) fn end_build(&mut self, id: u16, status: Status, outcome: &Outcome) -> Accepted {
        let (live, now) = (self.is_live(id), self.now);
        let Some(build) = self.builds.get_mut(&id) else {
            return Err(Violation("it was never put".to_owned()));
        };
        if let Outcome::Refused(refusal) = outcome {
            must!(refusal.is(Reason::BuildEnded) && !live, "nothing has ended it");
            return Ok(());
        }
        let same = build.ended.is_none_or(|(_, before)| before == status) && !build.deleted;
        // The effect of a term or deletion is unknown.
        must!(same || status == Status::Aborted || !build.bound, "it has ended otherwise");
        if build.ended.is_none() && !build.deleted {
            build.ended = Some((now, status));
            // A build that its term ends is aborted.
            build.ended_by_caller = status != Status::Aborted;
        }
        Ok(())
    }

    pub(super) fn delete_build(&mut self, id: u16, outcome: &Outcome) -> Accepted {
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

    pub(super) fn add_owner(&mut self, artifacts: &[Artifact], build: u16, outcome: &Outcome) -> Accepted {
        let Outcome::Owned { answer, again } = outcome else {
            return Err(Violation("no answer".to_owned()));
        };
        if let Err(refusal) = answer {
            let may = (refusal.is(Reason::OwnerEnded) && !self.is_live(build))
                || self.may_be_missing(artifacts, refusal);
            must!(may, "there is nothing in its way");
            // A call without an answer may have succeeded.
            for record in self.records(artifacts).filter(|_| *again) {
                record.had_owner = true;
                record.taken_from.remove(&build);
            }
            return Ok(());
        }
        must!(self.may_be_live(build), "the build has ended");
        self.are_there(artifacts)?;
        self.records(artifacts).for_each(|record| record.own(build));
        Ok(())
    }

    pub(super) fn remove_owner(&mut self, artifacts: &[Artifact], build: u16, outcome: &Outcome) -> Accepted {
        let Outcome::Owned { answer, again } = outcome else {
            return Err(Violation("no answer".to_owned()));
        };
        if let Err(refusal) = answer {
            must!(*again || self.may_be_missing(artifacts, refusal), "there is nothing in its way");
            // A call without an answer may have succeeded, and some artifacts may be gone since.
            for record in self.records(artifacts).filter(|_| *again) {
                record.owners.remove(&build);
            }
            return Ok(());
        }
        self.are_there(artifacts)?;
        for record in self.records(artifacts) {
            record.owners.remove(&build);
            record.taken_from.insert(build);
        }
        Ok(())
    }

    /// Returns whether the artifact of the rejection may be missing.
    fn may_be_missing(&self, artifacts: &[Artifact], refusal: &Refusal) -> bool {
        let kept = self.kept();
        refusal.is(Reason::ArtifactNotFound) && artifacts.iter().any(|artifact| !kept.contains_key(artifact))
    }

    fn are_there(&self, artifacts: &[Artifact]) -> Accepted {
        let gone = |artifact: &&Artifact| self.artifacts.get(artifact).is_none_or(|record| record.gone);
        let gone = artifacts.iter().find(gone);
        must!(gone.is_none(), "{gone:?} is not there");
        Ok(())
    }

    fn records(&mut self, artifacts: &[Artifact]) -> impl Iterator<Item = &mut Record> {
        self.artifacts.iter_mut().filter(|(id, _)| artifacts.contains(id)).map(|(_, record)| record)
    }

    pub(super) fn undelete(
        &mut self,
        artifact: Artifact,
        owner: Option<u16>,
        keep: i64,
        outcome: &Outcome,
    ) -> Accepted {
        let kept = self.is_kept(artifact);
        if let Outcome::Refused(refusal) = outcome {
            let may = (refusal.is(Reason::OwnerEnded) && owner.is_some_and(|build| !self.is_live(build)))
                || (refusal.is(Reason::ArtifactNotFound) && (!kept || self.sealed(artifact).is_none()))
                || (refusal.is(Reason::BytesGone) && !(kept && self.has_bytes(artifact)));
            must!(may, "there is nothing in its way");
            return Ok(());
        }
        must!(owner.is_none_or(|build| self.may_be_live(build)), "its owner has ended");
        let now = self.now;
        let was_marked =
            !kept || self.volumes.values().any(|volume| volume.is_of(artifact) && volume.dropped);
        let Some(record) = self.artifacts.get_mut(&artifact) else {
            return Err(Violation("it was never made".to_owned()));
        };
        must!(!record.gone || record.sealed.is_some(), "it came back, and was never sealed");
        record.restored = match record.gone {
            true => Some(Restored::Certainly),
            false if was_marked => record.restored.or(Some(Restored::Perhaps)),
            false => record.restored,
        };
        record.gone = false;
        record.came_back |= was_marked;
        match owner {
            Some(build) => record.own(build),
            None => record.kept_until = Ord::max(record.kept_until, now + keep),
        }
        Ok(())
    }

    pub(super) fn drop_replica(
        &mut self,
        artifact: Artifact,
        worker: u8,
        force: bool,
        outcome: &Outcome,
    ) -> Accepted {
        let kept = self.is_kept(artifact);
        let sealed = self.sealed(artifact);
        let in_store = sealed.is_some_and(|content| content >= TREES);
        let certain = |state: &Self, here: bool| {
            sealed.is_some_and(|content| {
                let mut replicas = state.replicas(artifact, content);
                replicas.any(|(_, on)| (on == worker) == here && !state.workers[usize::from(on)].unconfirmed)
            })
        };
        if let Outcome::Refused(refusal) = outcome {
            let may = (refusal.is(Reason::ArtifactNotFound) && !kept)
                || (refusal.is(Reason::LastReplica) && !force && !certain(self, false) && !in_store);
            must!(may, "there is nothing in its way");
            return Ok(());
        }
        let may_be_elsewhere = self.volumes.values().any(|it| {
            it.artifact == Some(artifact)
                && it.worker != worker
                && it.complete.is_some()
                && it.complete == sealed
        });
        let last = kept && certain(self, true) && !may_be_elsewhere && !in_store;
        must!(force || !last, "it was the last that is kept");
        for volume in self.volumes.values_mut() {
            if volume.is_of(artifact) && volume.worker == worker && volume.is_replica() {
                volume.dropped |= volume.complete.is_some() && !volume.revoked;
                volume.revoked |= volume.complete.is_some();
            }
        }
        Ok(())
    }
}
