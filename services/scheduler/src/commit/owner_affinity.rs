//! Affinity of owners: all leases of an owner are granted on one worker, as long as that worker
//! takes work.
//!
//! The first grant to an owner writes a row with its worker, and every later transaction locks that
//! row. Two replicas therefore never grant leases of one owner on two workers. If two replicas
//! concurrently grant the first leases to owners of one group, the row of a rejected new owner may
//! remain. Its next lease then goes to that worker, as long as the worker takes work.

use std::collections::{BTreeMap, HashMap};

use db::rows::{self, Column};
use domain::{Timestamp, WorkerId};
use sea_orm::{ConnectionTrait, DatabaseTransaction, DbErr, QueryResult, Statement, Value};
use serde::Serialize;
use uuid::Uuid;

use super::{CommitResult, Grant, Holder};

/// An owner of containers: the team, and the owner's name.
type Owner<'g> = (&'g str, &'g str);

#[derive(Serialize)]
struct Home<'g> {
    team: &'g str,
    owner: &'g str,
    worker_id: Uuid,
}

const HOME: [(&str, Column); 3] =
    [("team", Column::Text), ("owner", Column::Text), ("worker_id", Column::Uuid)];

/// A worker takes work if its desired state is `run` and it is not lost.
const TAKES_WORK: &str = "EXISTS (SELECT 1 FROM workers WHERE workers.id = owner_affinity.worker_id AND workers.state <> 'lost' \
                          AND workers.desired = 'run')";

/// Rejects grants for owners whose containers are on another worker, together with their groups.
/// The first grant to an owner determines its worker. A new grant determines it again if that
/// worker takes no more work. Rejected grants determine nothing.
pub(super) async fn enforce_affinity<'g>(
    txn: &DatabaseTransaction,
    granted: Vec<&'g Grant>,
    done: &mut CommitResult,
    now: Timestamp,
) -> Result<Vec<&'g Grant>, DbErr> {
    let requested: BTreeMap<_, _> =
        granted.iter().filter_map(|grant| Some((grant.owner()?, grant.worker))).collect();
    if requested.is_empty() {
        return Ok(granted);
    }
    let mut homes = lock_homes(txn, &requested).await?;
    let left = reject_elsewhere(granted, &mut homes, done);
    let new_homes: BTreeMap<_, _> =
        left.iter().filter_map(|grant| Some((grant.owner()?, grant.worker))).collect();
    // Another replica may have written the first row of an owner meanwhile.
    let mut homes = write_homes(txn, &new_homes, now).await?;
    Ok(reject_elsewhere(left, &mut homes, done))
}

/// Rejects groups with a grant for an owner on another worker. The first remaining grant determines
/// the worker of a new owner.
fn reject_elsewhere<'g>(
    granted: Vec<&'g Grant>,
    homes: &mut HashMap<(String, String), WorkerId>,
    done: &mut CommitResult,
) -> Vec<&'g Grant> {
    let mut left = Vec::with_capacity(granted.len());
    for together in granted.chunk_by(|one, next| one.group.is_some() && one.group == next.group) {
        let (mut elsewhere, mut new) = (Vec::new(), HashMap::new());
        for grant in together {
            let Some((team, owner)) = grant.owner() else { continue };
            let owner = (team.to_owned(), owner.to_owned());
            let home = match homes.get(&owner) {
                Some(home) => *home,
                None => *new.entry(owner).or_insert(grant.worker),
            };
            if home != grant.worker {
                elsewhere.push((grant.lease, home));
            }
        }
        if elsewhere.is_empty() {
            homes.extend(new);
            left.extend(together);
        } else {
            done.affine_workers.extend(elsewhere);
            done.refused.extend(together.iter().map(|grant| grant.lease));
        }
    }
    left
}

fn value(homes: &BTreeMap<Owner<'_>, WorkerId>) -> Result<Value, DbErr> {
    let rows = homes.iter().map(|((team, owner), worker)| Home { team, owner, worker_id: worker.uuid() });
    rows::value(&rows.collect::<Vec<_>>())
}

fn read(rows: &[QueryResult]) -> Result<HashMap<(String, String), WorkerId>, DbErr> {
    let home = |row: &QueryResult| {
        let owner = (row.try_get("", "team")?, row.try_get("", "owner")?);
        Ok((owner, WorkerId::from_uuid(row.try_get("", "worker_id")?)))
    };
    rows.iter().map(home).collect()
}

/// Reads and locks the workers of these owners, if they take work.
async fn lock_homes(
    txn: &DatabaseTransaction,
    requested: &BTreeMap<Owner<'_>, WorkerId>,
) -> Result<HashMap<(String, String), WorkerId>, DbErr> {
    let backend = txn.get_database_backend();
    let query = format!(
        "SELECT team, owner, worker_id FROM owner_affinity
         WHERE (team, owner) IN (SELECT team, owner FROM ({}) AS given) AND {TAKES_WORK} ORDER BY team, owner {}",
        rows::query(backend, 1, &HOME),
        rows::lock(backend, "FOR UPDATE")
    );
    read(&txn.query_all_raw(Statement::from_sql_and_values(backend, query, [value(requested)?])).await?)
}

/// Records the grants to these owners, and returns their workers.
async fn write_homes(
    txn: &DatabaseTransaction,
    granted: &BTreeMap<Owner<'_>, WorkerId>,
    now: Timestamp,
) -> Result<HashMap<(String, String), WorkerId>, DbErr> {
    if granted.is_empty() {
        return Ok(HashMap::new());
    }
    let backend = txn.get_database_backend();
    let query = format!(
        "INSERT INTO owner_affinity (team, owner, worker_id, granted_at)
         SELECT team, owner, worker_id, $2 FROM ({}) AS given WHERE TRUE ORDER BY team, owner
         ON CONFLICT (team, owner) DO UPDATE SET granted_at = excluded.granted_at,
         worker_id = CASE WHEN {TAKES_WORK} THEN owner_affinity.worker_id ELSE excluded.worker_id END
         RETURNING team, owner, worker_id",
        rows::query(backend, 1, &HOME)
    );
    let values = [value(granted)?, now.0.into()];
    read(&txn.query_all_raw(Statement::from_sql_and_values(backend, query, values)).await?)
}

