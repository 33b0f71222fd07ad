//! The gRPC service `Placements`.

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;
use std::time::Duration;

use domain::worker::LeaseClaims;
use domain::workload::Outcome;
use domain::{ArtifactId, CacheId, LeaseId, Timestamp, WorkerId};
use futures::{StreamExt, TryStreamExt, stream};
use rpc::page::Page;
use rpc::pb::scheduler as pb;
use rpc::pb::scheduler::placements_server::Placements;
use rpc::{Reason, Refusal, invalid_field, parse_enum, parse_id, parse_team, required};
use tonic::{Request, Response, Status};
use uuid::Uuid;

use super::{IntoStatus, SERVICE, convert, database, end_page, invalid_token, team_or_all, unknown_worker};
use crate::app::App;
use crate::db::entity::lease::{self, Kind};
use crate::db::entity::to_json;
use crate::insight::capacity;
use crate::insight::explain;
use crate::leases;
use crate::placement::{self, Demand, OnlyWorker, Purpose, Shape};
use crate::scheduling::{GrantedLease, LeaseRequest, PlaceError, PlaceResult};
use crate::store_client::{Inputs, LeaseSettlement, Located, SettledArtifact};
use crate::workers;

/// The gRPC service `Placements`.
pub(crate) struct PlacementsService(pub(crate) App);

#[tonic::async_trait]
impl Placements for PlacementsService {
    async fn place(&self, request: Request<pb::PlaceRequest>) -> Result<Response<pb::PlaceResponse>, Status> {
        let request =
            self.parse_request("", request.into_inner(), None).await?.map_err(IntoStatus::status)?;
        let placed = self.0.leasing.place(vec![request]).await.pop().unwrap_or(Err(PlaceError::Stopping));
        Ok(Response::new(self.granted(placed.map_err(IntoStatus::status)?)))
    }

    async fn place_many(
        &self,
        request: Request<pb::PlaceManyRequest>,
    ) -> Result<Response<pb::PlaceManyResponse>, Status> {
        let items = request.into_inner().items;
        check_count("items", items.len())?;
        let one_group = items.iter().all(|item| item.group > 0 && item.group == items[0].group);
        let parsed = items.into_iter().enumerate().map(async |(number, item)| {
            let field = format!("items[{number}].request");
            let group = Some(item.group).filter(|group| *group > 0);
            let request = required(&field, item.request)?;
            if request.wait.is_some() && !one_group {
                let why =
                    "is allowed only in a call with one group: leases of other groups could expire while the call waits";
                return Err(invalid_field(format!("{field}.wait"), why));
            }
            Ok((number, group, self.parse_request(&format!("{field}."), request, group).await?))
        });
        let mut parsed = stream::iter(parsed).buffered(MAX_CONCURRENT_LOCATES);
        let (mut requests, mut failed, mut ids) = (Vec::new(), Vec::new(), HashSet::new());
        while let Some((number, group, request)) = parsed.try_next().await? {
            match request {
                Ok(request) if !ids.insert(request.lease) => {
                    let field = format!("items[{number}].request.lease_id");
                    return Err(invalid_field(field, "must differ from the ids of other items"));
                }
                Ok(request) => requests.push(request),
                Err(error) => failed.push((number, group, error)),
            }
        }
        // A group with an invalid request is not placed.
        let is_lost = |request: &LeaseRequest| {
            failed.iter().find(|(_, group, _)| group.is_some() && *group == request.group)
        };
        let lost: Vec<_> =
            requests.iter().map(|request| is_lost(request).map(|(.., error)| error.clone())).collect();
        let valid =
            requests.into_iter().zip(&lost).filter(|(_, lost)| lost.is_none()).map(|(request, _)| request);
        let mut placed = self.0.leasing.place(valid.collect()).await.into_iter();
        let mut results: Vec<_> = lost
            .into_iter()
            .map(|lost| match lost {
                Some(error) => Err(error),
                None => placed.next().unwrap_or(Err(PlaceError::Stopping)),
            })
            .collect();
        for (number, _, error) in failed {
            results.insert(number, Err(error));
        }
        let results = results.into_iter().map(|placed| self.result(placed)).collect();
        Ok(Response::new(pb::PlaceManyResponse { results }))
    }

