//! Concurrent random operations on leases, checked against invariants.
//!
//! Each round runs several operations concurrently, each in its own transaction like in the
//! service, on real databases. After each round, no operation is in progress and the invariants are
//! checked. Some operations are killed at any await point, together with their replica, and clocks
//! differ. The seed is printed. `GANTRY_SEED` repeats a run, as far as the races of the database
//! allow.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use db::Database;
use domain::worker::{Capacity, Labels, LeaseClaims, Marker, SessionClaims};
use domain::workload::{Exit, Failure, FailureReason, ResourceRequests, WorkloadKind, WorkloadSpec};
use domain::{GatewayInstance, LeaseId, MarkerId, Timestamp, WorkloadId};
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};
use sea_orm::{ColumnTrait, EntityTrait, PaginatorTrait, QueryFilter};
use testing::databases::TestDatabase;

use crate::config::Config;
use crate::db::entity::is_duplicate;
use crate::db::entity::lease::Kind;
use crate::db::entity::{lease, removed_worker, reservation, worker, workload};
use crate::leases::{self, RenewError};
use crate::lifecycle::departure::{self, RegistryError, Withdrawal};
use crate::notify::changes::Effects;
use crate::outcome::{AttemptEnd, Report};
use crate::placement::{Demand, Process, Purpose, Resources, Shape};
use crate::scheduling::{LeaseRequest, PlaceError, PlaceResult, Request, RoundContext, SubmitError};
use crate::workers::lease_counts;
use crate::workers::quarantine;
use crate::workers::{self, Heartbeat, Registration, SessionError, Usage};
use crate::workloads::test_support;
use crate::workloads::{self, AttemptError, Phase, Submission, WorkloadError};

pub(crate) mod checks;
mod mixes;
mod promises;
pub(crate) mod replicas;

use self::mixes::{DRIVEN, OPERATIONS, Operation};
use self::promises::Promises;
use self::replicas::{Replica, killed_at};

const WORKERS: usize = 4;
/// The last worker, which is removed once it is lost.
const EPHEMERAL: usize = 3;
const REPLICAS: usize = 2;
const ROUNDS: usize = 60;
/// Largest difference between the clocks of two processes, in microseconds.
const SKEW: i64 = 500_000;

/// Observations of the operations that hold regardless of concurrent operations.
#[derive(Default)]
struct Observations {
    /// Includes ended sessions.
    sessions: Vec<SessionClaims>,
    workloads: Vec<WorkloadId>,
    /// Every lease that was ever live, so that operations use stale ones too.
    claims: Vec<LeaseClaims>,
    driven: Vec<LeaseClaims>,
    promises: Promises,
    /// Attempts whose start was accepted.
    started: HashMap<WorkloadId, HashSet<LeaseId>>,
    /// Number of reports, possibly received, that the attempt was not started.
    denied: HashMap<LeaseId, usize>,
    /// Endings of finished workloads.
    endings: HashMap<WorkloadId, String>,
    /// Ended leases with their workers. Leases of removed workers are deleted, and their ids may be
    /// reused.
    ended_leases: HashMap<LeaseId, uuid::Uuid>,
    /// Offset of the clock, in microseconds.
    moved: i64,
    /// Live leases of workers out of service at the last check, unless the worker may have returned
    /// to service since.
    down: HashMap<uuid::Uuid, HashSet<uuid::Uuid>>,
    /// Live leases of incompatible workers at the last check, unless the worker may have become
    /// compatible since.
    misfits: HashMap<uuid::Uuid, HashSet<uuid::Uuid>>,
    /// Removed workers.
    gone: HashSet<uuid::Uuid>,
    /// Number of observed reservations.
    reserved: u64,
    /// Number of times that a round could be decided during a commit.
    ahead: usize,
    /// Number of killed operations.
    killed: usize,
    /// The last revision of workers.
    revision: i64,
    /// The rows of workers, without their counters.
    rows: HashMap<uuid::Uuid, worker::Model>,
}

impl Observations {
    /// Returns whether `session` has certainly ended.
    fn is_over(&self, session: &SessionClaims) -> bool {
        let is_newer =
            |other: &SessionClaims| other.worker == session.worker && other.incarnation > session.incarnation;
        self.gone.contains(&session.worker.uuid()) || self.sessions.iter().any(is_newer)
    }
}

