//! `gantry.artifacts.v1.Owners`

use std::time::Duration;

use rpc::pb::artifacts as pb;
use tonic::{Request, Response, Status};

use super::Handlers;
use crate::owners::{self, NewBuild};

/// The longest term of a build: callers renew it.
const LONGEST_TERM: Duration = Duration::from_secs(24 * 3600);

/// The longest that a build may keep its artifacts after its end: ten years.
const LONGEST_KEEP: Duration = Duration::from_secs(10 * 366 * 24 * 3600);

#[tonic::async_trait]
impl pb::owners_server::Owners for Handlers {
    async fn put_build(
        &self,
        request: Request<pb::PutBuildRequest>,
    ) -> Result<Response<pb::PutBuildResponse>, Status> {
        let request = request.into_inner();
        let config = &self.store.config;
        let new = &NewBuild {
            id: rpc::parse_id("build_id", &request.build_id)?,
            team: rpc::parse_team("team", request.team)?,
            ends_with: rpc::parse_id("ends_with_workload", &request.ends_with_workload)?,
            keep: rpc::parse_duration("keep", request.keep)?.unwrap_or(config.default_keep),
            term: rpc::parse_duration("term", request.term)?.unwrap_or(config.default_term),
        };
        if new.term > LONGEST_TERM {
            return Err(rpc::invalid_field("term", "must be at most 24 h"));
        }
        if new.keep > LONGEST_KEEP {
            return Err(rpc::invalid_field("keep", "must be at most ten years"));
        }
        let now = self.store.now();

        self.store.db.write(|txn| async move { owners::put_build(&txn, new, now).await }).await?;

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

        self.store.db.write(|txn| async move { owners::delete(&txn, team, build, now).await }).await?;

        Ok(Response::new(pb::DeleteBuildResponse {}))
    }
}
