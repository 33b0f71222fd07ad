//! Network access of containers, and access to them.

use std::fs;
use std::io::Write;
use std::net::{SocketAddr, TcpListener};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddr, UnixListener};
use std::process::Command;
use std::sync::mpsc;
use std::time::Duration;

use domain::workload::{Network, OutputMode, Stdin};
use runtime::{ContainerSpec, Offsets, ProcessSpec, RuntimeError};
use runtime_gateway::host::{HostConfig, HostRuntime, Permission, Policy};
use testing::conformance::{RuntimeExt, Subject, container, process, read_until};

use super::subject::{HostSubject, config};

fn shell(script: &str) -> ProcessSpec {
    process(&["/bin/bash", "-c", script].map(str::to_owned))
}

async fn script_output(subject: &HostSubject, spec: ContainerSpec, script: &str) -> String {
    let said = subject.runtime().run(spec, shell(script)).await;
    format!("{}{}", said.text(), String::from_utf8_lossy(&said.stderr))
}

fn ip(line: &str) {
    let ran = Command::new("ip").args(line.split(' ')).output().expect("run ip");
    assert!(ran.status.success(), "ip {line}: {}", String::from_utf8_lossy(&ran.stderr));
}

/// Answers each connection with the address of its peer, until all have connected.
fn tell_addresses(listener: TcpListener) {
    std::thread::spawn(move || {
        while let Ok((mut connection, from)) = listener.accept() {
            let rank = if from.port() < 1024 { ", and root" } else { "" };
            let told = connection.write_all(format!("you are {}{rank}", from.ip()).as_bytes());
            told.expect("tell an address");
        }
    });
}

/// Another machine, connected by a cable. Its end and the end of this machine have addresses of
/// 198.51.100.0/24.
struct Outside {
    near: String,
    far: SocketAddr,
    /// Connects from the other machine to an address. Returns whether this succeeded.
    dial: mpsc::SyncSender<SocketAddr>,
    dialed: mpsc::Receiver<bool>,
}

impl Outside {
    fn new(number: u8) -> Self {
        let ((tell, told), (dial, to_dial), (tell_dialed, dialed)) =
            (mpsc::sync_channel(1), mpsc::sync_channel::<SocketAddr>(1), mpsc::sync_channel(1));
        let ((join, to_join), (go, gone)) = (mpsc::sync_channel(1), mpsc::sync_channel(1));
        let (near, far) =
            (format!("198.51.100.{}", number * 4 + 1), format!("198.51.100.{}", number * 4 + 2));
        let (address, router) = (far.clone(), near.clone());
        std::thread::spawn(move || {
            // SAFETY: only this thread enters the new namespace, and it ends with the test.
            unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNET) }
                .expect("a network of the other machine");
            join.send(rustix::thread::gettid().as_raw_nonzero()).expect("the test waits");
            gone.recv().expect("a cable");
            ip(&format!("addr add {address}/30 dev far{number}"));
            ip(&format!("link set far{number} up"));
            ip(&format!("route add default via {router}"));
            let listener = TcpListener::bind((address.as_str(), 0)).expect("listen");
            tell.send(listener.local_addr().expect("an address")).expect("the test waits");
            // A new thread is in the network of its creator.
            tell_addresses(listener);
            for to in to_dial {
                let connected = std::net::TcpStream::connect_timeout(&to, Duration::from_secs(2)).is_ok();
                if tell_dialed.send(connected).is_err() {
                    return;
                }
            }
        });
        let thread = to_join.recv().expect("a network");
        ip(&format!("link add near{number} type veth peer name far{number} netns {thread}"));
        ip(&format!("addr add {near}/30 dev near{number}"));
        ip(&format!("link set near{number} up"));
        go.send(()).expect("the other machine waits");
        let far = told.recv().expect("an address");
        Self { near, far, dial, dialed }
    }

    fn reaches(&self, address: SocketAddr) -> bool {
        self.dial.send(address).expect("the other machine lives");
        self.dialed.recv().expect("an answer")
    }
}

/// A script that connects and prints the received bytes.
fn connect(to: SocketAddr) -> String {
    format!("exec 3<>/dev/tcp/{}/{} && cat <&3 && echo; ", to.ip(), to.port())
}

