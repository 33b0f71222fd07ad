//! Tests of placement, compared with a plain implementation of its rules that checks every worker.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use domain::worker::{Capacity, Incarnation, Labels, ResourceType};
use domain::workload::{Failure, FailureReason};
use domain::{Timestamp, WorkerId};
use rand::rngs::StdRng;
use rand::seq::{IndexedRandom, SliceRandom};
use rand::{RngExt, SeedableRng};
use uuid::Uuid;

use super::types::Process;
use super::*;

mod random;
pub(crate) mod reference;

pub(crate) use self::random::Dice;

fn labels() -> Labels {
    Labels {
        platform: "linux".to_owned(),
        tags: vec![],
        team: None,
        image_kinds: vec!["host".to_owned()],
        capabilities: vec![],
        resource_types: vec![],
        zone: String::new(),
    }
}

fn worker(name: &str) -> Worker {
    Worker {
        id: WorkerId::new(),
        name: name.to_owned(),
        endpoint: "http://127.0.0.1:1".to_owned(),
        incarnation: Incarnation(1),
        desired: Desired::Run,
        state: State::Running,
        awaited: false,
        just_lost: false,
        gone: false,
        unsupported_versions: vec![],
        trust: Trust::Full,
        labels: Arc::new(labels()),
        capacity: Capacity { max_tasks: Some(2), ..Capacity::default() },
        load: Load::default(),
        reserved_for: None,
    }
}

fn with_labels(name: &str, change: impl FnOnce(&mut Labels)) -> Worker {
    let mut labels = labels();
    change(&mut labels);
    Worker { labels: Arc::new(labels), ..worker(name) }
}

fn busy(tasks: u32, worker: Worker) -> Worker {
    Worker { load: Load { tasks, ..Load::default() }, ..worker }
}

/// Returns failures of several teams, which count for every team.
fn failing(why: &str) -> Failing {
    Failing { why: why.to_owned(), team: None }
}

fn failure() -> Failure {
    Failure { reason: FailureReason::StartFailed, message: "no".to_owned() }
}

fn shape() -> Shape {
    Shape {
        team: "main".to_owned(),
        platform: "linux".to_owned(),
        tags: vec![],
        process: Some(Process { image_kind: "host".into(), resource_type: None, capabilities: vec![] }),
        requests: Resources::default(),
        purpose: Purpose::Build,
    }
}

fn demand() -> Demand {
    shape().requested_by(Uuid::now_v7())
}

pub(crate) fn index(workers: impl IntoIterator<Item = Worker>) -> Index {
    let mut index = Index::new(Chains::default(), BTreeSet::new());
    workers.into_iter().for_each(|worker| index.put(worker));
    index
}

fn placed(index: &mut Index, demand: &Demand, locations: &[Location]) -> Option<String> {
    match index.choose(demand, locations) {
        Choice::Placed(placement) => index.get(placement.worker).map(|worker| worker.name.clone()),
        Choice::NotNow | Choice::Never => None,
    }
}

fn at(size_bytes: u64, workers: &[&Worker]) -> Location {
    Location { size_bytes, workers: workers.iter().map(|worker| worker.id).collect() }
}

#[test]
fn bytes_decide_then_load() {
    let (near, far, idle) = (busy(1, worker("near")), busy(1, worker("far")), worker("idle"));
    let mut index = index([near.clone(), far.clone(), idle]);
    let on = |index: &mut Index, locations: &[Location]| placed(index, &demand(), locations);
    assert_eq!(on(&mut index, &[]).as_deref(), Some("idle"));
    assert_eq!(on(&mut index, &[at(10, &[&near])]).as_deref(), Some("near"));
    assert_eq!(on(&mut index, &[at(10, &[&near]), at(11, &[&far])]).as_deref(), Some("far"));
}

#[test]
fn worker_out_of_contact_since_start_ranks_last() {
    let there = busy(1, worker("there"));
    let awaited = Worker { awaited: true, ..worker("awaited") };
    let mut index = index([awaited.clone(), there]);
    assert_eq!(placed(&mut index, &demand(), &[at(10, &[&awaited])]).as_deref(), Some("there"));
}

