//! Random groups of leases, compared with a plain implementation of the rules of placement.

use db::Database;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use testing::databases;

use super::*;
use crate::config::Config;
use crate::db::entity::lease::Kind;
use crate::placement::tests::{Dice, reference, shape_with_memory, with_memory};
use crate::placement::{Chains, OnlyWorker, Worker};
use crate::store_client::Inputs;

/// Number of orders of a group that the reference tries.
const TRIES: usize = 3;

/// A group of leases, and the known workers.
struct Scene {
    workers: Vec<Worker>,
    members: Vec<GroupMember>,
    chains: Chains,
    teams: BTreeSet<String>,
}

/// A lease of the group.
struct GroupMember {
    lease: LeaseId,
    demand: Demand,
    owner: String,
    owner_worker: Option<WorkerId>,
}

/// A lease that found no worker: the number of leases before it, and the only worker that it may
/// use.
type StuckAt = (usize, Option<WorkerId>);

impl Scene {
    fn drawn(dice: &mut Dice) -> Self {
        let workers: Vec<_> = (0..dice.0.random_range(0..5))
            .map(|n| {
                let any = dice.worker(n);
                if dice.0.random_bool(0.15) {
                    return any;
                }
                // Some workers are larger than others, and small requests use them too.
                let mut worker = with_memory(&any.name, dice.some(&[0, 0, 1]), dice.some(&[0, 0, 0, 50]));
                worker.capacity.max_tasks = dice.some(&[Some(1), Some(2), Some(4)]);
                worker.capacity.memory_bytes = dice.some(&[Some(50), Some(100)]);
                let reserved_for = any.reserved_for.filter(|_| dice.0.random_bool(0.3));
                Worker { id: any.id, awaited: any.awaited, reserved_for, ..worker }
            })
            .collect();
        let homes = [(); 2].map(|()| match workers.is_empty() || dice.0.random_bool(0.7) {
            true => None,
            false => Some(dice.some(&workers).id),
        });
        let members = (0..dice.0.random_range(1..5)).map(|_| {
            let any = dice.demand(&workers);
            let memory_bytes = dice.some(&[0, 0, 30, 50, 90, 90]);
            let mut demand = match dice.0.random_bool(0.1) {
                true => any,
                false => shape_with_memory(memory_bytes).requested_by(any.requester),
            };
            let (owner, owner_worker) =
                dice.some(&[("", None), ("", None), ("a", homes[0]), ("b", homes[1])]);
            if !owner.is_empty() {
                demand.only = None;
            }
            demand.kind = match demand.shape.process {
                Some(_) => dice.some(&[Kind::Task, Kind::Get, Kind::Check]),
                None => Kind::Transfer,
            };
            GroupMember { lease: LeaseId::new(), demand, owner: owner.to_owned(), owner_worker }
        });
        let members = members.collect();
        let chains = Chains { builds: dice.chain(), without_inputs: dice.chain(), checks: dice.chain() };
        let teams = dice.some(&[vec![], vec!["main".to_owned()]]).into_iter().collect();
        Self { workers, members, chains, teams }
    }

    /// Builds the group as it is requested. All members wait under one id.
    fn leases(&mut self) -> LeaseGroup {
        let (answer, _) = oneshot::channel();
        let call = Call::new(self.members.len(), answer);
        let members = self.members.iter().enumerate().map(|(item, member)| {
            let ask = LeaseRequest {
                lease: member.lease,
                demand: Arc::new(member.demand.clone()),
                inputs: Arc::new(Inputs::default()),
                locations: Arc::default(),
                request: String::new(),
                group: Some(1),
                owner: member.owner.clone(),
                owner_worker: member.owner_worker,
                wait: std::time::Duration::ZERO,
                priority: 0,
            };
            Member::new(ask, call.clone(), item)
        });
        let leases = LeaseGroup::new(members.collect(), Timestamp(0)).expect("a group");
        self.members.iter_mut().for_each(|member| member.demand.waits_as = leases.id());
        leases
    }

