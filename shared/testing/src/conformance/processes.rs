//! Conformance tests of processes.

use std::time::Duration;

use domain::ProcessId;
use domain::workload::FailureReason;
use runtime::{ContainerDescription, ContainerSpec, Ended, Offsets, ProcessState, RuntimeError};

use super::{
    RuntimeExt, Subject, claims, exited, in_time, is_signal, lines, mount, on_root, process, programs, put,
    reason, until_lines,
};

/// Exit codes and signals are reported unchanged.
pub async fn exit_codes_and_signals_are_reported(subject: impl Subject) {
    let runtime = subject.runtime();
    for code in [0, 1, 42, 255] {
        let handle = runtime.made(on_root(&subject).await).await;
        let id = runtime.started(handle, process(&programs::exit(code))).await;
        assert_eq!(runtime.ended(id).await, exited(code));
        assert_eq!(runtime.process(id).await.expect("a state"), ProcessState::Ended(exited(code)));
    }
    for signal in [6, 9, 15] {
        let handle = runtime.made(on_root(&subject).await).await;
        let id = runtime.started(handle, process(&programs::signal_itself(signal))).await;
        let ended = runtime.ended(id).await;
        assert!(is_signal(&*runtime, &ended, signal, false), "{signal}: {ended:?}");
    }
}

/// A program that cannot be run is reported as not started, with the reason.
pub async fn unrunnable_programs_are_reported(subject: impl Subject) {
    let runtime = subject.runtime();
    let cases = [
        (programs::missing(), FailureReason::ProgramNotFound),
        (vec!["/no/such/program".to_owned()], FailureReason::ProgramNotFound),
        (programs::not_executable(), FailureReason::ProgramNotExecutable),
    ];
    for (command, expected) in cases {
        let output = runtime.run(on_root(&subject).await, process(&command)).await;
        let ended = output.ended.expect("an end");
        assert!(matches!(ended, Ended::NotStarted(_)), "{ended:?}");
        assert_eq!(reason(&ended), Some(expected), "{command:?}");
    }
}

/// A process that was never started is not found.
pub async fn unknown_process_is_not_found(subject: impl Subject) {
    let (runtime, id) = (subject.runtime(), ProcessId::new());
    let not_found =
        |error: RuntimeError| matches!(error, RuntimeError::ProcessNotFound(unknown) if unknown == id);
    assert!(runtime.process(id).await.is_err_and(not_found));
    assert!(runtime.container_of(id).await.is_err_and(not_found));
    assert!(runtime.wait(id).await.is_err_and(not_found));
    assert!(runtime.stop(id, Duration::ZERO).await.is_err_and(not_found));
    assert!(runtime.attach(id, Offsets::default()).await.is_err_and(not_found));
}

/// A process that is started repeatedly runs once, also with another runtime and after its end.
pub async fn process_starts_once(mut subject: impl Subject) {
    let runtime = subject.runtime();
    let volume = runtime.volume().await;
    let handle = runtime
        .made(ContainerSpec { mounts: vec![mount(volume, "/out", false)], ..on_root(&subject).await })
        .await;
    let id = ProcessId::new();
    let start = || runtime.start(handle, id, process(&programs::append("/out/file")));
    let (first, second, third) = tokio::join!(start(), start(), start());
    first.and(second).and(third).expect("start");
    assert_eq!(runtime.ended(id).await, exited(0));
    start().await.expect("start again");
    drop(runtime);
    subject.reopen().await;
    let runtime = subject.runtime();
    runtime.start(handle, id, process(&programs::append("/out/file"))).await.expect("start again");
    assert_eq!(runtime.ended(id).await, exited(0));
    assert_eq!(lines(&*runtime, volume, "file").await, 1);
}

