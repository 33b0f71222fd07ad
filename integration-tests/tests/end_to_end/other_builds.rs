//! State of another build. The error names it and the remedy, and the state is not changed.

use std::fs;
use std::process::{Command, Stdio};

use integration_tests::{Cluster, code, describe, gantry_binary, may_run_containers};
use sea_orm::ConnectionTrait;

/// Has the effect of an edited migration: the program expects a missing column.
fn take_a_column(database: &str) {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    runtime.block_on(async {
        let database = sea_orm::Database::connect(format!("sqlite://{database}")).await.expect("a database");
        for statement in ["DROP TABLE migration_digests", "ALTER TABLE workloads DROP COLUMN traceparent"] {
            database.execute_unprepared(statement).await.expect(statement);
        }
        database.close().await.expect("closed");
    });
}

#[test]
fn state_directory_of_other_build_is_kept() {
    if !may_run_containers() {
        return;
    }
    let cluster = Cluster::new();
    cluster.succeed(["run", "--", "true"]);
    cluster.succeed(["down"]);
    let database = cluster.state().join("scheduler.db");
    let database = database.to_str().expect("UTF-8");
    take_a_column(database);
    let before = fs::read(database).expect("a database");

    let what = format!(
        "cannot use {database}: another build of this program created it (the table workloads has no column traceparent). The database is unchanged"
    );
    let state = cluster.state();
    let advice = "move the directory away, and the next start makes a new one";
    for arguments in [["run", "--", "true"].as_slice(), &["up"]] {
        let refused = cluster.output(arguments);
        assert_eq!(code(&refused), 125, "{}", describe(&refused));
        let printed = String::from_utf8_lossy(&refused.stderr);
        let where_it_is = format!("cannot use the state directory {}", state.display());
        for text in [what.as_str(), advice, &where_it_is] {
            assert!(printed.contains(text), "{text:?} is not printed: {}", describe(&refused));
        }
    }
    let url = format!("sqlite://{database}");
    let scheduler = Command::new(gantry_binary().with_file_name("scheduler"))
        .args(["--database-url", &url, "--artifact-store", "http://127.0.0.1:9", "--insecure"])
        .env_clear()
        .stdin(Stdio::null())
        .output()
        .expect("a scheduler");
    assert_ne!(code(&scheduler), 0, "{}", describe(&scheduler));
    assert!(String::from_utf8_lossy(&scheduler.stderr).contains(&what), "{}", describe(&scheduler));
    assert!(fs::read(database).expect("a database") == before, "nothing was changed");

    // Follows the advice of the error.
    fs::rename(&state, cluster.path("away")).expect("moved away");
    cluster.succeed(["run", "--", "true"]);
}
