//! The database: tables, migrations and batches of statements.

pub(crate) mod entity;
pub(crate) mod writes;