    /// Returns the demand of a lease, restricted to the worker of its owner while that worker takes
    /// work.
    fn demand(&self, member: &GroupMember) -> Demand {
        let owner_worker = self.workers.iter().find(|worker| Some(worker.id) == member.owner_worker);
        let owner_worker = owner_worker
            .filter(|worker| worker.state != worker::State::Lost && worker.desired == worker::Desired::Run);
        let only = owner_worker.map(|worker| OnlyWorker::tied(worker.id)).or(member.demand.only);
        Demand { only, ..member.demand.clone() }
    }

    /// Returns whether no worker could ever take some lease of the group.
    fn is_hopeless(&self) -> bool {
        let could_never = |member: &GroupMember| {
            let against = reference::against_each(&self.demand(member), &self.workers, &self.teams);
            !self.workers.is_empty() && !against.values().any(reference::Against::may_pass)
        };
        self.members.iter().any(could_never)
    }

    /// Places the leases in this order, trying every best worker at each step. Returns the leases
    /// that find none. `None`: all are placed.
    fn ways(&self, order: &[usize], avoid: &BTreeSet<WorkerId>) -> BTreeSet<Option<StuckAt>> {
        let mut ways = BTreeSet::new();
        self.go_on(order, 0, avoid, &self.workers, &HashMap::new(), &mut ways);
        ways
    }

    fn go_on(
        &self,
        order: &[usize],
        at: usize,
        avoid: &BTreeSet<WorkerId>,
        workers: &[Worker],
        homes: &HashMap<(String, String), WorkerId>,
        ways: &mut BTreeSet<Option<StuckAt>>,
    ) {
        let Some(number) = order.get(at) else {
            ways.insert(None);
            return;
        };
        let member = &self.members[*number];
        let (mut demand, owner) =
            (self.demand(member), (member.demand.shape.team.clone(), member.owner.clone()));
        let near = homes.get(&owner).copied();
        match near {
            Some(near) => demand.only = Some(OnlyWorker::tied(near)),
            None if !member.owner.is_empty() && member.owner_worker.is_none() => demand.avoid.extend(avoid),
            None => {}
        }
        let against = reference::against_each(&demand, workers, &self.teams);
        let willing = workers.iter().filter(|worker| against[&worker.id].is_nothing());
        let chain = self.chains.of(demand.shape.purpose);
        let standings: Vec<_> =
            willing.map(|worker| (reference::rank(chain, &demand, worker, &[]), worker.id)).collect();
        let Some(best) = standings.iter().map(|(standing, _)| standing).min() else {
            ways.insert(Some((at, near)));
            return;
        };
        for (_, id) in standings.iter().filter(|(standing, _)| standing == best) {
            let (mut workers, mut homes) = (workers.to_vec(), homes.clone());
            workers.iter_mut().filter(|worker| worker.id == *id).for_each(|worker| put_on(worker, member));
            if !member.owner.is_empty() {
                homes.insert(owner.clone(), *id);
            }
            self.go_on(order, at + 1, avoid, &workers, &homes, ways);
        }
    }

    /// Returns whether all leases are placed regardless of random draws, if a lease without a
    /// worker is retried first, up to `tries` orders.
    fn is_sure(&self, order: &[usize], avoid: &BTreeSet<WorkerId>, tries: usize) -> bool {
        tries > 0
            && self.ways(order, avoid).into_iter().all(|way| match way {
                None => true,
                Some((0, _)) => false,
                Some((at, near)) => {
                    let (mut order, mut avoid) = (order.to_vec(), avoid.clone());
                    let late = order.remove(at);
                    order.insert(0, late);
                    avoid.extend(near);
                    self.is_sure(&order, &avoid, tries - 1)
                }
            })
    }

