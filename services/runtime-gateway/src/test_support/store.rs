//! A fake artifact store whose answers the tests provide.

use std::sync::{Arc, Mutex, PoisonError};

use domain::worker::{Incarnation, Session};
use domain::{VolumeHandle, WorkerId};
use rpc::pb::artifacts as pb;
use rpc::pb::artifacts::inventory_server::{Inventory, InventoryServer};
use rpc::pb::artifacts::report_request::Message as Part;
use tokio::sync::{mpsc, oneshot};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use super::served::TestServer;
use super::{read_lock, within};
use crate::worker::session::OpenSession;

/// The channel for the answer to a call. It is closed when the caller is gone.
pub(crate) type Answer<T> = oneshot::Sender<Result<T, Status>>;

/// A call that the test must answer.
pub(crate) enum StoreCall {
    Prepare(pb::PrepareRequest, Answer<pb::PrepareResponse>),
    Failed(pb::FailPrepareRequest, Answer<pb::FailPrepareResponse>),
    Lost(pb::LoseReplicasRequest, Answer<pb::LoseReplicasResponse>),
    DiskUsage(pb::RecordDiskUsageRequest, Answer<pb::RecordDiskUsageResponse>),
    Touch(pb::TouchRequest, Answer<pb::TouchResponse>),
    CompleteVolume(pb::CompleteVolumeRequest, Answer<pb::CompleteVolumeResponse>),
    PrepareImport(pb::PrepareImportRequest, Answer<pb::PrepareImportResponse>),
    CompleteImport(pb::CompleteImportRequest, Answer<pb::CompleteImportResponse>),
    FailImport(pb::FailImportRequest, Answer<pb::FailImportResponse>),
    /// The credential and the volumes of a report.
    Report(String, Vec<VolumeHandle>, Answer<pb::ReportResponse>),
    DescribeOrphans(pb::DescribeOrphansRequest, Answer<pb::DescribeOrphansResponse>),
    ListVolumes(pb::ListVolumesRequest, Answer<pb::ListVolumesResponse>),
    MakeRoom(pb::MakeRoomRequest, Answer<pb::MakeRoomResponse>),
}

/// The first store life.
pub(crate) const LIFE: &str = "0197c1a2-0000-7000-8000-000000000001";

#[derive(Clone)]
struct Script {
    calls_sender: mpsc::Sender<StoreCall>,
    life: Arc<Mutex<String>>,
    report_log: Arc<Mutex<ReportLog>>,
}

/// The last requests that began and opened a report.
#[derive(Default)]
struct ReportLog {
    begun: Option<pb::BeginReportRequest>,
    opened: Option<pb::ReportOpen>,
}

impl Script {
    async fn forward<T>(&self, call: impl FnOnce(Answer<T>) -> StoreCall) -> Result<Response<T>, Status> {
        let (answer, answered) = oneshot::channel();
        self.calls_sender.send(call(answer)).await.map_err(|_| Status::unavailable("the test is over"))?;
        answered.await.map_err(|_| Status::unavailable("the test does not answer"))?.map(Response::new)
    }
}

fn unused<T>() -> Result<Response<T>, Status> {
    Err(Status::unimplemented("not used in this test"))
}

#[tonic::async_trait]
impl Inventory for Script {
    type WatchDestroyingStream = ReceiverStream<Result<pb::WatchDestroyingResponse, Status>>;
    type WatchLostStream = ReceiverStream<Result<pb::WatchLostResponse, Status>>;

    async fn prepare(
        &self,
        request: Request<pb::PrepareRequest>,
    ) -> Result<Response<pb::PrepareResponse>, Status> {
        self.forward(|answer| StoreCall::Prepare(request.into_inner(), answer)).await
    }

    async fn complete_prepare(
        &self,
        _: Request<pb::CompletePrepareRequest>,
    ) -> Result<Response<pb::CompletePrepareResponse>, Status> {
        Ok(Response::new(pb::CompletePrepareResponse::default()))
    }

    async fn fail_prepare(
        &self,
        request: Request<pb::FailPrepareRequest>,
    ) -> Result<Response<pb::FailPrepareResponse>, Status> {
        self.forward(|answer| StoreCall::Failed(request.into_inner(), answer)).await
    }

