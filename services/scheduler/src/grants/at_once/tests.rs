use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use domain::worker::Incarnation;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};
use sea_orm::{ConnectionTrait, EntityTrait, TransactionTrait};
use testing::databases::TestDatabase;

use super::*;
use crate::config::Config;
use crate::effects::Effects;
use crate::entity::lease::{self, Kind};
use crate::entity::worker;
use crate::grants;
use crate::memory::Memory;
use crate::placement::{DecidedBy, Process, Purpose, Shape};
use crate::workers::for_tests::hello;

const WORKERS: usize = 4;
const PLANS: usize = 600;

/// A scheduler that may know less than its database does.
struct Replica {
    db: Database,
    memory: Memory,
    dice: StdRng,
}

impl Replica {
    async fn workers(&self) -> BTreeMap<Uuid, worker::Model> {
        let rows = worker::Entity::find().all(self.db.read()).await.expect("workers");
        rows.into_iter().map(|row| (row.id, row)).collect()
    }

    async fn leases(&self) -> BTreeMap<Uuid, lease::Model> {
        let rows = lease::Entity::find().all(self.db.read()).await.expect("leases");
        rows.into_iter().map(|row| (row.id, row)).collect()
    }

    fn grant(&mut self, workers: &BTreeMap<Uuid, worker::Model>, group: Option<usize>) -> Grant {
        let ids: Vec<_> = workers.values().map(|row| (row.id, row.incarnation)).collect();
        let (worker, incarnation) = *ids.choose(&mut self.dice).expect("workers");
        let kind =
            *[Kind::Task, Kind::Task, Kind::Check, Kind::Transfer].choose(&mut self.dice).expect("some");
        let mut some = |amount: u64| if self.dice.random_bool(0.4) { amount } else { 0 };
        let requests = Resources { cpu_millis: some(600), memory_bytes: some(30), disk_bytes: some(50) };
        self.grant_on((worker, incarnation), kind, requests, group)
    }

    fn grant_on(
        &mut self,
        (worker, incarnation): (Uuid, i64),
        kind: Kind,
        requests: Resources,
        group: Option<usize>,
    ) -> Grant {
        let process = Process { image_kind: "host".into(), resource_type: None, capabilities: vec![] };
        let shape = Shape {
            team: "main".to_owned(),
            platform: "linux".to_owned(),
            tags: vec![],
            process: kind.takes_a_slot().then_some(process),
            requests: if kind.takes_a_slot() { requests } else { Resources::default() },
            purpose: Purpose::Build,
        };
        let lease = LeaseId::from_uuid(Uuid::from_u128(self.dice.random()));
        Grant {
            group,
            lease,
            kind,
            demand: Arc::new(shape.asked_by(lease.uuid())),
            worker: WorkerId::from_uuid(worker),
            incarnation: Incarnation(incarnation.unsigned_abs()),
            believed_tasks: 0,
            holder: Holder::Driven {
                expires_at: Timestamp(1),
                request: "what was asked for".to_owned(),
                owner: String::new(),
                settles: false,
            },
            decided_by: DecidedBy::Only,
            is_by_load: false,
        }
    }

    /// Of leases that are live, have ended, or never were. None twice.
    fn releases(&mut self, leases: &BTreeMap<Uuid, lease::Model>) -> Vec<(LeaseId, WorkerId)> {
        let all: Vec<_> = leases.values().map(|row| (row.id, row.worker_id, row.state)).collect();
        let live: Vec<_> = all.iter().filter(|(.., state)| *state != State::Ended).collect();
        let count = self.dice.random_range(0..=2);
        let mut releases: BTreeMap<_, _> =
            live.sample(&mut self.dice, count).map(|(lease, worker, _)| (*lease, *worker)).collect();
        if self.dice.random_bool(0.1) {
            releases.extend(all.choose(&mut self.dice).map(|(lease, worker, _)| (*lease, *worker)));
            releases.insert(Uuid::from_u128(self.dice.random()), Uuid::from_u128(self.dice.random()));
        }
        let released = |(lease, worker)| (LeaseId::from_uuid(lease), WorkerId::from_uuid(worker));
        releases.into_iter().map(released).collect()
    }

