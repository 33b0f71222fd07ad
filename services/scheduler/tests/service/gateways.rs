//! Tests of the connections of gateways: which gateway is responsible for a worker, and which
//! reports count.

use std::time::Duration;

use domain::GatewayInstance;
use rpc::Reason;
use rpc::pb::scheduler as pb;
use testing::databases::TestDatabase;

use crate::config_with_limits;
use crate::support::{Gateway, Running, config, registration, spec, until, within};

pub(crate) async fn worker_has_one_gateway_at_a_time(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let first = registration("one");
    let gateway = Gateway::connect(&scheduler, first.clone()).await.expect("welcome");
    let (worker, session) = (gateway.welcome.worker_id.clone(), gateway.welcome.session);
    let credential = gateway.welcome.session_credential.clone();

    let standby = pb::Registration { gateway_instance: GatewayInstance::new().to_string(), ..first.clone() };
    let refused =
        Gateway::connect(&scheduler, standby.clone()).await.err().expect("the worker has a gateway");
    assert!(refused.is(Reason::AlreadyAttended), "{refused}");
    let ended_instance = GatewayInstance::new().to_string();
    let wrong = pb::Registration { ended_instance, ..standby.clone() };
    let refused = Gateway::connect(&scheduler, wrong).await.err().expect("another instance has ended");
    assert!(refused.is(Reason::AlreadyAttended), "{refused}");

    // The gateway reconnects before its first stream ends.
    let again = pb::Registration { session_credential: credential.clone(), ..first.clone() };
    let second = Gateway::connect(&scheduler, again.clone()).await.expect("reconnected");
    assert_eq!(second.welcome.session, session);
    gateway.leave().await;
    assert_eq!(scheduler.worker("one").await.state(), pb::WorkerState::Running);
    second.leave().await;
    assert_eq!(scheduler.worker("one").await.state(), pb::WorkerState::Stalled);

    let gateway = Gateway::connect(&scheduler, standby).await.expect("the standby takes over");
    assert_eq!(gateway.welcome.worker_id, worker);
    assert!(gateway.welcome.session > session);
    let refused = Gateway::connect(&scheduler, again).await.err().expect("the gateway was superseded");
    assert!(refused.is(Reason::StaleSession), "{refused}");
    scheduler.stop().await;
}

pub(crate) async fn gateway_that_has_ended_is_not_waited_for(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let first = registration("one");
    let gateway = Gateway::connect(&scheduler, first.clone()).await.expect("welcome");
    let next = pb::Registration {
        gateway_instance: GatewayInstance::new().to_string(),
        ended_instance: first.gateway_instance.clone(),
        ..first
    };
    let second = Gateway::connect(&scheduler, next).await.expect("the next gateway takes over");
    assert_eq!(second.welcome.worker_id, gateway.welcome.worker_id);
    assert!(second.welcome.session > gateway.welcome.session);
    scheduler.stop().await;
}

pub(crate) async fn dropped_call_releases_worker(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let first = registration("one");
    let gateway = Gateway::connect(&scheduler, first.clone()).await.expect("welcome");
    let session = gateway.welcome.session;
    // tonic reports a dropped call like a call that ended, so the scheduler treats the gateway as
    // departed.
    drop(gateway);
    let standby = pb::Registration { gateway_instance: GatewayInstance::new().to_string(), ..first };
    let gateway =
        until("the standby takes over", async || Gateway::connect(&scheduler, standby.clone()).await.ok())
            .await;
    assert!(gateway.welcome.session > session);
    scheduler.stop().await;
}

pub(crate) async fn only_received_reports_are_acknowledged(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let mut gateway = Gateway::connect(&scheduler, registration("one")).await.expect("welcome");
    assert_eq!(gateway.desired.observed_number, 0, "no report was sent");
    // The scheduler sends heartbeats without a report of the gateway.
    for _ in 0..5 {
        within("a heartbeat", gateway.next()).await.expect("the stream is open");
        assert_eq!(gateway.desired.observed_number, 0);
    }
    gateway.observe(&[]).await;
    within("the acknowledgement of the report", async {
        while gateway.desired.observed_number == 0 {
            gateway.next().await.expect("the stream is open");
        }
    })
    .await;
    assert_eq!(gateway.desired.observed_number, 1);
    for _ in 0..5 {
        within("a heartbeat", gateway.next()).await.expect("the stream is open");
        assert_eq!(gateway.desired.observed_number, 1, "no further report was sent");
    }
    scheduler.stop().await;
}

