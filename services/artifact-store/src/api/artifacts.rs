//! Handlers of `gantry.artifacts.v1.Artifacts`.

use std::collections::HashSet;
use std::time::Duration;

use rpc::page::Page;
use rpc::pb::artifacts as pb;
use tonic::{Request, Response, Status};
use uuid::Uuid;

use crate::api::owners::MAX_KEEP;
use crate::api::{
    Handlers, MAX_ARTIFACTS, SERVICE, artifact, errors, location, parse_artifacts, parse_state, parse_workers,
};
use crate::artifacts::inline::{self, NewTree};
use crate::artifacts::restore::{self, KeptBy};
use crate::artifacts::{self, NewArtifact};
use crate::builds;
use crate::explain::{self, ExplainContext};
use crate::marks::references::Keepers;

/// Default time for which a restored artifact is kept without an owner.
pub(super) const DEFAULT_REPRIEVE: Duration = Duration::from_secs(3600);

#[tonic::async_trait]
impl pb::artifacts_server::Artifacts for Handlers {
    async fn create_artifact(
        &self,
        request: Request<pb::CreateArtifactRequest>,
    ) -> Result<Response<pb::CreateArtifactResponse>, Status> {
        let request = request.into_inner();
        let new = &NewArtifact {
            id: rpc::parse_id("artifact_id", &request.artifact_id)?,
            team: rpc::parse_team("team", request.team)?,
            owner: rpc::parse_optional_id("build_id", &request.build_id)?,
            label: rpc::parse_label("label", request.label)?,
            tree: request.tree.as_ref().map(parse_tree).transpose()?,
        };
        let now = self.store.now();

        self.store.db.write(|txn| async move { artifacts::create(&txn, new, now).await }).await?;

        let tree = new.tree.as_ref();
        Ok(Response::new(pb::CreateArtifactResponse {
            digest: tree.map(|tree| tree.digest.as_bytes().to_vec().into()).unwrap_or_default(),
            size_bytes: tree.map_or(0, |tree| tree.size_bytes),
        }))
    }

    async fn read_tree(
        &self,
        request: Request<pb::ReadTreeRequest>,
    ) -> Result<Response<pb::ReadTreeResponse>, Status> {
        let request = request.into_inner();
        let team = &rpc::parse_team("team", request.team)?;
        let id = rpc::parse_id("artifact_id", &request.artifact_id)?;

        let encoded = inline::read(self.store.db.read(), team, id).await?;

        let decoded = encoded.map(rpc::small_tree::decode).transpose();
        let tree = decoded.map_err(|error| rpc::unavailable(SERVICE, "decode a stored tree", &error))?;
        Ok(Response::new(pb::ReadTreeResponse { tree }))
    }

    async fn adopt_by_digest(
        &self,
        request: Request<pb::AdoptByDigestRequest>,
    ) -> Result<Response<pb::AdoptByDigestResponse>, Status> {
        let request = request.into_inner();
        let team = &rpc::parse_team("team", request.team)?;
        let digest = rpc::parse_digest("digest", &request.digest)?;
        let owner = rpc::parse_optional_id("build_id", &request.build_id)?;
        let without = &parse_workers("without_worker_ids", &request.without_worker_ids)?;
        let (now, policy) = (self.store.now(), &self.policy());

        let adopted = self
            .store
            .db
            .write(|txn| async move {
                artifacts::adopt_by_digest(&txn, team, digest, owner, without, now, policy).await
            })
            .await?;

        let artifact = adopted.map(|located| artifact(located, &Keepers::default()));
        Ok(Response::new(pb::AdoptByDigestResponse { artifact }))
    }

    async fn get_artifact(
        &self,
        request: Request<pb::GetArtifactRequest>,
    ) -> Result<Response<pb::GetArtifactResponse>, Status> {
        let request = request.into_inner();
        let team = &rpc::parse_team("team", request.team)?;
        let id = rpc::parse_id("artifact_id", &request.artifact_id)?;

        let found = artifacts::get(self.store.db.read(), team, id, self.store.now(), &self.policy())
            .await
            .map_err(|error| errors::database("get an artifact", &error))?;

        let (located, keepers) = found.ok_or_else(|| errors::artifact_not_found(id))?;
        Ok(Response::new(pb::GetArtifactResponse { artifact: Some(artifact(located, &keepers)) }))
    }

