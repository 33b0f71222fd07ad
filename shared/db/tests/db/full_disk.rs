//! A disk that was full and has room again: what was refused then is all that it costs.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::process::Command;

use gantry_db::{Database, Migrations, SqlMigration};
use sea_orm::{ConnectionTrait, DbErr, Statement};

struct Schema;

impl Migrations for Schema {
    const ALL: &'static [SqlMigration] = &[SqlMigration {
        name: "0001_rows",
        sql: "CREATE TABLE rows (n BIGINT PRIMARY KEY, payload TEXT NOT NULL);",
    }];
}

/// A small file system of its own, unmounted when dropped.
struct Small(tempfile::TempDir);

impl Small {
    /// `None` where this machine does not let us mount.
    fn new() -> Option<Self> {
        if std::fs::metadata("/proc/self").is_ok_and(|own| std::os::unix::fs::MetadataExt::uid(&own) != 0) {
            eprintln!("not applicable: this process is not root");
            return None;
        }
        let directory = tempfile::tempdir().expect("a directory");
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", "size=32m", "tmpfs"])
            .arg(directory.path())
            .status()
            .expect("mount");
        assert!(mounted.success());
        Some(Self(directory))
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        Command::new("umount").arg("-l").arg(self.0.path()).status().ok();
    }
}

fn fill(path: &Path) {
    let mut file = File::create(path).expect("make");
    while file.write_all(&[0; 512]).is_ok() {}
}

async fn insert(database: &Database, n: i64, size: usize) -> Result<(), DbErr> {
    database
        .write(|transaction| async move {
            let backend = transaction.get_database_backend();
            for part in 0..8 {
                let values = [(n * 8 + part).into(), "x".repeat(size).into()];
                let insert = "INSERT INTO rows (n, payload) VALUES ($1, $2)";
                transaction.execute_raw(Statement::from_sql_and_values(backend, insert, values)).await?;
            }
            Ok(())
        })
        .await
}

async fn rows(database: &Database) -> i64 {
    let count = Statement::from_string(sea_orm::DbBackend::Sqlite, "SELECT COUNT(*) AS n FROM rows");
    let row = database.read().query_one_raw(count).await.expect("query").expect("a row");
    row.try_get("", "n").expect("a number")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_refuses_writes_and_nothing_else_and_afterwards_all_is_well() {
    let Some(small) = Small::new() else { return };
    let url = format!("sqlite://{}/rows.db", small.0.path().display());
    let database = Database::connect::<Schema>(&url).await.expect("open");
    let mut expected = 0;
    let mut next = 0;
    // Small changes find room in the reserve; large ones do not.
    for (size, fits) in [(10, true), (1_000, true), (300_000, false), (300_000, false)] {
        let filler = small.0.path().join("filler");
        fill(&filler);
        let mut refused = 0;
        let mut writers = tokio::task::JoinSet::new();
        for _ in 0..20 {
            next += 1;
            let (database, n) = (database.clone(), next);
            writers.spawn(async move { insert(&database, n, size).await });
        }
        while let Some(done) = writers.join_next().await {
            match done.expect("no panic") {
                Ok(()) => expected += 8,
                Err(_) => refused += 1,
            }
        }
        assert_eq!(refused == 0, fits, "{refused} of 20 changes of {size} bytes were refused");
        assert_eq!(rows(&database).await, expected, "what was answered is there, and nothing else");
        std::fs::remove_file(&filler).expect("remove");
        // Both connections, in any order.
        for _ in 0..20 {
            next += 1;
            insert(&database, next, 10).await.expect("there is room again");
            expected += 8;
            assert_eq!(rows(&database).await, expected);
        }
    }
}
