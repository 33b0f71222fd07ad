//! Containers in the network of another container.

use std::process::Command;
use std::sync::Arc;

use domain::workload::Network;
use domain::{ContainerHandle, ProcessId};
use runtime::{ContainerSpec, Offsets, ProcessRole, ProcessSpec, Runtime, RuntimeError};
use testing::conformance::{RuntimeExt, Subject, container, process, read_until, until};

use super::subject::HostSubject;

fn shell(script: &str) -> ProcessSpec {
    process(&["/bin/bash", "-c", script].map(str::to_owned))
}

fn in_network_of(other: ContainerHandle) -> ContainerSpec {
    ContainerSpec { network_of: Some(other), ..container() }
}

async fn script_output(runtime: &Arc<dyn Runtime>, spec: ContainerSpec, script: &str) -> String {
    let said = runtime.run(spec, shell(script)).await;
    format!("{}{}", said.text(), String::from_utf8_lossy(&said.stderr))
}

/// Makes a container whose main process runs a script and continues. Returns also its output.
async fn running(
    runtime: &Arc<dyn Runtime>,
    spec: ContainerSpec,
    script: &str,
) -> (ContainerHandle, ProcessId, String) {
    let handle = runtime.made(spec).await;
    let main = runtime.started(handle, shell(&format!("{script}\necho ready; exec sleep 1000"))).await;
    let mut attachment = runtime.attach(main, Offsets::default()).await.expect("attach");
    let said = read_until(&mut attachment.events, "ready\n").await;
    (handle, main, String::from_utf8_lossy(&said).replace("ready\n", ""))
}

const SHOW_NETWORK: &str =
    "readlink /proc/self/ns/net; echo /sys/class/net/*; cat /sys/class/net/*/address /etc/resolv.conf; ";

#[tokio::test]
async fn joined_container_has_interfaces_and_names_of_other() {
    let Some(subject) = HostSubject::new() else { return };
    let runtime = subject.runtime();
    let script = format!(
        "echo 192.0.2.7 database >> /etc/hosts; echo '# changed' >> /etc/resolv.conf; {SHOW_NETWORK}"
    );
    let (first, _, network) = running(&runtime, container(), &script).await;
    assert!(network.contains("/sys/class/net/eth0") && network.contains("# changed"), "{network}");

    let names = "getent ahostsv4 database | head -n 1; getent hosts $(hostname) | cut -d ' ' -f 1; ";
    // Without root, a process cannot usually listen on a low port.
    let port = "python3 -c 'import socket; socket.create_server((\"\", 80))' && echo bound";
    for (privileged, user) in [(false, None), (true, None), (false, Some("1000".to_owned()))] {
        let spec = ContainerSpec { privileged, user, ..in_network_of(first) };
        let found = script_output(&runtime, spec, &format!("{SHOW_NETWORK}{names}{port}")).await;
        let found = found.strip_prefix(&network).unwrap_or_else(|| panic!("{network} in {found}"));
        assert_eq!(
            found.split_whitespace().collect::<Vec<_>>(),
            ["192.0.2.7", "STREAM", "database", "127.0.1.1", "bound"]
        );
    }
}

#[tokio::test]
async fn network_of_every_kind_is_joined() {
    let Some(subject) = HostSubject::new() else { return };
    let runtime = subject.runtime();
    for network in [Network::None, Network::Host] {
        let spec = ContainerSpec { network, ..container() };
        let (first, _, shown) = running(&runtime, spec, "readlink /proc/self/ns/net").await;
        let spec = ContainerSpec { network, ..in_network_of(first) };
        assert_eq!(script_output(&runtime, spec, "readlink /proc/self/ns/net").await, shown, "{network:?}");
        let rejected = runtime.create_container(ContainerHandle::new(), in_network_of(first)).await;
        assert!(matches!(rejected, Err(RuntimeError::Unsupported(_))), "{rejected:?}");
    }
}

/// A process of the other container may put anything at these paths.
#[tokio::test]
async fn unusable_names_of_other_container_are_ignored() {
    let Some(subject) = HostSubject::new() else { return };
    let runtime = subject.runtime();
    for entry in [
        "mkfifo $file",
        "mkdir $file",
        "ln -s $file $file",
        "ln -s /proc/self/environ $file",
        "ln -s /proc/1/root/etc/passwd $file",
        "head -c 2000000 /dev/zero > $file",
        "true",
    ] {
        let script = format!("for file in /etc/hosts /etc/resolv.conf; do rm $file; {entry}; done");
        let (first, ..) = running(&runtime, container(), &script).await;
        let found = script_output(&runtime, in_network_of(first), "cat /etc/hosts").await;
        let lines = ["localhost", "127.0.1.1"];
        assert!(lines.iter().all(|line| found.contains(line)), "{entry}: {found}");
        assert!(found.len() < 4096 && !found.contains("root:"), "{entry}: {found}");
        runtime.destroy_container(first).await.expect("destroy");
    }
}

#[tokio::test]
async fn joined_network_ends_with_its_last_process() {
    let Some(subject) = HostSubject::new() else { return };
    let runtime = subject.runtime();
    let (first, main, network) = running(&runtime, container(), SHOW_NETWORK).await;
    let (second, second_main, _) = running(&runtime, in_network_of(first), "true").await;
    let interface = |process: ProcessId| {
        let name = format!("gantry{}", &process.uuid().simple().to_string()[23..]);
        let shown = Command::new("ip").args(["link", "show", &name]).output().expect("run ip");
        shown.status.success()
    };
    assert!(interface(main) && !interface(second_main), "a joined container needs no interface");
    runtime.destroy_container(first).await.expect("destroy");
    // A further process joins the same network.
    let further =
        runtime.started(second, ProcessSpec { role: ProcessRole::Exec, ..shell(SHOW_NETWORK) }).await;
    assert_eq!(runtime.read_output(further).await.text(), network);
    assert!(interface(main));
    runtime.stop(second_main, std::time::Duration::ZERO).await.expect("stop");
    runtime.ended(second_main).await;
    until("the end of the network", || !interface(main)).await;

    // A process that looks into the ended container needs no other container.
    let look = ProcessSpec { role: ProcessRole::Exec, ..shell("echo /sys/class/net/*") };
    let looking = ProcessId::new();
    testing::conformance::in_time("a start", async {
        while runtime.start(second, looking, look.clone()).await.is_err() {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    })
    .await;
    let found = runtime.read_output(looking).await;
    assert_eq!(found.text(), "/sys/class/net/eth0 /sys/class/net/lo\n");
}

#[tokio::test]
async fn local_names_stand_for_loopback() {
    let Some(subject) = HostSubject::new() else { return };
    let runtime = subject.runtime();
    let local_names = vec!["db".to_owned()];
    let named = ContainerSpec { local_names: local_names.clone(), ..container() };
    let script = "getent ahostsv4 db | head -n 1 | cut -d ' ' -f 1; grep -cw db /etc/hosts";
    let (first, _, found) = running(&runtime, named, script).await;
    assert_eq!(found, "127.0.0.1\n1\n");
    let joined = ContainerSpec { local_names, ..in_network_of(first) };
    assert_eq!(script_output(&runtime, joined, script).await, found);
}
