//! Conformance tests for every implementation of [`Runtime`].
//!
//! ```text
//! mod host { testing::runtime_conformance!(HostSubject::new()); }
//! ```
//!
//! Each test gets a separate worker. The tests run only the programs in [`programs`], so that a
//! fake runtime can imitate them. The tests wait for conditions and fail after [`PATIENCE`].
//!
//! A test checks a feature only if the runtime claims it in [`runtime::Capabilities::features`]. A
//! test without other checks then prints `not applicable: …`.

mod containers;
mod exec;
mod limits;
mod model;
mod networks;
mod output;
mod processes;
pub mod programs;
mod signals;
mod terminals;
mod trees;
mod volumes;

use std::future::Future;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use domain::workload::{Exit, FailureReason, Limits, Network, OutputMode, Stdin};
use domain::{ContainerHandle, ProcessId, VolumeHandle};
use futures::{Stream, StreamExt};
use runtime::{
    Attachment, ContainerSpec, Contents, Ended, Mount, Offsets, OutputStream, ProcessEvent, ProcessRole,
    ProcessSpec, Root, Runtime, RuntimeError, VolumeSource,
};

pub use containers::{
    container_creation_and_destruction_are_idempotent, invalid_containers_are_rejected,
    nested_mounts_are_visible, process_receives_its_environment, take_directory_moves_a_directory,
    unsupported_root_kinds_are_rejected, user_owns_writable_mounts, volume_mounts_at_two_paths,
    volumes_mount_read_only_and_writable,
};
pub use exec::{
    ended_container_can_be_looked_into, further_process_ends_with_main_process,
    further_process_joins_container, further_process_of_privileged_container_has_user,
    further_process_survives_its_runtime,
};
pub use limits::{
    cpu_limit_applies_to_container, memory_limit_applies_to_container, process_limit_applies_to_container,
    running_container_is_measured,
};
pub use model::worker_matches_model_after_random_operations;
pub use networks::{
    joined_network_outlives_its_container, network_is_joined_after_reopening,
    network_of_stopped_container_is_rejected, networks_of_containers_are_joined,
};
pub use output::{
    binary_input_arrives_or_is_rejected, dropped_readers_and_waiters_change_nothing,
    inline_input_is_read_to_its_end, output_is_readable_from_any_offset, process_continues_after_detach,
    repeated_input_arrives_once, spooled_output_drops_its_beginning, unread_input_blocks_its_writer,
    unread_output_blocks_its_process,
};
pub use processes::{
    container_description_survives_reopening, container_destruction_kills_its_processes,
    container_processes_end_with_main_process, exit_codes_and_signals_are_reported, process_starts_once,
    process_survives_its_runtime, unknown_process_is_not_found, unrunnable_programs_are_reported,
};
pub use signals::{
    plain_program_ends_on_term, process_ends_when_contact_is_lost, process_is_killed_after_grace_period,
    signals_arrive_or_are_rejected, stop_prevents_start_or_ends_process,
    stop_signal_asks_main_process_to_end,
};
pub use terminals::{terminal_size_can_change, terminal_survives_its_runtime};
pub use trees::{get, is_directory, lines, put};
pub use volumes::{
    child_of_missing_parent_is_rejected, copy_does_not_depend_on_original,
    deletions_in_child_do_not_change_parent, make_directories_creates_parents,
    manifest_is_stored_with_remote_volume, marker_survives_reopening,
    parent_is_not_destroyed_before_children, store_mark_and_notes_survive_reopening,
    volume_creation_and_destruction_are_idempotent, worker_provided, worker_provided_contents_are_copied,
    writes_to_child_do_not_change_parent,
};

/// Timeout of each wait in a test.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// A worker for one test, with a runtime for it.
#[async_trait]
pub trait Subject: Send + Sync {
    /// The runtime.
    fn runtime(&self) -> Arc<dyn Runtime>;

    /// Drops the runtime, as if its gateway was killed, and opens a new one for the same worker.
    ///
    /// The test must have dropped everything that it got from the old runtime.
    async fn reopen(&mut self);

    /// Output of one stream, in bytes, after which a process blocks or loses output.
    fn spool_bytes(&self) -> u64;

    /// The root file system of a container that has the programs in [`programs`].
    async fn root(&self) -> Root {
        Root::Host
    }

    /// Whether the worker enforces the limits that its runtime claims. A simulated worker may not.
    fn keeps_limits(&self) -> bool {
        true
    }

    /// The volumes that the subject created for [`Subject::root`].
    fn roots(&self) -> Vec<VolumeHandle> {
        Vec::new()
    }
}

/// Whether a runtime claims a feature. If not, prints that the test is not applicable.
pub fn claims(runtime: &dyn Runtime, feature: &str) -> bool {
    let claimed = has(runtime, feature);
    if !claimed {
        eprintln!("not applicable: this runtime does not claim `{feature}`");
    }
    claimed
}

fn has(runtime: &dyn Runtime, feature: &str) -> bool {
    runtime.capabilities().features.iter().any(|claimed| claimed == feature)
}

