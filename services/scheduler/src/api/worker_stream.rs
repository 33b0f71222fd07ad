//! The handler of `Workers.Synchronize`: a gateway reports its state and receives the desired
//! state.
//!
//! Both directions carry complete states, so a reconnect loses nothing. The handler remembers what
//! it has sent only to send less. The `RunAttempt` of a lease is sent once on each stream, and a
//! message contains at most some MiB of them. A gateway that shuts down ends its side of the
//! stream. A gateway whose stream breaks has the TTL to return.
//!
//! A stream does not poll. It receives the desired state of its worker from
//! [`crate::notify::desired_state`], and reads the leases once for each generation of that state.
//! Every change of leases except their phase raises the generation, and every decision based on
//! them is checked again on their rows.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use domain::worker::{Marker, SessionClaims};
use domain::{AttemptId, LeaseId, Timestamp, WorkloadId};
use rpc::pb::scheduler as pb;
use rpc::pb::scheduler::synchronize_request::Message as Said;
use rpc::pb::scheduler::synchronize_response::Message as Outgoing;
use rpc::{Reason, invalid_field, parse_id, required};
use tokio::sync::mpsc::Sender;
use tokio::time::{MissedTickBehavior, interval};
use tonic::{Status, Streaming};
use uuid::Uuid;

use super::{IntoStatus, SERVICE, convert, database, stopping};
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

/// The supported version of the protocol.
const PROTOCOL: u32 = 1;

/// Maximum number of protocol versions that a gateway may list. The scheduler stores them if it
/// supports none.
const MAX_VERSIONS: usize = 100;

/// Maximum number of bytes of `LeaseAction` messages in one message, which one further action may
/// exceed. The client of a gateway decodes 4 MiB by default.
const MAX_WISH_BYTES: usize = 2 << 20;

/// Largest text about the progress of an input, in bytes. Each change is stored as an event.
const MAX_PROGRESS_BYTES: usize = 256;
/// Maximum number of inputs of an attempt whose progress is stored.
const MAX_INPUTS: usize = 1000;
/// Maximum number of changes of an attempt's input progress that one stream records. Ten are
/// normal, and more occur when sources fail.
const MAX_PROGRESS_CHANGES: usize = 200;

/// The progress of inputs: in tenths, and for each the reason to wait and whether it is relayed.
type RoughProgress = (u64, Vec<(String, bool)>);

/// A message to a gateway.
pub(super) type Message = Result<pb::SynchronizeResponse, Status>;

/// A boxed message. The channel of each stream reserves memory for several messages.
pub(super) type Answer = Box<Message>;

type Answers = Sender<Answer>;

/// Serves the stream of a gateway until the stream ends or another gateway takes over.
///
/// Rare steps run in boxed futures, so that an idle stream needs little memory.
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
                Ok(Some(message)) => Box::pin(attendance.receive(message)).await?,
                Ok(None) => return Box::pin(attendance.sign_off()).await,
                Err(status) => {
                    tracing::info!(worker.name = attendance.name, error = %status, "gateway stream broke");
                    return Ok(());
                }
            },
            () = attendance.news.changed() => Box::pin(attendance.send_desired(false)).await?,
            // One message at a time, so that messages of the gateway are processed in between.
            () = std::future::ready(()), if attendance.has_more => Box::pin(attendance.send_desired(true)).await?,
            _ = heartbeat.tick() => Box::pin(attendance.send_desired(true)).await?,
        }
    }
}

