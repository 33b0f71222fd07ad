//! Benchmark of callers: steps in driven containers beside submitted workloads, and many attached
//! processes. Prints lines of JSON for `make bench`.
//!
//! ```text
//! driving SCHEDULER GATEWAY steps [--steps 200] [--at-once 16] [--rounds 3]
//! driving SCHEDULER GATEWAY attached [--containers 10] [--each 100]
//! ```
//!
//! `GANTRY_TOKEN_FILE` contains the path of the token. The cluster must have one host worker, whose
//! gateway is at `GATEWAY`.
//!
//! - `steps` alternates rounds of submitted workloads and of driven steps, which run the same
//!   command with the same output. `submitted` and `driven` are the steps per second of each round.
//!   The other lists contain the milliseconds of each call of each driven step.
//! - `attached` starts further processes with terminals, each attached by a connection of its own.
//!   It prints a line when the containers run, when all are attached, and when all have ended, and
//!   continues after a line of standard input. `started` contains the milliseconds until each
//!   program runs. `keys` are those of a byte and its echo in each terminal while all are attached.

use std::collections::BTreeMap;
use std::io::Write;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use clap::{Parser, Subcommand};
use domain::{LeaseId, ProcessId, WorkloadId};
use rpc::Peer;
use rpc::client::{Outgoing, peer};
use rpc::pb::runtime as pb;
use rpc::pb::runtime::attach_request::Message as Request;
use rpc::pb::runtime::attach_response::Message as Response;
use rpc::pb::runtime::containers_client::ContainersClient;
use rpc::pb::scheduler as scheduler_pb;
use rpc::pb::scheduler::placements_client::PlacementsClient;
use rpc::pb::scheduler::watch_response::Event;
use rpc::pb::scheduler::workloads_client::WorkloadsClient;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;

const TEAM: &str = "main";

/// Sends each byte back.
const ECHO: &str = "stty raw -echo; echo ready; exec cat";

#[derive(Debug, Clone, Parser)]
struct Arguments {
    /// Address of the scheduler
    scheduler: String,
    /// Address of the gateway of the only worker
    gateway: String,
    #[arg(long, env = "GANTRY_TOKEN_FILE")]
    token_file: std::path::PathBuf,
    #[command(subcommand)]
    measurement: Measurement,
}

#[derive(Debug, Clone, Subcommand)]
enum Measurement {
    /// Compare driven steps with submitted workloads
    Steps {
        /// Number of steps in a round
        #[arg(long, default_value_t = 200)]
        steps: usize,
        /// Number of steps at a time
        #[arg(long, default_value_t = 16)]
        at_once: usize,
        /// Number of rounds of each kind
        #[arg(long, default_value_t = 3)]
        rounds: usize,
    },
    /// Attach to many processes
    Attached {
        /// Number of containers
        #[arg(long, default_value_t = 10)]
        containers: usize,
        /// Number of processes in each container
        #[arg(long, default_value_t = 100)]
        each: usize,
    },
}

