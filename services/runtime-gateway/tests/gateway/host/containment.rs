//! Attacks from inside a container, by its root user.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use domain::workload::{Exit, OutputMode, Stdin};
use runtime::{ContainerSpec, Ended, Offsets, ProcessSpec, Runtime};
use runtime_gateway::host::{HostConfig, HostRuntime, Permission, Policy};
use rustix::fs::{CWD, FileType, Mode};
use testing::conformance::{RuntimeExt, Subject, container, directory, mount, process, read_until};

use super::subject::{HostSubject, config};

fn shell(script: &str) -> ProcessSpec {
    process(&["/bin/sh", "-c", script].map(str::to_owned))
}

/// Runs a script. Returns its output, followed by its errors.
async fn script_output(subject: &HostSubject, spec: ContainerSpec, script: &str) -> String {
    let said = subject.runtime().run(spec, shell(script)).await;
    format!("{}{}", said.text(), String::from_utf8_lossy(&said.stderr))
}

/// Creates a device node of the kernel log, which root of the machine may open.
fn make_node(at: &Path) {
    let device = rustix::fs::makedev(1, 11);
    rustix::fs::mknodat(CWD, at, FileType::CharacterDevice, Mode::from_raw_mode(0o666), device)
        .expect("make a node");
}

#[tokio::test]
async fn devices_cannot_be_made_or_opened() {
    let Some(subject) = HostSubject::new() else { return };
    let runtime = subject.runtime();
    let volume = runtime.volume().await;
    let contents = directory(&*runtime, volume).await;
    make_node(&contents.join("kmsg"));
    // A child is mounted separately.
    let child = domain::VolumeHandle::new();
    let source = runtime::VolumeSource::CopyOnWrite { parent: volume };
    runtime.create_volume(child, source).await.expect("a child");
    let mounts = vec![mount(volume, "/plain", false), mount(child, "/child", false)];
    let spec = ContainerSpec { mounts, ..container() };
    let script = "for at in /var/tmp /dev /plain /child /tmp /run; do mknod $at/block b 7 0 && echo made; done; \
        for node in /plain/kmsg /child/kmsg; do (: < $node) && echo opened; done; \
        (: < /dev/zero) && (: > /dev/null) && (: < /dev/urandom) && echo usual";
    let said = script_output(&subject, spec, script).await;
    assert!(said.starts_with("usual\n"), "{said}");
    assert_eq!(said.matches("Operation not permitted").count(), 6, "{said}");
    assert_eq!(said.matches("ermission denied").count(), 2, "{said}");
}

#[tokio::test]
async fn root_and_volumes_are_mounted_nodev_and_nosuid() {
    let Some(subject) = HostSubject::new() else { return };
    let runtime = subject.runtime();
    let (volume, child) = (runtime.volume().await, domain::VolumeHandle::new());
    let source = runtime::VolumeSource::CopyOnWrite { parent: volume };
    runtime.create_volume(child, source).await.expect("a child");
    let mounts = vec![mount(volume, "/plain", false), mount(child, "/child", true)];
    let spec = ContainerSpec { mounts, ..container() };
    let table = script_output(&subject, spec, "cat /proc/self/mountinfo").await;
    for line in table.lines() {
        let fields: Vec<_> = line.split(' ').collect();
        let [at, options] = [fields[4], fields[5]];
        // Mounts below these paths belong to the kernel, and have separate tests.
        if ["/proc", "/sys", "/dev"].iter().any(|own| Path::new(at).starts_with(own)) {
            continue;
        }
        for option in ["nosuid", "nodev"] {
            assert!(options.split(',').any(|given| given == option), "{option} is missing: {line}");
        }
    }
    for at in ["/", "/plain", "/child", "/tmp", "/run"] {
        assert!(table.lines().any(|line| line.split(' ').nth(4) == Some(at)), "{at} is in {table}");
    }
}

/// The control group with the device policy of a process.
fn device_group(process: domain::ProcessId) -> Option<PathBuf> {
    let name = format!("gantry-{process}");
    let roots = ["/sys/fs/cgroup/devices", "/sys/fs/cgroup"].map(|root| Path::new(root).join(&name));
    roots.into_iter().find(|group| group.join("cgroup.procs").exists())
}

