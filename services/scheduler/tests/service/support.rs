//! Scheduler on a port of its own and a simulated gateway.

use std::collections::HashSet;
use std::future::Future;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use domain::{GatewayInstance, MarkerId, WorkloadId};
use rpc::client::{Outgoing, peer};
use rpc::pb::scheduler as pb;
use rpc::pb::scheduler::placements_client::PlacementsClient;
use rpc::pb::scheduler::synchronize_request::Message as Said;
use rpc::pb::scheduler::synchronize_response::Message as Told;
use rpc::pb::scheduler::workers_client::WorkersClient;
use rpc::pb::scheduler::workloads_client::WorkloadsClient;
use rpc::{Peer, Refusal};
use scheduler::Config;
use server::Listener;
use testing::databases::TestDatabase;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;

/// Upper bound of the time that a test waits for anything.
pub(crate) const TEST_TIMEOUT: Duration = Duration::from_secs(30);

/// Scheduler that a test can stop and start again.
pub(crate) struct Running {
    pub(crate) endpoint: String,
    stop: Option<oneshot::Sender<()>>,
    served: Option<JoinHandle<anyhow::Result<()>>>,
}

/// Configuration with short intervals. No artifact store is reachable.
pub(crate) fn config(database: &TestDatabase) -> Config {
    Config {
        heartbeat: Duration::from_millis(100),
        poll: Duration::from_millis(100),
        ..Config::new(&database.url, "http://127.0.0.1:9")
    }
}

impl Running {
    #[expect(clippy::disallowed_methods, reason = "a test waits for it in `stop`")]
    pub(crate) async fn start(config: Config) -> Self {
        let listener = Listener::InsecureTcp(server::bind(([127, 0, 0, 1], 0).into()).expect("a free port"));
        let endpoint = listener.endpoint().expect("an address");
        let (stop, stopped) = oneshot::channel();
        let served = tokio::spawn(scheduler::serve(config, listener, async move {
            stopped.await.ok();
        }));
        let running = Self { endpoint, stop: Some(stop), served: Some(served) };
        // The listener queues connections until the scheduler serves it.
        running.wait_until_ready().await;
        running
    }

    /// Connects to a scheduler that another process runs.
    pub(crate) async fn connect(endpoint: String) -> Self {
        let running = Self { endpoint, stop: None, served: None };
        running.wait_until_ready().await;
        running
    }

    async fn wait_until_ready(&self) {
        let keys = async || self.workers().keys(pb::KeysRequest {}).await.ok().map(|_| ());
        until("the scheduler answers", keys).await;
    }

    pub(crate) async fn stop(mut self) {
        if let Some(stop) = self.stop.take() {
            stop.send(()).expect("the scheduler runs");
        }
        if let Some(served) = self.served.take() {
            served.await.expect("no panic").expect("the scheduler stops without an error");
        }
    }

    pub(crate) fn peer(&self) -> Peer {
        peer(&self.endpoint, Outgoing::internal()).expect("an address")
    }

    pub(crate) fn workloads(&self) -> WorkloadsClient<Peer> {
        WorkloadsClient::new(self.peer())
    }

    pub(crate) fn workers(&self) -> WorkersClient<Peer> {
        WorkersClient::new(self.peer())
    }

    pub(crate) fn placements(&self) -> PlacementsClient<Peer> {
        PlacementsClient::new(self.peer())
    }

    pub(crate) async fn submit(&self, spec: pb::WorkloadSpec) -> Result<WorkloadId, Refusal> {
        let id = WorkloadId::new();
        self.submit_as(id, spec).await.map(|()| id)
    }

    pub(crate) async fn submit_as(&self, id: WorkloadId, spec: pb::WorkloadSpec) -> Result<(), Refusal> {
        let request = pb::SubmitRequest { workload_id: id.to_string(), spec: Some(spec) };
        self.workloads().submit(request).await?;
        Ok(())
    }

    pub(crate) async fn get(&self, id: WorkloadId) -> pb::Workload {
        let request = pb::GetRequest { team: "main".to_owned(), workload_id: id.to_string() };
        let answer = self.workloads().get(request).await.expect("the workload is known");
        answer.into_inner().workload.expect("a workload")
    }

