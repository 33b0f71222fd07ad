//! The gRPC service `Workers`.

use std::sync::Arc;

use domain::worker::TicketOperation;
use domain::{Timestamp, WorkerId};
use futures::StreamExt;
use futures::stream::Map;
use rpc::page::Page;
use rpc::pb::scheduler as pb;
use rpc::pb::scheduler::workers_server::Workers;
use rpc::{parse_enum, parse_id, parse_team};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use super::worker_stream::{self, Answer, Message};
use super::{IntoStatus, SERVICE, convert, database, end_page, stopping, unknown_worker, watch_workers};
use crate::app::App;
use crate::lifecycle::departure::Withdrawal;
use crate::workers;

/// Checks the name or id of a worker.
fn named(worker: &str) -> Result<&str, Status> {
    rpc::check_name("worker", worker).map(|()| worker)
}

/// The gRPC service `Workers`.
pub(crate) struct WorkersService(pub(crate) Arc<App>);

impl WorkersService {
    fn to_proto(&self, worker: workers::Worker) -> pb::Worker {
        convert::worker(worker, self.0.context.config.worker_ttl, Timestamp::now())
    }
}

#[tonic::async_trait]
impl Workers for WorkersService {
    type SynchronizeStream = Map<ReceiverStream<Answer>, fn(Answer) -> Message>;

    async fn synchronize(
        &self,
        request: Request<Streaming<pb::SynchronizeRequest>>,
    ) -> Result<Response<Self::SynchronizeStream>, Status> {
        let inbound = request.into_inner();
        let (answers, outbound) = mpsc::channel(4);
        let scheduler = self.0.clone();
        self.0.context.tasks.spawn(async move {
            let end = tokio::select! {
                () = scheduler.context.stopping.cancelled() => Err(stopping()),
                end = worker_stream::attend(&scheduler, inbound, &answers) => end,
            };
            if let Err(status) = end {
                // The gateway may have closed the stream.
                answers.send(Box::new(Err(status))).await.ok();
            }
        });
        let unboxed: fn(Answer) -> Message = |answer| *answer;
        Ok(Response::new(ReceiverStream::new(outbound).map(unboxed)))
    }

    async fn keys(&self, _: Request<pb::KeysRequest>) -> Result<Response<pb::KeysResponse>, Status> {
        Ok(Response::new(pb::KeysResponse { keys: vec![self.0.signer.public()] }))
    }

    async fn issue_ticket(
        &self,
        request: Request<pb::IssueTicketRequest>,
    ) -> Result<Response<pb::IssueTicketResponse>, Status> {
        let request = request.into_inner();
        let team = parse_team("team", request.team)?;
        let worker = parse_id("worker_id", &request.worker_id)?;
        let volume = parse_id("volume_handle", &request.volume_handle)?;
        let operation = match parse_enum("operation", request.operation)? {
            pb::TicketOperation::Write => TicketOperation::Write,
            pb::TicketOperation::Read | pb::TicketOperation::Unspecified => TicketOperation::Read,
        };

        let ticket = self
            .0
            .tickets
            .issue_ticket(team, worker, volume, operation, Timestamp::now())
            .await
            .map_err(IntoStatus::status)?;

        Ok(Response::new(pb::IssueTicketResponse {
            ticket: ticket.token,
            gateway_endpoint: ticket.gateway_endpoint,
            valid_for: Some(rpc::duration(self.0.context.config.ticket_validity)),
            zone: ticket.zone,
        }))
    }

    async fn issue_proxy_ticket(
        &self,
        request: Request<pb::IssueProxyTicketRequest>,
    ) -> Result<Response<pb::IssueProxyTicketResponse>, Status> {
        let worker = parse_id("worker_id", &request.into_inner().worker_id)?;

        let ticket =
            self.0.tickets.issue_proxy_ticket(worker, Timestamp::now()).await.map_err(IntoStatus::status)?;

        Ok(Response::new(pb::IssueProxyTicketResponse {
            ticket: ticket.token,
            gateway_endpoint: ticket.gateway_endpoint,
            valid_for: Some(rpc::duration(self.0.context.config.ticket_validity)),
        }))
    }