#[derive(Clone)]
struct World {
    db: Database,
    config: Arc<Config>,
    replicas: Arc<[Replica]>,
    seen: Arc<Mutex<Observations>>,
}

/// Every third workload is interruptible, every other has a start timeout, and some have retries.
/// Some are checks.
fn spec(id: WorkloadId) -> WorkloadSpec {
    WorkloadSpec {
        kind: if id.uuid().as_bytes()[12].is_multiple_of(3) {
            WorkloadKind::Check
        } else {
            WorkloadKind::Task
        },
        queue_timeout: Some(Duration::from_secs(3600)),
        run_timeout: Some(Duration::from_secs(5)),
        interruptible: id.uuid().as_u128().is_multiple_of(3),
        priority: i32::from(id.uuid().as_bytes()[15] % 3),
        requests: ResourceRequests { cpu_millis: 100, memory_bytes: memory(id), disk_bytes: 7 },
        start_timeout: id.uuid().as_bytes()[15].is_multiple_of(2).then_some(Duration::from_secs(4)),
        retries: u32::from(id.uuid().as_bytes()[14] % 3),
        ..test_support::spec()
    }
}

/// Memory of a workload. Some request all of a worker, which is never free without a reservation.
fn memory(id: WorkloadId) -> u64 {
    if id.uuid().as_bytes()[13].is_multiple_of(3) { 25 } else { 10 }
}

fn lease_request(lease: LeaseId, kind: Kind, group: Option<u32>) -> LeaseRequest {
    let process = Process::default();
    let shape = Shape {
        team: "main".to_owned(),
        platform: "linux".to_owned(),
        tags: vec![],
        process: kind.takes_a_slot().then_some(process),
        requests: Resources {
            cpu_millis: if kind.takes_a_slot() { 150 } else { 0 },
            memory_bytes: if kind.takes_a_slot() { 10 } else { 0 },
            disk_bytes: if kind.takes_a_slot() { 5 } else { 0 },
        },
        purpose: Purpose::WithoutInputs,
    };
    let demand = Arc::new(Demand { kind, ..shape.requested_by(lease.uuid()) });
    LeaseRequest {
        lease,
        demand,
        locations: Arc::default(),
        request: String::new(),
        group,
        inputs: Arc::default(),
        owner: String::new(),
        owner_worker: None,
        wait: Duration::ZERO,
        priority: 0,
    }
}

fn max_tasks(worker: usize) -> Option<u32> {
    [Some(1), Some(3), None, Some(2)][worker]
}

impl World {
    fn seen<T>(&self, look: impl FnOnce(&mut Observations) -> T) -> T {
        look(&mut self.seen.lock().expect("no panic"))
    }

    fn now(&self) -> Timestamp {
        Timestamp(Timestamp::now().0 + self.seen(|seen| seen.moved))
    }

    fn registration(worker: usize, marker: MarkerId) -> Registration {
        Registration {
            name: format!("worker-{worker}"),
            instance: GatewayInstance::from_uuid(uuid::Uuid::from_u128(worker as u128 + 1)),
            ended: None,
            last: None,
            marker: Marker { id: marker, boot: String::new() },
            endpoint: "http://127.0.0.1:1".to_owned(),
            labels: Labels {
                platform: "linux".to_owned(),
                tags: vec![],
                team: None,
                image_kinds: vec!["host".to_owned()],
                capabilities: ["stop-after", "network-private"].map(str::to_owned).to_vec(),
                resource_types: vec![],
                zone: String::new(),
            },
            capacity: Capacity {
                max_tasks: max_tasks(worker),
                cpu_millis: [None, None, Some(300), Some(1000)][worker],
                memory_bytes: Some(25),
                ..Capacity::default()
            },
            ephemeral: worker == EPHEMERAL,
        }
    }

