//! Statements that write, and answer nothing: a round trip for all of them, where the database takes several as one.

use sea_orm::{ConnectionTrait, DatabaseTransaction, DbBackend, DbErr, Statement, Value};

/// What a transaction writes in the end. Each statement is of another table, and none depends on what another has written: PostgreSQL carries
/// out all of them on what was there before.
#[derive(Debug)]
pub(crate) struct Writes {
    backend: DbBackend,
    statements: Vec<(String, Vec<Value>)>,
    /// How many values PostgreSQL is given before those of the next statement.
    given: usize,
}

impl Writes {
    pub(crate) fn new(backend: DbBackend) -> Self {
        Self { backend, statements: Vec::new(), given: 0 }
    }

    /// Adds a statement with these values, the first of which is `$n` of the `n` that it is told.
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

    /// Has all of them carried out.
    pub(crate) async fn write(self, txn: &DatabaseTransaction) -> Result<(), DbErr> {
        let statements = match self.backend {
            DbBackend::Postgres => together(self.statements).into_iter().collect(),
            _ => self.statements,
        };
        for (query, values) in statements {
            txn.execute_raw(Statement::from_sql_and_values(self.backend, query, values)).await?;
        }
        Ok(())
    }
}

/// One statement that does what these do.
fn together(mut statements: Vec<(String, Vec<Value>)>) -> Option<(String, Vec<Value>)> {
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
