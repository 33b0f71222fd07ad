//! Events of a workload without gaps. A broken stream is resumed after the last revision that was
//! received.

use anyhow::Context;
use prost_types::Timestamp;
use rpc::pb::scheduler::{WatchRequest, WatchResponse, watch_response::Event};
use tokio::time::Instant;
use tonic::Streaming;

use crate::client::connect::{Connection, Service};
use crate::client::outage::Outage;
use crate::ending::error::{Refused, with_advice};

/// Stream of the events of one workload.
pub(crate) struct Watch<'a> {
    connection: &'a Connection,

    workload: String,
    revision: u64,
    stream: Option<(Instant, Streaming<WatchResponse>)>,
    outage: Outage,
}

impl<'a> Watch<'a> {
    /// Starts at the first event.
    pub(crate) fn new(connection: &'a Connection, workload: String) -> Self {
        Self { connection, workload, revision: 0, stream: None, outage: connection.patience.of_stream() }
    }

    /// Waits for the next event. Cancel safe.
    pub(crate) async fn next(&mut self) -> anyhow::Result<Event> {
        Ok(self.next_at().await?.1)
    }

    /// Waits for the next event, and returns it with its time. Cancel safe.
    pub(crate) async fn next_at(&mut self) -> anyhow::Result<(Timestamp, Event)> {
        loop {
            let refused = match self.try_next().await {
                Ok(event) => {
                    self.outage.over();
                    return Ok(event);
                }
                Err(refused) => self.connection.refused_by(Service::Scheduler, refused),
            };
            let opened = self.stream.take().map(|(opened, _)| opened);
            let workload = &self.workload;
            if !refused.is_transient() {
                return Err(refused).with_context(|| format!("cannot watch workload {workload}"));
            }
            if !self.outage.goes_on(opened) {
                let advice = format!("run `gantry attach {workload}` when the cluster answers again");
                return Err(with_advice(refused.into(), advice))
                    .with_context(|| format!("cannot watch workload {workload}, which may still run"));
            }
            self.connection.wait_out(&mut self.outage, &refused).await;
        }
    }

    async fn try_next(&mut self) -> Result<(Timestamp, Event), Refused> {
        loop {
            let stream = match &mut self.stream {
                Some((_, stream)) => stream,
                None => {
                    let request = WatchRequest {
                        team: self.connection.team.clone(),
                        workload_id: self.workload.clone(),
                        after_revision: self.revision,
                    };
                    let response = self.connection.workloads().watch(request).await?;
                    &mut self.stream.insert((Instant::now(), response.into_inner())).1
                }
            };
            let WatchResponse { revision, event, at } = stream.message().await?.ok_or_else(Refused::cut)?;
            self.revision = revision;
            if let Some(event) = event {
                return Ok((at.unwrap_or_default(), event));
            }
        }
    }
}