    async fn renew(&self, request: Request<pb::RenewRequest>) -> Result<Response<pb::RenewResponse>, Status> {
        let claims: LeaseClaims =
            self.0.signer.verify(&request.into_inner().lease_token).map_err(invalid_token)?;
        if claims.attempt.is_some() {
            let message = "cannot renew the lease of an attempt: the contact of its worker keeps it alive";
            return Err(Reason::InvalidToken.status(SERVICE, message));
        }

        self.0.leasing.renew(&claims).await.map_err(IntoStatus::status)?;

        Ok(Response::new(pb::RenewResponse { term: Some(rpc::duration(self.0.context.config.lease_term)) }))
    }

    async fn use_lease(
        &self,
        request: Request<pb::UseLeaseRequest>,
    ) -> Result<Response<pb::UseLeaseResponse>, Status> {
        let claims: LeaseClaims =
            self.0.signer.verify(&request.into_inner().lease_token).map_err(invalid_token)?;
        if claims.attempt.is_some() {
            let message = "cannot use the lease of an attempt: call StartAttempt";
            return Err(Reason::InvalidToken.status(SERVICE, message));
        }

        let generation = self.0.leasing.use_lease(&claims).await.map_err(IntoStatus::status)?;

        Ok(Response::new(pb::UseLeaseResponse { generation: generation.unsigned_abs() }))
    }

    async fn release(
        &self,
        request: Request<pb::ReleaseRequest>,
    ) -> Result<Response<pb::ReleaseResponse>, Status> {
        let pb::ReleaseRequest { lease_token, settlement } = request.into_inner();
        let claims: LeaseClaims = self.0.signer.verify(&lease_token).map_err(invalid_token)?;
        let settlement = settlement.map(parse_settlement).transpose()?;
        if settlement.is_some() && claims.attempt.is_some() {
            let message = "cannot settle the lease of an attempt: its gateway publishes its outputs";
            return Err(Reason::InvalidToken.status(SERVICE, message));
        }

        let leasing = &self.0.leasing;
        let missing = match settlement {
            Some(settlement) => {
                leasing.settle_and_release(&claims, settlement).await.map_err(IntoStatus::status)?
            }
            None => {
                let released = leasing.release(&[claims]).await;
                released.map_err(|error| database("release a lease", &error))?;
                Vec::new()
            }
        };

        let missing = missing.into_iter().map(|(artifact, owner)| pb::OwnerMissing {
            artifact_id: artifact.to_string(),
            owner: Some(rpc::owner::submitted(owner)),
        });
        Ok(Response::new(pb::ReleaseResponse { missing: missing.collect() }))
    }

    async fn release_many(
        &self,
        request: Request<pb::ReleaseManyRequest>,
    ) -> Result<Response<pb::ReleaseManyResponse>, Status> {
        let tokens = request.into_inner().lease_tokens;
        check_count("lease_tokens", tokens.len())?;
        let claims =
            tokens.iter().map(|token| self.0.signer.verify::<LeaseClaims>(token).map_err(invalid_token));
        let claims = claims.collect::<Result<Vec<_>, _>>()?;

        self.0.leasing.release(&claims).await.map_err(|error| database("release leases", &error))?;

        Ok(Response::new(pb::ReleaseManyResponse {}))
    }

    async fn get_lease(
        &self,
        request: Request<pb::GetLeaseRequest>,
    ) -> Result<Response<pb::GetLeaseResponse>, Status> {
        let request = request.into_inner();
        let team = parse_team("team", request.team)?;
        let id = parse_id("lease_id", &request.lease_id)?;

        let lease = leases::get(self.0.context.db.read(), &team, id).await.map_err(IntoStatus::status)?;

        Ok(Response::new(pb::GetLeaseResponse { lease: Some(convert::lease(lease)) }))
    }

    async fn list_leases(
        &self,
        request: Request<pb::ListLeasesRequest>,
    ) -> Result<Response<pb::ListLeasesResponse>, Status> {
        let request = request.into_inner();
        let team = team_or_all(&request.team)?;
        let named = Some(request.worker.as_str()).filter(|worker| !worker.is_empty());
        named.map(|worker| rpc::check_name("worker", worker)).transpose()?;
        let page = Page::of(SERVICE, &request)?;

        let operation = "list leases";
        let db = self.0.context.db.read();
        let worker = match named {
            Some(name) => {
                let found = workers::id_of(db, name).await.map_err(|error| database(operation, &error))?;
                Some(found.ok_or_else(|| unknown_worker(name))?)
            }
            None => None,
        };
        let after = page.after.map(LeaseId::from_uuid);
        let found = leases::list(db, team.as_deref(), worker, after, page.size + 1)
            .await
            .map_err(|error| database(operation, &error))?;

        let (leases, next_page_token) =
            end_page(&page, found, |lease| lease.claims.lease.uuid(), convert::lease);
        Ok(Response::new(pb::ListLeasesResponse { leases, next_page_token }))
    }

