//! What a test makes go wrong on a worker.

use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

use domain::{ContainerHandle, VolumeHandle};
use runtime::RuntimeError;
use tokio::sync::watch;

/// Something that happens only while nobody holds it up.
#[derive(Debug, Clone)]
pub(super) struct Gate(watch::Sender<usize>);

impl Gate {
    fn new() -> Self {
        Self(watch::Sender::new(0))
    }

    /// Resolves when nobody holds it up.
    pub(super) async fn open(&self) {
        // Its sender is here.
        self.0.subscribe().wait_for(|holders| *holders == 0).await.ok();
    }

    fn hold(&self) -> Held {
        self.0.send_modify(|holders| *holders += 1);
        Held(self.clone())
    }
}

/// Holds something up until it is dropped.
#[must_use]
#[derive(Debug)]
pub struct Held(Gate);

impl Drop for Held {
    fn drop(&mut self) {
        self.0.0.send_modify(|holders| *holders -= 1);
    }
}

/// Something is being destroyed until it is dropped.
pub(super) struct Destroying<'a>(&'a watch::Sender<Destroys>);

impl Drop for Destroying<'_> {
    fn drop(&mut self) {
        self.0.send_modify(|destroys| destroys.under_way -= 1);
    }
}

/// How much is destroyed at once.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Destroys {
    /// Just now.
    pub under_way: usize,
    /// Of all that there was at any time.
    pub most: usize,
}

/// What goes wrong on a worker: nothing, until a test says so.
#[derive(Debug)]
pub struct Faults {
    pub(super) volumes: Gate,
    pub(super) starts: Gate,
    destroys: Gate,
    destroying: watch::Sender<Destroys>,
    gone: watch::Sender<bool>,
    what: Mutex<What>,
}

#[derive(Debug, Default)]
struct What {
    panics: bool,
    unstoppable: usize,
    stuck_volumes: BTreeSet<VolumeHandle>,
    stuck_containers: BTreeSet<ContainerHandle>,
    illegible: BTreeSet<VolumeHandle>,
}

fn fault(what: &str) -> RuntimeError {
    RuntimeError::Other(format!("{what}, as the test asked for"))
}

impl Faults {
    pub(super) fn new() -> Self {
        Self {
            volumes: Gate::new(),
            starts: Gate::new(),
            destroys: Gate::new(),
            destroying: watch::Sender::new(Destroys::default()),
            gone: watch::Sender::new(false),
            what: Mutex::default(),
        }
    }

    fn what(&self) -> MutexGuard<'_, What> {
        self.what.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// No volume is finished meanwhile: those that are being made are there by halves.
    pub fn hold_volumes(&self) -> Held {
        self.volumes.hold()
    }

    /// No process is started meanwhile: those that are asked for are starting.
    pub fn hold_starts(&self) -> Held {
        self.starts.hold()
    }

    /// Nothing is destroyed meanwhile: what was asked for is under way.
    pub fn hold_destroys(&self) -> Held {
        self.destroys.hold()
    }

    /// How much is destroyed at once, as it changes.
    #[must_use]
    pub fn destroys(&self) -> watch::Receiver<Destroys> {
        self.destroying.subscribe()
    }

    /// Resolves when something that is counted from now on may be destroyed.
    pub(super) async fn destroy(&self) -> Destroying<'_> {
        self.destroying.send_modify(|destroys| {
            destroys.under_way += 1;
            destroys.most = destroys.most.max(destroys.under_way);
        });
        let counted = Destroying(&self.destroying);
        self.destroys.open().await;
        counted
    }

    /// Whether the worker cannot be reached: calls fail, and so does what is attached. What runs there goes on.
    pub fn set_gone(&self, gone: bool) {
        self.gone.send_replace(gone);
    }

    /// Who is asked next to stop a process panics.
    pub fn panic_at_stop(&self) {
        self.what().panics = true;
    }

    /// Stopping a process fails so often from now on.
    pub fn fail_to_stop(&self, times: usize) {
        self.what().unstoppable = times;
    }

    /// How often stopping a process is still to fail.
    #[must_use]
    pub fn stops_that_fail(&self) -> usize {
        self.what().unstoppable
    }

    /// Whether destroying a volume fails.
    pub fn set_stuck(&self, volume: VolumeHandle, stuck: bool) {
        let volumes = &mut self.what().stuck_volumes;
        _ = if stuck { volumes.insert(volume) } else { volumes.remove(&volume) };
    }

    /// Whether destroying a container fails.
    pub fn set_stuck_container(&self, container: ContainerHandle, stuck: bool) {
        let containers = &mut self.what().stuck_containers;
        _ = if stuck { containers.insert(container) } else { containers.remove(&container) };
    }

    /// What is kept with a volume cannot be read.
    pub fn set_illegible(&self, volume: VolumeHandle) {
        self.what().illegible.insert(volume);
    }

    pub(super) fn read_notes(&self, volume: VolumeHandle) -> Result<(), RuntimeError> {
        self.reach()?;
        if self.what().illegible.contains(&volume) { Err(fault("the notes are illegible")) } else { Ok(()) }
    }

    pub(super) fn reach(&self) -> Result<(), RuntimeError> {
        if *self.gone.borrow() { Err(fault("the worker cannot be reached")) } else { Ok(()) }
    }

    /// Resolves, with what to say then, when the worker cannot be reached.
    pub(super) async fn unreachable(&self) -> RuntimeError {
        // Its sender is here.
        self.gone.subscribe().wait_for(|gone| *gone).await.ok();
        fault("the worker cannot be reached")
    }

    pub(super) fn stop(&self) -> Result<(), RuntimeError> {
        let panics = std::mem::take(&mut self.what().panics);
        assert!(!panics, "as the test asked for");
        let mut what = self.what();
        match what.unstoppable.checked_sub(1) {
            Some(less) => {
                what.unstoppable = less;
                Err(fault("the process cannot be stopped"))
            }
            None => Ok(()),
        }
    }

    pub(super) fn destroy_volume(&self, volume: VolumeHandle) -> Result<(), RuntimeError> {
        if self.what().stuck_volumes.contains(&volume) { Err(fault("the volume stays")) } else { Ok(()) }
    }

    pub(super) fn destroy_container(&self, container: ContainerHandle) -> Result<(), RuntimeError> {
        if self.what().stuck_containers.contains(&container) {
            Err(fault("the container stays"))
        } else {
            Ok(())
        }
    }
}
