//! Holder of a driven lease, for tests. It creates, starts and publishes containers.

use std::collections::BTreeMap;
use std::time::Duration;

use rpc::client::{Outgoing, peer};
use rpc::pb::runtime as pb;
use rpc::pb::runtime::attach_request::Message as Say;
use rpc::pb::runtime::attach_response::Message as Hear;
use rpc::pb::runtime::containers_client::ContainersClient;
use rpc::pb::scheduler as scheduler_pb;
use rpc::pb::scheduler::placements_client::PlacementsClient;
use rpc::{Peer, Reason, Refusal};

use crate::suite::Suite;

/// The team of all leases.
pub const TEAM: &str = "main";

/// The addresses of a cluster.
#[derive(Clone)]
pub struct Services {
    /// The address of the scheduler.
    pub scheduler: String,
    /// The proxy, if there is one.
    pub proxy: Option<String>,
    /// The token of callers, which a local cluster does not need.
    pub token: Option<&'static str>,
}

impl Services {
    /// The addresses of a suite.
    #[must_use]
    pub fn of(suite: &Suite) -> Self {
        let proxy = suite.names().into_iter().find(|name| name == "proxy-0");
        Self {
            scheduler: suite.address("scheduler-0").to_owned(),
            proxy: proxy.map(|name| suite.address(&name).to_owned()),
            token: Some(suite.token()),
        }
    }

    /// Connects to a service.
    #[must_use]
    pub fn connect(&self, address: &str) -> Peer {
        peer(address, Outgoing::internal().with_token(self.token)).expect("an address")
    }

    /// A client of the scheduler.
    #[must_use]
    pub fn placements(&self) -> PlacementsClient<Peer> {
        PlacementsClient::new(self.connect(&self.scheduler))
    }
}

/// The holder of one driven lease, which repeats each call until it is answered.
pub struct Holder {
    /// The cluster.
    pub services: Services,
    /// The id of the lease.
    pub lease: String,
    /// Whether processes have input.
    pub has_input: bool,
    /// The grant of the lease.
    pub placed: scheduler_pb::PlaceResponse,
}

/// A new id.
#[must_use]
pub fn uuid() -> String {
    domain::LeaseId::new().to_string()
}

