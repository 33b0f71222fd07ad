use std::time::Duration;

use db::Database;
use domain::LeaseId;
use sea_orm::{ConnectionTrait, DatabaseConnection, DatabaseTransaction, Statement, TransactionTrait};
use testing::databases::{self, TestDatabase};
use tokio::sync::{Semaphore, oneshot};

use super::*;
use crate::config::Config;
use crate::db::entity::lease::Kind;
use crate::placement::{Process, Purpose, Resources, Shape, Tell};
use crate::scheduling::{Dispatch, LeaseRequest, PlaceError, PlaceResult, REQUESTS};
use crate::workers;
use crate::workers::test_support::hello;
use crate::workloads::Submission;
use crate::workloads::test_support::spec;

/// A replica that knows one worker.
struct Replica {
    database: TestDatabase,
    db: Database,
    dispatch: Dispatch,
    dispatcher: Dispatcher,
    worker: WorkerId,
}

async fn replica(database: TestDatabase) -> Replica {
    replica_with(database, None).await
}

/// `max_tasks`: of its worker, unless it is to have as many as such a worker has.
async fn replica_with(database: TestDatabase, max_tasks: Option<u32>) -> Replica {
    let db = Database::connect::<crate::Schema>(&database.url).await.expect("a database");
    let config = Arc::new(Config::new("", ""));
    let_in(&db, "one", max_tasks).await;
    let (dispatch, mut dispatcher) = Dispatcher::new(db.clone(), config);
    dispatcher.catch_up(false, &mut Effects::default()).await.expect("the worker");
    let worker = dispatch.workers.lock().workers().next().expect("it is known").id;
    Replica { database, db, dispatch, dispatcher, worker }
}

async fn let_in(db: &Database, name: &str, max_tasks: Option<u32>) {
    let config = Config::new("", "");
    let mut gateway = hello(name);
    gateway.labels.image_kinds = vec!["host".to_owned()];
    gateway.capacity.max_tasks = max_tasks;
    gateway.capacity.cpu_millis = Some(8000);
    let let_in = db.write(async |txn| {
        workers::register(&txn, &[&gateway], &config, Timestamp::now(), &mut Effects::default()).await
    });
    let_in.await.expect("let in");
}

impl Replica {
    /// Has a lease given back, in a round of its own.
    async fn give_back(&mut self, lease: LeaseId) {
        let caller = Caller { now: &Timestamp::now, nothing_is_before: &|| true, tell: &drop };
        let (answer, released) = oneshot::channel();
        let request = Request::Release(vec![(lease, self.worker)], answer);
        assert!(self.dispatcher.rounds(vec![request], &caller).await.is_empty());
        released.await.expect("an answer").expect("given back");
    }

    /// Has one lease asked for after the other, while nothing can be written until all of them are decided or wait. Answers what was given back,
    /// and who is answered.
    async fn ask_while_nothing_is_written(
        &mut self,
        leases: &[LeaseId],
        nothing_is_before: bool,
    ) -> (Vec<Request>, Vec<oneshot::Receiver<Vec<PlaceResult>>>) {
        let (mut requests, answers): (Vec<_>, Vec<_>) = leases.iter().map(|lease| place(*lease)).unzip();
        let (begun, over) = (Semaphore::new(0), Semaphore::new(0));
        let held_up = self.db.write(async |_| {
            begun.add_permits(1);
            _ = over.acquire().await;
            Ok::<_, DbErr>(())
        });
        let (dispatch, worker) = (self.dispatch.clone(), self.worker);
        let asks = async {
            _ = begun.acquire().await;
            let (caller_sees, others) = (requests.remove(0), requests);
            let caller =
                Caller { now: &Timestamp::now, nothing_is_before: &|| nothing_is_before, tell: &drop };
            let rounds = self.dispatcher.rounds(vec![caller_sees], &caller);
            let others_come = async {
                for (n, request) in others.into_iter().enumerate() {
                    let planned = if nothing_is_before { n + 1 } else { 1 };
                    until("a decision", || tasks(&dispatch, worker) == (0, planned as u32)).await;
                    dispatch.requests.send(request).await.expect("it is heard");
                }
                until("all to be heard", || dispatch.requests.capacity() == REQUESTS).await;
                over.add_permits(1);
            };
            tokio::join!(rounds, others_come).0
        };
        let (held_up, held) = tokio::join!(held_up, asks);
        held_up.expect("nothing was written");
        (held, answers)
    }
}

