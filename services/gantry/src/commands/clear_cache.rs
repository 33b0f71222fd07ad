//! `gantry clear-cache`: deletes caches.

use anyhow::bail;
use domain::CacheId;
use rpc::pb::artifacts::DeleteTaskCachesRequest;
use serde_json::json;

use crate::cli::args::ClearCacheArgs;
use crate::client::caches::{JOB, PATH};
use crate::client::connect::{Connection, Service};
use crate::render::stdout::{print, print_json};
use crate::render::table::count;

/// Executes `gantry clear-cache`.
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
        let doing = format!("cannot clear cache {named:?}");
        let answer = connection
            .repeat(Service::ArtifactStore, &doing, async || {
                client.clone().delete_task_caches(request.clone()).await
            })
            .await?;
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
