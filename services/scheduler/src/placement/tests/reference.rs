//! The rules of placement said once more, as the protos and the manual state them: of each worker for itself, whatever the others are. It shares
//! nothing with what it is compared with but the words for refusals.

use super::*;

/// Everything that speaks against a worker.
#[derive(Debug, Clone, Default)]
pub(crate) struct Against {
    /// It stays until somebody changes what is asked for, or the worker.
    pub(crate) lasting: Vec<Refusal>,
    /// It may pass by itself.
    pub(crate) passing: Vec<Refusal>,
}

impl Against {
    pub(crate) fn is_nothing(&self) -> bool {
        self.lasting.is_empty() && self.passing.is_empty()
    }

    /// Whether it is nothing, or may come to be. What a team does not use does not come to be used because others have room.
    pub(crate) fn may_pass(&self) -> bool {
        self.lasting.is_empty() && !self.passing.contains(&Refusal::TeamKeepsToItsOwn)
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = &Refusal> {
        self.lasting.iter().chain(&self.passing)
    }

    /// Whether `said` is all of it and nothing else, and first what will not pass by itself.
    pub(crate) fn is_said_by(&self, said: &[Refusal]) -> bool {
        let is_all = |some: &[Refusal], of: &[Refusal]| {
            some.len() == of.len() && of.iter().all(|refusal| some.contains(refusal))
        };
        let Some((first, then)) = said.split_at_checked(self.lasting.len()) else { return false };
        let durations_are = first.iter().all(|refusal| !refusal.passes()) && then.iter().all(Refusal::passes);
        is_all(first, &self.lasting) && is_all(then, &self.passing) && durations_are
    }

    fn for_good(&mut self, is_so: bool, refusal: Refusal) {
        self.lasting.extend(is_so.then_some(refusal));
    }

    fn for_now(&mut self, is_so: bool, refusal: Refusal) {
        self.passing.extend(is_so.then_some(refusal));
    }
}

/// Everything that speaks against `worker`.
pub(crate) fn against(demand: &Demand, worker: &Worker) -> Against {
    let (asked, has, load) = (&*demand.shape, &*worker.labels, &worker.load);
    let mut against = Against::default();

    // Whether it is there, can be spoken with, and shall work.
    let is_lost = worker.state == State::Lost;
    against.for_good(is_lost && !worker.just_lost, Refusal::Lost);
    against.for_now(is_lost && worker.just_lost && !worker.gone, Refusal::JustLost);
    against.for_now(is_lost && worker.just_lost && worker.gone, Refusal::Gone);
    against.for_now(worker.state == State::Stalled, Refusal::Stalled);
    let versions = &worker.unsupported_versions;
    against.for_good(!versions.is_empty(), Refusal::Incompatible(versions.clone()));
    against.for_good(worker.desired == Desired::Retire, Refusal::Retiring);
    against.for_now(worker.desired == Desired::Cordon, Refusal::Cordoned);

    // Whom it serves.
    let serves = has.team.as_ref().is_none_or(|team| *team == asked.team);
    against.for_good(!serves, Refusal::Team);
    against.for_good(has.platform != asked.platform, Refusal::Platform(has.platform.clone()));
    let lacks: Vec<_> = asked.tags.iter().filter(|tag| !has.tags.contains(tag)).cloned().collect();
    against.for_good(!lacks.is_empty(), Refusal::MissingTags(lacks));

    // Which one is asked for.
    against.for_good(demand.only.is_some_and(|only| only != worker.id), Refusal::NotSame);
    against.for_good(demand.avoid.contains(&worker.id), Refusal::Avoided);
    for failed in demand.failed_on.iter().filter(|failed| failed.worker == worker.id) {
        against.for_good(true, Refusal::FailedThere(failed.failure.clone()));
    }

    // How much is asked for of what it says that it has.
    let disk_bytes = (worker.capacity.disk_bytes != 0).then_some(worker.capacity.disk_bytes);
    for (of, asked, in_all, taken) in [
        (Resource::Cpu, asked.requests.cpu_millis, worker.capacity.cpu_millis, load.reserved.cpu_millis),
        (
            Resource::Memory,
            asked.requests.memory_bytes,
            worker.capacity.memory_bytes,
            load.reserved.memory_bytes,
        ),
        (Resource::Disk, asked.requests.disk_bytes, disk_bytes, load.reserved.disk_bytes),
    ] {
        let Some(in_all) = in_all else { continue };
        let left = in_all.saturating_sub(taken);
        against.for_good(asked > in_all, Refusal::TooSmall(Shortage { of, asked, left: in_all }));
        let is_short = left < asked && asked <= in_all && !is_lost;
        against.for_now(is_short, Refusal::Short(Shortage { of, asked, left }));
    }

    // The rest is about what runs there.
    let Some(process) = &asked.process else { return against };
    let has_tags = !has.tags.is_empty();
    against.for_good(has_tags && asked.tags.is_empty(), Refusal::OnlyTagged(has.tags.clone()));
    let kind = &process.image_kind;
    let brings = |name: &String| has.resource_types.iter().any(|of| of.name == *name);
    match &process.resource_type {
        // That it could not run it besides is no further reason: whatever brings it can.
        Some(name) if !brings(name) => against.for_good(true, Refusal::ResourceType(name.clone())),
        _ => against.for_good(!has.image_kinds.contains(&kind.to_string()), Refusal::ImageKind(kind.clone())),
    }
    for name in &process.capabilities {
        against.for_good(!has.capabilities.contains(&name.to_string()), Refusal::Capability(name.clone()));
    }
    match &worker.trust {
        Trust::Full => {}
        Trust::OnProbation(Failing { why, team }) => {
            let is_meant = team.as_ref().is_none_or(|team| *team == asked.team);
            against.for_now(is_meant && load.tasks != 0 && !is_lost, Refusal::Quarantined(why.clone()));
        }
        Trust::Quarantined(Failing { why, team }) => {
            let is_meant = team.as_ref().is_none_or(|team| *team == asked.team);
            against.for_now(is_meant, Refusal::Quarantined(why.clone()));
        }
    }
    let is_for_another = worker.reserved_for.is_some() && worker.reserved_for != Some(demand.waits_as);
    against.for_now(is_for_another && demand.only.is_none(), Refusal::Reserved);

    // Each task has a container and a volume, besides those that are kept. Of one that is lost nobody knows.
    if is_lost {
        return against;
    }
    let tasks = u64::from(load.tasks);
    let (active, containers, volumes) = (load.tasks, tasks + load.kept_containers, tasks + load.kept_volumes);
    if let Some(max) = worker.capacity.max_tasks {
        against.for_now(active >= max, Refusal::Full { active, max });
    }
    if let Some(max) = worker.capacity.max_containers {
        against.for_now(containers >= u64::from(max), Refusal::FullOfContainers { count: containers, max });
    }
    if let Some(max) = worker.capacity.max_volumes {
        against.for_now(volumes >= u64::from(max), Refusal::FullOfVolumes { count: volumes, max });
    }
    against
}

/// The same of each of `workers`, with what their teams say: those of `teams` use no workers for all while they have some of their own that
/// could, but for how much is asked for, and where it must not be.
pub(crate) fn against_each(
    demand: &Demand,
    workers: &[Worker],
    teams: &BTreeSet<String>,
) -> HashMap<WorkerId, Against> {
    let mut of_each: HashMap<_, _> =
        workers.iter().map(|worker| (worker.id, against(demand, worker))).collect();
    let is_about_this_one = |refusal: &Refusal| {
        use Refusal::{Avoided, FailedThere, NotSame, TooSmall};
        matches!(refusal, NotSame | Avoided | FailedThere(_) | TooSmall(_))
    };
    let is_own = |worker: &&Worker| worker.labels.team.as_ref() == Some(&demand.shape.team);
    let could = |worker: &Worker| of_each[&worker.id].lasting.iter().all(is_about_this_one);
    if teams.contains(&demand.shape.team) && workers.iter().filter(is_own).any(could) {
        for worker in workers.iter().filter(|worker| worker.labels.team.is_none()) {
            of_each.entry(worker.id).or_default().for_now(true, Refusal::TeamKeepsToItsOwn);
        }
    }
    of_each
}

/// What asks for nothing that `worker` lacks.
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
    shape.asked_by(Uuid::nil())
}

/// How good a worker is: those of the team first, then whoever is in contact, then whoever is preferred; and then by the definition of each
/// strategy, one after the other.
pub(crate) fn standing(
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

/// Of those that refuse, who refuses for the same: in what each says without its own numbers and words. Of many, those that serve only their
/// tags are together as well.
pub(crate) fn alike<'w>(
    refusing: &[(&'w Worker, &Against)],
) -> (bool, HashMap<BTreeSet<String>, BTreeSet<&'w str>>) {
    let by = |are_many: bool| {
        let mut alike = HashMap::<_, BTreeSet<_>>::new();
        for (worker, against) in refusing {
            let said = against.all().map(|refusal| said_by_many(refusal, are_many)).collect();
            alike.entry(said).or_default().insert(worker.name.as_str());
        }
        alike
    };
    let alike = by(false);
    if alike.len() > 20 { (true, by(true)) } else { (false, alike) }
}

/// What of a refusal workers have in common.
pub(crate) fn said_by_many(refusal: &Refusal, are_many: bool) -> String {
    let labels = if are_many && refusal.code() == "ONLY_TAGGED" { vec![] } else { refusal.labels() };
    format!("{} {labels:?} {:?}", refusal.code(), refusal.limit().map(|(of, ..)| of))
}
