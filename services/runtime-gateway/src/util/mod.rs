//! Small helpers that several modules share.

pub(crate) mod blocking;
pub(crate) mod clock;
pub(crate) mod disk_reserve;
pub(crate) mod keyed_locks;
pub(crate) mod mapped_ids;
pub(crate) mod retry;
pub(crate) mod transferred;
