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
        SqlMigration { name: "0011_marks", sql: include_str!("migrations/0011_marks.sql") },
        SqlMigration {
            name: "0012_task_cache_uses",
            sql: include_str!("migrations/0012_task_cache_uses.sql"),
        },
        SqlMigration { name: "0013_imports", sql: include_str!("migrations/0013_imports.sql") },
        SqlMigration { name: "0014_graves", sql: include_str!("migrations/0014_graves.sql") },
        SqlMigration {
            name: "0015_marked_with_artifacts",
            sql: include_str!("migrations/0015_marked_with_artifacts.sql"),
        },
        SqlMigration { name: "0016_receipts", sql: include_str!("migrations/0016_receipts.sql") },
    ];
}

#[cfg(test)]
mod tests {
    use db::Database;
    use sea_orm::{ConnectionTrait, Statement};
    use testing::databases::{self, TestDatabase};

    use super::*;

    /// The schema from before marks had queues.
    struct WithoutQueues;

    impl Migrations for WithoutQueues {
        const ALL: &'static [SqlMigration] = Schema::ALL.split_at(9).0;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn what_was_marked_is_in_its_queue_on_sqlite() {
        what_was_marked_is_in_its_queue(databases::sqlite()).await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn what_was_marked_is_in_its_queue_on_postgres() {
        what_was_marked_is_in_its_queue(databases::postgres().await).await;
    }

    async fn what_was_marked_is_in_its_queue(database: TestDatabase) {
        let queue = Schema::ALL.iter().position(|migration| migration.name == "0011_marks");
        assert_eq!(queue, Some(WithoutQueues::ALL.len()));
        let db = Database::connect::<WithoutQueues>(&database.url).await.expect("a database");
        let id = |n: u128| match db.is_sqlite() {
            true => format!("x'{n:032x}'"),
            false => format!("'{}'", uuid::Uuid::from_u128(n)),
        };
        let mut statements = vec![format!("INSERT INTO workers VALUES ({}, 1, 1, 9, 0)", id(1))];
        for (n, state) in (10..).zip(["open", "deleting"]) {
            statements.push(format!(
                "INSERT INTO artifacts (artifact_id, ordinal, team, label, state, size_bytes, had_owner, created_at, marked_at, look_at)
                 VALUES ({0}, {0}, 'main', '', '{state}', 0, TRUE, 1, 1, {n})",
                id(n)
            ));
        }
        for (n, state) in (20..).zip(["creating", "lost", "destroying", "sweeping"]) {
            statements.push(format!(
                "INSERT INTO volumes (handle, worker_id, state, purpose, complete, size_bytes, verified, created_at, judged_after)
                 VALUES ({}, {}, '{state}', 'scratch', FALSE, 0, FALSE, 1, 7)",
                id(n),
                id(1)
            ));
        }
        db.read().execute_unprepared(&statements.join(";")).await.expect("written");
        drop(db);

        let db = Database::connect::<Schema>(&database.url).await.expect("migrated");
        let asked = async |sql: &str| {
            let asked = Statement::from_string(db.read().get_database_backend(), sql);
            let answered = db.read().query_all_raw(asked).await.expect("asked");
            let text = |row: &sea_orm::QueryResult| row.try_get::<String>("", "text").expect("a text");
            answered.iter().map(text).collect::<Vec<_>>()
        };
        let marks = "SELECT v.state || ' ' || COALESCE(CAST(m.number AS TEXT), 'untold') AS text
                     FROM marks m JOIN volumes v ON v.handle = m.handle AND v.worker_id = m.worker_id AND v.given_up = TRUE ORDER BY 1";
        assert_eq!(asked(marks).await, ["destroying untold", "sweeping 7"]);
        let given_up = "SELECT state AS text FROM volumes WHERE given_up = TRUE ORDER BY 1";
        assert_eq!(asked(given_up).await, ["destroying", "sweeping"]);
        let tombstones = "SELECT a.state || ' ' || CAST(t.look_at AS TEXT) AS text
                          FROM tombstones t JOIN artifacts a ON a.artifact_id = t.artifact_id";
        assert_eq!(asked(tombstones).await, ["deleting 11"]);
        let looks = "SELECT state || ' ' || COALESCE(CAST(look_at AS TEXT), 'never') AS text FROM artifacts ORDER BY 1";
        assert_eq!(asked(looks).await, ["deleting never", "open 10"]);
    }

    /// The schema from before replicas went with their artifacts.
    struct EachByItself;

    impl Migrations for EachByItself {
        const ALL: &'static [SqlMigration] = Schema::ALL.split_at(13).0;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn no_transfer_is_in_the_way_of_another_for_what_was_marked_on_sqlite() {
        no_transfer_is_in_the_way_of_another_for_what_was_marked(databases::sqlite()).await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn no_transfer_is_in_the_way_of_another_for_what_was_marked_on_postgres() {
        no_transfer_is_in_the_way_of_another_for_what_was_marked(databases::postgres().await).await;
    }

    async fn no_transfer_is_in_the_way_of_another_for_what_was_marked(database: TestDatabase) {
        let next = Schema::ALL.iter().position(|migration| migration.name == "0015_marked_with_artifacts");
        assert_eq!(next, Some(EachByItself::ALL.len()));
        let db = Database::connect::<EachByItself>(&database.url).await.expect("a database");
        let id = |n: u128| match db.is_sqlite() {
            true => format!("x'{n:032x}'"),
            false => format!("'{}'", uuid::Uuid::from_u128(n)),
        };
        let mut statements = vec![format!("INSERT INTO workers VALUES ({}, 1, 1, 9, 0)", id(1))];
        for (n, state, transfer) in
            [(20, "created", Some(30)), (21, "destroying", Some(31)), (22, "destroying", None)]
        {
            let transfer = transfer.map_or_else(|| "NULL".to_owned(), id);
            statements.push(format!(
                "INSERT INTO volumes (handle, worker_id, state, purpose, transfer_id, complete, size_bytes, verified, created_at, judged_after)
                 VALUES ({}, {}, '{state}', 'scratch', {transfer}, FALSE, 0, FALSE, 1, 7)",
                id(n),
                id(1),
            ));
        }
        let marks = "INSERT INTO marks (worker_id, handle) SELECT worker_id, handle FROM volumes WHERE state = 'destroying'";
        statements.push(marks.to_owned());
        db.read().execute_unprepared(&statements.join(";")).await.expect("written");
        drop(db);

        let db = Database::connect::<Schema>(&database.url).await.expect("migrated");
        let in_the_way =
            "SELECT state || CASE WHEN transfer_id IS NULL THEN '' ELSE ' by a transfer' END AS text
                          FROM volumes WHERE given_up = FALSE ORDER BY 1";
        let asked = Statement::from_string(db.read().get_database_backend(), in_the_way);
        let answered = db.read().query_all_raw(asked).await.expect("asked");
        let answered: Vec<String> =
            answered.iter().map(|row| row.try_get("", "text").expect("a text")).collect();
        assert_eq!(answered, ["created by a transfer", "destroying"]);
    }
}
