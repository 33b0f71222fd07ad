//! What callers and gateways ask of workloads, each in one transaction.

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

/// The process of an attempt is about to start.
pub(crate) async fn start_attempt(context: &Context, claims: &LeaseClaims) -> Result<(), AttemptError> {
    context
        .change(async |txn| {
            let mut effects = Effects::default();
            workloads::start_attempt(&txn, claims, Timestamp::now(), &mut effects).await?;
            Ok::<_, AttemptError>(((), effects))
        })
        .await
}

/// An attempt has ended.
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

/// Lets a workload stop.
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

/// Nothing, if `team` has such a workload.
pub(crate) async fn has(context: &Context, team: &str, id: WorkloadId) -> Result<(), WorkloadError> {
    let row = workloads::find(context.db.read(), id).await?.filter(|row| row.team == team);
    row.map(drop).ok_or(WorkloadError::NotFound(id))
}

/// One workload as it is now.
pub(crate) async fn get(context: &Context, team: &str, id: WorkloadId) -> Result<Workload, WorkloadError> {
    let db = context.db.read();
    let row = workloads::find(db, id).await?.filter(|row| row.team == team);
    let mut seen = workloads::view(db, row.into_iter().collect()).await?;
    let mut workload = seen.pop().ok_or(WorkloadError::NotFound(id))?;
    if let Some(whereabouts) = &mut workload.whereabouts
        && let Some((_, endpoint)) = workers::reach(db, whereabouts.worker).await?
    {
        // Its gateway may have moved since the workload was placed.
        whereabouts.gateway_endpoint = endpoint;
    }
    Ok(workload)
}

/// A gateway says how far it is with its leases.
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

/// A gateway says how far it is with the inputs of its leases.
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

/// A gateway that was told of `lease` does not know it.
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
