//! What every [`Runtime`] is held to.
//!
//! ```text
//! mod host { testing::runtime_conformance!(HostSubject::new()); }
//! ```
//!
//! Each test gets a worker of its own. The programs that they run are all in [`programs`], so that a runtime which cannot run
//! real ones knows what to imitate. They wait for conditions, and give up after [`PATIENCE`].

use std::future::Future;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use domain::workload::{EnvironmentVariable, Exit, Image, Limits, Network, OutputMode, Stdin};
use domain::{AttemptId, ContainerHandle, VolumeHandle};
use futures::{Stream, StreamExt};
use runtime::{
    Attachment, ContainerSpec, Ended, Mount, Offsets, OutputStream, ProcessEvent, ProcessSpec, ProcessState,
    Runtime, RuntimeError, VolumeSource,
};

/// How long anything may take.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// A worker of its own, with a runtime for it.
#[async_trait]
pub trait Subject: Send {
    /// The runtime.
    fn runtime(&self) -> Arc<dyn Runtime>;

    /// Ends the runtime as its gateway would by being killed, and opens another for the same worker.
    ///
    /// Everything that was got from the old one has been dropped.
    async fn reopen(&mut self);

    /// How much output of one stream a process may write before it is held back, or loses some.
    fn spool_bytes(&self) -> u64;
}

/// The programs that the suite runs.
pub mod programs {
    /// Does nothing, and exits with this.
    #[must_use]
    pub fn exit(code: u8) -> Vec<String> {
        shell(&format!("exit {code}"))
    }

    /// Sends itself this signal.
    #[must_use]
    pub fn signal_itself(number: u8) -> Vec<String> {
        shell(&format!("kill -{number} $$"))
    }

    /// Runs for longer than any test, and ends by TERM.
    #[must_use]
    pub fn sleep() -> Vec<String> {
        ["sleep", "1000"].map(str::to_owned).to_vec()
    }

    /// Says `ready` on standard output, and ignores TERM for longer than any test.
    #[must_use]
    pub fn stubborn() -> Vec<String> {
        shell("trap '' TERM; echo ready; while :; do sleep 0.1; done")
    }

    /// Writes `out` to standard output and `err` to standard error.
    #[must_use]
    pub fn say(out: &str, err: &str) -> Vec<String> {
        shell(&format!("printf %s '{out}'; printf %s '{err}' >&2"))
    }

    /// Writes so many bytes to standard output: the digits of 0, 1, 2 …, each on a line of ten bytes.
    #[must_use]
    pub fn count(bytes: u64) -> Vec<String> {
        shell(&format!("seq -f %09.0f 0 {} | head -c {bytes}", bytes / 10))
    }

    /// What byte `offset` of [`count`] is.
    #[must_use]
    pub fn counted(offset: u64) -> u8 {
        format!("{:09}\n", offset / 10).as_bytes()[usize::try_from(offset % 10).unwrap_or(0)]
    }

    /// Copies standard input to standard output.
    #[must_use]
    pub fn cat() -> Vec<String> {
        vec!["cat".to_owned()]
    }

    /// Says `ready`, and closes standard input unread; ends by TERM.
    #[must_use]
    pub fn deaf() -> Vec<String> {
        shell("exec <&-; echo ready; exec sleep 1000")
    }

    /// Adds a line to a file, and exits.
    #[must_use]
    pub fn append(path: &str) -> Vec<String> {
        shell(&format!("echo line >> {path}"))
    }

    /// Adds a line to a file, and runs until it has another line, then exits with 7.
    #[must_use]
    pub fn append_and_wait_for_another(path: &str) -> Vec<String> {
        shell(&format!(
            "echo line >> {path}; until [ $(wc -l < {path}) -ge 2 ]; do sleep 0.01; done; echo over; exit 7"
        ))
    }

    /// Leaves something behind that adds lines to a file for ever, and exits when there is one.
    #[must_use]
    pub fn leave_behind(path: &str) -> Vec<String> {
        let forever = format!("while :; do echo line >> {path}; sleep 0.005; done");
        shell(&format!("(trap '' TERM HUP; {forever}) & until [ -s {path} ]; do sleep 0.01; done; exit 0"))
    }

    /// Writes its environment to standard output, a line for each variable.
    #[must_use]
    pub fn environment() -> Vec<String> {
        vec!["env".to_owned()]
    }

    /// Writes its working directory, its user and group, and the owner of the working directory, a line for each.
    #[must_use]
    pub fn whereabouts() -> Vec<String> {
        shell("pwd; id -u; id -g; stat -c %u .")
    }

    /// Something that is there and cannot be executed.
    #[must_use]
    pub fn not_executable() -> Vec<String> {
        vec!["/etc/passwd".to_owned()]
    }

    /// Something that is not there.
    #[must_use]
    pub fn not_there() -> Vec<String> {
        vec!["gantry-no-such-program".to_owned()]
    }

    fn shell(script: &str) -> Vec<String> {
        ["/bin/sh", "-c", script].map(str::to_owned).to_vec()
    }
}

/// A container of the image `host` with nothing in it.
#[must_use]
pub fn container() -> ContainerSpec {
    ContainerSpec {
        image: Image::Host,
        mounts: Vec::new(),
        directory: b"/".to_vec(),
        user: None,
        limits: Limits::default(),
        privileged: false,
        network: Network::Host,
    }
}

