//! Workers: their labels and capacity, and the claims of credentials, leases and tickets.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::{
    AttemptId, ContainerHandle, GatewayInstance, LeaseId, MarkerId, StoreLife, VolumeHandle, WorkerId,
    WorkloadId,
};

/// The number of an incarnation: one life of what a worker *holds*. A new marker increases it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Incarnation(pub u64);

/// The number of a session, in which one gateway *speaks* for a worker. A new gateway instance
/// increases it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Session(pub u64);

/// The identity of an incarnation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Marker {
    /// Id that is stored among the worker's volumes.
    pub id: MarkerId,
    /// Boot id of the machine. No process of the worker survives a change of it.
    pub boot: String,
}

/// The last report of a worker that the artifact store has processed. The worker stores it beside
/// its marker.
///
/// The text form is the store life, the sequence number and the receipt in hexadecimal, separated
/// by spaces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoreMark {
    /// The store life that processed the report.
    pub life: StoreLife,
    /// The sequence number of the report.
    pub sequence: u64,
    /// The store's receipt for the report. `None` if the store returned no receipt.
    pub receipt: Option<Receipt>,
}

/// Proof that an artifact store has processed a report. Only that store can create or verify it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Receipt(pub [u8; 32]);

impl fmt::Display for StoreMark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.life, self.sequence)?;
        match &self.receipt {
            Some(receipt) => write!(f, " {receipt}"),
            None => Ok(()),
        }
    }
}

impl fmt::Display for Receipt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl FromStr for Receipt {
    type Err = ParseStoreMarkError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text.len() != 64 || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(ParseStoreMarkError);
        }
        let mut bytes = [0; 32];
        for (byte, digits) in bytes.iter_mut().zip(text.as_bytes().chunks(2)) {
            let digits = std::str::from_utf8(digits).map_err(|_| ParseStoreMarkError)?;
            *byte = u8::from_str_radix(digits, 16).map_err(|_| ParseStoreMarkError)?;
        }
        Ok(Self(bytes))
    }
}

/// A text is not a [`StoreMark`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a store mark must be a store life, a sequence number and an optional receipt")]
pub struct ParseStoreMarkError;

impl FromStr for StoreMark {
    type Err = ParseStoreMarkError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut parts = text.trim().splitn(3, ' ');
        let mut next = || parts.next().ok_or(ParseStoreMarkError);
        Ok(Self {
            life: next()?.parse().map_err(|_| ParseStoreMarkError)?,
            sequence: next()?.parse().map_err(|_| ParseStoreMarkError)?,
            receipt: parts.next().map(str::parse).transpose()?,
        })
    }
}

/// Properties of a worker that placement compares with the requirements of a request.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Labels {
    /// Platform, for example `linux`.
    pub platform: String,
    /// Tags. A worker with tags takes only workloads with tags.
    pub tags: Vec<String>,
    /// The only team that may use the worker. `None` admits all teams.
    pub team: Option<String>,
    /// Kinds of image that the worker can run, for example `host`.
    pub image_kinds: Vec<String>,
    /// Names of further capabilities of the runtime.
    pub capabilities: Vec<String>,
    /// Resource types with a worker-provided image.
    #[serde(default)]
    pub resource_types: Vec<ResourceType>,
    /// Zone, a part of the network with fast connections. Empty: no zone.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub zone: String,
}

/// A resource type with a worker-provided image.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ResourceType {
    /// Name, for example `git`.
    pub name: String,
    /// Version of the image.
    pub version: String,
}

/// Capacity of a worker. `None` means that there is no limit, or that it is unknown.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Capacity {
    /// Maximum number of concurrent workloads.
    pub max_tasks: Option<u32>,
    /// Maximum number of containers, including those that are kept after their end.
    pub max_containers: Option<u32>,
    /// Maximum number of volumes.
    pub max_volumes: Option<u32>,
    /// Processor time that workloads may request in total, in thousandths of a core.
    pub cpu_millis: Option<u64>,
    /// Memory that workloads may request in total, in bytes.
    pub memory_bytes: Option<u64>,
    /// Size of the volumes' file system, in bytes.
    pub disk_bytes: u64,
    /// Free disk space below which the worker gets no new work, in bytes.
    pub min_free_disk_bytes: u64,
}

/// Claims of a session credential, which proves for which worker a gateway speaks. The scheduler
/// signs it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionClaims {
    /// The worker.
    pub worker: WorkerId,
    /// The worker's incarnation.
    pub incarnation: Incarnation,
    /// The session.
    pub session: Session,
    /// The gateway process that received the credential.
    pub instance: GatewayInstance,
}

/// Claims of a lease token, which proves a lease. The scheduler signs it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeaseClaims {
    /// The lease.
    pub lease: LeaseId,
    /// The worker.
    pub worker: WorkerId,
    /// The worker's incarnation. The lease is invalid in any other incarnation.
    pub incarnation: Incarnation,
    /// The team that the holder acts for.
    pub team: String,
    /// The attempt of the lease. `None` for a lease that a client of `Placements` drives.
    pub attempt: Option<(WorkloadId, AttemptId)>,
}

/// The operation that a ticket permits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TicketOperation {
    /// Fill the volume, once.
    Write,
    /// Read the volume.
    Read,
}

/// Claims of a ticket, a short-lived permission for one transfer. The scheduler signs it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TicketClaims {
    /// The worker.
    pub worker: WorkerId,
    /// The volume.
    pub volume: VolumeHandle,
    /// The team that the holder acts for.
    pub team: String,
    /// The permitted operation.
    pub operation: TicketOperation,
    /// The time until which the ticket opens a transfer, by the scheduler's clock.
    pub expires_at: crate::Timestamp,
    /// The address of the worker's gateway, as the scheduler knows it. A gateway that transfers
    /// with that worker connects only to this address.
    pub endpoint: String,
}

/// Claims of a proxy ticket, a short-lived permission for a proxy to forward calls to one worker.
/// The scheduler signs it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProxyClaims {
    /// The worker.
    pub worker: WorkerId,
    /// The time until which the ticket opens a call, by the scheduler's clock.
    pub expires_at: crate::Timestamp,
}

/// A container or volume of one worker, which the artifact store can mark.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Handle {
    /// A container.
    Container(ContainerHandle),
    /// A volume.
    Volume(VolumeHandle),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn store_mark_parses_only_its_text() {
        let life = StoreLife::new();
        for receipt in [None, Some(Receipt(std::array::from_fn(|at| u8::try_from(at).expect("small") * 8)))] {
            let mark = StoreMark { life, sequence: u64::MAX, receipt };
            assert_eq!(format!("{mark}\n").parse(), Ok(mark));
        }
        let short = format!("{life} 1 00");
        let more = format!("{life} 1 {:064x} 1", 1);
        let signs = format!("{life} 1 {}", "+1".repeat(32));
        for text in ["", " ", &life.to_string(), &format!("{life} x"), "x 1", "1", &short, &more, &signs] {
            assert_eq!(text.parse::<StoreMark>(), Err(ParseStoreMarkError), "{text:?}");
        }
    }
}
