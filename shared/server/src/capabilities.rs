//! The gRPC service `Capabilities`, which describes the services of a process and what they can do.

use std::sync::{Arc, Mutex, PoisonError};

use domain::Timestamp;
use rpc::pb::capabilities as pb;
use rpc::pb::capabilities::capabilities_server::Capabilities;
use tonic::{Request, Response, Status};

use crate::readiness::Readiness;

/// Description of a service.
#[derive(Debug, Clone)]
pub struct Service {
    /// Name: `scheduler`, `artifact-store`, `runtime-gateway` or `streamer`.
    pub name: &'static str,
    /// Version of the program.
    pub version: &'static str,
    /// Names of supported features.
    pub features: Vec<String>,
    /// Limits of requests. Each name contains the unit.
    pub limits: Vec<(&'static str, u64)>,
}

/// The implementation of `Capabilities`. All clones share the list of services.
#[derive(Clone)]
pub(crate) struct CapabilitiesService {
    pub(crate) services: Arc<Mutex<Vec<pb::ServiceCapabilities>>>,
    pub(crate) readiness: Readiness,
    started_at: Timestamp,
}

impl CapabilitiesService {
    pub(crate) fn new(readiness: Readiness) -> Self {
        Self { services: Arc::default(), readiness, started_at: Timestamp::now() }
    }

    pub(crate) fn add(&self, service: Service, grpc_services: &[&'static str]) {
        let limits =
            service.limits.into_iter().map(|(name, value)| pb::Limit { name: name.to_owned(), value });
        metrics::gauge!("gantry_service", "service" => service.name, "version" => service.version).set(1.0);
        self.services.lock().unwrap_or_else(PoisonError::into_inner).push(pb::ServiceCapabilities {
            service: service.name.to_owned(),
            version: service.version.to_owned(),
            grpc_services: grpc_services.iter().copied().map(str::to_owned).collect(),
            features: service.features,
            limits: limits.collect(),
        });
    }
}

#[tonic::async_trait]
impl Capabilities for CapabilitiesService {
    async fn get_capabilities(
        &self,
        _: Request<pb::GetCapabilitiesRequest>,
    ) -> Result<Response<pb::GetCapabilitiesResponse>, Status> {
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        Ok(Response::new(pb::GetCapabilitiesResponse {
            services: self.services.lock().unwrap_or_else(PoisonError::into_inner).clone(),
            instance: format!("{}:{}", host.trim(), std::process::id()),
            started_at: Some(rpc::timestamp(self.started_at)),
            not_ready: self.readiness.not_ready_reasons(),
        }))
    }
}
