//! The store under test: its replicas on one database, and the gateways of its workers.
//!
//! Each replica has its own runtime, so that it can be killed like a process: it stops at its next
//! await. A caller without an answer asks the other replicas until one answers, like all real
//! callers.

mod caches;
mod disposal;
mod gateways;
mod orphans;
mod owners;
mod shown;
mod trespass;

use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use artifact_store::{Clock, Config};
use rpc::pb::artifacts as pb;
use sea_orm::ConnectionTrait;
use testing::databases::TestDatabase;
use tokio::runtime::Runtime;
use uuid::Uuid;

use self::gateways::{Forgets, Marks, Reports};
use super::operations::{Artifact, EVERY_ATTEMPT, Operation, Owner, REPLICAS, Status, WORKERS};
use super::state::{
    Build, CLAIM_TERM, GC_GRACE, Outcome, RESOURCE_CACHE_TTL, State, UNOWNED_TTL, artifact_id, attempt_id,
    build_id, claim_id, digest_of, transfer_id, tree, worker_id, workload_id,
};
use crate::{Answer, Callers, Gateway, PATIENCE, TEAM, config, input, output, receipt_key};

/// A process of the store that can be killed.
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
            let served = artifact_store::serve(
                config,
                server::Listener::InsecureTcp(listener),
                std::future::pending(),
            )
            .await;
            // Its callers wait in vain, and report that.
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

/// Gateway session of a worker.
#[derive(Clone)]
struct Speaker {
    gateway: Gateway,
    incarnation: u64,
    session: u64,
    former: Option<Gateway>,
}

