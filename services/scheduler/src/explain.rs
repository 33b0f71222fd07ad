//! Explanations: what becomes of a workload as things are now, and what would change that. Only looks, and changes nothing.
//!
//! Judged by the same [`Index`] that places it.

use std::collections::BTreeSet;

use domain::workload::WorkloadSpec;
use domain::{ArtifactId, Timestamp, WorkerId, WorkloadId};
use sea_orm::DbErr;
use uuid::Uuid;

use crate::entity::workload::State;
use crate::placement::{Choice, Demand, Index, Location, Refusal};
use crate::service::Scheduler;
use crate::store::{Found, Inputs};
use crate::workloads;

/// What becomes of a workload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// It is placed.
    Placed,
    /// It waits.
    NotNow,
    /// It is refused.
    Never,
}

/// What one worker says to it.
#[derive(Debug)]
pub(crate) struct Opinion {
    pub(crate) worker: WorkerId,
    pub(crate) name: String,
    /// Empty: it would do.
    pub(crate) refusals: Vec<Refusal>,
    /// How it compares with others, where it would do.
    pub(crate) standing: String,
}

/// What becomes of a workload, and why.
#[derive(Debug)]
pub(crate) struct Explanation {
    pub(crate) verdict: Verdict,
    /// From 1. 0: it would not wait.
    pub(crate) position: u64,
    /// Those that would do, best first, then those that refuse, by name.
    pub(crate) opinions: Vec<Opinion>,
    /// Each alone is enough.
    pub(crate) unblocked_by: Vec<String>,
}

/// A workload cannot be explained.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ExplainError {
    /// There is none in this team.
    #[error("workload {0} is unknown to this team")]
    NotFound(WorkloadId),
    /// It waits no more.
    #[error("workload {0} does not wait for a worker")]
    NotQueued(WorkloadId, State),
    /// An input is unknown to the team, not sealed, or its bytes are lost.
    #[error("artifact {0} cannot be used as an input")]
    InputUnavailable(ArtifactId),
    /// The artifact store does not say where its inputs are.
    #[error("the artifact store does not say where the inputs are")]
    NotLocated(#[source] rpc::Refusal),
    /// The database does not answer.
    #[error("the database failed")]
    Database(#[from] DbErr),
}

/// What would become of `spec` if it were submitted now, with its inputs where the artifact store says that they are.
pub(crate) async fn spec(scheduler: &Scheduler, spec: &WorkloadSpec) -> Result<Explanation, ExplainError> {
    let inputs =
        Inputs { artifacts: spec.artifacts(), caches: spec.caches.iter().map(|mount| mount.cache).collect() };
    let locations = match scheduler.store.find(&spec.team, &inputs).await.map_err(ExplainError::NotLocated)? {
        Found::All(locations) => locations,
        Found::Missing(artifact) => return Err(ExplainError::InputUnavailable(artifact)),
    };

    scheduler.dispatch.catch_up().await;
    let now = Timestamp::now();
    let demand = Demand::of(spec, Uuid::now_v7());
    let priority = i64::from(spec.priority);
    let (is_behind, ahead) = {
        let queue = scheduler.dispatch.queue();
        (queue.is_before(&demand, priority, now), queue.ahead(priority, now, Uuid::max()))
    };
    let mut explanation = judge(&mut scheduler.dispatch.workers.lock(), &demand, &locations, is_behind);
    if explanation.verdict == Verdict::NotNow {
        explanation.position = ahead + 1;
    }
    Ok(explanation)
}

/// What becomes of a workload that was submitted and waits.
pub(crate) async fn workload(
    scheduler: &Scheduler,
    team: &str,
    id: WorkloadId,
) -> Result<Explanation, ExplainError> {
    scheduler.dispatch.catch_up().await;
    let row = workloads::find(scheduler.db.read(), id).await?.filter(|row| row.team == team);
    let row = row.ok_or(ExplainError::NotFound(id))?;
    // One whose inputs are being pinned is not in the queue yet, but has its place there.
    if !matches!(row.state, State::Accepted | State::Pending) {
        return Err(ExplainError::NotQueued(id, row.state));
    }
    let demand = workloads::demand(&row)?;
    let locations = workloads::locations(&row)?;
    let since = Timestamp(row.submitted_at);
    let (is_behind, ahead) = {
        let queue = scheduler.dispatch.queue();
        let is_behind = queue.is_behind(&demand, row.priority, since, row.sequence);
        (is_behind, queue.ahead(row.priority, since, row.sequence))
    };
    let mut explanation = judge(&mut scheduler.dispatch.workers.lock(), &demand, &locations, is_behind);
    explanation.position = ahead + 1;
    Ok(explanation)
}

/// `is_behind`: one that asks for the same waits before it.
fn judge(workers: &mut Index, demand: &Demand, locations: &[Location], is_behind: bool) -> Explanation {
    let verdict = match workers.choose(demand, locations) {
        Choice::Placed(_) if !is_behind => Verdict::Placed,
        Choice::Placed(_) | Choice::NotNow => Verdict::NotNow,
        Choice::Never => Verdict::Never,
    };
    let mut opinions: Vec<_> = workers
        .ranking(demand, locations)
        .into_iter()
        .map(|(worker, standing)| Opinion {
            worker: worker.id,
            name: worker.name.clone(),
            refusals: Vec::new(),
            standing,
        })
        .collect();
    let best = opinions.len();
    opinions.extend(workers.opinions(demand).into_iter().filter(|(_, refusals)| !refusals.is_empty()).map(
        |(worker, refusals)| Opinion {
            worker: worker.id,
            name: worker.name.clone(),
            refusals,
            standing: String::new(),
        },
    ));
    opinions[best..].sort_by(|one, other| one.name.cmp(&other.name));
    let unblocked_by = if verdict == Verdict::Placed { Vec::new() } else { unblocked_by(demand, &opinions) };
    Explanation { verdict, position: 0, opinions, unblocked_by }
}

/// What would let it be placed: for each worker, all that it refuses for would have to end.
fn unblocked_by(demand: &Demand, opinions: &[Opinion]) -> Vec<String> {
    let waiting = opinions.iter().any(|opinion| opinion.refusals.iter().all(Refusal::passes));
    let mut lines = BTreeSet::new();
    for opinion in opinions {
        // Where waiting is enough somewhere, nobody has to change anything.
        if waiting && !opinion.refusals.iter().all(Refusal::passes) {
            continue;
        }
        let ends: Vec<_> = opinion.refusals.iter().map(Refusal::ended_by).collect();
        lines.insert(format!("{}: {}", opinion.name, ends.join(", and ")));
    }
    let mut lines: Vec<_> = lines.into_iter().collect();
    if !waiting {
        let mut asked = format!("platform {}", demand.shape.platform);
        if !demand.shape.tags.is_empty() {
            asked.push_str(&format!(", tags {}", demand.shape.tags.join(", ")));
        }
        lines.push(format!("a worker registers that can do it ({asked})"));
    }
    lines
}
