//! One worker, as its gateway knows it: the runtime, the session in which the gateway speaks for it, and the attempts under way.

pub(crate) mod attendance;
pub(crate) mod heartbeat;
pub(crate) mod usage;

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use domain::worker::{Incarnation, Session};
use domain::workload::FailureReason;
use domain::{AttemptId, ContainerHandle, LeaseId, VolumeHandle, WorkerId};
use rpc::client::Outgoing;
use rpc::pb::artifacts::inventory_client::InventoryClient;
use rpc::pb::scheduler as pb;
use rpc::pb::scheduler::workers_client::WorkersClient;
use rpc::pb::scheduler::workloads_client::WorkloadsClient;
use rpc::pb::streamer::streamer_client::StreamerClient;
use runtime::{Runtime, RuntimeError};
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::Config;
use crate::attempt::image;
use crate::sync::base_type_import::Imports;
use crate::transfer::disk_reservations::Room;
use crate::transfer::manifests::Trees;
use crate::util::clock::since_boot;
use crate::worker::attendance::Attendance;
use crate::worker::usage::Counts;
use rpc::Peer;

/// Most bytes of a desired state: it names all leases of the worker.
const DESIRED_BYTES: usize = 256 << 20;

/// The session in which this gateway speaks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct OpenSession {
    pub(crate) credential: String,
    pub(crate) worker: WorkerId,
    pub(crate) incarnation: Incarnation,
    pub(crate) session: Session,
}

/// How an attempt shall be stopped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct StopWish {
    pub(crate) grace: Duration,
    pub(crate) reason: FailureReason,
}

/// An attempt that this gateway works on, or has ended and not yet been told to forget.
pub(crate) struct Attempt {
    pub(crate) phase: pb::LeasePhase,
    /// The inputs that are brought to the worker, while materializing.
    pub(crate) inputs: Vec<pb::InputProgress>,
    /// Set when it shall stop.
    pub(crate) stop: watch::Sender<Option<StopWish>>,
}

/// Everything that belongs to one worker. Shared by the tasks of its gateway.
pub(crate) struct Worker {
    pub(crate) config: Config,
    pub(crate) runtime: Arc<dyn Runtime>,
    pub(crate) inventory: InventoryClient<Peer>,
    pub(crate) workers: WorkersClient<Peer>,
    pub(crate) workloads: WorkloadsClient<Peer>,
    pub(crate) streamer: StreamerClient<Peer>,
    pub(crate) trees: Trees,
    /// What the images say that were used here.
    pub(crate) images: image::Known,
    /// Whether callers are attached to processes that may wait for one.
    pub(crate) attendance: Attendance,
    /// What it brings along, as artifacts.
    pub(crate) imports: Imports,
    pub(crate) tasks: TaskTracker,
    pub(crate) stopping: CancellationToken,
    session: watch::Sender<Option<OpenSession>>,
    /// Until when nobody else can have been let in, by `CLOCK_BOOTTIME`. `None`: the scheduler was not heard yet.
    alone_until: Mutex<Option<Duration>>,
    attempts: Mutex<HashMap<LeaseId, Attempt>>,
    /// Volumes that are being filled, by one writer each.
    pub(crate) filling: Arc<Mutex<HashSet<VolumeHandle>>>,
    /// What transfers will write.
    pub(crate) room: Room,
    /// Containers that are being destroyed.
    destroying: watch::Sender<BTreeSet<ContainerHandle>>,
    /// Containers and volumes on the worker.
    pub(crate) held: Counts,
    /// Wakes the synchronizing task when an attempt has changed.
    pub(crate) changed: Notify,
    /// Wakes the reporting task: something was destroyed, or found to be damaged.
    pub(crate) report_due: Notify,
}

impl Worker {
    pub(crate) fn new(
        config: Config,
        runtime: Arc<dyn Runtime>,
        boot: String,
        tasks: TaskTracker,
        stopping: CancellationToken,
    ) -> anyhow::Result<Arc<Self>> {
        let outgoing = || Outgoing::internal().with_token(config.token.as_deref());
        let scheduler = rpc::client::peer(&config.scheduler, outgoing())?;
        let store = rpc::client::peer(&config.artifact_store, outgoing())?;
        let streamer = rpc::client::peer(&config.streamer, outgoing())?;
        Ok(Arc::new(Self {
            inventory: InventoryClient::new(store),
            workers: WorkersClient::new(scheduler.clone()).max_decoding_message_size(DESIRED_BYTES),
            workloads: WorkloadsClient::new(scheduler),
            streamer: StreamerClient::new(streamer),
            trees: Trees::open(&config.manifest_dir, boot)?,
            images: image::Known::default(),
            attendance: Attendance::default(),
            imports: Imports::default(),
            session: watch::Sender::new(None),
            alone_until: Mutex::default(),
            attempts: Mutex::default(),
            filling: Arc::default(),
            room: Room::default(),
            destroying: watch::Sender::default(),
            held: Counts::default(),
            changed: Notify::new(),
            report_due: Notify::new(),
            config,
            runtime,
            tasks,
            stopping,
        }))
    }

