//! The services `Containers` and `Volumes`.
//!
//! Each handler parses the request, calls a function of another module, and converts the result.

mod archives;
mod attach;
mod audit;
pub(crate) mod auth;
mod containers;
mod errors;
mod exec;
mod fetch;
mod idle;
mod volumes;

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;
use std::sync::Arc;

use domain::ProcessId;
use domain::worker::TicketOperation;
use rpc::compression::ACCEPT_HEADER;
use rpc::pb::runtime as pb;
use rpc::pb::runtime::containers_server::{Containers, ContainersServer};
use rpc::pb::runtime::volumes_server::{Volumes, VolumesServer};
use rpc::{Reason, invalid_field, parse_id, parse_optional_id, parse_team};
use runtime::RuntimeError;
use server::Caller;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::metadata::MetadataValue;
use tonic::{Request, Response, Status, Streaming};
use tracing::Instrument;

use crate::SERVICE;
use crate::worker::Worker;
use crate::worker_set::{AttendedWorker, WorkerSet};
use errors::status;

/// Most messages that wait for a caller.
const ANSWER_QUEUE: usize = 4;

type Answers<T> = mpsc::Sender<Result<T, Status>>;

pub(crate) fn containers(gateway: WorkerSet) -> ContainersServer<Handler> {
    ContainersServer::new(Handler { gateway })
}

pub(crate) fn volumes(gateway: WorkerSet) -> VolumesServer<Handler> {
    VolumesServer::new(Handler { gateway })
}

pub(crate) struct Handler {
    gateway: WorkerSet,
}

impl Handler {
    /// Runs a call in a separate task, which answers through a bounded channel.
    fn answer<T, F>(
        &self,
        extensions: &http::Extensions,
        call: impl FnOnce(WorkerSet, Answers<T>) -> F,
    ) -> Response<ReceiverStream<Result<T, Status>>>
    where
        T: Send + 'static,
        F: Future<Output = Result<(), Status>> + Send + 'static,
    {
        let (answers, stream) = mpsc::channel(ANSWER_QUEUE);
        let call = call(self.gateway.for_call(extensions), answers.clone());
        let stopping = self.gateway.stopping().clone();
        let task = async move {
            let result = tokio::select! {
                result = call => result,
                () = answers.closed() => return,
                () = stopping.cancelled() => Err(Reason::Unavailable.status(SERVICE, "the gateway is stopping")),
            };
            if let Err(status) = result {
                // If sending fails, the caller is gone.
                answers.send(Err(status)).await.ok();
            }
        };
        self.gateway.tasks().spawn(task.in_current_span());
        Response::new(ReceiverStream::new(stream))
    }
}

#[tonic::async_trait]
impl Containers for Handler {
    type AttachStream = ReceiverStream<Result<pb::AttachResponse, Status>>;

    async fn attach(
        &self,
        request: Request<Streaming<pb::AttachRequest>>,
    ) -> Result<Response<Self::AttachStream>, Status> {
        let (_, extensions, requests) = request.into_parts();
        let caller = extensions.get::<Caller>().cloned();
        Ok(self.answer(&extensions, |gateway, answers| attach::attach(gateway, caller, requests, answers)))
    }

    type CreateContainerStream = ReceiverStream<Result<pb::CreateContainerResponse, Status>>;

    async fn create_container(
        &self,
        request: Request<pb::CreateContainerRequest>,
    ) -> Result<Response<Self::CreateContainerStream>, Status> {
        let (_, extensions, request) = request.into_parts();
        Ok(self.answer(&extensions, |gateway, answers| containers::create(gateway, request, answers)))
    }

    async fn get_container(
        &self,
        request: Request<pb::GetContainerRequest>,
    ) -> Result<Response<pb::GetContainerResponse>, Status> {
        let (_, extensions, request) = request.into_parts();
        containers::get(self.gateway.for_call(&extensions), request).await.map(Response::new)
    }

    async fn list_containers(
        &self,
        request: Request<pb::ListContainersRequest>,
    ) -> Result<Response<pb::ListContainersResponse>, Status> {
        let (_, extensions, request) = request.into_parts();
        containers::list(self.gateway.for_call(&extensions), request).await.map(Response::new)
    }

