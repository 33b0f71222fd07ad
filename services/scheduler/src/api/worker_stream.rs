//! `Workers.Synchronize`: a gateway says what is, and hears what shall be.
//!
//! Both directions carry complete states, so nothing is kept here that a reconnect would miss: what was sent is remembered only to
//! send less. What an attempt runs is sent once on each stream, and one message takes some MiB of it, however much a worker runs. A gateway that shuts down ends its side of the stream; one whose stream breaks is waited for.
//!
//! A stream reads nothing by itself as long as nothing changes. What its worker shall do it hears ([`crate::notify::desired_state`]), and its leases
//! it reads once for each generation of that. They are the same until the next, for whatever changes them raises it, but for how far they are; and
//! whatever is made of them is judged again on their rows.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use domain::worker::{Marker, SessionClaims};
use domain::{AttemptId, LeaseId, Timestamp, WorkloadId};
use rpc::pb::scheduler as pb;
use rpc::pb::scheduler::synchronize_request::Message as Said;
use rpc::pb::scheduler::synchronize_response::Message as Tell;
use rpc::{Reason, invalid_field, parse_id, required};
use tokio::sync::mpsc::Sender;
use tokio::time::{MissedTickBehavior, interval};
use tonic::{Status, Streaming};
use uuid::Uuid;

use super::{Reasoned, SERVICE, convert, database, stopping};
use crate::app::App;
use crate::db::entity::lease;
use crate::db::entity::worker::Desired;
use crate::leases;
use crate::leases::drift;
use crate::lifecycle::heartbeat_batches::Urgency;
use crate::notify::changes::Effects;
use crate::notify::desired_state::{self, DesiredState, StateUpdate, Subscription};
use crate::workers::{self, CONTACT_EVERY, Registration, SessionError, Usage};
use crate::workloads::events::InputProgress;
use crate::workloads::{self, Phase};

/// The version of the protocol that is spoken here.
const PROTOCOL: u32 = 1;

/// How many versions a gateway may speak: of one with which nobody can speak they are kept.
const MOST_VERSIONS: usize = 100;

/// Most bytes of wishes in one message, and at most one wish more. The client of a gateway decodes 4 MiB unless it is told otherwise.
const WISH_BYTES: usize = 2 << 20;

/// Most bytes of a text about the progress of an input. Each change is an event that is kept.
const MOST_PROGRESS_BYTES: usize = 256;
/// Most inputs of an attempt whose progress is kept.
const MOST_INPUTS: usize = 1000;
/// Most changes of an attempt's input progress that are recorded on one stream. Ten are usual, and more if sources fail.
const MOST_CHANGES: usize = 200;

/// What a gateway is told.
pub(super) type Told = Result<pb::SynchronizeResponse, Status>;

/// The same, in as little of the channel as possible: that has room for many, and there is one for each stream.
pub(super) type Answer = Box<Told>;

type Answers = Sender<Answer>;

/// Attends one stream of a gateway, until it ends or another gateway takes over.
///
/// What is done now and then is in boxes of its own, so that a stream that waits takes little room.
pub(super) async fn attend(
    scheduler: &App,
    mut inbound: Streaming<pb::SynchronizeRequest>,
    answers: &Answers,
) -> Result<(), Status> {
    let mut attendance = Box::pin(begin(scheduler, &mut inbound, answers)).await?;
    let mut heartbeat = interval(scheduler.context.config.heartbeat);
    heartbeat.set_missed_tick_behavior(MissedTickBehavior::Delay);
    heartbeat.reset();
    loop {
        tokio::select! {
            message = inbound.message() => match message {
                Ok(Some(message)) => Box::pin(attendance.hear(message)).await?,
                Ok(None) => return Box::pin(attendance.leave()).await,
                Err(status) => {
                    tracing::info!(worker.name = attendance.name, error = %status, "the stream of a gateway broke");
                    return Ok(());
                }
            },
            () = attendance.news.changed() => Box::pin(attendance.tell(false)).await?,
            // One message at a time, so that the gateway is heard in between.
            () = std::future::ready(()), if attendance.has_more => Box::pin(attendance.tell(true)).await?,
            _ = heartbeat.tick() => Box::pin(attendance.tell(true)).await?,
        }
    }
}