#[tokio::test]
async fn device_policy_holds_for_all_in_the_group() {
    let Some(subject) = HostSubject::new() else { return };
    let runtime = subject.runtime();
    let node = subject.dir.path().join("kmsg");
    make_node(&node);
    for privileged in [false, true] {
        let handle = runtime.made(ContainerSpec { privileged, ..container() }).await;
        let spec = ProcessSpec {
            stdin: Stdin::Attached,
            output: OutputMode::Attached,
            ..shell("echo ready; read word")
        };
        let process = runtime.started(handle, spec).await;
        let mut attachment = runtime.attach(process, Offsets::default()).await.expect("attach");
        read_until(&mut attachment.events, "ready").await;
        // A process of the machine's root with all capabilities, restricted only by the policy.
        let group = device_group(process).expect("a group of devices").join("cgroup.procs");
        let mut open = Command::new("sh");
        open.args(["-c", ": < \"$0\" && echo opened"]).arg(&node);
        // SAFETY: the closure only writes to a file.
        unsafe { open.pre_exec(move || fs::write(&group, "0")) };
        let found = open.output().expect("run a shell");
        let expected = if privileged { "opened\n" } else { "" };
        assert_eq!(String::from_utf8_lossy(&found.stdout), expected, "{found:?}");
        runtime.destroy_container(handle).await.expect("destroy");
    }
}

/// Runs the tests above in a view of the machine with only version 2 of control groups.
#[test]
fn device_policy_holds_with_cgroup_v2_only() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("not applicable: this process is not root");
        return;
    }
    let script = "umount -R /sys/fs/cgroup && mount -t cgroup2 none /sys/fs/cgroup && exec \"$0\" \"$@\"";
    let found = Command::new("unshare")
        .args(["--mount", "sh", "-c", script])
        .arg(std::env::current_exe().expect("this test"))
        .args(["--exact", "--nocapture"])
        .args(
            ["device_policy_holds_for_all_in_the_group", "devices_cannot_be_made_or_opened"]
                .map(|name| format!("{}::{name}", module_path!().split_once("::").expect("a crate").1)),
        )
        .output()
        .expect("run unshare");
    let text = String::from_utf8_lossy(&found.stdout);
    assert!(
        found.status.success() && text.contains("2 passed"),
        "{text}{}",
        String::from_utf8_lossy(&found.stderr)
    );
}

#[tokio::test]
async fn fork_bomb_fails_only_its_container() {
    if HostSubject::new().is_none() {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let policy = Policy::allowing([Permission::HostImage]).with_container_pids(64);
    let runtime = HostRuntime::open(HostConfig { policy, ..config(dir.path()) }).expect("open");
    let runtime: std::sync::Arc<dyn Runtime> = runtime;
    let handle = runtime.made(container()).await;
    let id = runtime
        .started(
            handle,
            shell("bomb() { bomb | bomb & }; bomb; for i in $(seq 200); do sleep 60 & done; echo over"),
        )
        .await;
    let said = runtime.read_output(id).await;
    let errors = String::from_utf8_lossy(&said.stderr);
    assert!(errors.contains("Cannot fork") || errors.contains("fork: "), "{errors}");
    assert!(
        !matches!(said.ended, Some(runtime::Ended::Exited { exit: Exit::Code(0), .. })),
        "{:?}",
        said.ended
    );
    runtime.destroy_container(handle).await.expect("destroy");
}

/// Holds about 100 MiB of answers in netlink sockets, until no more sockets can be opened.
const KEEP_IN_NETLINK: &str = r#"ulimit -n 4096 && exec python3 -c '
import socket, struct, time
request = struct.pack("=IHHII", 4016, 16, 5, 0, 0) + bytes(4000)
sockets = []
while len(sockets) < 4000 and sum(int(l.split()[4]) for l in list(open("/proc/net/netlink"))[1:]) < 100 << 20:
    s = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 30)
    sockets.append(s)
    for _ in range(2000): s.send(request)
time.sleep(600)'"#;

#[tokio::test]
async fn container_holding_most_memory_is_ended() {
    let Some(subject) = HostSubject::new() else { return };
    let runtime = subject.runtime();
    let modest = runtime.made(container()).await;
    let modest = runtime.started(modest, shell("exec sleep 600")).await;
    for keep in [KEEP_IN_NETLINK, "head -c 100000000 /dev/zero > /dev/shm/file; exec sleep 600"] {
        let greedy = runtime.made(container()).await;
        let greedy = runtime.started(greedy, shell(keep)).await;
        // Simulates a machine without available memory.
        let guard = subject.host().guard_available_memory(u64::MAX);
        let ended = tokio::select! {
            () = guard => panic!("the guard runs forever"),
            ended = runtime.ended(greedy) => ended,
        };
        assert!(matches!(ended, Ended::Exited { exit: Exit::OutOfMemory, stopped: false }), "{ended:?}");
    }
    let state = runtime.process(modest).await.expect("a state");
    assert!(matches!(state, runtime::ProcessState::Started), "{state:?}");
    for handle in runtime.list().await.expect("list").containers {
        runtime.destroy_container(handle).await.expect("destroy");
    }
}

