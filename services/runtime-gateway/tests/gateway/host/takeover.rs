//! Takeover of a state directory whose holder is frozen. In these tests the holder continues to
//! run.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use domain::workload::FailureReason;
use domain::{GatewayInstance, ProcessId, VolumeHandle};
use runtime::{Ended, ProcessSpec, ProcessState, Runtime, RuntimeError, VolumeSource};
use runtime_gateway::host::{HostConfig, HostRuntime};
use testing::conformance::{self, RuntimeExt, container, in_time, until};

use super::subject::config;

fn shell(script: &str) -> ProcessSpec {
    conformance::process(&["/bin/sh", "-c", script].map(str::to_owned))
}

/// Converts a runtime for the helpers of the conformance suite.
fn as_dyn(runtime: &Arc<HostRuntime>) -> Arc<dyn Runtime> {
    runtime.clone()
}

/// Destroys the contents of a directory through its present holder.
async fn clean(runtime: Arc<HostRuntime>) {
    let held = runtime.list().await.expect("list");
    for container in held.containers {
        runtime.destroy_container(container).await.expect("destroy a container");
    }
    for volume in held.volumes.into_iter().rev() {
        runtime.destroy_volume(volume).await.expect("destroy a volume");
    }
}

/// Creates a temporary directory, if this process may run containers.
fn place() -> Option<tempfile::TempDir> {
    if !rustix::process::geteuid().is_root() {
        eprintln!("not applicable: this process is not root");
        return None;
    }
    Some(tempfile::tempdir().expect("a directory"))
}

