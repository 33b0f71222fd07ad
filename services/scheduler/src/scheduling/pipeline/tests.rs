use std::time::Duration;

use db::Database;
use domain::LeaseId;
use sea_orm::{ConnectionTrait, DatabaseConnection, DatabaseTransaction, Statement, TransactionTrait};
use testing::databases::{self, TestDatabase};
use tokio::sync::{Semaphore, oneshot};

use super::*;
use crate::config::Config;
use crate::placement::{DetailFilter, Process, Purpose, Resources, Shape};
use crate::scheduling::{Dispatch, LeaseRequest, PlaceError, PlaceResult, REQUESTS};
use crate::workers;
use crate::workers::test_support::registration;
use crate::workloads::Submission;
use crate::workloads::test_support::spec;

/// A replica with one known worker.
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

/// `max_tasks`: the limit of its worker. `None`: no limit.
async fn replica_with(database: TestDatabase, max_tasks: Option<u32>) -> Replica {
    let db = Database::connect::<crate::Schema>(&database.url).await.expect("a database");
    let config = Arc::new(Config::new("", ""));
    register(&db, "one", max_tasks).await;
    let (dispatch, mut dispatcher) = Dispatcher::new(db.clone(), config);
    dispatcher.catch_up(false, &mut Effects::default()).await.expect("the worker");
    let worker = dispatch.workers.lock().workers().next().expect("a known worker").id;
    Replica { database, db, dispatch, dispatcher, worker }
}

async fn register(db: &Database, name: &str, max_tasks: Option<u32>) {
    let config = Config::new("", "");
    let mut gateway = registration(name);
    gateway.labels.image_kinds = vec!["host".to_owned()];
    gateway.capacity.max_tasks = max_tasks;
    gateway.capacity.cpu_millis = Some(8000);
    let registered = db.write(async |txn| {
        workers::register(&txn, &[&gateway], &config, Timestamp::now(), &mut Effects::default()).await
    });
    registered.await.expect("registered");
}

impl Replica {
    /// Releases a lease in a separate round.
    async fn release(&mut self, lease: LeaseId) {
        let caller = RoundContext { now: &Timestamp::now, nothing_is_before: &|| true, announce: &drop };
        let (answer, released) = oneshot::channel();
        let request = Request::Release(vec![(lease, self.worker)], answer);
        assert!(self.dispatcher.rounds(vec![request], &caller).await.is_empty());
        released.await.expect("an answer").expect("released");
    }

