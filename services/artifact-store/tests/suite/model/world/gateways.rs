//! Calls of gateways: reports, sweeps and new sessions.

use std::collections::BTreeSet;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use rpc::pb::artifacts as pb;
use rpc::{Reason, Refusal};
use tonic::Streaming;
use uuid::Uuid;

use super::{Speaker, World, done};
use crate::model::operations::Delivery;
use crate::model::state::{Outcome, ReportValidity, State, attempt_id, worker_id, workload_id};
use crate::{Callers, PATIENCE};

/// Items that a gateway was told to delete.
#[derive(Default)]
pub(super) struct Marks {
    stream: Option<Streaming<pb::WatchDestroyingResponse>>,
    /// Items received from this stream.
    received: BTreeSet<Uuid>,
}

/// Begun reports of a worker.
#[derive(Default)]
pub(super) struct Reports {
    begun: Vec<BegunReport>,
    /// Highest token that was judged.
    judged: u64,
}

#[derive(Clone)]
pub(super) struct BegunReport {
    token: pb::ReportToken,
    volumes: Vec<String>,
    containers: Vec<String>,
    speaker: Speaker,
}

/// Forgetting of a worker.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Forgets {
    begun: u32,
    ended: u32,
    /// Reports with a lower token began before it. 0 if it was never forgotten.
    before: u64,
}

/// Maximum number of undelivered reports of a worker.
const REPORTS: usize = 6;

impl World {
    pub(super) async fn begin_report(&self, state: &State, worker: u8) -> Outcome {
        let mut reports = self.reports[usize::from(worker)].lock().await;
        let speaker = self.speaker(worker);
        let begin = |callers: Callers| {
            let gateway = speaker.gateway.by_way_of(&callers);
            async move { gateway.begin_report().await }
        };
        let token = match self.ask(begin).await {
            Ok(token) => token,
            Err(refusal) => return Outcome::Refused(refusal),
        };
        let (volumes, containers) = state.holdings(worker);
        reports.begun.push(BegunReport { token, volumes, containers, speaker });
        if reports.begun.len() > REPORTS {
            reports.begun.remove(0);
        }
        Outcome::Done
    }

    pub(super) async fn report(&self, worker: u8, which: u8, way: Delivery) -> Outcome {
        let mut reports = self.reports[usize::from(worker)].lock().await;
        let Some(last) = reports.begun.len().checked_sub(1) else { return Outcome::Skipped };
        let which = usize::from(which).min(last);
        let begun = match way {
            Delivery::Once => reports.begun.remove(which),
            Delivery::Repeatedly | Delivery::Cut => reports.begun[which].clone(),
        };
        let now = self.speaker(worker);
        let is_former = (begun.speaker.incarnation, begun.speaker.session) != (now.incarnation, now.session);
        // The call of a former session must not be the first after its worker was forgotten,
        // because the store would accept it.
        let _alone = if is_former { Some(self.forgetting.lock().await) } else { None };
        if is_former && let Err(refusal) = self.speak_first(worker).await {
            return Outcome::Refused(refusal);
        }
        let forgets = self.forgets(worker);
        let validity = if begun.token.sequence < forgets.before {
            ReportValidity::OfForgotten
        } else if is_former {
            ReportValidity::OfFormerSession
        } else if begun.token.store_life != *self.life.lock().unwrap_or_else(PoisonError::into_inner)
            || begun.token.sequence < reports.judged
        {
            ReportValidity::Overtaken
        } else {
            ReportValidity::Good
        };
        let begun = &begun;
        let count = u64::try_from(begun.volumes.len() + begun.containers.len()).expect("few");
        let count = (way != Delivery::Cut).then_some(count);
        let life = &now.gateway.life;
        let report = |callers: Callers| async move {
            let mut gateway = begun.speaker.gateway.by_way_of(&callers);
            gateway.life.clone_from(life);
            gateway.report_counted(begun.token.clone(), &begun.volumes, &begun.containers, count).await
        };
        let answer = self.ask(report).await;
        let is_doubtful = forgets.begun != forgets.ended || self.forgets(worker).begun != forgets.begun;
        let validity = if is_doubtful { ReportValidity::Doubtful } else { validity };
        match answer {
            Ok(response) => {
                reports.judged = reports.judged.max(begun.token.sequence);
                let mut speakers = self.speakers.lock().unwrap_or_else(PoisonError::into_inner);
                speakers[usize::from(worker)].gateway.life = None;
                let listed = begun.volumes.iter().chain(&begun.containers);
                let listed = listed.map(|text| text.parse().expect("a handle")).collect();
                Outcome::Reported { response, validity, listed }
            }
            Err(refusal) => Outcome::NotReported { refusal, validity },
        }
    }

    /// Receives all marked items from the stream of a gateway, and items that are already
    /// available.
    pub(super) async fn sweep(&self, worker: u8) -> Outcome {
        let mut marks = self.marks[usize::from(worker)].lock().await;
        let Marks { stream, received } = &mut *marks;
        let mut handles = Vec::new();
        let deadline = Instant::now() + PATIENCE;
        let mut marked = self.marked(worker).await;
        loop {
            let waits = marked.iter().any(|id| !received.contains(id));
            if waits && Instant::now() > deadline {
                return refused(format!("{marked:?} are marked and not handed out"));
            }
            let opened = match stream.take() {
                Some(open) => open,
                None => {
                    received.clear();
                    let gateway = &self.speaker(worker).gateway;
                    let watch = |callers: Callers| async move { gateway.by_way_of(&callers).watch().await };
                    match self.ask(watch).await {
                        Ok(open) => open,
                        Err(refusal) => return Outcome::Refused(refusal),
                    }
                }
            };
            let open = stream.insert(opened);
            let patience = Duration::from_millis(if waits { 1000 } else { 0 });
            match tokio::time::timeout(patience, open.message()).await {
                Ok(Ok(Some(sweep))) => {
                    for text in sweep.container_handles.iter().chain(&sweep.volume_handles) {
                        let id = text.parse().expect("a handle");
                        received.insert(id);
                        handles.push(id);
                    }
                }
                // Its replica is gone.
                Ok(Ok(None) | Err(_)) => *stream = None,
                Err(_) if waits => marked = self.marked(worker).await,
                Err(_) => return Outcome::Swept(handles),
            }
        }
    }

