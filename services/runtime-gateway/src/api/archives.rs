//! The calls that transfer a volume as an archive.

use rpc::pb::runtime::read_archive_response::Message as ReadAnswer;
use rpc::pb::runtime::write_archive_request::Message as WriteMessage;

use domain::worker::TicketOperation;
use rpc::invalid_field;
use rpc::pb::runtime as pb;
use tokio::sync::mpsc;
use tonic::{Status, Streaming};

use super::volumes::{UPLOAD_PAUSE, next_message, send};
use super::{ANSWER_QUEUE, Answers};
use crate::transfer::archives::{self, ArchiveUpload};
use crate::worker_set::WorkerSet;

pub(super) async fn write(
    gateway: WorkerSet,
    mut requests: Streaming<pb::WriteArchiveRequest>,
) -> Result<pb::WriteArchiveResponse, Status> {
    let WriteMessage::Open(open) = next(&mut requests).await? else {
        return Err(invalid_field("message", "the first message must be `open`"));
    };
    let (attended, ticket) = gateway.admit(&open.ticket, TicketOperation::Write).await?;
    let _permit = gateway.acquire_transfer(TicketOperation::Write).await?;
    let mut unpacking = ArchiveUpload::begin(&attended.transfers, ticket);
    loop {
        match next(&mut requests).await? {
            WriteMessage::Data(data) => unpacking.data(data).await?,
            WriteMessage::Commit(_) => break,
            WriteMessage::Open(_) => return Err(invalid_field("message", "`open` must be sent only once")),
        }
    }
    let manifest = unpacking.commit().await?;
    let digest = manifest.tree_digest().as_bytes().to_vec().into();
    Ok(pb::WriteArchiveResponse { digest, size_bytes: manifest.size_bytes() })
}

async fn next(requests: &mut Streaming<pb::WriteArchiveRequest>) -> Result<WriteMessage, Status> {
    rpc::required("message", next_message(requests, UPLOAD_PAUSE).await?.message)
}

pub(super) async fn read(
    gateway: WorkerSet,
    request: pb::ReadArchiveRequest,
    answers: Answers<pb::ReadArchiveResponse>,
) -> Result<(), Status> {
    let (attended, ticket) = gateway.admit(&request.ticket, TicketOperation::Read).await?;
    let _permit = gateway.acquire_transfer(TicketOperation::Read).await?;
    let answer = |message| send(&answers, pb::ReadArchiveResponse { message: Some(message) });
    let (pieces, mut ready) = mpsc::channel(ANSWER_QUEUE);
    let packing = async {
        archives::pack(&attended.transfers, &ticket, &request.path, pieces).await.map_err(Status::from)
    };
    let sending = async {
        while let Some(Some(data)) = ready.recv().await {
            answer(ReadAnswer::Data(data)).await?;
        }
        Ok(())
    };
    let (digest, ()) = tokio::try_join!(packing, sending)?;
    let digest = digest.map(|digest| digest.as_bytes().to_vec().into()).unwrap_or_default();
    answer(ReadAnswer::Done(pb::ReadArchiveDone { digest })).await
}
