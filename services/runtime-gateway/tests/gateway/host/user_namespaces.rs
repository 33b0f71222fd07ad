//! Users of containers and owners of files: on the machine, on the disk, and inside containers.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use domain::ProcessId;
use domain::workload::{Exit, FailureReason, Network, OutputMode, Stdin};
use runtime::{ContainerSpec, Ended, Offsets, ProcessSpec, Root, Runtime};
use testing::conformance::{RuntimeExt, Subject, container, directory, mount, process, read_until, until};

use super::subject::HostSubject;

/// Number of user ids of a container.
const IDS: u32 = 1 << 20;

fn shell(script: &str) -> ProcessSpec {
    process(&["/bin/sh", "-c", script].map(str::to_owned))
}

/// Runs a script. Returns its output, followed by its errors.
async fn script_output(runtime: &Arc<dyn Runtime>, spec: ContainerSpec, script: &str) -> String {
    let said = runtime.run(spec, shell(script)).await;
    format!("{}{}", said.text(), String::from_utf8_lossy(&said.stderr))
}

/// The process ids, on the machine, of all processes in a container.
fn processes(process: ProcessId) -> Vec<String> {
    let group = format!("gantry-{process}");
    let roots = ["/sys/fs/cgroup/pids", "/sys/fs/cgroup"].map(|root| Path::new(root).join(&group));
    let listed = roots.iter().find_map(|group| fs::read_to_string(group.join("cgroup.procs")).ok());
    listed.unwrap_or_default().lines().map(str::to_owned).collect()
}

/// A field of a process's status.
fn field(pid: &str, name: &str) -> String {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("a status");
    let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    line.expect("a field").trim().to_owned()
}

fn owners(directory: &Path, names: &[&str]) -> Vec<(u32, u32)> {
    let owner = |name: &&str| {
        let found = fs::symlink_metadata(directory.join(name)).expect("a file");
        (found.uid(), found.gid())
    };
    names.iter().map(owner).collect()
}

#[tokio::test]
async fn container_users_are_ordinary_users_of_machine() {
    let Some(subject) = HostSubject::new() else { return };
    let runtime = subject.runtime();
    assert!(runtime.capabilities().features.iter().any(|feature| feature == "user-namespace"));
    for user in [None, Some("1000:1000".to_owned())] {
        let handle = runtime.made(ContainerSpec { user: user.clone(), ..container() }).await;
        let spec = ProcessSpec {
            stdin: Stdin::Attached,
            output: OutputMode::Attached,
            ..shell("cat /proc/self/uid_map; id -u; sleep 60 & echo ready; read word")
        };
        let id = runtime.started(handle, spec).await;
        let mut attachment = runtime.attach(id, Offsets::default()).await.expect("attach");
        let read = read_until(&mut attachment.events, "ready").await;
        let text = String::from_utf8(read).expect("text");
        let numbers: Vec<u32> = text.split_whitespace().filter_map(|word| word.parse().ok()).collect();
        let inside = if user.is_some() { 1000 } else { 0 };
        let [0, first, IDS, seen] = numbers[..] else { panic!("{text}") };
        assert_eq!(seen, inside);

        let ids = |id: u32| [id; 4].map(|id| id.to_string()).join("\t");
        let expected = (ids(first + inside), ids(first + inside), String::new());
        let found = processes(id);
        assert!(found.len() >= 3, "init, the shell and its child: {found:?}");
        for pid in &found {
            let (uid, gid, groups) = (field(pid, "Uid"), field(pid, "Gid"), field(pid, "Groups"));
            assert_eq!((uid, gid, groups), expected);
            assert_eq!(field(pid, "CapBnd"), "00000000000405fb");
            assert_eq!(field(pid, "NoNewPrivs"), "1");
            let namespace = File::open(format!("/proc/{pid}/ns/user")).expect("a namespace");
            let mut owner: libc::uid_t = 0;
            // SAFETY: the kernel writes a user id into the variable. NS_GET_OWNER_UID of
            // ioctl_nsfs(2).
            let asked = unsafe { libc::ioctl(namespace.as_raw_fd(), 0xB704, &raw mut owner) };
            assert_eq!((asked, owner), (0, first), "the usage counts against the container's user");
        }
        runtime.destroy_container(handle).await.expect("destroy");
    }
}

