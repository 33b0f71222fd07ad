//! The tables, as sea-orm sees them. `migrations/` says what each column means.

/// Where a volume or container is in its life.
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
    /// What is marked for a reason of its own, whether its gateway was told or not. Replicas that go with their artifacts are marked beside ([`crate::marks::sweep_queue`]).
    pub(crate) const GARBAGE: [Self; 2] = [Self::Destroying, Self::Sweeping];
    /// What is there, as far as we know.
    pub(crate) const PRESENT: [Self; 2] = [Self::Created, Self::Unconfirmed];

    pub(crate) fn is_garbage(self) -> bool {
        Self::GARBAGE.contains(&self)
    }

    pub(crate) fn is_present(self) -> bool {
        Self::PRESENT.contains(&self)
    }
}

/// What a volume is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, sea_orm::EnumIter, sea_orm::DeriveActiveEnum)]
#[sea_orm(rs_type = "String", db_type = "Text", rename_all = "snake_case")]
pub(crate) enum Purpose {
    Replica,
    Input,
    Output,
    Scratch,
}

/// Whether an artifact's bytes are final.
#[derive(Debug, Clone, Copy, PartialEq, Eq, sea_orm::EnumIter, sea_orm::DeriveActiveEnum)]
#[sea_orm(rs_type = "String", db_type = "Text", rename_all = "snake_case")]
pub(crate) enum ArtifactState {
    Open,
    Sealed,
    Deleting,
}

/// How a build ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, sea_orm::EnumIter, sea_orm::DeriveActiveEnum)]
#[sea_orm(rs_type = "String", db_type = "Text", rename_all = "snake_case")]
pub(crate) enum BuildStatus {
    Succeeded,
    Failed,
    Errored,
    Aborted,
}

/// What kind of thing an orphan is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, sea_orm::EnumIter, sea_orm::DeriveActiveEnum)]
#[sea_orm(rs_type = "String", db_type = "Text", rename_all = "snake_case")]
pub(crate) enum OrphanKind {
    Volume,
    Container,
}

/// What kind of thing is gone.
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

/// What uses a resource cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, sea_orm::EnumIter, sea_orm::DeriveActiveEnum)]
#[sea_orm(rs_type = "String", db_type = "Text", rename_all = "snake_case")]
pub(crate) enum UserKind {
    Build,
    Workload,
}

/// The scope of a resource cache that is answered to every team. No team has this name.
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

/// The id of the one row of the table `store`.
pub(crate) const STORE_ROW: i64 = 1;

entity! {
    /// What this database is.
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
    /// Worker-independent names for bytes.
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
        marked_why: Option<String>,
        kept_until: Option<i64>,
        look_at: Option<i64>,
        in_store: bool,
    }
}

entity! {
    /// Artifacts that are deleted.
    tombstone, "tombstones" {
        #[sea_orm(primary_key, auto_increment = false)]
        artifact_id: Uuid,
        look_at: i64,
    }
}

entity! {
    /// Small trees, from which artifacts were made.
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
    /// Owners that live until they ended, and then as long as their caller asked.
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
        look_at: Option<i64>,
    }
}

entity! {
    /// Which builds own which artifacts.
    owner, "owners" {
        #[sea_orm(primary_key, auto_increment = false)]
        artifact_id: Uuid,
        #[sea_orm(primary_key, auto_increment = false)]
        build_id: Uuid,
    }
}

entity! {
    /// What was fetched for a resource, to be fetched once.
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
        look_at: i64,
    }
}

entity! {
    /// What uses which resource cache.
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
    /// What a step of a job leaves in a path for the next time.
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
        look_at: i64,
    }
}

entity! {
    /// Which workloads find which task caches as directories.
    task_cache_use, "task_cache_uses" {
        #[sea_orm(primary_key, auto_increment = false)]
        cache_id: Uuid,
        #[sea_orm(primary_key, auto_increment = false)]
        holder_id: Uuid,
    }
}

entity! {
    /// Images of the types of resources that come with the system.
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
    /// The certs that workers give to resources.
    resource_certs, "resource_certs" {
        #[sea_orm(primary_key, auto_increment = false)]
        worker_id: Uuid,
        artifact_id: Uuid,
    }
}

entity! {
    /// What workers bring along.
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
        failed_why: Option<String>,
    }
}

entity! {
    /// Workloads, as far as they pin artifacts or have attempts.
    holder, "holders" {
        #[sea_orm(primary_key, auto_increment = false)]
        holder_id: Uuid,
        team: String,
        created_at: i64,
        settled_at: Option<i64>,
        look_at: i64,
    }
}

entity! {
    /// What workloads use.
    pin, "pins" {
        #[sea_orm(primary_key, auto_increment = false)]
        holder_id: Uuid,
        #[sea_orm(primary_key, auto_increment = false)]
        artifact_id: Uuid,
        pinned_at: i64,
    }
}

entity! {
    /// Tries at workloads.
    attempt, "attempts" {
        #[sea_orm(primary_key, auto_increment = false)]
        attempt_id: Uuid,
        holder_id: Uuid,
        worker_id: Option<Uuid>,
        ended_at: Option<i64>,
        look_at: Option<i64>,
    }
}

entity! {
    /// Directories on workers.
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
        marked_why: Option<String>,
        marked_at: Option<i64>,
        marked_from: Option<State>,
        lost_at: Option<i64>,
        loss_noticed: bool,
        adopted_at: Option<i64>,
        given_up: bool,
    }
}

entity! {
    /// What was lost, in the order in which it was noticed.
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
    /// Containers on workers.
    container, "containers" {
        #[sea_orm(primary_key, auto_increment = false)]
        handle: Uuid,
        worker_id: Uuid,
        state: State,
        attempt_id: Uuid,
        holder_id: Uuid,
        created_at: i64,
        judged_after: i64,
        marked_why: Option<String>,
        marked_at: Option<i64>,
        touched_at: Option<i64>,
        lost_at: Option<i64>,
        loss_noticed: bool,
    }
}

entity! {
    /// Orphans: what a store that came out of a backup does not know.
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
    /// Volumes, containers and caches that are gone.
    deletion, "deletion_log" {
        #[sea_orm(primary_key, auto_increment = false)]
        id: Uuid,
        kind: DeletionKind,
        team: Option<String>,
        label: String,
        marked_why: Option<String>,
        marked_at: Option<i64>,
        gone_at: i64,
        look_at: i64,
    }
}