    /// The grants of a plan that hold by the rows, one group after the other, after what is given back.
    fn expected(
        &self,
        plan: &Plan,
        workers: &BTreeMap<Uuid, worker::Model>,
        leases: &BTreeMap<Uuid, lease::Model>,
    ) -> HashSet<LeaseId> {
        let (facts, mut present) = (self.memory.facts(), HashMap::new());
        for row in workers.values() {
            present.insert(row.id, facts.lock().as_placed(row).expect("a worker"));
        }
        for (lease, _) in &plan.releases {
            let Some(row) = leases.get(&lease.uuid()).filter(|row| row.state != State::Ended) else {
                continue;
            };
            let worker = present.get_mut(&row.worker_id).expect("it is there");
            let amount = |amount: i64| u64::try_from(amount).expect("an amount");
            let requests = Resources {
                cpu_millis: amount(row.cpu_millis),
                memory_bytes: amount(row.memory_bytes),
                disk_bytes: amount(row.disk_bytes),
            };
            worker.load = worker.load.without(row.kind, &requests);
        }
        let mut hold = HashSet::new();
        for together in plan.grants.chunk_by(|one, next| one.group.is_some() && one.group == next.group) {
            let mut with = present.clone();
            let all = together.iter().all(|grant| {
                let worker = with.get_mut(&grant.worker.uuid()).expect("it is there");
                let holds = placement::refusals(&grant.demand, worker).is_empty();
                worker.load = worker.load.with(grant.kind, &grant.demand.shape.requests);
                holds
            });
            if all {
                present = with;
                hold.extend(together.iter().map(|grant| grant.lease));
            }
        }
        hold
    }
}

async fn let_in(db: &Database, config: &Config) {
    for n in 0..WORKERS {
        let mut gateway = hello(&format!("worker-{n}"));
        gateway.labels.image_kinds = vec!["host".to_owned()];
        gateway.capacity.max_tasks = [Some(3), None][n % 2];
        (gateway.capacity.cpu_millis, gateway.capacity.memory_bytes) = (Some(2000), [None, Some(100)][n / 2]);
        gateway.capacity.disk_bytes = [130, 1 << 30][n % 2];
        let now = Timestamp::now();
        let answers = db
            .write(async |txn| workers::hello(&txn, &[&gateway], config, now, &mut Effects::default()).await);
        answers.await.expect("the database answers").remove(0).expect("let in");
    }
}

/// By one statement, and what is left by several. Answers whether nothing was left.
async fn carry_out(replica: &Replica, plan: &Plan) -> Option<(Done, bool)> {
    let (db, facts, now) = (&replica.db, replica.memory.facts(), Timestamp(2));
    let at_once = plan.at_once(db, &facts)?;
    let (done, left) = at_once.carry_out(db, plan, &facts, now).await.expect("carried out");
    let Some(left) = left else { return Some((done, true)) };
    Some((done.and(by_steps(replica, &left).await), false))
}

async fn by_steps(replica: &Replica, plan: &Plan) -> Done {
    let (db, facts, now) = (&replica.db, replica.memory.facts(), Timestamp(2));
    let done = db.write(async |txn| grants::carry_out(&txn, plan, &facts, now, &|| {}).await);
    done.await.expect("carried out")
}

async fn start(seed: u64) -> (TestDatabase, Replica) {
    let database = testing::databases::postgres().await;
    let (db, config) =
        (Database::connect::<crate::Schema>(&database.url).await.expect("a database"), Config::new("", ""));
    let_in(&db, &config).await;
    let mut memory = Memory::new(&config);
    memory.catch_up(&db).await.expect("read");
    (database, Replica { db, memory, dice: StdRng::seed_from_u64(seed) })
}

