//! `gantry status`: a cluster at a glance, over the calls that everybody may make.
//!
//! Each part is shown as far as it can be had: a service that does not answer is itself what there is to see.

use std::collections::BTreeMap;
use std::io::IsTerminal;
use std::time::Duration;

use rpc::Peer;
use rpc::client::{Outgoing, peer};
use rpc::pb::capabilities::GetCapabilitiesRequest;
use rpc::pb::capabilities::capabilities_client::CapabilitiesClient;
use rpc::pb::scheduler::workers_client::WorkersClient;
use rpc::pb::scheduler::{ListWorkersRequest, Worker, WorkerState, Workload, WorkloadState};
use rpc::pb::streamer::streamer_client::StreamerClient;
use rpc::pb::streamer::{ListTransfersRequest, Route, Transfer, TransferProgress};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep_until, timeout};
use tonic::Status;

use crate::addresses::Addresses;
use crate::args::{Global, StatusArgs};
use crate::cluster;
use crate::connect::read_token;
use crate::error::{Interrupted, describe, refused};
use crate::json as shown;
use crate::signals::Signals;
use crate::stdout::{print, print_json};
use crate::table::{bytes, plain, render};
use crate::words;

/// How often a watched cluster is looked at.
const EVERY: Duration = Duration::from_secs(1);
/// A service that takes longer to say what it is is shown as one that does not answer.
const PATIENCE: Duration = Duration::from_secs(3);

/// What was seen of a cluster.
pub(crate) struct Seen {
    /// For people.
    pub(crate) text: String,
    /// For programs.
    pub(crate) document: Value,
    /// The exit code.
    pub(crate) code: u8,
}

/// Shows the cluster, once or until it is interrupted. Answers the exit code.
pub(crate) async fn status(args: &StatusArgs, global: &Global) -> anyhow::Result<u8> {
    if !args.watch {
        let seen = look(global).await?;
        show(&seen, global.json)?;
        return Ok(seen.code);
    }
    let mut signals = Signals::catch()?;
    let redraws = !global.json && std::io::stdout().is_terminal();
    let mut before = None;
    loop {
        let next = Instant::now() + EVERY;
        let seen = tokio::select! {
            seen = look(global) => seen.unwrap_or_else(|error| failed(&error)),
            code = signals.next() => return Err(Interrupted(code).into()),
        };
        if redraws {
            // To the upper left corner, and away with what stood below.
            print(&format!("\x1b[H\x1b[J{}", seen.text))?;
        } else if before.as_ref() != Some(&lasting(&seen.document)) {
            before = Some(lasting(&seen.document));
            show(&seen, global.json)?;
            if !global.json {
                print("\n")?;
            }
        }
        tokio::select! {
            () = sleep_until(next) => {}
            code = signals.next() => return Err(Interrupted(code).into()),
        }
    }
}

fn show(seen: &Seen, as_json: bool) -> anyhow::Result<()> {
    if as_json { print_json(&seen.document) } else { print(&seen.text) }
}

/// A cluster that cannot be seen just now goes on being watched.
fn failed(error: &anyhow::Error) -> Seen {
    let message = describe(error);
    Seen { text: format!("{message}\n"), document: json!({ "error": message }), code: 1 }
}

/// What is different only because time passes makes no news.
fn lasting(document: &Value) -> Value {
    const PASSING: [&str; 3] = ["last_contact_at", "disk_free_bytes", "idle_for_seconds"];
    match document {
        Value::Object(fields) => {
            let fields = fields.iter().filter(|(name, _)| !PASSING.contains(&name.as_str()));
            Value::Object(fields.map(|(name, value)| (name.clone(), lasting(value))).collect())
        }
        Value::Array(items) => Value::Array(items.iter().map(lasting).collect()),
        other => other.clone(),
    }
}

