//! Many rows as one value, so that a statement is the same however many they are, and is parsed and planned once.
//!
//! The value is a JSON text, which both databases read as a table. PostgreSQL is given it through a query of its own, so that it does not count
//! the rows when it plans: it would read a whole table rather than look for some thousand rows by an index.

use sea_orm::{DbBackend, DbErr, Value};
use serde::Serialize;
use uuid::Uuid;

/// What a column of such rows holds, and as what its field is serialized.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Column {
    /// `Uuid`, by its own serialization.
    Uuid,
    /// Any integer of up to 64 bits with a sign.
    Integer,
    /// Text.
    Text,
    /// Bytes, as hexadecimal text.
    Bytes,
    /// A boolean.
    Boolean,
}

/// A query that answers, under these names, the rows that [`value`] made the value `$n`.
#[must_use]
pub fn query(backend: DbBackend, n: usize, columns: &[(&str, Column)]) -> String {
    let list = |one: &dyn Fn(&str, Column) -> String| {
        columns.iter().map(|(name, column)| one(name, *column)).collect::<Vec<_>>().join(", ")
    };
    match backend {
        DbBackend::Postgres => {
            let names = list(&|name, column| match column {
                Column::Bytes => format!("decode({name}, 'hex') AS {name}"),
                _ => name.to_owned(),
            });
            let types = list(&|name, column| {
                let of = match column {
                    Column::Uuid => "UUID",
                    Column::Integer => "BIGINT",
                    Column::Text | Column::Bytes => "TEXT",
                    Column::Boolean => "BOOLEAN",
                };
                format!("{name} {of}")
            });
            format!(
                "SELECT {names} FROM json_to_recordset(CAST((SELECT CAST(${n} AS TEXT)) AS JSON)) AS given({types})"
            )
        }
        _ => {
            let names = list(&|name, column| match column {
                Column::Uuid => format!("unhex(value ->> '{name}', '-') AS {name}"),
                Column::Bytes => format!("unhex(value ->> '{name}') AS {name}"),
                Column::Integer | Column::Text | Column::Boolean => format!("value ->> '{name}' AS {name}"),
            });
            format!("SELECT {names} FROM json_each(${n})")
        }
    }
}

/// These rows, for [`query`]: each has a field for each column.
pub fn value<R: Serialize>(rows: &[R]) -> Result<Value, DbErr> {
    let text = serde_json::to_string(rows).map_err(|error| DbErr::Type(error.to_string()))?;
    Ok(Value::from(text))
}

/// The condition that a column, before it, is one of the ids that [`ids`] made the value `$n`. As an array of its own in PostgreSQL: it would
/// look through a table that it takes for small, as it was when the statement was planned, for rows of a query.
#[must_use]
pub fn among(backend: DbBackend, n: usize) -> String {
    let ids = query(backend, n, &[("id", Column::Uuid)]);
    match backend {
        DbBackend::Postgres => format!("= ANY(ARRAY({ids}))"),
        _ => format!("IN ({ids})"),
    }
}

/// These ids, for [`among`].
pub fn ids(ids: impl IntoIterator<Item = Uuid>) -> Result<Value, DbErr> {
    #[derive(Serialize)]
    struct Row {
        id: Uuid,
    }
    value(&ids.into_iter().map(|id| Row { id }).collect::<Vec<_>>())
}

/// A lock of the rows that a query names, where there are locks.
#[must_use]
pub fn lock(backend: DbBackend, lock: &'static str) -> &'static str {
    match backend {
        DbBackend::Postgres => lock,
        _ => "",
    }
}
