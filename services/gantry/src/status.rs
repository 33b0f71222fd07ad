//! `gantry status`: a cluster at a glance, over the calls that everybody may make.
//!
//! Each part is shown as far as it can be had: a service that does not answer is itself what there is to see.

mod local;

use std::collections::{BTreeMap, BTreeSet};
use std::io::IsTerminal;
use std::time::Duration;

use rpc::Peer;
use rpc::client::{Outgoing, peer};
use rpc::pb::artifacts::inventory_client::InventoryClient;
use rpc::pb::artifacts::{ListSetAsideRequest, SetAside};
use rpc::pb::capabilities::GetCapabilitiesRequest;
use rpc::pb::capabilities::capabilities_client::CapabilitiesClient;
use rpc::pb::scheduler::workers_client::WorkersClient;
use rpc::pb::scheduler::{ListWorkersRequest, Worker, WorkerState, Workload, WorkloadState};
use rpc::pb::streamer::streamer_client::StreamerClient;
use rpc::pb::streamer::{ListTransfersRequest, Route, Transfer, TransferProgress};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep_until, timeout};
use tonic::{Code, Status};

use crate::addresses::{Addresses, Range};
use crate::args::{Global, StatusArgs};
use crate::cluster;
use crate::connect::{aliases, named_token};
use crate::error::{Interrupted, Refused, describe};
use crate::json as shown;
use crate::signals::Signals;
use crate::stdout::{print, print_json};
use crate::table::{bytes, count, filled, plain, render};
use crate::token::default_token;
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

fn show(seen: &Seen, as_json: bool) -> anyhow::Result<()> {
    if as_json { print_json(&seen.document) } else { print(&seen.text) }
}

/// What takes the place of what stands on a terminal of this size: no line is broken, and the first ones stay. 0: it has no end.
fn redrawn(text: &str, columns: usize, rows: usize) -> String {
    let lines: Vec<_> = text.lines().collect();
    // Below the last line stands the cursor.
    let room = if rows == 0 { usize::MAX } else { rows.saturating_sub(1).max(1) };
    let shown = if lines.len() > room { room - 1 } else { lines.len() };
    let more =
        (lines.len() > shown).then(|| format!("… and {}", count((lines.len() - shown) as u64, "more line")));
    let columns = if columns == 0 { usize::MAX } else { columns };
    let mut screen = "\x1b[H".to_owned();
    for line in lines[..shown].iter().copied().chain(more.as_deref()) {
        screen.push_str(&plain(line, columns));
        // Away with what stood there.
        screen.push_str("\x1b[K\n");
    }
    screen.push_str("\x1b[J");
    screen
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
    let Some(server) = &global.server else { return local::status().await };
    let addresses = Addresses::parse(server).map_err(anyhow::Error::msg)?;
    let addresses = Addresses { proxy: global.proxy.clone().or(addresses.proxy), ..addresses };
    let token = match named_token(global)? {
        Some(named) => Some(named),
        None => default_token(&addresses)?.map(|(_, token)| token),
    };
    let outgoing = Outgoing::internal().with_token(token.as_deref());
    let glance = Glance::of(&addresses, &outgoing).await?;
    let mut document = json!({});
    glance.fill(&mut document);
    Ok(Seen { text: glance.text(), document, code: glance.code() })
}

/// What every cluster has.
pub(crate) struct Glance {
    services: Vec<Service>,
    workers: Vec<Worker>,
    unfinished: Vec<Workload>,
    transfers: Vec<Transfer>,
    aside: Aside,
    /// What cannot be seen, and why.
    unseen: Vec<(&'static str, String)>,
}

impl Glance {
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
        let mut hidden = |what, status| unseen.push((what, Refused::from(status).why()));
        let workers = workers.map_err(|status| hidden("workers", status)).unwrap_or_default();
        let unfinished = unfinished.map_err(|status| hidden("workloads", status)).unwrap_or_default();
        let (services, transfers, aside) = tokio::join!(
            services(addresses, &workers, outgoing),
            transfers(addresses, outgoing),
            aside(addresses, outgoing)
        );
        Ok(Self { services, workers, unfinished, transfers, aside, unseen })
    }

