//! Conformance test with random operations against a model of a worker.
//!
//! The test checks after every step:
//!
//! - The worker lists exactly the containers and volumes of the model.
//! - Each volume has the expected lines.
//! - Each process has the expected state and end.
//!
//! After the last step, the worker is empty.
//!
//! `GANTRY_SEED` repeats one seed. `GANTRY_STEPS` sets the number of steps.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use domain::workload::Exit;
use domain::{ContainerHandle, ProcessId, VolumeHandle};
use rand::rngs::StdRng;
use rand::seq::IteratorRandom;
use rand::{RngExt, SeedableRng};
use runtime::{ContainerSpec, Ended, ProcessState, RuntimeError, VolumeSource};

use super::{
    RuntimeExt, Subject, exited, is_signal, lines, mount, on_root, process, programs, put, until_lines,
    volumes,
};
use crate::seeds;

/// Limits that fit on every worker of the tests.
const MAX_VOLUMES: usize = 8;
const MAX_CONTAINERS: usize = 3;

/// A worker matches the model after any sequence of operations.
pub async fn worker_matches_model_after_random_operations(subject: impl Subject) {
    let seed = seeds::seed();
    eprintln!("GANTRY_SEED={seed}");
    let mut model = Model {
        subject,
        random: StdRng::seed_from_u64(seed),
        volumes: BTreeMap::new(),
        containers: BTreeMap::new(),
        gone: DestroyedHandles::default(),
    };
    for _ in 0..seeds::setting("GANTRY_STEPS").unwrap_or(60) {
        model.step().await;
        model.check().await;
    }
    model.clear().await;
}

/// A volume: the number of lines of its file, and its parent.
#[derive(Debug, Clone)]
struct Volume {
    lines: usize,
    parent: Option<VolumeHandle>,
}

#[derive(Debug, Clone)]
struct Container {
    team: String,
    volume: VolumeHandle,
    read_only: bool,
    process: Option<Process>,
}

#[derive(Debug, Clone)]
struct Process {
    id: ProcessId,
    command: Vec<String>,
    /// The end, if the process has ended.
    ended: Option<Ended>,
}

/// Handles that were destroyed.
#[derive(Default)]
struct DestroyedHandles {
    volumes: Vec<VolumeHandle>,
    containers: Vec<ContainerHandle>,
    processes: Vec<ProcessId>,
}

struct Model<S> {
    subject: S,
    random: StdRng,
    volumes: BTreeMap<VolumeHandle, Volume>,
    containers: BTreeMap<ContainerHandle, Container>,
    gone: DestroyedHandles,
}

impl<S: Subject> Model<S> {
    async fn step(&mut self) {
        match self.random.random_range(0..100) {
            0..14 => self.make_volume().await,
            14..28 => self.make_child().await,
            28..38 => self.write().await,
            38..47 => self.destroy_volume().await,
            47..57 => self.make_container().await,
            57..71 => self.start().await,
            71..80 => self.end().await,
            80..88 => self.destroy_container().await,
            88..95 => self.repeat().await,
            _ => self.subject.reopen().await,
        }
    }

    fn any_volume(&mut self, condition: impl Fn(&Self, VolumeHandle) -> bool) -> Option<VolumeHandle> {
        let fit: Vec<_> = self.volumes.keys().copied().filter(|volume| condition(self, *volume)).collect();
        fit.into_iter().choose(&mut self.random)
    }

    fn any_container(&mut self, condition: impl Fn(&Container) -> bool) -> Option<ContainerHandle> {
        let fit = self.containers.iter().filter(|(_, container)| condition(container));
        fit.map(|(handle, _)| *handle).choose(&mut self.random)
    }

    fn is_mounted(&self, volume: VolumeHandle) -> bool {
        self.containers.values().any(|container| container.volume == volume)
    }

    fn is_mounted_writable(&self, volume: VolumeHandle) -> bool {
        self.containers.values().any(|container| container.volume == volume && !container.read_only)
    }

    fn has_children(&self, volume: VolumeHandle) -> bool {
        self.volumes.values().any(|other| other.parent == Some(volume))
    }

    async fn make_volume(&mut self) {
        if self.volumes.len() < MAX_VOLUMES {
            let runtime = self.subject.runtime();
            let handle = runtime.volume().await;
            let lines = self.random.random_range(0..3);
            if lines > 0 {
                put(&*runtime, handle, "file", &"line\n".repeat(lines)).await;
            }
            self.volumes.insert(handle, Volume { lines, parent: None });
        }
    }

