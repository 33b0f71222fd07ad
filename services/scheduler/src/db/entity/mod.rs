//! The tables, one module each; the migration says what each column means. Private to the crate: each table is changed only by
//! the module that owns it, and what leaves that module is typed.

mod enum_columns;
pub(crate) mod event;
pub(crate) mod heartbeat;
pub(crate) mod lease;
pub(crate) mod outbox;
pub(crate) mod owner_affinity;
pub(crate) mod peer_waiters;
pub(crate) mod removed_worker;
pub(crate) mod reservation;
pub(crate) mod signing_key;
pub(crate) mod worker;
pub(crate) mod worker_revision;
pub(crate) mod workload;

/// In a statement that names rows by their ids: the state of such a row. Without an index of those in one state, which PostgreSQL takes for
/// the shortest way where there was hardly any when it looked at the table last, however many there are by now.
pub(crate) const STATE_OF_NAMED: &str = "(state || '')";

/// JSON of a column that this service wrote.
pub(crate) fn from_json<T: serde::de::DeserializeOwned>(text: &str) -> Result<T, sea_orm::DbErr> {
    serde_json::from_str(text).map_err(|error| sea_orm::DbErr::Type(error.to_string()))
}

/// JSON for a column.
pub(crate) fn to_json<T: serde::Serialize>(value: &T) -> Result<String, sea_orm::DbErr> {
    serde_json::to_string(value).map_err(|error| sea_orm::DbErr::Type(error.to_string()))
}

/// Whether a row with this key was there already.
pub(crate) fn is_duplicate(error: &sea_orm::DbErr) -> bool {
    matches!(error.sql_err(), Some(sea_orm::SqlErr::UniqueConstraintViolation(_)))
}
