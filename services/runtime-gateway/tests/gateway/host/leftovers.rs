//! Leftovers: no mount, control group, process or file remains after any kind of end.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use domain::workload::{EnvironmentVariable, Exit, FailureReason, Limits, OutputMode};
use domain::{ContainerHandle, ProcessId, VolumeHandle};
use runtime::{
    ContainerSpec, Contents, Ended, ProcessSpec, ProcessState, Runtime, RuntimeError, VolumeSource,
};
use runtime_gateway::host::{HostConfig, HostRuntime};
use testing::conformance::{self, RuntimeExt, Subject, container, in_time, mount, process, programs, until};

use super::subject::{self, HostSubject, config};

/// The resources of a runtime outside of its memory.
#[derive(Debug, PartialEq, Eq)]
struct Footprint {
    files: BTreeSet<PathBuf>,
    mounts: Vec<String>,
    processes: BTreeSet<String>,
    cgroups: BTreeSet<PathBuf>,
}

fn walk(directory: &Path, found: &mut BTreeSet<PathBuf>) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        found.insert(entry.path());
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            walk(&entry.path(), found);
        }
    }
}

/// All processes with open files below `directory`, except this one.
fn users_of(directory: &Path) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for process in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let pid = process.file_name().to_string_lossy().into_owned();
        if pid.parse::<u32>().is_err() || pid == std::process::id().to_string() {
            continue;
        }
        let open = fs::read_dir(process.path().join("fd")).into_iter().flatten().flatten();
        if open.filter_map(|fd| fs::read_link(fd.path()).ok()).any(|path| path.starts_with(directory)) {
            found.insert(pid);
        }
    }
    found
}

fn footprint(subject: &HostSubject, ids: &[ProcessId]) -> Footprint {
    let dir = subject.dir.path();
    let mut files = BTreeSet::new();
    walk(dir, &mut files);
    let table = fs::read_to_string("/proc/self/mountinfo").expect("the table of mounts");
    let mine = |line: &&str| line.contains(&*dir.to_string_lossy());
    let names: Vec<_> = ids.iter().map(|id| format!("gantry-{id}")).collect();
    let hierarchies = fs::read_dir("/sys/fs/cgroup").into_iter().flatten().flatten();
    let groups = hierarchies.flat_map(|hierarchy| names.iter().map(move |name| hierarchy.path().join(name)));
    let flat = names.iter().map(|name| Path::new("/sys/fs/cgroup").join(name));
    Footprint {
        files,
        mounts: table.lines().filter(mine).map(str::to_owned).collect(),
        processes: users_of(dir),
        cgroups: groups.chain(flat).filter(|path| path.exists()).collect(),
    }
}

/// A way for a container to end.
#[derive(Debug, Clone, Copy)]
enum Ending {
    Never,
    Exit,
    NotFound,
    Signal,
    Stopped,
    StoppedAtOnce,
    Destroyed,
    DestroyedAtOnce,
    OutOfMemory,
    HeldBack,
    SupervisorKilled,
}

const ENDINGS: [Ending; 11] = [
    Ending::Never,
    Ending::Exit,
    Ending::NotFound,
    Ending::Signal,
    Ending::Stopped,
    Ending::StoppedAtOnce,
    Ending::Destroyed,
    Ending::DestroyedAtOnce,
    Ending::OutOfMemory,
    Ending::HeldBack,
    Ending::SupervisorKilled,
];

fn process_dir(subject: &HostSubject, container: ContainerHandle, id: ProcessId) -> PathBuf {
    subject.dir.path().join(format!("state/containers/{container}/processes/{id}"))
}

/// Kills the supervisor of a process, once its process id is stored.
async fn kill_supervisor(subject: &HostSubject, container: ContainerHandle, id: ProcessId) {
    let path = process_dir(subject, container, id).join("alive");
    let pid = || fs::read_to_string(&path).ok().and_then(|text| text.parse().ok());
    until("a supervisor", || pid().is_some()).await;
    let pid = pid().and_then(rustix::process::Pid::from_raw).expect("a process id");
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).expect("kill");
}

