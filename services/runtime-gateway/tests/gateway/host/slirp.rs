//! Networks of an ordinary user, in the view of a machine that [`super::ordinary_user`] makes.

use std::fs;
use std::io::Write;
use std::net::TcpListener;
use std::path::PathBuf;
use std::sync::Arc;

use domain::workload::Network;
use runtime::{ContainerSpec, ProcessSpec, Runtime};
use testing::conformance::{RuntimeExt, Subject, container, process, until};

use super::subject::HostSubject;

/// The other machine, and a container on a bridge of this machine. Both listen on port 7.
const OUTSIDE: &str = "198.51.100.2";
const ON_BRIDGE: &str = "172.30.0.2";

fn shell(script: &str) -> ProcessSpec {
    process(&["/bin/bash", "-c", script].map(str::to_owned))
}

fn private() -> ContainerSpec {
    ContainerSpec { network: Network::Private, ..container() }
}

async fn script_output(runtime: &Arc<dyn Runtime>, script: &str) -> String {
    let said = runtime.run(private(), shell(script)).await;
    format!("{}{}", said.text(), String::from_utf8_lossy(&said.stderr))
}

/// A script that connects and prints the received bytes.
fn connect(host: &str, port: u16) -> String {
    format!("exec 3<>/dev/tcp/{host}/{port} && cat <&3; ")
}

/// Listens at every address of this machine. Returns the port.
fn listen() -> u16 {
    let listener = TcpListener::bind("0.0.0.0:0").expect("listen");
    let port = listener.local_addr().expect("an address").port();
    std::thread::spawn(move || {
        while let Ok((mut connection, _)) = listener.accept() {
            connection.write_all(b"reached\n").expect("write");
        }
    });
    port
}

#[tokio::test]
#[ignore = "run by networks_of_ordinary_user_are_private"]
async fn other_machine_sees_address_of_this_machine() {
    let Some(subject) = HostSubject::new() else { return };
    let runtime = subject.runtime();
    let said = script_output(&runtime, &format!("{}ls /sys/class/net", connect(OUTSIDE, 7))).await;
    assert_eq!(said, "you are 198.51.100.1\neth0\nlo\n");
    let said = script_output(&runtime, "cat /proc/net/if_inet6 /proc/sys/net/ipv4/ping_group_range").await;
    assert!(!said.contains("eth0") && said.ends_with("0\t0\n"), "no IPv6 address: {said}");
}

#[tokio::test]
#[ignore = "run by networks_of_ordinary_user_are_private"]
async fn addresses_of_this_machine_are_rejected() {
    let Some(subject) = HostSubject::new() else { return };
    let runtime = subject.runtime();
    let port = listen();
    let machine = ["198.51.100.1", "172.30.0.1", "10.213.0.1", "10.213.0.2", "10.213.0.3", "169.254.169.254"];
    let targets = machine.map(|host| (host, port)).into_iter().chain([(ON_BRIDGE, 7)]);
    for (host, port) in targets {
        let said = script_output(&runtime, &connect(host, port)).await;
        assert!(said.contains("No route to host"), "rejected at once, not lost: {host}: {said}");
    }
    let own = script_output(&runtime, &connect("127.0.0.1", port)).await;
    assert!(own.contains("Connection refused"), "{own}");
    for host in ["127.0.0.1", "198.51.100.1"] {
        let reached = std::net::TcpStream::connect((host, port));
        assert!(reached.is_ok(), "without a filter, {host} is reached: {reached:?}");
    }
}

