//! The artifact store of the model tests, and the calls of gateways and callers to it.

use domain::worker::{Incarnation, Session, SessionClaims};
use domain::{ArtifactId, AttemptId, BuildId, GatewayInstance, TransferId, WorkerId, WorkloadId};
use rpc::client::{Outgoing, peer};
use rpc::pb::artifacts as pb;
use rpc::pb::artifacts::artifacts_client::ArtifactsClient;
use rpc::pb::artifacts::inventory_client::InventoryClient;
use rpc::pb::artifacts::owners_client::OwnersClient;
use rpc::pb::artifacts::replicas_client::ReplicasClient;
use rpc::pb::capabilities::GetCapabilitiesRequest;
use rpc::pb::capabilities::capabilities_client::CapabilitiesClient;
use rpc::token::TokenSigner;
use rpc::{Peer, Reason, Refusal};
use server::Listener;
use tempfile::TempDir;
use tokio::net::UnixListener;
use tokio::task::JoinSet;

use super::state::State;
use super::{KnownObjects, digest};
use crate::db::entity::workload::State as Progress;

/// A real artifact store, served until this is dropped.
pub(super) struct Store {
    directory: TempDir,
    signer: TokenSigner,
    _served: JoinSet<anyhow::Result<()>>,
}

impl Store {
    pub(super) async fn start(signer: &TokenSigner) -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let url = format!("sqlite://{}/store.db", directory.path().display());
        let keys = artifact_store::KeySource::Fixed(vec![signer.public()]);
        let config = artifact_store::Config::new(url, keys);
        let socket = UnixListener::bind(directory.path().join("store.sock")).expect("a socket");
        let mut served = JoinSet::new();
        served.spawn(artifact_store::serve(config, Listener::Unix(socket), std::future::pending()));
        let store = Self { directory, signer: signer.clone(), _served: served };
        loop {
            let answer =
                CapabilitiesClient::new(store.peer()).get_capabilities(GetCapabilitiesRequest {}).await;
            if answer.expect("the socket queues callers until it is served").into_inner().not_ready.is_empty()
            {
                break;
            }
            tokio::task::yield_now().await;
        }
        store
    }

    pub(super) fn endpoint(&self) -> String {
        format!("unix://{}/store.sock", self.directory.path().display())
    }

    pub(super) fn peer(&self) -> Peer {
        peer(&self.endpoint(), Outgoing::internal()).expect("an address")
    }

    /// Creates a credential for a worker that the scheduler does not know.
    fn credential(&self, worker: WorkerId) -> String {
        let (incarnation, session) = (Incarnation(1), Session(1));
        self.signer.sign(&SessionClaims { worker, incarnation, session, instance: GatewayInstance::new() })
    }

    /// Uploads a sealed artifact of a team.
    pub(super) async fn upload(&self, team: &str) -> Result<ArtifactId, Refusal> {
        let (worker, artifact) = (WorkerId::new(), ArtifactId::new());
        let (team, artifact_id) = (team.to_owned(), artifact.to_string());
        let session_credential = self.credential(worker);
        let (mut replicas, mut inventory) =
            (ReplicasClient::new(self.peer()), InventoryClient::new(self.peer()));
        let begin =
            pb::BeginReportRequest { session_credential: session_credential.clone(), ..Default::default() };
        inventory.begin_report(begin).await?;
        let create = pb::CreateArtifactRequest {
            artifact_id: artifact_id.clone(),
            team: team.clone(),
            ..Default::default()
        };
        ArtifactsClient::new(self.peer()).create_artifact(create).await?;
        let plan = pb::PlanReplicaRequest {
            team: team.clone(),
            artifact_id: artifact_id.clone(),
            worker_id: worker.to_string(),
            transfer_id: TransferId::new().to_string(),
        };
        let planned = replicas.plan_replica(plan).await?.into_inner();
        let digest: Vec<u8> = digest(AttemptId::new()).into();
        inventory.complete_volume(complete(session_credential, planned.volume_handle, &digest)).await?;
        let digest = digest.into();
        replicas.seal_upload(pb::SealUploadRequest { team, artifact_id, digest }).await?;
        Ok(artifact)
    }

    /// Creates the build that a workload ends.
    pub(super) async fn put_build(&self, team: &str, build: BuildId, workload: WorkloadId) {
        let request = pb::PutBuildRequest {
            build_id: build.to_string(),
            team: team.to_owned(),
            ends_with_workload_id: workload.to_string(),
            ..Default::default()
        };
        let put = OwnersClient::new(self.peer()).put_build(request).await.map_err(Refusal::from);
        // The workload has ended the build, or was rejected.
        if let Err(refusal) = put {
            assert!(refusal.is(Reason::BuildEnded), "{refusal}");
        }
    }

    /// Publishes the output of an attempt. Returns `false` if the store rejects the attempt.
    pub(super) async fn publish(&self, team: &str, workload: WorkloadId, attempt: AttemptId) -> bool {
        let session_credential = self.credential(WorkerId::new());
        let mut inventory = InventoryClient::new(self.peer());
        let volume = pb::PrepareVolume {
            name: "out".to_owned(),
            purpose: pb::VolumePurpose::Output.into(),
            output_artifact_id: workload.output_artifact("out").to_string(),
            ..Default::default()
        };
        let prepare = pb::PrepareRequest {
            session_credential: session_credential.clone(),
            holder_id: workload.to_string(),
            attempt_id: attempt.to_string(),
            team: team.to_owned(),
            volumes: vec![volume],
            unreachable_artifact_ids: Vec::new(),
        };
        let prepared = match inventory.prepare(prepare).await.map_err(Refusal::from) {
            Ok(prepared) => prepared.into_inner(),
            Err(refusal) => {
                let is_over = refusal.is(Reason::AttemptEnded) || refusal.is(Reason::HolderSettled);
                assert!(is_over, "{refusal}");
                return false;
            }
        };
        let attempt_id = attempt.to_string();
        let made = pb::CompletePrepareRequest { session_credential: session_credential.clone(), attempt_id };
        inventory.complete_prepare(made).await.expect("the volumes exist");
        let volume = prepared.volumes[0].volume_handle.clone();
        let digest = digest(attempt);
        let complete = complete(session_credential, volume, &digest);
        inventory.complete_volume(complete).await.expect("the volume is complete");
        true
    }

    /// Checks that exactly the outputs of workloads that ended with them are sealed.
    pub(super) async fn check_outputs(&self, known: &KnownObjects, model: &State) {
        for (id, workload) in &model.workloads {
            if super::fixtures::uses(*id) != super::Uses::Output || workload.state != Progress::Finished {
                continue;
            }
            let request = pb::GetArtifactRequest {
                team: super::fixtures::requirements_of_workload(*id).team.to_owned(),
                artifact_id: id.output_artifact("out").to_string(),
            };
            let answer = ArtifactsClient::new(self.peer()).get_artifact(request).await;
            let is_sealed = answer.is_ok_and(|answer| {
                answer.into_inner().artifact.is_some_and(|one| one.state() == pb::ArtifactState::Sealed)
            });
            let is_expected =
                workload.ending.is_some_and(|ending| ending.has_outputs) && known.has_output(*id);
            assert_eq!(is_sealed, is_expected, "the output of {id}, {workload:?}");
        }
    }
}

fn complete(session_credential: String, volume_handle: String, digest: &[u8]) -> pb::CompleteVolumeRequest {
    pb::CompleteVolumeRequest {
        session_credential,
        volume_handle,
        size_bytes: 1,
        digest: digest.to_vec().into(),
        verification: pb::Verification::Verified.into(),
    }
}
