//! Benchmark of explanations with a scheduler in this process. Prints one line of JSON for `make
//! bench`.
//!
//! ```text
//! explaining [DATABASE_URL] [--workers 10000] [--calls 500]
//! ```
//!
//! The database must be an empty PostgreSQL database. Without a URL, the program starts its own
//! server. A tenth of the workers has another platform. A tenth of the others has one of a hundred
//! tags. One caller calls repeatedly. Durations are in milliseconds, as `…_p50_ms` and `…_p99_ms`:
//!
//! - `placed`: a spec that many workers would take.
//! - `waits`: a waiting workload for which all compatible workers are full, while a thousand other
//!   workloads wait.
//! - `never`: a spec that no worker could take.
//! - `all`: as `waits`, with the details of every worker.
//! - `demand`: the query of autoscalers.

use std::io::Write;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use clap::Parser;
use domain::WorkloadId;
use rpc::client::Outgoing;
use rpc::pb::scheduler as pb;
use rpc::pb::scheduler::explain_request::Subject;
use rpc::pb::scheduler::placements_client::PlacementsClient;
use rpc::pb::scheduler::workloads_client::WorkloadsClient;
use scheduler::Config;
use sea_orm::{ConnectionTrait, DatabaseConnection, DbBackend};
use tokio::sync::oneshot;

/// Number of waiting workloads.
const WAITING: usize = 1000;

#[derive(Debug, Clone, Parser)]
struct Arguments {
    database_url: Option<String>,
    #[arg(long, default_value_t = 10_000)]
    workers: usize,
    #[arg(long, default_value_t = 500)]
    calls: usize,
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    let _server;
    let url = match &arguments.database_url {
        Some(url) => url.clone(),
        None => {
            _server = testing::databases::postgres().await;
            _server.url.clone()
        }
    };
    scheduler::migrate(&url.as_str().into()).await?;
    let mut options = sea_orm::ConnectOptions::new(&url);
    options.sqlx_logging(false);
    let database = sea_orm::Database::connect(options).await?;
    ensure!(database.get_database_backend() == DbBackend::Postgres, "the database must be PostgreSQL");
    let mut results = Vec::new();

    // Half of the slots are used.
    fill(&database, arguments.workers, 5).await?;
    let scheduler = Scheduler::start(&url).await?;
    let spec = |tags: &[&str]| Subject::Spec(spec(tags));
    let placed = explain(&scheduler, spec(&[]), 0, arguments.calls).await?;
    results.push(figures("placed", placed, pb::Verdict::Placed)?);
    let never = explain(&scheduler, spec(&["no-such-tag"]), 0, arguments.calls).await?;
    results.push(figures("never", never, pb::Verdict::Never)?);
    scheduler.stop().await?;

    // All slots are used.
    fill(&database, arguments.workers, 10).await?;
    let scheduler = Scheduler::start(&url).await?;
    let mut workloads = WorkloadsClient::new(rpc::client::peer(&scheduler.endpoint, Outgoing::default())?);
    let mut last = String::new();
    for _ in 0..WAITING {
        last = WorkloadId::new().to_string();
        let request = pb::SubmitRequest { workload_id: last.clone(), spec: Some(self::spec(&[])) };
        workloads.submit(request).await?;
    }
    let waiting = Subject::Workload(pb::WaitingWorkload { team: "main".to_owned(), workload_id: last });
    let waits = explain(&scheduler, waiting.clone(), 0, arguments.calls).await?;
    results.push(figures("waits", waits, pb::Verdict::NotNow)?);
    let all = explain(&scheduler, waiting, 10_000, arguments.calls.min(50)).await?;
    results.push(figures("all", all, pb::Verdict::NotNow)?);
    let mut placements = scheduler.placements()?;
    let mut took = Vec::new();
    for _ in 0..arguments.calls {
        let begun = Instant::now();
        let demand = placements.get_demand(pb::GetDemandRequest::default()).await?.into_inner();
        took.push(begun.elapsed());
        ensure!(demand.waiting == WAITING as u64, "{} requests wait", demand.waiting);
    }
    results.push(in_figures("demand", took)?);
    scheduler.stop().await?;
    writeln!(std::io::stdout(), "{{\"workers\": {}, {}}}", arguments.workers, results.join(", "))?;
    Ok(())
}

/// Scheduler on its own port.
struct Scheduler {
    endpoint: String,
    stop: oneshot::Sender<()>,
    served: tokio::task::JoinSet<anyhow::Result<()>>,
}

