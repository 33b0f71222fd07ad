//! Operations with their answers, and whether the answers are permitted.

use std::collections::BTreeSet;

use rpc::pb::artifacts as pb;
use rpc::{Reason, Refusal};
use uuid::Uuid;

use super::{
    Accepted, Build, CLAIM_TERM, Container, Outcome, Record, State, Violation, Volume, artifact_id, must,
};
use crate::model::operations::{Artifact, EVERY_ATTEMPT, Make, Operation, Outputs, Status, TREES};

/// Parses a handle in an answer.
pub(super) fn handle(text: &str) -> Result<Uuid, Violation> {
    Uuid::try_parse(text).map_err(|_| Violation(format!("{text:?} is no handle")))
}

impl State {
    /// Applies the store's answer to an operation, or rejects it.
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
            O::PutBuild { build, ends_with, keep, term, job } => {
                let term_ends_at = self.now + i64::from(term);
                let (keep, bound) = (keep.into(), false);
                let fresh = Build {
                    ends_with,
                    keep,
                    term_ends_at,
                    bound,
                    ended: None,
                    ended_by_caller: false,
                    deleted: false,
                    job,
                };
                self.put_build(build, fresh, outcome)
            }
            O::EndBuild { build, status } => self.end_build(build, status, outcome),
            O::DeleteBuild { build } => self.delete_build(build, outcome),
            O::Create { upload, owner } => self.create(&[upload], owner, None, outcome),
            O::CreateAll { ref uploads, owner } => self.create(uploads, owner, None, outcome),
            O::HandOver { upload, owner, content } => self.create(&[upload], owner, Some(content), outcome),
            O::AddOwner { ref artifacts, build } => self.add_owner(artifacts, build, outcome),
            O::RemoveOwner { ref artifacts, build } => self.remove_owner(artifacts, build, outcome),
            O::Plan { transfer, artifact, worker, make } => {
                self.plan(transfer, artifact, worker, make, outcome)
            }
            O::Progress { transfer } => self.progress(transfer, outcome),
            O::Arrive { transfer, content } => self.arrive(transfer, content, outcome),
            O::Abandon { transfer } => self.abandon(transfer, outcome),
            O::Seal { upload, content } => self.seal(Artifact::Upload(upload), content, outcome),
            O::Adopt { content, owner } => self.adopt(content, owner, outcome),
            O::Undelete { artifact, owner, keep } => self.undelete(artifact, owner, keep.into(), outcome),
            O::Drop { artifact, worker, force } => self.drop_replica(artifact, worker, force, outcome),
            O::AskCache { cache, claim, user } => self.ask_cache(cache, claim, user, outcome),
            O::RenewClaim { claim } => self.renew_claim(claim, outcome),
            O::PutCache { claim, artifact } => self.put_cache(claim, artifact, outcome),
            O::UseCache { cache, user } => self.use_cache(cache, user, outcome),
            O::ReleaseCache { cache, user } => self.release_cache(cache, user, outcome),
            O::DeleteCache { cache } => self.delete_cache(cache, outcome),
            O::AskTask { task } => self.ask_task(task, outcome),
            O::PublishTask { task, artifact } => self.publish_task(task, artifact, outcome),
            O::DeleteTask { task } => self.delete_task(task, outcome),
            O::Touch { workload, attempt } => self.touch((workload, attempt), outcome),
            O::Fail { .. } => self.fail(outcome),
            O::MarkContainer { .. } => self.mark_container(outcome),
            O::MarkVolume { .. } => self.mark_volume(outcome),
            O::Accept { workload, ref pins, build } => self.pin(workload, pins, build, outcome),
            O::PutBase { worker, resource, artifact } => self.put_base((worker, resource), artifact, outcome),
            O::UseTasks { workload, .. } => self.use_tasks(workload, outcome),
            O::Prepare { workload, attempt, worker, make } => {
                self.prepare(workload, attempt, worker, make, outcome)
            }
            O::Prepared { workload, attempt } => self.prepared((workload, attempt), outcome),
            O::Finish { workload, attempt, content } => self.finish((workload, attempt), content, outcome),
            O::Settle { workload, attempt, status, ref outputs, build } => {
                self.settle(workload, attempt, status, outputs, build, outcome)
            }
            O::EndAttempt { workload, attempt } => {
                must!(matches!(outcome, Outcome::Done), "an attempt can always be ended");
                let now = self.now;
                let holder = self.holders.entry(workload).or_default();
                holder.attempts.insert(attempt, None);
                holder.ended.entry(attempt).or_insert(now);
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
            O::ForgetWorker { worker, force } => self.forget_worker(worker, force, outcome),
            O::Trespass(tried) => self.trespass(tried, outcome),
            O::Stray { worker, upload, content } => {
                self.stray(worker, upload, content);
                Ok(())
            }
            O::NewLife { .. } => self.new_life(outcome),
            O::Describe { worker } => self.describe(worker, outcome),
            O::AdoptOrphan { owner, keep, .. } => self.adopt_orphan(owner, keep.into(), outcome),
            O::PurgeOrphan { .. } => self.purge_orphan(outcome),
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

    /// Creates artifacts, all or none. `content`: of a tree, which is sealed at once.
    fn create(
        &mut self,
        uploads: &[u16],
        owner: Option<u16>,
        content: Option<u8>,
        outcome: &Outcome,
    ) -> Accepted {
        let artifacts = uploads.iter().map(|upload| Artifact::Upload(*upload));
        if let Outcome::Refused(refusal) = outcome {
            let owner_ended = owner.is_some_and(|build| !self.is_live(build));
            let may_be_taken = |artifact: Artifact| {
                self.artifacts.get(&artifact).is_some_and(|record| {
                    let another = match owner {
                        Some(build) => !(record.owners.contains(&build) && self.holds_on(build)),
                        None => record.had_owner,
                    };
                    another || !record.is_made_of(content) || !self.is_kept(artifact)
                })
            };
            let may = (refusal.is(Reason::OwnerEnded) && owner_ended)
                || (refusal.is(Reason::ArtifactExists) && artifacts.clone().any(may_be_taken));
            must!(may, "it could be made, or was");
            return Ok(());
        }
        for artifact in artifacts {
            self.create_one(artifact, owner, content)?;
        }
        Ok(())
    }

    fn create_one(&mut self, artifact: Artifact, owner: Option<u16>, content: Option<u8>) -> Accepted {
        let record = self.artifacts.get(&artifact);
        if let Some(record) = record.filter(|record| !record.gone) {
            // It still exists, or was deleted since the last check and is another artifact now.
            let is_kept = self.is_kept(artifact);
            must!(record.is_made_of(content) || !is_kept, "{artifact:?} is there and is another");
            if !is_kept && let Some(record) = self.artifacts.get_mut(&artifact) {
                record.doubtful = true;
            }
            return Ok(());
        }
        must!(owner.is_none_or(|build| self.may_be_live(build)), "its owner has ended");
        self.artifacts.insert(artifact, Record { sealed: content, ..self.open(owner) });
        Ok(())
    }

    pub(super) fn open(&self, owner: Option<u16>) -> Record {
        Record {
            sealed: None,
            owners: owner.into_iter().collect(),
            had_owner: owner.is_some(),
            created_at: self.now,
            abandoned: false,
            taken_from: BTreeSet::new(),
            kept_until: i64::MIN,
            restored: None,
            came_back: false,
            gone: false,
            doubtful: false,
        }
    }

    /// Replaces a deleted artifact that was created again, as an open one.
    pub(crate) fn reopen(&mut self, artifact: Artifact) {
        if let Some(record) = self.artifacts.get_mut(&artifact) {
            record.sealed = None;
            record.gone = false;
            // It is unknown which call created it, so that no owner is certain.
            record.owners.clear();
            record.taken_from.clear();
            record.kept_until = i64::MIN;
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
                let unconfirmed = self.workers[usize::from(worker)].unconfirmed;
                let may = (refusal.is(Reason::ArtifactNotFound) && !self.is_kept(artifact))
                    || (refusal.is(Reason::Unavailable) && unconfirmed)
                    || (refusal.is(Reason::NotAttended) && self.workers[usize::from(worker)].silent);
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
            pb::PlanOutcome::InProgress => must!(known.is_some(), "no transfer makes it"),
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
                    dropped: false,
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
            _ => must!(!(kept && has_claim && !volume.revoked), "its claim is valid"),
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
        self.revoke_others(artifact, content);
        let Some(record) = self.artifacts.get_mut(&artifact) else {
            return Err(Violation("it was never made".to_owned()));
        };
        must!(!record.gone, "it had gone");
        record.sealed = Some(content);
        Ok(())
    }

    /// Marks the volumes of a sealed artifact that have other bytes.
    pub(super) fn revoke_others(&mut self, artifact: Artifact, content: u8) {
        for volume in self.volumes.values_mut() {
            let other = volume.complete.is_some_and(|complete| complete != content);
            if volume.artifact == Some(artifact) && volume.attempt.is_none() && other {
                volume.revoked = true;
            }
        }
    }

    fn adopt(&mut self, content: u8, owner: Option<u16>, outcome: &Outcome) -> Accepted {
        match outcome {
            Outcome::Refused(refusal) => {
                let may = refusal.is(Reason::OwnerEnded) && owner.is_some_and(|build| !self.is_live(build));
                must!(may, "its owner is open");
                Ok(())
            }
            Outcome::Adopted { artifact: Some(adopted), again } => {
                let same = |record: &&mut Record| record.sealed == Some(content);
                for record in self.artifacts.values_mut().filter(same).filter(|_| *again && owner.is_some()) {
                    // An artifact that had an owner is not kept by its age any more.
                    record.had_owner = true;
                    record.taken_from.clear();
                }
                let found = self.artifacts.iter_mut().find(|(id, _)| artifact_id(**id) == *adopted);
                let Some((_, record)) = found else { return Err(Violation("it was never made".to_owned())) };
                must!(record.sealed == Some(content), "it holds other bytes");
                must!(!record.gone, "it had gone");
                if let Some(build) = owner {
                    record.own(build);
                    must!(self.may_be_live(build), "its owner has ended");
                }
                Ok(())
            }
            Outcome::Adopted { artifact: None, .. } => {
                let kept = self.kept();
                let all = self.artifacts.iter().filter(|(_, record)| record.sealed == Some(content));
                let all: Vec<_> = all.map(|(artifact, _)| *artifact).collect();
                let is_there =
                    |artifact: &&Artifact| kept.contains_key(artifact) && self.has_bytes(**artifact);
                // The store checks only the newest few.
                let found = all.iter().find(is_there).filter(|_| all.len() <= 10);
                must!(found.is_none(), "{found:?} holds it");
                Ok(())
            }
            _ => Err(Violation("no answer".to_owned())),
        }
    }

    fn touch(&mut self, attempt: (u16, u8), outcome: &Outcome) -> Accepted {
        let (keeps, now) = (self.keeps(attempt), self.now);
        let container = self.containers.values_mut().find(|it| it.attempt == attempt && !it.revoked);
        if let Outcome::Refused(refusal) = outcome {
            let there = container.is_some() && keeps;
            must!(refusal.is(Reason::ContainerNotFound) && !there, "its container is there");
            return Ok(());
        }
        let Some(container) = container else {
            return Err(Violation("its container is garbage".to_owned()));
        };
        container.touched_at = now;
        Ok(())
    }

    fn pin(&mut self, workload: u16, pins: &[Artifact], build: Option<u16>, outcome: &Outcome) -> Accepted {
        if let Outcome::Refused(refusal) = outcome {
            let kept = self.kept();
            let is_there = |artifact: &Artifact| {
                let content = self.sealed(*artifact).filter(|_| kept.contains_key(artifact));
                content.is_some_and(|content| {
                    content >= TREES || self.replicas(*artifact, content).next().is_some()
                })
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
        let (inputs, caches, planned) = match outcome {
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
            Outcome::Prepared { inputs, caches, planned } => (inputs, caches, planned),
            _ => return Err(Violation("no plan".to_owned())),
        };
        must!(!self.is_settled(workload), "its workload was settled");
        must!(on.is_none_or(|on| on == Some(worker)), "it has ended, or is another worker's");
        self.workers[usize::from(worker)].silent = false;
        self.holders.entry(workload).or_default().attempts.insert(attempt, Some(worker));

        let mut to_make = Vec::new();
        let unconfirmed = self.workers[usize::from(worker)].unconfirmed;
        // The output starts as the first input. The caches come last.
        let sources = inputs.iter().copied().map(Some).chain([inputs.first().copied()]);
        let sources = sources.map(Ok).chain(caches.iter().map(Err));
        must!(planned.volumes.len() == inputs.len() + 1 + caches.len(), "volumes are missing");
        for (index, (volume, from)) in planned.volumes.iter().zip(sources).enumerate() {
            let id = handle(&volume.volume_handle)?;
            let parent = (!volume.parent_handle.is_empty()).then(|| handle(&volume.parent_handle));
            let parent = parent.transpose()?;
            let from = match from {
                Ok(from) => from,
                Err((task, cache)) => {
                    self.starts_with(*task, *cache, id, parent, &volume.missing_artifact_id)?
                }
            };
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
                dropped: false,
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
            touched_at: i64::MIN,
            created: false,
            revoked: false,
            on_disk: false,
            late: false,
        };
        to_make.push((container, !self.containers.contains_key(&container)));
        let known = self.containers.entry(container).or_insert(fresh);
        must!(!known.revoked && known.attempt == (workload, attempt), "{container} is garbage, or another's");
        // Missing inputs are copied first, and the call is repeated.
        if planned.volumes.iter().all(|volume| volume.missing_artifact_id.is_empty()) {
            for (id, is_new) in to_make {
                self.make(worker, id, make, is_new);
            }
        }
        Ok(())
    }

    /// Records that a gateway must create an item.
    fn make(&mut self, worker: u8, id: Uuid, make: Make, is_new: bool) {
        match make {
            Make::Now => self.appears(id, !is_new),
            Make::Later if !self.is_on_disk(id) => {
                self.workers[usize::from(worker)].later.insert(id);
            }
            Make::Later | Make::Never => {}
        }
    }

    /// Records that an item is on the disk.
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
            must!(may, "it is active");
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

    /// Returns the output volume of an attempt, unless it is garbage.
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

    /// Returns the active attempts of a workload: this one, or all.
    fn attempts(&self, workload: u16, attempt: u8) -> impl Iterator<Item = (u16, u8)> {
        let known = self.holders.get(&workload).into_iter().flat_map(|holder| holder.attempts.keys());
        known
            .filter(move |known| attempt == EVERY_ATTEMPT || **known == attempt)
            .map(move |known| (workload, *known))
            .filter(|attempt| self.goes_on(*attempt))
    }

    fn settle(
        &mut self,
        workload: u16,
        attempt: u8,
        status: Status,
        outputs: &Outputs,
        build: Option<u16>,
        outcome: &Outcome,
    ) -> Accepted {
        if self.is_settled(workload) {
            let Outcome::Settled { missing, differs } = outcome else {
                return Err(Violation("a repeat is answered".to_owned()));
            };
            must!(missing.is_empty(), "a repeat changes nothing");
            let repeated = Some((outputs.clone(), status, build));
            let is_other = outputs.candidate().is_some() && self.holders[&workload].settlement != repeated;
            // A task cache may have another id by now.
            let is_sure = is_other || outputs.candidate().is_none_or(|(_, owners)| owners.is_empty());
            must!(!is_sure || *differs == is_other, "only another settlement differs");
            return Ok(());
        }
        let candidate = match outputs.candidate() {
            None => None,
            Some((content, owners)) => {
                let made = |attempt| self.output(attempt);
                let mut candidates = self.attempts(workload, attempt).filter_map(made);
                let output = candidates.find(|output| self.volumes[output].complete == Some(content));
                if let Outcome::Refused(refusal) = outcome {
                    // A recreated volume has other bytes.
                    let is_there = |output: Uuid| {
                        let volume = &self.volumes[&output];
                        volume.on_disk && !volume.late
                    };
                    let lost = !output.is_some_and(is_there);
                    must!(refusal.is(Reason::CandidateMissing) && lost, "its candidate is there");
                    return Ok(());
                }
                must!(output.is_some(), "it has no such candidate");
                output.map(|output| (output, content, owners))
            }
        };
        let Outcome::Settled { missing, differs: false } = outcome else {
            return Err(Violation("there is nothing in its way".to_owned()));
        };
        if let Some((output, content, owners)) = candidate {
            let owner = build.filter(|build| self.is_live(*build));
            let mut record = self.open(owner);
            // If a possibly ended build owns it, it may never have had an owner.
            record.had_owner |= build.is_some_and(|build| self.may_be_live(build));
            record.sealed = Some(content);
            self.artifacts.insert(Artifact::Output(workload), record);
            if let Some(volume) = self.volumes.get_mut(&output) {
                volume.settled = true;
            }
            self.own_output(Artifact::Output(workload), owners, missing)?;
        }
        let now = self.now;
        let holder = self.holders.entry(workload).or_default();
        holder.settled_at = Some(now);
        holder.settlement = outputs.candidate().map(|_| (outputs.clone(), status, build));
        holder.pins.clear();
        for (attempt, on) in &mut holder.attempts {
            holder.ended.entry(*attempt).or_insert(now);
            *on = None;
        }
        let ending = self.builds.values_mut().filter(|build| build.ends_with == workload);
        for build in ending.filter(|build| build.ended.is_none()) {
            build.ended = Some((now, status));
        }
        Ok(())
    }
}
