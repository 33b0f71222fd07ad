//! Observation of a cluster: what it runs now, and how much processor time and memory that uses.
//!
//! Each part has a short time limit. A part that cannot be read keeps its last state, and the
//! snapshot says so.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::{Duration, SystemTime};

use domain::AttemptId;
use futures::{StreamExt, TryStreamExt};
use prost_types::Timestamp;
use rpc::Peer;
use rpc::pb::runtime::containers_client::ContainersClient;
use rpc::pb::runtime::{ContainerUsage, GetUsageRequest};
use rpc::pb::scheduler::{
    GetDemandRequest, Lease, ListLeasesRequest, ListRequest, ListWorkersRequest, ReplicaCheck, Worker,
    WorkerState, Workload, WorkloadState,
};
use rpc::pb::streamer::Transfer;
use tokio::time::timeout;
use tonic::Status;

use crate::client::connect::Connection;
use crate::client::queries::pages;
use crate::ending::error::Refused;

/// Time limit of each part of a snapshot.
const PART_LIMIT: Duration = Duration::from_secs(1);
/// Maximum number of gateways that are asked at a time.
const CONCURRENT_GATEWAYS: usize = 64;
/// Number of waiting workloads in a snapshot.
const WAITING_LIMIT: u32 = 100;
/// The part of a snapshot with the workers.
pub(super) const WORKERS: &str = "workers";
/// The part of a snapshot with the workloads that have a worker.
pub(super) const WORKLOADS: &str = "workloads";
/// Number of items in one page.
const PAGE_SIZE: u32 = 1000;
/// States in which a workload has a worker.
const PLACED: [WorkloadState; 4] =
    [WorkloadState::Running, WorkloadState::Settling, WorkloadState::Starting, WorkloadState::Assigned];

/// What a cluster runs at one moment.
#[derive(Debug, Clone, Default)]
pub(super) struct Snapshot {
    pub(super) at: Timestamp,
    pub(super) workers: Vec<Worker>,
    /// Workloads with a worker.
    pub(super) placed: Vec<Workload>,
    /// The newest of the workloads that wait, the oldest of them first.
    pub(super) queue: Vec<Workload>,
    /// Number of workloads and leases that wait for a worker.
    pub(super) waiting: u64,
    pub(super) leases: Vec<Lease>,
    /// Present usage by the id of the container.
    pub(super) usage: HashMap<String, Measured>,
    pub(super) transfers: Vec<Transfer>,
    /// Parts that cannot be read, with the cause.
    pub(super) unseen: Vec<(String, String)>,
}

/// Usage of a running container.
#[derive(Debug, Clone, Default)]
pub(super) struct Measured {
    pub(super) usage: ContainerUsage,
    pub(super) worker_id: String,
    /// Used processors since the last measurement. `None`: this is the first one, or the worker
    /// does not know it.
    pub(super) cpu: Option<f64>,
    /// Time of the measurement, by the clock of the gateway.
    pub(super) at: Option<SystemTime>,
}

/// A part of a snapshot and its state.
type Part<T> = Result<T, Status>;

/// Observer of a cluster, with the last snapshot.
pub(super) struct Observer {
    connection: Connection,
    /// Connections to gateways, by address.
    gateways: HashMap<String, ContainersClient<Peer>>,
    last: Snapshot,
}

impl Snapshot {
    /// Returns whether a part cannot be read.
    pub(super) fn lacks(&self, part: &str) -> bool {
        self.unseen.iter().any(|(what, _)| what == part)
    }
}

impl Observer {
    pub(super) fn new(connection: Connection) -> Self {
        Self { connection, gateways: HashMap::new(), last: Snapshot::default() }
    }

