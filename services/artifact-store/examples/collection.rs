//! Benchmark of collections on a database with many artifacts. For `make bench`.
//!
//! `collection URL ARTIFACTS` fills the database with artifacts, each with a replica, measures the
//! store, and prints one line of JSON.
//!
//! Several lots of one percent of the artifacts become garbage, one after the other, when their
//! builds end. PostgreSQL makes a checkpoint before each, so that each pass writes whole pages. The
//! measurements, in milliseconds:
//!
//! - `row_by_row_ms`: a lot of marks as CI systems do it: a scan for orphans in a table with
//!   nothing else in it, then for each a guarded UPDATE and a commit of its own.
//! - `same_row_by_row_ms`: the same marks for a lot of artifacts and their volumes, in the store's
//!   tables.
//! - `alone_ms`: a pass that marks a lot of artifacts and as many volumes, of builds with ten
//!   artifacts that were made together.
//! - `beside_ms`: the same pass while a caller creates artifacts as fast as it can.
//! - `scattered_ms`: a pass over a lot that is spread evenly, so that each row is on a page of its
//!   own.
//! - `attempts_ms`: a pass that marks a lot of volumes of ended attempts.
//! - `floor_ms`: four bare statements that write the same to a lot, in one transaction, as a lower
//!   bound for a pass.
//! - `started_ms`: the first pass of a store that was just started, with nothing to do.
//! - `idle_ms`: the passes after it.
//! - `waiting_ms`: the same, while all marked items wait for gateways.
//! - `create_…`, `locate_…`, `…_per_second`: other calls, before, beside and after the passes.

use std::io::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

use artifact_store::{Config, KeySource};
use rpc::Peer;
use rpc::client::Outgoing;
use rpc::pb::artifacts as pb;
use rpc::token::TokenSigner;
use sea_orm::{ConnectionTrait, DatabaseConnection, DbBackend, Statement, TransactionTrait};
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use uuid::Uuid;

type Result<T> = std::result::Result<T, anyhow::Error>;

/// One in this many artifacts is in a lot.
const GARBAGE_IN: u64 = 100;
/// Number of artifacts of a build that were made together.
const TOGETHER: u64 = 10;
const BUILDS: u64 = 1000;
const WORKERS: u64 = 100;
/// Number of concurrent callers.
const CALLERS: usize = 16;

#[tokio::main]
async fn main() -> Result<()> {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let [url, artifacts] = &arguments[..] else { anyhow::bail!("usage: collection URL ARTIFACTS") };
    let artifacts: u64 = artifacts.parse()?;
    artifact_store::migrate(&url.as_str().into()).await?;
    let database = Database { connection: sea_orm::Database::connect(url).await?, artifacts };
    let filling = Instant::now();
    database.fill().await?;
    eprintln!("filled in {:?}", filling.elapsed());

    let by_row = database.row_by_row().await?;
    let same_by_row = database.same_row_by_row().await?;
    let floor = database.floor().await?;
    let store = Store::start(url).await?;
    let figures = measure(&store, &database).await?;
    store.stop().await?;
    let marks = artifacts / GARBAGE_IN;
    let said = format!(
        r#"{{"artifacts": {artifacts}, "marks": {marks}, "row_by_row_ms": {by_row:.1}, "same_row_by_row_ms": {same_by_row:.1}, "floor_ms": {floor:.1}, {figures}}}"#
    );
    writeln!(std::io::stdout(), "{said}")?;
    Ok(())
}

/// Artifacts that become garbage together, with their own builds.
#[derive(Debug, Clone, Copy)]
enum Lot {
    /// Evenly spread, in builds that own similar artifacts.
    Scattered,
    /// Of a tenth as many builds, each with artifacts that were made together.
    Alone,
    Beside,
    ByRow,
    Floor,
}

impl Lot {
    const ALL: [Self; 5] = [Self::Scattered, Self::Alone, Self::Beside, Self::ByRow, Self::Floor];

    /// Returns the kind of the ids of its builds.
    fn kind(self) -> u32 {
        0x10 + self as u32
    }