    async fn register(&self, worker: usize, marker: MarkerId) {
        let registration = Self::registration(worker, marker);
        // The worker may get leases from here on.
        self.seen(|seen| seen.misfits.clear());
        let session = self
            .db
            .write(async |txn| {
                workers::register(&txn, &[&registration], &self.config, self.now(), &mut Effects::default())
                    .await
            })
            .await;
        let mut session = match session {
            // Another operation inserted a worker with this name first.
            Err(error) if is_duplicate(&error) => return,
            session => session.expect("registered or rejected"),
        };
        match session.remove(0) {
            Ok(session) => self.seen(|seen| seen.sessions.push(session)),
            Err(SessionError::Database(error)) => panic!("register: {error}"),
            Err(
                SessionError::Stale
                | SessionError::AlreadyAttended
                | SessionError::Leaving
                | SessionError::Retired
                | SessionError::Forgotten,
            ) => {}
            Err(SessionError::OtherTeam) => panic!("every worker serves all teams"),
        }
    }

    /// Registers a gateway with an unsupported protocol version.
    async fn misfit(&self, worker: usize, marker: MarkerId) {
        let registration = Self::registration(worker, marker);
        let listed = self.db.write(async |txn| {
            let (now, mut effects) = (self.now(), Effects::default());
            workers::list_incompatible(&txn, &registration, &[99], &self.config, now, &mut effects).await
        });
        if let Err(SessionError::Database(error)) = listed.await {
            assert!(is_duplicate(&error), "misfit: {error}");
        }
    }

    /// Runs the departure loop once. The store keeps nothing.
    async fn depart_if_due(&self) {
        for row in departure::departing(self.db.read()).await.expect("workers") {
            let live = lease::Entity::find()
                .filter(lease::Column::WorkerId.eq(row.id))
                .filter(lease::Column::State.ne(lease::State::Ended))
                .all(self.db.read())
                .await
                .expect("leases");
            let how = match row.desired {
                _ if row.leaving.is_some() => removed_worker::WorkerEnd::Pruned,
                _ if row.ephemeral && row.state == worker::State::Lost => removed_worker::WorkerEnd::Expired,
                worker::Desired::Retire => removed_worker::WorkerEnd::Retired,
                worker::Desired::Cordon | worker::Desired::Run => {
                    self.progress(&row, &live).await;
                    continue;
                }
            };
            self.progress(&row, &live).await;
            let removed = self.db.write(async |txn| {
                departure::remove(&txn, row.id, how, self.now(), &mut Effects::default()).await
            });
            if removed.await.expect("removed or not") {
                self.seen(|seen| _ = seen.gone.insert(row.id));
            }
        }
    }

    async fn progress(&self, row: &worker::Model, live: &[lease::Model]) {
        let load = lease_counts::loads(self.db.read(), &[row.id]).await.expect("loads");
        let load = load.get(&row.id).copied().unwrap_or_default();
        let due = row.interrupt_at.is_some_and(|at| at <= self.now().0);
        if due || load.uninterruptible == 0 {
            for lease in live {
                let Some(workload) = lease.workload_id.map(WorkloadId::from_uuid) else { continue };
                let interrupted = self.db.write(async |txn| {
                    let mut effects = Effects::default();
                    workloads::interrupt(&txn, workload, lease, due, Duration::from_secs(1), &mut effects)
                        .await
                });
                interrupted.await.expect("a stop");
            }
        }
        let noted = self.db.write(async |txn| {
            departure::note_progress(&txn, row, due, self.now(), &mut Effects::default()).await
        });
        noted.await.expect("noted");
    }

    async fn end_stranded_leases(&self) {
        for lease in workers::stranded_leases(self.db.read(), 0).await.expect("stranded leases") {
            let ended = self.db.write(async |txn| {
                let (now, mut effects) = (self.now(), Effects::default());
                if !workers::is_stranded(&*txn, &lease).await? {
                    return Ok(());
                }
                workloads::lose_attempt(&txn, &lease, AttemptEnd::WorkerLost, now, &mut effects).await
            });
            ended.await.expect("a stranded lease ends");
        }
    }

    /// Records the live leases for later operations.
    async fn learn(&self) {
        let live = lease::Entity::find()
            .filter(lease::Column::State.ne(lease::State::Ended))
            .filter(lease::Column::WorkloadId.is_not_null())
            .all(self.db.read())
            .await
            .expect("leases");
        self.seen(|seen| {
            for lease in &live {
                let claims = leases::claims(lease);
                if !seen.claims.contains(&claims) {
                    seen.claims.push(claims);
                }
            }
        });
    }