/// A volume in a container.
#[must_use]
pub fn mount(volume: VolumeHandle, path: &str, read_only: bool) -> Mount {
    Mount { volume, path: path.as_bytes().to_vec(), read_only }
}

/// A process without input, whose output is kept until it is acknowledged.
#[must_use]
pub fn process(command: &[String]) -> ProcessSpec {
    ProcessSpec {
        command: command.iter().map(|argument| argument.as_bytes().to_vec()).collect(),
        environment: Vec::new(),
        stdin: Stdin::None,
        output: OutputMode::Attached,
    }
}

/// Everything that a process said.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Said {
    /// On standard output.
    pub stdout: Vec<u8>,
    /// On standard error.
    pub stderr: Vec<u8>,
    /// Bytes of standard output that were gone.
    pub gone: u64,
    /// How it ended.
    pub ended: Option<Ended>,
}

impl Said {
    /// Standard output as text.
    ///
    /// # Panics
    ///
    /// When it is none.
    #[must_use]
    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.stdout).expect("text")
    }
}

/// Operations that a test needs to succeed.
#[async_trait]
pub trait RuntimeExt {
    /// Makes an empty volume.
    async fn volume(&self) -> VolumeHandle;
    /// Makes a child of a volume.
    async fn child(&self, parent: VolumeHandle) -> VolumeHandle;
    /// Makes a container.
    async fn made(&self, spec: ContainerSpec) -> ContainerHandle;
    /// Starts a process in a container.
    async fn started(&self, container: ContainerHandle, spec: ProcessSpec) -> AttemptId;
    /// Runs a process in a container of its own, and returns what it said.
    async fn ran(&self, container: ContainerSpec, spec: ProcessSpec) -> Said;
    /// How a process ended.
    async fn ended(&self, process: AttemptId) -> Ended;
    /// Everything that a process says from the beginning to its end, acknowledged as it is read.
    async fn said(&self, process: AttemptId) -> Said;
}

#[async_trait]
impl RuntimeExt for Arc<dyn Runtime> {
    async fn volume(&self) -> VolumeHandle {
        let handle = VolumeHandle::new();
        self.create_volume(handle, VolumeSource::Empty).await.expect("make a volume");
        handle
    }

    async fn child(&self, parent: VolumeHandle) -> VolumeHandle {
        let handle = VolumeHandle::new();
        self.create_volume(handle, VolumeSource::CopyOnWrite { parent }).await.expect("make a child");
        handle
    }

    async fn made(&self, spec: ContainerSpec) -> ContainerHandle {
        let handle = ContainerHandle::new();
        self.create_container(handle, spec).await.expect("make a container");
        handle
    }

    async fn started(&self, container: ContainerHandle, spec: ProcessSpec) -> AttemptId {
        let id = AttemptId::new();
        self.start(container, id, spec).await.expect("start a process");
        id
    }

    async fn ran(&self, container: ContainerSpec, spec: ProcessSpec) -> Said {
        let container = self.made(container).await;
        let process = self.started(container, spec).await;
        self.said(process).await
    }

    async fn ended(&self, process: AttemptId) -> Ended {
        in_time("the end of a process", self.wait(process)).await.expect("wait for a process")
    }

    async fn said(&self, process: AttemptId) -> Said {
        let attachment = self.attach(process, Offsets::default()).await.expect("attach");
        in_time("everything a process says", read_all(attachment)).await
    }
}

/// Reads, acknowledging, until everything was said.
pub async fn read_all(attachment: Attachment) -> Said {
    let Attachment { mut events, input, .. } = attachment;
    let mut said = Said::default();
    let mut at = Offsets::default();
    while let Some(event) = events.next().await {
        match event.expect("an event") {
            ProcessEvent::Output { stream, offset, data } => {
                let (kept, read) = match stream {
                    OutputStream::Stdout => (&mut said.stdout, &mut at.stdout),
                    OutputStream::Stderr => (&mut said.stderr, &mut at.stderr),
                };
                kept.extend_from_slice(&data);
                *read = offset + data.len() as u64;
                input.acknowledge(at).await.expect("acknowledge");
            }
            ProcessEvent::Truncated { from, to, .. } => said.gone += to - from,
            ProcessEvent::Ended(ended) => said.ended = Some(ended),
            ProcessEvent::StdinTaken(_) => {}
            ProcessEvent::Done(_) => return said,
        }
    }
    panic!("the events ended without being done: {said:?}");
}

/// Waits, but not for ever.
///
/// # Panics
///
/// When it takes longer than [`PATIENCE`].
pub async fn in_time<T>(what: &str, work: impl Future<Output = T>) -> T {
    match tokio::time::timeout(PATIENCE, work).await {
        Ok(value) => value,
        Err(_) => panic!("waited in vain for {what}"),
    }
}

