//! Many rows as one parameter of a statement.
//!
//! The text of such a statement does not depend on the number of rows, so the database parses and
//! plans it once. The parameter is a JSON text, which PostgreSQL and SQLite read as a table.
//! PostgreSQL receives it through a subquery, so that it cannot count the rows while planning. For
//! some thousand rows it would otherwise scan a whole table instead of using an index.

use sea_orm::{DbBackend, DbErr, Value};
use serde::Serialize;
use uuid::Uuid;

/// The type of a column, and the serialization of its field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Column {
    /// A [`Uuid`], with its default serialization.
    Uuid,
    /// A signed integer of at most 64 bits.
    Integer,
    /// Text.
    Text,
    /// Bytes, as hexadecimal text.
    Bytes,
    /// A boolean.
    Boolean,
}

/// Returns a query for the rows in the parameter `$n`, which [`value`] makes. `columns` names the
/// columns.
#[must_use]
pub fn query(backend: DbBackend, n: usize, columns: &[(&str, Column)]) -> String {
    let list = |format: &dyn Fn(&str, Column) -> String| {
        columns.iter().map(|(name, column)| format(name, *column)).collect::<Vec<_>>().join(", ")
    };
    match backend {
        DbBackend::Postgres => {
            let names = list(&|name, column| match column {
                Column::Bytes => format!("decode({name}, 'hex') AS {name}"),
                _ => name.to_owned(),
            });
            let types = list(&|name, column| {
                let sql_type = match column {
                    Column::Uuid => "UUID",
                    Column::Integer => "BIGINT",
                    Column::Text | Column::Bytes => "TEXT",
                    Column::Boolean => "BOOLEAN",
                };
                format!("{name} {sql_type}")
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

/// Makes the parameter for [`query`] from `rows`. Each row must have a field for each column.
pub fn value<R: Serialize>(rows: &[R]) -> Result<Value, DbErr> {
    let text = serde_json::to_string(rows).map_err(|error| DbErr::Type(error.to_string()))?;
    Ok(Value::from(text))
}

/// Returns the condition that the column before it is among the ids in the parameter `$n`, which
/// [`ids`] makes.
///
/// On PostgreSQL the ids become an array. With a subquery, PostgreSQL would scan a table that was
/// small when it planned the statement.
#[must_use]
pub fn among(backend: DbBackend, n: usize) -> String {
    let ids = query(backend, n, &[("id", Column::Uuid)]);
    match backend {
        DbBackend::Postgres => format!("= ANY(ARRAY({ids}))"),
        _ => format!("IN ({ids})"),
    }
}

/// Makes the parameter for [`among`] from `ids`.
pub fn ids(ids: impl IntoIterator<Item = Uuid>) -> Result<Value, DbErr> {
    #[derive(Serialize)]
    struct Row {
        id: Uuid,
    }
    value(&ids.into_iter().map(|id| Row { id }).collect::<Vec<_>>())
}

/// Returns the locking clause `lock` on PostgreSQL, and nothing on SQLite, which has no row locks.
#[must_use]
pub fn lock(backend: DbBackend, lock: &'static str) -> &'static str {
    match backend {
        DbBackend::Postgres => lock,
        _ => "",
    }
}
