//! Pins and settlements of many holders in one transaction: of those of one team that come at the same time ([`db::Together`]).
//!
//! Invariant: of each becomes what would become of it alone. What is refused to one of them is refused to the transaction, which is rolled back, and
//! each is carried out alone then.

use std::collections::HashSet;
use std::sync::Arc;

use db::Together;
use futures::future::join_all;
use tokio_util::task::TaskTracker;

use super::settling::settle_plain;
use super::{PinError, Pinned, SettleError, Settlement, Used, pin, pin_all, settle};
use crate::caches::outputs::Owned;
use crate::store::Store;

/// How many at most.
const MOST: usize = 64;

pub(crate) type Pinning = Together<Used, Result<Pinned, PinError>>;
pub(crate) type Settling = Together<Settlement, Result<Vec<Owned>, SettleError>>;

/// Pins what holders use ([`pin`]).
pub(crate) fn pinning(store: &Arc<Store>, tasks: TaskTracker) -> Pinning {
    let store = store.clone();
    Together::new(MOST, tasks, move |uses| {
        let store = store.clone();
        async move {
            let (groups, numbers) = groups(uses);
            in_order(numbers, join_all(groups.iter().map(|uses| pin_group(&store, uses))).await)
        }
    })
}

/// Settles holders ([`settle`]).
pub(crate) fn settling(store: &Arc<Store>, tasks: TaskTracker) -> Settling {
    let store = store.clone();
    Together::new(MOST, tasks, move |settlements| {
        let store = store.clone();
        async move {
            let (groups, numbers) = groups(settlements);
            let settled = groups.iter().map(|settlements| settle_group(&store, settlements));
            in_order(numbers, join_all(settled).await)
        }
    })
}

/// What is carried out with others.
trait OfTeam {
    fn team(&self) -> &str;
    /// Whether it may be carried out with others.
    fn is_plain(&self) -> bool;
}

impl OfTeam for Used {
    fn team(&self) -> &str {
        &self.team
    }

    fn is_plain(&self) -> bool {
        self.task_caches.is_empty()
    }
}

impl OfTeam for Settlement {
    fn team(&self) -> &str {
        &self.team
    }

    fn is_plain(&self) -> bool {
        self.outputs.is_empty()
    }
}

/// Calls in groups, and the number of each. Those of a group are plain and of one team; or there is one.
fn groups<C: OfTeam>(calls: Vec<C>) -> (Vec<Vec<C>>, Vec<Vec<usize>>) {
    let (mut groups, mut numbers) = (Vec::<Vec<C>>::new(), Vec::<Vec<usize>>::new());
    for (number, call) in calls.into_iter().enumerate() {
        let goes_with = |other: &C| call.is_plain() && other.is_plain() && other.team() == call.team();
        let found = groups.iter().position(|group| group.iter().all(goes_with));
        match found {
            Some(found) => {
                groups[found].push(call);
                numbers[found].push(number);
            }
            None => {
                groups.push(vec![call]);
                numbers.push(vec![number]);
            }
        }
    }
    (groups, numbers)
}

/// What was answered in groups, in the order of the numbers.
fn in_order<A>(numbers: Vec<Vec<usize>>, answers: Vec<Vec<A>>) -> Vec<A> {
    let numbers = numbers.into_iter().flatten();
    let mut answers: Vec<_> = numbers.zip(answers.into_iter().flatten()).collect();
    answers.sort_unstable_by_key(|(number, _)| *number);
    answers.into_iter().map(|(_, answer)| answer).collect()
}

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
