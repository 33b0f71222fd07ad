//! Random operations, with repeats, delays and calls at the same time, against a model of who keeps what and what is on the
//! workers' disks.
//!
//! What must hold after every step: an artifact that a build owns or a workload pinned is sealed, and a replica of it is on a disk and
//! located; what a report named is still known, unless it was made after it had been forgotten. And in the end, when every workload
//! and build has ended, nothing is left: no row, no volume, no container.
//!
//! `GANTRY_SEED` runs one seed again, `GANTRY_STEPS` more or fewer steps.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use domain::{ArtifactId, AttemptId, BuildId, TransferId, WorkerId, WorkloadId};
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};
use rpc::pb::artifacts as pb;
use rpc::pb::artifacts::{ArtifactState, DryRun};
use testing::databases::TestDatabase;
use tonic::Streaming;

use crate::{Gateway, Suite, digest, input, on_both_databases, output};

on_both_databases! {
    nothing_in_use_goes_and_nothing_unused_stays,
}

async fn nothing_in_use_goes_and_nothing_unused_stays(database: TestDatabase) {
    let number = |name: &str| std::env::var(name).ok().map(|value| value.parse::<u64>().expect("a number"));
    let seed = number("GANTRY_SEED").unwrap_or_else(|| rand::rng().random());
    eprintln!("GANTRY_SEED={seed}");
    let mut model = Model::start(database, seed).await;
    for step in 0..number("GANTRY_STEPS").unwrap_or(150) {
        model.step().await;
        model.check(step).await;
    }
    model.quiesce().await;
}

/// A worker, as it really is.
struct Worker {
    gateway: Gateway,
    incarnation: u64,
    session: u64,
    marks: Streaming<pb::WatchDestroyingResponse>,
    volumes: BTreeSet<String>,
    containers: BTreeSet<String>,
    /// What a gateway was told to make and has not made yet.
    later: Vec<(bool, String)>,
    /// What it was told to destroy and has not destroyed yet.
    doomed: Vec<(bool, String)>,
}

struct Workload {
    attempt: AttemptId,
    worker: Option<usize>,
    build: Option<BuildId>,
    pins: Vec<ArtifactId>,
    /// The complete candidate, and its content.
    candidate: Option<(String, u64)>,
}

/// What keeps artifacts, and where they are.
struct Model {
    suite: Suite,
    random: StdRng,
    workers: Vec<Worker>,
    /// The builds that go on.
    builds: BTreeMap<BuildId, WorkloadId>,
    /// The workloads that go on.
    workloads: BTreeMap<WorkloadId, Workload>,
    /// Sealed artifacts, the builds that own them, and their content.
    artifacts: BTreeMap<ArtifactId, (BTreeSet<BuildId>, u64)>,
    /// Transfers that arrived but were not sealed.
    arrived: Vec<(ArtifactId, TransferId, u64)>,
    /// Handles that were made late, so that the store may have forgotten them before.
    late: BTreeSet<String>,
    /// Calls that were made before, and may come again at any time.
    repeats: Vec<Call>,
}

#[derive(Clone)]
enum Call {
    EndAttempt(WorkloadId, AttemptId),
    Settle(WorkloadId, AttemptId, BuildId),
    Abandon(TransferId),
    Complete(usize, String, u64),
    Prepared(usize, AttemptId),
}

impl Model {
    async fn start(database: TestDatabase, seed: u64) -> Self {
        // Streams look often, so that no test waits.
        let adjust = |config: &mut artifact_store::Config| {
            config.sweep_interval = Duration::from_millis(20);
            config.unowned_ttl = Duration::from_secs(600);
        };
        let suite = Suite::start_with(database, adjust).await;
        let mut workers = Vec::new();
        for _ in 0..3 {
            let gateway = suite.gateway().await;
            workers.push(Worker {
                marks: gateway.watch().await.expect("a stream"),
                gateway,
                incarnation: 1,
                session: 1,
                volumes: BTreeSet::new(),
                containers: BTreeSet::new(),
                later: Vec::new(),
                doomed: Vec::new(),
            });
        }
        Self {
            suite,
            random: StdRng::seed_from_u64(seed),
            workers,
            builds: BTreeMap::new(),
            workloads: BTreeMap::new(),
            artifacts: BTreeMap::new(),
            arrived: Vec::new(),
            late: BTreeSet::new(),
            repeats: Vec::new(),
        }
    }

