//! Tests of the fake worker: the conformance tests, and its faults.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use domain::workload::{Exit, FailureReason};
use domain::{ContainerHandle, VolumeHandle};
use futures::StreamExt;
use gantry_testing::conformance::{self, RuntimeExt, Subject, container, process, programs};
use gantry_testing::fake::{FakeWorker, SPOOL_BYTES};
use runtime::{ContainerSpec, Ended, Holdings, Offsets, ProcessState, Runtime, RuntimeError, VolumeSource};

struct FakeSubject {
    worker: Arc<FakeWorker>,
    /// The directory of the contents that the worker provides.
    _provided: tempfile::TempDir,
    runtime: Arc<dyn Runtime>,
}

impl FakeSubject {
    fn new(is_far: bool) -> Option<Self> {
        let provided = tempfile::tempdir().expect("a directory");
        let worker = FakeWorker::providing(conformance::worker_provided(provided.path()), is_far);
        Some(Self { runtime: worker.runtime(), worker, _provided: provided })
    }
}

#[async_trait]
impl Subject for FakeSubject {
    fn runtime(&self) -> Arc<dyn Runtime> {
        self.runtime.clone()
    }

    async fn reopen(&mut self) {
        self.runtime = self.worker.runtime();
    }

    fn spool_bytes(&self) -> u64 {
        SPOOL_BYTES
    }
}

mod near {
    use super::FakeSubject;

    gantry_testing::runtime_conformance!(FakeSubject::new(false));
}

mod far {
    use super::FakeSubject;

    gantry_testing::runtime_conformance!(FakeSubject::new(true));
}

/// Creates a volume, and a container that mounts it at `/volume`.
async fn furnished(worker: &Arc<FakeWorker>) -> (VolumeHandle, ContainerHandle) {
    let runtime = worker.runtime();
    let volume = runtime.volume().await;
    let mounts = vec![conformance::mount(volume, "/volume", false)];
    (volume, runtime.made(ContainerSpec { mounts, ..container() }).await)
}

#[tokio::test]
async fn reboot_loses_processes_and_keeps_contents() {
    let worker = FakeWorker::near();
    let runtime = worker.runtime();
    let before = runtime.marker().await.expect("the marker");
    let (volume, first) = furnished(&worker).await;
    let over = runtime.started(first, process(&programs::append("/volume/file"))).await;
    let ended = runtime.ended(over).await;
    let second = runtime.made(container()).await;
    let running = runtime.started(second, process(&programs::ignore_term())).await;
    let mut attachment = runtime.attach(running, Offsets::default()).await.expect("attach");
    conformance::read_until(&mut attachment.events, "ready").await;
    let third = runtime.made(container()).await;
    let held = worker.faults.hold_starts();
    let starting = runtime.started(third, process(&programs::append("/volume/file"))).await;
    assert_eq!(runtime.process(starting).await.expect("a state"), ProcessState::Starting);

    worker.reboot().await;
    drop(held);
    let runtime = worker.runtime();
    let after = runtime.marker().await.expect("the marker");
    assert_eq!(after.id, before.id);
    assert_ne!(after.boot, before.boot);
    assert_eq!(runtime.ended(over).await, ended, "the process had ended before");
    let reason = |ended| match ended {
        Ended::Unknown(failure) => failure.reason,
        ended => panic!("{ended:?}"),
    };
    assert_eq!(reason(runtime.ended(running).await), FailureReason::ExitUnknown);
    assert_eq!(runtime.process(starting).await.expect("a state"), ProcessState::StartUnknown);
    assert_eq!(reason(runtime.ended(starting).await), FailureReason::StartUnknown);
    let output = conformance::in_time("the rest", conformance::read_all(attachment)).await;
    assert_eq!(
        output.ended.map(reason),
        Some(FailureReason::ExitUnknown),
        "the attached reader receives the end"
    );
    assert_eq!(conformance::lines(&*runtime, volume, "file").await, 1, "no process was started since");
    assert_eq!(runtime.list().await.expect("list").containers.len(), 3);
}

