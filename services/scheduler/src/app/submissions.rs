//! Submission of workloads: admit, accept, pin the inputs, queue.

use std::sync::Arc;

use db::Transaction;
use domain::workload::{Image, WorkloadSpec};
use domain::{LeaseId, Timestamp, WorkloadId};
use rpc::Refusal;
use sea_orm::DbErr;
use tokio::sync::Notify;

use crate::context::Context;
use crate::db::entity::is_duplicate;
use crate::db::entity::workload::State;
use crate::leases;
use crate::notify::changes::Effects;
use crate::placement::{Choice, Demand, Location, Refusals};
use crate::queue::limits::Admissions;
use crate::scheduling::{Dispatch, Request, SubmitError};
use crate::store_client::Store;
use crate::workloads::{self, OtherSpec, Submission, Write};

/// How often a workload is tried with another image when the cluster was given one meanwhile.
const IMAGES: usize = 8;

/// How far a submitted workload is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Accepted {
    /// It is in the queue, or further.
    Queued,
    /// It is durable; its inputs must be pinned before it may be queued.
    Pinning,
    /// The same, since a call before this one.
    Before,
}

/// Accepts workloads. Cheap to clone; clones share it.
#[derive(Clone)]
pub(crate) struct Submissions {
    context: Context,
    store: Store,
    dispatch: Dispatch,
    admissions: Arc<Admissions>,
}

impl Submissions {
    pub(crate) fn new(context: Context, store: Store, dispatch: Dispatch) -> Self {
        let config = &context.config;
        let admissions = Admissions::new(config.most_waiting, config.most_waiting_bytes);
        Self { context, store, dispatch, admissions }
    }

    /// Accepts a workload: durable and queued once this answers.
    pub(crate) async fn submit(
        &self,
        id: WorkloadId,
        spec: WorkloadSpec,
        traceparent: Option<String>,
    ) -> Result<(), SubmitError> {
        let submission = Submission::new(id, spec, traceparent);
        let Image::ResourceType(name) = &submission.spec.image else {
            return self.submit_as_it_is(submission.into()).await;
        };
        // A repeat keeps what it was given before, whatever the cluster has now.
        if workloads::find(self.context.db.read(), id).await?.is_some() {
            match self.known(&submission).await {
                // It was withdrawn, and begins anew with what the cluster has now.
                Err(SubmitError::NotPinned(refusal)) if !refusal.is_transient() => {}
                known => return known,
            }
        }
        let image = async || self.store.image(name).await.map_err(SubmitError::NotPinned);
        let mut given = image().await?;
        for _ in 0..IMAGES {
            let submitted = self.submit_as_it_is(submission.clone().with_image(given.clone()).into()).await;
            match submitted {
                Err(SubmitError::NotPinned(refusal)) if !refusal.is_transient() => {
                    let before = std::mem::replace(&mut given, image().await?);
                    // Otherwise the cluster was given another one since.
                    if given == before {
                        return Err(SubmitError::NotPinned(refusal));
                    }
                }
                submitted => return submitted,
            }
        }
        Err(SubmitError::Undecided)
    }

