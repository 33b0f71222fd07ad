//! The schema, one migration after the other. A released one is never edited.

use db::{SqlMigration, sql_migrations};
use sea_orm_migration::{MigrationTrait, MigratorTrait};

pub(crate) struct Schema;

impl MigratorTrait for Schema {
    fn migrations() -> Vec<Box<dyn MigrationTrait>> {
        sql_migrations(&[
            SqlMigration { name: "0001_store", sql: include_str!("migrations/0001_store.sql") },
            SqlMigration { name: "0002_copies", sql: include_str!("migrations/0002_copies.sql") },
        ])
    }
}