#[test]
fn own_workers_of_team_rank_first_or_exclusively() {
    let own = with_labels("own", |labels| labels.team = Some("main".to_owned()));
    let mut of_both = index([busy(1, own.clone()), worker("global")]);
    assert_eq!(placed(&mut of_both, &demand(), &[]).as_deref(), Some("own"));

    let full = [busy(2, own), worker("global")];
    assert_eq!(placed(&mut index(full.clone()), &demand(), &[]).as_deref(), Some("global"));
    let mut keeps = Index::new(Chains::default(), BTreeSet::from(["main".to_owned()]));
    full.into_iter().for_each(|worker| keeps.put(worker));
    assert_eq!(keeps.choose(&demand(), &[]), Choice::NotNow);
    assert_eq!(
        keeps.refusals(&demand()).lines(),
        ["global: serves all teams, and this team uses only its own workers", "own: is full (2 of 2 tasks)"]
    );
}

#[test]
fn exclusive_team_does_not_wait_for_unfit_workers() {
    let mut own = with_labels("own", |labels| labels.team = Some("main".to_owned()));
    own.capacity.memory_bytes = Some(10);
    let mut index = Index::new(Chains::default(), BTreeSet::from(["main".to_owned()]));
    [own.clone(), worker("global")].into_iter().for_each(|worker| index.put(worker));
    assert_eq!(placed(&mut index, &demand(), &[]).as_deref(), Some("own"));
    let large = shape_with_memory(11).requested_by(Uuid::now_v7());
    let failed = demand().failed_on(vec![FailedWorker { worker: own.id, failure: failure() }]);
    for hopeless in [large, failed] {
        assert_eq!(index.choose(&hopeless, &[]), Choice::Never);
        assert_eq!(index.waits_for(&hopeless), "NEVER");
    }
    index.load(own.id, Load { tasks: 2, ..own.load });
    assert_eq!(index.choose(&demand(), &[]), Choice::NotNow, "only the load prevents a placement");
}

#[test]
fn worker_returns_all_refusals() {
    let mut one = worker("one");
    one.capacity = Capacity { max_tasks: Some(1), max_containers: Some(3), ..Capacity::default() };
    one.load = Load { tasks: 1, kept_containers: 4, ..Load::default() };
    one.reserved_for = Some(Uuid::from_u128(1));
    one.trust = Trust::OnProbation(failing("why"));
    let mut demand = demand().failed_on(vec![FailedWorker { worker: one.id, failure: failure() }]);
    demand.avoid.insert(one.id);
    let all = [
        Refusal::FailedWorker(failure()),
        Refusal::Avoided,
        Refusal::Quarantined("why".to_owned()),
        Refusal::Reserved,
        Refusal::Full { active: 1, max: 1 },
        Refusal::FullOfContainers { count: 5, max: 3 },
    ];
    assert_eq!(refusals(&demand, &one), all);
}

#[test]
fn probation_and_quarantine_share_a_group() {
    let reserved = |name: &str, trust: Trust| Worker { trust, ..busy(1, worker(name)) };
    let workers = [
        reserved("tried", Trust::OnProbation(failing("why"))),
        reserved("not", Trust::Quarantined(failing("why"))),
    ];
    let mut index = index(workers.clone());
    workers.iter().for_each(|worker| index.reserve(worker.id, Some(Uuid::from_u128(1))));
    let outlook = index.outlook(&demand(), &[], &DetailFilter::first(0), Timestamp(0));
    let groups: Vec<_> = outlook.groups.iter().map(|group| (group.count, &*group.refusals)).collect();
    assert_eq!(groups, [(2, &[Refusal::Quarantined("why".to_owned()), Refusal::Reserved][..])]);
}

#[test]
fn requested_amounts_limit_placement() {
    let mut small = worker("small");
    small.capacity = Capacity { memory_bytes: Some(10), ..small.capacity };
    let mut demand = demand();
    Arc::make_mut(&mut demand.shape).requests.memory_bytes = 6;
    assert_eq!(placed(&mut index([small.clone()]), &demand, &[]).as_deref(), Some("small"));
    small.load.reserved.memory_bytes = 5;
    let mut index = index([small]);
    assert_eq!(index.choose(&demand, &[]), Choice::NotNow);
    Arc::make_mut(&mut demand.shape).requests.memory_bytes = 11;
    assert_eq!(index.choose(&demand, &[]), Choice::Never);
    assert_eq!(
        index.refusals(&demand).lines(),
        ["small: has 10 bytes of memory in all, but 11 bytes of memory is requested"]
    );
}