    async fn explain(
        &self,
        request: Request<pb::ExplainRequest>,
    ) -> Result<Response<pb::ExplainResponse>, Status> {
        use pb::explain_request::Subject;
        let pb::ExplainRequest { subject, max_workers, workers } = request.into_inner();
        let filter = convert::parse_detail_filter(max_workers, workers)?;
        let explained = match required("subject", subject)? {
            Subject::Spec(spec) => {
                let spec = rpc::spec::parse(spec)?;
                explain::spec(&self.0, spec, &filter).await
            }
            Subject::Workload(waiting) => {
                let team = parse_team("workload.team", waiting.team)?;
                let id = parse_id("workload.workload_id", &waiting.workload_id)?;
                explain::workload(&self.0, &team, id, &filter).await
            }
        };
        Ok(Response::new(convert::explanation(explained.map_err(IntoStatus::status)?)))
    }

    async fn get_demand(
        &self,
        request: Request<pb::GetDemandRequest>,
    ) -> Result<Response<pb::GetDemandResponse>, Status> {
        let query = convert::parse_demand(&request.into_inner())?;
        let feed =
            capacity::feed(&self.0, query).await.map_err(|error| database("read the demand", &error))?;
        Ok(Response::new(convert::feed(feed, Timestamp::now())))
    }
}

/// Maximum number of leases in one call.
const MAX_LEASES: usize = 1000;

/// Maximum number of leases of a call whose inputs are located at a time.
const MAX_CONCURRENT_LOCATES: usize = 16;

/// Longest time that a call may wait for a lease.
const MAX_WAIT: Duration = Duration::from_secs(3600);

/// Maximum number of artifacts in a settlement.
const MAX_ARTIFACTS: usize = 1000;

fn parse_settlement(settlement: pb::Settlement) -> Result<LeaseSettlement, Status> {
    let field = "settlement.artifacts";
    if settlement.artifacts.len() > MAX_ARTIFACTS {
        return Err(invalid_field(field, format!("must be at most {MAX_ARTIFACTS}")));
    }
    let (mut ids, mut caches) = (HashSet::new(), HashSet::new());
    let artifacts = settlement.artifacts.into_iter().map(|artifact| {
        let of = |name: &str| format!("{field}.{name}");
        let id = parse_id(&of("artifact_id"), &artifact.artifact_id)?;
        if !ids.insert(id) {
            return Err(invalid_field(of("artifact_id"), "must be unique"));
        }
        let owners = rpc::owner::parse_submitted(&of("owners"), artifact.owners, &mut caches)?;
        if artifact.for_owners_only && owners.is_empty() {
            return Err(invalid_field(of("for_owners_only"), "requires owners"));
        }
        Ok(SettledArtifact {
            id,
            digest: rpc::parse_digest(&of("digest"), &artifact.digest)?,
            label: rpc::parse_label(&of("label"), artifact.label)?,
            owners,
            for_owners_only: artifact.for_owners_only,
        })
    });
    Ok(LeaseSettlement {
        artifacts: artifacts.collect::<Result<_, _>>()?,
        build: rpc::parse_optional_id("settlement.build_id", &settlement.build_id)?,
        outcome: match parse_enum("settlement.status", settlement.status)? {
            pb::Outcome::Succeeded => Outcome::Succeeded,
            pb::Outcome::Failed => Outcome::Failed,
            pb::Outcome::Aborted => Outcome::Aborted,
            // `parse_enum` rejects the unspecified value.
            pb::Outcome::Errored | pb::Outcome::Unspecified => Outcome::Errored,
        },
    })
}

fn check_count(field: &str, count: usize) -> Result<(), Status> {
    if (1..=MAX_LEASES).contains(&count) {
        Ok(())
    } else {
        Err(invalid_field(field, format!("must be 1 to {MAX_LEASES}")))
    }
}

