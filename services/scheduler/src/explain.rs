//! Explanations: what becomes of a workload as things are now, and what would change that. Only looks, and changes nothing.
//!
//! Judged by the same [`placement::choose`] that places it, after those before it in the queue got what they wait for.

use std::collections::{BTreeMap, BTreeSet};

use domain::workload::WorkloadSpec;
use domain::{ArtifactId, WorkerId, WorkloadId};
use sea_orm::{ConnectionTrait, DbErr};

use crate::entity::workload::State;
use crate::placement::{self, Choice, Demand, Location, Refusal, Worker};
use crate::store::Store;
use crate::{dispatch, workers, workloads};

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

/// What would become of `spec` if it were submitted now, with its inputs where `store` says that they are.
pub(crate) async fn spec(
    db: &impl ConnectionTrait,
    store: &Store,
    spec: &WorkloadSpec,
) -> Result<Explanation, ExplainError> {
    let artifacts = spec.artifacts();
    let mut located = match artifacts.is_empty() {
        true => BTreeMap::new(),
        false => store.locate(&spec.team, &artifacts).await.map_err(ExplainError::NotLocated)?,
    };
    let locations = artifacts
        .into_iter()
        .map(|artifact| located.remove(&artifact).ok_or(ExplainError::InputUnavailable(artifact)));
    let mut locations = locations.collect::<Result<Vec<_>, _>>()?;
    if !spec.caches.is_empty() {
        let caches = spec.caches.iter().map(|mount| mount.cache);
        let found = store.locate_caches(&spec.team, caches).await.map_err(ExplainError::NotLocated)?;
        locations.extend(found);
    }

    let mut known = workers::for_placement(db).await?;
    let ahead = dispatch::ahead(db, None, &mut known).await?;
    let mut explanation = judge(&Demand::of(spec), &known, &locations);
    if explanation.verdict == Verdict::NotNow {
        explanation.position = ahead + 1;
    }
    Ok(explanation)
}

/// What becomes of a workload that was submitted and waits.
pub(crate) async fn workload(
    db: &impl ConnectionTrait,
    team: &str,
    id: WorkloadId,
) -> Result<Explanation, ExplainError> {
    let row = workloads::find(db, id).await?.filter(|row| row.team == team);
    let row = row.ok_or(ExplainError::NotFound(id))?;
    // One whose inputs are being pinned is not in the queue yet, but has its place there.
    if !matches!(row.state, State::Accepted | State::Pending) {
        return Err(ExplainError::NotQueued(id, row.state));
    }
    let mut known = workers::for_placement(db).await?;
    let ahead = dispatch::ahead(db, Some(row.sequence), &mut known).await?;
    let demand = workloads::demand(&row)?;
    let mut explanation = judge(&demand, &known, &workloads::locations(&row)?);
    explanation.position = ahead + 1;
    Ok(explanation)
}

fn judge(demand: &Demand, known: &[Worker], locations: &[Location]) -> Explanation {
    let verdict = match placement::choose(demand, known, locations) {
        Choice::Placed(_) => Verdict::Placed,
        Choice::NotNow(_) => Verdict::NotNow,
        Choice::Never(_) => Verdict::Never,
    };
    let willing = placement::ranking(demand, known, locations);
    let mut opinions: Vec<_> = willing
        .into_iter()
        .map(|(worker, standing)| Opinion {
            worker: worker.id,
            name: worker.name.clone(),
            refusals: Vec::new(),
            standing,
        })
        .collect();
    let best = opinions.len();
    opinions.extend(known.iter().filter_map(|worker| {
        let refusals = placement::refusals(demand, worker);
        (!refusals.is_empty()).then(|| Opinion {
            worker: worker.id,
            name: worker.name.clone(),
            refusals,
            standing: String::new(),
        })
    }));
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
        let mut asked = format!("platform {}", demand.platform);
        if !demand.tags.is_empty() {
            asked.push_str(&format!(", tags {}", demand.tags.join(", ")));
        }
        lines.push(format!("a worker registers that can do it ({asked})"));
    }
    lines
}
