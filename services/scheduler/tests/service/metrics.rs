//! What operators read at `/metrics`: of a process of its own, for all schedulers of one count together.

use std::collections::BTreeMap;
use std::fs::File;
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use rpc::Reason;
use rpc::pb::scheduler as pb;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::explain::explain_spec;
use crate::leases::{refused, task};
use crate::places::place;
use crate::support::{Gateway, Running, finish, hello, spec, until, within};

/// A scheduler that was started as operators start it. Ends with the test.
struct Process {
    child: Child,
    directory: TempDir,
}

impl Drop for Process {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
        if std::thread::panicking() {
            eprintln!("{}", self.said());
        }
    }
}

impl Process {
    fn start() -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let path = |name: &str| directory.path().join(name).display().to_string();
        let mut command = Command::new(env!("CARGO_BIN_EXE_scheduler"));
        // Seeds are settings of tests, and none of a scheduler, which refuses what it does not know.
        let ours = std::env::vars_os().map(|(name, _)| name);
        ours.filter(|name| name.to_string_lossy().starts_with("GANTRY_")).for_each(|name| {
            command.env_remove(name);
        });
        let child = command
            // There is no token file, so metrics are for everybody.
            .env("XDG_STATE_HOME", directory.path())
            .args(["--listen", &path("socket"), "--metrics-listen", "127.0.0.1:0", "--log", "info"])
            .args(["--database-url", &format!("sqlite://{}", path("database"))])
            .args(["--artifact-store", "http://127.0.0.1:9", "--poll-interval", "100ms"])
            // Nobody is silent for so long.
            .args(["--worker-ttl", "1h", "--stop-after", "2h", "--lost-after", "3h"])
            .stderr(File::create(path("log")).expect("a log"))
            .stdin(Stdio::null())
            .spawn()
            .expect("it starts");
        Self { child, directory }
    }

    fn said(&self) -> String {
        std::fs::read_to_string(self.directory.path().join("log")).unwrap_or_default()
    }

    async fn running(&self) -> Running {
        Running::at(format!("unix://{}", self.directory.path().join("socket").display())).await
    }

    /// Where its metrics are.
    async fn metrics(&self) -> String {
        until("it says where its metrics are", async || {
            let said = self.said();
            let line = said.lines().find(|line| line.contains("metrics endpoint="))?;
            line.rsplit_once("endpoint=").map(|(_, address)| address.trim().to_owned())
        })
        .await
    }
}

/// All values of a metric, by its labels.
type Values = BTreeMap<String, f64>;

async fn page(address: &str) -> String {
    let read = async {
        let mut stream = TcpStream::connect(address).await?;
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: it\r\nConnection: close\r\n\r\n").await?;
        let mut page = String::new();
        stream.read_to_string(&mut page).await?;
        Ok::<_, std::io::Error>(page)
    };
    within("the metrics", read).await.expect("a page")
}

/// `gantry_scheduler_` goes before the name.
async fn values(address: &str, name: &str) -> Values {
    let page = page(address).await;
    let of_it = page.lines().filter_map(|line| line.strip_prefix("gantry_scheduler_")?.strip_prefix(name));
    let of_it = of_it.filter(|rest| rest.starts_with(['{', ' ']));
    let values = of_it.map(|rest| {
        let (labels, value) = rest.rsplit_once(' ').expect("a value");
        (labels.trim_matches(['{', '}']).to_owned(), value.parse().expect("a number"))
    });
    values.collect()
}

/// Those that are not 0.
fn counted(values: &Values) -> Vec<(&str, f64)> {
    let counted = values.iter().filter(|(_, value)| **value > 0.0);
    counted.map(|(labels, value)| (labels.as_str(), *value)).collect()
}

/// A worker that takes only what asks for its tag.
fn tagged(name: &str, max_tasks: u32) -> pb::Hello {
    let mut hello = untagged(name);
    hello.labels.as_mut().expect("labels").tags = vec![name.to_owned()];
    hello.capacity.as_mut().expect("its capacity").max_tasks = max_tasks;
    hello
}

fn untagged(name: &str) -> pb::Hello {
    pb::Hello { capacity: Some(pb::Capacity { max_tasks: 9, ..pb::Capacity::default() }), ..hello(name) }
}

/// For the worker that has this tag. Empty: for those that have none.
fn of(team: &str, tag: &str) -> pb::WorkloadSpec {
    let tags = Some(tag).filter(|tag| !tag.is_empty()).map(str::to_owned).into_iter().collect();
    pb::WorkloadSpec { team: team.to_owned(), tags, ..spec() }
}

