//! Explanation of a workload that no longer waits: where it runs, or how it ended.

use std::time::Duration;

use prost_types::Timestamp;
use rpc::pb::runtime::{GetAttendanceRequest, GetAttendanceResponse};
use rpc::pb::scheduler::{Workload, WorkloadState};

use crate::client::connect::Connection;
use crate::client::queries;
use crate::render::json;
use crate::render::labels;
use crate::render::stdout::{print, print_json};
use crate::render::table::{fields, plain};

/// Maximum width of a cell, in characters. Messages of Gantry are shorter.
const WIDTH: usize = 1000;

/// Explains a workload that no longer waits.
pub(super) async fn show(connection: &Connection, id: &str, as_json: bool) -> anyhow::Result<()> {
    let workload = queries::workload(connection, "explain", id).await?;
    if as_json {
        return print_json(&json::workload(&workload));
    }
    let standing = queries::standing(connection, &workload).await?;
    let attendance = attendance(connection, &workload).await;
    print(&describe_workload(&workload, &standing, attendance.as_ref()))
}

/// Asks whether a caller is attached to a running workload. `None`: the gateway does not answer.
async fn attendance(connection: &Connection, workload: &Workload) -> Option<GetAttendanceResponse> {
    let there = workload.location.clone().filter(|_| workload.state() == WorkloadState::Running)?;
    let request = GetAttendanceRequest {
        team: connection.team.clone(),
        process_id: there.attempt_id,
        worker_id: there.worker_id,
    };
    let mut containers = connection.containers_at(&there.gateway_endpoint).await.ok()?;
    let asked = tokio::time::timeout(GATEWAY_PATIENCE, containers.get_attendance(request)).await;
    Some(asked.ok()?.ok()?.into_inner())
}

/// Time limit for a gateway to say whether a caller is attached.
const GATEWAY_PATIENCE: Duration = Duration::from_secs(2);

/// Describes what happens to a process without a caller. Empty: a caller is attached.
fn unattended(attendance: &GetAttendanceResponse) -> String {
    let since = attendance.unattended_since.as_ref();
    match (since, attendance.is_abandoned) {
        (Some(since), true) => format!(
            "detached {} ago and did not return; the input has ended, and the oldest output is dropped",
            labels::ago(Some(since))
        ),
        (Some(since), false) => {
            let left = attendance.abandoned_at.as_ref().map(labels::instant).unwrap_or_default();
            let ago = labels::ago(Some(since));
            format!(
                "detached {ago} ago; unless a caller attaches before {left}, the input ends and the oldest output is dropped"
            )
        }
        (None, _) => String::new(),
    }
}

/// Formats the explanation. `standing` describes the worker, if it is not running normally.
fn describe_workload(
    workload: &Workload,
    standing: &str,
    attendance: Option<&GetAttendanceResponse>,
) -> String {
    let there = workload.location.clone().unwrap_or_default();
    let on = match there.worker_name.as_str() {
        "" => String::new(),
        name => format!(" on {}", plain(name, WIDTH)),
    };
    let summary = match (labels::outcome(workload.outcome()), workload.state()) {
        (Some(outcome), _) => format!("the workload has ended{on}: {outcome}"),
        (None, WorkloadState::Assigned | WorkloadState::Starting) => {
            format!("the workload is placed{on} and starting")
        }
        (None, WorkloadState::Running) => format!("the workload runs{on}"),
        (None, WorkloadState::Settling) => {
            format!("the command has ended{on}, and its outputs are being published")
        }
        (None, state) => format!("the workload is {}{on}", labels::workload_state(state)),
    };
    let summary = match labels::stop_reason(workload.stopping()) {
        "" => summary,
        why => format!("{summary}, and is being stopped ({why})"),
    };
    let its_worker = match standing {
        "" => there.worker_id,
        standing => format!("{} ({standing})", there.worker_id),
    };
    let since = |at: &Option<Timestamp>| {
        at.as_ref().map(|at| format!("{} ({} ago)", labels::instant(at), labels::ago(Some(at))))
    };
    let failure = workload.failure.as_ref().map(|failure| plain(&failure.message, WIDTH));
    let shown = [
        ("worker", its_worker),
        ("attempt", there.attempt_id),
        ("caller", attendance.map(unattended).unwrap_or_default()),
        ("submitted", since(&workload.submitted_at).unwrap_or_default()),
        ("started", since(&workload.started_at).unwrap_or_default()),
        ("finished", since(&workload.finished_at).unwrap_or_default()),
        ("end", labels::end(workload)),
        ("failure", failure.unwrap_or_default()),
    ];
    format!("{summary}\n\n{}", fields(&shown))
}

#[cfg(test)]
mod tests {
    use rpc::pb::scheduler::{AttemptLocation, Failure, Outcome};

    use super::*;

    #[test]
    fn text_has_worker_or_outcome() {
        let there = AttemptLocation {
            worker_id: "w".to_owned(),
            worker_name: "big".to_owned(),
            attempt_id: "a".to_owned(),
            ..Default::default()
        };
        let mut workload = Workload {
            state: WorkloadState::Running.into(),
            location: Some(there),
            started_at: Some(Timestamp { seconds: 60, nanos: 0 }),
            ..Default::default()
        };
        let summary = describe_workload(&workload, "", None);
        assert!(summary.starts_with("the workload runs on big\n"), "{summary}");
        workload.stopping = rpc::pb::scheduler::StopReason::Cancelled.into();
        let stops = describe_workload(&workload, "stalled, silent for 13 s", None);
        assert!(stops.starts_with("the workload runs on big, and is being stopped (CANCELLED)\n"), "{stops}");
        assert!(stops.contains("w (stalled, silent for 13 s)"), "{stops}");
        workload.stopping = 0;
        assert!(summary.contains("attempt") && summary.contains("1970-01-01"), "{summary}");
        workload.state = WorkloadState::Finished.into();
        workload.outcome = Outcome::Errored.into();
        workload.failure = Some(Failure { reason: "RUN_TIMEOUT".to_owned(), message: "too long".to_owned() });
        let summary = describe_workload(&workload, "", None);
        assert!(summary.starts_with("the workload has ended on big: errored\n"), "{summary}");
        assert!(summary.contains("RUN_TIMEOUT") && summary.contains("too long"), "{summary}");
    }
}
