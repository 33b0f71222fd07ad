//! Placement: which worker, or why none.
//!
//! [`choose`] is pure and touches nothing; nothing else filters or compares workers. Whoever grants the lease checks again what may
//! have changed since, under a guard ([`crate::leases::grant_task`]).

use std::collections::{BTreeMap, HashSet};
use std::fmt;

use domain::WorkerId;
use domain::worker::{Capacity, Incarnation, Labels};
use domain::workload::{Failure, Image, Limits, Network, WorkloadSpec};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::entity::worker::{Desired, State};

/// A worker, as placement sees it.
#[derive(Debug, Clone)]
pub(crate) struct Worker {
    pub(crate) id: WorkerId,
    pub(crate) name: String,
    pub(crate) endpoint: String,
    pub(crate) incarnation: Incarnation,
    pub(crate) desired: Desired,
    pub(crate) state: State,
    /// It was not in contact since a scheduler started, and has the TTL to come back.
    pub(crate) awaited: bool,
    pub(crate) labels: Labels,
    pub(crate) capacity: Capacity,
    pub(crate) active_tasks: u32,
    /// The versions of the protocol that its gateway speaks, where none of them is spoken here.
    pub(crate) unsupported_versions: Vec<u32>,
    pub(crate) trust: Trust,
}

/// Whether a worker is trusted to start what is given to it. With what the last attempt said that it could not start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Trust {
    Full,
    /// It is tried with one task at a time.
    OnProbation(String),
    /// It is not tried for now.
    SetAside(String),
}

/// An attempt that a worker could not start.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FailedThere {
    pub(crate) worker: WorkerId,
    pub(crate) failure: Failure,
}

/// What is asked of a worker.
#[derive(Debug, Clone)]
pub(crate) struct Demand {
    pub(crate) team: String,
    pub(crate) platform: String,
    pub(crate) tags: Vec<String>,
    /// What shall run there. `None`: nothing, bytes are moved.
    pub(crate) process: Option<Process>,
    /// Where it could not be started: not there again.
    pub(crate) failed_on: Vec<FailedThere>,
    /// Who asks: a workload, or a lease. Decides between equal workers, so that many who ask are spread evenly.
    pub(crate) asked_by: Uuid,
}

/// What a process asks of its worker.
#[derive(Debug, Clone)]
pub(crate) struct Process {
    pub(crate) image_kind: &'static str,
    /// Whose image the worker has to bring along.
    pub(crate) resource_type: Option<String>,
    pub(crate) capabilities: Vec<&'static str>,
}

/// Where one input is.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Location {
    pub(crate) size_bytes: u64,
    pub(crate) workers: HashSet<WorkerId>,
}

/// What came of it.
#[derive(Debug)]
pub(crate) enum Choice<'w> {
    /// This one.
    Placed(Placement<'w>),
    /// Everyone that could is busy or out of contact, or nobody has registered yet.
    NotNow(Refusals),
    /// No worker that is known could ever.
    Never(Refusals),
}

/// A worker was found.
#[derive(Debug)]
pub(crate) struct Placement<'w> {
    pub(crate) worker: &'w Worker,
    /// Why it and no other, for people.
    pub(crate) reason: String,
}

/// Why each worker refused, by its name.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Refusals(pub(crate) BTreeMap<String, Refusal>);

impl Refusals {
    /// One line for each worker.
    pub(crate) fn lines(&self) -> Vec<String> {
        if self.0.is_empty() {
            return vec!["no worker has registered yet".to_owned()];
        }
        self.0.iter().map(|(worker, refusal)| format!("{worker}: {refusal}")).collect()
    }
}

