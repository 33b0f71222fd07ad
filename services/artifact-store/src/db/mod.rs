//! The database: its tables as sea-orm sees them, its schema, and what statements are made of.

pub(crate) mod entity;
pub(crate) mod ids;
pub(crate) mod migrations;
mod owner_facts;
pub(crate) mod units;
pub(crate) mod volumes;