async fn wait_until_started(runtime: &HostRuntime, process: ProcessId) {
    in_time("the start", async {
        while !matches!(runtime.process(process).await, Ok(ProcessState::Started)) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
}

/// A supervisor that runs `first` before it starts.
fn slow(dir: &Path, first: &str) -> HostConfig {
    let own = config(dir);
    let script = dir.join("supervisor.sh");
    let text = format!("#!/bin/sh\n{first}\nexec {} \"$@\"\n", own.supervisor.display());
    fs::write(&script, text).expect("a script");
    fs::set_permissions(&script, fs::Permissions::from_mode(0o700)).expect("it may be run");
    HostConfig { supervisor: script, ..own }
}

#[tokio::test]
async fn only_gateway_that_has_ended_is_named() {
    let Some(dir) = place() else { return };
    let [one, two, three, four] = [(); 4].map(|()| GatewayInstance::new());
    let first = HostRuntime::open(config(dir.path())).expect("open");
    assert_eq!(first.record_gateway(one).await.expect("recorded"), None);
    drop(first);
    let second = HostRuntime::open(config(dir.path())).expect("open");
    assert_eq!(second.record_gateway(two).await.expect("recorded"), Some(one));
    assert_eq!(second.record_gateway(two).await.expect("recorded"), Some(one), "it registers again");

    let third = HostRuntime::take_over(config(dir.path())).expect("taken over");
    assert_eq!(third.record_gateway(three).await.expect("recorded"), None, "the second may still run");
    let refused = second.record_gateway(two).await;
    assert!(matches!(refused, Err(RuntimeError::TakenOver(_))), "{refused:?}");
    drop((second, third));

    // A file that cannot be written prevents no registration, as on a full disk.
    let file = config(dir.path()).state_dir.join("gateway");
    assert_eq!(fs::read_to_string(&file).expect("there"), three.to_string());
    fs::remove_file(&file).expect("removed");
    fs::create_dir(&file).expect("made");
    let fourth = HostRuntime::open(config(dir.path())).expect("open");
    assert_eq!(fourth.record_gateway(four).await.expect("registered"), None);
}

#[tokio::test]
async fn processes_continue_and_old_holder_is_inactive() {
    let Some(dir) = place() else { return };
    let old = HostRuntime::open(config(dir.path())).expect("open");
    let volume = VolumeHandle::new();
    old.create_volume(volume, VolumeSource::Empty).await.expect("a volume");
    let handle = as_dyn(&old).made(container()).await;
    let process = as_dyn(&old).started(handle, shell("sleep 1000")).await;
    wait_until_started(&old, process).await;

    let new = HostRuntime::take_over(config(dir.path())).expect("taken over");
    in_time("the news", old.superseded()).await;
    assert!(HostRuntime::open_if_free(config(dir.path())).expect("looked").is_none());
    assert!(matches!(new.process(process).await, Ok(ProcessState::Started)));

    let refused = |result: Result<(), RuntimeError>| {
        assert!(result.as_ref().is_err_and(|error| error.to_string().contains("taken over")), "{result:?}");
    };
    refused(old.stop(process, Duration::ZERO).await);
    refused(old.destroy_container(handle).await);
    refused(old.destroy_volume(volume).await);
    refused(old.create_volume(VolumeHandle::new(), VolumeSource::Empty).await);
    refused(old.start(handle, ProcessId::new(), shell("true")).await);
    refused(old.process(process).await.map(|_| ()));
    assert!(matches!(new.process(process).await, Ok(ProcessState::Started)), "the process runs");
    drop(old);
    assert!(
        HostRuntime::open_if_free(config(dir.path())).expect("looked").is_none(),
        "the new runtime holds the directory"
    );

    new.stop(process, Duration::ZERO).await.expect("stop");
    as_dyn(&new).ended(process).await;
    clean(new).await;
}

#[tokio::test]
async fn unfinished_start_is_revoked_and_can_be_repeated() {
    let Some(dir) = place() else { return };
    let go = dir.path().join("go");
    let wait = format!("while [ ! -e {} ]; do sleep 0.02; done", go.display());
    let old = HostRuntime::open(slow(dir.path(), &wait)).expect("open");
    let handle = as_dyn(&old).made(container()).await;
    let process = as_dyn(&old).started(handle, shell("echo once")).await;
    assert!(matches!(old.process(process).await, Ok(ProcessState::Starting)));

    let new = HostRuntime::take_over(config(dir.path())).expect("taken over");
    let gone = new.process(process).await;
    assert!(matches!(gone, Err(RuntimeError::ProcessNotFound(_))), "{gone:?}");
    new.start(handle, process, shell("echo once")).await.expect("the process can be started again");
    // The supervisor of the old runtime continues, and finds no intent.
    fs::write(&go, "").expect("go");
    let output = as_dyn(&new).read_output(process).await;
    assert_eq!(output.text(), "once\n");
    clean(new).await;
}

#[tokio::test]
async fn supervisor_of_replaced_holder_starts_nothing() {
    let Some(dir) = place() else { return };
    let (go, began) = (dir.path().join("go"), dir.path().join("began"));
    let wait = format!("touch {}; while [ ! -e {} ]; do sleep 0.02; done", began.display(), go.display());
    let old = HostRuntime::open(slow(dir.path(), &wait)).expect("open");
    let handle = as_dyn(&old).made(container()).await;
    let process = as_dyn(&old).started(handle, shell("true")).await;
    until("the supervisor", || began.exists()).await;

    // Another runtime has just taken the directory over, and has not revoked intents yet.
    let lock = dir.path().join("state/lock");
    let name = fs::read(&lock).expect("a name");
    fs::write(&lock, "another").expect("a name");
    fs::write(&go, "").expect("go");
    let files = dir.path().join(format!("state/containers/{handle}/processes/{process}"));
    let locked = || fs::File::open(files.join("alive")).expect("there").try_lock_shared().is_err();
    until("the end of the supervisor", || !locked()).await;
    assert!(files.join("intent").exists() && !files.join("started").exists());

    fs::write(&lock, name).expect("a name");
    let ended = in_time("the end", old.wait(process)).await.expect("the process ended");
    assert!(
        matches!(&ended, Ended::NotStarted(failure) if failure.reason == FailureReason::StartFailed),
        "{ended:?}"
    );
    clean(old).await;
}

#[tokio::test]
async fn workers_may_share_runtime_dir() {
    let Some(dir) = place() else { return };
    let old = HostRuntime::open(config(dir.path())).expect("open");
    let handle = as_dyn(&old).made(container()).await;
    let process = as_dyn(&old).started(handle, shell("sleep 1000")).await;
    wait_until_started(&old, process).await;

    let other = HostConfig { state_dir: dir.path().join("other"), ..config(dir.path()) };
    let other = HostRuntime::open(other).expect("open another worker");
    let new = HostRuntime::take_over(config(dir.path())).expect("taken over");
    new.stop(process, Duration::ZERO).await.expect("stop the process");
    as_dyn(&new).ended(process).await;
    clean(other).await;
    clean(new).await;
}
