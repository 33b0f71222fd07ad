//! Registrations for unit tests.

use domain::worker::{Capacity, Labels, Marker};
use domain::{GatewayInstance, MarkerId};

use super::Registration;

/// Returns the registration of a plain worker by a new gateway.
pub(crate) fn registration(name: &str) -> Registration {
    Registration {
        name: name.to_owned(),
        instance: GatewayInstance::new(),
        ended: None,
        last: None,
        marker: Marker { id: MarkerId::new(), boot: String::new() },
        endpoint: "http://127.0.0.1:1".to_owned(),
        labels: Labels {
            platform: "linux".to_owned(),
            tags: vec![],
            team: None,
            image_kinds: vec![],
            capabilities: vec!["network-private".to_owned()],
            resource_types: vec![],
            zone: String::new(),
        },
        capacity: Capacity::default(),
        ephemeral: false,
    }
}
