//! Query for the explanation of a placement.

use anyhow::bail;
use rpc::pb::scheduler::explain_request::Subject;
use rpc::pb::scheduler::{ExplainRequest, ExplainResponse};

use crate::client::connect::{Connection, Service};

/// Selection of the workers that are listed one by one.
#[derive(Debug, Clone, Default)]
pub(crate) struct WorkerChoice {
    /// Maximum number of workers. 0: the default of the scheduler.
    pub(crate) most: u32,
    /// Names or ids of the workers to list. Empty: all.
    pub(crate) only: Vec<String>,
}

/// Asks the scheduler for an explanation. Fails if a selected worker is unknown.
pub(crate) async fn explain(
    connection: &Connection,
    subject: Subject,
    workers: &WorkerChoice,
) -> anyhow::Result<ExplainResponse> {
    let request =
        ExplainRequest { subject: Some(subject), max_workers: workers.most, workers: workers.only.clone() };
    let placements = connection.placements();
    let response = connection
        .repeat(Service::Scheduler, "cannot explain the placement", async || {
            placements.clone().explain(request.clone()).await
        })
        .await?;
    let are_all_listed = workers.most == 0 || workers.most as usize >= workers.only.len();
    if let Some(unknown) = unknown(&workers.only, &response).filter(|_| are_all_listed) {
        bail!("worker {unknown:?} is unknown; see `gantry list workers`");
    }
    Ok(response)
}

/// Returns the first selected worker that the response does not contain.
fn unknown<'t>(only: &'t [String], response: &ExplainResponse) -> Option<&'t String> {
    let is_listed = |name: &&String| {
        response.workers.iter().any(|worker| worker.worker_name == **name || worker.worker_id == **name)
    };
    only.iter().find(|name| !is_listed(name))
}

#[cfg(test)]
mod tests {
    use rpc::pb::scheduler::WorkerExplanation;

    use super::*;

    #[test]
    fn unknown_worker_is_found() {
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
