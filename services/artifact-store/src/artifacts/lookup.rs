//! Batched lookup of artifacts: one query for concurrent calls of a team ([`Batcher`]).
//!
//! Schedulers look up the artifacts of each request that they place, so that many calls are
//! concurrent.
//!
//! Invariant: each caller gets the answer of a separate lookup, from rows read after its call. If a
//! lookup fails, all of its callers get the error.

use std::collections::{BTreeSet, HashMap};

use db::{Batcher, Database, ReplySenders, group_calls};
use domain::ArtifactId;
use futures::future::join_all;
use sea_orm::DbErr;
use tokio_util::task::TaskTracker;

use crate::artifacts::{LocatedArtifact, in_order, locate};

/// Maximum number of calls in a batch.
const MAX: usize = 64;

/// Maximum number of artifacts in a call that is batched with others.
const FEW: usize = 100;

/// Batching locator of artifacts. Cheap to clone. Clones share the batches.
#[derive(Clone)]
pub(crate) struct ArtifactLocator {
    db: Database,
    batcher: Batcher<LookupCall, Result<Vec<LocatedArtifact>, DbErr>>,
}

/// A call that waits for its batch.
struct LookupCall {
    team: String,
    artifacts: Vec<ArtifactId>,
}

impl ArtifactLocator {
    /// Creates a locator, which spawns its tasks on `tasks`.
    pub(crate) fn new(db: Database, tasks: TaskTracker) -> Self {
        let of_calls = db.clone();
        let batcher = Batcher::new(MAX, tasks, move |calls| {
            let db = of_calls.clone();
            async move {
                let groups = group_calls(calls, |wanted: &LookupCall| wanted.team.clone());
                join_all(groups.into_iter().map(|group| locate_group(&db, group))).await;
            }
        });
        Self { db, batcher }
    }

    /// Looks up artifacts like [`locate`]. Small calls are batched with others.
    pub(crate) async fn locate(
        &self,
        team: String,
        artifacts: Vec<ArtifactId>,
    ) -> Result<Vec<LocatedArtifact>, DbErr> {
        match artifacts.len() {
            0 => Ok(Vec::new()),
            1..=FEW => self.batcher.call(LookupCall { team, artifacts }).await?,
            _ => locate(self.db.read(), &team, &artifacts).await,
        }
    }
}

/// Answers the calls of one team with one lookup.
async fn locate_group(
    db: &Database,
    (wanted, answers): (Vec<LookupCall>, ReplySenders<Result<Vec<LocatedArtifact>, DbErr>>),
) {
    let Some(first) = wanted.first() else { return };
    let all: BTreeSet<_> = wanted.iter().flat_map(|wanted| wanted.artifacts.iter().copied()).collect();
    let all: Vec<_> = all.into_iter().collect();
    let located = locate(db.read(), &first.team, &all).await;
    let located = located.map(|located| {
        let by_id = located.into_iter().map(|one| (one.artifact.artifact_id, one));
        by_id.collect::<HashMap<_, _>>()
    });
    for (wanted, answer) in wanted.iter().zip(answers) {
        let of_one = located.as_ref().map(|located| in_order(&wanted.artifacts, located));
        answer.send(of_one.map_err(DbErr::clone)).ok();
    }
}

#[cfg(test)]
mod tests;
