//! Surprising behavior of the Garden protocol, and the reaction of the gateway.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use domain::workload::{Exit, FailureReason, Stdin};
use domain::{ContainerHandle, ProcessId};
use futures::StreamExt;
use runtime::{
    ContainerSpec, Ended, Offsets, OutputStream, ProcessEvent, ProcessSpec, ProcessState, Runtime,
    RuntimeError, TerminalSize,
};
use runtime_gateway::garden::GardenConfig;
use testing::conformance::{RuntimeExt, Subject, in_time, process, programs, read_until, until};
use testing::garden::{Break, Fault, Manner};

use super::faults::{Bench, is_exit};
use super::subject::GardenSubject;

/// Appends a line to a file, and exits with 7.
fn append() -> ProcessSpec {
    process(&["/bin/sh", "-c", "echo line >> /out/file; exit 7"].map(str::to_owned))
}

async fn until_started(runtime: &Arc<dyn Runtime>, id: ProcessId) {
    in_time("a start that is known", async {
        while runtime.process(id).await.expect("a state") != ProcessState::Started {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    })
    .await;
}

/// Waits until the worker has received more than `times` attach requests for a process.
async fn until_attached(bench: &Bench, id: ProcessId, times: usize) {
    let attached = |line: &&String| line.starts_with("GET") && line.ends_with(&format!("/processes/{id}"));
    until("an attachment", || bench.subject.server().requests().iter().filter(attached).count() > times)
        .await;
}

/// The number of gaps in standard output, and the end of the process.
async fn gaps_and_end(runtime: &Arc<dyn Runtime>, id: ProcessId) -> (usize, Ended) {
    let mut attachment = runtime.attach(id, Offsets::default()).await.expect("attach");
    let mut gaps = 0;
    in_time("the end of a process", async {
        loop {
            match attachment.events.next().await.expect("more to come").expect("an event") {
                ProcessEvent::Truncated { stream: OutputStream::Stdout, .. } => gaps += 1,
                ProcessEvent::Ended(ended) => return (gaps, ended),
                _ => {}
            }
        }
    })
    .await
}

/// The reason why the gateway attaches again.
#[derive(Debug, Clone, Copy)]
enum Lost {
    /// The connection of the attachment broke.
    Connection,
    /// The connection of the start broke before its answer.
    Answer,
}

/// Starts a process that ends without being reaped.
async fn ended_unreaped(
    bench: &Bench,
    runtime: &Arc<dyn Runtime>,
    lost: Lost,
) -> (ContainerHandle, ProcessId) {
    let server = bench.subject.server();
    server.hold_ended(true);
    if let Lost::Answer = lost {
        bench.inject("/processes", Fault::LoseAnswer);
    }
    let handle = runtime.made(bench.spec.clone()).await;
    let id = runtime.started(handle, append()).await;
    until("its end", || server.held() == 1).await;
    server.break_attachments(Break::End);
    until_attached(bench, id, 1).await;
    (handle, id)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn late_exit_is_reported_correctly() {
    for lost in [Lost::Connection, Lost::Answer] {
        let Some(bench) = Bench::new(Manner::Containerd).await else { return };
        let (_, id) = ended_unreaped(&bench, &bench.runtime, lost).await;
        // The process ran, and its exit is not known yet.
        until_started(&bench.runtime, id).await;
        bench.subject.server().hold_ended(false);
        let (gaps, ended) = gaps_and_end(&bench.runtime, id).await;
        assert!(is_exit(&ended, 7), "{lost:?}: {ended:?}");
        assert_eq!(gaps, 1, "{lost:?}: output in between may be lost");
        assert_eq!((bench.runs(), bench.lines().await), (1, 1), "{lost:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn missing_exit_becomes_unknown() {
    for lost in [Lost::Connection, Lost::Answer] {
        let Some(subject) = GardenSubject::impatient(Manner::Containerd).await else { return };
        let bench = Bench::of(subject).await;
        let soon = |config| GardenConfig { exit_patience: Duration::from_millis(200), ..config };
        let runtime: Arc<dyn Runtime> = bench.subject.another(soon).await.expect("a gateway");
        let (handle, id) = ended_unreaped(&bench, &runtime, lost).await;
        let (gaps, ended) = gaps_and_end(&runtime, id).await;
        let Ended::Unknown(failure) = &ended else { panic!("{lost:?}: {ended:?}") };
        // The reason must not be that the start is unknown.
        assert_eq!(failure.reason, FailureReason::ExitUnknown, "{lost:?}");
        assert_eq!(gaps, 1, "{lost:?}");

        // The end stays unknown, even if the worker reaps the process later, and for every gateway.
        bench.subject.server().hold_ended(false);
        let next: Arc<dyn Runtime> = bench.subject.another(soon).await.expect("the next gateway");
        assert_eq!(next.ended(id).await, ended, "{lost:?}");
        next.start(handle, id, append()).await.expect("starting again does nothing");
        assert_eq!((bench.runs(), bench.lines().await), (1, 1), "{lost:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn gateway_polls_ended_process_until_exit_is_known() {
    let Some(mut bench) = Bench::new(Manner::Containerd).await else { return };
    let (_, id) = ended_unreaped(&bench, &bench.runtime, Lost::Connection).await;
    let (volume, before) = (bench.volume, bench.runs());
    drop(bench.runtime);
    bench.subject.reopen().await;
    let runtime = bench.subject.runtime();
    assert_eq!(runtime.process(id).await.expect("a state"), ProcessState::Started);
    bench.subject.server().hold_ended(false);
    assert!(is_exit(&runtime.ended(id).await, 7));
    assert_eq!(testing::conformance::lines(&*runtime, volume, "file").await, 1);
    let ran = bench.subject.server().requests();
    assert_eq!(
        ran.iter().filter(|line| line.starts_with("POST") && line.ends_with("/processes")).count(),
        before
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unkillable_process_keeps_slot_and_is_stopped_again() {
    for manner in [Manner::Containerd, Manner::Guardian] {
        let Some(subject) = GardenSubject::impatient(manner).await else { return };
        let bench = Bench::of(subject).await;
        let (runtime, server) = (&bench.runtime, bench.subject.server());
        let handle = runtime.made(bench.spec.clone()).await;
        let id = runtime.started(handle, process(&programs::sleep())).await;
        until_started(runtime, id).await;
        server.hold_ended(true);
        runtime.stop(id, Duration::ZERO).await.expect("stop");
        let stops = || server.requests().iter().filter(|line| line.ends_with("/stop")).count();
        until("another stop", || stops() > 2).await;
        // The worker has given up, which is not an end.
        assert_eq!(runtime.process(id).await.expect("a state"), ProcessState::Started, "{manner:?}");
        let refused = runtime.destroy_container(handle).await;
        let Err(RuntimeError::Other(message)) = refused else { panic!("{manner:?}: {refused:?}") };
        assert!(message.contains("grace period timeout"), "{message}");
        assert_eq!(runtime.list().await.expect("list").containers, [handle], "{manner:?}");

        server.hold_ended(false);
        let killed = Ended::Exited { exit: Exit::Code(137), stopped: true };
        assert_eq!(runtime.ended(id).await, killed, "{manner:?}");
        runtime.destroy_container(handle).await.expect("destroy");
        assert!(server.handles().is_empty(), "{manner:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn terminal_input_arrives_after_broken_connection() {
    for manner in [Manner::Containerd, Manner::Guardian, Manner::Houdini] {
        for how in [Break::End, Break::Reset] {
            let Some(bench) = Bench::new(manner).await else { return };
            let terminal = Some(TerminalSize { columns: 91, rows: 37 });
            let spec = ProcessSpec { stdin: Stdin::Attached, terminal, ..process(&programs::window()) };
            let handle = bench.runtime.made(bench.spec.clone()).await;
            let id = bench.runtime.started(handle, spec).await;
            let mut attachment = bench.runtime.attach(id, Offsets::default()).await.expect("attach");
            read_until(&mut attachment.events, "37 91").await;
            bench.subject.server().break_attachments(how);
            until_attached(&bench, id, 0).await;
            // With plain input, the input would have ended.
            attachment.input.resize(TerminalSize { columns: 120, rows: 50 }).await.expect("resize");
            attachment.input.stdin(0, Bytes::from_static(b"again\n")).await.expect("type");
            read_until(&mut attachment.events, "50 120").await;
            attachment.input.stdin(6, Bytes::from_static(b"end\n")).await.expect("type");
            let ended = bench.runtime.ended(id).await;
            assert!(is_exit(&ended, 5), "{manner:?} {how:?}: {ended:?}");
            assert_eq!(bench.runs(), 1);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn container_properties_may_be_long() {
    for manner in [Manner::Containerd, Manner::Guardian] {
        let Some(mut bench) = Bench::new(manner).await else { return };
        // Longer than the limit of a containerd label.
        let team = "a team with a long name ".repeat(1000);
        let handle = bench.runtime.made(ContainerSpec { team: team.clone(), ..bench.spec.clone() }).await;
        let id = bench.runtime.started(handle, append()).await;
        assert!(is_exit(&bench.runtime.ended(id).await, 7));
        drop(bench.runtime);
        bench.subject.reopen().await;
        assert_eq!(
            bench.subject.runtime().container_of(id).await.expect("a container").team,
            team,
            "{manner:?}"
        );
    }
}

/// Number of requests since `before` that contain this text.
fn count_requests(bench: &Bench, before: usize, what: &str) -> usize {
    let requests = bench.subject.server().requests();
    requests[before..].iter().filter(|line| line.starts_with("GET") && line.contains(what)).count()
}

/// Starts some processes in separate containers.
async fn running(bench: &Bench) -> Vec<(ContainerHandle, ProcessId)> {
    let mut all = Vec::new();
    for _ in 0..4 {
        let handle = bench.runtime.made(bench.spec.clone()).await;
        let id = bench.runtime.started(handle, process(&programs::sleep())).await;
        until_started(&bench.runtime, id).await;
        all.push((handle, id));
    }
    all
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn guardian_containers_are_queried_in_bulk() {
    let Some(bench) = Bench::new(Manner::Guardian).await else { return };
    let all = running(&bench).await;
    let before = bench.subject.server().requests().len();
    let next: Arc<dyn Runtime> = bench.subject.another(|config| config).await.expect("the next gateway");
    let states = all.iter().map(|(_, id)| next.process(*id));
    for state in futures::future::join_all(states).await {
        assert_eq!(state.expect("a state"), ProcessState::Started);
    }
    assert_eq!(count_requests(&bench, before, "/containers/bulk_info?"), 1);
    assert_eq!(count_requests(&bench, before, "/properties"), 0, "no container is queried separately");
    // Changes by another gateway in between would not be known.
    next.taken_over().await;
    next.process(all[0].1).await.expect("a state");
    assert_eq!(count_requests(&bench, before, "/containers/bulk_info?"), 2);
    let unknown = next.process(ProcessId::new()).await;
    assert!(matches!(unknown, Err(RuntimeError::ProcessNotFound(_))), "{unknown:?}");
    // A container that was destroyed before its process was looked up does not count as lost.
    let (handle, id) = all[1];
    next.destroy_container(handle).await.expect("destroy");
    let gone = next.process(id).await;
    assert!(matches!(gone, Err(RuntimeError::ProcessNotFound(_))), "{gone:?}");
    assert_eq!(count_requests(&bench, before, "/containers/bulk_info?"), 2);
    assert_eq!(bench.runs(), all.len());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn containers_are_queried_separately_without_bulk_support() {
    for manner in [Manner::Containerd, Manner::Guardian, Manner::Houdini] {
        let Some(bench) = Bench::new(manner).await else { return };
        let all = running(&bench).await;
        bench.inject("bulk_info", Fault::Answer("not today".to_owned()));
        let before = bench.subject.server().requests().len();
        let next: Arc<dyn Runtime> = bench.subject.another(|config| config).await.expect("the next gateway");
        for (_, id) in &all {
            assert_eq!(next.process(*id).await.expect("a state"), ProcessState::Started, "{manner:?}");
        }
        let told_of_all = usize::from(manner == Manner::Guardian);
        assert_eq!(count_requests(&bench, before, "bulk_info"), told_of_all, "{manner:?}");
        assert_eq!(count_requests(&bench, before, "/properties"), all.len(), "{manner:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn processes_run_as_the_requested_user() {
    let ids = || process(&["/bin/sh", "-c", "id -u; id -g"].map(str::to_owned));
    for manner in [Manner::Containerd, Manner::Guardian] {
        let Some(bench) = Bench::new(manner).await else { return };
        for (user, expected) in
            [(None, "0\n0\n"), (Some("1234"), "1234\n0\n"), (Some("1234:2345"), "1234\n2345\n")]
        {
            let spec = ContainerSpec { user: user.map(str::to_owned), ..bench.spec.clone() };
            assert_eq!(bench.runtime.run(spec, ids()).await.text(), expected, "{manner:?} {user:?}");
        }
        let unknown = ContainerSpec { user: Some("gantry-nobody".to_owned()), ..bench.spec.clone() };
        let Some(Ended::NotStarted(failure)) = bench.runtime.run(unknown, ids()).await.ended else {
            panic!("{manner:?}: the process ran")
        };
        assert_eq!(failure.reason, FailureReason::UserNotFound, "{manner:?}");
    }
}
