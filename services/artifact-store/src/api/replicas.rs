//! Handlers of `gantry.artifacts.v1.Replicas`.

use rpc::pb::artifacts as pb;
use tonic::{Request, Response, Status};

use crate::api::{Handlers, artifact, errors, parse_reason};
use crate::artifacts::replicas::{self, Direction, Outcome, Plan};
use crate::inventory::delete_requests::{self, Drop};
use crate::marks::references::Keepers;

#[tonic::async_trait]
impl pb::replicas_server::Replicas for Handlers {
    async fn plan_replica(
        &self,
        request: Request<pb::PlanReplicaRequest>,
    ) -> Result<Response<pb::PlanReplicaResponse>, Status> {
        let request = request.into_inner();
        let plan = &Plan {
            team: rpc::parse_team("team", request.team)?,
            artifact: rpc::parse_id("artifact_id", &request.artifact_id)?,
            worker: rpc::parse_id("worker_id", &request.worker_id)?,
            transfer: rpc::parse_id("transfer_id", &request.transfer_id)?,
        };
        let (now, term) = (self.store.now(), self.store.config.claim_term);

        let planned =
            self.store.db.write(|txn| async move { replicas::plan(&txn, plan, now, term).await }).await?;

        self.store.sweep_wakers.wake(planned.marked);
        let (outcome, transfer) = match planned.outcome {
            Outcome::Created => (pb::PlanOutcome::Created, Some(plan.transfer)),
            Outcome::InProgress(transfer) => (pb::PlanOutcome::InProgress, Some(transfer)),
            Outcome::Complete => (pb::PlanOutcome::Complete, None),
        };
        Ok(Response::new(pb::PlanReplicaResponse {
            volume_handle: planned.handle.to_string(),
            term: transfer.map(|_| rpc::duration(term)),
            outcome: outcome.into(),
            transfer_id: transfer.map(|transfer| transfer.to_string()).unwrap_or_default(),
            digest: planned.digest.unwrap_or_default().into(),
            size_bytes: planned.size_bytes,
        }))
    }

    async fn authorize_transfer(
        &self,
        request: Request<pb::AuthorizeTransferRequest>,
    ) -> Result<Response<pb::AuthorizeTransferResponse>, Status> {
        let request = request.into_inner();
        let team = rpc::parse_team("team", request.team)?;
        let worker = rpc::parse_id("worker_id", &request.worker_id)?;
        let volume = rpc::parse_id("volume_handle", &request.volume_handle)?;
        let direction = match rpc::parse_enum("direction", request.direction)? {
            pb::TransferDirection::Write => Direction::Write,
            pb::TransferDirection::Read | pb::TransferDirection::Unspecified => Direction::Read,
        };

        replicas::authorize(self.store.db.read(), &team, worker, volume, direction, self.store.now()).await?;

        Ok(Response::new(pb::AuthorizeTransferResponse {}))
    }

    async fn progress(
        &self,
        request: Request<pb::ProgressRequest>,
    ) -> Result<Response<pb::ProgressResponse>, Status> {
        let request = request.into_inner();
        let team = &rpc::parse_team("team", request.team)?;
        let transfer = rpc::parse_id("transfer_id", &request.transfer_id)?;
        let (now, term) = (self.store.now(), self.store.config.claim_term);

        self.store
            .db
            .write(|txn| async move { replicas::progress(&txn, team, transfer, now, term).await })
            .await?;

        Ok(Response::new(pb::ProgressResponse { term: Some(rpc::duration(term)) }))
    }

    async fn seal_upload(
        &self,
        request: Request<pb::SealUploadRequest>,
    ) -> Result<Response<pb::SealUploadResponse>, Status> {
        let request = request.into_inner();
        let team = &rpc::parse_team("team", request.team)?;
        let id = rpc::parse_id("artifact_id", &request.artifact_id)?;
        let digest = rpc::parse_digest("digest", &request.digest)?;
        let now = self.store.now();

        let (sealed, marked) = self
            .store
            .db
            .write(|txn| async move { replicas::seal(&txn, team, id, digest, now).await })
            .await?;

        self.store.sweep_wakers.wake(marked);
        Ok(Response::new(pb::SealUploadResponse { artifact: Some(artifact(sealed, &Keepers::default())) }))
    }

    async fn abandon_upload(
        &self,
        request: Request<pb::AbandonUploadRequest>,
    ) -> Result<Response<pb::AbandonUploadResponse>, Status> {
        let request = request.into_inner();
        let team = &rpc::parse_team("team", request.team)?;
        let transfer = rpc::parse_id("transfer_id", &request.transfer_id)?;
        let now = self.store.now();

        let marked = self
            .store
            .db
            .write(|txn| async move { replicas::abandon(&txn, team, transfer, now).await })
            .await
            .map_err(|error| errors::database("abandon a transfer", &error))?;

        self.store.sweep_wakers.wake(marked);
        Ok(Response::new(pb::AbandonUploadResponse {}))
    }

    async fn drop_replica(
        &self,
        request: Request<pb::DropReplicaRequest>,
    ) -> Result<Response<pb::DropReplicaResponse>, Status> {
        let request = request.into_inner();
        let drop = &Drop {
            team: rpc::parse_team("team", request.team)?,
            artifact: rpc::parse_id("artifact_id", &request.artifact_id)?,
            worker: rpc::parse_id("worker_id", &request.worker_id)?,
            why: parse_reason("reason", request.reason)?,
            reliable: None,
            force: request.force,
        };
        let (now, policy) = (self.store.now(), &self.policy());

        let marked = self
            .store
            .db
            .write(|txn| async move { delete_requests::drop_replica(&txn, drop, now, policy).await })
            .await?;

        self.store.sweep_wakers.wake(marked);
        Ok(Response::new(pb::DropReplicaResponse {}))
    }
}
