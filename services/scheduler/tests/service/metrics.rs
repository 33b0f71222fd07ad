//! Tests of the metrics of a scheduler process.

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
use crate::support::{Gateway, Running, finish, registration, spec, until, within};

/// Scheduler process, started as by an operator. The process ends with the test.
struct Process {
    child: Child,
    directory: TempDir,
}

impl Drop for Process {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
        if std::thread::panicking() {
            eprintln!("{}", self.read_log());
        }
    }
}

impl Process {
    fn start() -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let path = |name: &str| directory.path().join(name).display().to_string();
        let mut command = Command::new(env!("CARGO_BIN_EXE_scheduler"));
        // The test's seeds are removed from the environment because the scheduler rejects unknown
        // settings.
        let variables = std::env::vars_os().map(|(name, _)| name);
        variables.filter(|name| name.to_string_lossy().starts_with("GANTRY_")).for_each(|name| {
            command.env_remove(name);
        });
        let child = command
            // Without a token file, the metrics are public.
            .env("XDG_STATE_HOME", directory.path())
            .args(["--listen", &path("socket"), "--metrics-listen", "127.0.0.1:0", "--log", "info"])
            .args(["--database-url", &format!("sqlite://{}", path("database"))])
            .args(["--artifact-store", "http://127.0.0.1:9", "--poll-interval", "100ms"])
            // No worker stalls during the test.
            .args(["--worker-ttl", "1h", "--stop-after", "2h", "--lost-after", "3h"])
            .stderr(File::create(path("log")).expect("a log"))
            .stdin(Stdio::null())
            .spawn()
            .expect("a process");
        Self { child, directory }
    }

    fn read_log(&self) -> String {
        std::fs::read_to_string(self.directory.path().join("log")).unwrap_or_default()
    }

    async fn running(&self) -> Running {
        Running::connect(format!("unix://{}", self.directory.path().join("socket").display())).await
    }

    /// Returns the address of the metrics endpoint.
    async fn metrics(&self) -> String {
        until("the metrics endpoint", async || {
            let log = self.read_log();
            let line = log.lines().find(|line| line.contains("metrics endpoint="))?;
            line.rsplit_once("endpoint=").map(|(_, address)| address.trim().to_owned())
        })
        .await
    }
}

/// Values of a metric by label set.
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

/// Reads the metric `gantry_scheduler_<name>`.
async fn values(address: &str, name: &str) -> Values {
    let page = page(address).await;
    let lines = page.lines().filter_map(|line| line.strip_prefix("gantry_scheduler_")?.strip_prefix(name));
    let lines = lines.filter(|rest| rest.starts_with(['{', ' ']));
    let values = lines.map(|rest| {
        let (labels, value) = rest.rsplit_once(' ').expect("a value");
        (labels.trim_matches(['{', '}']).to_owned(), value.parse().expect("a number"))
    });
    values.collect()
}

/// Returns the values that are greater than 0.
fn counted(values: &Values) -> Vec<(&str, f64)> {
    let counted = values.iter().filter(|(_, value)| **value > 0.0);
    counted.map(|(labels, value)| (labels.as_str(), *value)).collect()
}

/// Worker that accepts only requests with its tag.
fn tagged(name: &str, max_tasks: u32) -> pb::Registration {
    let mut registration = untagged(name);
    registration.labels.as_mut().expect("labels").tags = vec![name.to_owned()];
    registration.capacity.as_mut().expect("a capacity").max_tasks = max_tasks;
    registration
}

fn untagged(name: &str) -> pb::Registration {
    pb::Registration {
        capacity: Some(pb::Capacity { max_tasks: 9, ..pb::Capacity::default() }),
        ..registration(name)
    }
}

/// Spec for the workers with this tag. An empty tag selects workers without tags.
fn of(team: &str, tag: &str) -> pb::WorkloadSpec {
    let tags = Some(tag).filter(|tag| !tag.is_empty()).map(str::to_owned).into_iter().collect();
    pb::WorkloadSpec { team: team.to_owned(), tags, ..spec() }
}

