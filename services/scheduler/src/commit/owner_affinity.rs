//! Owners of containers: the leases of one are granted on one worker, as long as that takes work.
//!
//! Where an owner's containers are is a row that the first grant to it writes, and that is looked at, locked, in the transaction of every other. So two
//! replicas never grant on two workers what belongs together. Where two are first at one moment with owners of one group, the row of another new
//! owner of the group that is left out may stay: it draws what comes next for that owner to that worker, as long as that takes work.

use std::collections::{BTreeMap, HashMap};

use db::rows::{self, Column};
use domain::{Timestamp, WorkerId};
use sea_orm::{ConnectionTrait, DatabaseTransaction, DbErr, QueryResult, Statement, Value};
use serde::Serialize;
use uuid::Uuid;

use super::{CommitResult, Grant, Holder};

/// Whose containers they are: a team, and an owner in its words.
type Owner<'g> = (&'g str, &'g str);

#[derive(Serialize)]
struct Home<'g> {
    team: &'g str,
    owner: &'g str,
    worker_id: Uuid,
}

const HOME: [(&str, Column); 3] =
    [("team", Column::Text), ("owner", Column::Text), ("worker_id", Column::Uuid)];

/// One that takes work has not been asked for anything else, and is not lost.
const TAKES_WORK: &str = "EXISTS (SELECT 1 FROM workers WHERE workers.id = owner_affinity.worker_id AND workers.state <> 'lost' \
                          AND workers.desired = 'run')";

/// Leaves out what was decided for an owner whose containers are on another worker, with all of its group. The first grant to an owner says
/// where they are, and any once that worker takes no work any more; what is left out says nothing.
pub(super) async fn keep_to_workers<'g>(
    txn: &DatabaseTransaction,
    held: Vec<&'g Grant>,
    done: &mut CommitResult,
    now: Timestamp,
) -> Result<Vec<&'g Grant>, DbErr> {
    let asked: BTreeMap<_, _> =
        held.iter().filter_map(|grant| Some((grant.owner()?, grant.worker))).collect();
    if asked.is_empty() {
        return Ok(held);
    }
    let mut homes = lock_homes(txn, &asked).await?;
    let left = leave_out(held, &mut homes, done);
    let granted: BTreeMap<_, _> =
        left.iter().filter_map(|grant| Some((grant.owner()?, grant.worker))).collect();
    // Another replica may have been first with one that had none.
    let mut homes = write_homes(txn, &granted, now).await?;
    Ok(leave_out(left, &mut homes, done))
}

/// Leaves out the groups of which one is for an owner with another home. Who has none has it where the first of the others is.
fn leave_out<'g>(
    held: Vec<&'g Grant>,
    homes: &mut HashMap<(String, String), WorkerId>,
    done: &mut CommitResult,
) -> Vec<&'g Grant> {
    let mut left = Vec::with_capacity(held.len());
    for together in held.chunk_by(|one, next| one.group.is_some() && one.group == next.group) {
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
            done.kept_to.extend(elsewhere);
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

/// Where the containers of these owners are, on workers that take work. Nobody changes that meanwhile.
async fn lock_homes(
    txn: &DatabaseTransaction,
    asked: &BTreeMap<Owner<'_>, WorkerId>,
) -> Result<HashMap<(String, String), WorkerId>, DbErr> {
    let backend = txn.get_database_backend();
    let query = format!(
        "SELECT team, owner, worker_id FROM owner_affinity
         WHERE (team, owner) IN (SELECT team, owner FROM ({}) AS given) AND {TAKES_WORK} ORDER BY team, owner {}",
        rows::query(backend, 1, &HOME),
        rows::lock(backend, "FOR UPDATE")
    );
    read(&txn.query_all_raw(Statement::from_sql_and_values(backend, query, [value(asked)?])).await?)
}

/// Notes that something was granted to these owners there, and answers where their containers are.
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
    /// Whose containers run under it: the team, and the owner in its words.
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
    use crate::placement::{DecidedBy, Purpose, Resources, Shape};
    use crate::workers;
    use crate::workers::test_support::hello;

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
            kind: Kind::Task,
            demand: Arc::new(shape.asked_by(lease.uuid())),
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

    /// Which of these are granted, and what is known of those that are not.
    async fn keep(db: &Database, grants: &[Grant]) -> (Vec<LeaseId>, CommitResult) {
        let kept = db.write(async |txn| {
            let mut done = CommitResult::default();
            let held = keep_to_workers(&txn, grants.iter().collect(), &mut done, Timestamp::now()).await?;
            Ok::<_, DbErr>((held.iter().map(|grant| grant.lease).collect(), done))
        });
        kept.await.expect("judged")
    }

    async fn what_is_not_granted_says_nothing_about_its_owner(database: TestDatabase) {
        let db = Database::connect::<crate::Schema>(&database.url).await.expect("a database");
        let config = Config::new(&database.url, "");
        let let_in = async |name: &str| {
            let hello = hello(name);
            let said = db.write(async |txn| {
                workers::register(&txn, &[&hello], &config, Timestamp::now(), &mut Effects::default()).await
            });
            said.await.expect("answered").remove(0).expect("let in")
        };
        let (one, other) = (let_in("one").await, let_in("other").await);
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

        // All of the group is left out, and another may have its new owner elsewhere, in the same transaction.
        let group = Some(0);
        let [elsewhere, with_it] = [grant(&other, "known", group), grant(&other, "new", group)];
        let alone = grant(&one, "new", None);
        let all = [elsewhere, with_it, alone, grant(&one, "", None)];
        let (granted, done) = keep(&db, &all).await;
        assert_eq!(granted, [all[2].lease, all[3].lease]);
        assert_eq!(done.refused, [all[0].lease, all[1].lease].into());
        assert_eq!(done.kept_to, [(all[0].lease, one.worker)].into());
        assert_eq!(homes().await, of(&[("known", &one), ("new", &one)]));

        let apart = [grant(&one, "third", Some(1)), grant(&other, "third", Some(1))];
        let (granted, done) = keep(&db, &apart).await;
        assert_eq!((granted, done.refused.len()), (vec![], 2));
        assert_eq!(homes().await, of(&[("known", &one), ("new", &one)]));

        // Of a worker that takes no work any more anybody may be kept elsewhere.
        let lost = "UPDATE workers SET state = 'lost' WHERE name = 'one'";
        db.write(async |txn| txn.execute_unprepared(lost).await).await.expect("written");
        let moved = grant(&other, "known", None);
        assert_eq!(keep(&db, std::slice::from_ref(&moved)).await.0, [moved.lease]);
        assert_eq!(homes().await, of(&[("known", &other), ("new", &one)]));
    }

    #[tokio::test]
    async fn what_is_not_granted_says_nothing_about_its_owner_sqlite() {
        what_is_not_granted_says_nothing_about_its_owner(testing::databases::sqlite()).await;
    }

    #[tokio::test]
    async fn what_is_not_granted_says_nothing_about_its_owner_postgres() {
        what_is_not_granted_says_nothing_about_its_owner(testing::databases::postgres().await).await;
    }
}
