//! A replica, which does one thing after the other, as its handlers and loops do it.

use std::collections::{BTreeMap, BTreeSet};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use db::Database;
use domain::worker::{LeaseClaims, SessionClaims};
use domain::workload::{Failure, PublishedOutput};
use domain::{ArtifactId, Digest, LeaseId, Timestamp, WorkerId};
use rpc::Peer;
use rpc::token::TokenSigner;
use sea_orm::{ColumnTrait, EntityTrait, QueryFilter};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::attempts::Report;
use super::fixtures::{self, Amounts};
use super::gateways::Observed;
use super::operations::{Answer, Call, Step};
use super::stream::{Heartbeat, Stream};
use crate::app::App;
use crate::config::Config;
use crate::context::Context;
use crate::db::entity::lease::{Kind, State};
use crate::db::entity::worker;
use crate::leases;
use crate::lifecycle::Lifecycle;
use crate::lifecycle::departure;
use crate::lifecycle::heartbeat_batches;
use crate::lifecycle::registration;
use crate::lifecycle::timeouts;
use crate::notify::Notifier;
use crate::notify::changes::Effects;
use crate::outbox;
use crate::placement::tests::reference;
use crate::placement::{Demand, Location, Process, Purpose, Resources, Shape};
use crate::scheduling::{Caller, Dispatcher, LeaseRequest, PlaceError, PlaceResult, Request};
use crate::store_client::delivery::{self, Delivery};
use crate::store_client::reconcile;
use crate::store_client::{Inputs, Store};
use crate::workers::{self, Registration, Usage};
use crate::workloads::operations;

/// What all replicas have in common.
#[derive(Clone)]
pub(super) struct Cluster {
    pub(super) db: Database,
    pub(super) config: Arc<Config>,
    pub(super) signer: TokenSigner,
    pub(super) store: Peer,
    /// What some workloads and leases use.
    pub(super) input: ArtifactId,
}

/// A replica of the scheduler, none of whose loops runs by itself.
pub(super) struct Replica {
    pub(super) app: App,
    pub(super) dispatcher: Dispatcher,
    cluster: Cluster,
    /// Whose callers wait.
    calls: Vec<Waiting>,
    /// Of gateways, by their numbers.
    streams: BTreeMap<usize, Stream>,
    /// Writes down who was heard.
    notes: Pin<Box<dyn Future<Output = ()> + Send>>,
}

/// A call that is not answered yet.
struct Waiting {
    number: usize,
    lease: LeaseId,
    answer: Pin<Box<dyn Future<Output = Vec<PlaceResult>> + Send>>,
}

impl Replica {
    pub(super) fn start(cluster: &Cluster) -> Self {
        let (dispatch, dispatcher) = Dispatcher::new(cluster.db.clone(), cluster.config.clone());
        let (heartbeats, heard) = heartbeat_batches::channel();
        let (registrations, _) = registration::channel();
        // What is put into the outbox stays there: no task delivers it.
        let (notify, _) = Notifier::new(dispatch.workers.desired.clone(), None);
        let context = Context {
            db: cluster.db.clone(),
            config: cluster.config.clone(),
            notify,
            tasks: TaskTracker::new(),
            stopping: CancellationToken::new(),
        };
        let lifecycle = Lifecycle::new(context.clone(), Store::new(cluster.store.clone()));
        let app = App::new(lifecycle, cluster.signer.clone(), dispatch, heartbeats, registrations);
        let notes = Box::pin(heartbeat_batches::write_forever(context, heard));
        let (calls, streams) = (vec![], BTreeMap::new());
        Self { app, dispatcher, cluster: cluster.clone(), calls, streams, notes }
    }

    /// It is killed: nothing of it goes on.
    pub(super) async fn kill(&mut self) {
        self.app.context.stopping.cancel();
        self.streams.clear();
        // What it was writing is not written.
        self.notes = Box::pin(std::future::pending());
        self.app.context.tasks.close();
        self.app.context.tasks.wait().await;
    }

