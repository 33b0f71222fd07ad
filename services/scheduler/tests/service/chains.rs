//! Tests of the placement strategies: which chain ranks the workers of which request.

use std::collections::BTreeMap;

use domain::WorkerId;
use rpc::pb::artifacts::FindOrCreateTaskCacheRequest;
use rpc::pb::artifacts::caches_client::CachesClient;
use rpc::pb::scheduler as pb;
use scheduler::{Chain, Chains, Config};
use testing::databases::TestDatabase;

use crate::explain::explain_spec;
use crate::leases::{of_kind, task};
use crate::places::{place, release};
use crate::store::Place;
use crate::support::{Gateway, Running, config, registration, spec, until};

/// Connects a worker without limits.
async fn connect(scheduler: &Running, name: &str) -> Gateway {
    let mut registration = registration(name);
    registration.capacity = None;
    registration.labels.as_mut().expect("labels").image_kinds =
        vec!["host".to_owned(), "artifact".to_owned()];
    Gateway::connect(scheduler, registration).await.expect("welcome")
}

/// Connects three workers. Each is the best choice of exactly one chain.
async fn connect_best_per_chain(scheduler: &Running) -> [Gateway; 3] {
    let [tasks, containers, volumes] = ["tasks", "containers", "volumes"];
    let gateways = [
        connect(scheduler, tasks).await,
        connect(scheduler, containers).await,
        connect(scheduler, volumes).await,
    ];
    for gateway in &gateways[1..] {
        for _ in 0..3 {
            let there =
                pb::PlaceRequest { prefer_workers: vec![gateway.welcome.worker_id.clone()], ..task() };
            place(scheduler, there).await.expect("granted");
        }
    }
    // Active tasks also count as containers and volumes.
    let kept = [(tasks, 10, 10), (containers, 2, 10), (volumes, 10, 2)];
    let expected = BTreeMap::from([(tasks, 10), (containers, 13), (volumes, 5)]);
    until("the scheduler knows the containers and volumes", async || {
        for (gateway, (_, containers, volumes)) in gateways.iter().zip(kept) {
            gateway.observe_kept(containers, volumes).await;
        }
        let explained = explain_spec(scheduler, spec()).await;
        let scores = explained.workers.iter().map(|worker| {
            let [score] = worker.scores.as_slice() else { panic!("{worker:?}") };
            assert_eq!(score.strategy, "limit-active-volumes");
            (worker.worker_name.as_str(), score.value)
        });
        (scores.collect::<BTreeMap<_, _>>() == expected).then_some(())
    })
    .await;
    gateways
}

pub(crate) async fn strategy_chain_depends_on_kind_and_inputs(database: TestDatabase) {
    let here = Place::new();
    let store = here.start().await;
    let chain = |text: &str| text.parse::<Chain>().expect("a chain");
    let chains = Chains {
        builds: chain("limit-active-tasks"),
        without_inputs: chain("limit-active-volumes"),
        checks: chain("limit-active-containers"),
    };
    let config = Config { artifact_store: here.endpoint(), chains, ..config(&database) };
    let scheduler = Running::start(config).await;
    let _gateways = connect_best_per_chain(&scheduler).await;
    let artifact = until("the store takes an upload", async || here.upload_to(WorkerId::new()).await.ok());
    let artifact = artifact.await.to_string();
    let cache = FindOrCreateTaskCacheRequest {
        team: "main".to_owned(),
        job: "job".to_owned(),
        step: "step".to_owned(),
        path: "/cache".to_owned(),
        ttl: None,
    };
    let cache = CachesClient::new(here.peer()).find_or_create_task_cache(cache).await.expect("asked");
    let cache = cache.into_inner().cache_id;

    for kind in [
        pb::PlacementKind::Task,
        pb::PlacementKind::Get,
        pb::PlacementKind::Put,
        pb::PlacementKind::Service,
        pb::PlacementKind::Transfer,
        pb::PlacementKind::Check,
    ] {
        let [with, without] = match kind {
            pb::PlacementKind::Check => ["containers", "containers"],
            _ => ["tasks", "volumes"],
        };
        let plain = of_kind(kind);
        let of_artifact = pb::PlaceRequest { artifact_ids: vec![artifact.clone()], ..of_kind(kind) };
        let of_cache = pb::PlaceRequest { task_cache_ids: vec![cache.clone()], ..of_kind(kind) };
        for (request, expected) in [(plain, without), (of_artifact, with), (of_cache, with)] {
            let placed = place(&scheduler, request.clone()).await.expect("granted");
            assert_eq!(placed.worker_name, expected, "{request:?}");
            release(&scheduler, &placed.lease_token).await;
        }
    }

    let input = pb::Input {
        name: "in".to_owned(),
        artifact_id: artifact.clone(),
        path: b"".as_slice().into(),
        access: pb::Access::ReadOnly.into(),
    };
    let mount = pb::CacheMount { task_cache_id: cache, path: b"/cache".as_slice().into() };
    let image = pb::Image { source: Some(pb::image::Source::ArtifactId(artifact)), entrypoint: None };
    let of_kind = |kind: pb::WorkloadKind, spec| pb::WorkloadSpec { kind: kind.into(), ..spec };
    let with_input = pb::WorkloadSpec { inputs: vec![input.clone()], ..spec() };
    for (spec, expected) in [
        (spec(), "volumes"),
        (of_kind(pb::WorkloadKind::Get, spec()), "volumes"),
        (of_kind(pb::WorkloadKind::Put, with_input.clone()), "tasks"),
        (of_kind(pb::WorkloadKind::Check, spec()), "containers"),
        (of_kind(pb::WorkloadKind::Check, with_input), "containers"),
        (pb::WorkloadSpec { inputs: vec![input], ..spec() }, "tasks"),
        (pb::WorkloadSpec { caches: vec![mount], ..spec() }, "tasks"),
        (pb::WorkloadSpec { image: Some(image), ..spec() }, "tasks"),
    ] {
        let best = explain_spec(&scheduler, spec.clone()).await.workers.swap_remove(0);
        assert_eq!(best.worker_name, expected, "{spec:?}");
        let id = scheduler.submit(spec.clone()).await.expect("accepted");
        let placed = until("the workload is placed", async || scheduler.get(id).await.location).await;
        assert_eq!(placed.worker_name, expected, "{spec:?}");
    }
    store.stop().await;
    scheduler.stop().await;
}
