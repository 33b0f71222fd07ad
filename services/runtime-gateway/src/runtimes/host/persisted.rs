//! Persistent formats of the host runtime: containers, intents and exit records.
//!
//! Only these formats outlive a version of the program. Therefore they are separate from the types
//! of the runtime interface. New fields must have a default.

use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use domain::workload::{EnvironmentVariable, Limits, Network, OutputMode, Stdin};
use domain::{ContainerHandle, ProcessId, VolumeHandle};
use runtime::{ContainerSpec, ProcessSpec, Root, TerminalSize};
use serde::{Deserialize, Serialize};

use super::processes::Place;
use super::user_namespace::Range;
use super::users::User;

/// Text of the operating system: a string if it is UTF-8, otherwise its bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub(super) enum Text {
    Utf8(String),
    Raw(Vec<u8>),
}

impl Text {
    pub(super) fn as_bytes(&self) -> &[u8] {
        match self {
            Self::Utf8(text) => text.as_bytes(),
            Self::Raw(bytes) => bytes,
        }
    }

    pub(super) fn as_path(&self) -> &Path {
        Path::new(std::ffi::OsStr::from_bytes(self.as_bytes()))
    }
}

impl From<Vec<u8>> for Text {
    fn from(bytes: Vec<u8>) -> Self {
        String::from_utf8(bytes).map_or_else(|error| Self::Raw(error.into_bytes()), Self::Utf8)
    }
}

impl From<PathBuf> for Text {
    fn from(path: PathBuf) -> Self {
        OsString::from(path).into_vec().into()
    }
}

/// A container, with the results of all lookups at its creation.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Container {
    pub(super) handle: ContainerHandle,
    /// The team. Empty: the container was created before teams were stored, and belongs to no team.
    #[serde(default)]
    pub(super) team: String,
    /// The volume of the root file system. `None`: the image `host`.
    #[serde(default)]
    pub(super) root: Option<VolumeHandle>,
    pub(super) mounts: Vec<Mount>,
    /// The environment of every process. Contains secrets, so only root can read it.
    #[serde(default)]
    pub(super) environment: Vec<(Text, Text)>,
    pub(super) directory: Text,
    /// Whether a missing working directory is created.
    pub(super) make_directory: bool,
    pub(super) user: User,
    pub(super) cpu_millis: Option<u64>,
    pub(super) memory_bytes: Option<u64>,
    pub(super) pids: Option<u64>,
    #[serde(default)]
    pub(super) disk_bytes: Option<u64>,
    pub(super) privileged: bool,
    /// The container whose network the main process joins.
    #[serde(default)]
    pub(super) network_of: Option<ContainerHandle>,
    pub(super) network: OwnNetwork,
    /// Host names that stand for 127.0.0.1.
    #[serde(default)]
    pub(super) local_names: Vec<String>,
    /// The signal that asks the main process to end. `None`: TERM.
    #[serde(default)]
    pub(super) stop_signal: Option<u8>,
    /// Text of the gateway.
    #[serde(default)]
    pub(super) note: String,
}

/// The stored form of a container's network.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum OwnNetwork {
    Private,
    None,
    Host,
}

impl From<Network> for OwnNetwork {
    fn from(network: Network) -> Self {
        match network {
            Network::Private => Self::Private,
            Network::None => Self::None,
            Network::Host => Self::Host,
        }
    }
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Mount {
    pub(super) volume: VolumeHandle,
    pub(super) path: Text,
    pub(super) read_only: bool,
}

impl Container {
    pub(super) fn new(
        handle: ContainerHandle,
        spec: ContainerSpec,
        user: User,
        make_directory: bool,
    ) -> Self {
        let mounts = spec.mounts.into_iter().map(|mount| Mount {
            volume: mount.volume,
            path: mount.path.into(),
            read_only: mount.read_only,
        });
        // Outer mounts first, so that inner mounts appear inside them.
        let mut mounts: Vec<_> = mounts.collect();
        mounts.sort_by(|one: &Mount, other| one.path.as_path().cmp(other.path.as_path()));
        Self {
            handle,
            team: spec.team,
            root: match spec.root {
                Root::Host => None,
                Root::Volume(volume) | Root::WholeVolume(volume) => Some(volume),
            },
            mounts,
            environment: spec.environment.into_iter().map(variable).collect(),
            directory: spec.directory.into(),
            make_directory,
            user,
            cpu_millis: spec.limits.cpu_millis,
            memory_bytes: spec.limits.memory_bytes,
            pids: spec.limits.pids,
            disk_bytes: spec.limits.disk_bytes,
            privileged: spec.privileged,
            network_of: spec.network_of,
            network: spec.network.into(),
            local_names: spec.local_names,
            stop_signal: spec.stop_signal,
            note: spec.note,
        }
    }

    /// All volumes of the container.
    pub(super) fn volumes(&self) -> impl Iterator<Item = VolumeHandle> {
        self.mounts.iter().map(|mount| mount.volume).chain(self.root)
    }

    /// The volumes that the container may write to.
    pub(super) fn written(&self) -> impl Iterator<Item = VolumeHandle> {
        let writable = self.mounts.iter().filter(|mount| !mount.read_only);
        writable.map(|mount| mount.volume).chain(self.root)
    }

