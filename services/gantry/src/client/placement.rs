//! The scheduler's explanation of where a workload would be placed, or why it is not.

use anyhow::bail;
use rpc::pb::scheduler::explain_request::Subject;
use rpc::pb::scheduler::{ExplainRequest, ExplainResponse};

use crate::client::connect::{Connection, repeat};

/// Which workers are told one by one.
#[derive(Debug, Clone, Default)]
pub(crate) struct WorkerChoice {
    /// How many at most. 0: as many as the scheduler likes.
    pub(crate) most: u32,
    /// Only these.
    pub(crate) only: Vec<String>,
}

/// Asks the scheduler. A worker that was named and is not known is an error.
pub(crate) async fn explain(
    connection: &Connection,
    subject: Subject,
    workers: &WorkerChoice,
) -> anyhow::Result<ExplainResponse> {
    let request =
        ExplainRequest { subject: Some(subject), max_workers: workers.most, workers: workers.only.clone() };
    let placements = connection.placements();
    let response =
        repeat("cannot explain it", async || placements.clone().explain(request.clone()).await).await?;
    let are_all_told = workers.most == 0 || workers.most as usize >= workers.only.len();
    if let Some(unknown) = unknown(&workers.only, &response).filter(|_| are_all_told) {
        bail!("worker {unknown:?} is unknown; see `gantry list workers`");
    }
    Ok(response)
}

/// The first that was asked for of which nothing was workers.
fn unknown<'t>(only: &'t [String], response: &ExplainResponse) -> Option<&'t String> {
    let is_told = |name: &&String| {
        response.workers.iter().any(|worker| worker.worker_name == **name || worker.worker_id == **name)
    };
    only.iter().find(|name| !is_told(name))
}

#[cfg(test)]
mod tests {
    use rpc::pb::scheduler::WorkerExplanation;

    use super::*;

    #[test]
    fn a_worker_that_is_unknown_is_noticed() {
        let known = WorkerExplanation {
            worker_name: "one".to_owned(),
            worker_id: "1".to_owned(),
            ..Default::default()
        };
        let response = ExplainResponse { workers: vec![known], ..Default::default() };
        let first = |only: &[&str]| {
            unknown(&only.iter().map(ToString::to_string).collect::<Vec<_>>(), &response).cloned()
        };
        assert_eq!(first(&["one", "1"]), None);
        assert_eq!(first(&["one", "two"]).as_deref(), Some("two"));
        assert_eq!(first(&[]), None);
    }
}
