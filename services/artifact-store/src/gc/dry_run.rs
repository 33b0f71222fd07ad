//! The dry run of a round: its batches in one transaction, which is rolled back.
//!
//! Called by the handler of `Collect`. What it tells is what [`super::full_round`] would mark, for
//! the same steps work it out; [`LIMIT`] bounds for how long its locks hold up callers that write.

use std::time::{Duration, Instant};

use sea_orm::{DatabaseTransaction, DbErr};

use crate::app::Store;
use crate::gc::{Collected, Settings, Step, make_all_due};

/// How long the transaction of a dry run goes on at most, in seconds: callers that write may wait
/// for its locks, and give up after ten.
const LIMIT: Duration = Duration::from_secs(5);

/// How many rows are in one batch of a dry run. All batches hold their locks until the end.
const ROWS: u64 = 2000;

/// What a dry run found.
#[derive(Debug, Default)]
pub(crate) struct WouldGo {
    pub(crate) collected: Vec<Collected>,
    /// Whether there may be more: it found as many as were asked for, or its time was over.
    pub(crate) is_cut_off: bool,
}

/// How the transaction of a dry run ends: an error, so that it is rolled back.
#[derive(Debug, thiserror::Error)]
enum RolledBack {
    #[error("a dry run changes nothing")]
    Done(WouldGo),
    #[error("database failed during a dry run")]
    Database(#[from] DbErr),
}

/// What a round would mark, at least the first `most`.
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

/// Runs the steps that mark something, one batch after the other.
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
