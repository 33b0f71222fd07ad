//! The client of the artifact store's inventory.

use std::collections::BTreeSet;
use std::str::FromStr;
use std::time::Duration;

use domain::worker::{Receipt, StoreMark};
use domain::{
    ArtifactId, AttemptId, CacheId, ContainerHandle, Digest, LeaseId, VolumeHandle, WorkerId, WorkloadId,
};
use rpc::pb::artifacts as pb;
use rpc::pb::artifacts::inventory_client::InventoryClient;
use rpc::pb::artifacts::pins_client::PinsClient;
use rpc::pb::artifacts::report_request::Message as Part;
use rpc::{Peer, Refusal};
use runtime::{Holdings, WorkerProvided, WorkerProvidedPath};
use tonic::{Code, Streaming};

use super::malformed;

const STORE: &str = "artifact store";

/// Longest reason of a lost replica, in bytes. The store accepts a little more.
const MAX_REASON_BYTES: usize = 900;

/// Most handles of one message of a report.
const REPORT_BATCH: usize = 5_000;

/// The use of the disk by a volume, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct DiskUsage {
    /// Bytes that no other tree uses.
    pub(crate) exclusive: u64,
    /// All bytes, but only a part of those that other trees use, too: each has an equal part.
    pub(crate) part: u64,
}

/// The use of a volume of an attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum VolumePurpose {
    Input,
    Output,
    Scratch,
}

impl From<VolumePurpose> for pb::VolumePurpose {
    fn from(purpose: VolumePurpose) -> Self {
        match purpose {
            VolumePurpose::Input => Self::Input,
            VolumePurpose::Output => Self::Output,
            VolumePurpose::Scratch => Self::Scratch,
        }
    }
}

/// A volume that an attempt needs.
pub(crate) struct VolumeRequest {
    pub(crate) name: String,
    pub(crate) purpose: VolumePurpose,
    pub(crate) from: Option<ArtifactId>,
    pub(crate) from_cache: Option<CacheId>,
    pub(crate) becomes: Option<ArtifactId>,
}

/// The container and the volumes that an attempt needs.
pub(crate) struct PrepareAttempt {
    pub(crate) workload: WorkloadId,
    pub(crate) attempt: AttemptId,
    pub(crate) team: String,
    pub(crate) volumes: Vec<VolumeRequest>,
    /// Versions of task caches that cannot be copied to the worker.
    pub(crate) unreachable: Vec<ArtifactId>,
}

/// A volume of an attempt for which the store has a row.
pub(crate) struct PreparedVolume {
    pub(crate) handle: VolumeHandle,
    /// The replica that it is a child of, and the digest of that tree.
    pub(crate) parent: Option<(VolumeHandle, Digest)>,
    /// The artifact that it starts with, if that is not on the worker.
    pub(crate) missing: Option<ArtifactId>,
}

/// The rows that the store has written for an attempt.
pub(crate) struct PreparedAttempt {
    pub(crate) container: ContainerHandle,
    /// The volumes, in the order of the request.
    pub(crate) volumes: Vec<PreparedVolume>,
}

/// The answer of the store about an import.
pub(crate) struct PreparedImport {
    pub(crate) artifact: ArtifactId,
    pub(crate) volume: VolumeHandle,
    /// Term of the claim on the import. `None`: it is already imported.
    pub(crate) term: Option<Duration>,
}

/// Containers and volumes that must be destroyed, in this order.
pub(crate) struct DestroyOrder {
    pub(crate) containers: Vec<ContainerHandle>,
    pub(crate) volumes: Vec<VolumeHandle>,
}

/// The answer to a report.
pub(crate) struct ReportAnswer {
    /// Number of containers and volumes that the store expected and the worker did not report.
    pub(crate) lost: u64,
    /// Number of orphans since this report.
    pub(crate) orphans: u64,
    pub(crate) unknown_containers: Vec<ContainerHandle>,
    pub(crate) unknown_volumes: Vec<VolumeHandle>,
    /// Orphans that the store needs a description of.
    pub(crate) undescribed_volumes: Vec<VolumeHandle>,
    pub(crate) receipt: Option<Receipt>,
}

