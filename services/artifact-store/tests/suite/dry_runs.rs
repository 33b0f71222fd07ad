//! A dry run of a collection reads and does nothing else: nobody waits for it, and it waits for nobody.

use std::time::Duration;

use domain::{ArtifactId, BuildId};
use rpc::pb::artifacts as pb;
use rpc::pb::artifacts::DryRun;
use sea_orm::{ConnectionTrait, DatabaseConnection, DbBackend, Statement, TransactionTrait};
use testing::databases::TestDatabase;

use crate::{Suite, TEAM, on_both_databases};

on_both_databases! {
    a_dry_run_of_much_holds_up_nobody,
    what_lets_go_of_much_is_told_with_it,
    more_than_fits_into_an_answer_is_said_to_be_there,
}

/// Makes so many artifacts, as few as a page has or more.
async fn create(suite: &Suite, owner: Option<BuildId>, count: usize) -> Vec<ArtifactId> {
    let ids: Vec<_> = (0..count).map(|_| ArtifactId::new()).collect();
    for some in ids.chunks(1000) {
        let artifacts = some.iter().map(|artifact| pb::NewArtifact {
            artifact_id: artifact.to_string(),
            ..pb::NewArtifact::default()
        });
        let request = pb::BatchCreateArtifactsRequest {
            team: TEAM.to_owned(),
            build_id: owner.map(|build| build.to_string()).unwrap_or_default(),
            artifacts: artifacts.collect(),
        };
        suite.artifacts().batch_create_artifacts(request).await.expect("created");
    }
    ids
}

/// Keeps everybody from writing to any table, and from locking a row, until it is dropped.
async fn forbid_writing(connection: &DatabaseConnection) -> sea_orm::DatabaseTransaction {
    if connection.get_database_backend() == DbBackend::Sqlite {
        let options = sea_orm::TransactionOptions {
            sqlite_transaction_mode: Some(sea_orm::SqliteTransactionMode::Immediate),
            ..Default::default()
        };
        return connection.begin_with_options(options).await.expect("the turn to write");
    }
    let txn = connection.begin().await.expect("a transaction");
    let tables = "SELECT CAST(tablename AS TEXT) AS name FROM pg_tables WHERE schemaname = current_schema()";
    let tables =
        txn.query_all_raw(Statement::from_string(DbBackend::Postgres, tables)).await.expect("tables");
    let tables: Vec<String> = tables.iter().map(|row| row.try_get("", "name").expect("a name")).collect();
    assert!(tables.iter().any(|name| name == "artifacts"), "{tables:?}");
    // Nothing but a mere SELECT goes on beside it.
    let lock = format!("LOCK TABLE {} IN EXCLUSIVE MODE", tables.join(", "));
    txn.execute_unprepared(&lock).await.expect("locked");
    txn
}

async fn a_dry_run_of_much_holds_up_nobody(database: TestDatabase) {
    let suite = Suite::start_with(database, |config| config.unowned_ttl = Duration::ZERO).await;
    let made = create(&suite, None, 2500).await;

    // It does what can be done while somebody else has the sole right to write, so it never needs what a writer would wait for.
    let connection = sea_orm::Database::connect(suite.url()).await.expect("the database");
    let forbidden = forbid_writing(&connection).await;
    assert_eq!(suite.collect(DryRun::Only).await.len(), made.len());
    forbidden.rollback().await.expect("allowed again");
    connection.close().await.expect("closed");

    create(&suite, None, 1).await;
    assert_eq!(suite.collect(DryRun::Off).await.len(), made.len() + 1);
    suite.stop().await;
}

async fn what_lets_go_of_much_is_told_with_it(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let build = BuildId::new();
    let request = pb::PutBuildRequest {
        build_id: build.to_string(),
        team: TEAM.to_owned(),
        term: Some(rpc::duration(Duration::from_secs(60))),
        ..pb::PutBuildRequest::default()
    };
    suite.owners().put_build(request).await.expect("put");
    let made = create(&suite, Some(build), 2500).await;
    assert_eq!(suite.collect(DryRun::Off).await, []);
    // Nobody has renewed it: it ends, lets go, and what it owns goes.
    suite.clock.advance(Duration::from_secs(61));
    assert_eq!(suite.collect(DryRun::Off).await.len(), made.len());
    suite.stop().await;
}

async fn more_than_fits_into_an_answer_is_said_to_be_there(database: TestDatabase) {
    const NAMED: usize = 10_000;
    let suite = Suite::start_with(database, |config| config.unowned_ttl = Duration::ZERO).await;
    let collect = async |dry_run: DryRun| {
        let mut collector = pb::collector_client::CollectorClient::new(suite.peer.clone());
        let request = pb::CollectRequest { dry_run: dry_run.into() };
        let answer = collector.collect(request).await.expect("collected").into_inner();
        (answer.collected.len(), answer.truncated)
    };
    create(&suite, None, NAMED).await;
    assert_eq!(collect(DryRun::Only).await, (NAMED, false));
    create(&suite, None, 1).await;
    assert_eq!(collect(DryRun::Only).await, (NAMED, true));
    assert_eq!(collect(DryRun::Off).await, (NAMED, true));
    assert_eq!(collect(DryRun::Off).await, (0, false), "what was not named went, too");
    suite.stop().await;
}
