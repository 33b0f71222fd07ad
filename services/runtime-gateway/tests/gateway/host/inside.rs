//! The environment of a process in a container.

use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Duration;

use domain::workload::{EnvironmentVariable, Exit, Limits, OutputMode};
use runtime::{ContainerSpec, Ended, Offsets, ProcessSpec, RuntimeError};
use runtime_gateway::host::HostRuntime;
use testing::conformance::{RuntimeExt, Subject, container, directory, mount, process, read_until};

use super::subject::{HostSubject, config};

fn shell(script: &str) -> ProcessSpec {
    process(&["/bin/sh", "-c", script].map(str::to_owned))
}

async fn output(subject: &HostSubject, spec: ContainerSpec, script: &str) -> String {
    let said = subject.runtime().run(spec, shell(script)).await;
    let errors = String::from_utf8_lossy(&said.stderr);
    let text = said.text().trim_end().to_owned();
    if errors.is_empty() { text } else { format!("{text}{errors}") }
}

fn field(status: &str, name: &str) -> String {
    let line = status.lines().find_map(|line| line.strip_prefix(name));
    line.and_then(|rest| rest.strip_prefix(':')).unwrap_or_default().trim().to_owned()
}

/// Allocates memory without end.
const GREEDY: &str = "BEGIN { s = \"x\"; while (1) s = s s }";

const STATUS: &str = "cat /proc/self/status";

#[tokio::test]
async fn container_root_has_only_default_capabilities() {
    let Some(subject) = HostSubject::new() else { return };
    let status = output(&subject, container(), STATUS).await;
    for set in ["CapPrm", "CapEff", "CapBnd"] {
        assert_eq!(field(&status, set), "00000000000405fb", "{set}");
    }
    for set in ["CapInh", "CapAmb"] {
        assert_eq!(field(&status, set), "0000000000000000", "{set}");
    }
    assert_eq!(field(&status, "NoNewPrivs"), "1");
    assert_eq!(field(&status, "Seccomp"), "2");
    assert_eq!(field(&status, "Groups"), "", "no group of the gateway is inherited");
    assert_eq!(field(&status, "Uid"), "0\t0\t0\t0");
}

#[tokio::test]
async fn container_user_has_no_capabilities() {
    let Some(subject) = HostSubject::new() else { return };
    let spec = ContainerSpec { user: Some("1234:2345".to_owned()), ..container() };
    assert_eq!(output(&subject, spec.clone(), "echo again > /dev/stdout").await, "again");
    let status = output(&subject, spec, STATUS).await;
    assert_eq!(field(&status, "CapEff"), "0000000000000000");
    assert_eq!(field(&status, "CapPrm"), "0000000000000000");
    assert_eq!(field(&status, "NoNewPrivs"), "1");
    assert_eq!(
        (field(&status, "Uid"), field(&status, "Gid")),
        ("1234\t1234\t1234\t1234".into(), "2345\t2345\t2345\t2345".into())
    );
}

#[tokio::test]
async fn privileged_container_has_rights_of_machine_root() {
    let Some(subject) = HostSubject::new() else { return };
    let spec = ContainerSpec { privileged: true, ..container() };
    let status = output(&subject, spec.clone(), STATUS).await;
    let own = std::fs::read_to_string("/proc/self/status").expect("our own status");
    assert_eq!(field(&status, "CapEff"), field(&own, "CapPrm"));
    assert_eq!(field(&status, "Seccomp"), field(&own, "Seccomp"));
    let mounted = "mount -t tmpfs none /mnt && touch /mnt/x && echo mounted; mknod /dev/log2 c 1 11 && head -c 0 /dev/log2 && echo opened";
    let said = output(&subject, spec, mounted).await;
    assert!(said.contains("mounted") && said.contains("opened"), "{said}");
}

#[tokio::test]
async fn container_cannot_open_worker_devices() {
    let Some(subject) = HostSubject::new() else { return };
    let script = "mknod /dev/log2 c 1 11; head -c 0 /dev/log2; echo x > /dev/null; head -c 1 /dev/zero | wc -c; ls /dev";
    let said = output(&subject, container(), script).await;
    assert!(said.contains("Operation not permitted"), "{said}");
    assert!(said.starts_with('1'), "{said}");
}