async fn end(subject: &HostSubject, ending: Ending, spec: ContainerSpec) -> ProcessId {
    let runtime = subject.runtime();
    let limits = match ending {
        Ending::OutOfMemory => Limits { memory_bytes: Some(32 << 20), ..Limits::default() },
        _ => Limits {
            memory_bytes: Some(1 << 30),
            cpu_millis: Some(900),
            pids: Some(100),
            disk_bytes: Some(1 << 40),
        },
    };
    let handle = runtime.made(ContainerSpec { limits, ..spec }).await;
    let id = ProcessId::new();
    let command = match ending {
        Ending::Exit => programs::leave_behind("/out/file"),
        Ending::NotFound => programs::missing(),
        Ending::Signal => programs::signal_itself(11),
        Ending::OutOfMemory => ["awk", "BEGIN { s = \"x\"; while (1) s = s s }"].map(str::to_owned).to_vec(),
        Ending::HeldBack => programs::count(100 << 20),
        _ => programs::ignore_term(),
    };
    if !matches!(ending, Ending::Never) {
        runtime.start(handle, id, process(&command)).await.expect("start");
    }
    let started = async {
        let attachment = runtime.attach(id, runtime::Offsets::default()).await.expect("attach");
        let mut events = attachment.events;
        testing::conformance::read_until(&mut events, "ready").await;
    };
    match ending {
        Ending::Never | Ending::DestroyedAtOnce => {}
        Ending::StoppedAtOnce => runtime.stop(id, Duration::ZERO).await.expect("stop"),
        Ending::Destroyed => started.await,
        Ending::Stopped => {
            started.await;
            runtime.stop(id, Duration::from_millis(20)).await.expect("stop");
            runtime.ended(id).await;
        }
        Ending::HeldBack => {
            let full = super::subject::SPOOL;
            let spool = process_dir(subject, handle, id).join("stdout");
            until("a full spool", || fs::metadata(&spool).is_ok_and(|found| found.len() >= full)).await;
        }
        Ending::SupervisorKilled => {
            started.await;
            kill_supervisor(subject, handle, id).await;
            let ended = runtime.ended(id).await;
            assert!(
                matches!(&ended, Ended::Unknown(failure) if failure.reason == FailureReason::ExitUnknown),
                "{ended:?}"
            );
        }
        _ => {
            runtime.ended(id).await;
        }
    }
    in_time("the end of a container", runtime.destroy_container(handle)).await.expect("destroy");
    id
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ended_container_leaves_nothing_behind() {
    let Some(subject) = HostSubject::new() else { return };
    let runtime = subject.runtime();
    let before = footprint(&subject, &[]);
    for ending in ENDINGS {
        let mut ids = Vec::new();
        for _ in 0..4 {
            let parent = runtime.volume().await;
            let child = runtime.child(parent).await;
            let grandchild = runtime.child(child).await;
            let mounts = vec![mount(grandchild, "/out", false), mount(child, "/in", true)];
            ids.push(end(&subject, ending, ContainerSpec { mounts, ..container() }).await);
            for volume in [grandchild, child, parent] {
                runtime.destroy_volume(volume).await.expect("destroy");
            }
        }
        // A process is reaped shortly after its end.
        let clean = || footprint(&subject, &ids) == before;
        if tokio::time::timeout(Duration::from_secs(5), until("", clean)).await.is_err() {
            assert_eq!(footprint(&subject, &ids), before, "{ending:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_supervisor_leaves_nothing_behind() {
    let Some(subject) = HostSubject::new() else { return };
    let runtime = subject.runtime();
    let before = footprint(&subject, &[]);
    let mut ids = Vec::new();
    for delay in (0..60).step_by(2) {
        let handle = runtime.made(container()).await;
        let id = runtime.started(handle, process(&programs::sleep())).await;
        tokio::time::sleep(Duration::from_millis(delay)).await;
        kill_supervisor(&subject, handle, id).await;
        match runtime.ended(id).await {
            Ended::NotStarted(failure) => assert_eq!(failure.reason, FailureReason::StartFailed),
            Ended::Unknown(failure) => assert_eq!(failure.reason, FailureReason::ExitUnknown),
            ended @ Ended::Exited { .. } => panic!("after {delay} ms: {ended:?}"),
        }
        assert_eq!(runtime.read_output(id).await.ended, Some(runtime.ended(id).await));
        runtime.destroy_container(handle).await.expect("destroy");
        ids.push(id);
    }
    let clean = || footprint(&subject, &ids) == before;
    if tokio::time::timeout(Duration::from_secs(5), until("", clean)).await.is_err() {
        assert_eq!(footprint(&subject, &ids), before);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn incomplete_objects_are_listed_or_removed_at_opening() {
    let Some(mut subject) = HostSubject::new() else { return };
    let before = footprint(&subject, &[]);
    let state = subject.dir.path().join("state");
    let (volume, container) = (VolumeHandle::new(), ContainerHandle::new());
    fs::create_dir_all(state.join(format!("volumes/.new-{volume}/contents"))).expect("make");
    fs::create_dir_all(state.join(format!("containers/.gone-{container}/upper"))).expect("make");
    let marker = fs::read_to_string(state.join("marker")).expect("a marker");
    let sockets = subject.dir.path().join("run").join(marker.trim());
    fs::write(sockets.join(ProcessId::new().to_string()), "").expect("write");
    let holdings = subject.runtime().list().await.expect("list");
    assert_eq!((holdings.volumes, holdings.containers), (vec![volume], vec![container]));
    subject.reopen().await;
    assert_eq!(footprint(&subject, &[]), before);
    assert_eq!(subject.runtime().list().await.expect("list"), runtime::Holdings::default());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unused_volumes_can_be_unmounted() {
    let Some(subject) = HostSubject::new() else { return };
    let runtime = subject.runtime();
    let parent = runtime.volume().await;
    let (used, idle) = (runtime.child(parent).await, runtime.child(parent).await);
    fs::write(conformance::directory(&*runtime, idle).await.join("file"), "kept").expect("write");
    let spec = ContainerSpec { mounts: vec![mount(used, "/out", false)], privileged: true, ..container() };
    let handle = runtime.made(spec).await;
    let id = runtime.started(handle, process(&programs::sleep())).await;
    subject.host().unmount_idle().expect("unmount");
    let mounts = footprint(&subject, &[]).mounts;
    assert!(mounts.len() == 1 && mounts[0].contains(&used.to_string()), "{mounts:?}");
    runtime.stop(id, Duration::ZERO).await.expect("stop");
    runtime.destroy_container(handle).await.expect("destroy");
    subject.host().unmount_idle().expect("unmount");
    assert_eq!(footprint(&subject, &[]).mounts, Vec::<String>::new());
    let directory = conformance::directory(&*runtime, idle).await;
    assert_eq!(fs::read(directory.join("file")).expect("read"), b"kept");
}

/// A small file system, unmounted when dropped.
struct Small(tempfile::TempDir);

impl Small {
    fn new() -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let flags = rustix::mount::MountFlags::empty();
        rustix::mount::mount("tmpfs", dir.path(), "tmpfs", flags, c"size=64m").expect("mount");
        Self(dir)
    }

    /// Fills the file system.
    fn fill(&self) {
        let file = fs::File::create(self.0.path().join("fill")).expect("make");
        let zeroes = vec![0; 4096];
        while std::io::Write::write_all(&mut &file, &zeroes).is_ok() {}
    }

    fn empty(&self) {
        fs::remove_file(self.0.path().join("fill")).expect("remove");
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        rustix::mount::unmount(self.0.path(), rustix::mount::UnmountFlags::DETACH).expect("unmount");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_container_that_fills_disk_is_ended() {
    if HostSubject::new().is_none() {
        return;
    }
    let small = Small::new();
    let host = HostRuntime::open(config(small.0.path())).expect("open");
    let guard = host.clone().guard_disk();
    let runtime: std::sync::Arc<dyn Runtime> = host;
    let shell = |script: &str| process(&["/bin/sh", "-c", script].map(str::to_owned));
    // The root layer of an ended container is deleted first.
    let ended = runtime.made(container()).await;
    runtime.ended(runtime.started(ended, shell("head -c 20000000 /dev/zero > /var/file")).await).await;
    let modest = runtime.made(container()).await;
    let modest = runtime.started(modest, shell("head -c 5000000 /dev/zero > /var/file; sleep 60")).await;
    let many = runtime.made(container()).await;
    let many = runtime
        .started(
            many,
            shell("cd /var; head -c 2000000 /dev/zero > a; for n in $(seq 50); do ln a a$n; done; sleep 60"),
        )
        .await;
    // A supervisor cannot start on a full disk.
    for process in [modest, many] {
        while matches!(runtime.process(process).await, Ok(runtime::ProcessState::Starting)) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
    let volume = runtime.volume().await;
    let spec = ContainerSpec { mounts: vec![mount(volume, "/out", false)], ..container() };
    let greedy = runtime.made(spec).await;
    let greedy =
        runtime.started(greedy, shell("while :; do cat /dev/zero >> /out/file; sleep 0.1; done")).await;
    let hidden = [runtime.made(container()).await, runtime.made(container()).await];
    let rest = async {
        let failed = async |process| match runtime.ended(process).await {
            Ended::Unknown(failure) => {
                assert_eq!(failure.reason, FailureReason::DiskFull);
                assert!(
                    failure.message.contains("this container has written the most"),
                    "{}",
                    failure.message
                );
            }
            ended => panic!("{ended:?}"),
        };
        failed(greedy).await;
        let free = || rustix::fs::statvfs(small.0.path()).expect("measured").f_bavail;
        until("its data is deleted", || free() > 1 << 12).await;
        let layer = small.0.path().join("state/containers").join(ended.to_string()).join("upper");
        assert_eq!(fs::read_dir(layer).expect("a layer").count(), 0, "of what had ended before, too");
        let open = "exec 3> /var/file; rm /var/file; cat /dev/zero >&3; sleep 60";
        // The file is unlinked and mapped, but not open in any remaining process.
        let mapped = "exec python3 -c 'import ctypes, os, time\nfd = os.open(\"/var/file\", os.O_RDWR | os.O_CREAT)\nos.unlink(\"/var/file\")\nos.write(fd, b\"x\" * 4096)\nctypes.CDLL(None).mmap(None, 4096, 3, 1, fd, 0)\ntry:\n  while os.write(fd, bytes(1 << 16)): pass\nexcept OSError: pass\nos.close(fd)\ntime.sleep(60)'";
        for (container, hidden) in hidden.into_iter().zip([open, mapped]) {
            failed(runtime.started(container, shell(hidden)).await).await;
            until("its mapped file is deleted", || free() > 1 << 12).await;
        }
    };
    tokio::select! {
        () = guard => panic!("the guard runs forever"),
        () = rest => {}
    }
    for other in [modest, many] {
        let state = runtime.process(other).await.expect("a state");
        assert!(matches!(state, runtime::ProcessState::Started), "{state:?}");
    }
    for handle in runtime.list().await.expect("list").containers {
        runtime.destroy_container(handle).await.expect("destroy");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn full_disk_is_reported_without_leftovers() {
    if HostSubject::new().is_none() {
        return;
    }
    let small = Small::new();
    let host =
        HostRuntime::open(HostConfig { spool_bytes: 1 << 20, ..config(small.0.path()) }).expect("open");
    let runtime: std::sync::Arc<dyn Runtime> = host;
    let parent = runtime.volume().await;
    let handle = runtime.made(container()).await;
    let before = runtime.list().await.expect("list");
    small.fill();
    let full = |result: Result<(), RuntimeError>| {
        assert!(matches!(result, Err(RuntimeError::DiskFull(_))), "{result:?}");
    };
    full(runtime.create_volume(VolumeHandle::new(), VolumeSource::CopyOnWrite { parent }).await);
    full(runtime.create_container(ContainerHandle::new(), container()).await);
    let id = ProcessId::new();
    full(runtime.start(handle, id, process(&programs::exit(0))).await);
    assert!(matches!(runtime.process(id).await, Err(RuntimeError::ProcessNotFound(_))));
    assert_eq!(runtime.list().await.expect("list"), before);

    // The start can be repeated. A disk that fills up later loses output, but not the end.
    small.empty();
    let spec = ProcessSpec { output: OutputMode::Spooled, ..process(&programs::exit(3)) };
    runtime.start(handle, id, spec).await.expect("start");
    assert_eq!(runtime.ended(id).await, Ended::Exited { exit: Exit::Code(3), stopped: false });
    let handle = runtime.made(container()).await;
    let waiting = ["/bin/sh", "-c", "read line; seq 1000000; exit 4"].map(str::to_owned);
    let spec = ProcessSpec {
        output: OutputMode::Spooled,
        stdin: domain::workload::Stdin::Attached,
        ..process(&waiting)
    };
    let id = runtime.started(handle, spec).await;
    let attachment = runtime.attach(id, runtime::Offsets::default()).await.expect("attach");
    small.fill();
    attachment.input.stdin(0, bytes::Bytes::from_static(b"go\n")).await.expect("input");
    assert_eq!(runtime.ended(id).await, Ended::Exited { exit: Exit::Code(4), stopped: false });
    drop(attachment);
    let said = runtime.read_output(id).await;
    assert!(said.gone > 0, "{:?}", said.ended);
    for container in runtime.list().await.expect("list").containers {
        runtime.destroy_container(container).await.expect("destroy");
    }
    runtime.destroy_volume(parent).await.expect("destroy");
    assert_eq!(runtime.list().await.expect("list"), runtime::Holdings::default());
}

/// Names the state directory for the killed runtime, in its environment.
const KILLED: &str = "GANTRY_TEST_KILLED";
const STARTS: &str = "host::leftovers::killed_runtime_leaves_complete_starts_or_none";

/// A process that is killed when the value is dropped.
struct Killed(std::process::Child);

impl Drop for Killed {
    fn drop(&mut self) {
        self.0.kill().expect("killed");
        self.0.wait().expect("ended");
    }
}

/// Starts processes one after the other, until it is killed.
async fn start_for_ever(dir: &Path) {
    // A child process of another test has a copy of the lock for a moment.
    let runtime: std::sync::Arc<dyn Runtime> = subject::open(dir).await;
    // A large environment, so that writing the intent takes time.
    let much = |number| EnvironmentVariable {
        name: format!("MUCH_{number}").into_bytes(),
        value: vec![b'x'; 100_000],
    };
    let environment: Vec<_> = (0..10).map(much).collect();
    loop {
        let spec = ProcessSpec { environment: environment.clone(), ..process(&programs::exit(0)) };
        runtime.run(container(), spec).await;
    }
}

/// The names of the process directories of all containers.
fn names_of_processes(dir: &Path) -> Vec<String> {
    let list = |path: PathBuf| fs::read_dir(path).into_iter().flatten().flatten();
    let containers = list(dir.join("state/containers"));
    let processes = containers.flat_map(|container| list(container.path().join("processes")));
    processes.map(|process| process.file_name().to_string_lossy().into_owned()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_runtime_leaves_complete_starts_or_none() {
    if let Some(dir) = std::env::var_os(KILLED) {
        return start_for_ever(Path::new(&dir)).await;
    }
    let mut cut_short = 0;
    for round in 0..48_u64 {
        let Some(mut subject) = HostSubject::new() else { return };
        subject.close().await;
        let dir = subject.dir.path();
        let said = dir.join("said");
        let is_unfinished = || names_of_processes(dir).iter().any(|name| name.starts_with('.'));
        let child = std::process::Command::new(std::env::current_exe().expect("this program"))
            .args(["--exact", STARTS, "--nocapture"])
            .env(KILLED, dir)
            .stdout(fs::File::options().create(true).append(true).open(&said).expect("open"))
            .stderr(fs::File::options().append(true).open(&said).expect("open"))
            .spawn();
        let mut killed = Killed(child.expect("it starts"));
        // The runtime is killed when the first, second or third process has a directory. Later ones
        // are killed after the directory has its final name.
        let mut seen = 0_u64;
        let deadline = std::time::Instant::now() + Duration::from_secs(30);
        while seen <= round / 2 % 3 {
            let names = names_of_processes(dir);
            seen = names.iter().filter(|name| round % 2 == 0 || !name.starts_with('.')).count() as u64;
            if let Some(status) = killed.0.try_wait().expect("asked") {
                panic!("the runtime ended, {status}: {}", fs::read_to_string(&said).expect("read"));
            }
            assert!(std::time::Instant::now() < deadline, "it starts nothing");
        }
        std::thread::sleep(Duration::from_micros(50 * (round / 6)));
        drop(killed);
        cut_short += u32::from(is_unfinished());

        subject.reopen().await;
        let runtime = subject.runtime();
        for name in names_of_processes(subject.dir.path()) {
            let id = name.parse().expect("what was not finished is gone");
            let ended = runtime.ended(id).await;
            let is_known = match &ended {
                Ended::Exited { exit, .. } => *exit == Exit::Code(0),
                Ended::NotStarted(failure) => failure.reason == FailureReason::StartFailed,
                Ended::Unknown(_) => false,
            };
            assert!(is_known, "{id}: {ended:?}");
        }
    }
    eprintln!("{cut_short} starts were interrupted");
    assert!(cut_short > 0, "each was killed too late");
}

/// Writes the remains of a process from an earlier boot.
fn left_behind(dir: &Path, id: ProcessId, name: &str, boot: &str) {
    fs::create_dir_all(dir).expect("make");
    let intent = format!(
        r#"{{"process":"{id}","boot":"{boot}","command":["true"],"environment":[],"stdin":false,"held_back":true}}"#
    );
    fs::write(dir.join(name), intent).expect("write");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reboot_keeps_volumes_and_repeats_no_start() {
    let Some(mut subject) = HostSubject::new() else { return };
    let runtime = subject.runtime();
    let handle = runtime.made(container()).await;
    let [intended, started, current] = [(); 3].map(|()| ProcessId::new());
    left_behind(&process_dir(&subject, handle, intended), intended, "intent", "an earlier one");
    left_behind(&process_dir(&subject, handle, started), started, "started", "an earlier one");
    // An intent of this boot that still exists was not executed.
    let boot = runtime.marker().await.expect("the marker").boot;
    left_behind(&process_dir(&subject, handle, current), current, "intent", &boot);
    let child = runtime.child(runtime.volume().await).await;
    let directory = conformance::directory(&*runtime, child).await;
    fs::write(directory.join("file"), "kept").expect("write");
    rustix::mount::unmount(&directory, rustix::mount::UnmountFlags::empty()).expect("unmount");
    assert!(!directory.join("file").exists());
    drop(runtime);
    subject.reopen().await;

    let runtime = subject.runtime();
    let directory = conformance::directory(&*runtime, child).await;
    assert_eq!(fs::read(directory.join("file")).expect("read"), b"kept");
    runtime.start(handle, intended, process(&programs::exit(0))).await.expect("start again");
    assert_eq!(runtime.process(intended).await.expect("a state"), runtime::ProcessState::StartUnknown);
    let reason = |ended| match ended {
        Ended::Unknown(failure) => failure.reason,
        other => panic!("{other:?}"),
    };
    assert_eq!(reason(runtime.ended(intended).await), FailureReason::StartUnknown);
    assert_eq!(reason(runtime.ended(started).await), FailureReason::ExitUnknown);
    let ended = runtime.ended(current).await;
    assert!(
        matches!(&ended, Ended::NotStarted(failure) if failure.reason == FailureReason::StartFailed),
        "{ended:?}"
    );
    runtime.destroy_container(handle).await.expect("destroy");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn worker_copies_volumes_without_overlays() {
    if HostSubject::new().is_none() {
        return;
    }
    // An overlay cannot hold the upper layer of another overlay.
    let small = Small::new();
    let [lower, upper, work, merged] =
        ["lower", "upper", "work", "merged"].map(|name| small.0.path().join(name));
    for path in [&lower, &upper, &work, &merged] {
        fs::create_dir(path).expect("make");
    }
    let (lower, upper, work) = (lower.display(), upper.display(), work.display());
    let options = format!("lowerdir={lower},upperdir={upper},workdir={work}");
    let options = std::ffi::CString::new(options).expect("options");
    let flags = rustix::mount::MountFlags::empty();
    rustix::mount::mount("overlay", &merged, "overlay", flags, options.as_c_str()).expect("mount");
    {
        let host = HostRuntime::open(config(&merged)).expect("open");
        let runtime: std::sync::Arc<dyn Runtime> = host;
        assert!(runtime.capabilities().copy_on_write.starts_with("copy: "), "{:?}", runtime.capabilities());
        let parent = runtime.volume().await;
        let directory = conformance::directory(&*runtime, parent).await;
        fs::create_dir(directory.join("dir")).expect("make");
        fs::write(directory.join("dir/file"), "line\n").expect("write");
        fs::write(directory.join("large"), vec![1; 3 << 20]).expect("write");
        let child = runtime.child(parent).await;
        // The copy of the parent does not count as written.
        let limits = Limits { disk_bytes: Some(1 << 20), ..Limits::default() };
        let spec = ContainerSpec { mounts: vec![mount(child, "/out", false)], limits, ..container() };
        let said = runtime.run(spec, process(&programs::append("/out/dir/file"))).await;
        assert!(matches!(said.ended, Some(Ended::Exited { .. })), "{said:?}");
        let copied = conformance::directory(&*runtime, child).await.join("dir/file");
        assert_eq!(fs::read(copied).expect("read"), b"line\nline\n");
        assert_eq!(fs::read(directory.join("dir/file")).expect("read"), b"line\n");
        let held = runtime.list().await.expect("list");
        runtime.destroy_container(held.containers[0]).await.expect("destroy");
    }
    rustix::mount::unmount(&merged, rustix::mount::UnmountFlags::DETACH).expect("unmount");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn container_that_exceeds_its_disk_limit_is_ended() {
    if HostSubject::new().is_none() {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let host = HostRuntime::open(config(directory.path())).expect("open");
    let guard = host.clone().guard_disk();
    let runtime: std::sync::Arc<dyn Runtime> = host;
    let limits = Limits { disk_bytes: Some(4 << 20), ..Limits::default() };
    let start = async |limits, script: &str| {
        let volume = runtime.volume().await;
        let spec = ContainerSpec { mounts: vec![mount(volume, "/out", false)], limits, ..container() };
        let handle = runtime.made(spec).await;
        let shell = process(&["/bin/sh", "-c", script].map(str::to_owned));
        (runtime.started(handle, shell).await, volume)
    };
    // The guard does not run yet, so this one is only measured at its end.
    let (quick, _) = start(limits, "head -c 6000000 /dev/zero > /out/file").await;
    let Ended::Unknown(failure) = runtime.ended(quick).await else { panic!("it ended well") };
    assert_eq!(failure.reason, FailureReason::DiskLimitExceeded);
    // Together, the root layer and the output are too large.
    let script = "head -c 3000000 /dev/zero > /var/file; head -c 3000000 /dev/zero > /out/file; sleep 60";
    let rest = async {
        let (unlimited, _) = start(Limits::default(), script).await;
        let (modest, _) = start(limits, "head -c 3000000 /dev/zero > /out/file; sleep 60").await;
        let (greedy, volume) = start(limits, script).await;
        let Ended::Unknown(failure) = runtime.ended(greedy).await else { panic!("it was not ended") };
        assert_eq!(failure.reason, FailureReason::DiskLimitExceeded);
        assert!(failure.message.ends_with(", and its limit is 4.0 MiB"), "{}", failure.message);
        let Contents::Directory(output) = runtime.contents(volume).await.expect("contents") else {
            panic!("it is on this machine")
        };
        while output.join("file").exists() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        for process in [unlimited, modest] {
            assert_eq!(runtime.process(process).await.expect("a process"), ProcessState::Started);
            runtime.stop(process, Duration::ZERO).await.expect("stopped");
            runtime.ended(process).await;
        }
    };
    tokio::select! {
        () = guard => unreachable!("the guard does not end"),
        () = rest => {}
    }
}
