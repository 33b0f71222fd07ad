//! A second, plain implementation of the rules of placement, as the protos and the manual state
//! them. It checks each worker independently, and shares only the refusal type with the tested
//! code.

use super::*;

/// The refusals of a worker.
#[derive(Debug, Clone, Default)]
pub(crate) struct Against {
    /// Refusals that stay until the request or the worker changes.
    pub(crate) lasting: Vec<Refusal>,
    /// Refusals that may end while the request waits.
    pub(crate) passing: Vec<Refusal>,
}

impl Against {
    pub(crate) fn is_nothing(&self) -> bool {
        self.lasting.is_empty() && self.passing.is_empty()
    }

    /// Returns whether there are no refusals, or only ones that may end. A team that uses only its
    /// own workers does not start using others because they have room.
    pub(crate) fn may_pass(&self) -> bool {
        self.lasting.is_empty() && !self.passing.contains(&Refusal::TeamKeepsToItsOwn)
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = &Refusal> {
        self.lasting.iter().chain(&self.passing)
    }

    /// Returns whether `refusals` contains exactly these, lasting ones first.
    pub(crate) fn equals(&self, refusals: &[Refusal]) -> bool {
        let is_all = |some: &[Refusal], of: &[Refusal]| {
            some.len() == of.len() && of.iter().all(|refusal| some.contains(refusal))
        };
        let Some((first, then)) = refusals.split_at_checked(self.lasting.len()) else { return false };
        let durations_are = first.iter().all(|refusal| !refusal.passes()) && then.iter().all(Refusal::passes);
        is_all(first, &self.lasting) && is_all(then, &self.passing) && durations_are
    }

    fn add_lasting(&mut self, is_so: bool, refusal: Refusal) {
        self.lasting.extend(is_so.then_some(refusal));
    }

    fn add_passing(&mut self, is_so: bool, refusal: Refusal) {
        self.passing.extend(is_so.then_some(refusal));
    }
}

/// Computes the refusals of `worker`.
pub(crate) fn against(demand: &Demand, worker: &Worker) -> Against {
    let (requested, has, load) = (&*demand.shape, &*worker.labels, &worker.load);
    let mut against = Against::default();

    // Contact, protocol version and desired state.
    let is_lost = worker.state == State::Lost;
    against.add_lasting(is_lost && !worker.just_lost, Refusal::Lost);
    against.add_passing(is_lost && worker.just_lost && !worker.gone, Refusal::JustLost);
    against.add_passing(is_lost && worker.just_lost && worker.gone, Refusal::Gone);
    against.add_passing(worker.state == State::Stalled, Refusal::Stalled);
    let versions = &worker.unsupported_versions;
    against.add_lasting(!versions.is_empty(), Refusal::Incompatible(versions.clone()));
    against.add_lasting(worker.desired == Desired::Retire, Refusal::Retiring);
    against.add_passing(worker.desired == Desired::Cordon, Refusal::Cordoned);

    // Team, platform and tags.
    let serves = has.team.as_ref().is_none_or(|team| *team == requested.team);
    against.add_lasting(!serves, Refusal::Team);
    against.add_lasting(has.platform != requested.platform, Refusal::Platform(has.platform.clone()));
    let lacks: Vec<_> = requested.tags.iter().filter(|tag| !has.tags.contains(tag)).cloned().collect();
    against.add_lasting(!lacks.is_empty(), Refusal::MissingTags(lacks));

    // Particular workers.
    let (named, tied) = match demand.only {
        Some(OnlyWorker { id, is_named: true }) => (Some(id), None),
        Some(OnlyWorker { id, is_named: false }) => (None, Some(id)),
        None => (None, None),
    };
    against.add_lasting(named.is_some_and(|named| named != worker.id), Refusal::NotNamed);
    against.add_lasting(tied.is_some_and(|tied| tied != worker.id), Refusal::NotSame);
    against.add_lasting(demand.avoid.contains(&worker.id), Refusal::Avoided);
    for failed in demand.failed_on.iter().filter(|failed| failed.worker == worker.id) {
        against.add_lasting(true, Refusal::FailedWorker(failed.failure.clone()));
    }

    // Requested amounts, of those that the worker declares.
    let disk_bytes = (worker.capacity.disk_bytes != 0).then_some(worker.capacity.disk_bytes);
    for (of, requested, in_all, taken) in [
        (Resource::Cpu, requested.requests.cpu_millis, worker.capacity.cpu_millis, load.reserved.cpu_millis),
        (
            Resource::Memory,
            requested.requests.memory_bytes,
            worker.capacity.memory_bytes,
            load.reserved.memory_bytes,
        ),
        (Resource::Disk, requested.requests.disk_bytes, disk_bytes, load.reserved.disk_bytes),
    ] {
        let Some(in_all) = in_all else { continue };
        let left = in_all.saturating_sub(taken);
        against.add_lasting(requested > in_all, Refusal::TooSmall(Shortage { of, requested, left: in_all }));
        let is_short = left < requested && requested <= in_all && !is_lost;
        against.add_passing(is_short, Refusal::Short(Shortage { of, requested, left }));
    }

    let min_free = worker.capacity.min_free_disk_bytes;
    against.add_passing(load.short_of_disk && !is_lost, Refusal::DiskPressure(min_free));

    // The rest concerns the process.
    let Some(process) = &requested.process else { return against };
    let has_tags = !has.tags.is_empty();
    against.add_lasting(has_tags && requested.tags.is_empty(), Refusal::OnlyTagged(has.tags.clone()));
    let kind = &process.image_kind;
    let brings = |name: &String| has.resource_types.iter().any(|of| of.name == *name);
    match &process.resource_type {
        // A worker that provides the image can run it, so there is no second refusal.
        Some(name) if !brings(name) => against.add_lasting(true, Refusal::ResourceType(name.clone())),
        _ => against
            .add_lasting(!has.image_kinds.contains(&kind.to_string()), Refusal::ImageKind(kind.clone())),
    }
    for name in &process.capabilities {
        against.add_lasting(!has.capabilities.contains(&name.to_string()), Refusal::Capability(name.clone()));
    }
    match &worker.trust {
        Trust::Full => {}
        Trust::OnProbation(Failing { why, team }) => {
            let is_meant = team.as_ref().is_none_or(|team| *team == requested.team);
            against.add_passing(is_meant && load.tasks != 0 && !is_lost, Refusal::Quarantined(why.clone()));
        }
        Trust::Quarantined(Failing { why, team }) => {
            let is_meant = team.as_ref().is_none_or(|team| *team == requested.team);
            against.add_passing(is_meant, Refusal::Quarantined(why.clone()));
        }
    }
    let is_for_another = worker.reserved_for.is_some() && worker.reserved_for != Some(demand.waits_as);
    against.add_passing(is_for_another && tied.is_none(), Refusal::Reserved);

    // Each task has a container and a volume, besides the kept ones. The load of a lost worker is
    // unknown.
    if is_lost {
        return against;
    }
    let tasks = u64::from(load.tasks);
    let (active, containers, volumes) = (load.tasks, tasks + load.kept_containers, tasks + load.kept_volumes);
    if let Some(max) = worker.capacity.max_tasks {
        against.add_passing(active >= max, Refusal::Full { active, max });
    }
    if let Some(max) = worker.capacity.max_containers {
        against
            .add_passing(containers >= u64::from(max), Refusal::FullOfContainers { count: containers, max });
    }
    if let Some(max) = worker.capacity.max_volumes {
        against.add_passing(volumes >= u64::from(max), Refusal::FullOfVolumes { count: volumes, max });
    }
    against
}

/// Computes the refusals of all `workers`. Each of `teams` uses only its own workers while some of
/// them could take the request, except for amounts and excluded workers.
pub(crate) fn against_each(
    demand: &Demand,
    workers: &[Worker],
    teams: &BTreeSet<String>,
) -> HashMap<WorkerId, Against> {
    let mut of_each: HashMap<_, _> =
        workers.iter().map(|worker| (worker.id, against(demand, worker))).collect();
    let is_about_this_one = |refusal: &Refusal| {
        use Refusal::{Avoided, FailedWorker, NotNamed, NotSame, TooSmall};
        matches!(refusal, NotSame | NotNamed | Avoided | FailedWorker(_) | TooSmall(_))
    };
    let is_own = |worker: &&Worker| worker.labels.team.as_ref() == Some(&demand.shape.team);
    let could = |worker: &Worker| of_each[&worker.id].lasting.iter().all(is_about_this_one);
    if teams.contains(&demand.shape.team) && workers.iter().filter(is_own).any(could) {
        for worker in workers.iter().filter(|worker| worker.labels.team.is_none()) {
            of_each.entry(worker.id).or_default().add_passing(true, Refusal::TeamKeepsToItsOwn);
        }
    }
    of_each
}

/// Returns a demand that needs nothing that `worker` lacks.
pub(crate) fn anything(worker: &Worker) -> Demand {
    let Labels { platform, tags, team, image_kinds, .. } = &*worker.labels;
    let image_kind = image_kinds.first().cloned().unwrap_or_default().into();
    let shape = Shape {
        team: team.clone().unwrap_or_default(),
        platform: platform.clone(),
        tags: tags.clone(),
        process: Some(Process { image_kind, resource_type: None, capabilities: vec![] }),
        ..shape()
    };
    shape.requested_by(Uuid::nil())
}

/// Ranks a worker: own workers of the team first, then workers in contact, then preferred ones,
/// then by the definition of each strategy.
pub(crate) fn rank(
    chain: &Chain,
    demand: &Demand,
    worker: &Worker,
    locations: &[Location],
) -> (bool, bool, bool, Vec<u64>) {
    let load = &worker.load;
    let (tasks, checks) = (u64::from(load.tasks), u64::from(load.checks));
    let counts = chain.to_string();
    let counts = counts.split(',').map(|strategy| match strategy {
        "volume-locality" => {
            let has = |location: &Location| location.workers.contains(&worker.id);
            locations.iter().filter(|location| !has(location)).map(|location| location.size_bytes).sum()
        }
        "fewest-build-containers" => load.kept_containers + tasks - checks,
        "limit-active-tasks" => tasks,
        "limit-active-containers" => load.kept_containers + tasks,
        "limit-active-volumes" => load.kept_volumes + tasks,
        "random" => 0,
        other => panic!("{other}"),
    });
    let is_own = worker.labels.team.as_ref() == Some(&demand.shape.team);
    (!is_own, worker.awaited, !demand.prefer.contains(&worker.id), counts.collect())
}

/// Groups refusing workers by their refusals, without individual numbers and texts. If there are
/// many groups, workers that only take workloads with their tags form one group.
pub(crate) fn alike<'w>(
    refusing: &[(&'w Worker, &Against)],
) -> (bool, HashMap<BTreeSet<String>, BTreeSet<&'w str>>) {
    let by = |are_many: bool| {
        let mut alike = HashMap::<_, BTreeSet<_>>::new();
        for (worker, against) in refusing {
            let texts = against.all().map(|refusal| shared_text(refusal, are_many)).collect();
            alike.entry(texts).or_default().insert(worker.name.as_str());
        }
        alike
    };
    let alike = by(false);
    if alike.len() > 20 { (true, by(true)) } else { (false, alike) }
}

/// Returns the part of a refusal that workers share.
pub(crate) fn shared_text(refusal: &Refusal, are_many: bool) -> String {
    let labels = if are_many && refusal.code() == "ONLY_TAGGED" { vec![] } else { refusal.labels() };
    format!("{} {labels:?} {:?}", refusal.code(), refusal.limit().map(|(of, ..)| of))
}