    /// Returns expressions for whether the artifact with the number `i` is in the lot, and for the
    /// number of its build.
    fn of_number(self) -> (String, String) {
        let block = format!("((i - 1) / {TOGETHER})");
        match self {
            // Between the blocks of the other lots.
            Self::Scattered => {
                (format!("i % {GARBAGE_IN} = 95"), format!("1 + (i / {GARBAGE_IN}) % {BUILDS}"))
            }
            lot => {
                (format!("{block} % {GARBAGE_IN} = {}", lot as u32), format!("1 + {block} / {GARBAGE_IN}"))
            }
        }
    }
}

/// Maximum number of marks in one answer of the store.
const MAX_NAMED: usize = 10_000;

/// Returns an id as an expression over a number.
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
const ATTEMPT: u32 = 4;
const SCRATCH: u32 = 5;
const LIVE: u32 = 8;

/// The database under test.
struct Database {
    connection: DatabaseConnection,
    artifacts: u64,
}

impl Database {
    fn backend(&self) -> DbBackend {
        self.connection.get_database_backend()
    }

    fn numbers(&self, count: u64) -> String {
        match self.backend() {
            DbBackend::Sqlite => {
                format!("WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {count})")
            }
            _ => format!("WITH n (i) AS (SELECT generate_series(1, {count}))"),
        }
    }

    async fn execute(&self, sql: &str) -> Result<()> {
        self.connection.execute_unprepared(sql).await?;
        Ok(())
    }

    async fn fill(&self) -> Result<()> {
        let (backend, artifacts) = (self.backend(), self.artifacts);
        let digest = match backend {
            DbBackend::Sqlite => "unhex(printf('%064x', i))",
            _ => "decode(lpad(to_hex(i), 64, '0'), 'hex')",
        };
        let of = |kind, number: &str| id(backend, kind, number);
        let (worker, artifact, volume) =
            (of(WORKER, "1 + (i * 37) % 100"), of(ARTIFACT, "i"), of(VOLUME, "i"));
        let worker = worker.replace("100", &WORKERS.to_string());
        let owner = Lot::ALL.into_iter().fold(String::new(), |cases, lot| {
            let (is_of_it, build) = lot.of_number();
            format!("{cases} WHEN {is_of_it} THEN {}", of(lot.kind(), &build))
        });
        let owner = format!("CASE {owner} ELSE {} END", of(LIVE, &format!("1 + i % {BUILDS}")));
        let new_build = "INSERT INTO builds (build_id, team, keep, bound, created_at)";
        let build = |kind, count| {
            format!(
                "{new_build} {} SELECT {}, 'main', 0, FALSE, 0 FROM n",
                self.numbers(count),
                of(kind, "i")
            )
        };
        let mut statements = vec![
            format!(
                "INSERT INTO workers {} SELECT {}, 1, 1, 1, 0 FROM n",
                self.numbers(WORKERS),
                of(WORKER, "i")
            ),
            build(LIVE, BUILDS),
        ];
        statements.extend(Lot::ALL.map(|lot| match lot {
            Lot::Scattered => build(lot.kind(), BUILDS),
            _ => build(lot.kind(), artifacts / GARBAGE_IN / TOGETHER + 1),
        }));
        let volume_columns = "handle, worker_id, state, purpose, artifact_id, attempt_id, name, complete, digest, size_bytes, verified,
                              created_at, judged_after";
        let attempts = artifacts / GARBAGE_IN / TOGETHER;
        statements.extend([
            format!(
                "INSERT INTO artifacts (artifact_id, ordinal, team, label, state, digest, size_bytes, had_owner, created_at)
                 {} SELECT {artifact}, {artifact}, 'main', '', 'sealed', {digest}, 1000, TRUE, 1 FROM n",
                self.numbers(artifacts),
            ),
            format!(
                "INSERT INTO volumes ({volume_columns})
                 {} SELECT {volume}, {worker}, 'created', 'replica', {artifact}, NULL, NULL, TRUE, {digest}, 1000, TRUE, 1, 0 FROM n",
                self.numbers(artifacts),
            ),
            format!("INSERT INTO owners (artifact_id, build_id) {} SELECT {artifact}, {owner} FROM n", self.numbers(artifacts)),
            format!(
                "INSERT INTO attempts (attempt_id, holder_id) {} SELECT {}, {} FROM n",
                self.numbers(attempts),
                of(ATTEMPT, "i"),
                of(ATTEMPT, "i"),
            ),
            format!(
                "INSERT INTO volumes ({volume_columns})
                 {} SELECT {}, {worker}, 'created', 'scratch', NULL, {}, 'scratch ' || i, FALSE, NULL, 0, FALSE, 1, 0 FROM n",
                self.numbers(attempts * TOGETHER),
                of(SCRATCH, "i"),
                of(ATTEMPT, &format!("1 + (i - 1) / {TOGETHER}")),
            ),
            // Marks row by row in a separate table: the orphans are the rows without an owner.
            format!(
                "CREATE TABLE by_row (handle {uuid} PRIMARY KEY, state TEXT NOT NULL, parent {uuid}, owner {uuid})",
                uuid = if backend == DbBackend::Sqlite { "BLOB" } else { "UUID" }
            ),
            format!(
                "INSERT INTO by_row {} SELECT {volume}, 'created', NULL, CASE WHEN {} THEN NULL ELSE {owner} END FROM n",
                self.numbers(artifacts),
                Lot::ByRow.of_number().0,
            ),
            "CREATE INDEX by_row_parent ON by_row (parent)".to_owned(),
            "CREATE INDEX by_row_owner ON by_row (owner)".to_owned(),
            "ANALYZE".to_owned(),
        ]);
        for statement in statements {
            self.execute(&statement).await?;
        }
        if backend == DbBackend::Postgres {
            self.execute("VACUUM").await?;
        }
        self.settle_down().await
    }