    async fn lose_replicas(
        &self,
        request: Request<pb::LoseReplicasRequest>,
    ) -> Result<Response<pb::LoseReplicasResponse>, Status> {
        self.forward(|answer| StoreCall::Lost(request.into_inner(), answer)).await
    }

    async fn record_disk_usage(
        &self,
        request: Request<pb::RecordDiskUsageRequest>,
    ) -> Result<Response<pb::RecordDiskUsageResponse>, Status> {
        self.forward(|answer| StoreCall::DiskUsage(request.into_inner(), answer)).await
    }

    async fn touch(&self, request: Request<pb::TouchRequest>) -> Result<Response<pb::TouchResponse>, Status> {
        self.forward(|answer| StoreCall::Touch(request.into_inner(), answer)).await
    }

    async fn make_room(
        &self,
        request: Request<pb::MakeRoomRequest>,
    ) -> Result<Response<pb::MakeRoomResponse>, Status> {
        self.forward(|answer| StoreCall::MakeRoom(request.into_inner(), answer)).await
    }

    async fn mark_container(
        &self,
        _: Request<pb::MarkContainerRequest>,
    ) -> Result<Response<pb::MarkContainerResponse>, Status> {
        unused()
    }

    async fn mark_volume(
        &self,
        _: Request<pb::MarkVolumeRequest>,
    ) -> Result<Response<pb::MarkVolumeResponse>, Status> {
        unused()
    }

    async fn get_volume(
        &self,
        _: Request<pb::GetVolumeRequest>,
    ) -> Result<Response<pb::GetVolumeResponse>, Status> {
        unused()
    }

    async fn get_container(
        &self,
        _: Request<pb::GetContainerRequest>,
    ) -> Result<Response<pb::GetContainerResponse>, Status> {
        unused()
    }

    async fn describe_orphans(
        &self,
        request: Request<pb::DescribeOrphansRequest>,
    ) -> Result<Response<pb::DescribeOrphansResponse>, Status> {
        self.forward(|answer| StoreCall::DescribeOrphans(request.into_inner(), answer)).await
    }

    async fn list_orphans(
        &self,
        _: Request<pb::ListOrphansRequest>,
    ) -> Result<Response<pb::ListOrphansResponse>, Status> {
        unused()
    }

    async fn adopt(&self, _: Request<pb::AdoptRequest>) -> Result<Response<pb::AdoptResponse>, Status> {
        unused()
    }

    async fn purge(&self, _: Request<pb::PurgeRequest>) -> Result<Response<pb::PurgeResponse>, Status> {
        unused()
    }

    async fn watch_lost(
        &self,
        _: Request<pb::WatchLostRequest>,
    ) -> Result<Response<Self::WatchLostStream>, Status> {
        unused()
    }

    async fn list_at_risk(
        &self,
        _: Request<pb::ListAtRiskRequest>,
    ) -> Result<Response<pb::ListAtRiskResponse>, Status> {
        unused()
    }

    async fn forget_worker(
        &self,
        _: Request<pb::ForgetWorkerRequest>,
    ) -> Result<Response<pb::ForgetWorkerResponse>, Status> {
        unused()
    }

    async fn complete_volume(
        &self,
        request: Request<pb::CompleteVolumeRequest>,
    ) -> Result<Response<pb::CompleteVolumeResponse>, Status> {
        self.forward(|answer| StoreCall::CompleteVolume(request.into_inner(), answer)).await
    }

    async fn prepare_import(
        &self,
        request: Request<pb::PrepareImportRequest>,
    ) -> Result<Response<pb::PrepareImportResponse>, Status> {
        self.forward(|answer| StoreCall::PrepareImport(request.into_inner(), answer)).await
    }

    async fn complete_import(
        &self,
        request: Request<pb::CompleteImportRequest>,
    ) -> Result<Response<pb::CompleteImportResponse>, Status> {
        self.forward(|answer| StoreCall::CompleteImport(request.into_inner(), answer)).await
    }

    async fn fail_import(
        &self,
        request: Request<pb::FailImportRequest>,
    ) -> Result<Response<pb::FailImportResponse>, Status> {
        self.forward(|answer| StoreCall::FailImport(request.into_inner(), answer)).await
    }

