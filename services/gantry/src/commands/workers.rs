//! `gantry cordon`, `uncordon`, `retire` and `prune`: workers are taken out of service, and put back.

use std::time::Duration;

use anyhow::bail;
use futures::TryStreamExt;
use rpc::Reason;
use rpc::pb::scheduler::{
    CordonWorkerRequest, ListRequest, PruneWorkerRequest, PruneWorkerResponse, PrunedWorkload,
    RetireWorkerRequest, RunWorkerRequest, Worker, WorkerState, Workload, WorkloadState,
};

use crate::cli::args::{CordonArgs, PruneArgs, RetireArgs, UncordonArgs};
use crate::client::connect::{Connection, repeat};
use crate::client::queries::{pages, worker};
use crate::ending::error::refusal;
use crate::render::json;
use crate::render::labels;
use crate::render::labels::command;
use crate::render::stdout::{print, print_json};
use crate::render::table::{count, plain};
use crate::render::ui::Ui;

/// How often it is looked whether a worker is drained.
const LOOK: Duration = Duration::from_millis(300);

/// How many of those that a worker waits for, or that ended with it, are named.
const NAMED: usize = 5;

/// `gantry cordon`
pub(crate) async fn cordon(
    connection: &Connection,
    ui: &Ui,
    args: &CordonArgs,
    as_json: bool,
) -> anyhow::Result<()> {
    let interrupt_after = args.wait.deadline.map(rpc::duration);
    let request = CordonWorkerRequest { worker: args.worker.clone(), interrupt_after };
    let client = connection.workers();
    let doing = format!("cannot cordon worker {}", args.worker);
    let cordoned = repeat(&doing, async || client.clone().cordon_worker(request.clone()).await).await?.worker;
    let drained = match cordoned {
        Some(cordoned) if !args.wait.no_wait => {
            Waiting { connection, ui, seen: None }
                .until(cordoned, |worker| worker.drained_at.is_some())
                .await?
        }
        cordoned => cordoned,
    };
    // It was there a moment ago.
    answer(&args.worker, drained.as_ref(), "it has gone", as_json)
}

/// `gantry uncordon`
pub(crate) async fn uncordon(
    connection: &Connection,
    args: &UncordonArgs,
    as_json: bool,
) -> anyhow::Result<()> {
    let request = RunWorkerRequest { worker: args.worker.clone() };
    let client = connection.workers();
    let doing = format!("cannot uncordon worker {}", args.worker);
    let running = repeat(&doing, async || client.clone().run_worker(request.clone()).await).await?.worker;
    answer(&args.worker, running.as_ref(), "it may register again", as_json)
}

/// `gantry retire`
pub(crate) async fn retire(
    connection: &Connection,
    ui: &Ui,
    args: &RetireArgs,
    as_json: bool,
) -> anyhow::Result<()> {
    let request = RetireWorkerRequest {
        worker: args.worker.clone(),
        interrupt_after: args.wait.deadline.map(rpc::duration),
        force: args.force,
    };
    let client = connection.workers();
    let doing = format!("cannot retire worker {}", args.worker);
    let retiring = repeat(&doing, async || client.clone().retire_worker(request.clone()).await).await?.worker;
    let left = match retiring {
        Some(retiring) if !args.wait.no_wait => {
            let left = Waiting { connection, ui, seen: None }
                .until(retiring, |worker| !worker.held_up_by.is_empty());
            left.await?
        }
        retiring => retiring,
    };
    if let Some(held_up) = left.as_ref().filter(|left| !left.held_up_by.is_empty()) {
        bail!(
            "nothing runs on worker {} any more, and it is kept: {}; copy that to another worker, or repeat this with --force",
            plain(&held_up.name, 255),
            held_up.held_up_by
        );
    }
    answer(&args.worker, left.as_ref(), "it has gone", as_json)
}

