//! A fake scheduler that returns the keys of its tickets, and rejects all other calls.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use super::UNREACHABLE;
use domain::worker::{TicketClaims, TicketOperation};
use domain::{Timestamp, VolumeHandle, WorkerId};
use rpc::pb::scheduler as pb;
use rpc::pb::scheduler::workers_server::{Workers, WorkersServer};
use rpc::token::TokenSigner;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

#[derive(Clone)]
pub(crate) struct Schedule {
    signer: TokenSigner,
    calls_for_keys: Arc<AtomicUsize>,
}

fn unused<T>() -> Result<Response<T>, Status> {
    Err(Status::unimplemented("not used in this test"))
}

impl Schedule {
    pub(crate) fn new() -> Self {
        Self { signer: TokenSigner::from_seed(&[7; 32]), calls_for_keys: Arc::default() }
    }

    /// Returns how often the keys were queried.
    pub(crate) fn calls_for_keys(&self) -> usize {
        self.calls_for_keys.load(Ordering::Relaxed)
    }

    pub(crate) fn service(&self) -> WorkersServer<Self> {
        WorkersServer::new(self.clone())
    }

    /// Signs a ticket, and returns it with its claims.
    pub(crate) fn ticket(
        &self,
        worker: WorkerId,
        volume: VolumeHandle,
        operation: TicketOperation,
    ) -> (String, TicketClaims) {
        self.ticket_at(UNREACHABLE, worker, volume, operation)
    }

    /// Signs a ticket for a worker whose gateway listens at `endpoint`. Returns it with its claims.
    pub(crate) fn ticket_at(
        &self,
        endpoint: &str,
        worker: WorkerId,
        volume: VolumeHandle,
        operation: TicketOperation,
    ) -> (String, TicketClaims) {
        let expires_at = Timestamp::now() + Duration::from_secs(600);
        let (team, endpoint) = ("main".to_owned(), endpoint.to_owned());
        let claims = TicketClaims { worker, volume, team, operation, expires_at, endpoint };
        (self.signer.sign(&claims), claims)
    }
}

#[tonic::async_trait]
impl Workers for Schedule {
    type SynchronizeStream = ReceiverStream<Result<pb::SynchronizeResponse, Status>>;

    async fn synchronize(
        &self,
        _: Request<Streaming<pb::SynchronizeRequest>>,
    ) -> Result<Response<Self::SynchronizeStream>, Status> {
        unused()
    }

    async fn issue_ticket(
        &self,
        _: Request<pb::IssueTicketRequest>,
    ) -> Result<Response<pb::IssueTicketResponse>, Status> {
        unused()
    }

    async fn list_workers(
        &self,
        _: Request<pb::ListWorkersRequest>,
    ) -> Result<Response<pb::ListWorkersResponse>, Status> {
        unused()
    }

    async fn get_worker(
        &self,
        _: Request<pb::GetWorkerRequest>,
    ) -> Result<Response<pb::GetWorkerResponse>, Status> {
        unused()
    }

    async fn keys(&self, _: Request<pb::KeysRequest>) -> Result<Response<pb::KeysResponse>, Status> {
        self.calls_for_keys.fetch_add(1, Ordering::Relaxed);
        Ok(Response::new(pb::KeysResponse { keys: vec![self.signer.public()] }))
    }

    async fn issue_proxy_ticket(
        &self,
        _: Request<pb::IssueProxyTicketRequest>,
    ) -> Result<Response<pb::IssueProxyTicketResponse>, Status> {
        unused()
    }

    type WatchWorkersStream = ReceiverStream<Result<pb::WatchWorkersResponse, Status>>;

    async fn watch_workers(
        &self,
        _: Request<pb::WatchWorkersRequest>,
    ) -> Result<Response<Self::WatchWorkersStream>, Status> {
        unused()
    }

    async fn cordon_worker(
        &self,
        _: Request<pb::CordonWorkerRequest>,
    ) -> Result<Response<pb::CordonWorkerResponse>, Status> {
        unused()
    }

    async fn uncordon_worker(
        &self,
        _: Request<pb::UncordonWorkerRequest>,
    ) -> Result<Response<pb::UncordonWorkerResponse>, Status> {
        unused()
    }

    async fn retire_worker(
        &self,
        _: Request<pb::RetireWorkerRequest>,
    ) -> Result<Response<pb::RetireWorkerResponse>, Status> {
        unused()
    }

    async fn prune_worker(
        &self,
        _: Request<pb::PruneWorkerRequest>,
    ) -> Result<Response<pb::PruneWorkerResponse>, Status> {
        unused()
    }
}
