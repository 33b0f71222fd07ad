//! The dry run of a collection: one transaction with all batches, which is rolled back.
//!
//! The handler of `Collect` calls it. It runs the same steps as [`super::full_round`], so that it
//! reports what that would mark. [`LIMIT`] bounds the time for which its locks block writers.

use std::time::{Duration, Instant};

use sea_orm::{DatabaseTransaction, DbErr};

use crate::app::Store;
use crate::gc::{Collected, Settings, Step, make_all_due};

/// Maximum duration of the transaction, in seconds. Writers that wait for its locks give up after
/// ten seconds.
const LIMIT: Duration = Duration::from_secs(5);

/// Number of rows in a batch of a dry run. All batches hold their locks until the end.
const ROWS: u64 = 2000;

/// Result of a dry run.
#[derive(Debug, Default)]
pub(crate) struct WouldGo {
    pub(crate) collected: Vec<Collected>,
    /// Whether the list may be incomplete, because it is long enough or the time is over.
    pub(crate) is_cut_off: bool,
}

/// Error that rolls back the transaction of a dry run.
#[derive(Debug, thiserror::Error)]
enum RolledBack {
    #[error("a dry run changes nothing")]
    Done(WouldGo),
    #[error("database failed during a dry run")]
    Database(#[from] DbErr),
}

/// Returns what a round would mark, at least the first `most` items.
pub(crate) async fn round(store: &Store, most: usize) -> Result<WouldGo, DbErr> {
    let settings = Settings { batch: ROWS, ..Settings::of(store) };
    let run = store.db.write(|txn| async move {
        let would_go = run_batches(&txn, &settings, most).await?;
        Err::<WouldGo, _>(RolledBack::Done(would_go))
    });
    match run.await {
        Ok(would_go) | Err(RolledBack::Done(would_go)) => Ok(would_go),
        Err(RolledBack::Database(error)) => Err(error),
    }
}

/// Runs the batches of all steps that mark.
async fn run_batches(txn: &DatabaseTransaction, settings: &Settings, most: usize) -> Result<WouldGo, DbErr> {
    let begun = Instant::now();
    let mut would_go = WouldGo::default();
    make_all_due(txn, settings).await?;
    for step in Step::MARKING {
        while step.is_due(txn, settings).await? {
            let batch = step.run(txn, settings).await?;
            would_go.collected.extend(batch.collected);
            would_go.is_cut_off = would_go.collected.len() >= most || begun.elapsed() > LIMIT;
            if would_go.is_cut_off {
                return Ok(would_go);
            }
            if !batch.looked {
                break;
            }
        }
    }
    Ok(would_go)
}
