//! Benchmark of connected workers with a scheduler in its own process. Prints one line of JSON for
//! `make bench`.
//!
//! ```text
//! synchronizing DATABASE_URL [--workers 1000,10000] [--heartbeat 10] [--seconds 30] [--landings 200] [--streams 100] [--postgres PID]
//! ```
//!
//! The database must be an empty PostgreSQL database. Each figure is prefixed with the number of
//! workers `N`:
//!
//! - `registrations`: registrations per second, with 64 at a time.
//! - `core`: CPU cores that the scheduler uses while nothing changes and each worker sends and
//!   receives one message every `--heartbeat` seconds. `database_core`: the same for PostgreSQL, if
//!   `--postgres` contains the id of its first process.
//! - `transactions`: transactions of the database per second during that time. `worker_writes`:
//!   total number of rows of workers that were written.
//! - `bytes`: additional memory of the scheduler per worker. `--streams` workers share a
//!   connection.
//! - `land_p50_ms`, `land_p99_ms`: time from the cordon of a worker until its gateway receives the
//!   directive, one worker at a time, under the same load.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use clap::Parser;
use domain::{GatewayInstance, MarkerId};
use rand::RngExt;
use rpc::Peer;
use rpc::client::Outgoing;
use rpc::pb::scheduler as pb;
use rpc::pb::scheduler::synchronize_request::Message as Said;
use rpc::pb::scheduler::synchronize_response::Message as Told;
use rpc::pb::scheduler::workers_client::WorkersClient;
use scheduler::Config;
use sea_orm::{ConnectionTrait, DatabaseConnection, DbBackend, Statement};
use tokio::sync::{Semaphore, mpsc, watch};
use tokio::task::JoinSet;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;

/// Number of concurrent registrations.
const AT_ONCE: usize = 64;

#[derive(Debug, Clone, Parser)]
struct Arguments {
    database_url: String,
    #[arg(long, value_delimiter = ',', default_value = "1000,10000")]
    workers: Vec<usize>,
    /// Seconds between two messages of a worker
    #[arg(long, default_value_t = 10)]
    heartbeat: u64,
    /// Duration of the measurement without changes, in seconds
    #[arg(long, default_value_t = 30)]
    seconds: u64,
    /// Number of workers to cordon
    #[arg(long, default_value_t = 200)]
    landings: usize,
    /// Number of workers per connection
    #[arg(long, default_value_t = 100)]
    streams: usize,
    /// Id of the first process of PostgreSQL
    #[arg(long)]
    postgres: Option<u32>,
    /// Run the scheduler until standard input ends
    #[arg(long, hide = true)]
    serve: bool,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match if arguments.serve { serve(arguments) } else { measure(arguments) } {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

#[tokio::main]
async fn serve(arguments: Arguments) -> anyhow::Result<()> {
    let heartbeat = Duration::from_secs(arguments.heartbeat);
    let config = Config {
        heartbeat,
        worker_ttl: heartbeat * 3,
        ..Config::new(arguments.database_url, "http://127.0.0.1:9")
    };
    let listener = server::Listener::InsecureTcp(server::bind(([127, 0, 0, 1], 0).into())?);
    writeln!(std::io::stdout(), "{}", listener.endpoint()?)?;
    let ended = tokio::task::spawn_blocking(|| std::io::stdin().read_to_end(&mut Vec::new()));
    scheduler::serve(config, listener, async { drop(ended.await) }).await
}

/// Scheduler in its own process.
struct Server {
    process: Child,
    endpoint: String,
}

impl Server {
    fn start(database: &str, heartbeat: u64) -> anyhow::Result<Self> {
        let mut process = Command::new(std::env::current_exe()?)
            .args([database, "--serve", "--heartbeat", &heartbeat.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let mut endpoint = String::new();
        let output = process.stdout.take().context("the process has no output")?;
        BufReader::new(output).read_line(&mut endpoint)?;
        Ok(Self { process, endpoint: endpoint.trim().to_owned() })
    }

    fn workers(&self) -> anyhow::Result<WorkersClient<Peer>> {
        Ok(WorkersClient::new(rpc::client::peer(&self.endpoint, Outgoing::internal())?))
    }

    /// Returns the resident memory of the process in bytes.
    fn memory(&self) -> anyhow::Result<u64> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.process.id()))?;
        let line =
            status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("the status has no VmRSS")?;
        let kib: u64 = line.split_whitespace().next().context("VmRSS has no value")?.parse()?;
        Ok(kib << 10)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.process.stdin.take());
        self.process.wait().ok();
    }
}