    async fn make_child(&mut self) {
        let runtime = self.subject.runtime();
        if let Some(parent) = self.gone.volumes.iter().choose(&mut self.random).copied()
            && self.random.random_ratio(1, 4)
        {
            let source = VolumeSource::CopyOnWrite { parent };
            let refused = runtime.create_volume(VolumeHandle::new(), source).await;
            assert!(
                matches!(refused, Err(RuntimeError::VolumeNotFound(missing)) if missing == parent),
                "{refused:?}"
            );
            return;
        }
        // A volume that may still be written to cannot be a parent.
        let parent = self.any_volume(|model, volume| !model.is_mounted_writable(volume));
        if let Some(parent) = parent.filter(|_| self.volumes.len() < MAX_VOLUMES) {
            let handle = runtime.child(parent).await;
            let lines = self.volumes[&parent].lines;
            self.volumes.insert(handle, Volume { lines, parent: Some(parent) });
        }
    }

    async fn write(&mut self) {
        let volume =
            self.any_volume(|model, volume| !model.has_children(volume) && !model.is_mounted(volume));
        if let Some(volume) = volume {
            let written = self.random.random_range(0..5);
            put(&*self.subject.runtime(), volume, "file", &"line\n".repeat(written)).await;
            self.volumes.get_mut(&volume).expect("it was chosen").lines = written;
        }
    }

    async fn destroy_volume(&mut self) {
        let runtime = self.subject.runtime();
        if let Some(gone) = self.gone.volumes.iter().choose(&mut self.random) {
            runtime.destroy_volume(*gone).await.expect("destroy again");
        }
        let Some(volume) = self.any_volume(|model, volume| !model.is_mounted(volume)) else { return };
        match runtime.destroy_volume(volume).await {
            Ok(()) => {
                self.volumes.remove(&volume);
                self.gone.volumes.push(volume);
            }
            Err(RuntimeError::HasChildren(refused)) => {
                assert!(refused == volume && self.has_children(volume), "{volume} has none");
            }
            Err(error) => panic!("{error:?}"),
        }
    }

    async fn make_container(&mut self) {
        let Some(volume) = self.any_volume(|model, volume| !model.is_mounted(volume)) else { return };
        if self.containers.len() >= MAX_CONTAINERS {
            return;
        }
        // A volume with children must not change.
        let read_only = self.has_children(volume) || self.random.random();
        let team = format!("team-{}", self.random.random_range(0..3));
        let handle = self.subject.runtime().made(self.spec(&team, volume, read_only).await).await;
        self.containers.insert(handle, Container { team, volume, read_only, process: None });
    }

    async fn spec(&self, team: &str, volume: VolumeHandle, read_only: bool) -> ContainerSpec {
        let mounts = vec![mount(volume, "/volume", read_only)];
        ContainerSpec { team: team.to_owned(), mounts, ..on_root(&self.subject).await }
    }

    /// Starts a process, and waits until its file has the expected lines. Some of the programs run
    /// until they are ended.
    async fn start(&mut self) {
        let runtime = self.subject.runtime();
        if let Some(gone) = self.gone.containers.iter().choose(&mut self.random) {
            let refused = runtime.start(*gone, ProcessId::new(), process(&programs::exit(0))).await;
            assert!(matches!(refused, Err(RuntimeError::ContainerNotFound(_))), "{refused:?}");
        }
        let Some(handle) = self.any_container(|container| container.process.is_none()) else { return };
        let Container { volume, read_only, .. } = self.containers[&handle];
        let code = self.random.random();
        let (command, ended) = match self.random.random_range(0..3) {
            0 => (programs::exit(code), Some(exited(code))),
            1 if !read_only => (programs::append("/volume/file"), Some(exited(0))),
            // The program waits for a second line, so the file must be empty at the start.
            _ if !read_only && self.volumes[&volume].lines == 0 => {
                (programs::append_and_wait_for_another("/volume/file"), None)
            }
            _ => (programs::sleep(), None),
        };
        let writes = command[..] != programs::exit(code)[..] && command[..] != programs::sleep()[..];
        let id = runtime.started(handle, process(&command)).await;
        let known = self.volumes.get_mut(&volume).expect("it is mounted");
        known.lines += usize::from(writes);
        match &ended {
            Some(ended) => assert_eq!(runtime.ended(id).await, *ended, "{command:?}"),
            None if writes => until_lines(&*runtime, volume, "file", known.lines).await,
            None => {}
        }
        let container = self.containers.get_mut(&handle).expect("it was chosen");
        container.process = Some(Process { id, command, ended });
    }

