//! The outbox: what the artifact store must still be told.
//!
//! A parcel is written in the transaction that causes it and removed once the store has acknowledged it; the store treats repeats
//! as one. Whoever wrote a parcel delivers it at once ([`deliver`]); when that fails, or a crash comes in between, the loop
//! ([`redeliver_forever`]) of any replica takes it up.

use std::collections::HashSet;
use std::time::Duration;

use db::rows::{self, Column};
use db::{Asked, Database, Together};
use domain::workload::{Outcome, OutputOwner, PublishedCache, PublishedOutput};
use domain::{ArtifactId, AttemptId, BuildId, Timestamp, WorkloadId};
use rpc::Reason;
use sea_orm::sea_query::{Expr, LockBehavior, LockType};
use sea_orm::{
    ActiveModelTrait, ColumnTrait, ConnectionTrait, DatabaseTransaction, DbErr, EntityTrait, ExprTrait,
    QueryFilter, QueryOrder, QuerySelect, QueryTrait, Set, Statement,
};
use serde::{Deserialize, Serialize};
use tokio_util::task::TaskTracker;
use tracing::Instrument;
use uuid::Uuid;

use crate::app::Scheduler;
use crate::db::entity::{from_json, outbox, to_json};
use crate::notify::changes::Effects;
use crate::workloads;

/// For how long whoever wrote or claimed a parcel has it to itself.
const CLAIM: Duration = Duration::from_secs(15);

/// How many parcels are delivered at a time.
pub(crate) const DELIVERIES: usize = 64;

/// How many parcels a loop claims at a time.
const BATCH: u64 = 32;

/// What the artifact store must be told about a workload.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Message {
    /// It has ended for good.
    Settle(Settlement),
    /// One attempt at it has ended.
    EndAttempt { attempt: AttemptId },
}

/// How a workload ended, as far as its artifacts are concerned.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Settlement {
    pub(crate) team: String,
    pub(crate) attempt: Option<AttemptId>,
    pub(crate) outputs: Vec<PublishedOutput>,
    pub(crate) build: Option<BuildId>,
    pub(crate) outcome: Outcome,
    /// What comes to own single outputs.
    #[serde(default)]
    pub(crate) owners: Vec<(ArtifactId, OutputOwner)>,
    /// What was left in task caches, which alone come to own it.
    #[serde(default)]
    pub(crate) caches: Vec<PublishedCache>,
}

impl Settlement {
    /// Nothing is kept: of a driven lease, or of a holder that nobody remembers.
    pub(crate) fn nothing(team: String) -> Self {
        let outcome = Outcome::Errored;
        Self { team, attempt: None, outputs: vec![], build: None, outcome, owners: vec![], caches: vec![] }
    }
}

/// One message, until it is acknowledged.
#[derive(Debug, Clone)]
pub(crate) struct Parcel {
    pub(crate) id: Uuid,
    /// A workload, or a driven lease.
    pub(crate) holder: Uuid,
    pub(crate) message: Message,
    pub(crate) tries: i64,
}

impl Parcel {
    /// The workload that it is about, if it is about one.
    pub(crate) fn workload(&self) -> WorkloadId {
        WorkloadId::from_uuid(self.holder)
    }
}

/// Puts `message` into the outbox. Whoever commits it delivers it.
pub(crate) async fn put(
    txn: &DatabaseTransaction,
    holder: Uuid,
    message: Message,
    now: Timestamp,
    effects: &mut Effects,
) -> Result<(), DbErr> {
    let id = Uuid::now_v7();
    let row = outbox::ActiveModel {
        id: Set(id),
        workload_id: Set(holder),
        message: Set(to_json(&message)?),
        tries: Set(0),
        due_at: Set((now + CLAIM).0),
    };
    row.insert(txn).await?;
    effects.parcels.push(Parcel { id, holder, message, tries: 0 });
    Ok(())
}

#[derive(Serialize)]
struct NewParcel {
    id: Uuid,
    workload_id: Uuid,
    message: String,
}

const NEW_PARCEL: [(&str, Column); 3] =
    [("id", Column::Uuid), ("workload_id", Column::Uuid), ("message", Column::Text)];

