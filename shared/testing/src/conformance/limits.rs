//! Conformance tests of limits and of resource usage.

use std::time::{Duration, Instant};

use domain::workload::{Exit, Limits};
use runtime::{ContainerSpec, CurrentUsage, Ended, ProcessState, Runtime};

use super::{RuntimeExt, Subject, claims, exited, has, in_time, on_root, process, programs};

const MUCH: u64 = 128 << 20;
const MANY: u64 = 40;

/// Whether a test must check a limit.
fn must_check(subject: &impl Subject, runtime: &dyn Runtime, limit: &str) -> bool {
    if !claims(runtime, limit) {
        return false;
    }
    if !subject.keeps_limits() {
        eprintln!("not applicable: this worker is simulated and enforces no limits");
    }
    subject.keeps_limits()
}

/// A process that exceeds the memory limit of its container is killed. Without a limit, the same
/// process succeeds.
pub async fn memory_limit_applies_to_container(subject: impl Subject) {
    let runtime = subject.runtime();
    if !must_check(&subject, &*runtime, "limits-memory") {
        return;
    }
    let spec = on_root(&subject).await;
    assert_eq!(runtime.run(spec.clone(), process(&programs::allocate(MUCH))).await.ended, Some(exited(0)));
    let limits = Limits { memory_bytes: Some(MUCH / 4), ..Limits::default() };
    let spec = ContainerSpec { limits, ..on_root(&subject).await };
    let ended = runtime.run(spec, process(&programs::allocate(MUCH))).await.ended;
    let told = |exit| ended == Some(Ended::Exited { exit, stopped: false });
    // Without `exit-signals`, the end looks like that of any killed process.
    let killed = !has(&*runtime, "exit-signals") && told(Exit::Code(128 + 9));
    assert!(told(Exit::OutOfMemory) || killed, "{ended:?}");
}

/// A container cannot start more processes than its limit.
pub async fn process_limit_applies_to_container(subject: impl Subject) {
    let runtime = subject.runtime();
    if !must_check(&subject, &*runtime, "limits-pids") {
        return;
    }
    let all = runtime.run(on_root(&subject).await, process(&programs::fork(MANY))).await;
    assert_eq!(all.text().lines().count() as u64, MANY);
    let limits = Limits { pids: Some(MANY / 2), ..Limits::default() };
    let spec = ContainerSpec { limits, ..on_root(&subject).await };
    let some = runtime.run(spec, process(&programs::fork(MANY))).await;
    let started = some.text().lines().count() as u64;
    assert!((MANY / 4..=MANY / 2).contains(&started), "{some:?}");
}

/// A container gets no more processor time than its limit.
pub async fn cpu_limit_applies_to_container(subject: impl Subject) {
    let runtime = subject.runtime();
    if !must_check(&subject, &*runtime, "limits-cpu") {
        return;
    }
    let limits = Limits { cpu_millis: Some(100), ..Limits::default() };
    let handle = runtime.made(ContainerSpec { limits, ..on_root(&subject).await }).await;
    let before = Instant::now();
    let id = runtime.started(handle, process(&programs::compute(500_000))).await;
    assert_eq!(runtime.ended(id).await, exited(0));
    let took = before.elapsed();
    let Some(computed) = runtime.usage(id).await.expect("what it used").cpu_time else {
        eprintln!("not applicable: this worker does not report processor time");
        return;
    };
    assert!(computed * 3 < took, "{computed:?} of {took:?}");
}

/// The usage of a running container is measured, until its main process has ended.
pub async fn running_container_is_measured(subject: impl Subject) {
    let runtime = subject.runtime();
    let idle = runtime.made(on_root(&subject).await).await;
    let handle = runtime.made(on_root(&subject).await).await;
    let id = runtime.started(handle, process(&programs::hold(MUCH / 4))).await;
    let measure = async || {
        let mut usage = runtime.current_usage(&[handle, idle]).await.expect("usage");
        assert_eq!(usage.remove(&idle), None, "nothing runs in it");
        usage.remove(&handle)
    };
    let until_usage = async |what: &str, holds: &dyn Fn(CurrentUsage) -> bool| {
        in_time(what, async {
            while !measure().await.is_some_and(holds) {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        })
        .await;
    };
    let is_started = async || {
        in_time("the start", async {
            while runtime.process(id).await.expect("a process") == ProcessState::Starting {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        })
        .await;
    };
    is_started().await;
    // Host workers measure. Only they can look into ended containers.
    if claims(&*runtime, "exec-ended") {
        let holds = |usage: CurrentUsage| usage.memory_bytes >= Some(MUCH / 4) && usage.processes == Some(1);
        until_usage("one process that holds memory", &holds).await;
        let before = measure().await.expect("it runs");
        assert!(before.memory_bytes < Some(MUCH * 4), "{before:?}");
        let later = before.cpu_time.map(|time| time + Duration::from_millis(100));
        until_usage("processor time that is used", &|usage| usage.cpu_time >= later).await;
    }
    runtime.stop(id, Duration::ZERO).await.expect("stopped");
    runtime.ended(id).await;
    assert_eq!(measure().await, None, "its main process has ended");
}
