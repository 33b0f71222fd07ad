//! Containers that the holder of a driven lease creates, starts and publishes.

use std::collections::BTreeMap;
use std::fs;
use std::time::Duration;

use integration_tests::concourse::{ConcourseWorker, make_image};
use integration_tests::suite::{SHORT_TERMS, Shape, Suite};
use integration_tests::{may_run_containers, wait_for};
use rpc::client::{Outgoing, peer};
use rpc::pb::artifacts::FindOrCreateTaskCacheRequest;
use rpc::pb::artifacts::caches_client::CachesClient;
use rpc::pb::runtime as pb;
use rpc::pb::runtime::attach_request::Message as Say;
use rpc::pb::runtime::attach_response::Message as Hear;
use rpc::pb::runtime::containers_client::ContainersClient;
use rpc::pb::scheduler as scheduler_pb;
use rpc::pb::scheduler::placements_client::PlacementsClient;
use rpc::{Peer, Reason, Refusal};
use testing::baggageclaim::Driver;
use testing::garden::Manner;

const TEAM: &str = "main";

/// The addresses of a cluster.
#[derive(Clone)]
struct Services {
    scheduler: String,
    /// The proxy, if there is one.
    proxy: Option<String>,
    token: &'static str,
}

impl Services {
    fn of(suite: &Suite) -> Self {
        let proxy = suite.names().into_iter().find(|name| name == "proxy-0");
        Self {
            scheduler: suite.address("scheduler-0").to_owned(),
            proxy: proxy.map(|name| suite.address(&name).to_owned()),
            token: suite.token(),
        }
    }

    fn connect(&self, address: &str) -> Peer {
        peer(address, Outgoing::internal().with_token(Some(self.token))).expect("an address")
    }

    fn placements(&self) -> PlacementsClient<Peer> {
        PlacementsClient::new(self.connect(&self.scheduler))
    }
}

/// The holder of one driven lease, which repeats each call until it is answered.
struct Holder {
    services: Services,
    lease: String,
    /// Whether processes have input.
    has_input: bool,
    placed: scheduler_pb::PlaceResponse,
}

/// A new id.
fn uuid() -> String {
    domain::LeaseId::new().to_string()
}

