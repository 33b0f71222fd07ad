//! Isolation of teams, and of attempts that were given up.

use std::time::Duration;

use domain::{ArtifactId, AttemptId, BuildId, TransferId, WorkloadId};
use rpc::Reason;
use rpc::pb::artifacts as pb;
use rpc::pb::artifacts::{ArtifactState, DryRun};
use testing::databases::TestDatabase;

use crate::{Answer, Gateway, Suite, Tables, assert_refused, digest, input, on_both_databases, output};

on_both_databases! {
    another_team_sees_and_changes_nothing,
    outputs_never_go_to_build_of_another_team,
    attempt_ends_only_for_its_workload,
    abandoned_attempt_seals_nothing_after_waking_up,
    output_of_unsettled_attempt_stays_invisible,
}

/// A team without access.
const OTHER: &str = "other";

fn plan(team: &str, artifact: ArtifactId, gateway: &Gateway, transfer: TransferId) -> pb::PlanReplicaRequest {
    pb::PlanReplicaRequest {
        team: team.to_owned(),
        artifact_id: artifact.to_string(),
        worker_id: gateway.worker.to_string(),
        transfer_id: transfer.to_string(),
    }
}

async fn another_team_sees_and_changes_nothing(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let (here, there) = (suite.gateway().await, suite.gateway().await);
    let (build, workload) = (BuildId::new(), WorkloadId::new());
    suite.put_build(build, workload, None).await.expect("put");
    let (sealed, _) = suite.upload(&here, Some(build), 1).await.expect("uploaded");
    let (arrived, transfer) = (ArtifactId::new(), TransferId::new());
    suite.create(arrived, Some(build)).await.expect("created");
    let handle = suite.plan(arrived, here.worker, transfer).await.expect("planned");
    here.complete(&handle, digest(2)).await.expect("complete");

    let tables = Tables::open(&suite.url()).await;
    let before = tables.rows().await;
    let team = || OTHER.to_owned();

    let get = pb::GetArtifactRequest { team: team(), artifact_id: sealed.to_string() };
    assert_refused(answer(suite.artifacts().get_artifact(get).await), Reason::ArtifactNotFound);
    let list = pb::ListArtifactsRequest { team: team(), ..Default::default() };
    let listed = suite.artifacts().list_artifacts(list).await.expect("listed").into_inner();
    assert_eq!(listed.artifacts, []);
    let locate = pb::LocateRequest { team: team(), artifact_ids: vec![sealed.to_string()] };
    let located = suite.artifacts().locate(locate).await.expect("located").into_inner();
    assert_eq!(located.locations, []);
    let adopt = pb::AdoptByDigestRequest {
        team: team(),
        digest: digest(1).as_bytes().to_vec().into(),
        ..Default::default()
    };
    let adopted = suite.artifacts().adopt_by_digest(adopt.clone()).await.expect("asked").into_inner();
    assert_eq!(adopted.artifact, None);
    let for_build = pb::AdoptByDigestRequest { build_id: build.to_string(), ..adopt };
    assert_refused(answer(suite.artifacts().adopt_by_digest(for_build).await), Reason::OwnerEnded);
    let create = pb::CreateArtifactRequest {
        artifact_id: ArtifactId::new().to_string(),
        team: team(),
        build_id: build.to_string(),
        ..Default::default()
    };
    assert_refused(answer(suite.artifacts().create_artifact(create).await), Reason::OwnerEnded);

    let mut owners = pb::owners_client::OwnersClient::new(suite.peer.clone());
    let put = pb::PutBuildRequest {
        build_id: build.to_string(),
        team: team(),
        ends_with_workload_id: workload.to_string(),
        ..Default::default()
    };
    assert_refused(answer(owners.put_build(put).await), Reason::BuildExists);
    let delete = pb::DeleteBuildRequest { team: team(), build_id: build.to_string() };
    assert_refused(answer(owners.delete_build(delete).await), Reason::BuildNotFound);

    // A new workload of the other team.
    let pin = pb::PinRequest {
        holder_id: WorkloadId::new().to_string(),
        team: team(),
        artifact_ids: vec![sealed.to_string()],
        build_id: String::new(),
        task_cache_ids: Vec::new(),
    };
    assert_refused(answer(suite.pins().pin(pin.clone()).await), Reason::InputUnavailable);
    let bind = pb::PinRequest { artifact_ids: Vec::new(), build_id: build.to_string(), ..pin };
    assert_refused(answer(suite.pins().pin(bind).await), Reason::OwnerEnded);
    let prepare = pb::PrepareRequest {
        session_credential: here.credential.clone(),
        holder_id: WorkloadId::new().to_string(),
        attempt_id: AttemptId::new().to_string(),
        team: team(),
        volumes: vec![input("in", sealed)],
        unreachable_artifact_ids: Vec::new(),
    };
    assert_refused(answer(suite.inventory().prepare(prepare).await), Reason::InputUnavailable);

    for artifact in [sealed, arrived] {
        let request = plan(OTHER, artifact, &there, TransferId::new());
        assert_refused(answer(suite.replicas().plan_replica(request).await), Reason::ArtifactNotFound);
    }
    let again = plan(OTHER, arrived, &here, transfer);
    assert_refused(answer(suite.replicas().plan_replica(again).await), Reason::ArtifactNotFound);
    let progress = pb::ProgressRequest { transfer_id: transfer.to_string(), team: team() };
    assert_refused(answer(suite.replicas().progress(progress).await), Reason::ClaimLost);
    let seal = pb::SealUploadRequest {
        team: team(),
        artifact_id: arrived.to_string(),
        digest: digest(2).as_bytes().to_vec().into(),
    };
    assert_refused(answer(suite.replicas().seal_upload(seal).await), Reason::ArtifactNotFound);
    // The answer does not reveal whether the transfer exists.
    let abandon = pb::AbandonUploadRequest { transfer_id: transfer.to_string(), team: team() };
    suite.replicas().abandon_upload(abandon).await.expect("nothing to abandon");

    Tables::assert_unchanged(&before, &tables.rows().await, "another team");
    // The team itself may.
    suite.seal(arrived, digest(2)).await.expect("sealed");
    suite.pin(workload, &[sealed, arrived], Some(build)).await.expect("pinned");
    suite.stop().await;
}