    /// Lets a gateway in on a stream.
    async fn attend(&mut self, number: usize, hello: &Registration) -> Answer {
        let (registrations, asked) = registration::channel();
        let app = App { registrations, ..self.app.clone() };
        let hello = fixtures::hello_on_stream(hello, &self.cluster.signer);
        let (stream, heard) = tokio::select! {
            biased;
            opened = Stream::open(app.clone(), hello) => opened,
            () = registration::register_forever(app.lifecycle.clone(), asked) => panic!("it is not stopped"),
        };
        // As whoever lets in does it afterwards.
        app.lifecycle.end_orphans().await.expect("the database answers");
        let session = stream.session.clone();
        let said = heard.end.unwrap_or("Ok").to_owned();
        if heard.end.is_none() {
            self.streams.insert(number, stream);
        }
        Answer { session, heard: [(number, heard)].into(), ..Answer::said(vec![said]) }
    }

    /// A gateway says what is.
    async fn say(&mut self, number: usize, said: &Observed) -> Answer {
        let stream = self.streams.get_mut(&number).expect("it is open");
        let mut heard = Heartbeat::default();
        tokio::select! {
            biased;
            () = stream.say(said, &mut heard) => {}
            () = &mut self.notes => panic!("it is not stopped"),
        };
        stream.hear(&mut heard, &self.app.context.notify.desired).await;
        let answer = heard.end.unwrap_or("Ok").to_owned();
        Answer { heard: [(number, heard)].into(), ..Answer::said(vec![answer]) }
    }

    /// Gateways hear all that this replica knows by now.
    async fn tell_all(&mut self, answer: &mut Answer) {
        for (number, stream) in &mut self.streams {
            stream.hear(answer.heard.entry(*number).or_default(), &self.app.context.notify.desired).await;
        }
        self.streams.retain(|number, _| answer.heard[number].end.is_none());
    }

    /// Does what the dispatcher is asked for meanwhile.
    async fn answered<T>(&mut self, call: impl Future<Output = T>) -> T {
        let mut call = pin!(call);
        loop {
            let asked = tokio::select! {
                biased;
                answer = &mut call => return answer,
                asked = self.dispatcher.next_asked() => asked,
            };
            self.rounds(asked).await;
        }
    }

    async fn rounds(&mut self, mut asked: Vec<Request>) {
        while !asked.is_empty() {
            if asked.iter().any(|request| matches!(request, Request::CatchUp(_))) {
                self.look(false).await;
            }
            let caller = Caller { now: &Timestamp::now, nothing_is_before: &|| true, tell: &drop };
            asked = self.dispatcher.rounds(asked, &caller).await;
        }
    }

    /// Does what the dispatcher is asked for until a call is answered, or stands in the queue and nothing is left to do: then it is given back.
    async fn answered_or_waits(&mut self, mut call: Waiting) -> Result<Vec<PlaceResult>, Waiting> {
        loop {
            let waits = self.dispatcher.waits(call.lease);
            // However much was done in this step already: what is there is taken.
            let asked = tokio::task::coop::unconstrained(async {
                tokio::select! {
                    biased;
                    placed = &mut call.answer => Some(Err(placed)),
                    asked = self.dispatcher.next_asked() => Some(Ok(asked)),
                    () = std::future::ready(()), if waits => None,
                }
            });
            match asked.await {
                Some(Ok(asked)) => self.rounds(asked).await,
                Some(Err(placed)) => return Ok(placed),
                None => return Err(call),
            }
        }
    }

    /// Answers those who need not wait any more. What one of them does then may be for another.
    async fn answer_waiting(&mut self, answer: &mut Answer) {
        loop {
            let answered = answer.others.len();
            for call in std::mem::take(&mut self.calls) {
                let number = call.number;
                match self.answered_or_waits(call).await {
                    Ok(placed) => answer.others.push((number, Answer::of(placed).said)),
                    Err(call) => self.calls.push(call),
                }
            }
            if answer.others.len() == answered {
                answer.waiting = self.calls.iter().map(|call| call.number).collect();
                return;
            }
        }
    }

    /// Looks at what others have changed.
    async fn look(&mut self, tell: bool) {
        self.dispatcher.catch_up(tell, &mut Effects::default()).await.expect("the database answers");
    }

    pub(super) async fn carry_out(&mut self, step: &Step) -> Answer {
        let mut answer = self.carry_out_alone(step).await;
        self.answer_waiting(&mut answer).await;
        self.tell_all(&mut answer).await;
        answer
    }

