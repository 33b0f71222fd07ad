//! The lookup of the worker that a call names in its first message.

use bytes::Bytes;
use domain::WorkerId;
use domain::worker::TicketClaims;
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
    match keys.verify::<TicketClaims>(ticket).await {
        Ok(claims) => Ok(claims.worker),
        Err(VerifyError::Invalid(_)) => {
            Err(Reason::InvalidToken.status(SERVICE, "the ticket is invalid or expired"))
        }
        Err(VerifyError::KeysUnavailable(refusal)) => {
            Err(rpc::unavailable(SERVICE, "verify a ticket", &refusal))
        }
    }
}