/// The description of an orphan.
pub(crate) struct VolumeDescription {
    pub(crate) volume: VolumeHandle,
    pub(crate) parent: Option<VolumeHandle>,
    pub(crate) team: String,
    pub(crate) artifact: Option<ArtifactId>,
    pub(crate) digest: Option<Digest>,
    pub(crate) size_bytes: u64,
}

impl VolumeDescription {
    /// Creates a description for a volume about which the worker knows nothing.
    pub(crate) fn unknown(volume: VolumeHandle) -> Self {
        Self { volume, parent: None, team: String::new(), artifact: None, digest: None, size_bytes: 0 }
    }
}

/// The stream of orders to destroy containers and volumes.
pub(crate) struct DestroyOrders(Streaming<pb::WatchDestroyingResponse>);

impl DestroyOrders {
    /// Receives the next order.
    pub(crate) async fn next(&mut self) -> Result<DestroyOrder, Refusal> {
        let message = self.0.message().await?.ok_or_else(|| Refusal {
            code: Code::Unavailable,
            reason: None,
            message: "the artifact store ended the stream of orders to destroy".to_owned(),
            about: std::collections::HashMap::new(),
        })?;
        Ok(DestroyOrder {
            containers: parse_all(&message.container_handles)?,
            volumes: parse_all(&message.volume_handles)?,
        })
    }
}

/// The client of the inventory and of pins. `credential` is that of the worker's session.
#[derive(Clone)]
pub(crate) struct StoreClient(InventoryClient<Peer>, PinsClient<Peer>);

impl StoreClient {
    pub(crate) fn new(peer: Peer) -> Self {
        Self(InventoryClient::new(peer.clone()), PinsClient::new(peer))
    }

    /// Writes the rows of a container and its volumes before they exist.
    pub(crate) async fn prepare(
        &self,
        credential: &str,
        attempt: &PrepareAttempt,
    ) -> Result<PreparedAttempt, Refusal> {
        let request = pb::PrepareRequest {
            session_credential: credential.to_owned(),
            holder_id: attempt.workload.to_string(),
            attempt_id: attempt.attempt.to_string(),
            team: attempt.team.clone(),
            volumes: attempt.volumes.iter().map(prepare_volume).collect(),
            unreachable_artifact_ids: attempt.unreachable.iter().map(ToString::to_string).collect(),
        };
        let answer = self.0.clone().prepare(request).await?.into_inner();
        if answer.volumes.len() != attempt.volumes.len() {
            return Err(malformed(STORE, "list of volumes"));
        }
        let volumes = answer.volumes.iter().map(prepared_volume).collect::<Result<_, _>>()?;
        Ok(PreparedAttempt { container: parse(&answer.container_handle, "container handle")?, volumes })
    }

    /// Reports that the container and the volumes of an attempt exist.
    pub(crate) async fn mark_prepared(&self, credential: &str, attempt: AttemptId) -> Result<(), Refusal> {
        let request = pb::CompletePrepareRequest {
            session_credential: credential.to_owned(),
            attempt_id: attempt.to_string(),
        };
        self.0.clone().complete_prepare(request).await?;
        Ok(())
    }

    /// Reports that a container and its volumes cannot be made.
    pub(crate) async fn mark_failed(
        &self,
        credential: &str,
        container: ContainerHandle,
        volumes: &[VolumeHandle],
        why: String,
    ) -> Result<(), Refusal> {
        let request = pb::FailPrepareRequest {
            session_credential: credential.to_owned(),
            container_handle: container.to_string(),
            volume_handles: volumes.iter().map(ToString::to_string).collect(),
            reason: why,
        };
        self.0.clone().fail_prepare(request).await?;
        Ok(())
    }

    /// Has replicas with `size_bytes` deleted. Replicas on the workers `reliable` count as copies.
    /// Returns the size of those that are deleted, now or before, and still exist.
    pub(crate) async fn make_room(
        &self,
        credential: &str,
        size_bytes: u64,
        reliable: Vec<String>,
    ) -> Result<u64, Refusal> {
        let request = pb::MakeRoomRequest {
            session_credential: credential.to_owned(),
            size_bytes,
            reliable_worker_ids: reliable,
            only_ended: false,
        };
        let made = self.0.clone().make_room(request).await?.into_inner();
        Ok(made.size_bytes.saturating_add(made.pending_bytes))
    }

