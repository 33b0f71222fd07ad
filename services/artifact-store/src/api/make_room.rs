//! Handler of `Inventory.MakeRoom`.

use domain::WorkerId;
use domain::worker::SessionClaims;
use rpc::pb::artifacts as pb;
use tonic::Status;

use crate::api::{Handlers, errors};
use crate::caches::{resource_caches, task_caches};
use crate::gc;
use crate::inventory::delete_requests::{self, Drop, DropError};
use crate::inventory::make_room::{self, Candidate, CandidateKind};
use crate::policy::retention::CacheEndReason;

impl Handlers {
    /// Deletes what is left of ended attempts, and, unless `only_ended`, candidates until their
    /// sizes reach `size_bytes`. Each candidate has its own transaction, so that other calls need
    /// not wait for all of them.
    pub(super) async fn run_make_room(
        &self,
        claims: &SessionClaims,
        size_bytes: u64,
        reliable: &[WorkerId],
        only_ended: bool,
    ) -> Result<pb::MakeRoomResponse, Status> {
        let (read, now) = (self.store.db.read(), self.store.now());
        let failed = |error| errors::database("make room", &error);
        let given_up = gc::give_up_ended(&self.store, claims.worker).await.map_err(failed)?;
        if !given_up.is_empty() {
            // Artifacts that only the ended attempts used are marked at once.
            gc::round(&self.store, &self.stopping).await.map_err(failed)?;
        }
        let pending_bytes = make_room::pending_bytes(read, claims.worker).await.map_err(failed)?;
        let wanted = size_bytes.saturating_sub(pending_bytes);
        let of_ended = given_up.len() as u64;
        let mut response =
            pb::MakeRoomResponse { pending_bytes, of_ended, ..pb::MakeRoomResponse::default() };
        if wanted == 0 || only_ended {
            return Ok(response);
        }
        let candidates = make_room::candidates(read, claims.worker, reliable, now).await.map_err(failed)?;
        let mut are_caches_deleted = false;
        for candidate in candidates {
            if response.size_bytes >= wanted {
                break;
            }
            if self.delete_for_space(claims, reliable, &candidate).await? {
                response.size_bytes = response.size_bytes.saturating_add(candidate.size_bytes);
                response.replicas += 1;
                are_caches_deleted |= !matches!(candidate.kind, CandidateKind::Copy(_));
            }
        }
        if are_caches_deleted {
            // Their artifacts are marked at once, so that the next call counts them as pending.
            gc::round(&self.store, &self.stopping).await.map_err(failed)?;
        }
        tracing::info!(
            worker.id = %claims.worker,
            wanted_bytes = size_bytes,
            pending_bytes,
            deleted_bytes = response.size_bytes,
            replicas = response.replicas,
            of_ended = response.of_ended,
            "a worker needs disk space: deleted copies and caches that nothing uses"
        );
        Ok(response)
    }

    /// Deletes a candidate, unless it is used by now. Returns whether it did.
    async fn delete_for_space(
        &self,
        claims: &SessionClaims,
        reliable: &[WorkerId],
        Candidate { kind, team, .. }: &Candidate,
    ) -> Result<bool, Status> {
        let store = &self.store;
        let (now, tombstone, policy) = (store.now(), store.config.tombstone, &self.policy());
        let why = CacheEndReason::DiskSpace;
        let failed = |error| errors::database("make room", &error);
        match *kind {
            CandidateKind::Copy(artifact) => {
                let why = "another worker has a copy, and this one needed disk space".to_owned();
                let drop = &Drop {
                    team: team.clone(),
                    artifact,
                    worker: claims.worker,
                    why,
                    reliable: Some(reliable.to_vec()),
                    force: false,
                };
                let dropped = store
                    .db
                    .write(|txn| async move { delete_requests::drop_replica(&txn, drop, now, policy).await });
                match dropped.await {
                    Ok(marked) => {
                        let is_marked = !marked.is_empty();
                        store.sweep_wakers.wake(marked);
                        Ok(is_marked)
                    }
                    Err(DropError::ArtifactNotFound(_) | DropError::LastReplica(_)) => Ok(false),
                    Err(DropError::Database(error)) => Err(failed(error)),
                }
            }
            CandidateKind::ResourceCache(cache) => {
                let deleted = store.db.write(|txn| async move {
                    resource_caches::delete(&txn, team, cache, why, now, tombstone).await
                });
                match deleted.await {
                    Ok(()) => Ok(true),
                    Err(
                        resource_caches::DeleteError::NotFound(_) | resource_caches::DeleteError::InUse(_),
                    ) => Ok(false),
                    Err(resource_caches::DeleteError::Database(error)) => Err(failed(error)),
                }
            }
            CandidateKind::TaskCache(cache) => {
                let deleted = store.db.write(|txn| async move {
                    task_caches::delete_unused(&txn, team, cache, now, tombstone).await
                });
                deleted.await.map_err(failed)
            }
        }
    }
}