    async fn get_usage(
        &self,
        request: Request<pb::GetUsageRequest>,
    ) -> Result<Response<pb::GetUsageResponse>, Status> {
        let (_, extensions, request) = request.into_parts();
        containers::usage(self.gateway.for_call(&extensions), request).await.map(Response::new)
    }

    async fn get_process(
        &self,
        request: Request<pb::GetProcessRequest>,
    ) -> Result<Response<pb::GetProcessResponse>, Status> {
        let (_, extensions, request) = request.into_parts();
        containers::get_process(self.gateway.for_call(&extensions), request).await.map(Response::new)
    }

    async fn stop_container(
        &self,
        request: Request<pb::StopContainerRequest>,
    ) -> Result<Response<pb::StopContainerResponse>, Status> {
        let (_, extensions, request) = request.into_parts();
        containers::stop(self.gateway.for_call(&extensions), request).await.map(Response::new)
    }

    async fn destroy_container(
        &self,
        request: Request<pb::DestroyContainerRequest>,
    ) -> Result<Response<pb::DestroyContainerResponse>, Status> {
        let (_, extensions, request) = request.into_parts();
        containers::destroy(self.gateway.for_call(&extensions), request).await.map(Response::new)
    }

    type PublishStream = ReceiverStream<Result<pb::PublishResponse, Status>>;

    async fn publish(
        &self,
        request: Request<pb::PublishRequest>,
    ) -> Result<Response<Self::PublishStream>, Status> {
        let (_, extensions, request) = request.into_parts();
        Ok(self.answer(&extensions, |gateway, answers| containers::publish(gateway, request, answers)))
    }

    async fn get_attendance(
        &self,
        request: Request<pb::GetAttendanceRequest>,
    ) -> Result<Response<pb::GetAttendanceResponse>, Status> {
        let (_, extensions, request) = request.into_parts();
        let gateway = self.gateway.for_call(&extensions);
        let team = parse_team("team", request.team)?;
        let process: ProcessId = parse_id("process_id", &request.process_id)?;
        let AttendedWorker { worker, attendance, .. } =
            &*worker_of(&gateway, "worker_id", &request.worker_id).await?;
        check_team(worker, process, &team).await?;
        let state = attendance.state(process);
        let unattended = state.and_then(|state| state.unattended());
        Ok(Response::new(pb::GetAttendanceResponse {
            attached: state.map_or(0, |state| state.attached),
            unattended_since: unattended.map(|(since, _)| rpc::timestamp(since)),
            abandoned_at: unattended.map(|(_, abandoned_at)| rpc::timestamp(abandoned_at)),
            is_abandoned: state.is_some_and(|state| state.is_abandoned),
        }))
    }
}

/// Returns the main process beside a process. Fails unless their container belongs to the team.
async fn check_team(worker: &Worker, process: ProcessId, team: &str) -> Result<ProcessId, Status> {
    let container = worker.runtime.container_of(process).await.map_err(status)?;
    if container.team == team {
        Ok(container.main)
    } else {
        Err(status(RuntimeError::ProcessNotFound(process)))
    }
}

/// Returns the worker that a call names. A gateway with one worker does not need the name.
async fn worker_of(gateway: &WorkerSet, field: &str, id: &str) -> Result<Arc<AttendedWorker>, Status> {
    match parse_optional_id(field, id)? {
        Some(worker) => Ok(gateway.worker(worker).await?),
        None => gateway.only_worker().ok_or_else(|| {
            invalid_field(field, "is required: this gateway does not attend exactly one worker")
        }),
    }
}

#[tonic::async_trait]
impl Volumes for Handler {
    type WriteStream = ReceiverStream<Result<pb::WriteResponse, Status>>;
    type ReadStream = ReceiverStream<Result<pb::ReadResponse, Status>>;
    type ReadFileStream = ReceiverStream<Result<pb::ReadFileResponse, Status>>;
    type FetchStream = ReceiverStream<Result<pb::FetchResponse, Status>>;