async fn outputs_never_go_to_build_of_another_team(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let gateway = suite.gateway().await;
    let foreign = BuildId::new();
    let put = pb::PutBuildRequest {
        build_id: foreign.to_string(),
        team: OTHER.to_owned(),
        ends_with_workload_id: WorkloadId::new().to_string(),
        ..Default::default()
    };
    pb::owners_client::OwnersClient::new(suite.peer.clone()).put_build(put).await.expect("put");
    let (workload, attempt) = (WorkloadId::new(), AttemptId::new());
    let out = workload.output_artifact("out");
    let planned = gateway.prepare(workload, attempt, &[output("out", out)]).await.expect("prepared");
    gateway.prepared(attempt).await.expect("recorded");
    gateway.complete(&planned.volumes[0].volume_handle, digest(1)).await.expect("complete");
    let settle =
        async |build: BuildId| suite.settle(workload, Some(attempt), &[(out, digest(1))], Some(build)).await;
    let missing = settle(foreign).await.expect("settled");
    let owner = pb::OutputOwner { owner: Some(pb::output_owner::Owner::BuildId(foreign.to_string())) };
    assert_eq!(missing, [pb::OwnerMissing { artifact_id: out.to_string(), owner: Some(owner) }]);
    // The first call counts.
    assert_eq!(settle(BuildId::new()).await.expect("repeated"), []);
    let settled = suite.get(out).await.expect("it is there");
    assert_eq!(settled.kept_by, ["no owner: deleted when it is old"]);
    suite.stop().await;
}

