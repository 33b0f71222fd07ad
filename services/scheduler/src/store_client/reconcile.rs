//! Reconciliation with the artifact store after crashes, and deletion of old records.
//!
//! The loop is slow and only needed after failures, because the outbox covers normal operation. It
//! settles holders of pins that have finished here or are unknown. It ends workloads whose inputs
//! were never pinned, which settles them as well. Both happen after a grace period, so that work in
//! progress is not affected.

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

/// Time for which an owner keeps its affinity to a worker after its last grant.
const AFFINITY_RETENTION: Duration = Duration::from_secs(3600);

#[derive(Debug, thiserror::Error)]
pub(crate) enum ReconcileError {
    #[error("cannot list the pins of the artifact store")]
    Store(#[from] rpc::Refusal),
    #[error("cannot compare holders with the database")]
    Database(#[from] DbErr),
}

/// Ends workloads that were never pinned, and deletes old records.
pub(crate) async fn clean_up(context: &Context) -> Result<(), DbErr> {
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
    let before = now - AFFINITY_RETENTION;
    context.db.write(async |txn| leases::forget_owners(&txn, before).await).await
}

/// Settles holders with pins in the store that have finished here or are unknown.
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
        None if leases::is_live_driven(context.db.read(), LeaseId::from_uuid(id)).await? => return Ok(()),
        // The lease has ended, was deleted, or was lost with a database, so nothing else would
        // settle it.
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

/// Cleans up and compares at the configured interval until the service stops.
pub(crate) async fn reconcile_forever(context: Context, store: Store) {
    loop {
        let every = context.config.reconcile_every;
        let jitter: f64 = rand::rng().random_range(0.8..1.2);
        tokio::select! {
            () = context.stopping.cancelled() => return,
            () = tokio::time::sleep(every.mul_f64(jitter).max(Duration::from_millis(10))) => {}
        }
        let round = async {
            if let Err(error) = clean_up(&context).await {
                tracing::warn!(error = %error, "cannot delete old records");
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
