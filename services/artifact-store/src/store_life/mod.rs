//! The store life: the identity of one database, which a restored backup replaces.
//!
//! A new database gets a life. A restored copy has the life of its original until its operator
//! calls [`restored`]. If the operator does not, a worker's receipt may prove the restore
//! ([`crate::inventory::report::begin`]).
//!
//! A handle of another life may be unknown to this database without being garbage.
//!
//! Each transaction that depends on the life reads it, so that all replicas of the store use the
//! same.

pub(crate) mod receipts;

use anyhow::{Context, bail};
use domain::StoreLife;
use sea_orm::sea_query::Expr;
use sea_orm::{
    ActiveValue::Set, ColumnTrait, ConnectionTrait, DatabaseTransaction, DbErr, EntityTrait, QueryFilter,
};

use crate::db::entity::{STORE_ROW, store};
use crate::db::migrations::Schema;

/// Sets the life and the receipt key of a new database. An existing database keeps its own.
pub(crate) async fn mint(txn: &DatabaseTransaction) -> Result<(), DbErr> {
    let fresh =
        store::ActiveModel { id: Set(STORE_ROW), life: Set(StoreLife::new().uuid()), ..Default::default() };
    store::Entity::insert(fresh)
        .on_conflict_do_nothing_on([store::Column::Id])
        .exec_without_returning(txn)
        .await?;
    receipts::mint(txn).await
}

/// Returns the life of this database.
pub(crate) async fn current(conn: &impl ConnectionTrait) -> Result<StoreLife, DbErr> {
    let row = store::Entity::find_by_id(STORE_ROW).one(conn).await?;
    let row = row.ok_or_else(|| DbErr::RecordNotFound("store life".to_owned()))?;
    Ok(StoreLife::from_uuid(row.life))
}

/// Ends the life `old`, and returns the life that follows it. If several transactions end the same
/// life, the first one begins the next.
pub(crate) async fn begin_after(txn: &DatabaseTransaction, old: StoreLife) -> Result<StoreLife, DbErr> {
    store::Entity::update_many()
        .col_expr(store::Column::Life, Expr::value(StoreLife::new().uuid()))
        .filter(store::Column::Id.eq(STORE_ROW))
        .filter(store::Column::Life.eq(old.uuid()))
        .exec(txn)
        .await?;
    current(txn).await
}

/// Begins a new life of a database that was restored from a backup, and returns it. A database
/// without an artifact store is rejected.
pub async fn restored(database: &db::Settings) -> anyhow::Result<StoreLife> {
    // Opening a missing file would create it.
    if let Some(file) = database.file()
        && !file.exists()
    {
        bail!("cannot begin a new store life: {} does not exist. Restore the backup first", database.place());
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
    life?.with_context(|| {
        format!("cannot begin a new store life: {} contains no artifact store", database.place())
    })
}