    fn one_of<T: Clone>(&mut self, items: impl IntoIterator<Item = T>) -> Option<T> {
        let items: Vec<T> = items.into_iter().collect();
        items.choose(&mut self.random).cloned()
    }

    fn chance(&mut self, percent: u32) -> bool {
        self.random.random_range(0..100) < percent
    }

    async fn step(&mut self) {
        match self.random.random_range(0..100) {
            0..8 => self.put_build().await,
            8..24 => self.upload().await,
            24..30 => self.adopt().await,
            30..40 => self.accept().await,
            40..54 => self.prepare().await,
            54..62 => self.settle().await,
            62..65 => self.end_attempt().await,
            65..70 => self.repeat().await,
            70..80 => self.collect_while_pinning().await,
            80..88 => self.sweep().await,
            88..95 => self.report().await,
            95..97 => self.replace_gateway().await,
            97..98 => self.restart_worker().await,
            _ => self.suite.clock.advance(Duration::from_secs(self.random.random_range(1..120))),
        }
    }

    async fn put_build(&mut self) {
        if self.chance(20)
            && let Some(build) = self.one_of(self.builds.keys().copied().collect::<Vec<_>>())
        {
            self.builds.remove(&build);
            self.suite.delete_build(build).await.expect("deleted");
            return;
        }
        let (build, workload) = (BuildId::new(), WorkloadId::new());
        self.suite.put_build(build, workload, None).await.expect("put");
        // Bound at once, so that only its settling ends it.
        self.suite.pin(workload, &[], Some(build)).await.expect("bound");
        self.builds.insert(build, workload);
        let workload_of = Workload {
            attempt: AttemptId::new(),
            worker: None,
            build: Some(build),
            pins: Vec::new(),
            candidate: None,
        };
        self.workloads.insert(workload, workload_of);
    }

    async fn upload(&mut self) {
        let build = self.one_of(self.builds.keys().copied().collect::<Vec<_>>());
        let build = build.filter(|_| self.chance(70));
        let (artifact, transfer) = (ArtifactId::new(), TransferId::new());
        let (worker, content) =
            (self.random.random_range(0..self.workers.len()), self.random.random_range(0..20));
        self.suite.create(artifact, build).await.expect("created");
        if self.chance(5) {
            return;
        }
        let gateway = self.workers[worker].gateway.clone();
        let handle = self.suite.plan(artifact, gateway.worker, transfer).await.expect("planned");
        if self.chance(10) {
            self.workers[worker].later.push((true, handle));
            return;
        }
        self.workers[worker].volumes.insert(handle.clone());
        if self.chance(5) {
            return;
        }
        gateway.complete(&handle, digest(content)).await.expect("complete");
        self.repeats.push(Call::Complete(worker, handle, content));
        match self.random.random_range(0..10) {
            0 => {
                self.suite.abandon(transfer).await.expect("abandoned");
                self.repeats.push(Call::Abandon(transfer));
            }
            1 => self.arrived.push((artifact, transfer, content)),
            _ => {
                self.suite.seal(artifact, digest(content)).await.expect("sealed");
                self.artifacts.insert(artifact, (build.into_iter().collect(), content));
                self.repeats.push(Call::Abandon(transfer));
            }
        }
    }