fn place(lease: LeaseId) -> (Request, oneshot::Receiver<Vec<PlaceResult>>) {
    place_within(lease, Duration::ZERO)
}

fn shape() -> Shape {
    Shape {
        team: "main".to_owned(),
        platform: "linux".to_owned(),
        tags: vec![],
        process: Some(Process { image_kind: "host".into(), resource_type: None, capabilities: vec![] }),
        requests: Resources::default(),
        purpose: Purpose::WithoutInputs,
    }
}

/// Asks for a lease, and waits for a worker for so long.
pub(in crate::scheduling) fn place_within(
    lease: LeaseId,
    wait: Duration,
) -> (Request, oneshot::Receiver<Vec<PlaceResult>>) {
    asking_for(LeaseRequest { wait, ..ask(lease) })
}

fn ask(lease: LeaseId) -> LeaseRequest {
    LeaseRequest {
        lease,
        kind: Kind::Task,
        demand: Arc::new(shape().asked_by(lease.uuid())),
        locations: Arc::default(),
        request: String::new(),
        group: None,
        inputs: Arc::default(),
        owner: String::new(),
        kept_to: None,
        wait: Duration::ZERO,
        priority: 0,
    }
}

fn asking_for(ask: LeaseRequest) -> (Request, oneshot::Receiver<Vec<PlaceResult>>) {
    let (answer, answered) = oneshot::channel();
    (Request::Place(vec![ask], answer), answered)
}

/// How many leases are on a worker as its row said last, and with those that are planned.
fn tasks(dispatch: &Dispatch, worker: WorkerId) -> (u32, u32) {
    let workers = dispatch.workers.lock();
    (workers.seen(worker).tasks, workers.get(worker).expect("it is known").load.tasks)
}

async fn until(what: &str, is_so: impl Fn() -> bool) {
    let waited = tokio::time::timeout(Duration::from_secs(60), async {
        while !is_so() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    });
    waited.await.unwrap_or_else(|_| panic!("{what} did not come"));
}

#[tokio::test]
async fn what_is_asked_for_while_a_round_is_written_is_decided_by_then() {
    let mut replica = replica(databases::sqlite()).await;
    let [first, second, third] = [(); 3].map(|()| LeaseId::new());
    let (held, answers) = replica.ask_while_nothing_is_written(&[first, second, third], true).await;
    assert!(held.is_empty(), "{held:?}");
    for (answer, lease) in answers.into_iter().zip([first, second, third]) {
        let placed = answer.await.expect("an answer");
        assert!(matches!(&placed[..], [Ok(granted)] if granted.claims.lease == lease), "{placed:?}");
    }
    assert_eq!(tasks(&replica.dispatch, replica.worker), (3, 3));
}

#[tokio::test]
async fn what_is_asked_for_again_while_it_is_written_is_the_same_lease() {
    let mut replica = replica(databases::sqlite()).await;
    let lease = LeaseId::new();
    let (held, answers) = replica.ask_while_nothing_is_written(&[lease, lease], true).await;
    assert!(held.is_empty(), "{held:?}");
    let mut granted = Vec::new();
    for answer in answers {
        let placed = answer.await.expect("an answer").remove(0).expect("granted");
        granted.push((placed.claims.lease, placed.claims.worker));
    }
    assert_eq!(granted, [(lease, replica.worker); 2]);
    assert_eq!(tasks(&replica.dispatch, replica.worker), (1, 1));
}