fn kind(kind: pb::PlacementKind) -> Kind {
    match kind {
        pb::PlacementKind::Task => Kind::Task,
        pb::PlacementKind::Get => Kind::Get,
        pb::PlacementKind::Put => Kind::Put,
        pb::PlacementKind::Check => Kind::Check,
        pb::PlacementKind::Service => Kind::Service,
        // Rejected by `parse_enum`.
        pb::PlacementKind::Unspecified | pb::PlacementKind::Transfer => Kind::Transfer,
    }
}

fn process(field: &str, requirements: Option<pb::ProcessRequirements>) -> Result<placement::Process, Status> {
    let requirements = requirements.unwrap_or_default();
    let image_kind = match requirements.image_kind.as_str() {
        "" => "host".to_owned(),
        "host" | "artifact" | "resource-type" => requirements.image_kind,
        _ => {
            let field = format!("{field}process.image_kind");
            return Err(invalid_field(field, "must be host, artifact or resource-type"));
        }
    };
    let resource_type = Some(requirements.resource_type).filter(|name| !name.is_empty());
    resource_type
        .iter()
        .try_for_each(|name| rpc::check_name(&format!("{field}process.resource_type"), name))?;
    let capabilities = requirements.capabilities;
    rpc::check_labels(&format!("{field}process.capabilities"), &capabilities)?;
    if (image_kind == "resource-type") != resource_type.is_some() {
        let field = format!("{field}process.resource_type");
        return Err(invalid_field(
            field,
            "is required for the image kind resource-type, and allowed only there",
        ));
    }
    Ok(placement::Process {
        image_kind: image_kind.into(),
        resource_type,
        capabilities: capabilities.into_iter().map(Into::into).collect(),
    })
}

fn parse_workers(field: &str, ids: &[String]) -> Result<BTreeSet<WorkerId>, Status> {
    ids.iter().map(|id| parse_id(field, id)).collect()
}

