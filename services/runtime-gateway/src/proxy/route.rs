//! The lookup of the worker that a call names in its first message.

use bytes::Bytes;
use domain::WorkerId;
use domain::worker::{LeaseClaims, TicketClaims};
use rpc::pb::runtime as pb;
use rpc::pb::runtime::attach_request::Message as Attach;
use rpc::pb::runtime::read_request::Message as Read;
use rpc::pb::runtime::write_archive_request::Message as WriteArchive;
use rpc::pb::runtime::write_request::Message as Write;
use rpc::token::{Keys, VerifyError};
use rpc::{Reason, invalid_field, parse_id};
use tonic::Status;

use crate::SERVICE;

/// Returns the worker of the call at `path` with this first message.
pub(super) async fn worker_of_call(path: &str, first: Bytes, keys: &Keys) -> Result<WorkerId, Status> {
    match path {
        "/gantry.runtime.v1.Containers/Attach" => match decode::<pb::AttachRequest>(first)?.message {
            Some(Attach::Resume(resume)) => parse_id("resume.worker_id", &resume.worker_id),
            Some(Attach::Start(start)) => parse_id("start.worker_id", &start.worker_id),
            _ => Err(wrong_first_message("resume` or `start")),
        },
        "/gantry.runtime.v1.Containers/GetAttendance" => {
            parse_id("worker_id", &decode::<pb::GetAttendanceRequest>(first)?.worker_id)
        }
        "/gantry.runtime.v1.Containers/GetContainer" => {
            parse_id("worker_id", &decode::<pb::GetContainerRequest>(first)?.worker_id)
        }
        "/gantry.runtime.v1.Containers/ListContainers" => {
            parse_id("worker_id", &decode::<pb::ListContainersRequest>(first)?.worker_id)
        }
        "/gantry.runtime.v1.Containers/GetUsage" => {
            parse_id("worker_id", &decode::<pb::GetUsageRequest>(first)?.worker_id)
        }
        "/gantry.runtime.v1.Containers/GetProcess" => {
            parse_id("worker_id", &decode::<pb::GetProcessRequest>(first)?.worker_id)
        }
        "/gantry.runtime.v1.Containers/CreateContainer" => {
            worker_of_lease(&decode::<pb::CreateContainerRequest>(first)?.lease_token, keys).await
        }
        "/gantry.runtime.v1.Containers/StopContainer" => {
            worker_of_lease(&decode::<pb::StopContainerRequest>(first)?.lease_token, keys).await
        }
        "/gantry.runtime.v1.Containers/Publish" => {
            worker_of_lease(&decode::<pb::PublishRequest>(first)?.lease_token, keys).await
        }
        "/gantry.runtime.v1.Containers/DestroyContainer" => {
            worker_of_lease(&decode::<pb::DestroyContainerRequest>(first)?.lease_token, keys).await
        }
        "/gantry.runtime.v1.Volumes/Write" => match decode::<pb::WriteRequest>(first)?.message {
            Some(Write::Open(open)) => worker_of_ticket(&open.ticket, keys).await,
            _ => Err(wrong_first_message("open")),
        },
        "/gantry.runtime.v1.Volumes/Read" => match decode::<pb::ReadRequest>(first)?.message {
            Some(Read::Open(open)) => worker_of_ticket(&open.ticket, keys).await,
            _ => Err(wrong_first_message("open")),
        },
        "/gantry.runtime.v1.Volumes/WriteArchive" => {
            match decode::<pb::WriteArchiveRequest>(first)?.message {
                Some(WriteArchive::Open(open)) => worker_of_ticket(&open.ticket, keys).await,
                _ => Err(wrong_first_message("open")),
            }
        }
        "/gantry.runtime.v1.Volumes/ReadArchive" => {
            worker_of_ticket(&decode::<pb::ReadArchiveRequest>(first)?.ticket, keys).await
        }
        "/gantry.runtime.v1.Volumes/ReadFile" => {
            worker_of_ticket(&decode::<pb::ReadFileRequest>(first)?.ticket, keys).await
        }
        "/gantry.runtime.v1.Volumes/Verify" => {
            worker_of_ticket(&decode::<pb::VerifyRequest>(first)?.ticket, keys).await
        }
        _ => Err(Status::unimplemented("a proxy does not forward this call")),
    }
}

fn wrong_first_message(message: &str) -> Status {
    invalid_field("message", format!("the first message must be `{message}`"))
}

fn decode<M: prost::Message + Default>(message: Bytes) -> Result<M, Status> {
    M::decode(message)
        .map_err(|error| invalid_field("message", format!("cannot decode the first message: {error}")))
}

/// Returns the worker that a ticket names. The gateway verifies the operation.
async fn worker_of_ticket(ticket: &str, keys: &Keys) -> Result<WorkerId, Status> {
    keys.verify::<TicketClaims>(ticket).await.map(|claims| claims.worker).map_err(rejected)
}

/// Returns the worker that a lease token names. The gateway verifies the lease.
async fn worker_of_lease(token: &str, keys: &Keys) -> Result<WorkerId, Status> {
    keys.verify::<LeaseClaims>(token).await.map(|claims| claims.worker).map_err(rejected)
}

fn rejected(error: VerifyError) -> Status {
    match error {
        VerifyError::Invalid(_) => {
            Reason::InvalidToken.status(SERVICE, "the ticket or token is invalid or expired")
        }
        VerifyError::KeysUnavailable(refusal) => rpc::unavailable(SERVICE, "verify a ticket", &refusal),
    }
}
