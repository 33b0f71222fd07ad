//! The events of a workload, without gaps: a stream that broke is resumed after the last revision seen.

use std::time::Duration;

use anyhow::Context;
use prost_types::Timestamp;
use rpc::pb::scheduler::{WatchRequest, WatchResponse, watch_response::Event};
use tokio::time::Instant;
use tonic::Streaming;

use crate::connect::{Connection, Pause};
use crate::error::Refused;
use crate::ui::Ui;

/// How long nobody may answer before we give up.
const PATIENCE: Duration = Duration::from_secs(60);

/// Watches one workload.
pub(crate) struct Watch<'a> {
    connection: &'a Connection,
    ui: &'a Ui,
    workload: String,
    revision: u64,
    stream: Option<Streaming<WatchResponse>>,
}

impl<'a> Watch<'a> {
    /// From its first event on.
    pub(crate) fn new(connection: &'a Connection, ui: &'a Ui, workload: String) -> Self {
        Self { connection, ui, workload, revision: 0, stream: None }
    }

    /// The next event. Cancel safe.
    pub(crate) async fn next(&mut self) -> anyhow::Result<Event> {
        Ok(self.next_at().await?.1)
    }

    /// The next event, and when it happened. Cancel safe.
    pub(crate) async fn next_at(&mut self) -> anyhow::Result<(Timestamp, Event)> {
        let mut pause = Pause::default();
        let give_up = Instant::now() + PATIENCE;
        loop {
            let refused = match self.try_next().await {
                Ok(event) => return Ok(event),
                Err(refused) => refused,
            };
            self.stream = None;
            if !refused.is_transient() || Instant::now() >= give_up {
                let workload = &self.workload;
                return Err(refused).with_context(|| format!("cannot watch workload {workload}"));
            }
            pause.wait().await;
            // Whether that helps shows in the next try.
            _ = self.connection.revive(self.ui).await;
        }
    }

    async fn try_next(&mut self) -> Result<(Timestamp, Event), Refused> {
        loop {
            let stream = match &mut self.stream {
                Some(stream) => stream,
                None => {
                    let request = WatchRequest {
                        team: self.connection.team.clone(),
                        workload_id: self.workload.clone(),
                        after_revision: self.revision,
                    };
                    let response = self.connection.workloads().watch(request).await?;
                    self.stream.insert(response.into_inner())
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
