//! Receipts: proofs that the artifact store has judged a report.
//!
//! A gateway receives a receipt with each answer to a report, and presents it when it begins the
//! next one ([`crate::inventory::report::begin`]). A receipt for a report that is not recorded
//! proves that the database was restored from a backup.
//!
//! Invariant: only the store makes receipts. A receipt is a keyed BLAKE3 hash of the report's
//! worker, store life and sequence number. The key is created with the database and leaves it only
//! in backups.

use domain::worker::Receipt;
use domain::{StoreLife, WorkerId};
use sea_orm::sea_query::Expr;
use sea_orm::{ColumnTrait, ConnectionTrait, DatabaseTransaction, DbErr, EntityTrait, QueryFilter};

use crate::db::entity::{STORE_ROW, store};

/// Identity of a report: the sequence number and store life at its beginning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Token {
    pub(crate) sequence: i64,
    pub(crate) life: StoreLife,
}

/// Creates the key, unless it exists.
pub(crate) async fn mint(txn: &DatabaseTransaction) -> Result<(), DbErr> {
    store::Entity::update_many()
        .col_expr(store::Column::ReceiptKey, Expr::value(rand::random::<[u8; 32]>().to_vec()))
        .filter(store::Column::Id.eq(STORE_ROW))
        .filter(store::Column::ReceiptKey.is_null())
        .exec(txn)
        .await
        .map(|_| ())
}

/// Returns the receipt for the report with this token.
pub(crate) async fn issue(
    conn: &impl ConnectionTrait,
    worker: WorkerId,
    token: Token,
) -> Result<Receipt, DbErr> {
    Ok(Receipt(*compute(conn, worker, token).await?.as_bytes()))
}

/// Returns whether `receipt` proves that this store has judged the report with this token.
pub(crate) async fn is_genuine(
    conn: &impl ConnectionTrait,
    worker: WorkerId,
    token: Token,
    receipt: Receipt,
) -> Result<bool, DbErr> {
    // The comparison takes constant time.
    Ok(compute(conn, worker, token).await? == blake3::Hash::from_bytes(receipt.0))
}

async fn compute(conn: &impl ConnectionTrait, worker: WorkerId, token: Token) -> Result<blake3::Hash, DbErr> {
    let row = store::Entity::find_by_id(STORE_ROW).one(conn).await?;
    let key = row.and_then(|row| row.receipt_key).and_then(|key| <[u8; 32]>::try_from(key).ok());
    let key = key.ok_or_else(|| DbErr::RecordNotFound("receipt key".to_owned()))?;
    let mut text = [0; 40];
    text[..16].copy_from_slice(worker.uuid().as_bytes());
    text[16..32].copy_from_slice(token.life.uuid().as_bytes());
    text[32..].copy_from_slice(&token.sequence.to_be_bytes());
    Ok(blake3::keyed_hash(&key, &text))
}