impl PlacementsService {
    /// Parses a request. `field`: its path in the message. The inner error rejects only this item
    /// of a call.
    async fn parse_request(
        &self,
        field: &str,
        request: pb::PlaceRequest,
        group: Option<u32>,
    ) -> Result<Result<LeaseRequest, PlaceError>, Status> {
        let of = |name: &str| format!("{field}{name}");
        let lease: LeaseId = parse_id(&of("lease_id"), &request.lease_id)?;
        let kind = kind(parse_enum(&of("kind"), request.kind)?);
        let requests = rpc::spec::parse_requests(&of("requests"), request.requests)?;
        rpc::check_label(&of("platform"), &request.platform)?;
        rpc::check_tags(&of("tags"), &request.tags)?;
        let has_inputs = !request.artifact_ids.is_empty() || !request.task_cache_ids.is_empty();
        let shape = Shape {
            team: parse_team(&of("team"), request.team)?,
            platform: Some(request.platform).filter(|name| !name.is_empty()).unwrap_or("linux".to_owned()),
            tags: request.tags,
            process: kind.takes_a_slot().then(|| process(field, request.process)).transpose()?,
            requests: requests.into(),
            purpose: Purpose::of(kind, has_inputs),
        };
        let avoid = parse_workers(&of("avoid_workers"), &request.avoid_workers)?;
        let prefer = parse_workers(&of("prefer_workers"), &request.prefer_workers)?;
        let ids = |name: &str, ids: &[String], most: usize| {
            let field = of(name);
            if ids.len() > most {
                return Err(invalid_field(field, format!("must be at most {most}")));
            }
            ids.iter().map(|id| parse_id::<Uuid>(&field, id)).collect::<Result<Vec<_>, _>>()
        };
        let artifacts = ids("artifact_ids", &request.artifact_ids, 1000)?;
        let caches = ids("task_cache_ids", &request.task_cache_ids, 100)?;
        let inputs = Inputs {
            artifacts: artifacts.into_iter().map(ArtifactId::from_uuid).collect(),
            caches: caches.into_iter().map(CacheId::from_uuid).collect(),
        };
        let owner = request.owner;
        if owner.len() > 200 || owner.chars().any(char::is_control) {
            return Err(invalid_field(of("owner"), "must be at most 200 bytes, without control characters"));
        }
        if !owner.is_empty() && !request.same_worker_as_lease_id.is_empty() {
            return Err(invalid_field(of("owner"), "cannot be combined with same_worker_as_lease_id"));
        }
        let named = Some(request.worker.as_str()).filter(|worker| !worker.is_empty());
        named.map(|worker| rpc::check_name(&of("worker"), worker)).transpose()?;
        if named.is_some() && !(owner.is_empty() && request.same_worker_as_lease_id.is_empty()) {
            let why = "cannot be combined with same_worker_as_lease_id or owner";
            return Err(invalid_field(of("worker"), why));
        }
        let wait = rpc::parse_duration(&of("wait"), request.wait)?.unwrap_or_default();
        if wait > MAX_WAIT {
            return Err(invalid_field(of("wait"), "must be at most an hour"));
        }
        let priority = rpc::spec::parse_priority(&of("priority"), request.priority)?;
        let constraints =
            (&shape.team, &shape.platform, &shape.tags, &shape.requests, &request.same_worker_as_lease_id);
        let uses = (&owner, &inputs.artifacts, &inputs.caches, &request.worker);
        // The default process is omitted, because the encoding is stored with each lease.
        let process = shape.process.as_ref().filter(|process| **process != placement::Process::default());
        let encoded = match process {
            None => to_json(&(constraints, &avoid, uses)),
            Some(process) => to_json(&(constraints, &avoid, uses, process)),
        };
        let encoded = encoded.map_err(|error| database("encode a request", &error))?;
        let only = match request.same_worker_as_lease_id.as_str() {
            "" => match named {
                None => None,
                Some(name) => {
                    let found = workers::id_of(self.0.context.db.read(), name).await;
                    match found.map_err(|error| database("find a worker", &error))? {
                        Some(worker) => Some(OnlyWorker::named(worker)),
                        None => return Ok(Err(PlaceError::UnknownWorker(name.to_owned()))),
                    }
                }
            },
            near => {
                let near: LeaseId = parse_id(&of("same_worker_as_lease_id"), near)?;
                let found = leases::find(self.0.context.db.read(), near).await;
                match found.map_err(|error| database("find a lease", &error))? {
                    Some(near) if near.state != lease::State::Ended && near.team == shape.team => {
                        Some(OnlyWorker::tied(WorkerId::from_uuid(near.worker_id)))
                    }
                    _ => return Ok(Err(PlaceError::NoSuchLease)),
                }
            }
        };
        let found = leases::worker_of_owner(self.0.context.db.read(), &shape.team, &owner).await;
        let owner_worker = found.map_err(|error| database("read the worker of an owner", &error))?;
        let locations = match self.0.store.find(&shape.team, &inputs).await {
            Ok(Located::All(locations)) => locations.into(),
            // A repeat returns the existing lease, even if its inputs are gone by now.
            _ if self.is_repeat(lease).await? => Arc::default(),
            Ok(Located::Missing(artifact)) => return Ok(Err(PlaceError::InputUnavailable(artifact))),
            Ok(Located::MissingCache(cache)) => return Ok(Err(PlaceError::CacheUnavailable(cache))),
            Err(refusal) => return Ok(Err(PlaceError::NotPinned(refusal))),
        };
        let demand = Demand { kind, only, avoid, prefer, ..shape.requested_by(lease.uuid()) };
        Ok(Ok(LeaseRequest {
            lease,
            demand: Arc::new(demand),
            inputs: Arc::new(inputs),
            locations,
            request: encoded,
            group,
            owner,
            owner_worker,
            wait,
            priority: priority.into(),
        }))
    }

    /// Returns whether a lease with this id exists.
    async fn is_repeat(&self, lease: LeaseId) -> Result<bool, Status> {
        let found = leases::find(self.0.context.db.read(), lease).await;
        Ok(found.map_err(|error| database("find a lease", &error))?.is_some())
    }

    fn result(&self, placed: PlaceResult) -> pb::PlaceResult {
        use pb::place_result::Result as Pb;
        let result = match placed {
            Ok(granted) => Pb::Placed(self.granted(granted)),
            Err(error) => {
                let Refusal { code, reason, message, about } = error.status().into();
                let reason = reason.unwrap_or_default();
                Pb::Failure(pb::PlaceFailure { code: code.into(), reason, message, metadata: about })
            }
        };
        pb::PlaceResult { result: Some(result) }
    }

    fn granted(&self, granted: GrantedLease) -> pb::PlaceResponse {
        pb::PlaceResponse {
            lease_token: self.0.signer.sign(&granted.claims),
            worker_id: granted.claims.worker.to_string(),
            worker_name: granted.worker_name,
            incarnation: granted.claims.incarnation.0,
            gateway_endpoint: granted.gateway_endpoint,
            term: Some(rpc::duration(self.0.context.config.lease_term)),
        }
    }
}
