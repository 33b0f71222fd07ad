//! `gantry.artifacts.v1.Collector`

use rpc::pb::artifacts as pb;
use tonic::{Request, Response, Status};

use super::{Handlers, status};
use crate::collect::{self, Collected, Kind};

/// How many marks one answer names, so that it fits into a message.
const MOST_NAMED: usize = 10_000;

#[tonic::async_trait]
impl pb::collector_server::Collector for Handlers {
    async fn collect(
        &self,
        request: Request<pb::CollectRequest>,
    ) -> Result<Response<pb::CollectResponse>, Status> {
        let collected = match rpc::parse_enum("dry_run", request.into_inner().dry_run)? {
            pb::DryRun::Unspecified => return Err(rpc::invalid_field("dry_run", "is required")),
            pb::DryRun::Only => collect::dry_round(&self.store, MOST_NAMED + 1).await,
            pb::DryRun::Off => collect::full_round(&self.store, &self.stopping).await,
        }
        .map_err(|error| status::database("collect garbage", &error))?;

        let truncated = collected.len() > MOST_NAMED;
        let collected = collected.iter().take(MOST_NAMED).map(named).collect();
        Ok(Response::new(pb::CollectResponse { collected, truncated }))
    }
}

fn named(collected: &Collected) -> pb::Collected {
    let kind = match collected.kind {
        Kind::Artifact => "artifact",
        Kind::Volume => "volume",
        Kind::Container => "container",
    };
    pb::Collected {
        kind: kind.to_owned(),
        id: collected.id.to_string(),
        why: collected.why.to_string(),
        size_bytes: collected.size_bytes,
    }
}