#[tokio::test]
async fn metrics_count_queue_placements_and_refusals() {
    let started = Instant::now();
    let process = Process::start();
    let scheduler = process.running().await;
    let metrics = process.metrics().await;
    let placements = values(&metrics, "placements_total").await;
    assert!(placements.len() > 5 && counted(&placements).is_empty(), "{placements:?}");
    let refusals = values(&metrics, "refusals_total").await;
    assert!(refusals.len() > 20 && counted(&refusals).is_empty(), "{refusals:?}");

    let connect = async |registration| Gateway::connect(&scheduler, registration).await.expect("welcome");
    let mut full = connect(tagged("full", 1)).await;
    let silent = connect(tagged("silent", 1)).await;
    let (mut one, _other) = (connect(untagged("one")).await, connect(untagged("other")).await);

    // Each placement is counted under the strategy that decided.
    let first = scheduler.submit(of("alpha", "full")).await.expect("accepted");
    let (_, run) = full.run(first).await;
    for _ in 0..2 {
        scheduler.submit(of("alpha", "")).await.expect("the other worker is next");
    }
    let preferred = pb::PlaceRequest { prefer_workers: vec![one.welcome.worker_id.clone()], ..task() };
    let near = pb::PlaceRequest { same_worker_as_lease_id: preferred.lease_id.clone(), ..task() };
    for request in [preferred, near] {
        assert_eq!(place(&scheduler, request).await.expect("granted").worker_name, "one");
    }
    let placements = until("all placements are counted", async || {
        let placements = values(&metrics, "placements_total").await;
        (placements.values().sum::<f64>() >= 5.0).then_some(placements)
    })
    .await;
    let expected = ["asked-for", "limit-active-tasks", "lot", "only", "preference"];
    let expected = expected.map(|by| (format!("decided_by=\"{by}\""), 1.0));
    assert_eq!(counted(&placements), expected.each_ref().map(|(by, count)| (by.as_str(), *count)));

    // Two teams wait. One team waits for two reasons.
    silent.leave().await;
    until("the worker is out of contact", async || {
        let explained = explain_spec(&scheduler, of("beta", "silent")).await;
        (explained.verdict() == pb::Verdict::NotNow).then_some(())
    })
    .await;
    let began = Instant::now();
    // Requests of one team with the same reason are counted together, even if they differ.
    let requests = Some(pb::ResourceRequests { memory_bytes: 1, ..pb::ResourceRequests::default() });
    let more = pb::WorkloadSpec { requests, ..of("alpha", "full") };
    for spec in [of("alpha", "full"), of("beta", "silent"), more, of("beta", "full")] {
        scheduler.submit(spec).await.expect("queued");
    }
    let labels = |team: &str, reason: &str| format!("team=\"{team}\",reason=\"{reason}\"");
    let waiting = async |expected: &[(String, f64)]| {
        until(&format!("{expected:?}"), async || {
            let waiting = values(&metrics, "queue_length").await;
            let matches =
                counted(&waiting).into_iter().eq(expected.iter().map(|(of, count)| (of.as_str(), *count)));
            matches.then_some(waiting)
        })
        .await
    };
    let [alpha, beta, out_of_contact] =
        [("alpha", "FULL"), ("beta", "FULL"), ("beta", "STALLED")].map(|(team, reason)| labels(team, reason));
    waiting(&[(alpha.clone(), 2.0), (beta.clone(), 1.0), (out_of_contact.clone(), 1.0)]).await;
    let oldest = values(&metrics, "queue_oldest_seconds").await;
    assert!(oldest[&alpha] > oldest[&out_of_contact], "the first request is the oldest: {oldest:?}");
    assert!(
        oldest[&out_of_contact] > oldest[&beta] && oldest[&beta] > 0.0,
        "the last request is the youngest: {oldest:?}"
    );
    assert!(oldest[&alpha] <= began.elapsed().as_secs_f64(), "{oldest:?}");

    // A request that is not placed immediately counts once per reason, regardless of the number of
    // workers.
    for _ in 0..2 {
        let request = pb::PlaceRequest { platform: "darwin".to_owned(), ..task() };
        assert!(refused(&scheduler, request).await.is(Reason::NoCompatibleWorker));
    }
    let refusals = values(&metrics, "refusals_total").await;
    let expected = [("FULL", 3.0), ("MISSING_TAGS", 4.0), ("PLATFORM", 2.0), ("STALLED", 1.0)];
    let expected = expected.map(|(code, count)| (format!("reason=\"{code}\""), count));
    assert_eq!(counted(&refusals), expected.each_ref().map(|(code, count)| (code.as_str(), *count)));

    // The gauge of a team without waiting requests is 0. The team with the fewest used slots is
    // placed first.
    finish(&scheduler, &run.lease_token, 0).await.expect("finished");
    full.run_any().await;
    let lengths = waiting(&[(alpha.clone(), 2.0), (out_of_contact, 1.0)]).await;
    assert_eq!(lengths[&beta], 0.0);
    assert_eq!(values(&metrics, "queue_oldest_seconds").await[&beta], 0.0);

    let count = async || values(&metrics, "synchronize_lag_seconds_count").await[""];
    let before = count().await;
    scheduler.cordon("one", None).await.expect("accepted");
    within("the directive", async {
        while one.desired.directive() != pb::Directive::Cordon {
            one.next().await.expect("the stream is open");
        }
    })
    .await;
    until("the lag is counted", async || (count().await > before).then_some(())).await;
    let lag = values(&metrics, "synchronize_lag_seconds_sum").await[""];
    assert!(lag > 0.0 && lag <= count().await * started.elapsed().as_secs_f64(), "{lag}");
    scheduler.stop().await;
}
