//! `gantry explain` and `gantry run --explain`: where a workload would be placed, or why it is not. [`crate::why`] explains the rest.

use rpc::Reason;
use rpc::pb::scheduler::explain_request::Subject;
use rpc::pb::scheduler::{
    ExplainRequest, ExplainResponse, Verdict, WaitingWorkload, WorkerExplanation, WorkloadSpec,
};

use crate::connect::{Connection, repeat};
use crate::error;
use crate::json;
use crate::stdout::{print, print_json};
use crate::table::{plain, render};
use crate::why;

/// How wide a cell is at most.
const WIDTH: usize = 100;

/// `gantry explain`: the scheduler says why a workload waits, and what it does not know the artifact store may.
pub(crate) async fn whatever(connection: &Connection, id: &str, as_json: bool) -> anyhow::Result<()> {
    let waiting = WaitingWorkload { team: connection.team.clone(), workload_id: id.to_owned() };
    match explain(connection, Subject::Workload(waiting), as_json).await {
        Err(error) if is_no_workload(&error) => why::explain(connection, id, as_json).await,
        answered => answered,
    }
}

fn is_no_workload(error: &anyhow::Error) -> bool {
    error::refusal(error).is_some_and(|refusal| refusal.is(Reason::WorkloadNotFound))
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
    use rpc::pb::scheduler::PlacementRefusal;

    use super::*;

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