    async fn execute(&self, operation: Operation, mut dice: StdRng) {
        let now = Timestamp(self.now().0 + dice.random_range(-SKEW / 2..=SKEW / 2));
        let claims = self.seen(|seen| {
            // Mostly a recent lease.
            let recent = seen.claims.len().saturating_sub(8);
            let from = if dice.random_bool(0.8) { &seen.claims[recent..] } else { &seen.claims[..] };
            from.choose(&mut dice).cloned()
        });
        match operation {
            Operation::Submit => {
                let again = self.seen(|seen| seen.workloads.choose(&mut dice).copied());
                let id = again.filter(|_| dice.random_bool(0.2)).unwrap_or_else(WorkloadId::new);
                let submission = Arc::new(Submission::new(id, spec(id), None));
                // The workload may exist even if the call is killed.
                self.seen(|seen| {
                    if !seen.workloads.contains(&id) {
                        seen.workloads.push(id);
                    }
                });
                match self.send(&mut dice, now, |answer| Request::Submit(submission, answer)).await {
                    // All workers are lost, or the replica was killed.
                    Some(Err(SubmitError::NoCompatibleWorker(_))) | None => {}
                    Some(Ok(())) => self.seen(|seen| seen.promises.accepted(id)),
                    Some(Err(error)) => panic!("submit: {error}"),
                }
            }
            Operation::Dispatch => {
                let mut dispatcher = self.replicas[dice.random_range(0..REPLICAS)].lock().await;
                let mut effects = Effects::default();
                dispatcher.catch_up(true, &mut effects).await.expect("the database answers");
                dispatcher.run_queue_pass(now, &mut effects).await.expect("placed or not");
                dispatcher.done();
            }
            Operation::Start => {
                let Some(claims) = claims else { return };
                let started = self.db.write(async |txn| {
                    workloads::start_attempt(&txn, &claims, now, &mut Effects::default()).await
                });
                match (started.await, claims.attempt) {
                    (Ok(()), Some((workload, _))) => {
                        self.seen(|seen| seen.started.entry(workload).or_default().insert(claims.lease));
                    }
                    (Ok(()), None) | (Err(AttemptError::LeaseLost), _) => {}
                    (Err(AttemptError::Database(error)), _) => panic!("start: {error}"),
                }
            }
            Operation::Finish => {
                let Some(claims) = claims else { return };
                let code = Some(Exit::Code(dice.random_range(0..2)));
                let (exit, reason) = match dice.random_range(0..10) {
                    0 | 1 => (None, Some(FailureReason::StartFailed)),
                    2 => (None, Some(FailureReason::ExitUnknown)),
                    3 => (Some(Exit::Signal(15)), Some(FailureReason::ContactLost)),
                    4 | 5 => (code, Some(FailureReason::Interrupted)),
                    _ => (code, None),
                };
                let fails = reason == Some(FailureReason::StartFailed);
                let failure = reason.map(|reason| Failure { reason, message: "no".to_owned() });
                // The report says that the process did not start. Whether it was received is
                // unknown until there is an answer.
                self.seen(|seen| *seen.denied.entry(claims.lease).or_default() += usize::from(fails));
                let finished = self.db.write(async |txn| {
                    let report = Report { exit, failure: failure.clone(), ..Report::default() };
                    let mut effects = Effects::default();
                    workloads::finish_attempt(&txn, &claims, report, &self.config, now, &mut effects).await
                });
                match finished.await {
                    Ok(()) => {}
                    Err(AttemptError::LeaseLost) => {
                        self.seen(|seen| *seen.denied.entry(claims.lease).or_default() -= usize::from(fails));
                    }
                    Err(AttemptError::Database(error)) => panic!("finish: {error}"),
                }
            }
            Operation::Cancel => {
                let Some(id) = self.seen(|seen| seen.workloads.choose(&mut dice).copied()) else { return };
                let grace = Duration::from_millis(dice.random_range(0..10));
                let cancelled = self.db.write(async |txn| {
                    workloads::cancel(&txn, "main", id, grace, now, &mut Effects::default()).await
                });
                match cancelled.await {
                    Ok(()) | Err(WorkloadError::NotFound(_) | WorkloadError::NoMatch(_)) => {}
                    Err(WorkloadError::Database(error)) => panic!("cancel: {error}"),
                }
            }
            Operation::Observe => {
                let Some(lease) = self.find(claims).await else { return };
                let phase = [Phase::Preparing, Phase::Running, Phase::Publishing, Phase::Ended];
                let phase = *phase.choose(&mut dice).expect("a phase");
                let observed = self.db.write(async |txn| {
                    workloads::observe_phase(&txn, &lease, phase, now, &mut Effects::default()).await
                });
                observed.await.expect("observed");
            }
            Operation::Forget => {
                let Some(lease) = self.find(claims).await else { return };
                let lost = self.db.write(async |txn| {
                    let end = AttemptEnd::Unknown;
                    workloads::lose_attempt(&txn, &lease, end, now, &mut Effects::default()).await
                });
                lost.await.expect("lost");
            }
            Operation::Restart => {
                self.register(dice.random_range(0..WORKERS), MarkerId::new()).await;
                self.end_stranded_leases().await;
            }
            Operation::Misfit => self.misfit(dice.random_range(0..WORKERS), MarkerId::new()).await,
            Operation::Silence => {
                let lost = i64::try_from(self.config.lost_after.as_micros()).expect("fits");
                self.seen(|seen| (seen.moved += lost + SKEW, seen.promises.silence()).1);
                let now = self.now();
                let noticed = self.db.write(async |txn| {
                    workers::mark_silent(&txn, &self.config, now, &mut Effects::default()).await
                });
                noticed.await.expect("noticed");
                self.end_stranded_leases().await;
            }
            Operation::Contact => {
                let (sessions, over): (Vec<_>, Vec<_>) = self.seen(|seen| {
                    // Mostly recent sessions.
                    let recent = seen.sessions.len().saturating_sub(2 * WORKERS);
                    let sessions = seen.sessions[recent..].sample(&mut dice, 4);
                    sessions.map(|session| (session.clone(), seen.is_over(session))).unzip()
                });
                let heartbeat = |session| Heartbeat { session, kept: Usage::default(), at: now };
                let heartbeats: Vec<_> = sessions.iter().cloned().map(heartbeat).collect();
                let results =
                    self.db.write(async |txn| workers::record_heartbeats(&txn, &heartbeats).await).await;
                let results = results.expect("recorded or rejected");
                assert_eq!(results.len(), heartbeats.len());
                for ((session, was_over), results) in sessions.iter().zip(over).zip(&results) {
                    assert!(
                        !was_over || results.is_err(),
                        "{session:?} has ended, and its heartbeat was accepted"
                    );
                }
                let current = sessions.into_iter().zip(&results).filter(|(_, results)| results.is_ok());
                let current: Vec<_> = current.map(|(session, _)| session).collect();
                let back = self
                    .db
                    .write(async |txn| workers::mark_running(&txn, &current, &mut Effects::default()).await);
                back.await.expect("back");
            }
            Operation::TimeOut => {
                self.seen(|seen| seen.moved += 6_000_000);
                let now = self.now();
                for id in workloads::overdue(self.db.read(), now).await.expect("overdue") {
                    let stopped = self.db.write(async |txn| {
                        let grace = Duration::from_secs(1);
                        workloads::time_out(&txn, id, grace, now, &mut Effects::default()).await
                    });
                    stopped.await.expect("stopped");
                }
                let expired = self.db.write(async |txn| {
                    leases::expire(&txn, Duration::from_secs(1), now, &mut Effects::default()).await
                });
                expired.await.expect("expired");
                let tried = self.db.write(async |txn| {
                    quarantine::put_on_probation(&txn, now, &mut Effects::default()).await
                });
                tried.await.expect("tried again");
            }
            Operation::Land | Operation::Retire => {
                let name = format!("worker-{}", dice.random_range(0..WORKERS));
                let after = dice.random_bool(0.3).then(|| Duration::from_secs(3));
                let down = match operation {
                    Operation::Land => Withdrawal::Cordon,
                    _ => Withdrawal::Retire { force: dice.random_bool(0.5) },
                };
                let changed = self.db.write(async |txn| {
                    let mut effects = Effects::default();
                    departure::withdraw_worker(&txn, &name, down, after, now, &mut effects).await
                });
                match changed.await {
                    Ok(_) | Err(RegistryError::NotFound(_)) => {}
                    Err(error) => panic!("{down:?}: {error}"),
                }
            }
            Operation::Run => {
                // The worker may get leases from here on.
                let name = format!("worker-{}", dice.random_range(0..WORKERS));
                self.seen(|seen| seen.down.clear());
                let changed =
                    self.db.write(async |txn| departure::run(&txn, &name, &mut Effects::default()).await);
                match changed.await {
                    Ok(_) | Err(RegistryError::NotFound(_)) => {}
                    Err(error) => panic!("run: {error}"),
                }
            }
            Operation::Prune => {
                let name = format!("worker-{}", dice.random_range(0..WORKERS));
                let changed =
                    self.db.write(async |txn| departure::prune(&txn, &name, &mut Effects::default()).await);
                match changed.await {
                    Ok(()) | Err(RegistryError::NotFound(_) | RegistryError::InContact(_)) => {}
                    Err(error) => panic!("prune: {error}"),
                }
                self.end_stranded_leases().await;
            }
            Operation::Depart => self.depart_if_due().await,
            Operation::PlaceDriven => {
                let kinds = [Kind::Task, Kind::Check, Kind::Transfer];
                let group = dice.random_bool(0.3).then_some(1);
                let count = dice.random_range(1..4);
                let again = self.seen(|seen| seen.driven.choose(&mut dice).map(|claims| claims.lease));
                let mut requests: Vec<_> = (0..count)
                    .map(|_| lease_request(LeaseId::new(), *kinds.choose(&mut dice).expect("a kind"), group))
                    .collect();
                if let Some(again) = again.filter(|_| dice.random_bool(0.2)) {
                    requests[0].lease = again;
                }
                let placed = self.send(&mut dice, now, |answer| Request::Place(requests, answer)).await;
                let Some(placed) = placed else { return };
                let granted: Vec<_> = placed.iter().filter_map(|placed| placed.as_ref().ok()).collect();
                if group.is_some() && again.is_none() {
                    assert!(
                        granted.is_empty() || granted.len() == placed.len(),
                        "a group was granted partly"
                    );
                }
                for placed in &placed {
                    match placed {
                        Ok(_)
                        | Err(
                            PlaceError::AllWorkersBusy(_)
                            | PlaceError::NoCompatibleWorker(_)
                            | PlaceError::Exists,
                        ) => {}
                        Err(error) => panic!("place: {error}"),
                    }
                }
                let granted: Vec<_> = granted.into_iter().map(|granted| granted.claims.clone()).collect();
                self.seen(|seen| {
                    granted.iter().for_each(|claims| seen.promises.granted(claims.clone()));
                    seen.driven.extend(granted);
                });
            }
            Operation::RenewDriven => {
                let Some(claims) = self.seen(|seen| seen.driven.choose(&mut dice).cloned()) else { return };
                let term = self.config.lease_term;
                let renewed =
                    self.db.write(async |txn| leases::renew(&txn, claims.lease, now, term).await).await;
                assert!(!matches!(renewed, Err(RenewError::Database(_))), "{renewed:?}");
                let worker = self.seen(|seen| seen.ended_leases.get(&claims.lease).copied());
                if renewed.is_ok() {
                    self.seen(|seen| seen.promises.renewed(claims.lease, now + term));
                }
                if let (Some(worker), Ok(())) = (worker, renewed) {
                    let known =
                        worker::Entity::find_by_id(worker).one(self.db.read()).await.expect("workers");
                    assert!(known.is_none(), "a lease that had ended was renewed");
                }
            }
            Operation::ReleaseDriven => {
                let Some(claims) = self.seen(|seen| seen.driven.choose(&mut dice).cloned()) else { return };
                let leases = vec![(claims.lease, claims.worker)];
                self.seen(|seen| seen.promises.expect_release(claims.lease));
                let released = self.send(&mut dice, now, |answer| Request::Release(leases, answer)).await;
                if let Some(released) = released {
                    released.expect("released");
                }
            }
        }
    }