#[test]
fn every_lasting_refusal_has_a_reason() {
    type Change = fn(&mut Worker, &mut Demand);
    fn change_labels(worker: &mut Worker, change: impl FnOnce(&mut Labels)) {
        change(Arc::make_mut(&mut worker.labels));
    }
    let cases: [(Change, Refusal); 11] = [
        (|w, _| w.state = State::Lost, Refusal::Lost),
        (|w, _| w.unsupported_versions = vec![7], Refusal::Incompatible(vec![7])),
        (
            |w, d| d.failed_on.push(FailedWorker { worker: w.id, failure: failure() }),
            Refusal::FailedWorker(failure()),
        ),
        (|w, _| w.desired = Desired::Retire, Refusal::Retiring),
        (
            |_, d| Arc::make_mut(&mut d.shape).platform = "darwin".to_owned(),
            Refusal::Platform("linux".to_owned()),
        ),
        (|w, _| change_labels(w, |l| l.team = Some("other".to_owned())), Refusal::Team),
        (
            |w, _| change_labels(w, |l| l.tags = vec!["gpu".to_owned()]),
            Refusal::OnlyTagged(vec!["gpu".to_owned()]),
        ),
        (|w, _| change_labels(w, |l| l.image_kinds.clear()), Refusal::ImageKind("host".into())),
        (
            |w, d| {
                let s3 = ResourceType { name: "s3".to_owned(), version: String::new() };
                change_labels(w, |l| l.resource_types = vec![s3]);
                if let Some(process) = &mut Arc::make_mut(&mut d.shape).process {
                    process.resource_type = Some("git".to_owned());
                }
            },
            Refusal::ResourceType("git".to_owned()),
        ),
        (
            |_, d| {
                if let Some(process) = &mut Arc::make_mut(&mut d.shape).process {
                    process.capabilities.push("privileged".into());
                }
            },
            Refusal::Capability("privileged".into()),
        ),
        (
            |w, d| {
                change_labels(w, |l| l.tags = vec!["gpu".to_owned()]);
                Arc::make_mut(&mut d.shape).tags = vec!["gpu".to_owned(), "big".to_owned()];
            },
            Refusal::MissingTags(vec!["big".to_owned()]),
        ),
    ];
    for (change, expected) in cases {
        let (mut worker, mut demand) = (busy(2, worker("w")), demand());
        change(&mut worker, &mut demand);
        let mut index = index([worker]);
        assert_eq!(index.choose(&demand, &[]), Choice::Never, "{expected:?}");
        assert_eq!(index.refusals(&demand).reasons(), [&expected]);
    }
}

#[test]
fn worker_is_quarantined_for_the_failing_team() {
    let of_main = || Failing { team: Some("main".to_owned()), ..failing("why") };
    let main = demand();
    let other = Shape { team: "other".to_owned(), ..Shape::clone(&main.shape) };
    let other = other.requested_by(Uuid::nil());
    for trust in [Trust::Quarantined(of_main()), Trust::OnProbation(of_main())] {
        let mut index = index([Worker { trust, ..busy(1, worker("one")) }]);
        assert_eq!(index.choose(&main, &[]), Choice::NotNow);
        assert!(placed(&mut index, &other, &[]).is_some(), "no attempt of this team failed");
    }
    for trust in [Trust::Quarantined(failing("why")), Trust::OnProbation(failing("why"))] {
        let mut index = index([Worker { trust, ..busy(1, worker("one")) }]);
        assert_eq!(index.choose(&other, &[]), Choice::NotNow, "attempts of several teams failed");
    }
}

#[test]
fn passing_refusals_make_the_request_wait() {
    let full = busy(2, worker("full"));
    let stalled = Worker { state: State::Stalled, ..worker("stalled") };
    let landing = Worker { desired: Desired::Cordon, ..worker("landing") };
    let quarantined = Worker { trust: Trust::Quarantined(failing("why")), ..worker("quarantined") };
    let on_probation = Worker { trust: Trust::OnProbation(failing("why")), ..worker("tried") };
    for worker in [full, stalled, landing, quarantined, busy(1, on_probation.clone())] {
        assert_eq!(index([worker]).choose(&demand(), &[]), Choice::NotNow);
    }
    assert!(placed(&mut index([on_probation]), &demand(), &[]).is_some(), "one task is tried");
}