    async fn carry_out_alone(&mut self, step: &Step) -> Answer {
        let app = self.app.clone();
        let (db, config, now) = (&app.context.db, &app.context.config, Timestamp::now());
        match step {
            Step::Hello(hello) => {
                let let_in = db
                    .write(async |txn| {
                        workers::register(&txn, &[hello], config, now, &mut Effects::default()).await
                    })
                    .await;
                let mut let_in = let_in.expect("the database answers");
                let session = let_in.remove(0);
                Answer { session: session.as_ref().ok().cloned(), ..Answer::of([session]) }
            }
            Step::Misfit(hello) => Answer::of([app.lifecycle.list_incompatible(hello, &[99]).await]),
            Step::Attend { stream, hello } => self.attend(*stream, hello).await,
            Step::Say { stream, said, is_fresh } => {
                if *is_fresh {
                    self.look(true).await;
                }
                self.say(*stream, said).await
            }
            Step::Goodbye { session, is_last } => {
                let contact = if *is_last { self.last_contact(session).await } else { Timestamp(1) };
                let left = db
                    .write(async |txn| workers::leave(&txn, session, contact, &mut Effects::default()).await);
                Answer::of([left.await])
            }
            Step::Heard(session) => {
                let heard =
                    [workers::Heartbeat { session: session.clone(), kept: Usage::default(), at: now }];
                let judged = db.write(async |txn| workers::observe(&txn, &heard).await).await;
                let judged = judged.expect("the database answers");
                if judged[0].is_ok() {
                    let sessions = [session.clone()];
                    let back = db.write(async |txn| {
                        workers::come_back(&txn, &sessions, &mut Effects::default()).await
                    });
                    back.await.expect("the database answers");
                }
                Answer::of(judged)
            }
            Step::Pass(_) => Answer::ok(),
            Step::BePatient => Answer::of([timeouts::extend_terms(db, config, false).await]),
            Step::Expire => Answer::of([timeouts::expire(&app.lifecycle).await]),
            Step::Down { name, down, interrupt_after } => {
                let after =
                    interrupt_after.map(|minutes| super::MINUTE * u32::try_from(minutes).expect("few"));
                Answer::of([app.lifecycle.withdraw_worker(name, *down, after).await])
            }
            Step::Run(name) => Answer::of([app.lifecycle.run_worker(name).await]),
            Step::Prune(name) => {
                let pruned =
                    db.write(async |txn| departure::prune(&txn, name, &mut Effects::default()).await).await;
                Answer::of([pruned])
            }
            Step::SeeOff => {
                // What one pass has ended is gone with the next.
                for _ in 0..4 {
                    let seen_off =
                        departure::depart_all(&app.lifecycle, &mut departure::LastAsked::new()).await;
                    seen_off.expect("the database answers");
                }
                Answer::ok()
            }
            Step::EndOrphans => Answer::of([app.lifecycle.end_orphans().await]),
            Step::Submit { id, other, is_fresh } => {
                if *is_fresh {
                    self.look(true).await;
                }
                let spec = fixtures::spec(*id, self.cluster.input, *other);
                let submitted = self.answered(app.submissions.submit(*id, spec, None)).await;
                Answer::of([submitted])
            }
            Step::Place { call, is_fresh } => {
                if *is_fresh {
                    self.look(true).await;
                }
                let best = match &call.asks[..] {
                    [(lease, kind)] if *is_fresh => self.best(*lease, *kind, call).await,
                    _ => None,
                };
                Answer { best, ..self.place(call).await }
            }
            Step::GoAway { call } => {
                self.calls.retain(|known| known.number != *call);
                Answer::ok()
            }
            Step::EndPatience { minutes, looks } => {
                let minutes = u32::try_from(*minutes).expect("few");
                self.dispatcher.end_patience(Instant::now() + minutes * super::MINUTE, *looks);
                Answer::ok()
            }
            Step::Renew(lease) => {
                let term = config.lease_term;
                Answer::of([db.write(async |txn| leases::renew(&txn, *lease, now, term).await).await])
            }
            Step::Release { lease, is_fresh } => {
                if *is_fresh {
                    self.look(true).await;
                }
                let (lease, worker) = (*lease, leases::find(db.read(), *lease).await.expect("it answers"));
                let worker = worker.map_or_else(WorkerId::new, |lease| WorkerId::from_uuid(lease.worker_id));
                let released = app.dispatch.clone();
                let released = released.ask(move |answer| Request::Release(vec![(lease, worker)], answer));
                Answer::of([self.answered(released).await.expect("it was not killed")])
            }
            Step::Dispatch => {
                self.look(true).await;
                let placed = self.dispatcher.take_turns(now, &mut Effects::default()).await;
                self.dispatcher.end_patience(Instant::now(), true);
                self.dispatcher.refuse_hopeless();
                Answer::of([placed])
            }
            Step::Start(claims) => Answer::of([operations::start_attempt(&app.context, claims).await]),
            Step::Finish { claims, report } => {
                Answer::of([operations::finish_attempt(&app.context, claims, &told(claims, *report)).await])
            }
            Step::Observe { claims, phase } => {
                let lease = leases::find(db.read(), claims.lease).await.expect("the database answers");
                match lease {
                    Some(lease) => {
                        Answer::of([operations::observe_phases(&app.context, &[(lease, *phase)]).await])
                    }
                    None => Answer::ok(),
                }
            }
            Step::Absent(claims) => {
                let lease = leases::find(db.read(), claims.lease).await.expect("the database answers");
                match lease {
                    Some(lease) => Answer::of([operations::observe_absence(&app.context, &lease).await]),
                    None => Answer::ok(),
                }
            }
            Step::Cancel { id, grace, team } => {
                let grace = Duration::from_secs(u64::try_from(*grace).expect("no less than nothing"));
                Answer::of([operations::cancel(&app.context, team, *id, grace).await])
            }
            Step::Deliver => {
                self.deliver().await;
                Answer::ok()
            }
            Step::Reconcile => {
                reconcile::tidy(&app.context).await.expect("the database answers");
                reconcile::compare(&app.context, &app.store).await.expect("the store answers");
                self.deliver().await;
                Answer::ok()
            }
        }
    }