    pub(crate) async fn worker(&self, name: &str) -> pb::Worker {
        let request = pb::GetWorkerRequest { worker: name.to_owned() };
        let answer = self.workers().get_worker(request).await.expect("the worker is known");
        answer.into_inner().worker.expect("a worker")
    }

    pub(crate) async fn cancel(&self, id: WorkloadId, grace: Duration) {
        let request = pb::CancelRequest {
            team: "main".to_owned(),
            workload_id: id.to_string(),
            grace: Some(rpc::duration(grace)),
        };
        self.workloads().cancel(request).await.expect("cancelled");
    }

    /// Returns all events of a workload up to its end.
    pub(crate) async fn watch(&self, id: WorkloadId, after_revision: u64) -> Vec<pb::WatchResponse> {
        self.watch_some(id, after_revision, usize::MAX).await
    }

    /// Waits for the first `count` events after the revision.
    pub(crate) async fn watch_some(
        &self,
        id: WorkloadId,
        after_revision: u64,
        count: usize,
    ) -> Vec<pb::WatchResponse> {
        let request =
            pb::WatchRequest { team: "main".to_owned(), workload_id: id.to_string(), after_revision };
        let mut events = self.workloads().watch(request).await.expect("watched").into_inner();
        let mut some = Vec::new();
        while some.len() < count
            && let Some(event) = within("the next event", events.message()).await.expect("an event")
        {
            some.push(event);
        }
        some
    }

    /// Returns the last event of a workload.
    pub(crate) async fn finished(&self, id: WorkloadId) -> pb::Finished {
        match self.watch(id, 0).await.pop().and_then(|event| event.event) {
            Some(pb::watch_response::Event::Finished(finished)) => finished,
            other => panic!("the last event is {other:?}"),
        }
    }

    pub(crate) async fn wait_for(&self, id: WorkloadId, state: pb::WorkloadState) -> pb::Workload {
        until(&format!("{id} is {state:?}"), async || {
            let workload = self.get(id).await;
            (workload.state() == state).then_some(workload)
        })
        .await
    }
}

/// Waits for `future`. The test fails when `future` takes too long.
pub(crate) async fn within<T>(what: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(TEST_TIMEOUT, future).await {
        Ok(answer) => answer,
        Err(_) => panic!("timed out: {what}"),
    }
}