#[test]
fn load_of_lost_worker_is_no_refusal() {
    let lost = Worker { state: State::Lost, just_lost: true, ..busy(2, worker("lost")) };
    let gone = Worker { gone: true, ..lost.clone() };
    let long_ago = Worker { just_lost: false, ..lost.clone() };
    let refusals_of = |worker: &Worker| refusals(&demand(), worker);
    assert_eq!(refusals_of(&lost), [Refusal::JustLost]);
    assert_eq!(refusals_of(&gone), [Refusal::Gone]);
    assert_eq!(refusals_of(&long_ago), [Refusal::Lost]);
    let large = shape_with_memory(11).requested_by(Uuid::now_v7());
    let mut small = gone;
    small.capacity.memory_bytes = Some(10);
    assert_eq!(refusals(&large, &small)[1..], [Refusal::Gone], "the total capacity still counts");
    assert_eq!(index([small]).choose(&large, &[]), Choice::Never);
}

#[test]
fn transfer_needs_no_slot_and_no_tag() {
    let full = busy(2, with_labels("w", |labels| labels.tags = vec!["gpu".to_owned()]));
    let mut transfer = demand();
    Arc::make_mut(&mut transfer.shape).process = None;
    assert_eq!(placed(&mut index([full]), &transfer, &[]).as_deref(), Some("w"));
}

#[test]
fn burst_is_spread_evenly() {
    let unlimited = Capacity { max_tasks: None, ..Capacity::default() };
    let mut index = index((0..20).map(|n| Worker { capacity: unlimited.clone(), ..worker(&n.to_string()) }));
    let mut random = Index::new(
        Chains { builds: "random".parse().expect("a chain"), ..Chains::default() },
        BTreeSet::new(),
    );
    index.workers().for_each(|worker| random.put(worker.clone()));
    for _ in 0..20_000 {
        for index in [&mut index, &mut random] {
            let Choice::Placed(placement) = index.choose(&demand(), &[]) else { panic!("placed") };
            let mut load = index.get(placement.worker).expect("known").load;
            load.tasks += 1;
            index.load(placement.worker, load);
        }
    }
    assert!(index.workers().all(|worker| worker.load.tasks == 1000), "equal counts by load");
    // The expected count is 1000 each. The standard deviation of a random choice among twenty is
    // 31.
    assert!(
        random.workers().all(|worker| worker.load.tasks.abs_diff(1000) < 200),
        "similar counts by random choice"
    );
}

/// Infeasible workers that are adjacent in the order must not give their share to the next one.
#[test]
fn share_of_infeasible_worker_is_spread_evenly() {
    for (all, short) in [(16_u32, 8), (40, 20), (40, 38)] {
        let room = |number: u32| if number < short { 1 } else { 1 << 40 };
        let workers = (0..all).map(|number| {
            let id = WorkerId::from_uuid(Uuid::from_u128(number.into()));
            let capacity =
                Capacity { memory_bytes: Some(room(number)), max_tasks: None, ..Capacity::default() };
            Worker { id, capacity, ..worker(&number.to_string()) }
        });
        let mut random = Index::new(
            Chains { builds: "random".parse().expect("a chain"), ..Chains::default() },
            BTreeSet::new(),
        );
        workers.for_each(|worker| random.put(worker));
        let requests = Resources { memory_bytes: 2, ..Resources::default() };
        let (each, mut chosen) = (1000, BTreeMap::<_, u32>::new());
        for _ in 0..each * (all - short) {
            let mut demand = demand();
            let shape = Shape { requests, ..(*demand.shape).clone() };
            demand.shape = Arc::new(shape);
            let Choice::Placed(placement) = random.choose(&demand, &[]) else { panic!("placed") };
            *chosen.entry(placement.worker).or_default() += 1;
        }
        assert_eq!(chosen.len(), usize::try_from(all - short).expect("few"));
        // The standard deviation of such a choice is at most 32.
        assert!(chosen.values().all(|times| times.abs_diff(each) < 200), "{all}, {short}: {chosen:?}");
    }
}