    /// Sends a request to a replica with a current or an outdated cache. Returns `None` if the
    /// replica was killed.
    async fn send<T>(
        &self,
        dice: &mut StdRng,
        now: Timestamp,
        request: impl FnOnce(tokio::sync::oneshot::Sender<T>) -> Request,
    ) -> Option<T> {
        let replica = &self.replicas[dice.random_range(0..REPLICAS)];
        let dispatch = replica.dispatch();
        let answered = async { dispatch.call(request).await.ok() };
        // The task that holds the dispatcher also serves the requests of others.
        let serve = async {
            let mut dispatcher = replica.lock().await;
            if dice.random_bool(0.5) {
                dispatcher.catch_up(true, &mut Effects::default()).await.expect("the database answers");
            }
            let is_before = AtomicUsize::new(dice.random_range(0..4));
            let nothing_is_before = || {
                let nothing = is_before.fetch_add(1, Ordering::Relaxed) % 4 != 3;
                self.seen(|seen| seen.ahead += usize::from(nothing));
                nothing
            };
            let caller =
                RoundContext { now: &|| now, nothing_is_before: &nothing_is_before, announce: &drop };
            let mut requests = dispatcher.pending_requests();
            while !requests.is_empty() {
                requests = dispatcher.rounds(requests, &caller).await;
            }
            dispatcher.done();
        };
        tokio::join!(answered, serve).0
    }

