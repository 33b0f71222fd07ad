//! Resource caches: makers, claims, artifacts and lifetimes.

use std::time::Duration;

use artifact_store::Clock;
use domain::{ArtifactId, BuildId, ClaimId, WorkloadId};
use rpc::Reason;
use rpc::pb::artifacts as pb;
use rpc::pb::artifacts::find_or_create_resource_cache_response::Outcome;
use rpc::pb::artifacts::{ArtifactState, DryRun};
use testing::databases::TestDatabase;

use super::{Caller, HOUR, OTHER, by_build, by_workload, key};
use crate::{Suite, TEAM, assert_refused, on_both_databases};

on_both_databases! {
    one_of_concurrent_callers_makes_the_cache,
    maker_loses_claim_when_not_renewed,
    store_downtime_does_not_expire_claims,
    claim_makes_one_cache_of_one_artifact,
    resource_cache_is_deleted_after_ttl_without_use,
    used_resource_cache_is_not_deleted,
    workload_is_remembered_while_using_a_cache,
    cache_with_lost_bytes_is_made_again,
    artifact_is_not_marked_while_cache_takes_it,
}

async fn one_of_concurrent_callers_makes_the_cache(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let gateway = suite.gateway().await;
    let main = Caller::of(&suite, TEAM);
    for content in 0..5 {
        let (cache, given_up, _) = all_ask(&suite, content).await;
        // The maker stops. One of the waiting callers gets the claim.
        suite.clock.advance(Duration::from_secs(60));
        let (same, maker, asked) = all_ask(&suite, content).await;
        assert_eq!(same, cache);
        assert_ne!(maker, given_up);

        let artifact = suite.uploaded(&gateway, content).await;
        assert_refused(main.put(given_up, artifact).await, Reason::ClaimLost);
        main.put(maker, artifact).await.expect("put");
        for claim in asked {
            let (again, outcome) = main.ask(content, claim, None).await.expect("asked");
            let Outcome::Ready(location) = outcome else { panic!("it is ready: {outcome:?}") };
            assert_eq!((&again, &location.artifact_id), (&cache, &artifact.to_string()));
            assert_eq!(location.replicas.len(), 1);
        }
        assert_eq!(suite.kept_by(artifact).await, [format!("resource cache {cache}")]);
    }
    let listed = main.listed().await;
    let keys: Vec<_> = listed.iter().map(|cache| cache.key_digest[0]).collect();
    assert_eq!(keys, [0, 1, 2, 3, 4], "the oldest first");
    suite.stop().await;
}

/// Requests a missing cache twenty times at once. Returns the cache, the claim of the maker, and
/// all claims.
async fn all_ask(suite: &Suite, content: u64) -> (String, ClaimId, Vec<ClaimId>) {
    let mut asking = tokio::task::JoinSet::new();
    for _ in 0..20 {
        let (mut caches, claim) = (suite.caches(), ClaimId::new());
        let request = pb::FindOrCreateResourceCacheRequest {
            team: TEAM.to_owned(),
            key_digest: key(content).into(),
            claim_id: claim.to_string(),
            ..Default::default()
        };
        asking.spawn(async move {
            let answer = caches.find_or_create_resource_cache(request).await.expect("asked").into_inner();
            (claim, answer)
        });
    }
    let answers = asking.join_all().await;
    let is_maker =
        |answer: &pb::FindOrCreateResourceCacheResponse| matches!(answer.outcome, Some(Outcome::Claimed(_)));
    let makers: Vec<_> = answers.iter().filter(|(_, answer)| is_maker(answer)).collect();
    let [(maker, made)] = makers[..] else { panic!("{} make it", makers.len()) };
    for (claim, answer) in &answers {
        assert_eq!(answer.cache_id, made.cache_id);
        let (Some(Outcome::Claimed(claimed)) | Some(Outcome::InProgress(claimed))) = &answer.outcome else {
            panic!("nothing is ready: {claim} got {answer:?}");
        };
        assert_eq!(claimed.claim_id, maker.to_string());
        assert_eq!(claimed.term, Some(rpc::duration(Duration::from_secs(60))));
    }
    (made.cache_id.clone(), *maker, answers.iter().map(|(claim, _)| *claim).collect())
}