#[tokio::test]
async fn start_of_process_wakes_memory_guard() {
    let Some(subject) = HostSubject::new() else { return };
    let runtime = subject.runtime();
    let guard = subject.host().guard_available_memory(u64::MAX);
    let greedy = async {
        let greedy = runtime.made(container()).await;
        let keep = "head -c 100000000 /dev/zero > /dev/shm/file; exec sleep 600";
        runtime.ended(runtime.started(greedy, shell(keep)).await).await
    };
    let ended = tokio::select! {
        // The guard waits before the process is started.
        biased;
        () = guard => panic!("the guard runs forever"),
        ended = greedy => ended,
    };
    assert!(matches!(ended, Ended::Exited { exit: Exit::OutOfMemory, stopped: false }), "{ended:?}");
}

#[tokio::test]
async fn container_without_limit_cannot_take_all_memory() {
    if HostSubject::new().is_none() {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let policy = Policy::allowing([Permission::HostImage]).with_container_memory(32 << 20);
    let runtime = HostRuntime::open(HostConfig { policy, ..config(dir.path()) }).expect("open");
    let runtime: std::sync::Arc<dyn Runtime> = runtime;
    let eat = ["awk", "BEGIN { s = \"x\"; while (1) s = s s }"].map(str::to_owned);
    let said = runtime.run(container(), process(&eat)).await;
    assert_eq!(said.ended, Some(runtime::Ended::Exited { exit: Exit::OutOfMemory, stopped: false }));
    let score = runtime.run(container(), shell("cat /proc/self/oom_score_adj")).await;
    assert_eq!(score.text(), "500\n", "processes of the machine have a lower score");
    for handle in runtime.list().await.expect("list").containers {
        runtime.destroy_container(handle).await.expect("destroy");
    }
}

#[tokio::test]
async fn memory_file_systems_are_bounded() {
    let Some(subject) = HostSubject::new() else { return };
    let table = script_output(&subject, container(), "cat /proc/self/mountinfo").await;
    for at in ["/tmp", "/run", "/dev/shm"] {
        let line = table.lines().find(|line| line.split(' ').nth(4) == Some(at)).unwrap_or_default();
        assert!(line.contains("size="), "{at}: {line}");
    }
}

#[tokio::test]
async fn container_has_a_limit_of_pseudo_terminals() {
    let Some(subject) = HostSubject::new() else { return };
    let script = "ulimit -n 2048 && exec python3 -c 'import os\nwhile True: os.open(\"/dev/ptmx\", os.O_RDWR); print(end=\".\")'";
    let said = script_output(&subject, container(), script).await;
    assert_eq!(said.chars().take_while(|each| *each == '.').count(), 512, "{said}");
    assert!(said.contains("No space left on device"), "{said}");
}

/// Tries to change the program behind `/proc/self/exe`, which is that of the supervisor.
const CHANGE_OWN_PROGRAM: &str = r#"
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>
__attribute__((constructor)) static void change(void) {
    int own = open("/proc/self/exe", O_RDONLY);
    printf("opened %d\n", own >= 0);
    printf("chmod %d\n", fchmod(own, 04755) == 0);
    printf("chown %d\n", fchown(own, 1000, 1000) == 0);
    printf("xattr %d\n", fsetxattr(own, "user.x", "y", 1, 0) == 0);
    printf("write %d\n", open("/proc/self/exe", O_WRONLY) >= 0);
    fflush(stdout);
    _exit(7);
}
"#;

#[tokio::test]
async fn program_of_the_supervisor_cannot_be_changed() {
    let Some(subject) = HostSubject::new() else { return };
    let runtime = subject.runtime();
    let volume = runtime.volume().await;
    let contents = directory(&*runtime, volume).await;
    fs::write(contents.join("own.c"), CHANGE_OWN_PROGRAM).expect("write");
    let compiled = Command::new("cc")
        .args(["-shared", "-fPIC", "-o", "own.so", "own.c"])
        .current_dir(&contents)
        .status();
    if !compiled.is_ok_and(|status| status.success()) {
        eprintln!("not applicable: no C compiler");
        return;
    }
    let program = env!("CARGO_BIN_EXE_runtime-gateway");
    let before = fs::metadata(program).expect("the program");
    let spec = ContainerSpec { mounts: vec![mount(volume, "/own", true)], ..container() };
    let variable = |name: &str, value: &str| domain::workload::EnvironmentVariable {
        name: name.into(),
        value: value.into(),
    };
    let process = ProcessSpec {
        environment: vec![variable("LD_PRELOAD", "/own/own.so")],
        ..process(&["/proc/self/exe".to_owned()])
    };
    let said = runtime.run(spec, process).await;
    let after = fs::metadata(program).expect("the program");
    fs::set_permissions(program, before.permissions()).expect("as it was");
    assert_eq!(said.text(), "opened 1\nchmod 0\nchown 0\nxattr 0\nwrite 0\n", "{said:?}");
    assert_eq!((before.mode(), before.uid(), before.gid()), (after.mode(), after.uid(), after.gid()));
}
