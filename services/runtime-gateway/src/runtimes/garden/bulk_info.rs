//! Bulk queries: for containers that existed before this gateway took the worker over, and for
//! the present resource usage.
//!
//! The gateway must learn about every process that may run on the worker. A guardian worker reports
//! many containers in one response, so it is queried once per term, when the first process is
//! looked up. A containerd worker does not implement this call, and houdini omits the properties.
//! On these workers each process is queried separately.
//!
//! Invariant: each result about a container is used once, by the gateway that made the query. So
//! no other gateway has changed the container since.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use concourse::garden::Metrics;
use domain::{ContainerHandle, ProcessId};
use runtime::{CurrentUsage, RuntimeError};
use tokio_util::sync::CancellationToken;

use super::containers::ContainerProperties;
use super::{Backend, Worker, errors};

/// Number of containers in one query, whose URL names all of them.
const AT_ONCE: usize = 100;

/// A container and its properties.
type Container = (ContainerHandle, BTreeMap<String, String>);

/// Containers by their process, not looked up yet.
#[derive(Default)]
pub(super) struct BulkInfo {
    /// The term in which the results are valid. `None`: no query was made.
    term: Option<CancellationToken>,
    containers: HashMap<ProcessId, Container>,
}

impl Worker {
    /// Returns the container of a process from the results of a bulk query. `None`: the process
    /// must be queried separately.
    pub(super) async fn bulk_info(&self, process: ProcessId) -> Option<Container> {
        if self.backend != Backend::Guardian {
            return None;
        }
        let mut found = self.bulk_info.lock().await;
        if found.term.as_ref().is_none_or(CancellationToken::is_cancelled) {
            let term = self.term();
            let containers = self.survey().await.unwrap_or_else(|error| {
                tracing::debug!(
                    error = domain::error_chain(&error),
                    "the worker has no usable bulk query: containers are queried one by one"
                );
                HashMap::new()
            });
            *found = BulkInfo { term: Some(term), containers };
        }
        found.containers.remove(&process)
    }

    /// Removes the result for a destroyed container.
    pub(super) async fn forget_bulk_info(&self, handle: ContainerHandle) {
        self.bulk_info.lock().await.containers.retain(|_, (other, _)| *other != handle);
    }

    /// Measures the present resource usage of containers. Only a guardian worker reports it.
    pub(super) async fn current_usage(
        &self,
        containers: &[ContainerHandle],
    ) -> Result<HashMap<ContainerHandle, CurrentUsage>, RuntimeError> {
        let mut usage = HashMap::new();
        if self.backend != Backend::Guardian {
            return Ok(usage);
        }
        for handles in containers.chunks(AT_ONCE) {
            let names: Vec<_> = handles.iter().map(ToString::to_string).collect();
            let names: Vec<_> = names.iter().map(String::as_str).collect();
            let metrics = self.garden.bulk_metrics(&names).await;
            let mut metrics = metrics.map_err(|error| errors::garden("measure its containers", error))?;
            for handle in handles {
                // A container that is destroyed meanwhile has an error instead.
                if let Some(Ok(measured)) = metrics.remove(&handle.to_string()) {
                    usage.extend(as_usage(&measured).map(|measured| (*handle, measured)));
                }
            }
        }
        Ok(usage)
    }

    async fn survey(&self) -> Result<HashMap<ProcessId, Container>, RuntimeError> {
        let mut containers = HashMap::new();
        for handles in self.list_containers().await?.chunks(AT_ONCE) {
            let names: Vec<_> = handles.iter().map(ToString::to_string).collect();
            let names: Vec<_> = names.iter().map(String::as_str).collect();
            let infos = self.garden.bulk_info(&names).await;
            let mut infos = infos.map_err(|error| errors::garden("report its containers", error))?;
            for handle in handles {
                // A container without information is queried separately.
                let Some(Ok(info)) = infos.remove(&handle.to_string()) else { continue };
                let made = ContainerProperties::read(*handle, &info.properties);
                if let Some(process) = made.and_then(|made| made.process) {
                    containers.insert(process, (*handle, info.properties));
                }
            }
        }
        Ok(containers)
    }
}

/// Converts the usage of a container. The worker reports 0 for values that it does not know, and
/// for a container in which nothing runs.
fn as_usage(metrics: &Metrics) -> Option<CurrentUsage> {
    let known = |value: u64| (value > 0).then_some(value);
    let processes = known(metrics.pids.current)?;
    Some(CurrentUsage {
        cpu_time: known(metrics.cpu.usage).map(Duration::from_nanos),
        memory_bytes: known(metrics.memory.total_rss.max(metrics.memory.anon)),
        processes: u32::try_from(processes).ok(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_of_empty_container_are_no_usage() {
        assert_eq!(as_usage(&Metrics::default()), None);
        let mut metrics = Metrics::default();
        metrics.pids.current = 2;
        metrics.cpu.usage = 3_000_000;
        metrics.memory.anon = 4096;
        let usage = CurrentUsage {
            cpu_time: Some(Duration::from_millis(3)),
            memory_bytes: Some(4096),
            processes: Some(2),
        };
        assert_eq!(as_usage(&metrics), Some(usage));
    }
}
