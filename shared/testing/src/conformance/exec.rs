//! Conformance tests of further processes in a container.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use domain::workload::{EnvironmentVariable, Stdin};
use domain::{ContainerHandle, ProcessId};
use runtime::{
    ContainerSpec, Offsets, ProcessRole, ProcessSpec, ProcessState, Runtime, RuntimeError, TerminalSize,
};

use super::{RuntimeExt, Subject, claims, exited, has, is_signal, on_root, process, programs, read_until};

fn shell(script: &str) -> ProcessSpec {
    let command = ["/bin/sh", "-c", script].map(str::to_owned);
    ProcessSpec { role: ProcessRole::Exec, ..process(&command) }
}

fn variable(name: &str, value: &str) -> EnvironmentVariable {
    EnvironmentVariable { name: name.into(), value: value.into() }
}

/// Makes a container whose main process has begun. The process ends on TERM.
async fn running(runtime: &Arc<dyn Runtime>, spec: ContainerSpec) -> (ContainerHandle, ProcessId) {
    let handle = runtime.made(spec).await;
    let command =
        ["/bin/sh", "-c", "echo main > /dev/shm/file; echo ready; exec sleep 1000"].map(str::to_owned);
    let main = runtime.started(handle, process(&command)).await;
    let mut attachment = runtime.attach(main, Offsets::default()).await.expect("attach");
    read_until(&mut attachment.events, "ready").await;
    (handle, main)
}

/// A further process sees the files, processes and environment of its container. Its end does not
/// affect the main process.
pub async fn further_process_joins_container(subject: impl Subject) {
    let runtime = subject.runtime();
    if !claims(&*runtime, "exec") {
        return;
    }
    let environment = vec![variable("FROM_CONTAINER", "one two"), variable("BOTH", "container")];
    let (handle, main) = running(&runtime, ContainerSpec { environment, ..on_root(&subject).await }).await;
    let script = "cat /dev/shm/file; echo $FROM_CONTAINER $BOTH; id -u; pwd; \
        grep -ah sleep /proc/[0-9]*/cmdline | tr -d '\\0'; echo; exit 42";
    let spec = ProcessSpec { environment: vec![variable("BOTH", "process")], ..shell(script) };
    let output = runtime.read_output(runtime.started(handle, spec).await).await;
    assert_eq!(output.ended, Some(exited(42)), "{output:?}");
    let text = output.text();
    assert!(text.starts_with("main\none two process\n0\n/\n") && text.contains("sleep1000"), "{text}");

    let spec = ProcessSpec { directory: Some(b"/dev".to_vec()), ..shell("pwd") };
    let output = runtime.read_output(runtime.started(handle, spec).await).await;
    assert_eq!((output.text(), output.ended.as_ref()), ("/dev\n", Some(&exited(0))), "{output:?}");
    // Some Garden servers run everything as one user.
    if has(&*runtime, "owned-mounts") {
        let spec = ProcessSpec { user: Some("4242:77".to_owned()), ..shell("id -u; id -g") };
        let output = runtime.read_output(runtime.started(handle, spec).await).await;
        assert_eq!((output.text(), output.ended.as_ref()), ("4242\n77\n", Some(&exited(0))), "{output:?}");
    }
    assert_eq!(runtime.process(main).await.expect("a state"), ProcessState::Started);

    if !has(&*runtime, "signals") {
        // A Garden worker stops only whole containers.
        return;
    }
    let stopped = runtime.started(handle, shell("echo ready; exec sleep 1000")).await;
    let mut attachment = runtime.attach(stopped, Offsets::default()).await.expect("attach");
    read_until(&mut attachment.events, "ready").await;
    runtime.stop(stopped, Duration::ZERO).await.expect("stop");
    let ended = runtime.ended(stopped).await;
    // TERM comes before KILL.
    let is_killed = [15, 9].iter().any(|number| is_signal(&*runtime, &ended, *number, true));
    assert!(is_killed, "{ended:?}");
    assert_eq!(runtime.process(main).await.expect("a state"), ProcessState::Started);
}

/// A further process ends with the main process, and cannot start after it.
pub async fn further_process_ends_with_main_process(subject: impl Subject) {
    let runtime = subject.runtime();
    if !claims(&*runtime, "exec") {
        return;
    }
    let (handle, main) = running(&runtime, on_root(&subject).await).await;
    let script = "trap '' TERM HUP; echo ready; while :; do sleep 0.1; done";
    let further = runtime.started(handle, shell(script)).await;
    let mut attachment = runtime.attach(further, Offsets::default()).await.expect("attach");
    read_until(&mut attachment.events, "ready").await;
    runtime.stop(main, Duration::from_secs(60)).await.expect("stop");
    let ended = runtime.ended(main).await;
    assert!(is_signal(&*runtime, &ended, 15, true), "{ended:?}");
    let ended = runtime.ended(further).await;
    assert!(is_signal(&*runtime, &ended, 9, false), "{ended:?}");
    let late = runtime.start(handle, ProcessId::new(), shell("true")).await;
    assert!(matches!(late, Err(RuntimeError::ContainerNotRunning(it)) if it == handle), "{late:?}");
    runtime.destroy_container(handle).await.expect("destroy");
    assert!(runtime.process(further).await.is_err());
}

/// A further process and its terminal survive the replacement of the runtime. Destroying the
/// container ends it.
pub async fn further_process_survives_its_runtime(mut subject: impl Subject) {
    let runtime = subject.runtime();
    if !claims(&*runtime, "exec") || !claims(&*runtime, "terminal") {
        return;
    }
    let (handle, _) = running(&runtime, on_root(&subject).await).await;
    let terminal = Some(TerminalSize { columns: 91, rows: 37 });
    let spec = ProcessSpec {
        stdin: Stdin::Attached,
        terminal,
        role: ProcessRole::Exec,
        ..process(&programs::window())
    };
    let further = runtime.started(handle, spec).await;
    let mut attachment = runtime.attach(further, Offsets::default()).await.expect("attach");
    read_until(&mut attachment.events, "37 91").await;
    drop((attachment, runtime));
    subject.reopen().await;

    let runtime = subject.runtime();
    let mut attachment = runtime.attach(further, Offsets::default()).await.expect("attach");
    let typed = attachment.stdin_offset;
    attachment.input.resize(TerminalSize { columns: 120, rows: 50 }).await.expect("resize");
    attachment.input.stdin(typed, Bytes::from_static(b"again\n")).await.expect("type");
    read_until(&mut attachment.events, "50 120").await;
    runtime.destroy_container(handle).await.expect("destroy");
    assert!(runtime.process(further).await.is_err());
}