    pub(super) fn limits(&self) -> Limits {
        Limits {
            cpu_millis: self.cpu_millis,
            memory_bytes: self.memory_bytes,
            pids: self.pids,
            disk_bytes: self.disk_bytes,
        }
    }
}

/// The intent to start a process. Contains secrets, so only root can read it. Deleted with its
/// container.
#[derive(Clone, Serialize, Deserialize)]
pub(super) struct Intent {
    pub(super) process: ProcessId,
    /// The boot in which the intent was written. After a reboot, nothing proves that the process
    /// was not started.
    pub(super) boot: String,
    pub(super) command: Vec<Text>,
    pub(super) environment: Vec<(Text, Text)>,
    pub(super) stdin: bool,
    /// Whether standard input is the contents of the file [`super::paths::STDIN`].
    #[serde(default)]
    pub(super) inline_stdin: bool,
    /// Whether the process blocks rather than lose output.
    pub(super) held_back: bool,
    /// The main process of the container, whose namespaces the process joins. `None`: it is the
    /// main process.
    #[serde(default)]
    pub(super) joins: Option<ProcessId>,
    /// Whether the process changes only a copy of what the container left behind.
    #[serde(default)]
    pub(super) isolated: bool,
    /// `None`: the directory of the container.
    #[serde(default)]
    pub(super) directory: Option<Text>,
    /// `None`: the user of the container.
    #[serde(default)]
    pub(super) user: Option<String>,
    /// Columns and rows of the terminal.
    #[serde(default)]
    pub(super) terminal: Option<(u16, u16)>,
}

fn variable(variable: EnvironmentVariable) -> (Text, Text) {
    (Text::from(variable.name), Text::from(variable.value))
}

impl Intent {
    pub(super) fn new(process: ProcessId, boot: String, place: Place<'_>, spec: ProcessSpec) -> Self {
        Self {
            process,
            boot,
            command: spec.command.into_iter().map(Text::from).collect(),
            environment: spec.environment.into_iter().map(variable).collect(),
            stdin: spec.stdin == Stdin::Attached,
            inline_stdin: matches!(spec.stdin, Stdin::Inline(_)),
            held_back: spec.output == OutputMode::Attached,
            joins: match place {
                Place::Joined(main) => Some(main.id),
                Place::New { .. } | Place::Isolated => None,
            },
            isolated: matches!(place, Place::Isolated),
            directory: spec.directory.map(Text::from),
            user: spec.user,
            terminal: spec.terminal.map(|size| (size.columns, size.rows)),
        }
    }

    /// The size of the terminal, if the process has one.
    pub(super) fn terminal(&self) -> Option<TerminalSize> {
        self.terminal.map(|(columns, rows)| TerminalSize { columns, rows })
    }
}

impl Launch {
    /// The machine's id for a user or a group of the container.
    pub(super) fn id(&self, inside: u32) -> io::Result<u32> {
        self.range.map_or(Ok(inside), |range| range.id(inside))
    }
}

/// The launch message of a supervisor. Everything else is in the files that it names.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Launch {
    pub(super) state_dir: PathBuf,
    pub(super) container_dir: PathBuf,
    pub(super) process_dir: PathBuf,
    /// The path of the control socket, which the supervisor removes.
    pub(super) socket: PathBuf,
    /// The name of the control groups.
    pub(super) cgroup: String,
    /// The directory of the main process, whose namespaces and control groups this process joins.
    /// `None`: this is the main process.
    #[serde(default)]
    pub(super) joins: Option<PathBuf>,
    /// Whether the process changes only a copy of what the container left behind.
    #[serde(default)]
    pub(super) isolated: bool,
    /// Whether the root layer of the container is in memory.
    pub(super) upper_in_memory: bool,
    /// Paths of Gantry that are hidden from the container.
    pub(super) hidden: Vec<PathBuf>,
    /// Paths that the operator adds to the image `host`.
    #[serde(default)]
    pub(super) host_paths: Vec<PathBuf>,
    /// The range of ids for the container's users. `None`: the ids of the machine.
    #[serde(default)]
    pub(super) range: Option<Range>,
    /// Whether the supervisor mounts volumes with several layers. Otherwise the worker has mounted
    /// them.
    #[serde(default)]
    pub(super) mounts_layers: bool,
    /// Mount options of volumes with several layers.
    #[serde(default)]
    pub(super) overlay_options: Vec<String>,
    /// The address pool of private networks, if the worker has any.
    #[serde(default)]
    pub(super) network_pool: Option<super::network::Pool>,
    /// The directory of the main process whose network this process joins.
    #[serde(default)]
    pub(super) network_of: Option<PathBuf>,
    /// The last contact of a gateway, in nanoseconds of `CLOCK_BOOTTIME`, and for how long the
    /// process may continue from then on.
    pub(super) contact: u64,
    pub(super) stop_after: u64,
    /// The name under which the gateway holds the state directory. Empty: the gateway is of a
    /// version without such names.
    #[serde(default)]
    pub(super) holder: String,
}