async fn maker_loses_claim_when_not_renewed(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let gateway = suite.gateway().await;
    let main = Caller::of(&suite, TEAM);
    let (first, second) = (ClaimId::new(), ClaimId::new());
    let artifact = suite.uploaded(&gateway, 1).await;
    let yours = async |claim| matches!(main.ask(1, claim, None).await.expect("asked").1, Outcome::Claimed(_));
    assert!(yours(first).await);
    assert!(yours(first).await, "asked again");
    suite.clock.advance(Duration::from_secs(40));
    main.renew(first).await.expect("it is active");
    suite.clock.advance(Duration::from_secs(59));
    assert!(!yours(second).await, "the first goes on");

    suite.clock.advance(Duration::from_secs(1));
    assert_refused(main.renew(first).await, Reason::ClaimLost);
    assert_refused(main.put(first, artifact).await, Reason::ClaimLost);
    assert!(yours(second).await, "it is handed on");
    assert_refused(main.renew(first).await, Reason::ClaimLost);
    assert_refused(main.put(first, artifact).await, Reason::ClaimLost);
    assert_eq!(suite.kept_by(artifact).await, ["no owner: deleted when it is old"]);
    for _ in 0..2 {
        main.put(second, artifact).await.expect("put");
        main.renew(second).await.expect("nothing to renew any more");
    }
    assert_refused(main.put(first, artifact).await, Reason::ClaimLost);

    // A cache that is never made is forgotten, with its waiting user.
    let (third, waits) = (ClaimId::new(), WorkloadId::new());
    main.ask(2, third, Some(by_workload(waits))).await.expect("asked");
    suite.clock.advance(Duration::from_secs(59));
    suite.collect(DryRun::Off).await;
    assert_eq!(main.listed().await.len(), 2);
    suite.clock.advance(Duration::from_secs(1));
    suite.collect(DryRun::Off).await;
    let listed = main.listed().await;
    assert_eq!((listed.len(), listed[0].claim_id.clone()), (1, second.to_string()));
    assert_refused(main.put(third, artifact).await, Reason::ClaimLost);
    suite.stop().await;
}

async fn store_downtime_does_not_expire_claims(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let (first, second) = (ClaimId::new(), ClaimId::new());
    Caller::of(&suite, TEAM).ask(1, first, None).await.expect("asked");
    let now = suite.clock.now();
    let late = |config: &mut artifact_store::Config| config.clock = Clock::movable(now + HOUR);
    let suite = Suite::start_with(suite.stop().await, late).await;
    let main = Caller::of(&suite, TEAM);
    let asked = async || main.ask(1, second, None).await.expect("asked").1;
    assert!(matches!(asked().await, Outcome::InProgress(_)), "the first has a full term");
    suite.clock.advance(Duration::from_secs(59));
    suite.collect(DryRun::Off).await;
    main.renew(first).await.expect("it is active");
    suite.clock.advance(Duration::from_secs(60));
    assert!(matches!(asked().await, Outcome::Claimed(_)));
    suite.stop().await;
}

async fn claim_makes_one_cache_of_one_artifact(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let gateway = suite.gateway().await;
    let (main, other) = (Caller::of(&suite, TEAM), Caller::of(&suite, OTHER));
    let claim = ClaimId::new();
    let (one, two) = (suite.uploaded(&gateway, 1).await, suite.uploaded(&gateway, 2).await);
    let open = ArtifactId::new();
    suite.create(open, None).await.expect("created");
    main.ask(1, claim, None).await.expect("asked");
    assert_refused(main.ask(2, claim, None).await, Reason::InvalidField);
    assert_refused(other.ask(1, claim, None).await, Reason::InvalidField);

    for artifact in [open, ArtifactId::new()] {
        assert_refused(main.put(claim, artifact).await, Reason::ArtifactNotFound);
    }
    assert_refused(other.put(claim, one).await, Reason::ClaimLost);
    assert_refused(other.renew(claim).await, Reason::ClaimLost);
    let of_other = ClaimId::new();
    other.ask(1, of_other, None).await.expect("asked");
    assert_refused(other.put(of_other, one).await, Reason::ArtifactNotFound);
    main.put(claim, one).await.expect("put");
    assert_refused(main.put(claim, two).await, Reason::ClaimLost);
    assert_eq!(suite.kept_by(two).await, ["no owner: deleted when it is old"]);

    for (team, key_digest, claim_id) in [
        ("", key(3), claim.to_string()),
        (TEAM, vec![1; 31], claim.to_string()),
        (TEAM, key(3), String::new()),
    ] {
        let team = team.to_owned();
        let request = pb::FindOrCreateResourceCacheRequest {
            team,
            key_digest: key_digest.into(),
            claim_id,
            ..Default::default()
        };
        let refused = suite.caches().find_or_create_resource_cache(request).await;
        assert_refused(refused.map_err(rpc::Refusal::from), Reason::InvalidField);
    }
    assert_eq!(main.listed().await.len(), 1);
    suite.stop().await;
}

