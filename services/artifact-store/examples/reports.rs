//! Benchmark of reports of gateways, against a store in a separate process. Prints one line of
//! JSON. For `make bench`.
//!
//! ```text
//! reports DATABASE_URL [--handles 100000] [--runs 5] [--workers 1000] [--each 1000] [--seconds 60] [--rounds 3] [--postgres PID]
//! ```
//!
//! The database must be empty. Two things are measured:
//!
//! - One worker that holds `--handles` volumes, in seconds from `BeginReport` to the answer:
//!   `unchanged_s` for `--runs` reports that change nothing, `confirmed_s` for the first report of
//!   a new incarnation, which confirms each volume, `incarnation_s` for the `BeginReport` before
//!   it, which makes them unconfirmed, and `forgotten_s` for a report after everything was marked
//!   and deleted. `rss_idle_kib` and `rss_peak_kib` are of the store's process, before and after
//!   the reports.
//! - `--workers` workers that hold `--each` volumes and report once in `--seconds`, evenly spread,
//!   `--rounds` times. `reports` and `failed` count the reports. `latency_*_s` is the duration of a
//!   report. `store_cores` and, with the pid of a local postmaster, `database_cores` are the used
//!   shares of a core.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use artifact_store::{Config, KeySource};
use clap::Parser;
use domain::worker::{Incarnation, Session, SessionClaims};
use domain::{GatewayInstance, WorkerId};
use rpc::client::Outgoing;
use rpc::pb::artifacts as pb;
use rpc::pb::artifacts::report_request::Message;
use rpc::token::TokenSigner;
use sea_orm::{ConnectionTrait, DatabaseConnection, DbBackend};
use tokio::task::JoinSet;
use uuid::Uuid;

/// Seed of the key that signs credentials, and that the store trusts.
const SEED: [u8; 32] = [7; 32];

/// Number of handles in one message.
const BATCH: usize = 5_000;

#[derive(Debug, Parser)]
struct Arguments {
    database_url: String,
    #[arg(long, default_value_t = 100_000)]
    handles: usize,
    #[arg(long, default_value_t = 5)]
    runs: usize,
    #[arg(long, default_value_t = 1_000)]
    workers: usize,
    #[arg(long, default_value_t = 1_000)]
    each: usize,
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    #[arg(long)]
    postgres: Option<u32>,
    /// Serve the store until standard input ends
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
    let keys = KeySource::Fixed(vec![TokenSigner::from_seed(&SEED).public()]);
    let day = Duration::from_secs(24 * 3600);
    let config = Config { collect_interval: day, ..Config::new(arguments.database_url, keys) };
    let listener = server::Listener::InsecureTcp(server::bind(([127, 0, 0, 1], 0).into())?);
    writeln!(std::io::stdout(), "{}", listener.endpoint()?)?;
    let ended = tokio::task::spawn_blocking(|| std::io::stdin().read_to_end(&mut Vec::new()));
    artifact_store::serve(config, listener, async { drop(ended.await) }).await
}

/// A store in a separate process.
struct Store {
    process: Child,
    endpoint: String,
}

impl Store {
    fn start(database: &str) -> anyhow::Result<Self> {
        let mut process = Command::new(std::env::current_exe()?)
            .args([database, "--serve"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let mut endpoint = String::new();
        let output = process.stdout.take().context("its output")?;
        BufReader::new(output).read_line(&mut endpoint)?;
        Ok(Self { process, endpoint: endpoint.trim().to_owned() })
    }

    /// Returns a line of the process's status, in KiB.
    fn memory(&self, name: &str) -> anyhow::Result<u64> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.process.id()))?;
        let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        Ok(line.and_then(|line| line.split_whitespace().next()).context("no such line")?.parse()?)
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        drop(self.process.stdin.take());
        self.process.wait().ok();
    }
}

/// Returns the processor time of a process in seconds, and with `also_children` that of its
/// children.
fn cpu(pid: u32, also_children: bool) -> anyhow::Result<f64> {
    let mut ticks = of_stat(pid, if also_children { 4 } else { 2 }).context("the process is gone")?.1;
    for entry in fs::read_dir("/proc")?.flatten().filter(|_| also_children) {
        let of_child = entry.file_name().to_str().and_then(|name| of_stat(name.parse().ok()?, 2));
        ticks += of_child.filter(|(parent, _)| *parent == pid).map_or(0.0, |(_, ticks)| ticks);
    }
    // Linux counts in hundredths of a second for user space.
    Ok(ticks / 100.0)
}

/// Returns the parent of a process, and the sum of the first `times` of its user and system times,
/// and those of ended children.
fn of_stat(pid: u32, times: usize) -> Option<(u32, f64)> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // After its name, which may contain any character.
    let fields: Vec<_> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let ticks = fields.get(11..11 + times)?.iter().filter_map(|field| field.parse::<f64>().ok()).sum();
    Some((fields.get(1)?.parse().ok()?, ticks))
}

