//! A small plan in one statement, which is a transaction by itself: one round trip where [`super::carry_out`] takes four or more.
//!
//! Within a statement nothing of ours can judge grants. So they are judged before it, on what is remembered of their workers, and the statement is
//! told what may be on each of these for that to hold ([`Room`]). Where all their rows, locked, are of the revision that is remembered, and say no
//! more than that, all grants are made, and none otherwise. What is given back is given back in either case, but for leases that settle: something
//! was pinned for them, which is let go by a parcel in the same transaction. What is left undone is done as all other plans are.
//!
//! Invariant: limits hold. What a worker may take with more on it, it may take with less (`what_is_taken_with_more_is_taken_with_less`), and whatever
//! else grants are judged by has another revision once it is changed ([`crate::registry::changed`]).

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::LazyLock;

use db::Database;
use db::rows::{self, Column};
use domain::{LeaseId, Timestamp, WorkerId};
use sea_orm::{ActiveEnum, DbBackend, DbErr, FromQueryResult, Statement};
use serde::Serialize;
use uuid::Uuid;

use super::counts::{COUNTS, Change, Changes, Counts, Locked, counts, known_rows, signed};
use super::given_back::ending;
use super::{A_LITTLE, Done, Grant, Holder, NEW_LEASE, Plan, new_leases};
use crate::entity::lease::{EndedBy, LEFT, Left, State};
use crate::memory::{Facts, SharedFacts};
use crate::placement::{self, Load, Resources};
use crate::workers;

/// How many leases are granted and given back at most by one statement: for more, the round trips do not matter, and others can begin while the last
/// one is written to the disk.
const MOST: usize = 64;

/// How much more than is remembered may be on a worker that is not bounded otherwise.
const MORE: Load = Load {
    tasks: 1 << 16,
    checks: 1 << 16,
    reserved: Resources { cpu_millis: 1 << 60, memory_bytes: 1 << 60, disk_bytes: 1 << 60 },
    kept_containers: 0,
    kept_volumes: 0,
};

/// A plan for one statement.
#[derive(Debug)]
pub(crate) struct AtOnce {
    rooms: Vec<Room>,
    changes: Changes,
    generations: HashMap<Uuid, i64>,
}

/// What is done to the row of a worker, and what it may say for that: of which revision it is, and what is on it, after what was given back.
#[derive(Debug, Serialize)]
struct Room {
    id: Uuid,
    /// `None`: nothing is granted there, and the row may say whatever it says.
    revision: Option<i64>,
    most_tasks: i64,
    most_checks: i64,
    most_cpu_millis: i64,
    most_memory_bytes: i64,
    most_disk_bytes: i64,
    #[serde(flatten)]
    change: Change,
}

const ROOM: [(&str, Column); 12] = [
    ("id", Column::Uuid),
    ("revision", Column::Integer),
    ("most_tasks", Column::Integer),
    ("most_checks", Column::Integer),
    ("most_cpu_millis", Column::Integer),
    ("most_memory_bytes", Column::Integer),
    ("most_disk_bytes", Column::Integer),
    ("tasks", Column::Integer),
    ("checks", Column::Integer),
    ("cpu_millis", Column::Integer),
    ("memory_bytes", Column::Integer),
    ("disk_bytes", Column::Integer),
];

impl Plan {
    /// Whether one statement may do for it in this database: it is small, and nothing but workers must be looked at.
    pub(crate) fn may_be_at_once(&self, db: &Database) -> bool {
        let Self { releases, submitted, pinned, leases_may_exist, grants, may_be_spread_anew: _ } = self;
        let is_small = (1..=MOST).contains(&(releases.len() + grants.len()));
        let is_plain = submitted.is_empty() && pinned.is_empty() && !leases_may_exist;
        !db.is_sqlite() && is_small && is_plain && grants.iter().all(Grant::is_plain)
    }

