//! The commands, one module each. No command uses another one; what they share is below.

pub(crate) mod caches;
pub(crate) mod capacity;
pub(crate) mod cat;
pub(crate) mod delete;
pub(crate) mod explain;
pub(crate) mod imports;
pub(crate) mod list;
pub(crate) mod logs;
pub(crate) mod orphans;
pub(crate) mod run;
pub(crate) mod status;
pub(crate) mod validate;
pub(crate) mod workers;
