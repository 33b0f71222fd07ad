//! Measures what it costs to have many workers connected, against a scheduler in a process of its own, and prints one line of JSON. For `make bench`.
//!
//! ```text
//! synchronizing DATABASE_URL [--workers 1000,10000] [--heartbeat 10] [--seconds 30] [--landings 200] [--streams 100] [--postgres PID]
//! ```
//!
//! The database must be empty, and PostgreSQL. For each number of workers, as `N_…`:
//!
//! - `hellos`: workers that are let in per second, of 64 at a time.
//! - `core`: of a core, the share that the scheduler takes while each worker says something every `--heartbeat` seconds and is told something as often, and nothing
//!   changes; `database_core`: the same of PostgreSQL, where `--postgres` names its first process.
//! - `transactions`: of the database, per second, in that time; `worker_writes`: rows of workers that were written in it, in all.
//! - `bytes`: by how much the scheduler's memory is larger, for each worker. `--streams` of them share a connection.
//! - `land_p50_ms`, `land_p99_ms`: from the call that lets a worker land until that hears it, one after the other, in the same load.

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

/// How many introduce themselves at a time.
const AT_ONCE: usize = 64;

#[derive(Debug, Clone, Parser)]
struct Arguments {
    database_url: String,
    #[arg(long, value_delimiter = ',', default_value = "1000,10000")]
    workers: Vec<usize>,
    /// Seconds between two messages of a worker
    #[arg(long, default_value_t = 10)]
    heartbeat: u64,
    /// For how long nothing changes
    #[arg(long, default_value_t = 30)]
    seconds: u64,
    /// How many workers are told to land
    #[arg(long, default_value_t = 200)]
    landings: usize,
    /// How many workers share a connection
    #[arg(long, default_value_t = 100)]
    streams: usize,
    /// The first process of PostgreSQL
    #[arg(long)]
    postgres: Option<u32>,
    /// Be the scheduler, until standard input ends
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

/// A scheduler in a process of its own.
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
        let output = process.stdout.take().context("its output")?;
        BufReader::new(output).read_line(&mut endpoint)?;
        Ok(Self { process, endpoint: endpoint.trim().to_owned() })
    }

    fn workers(&self) -> anyhow::Result<WorkersClient<Peer>> {
        Ok(WorkersClient::new(rpc::client::peer(&self.endpoint, Outgoing::internal())?))
    }

    /// Bytes of memory that it has.
    fn memory(&self) -> anyhow::Result<u64> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.process.id()))?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("no such line")?;
        let kib: u64 = line.split_whitespace().next().context("no number")?.parse()?;
        Ok(kib << 10)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.process.stdin.take());
        self.process.wait().ok();
    }
}

/// Seconds of processor time that a process took, and, with `also_children`, those that it started.
fn cpu(pid: u32, also_children: bool) -> anyhow::Result<f64> {
    let mut ticks = of_stat(pid, if also_children { 4 } else { 2 }).context("the process is gone")?.1;
    for entry in fs::read_dir("/proc")?.flatten().filter(|_| also_children) {
        let of_child = entry.file_name().to_str().and_then(|name| of_stat(name.parse().ok()?, 2));
        ticks += of_child.filter(|(parent, _)| *parent == pid).map_or(0.0, |(_, ticks)| ticks);
    }
    // Linux counts for its users in hundredths of a second.
    Ok(ticks / 100.0)
}

/// The parent of a process, and the sum of the first `times` of its own times, in user and system mode, and those of ended children.
fn of_stat(pid: u32, times: usize) -> Option<(u32, f64)> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // Behind its name, which may have anything in it.
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
    ensure!(database.get_database_backend() == DbBackend::Postgres, "measured on PostgreSQL only");
    let mut said = Vec::new();
    for count in &arguments.workers {
        let empty = "TRUNCATE leases, events, outbox, workloads, heartbeats, workers, removed_workers";
        database.execute_unprepared(empty).await?;
        let figures = of(&arguments, &database, *count).await?;
        said.extend(figures.into_iter().map(|(name, figure)| format!("\"{count}_{name}\": {figure:.3}")));
    }
    let Arguments { heartbeat, seconds, landings, streams, .. } = arguments;
    writeln!(
        std::io::stdout(),
        "{{\"heartbeat\": {heartbeat}, \"seconds\": {seconds}, \"landings\": {landings}, \"streams\": {streams}, {}}}",
        said.join(", ")
    )?;
    Ok(())
}

/// The figures of one scheduler with `count` workers.
async fn of(
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
    let hellos = count as f64 / begun.elapsed().as_secs_f64();
    for table in ["workers", "heartbeats"] {
        database.execute_unprepared(&format!("VACUUM ANALYZE {table}")).await?;
    }
    // Until each has said something, and what came with their number is over.
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
        ("hellos", hellos),
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
        took.push(crowd.hears(number, pb::Directive::Cordon).await? - begun);
        client.run_worker(pb::RunWorkerRequest { worker }).await?;
        crowd.hears(number, pb::Directive::Run).await?;
    }
    took.sort();
    let at =
        |percent: usize| took.get(took.len() * percent / 100).map_or(0.0, |took| took.as_secs_f64() * 1e3);
    figures.extend([("land_p50_ms", at(50)), ("land_p99_ms", at(99))]);
    crowd.check()?;
    Ok(figures)
}