    /// The same, of one that names its image.
    async fn submit_as_it_is(&self, submission: Arc<Submission>) -> Result<(), SubmitError> {
        let team = &submission.spec.team;
        let waits = || self.dispatch.queue().load(team);
        let _admitted = match self.admissions.admit(waits, team, submission.spec_bytes()) {
            Ok(admitted) => admitted,
            // A repeat adds nothing.
            Err(full) => {
                return match workloads::find(self.context.db.read(), submission.id).await? {
                    Some(_) => self.known(&submission).await,
                    None => Err(full.into()),
                };
            }
        };
        if !submission.pins() {
            let submitted = self.dispatch.ask(|answer| Request::Submit(submission, answer));
            return submitted.await.unwrap_or(Err(SubmitError::Stopping));
        }
        if let Some(refusals) = self.never(&submission).await {
            // A repeat is no news, whatever has become of the workers.
            return match workloads::find(self.context.db.read(), submission.id).await? {
                Some(_) => self.known(&submission).await,
                None => Err(SubmitError::NoCompatibleWorker(refusals)),
            };
        }
        let checked = Notify::new();
        let accepting = self.context.db.write(async |txn| {
            let accepted = self.accept(&txn, &submission, Timestamp::now()).await?;
            if accepted == Accepted::Pinning {
                checked.notify_one();
            }
            Ok::<_, SubmitError>(accepted)
        });
        // While the commit is under way. A pin without a workload goes as does any whose workload nobody remembers ([`crate::store_client::reconcile`]).
        let pinning = async {
            checked.notified().await;
            self.store.pin(&submission).await
        };
        tokio::pin!(accepting, pinning);
        let mut pinned = None;
        let accepted = loop {
            tokio::select! {
                accepted = &mut accepting => break accepted,
                answer = &mut pinning, if pinned.is_none() => pinned = Some(answer),
            }
        };
        let accepted = match accepted {
            Err(SubmitError::Database(error)) if is_duplicate(&error) => {
                // Another call of the same id was faster. It is known now.
                return self.known(&submission).await;
            }
            accepted => accepted?,
        };
        match (accepted, pinned) {
            (Accepted::Queued, _) => Ok(()),
            (Accepted::Before, _) => self.known(&submission).await,
            (Accepted::Pinning, Some(answer)) => self.pinned(&submission, answer).await,
            (Accepted::Pinning, None) => self.pinned(&submission, pinning.await).await,
        }
    }

    /// Writes a workload down whose inputs must be pinned. Repeating it changes nothing.
    async fn accept(
        &self,
        txn: &Transaction,
        submission: &Submission,
        now: Timestamp,
    ) -> Result<Accepted, SubmitError> {
        if let Some(known) = workloads::find(&**txn, submission.id).await? {
            submission.repeats(&known.spec_digest)?;
            let is_new = known.state == State::Accepted;
            return Ok(if is_new { Accepted::Before } else { Accepted::Queued });
        }
        // In the artifact store, what a workload holds and what a lease holds would be one.
        if leases::find(&**txn, LeaseId::from_uuid(submission.id.uuid())).await?.is_some() {
            return Err(SubmitError::Exists(OtherSpec(submission.id)));
        }
        let row = submission.row(State::Accepted, now);
        workloads::save(txn, row, Write::Insert, None, now, &mut Effects::default()).await?;
        Ok(Accepted::Pinning)
    }

    /// Why no worker could ever do, if that is so.
    async fn never(&self, submission: &Submission) -> Option<Refusals> {
        let demand = Demand::of(&submission.spec, submission.id.uuid());
        let never = || {
            let mut workers = self.dispatch.workers.lock();
            (workers.choose(&demand, &[]) == Choice::Never).then(|| workers.refusals(&demand))
        };
        never()?;
        // What is remembered may be out of date.
        self.dispatch.catch_up().await;
        never()
    }

    async fn known(&self, submission: &Submission) -> Result<(), SubmitError> {
        match workloads::find(self.context.db.read(), submission.id).await? {
            Some(row) => {
                submission.repeats(&row.spec_digest)?;
                if row.state != State::Accepted {
                    return Ok(());
                }
                let kept = Arc::new(submission.as_kept(&row)?);
                self.pinned(&kept, self.store.pin(&kept).await).await
            }
            None => Err(DbErr::RecordNotFound("a workload that was just there".to_owned()).into()),
        }
    }

    /// Queues an accepted workload once its inputs are pinned. `answer`: of the store.
    async fn pinned(
        &self,
        submission: &Arc<Submission>,
        answer: Result<Vec<Location>, Refusal>,
    ) -> Result<(), SubmitError> {
        match answer {
            Ok(locations) => {
                let pinned = |answer| Request::Pinned(submission.clone(), locations.into(), answer);
                self.dispatch.ask(pinned).await.unwrap_or(Err(SubmitError::Stopping))
            }
            // Whether it is pinned is unknown: a repeat, or the reconciliation, finds the row.
            Err(refusal) if refusal.is_transient() => Err(SubmitError::NotPinned(refusal)),
            Err(refusal) => {
                let withdrawn =
                    self.context.db.write(async |txn| workloads::withdraw(&txn, submission.id).await).await?;
                // Otherwise it went on without us: it was pinned by another call, or cancelled.
                if withdrawn { Err(SubmitError::NotPinned(refusal)) } else { Ok(()) }
            }
        }
    }
}
