//! Sea-orm entities of the tables. `migrations/` documents each column.

/// State of a volume or container.
#[derive(Debug, Clone, Copy, PartialEq, Eq, sea_orm::EnumIter, sea_orm::DeriveActiveEnum)]
#[sea_orm(rs_type = "String", db_type = "Text", rename_all = "snake_case")]
pub(crate) enum State {
    Creating,
    Created,
    Unconfirmed,
    Lost,
    Destroying,
    Sweeping,
}

impl State {
    /// Marked for a reason of its own, whether or not it was handed out. A replica that is deleted
    /// with its artifact is marked in the sweep queue instead ([`crate::marks::sweep_queue`]).
    pub(crate) const GARBAGE: [Self; 2] = [Self::Destroying, Self::Sweeping];
    /// Present on the worker, as far as the store knows.
    pub(crate) const PRESENT: [Self; 2] = [Self::Created, Self::Unconfirmed];

    pub(crate) fn is_garbage(self) -> bool {
        Self::GARBAGE.contains(&self)
    }

    pub(crate) fn is_present(self) -> bool {
        Self::PRESENT.contains(&self)
    }
}

/// Purpose of a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, sea_orm::EnumIter, sea_orm::DeriveActiveEnum)]
#[sea_orm(rs_type = "String", db_type = "Text", rename_all = "snake_case")]
pub(crate) enum Purpose {
    Replica,
    Input,
    Output,
    Scratch,
}

/// State of an artifact.
#[derive(Debug, Clone, Copy, PartialEq, Eq, sea_orm::EnumIter, sea_orm::DeriveActiveEnum)]
#[sea_orm(rs_type = "String", db_type = "Text", rename_all = "snake_case")]
pub(crate) enum ArtifactState {
    Open,
    Sealed,
    Deleting,
}

/// Status of an ended build.
#[derive(Debug, Clone, Copy, PartialEq, Eq, sea_orm::EnumIter, sea_orm::DeriveActiveEnum)]
#[sea_orm(rs_type = "String", db_type = "Text", rename_all = "snake_case")]
pub(crate) enum BuildStatus {
    Succeeded,
    Failed,
    Errored,
    Aborted,
}

/// Kind of an orphan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, sea_orm::EnumIter, sea_orm::DeriveActiveEnum)]
#[sea_orm(rs_type = "String", db_type = "Text", rename_all = "snake_case")]
pub(crate) enum OrphanKind {
    Volume,
    Container,
}

/// Kind of an entry in the deletion log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, sea_orm::EnumIter, sea_orm::DeriveActiveEnum)]
#[sea_orm(rs_type = "String", db_type = "Text", rename_all = "snake_case")]
pub(crate) enum DeletionKind {
    Volume,
    Container,
    ResourceCache,
    TaskCache,
}

impl From<OrphanKind> for DeletionKind {
    fn from(kind: OrphanKind) -> Self {
        match kind {
            OrphanKind::Volume => Self::Volume,
            OrphanKind::Container => Self::Container,
        }
    }
}

/// Kind of a user of a resource cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, sea_orm::EnumIter, sea_orm::DeriveActiveEnum)]
#[sea_orm(rs_type = "String", db_type = "Text", rename_all = "snake_case")]
pub(crate) enum UserKind {
    Build,
    Workload,
}

/// Scope of a resource cache that is available to every team. No team has this name.
pub(crate) const ALL_TEAMS: &str = "";

