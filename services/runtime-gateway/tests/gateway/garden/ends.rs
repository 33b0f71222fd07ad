//! Reports of processes that were not started, or were killed: by the messages of the worker, and
//! by what it no longer has.

use std::sync::Arc;
use std::time::Duration;

use domain::workload::{Exit, FailureReason, Limits};
use domain::{ContainerHandle, ProcessId};
use runtime::{ContainerSpec, Ended, ProcessSpec, ProcessState, Runtime, RuntimeError};
use runtime_gateway::garden::GardenConfig;
use testing::conformance::{RuntimeExt, Subject, in_time, process, programs, put, until, until_lines};
use testing::garden::{Break, Fault, Manner};

use super::faults::{Bench, is_exit};

const EVERY: [Manner; 3] = [Manner::Containerd, Manner::Guardian, Manner::Houdini];

fn shell(script: &str) -> ProcessSpec {
    process(&["/bin/sh", "-c", script].map(str::to_owned))
}

fn reason(ended: &Ended) -> Option<(FailureReason, bool)> {
    match ended {
        Ended::NotStarted(failure) => Some((failure.reason, false)),
        Ended::Unknown(failure) => Some((failure.reason, true)),
        Ended::Exited { .. } => None,
    }
}

/// The reason of a process that was not started, or may not have been.
fn not_started(ended: &Ended) -> FailureReason {
    match reason(ended) {
        Some((reason, false)) => reason,
        _ => panic!("{ended:?}"),
    }
}

fn unknown(ended: &Ended) -> FailureReason {
    match reason(ended) {
        Some((reason, true)) => reason,
        _ => panic!("{ended:?}"),
    }
}

