//! Invalid requests about caches.

use domain::{CacheId, ClaimId};

use super::*;

/// Maximum lengths of the name of a job, step or type, of a path, and of a text for people, in
/// bytes.
const NAME: usize = 1024;
const PATH: usize = 4096;
const TEXT: usize = 65_536;

/// Ten years, in seconds.
const LONGEST_TTL: i64 = 10 * 366 * 24 * 3600;

/// Caches in the store: two of each kind, so that lists have several pages.
pub(super) struct Caches {
    /// Sealed, and usable by every team.
    artifact: ArtifactId,
    /// Ready and unused.
    ready: String,
    ready_claim: ClaimId,
    /// Being made.
    claim: ClaimId,
    /// Used by a workload.
    used: String,
    task: String,
    foreign: String,
    foreign_task: String,
}

fn asked(team: &str, key: u64, claim: ClaimId) -> pb::FindOrCreateResourceCacheRequest {
    pb::FindOrCreateResourceCacheRequest {
        team: team.to_owned(),
        key_digest: digest(key).as_bytes().to_vec().into(),
        claim_id: claim.to_string(),
        ..Default::default()
    }
}

fn task_asked(team: &str, path: &str) -> pb::FindOrCreateTaskCacheRequest {
    pb::FindOrCreateTaskCacheRequest {
        team: team.to_owned(),
        job: "job".to_owned(),
        step: "step".to_owned(),
        path: path.to_owned(),
        ttl: Some(rpc::duration(Duration::from_secs(600))),
    }
}

fn used_by_build(build: BuildId) -> Option<pb::CacheUser> {
    Some(pb::CacheUser { user: Some(pb::cache_user::User::BuildId(build.to_string())) })
}

fn used_by_workload(workload: WorkloadId) -> Option<pb::CacheUser> {
    Some(pb::CacheUser { user: Some(pb::cache_user::User::WorkloadId(workload.to_string())) })
}

impl Caches {
    pub(super) async fn new(world: &World<'_>) -> Self {
        let suite = world.suite;
        let (artifact, _) = suite.upload(&world.here, Some(world.build), 6).await.expect("uploaded");
        let ask = async |request| {
            let answer = suite.caches().find_or_create_resource_cache(request).await.expect("asked");
            answer.into_inner().cache_id
        };
        let ready_claim = ClaimId::new();
        let ready = ask(asked(TEAM, 20, ready_claim)).await;
        let put = pb::PutResourceCacheRequest {
            team: TEAM.to_owned(),
            claim_id: ready_claim.to_string(),
            artifact_id: world.sealed.to_string(),
        };
        suite.caches().put_resource_cache(put).await.expect("put");
        let claim = ClaimId::new();
        ask(asked(TEAM, 21, claim)).await;
        let user = used_by_workload(world.workload);
        let used =
            ask(pb::FindOrCreateResourceCacheRequest { user, ..asked(TEAM, 22, ClaimId::new()) }).await;
        let foreign = ask(asked(OTHER, 23, ClaimId::new())).await;

        let ask = async |request| {
            let answer = suite.caches().find_or_create_task_cache(request).await.expect("asked");
            answer.into_inner().cache_id
        };
        let task = ask(task_asked(TEAM, "path")).await;
        ask(task_asked(TEAM, "another path")).await;
        let foreign_task = ask(task_asked(OTHER, "path")).await;
        for worker in [world.here.worker, world.there.worker] {
            let put = pb::PutBaseResourceTypeRequest {
                team: TEAM.to_owned(),
                r#type: "git".to_owned(),
                version: String::new(),
                worker_id: worker.to_string(),
                // From now on every team may use it.
                artifact_id: artifact.to_string(),
            };
            suite.caches().put_base_resource_type(put).await.expect("put");
            let put = pb::PutResourceCertsRequest {
                team: TEAM.to_owned(),
                worker_id: worker.to_string(),
                // From now on every team may use it.
                artifact_id: artifact.to_string(),
            };
            suite.caches().put_resource_certs(put).await.expect("put");
        }
        Self { artifact, ready, ready_claim, claim, used, task, foreign, foreign_task }
    }
}