    async fn adopt(&mut self) {
        let Some(build) = self.one_of(self.builds.keys().copied().collect::<Vec<_>>()) else { return };
        let content = self.random.random_range(0..20);
        let adopted = self.suite.adopt(digest(content), Some(build)).await.expect("asked");
        if let Some(adopted) = adopted {
            let id: ArtifactId = adopted.artifact_id.parse().expect("an id");
            self.artifacts.get_mut(&id).expect("one that was sealed").0.insert(build);
        }
    }

    /// A workload is accepted, and pins its inputs.
    async fn accept(&mut self) {
        let workload = WorkloadId::new();
        let pins: BTreeSet<_> =
            (0..2).filter_map(|_| self.one_of(self.artifacts.keys().copied().collect::<Vec<_>>())).collect();
        let pins: Vec<_> = pins.into_iter().collect();
        let build = self.one_of(self.builds.keys().copied().collect::<Vec<_>>());
        // One may be gone already, or lost: then nothing is pinned, and the workload is refused.
        if self.suite.pin(workload, &pins, build).await.is_ok() {
            let attempt = AttemptId::new();
            self.workloads.insert(workload, Workload { attempt, worker: None, build, pins, candidate: None });
        }
    }

    async fn prepare(&mut self) {
        let Some(id) = self.one_of(self.workloads.keys().copied().collect::<Vec<_>>()) else { return };
        let any = self.random.random_range(0..self.workers.len());
        let workload = &self.workloads[&id];
        let (attempt, worker) = (workload.attempt, workload.worker.unwrap_or(any));
        let mut needs: Vec<_> =
            workload.pins.iter().map(|artifact| input(&artifact.to_string(), *artifact)).collect();
        let mut out = output("out", id.output_artifact("out"));
        if let Some(source) = workload.pins.first() {
            // An output that begins as a copy of an input.
            out.from_artifact_id = source.to_string();
        }
        needs.push(out);
        let gateway = self.workers[worker].gateway.clone();
        let planned = gateway.prepare(id, attempt, &needs).await.expect("prepared");
        self.workloads.get_mut(&id).expect("it goes on").worker = Some(worker);

        let missing = planned.volumes.iter().any(|volume| !volume.missing_artifact_id.is_empty());
        let made = planned.volumes.iter().map(|volume| (true, volume.volume_handle.clone()));
        let made: Vec<_> = made.chain([(false, planned.container_handle.clone())]).collect();
        if missing || self.chance(20) {
            // It will be made later, or never, or asked for again.
            self.workers[worker].later.extend(made);
            return;
        }
        self.make(worker, made);
        gateway.prepared(attempt).await.expect("recorded");
        self.repeats.push(Call::Prepared(worker, attempt));
        if self.chance(70) && self.workloads[&id].candidate.is_none() {
            let out = planned.volumes.last().expect("an output").volume_handle.clone();
            let content = self.random.random_range(0..20);
            gateway.complete(&out, digest(content)).await.expect("complete");
            self.repeats.push(Call::Complete(worker, out.clone(), content));
            self.workloads.get_mut(&id).expect("it goes on").candidate = Some((out, content));
        }
    }

    fn make(&mut self, worker: usize, made: Vec<(bool, String)>) {
        let worker = &mut self.workers[worker];
        for (is_volume, handle) in made {
            if is_volume {
                worker.volumes.insert(handle)
            } else {
                worker.containers.insert(handle)
            };
        }
    }

