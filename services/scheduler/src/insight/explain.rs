//! Explanations: the placement of a workload as things are now, and the changes that would unblock
//! it. Read-only.
//!
//! The same [`Index`] that places workloads decides.

use std::collections::BTreeSet;
use std::time::Duration;

use domain::workload::{Image, WorkloadSpec};
use domain::{ArtifactId, CacheId, Timestamp, WorkloadId};
use sea_orm::DbErr;
use uuid::Uuid;

use crate::app::App;
use crate::db::entity::workload::State;
use crate::placement::{
    Answer, Choice, Demand, DetailFilter, Group, Index, Location, Outlook, Refusal, Shape,
};
use crate::store_client::{Inputs, Located};
use crate::workers;
use crate::workloads;

/// The result of placing a workload now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// A worker takes the workload.
    Placed,
    /// The workload waits.
    NotNow,
    /// The workload is unschedulable.
    Never,
}

/// The result of placing a workload now, with reasons.
#[derive(Debug)]
pub(crate) struct Explanation {
    pub(crate) verdict: Verdict,
    /// Position in the queue, from 1. 0: the workload would not wait.
    pub(crate) position: u64,
    /// The refusals of the workers.
    pub(crate) outlook: Outlook,
    /// Changes that would unblock the workload. Each one alone is enough.
    pub(crate) unblocked_by: Vec<String>,
    /// One sentence for people.
    pub(crate) summary: String,
    /// Expected waiting time. `None`: the workload would not wait, or the time is unknown.
    pub(crate) expected_wait: Option<Duration>,
    /// Basis of the expected waiting time, for people.
    pub(crate) expected_wait_basis: String,
}

