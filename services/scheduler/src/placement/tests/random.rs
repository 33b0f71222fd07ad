//! Random inputs of placement tests.

use super::*;

/// A source of random workers and demands, many of which share attributes.
pub(crate) struct Dice(pub(crate) StdRng);

impl Dice {
    pub(crate) fn some<T: Clone>(&mut self, of: &[T]) -> T {
        of.choose(&mut self.0).expect("some").clone()
    }

    pub(crate) fn worker(&mut self, n: usize) -> Worker {
        let words = |words: &[&str]| words.iter().map(|&word| word.to_owned()).collect::<Vec<_>>();
        let of_type =
            |name: &str, version: &str| ResourceType { name: name.to_owned(), version: version.to_owned() };
        let labels = Labels {
            platform: self.some(&["linux", "linux", "linux", "darwin"]).to_owned(),
            tags: self.some(&[words(&[]), words(&[]), words(&["gpu"]), words(&["gpu", "big"])]),
            team: self.some(&[None, None, Some("main".to_owned()), Some("other".to_owned())]),
            image_kinds: self.some(&[
                words(&["host", "artifact", "resource-type"]),
                words(&["host", "artifact"]),
                words(&["host"]),
                words(&["artifact", "resource-type"]),
            ]),
            capabilities: self.some(&[
                words(&["privileged"]),
                words(&["terminal", "privileged"]),
                words(&[]),
            ]),
            resource_types: self.some(&[
                vec![],
                vec![of_type("git", "")],
                vec![of_type("git", "1")],
                vec![of_type("s3", "1"), of_type("git", "2")],
            ]),
            zone: String::new(),
        };
        let capacity = Capacity {
            max_tasks: self.some(&[None, Some(1), Some(3)]),
            max_containers: self.some(&[None, Some(4)]),
            max_volumes: self.some(&[None, Some(6)]),
            cpu_millis: self.some(&[None, Some(2000)]),
            memory_bytes: self.some(&[None, Some(100)]),
            disk_bytes: self.some(&[0, 50]),
            min_free_disk_bytes: self.some(&[0, 5]),
        };
        let mut worker = Worker {
            id: WorkerId::from_uuid(Uuid::from_u128(self.0.random())),
            state: self.some(&[State::Running, State::Running, State::Running, State::Stalled, State::Lost]),
            desired: self.some(&[Desired::Run, Desired::Run, Desired::Run, Desired::Cordon, Desired::Retire]),
            awaited: self.0.random_bool(0.2),
            just_lost: self.0.random_bool(0.5),
            unsupported_versions: match self.0.random_range(0..20) {
                0 => vec![7],
                1 => vec![8, 9],
                _ => vec![],
            },
            trust: self.some(&[
                Trust::Full,
                Trust::Full,
                Trust::Full,
                Trust::OnProbation(failing("why")),
                Trust::OnProbation(Failing { team: Some("other".to_owned()), ..failing("why") }),
                Trust::Quarantined(failing("why")),
                Trust::Quarantined(Failing { team: Some("main".to_owned()), ..failing("why else") }),
            ]),
            reserved_for: self.reservation(),
            labels: Arc::new(labels),
            capacity,
            ..worker(&format!("w{n}"))
        };
        worker.load = self.load();
        worker.gone = worker.state == State::Lost && worker.just_lost && self.0.random_bool(0.5);
        worker
    }

    /// Returns a worker that may differ from another one only in capacity, load and reservation.
    pub(crate) fn worker_like_some(&mut self, n: usize, others: &[Worker]) -> Worker {
        let worker = self.worker(n);
        if others.is_empty() || self.0.random_bool(0.4) {
            return worker;
        }
        let Worker { id, name, capacity, load, reserved_for, .. } = worker;
        Worker { id, name, capacity, load, reserved_for, ..self.some(others) }
    }