    /// Ends a process that would run forever.
    async fn end(&mut self) {
        let runtime = self.subject.runtime();
        let runs =
            |container: &Container| container.process.as_ref().is_some_and(|process| process.ended.is_none());
        let Some(handle) = self.any_container(runs) else { return };
        let Container { volume, process: Some(Process { id, command, .. }), .. } =
            self.containers[&handle].clone()
        else {
            return;
        };
        let ended = if command == programs::sleep() || self.random.random() {
            runtime.stop(id, Duration::ZERO).await.expect("stop");
            let ended = runtime.ended(id).await;
            let stopped = [9, 15].iter().any(|signal| is_signal(&*runtime, &ended, *signal, true));
            assert!(stopped || matches!(ended, Ended::NotStarted(_)), "{ended:?}");
            ended
        } else {
            put(&*runtime, volume, "file", "line\nline\n").await;
            self.volumes.get_mut(&volume).expect("it is mounted").lines = 2;
            let ended = runtime.ended(id).await;
            assert_eq!(ended, Ended::Exited { exit: Exit::Code(7), stopped: false });
            ended
        };
        let container = self.containers.get_mut(&handle).expect("it was chosen");
        container.process = Some(Process { id, command, ended: Some(ended) });
    }

    async fn destroy_container(&mut self) {
        let runtime = self.subject.runtime();
        if let Some(gone) = self.gone.containers.iter().choose(&mut self.random) {
            runtime.destroy_container(*gone).await.expect("destroy again");
        }
        let Some(handle) = self.any_container(|_| true) else { return };
        runtime.destroy_container(handle).await.expect("destroy a container");
        let container = self.containers.remove(&handle).expect("it was chosen");
        self.gone.processes.extend(container.process.map(|process| process.id));
        self.gone.containers.push(handle);
    }

    /// Repeats all operations of existing objects, which changes nothing.
    async fn repeat(&mut self) {
        let runtime = self.subject.runtime();
        for handle in self.volumes.keys() {
            runtime.create_volume(*handle, VolumeSource::Empty).await.expect("create it again");
        }
        for (handle, container) in &self.containers {
            let spec = self.spec(&container.team, container.volume, container.read_only).await;
            runtime.create_container(*handle, spec).await.expect("create it again");
            if let Some(Process { id, command, .. }) = &container.process {
                runtime.start(*handle, *id, process(command)).await.expect("start it again");
            }
        }
    }

    async fn check(&self) {
        let runtime = self.subject.runtime();
        let listed: BTreeSet<_> = volumes(&self.subject).await.into_iter().collect();
        assert_eq!(listed, self.volumes.keys().copied().collect());
        let containers = runtime.list().await.expect("list").containers;
        let containers: BTreeSet<_> = containers.into_iter().collect();
        assert_eq!(containers, self.containers.keys().copied().collect());
        for (handle, volume) in &self.volumes {
            assert_eq!(lines(&*runtime, *handle, "file").await, volume.lines, "{handle}: {volume:?}");
        }
        for container in self.containers.values() {
            let Some(Process { id, ended, command }) = &container.process else { continue };
            let state = runtime.process(*id).await.expect("a state");
            match ended {
                Some(ended) => assert_eq!(state, ProcessState::Ended(ended.clone()), "{command:?}"),
                None => assert!(
                    matches!(state, ProcessState::Starting | ProcessState::Started),
                    "{command:?}: {state:?}"
                ),
            }
            assert_eq!(runtime.container_of(*id).await.expect("a container").team, container.team);
        }
        for gone in &self.gone.processes {
            let state = runtime.process(*gone).await;
            assert!(matches!(state, Err(RuntimeError::ProcessNotFound(_))), "{state:?}");
        }
    }

    /// Destroys everything, children before their parents.
    async fn clear(mut self) {
        while !self.containers.is_empty() {
            self.destroy_container().await;
            self.check().await;
        }
        while let Some(volume) = self.any_volume(|model, volume| !model.has_children(volume)) {
            self.subject.runtime().destroy_volume(volume).await.expect("destroy a volume");
            self.volumes.remove(&volume);
            self.check().await;
        }
        assert!(self.volumes.is_empty());
    }
}