impl Grant {
    /// Returns the owner of the containers under the lease: team and name.
    pub(super) fn owner(&self) -> Option<(&str, &str)> {
        match &self.holder {
            Holder::Driven { owner, .. } if !owner.is_empty() => Some((&self.demand.shape.team, owner)),
            Holder::Driven { .. } | Holder::Workload { .. } => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use db::Database;
    use domain::LeaseId;
    use domain::worker::SessionClaims;
    use sea_orm::EntityTrait;
    use testing::databases::TestDatabase;

    use super::*;
    use crate::config::Config;
    use crate::db::entity::lease::Kind;
    use crate::db::entity::owner_affinity;
    use crate::notify::changes::Effects;
    use crate::placement::{DecidedBy, Demand, Purpose, Resources, Shape};
    use crate::workers;
    use crate::workers::test_support::registration;

    fn grant(session: &SessionClaims, owner: &str, group: Option<usize>) -> Grant {
        let shape = Shape {
            team: "main".to_owned(),
            platform: "linux".to_owned(),
            tags: vec![],
            process: None,
            requests: Resources::default(),
            purpose: Purpose::Build,
        };
        let lease = LeaseId::new();
        Grant {
            group,
            lease,
            demand: Arc::new(Demand { kind: Kind::Task, ..shape.requested_by(lease.uuid()) }),
            worker: session.worker,
            incarnation: session.incarnation,
            holder: Holder::Driven {
                expires_at: Timestamp::now(),
                request: String::new(),
                owner: owner.to_owned(),
                settles: false,
            },
            decided_by: DecidedBy::Only,
        }
    }

    /// Returns the committed leases, and the result for the rejected ones.
    async fn keep(db: &Database, grants: &[Grant]) -> (Vec<LeaseId>, CommitResult) {
        let kept = db.write(async |txn| {
            let mut done = CommitResult::default();
            let granted =
                enforce_affinity(&txn, grants.iter().collect(), &mut done, Timestamp::now()).await?;
            Ok::<_, DbErr>((granted.iter().map(|grant| grant.lease).collect(), done))
        });
        kept.await.expect("judged")
    }

    async fn rejected_grant_sets_no_affinity(database: TestDatabase) {
        let db = Database::connect::<crate::Schema>(&database.url).await.expect("a database");
        let config = Config::new(&database.url, "");
        let register = async |name: &str| {
            let registration = registration(name);
            let sessions = db.write(async |txn| {
                workers::register(&txn, &[&registration], &config, Timestamp::now(), &mut Effects::default())
                    .await
            });
            sessions.await.expect("answered").remove(0).expect("registered")
        };
        let (one, other) = (register("one").await, register("other").await);
        let homes = async || {
            let rows = owner_affinity::Entity::find().all(db.read()).await.expect("owners");
            let home = |row: owner_affinity::Model| (row.owner, WorkerId::from_uuid(row.worker_id));
            rows.into_iter().map(home).collect::<BTreeMap<_, _>>()
        };
        let of = |homes: &[(&str, &SessionClaims)]| {
            let home = |(owner, session): &(&str, &SessionClaims)| ((*owner).to_owned(), session.worker);
            homes.iter().map(home).collect::<BTreeMap<_, _>>()
        };
        let first = grant(&one, "known", None);
        assert_eq!(keep(&db, std::slice::from_ref(&first)).await.0, [first.lease]);
        assert_eq!(homes().await, of(&[("known", &one)]));

        // The whole group is rejected. Another grant in the same transaction may place the new
        // owner elsewhere.
        let group = Some(0);
        let [elsewhere, with_it] = [grant(&other, "known", group), grant(&other, "new", group)];
        let alone = grant(&one, "new", None);
        let all = [elsewhere, with_it, alone, grant(&one, "", None)];
        let (granted, done) = keep(&db, &all).await;
        assert_eq!(granted, [all[2].lease, all[3].lease]);
        assert_eq!(done.refused, [all[0].lease, all[1].lease].into());
        assert_eq!(done.affine_workers, [(all[0].lease, one.worker)].into());
        assert_eq!(homes().await, of(&[("known", &one), ("new", &one)]));

        let apart = [grant(&one, "third", Some(1)), grant(&other, "third", Some(1))];
        let (granted, done) = keep(&db, &apart).await;
        assert_eq!((granted, done.refused.len()), (vec![], 2));
        assert_eq!(homes().await, of(&[("known", &one), ("new", &one)]));

        // If the worker takes no more work, the owner may move.
        let lost = "UPDATE workers SET state = 'lost' WHERE name = 'one'";
        db.write(async |txn| txn.execute_unprepared(lost).await).await.expect("written");
        let moved = grant(&other, "known", None);
        assert_eq!(keep(&db, std::slice::from_ref(&moved)).await.0, [moved.lease]);
        assert_eq!(homes().await, of(&[("known", &other), ("new", &one)]));
    }

    #[tokio::test]
    async fn rejected_grant_sets_no_affinity_sqlite() {
        rejected_grant_sets_no_affinity(testing::databases::sqlite()).await;
    }

    #[tokio::test]
    async fn rejected_grant_sets_no_affinity_postgres() {
        rejected_grant_sets_no_affinity(testing::databases::postgres().await).await;
    }
}
