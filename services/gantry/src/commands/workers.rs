//! `gantry cordon`, `uncordon`, `retire` and `prune`: taking workers out of service, and putting
//! them back.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use anyhow::bail;
use futures::{Stream, TryStreamExt};
use rpc::Reason;
use rpc::pb::scheduler::{
    CordonWorkerRequest, DesiredWorkerState, ListRequest, PruneWorkerRequest, PruneWorkerResponse,
    PrunedWorkload, RetireWorkerRequest, UncordonWorkerRequest, Worker, WorkerState, Workload, WorkloadState,
};
use rpc::pb::streamer::Evacuated;

use crate::cli::args::{CordonArgs, RetireArgs, UncordonArgs};
use crate::client::connect::{Connection, Service};
use crate::client::queries::{self, pages};
use crate::ending::error::{refusal, with_advice};
use crate::render::json;
use crate::render::labels;
use crate::render::labels::command;
use crate::render::stdout::{print, print_json};
use crate::render::table::{bytes, count, duration, plain};
use crate::render::ui::Ui;
use crate::transfer::evacuate::Evacuation;

/// Interval between two polls of a worker that is drained.
const POLL_INTERVAL: Duration = Duration::from_millis(300);

/// Time for interrupted workloads to end after the deadline.
const DRAIN_GRACE: Duration = Duration::from_secs(10);

/// Longest time between two heartbeats of a worker in contact, with the default settings: two of
/// them.
const LONGEST_SILENCE: Duration = Duration::from_secs(10);

/// Maximum number of workloads, artifacts or workers that a message names.
const NAMED_LIMIT: usize = 5;

/// Executes `gantry cordon`.
pub(crate) async fn cordon(
    connection: &Connection,
    ui: &Ui,
    args: &CordonArgs,
    as_json: bool,
) -> anyhow::Result<()> {
    let until = args.wait.deadline.map(|deadline| Instant::now() + deadline);
    // All of them are cordoned first, so that none gets the work and the artifacts of another one.
    let mut cordoned = Vec::new();
    for worker in &args.workers {
        cordoned.push((worker, cordon_worker(connection, worker, args.wait.deadline).await?));
    }
    let mut not_safe = Vec::new();
    for (name, cordoned) in cordoned {
        if let Some(cordoned) = cordoned.as_ref().filter(|_| args.wait.evacuate) {
            let left = evacuate(connection, ui, cordoned, until).await?;
            not_safe.extend(safe_to_stop(cordoned, &left, as_json)?);
            continue;
        }
        let drained = match cordoned {
            Some(cordoned) if !args.wait.no_wait => {
                DrainWait { connection, ui, seen: None }
                    .wait_until(cordoned, |worker| worker.drained_at.is_some())
                    .await?
            }
            cordoned => cordoned,
        };
        // The worker existed a moment ago, and may have been removed since.
        answer(name, drained.as_ref(), "removed", as_json)?;
    }
    if not_safe.is_empty() { Ok(()) } else { bail!(not_safe.join("\n")) }
}

async fn cordon_worker(
    connection: &Connection,
    worker: &str,
    deadline: Option<Duration>,
) -> anyhow::Result<Option<Worker>> {
    let interrupt_after = deadline.map(rpc::duration);
    let request = CordonWorkerRequest { worker: worker.to_owned(), interrupt_after };
    let client = connection.workers();
    let doing = format!("cannot cordon worker {worker}");
    let cordoned = connection
        .repeat(Service::Scheduler, &doing, async || client.clone().cordon_worker(request.clone()).await)
        .await?;
    Ok(cordoned.worker)
}

/// What is left on a worker after its evacuation.
struct LeftOnWorker {
    evacuated: Evacuated,
    is_drained: bool,
    /// All workers of the cluster after the evacuation.
    workers: Vec<Worker>,
}

