//! Many ids as one value, so that a statement is the same however many they are, and is parsed and planned once.
//!
//! PostgreSQL is given an array, SQLite a JSON text. PostgreSQL is given it as a text, and reads it in a query of its own, so that it does not
//! count them when it plans: it would read a whole table rather than look for some thousand rows by an index.

use std::fmt::Write;

use sea_orm::sea_query::Expr;
use sea_orm::{DbBackend, Value};
use uuid::Uuid;

/// A query that answers, as `id`, the ids that [`value`] made the value `$n`.
pub(crate) fn query(backend: DbBackend, n: usize) -> String {
    match backend {
        DbBackend::Postgres => {
            format!("SELECT unnest(CAST((SELECT CAST(${n} AS TEXT)) AS UUID[])) AS id")
        }
        _ => format!("SELECT unhex(value) AS id FROM json_each(${n})"),
    }
}

/// These ids, for [`query`].
pub(crate) fn value(backend: DbBackend, ids: impl IntoIterator<Item = Uuid>) -> Value {
    match backend {
        DbBackend::Postgres => list("{", ids, "}", |text, id| write!(text, "{}", id.simple())),
        _ => list("[", ids, "]", |text, id| write!(text, "\"{}\"", id.simple())),
    }
}

/// The condition that `column` is one of these ids.
pub(crate) fn among(backend: DbBackend, column: &str, ids: impl IntoIterator<Item = Uuid>) -> Expr {
    let query = query(backend, 1);
    // How a value is written in a text that becomes a part of a statement.
    let query = if backend == DbBackend::Postgres { query } else { query.replace("$1", "?") };
    Expr::cust_with_values(format!("{column} IN ({query})"), [value(backend, ids)])
}

/// A query that answers, as `id` and `at`, the pairs that [`pairs`] made the value `$n`.
pub(crate) fn pairs_query(backend: DbBackend, n: usize) -> String {
    match backend {
        DbBackend::Postgres => format!(
            "SELECT CAST(pair ->> 0 AS UUID) AS id, CAST(pair ->> 1 AS BIGINT) AS at
             FROM json_array_elements(CAST((SELECT CAST(${n} AS TEXT)) AS JSON)) AS pair"
        ),
        _ => format!(
            "SELECT unhex(json_extract(value, '$[0]')) AS id, json_extract(value, '$[1]') AS at FROM json_each(${n})"
        ),
    }
}

/// These ids, each with an instant or none, for [`pairs_query`].
pub(crate) fn pairs(pairs: impl IntoIterator<Item = (Uuid, Option<i64>)>) -> Value {
    list("[", pairs, "]", |text, (id, at)| match at {
        Some(at) => write!(text, "[\"{}\",{at}]", id.simple()),
        None => write!(text, "[\"{}\",null]", id.simple()),
    })
}

/// A lock of the rows that a query names, where there are locks.
pub(crate) fn lock(backend: DbBackend, lock: &'static str) -> &'static str {
    match backend {
        DbBackend::Postgres => lock,
        _ => "",
    }
}

fn list<T>(
    open: &str,
    items: impl IntoIterator<Item = T>,
    close: &str,
    write: impl Fn(&mut String, T) -> std::fmt::Result,
) -> Value {
    let mut text = open.to_owned();
    for (place, item) in items.into_iter().enumerate() {
        if place > 0 {
            text.push(',');
        }
        // A String takes everything.
        write(&mut text, item).ok();
    }
    text.push_str(close);
    text.into()
}

#[cfg(test)]
mod tests {
    use std::collections::{HashMap, HashSet};

    use db::Database;
    use sea_orm::{ConnectionTrait, Statement};
    use testing::databases::{self, TestDatabase};

    use super::*;
    use crate::db::migrations::Schema;

    #[tokio::test(flavor = "multi_thread")]
    async fn a_statement_takes_any_number_of_ids_on_sqlite() {
        a_statement_takes_any_number_of_ids(databases::sqlite()).await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_statement_takes_any_number_of_ids_on_postgres() {
        a_statement_takes_any_number_of_ids(databases::postgres().await).await;
    }

    /// More than either database takes values.
    async fn a_statement_takes_any_number_of_ids(database: TestDatabase) {
        let db = Database::connect::<Schema>(&database.url).await.expect("a database");
        let backend = db.read().get_database_backend();
        let ids: HashSet<_> = (0..100_000).map(|_| Uuid::new_v4()).collect();
        let several = [HashSet::new(), ids.iter().copied().take(1).collect(), ids.clone()];
        for some in several {
            let asked = [value(backend, some.iter().copied())];
            let asked = Statement::from_sql_and_values(backend, query(backend, 1), asked);
            let answered = db.read().query_all_raw(asked).await.expect("asked");
            let answered: HashSet<Uuid> =
                answered.iter().map(|row| row.try_get("", "id").expect("an id")).collect();
            assert_eq!(answered, some);
        }

        let instants = (0..).map(|n| (n % 3 > 0).then_some(i64::MAX - n));
        let looks: HashMap<Uuid, Option<i64>> = ids.into_iter().zip(instants).collect();
        let asked = [pairs(looks.iter().map(|(id, at)| (*id, *at)))];
        let asked = Statement::from_sql_and_values(backend, pairs_query(backend, 1), asked);
        let answered = db.read().query_all_raw(asked).await.expect("asked");
        let answered: HashMap<Uuid, Option<i64>> = answered
            .iter()
            .map(|row| (row.try_get("", "id").expect("an id"), row.try_get("", "at").expect("an instant")))
            .collect();
        assert_eq!(answered, looks);
    }
}
