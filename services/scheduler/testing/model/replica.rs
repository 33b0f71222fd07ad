//! A replica that takes one step at a time, with the code of its handlers and loops.

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
use super::gateways::SentReport;
use super::operations::{Answer, Call, Step};
use super::stream::{Stream, StreamOutput};
use crate::app::App;
use crate::config::Config;
use crate::context::Context;
use crate::db::entity::lease::{Kind, State};
use crate::db::entity::worker;
use crate::image_references::ImageReferences;
use crate::leases::{self, UseError};
use crate::lifecycle::Lifecycle;
use crate::lifecycle::departure;
use crate::lifecycle::heartbeat_batches;
use crate::lifecycle::registration;
use crate::lifecycle::timeouts;
use crate::notify::Notifier;
use crate::notify::changes::Effects;
use crate::outbox;
use crate::placement::tests::reference;
use crate::placement::{Demand, Location, OnlyWorker, Process, Purpose, Resources, Shape};
use crate::poll::PollTicks;
use crate::scheduling::{Dispatcher, LeaseRequest, PlaceError, PlaceResult, Request, RoundContext};
use crate::store_client::delivery::{self, Delivery};
use crate::store_client::reconcile;
use crate::store_client::{Inputs, Store};
use crate::workers::{self, Registration, Usage};
use crate::workloads::operations;

/// The shared parts of all replicas.
#[derive(Clone)]
pub(super) struct Cluster {
    pub(super) db: Database,
    pub(super) config: Arc<Config>,
    pub(super) signer: TokenSigner,
    pub(super) store: Peer,
    /// The artifact that some workloads and leases use.
    pub(super) input: ArtifactId,
}

/// A replica without running loops.
pub(super) struct Replica {
    pub(super) app: App,
    pub(super) dispatcher: Dispatcher,
    cluster: Cluster,
    /// Waiting calls.
    calls: Vec<PendingCall>,
    /// Streams of gateways, by number.
    streams: BTreeMap<usize, Stream>,
    /// The loop that writes heartbeats.
    notes: Pin<Box<dyn Future<Output = ()> + Send>>,
}

/// A call that is not answered yet.
struct PendingCall {
    number: usize,
    lease: LeaseId,
    answer: Pin<Box<dyn Future<Output = Vec<PlaceResult>> + Send>>,
}

impl Replica {
    pub(super) fn start(cluster: &Cluster) -> Self {
        let (dispatch, dispatcher) = Dispatcher::new(cluster.db.clone(), cluster.config.clone());
        let (heartbeats, receiver) = heartbeat_batches::channel();
        let (registrations, _) = registration::channel();
        // No task delivers parcels, so they stay in the outbox.
        let (notify, _) = Notifier::new(dispatch.workers.desired.clone(), None);
        let context = Context {
            db: cluster.db.clone(),
            config: cluster.config.clone(),
            ticks: PollTicks::start(&cluster.config, false),
            notify,
            tasks: TaskTracker::new(),
            stopping: CancellationToken::new(),
        };
        let lifecycle = Lifecycle::new(context.clone(), Store::new(cluster.store.clone()));
        let app = App::new(
            lifecycle,
            cluster.signer.clone(),
            ImageReferences::new(None),
            dispatch,
            heartbeats,
            registrations,
        );
        let notes = Box::pin(heartbeat_batches::write_forever(context, receiver));
        let (calls, streams) = (vec![], BTreeMap::new());
        Self { app, dispatcher, cluster: cluster.clone(), calls, streams, notes }
    }

    /// Kills the replica: nothing of it continues.
    pub(super) async fn kill(&mut self) {
        self.app.context.stopping.cancel();
        self.streams.clear();
        // Pending writes are lost.
        self.notes = Box::pin(std::future::pending());
        self.app.context.tasks.close();
        self.app.context.tasks.wait().await;
    }

    /// Registers a gateway on a stream.
    async fn attend(&mut self, number: usize, registration: &Registration) -> Answer {
        let (registrations, receiver) = registration::channel();
        let app = App { registrations, ..self.app.clone() };
        let registration = fixtures::registration_on_stream(registration, &self.cluster.signer);
        let (stream, output) = tokio::select! {
            biased;
            opened = Stream::open(app.clone(), registration) => opened,
            () = registration::register_forever(app.lifecycle.clone(), receiver) => panic!("the loop does not end"),
        };
        // The registering task does this after each batch.
        app.lifecycle.end_stranded_leases().await.expect("the database answers");
        let session = stream.session.clone();
        let result = output.end.unwrap_or("Ok").to_owned();
        if output.end.is_none() {
            self.streams.insert(number, stream);
        }
        Answer { session, received_on_streams: [(number, output)].into(), ..Answer::new(vec![result]) }
    }

