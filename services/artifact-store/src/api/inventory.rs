//! `gantry.artifacts.v1.Inventory`

use std::collections::HashSet;
use std::pin::Pin;

use domain::worker::{Receipt, SessionClaims};
use domain::{ContainerHandle, StoreLife, Timestamp, VolumeHandle};
use rpc::page::Page;
use rpc::pb::artifacts as pb;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_stream::{Stream, StreamExt};
use tonic::{Request, Response, Status, Streaming};
use uuid::Uuid;

use crate::api::{Handlers, MOST_TASK_CACHES, SERVICE, errors, orphans, parse_why};
use crate::artifacts;
use crate::db::entity::{Purpose, State, container, volume};
use crate::db::units;
use crate::inventory::losses::{self, LossNotice};
use crate::inventory::report::{self, Holdings, MOST_HANDLES};
use crate::inventory::sweep::{self, Sweep};
use crate::inventory::{self, Bytes, NeededVolume, Needs, StartsWith};
use crate::inventory::{delete_requests, worker_removal};
use crate::store_life::receipts::Token;

/// How many volumes a list may be asked for by their handles: a page.
const MOST_LISTED: usize = 1000;

/// How many volumes a container may need.
const MOST_VOLUMES: usize = 1000;

/// Most bytes of a volume's name: gateways put a word before the name that a spec gives it.
const MOST_NAME_BYTES: usize = 512;

/// How many workers may be named of which to say what is at risk.
const MOST_AT_RISK: usize = 10_000;

/// How many messages wait for a slow gateway.
const SWEEPS_AHEAD: usize = 4;

/// How many losses wait for a slow watcher.
const LOSSES_AHEAD: usize = 16;

