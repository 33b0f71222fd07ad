//! Reconciliation: what a crash between us and the artifact store left over, and what is too old to be kept.
//!
//! Slow, and needed only when something went wrong: what one owes the other is in the outbox. A holder of pins that has finished
//! here, or is unknown, is settled; a workload whose pinning nobody came back to finish is given up, and settled by that. Each only
//! after a grace, so that nothing under way is mistaken for a leftover.

use std::time::Duration;

use domain::{LeaseId, Timestamp, WorkloadId};
use rand::RngExt;
use sea_orm::DbErr;

use crate::context::Context;
use crate::leases;
use crate::notify::changes::Effects;
use crate::outbox::{self, Message, Settlement};
use crate::store_client::{Holder, Store};
use crate::workers::removed;
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
pub(crate) async fn tidy(context: &Context) -> Result<(), DbErr> {
    let now = Timestamp::now();
    let config = &context.config;
    for id in workloads::forgotten(context.db.read(), now - config.reconcile_grace).await? {
        context
            .change(async |txn| {
                let mut effects = Effects::default();
                workloads::end_unpinned(&txn, id, now, &mut effects).await?;
                Ok::<_, DbErr>(((), effects))
            })
            .await?;
    }
    let before = now - config.keep_finished;
    while context.db.write(async |txn| workloads::forget(&txn, before).await).await? > 0 {}
    context.db.write(async |txn| removed::forget(&txn, before).await).await?;
    context.db.write(async |txn| leases::forget(&txn, before).await).await?;
    let before = now - OWNERS_KEPT;
    context.db.write(async |txn| leases::forget_owners(&txn, before).await).await
}

/// Settles what the store still holds pins for although it has finished here, or is unknown.
pub(crate) async fn compare(context: &Context, store: &Store) -> Result<(), ReconcileError> {
    let mut page = String::new();
    loop {
        let (holders, next) = store.holders(page).await?;
        let before = Timestamp::now() - context.config.reconcile_grace;
        for holder in holders.iter().filter(|holder| holder.pinned_at < before) {
            settle_again(context, holder).await?;
        }
        if next.is_empty() {
            return Ok(());
        }
        page = next;
    }
}

async fn settle_again(context: &Context, holder: &Holder) -> Result<(), DbErr> {
    let id = holder.id;
    let settlement = match workloads::find(context.db.read(), WorkloadId::from_uuid(id)).await? {
        Some(row) => match workloads::settlement_of_finished(&row)? {
            Some(settlement) => settlement,
            None => return Ok(()),
        },
        None if leases::holds(context.db.read(), LeaseId::from_uuid(id)).await? => return Ok(()),
        // A lease that has ended, or forgotten, or lost with a database: nobody else would ever settle it.
        None => Settlement::nothing(holder.team.clone()),
    };
    if outbox::pending(context.db.read(), id).await? {
        return Ok(());
    }
    context
        .change(async |txn| {
            let mut effects = Effects::default();
            let message = Message::Settle(settlement.clone());
            effects.parcels.push(outbox::put(&txn, id, message, Timestamp::now()).await?);
            Ok::<_, DbErr>(((), effects))
        })
        .await?;
    Ok(())
}

/// Tidies and compares now and then, until the service stops.
pub(crate) async fn reconcile_forever(context: Context, store: Store) {
    loop {
        let every = context.config.reconcile_every;
        let jitter: f64 = rand::rng().random_range(0.8..1.2);
        tokio::select! {
            () = context.stopping.cancelled() => return,
            () = tokio::time::sleep(every.mul_f64(jitter).max(Duration::from_millis(10))) => {}
        }
        let round = async {
            if let Err(error) = tidy(&context).await {
                tracing::warn!(error = %error, "cannot tidy up");
            }
            if let Err(error) = compare(&context, &store).await {
                tracing::debug!(error = %error, "cannot compare pins with the artifact store");
            }
        };
        tokio::select! {
            () = context.stopping.cancelled() => return,
            () = round => {}
        }
    }
}