/// Why a worker does not do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// It has been out of contact for so long that it does not count.
    Lost,
    /// It takes no more work, for good.
    Retiring,
    /// Its gateway speaks only these versions of the protocol.
    Incompatible(Vec<u32>),
    /// An attempt at the same workload could not be started there.
    FailedThere(Failure),
    /// It is of another platform.
    Platform(String),
    /// It is another team's.
    Team,
    /// It takes only workloads with tags.
    OnlyTagged(Vec<String>),
    /// It lacks these tags.
    MissingTags(Vec<String>),
    /// It cannot run this kind of image.
    ImageKind(&'static str),
    /// It brings no image along for this resource type.
    ResourceType(String),
    /// Its runtime cannot do this.
    Capability(&'static str),
    /// It takes no work for now.
    Landing,
    /// It is out of contact.
    Stalled,
    /// It fails again and again, and is not tried for now, or only with one task.
    SetAside(String),
    /// All of its slots are taken.
    Full { active: u32, max: u32 },
}

impl Refusal {
    /// Whether it may pass by itself.
    pub(crate) fn passes(&self) -> bool {
        matches!(self, Self::Landing | Self::Stalled | Self::SetAside(_) | Self::Full { .. })
    }

    /// For programs.
    pub(crate) fn code(&self) -> &'static str {
        match self {
            Self::Lost => "LOST",
            Self::Retiring => "RETIRING",
            Self::Incompatible(_) => "INCOMPATIBLE",
            Self::FailedThere(_) => "FAILED_THERE",
            Self::Platform(_) => "PLATFORM",
            Self::Team => "TEAM",
            Self::OnlyTagged(_) => "ONLY_TAGGED",
            Self::MissingTags(_) => "MISSING_TAGS",
            Self::ImageKind(_) => "IMAGE_KIND",
            Self::ResourceType(_) => "RESOURCE_TYPE",
            Self::Capability(_) => "CAPABILITY",
            Self::Landing => "LANDING",
            Self::Stalled => "STALLED",
            Self::SetAside(_) => "SET_ASIDE",
            Self::Full { .. } => "FULL",
        }
    }

    /// What would end it, for people.
    pub(crate) fn ended_by(&self) -> String {
        match self {
            Self::Lost | Self::Stalled => "its gateway is in contact again".to_owned(),
            Self::Retiring => "another worker takes its place".to_owned(),
            Self::Incompatible(_) => "its gateway, or the scheduler, is of another version".to_owned(),
            Self::FailedThere(_) => "it is submitted anew".to_owned(),
            Self::Platform(platform) => format!("the workload asks for platform {platform}"),
            Self::Team => "it serves all teams, or this one".to_owned(),
            Self::OnlyTagged(tags) => format!("the workload asks for one of its tags: {}", tags.join(", ")),
            Self::MissingTags(tags) => format!("it has the tags {}", tags.join(", ")),
            Self::ImageKind(kind) => format!("it can run {kind} images"),
            Self::ResourceType(name) => format!("it brings an image of the resource type {name}"),
            Self::Capability(name) => format!("its runtime has {name}"),
            Self::Landing => "it is told to run again".to_owned(),
            Self::SetAside(_) => "it was tried again, and works".to_owned(),
            Self::Full { .. } => "one of its tasks ends".to_owned(),
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Lost => f.write_str("is lost"),
            Self::Retiring => f.write_str("is retiring"),
            Self::Incompatible(versions) => {
                let versions: Vec<_> = versions.iter().map(ToString::to_string).collect();
                let versions = if versions.is_empty() { "no".to_owned() } else { versions.join(", ") };
                write!(f, "its gateway speaks another version of the protocol ({versions})")
            }
            Self::FailedThere(failure) => {
                write!(f, "could not start it: {} ({})", failure.message, failure.reason)
            }
            Self::Platform(platform) => write!(f, "its platform is {platform}"),
            Self::Team => f.write_str("serves another team"),
            Self::OnlyTagged(tags) => write!(f, "serves only workloads tagged {}", tags.join(", ")),
            Self::MissingTags(tags) => write!(f, "lacks the tags {}", tags.join(", ")),
            Self::ImageKind(kind) => write!(f, "cannot run {kind} images"),
            Self::ResourceType(name) => write!(f, "has no image of the resource type {name}"),
            Self::Capability(name) => write!(f, "its runtime lacks {name}"),
            Self::Landing => f.write_str("is landing"),
            Self::Stalled => f.write_str("is out of contact"),
            Self::SetAside(why) => write!(f, "is set aside, for it fails again and again: {why}"),
            Self::Full { active, max } => write!(f, "is full ({active} of {max} tasks)"),
        }
    }
}

