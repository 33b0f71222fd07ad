//! The tables, one module each. The migration describes each column.
//!
//! Each table has one writing module, and only typed values leave that module.

mod enum_columns;
pub(crate) mod event;
pub(crate) mod heartbeat;
pub(crate) mod lease;
pub(crate) mod outbox;
pub(crate) mod owner_affinity;
pub(crate) mod peer_waiters;
pub(crate) mod removed_worker;
pub(crate) mod reservation;
pub(crate) mod result;
pub(crate) mod signing_key;
pub(crate) mod worker;
pub(crate) mod worker_revision;
pub(crate) mod workload;

/// The state of a row in a statement that selects rows by id. The concatenation keeps PostgreSQL
/// from using an index of rows in one state. The planner prefers such an index if the state was
/// rare at the last ANALYZE.
pub(crate) const STATE_OF_NAMED: &str = "(state || '')";

/// Parses the JSON of a column that this service wrote.
pub(crate) fn from_json<T: serde::de::DeserializeOwned>(text: &str) -> Result<T, sea_orm::DbErr> {
    serde_json::from_str(text).map_err(|error| sea_orm::DbErr::Type(error.to_string()))
}

/// Serializes a value as JSON for a column.
pub(crate) fn to_json<T: serde::Serialize>(value: &T) -> Result<String, sea_orm::DbErr> {
    serde_json::to_string(value).map_err(|error| sea_orm::DbErr::Type(error.to_string()))
}

/// Returns whether the insert failed because a row with this key exists.
pub(crate) fn is_duplicate(error: &sea_orm::DbErr) -> bool {
    matches!(error.sql_err(), Some(sea_orm::SqlErr::UniqueConstraintViolation(_)))
}
