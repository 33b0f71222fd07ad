//! Workloads as callers see them.

use std::collections::{HashMap, HashSet};

use bytes::Bytes;
use domain::workload::WorkloadSpec;
use domain::{Timestamp, WorkerId, WorkloadId};
use rpc::page::{self, Page};
use sea_orm::sea_query::Expr;
use sea_orm::{ColumnTrait, ConnectionTrait, DbErr, EntityTrait, QueryFilter, QueryOrder, QuerySelect};
use uuid::Uuid;

use super::{UNFINISHED, ending, location, spec};
use crate::db::entity::from_json;
use crate::db::entity::lease::StopReason;
use crate::db::entity::workload::{self, Model, Outcome, State};
use crate::leases;
use crate::outcome::Ending;
use crate::workers;
use crate::workloads::events::AttemptLocation;

/// A workload as callers see it.
#[derive(Debug, Clone)]
pub(crate) struct Workload {
    pub(crate) id: WorkloadId,
    pub(crate) sequence: Uuid,
    pub(crate) spec: WorkloadSpec,
    pub(crate) state: State,
    pub(crate) submitted_at: Timestamp,
    pub(crate) started_at: Option<Timestamp>,
    pub(crate) finished_at: Option<Timestamp>,
    pub(crate) location: Option<AttemptLocation>,
    /// End of the workload. Set once finished.
    pub(crate) ending: Option<Ending>,
    /// Refusals of the workers. Set while pending.
    pub(crate) waiting_for: Vec<String>,
    /// Number of used retries.
    pub(crate) retried: u32,
    /// Reason why the running attempt must stop, if it must.
    pub(crate) stopping: Option<StopReason>,
    /// Whether part of the spec was deleted.
    pub(crate) abridged: bool,
    /// Result. Set only by [`super::operations::get`].
    pub(crate) result: Option<Bytes>,
}

/// Converts rows into workloads, in their order, with the stop reasons of their leases.
pub(crate) async fn view(db: &impl ConnectionTrait, rows: Vec<Model>) -> Result<Vec<Workload>, DbErr> {
    let is_attempted = |row: &&Model| matches!(row.state, State::Assigned | State::Starting | State::Running);
    let attempted: Vec<_> = rows.iter().filter(is_attempted).map(|row| row.id).collect();
    let stopping: HashMap<_, _> = match attempted.is_empty() {
        true => HashMap::new(),
        false => leases::stopping(db, attempted).await?.into_iter().collect(),
    };
    let view = |row: Model| {
        let finished = row.state == State::Finished;
        let pending = row.state == State::Pending;
        Ok(Workload {
            id: WorkloadId::from_uuid(row.id),
            sequence: row.sequence,
            spec: spec(&row)?,
            state: row.state,
            submitted_at: Timestamp(row.submitted_at),
            started_at: row.started_at.map(Timestamp),
            finished_at: row.finished_at.map(Timestamp),
            location: location(&row)?,
            ending: if finished { Some(ending(&row)?) } else { None },
            waiting_for: if pending { from_json(&row.waiting_for)? } else { vec![] },
            retried: u32::try_from(row.retried).unwrap_or(0),
            stopping: stopping.get(&row.id).copied(),
            abridged: row.abridged,
            result: None,
        })
    };
    let mut views: Vec<_> = rows.into_iter().map(view).collect::<Result<_, DbErr>>()?;
    // Specs have the ids of named workers, and callers know them by their names.
    let named: HashSet<WorkerId> = views.iter().filter_map(|view| view.spec.worker.parse().ok()).collect();
    if !named.is_empty() {
        let workers = workers::find_all(db, named).await?.into_iter();
        let names: HashMap<_, _> = workers.map(|worker| (worker.id.to_string(), worker.name)).collect();
        for view in &mut views {
            if let Some(name) = names.get(&view.spec.worker) {
                view.spec.worker.clone_from(name);
            }
        }
    }
    Ok(views)
}

/// Returns a page of workloads of `team`, or of all teams, newest first, and whether there are
/// more. The page ends early if specs are large, so that no more rows are read than returned.
pub(crate) async fn list(
    db: &impl ConnectionTrait,
    team: Option<&str>,
    state: Option<State>,
    outcome: Option<Outcome>,
    unfinished: bool,
    page: &Page,
) -> Result<(Vec<Workload>, bool), DbErr> {
    let mut query = workload::Entity::find();
    if let Some(team) = team {
        query = query.filter(workload::Column::Team.eq(team));
    }
    if let Some(state) = state {
        query = query.filter(workload::Column::State.eq(state));
    }
    if let Some(outcome) = outcome {
        query = query.filter(workload::Column::Outcome.eq(outcome));
        if outcome != Outcome::Succeeded {
            // The text equals that of the partial index of the table.
            query = query.filter(Expr::cust("outcome <> 'succeeded'"));
        }
    }
    if unfinished {
        query = query.filter(Expr::cust(UNFINISHED));
    }
    if let Some(before) = page.after {
        query = query.filter(workload::Column::Sequence.lt(before));
    }
    let query = query.order_by_desc(workload::Column::Sequence);
    let sizes: Vec<i32> = query
        .clone()
        .select_only()
        .expr(Expr::cust("LENGTH(spec)"))
        .limit(page.size + 1)
        .into_tuple()
        .all(db)
        .await?;
    let (mut limit, mut bytes) = (0, 0);
    for size in sizes.iter().take(usize::try_from(page.size).unwrap_or(usize::MAX)) {
        bytes += usize::try_from(*size).unwrap_or(0);
        if bytes > page::MAX_BYTES && limit > 0 {
            break;
        }
        limit += 1;
    }
    let more = sizes.len() > limit;
    let rows = query.limit(limit as u64).all(db).await?;
    Ok((view(db, rows).await?, more))
}