/// A process, its output and its end outlive the runtime that started it.
pub async fn process_survives_its_runtime(mut subject: impl Subject) {
    let runtime = subject.runtime();
    let volume = runtime.volume().await;
    let handle = runtime
        .made(ContainerSpec { mounts: vec![mount(volume, "/out", false)], ..on_root(&subject).await })
        .await;
    let id = runtime.started(handle, process(&programs::append_and_wait_for_another("/out/file"))).await;
    until_lines(&*runtime, volume, "file", 1).await;
    drop(runtime);
    subject.reopen().await;

    let runtime = subject.runtime();
    assert_eq!(runtime.process(id).await.expect("a state"), ProcessState::Started);
    assert_eq!(runtime.list().await.expect("list").containers, [handle]);
    put(&*runtime, volume, "file", "line\nline\n").await;
    assert_eq!(runtime.ended(id).await, exited(7));
    drop(runtime);
    subject.reopen().await;
    let output = subject.runtime().read_output(id).await;
    assert_eq!((output.text(), output.ended.as_ref()), ("over\n", Some(&exited(7))));
}

/// A runtime that opens the worker again describes its containers and finds their processes.
pub async fn container_description_survives_reopening(mut subject: impl Subject) {
    let runtime = subject.runtime();
    // Longer than a label of containerd.
    let note = "{\"key\": \"value\"}".repeat(500);
    let spec = ContainerSpec { team: "other".to_owned(), note: note.clone(), ..on_root(&subject).await };
    let handle = runtime.made(spec).await;
    let described = |main| ContainerDescription {
        team: "other".to_owned(),
        note: note.clone(),
        main,
        others: Vec::new(),
    };
    assert_eq!(runtime.describe_container(handle).await.expect("described"), described(None));
    let id = runtime.started(handle, process(&programs::exit(0))).await;
    assert_eq!(runtime.container_of(id).await.expect("a container").team, "other");
    assert_eq!(runtime.ended(id).await, exited(0));
    drop(runtime);
    subject.reopen().await;
    let runtime = subject.runtime();
    assert_eq!(runtime.container_of(id).await.expect("a container").team, "other");
    assert_eq!(runtime.describe_container(handle).await.expect("described"), described(Some(id)));
    runtime.destroy_container(handle).await.expect("destroy");
    let gone = runtime.container_of(id).await;
    assert!(matches!(gone, Err(RuntimeError::ProcessNotFound(unknown)) if unknown == id), "{gone:?}");
    let gone = runtime.describe_container(handle).await;
    assert!(matches!(gone, Err(RuntimeError::ContainerNotFound(unknown)) if unknown == handle), "{gone:?}");
}

/// When a process has ended, no other process of its container runs.
pub async fn container_processes_end_with_main_process(subject: impl Subject) {
    let runtime = subject.runtime();
    if !claims(&*runtime, "ends-whole") {
        return;
    }
    let volume = runtime.volume().await;
    let handle = runtime
        .made(ContainerSpec { mounts: vec![mount(volume, "/out", false)], ..on_root(&subject).await })
        .await;
    let id = runtime.started(handle, process(&programs::leave_behind("/out/file"))).await;
    assert_eq!(runtime.ended(id).await, exited(0));
    let before = lines(&*runtime, volume, "file").await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(lines(&*runtime, volume, "file").await, before);
}

/// The destruction of a container kills its processes. Its main process is not found any more.
pub async fn container_destruction_kills_its_processes(subject: impl Subject) {
    let runtime = subject.runtime();
    let volume = runtime.volume().await;
    let spec = ContainerSpec { mounts: vec![mount(volume, "/out", false)], ..on_root(&subject).await };
    let handle = runtime.made(spec).await;
    let id = runtime.started(handle, process(&programs::append_and_wait_for_another("/out/file"))).await;
    until_lines(&*runtime, volume, "file", 1).await;
    in_time("the end of a container", runtime.destroy_container(handle)).await.expect("destroy");
    assert!(matches!(runtime.process(id).await, Err(RuntimeError::ProcessNotFound(_))));
    assert_eq!(runtime.list().await.expect("list").containers, []);
    runtime.destroy_volume(volume).await.expect("destroy");
}
