//! The messages between the scheduler and the gateway of one worker.
//!
//! This module converts them from and to protobuf. [`crate::sync::scheduler_stream`] decides on
//! their contents.

use std::time::Duration;

use domain::worker::{Incarnation, Marker, ResourceType, Session};
use domain::workload::{FailureReason, WorkloadSpec};
use domain::{AttemptId, GatewayInstance, LeaseId, WorkerId, WorkloadId};
use rpc::Refusal;
use rpc::pb::scheduler as pb;
use rpc::pb::scheduler::desired_lease::Action;
use rpc::pb::scheduler::synchronize_request::Message as Up;
use rpc::pb::scheduler::synchronize_response::Message as Down;
use runtime::{Capabilities, Disk};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};

use super::scheduler::SchedulerClient;
use crate::Config;
use crate::runtimes::container_note::DrivenNote;

/// Version of the protocol that this gateway implements.
const PROTOCOL: u32 = 1;

/// The phase of an attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AttemptPhase {
    Preparing,
    /// Inputs are copied to the worker.
    Materializing,
    Running,
    Publishing,
    Ended,
}

/// The progress of an input that is copied to the worker.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct InputProgress {
    pub(crate) name: String,
    pub(crate) bytes_done: u64,
    pub(crate) bytes_total: u64,
    /// The reason why the copy waits. Empty: it does not wait.
    pub(crate) waits_for: String,
    /// Whether the streamer carries the bytes.
    pub(crate) relayed: bool,
}

/// An attempt that the gateway must run under a lease, or a container that a caller drives.
pub(crate) struct AttemptTask {
    pub(crate) lease: LeaseId,
    pub(crate) attempt: AttemptId,
    /// The spec. A driven container has no command in it.
    pub(crate) spec: WorkloadSpec,
    pub(crate) token: String,
    /// The workload, or the driven lease.
    pub(crate) workload: WorkloadId,
    pub(crate) traceparent: String,
    /// The position in the start order, if the container is that of a service.
    pub(crate) service: Option<usize>,
    /// The facts about a container that a caller drives.
    pub(crate) driven: Option<DrivenNote>,
}

impl AttemptTask {
    /// The workload from which the ids of artifacts are derived. The containers of a driven lease
    /// may have outputs of the same name.
    pub(crate) fn namespace(&self) -> WorkloadId {
        if self.driven.is_some() { WorkloadId::from_uuid(self.attempt.uuid()) } else { self.workload }
    }
}

/// The first message of a gateway.
pub(crate) struct Registration(pb::Registration);

impl Registration {
    /// Creates a registration. `credential` is that of this instance's last session, or empty.
    /// `ended` is an earlier instance that has certainly ended.
    pub(crate) fn new(
        config: &Config,
        instance: GatewayInstance,
        ended: Option<GatewayInstance>,
        marker: Marker,
        disk: Option<Disk>,
        capabilities: &Capabilities,
        credential: String,
    ) -> Self {
        let labels = config.labels(capabilities);
        let capacity = config.amounts.capacity(capabilities, disk);
        Self(pb::Registration {
            worker_name: config.worker_name.clone(),
            gateway_instance: instance.to_string(),
            ended_instance: ended.map(|ended| ended.to_string()).unwrap_or_default(),
            session_credential: credential,
            marker: Some(pb::Marker { marker_id: marker.id.to_string(), boot_id: marker.boot }),
            endpoint: config.endpoint.clone(),
            labels: Some(pb::WorkerLabels {
                platform: labels.platform,
                tags: labels.tags,
                team: labels.team.unwrap_or_default(),
                image_kinds: labels.image_kinds,
                capabilities: labels.capabilities,
                resource_types: labels
                    .resource_types
                    .into_iter()
                    .map(|ResourceType { name, version }| pb::ResourceType { name, version })
                    .collect(),
                ephemeral: config.ephemeral,
                zone: labels.zone,
            }),
            capacity: Some(pb::Capacity {
                max_tasks: capacity.max_tasks.unwrap_or(0),
                disk_bytes: capacity.disk_bytes,
                max_containers: capacity.max_containers.unwrap_or(0),
                max_volumes: capacity.max_volumes.unwrap_or(0),
                cpu_millis: capacity.cpu_millis.unwrap_or(0),
                memory_bytes: capacity.memory_bytes.unwrap_or(0),
                min_free_disk_bytes: capacity.min_free_disk_bytes,
            }),
            protocol_versions: vec![PROTOCOL],
        })
    }
}

/// The session that the scheduler opened.
pub(crate) struct Welcome {
    pub(crate) credential: String,
    pub(crate) worker: WorkerId,
    pub(crate) incarnation: Incarnation,
    pub(crate) session: Session,
    pub(crate) worker_ttl: Duration,
    pub(crate) heartbeat: Duration,
    /// Time without contact after which a supervisor stops its process.
    pub(crate) stop_after: Duration,
}

