//! The scheduler itself: one transaction for each thing that is asked of it, and what somebody hears of it after the commit.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use db::{Database, Transaction};
use domain::worker::{LeaseClaims, ProxyClaims, TicketClaims, TicketOperation};
use domain::workload::{Image, WorkloadSpec};
use domain::{LeaseId, Timestamp, VolumeHandle, WorkerId, WorkloadId};
use futures::StreamExt;
use rpc::token::TokenSigner;
use rpc::{Reason, Refusal};
use sea_orm::{ConnAcquireErr, DbErr};
use tokio::sync::{Notify, Semaphore};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::attended::Attended;
use crate::config::Config;
use crate::contacts::Contacts;
use crate::dispatch::{Ask, Dispatch, PlaceError, Placed, Request, SubmitError};
use crate::drift::Drift;
use crate::effects::Effects;
use crate::entity::lease::{self, EndedBy};
use crate::entity::worker;
use crate::entity::workload::State;
use crate::events::InputProgress;
use crate::gossip::Gossip;
use crate::hellos::Hellos;
use crate::hints::{ALL_WORKERS, Hints};
use crate::leases::{self, RenewError};
use crate::outbox;
use crate::outcome::{AttemptEnd, Report};
use crate::placement::{Choice, Demand, Location, Refusals};
use crate::registry::{self, Down, Forget, RegistryError, Unended};
use crate::store::{Inputs, Store};
use crate::waiting_limits::Admissions;
use crate::workers::{self, Hello, SessionError, Worker};
use crate::workloads::{self, AttemptError, Phase, Submission, Workload, WorkloadError, Write};

/// What every handler and loop has. Cheap to clone; clones share it.
#[derive(Clone)]
pub(crate) struct Scheduler {
    pub(crate) db: Database,
    pub(crate) config: Arc<Config>,
    pub(crate) signer: TokenSigner,
    pub(crate) store: Store,
    pub(crate) admissions: Arc<Admissions>,
    /// Bounds how many parcels are delivered at a time.
    pub(crate) deliveries: Arc<Semaphore>,
    pub(crate) delivered: outbox::Delivered,
    pub(crate) hints: Hints,
    pub(crate) dispatch: Dispatch,
    pub(crate) attended: Attended,
    pub(crate) contacts: Contacts,
    pub(crate) hellos: Hellos,
    pub(crate) gossip: Gossip,
    pub(crate) drift: Drift,
    /// The revision of workers up to which no lease is left of one that is lost, or of an incarnation that is over.
    pub(crate) orphans_ended: Arc<AtomicI64>,
    pub(crate) tasks: TaskTracker,
    pub(crate) stopping: CancellationToken,
}

/// How often a workload is tried with another image when the centre was given one meanwhile.
const IMAGES: usize = 8;

/// How many leases are pinned for at a time, of one call.
const PINS: usize = 16;

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

