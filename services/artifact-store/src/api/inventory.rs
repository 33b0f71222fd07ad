//! Handlers of `gantry.artifacts.v1.Inventory`.

use std::pin::Pin;

use domain::worker::SessionClaims;
use domain::{StoreLife, WorkerId};
use rpc::page::Page;
use rpc::pb::artifacts as pb;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_stream::{Stream, StreamExt};
use tonic::{Request, Response, Status, Streaming};

use crate::api::inventory_messages::{
    MAX_AT_RISK, MAX_VOLUMES, listed_container, listed_volume, loss_message, next_message, parse_handles,
    parse_receipt, parse_state, parse_token, parse_unreachable, parse_volumes, receive_holdings,
    sweep_message, text, texts,
};
use crate::api::{Handlers, SERVICE, errors, orphans, parse_reason};
use crate::artifacts;
use crate::inventory::disk_usage::{self, DiskUsage};
use crate::inventory::losses::{self, LostReplica};
use crate::inventory::report;
use crate::inventory::sweep;
use crate::inventory::{self, AttemptNeeds, Bytes};
use crate::inventory::{delete_requests, worker_removal};
use crate::store_life::receipts::Token;

/// Number of messages buffered for a slow gateway.
const BUFFERED_SWEEPS: usize = 4;

/// Number of losses buffered for a slow watcher.
const BUFFERED_LOSSES: usize = 16;

#[tonic::async_trait]
impl pb::inventory_server::Inventory for Handlers {
    async fn prepare(
        &self,
        request: Request<pb::PrepareRequest>,
    ) -> Result<Response<pb::PrepareResponse>, Status> {
        let request = request.into_inner();
        let needs = &AttemptNeeds {
            holder: rpc::parse_id("holder_id", &request.holder_id)?,
            attempt: rpc::parse_id("attempt_id", &request.attempt_id)?,
            team: rpc::parse_team("team", request.team)?,
            volumes: parse_volumes(request.volumes)?,
            unreachable: parse_unreachable(&request.unreachable_artifact_ids)?,
        };
        let claims = &self.session(&request.session_credential).await?;
        let now = self.store.now();

        let planned = self
            .store
            .db
            .write(|txn| async move { inventory::prepare(&txn, claims, needs, now).await })
            .await
            .map_err(|error| self.forget_lost_session(error))?;

        let volumes = planned.volumes.into_iter().map(|volume| pb::PreparedVolume {
            name: volume.name,
            volume_handle: volume.handle.to_string(),
            parent_handle: text(volume.parent),
            missing_artifact_id: text(volume.missing),
            parent_digest: volume.parent_digest.unwrap_or_default().into(),
        });
        Ok(Response::new(pb::PrepareResponse {
            container_handle: planned.container.to_string(),
            volumes: volumes.collect(),
        }))
    }

    async fn complete_prepare(
        &self,
        request: Request<pb::CompletePrepareRequest>,
    ) -> Result<Response<pb::CompletePrepareResponse>, Status> {
        let request = request.into_inner();
        let attempt = rpc::parse_id("attempt_id", &request.attempt_id)?;
        let claims = &self.session(&request.session_credential).await?;

        self.store
            .db
            .write(|txn| async move { inventory::record_prepared(&txn, claims, attempt).await })
            .await
            .map_err(|error| self.forget_lost_session(error))?;

        Ok(Response::new(pb::CompletePrepareResponse {}))
    }

    async fn complete_volume(
        &self,
        request: Request<pb::CompleteVolumeRequest>,
    ) -> Result<Response<pb::CompleteVolumeResponse>, Status> {
        let request = request.into_inner();
        let handle = rpc::parse_id("volume_handle", &request.volume_handle)?;
        let bytes = &Bytes {
            digest: rpc::parse_digest("digest", &request.digest)?,
            size_bytes: i64::try_from(request.size_bytes)
                .map_err(|_| rpc::invalid_field("size_bytes", "must be less than 2^63"))?,
            verified: match rpc::parse_enum("verification", request.verification)? {
                pb::Verification::Unspecified => {
                    return Err(rpc::invalid_field("verification", "is required"));
                }
                pb::Verification::Verified => true,
                pb::Verification::Reported => false,
            },
        };
        let claims = &self.session(&request.session_credential).await?;
        let now = self.store.now();

        let artifact = self
            .store
            .db
            .write(|txn| async move { inventory::complete_volume(&txn, claims, handle, bytes, now).await })
            .await
            .map_err(|error| self.forget_lost_session(error))?;

        Ok(Response::new(pb::CompleteVolumeResponse { artifact_id: text(artifact) }))
    }

