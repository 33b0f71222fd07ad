//! Evacuation of a worker: copies artifacts that only it has to other workers.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use futures::{StreamExt, TryStreamExt};
use rpc::pb::artifacts::Artifact;
use rpc::pb::scheduler::{Capacity, DesiredWorkerState, Worker, WorkerState};
use rpc::pb::streamer::{MaterializeRequest, MaterializeResponse, materialize_response};

use crate::client::connect::{Connection, Service};
use crate::client::queries;
use crate::ending::error::{Refused, describe};
use crate::render::table::{bytes, count, plain};
use crate::render::ui::Ui;

/// Number of concurrent copies.
const COPIES: usize = 4;
/// Number of times that an artifact is copied. Its copies may be lost meanwhile.
const MAX_TIMES: usize = 2;
/// Pause before artifacts are listed again whose copies failed.
const RETRY_PAUSE: Duration = Duration::from_secs(2);

/// The evacuation of a worker.
pub(crate) struct Evacuation<'a> {
    connection: &'a Connection,
    ui: &'a Ui,
    worker: &'a Worker,
    deadline: Option<Instant>,
    /// The last message about copies.
    noted: String,
    /// How often each artifact was copied.
    times: HashMap<String, usize>,
    pub(crate) copied: u64,
    pub(crate) copied_bytes: u64,
}

impl<'a> Evacuation<'a> {
    pub(crate) fn new(
        connection: &'a Connection,
        ui: &'a Ui,
        worker: &'a Worker,
        deadline: Option<Duration>,
    ) -> Self {
        let deadline = deadline.map(|left| Instant::now() + left);
        Self {
            connection,
            ui,
            worker,
            deadline,
            noted: String::new(),
            times: HashMap::new(),
            copied: 0,
            copied_bytes: 0,
        }
    }

    /// Copies until nothing is at risk, the deadline has passed, or nothing could be copied twice.
    /// Returns the artifacts that are still at risk.
    pub(crate) async fn run(&mut self) -> anyhow::Result<Vec<Artifact>> {
        let mut failed = false;
        loop {
            let at_risk = self.at_risk().await?;
            if at_risk.is_empty() || self.is_late() {
                return Ok(at_risk);
            }
            let before = self.copied;
            let again = |artifact: &Artifact| self.times.get(&artifact.artifact_id) >= Some(&MAX_TIMES);
            let (_, left): (Vec<_>, Vec<_>) = at_risk.iter().cloned().partition(again);
            self.copy(&left).await?;
            if self.copied == before {
                if failed {
                    return Ok(at_risk);
                }
                tokio::time::sleep(RETRY_PAUSE).await;
            }
            failed = self.copied == before;
        }
    }

    fn is_late(&self) -> bool {
        self.deadline.is_some_and(|deadline| Instant::now() >= deadline)
    }

    /// Lists the artifacts that would be lost with the worker, the most valuable first.
    async fn at_risk(&self) -> anyhow::Result<Vec<Artifact>> {
        let mut without = queries::unreliable_workers(self.connection).await?;
        without.push(self.worker.worker_id.clone());
        let all = queries::at_risk(self.connection, without, true);
        let is_here = |artifact: &Artifact| {
            let mut replicas = artifact.replicas.iter();
            !artifact.team.is_empty() && replicas.any(|replica| replica.worker_id == self.worker.worker_id)
        };
        let here = all.try_filter(|artifact| std::future::ready(is_here(artifact)));
        let mut here: Vec<_> = here.try_collect().await?;
        here.sort_by_key(|artifact| (rank(artifact), artifact.size_bytes));
        Ok(here)
    }

