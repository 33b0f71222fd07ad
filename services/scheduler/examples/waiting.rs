//! Benchmark of waiting requests with schedulers in their own processes. Prints one line of JSON
//! for `make bench`.
//!
//! ```text
//! waiting DATABASE_URL [--workers 10,100,1000,10000] [--queue 100000] [--freed 1000] [--seconds 4]
//! ```
//!
//! The database must be an empty PostgreSQL database. Durations are in milliseconds.
//!
//! - `freed_p50_ms`, `freed_p99_ms`: time from the release of a slot at one replica until a watch
//!   at another replica reports the placement of the waiting workload. `freed_after_…`: time from
//!   the answer to the release.
//! - `N_explain_p50_ms`, `N_explain_p99_ms`: duration of `Explain` of a spec with N workers that
//!   have room. `N_explain_full_…`: duration with N full workers.
//! - `N_busy_16`: rejected lease requests per second of 16 callers while all N workers are full.
//!   `N_queued_16`: workloads per second that are queued in the same state. `N_turning_64`: leases
//!   per second that 64 callers wait for and release, where 16 of N workers have one slot each and
//!   all others are full.
//! - `queue_submit_64`: workloads per second that 64 callers submit without workers, up to the
//!   number in `--queue`. `queue_bytes`: memory of the scheduler per workload. `queue_fill_ms`:
//!   time from the registration of a worker with 1000 slots until its desired state contains
//!   1000 leases.

mod common;

use std::io::Write;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use clap::Parser;
use common::{Server, connect, fill, repeated, serve, spec, task};
use domain::{GatewayInstance, MarkerId, WorkloadId};
use rpc::client::{Outgoing, peer};
use rpc::pb::scheduler as pb;
use rpc::pb::scheduler::placements_client::PlacementsClient;
use rpc::pb::scheduler::workers_client::WorkersClient;
use rpc::pb::scheduler::workloads_client::WorkloadsClient;
use rpc::{Peer, Reason, Refusal};
use sea_orm::{ConnectionTrait, DatabaseConnection};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_stream::wrappers::ReceiverStream;

/// Slots of the worker that serves the long queue.
const SLOTS: usize = 1000;

/// Number of slots for which more callers wait.
const FEW: usize = 16;

