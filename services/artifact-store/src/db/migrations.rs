//! The schema of the store's database, as a list of migrations.

use db::{Migrations, SqlMigration};

pub(crate) struct Schema;

impl Migrations for Schema {
    const ALL: &'static [SqlMigration] = &[
        SqlMigration { name: "0001_store", sql: include_str!("migrations/0001_store.sql") },
        SqlMigration { name: "0002_loss_reason", sql: include_str!("migrations/0002_loss_reason.sql") },
        SqlMigration { name: "0003_disk_usage", sql: include_str!("migrations/0003_disk_usage.sql") },
    ];
}
