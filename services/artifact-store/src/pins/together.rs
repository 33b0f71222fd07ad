//! Pins and settlements of many holders in one transaction: of those of one team that come at the same time ([`db::Together`]).
//!
//! Invariant: of each becomes what would become of it alone. What is refused to one of them is refused to the transaction, which is rolled back, and
//! each is carried out alone then.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use db::{Broken, Together};
use futures::future::join_all;
use sea_orm::DbErr;
use tokio_util::task::TaskTracker;

use super::settling::settle_plain;
use super::{PinError, Pinned, SettleError, Settlement, Used, pin, pin_all, settle};
use crate::caches::outputs::Owned;
use crate::store::Store;

/// How many at most.
const MOST: usize = 64;

/// Pins and settles for all callers. Cheap to clone; clones share it.
#[derive(Clone)]
pub(crate) struct Pins {
    store: Arc<Store>,
    pinning: Together<Used, Result<Pinned, PinError>>,
    settling: Together<Settlement, Result<Vec<Owned>, SettleError>>,
}

impl Pins {
    /// It has tasks of its own among `tasks`.
    pub(crate) fn new(store: Arc<Store>, tasks: &TaskTracker) -> Self {
        let of_pins = store.clone();
        let pinning = Together::new(MOST, tasks.clone(), move |uses| {
            let store = of_pins.clone();
            async move {
                let (groups, numbers) = by_team(uses, |used: &Used| &used.team);
                in_order(numbers, join_all(groups.iter().map(|uses| pin_group(&store, uses))).await)
            }
        });
        let of_settlements = store.clone();
        let settling = Together::new(MOST, tasks.clone(), move |settlements| {
            let store = of_settlements.clone();
            async move {
                let (groups, numbers) = by_team(settlements, |settlement: &Settlement| &settlement.team);
                let settled = groups.iter().map(|settlements| settle_group(&store, settlements));
                in_order(numbers, join_all(settled).await)
            }
        });
        Self { store, pinning, settling }
    }

    /// [`pin`], with others where there is nothing to be locked in an order of its own.
    pub(crate) async fn pin(&self, used: Used) -> Result<Pinned, PinError> {
        if used.task_caches.is_empty() {
            return self.pinning.call(used).await.map_err(broken)?;
        }
        let (used, now) = (&used, self.store.now());
        self.store.db.write(|txn| async move { pin(&txn, used, now).await }).await
    }

    /// [`settle`], with others where nothing is kept.
    pub(crate) async fn settle(&self, settlement: Settlement) -> Result<Vec<Owned>, SettleError> {
        if settlement.outputs.is_empty() {
            return self.settling.call(settlement).await.map_err(broken)?;
        }
        let (settlement, now, ttl) = (&settlement, self.store.now(), self.store.config.resource_cache_ttl);
        self.store.db.write(|txn| async move { settle(&txn, settlement, now, ttl).await }).await
    }
}

/// As what the database fails with: it is safe to repeat.
fn broken(error: Broken) -> DbErr {
    DbErr::Custom(error.to_string())
}

/// Calls by their teams, and the number of each.
fn by_team<C>(calls: Vec<C>, team: impl Fn(&C) -> &str) -> (Vec<Vec<C>>, Vec<Vec<usize>>) {
    let mut groups = BTreeMap::<String, (Vec<C>, Vec<usize>)>::new();
    for (number, call) in calls.into_iter().enumerate() {
        let (group, numbers) = groups.entry(team(&call).to_owned()).or_default();
        group.push(call);
        numbers.push(number);
    }
    groups.into_values().unzip()
}

/// What was answered in groups, in the order of the numbers.
fn in_order<A>(numbers: Vec<Vec<usize>>, answers: Vec<Vec<A>>) -> Vec<A> {
    let numbers = numbers.into_iter().flatten();
    let mut answers: Vec<_> = numbers.zip(answers.into_iter().flatten()).collect();
    answers.sort_unstable_by_key(|(number, _)| *number);
    answers.into_iter().map(|(_, answer)| answer).collect()
}

/// Pins what holders of one team use, none of whom uses task caches.
async fn pin_group(store: &Store, uses: &[Used]) -> Vec<Result<Pinned, PinError>> {
    let (db, now) = (&store.db, store.now());
    if let [first, _, ..] = uses {
        let pinned = db.write(|txn| async move { pin_all(&txn, &first.team, uses, now).await }).await;
        match pinned {
            Ok(pinned) => return pinned.into_iter().map(Ok).collect(),
            Err(error) => tracing::debug!(%error, pins = uses.len(), "each is pinned alone"),
        }
    }
    let alone = uses.iter().map(|used| db.write(move |txn| async move { pin(&txn, used, now).await }));
    join_all(alone).await
}

/// Settles holders of one team that made nothing which is kept.
async fn settle_group(store: &Store, settlements: &[Settlement]) -> Vec<Result<Vec<Owned>, SettleError>> {
    let (db, now, ttl) = (&store.db, store.now(), store.config.resource_cache_ttl);
    let holders: &Vec<_> = &settlements.iter().map(|settlement| settlement.holder).collect();
    let mut left: HashSet<_> = holders.iter().copied().collect();
    if let [first, _, ..] = settlements {
        let settled = db.write(|txn| async move { settle_plain(&txn, &first.team, holders, now).await });
        match settled.await {
            Ok(others) => left = others,
            Err(error) => tracing::debug!(%error, settlements = holders.len(), "each is settled alone"),
        }
    }
    let each = settlements.iter().map(async |settlement| match left.contains(&settlement.holder) {
        true => db.write(|txn| async move { settle(&txn, settlement, now, ttl).await }).await,
        false => Ok(Vec::new()),
    });
    join_all(each).await
}

#[cfg(test)]
mod tests;
