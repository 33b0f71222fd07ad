//! Words for the enums, times and amounts of the protos.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use prost_types::Timestamp;
use rpc::pb::artifacts::{
    ArtifactState, ExplainedState, ImportState, InventoryState, ObjectKind, VolumePurpose,
};
use rpc::pb::scheduler::image::Source as ImageSource;
use rpc::pb::scheduler::{
    DesiredWorkerState, ExplainResponse, Image, LeaseEnd, LeaseState, Outcome, PlacementKind,
    ResourceRequests, StopReason, Verdict, Worker, WorkerState, Workload, WorkloadKind, WorkloadSpec,
    WorkloadState, exit::Status,
};

use crate::render::table::{bytes, duration};

/// Place of the bytes of a small tree.
pub(crate) const IN_STORE: &str = "in the artifact store itself";

/// Explanation of the state of a sealed artifact that neither a worker nor the store has.
pub(crate) const BYTES_LOST: &str = "its bytes are lost";

pub(crate) fn worker_state(state: WorkerState) -> &'static str {
    match state {
        WorkerState::Unspecified => "unknown",
        WorkerState::Running => "running",
        WorkerState::Stalled => "stalled",
        WorkerState::Lost => "lost",
    }
}

/// Returns the word for an enum value of a proto. `LEASE_STATE_GRANTED` becomes `granted`.
fn word(name: &str, prefix: &str) -> String {
    match name.trim_start_matches(prefix) {
        "UNSPECIFIED" => "unknown".to_owned(),
        word => word.to_lowercase().replace('_', " "),
    }
}

/// Describes the state of a worker: its contact, and everything else that decides whether it gets
/// work.
pub(crate) fn standing(worker: &Worker) -> String {
    let mut words = vec![worker_state(worker.state())];
    match (worker.desired(), &worker.drained_at) {
        (DesiredWorkerState::Cordon, Some(_)) if worker.leases == 0 => words.extend(["cordoned", "drained"]),
        (DesiredWorkerState::Cordon, _) => words.push("cordoned"),
        (DesiredWorkerState::Retire, _) => words.push("retiring"),
        (DesiredWorkerState::Run | DesiredWorkerState::Unspecified, _) => {}
    }
    if !worker.unsupported_versions.is_empty() {
        words.push("incompatible");
    }
    let mut standing = words.join(", ");
    if worker.quarantined_until.is_some() {
        standing += ", quarantined";
        if !worker.failed_team.is_empty() {
            standing += &format!(" for team {}", worker.failed_team);
        }
    }
    standing
}

/// Describes the state of a worker that is not in contact.
pub(crate) fn silent(worker: &Worker) -> String {
    format!("{}, silent for {}", standing(worker), ago(worker.last_contact_at.as_ref()))
}

/// Formats thousandths of a core as cores, such as `4` or `0.5`.
pub(crate) fn cores(millis: u64) -> String {
    format!("{}.{:03}", millis / 1000, millis % 1000).trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// Returns the word for the desired state of a worker.
pub(crate) fn desire(desire: DesiredWorkerState) -> String {
    word(desire.as_str_name(), "DESIRED_WORKER_STATE_")
}

/// Returns whether a workload in this state holds a lease.
pub(crate) fn holds_lease(state: WorkloadState) -> bool {
    matches!(state, WorkloadState::Assigned | WorkloadState::Starting | WorkloadState::Running)
}

pub(crate) fn verdict(verdict: Verdict) -> String {
    word(verdict.as_str_name(), "VERDICT_")
}

/// Formats an image as `--image` takes it.
pub(crate) fn image(image: Option<&Image>) -> String {
    match image.and_then(|image| image.source.as_ref()) {
        Some(ImageSource::ArtifactId(artifact)) => format!("artifact:{artifact}"),
        Some(ImageSource::ResourceType(name)) => format!("resource-type:{name}"),
        Some(ImageSource::Reference(reference)) => reference.clone(),
        Some(ImageSource::Host(_)) | None => "host".to_owned(),
    }
}

pub(crate) fn kind(kind: WorkloadKind) -> &'static str {
    match kind {
        WorkloadKind::Unspecified => "unknown",
        WorkloadKind::Task => "task",
        WorkloadKind::Get => "get",
        WorkloadKind::Put => "put",
        WorkloadKind::Check => "check",
    }
}

