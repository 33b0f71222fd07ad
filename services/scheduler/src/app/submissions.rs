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
use crate::image_references::{self, ImageReferences};
use crate::leases;
use crate::notify::changes::Effects;
use crate::placement::{Choice, Demand, Location, Refusals};
use crate::queue::limits::Admissions;
use crate::scheduling::{Dispatch, Request, SubmitError};
use crate::store_client::Store;
use crate::workers;
use crate::workloads::{self, Submission, Write};

/// Maximum number of tries with another image, if the cluster's resource type changes during the
/// submission.
const MAX_IMAGE_TRIES: usize = 8;

/// The state of a submitted workload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Acceptance {
    /// The workload is in the queue, or further.
    Queued,
    /// The workload is durable. Its inputs must be pinned before it may be queued.
    Pinning,
    /// An earlier call accepted the workload, and its inputs are not pinned yet.
    AlreadyPinning,
}

/// Accepts workloads. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Submissions {
    context: Context,
    store: Store,
    references: ImageReferences,
    dispatch: Dispatch,
    admissions: Arc<Admissions>,
}

impl Submissions {
    pub(crate) fn new(
        context: Context,
        store: Store,
        references: ImageReferences,
        dispatch: Dispatch,
    ) -> Self {
        let config = &context.config;
        let admissions = Admissions::new(config.max_waiting_per_team, config.max_waiting_bytes_per_team);
        Self { context, store, references, dispatch, admissions }
    }

    /// Accepts a workload. The workload is durable and queued when this function returns.
    pub(crate) async fn submit(
        &self,
        id: WorkloadId,
        spec: WorkloadSpec,
        traceparent: Option<String>,
    ) -> Result<(), SubmitError> {
        let mut submission = Submission::new(id, spec, traceparent);
        if !submission.spec.worker.is_empty() {
            let worker = workers::id_of(self.context.db.read(), &submission.spec.worker).await?;
            submission = match worker {
                Some(worker) => submission.with_worker(worker),
                // A repeat is accepted even if the worker was removed.
                None if workloads::find(self.context.db.read(), id).await?.is_some() => {
                    return self.resume_known(&submission).await;
                }
                None => return Err(SubmitError::UnknownWorker(submission.spec.worker)),
            };
        }
        if image_references::has_tags(&submission.spec) {
            // A repeat keeps the digest of the first call, even if the tag has moved.
            if workloads::find(self.context.db.read(), id).await?.is_some() {
                match self.resume_known(&submission).await {
                    // The workload was withdrawn. It starts over with the present image.
                    Err(SubmitError::NotPinned(refusal)) if !refusal.is_transient() => {}
                    known => return known,
                }
            }
            let resolved = self.references.resolve(submission.spec.clone()).await;
            submission = submission.with_spec(resolved.map_err(SubmitError::NotPinned)?);
        }
        let Image::ResourceType(name) = &submission.spec.image else {
            return self.submit_resolved(submission.into()).await;
        };
        // A repeat keeps the image of the first call, even if the resource type has changed.
        if workloads::find(self.context.db.read(), id).await?.is_some() {
            match self.resume_known(&submission).await {
                // The workload was withdrawn. It starts over with the present image.
                Err(SubmitError::NotPinned(refusal)) if !refusal.is_transient() => {}
                known => return known,
            }
        }
        let image = async || self.store.image(name).await.map_err(SubmitError::NotPinned);
        let mut given = image().await?;
        for _ in 0..MAX_IMAGE_TRIES {
            let submitted = self.submit_resolved(submission.clone().with_image(given.clone()).into()).await;
            match submitted {
                Err(SubmitError::NotPinned(refusal)) if !refusal.is_transient() => {
                    let before = std::mem::replace(&mut given, image().await?);
                    // If the image is the same, the refusal holds. Otherwise the resource type
                    // changed meanwhile.
                    if given == before {
                        return Err(SubmitError::NotPinned(refusal));
                    }
                }
                submitted => return submitted,
            }
        }
        Err(SubmitError::Undecided)
    }