    /// Takes the next snapshot. Cancel safe.
    pub(super) async fn look(&mut self) -> Snapshot {
        let mut next = Snapshot { at: SystemTime::now().into(), ..self.last.clone() };
        next.unseen.clear();
        let connection = &self.connection;
        let (workers, placed, queue, waiting, leases, transfers) = tokio::join!(
            in_time(workers(connection)),
            in_time(placed(connection)),
            in_time(queue(connection)),
            in_time(waiting(connection)),
            in_time(leases(connection)),
            connection.transfers(PART_LIMIT),
        );
        keep(&mut next.workers, workers, WORKERS, &mut next.unseen);
        keep(&mut next.placed, placed, WORKLOADS, &mut next.unseen);
        keep(&mut next.queue, queue, "the queue", &mut next.unseen);
        keep(&mut next.waiting, waiting, "the demand", &mut next.unseen);
        keep(&mut next.leases, leases, "leases", &mut next.unseen);
        // Transfers of a streamer that does not answer are unknown.
        next.transfers = transfers.running;
        if let Some(status) = transfers.failure {
            next.unseen.push(("transfers".to_owned(), Refused::from(status).cause()));
        }
        self.measure(&mut next).await;
        self.last = next.clone();
        next
    }

    /// Measures the containers of all leases on workers in contact.
    async fn measure(&mut self, next: &mut Snapshot) {
        let workers: HashMap<_, _> = next
            .workers
            .iter()
            .filter(|worker| worker.state() == WorkerState::Running && !worker.gateway_endpoint.is_empty())
            .map(|worker| (worker.worker_id.as_str(), worker))
            .collect();
        let pairs: BTreeSet<_> = next.leases.iter().map(|lease| (&lease.worker_id, &lease.team)).collect();
        let mut asked = Vec::new();
        for (worker_id, team) in pairs {
            let Some(worker) = workers.get(worker_id.as_str()) else { continue };
            if !self.gateways.contains_key(&worker.gateway_endpoint)
                && let Ok(client) = self.connection.containers_at(&worker.gateway_endpoint).await
            {
                self.gateways.insert(worker.gateway_endpoint.clone(), client);
            }
            let Some(client) = self.gateways.get(&worker.gateway_endpoint).cloned() else { continue };
            let request = GetUsageRequest { team: team.clone(), worker_id: worker_id.clone() };
            asked.push(async move { (*worker, in_time(usage(client, request)).await) });
        }
        let answers: Vec<_> =
            futures::stream::iter(asked).buffer_unordered(CONCURRENT_GATEWAYS).collect().await;
        let mut measured = HashMap::new();
        let mut silent = BTreeMap::new();
        for (worker, answer) in answers {
            match answer {
                Ok((at, containers)) => measured.extend(containers.into_iter().map(|usage| {
                    let before = self.last.usage.get(&usage.container_id);
                    let cpu = before.and_then(|before| processors(before, &usage, at));
                    (
                        usage.container_id.clone(),
                        Measured { cpu, usage, worker_id: worker.worker_id.clone(), at },
                    )
                })),
                Err(status) => _ = silent.insert(worker.name.clone(), Refused::from(status).cause()),
            }
        }
        next.unseen
            .extend(silent.into_iter().map(|(worker, why)| (format!("the usage of worker {worker}"), why)));
        next.usage = measured;
    }
}

/// Returns the processors that a container used between two measurements.
fn processors(before: &Measured, now: &ContainerUsage, at: Option<SystemTime>) -> Option<f64> {
    let used = |usage: &ContainerUsage| usage.cpu_time.and_then(|time| Duration::try_from(time).ok());
    let passed = at?.duration_since(before.at?).ok().filter(|passed| !passed.is_zero())?;
    // The sum may decrease when a process ends.
    let used = used(now)?.saturating_sub(used(&before.usage)?);
    Some(used.as_secs_f64() / passed.as_secs_f64())
}

/// Replaces the last state of a part, unless the part cannot be read.
fn keep<T>(last: &mut T, part: Part<T>, what: &str, unseen: &mut Vec<(String, String)>) {
    match part {
        Ok(part) => *last = part,
        Err(status) => unseen.push((what.to_owned(), Refused::from(status).cause())),
    }
}

async fn in_time<T>(part: impl Future<Output = Part<T>>) -> Part<T> {
    timeout(PART_LIMIT, part).await.unwrap_or_else(|_| Err(Status::deadline_exceeded("no answer in time")))
}

