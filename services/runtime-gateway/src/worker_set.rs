//! The workers that a gateway attends, and the lookup of the worker of a call.
//!
//! All workers of a gateway share one `Containers` and one `Volumes` service. A gateway never
//! forwards a call for another worker, because it runs beside untrusted code. The caller receives
//! the address of the other gateway instead, as the scheduler knows it.

use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use domain::worker::{LeaseClaims, ProxyClaims, TicketClaims, TicketOperation};
use domain::{GatewayInstance, Timestamp, WorkerId};
use rpc::Refusal;
use rpc::client::Outgoing;
use rpc::token::Keys;
use runtime::Runtime;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::Config;
use crate::attempt::context::AttemptContext;
use crate::attempt::image::ImageDefaults;
use crate::clients::scheduler::SchedulerClient;
use crate::sync::{base_type_import, disk_space, disk_usage, inventory_sync, scheduler_stream};
use crate::transfer::{Transfers, scrub};
use crate::util::keyed_locks::IdLocks;
use crate::worker::Worker;
use crate::worker::attached_callers::{self, Attendance};
use crate::worker::base_types::BaseTypeImports;

/// Longest wait of a call for a worker without a session. That worker may be the one that the call
/// names.
const SESSION_WAIT: Duration = Duration::from_secs(5);
/// Longest wait for the scheduler's answer about the gateway of a worker.
const LOOKUP_TIMEOUT: Duration = Duration::from_secs(5);

/// A worker that this gateway attends, with the features that calls and loops use.
pub(crate) struct AttendedWorker {
    pub(crate) worker: Arc<Worker>,
    pub(crate) transfers: Arc<Transfers>,
    pub(crate) attendance: Arc<Attendance>,
    pub(crate) imports: Arc<BaseTypeImports>,
    pub(crate) attempts: Arc<AttemptContext>,
}

impl AttendedWorker {
    /// Opens the features of `worker`. `boot` is the boot id of the machine.
    ///
    /// # Errors
    ///
    /// The directory of manifests cannot be read.
    pub(crate) fn open(worker: Arc<Worker>, boot: String) -> std::io::Result<Arc<Self>> {
        let transfers = Transfers::open(worker.clone(), boot)?;
        let attendance = Arc::new(Attendance::new(worker.config.intervals.caller_term));
        let imports = Arc::new(BaseTypeImports::default());
        let attempts = Arc::new(AttemptContext {
            worker: worker.clone(),
            transfers: transfers.clone(),
            attendance: attendance.clone(),
            imports: imports.clone(),
            images: ImageDefaults::default(),
            admissions: IdLocks::default(),
        });
        Ok(Arc::new(Self { worker, transfers, attendance, imports, attempts }))
    }
}

/// The only worker that a call may use, because its ticket names that worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct OnlyFor(pub(crate) WorkerId);

