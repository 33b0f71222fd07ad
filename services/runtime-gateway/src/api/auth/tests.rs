//! Tests of tickets in the metadata of calls.

use domain::worker::TicketOperation;
use domain::{Timestamp, VolumeHandle};
use rpc::client::{Outgoing, peer};
use rpc::pb::runtime as pb;
use rpc::pb::runtime::volumes_client::VolumesClient;
use rpc::token::TokenSigner;
use rpc::{Reason, Refusal};
use testing::fake::FakeWorker;

use super::*;
use crate::test_support::scheduler::Schedule;
use crate::test_support::served::TestServer;
use crate::test_support::store::session;
use crate::test_support::{FakeGateways, UNREACHABLE, gateway_of, within};

/// Returns the error of a call that presents `ticket`.
async fn presented(gateway: &TestServer, ticket: &str) -> Refusal {
    let outgoing = Outgoing::internal().with_ticket(ticket);
    let mut client = VolumesClient::new(peer(&gateway.endpoint, outgoing).expect("an address"));
    let request = pb::ReadFileRequest { ticket: ticket.to_owned(), path: "file".into() };
    let answer = within("an answer", async {
        let mut parts = client.read_file(request).await?.into_inner();
        parts.message().await
    });
    Refusal::from(answer.await.expect_err("the volume does not exist"))
}

#[tokio::test(flavor = "multi_thread")]
async fn forged_tickets_cause_one_query_for_keys() {
    let schedule = Schedule::new();
    let service = schedule.service();
    let scheduler = TestServer::start(|host| host.add_service(service)).await;
    let machine = FakeWorker::near();
    let worker = machine.gateway(&scheduler.endpoint, UNREACHABLE);
    let open = session("credential");
    let id = open.worker;
    worker.session.set(Some(open));
    let gateway = gateway_of(&[worker], &scheduler.endpoint);
    let gateway = TestServer::start(|host| {
        host.add_service(TicketAuth::new(crate::api::volumes(gateway.clone()), gateway));
    })
    .await;

    let (good, claims) = schedule.ticket(id, VolumeHandle::new(), TicketOperation::Read);
    let expired = domain::worker::TicketClaims { expires_at: Timestamp(1), ..claims.clone() };
    // Tickets with the id of a known key and an invalid signature.
    let changed = format!("{}{}", &good[..good.len() - 8], "AAAAAAAA");
    let cut = &good[..good.len() / 2];
    let long = good.repeat(1000);
    let refusal = presented(&gateway, &good).await;
    assert!(refusal.is(Reason::VolumeNotFound), "{refusal}");
    for ticket in [changed.as_str(), cut, "", "forged"].into_iter().chain([&long[..8000]]) {
        let refusal = presented(&gateway, ticket).await;
        assert!(refusal.is(Reason::InvalidToken), "{ticket}: {refusal}");
    }
    assert_eq!(schedule.calls_for_keys(), 1, "an invalid signature of a known key causes no query");

    // Tickets with the ids of unknown keys.
    let began = std::time::Instant::now();
    let made_up = (10..60).map(|seed| TokenSigner::from_seed(&[seed; 32]).sign(&claims));
    let made_up: Vec<_> = made_up.chain([TokenSigner::from_seed(&[9; 32]).sign(&expired)]).collect();
    for refusal in futures::future::join_all(made_up.iter().map(|ticket| presented(&gateway, ticket))).await {
        assert!(refusal.is(Reason::InvalidToken), "{refusal}");
    }
    // On a slow machine, the keys may be queried again.
    let most = 2 + began.elapsed().div_duration_f64(rpc::token::KEYS_KEPT).ceil() as usize;
    assert!(schedule.calls_for_keys() <= most.min(made_up.len()), "{}", schedule.calls_for_keys());
    assert!(presented(&gateway, &good).await.is(Reason::VolumeNotFound), "the valid ticket stays valid");

    gateway.end().await;
    scheduler.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn forged_tickets_are_unavailable_without_keys() {
    let machine = FakeWorker::near();
    let gateway = gateway_of(&[machine.gateway(UNREACHABLE, UNREACHABLE)], UNREACHABLE);
    let gateway = TestServer::start(|host| {
        host.add_service(TicketAuth::new(crate::api::volumes(gateway.clone()), gateway));
    })
    .await;
    let (ticket, _) =
        Schedule::new().ticket(domain::WorkerId::new(), VolumeHandle::new(), TicketOperation::Read);
    for _ in 0..3 {
        let refusal = presented(&gateway, &ticket).await;
        assert!(refusal.is(Reason::Unavailable), "{refusal}");
    }
    gateway.end().await;
}
