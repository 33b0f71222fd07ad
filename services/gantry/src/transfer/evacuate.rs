//! Evacuation of a worker: the streamer copies artifacts that only this worker has, and its
//! progress is printed.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use anyhow::Context;
use rpc::pb::scheduler::Worker;
use rpc::pb::streamer::evacuate_worker_response::Message;
use rpc::pb::streamer::{EvacuateWorkerRequest, Evacuated};

use crate::client::connect::{Connection, Service};
use crate::client::outage::Outage;
use crate::ending::error::Refused;
use crate::render::table::{bytes, count, plain};
use crate::render::ui::Ui;

/// Shortest deadline of a call. The streamer then only lists what is at risk.
const MIN_DEADLINE: Duration = Duration::from_millis(1);

/// The evacuation of a worker.
pub(crate) struct Evacuation<'a> {
    pub(crate) connection: &'a Connection,
    pub(crate) ui: &'a Ui,
    pub(crate) worker: &'a Worker,
    pub(crate) deadline: Option<Instant>,
    /// Lines that were printed. Many artifacts may have the same error.
    pub(crate) printed: HashSet<String>,
}

impl Evacuation<'_> {
    /// Copies until nothing is at risk, the deadline has passed, or nothing can be copied.
    pub(crate) async fn run(&mut self) -> anyhow::Result<Evacuated> {
        let name = plain(&self.worker.name, 255);
        let mut outage = self.connection.patience.of_call();
        loop {
            match self.follow(&name, &mut outage).await {
                Ok(evacuated) => return Ok(evacuated),
                Err(refused) if refused.is_transient() && outage.goes_on(None) => {
                    self.connection.wait_out(&mut outage, &refused).await;
                }
                Err(refused) => {
                    return Err(refused).with_context(|| format!("cannot evacuate worker {name}"));
                }
            }
        }
    }

    /// Makes one call, and prints its progress.
    async fn follow(&mut self, name: &str, outage: &mut Outage) -> Result<Evacuated, Refused> {
        let left = |deadline: Instant| deadline.saturating_duration_since(Instant::now()).max(MIN_DEADLINE);
        let deadline = self.deadline.map(|deadline| rpc::duration(left(deadline)));
        let request = EvacuateWorkerRequest { worker: self.worker.worker_id.clone(), deadline };
        let by_streamer = |status| self.connection.refused_by(Service::Streamer, status);
        let mut streamer = self.connection.streamer();
        let mut answers = self.connection.call(Service::Streamer, streamer.evacuate_worker(request)).await?;
        let mut at_risk = 0;
        while let Some(answer) = answers.message().await.map_err(by_streamer)? {
            outage.over();
            let (now, evacuated) = match answer.message {
                Some(Message::Progress(now)) => (now, None),
                Some(Message::Evacuated(last)) => (last.progress.clone().unwrap_or_default(), Some(last)),
                None => continue,
            };
            for failure in &now.failures {
                if self.printed.insert(failure.message.clone()) {
                    let (id, reason) = (&failure.artifact_id, &failure.reason);
                    let message = plain(&failure.message, 2000);
                    self.ui.warn(&format!("artifact {id} is not copied: {message} ({reason})"));
                }
            }
            if let Some(evacuated) = evacuated {
                if now.artifacts_copied > 0 {
                    let copied = count(now.artifacts_copied, "artifact");
                    let size = bytes(now.bytes_copied);
                    self.ui.note(&format!("worker {name}: {copied} copied to other workers, {size}"));
                }
                return Ok(evacuated);
            }
            let all = count(now.artifacts_at_risk, "artifact");
            let size = bytes(now.bytes_at_risk);
            let doing = format!("worker {name}: {all} to copy to other workers, {size}");
            if now.artifacts_at_risk > at_risk && self.printed.insert(doing.clone()) {
                self.ui.note(&doing);
            }
            at_risk = now.artifacts_at_risk;
        }
        Err(Refused::cut())
    }
}