async fn workers(connection: &Connection) -> Part<Vec<Worker>> {
    pages(async |page_token| {
        let request = ListWorkersRequest { page_size: PAGE_SIZE, page_token };
        let page = connection.workers().list_workers(request).await?.into_inner();
        Ok((page.workers, page.next_page_token))
    })
    .try_collect()
    .await
}

/// Lists the workloads with a worker, of all teams.
async fn placed(connection: &Connection) -> Part<Vec<Workload>> {
    let mut placed = BTreeMap::new();
    for state in PLACED {
        let listed: Vec<Workload> = pages(async |page_token| {
            let request = ListRequest {
                state: state.into(),
                page_size: PAGE_SIZE,
                page_token,
                ..ListRequest::default()
            };
            let page = connection.workloads().list(request).await?.into_inner();
            Part::Ok((page.workloads, page.next_page_token))
        })
        .try_collect()
        .await?;
        // A workload that changes its state meanwhile may be listed twice.
        placed.extend(listed.into_iter().map(|workload| (workload.workload_id.clone(), workload)));
    }
    Ok(placed.into_values().collect())
}

/// Lists workloads that wait, of all teams.
async fn queue(connection: &Connection) -> Part<Vec<Workload>> {
    let request = ListRequest {
        state: WorkloadState::Pending.into(),
        page_size: WAITING_LIMIT,
        ..ListRequest::default()
    };
    let mut queue = connection.workloads().list(request).await?.into_inner().workloads;
    queue.sort_by_key(|workload| workload.submitted_at.map(|at| (at.seconds, at.nanos)));
    Ok(queue)
}

async fn waiting(connection: &Connection) -> Part<u64> {
    let request =
        GetDemandRequest { replica_check: ReplicaCheck::None.into(), ..GetDemandRequest::default() };
    Ok(connection.placements().get_demand(request).await?.into_inner().waiting)
}

async fn leases(connection: &Connection) -> Part<Vec<Lease>> {
    pages(async |page_token| {
        let request = ListLeasesRequest { page_size: PAGE_SIZE, page_token, ..ListLeasesRequest::default() };
        let page = connection.placements().list_leases(request).await?.into_inner();
        Ok((page.leases, page.next_page_token))
    })
    .try_collect()
    .await
}

async fn usage(
    mut gateway: ContainersClient<Peer>,
    request: GetUsageRequest,
) -> Part<(Option<SystemTime>, Vec<ContainerUsage>)> {
    let answer = gateway.get_usage(request).await?.into_inner();
    Ok((answer.measured_at.and_then(|at| SystemTime::try_from(at).ok()), answer.containers))
}

/// Returns the id of the container of a service of an attempt.
pub(super) fn container_of(attempt: &str, service: &str) -> Option<String> {
    attempt.parse().ok().map(|attempt: AttemptId| attempt.service(service).to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn used(milliseconds: u64) -> ContainerUsage {
        ContainerUsage {
            cpu_time: Some(rpc::duration(Duration::from_millis(milliseconds))),
            ..ContainerUsage::default()
        }
    }

    #[test]
    fn processors_are_counted_between_measurements() {
        let start = SystemTime::UNIX_EPOCH;
        let before = Measured { usage: used(500), at: Some(start), ..Measured::default() };
        let later = Some(start + Duration::from_secs(2));
        assert_eq!(processors(&before, &used(1500), later), Some(0.5));
        assert_eq!(processors(&before, &used(400), later), Some(0.0), "a process has ended");
        assert_eq!(processors(&before, &used(1500), Some(start)), None, "the clock stood still");
        assert_eq!(processors(&before, &ContainerUsage::default(), later), None);
    }

    #[test]
    fn part_without_answer_keeps_its_last_state() {
        let (mut last, mut unseen) = (vec![1], Vec::new());
        keep(&mut last, Err(Status::deadline_exceeded("no answer in time")), "workers", &mut unseen);
        assert_eq!((last.as_slice(), unseen.len()), (&[1][..], 1));
        keep(&mut last, Ok(vec![2]), "workers", &mut unseen);
        assert_eq!((last.as_slice(), unseen.len()), (&[2][..], 1));
    }
}