/// Repeats `call` while the service does not answer, or a new gateway has no session yet.
pub async fn answered<T>(mut call: impl AsyncFnMut() -> Result<T, tonic::Status>) -> Result<T, Refusal> {
    loop {
        match call().await.map_err(Refusal::from) {
            Err(refusal) if refusal.is_transient() || refusal.is(Reason::NotAttended) => {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            result => return result,
        }
    }
}

impl Holder {
    /// Places a lease.
    pub async fn place(services: &Services, lease: &str, artifacts: &[&str]) -> Result<Self, Refusal> {
        Self::place_with(services, |request| {
            request.lease_id = lease.to_owned();
            request.artifact_ids = artifacts.iter().map(|&id| id.to_owned()).collect();
            // The image is one of the artifacts.
            let image_kind = if artifacts.len() > 1 { "artifact" } else { "host" }.to_owned();
            request.process = Some(scheduler_pb::ProcessRequirements { image_kind, ..Default::default() });
        })
        .await
    }

    /// Places a lease. `change` completes the request.
    pub async fn place_with(
        services: &Services,
        change: impl FnOnce(&mut scheduler_pb::PlaceRequest),
    ) -> Result<Self, Refusal> {
        let mut request = scheduler_pb::PlaceRequest {
            lease_id: uuid(),
            team: TEAM.to_owned(),
            kind: scheduler_pb::PlacementKind::Task.into(),
            wait: Some(rpc::duration(Duration::from_secs(60))),
            ..Default::default()
        };
        change(&mut request);
        let placed = answered(async || Ok(services.placements().place(request.clone()).await?.into_inner()));
        Ok(Self {
            services: services.clone(),
            lease: request.lease_id.clone(),
            has_input: true,
            placed: placed.await?,
        })
    }

    /// A client of the gateway, or of the proxy if there is one.
    #[must_use]
    pub fn containers(&self) -> ContainersClient<Peer> {
        let address = self.services.proxy.as_ref().unwrap_or(&self.placed.gateway_endpoint);
        ContainersClient::new(self.services.connect(address))
    }

    /// Creates a container, or finds it.
    pub async fn create(&self, key: &str, spec: pb::ContainerSpec) -> Result<pb::Container, Refusal> {
        let request = pb::CreateContainerRequest {
            lease_token: self.placed.lease_token.clone(),
            key: key.to_owned(),
            spec: Some(spec),
            labels: BTreeMap::from([("step".to_owned(), key.to_owned())]),
        };
        answered(async || {
            let mut answers = self.containers().create_container(request.clone()).await?.into_inner();
            loop {
                match answers.message().await?.and_then(|answer| answer.message) {
                    Some(pb::create_container_response::Message::Created(created)) => return Ok(created),
                    Some(pb::create_container_response::Message::Progress(_)) => {}
                    None => return Err(tonic::Status::unavailable("the stream was cut")),
                }
            }
        })
        .await
    }

    fn start_of(
        &self,
        container: &str,
        process: &str,
        command: &[&str],
        has_input: bool,
    ) -> pb::StartProcess {
        let is_main = process == container;
        pb::StartProcess {
            team: TEAM.to_owned(),
            worker_id: self.placed.worker_id.clone(),
            container_id: container.to_owned(),
            process_id: process.to_owned(),
            spec: Some(pb::ProcessSpec {
                command: command.iter().map(|&text| text.to_owned().into()).collect(),
                stdin: has_input,
                ..Default::default()
            }),
            lease_token: if is_main { self.placed.lease_token.clone() } else { String::new() },
            idle_timeout: None,
        }
    }

    /// Starts a process, or attaches to it, and sends its input. Returns its standard output and
    /// its exit code.
    pub async fn run(
        &self,
        container: &str,
        process: &str,
        command: &[&str],
        input: &'static [u8],
    ) -> Result<(Vec<u8>, u32), Refusal> {
        let (output, code) = self.attach(container, process, command, Some(input)).await?;
        Ok((output, code.expect("it has ended")))
    }

    /// Starts a process, or attaches to it. Returns after its first output, unless `input` is sent.
    pub async fn attach(
        &self,
        container: &str,
        process: &str,
        command: &[&str],
        input: Option<&'static [u8]>,
    ) -> Result<(Vec<u8>, Option<u32>), Refusal> {
        answered(async || {
            let (send, requests) = tokio::sync::mpsc::channel(8);
            let start = self.start_of(container, process, command, self.has_input);
            let say = async |message| _ = send.send(pb::AttachRequest { message: Some(message) }).await;
            say(Say::Start(start)).await;
            if let Some(input) = input.filter(|_| self.has_input) {
                say(Say::Stdin(pb::StdinData { offset: 0, data: input.into() })).await;
                say(Say::CloseStdin(pb::CloseStdin {})).await;
            }
            let stream = tokio_stream::wrappers::ReceiverStream::new(requests);
            let mut answers = self.containers().attach(stream).await?.into_inner();
            let (mut output, mut code) = (Vec::new(), None);
            while let Some(answer) = answers.message().await? {
                match answer.message {
                    Some(Hear::Output(part)) if part.stream == i32::from(pb::Stream::Stdout) => {
                        output.extend(part.data);
                        if input.is_none() {
                            return Ok((output, None));
                        }
                        let ack = pb::Ack { stdout_offset: output.len() as u64, stderr_offset: 0 };
                        say(Say::Ack(ack)).await;
                    }
                    Some(Hear::Exited(exited)) => match exited.status {
                        Some(pb::exited::Status::Code(exit)) => code = Some(exit),
                        other => panic!("{process}: {other:?} {} {}", exited.reason, exited.message),
                    },
                    Some(Hear::Done(_)) => return Ok((output, code)),
                    _ => {}
                }
            }
            Err(tonic::Status::unavailable("the stream was cut"))
        })
        .await
    }

    /// Publishes an output.
    pub async fn publish(&self, container: &str, output: &str) -> Result<pb::Published, Refusal> {
        self.publish_source(container, pb::publish_request::Source::Output(output.to_owned())).await
    }

    /// Publishes an output or a cache.
    pub async fn publish_source(
        &self,
        container: &str,
        source: pb::publish_request::Source,
    ) -> Result<pb::Published, Refusal> {
        let request = pb::PublishRequest {
            lease_token: self.placed.lease_token.clone(),
            container_id: container.to_owned(),
            source: Some(source),
        };
        answered(async || {
            let mut answers = self.containers().publish(request.clone()).await?.into_inner();
            loop {
                match answers.message().await?.and_then(|answer| answer.message) {
                    Some(pb::publish_response::Message::Published(published)) => return Ok(published),
                    Some(pb::publish_response::Message::Progress(_)) => {}
                    None => return Err(tonic::Status::unavailable("the stream was cut")),
                }
            }
        })
        .await
    }

    /// Ends the lease, and keeps these artifacts.
    pub async fn release(&self, keep: &[&pb::Published]) -> Result<(), Refusal> {
        self.release_to(keep, &[]).await
    }

    /// Ends the lease, and keeps these artifacts for these owners.
    pub async fn release_to(
        &self,
        keep: &[&pb::Published],
        owners: &[scheduler_pb::output_owner::Owner],
    ) -> Result<(), Refusal> {
        let artifacts = keep.iter().map(|published| scheduler_pb::SettledArtifact {
            artifact_id: published.artifact_id.clone(),
            digest: published.digest.clone(),
            label: "kept".to_owned(),
            owners: owners
                .iter()
                .map(|owner| scheduler_pb::OutputOwner { owner: Some(owner.clone()) })
                .collect(),
            ..Default::default()
        });
        let request = scheduler_pb::ReleaseRequest {
            lease_token: self.placed.lease_token.clone(),
            settlement: Some(scheduler_pb::Settlement {
                artifacts: artifacts.collect(),
                build_id: String::new(),
                status: scheduler_pb::Outcome::Succeeded.into(),
            }),
        };
        answered(async || self.services.placements().release(request.clone()).await).await?;
        Ok(())
    }

    /// Returns a container with its processes.
    pub async fn container(&self, container: &str) -> Result<pb::Container, Refusal> {
        let request = pb::GetContainerRequest {
            team: TEAM.to_owned(),
            container_id: container.to_owned(),
            worker_id: self.placed.worker_id.clone(),
        };
        let got = answered(async || Ok(self.containers().get_container(request.clone()).await?.into_inner()));
        Ok(got.await?.container.expect("a container"))
    }

    /// Starts the main process of a container without input, or finds it.
    pub async fn start(&self, container: &str, command: &[&str]) -> Result<(), Refusal> {
        let start = self.start_of(container, container, command, false);
        let request = pb::AttachRequest { message: Some(Say::Start(start)) };
        answered(async || {
            let requests = tokio_stream::once(request.clone());
            match self.containers().attach(requests).await?.into_inner().message().await? {
                Some(_) => Ok(()),
                None => Err(tonic::Status::unavailable("the stream was cut")),
            }
        })
        .await
    }

    /// Stops the processes of a container.
    pub async fn stop(&self, container: &str) -> Result<(), Refusal> {
        let request = pb::StopContainerRequest {
            lease_token: self.placed.lease_token.clone(),
            container_id: container.to_owned(),
            grace: None,
        };
        answered(async || self.containers().stop_container(request.clone()).await).await?;
        Ok(())
    }

    /// Marks a container as garbage.
    pub async fn destroy(&self, container: &str) -> Result<(), Refusal> {
        let request = pb::DestroyContainerRequest {
            lease_token: self.placed.lease_token.clone(),
            container_id: container.to_owned(),
        };
        answered(async || self.containers().destroy_container(request.clone()).await).await?;
        Ok(())
    }

    /// Ends the lease without a settlement.
    pub async fn let_go(&self) -> Result<(), Refusal> {
        let request =
            scheduler_pb::ReleaseRequest { lease_token: self.placed.lease_token.clone(), settlement: None };
        answered(async || self.services.placements().release(request.clone()).await).await?;
        Ok(())
    }

    /// Waits until the lease has ended.
    pub async fn ended(&self) {
        let request = scheduler_pb::GetLeaseRequest { team: TEAM.to_owned(), lease_id: self.lease.clone() };
        loop {
            let lease = answered(async || {
                Ok(self.services.placements().get_lease(request.clone()).await?.into_inner())
            });
            let lease = lease.await.expect("it is remembered").lease.expect("a lease");
            if lease.state() == scheduler_pb::LeaseState::Ended {
                return;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

/// A container that reads `src` and writes `out`, with this image or that of the worker.
#[must_use]
pub fn spec(input: &str, image: Option<&str>) -> pb::ContainerSpec {
    let source = match image {
        Some(image) => scheduler_pb::image::Source::ArtifactId(image.to_owned()),
        None => scheduler_pb::image::Source::Host(scheduler_pb::HostImage {}),
    };
    pb::ContainerSpec {
        image: Some(scheduler_pb::Image { source: Some(source), entrypoint: None }),
        inputs: vec![scheduler_pb::Input {
            name: "src".to_owned(),
            artifact_id: input.to_owned(),
            access: scheduler_pb::Access::ReadOnly.into(),
            ..Default::default()
        }],
        outputs: vec![scheduler_pb::Output { name: "out".to_owned(), ..Default::default() }],
        privilege: scheduler_pb::Privilege::Confined.into(),
        network: scheduler_pb::Network::Private.into(),
        ..Default::default()
    }
}

/// Runs `future` to its end.
pub fn block_on<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Runtime::new().expect("a runtime").block_on(future)
}