    /// Has containers and volumes of ended attempts deleted before their grace period ends, because
    /// `size_bytes` are missing. Returns their number.
    pub(crate) async fn give_up_ended(&self, credential: &str, size_bytes: u64) -> Result<u64, Refusal> {
        let request = pb::MakeRoomRequest {
            session_credential: credential.to_owned(),
            size_bytes,
            reliable_worker_ids: Vec::new(),
            only_ended: true,
        };
        Ok(self.0.clone().make_room(request).await?.into_inner().of_ended)
    }

    /// Reports that replicas are missing or damaged.
    pub(crate) async fn lose_replicas(
        &self,
        credential: &str,
        replicas: &[(VolumeHandle, String)],
    ) -> Result<(), Refusal> {
        let lost = replicas.iter().map(|(volume, reason)| pb::LostReplica {
            volume_handle: volume.to_string(),
            reason: rpc::clipped(reason, MAX_REASON_BYTES).into_owned(),
        });
        let request =
            pb::LoseReplicasRequest { session_credential: credential.to_owned(), replicas: lost.collect() };
        self.0.clone().lose_replicas(request).await?;
        Ok(())
    }

    /// Reports how much of the disk volumes use.
    pub(crate) async fn record_disk_usage(
        &self,
        credential: &str,
        measured: &[(VolumeHandle, DiskUsage)],
    ) -> Result<(), Refusal> {
        let volumes = measured.iter().map(|(volume, usage)| pb::VolumeDiskUsage {
            volume_handle: volume.to_string(),
            exclusive_bytes: usage.exclusive,
            disk_bytes: usage.part,
        });
        let request = pb::RecordDiskUsageRequest {
            session_credential: credential.to_owned(),
            volumes: volumes.collect(),
        };
        self.0.clone().record_disk_usage(request).await?;
        Ok(())
    }

    /// Marks a container as garbage.
    pub(crate) async fn mark_container(
        &self,
        credential: &str,
        container: ContainerHandle,
        reason: &str,
    ) -> Result<(), Refusal> {
        let request = pb::MarkContainerRequest {
            session_credential: credential.to_owned(),
            container_handle: container.to_string(),
            reason: reason.to_owned(),
        };
        self.0.clone().mark_container(request).await?;
        Ok(())
    }

    /// Ends an attempt whose holder continues. It gets no container any more.
    pub(crate) async fn end_attempt(&self, holder: LeaseId, attempt: AttemptId) -> Result<(), Refusal> {
        let request =
            pb::EndAttemptRequest { holder_id: holder.to_string(), attempt_id: attempt.to_string() };
        self.1.clone().end_attempt(request).await?;
        Ok(())
    }

    /// Reports that the container of an attempt is in use.
    pub(crate) async fn touch(&self, credential: &str, attempt: AttemptId) -> Result<(), Refusal> {
        let request =
            pb::TouchRequest { session_credential: credential.to_owned(), attempt_id: attempt.to_string() };
        self.0.clone().touch(request).await?;
        Ok(())
    }

    /// Reports that a volume has its final bytes. Returns the artifact of the volume, if it has
    /// one.
    pub(crate) async fn complete_volume(
        &self,
        credential: &str,
        volume: VolumeHandle,
        size_bytes: u64,
        digest: Digest,
    ) -> Result<Option<ArtifactId>, Refusal> {
        let request = pb::CompleteVolumeRequest {
            session_credential: credential.to_owned(),
            volume_handle: volume.to_string(),
            size_bytes,
            digest: digest.as_bytes().to_vec().into(),
            verification: pb::Verification::Verified.into(),
        };
        let answer = self.0.clone().complete_volume(request).await?.into_inner();
        Ok(answer.artifact_id.parse().ok())
    }

