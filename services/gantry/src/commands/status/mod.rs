//! `gantry status`: overview of a cluster, from calls that every caller may make.
//!
//! A service that does not answer is part of the overview, and does not fail the command.

mod local;
mod services;

use std::io::IsTerminal;
use std::time::Duration;

use futures::TryStreamExt;
use rpc::Peer;
use rpc::client::{Outgoing, peer};
use rpc::pb::artifacts::inventory_client::InventoryClient;
use rpc::pb::artifacts::{ListOrphansRequest, Orphan};
use rpc::pb::scheduler::workers_client::WorkersClient;
use rpc::pb::scheduler::{ListWorkersRequest, Worker, WorkerState, Workload, WorkloadState};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep_until, timeout};
use tonic::Status;

use self::services::{PATIENCE, Service, services, services_text};
use crate::cli::addresses::Addresses;
use crate::cli::args::{Global, StatusArgs};
use crate::client::connect::named_token;
use crate::client::queries::pages;
use crate::client::token::default_token;
use crate::client::transfers::{
    Transfers, relayed_pair_document, relayed_pairs_text, transfer_document, transfers, transfers_text,
};
use crate::cluster;
use crate::ending::error::{Interrupted, Refused, describe};
use crate::ending::signals::Signals;
use crate::render::json as shown;
use crate::render::labels;
use crate::render::stdout::{print, print_json};
use crate::render::table::{count, filled, plain, render};

/// Interval between two polls of a watched cluster.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Overview of a cluster.
pub(crate) struct ClusterView {
    /// Text for people.
    pub(crate) text: String,
    /// Document for programs.
    pub(crate) document: Value,
    /// Exit code of the command.
    pub(crate) code: u8,
}