/// Of what is left of a group no worker is looked at: that says nothing of those.
#[tokio::test]
async fn of_a_group_that_exists_in_part_the_workers_stay_known() {
    let mut replica = replica(databases::sqlite()).await;
    let [there, other] = [LeaseId::new(), LeaseId::new()];
    let caller = Caller { now: &Timestamp::now, nothing_is_before: &|| true, tell: &drop };
    let (request, answer) = place(there);
    replica.dispatcher.rounds(vec![request], &caller).await;
    let placed = answer.await.expect("an answer");
    assert!(matches!(placed[..], [Ok(_)]), "{placed:?}");

    let [mut asks, others] = [there, other].map(|lease| match place(lease) {
        (Request::Place(asks, _), _) => asks,
        (another, _) => panic!("{another:?}"),
    });
    asks.extend(others);
    asks.iter_mut().for_each(|ask| ask.group = Some(1));
    let (sender, answer) = oneshot::channel();
    replica.dispatcher.rounds(vec![Request::Place(asks, sender)], &caller).await;

    let placed = answer.await.expect("an answer");
    assert!(matches!(placed[..], [Ok(_), Err(PlaceError::Exists)]), "{placed:?}");
    let known = replica.dispatch.workers.lock().get(replica.worker).map(|worker| worker.state);
    assert_eq!(known, Some(crate::db::entity::worker::State::Running), "it is there");
}

/// What was planned for one that turns out to exist kept nobody from the slot.
#[tokio::test]
async fn what_found_nothing_beside_one_that_exists_is_decided_again() {
    let mut replica = replica_with(databases::sqlite(), Some(2)).await;
    let caller = Caller { now: &Timestamp::now, nothing_is_before: &|| true, tell: &drop };
    let there = LeaseId::new();
    let [first, again, other] = [there, there, LeaseId::new()].map(place);
    replica.dispatcher.rounds(vec![first.0], &caller).await;
    replica.dispatcher.rounds(vec![again.0, other.0], &caller).await;
    for answer in [first.1, again.1, other.1] {
        let placed = answer.await.expect("an answer");
        assert!(matches!(placed[..], [Ok(_)]), "{placed:?}");
    }
    assert_eq!(tasks(&replica.dispatch, replica.worker), (2, 2));
}

/// Whoever calls again while he waits has one lease, and both calls hear of it.
#[tokio::test]
async fn what_is_asked_for_again_while_it_waits_is_answered_twice() {
    let mut replica = replica_with(databases::sqlite(), Some(1)).await;
    let caller = Caller { now: &Timestamp::now, nothing_is_before: &|| true, tell: &drop };
    let [held, asked] = [LeaseId::new(), LeaseId::new()];
    let long = Duration::from_secs(3600);
    let ((first, of_first), (second, of_second)) = (place_within(asked, long), place_within(asked, long));
    for request in [place(held).0, first, second] {
        replica.dispatcher.rounds(vec![request], &caller).await;
        assert_eq!(tasks(&replica.dispatch, replica.worker), (1, 1));
    }
    replica.give_back(held).await;
    for answer in [of_first, of_second] {
        let placed = answer.await.expect("an answer");
        assert!(matches!(&placed[..], [Ok(granted)] if granted.claims.lease == asked), "{placed:?}");
    }
    assert_eq!(tasks(&replica.dispatch, replica.worker), (1, 1));
}