    /// The session in which this gateway speaks. `None`: it has not been let in yet.
    pub(crate) fn session(&self) -> Option<OpenSession> {
        self.session.borrow().clone()
    }

    /// Waits until this gateway has been let in.
    pub(crate) async fn wait_for_session(&self) -> OpenSession {
        let mut session = self.session.subscribe();
        loop {
            if let Some(open) = session.borrow_and_update().clone() {
                return open;
            }
            if session.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }

    /// Resolves when the session is another than `open`.
    pub(crate) async fn session_changed(&self, open: &OpenSession) {
        let mut session = self.session.subscribe();
        // Fails only when the sender is gone, and then nobody waits.
        session.wait_for(|now| now.as_ref() != Some(open)).await.ok();
    }

    /// Resolves when somebody else may speak for the worker than did in `open`.
    pub(crate) async fn superseded(&self, open: &OpenSession) {
        let mut session = self.session.subscribe();
        let other = |now: &Option<OpenSession>| now.as_ref().is_none_or(|now| now.session != open.session);
        // Fails only when the sender is gone, and then nobody waits.
        session.wait_for(other).await.ok();
    }

    /// The scheduler has heard us, so that it lets nobody else in before `until`.
    pub(crate) fn alone_until(&self, until: Duration) {
        let mut known = self.alone_until.lock().unwrap_or_else(PoisonError::into_inner);
        *known = Some(known.map_or(until, |known| known.max(until)));
    }

    /// Whether no other gateway can speak for the worker, so that this one may start and destroy things. A process that was frozen, or a
    /// machine that was asleep, learns here that it is not so any more.
    pub(crate) fn is_alone(&self) -> bool {
        let until = *self.alone_until.lock().unwrap_or_else(PoisonError::into_inner);
        until.is_none_or(|until| since_boot() < until)
    }

    /// Waits until no other gateway can speak for the worker.
    pub(crate) async fn wait_until_alone(&self) {
        while !self.is_alone() {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    pub(crate) fn set_session(&self, open: Option<OpenSession>) {
        if open.is_none() {
            *self.alone_until.lock().unwrap_or_else(PoisonError::into_inner) = Some(Duration::ZERO);
        }
        self.session.send_if_modified(|now| {
            let modified = *now != open;
            *now = open;
            modified
        });
    }

    /// Destroys a container, with all that runs in it.
    pub(crate) async fn destroy_container(&self, container: ContainerHandle) -> Result<(), RuntimeError> {
        self.destroying.send_modify(|destroying| _ = destroying.insert(container));
        let _destroyed = Destroying { worker: self, container };
        self.runtime.destroy_container(container).await
    }

    /// Whether a process that has ended did so because its container was destroyed.
    pub(crate) async fn was_destroyed(&self, process: AttemptId) -> Result<bool, RuntimeError> {
        let mut destroying = self.destroying.subscribe();
        // What is destroyed from now on had ended before.
        let under_way = destroying.borrow_and_update().clone();
        // Fails only when the sender is gone, which is ours.
        destroying.wait_for(|now| now.is_disjoint(&under_way)).await.ok();
        match self.runtime.process(process).await {
            Ok(_) => Ok(false),
            Err(RuntimeError::ProcessNotFound(_)) => Ok(true),
            Err(error) => Err(error),
        }
    }

    pub(crate) fn attempts(&self) -> MutexGuard<'_, HashMap<LeaseId, Attempt>> {
        self.attempts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Says how far an attempt is.
    pub(crate) fn set_phase(&self, lease: LeaseId, phase: pb::LeasePhase) {
        if let Some(attempt) = self.attempts().get_mut(&lease) {
            attempt.phase = phase;
            attempt.inputs.clear();
        }
        self.changed.notify_one();
    }

    /// Says that inputs of an attempt are brought to the worker, and how far each is.
    pub(crate) fn set_inputs(&self, lease: LeaseId, inputs: Vec<pb::InputProgress>) {
        let mut worth_telling = false;
        if let Some(attempt) = self.attempts().get_mut(&lease) {
            worth_telling =
                attempt.phase != pb::LeasePhase::Materializing || far(&attempt.inputs) != far(&inputs);
            attempt.phase = pb::LeasePhase::Materializing;
            attempt.inputs = inputs;
        }
        if worth_telling {
            self.changed.notify_one();
        }
    }
}

/// A container that is being destroyed, until that has ended, however it did.
struct Destroying<'w> {
    worker: &'w Worker,
    container: ContainerHandle,
}

impl Drop for Destroying<'_> {
    fn drop(&mut self) {
        self.worker.destroying.send_modify(|destroying| _ = destroying.remove(&self.container));
    }
}

/// How far inputs are together, roughly, and what each waits for.
fn far(inputs: &[pb::InputProgress]) -> (u64, Vec<&str>) {
    let of = |bytes: fn(&pb::InputProgress) -> u64| inputs.iter().map(bytes).sum::<u64>();
    let tenths = of(|input| input.bytes_done).saturating_mul(10) / of(|input| input.bytes_total).max(1);
    (tenths, inputs.iter().map(|input| input.waits_for.as_str()).collect())
}