/// Copies artifacts whose only replicas are on this worker, while it is drained and after that.
async fn evacuate(
    connection: &Connection,
    ui: &Ui,
    cordoned: &Worker,
    until: Option<Instant>,
) -> anyhow::Result<LeftOnWorker> {
    let printed = HashSet::new();
    let mut evacuation = Evacuation { connection, ui, worker: cordoned, deadline: until, printed };
    // What exists is copied while workloads end. They may leave outputs.
    let drain = DrainWait { connection, ui, seen: None };
    let drained = async {
        drain.wait_until(cordoned.clone(), |worker| worker.drained_at.is_some()).await?;
        wait_until_settled(connection).await
    };
    let (_, is_drained) = tokio::try_join!(evacuation.run(), async {
        match until {
            Some(until) => match tokio::time::timeout_at((until + DRAIN_GRACE).into(), drained).await {
                Ok(drained) => drained.map(|()| true),
                Err(_) => Ok(false),
            },
            None => drained.await.map(|()| true),
        }
    })?;
    let evacuated = evacuation.run().await?;
    let workers = queries::workers(connection).try_collect().await?;
    Ok(LeftOnWorker { evacuated, is_drained, workers })
}

/// Prints whether a cordoned worker may be stopped. Returns why it may not.
fn safe_to_stop(worker: &Worker, left: &LeftOnWorker, as_json: bool) -> anyhow::Result<Option<String>> {
    let not_safe = why_not_safe(worker, left);
    if as_json {
        let artifacts: Vec<_> = left.evacuated.at_risk.iter().map(json::artifact).collect();
        print_json(&serde_json::json!({
            "name": worker.name,
            "safe_to_stop": not_safe.is_none(),
            "at_risk": artifacts,
        }))?;
    } else if not_safe.is_none() {
        print(&format!("worker {}: safe to stop\n", plain(&worker.name, 255)))?;
    }
    Ok(not_safe)
}

/// Waits until the outputs of all workloads that have just ended are in the artifact store.
async fn wait_until_settled(connection: &Connection) -> anyhow::Result<()> {
    let settling = async || {
        let all = workloads_of_all_teams(connection, WorkloadState::Settling);
        let ids = all.map_ok(|workload| workload.workload_id);
        ids.try_collect::<HashSet<_>>().await
    };
    let mut waiting = settling().await?;
    while !waiting.is_empty() {
        tokio::time::sleep(POLL_INTERVAL).await;
        let still = settling().await?;
        waiting.retain(|id| still.contains(id));
    }
    Ok(())
}

/// Says why a cordoned worker may not be stopped. `None`: it may be stopped.
fn why_not_safe(worker: &Worker, left: &LeftOnWorker) -> Option<String> {
    let (name, LeftOnWorker { evacuated, is_drained, workers }) = (plain(&worker.name, 255), left);
    let not_safe = format!("worker {name} is not safe to stop");
    if !is_drained {
        let now = workers.iter().find(|other| other.worker_id == worker.worker_id);
        return Some(match now.and_then(silence) {
            Some(silence) => format!(
                "{not_safe}: it has been silent for {}, and workloads may still run on it; start its gateway, or use \
                 `gantry prune {name}` if its machine is gone",
                duration(silence)
            ),
            None => {
                format!("{not_safe}: workloads still run on it, or their outputs are not stored yet")
            }
        });
    }
    if evacuated.nothing_at_risk {
        return None;
    }
    let totals = evacuated.progress.clone().unwrap_or_default();
    let mut text = format!(
        "{not_safe}: of the workers in service, it has the only replicas of {}, {}{}",
        count(totals.artifacts_at_risk, "artifact"),
        bytes(totals.bytes_at_risk),
        without_destination(worker, workers)
    );
    let named = evacuated.at_risk.iter().take(NAMED_LIMIT);
    let others = totals.artifacts_at_risk.saturating_sub(named.len() as u64);
    for artifact in named {
        let keeper = artifact.kept_by.first().map_or("nothing keeps it", |keeper| keeper.as_str());
        text.push_str(&format!(
            "\n  {} {}, {}: {}",
            artifact.artifact_id,
            plain(&artifact.label, 40),
            bytes(artifact.size_bytes),
            plain(keeper, 80)
        ));
    }
    if others > 0 {
        text.push_str(&format!(
            "\n  and {others} more: `gantry list artifacts --at-risk` lists those of a team"
        ));
    }
    Some(text)
}

/// Returns how long a worker has been silent, if that is longer than a worker in contact is.
fn silence(worker: &Worker) -> Option<Duration> {
    let silence = labels::since(worker.last_contact_at.as_ref()?);
    (worker.state() != WorkerState::Running || silence > LONGEST_SILENCE).then_some(silence)
}

