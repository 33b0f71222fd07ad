//! Gateways with several workers: each call reaches the worker that it names. A call for a worker
//! of another gateway is rejected with its address.

use std::sync::Arc;
use std::time::Duration;

use domain::{ProcessId, VolumeHandle, WorkerId};
use rpc::client::{Outgoing, PROXY_TICKET_HEADER, peer};
use rpc::pb::artifacts;
use rpc::pb::artifacts::replicas_server::{Replicas, ReplicasServer};
use rpc::pb::runtime as pb;
use rpc::pb::runtime::attach_request::Message as Say;
use rpc::pb::runtime::attach_response::Message as Heard;
use rpc::pb::runtime::containers_client::ContainersClient;
use rpc::pb::runtime::volumes_client::VolumesClient;
use rpc::pb::scheduler as scheduler_pb;
use rpc::pb::scheduler::workers_client::WorkersClient;
use rpc::{Peer, Reason, Refusal};
use runtime::Runtime;
use runtime_gateway::Config;
use server::{Host, Listener};
use testing::conformance::{self, RuntimeExt, container, in_time, programs};
use testing::fake::FakeWorker;
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tonic::{Request, Response, Status};

/// An address without a server.
const UNUSED_ADDRESS: &str = "http://127.0.0.1:9";

/// A server on a free port.
struct Served {
    endpoint: String,
    stop: oneshot::Sender<()>,
    served: JoinHandle<anyhow::Result<()>>,
}

impl Served {
    #[expect(clippy::disallowed_methods, reason = "the test waits for it in `end`")]
    async fn start(host: impl AsyncFnOnce(&mut Host, String)) -> Self {
        let listener = Listener::InsecureTcp(TcpListener::bind("127.0.0.1:0").await.expect("a port"));
        let endpoint = listener.endpoint().expect("its address");
        let mut served = Host::new();
        host(&mut served, endpoint.clone()).await;
        let (stop, stopped) = oneshot::channel();
        let served = tokio::spawn(served.serve([listener], async {
            stopped.await.ok();
        }));
        Self { endpoint, stop, served }
    }

    fn peer(&self) -> Peer {
        peer(&self.endpoint, Outgoing::default()).expect("an address")
    }

    async fn end(self) {
        self.stop.send(()).expect("it is served");
        in_time("the end of a server", self.served).await.expect("no panic").expect("the server succeeds");
    }
}

/// A worker with a volume and a process.
struct Machine {
    name: &'static str,
    worker: Arc<FakeWorker>,
    volume: VolumeHandle,
    process: ProcessId,
}

impl Machine {
    async fn new(name: &'static str) -> Self {
        let worker = FakeWorker::near();
        let runtime = worker.runtime();
        let volume = runtime.volume().await;
        conformance::put(&*runtime, volume, "name", name).await;
        let handle = runtime.made(container()).await;
        let command = programs::say(&format!("{name}\n"), "");
        let process = runtime.started(handle, conformance::process(&command)).await;
        runtime.ended(process).await;
        Self { name, worker, volume, process }
    }

    /// The configuration and runtime of the worker at a gateway with the address `endpoint`.
    fn pair(&self, scheduler: &str, endpoint: &str) -> (Config, Arc<dyn Runtime>) {
        let config = Config {
            platform: "linux".to_owned(),
            worker_name: self.name.to_owned(),
            tags: Vec::new(),
            team: None,
            amounts: runtime_gateway::Amounts::default(),
            zone: String::new(),
            ephemeral: false,
            endpoint: endpoint.to_owned(),
            scheduler: scheduler.to_owned(),
            artifact_store: UNUSED_ADDRESS.to_owned(),
            streamer: UNUSED_ADDRESS.to_owned(),
            token: None,
            manifest_dir: self.worker.gateway_directory().join("manifests"),
            report_interval: Duration::from_secs(60),
            scrub_bytes_per_second: 0,
            destroy_concurrency: 1,
            intervals: runtime_gateway::Intervals::default(),
            hold_destruction: false,
        };
        (config, self.worker.runtime())
    }
}