async fn resource_cache_is_deleted_after_ttl_without_use(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let gateway = suite.gateway().await;
    let main = Caller::of(&suite, TEAM);
    let (build, of_build, workload) = (BuildId::new(), WorkloadId::new(), WorkloadId::new());
    suite.put_build(build, of_build, None).await.expect("put");
    suite.pin(of_build, &[], Some(build)).await.expect("bound");
    let (used, unused) = (suite.uploaded(&gateway, 1).await, suite.uploaded(&gateway, 2).await);
    let cache = main.make(1, used).await;
    main.make(2, unused).await;
    main.use_it(&cache, by_workload(workload)).await.expect("used");
    assert!(main.ready(1, Some(by_build(build))).await.is_some());
    assert!(main.ready(1, Some(by_build(build))).await.is_some(), "used again");

    // No call ends the use.
    suite.clock.advance(23 * HOUR);
    assert_eq!(suite.collect(DryRun::Off).await, []);
    suite.clock.advance(2 * HOUR);
    let gone = suite.collect(DryRun::Off).await;
    assert_eq!(gone.len(), 2, "an artifact and its replica: {gone:?}");
    assert!(
        gone.iter().any(|gone| gone.id == unused.to_string() && gone.reason.contains("let go")),
        "{gone:?}"
    );
    suite.settle(workload, None, &[], None).await.expect("settled");
    suite.clock.advance(30 * HOUR);
    assert_eq!(suite.collect(DryRun::Off).await, [], "the build uses it");

    let ended = suite.clock.now();
    suite.settle(of_build, None, &[], Some(build)).await.expect("settled");
    for _ in 0..23 {
        suite.clock.advance(HOUR);
        assert_eq!(
            suite.collect(DryRun::Off).await,
            [],
            "{} s after",
            suite.clock.now().since(ended).as_secs()
        );
    }
    assert_eq!(suite.kept_by(used).await, [format!("resource cache {cache}")]);
    suite.clock.advance(HOUR);
    assert_eq!(suite.collect(DryRun::Off).await.len(), 2);
    assert_eq!(suite.state(used).await, ArtifactState::Deleting);
    assert_eq!(main.listed().await, []);
    assert_refused(main.use_it(&cache, by_workload(WorkloadId::new())).await, Reason::CacheNotFound);
    assert!(main.ready(1, None).await.is_none(), "it is to be made again");
    suite.stop().await;
}

async fn used_resource_cache_is_not_deleted(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let gateway = suite.gateway().await;
    let main = Caller::of(&suite, TEAM);
    let (build, of_build) = (BuildId::new(), WorkloadId::new());
    let (one, two) = (WorkloadId::new(), WorkloadId::new());
    suite.put_build(build, of_build, None).await.expect("put");
    let artifact = suite.uploaded(&gateway, 1).await;
    let cache = main.make(1, artifact).await;
    main.use_it(&cache, by_build(build)).await.expect("used");
    for workload in [one, two] {
        main.use_it(&cache, by_workload(workload)).await.expect("used");
    }

    assert_refused(main.delete(&cache).await, Reason::CacheInUse);
    suite.settle(one, None, &[], None).await.expect("settled");
    assert_refused(main.delete(&cache).await, Reason::CacheInUse);
    suite.delete_build(build).await.expect("deleted");
    assert_refused(main.delete(&cache).await, Reason::CacheInUse);
    for _ in 0..2 {
        main.release(&cache, by_workload(two)).await.expect("released");
    }
    // An ended user cannot use a cache.
    assert_refused(main.use_it(&cache, by_workload(one)).await, Reason::HolderSettled);
    assert_refused(main.use_it(&cache, by_build(build)).await, Reason::OwnerEnded);
    assert_refused(main.ask(1, ClaimId::new(), Some(by_build(build))).await, Reason::OwnerEnded);
    assert_refused(main.use_it(&cache, pb::CacheUser::default()).await, Reason::InvalidField);
    suite.collect(DryRun::Off).await;
    assert_eq!(suite.state(artifact).await, ArtifactState::Sealed);

    // A pinned artifact stays without the cache.
    let pins = WorkloadId::new();
    suite.pin(pins, &[artifact], None).await.expect("pinned");
    main.delete(&cache).await.expect("deleted");
    assert_refused(main.delete(&cache).await, Reason::CacheNotFound);
    assert_eq!(main.located(&[&cache]).await, []);
    assert_eq!(suite.collect(DryRun::Off).await, []);
    assert_eq!(suite.kept_by(artifact).await, [format!("pinned by {pins}")]);
    suite.settle(pins, None, &[], None).await.expect("settled");
    assert_eq!(suite.collect(DryRun::Off).await.len(), 2, "the artifact and its replica");

    // The claim of a deleted cache is lost.
    let claim = ClaimId::new();
    let (cache, _) = main.ask(2, claim, None).await.expect("asked");
    main.delete(&cache).await.expect("deleted");
    assert_refused(main.renew(claim).await, Reason::ClaimLost);
    suite.stop().await;
}