#[tokio::test]
async fn owners_match_in_containers_and_on_disk() {
    let Some(mut subject) = HostSubject::new() else { return };
    let runtime = subject.runtime();
    let (plain, parent) = (runtime.volume().await, runtime.volume().await);
    let below = directory(&*runtime, parent).await;
    for (name, owner) in [("root", 0), ("person", 1000), ("unknown", IDS)] {
        fs::write(below.join(name), name).expect("write");
        std::os::unix::fs::chown(below.join(name), Some(owner), Some(owner)).expect("own");
    }
    let child = runtime.child(parent).await;
    let mounts = vec![mount(plain, "/plain", false), mount(child, "/child", false)];
    let spec = ContainerSpec { mounts, ..container() };
    let first = script_output(
        &runtime,
        spec.clone(),
        "stat -c '%n %u' /child/*; cd /plain && touch a && mkdir b && chown 33:34 b && ln -s a c && \
         cd /child && echo more >> person && chown 7 root && touch new && ! rm unknown 2> /dev/null && cat unknown",
    )
    .await;
    assert_eq!(first, "/child/person 1000\n/child/root 0\n/child/unknown 65534\nunknown");
    let person = ContainerSpec { user: Some("1000:1000".to_owned()), ..spec.clone() };
    assert_eq!(
        script_output(&runtime, person, "cd /child && echo more >> person && touch /plain/d").await,
        ""
    );

    // A container with another user has changed the owner of all files.
    assert_eq!(owners(&directory(&*runtime, plain).await, &["a", "b", "c", "d"]), [(1000, 1000); 4]);
    let seen = directory(&*runtime, child).await;
    assert_eq!(owners(&seen, &["person", "root", "new"]), [(1000, 1000); 3]);
    assert_eq!(fs::read_to_string(seen.join("person")).expect("read"), "personmore\nmore\n");
    assert_eq!(owners(&below, &["person", "root"]), [(1000, 1000), (0, 0)]);

    // Root of the machine and root of another container see the same owners.
    drop(runtime);
    subject.reopen().await;
    let runtime = subject.runtime();
    let script = "cd /child && chown 0:5 new && stat -c '%n %u %g' new && touch more && ls";
    for privileged in [true, false] {
        let said = script_output(&runtime, ContainerSpec { privileged, ..spec.clone() }, script).await;
        assert_eq!(said, "new 0 5\nmore\nnew\nperson\nroot\nunknown\n", "privileged: {privileged}");
    }
    let seen = directory(&*runtime, child).await;
    assert_eq!(owners(&seen, &["new", "more"]), [(0, 5), (0, 0)]);
}

#[tokio::test]
async fn container_writes_are_visible_during_and_after_run() {
    let Some(mut subject) = HostSubject::new() else { return };
    let parent = subject.runtime().volume().await;
    let child = subject.runtime().child(parent).await;
    let spec = ContainerSpec { mounts: vec![mount(child, "/child", false)], ..container() };
    let handle = subject.runtime().made(spec).await;
    let script = "cd /child; mkdir a; echo > a/one; echo first; read word; echo > a/two; echo > b; echo second; read word";
    let spec = ProcessSpec { stdin: Stdin::Attached, output: OutputMode::Attached, ..shell(script) };
    let id = subject.runtime().started(handle, spec).await;
    for (turn, expected) in [["one"].as_slice(), &["one", "two"]].into_iter().enumerate() {
        let runtime = subject.runtime();
        let mut attachment = runtime.attach(id, Offsets::default()).await.expect("attach");
        read_until(&mut attachment.events, ["first", "second"][turn]).await;
        let seen = directory(&*runtime, child).await;
        let names = |path: &Path| {
            let entries = fs::read_dir(path).expect("list");
            let names = entries.map(|entry| entry.expect("an entry").file_name());
            names.map(|name| name.to_string_lossy().into_owned()).collect::<BTreeSet<_>>()
        };
        assert_eq!(names(&seen.join("a")), expected.iter().map(|name| (*name).to_owned()).collect());
        assert!(fs::write(seen.join("c"), "").is_err(), "only one mount is writable");
        attachment.input.stdin(attachment.stdin_offset, "go\n".into()).await.expect("write");
        if turn == 0 {
            drop((attachment, runtime));
            subject.reopen().await;
        }
    }
    let runtime = subject.runtime();
    runtime.ended(id).await;
    let seen = directory(&*runtime, child).await;
    assert!(seen.join("b").exists());
    fs::write(seen.join("c"), "").expect("no other mount is writable");
    assert_eq!(directory(&*runtime, child).await, seen);
    assert!(seen.join("c").exists());
}

/// Copies a program of this machine with its libraries.
pub(crate) fn copy_program(program: &str, root: &Path) {
    let linked = std::process::Command::new("ldd").arg(program).output().expect("run ldd");
    let linked = String::from_utf8(linked.stdout).expect("text");
    for path in linked.split_whitespace().filter(|word| word.starts_with('/')).chain([program]) {
        let target = root.join(path.trim_start_matches('/'));
        fs::create_dir_all(target.parent().expect("a directory")).expect("make");
        fs::copy(path, target).expect("copy");
    }
}

