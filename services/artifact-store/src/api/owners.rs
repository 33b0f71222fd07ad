//! Handlers of `gantry.artifacts.v1.Owners`.

use std::time::Duration;

use domain::Timestamp;
use rpc::pb::artifacts as pb;
use tonic::{Request, Response, Status};

use crate::api::{Handlers, parse_build_status};
use crate::builds::{self, NewBuild};
use crate::db::entity::BuildStatus;

/// Maximum term of a build. Callers renew it.
const MAX_TERM: Duration = Duration::from_secs(24 * 3600);

/// Maximum time for which a build keeps its artifacts after its end: ten years.
pub(super) const MAX_KEEP: Duration = Duration::from_secs(10 * 366 * 24 * 3600);

#[tonic::async_trait]
impl pb::owners_server::Owners for Handlers {
    async fn put_build(
        &self,
        request: Request<pb::PutBuildRequest>,
    ) -> Result<Response<pb::PutBuildResponse>, Status> {
        let request = request.into_inner();
        let config = &self.store.config;
        let ends_with = rpc::parse_optional_id("ends_with_workload_id", &request.ends_with_workload_id)?;
        let job = parse_job(request.job, request.number)?;
        let default_keep = if job.is_some() { Duration::ZERO } else { config.default_keep };
        let new = &NewBuild {
            id: rpc::parse_id("build_id", &request.build_id)?,
            team: rpc::parse_team("team", request.team)?,
            keep: rpc::parse_duration("keep", request.keep)?.unwrap_or(default_keep),
            term: rpc::parse_duration("term", request.term)?.or(ends_with.map(|_| config.default_term)),
            ended: parse_end(request.status, request.ended_at.as_ref().map(rpc::from_timestamp))?,
            ends_with,
            job,
        };
        if new.term.is_some_and(|term| term > MAX_TERM) {
            return Err(rpc::invalid_field("term", "must be at most 24 h"));
        }
        if new.keep > MAX_KEEP {
            return Err(rpc::invalid_field("keep", "must be at most ten years"));
        }
        let now = self.store.now();

        self.store.db.write(|txn| async move { builds::put_build(&txn, new, now).await }).await?;

        Ok(Response::new(pb::PutBuildResponse {}))
    }

    async fn delete_build(
        &self,
        request: Request<pb::DeleteBuildRequest>,
    ) -> Result<Response<pb::DeleteBuildResponse>, Status> {
        let request = request.into_inner();
        let team = &rpc::parse_team("team", request.team)?;
        let build = rpc::parse_id("build_id", &request.build_id)?;
        let now = self.store.now();

        self.store.db.write(|txn| async move { builds::delete(&txn, team, build, now).await }).await?;

        Ok(Response::new(pb::DeleteBuildResponse {}))
    }
}

/// Parses the job of a build, and the build's number in it.
fn parse_job(job: String, number: u64) -> Result<Option<(String, i64)>, Status> {
    if job.is_empty() {
        return match number {
            0 => Ok(None),
            _ => Err(rpc::invalid_field("number", "requires a job")),
        };
    }
    let job = rpc::parse_label("job", job)?;
    match i64::try_from(number) {
        Ok(number) if number > 0 => Ok(Some((job, number))),
        _ => Err(rpc::invalid_field("number", format!("must be from 1 to {}", i64::MAX))),
    }
}

/// Parses how and when a build ended.
fn parse_end(
    status: i32,
    ended_at: Option<Timestamp>,
) -> Result<Option<(BuildStatus, Option<Timestamp>)>, Status> {
    match (status, ended_at) {
        (_, Some(Timestamp(..0))) => Err(rpc::invalid_field("ended_at", "must be after 1970")),
        (0, None) => Ok(None),
        (0, Some(_)) => Err(rpc::invalid_field("ended_at", "requires a status")),
        (status, ended_at) => Ok(Some((parse_build_status("status", status)?, ended_at))),
    }
}
