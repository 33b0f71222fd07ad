//! The scheduler: the registry of workers, placement, leases on their slots, and the queue of
//! workloads.
//!
//! It touches no container, volume or byte, and does not know what an owner of an artifact is.
//! Gateways dial it ([`api`]'s Synchronize) and are told what their workers shall do. The artifact
//! store is told how workloads end, through an [`outbox`].
//!
//! The chapters stand below from top to bottom: each uses those below it, and no other.
//!
//! - [`api`] translates between protobuf and the features below. [`insight`] answers *why*.
//! - [`app`], [`lifecycle`]: what callers and operators ask for, and the loops that do what is due.
//! - [`scheduling`] decides batches on an in-memory view; [`commit`] writes each batch in one
//!   transaction that judges it again on the rows. [`queue`] holds what waits.
//! - [`workloads`], [`leases`], [`workers`]: domain functions over a transaction.
//! - [`context`], [`notify`], [`db`]: what all of them need. [`placement`] is pure.
//!
//! Locks are taken in one order: a workload's row, then its lease's and its worker's. A
//! registration locks workers alone, and then their heartbeats; what it makes of leases is done
//! afterwards.

mod api;

mod insight;

mod app;

mod lifecycle;

mod scheduling;

mod commit;

mod queue;

mod store_client;

mod workloads;

mod leases;

mod workers;

mod context;

mod counters;

mod config;

mod notify;

mod outbox;

mod db;

mod outcome;

mod placement;

#[cfg(test)]
#[path = "../testing/mod.rs"]
mod testing;

use std::future::Future;
use std::sync::Arc;

use ::db::{Database, Migrations, SqlMigration};
use anyhow::Context as _;
use domain::Timestamp;
use rpc::client::{Outgoing, peer};
use rpc::pb::scheduler::placements_server::PlacementsServer;
use rpc::pb::scheduler::workers_server::WorkersServer;
use rpc::pb::scheduler::workloads_server::WorkloadsServer;
use rpc::token::TokenSigner;
use sea_orm::{DbErr, EntityTrait, Set};
use server::{Host, Listener};

pub use config::{Config, Limits};
pub use placement::{Chain, Chains, ParseChainError, Strategy};

use crate::app::App;
use crate::context::Context;
use crate::db::entity::signing_key;
use crate::lifecycle::Lifecycle;
use crate::notify::Notifier;
use crate::notify::cluster::ClusterNotifier;
use crate::scheduling::Dispatcher;
use crate::store_client::delivery::Delivery;

/// The longest message that is taken: a spec with large arguments and environment.
const MESSAGE_LIMIT: usize = 16 << 20;

struct Schema;

impl Migrations for Schema {
    const ALL: &'static [SqlMigration] =
        &[SqlMigration { name: "0001_scheduler", sql: include_str!("db/migrations/0001_scheduler.sql") }];

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
async fn add(config: Config, host: &mut Host) -> anyhow::Result<App> {
    config.check()?;
    let outgoing = Outgoing::internal().with_token(config.token.as_deref());
    let store = store_client::Store::new(peer(&config.artifact_store, outgoing)?);
    let own = if config.database.connections < SHARED_BELOW { 0 } else { GRANTING };
    let shared = ::db::Settings { connections: config.database.connections - own, ..config.database.clone() };
    let db = Database::open::<Schema>(&shared).await.context("cannot open the scheduler's database")?;
    let signer = signing_key(&db, Timestamp::now()).await.context("cannot read the signing key")?;
    let alone = db.is_sqlite();
    let taken_up = async {
        lifecycle::timeouts::extend_terms(&db, &config, alone).await?;
        if alone {
            db.write(async |txn| outbox::release_claims(&txn, Timestamp::now()).await).await?;
        }
        Ok::<_, DbErr>(())
    };
    taken_up.await.context("cannot take up what the last start left")?;

    // Nobody is there to be told.
    let config = Arc::new(Config { share_hints: config.share_hints && !alone, ..config });
    let granting =
        db.with_own_connections(own).await.context("cannot open the scheduler's database once more")?;
    if !alone {
        host.add_cleanup(granting.clone().close());
    }
    let (dispatch, dispatcher) = Dispatcher::new(granting, config.clone());
    let cluster = config.share_hints.then(ClusterNotifier::new);
    let (notify, parcels) = Notifier::new(dispatch.workers.desired.clone(), cluster.clone());
    let context = Context { db, config, notify, tasks: host.tasks(), stopping: host.stopping() };
    let (heartbeats, heard) = lifecycle::heartbeat_batches::channel();
    let (registrations, registering) = lifecycle::registration::channel();
    let lifecycle = Lifecycle::new(context.clone(), store.clone());
    let app = App::new(lifecycle.clone(), signer, dispatch, heartbeats, registrations);
    let delivery = Delivery::new(context.clone(), store.clone());

    host.spawn(scheduling::dispatch_forever(dispatcher, context.clone()));
    host.spawn(workers::desired_state::read_forever(context.clone()));
    host.spawn(workloads::watch_poll::look_forever(context.clone()));
    host.spawn(lifecycle::heartbeat_batches::write_forever(context.clone(), heard));
    host.spawn(lifecycle::registration::register_forever(lifecycle.clone(), registering));
    if let Some(cluster) = cluster {
        let (db, notify) = (context.db.clone(), context.notify.clone());
        host.spawn(notify::cluster::tell_forever(db.clone(), cluster, host.stopping()));
        host.spawn(notify::cluster::receive_forever(db, notify, host.stopping()));
    }
    host.spawn(lifecycle::timeouts::expire_forever(lifecycle.clone()));
    host.spawn(store_client::delivery::deliver_forever(delivery.clone(), parcels));
    host.spawn(store_client::delivery::redeliver_forever(delivery));
    host.spawn(store_client::reconcile::reconcile_forever(context.clone(), store));
    host.spawn(lifecycle::departure::depart_forever(lifecycle));
    host.add_service(
        WorkloadsServer::new(api::WorkloadsService(app.clone())).max_decoding_message_size(MESSAGE_LIMIT),
    );
    host.add_service(
        WorkersServer::new(api::WorkersService(Arc::new(app.clone())))
            .max_decoding_message_size(MESSAGE_LIMIT),
    );
    host.add_service(PlacementsServer::new(api::PlacementsService(app.clone())));
    host.describe(server::Service {
        name: "scheduler",
        version: env!("CARGO_PKG_VERSION"),
        features: Vec::new(),
        limits: vec![("message_bytes", MESSAGE_LIMIT as u64)],
    });
    host.add_cleanup(context.db.clone().close());
    let db = context.db.clone();
    host.add_check("database", move || {
        let db = db.clone();
        async move { db.ping().await }
    });
    notify::desired_state::describe();
    insight::metrics::add(app.clone(), host);
    Ok(app)
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