/// Reason why a workload cannot be explained.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ExplainError {
    /// The team has no such workload.
    #[error("workload {0} is unknown to this team")]
    NotFound(WorkloadId),
    /// The workload no longer waits.
    #[error("workload {0} is not waiting for a worker")]
    NotQueued(WorkloadId, State),
    /// An input is unknown to the team, not sealed, or its bytes are lost.
    #[error("artifact {0} cannot be used as an input")]
    InputUnavailable(ArtifactId),
    /// A task cache is unknown to the team.
    #[error("task cache {0} is unknown to this team")]
    CacheUnavailable(CacheId),
    /// The worker that the spec names is unknown.
    #[error("worker {0:?} is unknown")]
    UnknownWorker(String),
    /// The artifact store does not answer where the inputs are.
    #[error("cannot locate the inputs of the workload in the artifact store")]
    NotLocated(#[source] rpc::Refusal),
    /// The database failed.
    #[error("cannot read the workload from the database")]
    Database(#[from] DbErr),
}

/// The place of a request in the queue.
#[derive(Debug, Clone, Copy)]
struct QueuePlace {
    /// Number of requests ahead.
    ahead: u64,
    /// Number of requests ahead with the same requirements.
    rivals: u64,
    /// Whether a request with the same requirements waits ahead.
    is_behind: bool,
}

/// Explains a submission of `spec` now, with its inputs where the artifact store has them.
pub(crate) async fn spec(
    app: &App,
    mut spec: WorkloadSpec,
    filter: &DetailFilter,
) -> Result<Explanation, ExplainError> {
    if !spec.worker.is_empty() {
        match workers::id_of(app.context.db.read(), &spec.worker).await? {
            Some(worker) => spec.worker = worker.to_string(),
            None => return Err(ExplainError::UnknownWorker(spec.worker)),
        }
    }
    // No call to the registry: the digest changes nothing for the placement.
    if let Image::ResourceType(name) = &spec.image {
        spec.image = app.store.image(name).await.map_err(ExplainError::NotLocated)?;
    }
    let inputs =
        Inputs { artifacts: spec.artifacts(), caches: spec.caches.iter().map(|mount| mount.cache).collect() };
    let locations = match app.store.find(&spec.team, &inputs).await.map_err(ExplainError::NotLocated)? {
        Located::All(locations) => locations,
        Located::Missing(artifact) => return Err(ExplainError::InputUnavailable(artifact)),
        Located::MissingCache(cache) => return Err(ExplainError::CacheUnavailable(cache)),
    };

    app.dispatch.catch_up().await;
    let now = Timestamp::now();
    let demand = Demand::of(&spec, Uuid::now_v7());
    let priority = i64::from(spec.priority);
    let place = {
        let queue = app.dispatch.queue();
        QueuePlace {
            ahead: queue.ahead(priority, now, Uuid::max()),
            rivals: queue.rivals(&demand, priority, now, Uuid::max()),
            is_behind: queue.is_before(&demand, priority, now),
        }
    };
    let mut explanation =
        build_explanation(&mut app.dispatch.workers.lock(), &demand, &locations, place, filter, now);
    if explanation.verdict != Verdict::NotNow {
        explanation.position = 0;
    }
    Ok(explanation)
}

/// Explains a submitted workload that waits.
pub(crate) async fn workload(
    app: &App,
    team: &str,
    id: WorkloadId,
    filter: &DetailFilter,
) -> Result<Explanation, ExplainError> {
    app.dispatch.catch_up().await;
    let row = workloads::find(app.context.db.read(), id).await?.filter(|row| row.team == team);
    let row = row.ok_or(ExplainError::NotFound(id))?;
    // A workload whose inputs are being pinned is not in the queue yet, but has its position there.
    if !matches!(row.state, State::Accepted | State::Pending) {
        return Err(ExplainError::NotQueued(id, row.state));
    }
    let demand = workloads::demand(&row)?;
    let locations = workloads::locations(&row)?;
    let since = Timestamp(row.submitted_at);
    let place = {
        let queue = app.dispatch.queue();
        QueuePlace {
            ahead: queue.ahead(row.priority, since, row.sequence),
            rivals: queue.rivals(&demand, row.priority, since, row.sequence),
            is_behind: queue.is_behind(&demand, row.priority, since, row.sequence),
        }
    };
    let now = Timestamp::now();
    Ok(build_explanation(&mut app.dispatch.workers.lock(), &demand, &locations, place, filter, now))
}

fn build_explanation(
    workers: &mut Index,
    demand: &Demand,
    locations: &[Location],
    place: QueuePlace,
    filter: &DetailFilter,
    now: Timestamp,
) -> Explanation {
    let verdict = match workers.choose(demand, locations) {
        Choice::Placed(_) if !place.is_behind => Verdict::Placed,
        Choice::Placed(_) | Choice::NotNow => Verdict::NotNow,
        Choice::Never => Verdict::Never,
    };
    // With few workers, the remedy is named for each of them.
    let few = DetailFilter { most: filter.most.max(FEW), only: filter.only.clone() };
    let mut outlook = workers.outlook(demand, locations, &few, now);
    let unblocked_by = match verdict {
        Verdict::Placed => Vec::new(),
        Verdict::NotNow | Verdict::Never => unblocked_by(demand, &outlook, verdict),
    };
    let reserved = workers.reserved_for(demand.waits_as);
    let summary = match (summary(verdict, &outlook), reserved.as_slice()) {
        (summary, []) => summary,
        (summary, [one]) => format!("{summary}; {one} is reserved until it has room for the request"),
        (summary, some) => {
            format!("{summary}; {} are reserved until they have room for the request", some.join(", "))
        }
    };
    outlook.opinions.truncate(filter.most);
    let (expected_wait, expected_wait_basis) = match verdict {
        Verdict::NotNow => expected_wait(&outlook, place.rivals),
        Verdict::Placed | Verdict::Never => (None, String::new()),
    };
    let position = place.ahead + 1;
    Explanation { verdict, position, outlook, unblocked_by, summary, expected_wait, expected_wait_basis }
}

/// Estimates the waiting time behind `rivals` requests, and describes the basis of the estimate.
fn expected_wait(outlook: &Outlook, rivals: u64) -> (Option<Duration>, String) {
    let pace = &outlook.pace;
    let workers = pace.workers;
    if workers == 0 {
        return (None, "unknown: no worker in service could take it".to_owned());
    }
    match (pace.until_freed(rivals + 1), pace.held_for()) {
        (Some(wait), Some(held_for)) => {
            let held_for = held_for.as_secs_f64();
            let whose = match workers {
                1 => "of the worker that could take it".to_owned(),
                _ => format!("of the {workers} workers that could take it"),
            };
            let basis = format!(
                "lately, a slot {whose} was held for {held_for:.1} s; requests ahead with the same requirements: {rivals}"
            );
            (Some(wait), basis)
        }
        _ => (None, "unknown: lately, no slot of a worker that could take it came free".to_owned()),
    }
}

/// Summarizes the verdict in one sentence.
fn summary(verdict: Verdict, outlook: &Outlook) -> String {
    match verdict {
        Verdict::Placed => {
            return match outlook.willing {
                1 => format!("1 of {} workers would take it now", outlook.known),
                willing => format!("{willing} of {} workers would take it now", outlook.known),
            };
        }
        Verdict::Never => return "no known worker could ever take it".to_owned(),
        Verdict::NotNow if outlook.known + outlook.gone == 0 => {
            return "no worker has registered yet".to_owned();
        }
        Verdict::NotNow if outlook.willing > 0 => {
            return "requests ahead of it have the same requirements".to_owned();
        }
        Verdict::NotNow => {}
    }
    let could = outlook.groups.iter().filter(|group| group.passes());
    let (gone, there): (Vec<_>, Vec<_>) = could.partition(|group| group.are_removed());
    match (there.is_empty(), gone.as_slice(), count(&gone)) {
        (true, ..) => join_reasons(&gone),
        (false, _, 0) => join_reasons(&there),
        (false, [only], 1) => {
            format!("{}; another, {}, {}", join_reasons(&there), only.names.join(""), Refusal::Gone)
        }
        (false, _, others) => {
            format!("{}; {others} others {}", join_reasons(&there), Refusal::Gone.of_many())
        }
    }
}

/// Returns the number of workers in these groups.
fn count(groups: &[&Group]) -> usize {
    groups.iter().map(|group| group.count).sum()
}

/// Joins the reasons of the workers that could take the request.
fn join_reasons(could: &[&Group]) -> String {
    match (could, count(could)) {
        ([], _) => "no known worker could take it".to_owned(),
        ([only], 1) => {
            format!("the only worker that could take it, {}, {}", only.names.join(""), refusals_of(only))
        }
        ([all], count) => format!("all {count} workers that could take it {}", all.words()),
        (several, count) => {
            let parts = several.iter().map(|group| match group.count {
                1 => format!("{} {}", group.names.join(""), refusals_of(group)),
                some => format!("{some} {}", group.words()),
            });
            let parts: Vec<_> = parts.collect();
            format!("of {count} workers that could take it {}", parts.join(", "))
        }
    }
}

/// Returns the refusals of a group with a single worker.
fn refusals_of(group: &Group) -> String {
    let words: Vec<_> = group.refusals.iter().map(ToString::to_string).collect();
    words.join(" and ")
}

/// Describes a worker that could run a request of this shape.
fn describe_capable_worker(shape: &Shape) -> String {
    let mut has = vec![format!("platform {}", shape.platform)];
    if !shape.tags.is_empty() {
        has.push(format!("tags {}", shape.tags.join(", ")));
    }
    if let Some(process) = &shape.process {
        has.extend(process.resource_type.as_ref().map(|name| format!("resource type {name}")));
        if !process.capabilities.is_empty() {
            has.push(format!("capabilities {}", process.capabilities.join(", ")));
        }
    }
    has.extend(shape.requests.words());
    has.join(", ")
}

/// Maximum number of workers for which the remedy is named for each one.
const FEW: usize = 10;

/// Maximum number of names of a group that are listed.
const NAMED: usize = 3;

/// Lists the changes that would let the request be placed. Each entry names all refusals of one
/// worker or group.
fn unblocked_by(demand: &Demand, outlook: &Outlook, verdict: Verdict) -> Vec<String> {
    let mut lines = BTreeSet::new();
    let all = outlook.known + outlook.gone;
    let waiting = verdict == Verdict::NotNow && all > 0;
    if outlook.willing > 0 && waiting {
        lines.insert("the requests ahead of it with the same requirements are placed".to_owned());
    }
    let few: Option<Vec<_>> = (all <= FEW && outlook.opinions.len() == all).then(|| {
        let refusing = outlook.opinions.iter().filter_map(|opinion| match &opinion.answer {
            Answer::WouldNot(refusals) => Some((&opinion.name, refusals)),
            Answer::Would(_) => None,
        });
        refusing.collect()
    });
    // If waiting suffices for some worker, only waiting is proposed. Nothing unblocks a removed
    // worker.
    let helps = |refusals: &[Refusal]| {
        !refusals.contains(&Refusal::Gone) && (!waiting || refusals.iter().all(Refusal::passes))
    };
    match few {
        Some(few) => {
            for (name, refusals) in few.into_iter().filter(|(_, refusals)| helps(refusals)) {
                lines.insert(format!("{name}: {}", join_conditions(refusals, Refusal::ended_by)));
            }
        }
        None => {
            for group in outlook.groups.iter().filter(|group| helps(&group.refusals)) {
                let named = group.names.iter().take(NAMED).cloned().collect::<Vec<_>>().join(", ");
                let more = if group.count > NAMED { ", …" } else { "" };
                let (subject, ended_by): (_, fn(&Refusal) -> String) = match group.count {
                    1 => (named, Refusal::ended_by),
                    count => (format!("one of {count} workers ({named}{more})"), Refusal::ended_by_of_many),
                };
                lines.insert(format!("{subject}: {}", join_conditions(&group.refusals, ended_by)));
            }
        }
    }
    let mut lines: Vec<_> = lines.into_iter().collect();
    let may_be_new = demand.only.is_none();
    let is_replaced = || outlook.groups.iter().any(|group| group.passes() && group.are_removed());
    if may_be_new && (!waiting || is_replaced()) {
        lines.push(format!("a worker registers that can do it ({})", describe_capable_worker(&demand.shape)));
    }
    lines
}

/// Joins the conditions that must all end. A worker that will be replaced need not return or become
/// free.
fn join_conditions(refusals: &[Refusal], ended_by: fn(&Refusal) -> String) -> String {
    let is_replaced = refusals.contains(&Refusal::Retiring);
    let ends = refusals.iter().filter(|refusal| !is_replaced || !refusal.passes());
    ends.map(ended_by).collect::<Vec<_>>().join(", and ")
}
