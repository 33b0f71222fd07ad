//! The life of this database: what handles may be unknown because it came out of a backup.
//!
//! It is minted with the database. A copy that is restored has the life that the original had; its operator says so ([`restored`]),
//! and it begins another. If no operator says so, a worker may prove it ([`crate::inventory::report::begin`]).
//!
//! It is read in the transaction that goes by it, so that all replicas of the store have the same.

pub(crate) mod receipts;

use anyhow::{Context, bail};
use domain::StoreLife;
use sea_orm::sea_query::Expr;
use sea_orm::{
    ActiveValue::Set, ColumnTrait, ConnectionTrait, DatabaseTransaction, DbErr, EntityTrait, QueryFilter,
};

use crate::db::entity::{STORE_ROW, store};
use crate::db::migrations::Schema;

/// Mints the life and the key of receipts of a new database. One that has them keeps them.
pub(crate) async fn mint(txn: &DatabaseTransaction) -> Result<(), DbErr> {
    let fresh =
        store::ActiveModel { id: Set(STORE_ROW), life: Set(StoreLife::new().uuid()), ..Default::default() };
    store::Entity::insert(fresh)
        .on_conflict_do_nothing_on([store::Column::Id])
        .exec_without_returning(txn)
        .await?;
    receipts::mint(txn).await
}

/// The life of this database.
pub(crate) async fn current(conn: &impl ConnectionTrait) -> Result<StoreLife, DbErr> {
    let row = store::Entity::find_by_id(STORE_ROW).one(conn).await?;
    let row = row.ok_or_else(|| DbErr::RecordNotFound("the life of the store".to_owned()))?;
    Ok(StoreLife::from_uuid(row.life))
}

/// Ends the life `old`, and answers the one that follows it. Of all that end one, the first begins the next.
pub(crate) async fn begin_after(txn: &DatabaseTransaction, old: StoreLife) -> Result<StoreLife, DbErr> {
    store::Entity::update_many()
        .col_expr(store::Column::Life, Expr::value(StoreLife::new().uuid()))
        .filter(store::Column::Id.eq(STORE_ROW))
        .filter(store::Column::Life.eq(old.uuid()))
        .exec(txn)
        .await?;
    current(txn).await
}

/// Begins a new life of a database that was restored from a backup, and answers it. A database without a store in it is refused.
pub async fn restored(database: &db::Settings) -> anyhow::Result<StoreLife> {
    // Opening one that is not there would make it.
    if let Some(file) = database.file()
        && !file.exists()
    {
        bail!("there is no {}: put the backup in its place first", database.place());
    }
    let db = db::Database::open::<Schema>(database).await?;
    let life = db
        .write(|txn| async move {
            let Some(row) = store::Entity::find_by_id(STORE_ROW).one(&*txn).await? else { return Ok(None) };
            let life = begin_after(&txn, StoreLife::from_uuid(row.life)).await?;
            Ok::<_, DbErr>(Some(life))
        })
        .await;
    db.close().await;
    life?.with_context(|| format!("there is no artifact store in {}: it was not restored", database.place()))
}
