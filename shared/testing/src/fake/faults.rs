//! Faults that a test injects into a fake worker.

use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

use domain::{ContainerHandle, VolumeHandle};
use runtime::RuntimeError;
use tokio::sync::watch;

/// A gate that operations pass only while no test holds it closed.
#[derive(Debug, Clone)]
pub(super) struct Gate(watch::Sender<usize>);

impl Gate {
    fn new() -> Self {
        Self(watch::Sender::new(0))
    }

    /// Resolves when the gate is open.
    pub(super) async fn open(&self) {
        // The sender is alive, because `self` owns it.
        self.0.subscribe().wait_for(|holders| *holders == 0).await.ok();
    }

    fn hold(&self) -> FaultGuard {
        self.0.send_modify(|holders| *holders += 1);
        FaultGuard(self.clone())
    }
}

/// Holds a gate closed until it is dropped.
#[must_use]
#[derive(Debug)]
pub struct FaultGuard(Gate);

impl Drop for FaultGuard {
    fn drop(&mut self) {
        self.0.0.send_modify(|holders| *holders -= 1);
    }
}

/// Counts one destruction until it is dropped.
pub(super) struct Destroying<'a>(&'a watch::Sender<DestructionCounts>);

impl Drop for Destroying<'_> {
    fn drop(&mut self) {
        self.0.send_modify(|destroys| destroys.under_way -= 1);
    }
}

/// Counts of concurrent destructions.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DestructionCounts {
    /// Destructions in progress.
    pub under_way: usize,
    /// Highest number of destructions in progress so far.
    pub most: usize,
}

/// Faults of a worker. There are none until a test injects them.
#[derive(Debug)]
pub struct Faults {
    pub(super) volumes: Gate,
    pub(super) starts: Gate,
    destroys: Gate,
    destroying: watch::Sender<DestructionCounts>,
    gone: watch::Sender<bool>,
    state: Mutex<FaultState>,
}

#[derive(Debug, Default)]
struct FaultState {
    panics: bool,
    unstoppable: usize,
    stuck_volumes: BTreeSet<VolumeHandle>,
    stuck_containers: BTreeSet<ContainerHandle>,
    illegible: BTreeSet<VolumeHandle>,
}

fn fault(what: &str) -> RuntimeError {
    RuntimeError::Other(format!("{what}, injected by the test"))
}

impl Faults {
    pub(super) fn new() -> Self {
        Self {
            volumes: Gate::new(),
            starts: Gate::new(),
            destroys: Gate::new(),
            destroying: watch::Sender::new(DestructionCounts::default()),
            gone: watch::Sender::new(false),
            state: Mutex::default(),
        }
    }

    fn state(&self) -> MutexGuard<'_, FaultState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Holds back the completion of volumes. Volumes in creation stay incomplete meanwhile.
    pub fn hold_volumes(&self) -> FaultGuard {
        self.volumes.hold()
    }

    /// Holds back the start of processes. New processes stay in the state starting meanwhile.
    pub fn hold_starts(&self) -> FaultGuard {
        self.starts.hold()
    }

    /// Holds back destructions. They stay in progress meanwhile.
    pub fn hold_destroys(&self) -> FaultGuard {
        self.destroys.hold()
    }

    /// Watches the counts of concurrent destructions.
    #[must_use]
    pub fn destroys(&self) -> watch::Receiver<DestructionCounts> {
        self.destroying.subscribe()
    }

    /// Counts a destruction, and resolves when it may proceed.
    pub(super) async fn destroy(&self) -> Destroying<'_> {
        self.destroying.send_modify(|destroys| {
            destroys.under_way += 1;
            destroys.most = destroys.most.max(destroys.under_way);
        });
        let counted = Destroying(&self.destroying);
        self.destroys.open().await;
        counted
    }

    /// Sets whether the worker is unreachable. While it is, calls and attachments fail, and
    /// processes continue.
    pub fn set_unreachable(&self, gone: bool) {
        self.gone.send_replace(gone);
    }

    /// Makes the next call that stops a process panic.
    pub fn panic_at_stop(&self) {
        self.state().panics = true;
    }

    /// Makes the next `times` calls that stop a process fail.
    pub fn fail_to_stop(&self, times: usize) {
        self.state().unstoppable = times;
    }

    /// Number of remaining calls that will fail to stop a process.
    #[must_use]
    pub fn remaining_stop_failures(&self) -> usize {
        self.state().unstoppable
    }

    /// Sets whether the destruction of a volume fails.
    pub fn set_stuck(&self, volume: VolumeHandle, stuck: bool) {
        let volumes = &mut self.state().stuck_volumes;
        _ = if stuck { volumes.insert(volume) } else { volumes.remove(&volume) };
    }

    /// Sets whether the destruction of a container fails.
    pub fn set_stuck_container(&self, container: ContainerHandle, stuck: bool) {
        let containers = &mut self.state().stuck_containers;
        _ = if stuck { containers.insert(container) } else { containers.remove(&container) };
    }

    /// Makes the notes of a volume unreadable.
    pub fn set_notes_unreadable(&self, volume: VolumeHandle) {
        self.state().illegible.insert(volume);
    }

    pub(super) fn read_notes(&self, volume: VolumeHandle) -> Result<(), RuntimeError> {
        self.reach()?;
        if self.state().illegible.contains(&volume) {
            Err(fault("cannot read the notes of the volume"))
        } else {
            Ok(())
        }
    }

    pub(super) fn reach(&self) -> Result<(), RuntimeError> {
        if *self.gone.borrow() { Err(fault("the worker is unreachable")) } else { Ok(()) }
    }

    /// Resolves with an error when the worker becomes unreachable.
    pub(super) async fn unreachable(&self) -> RuntimeError {
        // The sender is alive, because `self` owns it.
        self.gone.subscribe().wait_for(|gone| *gone).await.ok();
        fault("the worker is unreachable")
    }

    pub(super) fn stop(&self) -> Result<(), RuntimeError> {
        let panics = std::mem::take(&mut self.state().panics);
        assert!(!panics, "injected by the test");
        let mut state = self.state();
        match state.unstoppable.checked_sub(1) {
            Some(less) => {
                state.unstoppable = less;
                Err(fault("cannot stop the process"))
            }
            None => Ok(()),
        }
    }

    pub(super) fn destroy_volume(&self, volume: VolumeHandle) -> Result<(), RuntimeError> {
        if self.state().stuck_volumes.contains(&volume) {
            Err(fault("cannot destroy the volume"))
        } else {
            Ok(())
        }
    }

    pub(super) fn destroy_container(&self, container: ContainerHandle) -> Result<(), RuntimeError> {
        if self.state().stuck_containers.contains(&container) {
            Err(fault("cannot destroy the container"))
        } else {
            Ok(())
        }
    }
}
