//! The scheduler against a model: what there is after each operation, and what was answered, has to be what the model says.
//!
//! Operations are done one after the other by two replicas that do not hear of each other, on real databases and beside a real artifact store. Tokens
//! and sessions that are over are used as well as new ones, so messages are late, doubled and out of order. Every fourth operation is killed where it
//! waits, its replica with what it had in memory; whoever asked asks again, and in the end there must be what there is when it was done once. The
//! clock moves by minutes or by a day. What only the scheduler can choose (which of the workers that would do, numbers of sessions) is looked up, and
//! judged.
//!
//! What is done at the same time is not here but in [`crate::random_operations`], which knows less of what has to come of it.

mod attempts;
mod cast;
mod contacts;
mod expect;
mod look;
mod state;
mod steps;
mod store;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use db::Database;
use domain::worker::{LeaseClaims, SessionClaims};
use domain::workload::{Exit, FailureReason};
use domain::{AttemptId, GatewayInstance, LeaseId, MarkerId, Timestamp, WorkloadId};
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};
use rpc::token::TokenSigner;
use sea_orm::{ConnectionTrait, EntityTrait, QueryFilter};
use testing::databases::TestDatabase;
use uuid::Uuid;

use self::attempts::Report;
use self::cast::{Uses, WORKERS};
use self::look::{Calendar, look};
use self::state::{Minutes, State};
use self::steps::{Answer, Cluster, Replica, Step};
use self::store::Store;
use crate::entity::lease::{self, Kind, State as LeaseState};
use crate::entity::workload::State as Progress;
use crate::leases;
use crate::random_operations::checks::rest_of_all;
use crate::random_operations::replicas::killed_at;
use crate::registry::Down;
use crate::workloads::Phase;

const MINUTE: Duration = Duration::from_secs(60);

const REPLICAS: usize = 2;
const STEPS: usize = 400;
const SEEDS: u64 = 8;

/// The digest of what an attempt publishes: of no two is it the same.
fn digest(attempt: AttemptId) -> [u8; 32] {
    *blake3::hash(attempt.uuid().as_bytes()).as_bytes()
}

/// What callers and gateways know, and use however old it is.
#[derive(Default)]
struct Known {
    submitted: BTreeSet<WorkloadId>,
    sessions: Vec<SessionClaims>,
    claims: Vec<LeaseClaims>,
    driven: Vec<(LeaseId, Kind)>,
    /// Near to which other they were asked for first.
    near: BTreeMap<LeaseId, Option<LeaseId>>,
    markers: BTreeMap<&'static str, Vec<MarkerId>>,
    /// By which attempt a workload says that it made its output, once it has ended.
    outputs: BTreeMap<WorkloadId, AttemptId>,
    /// The attempts whose outputs the artifact store has.
    published: BTreeSet<AttemptId>,
}

impl Known {
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
    known: Known,
    dice: StdRng,
    /// How many ids were made.
    ids: u64,
    killed: usize,
    /// What was done, which is said when something is wrong.
    history: History,
}