    /// Writes every page to the disk.
    async fn settle_down(&self) -> Result<()> {
        let sql = match self.backend() {
            DbBackend::Postgres => "CHECKPOINT",
            _ => "PRAGMA wal_checkpoint(TRUNCATE)",
        };
        self.execute(sql).await
    }

    /// Makes a lot garbage by ending its builds.
    async fn end(&self, lot: Lot) -> Result<()> {
        let (first, last) =
            (id(self.backend(), lot.kind(), "0"), id(self.backend(), lot.kind(), "1000000000"));
        let sql = format!(
            "UPDATE builds SET status = 'succeeded', ended_at = 1, kept_until = 1, due_at = 1
             WHERE build_id BETWEEN {first} AND {last}"
        );
        self.execute(&sql).await?;
        self.settle_down().await
    }

    /// Ends all attempts.
    async fn end_attempts(&self) -> Result<()> {
        self.execute("UPDATE attempts SET ended_at = 1, due_at = 1").await?;
        self.settle_down().await
    }

    /// Marks as many rows of a separate table, each with a statement and a transaction of its own.
    /// Returns milliseconds.
    async fn row_by_row(&self) -> Result<f64> {
        self.settle_down().await?;
        let begin = Instant::now();
        let orphans = "SELECT handle FROM by_row WHERE owner IS NULL AND state = 'created'";
        let mark =
            "UPDATE by_row SET state = 'destroying' WHERE handle = $1 AND state IN ('created', 'destroying')
                    AND NOT EXISTS (SELECT 1 FROM by_row child WHERE child.parent = by_row.handle)";
        self.for_each(orphans, &[mark]).await?;
        Ok(millis(begin.elapsed()))
    }

    /// Marks a lot of artifacts and their volumes, each with a statement and a transaction of its
    /// own. Returns milliseconds.
    async fn same_row_by_row(&self) -> Result<f64> {
        self.settle_down().await?;
        let begin = Instant::now();
        let (first, last) =
            (id(self.backend(), Lot::ByRow.kind(), "0"), id(self.backend(), Lot::ByRow.kind(), "1000000000"));
        let orphans =
            format!("SELECT artifact_id AS handle FROM owners WHERE build_id BETWEEN {first} AND {last}");
        let marks = [
            "UPDATE artifacts SET state = 'deleting', marked_at = 1, mark_reason = 'every owner of it has let go', due_at = NULL
             WHERE artifact_id = $1 AND state <> 'deleting'
               AND NOT EXISTS (SELECT 1 FROM pins WHERE pins.artifact_id = artifacts.artifact_id)",
            "UPDATE volumes SET state = 'destroying', judged_after = 1, marked_at = 1, mark_reason = 'its artifact is deleted', marked_from = state
             WHERE artifact_id = $1 AND state = 'created'
               AND NOT EXISTS (SELECT 1 FROM volumes child WHERE child.parent = volumes.handle)",
        ];
        self.for_each(&orphans, &marks).await?;
        Ok(millis(begin.elapsed()))
    }