#[tokio::test]
async fn what_waits_and_what_was_decided_is_counted() {
    let started = Instant::now();
    let process = Process::start();
    let scheduler = process.running().await;
    let metrics = process.metrics().await;
    let placements = values(&metrics, "placements_total").await;
    assert!(placements.len() > 5 && counted(&placements).is_empty(), "{placements:?}");
    let refusals = values(&metrics, "refusals_total").await;
    assert!(refusals.len() > 20 && counted(&refusals).is_empty(), "{refusals:?}");

    let connect = async |hello| Gateway::connect(&scheduler, hello).await.expect("welcome");
    let mut full = connect(tagged("full", 1)).await;
    let silent = connect(tagged("silent", 1)).await;
    let (mut one, _other) = (connect(untagged("one")).await, connect(untagged("other")).await);

    // By what each was decided.
    let first = scheduler.submit(of("alpha", "full")).await.expect("accepted");
    let (_, run) = full.run(first).await;
    for _ in 0..2 {
        scheduler.submit(of("alpha", "")).await.expect("the other one comes second");
    }
    let preferred = pb::PlaceRequest { prefer_workers: vec![one.welcome.worker_id.clone()], ..task() };
    let near = pb::PlaceRequest { same_worker_as: preferred.lease_id.clone(), ..task() };
    for asked in [preferred, near] {
        assert_eq!(place(&scheduler, asked).await.expect("granted").worker_name, "one");
    }
    let placements = until("all are counted", async || {
        let placements = values(&metrics, "placements_total").await;
        (placements.values().sum::<f64>() >= 5.0).then_some(placements)
    })
    .await;
    let expected = ["asked-for", "limit-active-tasks", "lot", "only", "preference"];
    let expected = expected.map(|by| (format!("decided_by=\"{by}\""), 1.0));
    assert_eq!(counted(&placements), expected.each_ref().map(|(by, count)| (by.as_str(), *count)));

    // Two teams wait, one of them for two reasons.
    silent.leave().await;
    until("it is out of contact", async || {
        let explained = explain_spec(&scheduler, of("beta", "silent")).await;
        (explained.verdict() == pb::Verdict::NotNow).then_some(())
    })
    .await;
    let began = Instant::now();
    // Those of one team that wait for one reason need not ask for the same.
    let requests = Some(pb::ResourceRequests { memory_bytes: 1, ..pb::ResourceRequests::default() });
    let more = pb::WorkloadSpec { requests, ..of("alpha", "full") };
    for spec in [of("alpha", "full"), of("beta", "silent"), more, of("beta", "full")] {
        scheduler.submit(spec).await.expect("queued");
    }
    let labels = |team: &str, reason: &str| format!("team=\"{team}\",reason=\"{reason}\"");
    let waiting = async |expected: &[(String, f64)]| {
        until(&format!("{expected:?}"), async || {
            let waiting = values(&metrics, "queue_length").await;
            let is_so =
                counted(&waiting).into_iter().eq(expected.iter().map(|(of, count)| (of.as_str(), *count)));
            is_so.then_some(waiting)
        })
        .await
    };
    let [alpha, beta, out_of_contact] =
        [("alpha", "FULL"), ("beta", "FULL"), ("beta", "STALLED")].map(|(team, reason)| labels(team, reason));
    waiting(&[(alpha.clone(), 2.0), (beta.clone(), 1.0), (out_of_contact.clone(), 1.0)]).await;
    let oldest = values(&metrics, "queue_oldest_seconds").await;
    assert!(oldest[&alpha] > oldest[&out_of_contact], "it came first: {oldest:?}");
    assert!(oldest[&out_of_contact] > oldest[&beta] && oldest[&beta] > 0.0, "it came last: {oldest:?}");
    assert!(oldest[&alpha] <= began.elapsed().as_secs_f64(), "{oldest:?}");

    // Each that was not placed at once counts for each reason once, however many workers have it.
    for _ in 0..2 {
        let asked = pb::PlaceRequest { platform: "darwin".to_owned(), ..task() };
        assert!(refused(&scheduler, asked).await.is(Reason::NoCompatibleWorker));
    }
    let refusals = values(&metrics, "refusals_total").await;
    let expected = [("FULL", 3.0), ("MISSING_TAGS", 4.0), ("PLATFORM", 2.0), ("STALLED", 1.0)];
    let expected = expected.map(|(code, count)| (format!("reason=\"{code}\""), count));
    assert_eq!(counted(&refusals), expected.each_ref().map(|(code, count)| (code.as_str(), *count)));

    // What waits no more is shown as 0. Whose team holds the fewest slots is first.
    finish(&scheduler, &run.lease_token, 0).await.expect("finished");
    full.run_any().await;
    let waits = waiting(&[(alpha.clone(), 2.0), (out_of_contact, 1.0)]).await;
    assert_eq!(waits[&beta], 0.0);
    assert_eq!(values(&metrics, "queue_oldest_seconds").await[&beta], 0.0);

    let told = async || values(&metrics, "synchronize_lag_seconds_count").await[""];
    let before = told().await;
    scheduler.land("one", None).await.expect("told");
    within("it hears", async {
        while one.desired.directive() != pb::Directive::Cordon {
            one.next().await.expect("the stream is open");
        }
    })
    .await;
    until("it is counted", async || (told().await > before).then_some(())).await;
    let lag = values(&metrics, "synchronize_lag_seconds_sum").await[""];
    assert!(lag > 0.0 && lag <= told().await * started.elapsed().as_secs_f64(), "{lag}");
    scheduler.stop().await;
}
