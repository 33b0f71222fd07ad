//! Model tests of the scheduler: after each random step, its state and answers must equal those of
//! the model.
//!
//! Two replicas take steps one after the other, without notifications between them, on real
//! databases and beside a real artifact store. Steps also use ended tokens and sessions, so that
//! messages are late, repeated and out of order. Up to a quarter of the steps are killed at an
//! await point, together with the memory of their replica. The caller may repeat a killed step, and
//! the result must equal that of a single step. The clock moves by minutes or by a day. Steps are
//! drawn from several mixes: all steps, more requests than room, gateway streams, lost workers, and
//! many failures. Choices of the scheduler (a worker among equals, session numbers) are taken from
//! the database and checked. Where only placement decides, the worker must be a best one by the
//! reference implementation.
//!
//! Gateways receive desired states on open streams of one replica, through the production handler
//! ([`crate::api`]'s Synchronize). Their reports and echoed generations may be late, repeated and
//! out of order.
//!
//! A waiting call for leases does not block later steps. It waits at its replica until a later step
//! there answers it, its caller disconnects, or its replica is killed.
//!
//! Concurrent operations are tested in [`crate::testing::concurrent`], with weaker expectations.

mod attempts;
mod calls;
mod fixtures;
mod gateways;
mod generator;
mod heartbeats;
mod operations;
mod oracle;
mod queue_rules;
mod replica;
mod snapshot;
mod state;
mod store;
mod stream;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use db::Database;
use domain::worker::{LeaseClaims, SessionClaims};
use domain::{AttemptId, LeaseId, MarkerId, Timestamp, WorkloadId};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use rpc::token::TokenSigner;
use sea_orm::{ConnectionTrait, EntityTrait, QueryFilter};
use testing::databases::TestDatabase;

use self::attempts::Report;
use self::fixtures::{Uses, WORKERS};
use self::gateways::OpenStream;
use self::generator::{MIXES, Mix};
use self::operations::{Answer, Call, Step};
use self::oracle::StepResult;
use self::replica::{Cluster, Replica};
use self::snapshot::{Calendar, read_state};
use self::state::{Minutes, State};
use self::store::Store;
use crate::db::entity::lease::{self, Kind, State as LeaseState};
use crate::db::entity::workload::State as Progress;
use crate::leases;
use crate::testing::concurrent::checks::rest_of_all;
use crate::testing::concurrent::replicas::killed_at;

const MINUTE: Duration = Duration::from_secs(60);

const REPLICAS: usize = 2;
const STEPS: usize = 420;
/// Number of consecutive steps with one mix.
const MIX_STEPS: usize = 35;
/// Default number of seeds of a test, which `GANTRY_SEEDS` overrides.
const SEEDS: u64 = 4;

/// Returns the digest of an attempt's output, different for each attempt.
fn digest(attempt: AttemptId) -> [u8; 32] {
    *blake3::hash(attempt.uuid().as_bytes()).as_bytes()
}

/// What callers and gateways know. Steps use it even if it is outdated.
#[derive(Default)]
struct KnownObjects {
    submitted: BTreeSet<WorkloadId>,
    sessions: Vec<SessionClaims>,
    claims: Vec<LeaseClaims>,
    driven: Vec<(LeaseId, Kind)>,
    /// The first value of `same_worker_as_lease_id` of each lease.
    near: BTreeMap<LeaseId, Option<LeaseId>>,
    /// Calls with a waiting time.
    patient: Vec<Call>,
    markers: BTreeMap<&'static str, Vec<MarkerId>>,
    /// Open streams, by number.
    streams: BTreeMap<usize, OpenStream>,
    /// The attempt whose output each ended workload names.
    outputs: BTreeMap<WorkloadId, AttemptId>,
    /// Attempts whose outputs the artifact store has.
    published: BTreeSet<AttemptId>,
}

impl KnownObjects {
    fn is_driven(&self, id: LeaseId) -> bool {
        self.driven.iter().any(|(driven, _)| *driven == id)
    }

    fn has_output(&self, id: WorkloadId) -> bool {
        self.outputs.get(&id).is_some_and(|attempt| self.published.contains(attempt))
    }
}

struct World {
    cluster: Cluster,
    replicas: Vec<Replica>,
    store: Store,
    calendar: Calendar,
    model: State,
    known: KnownObjects,
    dice: StdRng,
    /// Number of generated ids.
    ids: u64,
    killed: usize,
    mix: Mix,
    /// Number of generated calls.
    calls: usize,
    /// Number of opened streams.
    opened: usize,
    /// A step that must follow, instead of a random one.
    up_next: Option<Step>,
    /// Number of waiting calls that were granted.
    waited: usize,
    /// Number of leases that ended because their gateway did not know them.
    unknown: usize,
    /// The steps so far, printed on failure.
    history: History,
}

