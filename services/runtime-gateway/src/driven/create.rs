//! Creation of a driven container.

use std::sync::Arc;

use domain::workload::WorkloadSpec;
use domain::{AttemptId, ContainerHandle, LeaseId, WorkloadId};
use rpc::Reason;
use uuid::Uuid;

use super::{DrivenError, Held, find, is_live};
use crate::attempt::context::AttemptContext;
use crate::attempt::error::AttemptError;
use crate::attempt::process::stop_requested;
use crate::attempt::{inputs, make};
use crate::clients::scheduler_messages::{AttemptTask, InputProgress};
use crate::runtimes::container_note::DrivenNote;
use crate::worker::Worker;
use crate::worker::containers::KnownContainer;

/// A container that a caller requests.
pub(crate) struct NewContainer {
    /// The spec. Its command is not used.
    pub(crate) spec: WorkloadSpec,
    pub(crate) note: DrivenNote,
    /// The container whose network the main process joins.
    pub(crate) network_of: Option<AttemptId>,
    pub(crate) token: String,
}

/// Returns the id of the container with this key.
pub(crate) fn container_id(lease: LeaseId, key: &str) -> AttemptId {
    AttemptId::from_uuid(Uuid::new_v5(&lease.uuid(), key.as_bytes()))
}

/// Returns a container of the team whose network is joined.
async fn joined_container(
    worker: &Worker,
    team: &str,
    id: AttemptId,
) -> Result<ContainerHandle, DrivenError> {
    let is_it = |container: &KnownContainer| container.note.container == id && container.team == team;
    let found = worker.containers(is_it).await?.pop();
    found.map(|container| container.handle).ok_or(DrivenError::NoJoined(id))
}

/// Creates a container, or returns it if it exists. `report` receives the progress of its inputs.
pub(crate) async fn create(
    context: &Arc<AttemptContext>,
    held: Held,
    new: NewContainer,
    report: impl Fn(Vec<InputProgress>) + Sync,
) -> Result<KnownContainer, DrivenError> {
    let worker = &context.worker;
    let id = container_id(held.lease, &new.note.key);
    let _one_at_a_time = context.admissions.lock(id.uuid()).await;
    match find(worker, held.lease, id).await {
        Ok(existing) if existing.note.driven.as_ref().is_none_or(|note| note.spec != new.note.spec) => {
            return Err(DrivenError::Exists(new.note.key));
        }
        Ok(existing) if is_live(worker, id).await? => return Ok(existing),
        // The artifact store returns other handles for a container that is garbage.
        Ok(_) | Err(DrivenError::NoContainer(..)) => {}
        Err(error) => return Err(error),
    }
    let network_of = match new.network_of {
        Some(joined) => Some(joined_container(worker, &held.team, joined).await?),
        None => None,
    };
    let task = AttemptTask {
        lease: held.lease,
        attempt: id,
        spec: WorkloadSpec { team: held.team.clone(), ..new.spec },
        token: new.token,
        workload: WorkloadId::from_uuid(held.lease.uuid()),
        traceparent: String::new(),
        service: None,
        driven: Some(new.note),
    };
    let mut stop = held.operation.stop.clone();
    let report = |inputs: Option<Vec<InputProgress>>| report(inputs.unwrap_or_default());
    let prepared = tokio::select! {
        prepared = inputs::prepare(context, &task, &report) => match prepared {
            Err(AttemptError::Refused(refusal)) if refusal.is(Reason::AttemptEnded) => {
                let key = task.driven.map(|note| note.key).unwrap_or_default();
                return Err(DrivenError::Destroyed(key));
            }
            prepared => prepared?,
        },
        request = stop_requested(&mut stop) => return Err(AttemptError::StopRequested(request).into()),
    };
    if !worker.session.is_exclusive() {
        return Err(AttemptError::NotExclusive.into());
    }
    make::make(context, &task, network_of, prepared, &report, &mut stop).await?;
    tokio::select! {
        found = held.container(worker, id) => found,
        request = stop_requested(&mut stop) => Err(AttemptError::StopRequested(request).into()),
    }
}