/// `gantry prune`
pub(crate) async fn prune(connection: &Connection, args: &PruneArgs, as_json: bool) -> anyhow::Result<()> {
    let request = PruneWorkerRequest { worker: args.worker.clone(), force: args.force };
    let client = connection.workers();
    let doing = format!("cannot prune worker {}", args.worker);
    let pruned = repeat(&doing, async || client.clone().prune_worker(request.clone()).await).await?;
    if as_json {
        let workload =
            |of: &PrunedWorkload| serde_json::json!({ "team": of.team, "workload_id": of.workload_id });
        let workloads: Vec<_> = pruned.workloads.iter().map(workload).collect();
        let gone = serde_json::json!({ "name": args.worker, "gone": true, "leases": pruned.leases, "workloads": workloads });
        return print_json(&gone);
    }
    answer(&args.worker, None, "it has gone", as_json)?;
    print(&ended_with_it(&pruned))
}

/// How many workloads are told at most of those that ended because a worker was pruned.
const MOST_TOLD: usize = 1000;

/// What ended because a worker was pruned. Empty: nothing.
fn ended_with_it(pruned: &PruneWorkerResponse) -> String {
    let PruneWorkerResponse { leases, workloads } = pruned;
    if *leases == 0 {
        return String::new();
    }
    let mut text = format!("{} ended with it", count(*leases, "lease"));
    if !workloads.is_empty() {
        let at_least = if workloads.len() < MOST_TOLD { "" } else { "at least " };
        text.push_str(&format!(
            ", {at_least}{} of workloads, which end with that, or begin again elsewhere",
            workloads.len()
        ));
    }
    text.push('\n');
    for PrunedWorkload { team, workload_id } in workloads.iter().take(NAMED) {
        text.push_str(&format!("  {workload_id} of team {}\n", plain(team, 255)));
    }
    if workloads.len() > NAMED {
        text.push_str(&format!("  and {} more\n", workloads.len() - NAMED));
    }
    text
}

/// `gone`: what is said of a worker that is not there.
fn answer(name: &str, worker: Option<&Worker>, gone: &str, as_json: bool) -> anyhow::Result<()> {
    match (worker, as_json) {
        (Some(worker), true) => print_json(&json::worker(worker)),
        (None, true) => print_json(&serde_json::json!({ "name": name, "gone": true })),
        (Some(worker), false) => {
            let interrupts = match &worker.interrupt_at {
                Some(at) => format!(", what is left is interrupted at {}", labels::instant(at)),
                None => String::new(),
            };
            let standing = labels::standing(worker);
            print(&format!("worker {}: {standing}{interrupts}\n", plain(&worker.name, 255)))
        }
        (None, false) => print(&format!("worker {}: {gone}\n", plain(name, 255))),
    }
}

/// Somebody who waits for a worker to come down.
struct Waiting<'a> {
    connection: &'a Connection,
    ui: &'a Ui,
    /// What was said of it last.
    seen: Option<String>,
}

impl Waiting<'_> {
    /// Until no lease is left on the worker and it is as `wanted`. `None`: it has gone.
    async fn until(
        mut self,
        mut seen: Worker,
        wanted: impl Fn(&Worker) -> bool,
    ) -> anyhow::Result<Option<Worker>> {
        let id = seen.worker_id.clone();
        while seen.leases > 0 || !wanted(&seen) {
            self.say(&seen).await?;
            tokio::time::sleep(LOOK).await;
            seen = match worker(self.connection, "look at", &id).await {
                Ok(seen) => seen,
                Err(error) if refusal(&error).is_some_and(|refusal| refusal.is(Reason::WorkerNotFound)) => {
                    return Ok(None);
                }
                Err(error) => return Err(error),
            };
        }
        Ok(Some(seen))
    }

    /// Says what a worker waits for, where that is news.
    async fn say(&mut self, worker: &Worker) -> anyhow::Result<()> {
        let workloads = self.running_on(&worker.worker_id).await?;
        let waits = waits_for(worker, &workloads);
        if self.seen.as_ref() != Some(&waits) {
            self.ui.note(&waits);
            self.seen = Some(waits);
        }
        Ok(())
    }

    /// What holds a lease of a worker.
    async fn running_on(&self, worker: &str) -> anyhow::Result<Vec<Workload>> {
        let there = |workload: &Workload| {
            workload.whereabouts.as_ref().is_some_and(|there| there.worker_id == worker)
        };
        let mut running = Vec::new();
        for state in [WorkloadState::Assigned, WorkloadState::Starting, WorkloadState::Running] {
            let all = pages(async |page_token| {
                let state = state.into();
                let request = ListRequest { state, page_token, page_size: 1000, ..ListRequest::default() };
                let client = self.connection.workloads();
                let page =
                    repeat("cannot list workloads", async || client.clone().list(request.clone()).await);
                page.await.map(|page| (page.workloads, page.next_page_token))
            });
            let all = all.try_filter(|workload| std::future::ready(there(workload)));
            running.extend(all.try_collect::<Vec<_>>().await?);
        }
        // One that went on meanwhile is in two of them.
        running.sort_by(|one, other| one.workload_id.cmp(&other.workload_id));
        running.dedup_by(|one, other| one.workload_id == other.workload_id);
        Ok(running)
    }
}

