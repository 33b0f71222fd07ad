//! Explanations: what becomes of a workload as things are now, and what would change that. Only looks, and changes nothing.
//!
//! Judged by the same [`Index`] that places it.

use std::collections::BTreeSet;
use std::time::Duration;

use domain::workload::{Image, WorkloadSpec};
use domain::{ArtifactId, CacheId, Timestamp, WorkloadId};
use sea_orm::DbErr;
use uuid::Uuid;

use crate::app::App;
use crate::db::entity::workload::State;
use crate::placement::{Choice, Demand, Group, Index, Location, Outlook, Refusal, Says, Shape, Tell};
use crate::store_client::{Found, Inputs};
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

/// What becomes of a workload, and why.
#[derive(Debug)]
pub(crate) struct Explanation {
    pub(crate) verdict: Verdict,
    /// From 1. 0: it would not wait.
    pub(crate) position: u64,
    /// What the workers say.
    pub(crate) outlook: Outlook,
    /// Each alone is enough.
    pub(crate) unblocked_by: Vec<String>,
    /// All of it, for people.
    pub(crate) summary: String,
    /// For how long it may wait. `None`: it would not, or that is unknown.
    pub(crate) expected_wait: Option<Duration>,
    /// What that rests on, for people.
    pub(crate) expected_wait_basis: String,
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
    /// A task cache is unknown to the team.
    #[error("task cache {0} is unknown to this team")]
    CacheUnavailable(CacheId),
    /// The artifact store does not say where its inputs are.
    #[error("the artifact store does not say where the inputs are")]
    NotLocated(#[source] rpc::Refusal),
    /// The database does not answer.
    #[error("the database failed")]
    Database(#[from] DbErr),
}

/// Its place in the queue.
#[derive(Debug, Clone, Copy)]
struct Turn {
    /// How many wait before it.
    ahead: u64,
    /// How many of them ask for the same workers.
    rivals: u64,
    /// One that asks for the same waits before it.
    is_behind: bool,
}

/// What would become of `spec` if it were submitted now, with its inputs where the artifact store says that they are.
pub(crate) async fn spec(
    app: &App,
    mut spec: WorkloadSpec,
    tell: &Tell,
) -> Result<Explanation, ExplainError> {
    if let Image::ResourceType(name) = &spec.image {
        spec.image = app.store.image(name).await.map_err(ExplainError::NotLocated)?;
    }
    let inputs =
        Inputs { artifacts: spec.artifacts(), caches: spec.caches.iter().map(|mount| mount.cache).collect() };
    let locations = match app.store.find(&spec.team, &inputs).await.map_err(ExplainError::NotLocated)? {
        Found::All(locations) => locations,
        Found::Missing(artifact) => return Err(ExplainError::InputUnavailable(artifact)),
        Found::MissingCache(cache) => return Err(ExplainError::CacheUnavailable(cache)),
    };

    app.dispatch.catch_up().await;
    let now = Timestamp::now();
    let demand = Demand::of(&spec, Uuid::now_v7());
    let priority = i64::from(spec.priority);
    let turn = {
        let queue = app.dispatch.queue();
        Turn {
            ahead: queue.ahead(priority, now, Uuid::max()),
            rivals: queue.rivals(&demand, priority, now, Uuid::max()),
            is_behind: queue.is_before(&demand, priority, now),
        }
    };
    let mut explanation = judge(&mut app.dispatch.workers.lock(), &demand, &locations, turn, tell, now);
    if explanation.verdict != Verdict::NotNow {
        explanation.position = 0;
    }
    Ok(explanation)
}

/// What becomes of a workload that was submitted and waits.
pub(crate) async fn workload(
    app: &App,
    team: &str,
    id: WorkloadId,
    tell: &Tell,
) -> Result<Explanation, ExplainError> {
    app.dispatch.catch_up().await;
    let row = workloads::find(app.context.db.read(), id).await?.filter(|row| row.team == team);
    let row = row.ok_or(ExplainError::NotFound(id))?;
    // One whose inputs are being pinned is not in the queue yet, but has its place there.
    if !matches!(row.state, State::Accepted | State::Pending) {
        return Err(ExplainError::NotQueued(id, row.state));
    }
    let demand = workloads::demand(&row)?;
    let locations = workloads::locations(&row)?;
    let since = Timestamp(row.submitted_at);
    let turn = {
        let queue = app.dispatch.queue();
        Turn {
            ahead: queue.ahead(row.priority, since, row.sequence),
            rivals: queue.rivals(&demand, row.priority, since, row.sequence),
            is_behind: queue.is_behind(&demand, row.priority, since, row.sequence),
        }
    };
    let now = Timestamp::now();
    Ok(judge(&mut app.dispatch.workers.lock(), &demand, &locations, turn, tell, now))
}

fn judge(
    workers: &mut Index,
    demand: &Demand,
    locations: &[Location],
    turn: Turn,
    tell: &Tell,
    now: Timestamp,
) -> Explanation {
    let verdict = match workers.choose(demand, locations) {
        Choice::Placed(_) if !turn.is_behind => Verdict::Placed,
        Choice::Placed(_) | Choice::NotNow => Verdict::NotNow,
        Choice::Never => Verdict::Never,
    };
    // Where there are few, what would help is said of each.
    let few = Tell { most: tell.most.max(FEW), only: tell.only.clone() };
    let mut outlook = workers.outlook(demand, locations, &few, now);
    let unblocked_by = match verdict {
        Verdict::Placed => Vec::new(),
        Verdict::NotNow | Verdict::Never => unblocked_by(demand, &outlook, verdict),
    };
    let reserved = workers.reserved_for(demand.waits_as);
    let summary = match (summary(verdict, &outlook), reserved.as_slice()) {
        (summary, []) => summary,
        (summary, [one]) => format!("{summary}; {one} takes nothing else until it has room for it"),
        (summary, some) => {
            format!("{summary}; {} take nothing else until they have room for it", some.join(", "))
        }
    };
    outlook.opinions.truncate(tell.most);
    let (expected_wait, expected_wait_basis) = match verdict {
        Verdict::NotNow => expected_wait(&outlook, turn.rivals),
        Verdict::Placed | Verdict::Never => (None, String::new()),
    };
    let position = turn.ahead + 1;
    Explanation { verdict, position, outlook, unblocked_by, summary, expected_wait, expected_wait_basis }
}

/// How long one may wait behind so many `rivals`, and what that rests on.
fn expected_wait(outlook: &Outlook, rivals: u64) -> (Option<Duration>, String) {
    let pace = &outlook.pace;
    let workers = pace.workers;
    if workers == 0 {
        return (None, "unknown: no worker that takes work now could take it".to_owned());
    }
    match (pace.until_freed(rivals + 1), pace.held_for()) {
        (Some(wait), Some(held_for)) => {
            let held_for = held_for.as_secs_f64();
            let whose = match workers {
                1 => "of the worker that could take it".to_owned(),
                _ => format!("of the {workers} workers that could take it"),
            };
            let basis = format!(
                "lately a slot {whose} was held for {held_for:.1} s, and {rivals} before it ask for the same"
            );
            (Some(wait), basis)
        }
        _ => (None, "unknown: no slot of a worker that could take it came free lately".to_owned()),
    }
}

/// All of it in a few words.
fn summary(verdict: Verdict, outlook: &Outlook) -> String {
    match verdict {
        Verdict::Placed => {
            return match outlook.willing {
                1 => format!("1 of {} workers would take it now", outlook.known),
                willing => format!("{willing} of {} workers would take it now", outlook.known),
            };
        }
        Verdict::Never => return "no worker that is known could ever take it".to_owned(),
        Verdict::NotNow if outlook.known + outlook.gone == 0 => {
            return "no worker has registered yet".to_owned();
        }
        Verdict::NotNow if outlook.willing > 0 => {
            return "others that ask for the same are before it".to_owned();
        }
        Verdict::NotNow => {}
    }
    let could = outlook.groups.iter().filter(|group| group.passes());
    let (gone, there): (Vec<_>, Vec<_>) = could.partition(|group| group.has_gone());
    match (there.is_empty(), gone.as_slice(), count(&gone)) {
        (true, ..) => all_in_one(&gone),
        (false, _, 0) => all_in_one(&there),
        (false, [only], 1) => {
            format!("{}; another, {}, {}", all_in_one(&there), only.names.join(""), Refusal::Gone)
        }
        (false, _, others) => {
            format!("{}; {others} others {}", all_in_one(&there), Refusal::Gone.of_many())
        }
    }
}

/// How many are in these groups.
fn count(groups: &[&Group]) -> usize {
    groups.iter().map(|group| group.count).sum()
}

/// What those say that could take it.
fn all_in_one(could: &[&Group]) -> String {
    match (could, count(could)) {
        ([], _) => "no worker that is known could take it".to_owned(),
        ([only], 1) => format!("the only worker that could take it, {}, {}", only.names.join(""), one(only)),
        ([all], count) => format!("all {count} workers that could take it {}", all.words()),
        (several, count) => {
            let parts = several.iter().map(|group| match group.count {
                1 => format!("{} {}", group.names.join(""), one(group)),
                some => format!("{some} {}", group.words()),
            });
            let parts: Vec<_> = parts.collect();
            format!("of {count} workers that could take it {}", parts.join(", "))
        }
    }
}

/// What a group of one says.
fn one(group: &Group) -> String {
    let words: Vec<_> = group.refusals.iter().map(ToString::to_string).collect();
    words.join(" and ")
}

/// What a worker has to be to do something of this shape.
fn what_can_do(shape: &Shape) -> String {
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

/// Up to how many workers what would help is said of each alone.
const FEW: usize = 10;

/// How many of a group are named here.
const NAMED: usize = 3;

/// What would let it be placed: for each worker, or each group of them, all that it refuses for would have to end.
fn unblocked_by(demand: &Demand, outlook: &Outlook, verdict: Verdict) -> Vec<String> {
    let mut lines = BTreeSet::new();
    let all = outlook.known + outlook.gone;
    let waiting = verdict == Verdict::NotNow && all > 0;
    if outlook.willing > 0 && waiting {
        lines.insert("those before it that ask for the same are placed".to_owned());
    }
    let few: Option<Vec<_>> = (all <= FEW && outlook.opinions.len() == all).then(|| {
        let refusing = outlook.opinions.iter().filter_map(|opinion| match &opinion.says {
            Says::WouldNot(refusals) => Some((&opinion.name, refusals)),
            Says::Would(_) => None,
        });
        refusing.collect()
    });
    // Where waiting is enough somewhere, nobody has to change anything; and nothing helps with one that has gone.
    let helps = |refusals: &[Refusal]| {
        !refusals.contains(&Refusal::Gone) && (!waiting || refusals.iter().all(Refusal::passes))
    };
    match few {
        Some(few) => {
            for (name, refusals) in few.into_iter().filter(|(_, refusals)| helps(refusals)) {
                lines.insert(format!("{name}: {}", ends(refusals, Refusal::ended_by)));
            }
        }
        None => {
            for group in outlook.groups.iter().filter(|group| helps(&group.refusals)) {
                let named = group.names.iter().take(NAMED).cloned().collect::<Vec<_>>().join(", ");
                let more = if group.count > NAMED { ", …" } else { "" };
                let (who, ended_by): (_, fn(&Refusal) -> String) = match group.count {
                    1 => (named, Refusal::ended_by),
                    count => (format!("one of {count} workers ({named}{more})"), Refusal::ended_by_of_many),
                };
                lines.insert(format!("{who}: {}", ends(&group.refusals, ended_by)));
            }
        }
    }
    let mut lines: Vec<_> = lines.into_iter().collect();
    if !waiting || outlook.groups.iter().any(|group| group.passes() && group.has_gone()) {
        lines.push(format!("a worker registers that can do it ({})", what_can_do(&demand.shape)));
    }
    lines
}

/// What would have to end, all of it. One whose place another takes need not come back, or have room.
fn ends(refusals: &[Refusal], ended_by: fn(&Refusal) -> String) -> String {
    let is_replaced = refusals.contains(&Refusal::Retiring);
    let ends = refusals.iter().filter(|refusal| !is_replaced || !refusal.passes());
    ends.map(ended_by).collect::<Vec<_>>().join(", and ")
}