#[test]
fn choice_equals_that_of_the_reference() {
    let seed = testing::seeds::seed();
    eprintln!("GANTRY_SEED={seed}");
    let mut dice = Dice(StdRng::seed_from_u64(seed));
    let (mut placed, mut not_now, mut never, mut met) = (0, 0, 0, BTreeSet::new());
    for _ in 0..60 {
        let chains = Chains { builds: dice.chain(), without_inputs: dice.chain(), checks: dice.chain() };
        let names: BTreeSet<_> = dice.some(&[vec![], vec!["main".to_owned()]]).into_iter().collect();
        let count = dice.0.random_range(0..40);
        let mut workers = Vec::new();
        (0..count).for_each(|n| workers.push(dice.worker_like_some(n, &workers)));
        let mut index = Index::new(chains.clone(), names.clone());
        workers.iter().for_each(|worker| index.reserve(worker.id, worker.reserved_for));
        workers.iter().for_each(|worker| index.put(worker.clone()));
        let plain = Demand { only: None, avoid: BTreeSet::new(), failed_on: vec![], ..dice.demand(&workers) };
        for _ in 0..30 {
            // The known workers change in every possible way.
            if !workers.is_empty() {
                let one = dice.0.random_range(0..workers.len());
                match dice.0.random_range(0..5) {
                    0 => {
                        let gone = workers.swap_remove(one);
                        index.reserve(gone.id, None);
                        index.remove(gone.id);
                    }
                    1 => {
                        let Worker { id, name, reserved_for, .. } = workers[one].clone();
                        let changed = Worker { id, name, reserved_for, ..dice.worker(one) };
                        workers[one] = changed.clone();
                        index.put(Worker { reserved_for: None, ..changed });
                    }
                    2 => {
                        let reserved_for = dice.reservation();
                        workers[one].reserved_for = reserved_for;
                        index.reserve(workers[one].id, reserved_for);
                    }
                    _ => {
                        workers[one].load = dice.load();
                        index.load(workers[one].id, workers[one].load);
                    }
                }
            }
            assert_eq!(index.len(), workers.len());
            let demand = dice.demand(&workers);
            let locations = dice.locations(&workers);
            let chain = chains.of(demand.shape.purpose);

            let against = reference::against_each(&demand, &workers, &names);
            for worker in &workers {
                let (actual, alone) = (refusals(&demand, worker), reference::against(&demand, worker));
                assert!(alone.equals(&actual), "{actual:?} is not {alone:?}: {demand:?} {worker:?}");
                met.extend(actual.iter().map(Refusal::code));
                let (actual, alone) =
                    (standing_refusals(worker), reference::against(&reference::anything(worker), worker));
                assert!(alone.equals(&actual), "{actual:?} is not {alone:?} of {worker:?}");
            }
            let willing = |worker: &&Worker| against[&worker.id].is_nothing();
            let may_be_willing = workers.iter().any(|worker| against[&worker.id].may_pass());
            let standing = |worker: &Worker| reference::rank(chain, &demand, worker, &locations);
            let best = workers.iter().filter(willing).map(standing).min();

            let choice = index.choose(&demand, &locations);
            match (&choice, &best) {
                (Choice::Placed(placement), Some(best)) => {
                    let chosen = workers.iter().find(|worker| worker.id == placement.worker).expect("known");
                    assert!(willing(&chosen), "{:?} of {demand:?}", against[&chosen.id]);
                    assert_eq!(standing(chosen), *best, "{demand:?} {locations:?} {chain}");
                    placed += 1;
                }
                (Choice::NotNow, None) => {
                    assert!(workers.is_empty() || may_be_willing, "{demand:?}");
                    not_now += 1;
                }
                (Choice::Never, None) => {
                    assert!(!may_be_willing, "{demand:?}");
                    never += 1;
                }
                (choice, best) => panic!("{choice:?} where the best is {best:?}: {demand:?}"),
            }

            // The order of insertion does not matter.
            let mut shuffled = workers.clone();
            shuffled.shuffle(&mut dice.0);
            let mut other = Index::new(chains.clone(), names.clone());
            shuffled.iter().for_each(|worker| other.reserve(worker.id, worker.reserved_for));
            shuffled.iter().for_each(|worker| other.put(worker.clone()));
            assert_eq!(other.choose(&demand, &locations), choice);

            // Every refusing worker returns all of its refusals, and the ranking contains the
            // feasible workers.
            let refusing: Vec<_> = workers.iter().filter(|worker| !willing(worker)).collect();
            let outlook = index.outlook(&demand, &locations, &DetailFilter::first(usize::MAX), Timestamp(0));
            let gone = workers.iter().filter(|worker| worker.gone).count();
            assert_eq!((outlook.known, outlook.gone), (workers.len() - gone, gone));
            assert_eq!(outlook.willing, workers.len() - refusing.len());
            assert_eq!(outlook.opinions.len(), workers.len());
            let mut ranking = Vec::new();
            for opinion in &outlook.opinions {
                let worker = workers.iter().find(|worker| worker.id == opinion.worker).expect("known");
                let against = &against[&worker.id];
                match &opinion.answer {
                    Answer::Would(_) => {
                        assert!(against.is_nothing(), "{against:?}");
                        ranking.push(standing(worker));
                    }
                    Answer::WouldNot(actual) => {
                        assert!(
                            !actual.is_empty() && against.equals(actual),
                            "{actual:?} is not {against:?}"
                        );
                        met.extend(actual.iter().map(Refusal::code));
                    }
                }
            }
            assert!(ranking.is_sorted());
            assert_eq!(ranking.len(), outlook.willing);
            let refusing: Vec<_> =
                refusing.into_iter().map(|worker| (worker, &against[&worker.id])).collect();
            assert_grouped(&outlook.groups, &refusing);
            // A short outlook is a prefix of a long one.
            let few = index.outlook(&demand, &locations, &DetailFilter::first(3), Timestamp(0));
            assert_eq!(few.opinions, outlook.opinions[..few.opinions.len()]);
            assert_eq!(few.opinions.len(), workers.len().min(3));
            // A summary contains the first refusal of each worker, also if an earlier result for
            // the shape was cached.
            for demand in [&demand, &plain] {
                let against = reference::against_each(demand, &workers, &names);
                let first = |worker: &Worker| {
                    let kept_out = || against[&worker.id].passing.last() == Some(&Refusal::TeamKeepsToItsOwn);
                    let first = refusals(demand, worker).into_iter().next();
                    first.or_else(|| kept_out().then_some(Refusal::TeamKeepsToItsOwn))
                };
                let actual = workers.iter().filter_map(|worker| Some((worker.name.clone(), first(worker)?)));
                let expected = Refusals::of(actual);
                let grouped = index.refusals(demand);
                assert_eq!(
                    (grouped.count(), grouped.codes()),
                    (expected.count(), expected.codes()),
                    "{demand:?}"
                );
                if expected.count() <= 10 {
                    let sorted = |refusals: &Refusals| BTreeSet::from_iter(refusals.entries());
                    assert_eq!(sorted(&grouped), sorted(&expected), "a few refusals are listed individually");
                }
            }
        }
    }
    assert!(
        placed > 100 && not_now > 20 && never > 20,
        "{placed} {not_now} {never}: every result must occur"
    );
    assert_eq!(met, BTreeSet::from(CODES), "every refusal must occur");
}

