//! The schema, one migration after the other. A released one is never edited.

use db::{Migrations, SqlMigration};

pub(crate) struct Schema;

impl Migrations for Schema {
    const ALL: &'static [SqlMigration] = &[
        SqlMigration { name: "0001_store", sql: include_str!("migrations/0001_store.sql") },
        SqlMigration { name: "0002_copies", sql: include_str!("migrations/0002_copies.sql") },
        SqlMigration { name: "0003_lifecycles", sql: include_str!("migrations/0003_lifecycles.sql") },
        SqlMigration { name: "0004_reports", sql: include_str!("migrations/0004_reports.sql") },
        SqlMigration { name: "0005_caches", sql: include_str!("migrations/0005_caches.sql") },
        SqlMigration { name: "0006_inventory", sql: include_str!("migrations/0006_inventory.sql") },
        SqlMigration { name: "0007_why", sql: include_str!("migrations/0007_why.sql") },
        SqlMigration { name: "0009_set_aside", sql: include_str!("migrations/0009_set_aside.sql") },
        SqlMigration { name: "0010_trees", sql: include_str!("migrations/0010_trees.sql") },
        SqlMigration { name: "0014_graves", sql: include_str!("migrations/0014_graves.sql") },
    ];
}
