//! Publishing an output or a task cache of a driven container.

use std::sync::Arc;

use domain::workload::{PublishedCache, PublishedOutput};
use domain::{AttemptId, CacheId, WorkloadId};
use rpc::pb::scheduler as pb;
use runtime::{ProcessState, RuntimeError};

use super::{DrivenError, Held};
use crate::attempt::context::AttemptContext;
use crate::attempt::error::AttemptError;
use crate::attempt::process::stop_requested;
use crate::attempt::spec_plan::{Plan, WorkerImports};
use crate::attempt::{caches, inputs, outputs};
use crate::clients::scheduler::AttemptResult;
use crate::clients::scheduler_messages::AttemptTask;
use crate::runtimes::container_note::DrivenNote;
use crate::worker::containers::KnownContainer;

/// What is published.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Source {
    /// The output of this name.
    Output(String),
    /// A task cache.
    Cache(CacheId),
}

/// What was published, and notes for people.
pub(crate) enum Published {
    Output(PublishedOutput, Vec<String>),
    /// `None`: the cache is unchanged.
    Cache(Option<PublishedCache>, Vec<String>),
}

/// Publishes an output or a cache of a container whose main process has ended.
pub(crate) async fn publish(
    context: &Arc<AttemptContext>,
    held: Held,
    id: AttemptId,
    source: Source,
    token: String,
) -> Result<Published, DrivenError> {
    let worker = &context.worker;
    let _one_at_a_time = context.admissions.lock(id.uuid()).await;
    let container = held.container(worker, id).await?;
    match worker.runtime.process(id.into()).await {
        Ok(ProcessState::Ended(_)) => {}
        Ok(_) | Err(RuntimeError::ProcessNotFound(_)) => return Err(DrivenError::Running(id)),
        Err(error) => return Err(error.into()),
    }
    let mut stop = held.operation.stop.clone();
    tokio::select! {
        published = publish_one(context, &container, source, token) => published,
        request = stop_requested(&mut stop) => Err(AttemptError::StopRequested(request).into()),
    }
}

async fn publish_one(
    context: &Arc<AttemptContext>,
    container: &KnownContainer,
    source: Source,
    token: String,
) -> Result<Published, DrivenError> {
    let worker = &context.worker;
    let (id, lease) = (container.note.container, container.note.lease);
    let spec = match &container.note.driven {
        Some(note) => stored_spec(&container.team, note),
        None => return Err(DrivenError::NoContainer(lease, id)),
    };
    let spec = rpc::spec::parse_accepted(spec)
        .map_err(|status| AttemptError::InvalidAnswer(status.message().to_owned()))?;
    let task = AttemptTask {
        lease,
        attempt: id,
        spec,
        token,
        workload: WorkloadId::from_uuid(lease.uuid()),
        traceparent: String::new(),
        service: None,
        driven: container.note.driven.clone(),
    };
    let replaceable = inputs::are_outputs_replaceable(worker);
    let mut plan = Plan::new(&task.spec, task.namespace(), replaceable, &WorkerImports::default());
    // The artifact store returns the volumes that it returned for the container.
    let (prepared, _) = inputs::request_volumes(worker, &task, &plan.volumes, &[]).await?;
    match source {
        Source::Output(name) => {
            plan.outputs.retain(|output| output.name == name);
            if plan.outputs.is_empty() {
                return Err(DrivenError::NoSource(format!("output {name:?}")));
            }
            let mut result = AttemptResult::default();
            outputs::publish(context, &task, &plan, &prepared, &mut result).await?;
            match (result.outputs.pop(), result.failure) {
                (Some(output), None) => Ok(Published::Output(output, result.notes)),
                (_, Some(failure)) => Err(DrivenError::Unpublishable(failure)),
                (None, None) => Err(AttemptError::InvalidAnswer("no output was published".to_owned()).into()),
            }
        }
        Source::Cache(cache) => {
            let planned = plan.caches.iter().find(|planned| planned.cache == cache);
            let planned = planned.ok_or_else(|| DrivenError::NoSource(format!("task cache {cache}")))?;
            match caches::publish_one(context, &task, planned, &prepared).await {
                Ok(None) => Ok(Published::Cache(None, Vec::new())),
                Ok(Some((published, omitted))) => {
                    let notes = omitted.map(|entries| format!("left out: {entries}"));
                    Ok(Published::Cache(Some(published), notes.into_iter().collect()))
                }
                Err(AttemptError::Worker(
                    error @ (RuntimeError::InvalidOutput(_) | RuntimeError::UnreadableOutput(_)),
                )) => Err(DrivenError::Unpublishable(error.failure())),
                Err(error) => Err(error.into()),
            }
        }
    }
}

/// The part of a container's spec that its note keeps.
fn stored_spec(team: &str, note: &DrivenNote) -> pb::WorkloadSpec {
    let text = |text: &str| text.to_owned().into_bytes().into();
    let inputs = note.outputs.iter().filter_map(|output| {
        Some(pb::Input {
            name: output.name.clone(),
            artifact_id: output.from?.to_string(),
            path: text(&output.path),
            access: pb::Access::CopyOnWrite.into(),
        })
    });
    pb::WorkloadSpec {
        team: team.to_owned(),
        inputs: inputs.collect(),
        outputs: note
            .outputs
            .iter()
            .map(|output| pb::Output {
                name: output.name.clone(),
                path: text(&output.path),
                owners: Vec::new(),
            })
            .collect(),
        caches: note
            .caches
            .iter()
            .map(|mount| pb::CacheMount { task_cache_id: mount.cache.to_string(), path: text(&mount.path) })
            .collect(),
        ..super::spec_without_process()
    }
}
