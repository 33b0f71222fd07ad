//! Benchmark of placements with a scheduler in its own process. Prints one line of JSON for `make
//! bench`.
//!
//! ```text
//! placing DATABASE_URL [--workers 10,100,1000,10000] [--seconds 4] [--aimed-seconds 65] [--limit 1000] [--only singles,paced,batched-16,batched-64,submits,two,near,cached]
//! ```
//!
//! The database must be an empty PostgreSQL database. Each figure is prefixed with the number of
//! workers `N`:
//!
//! - `single_1`, `single_16`, `single_64`: pairs of `Place` and `Release` per second, with one
//!   lease per call and this number of callers. `…_p99_ms`: duration of `Place`.
//!   `…_decided_p99_ms`: duration of the scheduler's decisions, from the request until all leases
//!   decided together are granted or released.
//! - `paced_1000`, `paced_4000`: pairs per second of 64 callers that together start this number per
//!   second. The durations are as above, but a `Place` is measured from its due time. The rate of
//!   4,000 lasts long enough to include the work that the scheduler and PostgreSQL do once per
//!   minute.
//! - `batched_16`, `batched_64`: leases per second with `PlaceMany` and `ReleaseMany` in batches of
//!   100. `placed_…`: leases per second of the time in `PlaceMany` alone.
//! - `submit_16`, `submit_64`: workloads per second from `Submit` to assigned.
//! - `two_16`, `two_64`, `two_batched_16`: as `single_16`, `single_64` and `batched_16`, with two
//!   schedulers on one database that receive alternate calls. `…_decided_p99_ms`: figure of the
//!   slower scheduler.
//! - `near_16`, `near_64`: as `single_16`, with leases that use five of 10,000 artifacts. Each
//!   artifact is on three workers. The artifact store locates, pins and releases the artifacts. The
//!   scheduler chooses the worker with the fewest bytes to transfer.
//! - `cached_16`, `limited_16`: baseline that places as other CI systems do. Each placement
//!   filters, shuffles and sorts all workers from a cache, and commits one row per container. With
//!   limited tasks, each placement also reads the counter of each worker and increments one under a
//!   guard. A container and its count are removed again.

mod common;

use std::io::Write;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use clap::{Parser, ValueEnum};
use common::{Server, connect, fill, repeated, serve, serve_store, spec, task};
use domain::WorkloadId;
use rand::seq::SliceRandom;
use rpc::client::Outgoing;
use rpc::pb::scheduler as pb;
use rpc::pb::scheduler::placements_client::PlacementsClient;
use rpc::pb::scheduler::workloads_client::WorkloadsClient;
use sea_orm::{ConnectionTrait, DatabaseConnection, DbBackend, Statement, Value};
use tokio::task::JoinSet;
use uuid::Uuid;

/// Leases per call.
const BATCH: usize = 100;