/// Printed if the test fails.
#[derive(Default)]
struct History(Vec<String>);

impl Drop for History {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.iter().for_each(|line| eprintln!("{line}"));
        }
    }
}

impl World {
    async fn start(url: &str, seed: u64) -> Self {
        let signer = TokenSigner::from_seed(&[7; 32]);
        let store = Store::start(&signer).await;
        let config = Arc::new(fixtures::config(url, &store.endpoint()));
        let db = Database::connect::<crate::Schema>(url).await.expect("a database");
        let input = store.upload(fixtures::TEAM).await.expect("uploaded");
        let cluster = Cluster { db, config, signer, store: store.peer(), input };
        let replicas = (0..REPLICAS).map(|_| Replica::start(&cluster)).collect();
        let calendar = Calendar { began: Timestamp::now(), moved: 0 };
        let dice = StdRng::seed_from_u64(seed);
        let (model, known, history) = (State::default(), KnownObjects::default(), History::default());
        let (ids, killed, calls, opened, waited, unknown) = (0, 0, 0, 0, 0, 0);
        Self {
            cluster,
            replicas,
            store,
            calendar,
            model,
            known,
            dice,
            ids,
            killed,
            mix: Mix::Any,
            calls,
            opened,
            up_next: None,
            waited,
            unknown,
            history,
        }
    }

    fn now(&self) -> Minutes {
        self.calendar.moved
    }

    /// Takes `step`, and compares the result with the model.
    async fn take(&mut self, step: Step) {
        self.prepare(&step).await;
        let number = match &step {
            Step::Disconnect { call } => self.model.replica_of(*call),
            Step::SendReport { stream, .. } => self.known.streams[stream].replica,
            Step::Place { call, .. } if let Some(there) = self.model.where_it_waits(call) => {
                if self.dice.random_bool(0.3) { there } else { (there + 1) % REPLICAS }
            }
            Step::Dispatch if let Some(there) = self.model.waits_for_what_is_there() => there,
            _ => self.dice.random_range(0..REPLICAS),
        };
        let is_killed = self.dice.random_bool(self.mix.kills());
        let killed = is_killed.then(|| self.dice.random_range(1..25));
        // The caller may disconnect as well.
        let comes_back = match step {
            Step::Submit { .. } | Step::Place { .. } => self.dice.random_bool(0.7),
            // The stream has ended.
            Step::SendReport { .. } => false,
            _ => true,
        };
        self.history.0.push(format!("{:?} by {number}, killed {killed:?}: {step:?}", self.now()));
        let mut answer = match killed {
            None => Some(Box::pin(self.replicas[number].execute(&step)).await),
            Some(moment) => killed_at(moment, Box::pin(self.replicas[number].execute(&step))).await,
        };
        let mut by = vec![number];
        if answer.is_none() {
            self.killed += 1;
            self.replicas[number].kill().await;
            rest_of_all(&self.cluster.db).await.expect("the database answers");
            self.replicas[number] = Replica::start(&self.cluster);
            if comes_back {
                let another = self.dice.random_range(0..REPLICAS);
                by.push(another);
                answer = Some(Box::pin(self.replicas[another].execute(&step)).await);
            }
        }
        if let Some(answer) = &answer {
            self.history.0.push(format!("    {:?} by {by:?}, and {:?}", answer.results, answer.others));
            let granted =
                answer.others.iter().filter(|(_, results)| results.iter().any(|result| result == "Ok"));
            self.waited += granted.count();
        }
        if let Step::Pass(minutes) = step {
            self.pass(minutes).await;
            answer.iter_mut().for_each(|answer| answer.waiting.clear());
        }
        let after = read_state(&self.cluster.db, self.calendar).await;
        let (known, now) = (&self.known, self.now());
        let live = |state: &State| state.leases.values().filter(|lease| lease.is_live()).count();
        if matches!(step, Step::SendReport { .. }) {
            self.unknown += live(&self.model) - live(&after);
        }
        self.model.expect(&step, &StepResult { answer: answer.as_ref(), by: &by, after: &after, known, now });
        compare(&self.model, &after);
        for (worker, generation) in &after.generations {
            let before = self.model.generations.get(worker);
            assert!(before <= Some(generation), "the generation of {worker} fell from {before:?}");
        }
        self.model.generations = after.generations;
        if by.len() > 1 || answer.is_none() {
            self.known.streams.retain(|_, stream| stream.replica != number);
        }
        self.learn(&step, answer.as_ref(), by[by.len() - 1]).await;
        self.model.check_told(&self.known.streams, &self.model.generations);
    }