    async fn list_workers(
        &self,
        request: Request<pb::ListWorkersRequest>,
    ) -> Result<Response<pb::ListWorkersResponse>, Status> {
        let request = request.into_inner();
        let page = Page::of(SERVICE, &request)?;

        let after = page.after.map(WorkerId::from_uuid);
        let found = workers::list(self.0.context.db.read(), &self.0.context.config, after, page.size + 1)
            .await
            .map_err(|error| database("list workers", &error))?;

        let (ttl, now) = (self.0.context.config.worker_ttl, Timestamp::now());
        let to_proto = |worker| convert::worker(worker, ttl, now);
        let (workers, next_page_token) = end_page(&page, found, |worker| worker.placed.id.uuid(), to_proto);
        Ok(Response::new(pb::ListWorkersResponse { workers, next_page_token }))
    }

    async fn get_worker(
        &self,
        request: Request<pb::GetWorkerRequest>,
    ) -> Result<Response<pb::GetWorkerResponse>, Status> {
        let request = request.into_inner();
        let name = named(&request.worker)?;

        let worker = workers::get(self.0.context.db.read(), &self.0.context.config, name)
            .await
            .map_err(|error| database("read a worker", &error))?;

        let worker = worker.ok_or_else(|| unknown_worker(name))?;
        Ok(Response::new(pb::GetWorkerResponse { worker: Some(self.to_proto(worker)) }))
    }

    type WatchWorkersStream = ReceiverStream<Result<pb::WatchWorkersResponse, Status>>;

    async fn watch_workers(
        &self,
        request: Request<pb::WatchWorkersRequest>,
    ) -> Result<Response<Self::WatchWorkersStream>, Status> {
        let after = request.into_inner().after_revision;
        let (changes, outbound) = mpsc::channel(watch_workers::BATCH);
        let scheduler = self.0.clone();
        self.0.context.tasks.spawn(async move {
            let end = tokio::select! {
                () = changes.closed() => return,
                () = scheduler.context.stopping.cancelled() => Err(stopping()),
                end = watch_workers::follow(&scheduler, after, &changes) => end,
            };
            if let Err(status) = end {
                // The watcher may have closed the stream.
                changes.send(Err(status)).await.ok();
            }
        });
        Ok(Response::new(ReceiverStream::new(outbound)))
    }

    async fn cordon_worker(
        &self,
        request: Request<pb::CordonWorkerRequest>,
    ) -> Result<Response<pb::CordonWorkerResponse>, Status> {
        let request = request.into_inner();
        let interrupt_after = rpc::parse_duration("interrupt_after", request.interrupt_after)?;

        let landing = self
            .0
            .lifecycle
            .withdraw_worker(named(&request.worker)?, Withdrawal::Cordon, interrupt_after)
            .await;

        let worker = landing.map_err(IntoStatus::status)?.map(|worker| self.to_proto(worker));
        Ok(Response::new(pb::CordonWorkerResponse { worker }))
    }

    async fn uncordon_worker(
        &self,
        request: Request<pb::UncordonWorkerRequest>,
    ) -> Result<Response<pb::UncordonWorkerResponse>, Status> {
        let request = request.into_inner();

        let running =
            self.0.lifecycle.uncordon_worker(named(&request.worker)?).await.map_err(IntoStatus::status)?;

        Ok(Response::new(pb::UncordonWorkerResponse { worker: running.map(|worker| self.to_proto(worker)) }))
    }

    async fn retire_worker(
        &self,
        request: Request<pb::RetireWorkerRequest>,
    ) -> Result<Response<pb::RetireWorkerResponse>, Status> {
        let request = request.into_inner();
        let interrupt_after = rpc::parse_duration("interrupt_after", request.interrupt_after)?;
        let down = Withdrawal::Retire { force: request.force };

        let retiring = self.0.lifecycle.withdraw_worker(named(&request.worker)?, down, interrupt_after).await;

        let worker = retiring.map_err(IntoStatus::status)?.map(|worker| self.to_proto(worker));
        Ok(Response::new(pb::RetireWorkerResponse { worker }))
    }

    async fn prune_worker(
        &self,
        request: Request<pb::PruneWorkerRequest>,
    ) -> Result<Response<pb::PruneWorkerResponse>, Status> {
        let request = request.into_inner();

        let pruned = self.0.lifecycle.prune(named(&request.worker)?, request.force).await;

        Ok(Response::new(convert::pruned(pruned.map_err(IntoStatus::status)?)))
    }
}
