//! Conformance tests of containers that join the network of another container.

use std::sync::Arc;

use domain::{ContainerHandle, ProcessId};
use runtime::{ContainerSpec, Offsets, ProcessState, Runtime, RuntimeError};

use super::{RuntimeExt, Subject, claims, exited, on_root, process, programs, read_until};

/// A container in the network of another one.
async fn in_network_of(subject: &impl Subject, other: ContainerHandle) -> ContainerSpec {
    ContainerSpec { network_of: Some(other), ..on_root(subject).await }
}

/// Makes a container whose main process listens on a port of its loopback.
async fn listening(
    runtime: &Arc<dyn Runtime>,
    spec: ContainerSpec,
    port: u16,
) -> (ContainerHandle, ProcessId) {
    let handle = runtime.made(spec).await;
    let main = runtime.started(handle, process(&programs::listen(port))).await;
    let mut attachment = runtime.attach(main, Offsets::default()).await.expect("attach");
    read_until(&mut attachment.events, "ready").await;
    (handle, main)
}

/// Whether a process in such a container can connect to a port of its loopback.
async fn connects(runtime: &Arc<dyn Runtime>, spec: ContainerSpec, port: u16) -> bool {
    let output = runtime.run(spec, process(&programs::connect(port))).await;
    assert!([exited(0), exited(1)].map(Some).contains(&output.ended), "{output:?}");
    output.ended == Some(exited(0))
}

/// A container reaches the loopback of the container whose network it joins, also through a third
/// one. A container with a network of its own does not.
pub async fn networks_of_containers_are_joined(subject: impl Subject) {
    let runtime = subject.runtime();
    if !claims(&*runtime, "network-container") {
        return;
    }
    let (first, main) = listening(&runtime, on_root(&subject).await, 4101).await;
    assert!(!runtime.accepts_connections(main, 4102).await.expect("checked"), "nothing listens yet");
    let (second, _) = listening(&runtime, in_network_of(&subject, first).await, 4102).await;
    for port in [4101, 4102] {
        assert!(runtime.accepts_connections(main, port).await.expect("checked"), "{port}");
        assert!(connects(&runtime, in_network_of(&subject, second).await, port).await, "{port}");
        assert!(!connects(&runtime, on_root(&subject).await, port).await, "{port}");
    }
}

/// A network can be joined only within a team, and only while the main process of its container
/// runs.
pub async fn network_of_stopped_container_is_rejected(subject: impl Subject) {
    let runtime = subject.runtime();
    if !claims(&*runtime, "network-container") {
        return;
    }
    let unknown = ContainerHandle::new();
    let first = runtime.made(on_root(&subject).await).await;
    let spec = in_network_of(&subject, first).await;
    let foreign = ContainerSpec { team: "other".to_owned(), ..spec.clone() };
    for (spec, missing) in [(in_network_of(&subject, unknown).await, unknown), (foreign, first)] {
        let rejected = runtime.create_container(ContainerHandle::new(), spec).await;
        assert!(
            matches!(rejected, Err(RuntimeError::ContainerNotFound(it)) if it == missing),
            "{rejected:?}"
        );
    }

    let second = runtime.made(spec).await;
    let cannot_start = async || {
        let rejected = runtime.start(second, ProcessId::new(), process(&programs::exit(0))).await;
        assert!(
            matches!(rejected, Err(RuntimeError::ContainerNotRunning(it)) if it == first),
            "{rejected:?}"
        );
    };
    cannot_start().await;
    let main = runtime.started(first, process(&programs::exit(3))).await;
    assert_eq!(runtime.ended(main).await, exited(3));
    cannot_start().await;
    runtime.destroy_container(first).await.expect("destroy");
    cannot_start().await;
}

/// The destruction of a container ends neither the containers in its network nor the network.
pub async fn joined_network_outlives_its_container(subject: impl Subject) {
    let runtime = subject.runtime();
    if !claims(&*runtime, "network-container") {
        return;
    }
    let (first, _) = listening(&runtime, on_root(&subject).await, 4103).await;
    let (second, second_main) = listening(&runtime, in_network_of(&subject, first).await, 4104).await;
    let (third, _) = listening(&runtime, in_network_of(&subject, first).await, 4105).await;
    runtime.destroy_container(third).await.expect("destroy");
    assert!(connects(&runtime, in_network_of(&subject, first).await, 4103).await);

    runtime.destroy_container(first).await.expect("destroy");
    assert_eq!(runtime.process(second_main).await.expect("a state"), ProcessState::Started);
    assert!(connects(&runtime, in_network_of(&subject, second).await, 4104).await);
    assert!(!connects(&runtime, in_network_of(&subject, second).await, 4103).await);
}

/// A network can be joined after the replacement of the runtime.
pub async fn network_is_joined_after_reopening(mut subject: impl Subject) {
    let runtime = subject.runtime();
    if !claims(&*runtime, "network-container") {
        return;
    }
    let (first, _) = listening(&runtime, on_root(&subject).await, 4106).await;
    let waiting = runtime.made(in_network_of(&subject, first).await).await;
    drop(runtime);
    subject.reopen().await;

    let runtime = subject.runtime();
    let connecting = runtime.started(waiting, process(&programs::connect(4106))).await;
    assert_eq!(runtime.ended(connecting).await, exited(0));
}
