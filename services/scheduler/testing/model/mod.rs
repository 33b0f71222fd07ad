//! The scheduler against a model: what there is after each operation, and what was answered, has to be what the model says.
//!
//! Operations are done one after the other by two replicas that do not hear of each other, on real databases and beside a real artifact store. Tokens
//! and sessions that are over are used as well as new ones, so messages are late, doubled and out of order. Up to every fourth operation is killed where it
//! waits, its replica with what it had in memory; whoever asked asks again, and in the end there must be what there is when it was done once. The
//! clock moves by minutes or by a day. What is done is drawn in spells: of all, where more is asked for than there is room for, where gateways speak,
//! where workers are lost, and where much fails. What only the scheduler can choose (which of the workers that would do, numbers of sessions) is looked
//! up, and judged: where nothing else is in the way, it has to be one of the best by the rules of placement, which are said once more for that.
//!
//! Gateways are told what they shall do on streams that stay open, each at one of the replicas, by what tells them everywhere
//! ([`crate::api`]'s Synchronize). What they say there may be late, doubled and out of order, and with it the generation that they echo.
//!
//! A call for leases that waits does not keep what comes after it: it stands in the queue of its replica until it is answered, which may be by any
//! later operation there, its caller goes, or its replica is killed.
//!
//! What is done at the same time is not here but in [`crate::testing::concurrent`], which knows less of what has to come of it.

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
use self::gateways::Attended;
use self::generator::{SPELLS, Spell};
use self::operations::{Answer, Call, Step};
use self::oracle::Came;
use self::replica::{Cluster, Replica};
use self::snapshot::{Calendar, look};
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
/// For how many steps they are drawn alike.
const SPELL: usize = 35;
/// How many seeds a test runs, unless `GANTRY_SEEDS` says how many.
const SEEDS: u64 = 4;

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
    /// Calls that had time to wait.
    patient: Vec<Call>,
    markers: BTreeMap<&'static str, Vec<MarkerId>>,
    /// The streams that are open, by their numbers.
    streams: BTreeMap<usize, Attended>,
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
    spell: Spell,
    /// How many calls were made.
    calls: usize,
    /// How many streams were opened.
    opened: usize,
    /// What is done next, if that is no matter of the dice.
    up_next: Option<Step>,
    /// How many had waited when they were granted something.
    waited: usize,
    /// How many leases ended for their gateway did not know them any more.
    unknown: usize,
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
        let config = Arc::new(fixtures::config(url, &store.endpoint()));
        let db = Database::connect::<crate::Schema>(url).await.expect("a database");
        let input = store.upload(fixtures::TEAM).await.expect("uploaded");
        let cluster = Cluster { db, config, signer, store: store.peer(), input };
        let replicas = (0..REPLICAS).map(|_| Replica::start(&cluster)).collect();
        let calendar = Calendar { began: Timestamp::now(), moved: 0 };
        let dice = StdRng::seed_from_u64(seed);
        let (model, known, history) = (State::default(), Known::default(), History::default());
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
            spell: Spell::Any,
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

    /// Does `step`, and compares what came of it with what should have.
    async fn take(&mut self, step: Step) {
        self.prepare(&step).await;
        let number = match &step {
            Step::GoAway { call } => self.model.replica_of(*call),
            Step::Say { stream, .. } => self.known.streams[stream].replica,
            Step::Place { call, .. } if let Some(there) = self.model.where_it_waits(call) => {
                if self.dice.random_bool(0.3) { there } else { (there + 1) % REPLICAS }
            }
            Step::Dispatch if let Some(there) = self.model.waits_for_what_is_there() => there,
            _ => self.dice.random_range(0..REPLICAS),
        };
        let is_killed = self.dice.random_bool(self.spell.kills());
        let killed = is_killed.then(|| self.dice.random_range(1..25));
        // Whoever asks for something may go as well.
        let comes_back = match step {
            Step::Submit { .. } | Step::Place { .. } => self.dice.random_bool(0.7),
            // The stream is gone.
            Step::Say { .. } => false,
            _ => true,
        };
        self.history.0.push(format!("{:?} by {number}, killed {killed:?}: {step:?}", self.now()));
        let mut answer = match killed {
            None => Some(Box::pin(self.replicas[number].carry_out(&step)).await),
            Some(moment) => killed_at(moment, Box::pin(self.replicas[number].carry_out(&step))).await,
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
                answer = Some(Box::pin(self.replicas[another].carry_out(&step)).await);
            }
        }
        if let Some(answer) = &answer {
            self.history.0.push(format!("    {:?} by {by:?}, and {:?}", answer.said, answer.others));
            let granted = answer.others.iter().filter(|(_, said)| said.iter().any(|said| said == "Ok"));
            self.waited += granted.count();
        }
        if let Step::Pass(minutes) = step {
            self.pass(minutes).await;
            answer.iter_mut().for_each(|answer| answer.waiting.clear());
        }
        let after = look(&self.cluster.db, self.calendar).await;
        let (known, now) = (&self.known, self.now());
        let live = |state: &State| state.leases.values().filter(|lease| lease.is_live()).count();
        if matches!(step, Step::Say { .. }) {
            self.unknown += live(&self.model) - live(&after);
        }
        self.model.expect(&step, &Came { answer: answer.as_ref(), by: &by, after: &after, known, now });
        compare(&self.model, &after);
        for (worker, generation) in &after.generations {
            let before = self.model.generations.get(worker);
            assert!(before <= Some(generation), "the generation of {worker} goes back from {before:?}");
        }
        self.model.generations = after.generations;
        if by.len() > 1 || answer.is_none() {
            self.known.streams.retain(|_, stream| stream.replica != number);
        }
        self.learn(&step, answer.as_ref(), by[by.len() - 1]).await;
        self.model.check_told(&self.known.streams, &self.model.generations);
    }

    /// What callers and gateways do elsewhere before.
    async fn prepare(&mut self, step: &Step) {
        match step {
            Step::Submit { id, .. } if fixtures::uses(*id) == Uses::Build => {
                let team = fixtures::asks_of_workload(*id).team;
                self.store.put_build(team, fixtures::build(*id), *id).await;
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

    /// What is used later on.
    async fn learn(&mut self, step: &Step, answer: Option<&Answer>, replica: usize) {
        let known = &mut self.known;
        known.sessions.extend(answer.and_then(|answer| answer.session.clone()));
        match (step, answer) {
            (Step::Attend { stream, .. }, Some(Answer { session: Some(session), .. })) => {
                let attended = Attended { replica, session: session.clone(), told: vec![], said: vec![] };
                known.streams.insert(*stream, attended);
            }
            (Step::Say { stream, said, .. }, Some(_)) => {
                known.streams.get_mut(stream).expect("it was open").said.push(said.clone());
            }
            _ => {}
        }
        for (number, heard) in answer.into_iter().flat_map(|answer| &answer.heard) {
            if heard.end.is_some() {
                known.streams.remove(number);
            } else if let Some(stream) = known.streams.get_mut(number) {
                stream.hear(heard);
            }
        }
        match step {
            Step::Submit { id, .. } => _ = known.submitted.insert(*id),
            Step::Place { call, .. } => {
                for ask in &call.asks {
                    known.near.entry(ask.0).or_insert(call.near);
                    if !known.driven.contains(ask) {
                        known.driven.push(*ask);
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

    /// A gateway of each worker says hello, or one after the other where one attends it, each for a worker that has begun anew.
    async fn greet(&mut self, instances: &[u128]) {
        for name in WORKERS {
            for instance in instances {
                let instance = generator::instance(*instance);
                let marker = MarkerId::new();
                self.known.markers.entry(name).or_default().push(marker);
                self.take(Step::Hello(Box::new(fixtures::hello(name, instance, marker, None)))).await;
            }
        }
    }

    /// Every worker may take work, and is spoken for on a stream.
    async fn gather(&mut self) {
        for name in WORKERS {
            self.take(Step::Run(name)).await;
            let known = self.model.workers.get(name);
            let instance = known.map_or(generator::instance(1), |one| one.instance);
            let marker = known.map_or_else(MarkerId::new, |one| one.marker);
            self.known.markers.entry(name).or_default().push(marker);
            self.opened += 1;
            let hello = Box::new(fixtures::hello(name, instance, marker, None));
            self.take(Step::Attend { stream: self.opened, hello }).await;
        }
    }

    /// Lets everything end, and finds nothing left.
    async fn come_to_rest(&mut self) {
        self.greet(&[1, 2]).await;
        self.take(Step::EndOrphans).await;
        for id in self.model.workloads.keys().copied().collect::<Vec<_>>() {
            let team = fixtures::asks_of_workload(id).team;
            self.take(Step::Cancel { id, grace: 0, team }).await;
        }
        for lease in self.model.leases.keys().copied().collect::<Vec<_>>() {
            self.take(Step::Release { lease, is_fresh: false }).await;
        }
        self.greet(&[1, 2]).await;
        self.take(Step::EndOrphans).await;
        self.take(Step::SeeOff).await;
        self.take(Step::Reconcile).await;
        let live = self.model.leases.values().filter(|lease| lease.state != LeaseState::Ended).count();
        assert_eq!(live, 0, "all have ended");
        let open = self.model.workloads.values().filter(|one| one.state != Progress::Finished).count();
        assert_eq!(open, 0, "all have finished");
        let (holders, _) = self.replicas[0].app.store.holders(String::new()).await.expect("listed");
        assert!(holders.is_empty(), "the store keeps something for {holders:?}");
        self.store.check_outputs(&self.known, &self.model).await;
    }
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
    let count = testing::seeds::setting("GANTRY_SEEDS").unwrap_or(SEEDS);
    let seeds = testing::seeds::repeated()
        .map_or_else(|| (0..count).map(testing::seeds::nth).collect(), |seed| vec![seed]);
    let (mut waited, mut unknown) = (0, 0);
    for seed in &seeds {
        let seed = *seed;
        eprintln!("GANTRY_SEED={seed}");
        let database = database().await;
        let mut world = World::start(&database.url, seed).await;
        Box::pin(world.greet(&[1])).await;
        for step in 0..STEPS {
            world.spell = SPELLS[step / SPELL % SPELLS.len()];
            if step % SPELL == 0 && world.spell == Spell::Spoken {
                Box::pin(world.gather()).await;
            }
            if let Some(step) = world.next() {
                Box::pin(world.take(step)).await;
            }
        }
        Box::pin(world.come_to_rest()).await;
        assert!(world.killed > 0, "some are killed");
        waited += world.waited;
        unknown += world.unknown;
    }
    assert!(waited > 0 || seeds.len() == 1, "some are granted what they waited for");
    assert!(unknown > 0 || seeds.len() == 1, "some leases end for their gateway does not know them");
}

#[tokio::test(flavor = "multi_thread")]
async fn all_is_as_the_model_says_sqlite() {
    all_is_as_the_model_says(async || testing::databases::sqlite()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn all_is_as_the_model_says_postgres() {
    all_is_as_the_model_says(testing::databases::postgres).await;
}