    async fn list_artifacts(
        &self,
        request: Request<pb::ListArtifactsRequest>,
    ) -> Result<Response<pb::ListArtifactsResponse>, Status> {
        let request = request.into_inner();
        let team = &rpc::parse_team("team", request.team.clone())?;
        let state = parse_state("state", request.state)?;
        let ids = rpc::spec::name::parse_id_prefix("id_prefix", &request.id_prefix)?;
        let page = Page::of(SERVICE, &request)?;

        let (db, now) = (self.store.db.read(), self.store.now());
        let listed = artifacts::list(db, team, state, ids, page, now, &self.policy())
            .await
            .map_err(|error| errors::database("list artifacts", &error))?;

        let listed = listed
            .into_iter()
            .map(|(located, keepers)| (located.artifact.ordinal, artifact(located, &keepers)))
            .collect();
        let (artifacts, next_page_token) = super::end_page(page, listed);
        Ok(Response::new(pb::ListArtifactsResponse { artifacts, next_page_token }))
    }

    async fn locate(
        &self,
        request: Request<pb::LocateRequest>,
    ) -> Result<Response<pb::LocateResponse>, Status> {
        let request = request.into_inner();
        let team = rpc::parse_team("team", request.team)?;
        let ids = parse_artifacts("artifact_ids", &request.artifact_ids)?;

        let located = self
            .locator
            .locate(team, ids)
            .await
            .map_err(|error| errors::database("locate artifacts", &error))?;

        let locations = located.into_iter().map(location).collect();
        Ok(Response::new(pb::LocateResponse { locations }))
    }

    async fn add_owner(
        &self,
        request: Request<pb::AddOwnerRequest>,
    ) -> Result<Response<pb::AddOwnerResponse>, Status> {
        let request = request.into_inner();
        let team = &rpc::parse_team("team", request.team)?;
        let artifact = rpc::parse_id("artifact_id", &request.artifact_id)?;
        let build = rpc::parse_id("build_id", &request.build_id)?;

        self.store.db.write(|txn| async move { builds::own(&txn, team, &[artifact], build).await }).await?;

        Ok(Response::new(pb::AddOwnerResponse {}))
    }

    async fn remove_owner(
        &self,
        request: Request<pb::RemoveOwnerRequest>,
    ) -> Result<Response<pb::RemoveOwnerResponse>, Status> {
        let request = request.into_inner();
        let team = &rpc::parse_team("team", request.team)?;
        let artifact = rpc::parse_id("artifact_id", &request.artifact_id)?;
        let build = rpc::parse_id("build_id", &request.build_id)?;
        let now = self.store.now();

        self.store
            .db
            .write(|txn| async move { builds::disown(&txn, team, &[artifact], build, now).await })
            .await?;

        Ok(Response::new(pb::RemoveOwnerResponse {}))
    }

    async fn delete_artifacts(
        &self,
        request: Request<pb::DeleteArtifactsRequest>,
    ) -> Result<Response<pb::DeleteArtifactsResponse>, Status> {
        let request = request.into_inner();
        let team = &rpc::parse_team("team", request.team)?;
        let artifacts = &parse_artifacts("artifact_ids", &request.artifact_ids)?;
        let now = self.store.now();

        self.store
            .db
            .write(|txn| async move { builds::release_from_ended_builds(&txn, team, artifacts, now).await })
            .await?;

        Ok(Response::new(pb::DeleteArtifactsResponse {}))
    }

    async fn batch_create_artifacts(
        &self,
        request: Request<pb::BatchCreateArtifactsRequest>,
    ) -> Result<Response<pb::BatchCreateArtifactsResponse>, Status> {
        let request = request.into_inner();
        let team = rpc::parse_team("team", request.team)?;
        let owner = rpc::parse_optional_id("build_id", &request.build_id)?;
        if request.artifacts.len() > MAX_ARTIFACTS {
            return Err(rpc::invalid_field("artifacts", format!("must be at most {MAX_ARTIFACTS}")));
        }
        let new = request.artifacts.into_iter().map(|new| {
            let id = rpc::parse_id("artifacts.artifact_id", &new.artifact_id)?;
            let label = rpc::parse_label("artifacts.label", new.label)?;
            Ok(NewArtifact { id, team: team.clone(), owner, label, tree: None })
        });
        let new = &new.collect::<Result<Vec<_>, Status>>()?;
        if new.iter().map(|new| new.id).collect::<HashSet<_>>().len() < new.len() {
            return Err(rpc::invalid_field("artifacts.artifact_id", "must be unique"));
        }
        let now = self.store.now();

        self.store.db.write(|txn| async move { artifacts::create_all(&txn, new, now).await }).await?;

        Ok(Response::new(pb::BatchCreateArtifactsResponse {}))
    }

