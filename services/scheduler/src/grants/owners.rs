//! Owners of containers: the leases of one are granted on one worker, as long as that takes work.
//!
//! Where an owner's containers are is a row that the first grant to it writes, and that is looked at, locked, in the transaction of every other. So two
//! replicas never grant on two workers what belongs together.

use std::collections::{BTreeMap, HashMap};

use db::rows::{self, Column};
use domain::{Timestamp, WorkerId};
use sea_orm::{ConnectionTrait, DatabaseTransaction, DbErr, Statement};
use serde::Serialize;
use uuid::Uuid;

use super::{Done, Grant, Holder};

/// Leaves out what was decided for an owner whose containers are on another worker, with all of its group. The first grant to an owner says
/// where they are, and any once that worker takes no work any more.
pub(super) async fn keep_to_workers<'g>(
    txn: &DatabaseTransaction,
    held: Vec<&'g Grant>,
    done: &mut Done,
    now: Timestamp,
) -> Result<Vec<&'g Grant>, DbErr> {
    #[derive(Serialize)]
    struct Kept<'g> {
        team: &'g str,
        owner: &'g str,
        worker_id: Uuid,
    }
    const KEPT: [(&str, Column); 3] =
        [("team", Column::Text), ("owner", Column::Text), ("worker_id", Column::Uuid)];

    let mut wanted = BTreeMap::new();
    for grant in &held {
        if let Some(owner) = grant.owner() {
            wanted.entry(owner).or_insert(grant.worker);
        }
    }
    if wanted.is_empty() {
        return Ok(held);
    }
    let given = wanted.iter().map(|((team, owner), worker)| Kept { team, owner, worker_id: worker.uuid() });
    let given: Vec<_> = given.collect();
    let backend = txn.get_database_backend();
    // One that takes work has not been asked for anything else, and is not lost.
    let query = format!(
        "INSERT INTO owner_workers (team, owner, worker_id, granted_at)
         SELECT team, owner, worker_id, $2 FROM ({}) AS given WHERE TRUE ORDER BY team, owner
         ON CONFLICT (team, owner) DO UPDATE SET granted_at = excluded.granted_at,
         worker_id = CASE WHEN EXISTS (SELECT 1 FROM workers WHERE workers.id = owner_workers.worker_id
         AND workers.state <> 'lost' AND workers.desired = 'run') THEN owner_workers.worker_id ELSE excluded.worker_id END
         RETURNING team, owner, worker_id",
        rows::query(backend, 1, &KEPT)
    );
    let values = [rows::value(&given)?, now.0.into()];
    let mut kept = HashMap::with_capacity(given.len());
    for row in txn.query_all_raw(Statement::from_sql_and_values(backend, query, values)).await? {
        let key: (String, String) = (row.try_get("", "team")?, row.try_get("", "owner")?);
        kept.insert(key, WorkerId::from_uuid(row.try_get("", "worker_id")?));
    }
    let mut left = Vec::with_capacity(held.len());
    for together in held.chunk_by(|one, next| one.group.is_some() && one.group == next.group) {
        let elsewhere = |grant: &&&Grant| {
            let (team, owner) = grant.owner()?;
            let kept = kept.get(&(team.to_owned(), owner.to_owned())).copied()?;
            (kept != grant.worker).then_some((grant.lease, kept))
        };
        let elsewhere: Vec<_> = together.iter().filter_map(|grant| elsewhere(&grant)).collect();
        if elsewhere.is_empty() {
            left.extend(together);
        } else {
            done.kept_to.extend(elsewhere);
            done.refused.extend(together.iter().map(|grant| grant.lease));
        }
    }
    Ok(left)
}

impl Grant {
    /// Whose containers run under it: the team, and the owner in its words.
    pub(super) fn owner(&self) -> Option<(&str, &str)> {
        match &self.holder {
            Holder::Driven { owner, .. } if !owner.is_empty() => Some((&self.demand.shape.team, owner)),
            Holder::Driven { .. } | Holder::Workload { .. } => None,
        }
    }
}