/// Returns the CPU time of a process in seconds. With `also_children`, the time of its children is
/// included.
fn cpu(pid: u32, also_children: bool) -> anyhow::Result<f64> {
    let mut ticks =
        read_stat(pid, if also_children { 4 } else { 2 }).context("the process does not exist")?.1;
    for entry in fs::read_dir("/proc")?.flatten().filter(|_| also_children) {
        let of_child = entry.file_name().to_str().and_then(|name| read_stat(name.parse().ok()?, 2));
        ticks += of_child.filter(|(parent, _)| *parent == pid).map_or(0.0, |(_, ticks)| ticks);
    }
    // Linux reports CPU times in hundredths of a second.
    Ok(ticks / 100.0)
}

/// Returns the parent of a process and the sum of its first `times` CPU times: user, system, and
/// the same of ended children.
fn read_stat(pid: u32, times: usize) -> Option<(u32, f64)> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The fields follow the name of the process, which may contain any character.
    let fields: Vec<_> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let ticks = fields.get(11..11 + times)?.iter().filter_map(|field| field.parse::<f64>().ok()).sum();
    Some((fields.get(1)?.parse().ok()?, ticks))
}

#[tokio::main]
async fn measure(arguments: Arguments) -> anyhow::Result<()> {
    scheduler::migrate(&arguments.database_url.as_str().into()).await?;
    let mut options = sea_orm::ConnectOptions::new(&arguments.database_url);
    options.sqlx_logging(false).max_connections(2);
    let database = sea_orm::Database::connect(options).await?;
    ensure!(database.get_database_backend() == DbBackend::Postgres, "the database must be PostgreSQL");
    let mut results = Vec::new();
    for count in &arguments.workers {
        let empty =
            "TRUNCATE leases, events, outbox, workloads, heartbeats, workers, removed_workers CASCADE";
        database.execute_unprepared(empty).await?;
        let figures = measure_scheduler(&arguments, &database, *count).await?;
        results.extend(figures.into_iter().map(|(name, figure)| format!("\"{count}_{name}\": {figure:.3}")));
    }
    let Arguments { heartbeat, seconds, landings, streams, .. } = arguments;
    writeln!(
        std::io::stdout(),
        "{{\"heartbeat\": {heartbeat}, \"seconds\": {seconds}, \"landings\": {landings}, \"streams\": {streams}, {}}}",
        results.join(", ")
    )?;
    Ok(())
}

