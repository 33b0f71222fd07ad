//! Conformance tests of further processes in a container.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use domain::workload::{EnvironmentVariable, Stdin};
use domain::{ContainerHandle, ProcessId};
use runtime::{
    ContainerSpec, Offsets, ProcessRole, ProcessSpec, ProcessState, Runtime, RuntimeError, TerminalSize,
};

use super::{
    RuntimeExt, Subject, claims, exited, has, in_time, is_signal, lines, mount, on_root, process, programs,
    put, read_until,
};

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

    let other = runtime.made(on_root(&subject).await).await;
    let foreign = runtime.start(other, main, shell("true")).await;
    assert!(foreign.is_err(), "the id belongs to a process of another container: {foreign:?}");
    if !has(&*runtime, "signals") {
        // A Garden worker stops only whole containers.
        return;
    }
    // A process ends, although it leaves another one behind that writes for ever.
    let output = runtime.read_output(runtime.started(handle, shell("yes & exit 6")).await).await;
    assert_eq!(output.ended, Some(exited(6)));
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

/// A further process has the requested user in a privileged container, too.
pub async fn further_process_of_privileged_container_has_user(subject: impl Subject) {
    let runtime = subject.runtime();
    if !claims(&*runtime, "exec") || !claims(&*runtime, "owned-mounts") || !claims(&*runtime, "privileged") {
        return;
    }
    let (handle, _) = running(&runtime, ContainerSpec { privileged: true, ..on_root(&subject).await }).await;
    for (user, expected) in [("4242:77", "4242\n77\n"), ("0", "0\n0\n")] {
        let spec = ProcessSpec { user: Some(user.to_owned()), ..shell("id -u; id -g") };
        let output = runtime.read_output(runtime.started(handle, spec).await).await;
        assert_eq!((output.text(), output.ended.as_ref()), (expected, Some(&exited(0))), "{output:?}");
    }
}

/// A further process ends with the main process. A container without a main process has none.
pub async fn further_process_ends_with_main_process(subject: impl Subject) {
    let runtime = subject.runtime();
    if !claims(&*runtime, "exec") {
        return;
    }
    let unused = runtime.made(on_root(&subject).await).await;
    let early = runtime.start(unused, ProcessId::new(), shell("true")).await;
    assert!(matches!(early, Err(RuntimeError::ContainerNotRunning(it)) if it == unused), "{early:?}");
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
    if !has(&*runtime, "exec-ended") {
        let late = runtime.start(handle, ProcessId::new(), shell("true")).await;
        assert!(matches!(late, Err(RuntimeError::ContainerNotRunning(it)) if it == handle), "{late:?}");
    }
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

/// A process that looks into an ended container sees its files, and changes only its own copy.
pub async fn ended_container_can_be_looked_into(subject: impl Subject) {
    let runtime = subject.runtime();
    if !claims(&*runtime, "exec-ended") {
        return;
    }
    let [parent, scratch, output] = [runtime.volume().await, runtime.volume().await, runtime.volume().await];
    put(&*runtime, parent, "file", "from the parent\n").await;
    let child = runtime.child(parent).await;
    runtime.make_directories(scratch, &["out".into()]).await.expect("make a directory");
    let mounts = vec![mount(child, "/child", false), mount(scratch, "/workspace", false)];
    let environment = vec![variable("NAME", "kept")];
    let spec = ContainerSpec { mounts, environment, ..on_root(&subject).await };
    let handle = runtime.made(spec).await;
    let script =
        "echo more >> /child/file; echo result > /workspace/out/result; echo note > /root-note; exit 3";
    let command = ["/bin/sh", "-c", script].map(str::to_owned);
    let main = runtime.started(handle, process(&command)).await;
    assert_eq!(runtime.ended(main).await, exited(3));
    runtime.take_directory(scratch, "out".as_ref(), output).await.expect("take an output");

    let script = "echo $NAME; cat /child/file /workspace/out/result; echo changed > /child/file; \
        rm /workspace/out/result; echo new > /workspace/new; echo ready; read line; exit 9";
    let spec = ProcessSpec { stdin: Stdin::Attached, ..shell(script) };
    let look = async || {
        let id = ProcessId::new();
        // The supervisor of the main process may need a moment after the end was reported.
        in_time("a start", async {
            while runtime.start(handle, id, spec.clone()).await.is_err() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        })
        .await;
        id
    };
    let looking = look().await;
    let mut attachment = runtime.attach(looking, Offsets::default()).await.expect("attach");
    let read = read_until(&mut attachment.events, "ready").await;
    let expected = "kept\nfrom the parent\nmore\nresult\nready\n";
    assert_eq!(String::from_utf8_lossy(&read), expected);
    // Another one has its own copy, and ends alone.
    let beside = runtime.started(handle, shell("cat /child/file; cat /workspace/new; exit 4")).await;
    let read = runtime.read_output(beside).await;
    assert_eq!((read.text(), read.ended.as_ref()), ("from the parent\nmore\n", Some(&exited(4))));
    attachment.input.stdin(0, Bytes::from_static(b"\n")).await.expect("type");
    assert_eq!(runtime.ended(looking).await, exited(9));
    assert_eq!(runtime.ended(main).await, exited(3), "the record of the main process stays");

    // The bytes are unchanged, also for the next look.
    assert_eq!(lines(&*runtime, child, "file").await, 2);
    assert_eq!(lines(&*runtime, output, "result").await, 1);
    assert_eq!(lines(&*runtime, scratch, "new").await, 0);
    let again = look().await;
    let mut attachment = runtime.attach(again, Offsets::default()).await.expect("attach");
    assert_eq!(String::from_utf8_lossy(&read_until(&mut attachment.events, "ready").await), expected);
    runtime.destroy_container(handle).await.expect("destroy");
    for volume in [child, scratch, output, parent] {
        runtime.destroy_volume(volume).await.expect("destroy");
    }
}