async fn attempt_ends_only_for_its_workload(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let gateway = suite.gateway().await;
    let (workload, attempt) = (WorkloadId::new(), AttemptId::new());
    gateway.prepare(workload, attempt, &[]).await.expect("prepared");
    let never_prepared = AttemptId::new();
    suite.end_attempt(workload, never_prepared).await.expect("remembered");

    let tables = Tables::open(&suite.url()).await;
    let before = tables.rows().await;
    for attempt in [attempt, never_prepared] {
        assert_refused(suite.end_attempt(WorkloadId::new(), attempt).await, Reason::InvalidField);
    }
    Tables::assert_unchanged(&before, &tables.rows().await, "the end of another's attempt");
    gateway.prepared(attempt).await.expect("it is active");
    suite.end_attempt(workload, attempt).await.expect("ended");
    assert_refused(gateway.prepared(attempt).await, Reason::AttemptEnded);
    suite.stop().await;
}

/// Two concurrent attempts of one workload. The first is cut off, and the store does not know that
/// it was given up.
struct Partition {
    suite: Suite,
    workload: WorkloadId,
    out: ArtifactId,
    /// Gateways of the first and the second attempt.
    gateways: [Gateway; 2],
    attempts: [AttemptId; 2],
    prepared: [pb::PrepareResponse; 2],
}

impl Partition {
    /// Prepares both attempts, on one worker or on two.
    async fn start(suite: Suite, same_worker: bool) -> Self {
        let first = suite.gateway().await;
        let second = if same_worker { first.clone() } else { suite.gateway().await };
        let workload = WorkloadId::new();
        let out = workload.output_artifact("out");
        let attempts = [AttemptId::new(), AttemptId::new()];
        let mut prepared = Vec::new();
        for (gateway, attempt) in [&first, &second].into_iter().zip(attempts) {
            prepared.push(gateway.prepare(workload, attempt, &[output("out", out)]).await.expect("prepared"));
            gateway.prepared(attempt).await.expect("recorded");
        }
        let prepared = prepared.try_into().expect("two attempts");
        Self { suite, workload, out, gateways: [first, second], attempts, prepared }
    }

    fn candidate(&self, attempt: usize) -> &str {
        &self.prepared[attempt].volumes[0].volume_handle
    }

    /// The second attempt exits, and its workload is settled with its output.
    async fn settle_second(&self) {
        self.gateways[1].complete(self.candidate(1), digest(2)).await.expect("complete");
        let outputs = [(self.out, digest(2))];
        // An output of the first attempt cannot be settled for the second one.
        let refused =
            self.suite.settle(self.workload, Some(self.attempts[1]), &[(self.out, digest(1))], None).await;
        assert_refused(refused, Reason::CandidateMissing);
        assert_refused(self.suite.get(self.out).await, Reason::ArtifactNotFound);
        self.suite.settle(self.workload, Some(self.attempts[1]), &outputs, None).await.expect("settled");
    }

    /// The first attempt wakes up, and continues.
    async fn wake_first(&self) {
        let (gateway, attempt) = (&self.gateways[0], self.attempts[0]);
        let tables = Tables::open(&self.suite.url()).await;
        let before = tables.rows().await;
        let needs = [output("out", self.out)];
        assert_refused(gateway.prepare(self.workload, attempt, &needs).await, Reason::AttemptEnded);
        let third = AttemptId::new();
        assert_refused(gateway.prepare(self.workload, third, &needs).await, Reason::AttemptEnded);
        assert_refused(gateway.prepared(attempt).await, Reason::AttemptEnded);
        assert_refused(self.suite.seal(self.out, digest(1)).await, Reason::ArtifactSealed);
        // A workload is settled once: a repeat returns the same answer, and changes nothing.
        let outputs = [(self.out, digest(1)), (ArtifactId::new(), digest(1))];
        self.suite.settle(self.workload, Some(attempt), &outputs, None).await.expect("settled before");
        self.suite.end_attempt(self.workload, attempt).await.expect("it ended before");
        Tables::assert_unchanged(&before, &tables.rows().await, "an attempt that was given up");
    }

