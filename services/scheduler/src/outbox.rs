//! The outbox: calls that the scheduler still has to make to the artifact store.
//!
//! A transaction writes a parcel together with the change that causes it. The parcel is removed
//! after the store acknowledges it, and the store treats repeats as one. The replica that wrote a
//! parcel delivers it immediately. After a failure or a crash, any replica may claim it
//! ([`crate::store_client::delivery`]).

use std::time::Duration;

use db::rows::{self, Column};
use domain::workload::{Outcome, OutputOwner, PublishedCache, PublishedOutput};
use domain::{ArtifactId, AttemptId, BuildId, Timestamp, WorkloadId};
use sea_orm::sea_query::{Expr, LockBehavior, LockType};
use sea_orm::{
    ActiveModelTrait, ColumnTrait, ConnectionTrait, DatabaseTransaction, DbErr, EntityTrait, ExprTrait,
    QueryFilter, QueryOrder, QuerySelect, QueryTrait, Set, Statement,
};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::db::entity::{from_json, outbox, to_json};

/// Time for which a parcel belongs to the replica that wrote or claimed it.
const CLAIM: Duration = Duration::from_secs(15);

/// Maximum number of parcels that a loop claims at a time.
pub(crate) const BATCH: u64 = 32;

/// A call to the artifact store about one holder.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Message {
    /// The holder has ended permanently.
    Settle(Settlement),
    /// One attempt at the workload has ended.
    EndAttempt { attempt: AttemptId },
}

/// End of a workload, as far as its artifacts are concerned.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Settlement {
    pub(crate) team: String,
    pub(crate) attempt: Option<AttemptId>,
    pub(crate) outputs: Vec<PublishedOutput>,
    pub(crate) build: Option<BuildId>,
    pub(crate) outcome: Outcome,
    /// Owners of single outputs.
    #[serde(default)]
    pub(crate) owners: Vec<(ArtifactId, OutputOwner)>,
    /// New versions of task caches, owned only by their caches.
    #[serde(default)]
    pub(crate) caches: Vec<PublishedCache>,
}

impl Settlement {
    /// Settles a holder without keeping anything. For a driven lease, or a holder that the
    /// scheduler does not know.
    pub(crate) fn nothing(team: String) -> Self {
        let outcome = Outcome::Errored;
        Self { team, attempt: None, outputs: vec![], build: None, outcome, owners: vec![], caches: vec![] }
    }
}

/// One message that the store has not acknowledged.
#[derive(Debug, Clone)]
pub(crate) struct Parcel {
    pub(crate) id: Uuid,
    /// A workload, or a driven lease.
    pub(crate) holder: Uuid,
    pub(crate) message: Message,
    pub(crate) tries: i64,
}

impl Parcel {
    /// Returns the holder as the id of a workload.
    pub(crate) fn workload(&self) -> WorkloadId {
        WorkloadId::from_uuid(self.holder)
    }
}

/// Writes `message` to the outbox. The caller delivers the parcel after its commit.
pub(crate) async fn put(
    txn: &DatabaseTransaction,
    holder: Uuid,
    message: Message,
    now: Timestamp,
) -> Result<Parcel, DbErr> {
    let id = Uuid::now_v7();
    let row = outbox::ActiveModel {
        id: Set(id),
        holder_id: Set(holder),
        message: Set(to_json(&message)?),
        tries: Set(0),
        due_at: Set((now + CLAIM).0),
    };
    row.insert(txn).await?;
    Ok(Parcel { id, holder, message, tries: 0 })
}

#[derive(Serialize)]
struct NewParcel {
    id: Uuid,
    holder_id: Uuid,
    message: String,
}

const NEW_PARCEL: [(&str, Column); 3] =
    [("id", Column::Uuid), ("holder_id", Column::Uuid), ("message", Column::Text)];

/// Writes several messages to the outbox, each with its holder.
pub(crate) async fn put_all(
    txn: &DatabaseTransaction,
    messages: impl IntoIterator<Item = (Uuid, Message)>,
    now: Timestamp,
) -> Result<Vec<Parcel>, DbErr> {
    let parcel = |(holder, message)| Parcel { id: Uuid::now_v7(), holder, message, tries: 0 };
    let parcels: Vec<_> = messages.into_iter().map(parcel).collect();
    if parcels.is_empty() {
        return Ok(parcels);
    }
    let fresh = parcels.iter().map(|Parcel { id, holder, message, .. }| {
        Ok(NewParcel { id: *id, holder_id: *holder, message: to_json(message)? })
    });
    let fresh = fresh.collect::<Result<Vec<_>, DbErr>>()?;
    let backend = txn.get_database_backend();
    let query = format!(
        "INSERT INTO outbox (id, holder_id, message, tries, due_at) SELECT id, holder_id, message, 0, $2 FROM ({}) AS given",
        rows::query(backend, 1, &NEW_PARCEL)
    );
    let values = [rows::value(&fresh)?, (now + CLAIM).0.into()];
    txn.execute_raw(Statement::from_sql_and_values(backend, query, values)).await?;
    Ok(parcels)
}