/// Checks that workers with equal refusals form one group with the first of their names, and that
/// each group has the refusals of a member.
fn assert_grouped(groups: &[Group], refusing: &[(&Worker, &reference::Against)]) {
    let (are_many, mut alike) = reference::alike(refusing);
    let left = alike.len().saturating_sub(groups.len());
    assert!(left == 0 || groups.len() == 50, "{alike:?} {groups:?}");
    for group in groups {
        let actual: BTreeSet<_> =
            group.refusals.iter().map(|refusal| reference::shared_text(refusal, are_many)).collect();
        let names = alike.remove(&actual).unwrap_or_else(|| panic!("{actual:?} in one group alone"));
        assert_eq!(group.count, names.len(), "{actual:?}");
        assert!(group.names.iter().eq(names.iter().take(5)), "{group:?} {names:?}");
        let mut members = refusing.iter().filter(|(worker, _)| names.contains(worker.name.as_str()));
        assert!(are_many || members.any(|(_, against)| against.equals(&group.refusals)), "{group:?}");
    }
    assert_eq!(alike.len(), left);
    assert!(groups.is_sorted_by_key(|group| (!group.passes(), std::cmp::Reverse(group.count))));
}

/// Builds parts of these shapes. Parts with the same owner belong together.
pub(crate) fn parts(of: &[(Shape, &str)]) -> Vec<Part> {
    let part = |(shape, owner): &(Shape, &str)| Part {
        demand: Arc::new(shape.clone().requested_by(Uuid::now_v7())),
        owner: (*owner).to_owned(),
    };
    of.iter().map(part).collect()
}