#[tokio::test]
async fn private_network_uses_address_of_machine() {
    let Some(subject) = HostSubject::new() else { return };
    let outside = Outside::new(1);
    let heard = script_output(&subject, container(), &connect(outside.far)).await;
    assert_eq!(heard, format!("you are {}\n", outside.near));

    // Some servers trust low ports as root's.
    let low = format!(
        "python3 -c 'import socket; print(socket.create_connection((\"{}\", {}), source_address=(\"\", 701)).recv(99).decode())'",
        outside.far.ip(),
        outside.far.port()
    );
    assert_eq!(script_output(&subject, container(), &low).await, format!("you are {}\n", outside.near));
}

#[tokio::test]
async fn private_network_has_separate_interfaces() {
    let Some(subject) = HostSubject::new() else { return };
    let script = "cd /sys/class/net && echo * && cat lo/flags && ls -d /proc/sys/net/ipv4/conf/*";
    let found = script_output(&subject, container(), script).await;
    assert!(found.starts_with("eth0 lo\n0x9\n"), "its loopback is up: {found}");
    assert_eq!(found.matches("/conf/").count(), 4, "all, default, eth0, lo: {found}");
}

#[tokio::test]
async fn private_network_does_not_reach_the_machine() {
    let Some(subject) = HostSubject::new() else { return };
    let outside = Outside::new(2);
    let everywhere = TcpListener::bind("0.0.0.0:0").expect("listen");
    let port = everywhere.local_addr().expect("an address").port();
    tell_addresses(everywhere);
    let loopback = TcpListener::bind("127.0.0.1:0").expect("listen");
    let loopback_port = loopback.local_addr().expect("an address").port();
    tell_addresses(loopback);
    let abstract_name = format!("gantry-test-{}", domain::ProcessId::new());
    let address = UnixAddr::from_abstract_name(&abstract_name).expect("a name");
    let _listener = UnixListener::bind_addr(&address).expect("listen");

    let mut script = String::new();
    for (host, port) in [("127.0.0.1", loopback_port), (&outside.near, port), ("169.254.213.1", port)] {
        script += &format!("(exec 3<>/dev/tcp/{host}/{port}) && echo reached {host}; ");
    }
    let unix = format!(
        "import socket; socket.socket(socket.AF_UNIX).connect(\"\\0{abstract_name}\"); print(\"reached\")"
    );
    script += &format!("python3 -c '{unix}'");
    let found = script_output(&subject, container(), &script).await;
    assert!(!found.contains("reached"), "{found}");
    assert!(found.contains(&format!("127.0.0.1/{loopback_port}: Connection refused")), "{found}");
    assert!(found.contains("ConnectionRefusedError"), "no abstract socket: {found}");
    for host in [&outside.near, "169.254.213.1"] {
        let rejected = format!("{host}/{port}: No route to host");
        assert!(found.contains(&rejected), "rejected at once, not lost: {found}");
    }

    // With the network of the machine, the same script reaches everything. So the test above can
    // fail.
    let spec = ContainerSpec { network: Network::Host, ..container() };
    let found = script_output(&subject, spec, &script).await;
    for host in ["127.0.0.1", &outside.near] {
        assert!(found.contains(&format!("reached {host}\n")), "{found}");
    }
    assert!(found.contains("reached\n"), "the abstract socket: {found}");
}

#[tokio::test]
async fn container_connections_are_limited() {
    let Some(subject) = HostSubject::new() else { return };
    let outside = Outside::new(5);
    let most = fs::read_to_string("/proc/sys/net/netfilter/nf_conntrack_max").expect("the kernel's limit");
    let share = most.trim().parse::<u32>().expect("a number") / 32;
    // Each datagram to another port is a separate connection for the kernel.
    let flood = format!(
        "python3 -c 'import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\nfor i in range({}): s.sendto(b\"\", (\"{}\", 1 + i % 65535))'; ",
        share + 100,
        outside.far.ip()
    );
    let found = script_output(&subject, container(), &(flood + &connect(outside.far))).await;
    assert!(found.contains("No route to host"), "all of its share is taken: {found}");
    let heard = script_output(&subject, container(), &connect(outside.far)).await;
    assert_eq!(heard, format!("you are {}\n", outside.near), "another container has its own share");
}

