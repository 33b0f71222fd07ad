//! Tests of the progress of inputs in watches of workloads.

use rpc::pb::scheduler as pb;
use testing::databases::TestDatabase;

use crate::names;
use crate::support::{Gateway, Running, config, finish, registration, spec, start};

pub(crate) async fn watchers_see_progress_of_inputs(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let mut gateway = Gateway::connect(&scheduler, registration("one")).await.expect("welcome");
    let id = scheduler.submit(spec()).await.expect("accepted");
    let (lease, run) = gateway.run(id).await;
    let inputs = |bytes_done| {
        let input = |name: &str, bytes_done, bytes_total| pb::InputProgress {
            name: name.to_owned(),
            bytes_done,
            bytes_total,
            waits_for: String::new(),
            relayed: false,
        };
        vec![input("src", bytes_done, 100), input("tools", 0, 0)]
    };
    let waiting =
        || inputs(55).into_iter().map(|input| pb::InputProgress { waits_for: "one".to_owned(), ..input });
    // Progress of less than a tenth causes no event, regardless of the number of reports.
    for bytes_done in [0, 1, 2, 9, 9, 55, 57] {
        gateway.observe_inputs(&lease, inputs(bytes_done)).await;
    }
    let relayed = || inputs(57).into_iter().map(|input| pb::InputProgress { relayed: true, ..input });
    gateway.observe_inputs(&lease, relayed().collect()).await;
    // A new reason for waiting causes an event.
    for _ in 0..2 {
        gateway.observe_inputs(&lease, waiting().collect()).await;
    }
    gateway.observe_inputs(&lease, inputs(100)).await;
    let expected = [&["placed", "preparing"][..], &["materializing"; 5]].concat();
    assert_eq!(names(&scheduler.watch_some(id, 0, expected.len()).await), expected);
    start(&scheduler, &run.lease_token).await.expect("started");
    gateway.observe(&[(&lease, pb::LeasePhase::Running)]).await;
    scheduler.wait_for(id, pb::WorkloadState::Running).await;
    gateway.observe_inputs(&lease, inputs(20)).await;
    finish(&scheduler, &run.lease_token, 0).await.expect("finished");

    let events = scheduler.watch(id, 0).await;
    assert_eq!(
        names(&events)[expected.len()..],
        ["running", "finished"],
        "no progress is stored after the start"
    );
    let progress = events.into_iter().filter_map(|event| match event.event {
        Some(pb::watch_response::Event::Materializing(progress)) => Some(progress.inputs),
        _ => None,
    });
    assert_eq!(
        progress.collect::<Vec<_>>(),
        [inputs(0), inputs(55), relayed().collect(), waiting().collect(), inputs(100)]
    );
    scheduler.stop().await;
}

pub(crate) async fn progress_of_inputs_is_bounded(database: TestDatabase) {
    let scheduler = Running::start(config(&database)).await;
    let mut gateway = Gateway::connect(&scheduler, registration("one")).await.expect("welcome");
    let id = scheduler.submit(spec()).await.expect("accepted");
    let (lease, run) = gateway.run(id).await;
    for change in 0..250 {
        let input = |name: usize| pb::InputProgress {
            name: format!("unknown {name}"),
            waits_for: change.to_string(),
            ..pb::InputProgress::default()
        };
        gateway.observe_inputs(&lease, (0..10).map(input).collect()).await;
    }
    // Maximum number of stored progress events.
    scheduler.watch_some(id, 0, 2 + 200).await;
    start(&scheduler, &run.lease_token).await.expect("started");
    gateway.observe(&[(&lease, pb::LeasePhase::Running)]).await;
    finish(&scheduler, &run.lease_token, 0).await.expect("finished");
    let events = scheduler.watch(id, 0).await;
    let counts = events.iter().filter_map(|event| match &event.event {
        Some(pb::watch_response::Event::Materializing(progress)) => Some(progress.inputs.len()),
        _ => None,
    });
    let counts: Vec<_> = counts.collect();
    assert_eq!(counts.len(), 200);
    assert!(
        counts.iter().all(|inputs| *inputs <= 2),
        "inputs that the spec does not contain are limited: {counts:?}"
    );
    scheduler.stop().await;
}
