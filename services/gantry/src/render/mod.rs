//! Output for people and programs: tables, JSON, progress, and the two output streams.
//!
//! Commands call this module. It makes no call to a cluster.

pub(crate) mod confirm;
pub(crate) mod explanation;
pub(crate) mod filter;
pub(crate) mod full_screen;
pub(crate) mod json;
pub(crate) mod labels;
pub(crate) mod listing;
pub(crate) mod output;
pub(crate) mod progress;
pub(crate) mod screen;
pub(crate) mod short_ids;
pub(crate) mod stdout;
pub(crate) mod table;
pub(crate) mod tail;
pub(crate) mod template;
pub(crate) mod terminal;
pub(crate) mod ui;
