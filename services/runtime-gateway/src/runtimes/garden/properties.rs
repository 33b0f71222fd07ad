//! Names and values of the properties of containers and volumes: all durable state of the Garden
//! runtime.
//!
//! A value is never empty, because a containerd worker drops properties with an empty value.

/// Kind of a volume or container of Gantry: [`VOLUME`], [`CONTAINER`], [`MARKER`] or [`SIDECAR`].
pub(super) const KIND: &str = "gantry.kind";
/// A volume with a handle of the runtime interface.
pub(super) const VOLUME: &str = "volume";
/// A container.
pub(super) const CONTAINER: &str = "container";
/// The volume whose property [`MARKER_ID`] identifies the incarnation.
pub(super) const MARKER: &str = "marker";
/// A volume that holds the manifest of another volume.
pub(super) const SIDECAR: &str = "sidecar";

/// Of the marker volume: the marker.
pub(super) const MARKER_ID: &str = "gantry.marker";
/// Of the marker volume: the mark of the artifact store that owns the volumes.
pub(super) const STORE: &str = "gantry.store";
/// Of a volume: the artifact that it holds.
pub(super) const ARTIFACT: &str = "gantry.artifact";
/// Of a volume: its parent.
pub(super) const PARENT: &str = "gantry.parent";
/// Of a sidecar: the length of its manifest in bytes, set when the manifest is complete.
pub(super) const MANIFEST_BYTES: &str = "gantry.manifest-bytes";

/// Of a container: its handle. A filter for one property works on every kind of worker.
pub(super) const HANDLE: &str = "gantry.handle";
/// Of a container: its team.
pub(super) const TEAM: &str = "gantry.team";
/// Of a container: the working directory of its process.
pub(super) const DIRECTORY: &str = "gantry.directory";
/// Of a container: the user of its process.
pub(super) const USER: &str = "gantry.user";
/// Of a container: text of the gateway. Absent: none.
pub(super) const NOTE: &str = "gantry.note";
/// Of a container: the volume of its root file system.
pub(super) const ROOT: &str = "gantry.root";
/// Of a container: present if its root is the whole volume, and not the directory `rootfs`.
pub(super) const WHOLE: &str = "gantry.whole";
/// Of a container, and of the volume of its root: the process to start. This is the intent.
pub(super) const PROCESS: &str = "gantry.process";
/// Of a volume: the process of the intent was destroyed with its container.
pub(super) const NO_PROCESS: &str = "none";
/// Of a container: the kind of input of its process: [`STREAM`], [`INLINE`],
/// [`CLOSED`] or [`TERMINAL`].
/// Absent: no input.
pub(super) const INPUT: &str = "gantry.input";
/// Input from an attached client.
pub(super) const STREAM: &str = "stream";
/// Input that the gateway has and that it has not sent completely.
pub(super) const INLINE: &str = "inline";
/// Input that is closed.
pub(super) const CLOSED: &str = "closed";
/// A terminal.
pub(super) const TERMINAL: &str = "terminal";
/// Of a container: proof that its process was started.
pub(super) const STARTED: &str = "gantry.started";
/// Of a container: the last reader of the output, if it is not the gateway that started the
/// process. See [`super::output_offsets`].
pub(super) const READER: &str = "gantry.reader";
/// Of a container: a stop of its process was requested.
pub(super) const STOPPED: &str = "gantry.stopped";
/// Of a container: how its process ended.
pub(super) const END: &str = "gantry.end";
/// Of a container: a further process to start beside the main process, `gantry.exec.ID`. This is
/// the intent. The other properties of the process also end with its id.
pub(super) const EXEC: &str = "gantry.exec";

/// The further processes that these properties name.
pub(super) fn further_processes(
    properties: &std::collections::BTreeMap<String, String>,
) -> impl Iterator<Item = domain::ProcessId> {
    properties.keys().filter_map(|name| name.strip_prefix(EXEC)?.strip_prefix('.')?.parse().ok())
}

/// The name of a property of a further process.
pub(super) fn of_process(name: &str, process: domain::ProcessId) -> String {
    format!("{name}.{process}")
}

/// Value of a property that is only a flag.
pub(super) const YES: &str = "yes";