/// Printed when the test fails.
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
        let config = Arc::new(cast::config(url, &store.endpoint()));
        let db = Database::connect::<crate::Schema>(url).await.expect("a database");
        let input = store.upload(cast::TEAM).await.expect("uploaded");
        let cluster = Cluster { db, config, signer, store: store.peer(), input };
        let replicas = (0..REPLICAS).map(|_| Replica::start(&cluster)).collect();
        let calendar = Calendar { began: Timestamp::now(), moved: 0 };
        let dice = StdRng::seed_from_u64(seed);
        let (model, known, history) = (State::default(), Known::default(), History::default());
        Self { cluster, replicas, store, calendar, model, known, dice, ids: 0, killed: 0, history }
    }

    fn now(&self) -> Minutes {
        self.calendar.moved
    }

    /// Does `step`, and compares what came of it with what should have.
    async fn take(&mut self, step: Step) {
        self.prepare(&step).await;
        let number = self.dice.random_range(0..REPLICAS);
        let killed = self.dice.random_bool(0.25).then(|| self.dice.random_range(1..25));
        // Whoever asks for something may go as well.
        let comes_back =
            !matches!(step, Step::Submit { .. } | Step::Place { .. }) || self.dice.random_bool(0.7);
        self.history.0.push(format!("{:?} by {number}, killed {killed:?}: {step:?}", self.now()));
        let mut answer = match killed {
            None => Some(Box::pin(self.replicas[number].carry_out(&step)).await),
            Some(moment) => killed_at(moment, Box::pin(self.replicas[number].carry_out(&step))).await,
        };
        let was_killed = answer.is_none();
        if was_killed {
            self.killed += 1;
            rest_of_all(&self.cluster.db).await.expect("the database answers");
            self.replicas[number] = Replica::start(&self.cluster);
            if comes_back {
                let another = self.dice.random_range(0..REPLICAS);
                answer = Some(Box::pin(self.replicas[another].carry_out(&step)).await);
            }
        }
        if let Some(answer) = &answer {
            self.history.0.push(format!("    {:?}", answer.said));
        }
        if let Step::Pass(minutes) = step {
            self.pass(minutes).await;
        }
        let after = look(&self.cluster.db, self.calendar).await;
        let now = self.now();
        self.model.expect(&step, answer.as_ref(), was_killed, &after, &self.known, now);
        compare(&self.model, &after);
        self.learn(&step, answer.as_ref()).await;
    }

    /// What callers and gateways do elsewhere before.
    async fn prepare(&mut self, step: &Step) {
        match step {
            Step::Submit { id, .. } if cast::uses(*id) == Uses::Build => {
                let team = cast::asks_of_workload(*id).team;
                self.store.put_build(team, cast::build(*id), *id).await;
            }
            Step::Finish { claims, report: Report { has_outputs: true, .. } } => {
                let Some((id, attempt)) = claims.attempt else { return };
                if self.model.held(claims).is_some() {
                    self.known.outputs.insert(id, attempt);
                }
                if self.dice.random_bool(0.5) && self.store.publish(&claims.team, id, attempt).await {
                    self.known.published.insert(attempt);
                }
            }
            _ => {}
        }
    }

    /// Time passes: all that happened was so much longer ago.
    async fn pass(&mut self, minutes: Minutes) {
        let instants = [
            ("workers", "registered_at"),
            ("workers", "interrupt_at"),
            ("workers", "landed_at"),
            ("workers", "set_aside_until"),
            ("worker_contacts", "last_contact_at"),
            ("worker_contacts", "patient_since"),
            ("leases", "granted_at"),
            ("leases", "expires_at"),
            ("leases", "ended_at"),
            ("workloads", "submitted_at"),
            ("workloads", "started_at"),
            ("workloads", "finished_at"),
            ("workloads", "queue_deadline"),
            ("workloads", "run_deadline"),
            ("outbox", "due_at"),
            ("kept_free", "expires_at"),
            ("owner_workers", "granted_at"),
            ("gone_workers", "gone_at"),
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
        self.replicas = (0..REPLICAS).map(|_| Replica::start(&self.cluster)).collect();
    }

    /// What is used later on.
    async fn learn(&mut self, step: &Step, answer: Option<&Answer>) {
        let known = &mut self.known;
        known.sessions.extend(answer.and_then(|answer| answer.session.clone()));
        match step {
            Step::Submit { id, .. } => _ = known.submitted.insert(*id),
            Step::Place { asks, near, .. } => {
                for ask in asks {
                    known.near.entry(ask.0).or_insert(*near);
                    if !known.driven.contains(ask) {
                        known.driven.push(*ask);
                    }
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

    /// The next id, of which the same seed says the same: what is asked for under it is in its bytes.
    fn id(dice: &mut StdRng, made: &mut u64) -> Uuid {
        *made += 1;
        uuid::Builder::from_unix_timestamp_millis(*made, &dice.random()).into_uuid()
    }

    /// Mostly one of the last.
    fn some<T: Clone>(dice: &mut StdRng, of: &[T]) -> Option<T> {
        let recent = if dice.random_bool(0.8) { of.len().saturating_sub(6) } else { 0 };
        of[recent..].choose(dice).cloned()
    }

    /// Of an attempt, mostly of one that goes on.
    fn claims(&mut self) -> Option<LeaseClaims> {
        let held: Vec<_> =
            self.known.claims.iter().filter(|claims| self.model.held(claims).is_some()).cloned().collect();
        let of = if held.is_empty() || self.dice.random_bool(0.3) { &self.known.claims } else { &held };
        Self::some(&mut self.dice, of)
    }

    fn next(&mut self) -> Option<Step> {
        let claims = self.claims();
        let dice = &mut self.dice;
        let weights = [
            (Draw::Hello, 5),
            (Draw::Misfit, 1),
            (Draw::Goodbye, 2),
            (Draw::Heard, 10),
            (Draw::Pass, 5),
            (Draw::BePatient, 1),
            (Draw::Expire, 7),
            (Draw::Down, 3),
            (Draw::Run, 5),
            (Draw::Prune, 1),
            (Draw::SeeOff, 5),
            (Draw::EndOrphans, 3),
            (Draw::Submit, 20),
            (Draw::Place, 9),
            (Draw::Renew, 3),
            (Draw::Release, 6),
            (Draw::Dispatch, 10),
            (Draw::Start, 14),
            (Draw::Finish, 16),
            (Draw::Observe, 10),
            (Draw::Absent, 2),
            (Draw::Cancel, 4),
            (Draw::Deliver, 5),
            (Draw::Reconcile, 3),
        ];
        let (draw, _) = weights.choose_weighted(dice, |(_, weight)| *weight).expect("some weights");
        let name = *WORKERS.choose(dice).expect("some");
        let known = &mut self.known;
        Some(match draw {
            Draw::Hello | Draw::Misfit => {
                // One of two gateways, which mostly finds what it left, or another did.
                let instance = GatewayInstance::from_uuid(Uuid::from_u128(dice.random_range(1..=2)));
                let markers = known.markers.entry(name).or_default();
                if markers.is_empty() || dice.random_bool(0.2) {
                    markers.push(MarkerId::new());
                }
                let marker = if dice.random_bool(0.9) { markers.last() } else { markers.choose(dice) };
                let marker = *marker.expect("there is one");
                let last = Self::some(dice, &known.sessions).filter(|_| dice.random_bool(0.3));
                let mut hello = cast::hello(name, instance, marker, last);
                if dice.random_bool(0.05) {
                    hello.labels.team = Some("third".to_owned());
                }
                let hello = Box::new(hello);
                if matches!(draw, Draw::Hello) { Step::Hello(hello) } else { Step::Misfit(hello) }
            }
            Draw::Goodbye => {
                let session = Self::some(dice, &known.sessions)?;
                // What is said late comes after something else was heard.
                let is_last = self.model.judge(&session).is_ok() && dice.random_bool(0.7);
                Step::Goodbye { session, is_last }
            }
            Draw::Heard => Step::Heard(Self::some(dice, &known.sessions)?),
            Draw::Pass => Step::Pass(*[10, 10, 20, 30, 40, 100, 1000].choose(dice).expect("some")),
            Draw::BePatient => Step::BePatient,
            Draw::Expire => Step::Expire,
            Draw::Down => {
                let retire = Down::Retire { force: dice.random_bool(0.5) };
                let down = if dice.random_bool(0.8) { Down::Land } else { retire };
                let interrupt_after = dice.random_bool(0.6).then(|| dice.random_range(0..3) * 10 + 5);
                Step::Down { name, down, interrupt_after }
            }
            Draw::Run => Step::Run(name),
            Draw::Prune => Step::Prune(name),
            Draw::SeeOff => Step::SeeOff,
            Draw::EndOrphans => Step::EndOrphans,
            Draw::Submit => {
                let there: Vec<_> = self.model.workloads.keys().copied().collect();
                let again = Self::some(dice, &there).filter(|_| dice.random_bool(0.2));
                let taken = Self::some(dice, &known.driven).filter(|_| dice.random_bool(0.05));
                let taken = taken.map(|(id, _)| WorkloadId::from_uuid(id.uuid()));
                // Of an id that was used, forgotten here, and used again the artifact store takes what is settled for a repeat.
                let taken = taken.filter(|id| cast::uses(*id) != Uses::Output);
                let new = WorkloadId::from_uuid(Self::id(dice, &mut self.ids));
                let id = again.or(taken).unwrap_or(new);
                let other = again.is_some() && dice.random_bool(0.3);
                Step::Submit { id, other, is_fresh: dice.random_bool(0.7) }
            }
            Draw::Place => {
                let kinds = [Kind::Task, Kind::Service, Kind::Check, Kind::Transfer];
                let mut new = || {
                    let id = LeaseId::from_uuid(Self::id(dice, &mut self.ids));
                    (id, *kinds.choose(dice).expect("some"))
                };
                let (mut one, other) = (new(), new());
                let there: Vec<_> = self.model.workloads.keys().copied().collect();
                let taken = Self::some(dice, &there).filter(|_| dice.random_bool(0.05));
                one.0 = taken.map_or(one.0, |id| LeaseId::from_uuid(id.uuid()));
                let again = Self::some(dice, &known.driven).filter(|_| dice.random_bool(0.2));
                let together = again.is_none() && dice.random_bool(0.4);
                let asks = match again {
                    Some((id, _)) if dice.random_bool(0.2) => vec![(id, one.1)],
                    Some(again) => vec![again],
                    None if together || dice.random_bool(0.3) => vec![one, other],
                    None => vec![one],
                };
                let live: Vec<_> = self.model.leases.keys().copied().collect();
                let near = match again {
                    Some((id, _)) if dice.random_bool(0.9) => known.near.get(&id).copied().flatten(),
                    _ if asks.len() == 1 && dice.random_bool(0.3) => Self::some(dice, &live),
                    _ => None,
                };
                Step::Place { asks, together, near, is_fresh: dice.random_bool(0.5) }
            }
            Draw::Renew => Step::Renew(Self::some(dice, &known.driven)?.0),
            Draw::Release => Step::Release(Self::some(dice, &known.driven)?.0),
            Draw::Dispatch => Step::Dispatch,
            Draw::Start => Step::Start(claims?),
            Draw::Finish => {
                let code = Some(Exit::Code(dice.random_range(0..2)));
                let (exit, failure) = match dice.random_range(0..19) {
                    0 | 1 | 9 | 10 | 11 => (None, Some(FailureReason::StartFailed)),
                    2 => (None, Some(FailureReason::WorkerFull)),
                    3 => (None, Some(FailureReason::DiskFull)),
                    4 => (None, Some(FailureReason::ExitUnknown)),
                    5 => (Some(Exit::Signal(15)), Some(FailureReason::ContactLost)),
                    6 | 7 => (Some(Exit::Signal(15)), Some(FailureReason::Interrupted)),
                    8 => (None, None),
                    _ => (code, None),
                };
                let claims = claims?;
                let makes = claims.attempt.is_some_and(|(id, _)| cast::uses(id) == Uses::Output);
                let has_outputs = makes && exit.is_some() && dice.random_bool(0.8);
                Step::Finish { claims, report: Report { exit, failure, has_outputs } }
            }
            Draw::Observe => {
                let phases = [Phase::Preparing, Phase::Running, Phase::Publishing, Phase::Ended];
                let phase = *phases.choose(dice).expect("some");
                Step::Observe { claims: claims?, phase }
            }
            Draw::Absent => Step::Absent(claims?),
            Draw::Cancel => {
                let there: Vec<_> = known.submitted.iter().copied().collect();
                let id = Self::some(dice, &there)?;
                let theirs = cast::asks_of_workload(id).team;
                let team = if dice.random_bool(0.9) { theirs } else { "third" };
                Step::Cancel { id, grace: dice.random_range(0..20), team }
            }
            Draw::Deliver => Step::Deliver,
            Draw::Reconcile => Step::Reconcile,
        })
    }

    /// A gateway of each worker says hello, or one after the other where one attends it, each for a worker that has begun anew.
    async fn greet(&mut self, instances: &[u128]) {
        for name in WORKERS {
            for instance in instances {
                let instance = GatewayInstance::from_uuid(Uuid::from_u128(*instance));
                let marker = MarkerId::new();
                self.known.markers.entry(name).or_default().push(marker);
                self.take(Step::Hello(Box::new(cast::hello(name, instance, marker, None)))).await;
            }
        }
    }

    /// Lets everything end, and finds nothing left.
    async fn come_to_rest(&mut self) {
        self.greet(&[1, 2]).await;
        self.take(Step::EndOrphans).await;
        for id in self.model.workloads.keys().copied().collect::<Vec<_>>() {
            let team = cast::asks_of_workload(id).team;
            self.take(Step::Cancel { id, grace: 0, team }).await;
        }
        for lease in self.model.leases.keys().copied().collect::<Vec<_>>() {
            self.take(Step::Release(lease)).await;
        }
        self.greet(&[1, 2]).await;
        self.take(Step::EndOrphans).await;
        self.take(Step::SeeOff).await;
        self.take(Step::Reconcile).await;
        let live = self.model.leases.values().filter(|lease| lease.state != LeaseState::Ended).count();
        assert_eq!(live, 0, "all have ended");
        let open = self.model.workloads.values().filter(|one| one.state != Progress::Finished).count();
        assert_eq!(open, 0, "all have finished");
        let (holders, _) = self.replicas[0].scheduler.store.holders(String::new()).await.expect("listed");
        assert!(holders.is_empty(), "the store keeps something for {holders:?}");
        self.store.check_outputs(&self.known, &self.model).await;
    }
}

#[derive(Debug, Clone, Copy)]
enum Draw {
    Hello,
    Misfit,
    Goodbye,
    Heard,
    Pass,
    BePatient,
    Expire,
    Down,
    Run,
    Prune,
    SeeOff,
    EndOrphans,
    Submit,
    Place,
    Renew,
    Release,
    Dispatch,
    Start,
    Finish,
    Observe,
    Absent,
    Cancel,
    Deliver,
    Reconcile,
}

/// Both say the same.
fn compare(model: &State, there: &State) {
    let of = |state: &State| {
        let mut state = state.clone();
        // Who went after whom, and not by which number.
        let mut order: Vec<_> = state.gone.values().map(|gone| gone.order).collect();
        order.sort_unstable();
        for gone in state.gone.values_mut() {
            gone.order = order.iter().position(|known| *known == gone.order).expect("it is there");
        }
        state
    };
    let (model, there) = (of(model), of(there));
    differ("workers", &model.workers, &there.workers);
    differ("workers that have gone", &model.gone, &there.gone);
    differ("leases", &model.leases, &there.leases);
    differ("workloads", &model.workloads, &there.workloads);
    differ("owners of containers", &model.owners, &there.owners);
    differ("the outbox", &model.outbox, &there.outbox);
}

fn differ<K: Ord + std::fmt::Debug, V: PartialEq + std::fmt::Debug>(
    what: &str,
    model: &BTreeMap<K, V>,
    there: &BTreeMap<K, V>,
) {
    for key in model.keys().chain(there.keys()) {
        let (model, there) = (model.get(key), there.get(key));
        assert!(model == there, "{what}, {key:?}: the model says\n{model:#?}\nand there is\n{there:#?}");
    }
}

async fn all_is_as_the_model_says(database: impl AsyncFn() -> TestDatabase) {
    let seeds = testing::seeds::repeated()
        .map_or_else(|| (0..SEEDS).map(testing::seeds::nth).collect(), |seed| vec![seed]);
    for seed in seeds {
        eprintln!("GANTRY_SEED={seed}");
        let database = database().await;
        let mut world = World::start(&database.url, seed).await;
        Box::pin(world.greet(&[1])).await;
        for _ in 0..STEPS {
            if let Some(step) = world.next() {
                Box::pin(world.take(step)).await;
            }
        }
        Box::pin(world.come_to_rest()).await;
        assert!(world.killed > 0, "some are killed");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn all_is_as_the_model_says_sqlite() {
    all_is_as_the_model_says(async || testing::databases::sqlite()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn all_is_as_the_model_says_postgres() {
    all_is_as_the_model_says(testing::databases::postgres).await;
}
