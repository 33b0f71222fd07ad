//! Delivery of parcels to the artifact store.
//!
//! A parcel that this replica commits is delivered immediately ([`deliver_forever`]). Any replica
//! claims a parcel whose delivery failed or whose replica ended ([`redeliver_forever`]).
//! Acknowledgements are written in batches.

use std::collections::HashSet;
use std::sync::Arc;

use db::{BatchedCall, Batcher, Database, rows};
use domain::workload::Outcome;
use domain::{Timestamp, error_chain};
use rpc::Reason;
use sea_orm::{
    ColumnTrait, ConnectionTrait, DatabaseTransaction, DbErr, EntityTrait, QuerySelect, Statement,
};
use tokio::sync::{Notify, Semaphore, mpsc};
use tokio::time::{Instant, sleep_until};
use tracing::Instrument;
use uuid::Uuid;

use crate::context::Context;
use crate::db::entity::outbox as entity;
use crate::notify::changes::Effects;
use crate::outbox::{self, Message, Parcel};
use crate::store_client::Store;
use crate::workloads;

/// Maximum number of parcels that are delivered at a time.
const MAX_CONCURRENT: usize = 64;

/// Delivers parcels. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Delivery {
    context: Context,
    store: Store,
    permits: Arc<Semaphore>,
    /// Writes acknowledgements in batches.
    delivered: Batcher<Parcel, Result<Effects, DbErr>>,
    /// Notified when a parcel is postponed.
    postponed: Arc<Notify>,
}

impl Delivery {
    pub(crate) fn new(context: Context, store: Store) -> Self {
        let db = context.db.clone();
        let delivered = Batcher::new(MAX_CONCURRENT, context.tasks.clone(), move |calls| {
            let db = db.clone();
            async move { record_delivered(&db, calls).await }
        });
        Self {
            context,
            store,
            permits: Arc::new(Semaphore::new(MAX_CONCURRENT)),
            delivered,
            postponed: Arc::default(),
        }
    }
}

/// Delivers the parcels of this replica until the service stops. The rest is delivered after the
/// next start.
pub(crate) async fn deliver_forever(delivery: Delivery, mut parcels: mpsc::Receiver<Parcel>) {
    let deliver_all = async {
        while let Some(parcel) = parcels.recv().await {
            let (delivery, stopping) = (delivery.clone(), delivery.context.stopping.clone());
            delivery.context.tasks.clone().spawn(async move {
                tokio::select! {
                    () = stopping.cancelled() => {}
                    () = deliver(delivery, parcel) => {}
                }
            });
        }
    };
    tokio::select! {
        () = delivery.context.stopping.cancelled() => {}
        () = deliver_all => {}
    }
}

/// Delivers `parcel` and records the answer. A failed delivery is retried by the loop.
pub(crate) async fn deliver(delivery: Delivery, mut parcel: Parcel) {
    // The semaphore is never closed.
    let Ok(_permit) = delivery.permits.clone().acquire_owned().await else { return };
    let span = match &parcel.message {
        Message::Settle(_) => {
            tracing::info_span!(target: "gantry", "settle", service = "scheduler", holder.id = %parcel.holder)
        }
        Message::EndAttempt { .. } => tracing::Span::none(),
    };
    if !span.is_none() {
        match workloads::find(delivery.context.db.read(), parcel.workload()).await {
            // Another process may have accepted the workload, so its trace is read from the row.
            Ok(row) => rpc::trace::continue_from(&span, row.as_ref().map_or("", |row| &row.traceparent)),
            Err(error) => tracing::debug!(error = %error, "cannot read the trace of a workload"),
        }
    }
    if let Err(error) = deliver_once(&delivery, &mut parcel).instrument(span).await {
        if parcel.tries > 3 {
            tracing::warn!(holder.id = %parcel.holder, tries = parcel.tries, error = error_chain(&error), "cannot deliver the end of a workload to the artifact store");
        }
        let postponed = delivery
            .context
            .db
            .write(async |txn| outbox::postpone(&txn, &parcel, Timestamp::now()).await)
            .await;
        if let Err(error) = postponed {
            tracing::debug!(error = %error, "cannot postpone a parcel; it is retried when its claim runs out");
        }
        delivery.postponed.notify_one();
    }
}