fn main() -> ExitCode {
    match run(Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

#[tokio::main]
async fn run(arguments: Arguments) -> anyhow::Result<()> {
    let token = std::fs::read_to_string(&arguments.token_file).context("cannot read the token")?;
    let outgoing = Outgoing::internal().with_token(Some(token.trim()));
    let scheduler = peer(&arguments.scheduler, outgoing.clone())?;
    let services = Services {
        workloads: WorkloadsClient::new(scheduler.clone()),
        placements: PlacementsClient::new(scheduler),
        containers: ContainersClient::new(peer(&arguments.gateway, outgoing.clone())?),
        gateway: arguments.gateway,
        outgoing,
    };
    match arguments.measurement {
        Measurement::Steps { steps, at_once, rounds } => services.compare(steps, at_once, rounds).await,
        Measurement::Attached { containers, each } => services.attach_many(containers, each).await,
    }
}

/// Clients of the services. Clones share the connections.
#[derive(Clone)]
struct Services {
    workloads: WorkloadsClient<Peer>,
    placements: PlacementsClient<Peer>,
    containers: ContainersClient<Peer>,
    gateway: String,
    outgoing: Outgoing,
}

/// Milliseconds of each call of a driven step.
type Calls = Vec<(&'static str, f64)>;

impl Services {
    async fn compare(&self, steps: usize, at_once: usize, rounds: usize) -> anyhow::Result<()> {
        let mut figures = BTreeMap::<&str, Vec<f64>>::new();
        // The first steps are slower.
        self.submitted_round(at_once, at_once).await?;
        self.driven_round(at_once, at_once).await?;
        for _ in 0..rounds {
            self.wait_until_empty().await?;
            figures.entry("submitted").or_default().push(self.submitted_round(steps, at_once).await?);
            self.wait_until_empty().await?;
            let (rate, calls) = self.driven_round(steps, at_once).await?;
            figures.entry("driven").or_default().push(rate);
            for (call, milliseconds) in calls {
                figures.entry(call).or_default().push(milliseconds);
            }
        }
        print(&figures)
    }

    /// Waits until the containers of earlier steps are deleted, so that rounds do not pay for each
    /// other.
    async fn wait_until_empty(&self) -> anyhow::Result<()> {
        let until = Instant::now() + Duration::from_secs(60);
        loop {
            let request = pb::ListContainersRequest { team: TEAM.to_owned(), ..Default::default() };
            let left = self.containers.clone().list_containers(request).await?.into_inner().containers.len();
            if left == 0 {
                return Ok(());
            }
            ensure!(Instant::now() < until, "{left} containers are not deleted");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    async fn submitted_round(&self, steps: usize, at_once: usize) -> anyhow::Result<f64> {
        let begin = Instant::now();
        let step = |services: Self| async move { services.submit().await };
        concurrently(steps, at_once, || step(self.clone())).await?;
        Ok(steps as f64 / begin.elapsed().as_secs_f64())
    }

    async fn driven_round(&self, steps: usize, at_once: usize) -> anyhow::Result<(f64, Calls)> {
        let begin = Instant::now();
        let step = |services: Self| async move { services.drive().await };
        let calls = concurrently(steps, at_once, || step(self.clone())).await?;
        Ok((steps as f64 / begin.elapsed().as_secs_f64(), calls.concat()))
    }

    /// Runs a step as a workload.
    async fn submit(mut self) -> anyhow::Result<()> {
        let mut events =
            self.submit_command(&WorkloadId::new().to_string(), step_command(), vec![output()]).await?;
        while let Some(message) = events.message().await? {
            if let Some(Event::Finished(finished)) = message.event {
                let is_success = finished.outcome() == scheduler_pb::Outcome::Succeeded;
                ensure!(is_success, "a workload failed: {finished:?}");
                return Ok(());
            }
        }
        bail!("the stream of events was cut")
    }

    async fn submit_command(
        &mut self,
        workload_id: &str,
        command: Vec<bytes::Bytes>,
        outputs: Vec<scheduler_pb::Output>,
    ) -> anyhow::Result<Streaming<scheduler_pb::WatchResponse>> {
        let workload_id = workload_id.to_owned();
        let spec = scheduler_pb::WorkloadSpec {
            team: TEAM.to_owned(),
            kind: scheduler_pb::WorkloadKind::Task.into(),
            image: Some(host_image()),
            command,
            outputs,
            stdin: scheduler_pb::StdinMode::None.into(),
            output: scheduler_pb::OutputMode::Spooled.into(),
            privilege: scheduler_pb::Privilege::Confined.into(),
            network: scheduler_pb::Network::Private.into(),
            ..Default::default()
        };
        let request = scheduler_pb::SubmitRequest { workload_id: workload_id.clone(), spec: Some(spec) };
        self.workloads.submit(request).await?;
        let request = scheduler_pb::WatchRequest { team: TEAM.to_owned(), workload_id, after_revision: 0 };
        Ok(self.workloads.watch(request).await?.into_inner())
    }

    /// Runs a step in a driven container.
    async fn drive(mut self) -> anyhow::Result<Calls> {
        let mut calls = Calls::new();
        let mut begin = Instant::now();
        let mut end_call = |name| {
            let now = Instant::now();
            calls.push((name, milliseconds(now - begin)));
            begin = now;
        };
        let request = scheduler_pb::PlaceRequest {
            lease_id: LeaseId::new().to_string(),
            team: TEAM.to_owned(),
            kind: scheduler_pb::PlacementKind::Task.into(),
            process: Some(scheduler_pb::ProcessRequirements {
                image_kind: "host".to_owned(),
                ..Default::default()
            }),
            wait: Some(rpc::duration(Duration::from_secs(60))),
            ..Default::default()
        };
        let placed = self.placements.place(request).await?.into_inner();
        end_call("Place");
        let container_id = self.create(&placed.lease_token).await?;
        end_call("CreateContainer");
        let start = pb::StartProcess {
            team: TEAM.to_owned(),
            worker_id: placed.worker_id,
            process_id: container_id.clone(),
            container_id: container_id.clone(),
            spec: Some(pb::ProcessSpec { command: step_command(), ..Default::default() }),
            lease_token: placed.lease_token.clone(),
            idle_timeout: None,
        };
        Terminal::start(self.containers.clone(), start).await?.end().await?;
        end_call("Attach");
        let published = self.publish(&placed.lease_token, container_id).await?;
        end_call("Publish");
        let artifact = scheduler_pb::SettledArtifact {
            artifact_id: published.artifact_id,
            digest: published.digest,
            label: "out".to_owned(),
            ..Default::default()
        };
        let settlement = scheduler_pb::Settlement {
            artifacts: vec![artifact],
            build_id: String::new(),
            status: scheduler_pb::Outcome::Succeeded.into(),
        };
        let request =
            scheduler_pb::ReleaseRequest { lease_token: placed.lease_token, settlement: Some(settlement) };
        self.placements.release(request).await?;
        end_call("Release");
        Ok(calls)
    }

    /// Creates a container, and returns its id.
    async fn create(&mut self, lease_token: &str) -> anyhow::Result<String> {
        let spec = pb::ContainerSpec {
            image: Some(host_image()),
            outputs: vec![output()],
            privilege: scheduler_pb::Privilege::Confined.into(),
            network: scheduler_pb::Network::Private.into(),
            ..Default::default()
        };
        let request = pb::CreateContainerRequest {
            lease_token: lease_token.to_owned(),
            key: "step".to_owned(),
            spec: Some(spec),
            labels: BTreeMap::new(),
        };
        let mut responses = self.containers.create_container(request).await?.into_inner();
        while let Some(response) = responses.message().await? {
            if let Some(pb::create_container_response::Message::Created(created)) = response.message {
                return Ok(created.container_id);
            }
        }
        bail!("the stream of the creation was cut")
    }

    async fn publish(&mut self, lease_token: &str, container_id: String) -> anyhow::Result<pb::Published> {
        let request = pb::PublishRequest {
            lease_token: lease_token.to_owned(),
            container_id,
            source: Some(pb::publish_request::Source::Output("out".to_owned())),
        };
        let mut responses = self.containers.publish(request).await?.into_inner();
        while let Some(response) = responses.message().await? {
            if let Some(pb::publish_response::Message::Published(published)) = response.message {
                return Ok(published);
            }
        }
        bail!("the stream of the publication was cut")
    }

    async fn attach_many(&self, containers: usize, each: usize) -> anyhow::Result<()> {
        let mut running = Vec::new();
        for _ in 0..containers {
            running.push(self.clone().start_container().await?);
        }
        let locations: Vec<_> = running.iter().map(|container| container.location.clone()).collect();
        let result = self.attach_to(&locations, each).await;
        // Processes outlive a cluster that ends without warning.
        for container in running {
            self.clone().end_container(container).await?;
        }
        result
    }

    async fn attach_to(
        &self,
        containers: &[scheduler_pb::AttemptLocation],
        each: usize,
    ) -> anyhow::Result<()> {
        pause_after(&BTreeMap::new())?;
        let mut next = containers.iter().cycle();
        let attached = concurrently(containers.len() * each, 16, || {
            self.clone().open_terminal(next.next().cloned().unwrap_or_default())
        });
        let (started, mut terminals): (Vec<_>, Vec<_>) = attached.await?.into_iter().unzip();
        let mut keys = Vec::new();
        for terminal in &mut terminals {
            keys.push(terminal.type_key().await?);
        }
        pause_after(&BTreeMap::from([("started", started), ("keys", keys)]))?;
        for terminal in &terminals {
            terminal.say(Request::Signal(pb::Signal { number: 15 })).await?;
        }
        for terminal in terminals {
            terminal.end().await?;
        }
        pause_after(&BTreeMap::new())
    }

    /// Submits a workload, and waits until it runs.
    async fn start_container(mut self) -> anyhow::Result<Container> {
        let workload_id = WorkloadId::new().to_string();
        let command = ["sleep", "1000"].map(|word| word.as_bytes().into()).to_vec();
        let mut events = self.submit_command(&workload_id, command, vec![]).await?;
        while let Some(message) = events.message().await? {
            match message.event {
                Some(Event::Running(running)) => {
                    let location = running.location.context("a workload has no location")?;
                    return Ok(Container { workload_id, location, events });
                }
                Some(Event::Finished(finished)) => bail!("a workload failed: {finished:?}"),
                _ => {}
            }
        }
        bail!("the stream of events was cut")
    }

    async fn end_container(mut self, mut container: Container) -> anyhow::Result<()> {
        let workload_id = container.workload_id;
        self.workloads
            .cancel(scheduler_pb::CancelRequest { team: TEAM.to_owned(), workload_id, ..Default::default() })
            .await?;
        while container.events.message().await?.is_some() {}
        Ok(())
    }

    /// Starts a program with a terminal in a container, over a new connection. Returns the
    /// milliseconds until it runs.
    async fn open_terminal(
        self,
        container: scheduler_pb::AttemptLocation,
    ) -> anyhow::Result<(f64, Terminal)> {
        let begin = Instant::now();
        let start = pb::StartProcess {
            team: TEAM.to_owned(),
            worker_id: container.worker_id,
            container_id: container.attempt_id,
            process_id: ProcessId::new().to_string(),
            spec: Some(pb::ProcessSpec {
                command: ["sh", "-c", ECHO].map(|word| word.as_bytes().into()).to_vec(),
                terminal: Some(scheduler_pb::Terminal { columns: 80, rows: 24 }),
                ..Default::default()
            }),
            lease_token: String::new(),
            idle_timeout: None,
        };
        let connection = ContainersClient::new(peer(&self.gateway, self.outgoing)?);
        let mut terminal = Terminal::start(connection, start).await?;
        while !terminal.output.ends_with(b"ready\n") {
            ensure!(terminal.hear().await?, "a program has ended: {:?}", terminal.exited);
        }
        Ok((milliseconds(begin.elapsed()), terminal))
    }
}

/// Running workload, in whose container further processes start.
struct Container {
    workload_id: String,
    location: scheduler_pb::AttemptLocation,
    events: Streaming<scheduler_pb::WatchResponse>,
}

/// Process to which this program is attached.
struct Terminal {
    send: mpsc::Sender<pb::AttachRequest>,
    responses: Streaming<pb::AttachResponse>,
    written: u64,
    output: Vec<u8>,
    exited: Option<pb::Exited>,
}

impl Terminal {
    async fn start(mut client: ContainersClient<Peer>, start: pb::StartProcess) -> anyhow::Result<Self> {
        let (send, requests) = mpsc::channel(8);
        send.send(pb::AttachRequest { message: Some(Request::Start(start)) }).await?;
        let responses = client.attach(ReceiverStream::new(requests)).await?.into_inner();
        Ok(Self { send, responses, written: 0, output: Vec::new(), exited: None })
    }

    async fn say(&self, message: Request) -> anyhow::Result<()> {
        Ok(self.send.send(pb::AttachRequest { message: Some(message) }).await?)
    }

    /// Receives a message, and acknowledges output. Returns `false` after the last message.
    async fn hear(&mut self) -> anyhow::Result<bool> {
        let response = self.responses.message().await?.context("the stream of a process was cut")?;
        match response.message {
            Some(Response::Output(part)) if part.stream() == pb::Stream::Stdout => {
                self.output.extend(part.data);
                let stdout_offset = self.output.len() as u64;
                self.say(Request::Ack(pb::Ack { stdout_offset, stderr_offset: 0 })).await?;
            }
            Some(Response::Exited(exited)) => self.exited = Some(exited),
            Some(Response::Done(_)) => return Ok(false),
            _ => {}
        }
        Ok(true)
    }

    /// Sends a byte, and returns the milliseconds until its echo arrives.
    async fn type_key(&mut self) -> anyhow::Result<f64> {
        let (begin, heard) = (Instant::now(), self.output.len());
        self.say(Request::Stdin(pb::StdinData { offset: self.written, data: b"k".as_slice().into() }))
            .await?;
        self.written += 1;
        while self.output.len() == heard {
            ensure!(self.hear().await?, "a program has ended: {:?}", self.exited);
        }
        Ok(milliseconds(begin.elapsed()))
    }

    /// Waits for the end of the process, which must succeed or be ended by TERM.
    async fn end(mut self) -> anyhow::Result<()> {
        while self.hear().await? {}
        let status = self.exited.as_ref().and_then(|exited| exited.status);
        let is_expected =
            matches!(status, Some(pb::exited::Status::Code(0) | pb::exited::Status::Signal(15)));
        ensure!(is_expected, "a process failed: {:?}", self.exited);
        Ok(())
    }
}

/// Makes `count` futures and awaits them, `at_once` at a time.
async fn concurrently<T, F>(
    count: usize,
    at_once: usize,
    mut make: impl FnMut() -> F,
) -> anyhow::Result<Vec<T>>
where
    T: Send + 'static,
    F: Future<Output = anyhow::Result<T>> + Send + 'static,
{
    let room = Arc::new(tokio::sync::Semaphore::new(at_once));
    let mut running = JoinSet::new();
    for _ in 0..count {
        let permit = room.clone().acquire_owned().await?;
        let future = make();
        running.spawn(async move {
            let result = future.await;
            drop(permit);
            result
        });
    }
    running.join_all().await.into_iter().collect()
}

/// Command of a step, which writes its output.
fn step_command() -> Vec<bytes::Bytes> {
    ["sh", "-c", "echo result > out/file"].map(|word| word.as_bytes().into()).to_vec()
}

fn output() -> scheduler_pb::Output {
    scheduler_pb::Output { name: "out".to_owned(), ..Default::default() }
}

fn host_image() -> scheduler_pb::Image {
    scheduler_pb::Image {
        source: Some(scheduler_pb::image::Source::Host(scheduler_pb::HostImage {})),
        entrypoint: None,
    }
}

fn milliseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

fn print(figures: &BTreeMap<&str, Vec<f64>>) -> anyhow::Result<()> {
    Ok(writeln!(std::io::stdout(), "{}", serde_json::to_string(figures)?)?)
}

/// Prints figures, and waits for a line of standard input.
fn pause_after(figures: &BTreeMap<&str, Vec<f64>>) -> anyhow::Result<()> {
    print(figures)?;
    std::io::stdin().lines().next().context("standard input has ended")??;
    Ok(())
}