/// Polls `ask` until it returns a value.
pub(crate) async fn until<T>(what: &str, ask: impl AsyncFn() -> Option<T>) -> T {
    within(what, async {
        loop {
            if let Some(answer) = ask().await {
                return answer;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await
}

/// Spec of a workload that runs `true` and has no inputs.
pub(crate) fn spec() -> pb::WorkloadSpec {
    pb::WorkloadSpec {
        team: "main".to_owned(),
        kind: pb::WorkloadKind::Task.into(),
        image: Some(pb::Image { source: Some(pb::image::Source::Host(pb::HostImage {})), entrypoint: None }),
        command: vec![b"true".as_slice().into()],
        stdin: pb::StdinMode::None.into(),
        output: pb::OutputMode::Spooled.into(),
        privilege: pb::Privilege::Confined.into(),
        network: pb::Network::Private.into(),
        ..pb::WorkloadSpec::default()
    }
}

/// First message of a simulated gateway.
pub(crate) fn registration(name: &str) -> pb::Registration {
    pb::Registration {
        worker_name: name.to_owned(),
        gateway_instance: GatewayInstance::new().to_string(),
        session_credential: String::new(),
        marker: Some(pb::Marker { marker_id: MarkerId::new().to_string(), boot_id: "boot".to_owned() }),
        endpoint: "http://127.0.0.1:1".to_owned(),
        labels: Some(pb::WorkerLabels {
            platform: "linux".to_owned(),
            image_kinds: vec!["host".to_owned()],
            capabilities: ["stop-after", "network-private"].map(str::to_owned).to_vec(),
            ..pb::WorkerLabels::default()
        }),
        capacity: Some(pb::Capacity { max_tasks: 2, disk_bytes: 1 << 30, ..pb::Capacity::default() }),
        protocol_versions: vec![1],
        ended_instance: String::new(),
    }
}

/// Simulated gateway that is connected for one worker.
pub(crate) struct Gateway {
    pub(crate) welcome: pb::Welcome,
    pub(crate) desired: pb::Desired,
    /// Number of actions in the last message.
    pub(crate) wish_count: usize,
    outgoing: Option<mpsc::Sender<pb::SynchronizeRequest>>,
    number: AtomicU64,
    incoming: Streaming<pb::SynchronizeResponse>,
}

fn actions(desired: &pb::Desired) -> usize {
    desired.leases.iter().filter(|lease| lease.action.is_some()).count()
}

impl Gateway {
    pub(crate) async fn connect(
        scheduler: &Running,
        registration: pb::Registration,
    ) -> Result<Self, Refusal> {
        let (outgoing, messages) = mpsc::channel(16);
        let opening = pb::SynchronizeRequest { message: Some(Said::Registration(registration)) };
        outgoing.send(opening).await.expect("room");
        let call = scheduler.workers().synchronize(ReceiverStream::new(messages)).await?;
        let mut incoming = call.into_inner();
        let Some(Told::Welcome(welcome)) = next(&mut incoming).await? else { panic!("no welcome") };
        let Some(Told::Desired(desired)) = next(&mut incoming).await? else { panic!("no desired") };
        let wish_count = actions(&desired);
        Ok(Self {
            welcome,
            desired,
            wish_count,
            outgoing: Some(outgoing),
            number: AtomicU64::new(0),
            incoming,
        })
    }

    /// Reports the leases. The report acknowledges the latest desired state.
    pub(crate) async fn observe(&self, leases: &[(&str, pb::LeasePhase)]) {
        let leases = leases.iter().map(|(id, phase)| pb::ObservedLease {
            lease_id: (*id).to_owned(),
            phase: (*phase).into(),
            inputs: Vec::new(),
        });
        assert!(self.observe_leases(leases.collect()).await, "the stream is open");
    }

    /// Reports no leases. The call has no effect when the stream has ended.
    pub(crate) async fn observe_nothing(&self) {
        self.observe_leases(vec![]).await;
    }

    /// Reports the progress of inputs.
    pub(crate) async fn observe_inputs(&self, lease: &str, inputs: Vec<pb::InputProgress>) {
        let phase = pb::LeasePhase::Materializing.into();
        let observed = vec![pb::ObservedLease { lease_id: lease.to_owned(), phase, inputs }];
        assert!(self.observe_leases(observed).await, "the stream is open");
    }

    /// Reports no leases and the number of containers and volumes.
    pub(crate) async fn observe_kept(&self, containers: u64, volumes: u64) {
        assert!(self.observe_all(vec![], containers, volumes, 5).await, "the stream is open");
    }

    /// Reports no leases and the free disk space.
    pub(crate) async fn observe_disk(&self, free_bytes: u64) {
        assert!(self.observe_all(vec![], 3, 4, free_bytes).await, "the stream is open");
    }

    /// Returns whether the stream is open.
    async fn observe_leases(&self, leases: Vec<pb::ObservedLease>) -> bool {
        self.observe_all(leases, 3, 4, 5).await
    }

    async fn observe_all(
        &self,
        leases: Vec<pb::ObservedLease>,
        containers: u64,
        volumes: u64,
        disk_free_bytes: u64,
    ) -> bool {
        let observed = pb::Observed {
            session_credential: self.welcome.session_credential.clone(),
            applied_generation: self.desired.generation,
            leases,
            containers,
            volumes,
            disk_free_bytes,
            number: self.number.fetch_add(1, Ordering::Relaxed) + 1,
        };
        let request = pb::SynchronizeRequest { message: Some(Said::Observed(observed)) };
        self.outgoing.as_ref().expect("the gateway is connected").send(request).await.is_ok()
    }

    /// Receives the next message.
    pub(crate) async fn next(&mut self) -> Result<(), Refusal> {
        match next(&mut self.incoming).await? {
            Some(Told::Desired(mut desired)) => {
                self.wish_count = actions(&desired);
                // A message without an action leaves the previous action unchanged.
                for lease in desired.leases.iter_mut().filter(|lease| lease.action.is_none()) {
                    let before = self.desired.leases.iter().find(|before| before.lease_id == lease.lease_id);
                    lease.action = before.and_then(|before| before.action.clone());
                }
                self.desired = desired;
            }
            other => panic!("unexpected: {other:?}"),
        }
        Ok(())
    }

    /// Waits until `pick` finds a lease in the desired state.
    pub(crate) async fn desires<T>(
        &mut self,
        what: &str,
        pick: impl Fn(&pb::DesiredLease) -> Option<T>,
    ) -> T {
        within(what, async {
            loop {
                if let Some(found) = self.desired.leases.iter().find_map(&pick) {
                    return found;
                }
                self.next().await.expect("the stream is open");
            }
        })
        .await
    }

    /// Waits until the desired state contains a run of `workload`.
    pub(crate) async fn run(&mut self, workload: WorkloadId) -> (String, pb::RunAttempt) {
        self.desires("a run of the workload", |lease| match &lease.action {
            Some(pb::desired_lease::Action::Run(run)) if run.workload_id == workload.to_string() => {
                Some((lease.lease_id.clone(), run.clone()))
            }
            _ => None,
        })
        .await
    }

    /// Waits until the desired state contains a run of `workload`, and reports no leases before
    /// each message.
    pub(crate) async fn run_while_reporting(&mut self, workload: WorkloadId) -> (String, pb::RunAttempt) {
        within("a run of the workload", async {
            loop {
                self.observe(&[]).await;
                self.next().await.expect("the stream is open");
                let runs = self.desired.leases.iter().find_map(|lease| match &lease.action {
                    Some(pb::desired_lease::Action::Run(run)) if run.workload_id == workload.to_string() => {
                        Some((lease.lease_id.clone(), run.clone()))
                    }
                    _ => None,
                });
                if let Some(runs) = runs {
                    return runs;
                }
            }
        })
        .await
    }

    /// Waits until the desired state contains any run.
    pub(crate) async fn run_any(&mut self) -> (String, pb::RunAttempt) {
        self.desires("a run", |lease| match &lease.action {
            Some(pb::desired_lease::Action::Run(run)) => Some((lease.lease_id.clone(), run.clone())),
            _ => None,
        })
        .await
    }

    /// Waits until the desired state contains a run of a workload that is not in `others`.
    pub(crate) async fn run_other_than(&mut self, others: &HashSet<String>) -> pb::RunAttempt {
        self.desires("a run of another workload", |lease| match &lease.action {
            Some(pb::desired_lease::Action::Run(run)) if !others.contains(&run.workload_id) => {
                Some(run.clone())
            }
            _ => None,
        })
        .await
    }

    /// Waits until the desired state contains a stop of `workload`.
    pub(crate) async fn stop(&mut self, workload: WorkloadId) -> (String, pb::StopAttempt) {
        self.desires("a stop of the workload", |lease| match &lease.action {
            Some(pb::desired_lease::Action::Stop(stop)) if stop.workload_id == workload.to_string() => {
                Some((lease.lease_id.clone(), stop.clone()))
            }
            _ => None,
        })
        .await
    }

    /// Waits until the desired state contains no lease.
    pub(crate) async fn wait_until_idle(&mut self) {
        within("no lease is left", async {
            while !self.desired.leases.is_empty() {
                self.next().await.expect("the stream is open");
            }
        })
        .await;
    }

    /// Closes the gateway's side of the stream and waits for the end of the other side.
    pub(crate) async fn leave(mut self) {
        self.outgoing = None;
        within("the stream ends", async { while let Ok(Some(_)) = self.incoming.message().await {} }).await;
    }
}

async fn next(incoming: &mut Streaming<pb::SynchronizeResponse>) -> Result<Option<Told>, Refusal> {
    Ok(within("the next message", incoming.message()).await?.and_then(|message| message.message))
}

/// Calls `StartAttempt`.
pub(crate) async fn start(scheduler: &Running, token: &str) -> Result<(), Refusal> {
    let request = pb::StartAttemptRequest { lease_token: token.to_owned() };
    scheduler.workloads().start_attempt(request).await?;
    Ok(())
}

/// Calls `FinishAttempt` with an exit code.
pub(crate) async fn finish(scheduler: &Running, token: &str, code: u32) -> Result<(), Refusal> {
    let request = pb::FinishAttemptRequest {
        lease_token: token.to_owned(),
        exit: Some(pb::Exit { status: Some(pb::exit::Status::Code(code)) }),
        ..pb::FinishAttemptRequest::default()
    };
    scheduler.workloads().finish_attempt(request).await?;
    Ok(())
}
