//! Explanation of a workload that no longer waits: where it runs, or how it ended.

use std::time::Duration;

use prost_types::Timestamp;
use rpc::pb::runtime::{GetAttendanceRequest, GetAttendanceResponse};
use rpc::pb::scheduler::watch_response::Event;
use rpc::pb::scheduler::{InputProgress, Workload, WorkloadState};
use serde_json::{Value, json};

use crate::client::connect::Connection;
use crate::client::queries;
use crate::follow::watch::Watch;
use crate::render::json;
use crate::render::labels;
use crate::render::stdout::{print, print_json};
use crate::render::table::{bytes, fields, plain};

/// Maximum width of a cell, in characters. Messages of Gantry are shorter.
const WIDTH: usize = 1000;

/// Explains a workload that no longer waits.
pub(super) async fn show(connection: &Connection, id: &str, as_json: bool) -> anyhow::Result<()> {
    let workload = queries::workload(connection, "explain", id).await?;
    let inputs = missing_inputs(connection, &workload).await;
    if as_json {
        let mut document = json::workload(&workload);
        document["missing_inputs"] = inputs.iter().map(MissingInput::json).collect();
        return print_json(&document);
    }
    let standing = queries::standing(connection, &workload).await?;
    let attendance = attendance(connection, &workload).await;
    print(&describe_workload(&workload, &standing, attendance.as_ref(), &inputs))
}

/// An input that is not on the worker yet.
#[derive(Debug, Clone, PartialEq)]
struct MissingInput {
    progress: InputProgress,
    /// Since when the copy waits. `None`: it continues.
    since: Option<Timestamp>,
}

impl MissingInput {
    fn json(&self) -> Value {
        json!({
            "name": self.progress.name,
            "bytes_done": self.progress.bytes_done,
            "bytes_total": self.progress.bytes_total,
            "waits_for": self.progress.waits_for,
            "since": self.since.as_ref().map(labels::instant),
        })
    }

    fn text(&self) -> String {
        let InputProgress { name, bytes_done, bytes_total, waits_for, relayed } = &self.progress;
        let name = plain(name, WIDTH);
        match &self.since {
            Some(since) => format!(
                "input {name}, since {} ({} ago): {}",
                labels::instant(since),
                labels::ago(Some(since)),
                plain(waits_for, WIDTH)
            ),
            None => {
                let route = if *relayed { " through the streamer" } else { "" };
                format!("input {name}: {} of {} are copied{route}", bytes(*bytes_done), bytes(*bytes_total))
            }
        }
    }
}

/// Time limit for the next past event of a workload.
const EVENT_PATIENCE: Duration = Duration::from_millis(500);

/// Returns the inputs that a placed workload waits for.
async fn missing_inputs(connection: &Connection, workload: &Workload) -> Vec<MissingInput> {
    let mut inputs = Vec::new();
    if !matches!(workload.state(), WorkloadState::Assigned) {
        return inputs;
    }
    let mut watch = Watch::new(connection, workload.workload_id.clone());
    // All past events are sent at once.
    while let Ok(Ok((at, event))) = tokio::time::timeout(EVENT_PATIENCE, watch.next_at()).await {
        inputs = missing_after(inputs, at, event);
    }
    inputs
}

/// Returns the missing inputs after an event.
fn missing_after(before: Vec<MissingInput>, at: Timestamp, event: Event) -> Vec<MissingInput> {
    let Event::Materializing(materializing) = event else { return Vec::new() };
    let inputs = materializing.inputs.into_iter().map(|progress| {
        let known = before.iter().find(|input| input.progress.name == progress.name);
        let since = known.and_then(|input| input.since).unwrap_or(at);
        MissingInput { since: (!progress.waits_for.is_empty()).then_some(since), progress }
    });
    inputs.collect()
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
    inputs: &[MissingInput],
) -> String {
    let there = workload.location.clone().unwrap_or_default();
    let on = match there.worker_name.as_str() {
        "" => String::new(),
        name => format!(" on {}", plain(name, WIDTH)),
    };
    let summary = match (labels::outcome(workload.outcome()), workload.state()) {
        (Some(outcome), _) => format!("the workload has ended{on}: {outcome}"),
        (None, WorkloadState::Assigned) if !inputs.is_empty() => {
            format!("the workload is placed{on} and waits for its inputs")
        }
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
        ("waits for", inputs.iter().map(MissingInput::text).collect::<Vec<_>>().join("\n")),
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
        let summary = describe_workload(&workload, "", None, &[]);
        assert!(summary.starts_with("the workload runs on big\n"), "{summary}");
        workload.stopping = rpc::pb::scheduler::StopReason::Cancelled.into();
        let stops = describe_workload(&workload, "stalled, silent for 13 s", None, &[]);
        assert!(stops.starts_with("the workload runs on big, and is being stopped (CANCELLED)\n"), "{stops}");
        assert!(stops.contains("w (stalled, silent for 13 s)"), "{stops}");
        workload.stopping = 0;
        assert!(summary.contains("attempt") && summary.contains("1970-01-01"), "{summary}");
        workload.state = WorkloadState::Finished.into();
        workload.outcome = Outcome::Errored.into();
        workload.failure = Some(Failure { reason: "RUN_TIMEOUT".to_owned(), message: "too long".to_owned() });
        let summary = describe_workload(&workload, "", None, &[]);
        assert!(summary.starts_with("the workload has ended on big: errored\n"), "{summary}");
        assert!(summary.contains("RUN_TIMEOUT") && summary.contains("too long"), "{summary}");
    }

    #[test]
    fn placed_workload_names_the_inputs_that_it_waits_for() {
        use rpc::pb::scheduler::Materializing;

        let at = |seconds| Timestamp { seconds, nanos: 0 };
        let event = |waits_for: &str| {
            let far = InputProgress {
                name: "far".to_owned(),
                bytes_done: 5,
                bytes_total: 9,
                waits_for: waits_for.to_owned(),
                relayed: false,
            };
            let near = InputProgress { name: "near".to_owned(), bytes_total: 9, ..Default::default() };
            Event::Materializing(Materializing { inputs: vec![far, near] })
        };
        let mut inputs = missing_after(Vec::new(), at(0), event(""));
        for (seconds, waits_for) in [(60, "worker one at http://a:1: refused"), (90, "worker one: gone")] {
            inputs = missing_after(inputs, at(seconds), event(waits_for));
        }
        let workload = Workload { state: WorkloadState::Assigned.into(), ..Default::default() };
        let text = describe_workload(&workload, "", None, &inputs);
        assert!(text.starts_with("the workload is placed and waits for its inputs\n"), "{text}");
        assert!(text.contains("input far, since 1970-01-01T00:01:00Z ("), "{text}");
        assert!(
            text.contains(" ago): worker one: gone\n") && text.contains("input near: 0 B of 9 B"),
            "{text}"
        );
        assert_eq!(missing_after(inputs, at(100), Event::Preparing(Default::default())), []);
    }
}
