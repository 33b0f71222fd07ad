//! Orphans: items on workers that are unknown to a restored store, until a decision.

use std::collections::BTreeSet;

use domain::ArtifactId;
use rpc::Reason;
use uuid::Uuid;

use super::{Accepted, Outcome, State, Violation, Volume, artifact_id, id, must};
use crate::model::operations::Artifact;

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Orphans {
    /// Orphans without a decision.
    undecided: BTreeSet<Uuid>,
    /// Orphans that were described in the current incarnation of their worker.
    described: BTreeSet<Uuid>,
    /// Reported items that are unknown and not garbage.
    named: BTreeSet<Uuid>,
    /// Purged orphans that were never described, so that the store does not know their parents.
    of_unknown_parent: BTreeSet<Uuid>,
    /// Items that were handed out while the store did not know one of their children.
    blindly: BTreeSet<Uuid>,
}

/// Returns the id of a volume that was made after the backup.
pub(crate) fn stray_id(worker: u8, upload: u16) -> Uuid {
    id(8, u128::from(worker) << 16 | u128::from(upload))
}

/// Description of a volume, from its worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct OrphanDescription {
    pub(crate) volume: Uuid,
    pub(crate) parent: Option<Uuid>,
    /// Artifact and content of which it is a replica.
    pub(crate) replica: Option<(Artifact, u8)>,
}

impl State {
    /// Returns one of the orphans, or of the orphaned volumes.
    pub(crate) fn any_orphan(&self, which: u8, volumes_only: bool) -> Option<Uuid> {
        let wanted = |id: &&Uuid| !volumes_only || self.volumes.contains_key(*id);
        let all: Vec<_> = self.orphans.undecided.iter().filter(wanted).collect();
        all.get(usize::from(which).checked_rem(all.len())?).map(|id| **id)
    }

    pub(crate) fn is_orphan(&self, id: Uuid) -> bool {
        self.orphans.undecided.contains(&id)
    }

    /// Returns the orphaned volumes on a worker, as its gateway would describe them.
    pub(crate) fn to_describe(&self, worker: u8) -> Vec<OrphanDescription> {
        let of_worker = self.orphans.undecided.iter().filter_map(|id| Some((*id, self.volumes.get(id)?)));
        let of_worker = of_worker.filter(|(_, volume)| volume.worker == worker);
        let describe = |(volume, it): (Uuid, &Volume)| OrphanDescription {
            volume,
            parent: it.parent,
            replica: it.remembered(),
        };
        of_worker.map(describe).collect()
    }

    pub(super) fn stray(&mut self, worker: u8, upload: u16, content: u8) {
        let stray = Volume {
            worker,
            artifact: Some(Artifact::Upload(upload)),
            from: None,
            parent: None,
            attempt: None,
            claimed_until: Some(i64::MIN),
            complete: Some(content),
            settled: false,
            created: true,
            revoked: true,
            dropped: false,
            on_disk: true,
            late: true,
        };
        self.volumes.entry(stray_id(worker, upload)).or_insert(stray);
    }

    pub(super) fn new_life(&mut self, outcome: &Outcome) -> Accepted {
        must!(matches!(outcome, Outcome::Done), "a worker that remembers more proves it");
        self.life += 1;
        Ok(())
    }

    /// Records a judged report that named `listed`, of which `unknown` are garbage.
    pub(super) fn named(&mut self, worker: u8, listed: &[Uuid], unknown: &[Uuid]) -> Accepted {
        for id in unknown {
            must!(!self.is_orphan(*id), "{id} is an orphan, and to be destroyed");
        }
        if std::mem::replace(&mut self.workers[usize::from(worker)].life, self.life) == self.life {
            return Ok(());
        }
        must!(unknown.is_empty(), "what its worker made in another life is to be destroyed: {unknown:?}");
        let strays = listed.iter().filter(|id| {
            let volume = self.volumes.get(*id).filter(|volume| volume.on_disk && volume.revoked);
            volume.and_then(|volume| volume.remembered()).is_some_and(|(artifact, _)| match artifact {
                Artifact::Upload(upload) => stray_id(worker, upload) == **id,
                Artifact::Output(_) => false,
            })
        });
        self.orphans.named.extend(strays);
        Ok(())
    }