/// How many transactions the database has seen, and how many rows of workers were written.
async fn counted(database: &DatabaseConnection) -> anyhow::Result<(f64, f64)> {
    let sql = "SELECT CAST(xact_commit AS FLOAT8) AS transactions,
                      CAST((SELECT n_tup_upd FROM pg_stat_user_tables WHERE relname = 'workers') AS FLOAT8) AS writes
               FROM pg_stat_database WHERE datname = current_database()";
    let row = database.query_one_raw(Statement::from_string(DbBackend::Postgres, sql)).await?;
    let row = row.context("it counts")?;
    Ok((row.try_get("", "transactions")?, row.try_get("", "writes")?))
}

fn name(number: usize) -> String {
    format!("worker-{number}")
}

/// Many workers that are connected.
struct Crowd {
    /// What each was told last, and when.
    told: Vec<watch::Receiver<(pb::Directive, Instant)>>,
    running: JoinSet<anyhow::Result<()>>,
}

impl Crowd {
    async fn connect(arguments: &Arguments, server: &Server, count: usize) -> anyhow::Result<Self> {
        let (at_once, mut running) = (Arc::new(Semaphore::new(AT_ONCE)), JoinSet::new());
        let (welcome, mut welcomed) = mpsc::channel(AT_ONCE);
        let mut told = Vec::with_capacity(count);
        let every = Duration::from_secs(arguments.heartbeat);
        let mut client = server.workers()?;
        for number in 0..count {
            if number.is_multiple_of(arguments.streams) {
                client = server.workers()?;
            }
            let (teller, hears) = watch::channel((pb::Directive::Unspecified, Instant::now()));
            told.push(hears);
            let (client, at_once, welcome) = (client.clone(), at_once.clone(), welcome.clone());
            running.spawn(async move {
                let turn = at_once.acquire_owned().await?;
                let gateway = Gateway::connect(client, name(number)).await?;
                drop(turn);
                welcome.send(()).await?;
                drop(welcome);
                gateway.speak(every, &teller).await
            });
        }
        drop(welcome);
        for _ in 0..count {
            if welcomed.recv().await.is_none() {
                break;
            }
        }
        let mut crowd = Self { told, running };
        crowd.check()?;
        Ok(crowd)
    }

    /// Fails if any of them had to end.
    fn check(&mut self) -> anyhow::Result<()> {
        match self.running.try_join_next() {
            None => Ok(()),
            Some(ended) => ended?.context("a worker was disconnected"),
        }
    }

    /// When a worker was told this.
    async fn hears(&mut self, number: usize, directive: pb::Directive) -> anyhow::Result<Instant> {
        let told = self.told[number].wait_for(|(told, _)| *told == directive);
        let told = tokio::time::timeout(Duration::from_secs(30), told).await;
        Ok(told.context("it was never told")??.1)
    }
}

/// A gateway with one worker, which holds nothing.
struct Gateway {
    welcome: pb::Welcome,
    says: mpsc::Sender<pb::SynchronizeRequest>,
    hears: Streaming<pb::SynchronizeResponse>,
}

impl Gateway {
    async fn connect(mut client: WorkersClient<Peer>, name: String) -> anyhow::Result<Self> {
        let labels = pb::WorkerLabels {
            platform: "linux".to_owned(),
            image_kinds: vec!["host".to_owned()],
            ..pb::WorkerLabels::default()
        };
        let marker = pb::Marker { marker_id: MarkerId::new().to_string(), boot_id: "boot".to_owned() };
        let hello = pb::Hello {
            worker_name: name,
            gateway_instance: GatewayInstance::new().to_string(),
            session_credential: String::new(),
            marker: Some(marker),
            endpoint: "http://127.0.0.1:1".to_owned(),
            labels: Some(labels),
            capacity: Some(pb::Capacity { max_tasks: 10, ..pb::Capacity::default() }),
            protocol_versions: vec![1],
        };
        let (says, said) = mpsc::channel(1);
        says.send(pb::SynchronizeRequest { message: Some(Said::Hello(hello)) }).await?;
        let mut hears = client.synchronize(ReceiverStream::new(said)).await?.into_inner();
        match hears.message().await?.and_then(|message| message.message) {
            Some(Told::Welcome(welcome)) => Ok(Self { welcome, says, hears }),
            other => bail!("not welcome: {other:?}"),
        }
    }

    /// Says that nothing changes, now and then, and when it is told something new, as gateways do.
    async fn speak(
        mut self,
        every: Duration,
        told: &watch::Sender<(pb::Directive, Instant)>,
    ) -> anyhow::Result<()> {
        let (mut number, mut generation) = (0, 0);
        // They do not all speak at once, however they came.
        let mut due = tokio::time::Instant::now() + every.mul_f64(rand::rng().random_range(0.0..1.0));
        loop {
            tokio::select! {
                () = tokio::time::sleep_until(due) => {}
                message = self.hears.message() => {
                    let Some(Told::Desired(desired)) = message?.and_then(|message| message.message) else {
                        bail!("the stream ended");
                    };
                    let directive = desired.directive();
                    told.send_if_modified(|told| {
                        let is_new = told.0 != directive;
                        *told = if is_new { (directive, Instant::now()) } else { *told };
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
            self.says.send(pb::SynchronizeRequest { message: Some(Said::Observed(observed)) }).await?;
        }
    }
}