    async fn fail_prepare(
        &self,
        request: Request<pb::FailPrepareRequest>,
    ) -> Result<Response<pb::FailPrepareResponse>, Status> {
        let request = request.into_inner();
        let container = rpc::parse_optional_id("container_handle", &request.container_handle)?;
        if request.volume_handles.len() > MAX_VOLUMES {
            return Err(rpc::invalid_field("volume_handles", format!("must be at most {MAX_VOLUMES}")));
        }
        let handles = request.volume_handles.iter().map(|handle| rpc::parse_id("volume_handles", handle));
        let volumes = &handles.collect::<Result<Vec<_>, _>>()?;
        let why = &parse_reason("reason", request.reason)?;
        let claims = &self.session(&request.session_credential).await?;
        let now = self.store.now();

        let marked = self
            .store
            .db
            .write(|txn| async move {
                delete_requests::mark_failed(&txn, claims, container, volumes, why, now).await
            })
            .await
            .map_err(|error| self.forget_lost_session(error))?;

        self.store.sweep_wakers.wake(marked);
        Ok(Response::new(pb::FailPrepareResponse {}))
    }

    async fn lose_replicas(
        &self,
        request: Request<pb::LoseReplicasRequest>,
    ) -> Result<Response<pb::LoseReplicasResponse>, Status> {
        let request = request.into_inner();
        if request.replicas.len() > MAX_VOLUMES {
            return Err(rpc::invalid_field("replicas", format!("must be at most {MAX_VOLUMES}")));
        }
        let replicas = request.replicas.into_iter().map(|replica| {
            Ok(LostReplica {
                handle: rpc::parse_id("replicas.volume_handle", &replica.volume_handle)?,
                reason: parse_reason("replicas.reason", replica.reason)?,
            })
        });
        let replicas = &replicas.collect::<Result<Vec<_>, Status>>()?;
        let claims = &self.session(&request.session_credential).await?;
        let now = self.store.now();

        let lost = self
            .store
            .db
            .write(|txn| async move { losses::lose_replicas(&txn, claims, replicas, now).await })
            .await
            .map_err(|error| self.forget_lost_session(error))?;

        if lost > 0 {
            tracing::warn!(worker.id = %claims.worker, replicas = lost, "a gateway found replicas missing or damaged");
        }
        Ok(Response::new(pb::LoseReplicasResponse {}))
    }

    async fn record_disk_usage(
        &self,
        request: Request<pb::RecordDiskUsageRequest>,
    ) -> Result<Response<pb::RecordDiskUsageResponse>, Status> {
        let request = request.into_inner();
        if !(1..=MAX_VOLUMES).contains(&request.volumes.len()) {
            return Err(rpc::invalid_field("volumes", format!("must be 1 to {MAX_VOLUMES}")));
        }
        let bytes = |field: &str, bytes| {
            i64::try_from(bytes)
                .map_err(|_| rpc::invalid_field(format!("volumes.{field}"), "must be less than 2^63"))
        };
        let measured = request.volumes.iter().map(|volume| {
            Ok(DiskUsage {
                handle: rpc::parse_id("volumes.volume_handle", &volume.volume_handle)?,
                exclusive: bytes("exclusive_bytes", volume.exclusive_bytes)?,
                part: bytes("disk_bytes", volume.disk_bytes)?,
            })
        });
        let measured = &measured.collect::<Result<Vec<_>, Status>>()?;
        let claims = &self.session(&request.session_credential).await?;

        self.store
            .db
            .write(|txn| async move { disk_usage::record(&txn, claims, measured).await })
            .await
            .map_err(|error| self.forget_lost_session(error))?;

        Ok(Response::new(pb::RecordDiskUsageResponse {}))
    }