    async fn list_imports(
        &self,
        _: Request<pb::ListImportsRequest>,
    ) -> Result<Response<pb::ListImportsResponse>, Status> {
        unused()
    }

    async fn begin_report(
        &self,
        request: Request<pb::BeginReportRequest>,
    ) -> Result<Response<pb::BeginReportResponse>, Status> {
        self.report_log.lock().unwrap_or_else(PoisonError::into_inner).begun = Some(request.into_inner());
        let token = pb::ReportToken { sequence: 1, store_life: read_lock(&self.life) };
        Ok(Response::new(pb::BeginReportResponse { token: Some(token) }))
    }

    async fn report(
        &self,
        request: Request<Streaming<pb::ReportRequest>>,
    ) -> Result<Response<pb::ReportResponse>, Status> {
        let mut parts = request.into_inner();
        let (mut credential, mut volumes) = (String::new(), Vec::new());
        while let Some(part) = parts.message().await? {
            match part.message {
                Some(Part::Open(open)) => {
                    credential.clone_from(&open.session_credential);
                    self.report_log.lock().unwrap_or_else(PoisonError::into_inner).opened = Some(open);
                }
                Some(Part::Holdings(holdings)) => {
                    volumes.extend(
                        holdings.volume_handles.iter().flat_map(|volume| volume.parse::<VolumeHandle>()),
                    );
                }
                Some(Part::Commit(_)) => break,
                None => return Err(Status::invalid_argument("an empty part")),
            }
        }
        self.forward(|answer| StoreCall::Report(credential, volumes, answer)).await
    }

    async fn watch_destroying(
        &self,
        _: Request<pb::WatchDestroyingRequest>,
    ) -> Result<Response<Self::WatchDestroyingStream>, Status> {
        unused()
    }

    async fn list_volumes(
        &self,
        request: Request<pb::ListVolumesRequest>,
    ) -> Result<Response<pb::ListVolumesResponse>, Status> {
        self.forward(|answer| StoreCall::ListVolumes(request.into_inner(), answer)).await
    }

    async fn list_containers(
        &self,
        _: Request<pb::ListContainersRequest>,
    ) -> Result<Response<pb::ListContainersResponse>, Status> {
        unused()
    }
}

/// A fake artifact store that is called over gRPC.
pub(crate) struct Store {
    pub(crate) endpoint: String,
    calls: mpsc::Receiver<StoreCall>,
    life: Arc<Mutex<String>>,
    report_log: Arc<Mutex<ReportLog>>,
    served: TestServer,
}

impl Store {
    pub(crate) async fn start() -> Self {
        let (calls_sender, calls) = mpsc::channel(64);
        let life = Arc::new(Mutex::new(LIFE.to_owned()));
        let report_log = Arc::<Mutex<ReportLog>>::default();
        let script = Script { calls_sender, life: life.clone(), report_log: report_log.clone() };
        let served = TestServer::start(|host| host.add_service(InventoryServer::new(script))).await;
        Self { endpoint: served.endpoint.clone(), calls, life, report_log, served }
    }

    /// Changes the store life.
    pub(crate) fn begin_life(&self, life: &str) {
        life.clone_into(&mut self.life.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// Returns how the last report was opened.
    pub(crate) fn opened(&self) -> Option<pb::ReportOpen> {
        self.report_log.lock().unwrap_or_else(PoisonError::into_inner).opened.clone()
    }

    /// Returns how the last report was begun.
    pub(crate) fn begun(&self) -> Option<pb::BeginReportRequest> {
        self.report_log.lock().unwrap_or_else(PoisonError::into_inner).begun.clone()
    }

    /// Waits for the next call.
    pub(crate) async fn next_call(&mut self) -> StoreCall {
        within("a call to the store", self.calls.recv()).await.expect("the server runs")
    }

    pub(crate) async fn end(self) {
        drop(self.calls);
        self.served.end().await;
    }
}

/// Creates a session with this credential.
pub(crate) fn session(credential: &str) -> OpenSession {
    OpenSession {
        credential: credential.to_owned(),
        worker: WorkerId::new(),
        incarnation: Incarnation(1),
        session: Session(1),
    }
}
