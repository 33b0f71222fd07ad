//! Names of files in the directories of a container and of a process.

/// What a container is.
pub(super) const CONTAINER: &str = "container.json";
/// Processes of a container, one directory each.
pub(super) const PROCESSES: &str = "processes";

/// Locked by the supervisor as long as it lives; says its process id.
pub(super) const ALIVE: &str = "alive";
/// The intent to start, until somebody takes or revokes it.
pub(super) const INTENT: &str = "intent";
/// The intent, taken: it was started, or would have been.
pub(super) const STARTED: &str = "started";
/// The intent, revoked: it never was and never will be started.
pub(super) const REVOKED: &str = "revoked";
/// Standard output.
pub(super) const STDOUT: &str = "stdout";
/// Standard error.
pub(super) const STDERR: &str = "stderr";
/// How it ended.
pub(super) const END: &str = "end";
/// Space for the former, so that a full disk cannot lose it.
pub(super) const RESERVE: &str = "end.new";
/// What it used. Written before how it ended, and missing where that could not be written.
pub(super) const USAGE: &str = "usage";
/// What the supervisor has to say, for people.
pub(super) const LOG: &str = "log";
