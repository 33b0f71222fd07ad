//! Groups of leases compared with the rules of placement said once more, and with whoever looks at each worker for each of them.

use db::Database;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use testing::databases;

use super::*;
use crate::config::Config;
use crate::placement::tests::{Dice, asking, reference, with_memory};
use crate::placement::{Chains, Worker};
use crate::store_client::Inputs;

/// In how many orders whoever looks at each worker tries a group.
const TRIES: usize = 3;

/// A group, and what is known of the workers.
struct Scene {
    workers: Vec<Worker>,
    members: Vec<Asked>,
    chains: Chains,
    teams: BTreeSet<String>,
}

/// One of a group.
struct Asked {
    lease: LeaseId,
    kind: Kind,
    demand: Demand,
    owner: String,
    kept_to: Option<WorkerId>,
}

/// One of a group found nothing: how many found theirs before it, and where alone it might have been.
type StuckAt = (usize, Option<WorkerId>);

impl Scene {
    fn drawn(dice: &mut Dice) -> Self {
        let workers: Vec<_> = (0..dice.0.random_range(0..5))
            .map(|n| {
                let any = dice.worker(n);
                if dice.0.random_bool(0.15) {
                    return any;
                }
                // Some are larger than others, and those are taken by what is small, too.
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
                false => asking(memory_bytes).asked_by(any.asked_by),
            };
            let (owner, kept_to) = dice.some(&[("", None), ("", None), ("a", homes[0]), ("b", homes[1])]);
            if !owner.is_empty() {
                demand.only = None;
            }
            let kind = match demand.shape.process {
                Some(_) => dice.some(&[Kind::Task, Kind::Get, Kind::Check]),
                None => Kind::Transfer,
            };
            Asked { lease: LeaseId::new(), kind, demand, owner: owner.to_owned(), kept_to }
        });
        let members = members.collect();
        let chains = Chains { builds: dice.chain(), without_inputs: dice.chain(), checks: dice.chain() };
        let teams = dice.some(&[vec![], vec!["main".to_owned()]]).into_iter().collect();
        Self { workers, members, chains, teams }
    }

    /// As it is asked for. What one that waits is called is what all of them are called.
    fn leases(&mut self) -> LeaseGroup {
        let (answer, _) = oneshot::channel();
        let call = Call::new(self.members.len(), answer);
        let members = self.members.iter().enumerate().map(|(item, asked)| {
            let ask = LeaseRequest {
                lease: asked.lease,
                kind: asked.kind,
                demand: Arc::new(asked.demand.clone()),
                inputs: Arc::new(Inputs::default()),
                locations: Arc::default(),
                request: String::new(),
                group: Some(1),
                owner: asked.owner.clone(),
                kept_to: asked.kept_to,
                wait: std::time::Duration::ZERO,
                priority: 0,
            };
            Member::new(ask, call.clone(), item)
        });
        let leases = LeaseGroup::new(members.collect(), Timestamp(0)).expect("some are asked for");
        self.members.iter_mut().for_each(|asked| asked.demand.waits_as = leases.id());
        leases
    }

    /// What one asks for: where its owner's containers are, while that worker takes work.
    fn demand(&self, asked: &Asked) -> Demand {
        let kept_to = self.workers.iter().find(|worker| Some(worker.id) == asked.kept_to);
        let kept_to = kept_to
            .filter(|worker| worker.state != worker::State::Lost && worker.desired == worker::Desired::Run);
        let only = kept_to.map(|worker| worker.id).or(asked.demand.only);
        Demand { only, ..asked.demand.clone() }
    }

    /// Whether one of them could never be had, whatever becomes of the others.
    fn is_hopeless(&self) -> bool {
        let could_never = |asked: &Asked| {
            let against = reference::against_each(&self.demand(asked), &self.workers, &self.teams);
            !self.workers.is_empty() && !against.values().any(reference::Against::may_pass)
        };
        self.members.iter().any(could_never)
    }

    /// Whoever is asked in this order, each of the best that would do being taken: where they get stuck. `None`: all find theirs.
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
        let asked = &self.members[*number];
        let (mut demand, owner) =
            (self.demand(asked), (asked.demand.shape.team.clone(), asked.owner.clone()));
        let near = homes.get(&owner).copied();
        match near {
            Some(_) => demand.only = near,
            None if !asked.owner.is_empty() && asked.kept_to.is_none() => demand.avoid.extend(avoid),
            None => {}
        }
        let against = reference::against_each(&demand, workers, &self.teams);
        let willing = workers.iter().filter(|worker| against[&worker.id].is_nothing());
        let chain = self.chains.of(demand.shape.purpose);
        let standings: Vec<_> =
            willing.map(|worker| (reference::standing(chain, &demand, worker, &[]), worker.id)).collect();
        let Some(best) = standings.iter().map(|(standing, _)| standing).min() else {
            ways.insert(Some((at, near)));
            return;
        };
        for (_, id) in standings.iter().filter(|(standing, _)| standing == best) {
            let (mut workers, mut homes) = (workers.to_vec(), homes.clone());
            workers.iter_mut().filter(|worker| worker.id == *id).for_each(|worker| put_on(worker, asked));
            if !asked.owner.is_empty() {
                homes.insert(owner.clone(), *id);
            }
            self.go_on(order, at + 1, avoid, &workers, &homes, ways);
        }
    }

    /// Whether all find theirs whatever the lot decides, where whoever finds nothing is asked before those that did, so many times.
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

    /// Carries grants out, one after the other, where nothing speaks against any.
    fn grant(&self, grants: &[Grant]) -> Vec<Worker> {
        let (mut workers, mut homes) = (self.workers.clone(), HashMap::new());
        for grant in grants {
            let asked = self.members.iter().find(|asked| asked.lease == grant.lease).expect("asked for");
            let (mut demand, owner) = (self.demand(asked), (&asked.demand.shape.team, &asked.owner));
            // Where another of its owner is, and nowhere else.
            demand.only = homes.get(&owner).copied().or(demand.only);
            let against = reference::against_each(&demand, &workers, &self.teams);
            assert!(against[&grant.worker].is_nothing(), "{:?} of {grant:?}", against[&grant.worker]);
            assert_eq!(grant.kind, asked.kind);
            if !asked.owner.is_empty() {
                homes.insert(owner, grant.worker);
            }
            let taken = workers.iter_mut().find(|worker| worker.id == grant.worker);
            put_on(taken.expect("a worker"), asked);
        }
        workers
    }
}