/// A ticket cannot be issued.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TicketError {
    /// There is no such worker.
    #[error("worker {0} is unknown")]
    NotFound(WorkerId),
    /// No gateway attends it now.
    #[error("worker {0} is out of contact")]
    Unreachable(WorkerId),
    /// The artifact store has planned no such transfer, or does not answer.
    #[error(transparent)]
    Store(#[from] Refusal),
    /// The database does not answer.
    #[error("the database failed")]
    Database(#[from] DbErr),
}

/// Permission for one transfer or for a proxy, and where to use it.
#[derive(Debug)]
pub(crate) struct Ticket {
    pub(crate) token: String,
    pub(crate) gateway_endpoint: String,
}

impl Scheduler {
    /// Makes one change in one transaction, and announces its effects once it is committed.
    pub(crate) async fn change<T, E, F>(
        &self,
        change: impl Fn(Transaction) -> F + Send + Sync,
    ) -> Result<T, E>
    where
        F: Future<Output = Result<(T, Effects), E>> + Send,
        T: Send,
        E: std::error::Error + From<DbErr> + Send + 'static,
    {
        let (answer, effects) = self.db.write(change).await?;
        self.announce(effects);
        Ok(answer)
    }

    /// Tells those who wait what was committed, and delivers what was put into the outbox.
    pub(crate) fn announce(&self, effects: Effects) {
        self.attended.look_at(effects.workers.iter().copied());
        self.hints.look_at(effects.workers.iter().copied(), effects.queued.iter().copied());
        self.announce_granted(effects);
    }

    /// The same of what the dispatcher did, which knows that.
    pub(crate) fn announce_granted(&self, effects: Effects) {
        if self.config.share_hints {
            self.gossip.tell(&effects);
        }
        let Effects { workloads, workers, freed, parcels, queued: _, deadline, registry } = effects;
        if !workers.is_empty() || !freed.is_empty() {
            self.hints.leases_changed();
        }
        if registry {
            self.hints.changed(ALL_WORKERS);
            self.hints.registry().notify_one();
        }
        workloads.iter().for_each(|workload| self.hints.changed(workload.uuid()));
        if deadline {
            self.hints.timer().notify_one();
        }
        for parcel in parcels {
            let scheduler = self.clone();
            self.tasks.spawn(async move {
                tokio::select! {
                    // What is not delivered now is delivered after the next start.
                    () = scheduler.stopping.cancelled() => {}
                    () = outbox::deliver(scheduler.clone(), parcel) => {}
                }
            });
        }
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
        // A repeat keeps what it was given before, whatever the centre has now.
        if workloads::find(self.db.read(), id).await?.is_some() {
            match self.known(&submission).await {
                // It was withdrawn, and begins anew with what the centre has now.
                Err(SubmitError::NotPinned(refusal)) if !refusal.is_transient() => {}
                known => return known,
            }
        }
        let image = async || self.image(name).await.map_err(SubmitError::NotPinned);
        let mut given = image().await?;
        for _ in 0..IMAGES {
            let submitted = self.submit_as_it_is(submission.clone().with_image(given.clone()).into()).await;
            match submitted {
                Err(SubmitError::NotPinned(refusal)) if !refusal.is_transient() => {
                    let before = std::mem::replace(&mut given, image().await?);
                    // Otherwise the centre was given another one since.
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
                return match workloads::find(self.db.read(), submission.id).await? {
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
            return match workloads::find(self.db.read(), submission.id).await? {
                Some(_) => self.known(&submission).await,
                None => Err(SubmitError::NoCompatibleWorker(refusals)),
            };
        }
        let checked = Notify::new();
        let accepting = self.db.write(async |txn| {
            let accepted = self.accept(&txn, &submission, Timestamp::now()).await?;
            if accepted == Accepted::Pinning {
                checked.notify_one();
            }
            Ok::<_, SubmitError>(accepted)
        });
        // While the commit is under way. A pin without a workload goes as does any whose workload nobody remembers ([`crate::reconcile`]).
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
            return Err(SubmitError::Exists(submission.id));
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

    /// What a resource type stands for: what the centre has of it, before what workers bring along.
    pub(crate) async fn image(&self, resource_type: &str) -> Result<Image, Refusal> {
        let of_centre = self.store.base_type_of_centre(resource_type).await?;
        Ok(of_centre.map_or_else(|| Image::ResourceType(resource_type.to_owned()), Image::Artifact))
    }

    async fn known(&self, submission: &Submission) -> Result<(), SubmitError> {
        match workloads::find(self.db.read(), submission.id).await? {
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
                    self.db.write(async |txn| workloads::withdraw(&txn, submission.id).await).await?;
                // Otherwise it went on without us: it was pinned by another call, or cancelled.
                if withdrawn { Err(SubmitError::NotPinned(refusal)) } else { Ok(()) }
            }
        }
    }

    /// The process of an attempt is about to start.
    pub(crate) async fn start_attempt(&self, claims: &LeaseClaims) -> Result<(), AttemptError> {
        self.change(async |txn| {
            let mut effects = Effects::default();
            workloads::start_attempt(&txn, claims, Timestamp::now(), &mut effects).await?;
            Ok::<_, AttemptError>(((), effects))
        })
        .await
    }

    /// An attempt has ended.
    pub(crate) async fn finish_attempt(
        &self,
        claims: &LeaseClaims,
        report: &Report,
    ) -> Result<(), AttemptError> {
        self.change(async |txn| {
            let mut effects = Effects::default();
            let now = Timestamp::now();
            workloads::finish_attempt(&txn, claims, report.clone(), &self.config, now, &mut effects).await?;
            Ok::<_, AttemptError>(((), effects))
        })
        .await
    }

    /// Lets a workload stop.
    pub(crate) async fn cancel(
        &self,
        team: &str,
        id: WorkloadId,
        grace: Duration,
    ) -> Result<(), WorkloadError> {
        self.change(async |txn| {
            let mut effects = Effects::default();
            workloads::cancel(&txn, team, id, grace, Timestamp::now(), &mut effects).await?;
            Ok::<_, WorkloadError>(((), effects))
        })
        .await
    }

    /// Nothing, if `team` has such a workload.
    pub(crate) async fn has(&self, team: &str, id: WorkloadId) -> Result<(), WorkloadError> {
        let row = workloads::find(self.db.read(), id).await?.filter(|row| row.team == team);
        row.map(drop).ok_or(WorkloadError::NotFound(id))
    }

    /// One workload as it is now.
    pub(crate) async fn get(&self, team: &str, id: WorkloadId) -> Result<Workload, WorkloadError> {
        let db = self.db.read();
        let row = workloads::find(db, id).await?.filter(|row| row.team == team);
        let mut seen = workloads::view(db, row.into_iter().collect()).await?;
        let mut workload = seen.pop().ok_or(WorkloadError::NotFound(id))?;
        if let Some(whereabouts) = &mut workload.whereabouts
            && let Some((_, endpoint)) = workers::reach(db, whereabouts.worker).await?
        {
            // Its gateway may have moved since the workload was placed.
            whereabouts.gateway_endpoint = endpoint;
        }
        Ok(workload)
    }

    /// A gateway says how far it is with its leases.
    pub(crate) async fn observe_phases(&self, phases: &[(lease::Model, Phase)]) -> Result<(), DbErr> {
        self.change(async |txn| {
            let mut effects = Effects::default();
            for (lease, phase) in phases {
                workloads::observe_phase(&txn, lease, *phase, Timestamp::now(), &mut effects).await?;
            }
            Ok::<_, DbErr>(((), effects))
        })
        .await
    }

    /// A gateway says how far it is with the inputs of its leases.
    pub(crate) async fn observe_inputs(
        &self,
        inputs: &[(lease::Model, Vec<InputProgress>)],
    ) -> Result<(), DbErr> {
        self.change(async |txn| {
            let mut effects = Effects::default();
            for (lease, inputs) in inputs {
                workloads::observe_inputs(&txn, lease, inputs, Timestamp::now(), &mut effects).await?;
            }
            Ok::<_, DbErr>(((), effects))
        })
        .await
    }

    /// A gateway that was told of `lease` does not know it.
    pub(crate) async fn observe_absence(&self, lease: &lease::Model) -> Result<(), DbErr> {
        self.change(async |txn| {
            let mut effects = Effects::default();
            let (end, now) = (AttemptEnd::Unknown, Timestamp::now());
            workloads::lose_attempt(&txn, lease, end, now, &mut effects).await?;
            Ok::<_, DbErr>(((), effects))
        })
        .await
    }

    /// Lists the worker of a gateway with which we cannot speak.
    pub(crate) async fn list_incompatible(
        &self,
        hello: &Hello,
        versions: &[u32],
    ) -> Result<(), SessionError> {
        self.change(async |txn| {
            let (now, mut effects) = (Timestamp::now(), Effects::default());
            workers::list_incompatible(&txn, hello, versions, &self.config, now, &mut effects).await?;
            Ok::<_, SessionError>(((), effects))
        })
        .await
    }

    /// Lets a worker land or retire. Answers it as it is then. `None`: it has gone.
    pub(crate) async fn bring_down(
        &self,
        worker: &str,
        down: Down,
        interrupt_after: Option<Duration>,
    ) -> Result<Option<Worker>, RegistryError> {
        if down == (Down::Retire { force: false })
            && let Some(known) = workers::get(self.db.read(), &self.config, worker).await?
        {
            self.store.forget_worker(known.placed.id, Forget::Check).await.map_err(RegistryError::Kept)?;
        }
        let id = self
            .change(async |txn| {
                let (now, mut effects) = (Timestamp::now(), Effects::default());
                let id = registry::bring_down(&txn, worker, down, interrupt_after, now, &mut effects).await?;
                Ok::<_, RegistryError>((id, effects))
            })
            .await?;
        self.worker_now(id).await
    }

    /// Lets a worker take work again. `None`: it was retired, and may register again.
    pub(crate) async fn run_worker(&self, worker: &str) -> Result<Option<Worker>, RegistryError> {
        let id = self
            .change(async |txn| {
                let mut effects = Effects::default();
                let id = registry::run(&txn, worker, &mut effects).await?;
                Ok::<_, RegistryError>((id, effects))
            })
            .await?;
        self.worker_now(id).await
    }

    async fn worker_now(&self, worker: Option<WorkerId>) -> Result<Option<Worker>, RegistryError> {
        let Some(id) = worker else { return Ok(None) };
        Ok(workers::get(self.db.read(), &self.config, &id.to_string()).await?)
    }

    /// Forgets a worker that is not in contact. It has gone, but for what is left of its leases, once this answers: with what ended because of it.
    pub(crate) async fn prune(&self, worker: &str, force: bool) -> Result<Unended, RegistryError> {
        let id = self.db.write(async |txn| registry::prunable(&txn, worker).await).await?;
        let mut unended = Unended::default();
        if let Some(id) = id {
            if !force {
                self.store.forget_worker(id, Forget::Check).await.map_err(RegistryError::Kept)?;
            }
            unended = self
                .change(async |txn| {
                    let mut effects = Effects::default();
                    registry::prune(&txn, worker, &mut effects).await?;
                    Ok::<_, RegistryError>((registry::unended(&*txn, id).await?, effects))
                })
                .await?;
        }
        // It is pruned, and the answer is told once: what of this fails is done by the loops.
        let done = async {
            self.end_orphans().await?;
            registry::see_all_off(self, &mut registry::Asked::new()).await
        };
        if let Err(error) = done.await {
            tracing::warn!(%error, worker.name = worker, "what is left of a pruned worker is cleared away later");
        }
        Ok(unended)
    }

    /// Ends the leases of workers that are lost, pruned or have begun anew; gives up those under which something may run still.
    pub(crate) async fn end_orphans(&self) -> Result<(), DbErr> {
        let before = self.orphans_ended.load(Ordering::Relaxed);
        let last = registry::revisions(self.db.read()).await?.last;
        if last == before {
            return Ok(());
        }
        // A database that was restored has fewer.
        let after = if before < last { before } else { 0 };
        let orphans = workers::orphans(self.db.read(), after).await?;
        let are_all = orphans.len() < workers::ORPHANS;
        for lease in orphans {
            tracing::info!(lease.id = %lease.id, worker.id = %lease.worker_id, "ending or giving up the lease of a worker that is gone");
            match lease.is_driven() {
                false => {
                    self.change(async |txn| {
                        let mut effects = Effects::default();
                        // It may have come back in the meantime.
                        if workers::is_orphan(&*txn, &lease).await? {
                            let (end, now) = (AttemptEnd::WorkerLost, Timestamp::now());
                            workloads::lose_attempt(&txn, &lease, end, now, &mut effects).await?;
                        }
                        Ok::<_, DbErr>(((), effects))
                    })
                    .await?;
                }
                true => {
                    self.end_lease(LeaseId::from_uuid(lease.id), EndedBy::Lost).await?;
                }
            }
        }
        if are_all {
            self.orphans_ended.store(last, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Ends the leases of silent workers under which nothing was started, so that others can do the work.
    pub(crate) async fn take_back_unheard(&self) -> Result<(), DbErr> {
        for lease in workers::unheard(self.db.read(), &self.config, Timestamp::now()).await? {
            tracing::info!(lease.id = %lease.id, worker.id = %lease.worker_id, "taking back what a silent worker has not started");
            self.change(async |txn| {
                let mut effects = Effects::default();
                workloads::take_back(&txn, &lease, Timestamp::now(), &mut effects).await?;
                Ok::<_, DbErr>(((), effects))
            })
            .await?;
        }
        Ok(())
    }

    pub(crate) async fn end_lease(&self, lease: LeaseId, by: EndedBy) -> Result<(), DbErr> {
        self.change(async |txn| {
            let mut effects = Effects::default();
            leases::end(&txn, lease, by, Timestamp::now(), &mut effects).await?;
            Ok::<_, DbErr>(((), effects))
        })
        .await
    }

    /// Grants driven leases, or answers the live ones that their ids name: for each what became of it. What they use is pinned.
    pub(crate) async fn place(&self, asks: Vec<Ask>) -> Vec<Placed> {
        let uses: Vec<_> = asks.iter().map(|ask| (ask.group, ask.inputs.clone())).collect();
        let placed = self.dispatch.ask(|answer| Request::Place(asks, answer)).await;
        let mut placed = placed.unwrap_or_else(|_| vec![Err(PlaceError::Stopping); uses.len()]);
        if uses.iter().any(|(_, inputs)| !inputs.is_empty()) {
            self.pin_for(&uses, &mut placed).await;
        }
        placed
    }

    /// Pins what is used under leases that were granted. One for which that is refused is given back, with its group. One for which it is unknown stays
    /// until its term is over: a repeat finds it.
    async fn pin_for(&self, uses: &[(Option<u32>, Arc<Inputs>)], placed: &mut [Placed]) {
        let mut pins = Vec::new();
        for (number, (placed, (_, inputs))) in placed.iter().zip(uses).enumerate() {
            if let Ok(granted) = placed
                && !inputs.is_empty()
            {
                let (store, claims, inputs) = (self.store.clone(), granted.claims.clone(), inputs.clone());
                pins.push(async move {
                    (number, store.pin_for_lease(claims.lease, &claims.team, &inputs).await.err())
                });
            }
        }
        let mut failed = vec![None; placed.len()];
        let mut pinned = futures::stream::iter(pins).buffer_unordered(PINS);
        while let Some((number, refusal)) = pinned.next().await {
            failed[number] = refusal.map(|refusal| match refusal.is(Reason::HolderSettled) {
                // It has ended meanwhile.
                true => PlaceError::Exists,
                false => PlaceError::NotPinned(refusal),
            });
        }
        // What is refused to one of a group is refused to all; what is refused for good counts.
        let is_for_good =
            |error: &PlaceError| !matches!(error, PlaceError::NotPinned(refusal) if refusal.is_transient());
        let mut of_groups = HashMap::<u32, PlaceError>::new();
        for (error, (group, _)) in failed.iter().zip(uses) {
            let (Some(error), Some(group)) = (error, group) else { continue };
            if is_for_good(error) || !of_groups.contains_key(group) {
                of_groups.insert(*group, error.clone());
            }
        }
        let mut given_back = Vec::new();
        for ((placed, error), (group, _)) in placed.iter_mut().zip(failed).zip(uses) {
            let error = group.and_then(|group| of_groups.get(&group).cloned()).or(error);
            let (Ok(granted), Some(error)) = (&*placed, error) else { continue };
            if is_for_good(&error) {
                given_back.push(granted.claims.clone());
            }
            *placed = Err(error);
        }
        if let Err(error) = self.release(&given_back).await {
            tracing::debug!(error = %error, "leases that nobody has got end with their terms");
        }
    }

    /// Keeps a driven lease for another term.
    pub(crate) async fn renew(&self, claims: &LeaseClaims) -> Result<(), RenewError> {
        let term = self.config.lease_term;
        self.db.write(async |txn| leases::renew(&txn, claims.lease, Timestamp::now(), term).await).await
    }

    /// Gives driven leases back. The lease of an attempt ends with the attempt, and is left alone.
    pub(crate) async fn release(&self, claims: &[LeaseClaims]) -> Result<(), DbErr> {
        let driven = claims.iter().filter(|claims| claims.attempt.is_none());
        let leases: Vec<_> = driven.map(|claims| (claims.lease, claims.worker)).collect();
        if leases.is_empty() {
            return Ok(());
        }
        let released = self.dispatch.ask(|answer| Request::Release(leases, answer)).await;
        released.unwrap_or(Err(DbErr::ConnectionAcquire(ConnAcquireErr::ConnectionClosed)))
    }

    /// Signs a permission for one transfer with a worker, if the artifact store has planned that transfer for `team`.
    pub(crate) async fn issue_ticket(
        &self,
        team: String,
        worker: WorkerId,
        volume: VolumeHandle,
        operation: TicketOperation,
        now: Timestamp,
    ) -> Result<Ticket, TicketError> {
        let (state, gateway_endpoint) =
            workers::reach(self.db.read(), worker).await?.ok_or(TicketError::NotFound(worker))?;
        if state != worker::State::Running {
            return Err(TicketError::Unreachable(worker));
        }
        self.store.authorize_transfer(&team, worker, volume, operation).await?;
        let expires_at = now + self.config.ticket_validity;
        let endpoint = gateway_endpoint.clone();
        let claims = TicketClaims { worker, volume, team, operation, expires_at, endpoint };
        Ok(Ticket { token: self.signer.sign(&claims), gateway_endpoint })
    }

    /// Signs a permission to pass calls on to a worker.
    pub(crate) async fn issue_proxy_ticket(
        &self,
        worker: WorkerId,
        now: Timestamp,
    ) -> Result<Ticket, TicketError> {
        // Also of one that is out of contact: what it holds may be there for callers all the same.
        let (_, gateway_endpoint) =
            workers::reach(self.db.read(), worker).await?.ok_or(TicketError::NotFound(worker))?;
        let claims = ProxyClaims { worker, expires_at: now + self.config.ticket_validity };
        Ok(Ticket { token: self.signer.sign(&claims), gateway_endpoint })
    }
}

/// Whether a row with this key was there already.
pub(crate) fn is_duplicate(error: &DbErr) -> bool {
    matches!(error.sql_err(), Some(sea_orm::SqlErr::UniqueConstraintViolation(_)))
}
