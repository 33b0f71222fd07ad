//! Dispatch: from the queue to a worker.
//!
//! A workload is placed in the transaction that makes it pending when nobody waits before it, and by the loop ([`dispatch_forever`])
//! otherwise: first come, first served among those that could be placed. The loop looks at the whole queue each time.
//!
//! Invariant: two replicas never both place a workload. Whoever places it holds its row, and finds it pending.

use domain::{AttemptId, LeaseId, Timestamp, WorkloadId};
use sea_orm::{ConnectionTrait, DatabaseTransaction, DbErr};
use tracing::Instrument;
use uuid::Uuid;

use crate::effects::Effects;
use crate::entity::to_json;
use crate::entity::workload::{Model, State};
use crate::events::{Event, Whereabouts};
use crate::leases;
use crate::placement::{self, Choice, Demand, Location, Refusals};
use crate::service::Scheduler;
use crate::workers;
use crate::workloads::{self, Submission, Write};

/// How often a placement is decided anew because the chosen worker has changed in the meantime.
const DECISIONS: u32 = 8;

/// How many of the queue are looked at together.
const PAGE: u64 = 200;

/// A workload cannot be accepted.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SubmitError {
    /// The id names another workload.
    #[error("workload {0} exists, with another spec")]
    Exists(WorkloadId),
    /// No worker could ever run it.
    #[error("no worker could ever run it: {}", .0.lines().join("; "))]
    NoCompatibleWorker(Refusals),
    /// The artifact store refused to pin its inputs, or could not be asked.
    #[error("its inputs cannot be pinned")]
    NotPinned(#[source] rpc::Refusal),
    /// The database does not answer.
    #[error("the database failed")]
    Database(#[from] DbErr),
}

/// How far a submitted workload is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Accepted {
    /// It is in the queue, or further.
    Queued,
    /// It is durable; its inputs must be pinned before it may be queued.
    Pinning,
}

/// Accepts a workload, and places it at once where nothing has to be pinned. Repeating it changes nothing.
pub(crate) async fn submit(
    txn: &DatabaseTransaction,
    submission: &Submission,
    now: Timestamp,
    effects: &mut Effects,
) -> Result<Accepted, SubmitError> {
    if let Some(known) = workloads::find(txn, submission.id).await? {
        if known.spec_digest != submission.digest.as_bytes() {
            return Err(SubmitError::Exists(submission.id));
        }
        return Ok(if known.state == State::Accepted { Accepted::Pinning } else { Accepted::Queued });
    }
    let demand = Demand::of(&submission.spec).asked_by(submission.id.uuid());
    let known_workers = workers::for_placement(txn).await?;
    if let Choice::Never(refusals) = placement::choose(&demand, &known_workers, &[]) {
        return Err(SubmitError::NoCompatibleWorker(refusals));
    }
    if submission.pins() {
        let row = submission.row(State::Accepted, now);
        workloads::save(txn, row, Write::Insert, None, now, effects).await?;
        return Ok(Accepted::Pinning);
    }
    let row = submission.row(State::Pending, now);
    enqueue(txn, row, Write::Insert, &demand, Some(known_workers), now, effects).await?;
    Ok(Accepted::Queued)
}

/// The inputs of a workload are pinned, and are at `locations`: it is queued, and placed at once where nobody waits before it.
pub(crate) async fn pinned(
    txn: &DatabaseTransaction,
    submission: &Submission,
    locations: &[Location],
    now: Timestamp,
    effects: &mut Effects,
) -> Result<(), DbErr> {
    let row = workloads::lock(txn, submission.id).await?.filter(|row| row.state == State::Accepted);
    let Some(mut row) = row else { return Ok(()) };
    row.locations = to_json(&locations)?;
    let demand = Demand::of(&submission.spec).asked_by(submission.id.uuid());
    enqueue(txn, row, Write::Update, &demand, None, now, effects).await
}

async fn enqueue(
    txn: &DatabaseTransaction,
    row: Model,
    write: Write,
    demand: &Demand,
    known_workers: Option<Vec<placement::Worker>>,
    now: Timestamp,
    effects: &mut Effects,
) -> Result<(), DbErr> {
    if workloads::anyone_pending(txn).await? {
        effects.dispatch = true;
        return workloads::queue(txn, row, write, vec![], now, effects).await;
    }
    place(txn, row, write, demand, known_workers, now, effects).await.map(|_| ())
}

