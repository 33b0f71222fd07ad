//! `gantry explain` and `gantry run --explain`: where a workload would be placed, or why it is not. [`crate::why`] explains the rest.

use prost_types::Timestamp;
use rpc::Reason;
use rpc::pb::scheduler::explain_request::Subject;
use rpc::pb::scheduler::{
    ExplainRequest, ExplainResponse, Verdict, WaitingWorkload, WorkerExplanation, Workload, WorkloadSpec,
    WorkloadState,
};

use crate::connect::{Connection, repeat};
use crate::stdout::{print, print_json};
use crate::table::{fields, plain, render};
use crate::{error, json, list, why, words};

/// How wide a cell is at most.
const WIDTH: usize = 100;

/// `gantry explain`: the scheduler says why a workload waits, or what became of it, and what it does not know the artifact store may.
pub(crate) async fn whatever(connection: &Connection, id: &str, as_json: bool) -> anyhow::Result<()> {
    let waiting = WaitingWorkload { team: connection.team.clone(), workload_id: id.to_owned() };
    match explain(connection, Subject::Workload(waiting), as_json).await {
        Err(error) if is_for(&error, Reason::WorkloadNotFound) => why::explain(connection, id, as_json).await,
        Err(error) if is_for(&error, Reason::WorkloadNotQueued) => placed(connection, id, as_json).await,
        answered => answered,
    }
}

fn is_for(error: &anyhow::Error, reason: Reason) -> bool {
    error::refusal(error).is_some_and(|refusal| refusal.is(reason))
}

/// A workload that waits no more: where it runs, or how it ended.
async fn placed(connection: &Connection, id: &str, as_json: bool) -> anyhow::Result<()> {
    let workload = list::workload(connection, "explain", id).await?;
    if as_json { print_json(&json::workload(&workload)) } else { print(&waits_no_more(&workload)) }
}

fn waits_no_more(workload: &Workload) -> String {
    let there = workload.whereabouts.clone().unwrap_or_default();
    let on = match there.worker_name.as_str() {
        "" => String::new(),
        name => format!(" on {}", plain(name, WIDTH)),
    };
    let said = match (words::outcome(workload.outcome()), workload.state()) {
        (Some(outcome), _) => format!("it has ended{on}: {outcome}"),
        (None, WorkloadState::Assigned | WorkloadState::Starting) => {
            format!("it was placed{on}, and is being started")
        }
        (None, WorkloadState::Running) => format!("it runs{on}"),
        (None, WorkloadState::Settling) => format!("it has ended{on}, and its outputs are being published"),
        (None, state) => format!("it is {}{on}", words::workload_state(state)),
    };
    let since = |at: &Option<Timestamp>| {
        at.as_ref().map(|at| format!("{} ({} ago)", words::instant(at), words::ago(Some(at))))
    };
    let failure = workload.failure.as_ref().map(|failure| plain(&failure.message, WIDTH));
    let shown = [
        ("worker", there.worker_id),
        ("attempt", there.attempt_id),
        ("submitted", since(&workload.submitted_at).unwrap_or_default()),
        ("started", since(&workload.started_at).unwrap_or_default()),
        ("finished", since(&workload.finished_at).unwrap_or_default()),
        ("end", words::end(workload)),
        ("failure", failure.unwrap_or_default()),
    ];
    format!("{said}\n\n{}", fields(&shown))
}

/// `gantry run --explain`
pub(crate) async fn spec(connection: &Connection, spec: WorkloadSpec, as_json: bool) -> anyhow::Result<()> {
    explain(connection, Subject::Spec(spec), as_json).await
}

async fn explain(connection: &Connection, subject: Subject, as_json: bool) -> anyhow::Result<()> {
    let (placements, request) = (connection.placements(), ExplainRequest { subject: Some(subject) });
    let response =
        repeat("cannot explain it", async || placements.clone().explain(request.clone()).await).await?;
    if as_json { print_json(&json::explanation(&response)) } else { print(&text(&response)) }
}

fn text(response: &ExplainResponse) -> String {
    let ExplainResponse { queue_position, workers, unblocked_by, .. } = response;
    let best = workers.first().map_or("", |worker| worker.worker_name.as_str());
    let mut text = match response.verdict() {
        Verdict::Placed => format!("it is placed at once, on {}\n", plain(best, WIDTH)),
        Verdict::NotNow => format!("it waits, as number {queue_position} of the queue\n"),
        Verdict::Never => "no worker that is known could ever run it\n".to_owned(),
        Verdict::Unspecified => "the scheduler gives no verdict that is known here\n".to_owned(),
    };
    if !workers.is_empty() {
        text.push('\n');
        text.push_str(&render(&["WORKER", "SAYS"], &workers.iter().map(row).collect::<Vec<_>>()));
    }
    if !unblocked_by.is_empty() {
        text.push_str("\nIt is placed as soon as\n");
        for line in unblocked_by {
            text.push_str(&format!("  {}\n", plain(line, WIDTH)));
        }
    }
    text
}

fn row(worker: &WorkerExplanation) -> Vec<String> {
    let refusals: Vec<_> = worker.refusals.iter().map(|refusal| refusal.message.as_str()).collect();
    let says =
        if refusals.is_empty() { format!("would do: {}", worker.standing) } else { refusals.join(", ") };
    vec![worker.worker_name.clone(), plain(&says, WIDTH)]
}

#[cfg(test)]
mod tests {
    use rpc::pb::scheduler::{Failure, Outcome, PlacementRefusal, Whereabouts};

    use super::*;

    #[test]
    fn what_waits_no_more_says_where_it_runs_or_how_it_ended() {
        let there = Whereabouts {
            worker_id: "w".to_owned(),
            worker_name: "big".to_owned(),
            attempt_id: "a".to_owned(),
            ..Default::default()
        };
        let mut workload = Workload {
            state: WorkloadState::Running.into(),
            whereabouts: Some(there),
            started_at: Some(Timestamp { seconds: 60, nanos: 0 }),
            ..Default::default()
        };
        let said = waits_no_more(&workload);
        assert!(said.starts_with("it runs on big\n"), "{said}");
        assert!(said.contains("attempt") && said.contains("1970-01-01"), "{said}");
        workload.state = WorkloadState::Finished.into();
        workload.outcome = Outcome::Errored.into();
        workload.failure = Some(Failure { reason: "RUN_TIMEOUT".to_owned(), message: "too long".to_owned() });
        let said = waits_no_more(&workload);
        assert!(said.starts_with("it has ended on big: errored\n"), "{said}");
        assert!(said.contains("RUN_TIMEOUT") && said.contains("too long"), "{said}");
    }

    #[test]
    fn each_worker_says_why_not_and_what_would_help() {
        let refusal = |message: &str| PlacementRefusal { message: message.to_owned(), ..Default::default() };
        let response = ExplainResponse {
            verdict: Verdict::NotNow.into(),
            queue_position: 3,
            workers: vec![WorkerExplanation {
                worker_name: "one".to_owned(),
                refusals: vec![refusal("is landing"), refusal("is full (2 of 2 tasks)")],
                ..Default::default()
            }],
            unblocked_by: vec!["one: it is told to run again, and one of its tasks ends".to_owned()],
        };
        let expected = "it waits, as number 3 of the queue\n\nWORKER  SAYS\none     is landing, is full (2 of 2 tasks)\n\n\
            It is placed as soon as\n  one: it is told to run again, and one of its tasks ends\n";
        assert_eq!(text(&response), expected);
    }
}