pub(crate) async fn silent_gateway_is_superseded(database: TestDatabase) {
    let scheduler =
        Running::start(config_with_limits(&database, Duration::from_millis(400), Duration::from_secs(3600)))
            .await;
    let first = registration("one");
    let mut silent = Gateway::connect(&scheduler, first.clone()).await.expect("welcome");
    let standby = pb::Registration { gateway_instance: GatewayInstance::new().to_string(), ..first };
    let gateway = within("the standby takes over", async {
        loop {
            match Gateway::connect(&scheduler, standby.clone()).await {
                Ok(gateway) => return gateway,
                Err(refused) => assert!(refused.is(Reason::AlreadyAttended), "{refused}"),
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await;
    assert!(gateway.welcome.session > silent.welcome.session);
    let refused = within("the stream ends", async {
        loop {
            if let Err(refused) = silent.next().await {
                return refused;
            }
        }
    })
    .await;
    assert!(refused.is(Reason::StaleSession), "{refused}");
    scheduler.stop().await;
}

/// Number of specs of 1 MiB that exceed the maximum size of one message.
const LARGE: u32 = 9;

pub(crate) async fn large_specs_are_sent_in_several_messages(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let capacity = pb::Capacity { max_tasks: LARGE, disk_bytes: 1 << 30, ..pb::Capacity::default() };
    let first = pb::Registration { capacity: Some(capacity), ..registration("one") };
    let mut gateway = Gateway::connect(&scheduler, first.clone()).await.expect("welcome");
    let value = vec![b'x'; (1 << 20) - 1000];
    let variable = pb::EnvironmentVariable { name: b"LARGE".as_slice().into(), value: value.into() };
    let mut workloads = Vec::new();
    for _ in 0..LARGE {
        let large = pb::WorkloadSpec { environment: vec![variable.clone()], ..spec() };
        workloads.push(scheduler.submit(large).await.expect("accepted"));
    }
    for workload in &workloads {
        gateway.run(*workload).await;
    }

    // A second stream receives the full desired state again, in parts. Reports in between end no
    // lease.
    let again = pb::Registration { session_credential: gateway.welcome.session_credential.clone(), ..first };
    let mut gateway = Gateway::connect(&scheduler, again).await.expect("reconnected");
    let unsent_wishes =
        |desired: &pb::Desired| desired.leases.iter().filter(|lease| lease.action.is_none()).count();
    assert_eq!((gateway.desired.leases.len(), gateway.desired.generation), (workloads.len(), 0));
    assert!(unsent_wishes(&gateway.desired) > 0, "the first message has no room for all");
    gateway.observe(&[]).await;
    let mut leases = Vec::new();
    for workload in &workloads {
        leases.push(gateway.run(*workload).await.0);
    }
    within("the full desired state", async {
        while gateway.desired.generation == 0 {
            gateway.next().await.expect("the stream is open");
        }
    })
    .await;
    assert_eq!(unsent_wishes(&gateway.desired), 0);
    let preparing: Vec<_> = leases.iter().map(|lease| (lease.as_str(), pb::LeasePhase::Preparing)).collect();
    gateway.observe(&preparing).await;

    // From now on messages contain the leases without their specs.
    let heard = gateway.desired.observed_number;
    within("an acknowledgement", async {
        while gateway.desired.observed_number == heard {
            gateway.observe(&preparing).await;
            gateway.next().await.expect("the stream is open");
        }
    })
    .await;
    assert_eq!((gateway.desired.leases.len(), gateway.wish_count), (workloads.len(), 0));
    assert_eq!(scheduler.worker("one").await.active_tasks, LARGE);
    scheduler.stop().await;
}
