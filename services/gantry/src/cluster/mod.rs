//! Cluster on this machine: all four services in one process, with SQLite databases and one Unix
//! socket.
//!
//! ```text
//! any command ── no cluster answers ──▶ starts `gantry up --detached`, waits until it answers
//! gantry up   ── holds the lock     ──▶ binds the socket, starts the services, serves; ends when asked, or idle
//! ```
//!
//! Invariant: at most one cluster uses a state directory. Its process holds a lock on a file in
//! that directory. The kernel releases the lock when the process ends.

mod down;
mod idle;
pub(crate) mod lock;
mod paths;
mod reach;
mod removal;
mod service;
mod services;
pub(crate) mod start;
mod up;

pub(crate) use down::down;
pub(crate) use idle::unfinished;
pub(crate) use paths::Paths;
pub(crate) use start::ensure;
pub(crate) use up::up;

/// Enters the user namespace of the worker on this machine, if an ordinary user runs this process.
/// Must be called before any thread exists.
pub(crate) fn enter_user_namespace() -> anyhow::Result<()> {
    let paths = Paths::find()?;
    paths.make()?;
    Ok(runtime_gateway::host::enter_user_namespace(&paths.worker())?)
}

/// Warning for a cluster with `--hold-destruction`.
const HOLDS_DESTRUCTION: &str =
    "this cluster never destroys garbage (--hold-destruction), so its disk fills up";

/// Exit code of a detached cluster if another cluster holds the lock.
pub(crate) const ANOTHER_RUNS: u8 = 75;