/// A worker that reports.
#[derive(Clone)]
struct Gateway {
    worker: WorkerId,
    /// The volumes have the numbers `first`, `first + 1`, …
    first: usize,
    holds: usize,
    credential: String,
    inventory: pb::inventory_client::InventoryClient<rpc::Peer>,
}

impl Gateway {
    fn new(store: &Store, first: usize, holds: usize) -> anyhow::Result<Self> {
        let peer = rpc::client::peer(&store.endpoint, Outgoing::default())?;
        let inventory = pb::inventory_client::InventoryClient::new(peer);
        let gateway = Self { worker: WorkerId::new(), first, holds, credential: String::new(), inventory };
        Ok(gateway.of_incarnation(1))
    }

    fn of_incarnation(self, incarnation: u64) -> Self {
        let claims = SessionClaims {
            worker: self.worker,
            incarnation: Incarnation(incarnation),
            session: Session(1),
            instance: GatewayInstance::new(),
        };
        Self { credential: TokenSigner::from_seed(&SEED).sign(&claims), ..self }
    }

    async fn begin(&self) -> anyhow::Result<pb::ReportToken> {
        let request =
            pb::BeginReportRequest { session_credential: self.credential.clone(), ..Default::default() };
        let answer = self.inventory.clone().begin_report(request).await?.into_inner();
        answer.token.context("no token")
    }

    /// Reports the first `held` of its volumes.
    async fn report(&self, held: usize) -> anyhow::Result<pb::ReportResponse> {
        let token = self.begin().await?;
        let worker_life = token.store_life.clone();
        let session_credential = self.credential.clone();
        let open = pb::ReportOpen { session_credential, token: Some(token), worker_life };
        let mut messages = vec![Message::Open(open)];
        let handles: Vec<_> = (self.first..self.first + held).map(handle).collect();
        for some in handles.chunks(BATCH) {
            let volume_handles = some.iter().map(Uuid::to_string).collect();
            messages.push(Message::Holdings(pb::Holdings { volume_handles, ..Default::default() }));
        }
        messages.push(Message::Commit(pb::ReportCommit { count: u64::try_from(held)? }));
        let messages = messages.into_iter().map(|message| pb::ReportRequest { message: Some(message) });
        let messages = tokio_stream::iter(messages.collect::<Vec<_>>());
        let answer = self.inventory.clone().report(messages).await?.into_inner();
        ensure!(!answer.receipt.is_empty(), "no receipt");
        Ok(pb::ReportResponse { receipt: Default::default(), ..answer })
    }

    /// Inserts the rows of its volumes.
    async fn fill(&self, database: &DatabaseConnection) -> anyhow::Result<()> {
        self.begin().await?;
        let (first, last, worker) = (self.first, self.first + self.holds - 1, self.worker);
        let (numbers, id, worker, digest) = match database.get_database_backend() {
            DbBackend::Postgres => (
                format!("SELECT n FROM generate_series({first}, {last}) AS numbers (n)"),
                "CAST(lpad(to_hex(n), 32, '0') AS UUID)",
                format!("CAST('{worker}' AS UUID)"),
                "decode(lpad(to_hex(n), 64, '0'), 'hex')",
            ),
            _ => (
                format!("SELECT {first} UNION ALL SELECT n + 1 FROM numbers WHERE n < {last}"),
                "unhex(printf('%032x', n))",
                format!("x'{}'", worker.uuid().simple()),
                "unhex(printf('%064x', n))",
            ),
        };
        let sql = format!(
            "WITH RECURSIVE numbers (n) AS ({numbers})
             INSERT INTO volumes (handle, worker_id, state, purpose, artifact_id, complete, digest, size_bytes, verified,
                                  created_at, judged_after)
             SELECT {id}, {worker}, 'created', 'replica', {id}, TRUE, {digest}, 1000, TRUE, 0, 0 FROM numbers"
        );
        database.execute_unprepared(&sql).await?;
        Ok(())
    }
}

fn handle(number: usize) -> Uuid {
    Uuid::from_u128(number as u128)
}

