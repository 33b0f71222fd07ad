//! Implementations of the [`runtime::Runtime`] trait: Garden and host.

pub(crate) mod container_note;
pub(crate) mod exit_record;
pub mod garden;
pub mod host;
pub(crate) mod output_spool;