/// The id of the worker with this name, after its registration.
async fn id(workers: &WorkersClient<Peer>, name: &str) -> WorkerId {
    in_time("a worker", async {
        loop {
            let request = scheduler_pb::GetWorkerRequest { worker: name.to_owned() };
            if let Ok(answer) = workers.clone().get_worker(request).await {
                let worker = answer.into_inner().worker.expect("a worker");
                return worker.worker_id.parse().expect("an id");
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await
}

/// Reads the file in `volume` of `worker` through `gateway`.
async fn file(
    (workers, gateway): (&WorkersClient<Peer>, &Served),
    worker: WorkerId,
    volume: VolumeHandle,
) -> Result<String, Refusal> {
    let request = scheduler_pb::IssueTicketRequest {
        team: "main".to_owned(),
        worker_id: worker.to_string(),
        volume_handle: volume.to_string(),
        operation: scheduler_pb::TicketOperation::Read.into(),
    };
    let ticket = workers.clone().issue_ticket(request).await?.into_inner().ticket;
    let request = pb::ReadFileRequest { ticket, path: "name".into() };
    let read = async {
        let mut parts = VolumesClient::new(gateway.peer()).read_file(request).await?.into_inner();
        let mut text = String::new();
        while let Some(part) = parts.message().await? {
            text.push_str(str::from_utf8(&part.data).expect("text"));
        }
        Ok(text)
    };
    in_time("a file", read).await
}

/// Reads the output of `process` of `worker` through `gateway`.
async fn output(gateway: &Served, worker: &str, process: ProcessId) -> Result<String, Refusal> {
    output_by_ticket(gateway, worker, process, None).await
}

/// Reads the output of `process` with a proxy ticket.
async fn output_by_ticket(
    gateway: &Served,
    worker: &str,
    process: ProcessId,
    ticket: Option<&str>,
) -> Result<String, Refusal> {
    let resume = pb::Resume {
        team: "main".to_owned(),
        worker_id: worker.to_owned(),
        process_id: process.to_string(),
        ..pb::Resume::default()
    };
    let said = tokio_stream::iter([pb::AttachRequest { message: Some(Say::Resume(resume)) }]);
    let mut said = Request::new(said);
    if let Some(ticket) = ticket {
        said.metadata_mut().insert(PROXY_TICKET_HEADER, ticket.parse().expect("ASCII"));
    }
    let heard = async {
        let mut heard = ContainersClient::new(gateway.peer()).attach(said).await?.into_inner();
        let mut text = String::new();
        while let Some(response) = heard.message().await? {
            if let Some(Heard::Output(output)) = response.message {
                text.push_str(str::from_utf8(&output.data).expect("text"));
            }
        }
        Ok(text)
    };
    in_time("the output", heard).await
}

fn assert_rejected<T: std::fmt::Debug>(answer: Result<T, Refusal>, reason: Reason) -> Refusal {
    let refusal = answer.expect_err("the call is rejected");
    assert!(refusal.is(reason), "{refusal}");
    refusal
}

/// An artifact store that accepts every transfer.
struct EverythingIsPlanned;

fn no_part<T>() -> Result<Response<T>, Status> {
    Err(Status::unimplemented("not part of this test"))
}

#[tonic::async_trait]
impl Replicas for EverythingIsPlanned {
    async fn authorize_transfer(
        &self,
        _: Request<artifacts::AuthorizeTransferRequest>,
    ) -> Result<Response<artifacts::AuthorizeTransferResponse>, Status> {
        Ok(Response::new(artifacts::AuthorizeTransferResponse {}))
    }

    async fn plan_replica(
        &self,
        _: Request<artifacts::PlanReplicaRequest>,
    ) -> Result<Response<artifacts::PlanReplicaResponse>, Status> {
        no_part()
    }

    async fn progress(
        &self,
        _: Request<artifacts::ProgressRequest>,
    ) -> Result<Response<artifacts::ProgressResponse>, Status> {
        no_part()
    }

    async fn seal_upload(
        &self,
        _: Request<artifacts::SealUploadRequest>,
    ) -> Result<Response<artifacts::SealUploadResponse>, Status> {
        no_part()
    }

    async fn abandon_upload(
        &self,
        _: Request<artifacts::AbandonUploadRequest>,
    ) -> Result<Response<artifacts::AbandonUploadResponse>, Status> {
        no_part()
    }

    async fn drop_replica(
        &self,
        _: Request<artifacts::DropReplicaRequest>,
    ) -> Result<Response<artifacts::DropReplicaResponse>, Status> {
        no_part()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn call_reaches_worker_or_is_redirected() {
    let directory = tempfile::tempdir().expect("a directory");
    let url = format!("sqlite://{}", directory.path().join("scheduler.db").display());
    let store = Served::start(async |host: &mut Host, _| {
        host.add_service(ReplicasServer::new(EverythingIsPlanned));
    })
    .await;
    let scheduler = Served::start(async |host: &mut Host, _| {
        scheduler::start(scheduler::Config::new(url, store.endpoint.clone()), host)
            .await
            .expect("a scheduler");
    })
    .await;
    let workers = WorkersClient::new(scheduler.peer());
    let (one, two, three) =
        (Machine::new("one").await, Machine::new("two").await, Machine::new("three").await);
    let attend = async |machines: &[&Machine]| {
        Served::start(async |host: &mut Host, endpoint: String| {
            let pairs: Vec<_> =
                machines.iter().map(|machine| machine.pair(&scheduler.endpoint, &endpoint)).collect();
            runtime_gateway::start(pairs, host).await.expect("a gateway");
        })
        .await
    };
    let (both, other) = (attend(&[&one, &two]).await, attend(&[&three]).await);
    let ids = [id(&workers, "one").await, id(&workers, "two").await, id(&workers, "three").await];

    for (machine, id) in [(&one, ids[0]), (&two, ids[1])] {
        let read = file((&workers, &both), id, machine.volume).await;
        assert_eq!(read.expect("it is there"), machine.name);
        let said = output(&both, &id.to_string(), machine.process).await;
        assert_eq!(said.expect("it said it"), format!("{}\n", machine.name));
    }
    assert_rejected(file((&workers, &both), ids[0], two.volume).await, Reason::VolumeNotFound);
    assert_rejected(output(&both, &ids[0].to_string(), two.process).await, Reason::ProcessNotFound);
    assert_rejected(output(&both, "", one.process).await, Reason::InvalidField);
    assert_eq!(output(&other, "", three.process).await.expect("the gateway has only one worker"), "three\n");

    let third = ids[2].to_string();
    for refused in [
        assert_rejected(file((&workers, &both), ids[2], three.volume).await, Reason::NotAttended),
        assert_rejected(output(&both, &third, three.process).await, Reason::NotAttended),
    ] {
        assert_eq!(refused.about.get("worker_id"), Some(&third));
        assert_eq!(refused.about.get("gateway_endpoint"), Some(&other.endpoint));
    }
    let refused =
        assert_rejected(output(&other, &WorkerId::new().to_string(), one.process).await, Reason::NotAttended);
    assert_eq!(refused.about.get("gateway_endpoint"), None, "no gateway knows the worker");

    // A proxy ticket is for one worker, and must be signed.
    let request = scheduler_pb::IssueProxyTicketRequest { worker_id: ids[0].to_string() };
    let issued = workers.clone().issue_proxy_ticket(request).await.expect("a ticket").into_inner();
    assert_eq!(issued.gateway_endpoint, both.endpoint);
    let through = async |id: WorkerId, process, ticket| {
        output_by_ticket(&both, &id.to_string(), process, Some(ticket)).await
    };
    assert_eq!(through(ids[0], one.process, &issued.ticket).await.expect("it may"), "one\n");
    assert_rejected(through(ids[1], two.process, &issued.ticket).await, Reason::NotAttended);
    assert_rejected(through(ids[0], one.process, "forged").await, Reason::InvalidToken);
    let request = scheduler_pb::IssueTicketRequest {
        team: "main".to_owned(),
        worker_id: ids[0].to_string(),
        volume_handle: one.volume.to_string(),
        operation: scheduler_pb::TicketOperation::Read.into(),
    };
    let transfer = workers.clone().issue_ticket(request).await.expect("a ticket").into_inner().ticket;
    assert_rejected(through(ids[0], one.process, &transfer).await, Reason::InvalidToken);
    let unknown = scheduler_pb::IssueProxyTicketRequest { worker_id: WorkerId::new().to_string() };
    let refused = workers.clone().issue_proxy_ticket(unknown).await.map_err(Refusal::from);
    assert_rejected(refused.map(|_| ()), Reason::WorkerNotFound);

    both.end().await;
    other.end().await;
    scheduler.end().await;
    store.end().await;
}