/// Whatever is remembered of workers, with one statement the same is granted as by who looks at their rows.
#[tokio::test]
async fn one_statement_grants_what_rows_allow() {
    let seed = testing::seeds::seed();
    eprintln!("GANTRY_SEED={seed}");
    let (_database, mut replica) = start(seed).await;
    let (mut at_once, mut refused, mut with_steps) = (0, 0, 0);
    for _ in 0..PLANS {
        let (workers, leases) = (replica.workers().await, replica.leases().await);
        let releases = replica.releases(&leases);
        let mut granted = Vec::new();
        for n in 0..replica.dice.random_range(0..=3) {
            let group = if replica.dice.random_bool(0.3) { Some(n / 2) } else { None };
            granted.push(replica.grant(&workers, group));
        }
        let plan = Plan { releases, grants: granted, ..Plan::default() };
        let expected = replica.expected(&plan, &workers, &leases);
        let done = match carry_out(&replica, &plan).await {
            Some((done, is_whole)) => {
                if is_whole {
                    at_once += plan.grants.len();
                } else {
                    with_steps += 1;
                }
                done
            }
            None => by_steps(&replica, &plan).await,
        };
        let (workers, leases) = (replica.workers().await, replica.leases().await);
        for grant in &plan.grants {
            assert_eq!(done.holds(grant), expected.contains(&grant.lease), "{grant:?}");
            assert_eq!(leases.contains_key(&grant.lease.uuid()), expected.contains(&grant.lease));
            refused += usize::from(!done.holds(grant));
        }
        let has_ended = |(lease, _): &(LeaseId, WorkerId)| {
            leases.get(&lease.uuid()).is_none_or(|row| row.state == State::Ended)
        };
        assert!(plan.releases.iter().all(has_ended));
        for row in workers.values() {
            let live = |kind: &dyn Fn(Kind) -> bool| {
                let on_it = leases.values().filter(|lease| lease.worker_id == row.id);
                on_it.filter(|lease| lease.state != State::Ended && kind(lease.kind)).collect::<Vec<_>>()
            };
            let tasks = live(&Kind::takes_a_slot);
            assert_eq!(row.active_tasks, tasks.len() as i64);
            assert_eq!(row.active_checks, live(&|kind| kind == Kind::Check).len() as i64);
            assert_eq!(row.reserved_cpu_millis, tasks.iter().map(|lease| lease.cpu_millis).sum::<i64>());
            assert_eq!(row.reserved_memory_bytes, tasks.iter().map(|lease| lease.memory_bytes).sum::<i64>());
            assert_eq!(row.reserved_disk_bytes, tasks.iter().map(|lease| lease.disk_bytes).sum::<i64>());
            assert!(row.max_tasks.is_none_or(|max| row.active_tasks <= max));
        }
        for row in &done.workers {
            assert_eq!(*row, workers[&row.id], "what is remembered from now on");
        }
        // Now and then another replica does something of which this one does not know.
        if replica.dice.random_bool(0.5) {
            replica.memory.note(done.workers).expect("noted");
        }
        if replica.dice.random_bool(0.05) {
            let change = "UPDATE workers SET revision = revision + 1, max_tasks = 4 - COALESCE(max_tasks, 0)
                          WHERE name = 'worker-0' AND active_tasks <= 1";
            replica.db.read().execute_unprepared(change).await.expect("changed");
        }
    }
    eprintln!("{at_once} granted at once, {refused} refused, {with_steps} plans with further steps");
    assert!(at_once > PLANS / 10 && refused > PLANS / 60 && with_steps > PLANS / 20, "too little was tried");
}

/// What is pinned for a lease is let go with it, by a parcel to the store: that takes further steps.
#[tokio::test]
async fn what_is_pinned_is_let_go_although_it_is_given_back_at_once() {
    let (_database, mut replica) = start(1).await;
    let workers = replica.workers().await;
    let mut grants = [replica.grant(&workers, None), replica.grant(&workers, None)];
    let Holder::Driven { settles, .. } = &mut grants[0].holder else { panic!("it is driven") };
    *settles = true;
    let releases = grants.iter().map(|grant| (grant.lease, grant.worker)).collect();
    let plan = Plan { grants: grants.into(), ..Plan::default() };
    assert!(!plan.may_be_at_once(&replica.db));
    by_steps(&replica, &plan).await;

    let plan = Plan { releases, ..Plan::default() };
    let (done, is_whole) = carry_out(&replica, &plan).await.expect("it may be at once");
    assert!(!is_whole);
    let let_go: Vec<_> = done.parcels.iter().map(|parcel| parcel.holder).collect();
    assert_eq!(let_go, [plan.releases[0].0.uuid()]);
    assert!(replica.leases().await.values().all(|lease| lease.state == State::Ended));
}

