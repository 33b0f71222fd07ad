//! A scheduler on a port of its own, and a gateway that says what a test wants said.

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

/// Long enough for anything that happens at all.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// A scheduler that a test can stop and start again.
pub(crate) struct Running {
    pub(crate) endpoint: String,
    stop: Option<oneshot::Sender<()>>,
    served: Option<JoinHandle<anyhow::Result<()>>>,
}

/// Settings under which little time passes. No artifact store answers.
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
        let endpoint = listener.endpoint().expect("its address");
        let (stop, stopped) = oneshot::channel();
        let served = tokio::spawn(scheduler::serve(config, listener, async move {
            stopped.await.ok();
        }));
        let running = Self { endpoint, stop: Some(stop), served: Some(served) };
        // The listener queues callers until it is served.
        running.answers().await;
        running
    }

    /// One that somebody else runs.
    pub(crate) async fn at(endpoint: String) -> Self {
        let running = Self { endpoint, stop: None, served: None };
        running.answers().await;
        running
    }

    async fn answers(&self) {
        let answers = async || self.workers().keys(pb::KeysRequest {}).await.ok().map(|_| ());
        until("the scheduler answers", answers).await;
    }

    pub(crate) async fn stop(mut self) {
        if let Some(stop) = self.stop.take() {
            stop.send(()).expect("the scheduler runs");
        }
        if let Some(served) = self.served.take() {
            served.await.expect("no panic").expect("it ends well");
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

    /// Everything that happens to a workload until it has finished.
    pub(crate) async fn watch(&self, id: WorkloadId, after_revision: u64) -> Vec<pb::WatchResponse> {
        self.watch_some(id, after_revision, usize::MAX).await
    }

    /// So many events, as soon as they have happened.
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

    /// The last event of a workload.
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

/// Fails the test when `future` takes too long.
pub(crate) async fn within<T>(what: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(PATIENCE, future).await {
        Ok(answer) => answer,
        Err(_) => panic!("waited in vain: {what}"),
    }
}

/// Asks until there is an answer.
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

/// A workload that runs `true` and needs nothing.
pub(crate) fn spec() -> pb::WorkloadSpec {
    pb::WorkloadSpec {
        team: "main".to_owned(),
        kind: pb::WorkloadKind::Task.into(),
        image: Some(pb::Image { source: Some(pb::image::Source::Host(pb::HostImage {})) }),
        command: vec![b"true".as_slice().into()],
        stdin: pb::StdinMode::None.into(),
        output: pb::OutputMode::Spooled.into(),
        privilege: pb::Privilege::Confined.into(),
        network: pb::Network::Private.into(),
        ..pb::WorkloadSpec::default()
    }
}

/// What a gateway says of itself and its worker.
pub(crate) fn hello(name: &str) -> pb::Hello {
    pb::Hello {
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
    }
}

/// A gateway that attends one worker.
pub(crate) struct Gateway {
    pub(crate) welcome: pb::Welcome,
    pub(crate) desired: pb::Desired,
    /// How many wishes the last message had.
    pub(crate) told_wishes: usize,
    said: Option<mpsc::Sender<pb::SynchronizeRequest>>,
    number: AtomicU64,
    told: Streaming<pb::SynchronizeResponse>,
}

fn wishes(desired: &pb::Desired) -> usize {
    desired.leases.iter().filter(|lease| lease.wish.is_some()).count()
}

impl Gateway {
    pub(crate) async fn connect(scheduler: &Running, hello: pb::Hello) -> Result<Self, Refusal> {
        let (said, messages) = mpsc::channel(16);
        let opening = pb::SynchronizeRequest { message: Some(Said::Hello(hello)) };
        said.send(opening).await.expect("room");
        let call = scheduler.workers().synchronize(ReceiverStream::new(messages)).await?;
        let mut told = call.into_inner();
        let Some(Told::Welcome(welcome)) = next(&mut told).await? else { panic!("no welcome") };
        let Some(Told::Desired(desired)) = next(&mut told).await? else { panic!("no desired") };
        let told_wishes = wishes(&desired);
        Ok(Self { welcome, desired, told_wishes, said: Some(said), number: AtomicU64::new(0), told })
    }

    /// Says what it knows, having taken up all that it was told.
    pub(crate) async fn observe(&self, leases: &[(&str, pb::LeasePhase)]) {
        let leases = leases.iter().map(|(id, phase)| pb::ObservedLease {
            lease_id: (*id).to_owned(),
            phase: (*phase).into(),
            inputs: Vec::new(),
        });
        assert!(self.observe_leases(leases.collect()).await, "the stream is open");
    }

    /// Says that it knows of no lease. Whoever does not listen any more hears nothing.
    pub(crate) async fn observe_nothing(&self) {
        self.observe_leases(vec![]).await;
    }

    /// Says that it brings inputs to the worker.
    pub(crate) async fn observe_inputs(&self, lease: &str, inputs: Vec<pb::InputProgress>) {
        let phase = pb::LeasePhase::Materializing.into();
        let observed = vec![pb::ObservedLease { lease_id: lease.to_owned(), phase, inputs }];
        assert!(self.observe_leases(observed).await, "the stream is open");
    }

    /// Says that it knows of no lease, and keeps this much.
    pub(crate) async fn observe_kept(&self, containers: u64, volumes: u64) {
        assert!(self.observe_all(vec![], containers, volumes).await, "the stream is open");
    }

    /// Whether the stream is open.
    async fn observe_leases(&self, leases: Vec<pb::ObservedLease>) -> bool {
        self.observe_all(leases, 3, 4).await
    }

    async fn observe_all(&self, leases: Vec<pb::ObservedLease>, containers: u64, volumes: u64) -> bool {
        let observed = pb::Observed {
            session_credential: self.welcome.session_credential.clone(),
            applied_generation: self.desired.generation,
            leases,
            containers,
            volumes,
            disk_free_bytes: 5,
            number: self.number.fetch_add(1, Ordering::Relaxed) + 1,
        };
        let request = pb::SynchronizeRequest { message: Some(Said::Observed(observed)) };
        self.said.as_ref().expect("it has not left").send(request).await.is_ok()
    }

    /// The next message.
    pub(crate) async fn next(&mut self) -> Result<(), Refusal> {
        match next(&mut self.told).await? {
            Some(Told::Desired(mut desired)) => {
                self.told_wishes = wishes(&desired);
                // What is said once stays said.
                for lease in desired.leases.iter_mut().filter(|lease| lease.wish.is_none()) {
                    let before = self.desired.leases.iter().find(|before| before.lease_id == lease.lease_id);
                    lease.wish = before.and_then(|before| before.wish.clone());
                }
                self.desired = desired;
            }
            other => panic!("unexpected: {other:?}"),
        }
        Ok(())
    }

    /// Waits until what it shall do has what `pick` looks for.
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

    /// Waits until it shall run `workload`.
    pub(crate) async fn run(&mut self, workload: WorkloadId) -> (String, pb::RunAttempt) {
        self.desires("to run it", |lease| match &lease.wish {
            Some(pb::desired_lease::Wish::Run(run)) if run.workload_id == workload.to_string() => {
                Some((lease.lease_id.clone(), run.clone()))
            }
            _ => None,
        })
        .await
    }

    /// The same, while it says again and again that it knows of no lease.
    pub(crate) async fn run_speaking(&mut self, workload: WorkloadId) -> (String, pb::RunAttempt) {
        within("to run it", async {
            loop {
                self.observe(&[]).await;
                self.next().await.expect("the stream is open");
                let runs = self.desired.leases.iter().find_map(|lease| match &lease.wish {
                    Some(pb::desired_lease::Wish::Run(run)) if run.workload_id == workload.to_string() => {
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

    /// Waits until it shall run something.
    pub(crate) async fn run_any(&mut self) -> (String, pb::RunAttempt) {
        self.desires("to run something", |lease| match &lease.wish {
            Some(pb::desired_lease::Wish::Run(run)) => Some((lease.lease_id.clone(), run.clone())),
            _ => None,
        })
        .await
    }

    /// Waits until it shall run a workload that is none of `others`.
    pub(crate) async fn run_other_than(&mut self, others: &HashSet<String>) -> pb::RunAttempt {
        self.desires("to run another", |lease| match &lease.wish {
            Some(pb::desired_lease::Wish::Run(run)) if !others.contains(&run.workload_id) => {
                Some(run.clone())
            }
            _ => None,
        })
        .await
    }

    /// Waits until it shall stop `workload`.
    pub(crate) async fn stop(&mut self, workload: WorkloadId) -> (String, pb::StopAttempt) {
        self.desires("to stop it", |lease| match &lease.wish {
            Some(pb::desired_lease::Wish::Stop(stop)) if stop.workload_id == workload.to_string() => {
                Some((lease.lease_id.clone(), stop.clone()))
            }
            _ => None,
        })
        .await
    }

    /// Waits until it holds no lease.
    pub(crate) async fn holds_nothing(&mut self) {
        within("no lease is left", async {
            while !self.desired.leases.is_empty() {
                self.next().await.expect("the stream is open");
            }
        })
        .await;
    }

    /// Ends its side of the stream and waits for the end of the other.
    pub(crate) async fn leave(mut self) {
        self.said = None;
        within("the stream ends", async { while let Ok(Some(_)) = self.told.message().await {} }).await;
    }
}

async fn next(told: &mut Streaming<pb::SynchronizeResponse>) -> Result<Option<Told>, Refusal> {
    Ok(within("the next message", told.message()).await?.and_then(|message| message.message))
}

/// Says that an attempt starts.
pub(crate) async fn start(scheduler: &Running, token: &str) -> Result<(), Refusal> {
    let request = pb::StartAttemptRequest { lease_token: token.to_owned() };
    scheduler.workloads().start_attempt(request).await?;
    Ok(())
}

/// Says that an attempt has ended.
pub(crate) async fn finish(scheduler: &Running, token: &str, code: u32) -> Result<(), Refusal> {
    let request = pb::FinishAttemptRequest {
        lease_token: token.to_owned(),
        exit: Some(pb::Exit { how: Some(pb::exit::How::Code(code)) }),
        ..pb::FinishAttemptRequest::default()
    };
    scheduler.workloads().finish_attempt(request).await?;
    Ok(())
}
