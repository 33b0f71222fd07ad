//! What a worker is, and who may speak for it.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::{
    AttemptId, ContainerHandle, GatewayInstance, LeaseId, MarkerId, StoreLife, VolumeHandle, WorkerId,
    WorkloadId,
};

/// One life of what a worker *holds*. Rises when its marker is new.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Incarnation(pub u64);

/// One life of who *speaks* for a worker. Rises when another gateway instance takes over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Session(pub u64);

/// What identifies one life of what a worker holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Marker {
    /// Kept among the worker's volumes.
    pub id: MarkerId,
    /// The boot that its processes live in.
    pub boot: String,
}

/// What a worker keeps beside its marker of the artifact store: of which life of it the worker's volumes are, and how far that was. As text
/// it is the life, the sequence number and the receipt in hexadecimal, with spaces between them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoreMark {
    /// The life.
    pub life: StoreLife,
    /// The sequence number of the last report that was judged in it.
    pub sequence: u64,
    /// The store's receipt for that report. `None`: the store gave none.
    pub receipt: Option<Receipt>,
}

/// Proves to an artifact store that it has judged a report. Only the store can make or check one.
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

/// The text is no mark of a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("it does not name a life of an artifact store, a number and a receipt")]
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

/// What a worker is.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Labels {
    /// Such as `linux`.
    pub platform: String,
    /// A worker with tags takes only workloads with tags.
    pub tags: Vec<String>,
    /// The only team that may use it.
    pub team: Option<String>,
    /// Kinds of image that it can run, such as `host`.
    pub image_kinds: Vec<String>,
    /// What else its runtime can do, by name.
    pub capabilities: Vec<String>,
    /// The resource types whose images it brings along.
    #[serde(default)]
    pub resource_types: Vec<ResourceType>,
}

/// A resource type whose image a worker brings along.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ResourceType {
    /// Such as `git`.
    pub name: String,
    /// Of the image.
    pub version: String,
}

/// How much a worker can hold. `None`: no limit, or it does not say.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Capacity {
    /// Workloads at a time.
    pub max_tasks: Option<u32>,
    /// Containers, those that are kept included.
    pub max_containers: Option<u32>,
    /// Volumes.
    pub max_volumes: Option<u32>,
    /// Thousandths of a processor that may be asked for in all.
    pub cpu_millis: Option<u64>,
    /// Bytes of memory that may be asked for in all.
    pub memory_bytes: Option<u64>,
    /// Bytes of the file system that holds its volumes.
    pub disk_bytes: u64,
}

/// Claims of a session credential: who speaks for a worker. Signed by the scheduler.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionClaims {
    /// The worker.
    pub worker: WorkerId,
    /// The life of what it holds.
    pub incarnation: Incarnation,
    /// The life of who speaks.
    pub session: Session,
    /// The gateway process that was told so.
    pub instance: GatewayInstance,
}

/// Claims of a lease token: who may use one slot of a worker, and for what. Signed by the scheduler.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeaseClaims {
    /// The lease.
    pub lease: LeaseId,
    /// The worker.
    pub worker: WorkerId,
    /// The life of what it holds, for which alone the lease is good.
    pub incarnation: Incarnation,
    /// The acting team.
    pub team: String,
    /// The attempt it was granted for. `None`: a driven lease.
    pub attempt: Option<(WorkloadId, AttemptId)>,
}

/// What a ticket permits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TicketOperation {
    /// Fill the volume, once.
    Write,
    /// Read the volume.
    Read,
}

/// Claims of a ticket: a short-lived permission for one transfer. Signed by the scheduler.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TicketClaims {
    /// The worker.
    pub worker: WorkerId,
    /// The volume.
    pub volume: VolumeHandle,
    /// The acting team.
    pub team: String,
    /// What is permitted.
    pub operation: TicketOperation,
    /// Until when a transfer may be opened with it, by the scheduler's clock.
    pub expires_at: crate::Timestamp,
    /// Where the gateway of the worker listens, as the scheduler knows it. Gateways that transfer with that worker connect there and nowhere
    /// else.
    pub endpoint: String,
}

/// Claims of a proxy ticket: a short-lived permission to pass the calls of others on to one worker. Signed by the scheduler.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProxyClaims {
    /// The worker.
    pub worker: WorkerId,
    /// Until when a call may be opened with it, by the scheduler's clock.
    pub expires_at: crate::Timestamp,
}

/// Everything of one worker that the artifact store can mark.
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
    fn a_mark_of_a_store_comes_back_from_its_text_and_nothing_else_does() {
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