    pub(super) fn describe(&mut self, worker: u8, outcome: &Outcome) -> Accepted {
        must!(matches!(outcome, Outcome::Done), "it was refused");
        let described: Vec<_> = self.to_describe(worker).into_iter().map(|it| it.volume).collect();
        self.orphans.described.extend(described);
        Ok(())
    }

    /// Records that the orphans of a worker are not described any more, or that the worker is
    /// forgotten.
    pub(super) fn leave_orphans(&mut self, worker: u8, for_good: bool) {
        let (volumes, containers) = (&self.volumes, &self.containers);
        let is_elsewhere = |id: &Uuid| {
            let on = volumes.get(id).map(|it| it.worker).or(containers.get(id).map(|it| it.worker));
            on.is_some_and(|on| on != worker)
        };
        self.orphans.described.retain(is_elsewhere);
        if for_good {
            self.orphans.undecided.retain(is_elsewhere);
            self.orphans.named.retain(is_elsewhere);
        }
    }

    /// Returns whether a worker may have orphans, and whether it certainly has.
    pub(super) fn holds_orphans(&self, worker: u8) -> (bool, bool) {
        let on_disk = |id: &Uuid| self.is_on_disk(*id);
        let on = |id: &&Uuid| {
            let volume = self.volumes.get(*id).map(|it| it.worker);
            volume.or(self.containers.get(*id).map(|it| it.worker)) == Some(worker)
        };
        let mut all = self.orphans.undecided.iter().filter(on);
        let certainly = all.clone().any(on_disk);
        (all.next().is_some() || self.workers[usize::from(worker)].life != self.life, certainly)
    }

    /// Returns an orphaned, described child, which prevents its parent from being handed out.
    pub(super) fn orphaned_child(&self, parent: Uuid) -> Option<Uuid> {
        let is_child = |id: &&Uuid| self.volumes.get(*id).is_some_and(|volume| volume.parent == Some(parent));
        self.orphans.described.iter().filter(|id| self.is_orphan(**id)).find(is_child).copied()
    }

    /// Records which of the handed-out `handles` have children on disk that the store does not
    /// know. A gateway cannot delete such a parent, and is told again.
    pub(super) fn hand_out_blindly(&mut self, handles: &[Uuid]) {
        let is_unknown = |child: &Uuid| {
            let is_silent = self.is_orphan(*child) && !self.orphans.described.contains(child);
            is_silent || self.orphans.of_unknown_parent.contains(child)
        };
        let unknown = self.volumes.iter().filter(|(id, child)| child.on_disk && is_unknown(id));
        let parents: BTreeSet<_> = unknown.filter_map(|(_, child)| child.parent).collect();
        self.orphans.blindly.extend(handles.iter().filter(|id| parents.contains(id)));
    }

    pub(super) fn was_handed_out_blindly(&self, id: Uuid) -> bool {
        self.orphans.blindly.contains(&id)
    }