/// Hears who speaks for whom, and tells what shall be.
async fn begin<'s>(
    scheduler: &'s App,
    inbound: &mut Streaming<pb::SynchronizeRequest>,
    answers: &'s Answers,
) -> Result<Attendance<'s>, Status> {
    let hello = match inbound.message().await?.and_then(|message| message.message) {
        Some(Said::Hello(hello)) => {
            let versions = hello.protocol_versions.clone();
            let hello = parse_hello(scheduler, hello)?;
            if !versions.contains(&PROTOCOL) {
                scheduler.lifecycle.list_incompatible(&hello, &versions).await.map_err(Reasoned::status)?;
                let message = format!("this scheduler speaks version {PROTOCOL}");
                return Err(Reason::UnsupportedProtocol.status(SERVICE, message));
            }
            hello
        }
        Some(Said::Observed(_)) | None => {
            return Err(invalid_field("hello", "must be the first message"));
        }
    };
    let name = hello.name.clone();
    let let_in = tokio::select! {
        let_in = scheduler.registrations.ask(hello) => let_in.ok_or_else(stopping)?,
        // Unless it is let in just now, it is not any more.
        () = answers.closed() => return Err(Status::cancelled("the stream has ended")),
    };
    let (session, noted) = let_in.map_err(Reasoned::status)?;
    tracing::info!(
        worker.name = name,
        worker.id = %session.worker,
        incarnation = session.incarnation.0,
        session = session.session.0,
        "a gateway speaks for a worker"
    );

    let mut attendance = Attendance {
        scheduler,
        answers,
        name,
        credential: scheduler.signer.sign(&session),
        // Subscribed before the first look, so that nothing falls in between.
        news: scheduler.context.notify.desired.subscribe(session.worker),
        session,
        told: None,
        live: Live::default(),
        runs: HashSet::new(),
        stops: HashMap::new(),
        has_more: false,
        noted,
        heard: 0,
        ended: HashMap::new(),
        brought: HashMap::new(),
        drift: scheduler.drift.of_stream(),
    };
    attendance.welcome().await?;
    attendance.tell(true).await?;
    Ok(attendance)
}

/// The leases of attempts on a worker that had not ended, as they were read.
#[derive(Default)]
struct Live {
    /// When they are known: they are at least as new as this generation says.
    as_of: Option<i64>,
    leases: Vec<lease::Model>,
}

/// What a gateway says about leases that was not known.
#[derive(Default)]
struct Observation {
    /// It does not know them, or cannot say how they ended.
    absent: Vec<lease::Model>,
    advanced: Vec<(lease::Model, Phase)>,
    brought: Vec<(lease::Model, Vec<InputProgress>)>,
}

impl Observation {
    fn is_empty(&self) -> bool {
        let Self { absent, advanced, brought } = self;
        absent.is_empty() && advanced.is_empty() && brought.is_empty()
    }
}

/// One stream of the gateway that speaks for a worker.
struct Attendance<'s> {
    scheduler: &'s App,
    answers: &'s Answers,
    name: String,
    session: SessionClaims,
    credential: String,
    /// What the worker shall do.
    news: Subscription,
    /// The generation that was sent last.
    told: Option<i64>,
    live: Live,
    /// The live leases whose `RunAttempt` was sent. It never changes, and is long.
    runs: HashSet<Uuid>,
    /// The live leases that shall stop, with the grace in microseconds and the reason as they were sent last.
    stops: HashMap<Uuid, (Option<i64>, Option<lease::StopReason>)>,
    /// Whether wishes are left for the next message.
    has_more: bool,
    /// The contact that was noted last.
    noted: Timestamp,
    /// The number of the message that was it. 0: `hello`.
    heard: u64,
    /// Since when leases are said to have ended that nobody has ended.
    ended: HashMap<Uuid, Timestamp>,
    /// How far the inputs of leases were, in tenths, and what each waited for, when that was noted last; and how often it had changed.
    brought: HashMap<Uuid, ((u64, Vec<String>), usize)>,
    /// What it and we do not agree about.
    drift: drift::OfStream,
}