impl Scheduler {
    async fn start(url: &str) -> anyhow::Result<Self> {
        let day = Duration::from_secs(24 * 3600);
        let config = Config {
            // No gateway reports for the workers.
            worker_ttl: day,
            stop_after: day * 2,
            lost_after: day * 3,
            ..Config::new(url, "http://127.0.0.1:9")
        };
        let listener = server::Listener::InsecureTcp(server::bind(([127, 0, 0, 1], 0).into())?);
        let endpoint = listener.endpoint()?;
        let (stop, stopped) = oneshot::channel();
        let mut served = tokio::task::JoinSet::new();
        served.spawn(scheduler::serve(config, listener, async move { _ = stopped.await }));
        Ok(Self { endpoint, stop, served })
    }

    fn placements(&self) -> anyhow::Result<PlacementsClient<rpc::Peer>> {
        let peer = rpc::client::peer(&self.endpoint, Outgoing::default())?;
        Ok(PlacementsClient::new(peer).max_decoding_message_size(64 << 20))
    }

    async fn stop(mut self) -> anyhow::Result<()> {
        _ = self.stop.send(());
        self.served.join_next().await.context("the scheduler did not run")??
    }
}

/// Replaces the content of the database with `count` workers with ten slots each, of which `taken`
/// are used.
async fn fill(database: &DatabaseConnection, count: usize, taken: u32) -> anyhow::Result<()> {
    let sql = format!(
        "TRUNCATE leases, events, outbox, workloads, heartbeats, workers CASCADE;
         INSERT INTO workers (id, name, desired, state, generation, active_tasks, max_tasks, incarnation, session, gateway_instance,
                              marker_id, boot_id, endpoint, labels, disk_bytes, registered_at)
         SELECT gen_random_uuid(), 'worker-' || n, 'run', 'running', 1, {taken}, 10, 1, 1, gen_random_uuid(), gen_random_uuid(), '',
                'http://127.0.0.1:1',
                '{{\"platform\": \"' || CASE WHEN n % 10 = 0 THEN 'darwin' ELSE 'linux' END || '\", \"tags\": ['
                || CASE WHEN n % 10 = 1 THEN '\"tag-' || (n / 10) % 100 || '\"' ELSE '' END
                || '], \"team\": null, \"image_kinds\": [\"host\"], \"capabilities\": [\"network-private\"]}}', 0, 0
         FROM generate_series(1, {count}) AS numbers (n);
         INSERT INTO heartbeats (worker_id, last_contact_at, patient_since, attended, containers, volumes, disk_free_bytes)
         SELECT id, CAST(extract(epoch FROM now()) * 1000000 AS BIGINT) + 86400000000, 0, TRUE, 0, 0, 0 FROM workers"
    );
    database.execute_unprepared(&sql).await?;
    for table in ["workers", "heartbeats"] {
        database.execute_unprepared(&format!("VACUUM ANALYZE {table}")).await?;
    }
    Ok(())
}

fn spec(tags: &[&str]) -> pb::WorkloadSpec {
    pb::WorkloadSpec {
        team: "main".to_owned(),
        kind: pb::WorkloadKind::Task.into(),
        stdin: pb::StdinMode::None.into(),
        output: pb::OutputMode::Spooled.into(),
        privilege: pb::Privilege::Confined.into(),
        network: pb::Network::Private.into(),
        image: Some(pb::Image { source: Some(pb::image::Source::Host(pb::HostImage {})), entrypoint: None }),
        command: vec![b"true".to_vec().into()],
        platform: "linux".to_owned(),
        tags: tags.iter().map(|&tag| tag.to_owned()).collect(),
        ..pb::WorkloadSpec::default()
    }
}

/// Calls `Explain` repeatedly. Returns the durations and the last verdict.
async fn explain(
    scheduler: &Scheduler,
    subject: Subject,
    max_workers: u32,
    calls: usize,
) -> anyhow::Result<(Vec<Duration>, pb::Verdict)> {
    let mut placements = scheduler.placements()?;
    let request = pb::ExplainRequest { subject: Some(subject), max_workers, workers: Vec::new() };
    let (mut took, mut verdict) = (Vec::new(), pb::Verdict::Unspecified);
    for _ in 0..calls {
        let begun = Instant::now();
        verdict = placements.explain(request.clone()).await?.into_inner().verdict();
        took.push(begun.elapsed());
    }
    Ok((took, verdict))
}

fn figures(
    name: &str,
    (took, verdict): (Vec<Duration>, pb::Verdict),
    expected: pb::Verdict,
) -> anyhow::Result<String> {
    ensure!(verdict == expected, "{name}: {verdict:?}");
    in_figures(name, took)
}

fn in_figures(name: &str, mut took: Vec<Duration>) -> anyhow::Result<String> {
    took.sort();
    let at = |percent: usize| took.get(took.len() * percent / 100).context("no call was measured");
    let (p50, p99) = (at(50)?.as_secs_f64() * 1e3, at(99)?.as_secs_f64() * 1e3);
    Ok(format!("\"{name}_p50_ms\": {p50:.2}, \"{name}_p99_ms\": {p99:.2}"))
}