pub(crate) fn workload_state(state: WorkloadState) -> &'static str {
    match state {
        WorkloadState::Unspecified => "unknown",
        WorkloadState::Accepted => "accepted",
        WorkloadState::Pending => "pending",
        WorkloadState::Assigned => "assigned",
        WorkloadState::Starting => "starting",
        WorkloadState::Running => "running",
        WorkloadState::Settling => "settling",
        WorkloadState::Finished => "finished",
    }
}

/// Returns the word for an outcome. `None`: the workload has not ended.
pub(crate) fn outcome(outcome: Outcome) -> Option<&'static str> {
    match outcome {
        Outcome::Unspecified => None,
        Outcome::Succeeded => Some("succeeded"),
        Outcome::Failed => Some("failed"),
        Outcome::Errored => Some("errored"),
        Outcome::Aborted => Some("aborted"),
    }
}

/// Describes how a workload ended, such as `exit 3`, `signal 9` or `RUN_TIMEOUT`.
pub(crate) fn end(workload: &Workload) -> String {
    if let Some(failure) = &workload.failure {
        return failure.reason.clone();
    }
    match workload.exit.as_ref().and_then(|exit| exit.status.as_ref()) {
        Some(Status::Code(code)) => format!("exit {code}"),
        Some(Status::Signal(signal)) => format!("signal {signal}"),
        Some(Status::OutOfMemory(_)) => "out of memory".to_owned(),
        None => String::new(),
    }
}

pub(crate) fn artifact_state(state: ArtifactState) -> &'static str {
    match state {
        ArtifactState::Unspecified => "unknown",
        ArtifactState::Open => "open",
        ArtifactState::Sealed => "sealed",
        ArtifactState::Deleting => "deleting",
    }
}

pub(crate) fn inventory_state(state: InventoryState) -> &'static str {
    match state {
        InventoryState::Unspecified => "unknown",
        InventoryState::Creating => "creating",
        InventoryState::Created => "created",
        InventoryState::Unconfirmed => "unconfirmed",
        InventoryState::Lost => "lost",
        InventoryState::Destroying => "destroying",
        InventoryState::Sweeping => "sweeping",
    }
}

pub(crate) fn import_state(state: ImportState) -> String {
    word(state.as_str_name(), "IMPORT_STATE_")
}

pub(crate) fn purpose(purpose: VolumePurpose) -> String {
    word(purpose.as_str_name(), "VOLUME_PURPOSE_")
}

/// Returns the word for the state of an object of the artifact store.
pub(crate) fn explained_state(state: ExplainedState) -> String {
    word(state.as_str_name(), "EXPLAINED_STATE_")
}

/// Returns the reason, as in `docs/errors.md`, for which an attempt or a lease must stop. Empty: it
/// need not stop.
pub(crate) fn stop_reason(reason: StopReason) -> &'static str {
    match reason {
        StopReason::Unspecified => "",
        StopReason::Cancelled => "CANCELLED",
        StopReason::StartTimeout => "START_TIMEOUT",
        StopReason::RunTimeout => "RUN_TIMEOUT",
        StopReason::Interrupted => "INTERRUPTED",
        StopReason::WorkerLost => "WORKER_LOST",
        StopReason::Released => "RELEASED",
        StopReason::Expired => "EXPIRED",
    }
}

/// Returns the word for a kind of object of the artifact store.
pub(crate) fn thing(thing: ObjectKind) -> &'static str {
    match thing {
        ObjectKind::Unspecified => "unknown",
        ObjectKind::Artifact => "artifact",
        ObjectKind::Volume => "volume",
        ObjectKind::Container => "container",
        ObjectKind::Build => "build",
        ObjectKind::Workload => "workload",
        ObjectKind::Attempt => "attempt",
        ObjectKind::Worker => "worker",
        ObjectKind::Transfer => "transfer",
        ObjectKind::ResourceCache => "resource cache",
        ObjectKind::TaskCache => "task cache",
        ObjectKind::BaseResourceType => "base resource type",
    }
}

pub(crate) fn yes_or_no(it_is: bool) -> &'static str {
    if it_is { "yes" } else { "no" }
}

/// Formats an instant as RFC 3339 in UTC.
pub(crate) fn instant(at: &Timestamp) -> String {
    at.to_string()
}

/// Formats the time since an instant, by the local clock. Empty: there is no instant.
pub(crate) fn ago(at: Option<&Timestamp>) -> String {
    let Some(at) = at else { return String::new() };
    duration(since(at))
}