#[derive(Debug, thiserror::Error)]
enum DeliveryError {
    #[error(transparent)]
    Refused(#[from] rpc::Refusal),
    #[error("cannot update the outbox in the database")]
    Database(#[from] DbErr),
}

async fn deliver_once(delivery: &Delivery, parcel: &mut Parcel) -> Result<(), DeliveryError> {
    loop {
        let answer = match &parcel.message {
            Message::Settle(settlement) => delivery.store.settle(parcel.holder, settlement).await,
            Message::EndAttempt { attempt } => delivery.store.end_attempt(parcel.holder, *attempt).await,
        };
        match (answer, &mut parcel.message) {
            (Ok(()), _) => break,
            (Err(refusal), Message::Settle(settlement))
                if refusal.is(Reason::CandidateMissing)
                    && !(settlement.outputs.is_empty() && settlement.caches.is_empty()) =>
            {
                tracing::warn!(holder.id = %parcel.holder, error = %refusal, "artifact store lacks an output; settling without outputs");
                settlement.outputs.clear();
                settlement.caches.clear();
                settlement.outcome = Outcome::Errored;
                let parcel = &*parcel;
                delivery.context.db.write(async |txn| workloads::lose_outputs(&txn, parcel).await).await?;
            }
            (Err(refusal), _) => return Err(refusal.into()),
        }
    }

    let delivered = delivery.delivered.call(parcel.clone()).await;
    delivery.context.notify.announce(delivered.map_err(|error| DbErr::Custom(error.to_string()))??);
    Ok(())
}

async fn record_delivered(db: &Database, calls: Vec<BatchedCall<Parcel, Result<Effects, DbErr>>>) {
    let (parcels, answers): (Vec<_>, Vec<_>) = calls.into_iter().unzip();
    let now = Timestamp::now();
    let note =
        async |parcels: &[Parcel]| db.write(async |txn| remove_delivered(&txn, parcels, now).await).await;
    match note(&parcels).await {
        Ok(effects) => {
            for (answer, effects) in answers.into_iter().zip(effects) {
                answer.send(Ok(effects)).ok();
            }
        }
        Err(error) if parcels.len() == 1 => {
            answers.into_iter().for_each(|answer| _ = answer.send(Err(error.clone())));
        }
        Err(error) => {
            tracing::debug!(%error, parcels = parcels.len(), "cannot record deliveries in one transaction; recording each alone");
            for (answer, parcel) in answers.into_iter().zip(&parcels) {
                let effects = note(std::slice::from_ref(parcel)).await;
                let effects = effects.map(|of| of.into_iter().fold(Effects::default(), Effects::and));
                answer.send(effects).ok();
            }
        }
    }
}

/// Deletes acknowledged parcels, and finishes the workloads that are settled with them. Returns the
/// effects of each parcel.
async fn remove_delivered(
    txn: &DatabaseTransaction,
    parcels: &[Parcel],
    now: Timestamp,
) -> Result<Vec<Effects>, DbErr> {
    let backend = txn.get_database_backend();
    let query = format!("DELETE FROM outbox WHERE id {} RETURNING id", rows::among(backend, 1));
    let ids = rows::ids(parcels.iter().map(|parcel| parcel.id))?;
    let removed = txn.query_all_raw(Statement::from_sql_and_values(backend, query, [ids])).await?;
    // A missing parcel was delivered by another replica as well.
    let removed: HashSet<Uuid> = removed.iter().map(|row| row.try_get("", "id")).collect::<Result<_, _>>()?;
    let settles =
        |parcel: &&Parcel| removed.contains(&parcel.id) && matches!(parcel.message, Message::Settle(_));
    let settled = parcels.iter().filter(settles).map(Parcel::workload);
    let settled = workloads::settling(txn, settled).await?;
    let mut effects: Vec<_> = parcels.iter().map(|_| Effects::default()).collect();
    for workload in settled {
        // Each workload is settled once.
        let settling = parcels.iter().position(|parcel| settles(&parcel) && parcel.workload() == workload);
        if let Some(index) = settling {
            workloads::settled(txn, workload, now, &mut effects[index]).await?;
        }
    }
    Ok(effects)
}

/// Parcels of the outbox that other tasks do not deliver now.
enum Due {
    Now(Vec<Parcel>),
    /// The next parcel is due at this time.
    At(Timestamp),
    Never,
}

/// Claims parcels that are due. Opens no write transaction if none is due.
async fn claim_due(delivery: &Delivery) -> Result<Due, DbErr> {
    let now = Timestamp::now();
    let first = entity::Entity::find().select_only().column_as(entity::Column::DueAt.min(), "due_at");
    let first = first.into_tuple::<Option<i64>>().one(delivery.context.db.read()).await?.flatten();
    match first.map(Timestamp) {
        None => Ok(Due::Never),
        Some(first) if first > now => Ok(Due::At(first)),
        Some(_) => delivery.context.db.write(async |txn| outbox::claim(&txn, now).await).await.map(Due::Now),
    }
}

/// Delivers parcels that are due until the service stops.
pub(crate) async fn redeliver_forever(delivery: Delivery) {
    let ticks = delivery.context.ticks;
    loop {
        let mut next = ticks.after(Instant::now());
        match claim_due(&delivery).await {
            Ok(Due::Never) => next = ticks.idle_after(Instant::now()),
            Ok(Due::At(due)) => next = next.min(Instant::now() + due.since(Timestamp::now())),
            Ok(Due::Now(parcels)) => {
                let full = parcels.len() as u64 == outbox::BATCH;
                let deliveries = parcels.into_iter().map(|parcel| deliver(delivery.clone(), parcel));
                tokio::select! {
                    () = delivery.context.stopping.cancelled() => return,
                    _ = futures::future::join_all(deliveries) => {}
                }
                if full {
                    continue;
                }
            }
            Err(error) => tracing::warn!(error = %error, "cannot read the outbox"),
        }
        tokio::select! {
            () = delivery.context.stopping.cancelled() => return,
            () = delivery.postponed.notified() => {}
            () = sleep_until(next) => {}
        }
    }
}
