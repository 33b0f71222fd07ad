//! The calls to a cluster that commands share: connections, tokens, and lists page by page.

pub(crate) mod connect;
pub(crate) mod queries;
pub(crate) mod token;
