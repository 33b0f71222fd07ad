//! Descriptions of the events of a workload, for people and for programs.

use rpc::pb::scheduler::explain_request::Subject;
use rpc::pb::scheduler::{
    AttemptLocation, ExplainRequest, InputProgress, WaitingWorkload, watch_response::Event,
};
use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::client::connect::Connection;
use crate::ending::exit_code;
use crate::render::explanation;
use crate::render::json as shown;
use crate::render::labels;
use crate::render::table::{bytes, plain};

/// Maximum length of a line, in characters.
const WIDTH: usize = 1000;

/// Description of an event.
pub(crate) struct EventDescription {
    /// Name of the event, for programs.
    pub(crate) name: &'static str,
    /// Details for programs: an object.
    pub(crate) details: Value,
    /// Text for people. For a waiting workload, one line for each reason.
    pub(crate) text: String,
    /// Whether `gantry run` prints the text.
    pub(crate) is_news: bool,
}

/// Describes `event`.
pub(crate) fn describe_event(event: &Event) -> EventDescription {
    let (name, details, text, is_news) = match event {
        Event::Queued(queued) => {
            let text = match queued.reasons.as_slice() {
                [] => "waiting in the queue".to_owned(),
                [reason] => format!("waiting for a worker: {}", plain(reason, WIDTH)),
                reasons => {
                    let lines: Vec<_> = reasons.iter().map(|reason| plain(reason, WIDTH)).collect();
                    format!("waiting for a worker:\n  {}", lines.join("\n  "))
                }
            };
            ("queued", json!({ "reasons": queued.reasons }), text, !queued.reasons.is_empty())
        }
        Event::Placed(placed) => {
            let at = placed.location.as_ref();
            let details = json!({ "location": at.map(shown::location), "reason": placed.reason });
            let text = format!("placed on {}: {}", worker(at), plain(&placed.reason, WIDTH));
            ("placed", details, text, true)
        }
        Event::Preparing(_) => ("preparing", json!({}), "creating the container".to_owned(), false),
        Event::Materializing(materializing) => {
            let inputs = &materializing.inputs;
            let details = inputs.iter().map(|input| {
                let InputProgress { name, bytes_done, bytes_total, waits_for, relayed } = input;
                json!({ "name": name, "bytes_done": bytes_done, "bytes_total": bytes_total, "waits_for": waits_for, "relayed": relayed })
            });
            let details = json!({ "inputs": details.collect::<Vec<_>>() });
            ("materializing", details, describe_inputs(inputs), true)
        }
        Event::Running(running) => {
            let at = running.location.as_ref();
            let details = json!({ "location": at.map(shown::location) });
            ("running", details, format!("running on {}", worker(at)), false)
        }
        Event::Publishing(_) => ("publishing", json!({}), "publishing the outputs".to_owned(), false),
        Event::Finished(finished) => {
            let end = exit_code::end(finished, None);
            let outcome = crate::render::labels::outcome(finished.outcome()).unwrap_or("ended");
            let text =
                end.message.map_or_else(|| outcome.to_owned(), |message| format!("{outcome}: {message}"));
            ("finished", shown::finished(finished, end.code), text, false)
        }
    };
    EventDescription { name, details, text, is_news }
}

fn worker(at: Option<&AttemptLocation>) -> String {
    at.map_or_else(|| "a worker".to_owned(), |at| plain(&at.worker_name, WIDTH))
}

/// Describes the progress of copying inputs to the worker.
fn describe_inputs(inputs: &[InputProgress]) -> String {
    let waits = inputs.iter().filter(|input| !input.waits_for.is_empty());
    let waits: Vec<_> = waits
        .map(|InputProgress { name, waits_for, .. }| {
            format!("input {name} is not on the worker yet: {}", plain(waits_for, WIDTH))
        })
        .collect();
    if !waits.is_empty() {
        return waits.join("\n");
    }
    let names: Vec<_> = inputs.iter().map(|input| input.name.as_str()).collect();
    let of = |bytes: fn(&InputProgress) -> u64| inputs.iter().map(bytes).sum::<u64>();
    let (done, total) = (of(|input| input.bytes_done), of(|input| input.bytes_total));
    let far = if total == 0 { String::new() } else { format!(": {} of {}", bytes(done), bytes(total)) };
    let route = if inputs.iter().any(|input| input.relayed) { " through the streamer" } else { "" };
    format!("copying {} to the worker{route}{far}", names.join(", "))
}

/// Query for the reason why a workload waits, repeated each time that the reason changes.
#[derive(Default)]
pub(crate) struct WaitReasons {
    queries: JoinSet<Option<WaitReason>>,
    last: Option<String>,
}

/// Reason why a workload waits, with the expected wait.
pub(crate) struct WaitReason {
    /// Details for programs.
    pub(crate) details: Value,
    /// Text for people.
    pub(crate) text: String,
    /// Part of the text that must change before the text is printed again.
    key: String,
}

impl WaitReasons {
    /// Starts a query, because the reasons have changed. `otherwise` is used if the scheduler does
    /// not explain the workload.
    pub(crate) fn changed(&mut self, connection: &Connection, workload: &str, otherwise: EventDescription) {
        self.over();
        let subject = Subject::Workload(WaitingWorkload {
            team: connection.team.clone(),
            workload_id: workload.to_owned(),
        });
        let request = ExplainRequest { subject: Some(subject), max_workers: 1, workers: Vec::new() };
        let mut placements = connection.placements();
        self.queries.spawn(async move {
            match placements.explain(request).await {
                Ok(response) => {
                    let response = response.into_inner();
                    let details = json!({
                        "queue_position": response.queue_position,
                        "reason": response.summary,
                        "expected_wait_seconds": labels::expected_wait(&response).map(|wait| wait.as_secs_f64()),
                    });
                    Some(WaitReason { details, text: explanation::short(&response), key: response.summary })
                }
                // The workload no longer waits.
                Err(status) if status.code() == tonic::Code::FailedPrecondition => None,
                Err(_) => Some(WaitReason {
                    details: otherwise.details,
                    key: otherwise.text.clone(),
                    text: otherwise.text,
                }),
            }
        });
    }

    /// Ends the query, because the workload no longer waits.
    pub(crate) fn over(&mut self) {
        self.queries = JoinSet::new();
    }

    /// Returns the reason once it is known, if it has changed. `None`: no query runs. Cancel safe.
    pub(crate) async fn next(&mut self) -> Option<WaitReason> {
        while let Some(answered) = self.queries.join_next().await {
            let Ok(Some(reason)) = answered else { continue };
            if self.last.as_ref() != Some(&reason.key) {
                self.last = Some(reason.key.clone());
                return Some(reason);
            }
        }
        None
    }
}
