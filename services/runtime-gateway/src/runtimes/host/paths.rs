//! Names of files in the directories of containers and processes.

/// The specification of a container.
pub(super) const CONTAINER: &str = "container.json";
/// The directory of the processes of a container, one subdirectory each.
pub(super) const PROCESSES: &str = "processes";

/// A file with the process id of the supervisor, which locks it while it lives.
pub(super) const ALIVE: &str = "alive";
/// The process id of init. Written before the intent is taken.
pub(super) const INIT: &str = "init";
/// The intent to start, until it is taken or revoked.
pub(super) const INTENT: &str = "intent";
/// The taken intent: the process was started, or its start failed.
pub(super) const STARTED: &str = "started";
/// The revoked intent: the process was not started, and never will be.
pub(super) const REVOKED: &str = "revoked";
/// Inline standard input. Contains secrets, so only root can read it.
pub(super) const STDIN: &str = "stdin";
/// Spool of standard output.
pub(super) const STDOUT: &str = "stdout";
/// Spool of standard error.
pub(super) const STDERR: &str = "stderr";
/// The exit record.
pub(super) const END: &str = "end";
/// Reserved space for the exit record, so that a full disk cannot lose it.
pub(super) const RESERVE: &str = "end.new";
/// Resource usage. Written before the exit record, and missing if it could not be written.
pub(super) const USAGE: &str = "usage";
/// The log of the supervisor, for people.
pub(super) const LOG: &str = "log";
