//! What operators see of the store's rows: counted when they look.

use db::Database;
use sea_orm::{ActiveEnum, ConnectionTrait, DbErr, Iterable, QueryResult, Statement};

use crate::entity::{ArtifactState, State};

/// Sets the gauges whenever somebody reads them.
pub(crate) fn add(db: Database, host: &server::Host) {
    metrics::describe_gauge!("gantry_store_artifacts", "Artifacts, by state.");
    metrics::describe_gauge!(
        "gantry_store_artifact_bytes",
        "Bytes of artifacts, each counted once, by state."
    );
    metrics::describe_gauge!("gantry_store_volumes", "Volumes on all workers, by state.");
    metrics::describe_gauge!(
        "gantry_store_volume_bytes",
        "Bytes of volumes, by state; what volumes share counts for each of them."
    );
    metrics::describe_gauge!("gantry_store_containers", "Containers on all workers, by state.");
    metrics::describe_gauge!("gantry_store_pins", "Pins of workloads on artifacts.");
    metrics::describe_gauge!("gantry_store_builds", "Builds that have not ended.");
    host.add_gauges(move || {
        let db = db.clone();
        async move {
            if let Err(error) = set(&db).await {
                tracing::debug!(error = domain::chain(&error), "cannot count for metrics");
            }
        }
    });
}

async fn set(db: &Database) -> Result<(), DbErr> {
    let count = |text: &'static str| async move {
        let statement = Statement::from_string(db.read().get_database_backend(), text);
        db.read().query_all_raw(statement).await
    };
    let rows = count("SELECT state, COUNT(*) AS n, COALESCE(SUM(CAST(size_bytes AS DOUBLE PRECISION)), 0) AS bytes FROM artifacts GROUP BY state").await?;
    for state in ArtifactState::iter() {
        let (n, bytes) = of(&rows, &state.to_value())?;
        metrics::gauge!("gantry_store_artifacts", "state" => state.to_value()).set(n);
        metrics::gauge!("gantry_store_artifact_bytes", "state" => state.to_value()).set(bytes);
    }
    let rows = count("SELECT state, COUNT(*) AS n, COALESCE(SUM(CAST(size_bytes AS DOUBLE PRECISION)), 0) AS bytes FROM volumes GROUP BY state").await?;
    for state in State::iter() {
        let (n, bytes) = of(&rows, &state.to_value())?;
        metrics::gauge!("gantry_store_volumes", "state" => state.to_value()).set(n);
        metrics::gauge!("gantry_store_volume_bytes", "state" => state.to_value()).set(bytes);
    }
    let rows = count(
        "SELECT state, COUNT(*) AS n, CAST(0 AS DOUBLE PRECISION) AS bytes FROM containers GROUP BY state",
    )
    .await?;
    for state in State::iter() {
        metrics::gauge!("gantry_store_containers", "state" => state.to_value())
            .set(of(&rows, &state.to_value())?.0);
    }
    let rows = count("SELECT 'pins' AS state, COUNT(*) AS n, CAST(0 AS DOUBLE PRECISION) AS bytes FROM pins")
        .await?;
    metrics::gauge!("gantry_store_pins").set(of(&rows, "pins")?.0);
    let rows = count("SELECT 'open' AS state, COUNT(*) AS n, CAST(0 AS DOUBLE PRECISION) AS bytes FROM builds WHERE ended_at IS NULL").await?;
    metrics::gauge!("gantry_store_builds").set(of(&rows, "open")?.0);
    Ok(())
}

/// How many there are in `state`, and their bytes. What is in no row is none.
fn of(rows: &[QueryResult], state: &str) -> Result<(f64, f64), DbErr> {
    for row in rows {
        if row.try_get::<String>("", "state")? == state {
            return Ok((row.try_get::<i64>("", "n")? as f64, row.try_get::<f64>("", "bytes")?));
        }
    }
    Ok((0.0, 0.0))
}

#[cfg(test)]
mod tests {
    use domain::{ArtifactId, Timestamp};
    use testing::databases::{self, TestDatabase};

    use super::*;
    use crate::artifacts::{self, NewArtifact};
    use crate::migrations::Schema;

    #[tokio::test(flavor = "multi_thread")]
    async fn the_largest_sizes_are_no_obstacle_on_sqlite() {
        the_largest_sizes_are_no_obstacle(databases::sqlite()).await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn the_largest_sizes_are_no_obstacle_on_postgres() {
        the_largest_sizes_are_no_obstacle(databases::postgres().await).await;
    }

    /// Workers say how large things are, and may say anything.
    async fn the_largest_sizes_are_no_obstacle(database: TestDatabase) {
        let db = Database::open::<Schema>(&database.url.as_str().into()).await.expect("a database");
        for _ in 0..2 {
            let new = &NewArtifact {
                id: ArtifactId::new(),
                team: "main".to_owned(),
                label: String::new(),
                owner: None,
                tree: None,
            };
            let create =
                |txn: db::Transaction| async move { artifacts::create(&txn, new, Timestamp(1)).await };
            db.write(create).await.expect("made");
        }
        let largest = format!("UPDATE artifacts SET size_bytes = {}", i64::MAX);
        let largest = largest.as_str();
        db.write(|txn| async move { txn.execute_unprepared(largest).await }).await.expect("written");
        set(&db).await.expect("counted");
    }
}