    async fn last_contact(&self, session: &SessionClaims) -> Timestamp {
        let worker = session.worker.to_string();
        let known = workers::get(self.app.context.db.read(), &self.app.context.config, &worker).await;
        known.expect("the database answers").map_or(Timestamp(1), |worker| worker.last_contact_at)
    }

    /// Tells the artifact store all that it is owed, as the loop of a replica does that was just started.
    async fn deliver(&self) {
        let Context { db, .. } = &self.app.context;
        let delivery = Delivery::new(self.app.context.clone(), self.app.store.clone());
        let now = Timestamp::now();
        db.write(async |txn| outbox::release_claims(&txn, now).await).await.expect("the database answers");
        loop {
            let due = db.write(async |txn| outbox::claim(&txn, now).await).await;
            let due = due.expect("the database answers");
            if due.is_empty() {
                return;
            }
            for parcel in due {
                delivery::deliver(delivery.clone(), parcel).await;
            }
        }
    }

    /// As the handler does it.
    async fn place(&mut self, call: &Call) -> Answer {
        let mut asks = Vec::with_capacity(call.asks.len());
        for (id, kind) in &call.asks {
            match self.ask(*id, *kind, call).await {
                Ok(ask) => asks.push(ask),
                Err(error) => return Answer::of::<(), _>([Err(error)]),
            }
        }
        let (app, lease) = (self.app.clone(), call.asks[0].0);
        let placed = Box::pin(async move { app.leasing.place(asks).await });
        match self.answered_or_waits(Waiting { number: call.number, lease, answer: placed }).await {
            Ok(placed) => Answer::of(placed),
            Err(waiting) => {
                self.calls.push(waiting);
                Answer::said(vec!["Waits".to_owned()])
            }
        }
    }

