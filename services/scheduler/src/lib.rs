//! The scheduler: who may run what, where, and until when.
//!
//! It owns the workers (who they are, who speaks for them), the leases on their slots, and the workloads and their queue. It touches no
//! container, volume or byte, and does not know what an owner of an artifact is. Gateways dial it ([`grpc`]'s Synchronize) and hear
//! what their replica knows ([`attended`]); the artifact store is told how workloads end through an outbox ([`outbox`]).
//!
//! Layers, one direction: [`grpc`] → [`service`] (one transaction for each thing asked) → domain functions over a transaction
//! ([`workloads`], [`workers`], [`leases`], [`dispatch`]) → [`entity`]. What is decided is decided by pure functions
//! ([`placement`], [`outcome`]).
//!
//! Locks are taken in one order: a workload's row, then its lease's and its worker's. Hello locks workers alone, and then their
//! contacts; what it makes of leases is done afterwards.

mod api;
mod app;
mod commit;
mod config;
mod db;
mod insight;
mod leases;
mod lifecycle;
mod notify;
mod outbox;
mod placement;
mod queue;
mod scheduling;
mod store_client;
#[cfg(test)]
#[path = "../testing/mod.rs"]
mod testing;
mod workers;
mod workloads;

use std::future::Future;
use std::sync::Arc;

use ::db::{Database, Migrations, SqlMigration};
use anyhow::Context;
use domain::Timestamp;
use rpc::client::{Outgoing, peer};
use rpc::pb::scheduler::placements_server::PlacementsServer;
use rpc::pb::scheduler::workers_server::WorkersServer;
use rpc::pb::scheduler::workloads_server::WorkloadsServer;
use rpc::token::TokenSigner;
use sea_orm::{DbErr, EntityTrait, Set};
use server::{Host, Listener};
use tokio::sync::Semaphore;

pub use config::Config;
pub use placement::{Chain, Chains, ParseChainError, Strategy};
pub use workers::cache::Limits;

use crate::app::Scheduler;
use crate::db::entity::signing_key;
use crate::scheduling::Dispatcher;

/// The longest message that is taken: a spec with large arguments and environment.
const MESSAGE_LIMIT: usize = 16 << 20;

struct Schema;

impl Migrations for Schema {
    const ALL: &'static [SqlMigration] = &[
        SqlMigration { name: "0001_scheduler", sql: include_str!("db/migrations/0001_scheduler.sql") },
        SqlMigration { name: "0002_registry", sql: include_str!("db/migrations/0002_registry.sql") },
        SqlMigration { name: "0003_grants", sql: include_str!("db/migrations/0003_grants.sql") },
        SqlMigration { name: "0004_places", sql: include_str!("db/migrations/0004_places.sql") },
        SqlMigration { name: "0005_retries", sql: include_str!("db/migrations/0005_retries.sql") },
        SqlMigration { name: "0006_room", sql: include_str!("db/migrations/0006_room.sql") },
        SqlMigration { name: "0007_kept_free", sql: include_str!("db/migrations/0007_kept_free.sql") },
        SqlMigration { name: "0008_chosen_by", sql: include_str!("db/migrations/0008_chosen_by.sql") },
        SqlMigration {
            name: "0009_lost_for_good",
            sql: include_str!("db/migrations/0009_lost_for_good.sql"),
        },
        SqlMigration {
            name: "0010_waiting_calls",
            sql: include_str!("db/migrations/0010_waiting_calls.sql"),
        },
        SqlMigration { name: "0011_ended_tasks", sql: include_str!("db/migrations/0011_ended_tasks.sql") },
        SqlMigration { name: "0012_outcomes", sql: include_str!("db/migrations/0012_outcomes.sql") },
        SqlMigration { name: "0013_failed_team", sql: include_str!("db/migrations/0013_failed_team.sql") },
        SqlMigration { name: "0014_abridged", sql: include_str!("db/migrations/0014_abridged.sql") },
    ];

    const BY_INDEX: bool = true;
}

/// How many connections the dispatcher has to itself: as many as it has transactions under way.
const GRANTING: u32 = 2;

/// Where there are fewer connections in all, it shares them.
const SHARED_BELOW: u32 = 6;

/// Brings a database to the schema of this version.
pub async fn migrate(database: &::db::Settings) -> Result<(), ::db::ConnectError> {
    Database::open::<Schema>(database).await.map(drop)
}

/// Adds the scheduler to `host`: opens its database, starts its loops, and adds its services.
pub async fn start(config: Config, host: &mut Host) -> anyhow::Result<()> {
    add(config, host).await.map(drop)
}