    pub(super) fn adopt_orphan(&mut self, owner: Option<u16>, keep: i64, outcome: &Outcome) -> Accepted {
        let Outcome::Decided { about: id, answer } = outcome else {
            return Err(Violation("no answer".to_owned()));
        };
        let replica = self.volumes.get(id).and_then(Volume::remembered);
        let record = replica.and_then(|(artifact, _)| self.artifacts.get(&artifact));
        let kept = replica.is_some_and(|(artifact, _)| self.is_kept(artifact));
        let has_other = replica.is_some_and(|(_, content)| {
            record.and_then(|record| record.sealed).is_some_and(|sealed| sealed != content)
        });
        let adopted = match answer {
            Err(refusal) => {
                let decided = !self.is_orphan(*id) || !self.is_on_disk(*id);
                let adoptable = self.orphans.described.contains(id) && replica.is_some();
                let may = (refusal.is(Reason::OwnerEnded) && owner.is_some_and(|build| !self.is_live(build)))
                    || (refusal.is(Reason::NotAdoptable) && !adoptable)
                    || (refusal.is(Reason::ArtifactSealed) && has_other)
                    || (refusal.is(Reason::BytesGone) && (decided || (record.is_some() && !kept)))
                    || ((refusal.is(Reason::VolumeNotFound) || refusal.is(Reason::NotOrphaned)) && decided);
                must!(may, "there is nothing in its way");
                return Ok(());
            }
            Ok(adopted) => *adopted,
        };
        let Some((artifact, content)) = replica else {
            return Err(Violation("its artifact is unknown".to_owned()));
        };
        must!(adopted == Some(artifact_id(artifact)), "it is a replica of {artifact:?}");
        must!(owner.is_none_or(|build| self.may_be_live(build)), "its owner has ended");
        must!(!(kept && has_other), "{artifact:?} has other bytes");
        self.orphans.undecided.remove(id);
        if record.is_none_or(|record| record.sealed != Some(content)) {
            if record.is_none_or(|record| record.gone || record.sealed.is_some()) {
                let fresh = self.open(None);
                self.artifacts.insert(artifact, fresh);
            }
            self.revoke_others(artifact, content);
        }
        if let Some(record) = self.artifacts.get_mut(&artifact) {
            record.sealed = Some(content);
        }
        if let Some(volume) = self.volumes.get_mut(id) {
            (volume.settled, volume.revoked, volume.late) = (true, false, false);
            (volume.attempt, volume.from) = (None, None);
        }
        self.undelete(artifact, owner, keep, &Outcome::Done)
    }

    pub(super) fn purge_orphan(&mut self, outcome: &Outcome) -> Accepted {
        let Outcome::Decided { about: id, answer } = outcome else {
            return Err(Violation("no answer".to_owned()));
        };
        if let Err(refusal) = answer {
            let may = refusal.is(Reason::NotOrphaned) || refusal.is(Reason::UnknownId);
            must!(may && !(self.is_orphan(*id) && self.is_on_disk(*id)), "it is an orphan");
            return Ok(());
        }
        if self.orphans.undecided.remove(id) {
            if !self.orphans.described.contains(id) {
                self.orphans.of_unknown_parent.insert(*id);
            }
            if let Some(volume) = self.volumes.get_mut(id) {
                (volume.revoked, volume.late) = (true, false);
            }
            if let Some(container) = self.containers.get_mut(id) {
                (container.revoked, container.late) = (true, false);
            }
            return Ok(());
        }
        let goes_on = self.volumes.get(id).is_some_and(|volume| !volume.revoked);
        must!(!goes_on, "it was adopted");
        Ok(())
    }

    /// Replaces the orphans. Checks that no orphan on a disk was forgotten.
    pub(crate) fn update_orphans(
        &mut self,
        seen: &BTreeSet<Uuid>,
        is_known: impl Fn(&Uuid) -> bool,
    ) -> Accepted {
        let lost = self.orphans.undecided.iter().find(|id| !seen.contains(id) && self.is_on_disk(**id));
        must!(lost.is_none(), "the orphan {lost:?} is gone without a decision");
        let named = std::mem::take(&mut self.orphans.named);
        let missed = named.iter().find(|id| !seen.contains(id) && !is_known(id));
        must!(missed.is_none(), "{missed:?} was made in another life, and is not orphaned");
        self.orphans.described.retain(|id| seen.contains(id));
        self.orphans.undecided.clone_from(seen);
        Ok(())
    }
}

impl Volume {
    /// Returns the artifact that a worker remembers for a replica without a parent.
    fn remembered(&self) -> Option<(Artifact, u8)> {
        self.artifact.zip(self.complete).filter(|_| self.is_replica() && self.parent.is_none())
    }
}

/// Result of a decision about an orphan, or its rejection.
pub(crate) type Decision = Result<Option<ArtifactId>, rpc::Refusal>;