    async fn settle(&mut self) {
        if self.chance(20)
            && let Some((artifact, transfer, content)) = self.arrived.pop()
        {
            // Unless it was too late for it.
            if self.suite.seal(artifact, digest(content)).await.is_ok() {
                self.artifacts.insert(artifact, (BTreeSet::new(), content));
                self.repeats.push(Call::Abandon(transfer));
            }
            return;
        }
        let Some(id) = self.one_of(self.workloads.keys().copied().collect::<Vec<_>>()) else { return };
        let workload = self.workloads.remove(&id).expect("it goes on");
        let out = id.output_artifact("out");
        let outputs: Vec<_> = workload.candidate.iter().map(|(_, content)| (out, digest(*content))).collect();
        let settled = self.suite.settle(id, Some(workload.attempt), &outputs, workload.build).await;
        settled.expect("settled");
        // The builds that end with it let go at once.
        let ended: Vec<_> =
            self.builds.iter().filter(|(_, ends_with)| **ends_with == id).map(|(build, _)| *build).collect();
        for build in ended {
            self.builds.remove(&build);
        }
        if let Some((_, content)) = workload.candidate {
            self.artifacts.insert(out, (workload.build.into_iter().collect(), content));
        }
        let other = workload.build.unwrap_or_else(BuildId::new);
        self.repeats.push(Call::Settle(id, workload.attempt, other));
    }

    async fn end_attempt(&mut self) {
        let Some(id) = self.one_of(self.workloads.keys().copied().collect::<Vec<_>>()) else { return };
        let workload = self.workloads.get_mut(&id).expect("it goes on");
        let ended = std::mem::replace(&mut workload.attempt, AttemptId::new());
        workload.worker = None;
        workload.candidate = None;
        self.suite.end_attempt(id, ended).await.expect("ended");
        self.repeats.push(Call::EndAttempt(id, ended));
    }

    /// An earlier call comes again, long after it was answered. What it answers does not matter, only what it changes: nothing.
    async fn repeat(&mut self) {
        match self.one_of(self.repeats.clone()) {
            None => {}
            Some(Call::EndAttempt(workload, attempt)) => {
                self.suite.end_attempt(workload, attempt).await.expect("a repeat is safe");
            }
            Some(Call::Settle(workload, attempt, build)) => {
                let outputs = [(ArtifactId::new(), digest(1))];
                let repeated = self.suite.settle(workload, Some(attempt), &outputs, Some(build)).await;
                repeated.expect("a repeat is answered as the first");
            }
            Some(Call::Abandon(transfer)) => {
                self.suite.abandon(transfer).await.expect("a repeat is safe");
            }
            Some(Call::Complete(worker, handle, content)) => {
                self.workers[worker].gateway.complete(&handle, digest(content)).await.ok();
            }
            Some(Call::Prepared(worker, attempt)) => {
                self.workers[worker].gateway.prepared(attempt).await.ok();
            }
        }
    }

    /// Garbage is marked while others begin to use what may be garbage.
    async fn collect_while_pinning(&mut self) {
        let mut pins = tokio::task::JoinSet::new();
        for _ in 0..4 {
            let Some(artifact) = self.one_of(self.artifacts.keys().copied().collect::<Vec<_>>()) else {
                break;
            };
            let (workload, peer) = (WorkloadId::new(), self.suite.peer.clone());
            pins.spawn(async move {
                let request = pb::PinRequest {
                    holder_id: workload.to_string(),
                    team: crate::TEAM.to_owned(),
                    artifact_ids: vec![artifact.to_string()],
                    build_id: String::new(),
                };
                let pinned = pb::pins_client::PinsClient::new(peer).pin(request).await;
                pinned.is_ok().then_some((workload, artifact))
            });
        }
        tokio::join!(self.suite.collect(DryRun::Off), self.suite.collect(DryRun::Off));
        while let Some(pinned) = pins.join_next().await {
            if let Some((workload, artifact)) = pinned.expect("no panic") {
                let attempt = AttemptId::new();
                let pins = vec![artifact];
                let workload_of = Workload { attempt, worker: None, build: None, pins, candidate: None };
                self.workloads.insert(workload, workload_of);
            }
        }
    }

