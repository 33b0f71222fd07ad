//! Batched pins and settlements: one transaction for concurrent calls of a team ([`db::Batcher`]).
//!
//! Invariant: each call has the result that it would have alone. If one call of a batch is
//! rejected, the transaction is rolled back, and each call gets a transaction of its own. A call
//! may take longer, because it waits for its batch.

use std::collections::HashSet;
use std::sync::Arc;

use db::{Batcher, ReplySenders, group_calls};
use futures::future::join_all;
use sea_orm::DbErr;
use tokio_util::task::TaskTracker;

use crate::app::Store;
use crate::pins::settle::settle_plain;
use crate::pins::{PinAnswer, PinError, PinRequest, SettleError, Settled, Settlement, pin, pin_all, settle};

/// Maximum number of calls in a batch.
const MAX: usize = 64;

/// Batching front of pins and settlements. Cheap to clone. Clones share the batches.
#[derive(Clone)]
pub(crate) struct Pins {
    store: Arc<Store>,
    pinning: Batcher<PinRequest, Result<PinAnswer, PinError>>,
    settling: Batcher<Settlement, Result<Settled, SettleError>>,
}

impl Pins {
    /// Creates the batchers, which spawn their tasks on `tasks`.
    pub(crate) fn new(store: Arc<Store>, tasks: &TaskTracker) -> Self {
        let of_pins = store.clone();
        let pinning = Batcher::new(MAX, tasks.clone(), move |uses| {
            let store = of_pins.clone();
            async move {
                let groups = group_calls(uses, |used: &PinRequest| used.team.clone());
                join_all(groups.into_iter().map(|group| pin_group(&store, group))).await;
            }
        });
        let of_settlements = store.clone();
        let settling = Batcher::new(MAX, tasks.clone(), move |settlements| {
            let store = of_settlements.clone();
            async move {
                let groups = group_calls(settlements, |settlement: &Settlement| settlement.team.clone());
                join_all(groups.into_iter().map(|group| settle_group(&store, group))).await;
            }
        });
        Self { store, pinning, settling }
    }

    /// Pins like [`pin`]. A request without task caches is batched with others, because the locks
    /// of task caches have their own order.
    pub(crate) async fn pin(&self, used: PinRequest) -> Result<PinAnswer, PinError> {
        if used.task_caches.is_empty() {
            return self.pinning.call(used).await.map_err(DbErr::from)?;
        }
        let (used, now) = (&used, self.store.now());
        self.store.db.write(|txn| async move { pin(&txn, used, now).await }).await
    }

    /// Settles like [`settle()`]. A settlement without outputs is batched with others.
    pub(crate) async fn settle(&self, settlement: Settlement) -> Result<Settled, SettleError> {
        if settlement.outputs.is_empty() {
            return self.settling.call(settlement).await.map_err(DbErr::from)?;
        }
        let (settlement, now, ttl) = (&settlement, self.store.now(), self.store.config.resource_cache_ttl);
        self.store.db.write(|txn| async move { settle(&txn, settlement, now, ttl).await }).await
    }
}

/// Pins for holders of one team. None of the requests has task caches.
async fn pin_group(
    store: &Store,
    (uses, answers): (Vec<PinRequest>, ReplySenders<Result<PinAnswer, PinError>>),
) {
    let (db, now, uses) = (&store.db, store.now(), &uses);
    if let [first, _, ..] = &uses[..] {
        match db.write(|txn| async move { pin_all(&txn, &first.team, uses, now).await }).await {
            Ok(pinned) => {
                for (answer, pinned) in answers.into_iter().zip(pinned) {
                    answer.send(Ok(pinned)).ok();
                }
                return;
            }
            Err(error) => {
                tracing::debug!(%error, pins = uses.len(), "cannot pin holders in one transaction, pinning each alone")
            }
        }
    }
    let alone = uses.iter().zip(answers).map(async |(used, answer)| {
        let pinned = db.write(|txn| async move { pin(&txn, used, now).await }).await;
        answer.send(pinned).ok();
    });
    join_all(alone).await;
}

/// Settles holders of one team without outputs.
async fn settle_group(
    store: &Store,
    (settlements, answers): (Vec<Settlement>, ReplySenders<Result<Settled, SettleError>>),
) {
    let (db, now, ttl) = (&store.db, store.now(), store.config.resource_cache_ttl);
    let holders: &Vec<_> = &settlements.iter().map(|settlement| settlement.holder).collect();
    let mut left: HashSet<_> = holders.iter().copied().collect();
    if let [first, _, ..] = &settlements[..] {
        let settled = db.write(|txn| async move { settle_plain(&txn, &first.team, holders, now).await });
        match settled.await {
            Ok(others) => left = others,
            Err(error) => {
                tracing::debug!(%error, settlements = holders.len(), "cannot settle holders in one transaction, settling each alone")
            }
        }
    }
    let each = settlements.iter().zip(answers).map(async |(settlement, answer)| {
        let settled = match left.contains(&settlement.holder) {
            true => db.write(|txn| async move { settle(&txn, settlement, now, ttl).await }).await,
            false => Ok(Settled::default()),
        };
        answer.send(settled).ok();
    });
    join_all(each).await;
}

#[cfg(test)]
mod tests;
