//! What the programs that measure the scheduler have in common.

#![allow(dead_code, reason = "each uses what it needs")]

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

/// Is the scheduler, until standard input ends. `store`: where its artifact store listens, if there is one.
#[tokio::main]
pub(crate) async fn serve(database_url: String, store: Option<String>) -> anyhow::Result<()> {
    let day = Duration::from_secs(24 * 3600);
    let config = Config {
        // Nobody speaks for the workers.
        worker_ttl: day,
        stop_after: day * 2,
        lost_after: day * 3,
        ..Config::new(database_url, store.unwrap_or("http://127.0.0.1:9".to_owned()))
    };
    let decisions = Decisions::record()?;
    let (listener, ended) = listen(move || decisions.take()).await?;
    scheduler::serve(config, listener, ended).await
}

/// Is an artifact store, until standard input ends.
#[tokio::main]
pub(crate) async fn serve_store(database_url: String) -> anyhow::Result<()> {
    let config = artifact_store::Config::new(database_url, artifact_store::KeySource::Fixed(vec![]));
    let (listener, ended) = listen(String::new).await?;
    artifact_store::serve(config, listener, ended).await
}

/// Says where it listens, `answer`s each line that is asked, and says when standard input ends.
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

/// A service in a process of its own.
pub(crate) struct Server {
    process: Child,
    said: BufReader<ChildStdout>,
    pub(crate) endpoint: String,
}

impl Server {
    /// A scheduler.
    pub(crate) async fn start(database: &str) -> anyhow::Result<Self> {
        Self::run(&[database, "--serve"]).await
    }

    /// Ourselves, with these arguments, as soon as calls are taken.
    pub(crate) async fn run(arguments: &[&str]) -> anyhow::Result<Self> {
        let mut process = Command::new(std::env::current_exe()?)
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let mut endpoint = String::new();
        let mut said = BufReader::new(process.stdout.take().context("its output")?);
        said.read_line(&mut endpoint)?;
        let server = Self { process, said, endpoint: endpoint.trim().to_owned() };
        let mut asked = CapabilitiesClient::new(rpc::client::peer(&server.endpoint, Outgoing::internal())?);
        let until = Instant::now() + Duration::from_secs(30);
        loop {
            let answer = asked.get_capabilities(GetCapabilitiesRequest {}).await?.into_inner();
            if answer.not_ready.is_empty() {
                return Ok(server);
            }
            ensure!(Instant::now() < until, "it is not ready: {}", answer.not_ready.join("; "));
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

impl Server {
    /// How long its decisions took at p99 since this was asked last, in milliseconds: from when something is asked for until it is granted.
    pub(crate) fn decided_p99(&mut self) -> anyhow::Result<f64> {
        self.process.stdin.as_mut().context("its input")?.write_all(b"\n")?;
        let mut line = String::new();
        self.said.read_line(&mut line)?;
        line.trim().parse().with_context(|| format!("it said {line:?}"))
    }

    /// The memory that it has, in bytes.
    pub(crate) fn memory(&self) -> anyhow::Result<u64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.process.id()))?;
        let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("its memory")?;
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

/// An empty PostgreSQL, with the schema.
pub(crate) async fn connect(database_url: &str) -> anyhow::Result<DatabaseConnection> {
    scheduler::migrate(&database_url.into()).await?;
    let mut options = sea_orm::ConnectOptions::new(database_url);
    options.sqlx_logging(false).max_connections(16);
    let database = sea_orm::Database::connect(options).await?;
    ensure!(database.get_database_backend() == DbBackend::Postgres, "measured on PostgreSQL only");
    Ok(database)
}

/// Has `count` workers, and nothing on them.
pub(crate) async fn fill(database: &DatabaseConnection, count: usize, limit: u32) -> anyhow::Result<()> {
    let labels = "{\"platform\": \"linux\", \"tags\": [], \"team\": null, \"image_kinds\": [\"host\"], \"capabilities\": [\"network-private\"]}";
    let sql = format!(
        "TRUNCATE leases, events, outbox, workloads, heartbeats, workers;
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

/// Does something again and again by as many callers for as long, and answers how often it was done per second, and how long each took.
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

/// A lease for a task.
pub(crate) fn task() -> pb::PlaceRequest {
    pb::PlaceRequest {
        lease_id: LeaseId::new().to_string(),
        team: "main".to_owned(),
        kind: pb::PlacementKind::Task.into(),
        ..pb::PlaceRequest::default()
    }
}

/// A workload that asks for nothing.
pub(crate) fn spec() -> pb::WorkloadSpec {
    pb::WorkloadSpec {
        team: "main".to_owned(),
        kind: pb::WorkloadKind::Task.into(),
        stdin: pb::StdinMode::None.into(),
        output: pb::OutputMode::Spooled.into(),
        privilege: pb::Privilege::Confined.into(),
        network: pb::Network::Private.into(),
        image: Some(pb::Image { source: Some(pb::image::Source::Host(pb::HostImage {})) }),
        command: vec![b"true".to_vec().into()],
        platform: "linux".to_owned(),
        ..pb::WorkloadSpec::default()
    }
}