    /// What one statement does of it. `None`: it takes a transaction of several, as far as is known.
    pub(crate) fn at_once(&self, db: &Database, facts: &SharedFacts) -> Option<AtOnce> {
        if !self.may_be_at_once(db) {
            return None;
        }
        let mut changes = Changes::default();
        let mut of_workers: BTreeMap<Uuid, Vec<&Grant>> = BTreeMap::new();
        for (_, worker) in &self.releases {
            of_workers.entry(worker.uuid()).or_default();
        }
        for grant in &self.grants {
            changes.take(grant);
            of_workers.entry(grant.worker.uuid()).or_default().push(grant);
        }
        // A statement that does nothing costs as much as one that grants all.
        let most_tasks = self.may_be_spread_anew.then(|| self.most_tasks().saturating_add(A_LITTLE));
        let most_tasks = most_tasks.unwrap_or(u32::MAX);
        let facts = facts.lock();
        let (mut rooms, mut generations) = (Vec::with_capacity(of_workers.len()), HashMap::new());
        for (id, grants) in of_workers {
            let gives_back = self.releases.iter().any(|(_, worker)| worker.uuid() == id);
            let most = if grants.is_empty() {
                None
            } else {
                Some(most(id, &grants, most_tasks, gives_back, &facts)?)
            };
            rooms.push(Room::new(id, most, changes.of(id)));
            generations.extend(facts.row(id).map(|row| (id, row.generation)));
        }
        Some(AtOnce { rooms, changes, generations })
    }
}

impl Grant {
    /// Whether nothing but its worker must be looked at.
    fn is_plain(&self) -> bool {
        match &self.holder {
            Holder::Driven { settles, owner, .. } => !settles && owner.is_empty(),
            Holder::Workload { .. } => false,
        }
    }
}

/// The revision of a worker, and how much may be on it so that all of `grants` hold. `None`: they do not with what is known to be on it.
fn most(
    id: Uuid,
    grants: &[&Grant],
    most_tasks: u32,
    gives_back: bool,
    facts: &Facts,
) -> Option<(i64, Load)> {
    let row = facts.row(id)?;
    let worker = facts.as_placed(row).ok()?;
    let hold_with = |load: &Load| {
        let mut worker = placement::Worker { load: *load, ..worker.clone() };
        grants.iter().all(|grant| {
            let holds = worker.incarnation == grant.incarnation
                && placement::refusals(&grant.demand, &worker).is_empty();
            worker.load = worker.load.with(grant.kind, &grant.demand.shape.requests);
            holds
        })
    };
    let mut most = [worker.load.and(&MORE), worker.load].into_iter().find(hold_with)?;
    // Those before the last that is spread are on it by then.
    let slots = grants.iter().filter(|grant| grant.kind.takes_a_slot());
    if let Some((before, _)) = slots.enumerate().filter(|(_, grant)| grant.may_be_spread()).last() {
        most.tasks = most.tasks.min(most_tasks.checked_sub(u32::try_from(before).ok()?)?);
    }
    // With what is known now it would do nothing.
    (gives_back || worker.load.tasks <= most.tasks).then_some((row.revision, most))
}

impl Room {
    fn new(id: Uuid, most: Option<(i64, Load)>, change: Change) -> Self {
        let (revision, most) = most.unzip();
        let Load { tasks, checks, reserved, .. } = most.unwrap_or(MORE);
        Self {
            id,
            revision,
            most_tasks: tasks.into(),
            most_checks: checks.into(),
            most_cpu_millis: signed(reserved.cpu_millis),
            most_memory_bytes: signed(reserved.memory_bytes),
            most_disk_bytes: signed(reserved.disk_bytes),
            change,
        }
    }
}