/// Says that no other worker is in service. Empty: there is one.
fn without_destination(worker: &Worker, workers: &[Worker]) -> String {
    let others = || workers.iter().filter(|other| other.worker_id != worker.worker_id);
    if others().any(queries::is_reliable) {
        return String::new();
    }
    let named = others().take(NAMED_LIMIT);
    let named = named.map(|other| format!("{} is {}", plain(&other.name, 255), labels::standing(other)));
    match named.collect::<Vec<_>>().join("; ") {
        none if none.is_empty() => ". There is no other worker".to_owned(),
        some => format!(". No other worker is in service: {some}"),
    }
}

/// Executes `gantry uncordon`.
pub(crate) async fn uncordon(
    connection: &Connection,
    args: &UncordonArgs,
    as_json: bool,
) -> anyhow::Result<()> {
    for worker in &args.workers {
        let request = UncordonWorkerRequest { worker: worker.clone() };
        let client = connection.workers();
        let doing = format!("cannot uncordon worker {worker}");
        let running = connection
            .repeat(Service::Scheduler, &doing, async || {
                client.clone().uncordon_worker(request.clone()).await
            })
            .await?
            .worker;
        answer(worker, running.as_ref(), "may register again", as_json)?;
    }
    Ok(())
}

/// Executes `gantry retire`.
pub(crate) async fn retire(
    connection: &Connection,
    ui: &Ui,
    args: &RetireArgs,
    as_json: bool,
) -> anyhow::Result<()> {
    if args.wait.evacuate {
        let until = args.wait.deadline.map(|deadline| Instant::now() + deadline);
        // A worker with last replicas can be cordoned, but not retired.
        let evacuating = match queries::worker(connection, "retire", &args.worker).await?.desired() {
            DesiredWorkerState::Retire => retire_worker(connection, args).await?,
            _ => cordon_worker(connection, &args.worker, args.wait.deadline).await?,
        };
        if let Some(evacuating) = evacuating {
            match evacuate(connection, ui, &evacuating, until).await {
                Ok(left) => {
                    if let Some(not_safe) = why_not_safe(&evacuating, &left) {
                        bail!(not_safe);
                    }
                }
                // A retiring worker is removed as soon as it is empty.
                Err(error) if is_removed(&error) => {}
                Err(error) => return Err(error),
            }
        }
    }
    let left = match retire_worker(connection, args).await? {
        Some(retiring) if !args.wait.no_wait => {
            let left = DrainWait { connection, ui, seen: None }
                .wait_until(retiring, |worker| !worker.blocked_by.is_empty());
            left.await?
        }
        retiring => retiring,
    };
    if let Some(held_up) = left.as_ref().filter(|left| !left.blocked_by.is_empty()) {
        bail!(
            "worker {name} is drained but cannot be removed: {}; `gantry retire {name} --evacuate` copies artifacts to \
             other workers, and --force gives up what only this worker has",
            held_up.blocked_by,
            name = plain(&held_up.name, 255)
        );
    }
    answer(&args.worker, left.as_ref(), "removed", as_json)
}

async fn retire_worker(connection: &Connection, args: &RetireArgs) -> anyhow::Result<Option<Worker>> {
    let RetireArgs { worker, force, wait } = args;
    let interrupt_after = wait.deadline.map(rpc::duration);
    let request = RetireWorkerRequest { worker: worker.clone(), interrupt_after, force: *force };
    let client = connection.workers();
    let retired = connection
        .repeat(Service::Scheduler, &format!("cannot retire worker {worker}"), async || {
            client.clone().retire_worker(request.clone()).await
        })
        .await
        .map_err(|error| match refusal(&error) {
            Some(refused) if refused.is(Reason::LastReplica) => {
                let advice = format!(
                    "`gantry retire {worker} --evacuate` copies them to other workers, and --force gives them up"
                );
                with_advice(error, advice)
            }
            _ => error,
        })?;
    Ok(retired.worker)
}

/// Returns whether a call failed because the worker does not exist any more.
fn is_removed(error: &anyhow::Error) -> bool {
    refusal(error).is_some_and(|refused| refused.is(Reason::WorkerNotFound))
}