impl Demand {
    /// What a workload asks of its worker.
    pub(crate) fn of(spec: &WorkloadSpec) -> Self {
        let mut capabilities = Vec::new();
        if spec.privileged {
            capabilities.push("privileged");
        }
        if spec.limits != Limits::default() {
            capabilities.push("limits");
        }
        if spec.network == Network::Loopback {
            capabilities.push("network-loopback");
        }
        let resource_type = match &spec.image {
            Image::ResourceType(name) => Some(name.clone()),
            Image::Host | Image::Artifact(_) => None,
        };
        Self {
            team: spec.team.clone(),
            platform: spec.platform.clone(),
            tags: spec.tags.clone(),
            process: Some(Process { image_kind: spec.image.kind(), resource_type, capabilities }),
            failed_on: Vec::new(),
            asked_by: Uuid::nil(),
        }
    }

    /// The same, after attempts that could not be started.
    pub(crate) fn failed_on(self, failed_on: Vec<FailedThere>) -> Self {
        Self { failed_on, ..self }
    }

    /// The same, asked for by somebody.
    pub(crate) fn asked_by(self, asked_by: Uuid) -> Self {
        Self { asked_by, ..self }
    }
}

/// Lower is better; earlier fields decide first.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Score {
    /// Whether it is only hoped that the worker is there.
    awaited: bool,
    /// Input bytes that would have to be brought there.
    bytes_to_move: u64,
    active_tasks: u32,
    /// Drawn anew for each who asks, and the same whenever that one asks again.
    draw: [u8; 32],
}

/// Picks the worker that `demand` gets, or says why each one refused.
pub(crate) fn choose<'w>(demand: &Demand, workers: &'w [Worker], locations: &[Location]) -> Choice<'w> {
    let ranked = ranked(demand, workers, locations);
    if let Some((score, worker)) = ranked.first() {
        let equal = ranked.iter().filter(|(other, _)| other.cost() == score.cost()).count();
        let reason = reason(score, equal, ranked.len(), workers.len());
        return Choice::Placed(Placement { worker, reason });
    }
    let refusals = workers
        .iter()
        .filter_map(|worker| Some((worker.name.clone(), refusal(demand, worker)?)))
        .collect::<BTreeMap<_, _>>();
    if workers.is_empty() || refusals.values().any(Refusal::passes) {
        Choice::NotNow(Refusals(refusals))
    } else {
        Choice::Never(Refusals(refusals))
    }
}

/// The workers that would do, best first.
fn ranked<'w>(demand: &Demand, workers: &'w [Worker], locations: &[Location]) -> Vec<(Score, &'w Worker)> {
    let willing = workers.iter().filter(|worker| refusal(demand, worker).is_none());
    let mut ranked: Vec<_> = willing.map(|worker| (score(demand, worker, locations), worker)).collect();
    ranked.sort_by(|(one, _), (other, _)| one.cmp(other));
    ranked
}

/// Why `worker` does not do, in one word.
fn refusal(demand: &Demand, worker: &Worker) -> Option<Refusal> {
    refusals(demand, worker).into_iter().next()
}

/// Everything that speaks against `worker`: first what will not change, for that is what a caller must act on.
pub(crate) fn refusals(demand: &Demand, worker: &Worker) -> Vec<Refusal> {
    let labels = &worker.labels;
    let mut refusals = Vec::new();
    if worker.state == State::Lost {
        refusals.push(Refusal::Lost);
    }
    if worker.desired == Desired::Retire {
        refusals.push(Refusal::Retiring);
    }
    if !worker.unsupported_versions.is_empty() {
        refusals.push(Refusal::Incompatible(worker.unsupported_versions.clone()));
    }
    if let Some(failed) = demand.failed_on.iter().find(|failed| failed.worker == worker.id) {
        refusals.push(Refusal::FailedThere(failed.failure.clone()));
    }
    if labels.platform != demand.platform {
        refusals.push(Refusal::Platform(labels.platform.clone()));
    }
    if labels.team.as_ref().is_some_and(|team| *team != demand.team) {
        refusals.push(Refusal::Team);
    }
    if demand.process.is_some() && demand.tags.is_empty() && !labels.tags.is_empty() {
        refusals.push(Refusal::OnlyTagged(labels.tags.clone()));
    }
    let missing: Vec<_> = demand.tags.iter().filter(|tag| !labels.tags.contains(tag)).cloned().collect();
    if !missing.is_empty() {
        refusals.push(Refusal::MissingTags(missing));
    }
    if let Some(process) = &demand.process {
        let has = |list: &[String], name: &str| list.iter().any(|item| item == name);
        if !has(&labels.image_kinds, process.image_kind) {
            refusals.push(Refusal::ImageKind(process.image_kind));
        } else if let Some(name) = &process.resource_type
            && !labels.resource_types.iter().any(|known| known.name == *name)
        {
            refusals.push(Refusal::ResourceType(name.clone()));
        }
        let lacking = process.capabilities.iter().filter(|name| !has(&labels.capabilities, name));
        refusals.extend(lacking.map(|name| Refusal::Capability(name)));
    }

    if worker.desired == Desired::Land {
        refusals.push(Refusal::Landing);
    }
    if worker.state == State::Stalled {
        refusals.push(Refusal::Stalled);
    }
    match &worker.trust {
        Trust::SetAside(why) if demand.process.is_some() => refusals.push(Refusal::SetAside(why.clone())),
        Trust::OnProbation(why) if demand.process.is_some() && worker.active_tasks > 0 => {
            refusals.push(Refusal::SetAside(why.clone()));
        }
        Trust::Full | Trust::OnProbation(_) | Trust::SetAside(_) => {}
    }
    if let Some(max) = worker.capacity.max_tasks
        && demand.process.is_some()
        && worker.active_tasks >= max
    {
        refusals.push(Refusal::Full { active: worker.active_tasks, max });
    }
    refusals
}