    /// Runs each of `statements` separately for each `handle` that `query` yields.
    async fn for_each(&self, query: &str, statements: &[&str]) -> Result<()> {
        let backend = self.backend();
        for row in self.connection.query_all_raw(Statement::from_string(backend, query)).await? {
            let handle: Uuid = row.try_get("", "handle")?;
            for statement in statements {
                let statement = Statement::from_sql_and_values(backend, *statement, [handle.into()]);
                self.connection.execute_raw(statement).await?;
            }
        }
        Ok(())
    }

    /// Marks a lot and its volumes with as few statements as possible. Returns milliseconds.
    async fn floor(&self) -> Result<f64> {
        let backend = self.backend();
        let (is_of_it, _) = Lot::Floor.of_number();
        let lot = format!(
            "CREATE TABLE floor_lot AS {} SELECT {} AS artifact_id, {} AS handle FROM n WHERE {is_of_it}",
            self.numbers(self.artifacts),
            id(backend, ARTIFACT, "i"),
            id(backend, VOLUME, "i"),
        );
        // Without statistics, PostgreSQL uses an index for each row.
        for statement in
            [lot.as_str(), "CREATE UNIQUE INDEX floor_lot_by_artifact ON floor_lot (artifact_id)"]
        {
            self.execute(statement).await?;
        }
        self.settle_down().await?;
        let begin = Instant::now();
        let transaction = self.connection.begin().await?;
        if backend == DbBackend::Postgres {
            for way in ["hashjoin", "mergejoin", "seqscan"] {
                let sql = format!("SET LOCAL enable_{way} = off");
                transaction.execute_unprepared(&sql).await?;
            }
        }
        for statement in [
            "DELETE FROM owners WHERE artifact_id IN (SELECT artifact_id FROM floor_lot)",
            "UPDATE artifacts SET state = 'deleting', marked_at = 1, mark_reason = 'every owner of it has let go', due_at = NULL
             WHERE artifact_id IN (SELECT artifact_id FROM floor_lot)",
            "INSERT INTO tombstones (artifact_id, due_at) SELECT artifact_id, 9000000000000000 FROM floor_lot",
            "INSERT INTO sweep_queue (worker_id, handle, marked_at) SELECT worker_id, handle, 1 FROM volumes WHERE handle IN (SELECT handle FROM floor_lot)",
        ] {
            transaction.execute_unprepared(statement).await?;
        }
        transaction.commit().await?;
        let took = millis(begin.elapsed());
        self.execute("DROP TABLE floor_lot").await?;
        Ok(took)
    }
}

fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

/// Returns the quantile `part` of `figures`, in milliseconds.
fn quantile(figures: &mut [Duration], part: f64) -> f64 {
    figures.sort_unstable();
    let at = (figures.len() as f64 * part) as usize;
    figures.get(Ord::min(at, figures.len().saturating_sub(1))).map_or(0.0, |figure| millis(*figure))
}