/// Waits until `condition` holds.
pub async fn until(what: &str, mut condition: impl FnMut() -> bool) {
    in_time(what, async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
}

type Events = Pin<Box<dyn Stream<Item = Result<ProcessEvent, RuntimeError>> + Send>>;

/// Reads standard output until it holds `text`.
pub async fn read_until(events: &mut Events, text: &str) -> Vec<u8> {
    let mut read = Vec::new();
    in_time(text, async {
        while !String::from_utf8_lossy(&read).contains(text) {
            match events.next().await.expect("more to come").expect("an event") {
                ProcessEvent::Output { stream: OutputStream::Stdout, data, .. } => {
                    read.extend_from_slice(&data)
                }
                ProcessEvent::Ended(ended) => panic!("it ended: {ended:?}"),
                _ => {}
            }
        }
    })
    .await;
    read
}

fn exited(code: u8) -> Ended {
    Ended::Exited { exit: Exit::Code(code), stopped: false }
}

fn lines(path: &Path) -> usize {
    std::fs::read_to_string(path).map_or(0, |text| text.lines().count())
}

async fn directory(runtime: &Arc<dyn Runtime>, volume: VolumeHandle) -> PathBuf {
    runtime.volume_directory(volume).await.expect("the directory of a volume")
}

fn reason(ended: &Ended) -> &str {
    match ended {
        Ended::NotStarted(failure) | Ended::Unknown(failure) => &failure.reason,
        Ended::Exited { .. } => "",
    }
}

// Volumes.

/// Making and destroying may be repeated.
pub async fn volumes_are_made_and_destroyed_once(subject: impl Subject) {
    let runtime = subject.runtime();
    let volume = runtime.volume().await;
    std::fs::write(directory(&runtime, volume).await.join("file"), "kept").expect("write");
    runtime.create_volume(volume, VolumeSource::Empty).await.expect("make it again");
    let path = directory(&runtime, volume).await;
    assert_eq!(std::fs::read(path.join("file")).expect("read"), b"kept", "making it again changes nothing");
    assert_eq!(runtime.list().await.expect("list").volumes, [volume]);

    runtime.destroy_volume(volume).await.expect("destroy");
    runtime.destroy_volume(volume).await.expect("destroy again");
    assert_eq!(runtime.list().await.expect("list").volumes, []);
    let gone = runtime.volume_directory(volume).await;
    assert!(matches!(gone, Err(RuntimeError::VolumeNotFound(handle)) if handle == volume), "{gone:?}");
}

/// A child needs its parent.
pub async fn a_child_of_nothing_is_refused(subject: impl Subject) {
    let (runtime, parent) = (subject.runtime(), VolumeHandle::new());
    let refused = runtime.create_volume(VolumeHandle::new(), VolumeSource::CopyOnWrite { parent }).await;
    assert!(matches!(refused, Err(RuntimeError::VolumeNotFound(handle)) if handle == parent), "{refused:?}");
    assert_eq!(runtime.list().await.expect("list").volumes, [], "and leaves nothing behind");
}

/// A child, and a child of a child, see what was there before them and change nothing of it.
pub async fn children_leave_their_parents_alone(mut subject: impl Subject) {
    use std::os::unix::fs::PermissionsExt;
    let runtime = subject.runtime();
    let parent = runtime.volume().await;
    let top = directory(&runtime, parent).await;
    std::fs::create_dir_all(top.join("dir/below")).expect("make");
    std::fs::write(top.join("dir/file"), "parent").expect("write");
    std::fs::write(top.join("doomed"), "parent").expect("write");
    std::fs::set_permissions(&top, std::fs::Permissions::from_mode(0o700)).expect("set the mode");

    let child = runtime.child(parent).await;
    let middle = directory(&runtime, child).await;
    assert_eq!(std::fs::metadata(&middle).expect("look").permissions().mode() & 0o777, 0o700);
    std::fs::write(middle.join("dir/file"), "child").expect("write");
    std::fs::remove_file(middle.join("doomed")).expect("remove");
    std::fs::rename(middle.join("dir"), middle.join("renamed")).expect("rename");

    match runtime.sync_volume(child).await {
        Ok(()) | Err(RuntimeError::Unsupported(_)) => {}
        Err(error) => panic!("{error:?}"),
    }

    let grandchild = runtime.child(child).await;
    drop(runtime);
    subject.reopen().await;
    let runtime = subject.runtime();
    let bottom = directory(&runtime, grandchild).await;
    assert_eq!(std::fs::read(bottom.join("renamed/file")).expect("read"), b"child");
    assert!(bottom.join("renamed/below").is_dir());
    assert!(!bottom.join("doomed").exists() && !bottom.join("dir").exists());
    std::fs::write(bottom.join("renamed/file"), "grandchild").expect("write");

    assert_eq!(std::fs::read(directory(&runtime, parent).await.join("dir/file")).expect("read"), b"parent");
    assert_eq!(std::fs::read(directory(&runtime, parent).await.join("doomed")).expect("read"), b"parent");
    assert_eq!(std::fs::read(directory(&runtime, child).await.join("renamed/file")).expect("read"), b"child");
    for volume in [grandchild, child, parent] {
        runtime.destroy_volume(volume).await.expect("destroy");
    }
    assert_eq!(runtime.list().await.expect("list").volumes, []);
}

/// The marker is of the worker, not of the runtime.
pub async fn the_marker_stays(mut subject: impl Subject) {
    let before = subject.runtime().marker().await.expect("the marker");
    subject.reopen().await;
    assert_eq!(subject.runtime().marker().await.expect("the marker"), before);
    let disk = subject.runtime().disk().await.expect("the disk");
    assert!(0 < disk.free_bytes && disk.free_bytes <= disk.total_bytes, "{disk:?}");
}

// Containers.

/// Making and destroying may be repeated, and what never was cannot be started in.
pub async fn containers_are_made_and_destroyed_once(subject: impl Subject) {
    let runtime = subject.runtime();
    let handle = runtime.made(container()).await;
    runtime.create_container(handle, container()).await.expect("make it again");
    assert_eq!(runtime.list().await.expect("list").containers, [handle]);
    runtime.destroy_container(handle).await.expect("destroy");
    runtime.destroy_container(handle).await.expect("destroy again");
    assert_eq!(runtime.list().await.expect("list").containers, []);
    let refused = runtime.start(handle, AttemptId::new(), process(&programs::exit(0))).await;
    assert!(matches!(refused, Err(RuntimeError::ContainerNotFound(_))), "{refused:?}");
}

/// What cannot be made is refused when the container is made, and leaves nothing behind.
pub async fn impossible_containers_are_refused(subject: impl Subject) {
    let runtime = subject.runtime();
    let volume = runtime.volume().await;
    let unknown = VolumeHandle::new();
    let with = |mounts: Vec<Mount>| ContainerSpec { mounts, ..container() };
    let cases = [
        (with(vec![mount(unknown, "/in", true)]), "VOLUME_NOT_FOUND"),
        (with(vec![mount(volume, "/etc/passwd", true)]), "INVALID_MOUNT"),
        (with(vec![mount(volume, "/etc/passwd/below", true)]), "INVALID_MOUNT"),
        (with(vec![mount(volume, "relative", true)]), "INVALID_MOUNT"),
        (with(vec![mount(volume, "/a/../b", true)]), "INVALID_MOUNT"),
        (with(vec![mount(volume, "/", true)]), "INVALID_MOUNT"),
        (with(vec![mount(volume, "/in", true), mount(volume, "/in", true)]), "INVALID_MOUNT"),
        (ContainerSpec { user: Some("gantry-nobody".to_owned()), ..container() }, "USER_NOT_FOUND"),
        (ContainerSpec { user: Some("root:gantry-nobody".to_owned()), ..container() }, "USER_NOT_FOUND"),
        (
            ContainerSpec { directory: b"/gantry/nowhere".to_vec(), ..container() },
            "WORKING_DIRECTORY_MISSING",
        ),
        (ContainerSpec { directory: b"/etc/passwd".to_vec(), ..container() }, "WORKING_DIRECTORY_MISSING"),
    ];
    for (spec, reason) in cases {
        let refused = runtime.create_container(ContainerHandle::new(), spec.clone()).await;
        assert_eq!(refused.as_ref().map_err(RuntimeError::reason), Err(reason), "{spec:?}: {refused:?}");
    }
    assert_eq!(runtime.list().await.expect("list").containers, []);
}

/// Volumes appear where they were asked for, and read-only ones cannot be written to.
pub async fn volumes_are_mounted(subject: impl Subject) {
    let runtime = subject.runtime();
    let (written, read) = (runtime.volume().await, runtime.volume().await);
    let mounts = vec![mount(written, "/new/deep/out", false), mount(read, "/in", true)];
    let spec = ContainerSpec { mounts, ..container() };
    assert_eq!(
        runtime.ran(spec.clone(), process(&programs::append("/new/deep/out/file"))).await.ended,
        Some(exited(0))
    );
    assert_eq!(lines(&directory(&runtime, written).await.join("file")), 1);
    assert_ne!(runtime.ran(spec, process(&programs::append("/in/file"))).await.ended, Some(exited(0)));
    assert_eq!(lines(&directory(&runtime, read).await.join("file")), 0);
}

/// A volume whose path lies below another's appears inside of it, whatever the order.
pub async fn volumes_appear_in_volumes(subject: impl Subject) {
    let runtime = subject.runtime();
    let (outer, inner) = (runtime.volume().await, runtime.volume().await);
    let mounts = vec![mount(inner, "/outer/inner", false), mount(outer, "/outer", false)];
    let spec = ContainerSpec { mounts, ..container() };
    for path in ["/outer/file", "/outer/inner/file"] {
        let said = runtime.ran(spec.clone(), process(&programs::append(path))).await;
        assert_eq!(said.ended, Some(exited(0)), "{path}");
    }
    assert_eq!(lines(&directory(&runtime, outer).await.join("file")), 1);
    assert_eq!(lines(&directory(&runtime, inner).await.join("file")), 1);
    assert_eq!(lines(&directory(&runtime, outer).await.join("inner/file")), 0);
}

/// A directory of one volume becomes the contents of another; what is not a directory there is refused.
pub async fn directories_are_taken(subject: impl Subject) {
    let runtime = subject.runtime();
    let (from, into) = (runtime.volume().await, runtime.volume().await);
    let root = directory(&runtime, from).await;
    std::fs::create_dir_all(root.join("a/b")).expect("directories");
    std::fs::write(root.join("a/b/file"), "line\n").expect("write");
    std::fs::write(root.join("file"), "").expect("write");
    std::os::unix::fs::symlink("a", root.join("link")).expect("link");
    for path in ["missing", "file", "link", "link/b", "a/b/file", "missing/b"] {
        let refused = runtime.take_directory(from, Path::new(path), into).await;
        assert!(matches!(refused, Err(RuntimeError::OutputMissing(_))), "{path}: {refused:?}");
    }
    for _ in 0..2 {
        runtime.take_directory(from, Path::new("a/b"), into).await.expect("take");
        assert_eq!(lines(&directory(&runtime, into).await.join("file")), 1);
    }
    assert!(!root.join("a/b").exists());
    assert!(root.join("file").exists());
}

/// One volume may be in a container several times.
pub async fn a_volume_is_mounted_twice(subject: impl Subject) {
    let runtime = subject.runtime();
    let volume = runtime.volume().await;
    std::fs::write(directory(&runtime, volume).await.join("file"), "line\nline\n").expect("write");
    let mounts = vec![mount(volume, "/first", true), mount(volume, "/second", true)];
    let spec = ContainerSpec { mounts, ..container() };
    for path in ["/first/file", "/second/file"] {
        let waiting = programs::append_and_wait_for_another(path);
        let said = runtime.ran(spec.clone(), process(&waiting)).await;
        assert_eq!(said.ended, Some(exited(7)), "{path}");
    }
}

/// A user of the image comes to own the working directory and the writable volumes.
pub async fn users_own_what_they_write(subject: impl Subject) {
    let runtime = subject.runtime();
    let (written, read) = (runtime.volume().await, runtime.volume().await);
    std::fs::write(directory(&runtime, written).await.join("file"), "").expect("write");
    let spec = ContainerSpec {
        mounts: vec![mount(written, "/out", false), mount(read, "/in", true)],
        directory: b"/workspace".to_vec(),
        user: Some("1234:2345".to_owned()),
        ..container()
    };
    let said = runtime.ran(spec.clone(), process(&programs::whereabouts())).await;
    assert_eq!(said.text(), "/workspace\n1234\n2345\n1234\n");
    assert_eq!(runtime.ran(spec, process(&programs::append("/out/file"))).await.ended, Some(exited(0)));
}

/// A process has the environment that it was given, and PATH and HOME.
pub async fn the_environment_is_what_was_given(subject: impl Subject) {
    let runtime = subject.runtime();
    let variable = |name: &str, value: &str| EnvironmentVariable { name: name.into(), value: value.into() };
    let environment = vec![variable("NAME", "a value"), variable("HOME", "/elsewhere")];
    let said =
        runtime.ran(container(), ProcessSpec { environment, ..process(&programs::environment()) }).await;
    let mut lines: Vec<_> = said.text().lines().collect();
    lines.sort_unstable();
    let path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
    assert_eq!(lines, ["HOME=/elsewhere", "NAME=a value", path]);
    let said = runtime.ran(container(), process(&programs::environment())).await;
    let mut lines: Vec<_> = said.text().lines().collect();
    lines.sort_unstable();
    assert_eq!(lines, ["HOME=/root", path]);
}

// Processes.

/// Codes and signals are told as they are.
pub async fn exits_are_told(subject: impl Subject) {
    let runtime = subject.runtime();
    for code in [0, 1, 42, 255] {
        let handle = runtime.made(container()).await;
        let id = runtime.started(handle, process(&programs::exit(code))).await;
        assert_eq!(runtime.ended(id).await, exited(code));
        assert_eq!(runtime.process(id).await.expect("a state"), ProcessState::Ended(exited(code)));
    }
    for signal in [6, 9, 15] {
        let handle = runtime.made(container()).await;
        let id = runtime.started(handle, process(&programs::signal_itself(signal))).await;
        let killed = Ended::Exited { exit: Exit::Signal(signal), stopped: false };
        assert_eq!(runtime.ended(id).await, killed);
    }
}

/// What is no program is told as that, not as an exit.
pub async fn programs_that_cannot_be_run_are_told(subject: impl Subject) {
    let runtime = subject.runtime();
    let cases = [
        (programs::not_there(), "PROGRAM_NOT_FOUND"),
        (vec!["/no/such/program".to_owned()], "PROGRAM_NOT_FOUND"),
        (programs::not_executable(), "PROGRAM_NOT_EXECUTABLE"),
    ];
    for (command, expected) in cases {
        let said = runtime.ran(container(), process(&command)).await;
        let ended = said.ended.expect("an end");
        assert!(matches!(ended, Ended::NotStarted(_)), "{ended:?}");
        assert_eq!(reason(&ended), expected, "{command:?}");
    }
}

/// What was never asked for is not found.
pub async fn unknown_processes_are_not_found(subject: impl Subject) {
    let (runtime, id) = (subject.runtime(), AttemptId::new());
    let not_found =
        |error: RuntimeError| matches!(error, RuntimeError::ProcessNotFound(unknown) if unknown == id);
    assert!(runtime.process(id).await.is_err_and(not_found));
    assert!(runtime.wait(id).await.is_err_and(not_found));
    assert!(runtime.stop(id, Duration::ZERO).await.is_err_and(not_found));
    assert!(runtime.attach(id, Offsets::default()).await.is_err_and(not_found));
}

/// However often a process is started, it starts once; also by another runtime, and after its end.
pub async fn a_process_starts_once(mut subject: impl Subject) {
    let runtime = subject.runtime();
    let volume = runtime.volume().await;
    let handle =
        runtime.made(ContainerSpec { mounts: vec![mount(volume, "/out", false)], ..container() }).await;
    let id = AttemptId::new();
    let start = || runtime.start(handle, id, process(&programs::append("/out/file")));
    let (first, second, third) = tokio::join!(start(), start(), start());
    first.and(second).and(third).expect("start");
    assert_eq!(runtime.ended(id).await, exited(0));
    start().await.expect("start again");
    drop(runtime);
    subject.reopen().await;
    let runtime = subject.runtime();
    runtime.start(handle, id, process(&programs::append("/out/file"))).await.expect("start again");
    assert_eq!(runtime.ended(id).await, exited(0));
    assert_eq!(lines(&directory(&runtime, volume).await.join("file")), 1);
}

/// A process, its output and its end outlive the runtime that started it.
pub async fn processes_outlive_the_runtime(mut subject: impl Subject) {
    let runtime = subject.runtime();
    let volume = runtime.volume().await;
    let file = directory(&runtime, volume).await.join("file");
    let handle =
        runtime.made(ContainerSpec { mounts: vec![mount(volume, "/out", false)], ..container() }).await;
    let id = runtime.started(handle, process(&programs::append_and_wait_for_another("/out/file"))).await;
    until("the first line", || lines(&file) == 1).await;
    drop(runtime);
    subject.reopen().await;

    let runtime = subject.runtime();
    assert_eq!(runtime.process(id).await.expect("a state"), ProcessState::Started);
    assert_eq!(runtime.list().await.expect("list").containers, [handle]);
    std::fs::write(&file, "line\nline\n").expect("write");
    assert_eq!(runtime.ended(id).await, exited(7));
    drop(runtime);
    subject.reopen().await;
    let said = subject.runtime().said(id).await;
    assert_eq!((said.text(), said.ended.as_ref()), ("over\n", Some(&exited(7))));
}

/// When a process has ended, nothing of its container runs any more.
pub async fn nothing_outlives_its_process(subject: impl Subject) {
    let runtime = subject.runtime();
    let volume = runtime.volume().await;
    let file = directory(&runtime, volume).await.join("file");
    let handle =
        runtime.made(ContainerSpec { mounts: vec![mount(volume, "/out", false)], ..container() }).await;
    let id = runtime.started(handle, process(&programs::leave_behind("/out/file"))).await;
    assert_eq!(runtime.ended(id).await, exited(0));
    let before = lines(&file);
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(lines(&file), before);
}

/// Destroying a container kills what is in it, and its process is not found any more.
pub async fn destroying_a_container_kills(subject: impl Subject) {
    let runtime = subject.runtime();
    let volume = runtime.volume().await;
    let file = directory(&runtime, volume).await.join("file");
    let spec = ContainerSpec { mounts: vec![mount(volume, "/out", false)], ..container() };
    let handle = runtime.made(spec).await;
    let id = runtime.started(handle, process(&programs::append_and_wait_for_another("/out/file"))).await;
    until("the first line", || lines(&file) == 1).await;
    in_time("the end of a container", runtime.destroy_container(handle)).await.expect("destroy");
    assert!(matches!(runtime.process(id).await, Err(RuntimeError::ProcessNotFound(_))));
    assert_eq!(runtime.list().await.expect("list").containers, []);
    runtime.destroy_volume(volume).await.expect("destroy");
}

// Signals and stopping.

/// A program that does nothing about TERM ends by it, though it is alone in its container.
pub async fn term_ends_a_plain_program(subject: impl Subject) {
    let runtime = subject.runtime();
    let handle = runtime.made(container()).await;
    let id = runtime.started(handle, process(&programs::sleep())).await;
    let attachment = runtime.attach(id, Offsets::default()).await.expect("attach");
    in_time("the start", async {
        while runtime.process(id).await.expect("a state") == ProcessState::Starting {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    })
    .await;
    attachment.input.signal(15).await.expect("signal");
    let ended = runtime.ended(id).await;
    assert_eq!(ended, Ended::Exited { exit: Exit::Signal(15), stopped: false });

    let handle = runtime.made(container()).await;
    let id = runtime.started(handle, process(&programs::sleep())).await;
    in_time("the start", async {
        while runtime.process(id).await.expect("a state") == ProcessState::Starting {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    })
    .await;
    runtime.stop(id, Duration::from_secs(1000)).await.expect("stop");
    assert_eq!(runtime.ended(id).await, Ended::Exited { exit: Exit::Signal(15), stopped: true });
    runtime.stop(id, Duration::ZERO).await.expect("stopping what has ended does nothing");
    assert_eq!(runtime.ended(id).await, Ended::Exited { exit: Exit::Signal(15), stopped: true });
}

/// One that ignores TERM is killed after the grace, which a later call can shorten and not lengthen.
pub async fn the_stubborn_are_killed(subject: impl Subject) {
    let runtime = subject.runtime();
    for graces in [&[50][..], &[1_000_000, 50][..], &[50, 1_000_000][..], &[0][..]] {
        let handle = runtime.made(container()).await;
        let id = runtime.started(handle, process(&programs::stubborn())).await;
        let mut attachment = runtime.attach(id, Offsets::default()).await.expect("attach");
        read_until(&mut attachment.events, "ready").await;
        for grace in graces {
            runtime.stop(id, Duration::from_millis(*grace)).await.expect("stop");
        }
        let ended = runtime.ended(id).await;
        assert_eq!(ended, Ended::Exited { exit: Exit::Signal(9), stopped: true }, "{graces:?}");
    }
}

/// A stop that comes before the start prevents it; one that comes later ends the process. Never neither.
pub async fn a_stop_is_never_lost(subject: impl Subject) {
    let runtime = subject.runtime();
    for _ in 0..10 {
        let handle = runtime.made(container()).await;
        let id = runtime.started(handle, process(&programs::sleep())).await;
        runtime.stop(id, Duration::from_millis(100)).await.expect("stop");
        match runtime.ended(id).await {
            Ended::NotStarted(failure) => assert_eq!(failure.reason, "STOPPED_BEFORE_START"),
            ended => assert!(matches!(ended, Ended::Exited { stopped: true, .. }), "{ended:?}"),
        }
        let said = runtime.said(id).await;
        assert_eq!(said.ended, Some(runtime.ended(id).await));
        runtime.destroy_container(handle).await.expect("destroy");
    }
}

/// Without contact, a process is ended; with it, it goes on.
pub async fn processes_out_of_contact_end(subject: impl Subject) {
    let runtime = subject.runtime();
    if !runtime.capabilities().features.iter().any(|feature| feature == "stop-after") {
        return;
    }
    let since_boot = || {
        let uptime = std::fs::read_to_string("/proc/uptime").expect("the time since the boot");
        Duration::from_secs_f64(
            uptime.split(' ').next().and_then(|text| text.parse().ok()).expect("a number"),
        )
    };
    let (first, second) = (runtime.made(container()).await, runtime.made(container()).await);
    let kept = runtime.started(first, process(&programs::stubborn())).await;
    let mut attachment = runtime.attach(kept, Offsets::default()).await.expect("attach");
    read_until(&mut attachment.events, "ready").await;
    runtime.contact(since_boot(), Duration::from_secs(600)).await.expect("contact");
    assert_eq!(runtime.process(kept).await.expect("a state"), ProcessState::Started);
    runtime.contact(since_boot(), Duration::from_millis(200)).await.expect("contact");
    assert!(matches!(runtime.ended(kept).await, Ended::Exited { stopped: true, .. }));
    let late = runtime.started(second, process(&programs::sleep())).await;
    let ended = runtime.ended(late).await;
    assert!(matches!(ended, Ended::Exited { stopped: true, .. }), "started out of contact: {ended:?}");
}

// Output.

/// Both outputs are read to their ends, from any offset, by any number of readers, also after the end.
pub async fn output_is_read_from_any_offset(subject: impl Subject) {
    let runtime = subject.runtime();
    let handle = runtime.made(container()).await;
    let id = runtime.started(handle, process(&programs::say("0123456789", "abcdef"))).await;
    let said = runtime.said(id).await;
    assert_eq!((said.stdout.as_slice(), said.stderr.as_slice()), (&b"0123456789"[..], &b"abcdef"[..]));
    assert_eq!(said.ended, Some(exited(0)));

    let from = Offsets { stdout: 7, stderr: 6 };
    let attachment = runtime.attach(id, from).await.expect("attach");
    let said = in_time("the rest", read_all(attachment)).await;
    assert_eq!((said.stdout.as_slice(), said.stderr.as_slice()), (&b"789"[..], &b""[..]));
    for from in [Offsets { stdout: 11, stderr: 0 }, Offsets { stdout: 0, stderr: 7 }] {
        let refused = runtime.attach(id, from).await;
        assert!(matches!(refused, Err(RuntimeError::OffsetOutOfRange { .. })), "{from:?}");
    }
}

/// A process whose output nobody acknowledges is held back, and nothing of it is lost.
pub async fn unread_output_holds_a_process_back(mut subject: impl Subject) {
    let total = 3 * subject.spool_bytes() + 4 * 1024 * 1024;
    let runtime = subject.runtime();
    let handle = runtime.made(container()).await;
    let id = runtime.started(handle, process(&programs::count(total))).await;
    // Everything that can be read without acknowledging it; then the runtime is another.
    let mut attachment = runtime.attach(id, Offsets::default()).await.expect("attach");
    let mut read = 0;
    while let Ok(Some(event)) =
        tokio::time::timeout(Duration::from_millis(500), attachment.events.next()).await
    {
        let ProcessEvent::Output { data, .. } = event.expect("an event") else { panic!("it ended") };
        read += data.len() as u64;
    }
    assert!(subject.spool_bytes() <= read && read < total, "{read} of {total}");
    assert_eq!(runtime.process(id).await.expect("a state"), ProcessState::Started);
    drop(attachment);
    drop(runtime);
    subject.reopen().await;

    let said = subject.runtime().said(id).await;
    assert_eq!((said.gone, said.stdout.len() as u64), (0, total));
    let wrong = (0..).zip(&said.stdout).find(|(offset, byte)| programs::counted(*offset) != **byte);
    assert_eq!(wrong, None);
    assert_eq!(said.ended, Some(exited(0)));
}

/// Output beyond the spool is dropped from its beginning, which readers are told.
pub async fn spooled_output_keeps_the_end(subject: impl Subject) {
    let total = 3 * subject.spool_bytes() + 4 * 1024 * 1024;
    let runtime = subject.runtime();
    let spec = ProcessSpec { output: OutputMode::Spooled, ..process(&programs::count(total)) };
    let handle = runtime.made(container()).await;
    let id = runtime.started(handle, spec).await;
    assert_eq!(runtime.ended(id).await, exited(0), "nobody reads, and it ends all the same");
    let said = runtime.said(id).await;
    assert_eq!(said.gone + said.stdout.len() as u64, total);
    assert!(said.gone > 0 && said.stdout.len() as u64 >= subject.spool_bytes());
    let wrong = (said.gone..).zip(&said.stdout).find(|(offset, byte)| programs::counted(*offset) != **byte);
    assert_eq!(wrong, None);
}

/// A process that is held back goes on when nobody is meant to read any more.
pub async fn detaching_lets_a_process_go_on(subject: impl Subject) {
    let total = 3 * subject.spool_bytes() + 4 * 1024 * 1024;
    let runtime = subject.runtime();
    let handle = runtime.made(container()).await;
    let id = runtime.started(handle, process(&programs::count(total))).await;
    let attachment = runtime.attach(id, Offsets::default()).await.expect("attach");
    attachment.input.detach().await.expect("detach");
    assert_eq!(runtime.ended(id).await, exited(0));
}

/// Readers that leave change nothing, and a wait that is given up neither.
pub async fn readers_and_waiters_come_and_go(subject: impl Subject) {
    let runtime = subject.runtime();
    let handle = runtime.made(container()).await;
    let id = runtime.started(handle, process(&programs::stubborn())).await;
    for _ in 0..20 {
        let mut attachment = runtime.attach(id, Offsets::default()).await.expect("attach");
        read_until(&mut attachment.events, "ready").await;
        let wait = tokio::time::timeout(Duration::from_millis(2), runtime.wait(id)).await;
        assert!(wait.is_err(), "{wait:?}");
    }
    runtime.stop(id, Duration::ZERO).await.expect("stop");
    assert_eq!(runtime.ended(id).await, Ended::Exited { exit: Exit::Signal(9), stopped: true });
}

// Input.

/// Input arrives once, in order, however often it is said, and ends when it is closed.
pub async fn input_is_taken_once(mut subject: impl Subject) {
    let runtime = subject.runtime();
    let handle = runtime.made(container()).await;
    let spec = ProcessSpec { stdin: Stdin::Attached, ..process(&programs::cat()) };
    let id = runtime.started(handle, spec).await;
    let mut attachment = runtime.attach(id, Offsets::default()).await.expect("attach");
    assert_eq!(attachment.stdin_offset, 0);
    let input = &attachment.input;
    input.stdin(0, Bytes::from_static(b"one ")).await.expect("input");
    input.stdin(0, Bytes::from_static(b"one two ")).await.expect("input");
    let gap = input.stdin(100, Bytes::from_static(b"x")).await;
    assert!(matches!(gap, Err(RuntimeError::OffsetOutOfRange { offset: 100, limit: 8 })), "{gap:?}");
    read_until(&mut attachment.events, "one two ").await;
    drop(attachment);
    drop(runtime);
    subject.reopen().await;

    let runtime = subject.runtime();
    let attachment = runtime.attach(id, Offsets::default()).await.expect("attach");
    assert_eq!(attachment.stdin_offset, 8);
    attachment.input.stdin(4, Bytes::from_static(b"two three")).await.expect("input");
    attachment.input.close_stdin().await.expect("close");
    let said = in_time("the end", read_all(attachment)).await;
    assert_eq!((said.text(), said.ended.as_ref()), ("one two three", Some(&exited(0))));
}

/// A process that does not read holds its writer back; what it will never read is thrown away.
pub async fn input_that_is_not_read_waits(subject: impl Subject) {
    let runtime = subject.runtime();
    let much = Bytes::from(vec![b'x'; 4 << 20]);
    let spec = ProcessSpec { stdin: Stdin::Attached, ..process(&programs::sleep()) };
    let handle = runtime.made(container()).await;
    let id = runtime.started(handle, spec).await;
    let attachment = runtime.attach(id, Offsets::default()).await.expect("attach");
    let waited =
        tokio::time::timeout(Duration::from_millis(300), attachment.input.stdin(0, much.clone())).await;
    assert!(waited.is_err(), "{waited:?}");
    runtime.stop(id, Duration::from_secs(10)).await.expect("stop");
    in_time("input of what has ended", attachment.input.stdin(0, much.clone())).await.expect("input");

    let spec = ProcessSpec { stdin: Stdin::Attached, ..process(&programs::deaf()) };
    let handle = runtime.made(container()).await;
    let id = runtime.started(handle, spec).await;
    let mut attachment = runtime.attach(id, Offsets::default()).await.expect("attach");
    read_until(&mut attachment.events, "ready").await;
    in_time("input that nobody reads", attachment.input.stdin(0, much)).await.expect("input");
    assert_eq!(runtime.process(id).await.expect("a state"), ProcessState::Started);
    runtime.destroy_container(handle).await.expect("destroy");
}

/// Tests a runtime: `$subject` evaluates, for each test, to an `Option` of a new [`Subject`]; `None` where it cannot run.
#[macro_export]
macro_rules! runtime_conformance {
    ($subject:expr) => {
        $crate::runtime_conformance! { @each ($subject)
            volumes_are_made_and_destroyed_once a_child_of_nothing_is_refused children_leave_their_parents_alone
            the_marker_stays containers_are_made_and_destroyed_once impossible_containers_are_refused
            volumes_are_mounted volumes_appear_in_volumes directories_are_taken a_volume_is_mounted_twice
            users_own_what_they_write
            the_environment_is_what_was_given exits_are_told programs_that_cannot_be_run_are_told
            unknown_processes_are_not_found a_process_starts_once processes_outlive_the_runtime
            nothing_outlives_its_process destroying_a_container_kills term_ends_a_plain_program
            the_stubborn_are_killed a_stop_is_never_lost processes_out_of_contact_end
            output_is_read_from_any_offset unread_output_holds_a_process_back spooled_output_keeps_the_end
            detaching_lets_a_process_go_on readers_and_waiters_come_and_go input_is_taken_once
            input_that_is_not_read_waits
        }
    };
    (@each ($subject:expr) $($name:ident)*) => {$(
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $name() {
            if let Some(subject) = $subject {
                $crate::conformance::$name(subject).await;
            }
        }
    )*};
}