/// Executes `gantry prune`.
pub(crate) async fn prune(
    connection: &Connection,
    worker: &str,
    force: bool,
    as_json: bool,
) -> anyhow::Result<()> {
    let request = PruneWorkerRequest { worker: worker.to_owned(), force };
    let client = connection.workers();
    let doing = format!("cannot prune worker {worker}");
    let pruned = connection
        .repeat(Service::Scheduler, &doing, async || client.clone().prune_worker(request.clone()).await)
        .await
        .map_err(|error| match refusal(&error) {
            Some(refused) if refused.is(Reason::LastReplica) => with_advice(
                error,
                format!(
                    "start its gateway and use `gantry retire {worker} --evacuate`, or give them up with --force"
                ),
            ),
            _ => error,
        })?;
    if as_json {
        let workload =
            |of: &PrunedWorkload| serde_json::json!({ "team": of.team, "workload_id": of.workload_id });
        let workloads: Vec<_> = pruned.workloads.iter().map(workload).collect();
        let gone = serde_json::json!({ "name": worker, "gone": true, "leases": pruned.leases, "workloads": workloads });
        return print_json(&gone);
    }
    answer(worker, None, "removed", as_json)?;
    print(&describe_ended_leases(&pruned))
}

/// Maximum number of workloads in the response to PruneWorker.
const LISTED_LIMIT: usize = 1000;

/// Describes the leases and workloads that ended because a worker was pruned. Empty: there were
/// none.
fn describe_ended_leases(pruned: &PruneWorkerResponse) -> String {
    let PruneWorkerResponse { leases, workloads } = pruned;
    if *leases == 0 {
        return String::new();
    }
    let mut text = format!("{} ended", count(*leases, "lease"));
    if !workloads.is_empty() {
        let at_least = if workloads.len() < LISTED_LIMIT { "" } else { "at least " };
        text.push_str(&format!(
            ", {at_least}{} of them of workloads, which fail or start again on another worker",
            workloads.len()
        ));
    }
    text.push('\n');
    for PrunedWorkload { team, workload_id } in workloads.iter().take(NAMED_LIMIT) {
        text.push_str(&format!("  {workload_id} of team {}\n", plain(team, 255)));
    }
    if workloads.len() > NAMED_LIMIT {
        text.push_str(&format!("  and {} more\n", workloads.len() - NAMED_LIMIT));
    }
    text
}

/// Prints the state of a worker. `gone` is the text for a worker that does not exist.
fn answer(name: &str, worker: Option<&Worker>, gone: &str, as_json: bool) -> anyhow::Result<()> {
    match (worker, as_json) {
        (Some(worker), true) => print_json(&json::worker(worker)),
        (None, true) => print_json(&serde_json::json!({ "name": name, "gone": true })),
        (Some(worker), false) => {
            let interrupts = interrupts(worker);
            let standing = labels::standing(worker);
            print(&format!("worker {}: {standing}{interrupts}\n", plain(&worker.name, 255)))
        }
        (None, false) => print(&format!("worker {}: {gone}\n", plain(name, 255))),
    }
}

/// Says from when on leases of a worker are interrupted. Empty: they are not.
fn interrupts(worker: &Worker) -> String {
    let at = worker.interrupt_at.as_ref().map(labels::instant);
    at.map_or_else(String::new, |at| format!(", leases are interrupted from {at} on"))
}

/// Wait for a worker to be drained or removed.
struct DrainWait<'a> {
    connection: &'a Connection,
    ui: &'a Ui,
    /// Last message about the worker.
    seen: Option<String>,
}