/// An image with only a few programs. All other directories that a container needs are created.
#[tokio::test]
async fn image_root_belongs_to_container_root() {
    let Some(subject) = HostSubject::new() else { return };
    let runtime = subject.runtime();
    let image = runtime.volume().await;
    let rootfs = directory(&*runtime, image).await.join("rootfs");
    ["/bin/sh", "/bin/stat", "/bin/chown", "/bin/cat"]
        .iter()
        .for_each(|program| copy_program(program, &rootfs));
    fs::create_dir(rootfs.join("home")).expect("make");
    std::os::unix::fs::chown(rootfs.join("home"), Some(1000), Some(1000)).expect("own");
    let script = "stat -c '%n %u %g' / /bin /home /tmp /run /proc/1/environ /dev /dev/shm /work; \
        echo > /new && chown 5:6 /new /bin/sh && : > /dev/null && ! cat /proc/1/environ 2> /dev/null && stat -c '%n %u %g' /new /bin/sh";
    let everything = "/ 0 0\n/bin 0 0\n/home 1000 1000\n/tmp 0 0\n/run 0 0\n/proc/1/environ 65534 65534\n/dev 0 0\n\
        /dev/shm 0 0\n/work 0 0\n/new 5 6\n/bin/sh 5 6\n";
    for root in [image, runtime.child(image).await] {
        let out = runtime.volume().await;
        let mounts = vec![mount(out, "/work/out", false)];
        let spec =
            ContainerSpec { root: Root::Volume(root), mounts, directory: b"/work".to_vec(), ..container() };
        assert_eq!(script_output(&runtime, spec, script).await, everything);
        let seen = directory(&*runtime, root).await.join("rootfs");
        assert_eq!(owners(&seen, &["new", "bin/sh", "home", "work"]), [(5, 6), (5, 6), (1000, 1000), (0, 0)]);
    }
}

/// A name service library that the C library would load. Loading it ends the process.
const SERVICE: &str =
    "#include <unistd.h>\n__attribute__((constructor)) static void loaded(void) { _exit(1); }";

#[tokio::test]
async fn supervisor_runs_no_code_of_the_image() {
    let Some(subject) = HostSubject::new() else { return };
    let runtime = subject.runtime();
    let image = runtime.volume().await;
    let rootfs = directory(&*runtime, image).await.join("rootfs");
    copy_program("/bin/true", &rootfs);
    fs::create_dir(rootfs.join("etc")).expect("make");
    fs::write(rootfs.join("etc/nsswitch.conf"), "passwd: evil files\ngroup: evil files\nhosts: evil\n")
        .expect("write");
    let named = std::process::Command::new("mkfifo").arg(rootfs.join("etc/passwd")).status();
    assert!(named.expect("run mkfifo").success());
    // All directories in which the library is looked up.
    let linked = std::process::Command::new("ldd").arg("/bin/true").output().expect("run ldd");
    let linked = String::from_utf8(linked.stdout).expect("text");
    let library = linked.split_whitespace().find(|word| word.starts_with('/')).expect("a library");
    let at = rootfs.join(library.trim_start_matches('/')).with_file_name("libnss_evil.so.2");
    fs::write(rootfs.join("service.c"), SERVICE).expect("write");
    let compiled = std::process::Command::new("cc")
        .args(["-shared", "-fPIC", "-o"])
        .arg(at)
        .arg(rootfs.join("service.c"))
        .status();
    if !compiled.is_ok_and(|status| status.success()) {
        eprintln!("not applicable: no C compiler");
        return;
    }
    let spec = ContainerSpec { root: Root::Volume(image), ..container() };
    let process = process(&["/bin/true".to_owned()]);
    let said = tokio::time::timeout(std::time::Duration::from_secs(60), runtime.run(spec, process)).await;
    let said = said.expect("nothing waits for a pipe of the image");
    let ended = said.ended;
    assert!(
        matches!(ended, Some(Ended::Exited { exit: Exit::Code(0), .. })),
        "the supervisor ran code of the image: {ended:?}"
    );
}

#[tokio::test]
async fn volume_with_layers_has_one_writable_mount() {
    let Some(subject) = HostSubject::new() else { return };
    let runtime = subject.runtime();
    let parent = runtime.volume().await;
    fs::write(directory(&*runtime, parent).await.join("file"), "below").expect("write");
    let child = runtime.child(parent).await;
    let mounts =
        vec![mount(child, "/read", true), mount(child, "/write", false), mount(child, "/other", false)];
    let spec = ContainerSpec { mounts, ..container() };
    let script = "cat /read/file; echo above > /write/file; cat /read/file; echo new > /other/new; cat /write/new; \
        (: > /read/new) 2> /dev/null || echo ready; read word";
    let handle = runtime.made(spec.clone()).await;
    let process = ProcessSpec { stdin: Stdin::Attached, output: OutputMode::Attached, ..shell(script) };
    let id = runtime.started(handle, process).await;
    let mut attachment = runtime.attach(id, Offsets::default()).await.expect("attach");
    let read = read_until(&mut attachment.events, "ready").await;
    assert_eq!(String::from_utf8_lossy(&read), "belowabove\nnew\nready\n");

    let second = runtime.made(spec).await;
    let refused = runtime.start(second, ProcessId::new(), shell("true")).await;
    assert!(matches!(refused, Err(runtime::RuntimeError::Unsupported(_))), "{refused:?}");
    attachment.input.stdin(attachment.stdin_offset, "go\n".into()).await.expect("write");
    runtime.ended(id).await;
    let id = runtime.started(second, shell("cat /read/new")).await;
    assert_eq!(runtime.read_output(id).await.text(), "new\n", "the first container has ended");
}

