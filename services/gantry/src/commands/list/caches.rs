//! `gantry list caches` and `gantry show cache`.

use anyhow::bail;
use futures::TryStreamExt;
use rpc::pb::artifacts::TaskCache;
use serde_json::{Value, json};

use crate::client::caches::{all, name};
use crate::client::connect::Connection;
use crate::render::labels;
use crate::render::listing::Listing;
use crate::render::table::{duration, plain};

/// Executes `gantry list caches`.
pub(crate) async fn list(connection: &Connection, listing: Listing) -> anyhow::Result<()> {
    listing.print(all(connection, String::new()), json, HEADERS, row).await
}

/// Finds the cache for `gantry show cache`, by name or id.
pub(crate) async fn find(connection: &Connection, named: &str) -> anyhow::Result<TaskCache> {
    let named_so = |cache: &TaskCache| cache.cache_id == named || name(cache) == Some(named);
    let found = all(connection, String::new()).try_filter(|cache| std::future::ready(named_so(cache)));
    match Box::pin(found).try_next().await? {
        Some(cache) => Ok(cache),
        None => bail!("there is no cache {named:?}; see `gantry list caches`"),
    }
}

const HEADERS: &[&str] = &["ID", "NAME", "LAST USED", "TTL", "ARTIFACT"];

fn row(cache: &TaskCache) -> Vec<String> {
    vec![
        cache.cache_id.clone(),
        plain(&key(cache), 60),
        labels::ago(cache.last_used_at.as_ref()),
        kept(cache),
        cache.artifact_id.clone(),
    ]
}

/// Returns the name of a cache of `gantry run`, or the job, step and path of any other cache.
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
        ("ttl", kept(cache)),
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