/// Makes each call with arguments that no kernel accepts, and prints the error.
const CALLS: &str = r#"
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#define TRY(name) errno = 0; syscall(SYS_##name, -1L, -1L, -1L, -1L, -1L, -1L); printf(#name " %d\n", errno);
int main(void) {
    TRY(mount) TRY(umount2) TRY(pivot_root) TRY(setns) TRY(unshare) TRY(kexec_load) TRY(init_module) TRY(finit_module)
    TRY(delete_module) TRY(bpf) TRY(perf_event_open) TRY(keyctl) TRY(add_key) TRY(request_key) TRY(open_by_handle_at)
    TRY(swapon) TRY(swapoff) TRY(settimeofday) TRY(clock_settime) TRY(acct) TRY(quotactl) TRY(userfaultfd)
    TRY(io_uring_setup) TRY(io_uring_enter) TRY(io_uring_register) TRY(fsopen) TRY(fsmount) TRY(fsconfig) TRY(fspick)
    TRY(move_mount) TRY(open_tree) TRY(mount_setattr) TRY(iopl) TRY(ioperm) TRY(syslog) TRY(vhangup) TRY(kcmp)
    TRY(personality)
    errno = 0; syscall(SYS_clone, CLONE_NEWUSER | 17, 0, 0, 0, 0); printf("clone-newuser %d\n", errno);
    for (long family = 0; family < 50; family++) {
        long made = syscall(SYS_socket, family | 1L << 32, 1L, 0L);
        if (made < 0 && errno != EAFNOSUPPORT) made = syscall(SYS_socket, family | 1L << 32, 2L, 0L);
        if (made >= 0) printf("family-%ld 0\n", family);
    }
    for (long protocol = 0; protocol < 32; protocol++)
        if (syscall(SYS_socket, 16L, 3L, protocol | 1L << 32) >= 0) printf("netlink-%ld 0\n", protocol);
    errno = 0; syscall(SYS_socket, 40L, 1L, 0L); printf("vsock %d\n", errno);
    errno = 0; syscall(SYS_socketpair, 40L | 1L << 32, 1L, 0L, 0L); printf("vsock-pair %d\n", errno);
    errno = 0; syscall(SYS_ioctl, -1L, 0x5000940eL, 0L); printf("btrfs %d\n", errno);
    errno = 0; syscall(SYS_ioctl, -1L, 0x40049409L, 0L); printf("reflink %d\n", errno);
    errno = 0; syscall(SYS_io_setup, 1L, 0L); printf("aio %d\n", errno);
    errno = 0; syscall(SYS_clone3, 0, 0); printf("clone3 %d\n", errno);
    errno = 0; syscall(1000, 0, 0); printf("newer %d\n", errno);
    errno = 0; syscall(SYS_personality, 0xffffffffL); printf("personality-get %d\n", errno);
    return 0;
}
"#;

#[tokio::test]
async fn dangerous_calls_are_refused() {
    let Some(subject) = HostSubject::new() else { return };
    let runtime = subject.runtime();
    let volume = runtime.volume().await;
    let directory = directory(&*runtime, volume).await;
    std::fs::write(directory.join("calls.c"), CALLS).expect("write");
    let compiled =
        std::process::Command::new("cc").args(["-o", "calls", "calls.c"]).current_dir(&directory).status();
    if !compiled.is_ok_and(|status| status.success()) {
        eprintln!("not applicable: no C compiler");
        return;
    }
    let spec = ContainerSpec { mounts: vec![mount(volume, "/calls", true)], ..container() };
    let said = output(&subject, spec, "/calls/calls").await;
    assert!(said.lines().count() > 40, "{said}");
    let mut sockets = Vec::new();
    for line in said.lines() {
        let (name, errno) = line.split_once(' ').expect("a name and a number");
        let expected = match name {
            "clone3" | "newer" | "aio" => libc::ENOSYS,
            "btrfs" => libc::ENOTTY,
            "reflink" => libc::EBADF,
            "personality-get" => 0,
            // The filter permits reading the personality.
            "personality" => continue,
            "vsock" | "vsock-pair" => libc::EAFNOSUPPORT,
            _ if name.starts_with("family-") || name.starts_with("netlink-") => {
                sockets.push(name);
                0
            }
            _ => libc::EPERM,
        };
        assert_eq!(errno.parse(), Ok(expected), "{name}");
    }
    // Local sockets, IPv4, IPv6 (if the kernel has it) and netlink for routes and statistics.
    sockets.retain(|name| *name != "family-10");
    assert_eq!(sockets, ["family-1", "family-2", "family-16", "netlink-0", "netlink-4"]);
}

#[tokio::test]
async fn programs_that_use_threads_and_files_work() {
    let Some(subject) = HostSubject::new() else { return };
    let script = "python3 -c 'import threading, subprocess, tempfile; t = threading.Thread(target=lambda: print(subprocess.check_output([\"echo\", \"child\"]).decode())); t.start(); t.join(); tempfile.TemporaryFile().write(b\"x\"); import socket; socket.socketpair()'";
    if !Path::new("/usr/bin/python3").exists() {
        eprintln!("not applicable: no python3");
        return;
    }
    assert_eq!(output(&subject, container(), script).await, "child");
}