    /// Whether no worker has registered yet, or one has not reported how much of its disk is free.
    pub(crate) fn awaits_report(&self) -> bool {
        let has_disk = |worker: &Worker| worker.capacity.unwrap_or_default().disk_bytes > 0;
        let is_silent = |worker: &Worker| has_disk(worker) && worker.disk_free_bytes == 0;
        self.workers.is_empty() || self.workers.iter().any(is_silent)
    }

    /// The exit code: whether everything was seen, and is ready.
    pub(crate) fn code(&self) -> u8 {
        let ready = self.services.iter().all(|service| service.not_ready.is_empty());
        u8::from(!ready || !self.unseen.is_empty())
    }

    /// Adds it to a document.
    pub(crate) fn fill(&self, document: &mut Value) {
        document["services"] = self.services.iter().map(Service::document).collect();
        document["workers"] = self.workers.iter().map(shown::worker).collect();
        let states = local::states(&self.unfinished);
        document["workloads"] =
            states.into_iter().map(|(state, count)| (state, Value::from(count))).collect();
        document["queue"] = queue_document(&self.unfinished).into();
        document["transfers"] = self.transfers.iter().map(transfer_document).collect();
        let Aside { volumes, containers, more } = self.aside;
        document["set_aside"] = json!({ "volumes": volumes, "containers": containers, "more": more });
        document["unseen"] =
            self.unseen.iter().map(|(what, why)| json!({ "what": what, "error": why })).collect();
    }

    /// For people: what is wanted most stands where a narrow or short terminal shows it.
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
        let transfers = transfers_text(&self.transfers, &self.workers);
        let upper = match hidden.as_str() {
            "" => format!("{workers}\n{workloads}"),
            hidden => format!("{hidden}{workers}"),
        };
        format!("{upper}{transfers}{}\n{services}", self.aside.text())
    }
}

/// How much a store that came out of a backup does not know, as far as one page tells.
#[derive(Debug, Clone, Copy, Default)]
struct Aside {
    volumes: u64,
    containers: u64,
    more: bool,
}

impl Aside {
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
            "\nset aside after a backup was restored: {}{more}; see `gantry list volumes --set-aside`, and adopt or purge them\n",
            kinds.join(", ")
        )
    }
}

/// What is set aside. That a store does not answer is said of the services.
async fn aside(addresses: &Addresses, outgoing: &Outgoing) -> Aside {
    let Ok(store) = peer(&addresses.artifacts, outgoing.clone()) else { return Aside::default() };
    let request = ListSetAsideRequest { page_size: 1000, ..ListSetAsideRequest::default() };
    let mut inventory = InventoryClient::new(store);
    let Ok(Ok(page)) = timeout(PATIENCE, inventory.list_set_aside(request)).await else {
        return Aside::default();
    };
    let page = page.into_inner();
    let number = |of: fn(&SetAside) -> bool| page.set_aside.iter().filter(|one| of(one)).count() as u64;
    Aside {
        volumes: number(|one| !one.volume_handle.is_empty()),
        containers: number(|one| !one.container_handle.is_empty()),
        more: !page.next_page_token.is_empty(),
    }
}

/// Every worker, by name.
async fn workers(scheduler: &Peer) -> Result<Vec<Worker>, Status> {
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

const WORKERS: [&str; 8] = ["WORKER", "STATE", "TASKS", "FREE DISK", "TAGS", "TEAM", "CONTAINERS", "VOLUMES"];

fn worker_row(worker: &Worker) -> Vec<String> {
    let state = match worker.state() {
        WorkerState::Running => words::standing(worker),
        _ => words::silent(worker),
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
        words::free_disk(worker),
        labels.tags.join(","),
        labels.team,
        worker.containers.to_string(),
        worker.volumes.to_string(),
    ]
}

/// One service of one process, or an address at which none answers.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Service {
    name: String,
    address: String,
    version: String,
    instance: String,
    not_ready: Vec<String>,
    /// It answered, though it does not say what it is.
    refuses: bool,
}

impl Service {
    fn document(&self) -> Value {
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
        let health = match (self.not_ready.as_slice(), self.instance.as_str()) {
            ([], _) => "ready",
            (_, "") if self.refuses => "refuses",
            (_, "") => "no answer",
            _ => "not ready",
        };
        let health = health.to_owned();
        vec![self.name.clone(), health, self.version.clone(), self.instance.clone(), self.address.clone()]
    }