/// What a worker waits for that comes down.
fn waits_for(worker: &Worker, workloads: &[Workload]) -> String {
    let mut text = format!("worker {}: {}", plain(&worker.name, 255), labels::standing(worker));
    if worker.leases > 0 {
        text.push_str(&format!(", {} to end", count(worker.leases.into(), "lease")));
        if worker.uninterruptible_leases < worker.leases {
            text.push_str(&format!(
                ", {} of them may be interrupted",
                worker.leases - worker.uninterruptible_leases
            ));
        }
    }
    if worker.leases > 0 && worker.state() == WorkerState::Lost {
        text.push_str(", and it may run them still: `gantry prune` says that it is gone");
    }
    if let Some(at) = &worker.interrupt_at {
        text.push_str(&format!(", interrupted at {}", labels::instant(at)));
    }
    for workload in workloads.iter().take(NAMED) {
        let command = plain(&command(workload.spec.as_ref()), 40);
        let team = workload.spec.as_ref().map_or("", |spec| spec.team.as_str());
        text.push_str(&format!("\n  {} of team {team}: {command}", workload.workload_id));
    }
    if workloads.len() > NAMED {
        text.push_str(&format!("\n  and {} more", workloads.len() - NAMED));
    }
    text
}

#[cfg(test)]
mod tests {
    use rpc::pb::scheduler::{WorkerDesire, WorkloadSpec};

    use super::*;

    #[test]
    fn what_ended_with_a_pruned_worker_is_said_and_not_all_of_a_lot() {
        let mut pruned = PruneWorkerResponse::default();
        assert_eq!(ended_with_it(&pruned), "");
        pruned.leases = 1;
        assert_eq!(ended_with_it(&pruned), "1 lease ended with it\n");
        pruned.leases = 8;
        let workload = |id: usize| PrunedWorkload { team: "a".to_owned(), workload_id: format!("w{id}") };
        pruned.workloads = (0..7).map(workload).collect();
        assert_eq!(
            ended_with_it(&pruned),
            "8 leases ended with it, 7 of workloads, which end with that, or begin again elsewhere\n  w0 of team a\n  w1 of team a\n  \
             w2 of team a\n  w3 of team a\n  w4 of team a\n  and 2 more\n"
        );
        pruned.workloads = (0..MOST_TOLD).map(workload).collect();
        assert!(ended_with_it(&pruned).contains(", at least 1000 of workloads"));
    }

    #[test]
    fn what_a_worker_waits_for_is_said_and_not_all_of_a_lot() {
        let worker = Worker {
            name: "one".to_owned(),
            state: WorkerState::Running.into(),
            desired: WorkerDesire::Cordon.into(),
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
            "worker one: running, cordoned, 7 leases to end, 2 of them may be interrupted\n  w0 of team a: make\n  w1 of team a: make\n  \
             w2 of team a: make\n  w3 of team a: make\n  w4 of team a: make\n  and 2 more"
        );
        let lost = Worker { state: WorkerState::Lost.into(), ..worker.clone() };
        let said = waits_for(&lost, &[]);
        assert!(said.ends_with("and it may run them still: `gantry prune` says that it is gone"), "{said}");
        let empty = Worker { leases: 0, uninterruptible_leases: 0, ..worker };
        assert_eq!(waits_for(&empty, &[]), "worker one: running, cordoned");
    }
}
