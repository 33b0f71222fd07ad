//! Workers: reports and deletions, and the effects of new sessions, new incarnations and
//! forgetting.

use rpc::Reason;

use super::accept::handle;
use super::{Accepted, Outcome, ReportValidity, Restored, State, Violation, must};
use crate::model::operations::{Artifact, Delivery, Remains, TREES};

impl State {
    pub(super) fn report(&mut self, worker: u8, way: Delivery, outcome: &Outcome) -> Accepted {
        let (response, listed) = match outcome {
            Outcome::NotReported { refusal, validity } => {
                let is_of_former = refusal.is(Reason::StaleSession) || refusal.is(Reason::StaleIncarnation);
                let is_overtaken = refusal.is(Reason::StaleReport);
                let may = match validity {
                    _ if refusal.is(Reason::ReportTruncated) => way == Delivery::Cut,
                    ReportValidity::Good => false,
                    ReportValidity::OfFormerSession => is_of_former,
                    ReportValidity::Overtaken => is_overtaken,
                    ReportValidity::OfForgotten => is_of_former || is_overtaken,
                    ReportValidity::Doubtful => {
                        is_of_former || is_overtaken || refusal.is(Reason::Unavailable)
                    }
                };
                must!(may, "it is good");
                return Ok(());
            }
            Outcome::Reported { response, validity, listed } => {
                must!(matches!(validity, ReportValidity::Good | ReportValidity::Doubtful), "it is too late");
                must!(way != Delivery::Cut, "it was cut off");
                (response, listed)
            }
            _ => return Err(Violation("no answer".to_owned())),
        };
        let of_worker = &mut self.workers[usize::from(worker)];
        (of_worker.unconfirmed, of_worker.silent) = (false, false);
        let unknown = response.unknown_volume_handles.iter().chain(&response.unknown_container_handles);
        let unknown = unknown.map(|text| handle(text)).collect::<Result<Vec<_>, _>>()?;
        self.named(worker, listed, &unknown)?;
        for id in unknown {
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

    pub(super) fn sweep(&mut self, worker: u8, destroy: bool, outcome: &Outcome) -> Accepted {
        let Outcome::Swept(handles) = outcome else {
            return Err(Violation("what is marked was not handed out".to_owned()));
        };
        let kept = self.kept();
        for id in handles {
            let need = self.need_of_volume(*id, &kept).or_else(|| self.need_of_container(*id));
            must!(need.is_none(), "{id} is handed out, and needed: {need:?}");
            must!(!self.is_orphan(*id), "{id} is handed out, and orphaned");
            let child = self.orphaned_child(*id);
            must!(child.is_none(), "{id} is handed out, and its child {child:?} is an orphan");
        }
        self.hand_out_blindly(handles);
        self.workers[usize::from(worker)].doomed.extend(handles);
        if !destroy {
            return Ok(());
        }
        for id in std::mem::take(&mut self.workers[usize::from(worker)].doomed) {
            let child = self.volumes.iter().find(|(_, it)| it.parent == Some(id) && it.on_disk && !it.late);
            if child.is_some() && self.was_handed_out_blindly(id) {
                continue;
            }
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

    pub(super) fn new_session(&mut self, worker: u8) {
        self.workers[usize::from(worker)].doomed.clear();
        for volume in self.volumes.values_mut().filter(|it| it.worker == worker && it.attempt.is_some()) {
            volume.revoked |= !volume.created;
        }
        for container in self.containers.values_mut().filter(|it| it.worker == worker) {
            container.revoked |= !container.created;
        }
    }

    pub(super) fn new_incarnation(&mut self, worker: u8, left: Remains) {
        let of_worker = &mut self.workers[usize::from(worker)];
        of_worker.doomed.clear();
        of_worker.later.clear();
        of_worker.unconfirmed = true;
        let mut count = 0;
        for volume in self.volumes.values_mut().filter(|it| it.worker == worker) {
            volume.revoked |= !volume.created;
            count += u32::from(volume.on_disk);
            volume.on_disk &= match left {
                Remains::Everything => true,
                Remains::Half => count.is_multiple_of(2),
                Remains::Nothing => false,
            };
        }
        for container in self.containers.values_mut().filter(|it| it.worker == worker) {
            (container.revoked, container.on_disk) = (true, false);
        }
        self.leave_orphans(worker, false);
    }

    /// Forgets a worker. Its contents are unknown from then on, and its reports show what still
    /// exists.
    pub(super) fn forget_worker(&mut self, worker: u8, force: bool, outcome: &Outcome) -> Accepted {
        if let Outcome::Refused(refusal) = outcome {
            let (holds_orphans, _) = self.holds_orphans(worker);
            let may = (refusal.is(Reason::LastReplica) && self.may_hold_last(worker))
                || (refusal.is(Reason::HoldsOrphans) && holds_orphans);
            must!(may && !force, "there is nothing in its way");
            return Ok(());
        }
        // Its owners let go as well.
        self.base.retain(|(of, _), _| *of != worker);
        let last = self.kept().into_iter().find(|(artifact, _)| self.is_last_on(*artifact, worker));
        must!(force || last.is_none(), "it has the last replica of {last:?}");
        let (_, holds_orphans) = self.holds_orphans(worker);
        must!(force || !holds_orphans, "the worker has orphans without a decision");
        self.leave_orphans(worker, true);
        for (id, volume) in self.volumes.iter_mut().filter(|(_, it)| it.worker == worker) {
            (volume.revoked, volume.late) = (true, true);
            self.forgotten.insert(*id);
            // A restored artifact may be deleted again with its worker.
            if let Some(record) = volume.artifact.and_then(|artifact| self.artifacts.get_mut(&artifact)) {
                record.restored = record.restored.map(|_| Restored::Perhaps);
            }
        }
        for (id, container) in self.containers.iter_mut().filter(|(_, it)| it.worker == worker) {
            (container.revoked, container.late) = (true, true);
            self.forgotten.insert(*id);
        }
        let of_worker = &mut self.workers[usize::from(worker)];
        (of_worker.unconfirmed, of_worker.silent) = (false, true);
        of_worker.doomed.clear();
        Ok(())
    }

    /// Returns whether the only certain bytes of an artifact are on this worker.
    fn is_last_on(&self, artifact: Artifact, worker: u8) -> bool {
        let Some(content) = self.sealed(artifact).filter(|content| *content < TREES) else { return false };
        let may_be_elsewhere = self
            .volumes
            .values()
            .any(|it| it.is_of(artifact) && it.worker != worker && it.complete == Some(content));
        !may_be_elsewhere && self.replicas(artifact, content).any(|(_, on)| on == worker)
    }

    /// Returns whether the worker may have the last replica of a kept artifact.
    fn may_hold_last(&self, worker: u8) -> bool {
        self.volumes.values().filter(|it| it.worker == worker && it.is_replica()).any(|volume| {
            let Some((artifact, content)) = volume.artifact.zip(volume.complete) else { return false };
            let Some(record) = self.artifacts.get(&artifact).filter(|record| !record.gone) else {
                return false;
            };
            let elsewhere = self
                .replicas(artifact, content)
                .any(|(_, on)| on != worker && !self.workers[usize::from(on)].unconfirmed);
            let went = volume.revoked && !record.came_back;
            record.sealed == Some(content) && content < TREES && !elsewhere && !went
        })
    }
}