    async fn fetch(&self, request: Request<pb::FetchRequest>) -> Result<Response<Self::FetchStream>, Status> {
        let (_, extensions, request) = request.into_parts();
        Ok(self.answer(&extensions, |gateway, answers| fetch::fetch(gateway, request, answers)))
    }

    async fn get_peer_address(
        &self,
        request: Request<pb::GetPeerAddressRequest>,
    ) -> Result<Response<pb::GetPeerAddressResponse>, Status> {
        let (_, extensions, request) = request.into_parts();
        let gateway = self.gateway.for_call(&extensions);
        fetch::peer_address(gateway, request).await.map(Response::new)
    }

    async fn verify(
        &self,
        request: Request<pb::VerifyRequest>,
    ) -> Result<Response<pb::VerifyResponse>, Status> {
        let (_, extensions, request) = request.into_parts();
        let gateway = self.gateway.for_call(&extensions);
        let (attended, ticket) = gateway.admit(&request.ticket, TicketOperation::Read).await?;
        let _permit = gateway.acquire_transfer(TicketOperation::Read).await?;
        attended.transfers.verify_contents(&ticket).await?;
        Ok(Response::new(pb::VerifyResponse {}))
    }

    async fn stream_to_peer(
        &self,
        request: Request<pb::StreamToPeerRequest>,
    ) -> Result<Response<pb::StreamToPeerResponse>, Status> {
        let stopping = self.gateway.stopping().clone();
        let (_, extensions, request) = request.into_parts();
        let gateway = self.gateway.for_call(&extensions);
        tokio::select! {
            sent = fetch::stream_to_peer(gateway, request) => sent.map(Response::new),
            () = stopping.cancelled() => Err(Reason::Unavailable.status(SERVICE, "the gateway is stopping")),
        }
    }

    async fn write(
        &self,
        request: Request<Streaming<pb::WriteRequest>>,
    ) -> Result<Response<Self::WriteStream>, Status> {
        let (_, extensions, requests) = request.into_parts();
        let mut response =
            self.answer(&extensions, |gateway, answers| volumes::write(gateway, requests, answers));
        response.metadata_mut().insert(ACCEPT_HEADER, MetadataValue::from_static("true"));
        Ok(response)
    }

    async fn read(
        &self,
        request: Request<Streaming<pb::ReadRequest>>,
    ) -> Result<Response<Self::ReadStream>, Status> {
        let (_, extensions, requests) = request.into_parts();
        Ok(self.answer(&extensions, |gateway, answers| volumes::read(gateway, requests, answers)))
    }

    type ReadArchiveStream = ReceiverStream<Result<pb::ReadArchiveResponse, Status>>;

    async fn write_archive(
        &self,
        request: Request<Streaming<pb::WriteArchiveRequest>>,
    ) -> Result<Response<pb::WriteArchiveResponse>, Status> {
        let stopping = self.gateway.stopping().clone();
        let (_, extensions, requests) = request.into_parts();
        let gateway = self.gateway.for_call(&extensions);
        tokio::select! {
            written = archives::write(gateway, requests) => written.map(Response::new),
            () = stopping.cancelled() => Err(Reason::Unavailable.status(SERVICE, "the gateway is stopping")),
        }
    }

    async fn read_archive(
        &self,
        request: Request<pb::ReadArchiveRequest>,
    ) -> Result<Response<Self::ReadArchiveStream>, Status> {
        let (_, extensions, request) = request.into_parts();
        Ok(self.answer(&extensions, |gateway, answers| archives::read(gateway, request, answers)))
    }

    async fn read_file(
        &self,
        request: Request<pb::ReadFileRequest>,
    ) -> Result<Response<Self::ReadFileStream>, Status> {
        let (_, extensions, request) = request.into_parts();
        let gateway = self.gateway.for_call(&extensions);
        let (attended, ticket) = gateway.admit(&request.ticket, TicketOperation::Read).await?;
        let path = PathBuf::from(OsString::from_vec(request.path.to_vec()));
        let transfers = attended.transfers.clone();
        Ok(self.answer(&extensions, async |gateway, answers| {
            let _permit = gateway.acquire_transfer(TicketOperation::Read).await?;
            volumes::read_file(transfers, ticket, path, answers).await
        }))
    }
}

#[cfg(test)]
mod tests;
