//! `Capabilities`: what answers at an address, and what it can do.

use std::sync::{Arc, Mutex, PoisonError};

use domain::Timestamp;
use rpc::pb::capabilities as pb;
use rpc::pb::capabilities::capabilities_server::Capabilities;
use tonic::{Request, Response, Status};

use crate::readiness::Readiness;

/// What a service says of itself.
#[derive(Debug, Clone)]
pub struct Service {
    /// `scheduler`, `artifact-store`, `runtime-gateway` or `streamer`.
    pub name: &'static str,
    /// The version of its program.
    pub version: &'static str,
    /// What it can do, by name.
    pub features: Vec<String>,
    /// How much it takes: names that say the unit.
    pub limits: Vec<(&'static str, u64)>,
}

/// CapabilitiesService `Capabilities`. Clones answer the same.
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
