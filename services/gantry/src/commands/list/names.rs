//! Names of workers, for lists of the artifact store, which has only their ids.

use std::collections::HashMap;
use std::time::Duration;

use futures::stream::TryStreamExt;
use rpc::pb::scheduler::ListWorkersRequest;

use crate::client::connect::Connection;
use crate::client::queries::pages;
use crate::render::table::plain;

/// Names of workers by id.
#[derive(Debug, Default)]
pub(crate) struct Names(HashMap<String, String>);

impl Names {
    /// Number of workers in one page. In most clusters one call is enough.
    const PAGE_SIZE: u32 = 1000;
    /// Time limit for reading the names. A list without names is still useful.
    const PATIENCE: Duration = Duration::from_secs(5);

    /// Reads the names of all workers, as far as they arrive in time. For JSON no names are read.
    pub(crate) async fn ask(connection: &Connection, as_json: bool) -> Self {
        if as_json {
            return Self::default();
        }
        let client = connection.workers();
        let workers = pages(async |page_token| {
            let request = ListWorkersRequest { page_size: Self::PAGE_SIZE, page_token };
            let page = client.clone().list_workers(request).await?.into_inner();
            anyhow::Ok((page.workers, page.next_page_token))
        });
        let mut names = Self::default();
        let asked = async {
            let mut workers = std::pin::pin!(workers);
            while let Some(worker) = workers.try_next().await? {
                names.0.insert(worker.worker_id, worker.name);
            }
            Ok::<_, anyhow::Error>(())
        };
        // A worker without a name is shown by its id.
        tokio::time::timeout(Self::PATIENCE, asked).await.ok();
        names
    }

    /// Returns the name of a worker, or its id if the name is unknown.
    pub(crate) fn of(&self, id: &str) -> String {
        self.0.get(id).map_or_else(|| id.to_owned(), |name| plain(name, 60))
    }
}

#[cfg(test)]
impl<const N: usize> From<[(&str, &str); N]> for Names {
    fn from(names: [(&str, &str); N]) -> Self {
        Self(names.map(|(id, name)| (id.to_owned(), name.to_owned())).into())
    }
}
