//! The store that operations are applied to: its replicas on one database, and the gateways of its workers.
//!
//! A replica has a runtime of its own, so that it can be killed as a process is: whatever it is at, it goes no further than to its next
//! await. Whoever was not answered asks another replica, until one answers; that is what all callers do.

mod caches;

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use artifact_store::{Clock, Config};
use domain::ArtifactId;
use rpc::pb::artifacts as pb;
use rpc::{Reason, Refusal};
use sea_orm::{ConnectionTrait, DbBackend, Statement};
use testing::databases::TestDatabase;
use tokio::runtime::Runtime;
use tonic::Streaming;
use uuid::Uuid;

use super::check::{SeenArtifact, SeenVolume, View};
use super::operations::{Artifact, Operation, Outputs, REPLICAS, Status, WORKERS, Way};
use super::state::{
    Build, CLAIM_TERM, GC_GRACE, Outcome, RESOURCE_CACHE_TTL, Standing, State, UNOWNED_TTL, artifact_id,
    attempt_id, build_id, transfer_id, worker_id, workload_id,
};
use crate::{Answer, Callers, Gateway, PATIENCE, TEAM, config, digest, input, output};

/// Tables in which something is left when nothing is kept any more.
const LASTING: [&str; 5] = ["store", "workers", "seaql_migrations", "migration_digests", "sqlite_sequence"];

/// One process that serves the store, as far as it can be killed.
struct Replica {
    runtime: Option<Runtime>,
    callers: Callers,
}

impl Replica {
    fn start(config: Config) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.expect("a runtime");
        let listener = std::net::TcpListener::bind(SocketAddr::from(([127, 0, 0, 1], 0))).expect("a port");
        listener.set_nonblocking(true).expect("a socket");
        let endpoint = format!("http://{}", listener.local_addr().expect("its address"));
        runtime.spawn(async move {
            let listener = tokio::net::TcpListener::from_std(listener).expect("a socket");
            let served =
                artifact_store::serve(config, server::Listener::Tcp(listener), std::future::pending()).await;
            // Who calls it waits in vain, and says so.
            eprintln!("a replica ended: {served:?}");
        });
        Self { runtime: Some(runtime), callers: Callers::at(&endpoint) }
    }
}

impl Drop for Replica {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// Who speaks for a worker.
#[derive(Clone)]
struct Speaker {
    gateway: Gateway,
    incarnation: u64,
    session: u64,
    former: Option<Gateway>,
}

/// What a gateway is told to destroy.
#[derive(Default)]
struct Marks {
    stream: Option<Streaming<pb::WatchDestroyingResponse>>,
    /// What came from this stream.
    received: BTreeSet<Uuid>,
}

/// Reports of a worker that were begun.
#[derive(Default)]
struct Reports {
    begun: Vec<Begun>,
    /// The highest token that was judged.
    judged: u64,
}

#[derive(Clone)]
struct Begun {
    token: pb::ReportToken,
    volumes: Vec<String>,
    containers: Vec<String>,
    speaker: Speaker,
}

/// How many reports of a worker may be on their way.
const REPORTS: usize = 6;

pub(crate) struct World {
    database: TestDatabase,
    clock: Clock,
    replicas: Mutex<Vec<Replica>>,
    turn: AtomicUsize,
    speakers: Mutex<Vec<Speaker>>,
    marks: Vec<tokio::sync::Mutex<Marks>>,
    reports: Vec<tokio::sync::Mutex<Reports>>,
}

impl World {
    pub(crate) async fn start(database: TestDatabase) -> Self {
        let clock = config(&database.url).clock;
        let replicas: Vec<_> =
            (0..REPLICAS).map(|index| Replica::start(settings(&database.url, &clock, index))).collect();
        let callers = replicas[0].callers.clone();
        let speaker = |worker| Speaker {
            gateway: callers.silent_gateway(worker_id(worker), 1, 1),
            incarnation: 1,
            session: 1,
            former: None,
        };
        let world = Self {
            database,
            clock,
            replicas: Mutex::new(replicas),
            turn: AtomicUsize::new(0),
            speakers: Mutex::new((0..WORKERS).map(speaker).collect()),
            marks: (0..WORKERS).map(|_| Default::default()).collect(),
            reports: (0..WORKERS).map(|_| Default::default()).collect(),
        };
        for worker in 0..WORKERS {
            let gateway = &world.speaker(worker).gateway;
            let begin = |callers: Callers| async move { gateway.by_way_of(&callers).begin_report().await };
            world.ask(begin).await.expect("a new worker may speak");
        }
        world
    }