    async fn touch(&self, request: Request<pb::TouchRequest>) -> Result<Response<pb::TouchResponse>, Status> {
        let request = request.into_inner();
        let attempt = rpc::parse_id("attempt_id", &request.attempt_id)?;
        let claims = &self.session(&request.session_credential).await?;
        let now = self.store.now();

        self.store
            .db
            .write(|txn| async move { inventory::touch(&txn, claims, attempt, now).await })
            .await
            .map_err(|error| self.forget_lost_session(error))?;

        Ok(Response::new(pb::TouchResponse {}))
    }

    async fn mark_container(
        &self,
        request: Request<pb::MarkContainerRequest>,
    ) -> Result<Response<pb::MarkContainerResponse>, Status> {
        let request = request.into_inner();
        let handle = rpc::parse_id("container_handle", &request.container_handle)?;
        let why = &parse_reason("reason", request.reason)?;
        let claims = self.optional_session(&request.session_credential).await?;
        let claims = claims.as_ref();
        let now = self.store.now();

        let marked = self
            .store
            .db
            .write(|txn| async move { delete_requests::mark_container(&txn, claims, handle, why, now).await })
            .await
            .map_err(|error| self.forget_lost_session(error))?;

        self.store.sweep_wakers.wake(marked);
        Ok(Response::new(pb::MarkContainerResponse {}))
    }

    async fn mark_volume(
        &self,
        request: Request<pb::MarkVolumeRequest>,
    ) -> Result<Response<pb::MarkVolumeResponse>, Status> {
        let request = request.into_inner();
        let handle = rpc::parse_id("volume_handle", &request.volume_handle)?;
        let why = &parse_reason("reason", request.reason)?;
        let claims = self.optional_session(&request.session_credential).await?;
        let claims = claims.as_ref();
        let now = self.store.now();

        let marked = self
            .store
            .db
            .write(|txn| async move { delete_requests::mark_volume(&txn, claims, handle, why, now).await })
            .await
            .map_err(|error| self.forget_lost_session(error))?;

        self.store.sweep_wakers.wake(marked);
        Ok(Response::new(pb::MarkVolumeResponse {}))
    }

    async fn make_room(
        &self,
        request: Request<pb::MakeRoomRequest>,
    ) -> Result<Response<pb::MakeRoomResponse>, Status> {
        let request = request.into_inner();
        if request.size_bytes == 0 {
            return Err(rpc::invalid_field("size_bytes", "must be at least 1"));
        }
        if request.reliable_worker_ids.len() > MAX_AT_RISK {
            let message = format!("must be at most {MAX_AT_RISK}");
            return Err(rpc::invalid_field("reliable_worker_ids", message));
        }
        let reliable = request.reliable_worker_ids.iter();
        let reliable = reliable.map(|id| rpc::parse_id("reliable_worker_ids", id));
        let reliable = reliable.collect::<Result<Vec<WorkerId>, _>>()?;
        let claims = self.session(&request.session_credential).await?;
        let made = self.run_make_room(&claims, request.size_bytes, &reliable, request.only_ended).await?;
        Ok(Response::new(made))
    }

    async fn prepare_import(
        &self,
        request: Request<pb::PrepareImportRequest>,
    ) -> Result<Response<pb::PrepareImportResponse>, Status> {
        self.run_prepare_import(request.into_inner()).await.map(Response::new)
    }

    async fn complete_import(
        &self,
        request: Request<pb::CompleteImportRequest>,
    ) -> Result<Response<pb::CompleteImportResponse>, Status> {
        self.run_complete_import(&request.into_inner()).await.map(Response::new)
    }

    async fn fail_import(
        &self,
        request: Request<pb::FailImportRequest>,
    ) -> Result<Response<pb::FailImportResponse>, Status> {
        self.run_fail_import(request.into_inner()).await.map(Response::new)
    }

    async fn list_imports(
        &self,
        request: Request<pb::ListImportsRequest>,
    ) -> Result<Response<pb::ListImportsResponse>, Status> {
        self.run_list_imports(&request.into_inner()).await.map(Response::new)
    }

