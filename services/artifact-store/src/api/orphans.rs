//! RPC handlers that list, adopt and purge orphans.

use domain::{Digest, Timestamp};
use rpc::page::Page;
use rpc::pb::artifacts as pb;
use tonic::Status;
use uuid::Uuid;

use crate::api::artifacts::{DEFAULT_REPRIEVE, parse_reprieve};
use crate::api::inventory_messages::text;
use crate::api::{Handlers, SERVICE, artifact, errors};
use crate::artifacts;
use crate::artifacts::restore::KeptBy;
use crate::db::entity::{OrphanKind, orphan};
use crate::db::units;
use crate::inventory::orphans::{self, Adoption, Description};

/// Maximum number of handles in one call.
const MAX: usize = 1000;

impl Handlers {
    pub(super) async fn run_list_orphans(
        &self,
        request: &pb::ListOrphansRequest,
    ) -> Result<pb::ListOrphansResponse, Status> {
        let worker = rpc::parse_optional_id("worker_id", &request.worker_id)?;
        let page = Page::of(SERVICE, request)?;

        let rows = orphans::list(self.store.db.read(), worker, page)
            .await
            .map_err(|error| errors::database("list orphans", &error))?;

        let found = rows.into_iter().map(|row| (row.handle, listed(row))).collect();
        let (orphans, next_page_token) = super::end_page(page, found);
        Ok(pb::ListOrphansResponse { orphans, next_page_token })
    }

    pub(super) async fn run_adopt(&self, request: pb::AdoptRequest) -> Result<pb::AdoptResponse, Status> {
        let adoption = &Adoption {
            team: rpc::parse_team("team", request.team)?,
            volume: rpc::parse_id("volume_handle", &request.volume_handle)?,
            worker: rpc::parse_optional_id("worker_id", &request.worker_id)?,
            artifact: rpc::parse_optional_id("artifact_id", &request.artifact_id)?,
            kept_by: match request.kept_by {
                None => KeptBy::Reprieve(DEFAULT_REPRIEVE),
                Some(pb::adopt_request::KeptBy::BuildId(build)) => {
                    KeptBy::Build(rpc::parse_id("build_id", &build)?)
                }
                Some(pb::adopt_request::KeptBy::Keep(keep)) => {
                    parse_reprieve(rpc::parse_duration("keep", Some(keep))?)?
                }
            },
        };
        let now = self.store.now();

        let (id, marked) =
            self.store.db.write(|txn| async move { orphans::adopt(&txn, adoption, now).await }).await?;

        self.store.sweep_wakers.wake(marked);
        let found = artifacts::get(self.store.db.read(), &adoption.team, id, now, &self.policy())
            .await
            .map_err(|error| errors::database("get an artifact", &error))?;
        let (located, keepers) = found.ok_or_else(|| errors::artifact_not_found(id))?;
        Ok(pb::AdoptResponse { artifact: Some(artifact(located, &keepers)) })
    }

    pub(super) async fn run_purge(&self, request: &pb::PurgeRequest) -> Result<pb::PurgeResponse, Status> {
        if request.handles.is_empty() || request.handles.len() > MAX {
            return Err(rpc::invalid_field("handles", format!("must be 1 to {MAX}")));
        }
        let handles = request.handles.iter().map(|handle| rpc::parse_id("handles", handle));
        let handles = &handles.collect::<Result<Vec<Uuid>, _>>()?;
        let worker = rpc::parse_optional_id("worker_id", &request.worker_id)?;
        let now = self.store.now();

        let purged = self
            .store
            .db
            .write(|txn| async move { orphans::purge(&txn, handles, worker, now).await })
            .await?;

        self.store.sweep_wakers.wake(purged.workers);
        Ok(pb::PurgeResponse { volumes: purged.volumes, containers: purged.containers })
    }
}

pub(super) fn parse_descriptions(volumes: Vec<pb::VolumeDescription>) -> Result<Vec<Description>, Status> {
    if volumes.len() > MAX {
        return Err(rpc::invalid_field("volumes", format!("must be at most {MAX}")));
    }
    volumes.into_iter().map(parse_description).collect()
}

fn parse_description(volume: pb::VolumeDescription) -> Result<Description, Status> {
    let optional = |field: &str, bytes: &[u8]| -> Result<Option<Digest>, Status> {
        if bytes.is_empty() { Ok(None) } else { rpc::parse_digest(field, bytes).map(Some) }
    };
    Ok(Description {
        volume: rpc::parse_id("volumes.volume_handle", &volume.volume_handle)?,
        parent: rpc::parse_optional_id("volumes.parent_handle", &volume.parent_handle)?,
        team: if volume.team.is_empty() { None } else { Some(rpc::parse_team("volumes.team", volume.team)?) },
        artifact: rpc::parse_optional_id("volumes.artifact_id", &volume.artifact_id)?,
        digest: optional("volumes.digest", &volume.digest)?,
        size_bytes: i64::try_from(volume.size_bytes)
            .map_err(|_| rpc::invalid_field("volumes.size_bytes", "must be less than 2^63"))?,
    })
}

fn listed(row: orphan::Model) -> pb::Orphan {
    let handle = row.handle.to_string();
    let of = |kind| if row.kind == kind { handle.clone() } else { String::new() };
    let (volume_handle, container_handle) = (of(OrphanKind::Volume), of(OrphanKind::Container));
    let description = (row.kind == OrphanKind::Volume && row.described).then(|| pb::VolumeDescription {
        volume_handle: handle.clone(),
        parent_handle: text(row.parent),
        team: row.team.unwrap_or_default(),
        artifact_id: text(row.artifact_id),
        digest: row.digest.unwrap_or_default().into(),
        size_bytes: units::size(row.size_bytes),
    });
    pb::Orphan {
        volume_handle,
        container_handle,
        worker_id: row.worker_id.to_string(),
        first_seen_at: Some(rpc::timestamp(Timestamp(row.first_seen_at))),
        description,
    }
}