#[derive(Debug, Clone, Parser)]
struct Arguments {
    database_url: String,
    #[arg(long, value_delimiter = ',', default_value = "10,100,1000,10000")]
    workers: Vec<usize>,
    /// Number of workloads in the long queue
    #[arg(long, default_value_t = 100_000)]
    queue: usize,
    /// Number of slots to release, one after the other
    #[arg(long, default_value_t = 1000)]
    freed: usize,
    #[arg(long, default_value_t = 4)]
    seconds: u64,
    /// Run the scheduler until standard input ends
    #[arg(long, hide = true)]
    serve: bool,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match if arguments.serve { serve(arguments.database_url, None) } else { measure(arguments) } {
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
    let mut results = Vec::new();
    let mut add = |name: &str, figure: f64| results.push(format!("\"{name}\": {figure:.2}"));

    let (freed, after) = freed_slots(&database, &arguments).await?;
    for (name, took) in [("freed", freed), ("freed_after", after)] {
        add(&format!("{name}_p50_ms"), percentile(&took, 50)?);
        add(&format!("{name}_p99_ms"), percentile(&took, 99)?);
    }
    for count in &arguments.workers {
        for (name, limit) in [("explain", 1_000_000), ("explain_full", 0)] {
            fill(&database, *count, limit).await?;
            let server = Server::start(&arguments.database_url).await?;
            let took = explained(&server, arguments.seconds).await?;
            add(&format!("{count}_{name}_p50_ms"), percentile(&took, 50)?);
            add(&format!("{count}_{name}_p99_ms"), percentile(&took, 99)?);
            if limit == 0 {
                add(&format!("{count}_busy_16"), refused(&server, arguments.seconds).await?);
                add(&format!("{count}_queued_16"), queued(&server, 16, arguments.seconds).await?);
            }
        }
        add(&format!("{count}_turning_64"), turning(&database, *count, &arguments).await?);
    }
    let (rate, bytes, filled) = long_queue(&database, &arguments).await?;
    add("queue_submit_64", rate);
    add("queue_bytes", bytes);
    add("queue_fill_ms", filled);
    writeln!(std::io::stdout(), "{{\"queue\": {}, {}}}", arguments.queue, results.join(", "))?;
    Ok(())
}

/// Connects to a server and waits until the server answers.
async fn connect_to(server: &Server) -> anyhow::Result<Peer> {
    let peer = peer(&server.endpoint, Outgoing::default())?;
    let begun = Instant::now();
    while let Err(status) = WorkersClient::new(peer.clone()).keys(pb::KeysRequest {}).await {
        ensure!(begun.elapsed() < Duration::from_secs(30), "{status}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    Ok(peer)
}

/// Returns a percentile of sorted durations in milliseconds.
fn percentile(took: &[Duration], percent: usize) -> anyhow::Result<f64> {
    let at = took.get(took.len() * percent / 100).context("no call was measured")?;
    Ok(at.as_secs_f64() * 1e3)
}

async fn submit(workloads: &mut WorkloadsClient<Peer>) -> anyhow::Result<WorkloadId> {
    let id = WorkloadId::new();
    let request = pb::SubmitRequest { workload_id: id.to_string(), spec: Some(spec()) };
    workloads.submit(request).await?;
    Ok(id)
}

/// Measures the time until a slot that is released at one replica is granted at another one.
/// Returns the times from the release and from its answer.
async fn freed_slots(
    database: &DatabaseConnection,
    arguments: &Arguments,
) -> anyhow::Result<(Vec<Duration>, Vec<Duration>)> {
    fill(database, arguments.freed, 1).await?;
    let (here, there) =
        (Server::start(&arguments.database_url).await?, Server::start(&arguments.database_url).await?);
    let mut placements = PlacementsClient::new(connect_to(&here).await?);
    let mut held = Vec::with_capacity(arguments.freed);
    for _ in 0..arguments.freed {
        held.push(placements.place(task()).await?.into_inner().lease_token);
    }
    let mut workloads = WorkloadsClient::new(connect_to(&there).await?);
    let (placed, mut placements_seen) = mpsc::channel(16);
    let mut watching = JoinSet::new();
    for _ in 0..arguments.freed {
        let workload_id = submit(&mut workloads).await?.to_string();
        let request = pb::WatchRequest { team: "main".to_owned(), workload_id, after_revision: 0 };
        let mut events = workloads.watch(request).await?.into_inner();
        let placed = placed.clone();
        watching.spawn(async move {
            while let Some(event) = events.message().await? {
                if matches!(event.event, Some(pb::watch_response::Event::Placed(_))) {
                    placed.send(Instant::now()).await?;
                    break;
                }
            }
            anyhow::Ok(())
        });
    }
    // Waits until the work of the submissions is finished.
    tokio::time::sleep(Duration::from_secs(2)).await;
    let (mut took, mut after) = (Vec::new(), Vec::new());
    for lease_token in held {
        let begun = Instant::now();
        placements.release(pb::ReleaseRequest { lease_token, settlement: None }).await?;
        let answered = Instant::now();
        let placed = placements_seen.recv().await.context("no workload was placed")?;
        took.push(placed - begun);
        after.push(placed.saturating_duration_since(answered));
    }
    while let Some(watched) = watching.join_next().await {
        watched??;
    }
    took.sort();
    after.sort();
    Ok((took, after))
}

async fn explained(server: &Server, seconds: u64) -> anyhow::Result<Vec<Duration>> {
    let placements = PlacementsClient::new(connect_to(server).await?);
    let explain = move || {
        let mut placements = placements.clone();
        async move {
            let subject = Some(pb::explain_request::Subject::Spec(spec()));
            let begun = Instant::now();
            placements.explain(pb::ExplainRequest { subject, ..Default::default() }).await?;
            Ok(begun.elapsed())
        }
    };
    repeated(1, 1, explain.clone()).await?;
    Ok(repeated(1, seconds, explain).await?.1)
}

async fn refused(server: &Server, seconds: u64) -> anyhow::Result<f64> {
    let placements = PlacementsClient::new(connect_to(server).await?);
    let (rate, _) = repeated(16, seconds, move || {
        let mut placements = placements.clone();
        async move {
            let begun = Instant::now();
            let Err(busy) = placements.place(task()).await else { bail!("the lease was granted") };
            let busy = Refusal::from(busy);
            ensure!(busy.is(Reason::AllWorkersBusy), "{busy}");
            Ok(begun.elapsed())
        }
    })
    .await?;
    Ok(rate)
}

/// Measures the leases per second when most callers wait for one of a few slots.
async fn turning(database: &DatabaseConnection, count: usize, arguments: &Arguments) -> anyhow::Result<f64> {
    fill(database, count, 0).await?;
    let sql = format!(
        "UPDATE workers SET max_tasks = 1 WHERE id IN (SELECT id FROM workers ORDER BY id LIMIT {FEW})"
    );
    database.execute_unprepared(&sql).await?;
    let server = Server::start(&arguments.database_url).await?;
    let placements = PlacementsClient::new(connect_to(&server).await?);
    let pair = move || {
        let mut placements = placements.clone();
        async move {
            let begun = Instant::now();
            let wait = Some(rpc::duration(Duration::from_secs(60)));
            let placed = placements.place(pb::PlaceRequest { wait, ..task() }).await?.into_inner();
            placements
                .release(pb::ReleaseRequest { lease_token: placed.lease_token, settlement: None })
                .await?;
            Ok(begun.elapsed())
        }
    };
    repeated(64, 1, pair.clone()).await?;
    Ok(repeated(64, arguments.seconds, pair).await?.0)
}

async fn queued(server: &Server, callers: usize, seconds: u64) -> anyhow::Result<f64> {
    let workloads = WorkloadsClient::new(connect_to(server).await?);
    let (rate, _) = repeated(callers, seconds, move || {
        let mut workloads = workloads.clone();
        async move {
            let begun = Instant::now();
            submit(&mut workloads).await?;
            Ok(begun.elapsed())
        }
    })
    .await?;
    Ok(rate)
}

/// Measures a long queue without workers. Returns the submissions per second, the bytes per
/// workload, and the time to fill a new worker.
async fn long_queue(database: &DatabaseConnection, arguments: &Arguments) -> anyhow::Result<(f64, f64, f64)> {
    fill(database, 0, 0).await?;
    let server = Server::start(&arguments.database_url).await?;
    let workloads = WorkloadsClient::new(connect_to(&server).await?);
    submit(&mut workloads.clone()).await?;
    let empty = server.memory()?;
    let (begun, left) = (Instant::now(), Arc::new(AtomicUsize::new(arguments.queue)));
    let mut callers = JoinSet::new();
    for _ in 0..64 {
        let (mut workloads, left) = (workloads.clone(), left.clone());
        callers.spawn(async move {
            while left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok()
            {
                submit(&mut workloads).await?;
            }
            anyhow::Ok(())
        });
    }
    while let Some(done) = callers.join_next().await {
        done??;
    }
    let rate = arguments.queue as f64 / begun.elapsed().as_secs_f64();
    let bytes = server.memory()?.saturating_sub(empty) as f64 / arguments.queue as f64;

    let registration = pb::Registration {
        worker_name: "one".to_owned(),
        gateway_instance: GatewayInstance::new().to_string(),
        marker: Some(pb::Marker { marker_id: MarkerId::new().to_string(), boot_id: "boot".to_owned() }),
        endpoint: "http://127.0.0.1:1".to_owned(),
        labels: Some(pb::WorkerLabels {
            platform: "linux".to_owned(),
            image_kinds: vec!["host".to_owned()],
            capabilities: vec!["network-private".to_owned()],
            ..pb::WorkerLabels::default()
        }),
        capacity: Some(pb::Capacity {
            max_tasks: u32::try_from(SLOTS)?,
            disk_bytes: 1 << 30,
            ..pb::Capacity::default()
        }),
        protocol_versions: vec![1],
        ..pb::Registration::default()
    };
    let (outgoing, messages) = mpsc::channel(1);
    let begun = Instant::now();
    let registration = pb::synchronize_request::Message::Registration(registration);
    outgoing.send(pb::SynchronizeRequest { message: Some(registration) }).await?;
    let mut workers = WorkersClient::new(connect_to(&server).await?).max_decoding_message_size(1 << 30);
    let mut incoming = workers.synchronize(ReceiverStream::new(messages)).await?.into_inner();
    while let Some(message) = incoming.message().await? {
        if let Some(pb::synchronize_response::Message::Desired(desired)) = message.message
            && desired.leases.len() == SLOTS
        {
            return Ok((rate, bytes, begun.elapsed().as_secs_f64() * 1e3));
        }
    }
    bail!("the stream ended before the worker was full")
}