    async fn find(&self, claims: Option<LeaseClaims>) -> Option<lease::Model> {
        leases::find(self.db.read(), claims?.lease).await.expect("leases")
    }

    /// Ends everything, and checks that nothing is left.
    async fn quiesce(&self) {
        self.execute(Operation::Silence, StdRng::seed_from_u64(0)).await;
        self.depart_if_due().await;
        for worker in worker::Entity::find().all(self.db.read()).await.expect("workers") {
            assert_eq!(worker.state, worker::State::Lost, "{} is silent", worker.name);
            assert!(!worker.ephemeral, "{} is lost and was not removed", worker.name);
        }
        for worker in 0..WORKERS {
            self.register(worker, MarkerId::new()).await;
        }
        self.end_stranded_leases().await;
        self.depart_if_due().await;
        for row in workload::Entity::find().all(self.db.read()).await.expect("workloads") {
            let id = WorkloadId::from_uuid(row.id);
            let cancelled = self.db.write(async |txn| {
                workloads::cancel(&txn, "main", id, Duration::ZERO, self.now(), &mut Effects::default()).await
            });
            cancelled.await.expect("cancelled");
        }
        for worker in 0..WORKERS {
            self.register(worker, MarkerId::new()).await;
        }
        self.end_stranded_leases().await;
        self.check().await;
        for worker in worker::Entity::find().all(self.db.read()).await.expect("workers") {
            assert_eq!(worker.active_tasks, 0, "{} has a slot in use", worker.name);
        }
        for replica in &*self.replicas {
            let mut dispatcher = replica.lock().await;
            let mut effects = Effects::default();
            // The first pass updates the reservations, and the second one publishes them.
            for _ in 0..2 {
                dispatcher.catch_up(true, &mut effects).await.expect("the database answers");
                dispatcher.run_queue_pass(self.now(), &mut effects).await.expect("no request waits");
            }
            // Reservations of a killed replica stay until their term ends.
            let mut reserved = reservation::Entity::find().all(self.db.read()).await.expect("workers");
            reserved.retain(|row| dispatcher.reserved(row));
            assert!(reserved.is_empty(), "no request waits: {reserved:?}");
            dispatcher.done();
        }
        for row in workload::Entity::find().all(self.db.read()).await.expect("workloads") {
            assert_eq!(row.state, workload::State::Finished);
        }
    }
}