#[derive(Debug, Clone, Parser)]
struct Arguments {
    database_url: String,
    #[arg(long, value_delimiter = ',', default_value = "10,100,1000,10000")]
    workers: Vec<usize>,
    #[arg(long, default_value_t = 4)]
    seconds: u64,
    /// Duration of the measurement with 4,000 pairs per second, in seconds
    #[arg(long, default_value_t = 65)]
    aimed_seconds: u64,
    /// Maximum number of concurrent tasks per worker
    #[arg(long, default_value_t = 1_000_000)]
    limit: u32,
    /// Measurements to run. Default: all
    #[arg(long, value_enum, value_delimiter = ',')]
    only: Vec<Part>,
    /// Run the scheduler until standard input ends
    #[arg(long, hide = true)]
    serve: bool,
    /// Endpoint of the artifact store of the scheduler
    #[arg(long, hide = true)]
    store: Option<String>,
    /// Run an artifact store until standard input ends
    #[arg(long, hide = true)]
    serve_store: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Part {
    Singles,
    Paced,
    #[value(name = "batched-16")]
    Batched16,
    #[value(name = "batched-64")]
    Batched64,
    Submits,
    Two,
    Near,
    Cached,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let done = if arguments.serve {
        serve(arguments.database_url, arguments.store)
    } else if arguments.serve_store {
        serve_store(arguments.database_url)
    } else {
        measure(arguments)
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

#[tokio::main]
async fn measure(arguments: Arguments) -> anyhow::Result<()> {
    let database = connect(&arguments.database_url).await?;
    let baseline = "CREATE TABLE cached_workers (name TEXT PRIMARY KEY, active_tasks BIGINT NOT NULL CHECK (active_tasks >= 0));
         CREATE TABLE cached_containers (id UUID PRIMARY KEY, worker TEXT NOT NULL, state TEXT NOT NULL)";
    database.execute_unprepared(baseline).await?;
    let mut results = Vec::new();
    for count in &arguments.workers {
        fill(&database, *count, arguments.limit).await?;
        database.execute_unprepared("TRUNCATE cached_workers, cached_containers; INSERT INTO cached_workers SELECT name, 0 FROM workers").await?;
        database.execute_unprepared("VACUUM ANALYZE cached_workers").await?;
        let mut server = Server::start(&arguments.database_url).await?;
        let of = |name: &str, figure: f64| format!("\"{count}_{name}\": {figure:.2}");
        let is_selected = |part| arguments.only.is_empty() || arguments.only.contains(&part);
        for callers in [1, 16, 64].into_iter().filter(|_| is_selected(Part::Singles)) {
            let (rate, p99) = singles(&[&server], callers, arguments.seconds).await?;
            results.push(of(&format!("single_{callers}"), rate));
            results.push(of(&format!("single_{callers}_p99_ms"), p99));
            results.push(of(&format!("single_{callers}_decided_p99_ms"), server.decided_p99()?));
        }
        let paces = [(1000, arguments.seconds), (4000, arguments.aimed_seconds)];
        for (pace, seconds) in paces.into_iter().filter(|_| is_selected(Part::Paced)) {
            paced(&server, 64, pace, 1).await?;
            server.decided_p99()?;
            let (rate, p99) = paced(&server, 64, pace, seconds).await?;
            results.push(of(&format!("paced_{pace}"), rate));
            results.push(of(&format!("paced_{pace}_p99_ms"), p99));
            results.push(of(&format!("paced_{pace}_decided_p99_ms"), server.decided_p99()?));
        }
        for (part, callers) in [(Part::Batched16, 16), (Part::Batched64, 64)] {
            if is_selected(part) {
                let (rate, placed) = batches(&[&server], callers, arguments.seconds).await?;
                results.extend([
                    of(&format!("batched_{callers}"), rate),
                    of(&format!("placed_{callers}"), placed),
                ]);
            }
        }
        for callers in [16, 64].into_iter().filter(|_| is_selected(Part::Submits)) {
            results
                .push(of(&format!("submit_{callers}"), submits(&server, callers, arguments.seconds).await?));
        }
        if is_selected(Part::Two) {
            let mut other = Server::start(&arguments.database_url).await?;
            for callers in [16, 64] {
                // Resets the recorded decisions.
                singles(&[&server, &other], callers, 1).await?;
                for server in [&mut server, &mut other] {
                    server.decided_p99()?;
                }
                let (rate, _) = singles(&[&server, &other], callers, arguments.seconds).await?;
                let decided = server.decided_p99()?.max(other.decided_p99()?);
                results.push(of(&format!("two_{callers}"), rate));
                results.push(of(&format!("two_{callers}_decided_p99_ms"), decided));
            }
            let (rate, _) = batches(&[&server, &other], 16, arguments.seconds).await?;
            results.push(of("two_batched_16", rate));
        }
        drop(server);
        if is_selected(Part::Near) {
            let near = near(&database, &arguments).await?;
            results.extend([of("near_16", near[0]), of("near_64", near[1])]);
        }
        if is_selected(Part::Cached) {
            results.push(of("cached_16", cached(&database, *count, false, arguments.seconds).await?));
            results.push(of("limited_16", cached(&database, *count, true, arguments.seconds).await?));
        }
    }
    writeln!(std::io::stdout(), "{{\"seconds\": {}, {}}}", arguments.seconds, results.join(", "))?;
    Ok(())
}

/// Returns clients of the servers in rotation.
fn in_turns(
    servers: &[&Server],
) -> anyhow::Result<impl Fn() -> PlacementsClient<rpc::Peer> + Clone + Send + 'static> {
    let peers = servers.iter().map(|server| rpc::client::peer(&server.endpoint, Outgoing::default()));
    let clients: Vec<_> = peers.map(|peer| peer.map(PlacementsClient::new)).collect::<Result<_, _>>()?;
    let next = Arc::new(AtomicUsize::new(0));
    Ok(move || clients[next.fetch_add(1, Ordering::Relaxed) % clients.len()].clone())
}

async fn singles(servers: &[&Server], callers: usize, seconds: u64) -> anyhow::Result<(f64, f64)> {
    let client = in_turns(servers)?;
    let pair = move || {
        let mut placements = client();
        async move {
            let begun = Instant::now();
            let lease_token = placements.place(task()).await?.into_inner().lease_token;
            let took = begun.elapsed();
            placements.release(pb::ReleaseRequest { lease_token, settlement: None }).await?;
            Ok(took)
        }
    };
    repeated(callers, 1, pair.clone()).await?;
    let (rate, took) = repeated(callers, seconds, pair).await?;
    let p99 = took.get(took.len() * 99 / 100).context("no lease was placed")?;
    Ok((rate, p99.as_secs_f64() * 1e3))
}

/// Starts pairs at a fixed rate. Returns the pairs per second and the 99th percentile of `Place` in
/// milliseconds. A late caller delays its next pair.
async fn paced(server: &Server, callers: u32, per_second: u32, seconds: u64) -> anyhow::Result<(f64, f64)> {
    let placements = PlacementsClient::new(rpc::client::peer(&server.endpoint, Outgoing::default())?);
    let every = Duration::from_secs(1) * callers / per_second;
    let (begun, mut running) = (Instant::now(), JoinSet::new());
    for number in 0..callers {
        let mut placements = placements.clone();
        running.spawn(async move {
            let (mut due, mut took) = (begun + every * number / callers, Vec::new());
            while due.duration_since(begun).as_secs() < seconds {
                tokio::time::sleep_until(due.into()).await;
                let lease_token = placements.place(task()).await?.into_inner().lease_token;
                took.push(due.elapsed());
                placements.release(pb::ReleaseRequest { lease_token, settlement: None }).await?;
                due += every;
            }
            anyhow::Ok(took)
        });
    }
    let mut took = Vec::new();
    while let Some(done) = running.join_next().await {
        took.extend(done??);
    }
    let rate = took.len() as f64 / begun.elapsed().as_secs_f64();
    took.sort();
    let p99 = took.get(took.len() * 99 / 100).context("no lease was placed")?;
    Ok((rate, p99.as_secs_f64() * 1e3))
}

async fn batches(servers: &[&Server], callers: usize, seconds: u64) -> anyhow::Result<(f64, f64)> {
    let client = in_turns(servers)?;
    let (rate, took) = repeated(callers, seconds, move || {
        let mut placements = client();
        async move {
            let items = (0..BATCH).map(|_| pb::PlaceItem { request: Some(task()), group: 0 }).collect();
            let begun = Instant::now();
            let results = placements.place_many(pb::PlaceManyRequest { items }).await?.into_inner().results;
            let took = begun.elapsed();
            let tokens = results.into_iter().map(|result| match result.result {
                Some(pb::place_result::Result::Placed(placed)) => Ok(placed.lease_token),
                other => Err(anyhow::anyhow!("a lease was not placed: {other:?}")),
            });
            let lease_tokens = tokens.collect::<anyhow::Result<Vec<_>>>()?;
            placements.release_many(pb::ReleaseManyRequest { lease_tokens }).await?;
            Ok(took)
        }
    })
    .await?;
    let placing: Duration = took.iter().sum();
    let placed = (took.len() * BATCH * callers) as f64 / placing.as_secs_f64();
    Ok((rate * BATCH as f64, placed))
}

/// Submits workloads. `Submit` returns after the assignment because the workers have room.
async fn submits(server: &Server, callers: usize, seconds: u64) -> anyhow::Result<f64> {
    let workloads = WorkloadsClient::new(rpc::client::peer(&server.endpoint, Outgoing::default())?);
    let last = Arc::new(AtomicUsize::new(0));
    let (rate, _) = repeated(callers, seconds, move || {
        let (mut workloads, last) = (workloads.clone(), last.clone());
        async move {
            let workload_id = WorkloadId::new().to_string();
            let begun = Instant::now();
            workloads
                .submit(pb::SubmitRequest { workload_id: workload_id.clone(), spec: Some(spec()) })
                .await?;
            let took = begun.elapsed();
            if last.fetch_add(1, Ordering::Relaxed).is_multiple_of(1000) {
                let get = pb::GetRequest { team: "main".to_owned(), workload_id };
                let workload =
                    workloads.get(get).await?.into_inner().workload.context("the workload is unknown")?;
                ensure!(workload.state() == pb::WorkloadState::Assigned, "{:?}", workload.state());
            }
            Ok(took)
        }
    })
    .await?;
    Ok(rate)
}

/// Measures pairs of leases that use artifacts, with 16 callers and with 64.
async fn near(database: &DatabaseConnection, arguments: &Arguments) -> anyhow::Result<[f64; 2]> {
    const ARTIFACTS: u64 = 10_000;
    const ARTIFACT: &str = "CAST('00000000-0000-4000-8000-' || lpad(to_hex(n), 12, '0') AS UUID)";
    database.execute_unprepared("DROP DATABASE IF EXISTS store").await?;
    database.execute_unprepared("CREATE DATABASE store").await?;
    let (url, _) = arguments.database_url.rsplit_once('/').context("a URL with a database")?;
    let url = format!("{url}/store");
    artifact_store::migrate(&url.as_str().into()).await?;
    let query = Statement::from_string(DbBackend::Postgres, "SELECT id FROM workers");
    let mut workers = Vec::new();
    for row in database.query_all_raw(query).await? {
        workers.push(format!("'{}'", row.try_get::<Uuid>("", "id")?));
    }
    let rows = sea_orm::Database::connect(&url).await?;
    let workers = format!("(ARRAY[{}]::UUID[])", workers.join(", "));
    for statement in [
        format!("INSERT INTO workers SELECT id, 1, 1, 1, 0 FROM unnest({workers}) AS given (id)"),
        format!(
            "INSERT INTO artifacts (artifact_id, ordinal, team, label, state, digest, size_bytes, had_owner, created_at)
             SELECT {ARTIFACT}, {ARTIFACT}, 'main', '', 'sealed', decode(md5(n::TEXT) || md5(n::TEXT), 'hex'), 1000 + n, TRUE, 1
             FROM generate_series(1, {ARTIFACTS}) AS numbers (n)"
        ),
        format!(
            "INSERT INTO volumes (handle, worker_id, state, purpose, artifact_id, complete, digest, size_bytes, verified, created_at, judged_after)
             SELECT gen_random_uuid(), {workers}[1 + (n * 7 + copy * 31) % cardinality({workers})], 'created', 'replica', {ARTIFACT}, TRUE,
             decode(md5(n::TEXT) || md5(n::TEXT), 'hex'), 1000 + n, TRUE, 1, 0
             FROM generate_series(1, {ARTIFACTS}) AS numbers (n), generate_series(0, 2) AS copies (copy)"
        ),
        "VACUUM ANALYZE".to_owned(),
    ] {
        rows.execute_unprepared(&statement).await?;
    }
    rows.close().await?;
    let store = Server::run(&[&url, "--serve-store"]).await?;
    let server = Server::run(&[&arguments.database_url, "--serve", "--store", &store.endpoint]).await?;
    let placements = PlacementsClient::new(rpc::client::peer(&server.endpoint, Outgoing::default())?);
    let pair = move || {
        let mut placements = placements.clone();
        async move {
            let artifacts = std::iter::repeat_with(|| rand::random_range(1..=ARTIFACTS));
            let artifact_ids =
                artifacts.take(5).map(|n| format!("00000000-0000-4000-8000-{n:012x}")).collect();
            let begun = Instant::now();
            let placed = placements.place(pb::PlaceRequest { artifact_ids, ..task() }).await?;
            let took = begun.elapsed();
            let lease_token = placed.into_inner().lease_token;
            placements.release(pb::ReleaseRequest { lease_token, settlement: None }).await?;
            Ok(took)
        }
    };
    let mut rates = [0.0; 2];
    for (rate, callers) in rates.iter_mut().zip([16, 64]) {
        repeated(callers, 1, pair.clone()).await?;
        *rate = repeated(callers, arguments.seconds, pair.clone()).await?.0;
    }
    Ok(rates)
}

/// Worker in the cache of the baseline.
#[derive(Debug, Clone)]
struct Cached {
    name: String,
    platform: String,
    tags: Vec<String>,
    build_containers: usize,
}

async fn cached(
    database: &DatabaseConnection,
    count: usize,
    limited: bool,
    seconds: u64,
) -> anyhow::Result<f64> {
    let workers: Arc<[Cached]> = (1..=count)
        .map(|n| Cached {
            name: format!("worker-{n}"),
            platform: "linux".to_owned(),
            tags: Vec::new(),
            build_containers: 0,
        })
        .collect();
    let database = database.clone();
    let (rate, _) = repeated(16, seconds, move || {
        let (workers, database) = (workers.clone(), database.clone());
        async move {
            let begun = Instant::now();
            place_cached(&workers, &database, limited).await?;
            Ok(begun.elapsed())
        }
    })
    .await?;
    Ok(rate)
}

async fn place_cached(
    workers: &[Cached],
    database: &DatabaseConnection,
    limited: bool,
) -> anyhow::Result<()> {
    let run = async |sql: &str, values: Vec<Value>| {
        let statement = Statement::from_sql_and_values(DbBackend::Postgres, sql, values);
        database.execute_raw(statement).await.map(|done| done.rows_affected())
    };
    let mut candidates: Vec<_> = workers
        .iter()
        .filter(|worker| worker.platform == "linux" && worker.tags.is_empty())
        .cloned()
        .collect();
    candidates.shuffle(&mut rand::rng());
    if limited {
        let mut counted = Vec::with_capacity(candidates.len());
        for worker in candidates {
            let sql = "SELECT active_tasks FROM cached_workers WHERE name = $1";
            let values = [Value::from(worker.name.clone())];
            let row = database
                .query_one_raw(Statement::from_sql_and_values(DbBackend::Postgres, sql, values))
                .await?;
            let active: i64 = row.context("a worker")?.try_get("", "active_tasks")?;
            counted.push((active, worker));
        }
        counted.sort_by_key(|(active, _)| *active);
        candidates = counted.into_iter().map(|(_, worker)| worker).collect();
    } else {
        candidates.sort_by_key(|worker| worker.build_containers);
    }
    for worker in candidates {
        let name = Value::from(worker.name);
        if limited {
            let sql = "UPDATE cached_workers SET active_tasks = active_tasks + 1 WHERE name = $1 AND active_tasks < 1000";
            if run(sql, vec![name.clone()]).await? == 0 {
                continue;
            }
        }
        let id = Value::from(Uuid::now_v7());
        run(
            "INSERT INTO cached_containers (id, worker, state) VALUES ($1, $2, 'creating')",
            vec![id.clone(), name.clone()],
        )
        .await?;
        if limited {
            run("UPDATE cached_workers SET active_tasks = active_tasks - 1 WHERE name = $1", vec![name])
                .await?;
        }
        return Ok(());
    }
    anyhow::bail!("no worker has room")
}
