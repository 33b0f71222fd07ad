//! The gRPC service `Workloads`.

use std::time::Duration;

use domain::WorkloadId;
use domain::worker::LeaseClaims;
use rpc::page::Page;
use rpc::pb::scheduler as pb;
use rpc::pb::scheduler::workloads_server::Workloads;
use rpc::{Reason, parse_id, parse_team, required};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

use super::{IntoStatus, SERVICE, convert, database, invalid_token, stopping, team_or_all};
use crate::app::App;
use crate::outcome::Report;
use crate::workloads;
use crate::workloads::events::{self, Event};

/// Default time between TERM and KILL.
const DEFAULT_GRACE: Duration = Duration::from_secs(10);

/// Maximum number of events in one read, and in the buffer of a slow watcher.
const WATCH_BATCH: usize = 64;

/// The gRPC service `Workloads`.
pub(crate) struct WorkloadsService(pub(crate) App);

#[tonic::async_trait]
impl Workloads for WorkloadsService {
    async fn submit(
        &self,
        request: Request<pb::SubmitRequest>,
    ) -> Result<Response<pb::SubmitResponse>, Status> {
        let request = request.into_inner();
        let id = parse_id("workload_id", &request.workload_id)?;
        let spec = rpc::spec::parse(required("spec", request.spec)?)?;

        // A separate task, so that a caller that disconnects does not interrupt the submission.
        let (scheduler, traceparent) = (self.0.clone(), rpc::trace::current());
        let span = tracing::Span::current();
        let submitted = self.0.context.tasks.spawn(tracing::Instrument::instrument(
            async move { scheduler.submissions.submit(id, spec, traceparent).await },
            span,
        ));
        submitted.await.map_err(|_| stopping())?.map_err(IntoStatus::status)?;

        Ok(Response::new(pb::SubmitResponse {}))
    }

    type WatchStream = ReceiverStream<Result<pb::WatchResponse, Status>>;

    async fn watch(&self, request: Request<pb::WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let request = request.into_inner();
        let team = parse_team("team", request.team)?;
        let id = parse_id("workload_id", &request.workload_id)?;
        workloads::operations::has(&self.0.context, &team, id).await.map_err(IntoStatus::status)?;

        let (events, outbound) = mpsc::channel(WATCH_BATCH);
        let scheduler = self.0.clone();
        self.0.context.tasks.spawn(async move {
            let end = tokio::select! {
                () = events.closed() => return,
                () = scheduler.context.stopping.cancelled() => Err(stopping()),
                end = follow(&scheduler, id, request.after_revision, &events) => end,
            };
            if let Err(status) = end {
                // The watcher may have closed the stream.
                events.send(Err(status)).await.ok();
            }
        });
        Ok(Response::new(ReceiverStream::new(outbound)))
    }

    async fn get(&self, request: Request<pb::GetRequest>) -> Result<Response<pb::GetResponse>, Status> {
        let request = request.into_inner();
        let team = parse_team("team", request.team)?;
        let id = parse_id("workload_id", &request.workload_id)?;

        let workload =
            workloads::operations::get(&self.0.context, &team, id).await.map_err(IntoStatus::status)?;

        Ok(Response::new(pb::GetResponse { workload: Some(convert::workload(workload)) }))
    }

    async fn list(&self, request: Request<pb::ListRequest>) -> Result<Response<pb::ListResponse>, Status> {
        let request = request.into_inner();
        let team = team_or_all(&request.team)?;
        let state = convert::parse_workload_state("state", request.state)?;
        let outcome = convert::parse_outcome("outcome", request.outcome)?;
        let page = Page::of(SERVICE, &request)?;

        let db = self.0.context.db.read();
        let (found, more) = workloads::list(db, team.as_deref(), state, outcome, request.unfinished, &page)
            .await
            .map_err(|error| database("list workloads", &error))?;

        let found = found.into_iter().map(|workload| (workload.sequence, convert::workload(workload)));
        let (workloads, next_page_token) = page.end(found, more);
        Ok(Response::new(pb::ListResponse { workloads, next_page_token }))
    }

    async fn find(&self, request: Request<pb::FindRequest>) -> Result<Response<pb::FindResponse>, Status> {
        let request = request.into_inner();
        let team = parse_team("team", request.team)?;
        let reference = rpc::spec::name::parse_reference("reference", &request.reference)?;

        let db = self.0.context.db.read();
        let (found, more) = workloads::references::resolve(db, &team, &reference, &request.reference)
            .await
            .map_err(IntoStatus::status)?;

        let workloads = found.into_iter().map(convert::workload).collect();
        Ok(Response::new(pb::FindResponse { workloads, more }))
    }

