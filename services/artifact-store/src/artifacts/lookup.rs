//! Where artifacts are, looked up at once for callers of one team that ask at the same time ([`Batcher`]). A scheduler that is about to place what uses artifacts
//! asks, so many do.
//!
//! Invariant: each is told what it would be told alone, of rows that were read after it asked. A lookup that fails is told to all of them.

use std::collections::{BTreeSet, HashMap};

use db::{Batcher, Database, ReplySenders, group_calls};
use domain::ArtifactId;
use futures::future::join_all;
use sea_orm::DbErr;
use tokio_util::task::TaskTracker;

use crate::artifacts::{Located, in_order, locate};

/// How many at most.
const MOST: usize = 64;

/// How many artifacts a request may name that is answered with others.
const FEW: usize = 100;

/// Says where artifacts are. Cheap to clone; clones share it.
#[derive(Clone)]
pub(crate) struct Locating {
    db: Database,
    batcher: Batcher<Wanted, Result<Vec<Located>, DbErr>>,
}

/// What a team wants to know it of.
struct Wanted {
    team: String,
    artifacts: Vec<ArtifactId>,
}

impl Locating {
    /// It has tasks of its own among `tasks`.
    pub(crate) fn new(db: Database, tasks: TaskTracker) -> Self {
        let of_calls = db.clone();
        let batcher = Batcher::new(MOST, tasks, move |calls| {
            let db = of_calls.clone();
            async move {
                let groups = group_calls(calls, |wanted: &Wanted| wanted.team.clone());
                join_all(groups.into_iter().map(|group| locate_group(&db, group))).await;
            }
        });
        Self { db, batcher }
    }

    /// [`locate`], with others where it is of few.
    pub(crate) async fn locate(
        &self,
        team: String,
        artifacts: Vec<ArtifactId>,
    ) -> Result<Vec<Located>, DbErr> {
        match artifacts.len() {
            0 => Ok(Vec::new()),
            1..=FEW => self.batcher.call(Wanted { team, artifacts }).await?,
            _ => locate(self.db.read(), &team, &artifacts).await,
        }
    }
}

/// Looks it up for those of one team.
async fn locate_group(
    db: &Database,
    (wanted, answers): (Vec<Wanted>, ReplySenders<Result<Vec<Located>, DbErr>>),
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