    /// Returns the marked items of a worker.
    pub(super) async fn marked(&self, worker: u8) -> BTreeSet<Uuid> {
        use pb::InventoryState::{Destroying, Sweeping};
        let mut marked = BTreeSet::new();
        let of_worker = worker_id(worker).to_string();
        let mut volumes = self.volumes(&of_worker).await;
        // The youngest first. The parent of a restored child is not handed out, and neither are its
        // own parents.
        volumes.sort_by(|one, other| other.volume_handle.cmp(&one.volume_handle));
        let (_, mut needed) = self.orphans().await;
        for volume in volumes {
            if volume.state() == Sweeping
                || (volume.state() == Destroying && !needed.contains(&volume.volume_handle))
            {
                marked.insert(volume.volume_handle.parse().expect("a handle"));
            } else {
                needed.insert(volume.parent_handle);
            }
        }
        for container in self.containers(&of_worker).await {
            if matches!(container.state(), Destroying | Sweeping) {
                marked.insert(container.container_handle.parse().expect("a handle"));
            }
        }
        marked
    }

    pub(super) async fn start_session(&self, worker: u8, incarnations: u64, sessions: u64) -> Outcome {
        let callers = self.callers(0);
        let gateway = {
            let mut speakers = self.speakers.lock().unwrap_or_else(PoisonError::into_inner);
            let speaker = &mut speakers[usize::from(worker)];
            speaker.incarnation += incarnations;
            speaker.session += sessions;
            let mut new = callers.silent_gateway(worker_id(worker), speaker.incarnation, speaker.session);
            new.life.clone_from(&speaker.gateway.life);
            speaker.former = Some(std::mem::replace(&mut speaker.gateway, new.clone()));
            new
        };
        *self.marks[usize::from(worker)].lock().await = Marks::default();
        let gateway = &gateway;
        let begin = |callers: Callers| async move { gateway.by_way_of(&callers).begin_report().await };
        done(self.ask(begin).await)
    }

    fn forgets(&self, worker: u8) -> Forgets {
        *self.forgets[usize::from(worker)].lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn note_forgets(&self, worker: u8, note: impl FnOnce(&mut Forgets)) {
        note(&mut self.forgets[usize::from(worker)].lock().unwrap_or_else(PoisonError::into_inner));
    }

    pub(super) async fn forget_worker(&self, worker: u8, force: bool) -> Outcome {
        let _alone = self.forgetting.lock().await;
        self.note_forgets(worker, |forgets| forgets.begun += 1);
        // The sequence of a returning worker begins at the current time, above its earlier numbers.
        let at = self.tick();
        let request =
            || pb::ForgetWorkerRequest { worker_id: worker_id(worker).to_string(), force, dry_run: false };
        let forget = |callers: Callers| async move {
            Ok(callers.inventory().forget_worker(request()).await.map(drop)?)
        };
        let answer = self.ask(forget).await;
        self.note_forgets(worker, |forgets| {
            forgets.ended += 1;
            if answer.is_ok() {
                forgets.before = at.unsigned_abs();
            }
        });
        if answer.is_ok() {
            // The gateways of the worker are rejected until they register again.
            *self.marks[usize::from(worker)].lock().await = Marks::default();
        }
        done(answer)
    }

    /// Makes the current gateway of a worker register, if the store was told to forget the worker.
    async fn speak_first(&self, worker: u8) -> Result<(), Refusal> {
        if self.forgets(worker).ended == 0 {
            return Ok(());
        }
        let gateway = &self.speaker(worker).gateway;
        let begin = |callers: Callers| async move { gateway.by_way_of(&callers).begin_report().await };
        self.ask(begin).await.map(drop)
    }

    pub(super) async fn former(&self, worker: u8) -> Outcome {
        let Some(former) = self.speaker(worker).former else { return Outcome::Skipped };
        if let Err(refusal) = self.speak_first(worker).await {
            return Outcome::Refused(refusal);
        }
        let former = &former;
        let unknown = (workload_id(u16::MAX), attempt_id(u16::MAX, 0));
        let begun = self.ask(|callers| async move { former.by_way_of(&callers).begin_report().await });
        let prepared =
            self.ask(
                |callers| async move { former.by_way_of(&callers).prepare(unknown.0, unknown.1, &[]).await },
            );
        let made = self.ask(|callers| async move { former.by_way_of(&callers).prepared(unknown.1).await });
        let answers = [begun.await.err(), prepared.await.err(), made.await.err()];
        Outcome::Former(answers.into())
    }
}

pub(super) fn refused(message: String) -> Outcome {
    let reason = Reason::Unavailable;
    let about = Default::default();
    Outcome::Refused(Refusal { code: reason.code(), reason: None, message, about })
}