/// Repeats `call` while the service does not answer, or a new gateway has no session yet.
async fn answered<T>(mut call: impl AsyncFnMut() -> Result<T, tonic::Status>) -> Result<T, Refusal> {
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
    async fn place(services: &Services, lease: &str, artifacts: &[&str]) -> Result<Self, Refusal> {
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
    async fn place_with(
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
    fn containers(&self) -> ContainersClient<Peer> {
        let address = self.services.proxy.as_ref().unwrap_or(&self.placed.gateway_endpoint);
        ContainersClient::new(self.services.connect(address))
    }

    async fn create(&self, key: &str, spec: pb::ContainerSpec) -> Result<pb::Container, Refusal> {
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

    /// Starts a process, or attaches to it, and sends its input. Returns its standard output and
    /// its exit code.
    async fn run(
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
    async fn attach(
        &self,
        container: &str,
        process: &str,
        command: &[&str],
        input: Option<&'static [u8]>,
    ) -> Result<(Vec<u8>, Option<u32>), Refusal> {
        answered(async || {
            let (send, requests) = tokio::sync::mpsc::channel(8);
            let is_main = process == container;
            let start = pb::StartProcess {
                team: TEAM.to_owned(),
                worker_id: self.placed.worker_id.clone(),
                container_id: container.to_owned(),
                process_id: process.to_owned(),
                spec: Some(pb::ProcessSpec {
                    command: command.iter().map(|&text| text.to_owned().into()).collect(),
                    stdin: self.has_input,
                    ..Default::default()
                }),
                lease_token: if is_main { self.placed.lease_token.clone() } else { String::new() },
                ..Default::default()
            };
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

    async fn publish(&self, container: &str, output: &str) -> Result<pb::Published, Refusal> {
        self.publish_source(container, pb::publish_request::Source::Output(output.to_owned())).await
    }

    async fn publish_source(
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
    async fn release(&self, keep: &[&pb::Published]) -> Result<(), Refusal> {
        self.release_to(keep, &[]).await
    }

    /// Ends the lease, and keeps these artifacts for these owners.
    async fn release_to(
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

    async fn container(&self, container: &str) -> Result<pb::Container, Refusal> {
        let request = pb::GetContainerRequest {
            team: TEAM.to_owned(),
            container_id: container.to_owned(),
            worker_id: self.placed.worker_id.clone(),
        };
        let got = answered(async || Ok(self.containers().get_container(request.clone()).await?.into_inner()));
        Ok(got.await?.container.expect("a container"))
    }

    /// Waits until the lease has ended.
    async fn ended(&self) {
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
fn spec(input: &str, image: Option<&str>) -> pb::ContainerSpec {
    let source = match image {
        Some(image) => scheduler_pb::image::Source::ArtifactId(image.to_owned()),
        None => scheduler_pb::image::Source::Host(scheduler_pb::HostImage {}),
    };
    pb::ContainerSpec {
        image: Some(scheduler_pb::Image { source: Some(source) }),
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

/// Uploads a directory with one file.
fn uploaded(suite: &Suite) -> String {
    let source = suite.path("source");
    fs::create_dir_all(&source).expect("made");
    fs::write(source.join("file"), "bytes\n").expect("written");
    suite.upload(&source)
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Runtime::new().expect("a runtime").block_on(future)
}

const SCRIPT: &str = "cat src/file - > out/file; echo ran; exit 3";

#[test]
fn holder_creates_starts_publishes_and_keeps() {
    if may_run_containers() {
        let suite = Suite::start(Shape::ONE, SHORT_TERMS);
        create_start_publish_keep(&suite, None);
    }
}

#[test]
fn holder_reaches_worker_through_proxy() {
    if may_run_containers() {
        // The gateway rejects the token of the holder.
        let suite = Suite::start_walled(Shape { proxies: 1, ..Shape::ONE }, SHORT_TERMS);
        suite.attended("worker-0", "runtime-gateway-0");
        create_start_publish_keep(&suite, None);
    }
}

/// Adds a Concourse worker, and returns the image of its containers.
fn on_concourse_worker(suite: &mut Suite, manner: Manner) -> (ConcourseWorker, String) {
    let servers = ConcourseWorker::start(manner, Driver::Overlay);
    let (garden, volumes) = (servers.garden_address(), servers.volumes_address());
    let settings = [("GANTRY_GARDEN", &*garden), ("GANTRY_BAGGAGECLAIM", &*volumes)];
    suite.attend("runtime-gateway-0", "concourse", &settings);
    suite.attended("concourse", "runtime-gateway-0");
    let image = suite.path("image");
    make_image(&image);
    let image = suite.upload(&image);
    (servers, image)
}

#[test]
fn holder_drives_containers_of_concourse_worker() {
    if may_run_containers() {
        for manner in [Manner::Containerd, Manner::Guardian] {
            let mut suite = Suite::start(Shape::NO_WORKER, SHORT_TERMS);
            let (_servers, image) = on_concourse_worker(&mut suite, manner);
            create_start_publish_keep(&suite, Some(&image));
        }
    }
}

/// Performs all steps of a holder, with this image or that of the worker.
fn create_start_publish_keep(suite: &Suite, image: Option<&str>) {
    let input = uploaded(suite);
    let spec = |input: &str| spec(input, image);
    let artifacts: Vec<_> = image.into_iter().chain([&*input]).collect();
    block_on(async {
        let holder = Holder::place(&Services::of(suite), &uuid(), &artifacts).await.expect("placed");
        let created = holder.create("task", spec(&input)).await.expect("created");
        let id = created.container_id.clone();
        assert!(created.processes.is_empty() && created.key == "task", "{created:?}");
        let again = holder.create("task", spec(&input)).await.expect("the same");
        assert_eq!(again, created);
        let other = pb::ContainerSpec { user: "1000".to_owned(), ..spec(&input) };
        let refused = holder.create("task", other).await.expect_err("another spec");
        assert!(refused.is(Reason::ContainerExists), "{refused}");

        // Nothing can join the container yet.
        let refused = holder.run(&id, &uuid(), &["true"], b"").await.expect_err("nothing runs");
        assert!(refused.is(Reason::ContainerNotRunning), "{refused}");
        let command = ["sh", "-c", SCRIPT];
        for _ in 0..2 {
            // The second call attaches to the process that has ended.
            let ran = holder.run(&id, &id, &command, b"input\n").await.expect("it runs");
            assert_eq!(ran, (b"ran\n".to_vec(), 3));
        }
        let seen = holder.container(&id).await.expect("it exists");
        let [main] = &seen.processes[..] else { panic!("{seen:?}") };
        let code = main.exited.as_ref().and_then(|exited| exited.status);
        assert_eq!((main.main, main.state()), (true, pb::ProcessState::Ended));
        assert_eq!(code, Some(pb::exited::Status::Code(3)));

        // After the end, another process sees what the first one left. Garden cannot do that.
        if image.is_none() {
            let looked = holder.run(&id, &uuid(), &["cat", "out/file"], b"").await.expect("it runs");
            assert_eq!(looked, (b"bytes\ninput\n".to_vec(), 0));
        }
        let published = holder.publish(&id, "out").await.expect("published");
        assert_eq!((published.size_bytes, published.entries), (12, 1));
        assert_eq!(holder.publish(&id, "out").await.expect("the same"), published);
        let refused = holder.publish(&id, "none").await.expect_err("no such output");
        assert!(refused.is(Reason::InvalidField), "{refused}");

        let list = pb::ListContainersRequest {
            team: TEAM.to_owned(),
            worker_id: holder.placed.worker_id.clone(),
            labels: BTreeMap::from([("step".to_owned(), "task".to_owned())]),
            ..Default::default()
        };
        let mut listed =
            holder.containers().list_containers(list.clone()).await.expect("listed").into_inner();
        assert_eq!(listed.containers.pop().expect("one").container_id, id);
        let elsewhere = pb::ListContainersRequest { team: "other".to_owned(), ..list };
        let listed = holder.containers().list_containers(elsewhere).await.expect("listed").into_inner();
        assert!(listed.containers.is_empty(), "{listed:?}");

        for _ in 0..2 {
            holder.release(&[&published]).await.expect("released");
        }
        holder.ended().await;
        let refused = holder.create("late", spec(&input)).await.expect_err("the lease has ended");
        assert!(refused.is(Reason::LeaseLost), "{refused}");
        assert_eq!(suite.succeed(&["cat", &published.artifact_id, "file"]), "bytes\ninput\n");
    });
}

#[test]
fn release_stops_all_processes_of_lease() {
    if !may_run_containers() {
        return;
    }
    let suite = Suite::start(Shape::ONE, SHORT_TERMS);
    let input = uploaded(&suite);
    block_on(async {
        let holder = Holder::place(&Services::of(&suite), &uuid(), &[&input]).await.expect("placed");
        let mut ids = Vec::new();
        for key in ["one", "two"] {
            let id = holder.create(key, spec(&input, None)).await.expect("created").container_id;
            ids.push(id);
        }
        let run = async |id: &str| {
            let trap = "trap 'echo stopped; exit 5' TERM; echo up | tee out/up; while :; do sleep 0.05; done";
            holder.run(id, id, &["sh", "-c", trap], b"").await.expect("it runs")
        };
        let release = async {
            for id in &ids {
                loop {
                    let seen = holder.container(id).await.expect("it exists");
                    if seen.processes.first().is_some_and(|main| main.state() == pb::ProcessState::Running) {
                        break;
                    }
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
                // The shell has set its trap.
                let wait = ["sh", "-c", "until [ -e out/up ]; do sleep 0.01; done"];
                assert_eq!(holder.run(id, &uuid(), &wait, b"").await.expect("it runs").1, 0);
                let refused = holder.publish(id, "out").await.expect_err("it runs");
                assert!(refused.is(Reason::ProcessRunning), "{refused}");
            }
            holder.release(&[]).await.expect("released");
        };
        let (one, two, ()) = tokio::join!(run(&ids[0]), run(&ids[1]), release);
        for ran in [one, two] {
            assert_eq!(ran, (b"up\nstopped\n".to_vec(), 5));
        }
        holder.ended().await;
    });
}

#[test]
fn container_is_stopped_and_destroyed_before_its_lease_ends() {
    if !may_run_containers() {
        return;
    }
    let suite = Suite::start(Shape::ONE, SHORT_TERMS);
    let input = uploaded(&suite);
    block_on(async {
        let holder = Holder::place(&Services::of(&suite), &uuid(), &[&input]).await.expect("placed");
        let id = holder.create("task", spec(&input, None)).await.expect("created").container_id;
        let command = ["sh", "-c", "trap 'echo stopped; exit 4' TERM; echo up; while :; do sleep 0.05; done"];
        holder.attach(&id, &id, &command, None).await.expect("it starts");
        let stop = pb::StopContainerRequest {
            lease_token: holder.placed.lease_token.clone(),
            container_id: id.clone(),
            grace: None,
        };
        for _ in 0..2 {
            holder.containers().stop_container(stop.clone()).await.expect("stopped");
        }
        let ran = holder.run(&id, &id, &command, b"").await.expect("it ends");
        assert_eq!(ran, (b"up\nstopped\n".to_vec(), 4));
        let destroy = pb::DestroyContainerRequest {
            lease_token: holder.placed.lease_token.clone(),
            container_id: id.clone(),
        };
        holder.containers().destroy_container(destroy.clone()).await.expect("destroyed");
        loop {
            match holder.container(&id).await {
                Err(refusal) if refusal.is(Reason::ContainerNotFound) => break,
                seen => _ = seen.expect("not yet"),
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        let refused = holder.containers().destroy_container(destroy).await.map_err(Refusal::from);
        assert!(refused.expect_err("it is gone").is(Reason::ContainerNotFound));
        holder.release(&[]).await.expect("released");
        holder.ended().await;
    });
}

#[test]
fn task_cache_is_published_for_next_lease() {
    if !may_run_containers() {
        return;
    }
    let suite = Suite::start(Shape::ONE, SHORT_TERMS);
    let input = uploaded(&suite);
    block_on(async {
        let services = Services::of(&suite);
        let request = FindOrCreateTaskCacheRequest {
            team: TEAM.to_owned(),
            job: "job".to_owned(),
            step: "step".to_owned(),
            path: "/cache".to_owned(),
            ttl: None,
        };
        let mut caches = CachesClient::new(services.connect(suite.address("artifact-store-0")));
        let cache = caches.find_or_create_task_cache(request).await.expect("made").into_inner();
        let cache = cache.cache_id;
        for expected in ["first\n", "first\nagain\n"] {
            let holder = Holder::place_with(&services, |request| {
                request.artifact_ids = vec![input.clone()];
                request.task_cache_ids = vec![cache.clone()];
            })
            .await
            .expect("placed");
            let mount = scheduler_pb::CacheMount { task_cache_id: cache.clone(), path: "/cache".into() };
            let spec = pb::ContainerSpec { caches: vec![mount], ..spec(&input, None) };
            let id = holder.create("task", spec).await.expect("created").container_id;
            let script =
                "word=first; [ ! -e /cache/seen ] || word=again; echo $word >> /cache/seen; cat /cache/seen";
            let ran = holder.run(&id, &id, &["sh", "-c", script], b"").await.expect("it runs");
            assert_eq!(ran, (expected.as_bytes().to_vec(), 0));
            let source = pb::publish_request::Source::TaskCacheId(cache.clone());
            let published = holder.publish_source(&id, source).await.expect("published");
            let owner = scheduler_pb::output_owner::Owner::TaskCacheId(cache.clone());
            holder.release_to(&[&published], &[owner]).await.expect("released");
        }
    });
}

#[test]
fn bad_requests_change_nothing() {
    if !may_run_containers() {
        return;
    }
    let suite = Suite::start(Shape::ONE, SHORT_TERMS);
    let input = uploaded(&suite);
    block_on(async {
        let services = Services::of(&suite);
        let holder = Holder::place(&services, &uuid(), &[&input]).await.expect("placed");
        let valid = || spec(&input, None);
        type Change = fn(&mut pb::ContainerSpec);
        let cases: &[(&str, &str, Change)] = &[
            ("", "key", |_| {}),
            ("line\nbreak", "key", |_| {}),
            ("task", "spec.image", |spec| spec.image = None),
            ("task", "spec.privilege", |spec| spec.privilege = 0),
            ("task", "spec.network", |spec| spec.network = 0),
            ("task", "spec.network_container_id", |spec| spec.network_container_id = "x".to_owned()),
            ("task", "spec.inputs[0].artifact_id", |spec| spec.inputs[0].artifact_id.clear()),
            ("task", "spec.outputs[0].owners", |spec| spec.outputs[0].owners.push(Default::default())),
            ("task", "spec.outputs[0].path", |spec| spec.outputs[0].path = vec![b'/', 0xff].into()),
            ("task", "spec.directory", |spec| spec.directory = b"a\0b".as_slice().into()),
        ];
        for (key, field, change) in cases {
            let mut spec = valid();
            change(&mut spec);
            let refused = holder.create(key, spec).await.expect_err(field);
            let text = refused.to_string();
            assert!(refused.is(Reason::InvalidField) && text.contains(field), "{field}: {refused}");
        }
        let unknown = uuid();
        let missing = |spec: &mut pb::ContainerSpec| spec.inputs[0].artifact_id = unknown.clone();
        let mut unpinned = valid();
        missing(&mut unpinned);
        let refused = holder.create("task", unpinned).await.expect_err("the team has no such artifact");
        assert!(refused.is(Reason::InputUnavailable), "{refused}");
        let stranger = pb::ContainerSpec { user: "no-such-user".to_owned(), ..valid() };
        let refused = holder.create("task", stranger).await.expect_err("there is no such user");
        let failure = refused.about.get("failure_reason").map(String::as_str);
        assert!(refused.is(Reason::ContainerFailed) && failure == Some("USER_NOT_FOUND"), "{refused}");
        // A failed creation can be repeated with another spec.
        let id = holder.create("task", valid()).await.expect("created").container_id;

        let other = Holder::place(&services, &uuid(), &[&input]).await.expect("placed");
        let refused = other.publish(&id, "out").await.expect_err("a container of another lease");
        assert!(refused.is(Reason::ContainerNotFound), "{refused}");
        let refused = other.run(&id, &id, &["true"], b"").await.expect_err("a container of another lease");
        assert!(refused.is(Reason::ContainerNotFound), "{refused}");
        let mut forged = Holder { placed: other.placed.clone(), ..Holder { services, ..other } };
        forged.placed.lease_token = "forged".to_owned();
        let refused = forged.create("task", valid()).await.expect_err("forged");
        assert!(refused.is(Reason::InvalidToken), "{refused}");
    });
}

#[test]
fn container_joins_network_of_another_one() {
    if !may_run_containers() {
        return;
    }
    let suite = Suite::start(Shape::ONE, SHORT_TERMS);
    let input = uploaded(&suite);
    block_on(async {
        let holder = Holder::place(&Services::of(&suite), &uuid(), &[&input]).await.expect("placed");
        let server = holder.create("server", spec(&input, None)).await.expect("created").container_id;
        let joined =
            |id: &str| pb::ContainerSpec { network_container_id: id.to_owned(), ..spec(&input, None) };
        let refused = holder.create("client", joined(&uuid())).await.expect_err("there is no such container");
        assert!(refused.is(Reason::ContainerNotFound), "{refused}");
        let client = holder.create("client", joined(&server)).await.expect("created").container_id;
        let connect = "import socket; s = socket.create_connection(('localhost', 8080)); print(s.recv(9))";
        let connect = ["python3", "-c", connect];
        let refused = holder.run(&client, &client, &connect, b"").await.expect_err("the server does not run");
        assert!(refused.is(Reason::ContainerNotRunning), "{refused}");
        let listen = "import socket; s = socket.create_server(('localhost', 8080)); print('up', flush=True)
while True: s.accept()[0].sendall(b'hello')";
        let listen = ["python3", "-c", listen];
        holder.attach(&server, &server, &listen, None).await.expect("it listens");
        let ran = holder.run(&client, &client, &connect, b"").await.expect("it runs");
        assert_eq!(ran, (b"b'hello'\n".to_vec(), 0));
        holder.release(&[]).await.expect("released");
        holder.ended().await;
    });
}

/// Each service is killed between each two steps of a holder. The holder repeats its calls.
#[test]
fn steps_survive_the_death_of_each_service_between_them() {
    if !may_run_containers() {
        return;
    }
    let settings = [SHORT_TERMS, &[("GANTRY_GC_GRACE", "1s")]].concat();
    let suite = Suite::start(Shape::ONE, &settings);
    let every = ["scheduler-0", "artifact-store-0", "streamer-0", "runtime-gateway-0"];
    kill_between_steps(suite, &every, None);

    let mut suite = Suite::start(Shape::NO_WORKER, &settings);
    let (_servers, image) = on_concourse_worker(&mut suite, Manner::Containerd);
    kill_between_steps(suite, &["runtime-gateway-0"], Some(&image));
}

fn kill_between_steps(mut suite: Suite, killed: &[&str], image: Option<&str>) {
    let input = uploaded(&suite);
    let artifacts: Vec<_> = image.into_iter().chain([&*input]).collect();
    let services = Services::of(&suite);
    for &service in killed {
        for gap in 1..=5 {
            let killed_at = format!("{service} before step {gap}");
            let mut kill = |step| {
                if step == gap {
                    suite.kill(service);
                    suite.spawn(service);
                }
            };
            let published = block_on(async {
                let mut holder = Holder::place(&services, &uuid(), &artifacts).await.expect("placed");
                // A Concourse worker loses input when its gateway dies.
                holder.has_input = image.is_none();
                kill(1);
                let id = holder.create("task", spec(&input, image)).await.expect("created").container_id;
                kill(2);
                let command = ["sh", "-c", "echo ran; cat src/file - > out/file; exit 3"];
                holder.attach(&id, &id, &command, None).await.expect("it starts");
                kill(3);
                let ran = holder.run(&id, &id, &command, b"input\n").await.expect("it ends");
                assert_eq!(ran, (b"ran\n".to_vec(), 3), "{killed_at}");
                kill(4);
                let published = holder.publish(&id, "out").await.expect("published");
                let seen = holder.container(&id).await.expect("it exists");
                assert_eq!(seen.processes.len(), 1, "{killed_at}: {seen:?}");
                kill(5);
                holder.release(&[&published]).await.expect("released");
                holder.ended().await;
                published
            });
            let kept = suite.succeed(&["cat", &published.artifact_id, "file"]);
            let expected = if image.is_none() { "bytes\ninput\n" } else { "bytes\n" };
            assert_eq!(kept, expected, "{killed_at}");
        }
    }
    wait_for("the deletion of all containers", || {
        suite.succeed(&["list", "containers", "--json"]).trim().is_empty().then_some(())
    });
}

/// A holder that dies leaves nothing behind after the term of its lease.
#[test]
fn lease_of_dead_holder_ends_with_its_processes() {
    if !may_run_containers() {
        return;
    }
    let settings = [SHORT_TERMS, &[("GANTRY_GC_GRACE", "1s"), ("GANTRY_LEASE_TERM", "3s")]].concat();
    let suite = Suite::start(Shape::ONE, &settings);
    let input = uploaded(&suite);
    let services = Services::of(&suite);
    block_on(async {
        let holder = Holder::place(&services, &uuid(), &[&input]).await.expect("placed");
        let id = holder.create("task", spec(&input, None)).await.expect("created").container_id;
        holder.attach(&id, &id, &["sh", "-c", "echo up; sleep 1000"], None).await.expect("it starts");
        holder.ended().await;
        let refused = holder.release(&[]).await.map_err(|refusal| refusal.to_string());
        assert_eq!(refused, Ok(()), "a release is repeatable");
    });
    wait_for("the deletion of all containers", || {
        suite.succeed(&["list", "containers", "--json"]).trim().is_empty().then_some(())
    });
}