    /// A gateway takes what was handed out so far, destroys some of it, and makes some of what it was told to make.
    async fn sweep(&mut self) {
        let worker = self.random.random_range(0..self.workers.len());
        self.take_marks(worker).await;
        let (destroy, make) = (self.chance(80), self.chance(50));
        let worker = &mut self.workers[worker];
        if destroy {
            for (is_volume, handle) in worker.doomed.drain(..) {
                if is_volume {
                    worker.volumes.remove(&handle)
                } else {
                    worker.containers.remove(&handle)
                };
            }
        }
        if make {
            for (is_volume, handle) in worker.later.drain(..) {
                self.late.insert(handle.clone());
                if is_volume {
                    worker.volumes.insert(handle)
                } else {
                    worker.containers.insert(handle)
                };
            }
        }
    }

    /// Takes what the stream has now. It may have more soon: that comes the next time.
    async fn take_marks(&mut self, worker: usize) {
        let worker = &mut self.workers[worker];
        while let Ok(message) = tokio::time::timeout(Duration::from_millis(30), worker.marks.message()).await
        {
            let Ok(Some(sweep)) = message else { break };
            worker.doomed.extend(sweep.container_handles.into_iter().map(|handle| (false, handle)));
            worker.doomed.extend(sweep.volume_handles.into_iter().map(|handle| (true, handle)));
        }
    }

    async fn report(&mut self) {
        let worker = self.random.random_range(0..self.workers.len());
        let token = self.workers[worker].gateway.begin_report().await.expect("begun");
        let of_worker = &self.workers[worker];
        let volumes: Vec<_> = of_worker.volumes.iter().cloned().collect();
        let containers: Vec<_> = of_worker.containers.iter().cloned().collect();
        // What happens between the list and the report must not be judged by it.
        if self.chance(50) {
            self.suite.collect(DryRun::Off).await;
        }
        let gateway = self.workers[worker].gateway.clone();
        let reported = gateway.report_with(token.clone(), &volumes, &containers).await.expect("reported");
        if self.chance(20) {
            let again = gateway.report_with(token, &volumes, &containers).await.expect("reported");
            assert_eq!((again.forgotten, again.lost), (0, 0));
        }
        let known = self.suite.volumes().await.into_iter().map(|volume| volume.volume_handle);
        let containers_known = self.suite.containers().await;
        let known: BTreeSet<_> =
            known.chain(containers_known.into_iter().map(|container| container.container_handle)).collect();
        let unknown: BTreeSet<_> = reported
            .unknown_volume_handles
            .iter()
            .chain(&reported.unknown_container_handles)
            .cloned()
            .collect();
        for handle in volumes.iter().chain(&containers) {
            assert!(known.contains(handle) || unknown.contains(handle), "{handle} was named and forgotten");
        }
        for handle in unknown {
            assert!(self.late.contains(&handle), "{handle} was forgotten although it was there");
            let worker = &mut self.workers[worker];
            worker.volumes.remove(&handle);
            worker.containers.remove(&handle);
        }
    }

    /// Another gateway speaks for what is still there.
    async fn replace_gateway(&mut self) {
        let worker = self.random.random_range(0..self.workers.len());
        let of_worker = &mut self.workers[worker];
        of_worker.session += 1;
        self.speak_anew(worker).await;
    }

    /// The machine starts again: its containers are gone, its volumes are not.
    async fn restart_worker(&mut self) {
        let worker = self.random.random_range(0..self.workers.len());
        let of_worker = &mut self.workers[worker];
        of_worker.incarnation += 1;
        of_worker.containers.clear();
        self.speak_anew(worker).await;
        // The first thing that a gateway does. Until then nobody knows what is there.
        let of_worker = &self.workers[worker];
        let volumes: Vec<_> = of_worker.volumes.iter().cloned().collect();
        let reported = of_worker.gateway.report(&volumes, &[]).await.expect("reported");
        for handle in reported.unknown_volume_handles {
            assert!(self.late.contains(&handle), "{handle} was forgotten although it was there");
            self.workers[worker].volumes.remove(&handle);
        }
        // The scheduler ends what ran there.
        let there = self.workloads.iter().filter(|(_, workload)| workload.worker == Some(worker));
        let there: Vec<_> = there.map(|(id, workload)| (*id, workload.attempt)).collect();
        for (id, attempt) in there {
            self.suite.end_attempt(id, attempt).await.expect("ended");
            let workload = self.workloads.get_mut(&id).expect("it goes on");
            (workload.attempt, workload.worker, workload.candidate) = (AttemptId::new(), None, None);
        }
    }

