//! Databases on a full disk. Writes fail while the disk is full, and succeed once it has space
//! again.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use gantry_db::{Database, Migrations, SqlMigration};
use sea_orm::{ConnectionTrait, DbErr, Statement};
use testing::databases::Server;

struct Schema;

impl Migrations for Schema {
    const ALL: &'static [SqlMigration] = &[SqlMigration {
        name: "0001_rows",
        sql: "CREATE TABLE rows (n BIGINT PRIMARY KEY, payload TEXT NOT NULL);",
    }];
}

/// A small mounted file system. Its drop unmounts it.
struct SmallDisk(tempfile::TempDir);

impl SmallDisk {
    /// Returns `None` if the process may not mount file systems.
    fn new(size: &str) -> Option<Self> {
        if std::fs::metadata("/proc/self").is_ok_and(|own| std::os::unix::fs::MetadataExt::uid(&own) != 0) {
            eprintln!("not applicable: this process is not root");
            return None;
        }
        let directory = tempfile::tempdir().expect("a directory");
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &format!("size={size},mode=755"), "tmpfs"])
            .arg(directory.path())
            .status()
            .expect("mount");
        assert!(mounted.success());
        Some(Self(directory))
    }
}

impl Drop for SmallDisk {
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
    let backend = database.read().get_database_backend();
    let count = Statement::from_string(backend, "SELECT COUNT(*) AS n FROM rows");
    let row = database.read().query_one_raw(count).await.expect("query").expect("a row");
    row.try_get("", "n").expect("a number")
}

#[tokio::test(flavor = "multi_thread")]
async fn full_disk_fails_only_writes_while_full() {
    let Some(disk) = SmallDisk::new("32m") else { return };
    let url = format!("sqlite://{}/rows.db", disk.0.path().display());
    let database = Database::connect::<Schema>(&url).await.expect("open");
    let mut expected = 0;
    let mut next = 0;
    // Small changes fit into the reserved space. Large changes do not.
    for (size, fits) in [(10, true), (1_000, true), (300_000, false), (300_000, false)] {
        let filler = disk.0.path().join("filler");
        fill(&filler);
        let mut failed = 0;
        let mut writers = tokio::task::JoinSet::new();
        for _ in 0..20 {
            next += 1;
            let (database, n) = (database.clone(), next);
            writers.spawn(async move { insert(&database, n, size).await });
        }
        while let Some(done) = writers.join_next().await {
            match done.expect("no panic") {
                Ok(()) => expected += 8,
                Err(_) => failed += 1,
            }
        }
        assert_eq!(failed == 0, fits, "{failed} of 20 changes of {size} bytes failed");
        assert_eq!(rows(&database).await, expected, "exactly the committed changes are there");
        std::fs::remove_file(&filler).expect("remove");
        // Uses all connections, in any order.
        for _ in 0..20 {
            next += 1;
            insert(&database, next, 10).await.expect("the disk has space again");
            expected += 8;
            assert_eq!(rows(&database).await, expected);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn postgres_on_full_disk_loses_no_committed_change() {
    let Some(disk) = SmallDisk::new("160m") else { return };
    let mut server = Server::new_in(disk.0.path());
    let database = Database::connect::<Schema>(&server.url("postgres")).await.expect("open");
    let (mut committed, mut uncertain, mut next) = (0, 0, 0);
    for size in [1_000, 300_000] {
        let filler = disk.0.path().join("filler");
        fill(&filler);
        let mut failures = Vec::new();
        // Until a change needs space that is not there.
        while failures.len() < 3 {
            next += 1;
            match insert(&database, next, size).await {
                Ok(()) => committed += 8,
                Err(error) => failures.push(error.to_string()),
            }
        }
        uncertain += 8 * i64::try_from(failures.len()).expect("few");
        let is_told = |failure: &String| failure.contains("No space left on device");
        assert!(failures.iter().any(is_told), "{failures:?}");

        std::fs::remove_file(&filler).expect("remove");
        // Without space for its log, the server ends. Its operator starts it again.
        let began = Instant::now();
        loop {
            if server.has_ended() {
                server.start();
            }
            next += 1;
            match insert(&database, next, 10).await {
                Ok(()) => break,
                Err(error) => assert!(began.elapsed() < Duration::from_secs(60), "{error}"),
            }
            uncertain += 8;
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        committed += 8;
        let rows = rows(&database).await;
        assert!(
            (committed..=committed + uncertain).contains(&rows) && rows % 8 == 0,
            "{rows} of {committed}"
        );
    }
}