    /// Why it is not ready. Services of one process are so together.
    fn complaint(&self) -> Option<String> {
        let why = self.not_ready.join("; ");
        (!why.is_empty()).then(|| format!("{}: {}\n", self.address, plain(&why, 200)))
    }
}

fn services_text(services: &[Service]) -> String {
    let rows: Vec<_> = services.iter().map(Service::row).collect();
    let mut complaints: Vec<_> = services.iter().filter_map(Service::complaint).collect();
    complaints.dedup();
    let services = filled(&["SERVICE", "HEALTH", "VERSION", "PROCESS", "ADDRESS"], &rows);
    format!("{services}{}", complaints.concat())
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
    match &addresses.proxy {
        // Who comes through a proxy may not reach the gateways behind it; that the scheduler hears of them is said of the workers.
        Some(proxy) => asked.extend(proxy.split(',').map(|address| (address.trim(), "proxy"))),
        None => {
            // A cluster in one process is asked once, though its gateway may be named by another address of it.
            let aliases = match addresses.in_one_place().map(|address| peer(address, outgoing.clone())) {
                Some(Ok(one)) => timeout(PATIENCE, aliases(&one)).await.ok().and_then(Result::ok),
                _ => None,
            };
            let aliases = aliases.unwrap_or_default();
            for worker in workers.iter().filter(|worker| worker.state() != WorkerState::Lost) {
                if !aliases.contains(&worker.gateway_endpoint) {
                    asked.entry(&worker.gateway_endpoint).or_insert("runtime-gateway");
                }
            }
        }
    }
    let asking = asked.into_iter().map(|(address, name)| ask(address, name, outgoing.clone()));
    let mut services: Vec<_> = futures::future::join_all(asking).await.into_iter().flatten().collect();
    for range in &addresses.ranges {
        only_who_answers(&mut services, range);
    }
    services.sort();
    services
}

/// Nobody is missed at an address of a range of which another answers; where none does, the range is one service that is not there.
fn only_who_answers(services: &mut Vec<Service>, range: &Range) {
    let of_range = |service: &Service| range.addresses.contains(&service.address);
    let is_silent = |service: &Service| of_range(service) && service.instance.is_empty();
    let nobody = services.iter().filter(|service| of_range(service)).all(is_silent);
    let one = services.iter().find(|service| nobody && of_range(service)).cloned();
    services.retain(|service| !is_silent(service));
    services.extend(one.map(|one| Service { address: range.text.clone(), ..one }));
}

/// The services at one address. `expected` is what it is called when it does not say so itself.
async fn ask(address: &str, expected: &str, outgoing: Outgoing) -> Vec<Service> {
    let silent = |why: String, refuses| {
        vec![Service {
            name: expected.to_owned(),
            address: address.to_owned(),
            version: String::new(),
            instance: String::new(),
            not_ready: vec![why],
            refuses,
        }]
    };
    let asked = match peer(address, outgoing) {
        Ok(peer) => peer,
        Err(error) => return silent(error.to_string(), false),
    };
    let asking = async { CapabilitiesClient::new(asked).get_capabilities(GetCapabilitiesRequest {}).await };
    let answer = match timeout(PATIENCE, asking).await {
        Err(_) => return silent("no answer in time".to_owned(), false),
        Ok(Err(status)) => {
            let refuses = matches!(status.code(), Code::Unauthenticated | Code::PermissionDenied);
            return silent(Refused::from(status).why(), refuses);
        }
        Ok(Ok(answer)) => answer.into_inner(),
    };
    if answer.services.is_empty() {
        return silent(answer.not_ready.join("; "), false);
    }
    let service = |service: rpc::pb::capabilities::ServiceCapabilities| Service {
        name: service.service,
        address: address.to_owned(),
        version: service.version,
        instance: answer.instance.clone(),
        not_ready: answer.not_ready.clone(),
        refuses: false,
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
    // Who waits for the copy of another streamer lists it, too, and knows little of it.
    let going = |transfer: &Transfer| (transfer.artifact_id.clone(), transfer.to_worker_id.clone());
    let elsewhere = |transfer: &Transfer| {
        transfer.progress.as_ref().is_some_and(|progress| progress.route() == Route::Elsewhere)
    };
    let made: BTreeSet<_> = transfers.iter().filter(|transfer| !elsewhere(transfer)).map(going).collect();
    transfers.retain(|transfer| !elsewhere(transfer) || !made.contains(&going(transfer)));
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
        Route::Store => "store",
    }
}

