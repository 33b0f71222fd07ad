//! Calls to a cluster that commands share: connections, tokens, queries and paged lists.

pub(crate) mod caches;
pub(crate) mod connect;
pub(crate) mod freed_space;
pub(crate) mod images;
pub(crate) mod outage;
pub(crate) mod placement;
pub(crate) mod queries;
pub(crate) mod references;
pub(crate) mod token;
pub(crate) mod transfers;
pub(crate) mod why;
