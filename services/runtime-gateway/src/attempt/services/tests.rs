//! Services of an attempt on a fake worker.

use domain::workload::{Image, Limits, Readiness};
use testing::conformance::{container, programs};
use testing::fake::FakeWorker;

use super::*;
use crate::attempt::image::ProcessDefaults;
use crate::attempt::inputs::tests::task;
use crate::test_support::store::session;
use crate::test_support::{FakeGateways, TestWorker, within};
use crate::util::clock::since_boot;

/// A worker with the containers of an attempt whose services run these commands.
struct Scene {
    worker: TestWorker,
    task: AttemptTask,
    containers: ServiceContainers,
    stop: watch::Sender<Option<StopRequest>>,
}

impl Scene {
    async fn with(services: Vec<Service>) -> Self {
        let worker = FakeWorker::near().gateway("http://127.0.0.1:9", "http://127.0.0.1:9");
        worker.session.set(Some(session("credential")));
        worker.session.extend_exclusive(since_boot() + Duration::from_secs(600));
        let mut task = task();
        task.spec.services = services;
        let mut containers = ServiceContainers(Vec::new());
        for (index, service) in task.spec.services.iter().enumerate() {
            let handle = ContainerHandle::new();
            let of_service = task_of(&task, index, service);
            let known = KnownContainer::of(&of_service, handle);
            let spec = runtime::ContainerSpec {
                network_of: containers.network_of(&task),
                note: known.note_text(),
                ..container()
            };
            worker.runtime.create_container(handle, spec).await.expect("a container");
            worker.index.add(known).await;
            let process = process_spec(&of_service, &ProcessDefaults::default()).expect("a command");
            containers.0.push((handle, process));
        }
        Self { worker, task, containers, stop: watch::Sender::new(None) }
    }

    async fn start(&self) -> Result<(), AttemptError> {
        let mut stop = self.stop.subscribe();
        within("the start", start(&self.worker, &self.task, &self.containers, &mut stop)).await
    }

    async fn state(&self, name: &str) -> Result<ProcessState, RuntimeError> {
        self.worker.runtime.process(self.task.attempt.service(name).into()).await
    }
}

fn service(name: &str, command: &[String], check: ReadinessCheck) -> Service {
    Service {
        name: name.to_owned(),
        image: Image::Host,
        entrypoint: None,
        prefers_image_directory: false,
        command: command.iter().map(|argument| argument.as_bytes().to_vec()).collect(),
        environment: Vec::new(),
        directory: b"/".to_vec(),
        user: None,
        limits: Limits::default(),
        readiness: Readiness { check, timeout: Duration::from_secs(60) },
        essential: false,
    }
}

#[tokio::test]
async fn services_start_once_and_are_found_by_lease() {
    let listens = service("db", &programs::listen(4101), ReadinessCheck::TcpPort(4101));
    let sleeps = service("other", &programs::sleep(), ReadinessCheck::Started);
    let scene = Scene::with(vec![listens, sleeps]).await;
    scene.start().await.expect("ready");
    scene.start().await.expect("a restarted gateway finds them");
    for name in ["db", "other"] {
        assert_eq!(scene.state(name).await.expect("it exists"), ProcessState::Started, "{name}");
    }
    assert!(stop_all(&scene.worker, LeaseId::new(), Duration::ZERO).await, "of another lease");
    assert_eq!(scene.state("db").await.expect("it exists"), ProcessState::Started);
    assert!(stop_all(&scene.worker, scene.task.lease, STOP_GRACE).await);
    for name in ["db", "other"] {
        let state = scene.state(name).await.expect("it exists");
        assert!(matches!(state, ProcessState::Ended(Ended::Exited { stopped: true, .. })), "{state:?}");
    }
    let ends = unexpected_ends(&scene.worker, &scene.task).await;
    assert!(ends.notes.is_empty() && ends.failures.is_empty(), "they were stopped: {ends:?}");
}

