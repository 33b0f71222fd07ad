//! What happens to a workload, in words and for programs.

use rpc::pb::scheduler::explain_request::Subject;
use rpc::pb::scheduler::{
    ExplainRequest, InputProgress, WaitingWorkload, Whereabouts, watch_response::Event,
};
use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::client::connect::Connection;
use crate::ending::exit_code;
use crate::render::explanation;
use crate::render::json as shown;
use crate::render::labels;
use crate::render::table::{bytes, plain};

/// How long a line is at most.
const WIDTH: usize = 1000;

/// What is to be said of an event.
pub(crate) struct Said {
    /// For programs: what has happened, and an object.
    pub(crate) name: &'static str,
    pub(crate) details: Value,
    /// For people. Of one that waits, all that each worker says.
    pub(crate) text: String,
    /// Whether that is of interest for who waits for the output.
    pub(crate) is_news: bool,
}

/// What is to be said of `event`.
pub(crate) fn said(event: &Event) -> Said {
    let (name, details, text, is_news) = match event {
        Event::Queued(queued) => {
            let text = match queued.reasons.as_slice() {
                [] => "waits for its turn".to_owned(),
                [reason] => format!("waits for a worker: {}", plain(reason, WIDTH)),
                reasons => {
                    let lines: Vec<_> = reasons.iter().map(|reason| plain(reason, WIDTH)).collect();
                    format!("waits for a worker:\n  {}", lines.join("\n  "))
                }
            };
            ("queued", json!({ "reasons": queued.reasons }), text, !queued.reasons.is_empty())
        }
        Event::Placed(placed) => {
            let at = placed.whereabouts.as_ref();
            let details = json!({ "whereabouts": at.map(shown::whereabouts), "reason": placed.reason });
            let text = format!("placed on {}: {}", worker(at), plain(&placed.reason, WIDTH));
            ("placed", details, text, true)
        }
        Event::Preparing(_) => ("preparing", json!({}), "its container is made".to_owned(), false),
        Event::Materializing(materializing) => {
            let inputs = &materializing.inputs;
            let details = inputs.iter().map(|input| {
                let InputProgress { name, bytes_done, bytes_total, waits_for } = input;
                json!({ "name": name, "bytes_done": bytes_done, "bytes_total": bytes_total, "waits_for": waits_for })
            });
            let details = json!({ "inputs": details.collect::<Vec<_>>() });
            ("materializing", details, brought(inputs), true)
        }
        Event::Running(running) => {
            let at = running.whereabouts.as_ref();
            let details = json!({ "whereabouts": at.map(shown::whereabouts) });
            ("running", details, format!("runs on {}", worker(at)), false)
        }
        Event::Publishing(_) => ("publishing", json!({}), "its outputs are published".to_owned(), false),
        Event::Finished(finished) => {
            let end = exit_code::end(finished, None);
            let outcome = crate::render::labels::outcome(finished.outcome()).unwrap_or("ended");
            let text = end.said.map_or_else(|| outcome.to_owned(), |said| format!("{outcome}: {said}"));
            ("finished", shown::finished(finished, end.code), text, false)
        }
    };
    Said { name, details, text, is_news }
}

fn worker(at: Option<&Whereabouts>) -> String {
    at.map_or_else(|| "a worker".to_owned(), |at| plain(&at.worker_name, WIDTH))
}

/// How far the inputs are that are brought to the worker.
fn brought(inputs: &[InputProgress]) -> String {
    let waits = inputs.iter().filter(|input| !input.waits_for.is_empty());
    let waits: Vec<_> = waits
        .map(|InputProgress { name, waits_for, .. }| {
            format!("cannot bring {name} to the worker yet: {}", plain(waits_for, WIDTH))
        })
        .collect();
    if !waits.is_empty() {
        return waits.join("\n");
    }
    let names: Vec<_> = inputs.iter().map(|input| input.name.as_str()).collect();
    let of = |bytes: fn(&InputProgress) -> u64| inputs.iter().map(bytes).sum::<u64>();
    let (done, total) = (of(|input| input.bytes_done), of(|input| input.bytes_total));
    let far = if total == 0 { String::new() } else { format!(": {} of {}", bytes(done), bytes(total)) };
    format!("brings {} to the worker{far}", names.join(", "))
}

/// Finds out why a workload waits, in a few words, each time that this changes.
#[derive(Default)]
pub(crate) struct Waiting {
    asked: JoinSet<Option<Why>>,
    told: Option<String>,
}

/// Why a workload waits, and for how long it may.
pub(crate) struct Why {
    /// For programs.
    pub(crate) details: Value,
    /// For people.
    pub(crate) text: String,
    /// What of it is told anew only when it changes.
    why: String,
}

impl Waiting {
    /// It waits, and why has changed. `otherwise`: what is said where the scheduler does not explain it.
    pub(crate) fn changed(&mut self, connection: &Connection, workload: &str, otherwise: Said) {
        self.over();
        let subject = Subject::Workload(WaitingWorkload {
            team: connection.team.clone(),
            workload_id: workload.to_owned(),
        });
        let request = ExplainRequest { subject: Some(subject), max_workers: 1, workers: Vec::new() };
        let mut placements = connection.placements();
        self.asked.spawn(async move {
            match placements.explain(request).await {
                Ok(response) => {
                    let response = response.into_inner();
                    let details = json!({
                        "queue_position": response.queue_position,
                        "why": response.summary,
                        "expected_wait_seconds": labels::expected_wait(&response).map(|wait| wait.as_secs_f64()),
                    });
                    Some(Why { details, text: explanation::short(&response), why: response.summary })
                }
                // It waits no more.
                Err(status) if status.code() == tonic::Code::FailedPrecondition => None,
                Err(_) => Some(Why {
                    details: otherwise.details,
                    why: otherwise.text.clone(),
                    text: otherwise.text,
                }),
            }
        });
    }

    /// It waits no more.
    pub(crate) fn over(&mut self) {
        self.asked = JoinSet::new();
    }

    /// Why it waits, once that is known and where it is news. `None`: it is not asked for. Cancel safe.
    pub(crate) async fn next(&mut self) -> Option<Why> {
        while let Some(answered) = self.asked.join_next().await {
            let Ok(Some(why)) = answered else { continue };
            if self.told.as_ref() != Some(&why.why) {
                self.told = Some(why.why.clone());
                return Some(why);
            }
        }
        None
    }
}