impl AtOnce {
    /// Carries out `plan`, which this is for one statement. Answers what is left of it as well, if anything is.
    pub(crate) async fn carry_out(
        self,
        db: &Database,
        plan: &Plan,
        facts: &SharedFacts,
        now: Timestamp,
    ) -> Result<(Done, Option<Plan>), DbErr> {
        let statement = self.statement(plan, now)?;
        let Self { mut changes, .. } = self;
        // Where no worker is there nothing was granted.
        let (mut ended, mut locked, mut hold) = (Vec::with_capacity(plan.releases.len()), Vec::new(), false);
        for row in db.write_at_once(&statement).await? {
            match row.try_get::<Option<Uuid>>("", "lease_id")? {
                Some(_) => ended.push(Left::from_query_result(&row, "")?),
                None => {
                    hold = row.try_get("", "hold")?;
                    locked.push(Counts::from_query_result(&row, "")?);
                }
            }
        }
        if !hold {
            changes = Changes::default();
        }
        let mut done = Done::default();
        for lease in &ended {
            if lease.kind.takes_a_slot() {
                done.freed.insert(WorkerId::from_uuid(lease.worker_id));
            }
            changes.give_back(lease);
        }
        done.found = locked.iter().map(Counts::found).collect();
        let Locked { mut rows, others, mut transaction } = known_rows(locked, facts);
        changes.note(&mut rows);
        // Read after it, these say already what was done.
        match workers::find_all(db.read(), others).await {
            Ok(others) => rows.extend(others),
            Err(error) => {
                // It is done all the same. What it changed is read as what others did.
                tracing::debug!(%error, "workers were not read after a grant");
                transaction = None;
            }
        }
        (done.workers, done.transaction) = (rows, transaction);
        let ended: HashSet<_> = ended.iter().map(|lease| LeaseId::from_uuid(lease.lease_id)).collect();
        let is_left = |(lease, _): &&(LeaseId, WorkerId)| !ended.contains(lease);
        let left = Plan {
            releases: plan.releases.iter().filter(is_left).copied().collect(),
            grants: if hold { Vec::new() } else { plan.grants.clone() },
            may_be_spread_anew: plan.may_be_spread_anew,
            ..Plan::default()
        };
        Ok((done, Some(left).filter(|left| !left.is_empty())))
    }

    /// It answers the leases that it has ended, then the workers that it has locked, as they were.
    pub(super) fn statement(&self, plan: &Plan, now: Timestamp) -> Result<Statement, DbErr> {
        static QUERY: LazyLock<String> = LazyLock::new(query);
        let grants: Vec<_> = plan.grants.iter().collect();
        let values = [
            rows::ids(plan.releases.iter().map(|(lease, _)| lease.uuid()))?,
            now.0.into(),
            EndedBy::Reported.to_value().into(),
            rows::value(&self.rooms)?,
            rows::value(&new_leases(&grants, &self.generations))?,
            State::Granted.to_value().into(),
        ];
        Ok(Statement::from_sql_and_values(DbBackend::Postgres, QUERY.as_str(), values))
    }
}