#[tokio::test]
async fn private_networks_do_not_reach_each_other() {
    let Some(subject) = HostSubject::new() else { return };
    let outside = Outside::new(3);
    let runtime = subject.runtime();
    let handle = runtime.made(container()).await;
    // The server is reachable from inside its container.
    let serve = "import socket\ns = socket.create_server((\"\", 4242))\nprint(socket.gethostbyname(\"localhost\"))\nprobe = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\nprobe.connect((\"198.51.100.1\", 1))\nsocket.create_connection((probe.getsockname()[0], 4242))\nprint(\"reached\", flush=True)\nopen(0).read()";
    let spec = ProcessSpec {
        stdin: Stdin::Attached,
        output: OutputMode::Attached,
        ..process(&["/usr/bin/python3", "-c", serve].map(str::to_owned))
    };
    let process = runtime.started(handle, spec).await;
    let mut attachment = runtime.attach(process, Offsets::default()).await.expect("attach");
    read_until(&mut attachment.events, "127.0.0.1\nreached").await;
    // The machine has a route to the container.
    let routes =
        Command::new("ip").args(["-4", "route", "show", "proto", "static"]).output().expect("run ip");
    let routes = String::from_utf8_lossy(&routes.stdout).into_owned();
    let name = format!("gantry{}", &process.uuid().simple().to_string()[23..]);
    let line =
        routes.lines().find(|line| line.contains(&name)).unwrap_or_else(|| panic!("{name} in {routes}"));
    let address: SocketAddr =
        format!("{}:4242", line.split(' ').next().expect("an address")).parse().expect("an address");

    let found = script_output(&subject, container(), &connect(address)).await;
    assert!(found.contains("No route to host"), "{found}");
    assert!(!outside.reaches(address), "another machine reaches it through this one");
    let refused = std::net::TcpStream::connect(address).expect_err("a process of the machine reaches it");
    assert_eq!(refused.kind(), std::io::ErrorKind::HostUnreachable, "{refused}");
    runtime.destroy_container(handle).await.expect("destroy");
}