/// Claims parcels that are due.
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
                holder: row.holder_id,
                message: from_json(&row.message)?,
                tries: row.tries,
            })
        })
        .collect()
}

/// Replaces the message of a parcel.
pub(crate) async fn replace(txn: &DatabaseTransaction, parcel: Uuid, message: &Message) -> Result<(), DbErr> {
    let message = to_json(message)?;
    outbox::Entity::update_many()
        .col_expr(outbox::Column::Message, Expr::value(message))
        .filter(outbox::Column::Id.eq(parcel))
        .exec(txn)
        .await
        .map(|_| ())
}

/// Schedules the next attempt to deliver a parcel. The delay doubles with each try.
pub(crate) async fn postpone(
    txn: &DatabaseTransaction,
    parcel: &Parcel,
    now: Timestamp,
) -> Result<(), DbErr> {
    let pause = Duration::from_millis(100 << parcel.tries.clamp(0, 8));
    outbox::Entity::update_many()
        .col_expr(outbox::Column::DueAt, Expr::value((now + pause).0))
        .col_expr(outbox::Column::Tries, Expr::col(outbox::Column::Tries).add(1))
        .filter(outbox::Column::Id.eq(parcel.id))
        .exec(txn)
        .await
        .map(|_| ())
}

/// Returns whether a message about `holder` is not acknowledged yet.
pub(crate) async fn pending(txn: &impl ConnectionTrait, holder: Uuid) -> Result<bool, DbErr> {
    let row = outbox::Entity::find().filter(outbox::Column::HolderId.eq(holder)).one(txn).await?;
    Ok(row.is_some())
}

/// Makes all parcels due. A process that has ended had claimed them.
pub(crate) async fn release_claims(txn: &DatabaseTransaction, now: Timestamp) -> Result<(), DbErr> {
    outbox::Entity::update_many()
        .col_expr(outbox::Column::DueAt, Expr::value(now.0))
        .exec(txn)
        .await
        .map(|_| ())
}

#[cfg(test)]
mod tests {
    use db::Database;
    use testing::databases::TestDatabase;

    use super::*;

    async fn parcels_are_claimed_alike_written_together_or_alone(database: TestDatabase) {
        let db = Database::connect::<crate::Schema>(&database.url).await.expect("a database");
        let now = Timestamp::now();
        let message = |team: &str| Message::Settle(Settlement::nothing(team.to_owned()));
        let holders = [Uuid::now_v7(), Uuid::now_v7(), Uuid::now_v7()];
        let put = db.write(async |txn| {
            assert!(put_all(&txn, [], now).await?.is_empty());
            let together = [(holders[0], message("one's \"team\"")), (holders[1], message("other"))];
            let mut parcels = put_all(&txn, together, now).await?;
            parcels.push(put(&txn, holders[2], message("alone"), now).await?);
            Ok::<_, DbErr>(parcels)
        });
        let put = put.await.expect("put");
        assert_eq!(put.iter().map(|parcel| parcel.holder).collect::<Vec<_>>(), holders);

        let early = db.write(async |txn| claim(&txn, now).await).await.expect("read");
        assert!(early.is_empty(), "the claim of the writer has not run out: {early:?}");
        let mut claimed = db.write(async |txn| claim(&txn, now + CLAIM).await).await.expect("claimed");
        claimed.sort_by_key(|parcel| parcel.id);
        let contents = |parcels: &[Parcel]| {
            let contents = parcels.iter().map(|one| (one.id, one.holder, one.message.clone(), one.tries));
            contents.collect::<Vec<_>>()
        };
        assert_eq!(contents(&claimed), contents(&put));
    }

    #[tokio::test]
    async fn parcels_are_claimed_alike_written_together_or_alone_sqlite() {
        parcels_are_claimed_alike_written_together_or_alone(testing::databases::sqlite()).await;
    }

    #[tokio::test]
    async fn parcels_are_claimed_alike_written_together_or_alone_postgres() {
        parcels_are_claimed_alike_written_together_or_alone(testing::databases::postgres().await).await;
    }
}