async fn look(global: &Global) -> anyhow::Result<Seen> {
    let Some(server) = &global.server else { return cluster::status().await };
    let addresses = Addresses::parse(server).map_err(anyhow::Error::msg)?;
    let token = global.token_file.as_deref().map(read_token).transpose()?;
    let outgoing = Outgoing::internal().with_token(token.as_deref());
    let scheduler = peer(&addresses.scheduler, outgoing.clone())?;
    let (workers, unfinished) = tokio::join!(workers(&scheduler), cluster::unfinished(&scheduler));
    let workers = workers.map_err(refused("cannot list workers"))?;
    let unfinished = unfinished.map_err(refused("cannot list workloads"))?;
    let (services, transfers) =
        tokio::join!(services(&addresses, &workers, &outgoing), transfers(&addresses, &outgoing));
    let ready = services.iter().all(|service| service.not_ready.is_empty());
    let document = json!({
        "services": services.iter().map(Service::document).collect::<Vec<_>>(),
        "workers": workers.iter().map(shown::worker).collect::<Vec<_>>(),
        "workloads": cluster::states(&unfinished).into_iter().collect::<BTreeMap<_, _>>(),
        "queue": queue_document(&unfinished),
        "transfers": transfers.iter().map(transfer_document).collect::<Vec<_>>(),
    });
    let transfers = transfers_text(&transfers, &workers);
    let workers = match workers.as_slice() {
        [] => "no worker has registered\n".to_owned(),
        workers => render(&WORKERS, &workers.iter().map(worker_row).collect::<Vec<_>>()),
    };
    let workloads = workloads_text(&unfinished);
    let text = format!("{}\n{workers}\n{workloads}{transfers}", services_text(&services));
    Ok(Seen { text, document, code: u8::from(!ready) })
}

/// Every worker, by name.
pub(crate) async fn workers(scheduler: &Peer) -> Result<Vec<Worker>, Status> {
    let (mut workers, mut page_token) = (Vec::new(), String::new());
    loop {
        let request = ListWorkersRequest { page_size: 1000, page_token };
        let page = WorkersClient::new(scheduler.clone()).list_workers(request).await?.into_inner();
        workers.extend(page.workers);
        page_token = page.next_page_token;
        if page_token.is_empty() {
            return Ok(workers);
        }
    }
}

const WORKERS: [&str; 8] = ["WORKER", "STATE", "TASKS", "CONTAINERS", "VOLUMES", "FREE DISK", "TAGS", "TEAM"];

fn worker_row(worker: &Worker) -> Vec<String> {
    let state = match worker.state() {
        WorkerState::Running => "running".to_owned(),
        state => {
            format!(
                "{}, silent for {}",
                words::worker_state(state),
                words::ago(worker.last_contact_at.as_ref())
            )
        }
    };
    let tasks = match worker.capacity.unwrap_or_default().max_tasks {
        0 => worker.active_tasks.to_string(),
        most => format!("{} of {most}", worker.active_tasks),
    };
    let labels = worker.labels.clone().unwrap_or_default();
    vec![
        worker.name.clone(),
        state,
        tasks,
        worker.containers.to_string(),
        worker.volumes.to_string(),
        words::free_disk(worker),
        labels.tags.join(","),
        labels.team,
    ]
}

/// One service of one process, or an address at which none answers.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Service {
    name: String,
    address: String,
    version: String,
    instance: String,
    not_ready: Vec<String>,
}

impl Service {
    pub(crate) fn document(&self) -> Value {
        json!({
            "service": self.name,
            "address": self.address,
            "version": self.version,
            "instance": self.instance,
            "ready": self.not_ready.is_empty(),
            "not_ready": self.not_ready,
        })
    }

    fn row(&self) -> Vec<String> {
        let ready = match self.not_ready.as_slice() {
            [] => "ready".to_owned(),
            why => plain(&why.join("; "), 100),
        };
        vec![self.name.clone(), self.version.clone(), self.instance.clone(), self.address.clone(), ready]
    }
}

pub(crate) fn services_text(services: &[Service]) -> String {
    let rows: Vec<_> = services.iter().map(Service::row).collect();
    render(&["SERVICE", "VERSION", "PROCESS", "ADDRESS", "HEALTH"], &rows)
}