async fn world(url: &str) -> World {
    // Short, so that reservations are made.
    let queue_aging = Duration::from_millis(50);
    let config = Config { queue_aging, ..Config::new(url, "http://127.0.0.1:9") };
    let db = Database::connect::<crate::Schema>(url).await.expect("a database");
    let config = Arc::new(config);
    let replicas = (0..REPLICAS).map(|_| Replica::new(db.clone(), config.clone())).collect();
    World { db, config, replicas, seen: Arc::default() }
}

/// Two replicas have the same cache of a worker, and place leases one after the other.
async fn grants_of_other_replicas_count(url: &str) {
    let world = world(url).await;
    world.register(1, MarkerId::new()).await;
    for replica in &*world.replicas {
        let mut dispatcher = replica.lock().await;
        dispatcher.catch_up(false, &mut Effects::default()).await.expect("workers");
        dispatcher.done();
    }
    let place = async |replica: usize, count: usize| {
        let requests = (0..count).map(|_| lease_request(LeaseId::new(), Kind::Task, None)).collect();
        let (answer, answered) = tokio::sync::oneshot::channel();
        let mut dispatcher = world.replicas[replica].lock().await;
        let caller = RoundContext { now: &Timestamp::now, nothing_is_before: &|| true, announce: &drop };
        let held = dispatcher.rounds(vec![Request::Place(requests, answer)], &caller).await;
        dispatcher.done();
        assert!(held.is_empty(), "no other request");
        let placed = answered.await.expect("an answer");
        let is_busy = |placed: &PlaceResult| matches!(placed, Err(PlaceError::AllWorkersBusy(_)));
        assert!(placed.iter().all(|placed| placed.is_ok() || is_busy(placed)), "{placed:?}");
        placed.iter().filter(|placed| placed.is_ok()).count()
    };
    // The memory of the worker suffices for two.
    assert_eq!(place(0, 1).await, 1);
    assert_eq!(place(1, 2).await, 1, "the other replica granted one");
    assert_eq!(place(0, 1).await, 0);
    world.check().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn grants_of_other_replicas_count_sqlite() {
    grants_of_other_replicas_count(&testing::databases::sqlite().url).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn grants_of_other_replicas_count_postgres() {
    grants_of_other_replicas_count(&testing::databases::postgres().await.url).await;
}

async fn run(url: &str, mix: &[(Operation, u32)], at_once: usize, seed: u64) -> Observations {
    eprintln!("GANTRY_SEED={seed}");
    let mut dice = StdRng::seed_from_u64(seed);

    let world = world(url).await;
    for worker in 0..WORKERS {
        world.register(worker, MarkerId::new()).await;
    }
    for _ in 0..ROUNDS {
        let (mut operations, mut pending) = (tokio::task::JoinSet::new(), HashMap::new());
        for _ in 0..at_once {
            let (operation, _) = mix.choose_weighted(&mut dice, |(_, weight)| *weight).expect("some weights");
            let killed = dice.random_bool(0.2).then(|| dice.random_range(1..40));
            let (world, operation, dice) = (world.clone(), *operation, StdRng::seed_from_u64(dice.random()));
            let task = operations.spawn(async move {
                let executed = world.execute(operation, dice);
                match killed {
                    None => executed.await,
                    Some(moment) => {
                        let done = killed_at(moment, executed).await;
                        world.seen(|seen| seen.killed += usize::from(done.is_none()));
                    }
                }
            });
            pending.insert(task.id(), (operation, killed));
        }
        loop {
            let done = tokio::time::timeout(Duration::from_secs(60), operations.join_next_with_id()).await;
            let Some(done) = done.unwrap_or_else(|_| panic!("operations do not end: {pending:?}")) else {
                break;
            };
            pending.remove(&done.expect("the operation").0);
        }
        world.learn().await;
        world.check().await;
        let reserved = reservation::Entity::find().count(world.db.read()).await.expect("workers");
        world.seen(|seen| seen.reserved += reserved);
    }
    world.quiesce().await;
    world.seen(std::mem::take)
}

async fn run_all(database: impl AsyncFn() -> TestDatabase) {
    // Whether a request waits long enough before its replica is killed depends on timing.
    for seed in 0..5 {
        let seed = testing::seeds::repeated().unwrap_or_else(|| testing::seeds::nth(seed));
        let seen = run(&database().await.url, &OPERATIONS, 6, seed).await;
        assert!(seen.killed > 0, "some operations must be killed");
        if seen.reserved > 0 {
            return;
        }
    }
    panic!("some requests must wait for a whole worker");
}

async fn run_driven(url: &str) {
    let seen = run(url, &DRIVEN, 16, testing::seeds::seed()).await;
    assert!(seen.ahead > 0, "some rounds must be decided ahead");
    assert!(seen.promises.ended > 0, "some leases must end");
    assert!(seen.killed > 0, "some operations must be killed");
}

#[tokio::test(flavor = "multi_thread")]
async fn limits_hold_under_concurrent_operations_sqlite() {
    run_all(async || testing::databases::sqlite()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn limits_hold_under_concurrent_operations_postgres() {
    run_all(testing::databases::postgres).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn limits_hold_for_many_driven_leases_sqlite() {
    run_driven(&testing::databases::sqlite().url).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn limits_hold_for_many_driven_leases_postgres() {
    run_driven(&testing::databases::postgres().await.url).await;
}