/// The current state of a worker.
pub(crate) struct WorkerState {
    pub(crate) credential: String,
    pub(crate) applied_generation: u64,
    pub(crate) leases: Vec<LeaseState>,
    pub(crate) containers: u64,
    pub(crate) volumes: u64,
    pub(crate) disk_free_bytes: u64,
    /// Number of this message on its stream.
    pub(crate) number: u64,
}

/// The current state of one lease.
pub(crate) struct LeaseState {
    pub(crate) lease: LeaseId,
    pub(crate) phase: AttemptPhase,
    pub(crate) inputs: Vec<InputProgress>,
}

/// The desired state of a worker.
pub(crate) struct DesiredState {
    pub(crate) generation: u64,
    /// Number of the last message that the scheduler has received from the gateway.
    pub(crate) received: u64,
    pub(crate) directive: Directive,
    pub(crate) leases: Vec<DesiredLease>,
}

/// The desired state of a worker as a whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Directive {
    Run,
    Cordon,
    Retire,
    RegisterAgain,
}

/// The desired state of a lease.
pub(crate) struct DesiredLease {
    pub(crate) lease: LeaseId,
    /// The request. `None`: it is in an earlier or a later message of this stream.
    pub(crate) request: Option<LeaseRequest>,
}

/// A request about a lease.
///
/// An invalid attempt or spec fails only its own lease.
pub(crate) enum LeaseRequest {
    Run(Box<AttemptTask>),
    Stop {
        attempt: Option<AttemptId>,
        token: String,
        grace: Duration,
        reason: FailureReason,
    },
    /// Keep what runs under a driven lease.
    Hold,
    /// Stop what runs under a driven lease.
    StopHeld {
        grace: Duration,
        reason: FailureReason,
    },
    Invalid {
        attempt: Option<AttemptId>,
        token: String,
        why: String,
    },
}