#[tokio::test]
async fn held_operations_wait_half_done() {
    let worker = FakeWorker::near();
    let (runtime, volume) = (worker.runtime(), VolumeHandle::new());
    let held = worker.faults.hold_volumes();
    let making = runtime.create_volume(volume, VolumeSource::Empty);
    tokio::select! {
        biased;
        made = making => panic!("{made:?}"),
        () = tokio::task::yield_now() => {}
    }
    // The future was dropped, and the incomplete volume exists.
    assert_eq!(runtime.list().await.expect("list").volumes, [volume]);
    let none = runtime.contents(volume).await.err();
    assert!(matches!(none, Some(RuntimeError::VolumeNotFound(_))), "{none:?}");
    drop(held);
    runtime.create_volume(volume, VolumeSource::Empty).await.expect("make it again");
    runtime.contents(volume).await.expect("it is made");

    let (_, handle) = furnished(&worker).await;
    let held = worker.faults.hold_starts();
    let id = runtime.started(handle, process(&programs::exit(3))).await;
    assert_eq!(runtime.process(id).await.expect("a state"), ProcessState::Starting);
    drop(held);
    assert!(matches!(runtime.ended(id).await, Ended::Exited { exit: Exit::Code(3), stopped: false }));

    let held = worker.faults.hold_starts();
    let id = runtime.started(handle, process(&programs::exit(3))).await;
    runtime.stop(id, Duration::ZERO).await.expect("stop");
    drop(held);
    let Ended::NotStarted(failure) = runtime.ended(id).await else { panic!("the process was started") };
    assert_eq!(failure.reason, FailureReason::StoppedBeforeStart);
}

#[tokio::test]
async fn unreachable_worker_keeps_running() {
    let worker = FakeWorker::near();
    let runtime = worker.runtime();
    let (volume, handle) = furnished(&worker).await;
    let waiting = programs::append_and_wait_for_another("/volume/file");
    let id = runtime.started(handle, process(&waiting)).await;
    conformance::until_lines(&*runtime, volume, "file", 1).await;
    let mut attachment = runtime.attach(id, Offsets::default()).await.expect("attach");

    worker.faults.set_unreachable(true);
    assert!(runtime.marker().await.is_err() && runtime.list().await.is_err());
    assert!(runtime.process(id).await.is_err() && runtime.wait(id).await.is_err());
    assert!(attachment.events.next().await.is_some_and(|event| event.is_err()));
    assert!(attachment.events.next().await.is_none());
    assert!(attachment.input.stdin(0, Bytes::new()).await.is_err());
    std::fs::write(worker.path(volume).join("file"), "line\nline\n").expect("write");

    worker.faults.set_unreachable(false);
    let output = runtime.read_output(id).await;
    assert_eq!((output.text(), output.ended.as_ref()), ("over\n", Some(&runtime.ended(id).await)));
}

#[tokio::test]
async fn stuck_objects_stay_until_released() {
    let worker = FakeWorker::near();
    let runtime = worker.runtime();
    let (volume, handle) = furnished(&worker).await;
    worker.faults.set_stuck(volume, true);
    worker.faults.set_stuck_container(handle, true);
    for _ in 0..2 {
        runtime.destroy_container(handle).await.expect_err("the container is stuck");
        runtime.destroy_volume(volume).await.expect_err("the volume is stuck");
    }
    let held = runtime.list().await.expect("list");
    assert_eq!((held.containers, held.volumes), (vec![handle], vec![volume]));
    worker.faults.set_stuck(volume, false);
    worker.faults.set_stuck_container(handle, false);
    runtime.destroy_container(handle).await.expect("destroy");
    runtime.destroy_volume(volume).await.expect("destroy");
    assert_eq!(runtime.list().await.expect("list"), Holdings::default());
    assert!(!worker.path(volume).exists());
}

#[tokio::test]
async fn parent_stays_while_it_has_children() {
    let worker = FakeWorker::near();
    let runtime = worker.runtime();
    let parent = worker.volume("text").await;
    let child = runtime.child(parent).await;
    let refused = runtime.destroy_volume(parent).await;
    assert!(matches!(refused, Err(RuntimeError::HasChildren(of)) if of == parent), "{refused:?}");
    assert_eq!(worker.read(child), "text");
    runtime.destroy_volume(child).await.expect("destroy");
    runtime.destroy_volume(parent).await.expect("destroy");
}

#[tokio::test]
async fn unsupported_program_is_reported() {
    let worker = FakeWorker::near();
    let runtime = worker.runtime();
    let output = runtime.run(container(), process(&["sh", "-c", "echo hello"].map(str::to_owned))).await;
    let Some(Ended::NotStarted(failure)) = output.ended else { panic!("{output:?}") };
    assert_eq!(failure.reason, FailureReason::StartFailed);
    assert!(failure.message.contains("echo hello"), "{}", failure.message);
}

#[tokio::test]
async fn programs_stay_inside_their_container() {
    let worker = FakeWorker::near();
    let runtime = worker.runtime();
    let (volume, _) = furnished(&worker).await;
    let outside = tempfile::NamedTempFile::new().expect("a file");
    std::os::unix::fs::symlink(outside.path(), worker.path(volume).join("link")).expect("link");
    for path in ["/volume/link", "/volume/../volume/link"] {
        let mounts = vec![conformance::mount(volume, "/volume", false)];
        let spec = ContainerSpec { mounts, ..container() };
        let output = runtime.run(spec, process(&programs::append(path))).await;
        assert!(!output.stderr.is_empty(), "{output:?}");
    }
    assert_eq!(std::fs::read_to_string(outside.path()).expect("read"), "");
}