    async fn begin_report(
        &self,
        request: Request<pb::BeginReportRequest>,
    ) -> Result<Response<pb::BeginReportResponse>, Status> {
        let request = request.into_inner();
        let receipt = parse_receipt(&request.receipt)?;
        let last = request.last.as_ref().map(|last| parse_token("last", last)).transpose()?;
        let last = last.map(|last| (last, receipt));
        let claims = &self.session(&request.session_credential).await?;

        let begun = self
            .store
            .db
            .write(|txn| async move { report::begin(&txn, claims, last).await })
            .await
            .map_err(|error| self.forget_lost_session(error))?;

        let token = begun.token;
        if let Some(ended) = begun.ended {
            tracing::error!(
                worker.id = %claims.worker,
                store.life = %token.life,
                store.ended_life = %ended,
                "store began a new store life: a worker has proven that this database was restored from a backup"
            );
        }
        if begun.unproven {
            tracing::warn!(
                worker.id = %claims.worker,
                "worker claims a newer report than this database has, without a receipt: if the database was restored from a backup, run `artifact-store restored`"
            );
        }
        let token = pb::ReportToken {
            sequence: u64::try_from(token.sequence).unwrap_or(0),
            store_life: token.life.to_string(),
        };
        Ok(Response::new(pb::BeginReportResponse { token: Some(token) }))
    }

    async fn report(
        &self,
        request: Request<Streaming<pb::ReportRequest>>,
    ) -> Result<Response<pb::ReportResponse>, Status> {
        let mut messages = request.into_inner();
        let (claims, token, worker_life) = self.open_report(&mut messages).await?;
        let holdings = receive_holdings(&mut messages).await?;

        let outcome = report::apply(&self.store, &claims, token, worker_life, holdings)
            .await
            .map_err(|error| self.forget_lost_session(error))?;

        Ok(Response::new(pb::ReportResponse {
            forgotten: outcome.forgotten,
            lost: outcome.lost,
            unknown_volume_handles: texts(&outcome.unknown_volumes),
            unknown_container_handles: texts(&outcome.unknown_containers),
            orphans: outcome.orphans,
            undescribed_volume_handles: texts(&outcome.undescribed),
            receipt: outcome.receipt.map(|receipt| receipt.0.to_vec().into()).unwrap_or_default(),
        }))
    }

    type WatchDestroyingStream =
        Pin<Box<dyn Stream<Item = Result<pb::WatchDestroyingResponse, Status>> + Send>>;

    async fn watch_destroying(
        &self,
        request: Request<pb::WatchDestroyingRequest>,
    ) -> Result<Response<Self::WatchDestroyingStream>, Status> {
        let claims = self.session(&request.into_inner().session_credential).await?;

        let (sweeps, stream) = mpsc::channel(BUFFERED_SWEEPS);
        let handlers = self.clone();
        self.tasks.spawn(async move {
            let watched = sweep::watch(&handlers.store, &claims, &sweeps, &handlers.stopping).await;
            if let Err(error) = watched {
                // Send fails if the caller has left.
                sweeps.send(Err(handlers.forget_lost_session(error))).await.ok();
            }
        });

        let answers = ReceiverStream::new(stream).map(|sweep| Ok(sweep_message(&sweep?)));
        Ok(Response::new(Box::pin(answers)))
    }

    async fn describe_orphans(
        &self,
        request: Request<pb::DescribeOrphansRequest>,
    ) -> Result<Response<pb::DescribeOrphansResponse>, Status> {
        let request = request.into_inner();
        let descriptions = &orphans::parse_descriptions(request.volumes)?;
        let claims = &self.session(&request.session_credential).await?;

        self.store
            .db
            .write(|txn| async move { crate::inventory::orphans::describe(&txn, claims, descriptions).await })
            .await
            .map_err(|error| self.forget_lost_session(error))?;

        Ok(Response::new(pb::DescribeOrphansResponse {}))
    }

    async fn list_orphans(
        &self,
        request: Request<pb::ListOrphansRequest>,
    ) -> Result<Response<pb::ListOrphansResponse>, Status> {
        self.run_list_orphans(&request.into_inner()).await.map(Response::new)
    }

