//! Where artifacts are, looked up at once for those of one team who ask at the same time ([`Together`]): for each lease and each workload that uses
//! some somebody does, and many want to know it of the same.

use std::collections::{BTreeSet, HashMap};

use db::{Answers, Database, Together, grouped};
use domain::ArtifactId;
use futures::future::join_all;
use sea_orm::DbErr;
use tokio_util::task::TaskTracker;

use super::{Located, in_order, locate};
use crate::pins;

/// How many at most.
const MOST: usize = 64;

/// Of how many artifacts at most somebody wants to know it who asks with others.
const FEW: usize = 100;

/// Says where artifacts are. Cheap to clone; clones share it.
#[derive(Clone)]
pub(crate) struct Locating {
    db: Database,
    together: Together<Wanted, Result<Vec<Located>, DbErr>>,
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
        let together = Together::new(MOST, tasks, move |calls| {
            let db = of_calls.clone();
            async move {
                let groups = grouped(calls, |wanted: &Wanted| wanted.team.clone());
                join_all(groups.into_iter().map(|group| locate_group(&db, group))).await;
            }
        });
        Self { db, together }
    }

    /// [`locate`], with others where it is of few.
    pub(crate) async fn locate(
        &self,
        team: String,
        artifacts: Vec<ArtifactId>,
    ) -> Result<Vec<Located>, DbErr> {
        match artifacts.len() {
            0 => Ok(Vec::new()),
            1..=FEW => self.together.call(Wanted { team, artifacts }).await.map_err(pins::broken)?,
            _ => locate(self.db.read(), &team, &artifacts).await,
        }
    }
}

/// Looks it up for some of one team.
async fn locate_group(db: &Database, (wanted, answers): (Vec<Wanted>, Answers<Result<Vec<Located>, DbErr>>)) {
    if let [first, _, ..] = &wanted[..] {
        let all: BTreeSet<_> = wanted.iter().flat_map(|wanted| wanted.artifacts.iter().copied()).collect();
        let all: Vec<_> = all.into_iter().collect();
        match locate(db.read(), &first.team, &all).await {
            Ok(located) => {
                let located = located.into_iter().map(|one| (one.artifact.artifact_id, one));
                let located: HashMap<_, _> = located.collect();
                for (wanted, answer) in wanted.iter().zip(answers) {
                    answer.send(Ok(in_order(&wanted.artifacts, &located))).ok();
                }
                return;
            }
            Err(error) => tracing::debug!(%error, calls = wanted.len(), "it is looked up for each alone"),
        }
    }
    let alone = wanted.iter().zip(answers).map(async |(wanted, answer)| {
        answer.send(locate(db.read(), &wanted.team, &wanted.artifacts).await).ok();
    });
    join_all(alone).await;
}

#[cfg(test)]
mod tests;
