//! The evacuation of a worker: copies of artifacts that would be lost with it.
//!
//! [`crate::api`] calls [`run`] for each caller. A round lists the artifacts at risk, and copies
//! each of them to another worker. Rounds are repeated, because workloads make artifacts meanwhile,
//! and because copies may be lost.
//!
//! Invariant: the artifacts that an evacuation returns as still at risk were listed after its last
//! copy.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::time::{Duration, Instant};

use domain::{ArtifactId, WorkerId};
use futures::StreamExt;
use rpc::pb::artifacts::Artifact;

use crate::in_flight::{CopyError, CopyRequest, Waiter};
use crate::peers::{PeerError, Peers, WorkerSpace};

/// Number of concurrent copies.
const COPIES: usize = 4;
/// Number of times that an artifact is copied. Its copies may be lost meanwhile.
const MAX_TIMES: usize = 2;
/// Number of successive rounds without a copy after which the evacuation ends.
const MAX_FAILED_ROUNDS: usize = 2;
/// Pause after a round without a copy.
const RETRY_PAUSE: Duration = Duration::from_secs(2);
/// Most failed copies that a progress names.
const MAX_FAILURES: usize = 20;

/// The progress of an evacuation.
#[derive(Debug, Clone, Default)]
pub(crate) struct Progress {
    pub(crate) copied: u64,
    pub(crate) copied_bytes: u64,
    pub(crate) at_risk: u64,
    pub(crate) at_risk_bytes: u64,
    /// Failed copies of the current round.
    pub(crate) failures: Vec<FailedCopy>,
}

/// An artifact that could not be copied to any other worker.
#[derive(Debug, Clone)]
pub(crate) struct FailedCopy {
    pub(crate) team: String,
    pub(crate) artifact: ArtifactId,
    /// The last error. `None`: no other reliable worker has room.
    pub(crate) error: Option<CopyError>,
}

/// Copies artifacts until nothing is at risk, `limit` has passed, or nothing can be copied. Returns
/// the artifacts that are still at risk, the most valuable first. `copy` starts a copy.
pub(crate) async fn run(
    peers: &Peers,
    worker: WorkerId,
    limit: Duration,
    copy: impl Fn(CopyRequest) -> Waiter,
    report: impl Fn(&Progress),
) -> Result<(Vec<Artifact>, Progress), PeerError> {
    let (begun, mut failed_rounds) = (Instant::now(), 0);
    let (mut times, mut progress) = (HashMap::new(), Progress::default());
    loop {
        let at_risk = list_at_risk(peers, worker).await?;
        progress.at_risk = at_risk.len() as u64;
        progress.at_risk_bytes = at_risk.iter().map(|artifact| artifact.size_bytes).sum();
        report(&progress);
        let left = limit.saturating_sub(begun.elapsed());
        if at_risk.is_empty() || left.is_zero() || failed_rounds == MAX_FAILED_ROUNDS {
            return Ok((at_risk, progress));
        }
        let before = progress.copied;
        let round = async {
            copy_all(peers, worker, &at_risk, &copy, &report, &mut times, &mut progress).await;
            failed_rounds = if progress.copied == before { failed_rounds + 1 } else { 0 };
            if failed_rounds == 1 {
                tokio::time::sleep(RETRY_PAUSE).await;
            }
        };
        // A round that takes too long ends with its copies.
        _ = tokio::time::timeout(left, round).await;
    }
}

/// Lists the artifacts that would be lost with the worker, the most valuable first.
async fn list_at_risk(peers: &Peers, worker: WorkerId) -> Result<Vec<Artifact>, PeerError> {
    let workers = peers.list_workers().await?.into_iter();
    let mut ignored: Vec<_> = workers.filter(|other| !other.is_reliable).map(|other| other.worker).collect();
    ignored.push(worker);
    let worker = worker.to_string();
    let is_here = |artifact: &Artifact| {
        !artifact.team.is_empty() && artifact.replicas.iter().any(|replica| replica.worker_id == worker)
    };
    let mut at_risk = peers.list_at_risk(&ignored, is_here).await?;
    at_risk.sort_by_key(|artifact| (rank(artifact), artifact.size_bytes));
    Ok(at_risk)
}

/// Returns the rank of an artifact by what keeps it. What is in use comes first.
fn rank(artifact: &Artifact) -> usize {
    const KEEPERS: [&str; 4] = ["pinned by ", "build ", "task cache ", "resource cache "];
    let rank = |line: &String| KEEPERS.iter().position(|keeper| line.starts_with(keeper));
    artifact.kept_by.iter().filter_map(rank).min().unwrap_or(KEEPERS.len())
}

