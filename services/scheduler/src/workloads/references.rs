//! Search of workloads by a name, or by the beginning of an id.
//!
//! Every query reads at most [`MAX_MATCHES`] + 1 entries of one index.

use rpc::spec::name::Reference;
use sea_orm::sea_query::Expr;
use sea_orm::{
    ColumnTrait, ConnectionTrait, DbErr, EntityTrait, QueryFilter, QueryOrder, QuerySelect, Select,
};
use uuid::Uuid;

use super::{NAMED, UNFINISHED, Workload, WorkloadError, view};
use crate::db::entity::workload;

/// Maximum number of workloads in an answer.
const MAX_MATCHES: u64 = 20;

/// Returns the workloads of `team` that `reference` stands for, newest first, and whether there are
/// more of them. `text` is the reference as the caller wrote it.
pub(crate) async fn resolve(
    db: &impl ConnectionTrait,
    team: &str,
    reference: &Reference,
    text: &str,
) -> Result<(Vec<Workload>, bool), WorkloadError> {
    let of_team = workload::Entity::find().filter(workload::Column::Team.eq(team));
    let mut rows = match reference {
        Reference::Last => newest(of_team, 1).all(db).await?,
        Reference::Text { name, ids } => {
            let mut rows = match name {
                Some(name) => named(db, &of_team, name).await?,
                None => Vec::new(),
            };
            if let (true, Some((first, last))) = (rows.is_empty(), ids) {
                rows = in_range(of_team, *first, *last).all(db).await?;
            }
            rows
        }
    };
    if rows.is_empty() {
        return Err(WorkloadError::NoMatch(text.to_owned()));
    }
    let more = rows.len() as u64 > MAX_MATCHES;
    rows.sort_by_key(|row| std::cmp::Reverse(row.sequence));
    rows.truncate(usize::try_from(MAX_MATCHES).unwrap_or(usize::MAX));
    Ok((view(db, rows).await?, more))
}

/// Reads the workloads that a name stands for: all that have not ended, or else the newest one.
async fn named(
    db: &impl ConnectionTrait,
    of_team: &Select<workload::Entity>,
    name: &str,
) -> Result<Vec<workload::Model>, DbErr> {
    // The conditions equal those of the partial indexes.
    let named = of_team.clone().filter(workload::Column::Name.eq(name)).filter(Expr::cust(NAMED));
    let unfinished = newest(named.clone().filter(Expr::cust(UNFINISHED)), MAX_MATCHES + 1).all(db).await?;
    if !unfinished.is_empty() {
        return Ok(unfinished);
    }
    newest(named, 1).all(db).await
}

fn newest(query: Select<workload::Entity>, limit: u64) -> Select<workload::Entity> {
    query.order_by_desc(workload::Column::Sequence).limit(limit)
}

fn in_range(query: Select<workload::Entity>, first: Uuid, last: Uuid) -> Select<workload::Entity> {
    query
        .filter(workload::Column::Id.between(first, last))
        .order_by_asc(workload::Column::Id)
        .limit(MAX_MATCHES + 1)
}