/// Every replica of every service, each asked for itself.
async fn services(addresses: &Addresses, workers: &[Worker], outgoing: &Outgoing) -> Vec<Service> {
    let named = [
        ("scheduler", &addresses.scheduler),
        ("artifact-store", &addresses.artifacts),
        ("streamer", &addresses.streamer),
    ];
    let mut asked: BTreeMap<&str, &str> = BTreeMap::new();
    for (name, replicas) in named {
        for address in replicas.split(',') {
            asked.entry(address.trim()).or_insert(name);
        }
    }
    match &addresses.door {
        // Who comes through a door may not reach the gateways behind it; that the scheduler hears of them is said of the workers.
        Some(door) => asked.extend(door.split(',').map(|address| (address.trim(), "door"))),
        None => {
            for worker in workers.iter().filter(|worker| worker.state() == WorkerState::Running) {
                // A cluster in one process names its socket, which may be on another machine.
                if addresses.in_one_place().is_none() || worker.gateway_endpoint.starts_with("http:") {
                    asked.entry(&worker.gateway_endpoint).or_insert("runtime-gateway");
                }
            }
        }
    }
    let asking = asked.into_iter().map(|(address, name)| ask(address, name, outgoing.clone()));
    let mut services: Vec<_> = futures::future::join_all(asking).await.into_iter().flatten().collect();
    services.sort();
    services
}

/// The services at one address. `expected` is what it is called when it does not say so itself.
pub(crate) async fn ask(address: &str, expected: &str, outgoing: Outgoing) -> Vec<Service> {
    let silent = |why: String| {
        vec![Service {
            name: expected.to_owned(),
            address: address.to_owned(),
            version: String::new(),
            instance: String::new(),
            not_ready: vec![why],
        }]
    };
    let asked = match peer(address, outgoing) {
        Ok(peer) => peer,
        Err(error) => return silent(error.to_string()),
    };
    let asking = async { CapabilitiesClient::new(asked).get_capabilities(GetCapabilitiesRequest {}).await };
    let answer = match timeout(PATIENCE, asking).await {
        Err(_) => return silent("no answer in time".to_owned()),
        Ok(Err(status)) => return silent(status.message().to_owned()),
        Ok(Ok(answer)) => answer.into_inner(),
    };
    if answer.services.is_empty() {
        return silent(answer.not_ready.join("; "));
    }
    let service = |service: rpc::pb::capabilities::ServiceCapabilities| Service {
        name: service.service,
        address: address.to_owned(),
        version: service.version,
        instance: answer.instance.clone(),
        not_ready: answer.not_ready.clone(),
    };
    answer.services.into_iter().map(service).collect()
}

/// Copies under way, as each streamer that answers has them.
async fn transfers(addresses: &Addresses, outgoing: &Outgoing) -> Vec<Transfer> {
    let asking = addresses.streamer.split(',').map(|address| async move {
        let mut streamer = StreamerClient::new(peer(address.trim(), outgoing.clone()).ok()?);
        let listed = timeout(PATIENCE, streamer.list_transfers(ListTransfersRequest {})).await;
        // That it does not answer is said of the service.
        Some(listed.ok()?.ok()?.into_inner().transfers)
    });
    let mut transfers: Vec<_> =
        futures::future::join_all(asking).await.into_iter().flatten().flatten().collect();
    transfers.sort_by_key(|transfer| transfer.started_at.map(|at| (at.seconds, at.nanos)));
    transfers
}

fn transfer_document(transfer: &Transfer) -> Value {
    let progress = transfer.progress.clone().unwrap_or_default();
    json!({
        "transfer_id": transfer.transfer_id,
        "team": transfer.team,
        "artifact_id": transfer.artifact_id,
        "route": route(&progress),
        "from_worker_id": progress.from_worker_id,
        "to_worker_id": transfer.to_worker_id,
        "bytes_done": progress.bytes_done,
        "bytes_total": progress.bytes_total,
        "bytes_saved": progress.bytes_saved,
        "bytes_per_second": progress.bytes_per_second,
        "started_at": transfer.started_at.as_ref().map(words::instant),
    })
}

/// Which way the bytes of a copy go. Empty: nobody knows yet.
fn route(progress: &TransferProgress) -> &'static str {
    match progress.route() {
        Route::Unspecified => "",
        Route::Peer => "gateways",
        Route::Workers => "workers",
        Route::Elsewhere => "elsewhere",
    }
}

