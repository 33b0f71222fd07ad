//! Bytes in and out of the volumes of a worker.

pub(crate) mod archives;
mod blocking_pipe;
pub(crate) mod disk_reservations;
mod local_dir;
pub(crate) mod manifests;
pub(crate) mod peer_copy;
pub(crate) mod pull;
mod remote;
mod verify;
pub(crate) mod volumes;