    async fn adopt(&self, request: Request<pb::AdoptRequest>) -> Result<Response<pb::AdoptResponse>, Status> {
        self.run_adopt(request.into_inner()).await.map(Response::new)
    }

    async fn purge(&self, request: Request<pb::PurgeRequest>) -> Result<Response<pb::PurgeResponse>, Status> {
        self.run_purge(&request.into_inner()).await.map(Response::new)
    }

    async fn get_volume(
        &self,
        request: Request<pb::GetVolumeRequest>,
    ) -> Result<Response<pb::GetVolumeResponse>, Status> {
        let handle = rpc::parse_id("volume_handle", &request.into_inner().volume_handle)?;

        let row = inventory::volume(self.store.db.read(), handle)
            .await
            .map_err(|error| errors::database("get a volume", &error))?;

        let row = row.ok_or_else(|| errors::volume_not_found(handle))?;
        Ok(Response::new(pb::GetVolumeResponse { volume: Some(listed_volume(row)) }))
    }

    async fn get_container(
        &self,
        request: Request<pb::GetContainerRequest>,
    ) -> Result<Response<pb::GetContainerResponse>, Status> {
        let handle = rpc::parse_id("container_handle", &request.into_inner().container_handle)?;

        let row = inventory::container(self.store.db.read(), handle)
            .await
            .map_err(|error| errors::database("get a container", &error))?;

        let row = row.ok_or_else(|| errors::no_container(handle))?;
        Ok(Response::new(pb::GetContainerResponse { container: Some(listed_container(row)) }))
    }

    async fn list_volumes(
        &self,
        request: Request<pb::ListVolumesRequest>,
    ) -> Result<Response<pb::ListVolumesResponse>, Status> {
        let request = request.into_inner();
        let worker = rpc::parse_optional_id("worker_id", &request.worker_id)?;
        let state = parse_state("state", request.state)?;
        let only = parse_handles(&request.volume_handles)?;
        let ids = rpc::spec::name::parse_id_prefix("id_prefix", &request.id_prefix)?;
        let page = Page::of(SERVICE, &request)?;

        let rows = inventory::list_volumes(self.store.db.read(), worker, state, &only, ids, page)
            .await
            .map_err(|error| errors::database("list volumes", &error))?;

        let found = rows.into_iter().map(|row| (row.handle, listed_volume(row))).collect();
        let (volumes, next_page_token) = super::end_page(page, found);
        Ok(Response::new(pb::ListVolumesResponse { volumes, next_page_token }))
    }

    async fn list_containers(
        &self,
        request: Request<pb::ListContainersRequest>,
    ) -> Result<Response<pb::ListContainersResponse>, Status> {
        let request = request.into_inner();
        let worker = rpc::parse_optional_id("worker_id", &request.worker_id)?;
        let state = parse_state("state", request.state)?;
        let ids = rpc::spec::name::parse_id_prefix("id_prefix", &request.id_prefix)?;
        let page = Page::of(SERVICE, &request)?;

        let rows = inventory::list_containers(self.store.db.read(), worker, state, ids, page)
            .await
            .map_err(|error| errors::database("list containers", &error))?;

        let found = rows.into_iter().map(|row| (row.handle, listed_container(row))).collect();
        let (containers, next_page_token) = super::end_page(page, found);
        Ok(Response::new(pb::ListContainersResponse { containers, next_page_token }))
    }

    type WatchLostStream = Pin<Box<dyn Stream<Item = Result<pb::WatchLostResponse, Status>> + Send>>;

    async fn watch_lost(
        &self,
        request: Request<pb::WatchLostRequest>,
    ) -> Result<Response<Self::WatchLostStream>, Status> {
        let after = request.into_inner().after_revision;

        let (losses, stream) = mpsc::channel(BUFFERED_LOSSES);
        let handlers = self.clone();
        self.tasks.spawn(async move {
            let Handlers { store, stopping, .. } = &handlers;
            let watched = losses::watch(store, after, &handlers.policy(), &losses, stopping).await;
            if let Err(error) = watched {
                // Send fails if the caller has left.
                losses.send(Err(error)).await.ok();
            }
        });

        let answers = ReceiverStream::new(stream).map(|notice| Ok(loss_message(notice?)));
        Ok(Response::new(Box::pin(answers)))
    }

