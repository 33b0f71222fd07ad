//! Bad input: every RPC of the store with every invalid field.

mod table;
mod wrong;

use testing::bad_input::check;
use testing::databases::TestDatabase;

use crate::{Suite, Tables, on_both_databases};

on_both_databases! {
    bad_input_gets_its_error_and_changes_nothing,
}

async fn bad_input_gets_its_error_and_changes_nothing(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let table = table::table(&suite).await;
    let tables = Tables::open(&suite.url()).await;
    // Only explicit collections run.
    check("gantry.artifacts.v1", &suite.peer, &tables, |_| true, &table).await;
    suite.stop().await;
}
