//! Shared code of the programs that measure the scheduler.

#![allow(dead_code, reason = "each program uses a part")]

mod decisions;

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use decisions::Decisions;
use domain::LeaseId;
use rpc::client::Outgoing;
use rpc::pb::capabilities::GetCapabilitiesRequest;
use rpc::pb::capabilities::capabilities_client::CapabilitiesClient;
use rpc::pb::scheduler as pb;
use scheduler::Config;
use sea_orm::{ConnectionTrait, DatabaseConnection, DbBackend};
use tokio::task::JoinSet;

/// Runs a scheduler until standard input ends. `store` is the endpoint of its artifact store. The
/// environment variable `GANTRY_DATABASE_CONNECTIONS` applies.
#[tokio::main]
pub(crate) async fn serve(database_url: String, store: Option<String>) -> anyhow::Result<()> {
    let day = Duration::from_secs(24 * 3600);
    let mut database = db::Settings::from(database_url);
    if let Ok(connections) = std::env::var("GANTRY_DATABASE_CONNECTIONS") {
        database.connections = connections.parse().context("GANTRY_DATABASE_CONNECTIONS is no number")?;
    }
    let config = Config {
        // No gateway reports for the workers.
        worker_ttl: day,
        stop_after: day * 2,
        lost_after: day * 3,
        ..Config::new(database, store.unwrap_or("http://127.0.0.1:9".to_owned()))
    };
    let decisions = Decisions::record()?;
    let (listener, ended) = listen(move || decisions.take()).await?;
    scheduler::serve(config, listener, ended).await
}

/// Runs an artifact store until standard input ends.
#[tokio::main]
pub(crate) async fn serve_store(database_url: String) -> anyhow::Result<()> {
    let config = artifact_store::Config::new(database_url, artifact_store::KeySource::Fixed(vec![]));
    let (listener, ended) = listen(String::new).await?;
    artifact_store::serve(config, listener, ended).await
}

/// Prints the endpoint of a new listener, answers each line of standard input, and returns a future
/// that ends with standard input.
async fn listen(
    answer: impl Fn() -> String + Send + 'static,
) -> anyhow::Result<(server::Listener, impl Future<Output = ()>)> {
    let listener = server::Listener::InsecureTcp(server::bind(([127, 0, 0, 1], 0).into())?);
    writeln!(std::io::stdout(), "{}", listener.endpoint()?)?;
    let ended = tokio::task::spawn_blocking(move || {
        for _ in std::io::stdin().lines().map_while(Result::ok) {
            writeln!(std::io::stdout(), "{}", answer())?;
        }
        std::io::Result::Ok(())
    });
    Ok((listener, async { drop(ended.await) }))
}

/// Service in its own process.
pub(crate) struct Server {
    process: Child,
    output: BufReader<ChildStdout>,
    pub(crate) endpoint: String,
}

impl Server {
    /// Starts a scheduler.
    pub(crate) async fn start(database: &str) -> anyhow::Result<Self> {
        Self::run(&[database, "--serve"]).await
    }

    /// Starts this program with these arguments and waits until the service is ready.
    pub(crate) async fn run(arguments: &[&str]) -> anyhow::Result<Self> {
        let mut process = Command::new(std::env::current_exe()?)
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let mut endpoint = String::new();
        let mut output = BufReader::new(process.stdout.take().context("the process has no output")?);
        output.read_line(&mut endpoint)?;
        let server = Self { process, output, endpoint: endpoint.trim().to_owned() };
        let mut capabilities =
            CapabilitiesClient::new(rpc::client::peer(&server.endpoint, Outgoing::internal())?);
        let until = Instant::now() + Duration::from_secs(30);
        loop {
            let answer = capabilities.get_capabilities(GetCapabilitiesRequest {}).await?.into_inner();
            if answer.not_ready.is_empty() {
                return Ok(server);
            }
            ensure!(Instant::now() < until, "the service is not ready: {}", answer.not_ready.join("; "));
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

impl Server {
    /// Returns the 99th percentile of the durations of decisions since the previous call, in
    /// milliseconds. A decision lasts from the request to the grant.
    pub(crate) fn decided_p99(&mut self) -> anyhow::Result<f64> {
        self.process.stdin.as_mut().context("the process has no input")?.write_all(b"\n")?;
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        line.trim().parse().with_context(|| format!("cannot parse the answer {line:?}"))
    }

    /// Returns the resident memory of the process in bytes.
    pub(crate) fn memory(&self) -> anyhow::Result<u64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.process.id()))?;
        let resident = status
            .lines()
            .find_map(|line| line.strip_prefix("VmRSS:"))
            .context("the process has no memory")?;
        let kib: u64 = resident.trim().trim_end_matches(" kB").trim().parse()?;
        Ok(kib * 1024)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.process.stdin.take());
        self.process.wait().ok();
    }
}