fn transfers_text(transfers: &[Transfer], workers: &[Worker]) -> String {
    if transfers.is_empty() {
        return String::new();
    }
    let name = |id: &str| {
        let known = workers.iter().find(|worker| worker.worker_id == id);
        known.map_or_else(|| id.to_owned(), |worker| worker.name.clone())
    };
    let row = |transfer: &Transfer| {
        let progress = transfer.progress.clone().unwrap_or_default();
        vec![
            transfer.artifact_id.clone(),
            name(&progress.from_worker_id),
            name(&transfer.to_worker_id),
            format!("{} of {}", bytes(progress.bytes_done), bytes(progress.bytes_total)),
            format!("{}/s", bytes(progress.bytes_per_second)),
        ]
    };
    let rows: Vec<_> = transfers.iter().map(row).collect();
    format!("\n{}", render(&["COPYING", "FROM", "TO", "DONE", "SPEED"], &rows))
}

/// Workloads that wait, oldest first, each with the reasons.
pub(crate) fn queue(unfinished: &[Workload]) -> Vec<&Workload> {
    let waits = [WorkloadState::Accepted, WorkloadState::Pending];
    let mut queue: Vec<_> = unfinished.iter().filter(|workload| waits.contains(&workload.state())).collect();
    queue.sort_by_key(|workload| workload.submitted_at.map(|at| (at.seconds, at.nanos)));
    queue
}

pub(crate) fn queue_document(unfinished: &[Workload]) -> Vec<Value> {
    let waiting = |workload: &&Workload| {
        json!({
            "workload_id": workload.workload_id,
            "team": workload.spec.as_ref().map(|spec| spec.team.as_str()),
            "submitted_at": workload.submitted_at.as_ref().map(words::instant),
            "waiting_for": workload.waiting_for,
        })
    };
    queue(unfinished).iter().map(waiting).collect()
}

/// How many workloads are in which state, and why those wait that wait.
fn workloads_text(unfinished: &[Workload]) -> String {
    let states = cluster::states(unfinished);
    if states.is_empty() {
        return "no workload runs or waits\n".to_owned();
    }
    let states: Vec<_> = states.into_iter().map(|(state, count)| format!("{count} {state}")).collect();
    format!("workloads: {}\n{}", states.join(", "), queue_text(unfinished))
}

pub(crate) fn queue_text(unfinished: &[Workload]) -> String {
    let queue = queue(unfinished);
    if queue.is_empty() {
        return String::new();
    }
    let rows = queue.iter().flat_map(|workload| {
        let team = workload.spec.as_ref().map_or_else(String::new, |spec| spec.team.clone());
        let mut why = workload.waiting_for.iter().map(|why| plain(why, 100));
        let first = why.next().unwrap_or_else(|| "it has not been looked at yet".to_owned());
        let head = vec![workload.workload_id.clone(), team, first];
        std::iter::once(head).chain(why.map(|why| vec![String::new(), String::new(), why]))
    });
    let rows: Vec<_> = rows.collect();
    format!("\n{}", render(&["WAITING", "TEAM", "WHY"], &rows))
}

#[cfg(test)]
mod tests {
    use rpc::pb::streamer::TransferProgress;

    use super::*;

    #[test]
    fn copies_under_way_are_shown_with_the_names_of_their_workers() {
        let worker = |id: &str, name: &str| Worker {
            worker_id: id.to_owned(),
            name: name.to_owned(),
            ..Worker::default()
        };
        let progress = TransferProgress {
            bytes_done: 1 << 20,
            bytes_total: 4 << 20,
            bytes_per_second: 1 << 10,
            from_worker_id: "1".to_owned(),
            ..TransferProgress::default()
        };
        let transfer = Transfer {
            artifact_id: "bytes".to_owned(),
            to_worker_id: "2".to_owned(),
            progress: Some(progress),
            ..Transfer::default()
        };
        let text = transfers_text(std::slice::from_ref(&transfer), &[worker("1", "one"), worker("2", "two")]);
        let line = text.lines().last().expect("a row");
        let words: Vec<_> = line.split_whitespace().collect();
        assert_eq!(words, ["bytes", "one", "two", "1.0", "MiB", "of", "4.0", "MiB", "1.0", "KiB/s"]);
        let document = transfer_document(&transfer);
        assert_eq!((&document["bytes_done"], &document["to_worker_id"]), (&(1 << 20).into(), &"2".into()));
        assert_eq!(transfers_text(&[], &[]), "");
    }
}