/// What speaks against giving any work to `worker`, whatever is asked for.
pub(crate) fn standing_refusals(worker: &Worker) -> Vec<Refusal> {
    let process = Process { image_kind: "", resource_type: None, capabilities: vec![] };
    let anything = Demand {
        team: worker.labels.team.clone().unwrap_or_default(),
        platform: worker.labels.platform.clone(),
        tags: worker.labels.tags.clone(),
        process: Some(process),
        failed_on: vec![],
        asked_by: Uuid::nil(),
    };
    let refusals = refusals(&anything, worker).into_iter();
    refusals.filter(|refusal| !matches!(refusal, Refusal::ImageKind(_))).collect()
}

/// The workers that would do, best first, each with how it compares with the others.
pub(crate) fn ranking<'w>(
    demand: &Demand,
    workers: &'w [Worker],
    locations: &[Location],
) -> Vec<(&'w Worker, String)> {
    let ranked = ranked(demand, workers, locations).into_iter();
    ranked.map(|(score, worker)| (worker, score.to_string())).collect()
}

fn score(demand: &Demand, worker: &Worker, locations: &[Location]) -> Score {
    let elsewhere = locations.iter().filter(|location| !location.workers.contains(&worker.id));
    let draw = [demand.asked_by.into_bytes(), worker.id.uuid().into_bytes()].concat();
    Score {
        awaited: worker.awaited,
        bytes_to_move: elsewhere.map(|location| location.size_bytes).fold(0, u64::saturating_add),
        active_tasks: worker.active_tasks,
        draw: *blake3::hash(&draw).as_bytes(),
    }
}

impl Score {
    /// All but the luck of the draw.
    fn cost(&self) -> (bool, u64, u32) {
        (self.awaited, self.bytes_to_move, self.active_tasks)
    }
}

/// Why the worker with `score` and no other: `equal` of those that are `willing` are as good as it, and it is one of them.
fn reason(score: &Score, equal: usize, willing: usize, all: usize) -> String {
    match (equal, willing, all) {
        (_, _, 1) => "it is the only worker".to_owned(),
        (_, 1, _) => format!("the only one of {all} workers that can take it now: {score}"),
        (1, ..) => format!("best of {willing} workers that can take it now: {score}"),
        _ => format!("drawn from {equal} workers that are equally good: {score}"),
    }
}

impl fmt::Display for Score {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { awaited, bytes_to_move, active_tasks, .. } = self;
        let awaited = if *awaited { "awaited since the scheduler started, " } else { "" };
        write!(f, "{awaited}{bytes_to_move} bytes to move, {active_tasks} active tasks")
    }
}

#[cfg(test)]
mod tests {
    use domain::worker::ResourceType;
    use domain::workload::FailureReason;

    use super::*;