    async fn batch_add_owner(
        &self,
        request: Request<pb::BatchAddOwnerRequest>,
    ) -> Result<Response<pb::BatchAddOwnerResponse>, Status> {
        let request = request.into_inner();
        let team = &rpc::parse_team("team", request.team)?;
        let artifacts = &parse_artifacts("artifact_ids", &request.artifact_ids)?;
        let build = rpc::parse_id("build_id", &request.build_id)?;

        self.store.db.write(|txn| async move { builds::own(&txn, team, artifacts, build).await }).await?;

        Ok(Response::new(pb::BatchAddOwnerResponse {}))
    }

    async fn batch_remove_owner(
        &self,
        request: Request<pb::BatchRemoveOwnerRequest>,
    ) -> Result<Response<pb::BatchRemoveOwnerResponse>, Status> {
        let request = request.into_inner();
        let team = &rpc::parse_team("team", request.team)?;
        let artifacts = &parse_artifacts("artifact_ids", &request.artifact_ids)?;
        let build = rpc::parse_id("build_id", &request.build_id)?;
        let now = self.store.now();

        self.store
            .db
            .write(|txn| async move { builds::disown(&txn, team, artifacts, build, now).await })
            .await?;

        Ok(Response::new(pb::BatchRemoveOwnerResponse {}))
    }

    async fn explain(
        &self,
        request: Request<pb::ExplainRequest>,
    ) -> Result<Response<pb::ExplainResponse>, Status> {
        let request = request.into_inner();
        let team = &rpc::parse_team("team", request.team)?;
        let id: Uuid = rpc::parse_id("id", &request.id)?;
        let context = ExplainContext {
            team,
            now: self.store.now(),
            policy: self.policy(),
            tombstone: self.store.config.tombstone,
            resource_cache_ttl: self.store.config.resource_cache_ttl,
        };

        let explained = explain::explain(self.store.db.read(), &context, id)
            .await
            .map_err(|error| errors::database("explain an id", &error))?;

        let explained = explained.ok_or_else(|| errors::unknown_id(id))?;
        Ok(Response::new(super::explain::explanation(explained)))
    }

    async fn undelete(
        &self,
        request: Request<pb::UndeleteRequest>,
    ) -> Result<Response<pb::UndeleteResponse>, Status> {
        let request = request.into_inner();
        let team = &rpc::parse_team("team", request.team)?;
        let id = rpc::parse_id("artifact_id", &request.artifact_id)?;
        let kept_by = match request.kept_by {
            None => KeptBy::Reprieve(DEFAULT_REPRIEVE),
            Some(pb::undelete_request::KeptBy::BuildId(build)) => {
                KeptBy::Build(rpc::parse_id("build_id", &build)?)
            }
            Some(pb::undelete_request::KeptBy::Keep(keep)) => {
                parse_reprieve(rpc::parse_duration("keep", Some(keep))?)?
            }
        };
        let now = self.store.now();

        self.store
            .db
            .write(|txn| async move { restore::undelete(&txn, team, id, kept_by, now).await })
            .await?;

        let found = artifacts::get(self.store.db.read(), team, id, now, &self.policy())
            .await
            .map_err(|error| errors::database("get an artifact", &error))?;
        let (located, keepers) = found.ok_or_else(|| errors::artifact_not_found(id))?;
        Ok(Response::new(pb::UndeleteResponse { artifact: Some(artifact(located, &keepers)) }))
    }
}

/// Parses the time for which a restored artifact is kept without an owner.
pub(super) fn parse_reprieve(keep: Option<Duration>) -> Result<KeptBy, Status> {
    match keep {
        Some(keep) if keep <= MAX_KEEP => Ok(KeptBy::Reprieve(keep)),
        _ => Err(rpc::invalid_field("keep", "must be at most ten years")),
    }
}

fn parse_tree(tree: &pb::SmallTree) -> Result<NewTree, Status> {
    let parsed = rpc::small_tree::parse("tree", tree)?;
    Ok(NewTree {
        digest: parsed.digest(),
        size_bytes: parsed.size_bytes(),
        encoded: rpc::small_tree::encode(tree),
    })
}
