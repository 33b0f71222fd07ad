//! Caches: what `gantry run --cache` finds and leaves, `gantry list caches`, `gantry show cache`, `gantry clear-cache`.
//!
//! A cache of `gantry run` is the team's, by its name alone: of the job [`JOB`] the step with that name, whatever the path at which a command finds it.

use std::os::unix::ffi::OsStrExt;

use anyhow::bail;
use bytes::Bytes;
use domain::CacheId;
use futures::future::try_join_all;
use futures::{Stream, TryStreamExt};
use rpc::pb::artifacts::{
    DeleteTaskCachesRequest, FindOrCreateTaskCacheRequest, ListTaskCachesRequest, TaskCache,
};
use rpc::pb::scheduler::CacheMount;
use serde_json::{Value, json};

use crate::cli::args::ClearCacheArgs;
use crate::cli::values::CacheArg;
use crate::client::connect::{Connection, repeat};
use crate::client::queries::{pages, table};
use crate::render::labels;
use crate::render::stdout::{print, print_json};
use crate::render::table::{count, duration, plain};

/// The job whose steps are the caches of `gantry run`.
const JOB: &str = "gantry run";
/// What the path in their keys is: all of it.
const PATH: &str = ".";

/// The caches of a run, made where they are missing.
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
        let doing = format!("cannot prepare the cache {:?}", wanted.name);
        let found =
            repeat(&doing, async || client.clone().find_or_create_task_cache(request.clone()).await).await?;
        Ok(mount(found.cache_id, wanted))
    }))
    .await
}

fn mount(task_cache_id: String, wanted: &CacheArg) -> CacheMount {
    CacheMount { task_cache_id, path: Bytes::copy_from_slice(wanted.path.as_bytes()) }
}

/// The caches of a run that are there already.
pub(crate) async fn known(connection: &Connection, wanted: &[CacheArg]) -> anyhow::Result<Vec<CacheMount>> {
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

fn all(connection: &Connection, job: String) -> impl Stream<Item = anyhow::Result<TaskCache>> {
    pages(async move |page_token| {
        let (team, job) = (connection.team.clone(), job.clone());
        let request = ListTaskCachesRequest { team, job, page_size: 0, page_token };
        let client = connection.caches();
        let page =
            repeat("cannot list caches", async || client.clone().list_task_caches(request.clone()).await);
        page.await.map(|page| (page.caches, page.next_page_token))
    })
}

/// `gantry list caches`
pub(crate) async fn list(connection: &Connection, limit: usize, as_json: bool) -> anyhow::Result<()> {
    table(all(connection, String::new()), limit, as_json, json, HEADERS, row).await
}

/// `gantry show cache`
pub(crate) async fn find(connection: &Connection, named: &str) -> anyhow::Result<TaskCache> {
    let named_so = |cache: &TaskCache| cache.cache_id == named || name(cache) == Some(named);
    let found = all(connection, String::new()).try_filter(|cache| std::future::ready(named_so(cache)));
    match Box::pin(found).try_next().await? {
        Some(cache) => Ok(cache),
        None => bail!("there is no cache {named:?}; see `gantry list caches`"),
    }
}

/// The name by which `gantry run` knows it.
fn name(cache: &TaskCache) -> Option<&str> {
    (cache.job == JOB && cache.path == PATH).then_some(cache.step.as_str())
}

const HEADERS: &[&str] = &["ID", "NAME", "LAST USED", "KEPT UNUSED", "ARTIFACT"];

fn row(cache: &TaskCache) -> Vec<String> {
    vec![
        cache.cache_id.clone(),
        plain(&key(cache), 60),
        labels::ago(cache.last_used_at.as_ref()),
        kept(cache),
        cache.artifact_id.clone(),
    ]
}

/// Its name or, where something else than `gantry run` made it, what it is of.
fn key(cache: &TaskCache) -> String {
    let TaskCache { job, step, path, .. } = cache;
    name(cache).map_or_else(|| format!("{job}/{step}:{path}"), ToOwned::to_owned)
}

fn kept(cache: &TaskCache) -> String {
    let ttl = rpc::parse_duration("ttl", cache.ttl).ok().flatten();
    ttl.map(duration).unwrap_or_default()
}

pub(crate) fn shown(cache: &TaskCache) -> Vec<(&'static str, String)> {
    vec![
        ("id", cache.cache_id.clone()),
        ("name", plain(&key(cache), 255)),
        ("artifact", cache.artifact_id.clone()),
        ("last used", labels::ago(cache.last_used_at.as_ref())),
        ("kept unused", kept(cache)),
    ]
}

pub(crate) fn json(cache: &TaskCache) -> Value {
    let ttl = rpc::parse_duration("ttl", cache.ttl).ok().flatten();
    json!({
        "cache_id": cache.cache_id,
        "name": name(cache),
        "job": cache.job,
        "step": cache.step,
        "path": cache.path,
        "artifact_id": Some(&cache.artifact_id).filter(|id| !id.is_empty()),
        "last_used_at": cache.last_used_at.as_ref().map(labels::instant),
        "ttl_seconds": ttl.map(|ttl| ttl.as_secs_f64()),
    })
}

/// `gantry clear-cache`
pub(crate) async fn clear(
    connection: &Connection,
    args: &ClearCacheArgs,
    as_json: bool,
) -> anyhow::Result<()> {
    let mut deleted = 0;
    for named in &args.caches {
        let mut request = DeleteTaskCachesRequest { team: connection.team.clone(), ..Default::default() };
        if named.parse::<CacheId>().is_ok() {
            request.cache_id.clone_from(named);
        } else {
            (request.job, request.step, request.path) = (JOB.to_owned(), named.clone(), PATH.to_owned());
        }
        let client = connection.caches();
        let doing = format!("cannot clear the cache {named:?}");
        let answer =
            repeat(&doing, async || client.clone().delete_task_caches(request.clone()).await).await?;
        if answer.deleted == 0 {
            bail!("there is no cache {named:?}; see `gantry list caches`");
        }
        deleted += answer.deleted;
    }
    if as_json {
        return print_json(&json!({ "deleted": deleted }));
    }
    print(&format!("{} cleared\n", count(deleted, "cache")))
}