    /// Copies artifacts, and warns of those that cannot be copied.
    async fn copy(&mut self, artifacts: &[Artifact]) -> anyhow::Result<()> {
        if artifacts.is_empty() {
            return Ok(());
        }
        let total: u64 = artifacts.iter().map(|artifact| artifact.size_bytes).sum();
        let name = plain(&self.worker.name, 255);
        let all = count(artifacts.len() as u64, "artifact");
        let doing = format!("worker {name}: copying {all} of {} to other workers", bytes(total));
        if self.noted != doing {
            self.ui.note(&doing);
            self.noted = doing;
        }
        let (connection, worker, deadline) = (self.connection, self.worker, self.deadline);
        let copies = artifacts.iter().enumerate().map(|(number, artifact)| async move {
            let copying = copy_to_any(connection, worker, artifact, number);
            let copied = match deadline {
                Some(deadline) => match tokio::time::timeout_at(deadline.into(), copying).await {
                    Ok(copied) => copied,
                    Err(_) => Ok(false),
                },
                None => copying.await,
            };
            (artifact, copied)
        });
        let mut copies = futures::stream::iter(copies).buffer_unordered(COPIES);
        while let Some((artifact, copied)) = copies.next().await {
            match copied {
                Ok(true) => {
                    self.copied += 1;
                    *self.times.entry(artifact.artifact_id.clone()).or_default() += 1;
                    self.copied_bytes += artifact.size_bytes;
                }
                Ok(false) => {}
                Err(error) => {
                    let id = &artifact.artifact_id;
                    self.ui.warn(&format!("artifact {id} is not copied: {}", describe(&error)));
                }
            }
        }
        Ok(())
    }
}

/// Returns the rank of an artifact by what keeps it. What is in use comes first.
fn rank(artifact: &Artifact) -> usize {
    const KEEPERS: [&str; 4] = ["pinned by ", "build ", "task cache ", "resource cache "];
    let rank = |line: &String| KEEPERS.iter().position(|keeper| line.starts_with(keeper));
    artifact.kept_by.iter().filter_map(rank).min().unwrap_or(KEEPERS.len())
}

/// Copies an artifact to the first worker that has room and takes it. Workers with more free disk
/// space come first, in turns. Returns `false` if there is no other worker.
async fn copy_to_any(
    connection: &Connection,
    from: &Worker,
    artifact: &Artifact,
    turn: usize,
) -> anyhow::Result<bool> {
    let takes = |worker: &Worker| {
        let Capacity { disk_bytes, min_free_disk_bytes, .. } = worker.capacity.unwrap_or_default();
        let left = worker.disk_free_bytes.saturating_sub(artifact.size_bytes);
        let has_room = disk_bytes == 0 || left > min_free_disk_bytes;
        has_room
            && worker.worker_id != from.worker_id
            && worker.state() == WorkerState::Running
            && worker.desired() == DesiredWorkerState::Run
    };
    let others = queries::workers(connection).try_filter(|worker| std::future::ready(takes(worker)));
    let mut others: Vec<_> = others.try_collect().await?;
    others.sort_by_key(|worker| std::cmp::Reverse(worker.disk_free_bytes));
    let first = turn % others.len().max(1);
    others.rotate_left(first);
    let mut last = None;
    for other in others {
        match copy(connection, artifact, &other).await {
            Ok(()) => return Ok(true),
            Err(refused) => last = Some(refused),
        }
    }
    match last {
        Some(refused) => Err(refused.into()),
        None => Ok(false),
    }
}

async fn copy(connection: &Connection, artifact: &Artifact, to: &Worker) -> Result<(), Refused> {
    let request = MaterializeRequest {
        team: artifact.team.clone(),
        artifact_id: artifact.artifact_id.clone(),
        worker_id: to.worker_id.clone(),
        lease_token: String::new(),
    };
    let by_streamer = |status| connection.refused_by(Service::Streamer, status);
    let mut streamer = connection.streamer();
    let mut answers = connection.call(Service::Streamer, streamer.materialize(request)).await?;
    loop {
        match answers.message().await.map_err(by_streamer)? {
            Some(MaterializeResponse { message: Some(materialize_response::Message::Materialized(_)) }) => {
                return Ok(());
            }
            Some(_) => {}
            None => return Err(Refused::cut()),
        }
    }
}
