//! Repeated crashes of PostgreSQL, which two replicas of the store survive without help.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use artifact_store::Clock;
use domain::{ArtifactId, BuildId, Timestamp, TransferId, WorkloadId};
use rpc::Reason;
use rpc::pb::artifacts as pb;
use rpc::pb::artifacts::{ArtifactState, InventoryState};
use testing::databases::Server;
use tokio::sync::Mutex;
use tokio::task::JoinSet;

use crate::{Answer, Callers, Gateway, PATIENCE, Suite, TEAM, digest};

/// Number of crashes of PostgreSQL.
const CRASHES: usize = 3;

/// Minimum number of uploads between two crashes.
const UPLOADS: usize = 12;

/// State outside of the store.
struct World {
    clock: Clock,
    replicas: [Callers; 2],
    gateway: Gateway,
    /// Volumes on the worker. Locked while they are listed or created.
    disk: Mutex<BTreeSet<String>>,
    calls: AtomicUsize,
    refused: AtomicUsize,
    uploaded: AtomicUsize,
    over: AtomicBool,
}

/// An artifact that must stay: its replica, and its reference.
struct KeptArtifact {
    artifact: ArtifactId,
    handle: String,
    build: Option<BuildId>,
    pinned_by: Option<WorkloadId>,
}

impl World {
    /// Asks one replica after the other until one answers. The only permitted error is UNAVAILABLE.
    async fn ask<T, F>(&self, call: impl Fn(Callers) -> F) -> T
    where
        F: Future<Output = Answer<T>>,
    {
        let deadline = Instant::now() + PATIENCE * 4;
        loop {
            let turn = self.calls.fetch_add(1, Ordering::Relaxed);
            match Box::pin(call(self.replicas[turn % 2].clone())).await {
                Ok(answer) => return answer,
                Err(refusal) => {
                    assert!(refusal.is(Reason::Unavailable), "{refusal:?}");
                    assert!(Instant::now() < deadline, "it does not come back: {refusal:?}");
                    self.refused.fetch_add(1, Ordering::Relaxed);
                }
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }

    /// Uploads artifacts. Of three, one stays in its build, one is pinned when its build ends, and
    /// one has no reference.
    async fn upload(self: Arc<Self>) -> Vec<KeptArtifact> {
        let mut kept = Vec::new();
        for round in 0.. {
            if self.is_over() {
                break;
            }
            let (artifact, build, workload) = (ArtifactId::new(), BuildId::new(), WorkloadId::new());
            let (transfer, worker, content) = (TransferId::new(), self.gateway.worker, digest(round));
            self.ask(|store| async move { put_build(&store, build).await }).await;
            self.ask(|store| async move { store.create(artifact, Some(build)).await }).await;
            let handle = {
                let mut disk = self.disk.lock().await;
                let handle =
                    self.ask(|store| async move { store.plan(artifact, worker, transfer).await }).await;
                disk.insert(handle.clone());
                handle
            };
            let (gateway, volume) = (&self.gateway, &handle);
            self.ask(|store| async move { gateway.by_way_of(&store).complete(volume, content).await }).await;
            self.ask(|store| async move { store.seal(artifact, content).await }).await;
            let pinned_by = (round % 3 == 1).then_some(workload);
            if pinned_by.is_some() {
                self.ask(|store| async move { store.pin(workload, &[artifact], None).await }).await;
            }
            if round % 3 > 0 {
                self.ask(|store| async move { store.delete_build(build).await }).await;
            }
            if round % 3 < 2 {
                let build = (round % 3 == 0).then_some(build);
                kept.push(KeptArtifact { artifact, handle, build, pinned_by });
            }
            self.uploaded.fetch_add(1, Ordering::Relaxed);
        }
        kept
    }

    /// Reports the contents of the worker repeatedly.
    async fn report(self: Arc<Self>) {
        while !self.is_over() {
            self.report_once().await;
            tokio::time::sleep(Duration::from_millis(30)).await;
        }
    }

    async fn report_once(&self) {
        let gateway = &self.gateway;
        let (token, volumes) = {
            let disk = self.disk.lock().await;
            let token = self.ask(|store| async move { gateway.by_way_of(&store).begin_report().await }).await;
            (token, disk.iter().cloned().collect::<Vec<_>>())
        };
        let (token, volumes) = (&token, &volumes);
        self.ask(
            |store| async move { gateway.by_way_of(&store).report_with(token.clone(), volumes, &[]).await },
        )
        .await;
    }

    /// Deletes the items that the store hands out.
    async fn sweep(self: Arc<Self>) {
        while !self.is_over() {
            let gateway = &self.gateway;
            let mut stream = self.ask(|store| async move { gateway.by_way_of(&store).watch().await }).await;
            loop {
                match tokio::time::timeout(Duration::from_millis(200), stream.message()).await {
                    Ok(Ok(Some(sweep))) => {
                        let mut disk = self.disk.lock().await;
                        sweep.volume_handles.iter().for_each(|handle| _ = disk.remove(handle));
                    }
                    // An item that was sent to a broken stream comes again from the next one.
                    Ok(Ok(None)) => break,
                    Ok(Err(status)) => {
                        let refusal = rpc::Refusal::from(status);
                        assert!(refusal.is(Reason::Unavailable), "{refusal:?}");
                        self.refused.fetch_add(1, Ordering::Relaxed);
                        tokio::time::sleep(Duration::from_millis(20)).await;
                        break;
                    }
                    Err(_) if self.is_over() => return,
                    Err(_) => {}
                }
            }
        }
    }

    /// Waits until a count has risen by `more`.
    async fn risen(&self, count: &AtomicUsize, more: usize) {
        let (before, deadline) = (count.load(Ordering::Relaxed), Instant::now() + PATIENCE * 4);
        while count.load(Ordering::Relaxed) < before + more {
            assert!(Instant::now() < deadline, "no progress");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Sweeps and reports until only `artifacts` with these replicas are left.
    async fn comes_to_rest(self: &Arc<Self>, artifacts: &BTreeSet<String>, volumes: &BTreeSet<String>) {
        self.over.store(false, Ordering::Relaxed);
        let mut gateway = JoinSet::new();
        gateway.spawn(Arc::clone(self).report());
        gateway.spawn(Arc::clone(self).sweep());
        let deadline = Instant::now() + PATIENCE * 4;
        loop {
            let left: BTreeSet<_> =
                self.replicas[0].all_artifacts().await.into_iter().map(|it| it.artifact_id).collect();
            let held: BTreeSet<_> =
                self.replicas[1].volumes().await.into_iter().map(|it| it.volume_handle).collect();
            if left == *artifacts && held == *volumes && *self.disk.lock().await == *volumes {
                break;
            }
            assert!(artifacts.is_subset(&left), "something that is kept has gone");
            assert!(volumes.is_subset(&held), "a replica of something that is kept has gone");
            // Items that other transactions had locked are checked again after a while.
            self.clock.advance(Duration::from_secs(61));
            assert!(Instant::now() < deadline, "left: {left:?}, {held:?}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        self.over.store(true, Ordering::Relaxed);
        while let Some(ended) = gateway.join_next().await {
            ended.expect("no panic");
        }
    }
}

/// Creates a build that its caller ends.
async fn put_build(store: &Callers, build: BuildId) -> Answer<()> {
    let request =
        pb::PutBuildRequest { build_id: build.to_string(), team: TEAM.to_owned(), ..Default::default() };
    store.owners().put_build(request).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn store_survives_postgres_crashes_during_collection() {
    // The server must not outlive this thread, which starts and stops it.
    let mut server = Server::new();
    let clock = Clock::movable(Timestamp::now());
    let start = async || {
        Suite::start_with(server.database(), |config| {
            config.clock = clock.clone();
            config.collect_interval = Duration::from_millis(20);
            config.sweep_interval = Duration::from_millis(50);
            config.database.connections = 6;
        })
        .await
    };
    let suites = [start().await, start().await];
    let world = Arc::new(World {
        clock: clock.clone(),
        gateway: suites[0].gateway().await,
        replicas: [Callers::clone(&suites[0]), Callers::clone(&suites[1])],
        disk: Mutex::default(),
        calls: AtomicUsize::new(0),
        refused: AtomicUsize::new(0),
        uploaded: AtomicUsize::new(0),
        over: AtomicBool::new(false),
    });
    let mut gateway = JoinSet::new();
    gateway.spawn(Arc::clone(&world).report());
    gateway.spawn(Arc::clone(&world).sweep());
    let mut uploads = JoinSet::new();
    for _ in 0..3 {
        uploads.spawn(Arc::clone(&world).upload());
    }
    for _ in 0..CRASHES {
        world.risen(&world.uploaded, UPLOADS).await;
        server.crash();
        world.risen(&world.refused, 1).await;
        server.start();
    }
    world.risen(&world.uploaded, UPLOADS).await;
    world.over.store(true, Ordering::Relaxed);
    let mut kept = Vec::new();
    while let Some(uploaded) = uploads.join_next().await {
        kept.extend(uploaded.expect("no panic"));
    }
    while let Some(ended) = gateway.join_next().await {
        ended.expect("no panic");
    }

    let artifacts = kept.iter().map(|kept| kept.artifact.to_string()).collect();
    let handles = kept.iter().map(|kept| kept.handle.clone()).collect();
    world.comes_to_rest(&artifacts, &handles).await;
    for artifact in world.replicas[0].all_artifacts().await {
        assert_eq!(artifact.state(), ArtifactState::Sealed, "{artifact:?}");
    }
    for volume in world.replicas[1].volumes().await {
        assert_eq!(volume.state(), InventoryState::Created, "{volume:?}");
    }
    for kept in &kept {
        if let Some(build) = kept.build {
            world.ask(|store| async move { store.delete_build(build).await }).await;
        }
        if let Some(workload) = kept.pinned_by {
            world.ask(|store| async move { store.settle(workload, None, &[], None).await }).await;
        }
    }
    world.comes_to_rest(&BTreeSet::new(), &BTreeSet::new()).await;
    for suite in suites {
        suite.stop().await;
    }
}
