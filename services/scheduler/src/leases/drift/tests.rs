use domain::GatewayInstance;
use domain::{LeaseId, MarkerId};
use rpc::client::{Outgoing, peer};
use rpc::pb::scheduler as pb;
use rpc::pb::scheduler::synchronize_request::Message as Said;
use rpc::pb::scheduler::synchronize_response::Message as Told;
use rpc::pb::scheduler::workers_client::WorkersClient;
use server::{Host, Listener};
use testing::databases::{self, TestDatabase};
use tokio::sync::{mpsc, oneshot};
use tokio_stream::wrappers::ReceiverStream;

use super::*;

#[test]
fn only_lasting_disagreement_counts() {
    let (drift, patience) = (Drift::default(), Duration::from_secs(10));
    let at = |seconds: i64| Timestamp(seconds * 1_000_000);
    let (one, other, none) = (Uuid::from_u128(1), Uuid::from_u128(2), HashSet::new());
    let mut stream = drift.of_stream();
    stream.note(&HashSet::from([one]), &HashSet::from([other]), patience, at(0));
    assert_eq!(drift.total(), Count::default());
    stream.note(&none, &HashSet::from([other]), patience, at(9));
    stream.note(&HashSet::from([one]), &HashSet::from([other]), patience, at(10));
    assert_eq!(drift.total(), Count { missing: 0, stray: 1 }, "the first lease agreed in between");
    let mut second = drift.of_stream();
    second.note(&HashSet::from([one]), &none, patience, at(0));
    second.note(&HashSet::from([one]), &none, patience, at(11));
    assert_eq!(drift.total(), Count { missing: 1, stray: 1 });
    stream.note(&none, &none, patience, at(12));
    drop(second);
    assert_eq!(drift.total(), Count::default());
}

fn registration() -> pb::Registration {
    pb::Registration {
        worker_name: "one".to_owned(),
        gateway_instance: GatewayInstance::new().to_string(),
        marker: Some(pb::Marker { marker_id: MarkerId::new().to_string(), boot_id: "boot".to_owned() }),
        endpoint: "http://127.0.0.1:1".to_owned(),
        labels: Some(pb::WorkerLabels { platform: "linux".to_owned(), ..pb::WorkerLabels::default() }),
        protocol_versions: vec![1],
        ..pb::Registration::default()
    }
}

/// Repeats `report` until the drift equals `expected`.
async fn until(drift: &Drift, expected: Count, mut report: impl AsyncFnMut()) {
    let reached = async {
        while drift.total() != expected {
            report().await;
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let reached = tokio::time::timeout(Duration::from_secs(30), reached).await;
    reached.unwrap_or_else(|_| panic!("expected a drift of {expected:?}, found {:?}", drift.total()));
}

/// A stray lease counts only while the gateway reports it as running. Reports of its end are
/// normal.
async fn stray_lease_counts_while_reported(database: TestDatabase) {
    let config = crate::Config {
        heartbeat: Duration::from_millis(100),
        worker_ttl: Duration::from_secs(1),
        ..crate::Config::new(&database.url, "http://127.0.0.1:9")
    };
    let listener = Listener::InsecureTcp(server::bind(([127, 0, 0, 1], 0).into()).expect("a free port"));
    let address = peer(&listener.endpoint().expect("its address"), Outgoing::internal()).expect("an address");
    let (mut host, (stop, stopped)) = (Host::new(), oneshot::channel::<()>());
    let drift = crate::add(config, &mut host).await.expect("the scheduler starts").drift;
    let served = host.serve([listener], async { _ = stopped.await });
    let test = async {
        let (sender, messages) = mpsc::channel(16);
        let send = async |message| sender.send(pb::SynchronizeRequest { message: Some(message) }).await;
        send(Said::Registration(registration())).await.expect("room");
        let mut responses = WorkersClient::new(address)
            .synchronize(ReceiverStream::new(messages))
            .await
            .expect("registered")
            .into_inner();
        let Some(Told::Welcome(welcome)) =
            responses.message().await.expect("a message").and_then(|response| response.message)
        else {
            panic!("no welcome")
        };
        let Some(Told::Desired(desired)) =
            responses.message().await.expect("a message").and_then(|response| response.message)
        else {
            panic!("no desired state")
        };
        let [one, other] = [(); 2].map(|()| LeaseId::new().to_string());
        let mut number = 0;
        let mut holds = async |phase: pb::LeasePhase| {
            number += 1;
            let lease = |id: &str, phase: pb::LeasePhase| pb::ObservedLease {
                lease_id: id.to_owned(),
                phase: phase.into(),
                inputs: vec![],
            };
            let observed = pb::Observed {
                session_credential: welcome.session_credential.clone(),
                applied_generation: desired.generation,
                leases: vec![lease(&one, phase), lease(&other, pb::LeasePhase::Ended)],
                number,
                ..pb::Observed::default()
            };
            send(Said::Observed(observed)).await.expect("the stream is open");
        };
        let stray = Count { missing: 0, stray: 1 };
        until(&drift, stray, async || holds(pb::LeasePhase::Running).await).await;
        until(&drift, Count::default(), async || holds(pb::LeasePhase::Ended).await).await;
        until(&drift, stray, async || holds(pb::LeasePhase::Running).await).await;
        // The leases of a closed stream do not count.
        drop((responses, sender));
        until(&drift, Count::default(), async || {}).await;
        _ = stop.send(());
    };
    let (served, ()) = tokio::join!(served, test);
    served.expect("the scheduler stops");
}

#[tokio::test]
async fn stray_lease_counts_while_reported_sqlite() {
    stray_lease_counts_while_reported(databases::sqlite()).await;
}

#[tokio::test]
async fn stray_lease_counts_while_reported_postgres() {
    stray_lease_counts_while_reported(databases::postgres().await).await;
}