/// The same of many, each with its holder.
pub(crate) async fn put_all(
    txn: &DatabaseTransaction,
    messages: impl IntoIterator<Item = (Uuid, Message)>,
    now: Timestamp,
    effects: &mut Effects,
) -> Result<(), DbErr> {
    let parcel = |(holder, message)| Parcel { id: Uuid::now_v7(), holder, message, tries: 0 };
    let mut parcels: Vec<_> = messages.into_iter().map(parcel).collect();
    if parcels.is_empty() {
        return Ok(());
    }
    let fresh = parcels.iter().map(|Parcel { id, holder, message, .. }| {
        Ok(NewParcel { id: *id, workload_id: *holder, message: to_json(message)? })
    });
    let fresh = fresh.collect::<Result<Vec<_>, DbErr>>()?;
    let backend = txn.get_database_backend();
    let query = format!(
        "INSERT INTO outbox (id, workload_id, message, tries, due_at) SELECT id, workload_id, message, 0, $2 FROM ({}) AS given",
        rows::query(backend, 1, &NEW_PARCEL)
    );
    let values = [rows::value(&fresh)?, (now + CLAIM).0.into()];
    txn.execute_raw(Statement::from_sql_and_values(backend, query, values)).await?;
    effects.parcels.append(&mut parcels);
    Ok(())
}

/// Claims parcels that nobody delivers.
pub(crate) async fn claim(txn: &DatabaseTransaction, now: Timestamp) -> Result<Vec<Parcel>, DbErr> {
    let due = outbox::Entity::find()
        .select_only()
        .column(outbox::Column::Id)
        .filter(outbox::Column::DueAt.lte(now.0))
        .order_by_asc(outbox::Column::DueAt)
        .limit(BATCH)
        .lock_with_behavior(LockType::Update, LockBehavior::SkipLocked)
        .into_query();
    let claimed = outbox::Entity::update_many()
        .col_expr(outbox::Column::DueAt, Expr::value((now + CLAIM).0))
        .filter(outbox::Column::Id.in_subquery(due))
        .exec_with_returning(txn)
        .await?;
    claimed
        .into_iter()
        .map(|row| {
            Ok(Parcel {
                id: row.id,
                holder: row.workload_id,
                message: from_json(&row.message)?,
                tries: row.tries,
            })
        })
        .collect()
}

/// Says something else instead.
pub(crate) async fn replace(txn: &DatabaseTransaction, parcel: Uuid, message: &Message) -> Result<(), DbErr> {
    let message = to_json(message)?;
    outbox::Entity::update_many()
        .col_expr(outbox::Column::Message, Expr::value(message))
        .filter(outbox::Column::Id.eq(parcel))
        .exec(txn)
        .await
        .map(|_| ())
}

/// Tries again after a pause.
async fn postpone(txn: &DatabaseTransaction, parcel: &Parcel, now: Timestamp) -> Result<(), DbErr> {
    let pause = Duration::from_millis(100 << parcel.tries.clamp(0, 8));
    outbox::Entity::update_many()
        .col_expr(outbox::Column::DueAt, Expr::value((now + pause).0))
        .col_expr(outbox::Column::Tries, Expr::col(outbox::Column::Tries).add(1))
        .filter(outbox::Column::Id.eq(parcel.id))
        .exec(txn)
        .await
        .map(|_| ())
}

/// Whether something about `holder` is still to be told.
pub(crate) async fn pending(txn: &impl ConnectionTrait, holder: Uuid) -> Result<bool, DbErr> {
    let row = outbox::Entity::find().filter(outbox::Column::WorkloadId.eq(holder)).one(txn).await?;
    Ok(row.is_some())
}

/// Parcels that a process which is no more had claimed for itself are anyone's again.
pub(crate) async fn release_claims(txn: &DatabaseTransaction, now: Timestamp) -> Result<(), DbErr> {
    outbox::Entity::update_many()
        .col_expr(outbox::Column::DueAt, Expr::value(now.0))
        .exec(txn)
        .await
        .map(|_| ())
}