    /// Applies the grants in order, and asserts that each one is allowed.
    fn grant(&self, grants: &[Grant]) -> Vec<Worker> {
        let (mut workers, mut homes) = (self.workers.clone(), HashMap::new());
        for grant in grants {
            let member = self.members.iter().find(|member| member.lease == grant.lease).expect("a member");
            let (mut demand, owner) = (self.demand(member), (&member.demand.shape.team, &member.owner));
            // All leases of an owner share one worker.
            demand.only = homes.get(&owner).copied().map(OnlyWorker::tied).or(demand.only);
            let against = reference::against_each(&demand, &workers, &self.teams);
            assert!(against[&grant.worker].is_nothing(), "{:?} of {grant:?}", against[&grant.worker]);
            assert_eq!(grant.demand.kind, member.demand.kind);
            if !member.owner.is_empty() {
                homes.insert(owner, grant.worker);
            }
            let taken = workers.iter_mut().find(|worker| worker.id == grant.worker);
            put_on(taken.expect("a worker"), member);
        }
        workers
    }
}

fn put_on(worker: &mut Worker, member: &GroupMember) {
    if member.demand.kind != Kind::Transfer {
        let (load, requests) = (&mut worker.load, &member.demand.shape.requests);
        load.tasks += 1;
        load.checks += u32::from(member.demand.kind == Kind::Check);
        load.reserved.cpu_millis += requests.cpu_millis;
        load.reserved.memory_bytes += requests.memory_bytes;
        load.reserved.disk_bytes += requests.disk_bytes;
    }
}

#[tokio::test]
async fn group_is_placed_like_the_reference() {
    let seed = testing::seeds::seed();
    eprintln!("GANTRY_SEED={seed}");
    let mut dice = Dice(StdRng::seed_from_u64(seed));
    let database = databases::sqlite();
    let db = Database::connect::<crate::Schema>(&database.url).await.expect("a database");
    let (mut granted, mut in_another_order, mut not_now, mut never) = (0, 0, 0, 0);
    for _ in 0..3000 {
        let mut scene = Scene::drawn(&mut dice);
        let config = Config {
            chains: scene.chains.clone(),
            exclusive_teams: scene.teams.clone(),
            ..Config::new("", "")
        };
        let (dispatch, dispatcher) = Dispatcher::new(db.clone(), Arc::new(config));
        for worker in &scene.workers {
            let mut workers = dispatch.workers.lock();
            workers.reserve(worker.id, worker.reserved_for);
            workers.put(worker.clone());
        }
        let (mut leases, mut plan) = (scene.leases(), Plan::default());
        let decided = dispatcher.decide_leases(&mut leases, &mut plan, Timestamp(0));
        let order: Vec<_> = (0..scene.members.len()).collect();
        let is_sure = scene.is_sure(&order, &BTreeSet::new(), TRIES);
        let workers = match decided {
            Ok(()) => {
                let all: BTreeSet<_> = plan.grants.iter().map(|grant| grant.lease).collect();
                assert_eq!((all.len(), plan.grants.len()), (order.len(), order.len()), "all of them, once");
                granted += 1;
                let member = scene.members.iter().map(|member| member.lease);
                in_another_order += usize::from(!member.eq(plan.grants.iter().map(|grant| grant.lease)));
                scene.grant(&plan.grants)
            }
            Err(refused) => {
                assert!(plan.grants.is_empty(), "{:?} although not all are", plan.grants);
                assert!(!is_sure, "all leases fit");
                assert_eq!(refused.is_never, scene.is_hopeless(), "{refused:?}");
                *if refused.is_never { &mut never } else { &mut not_now } += 1;
                scene.workers
            }
        };
        // Only planned grants count as load.
        for worker in &workers {
            let load = dispatch.workers.lock().get(worker.id).expect("known").load;
            assert_eq!(load, worker.load);
        }
    }
    let met = [granted, in_another_order, not_now, never];
    assert!(met.iter().all(|count| *count > 20), "{met:?}: every case must occur");
}
