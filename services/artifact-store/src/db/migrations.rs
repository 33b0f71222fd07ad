//! The schema: one file, for nothing has been released yet. A later change is a migration of its
//! own.

use db::{Migrations, SqlMigration};

pub(crate) struct Schema;

impl Migrations for Schema {
    const ALL: &'static [SqlMigration] =
        &[SqlMigration { name: "0001_store", sql: include_str!("migrations/0001_store.sql") }];
}
