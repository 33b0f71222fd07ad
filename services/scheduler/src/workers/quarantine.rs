//! Quarantine of workers on which attempts fail repeatedly.
//!
//! ```text
//! trusted ─too many failures in a row─▶ quarantined ─its time has passed─▶ on probation ─a process starts─▶ trusted
//!                                        ▲────────fails, for twice as long──────┘
//! ```
//!
//! An attempt counts as a failure if it ends before its process starts, through a fault of the
//! worker ([`crate::outcome::fault`]). A quarantined worker gets no workload, and a worker on
//! probation gets one at a time. The workload is tried elsewhere as long as another worker could
//! take it.
//!
//! An image may be the cause, so quarantine and probation apply to the team whose attempts failed.
//! If an attempt of a second team fails, the count starts again at 1, and failures count for every
//! team.

use std::time::Duration;

use domain::Timestamp;
use sea_orm::sea_query::Expr;
use sea_orm::{ColumnTrait, DatabaseTransaction, DbErr, EntityTrait, QueryFilter, QuerySelect, Set};
use uuid::Uuid;

use crate::config::Config;
use crate::context::Context;
use crate::db::entity::worker;
use crate::notify::changes::Effects;
use crate::workers::revisions;

/// Returns the length of the `time`th consecutive quarantine, starting at 1.
fn term(config: &Config, time: i64) -> Duration {
    let doublings = u32::try_from(time.saturating_sub(1)).unwrap_or(u32::MAX).min(20);
    config.quarantine_for.saturating_mul(1 << doublings).min(config.quarantine_for_at_most)
}

/// Records a failed attempt of `team` on `worker`, in the transaction that ends the attempt.
pub(crate) async fn record_failure(
    txn: &DatabaseTransaction,
    worker: Uuid,
    (team, why): (&str, &str),
    config: &Config,
    now: Timestamp,
    effects: &mut Effects,
) -> Result<(), DbErr> {
    let Some(row) = worker::Entity::find_by_id(worker).lock_exclusive().one(txn).await? else {
        return Ok(());
    };
    let is_of_one_team = row.failures == 0 || row.failed_team.as_deref() == Some(team);
    // The failures of one team say little about the worker to other teams.
    let is_of_second_team = !is_of_one_team && row.failed_team.is_some();
    let (failures, quarantines, until) = if is_of_second_team {
        (1, 0, None)
    } else {
        (row.failures + 1, row.quarantines, row.quarantined_until)
    };
    // Attempts that were in progress at the start of the quarantine do not extend it.
    let again = until.is_none() && (quarantines > 0 || failures >= i64::from(config.quarantine_after));
    let mut noted = worker::ActiveModel {
        failures: Set(failures),
        failed_team: Set(is_of_one_team.then(|| team.to_owned())),
        last_failure: Set(why.to_owned()),
        quarantines: Set(quarantines),
        quarantined_until: Set(until),
        ..Default::default()
    };
    if again {
        let term = term(config, quarantines + 1);
        noted.quarantines = Set(quarantines + 1);
        noted.quarantined_until = Set(Some((now + term).0));
        tracing::warn!(
            worker.name = row.name,
            team = is_of_one_team.then_some(team),
            failures,
            why,
            for_seconds = term.as_secs(),
            "worker quarantined after repeated failures"
        );
    }
    worker::Entity::update_many().set(noted).filter(worker::Column::Id.eq(worker)).exec(txn).await?;
    revisions::changed(txn, &[worker], effects).await
}

/// Ends the probation of a worker on which a process has started. Does nothing without recorded
/// failures.
pub(crate) async fn record_success(
    txn: &DatabaseTransaction,
    worker: Uuid,
    effects: &mut Effects,
) -> Result<(), DbErr> {
    let forgiven = worker::Entity::update_many()
        .set(no_failures())
        .filter(worker::Column::Id.eq(worker))
        .filter(worker::Column::Failures.gt(0))
        .exec(txn)
        .await?;
    if forgiven.rows_affected > 0 {
        revisions::changed(txn, &[worker], effects).await?;
    }
    Ok(())
}

/// Returns the columns of a worker without recorded failures.
pub(crate) fn no_failures() -> worker::ActiveModel {
    worker::ActiveModel {
        failures: Set(0),
        failed_team: Set(None),
        last_failure: Set(String::new()),
        quarantines: Set(0),
        quarantined_until: Set(None),
        ..Default::default()
    }
}

/// Puts workers on probation whose quarantine has ended. Returns whether a worker was quarantined
/// before.
pub(crate) async fn end_quarantines(context: &Context, now: Timestamp) -> Result<bool, DbErr> {
    let first = worker::Entity::find()
        .select_only()
        .column_as(worker::Column::QuarantinedUntil.min(), "quarantined_until")
        .filter(worker::Column::QuarantinedUntil.is_not_null());
    let first = first.into_tuple::<Option<i64>>().one(context.db.read()).await?.flatten();
    let Some(first) = first else { return Ok(false) };
    if first > now.0 {
        return Ok(true);
    }
    context
        .change(async |txn| {
            let mut effects = Effects::default();
            put_on_probation(&txn, now, &mut effects).await?;
            Ok::<_, DbErr>((true, effects))
        })
        .await
}

/// Puts workers on probation whose quarantine has ended, within a transaction.
pub(crate) async fn put_on_probation(
    txn: &DatabaseTransaction,
    now: Timestamp,
    effects: &mut Effects,
) -> Result<(), DbErr> {
    let tried = worker::Entity::update_many()
        .col_expr(worker::Column::QuarantinedUntil, Expr::value(None::<i64>))
        .filter(worker::Column::QuarantinedUntil.is_not_null())
        .filter(worker::Column::QuarantinedUntil.lte(now.0))
        .exec_with_returning(txn)
        .await?;
    revisions::changed(txn, &tried.iter().map(|row| row.id).collect::<Vec<_>>(), effects).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quarantine_doubles_up_to_its_bound() {
        let config = Config {
            quarantine_for: Duration::from_secs(10),
            quarantine_for_at_most: Duration::from_secs(60),
            ..Config::new("sqlite:///x", "http://a:1")
        };
        let terms: Vec<_> = [1, 2, 3, 4, 5, i64::MAX].map(|time| term(&config, time).as_secs()).into();
        assert_eq!(terms, [10, 20, 40, 60, 60, 60]);
    }
}