/// Lists the volumes, without the roots of containers.
pub async fn volumes(subject: &impl Subject) -> Vec<VolumeHandle> {
    let (listed, roots) = (subject.runtime().list().await.expect("list").volumes, subject.roots());
    listed.into_iter().filter(|volume| !roots.contains(volume)).collect()
}

/// An empty container on the subject's root.
pub async fn on_root(subject: &impl Subject) -> ContainerSpec {
    let private = has(&*subject.runtime(), "network-private");
    let network = match private {
        true => Network::Private,
        false if is_of_ordinary_user() => Network::None,
        false => Network::Host,
    };
    ContainerSpec { root: subject.root().await, network, ..container() }
}

/// An empty container of the image `host`.
#[must_use]
pub fn container() -> ContainerSpec {
    ContainerSpec {
        team: "main".to_owned(),
        root: Root::Host,
        mounts: Vec::new(),
        environment: Vec::new(),
        directory: b"/".to_vec(),
        user: None,
        limits: Limits::default(),
        privileged: false,
        network_of: None,
        local_names: Vec::new(),
        stop_signal: None,
        network: if is_of_ordinary_user() { Network::None } else { Network::Private },
        note: String::new(),
    }
}

/// Whether this process is root only of a user namespace, and so may lack private networks.
#[must_use]
pub fn is_of_ordinary_user() -> bool {
    /// Inode of the machine's first user namespace (`include/uapi/linux/nsfs.h`).
    const FIRST: u64 = 0xEFFF_FFFD;
    let found = std::fs::metadata("/proc/self/ns/user").expect("a user namespace");
    std::os::unix::fs::MetadataExt::ino(&found) != FIRST
}

/// A mount of a volume.
#[must_use]
pub fn mount(volume: VolumeHandle, path: &str, read_only: bool) -> Mount {
    Mount { volume, path: path.as_bytes().to_vec(), read_only }
}

/// A process without input. Its output is kept until it is acknowledged.
#[must_use]
pub fn process(command: &[String]) -> ProcessSpec {
    ProcessSpec {
        command: command.iter().map(|argument| argument.as_bytes().to_vec()).collect(),
        environment: Vec::new(),
        directory: None,
        user: None,
        role: ProcessRole::Main,
        stdin: Stdin::None,
        output: OutputMode::Attached,
        terminal: None,
    }
}

/// The complete output of a process, and its end.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct ProcessOutput {
    /// Standard output.
    pub stdout: Vec<u8>,
    /// Standard error.
    pub stderr: Vec<u8>,
    /// Lost bytes of standard output.
    pub gone: u64,
    /// The end of the process.
    pub ended: Option<Ended>,
}

impl ProcessOutput {
    /// Standard output as text.
    ///
    /// # Panics
    ///
    /// If standard output is not UTF-8.
    #[must_use]
    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.stdout).expect("text")
    }
}

/// Operations that panic on failure.
#[async_trait]
pub trait RuntimeExt {
    /// Creates an empty volume.
    async fn volume(&self) -> VolumeHandle;
    /// Creates a child of a volume.
    async fn child(&self, parent: VolumeHandle) -> VolumeHandle;
    /// Creates a container.
    async fn made(&self, spec: ContainerSpec) -> ContainerHandle;
    /// Starts a process in a container.
    async fn started(&self, container: ContainerHandle, spec: ProcessSpec) -> ProcessId;
    /// Runs a process in a new container, and returns its output.
    async fn run(&self, container: ContainerSpec, spec: ProcessSpec) -> ProcessOutput;
    /// Waits for the end of a process.
    async fn ended(&self, process: ProcessId) -> Ended;
    /// Reads and acknowledges the output of a process from the beginning to its end.
    async fn read_output(&self, process: ProcessId) -> ProcessOutput;
}

#[async_trait]
impl RuntimeExt for Arc<dyn Runtime> {
    async fn volume(&self) -> VolumeHandle {
        let handle = VolumeHandle::new();
        self.create_volume(handle, VolumeSource::Empty).await.expect("create a volume");
        handle
    }

    async fn child(&self, parent: VolumeHandle) -> VolumeHandle {
        let handle = VolumeHandle::new();
        self.create_volume(handle, VolumeSource::CopyOnWrite { parent }).await.expect("create a child");
        handle
    }

    async fn made(&self, spec: ContainerSpec) -> ContainerHandle {
        let handle = ContainerHandle::new();
        self.create_container(handle, spec).await.expect("create a container");
        handle
    }

    async fn started(&self, container: ContainerHandle, spec: ProcessSpec) -> ProcessId {
        let id = ProcessId::new();
        self.start(container, id, spec).await.expect("start a process");
        id
    }

    async fn run(&self, container: ContainerSpec, spec: ProcessSpec) -> ProcessOutput {
        let container = self.made(container).await;
        let process = self.started(container, spec).await;
        self.read_output(process).await
    }

    async fn ended(&self, process: ProcessId) -> Ended {
        in_time("the end of a process", self.wait(process)).await.expect("wait for a process")
    }

    async fn read_output(&self, process: ProcessId) -> ProcessOutput {
        let attachment = self.attach(process, Offsets::default()).await.expect("attach");
        in_time("the output of a process", read_all(attachment)).await
    }
}