/// A store that collects only on request.
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
        let listener = server::Listener::InsecureTcp(server::bind(([127, 0, 0, 1], 0).into())?);
        let endpoint = listener.endpoint()?;
        let (stop, stopped) = oneshot::channel();
        let shutdown = async { stopped.await.unwrap_or(()) };
        #[expect(clippy::disallowed_methods, reason = "it is waited for when the store stops")]
        let served = tokio::spawn(artifact_store::serve(config, listener, shutdown));
        Ok(Self { caller: Caller(rpc::client::peer(&endpoint, Outgoing::default())?), stop, served })
    }

    /// Returns the number of artifacts per second that `call` processes, with 16 callers, `calls`
    /// calls of each, and `each` of `ids` in a call.
    async fn rate<F>(
        &self,
        ids: &Arc<[Uuid]>,
        calls: usize,
        each: usize,
        call: impl Fn(Caller, Vec<Uuid>) -> F + Clone + Send + 'static,
    ) -> Result<f64>
    where
        F: Future<Output = Result<()>> + Send,
    {
        let mut callers = JoinSet::new();
        let begin = Instant::now();
        for n in 0..CALLERS {
            let (caller, call, ids) = (self.caller.clone(), call.clone(), ids.clone());
            callers.spawn(async move {
                for of_call in ids.chunks(each).skip(n * calls).take(calls) {
                    call(caller.clone(), of_call.to_vec()).await?;
                }
                Result::<()>::Ok(())
            });
        }
        while let Some(done) = callers.join_next().await {
            done??;
        }
        Ok((CALLERS * calls * each) as f64 / begin.elapsed().as_secs_f64())
    }

    /// Runs passes that find nothing to mark.
    async fn idle(&self) -> Result<Vec<Duration>> {
        let mut took = Vec::new();
        for _ in 0..20 {
            took.push(self.caller.collect().await?.0);
        }
        Ok(took)
    }

    async fn stop(self) -> Result<()> {
        self.stop.send(()).ok();
        self.served.await?
    }
}

/// A client of the store.
#[derive(Clone)]
struct Caller(Peer);