/// Delivers `parcel` and notes the answer. What fails is tried again by the loop.
pub(crate) async fn deliver(scheduler: Scheduler, mut parcel: Parcel) {
    // Nobody closes the semaphore.
    let Ok(_permit) = scheduler.deliveries.clone().acquire_owned().await else { return };
    let span = match &parcel.message {
        Message::Settle(_) => {
            tracing::info_span!(target: "gantry", "settle", service = "scheduler", holder.id = %parcel.holder)
        }
        Message::EndAttempt { .. } => tracing::Span::none(),
    };
    if !span.is_none() {
        match workloads::find(scheduler.db.read(), parcel.workload()).await {
            // Also when another process accepted the workload than delivers this.
            Ok(row) => rpc::trace::continue_from(&span, row.as_ref().map_or("", |row| &row.traceparent)),
            Err(error) => tracing::debug!(error = %error, "cannot read whose trace this belongs to"),
        }
    }
    if let Err(error) = deliver_once(&scheduler, &mut parcel).instrument(span).await {
        if parcel.tries > 3 {
            tracing::warn!(holder.id = %parcel.holder, tries = parcel.tries, error = %error, "cannot tell the artifact store how a workload ended");
        }
        let postponed = scheduler.db.write(async |txn| postpone(&txn, &parcel, Timestamp::now()).await).await;
        if let Err(error) = postponed {
            tracing::debug!(error = %error, "a parcel waits until its claim runs out");
        }
    }
}