    /// Who is best for it, as the rules of placement are said once more. `None`: another rule says where it may be.
    async fn best(&self, lease: LeaseId, kind: Kind, call: &Call) -> Option<BTreeSet<WorkerId>> {
        let ask = self.ask(lease, kind, call).await.ok()?;
        if ask.kept_to.is_some() {
            return None;
        }
        let app = &self.app;
        let workers = workers::list(app.context.db.read(), &app.context.config, None, 1000).await;
        let workers = workers.expect("the database answers").into_iter().map(|worker| worker.placed);
        let chain = app.context.config.chains.of(ask.demand.shape.purpose);
        let willing = workers.filter(|worker| reference::against(&ask.demand, worker).is_nothing());
        let standing = |worker: &_| reference::standing(chain, &ask.demand, worker, &ask.locations);
        let standing: Vec<_> = willing.map(|worker| (standing(&worker), worker.id)).collect();
        let (best, _) = standing.iter().min()?;
        Some(standing.iter().filter(|(standing, _)| standing == best).map(|(_, id)| *id).collect())
    }

    /// The ids of the workers of these names that there are.
    async fn named(&self, names: &[&str]) -> Result<impl Iterator<Item = WorkerId>, PlaceError> {
        let rows = worker::Entity::find().filter(worker::Column::Name.is_in(names.iter().copied()));
        let rows = rows.all(self.app.context.db.read()).await?;
        Ok(rows.into_iter().map(|row| WorkerId::from_uuid(row.id)))
    }

    /// What the handler makes of a request.
    async fn ask(&self, lease: LeaseId, kind: Kind, call: &Call) -> Result<LeaseRequest, PlaceError> {
        let Call { together, near, wait, .. } = *call;
        let db = self.app.context.db.read();
        let asks = fixtures::asks_of_lease(lease, kind);
        let owned = |words: &[&str]| words.iter().map(|&word| word.to_owned()).collect();
        let process = Process::default();
        let shape = Shape {
            team: asks.team.to_owned(),
            platform: asks.platform.to_owned(),
            tags: owned(asks.tags),
            process: asks.takes_a_slot.then_some(process),
            requests: {
                let Amounts { cpu_millis, memory_bytes, disk_bytes } = asks.amounts;
                Resources { cpu_millis, memory_bytes, disk_bytes }
            },
            purpose: Purpose::of(kind, asks.has_inputs),
        };
        let prefer = self.named(fixtures::preferred_by_lease(lease)).await?.collect();
        let mut locations = Vec::new();
        for (size_bytes, workers) in fixtures::inputs_of_lease(lease) {
            locations.push(Location { size_bytes, workers: self.named(workers).await?.collect() });
        }
        let mut inputs = Inputs::default();
        if fixtures::lease_has_input(lease) {
            inputs.artifacts.insert(self.cluster.input);
        }
        let only = match near {
            None => None,
            Some(near) => match leases::find(db, near).await? {
                Some(near) if near.state != State::Ended && near.team == asks.team => {
                    Some(WorkerId::from_uuid(near.worker_id))
                }
                _ => return Err(PlaceError::NoSuchLease),
            },
        };
        let owner = if near.is_some() { "" } else { fixtures::owner_of_lease(lease) };
        let kept_to = leases::worker_of_owner(db, asks.team, owner).await?;
        Ok(LeaseRequest {
            lease,
            kind,
            demand: Arc::new(Demand { only, prefer, ..shape.asked_by(lease.uuid()) }),
            locations: locations.into(),
            request: format!("{near:?}"),
            group: together.then_some(1),
            inputs: Arc::new(inputs),
            owner: owner.to_owned(),
            kept_to,
            wait: super::MINUTE * u32::try_from(wait).expect("few"),
            priority: fixtures::priority_of_lease(lease),
        })
    }
}

/// What the gateway says of the attempt under `claims`.
fn told(claims: &LeaseClaims, report: Report) -> crate::outcome::Report {
    let output = claims.attempt.filter(|_| report.has_outputs).map(|(workload, attempt)| PublishedOutput {
        name: "out".to_owned(),
        artifact: workload.output_artifact("out"),
        size_bytes: 1,
        digest: Digest(super::digest(attempt)),
        entries: 1,
    });
    crate::outcome::Report {
        exit: report.exit,
        failure: report.failure.map(|reason| Failure { reason, message: "no".to_owned() }),
        outputs: output.into_iter().collect(),
        ..crate::outcome::Report::default()
    }
}