macro_rules! entity {
    ($(#[$doc:meta])* $module:ident, $table:literal {
        $($(#[$key:meta])* $field:ident: $type:ty,)+
    }) => {
        $(#[$doc])*
        pub(crate) mod $module {
            #[allow(unused_imports, reason = "not every table has every kind of column")]
            use super::{ArtifactState, OrphanKind, BuildStatus, DeletionKind, Purpose, State, UserKind};
            use sea_orm::entity::prelude::*;

            #[derive(Debug, Clone, PartialEq, Eq, DeriveEntityModel)]
            #[sea_orm(table_name = $table)]
            pub(crate) struct Model {
                $($(#[$key])* pub(crate) $field: $type,)+
            }

            #[derive(Debug, Clone, Copy, EnumIter, DeriveRelation)]
            pub(crate) enum Relation {}

            impl ActiveModelBehavior for ActiveModel {}
        }
    };
}

/// Id of the only row of the table `store`.
pub(crate) const STORE_ROW: i64 = 1;

entity! {
    /// The identity and counters of this database.
    store, "store" {
        #[sea_orm(primary_key, auto_increment = false)]
        id: i64,
        life: Uuid,
        losses: i64,
        losses_forgotten: i64,
        receipt_key: Option<Vec<u8>>,
    }
}

entity! {
    /// The newest session of each worker.
    worker, "workers" {
        #[sea_orm(primary_key, auto_increment = false)]
        worker_id: Uuid,
        incarnation: i64,
        session: i64,
        sequence: i64,
        reported: i64,
    }
}

entity! {
    /// Artifacts.
    artifact, "artifacts" {
        #[sea_orm(primary_key, auto_increment = false)]
        artifact_id: Uuid,
        ordinal: Uuid,
        team: String,
        label: String,
        state: ArtifactState,
        digest: Option<Vec<u8>>,
        size_bytes: i64,
        had_owner: bool,
        created_at: i64,
        marked_at: Option<i64>,
        mark_reason: Option<String>,
        kept_until: Option<i64>,
        due_at: Option<i64>,
        in_store: bool,
    }
}

entity! {
    /// Deleted artifacts that can still be restored.
    tombstone, "tombstones" {
        #[sea_orm(primary_key, auto_increment = false)]
        artifact_id: Uuid,
        due_at: i64,
    }
}

entity! {
    /// Bytes of small trees.
    tree, "trees" {
        #[sea_orm(primary_key, auto_increment = false)]
        artifact_id: Uuid,
        tree: Vec<u8>,
    }
}

entity! {
    /// Jobs, as far as builds were reported for them.
    job, "jobs" {
        #[sea_orm(primary_key, auto_increment = false)]
        team: String,
        #[sea_orm(primary_key, auto_increment = false)]
        job: String,
        latest_number: i64,
        latest_build: Uuid,
    }
}

entity! {
    /// Builds.
    build, "builds" {
        #[sea_orm(primary_key, auto_increment = false)]
        build_id: Uuid,
        team: String,
        job: Option<String>,
        number: Option<i64>,
        ends_with: Option<Uuid>,
        keep: i64,
        term: Option<i64>,
        term_ends_at: Option<i64>,
        bound: bool,
        status: Option<BuildStatus>,
        ended_at: Option<i64>,
        kept_until: Option<i64>,
        created_at: i64,
        due_at: Option<i64>,
    }
}

entity! {
    /// Artifacts owned by builds.
    owner, "owners" {
        #[sea_orm(primary_key, auto_increment = false)]
        artifact_id: Uuid,
        #[sea_orm(primary_key, auto_increment = false)]
        build_id: Uuid,
    }
}

entity! {
    /// Resource caches.
    resource_cache, "resource_caches" {
        #[sea_orm(primary_key, auto_increment = false)]
        cache_id: Uuid,
        scope: String,
        key_digest: Vec<u8>,
        resource_type: String,
        version: String,
        params: String,
        team: String,
        claim_id: Uuid,
        claimed_until: Option<i64>,
        artifact_id: Option<Uuid>,
        last_used: i64,
        created_at: i64,
        due_at: i64,
    }
}

entity! {
    /// Uses of resource caches by builds and workloads.
    cache_use, "cache_uses" {
        #[sea_orm(primary_key, auto_increment = false)]
        cache_id: Uuid,
        #[sea_orm(primary_key, auto_increment = false)]
        user_kind: UserKind,
        #[sea_orm(primary_key, auto_increment = false)]
        user_id: Uuid,
    }
}

entity! {
    /// Task caches.
    task_cache, "task_caches" {
        #[sea_orm(primary_key, auto_increment = false)]
        cache_id: Uuid,
        team: String,
        job: String,
        step: String,
        path: String,
        artifact_id: Option<Uuid>,
        ttl: i64,
        last_used: i64,
        created_at: i64,
        due_at: i64,
    }
}

entity! {
    /// Task caches that workloads mount as directories.
    task_cache_use, "task_cache_uses" {
        #[sea_orm(primary_key, auto_increment = false)]
        cache_id: Uuid,
        #[sea_orm(primary_key, auto_increment = false)]
        holder_id: Uuid,
    }
}

entity! {
    /// Base resource types.
    base_resource_type, "base_resource_types" {
        #[sea_orm(primary_key, auto_increment = false)]
        base_type_id: Uuid,
        resource_type: String,
        version: String,
        worker_id: Option<Uuid>,
        artifact_id: Uuid,
    }
}

entity! {
    /// Resource certificates of workers.
    resource_certs, "resource_certs" {
        #[sea_orm(primary_key, auto_increment = false)]
        worker_id: Uuid,
        artifact_id: Uuid,
    }
}

entity! {
    /// Images and certificates that workers provide.
    import, "imports" {
        #[sea_orm(primary_key, auto_increment = false)]
        worker_id: Uuid,
        #[sea_orm(primary_key, auto_increment = false)]
        resource_type: String,
        import_id: Uuid,
        version: String,
        path: String,
        artifact_id: Uuid,
        volume: Uuid,
        failed_at: Option<i64>,
        failure_reason: Option<String>,
    }
}

entity! {
    /// Workloads that pin artifacts or have attempts.
    holder, "holders" {
        #[sea_orm(primary_key, auto_increment = false)]
        holder_id: Uuid,
        team: String,
        created_at: i64,
        settled_at: Option<i64>,
        settlement: Option<Vec<u8>>,
        due_at: i64,
    }
}

entity! {
    /// Pins of workloads on artifacts.
    pin, "pins" {
        #[sea_orm(primary_key, auto_increment = false)]
        holder_id: Uuid,
        #[sea_orm(primary_key, auto_increment = false)]
        artifact_id: Uuid,
        pinned_at: i64,
    }
}

entity! {
    /// Attempts.
    attempt, "attempts" {
        #[sea_orm(primary_key, auto_increment = false)]
        attempt_id: Uuid,
        holder_id: Uuid,
        worker_id: Option<Uuid>,
        ended_at: Option<i64>,
        due_at: Option<i64>,
    }
}

entity! {
    /// Volumes.
    volume, "volumes" {
        #[sea_orm(primary_key, auto_increment = false)]
        handle: Uuid,
        worker_id: Uuid,
        state: State,
        purpose: Purpose,
        name: Option<String>,
        artifact_id: Option<Uuid>,
        from_artifact_id: Option<Uuid>,
        parent: Option<Uuid>,
        attempt_id: Option<Uuid>,
        transfer_id: Option<Uuid>,
        claimed_until: Option<i64>,
        is_copy: bool,
        complete: bool,
        digest: Option<Vec<u8>>,
        size_bytes: i64,
        verified: bool,
        created_at: i64,
        judged_after: i64,
        mark_reason: Option<String>,
        marked_at: Option<i64>,
        marked_from: Option<State>,
        lost_at: Option<i64>,
        loss_noticed: bool,
        adopted_at: Option<i64>,
        given_up: bool,
        loss_reason: Option<String>,
        exclusive_bytes: Option<i64>,
        disk_bytes: Option<i64>,
    }
}

entity! {
    /// Losses of volumes and containers, in the order in which they were noticed.
    loss, "losses" {
        #[sea_orm(primary_key, auto_increment = false)]
        revision: i64,
        worker_id: Uuid,
        volume: Option<Uuid>,
        container: Option<Uuid>,
        artifact_id: Option<Uuid>,
        attempt_id: Option<Uuid>,
        lost_at: i64,
        noticed_at: i64,
    }
}

entity! {
    /// Containers.
    container, "containers" {
        #[sea_orm(primary_key, auto_increment = false)]
        handle: Uuid,
        worker_id: Uuid,
        state: State,
        attempt_id: Uuid,
        holder_id: Uuid,
        created_at: i64,
        judged_after: i64,
        mark_reason: Option<String>,
        marked_at: Option<i64>,
        touched_at: Option<i64>,
        lost_at: Option<i64>,
        loss_noticed: bool,
    }
}

entity! {
    /// Orphans.
    orphan, "orphans" {
        #[sea_orm(primary_key, auto_increment = false)]
        handle: Uuid,
        kind: OrphanKind,
        worker_id: Uuid,
        first_seen_at: i64,
        judged_after: i64,
        described: bool,
        parent: Option<Uuid>,
        team: Option<String>,
        artifact_id: Option<Uuid>,
        digest: Option<Vec<u8>>,
        size_bytes: i64,
    }
}

entity! {
    /// Volumes, containers and caches that were deleted.
    deletion, "deletion_log" {
        #[sea_orm(primary_key, auto_increment = false)]
        id: Uuid,
        kind: DeletionKind,
        team: Option<String>,
        label: String,
        mark_reason: Option<String>,
        marked_at: Option<i64>,
        gone_at: i64,
        due_at: i64,
    }
}