pub(crate) struct World {
    database: TestDatabase,
    clock: Clock,
    replicas: Mutex<Vec<Replica>>,
    turn: AtomicUsize,
    speakers: Mutex<Vec<Speaker>>,
    marks: Vec<tokio::sync::Mutex<Marks>>,
    reports: Vec<tokio::sync::Mutex<Reports>>,
    /// Number of times that each worker was forgotten. One at a time.
    forgets: Vec<Mutex<Forgets>>,
    forgetting: tokio::sync::Mutex<()>,
    life: Mutex<String>,
    receipt_key: [u8; 32],
    /// Advance of the clock over the model.
    ahead: Mutex<Duration>,
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
        let mut world = Self {
            receipt_key: [0; 32],
            database,
            clock,
            replicas: Mutex::new(replicas),
            turn: AtomicUsize::new(0),
            speakers: Mutex::new((0..WORKERS).map(speaker).collect()),
            marks: (0..WORKERS).map(|_| Default::default()).collect(),
            reports: (0..WORKERS).map(|_| Default::default()).collect(),
            forgets: (0..WORKERS).map(|_| Default::default()).collect(),
            forgetting: tokio::sync::Mutex::default(),
            life: Mutex::default(),
            ahead: Mutex::default(),
        };
        for worker in 0..WORKERS {
            let gateway = &world.speaker(worker).gateway;
            let begin = |callers: Callers| async move { gateway.by_way_of(&callers).begin_report().await };
            let token = world.ask(begin).await.expect("a new worker may speak");
            *world.life.lock().unwrap_or_else(PoisonError::into_inner) = token.store_life;
        }
        world.receipt_key = receipt_key(&world.database.url).await;
        world
    }

    /// Stops everything, and removes the database.
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
            // On the heap, because the future of a call is larger than all others.
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

    /// Applies one operation. `state` is the model before it.
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
            O::CreateAll { .. } | O::AddOwner { .. } | O::RemoveOwner { .. } => {
                Box::pin(self.perform_on_owners(operation)).await
            }
            O::HandOver { upload, owner, content } => {
                let request = || pb::CreateArtifactRequest {
                    artifact_id: artifact_id(Artifact::Upload(upload)).to_string(),
                    team: TEAM.to_owned(),
                    build_id: owner.map(|build| build_id(build).to_string()).unwrap_or_default(),
                    label: String::new(),
                    tree: Some(tree(content)),
                };
                let create = |callers: Callers| async move {
                    Ok(callers.artifacts().create_artifact(request()).await.map(drop)?)
                };
                done(self.ask(create).await)
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
                let digest = digest_of(content);
                done(self.ask(|callers| async move { callers.seal(artifact, digest).await }).await)
            }
            O::Adopt { content, owner } => {
                let (digest, owner) = (digest_of(content), owner.map(build_id));
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
                    reason: "it is in the way".to_owned(),
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
            | O::DeleteTask { .. }
            | O::PutBase { .. }
            | O::UseTasks { .. } => Box::pin(self.perform_on_caches(state, operation)).await,
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
            O::Fail { .. } | O::MarkContainer { .. } | O::MarkVolume { .. } => {
                Box::pin(self.dispose(state, operation)).await
            }
            O::Accept { workload, ref pins, build } => {
                let pins: Vec<_> = pins.iter().map(|artifact| artifact_id(*artifact)).collect();
                let (pins, workload, build) = (&pins, workload_id(workload), build.map(build_id));
                done(self.ask(|callers| async move { callers.pin(workload, pins, build).await }).await)
            }
            O::Prepare { workload, attempt, worker, .. } => {
                let inputs = (state.pins_of(workload), state.caches_of(workload));
                self.prepare(inputs, workload, attempt, worker).await
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
            O::Settle { workload, attempt, status, ref outputs, build } => {
                let candidate = outputs.candidate();
                let owners = candidate.map(|(_, owners)| owners).unwrap_or_default();
                let said: Vec<_> = owners.iter().map(|owner| output_owner(state, *owner)).collect();
                let output = |(content, _): (u8, &[Owner])| pb::SettledOutput {
                    artifact_id: artifact_id(Artifact::Output(workload)).to_string(),
                    digest: digest_of(content).as_bytes().to_vec().into(),
                    owners: said.clone(),
                    ..Default::default()
                };
                let request = pb::SettleRequest {
                    holder_id: workload_id(workload).to_string(),
                    attempt_id: match attempt {
                        EVERY_ATTEMPT => String::new(),
                        _ => attempt_id(workload, attempt).to_string(),
                    },
                    outputs: candidate.map(output).into_iter().collect(),
                    status: build_status(status).into(),
                    build_id: build.map(|build| build_id(build).to_string()).unwrap_or_default(),
                    ..Default::default()
                };
                let settled = self.ask(|callers| settle(callers, request.clone())).await;
                let missing = |missing: Vec<pb::OutputOwner>| {
                    let is_missing = |(_, said): &(_, &_)| missing.contains(said);
                    owners.iter().zip(&said).filter(is_missing).map(|(owner, _)| *owner).collect()
                };
                settled.map_or_else(Outcome::Refused, |(them, differs)| Outcome::Settled {
                    missing: missing(them),
                    differs,
                })
            }
            O::EndAttempt { workload, attempt } => {
                let (workload, attempt) = (workload_id(workload), attempt_id(workload, attempt));
                done(self.ask(|callers| async move { callers.end_attempt(workload, attempt).await }).await)
            }
            O::Collect => {
                let collect = |callers: Callers| async move {
                    let mut collector = pb::collector_client::CollectorClient::new(callers.peer);
                    let request = pb::CollectRequest {
                        dry_run: pb::DryRun::Off.into(),
                        ..pb::CollectRequest::default()
                    };
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
            O::NewSession { worker } => self.start_session(worker, 0, 1).await,
            O::NewIncarnation { worker, .. } => self.start_session(worker, 1, 0).await,
            O::Trespass(tried) => Box::pin(self.trespass(state, tried)).await,
            O::Stray { .. }
            | O::NewLife { .. }
            | O::Describe { .. }
            | O::AdoptOrphan { .. }
            | O::PurgeOrphan { .. } => Box::pin(self.perform_on_orphans(state, operation)).await,
            O::ForgetWorker { worker, force } => self.forget_worker(worker, force).await,
            O::Former { worker } => self.former(worker).await,
            O::Advance { seconds } => {
                self.advance(Duration::from_secs(seconds.into()));
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

    async fn prepare(
        &self,
        (inputs, caches): (Vec<Artifact>, Vec<(u8, Uuid)>),
        workload: u16,
        attempt: u8,
        worker: u8,
    ) -> Outcome {
        let mut needs: Vec<_> = inputs
            .iter()
            .map(|artifact| artifact_id(*artifact))
            .map(|artifact| input(&artifact.to_string(), artifact))
            .collect();
        let mut out = output("out", artifact_id(Artifact::Output(workload)));
        out.from_artifact_id =
            inputs.first().map(|artifact| artifact_id(*artifact).to_string()).unwrap_or_default();
        needs.push(out);
        needs.extend(caches.iter().map(|(task, id)| pb::PrepareVolume {
            name: format!("cache {task}"),
            purpose: pb::VolumePurpose::Scratch.into(),
            from_task_cache_id: id.to_string(),
            ..Default::default()
        }));
        let (gateway, needs) = (&self.speaker(worker).gateway, &needs);
        let (workload, attempt) = (workload_id(workload), attempt_id(workload, attempt));
        let prepare = |callers: Callers| async move {
            gateway.by_way_of(&callers).prepare(workload, attempt, needs).await
        };
        let planned = self.ask(prepare).await;
        planned.map_or_else(Outcome::Refused, |planned| Outcome::Prepared { inputs, caches, planned })
    }

    async fn complete(&self, worker: u8, handle: Uuid, content: u8) -> Outcome {
        let gateway = &self.speaker(worker).gateway;
        let complete = |callers: Callers| async move {
            gateway.by_way_of(&callers).complete(&handle.to_string(), digest_of(content)).await
        };
        done(self.ask(complete).await)
    }

    /// Advances the clock to the model's time.
    fn advance(&self, by: Duration) {
        let mut ahead = self.ahead.lock().unwrap_or_else(PoisonError::into_inner);
        self.clock.advance(by.saturating_sub(*ahead));
        *ahead = ahead.saturating_sub(by);
    }

    /// Returns whether the clock is ahead of the model by the permitted maximum.
    pub(crate) fn is_ahead(&self) -> bool {
        *self.ahead.lock().unwrap_or_else(PoisonError::into_inner) > MAX_AHEAD
    }

    /// Advances the clock by much less than the model's resolution. Returns the new time in
    /// microseconds.
    fn tick(&self) -> i64 {
        let mut ahead = self.ahead.lock().unwrap_or_else(PoisonError::into_inner);
        self.clock.advance(TICK);
        *ahead += TICK;
        self.clock.now().0
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
}

/// Returns the settings of a replica. One replica collects all the time, the others on request.
fn settings(url: &str, clock: &Clock, index: u8) -> Config {
    let seconds = |seconds: i64| Duration::from_secs(seconds.unsigned_abs());
    let mut settings = Config {
        clock: clock.clone(),
        claim_term: seconds(CLAIM_TERM),
        unowned_ttl: seconds(UNOWNED_TTL),
        gc_grace: seconds(GC_GRACE),
        resource_cache_ttl: seconds(RESOURCE_CACHE_TTL),
        tombstone: seconds(30),
        // Longer than a list of operations takes. The end of each list exceeds it.
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

/// Longer, in microseconds, than the sequence of a worker can rise meanwhile.
const TICK: Duration = Duration::from_millis(10);

/// Maximum advance of the clock over the model, so that nothing ends too early by the model's
/// seconds.
const MAX_AHEAD: Duration = Duration::from_millis(500);

/// Time for which the store remembers ended items, in seconds.
pub(crate) const REMEMBER: i64 = 365 * 24 * 3600;

async fn shut_down(mut replica: Replica) {
    if let Some(runtime) = replica.runtime.take() {
        let ended = tokio::task::spawn_blocking(|| runtime.shutdown_timeout(PATIENCE));
        ended.await.expect("it ends");
    }
}

/// Removes a database of the server. A database file is removed with its directory.
async fn remove(url: &str) {
    let Some((server, name)) = url.rsplit_once('/').filter(|_| url.starts_with("postgres")) else { return };
    let admin = sea_orm::Database::connect(format!("{server}/postgres")).await.expect("the server answers");
    let removed = admin.execute_unprepared(&format!("DROP DATABASE {name} WITH (FORCE)")).await;
    removed.expect("removed");
    admin.close().await.expect("closed");
}

fn done<T>(answer: Answer<T>) -> Outcome {
    match answer {
        Ok(_) => Outcome::Done,
        Err(refusal) => Outcome::Refused(refusal),
    }
}

fn build_request(build: u16, ends_with: u16, keep: i64, job: Option<(u8, u16)>) -> pb::PutBuildRequest {
    pb::PutBuildRequest {
        build_id: build_id(build).to_string(),
        team: TEAM.to_owned(),
        ends_with_workload_id: workload_id(ends_with).to_string(),
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

/// Returns the missing owners, and whether another settlement came before.
async fn settle(callers: Callers, mut request: pb::SettleRequest) -> Answer<(Vec<pb::OutputOwner>, bool)> {
    request.team = TEAM.to_owned();
    let settled = callers.pins().settle(request).await?.into_inner();
    let missing = settled.missing.into_iter().map(|missing| missing.owner.expect("an owner"));
    Ok((missing.collect(), settled.differs))
}

/// Returns the owner of an output for a request. A task cache that was never requested has none.
fn output_owner(state: &State, owner: Owner) -> pb::OutputOwner {
    use pb::output_owner::Owner as Said;
    let said = match owner {
        Owner::ForBuild(build) => Said::BuildId(build_id(build).to_string()),
        Owner::ForTask(task) => Said::TaskCacheId(
            state.task_cache(task).unwrap_or_else(|| Uuid::from_u128(task.into())).to_string(),
        ),
        Owner::UnderClaim(claim) => Said::ResourceCacheClaimId(claim_id(claim).to_string()),
    };
    pb::OutputOwner { owner: Some(said) }
}