async fn timed<T>(call: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<(f64, T)> {
    let begun = Instant::now();
    let answer = call.await?;
    Ok((begun.elapsed().as_secs_f64(), answer))
}

#[tokio::main]
async fn measure(arguments: Arguments) -> anyhow::Result<()> {
    // Migrated before it is opened, because SQLite has no database until then.
    artifact_store::migrate(&arguments.database_url.as_str().into()).await?;
    let store = Store::start(&arguments.database_url)?;
    let database = sea_orm::Database::connect(&arguments.database_url).await?;
    let one = one_worker(&arguments, &store, &database).await?;
    let many = many_workers(&arguments, &store, &database).await?;
    writeln!(std::io::stdout(), "{{{one}, {many}}}")?;
    Ok(())
}

async fn one_worker(
    arguments: &Arguments,
    store: &Store,
    database: &DatabaseConnection,
) -> anyhow::Result<String> {
    let holds = arguments.handles;
    let gateway = Gateway::new(store, 1, holds)?;
    gateway.fill(database).await?;
    settle_down(database).await?;
    let idle = store.memory("VmRSS")?;

    let mut unchanged = Vec::new();
    for _ in 0..arguments.runs {
        let (took, answer) = timed(gateway.report(holds)).await?;
        ensure!(answer == pb::ReportResponse::default(), "something changed");
        unchanged.push(took);
    }
    let gateway = gateway.of_incarnation(2);
    let (incarnation, _) = timed(gateway.begin()).await?;
    let (confirmed, answer) = timed(gateway.report(holds)).await?;
    ensure!(answer == pb::ReportResponse::default(), "something is lost");
    database.execute_unprepared("UPDATE volumes SET state = 'sweeping'").await?;
    let told = "INSERT INTO sweep_queue (worker_id, handle, number) SELECT worker_id, handle, judged_after FROM volumes";
    database.execute_unprepared(told).await?;
    let (forgotten, answer) = timed(gateway.report(0)).await?;
    ensure!(usize::try_from(answer.forgotten) == Ok(holds), "not all were forgotten");
    let peak = store.memory("VmHWM")?;
    Ok(format!(
        "\"handles\": {holds}, \"unchanged_s\": {unchanged:?}, \"incarnation_s\": {incarnation}, \"confirmed_s\": {confirmed}, \
         \"forgotten_s\": {forgotten}, \"rss_idle_kib\": {idle}, \"rss_peak_kib\": {peak}"
    ))
}

async fn many_workers(
    arguments: &Arguments,
    store: &Store,
    database: &DatabaseConnection,
) -> anyhow::Result<String> {
    let (workers, each, seconds) = (arguments.workers, arguments.each, arguments.seconds);
    if workers == 0 || each == 0 {
        bail!("no workers, or none that holds anything");
    }
    let mut gateways = Vec::new();
    for number in 0..workers {
        let gateway = Gateway::new(store, 1 + arguments.handles + number * each, each)?;
        gateway.fill(database).await?;
        gateways.push(gateway);
    }
    settle_down(database).await?;

    let before = (cpu(store.process.id(), false)?, arguments.postgres.map(|pid| cpu(pid, true)).transpose()?);
    let begun = Instant::now();
    let mut reports = JoinSet::new();
    let pause = Duration::from_secs(seconds) / u32::try_from(workers)?;
    let mut ticks = tokio::time::interval(pause);
    for gateway in std::iter::repeat_n(gateways, arguments.rounds).flatten() {
        ticks.tick().await;
        reports.spawn(async move { timed(gateway.report(gateway.holds)).await });
    }
    let (mut took, mut failed) = (Vec::new(), 0);
    while let Some(report) = reports.join_next().await {
        match report? {
            Ok((seconds, answer)) if answer == pb::ReportResponse::default() => took.push(seconds),
            _ => failed += 1,
        }
    }
    let elapsed = begun.elapsed().as_secs_f64();
    let store_cores = (cpu(store.process.id(), false)? - before.0) / elapsed;
    let database_cores = match (arguments.postgres, before.1) {
        (Some(pid), Some(before)) => ((cpu(pid, true)? - before) / elapsed).to_string(),
        _ => "null".to_owned(),
    };
    took.sort_unstable_by(f64::total_cmp);
    let at = |percent: usize| took.get((took.len() * percent / 100).min(took.len().saturating_sub(1)));
    let (median, p99) = (at(50).context("all failed")?, at(99).context("all failed")?);
    Ok(format!(
        "\"workers\": {workers}, \"each\": {each}, \"elapsed_s\": {elapsed}, \"reports\": {}, \"failed\": {failed}, \
         \"latency_median_s\": {median}, \"latency_p99_s\": {p99}, \"store_cores\": {store_cores}, \
         \"database_cores\": {database_cores}",
        took.len()
    ))
}

/// Brings a filled database into the state that it has after a while.
async fn settle_down(database: &DatabaseConnection) -> anyhow::Result<()> {
    let sql = match database.get_database_backend() {
        DbBackend::Postgres => "VACUUM ANALYZE volumes",
        _ => "PRAGMA wal_checkpoint(TRUNCATE)",
    };
    database.execute_unprepared(sql).await?;
    Ok(())
}