async fn until_started(runtime: &Arc<dyn Runtime>, id: ProcessId) {
    in_time("a start that is known", async {
        while runtime.process(id).await.expect("a state") != ProcessState::Started {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn guardian_reports_out_of_memory_others_a_kill() {
    if !testing::garden::keeps_limits() {
        eprintln!("not applicable: this worker is simulated and enforces no limits");
        return;
    }
    for manner in [Manner::Guardian, Manner::Containerd] {
        let Some(bench) = Bench::new(manner).await else { return };
        let limits = Limits { memory_bytes: Some(32 << 20), ..Limits::default() };
        let spec = ContainerSpec { limits, ..bench.spec.clone() };
        let told = |exit| Some(Ended::Exited { exit, stopped: false });
        let output = bench.runtime.run(spec.clone(), process(&programs::allocate(128 << 20))).await;
        let out_of_memory = if manner == Manner::Guardian { Exit::OutOfMemory } else { Exit::Code(137) };
        assert_eq!(output.ended, told(out_of_memory), "{manner:?}");
        // A process that was killed for another reason, in a separate container.
        let output = bench.runtime.run(spec, shell("kill -9 $$")).await;
        assert_eq!(output.ended, told(Exit::Code(137)), "{manner:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn out_of_memory_end_survives_missing_container_info() {
    if !testing::garden::keeps_limits() {
        eprintln!("not applicable: this worker is simulated and enforces no limits");
        return;
    }
    let Some(mut bench) = Bench::new(Manner::Guardian).await else { return };
    let limits = Limits { memory_bytes: Some(32 << 20), ..Limits::default() };
    let handle = bench.runtime.made(ContainerSpec { limits, ..bench.spec.clone() }).await;
    let id = bench.runtime.started(handle, process(&programs::allocate(128 << 20))).await;
    let ended = bench.runtime.ended(id).await;
    assert_eq!(ended, Ended::Exited { exit: Exit::OutOfMemory, stopped: false });
    drop(bench.runtime);
    bench.subject.reopen().await;
    bench.subject.server().inject("/info", Fault::Answer("not today".to_owned()));
    assert_eq!(bench.subject.runtime().ended(id).await, ended, "the end is stored");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rejected_run_counts_as_not_started() {
    let refusals = [
        Fault::AnswerAs("ServiceUnavailableError", "come back later".to_owned()),
        Fault::AnswerAs("UnrecoverableError", "broken for good".to_owned()),
        Fault::AnswerAs("SomethingElse", "of a later version".to_owned()),
        Fault::Answer("not implemented".to_owned()),
        Fault::Answer("unexpected".to_owned()),
    ];
    for manner in EVERY {
        for refusal in refusals.clone() {
            let Some(bench) = Bench::new(manner).await else { return };
            bench.inject("/processes", refusal.clone());
            let handle = bench.runtime.made(bench.spec.clone()).await;
            let id = bench.runtime.started(handle, process(&programs::append("/out/file"))).await;
            let ended = bench.runtime.ended(id).await;
            assert_eq!(not_started(&ended), FailureReason::StartFailed, "{manner:?} {refusal:?}");
            assert_eq!((bench.runs(), bench.lines().await), (1, 0), "{manner:?} {refusal:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn gateway_retries_while_worker_is_unavailable() {
    let Some(bench) = Bench::new(Manner::Guardian).await else { return };
    let unavailable = || Fault::AnswerAs("ServiceUnavailableError", "come back later".to_owned());
    bench.inject("POST /containers/", unavailable());
    // Longer than the patience for an unknown process.
    for _ in 0..6 {
        bench.inject("GET /containers/", unavailable());
    }
    let handle = bench.runtime.made(bench.spec.clone()).await;
    let id = bench.runtime.started(handle, process(&programs::append("/out/file"))).await;
    assert_eq!(not_started(&bench.runtime.ended(id).await), FailureReason::StartFailed);
    assert_eq!((bench.runs(), bench.lines().await), (1, 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn start_fails_when_container_vanished_before() {
    for manner in EVERY {
        let Some(bench) = Bench::new(manner).await else { return };
        let handle = bench.runtime.made(bench.spec.clone()).await;
        bench.subject.server().lose(&handle.to_string());
        let id = ProcessId::new();
        match bench.runtime.start(handle, id, process(&programs::append("/out/file"))).await {
            // A guardian worker stores the intent of a missing container.
            Ok(()) => {
                assert_eq!(manner, Manner::Guardian);
                let ended = bench.runtime.ended(id).await;
                assert_eq!(not_started(&ended), FailureReason::ContainerNotFound);
            }
            Err(error) => {
                assert_ne!(manner, Manner::Guardian);
                assert!(matches!(error, RuntimeError::ContainerNotFound(_)), "{manner:?}: {error:?}");
            }
        }
        assert_eq!(bench.lines().await, 0, "{manner:?}");
        bench.runtime.destroy_container(handle).await.expect("it is gone");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn end_is_unknown_when_container_vanished() {
    for manner in EVERY {
        for stopped in [false, true] {
            let Some(bench) = Bench::new(manner).await else { return };
            let handle = bench.runtime.made(bench.spec.clone()).await;
            let id = bench.runtime.started(handle, process(&programs::ignore_term())).await;
            until_started(&bench.runtime, id).await;
            if stopped {
                bench.runtime.stop(id, Duration::from_secs(1000)).await.expect("stop");
            }
            bench.subject.server().lose(&handle.to_string());
            if stopped {
                bench.runtime.stop(id, Duration::ZERO).await.expect("stop");
            }
            let ended = bench.runtime.ended(id).await;
            assert_eq!(unknown(&ended), FailureReason::ExitUnknown, "{manner:?} {stopped}: {ended:?}");
            bench.runtime.stop(id, Duration::ZERO).await.expect("it has ended");
            bench.runtime.destroy_container(handle).await.expect("it is gone");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn start_is_unknown_when_container_vanished_unseen() {
    for manner in EVERY {
        let Some(bench) = Bench::new(manner).await else { return };
        let handle = bench.runtime.made(bench.spec.clone()).await;
        bench.inject("POST /containers/", Fault::Reset);
        for _ in 0..3 {
            bench.inject("GET /containers/", Fault::Reset);
        }
        let id = bench.runtime.started(handle, process(&programs::append("/out/file"))).await;
        until("the run", || bench.runs() == 1).await;
        bench.subject.server().lose(&handle.to_string());
        let ended = bench.runtime.ended(id).await;
        assert_eq!(unknown(&ended), FailureReason::StartUnknown, "{manner:?}: {ended:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn full_worker_takes_container_after_another_is_destroyed() {
    for manner in [Manner::Containerd, Manner::Guardian] {
        let Some(bench) = Bench::new(manner).await else { return };
        let at_once = |config| GardenConfig { full_patience: Duration::ZERO, ..config };
        let hasty: Arc<dyn Runtime> = bench.subject.another(at_once).await.expect("a gateway");
        let first = bench.runtime.made(bench.spec.clone()).await;
        bench.subject.server().limit_containers(1);
        let second = ContainerHandle::new();
        let refused = hasty.create_container(second, bench.spec.clone()).await;
        let Err(error @ RuntimeError::WorkerFull(_)) = &refused else { panic!("{manner:?}: {refused:?}") };
        assert_eq!(error.reason(), FailureReason::WorkerFull);
        assert_eq!(bench.runtime.list().await.expect("list").containers, [first], "{manner:?}");
        // A gateway with patience waits for a container to be destroyed.
        let creations =
            || bench.subject.server().requests().iter().filter(|line| *line == "POST /containers").count();
        let before = creations();
        let made = bench.runtime.create_container(second, bench.spec.clone());
        let goes = async {
            until("an attempt", || creations() > before).await;
            hasty.destroy_container(first).await.expect("destroy");
        };
        let (made, ()) = in_time("room", async { tokio::join!(made, goes) }).await;
        made.expect("there is room");
        assert_eq!(bench.runtime.list().await.expect("list").containers, [second], "{manner:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn process_outlasts_the_request_timeout() {
    for manner in [Manner::Containerd, Manner::Guardian] {
        let Some(bench) = Bench::new(manner).await else { return };
        let request_timeout = Duration::from_millis(400);
        let soon = |mut config: GardenConfig| {
            config.settings.request_timeout = request_timeout;
            config
        };
        let runtime: Arc<dyn Runtime> = bench.subject.another(soon).await.expect("a gateway");
        let handle = runtime.made(bench.spec.clone()).await;
        let id = runtime.started(handle, shell("echo early; sleep 1.5; echo late; exit 7")).await;
        let output = runtime.read_output(id).await;
        assert_eq!((output.text(), output.gone), ("early\nlate\n", 0), "{manner:?}");
        assert!(output.ended.is_some_and(|ended| is_exit(&ended, 7)), "{manner:?}");
        let attached =
            |line: &&String| line.starts_with("GET") && line.ends_with(&format!("/processes/{id}"));
        let attached = bench.subject.server().requests().iter().filter(attached).count();
        assert_eq!(attached, 0, "{manner:?}: only the first connection was used");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn end_is_unknown_when_containerd_forgot_it() {
    let Some(bench) = Bench::new(Manner::Containerd).await else { return };
    let server = bench.subject.server();
    server.forget_exits();
    // A gateway that is attached needs no query.
    let handle = bench.runtime.made(bench.spec.clone()).await;
    let id = bench.runtime.started(handle, shell("exit 7")).await;
    assert!(is_exit(&bench.runtime.ended(id).await, 7));

    // A process that ends while the connection is down.
    let handle = bench.runtime.made(bench.spec.clone()).await;
    let id =
        bench.runtime.started(handle, process(&programs::append_and_wait_for_another("/out/file"))).await;
    until_lines(&*bench.runtime, bench.volume, "file", 1).await;
    until_started(&bench.runtime, id).await;
    bench.inject(&format!("/processes/{id}"), Fault::Delay(Duration::from_millis(500)));
    server.break_attachments(Break::End);
    put(&*bench.runtime, bench.volume, "file", "line\nline\n").await;
    until("its end", || server.running() == 0).await;
    assert_eq!(unknown(&bench.runtime.ended(id).await), FailureReason::ExitUnknown, "the process ran");
    let next: Arc<dyn Runtime> = bench.subject.another(|config| config).await.expect("the next gateway");
    assert_eq!(unknown(&next.ended(id).await), FailureReason::ExitUnknown, "the reason does not change");

    // A process of which only the intent is known.
    let before = server.running();
    bench.inject("POST /containers/", Fault::LoseAnswer);
    bench.inject("GET /containers/", Fault::Delay(Duration::from_millis(500)));
    let handle = bench.runtime.made(bench.spec.clone()).await;
    let id = bench.runtime.started(handle, shell("exit 7")).await;
    until("its end", || server.running() == before).await;
    assert_eq!(unknown(&bench.runtime.ended(id).await), FailureReason::StartUnknown);
}