    async fn list_at_risk(
        &self,
        request: Request<pb::ListAtRiskRequest>,
    ) -> Result<Response<pb::ListAtRiskResponse>, Status> {
        let request = request.into_inner();
        let page = Page::of(SERVICE, &request)?;
        let team = match request.all_teams {
            true => None,
            false => Some(rpc::parse_team("team", request.team)?),
        };
        let team = team.as_deref();
        if request.worker_ids.len() > MAX_AT_RISK {
            return Err(rpc::invalid_field("worker_ids", format!("must be at most {MAX_AT_RISK}")));
        }
        let workers = request.worker_ids.iter().map(|id| rpc::parse_id("worker_ids", id));
        let workers = workers.collect::<Result<Vec<_>, _>>()?;
        let (now, policy) = (self.store.now(), self.policy());

        let listed = artifacts::list_at_risk(self.store.db.read(), team, &workers, page, now, &policy).await;
        let (listed, looked_at) =
            listed.map_err(|error| errors::database("list artifacts at risk", &error))?;

        let listed = listed
            .into_iter()
            .map(|(located, keepers)| (located.artifact.ordinal, super::artifact(located, &keepers)));
        let (artifacts, mut next_page_token) = page.end(listed, false);
        // Some of the checked artifacts are not listed.
        let full = u64::try_from(looked_at.len()).is_ok_and(|len| len == page.size);
        if let Some(last) = looked_at.last()
            && full
            && next_page_token.is_empty()
        {
            next_page_token = page.token(*last);
        }
        Ok(Response::new(pb::ListAtRiskResponse { artifacts, next_page_token }))
    }

    async fn forget_worker(
        &self,
        request: Request<pb::ForgetWorkerRequest>,
    ) -> Result<Response<pb::ForgetWorkerResponse>, Status> {
        let request = request.into_inner();
        let worker = rpc::parse_id("worker_id", &request.worker_id)?;
        let (now, policy) = (self.store.now(), &self.policy());

        if request.dry_run {
            let checked = self.store.db.write(|txn| async move {
                worker_removal::check(&txn, worker, request.force, now, policy).await
            });
            return match checked.await {
                Ok(_) | Err(worker_removal::ForgetError::OnlyChecked(_)) => {
                    Ok(Response::new(pb::ForgetWorkerResponse::default()))
                }
                Err(error) => Err(error.into()),
            };
        }
        let held = self
            .store
            .db
            .write(|txn| async move {
                worker_removal::forget_worker(&txn, worker, request.force, now, policy).await
            })
            .await?;

        self.store.unrecord(worker);
        Ok(Response::new(pb::ForgetWorkerResponse { volumes: held.volumes, containers: held.containers }))
    }
}

impl Handlers {
    /// Returns the session of a gateway, or nothing for an operator.
    async fn optional_session(&self, credential: &str) -> Result<Option<SessionClaims>, Status> {
        if credential.is_empty() { Ok(None) } else { self.session(credential).await.map(Some) }
    }

    /// Receives the first message of a report, and rejects a report that could not be judged before
    /// its list is sent.
    async fn open_report(
        &self,
        messages: &mut Streaming<pb::ReportRequest>,
    ) -> Result<(SessionClaims, Token, Option<StoreLife>), Status> {
        let Some(pb::report_request::Message::Open(open)) = next_message(messages).await? else {
            return Err(rpc::invalid_field("message", "a report begins with `open`"));
        };
        let claims = self.session(&open.session_credential).await?;
        let token = parse_token("open.token", &rpc::required("open.token", open.token)?)?;
        let worker_life = rpc::parse_optional_id("open.worker_life", &open.worker_life)?;
        report::check(self.store.db.read(), &claims, token)
            .await
            .map_err(|error| self.forget_lost_session(error))?;
        Ok((claims, token, worker_life))
    }
}