fn transfers_text(transfers: &[Transfer], workers: &[Worker]) -> String {
    if transfers.is_empty() {
        return String::new();
    }
    let name = |id: &str| match workers.iter().find(|worker| worker.worker_id == id) {
        Some(worker) => worker.name.clone(),
        None if id.is_empty() => "not known yet".to_owned(),
        None => id.to_owned(),
    };
    let row = |transfer: &Transfer| {
        let progress = transfer.progress.clone().unwrap_or_default();
        vec![
            name(&progress.from_worker_id),
            name(&transfer.to_worker_id),
            format!("{} of {}", bytes(progress.bytes_done), bytes(progress.bytes_total)),
            format!("{}/s", bytes(progress.bytes_per_second)),
            transfer.artifact_id.clone(),
        ]
    };
    let rows: Vec<_> = transfers.iter().map(row).collect();
    format!("\n{}", render(&["COPIED FROM", "TO", "DONE", "SPEED", "ARTIFACT"], &rows))
}

/// Workloads that wait, oldest first, each with the reasons.
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
            "submitted_at": workload.submitted_at.as_ref().map(words::instant),
            "waiting_for": workload.waiting_for,
        })
    };
    queue(unfinished).iter().map(waiting).collect()
}

/// How many workloads are in which state, and why those wait that wait.
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
        let first = why.next().unwrap_or_else(|| "it has not been looked at yet".to_owned());
        let head = vec![workload.workload_id.clone(), team, first];
        std::iter::once(head).chain(why.map(|why| vec![String::new(), String::new(), why]))
    });
    let rows: Vec<_> = rows.collect();
    format!("\n{}", render(&["WAITING", "TEAM", "WHY"], &rows))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_watched_fits_its_terminal_and_stands_in_the_place_of_what_was_there() {
        let text = "1234567890\n2\n3\n4\n";
        assert_eq!(redrawn(text, 0, 0), "\x1b[H1234567890\x1b[K\n2\x1b[K\n3\x1b[K\n4\x1b[K\n\x1b[J");
        assert_eq!(redrawn(text, 8, 4), "\x1b[H1234567…\x1b[K\n2\x1b[K\n… and 2…\x1b[K\n\x1b[J");
        assert_eq!(redrawn(text, 80, 5).matches('\n').count(), 4, "the cursor stands below");
        assert_eq!(redrawn(text, 80, 1), "\x1b[H… and 4 more lines\x1b[K\n\x1b[J");
    }

    #[test]
    fn in_a_range_of_ports_only_those_are_shown_that_answer() {
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
        only_who_answers(&mut some, &range);
        assert_eq!(some, [elsewhere.clone(), answers]);
        let mut nobody =
            vec![service("http://there:1", ""), elsewhere.clone(), service("http://there:2", "")];
        only_who_answers(&mut nobody, &range);
        assert_eq!(nobody, [elsewhere, service("http://there:1-2", "")]);
    }

    #[test]
    fn of_a_service_that_is_not_ready_it_is_said_why_once_for_its_process() {
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
        assert!(text.contains("proxy     no answer  http://there:1\n"), "{text}");
        assert!(text.ends_with("http://there:1: Connection refused\n"), "{text}");
        let refuses = Service { refuses: true, ..service("proxy", "", &["present the token"]) };
        let text = services_text(&[refuses]);
        assert!(text.contains("proxy     refuses  http://there:1\n"), "{text}");
    }

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
        assert_eq!(words, ["one", "two", "1.0", "MiB", "of", "4.0", "MiB", "1.0", "KiB/s", "bytes"]);
        let document = transfer_document(&transfer);
        assert_eq!((&document["bytes_done"], &document["to_worker_id"]), (&(1 << 20).into(), &"2".into()));
        assert_eq!(transfers_text(&[], &[]), "");
    }
}
