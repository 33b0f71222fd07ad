//! Properties by which the worker's containers and volumes are known again: all that is durable of this runtime.
//!
//! None is ever empty: a containerd worker loses a property with an empty value.

/// Of a volume or container that is ours: [`VOLUME`], [`CONTAINER`], [`MARKER`] or [`SIDECAR`].
pub(super) const KIND: &str = "gantry.kind";
/// A volume that the trait knows.
pub(super) const VOLUME: &str = "volume";
/// A container.
pub(super) const CONTAINER: &str = "container";
/// The volume whose property [`MARKER_ID`] identifies this life of what the worker holds.
pub(super) const MARKER: &str = "marker";
/// A volume beside another one, which has its manifest.
pub(super) const SIDECAR: &str = "sidecar";

/// Of the marker volume: the marker.
pub(super) const MARKER_ID: &str = "gantry.marker";
/// Of the marker volume: of which life of the artifact store the volumes are.
pub(super) const STORE: &str = "gantry.store";
/// Of a volume: the artifact whose bytes it holds.
pub(super) const ARTIFACT: &str = "gantry.artifact";
/// Of a volume: its parent.
pub(super) const PARENT: &str = "gantry.parent";
/// Of a sidecar: how long the manifest in it is, set when it is whole.
pub(super) const MANIFEST_BYTES: &str = "gantry.manifest-bytes";

/// Of a container: its own handle, so that it can be asked for by the filter that every kind of worker has.
pub(super) const HANDLE: &str = "gantry.handle";
/// Of a container: whose it is.
pub(super) const TEAM: &str = "gantry.team";
/// Of a container: where its process starts.
pub(super) const DIRECTORY: &str = "gantry.directory";
/// Of a container: who runs in it.
pub(super) const USER: &str = "gantry.user";
/// Of a container: the volume that its root file system is in.
pub(super) const ROOT: &str = "gantry.root";
/// Of a container: the volume is its root as it is, and not the directory `rootfs` of it.
pub(super) const WHOLE: &str = "gantry.whole";
/// Of a container, and of the volume that its root is in: the process that is to be started in it. The intent.
pub(super) const PROCESS: &str = "gantry.process";
/// Of a volume: the process that was to be started is gone with its container.
pub(super) const NO_PROCESS: &str = "none";
/// Of a container: how its process gets input, [`STREAM`], [`CLOSED`] or [`TERMINAL`]. Absent: it gets none.
pub(super) const INPUT: &str = "gantry.input";
/// A stream from whoever attaches.
pub(super) const STREAM: &str = "stream";
/// It has got all of it.
pub(super) const CLOSED: &str = "closed";
/// A terminal.
pub(super) const TERMINAL: &str = "terminal";
/// Of a container: its process was started. Proof, not intent.
pub(super) const STARTED: &str = "gantry.started";
/// Of a container: who reads what its process says, after who started it; see [`super::output_offsets`].
pub(super) const READER: &str = "gantry.reader";
/// Of a container: its process was asked to end.
pub(super) const STOPPED: &str = "gantry.stopped";
/// Of a container: how its process ended.
pub(super) const END: &str = "gantry.end";
/// Of what is a mark and nothing more.
pub(super) const YES: &str = "yes";