impl Attendance<'_> {
    async fn send(&self, message: Tell) -> Result<(), Status> {
        let response = pb::SynchronizeResponse { message: Some(message) };
        self.answers.send(Box::new(Ok(response))).await.map_err(|_| Status::cancelled("the gateway has left"))
    }

    /// What ends this stream. The gateway of a worker that was forgotten is told to begin anew: it has not been superseded.
    async fn refuse(&self, error: SessionError) -> Status {
        if matches!(error, SessionError::Forgotten) {
            let generation = self.told.unwrap_or_default().unsigned_abs().saturating_add(1);
            let directive = pb::Directive::RegisterAgain.into();
            let desired = pb::Desired { generation, leases: vec![], heard: self.heard, directive };
            if let Err(left) = self.send(Tell::Desired(desired)).await {
                return left;
            }
        }
        error.status()
    }

    async fn welcome(&self) -> Result<(), Status> {
        let config = &self.scheduler.context.config;
        self.send(Tell::Welcome(pb::Welcome {
            session_credential: self.credential.clone(),
            worker_id: self.session.worker.to_string(),
            incarnation: self.session.incarnation.0,
            session: self.session.session.0,
            heartbeat: Some(rpc::duration(config.heartbeat)),
            stop_after: Some(rpc::duration(config.stop_after)),
            protocol_version: PROTOCOL,
            worker_ttl: Some(rpc::duration(config.worker_ttl)),
        }))
        .await
    }

    /// What is known of the worker, unless another session or nobody speaks for it any more.
    async fn present(&self) -> Result<StateUpdate, Status> {
        if let Some(news) = self.news.news()
            && news.known.is_spoken_for_by(&self.session)
        {
            return Ok(news);
        }
        // Why, is said by the row.
        let since = Instant::now();
        match workers::speaks(self.scheduler.context.db.read(), &self.session).await {
            Ok(row) => {
                self.scheduler.context.notify.desired.note(std::slice::from_ref(&row), since);
                Ok(StateUpdate { known: DesiredState::of(&row), since })
            }
            Err(error) => Err(self.refuse(error).await),
        }
    }

    /// The leases as of what is known of the worker. Whoever has changed them puts them back.
    async fn take_live(&mut self, known: &DesiredState) -> Result<Vec<lease::Model>, Status> {
        if self.live.as_of != Some(known.generation) {
            let (worker, incarnation) = (self.session.worker, self.session.incarnation);
            self.live.leases = leases::live_tasks(self.scheduler.context.db.read(), worker, incarnation)
                .await
                .map_err(|error| database("read leases", &error))?;
            self.live.as_of = Some(known.generation);
        }
        Ok(std::mem::take(&mut self.live.leases))
    }

    /// Tells what the worker shall do, if it is new or `always`.
    async fn tell(&mut self, always: bool) -> Result<(), Status> {
        let StateUpdate { known, since } = self.present().await?;
        let is_news = self.told != Some(known.generation);
        if !always && !is_news {
            return Ok(());
        }
        let directive = match known.desired {
            Desired::Run => pb::Directive::Run,
            Desired::Cordon => pb::Directive::Cordon,
            Desired::Retire => pb::Directive::Retire,
        };
        let live = self.take_live(&known).await?;
        let ids: HashSet<_> = live.iter().map(|lease| lease.id).collect();
        self.runs.retain(|id| ids.contains(id));
        self.stops.retain(|id, _| ids.contains(id));
        self.has_more = false;
        let mut room = WISH_BYTES;
        let mut leases = Vec::with_capacity(live.len());
        for lease in &live {
            leases.extend(self.desired_lease(lease, &mut room).await?);
        }
        self.live.leases = live;
        // The generation counts as applied once all of it was sent.
        let complete = (!self.has_more).then_some(known.generation);
        let generation = complete.or(self.told).unwrap_or(0).unsigned_abs();
        let directive = directive.into();
        self.send(Tell::Desired(pb::Desired { generation, leases, heard: self.heard, directive })).await?;
        if self.has_more {
            return Ok(());
        }
        if is_news && self.told.is_some() {
            desired_state::told(since);
        }
        self.told = Some(known.generation);
        Ok(())
    }

    /// What a message says of `lease`. `room`: the bytes of wishes that the message still takes. `None`: the lease is not the gateway's to see.
    async fn desired_lease(
        &mut self,
        lease: &lease::Model,
        room: &mut usize,
    ) -> Result<Option<pb::DesiredLease>, Status> {
        let Some((workload, attempt)) = leases::claims(lease).attempt else { return Ok(None) };
        let mut desired = pb::DesiredLease { lease_id: lease.id.to_string(), wish: None };
        let stop = (lease.state == lease::State::Ending).then_some((lease.stop_grace_us, lease.stop_reason));
        let was_sent = match &stop {
            Some(stop) => self.stops.get(&lease.id) == Some(stop),
            None => self.runs.contains(&lease.id),
        };
        if was_sent {
            return Ok(Some(desired));
        }
        if *room == 0 {
            self.has_more = true;
            return Ok(Some(desired));
        }
        desired.wish = Some(if let Some((grace, reason)) = stop {
            let micros = u64::try_from(grace.unwrap_or(0)).unwrap_or(0);
            pb::desired_lease::Wish::Stop(pb::StopAttempt {
                grace: Some(rpc::duration(Duration::from_micros(micros))),
                reason: convert::stop_reason(reason.unwrap_or(lease::StopReason::Cancelled)).into(),
                lease_token: self.scheduler.signer.sign(&leases::claims(lease)),
                workload_id: workload.to_string(),
                attempt_id: attempt.to_string(),
            })
        } else {
            let Some(run) = self.run(lease, workload, attempt).await? else { return Ok(None) };
            pb::desired_lease::Wish::Run(run)
        });
        *room = room.saturating_sub(rpc::Message::encoded_len(&desired));
        match stop {
            Some(stop) => _ = self.stops.insert(lease.id, stop),
            None => _ = self.runs.insert(lease.id),
        }
        Ok(Some(desired))
    }

    async fn run(
        &self,
        lease: &lease::Model,
        workload: WorkloadId,
        attempt: AttemptId,
    ) -> Result<Option<pb::RunAttempt>, Status> {
        let failed = |error: sea_orm::DbErr| database("read a workload", &error);
        let Some(row) = workloads::find(self.scheduler.context.db.read(), workload).await.map_err(failed)?
        else {
            return Ok(None);
        };
        Ok(Some(pb::RunAttempt {
            lease_token: self.scheduler.signer.sign(&leases::claims(lease)),
            workload_id: workload.to_string(),
            attempt_id: attempt.to_string(),
            spec: Some(rpc::spec::to_proto(&workloads::spec(&row).map_err(failed)?)),
            traceparent: row.traceparent,
        }))
    }

    async fn hear(&mut self, message: pb::SynchronizeRequest) -> Result<(), Status> {
        let Some(Said::Observed(observed)) = message.message else {
            return Err(invalid_field("observed", "must be every message but the first"));
        };
        if observed.session_credential != self.credential {
            return Err(workers::SessionError::Stale.status());
        }
        let phases = observed.leases.iter().map(parse_lease).collect::<Result<HashMap<_, _>, _>>()?;

        // A container that is being made may be counted or not: it counts twice rather than not at all.
        let used =
            phases.values().filter(|phase| matches!(phase, Phase::Running | Phase::Publishing)).count();
        let kept = Usage {
            containers: observed.containers,
            kept_containers: observed.containers.saturating_sub(used as u64),
            volumes: observed.volumes,
            disk_free_bytes: observed.disk_free_bytes,
        };
        let inputs = observed.leases.into_iter().filter(|lease| !lease.inputs.is_empty());
        let inputs =
            inputs.map(|lease| Ok((parse_id("observed.leases.lease_id", &lease.lease_id)?, lease.inputs)));
        let inputs = inputs.collect::<Result<HashMap<LeaseId, _>, Status>>()?;

        let StateUpdate { known, .. } = self.present().await?;
        let mut live = self.take_live(&known).await?;
        let observation = self.compare(&live, &phases, observed.applied_generation, inputs);
        let every = CONTACT_EVERY.min(self.scheduler.context.config.heartbeat / 2);
        // What ends an attempt is taken from nobody who has been superseded meanwhile.
        let is_contact = !observation.absent.is_empty() || Timestamp::now().since(self.noted) >= every;
        if is_contact {
            let urgency = if observation.is_empty() { Urgency::Soon } else { Urgency::Now };
            let contacts = &self.scheduler.heartbeats;
            self.noted = match contacts.heard(&self.session, kept, urgency).await {
                Some(Ok(noted)) => noted,
                Some(Err(error)) => return Err(self.refuse(error).await),
                None => return Err(stopping()),
            };
            self.heard = observed.number;
        }
        self.note(&mut live, observation)
            .await
            .map_err(|error| database("note what a worker does", &error))?;
        self.live.leases = live;
        Ok(())
    }

    /// What a message says that was not known.
    fn compare(
        &mut self,
        live: &[lease::Model],
        phases: &HashMap<LeaseId, Phase>,
        applied_generation: u64,
        inputs: HashMap<LeaseId, Vec<pb::InputProgress>>,
    ) -> Observation {
        let mut observation = Observation { brought: self.newly_brought(live, inputs), ..Default::default() };
        let now = Timestamp::now();
        self.note_drift(live, phases, applied_generation, now);
        let mut ended = HashMap::new();
        for lease in live {
            match phases.get(&LeaseId::from_uuid(lease.id)) {
                // How it has ended is said by FinishAttempt, unless it shall stop and was refused to start. A gateway that does not
                // get its FinishAttempt through is not waited for for ever.
                Some(Phase::Ended) if lease.state != lease::State::Ending => {
                    let since = self.ended.get(&lease.id).copied().unwrap_or(now);
                    if now.since(since) < self.scheduler.context.config.worker_ttl {
                        ended.insert(lease.id, since);
                        continue;
                    }
                    tracing::warn!(lease.id = %lease.id, "a gateway cannot say how an attempt ended");
                    observation.absent.push(lease.clone());
                }
                // Of one that was given up nothing is wanted but that it has stopped.
                Some(Phase::Ended) if lease.stop_reason == Some(lease::StopReason::WorkerLost) => {
                    observation.absent.push(lease.clone());
                }
                Some(phase) if *phase as i64 > lease.phase => {
                    observation.advanced.push((lease.clone(), *phase))
                }
                Some(_) => {}
                None if lease.generation.unsigned_abs() <= applied_generation => {
                    observation.absent.push(lease.clone());
                }
                None => {}
            }
        }
        self.ended = ended;
        // Always in the same order, so that two that lock several rows do not wait for each other.
        observation.advanced.sort_by_key(|(lease, _)| lease.workload_id);
        observation
    }

    async fn note(
        &self,
        live: &mut Vec<lease::Model>,
        observation: Observation,
    ) -> Result<(), sea_orm::DbErr> {
        let Observation { absent, advanced, brought } = observation;
        for lease in &absent {
            workloads::operations::observe_absence(&self.scheduler.context, lease).await?;
        }
        live.retain(|lease| !absent.iter().any(|absent| absent.id == lease.id));
        if !advanced.is_empty() {
            workloads::operations::observe_phases(&self.scheduler.context, &advanced).await?;
            for lease in live {
                let advanced = advanced.iter().find(|(advanced, _)| advanced.id == lease.id);
                lease.phase = advanced.map_or(lease.phase, |(_, phase)| *phase as i64);
            }
        }
        if brought.is_empty() {
            return Ok(());
        }
        workloads::operations::observe_inputs(&self.scheduler.context, &brought).await
    }

    /// Notes which leases are here and not there, or the other way round.
    fn note_drift(
        &mut self,
        live: &[lease::Model],
        phases: &HashMap<LeaseId, Phase>,
        applied_generation: u64,
        now: Timestamp,
    ) {
        let here: HashSet<_> = live.iter().map(|lease| lease.id).collect();
        let there = |lease: &&lease::Model| phases.contains_key(&LeaseId::from_uuid(lease.id));
        let heard = |lease: &&lease::Model| lease.generation.unsigned_abs() <= applied_generation;
        let missing = live.iter().filter(|lease| heard(lease) && !there(lease)).map(|lease| lease.id);
        let is_told = self.told.is_some_and(|told| told.unsigned_abs() <= applied_generation);
        let runs = phases.iter().filter(|(_, phase)| is_told && !matches!(phase, Phase::Ended));
        let stray = runs.map(|(lease, _)| lease.uuid()).filter(|lease| !here.contains(lease));
        let patience = self.scheduler.context.config.worker_ttl;
        self.drift.note(&missing.collect(), &stray.collect(), patience, now);
    }

    /// The leases whose inputs have come another tenth of the way, or wait for something else, in the order of their workloads.
    fn newly_brought(
        &mut self,
        live: &[lease::Model],
        mut inputs: HashMap<LeaseId, Vec<pb::InputProgress>>,
    ) -> Vec<(lease::Model, Vec<InputProgress>)> {
        self.brought.retain(|id, _| live.iter().any(|lease| lease.id == *id));
        let mut brought = Vec::new();
        for lease in live {
            let Some(inputs) = inputs.remove(&LeaseId::from_uuid(lease.id)) else { continue };
            let inputs: Vec<_> = inputs
                .into_iter()
                .map(|input| {
                    let pb::InputProgress { name, bytes_done, bytes_total, waits_for } = input;
                    let [name, waits_for] =
                        [name, waits_for].map(|text| rpc::clipped(&text, MOST_PROGRESS_BYTES).into_owned());
                    InputProgress { name, bytes_done, bytes_total, waits_for }
                })
                .take(MOST_INPUTS)
                .collect();
            let waits_for = inputs.iter().map(|input| input.waits_for.clone()).collect();
            let now = (InputProgress::tenths(&inputs), waits_for);
            let told = match self.brought.get(&lease.id) {
                Some((before, _)) if *before == now => continue,
                Some((_, told)) => told + 1,
                None => 1,
            };
            self.brought.insert(lease.id, (now, told));
            if told <= MOST_CHANGES {
                brought.push((lease.clone(), inputs));
            }
        }
        brought.sort_by_key(|(lease, _)| lease.workload_id);
        brought
    }

    async fn leave(&self) -> Result<(), Status> {
        tracing::info!(worker.id = %self.session.worker, "a gateway said goodbye");
        self.scheduler
            .context
            .change(async |txn| {
                let mut effects = Effects::default();
                workers::leave(&txn, &self.session, self.noted, &mut effects).await?;
                Ok::<_, sea_orm::DbErr>(((), effects))
            })
            .await
            .map_err(|error| database("let a gateway leave", &error))
    }
}

