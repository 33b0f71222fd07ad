//! Containers that the holder of a driven lease creates, starts and publishes.
//!
//! Each operation of a caller begins with [`Held::begin`]. It makes sure that the lease is in use,
//! so that the scheduler keeps its slot until this gateway reports its end. The end of a lease
//! ([`hold()`]) waits for the operations under way, stops all processes, and only then reports it.
//! After that, no operation begins.
//!
//! Invariant: a process starts only after the scheduler has confirmed that its lease is in use, and
//! while the session of this gateway is exclusive.

pub(crate) mod create;
mod hold;
pub(crate) mod publish;
pub(crate) mod start;

use std::sync::Arc;
use std::time::Duration;

use domain::worker::LeaseClaims;
use domain::{AttemptId, LeaseId};
use rpc::pb::scheduler as pb;
use rpc::{Reason, Refusal};

use crate::attempt::context::AttemptContext;
use crate::attempt::error::AttemptError;
use crate::util::retry::until_answered;
use crate::worker::Worker;
use crate::worker::attempts::Operation;
use crate::worker::containers::KnownContainer;
pub(crate) use hold::{hold, resume};

/// A reason why an operation of a caller failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DrivenError {
    /// The lease has ended or is ending.
    #[error("lease {0} has ended or is ending")]
    LeaseLost(LeaseId),
    /// The lease has no such container.
    #[error("lease {0} has no container {1}")]
    NoContainer(LeaseId, AttemptId),
    /// The team has no such container, whose network should be joined.
    #[error("cannot join the network of container {0}: it does not exist on this worker")]
    NoJoined(AttemptId),
    /// The lease has a container with this key and another spec.
    #[error("the lease has a container {0:?} with another spec")]
    Exists(String),
    /// The container with this key was destroyed.
    #[error("the container {0:?} of the lease was destroyed, or the lease has ended: use another key")]
    Destroyed(String),
    /// The main process still runs, or was not started.
    #[error("the main process of container {0} has not ended")]
    Running(AttemptId),
    /// The spec has no such output or cache.
    #[error("the container has no {0}")]
    NoSource(String),
    /// The directory cannot be published.
    #[error("{}", .0.message)]
    Unpublishable(domain::workload::Failure),
    /// The operation failed as the step of an attempt does.
    #[error(transparent)]
    Step(Box<AttemptError>),
}

impl From<AttemptError> for DrivenError {
    fn from(error: AttemptError) -> Self {
        Self::Step(Box::new(error))
    }
}

impl From<Refusal> for DrivenError {
    fn from(refusal: Refusal) -> Self {
        AttemptError::from(refusal).into()
    }
}

impl From<runtime::RuntimeError> for DrivenError {
    fn from(error: runtime::RuntimeError) -> Self {
        AttemptError::from(error).into()
    }
}

/// A driven lease during an operation of its holder.
pub(crate) struct Held {
    pub(crate) operation: Operation,
    pub(crate) lease: LeaseId,
    pub(crate) team: String,
}

impl Held {
    /// Begins an operation under the lease of `claims`, whose token the gateway has verified. With
    /// `confirm`, the scheduler confirms the lease even if it did before.
    pub(crate) async fn begin(
        context: &Arc<AttemptContext>,
        claims: LeaseClaims,
        token: &str,
        confirm: bool,
    ) -> Result<Self, DrivenError> {
        let worker = &context.worker;
        check_incarnation(worker, &claims)?;
        let LeaseClaims { lease, team, .. } = claims;
        let (context, token) = (context.clone(), token.to_owned());
        // A caller that leaves must not leave an entry that was neither confirmed nor forgotten.
        let admitted = worker.tasks.spawn(async move { admit(&context, lease, &token, confirm).await });
        let operation = admitted.await.unwrap_or(Err(AttemptError::GatewayStopping.into()))?;
        Ok(Self { operation, lease, team })
    }

    /// Returns a container of the lease that is not garbage.
    async fn container(&self, worker: &Worker, id: AttemptId) -> Result<KnownContainer, DrivenError> {
        let found = find(worker, self.lease, id).await?;
        if is_live(worker, id).await? { Ok(found) } else { Err(DrivenError::NoContainer(self.lease, id)) }
    }
}