    /// Requests the import of a base resource type, or renews the claim on it.
    pub(crate) async fn prepare_import(
        &self,
        credential: &str,
        base_type: &WorkerProvidedPath,
    ) -> Result<PreparedImport, Refusal> {
        let request = pb::PrepareImportRequest {
            session_credential: credential.to_owned(),
            provided: Some(pb::WorkerProvided {
                resource_type: match &base_type.what {
                    WorkerProvided::ResourceType(name) => name.clone(),
                    WorkerProvided::Certs => String::new(),
                },
                version: base_type.version.clone(),
                path: base_type.path.clone(),
            }),
        };
        let answer = self.0.clone().prepare_import(request).await?.into_inner();
        Ok(PreparedImport {
            artifact: parse(&answer.artifact_id, "artifact")?,
            volume: parse(&answer.volume_handle, "volume handle")?,
            term: rpc::parse_duration("term", answer.term).map_err(|_| malformed(STORE, "term"))?,
        })
    }

    /// Reports that a base resource type is imported.
    pub(crate) async fn complete_import(
        &self,
        credential: &str,
        volume: VolumeHandle,
        size_bytes: u64,
        digest: Digest,
    ) -> Result<(), Refusal> {
        let request = pb::CompleteImportRequest {
            session_credential: credential.to_owned(),
            volume_handle: volume.to_string(),
            size_bytes,
            digest: digest.as_bytes().to_vec().into(),
        };
        self.0.clone().complete_import(request).await?;
        Ok(())
    }

    /// Reports that a base resource type cannot be imported.
    pub(crate) async fn fail_import(
        &self,
        credential: &str,
        volume: VolumeHandle,
        why: String,
    ) -> Result<(), Refusal> {
        let request = pb::FailImportRequest {
            session_credential: credential.to_owned(),
            volume_handle: volume.to_string(),
            reason: why,
        };
        self.0.clone().fail_import(request).await?;
        Ok(())
    }

    /// Watches the orders to destroy containers and volumes.
    pub(crate) async fn watch_destroying(&self, credential: &str) -> Result<DestroyOrders, Refusal> {
        let request = pb::WatchDestroyingRequest { session_credential: credential.to_owned() };
        Ok(DestroyOrders(self.0.clone().watch_destroying(request).await?.into_inner()))
    }

    /// Begins a report, and returns its mark. `last` is the mark of the last report.
    pub(crate) async fn begin_report(
        &self,
        credential: &str,
        last: Option<StoreMark>,
    ) -> Result<StoreMark, Refusal> {
        let receipt = last.and_then(|mark| mark.receipt).map(|receipt| receipt.0.to_vec().into());
        let request = pb::BeginReportRequest {
            session_credential: credential.to_owned(),
            last: last.map(report_token),
            receipt: receipt.unwrap_or_default(),
        };
        let token = self.0.clone().begin_report(request).await?.into_inner().token.unwrap_or_default();
        let life = parse(&token.store_life, "life of the store")?;
        Ok(StoreMark { life, sequence: token.sequence, receipt: None })
    }

    /// Reports all containers and volumes of the worker. `last` is the mark of the last report, and
    /// `now` that of this one.
    pub(crate) async fn report(
        &self,
        credential: &str,
        last: Option<StoreMark>,
        now: StoreMark,
        holdings: &Holdings,
    ) -> Result<ReportAnswer, Refusal> {
        let parts = report_parts(credential, last, now, holdings);
        let answer = self.0.clone().report(tokio_stream::iter(parts)).await?.into_inner();
        Ok(ReportAnswer {
            lost: answer.lost,
            orphans: answer.orphans,
            unknown_containers: parse_all(&answer.unknown_container_handles)?,
            unknown_volumes: parse_all(&answer.unknown_volume_handles)?,
            undescribed_volumes: parse_all(&answer.undescribed_volume_handles)?,
            receipt: <[u8; 32]>::try_from(&answer.receipt[..]).ok().map(Receipt),
        })
    }

    /// Describes orphans, so that an operator can adopt or purge them.
    pub(crate) async fn describe_orphans(
        &self,
        credential: &str,
        volumes: Vec<VolumeDescription>,
    ) -> Result<(), Refusal> {
        let volumes = volumes.into_iter().map(|volume| pb::VolumeDescription {
            volume_handle: volume.volume.to_string(),
            parent_handle: volume.parent.map(|parent| parent.to_string()).unwrap_or_default(),
            team: volume.team,
            artifact_id: volume.artifact.map(|artifact| artifact.to_string()).unwrap_or_default(),
            digest: volume.digest.map(|digest| digest.as_bytes().to_vec()).unwrap_or_default().into(),
            size_bytes: volume.size_bytes,
        });
        let request = pb::DescribeOrphansRequest {
            session_credential: credential.to_owned(),
            volumes: volumes.collect(),
        };
        self.0.clone().describe_orphans(request).await?;
        Ok(())
    }

