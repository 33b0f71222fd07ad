//! Reconciliation: what a crash between us and the artifact store left over, and what is too old to be kept.
//!
//! Slow, and needed only when something went wrong: what one owes the other is in the outbox. A holder of pins that has finished
//! here, or is unknown, is settled; a workload whose pinning nobody came back to finish is given up, and settled by that. Each only
//! after a grace, so that nothing under way is mistaken for a leftover.

use std::time::Duration;

use domain::{LeaseId, Timestamp, WorkloadId};
use rand::RngExt;
use sea_orm::DbErr;

use crate::app::Scheduler;
use crate::leases;
use crate::lifecycle::departure;
use crate::notify::changes::Effects;
use crate::outbox::{self, Message, Settlement};
use crate::store_client::Holder;
use crate::workloads;

/// For how long the containers of an owner keep to their worker after a lease was granted, if none lives.
const OWNERS_KEPT: Duration = Duration::from_secs(3600);

#[derive(Debug, thiserror::Error)]
pub(crate) enum ReconcileError {
    #[error("the artifact store does not list its pins")]
    Store(#[from] rpc::Refusal),
    #[error("the database failed")]
    Database(#[from] DbErr),
}

/// Gives up workloads that were accepted long ago, and forgets what finished long ago.
pub(crate) async fn tidy(scheduler: &Scheduler) -> Result<(), DbErr> {
    let now = Timestamp::now();
    let config = &scheduler.config;
    for id in workloads::forgotten(scheduler.db.read(), now - config.reconcile_grace).await? {
        scheduler
            .change(async |txn| {
                let mut effects = Effects::default();
                workloads::end_unpinned(&txn, id, now, &mut effects).await?;
                Ok::<_, DbErr>(((), effects))
            })
            .await?;
    }
    let before = now - config.keep_finished;
    while scheduler.db.write(async |txn| workloads::forget(&txn, before).await).await? > 0 {}
    scheduler.db.write(async |txn| departure::forget(&txn, before).await).await?;
    scheduler.db.write(async |txn| leases::forget(&txn, before).await).await?;
    let before = now - OWNERS_KEPT;
    scheduler.db.write(async |txn| leases::forget_owners(&txn, before).await).await
}

/// Settles what the store still holds pins for although it has finished here, or is unknown.
pub(crate) async fn compare(scheduler: &Scheduler) -> Result<(), ReconcileError> {
    let mut page = String::new();
    loop {
        let (holders, next) = scheduler.store.holders(page).await?;
        let before = Timestamp::now() - scheduler.config.reconcile_grace;
        for holder in holders.iter().filter(|holder| holder.pinned_at < before) {
            settle_again(scheduler, holder).await?;
        }
        if next.is_empty() {
            return Ok(());
        }
        page = next;
    }
}

async fn settle_again(scheduler: &Scheduler, holder: &Holder) -> Result<(), DbErr> {
    let id = holder.id;
    let settlement = match workloads::find(scheduler.db.read(), WorkloadId::from_uuid(id)).await? {
        Some(row) => match workloads::settlement_of_finished(&row)? {
            Some(settlement) => settlement,
            None => return Ok(()),
        },
        None if leases::holds(scheduler.db.read(), LeaseId::from_uuid(id)).await? => return Ok(()),
        // A lease that has ended, or forgotten, or lost with a database: nobody else would ever settle it.
        None => Settlement::nothing(holder.team.clone()),
    };
    if outbox::pending(scheduler.db.read(), id).await? {
        return Ok(());
    }
    scheduler
        .change(async |txn| {
            let mut effects = Effects::default();
            let message = Message::Settle(settlement.clone());
            outbox::put(&txn, id, message, Timestamp::now(), &mut effects).await?;
            Ok::<_, DbErr>(((), effects))
        })
        .await?;
    Ok(())
}

/// Tidies and compares now and then, until the service stops.
pub(crate) async fn reconcile_forever(scheduler: Scheduler) {
    loop {
        let every = scheduler.config.reconcile_every;
        let jitter: f64 = rand::rng().random_range(0.8..1.2);
        tokio::select! {
            () = scheduler.stopping.cancelled() => return,
            () = tokio::time::sleep(every.mul_f64(jitter).max(Duration::from_millis(10))) => {}
        }
        let round = async {
            if let Err(error) = tidy(&scheduler).await {
                tracing::warn!(error = %error, "cannot tidy up");
            }
            if let Err(error) = compare(&scheduler).await {
                tracing::debug!(error = %error, "cannot compare pins with the artifact store");
            }
        };
        tokio::select! {
            () = scheduler.stopping.cancelled() => return,
            () = round => {}
        }
    }
}