pub(crate) fn shape_with_memory(memory_bytes: u64) -> Shape {
    Shape { requests: Resources { memory_bytes, ..Resources::default() }, ..shape() }
}

/// Returns a worker with 100 bytes of memory and 4 slots, of which `tasks` are in use.
pub(crate) fn with_memory(name: &str, tasks: u32, memory_bytes: u64) -> Worker {
    let mut worker = worker(name);
    worker.capacity = Capacity { max_tasks: Some(4), memory_bytes: Some(100), ..Capacity::default() };
    worker.load.tasks = tasks;
    worker.load.reserved.memory_bytes = memory_bytes;
    worker
}

fn kept(index: &mut Index, parts: &[Part], before: &[&str]) -> Vec<String> {
    let id = |name: &&str| index.workers().find(|worker| worker.name == **name).expect("known").id;
    let before = before.iter().map(id).collect();
    let chosen = index.choose_to_reserve(parts, &before, Some(&HashSet::new()));
    let mut names: Vec<_> = chosen.iter().map(|id| index.get(*id).expect("known").name.clone()).collect();
    names.sort();
    names
}

#[test]
fn worker_with_least_load_to_end_is_reserved() {
    let small = Worker {
        capacity: Capacity { memory_bytes: Some(60), ..Capacity::default() },
        ..with_memory("small", 0, 0)
    };
    let landing = Worker { desired: Desired::Cordon, ..with_memory("landing", 0, 0) };
    let mut index = index([
        with_memory("much", 1, 90),
        with_memory("little", 2, 50),
        with_memory("as-little", 3, 50),
        small,
        landing,
    ]);
    let large = parts(&[(shape_with_memory(80), "")]);
    assert_eq!(kept(&mut index, &large, &[]), ["little"], "equal memory, fewer tasks");
    assert_eq!(kept(&mut index, &large, &["much"]), ["much"], "a reserved worker stays reserved");
    assert_eq!(kept(&mut index, &large, &["small"]), ["little"], "unless the worker is unfit");
    assert_eq!(kept(&mut index, &parts(&[(shape(), "")]), &[]), [""; 0], "the next free slot suffices");
    assert_eq!(
        kept(&mut index, &parts(&[(shape_with_memory(101), "")]), &[]),
        [""; 0],
        "no worker is that large"
    );
    let mut only = parts(&[(shape_with_memory(80), "")]);
    let much = index.workers().find(|worker| worker.name == "much").expect("known").id;
    Arc::make_mut(&mut only[0].demand).only = Some(OnlyWorker::named(much));
    assert_eq!(kept(&mut index, &only, &[]), ["much"]);

    // A taken worker is not chosen, nor is one that is reserved for another request.
    let little = index.workers().find(|worker| worker.name == "little").expect("known").id;
    let chosen = index.choose_to_reserve(&large, &BTreeSet::new(), Some(&[little].into()));
    assert_eq!(
        chosen.iter().map(|id| &*index.get(*id).expect("known").name).collect::<Vec<_>>(),
        ["as-little"]
    );
    assert!(index.choose_to_reserve(&large, &BTreeSet::new(), None).is_empty(), "no worker was reserved");
    assert_eq!(index.choose_to_reserve(&large, &[much].into(), None), [much].into());
    index.reserve(much, Some(Uuid::from_u128(1)));
    assert_eq!(kept(&mut index, &large, &["much"]), ["little"]);
}