    /// Prepares what callers and gateways do at the store before a step.
    async fn prepare(&mut self, step: &Step) {
        match step {
            Step::Submit { id, .. } if fixtures::uses(*id) == Uses::Build => {
                let team = fixtures::requirements_of_workload(*id).team;
                self.store.put_build(team, fixtures::build(*id), *id).await;
            }
            Step::Finish { claims, report: Report { has_outputs: true, .. } } => {
                let Some((id, attempt)) = claims.attempt else { return };
                if self.model.live_workload(claims).is_some() {
                    self.known.outputs.insert(id, attempt);
                }
                if self.dice.random_bool(0.5) && self.store.publish(&claims.team, id, attempt).await {
                    self.known.published.insert(attempt);
                }
            }
            _ => {}
        }
    }

    /// Moves the clock: all times in the database become older.
    async fn pass(&mut self, minutes: Minutes) {
        for replica in &mut self.replicas {
            replica.kill().await;
        }
        let instants = [
            ("workers", "registered_at"),
            ("workers", "interrupt_at"),
            ("workers", "landed_at"),
            ("workers", "quarantined_until"),
            ("heartbeats", "last_contact_at"),
            ("heartbeats", "patient_since"),
            ("leases", "granted_at"),
            ("leases", "expires_at"),
            ("leases", "ended_at"),
            ("workloads", "submitted_at"),
            ("workloads", "started_at"),
            ("workloads", "finished_at"),
            ("workloads", "queue_deadline"),
            ("workloads", "run_deadline"),
            ("outbox", "due_at"),
            ("reservations", "expires_at"),
            ("owner_affinity", "granted_at"),
            ("removed_workers", "removed_at"),
            ("events", "at"),
        ];
        let aged = self.cluster.db.write(async |txn| {
            for (table, column) in instants {
                let sql = format!("UPDATE {table} SET {column} = {column} - {}", minutes * 60_000_000);
                txn.execute_unprepared(&sql).await?;
            }
            Ok::<_, sea_orm::DbErr>(())
        });
        aged.await.expect("aged");
        self.calendar.moved += minutes;
        self.known.streams.clear();
        self.replicas = (0..REPLICAS).map(|_| Replica::start(&self.cluster)).collect();
        self.model.waiting.clear();
    }

    /// Records what later steps use.
    async fn learn(&mut self, step: &Step, answer: Option<&Answer>, replica: usize) {
        let known = &mut self.known;
        known.sessions.extend(answer.and_then(|answer| answer.session.clone()));
        match (step, answer) {
            (Step::Attend { stream, .. }, Some(Answer { session: Some(session), .. })) => {
                let open_stream =
                    OpenStream { replica, session: session.clone(), received: vec![], sent: vec![] };
                known.streams.insert(*stream, open_stream);
            }
            (Step::Use(lease), Some(answer)) if answer.results == ["Ok"] => {
                // The gateway creates a container, which the store must collect with the lease.
                let (holder, team) = (WorkloadId::from_uuid(lease.uuid()), &self.model.leases[lease].team);
                self.store.publish(team, holder, AttemptId::new()).await;
            }
            (Step::SendReport { stream, report, .. }, Some(_)) => {
                known.streams.get_mut(stream).expect("an open stream").sent.push(report.clone());
            }
            _ => {}
        }
        for (number, output) in answer.into_iter().flat_map(|answer| &answer.received_on_streams) {
            if output.end.is_some() {
                known.streams.remove(number);
            } else if let Some(stream) = known.streams.get_mut(number) {
                stream.receive(output);
            }
        }
        match step {
            Step::Submit { id, .. } => _ = known.submitted.insert(*id),
            Step::Place { call, .. } => {
                for item in &call.items {
                    known.near.entry(item.0).or_insert(call.near);
                    if !known.driven.contains(item) {
                        known.driven.push(*item);
                    }
                }
                if call.wait > 0 {
                    known.patient.push(call.clone());
                }
            }
            _ => {}
        }
        let rows = lease::Entity::find().filter(lease::is_live()).all(self.cluster.db.read()).await;
        for row in rows.expect("leases").iter().filter(|row| !row.is_driven()) {
            let claims = leases::claims(row);
            if !known.claims.contains(&claims) {
                known.claims.push(claims);
            }
        }
    }

    /// Registers gateways with new incarnations for each worker.
    async fn greet(&mut self, instances: &[u128]) {
        for name in WORKERS {
            for instance in instances {
                let instance = generator::instance(*instance);
                let marker = MarkerId::new();
                self.known.markers.entry(name).or_default().push(marker);
                self.take(Step::Registration(Box::new(fixtures::registration(name, instance, marker, None))))
                    .await;
            }
        }
    }