impl DrainWait<'_> {
    /// Waits until no lease is left on the worker and it meets `wanted`. `None`: the worker was
    /// removed.
    async fn wait_until(
        mut self,
        mut seen: Worker,
        wanted: impl Fn(&Worker) -> bool,
    ) -> anyhow::Result<Option<Worker>> {
        let id = seen.worker_id.clone();
        while seen.leases > 0 || !wanted(&seen) {
            self.report(&seen).await?;
            tokio::time::sleep(POLL_INTERVAL).await;
            seen = match queries::worker(self.connection, "show", &id).await {
                Ok(seen) => seen,
                Err(error) if is_removed(&error) => return Ok(None),
                Err(error) => return Err(error),
            };
        }
        Ok(Some(seen))
    }

    /// Prints what the drain waits for, if that has changed.
    async fn report(&mut self, worker: &Worker) -> anyhow::Result<()> {
        let workloads = self.running_on(&worker.worker_id).await?;
        let waits = waits_for(worker, &workloads);
        if self.seen.as_ref() != Some(&waits) {
            self.ui.note(&waits);
            self.seen = Some(waits);
        }
        Ok(())
    }

    /// Lists the workloads that hold a lease of a worker.
    async fn running_on(&self, worker: &str) -> anyhow::Result<Vec<Workload>> {
        let there =
            |workload: &Workload| workload.location.as_ref().is_some_and(|there| there.worker_id == worker);
        let mut running = Vec::new();
        for state in [WorkloadState::Assigned, WorkloadState::Starting, WorkloadState::Running] {
            let all = workloads_of_all_teams(self.connection, state);
            let all = all.try_filter(|workload| std::future::ready(there(workload)));
            running.extend(all.try_collect::<Vec<_>>().await?);
        }
        // A workload that changed its state meanwhile is in two lists.
        running.sort_by(|one, other| one.workload_id.cmp(&other.workload_id));
        running.dedup_by(|one, other| one.workload_id == other.workload_id);
        Ok(running)
    }
}

fn workloads_of_all_teams(
    connection: &Connection,
    state: WorkloadState,
) -> impl Stream<Item = anyhow::Result<Workload>> {
    pages(async move |page_token| {
        let state = state.into();
        let request = ListRequest { state, page_token, page_size: 1000, ..ListRequest::default() };
        let client = connection.workloads();
        let page = connection.repeat(Service::Scheduler, "cannot list workloads", async || {
            client.clone().list(request.clone()).await
        });
        page.await.map(|page| (page.workloads, page.next_page_token))
    })
}

/// Describes what the drain of a worker waits for.
fn waits_for(worker: &Worker, workloads: &[Workload]) -> String {
    let mut text = format!("worker {}: {}", plain(&worker.name, 255), labels::standing(worker));
    if worker.leases > 0 {
        text.push_str(&format!(", waiting for {}", count(worker.leases.into(), "lease")));
        if worker.uninterruptible_leases < worker.leases {
            text.push_str(&format!(
                ", {} of them interruptible",
                worker.leases - worker.uninterruptible_leases
            ));
        }
    }
    if worker.leases > 0 && worker.state() == WorkerState::Lost {
        text.push_str(", which may still run; if the machine is gone, use `gantry prune`");
    }
    text.push_str(&interrupts(worker));
    for workload in workloads.iter().take(NAMED_LIMIT) {
        let command = plain(&command(workload.spec.as_ref()), 40);
        let team = workload.spec.as_ref().map_or("", |spec| spec.team.as_str());
        text.push_str(&format!("\n  {} of team {team}: {command}", workload.workload_id));
    }
    if workloads.len() > NAMED_LIMIT {
        text.push_str(&format!("\n  and {} more", workloads.len() - NAMED_LIMIT));
    }
    text
}

#[cfg(test)]
mod tests {
    use rpc::pb::artifacts::Artifact;
    use rpc::pb::scheduler::WorkloadSpec;
    use rpc::pb::streamer::EvacuationProgress;

    use super::*;

    #[test]
    fn ended_leases_of_pruned_worker_are_listed() {
        let mut pruned = PruneWorkerResponse::default();
        assert_eq!(describe_ended_leases(&pruned), "");
        pruned.leases = 1;
        assert_eq!(describe_ended_leases(&pruned), "1 lease ended\n");
        pruned.leases = 8;
        let workload = |id: usize| PrunedWorkload { team: "a".to_owned(), workload_id: format!("w{id}") };
        pruned.workloads = (0..7).map(workload).collect();
        assert_eq!(
            describe_ended_leases(&pruned),
            "8 leases ended, 7 of them of workloads, which fail or start again on another worker\n  w0 of team a\n  w1 of team a\n  \
             w2 of team a\n  w3 of team a\n  w4 of team a\n  and 2 more\n"
        );
        pruned.workloads = (0..LISTED_LIMIT).map(workload).collect();
        assert!(describe_ended_leases(&pruned).contains(", at least 1000 of them of workloads"));
    }

