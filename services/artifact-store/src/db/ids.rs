//! Lists of ids as one value of a statement.
//!
//! A statement has the same text for any number of ids, so that it is parsed and planned once.
//!
//! SQLite gets a JSON text. PostgreSQL gets an array, as a text that a subquery converts. The
//! planner cannot count its elements then. Otherwise it would scan a whole table for some thousand
//! ids instead of using an index.

use std::fmt::Write;

use sea_orm::sea_query::Expr;
use sea_orm::{DbBackend, Value};
use uuid::Uuid;

/// Returns a query that yields, as `id`, the ids of the list [`value`], which is value `$n`.
pub(crate) fn query(backend: DbBackend, n: usize) -> String {
    match backend {
        DbBackend::Postgres => {
            format!("SELECT unnest(CAST((SELECT CAST(${n} AS TEXT)) AS UUID[])) AS id")
        }
        _ => format!("SELECT unhex(value) AS id FROM json_each(${n})"),
    }
}

/// Returns a list of ids as a value for [`query`].
pub(crate) fn value(backend: DbBackend, ids: impl IntoIterator<Item = Uuid>) -> Value {
    match backend {
        DbBackend::Postgres => list("{", ids, "}", |text, id| write!(text, "{}", id.simple())),
        _ => list("[", ids, "]", |text, id| write!(text, "\"{}\"", id.simple())),
    }
}

/// Returns the condition that `column` is one of the ids.
pub(crate) fn among(backend: DbBackend, column: &str, ids: impl IntoIterator<Item = Uuid>) -> Expr {
    let query = query(backend, 1);
    // Expressions number their values with `?` on SQLite.
    let query = if backend == DbBackend::Postgres { query } else { query.replace("$1", "?") };
    Expr::cust_with_values(format!("{column} IN ({query})"), [value(backend, ids)])
}

/// Returns a query that yields, as `id` and `at`, the pairs of the list [`pairs`], which is value
/// `$n`.
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

/// Returns a list of ids, each with an optional instant, as a value for [`pairs_query`].
pub(crate) fn pairs(pairs: impl IntoIterator<Item = (Uuid, Option<i64>)>) -> Value {
    list("[", pairs, "]", |text, (id, at)| match at {
        Some(at) => write!(text, "[\"{}\",{at}]", id.simple()),
        None => write!(text, "[\"{}\",null]", id.simple()),
    })
}

/// Returns the locking clause of a query, or nothing on a database without row locks.
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
        // Writing to a String cannot fail.
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
    async fn statement_takes_any_number_of_ids_on_sqlite() {
        statement_takes_any_number_of_ids(databases::sqlite()).await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn statement_takes_any_number_of_ids_on_postgres() {
        statement_takes_any_number_of_ids(databases::postgres().await).await;
    }

    /// Uses more ids than either database allows as separate values.
    async fn statement_takes_any_number_of_ids(database: TestDatabase) {
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