/// Copies each artifact once, except those that were copied too often. `times`: how often each
/// artifact was copied.
async fn copy_all(
    peers: &Peers,
    worker: WorkerId,
    at_risk: &[Artifact],
    copy: &impl Fn(CopyRequest) -> Waiter,
    report: &impl Fn(&Progress),
    times: &mut HashMap<ArtifactId, usize>,
    progress: &mut Progress,
) {
    progress.failures.clear();
    let ids = at_risk.iter().filter_map(|artifact| Some((artifact.artifact_id.parse().ok()?, artifact)));
    let left = ids.filter(|(id, _)| times.get(id).is_none_or(|times| *times < MAX_TIMES));
    let left: Vec<_> = left.map(|(id, of)| (id, of.team.clone(), of.size_bytes)).collect();
    let copies = left.into_iter().enumerate().map(|(turn, (artifact, team, size))| async move {
        let copied = copy_to_any(peers, worker, artifact, &team, size, turn, copy).await;
        (artifact, team, size, copied)
    });
    let mut copies = futures::stream::iter(copies).buffer_unordered(COPIES);
    while let Some((artifact, team, size, copied)) = copies.next().await {
        match copied {
            Ok(()) => {
                *times.entry(artifact).or_default() += 1;
                progress.copied += 1;
                progress.copied_bytes += size;
                progress.at_risk -= 1;
                progress.at_risk_bytes -= size;
            }
            Err(error) if progress.failures.len() < MAX_FAILURES => {
                progress.failures.push(FailedCopy { team, artifact, error });
            }
            Err(_) => {}
        }
        report(progress);
    }
}

/// Copies an artifact to the first worker that has room and takes it. `None` as the error: no other
/// worker has room.
async fn copy_to_any(
    peers: &Peers,
    from: WorkerId,
    artifact: ArtifactId,
    team: &str,
    size: u64,
    turn: usize,
    copy: &impl Fn(CopyRequest) -> Waiter,
) -> Result<(), Option<CopyError>> {
    let workers = peers.list_workers().await.map_err(|error| Some(error.into()))?;
    let mut last = None;
    for worker in destinations(workers, from, size, turn) {
        match copy(CopyRequest { team: team.to_owned(), artifact, worker }).ended().await {
            Ok(_) => return Ok(()),
            Err(error) => last = Some(error),
        }
    }
    Err(last)
}

/// Returns the workers that may take an artifact. Workers with more room come first, in turns.
fn destinations(mut workers: Vec<WorkerSpace>, from: WorkerId, size: u64, turn: usize) -> Vec<WorkerId> {
    let has_room = |worker: &WorkerSpace| worker.room.is_none_or(|room| room > size);
    workers.retain(|worker| worker.is_reliable && worker.worker != from && has_room(worker));
    workers.sort_by_key(|worker| Reverse(worker.room));
    let first = turn % workers.len().max(1);
    workers.rotate_left(first);
    workers.into_iter().map(|worker| worker.worker).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn artifacts_in_use_come_first() {
        let rank_of = |lines: &[&str]| {
            let kept_by = lines.iter().map(ToString::to_string).collect();
            rank(&Artifact { kept_by, ..Artifact::default() })
        };
        let kept_by: [&[&str]; 5] = [
            &["resource cache a", "pinned by b"],
            &["task cache a", "build b"],
            &["resource cache a", "task cache b"],
            &["resource cache a"],
            &["without an owner until noon"],
        ];
        assert_eq!(kept_by.map(rank_of), [0, 1, 2, 3, 4]);
    }

    #[test]
    fn destinations_have_room_and_take_turns() {
        let space = |room| WorkerSpace { worker: WorkerId::new(), is_reliable: true, room };
        let [from, small, large, full, silent] =
            [Some(900), Some(200), Some(300), Some(100), None].map(space);
        let cordoned = WorkerSpace { is_reliable: false, ..space(Some(900)) };
        let all = || [from, full, silent, small, cordoned, large].to_vec();
        let choose = |turn| destinations(all(), from.worker, 100, turn);
        assert_eq!(choose(0), [large, small, silent].map(|space| space.worker));
        assert_eq!(choose(4), [small, silent, large].map(|space| space.worker));
        assert_eq!(destinations(vec![from, cordoned], from.worker, 0, 1), []);
    }
}