/// Others have placed as much on two workers as is believed to be on the busiest: of many grants for them most are planned anew, as by steps. But for
/// those that cannot be elsewhere.
#[tokio::test]
async fn what_others_have_crowded_takes_one_more_at_once() {
    for (is_by_load, refused) in [(true, 18), (false, 0)] {
        let (_database, mut replica) = start(1).await;
        let workers = replica.workers().await;
        let free: Vec<_> = workers.values().filter(|row| row.max_tasks.is_none()).collect();
        let on: Vec<_> = free.iter().map(|row| (row.id, row.incarnation)).collect();
        let grant = |n: usize| Grant {
            believed_tasks: u32::try_from(n / 2).expect("few"),
            is_by_load,
            ..replica.grant_on(on[n % 2], Kind::Task, Resources::default(), None)
        };
        let grants: Vec<_> = (0..20).map(grant).collect();
        let plan = Plan { grants, may_be_spread_anew: true, ..Plan::default() };
        let crowded = "UPDATE workers SET active_tasks = 9 WHERE max_tasks IS NULL";
        replica.db.read().execute_unprepared(crowded).await.expect("changed");
        let (done, is_whole) = carry_out(&replica, &plan).await.expect("it may be at once");
        assert_eq!((is_whole, done.refused.len()), (refused == 0, refused));
    }
}

/// What the statement rests on: it waits for whoever has the rows, and sees what that one made of them.
#[tokio::test]
async fn what_another_does_meanwhile_is_judged_by() {
    let (_database, mut replica) = start(1).await;
    let workers = replica.workers().await;
    let full = workers.values().find(|row| row.max_tasks == Some(3)).expect("a worker");
    let (on, none) = ((full.id, full.incarnation), Resources::default());
    let first = replica.grant_on(on, Kind::Task, none, None);
    let held = (first.lease, first.worker);
    let plan = Plan { grants: vec![first], ..Plan::default() };
    let (done, is_whole) = carry_out(&replica, &plan).await.expect("it may be at once");
    assert!(is_whole);
    replica.memory.note(done.workers).expect("noted");

    for (change, releases) in [
        // It is full meanwhile.
        ("UPDATE workers SET active_tasks = max_tasks WHERE active_tasks = 1", vec![]),
        // And what is given back is so already.
        ("UPDATE leases SET state = 'ended', ended_at = 1, ended_by = 'reported'", vec![held]),
    ] {
        let grant = replica.grant_on(on, Kind::Task, none, None);
        let plan = Plan { releases, grants: vec![grant], ..Plan::default() };
        let (db, facts) = (&replica.db, replica.memory.facts());
        let at_once = plan.at_once(db, &facts).expect("it may be at once");
        let other = db.read().begin().await.expect("a transaction");
        other.execute_unprepared(change).await.expect("changed");
        let carried_out = at_once.carry_out(db, &plan, &facts, Timestamp(2));
        let meanwhile = async {
            until_one_waits(db).await;
            other.commit().await.expect("committed");
        };
        let (done, ()) = tokio::join!(carried_out, meanwhile);
        let (done, left) = done.expect("carried out");
        assert_eq!(left.expect("all").grants.len(), 1);
        assert!(done.freed.is_empty());
        assert_eq!(replica.workers().await[&full.id].active_tasks, 3);
        assert_eq!(replica.leases().await.len(), 1);
    }
}

async fn until_one_waits(db: &Database) {
    let waits =
        "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'";
    let waits = Statement::from_string(DbBackend::Postgres, waits);
    let waited = tokio::time::timeout(Duration::from_secs(60), async {
        while db.read().query_all_raw(waits.clone()).await.expect("asked").is_empty() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    });
    waited.await.expect("nobody waits");
}