/// Connects to an empty PostgreSQL database and creates the schema.
pub(crate) async fn connect(database_url: &str) -> anyhow::Result<DatabaseConnection> {
    scheduler::migrate(&database_url.into()).await?;
    let mut options = sea_orm::ConnectOptions::new(database_url);
    options.sqlx_logging(false).max_connections(16);
    let database = sea_orm::Database::connect(options).await?;
    ensure!(database.get_database_backend() == DbBackend::Postgres, "the database must be PostgreSQL");
    Ok(database)
}

/// Replaces the content of the database with `count` idle workers.
pub(crate) async fn fill(database: &DatabaseConnection, count: usize, limit: u32) -> anyhow::Result<()> {
    let labels = "{\"platform\": \"linux\", \"tags\": [], \"team\": null, \"image_kinds\": [\"host\"], \"capabilities\": [\"network-private\"]}";
    let sql = format!(
        "TRUNCATE leases, events, outbox, workloads, heartbeats, workers CASCADE;
         INSERT INTO workers (id, name, desired, state, generation, active_tasks, max_tasks, incarnation, session, gateway_instance,
                              marker_id, boot_id, endpoint, labels, disk_bytes, registered_at)
         SELECT gen_random_uuid(), 'worker-' || n, 'run', 'running', 1, 0, {limit}, 1, 1, gen_random_uuid(), gen_random_uuid(), '',
                'http://127.0.0.1:1', '{labels}', 0, 0 FROM generate_series(1, {count}) AS numbers (n);
         INSERT INTO heartbeats (worker_id, last_contact_at, patient_since, attended, containers, volumes, disk_free_bytes)
         SELECT id, CAST(extract(epoch FROM now()) * 1000000 AS BIGINT) + 86400000000, 0, TRUE, 0, 0, 0 FROM workers"
    );
    database.execute_unprepared(&sql).await?;
    for table in ["workers", "heartbeats"] {
        database.execute_unprepared(&format!("VACUUM ANALYZE {table}")).await?;
    }
    database.execute_unprepared("CHECKPOINT").await?;
    Ok(())
}

/// Repeats a call with several concurrent callers for some seconds. Returns the calls per second
/// and the sorted durations.
pub(crate) async fn repeated<F, C>(
    callers: usize,
    seconds: u64,
    call: C,
) -> anyhow::Result<(f64, Vec<Duration>)>
where
    C: Fn() -> F + Clone + Send + 'static,
    F: Future<Output = anyhow::Result<Duration>> + Send,
{
    let begun = Instant::now();
    let until = begun + Duration::from_secs(seconds);
    let mut running = JoinSet::new();
    for _ in 0..callers {
        let call = call.clone();
        running.spawn(async move {
            let mut took = Vec::new();
            while Instant::now() < until {
                took.push(call().await?);
            }
            anyhow::Ok(took)
        });
    }
    let mut took = Vec::new();
    while let Some(done) = running.join_next().await {
        took.extend(done??);
    }
    took.sort();
    Ok((took.len() as f64 / begun.elapsed().as_secs_f64(), took))
}

/// Request for the lease of a task.
pub(crate) fn task() -> pb::PlaceRequest {
    pb::PlaceRequest {
        lease_id: LeaseId::new().to_string(),
        team: "main".to_owned(),
        kind: pb::PlacementKind::Task.into(),
        ..pb::PlaceRequest::default()
    }
}

/// Spec of a workload without requirements.
pub(crate) fn spec() -> pb::WorkloadSpec {
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
        ..pb::WorkloadSpec::default()
    }
}
