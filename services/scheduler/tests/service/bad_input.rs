//! Tests of invalid requests: every RPC of the scheduler with every kind of invalid field.

mod placements;
mod spec;
mod synchronize;
mod workers;
mod workloads;
mod world;
mod wrong;

use std::collections::BTreeSet;
use std::time::Duration;

use scheduler::Config;
use testing::bad_input::{Call, check};
use testing::databases::TestDatabase;
use testing::tables::Tables;

use self::world::World;
use crate::store::Place;
use crate::support::Running;

/// Team that owns most of the test data, and a second team.
const TEAM: &str = "main";
const OTHER: &str = "other";

pub(crate) async fn bad_input_is_rejected_without_changes(database: TestDatabase) {
    let place = Place::new();
    let store = place.start().await;
    let scheduler = Running::start(quiet(place.config(&database))).await;
    let world = World::new(&scheduler, &place).await;
    let table = table(&world).await;
    let tables = Tables::open(&database.url).await;
    check("gantry.scheduler.v1", &scheduler.peer(), &tables, is_quiet, &table).await;
    drop(world);
    scheduler.stop().await;
    store.stop().await;
}

/// Configuration in which no timer expires during the test.
fn quiet(config: Config) -> Config {
    let hour = Duration::from_secs(3600);
    Config {
        heartbeat: hour / 2,
        worker_ttl: hour,
        stop_after: 2 * hour,
        lost_after: 3 * hour,
        lease_term: hour,
        reconcile_every: hour,
        remember_lost: hour,
        queue_aging: Duration::ZERO,
        quarantine_after: u32::MAX,
        ..config
    }
}

/// Returns whether the artifact store has received every ended lease, ended attempt and removed
/// worker.
fn is_quiet(rows: &BTreeSet<String>) -> bool {
    let is_unsent = |row: &String| {
        row.starts_with("outbox:")
            || (row.starts_with("removed_workers:") && (row.ends_with(",0") || row.ends_with(",f)")))
    };
    !rows.iter().any(is_unsent)
}

async fn table(world: &World<'_>) -> Vec<Call> {
    let mut calls = workers::read_calls(world).await;
    calls.extend(workloads::read_calls(world).await);
    calls.extend(placements::read_calls(world));
    calls.extend(placements::calls(world).await);
    calls.extend(workloads::calls(world).await);
    calls.push(synchronize::call(world));
    // These calls come last because they remove the workers that other calls use.
    calls.extend(workers::ends(world));
    calls
}