#[test]
fn one_in_ten_of_a_kind_is_reserved() {
    let mut index = index((0..29).map(|n| with_memory(&format!("one-{n}"), 4, 100)));
    let other = |labels: &mut Labels| labels.platform = "darwin".to_owned();
    (0..30).for_each(|n| index.put(with_labels(&format!("other-{n}"), other)));
    let of = |platform: &str| {
        let of_kind = index.workers().filter(|worker| worker.labels.platform == platform);
        of_kind.map(|worker| worker.id).collect::<Vec<_>>()
    };
    let (linux, darwin) = (of("linux"), of("darwin"));
    let large = parts(&[(shape_with_memory(80), "")]);
    let both =
        parts(&[(shape_with_memory(80), ""), (Shape { platform: "darwin".to_owned(), ..shape() }, "")]);
    let mut are_enough = |parts: &[Part], kept: &[&[WorkerId]]| {
        index.are_enough_reserved(parts, &kept.iter().copied().flatten().copied().collect())
    };
    assert!(!are_enough(&large, &[]));
    assert!(!are_enough(&large, &[&linux[..1], &darwin]));
    assert!(are_enough(&large, &[&linux[..2]]), "two of 29");
    assert!(are_enough(&both, &[&linux[..2]]));
    assert!(!are_enough(&both, &[&linux[..1], &darwin[..2]]));
    assert!(are_enough(&both, &[&darwin[..3]]), "of either kind");
}

#[test]
fn one_of_few_workers_may_be_reserved() {
    let mut index = index((0..3).map(|n| with_memory(&format!("one-{n}"), 4, 100)));
    let large = parts(&[(shape_with_memory(80), "")]);
    let one = index.workers().next().expect("one").id;
    assert!(!index.are_enough_reserved(&large, &HashSet::new()));
    assert!(index.are_enough_reserved(&large, &[one].into()));
}

#[test]
fn group_reserves_as_many_workers_as_needed() {
    let names = ["a", "b", "c"];
    let mut index = index(names.map(|name| with_memory(name, 4, 0)));
    let group =
        |owners: &[&'static str]| parts(&owners.iter().map(|owner| (shape(), *owner)).collect::<Vec<_>>());
    assert_eq!(kept(&mut index, &group(&["one", "one", "one"]), &[]).len(), 1);
    let chosen = kept(&mut index, &group(&["", ""]), &[]);
    assert_eq!(chosen.len(), 2, "planned load counts: {chosen:?}");
    assert_eq!(kept(&mut index, &group(&["", ""]), &["a", "b"]), ["a", "b"], "the reservation stays");
    assert_eq!(kept(&mut index, &group(&["one"; 4]), &["c"]), ["c"]);
    assert_eq!(kept(&mut index, &group(&["one"; 5]), &[]), [""; 0], "no worker has as many slots");
    assert_eq!(kept(&mut index, &group(&["one", "one", "one", "two", "two"]), &[]).len(), 2);
}

#[test]
fn outlook_groups_many_and_names_some() {
    let full = (0..40).map(|n| busy(2, worker(&format!("full-{n:02}"))));
    let tagged = (0..30)
        .map(|n| with_labels(&format!("tagged-{n:02}"), |labels| labels.tags = vec![format!("only-{n}")]));
    let mut index = index(full.chain(tagged).chain([worker("free")]));
    let first = |most| DetailFilter::first(most);
    let outlook = index.outlook(&demand(), &[], &first(2), Timestamp(0));
    let names: Vec<_> = outlook.opinions.iter().map(|opinion| opinion.name.as_str()).collect();
    assert_eq!(names, ["free", "full-00"], "feasible workers first, then passing refusals");
    let groups = outlook.groups.iter().map(|group| (group.words(), group.count, group.names.join(" ")));
    let expected = [
        ("are full".to_owned(), 40, "full-00 full-01 full-02 full-03 full-04".to_owned()),
        (
            "serve only workloads with their tags".to_owned(),
            30,
            "tagged-00 tagged-01 tagged-02 tagged-03 tagged-04".to_owned(),
        ),
    ];
    assert_eq!(groups.collect::<Vec<_>>(), expected);
    let only =
        DetailFilter { most: 9, only: Some((BTreeSet::new(), BTreeSet::from(["tagged-07".to_owned()]))) };
    let outlook = index.outlook(&demand(), &[], &only, Timestamp(0));
    assert_eq!(outlook.opinions.len(), 1);
    assert_eq!((outlook.opinions[0].name.as_str(), outlook.willing), ("tagged-07", 1));
    assert_eq!(index.outlook(&demand(), &[], &first(0), Timestamp(0)).opinions, []);
}