/// The reason why a stream ended or cannot be opened.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StreamError {
    #[error("cannot synchronize with the scheduler")]
    Refused(#[from] Refusal),
    #[error("the scheduler violated the protocol: {0}")]
    Protocol(&'static str),
    #[error("the scheduler ended the stream")]
    Closed,
}

impl From<Status> for StreamError {
    fn from(status: Status) -> Self {
        Self::Refused(status.into())
    }
}

/// An open stream with a session.
pub(crate) struct SchedulerStream {
    up: mpsc::Sender<pb::SynchronizeRequest>,
    down: Streaming<pb::SynchronizeResponse>,
}

impl SchedulerStream {
    /// Registers a gateway, and waits for its session.
    pub(crate) async fn open(
        scheduler: &SchedulerClient,
        registration: Registration,
    ) -> Result<(Self, Welcome), StreamError> {
        let (up, requests) = mpsc::channel(4);
        // Cannot fail, because the receiver is the stream below.
        up.send(pb::SynchronizeRequest { message: Some(Up::Registration(registration.0)) }).await.ok();
        let mut down =
            scheduler.workers.clone().synchronize(ReceiverStream::new(requests)).await?.into_inner();
        match down.message().await?.and_then(|response| response.message) {
            Some(Down::Welcome(welcome)) => Ok((Self { up, down }, parse_welcome(welcome)?)),
            Some(Down::Desired(_)) => Err(StreamError::Protocol("the first message is not `welcome`")),
            None => Err(StreamError::Closed),
        }
    }

    /// Sends the current state of the worker.
    pub(crate) async fn send(&self, state: WorkerState) -> Result<(), StreamError> {
        let message = Some(Up::Observed(observed(state)));
        self.up.send(pb::SynchronizeRequest { message }).await.map_err(|_| StreamError::Closed)
    }

    /// Receives the next desired state.
    pub(crate) async fn receive(&mut self) -> Result<DesiredState, StreamError> {
        match self.down.message().await?.and_then(|response| response.message) {
            Some(Down::Desired(desired)) => Ok(parse_desired(desired)),
            Some(Down::Welcome(_)) => Err(StreamError::Protocol("a second `welcome`")),
            None => Err(StreamError::Closed),
        }
    }

    /// Closes the stream, and waits until the scheduler has recorded that and ended it, too.
    pub(crate) async fn sign_off(self) {
        let Self { up, mut down } = self;
        drop(up);
        while let Ok(Some(_)) = down.message().await {}
    }
}

impl From<AttemptPhase> for pb::LeasePhase {
    fn from(phase: AttemptPhase) -> Self {
        match phase {
            AttemptPhase::Preparing => Self::Preparing,
            AttemptPhase::Materializing => Self::Materializing,
            AttemptPhase::Running => Self::Running,
            AttemptPhase::Publishing => Self::Publishing,
            AttemptPhase::Ended => Self::Ended,
        }
    }
}

fn observed(state: WorkerState) -> pb::Observed {
    let leases = state.leases.into_iter().map(|LeaseState { lease, phase, inputs }| pb::ObservedLease {
        lease_id: lease.to_string(),
        phase: pb::LeasePhase::from(phase).into(),
        inputs: inputs.into_iter().map(input_progress).collect(),
    });
    pb::Observed {
        session_credential: state.credential,
        applied_generation: state.applied_generation,
        leases: leases.collect(),
        containers: state.containers,
        volumes: state.volumes,
        disk_free_bytes: state.disk_free_bytes,
        number: state.number,
    }
}

/// Converts the progress of an input.
pub(crate) fn input_progress(input: InputProgress) -> pb::InputProgress {
    let InputProgress { name, bytes_done, bytes_total, waits_for, relayed } = input;
    pb::InputProgress { name, bytes_done, bytes_total, waits_for, relayed }
}

fn parse_welcome(welcome: pb::Welcome) -> Result<Welcome, StreamError> {
    let worker = welcome.worker_id.parse().map_err(|_| StreamError::Protocol("worker_id is not a UUID"))?;
    Ok(Welcome {
        credential: welcome.session_credential,
        worker,
        incarnation: Incarnation(welcome.incarnation),
        session: Session(welcome.session),
        worker_ttl: duration_or(welcome.worker_ttl, Duration::from_secs(30)),
        heartbeat: duration_or(welcome.heartbeat, Duration::from_secs(5)),
        stop_after: duration_or(welcome.stop_after, Duration::from_secs(600)),
    })
}

fn duration_or(duration: Option<impl TryInto<Duration>>, default: Duration) -> Duration {
    duration.and_then(|duration| duration.try_into().ok()).unwrap_or(default)
}

fn parse_desired(desired: pb::Desired) -> DesiredState {
    DesiredState {
        generation: desired.generation,
        received: desired.observed_number,
        directive: match desired.directive() {
            pb::Directive::Run | pb::Directive::Unspecified => Directive::Run,
            pb::Directive::Cordon => Directive::Cordon,
            pb::Directive::Retire => Directive::Retire,
            pb::Directive::RegisterAgain => Directive::RegisterAgain,
        },
        leases: desired.leases.into_iter().filter_map(parse_lease).collect(),
    }
}

/// Parses a desired lease. `None`: its id is malformed.
fn parse_lease(lease: pb::DesiredLease) -> Option<DesiredLease> {
    let Ok(id) = lease.lease_id.parse::<LeaseId>() else {
        tracing::error!(lease.id = lease.lease_id, "cannot parse a desired lease: its id is not a UUID");
        return None;
    };
    let request = lease.action.map(|action| match action {
        Action::Run(run) => parse_run(id, run),
        Action::Stop(stop) if stop.workload_id.is_empty() => LeaseRequest::StopHeld {
            reason: stop_reason(stop.reason()),
            grace: duration_or(stop.grace, Duration::ZERO),
        },
        Action::Stop(stop) => LeaseRequest::Stop {
            attempt: stop.attempt_id.parse().ok(),
            reason: stop_reason(stop.reason()),
            token: stop.lease_token,
            grace: duration_or(stop.grace, Duration::ZERO),
        },
        Action::Hold(_) => LeaseRequest::Hold,
    });
    Some(DesiredLease { lease: id, request })
}

fn stop_reason(reason: pb::StopReason) -> FailureReason {
    match reason {
        pb::StopReason::Unspecified => FailureReason::StoppedBeforeStart,
        pb::StopReason::Cancelled => FailureReason::Cancelled,
        pb::StopReason::StartTimeout => FailureReason::StartTimeout,
        pb::StopReason::RunTimeout => FailureReason::RunTimeout,
        pb::StopReason::Interrupted => FailureReason::Interrupted,
        pb::StopReason::WorkerLost => FailureReason::WorkerLost,
        // Only driven leases have these reasons, and they report no failure.
        pb::StopReason::Released | pb::StopReason::Expired => FailureReason::Cancelled,
    }
}

fn parse_run(lease: LeaseId, run: pb::RunAttempt) -> LeaseRequest {
    let (attempt, token) = (run.attempt_id.parse().ok(), run.lease_token.clone());
    let task = || {
        Ok::<_, Status>(AttemptTask {
            lease,
            attempt: rpc::parse_id("attempt_id", &run.attempt_id)?,
            service: None,
            driven: None,
            workload: rpc::parse_id("workload_id", &run.workload_id)?,
            spec: rpc::spec::parse_accepted(rpc::required("spec", run.spec)?)?,
            token: run.lease_token,
            traceparent: run.traceparent,
        })
    };
    match task() {
        Ok(task) => LeaseRequest::Run(Box::new(task)),
        Err(status) => LeaseRequest::Invalid { attempt, token, why: status.message().to_owned() },
    }
}
