//! Lists of operations that are kept: what a seed found once, and what is worth trying each time.

use testing::databases::TestDatabase;

use super::operations::Artifact::Upload;
use super::operations::Left::Nothing;
use super::operations::Make::Now;
use super::operations::Operation::{self, *};
use super::operations::Outputs::{NoOutput, With};
use super::operations::Status::{Aborted, Succeeded};
use super::operations::Way::{Once, Repeatedly};
use super::run;
use crate::on_both_databases;

on_both_databases! {
    an_upload_for_a_build,
}

/// Applies operations, and lets everything end.
async fn replay(database: TestDatabase, operations: &[Operation]) {
    if let Err(failure) = run(database, operations).await {
        panic!("{failure}");
    }
}

async fn an_upload_for_a_build(database: TestDatabase) {
    let operations = vec![
        PutBuild { build: 0, ends_with: 0, keep: 60, term: 60 },
        Accept { workload: 0, pins: vec![], build: Some(0) },
        Create { upload: 0, owner: Some(0) },
        Plan { transfer: 0, artifact: Upload(0), worker: 0, make: Now },
        Arrive { transfer: 0, content: 1 },
        Seal { upload: 0, content: 1 },
        Accept { workload: 1, pins: vec![Upload(0)], build: None },
        Prepare { workload: 1, attempt: 0, worker: 0, make: Now },
        Prepared { workload: 1, attempt: 0 },
        Finish { workload: 1, attempt: 0, content: 2 },
        Settle { workload: 1, attempt: 0, status: Succeeded, outputs: With(2), build: Some(0) },
    ];
    replay(database, &operations).await;
}
