//! Service `Placements`.

use domain::LeaseId;
use domain::worker::LeaseClaims;
use rpc::pb::scheduler as pb;
use rpc::pb::scheduler::placements_server::Placements;
use rpc::{parse_enum, parse_id, parse_team, required};
use tonic::{Request, Response, Status};

use super::{Reasoned, convert, database, invalid_token};
use crate::explain;
use crate::placement::Demand;
use crate::service::Scheduler;

/// Service `Placements`.
pub(crate) struct PlacementsService(pub(crate) Scheduler);

#[tonic::async_trait]
impl Placements for PlacementsService {
    async fn place(&self, request: Request<pb::PlaceRequest>) -> Result<Response<pb::PlaceResponse>, Status> {
        let request = request.into_inner();
        let lease: LeaseId = parse_id("lease_id", &request.lease_id)?;
        parse_enum::<pb::PlacementKind>("kind", request.kind)?;
        let platform = if request.platform.is_empty() { "linux".to_owned() } else { request.platform };
        let team = parse_team("team", request.team)?;
        let demand = Demand {
            team,
            platform,
            tags: request.tags,
            process: None,
            failed_on: Vec::new(),
            asked_by: lease.uuid(),
        };

        let granted = self.0.place(lease, &demand).await.map_err(Reasoned::status)?;

        Ok(Response::new(pb::PlaceResponse {
            lease_token: self.0.signer.sign(&granted.claims),
            worker_id: granted.claims.worker.to_string(),
            worker_name: granted.worker_name,
            incarnation: granted.claims.incarnation.0,
            gateway_endpoint: granted.gateway_endpoint,
            term: Some(rpc::duration(self.0.config.lease_term)),
        }))
    }

    async fn renew(&self, request: Request<pb::RenewRequest>) -> Result<Response<pb::RenewResponse>, Status> {
        let claims: LeaseClaims =
            self.0.signer.verify(&request.into_inner().lease_token).map_err(invalid_token)?;

        self.0.renew(&claims).await.map_err(Reasoned::status)?;

        Ok(Response::new(pb::RenewResponse { term: Some(rpc::duration(self.0.config.lease_term)) }))
    }

    async fn release(
        &self,
        request: Request<pb::ReleaseRequest>,
    ) -> Result<Response<pb::ReleaseResponse>, Status> {
        let claims: LeaseClaims =
            self.0.signer.verify(&request.into_inner().lease_token).map_err(invalid_token)?;

        self.0.release(&claims).await.map_err(|error| database("release a lease", &error))?;

        Ok(Response::new(pb::ReleaseResponse {}))
    }

    async fn explain(
        &self,
        request: Request<pb::ExplainRequest>,
    ) -> Result<Response<pb::ExplainResponse>, Status> {
        use pb::explain_request::Subject;
        let db = self.0.db.read();
        let explained = match required("subject", request.into_inner().subject)? {
            Subject::Spec(spec) => {
                let spec = rpc::spec::parse(spec)?;
                explain::spec(db, &self.0.store, &spec).await
            }
            Subject::Workload(waiting) => {
                let team = parse_team("workload.team", waiting.team)?;
                let id = parse_id("workload.workload_id", &waiting.workload_id)?;
                explain::workload(db, &team, id).await
            }
        };
        Ok(Response::new(convert::explanation(explained.map_err(Reasoned::status)?)))
    }
}