#[derive(Debug, thiserror::Error)]
enum DeliveryError {
    #[error(transparent)]
    Refused(#[from] rpc::Refusal),
    #[error("the database failed")]
    Database(#[from] DbErr),
}

async fn deliver_once(scheduler: &Scheduler, parcel: &mut Parcel) -> Result<(), DeliveryError> {
    loop {
        let answer = match &parcel.message {
            Message::Settle(settlement) => scheduler.store.settle(parcel.holder, settlement).await,
            Message::EndAttempt { attempt } => scheduler.store.end_attempt(parcel.holder, *attempt).await,
        };
        match (answer, &mut parcel.message) {
            (Ok(()), _) => break,
            (Err(refusal), Message::Settle(settlement))
                if refusal.is(Reason::CandidateMissing)
                    && !(settlement.outputs.is_empty() && settlement.caches.is_empty()) =>
            {
                tracing::warn!(holder.id = %parcel.holder, error = %refusal, "settling without outputs");
                settlement.outputs.clear();
                settlement.caches.clear();
                settlement.outcome = Outcome::Errored;
                let parcel = &*parcel;
                scheduler.db.write(async |txn| workloads::lose_outputs(&txn, parcel).await).await?;
            }
            (Err(refusal), _) => return Err(refusal.into()),
        }
    }

    let delivered = scheduler.delivered.call(parcel.clone()).await;
    scheduler.announce(delivered.map_err(|error| DbErr::Custom(error.to_string()))??);
    Ok(())
}

/// Where it is noted what the store has acknowledged: that of many parcels at once.
pub(crate) type Delivered = Together<Parcel, Result<Effects, DbErr>>;

/// The one of a replica.
pub(crate) fn delivered(db: Database, tasks: TaskTracker) -> Delivered {
    Together::new(DELIVERIES, tasks, move |asked| {
        let db = db.clone();
        async move { note_delivered(&db, asked).await }
    })
}

async fn note_delivered(db: &Database, asked: Vec<Asked<Parcel, Result<Effects, DbErr>>>) {
    let (parcels, answers): (Vec<_>, Vec<_>) = asked.into_iter().unzip();
    let now = Timestamp::now();
    let note = async |parcels: &[Parcel]| db.write(async |txn| are_delivered(&txn, parcels, now).await).await;
    match note(&parcels).await {
        Ok(effects) => {
            for (answer, effects) in answers.into_iter().zip(effects) {
                answer.send(Ok(effects)).ok();
            }
        }
        Err(error) if parcels.len() == 1 => {
            answers.into_iter().for_each(|answer| _ = answer.send(Err(error.clone())));
        }
        Err(error) => {
            tracing::debug!(%error, parcels = parcels.len(), "each is noted alone");
            for (answer, parcel) in answers.into_iter().zip(&parcels) {
                let effects = note(std::slice::from_ref(parcel)).await;
                let effects = effects.map(|of| of.into_iter().fold(Effects::default(), Effects::and));
                answer.send(effects).ok();
            }
        }
    }
}

/// Removes parcels that were acknowledged, and ends the workloads that are settled with that. Answers the effects of each.
async fn are_delivered(
    txn: &DatabaseTransaction,
    parcels: &[Parcel],
    now: Timestamp,
) -> Result<Vec<Effects>, DbErr> {
    let backend = txn.get_database_backend();
    let query = format!("DELETE FROM outbox WHERE id {} RETURNING id", rows::among(backend, 1));
    let ids = rows::ids(parcels.iter().map(|parcel| parcel.id))?;
    let removed = txn.query_all_raw(Statement::from_sql_and_values(backend, query, [ids])).await?;
    // What is not there any more another replica has delivered as well.
    let removed: HashSet<Uuid> = removed.iter().map(|row| row.try_get("", "id")).collect::<Result<_, _>>()?;
    let settles =
        |parcel: &&Parcel| removed.contains(&parcel.id) && matches!(parcel.message, Message::Settle(_));
    let settled = parcels.iter().filter(settles).map(Parcel::workload);
    let settled = workloads::settling(txn, settled).await?;
    let mut effects: Vec<_> = parcels.iter().map(|_| Effects::default()).collect();
    for workload in settled {
        // Each is told of once.
        let told = parcels.iter().position(|parcel| settles(&parcel) && parcel.workload() == workload);
        if let Some(told) = told {
            workloads::settled(txn, workload, now, &mut effects[told]).await?;
        }
    }
    Ok(effects)
}

/// Claims what is due. Writes nothing when nothing is.
async fn claim_due(scheduler: &Scheduler) -> Result<Vec<Parcel>, DbErr> {
    let now = Timestamp::now();
    let due = outbox::Entity::find().filter(outbox::Column::DueAt.lte(now.0)).limit(1);
    if due.one(scheduler.db.read()).await?.is_none() {
        return Ok(vec![]);
    }
    scheduler.db.write(async |txn| claim(&txn, now).await).await
}

/// Delivers what was left over, until the service stops.
pub(crate) async fn redeliver_forever(scheduler: Scheduler) {
    loop {
        match claim_due(&scheduler).await {
            Ok(parcels) => {
                let full = parcels.len() as u64 == BATCH;
                let deliveries = parcels.into_iter().map(|parcel| deliver(scheduler.clone(), parcel));
                tokio::select! {
                    () = scheduler.stopping.cancelled() => return,
                    _ = futures::future::join_all(deliveries) => {}
                }
                if full {
                    continue;
                }
            }
            Err(error) => tracing::warn!(error = %error, "cannot read the outbox"),
        }
        tokio::select! {
            () = scheduler.stopping.cancelled() => return,
            () = tokio::time::sleep(scheduler.config.poll / 4) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use db::Database;
    use testing::databases::TestDatabase;

    use super::*;

    async fn what_is_put_together_is_claimed_like_what_is_put_alone(database: TestDatabase) {
        let db = Database::connect::<crate::Schema>(&database.url).await.expect("a database");
        let now = Timestamp::now();
        let message = |team: &str| Message::Settle(Settlement::nothing(team.to_owned()));
        let holders = [Uuid::now_v7(), Uuid::now_v7(), Uuid::now_v7()];
        let put = db.write(async |txn| {
            let mut effects = Effects::default();
            put_all(&txn, [], now, &mut effects).await?;
            let together = [(holders[0], message("one's \"team\"")), (holders[1], message("other"))];
            put_all(&txn, together, now, &mut effects).await?;
            put(&txn, holders[2], message("alone"), now, &mut effects).await?;
            Ok::<_, DbErr>(effects.parcels)
        });
        let put = put.await.expect("put");
        assert_eq!(put.iter().map(|parcel| parcel.holder).collect::<Vec<_>>(), holders);

        let early = db.write(async |txn| claim(&txn, now).await).await.expect("read");
        assert!(early.is_empty(), "whoever put them has them to itself: {early:?}");
        let mut claimed = db.write(async |txn| claim(&txn, now + CLAIM).await).await.expect("claimed");
        claimed.sort_by_key(|parcel| parcel.id);
        let told = |parcels: &[Parcel]| {
            let told = parcels.iter().map(|one| (one.id, one.holder, one.message.clone(), one.tries));
            told.collect::<Vec<_>>()
        };
        assert_eq!(told(&claimed), told(&put));
    }

    #[tokio::test]
    async fn what_is_put_together_is_claimed_like_what_is_put_alone_sqlite() {
        what_is_put_together_is_claimed_like_what_is_put_alone(testing::databases::sqlite()).await;
    }

    #[tokio::test]
    async fn what_is_put_together_is_claimed_like_what_is_put_alone_postgres() {
        what_is_put_together_is_claimed_like_what_is_put_alone(testing::databases::postgres().await).await;
    }
}