#[tokio::test]
async fn memory_limit_kills_and_is_reported() {
    let Some(subject) = HostSubject::new() else { return };
    let runtime = subject.runtime();
    let limits = Limits { memory_bytes: Some(64 << 20), ..Limits::default() };
    let spec = ContainerSpec { limits, ..container() };
    let greedy = ["awk", GREEDY].map(str::to_owned);
    let out_of_memory = Some(Ended::Exited { exit: Exit::OutOfMemory, stopped: false });
    let said = match runtime.create_container(domain::ContainerHandle::new(), spec.clone()).await {
        Err(RuntimeError::CgroupUnavailable(_)) => {
            eprintln!("not applicable: no memory cgroup");
            return;
        }
        _ => runtime.run(spec.clone(), process(&greedy)).await,
    };
    assert_eq!(said.ended, out_of_memory);
    let said = runtime
        .run(spec.clone(), shell("head -c 500000000 /dev/zero | tail -c 500000000 > /dev/null; exit $?"))
        .await;
    assert_eq!(said.ended, out_of_memory, "through a shell");
    let said = runtime.run(spec, shell("kill -9 $$")).await;
    assert_eq!(said.ended, Some(Ended::Exited { exit: Exit::Signal(9), stopped: false }));
}

#[tokio::test]
async fn limits_of_processes_and_cpu_are_set() {
    let Some(subject) = HostSubject::new() else { return };
    let limits = Limits { pids: Some(5), cpu_millis: Some(250), ..Limits::default() };
    let spec = ContainerSpec { limits, ..container() };
    let script = "for i in 1 2 3 4; do sleep 1000 & done; echo four; sleep 1000 & echo five";
    let said = output(&subject, spec.clone(), script).await;
    assert!(said.starts_with("four") && !said.contains("five"), "{said}");

    let Ok(root) = std::fs::canonicalize("/sys/fs/cgroup/cpu") else {
        eprintln!("not applicable: no cpu cgroup of version 1");
        return;
    };
    let runtime = subject.runtime();
    let handle = runtime.made(spec).await;
    let id = runtime.started(handle, shell("echo ready; sleep 1000")).await;
    let mut attachment = runtime.attach(id, Offsets::default()).await.expect("attach");
    read_until(&mut attachment.events, "ready").await;
    let quota = std::fs::read_to_string(root.join(format!("gantry-{id}/cpu.cfs_quota_us"))).expect("a quota");
    assert_eq!(quota.trim(), "25000");
}

#[tokio::test]
async fn programs_see_their_limits_and_cannot_change_them() {
    let Some(subject) = HostSubject::new() else { return };
    let limits = Limits { memory_bytes: Some(128 << 20), ..Limits::default() };
    let spec = ContainerSpec { limits, ..container() };
    let script = "cd /sys/fs/cgroup; cat memory/memory.limit_in_bytes memory.max 2> /dev/null; echo 1 > memory/memory.limit_in_bytes || echo 1 > memory.max";
    let said = output(&subject, spec, script).await;
    assert!(said.starts_with("134217728") && said.contains("Read-only file system"), "{said}");
}

/// Sets a soft limit of this process that no test depends on.
fn set_soft_limit(resource: u32, soft: u64) {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the struct is initialized before it is read.
    unsafe {
        assert_eq!(libc::getrlimit(resource, &raw mut limit), 0);
        limit.rlim_cur = soft;
        assert_eq!(libc::setrlimit(resource, &raw const limit), 0);
    }
}

#[tokio::test]
async fn container_inherits_no_limit_of_the_gateway() {
    let Some(subject) = HostSubject::new() else { return };
    set_soft_limit(libc::RLIMIT_MSGQUEUE, 1000);
    set_soft_limit(libc::RLIMIT_RSS, 1 << 40);
    set_soft_limit(libc::RLIMIT_LOCKS, 5000);
    for privileged in [false, true] {
        let spec = ContainerSpec { privileged, ..container() };
        let table = output(&subject, spec, "cat /proc/self/limits; umask").await;
        let soft = |name: &str| {
            let line = table.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default();
            line.split_whitespace().next().unwrap_or_default().to_owned()
        };
        for unlimited in [
            "Max cpu time",
            "Max file size",
            "Max data size",
            "Max resident set",
            "Max address space",
            "Max file locks",
            "Max realtime timeout",
        ] {
            assert_eq!(soft(unlimited), "unlimited", "{unlimited}");
        }
        for (name, value) in [
            ("Max stack size", "8388608"),
            ("Max core file size", "0"),
            ("Max msgqueue size", "819200"),
            ("Max nice priority", "0"),
            ("Max realtime priority", "0"),
        ] {
            assert_eq!(soft(name), value, "{name}");
        }
        assert!(table.ends_with("\n0022"), "{table}");
    }
}