/// Shows the cluster, once or until the command is interrupted. Returns the exit code.
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
        let next = Instant::now() + POLL_INTERVAL;
        let seen = tokio::select! {
            seen = look(global) => seen.unwrap_or_else(|error| failed(&error)),
            code = signals.next() => return Err(Interrupted(code).into()),
        };
        if redraws {
            let size = rustix::termios::tcgetwinsize(std::io::stdout());
            let (columns, rows) = size.map_or((0, 0), |size| (size.ws_col.into(), size.ws_row.into()));
            print(&redrawn(&seen.text, columns, rows))?;
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

fn show(seen: &ClusterView, as_json: bool) -> anyhow::Result<()> {
    if as_json { print_json(&seen.document) } else { print(&seen.text) }
}

/// Formats text that replaces the screen of a terminal of this size. Lines are cut, and further
/// lines are counted. 0: the size is unlimited.
fn redrawn(text: &str, columns: usize, rows: usize) -> String {
    let lines: Vec<_> = text.lines().collect();
    // The cursor needs the line below the text.
    let room = if rows == 0 { usize::MAX } else { rows.saturating_sub(1).max(1) };
    let shown = if lines.len() > room { room - 1 } else { lines.len() };
    let more =
        (lines.len() > shown).then(|| format!("… and {}", count((lines.len() - shown) as u64, "more line")));
    let columns = if columns == 0 { usize::MAX } else { columns };
    let mut screen = "\x1b[H".to_owned();
    for line in lines[..shown].iter().copied().chain(more.as_deref()) {
        screen.push_str(&plain(line, columns));
        // The rest of the old line is cleared.
        screen.push_str("\x1b[K\n");
    }
    screen.push_str("\x1b[J");
    screen
}

/// Makes an overview of an error, so that the watch continues.
fn failed(error: &anyhow::Error) -> ClusterView {
    let message = describe(error);
    ClusterView { text: format!("{message}\n"), document: json!({ "error": message }), code: 1 }
}

/// Removes fields that change only because time passes.
fn lasting(document: &Value) -> Value {
    const VOLATILE_FIELDS: [&str; 4] =
        ["last_contact_at", "disk_free_bytes", "idle_for_seconds", "remaining_seconds"];
    match document {
        Value::Object(fields) => {
            let fields = fields.iter().filter(|(name, _)| !VOLATILE_FIELDS.contains(&name.as_str()));
            Value::Object(fields.map(|(name, value)| (name.clone(), lasting(value))).collect())
        }
        Value::Array(items) => Value::Array(items.iter().map(lasting).collect()),
        other => other.clone(),
    }
}

async fn look(global: &Global) -> anyhow::Result<ClusterView> {
    let Some(server) = &global.server else { return local::status().await };
    let addresses = Addresses::parse(server).map_err(anyhow::Error::msg)?;
    let addresses = Addresses { proxy: global.proxy.clone().or(addresses.proxy), ..addresses };
    let token = match named_token(global)? {
        Some(named) => Some(named),
        None => default_token(&addresses)?.map(|(_, token)| token),
    };
    let outgoing = Outgoing::internal().with_token(token.as_deref());
    let overview = Overview::of(&addresses, &outgoing).await?;
    let mut document = json!({});
    overview.fill(&mut document);
    Ok(ClusterView { text: overview.text(), document, code: overview.code() })
}

/// Makes documents with every field, of clusters here and elsewhere, for the test of the schema.
#[cfg(test)]
pub(crate) fn samples() -> Vec<Value> {
    let service = Service {
        name: String::new(),
        address: String::new(),
        version: String::new(),
        instance: String::new(),
        not_ready: vec!["text".to_owned()],
        refuses: false,
    };
    let waiting = Workload {
        state: WorkloadState::Pending.into(),
        submitted_at: Some(prost_types::Timestamp::default()),
        waiting_for: vec!["text".to_owned()],
        ..Workload::default()
    };
    let with_team = Workload { spec: Some(rpc::pb::scheduler::WorkloadSpec::default()), ..waiting.clone() };
    let undated = Workload { submitted_at: None, ..waiting.clone() };
    let overview = Overview {
        services: vec![service],
        workers: Vec::new(),
        unfinished: vec![waiting, with_team, undated],
        transfers: Transfers {
            relayed_pairs: vec![rpc::pb::streamer::RelayedPair::default()],
            ..Transfers::default()
        },
        orphans: OrphanCount::default(),
        unseen: vec![("workers", "text".to_owned())],
    };
    let mut samples = local::samples();
    samples.push(json!({}));
    samples.iter_mut().for_each(|document| overview.fill(document));
    samples
}

/// State of the services, workers, workloads and transfers of a cluster.
pub(crate) struct Overview {
    services: Vec<Service>,
    workers: Vec<Worker>,
    unfinished: Vec<Workload>,
    transfers: Transfers,
    orphans: OrphanCount,
    /// Parts that cannot be read, with the cause.
    unseen: Vec<(&'static str, String)>,
}

impl Overview {
    pub(crate) async fn of(addresses: &Addresses, outgoing: &Outgoing) -> anyhow::Result<Self> {
        let scheduler = peer(&addresses.scheduler, outgoing.clone())?;
        let late = || Status::deadline_exceeded("no answer in time");
        let (workers, unfinished) = tokio::join!(
            timeout(PATIENCE, workers(&scheduler)),
            timeout(PATIENCE, cluster::unfinished(&scheduler))
        );
        let workers = workers.unwrap_or_else(|_| Err(late()));
        let unfinished = unfinished.unwrap_or_else(|_| Err(late()));
        let mut unseen = Vec::new();
        let mut hidden = |what, status| unseen.push((what, Refused::from(status).cause()));
        let workers = workers.map_err(|status| hidden("workers", status)).unwrap_or_default();
        let unfinished = unfinished.map_err(|status| hidden("workloads", status)).unwrap_or_default();
        // A streamer that does not answer is shown among the services.
        let (services, transfers, orphans) = tokio::join!(
            services(addresses, &workers, outgoing),
            transfers(addresses, outgoing, PATIENCE),
            orphans(addresses, outgoing)
        );
        Ok(Self { services, workers, unfinished, transfers, orphans, unseen })
    }

    /// Returns whether no worker has registered yet, or a worker has not reported its free disk
    /// space.
    pub(crate) fn awaits_report(&self) -> bool {
        let has_disk = |worker: &Worker| worker.capacity.unwrap_or_default().disk_bytes > 0;
        let is_silent = |worker: &Worker| has_disk(worker) && worker.disk_free_bytes == 0;
        self.workers.is_empty() || self.workers.iter().any(is_silent)
    }

    /// Returns the exit code: 0 if every part was read and every service is ready.
    pub(crate) fn code(&self) -> u8 {
        let ready = self.services.iter().all(|service| service.not_ready.is_empty());
        u8::from(!ready || !self.unseen.is_empty())
    }

    /// Adds the fields to a document.
    pub(crate) fn fill(&self, document: &mut Value) {
        document["services"] = self.services.iter().map(Service::document).collect();
        document["workers"] = self.workers.iter().map(shown::worker).collect();
        let states = local::states(&self.unfinished);
        document["workloads"] =
            states.into_iter().map(|(state, count)| (state, Value::from(count))).collect();
        document["queue"] = queue_document(&self.unfinished).into();
        document["transfers"] = self.transfers.running.iter().map(transfer_document).collect();
        document["relayed_pairs"] = self.transfers.relayed_pairs.iter().map(relayed_pair_document).collect();
        let OrphanCount { volumes, containers, more } = self.orphans;
        document["orphans"] = json!({ "volumes": volumes, "containers": containers, "more": more });
        document["unseen"] =
            self.unseen.iter().map(|(what, why)| json!({ "what": what, "error": why })).collect();
    }

    /// Formats the text. The most important parts come first, because a terminal may be short.
    pub(crate) fn text(&self) -> String {
        let hidden =
            self.unseen.iter().map(|(what, why)| format!("cannot list {what}: {}\n", plain(why, 200)));
        let hidden: String = hidden.collect();
        let workers = match self.workers.as_slice() {
            [] if !hidden.is_empty() => String::new(),
            [] => "no worker has registered\n".to_owned(),
            workers => filled(&WORKERS, &workers.iter().map(worker_row).collect::<Vec<_>>()),
        };
        let (services, workloads) = (services_text(&self.services), workloads_text(&self.unfinished));
        let Transfers { running, relayed_pairs, .. } = &self.transfers;
        let transfers =
            transfers_text(running, &self.workers) + &relayed_pairs_text(relayed_pairs, &self.workers);
        let upper = match hidden.as_str() {
            "" => format!("{workers}\n{workloads}"),
            hidden => format!("{hidden}{workers}"),
        };
        format!("{upper}{transfers}{}\n{services}", self.orphans.text())
    }
}

/// Number of orphans, up to one page.
#[derive(Debug, Clone, Copy, Default)]
struct OrphanCount {
    volumes: u64,
    containers: u64,
    more: bool,
}

impl OrphanCount {
    fn text(self) -> String {
        let Self { volumes, containers, more } = self;
        if volumes + containers == 0 {
            return String::new();
        }
        let kinds = [(volumes, "volume"), (containers, "container")];
        let kinds = kinds.into_iter().filter(|(number, _)| *number > 0);
        let kinds: Vec<_> = kinds.map(|(number, what)| count(number, what)).collect();
        let more = if more { " and more" } else { "" };
        format!(
            "\norphans since a backup was restored: {}{more}; list them with `gantry list volumes --orphans`, then adopt or purge them\n",
            kinds.join(", ")
        )
    }
}

/// Counts the orphans. A store that does not answer is shown among the services.
async fn orphans(addresses: &Addresses, outgoing: &Outgoing) -> OrphanCount {
    let Ok(store) = peer(&addresses.artifacts, outgoing.clone()) else { return OrphanCount::default() };
    let request = ListOrphansRequest { page_size: 1000, ..ListOrphansRequest::default() };
    let mut inventory = InventoryClient::new(store);
    let Ok(Ok(page)) = timeout(PATIENCE, inventory.list_orphans(request)).await else {
        return OrphanCount::default();
    };
    let page = page.into_inner();
    let number = |of: fn(&Orphan) -> bool| page.orphans.iter().filter(|one| of(one)).count() as u64;
    OrphanCount {
        volumes: number(|one| !one.volume_handle.is_empty()),
        containers: number(|one| !one.container_handle.is_empty()),
        more: !page.next_page_token.is_empty(),
    }
}

/// Lists all workers, ordered by name.
async fn workers(scheduler: &Peer) -> Result<Vec<Worker>, Status> {
    pages(async |page_token| {
        let request = ListWorkersRequest { page_size: 1000, page_token };
        let page = WorkersClient::new(scheduler.clone()).list_workers(request).await?.into_inner();
        Ok((page.workers, page.next_page_token))
    })
    .try_collect()
    .await
}

const WORKERS: [&str; 8] = ["WORKER", "STATE", "TASKS", "FREE DISK", "TAGS", "TEAM", "CONTAINERS", "VOLUMES"];

fn worker_row(worker: &Worker) -> Vec<String> {
    let state = match worker.state() {
        WorkerState::Running => labels::standing(worker),
        _ => labels::silent(worker),
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
        labels::free_disk(worker),
        labels.tags.join(","),
        labels.team,
        worker.containers.to_string(),
        worker.volumes.to_string(),
    ]
}

/// Returns the workloads that wait, oldest first.
fn queue(unfinished: &[Workload]) -> Vec<&Workload> {
    let waits = [WorkloadState::Accepted, WorkloadState::Pending];
    let mut queue: Vec<_> = unfinished.iter().filter(|workload| waits.contains(&workload.state())).collect();
    queue.sort_by_key(|workload| workload.submitted_at.map(|at| (at.seconds, at.nanos)));
    queue
}

fn queue_document(unfinished: &[Workload]) -> Vec<Value> {
    let waiting = |workload: &&Workload| {
        json!({
            "workload_id": workload.workload_id,
            "team": workload.spec.as_ref().map(|spec| spec.team.as_str()),
            "submitted_at": workload.submitted_at.as_ref().map(labels::instant),
            "waiting_for": workload.waiting_for,
        })
    };
    queue(unfinished).iter().map(waiting).collect()
}

/// Formats the number of workloads in each state, and the queue.
fn workloads_text(unfinished: &[Workload]) -> String {
    let states = local::states(unfinished);
    if states.is_empty() {
        return "no workload runs or waits\n".to_owned();
    }
    let states: Vec<_> = states.into_iter().map(|(state, count)| format!("{count} {state}")).collect();
    format!("workloads: {}\n{}", states.join(", "), queue_text(unfinished))
}

fn queue_text(unfinished: &[Workload]) -> String {
    let queue = queue(unfinished);
    if queue.is_empty() {
        return String::new();
    }
    let rows = queue.iter().flat_map(|workload| {
        let team = workload.spec.as_ref().map_or_else(String::new, |spec| spec.team.clone());
        let mut why = workload.waiting_for.iter().map(|why| plain(why, 1000));
        let first = why.next().unwrap_or_else(|| "not considered yet".to_owned());
        let head = vec![workload.workload_id.clone(), team, first];
        std::iter::once(head).chain(why.map(|why| vec![String::new(), String::new(), why]))
    });
    let rows: Vec<_> = rows.collect();
    format!("\n{}", render(&["WAITING", "TEAM", "REASON"], &rows))
}

#[cfg(test)]
mod tests {
    use rpc::pb::streamer::{Transfer, TransferProgress};

    use super::services::hide_silent_ports;
    use super::*;
    use crate::cli::addresses::Range;

    #[test]
    fn watched_status_fits_terminal() {
        let text = "1234567890\n2\n3\n4\n";
        assert_eq!(redrawn(text, 0, 0), "\x1b[H1234567890\x1b[K\n2\x1b[K\n3\x1b[K\n4\x1b[K\n\x1b[J");
        assert_eq!(redrawn(text, 8, 4), "\x1b[H1234567…\x1b[K\n2\x1b[K\n… and 2…\x1b[K\n\x1b[J");
        assert_eq!(redrawn(text, 80, 5).matches('\n').count(), 4, "the cursor stands below");
        assert_eq!(redrawn(text, 80, 1), "\x1b[H… and 4 more lines\x1b[K\n\x1b[J");
    }

    #[test]
    fn silent_ports_of_range_are_hidden() {
        let range = Range {
            text: "http://there:1-2".to_owned(),
            addresses: vec!["http://there:1".to_owned(), "http://there:2".to_owned()],
        };
        let service = |address: &str, instance: &str| Service {
            name: "streamer".to_owned(),
            address: address.to_owned(),
            version: String::new(),
            instance: instance.to_owned(),
            not_ready: Vec::from_iter(instance.is_empty().then(|| "Connection refused".to_owned())),
            refuses: false,
        };
        let elsewhere = service("http://elsewhere:1", "");
        let answers = service("http://there:2", "x");
        let mut some = vec![service("http://there:1", ""), elsewhere.clone(), answers.clone()];
        hide_silent_ports(&mut some, &range);
        assert_eq!(some, [elsewhere.clone(), answers]);
        let mut silent =
            vec![service("http://there:1", ""), elsewhere.clone(), service("http://there:2", "")];
        hide_silent_ports(&mut silent, &range);
        assert_eq!(silent, [elsewhere, service("http://there:1-2", "")]);
    }

    #[test]
    fn problem_of_process_is_shown_once() {
        let service = |name: &str, instance: &str, not_ready: &[&str]| Service {
            name: name.to_owned(),
            address: "http://there:1".to_owned(),
            version: String::new(),
            instance: instance.to_owned(),
            not_ready: not_ready.iter().map(|why| (*why).to_owned()).collect(),
            refuses: false,
        };
        let both = ["database: it does not answer"];
        let text = services_text(&[service("scheduler", "x", &both), service("streamer", "x", &both)]);
        let expected = "SERVICE    HEALTH     PROCESS  ADDRESS\n\
            scheduler  not ready  x        http://there:1\n\
            streamer   not ready  x        http://there:1\n\
            http://there:1: database: it does not answer\n";
        assert_eq!(text, expected);
        let text = services_text(&[service("proxy", "", &["Connection refused"])]);
        assert!(text.contains("proxy    no answer  http://there:1\n"), "{text}");
        assert!(text.ends_with("http://there:1: Connection refused\n"), "{text}");
        let refuses = Service { refuses: true, ..service("proxy", "", &["present the token"]) };
        let text = services_text(&[refuses]);
        assert!(text.contains("proxy    refuses  http://there:1\n"), "{text}");
    }

    #[test]
    fn transfers_have_names_of_workers() {
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
        assert_eq!(words, ["one", "two", "1.0", "MiB", "of", "4.0", "MiB", "1.0", "KiB/s", "bytes"]);
        let document = transfer_document(&transfer);
        assert_eq!((&document["bytes_done"], &document["to_worker_id"]), (&(1 << 20).into(), &"2".into()));
        assert_eq!(transfers_text(&[], &[]), "");
    }
}