    /// Sends a report of a gateway.
    async fn send_report(&mut self, number: usize, report: &SentReport) -> Answer {
        let stream = self.streams.get_mut(&number).expect("an open stream");
        let mut output = StreamOutput::default();
        tokio::select! {
            biased;
            () = stream.send_report(report, &mut output) => {}
            () = &mut self.notes => panic!("the loop does not end"),
        };
        stream.receive(&mut output, &self.app.context.notify.desired).await;
        let answer = output.end.unwrap_or("Ok").to_owned();
        Answer { received_on_streams: [(number, output)].into(), ..Answer::new(vec![answer]) }
    }

    /// Delivers all known desired states to the gateways.
    async fn deliver_all(&mut self, answer: &mut Answer) {
        for (number, stream) in &mut self.streams {
            stream
                .receive(
                    answer.received_on_streams.entry(*number).or_default(),
                    &self.app.context.notify.desired,
                )
                .await;
        }
        self.streams.retain(|number, _| answer.received_on_streams[number].end.is_none());
    }

    /// Serves requests to the dispatcher until a call is answered.
    async fn serve_until_answered<T>(&mut self, call: impl Future<Output = T>) -> T {
        let mut call = pin!(call);
        loop {
            let requests = tokio::select! {
                biased;
                answer = &mut call => return answer,
                requests = self.dispatcher.next_requests() => requests,
            };
            self.rounds(requests).await;
        }
    }

    async fn rounds(&mut self, mut requests: Vec<Request>) {
        while !requests.is_empty() {
            if requests.iter().any(|request| matches!(request, Request::CatchUp(_))) {
                self.poll(false).await;
            }
            let caller = RoundContext { now: &Timestamp::now, nothing_is_before: &|| true, announce: &drop };
            requests = self.dispatcher.rounds(requests, &caller).await;
        }
    }

    /// Serves requests to the dispatcher until a call is answered, or waits and nothing is left to
    /// do.
    async fn serve_until_answered_or_waiting(
        &mut self,
        mut call: PendingCall,
    ) -> Result<Vec<PlaceResult>, PendingCall> {
        loop {
            let waits = self.dispatcher.waits(call.lease);
            // Without a cooperative budget, so that ready results are not missed.
            let requests = tokio::task::coop::unconstrained(async {
                tokio::select! {
                    biased;
                    placed = &mut call.answer => Some(Err(placed)),
                    requests = self.dispatcher.next_requests() => Some(Ok(requests)),
                    () = std::future::ready(()), if waits => None,
                }
            });
            match requests.await {
                Some(Ok(requests)) => self.rounds(requests).await,
                Some(Err(placed)) => return Ok(placed),
                None => return Err(call),
            }
        }
    }

    /// Answers calls that no longer wait. The answer to one may lead to the answer to another.
    async fn answer_waiting(&mut self, answer: &mut Answer) {
        loop {
            let answered = answer.others.len();
            for call in std::mem::take(&mut self.calls) {
                let number = call.number;
                match self.serve_until_answered_or_waiting(call).await {
                    Ok(placed) => answer.others.push((number, Answer::of(placed).results)),
                    Err(call) => self.calls.push(call),
                }
            }
            if answer.others.len() == answered {
                answer.waiting = self.calls.iter().map(|call| call.number).collect();
                return;
            }
        }
    }

    /// Polls the database.
    async fn poll(&mut self, tell: bool) {
        self.dispatcher.catch_up(tell, &mut Effects::default()).await.expect("the database answers");
    }

    pub(super) async fn execute(&mut self, step: &Step) -> Answer {
        let mut answer = self.execute_alone(step).await;
        self.answer_waiting(&mut answer).await;
        self.deliver_all(&mut answer).await;
        answer
    }

