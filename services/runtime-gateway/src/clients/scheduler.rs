//! The client of the scheduler, for calls outside of a worker's stream.

use domain::WorkerId;
use domain::workload::{Exit, Failure, PublishedCache, PublishedOutput, Usage};
use rpc::pb::scheduler as pb;
use rpc::pb::scheduler::placements_client::PlacementsClient;
use rpc::pb::scheduler::workers_client::WorkersClient;
use rpc::pb::scheduler::workloads_client::WorkloadsClient;
use rpc::{Peer, Refusal};

/// Most bytes of a desired state, which names all leases of the worker.
const DESIRED_BYTES: usize = 256 << 20;

/// Most workers that are reliable for a request of disk space.
const MAX_RELIABLE: usize = 10_000;

/// The result of an attempt, as the scheduler receives it.
#[derive(Debug, Clone, Default)]
pub(crate) struct AttemptResult {
    pub(crate) exit: Option<Exit>,
    pub(crate) failure: Option<Failure>,
    pub(crate) outputs: Vec<PublishedOutput>,
    pub(crate) caches: Vec<PublishedCache>,
    /// Notes for callers about parts of outputs and caches that were not published.
    pub(crate) notes: Vec<String>,
    pub(crate) started: Option<domain::Timestamp>,
    pub(crate) usage: Usage,
    /// Standard output of the process, if the spec keeps it.
    pub(crate) result: Option<bytes::Bytes>,
}

impl AttemptResult {
    pub(crate) fn failed(failure: Failure) -> Self {
        Self { failure: Some(failure), ..Self::default() }
    }

    /// Adds a failure. The reason of the first failure is kept.
    pub(crate) fn add_failure(&mut self, failure: Failure) {
        match &mut self.failure {
            Some(first) => first.message += &format!("; {}", failure.message),
            none => *none = Some(failure),
        }
    }
}

/// Calls to the scheduler.
#[derive(Clone)]
pub(crate) struct SchedulerClient {
    pub(super) workers: WorkersClient<Peer>,
    workloads: WorkloadsClient<Peer>,
    placements: PlacementsClient<Peer>,
}

impl SchedulerClient {
    pub(crate) fn new(peer: Peer) -> Self {
        Self {
            workers: WorkersClient::new(peer.clone()).max_decoding_message_size(DESIRED_BYTES),
            workloads: WorkloadsClient::new(peer.clone()),
            placements: PlacementsClient::new(peer),
        }
    }

    /// Marks a driven lease as in use. Returns the generation of the desired state from which on it
    /// names the lease.
    pub(crate) async fn use_lease(&self, lease_token: &str) -> Result<u64, Refusal> {
        let request = pb::UseLeaseRequest { lease_token: lease_token.to_owned() };
        Ok(self.placements.clone().use_lease(request).await?.into_inner().generation)
    }

    /// Lists the ids of workers that are in contact and stay in service.
    pub(crate) async fn reliable_workers(&self) -> Result<Vec<String>, Refusal> {
        let (mut ids, mut page_token) = (Vec::new(), String::new());
        loop {
            let request = pb::ListWorkersRequest { page_size: 1000, page_token };
            let page = self.workers.clone().list_workers(request).await?.into_inner();
            let stays = |worker: &pb::Worker| {
                worker.state() == pb::WorkerState::Running && worker.desired() == pb::DesiredWorkerState::Run
            };
            ids.extend(page.workers.into_iter().filter(stays).map(|worker| worker.worker_id));
            page_token = page.next_page_token;
            if page_token.is_empty() || ids.len() >= MAX_RELIABLE {
                ids.truncate(MAX_RELIABLE);
                return Ok(ids);
            }
        }
    }

    /// Reports that the process of an attempt is about to start.
    pub(crate) async fn start_attempt(&self, lease_token: &str) -> Result<(), Refusal> {
        let request = pb::StartAttemptRequest { lease_token: lease_token.to_owned() };
        self.workloads.clone().start_attempt(request).await?;
        Ok(())
    }

    /// Reports the result of an attempt, which frees its slot.
    pub(crate) async fn finish_attempt(
        &self,
        lease_token: &str,
        result: &AttemptResult,
    ) -> Result<(), Refusal> {
        let request = pb::FinishAttemptRequest {
            lease_token: lease_token.to_owned(),
            exit: result.exit.map(rpc::exit),
            failure: result.failure.as_ref().map(rpc::failure),
            outputs: result.outputs.iter().map(rpc::published_output).collect(),
            started_at: result.started.map(rpc::timestamp),
            caches: result.caches.iter().map(rpc::published_cache).collect(),
            notes: result.notes.clone(),
            usage: Some(rpc::usage(&result.usage)),
            result: result.result.clone(),
        };
        self.workloads.clone().finish_attempt(request).await?;
        Ok(())
    }

    /// Returns the address of the gateway that attends a worker. `None`: no gateway does.
    pub(crate) async fn gateway_of(&self, worker: WorkerId) -> Result<Option<String>, Refusal> {
        let request = pb::GetWorkerRequest { worker: worker.to_string() };
        let answer = self.workers.clone().get_worker(request).await?.into_inner();
        Ok(answer.worker.map(|worker| worker.gateway_endpoint))
    }

    /// Whether the scheduler knows the worker with this name, and no gateway speaks for it.
    pub(crate) async fn is_silent(&self, name: &str) -> Result<bool, Refusal> {
        let request = pb::GetWorkerRequest { worker: name.to_owned() };
        let answer = self.workers.clone().get_worker(request).await?.into_inner();
        Ok(answer
            .worker
            .is_some_and(|worker| worker.name == name && worker.state() != pb::WorkerState::Running))
    }
}