fn parse_hello(scheduler: &App, hello: pb::Hello) -> Result<Registration, Status> {
    if !(1..=MOST_VERSIONS).contains(&hello.protocol_versions.len()) {
        return Err(invalid_field("hello.protocol_versions", format!("must be 1 to {MOST_VERSIONS}")));
    }
    let marker = required("hello.marker", hello.marker)?;
    let labels = required("hello.labels", hello.labels)?;
    Ok(Registration {
        name: rpc::parse_name("hello.worker_name", hello.worker_name)?,
        instance: parse_id("hello.gateway_instance", &hello.gateway_instance)?,
        // One that another key signed is of a database that was lost: it proves nothing, and is no reason to refuse.
        last: scheduler.signer.verify(&hello.session_credential).ok(),
        marker: Marker {
            id: parse_id("hello.marker.marker_id", &marker.marker_id)?,
            boot: rpc::parse_label("hello.marker.boot_id", marker.boot_id)?,
        },
        endpoint: parse_endpoint("hello.endpoint", hello.endpoint)?,
        ephemeral: labels.ephemeral,
        labels: convert::parse_labels(labels)?,
        capacity: convert::parse_capacity(hello.capacity.unwrap_or_default()),
    })
}

/// Where the gateway of one worker listens.
fn parse_endpoint(field: &str, endpoint: String) -> Result<String, Status> {
    let endpoint = rpc::parse_label(field, endpoint)?;
    // Replicas of a service are several addresses; a gateway is one.
    if endpoint.contains(',') || rpc::client::addresses(&endpoint).is_err() {
        return Err(invalid_field(field, "must be unix:///path or http://host:port"));
    }
    Ok(endpoint)
}

fn parse_lease(lease: &pb::ObservedLease) -> Result<(LeaseId, Phase), Status> {
    let phase = match rpc::parse_enum("observed.leases.phase", lease.phase)? {
        pb::LeasePhase::Preparing | pb::LeasePhase::Materializing | pb::LeasePhase::Unspecified => {
            Phase::Preparing
        }
        pb::LeasePhase::Running => Phase::Running,
        pb::LeasePhase::Publishing => Phase::Publishing,
        pb::LeasePhase::Ended => Phase::Ended,
    };
    Ok((parse_id("observed.leases.lease_id", &lease.lease_id)?, phase))
}