/// The reason why a call or a transfer is not admitted.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AdmitError {
    /// The ticket is forged, expired, or for another operation.
    #[error("the ticket or token is invalid or expired")]
    Ticket,
    /// The token belongs to the lease of an attempt.
    #[error("the lease token belongs to the attempt of a workload")]
    LeaseToken,
    /// The scheduler's keys are not available.
    #[error("cannot verify the ticket")]
    Keys(#[source] Refusal),
    /// The ticket is for another worker.
    #[error(transparent)]
    NotAttended(#[from] NotAttended),
    /// The gateway already runs the most transfers that it admits.
    #[error("this gateway runs too many transfers; try again later")]
    TooManyTransfers,
}

impl From<rpc::token::VerifyError> for AdmitError {
    fn from(error: rpc::token::VerifyError) -> Self {
        match error {
            rpc::token::VerifyError::Invalid(_) => Self::Ticket,
            rpc::token::VerifyError::KeysUnavailable(refusal) => Self::Keys(refusal),
        }
    }
}

/// A gateway with the workers that it attends. Clones share them.
#[derive(Clone)]
pub struct WorkerSet(Arc<Inner>, Option<OnlyFor>);

struct Inner {
    workers: RwLock<Vec<Arc<AttendedWorker>>>,
    keys: Keys,
    scheduler: SchedulerClient,
    tasks: TaskTracker,
    stopping: CancellationToken,
    /// Permits of transfers that read volumes. Reads and writes have separate permits, because a
    /// write may wait for a read on another gateway.
    reads: Arc<Semaphore>,
    writes: Arc<Semaphore>,
}

/// Most transfers of each direction at a time. Each transfer occupies a blocking thread, and a
/// quarter of the threads stays free.
const TRANSFERS: usize = 192;

/// Longest time that a transfer waits for a permit.
const PERMIT_WAIT: Duration = Duration::from_secs(30);

/// The error of a call for a worker that this gateway does not attend.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("this gateway does not attend worker {worker}")]
pub(crate) struct NotAttended {
    pub(crate) worker: WorkerId,
    /// The gateway that attends the worker. `None`: no gateway does, or the scheduler does not
    /// answer.
    pub(crate) endpoint: Option<String>,
}

impl WorkerSet {
    pub(crate) fn new(
        workers: Vec<Arc<AttendedWorker>>,
        scheduler: &str,
        token: Option<&str>,
        tasks: TaskTracker,
        stopping: CancellationToken,
    ) -> anyhow::Result<Self> {
        let scheduler = rpc::client::peer(scheduler, Outgoing::internal().with_token(token))?;
        Ok(Self(
            Arc::new(Inner {
                workers: RwLock::new(workers),
                keys: Keys::new(scheduler.clone()),
                scheduler: SchedulerClient::new(scheduler),
                tasks,
                stopping,
                reads: Arc::new(Semaphore::new(TRANSFERS)),
                writes: Arc::new(Semaphore::new(TRANSFERS)),
            }),
            None,
        ))
    }

    /// Attends the worker of `runtime` from now on.
    ///
    /// # Errors
    ///
    /// The worker cannot return its marker, or an address in `config` is malformed.
    pub async fn attend(&self, config: Config, runtime: Arc<dyn Runtime>) -> anyhow::Result<()> {
        self.attend_as(GatewayInstance::new(), config, runtime).await
    }

    /// Attends the worker of `runtime` as an instance that may already have a session.
    pub(crate) async fn attend_as(
        &self,
        instance: GatewayInstance,
        config: Config,
        runtime: Arc<dyn Runtime>,
    ) -> anyhow::Result<()> {
        if config.hold_destruction {
            tracing::warn!(
                worker.name = config.worker_name,
                "destruction is held: no container and no volume is destroyed, and the disk fills up"
            );
        }
        let boot = runtime.marker().await?.boot;
        let worker = Worker::new(config, runtime, self.0.tasks.clone(), self.0.stopping.clone())?;
        let attended = AttendedWorker::open(worker, boot)?;
        self.0.workers.write().unwrap_or_else(PoisonError::into_inner).push(attended.clone());
        let AttendedWorker { transfers, imports, attempts, attendance, worker, .. } = &*attended;
        self.0.tasks.spawn(attached_callers::resume(attendance.clone(), worker.clone()));
        self.0.tasks.spawn(scheduler_stream::synchronize_forever(attempts.clone(), instance));
        self.0.tasks.spawn(inventory_sync::sweep_forever(transfers.clone()));
        self.0.tasks.spawn(inventory_sync::report_forever(transfers.clone()));
        self.0.tasks.spawn(disk_space::keep_disk_free_forever(transfers.worker.clone()));
        self.0.tasks.spawn(disk_usage::measure_forever(transfers.clone()));
        self.0.tasks.spawn(scrub::scrub_forever(transfers.clone()));
        self.0.tasks.spawn(base_type_import::import_forever(transfers.clone(), imports.clone()));
        Ok(())
    }

    /// Resolves when this gateway must stop.
    pub(crate) async fn stopped(&self) {
        self.0.stopping.cancelled().await;
    }

    pub(crate) fn tasks(&self) -> &TaskTracker {
        &self.0.tasks
    }

    pub(crate) fn stopping(&self) -> &CancellationToken {
        &self.0.stopping
    }

    /// Returns this gateway for one call. If a ticket admitted the call, only the worker of the
    /// ticket can be used.
    pub(crate) fn for_call(&self, extensions: &http::Extensions) -> Self {
        Self(self.0.clone(), extensions.get::<OnlyFor>().copied().or(self.1))
    }

    pub(crate) fn workers(&self) -> Vec<Arc<AttendedWorker>> {
        self.0.workers.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The only worker of this gateway. `None`: there is none, or there are several.
    pub(crate) fn only_worker(&self) -> Option<Arc<AttendedWorker>> {
        let mut workers = self.workers();
        workers.pop().filter(|_| workers.is_empty())
    }

    /// Returns the worker with this id, if this gateway has a session for it.
    pub(crate) async fn worker(&self, id: WorkerId) -> Result<Arc<AttendedWorker>, NotAttended> {
        if self.1.is_some_and(|OnlyFor(only)| only != id) {
            return Err(NotAttended { worker: id, endpoint: None });
        }
        let workers = self.workers();
        let find = || {
            workers
                .iter()
                .find(|attended| attended.worker.session.current().is_some_and(|open| open.worker == id))
        };
        if let Some(worker) = find() {
            return Ok(worker.clone());
        }
        // The id of a worker is unknown before its first session.
        let sessions =
            futures::future::join_all(workers.iter().map(|attended| attended.worker.session.opened()));
        // After a timeout the second search simply fails.
        tokio::time::timeout(SESSION_WAIT, sessions).await.ok();
        match find() {
            Some(worker) => Ok(worker.clone()),
            None => Err(NotAttended { worker: id, endpoint: self.other_gateway(id).await }),
        }
    }

    /// Returns the address of the other gateway that attends a worker, as the scheduler knows it.
    async fn other_gateway(&self, worker: WorkerId) -> Option<String> {
        let lookup = self.0.scheduler.gateway_of(worker);
        let endpoint = match tokio::time::timeout(LOOKUP_TIMEOUT, lookup).await {
            Ok(Ok(endpoint)) => endpoint?,
            Ok(Err(error)) => {
                tracing::debug!(worker.id = %worker, %error, "cannot look up the gateway of a worker");
                return None;
            }
            Err(_) => return None,
        };
        let ours = self.workers().iter().any(|attended| attended.worker.config.endpoint == endpoint);
        Some(endpoint).filter(|endpoint| !ours && !endpoint.is_empty())
    }

    /// Verifies a ticket for `operation`, and returns the worker that it names.
    pub(crate) async fn admit(
        &self,
        ticket: &str,
        operation: TicketOperation,
    ) -> Result<(Arc<AttendedWorker>, TicketClaims), AdmitError> {
        let claims = self.verify_ticket(ticket, operation).await?;
        let worker = self.worker(claims.worker).await?;
        Ok((worker, claims))
    }

    /// Waits for the permit of a transfer, which is held until it is dropped.
    ///
    /// Errors: [`AdmitError::TooManyTransfers`].
    pub(crate) async fn acquire_transfer(
        &self,
        operation: TicketOperation,
    ) -> Result<OwnedSemaphorePermit, AdmitError> {
        let permits = match operation {
            TicketOperation::Read => &self.0.reads,
            TicketOperation::Write => &self.0.writes,
        };
        let permit = tokio::time::timeout(PERMIT_WAIT, permits.clone().acquire_owned()).await;
        permit.ok().and_then(Result::ok).ok_or(AdmitError::TooManyTransfers)
    }

    /// Verifies the token of a driven lease, and returns its worker and its claims.
    pub(crate) async fn admit_lease(
        &self,
        token: &str,
    ) -> Result<(Arc<AttendedWorker>, LeaseClaims), AdmitError> {
        let claims: LeaseClaims = self.0.keys.verify(token).await?;
        if claims.attempt.is_some() {
            return Err(AdmitError::LeaseToken);
        }
        let worker = self.worker(claims.worker).await?;
        Ok((worker, claims))
    }

    /// Verifies a ticket for `operation` on any worker.
    pub(crate) async fn verify_ticket(
        &self,
        ticket: &str,
        operation: TicketOperation,
    ) -> Result<TicketClaims, AdmitError> {
        let claims: TicketClaims = self.0.keys.verify(ticket).await?;
        if claims.operation != operation || claims.expires_at < Timestamp::now() {
            return Err(AdmitError::Ticket);
        }
        Ok(claims)
    }

    /// Verifies a proxy ticket, and returns the worker that it names.
    pub(crate) async fn admit_proxy(&self, ticket: &str) -> Result<WorkerId, AdmitError> {
        let claims: ProxyClaims = self.0.keys.verify(ticket).await?;
        if claims.expires_at < Timestamp::now() { Err(AdmitError::Ticket) } else { Ok(claims.worker) }
    }

    /// Verifies that a ticket is for some transfer, and returns the worker that it names.
    /// [`Self::admit`] verifies the operation.
    pub(crate) async fn admit_transfer(&self, ticket: &str) -> Result<WorkerId, AdmitError> {
        let claims: TicketClaims = self.0.keys.verify(ticket).await?;
        if claims.expires_at < Timestamp::now() { Err(AdmitError::Ticket) } else { Ok(claims.worker) }
    }
}