/// Returns invalid users of a cache.
fn user(world: &World<'_>) -> Vec<Bad> {
    [
        id("user.build_id"),
        but("user.build_id", "unknown", BuildId::new(), OwnerEnded),
        but("user.build_id", "of another team", world.foreign_build, OwnerEnded),
        id("user.workload_id"),
        but("user.workload_id", "settled", world.settled, HolderSettled),
        invalid("user.workload_id", "of another team", text(world.foreign_workload), "team"),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// Returns invalid artifacts for a cache.
fn owned(world: &World<'_>) -> Vec<Bad> {
    [
        id("artifact_id"),
        but("artifact_id", "unknown", ArtifactId::new(), ArtifactNotFound),
        but("artifact_id", "of another team", world.foreign_artifact, ArtifactNotFound),
        but("artifact_id", "not sealed", world.open, ArtifactNotFound),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// Returns ids of caches that are not available to the caller.
fn no_cache(others: [(&str, &str); 2]) -> Vec<Bad> {
    let mut bad = id("cache_id");
    bad.extend(but("cache_id", "unknown", CacheId::new(), CacheNotFound));
    for (what, cache) in others {
        bad.extend(but("cache_id", what, cache, CacheNotFound));
    }
    bad
}

pub(super) fn calls(world: &World<'_>, caches: &Caches) -> Vec<Call> {
    let mut calls = resource_caches(world, caches);
    calls.extend(task_caches(world, caches));
    calls.extend(base_types(world, caches));
    calls
}

fn resource_caches(world: &World<'_>, caches: &Caches) -> Vec<Call> {
    let ask = pb::FindOrCreateResourceCacheRequest {
        r#type: "x".repeat(NAME),
        version: "x".repeat(TEXT),
        params: "x".repeat(TEXT),
        user: used_by_build(world.build),
        ..asked(TEAM, 24, ClaimId::new())
    };
    let renew = pb::RenewResourceCacheRequest { team: TEAM.to_owned(), claim_id: caches.claim.to_string() };
    let put = pb::PutResourceCacheRequest {
        team: TEAM.to_owned(),
        claim_id: caches.claim.to_string(),
        artifact_id: caches.artifact.to_string(),
    };
    let (cache_id, user_of) = (caches.ready.clone(), used_by_build(world.build));
    let use_it = pb::UseResourceCacheRequest { team: TEAM.to_owned(), cache_id, user: user_of };
    let release = pb::ReleaseResourceCacheRequest {
        team: TEAM.to_owned(),
        cache_id: caches.ready.clone(),
        user: used_by_build(world.build),
    };
    let delete = pb::DeleteResourceCacheRequest { team: TEAM.to_owned(), cache_id: caches.ready.clone() };
    let of_others = || [("of another team", &*caches.foreign), ("of a task", &*caches.task)];
    vec![
        Call::new(
            "Caches.FindOrCreateResourceCache",
            [ask],
            [
                team("team"),
                but("team", "that does not have the build", OTHER, OwnerEnded),
                digests("key_digest"),
                filter("sharing"),
                id("claim_id"),
                invalid("claim_id", "of another cache", text(caches.ready_claim), "claim_id"),
                longest("type", NAME),
                longest("version", TEXT),
                longest("params", TEXT),
                user(world),
            ],
        ),
        Call::new(
            "Caches.RenewResourceCache",
            [renew],
            [
                team("team"),
                but("team", "that does not have it", OTHER, ClaimLost),
                id("claim_id"),
                but("claim_id", "unknown", ClaimId::new(), ClaimLost),
            ],
        ),
        Call::new(
            "Caches.PutResourceCache",
            [put],
            [
                team("team"),
                but("team", "that does not have it", OTHER, ClaimLost),
                id("claim_id"),
                but("claim_id", "unknown", ClaimId::new(), ClaimLost),
                but("claim_id", "of what was made", caches.ready_claim, ClaimLost),
                owned(world),
            ],
        ),
        Call::new(
            "Caches.UseResourceCache",
            [use_it],
            [
                team("team"),
                but("team", "that does not have the build", OTHER, OwnerEnded),
                no_cache(of_others()),
                vec![cleared("user", "user")],
                user(world),
            ],
        ),
        Call::new(
            "Caches.ReleaseResourceCache",
            [release],
            [
                team("team"),
                nothing("team", "that does not have it", text(OTHER)),
                id("cache_id"),
                nothing("cache_id", "unknown", text(CacheId::new())),
                nothing("cache_id", "of another team", text(&caches.foreign)),
                vec![cleared("user", "user")],
                id("user.build_id"),
                nothing("user.build_id", "that does not use it", text(world.doomed_build)),
                nothing("user.build_id", "unknown", text(BuildId::new())),
                id("user.workload_id"),
                nothing("user.workload_id", "that does not use it", text(world.workload)),
            ],
        ),
        Call::new(
            "Caches.DeleteResourceCache",
            [delete],
            [
                team("team"),
                but("team", "that does not have it", OTHER, CacheNotFound),
                no_cache(of_others()),
                but("cache_id", "that is used", &caches.used, CacheInUse),
            ],
        ),
    ]
}

fn task_caches(world: &World<'_>, caches: &Caches) -> Vec<Call> {
    let publish = pb::PublishTaskCacheRequest {
        team: TEAM.to_owned(),
        cache_id: caches.task.clone(),
        artifact_id: caches.artifact.to_string(),
    };
    let locate = pb::LocateCachesRequest { team: TEAM.to_owned(), cache_ids: vec![caches.task.clone()] };
    let delete = pb::DeleteTaskCachesRequest {
        team: TEAM.to_owned(),
        cache_id: String::new(),
        job: "job".to_owned(),
        step: "step".to_owned(),
        path: "path".to_owned(),
    };
    vec![
        Call::new(
            "Caches.FindOrCreateTaskCache",
            [task_asked(TEAM, &"x".repeat(PATH))],
            [
                team("team"),
                named("job", NAME),
                named("step", NAME),
                named("path", PATH),
                seconds("ttl", LONGEST_TTL),
                vec![time("ttl", 0, 0, refused("ttl"))],
            ],
        ),
        Call::new(
            "Caches.PublishTaskCache",
            [publish],
            [
                team("team"),
                but("team", "that does not have it", OTHER, CacheNotFound),
                no_cache([("of another team", &caches.foreign_task), ("of a resource", &caches.used)]),
                owned(world),
            ],
        ),
        Call::new(
            "Caches.LocateCaches",
            [locate],
            [
                team("team"),
                nothing("team", "that does not have them", text(OTHER)),
                ids("cache_ids"),
                nothing("cache_ids", "unknown", text(CacheId::new())),
                nothing("cache_ids", "of another team", text(&caches.foreign)),
            ],
        ),
        Call::new(
            "Caches.DeleteTaskCaches",
            [delete],
            [
                team("team"),
                nothing("team", "that does not have it: its own has another step", text("third")),
                optional_id("cache_id"),
                nothing("cache_id", "unknown", text(CacheId::new())),
                nothing("cache_id", "of another team", text(&caches.foreign_task)),
                nothing("cache_id", "of a resource", text(&caches.used)),
                named("job", NAME),
                nothing("job", "unknown", text("another job")),
                longest("step", NAME),
                nothing("step", "unknown", text("another step")),
                longest("path", PATH),
                nothing("path", "unknown", text("no such path")),
            ],
        ),
    ]
}

fn base_types(world: &World<'_>, caches: &Caches) -> Vec<Call> {
    let put_type = pb::PutBaseResourceTypeRequest {
        team: TEAM.to_owned(),
        r#type: "x".repeat(NAME),
        version: "x".repeat(TEXT),
        worker_id: world.here.worker.to_string(),
        artifact_id: caches.artifact.to_string(),
    };
    let put_certs = pb::PutResourceCertsRequest {
        team: TEAM.to_owned(),
        worker_id: world.here.worker.to_string(),
        artifact_id: caches.artifact.to_string(),
    };
    vec![
        Call::new(
            "Caches.PutBaseResourceType",
            [put_type],
            [
                team("team"),
                but("team", "that does not have it", OTHER, ArtifactNotFound),
                named("type", NAME),
                longest("version", TEXT),
                optional_id("worker_id"),
                owned(world),
            ],
        ),
        Call::new(
            "Caches.PutResourceCerts",
            [put_certs],
            [
                team("team"),
                but("team", "that does not have it", OTHER, ArtifactNotFound),
                id("worker_id"),
                owned(world),
            ],
        ),
    ]
}

/// Returns the next page token of each list of caches.
pub(super) async fn first_pages(suite: &Suite) -> [String; 4] {
    let (team, page_size) = (TEAM.to_owned(), 1);
    let resources = pb::ListResourceCachesRequest { team: team.clone(), page_size, ..Default::default() };
    let tasks = pb::ListTaskCachesRequest { team, page_size, ..Default::default() };
    let types = pb::ListBaseResourceTypesRequest { page_size, ..Default::default() };
    let certs = pb::ListResourceCertsRequest { page_size, ..Default::default() };
    let mut caches = suite.caches();
    [
        caches.list_resource_caches(resources).await.expect("a page").into_inner().next_page_token,
        caches.list_task_caches(tasks).await.expect("a page").into_inner().next_page_token,
        caches.list_base_resource_types(types).await.expect("a page").into_inner().next_page_token,
        caches.list_resource_certs(certs).await.expect("a page").into_inner().next_page_token,
    ]
}

/// Returns the calls that list caches. From `first` on they have several pages, and `page` returns
/// the invalid pages.
pub(super) fn lists(tokens: &[String], first: usize, page: impl Fn(usize) -> Vec<Bad>) -> Vec<Call> {
    let (team_of, page_size) = (TEAM.to_owned(), 1);
    let token = |index: usize| tokens[first + index].clone();
    let resources = pb::ListResourceCachesRequest { team: team_of.clone(), page_size, page_token: token(0) };
    let tasks =
        pb::ListTaskCachesRequest { team: team_of, page_size, page_token: token(1), ..Default::default() };
    let types = pb::ListBaseResourceTypesRequest { page_size, page_token: token(2), ..Default::default() };
    let certs = pb::ListResourceCertsRequest { page_size, page_token: token(3) };
    let of_another = |field, value| but(field, "that the token is not of", value, InvalidPageToken);
    vec![
        Call::new(
            "Caches.ListResourceCaches",
            [resources],
            [team("team"), of_another("team", OTHER), page(first)],
        ),
        Call::new(
            "Caches.ListTaskCaches",
            [tasks],
            [
                team("team"),
                of_another("team", OTHER),
                longest("job", NAME),
                of_another("job", "another job"),
                page(first + 1),
            ],
        ),
        Call::new(
            "Caches.ListBaseResourceTypes",
            [types],
            [
                longest("type", NAME),
                of_another("type", "another type"),
                change(
                    "cluster_wide",
                    "that the token is not of",
                    Value::Bool(true),
                    Expected::Refused(InvalidPageToken, String::new()),
                ),
                page(first + 2),
            ],
        ),
        Call::new("Caches.ListResourceCerts", [certs], [page(first + 3)]),
    ]
}