/// Measures one scheduler with `count` workers.
async fn measure_scheduler(
    arguments: &Arguments,
    database: &DatabaseConnection,
    count: usize,
) -> anyhow::Result<Vec<(&'static str, f64)>> {
    let server = Server::start(&arguments.database_url, arguments.heartbeat)?;
    let mut client = server.workers()?;
    let until = Instant::now() + Duration::from_secs(30);
    while let Err(error) = client.keys(pb::KeysRequest {}).await {
        ensure!(Instant::now() < until, "the scheduler does not answer: {error}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let before = server.memory()?;

    let begun = Instant::now();
    let mut crowd = Crowd::connect(arguments, &server, count).await?;
    let registrations = count as f64 / begun.elapsed().as_secs_f64();
    for table in ["workers", "heartbeats"] {
        database.execute_unprepared(&format!("VACUUM ANALYZE {table}")).await?;
    }
    // Waits until each worker has sent a report and the load of the registrations is over.
    tokio::time::sleep(Duration::from_secs(arguments.heartbeat + 2)).await;

    let memory = server.memory()?.saturating_sub(before);
    let pid = server.process.id();
    let times = || {
        let of_database = arguments.postgres.map(|pid| cpu(pid, true)).transpose()?;
        anyhow::Ok((cpu(pid, false)?, of_database))
    };
    let (counted, took, begun) = (counted(database).await?, times()?, Instant::now());
    tokio::time::sleep(Duration::from_secs(arguments.seconds)).await;
    let (after, passed) = (times()?, begun.elapsed().as_secs_f64());
    let counted = [counted, self::counted(database).await?];
    let mut figures = vec![
        ("registrations", registrations),
        ("core", (after.0 - took.0) / passed),
        ("transactions", (counted[1].0 - counted[0].0) / passed),
        ("worker_writes", counted[1].1 - counted[0].1),
        ("bytes", memory as f64 / count as f64),
    ];
    if let (Some(before), Some(after)) = (took.1, after.1) {
        figures.push(("database_core", (after - before) / passed));
    }

    let mut took = Vec::with_capacity(arguments.landings);
    for _ in 0..arguments.landings {
        let number = rand::rng().random_range(0..count);
        let worker = name(number);
        let begun = Instant::now();
        client
            .cordon_worker(pb::CordonWorkerRequest { worker: worker.clone(), interrupt_after: None })
            .await?;
        took.push(crowd.wait_for_directive(number, pb::Directive::Cordon).await? - begun);
        client.uncordon_worker(pb::UncordonWorkerRequest { worker }).await?;
        crowd.wait_for_directive(number, pb::Directive::Run).await?;
    }
    took.sort();
    let at =
        |percent: usize| took.get(took.len() * percent / 100).map_or(0.0, |took| took.as_secs_f64() * 1e3);
    figures.extend([("land_p50_ms", at(50)), ("land_p99_ms", at(99))]);
    crowd.check()?;
    Ok(figures)
}

/// Returns the number of committed transactions and of written rows of workers.
async fn counted(database: &DatabaseConnection) -> anyhow::Result<(f64, f64)> {
    let sql = "SELECT CAST(xact_commit AS FLOAT8) AS transactions,
                      CAST((SELECT n_tup_upd FROM pg_stat_user_tables WHERE relname = 'workers') AS FLOAT8) AS writes
               FROM pg_stat_database WHERE datname = current_database()";
    let row = database.query_one_raw(Statement::from_string(DbBackend::Postgres, sql)).await?;
    let row = row.context("the database has no statistics")?;
    Ok((row.try_get("", "transactions")?, row.try_get("", "writes")?))
}

fn name(number: usize) -> String {
    format!("worker-{number}")
}

/// Many connected workers.
struct Crowd {
    /// Last directive of each worker and the time of its receipt.
    directives: Vec<watch::Receiver<(pb::Directive, Instant)>>,
    running: JoinSet<anyhow::Result<()>>,
}

impl Crowd {
    async fn connect(arguments: &Arguments, server: &Server, count: usize) -> anyhow::Result<Self> {
        let (at_once, mut running) = (Arc::new(Semaphore::new(AT_ONCE)), JoinSet::new());
        let (welcome, mut welcomed) = mpsc::channel(AT_ONCE);
        let mut directives = Vec::with_capacity(count);
        let every = Duration::from_secs(arguments.heartbeat);
        let mut client = server.workers()?;
        for number in 0..count {
            if number.is_multiple_of(arguments.streams) {
                client = server.workers()?;
            }
            let (sender, receiver) = watch::channel((pb::Directive::Unspecified, Instant::now()));
            directives.push(receiver);
            let (client, at_once, welcome) = (client.clone(), at_once.clone(), welcome.clone());
            running.spawn(async move {
                let permit = at_once.acquire_owned().await?;
                let gateway = Gateway::connect(client, name(number)).await?;
                drop(permit);
                welcome.send(()).await?;
                drop(welcome);
                gateway.report(every, &sender).await
            });
        }
        drop(welcome);
        for _ in 0..count {
            if welcomed.recv().await.is_none() {
                break;
            }
        }
        let mut crowd = Self { directives, running };
        crowd.check()?;
        Ok(crowd)
    }

    /// Returns an error if a worker was disconnected.
    fn check(&mut self) -> anyhow::Result<()> {
        match self.running.try_join_next() {
            None => Ok(()),
            Some(ended) => ended?.context("a worker was disconnected"),
        }
    }

    /// Waits until a worker receives the directive. Returns the time of the receipt.
    async fn wait_for_directive(
        &mut self,
        number: usize,
        directive: pb::Directive,
    ) -> anyhow::Result<Instant> {
        let received = self.directives[number].wait_for(|(received, _)| *received == directive);
        let received = tokio::time::timeout(Duration::from_secs(30), received).await;
        Ok(received.context("the gateway did not receive the directive")??.1)
    }
}

/// Gateway with one idle worker.
struct Gateway {
    welcome: pb::Welcome,
    outgoing: mpsc::Sender<pb::SynchronizeRequest>,
    incoming: Streaming<pb::SynchronizeResponse>,
}

impl Gateway {
    async fn connect(mut client: WorkersClient<Peer>, name: String) -> anyhow::Result<Self> {
        let labels = pb::WorkerLabels {
            platform: "linux".to_owned(),
            image_kinds: vec!["host".to_owned()],
            ..pb::WorkerLabels::default()
        };
        let marker = pb::Marker { marker_id: MarkerId::new().to_string(), boot_id: "boot".to_owned() };
        let registration = pb::Registration {
            worker_name: name,
            gateway_instance: GatewayInstance::new().to_string(),
            session_credential: String::new(),
            marker: Some(marker),
            endpoint: "http://127.0.0.1:1".to_owned(),
            labels: Some(labels),
            capacity: Some(pb::Capacity { max_tasks: 10, ..pb::Capacity::default() }),
            protocol_versions: vec![1],
            ended_instance: String::new(),
        };
        let (outgoing, messages) = mpsc::channel(1);
        outgoing.send(pb::SynchronizeRequest { message: Some(Said::Registration(registration)) }).await?;
        let mut incoming = client.synchronize(ReceiverStream::new(messages)).await?.into_inner();
        match incoming.message().await?.and_then(|message| message.message) {
            Some(Told::Welcome(welcome)) => Ok(Self { welcome, outgoing, incoming }),
            other => bail!("the scheduler did not accept the gateway: {other:?}"),
        }
    }

    /// Reports periodically and after each change of the desired state, as a gateway does.
    async fn report(
        mut self,
        every: Duration,
        received: &watch::Sender<(pb::Directive, Instant)>,
    ) -> anyhow::Result<()> {
        let (mut number, mut generation) = (0, 0);
        // The first reports are spread over one interval.
        let mut due = tokio::time::Instant::now() + every.mul_f64(rand::rng().random_range(0.0..1.0));
        loop {
            tokio::select! {
                () = tokio::time::sleep_until(due) => {}
                message = self.incoming.message() => {
                    let Some(Told::Desired(desired)) = message?.and_then(|message| message.message) else {
                        bail!("the stream ended");
                    };
                    let directive = desired.directive();
                    received.send_if_modified(|last| {
                        let is_new = last.0 != directive;
                        *last = if is_new { (directive, Instant::now()) } else { *last };
                        is_new
                    });
                    if std::mem::replace(&mut generation, desired.generation) == desired.generation {
                        continue;
                    }
                }
            }
            number += 1;
            due = tokio::time::Instant::now() + every;
            let observed = pb::Observed {
                session_credential: self.welcome.session_credential.clone(),
                applied_generation: generation,
                number,
                ..pb::Observed::default()
            };
            self.outgoing.send(pb::SynchronizeRequest { message: Some(Said::Observed(observed)) }).await?;
        }
    }
}
