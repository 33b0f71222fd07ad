//! Batches of writing statements without results, sent to PostgreSQL in one round trip.

use sea_orm::{ConnectionTrait, DatabaseTransaction, DbBackend, DbErr, Statement, Value};

/// Statements at the end of a transaction. Each statement writes another table, and none depends on
/// the writes of another, because PostgreSQL executes all of them on one snapshot.
#[derive(Debug)]
pub(crate) struct Writes {
    backend: DbBackend,
    statements: Vec<(String, Vec<Value>)>,
    /// Number of PostgreSQL parameters of the statements so far.
    given: usize,
}

impl Writes {
    pub(crate) fn new(backend: DbBackend) -> Self {
        Self { backend, statements: Vec::new(), given: 0 }
    }

    /// Adds a statement with its values. `statement` receives the number `n` of its first parameter
    /// `$n`.
    pub(crate) fn add<const VALUES: usize>(
        &mut self,
        values: [Value; VALUES],
        statement: impl FnOnce(DbBackend, usize) -> String,
    ) {
        self.statements.push((statement(self.backend, self.given + 1), values.into()));
        if self.backend == DbBackend::Postgres {
            self.given += VALUES;
        }
    }

    /// Executes all statements.
    pub(crate) async fn write(self, txn: &DatabaseTransaction) -> Result<(), DbErr> {
        let statements = match self.backend {
            DbBackend::Postgres => join_statements(self.statements).into_iter().collect(),
            _ => self.statements,
        };
        for (query, values) in statements {
            txn.execute_raw(Statement::from_sql_and_values(self.backend, query, values)).await?;
        }
        Ok(())
    }
}

/// Joins the statements into one statement with common table expressions.
fn join_statements(mut statements: Vec<(String, Vec<Value>)>) -> Option<(String, Vec<Value>)> {
    let (last, mut values) = statements.pop()?;
    if statements.is_empty() {
        return Some((last, values));
    }
    let (mut query, mut before) = (String::new(), Vec::new());
    for (number, (statement, given)) in statements.into_iter().enumerate() {
        let with = if number == 0 { "WITH" } else { "," };
        query.push_str(&format!("{with} written_{number} AS ({statement}) "));
        before.extend(given);
    }
    before.append(&mut values);
    query.push_str(&last);
    Some((query, before))
}