/// As long as nobody has asked again by its id.
#[tokio::test]
async fn who_has_gone_is_passed_over() {
    let mut replica = replica_with(databases::sqlite(), Some(1)).await;
    let caller = Caller { now: &Timestamp::now, nothing_is_before: &|| true, tell: &drop };
    let held = LeaseId::new();
    replica.dispatcher.rounds(vec![place(held).0], &caller).await;
    let long = Duration::from_secs(3600);
    let [(first, of_first), (second, of_second)] =
        [LeaseId::new(), LeaseId::new()].map(|lease| place_within(lease, long));
    for request in [first, second] {
        replica.dispatcher.rounds(vec![request], &caller).await;
    }
    assert_eq!(replica.dispatch.queue().len(), 2);
    drop(of_first);
    replica.give_back(held).await;
    let placed = of_second.await.expect("an answer");
    assert!(matches!(placed[..], [Ok(_)]), "{placed:?}");
    assert_eq!((replica.dispatch.queue().len(), tasks(&replica.dispatch, replica.worker)), (0, (1, 1)));
}

#[tokio::test]
async fn what_something_else_is_before_is_given_back() {
    let mut replica = replica(databases::sqlite()).await;
    let leases = [LeaseId::new(), LeaseId::new()];
    let (held, answers) = replica.ask_while_nothing_is_written(&leases, false).await;
    assert_eq!(held.len(), 1);
    assert_eq!(tasks(&replica.dispatch, replica.worker), (1, 1));
    drop(held);
    let mut answers = answers.into_iter();
    let [first, second] = [(); 2].map(|()| answers.next().expect("two were asked for"));
    assert!(first.await.expect("an answer")[0].is_ok());
    assert!(second.await.is_err(), "it was not decided");
}

#[tokio::test]
async fn what_was_decided_and_cannot_be_written_takes_nothing() {
    let mut replica = replica(databases::sqlite()).await;
    let gone = "DROP TABLE leases";
    let done = replica.db.write(async |txn| txn.execute_unprepared(gone).await);
    done.await.expect("gone");
    let leases = [LeaseId::new(), LeaseId::new()];
    let (_, answers) = replica.ask_while_nothing_is_written(&leases, true).await;
    for answer in answers {
        let placed = answer.await.expect("an answer");
        assert!(matches!(placed[..], [Err(PlaceError::Database(_))]), "{placed:?}");
    }
    assert_eq!(tasks(&replica.dispatch, replica.worker), (0, 0));
}

/// Somebody who holds what is written, in PostgreSQL.
struct InTheWay(DatabaseConnection);

impl InTheWay {
    async fn of(replica: &Replica) -> Self {
        Self(sea_orm::Database::connect(&*replica.database.url).await.expect("the same database"))
    }

    async fn hold(&self, what: &str) -> DatabaseTransaction {
        let held = self.0.begin().await.expect("a transaction");
        held.execute_unprepared(what).await.expect("held");
        held
    }

    /// How many wait for somebody.
    async fn waiting(&self) -> i64 {
        let sql = "SELECT count(*) AS n FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'";
        let row = self.0.query_one_raw(Statement::from_string(self.0.get_database_backend(), sql)).await;
        row.expect("asked").expect("a row").try_get("", "n").expect("a number")
    }

