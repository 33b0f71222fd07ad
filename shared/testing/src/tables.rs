//! Snapshots of all tables of a service's database.

use std::collections::BTreeSet;

use sea_orm::{ConnectionTrait, DatabaseConnection, DbBackend, Statement};

/// A separate connection to the database of a service.
pub struct Tables {
    connection: DatabaseConnection,
    /// For each table, its name and a query for its rows as text.
    selects: Vec<(String, String)>,
}

impl Tables {
    /// Opens the database at `url`. The service must have created its tables.
    pub async fn open(url: &str) -> Self {
        let connection = sea_orm::Database::connect(url).await.expect("the database");
        let is_sqlite = connection.get_database_backend() == DbBackend::Sqlite;
        let names = if is_sqlite {
            "SELECT name AS text FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
        } else {
            "SELECT CAST(table_name AS TEXT) AS text FROM information_schema.tables WHERE table_schema = 'public'"
        };
        let mut selects = Vec::new();
        for name in texts(&connection, names).await {
            let select = if is_sqlite {
                let columns = format!("SELECT name AS text FROM pragma_table_info('{name}')");
                let columns = texts(&connection, &columns).await.into_iter();
                let quoted: Vec<_> = columns.map(|column| format!("quote({column})")).collect();
                format!("SELECT {} AS text FROM {name}", quoted.join(" || ',' || "))
            } else {
                format!("SELECT CAST(t AS TEXT) AS text FROM {name} t")
            };
            selects.push((name, select));
        }
        assert!(selects.len() > 1, "a service has tables: {selects:?}");
        Self { connection, selects }
    }

    /// All rows, each with the name of its table. No table may have two equal rows.
    pub async fn rows(&self) -> BTreeSet<String> {
        let mut rows = BTreeSet::new();
        for (name, select) in &self.selects {
            for row in texts(&self.connection, select).await {
                assert!(rows.insert(format!("{name}: {row}")), "twice in {name}: {row}");
            }
        }
        rows
    }

    /// Asserts that the rows did not change.
    #[track_caller]
    pub fn assert_unchanged(before: &BTreeSet<String>, after: &BTreeSet<String>, what: &str) {
        unchanged(before, after).unwrap_or_else(|changes| panic!("{what} {changes}"));
    }
}

/// Compares the rows. The error describes the differences.
pub(crate) fn unchanged(before: &BTreeSet<String>, after: &BTreeSet<String>) -> Result<(), String> {
    let went: Vec<_> = before.difference(after).collect();
    let came: Vec<_> = after.difference(before).collect();
    if went.is_empty() && came.is_empty() {
        return Ok(());
    }
    Err(format!("changed {went:#?} to {came:#?}"))
}

async fn texts(connection: &DatabaseConnection, select: &str) -> Vec<String> {
    let statement = Statement::from_string(connection.get_database_backend(), select);
    let rows = connection.query_all_raw(statement).await.expect("rows");
    rows.iter().map(|row| row.try_get("", "text").expect("text")).collect()
}