#[tokio::test]
async fn flushed_filter_is_restored() {
    if HostSubject::new().is_none() {
        return;
    }
    // A separate pool, so that other tests do not lose their filter.
    let dir = tempfile::tempdir().expect("a directory");
    let pool = "10.214.7.0/24";
    let policy = Policy::allowing([Permission::HostImage]).with_network_pool(pool.parse().expect("a pool"));
    let runtime = HostRuntime::open(HostConfig { policy, ..config(dir.path()) }).expect("open");
    let keeps = runtime.clone().look_after_containers();
    let runtime: std::sync::Arc<dyn runtime::Runtime> = runtime;
    let table = ["inet", "gantry-10-214-7-0-24"];
    let nft = |command: &str| Command::new("nft").args([command, "table"]).args(table).output();
    let Ok(removed) = nft("delete") else {
        eprintln!("not applicable: no nft");
        return;
    };
    assert!(removed.status.success(), "{}", String::from_utf8_lossy(&removed.stderr));
    let said =
        runtime.run(container(), shell("ls /proc/sys/net/ipv6/conf/eth0; cat /proc/net/if_inet6")).await;
    assert!(!said.text().contains("fe80"), "the container has an IPv6 address: {said:?}");
    let there = nft("list").expect("run nft");
    let text = String::from_utf8_lossy(&there.stdout);
    assert!(text.contains("10.214.7.0/24") && text.matches("reject").count() >= 4, "{text}");

    // Running containers get the filter back soon.
    let running = runtime.made(container()).await;
    runtime.started(running, shell("exec sleep 600")).await;
    nft("delete").expect("run nft");
    let is_there = async {
        while !nft("list").is_ok_and(|listed| listed.status.success()) {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::select! {
        () = keeps => panic!("the filter task runs forever"),
        made = tokio::time::timeout(Duration::from_secs(30), is_there) => made.expect("it is made again"),
    }
    _ = nft("delete");
    runtime.destroy_container(running).await.expect("destroy");
}

#[tokio::test]
async fn network_none_has_only_loopback() {
    let Some(subject) = HostSubject::new() else { return };
    let spec = ContainerSpec { network: Network::None, ..container() };
    let script = "cd /sys/class/net && echo * && cat lo/flags && grep -c . /proc/net/route";
    let found = script_output(&subject, spec, script).await;
    assert_eq!(found, "lo\n0x9\n1\n", "the loopback is up, and there is no route");
    let outside = fs::read_dir("/sys/class/net").expect("our own network").count();
    let spec = ContainerSpec { network: Network::Host, ..container() };
    let inside = script_output(&subject, spec, "ls /sys/class/net | wc -l").await;
    assert!(inside.trim().parse::<usize>().is_ok_and(|inside| inside >= outside.min(2)), "{inside}");
}

#[tokio::test]
async fn policy_rejects_forbidden_requests() {
    if HostSubject::new().is_none() {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let policy = Policy::allowing([]);
    let runtime = HostRuntime::open(HostConfig { policy, ..config(dir.path()) }).expect("open");
    let capabilities = runtime::Runtime::capabilities(&*runtime).clone();
    assert_eq!(capabilities.image_kinds, ["artifact"]);
    for feature in ["privileged", "network-host"] {
        assert!(!capabilities.features.iter().any(|claimed| claimed == feature), "{feature}");
    }
    for spec in [
        container(),
        ContainerSpec { privileged: true, ..container() },
        ContainerSpec { network: Network::Host, ..container() },
    ] {
        let made = runtime::Runtime::create_container(&*runtime, domain::ContainerHandle::new(), spec).await;
        assert!(
            matches!(&made, Err(RuntimeError::Unsupported(why)) if why.contains("does not allow")),
            "{made:?}"
        );
    }
    let allowing = Policy::allowing([Permission::HostImage]);
    drop(runtime);
    let dir = tempfile::tempdir().expect("a directory");
    let runtime = HostRuntime::open(HostConfig { policy: allowing, ..config(dir.path()) }).expect("open");
    let handle = domain::ContainerHandle::new();
    runtime::Runtime::create_container(&*runtime, handle, container()).await.expect("allowed");
    runtime::Runtime::destroy_container(&*runtime, handle).await.expect("destroy");
}

/// A name server that answers every query for an address with 192.0.2.42.
pub(super) const NAME_SERVER: &str = r#"
import socket, sys
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("127.0.0.153", 53))
print("ready", flush=True)
while True:
    question, asker = server.recvfrom(4096)
    end = 12
    while question[end]:
        end += question[end] + 1
    end += 5
    kind = question[end - 4:end - 2]
    answers = b"\xc0\x0c\x00\x01\x00\x01\x00\x00\x00\x3c\x00\x04\xc0\x00\x02\x2a" if kind == b"\x00\x01" else b""
    counts = b"\x00\x01" + (b"\x00\x01" if answers else b"\x00\x00") + b"\x00\x00\x00\x00"
    server.sendto(question[:2] + b"\x81\x80" + counts + question[12:end] + answers, asker)
"#;

/// Runs the test below in a view of the machine whose name server listens on its loopback.
#[test]
fn local_name_server_resolves_names() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("not applicable: this process is not root");
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("resolv.conf");
    fs::write(&file, "search example.org\nnameserver 127.0.0.153\n").expect("write");
    let server = directory.path().join("server.py");
    fs::write(&server, NAME_SERVER).expect("write");
    // In a separate network, because gateways of one machine share the resolver's address.
    let script = "ip link set lo up && python3 \"$2\" > \"$1.ready\" & \
        server=$!; until [ -s \"$1.ready\" ]; do sleep 0.05; done; \
        mount --bind \"$1\" /etc/resolv.conf; shift 2; \"$@\"; code=$?; kill $server; exit $code";
    let found = Command::new("unshare")
        .args(["--mount", "--net", "sh", "-c", script, "sh"])
        .arg(&file)
        .arg(&server)
        .arg(std::env::current_exe().expect("this test"))
        .args(["--exact", "--nocapture", "--ignored"])
        .arg(format!("{}::name_is_resolved", module_path!().split_once("::").expect("a crate").1))
        .output()
        .expect("run unshare");
    let text = String::from_utf8_lossy(&found.stdout);
    assert!(
        found.status.success() && text.contains("1 passed"),
        "{text}{}",
        String::from_utf8_lossy(&found.stderr)
    );
}

/// The part of the test above that runs in that view.
#[tokio::test]
#[ignore = "run by local_name_server_resolves_names"]
async fn name_is_resolved() {
    let Some(subject) = HostSubject::new() else { return };
    let script = "cat /etc/resolv.conf; getent ahostsv4 some.name.test";
    let found = tokio::select! {
        found = script_output(&subject, container(), script) => found,
        () = subject.host().look_after_containers() => panic!("the background tasks run forever"),
    };
    assert!(found.starts_with("nameserver 169.254.213.1\nsearch example.org\n"), "{found}");
    assert!(found.contains("192.0.2.42"), "{found}");
}
