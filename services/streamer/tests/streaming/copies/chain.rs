//! Copies of one artifact to several workers at once, of which each is read from the previous one.

use domain::{ArtifactId, Digest, WorkerId};
use rpc::client::{Outgoing, peer};
use rpc::pb::runtime as gateway;
use rpc::pb::runtime::volumes_client::VolumesClient;
use rpc::pb::scheduler::TicketOperation;
use rpc::pb::streamer as pb;
use rpc::{Reason, Refusal};
use tonic::Streaming;

use super::suite::{Suite, TOKEN, may_be_a_worker, until};
use super::{TREE_BYTES, on_disk, tree};

/// A copy from `one` to `two` that stalls, and a copy to `three` that is read from `two`.
struct Chain {
    suite: Suite,
    artifact: ArtifactId,
    digest: Digest,
    workers: [WorkerId; 3],
    copies: [Streaming<pb::MaterializeResponse>; 2],
}

/// Waits until a copy to `to` has received bytes, and returns it.
async fn receiving(suite: &Suite, to: WorkerId) -> pb::Transfer {
    until("a copy that receives bytes", async || {
        let is_receiving = |listed: &pb::Transfer| {
            listed.to_worker_id == to.to_string()
                && listed.progress.as_ref().is_some_and(|progress| progress.bytes_done > 0)
        };
        suite.transfers().await.into_iter().find(is_receiving)
    })
    .await
}

impl Chain {
    async fn start() -> Self {
        let mut suite = Suite::start().await;
        let one = suite.add_worker("one").await;
        let root = suite.path("tree");
        tree::write(&root, TREE_BYTES);
        let (artifact, digest) = suite.upload(&root).await;
        let (two, three) = (suite.add_worker("two").await, suite.add_worker("three").await);

        suite.link(one).stall_after(TREE_BYTES / 2);
        let first = suite.begin(artifact, two).await;
        receiving(&suite, two).await;
        let second = suite.begin(artifact, three).await;
        let listed = receiving(&suite, three).await;
        assert_eq!(listed.progress.expect("progress").from_worker_id, two.to_string());
        assert_eq!(suite.replicas(artifact).await.len(), 1, "the first copy is incomplete");
        Self { suite, artifact, digest, workers: [one, two, three], copies: [first, second] }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn copy_in_flight_serves_the_next_one() {
    if !may_be_a_worker() {
        return;
    }
    let Chain { suite, artifact, digest, workers: [one, two, three], copies: [first, second] } =
        Chain::start().await;

    // An incomplete volume has no archive.
    let [volume] = &suite.volume_handles(two).await[..] else { panic!("one volume") };
    let ticket = suite.ticket(two, volume, TicketOperation::Read).await;
    let outgoing = Outgoing::default().with_token(Some(TOKEN));
    let mut gateway = VolumesClient::new(peer(&ticket.gateway_endpoint, outgoing).expect("an address"));
    let request = gateway::ReadArchiveRequest { ticket: ticket.ticket, path: "".into() };
    let mut parts = gateway.read_archive(request).await.expect("it begins").into_inner();
    let refused = Refusal::from(parts.message().await.expect_err("the volume is incomplete"));
    assert!(refused.is(Reason::Unavailable), "{refused}");

    suite.link(one).open();
    let (first, second) = tokio::join!(suite.copy_result(first), suite.copy_result(second));
    let copies = [(two, first.expect("copied")), (three, second.expect("copied"))];
    for (worker, copied) in copies {
        assert_eq!(on_disk(&suite.volume(worker, &copied.volume)), digest);
    }
    assert!(suite.link(one).sent() < TREE_BYTES * 3 / 2, "the first source sends the bytes once");
    assert_eq!(suite.replicas(artifact).await.len(), 3);
    suite.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn copy_continues_when_the_one_it_reads_ends() {
    if !may_be_a_worker() {
        return;
    }
    let Chain { suite, digest, workers: [one, two, three], copies: [first, second], .. } =
        Chain::start().await;

    let before = suite.link(one).sent();
    drop(first);
    suite.wait_until_empty(two).await;
    suite.link(one).open();
    let copied = suite.copy_result(second).await.expect("copied");
    assert_eq!(on_disk(&suite.volume(three, &copied.volume)), digest);
    assert_eq!(copied.progress.expect("there was a copy").from_worker_id, one.to_string());
    let sent = suite.link(one).sent() - before;
    assert!(sent < TREE_BYTES * 3 / 4, "received bytes are not sent again: {sent} of {TREE_BYTES} bytes");
    suite.stop().await;
}