    async fn cancel(
        &self,
        request: Request<pb::CancelRequest>,
    ) -> Result<Response<pb::CancelResponse>, Status> {
        let request = request.into_inner();
        let team = parse_team("team", request.team)?;
        let id = parse_id("workload_id", &request.workload_id)?;
        let grace = rpc::parse_duration("grace", request.grace)?.unwrap_or(DEFAULT_GRACE);

        workloads::operations::cancel(&self.0.context, &team, id, grace).await.map_err(IntoStatus::status)?;

        Ok(Response::new(pb::CancelResponse {}))
    }

    async fn start_attempt(
        &self,
        request: Request<pb::StartAttemptRequest>,
    ) -> Result<Response<pb::StartAttemptResponse>, Status> {
        let claims = self.attempt(&request.into_inner().lease_token)?;

        workloads::operations::start_attempt(&self.0.context, &claims).await.map_err(IntoStatus::status)?;

        Ok(Response::new(pb::StartAttemptResponse {}))
    }

    async fn finish_attempt(
        &self,
        request: Request<pb::FinishAttemptRequest>,
    ) -> Result<Response<pb::FinishAttemptResponse>, Status> {
        let request = request.into_inner();
        let claims = self.attempt(&request.lease_token)?;
        let outputs = request
            .outputs
            .into_iter()
            .enumerate()
            .map(|(index, output)| rpc::parse_published_output(&format!("outputs[{index}]"), output));
        let caches = request
            .caches
            .into_iter()
            .enumerate()
            .map(|(index, cache)| rpc::parse_published_cache(&format!("caches[{index}]"), cache));
        let report = Report {
            exit: request.exit.as_ref().map(|exit| rpc::parse_exit("exit", exit)).transpose()?,
            failure: request.failure.map(rpc::parse_failure),
            outputs: outputs.collect::<Result<_, _>>()?,
            caches: caches.collect::<Result<_, _>>()?,
            notes: rpc::parse_notes(request.notes),
            started_at: request
                .started_at
                .as_ref()
                .map(|at| rpc::parse_timestamp("started_at", at))
                .transpose()?,
            usage: rpc::parse_usage("usage", request.usage.unwrap_or_default())?,
            result: rpc::parse_result("result", request.result)?,
        };

        workloads::operations::finish_attempt(&self.0.context, &claims, &report)
            .await
            .map_err(IntoStatus::status)?;

        Ok(Response::new(pb::FinishAttemptResponse {}))
    }
}

impl WorkloadsService {
    /// Verifies the token of a lease for an attempt.
    fn attempt(&self, token: &str) -> Result<LeaseClaims, Status> {
        let claims: LeaseClaims = self.0.signer.verify(token).map_err(invalid_token)?;
        if claims.attempt.is_none() {
            return Err(Reason::InvalidToken
                .status(SERVICE, "the token belongs to a driven lease, which has no attempt"));
        }
        Ok(claims)
    }
}

/// Sends the events of a workload after `revision`, and then further events until it has finished.
async fn follow(
    scheduler: &App,
    id: WorkloadId,
    mut revision: u64,
    events: &mpsc::Sender<Result<pb::WatchResponse, Status>>,
) -> Result<(), Status> {
    let to_status = |error: sea_orm::DbErr| database("watch a workload", &error);
    // The subscription precedes the first read, so that no event is missed.
    let mut changes = scheduler.context.notify.local.subscribe(id.uuid());
    let mut first = true;
    loop {
        let batch = events::after(scheduler.context.db.read(), id, revision, WATCH_BATCH as u64)
            .await
            .map_err(to_status)?;
        let (empty, full) = (batch.is_empty(), batch.len() == WATCH_BATCH);
        for event in batch {
            revision = event.revision;
            let last = matches!(event.event, Event::Finished { .. });
            let result = match &event.event {
                Event::Finished { ending, .. } if ending.has_result => {
                    workloads::results::find(scheduler.context.db.read(), id).await.map_err(to_status)?
                }
                _ => None,
            };
            if events.send(Ok(convert::revision(event, result))).await.is_err() || last {
                return Ok(());
            }
        }
        if empty && first {
            // The watcher may have seen the last event already.
            let row = workloads::find(scheduler.context.db.read(), id).await.map_err(to_status)?;
            if row.is_none_or(|row| row.finished_at.is_some() && row.revision.unsigned_abs() <= revision) {
                return Ok(());
            }
        }
        first = false;
        if !full {
            changes.changed().await;
        }
    }
}