    /// Lets every worker take work, and opens a stream for each.
    async fn gather(&mut self) {
        for name in WORKERS {
            self.take(Step::Run(name)).await;
            let known = self.model.workers.get(name);
            let instance = known.map_or(generator::instance(1), |one| one.instance);
            let marker = known.map_or_else(MarkerId::new, |one| one.marker);
            self.known.markers.entry(name).or_default().push(marker);
            self.opened += 1;
            let registration = Box::new(fixtures::registration(name, instance, marker, None));
            self.take(Step::Attend { stream: self.opened, registration }).await;
        }
    }

    /// Ends everything, and checks that nothing is left.
    async fn end_everything(&mut self) {
        self.greet(&[1, 2]).await;
        self.take(Step::EndStranded).await;
        for id in self.model.workloads.keys().copied().collect::<Vec<_>>() {
            let team = fixtures::requirements_of_workload(id).team;
            self.take(Step::Cancel { id, grace: 0, team }).await;
        }
        for lease in self.model.leases.keys().copied().collect::<Vec<_>>() {
            self.take(Step::Release { lease, is_fresh: false }).await;
        }
        self.greet(&[1, 2]).await;
        self.take(Step::EndStranded).await;
        self.take(Step::Depart).await;
        self.take(Step::Reconcile).await;
        let live = self.model.leases.values().filter(|lease| lease.state != LeaseState::Ended).count();
        assert_eq!(live, 0, "every lease has ended");
        let open = self.model.workloads.values().filter(|one| one.state != Progress::Finished).count();
        assert_eq!(open, 0, "every workload has finished");
        let (holders, _) = self.replicas[0].app.store.holders(String::new()).await.expect("listed");
        assert!(holders.is_empty(), "the store has pins of {holders:?}");
        self.store.check_outputs(&self.known, &self.model).await;
    }
}

/// Compares the model with the database.
fn compare(model: &State, there: &State) {
    let of = |state: &State| {
        let mut state = state.clone();
        // Only the order of removals counts, not its numbers.
        let mut order: Vec<_> = state.removed_workers.values().map(|removed| removed.order).collect();
        order.sort_unstable();
        for removed in state.removed_workers.values_mut() {
            removed.order = order.iter().position(|known| *known == removed.order).expect("a removed worker");
        }
        state
    };
    let (model, there) = (of(model), of(there));
    assert_equal("workers", &model.workers, &there.workers);
    assert_equal("removed workers", &model.removed_workers, &there.removed_workers);
    assert_equal("leases", &model.leases, &there.leases);
    assert_equal("workloads", &model.workloads, &there.workloads);
    assert_equal("owners of containers", &model.owners, &there.owners);
    assert_equal("the outbox", &model.outbox, &there.outbox);
}

fn assert_equal<K: Ord + std::fmt::Debug, V: PartialEq + std::fmt::Debug>(
    what: &str,
    model: &BTreeMap<K, V>,
    there: &BTreeMap<K, V>,
) {
    for key in model.keys().chain(there.keys()) {
        let (model, there) = (model.get(key), there.get(key));
        assert!(model == there, "{what}, {key:?}: the model says\n{model:#?}\nand there is\n{there:#?}");
    }
}

async fn scheduler_behaves_like_the_model(database: impl AsyncFn() -> TestDatabase) {
    let count = testing::seeds::setting("GANTRY_SEEDS").unwrap_or(SEEDS);
    let seeds = testing::seeds::repeated()
        .map_or_else(|| (0..count).map(testing::seeds::nth).collect(), |seed| vec![seed]);
    let (mut killed, mut waited, mut unknown) = (0, 0, 0);
    for seed in &seeds {
        let seed = *seed;
        eprintln!("GANTRY_SEED={seed}");
        let database = database().await;
        let mut world = World::start(&database.url, seed).await;
        Box::pin(world.greet(&[1])).await;
        for step in 0..STEPS {
            world.mix = MIXES[step / MIX_STEPS % MIXES.len()];
            if step % MIX_STEPS == 0 && world.mix == Mix::Spoken {
                Box::pin(world.gather()).await;
            }
            if let Some(step) = world.next() {
                Box::pin(world.take(step)).await;
            }
        }
        Box::pin(world.end_everything()).await;
        killed += world.killed;
        waited += world.waited;
        unknown += world.unknown;
    }
    // A step is killed only if one of its awaits is pending, which is rare under load.
    assert!(killed > 0 || seeds.len() == 1, "some steps must be killed");
    assert!(waited > 0 || seeds.len() == 1, "some waiting calls must be granted");
    assert!(unknown > 0 || seeds.len() == 1, "some leases must end because their gateway does not know them");
}

#[tokio::test(flavor = "multi_thread")]
async fn scheduler_behaves_like_the_model_sqlite() {
    scheduler_behaves_like_the_model(async || testing::databases::sqlite()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn scheduler_behaves_like_the_model_postgres() {
    scheduler_behaves_like_the_model(testing::databases::postgres).await;
}