    /// Returns the request for which a worker is reserved.
    pub(crate) fn reservation(&mut self) -> Option<Uuid> {
        self.some(&[None, None, None, None, Some(Uuid::from_u128(1)), Some(Uuid::from_u128(2))])
    }

    pub(crate) fn load(&mut self) -> Load {
        let tasks = self.0.random_range(0..4);
        Load {
            tasks,
            checks: self.0.random_range(0..=tasks),
            reserved: Resources {
                cpu_millis: self.some(&[0, 1500]),
                memory_bytes: self.some(&[0, 70]),
                disk_bytes: self.some(&[0, 30]),
            },
            kept_containers: self.0.random_range(0..3),
            kept_volumes: self.0.random_range(0..5),
            short_of_disk: self.some(&[false, false, false, true]),
        }
    }

    pub(crate) fn demand(&mut self, workers: &[Worker]) -> Demand {
        let (image_kind, resource_type) = self.some(&[
            ("host", None),
            ("host", None),
            ("artifact", None),
            ("resource-type", Some("git")),
            ("resource-type", Some("s3")),
        ]);
        let process = Process {
            image_kind: image_kind.into(),
            resource_type: resource_type.map(str::to_owned),
            capabilities: self.some(&[
                vec![],
                vec![],
                vec![],
                vec!["privileged".into()],
                vec!["privileged".into(), "terminal".into()],
            ]),
        };
        let shape = Shape {
            team: self.some(&["main", "other", "third"]).to_owned(),
            platform: self.some(&["linux", "linux", "linux", "darwin"]).to_owned(),
            tags: self.some(&[
                vec![],
                vec![],
                vec!["gpu".to_owned()],
                vec!["old".to_owned(), "gpu".to_owned()],
            ]),
            process: self.0.random_bool(0.8).then_some(process),
            requests: Resources {
                cpu_millis: self.some(&[0, 0, 500, 600, 2000, 3000]),
                memory_bytes: self.some(&[0, 0, 30, 40]),
                disk_bytes: self.some(&[0, 0, 20, 25]),
            },
            purpose: self.some(&[Purpose::Build, Purpose::WithoutInputs, Purpose::Check]),
        };
        let mut sample = |chance: f64, count: usize| -> BTreeSet<WorkerId> {
            if !self.0.random_bool(chance) {
                return BTreeSet::new();
            }
            workers.sample(&mut self.0, count).map(|worker| worker.id).collect()
        };
        let (avoid, prefer, only, failed_on) =
            (sample(0.2, 2), sample(0.2, 2), sample(0.1, 1), sample(0.2, 3));
        let failed = |worker: WorkerId| FailedWorker {
            worker,
            failure: Failure { message: worker.to_string(), ..failure() },
        };
        let failed_on = failed_on.into_iter().map(failed).collect();
        let requester = Uuid::from_u128(self.0.random());
        let waits_as = self.some(&[requester, requester, Uuid::from_u128(1)]);
        let is_named = self.0.random_bool(0.5);
        let only = only.first().map(|id| OnlyWorker { id: *id, is_named });
        Demand { avoid, prefer, only, failed_on, waits_as, ..shape.requested_by(requester) }
    }

    pub(crate) fn locations(&mut self, workers: &[Worker]) -> Vec<Location> {
        let count = self.0.random_range(0..4);
        (0..count)
            .map(|_| Location {
                size_bytes: self.some(&[0, 10, 10, 1000]),
                workers: workers.sample(&mut self.0, 3).map(|worker| worker.id).collect(),
            })
            .collect()
    }

    pub(crate) fn chain(&mut self) -> Chain {
        let chains = [
            "volume-locality,limit-active-tasks",
            "fewest-build-containers,volume-locality",
            "limit-active-tasks,volume-locality,limit-active-volumes",
            "limit-active-containers",
            "volume-locality,random",
            "random",
        ];
        self.some(&chains).parse().expect("a chain")
    }
}