    #[test]
    fn workloads_that_delay_drain_are_listed() {
        let worker = Worker {
            name: "one".to_owned(),
            state: WorkerState::Running.into(),
            desired: DesiredWorkerState::Cordon.into(),
            leases: 7,
            uninterruptible_leases: 5,
            ..Worker::default()
        };
        let spec = WorkloadSpec {
            team: "a".to_owned(),
            command: vec![b"make".as_slice().into()],
            ..WorkloadSpec::default()
        };
        let workload = |id: usize| Workload {
            workload_id: format!("w{id}"),
            spec: Some(spec.clone()),
            ..Workload::default()
        };
        let workloads: Vec<_> = (0..7).map(workload).collect();
        assert_eq!(
            waits_for(&worker, &workloads),
            "worker one: running, cordoned, waiting for 7 leases, 2 of them interruptible\n  w0 of team a: make\n  w1 of team a: make\n  \
             w2 of team a: make\n  w3 of team a: make\n  w4 of team a: make\n  and 2 more"
        );
        let lost = Worker { state: WorkerState::Lost.into(), ..worker.clone() };
        let text = waits_for(&lost, &[]);
        assert!(text.ends_with("which may still run; if the machine is gone, use `gantry prune`"), "{text}");
        let empty = Worker { leases: 0, uninterruptible_leases: 0, ..worker };
        assert_eq!(waits_for(&empty, &[]), "worker one: running, cordoned");
    }

    #[test]
    fn worker_that_may_not_stop_has_cause_and_remedy() {
        let worker = |name: &str, desired: DesiredWorkerState| Worker {
            name: name.to_owned(),
            worker_id: format!("id of {name}"),
            state: WorkerState::Running.into(),
            desired: desired.into(),
            last_contact_at: Some(labels::now()),
            ..Worker::default()
        };
        let one = worker("one", DesiredWorkerState::Cordon);
        let left = |is_drained, at_risk: u64, workers: &[Worker]| {
            let progress = EvacuationProgress {
                artifacts_at_risk: at_risk,
                bytes_at_risk: 1024 * at_risk,
                ..EvacuationProgress::default()
            };
            let evacuated = Evacuated {
                nothing_at_risk: at_risk == 0,
                progress: Some(progress),
                at_risk: vec![Artifact {
                    artifact_id: "a".to_owned(),
                    size_bytes: 1024,
                    ..Artifact::default()
                }],
            };
            let workers = workers.to_vec();
            why_not_safe(&one, &LeftOnWorker { evacuated, is_drained, workers })
        };
        let two = worker("two", DesiredWorkerState::Run);
        assert_eq!(left(true, 0, std::slice::from_ref(&one)), None);
        assert_eq!(
            left(true, 2, &[one.clone(), two.clone()]).as_deref(),
            Some(
                "worker one is not safe to stop: of the workers in service, it has the only replicas of 2 artifacts, 2.0 KiB\n  \
                 a , 1.0 KiB: nothing keeps it\n  and 1 more: `gantry list artifacts --at-risk` lists those of a team"
            )
        );
        let cordoned = worker("two", DesiredWorkerState::Cordon);
        let text = left(true, 1, &[one.clone(), cordoned]).expect("a cause");
        let cause =
            "only replicas of 1 artifact, 1.0 KiB. No other worker is in service: two is running, cordoned\n";
        assert!(text.contains(cause), "{text}");
        let text = left(true, 1, std::slice::from_ref(&one)).expect("a cause");
        assert!(text.contains(", 1.0 KiB. There is no other worker\n"), "{text}");
        let text = left(false, 1, &[one.clone(), two.clone()]).expect("a cause");
        assert!(text.ends_with("workloads still run on it, or their outputs are not stored yet"), "{text}");
        let silent = Worker { state: WorkerState::Stalled.into(), ..one.clone() };
        let text = left(false, 1, &[silent, two]).expect("a cause");
        assert!(text.contains("it has been silent for ") && text.contains("`gantry prune one`"), "{text}");
    }
}
