//! Operations of callers and gateways on workloads, each in one transaction.

use std::time::Duration;

use domain::worker::LeaseClaims;
use domain::{Timestamp, WorkloadId};
use sea_orm::DbErr;

use crate::context::Context;
use crate::db::entity::lease;
use crate::notify::changes::Effects;
use crate::outcome::{AttemptEnd, Report};
use crate::workers;
use crate::workloads::events::InputProgress;
use crate::workloads::{self, AttemptError, Phase, Workload, WorkloadError};

/// Marks the process of an attempt as about to start.
pub(crate) async fn start_attempt(context: &Context, claims: &LeaseClaims) -> Result<(), AttemptError> {
    context
        .change(async |txn| {
            let mut effects = Effects::default();
            workloads::start_attempt(&txn, claims, Timestamp::now(), &mut effects).await?;
            Ok::<_, AttemptError>(((), effects))
        })
        .await
}

/// Ends an attempt with the report of its gateway.
pub(crate) async fn finish_attempt(
    context: &Context,
    claims: &LeaseClaims,
    report: &Report,
) -> Result<(), AttemptError> {
    context
        .change(async |txn| {
            let mut effects = Effects::default();
            let now = Timestamp::now();
            workloads::finish_attempt(&txn, claims, report.clone(), &context.config, now, &mut effects)
                .await?;
            Ok::<_, AttemptError>(((), effects))
        })
        .await
}

/// Cancels a workload.
pub(crate) async fn cancel(
    context: &Context,
    team: &str,
    id: WorkloadId,
    grace: Duration,
) -> Result<(), WorkloadError> {
    context
        .change(async |txn| {
            let mut effects = Effects::default();
            workloads::cancel(&txn, team, id, grace, Timestamp::now(), &mut effects).await?;
            Ok::<_, WorkloadError>(((), effects))
        })
        .await
}

/// Checks that `team` has this workload.
pub(crate) async fn has(context: &Context, team: &str, id: WorkloadId) -> Result<(), WorkloadError> {
    let row = workloads::find(context.db.read(), id).await?.filter(|row| row.team == team);
    row.map(drop).ok_or(WorkloadError::NotFound(id))
}

/// Returns a workload as callers see it.
pub(crate) async fn get(context: &Context, team: &str, id: WorkloadId) -> Result<Workload, WorkloadError> {
    let db = context.db.read();
    let row = workloads::find(db, id).await?.filter(|row| row.team == team);
    let mut views = workloads::view(db, row.into_iter().collect()).await?;
    let mut workload = views.pop().ok_or(WorkloadError::NotFound(id))?;
    if workload.ending.as_ref().is_some_and(|ending| ending.has_result) {
        workload.result = workloads::results::find(db, id).await?;
    }
    if let Some(location) = &mut workload.location
        && let Some(reach) = workers::reach(db, location.worker).await?
    {
        // The gateway may have moved since the workload was placed.
        location.gateway_endpoint = reach.endpoint;
    }
    Ok(workload)
}

/// Records the phases of attempts that a gateway reported.
pub(crate) async fn observe_phases(context: &Context, phases: &[(lease::Model, Phase)]) -> Result<(), DbErr> {
    context
        .change(async |txn| {
            let mut effects = Effects::default();
            for (lease, phase) in phases {
                workloads::observe_phase(&txn, lease, *phase, Timestamp::now(), &mut effects).await?;
            }
            Ok::<_, DbErr>(((), effects))
        })
        .await
}

/// Records the progress of inputs that a gateway reported.
pub(crate) async fn observe_inputs(
    context: &Context,
    inputs: &[(lease::Model, Vec<InputProgress>)],
) -> Result<(), DbErr> {
    context
        .change(async |txn| {
            let mut effects = Effects::default();
            for (lease, inputs) in inputs {
                workloads::observe_inputs(&txn, lease, inputs, Timestamp::now(), &mut effects).await?;
            }
            Ok::<_, DbErr>(((), effects))
        })
        .await
}

/// Ends an attempt that its gateway does not know although it has received the lease.
pub(crate) async fn observe_absence(context: &Context, lease: &lease::Model) -> Result<(), DbErr> {
    context
        .change(async |txn| {
            let mut effects = Effects::default();
            let (end, now) = (AttemptEnd::Unknown, Timestamp::now());
            workloads::lose_attempt(&txn, lease, end, now, &mut effects).await?;
            Ok::<_, DbErr>(((), effects))
        })
        .await
}