#[tokio::test]
async fn failure_before_start_names_service_and_its_output() {
    let sleeps = || service("first", &programs::sleep(), ReadinessCheck::Started);
    let mut slow = service("db", &programs::sleep(), ReadinessCheck::TcpPort(4102));
    slow.readiness.timeout = Duration::from_millis(300);
    for (failing, text) in [
        (
            service("db", &programs::say("out", "err"), ReadinessCheck::TcpPort(4102)),
            "service db ended with exit code 0 before the process was started; the end of its output: outerr",
        ),
        (
            slow,
            "service db was not ready within 300ms: nothing accepts connections at 127.0.0.1:4102; it has no output",
        ),
    ] {
        let scene = Scene::with(vec![sleeps(), failing]).await;
        let error = scene.start().await.expect_err("it is not ready");
        assert_eq!(super::super::error::failure(&error).reason, FailureReason::ServiceFailed);
        assert_eq!(error.to_string(), text);
        let state = scene.state("first").await.expect("it exists");
        assert!(matches!(state, ProcessState::Ended(_)), "the others are stopped: {state:?}");
    }
}

#[tokio::test]
async fn stopped_services_are_not_blamed() {
    let services = [service("first", &programs::sleep(), ReadinessCheck::Started)]
        .into_iter()
        .chain([service("db", &programs::exit(3), ReadinessCheck::TcpPort(4104))]);
    let scene = Scene::with(services.collect()).await;
    let expected = scene.start().await.expect_err("it is not ready").to_string();
    assert!(expected.starts_with("service db ended with exit code 3 before"), "{expected}");
    // A restarted gateway finds all services ended.
    assert_eq!(scene.start().await.expect_err("it is not ready").to_string(), expected);
}

#[tokio::test]
async fn services_are_not_blamed_without_session() {
    let mut slow = service("db", &programs::sleep(), ReadinessCheck::TcpPort(4105));
    slow.readiness.timeout = Duration::from_millis(300);
    let scene = Scene::with(vec![slow]).await;
    let mut stop = scene.stop.subscribe();
    let started = start(&scene.worker, &scene.task, &scene.containers, &mut stop);
    let supersede = async {
        within("its start", wait_until_started(&scene.worker, scene.task.attempt.service("db"))).await;
        scene.worker.session.set(None);
    };
    let (started, ()) = tokio::join!(started, supersede);
    assert!(matches!(started, Err(AttemptError::NotExclusive)), "{started:?}");
    assert_eq!(scene.state("db").await.expect("it exists"), ProcessState::Started);
}

#[tokio::test]
async fn requested_stop_ends_wait_for_readiness() {
    let mut slow = service("db", &programs::sleep(), ReadinessCheck::TcpPort(4103));
    slow.readiness.timeout = Duration::from_secs(600);
    let scene = Scene::with(vec![slow]).await;
    let request = StopRequest { grace: Duration::ZERO, reason: FailureReason::Cancelled };
    scene.stop.send_replace(Some(request.clone()));
    let error = scene.start().await.expect_err("it must stop");
    assert!(matches!(&error, AttemptError::StopRequested(now) if *now == request), "{error}");
    assert!(stop(&scene.worker, &scene.task, &scene.stop.subscribe()).await);
    assert!(matches!(scene.state("db").await.expect("it exists"), ProcessState::Ended(_)));
}

#[tokio::test]
async fn only_end_of_essential_service_is_failure() {
    for essential in [false, true] {
        let ends = Service { essential, ..service("db", &programs::exit(3), ReadinessCheck::Started) };
        let scene = Scene::with(vec![ends]).await;
        // It may end before it is seen to run.
        _ = scene.start().await;
        within("its end", end_of(&scene.worker, scene.task.attempt.service("db"))).await;
        let ends = unexpected_ends(&scene.worker, &scene.task).await;
        assert_eq!(ends.is_failure(), essential);
        let text = "service db ended with exit code 3 too early".to_owned();
        let failure = Failure { reason: FailureReason::ServiceFailed, message: text.clone() };
        for has_succeeded in [false, true] {
            let mut result = AttemptResult::default();
            unexpected_ends(&scene.worker, &scene.task).await.report(&mut result, has_succeeded);
            let is_failure = essential && !has_succeeded;
            let expected =
                if is_failure { (Some(failure.clone()), vec![]) } else { (None, vec![text.clone()]) };
            assert_eq!((result.failure, result.notes), expected, "{essential} {has_succeeded}");
        }
    }
}