fn put_on(worker: &mut Worker, asked: &Asked) {
    if asked.kind != Kind::Transfer {
        let (load, requests) = (&mut worker.load, &asked.demand.shape.requests);
        load.tasks += 1;
        load.checks += u32::from(asked.kind == Kind::Check);
        load.reserved.cpu_millis += requests.cpu_millis;
        load.reserved.memory_bytes += requests.memory_bytes;
        load.reserved.disk_bytes += requests.disk_bytes;
    }
}

#[tokio::test]
async fn a_group_is_decided_as_who_looks_at_every_worker_would() {
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
            keep_to_their_own: scene.teams.clone(),
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
                let asked = scene.members.iter().map(|asked| asked.lease);
                in_another_order += usize::from(!asked.eq(plan.grants.iter().map(|grant| grant.lease)));
                scene.grant(&plan.grants)
            }
            Err(refused) => {
                assert!(plan.grants.is_empty(), "{:?} although not all are", plan.grants);
                assert!(!is_sure, "all would have found theirs");
                assert_eq!(refused.is_never, scene.is_hopeless(), "{refused:?}");
                *if refused.is_never { &mut never } else { &mut not_now } += 1;
                scene.workers
            }
        };
        // What is planned counts, and nothing else.
        for worker in &workers {
            let load = dispatch.workers.lock().get(worker.id).expect("known").load;
            assert_eq!(load, worker.load);
        }
    }
    let met = [granted, in_another_order, not_now, never];
    assert!(met.iter().all(|count| *count > 20), "{met:?}: all are met");
}
