//! Deletions that gateways and operators request, independent of the attempt.

use rpc::{Reason, Refusal};
use uuid::Uuid;

use super::{Accepted, Outcome, State, Violation, must};

type Disposed<'a> = (&'a [Uuid], &'a [Uuid], Result<(), &'a Refusal>);

fn disposed(outcome: &Outcome) -> Result<Disposed<'_>, Violation> {
    let Outcome::Disposed { containers, volumes, answer } = outcome else {
        return Err(Violation("no answer".to_owned()));
    };
    Ok((containers, volumes, answer.as_ref().copied()))
}

impl State {
    /// Returns the worker of an attempt, its container, and its volumes, except garbage.
    pub(crate) fn things_of(&self, workload: u16, attempt: u8) -> Option<(u8, Vec<Uuid>, Vec<Uuid>)> {
        let of_attempt = (workload, attempt);
        let containers = self.containers.iter().filter(|(_, it)| it.attempt == of_attempt && !it.revoked);
        let volumes = self.volumes.iter().filter(|(_, it)| it.attempt == Some(of_attempt) && !it.revoked);
        let on = containers.clone().map(|(_, it)| it.worker).chain(volumes.clone().map(|(_, it)| it.worker));
        let (containers, volumes) = (containers.map(|(id, _)| *id), volumes.map(|(id, _)| *id));
        Some((on.min()?, containers.collect(), volumes.collect()))
    }

    fn is_settled_volume(&self, id: &Uuid) -> bool {
        self.volumes.get(id).is_some_and(|volume| volume.settled)
    }

    fn revoke(&mut self, containers: &[Uuid], volumes: &[Uuid]) {
        for (_, container) in self.containers.iter_mut().filter(|(id, _)| containers.contains(id)) {
            container.revoked = true;
        }
        for (_, volume) in self.volumes.iter_mut().filter(|(id, it)| volumes.contains(id) && !it.settled) {
            volume.revoked = true;
        }
    }

    pub(super) fn fail(&mut self, outcome: &Outcome) -> Accepted {
        let (containers, volumes, answer) = disposed(outcome)?;
        if let Err(refusal) = answer {
            let has_replica = volumes.iter().any(|id| self.is_settled_volume(id));
            must!(refusal.is(Reason::InvalidField) && has_replica, "there is nothing in its way");
            return Ok(());
        }
        let kept = self.kept();
        let is_needed = |id: &&Uuid| self.is_settled_volume(id) && self.need_of_volume(**id, &kept).is_some();
        let replica = volumes.iter().find(is_needed);
        must!(replica.is_none(), "{replica:?} is a replica");
        self.revoke(containers, volumes);
        Ok(())
    }

    pub(super) fn mark_container(&mut self, outcome: &Outcome) -> Accepted {
        let (containers, _, answer) = disposed(outcome)?;
        if let Err(refusal) = answer {
            let need = containers.iter().find_map(|id| self.need_of_container(*id));
            must!(refusal.is(Reason::ContainerNotFound) && need.is_none(), "it is needed by {need:?}");
            return Ok(());
        }
        self.revoke(containers, &[]);
        Ok(())
    }

    pub(super) fn mark_volume(&mut self, outcome: &Outcome) -> Accepted {
        let (containers, volumes, answer) = disposed(outcome)?;
        let kept = self.kept();
        let need = volumes.iter().find_map(|id| self.need_of_volume(*id, &kept));
        if let Err(refusal) = answer {
            let is_replica = volumes.iter().any(|id| self.is_settled_volume(id));
            let attempt = volumes.iter().find_map(|id| self.volumes.get(id)?.attempt);
            let may_be_in_use = self.containers.values().any(|it| Some(it.attempt) == attempt && !it.revoked);
            let may = (refusal.is(Reason::VolumeNotFound) && need.is_none())
                || (refusal.is(Reason::InvalidField) && is_replica)
                || (refusal.is(Reason::VolumeInUse) && may_be_in_use && !is_replica);
            must!(may, "there is nothing in its way");
            return Ok(());
        }
        let is_replica = volumes.iter().any(|id| self.is_settled_volume(id));
        must!(!is_replica || need.is_none(), "it is a replica, and needed by {need:?}");
        let in_use = containers.iter().find_map(|id| self.need_of_container(*id));
        must!(need.is_none() || in_use.is_none(), "its container is needed by {in_use:?}");
        self.revoke(&[], volumes);
        Ok(())
    }
}