impl Caller {
    /// Runs a pass. Returns its duration, and the number of marked items.
    async fn collect(&self) -> Result<(Duration, usize)> {
        let mut client = pb::collector_client::CollectorClient::new(self.0.clone());
        let begin = Instant::now();
        let request = pb::CollectRequest { dry_run: pb::DryRun::Off.into(), ..pb::CollectRequest::default() };
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

    async fn batch_create(&self, ids: &[Uuid]) -> Result<()> {
        let mut client = pb::artifacts_client::ArtifactsClient::new(self.0.clone());
        let new = |id: &Uuid| pb::NewArtifact { artifact_id: id.to_string(), label: String::new() };
        let request = pb::BatchCreateArtifactsRequest {
            team: "main".to_owned(),
            build_id: id_of(LIVE, 1).to_string(),
            artifacts: ids.iter().map(new).collect(),
        };
        client.batch_create_artifacts(request).await?;
        Ok(())
    }

    /// Gives artifacts another owner.
    async fn add_owner(&self, ids: &[Uuid]) -> Result<()> {
        let mut client = pb::artifacts_client::ArtifactsClient::new(self.0.clone());
        let (team, build_id) = ("main".to_owned(), id_of(LIVE, 2).to_string());
        if let [id] = ids {
            let request = pb::AddOwnerRequest { team, artifact_id: id.to_string(), build_id };
            client.add_owner(request).await?;
        } else {
            let artifact_ids = ids.iter().map(Uuid::to_string).collect();
            client.batch_add_owner(pb::BatchAddOwnerRequest { team, artifact_ids, build_id }).await?;
        }
        Ok(())
    }

    /// Removes the owner again.
    async fn remove_owner(&self, ids: &[Uuid]) -> Result<()> {
        let mut client = pb::artifacts_client::ArtifactsClient::new(self.0.clone());
        let (team, build_id) = ("main".to_owned(), id_of(LIVE, 2).to_string());
        if let [id] = ids {
            let request = pb::RemoveOwnerRequest { team, artifact_id: id.to_string(), build_id };
            client.remove_owner(request).await?;
        } else {
            let artifact_ids = ids.iter().map(Uuid::to_string).collect();
            client.batch_remove_owner(pb::BatchRemoveOwnerRequest { team, artifact_ids, build_id }).await?;
        }
        Ok(())
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

async fn measure(store: &Store, database: &Database) -> Result<String> {
    let marks = usize::try_from(database.artifacts / GARBAGE_IN)?;
    let pass = async |most| {
        let (took, marked) = store.caller.collect().await?;
        anyhow::ensure!(marked == most, "{marked} things were marked instead of {most}");
        Result::<_>::Ok(millis(took))
    };
    // The first pass uses a newly started store, whose connections have planned nothing.
    let started = pass(0).await?;
    let mut idle = store.idle().await?;
    database.end(Lot::Alone).await?;
    let alone = pass(Ord::min(2 * marks, MAX_NAMED)).await?;
    database.end(Lot::Scattered).await?;
    let scattered = pass(Ord::min(2 * marks, MAX_NAMED)).await?;
    database.end_attempts().await?;
    let attempts = pass(Ord::min(marks, MAX_NAMED)).await?;

    for _ in 0..20 {
        store.caller.create().await?;
    }
    let mut quiet = Vec::new();
    for _ in 0..200 {
        quiet.push(store.caller.create().await?);
    }
    // One call after the other, as fast as they are answered, while the pass runs.
    database.end(Lot::Beside).await?;
    let mut beside = Vec::new();
    let marking = store.caller.collect();
    tokio::pin!(marking);
    let (marking, _) = loop {
        tokio::select! {
            done = &mut marking => break done?,
            created = store.caller.create() => beside.push(created?),
        }
    };
    // All marked items still exist, because no gateway sweeps here.
    let mut waiting = store.idle().await?;
    let mut locate = Vec::new();
    for n in 0..2000 {
        locate.push(store.caller.locate(n * 104_729, database.artifacts).await?);
    }
    let rates = rates(store).await?;
    let most = |figures: &[Duration]| figures.iter().max().copied().map_or(0.0, millis);
    Ok(format!(
        r#""alone_ms": {alone:.1}, "scattered_ms": {scattered:.1}, "attempts_ms": {attempts:.1}, "beside_ms": {:.1}, "started_ms": {started:.2}, "idle_ms": {:.2}, "idle_max_ms": {:.2}, "waiting_ms": {:.2}, "create_ms": {:.2}, "create_max_ms": {:.2}, "create_beside": {}, "create_beside_ms": {:.2}, "create_beside_max_ms": {:.2}, "locate_p50_ms": {:.2}, "locate_p99_ms": {:.2}, {rates}"#,
        millis(marking),
        quantile(&mut idle, 0.5),
        most(&idle),
        quantile(&mut waiting, 0.5),
        quantile(&mut quiet, 0.5),
        most(&quiet),
        beside.len(),
        quantile(&mut beside, 0.5),
        most(&beside),
        quantile(&mut locate, 0.5),
        quantile(&mut locate, 0.99),
    ))
}

/// Measures creations and changes of owners per second, with one and with many artifacts in a call.
async fn rates(store: &Store) -> Result<String> {
    const CALLS: usize = 200;
    const BATCHES: usize = 10;
    const EACH: usize = 100;
    let new = |count| (0..count).map(|_| Uuid::now_v7()).collect::<Arc<[Uuid]>>();
    let create = |caller: Caller, ids: Vec<Uuid>| async move {
        match ids[..] {
            [_] => caller.create().await.map(drop),
            _ => caller.batch_create(&ids).await,
        }
    };
    let one = store.rate(&new(CALLERS * CALLS), CALLS, 1, create).await?;
    let ids = new(CALLERS * BATCHES * EACH);
    let batched = store.rate(&ids, BATCHES, EACH, create).await?;
    let add = |caller: Caller, ids: Vec<Uuid>| async move { caller.add_owner(&ids).await };
    let remove = |caller: Caller, ids: Vec<Uuid>| async move { caller.remove_owner(&ids).await };
    let (add_one, remove_one) =
        (store.rate(&ids, CALLS, 1, add).await?, store.rate(&ids, CALLS, 1, remove).await?);
    let added = store.rate(&ids, BATCHES, EACH, add).await?;
    let removed = store.rate(&ids, BATCHES, EACH, remove).await?;
    Ok(format!(
        r#""batch": {EACH}, "creates_per_second": {one:.0}, "batched_creates_per_second": {batched:.0}, "adds_per_second": {add_one:.0}, "batched_adds_per_second": {added:.0}, "removes_per_second": {remove_one:.0}, "batched_removes_per_second": {removed:.0}"#
    ))
}