    /// Checks that only the second attempt's output stays, and that finally everything is deleted.
    async fn finish(self) -> Suite {
        let Self { suite, out, gateways, prepared, .. } = self;
        let [first, second] = prepared;
        let check = async || {
            let artifacts = suite.all_artifacts().await;
            let [seen] = &artifacts[..] else { panic!("one artifact, not {artifacts:?}") };
            assert_eq!((seen.artifact_id.as_str(), seen.state()), (&*out.to_string(), ArtifactState::Sealed));
            assert_eq!(seen.digest, digest(2).as_bytes());
            let [replica] = &seen.replicas[..] else { panic!("one replica, not {:?}", seen.replicas) };
            assert_eq!(replica.volume_handle, second.volumes[0].volume_handle);
        };
        check().await;
        let mut went: Vec<_> = suite.collect(DryRun::Off).await.into_iter().map(|went| went.id).collect();
        went.sort();
        let garbage = [&first.container_handle, &second.container_handle, &first.volumes[0].volume_handle];
        let mut expected = garbage.map(Clone::clone);
        expected.sort();
        assert_eq!(went, expected, "two containers and the candidate of the first attempt");

        gateways[0].swept(&[&first.container_handle], &[&first.volumes[0].volume_handle]).await;
        gateways[1].swept(&[&second.container_handle], &[]).await;
        // Only the replica on the second worker is not garbage.
        let kept = std::slice::from_ref(&second.volumes[0].volume_handle);
        gateways[1].report(kept, &[]).await.expect("reported");
        if gateways[0].worker != gateways[1].worker {
            gateways[0].report(&[], &[]).await.expect("reported");
        }
        let left: Vec<_> = suite.volumes().await.into_iter().map(|volume| volume.volume_handle).collect();
        assert_eq!(left, kept);
        assert_eq!(suite.containers().await, []);
        check().await;

        suite.clock.advance(Duration::from_secs(13 * 3600));
        suite.collect(DryRun::Off).await;
        gateways[1].swept(&[], &[&kept[0]]).await;
        gateways[1].report(&[], &[]).await.expect("reported");
        suite.collect(DryRun::Off).await;
        assert_eq!(suite.volumes().await, []);
        assert_eq!(suite.all_artifacts().await, []);
        suite
    }
}

async fn abandoned_attempt_seals_nothing_after_waking_up(database: TestDatabase) {
    let mut suite = Suite::start(database).await;
    for same_worker in [true, false] {
        let partition = Partition::start(suite, same_worker).await;
        partition.settle_second().await;
        partition.wake_first().await;
        let late = partition.gateways[0].complete(partition.candidate(0), digest(1)).await;
        assert_refused(late, Reason::AttemptEnded);
        // The first attempt cannot complete a volume of the second one.
        let foreign = partition.gateways[0].complete(partition.candidate(1), digest(1)).await;
        assert_refused(foreign, if same_worker { Reason::InvalidField } else { Reason::VolumeNotFound });
        suite = partition.finish().await;
    }
    suite.stop().await;
}

async fn output_of_unsettled_attempt_stays_invisible(database: TestDatabase) {
    let mut suite = Suite::start(database).await;
    for same_worker in [true, false] {
        let partition = Partition::start(suite, same_worker).await;
        partition.gateways[0].complete(partition.candidate(0), digest(1)).await.expect("complete");
        assert_refused(partition.suite.get(partition.out).await, Reason::ArtifactNotFound);
        partition.settle_second().await;
        partition.wake_first().await;
        partition.gateways[0].complete(partition.candidate(0), digest(1)).await.expect("as before");
        let other = partition.gateways[0].complete(partition.candidate(0), digest(2)).await;
        assert_refused(other, Reason::InvalidField);
        suite = partition.finish().await;
    }
    suite.stop().await;
}

fn answer<T>(answer: Result<tonic::Response<T>, tonic::Status>) -> Answer<T> {
    answer.map(tonic::Response::into_inner).map_err(rpc::Refusal::from)
}