/// The same. Answers what all of it shares.
async fn add(config: Config, host: &mut Host) -> anyhow::Result<Scheduler> {
    config.check()?;
    let outgoing = Outgoing::internal().with_token(config.token.as_deref());
    let store = store_client::Store::new(peer(&config.artifact_store, outgoing)?);
    let own = if config.database.connections < SHARED_BELOW { 0 } else { GRANTING };
    let shared = ::db::Settings { connections: config.database.connections - own, ..config.database.clone() };
    let db = Database::open::<Schema>(&shared).await.context("cannot open the scheduler's database")?;
    let signer = signing_key(&db, Timestamp::now()).await.context("cannot read the signing key")?;
    let alone = db.is_sqlite();
    let taken_up = async {
        lifecycle::timeouts::be_patient(&db, &config, alone).await?;
        if alone {
            db.write(async |txn| outbox::release_claims(&txn, Timestamp::now()).await).await?;
        }
        Ok::<_, DbErr>(())
    };
    taken_up.await.context("cannot take up what the last start left")?;

    // Nobody is there to be told.
    let config = Arc::new(Config { share_hints: config.share_hints && !alone, ..config });
    let granting = db.apart(own).await.context("cannot open the scheduler's database once more")?;
    if !alone {
        host.at_last(granting.clone().close());
    }
    let (dispatch, dispatcher) = Dispatcher::new(granting, config.clone());
    let (contacts, said) = lifecycle::heartbeats::channel();
    let (hellos, asked) = lifecycle::registration::channel();
    let scheduler = Scheduler {
        delivered: outbox::delivered(db.clone(), host.tasks()),
        db,
        admissions: queue::limits::Admissions::new(config.most_waiting, config.most_waiting_bytes),
        config,
        signer,
        store,
        deliveries: Arc::new(Semaphore::new(outbox::DELIVERIES)),
        hints: notify::local::Hints::default(),
        attended: dispatch.workers.attended.clone(),
        contacts,
        hellos,
        dispatch,
        gossip: notify::cluster::Gossip::new(),
        drift: leases::drift::Drift::default(),
        orphans_ended: Arc::default(),
        tasks: host.tasks(),
        stopping: host.stopping(),
    };
    host.spawn(scheduling::dispatch_forever(dispatcher, scheduler.clone()));
    host.spawn(workers::desired_state::look_forever(scheduler.clone()));
    host.spawn(workloads::watch_poll::look_forever(scheduler.clone()));
    host.spawn(lifecycle::heartbeats::note_forever(scheduler.clone(), said));
    host.spawn(lifecycle::registration::let_in_forever(scheduler.clone(), asked));
    if scheduler.config.share_hints {
        host.spawn(notify::cluster::tell_forever(scheduler.clone()));
        host.spawn(notify::cluster::hear_forever(scheduler.clone()));
    }
    host.spawn(lifecycle::timeouts::expire_forever(scheduler.clone()));
    host.spawn(outbox::redeliver_forever(scheduler.clone()));
    host.spawn(store_client::reconcile::reconcile_forever(scheduler.clone()));
    host.spawn(lifecycle::departure::see_off_forever(scheduler.clone()));
    host.add_service(
        WorkloadsServer::new(api::WorkloadsService(scheduler.clone()))
            .max_decoding_message_size(MESSAGE_LIMIT),
    );
    host.add_service(
        WorkersServer::new(api::WorkersService(Arc::new(scheduler.clone())))
            .max_decoding_message_size(MESSAGE_LIMIT),
    );
    host.add_service(PlacementsServer::new(api::PlacementsService(scheduler.clone())));
    host.describe(server::Service {
        name: "scheduler",
        version: env!("CARGO_PKG_VERSION"),
        features: Vec::new(),
        limits: vec![("message_bytes", MESSAGE_LIMIT as u64)],
    });
    host.at_last(scheduler.db.clone().close());
    let db = scheduler.db.clone();
    host.add_check("database", move || {
        let db = db.clone();
        async move { db.answers().await }
    });
    workers::desired_state::describe();
    insight::metrics::add(scheduler.clone(), host);
    Ok(scheduler)
}

/// Serves the scheduler alone on `listener` until `shutdown` resolves, then lets work in flight finish.
pub async fn serve(
    config: Config,
    listener: Listener,
    shutdown: impl Future<Output = ()> + Send,
) -> anyhow::Result<()> {
    let mut host = Host::new().with_token(config.token.clone());
    start(config, &mut host).await?;
    host.serve([listener], shutdown).await
}

/// What signs, made at the first start.
async fn signing_key(db: &Database, now: Timestamp) -> anyhow::Result<TokenSigner> {
    let mut fresh = [0; 32];
    getrandom::fill(&mut fresh).map_err(|error| anyhow::anyhow!("no randomness: {error}"))?;
    let row = db
        .write(async |txn| {
            let row =
                signing_key::ActiveModel { id: Set(1), seed: Set(fresh.to_vec()), created_at: Set(now.0) };
            // Of several replicas that start at once, one makes it.
            signing_key::Entity::insert(row)
                .on_conflict_do_nothing_on([signing_key::Column::Id])
                .exec_without_returning(&*txn)
                .await?;
            signing_key::Entity::find_by_id(1)
                .one(&*txn)
                .await?
                .ok_or_else(|| DbErr::RecordNotFound("the signing key".to_owned()))
        })
        .await?;
    let seed = row.seed.as_slice().try_into().context("the signing key is malformed")?;
    Ok(TokenSigner::from_seed(seed))
}