#[tonic::async_trait]
impl pb::inventory_server::Inventory for Handlers {
    async fn prepare(
        &self,
        request: Request<pb::PrepareRequest>,
    ) -> Result<Response<pb::PrepareResponse>, Status> {
        let request = request.into_inner();
        let needs = &Needs {
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
            .map_err(|error| self.noticing(error))?;

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

    async fn prepared(
        &self,
        request: Request<pb::PreparedRequest>,
    ) -> Result<Response<pb::PreparedResponse>, Status> {
        let request = request.into_inner();
        let attempt = rpc::parse_id("attempt_id", &request.attempt_id)?;
        let claims = &self.session(&request.session_credential).await?;

        self.store
            .db
            .write(|txn| async move { inventory::prepared(&txn, claims, attempt).await })
            .await
            .map_err(|error| self.noticing(error))?;

        Ok(Response::new(pb::PreparedResponse {}))
    }

    async fn volume_complete(
        &self,
        request: Request<pb::VolumeCompleteRequest>,
    ) -> Result<Response<pb::VolumeCompleteResponse>, Status> {
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
            .write(|txn| async move { inventory::volume_complete(&txn, claims, handle, bytes, now).await })
            .await
            .map_err(|error| self.noticing(error))?;

        Ok(Response::new(pb::VolumeCompleteResponse { artifact_id: text(artifact) }))
    }

    async fn failed(
        &self,
        request: Request<pb::FailedRequest>,
    ) -> Result<Response<pb::FailedResponse>, Status> {
        let request = request.into_inner();
        let container = rpc::parse_optional_id("container_handle", &request.container_handle)?;
        if request.volume_handles.len() > MOST_VOLUMES {
            return Err(rpc::invalid_field("volume_handles", format!("must be at most {MOST_VOLUMES}")));
        }
        let handles = request.volume_handles.iter().map(|handle| rpc::parse_id("volume_handles", handle));
        let volumes = &handles.collect::<Result<Vec<_>, _>>()?;
        let why = &parse_why(request.why)?;
        let claims = &self.session(&request.session_credential).await?;
        let now = self.store.now();

        let marked =
            self.store
                .db
                .write(|txn| async move {
                    delete_requests::failed(&txn, claims, container, volumes, why, now).await
                })
                .await
                .map_err(|error| self.noticing(error))?;

        self.store.sweep_wakers.wake(marked);
        Ok(Response::new(pb::FailedResponse {}))
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
            .map_err(|error| self.noticing(error))?;

        Ok(Response::new(pb::TouchResponse {}))
    }

    async fn mark_container(
        &self,
        request: Request<pb::MarkContainerRequest>,
    ) -> Result<Response<pb::MarkContainerResponse>, Status> {
        let request = request.into_inner();
        let handle = rpc::parse_id("container_handle", &request.container_handle)?;
        let why = &parse_why(request.why)?;
        let claims = self.optional_session(&request.session_credential).await?;
        let claims = claims.as_ref();
        let now = self.store.now();

        let marked = self
            .store
            .db
            .write(|txn| async move { delete_requests::mark_container(&txn, claims, handle, why, now).await })
            .await
            .map_err(|error| self.noticing(error))?;

        self.store.sweep_wakers.wake(marked);
        Ok(Response::new(pb::MarkContainerResponse {}))
    }

    async fn mark_volume(
        &self,
        request: Request<pb::MarkVolumeRequest>,
    ) -> Result<Response<pb::MarkVolumeResponse>, Status> {
        let request = request.into_inner();
        let handle = rpc::parse_id("volume_handle", &request.volume_handle)?;
        let why = &parse_why(request.why)?;
        let claims = self.optional_session(&request.session_credential).await?;
        let claims = claims.as_ref();
        let now = self.store.now();

        let marked = self
            .store
            .db
            .write(|txn| async move { delete_requests::mark_volume(&txn, claims, handle, why, now).await })
            .await
            .map_err(|error| self.noticing(error))?;

        self.store.sweep_wakers.wake(marked);
        Ok(Response::new(pb::MarkVolumeResponse {}))
    }

    async fn prepare_import(
        &self,
        request: Request<pb::PrepareImportRequest>,
    ) -> Result<Response<pb::PrepareImportResponse>, Status> {
        self.prepare_brought(request.into_inner()).await.map(Response::new)
    }

    async fn complete_import(
        &self,
        request: Request<pb::CompleteImportRequest>,
    ) -> Result<Response<pb::CompleteImportResponse>, Status> {
        self.complete_brought(&request.into_inner()).await.map(Response::new)
    }

    async fn fail_import(
        &self,
        request: Request<pb::FailImportRequest>,
    ) -> Result<Response<pb::FailImportResponse>, Status> {
        self.fail_brought(request.into_inner()).await.map(Response::new)
    }

    async fn list_imports(
        &self,
        request: Request<pb::ListImportsRequest>,
    ) -> Result<Response<pb::ListImportsResponse>, Status> {
        self.list_brought(&request.into_inner()).await.map(Response::new)
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
            .map_err(|error| self.noticing(error))?;

        let token = begun.token;
        if let Some(ended) = begun.ended {
            tracing::error!(
                worker.id = %claims.worker,
                store.life = %token.life,
                store.ended_life = %ended,
                "a worker remembers more than this database, which came out of a backup: it has begun a new life"
            );
        }
        if begun.unproven {
            tracing::warn!(
                worker.id = %claims.worker,
                "a worker says that it remembers more than this database, and has no receipt for it: if the database came out of a backup, run \
                 `artifact-store restored`"
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
            .map_err(|error| self.noticing(error))?;

        Ok(Response::new(pb::ReportResponse {
            forgotten: outcome.forgotten,
            lost: outcome.lost,
            unknown_volume_handles: texts(&outcome.unknown_volumes),
            unknown_container_handles: texts(&outcome.unknown_containers),
            set_aside: outcome.orphans,
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

        let (sweeps, stream) = mpsc::channel(SWEEPS_AHEAD);
        let handlers = self.clone();
        self.tasks.spawn(async move {
            let watched = sweep::watch(&handlers.store, &claims, &sweeps, &handlers.stopping).await;
            if let Err(error) = watched {
                // The caller may have left.
                sweeps.send(Err(handlers.noticing(error))).await.ok();
            }
        });

        let answers = ReceiverStream::new(stream).map(|sweep| Ok(answer(&sweep?)));
        Ok(Response::new(Box::pin(answers)))
    }

    async fn describe_set_aside(
        &self,
        request: Request<pb::DescribeSetAsideRequest>,
    ) -> Result<Response<pb::DescribeSetAsideResponse>, Status> {
        let request = request.into_inner();
        let descriptions = &orphans::parse_descriptions(request.volumes)?;
        let claims = &self.session(&request.session_credential).await?;

        self.store
            .db
            .write(|txn| async move { crate::inventory::orphans::describe(&txn, claims, descriptions).await })
            .await
            .map_err(|error| self.noticing(error))?;

        Ok(Response::new(pb::DescribeSetAsideResponse {}))
    }

    async fn list_set_aside(
        &self,
        request: Request<pb::ListSetAsideRequest>,
    ) -> Result<Response<pb::ListSetAsideResponse>, Status> {
        self.list_aside(&request.into_inner()).await.map(Response::new)
    }

    async fn adopt(&self, request: Request<pb::AdoptRequest>) -> Result<Response<pb::AdoptResponse>, Status> {
        self.adopt_aside(request.into_inner()).await.map(Response::new)
    }

    async fn purge(&self, request: Request<pb::PurgeRequest>) -> Result<Response<pb::PurgeResponse>, Status> {
        self.purge_aside(&request.into_inner()).await.map(Response::new)
    }

    async fn get_volume(
        &self,
        request: Request<pb::GetVolumeRequest>,
    ) -> Result<Response<pb::GetVolumeResponse>, Status> {
        let handle = rpc::parse_id("volume_handle", &request.into_inner().volume_handle)?;

        let row = inventory::volume(self.store.db.read(), handle)
            .await
            .map_err(|error| errors::database("look for a volume", &error))?;

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
            .map_err(|error| errors::database("look for a container", &error))?;

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
        let page = Page::of(SERVICE, &request)?;

        let rows = inventory::list_volumes(self.store.db.read(), worker, state, &only, page)
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
        let page = Page::of(SERVICE, &request)?;

        let rows = inventory::list_containers(self.store.db.read(), worker, state, page)
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

        let (losses, stream) = mpsc::channel(LOSSES_AHEAD);
        let handlers = self.clone();
        self.tasks.spawn(async move {
            let Handlers { store, stopping, .. } = &handlers;
            let watched = losses::watch(store, after, &handlers.policy(), &losses, stopping).await;
            if let Err(error) = watched {
                // The caller may have left.
                losses.send(Err(error)).await.ok();
            }
        });

        let answers = ReceiverStream::new(stream).map(|told| Ok(lost(told?)));
        Ok(Response::new(Box::pin(answers)))
    }

    async fn list_at_risk(
        &self,
        request: Request<pb::ListAtRiskRequest>,
    ) -> Result<Response<pb::ListAtRiskResponse>, Status> {
        let request = request.into_inner();
        let page = Page::of(SERVICE, &request)?;
        let team = rpc::parse_team("team", request.team)?;
        if request.worker_ids.len() > MOST_AT_RISK {
            return Err(rpc::invalid_field("worker_ids", format!("must be at most {MOST_AT_RISK}")));
        }
        let workers = request.worker_ids.iter().map(|id| rpc::parse_id("worker_ids", id));
        let workers = workers.collect::<Result<Vec<_>, _>>()?;
        let (now, policy) = (self.store.now(), self.policy());

        let listed = artifacts::list_at_risk(self.store.db.read(), &team, &workers, page, now, &policy).await;
        let (listed, looked_at) = listed.map_err(|error| errors::database("list what is at risk", &error))?;

        let listed = listed
            .into_iter()
            .map(|(located, keepers)| (located.artifact.ordinal, super::artifact(located, &keepers)));
        let (artifacts, mut next_page_token) = page.end(listed, false);
        // Not all that was looked at is listed.
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

        if request.only_check {
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
    /// The session that speaks, unless it is an operator.
    async fn optional_session(&self, credential: &str) -> Result<Option<SessionClaims>, Status> {
        if credential.is_empty() { Ok(None) } else { self.session(credential).await.map(Some) }
    }

    /// Takes the first message of a report, and refuses one that could not be judged before it is sent.
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
        report::check(self.store.db.read(), &claims, token).await.map_err(|error| self.noticing(error))?;
        Ok((claims, token, worker_life))
    }
}

/// `None`: it is empty.
fn parse_receipt(receipt: &[u8]) -> Result<Option<Receipt>, Status> {
    if receipt.is_empty() {
        return Ok(None);
    }
    let receipt = receipt.try_into().map_err(|_| rpc::invalid_field("receipt", "must be 32 bytes"))?;
    Ok(Some(Receipt(receipt)))
}

fn parse_token(field: &str, token: &pb::ReportToken) -> Result<Token, Status> {
    let sequence = i64::try_from(token.sequence)
        .map_err(|_| rpc::invalid_field(format!("{field}.sequence"), "must be less than 2^63"))?;
    Ok(Token { sequence, life: rpc::parse_id(&format!("{field}.store_life"), &token.store_life)? })
}

async fn next_message(
    messages: &mut Streaming<pb::ReportRequest>,
) -> Result<Option<pb::report_request::Message>, Status> {
    match messages.next().await {
        Some(Ok(request)) => rpc::required("message", request.message).map(Some),
        Some(Err(status)) => Err(errors::truncated(format!("the report was cut off: {}", status.message()))),
        None => Ok(None),
    }
}

/// Receives a report up to its commit, which alone makes it count.
async fn receive_holdings(messages: &mut Streaming<pb::ReportRequest>) -> Result<Holdings, Status> {
    use pb::report_request::Message;
    let mut holdings = Holdings::default();
    loop {
        match next_message(messages).await? {
            Some(Message::Holdings(some)) => {
                for handle in &some.volume_handles {
                    let handle: VolumeHandle = rpc::parse_id("holdings.volume_handles", handle)?;
                    holdings.add_volume(handle);
                }
                for handle in &some.container_handles {
                    let handle: ContainerHandle = rpc::parse_id("holdings.container_handles", handle)?;
                    holdings.add_container(handle);
                }
                if holdings.len() > MOST_HANDLES {
                    return Err(rpc::invalid_field("holdings", format!("must be at most {MOST_HANDLES}")));
                }
            }
            Some(Message::Commit(commit)) => {
                let sent = holdings.len();
                if usize::try_from(commit.count) == Ok(sent) {
                    return Ok(holdings);
                }
                return Err(errors::truncated(format!(
                    "{sent} handles came, and {} were sent",
                    commit.count
                )));
            }
            Some(Message::Open(_)) => {
                return Err(rpc::invalid_field("message", "a report is opened once"));
            }
            None => return Err(errors::truncated("the report ended without a commit".to_owned())),
        }
    }
}

fn parse_unreachable(ids: &[String]) -> Result<HashSet<domain::ArtifactId>, Status> {
    if ids.len() > MOST_TASK_CACHES {
        let description = format!("must be at most {MOST_TASK_CACHES}");
        return Err(rpc::invalid_field("unreachable_artifact_ids", description));
    }
    ids.iter().map(|id| rpc::parse_id("unreachable_artifact_ids", id)).collect()
}

fn parse_volumes(volumes: Vec<pb::PrepareVolume>) -> Result<Vec<NeededVolume>, Status> {
    if volumes.len() > MOST_VOLUMES {
        return Err(rpc::invalid_field("volumes", format!("must be at most {MOST_VOLUMES}")));
    }
    let mut names = HashSet::new();
    volumes
        .into_iter()
        .map(|volume| {
            let purpose = match rpc::parse_enum("volumes.purpose", volume.purpose)? {
                pb::VolumePurpose::Input => Purpose::Input,
                pb::VolumePurpose::Output => Purpose::Output,
                pb::VolumePurpose::Scratch => Purpose::Scratch,
                pb::VolumePurpose::Replica | pb::VolumePurpose::Unspecified => {
                    return Err(rpc::invalid_field("volumes.purpose", "must be INPUT, OUTPUT or SCRATCH"));
                }
            };
            let output = rpc::parse_optional_id("volumes.output_artifact_id", &volume.output_artifact_id)?;
            if output.is_some() != (purpose == Purpose::Output) {
                let description = "is required for an OUTPUT, and only there";
                return Err(rpc::invalid_field("volumes.output_artifact_id", description));
            }
            if volume.name.is_empty() || volume.name.len() > MOST_NAME_BYTES || volume.name.contains('\0') {
                let description = format!("must be 1 to {MOST_NAME_BYTES} bytes, without NUL");
                return Err(rpc::invalid_field("volumes.name", description));
            }
            if !names.insert(volume.name.clone()) {
                return Err(rpc::invalid_field("volumes.name", "must be unique"));
            }
            let from = rpc::parse_optional_id("volumes.from_artifact_id", &volume.from_artifact_id)?;
            let cache = rpc::parse_optional_id("volumes.from_task_cache_id", &volume.from_task_cache_id)?;
            let from = match (from, cache) {
                (Some(_), Some(_)) => {
                    let description = "must be empty beside from_artifact_id";
                    return Err(rpc::invalid_field("volumes.from_task_cache_id", description));
                }
                (artifact, cache) => artifact.map(StartsWith::Artifact).or(cache.map(StartsWith::LatestOf)),
            };
            Ok(NeededVolume { name: volume.name, purpose, from, output })
        })
        .collect()
}

fn parse_handles(handles: &[String]) -> Result<Vec<VolumeHandle>, Status> {
    if handles.len() > MOST_LISTED {
        return Err(rpc::invalid_field("volume_handles", format!("must be at most {MOST_LISTED}")));
    }
    handles.iter().map(|handle| rpc::parse_id("volume_handles", handle)).collect()
}

fn parse_state(field: &str, value: i32) -> Result<Option<State>, Status> {
    if value == 0 {
        return Ok(None);
    }
    Ok(match rpc::parse_enum(field, value)? {
        pb::InventoryState::Unspecified => None,
        pb::InventoryState::Creating => Some(State::Creating),
        pb::InventoryState::Created => Some(State::Created),
        pb::InventoryState::Unconfirmed => Some(State::Unconfirmed),
        pb::InventoryState::Lost => Some(State::Lost),
        pb::InventoryState::Destroying => Some(State::Destroying),
        pb::InventoryState::Sweeping => Some(State::Sweeping),
    })
}

fn state(state: State) -> pb::InventoryState {
    match state {
        State::Creating => pb::InventoryState::Creating,
        State::Created => pb::InventoryState::Created,
        State::Unconfirmed => pb::InventoryState::Unconfirmed,
        State::Lost => pb::InventoryState::Lost,
        State::Destroying => pb::InventoryState::Destroying,
        State::Sweeping => pb::InventoryState::Sweeping,
    }
}

fn answer(sweep: &Sweep) -> pb::WatchDestroyingResponse {
    pb::WatchDestroyingResponse {
        container_handles: texts(&sweep.containers),
        volume_handles: texts(&sweep.volumes),
    }
}

fn listed_volume(row: volume::Model) -> pb::Volume {
    let purpose = match row.purpose {
        Purpose::Replica => pb::VolumePurpose::Replica,
        Purpose::Input => pb::VolumePurpose::Input,
        Purpose::Output => pb::VolumePurpose::Output,
        Purpose::Scratch => pb::VolumePurpose::Scratch,
    };
    pb::Volume {
        volume_handle: row.handle.to_string(),
        worker_id: row.worker_id.to_string(),
        state: state(row.state).into(),
        purpose: purpose.into(),
        // An input holds what it was made from; an output, what it may become.
        artifact_id: text(row.artifact_id.or(row.from_artifact_id.filter(|_| row.purpose == Purpose::Input))),
        parent_handle: text(row.parent),
        attempt_id: text(row.attempt_id),
        size_bytes: units::size(row.size_bytes),
        created_at: Some(rpc::timestamp(Timestamp(row.created_at))),
        lost_at: lost_since(row.state, row.lost_at).map(rpc::timestamp),
        marked_why: row.marked_why.unwrap_or_default(),
    }
}

/// Since when something is lost that is.
fn lost_since(state: State, lost_at: Option<i64>) -> Option<Timestamp> {
    lost_at.filter(|_| state == State::Lost).map(Timestamp)
}

fn lost(told: LossNotice) -> pb::WatchLostResponse {
    pb::WatchLostResponse {
        revision: told.revision,
        worker_id: told.worker.to_string(),
        volume_handle: text(told.volume),
        container_handle: text(told.container),
        artifact_id: text(told.artifact),
        attempt_id: text(told.attempt),
        lost_at: Some(rpc::timestamp(told.lost_at)),
        kept_by: super::kept_by(&told.keepers),
        workload_ids: texts(&told.workloads),
        build_ids: texts(&told.builds),
        replicas: told.replicas.iter().map(super::replica).collect(),
        in_store: told.in_store,
    }
}

fn listed_container(row: container::Model) -> pb::Container {
    pb::Container {
        container_handle: row.handle.to_string(),
        worker_id: row.worker_id.to_string(),
        state: state(row.state).into(),
        attempt_id: text(known(row.attempt_id)),
        workload_id: text(known(row.holder_id)),
        created_at: Some(rpc::timestamp(Timestamp(row.created_at))),
        lost_at: lost_since(row.state, row.lost_at).map(rpc::timestamp),
        touched_at: row.touched_at.map(|at| rpc::timestamp(Timestamp(at))),
        marked_why: row.marked_why.unwrap_or_default(),
    }
}

/// The owner of a container, unless it was purged: then it is not known.
fn known(id: Uuid) -> Option<Uuid> {
    (!id.is_nil()).then_some(id)
}

/// An id that may be absent, which the empty string says.
pub(super) fn text(id: Option<impl ToString>) -> String {
    id.map(|id| id.to_string()).unwrap_or_default()
}

pub(super) fn texts(ids: &[impl ToString]) -> Vec<String> {
    ids.iter().map(ToString::to_string).collect()
}
