//! The dry run of a collection: one transaction with all batches, which is rolled back.
//!
//! The handler of `Collect` calls it. It runs the same steps as [`super::full_round`], so that it
//! reports what that would mark. [`LIMIT`] bounds the time for which its locks block writers.

use std::time::{Duration, Instant};

use domain::WorkerId;
use sea_orm::{DatabaseTransaction, DbErr};

use crate::app::Store;
use crate::gc::{CollectedItem, Settings, Step, make_all_due, steps};

/// Maximum duration of the transaction, in seconds. Writers that wait for its locks give up after
/// ten seconds.
const LIMIT: Duration = Duration::from_secs(5);

/// Number of rows in a batch of a dry run. All batches hold their locks until the end.
const ROWS: u64 = 2000;

/// Result of a dry run.
#[derive(Debug, Default)]
pub(crate) struct DryRunResult {
    pub(crate) collected: Vec<CollectedItem>,
    /// Whether the list may be incomplete, because it is long enough or the time is over.
    pub(crate) is_cut_off: bool,
}

/// Error that rolls back the transaction of a dry run.
#[derive(Debug, thiserror::Error)]
enum DryRunEnd {
    #[error("a dry run changes nothing")]
    Done(DryRunResult),
    #[error("database failed during a dry run")]
    Database(#[from] DbErr),
}

/// Returns what a round would mark, at least the first `most` items. The workers `short` need disk
/// space.
pub(crate) async fn round(store: &Store, short: &[WorkerId], most: usize) -> Result<DryRunResult, DbErr> {
    let settings = Settings { batch: ROWS, ..Settings::of(store) };
    let run = store.db.write(|txn| {
        let short = short.to_vec();
        async move {
            let result = run_batches(&txn, &settings, &short, most).await?;
            Err::<DryRunResult, _>(DryRunEnd::Done(result))
        }
    });
    match run.await {
        Ok(result) | Err(DryRunEnd::Done(result)) => Ok(result),
        Err(DryRunEnd::Database(error)) => Err(error),
    }
}

/// Runs the batches of all steps that mark.
async fn run_batches(
    txn: &DatabaseTransaction,
    settings: &Settings,
    short: &[WorkerId],
    most: usize,
) -> Result<DryRunResult, DbErr> {
    let begun = Instant::now();
    let mut result = DryRunResult::default();
    for worker in short {
        loop {
            let batch = steps::attempts::give_up_ended(txn, settings, *worker).await?;
            if batch.collected.is_empty() {
                break;
            }
            result.collected.extend(batch.collected);
        }
    }
    make_all_due(txn, settings).await?;
    for step in Step::MARKING {
        while step.is_due(txn, settings).await? {
            let batch = step.run(txn, settings).await?;
            result.collected.extend(batch.collected);
            result.is_cut_off = result.collected.len() >= most || begun.elapsed() > LIMIT;
            if result.is_cut_off {
                return Ok(result);
            }
            if !batch.checked {
                break;
            }
        }
    }
    Ok(result)
}