#[tokio::test]
#[ignore = "run by networks_of_ordinary_user_are_private"]
async fn later_addresses_of_this_machine_are_rejected() {
    let Some(subject) = HostSubject::new() else { return };
    let runtime = subject.runtime();
    let port = listen();
    let handle = runtime.made(private()).await;
    // From then on, the container tries to connect. It succeeds until the supervisor has followed.
    let script = format!(
        "until [ -e /tmp/go ]; do sleep 0.01; done; until ({}) 2>&1 | grep 'No route'; do sleep 0.01; done",
        connect("203.0.113.7", port)
    );
    let main = runtime.started(handle, shell(&script)).await;
    let directory = PathBuf::from(std::env::var_os("TMPDIR").expect("the directory of the tests"));
    fs::write(directory.join("move"), "").expect("write");
    let is_there = || std::net::TcpStream::connect(("203.0.113.7", port)).is_ok();
    until("the new address", is_there).await;
    let go = runtime::ProcessSpec { role: runtime::ProcessRole::Exec, ..shell("touch /tmp/go") };
    let touched = runtime.started(handle, go).await;
    runtime.read_output(touched).await;
    let said = runtime.read_output(main).await;
    assert!(said.text().contains("No route to host"), "{}", said.text());
    runtime.destroy_container(handle).await.expect("destroy");
}

#[tokio::test]
#[ignore = "run by networks_of_ordinary_user_are_private"]
async fn name_server_on_loopback_resolves_names() {
    let Some(subject) = HostSubject::new() else { return };
    let script = "cat /etc/resolv.conf; getent ahostsv4 some.name.test";
    let said = script_output(&subject.runtime(), script).await;
    assert!(said.starts_with("nameserver 10.213.0.3\n") && said.contains("192.0.2.42"), "{said}");
}

/// The programs that connect networks for supervisors of this test.
fn programs(subject: &HostSubject) -> Vec<u32> {
    let ids = fs::read_dir("/proc")
        .expect("/proc")
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    let parent = |pid: u32| -> Option<u32> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let rest = stat.strip_prefix(&format!("{pid} (slirp4netns) "))?;
        rest.split(' ').nth(1)?.parse().ok()
    };
    let supervisors = supervisors(subject);
    ids.filter(|pid| parent(*pid).is_some_and(|parent| supervisors.contains(&parent))).collect()
}

/// The process ids of all supervisors of this test.
fn supervisors(subject: &HostSubject) -> Vec<u32> {
    let entries =
        |path: PathBuf| fs::read_dir(path).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path()));
    let processes = entries(subject.dir.path().join("state/containers"))
        .flat_map(|container| entries(container.join("processes")));
    processes
        .filter_map(|process| fs::read_to_string(process.join("alive")).ok()?.trim().parse().ok())
        .collect()
}

fn is_alive(pid: u32) -> bool {
    fs::exists(format!("/proc/{pid}")).expect("/proc")
}

#[tokio::test]
#[ignore = "run by networks_of_ordinary_user_are_private"]
async fn program_ends_with_its_container() {
    let Some(subject) = HostSubject::new() else { return };
    let runtime = subject.runtime();
    let handle = runtime.made(private()).await;
    let id = runtime.started(handle, shell("read line < /dev/zero; sleep 1000")).await;
    until("the start of the program", || programs(&subject).len() == 1).await;
    let program = programs(&subject)[0];
    runtime.stop(id, std::time::Duration::ZERO).await.expect("stop");
    runtime.read_output(id).await;
    until("the end of the program", || !is_alive(program)).await;
    runtime.destroy_container(handle).await.expect("destroy");
}

#[tokio::test]
#[ignore = "run by networks_of_ordinary_user_are_private"]
async fn program_ends_with_killed_supervisor() {
    let Some(subject) = HostSubject::new() else { return };
    let runtime = subject.runtime();
    let handle = runtime.made(private()).await;
    runtime.started(handle, shell("sleep 1000")).await;
    until("the start of the program", || programs(&subject).len() == 1).await;
    let (program, supervisor) = (programs(&subject)[0], supervisors(&subject)[0]);
    let pid = i32::try_from(supervisor).ok().and_then(rustix::process::Pid::from_raw).expect("a process");
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).expect("kill");
    until("the end of the program", || !is_alive(program)).await;
    runtime.destroy_container(handle).await.expect("destroy");
}
