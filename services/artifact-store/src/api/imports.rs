//! Handlers of imports of worker-provided images and certificates.

use domain::Timestamp;
use rpc::page::Page;
use rpc::pb::artifacts as pb;
use tonic::Status;

use crate::api::caches::{MAX_NAME, MAX_PATH, MAX_TEXT, limited_text, required_text};
use crate::api::{Handlers, SERVICE, errors, parse_reason};
use crate::db::entity::import;
use crate::inventory::Bytes;
use crate::inventory::imports::{self, Progress, ProvidedItem};

impl Handlers {
    pub(super) async fn run_prepare_import(
        &self,
        request: pb::PrepareImportRequest,
    ) -> Result<pb::PrepareImportResponse, Status> {
        let provided = rpc::required("provided", request.provided)?;
        let provided = &ProvidedItem {
            resource_type: limited_text("provided.resource_type", provided.resource_type, MAX_NAME)?,
            version: limited_text("provided.version", provided.version, MAX_TEXT)?,
            path: required_text("provided.path", provided.path, MAX_PATH)?,
        };
        let claims = &self.session(&request.session_credential).await?;
        let (now, term) = (self.store.now(), self.store.config.claim_term);

        let (prepared, marked) = self
            .store
            .db
            .write(|txn| async move { imports::prepare(&txn, claims, provided, now, term).await })
            .await
            .map_err(|error| self.forget_lost_session(error))?;

        self.store.sweep_wakers.wake(marked);
        Ok(pb::PrepareImportResponse {
            artifact_id: prepared.artifact.to_string(),
            volume_handle: prepared.volume.to_string(),
            term: (!prepared.is_imported).then(|| rpc::duration(term)),
        })
    }

    pub(super) async fn run_complete_import(
        &self,
        request: &pb::CompleteImportRequest,
    ) -> Result<pb::CompleteImportResponse, Status> {
        let handle = rpc::parse_id("volume_handle", &request.volume_handle)?;
        let bytes = &Bytes {
            digest: rpc::parse_digest("digest", &request.digest)?,
            size_bytes: i64::try_from(request.size_bytes)
                .map_err(|_| rpc::invalid_field("size_bytes", "must be less than 2^63"))?,
            verified: true,
        };
        let claims = &self.session(&request.session_credential).await?;
        let now = self.store.now();

        let artifact = self
            .store
            .db
            .write(|txn| async move { imports::complete(&txn, claims, handle, bytes, now).await })
            .await
            .map_err(|error| self.forget_lost_session(error))?;

        Ok(pb::CompleteImportResponse { artifact_id: artifact.to_string() })
    }

    pub(super) async fn run_fail_import(
        &self,
        request: pb::FailImportRequest,
    ) -> Result<pb::FailImportResponse, Status> {
        let handle = rpc::parse_id("volume_handle", &request.volume_handle)?;
        let why = &parse_reason("reason", request.reason)?;
        let claims = &self.session(&request.session_credential).await?;
        let now = self.store.now();

        let marked = self
            .store
            .db
            .write(|txn| async move { imports::fail(&txn, claims, handle, why, now).await })
            .await
            .map_err(|error| self.forget_lost_session(error))?;

        self.store.sweep_wakers.wake(marked);
        Ok(pb::FailImportResponse {})
    }

    pub(super) async fn run_list_imports(
        &self,
        request: &pb::ListImportsRequest,
    ) -> Result<pb::ListImportsResponse, Status> {
        let worker = rpc::parse_optional_id("worker_id", &request.worker_id)?;
        let page = Page::of(SERVICE, request)?;

        let rows = imports::list(self.store.db.read(), worker, page)
            .await
            .map_err(|error| errors::database("list imports", &error))?;

        let found = rows.into_iter().map(|row| (row.0.import_id, listed(row))).collect();
        let (imports, next_page_token) = super::end_page(page, found);
        Ok(pb::ListImportsResponse { imports, next_page_token })
    }
}

fn listed((row, progress): (import::Model, Progress)) -> pb::Import {
    let state = match progress {
        Progress::Importing => pb::ImportState::Importing,
        Progress::Imported => pb::ImportState::Imported,
        Progress::Failed => pb::ImportState::Failed,
    };
    pb::Import {
        import_id: row.import_id.to_string(),
        worker_id: row.worker_id.to_string(),
        provided: Some(pb::WorkerProvided {
            resource_type: row.resource_type,
            version: row.version,
            path: row.path,
        }),
        state: state.into(),
        artifact_id: row.artifact_id.to_string(),
        failure_reason: row.failure_reason.unwrap_or_default(),
        failed_at: row.failed_at.map(|at| rpc::timestamp(Timestamp(at))),
    }
}
