//! The database: entities, schema, and helpers to build statements.

pub(crate) mod entity;
pub(crate) mod ids;
pub(crate) mod migrations;
mod owner_facts;
pub(crate) mod units;
pub(crate) mod volumes;