    fn worker(name: &str) -> Worker {
        Worker {
            id: WorkerId::new(),
            name: name.to_owned(),
            endpoint: "http://127.0.0.1:1".to_owned(),
            incarnation: Incarnation(1),
            desired: Desired::Run,
            state: State::Running,
            awaited: false,
            labels: Labels {
                platform: "linux".to_owned(),
                tags: vec![],
                team: None,
                image_kinds: vec!["host".to_owned()],
                capabilities: vec![],
                resource_types: vec![],
            },
            capacity: Capacity { max_tasks: Some(2), disk_bytes: 0 },
            active_tasks: 0,
            unsupported_versions: vec![],
            trust: Trust::Full,
        }
    }

    fn failure() -> Failure {
        Failure { reason: FailureReason::StartFailed, message: "no".to_owned() }
    }

    fn demand() -> Demand {
        Demand {
            team: "main".to_owned(),
            platform: "linux".to_owned(),
            tags: vec![],
            process: Some(Process { image_kind: "host", resource_type: None, capabilities: vec![] }),
            failed_on: vec![],
            asked_by: Uuid::nil(),
        }
    }

    fn placed(choice: &Choice<'_>) -> Option<WorkerId> {
        match choice {
            Choice::Placed(placement) => Some(placement.worker.id),
            Choice::NotNow(_) | Choice::Never(_) => None,
        }
    }

    #[test]
    fn bytes_decide_then_load() {
        let (mut near, mut busy, idle) = (worker("near"), worker("busy"), worker("idle"));
        near.active_tasks = 1;
        busy.active_tasks = 1;
        let workers = [near.clone(), busy.clone(), idle.clone()];
        assert_eq!(placed(&choose(&demand(), &workers, &[])), Some(idle.id));
        let here = Location { size_bytes: 10, workers: HashSet::from([near.id]) };
        assert_eq!(placed(&choose(&demand(), &workers, &[here])), Some(near.id));
    }

    #[test]
    fn a_worker_that_is_awaited_gets_only_what_no_other_can_take() {
        let (mut near, far) = (Worker { awaited: true, ..worker("near") }, worker("far"));
        let here = [Location { size_bytes: 10, workers: HashSet::from([near.id]) }];
        let busy = Worker { active_tasks: 1, ..far.clone() };
        assert_eq!(placed(&choose(&demand(), &[near.clone(), busy.clone()], &here)), Some(far.id));
        let full = Worker { active_tasks: 2, ..far };
        assert_eq!(placed(&choose(&demand(), &[near.clone(), full], &here)), Some(near.id));
        near.awaited = false;
        assert_eq!(placed(&choose(&demand(), &[near.clone(), busy], &here)), Some(near.id));
    }

    #[test]
    fn equal_workers_get_what_is_asked_for_evenly_and_always_the_same() {
        let workers: Vec<_> = ["one", "two", "three"].map(worker).into();
        let mut placements = BTreeMap::<_, u32>::new();
        for _ in 0..300 {
            let demand = demand().asked_by(Uuid::new_v4());
            let first = placed(&choose(&demand, &workers, &[])).expect("a worker");
            let reversed: Vec<_> = workers.iter().rev().cloned().collect();
            assert_eq!(placed(&choose(&demand, &reversed, &[])), Some(first));
            *placements.entry(first).or_default() += 1;
        }
        // As even as dice are: that one gets fewer than 60 of 300 has a chance of one in a million.
        assert!(placements.len() == 3 && placements.values().all(|count| *count >= 60), "{placements:?}");
    }

    #[test]
    fn the_reason_says_what_decided() {
        let said = |workers: &[Worker], locations: &[Location]| match choose(&demand(), workers, locations) {
            Choice::Placed(placement) => placement.reason,
            other => panic!("{other:?}"),
        };
        let (one, two) = (worker("one"), worker("two"));
        let full = Worker { active_tasks: 2, ..worker("full") };
        assert_eq!(said(std::slice::from_ref(&one), &[]), "it is the only worker");
        let only = "the only one of 2 workers that can take it now: 0 bytes to move, 0 active tasks";
        assert_eq!(said(&[one.clone(), full.clone()], &[]), only);
        let drawn = "drawn from 2 workers that are equally good: 0 bytes to move, 0 active tasks";
        assert_eq!(said(&[one.clone(), two.clone(), full.clone()], &[]), drawn);
        let far = Location { size_bytes: 7, workers: HashSet::from([full.id]) };
        let here = Location { size_bytes: 70, workers: HashSet::from([two.id]) };
        let best = "best of 2 workers that can take it now: 7 bytes to move, 0 active tasks";
        assert_eq!(said(&[one, two, full], &[here, far]), best);
    }

