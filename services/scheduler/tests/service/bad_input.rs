//! Bad input: every call of the scheduler, with everything that may be wrong with what it is told.

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

/// A team that has what most requests are about, and another.
const TEAM: &str = "main";
const OTHER: &str = "other";

pub(crate) async fn bad_input_gets_its_error_and_changes_nothing(database: TestDatabase) {
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

/// Settings under which nothing comes of time that passes.
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

/// The artifact store was told all that it shall hear: how leases and attempts ended, and which workers have gone.
fn is_quiet(rows: &BTreeSet<String>) -> bool {
    let is_untold = |row: &String| {
        row.starts_with("outbox:")
            || (row.starts_with("removed_workers:") && (row.ends_with(",0") || row.ends_with(",f)")))
    };
    !rows.iter().any(is_untold)
}

async fn table(world: &World<'_>) -> Vec<Call> {
    let mut calls = workers::looks(world).await;
    calls.extend(workloads::looks(world).await);
    calls.extend(placements::looks(world));
    calls.extend(placements::calls(world).await);
    calls.extend(workloads::calls(world).await);
    calls.push(synchronize::call(world));
    // The last: these end what the others are about.
    calls.extend(workers::ends(world));
    calls
}
