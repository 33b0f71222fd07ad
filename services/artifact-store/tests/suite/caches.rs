//! Caches: makers, access of teams, contents and lifetimes.

mod every_owner;
mod mounted;
mod resource;
mod room;
mod settled;
mod task;
mod trust;

use std::time::Duration;

use domain::{ArtifactId, BuildId, ClaimId, TransferId, WorkerId, WorkloadId};
use rpc::pb::artifacts as pb;
use rpc::pb::artifacts::ArtifactState;
use rpc::pb::artifacts::find_or_create_resource_cache_response::Outcome;

use crate::{Answer, Gateway, Suite, digest};

const OTHER: &str = "other";
const HOUR: Duration = Duration::from_secs(3600);

fn key(content: u64) -> Vec<u8> {
    digest(content).as_bytes().to_vec()
}

fn by_build(build: BuildId) -> pb::CacheUser {
    pb::CacheUser { user: Some(pb::cache_user::User::BuildId(build.to_string())) }
}

fn by_workload(workload: WorkloadId) -> pb::CacheUser {
    pb::CacheUser { user: Some(pb::cache_user::User::WorkloadId(workload.to_string())) }
}

/// A caller that acts for a team.
#[derive(Clone, Copy)]
struct Caller<'a> {
    suite: &'a Suite,
    team: &'a str,
    sharing: pb::Sharing,
}

impl<'a> Caller<'a> {
    fn of(suite: &'a Suite, team: &'a str) -> Self {
        Self { suite, team, sharing: pb::Sharing::Unspecified }
    }

    fn sharing(self) -> Self {
        Self { sharing: pb::Sharing::AllTeams, ..self }
    }

    /// Requests a cache. Returns its id and the outcome.
    async fn ask(
        &self,
        content: u64,
        claim: ClaimId,
        user: Option<pb::CacheUser>,
    ) -> Answer<(String, Outcome)> {
        let request = pb::FindOrCreateResourceCacheRequest {
            team: self.team.to_owned(),
            key_digest: key(content).into(),
            sharing: self.sharing.into(),
            claim_id: claim.to_string(),
            r#type: "git".to_owned(),
            version: format!("v{content}"),
            params: String::new(),
            user,
        };
        let answer = self.suite.caches().find_or_create_resource_cache(request).await?.into_inner();
        Ok((answer.cache_id, answer.outcome.expect("an outcome")))
    }

    /// Returns the location of a cache that is ready.
    async fn ready(&self, content: u64, user: Option<pb::CacheUser>) -> Option<pb::Location> {
        match self.ask(content, ClaimId::new(), user).await.expect("asked").1 {
            Outcome::Ready(location) => Some(location),
            Outcome::Claimed(_) | Outcome::InProgress(_) => None,
        }
    }

    async fn renew(&self, claim: ClaimId) -> Answer<()> {
        let request =
            pb::RenewResourceCacheRequest { team: self.team.to_owned(), claim_id: claim.to_string() };
        self.suite.caches().renew_resource_cache(request).await?;
        Ok(())
    }

    async fn put(&self, claim: ClaimId, artifact: ArtifactId) -> Answer<String> {
        let request = pb::PutResourceCacheRequest {
            team: self.team.to_owned(),
            claim_id: claim.to_string(),
            artifact_id: artifact.to_string(),
        };
        Ok(self.suite.caches().put_resource_cache(request).await?.into_inner().cache_id)
    }

    /// Makes a cache ready.
    async fn make(&self, content: u64, artifact: ArtifactId) -> String {
        let claim = ClaimId::new();
        let (cache, outcome) = self.ask(content, claim, None).await.expect("asked");
        assert!(matches!(outcome, Outcome::Claimed(_)), "{outcome:?}");
        assert_eq!(self.put(claim, artifact).await.expect("put"), cache);
        cache
    }

    async fn use_it(&self, cache: &str, user: pb::CacheUser) -> Answer<()> {
        let request = pb::UseResourceCacheRequest {
            team: self.team.to_owned(),
            cache_id: cache.to_owned(),
            user: Some(user),
        };
        self.suite.caches().use_resource_cache(request).await?;
        Ok(())
    }

    async fn release(&self, cache: &str, user: pb::CacheUser) -> Answer<()> {
        let request = pb::ReleaseResourceCacheRequest {
            team: self.team.to_owned(),
            cache_id: cache.to_owned(),
            user: Some(user),
        };
        self.suite.caches().release_resource_cache(request).await?;
        Ok(())
    }

    async fn delete(&self, cache: &str) -> Answer<()> {
        let request =
            pb::DeleteResourceCacheRequest { team: self.team.to_owned(), cache_id: cache.to_owned() };
        self.suite.caches().delete_resource_cache(request).await?;
        Ok(())
    }

    async fn listed(&self) -> Vec<pb::ResourceCache> {
        let request = pb::ListResourceCachesRequest { team: self.team.to_owned(), ..Default::default() };
        self.suite.caches().list_resource_caches(request).await.expect("listed").into_inner().caches
    }