/// Begins an operation, and has the scheduler confirm that the lease is in use.
async fn admit(
    context: &Arc<AttemptContext>,
    lease: LeaseId,
    token: &str,
    confirm: bool,
) -> Result<Operation, DrivenError> {
    let worker = &context.worker;
    // Whether an entry was ever confirmed is checked and changed by one operation at a time.
    let _admission = context.admissions.lock(lease.uuid()).await;
    let (operation, is_new) = worker.attempts.begin_operation(lease).ok_or(DrivenError::LeaseLost(lease))?;
    if is_new {
        worker.tasks.spawn(hold(context.clone(), lease));
    }
    if confirm || !operation.is_confirmed {
        match worker.clients.scheduler.use_lease(token).await {
            Ok(generation) => worker.attempts.confirm_use(lease, generation),
            Err(refusal) => {
                worker.attempts.forget_unused(lease);
                return Err(refusal.into());
            }
        }
    }
    Ok(operation)
}

/// Reports that a container exists. Returns `false` if it is garbage, because it was destroyed, or
/// another gateway took over before it was complete.
async fn is_live(worker: &Worker, id: AttemptId) -> Result<bool, DrivenError> {
    let session = worker.session.opened().await;
    let call = || worker.clients.store.mark_prepared(&session.credential, id);
    match until_answered("report that a container is prepared", call).await {
        Ok(()) => Ok(true),
        Err(refusal) if refusal.is(Reason::AttemptEnded) => Ok(false),
        Err(refusal) => Err(refusal.into()),
    }
}

fn check_incarnation(worker: &Worker, claims: &LeaseClaims) -> Result<(), DrivenError> {
    match worker.session.current() {
        Some(session) if session.incarnation != claims.incarnation => {
            Err(DrivenError::LeaseLost(claims.lease))
        }
        _ => Ok(()),
    }
}

/// The part of a workload spec that a driven container does not have.
pub(crate) fn spec_without_process() -> pb::WorkloadSpec {
    pb::WorkloadSpec {
        kind: pb::WorkloadKind::Task.into(),
        image: Some(pb::Image { source: Some(pb::image::Source::Host(pb::HostImage {})), entrypoint: None }),
        command: vec![bytes::Bytes::from_static(b"-")],
        stdin: pb::StdinMode::None.into(),
        output: pb::OutputMode::Spooled.into(),
        privilege: pb::Privilege::Confined.into(),
        network: pb::Network::None.into(),
        ..pb::WorkloadSpec::default()
    }
}

/// Returns a container of a driven lease.
async fn find(worker: &Worker, lease: LeaseId, id: AttemptId) -> Result<KnownContainer, DrivenError> {
    let is_it = |container: &KnownContainer| {
        container.note.container == id && container.note.lease == lease && container.note.driven.is_some()
    };
    let mut found = worker.containers(is_it).await?;
    found.pop().ok_or(DrivenError::NoContainer(lease, id))
}

/// Stops the processes of a driven container. The stop is in progress when the call returns.
pub(crate) async fn stop(
    worker: &Worker,
    claims: &LeaseClaims,
    id: AttemptId,
    grace: Duration,
) -> Result<(), DrivenError> {
    check_incarnation(worker, claims)?;
    find(worker, claims.lease, id).await?;
    match worker.runtime.stop(id.into(), grace).await {
        // Nothing runs.
        Ok(()) | Err(runtime::RuntimeError::ProcessNotFound(_)) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Marks a driven container as garbage. Its key cannot be used again, because its process and its
/// artifacts have ids that are derived from the key.
pub(crate) async fn destroy(worker: &Worker, claims: &LeaseClaims, id: AttemptId) -> Result<(), DrivenError> {
    check_incarnation(worker, claims)?;
    let container = match find(worker, claims.lease, id).await {
        // It was destroyed by an earlier call.
        Err(DrivenError::NoContainer(..)) => return Ok(()),
        found => found?,
    };
    let session = worker.session.opened().await;
    worker.clients.store.end_attempt(claims.lease, id).await?;
    let reason = "destroyed by the holder of its lease";
    let call = worker.clients.store.mark_container(&session.credential, container.handle, reason);
    match call.await {
        // It is already deleted.
        Err(refusal) if refusal.is(Reason::ContainerNotFound) => {}
        result => result?,
    }
    worker.index.remove(container.handle).await;
    Ok(())
}
