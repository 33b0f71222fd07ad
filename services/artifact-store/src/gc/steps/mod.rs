//! The steps of a round. Each processes batches of due rows of one kind.

pub(crate) mod artifacts;
pub(crate) mod attempts;
pub(crate) mod builds;
pub(crate) mod caches;
pub(crate) mod claims;
pub(crate) mod deleted;
pub(crate) mod deletion_log;
pub(crate) mod holders;
pub(crate) mod losses;