    /// Returns those of `volumes` that the store expects on the worker. `volumes` must fit on one
    /// page.
    pub(crate) async fn list_volumes(
        &self,
        worker: WorkerId,
        volumes: &[VolumeHandle],
    ) -> Result<BTreeSet<VolumeHandle>, Refusal> {
        let request = pb::ListVolumesRequest {
            worker_id: worker.to_string(),
            volume_handles: volumes.iter().map(ToString::to_string).collect(),
            page_size: 1_000,
            ..pb::ListVolumesRequest::default()
        };
        let page = self.0.clone().list_volumes(request).await?.into_inner();
        page.volumes.iter().map(|volume| parse(&volume.volume_handle, "volume handle")).collect()
    }
}

fn parse<T: FromStr>(text: &str, part: &str) -> Result<T, Refusal> {
    text.parse().map_err(|_| malformed(STORE, part))
}

fn parse_all<T: FromStr>(handles: &[String]) -> Result<Vec<T>, Refusal> {
    handles.iter().map(|handle| parse(handle, "handle")).collect()
}

fn prepare_volume(volume: &VolumeRequest) -> pb::PrepareVolume {
    let id = |artifact: Option<ArtifactId>| artifact.map(|artifact| artifact.to_string()).unwrap_or_default();
    pb::PrepareVolume {
        name: volume.name.clone(),
        purpose: pb::VolumePurpose::from(volume.purpose).into(),
        from_artifact_id: id(volume.from),
        output_artifact_id: id(volume.becomes),
        from_task_cache_id: volume.from_cache.map(|cache| cache.to_string()).unwrap_or_default(),
    }
}

fn prepared_volume(volume: &pb::PreparedVolume) -> Result<PreparedVolume, Refusal> {
    let missing = match volume.missing_artifact_id.as_str() {
        "" => None,
        missing => Some(parse(missing, "artifact")?),
    };
    let parent = match volume.parent_handle.as_str() {
        "" => None,
        parent => {
            let digest = volume.parent_digest.as_ref().try_into();
            let digest = digest.map_err(|_| malformed(STORE, "parent digest"))?;
            Some((parse(parent, "parent handle")?, digest))
        }
    };
    Ok(PreparedVolume { handle: parse(&volume.volume_handle, "volume handle")?, parent, missing })
}

fn report_token(mark: StoreMark) -> pb::ReportToken {
    pb::ReportToken { sequence: mark.sequence, store_life: mark.life.to_string() }
}

fn report_parts(
    credential: &str,
    last: Option<StoreMark>,
    now: StoreMark,
    holdings: &Holdings,
) -> Vec<pb::ReportRequest> {
    let open = pb::ReportOpen {
        session_credential: credential.to_owned(),
        token: Some(report_token(now)),
        worker_life: last.map(|mark| mark.life.to_string()).unwrap_or_default(),
    };
    let mut parts = vec![Part::Open(open)];
    for batch in holdings.volumes.chunks(REPORT_BATCH) {
        let volume_handles = batch.iter().map(ToString::to_string).collect();
        parts.push(Part::Holdings(pb::Holdings { volume_handles, container_handles: Vec::new() }));
    }
    for batch in holdings.containers.chunks(REPORT_BATCH) {
        let container_handles = batch.iter().map(ToString::to_string).collect();
        parts.push(Part::Holdings(pb::Holdings { volume_handles: Vec::new(), container_handles }));
    }
    let count = holdings.volumes.len().saturating_add(holdings.containers.len());
    parts.push(Part::Commit(pb::ReportCommit { count: u64::try_from(count).unwrap_or(u64::MAX) }));
    parts.into_iter().map(|part| pb::ReportRequest { message: Some(part) }).collect()
}
