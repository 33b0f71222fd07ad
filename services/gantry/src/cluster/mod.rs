//! The cluster on this machine: all four services in one process, on SQLite, behind one Unix socket.
//!
//! ```text
//! any command ── nobody answers ──▶ starts `gantry up --detached`, waits until it answers
//! gantry up   ── holds the lock ──▶ binds the socket, starts the services, serves; ends when asked, or idle
//! ```
//!
//! Invariant: at most one cluster speaks for a state directory. Whoever does holds the lock on a file in it for as long as
//! its process lives; the kernel lets go of it when that ends, however it ends.

mod down;
mod idle;
pub(crate) mod lock;
mod paths;
mod reach;
mod service;
mod services;
pub(crate) mod start;
mod up;

pub(crate) use down::down;
pub(crate) use idle::unfinished;
pub(crate) use paths::Paths;
pub(crate) use start::ensure;
pub(crate) use up::up;

/// What is said aloud where destruction is held.
const HOLDS_DESTRUCTION: &str =
    "this cluster destroys nothing (--hold-destruction): what should go stays, and the disk fills up";

/// The exit code of a detached cluster that found another one in its place.
pub(crate) const ANOTHER_RUNS: u8 = 75;