    #[test]
    fn nobody_is_not_now_and_so_is_whoever_is_full_or_stalled() {
        assert!(matches!(choose(&demand(), &[], &[]), Choice::NotNow(refusals) if refusals.0.is_empty()));
        let full = Worker { active_tasks: 2, ..worker("full") };
        let stalled = Worker { state: State::Stalled, ..worker("stalled") };
        let landing = Worker { desired: Desired::Land, ..worker("landing") };
        let set_aside = Worker { trust: Trust::SetAside("why".to_owned()), ..worker("set-aside") };
        let on_probation =
            Worker { trust: Trust::OnProbation("why".to_owned()), active_tasks: 1, ..worker("tried") };
        for worker in [full, stalled, landing, set_aside, on_probation.clone()] {
            assert!(matches!(choose(&demand(), &[worker], &[]), Choice::NotNow(_)));
        }
        let idle = Worker { active_tasks: 0, ..on_probation };
        assert!(matches!(choose(&demand(), &[idle], &[]), Choice::Placed(_)), "one task is tried");
    }

    #[test]
    fn what_can_never_match_says_so_even_where_it_is_also_busy() {
        type Change = fn(&mut Worker, &mut Demand);
        let git = |version: &str| ResourceType { name: "git".to_owned(), version: version.to_owned() };
        let other =
            Worker { labels: Labels { resource_types: vec![git("1")], ..worker("w").labels }, ..worker("w") };
        let mut demanding = demand();
        demanding.process.as_mut().expect("a process").resource_type = Some("git".to_owned());
        assert_eq!(refusal(&demanding, &other), None, "in whichever version");
        let cases: [(Change, Refusal); 12] = [
            (|w, _| w.state = State::Lost, Refusal::Lost),
            (|w, _| w.unsupported_versions = vec![7], Refusal::Incompatible(vec![7])),
            (
                |w, d| d.failed_on.push(FailedThere { worker: w.id, failure: failure() }),
                Refusal::FailedThere(failure()),
            ),
            (|w, _| w.desired = Desired::Retire, Refusal::Retiring),
            (|_, d| d.platform = "plan9".to_owned(), Refusal::Platform("linux".to_owned())),
            (|w, _| w.labels.team = Some("other".to_owned()), Refusal::Team),
            (|w, _| w.labels.tags = vec!["gpu".to_owned()], Refusal::OnlyTagged(vec!["gpu".to_owned()])),
            (|_, d| d.tags = vec!["gpu".to_owned()], Refusal::MissingTags(vec!["gpu".to_owned()])),
            (|w, _| w.labels.image_kinds.clear(), Refusal::ImageKind("host")),
            (
                |w, d| {
                    w.labels.resource_types =
                        vec![ResourceType { name: "s3".to_owned(), version: String::new() }];
                    if let Some(process) = &mut d.process {
                        process.resource_type = Some("git".to_owned());
                    }
                },
                Refusal::ResourceType("git".to_owned()),
            ),
            (
                |_, d| {
                    if let Some(process) = &mut d.process {
                        process.capabilities.push("privileged");
                    }
                },
                Refusal::Capability("privileged"),
            ),
            (
                |w, d| {
                    w.labels.tags = vec!["gpu".to_owned()];
                    d.tags = vec!["gpu".to_owned(), "big".to_owned()];
                },
                Refusal::MissingTags(vec!["big".to_owned()]),
            ),
        ];
        for (change, expected) in cases {
            let (mut worker, mut demand) = (Worker { active_tasks: 2, ..worker("w") }, demand());
            change(&mut worker, &mut demand);
            match choose(&demand, &[worker], &[]) {
                Choice::Never(refusals) => assert_eq!(refusals.0.get("w"), Some(&expected)),
                other => panic!("{expected:?}: {other:?}"),
            }
        }
    }

    #[test]
    fn moving_bytes_takes_no_slot_and_needs_no_tag() {
        let mut worker = Worker { active_tasks: 2, ..worker("w") };
        worker.labels.tags = vec!["gpu".to_owned()];
        let transfer = Demand { process: None, ..demand() };
        assert_eq!(placed(&choose(&transfer, &[worker.clone()], &[])), Some(worker.id));
    }
}
