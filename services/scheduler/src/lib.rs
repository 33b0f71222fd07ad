//! The scheduler: registration of workers, placement, leases and the queue of workloads.
//!
//! The scheduler never touches a container, a volume or bytes, and does not know the owners of
//! artifacts. Gateways connect to it with `Synchronize` ([`api`]) and receive the desired state of
//! their workers. The [`outbox`] reports the end of workloads to the artifact store.
//!
//! The list is ordered from top to bottom. Each module uses only modules below it.
//!
//! - [`api`] translates between protobuf and the features below. [`insight`] explains decisions.
//! - [`app`] carries out the calls of callers and operators. [`lifecycle`] runs the periodic work.
//! - [`scheduling`] decides batches on an in-memory view. [`commit`] checks each batch again on the
//!   rows and writes it in one transaction. [`queue`] holds the requests that wait.
//! - [`workloads`], [`leases`], [`workers`]: domain functions over a transaction.
//! - [`context`], [`notify`], [`db`]: shared infrastructure. [`placement`] is pure.
//!
//! Lock order: the row of a workload, then its lease, then the worker. A registration locks workers
//! and then their heartbeats, and changes leases only in later transactions.

mod api;

mod insight;

mod app;

mod lifecycle;

mod scheduling;

mod commit;

mod queue;

mod image_references;
mod store_client;

mod workloads;

mod leases;

mod workers;

mod context;

mod counters;

mod config;

mod poll;

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
use crate::poll::PollTicks;
use crate::scheduling::Dispatcher;
use crate::store_client::delivery::Delivery;

/// Largest accepted message, in bytes. A spec may have large arguments and a large environment.
const MESSAGE_LIMIT: usize = 16 << 20;

struct Schema;

impl Migrations for Schema {
    const ALL: &'static [SqlMigration] = &[
        SqlMigration { name: "0001_scheduler", sql: include_str!("db/migrations/0001_scheduler.sql") },
        SqlMigration {
            name: "0002_workload_names",
            sql: include_str!("db/migrations/0002_workload_names.sql"),
        },
        SqlMigration {
            name: "0003_min_free_disk",
            sql: include_str!("db/migrations/0003_min_free_disk.sql"),
        },
    ];

    const BY_INDEX: bool = true;
}

/// Database connections reserved for the dispatcher: one for each of its concurrent transactions.
const DISPATCHER_CONNECTIONS: u32 = 2;

/// Smallest number of connections at which the dispatcher has its own. Below it, all parts share.
const MIN_CONNECTIONS_TO_SPLIT: u32 = 6;

/// Migrates a database to the schema of this version.
pub async fn migrate(database: &::db::Settings) -> Result<(), ::db::ConnectError> {
    Database::open::<Schema>(database).await.map(drop)
}

/// Adds the scheduler to `host`: opens its database, starts its loops and adds its services.
pub async fn start(config: Config, host: &mut Host) -> anyhow::Result<()> {
    add(config, host).await.map(drop)
}

/// Adds the scheduler to `host`, and returns the state that its services share.
async fn add(config: Config, host: &mut Host) -> anyhow::Result<App> {
    config.check()?;
    let outgoing = Outgoing::internal().with_token(config.token.as_deref());
    let store = store_client::Store::new(peer(&config.artifact_store, outgoing.clone())?);
    let streamer = config.streamer.as_deref().map(|streamer| peer(streamer, outgoing)).transpose()?;
    let references = image_references::ImageReferences::new(streamer);
    let own = if config.database.connections < MIN_CONNECTIONS_TO_SPLIT { 0 } else { DISPATCHER_CONNECTIONS };
    let listener = u32::from(config.share_notifications);
    let shared = ::db::Settings { reserved: own + listener, ..config.database.clone() };
    let db = Database::open::<Schema>(&shared).await.context("cannot open the scheduler's database")?;
    let signer = signing_key(&db, Timestamp::now()).await.context("cannot read the signing key")?;
    let is_only_replica = db.is_sqlite();
    let resume = async {
        lifecycle::timeouts::extend_terms(&db, &config, is_only_replica).await?;
        if is_only_replica {
            db.write(async |txn| outbox::release_claims(&txn, Timestamp::now()).await).await?;
        }
        Ok::<_, DbErr>(())
    };
    resume.await.context("cannot resume the work of the previous start")?;

    // SQLite allows one replica only, so there is no other replica to notify.
    let config =
        Arc::new(Config { share_notifications: config.share_notifications && !is_only_replica, ..config });
    let granting =
        db.with_own_connections(own).await.context("cannot open the dispatcher's database connections")?;
    if !is_only_replica {
        host.add_cleanup(granting.clone().close());
    }
    let (dispatch, dispatcher) = Dispatcher::new(granting, config.clone());
    let cluster = config.share_notifications.then(ClusterNotifier::new);
    let (notify, parcels) = Notifier::new(dispatch.workers.desired.clone(), cluster.clone());
    let ticks = PollTicks::start(&config, is_only_replica);
    let context = Context { db, config, ticks, notify, tasks: host.tasks(), stopping: host.stopping() };
    let (heartbeats, received_heartbeats) = lifecycle::heartbeat_batches::channel();
    let (registrations, received_registrations) = lifecycle::registration::channel();
    let lifecycle = Lifecycle::new(context.clone(), store.clone());
    let app = App::new(lifecycle.clone(), signer, references, dispatch, heartbeats, registrations);
    let delivery = Delivery::new(context.clone(), store.clone());

    host.spawn(scheduling::dispatch_forever(dispatcher, context.clone()));
    host.spawn(workers::desired_state::read_forever(context.clone()));
    host.spawn(workloads::watch_poll::poll_forever(context.clone()));
    host.spawn(lifecycle::heartbeat_batches::write_forever(context.clone(), received_heartbeats));
    host.spawn(lifecycle::registration::register_forever(lifecycle.clone(), received_registrations));
    if let Some(cluster) = cluster {
        let (db, notify) = (context.db.clone(), context.notify.clone());
        host.spawn(notify::cluster::send_forever(db.clone(), cluster, host.stopping()));
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

/// Serves the scheduler on `listener` until `shutdown` resolves, then completes the calls in
/// flight.
pub async fn serve(
    config: Config,
    listener: Listener,
    shutdown: impl Future<Output = ()> + Send,
) -> anyhow::Result<()> {
    let mut host = Host::new().with_token(config.token.clone());
    start(config, &mut host).await?;
    host.serve([listener], shutdown).await
}

/// Loads the signing key, or creates it at the first start.
async fn signing_key(db: &Database, now: Timestamp) -> anyhow::Result<TokenSigner> {
    let mut fresh = [0; 32];
    getrandom::fill(&mut fresh).map_err(|error| anyhow::anyhow!("cannot generate a signing key: {error}"))?;
    let row = db
        .write(async |txn| {
            let row =
                signing_key::ActiveModel { id: Set(1), seed: Set(fresh.to_vec()), created_at: Set(now.0) };
            // If several replicas start at the same time, one of them inserts the key and the
            // others read it.
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
    let seed = row
        .seed
        .as_slice()
        .try_into()
        .context("cannot load the signing key: the stored seed does not have 32 bytes")?;
    Ok(TokenSigner::from_seed(seed))
}