/// Reads and acknowledges all output.
pub async fn read_all(attachment: Attachment) -> ProcessOutput {
    let Attachment { mut events, input, .. } = attachment;
    let mut said = ProcessOutput::default();
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
            ProcessEvent::StdinAccepted(_) => {}
            ProcessEvent::Done(_) => return said,
        }
    }
    panic!("the events ended before the event Done: {said:?}");
}

/// Awaits `work` with a timeout.
///
/// # Panics
///
/// After [`PATIENCE`].
pub async fn in_time<T>(what: &str, work: impl Future<Output = T>) -> T {
    match tokio::time::timeout(PATIENCE, work).await {
        Ok(value) => value,
        Err(_) => panic!("timeout while waiting for {what}"),
    }
}

/// Waits until a file has at least `count` lines.
pub async fn until_lines(runtime: &dyn Runtime, volume: VolumeHandle, path: &str, count: usize) {
    in_time("lines in a file", async {
        while lines(runtime, volume, path).await < count {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
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

/// Reads standard output until it contains `text`.
pub async fn read_until(events: &mut Events, text: &str) -> Vec<u8> {
    let mut read = Vec::new();
    in_time(text, async {
        while !String::from_utf8_lossy(&read).contains(text) {
            match events.next().await.expect("more to come").expect("an event") {
                ProcessEvent::Output { stream: OutputStream::Stdout, data, .. } => {
                    read.extend_from_slice(&data)
                }
                ProcessEvent::Ended(ended) => panic!("the process ended: {ended:?}"),
                _ => {}
            }
        }
    })
    .await;
    read
}

/// Whether `ended` reports an end by the signal `number`. Without the capability `exit-signals`,
/// the exit code of a shell or 255 counts too.
fn is_signal(runtime: &dyn Runtime, ended: &Ended, number: u8, stopped: bool) -> bool {
    let told = |exit| *ended == Ended::Exited { exit, stopped };
    if has(runtime, "exit-signals") {
        told(Exit::Signal(number))
    } else {
        told(Exit::Code(128 + number)) || told(Exit::Code(255))
    }
}

fn exited(code: u8) -> Ended {
    Ended::Exited { exit: Exit::Code(code), stopped: false }
}

/// The directory of a local volume.
pub async fn directory(runtime: &dyn Runtime, volume: VolumeHandle) -> PathBuf {
    match runtime.contents(volume).await.expect("the contents of a volume") {
        Contents::Directory(path) => path,
        Contents::Remote(_) => panic!("the volume is remote"),
    }
}

fn reason(ended: &Ended) -> Option<FailureReason> {
    match ended {
        Ended::NotStarted(failure) | Ended::Unknown(failure) => Some(failure.reason),
        Ended::Exited { .. } => None,
    }
}

/// Defines the conformance tests of a runtime. For each test, `$subject` evaluates to an `Option`
/// of a new [`Subject`]. `None` skips the test.
#[macro_export]
macro_rules! runtime_conformance {
    ($subject:expr) => {
        $crate::runtime_conformance! { @each ($subject)
            volume_creation_and_destruction_are_idempotent child_of_missing_parent_is_rejected writes_to_child_do_not_change_parent
            deletions_in_child_do_not_change_parent parent_is_not_destroyed_before_children copy_does_not_depend_on_original make_directories_creates_parents
            manifest_is_stored_with_remote_volume store_mark_and_notes_survive_reopening worker_provided_contents_are_copied
            marker_survives_reopening container_creation_and_destruction_are_idempotent invalid_containers_are_rejected
            unsupported_root_kinds_are_rejected
            volumes_mount_read_only_and_writable nested_mounts_are_visible take_directory_moves_a_directory volume_mounts_at_two_paths
            user_owns_writable_mounts
            process_receives_its_environment exit_codes_and_signals_are_reported unrunnable_programs_are_reported
            unknown_process_is_not_found process_starts_once process_survives_its_runtime
            container_description_survives_reopening
            container_processes_end_with_main_process container_destruction_kills_its_processes plain_program_ends_on_term
            process_is_killed_after_grace_period signals_arrive_or_are_rejected stop_signal_asks_main_process_to_end memory_limit_applies_to_container process_limit_applies_to_container cpu_limit_applies_to_container running_container_is_measured stop_prevents_start_or_ends_process process_ends_when_contact_is_lost
            output_is_readable_from_any_offset unread_output_blocks_its_process spooled_output_drops_its_beginning
            process_continues_after_detach dropped_readers_and_waiters_change_nothing repeated_input_arrives_once
            binary_input_arrives_or_is_rejected inline_input_is_read_to_its_end unread_input_blocks_its_writer terminal_size_can_change terminal_survives_its_runtime
            further_process_joins_container further_process_ends_with_main_process further_process_survives_its_runtime
            further_process_of_privileged_container_has_user ended_container_can_be_looked_into
            networks_of_containers_are_joined network_of_stopped_container_is_rejected
            joined_network_outlives_its_container network_is_joined_after_reopening
            worker_matches_model_after_random_operations
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