async fn workload_is_remembered_while_using_a_cache(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let gateway = suite.gateway().await;
    let main = Caller::of(&suite, TEAM);
    let workload = WorkloadId::new();
    let artifact = suite.uploaded(&gateway, 1).await;
    let cache = main.make(1, artifact).await;
    main.use_it(&cache, by_workload(workload)).await.expect("used");
    let listed = async || {
        let page = suite.pins().list_pins(pb::ListPinsRequest::default()).await.expect("listed");
        page.into_inner().holders.into_iter().map(|holder| holder.holder_id).collect::<Vec<_>>()
    };
    for _ in 0..3 {
        suite.clock.advance(49 * HOUR);
        assert_eq!(suite.collect(DryRun::Off).await, []);
        // Needed for reconciliation: no other call would end it.
        assert_eq!(listed().await, [workload.to_string()]);
    }
    suite.settle(workload, None, &[], None).await.expect("settled");
    assert_eq!(listed().await, [] as [String; 0]);
    suite.clock.advance(25 * HOUR);
    assert_eq!(suite.collect(DryRun::Off).await.len(), 2, "the artifact and its replica");
    suite.stop().await;
}

async fn cache_with_lost_bytes_is_made_again(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let (there, here) = (suite.gateway().await, suite.gateway().await);
    let main = Caller::of(&suite, TEAM);
    let artifact = suite.uploaded(&there, 1).await;
    let cache = main.make(1, artifact).await;
    assert_eq!(main.located(&[&cache]).await, [(cache.clone(), artifact.to_string())]);
    there.report(&[], &[]).await.expect("reported");
    assert_eq!(main.located(&[&cache]).await, []);

    let claim = ClaimId::new();
    let (again, outcome) = main.ask(1, claim, None).await.expect("asked");
    assert!(matches!(outcome, Outcome::Claimed(_)), "{outcome:?}");
    assert_eq!(again, cache);
    suite.collect(DryRun::Off).await;
    assert_eq!(suite.state(artifact).await, ArtifactState::Deleting);
    let again = suite.uploaded(&here, 2).await;
    main.put(claim, again).await.expect("put");
    assert_eq!(main.ready(1, None).await.map(|location| location.artifact_id), Some(again.to_string()));
    suite.stop().await;
}

async fn artifact_is_not_marked_while_cache_takes_it(database: TestDatabase) {
    let suite = Suite::start(database).await;
    let gateway = suite.gateway().await;
    let main = Caller::of(&suite, TEAM);
    for round in 0..20 {
        let artifacts = [suite.uploaded(&gateway, round).await, suite.uploaded(&gateway, round + 100).await];
        suite.clock.advance(13 * HOUR);
        let claim = ClaimId::new();
        main.ask(round, claim, None).await.expect("asked");
        let (task, _) = main.task("job", &round.to_string(), None).await.expect("asked");
        // A round takes some time before it marks artifacts. The delay varies.
        let a_while = || async {
            for _ in 0..round % 6 {
                suite.get(artifacts[0]).await.ok();
            }
        };
        let put = async {
            a_while().await;
            main.put(claim, artifacts[0]).await.is_ok()
        };
        let publish = async {
            a_while().await;
            main.publish(&task, artifacts[1]).await.is_ok()
        };
        let (_, put, published) = tokio::join!(suite.collect_beside_others(), put, publish);
        suite.collect(DryRun::Off).await;
        for (artifact, owned) in artifacts.into_iter().zip([put, published]) {
            let expected = if owned { ArtifactState::Sealed } else { ArtifactState::Deleting };
            assert_eq!(suite.state(artifact).await, expected);
        }
    }
    suite.stop().await;
}