#[tokio::test]
async fn non_utf8_text_is_supported() {
    let Some(subject) = HostSubject::new() else { return };
    let runtime = subject.runtime();
    let volume = runtime.volume().await;
    let directory = directory(&*runtime, volume).await;
    let odd = directory.join(std::ffi::OsStr::from_bytes(b"odd \xff"));
    std::fs::create_dir(&odd).expect("make");
    std::fs::write(odd.join("file"), "found").expect("write");
    let mounts = vec![mount(volume, "/a path\n", true)];
    let spec = ContainerSpec { directory: b"/a path\n/odd \xff".to_vec(), mounts, ..container() };
    let variable = EnvironmentVariable { name: b"ODD".to_vec(), value: b"\xfe\n".to_vec() };
    let mut spoken = shell("printf '%s' \"$ODD$1\"; cat file");
    spoken.command.extend([b"name".to_vec(), b"\xfd".to_vec()]);
    let said = runtime.run(spec, ProcessSpec { environment: vec![variable], ..spoken }).await;
    assert_eq!(said.stdout, b"\xfe\n\xfdfound", "{said:?}");
}

#[tokio::test]
async fn container_writes_do_not_reach_worker() {
    let Some(subject) = HostSubject::new() else { return };
    let name = format!("gantry-{}", domain::ProcessId::new());
    let script = format!(
        "echo x > /var/tmp/{name} && echo x > /tmp/{name} && rm /etc/hostname; ls /tmp /etc/hostname; echo x > /proc/sys/kernel/hostname; echo x > /sys/kernel/mm/ksm/run"
    );
    let said = output(&subject, container(), &script).await;
    assert!(said.contains(&name), "{said}");
    assert_eq!(said.matches("Read-only file system").count(), 2, "{said}");
    assert!(!Path::new("/var/tmp").join(&name).exists() && !Path::new("/tmp").join(&name).exists());
    assert!(Path::new("/etc/hostname").exists());
}

#[tokio::test]
async fn supervisor_leaks_nothing_into_container() {
    let Some(subject) = HostSubject::new() else { return };
    // Reading the program of process 1 must fail, even for root.
    let script =
        "ls /proc/self/fd; cat /proc/1/environ; readlink -v /proc/1/exe; echo /proc/[0-9]*; umask; ulimit -c";
    let said = output(&subject, container(), script).await;
    assert!(said.starts_with("0\n1\n2\n3\n"), "three streams, and the directory that is listed: {said}");
    assert_eq!(said.matches("ermission denied").count(), 2, "{said}");
    assert!(said.contains("\n/proc/1 /proc/2\n0022\n"), "only init and the shell: {said}");
}

#[tokio::test]
async fn short_output_is_complete_in_every_mode() {
    let Some(subject) = HostSubject::new() else { return };
    let runtime = subject.runtime();
    let spec = ProcessSpec { output: OutputMode::Spooled, ..shell("echo word") };
    assert_eq!(runtime.run(container(), spec).await.text(), "word\n");
}

#[tokio::test]
async fn second_runtime_is_rejected() {
    let Some(subject) = HostSubject::new() else { return };
    let refused = HostRuntime::open(config(subject.dir.path())).map(|_| ());
    assert!(
        refused.as_ref().is_err_and(|error| error.to_string().contains("another runtime holds")),
        "{refused:?}"
    );
}

#[tokio::test]
async fn container_runs_processes_one_after_another() {
    let Some(subject) = HostSubject::new() else { return };
    let runtime = subject.runtime();
    let handle = runtime.made(container()).await;
    let first = runtime.started(handle, shell("echo kept > /var/tmp/note; sleep 1000")).await;
    runtime.stop(first, Duration::ZERO).await.expect("stop");
    runtime.ended(first).await;
    testing::conformance::in_time("the end of the first", async {
        let second = domain::ProcessId::new();
        // The supervisor may need a moment after the end was reported.
        while runtime.start(handle, second, shell("cat /var/tmp/note || echo absent")).await.is_err() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let said = runtime.read_output(second).await;
        assert!(matches!(said.text(), "kept\n" | "absent\n"), "{said:?}");
    })
    .await;
}