    async fn speak_anew(&mut self, worker: usize) {
        let of_worker = &mut self.workers[worker];
        let id: WorkerId = of_worker.gateway.worker;
        of_worker.gateway = self.suite.silent_gateway(id, of_worker.incarnation, of_worker.session);
        of_worker.marks = of_worker.gateway.watch().await.expect("a stream");
        of_worker.doomed.clear();
    }

    /// What is in use is there.
    async fn check(&mut self, step: u64) {
        let on_disk: BTreeSet<_> = self.workers.iter().flat_map(|worker| worker.volumes.iter()).collect();
        let mut in_use: BTreeMap<ArtifactId, String> = BTreeMap::new();
        for (artifact, (owners, _)) in &self.artifacts {
            if let Some(build) = owners.iter().find(|build| self.builds.contains_key(build)) {
                in_use.insert(*artifact, format!("build {build}"));
            }
        }
        for (id, workload) in &self.workloads {
            in_use.extend(workload.pins.iter().map(|artifact| (*artifact, format!("workload {id}"))));
        }
        for (artifact, by) in in_use {
            let found = self.suite.get(artifact).await;
            let found =
                found.unwrap_or_else(|error| panic!("step {step}: {artifact}, in use by {by}: {error}"));
            assert_eq!(found.state(), ArtifactState::Sealed, "step {step}: {artifact}, in use by {by}");
            let is_there = found.replicas.iter().any(|replica| on_disk.contains(&replica.volume_handle));
            assert!(is_there, "step {step}: {artifact}, in use by {by}, has no replica on a disk: {found:?}");
        }
    }

    /// Everything ends, and everything goes.
    async fn quiesce(&mut self) {
        for (id, workload) in std::mem::take(&mut self.workloads) {
            self.suite.settle(id, Some(workload.attempt), &[], None).await.expect("settled");
        }
        self.suite.clock.advance(Duration::from_secs(48 * 3600));
        let mut left = Vec::new();
        for _ in 0..200 {
            self.suite.collect(DryRun::Off).await;
            for worker in 0..self.workers.len() {
                self.take_marks(worker).await;
                let of_worker = &mut self.workers[worker];
                of_worker.later.clear();
                for (_, handle) in of_worker.doomed.drain(..) {
                    of_worker.volumes.remove(&handle);
                    of_worker.containers.remove(&handle);
                }
                let volumes: Vec<_> = of_worker.volumes.iter().cloned().collect();
                let containers: Vec<_> = of_worker.containers.iter().cloned().collect();
                let reported = of_worker.gateway.report(&volumes, &containers).await.expect("reported");
                for handle in
                    reported.unknown_volume_handles.iter().chain(&reported.unknown_container_handles)
                {
                    of_worker.volumes.remove(handle);
                    of_worker.containers.remove(handle);
                }
            }
            left = self
                .workers
                .iter()
                .flat_map(|worker| worker.volumes.iter().chain(&worker.containers))
                .collect();
            let rows = self.suite.volumes().await.len()
                + self.suite.containers().await.len()
                + self.suite.all_artifacts().await.len();
            if left.is_empty() && rows == 0 {
                return;
            }
        }
        let (volumes, containers) = (self.suite.volumes().await, self.suite.containers().await);
        let artifacts = self.suite.all_artifacts().await;
        panic!("left: on disks {left:?}, rows {volumes:?} {containers:?} {artifacts:?}");
    }
}
