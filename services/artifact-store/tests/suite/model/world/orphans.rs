//! Restored backups: new store lives, and decisions about orphans.

use std::collections::BTreeSet;
use std::sync::PoisonError;
use std::time::Duration;

use rpc::pb::artifacts as pb;
use uuid::Uuid;

use super::gateways::refused;
use super::shown::all;
use super::{World, done};
use crate::harness::receipt;
use crate::model::check::SIZE;
use crate::model::operations::Operation;
use crate::model::state::{OrphanDescription, Outcome, State, artifact_id, build_id, digest_of};
use crate::{Callers, TEAM};

/// Higher than the sequence of any report.
const LATER: u64 = i64::MAX.unsigned_abs();

impl World {
    /// Applies one operation on orphans.
    pub(super) async fn perform_on_orphans(&self, state: &State, operation: &Operation) -> Outcome {
        use Operation as O;
        match *operation {
            O::Stray { .. } => Outcome::Done,
            O::NewLife { worker } => self.begin_life(worker).await,
            O::Describe { worker } => self.describe(state, worker).await,
            O::AdoptOrphan { which, owner, keep } => {
                let Some(about) = state.any_orphan(which, true) else { return Outcome::Skipped };
                let kept_by = || match owner {
                    Some(build) => pb::adopt_request::KeptBy::BuildId(build_id(build).to_string()),
                    None => pb::adopt_request::KeptBy::Keep(rpc::duration(Duration::from_secs(keep.into()))),
                };
                let request = || pb::AdoptRequest {
                    team: TEAM.to_owned(),
                    volume_handle: about.to_string(),
                    kept_by: Some(kept_by()),
                    ..Default::default()
                };
                let adopt = |callers: Callers| async move {
                    let adopted = callers.inventory().adopt(request()).await?.into_inner().artifact;
                    Ok(adopted.map(|artifact| artifact.artifact_id.parse().expect("an id")))
                };
                Outcome::Decided { about, answer: self.ask(adopt).await }
            }
            O::PurgeOrphan { which } => {
                let Some(about) = state.any_orphan(which, false) else { return Outcome::Skipped };
                let request =
                    || pb::PurgeRequest { handles: vec![about.to_string()], worker_id: String::new() };
                let purge = |callers: Callers| async move {
                    callers.inventory().purge(request()).await?;
                    Ok(None)
                };
                Outcome::Decided { about, answer: self.ask(purge).await }
            }
            _ => Outcome::Skipped,
        }
    }

    /// Makes a worker present a report that the store does not know. The contents of workers are of
    /// the previous life then.
    async fn begin_life(&self, worker: u8) -> Outcome {
        let gateway = &self.speaker(worker).gateway;
        let begin = |callers: Callers| async move { gateway.by_way_of(&callers).begin_report().await };
        let before = match self.ask(begin).await {
            Ok(token) => token.store_life,
            Err(refusal) => return Outcome::Refused(refusal),
        };
        let last = &pb::ReportToken { sequence: LATER, store_life: before.clone() };
        let receipt = &receipt(&self.receipt_key, gateway.worker, last);
        let prove = |callers: Callers| async move {
            gateway.by_way_of(&callers).begin_report_after(Some(last.clone()), receipt).await
        };
        let begun = self.ask(prove).await;
        if let Ok(token) = &begun {
            if token.store_life == before {
                return refused("it remembers more than the store, whose life has not ended".to_owned());
            }
            self.life.lock().unwrap_or_else(PoisonError::into_inner).clone_from(&token.store_life);
            for speaker in self.speakers.lock().unwrap_or_else(PoisonError::into_inner).iter_mut() {
                speaker.gateway.life.get_or_insert_with(|| before.clone());
            }
        }
        done(begun)
    }

    async fn describe(&self, state: &State, worker: u8) -> Outcome {
        let describe = |it: OrphanDescription| {
            let (artifact, content) = it.replica.unzip();
            pb::VolumeDescription {
                volume_handle: it.volume.to_string(),
                parent_handle: it.parent.map(|parent| parent.to_string()).unwrap_or_default(),
                team: TEAM.to_owned(),
                artifact_id: artifact.map(|it| artifact_id(it).to_string()).unwrap_or_default(),
                digest: content.map(|it| digest_of(it).as_bytes().to_vec()).unwrap_or_default().into(),
                size_bytes: SIZE,
            }
        };
        let volumes: Vec<_> = state.to_describe(worker).into_iter().map(describe).collect();
        if volumes.is_empty() {
            return Outcome::Skipped;
        }
        let session_credential = self.speaker(worker).gateway.credential;
        let request = || pb::DescribeOrphansRequest {
            session_credential: session_credential.clone(),
            volumes: volumes.clone(),
        };
        let describe = |callers: Callers| {
            let request = request();
            async move { Ok(callers.inventory().describe_orphans(request).await.map(drop)?) }
        };
        done(self.ask(describe).await)
    }

    /// Returns the orphans, and their parents.
    pub(super) async fn orphans(&self) -> (BTreeSet<Uuid>, BTreeSet<String>) {
        let page = |token: String| {
            self.ask(move |callers| {
                let request = pb::ListOrphansRequest {
                    page_size: 1000,
                    page_token: token.clone(),
                    ..Default::default()
                };
                async move {
                    let page = callers.inventory().list_orphans(request).await?.into_inner();
                    Ok((page.orphans, page.next_page_token))
                }
            })
        };
        let listed: Vec<pb::Orphan> = all(page).await;
        let handle = |one: &pb::Orphan| {
            let text = if one.volume_handle.is_empty() { &one.container_handle } else { &one.volume_handle };
            text.parse().expect("a handle")
        };
        let ids = listed.iter().map(handle).collect();
        let parents = listed.into_iter().filter_map(|one| Some(one.description?.parent_handle));
        (ids, parents.filter(|parent| !parent.is_empty()).collect())
    }
}