/// Leases are locked before workers, as everywhere: what is first in such a union is carried out first, and whole.
///
/// What is given, found and given back of a worker is put together by grouping: there are no hash joins ([`crate::Schema`]).
fn query() -> String {
    let backend = DbBackend::Postgres;
    let nothing = |columns: &[&str]| {
        let one = |name: &&str| format!("NULL AS {}", name.rsplit(' ').next().unwrap_or(name));
        columns.iter().map(one).collect::<Vec<_>>().join(", ")
    };
    format!(
        "WITH given AS ({given}),
         ended AS ({ended}),
         locked AS (SELECT {counts} FROM workers WHERE id = ANY(ARRAY(SELECT id FROM given)) ORDER BY id FOR NO KEY UPDATE),
         by_worker AS (
             SELECT id, MAX(known) AS known, MAX(found) AS found,
             CAST(SUM(tasks_left) AS BIGINT) AS tasks_left, CAST(SUM(checks_left) AS BIGINT) AS checks_left, CAST(SUM(cpu_left) AS BIGINT) AS cpu_left,
             CAST(SUM(memory_left) AS BIGINT) AS memory_left, CAST(SUM(disk_left) AS BIGINT) AS disk_left,
             CAST(SUM(tasks) AS BIGINT) AS tasks, CAST(SUM(checks) AS BIGINT) AS checks, CAST(SUM(cpu_millis) AS BIGINT) AS cpu_millis,
             CAST(SUM(memory_bytes) AS BIGINT) AS memory_bytes, CAST(SUM(disk_bytes) AS BIGINT) AS disk_bytes,
             CAST(SUM(freed_tasks) AS BIGINT) AS freed_tasks, CAST(SUM(freed_checks) AS BIGINT) AS freed_checks,
             CAST(SUM(freed_cpu) AS BIGINT) AS freed_cpu, CAST(SUM(freed_memory) AS BIGINT) AS freed_memory, CAST(SUM(freed_disk) AS BIGINT) AS freed_disk
             FROM (
                 SELECT id, revision AS known, CAST(NULL AS BIGINT) AS found, most_tasks AS tasks_left, most_checks AS checks_left,
                 most_cpu_millis AS cpu_left, most_memory_bytes AS memory_left, most_disk_bytes AS disk_left,
                 tasks, checks, cpu_millis, memory_bytes, disk_bytes,
                 0 AS freed_tasks, 0 AS freed_checks, CAST(0 AS BIGINT) AS freed_cpu, CAST(0 AS BIGINT) AS freed_memory, CAST(0 AS BIGINT) AS freed_disk
                 FROM given
                 UNION ALL
                 SELECT id, NULL, revision, -active_tasks, -active_checks, -reserved_cpu_millis, -reserved_memory_bytes, -reserved_disk_bytes,
                 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 FROM locked
                 UNION ALL
                 SELECT worker_id, NULL, NULL, 1, CASE kind WHEN 'check' THEN 1 ELSE 0 END, cpu_millis, memory_bytes, disk_bytes, 0, 0, 0, 0, 0,
                 1, CASE kind WHEN 'check' THEN 1 ELSE 0 END, cpu_millis, memory_bytes, disk_bytes FROM ended WHERE kind <> 'transfer'
             ) AS parts GROUP BY id
         ),
         judged AS (
             SELECT COALESCE(BOOL_AND(
                 known IS NULL OR (known IS NOT DISTINCT FROM found
                 AND tasks_left >= 0 AND checks_left >= 0 AND cpu_left >= 0 AND memory_left >= 0 AND disk_left >= 0)
             ), TRUE) AS hold FROM by_worker
         ),
         counted AS (
             UPDATE workers SET active_tasks = active_tasks + CASE WHEN hold THEN tasks ELSE 0 END - freed_tasks,
             active_checks = active_checks + CASE WHEN hold THEN checks ELSE 0 END - freed_checks,
             reserved_cpu_millis = reserved_cpu_millis + CASE WHEN hold THEN by_worker.cpu_millis ELSE 0 END - freed_cpu,
             reserved_memory_bytes = reserved_memory_bytes + CASE WHEN hold THEN by_worker.memory_bytes ELSE 0 END - freed_memory,
             reserved_disk_bytes = reserved_disk_bytes + CASE WHEN hold THEN by_worker.disk_bytes ELSE 0 END - freed_disk,
             ended_tasks = ended_tasks + freed_tasks
             FROM by_worker CROSS JOIN judged WHERE workers.id = by_worker.id AND (hold OR freed_tasks > 0)
         ),
         granted AS (
             INSERT INTO leases (id, worker_id, incarnation, kind, team, state, generation, phase, request, expires_at, granted_at,
             cpu_millis, memory_bytes, disk_bytes, settles, owner)
             SELECT id, worker_id, incarnation, kind, team, $6, generation, 0, request, expires_at, $2, cpu_millis, memory_bytes, disk_bytes, settles,
             owner FROM ({new}) AS new CROSS JOIN judged WHERE hold
         )
         SELECT ended.*, {no_counts}, NULL AS hold FROM ended UNION ALL SELECT {no_lease}, locked.*, hold FROM locked CROSS JOIN judged",
        given = rows::query(backend, 4, &ROOM),
        ended = ending(backend, "AND NOT settles"),
        counts = counts(backend),
        new = rows::query(backend, 5, &NEW_LEASE),
        no_counts = nothing(&COUNTS),
        no_lease = nothing(&LEFT),
    )
}

#[cfg(test)]
mod tests;