    /// Returns located caches, with their artifacts.
    async fn located(&self, caches: &[&str]) -> Vec<(String, String)> {
        let request = pb::LocateCachesRequest {
            team: self.team.to_owned(),
            cache_ids: caches.iter().map(ToString::to_string).collect(),
        };
        let answer = self.suite.caches().locate_caches(request).await.expect("located").into_inner();
        let of = |location: pb::CacheLocation| {
            let found = location.location.expect("where it is");
            assert_eq!(found.replicas.len(), 1);
            (location.cache_id, found.artifact_id)
        };
        answer.locations.into_iter().map(of).collect()
    }

    /// Returns the number of replicas that the team sees of an artifact.
    async fn locates(&self, artifact: ArtifactId) -> usize {
        let request =
            pb::LocateRequest { team: self.team.to_owned(), artifact_ids: vec![artifact.to_string()] };
        let located = self.suite.artifacts().locate(request).await.expect("located").into_inner();
        located.locations.iter().map(|location| location.replicas.len()).sum()
    }

    async fn pin(&self, workload: WorkloadId, artifact: ArtifactId) -> Answer<()> {
        let request = pb::PinRequest {
            holder_id: workload.to_string(),
            team: self.team.to_owned(),
            artifact_ids: vec![artifact.to_string()],
            build_id: String::new(),
            task_cache_ids: Vec::new(),
        };
        self.suite.pins().pin(request).await?;
        Ok(())
    }

    async fn plan(&self, artifact: ArtifactId, worker: WorkerId) -> Answer<()> {
        let request = pb::PlanReplicaRequest {
            team: self.team.to_owned(),
            artifact_id: artifact.to_string(),
            worker_id: worker.to_string(),
            transfer_id: TransferId::new().to_string(),
        };
        self.suite.replicas().plan_replica(request).await?;
        Ok(())
    }

    /// Finds or creates a task cache. Returns its id and artifact.
    async fn task(
        &self,
        job: &str,
        path: &str,
        ttl: Option<Duration>,
    ) -> Answer<(String, Option<pb::Location>)> {
        self.task_of_step(job, "build", path, ttl).await
    }

    async fn task_of_step(
        &self,
        job: &str,
        step: &str,
        path: &str,
        ttl: Option<Duration>,
    ) -> Answer<(String, Option<pb::Location>)> {
        let request = pb::FindOrCreateTaskCacheRequest {
            team: self.team.to_owned(),
            job: job.to_owned(),
            step: step.to_owned(),
            path: path.to_owned(),
            ttl: ttl.map(rpc::duration),
        };
        let answer = self.suite.caches().find_or_create_task_cache(request).await?.into_inner();
        Ok((answer.cache_id, answer.location))
    }

    async fn publish(&self, cache: &str, artifact: ArtifactId) -> Answer<()> {
        let request = pb::PublishTaskCacheRequest {
            team: self.team.to_owned(),
            cache_id: cache.to_owned(),
            artifact_id: artifact.to_string(),
        };
        self.suite.caches().publish_task_cache(request).await?;
        Ok(())
    }

    async fn delete_tasks(&self, which: pb::DeleteTaskCachesRequest) -> Answer<u64> {
        let request = pb::DeleteTaskCachesRequest { team: self.team.to_owned(), ..which };
        Ok(self.suite.caches().delete_task_caches(request).await?.into_inner().deleted)
    }

    async fn put_type(&self, version: &str, worker: Option<WorkerId>, artifact: ArtifactId) -> Answer<()> {
        let request = pb::PutBaseResourceTypeRequest {
            team: self.team.to_owned(),
            r#type: "git".to_owned(),
            version: version.to_owned(),
            worker_id: worker.map(|worker| worker.to_string()).unwrap_or_default(),
            artifact_id: artifact.to_string(),
        };
        self.suite.caches().put_base_resource_type(request).await?;
        Ok(())
    }

    async fn put_certs(&self, worker: WorkerId, artifact: ArtifactId) -> Answer<()> {
        let request = pb::PutResourceCertsRequest {
            team: self.team.to_owned(),
            worker_id: worker.to_string(),
            artifact_id: artifact.to_string(),
        };
        self.suite.caches().put_resource_certs(request).await?;
        Ok(())
    }
}

impl Suite {
    /// Uploads an artifact without an owner.
    async fn uploaded(&self, gateway: &Gateway, content: u64) -> ArtifactId {
        self.upload(gateway, None, content).await.expect("uploaded").0
    }

    pub(crate) async fn state(&self, artifact: ArtifactId) -> ArtifactState {
        self.get(artifact).await.expect("it is there, or its tombstone").state()
    }

    async fn kept_by(&self, artifact: ArtifactId) -> Vec<String> {
        self.get(artifact).await.expect("it is there").kept_by
    }
}