/// Registers the gateway, and sends the first desired state.
async fn begin<'s>(
    scheduler: &'s App,
    inbound: &mut Streaming<pb::SynchronizeRequest>,
    answers: &'s Answers,
) -> Result<Attendance<'s>, Status> {
    let registration = match inbound.message().await?.and_then(|message| message.message) {
        Some(Said::Registration(registration)) => {
            let versions = registration.protocol_versions.clone();
            let registration = parse_registration(scheduler, registration)?;
            if !versions.contains(&PROTOCOL) {
                scheduler
                    .lifecycle
                    .list_incompatible(&registration, &versions)
                    .await
                    .map_err(IntoStatus::status)?;
                let message = format!(
                    "cannot register the gateway: this scheduler supports only protocol version {PROTOCOL}"
                );
                return Err(Reason::UnsupportedProtocol.status(SERVICE, message));
            }
            registration
        }
        Some(Said::Observed(_)) | None => {
            return Err(invalid_field("registration", "must be the first message"));
        }
    };
    let name = registration.name.clone();
    let registered = tokio::select! {
        registered = scheduler.registrations.register(registration) => registered.ok_or_else(stopping)?,
        // A registration that is not in progress is dropped with this future.
        () = answers.closed() => return Err(Status::cancelled("the stream has ended")),
    };
    let (session, noted) = registered.map_err(IntoStatus::status)?;
    tracing::info!(
        worker.name = name,
        worker.id = %session.worker,
        incarnation = session.incarnation.0,
        session = session.session.0,
        "gateway registered for a worker"
    );

    let mut attendance = Attendance {
        scheduler,
        answers,
        name,
        credential: scheduler.signer.sign(&session),
        // The subscription precedes the first read, so that no change is missed.
        news: scheduler.context.notify.desired.subscribe(session.worker),
        session,
        sent: None,
        live: Live::default(),
        runs: HashSet::new(),
        stops: HashMap::new(),
        has_more: false,
        noted,
        last_number: 0,
        ended: HashMap::new(),
        brought: HashMap::new(),
        drift: scheduler.drift.of_stream(),
    };
    attendance.welcome().await?;
    attendance.send_desired(true).await?;
    Ok(attendance)
}

/// The live leases in use on a worker, as last read.
#[derive(Default)]
struct Live {
    /// The generation up to which the leases are current. `None`: not read yet.
    as_of: Option<i64>,
    leases: Vec<lease::Model>,
}

/// News in a report of a gateway.
#[derive(Default)]
struct Observation {
    /// Leases that the gateway does not know, or whose end it cannot report.
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

/// The stream of the gateway of a worker.
struct Attendance<'s> {
    scheduler: &'s App,
    answers: &'s Answers,
    name: String,
    session: SessionClaims,
    credential: String,
    /// The desired state of the worker.
    news: Subscription,
    /// The last generation that was sent.
    sent: Option<i64>,
    live: Live,
    /// Live leases whose `RunAttempt` or `HoldLease` was sent. The message never changes.
    runs: HashSet<Uuid>,
    /// Live leases that must stop, with the grace period in microseconds and the reason as last
    /// sent.
    stops: HashMap<Uuid, (Option<i64>, Option<lease::StopReason>)>,
    /// Whether actions remain for the next message.
    has_more: bool,
    /// The last recorded heartbeat.
    noted: Timestamp,
    /// The number of the message with that heartbeat. 0: the registration.
    last_number: u64,
    /// Leases that the gateway reports as ended without a FinishAttempt, with the time since when.
    ended: HashMap<Uuid, Timestamp>,
    /// The last recorded input progress of each lease, and the number of changes.
    brought: HashMap<Uuid, (RoughProgress, usize)>,
    /// Disagreement about leases.
    drift: drift::StreamDrift,
}