    /// Submits a workload whose image is resolved.
    async fn submit_resolved(&self, submission: Arc<Submission>) -> Result<(), SubmitError> {
        let team = &submission.spec.team;
        let waits = || self.dispatch.queue().load(team);
        let _admitted = match self.admissions.admit(waits, team, submission.spec_bytes()) {
            Ok(admitted) => admitted,
            // A repeat adds no load, so the limit does not apply.
            Err(full) => {
                return match workloads::find(self.context.db.read(), submission.id).await? {
                    Some(_) => self.resume_known(&submission).await,
                    None => Err(full.into()),
                };
            }
        };
        if !submission.pins() {
            let submitted = self.dispatch.call(|answer| Request::Submit(submission, answer));
            return submitted.await.unwrap_or(Err(SubmitError::Stopping));
        }
        if let Some(refusals) = self.unschedulable_refusals(&submission).await {
            // A repeat is accepted even if the workers have changed.
            return match workloads::find(self.context.db.read(), submission.id).await? {
                Some(_) => self.resume_known(&submission).await,
                None => Err(SubmitError::NoCompatibleWorker(refusals)),
            };
        }
        let checked = Notify::new();
        let accepting = self.context.db.write(async |txn| {
            let accepted = self.accept(&txn, &submission, Timestamp::now()).await?;
            if accepted == Acceptance::Pinning {
                checked.notify_one();
            }
            Ok::<_, SubmitError>(accepted)
        });
        // The pins are set while the commit is in progress. If the workload does not exist in the
        // end, [`crate::store_client::reconcile`] removes the pins.
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
                // Another call inserted the same id first, so the workload exists now.
                return self.resume_known(&submission).await;
            }
            accepted => accepted?,
        };
        match (accepted, pinned) {
            (Acceptance::Queued, _) => Ok(()),
            (Acceptance::AlreadyPinning, _) => self.resume_known(&submission).await,
            (Acceptance::Pinning, Some(answer)) => self.queue_pinned(&submission, answer).await,
            (Acceptance::Pinning, None) => self.queue_pinned(&submission, pinning.await).await,
        }
    }

    /// Inserts a workload whose inputs must be pinned. Idempotent.
    async fn accept(
        &self,
        txn: &Transaction,
        submission: &Submission,
        now: Timestamp,
    ) -> Result<Acceptance, SubmitError> {
        if let Some(known) = workloads::find(&**txn, submission.id).await? {
            submission.repeats(&known.spec_digest)?;
            let is_new = known.state == State::Accepted;
            return Ok(if is_new { Acceptance::AlreadyPinning } else { Acceptance::Queued });
        }
        if leases::find(&**txn, LeaseId::from_uuid(submission.id.uuid())).await?.is_some() {
            return Err(SubmitError::LeaseId(submission.id));
        }
        let row = submission.row(State::Accepted, now);
        workloads::save(txn, row, Write::Insert, None, now, &mut Effects::default()).await?;
        Ok(Acceptance::Pinning)
    }

    /// Returns the refusals if no worker could ever run the workload.
    async fn unschedulable_refusals(&self, submission: &Submission) -> Option<Refusals> {
        let demand = Demand::of(&submission.spec, submission.id.uuid());
        let refusals = || {
            let mut workers = self.dispatch.workers.lock();
            (workers.choose(&demand, &[]) == Choice::Never).then(|| workers.refusals(&demand))
        };
        refusals()?;
        // The worker cache may be out of date.
        self.dispatch.catch_up().await;
        refusals()
    }

    async fn resume_known(&self, submission: &Submission) -> Result<(), SubmitError> {
        match workloads::find(self.context.db.read(), submission.id).await? {
            Some(row) => {
                submission.repeats(&row.spec_digest)?;
                if row.state != State::Accepted {
                    return Ok(());
                }
                let kept = Arc::new(submission.as_kept(&row)?);
                self.queue_pinned(&kept, self.store.pin(&kept).await).await
            }
            None => Err(DbErr::RecordNotFound("a workload that existed a moment ago".to_owned()).into()),
        }
    }

    /// Queues an accepted workload once its inputs are pinned. `answer`: the response of the store.
    async fn queue_pinned(
        &self,
        submission: &Arc<Submission>,
        answer: Result<Vec<Location>, Refusal>,
    ) -> Result<(), SubmitError> {
        match answer {
            Ok(locations) => {
                let pinned = |answer| Request::Pinned(submission.clone(), locations.into(), answer);
                self.dispatch.call(pinned).await.unwrap_or(Err(SubmitError::Stopping))
            }
            // The pins are in an unknown state. A repeat or the reconciliation finds the row.
            Err(refusal) if refusal.is_transient() => Err(SubmitError::NotPinned(refusal)),
            Err(refusal) => {
                let withdrawn =
                    self.context.db.write(async |txn| workloads::withdraw(&txn, submission.id).await).await?;
                // Otherwise another call pinned the inputs, or the workload was cancelled.
                if withdrawn { Err(SubmitError::NotPinned(refusal)) } else { Ok(()) }
            }
        }
    }
}
