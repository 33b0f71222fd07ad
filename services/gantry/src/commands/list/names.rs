//! What workers are called, for lists of what is on them: the artifact store knows their ids alone.

use std::collections::HashMap;
use std::time::Duration;

use futures::stream::TryStreamExt;
use rpc::pb::scheduler::ListWorkersRequest;

use crate::client::connect::Connection;
use crate::client::queries::pages;
use crate::render::table::plain;

/// The names of workers, by their ids.
#[derive(Debug, Default)]
pub(crate) struct Names(HashMap<String, String>);

impl Names {
    /// As many workers as one page may hold, so that nearly always one call is enough.
    const AT_ONCE: u32 = 1000;
    /// For how long the scheduler is asked: what is listed can be read without names too.
    const PATIENCE: Duration = Duration::from_secs(5);

    /// The names of all workers that there are, or of those that were told in time. None for programs, which read ids.
    pub(crate) async fn ask(connection: &Connection, as_json: bool) -> Self {
        if as_json {
            return Self::default();
        }
        let client = connection.workers();
        let workers = pages(async |page_token| {
            let request = ListWorkersRequest { page_size: Self::AT_ONCE, page_token };
            let page = client.clone().list_workers(request).await?.into_inner();
            Ok((page.workers, page.next_page_token))
        });
        let mut names = Self::default();
        let asked = async {
            let mut workers = std::pin::pin!(workers);
            while let Some(worker) = workers.try_next().await? {
                names.0.insert(worker.worker_id, worker.name);
            }
            Ok::<_, anyhow::Error>(())
        };
        // Who cannot be named is shown by its id.
        tokio::time::timeout(Self::PATIENCE, asked).await.ok();
        names
    }

    /// The name of a worker. Its id, where it has gone, or nobody said.
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