impl Attendance<'_> {
    async fn send(&self, message: Outgoing) -> Result<(), Status> {
        let response = pb::SynchronizeResponse { message: Some(message) };
        self.answers
            .send(Box::new(Ok(response)))
            .await
            .map_err(|_| Status::cancelled("the gateway has closed the stream"))
    }

    /// Ends this stream with an error. The gateway of a removed worker first receives the directive
    /// to register again, because it was not superseded.
    async fn refuse(&self, error: SessionError) -> Status {
        if matches!(error, SessionError::Forgotten) {
            let generation = self.sent.unwrap_or_default().unsigned_abs().saturating_add(1);
            let directive = pb::Directive::RegisterAgain.into();
            let desired =
                pb::Desired { generation, leases: vec![], observed_number: self.last_number, directive };
            if let Err(left) = self.send(Outgoing::Desired(desired)).await {
                return left;
            }
        }
        error.status()
    }

    async fn welcome(&self) -> Result<(), Status> {
        let config = &self.scheduler.context.config;
        self.send(Outgoing::Welcome(pb::Welcome {
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

    /// Returns the desired state of the worker. Fails if the session is not the current one of the
    /// worker.
    async fn present(&self) -> Result<StateUpdate, Status> {
        if let Some(news) = self.news.news()
            && news.known.is_spoken_for_by(&self.session)
        {
            return Ok(news);
        }
        // The row shows the reason.
        let since = Instant::now();
        match workers::require_session(self.scheduler.context.db.read(), &self.session).await {
            Ok(row) => {
                self.scheduler.context.notify.desired.note(std::slice::from_ref(&row), since);
                Ok(StateUpdate { known: DesiredState::of(&row), since })
            }
            Err(error) => Err(self.refuse(error).await),
        }
    }

    /// Takes the leases of this state. The caller puts them back.
    async fn take_live(&mut self, known: &DesiredState) -> Result<Vec<lease::Model>, Status> {
        if self.live.as_of != Some(known.generation) {
            let (worker, incarnation) = (self.session.worker, self.session.incarnation);
            self.live.leases = leases::live_in_use(self.scheduler.context.db.read(), worker, incarnation)
                .await
                .map_err(|error| database("read leases", &error))?;
            self.live.as_of = Some(known.generation);
        }
        Ok(std::mem::take(&mut self.live.leases))
    }

    /// Sends the desired state if it is new, or if `always` is set.
    async fn send_desired(&mut self, always: bool) -> Result<(), Status> {
        let StateUpdate { known, since } = self.present().await?;
        let is_news = self.sent != Some(known.generation);
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
        let mut room = MAX_WISH_BYTES;
        let mut leases = Vec::with_capacity(live.len());
        for lease in &live {
            leases.extend(self.desired_lease(lease, &mut room).await?);
        }
        self.live.leases = live;
        // The gateway may apply the generation only after it has received all of it.
        let complete = (!self.has_more).then_some(known.generation);
        let generation = complete.or(self.sent).unwrap_or(0).unsigned_abs();
        let directive = directive.into();
        self.send(Outgoing::Desired(pb::Desired {
            generation,
            leases,
            observed_number: self.last_number,
            directive,
        }))
        .await?;
        if self.has_more {
            return Ok(());
        }
        if is_news && self.sent.is_some() {
            desired_state::record_lag(since);
        }
        self.sent = Some(known.generation);
        Ok(())
    }

    /// Builds the entry of `lease`. `room`: the bytes of actions that still fit. Returns `None` for
    /// a lease that is not for the gateway.
    async fn desired_lease(
        &mut self,
        lease: &lease::Model,
        room: &mut usize,
    ) -> Result<Option<pb::DesiredLease>, Status> {
        let claims = leases::claims(lease);
        let mut desired = pb::DesiredLease { lease_id: lease.id.to_string(), action: None };
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
        desired.action = Some(if let Some((grace, reason)) = stop {
            let micros = u64::try_from(grace.unwrap_or(0)).unwrap_or(0);
            pb::desired_lease::Action::Stop(pb::StopAttempt {
                grace: Some(rpc::duration(Duration::from_micros(micros))),
                reason: convert::stop_reason(reason.unwrap_or(lease::StopReason::Cancelled)).into(),
                lease_token: self.scheduler.signer.sign(&claims),
                workload_id: claims.attempt.map(|(id, _)| id.to_string()).unwrap_or_default(),
                attempt_id: claims.attempt.map(|(_, id)| id.to_string()).unwrap_or_default(),
            })
        } else if let Some((workload, attempt)) = claims.attempt {
            let Some(run) = self.run(lease, workload, attempt).await? else { return Ok(None) };
            pb::desired_lease::Action::Run(run)
        } else {
            let lease_token = self.scheduler.signer.sign(&claims);
            pb::desired_lease::Action::Hold(pb::HoldLease { lease_token, team: claims.team })
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
        let to_status = |error: sea_orm::DbErr| database("read a workload", &error);
        let Some(row) =
            workloads::find(self.scheduler.context.db.read(), workload).await.map_err(to_status)?
        else {
            return Ok(None);
        };
        Ok(Some(pb::RunAttempt {
            lease_token: self.scheduler.signer.sign(&leases::claims(lease)),
            workload_id: workload.to_string(),
            attempt_id: attempt.to_string(),
            spec: Some(rpc::spec::to_proto(&workloads::spec(&row).map_err(to_status)?)),
            traceparent: row.traceparent,
        }))
    }

    async fn receive(&mut self, message: pb::SynchronizeRequest) -> Result<(), Status> {
        let Some(Said::Observed(observed)) = message.message else {
            return Err(invalid_field("observed", "must be every message but the first"));
        };
        if observed.session_credential != self.credential {
            return Err(workers::SessionError::Stale.status());
        }
        let phases = observed.leases.iter().map(parse_lease).collect::<Result<HashMap<_, _>, _>>()?;

        // A container that is being created may be missing from the count, so it is subtracted only
        // from its running phase on.
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
        // A superseded gateway must not end an attempt, so its session is checked first.
        let is_contact = !observation.absent.is_empty() || Timestamp::now().since(self.noted) >= every;
        if is_contact {
            let urgency = if observation.is_empty() { Urgency::Soon } else { Urgency::Now };
            let contacts = &self.scheduler.heartbeats;
            self.noted = match contacts.record(&self.session, kept, urgency).await {
                Some(Ok(noted)) => noted,
                Some(Err(error)) => return Err(self.refuse(error).await),
                None => return Err(stopping()),
            };
            self.last_number = observed.number;
        }
        self.note(&mut live, observation)
            .await
            .map_err(|error| database("record the report of a worker", &error))?;
        self.live.leases = live;
        Ok(())
    }

    /// Extracts the news of a report.
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
                // FinishAttempt reports the end of an attempt, unless the attempt must stop and its
                // start was rejected. A gateway whose FinishAttempt never arrives has limited time.
                Some(Phase::Ended) if lease.state != lease::State::Ending && !lease.is_driven() => {
                    let since = self.ended.get(&lease.id).copied().unwrap_or(now);
                    if now.since(since) < self.scheduler.context.config.worker_ttl {
                        ended.insert(lease.id, since);
                        continue;
                    }
                    tracing::warn!(lease.id = %lease.id, "gateway did not report the end of an attempt in time");
                    observation.absent.push(lease.clone());
                }
                // For a lease that was given up, the report only confirms that the attempt has
                // stopped. A driven lease has no other end to report.
                Some(Phase::Ended)
                    if lease.is_driven() || lease.stop_reason == Some(lease::StopReason::WorkerLost) =>
                {
                    observation.absent.push(lease.clone());
                }
                Some(_) if lease.is_driven() => {}
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
        // A fixed order avoids deadlocks between transactions that lock several rows.
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

    /// Records the leases that only one side knows.
    fn note_drift(
        &mut self,
        live: &[lease::Model],
        phases: &HashMap<LeaseId, Phase>,
        applied_generation: u64,
        now: Timestamp,
    ) {
        let here: HashSet<_> = live.iter().map(|lease| lease.id).collect();
        let there = |lease: &&lease::Model| phases.contains_key(&LeaseId::from_uuid(lease.id));
        let has_received = |lease: &&lease::Model| lease.generation.unsigned_abs() <= applied_generation;
        let missing = live.iter().filter(|lease| has_received(lease) && !there(lease)).map(|lease| lease.id);
        let is_applied = self.sent.is_some_and(|sent| sent.unsigned_abs() <= applied_generation);
        let runs = phases.iter().filter(|(_, phase)| is_applied && !matches!(phase, Phase::Ended));
        let stray = runs.map(|(lease, _)| lease.uuid()).filter(|lease| !here.contains(lease));
        let patience = self.scheduler.context.config.worker_ttl;
        self.drift.note(&missing.collect(), &stray.collect(), patience, now);
    }

    /// Returns leases whose inputs progressed by a tenth or wait for another reason, in the order
    /// of their workloads.
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
                    let pb::InputProgress { name, bytes_done, bytes_total, waits_for, relayed } = input;
                    let [name, waits_for] =
                        [name, waits_for].map(|text| rpc::clipped(&text, MAX_PROGRESS_BYTES).into_owned());
                    InputProgress { name, bytes_done, bytes_total, waits_for, relayed }
                })
                .take(MAX_INPUTS)
                .collect();
            let states = inputs.iter().map(|input| (input.waits_for.clone(), input.relayed)).collect();
            let now = (InputProgress::tenths(&inputs), states);
            let changes = match self.brought.get(&lease.id) {
                Some((before, _)) if *before == now => continue,
                Some((_, changes)) => changes + 1,
                None => 1,
            };
            self.brought.insert(lease.id, (now, changes));
            if changes <= MAX_PROGRESS_CHANGES {
                brought.push((lease.clone(), inputs));
            }
        }
        brought.sort_by_key(|(lease, _)| lease.workload_id);
        brought
    }

    async fn sign_off(&self) -> Result<(), Status> {
        tracing::info!(worker.id = %self.session.worker, "gateway disconnected");
        self.scheduler
            .context
            .change(async |txn| {
                let mut effects = Effects::default();
                workers::sign_off(&txn, &self.session, self.noted, &mut effects).await?;
                Ok::<_, sea_orm::DbErr>(((), effects))
            })
            .await
            .map_err(|error| database("record the disconnect of a gateway", &error))
    }
}

fn parse_registration(scheduler: &App, registration: pb::Registration) -> Result<Registration, Status> {
    if !(1..=MAX_VERSIONS).contains(&registration.protocol_versions.len()) {
        return Err(invalid_field("registration.protocol_versions", format!("must be 1 to {MAX_VERSIONS}")));
    }
    let marker = required("registration.marker", registration.marker)?;
    let labels = required("registration.labels", registration.labels)?;
    Ok(Registration {
        name: rpc::parse_name("registration.worker_name", registration.worker_name)?,
        instance: parse_id("registration.gateway_instance", &registration.gateway_instance)?,
        ended: rpc::parse_optional_id("registration.ended_instance", &registration.ended_instance)?,
        // A credential that another key signed belongs to a lost database. It proves nothing, and
        // is no reason to reject the gateway.
        last: scheduler.signer.verify(&registration.session_credential).ok(),
        marker: Marker {
            id: parse_id("registration.marker.marker_id", &marker.marker_id)?,
            boot: rpc::parse_label("registration.marker.boot_id", marker.boot_id)?,
        },
        endpoint: parse_endpoint("registration.endpoint", registration.endpoint)?,
        ephemeral: labels.ephemeral,
        labels: convert::parse_labels(labels)?,
        capacity: convert::parse_capacity(registration.capacity.unwrap_or_default()),
    })
}

/// Parses the address of a gateway.
fn parse_endpoint(field: &str, endpoint: String) -> Result<String, Status> {
    let endpoint = rpc::parse_label(field, endpoint)?;
    // A list of addresses means replicas, but a worker has one gateway.
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