    async fn until_so_many_wait(&self, count: i64) {
        let waited = tokio::time::timeout(Duration::from_secs(60), async {
            while self.waiting().await != count {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        });
        waited.await.unwrap_or_else(|_| panic!("{count} do not wait"));
    }
}

const WORKERS: &str = "SELECT id FROM workers FOR UPDATE";
const LEASES: &str = "LOCK TABLE leases IN SHARE MODE";

#[tokio::test]
async fn the_next_round_is_written_once_the_last_has_its_workers() {
    let mut replica = replica(databases::postgres().await).await;
    let other = InTheWay::of(&replica).await;
    let (workers, leases) = (other.hold(WORKERS).await, other.hold(LEASES).await);
    let ((first, granted), (second, granted_too)) = (place(LeaseId::new()), place(LeaseId::new()));
    let (dispatch, worker) = (replica.dispatch.clone(), replica.worker);
    let caller = Caller { now: &Timestamp::now, nothing_is_before: &|| true, tell: &drop };
    let rounds = replica.dispatcher.rounds(vec![first], &caller);
    let meanwhile = async {
        other.until_so_many_wait(1).await;
        dispatch.requests.send(second).await.expect("it is heard");
        until("a decision", || tasks(&dispatch, worker) == (0, 2)).await;
        assert_eq!(other.waiting().await, 1, "the last has no worker yet");
        workers.rollback().await.expect("let go");
        // The first for the table, and the second for its worker.
        other.until_so_many_wait(2).await;
        assert_eq!(tasks(&dispatch, worker), (0, 2));
        leases.rollback().await.expect("let go");
    };
    let (held, ()) = tokio::join!(rounds, meanwhile);
    assert!(held.is_empty(), "{held:?}");
    for answer in [granted, granted_too] {
        assert!(answer.await.expect("an answer")[0].is_ok());
    }
    assert_eq!(tasks(&dispatch, worker), (2, 2));
}

#[tokio::test]
async fn what_is_given_back_while_it_is_granted_is_given_back_after_that() {
    let mut replica = replica(databases::postgres().await).await;
    let other = InTheWay::of(&replica).await;
    let (workers, leases) = (other.hold(WORKERS).await, other.hold(LEASES).await);
    let lease = LeaseId::new();
    let (first, granted) = place(lease);
    let (answer, released) = oneshot::channel();
    let (dispatch, worker) = (replica.dispatch.clone(), replica.worker);
    let caller = Caller { now: &Timestamp::now, nothing_is_before: &|| true, tell: &drop };
    let rounds = replica.dispatcher.rounds(vec![first], &caller);
    let meanwhile = async {
        other.until_so_many_wait(1).await;
        dispatch.requests.send(Request::Release(vec![(lease, worker)], answer)).await.expect("it is heard");
        until("it to be heard", || dispatch.requests.capacity() == REQUESTS).await;
        workers.rollback().await.expect("let go");
        other.until_so_many_wait(1).await;
        leases.rollback().await.expect("let go");
    };
    let (held, ()) = tokio::join!(rounds, meanwhile);
    assert!(held.is_empty(), "{held:?}");
    assert!(granted.await.expect("an answer")[0].is_ok());
    released.await.expect("an answer").expect("given back");
    assert_eq!(tasks(&dispatch, worker), (0, 0));
}

/// A round alone does it: nobody looks for those that wait once the slot is free.
async fn a_slot_goes_on_with_what_gives_it_back(database: TestDatabase) {
    let mut replica = replica_with(database, Some(1)).await;
    let (dispatch, worker) = (replica.dispatch.clone(), replica.worker);
    let caller = Caller { now: &Timestamp::now, nothing_is_before: &|| true, tell: &drop };
    let [first, second] = [(); 2].map(|()| LeaseId::new());
    let (asks, granted) = place(first);
    assert!(replica.dispatcher.rounds(vec![asks], &caller).await.is_empty());
    assert!(granted.await.expect("an answer")[0].is_ok());
    let (waits, mut granted) = place_within(second, Duration::from_secs(3600));
    assert!(replica.dispatcher.rounds(vec![waits], &caller).await.is_empty());
    assert_eq!(dispatch.queue().len(), 1, "the worker is full");

    // What nobody holds frees nothing, whatever was expected of it.
    replica.give_back(LeaseId::new()).await;
    assert!(granted.try_recv().is_err(), "the worker is full");
    assert_eq!((dispatch.queue().len(), tasks(&dispatch, worker)), (1, (1, 1)));

    replica.give_back(first).await;
    assert!(granted.try_recv().expect("an answer")[0].is_ok());
    assert_eq!((dispatch.queue().len(), tasks(&dispatch, worker)), (0, (1, 1)));
    // That it came free is not forgotten by that.
    let (demand, nobody) = (shape().asked_by(second.uuid()), Tell { most: 0, only: None });
    let pace = dispatch.workers.lock().outlook(&demand, &[], &nobody, Timestamp::now()).pace;
    assert!(pace.held_for().is_some());
}

#[tokio::test]
async fn a_slot_goes_on_with_what_gives_it_back_sqlite() {
    a_slot_goes_on_with_what_gives_it_back(databases::sqlite()).await;
}

#[tokio::test]
async fn a_slot_goes_on_with_what_gives_it_back_postgres() {
    a_slot_goes_on_with_what_gives_it_back(databases::postgres().await).await;
}

/// With a slot amounts come free which are known only afterwards: who is first may have waited for those.
#[tokio::test]
async fn with_what_reserves_amounts_the_first_is_not_passed() {
    let mut replica = replica_with(databases::postgres().await, Some(1)).await;
    let caller = Caller { now: &Timestamp::now, nothing_is_before: &|| true, tell: &drop };
    let ask = |lease: LeaseId, cpu_millis, priority| {
        let (mut request, granted) = place_within(lease, Duration::from_secs(3600));
        let Request::Place(asks, _) = &mut request else { unreachable!("it asks for a lease") };
        let requests = Resources { cpu_millis, ..Resources::default() };
        asks[0].demand = Arc::new(Shape { requests, ..shape() }.asked_by(lease.uuid()));
        asks[0].priority = priority;
        (request, granted)
    };
    let first = LeaseId::new();
    let (holds, granted) = ask(first, 1000, 0);
    assert!(replica.dispatcher.rounds(vec![holds], &caller).await.is_empty());
    assert!(granted.await.expect("an answer")[0].is_ok());
    let (urgent, mut granted) = ask(LeaseId::new(), 8000, 10);
    let (other, mut passed) = ask(LeaseId::new(), 0, 0);
    assert!(replica.dispatcher.rounds(vec![urgent, other], &caller).await.is_empty());
    assert_eq!(replica.dispatch.queue().len(), 2, "the worker is full");

    replica.give_back(first).await;
    replica.dispatcher.take_turns(Timestamp::now(), &mut Effects::default()).await.expect("turns");
    assert!(granted.try_recv().expect("an answer")[0].is_ok());
    assert!(passed.try_recv().is_err(), "it waits for the other");
}

#[tokio::test]
async fn who_is_submitted_again_with_what_is_given_back_waits_still() {
    let mut replica = replica_with(databases::postgres().await, Some(1)).await;
    let caller = Caller { now: &Timestamp::now, nothing_is_before: &|| true, tell: &drop };
    let first = LeaseId::new();
    let (holds, granted) = place(first);
    assert!(replica.dispatcher.rounds(vec![holds], &caller).await.is_empty());
    assert!(granted.await.expect("an answer")[0].is_ok());
    let workload = Arc::new(Submission::new(WorkloadId::new(), spec(), None));
    let submit = || {
        let (answer, submitted) = oneshot::channel();
        (Request::Submit(workload.clone(), answer), submitted)
    };
    let (submits, submitted) = submit();
    assert!(replica.dispatcher.rounds(vec![submits], &caller).await.is_empty());
    submitted.await.expect("an answer").expect("it waits");
    assert_eq!(replica.dispatch.queue().len(), 1, "the worker is full");

    let ((again, submitted), (answer, released)) = (submit(), oneshot::channel());
    let gives_back = Request::Release(vec![(first, replica.worker)], answer);
    assert!(replica.dispatcher.rounds(vec![again, gives_back], &caller).await.is_empty());
    submitted.await.expect("an answer").expect("it is the same");
    released.await.expect("an answer").expect("given back");
    replica.dispatcher.take_turns(Timestamp::now(), &mut Effects::default()).await.expect("turns");
    assert_eq!(replica.dispatch.queue().len(), 0);
    assert_eq!(tasks(&replica.dispatch, replica.worker), (1, 1), "it was placed");
}
