//! Tests of tickets, which permit only a planned transfer at the gateway that the scheduler named.

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};

use domain::{AttemptId, VolumeHandle};
use http::{HeaderMap, Request, Response};
use rpc::client::{Outgoing, peer};
use rpc::pb::runtime as pb;
use rpc::pb::runtime::containers_client::ContainersClient;
use rpc::pb::runtime::volumes_client::VolumesClient;
use rpc::pb::runtime::volumes_server;
use rpc::pb::scheduler::TicketOperation;
use rpc::{Reason, Refusal};
use server::{Host, Listener};
use tokio::net::TcpListener;
use tonic::body::Body;
use tonic::server::NamedService;

use super::suite::{Suite, TEAM, TOKEN, TestServer, may_be_a_worker};
use super::tree;

/// A server at an address that a caller names as a source. It records the headers of calls.
#[derive(Clone, Default)]
struct RecordingServer(Arc<Mutex<Vec<HeaderMap>>>);

impl NamedService for RecordingServer {
    const NAME: &'static str = volumes_server::SERVICE_NAME;
}

impl tower_service::Service<Request<Body>> for RecordingServer {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Ready<Result<Response<Body>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        self.0.lock().expect("the headers").push(request.headers().clone());
        ready(Ok(Reason::VolumeNotFound.status("test", "a test server without volumes").into_http()))
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn gateway_fetches_only_from_addresses_of_the_scheduler() {
    if !may_be_a_worker() {
        return;
    }
    let mut suite = Suite::start().await;
    let one = suite.add_worker("one").await;
    let root = suite.path("tree");
    tree::write(&root, 1 << 20);
    let (artifact, _) = suite.upload(&root).await;
    let replica = suite.replicas(artifact).await.remove(0);
    let read = suite.ticket(one, &replica.volume_handle, TicketOperation::Read).await;
    let two = suite.add_worker("two").await;
    let recorder = RecordingServer::default();
    let mut host = Host::new();
    host.add_service(recorder.clone());
    let port = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let stranger = TestServer::start(host, Listener::InsecureTcp(port));

    let write = suite.planned(two).await;
    let outgoing = Outgoing::default().with_token(Some(TOKEN));
    let mut gateway = VolumesClient::new(peer(&write.gateway_endpoint, outgoing).expect("an address"));
    for (ticket, reason) in [(read.ticket.as_str(), Reason::InvalidField), ("forged", Reason::SourceFailed)] {
        let source =
            pb::FetchSource { gateway_endpoint: stranger.endpoint.clone(), ticket: ticket.to_owned() };
        let request = pb::FetchRequest {
            ticket: write.ticket.clone(),
            digest: vec![7; 32].into(),
            sources: vec![source],
        };
        let mut answers = gateway.fetch(request).await.expect("it begins").into_inner();
        let refused =
            Refusal::from(answers.message().await.expect_err("the address is not from the scheduler"));
        assert!(refused.is(reason), "{refused}");
    }
    let headers = recorder.0.lock().expect("the headers").clone();
    assert!(headers.is_empty(), "{headers:?}");
    stranger.stop().await;
    suite.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn ticket_admits_only_transfers_of_its_worker() {
    if !may_be_a_worker() {
        return;
    }
    let mut suite = Suite::start().await;
    let one = suite.add_worker("one").await;
    let root = suite.path("tree");
    tree::write(&root, 1 << 20);
    let (artifact, _) = suite.upload(&root).await;
    let replica = suite.replicas(artifact).await.remove(0);
    let two = suite.add_worker("two").await;
    let read = suite.ticket(one, &replica.volume_handle, TicketOperation::Read).await;
    let other_ticket = suite.planned(two).await.ticket;

    let archive = async |presented: Option<&str>| {
        let outgoing =
            presented.map_or(Outgoing::default(), |ticket| Outgoing::default().with_ticket(ticket));
        let mut gateway = VolumesClient::new(peer(&read.gateway_endpoint, outgoing).expect("an address"));
        let request = pb::ReadArchiveRequest { ticket: read.ticket.clone(), path: "".into() };
        let mut parts = gateway.read_archive(request).await?.into_inner();
        let mut last = None;
        while let Some(part) = parts.message().await? {
            last = part.message;
        }
        Ok::<_, Refusal>(last)
    };
    let last = archive(Some(&read.ticket)).await.expect("the ticket is valid");
    assert!(matches!(last, Some(pb::read_archive_response::Message::Done(_))), "{last:?}");
    for (presented, reason) in [
        (None, Reason::Unauthenticated),
        (Some("forged"), Reason::InvalidToken),
        (Some(other_ticket.as_str()), Reason::NotAttended),
    ] {
        let refused = archive(presented).await.expect_err("the call is not admitted");
        assert!(refused.is(reason), "{presented:?}: {refused}");
    }

    let outgoing = Outgoing::default().with_ticket(&read.ticket);
    let mut containers = ContainersClient::new(peer(&read.gateway_endpoint, outgoing).expect("an address"));
    let resume = pb::Resume {
        team: TEAM.to_owned(),
        worker_id: one.to_string(),
        process_id: AttemptId::new().to_string(),
        ..pb::Resume::default()
    };
    let requests = [pb::AttachRequest { message: Some(pb::attach_request::Message::Resume(resume)) }];
    let refused =
        containers.attach(tokio_stream::iter(requests)).await.expect_err("an attach call is not a transfer");
    assert!(Refusal::from(refused).is(Reason::Unauthenticated));
    suite.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn ticket_requires_a_planned_transfer() {
    if !may_be_a_worker() {
        return;
    }
    let mut suite = Suite::start().await;
    let one = suite.add_worker("one").await;
    let root = suite.path("tree");
    tree::write(&root, 1 << 10);
    let (artifact, _) = suite.upload(&root).await;
    let replica = suite.replicas(artifact).await.remove(0).volume_handle;
    let two = suite.add_worker("two").await;
    suite.planned(two).await;
    let planned = suite.volume_handles(two).await.remove(0);
    let unknown = VolumeHandle::new().to_string();
    let refused = [
        ("to fill a volume that is complete", one, &replica, TicketOperation::Write),
        ("to fill a volume that is not planned", one, &unknown, TicketOperation::Write),
        ("to read a volume that is not planned", one, &unknown, TicketOperation::Read),
        ("to read a replica where it is not", two, &replica, TicketOperation::Read),
        ("to read an upload that is not sealed", two, &planned, TicketOperation::Read),
    ];
    for (what, worker, volume, operation) in refused {
        let refused = suite.try_ticket(worker, volume, operation).await.expect_err(what);
        assert!(refused.is(Reason::TransferNotPlanned), "{what}: {refused}");
    }
    suite.stop().await;
}