#[tokio::test]
async fn standard_streams_can_be_opened_again() {
    let Some(subject) = HostSubject::new() else { return };
    let runtime = subject.runtime();
    for user in ["0", "1000"] {
        let handle = runtime.made(ContainerSpec { user: Some(user.to_owned()), ..container() }).await;
        let process = ProcessSpec {
            stdin: Stdin::Attached,
            output: OutputMode::Attached,
            ..shell("cat /dev/stdin > /dev/stdout; echo error > /dev/stderr")
        };
        let id = runtime.started(handle, process).await;
        let attachment = runtime.attach(id, Offsets::default()).await.expect("attach");
        attachment.input.stdin(0, "text\n".into()).await.expect("write");
        attachment.input.close_stdin().await.expect("close");
        let said = runtime.read_output(id).await;
        assert_eq!((said.text(), String::from_utf8_lossy(&said.stderr)), ("text\n", "error\n".into()));
    }
}

#[tokio::test]
async fn container_knows_its_own_name() {
    let Some(subject) = HostSubject::new() else { return };
    let runtime = subject.runtime();
    let script = "getent ahostsv4 $(hostname) | head -1 | cut -d' ' -f1; getent ahostsv4 localhost | head -1 | cut -d' ' -f1";
    assert_eq!(script_output(&runtime, container(), script).await, "127.0.1.1\n127.0.0.1\n");
}

#[tokio::test]
async fn container_can_listen_on_every_port() {
    let Some(subject) = HostSubject::new() else { return };
    let script = "use Socket; socket(S, PF_INET, SOCK_STREAM, 0); \
        bind(S, sockaddr_in(80, INADDR_ANY)) && listen(S, 1) and print 'listens' or print $!";
    for network in [Network::Private, Network::None] {
        let command = ["/usr/bin/perl", "-e", script].map(str::to_owned);
        let spec = ContainerSpec { network, user: Some("1000".to_owned()), ..container() };
        let said = subject.runtime().run(spec, process(&command)).await;
        assert_eq!(said.text(), "listens", "{said:?}");
    }
}

#[tokio::test]
async fn ids_outside_the_range_are_rejected() {
    let Some(subject) = HostSubject::new() else { return };
    let runtime = subject.runtime();
    for user in [format!("{IDS}"), format!("0:{IDS}")] {
        let spec = ContainerSpec { user: Some(user), ..container() };
        let refused = runtime.create_container(domain::ContainerHandle::new(), spec).await;
        let failure = refused.expect_err("the container has no such user").failure();
        assert_eq!(failure.reason, FailureReason::UserNotFound);
        assert!(failure.message.contains("the largest id is 1048575"), "{}", failure.message);
    }
    let spec = ContainerSpec { user: Some(format!("{0}:{0}", IDS - 1)), ..container() };
    assert_eq!(script_output(&runtime, spec, "id -u; id -g").await, "1048575\n1048575\n");
}

/// Init changes its user after libcontainer has created it, which resets the parent-death signal.
#[tokio::test]
async fn container_dies_with_its_supervisor() {
    let Some(subject) = HostSubject::new() else { return };
    let runtime = subject.runtime();
    let handle = runtime.made(container()).await;
    let id = runtime.started(handle, shell("sleep 60")).await;
    let has_name = |pid: &String, name| {
        fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|said| said.trim() == name)
    };
    until("its program", || processes(id).iter().any(|pid| has_name(pid, "sleep"))).await;
    let found = processes(id);
    let mut parents = found.iter().map(|pid| field(pid, "PPid"));
    let supervisor = parents.find(|parent| !found.contains(parent)).expect("a supervisor");
    let pid = rustix::process::Pid::from_raw(supervisor.parse().expect("a number")).expect("a process");
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).expect("kill");
    until("the end of all", || found.iter().all(|pid| !Path::new("/proc").join(pid).join("exe").exists()))
        .await;
    tokio::time::timeout(Duration::from_secs(10), runtime.ended(id)).await.expect("an end");
}