    async fn execute_alone(&mut self, step: &Step) -> Answer {
        let app = self.app.clone();
        let (db, config, now) = (&app.context.db, &app.context.config, Timestamp::now());
        match step {
            Step::Registration(registration) => {
                let sessions = db
                    .write(async |txn| {
                        workers::register(&txn, &[registration], config, now, &mut Effects::default()).await
                    })
                    .await;
                let mut sessions = sessions.expect("the database answers");
                let session = sessions.remove(0);
                Answer { session: session.as_ref().ok().cloned(), ..Answer::of([session]) }
            }
            Step::Misfit(registration) => {
                Answer::of([app.lifecycle.list_incompatible(registration, &[99]).await])
            }
            Step::Attend { stream, registration } => self.attend(*stream, registration).await,
            Step::SendReport { stream, report, is_fresh } => {
                if *is_fresh {
                    self.poll(true).await;
                }
                self.send_report(*stream, report).await
            }
            Step::SignOff { session, is_last } => {
                let contact = if *is_last { self.last_contact(session).await } else { Timestamp(1) };
                let left = db.write(async |txn| {
                    workers::sign_off(&txn, session, contact, &mut Effects::default()).await
                });
                Answer::of([left.await])
            }
            Step::Heard(session) => {
                let heartbeats =
                    [workers::Heartbeat { session: session.clone(), kept: Usage::default(), at: now }];
                let results = db.write(async |txn| workers::record_heartbeats(&txn, &heartbeats).await).await;
                let results = results.expect("the database answers");
                if results[0].is_ok() {
                    let sessions = [session.clone()];
                    let back = db.write(async |txn| {
                        workers::mark_running(&txn, &sessions, &mut Effects::default()).await
                    });
                    back.await.expect("the database answers");
                }
                Answer::of(results)
            }
            Step::Pass(_) => Answer::ok(),
            Step::ExtendTerms => Answer::of([timeouts::extend_terms(db, config, false).await]),
            Step::Expire => Answer::of([timeouts::expire(&app.lifecycle).await]),
            Step::Down { name, down, interrupt_after } => {
                let after =
                    interrupt_after.map(|minutes| super::MINUTE * u32::try_from(minutes).expect("few"));
                Answer::of([app.lifecycle.withdraw_worker(name, *down, after).await])
            }
            Step::Run(name) => Answer::of([app.lifecycle.uncordon_worker(name).await]),
            Step::Prune(name) => {
                let pruned =
                    db.write(async |txn| departure::prune(&txn, name, &mut Effects::default()).await).await;
                Answer::of([pruned])
            }
            Step::Depart => {
                // A worker whose leases one pass ends is removed by the next pass.
                for _ in 0..4 {
                    let seen_off =
                        departure::depart_all(&app.lifecycle, &mut departure::LastChecks::new()).await;
                    seen_off.expect("the database answers");
                }
                Answer::ok()
            }
            Step::EndStranded => Answer::of([app.lifecycle.end_stranded_leases().await]),
            Step::Submit { id, other, is_fresh } => {
                if *is_fresh {
                    self.poll(true).await;
                }
                let spec = fixtures::spec(*id, self.cluster.input, *other);
                let submitted = self.serve_until_answered(app.submissions.submit(*id, spec, None)).await;
                Answer::of([submitted])
            }
            Step::Place { call, is_fresh } => {
                if *is_fresh {
                    self.poll(true).await;
                }
                let best = match &call.items[..] {
                    [(lease, kind)] if *is_fresh => self.best(*lease, *kind, call).await,
                    _ => None,
                };
                Answer { best, ..self.place(call).await }
            }
            Step::Disconnect { call } => {
                self.calls.retain(|known| known.number != *call);
                Answer::ok()
            }
            Step::EndWaits { minutes, looks } => {
                let minutes = u32::try_from(*minutes).expect("few");
                self.dispatcher.end_waits(Instant::now() + minutes * super::MINUTE, *looks);
                Answer::ok()
            }
            Step::Renew(lease) => {
                let term = config.lease_term;
                Answer::of([db.write(async |txn| leases::renew(&txn, *lease, now, term).await).await])
            }
            Step::Use(lease) => {
                let row = leases::find(db.read(), *lease).await.expect("the database answers");
                match row {
                    Some(row) => Answer::of([app.leasing.use_lease(&leases::claims(&row)).await]),
                    None => Answer::of::<(), _>([Err(UseError::Lost)]),
                }
            }
            Step::Release { lease, is_fresh } => {
                if *is_fresh {
                    self.poll(true).await;
                }
                let (lease, worker) =
                    (*lease, leases::find(db.read(), *lease).await.expect("the database answers"));
                let worker = worker.map_or_else(WorkerId::new, |lease| WorkerId::from_uuid(lease.worker_id));
                let released = app.dispatch.clone();
                let released = released.call(move |answer| Request::Release(vec![(lease, worker)], answer));
                Answer::of([self.serve_until_answered(released).await.expect("the dispatcher answers")])
            }
            Step::Dispatch => {
                self.poll(true).await;
                let placed = self.dispatcher.run_queue_pass(now, &mut Effects::default()).await;
                self.dispatcher.end_waits(Instant::now(), true);
                self.dispatcher.refuse_hopeless();
                Answer::of([placed])
            }
            Step::Start(claims) => Answer::of([operations::start_attempt(&app.context, claims).await]),
            Step::Finish { claims, report } => Answer::of([operations::finish_attempt(
                &app.context,
                claims,
                &outcome_report(claims, *report),
            )
            .await]),
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
                let grace = Duration::from_secs(u64::try_from(*grace).expect("a positive number"));
                Answer::of([operations::cancel(&app.context, team, *id, grace).await])
            }
            Step::Deliver => {
                self.deliver().await;
                Answer::ok()
            }
            Step::Reconcile => {
                reconcile::clean_up(&app.context).await.expect("the database answers");
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

    /// Delivers all parcels, like the loop of a replica that just started.
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

    /// Places leases like the handler does.
    async fn place(&mut self, call: &Call) -> Answer {
        let mut requests = Vec::with_capacity(call.items.len());
        for (id, kind) in &call.items {
            match self.lease_request(*id, *kind, call).await {
                Ok(request) => requests.push(request),
                Err(error) => return Answer::of::<(), _>([Err(error)]),
            }
        }
        let (app, lease) = (self.app.clone(), call.items[0].0);
        let placed = Box::pin(async move { app.leasing.place(requests).await });
        match self
            .serve_until_answered_or_waiting(PendingCall { number: call.number, lease, answer: placed })
            .await
        {
            Ok(placed) => Answer::of(placed),
            Err(waiting) => {
                self.calls.push(waiting);
                Answer::new(vec!["Waits".to_owned()])
            }
        }
    }

    /// Returns the best workers by the reference implementation. `None`: other rules decide.
    async fn best(&self, lease: LeaseId, kind: Kind, call: &Call) -> Option<BTreeSet<WorkerId>> {
        let request = self.lease_request(lease, kind, call).await.ok()?;
        if request.owner_worker.is_some() {
            return None;
        }
        let app = &self.app;
        let workers = workers::list(app.context.db.read(), &app.context.config, None, 1000).await;
        let workers = workers.expect("the database answers").into_iter().map(|worker| worker.placed);
        let chain = app.context.config.chains.of(request.demand.shape.purpose);
        let willing = workers.filter(|worker| reference::against(&request.demand, worker).is_nothing());
        let rank = |worker: &_| reference::rank(chain, &request.demand, worker, &request.locations);
        let ranks: Vec<_> = willing.map(|worker| (rank(&worker), worker.id)).collect();
        let (best, _) = ranks.iter().min()?;
        Some(ranks.iter().filter(|(rank, _)| rank == best).map(|(_, id)| *id).collect())
    }

    /// Returns the ids of the existing workers with these names.
    async fn named(&self, names: &[&str]) -> Result<impl Iterator<Item = WorkerId>, PlaceError> {
        let rows = worker::Entity::find().filter(worker::Column::Name.is_in(names.iter().copied()));
        let rows = rows.all(self.app.context.db.read()).await?;
        Ok(rows.into_iter().map(|row| WorkerId::from_uuid(row.id)))
    }

    /// Builds the request like the handler does.
    async fn lease_request(
        &self,
        lease: LeaseId,
        kind: Kind,
        call: &Call,
    ) -> Result<LeaseRequest, PlaceError> {
        let Call { together, near, wait, .. } = *call;
        let db = self.app.context.db.read();
        let requirements = fixtures::requirements_of_lease(lease, kind);
        let owned = |words: &[&str]| words.iter().map(|&word| word.to_owned()).collect();
        let process = Process::default();
        let shape = Shape {
            team: requirements.team.to_owned(),
            platform: requirements.platform.to_owned(),
            tags: owned(requirements.tags),
            process: requirements.takes_a_slot.then_some(process),
            requests: {
                let Amounts { cpu_millis, memory_bytes, disk_bytes } = requirements.amounts;
                Resources { cpu_millis, memory_bytes, disk_bytes }
            },
            purpose: Purpose::of(kind, requirements.has_inputs),
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
                Some(near) if near.state != State::Ended && near.team == requirements.team => {
                    Some(OnlyWorker::tied(WorkerId::from_uuid(near.worker_id)))
                }
                _ => return Err(PlaceError::NoSuchLease),
            },
        };
        let owner = if near.is_some() { "" } else { fixtures::owner_of_lease(lease) };
        let owner_worker = leases::worker_of_owner(db, requirements.team, owner).await?;
        Ok(LeaseRequest {
            lease,
            demand: Arc::new(Demand { kind, only, prefer, ..shape.requested_by(lease.uuid()) }),
            locations: locations.into(),
            request: near.map(|near| near.to_string()).unwrap_or_default(),
            group: together.then_some(1),
            inputs: Arc::new(inputs),
            owner: owner.to_owned(),
            owner_worker,
            wait: super::MINUTE * u32::try_from(wait).expect("few"),
            priority: fixtures::priority_of_lease(lease),
        })
    }
}

/// Builds the report of a gateway.
fn outcome_report(claims: &LeaseClaims, report: Report) -> crate::outcome::Report {
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