    /// Ends everything, and removes the database.
    pub(crate) async fn end(self) {
        let replicas = std::mem::take(&mut *self.replicas.lock().unwrap_or_else(PoisonError::into_inner));
        for replica in replicas {
            shut_down(replica).await;
        }
        remove(&self.database.url).await;
    }

    fn callers(&self, turn: usize) -> Callers {
        let replicas = self.replicas.lock().unwrap_or_else(PoisonError::into_inner);
        replicas[turn % replicas.len()].callers.clone()
    }

    fn speaker(&self, worker: u8) -> Speaker {
        self.speakers.lock().unwrap_or_else(PoisonError::into_inner)[usize::from(worker)].clone()
    }

    /// Asks one replica after the other until one answers.
    async fn ask<T, F>(&self, call: impl Fn(Callers) -> F) -> Answer<T>
    where
        F: Future<Output = Answer<T>>,
    {
        let first = self.turn.fetch_add(1, Ordering::Relaxed);
        let deadline = Instant::now() + PATIENCE;
        let mut refused = 0;
        for turn in first.. {
            // On the heap: what a call takes is more than what all of the rest does.
            let answer = Box::pin(call(self.callers(turn))).await;
            let Err(refusal) = &answer else { return answer };
            refused += u32::from(refusal.reason.is_some());
            if !refusal.is_transient() || refused > 2 || Instant::now() > deadline {
                return answer;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        unreachable!("there are more turns than time")
    }

    /// Carries out one operation. `state` is what was known before it.
    pub(crate) async fn perform(&self, state: &State, operation: &Operation) -> Outcome {
        use Operation as O;
        match *operation {
            O::PutBuild { build, ends_with, keep, term, job } => {
                let put = || pb::PutBuildRequest {
                    term: Some(rpc::duration(Duration::from_secs(term.into()))),
                    ..build_request(build, ends_with, keep.into(), job)
                };
                done(self.ask(|callers| put_build(callers, put())).await)
            }
            O::EndBuild { build, status } => match state.build(build) {
                Some(&Build { ends_with, keep, job, .. }) => {
                    let end = || pb::PutBuildRequest {
                        status: build_status(status).into(),
                        ..build_request(build, ends_with, keep, job)
                    };
                    done(self.ask(|callers| put_build(callers, end())).await)
                }
                None => Outcome::Skipped,
            },
            O::DeleteBuild { build } => {
                done(self.ask(|callers| async move { callers.delete_build(build_id(build)).await }).await)
            }
            O::Create { upload, owner } => {
                let artifact = artifact_id(Artifact::Upload(upload));
                let owner = owner.map(build_id);
                done(self.ask(|callers| async move { callers.create(artifact, owner).await }).await)
            }
            O::Plan { transfer, artifact, worker, .. } => self.plan(transfer, artifact, worker).await,
            O::Progress { transfer } => {
                let request = || pb::ProgressRequest {
                    transfer_id: transfer_id(transfer).to_string(),
                    team: TEAM.to_owned(),
                };
                let progress = |callers: Callers| async move {
                    Ok(callers.replicas().progress(request()).await.map(drop)?)
                };
                done(self.ask(progress).await)
            }
            O::Arrive { transfer, content } => match state.transfer(transfer) {
                Some((_, worker, handle)) if state.is_on_disk(handle) => {
                    self.complete(worker, handle, content).await
                }
                _ => Outcome::Skipped,
            },
            O::Abandon { transfer } => {
                let transfer = transfer_id(transfer);
                done(self.ask(|callers| async move { callers.abandon(transfer).await }).await)
            }
            O::Seal { upload, content } => {
                let artifact = artifact_id(Artifact::Upload(upload));
                let digest = digest(content.into());
                done(self.ask(|callers| async move { callers.seal(artifact, digest).await }).await)
            }
            O::Adopt { content, owner } => {
                let (digest, owner) = (digest(content.into()), owner.map(build_id));
                let asked = AtomicUsize::new(0);
                let adopt = |callers: Callers| {
                    asked.fetch_add(1, Ordering::Relaxed);
                    async move { callers.adopt(digest, owner).await }
                };
                let adopted = self.ask(adopt).await;
                let again = asked.load(Ordering::Relaxed) > 1;
                adopted.map_or_else(Outcome::Refused, |adopted| Outcome::Adopted {
                    artifact: adopted.map(|artifact| artifact.artifact_id.parse().expect("an id")),
                    again,
                })
            }
            O::Undelete { artifact, owner, keep } => {
                let kept_by = || match owner {
                    Some(build) => pb::undelete_request::KeptBy::BuildId(build_id(build).to_string()),
                    None => {
                        pb::undelete_request::KeptBy::Keep(rpc::duration(Duration::from_secs(keep.into())))
                    }
                };
                let request = || pb::UndeleteRequest {
                    team: TEAM.to_owned(),
                    artifact_id: artifact_id(artifact).to_string(),
                    kept_by: Some(kept_by()),
                };
                let undelete = |callers: Callers| async move {
                    Ok(callers.artifacts().undelete(request()).await.map(drop)?)
                };
                done(self.ask(undelete).await)
            }
            O::Drop { artifact, worker, force } => {
                let request = || pb::DropReplicaRequest {
                    team: TEAM.to_owned(),
                    artifact_id: artifact_id(artifact).to_string(),
                    worker_id: worker_id(worker).to_string(),
                    why: "it is in the way".to_owned(),
                    force,
                };
                let drop_it = |callers: Callers| async move {
                    Ok(callers.replicas().drop_replica(request()).await.map(drop)?)
                };
                done(self.ask(drop_it).await)
            }
            O::AskCache { .. }
            | O::RenewClaim { .. }
            | O::PutCache { .. }
            | O::UseCache { .. }
            | O::ReleaseCache { .. }
            | O::DeleteCache { .. }
            | O::AskTask { .. }
            | O::PublishTask { .. }
            | O::DeleteTask { .. } => Box::pin(self.perform_on_caches(state, operation)).await,
            O::Touch { workload, attempt } => match state.container_of(workload, attempt) {
                Some(worker) => {
                    let (gateway, attempt) = (self.speaker(worker).gateway, attempt_id(workload, attempt));
                    let gateway = &gateway;
                    let touch =
                        |callers: Callers| async move { gateway.by_way_of(&callers).touch(attempt).await };
                    done(self.ask(touch).await)
                }
                None => Outcome::Skipped,
            },
            O::Accept { workload, ref pins, build } => {
                let pins: Vec<_> = pins.iter().map(|artifact| artifact_id(*artifact)).collect();
                let (pins, workload, build) = (&pins, workload_id(workload), build.map(build_id));
                done(self.ask(|callers| async move { callers.pin(workload, pins, build).await }).await)
            }
            O::Prepare { workload, attempt, worker, .. } => {
                self.prepare(state.pins_of(workload), workload, attempt, worker).await
            }
            O::Prepared { workload, attempt } => match state.made_for(workload, attempt) {
                Some((worker, _)) => {
                    let (gateway, attempt) = (self.speaker(worker).gateway, attempt_id(workload, attempt));
                    let gateway = &gateway;
                    let prepared =
                        |callers: Callers| async move { gateway.by_way_of(&callers).prepared(attempt).await };
                    done(self.ask(prepared).await)
                }
                None => Outcome::Skipped,
            },
            O::Finish { workload, attempt, content } => match state.made_for(workload, attempt) {
                Some((worker, output)) => self.complete(worker, output, content).await,
                None => Outcome::Skipped,
            },
            O::Settle { workload, attempt, status, outputs, build } => {
                done(self.ask(|callers| settle(callers, workload, attempt, status, outputs, build)).await)
            }
            O::EndAttempt { workload, attempt } => {
                let (workload, attempt) = (workload_id(workload), attempt_id(workload, attempt));
                done(self.ask(|callers| async move { callers.end_attempt(workload, attempt).await }).await)
            }
            O::Collect => {
                let collect = |callers: Callers| async move {
                    let mut collector = pb::collector_client::CollectorClient::new(callers.peer);
                    let request = pb::CollectRequest { dry_run: pb::DryRun::Off.into() };
                    Ok(collector.collect(request).await.map(drop)?)
                };
                done(self.ask(collect).await)
            }
            O::BeginReport { worker } => self.begin_report(state, worker).await,
            O::Report { worker, which, way } => self.report(worker, which, way).await,
            O::Sweep { worker, .. } => self.sweep(worker).await,
            O::Make { .. } => Outcome::Done,
            O::Reconnect { worker } => {
                *self.marks[usize::from(worker)].lock().await = Marks::default();
                Outcome::Done
            }
            O::NewSession { worker } => self.speak_anew(worker, 0, 1).await,
            O::NewIncarnation { worker, .. } => self.speak_anew(worker, 1, 0).await,
            O::Former { worker } => self.former(worker).await,
            O::Advance { seconds } => {
                self.clock.advance(Duration::from_secs(seconds.into()));
                Outcome::Done
            }
            O::Kill { replica } => {
                self.kill(replica).await;
                Outcome::Done
            }
            O::Together(_) => Outcome::Skipped,
        }
    }

    async fn plan(&self, transfer: u16, artifact: Artifact, worker: u8) -> Outcome {
        let request = || pb::PlanReplicaRequest {
            team: TEAM.to_owned(),
            artifact_id: artifact_id(artifact).to_string(),
            worker_id: worker_id(worker).to_string(),
            transfer_id: transfer_id(transfer).to_string(),
        };
        let plan = |callers: Callers| async move {
            Ok(callers.replicas().plan_replica(request()).await?.into_inner())
        };
        match self.ask(plan).await {
            Ok(planned) => Outcome::Planned {
                handle: planned.volume_handle.parse().expect("a handle"),
                outcome: planned.outcome(),
            },
            Err(refusal) => Outcome::Refused(refusal),
        }
    }

    async fn prepare(&self, inputs: Vec<Artifact>, workload: u16, attempt: u8, worker: u8) -> Outcome {
        let mut needs: Vec<_> = inputs
            .iter()
            .map(|artifact| artifact_id(*artifact))
            .map(|artifact| input(&artifact.to_string(), artifact))
            .collect();
        let mut out = output("out", artifact_id(Artifact::Output(workload)));
        out.from_artifact_id =
            inputs.first().map(|artifact| artifact_id(*artifact).to_string()).unwrap_or_default();
        needs.push(out);
        let (gateway, needs) = (&self.speaker(worker).gateway, &needs);
        let (workload, attempt) = (workload_id(workload), attempt_id(workload, attempt));
        let prepare = |callers: Callers| async move {
            gateway.by_way_of(&callers).prepare(workload, attempt, needs).await
        };
        let planned = self.ask(prepare).await;
        planned.map_or_else(Outcome::Refused, |planned| Outcome::Prepared { inputs, planned })
    }

    async fn complete(&self, worker: u8, handle: Uuid, content: u8) -> Outcome {
        let gateway = &self.speaker(worker).gateway;
        let complete = |callers: Callers| async move {
            gateway.by_way_of(&callers).complete(&handle.to_string(), digest(content.into())).await
        };
        done(self.ask(complete).await)
    }

    async fn begin_report(&self, state: &State, worker: u8) -> Outcome {
        let mut reports = self.reports[usize::from(worker)].lock().await;
        let speaker = self.speaker(worker);
        let begin = |callers: Callers| {
            let gateway = speaker.gateway.by_way_of(&callers);
            async move { gateway.begin_report().await }
        };
        let token = match self.ask(begin).await {
            Ok(token) => token,
            Err(refusal) => return Outcome::Refused(refusal),
        };
        let (volumes, containers) = state.holdings(worker);
        reports.begun.push(Begun { token, volumes, containers, speaker });
        if reports.begun.len() > REPORTS {
            reports.begun.remove(0);
        }
        Outcome::Done
    }

    async fn report(&self, worker: u8, which: u8, way: Way) -> Outcome {
        let mut reports = self.reports[usize::from(worker)].lock().await;
        let Some(last) = reports.begun.len().checked_sub(1) else { return Outcome::Skipped };
        let which = usize::from(which).min(last);
        let begun = match way {
            Way::Once => reports.begun.remove(which),
            Way::Repeatedly | Way::Cut => reports.begun[which].clone(),
        };
        let now = self.speaker(worker);
        let standing = if (begun.speaker.incarnation, begun.speaker.session) != (now.incarnation, now.session)
        {
            Standing::OfFormerSession
        } else if begun.token.sequence < reports.judged {
            Standing::Overtaken
        } else {
            Standing::Good
        };
        let begun = &begun;
        let count = u64::try_from(begun.volumes.len() + begun.containers.len()).expect("few");
        let count = (way != Way::Cut).then_some(count);
        let report = |callers: Callers| async move {
            let gateway = begun.speaker.gateway.by_way_of(&callers);
            gateway.report_counted(begun.token.clone(), &begun.volumes, &begun.containers, count).await
        };
        match self.ask(report).await {
            Ok(response) => {
                reports.judged = reports.judged.max(begun.token.sequence);
                Outcome::Reported { response, standing }
            }
            Err(refusal) => Outcome::NotReported { refusal, standing },
        }
    }

    /// Takes everything that is marked now from the stream of a gateway, and whatever else it has.
    async fn sweep(&self, worker: u8) -> Outcome {
        let mut marks = self.marks[usize::from(worker)].lock().await;
        let Marks { stream, received } = &mut *marks;
        let mut handles = Vec::new();
        let deadline = Instant::now() + PATIENCE;
        let mut marked = self.marked(worker).await;
        loop {
            let waits = marked.iter().any(|id| !received.contains(id));
            if waits && Instant::now() > deadline {
                return refused(format!("{marked:?} are marked and not handed out"));
            }
            let opened = match stream.take() {
                Some(open) => open,
                None => {
                    received.clear();
                    let gateway = &self.speaker(worker).gateway;
                    let watch = |callers: Callers| async move { gateway.by_way_of(&callers).watch().await };
                    match self.ask(watch).await {
                        Ok(open) => open,
                        Err(refusal) => return Outcome::Refused(refusal),
                    }
                }
            };
            let open = stream.insert(opened);
            let patience = Duration::from_millis(if waits { 1000 } else { 0 });
            match tokio::time::timeout(patience, open.message()).await {
                Ok(Ok(Some(sweep))) => {
                    for text in sweep.container_handles.iter().chain(&sweep.volume_handles) {
                        let id = text.parse().expect("a handle");
                        received.insert(id);
                        handles.push(id);
                    }
                }
                // Its replica is gone.
                Ok(Ok(None) | Err(_)) => *stream = None,
                Err(_) if waits => marked = self.marked(worker).await,
                Err(_) => return Outcome::Swept(handles),
            }
        }
    }

    /// What is marked on a worker.
    async fn marked(&self, worker: u8) -> BTreeSet<Uuid> {
        use pb::InventoryState::{Destroying, Sweeping};
        let mut marked = BTreeSet::new();
        let of_worker = worker_id(worker).to_string();
        let mut volumes = self.volumes(&of_worker).await;
        // The youngest first. What a child that came back is made from is not handed out, nor what that is made from.
        volumes.sort_by(|one, other| other.volume_handle.cmp(&one.volume_handle));
        let mut needed = BTreeSet::new();
        for volume in volumes {
            if volume.state() == Sweeping
                || (volume.state() == Destroying && !needed.contains(&volume.volume_handle))
            {
                marked.insert(volume.volume_handle.parse().expect("a handle"));
            } else {
                needed.insert(volume.parent_handle);
            }
        }
        for container in self.containers(&of_worker).await {
            if matches!(container.state(), Destroying | Sweeping) {
                marked.insert(container.container_handle.parse().expect("a handle"));
            }
        }
        marked
    }

    async fn speak_anew(&self, worker: u8, incarnations: u64, sessions: u64) -> Outcome {
        let callers = self.callers(0);
        let gateway = {
            let mut speakers = self.speakers.lock().unwrap_or_else(PoisonError::into_inner);
            let speaker = &mut speakers[usize::from(worker)];
            speaker.incarnation += incarnations;
            speaker.session += sessions;
            let new = callers.silent_gateway(worker_id(worker), speaker.incarnation, speaker.session);
            speaker.former = Some(std::mem::replace(&mut speaker.gateway, new.clone()));
            new
        };
        *self.marks[usize::from(worker)].lock().await = Marks::default();
        let gateway = &gateway;
        let begin = |callers: Callers| async move { gateway.by_way_of(&callers).begin_report().await };
        done(self.ask(begin).await)
    }

    async fn former(&self, worker: u8) -> Outcome {
        let Some(former) = self.speaker(worker).former else { return Outcome::Skipped };
        let former = &former;
        let nobody = (workload_id(u16::MAX), attempt_id(u16::MAX, 0));
        let begun = self.ask(|callers| async move { former.by_way_of(&callers).begin_report().await });
        let prepared = self
            .ask(|callers| async move { former.by_way_of(&callers).prepare(nobody.0, nobody.1, &[]).await });
        let made = self.ask(|callers| async move { former.by_way_of(&callers).prepared(nobody.1).await });
        let answers = [begun.await.err(), prepared.await.err(), made.await.err()];
        Outcome::Former(answers.into())
    }

    async fn kill(&self, index: u8) {
        let index = usize::from(index);
        let runtime = {
            let mut replicas = self.replicas.lock().unwrap_or_else(PoisonError::into_inner);
            replicas[index].runtime.take()
        };
        if let Some(runtime) = runtime {
            let killed = tokio::task::spawn_blocking(|| runtime.shutdown_timeout(PATIENCE));
            killed.await.expect("it ends");
        }
        let index_of = u8::try_from(index).expect("few");
        let started = Replica::start(settings(&self.database.url, &self.clock, index_of));
        self.replicas.lock().unwrap_or_else(PoisonError::into_inner)[index] = started;
    }

    // What the store shows.

    pub(crate) async fn view(&self) -> View {
        let (artifacts, volumes, containers) =
            tokio::join!(self.artifacts(), self.volumes(""), self.containers(""));
        let mut view = View::default();
        for artifact in artifacts {
            let id: ArtifactId = artifact.artifact_id.parse().expect("an id");
            let replicas = artifact.replicas.iter();
            let seen = SeenArtifact {
                state: artifact.state(),
                size_bytes: artifact.size_bytes,
                replicas: replicas.map(|replica| replica.volume_handle.parse().expect("a handle")).collect(),
                digest: artifact.digest.into(),
                kept_by: artifact.kept_by,
            };
            view.artifacts.insert(id, seen);
        }
        for volume in volumes {
            let parent = Some(&volume.parent_handle).filter(|parent| !parent.is_empty());
            let parent = parent.map(|parent| parent.parse().expect("a handle"));
            let artifact = Some(&volume.artifact_id).filter(|artifact| !artifact.is_empty());
            let artifact = artifact.map(|artifact| artifact.parse().expect("an id"));
            let seen = SeenVolume { state: volume.state(), parent, artifact };
            view.volumes.insert(volume.volume_handle.parse().expect("a handle"), seen);
        }
        for container in containers {
            let id = container.container_handle.parse().expect("a handle");
            view.containers.insert(id, container.state());
        }
        view
    }

    async fn artifacts(&self) -> Vec<pb::Artifact> {
        let page = |token: String| {
            self.ask(move |callers| {
                let request = pb::ListArtifactsRequest {
                    team: TEAM.to_owned(),
                    page_size: 1000,
                    page_token: token.clone(),
                    ..Default::default()
                };
                async move {
                    let page = callers.artifacts().list_artifacts(request).await?.into_inner();
                    Ok((page.artifacts, page.next_page_token))
                }
            })
        };
        all(page).await
    }

    async fn volumes(&self, worker: &str) -> Vec<pb::Volume> {
        let page = |token: String| {
            self.ask(move |callers| {
                let request = pb::ListVolumesRequest {
                    worker_id: worker.to_owned(),
                    page_size: 1000,
                    page_token: token.clone(),
                    ..Default::default()
                };
                async move {
                    let page = callers.inventory().list_volumes(request).await?.into_inner();
                    Ok((page.volumes, page.next_page_token))
                }
            })
        };
        all(page).await
    }

    async fn containers(&self, worker: &str) -> Vec<pb::Container> {
        let page = |token: String| {
            self.ask(move |callers| {
                let request = pb::ListContainersRequest {
                    worker_id: worker.to_owned(),
                    page_size: 1000,
                    page_token: token.clone(),
                    ..Default::default()
                };
                async move {
                    let page = callers.inventory().list_containers(request).await?.into_inner();
                    Ok((page.containers, page.next_page_token))
                }
            })
        };
        all(page).await
    }

    /// How many rows are left in tables in which none may be left when nothing is kept.
    pub(crate) async fn rows_left(&self) -> Vec<(String, i64)> {
        let database = sea_orm::Database::connect(&self.database.url).await.expect("the database answers");
        let backend = database.get_database_backend();
        let tables = match backend {
            DbBackend::Sqlite => "SELECT name FROM sqlite_master WHERE type = 'table'",
            _ => "SELECT tablename AS name FROM pg_tables WHERE schemaname = 'public'",
        };
        let mut left = Vec::new();
        let tables = database.query_all_raw(Statement::from_string(backend, tables)).await;
        for row in tables.expect("the tables") {
            let table: String = row.try_get("", "name").expect("a name");
            if LASTING.contains(&table.as_str()) {
                continue;
            }
            let count = Statement::from_string(backend, format!("SELECT COUNT(*) AS n FROM {table}"));
            let count = database.query_one_raw(count).await.expect("a count").expect("a row");
            let count: i64 = count.try_get("", "n").expect("a number");
            if count > 0 {
                left.push((table, count));
            }
        }
        database.close().await.expect("closed");
        left
    }
}

/// What replicas are started with. One of them collects all the time, the others when they are asked to.
fn settings(url: &str, clock: &Clock, index: u8) -> Config {
    let seconds = |seconds: i64| Duration::from_secs(seconds.unsigned_abs());
    let mut settings = Config {
        clock: clock.clone(),
        claim_term: seconds(CLAIM_TERM),
        unowned_ttl: seconds(UNOWNED_TTL),
        gc_grace: seconds(GC_GRACE),
        resource_cache_ttl: seconds(RESOURCE_CACHE_TTL),
        tombstone: seconds(30),
        // Longer than a list of operations takes; the end of each goes beyond it.
        remember: seconds(REMEMBER),
        sweep_interval: Duration::from_millis(50),
        ..config(url)
    };
    if index == 1 {
        settings.collect_interval = Duration::from_millis(250);
    }
    settings.database.connections = 6;
    settings
}

/// How long the store remembers what ended, in seconds.
pub(crate) const REMEMBER: i64 = 365 * 24 * 3600;

async fn shut_down(mut replica: Replica) {
    if let Some(runtime) = replica.runtime.take() {
        let ended = tokio::task::spawn_blocking(|| runtime.shutdown_timeout(PATIENCE));
        ended.await.expect("it ends");
    }
}

/// Removes a database of the server. One in a file goes with its directory.
async fn remove(url: &str) {
    let Some((server, name)) = url.rsplit_once('/').filter(|_| url.starts_with("postgres")) else { return };
    let admin = sea_orm::Database::connect(format!("{server}/postgres")).await.expect("the server answers");
    let removed = admin.execute_unprepared(&format!("DROP DATABASE {name} WITH (FORCE)")).await;
    removed.expect("removed");
    admin.close().await.expect("closed");
}

/// All pages.
async fn all<T, F>(page: impl Fn(String) -> F) -> Vec<T>
where
    F: Future<Output = Answer<(Vec<T>, String)>>,
{
    let (mut all, mut token) = (Vec::new(), String::new());
    loop {
        let (items, next) = page(token).await.expect("listed");
        all.extend(items);
        if next.is_empty() {
            return all;
        }
        token = next;
    }
}

fn done<T>(answer: Answer<T>) -> Outcome {
    match answer {
        Ok(_) => Outcome::Done,
        Err(refusal) => Outcome::Refused(refusal),
    }
}

fn refused(message: String) -> Outcome {
    let reason = Reason::Unavailable;
    let about = Default::default();
    Outcome::Refused(Refusal { code: reason.code(), reason: None, message, about })
}

fn build_request(build: u16, ends_with: u16, keep: i64, job: Option<(u8, u16)>) -> pb::PutBuildRequest {
    pb::PutBuildRequest {
        build_id: build_id(build).to_string(),
        team: TEAM.to_owned(),
        ends_with_workload: workload_id(ends_with).to_string(),
        keep: Some(rpc::duration(Duration::from_secs(keep.unsigned_abs()))),
        job: job.map(|(job, _)| format!("job {job}")).unwrap_or_default(),
        number: job.map(|(_, number)| number.into()).unwrap_or_default(),
        ..Default::default()
    }
}

async fn put_build(callers: Callers, request: pb::PutBuildRequest) -> Answer<()> {
    callers.owners().put_build(request).await?;
    Ok(())
}

fn build_status(status: Status) -> pb::BuildStatus {
    match status {
        Status::Succeeded => pb::BuildStatus::Succeeded,
        Status::Failed => pb::BuildStatus::Failed,
        Status::Errored => pb::BuildStatus::Errored,
        Status::Aborted => pb::BuildStatus::Aborted,
    }
}

async fn settle(
    callers: Callers,
    workload: u16,
    attempt: u8,
    status: Status,
    outputs: Outputs,
    build: Option<u16>,
) -> Answer<()> {
    let outputs = match outputs {
        Outputs::NoOutput => Vec::new(),
        Outputs::With(content) => vec![pb::SettledOutput {
            artifact_id: artifact_id(Artifact::Output(workload)).to_string(),
            digest: digest(content.into()).as_bytes().to_vec().into(),
            ..Default::default()
        }],
    };
    let mut request = pb::SettleRequest {
        holder_id: workload_id(workload).to_string(),
        team: TEAM.to_owned(),
        attempt_id: attempt_id(workload, attempt).to_string(),
        outputs,
        status: build_status(status).into(),
        ..Default::default()
    };
    request.build_id = build.map(|build| build_id(build).to_string()).unwrap_or_default();
    callers.pins().settle(request).await?;
    Ok(())
}