/// Returns the time since an instant, by the local clock.
pub(crate) fn since(at: &Timestamp) -> Duration {
    passed().saturating_sub(since_1970(at))
}

/// Returns the time until an instant, by the local clock. `None`: the instant has passed.
pub(crate) fn from_now(at: &Timestamp) -> Option<Duration> {
    since_1970(at).checked_sub(passed()).filter(|left| !left.is_zero())
}

/// Returns the current time of the local clock.
pub(crate) fn now() -> Timestamp {
    SystemTime::now().into()
}

fn passed() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

fn since_1970(at: &Timestamp) -> Duration {
    Duration::new(u64::try_from(at.seconds).unwrap_or(0), u32::try_from(at.nanos).unwrap_or(0))
}

/// Formats the free disk space of a worker. Some workers do not report it.
pub(crate) fn free_disk(worker: &Worker) -> String {
    match worker.capacity.unwrap_or_default().disk_bytes {
        0 => "unknown".to_owned(),
        _ => bytes(worker.disk_free_bytes),
    }
}

/// Formats a size. Empty: the size is 0.
pub(crate) fn size(size: u64) -> String {
    if size == 0 { String::new() } else { bytes(size) }
}

/// Lists the reasons for which a worker gets no work.
pub(crate) fn no_work(worker: &Worker) -> String {
    worker.refusals.iter().map(|refusal| refusal.message.as_str()).collect::<Vec<_>>().join("; ")
}

/// Joins the arguments of a workload with spaces.
pub(crate) fn command(spec: Option<&WorkloadSpec>) -> String {
    let arguments = spec.into_iter().flat_map(|spec| &spec.command);
    arguments.map(|argument| String::from_utf8_lossy(argument).into_owned()).collect::<Vec<_>>().join(" ")
}

/// Returns the expected wait of a workload.
pub(crate) fn expected_wait(response: &ExplainResponse) -> Option<Duration> {
    response.expected_wait.and_then(|wait| Duration::try_from(wait).ok())
}

/// Formats reserved amounts. Empty: nothing is reserved.
pub(crate) fn amounts(requests: &ResourceRequests) -> String {
    let amounts = [
        (
            requests.cpu_millis,
            format!(
                "{} core{}",
                cores(requests.cpu_millis),
                if requests.cpu_millis == 1000 { "" } else { "s" }
            ),
        ),
        (requests.memory_bytes, bytes(requests.memory_bytes)),
        (requests.disk_bytes, format!("{} of disk", bytes(requests.disk_bytes))),
    ];
    let asked: Vec<_> = amounts.into_iter().filter(|(amount, _)| *amount > 0).map(|(_, text)| text).collect();
    asked.join(", ")
}

pub(crate) fn lease_kind(kind: PlacementKind) -> String {
    word(kind.as_str_name(), "PLACEMENT_KIND_")
}

pub(crate) fn lease_state(state: LeaseState) -> String {
    word(state.as_str_name(), "LEASE_STATE_")
}

/// Describes why a lease ended. `None`: the lease has not ended.
pub(crate) fn lease_end(end: LeaseEnd) -> Option<&'static str> {
    Some(match end {
        LeaseEnd::Unspecified => return None,
        LeaseEnd::Released => "its holder released it",
        LeaseEnd::Reported => "its worker reported the end of the attempt",
        LeaseEnd::Expired => "its holder did not renew it in time",
        LeaseEnd::Stopped => "it was stopped before anything started, or its worker was lost",
        LeaseEnd::Lost => {
            "its worker was silent for too long, has a new incarnation, was taken out of service, or does not know the lease"
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instants_and_ages_are_formatted() {
        assert_eq!(instant(&Timestamp { seconds: 1_700_000_000, nanos: 0 }), "2023-11-14T22:13:20Z");
        assert_eq!(ago(None), "");
        assert_eq!(from_now(&Timestamp { seconds: 1_700_000_000, nanos: 0 }), None);
        let day = passed() + Duration::from_secs(24 * 60 * 60);
        let day = Timestamp { seconds: i64::try_from(day.as_secs()).expect("a number"), nanos: 0 };
        assert_eq!(from_now(&day).map(duration).as_deref(), Some("23 h"));
        assert_eq!(ago(Some(&Timestamp { seconds: i64::MAX, nanos: 0 })), "0 ms");
    }
}
