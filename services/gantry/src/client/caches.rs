//! Caches of `gantry run`.
//!
//! The name of a cache is unique within a team, and does not depend on the path in the container.
//! The artifact store records it as the step of the job [`JOB`].

use std::os::unix::ffi::OsStrExt;

use bytes::Bytes;
use futures::future::try_join_all;
use futures::{Stream, TryStreamExt};
use rpc::pb::artifacts::{FindOrCreateTaskCacheRequest, ListTaskCachesRequest, TaskCache};
use rpc::pb::scheduler::CacheMount;

use crate::cli::values::CacheArg;
use crate::client::connect::{Connection, Service};
use crate::client::queries::pages;

/// Job of the task caches that `gantry run` makes.
pub(crate) const JOB: &str = "gantry run";
/// Path of the task caches that `gantry run` makes.
pub(crate) const PATH: &str = ".";

/// Finds or creates the caches of a run.
pub(crate) async fn mounts(connection: &Connection, wanted: &[CacheArg]) -> anyhow::Result<Vec<CacheMount>> {
    try_join_all(wanted.iter().map(async |wanted| {
        let request = FindOrCreateTaskCacheRequest {
            team: connection.team.clone(),
            job: JOB.to_owned(),
            step: wanted.name.clone(),
            path: PATH.to_owned(),
            ttl: None,
        };
        let client = connection.caches();
        let doing = format!("cannot prepare cache {:?}", wanted.name);
        let found = connection
            .repeat(Service::ArtifactStore, &doing, async || {
                client.clone().find_or_create_task_cache(request.clone()).await
            })
            .await?;
        Ok(mount(found.cache_id, wanted))
    }))
    .await
}

fn mount(task_cache_id: String, wanted: &CacheArg) -> CacheMount {
    CacheMount { task_cache_id, path: Bytes::copy_from_slice(wanted.path.as_bytes()) }
}

/// Finds the existing caches of a run.
pub(crate) async fn existing_mounts(
    connection: &Connection,
    wanted: &[CacheArg],
) -> anyhow::Result<Vec<CacheMount>> {
    if wanted.is_empty() {
        return Ok(Vec::new());
    }
    let there: Vec<_> = all(connection, JOB.to_owned()).try_collect().await?;
    let found = wanted.iter().filter_map(|wanted| {
        let cache = there.iter().find(|cache| cache.path == PATH && cache.step == wanted.name)?;
        Some(mount(cache.cache_id.clone(), wanted))
    });
    Ok(found.collect())
}

pub(crate) fn all(connection: &Connection, job: String) -> impl Stream<Item = anyhow::Result<TaskCache>> {
    pages(async move |page_token| {
        let (team, job) = (connection.team.clone(), job.clone());
        let request = ListTaskCachesRequest { team, job, page_size: 0, page_token };
        let client = connection.caches();
        let page = connection.repeat(Service::ArtifactStore, "cannot list caches", async || {
            client.clone().list_task_caches(request.clone()).await
        });
        page.await.map(|page| (page.caches, page.next_page_token))
    })
}

/// Returns the name of a cache of `gantry run`. `None`: another caller made the cache.
pub(crate) fn name(cache: &TaskCache) -> Option<&str> {
    (cache.job == JOB && cache.path == PATH).then_some(cache.step.as_str())
}