/// Places the workload of a row that is locked or new, or leaves it in the queue with the reasons.
async fn place(
    txn: &DatabaseTransaction,
    mut row: Model,
    write: Write,
    demand: &Demand,
    mut known_workers: Option<Vec<placement::Worker>>,
    now: Timestamp,
    effects: &mut Effects,
) -> Result<(), DbErr> {
    let locations = workloads::locations(&row)?;
    let mut reasons = vec!["workers change too fast, looking again".to_owned()];
    for _ in 0..DECISIONS {
        let known = match known_workers.take() {
            Some(known) => known,
            None => workers::for_placement(txn).await?,
        };
        let placement = match placement::choose(demand, &known, &locations) {
            Choice::Placed(placement) => placement,
            Choice::Never(refusals) => {
                if let Some(ending) = workloads::last_failure(&row)? {
                    return workloads::conclude(txn, row, ending, None, now, effects).await;
                }
                reasons = refusals.lines();
                break;
            }
            Choice::NotNow(refusals) => {
                reasons = refusals.lines();
                break;
            }
        };
        let worker = placement.worker;
        let Some(generation) = leases::take_slot(txn, worker).await? else { continue };

        let (id, lease, attempt) = (WorkloadId::from_uuid(row.id), LeaseId::new(), AttemptId::new());
        let whereabouts = Whereabouts {
            worker: worker.id,
            worker_name: worker.name.clone(),
            gateway_endpoint: worker.endpoint.clone(),
            attempt,
        };
        row.state = State::Assigned;
        row.lease_id = Some(lease.uuid());
        row.attempt_id = Some(attempt.uuid());
        row.whereabouts = Some(to_json(&whereabouts)?);
        row.waiting_for = "[]".to_owned();
        let team = row.team.clone();
        let event = Event::Placed { whereabouts, reason: placement.reason };
        workloads::save(txn, row, write, Some(&event), now, effects).await?;
        leases::grant_task(txn, worker, generation, &team, id, (lease, attempt), now).await?;
        effects.workers.push(worker.id);
        return Ok(());
    }
    workloads::queue(txn, row, write, reasons, now, effects).await
}

/// Places one workload of the queue, or notes why it waits. One that is not pending any more is left alone.
pub(crate) async fn place_pending(
    txn: &DatabaseTransaction,
    id: WorkloadId,
    now: Timestamp,
    effects: &mut Effects,
) -> Result<(), DbErr> {
    let row = workloads::lock(txn, id).await?.filter(|row| row.state == State::Pending);
    let Some(row) = row else { return Ok(()) };
    let demand = workloads::demand(&row)?;
    place(txn, row, Write::Update, &demand, None, now, effects).await
}

/// Looks at the whole queue once, in order, and places what can be placed.
pub(crate) async fn dispatch(scheduler: &Scheduler) -> Result<(), DbErr> {
    let mut after: Option<Uuid> = None;
    loop {
        let page = workloads::pending(scheduler.db.read(), after, PAGE).await?;
        let Some(last) = page.last() else { return Ok(()) };
        after = Some(last.sequence);
        let mut known = workers::for_placement(scheduler.db.read()).await?;
        for row in &page {
            let demand = workloads::demand(row)?;
            // Decided on what was read, so that most of a long queue costs no transaction.
            let waits = decide(&demand, &mut known, &workloads::locations(row)?);
            if let Some(reasons) = waits
                && to_json(&reasons)? == row.waiting_for
            {
                continue;
            }
            let id = WorkloadId::from_uuid(row.id);
            let span =
                tracing::info_span!(target: "gantry", "place", service = "scheduler", workload.id = %id);
            rpc::trace::continue_from(&span, &row.traceparent);
            let placed = scheduler.change(async |txn| {
                let mut effects = Effects::default();
                place_pending(&txn, id, Timestamp::now(), &mut effects).await?;
                Ok::<_, DbErr>(((), effects))
            });
            placed.instrument(span).await?;
        }
    }
}

/// Takes a slot of `known` for one of the queue, or answers why it waits.
fn decide(demand: &Demand, known: &mut [placement::Worker], locations: &[Location]) -> Option<Vec<String>> {
    let worker = match placement::choose(demand, known, locations) {
        Choice::Placed(placement) => placement.worker.id,
        Choice::NotNow(refusals) | Choice::Never(refusals) => return Some(refusals.lines()),
    };
    known.iter_mut().filter(|known| known.id == worker).for_each(|known| known.active_tasks += 1);
    None
}

/// How many wait before the workload with the sequence `before`, or in all; `known` is left as it is once they have been placed.
pub(crate) async fn ahead(
    db: &impl ConnectionTrait,
    before: Option<Uuid>,
    known: &mut [placement::Worker],
) -> Result<u64, DbErr> {
    let (mut count, mut after) = (0, None);
    loop {
        let page = workloads::pending(db, after, PAGE).await?;
        let Some(last) = page.last() else { return Ok(count) };
        after = Some(last.sequence);
        for row in page {
            if before.is_some_and(|before| row.sequence >= before) {
                return Ok(count);
            }
            count += 1;
            decide(&workloads::demand(&row)?, known, &workloads::locations(&row)?);
        }
    }
}

/// Places what waits, until the service stops.
pub(crate) async fn dispatch_forever(scheduler: Scheduler) {
    loop {
        tokio::select! {
            () = scheduler.stopping.cancelled() => return,
            result = dispatch(&scheduler) => {
                if let Err(error) = result {
                    tracing::warn!(error = %error, "cannot look at the queue");
                }
            }
        }
        tokio::select! {
            () = scheduler.stopping.cancelled() => return,
            () = scheduler.hints.dispatch().notified() => {}
            () = tokio::time::sleep(scheduler.config.poll) => {}
        }
    }
}