    /// Requests the leases one after the other, while no transaction can commit until all of them
    /// are decided or wait. Returns the unserved requests, and the answers.
    async fn request_while_commits_are_blocked(
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
        let requests = async {
            _ = begun.acquire().await;
            let (caller_sees, others) = (requests.remove(0), requests);
            let caller = RoundContext {
                now: &Timestamp::now,
                nothing_is_before: &|| nothing_is_before,
                announce: &drop,
            };
            let rounds = self.dispatcher.rounds(vec![caller_sees], &caller);
            let others_come = async {
                for (n, request) in others.into_iter().enumerate() {
                    let planned = if nothing_is_before { n + 1 } else { 1 };
                    until("a decision", || tasks(&dispatch, worker) == (0, planned as u32)).await;
                    dispatch.requests.send(request).await.expect("sent");
                }
                until("all requests to be received", || dispatch.requests.capacity() == REQUESTS).await;
                over.add_permits(1);
            };
            tokio::join!(rounds, others_come).0
        };
        let (held_up, held) = tokio::join!(held_up, requests);
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

/// Builds a request for a lease that waits for at most `wait`.
pub(in crate::scheduling) fn place_within(
    lease: LeaseId,
    wait: Duration,
) -> (Request, oneshot::Receiver<Vec<PlaceResult>>) {
    place_request(LeaseRequest { wait, ..lease_request(lease) })
}

fn lease_request(lease: LeaseId) -> LeaseRequest {
    LeaseRequest {
        lease,
        demand: Arc::new(shape().requested_by(lease.uuid())),
        locations: Arc::default(),
        request: String::new(),
        group: None,
        inputs: Arc::default(),
        owner: String::new(),
        owner_worker: None,
        wait: Duration::ZERO,
        priority: 0,
    }
}

fn place_request(request: LeaseRequest) -> (Request, oneshot::Receiver<Vec<PlaceResult>>) {
    let (answer, answered) = oneshot::channel();
    (Request::Place(vec![request], answer), answered)
}

/// Returns the number of leases on a worker, without and with planned ones.
fn tasks(dispatch: &Dispatch, worker: WorkerId) -> (u32, u32) {
    let workers = dispatch.workers.lock();
    (workers.seen(worker).tasks, workers.get(worker).expect("a known worker").load.tasks)
}

async fn until(what: &str, is_so: impl Fn() -> bool) {
    let waited = tokio::time::timeout(Duration::from_secs(60), async {
        while !is_so() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    });
    waited.await.unwrap_or_else(|_| panic!("timed out waiting for {what}"));
}

#[tokio::test]
async fn requests_are_decided_while_a_round_commits() {
    let mut replica = replica(databases::sqlite()).await;
    let [first, second, third] = [(); 3].map(|()| LeaseId::new());
    let (held, answers) = replica.request_while_commits_are_blocked(&[first, second, third], true).await;
    assert!(held.is_empty(), "{held:?}");
    for (answer, lease) in answers.into_iter().zip([first, second, third]) {
        let placed = answer.await.expect("an answer");
        assert!(matches!(&placed[..], [Ok(granted)] if granted.claims.lease == lease), "{placed:?}");
    }
    assert_eq!(tasks(&replica.dispatch, replica.worker), (3, 3));
}

#[tokio::test]
async fn repeated_request_during_commit_gets_same_lease() {
    let mut replica = replica(databases::sqlite()).await;
    let lease = LeaseId::new();
    let (held, answers) = replica.request_while_commits_are_blocked(&[lease, lease], true).await;
    assert!(held.is_empty(), "{held:?}");
    let mut granted = Vec::new();
    for answer in answers {
        let placed = answer.await.expect("an answer").remove(0).expect("granted");
        granted.push((placed.claims.lease, placed.claims.worker));
    }
    assert_eq!(granted, [(lease, replica.worker); 2]);
    assert_eq!(tasks(&replica.dispatch, replica.worker), (1, 1));
}

/// The rest of a group is rejected without reading its workers, which must stay in the cache.
#[tokio::test]
async fn workers_stay_known_when_group_exists_partly() {
    let mut replica = replica(databases::sqlite()).await;
    let [there, other] = [LeaseId::new(), LeaseId::new()];
    let caller = RoundContext { now: &Timestamp::now, nothing_is_before: &|| true, announce: &drop };
    let (request, answer) = place(there);
    replica.dispatcher.rounds(vec![request], &caller).await;
    let placed = answer.await.expect("an answer");
    assert!(matches!(placed[..], [Ok(_)]), "{placed:?}");

    let [mut requests, others] = [there, other].map(|lease| match place(lease) {
        (Request::Place(requests, _), _) => requests,
        (another, _) => panic!("{another:?}"),
    });
    requests.extend(others);
    requests.iter_mut().for_each(|request| request.group = Some(1));
    let (sender, answer) = oneshot::channel();
    replica.dispatcher.rounds(vec![Request::Place(requests, sender)], &caller).await;

    let placed = answer.await.expect("an answer");
    assert!(matches!(placed[..], [Ok(_), Err(PlaceError::Exists)]), "{placed:?}");
    let known = replica.dispatch.workers.lock().get(replica.worker).map(|worker| worker.state);
    assert_eq!(known, Some(crate::db::entity::worker::State::Running), "the worker stays known");
}

/// A planned grant for a lease that turns out to exist must not block the slot.
#[tokio::test]
async fn request_is_decided_again_after_repeated_lease() {
    let mut replica = replica_with(databases::sqlite(), Some(2)).await;
    let caller = RoundContext { now: &Timestamp::now, nothing_is_before: &|| true, announce: &drop };
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

/// A repeated waiting call has one lease, and both calls are answered.
#[tokio::test]
async fn repeated_waiting_call_is_answered_twice() {
    let mut replica = replica_with(databases::sqlite(), Some(1)).await;
    let caller = RoundContext { now: &Timestamp::now, nothing_is_before: &|| true, announce: &drop };
    let [held, waiting] = [LeaseId::new(), LeaseId::new()];
    let long = Duration::from_secs(3600);
    let ((first, of_first), (second, of_second)) = (place_within(waiting, long), place_within(waiting, long));
    for request in [place(held).0, first, second] {
        replica.dispatcher.rounds(vec![request], &caller).await;
        assert_eq!(tasks(&replica.dispatch, replica.worker), (1, 1));
    }
    replica.release(held).await;
    for answer in [of_first, of_second] {
        let placed = answer.await.expect("an answer");
        assert!(matches!(&placed[..], [Ok(granted)] if granted.claims.lease == waiting), "{placed:?}");
    }
    assert_eq!(tasks(&replica.dispatch, replica.worker), (1, 1));
}

/// The call was not repeated.
#[tokio::test]
async fn disconnected_caller_is_skipped() {
    let mut replica = replica_with(databases::sqlite(), Some(1)).await;
    let caller = RoundContext { now: &Timestamp::now, nothing_is_before: &|| true, announce: &drop };
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
    replica.release(held).await;
    let placed = of_second.await.expect("an answer");
    assert!(matches!(placed[..], [Ok(_)]), "{placed:?}");
    assert_eq!((replica.dispatch.queue().len(), tasks(&replica.dispatch, replica.worker)), (0, (1, 1)));
}

#[tokio::test]
async fn preceded_request_is_returned() {
    let mut replica = replica(databases::sqlite()).await;
    let leases = [LeaseId::new(), LeaseId::new()];
    let (held, answers) = replica.request_while_commits_are_blocked(&leases, false).await;
    assert_eq!(held.len(), 1);
    assert_eq!(tasks(&replica.dispatch, replica.worker), (1, 1));
    drop(held);
    let mut answers = answers.into_iter();
    let [first, second] = [(); 2].map(|()| answers.next().expect("two answers"));
    assert!(first.await.expect("an answer")[0].is_ok());
    assert!(second.await.is_err(), "the request was not decided");
}

#[tokio::test]
async fn failed_commit_frees_planned_load() {
    let mut replica = replica(databases::sqlite()).await;
    let gone = "DROP TABLE leases";
    let done = replica.db.write(async |txn| txn.execute_unprepared(gone).await);
    done.await.expect("gone");
    let leases = [LeaseId::new(), LeaseId::new()];
    let (_, answers) = replica.request_while_commits_are_blocked(&leases, true).await;
    for answer in answers {
        let placed = answer.await.expect("an answer");
        assert!(matches!(placed[..], [Err(PlaceError::Database(_))]), "{placed:?}");
    }
    assert_eq!(tasks(&replica.dispatch, replica.worker), (0, 0));
}

/// A connection that holds locks in PostgreSQL.
struct LockHolder(DatabaseConnection);

impl LockHolder {
    async fn of(replica: &Replica) -> Self {
        Self(sea_orm::Database::connect(&*replica.database.url).await.expect("the same database"))
    }

    async fn lock(&self, what: &str) -> DatabaseTransaction {
        let held = self.0.begin().await.expect("a transaction");
        held.execute_unprepared(what).await.expect("held");
        held
    }

    /// Returns the number of transactions that wait for a lock.
    async fn waiting(&self) -> i64 {
        let sql = "SELECT count(*) AS n FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'";
        let row = self.0.query_one_raw(Statement::from_string(self.0.get_database_backend(), sql)).await;
        row.expect("a result").expect("a row").try_get("", "n").expect("a number")
    }

    async fn wait_for_waiters(&self, count: i64) {
        let waited = tokio::time::timeout(Duration::from_secs(60), async {
            while self.waiting().await != count {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        });
        waited.await.unwrap_or_else(|_| panic!("expected {count} waiting transactions"));
    }
}

const WORKERS: &str = "SELECT id FROM workers FOR UPDATE";
const LEASES: &str = "LOCK TABLE leases IN SHARE MODE";

#[tokio::test]
async fn next_round_commits_after_workers_are_locked() {
    let mut replica = replica(databases::postgres().await).await;
    let other = LockHolder::of(&replica).await;
    let (workers, leases) = (other.lock(WORKERS).await, other.lock(LEASES).await);
    let ((first, granted), (second, granted_too)) = (place(LeaseId::new()), place(LeaseId::new()));
    let (dispatch, worker) = (replica.dispatch.clone(), replica.worker);
    let caller = RoundContext { now: &Timestamp::now, nothing_is_before: &|| true, announce: &drop };
    let rounds = replica.dispatcher.rounds(vec![first], &caller);
    let meanwhile = async {
        other.wait_for_waiters(1).await;
        dispatch.requests.send(second).await.expect("sent");
        until("a decision", || tasks(&dispatch, worker) == (0, 2)).await;
        assert_eq!(other.waiting().await, 1, "the last has no worker yet");
        workers.rollback().await.expect("rolled back");
        // The first transaction waits for the table, and the second for its worker.
        other.wait_for_waiters(2).await;
        assert_eq!(tasks(&dispatch, worker), (0, 2));
        leases.rollback().await.expect("rolled back");
    };
    let (held, ()) = tokio::join!(rounds, meanwhile);
    assert!(held.is_empty(), "{held:?}");
    for answer in [granted, granted_too] {
        assert!(answer.await.expect("an answer")[0].is_ok());
    }
    assert_eq!(tasks(&dispatch, worker), (2, 2));
}

#[tokio::test]
async fn release_during_grant_follows_the_grant() {
    let mut replica = replica(databases::postgres().await).await;
    let other = LockHolder::of(&replica).await;
    let (workers, leases) = (other.lock(WORKERS).await, other.lock(LEASES).await);
    let lease = LeaseId::new();
    let (first, granted) = place(lease);
    let (answer, released) = oneshot::channel();
    let (dispatch, worker) = (replica.dispatch.clone(), replica.worker);
    let caller = RoundContext { now: &Timestamp::now, nothing_is_before: &|| true, announce: &drop };
    let rounds = replica.dispatcher.rounds(vec![first], &caller);
    let meanwhile = async {
        other.wait_for_waiters(1).await;
        dispatch.requests.send(Request::Release(vec![(lease, worker)], answer)).await.expect("sent");
        until("the request to be received", || dispatch.requests.capacity() == REQUESTS).await;
        workers.rollback().await.expect("rolled back");
        other.wait_for_waiters(1).await;
        leases.rollback().await.expect("rolled back");
    };
    let (held, ()) = tokio::join!(rounds, meanwhile);
    assert!(held.is_empty(), "{held:?}");
    assert!(granted.await.expect("an answer")[0].is_ok());
    released.await.expect("an answer").expect("released");
    assert_eq!(tasks(&dispatch, worker), (0, 0));
}

/// One round suffices: no queue pass runs after the slot is free.
async fn released_slot_is_granted_in_same_transaction(database: TestDatabase) {
    let mut replica = replica_with(database, Some(1)).await;
    let (dispatch, worker) = (replica.dispatch.clone(), replica.worker);
    let caller = RoundContext { now: &Timestamp::now, nothing_is_before: &|| true, announce: &drop };
    let [first, second] = [(); 2].map(|()| LeaseId::new());
    let (requests, granted) = place(first);
    assert!(replica.dispatcher.rounds(vec![requests], &caller).await.is_empty());
    assert!(granted.await.expect("an answer")[0].is_ok());
    let (waits, mut granted) = place_within(second, Duration::from_secs(3600));
    assert!(replica.dispatcher.rounds(vec![waits], &caller).await.is_empty());
    assert_eq!(dispatch.queue().len(), 1, "the worker is full");

    // Releasing an unknown lease frees nothing, although the round expected it to.
    replica.release(LeaseId::new()).await;
    assert!(granted.try_recv().is_err(), "the worker is full");
    assert_eq!((dispatch.queue().len(), tasks(&dispatch, worker)), (1, (1, 1)));

    replica.release(first).await;
    assert!(granted.try_recv().expect("an answer")[0].is_ok());
    assert_eq!((dispatch.queue().len(), tasks(&dispatch, worker)), (0, (1, 1)));
    // The freed slot is still counted in the turnover.
    let (demand, no_details) = (shape().requested_by(second.uuid()), DetailFilter { most: 0, only: None });
    let pace = dispatch.workers.lock().outlook(&demand, &[], &no_details, Timestamp::now()).pace;
    assert!(pace.held_for().is_some());
}

#[tokio::test]
async fn released_slot_is_granted_in_same_transaction_sqlite() {
    released_slot_is_granted_in_same_transaction(databases::sqlite()).await;
}

#[tokio::test]
async fn released_slot_is_granted_in_same_transaction_postgres() {
    released_slot_is_granted_in_same_transaction(databases::postgres().await).await;
}

/// With a slot, amounts become free that are known only later. The first waiting request may need
/// them.
#[tokio::test]
async fn release_of_amounts_keeps_queue_order() {
    let mut replica = replica_with(databases::postgres().await, Some(1)).await;
    let caller = RoundContext { now: &Timestamp::now, nothing_is_before: &|| true, announce: &drop };
    let place_sized = |lease: LeaseId, cpu_millis, priority| {
        let (mut request, granted) = place_within(lease, Duration::from_secs(3600));
        let Request::Place(leases, _) = &mut request else { unreachable!("a request for a lease") };
        let requests = Resources { cpu_millis, ..Resources::default() };
        leases[0].demand = Arc::new(Shape { requests, ..shape() }.requested_by(lease.uuid()));
        leases[0].priority = priority;
        (request, granted)
    };
    let first = LeaseId::new();
    let (holds, granted) = place_sized(first, 1000, 0);
    assert!(replica.dispatcher.rounds(vec![holds], &caller).await.is_empty());
    assert!(granted.await.expect("an answer")[0].is_ok());
    let (urgent, mut granted) = place_sized(LeaseId::new(), 8000, 10);
    let (other, mut passed) = place_sized(LeaseId::new(), 0, 0);
    assert!(replica.dispatcher.rounds(vec![urgent, other], &caller).await.is_empty());
    assert_eq!(replica.dispatch.queue().len(), 2, "the worker is full");

    replica.release(first).await;
    replica.dispatcher.run_queue_pass(Timestamp::now(), &mut Effects::default()).await.expect("turns");
    assert!(granted.try_recv().expect("an answer")[0].is_ok());
    assert!(passed.try_recv().is_err(), "the request waits behind the other");
}

#[tokio::test]
async fn repeated_submission_keeps_waiting_after_release() {
    let mut replica = replica_with(databases::postgres().await, Some(1)).await;
    let caller = RoundContext { now: &Timestamp::now, nothing_is_before: &|| true, announce: &drop };
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
    submitted.await.expect("an answer").expect("accepted");
    assert_eq!(replica.dispatch.queue().len(), 1, "the worker is full");

    let ((again, submitted), (answer, released)) = (submit(), oneshot::channel());
    let release = Request::Release(vec![(first, replica.worker)], answer);
    assert!(replica.dispatcher.rounds(vec![again, release], &caller).await.is_empty());
    submitted.await.expect("an answer").expect("accepted again");
    released.await.expect("an answer").expect("released");
    replica.dispatcher.run_queue_pass(Timestamp::now(), &mut Effects::default()).await.expect("turns");
    assert_eq!(replica.dispatch.queue().len(), 0);
    assert_eq!(tasks(&replica.dispatch, replica.worker), (1, 1), "the workload was placed");
}
