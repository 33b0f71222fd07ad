//! Readiness of the services of a cluster.

use std::collections::BTreeMap;
use std::time::Duration;

use rpc::client::{Outgoing, peer};
use rpc::pb::capabilities::GetCapabilitiesRequest;
use rpc::pb::capabilities::capabilities_client::CapabilitiesClient;
use rpc::pb::scheduler::{Worker, WorkerState};
use serde_json::{Value, json};
use tokio::time::timeout;
use tonic::Code;

use crate::cli::addresses::{Addresses, Range};
use crate::client::connect::aliases;
use crate::ending::error::Refused;
use crate::render::table::{filled, plain};

/// Time for a service to answer. A slower service is shown as silent.
pub(super) const PATIENCE: Duration = Duration::from_secs(3);

/// Service of one process, or an address at which no service answers.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Service {
    pub(super) name: String,
    pub(super) address: String,
    pub(super) version: String,
    pub(super) instance: String,
    pub(super) not_ready: Vec<String>,
    /// The service rejected the call.
    pub(super) refuses: bool,
}

impl Service {
    pub(super) fn document(&self) -> Value {
        json!({
            "service": self.name,
            "address": self.address,
            "version": self.version,
            "instance": self.instance,
            "ready": self.not_ready.is_empty(),
            "not_ready": self.not_ready,
        })
    }

    pub(super) fn row(&self) -> Vec<String> {
        let health = match (self.not_ready.as_slice(), self.instance.as_str()) {
            ([], _) => "ready",
            (_, "") if self.refuses => "refuses",
            (_, "") => "no answer",
            _ => "not ready",
        };
        let health = health.to_owned();
        vec![self.name.clone(), health, self.version.clone(), self.instance.clone(), self.address.clone()]
    }

    /// Describes why the service is not ready. All services of one process have the same reasons.
    pub(super) fn complaint(&self) -> Option<String> {
        let why = self.not_ready.join("; ");
        (!why.is_empty()).then(|| format!("{}: {}\n", self.address, plain(&why, 200)))
    }
}

pub(super) fn services_text(services: &[Service]) -> String {
    let rows: Vec<_> = services.iter().map(Service::row).collect();
    let mut complaints: Vec<_> = services.iter().filter_map(Service::complaint).collect();
    complaints.dedup();
    let services = filled(&["SERVICE", "HEALTH", "VERSION", "PROCESS", "ADDRESS"], &rows);
    format!("{services}{}", complaints.concat())
}

/// Asks every replica of every service.
pub(super) async fn services(addresses: &Addresses, workers: &[Worker], outgoing: &Outgoing) -> Vec<Service> {
    let named = [
        ("scheduler", &addresses.scheduler),
        ("artifact-store", &addresses.artifacts),
        ("streamer", &addresses.streamer),
    ];
    let mut asked: BTreeMap<&str, &str> = BTreeMap::new();
    for (name, replicas) in named {
        for address in replicas.split(',') {
            asked.entry(address.trim()).or_insert(name);
        }
    }
    match &addresses.proxy {
        // A caller of a proxy may not reach the gateways. The contact of their workers is shown
        // with the workers.
        Some(proxy) => asked.extend(proxy.split(',').map(|address| (address.trim(), "proxy"))),
        None => {
            // A cluster in one process is asked once, even if its gateway has another address.
            let aliases = match addresses.in_one_place().map(|address| peer(address, outgoing.clone())) {
                Some(Ok(one)) => timeout(PATIENCE, aliases(&one)).await.ok().and_then(Result::ok),
                _ => None,
            };
            let aliases = aliases.unwrap_or_default();
            for worker in workers.iter().filter(|worker| worker.state() != WorkerState::Lost) {
                if !aliases.contains(&worker.gateway_endpoint) {
                    asked.entry(&worker.gateway_endpoint).or_insert("runtime-gateway");
                }
            }
        }
    }
    let asking = asked.into_iter().map(|(address, name)| ask(address, name, outgoing.clone()));
    let mut services: Vec<_> = futures::future::join_all(asking).await.into_iter().flatten().collect();
    for range in &addresses.ranges {
        hide_silent_ports(&mut services, range);
    }
    services.sort();
    services
}

/// Removes silent addresses of a range. If the whole range is silent, one entry stands for it.
pub(super) fn hide_silent_ports(services: &mut Vec<Service>, range: &Range) {
    let of_range = |service: &Service| range.addresses.contains(&service.address);
    let is_silent = |service: &Service| of_range(service) && service.instance.is_empty();
    let all_silent = services.iter().filter(|service| of_range(service)).all(is_silent);
    let one = services.iter().find(|service| all_silent && of_range(service)).cloned();
    services.retain(|service| !is_silent(service));
    services.extend(one.map(|one| Service { address: range.text.clone(), ..one }));
}

/// Asks for the services at one address. `expected` is the name of a service that does not answer.
pub(super) async fn ask(address: &str, expected: &str, outgoing: Outgoing) -> Vec<Service> {
    let silent = |why: String, refuses| {
        vec![Service {
            name: expected.to_owned(),
            address: address.to_owned(),
            version: String::new(),
            instance: String::new(),
            not_ready: vec![why],
            refuses,
        }]
    };
    let asked = match peer(address, outgoing) {
        Ok(peer) => peer,
        Err(error) => return silent(error.to_string(), false),
    };
    let asking = async { CapabilitiesClient::new(asked).get_capabilities(GetCapabilitiesRequest {}).await };
    let answer = match timeout(PATIENCE, asking).await {
        Err(_) => return silent("no answer in time".to_owned(), false),
        Ok(Err(status)) => {
            let refuses = matches!(status.code(), Code::Unauthenticated | Code::PermissionDenied);
            return silent(Refused::from(status).cause(), refuses);
        }
        Ok(Ok(answer)) => answer.into_inner(),
    };
    if answer.services.is_empty() {
        // The process is starting, for example because it waits for its database.
        let starting = silent(answer.not_ready.join("; "), false);
        return starting
            .into_iter()
            .map(|one| Service { instance: answer.instance.clone(), ..one })
            .collect();
    }
    let service = |service: rpc::pb::capabilities::ServiceCapabilities| Service {
        name: service.service,
        address: address.to_owned(),
        version: service.version,
        instance: answer.instance.clone(),
        not_ready: answer.not_ready.clone(),
        refuses: false,
    };
    answer.services.into_iter().map(service).collect()
}
