//! Fills a store's database with artifacts, of which one in a hundred is garbage, and measures it. For `make bench`.
//!
//! `collection URL ARTIFACTS` prints one line of JSON: how long a marking pass takes that finds the garbage, one that finds nothing, and the
//! same marks row by row (a scan for orphans, then for each a guarded UPDATE of its own, as CI systems do it); how long CreateArtifact
//! takes beside a pass and without one; Locate of 20 artifacts; and creates in a second.

use std::io::Write;
use std::time::{Duration, Instant};

use artifact_store::{Config, KeySource};
use rpc::Peer;
use rpc::client::Outgoing;
use rpc::pb::artifacts as pb;
use rpc::token::TokenSigner;
use sea_orm::{ConnectionTrait, DatabaseConnection, DbBackend, Statement};
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use uuid::Uuid;

type Result<T> = std::result::Result<T, anyhow::Error>;

/// How many in a hundred are kept by builds that go on.
const GARBAGE_IN: u64 = 100;
const BUILDS: u64 = 1000;
const WORKERS: u64 = 100;

#[tokio::main]
async fn main() -> Result<()> {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let [url, artifacts] = &arguments[..] else { anyhow::bail!("usage: collection URL ARTIFACTS") };
    let artifacts: u64 = artifacts.parse()?;
    artifact_store::migrate(&url.as_str().into()).await?;
    let connection = sea_orm::Database::connect(url).await?;
    let filling = Instant::now();
    fill(&connection, artifacts).await?;
    eprintln!("filled in {:?}", filling.elapsed());

    let by_row = row_by_row(&connection).await?;
    let store = Store::start(url).await?;
    let figures = measure(&store, artifacts).await?;
    store.stop().await?;
    let marks = artifacts / GARBAGE_IN;
    let said =
        format!(r#"{{"artifacts": {artifacts}, "marks": {marks}, "row_by_row_ms": {by_row:.1}, {figures}}}"#);
    writeln!(std::io::stdout(), "{said}")?;
    Ok(())
}

/// An id, as an expression over a number.
fn id(backend: DbBackend, kind: u32, number: &str) -> String {
    match backend {
        DbBackend::Sqlite => format!("unhex(printf('{kind:08x}%024x', {number}))"),
        _ => format!("('{kind:08x}' || lpad(to_hex({number}), 24, '0'))::uuid"),
    }
}

fn id_of(kind: u32, number: u64) -> Uuid {
    Uuid::from_u128(u128::from(kind) << 96 | u128::from(number))
}

const WORKER: u32 = 1;
const ARTIFACT: u32 = 2;
const VOLUME: u32 = 3;
const LIVE: u32 = 8;
const ENDED: u32 = 9;

async fn fill(connection: &DatabaseConnection, artifacts: u64) -> Result<()> {
    let backend = connection.get_database_backend();
    let numbers = |count: u64| match backend {
        DbBackend::Sqlite => {
            format!("WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {count})")
        }
        _ => format!("WITH n (i) AS (SELECT generate_series(1, {count}))"),
    };
    let digest = match backend {
        DbBackend::Sqlite => "unhex(printf('%064x', i))".to_owned(),
        _ => "decode(lpad(to_hex(i), 64, '0'), 'hex')".to_owned(),
    };
    let of = |kind, number: &str| id(backend, kind, number);
    let statements = [
        format!("INSERT INTO workers {} SELECT {}, 1, 1, 1, 0 FROM n", numbers(WORKERS), of(WORKER, "i")),
        format!(
            "INSERT INTO builds (build_id, team, keep, bound, created_at) {} SELECT {}, 'main', 0, FALSE, 0 FROM n",
            numbers(BUILDS),
            of(LIVE, "i")
        ),
        format!(
            "INSERT INTO builds (build_id, team, keep, bound, status, ended_at, kept_until, created_at, look_at)
             {} SELECT {}, 'main', 0, FALSE, 'succeeded', 1, 1, 0, 1 FROM n",
            numbers(BUILDS),
            of(ENDED, "i")
        ),
        format!(
            "INSERT INTO artifacts (artifact_id, ordinal, team, label, state, digest, size_bytes, had_owner, created_at)
             {} SELECT {}, {}, 'main', '', 'sealed', {digest}, 1000, TRUE, 1 FROM n",
            numbers(artifacts),
            of(ARTIFACT, "i"),
            of(ARTIFACT, "i")
        ),
        format!(
            "INSERT INTO volumes (handle, worker_id, state, purpose, artifact_id, complete, digest, size_bytes, verified, created_at, judged_after)
             {} SELECT {}, {}, 'created', 'replica', {}, TRUE, {digest}, 1000, TRUE, 1, 0 FROM n",
            numbers(artifacts),
            of(VOLUME, "i"),
            of(WORKER, &format!("1 + i % {WORKERS}")),
            of(ARTIFACT, "i")
        ),
        format!(
            "INSERT INTO owners (artifact_id, build_id) {} SELECT {}, CASE WHEN i % {GARBAGE_IN} = 0 THEN {} ELSE {} END FROM n",
            numbers(artifacts),
            of(ARTIFACT, "i"),
            of(ENDED, &format!("1 + (i / {GARBAGE_IN}) % {BUILDS}")),
            of(LIVE, &format!("1 + i % {BUILDS}")),
        ),
        // What is marked row by row, beside it: the orphans are those without an owner.
        format!(
            "CREATE TABLE by_row (handle {uuid} PRIMARY KEY, state TEXT NOT NULL, parent {uuid}, owner {uuid})",
            uuid = if backend == DbBackend::Sqlite { "BLOB" } else { "UUID" }
        ),
        "INSERT INTO by_row SELECT v.handle, v.state, NULL,
                 CASE WHEN b.kept_until IS NULL THEN b.build_id ELSE NULL END
             FROM volumes v JOIN owners o ON o.artifact_id = v.artifact_id JOIN builds b ON b.build_id = o.build_id"
            .to_owned(),
        "CREATE INDEX by_row_parent ON by_row (parent)".to_owned(),
        "CREATE INDEX by_row_owner ON by_row (owner)".to_owned(),
        "ANALYZE".to_owned(),
    ];
    for statement in statements {
        connection.execute_unprepared(&statement).await?;
    }
    if backend == DbBackend::Postgres {
        connection.execute_unprepared("VACUUM").await?;
        connection.execute_unprepared("CHECKPOINT").await?;
    }
    Ok(())
}

/// The same number of marks, each a statement and a transaction of its own. In milliseconds.
async fn row_by_row(connection: &DatabaseConnection) -> Result<f64> {
    let backend = connection.get_database_backend();
    let begin = Instant::now();
    let orphans = Statement::from_string(
        backend,
        "SELECT handle FROM by_row WHERE owner IS NULL AND state = 'created'",
    );
    for row in connection.query_all_raw(orphans).await? {
        let handle: Uuid = row.try_get("", "handle")?;
        let mark =
            "UPDATE by_row SET state = 'destroying' WHERE handle = $1 AND state IN ('created', 'destroying')
                    AND NOT EXISTS (SELECT 1 FROM by_row child WHERE child.parent = by_row.handle)";
        connection.execute_raw(Statement::from_sql_and_values(backend, mark, [handle.into()])).await?;
    }
    Ok(millis(begin.elapsed()))
}

fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

/// The value below which `part` of `figures` are, in milliseconds.
fn quantile(figures: &mut [Duration], part: f64) -> f64 {
    figures.sort_unstable();
    let at = (figures.len() as f64 * part) as usize;
    figures.get(Ord::min(at, figures.len().saturating_sub(1))).map_or(0.0, |figure| millis(*figure))
}

/// A store that collects when it is asked to.
struct Store {
    caller: Caller,
    stop: oneshot::Sender<()>,
    served: tokio::task::JoinHandle<Result<()>>,
}

impl Store {
    async fn start(url: &str) -> Result<Self> {
        let keys = KeySource::Fixed(vec![TokenSigner::from_seed(&[7; 32]).public()]);
        let hour = Duration::from_secs(3600);
        let config = Config { collect_interval: 24 * hour, ..Config::new(url, keys) };
        let listener = server::Listener::Tcp(tokio::net::TcpListener::bind("127.0.0.1:0").await?);
        let endpoint = listener.endpoint()?;
        let (stop, stopped) = oneshot::channel();
        let shutdown = async { stopped.await.unwrap_or(()) };
        #[expect(clippy::disallowed_methods, reason = "it is waited for when the store stops")]
        let served = tokio::spawn(artifact_store::serve(config, listener, shutdown));
        Ok(Self { caller: Caller(rpc::client::peer(&endpoint, Outgoing::default())?), stop, served })
    }

    async fn stop(self) -> Result<()> {
        self.stop.send(()).ok();
        self.served.await?
    }
}

/// Who calls it.
#[derive(Clone)]
struct Caller(Peer);

impl Caller {
    /// A pass. Answers how long it took and how much was marked.
    async fn collect(&self) -> Result<(Duration, usize)> {
        let mut client = pb::collector_client::CollectorClient::new(self.0.clone());
        let begin = Instant::now();
        let request = pb::CollectRequest { dry_run: pb::DryRun::Off.into() };
        let mut request = tonic::Request::new(request);
        request.set_timeout(Duration::from_secs(600));
        let answer = client.collect(request).await?.into_inner();
        Ok((begin.elapsed(), answer.collected.len()))
    }

    async fn create(&self) -> Result<Duration> {
        let mut client = pb::artifacts_client::ArtifactsClient::new(self.0.clone());
        let begin = Instant::now();
        let request = pb::CreateArtifactRequest {
            artifact_id: Uuid::now_v7().to_string(),
            team: "main".to_owned(),
            build_id: id_of(LIVE, 1).to_string(),
            ..Default::default()
        };
        client.create_artifact(request).await?;
        Ok(begin.elapsed())
    }

    async fn locate(&self, first: u64, artifacts: u64) -> Result<Duration> {
        let mut client = pb::artifacts_client::ArtifactsClient::new(self.0.clone());
        let ids = (0..20).map(|n| id_of(ARTIFACT, 1 + (first + n * 7919) % artifacts).to_string());
        let request = pb::LocateRequest { team: "main".to_owned(), artifact_ids: ids.collect() };
        let begin = Instant::now();
        client.locate(request).await?;
        Ok(begin.elapsed())
    }
}

async fn measure(store: &Store, artifacts: u64) -> Result<String> {
    for _ in 0..20 {
        store.caller.create().await?;
    }
    let mut quiet = Vec::new();
    for _ in 0..200 {
        quiet.push(store.caller.create().await?);
    }
    // One caller after the other, as fast as they are answered, while the pass runs.
    let mut beside = Vec::new();
    let pass = store.caller.collect();
    tokio::pin!(pass);
    let (marking, marked) = loop {
        tokio::select! {
            done = &mut pass => break done?,
            created = store.caller.create() => beside.push(created?),
        }
    };
    let mut idle = Vec::new();
    for _ in 0..20 {
        idle.push(store.caller.collect().await?.0);
    }
    let mut locate = Vec::new();
    for n in 0..2000 {
        locate.push(store.caller.locate(n * 104_729, artifacts).await?);
    }
    let begin = Instant::now();
    let mut callers = JoinSet::new();
    for _ in 0..16 {
        let caller = store.caller.clone();
        callers.spawn(async move {
            for _ in 0..200 {
                caller.create().await?;
            }
            Result::<()>::Ok(())
        });
    }
    while let Some(done) = callers.join_next().await {
        done??;
    }
    let per_second = 3200.0 / begin.elapsed().as_secs_f64();
    let most = |figures: &[Duration]| figures.iter().max().copied().map_or(0.0, millis);
    Ok(format!(
        r#""marked": {marked}, "marking_ms": {:.1}, "idle_ms": {:.2}, "idle_max_ms": {:.2}, "create_ms": {:.2}, "create_max_ms": {:.2}, "create_beside": {}, "create_beside_ms": {:.2}, "create_beside_max_ms": {:.2}, "locate_p50_ms": {:.2}, "locate_p99_ms": {:.2}, "creates_per_second": {per_second:.0}"#,
        millis(marking),
        quantile(&mut idle, 0.5),
        most(&idle),
        quantile(&mut quiet, 0.5),
        most(&quiet),
        beside.len(),
        quantile(&mut beside, 0.5),
        most(&beside),
        quantile(&mut locate, 0.5),
        quantile(&mut locate, 0.99),
    ))
}
