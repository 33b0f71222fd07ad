//! Base resource types, and certificates of workers. A new version replaces the previous one.

use domain::{ArtifactId, Timestamp, WorkerId};
use sea_orm::sea_query::Expr;
use sea_orm::{
    ActiveModelTrait, ActiveValue::Set, ColumnTrait, ConnectionTrait, DatabaseTransaction, DbErr,
    EntityTrait, IntoActiveModel, QueryFilter, QueryOrder, QuerySelect, QueryTrait,
};
use uuid::Uuid;

use crate::caches::{HandOverError, hand_over};
use crate::db::entity::{base_resource_type, resource_certs};

/// Properties of a base resource type to put.
#[derive(Debug, Clone)]
pub(crate) struct BaseType {
    pub(crate) team: String,
    pub(crate) resource_type: String,
    pub(crate) version: String,
    /// Worker that has the image. `None`: cluster-wide.
    pub(crate) worker: Option<WorkerId>,
    pub(crate) artifact: ArtifactId,
}

/// Makes an artifact a base resource type, and replaces the previous version.
pub(crate) async fn put_type(
    txn: &DatabaseTransaction,
    new: &BaseType,
    now: Timestamp,
) -> Result<(), HandOverError> {
    let of_worker = || match new.worker {
        Some(worker) => base_resource_type::Column::WorkerId.eq(worker.uuid()),
        None => base_resource_type::Column::WorkerId.is_null(),
    };
    let row = base_resource_type::Entity::find()
        .filter(base_resource_type::Column::ResourceType.eq(&*new.resource_type))
        .filter(of_worker())
        .lock_exclusive()
        .one(txn)
        .await?;
    hand_over(txn, &new.team, new.artifact, row.as_ref().map(|row| row.artifact_id), now).await?;
    match row {
        Some(row) => {
            base_resource_type::Entity::update_many()
                .col_expr(base_resource_type::Column::Version, Expr::value(&*new.version))
                .col_expr(base_resource_type::Column::ArtifactId, Expr::value(new.artifact.uuid()))
                .filter(base_resource_type::Column::BaseTypeId.eq(row.base_type_id))
                .exec(txn)
                .await?;
        }
        None => {
            let row = base_resource_type::Model {
                base_type_id: Uuid::now_v7(),
                resource_type: new.resource_type.clone(),
                version: new.version.clone(),
                worker_id: new.worker.map(WorkerId::uuid),
                artifact_id: new.artifact.uuid(),
            };
            // If two transactions insert at once, the unique index rejects one, which the caller
            // repeats.
            base_resource_type::Entity::insert(row.into_active_model().reset_all())
                .exec_without_returning(txn)
                .await?;
        }
    }
    Ok(())
}

/// Makes an artifact the certificates of a worker, and replaces the previous ones.
pub(crate) async fn put_certs(
    txn: &DatabaseTransaction,
    team: &str,
    worker: WorkerId,
    artifact: ArtifactId,
    now: Timestamp,
) -> Result<(), HandOverError> {
    let row = resource_certs::Entity::find_by_id(worker.uuid()).lock_exclusive().one(txn).await?;
    hand_over(txn, team, artifact, row.as_ref().map(|row| row.artifact_id), now).await?;
    if row.is_some() {
        resource_certs::Entity::update_many()
            .col_expr(resource_certs::Column::ArtifactId, Expr::value(artifact.uuid()))
            .filter(resource_certs::Column::WorkerId.eq(worker.uuid()))
            .exec(txn)
            .await?;
    } else {
        let row =
            resource_certs::ActiveModel { worker_id: Set(worker.uuid()), artifact_id: Set(artifact.uuid()) };
        resource_certs::Entity::insert(row).exec_without_returning(txn).await?;
    }
    Ok(())
}

/// Filter of base resource types.
#[derive(Debug, Clone, Default)]
pub(crate) struct TypeFilter {
    /// Name of the type. `None`: all types.
    pub(crate) resource_type: Option<String>,
    /// Whether only cluster-wide types match.
    pub(crate) cluster_wide: bool,
}

/// Returns a page of the base resource types that match `which`, oldest first.
pub(crate) async fn list_types(
    conn: &impl ConnectionTrait,
    which: TypeFilter,
    page: rpc::page::Page,
) -> Result<Vec<base_resource_type::Model>, DbErr> {
    let TypeFilter { resource_type, cluster_wide } = which;
    base_resource_type::Entity::find()
        .filter(base_resource_type::Column::BaseTypeId.gt(page.after.unwrap_or_default()))
        .apply_if(resource_type, |query, name| {
            query.filter(base_resource_type::Column::ResourceType.eq(name))
        })
        .apply_if(cluster_wide.then_some(()), |query, ()| {
            query.filter(base_resource_type::Column::WorkerId.is_null())
        })
        .order_by_asc(base_resource_type::Column::BaseTypeId)
        .limit(page.size)
        .all(conn)
        .await
}

/// Returns a page of the certificates of workers, by worker.
pub(crate) async fn list_certs(
    conn: &impl ConnectionTrait,
    page: rpc::page::Page,
) -> Result<Vec<resource_certs::Model>, DbErr> {
    resource_certs::Entity::find()
        .filter(resource_certs::Column::WorkerId.gt(page.after.unwrap_or_default()))
        .order_by_asc(resource_certs::Column::WorkerId)
        .limit(page.size)
        .all(conn)
        .await
}
