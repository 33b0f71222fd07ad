//! Generation of operations from a seed: scripts of callers, several at once, with accidents
//! between them.

use std::collections::VecDeque;

use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};

use super::operations::{
    Artifact, CONTENTS, Delivery, EVERY_ATTEMPT, Make, Operation, Outputs, Owner, REPLICAS, Remains, Status,
    TREES, Trespass, User, WORKERS,
};

/// Numbers of resource caches, task caches and jobs.
const CACHES: u8 = 6;
const TASKS: u8 = 4;
const JOBS: u8 = 3;

/// Generator of the operations of a seed.
pub(crate) struct Generator {
    random: StdRng,
    /// Maximum number of concurrent scripts, which limits the contents of the store.
    most: usize,
    /// Active scripts, each with its remaining operations.
    scripts: Vec<VecDeque<Operation>>,
    builds: Vec<u16>,
    /// Artifacts that should be sealed, with their contents. The newest are last.
    sealed: Vec<(Artifact, u8)>,
    /// Artifacts that were in `sealed` before.
    old: Vec<Artifact>,
    /// Recent operations, the newest last.
    before: VecDeque<Operation>,
    /// A worker that is not heard of.
    away: Option<u8>,
    builds_made: u16,
    workloads_made: u16,
    uploads_made: u16,
    transfers_made: u16,
    claims_made: u16,
}

impl Generator {
    pub(crate) fn new(seed: u64) -> Self {
        let mut random = StdRng::seed_from_u64(seed);
        let most = *[6, 14, 14, 40].choose(&mut random).expect("some");
        Self {
            random,
            most,
            scripts: Vec::new(),
            builds: Vec::new(),
            sealed: Vec::new(),
            old: Vec::new(),
            before: VecDeque::new(),
            away: None,
            builds_made: 0,
            workloads_made: 0,
            uploads_made: 0,
            transfers_made: 0,
            claims_made: 0,
        }
    }

    /// Returns the first `steps` operations of a seed.
    pub(crate) fn generate(seed: u64, steps: usize) -> Vec<Operation> {
        let mut generator = Self::new(seed);
        (0..steps).map(|_| generator.next()).collect()
    }

    fn next(&mut self) -> Operation {
        let operation = match self.random.random_range(0..100) {
            0..10 => self.together(),
            10..28 => self.accident(),
            28..34 => self.repeat().unwrap_or(Operation::Collect),
            _ => self.script_goes_on(),
        };
        let parts = match &operation {
            Operation::Together(parts) => parts.clone(),
            one => vec![one.clone()],
        };
        self.before.extend(parts.into_iter().filter(Operation::may_be_repeated));
        while self.before.len() > 80 {
            self.before.pop_front();
        }
        operation
    }

    fn together(&mut self) -> Operation {
        let mut parts = vec![Operation::Collect];
        let kills = self.chance(10);
        if kills {
            parts.push(Operation::Kill { replica: self.below(REPLICAS) });
        }
        // A caller that repeats a call does not receive its missing owners, and ignores items that
        // were created meanwhile.
        let may_be_joined = |operation: &Operation| {
            let tells = matches!(operation, Operation::Settle { outputs: Outputs::Given(..), .. });
            let twice = matches!(operation, Operation::ForgetWorker { .. });
            operation.may_be_joined() && !(kills && (tells || twice))
        };
        while parts.len() < 4 {
            let next = if self.chance(25) { self.repeat() } else { Some(self.script_goes_on()) };
            match next {
                Some(next) if may_be_joined(&next) => parts.push(next),
                // It must run alone.
                Some(next) => self.scripts.push(VecDeque::from([next])),
                None => parts.push(Operation::Collect),
            }
        }
        if self.chance(30) {
            parts.remove(0);
        }
        Operation::Together(parts)
    }

    fn accident(&mut self) -> Operation {
        let worker = self.worker();
        match self.random.random_range(0..100) {
            0..18 => Operation::Collect,
            18..40 => Operation::Sweep { worker, destroy: self.chance(85) },
            40..62 => {
                let way = match self.random.random_range(0..10) {
                    0 => Delivery::Cut,
                    1..3 => Delivery::Repeatedly,
                    _ => Delivery::Once,
                };
                // The newest token as a rule, as of a report without delay.
                let which = if self.chance(70) { u8::MAX } else { self.below(4) };
                let reports = [Operation::BeginReport { worker }, Operation::Report { worker, which, way }];
                if self.chance(80) { self.begin(reports) } else { Operation::Report { worker, which, way } }
            }
            62..66 => Operation::Make { worker },
            66..69 => Operation::Reconnect { worker },
            69..73 => Operation::NewSession { worker },
            73..76 => {
                let left = self.left();
                self.away = None;
                // The first message of a gateway.
                let first = [
                    Operation::NewIncarnation { worker, left },
                    Operation::BeginReport { worker },
                    Operation::Report { worker, which: u8::MAX, way: Delivery::Once },
                ];
                self.begin(first)
            }
            76..79 => Operation::Former { worker },
            79..81 => {
                self.away = if self.away.is_none() { Some(worker) } else { None };
                Operation::Advance { seconds: 5 }
            }
            81..84 => Operation::Kill { replica: self.below(REPLICAS) },
            _ => {
                let longest = if self.chance(20) { 300 } else { 40 };
                Operation::Advance { seconds: self.random.random_range(1..longest) }
            }
        }
    }

    fn repeat(&mut self) -> Option<Operation> {
        let before: Vec<_> = self.before.iter().cloned().collect();
        before.choose(&mut self.random).cloned()
    }

    /// Returns the next operation of some script.
    fn script_goes_on(&mut self) -> Operation {
        if self.scripts.len() < 4 || (self.scripts.len() < self.most && self.chance(35)) {
            return self.begin_some();
        }
        let which = self.random.random_range(0..self.scripts.len());
        let Some(next) = self.scripts[which].pop_front() else {
            self.scripts.swap_remove(which);
            return self.script_goes_on();
        };
        match &next {
            Operation::Seal { upload, content } => self.sealed.push((Artifact::Upload(*upload), *content)),
            Operation::HandOver { upload, content, .. } => {
                self.sealed.push((Artifact::Upload(*upload), *content));
            }
            Operation::Settle { workload, outputs, .. } => {
                let candidate = outputs.candidate();
                self.sealed.extend(candidate.map(|(content, _)| (Artifact::Output(*workload), content)));
            }
            Operation::DeleteBuild { build } => self.builds.retain(|other| other != build),
            _ => {}
        }
        if self.sealed.len() > 12 {
            self.old.push(self.sealed.remove(0).0);
        }
        if self.old.len() > 10 {
            self.old.remove(0);
        }
        next
    }

    /// Starts a script, and returns its first operation.
    fn begin(&mut self, operations: impl IntoIterator<Item = Operation>) -> Operation {
        let mut script: VecDeque<_> = operations.into_iter().collect();
        let first = script.pop_front().unwrap_or(Operation::Collect);
        self.scripts.push(script);
        first
    }

    fn begin_some(&mut self) -> Operation {
        let script = match self.random.random_range(0..100) {
            0..12 => self.build(),
            12..34 => self.upload(),
            34..38 => self.owners_of_artifacts(),
            38..46 => self.copy(),
            46..52 => {
                let tree = if self.chance(20) { TREES } else { 0 };
                vec![Operation::Adopt { content: tree + self.content(), owner: self.some_build() }]
            }
            52..62 => self.cache(),
            62..67 => self.task(),
            67..71 => self.undelete(),
            71..73 => self.drop_replica(),
            73..75 => self.forget_worker(),
            75..77 => self.backup(),
            77..80 => vec![Operation::Trespass(self.trespass())],
            80..82 => self.base(),
            82..84 => self.uploads_at_once(),
            _ => self.workload(),
        };
        self.begin(script)
    }

    fn build(&mut self) -> Vec<Operation> {
        let (build, ends_with) = (self.builds_made, self.workloads_made);
        self.builds_made += 1;
        self.workloads_made += 1;
        let (keep, term) = (self.below(200).into(), self.random.random_range(30..600));
        // Not always in order. Some builds use a number that is taken.
        let number = if self.chance(80) { 10 + build } else { 10 + build - u16::from(self.below(8)) };
        let job = self.chance(40).then(|| (self.below(JOBS), number));
        let mut script = vec![Operation::PutBuild { build, ends_with, keep, term, job }];
        let bound = self.chance(80);
        if bound {
            script.push(Operation::Accept { workload: ends_with, pins: self.pins(), build: Some(build) });
        }
        self.builds.push(build);
        if self.builds.len() > 6 {
            self.builds.remove(0);
        }
        // The build stays open for a while, in which its artifacts are created.
        for _ in 0..self.below(3) {
            script.push(Operation::Adopt { content: self.content(), owner: Some(build) });
            script.extend(self.upload_for(Some(build)));
        }
        if self.chance(15) {
            script.push(Operation::DeleteBuild { build });
        } else if self.chance(15) {
            script.push(Operation::EndBuild { build, status: self.status() });
        } else if bound && self.chance(90) {
            let outputs = Outputs::NoOutput;
            let (status, attempt) = (self.status(), 0);
            script.push(Operation::Settle { workload: ends_with, attempt, status, outputs, build: None });
        }
        script
    }

    fn upload(&mut self) -> Vec<Operation> {
        let owner = self.some_build();
        if self.chance(20) {
            let (upload, content) = (self.uploads_made, TREES + self.content());
            self.uploads_made += 1;
            return vec![Operation::HandOver { upload, owner, content }];
        }
        self.upload_for(owner)
    }

    fn upload_for(&mut self, owner: Option<u16>) -> Vec<Operation> {
        let upload = self.uploads_made;
        self.uploads_made += 1;
        let mut script = vec![Operation::Create { upload, owner }];
        script.extend(self.fill(upload));
        script
    }

    fn uploads_at_once(&mut self) -> Vec<Operation> {
        let first = self.uploads_made;
        self.uploads_made += 2 + u16::from(self.below(3));
        let mut uploads: Vec<_> = (first..self.uploads_made).collect();
        if first > 0 && self.chance(20) {
            // One of the artifacts exists already, as in a repeated call.
            uploads.push(first - 1);
        }
        let fill: Vec<_> = uploads.iter().copied().filter(|_| self.chance(60)).collect();
        let mut script = vec![Operation::CreateAll { uploads, owner: self.some_build() }];
        for upload in fill {
            script.extend(self.fill(upload));
        }
        script
    }

    /// Returns transfers that fill an upload, or fail to.
    fn fill(&mut self, upload: u16) -> Vec<Operation> {
        let artifact = Artifact::Upload(upload);
        let content = self.content();
        let mut script = Vec::new();
        for _ in 0..if self.chance(15) { 2 } else { 1 } {
            let transfer = self.transfer();
            let (worker, make) = (self.below(WORKERS), self.make());
            script.push(Operation::Plan { transfer, artifact, worker, make });
            if self.chance(20) {
                script.push(Operation::Progress { transfer });
            }
            match self.random.random_range(0..20) {
                // The streamer is gone, and the claim expires.
                0 => return script,
                1..3 => script.push(Operation::Abandon { transfer }),
                _ => {
                    let content = if self.chance(10) { self.content() } else { content };
                    script.push(Operation::Arrive { transfer, content });
                }
            }
        }
        if self.chance(90) {
            script.push(Operation::Seal { upload, content });
        }
        script
    }

    /// Returns operations that change the owners of existing artifacts.
    fn owners_of_artifacts(&mut self) -> Vec<Operation> {
        let mut artifacts = self.pins();
        if artifacts.is_empty() || self.chance(20) {
            artifacts.extend(self.old.choose(&mut self.random));
        }
        artifacts.extend(self.some_sealed().map(|(artifact, _)| artifact));
        artifacts.sort_unstable();
        artifacts.dedup();
        let mut script = Vec::new();
        let Some(build) = self.some_build().filter(|_| !artifacts.is_empty()) else { return script };
        script.push(Operation::AddOwner { artifacts: artifacts.clone(), build });
        if self.chance(30) {
            script.push(Operation::Advance { seconds: 20 });
        }
        if self.chance(70) {
            // Not always the given artifacts, and not always from the same build.
            if self.chance(30) {
                artifacts.truncate(1);
            }
            let from = if self.chance(80) { Some(build) } else { self.some_build() };
            script.extend(from.map(|build| Operation::RemoveOwner { artifacts, build }));
        }
        script
    }

    fn copy(&mut self) -> Vec<Operation> {
        let Some((artifact, content)) = self.some_sealed() else { return Vec::new() };
        let worker = self.below(WORKERS);
        self.copy_to(artifact, content, worker)
    }

    fn copy_to(&mut self, artifact: Artifact, content: u8, worker: u8) -> Vec<Operation> {
        let (transfer, make) = (self.transfer(), self.make());
        let mut script = vec![Operation::Plan { transfer, artifact, worker, make }];
        match self.random.random_range(0..10) {
            0 => {}
            1 => script.push(Operation::Abandon { transfer }),
            _ => script.push(Operation::Arrive { transfer, content }),
        }
        script
    }

    fn cache(&mut self) -> Vec<Operation> {
        let (cache, claim) = (self.below(CACHES), self.claims_made);
        self.claims_made += 1;
        let user = self.user();
        let mut script = vec![Operation::AskCache { cache, claim, user: user.filter(|_| self.chance(60)) }];
        // The maker may die.
        if self.chance(85) {
            let artifact = match self.some_sealed() {
                Some((artifact, _)) if self.chance(60) => artifact,
                _ => {
                    let artifact = Artifact::Upload(self.uploads_made);
                    script.extend(self.upload_for(None));
                    artifact
                }
            };
            if self.chance(30) {
                script.push(Operation::RenewClaim { claim });
            }
            script.push(Operation::PutCache { claim, artifact });
        }
        for _ in 0..self.below(3) {
            let Some(user) = self.user() else { continue };
            script.push(Operation::UseCache { cache, user });
        }
        if let Some(user) = user.filter(|_| self.chance(50)) {
            script.push(Operation::ReleaseCache { cache, user });
        }
        if self.chance(25) {
            script.push(Operation::DeleteCache { cache });
        }
        script
    }

    /// Returns a possible user of a cache. `None` if there is no build.
    fn user(&mut self) -> Option<User> {
        if self.chance(50) {
            return self.some_build().map(User::OfBuild);
        }
        let back = u16::from(self.below(6));
        Some(User::OfWorkload(self.workloads_made.saturating_sub(back)))
    }

    fn task(&mut self) -> Vec<Operation> {
        let task = self.below(TASKS);
        let mut script = vec![Operation::AskTask { task }];
        for _ in 0..self.below(3) {
            let Some((artifact, _)) = self.some_sealed() else { break };
            script.push(Operation::PublishTask { task, artifact });
            if self.chance(50) {
                script.push(Operation::AskTask { task });
            }
        }
        if self.chance(15) {
            script.push(Operation::DeleteTask { task });
        }
        script
    }

    /// Restores an artifact that may be deleted. Broken streams miss marks.
    fn undelete(&mut self) -> Vec<Operation> {
        let old = self.old.choose(&mut self.random).copied();
        let artifact = match self.some_sealed().filter(|_| old.is_none() || self.chance(60)) {
            Some((artifact, _)) => artifact,
            None => old.unwrap_or(Artifact::Upload(0)),
        };
        let undelete =
            Operation::Undelete { artifact, owner: self.some_build(), keep: self.below(100).into() };
        let mut script: Vec<_> = (0..WORKERS).map(|worker| Operation::Reconnect { worker }).collect();
        if self.chance(50) {
            script.push(Operation::Advance { seconds: 40 });
            script.push(Operation::Collect);
        }
        script.push(undelete);
        script
    }

    fn drop_replica(&mut self) -> Vec<Operation> {
        let Some((artifact, content)) = self.some_sealed() else { return Vec::new() };
        let worker = self.below(WORKERS);
        let mut script = Vec::new();
        if self.chance(50) {
            script.extend(self.copy_to(artifact, content, (worker + 1) % WORKERS));
        }
        script.push(Operation::Drop { artifact, worker, force: self.chance(20) });
        script
    }

    /// Forgets a worker, which may still exist.
    fn forget_worker(&mut self) -> Vec<Operation> {
        let worker = self.worker();
        let mut script = vec![Operation::ForgetWorker { worker, force: self.chance(60) }];
        if self.chance(50) {
            let left = self.left();
            script.push(Operation::NewIncarnation { worker, left });
        }
        if self.chance(70) {
            script.push(Operation::BeginReport { worker });
            script.push(Operation::Report { worker, which: u8::MAX, way: Delivery::Once });
        }
        script
    }

    /// Restores the store from a backup, and decides about the orphans.
    fn backup(&mut self) -> Vec<Operation> {
        let worker = self.worker();
        let mut script = Vec::new();
        for _ in 0..self.below(3) {
            // A copy, or a new artifact.
            let (upload, content) = match self.some_sealed() {
                Some((Artifact::Upload(upload), content)) if content < TREES && self.chance(50) => {
                    (upload, content)
                }
                _ => (self.uploads_made, self.content()),
            };
            self.uploads_made = Ord::max(self.uploads_made, upload + 1);
            script.push(Operation::Stray { worker, upload, content });
        }
        script.push(Operation::NewLife { worker });
        script.push(Operation::BeginReport { worker });
        script.push(Operation::Report { worker, which: u8::MAX, way: Delivery::Once });
        if self.chance(80) {
            script.push(Operation::Describe { worker });
        }
        for _ in 0..self.below(4) {
            let which = self.below(8);
            script.push(match self.chance(60) {
                true => {
                    let owner = self.some_build();
                    Operation::AdoptOrphan { which, owner, keep: self.below(100).into() }
                }
                false => Operation::PurgeOrphan { which },
            });
        }
        script
    }

    fn base(&mut self) -> Vec<Operation> {
        let Some((artifact, _)) = self.some_sealed() else { return Vec::new() };
        let worker = self.below(WORKERS);
        let resource = self.chance(70).then(|| self.below(2));
        vec![Operation::PutBase { worker, resource, artifact }]
    }

    fn trespass(&mut self) -> Trespass {
        use Trespass as T;
        let (artifact, content) = self.some_sealed().unwrap_or((Artifact::Upload(0), 0));
        let old = self.old.choose(&mut self.random).copied();
        let (worker, cache, task) = (self.below(WORKERS), self.below(CACHES), self.below(TASKS));
        let build = self.some_build().unwrap_or_default();
        let claim = self.claims_made.saturating_sub(1);
        match self.random.random_range(0..22) {
            0 => T::Get(artifact),
            1 => T::Locate(artifact),
            2 => T::AdoptBytes(content),
            3 => T::Undelete(old.unwrap_or(artifact)),
            4 => T::Pin(artifact),
            5 => T::Plan(artifact, worker),
            6 => T::Prepare(artifact, worker),
            7 => T::Drop(artifact, worker),
            8 => T::Seal(Artifact::Upload(self.uploads_made.saturating_sub(1)), content),
            9 => T::PutType(artifact),
            10 => T::EndBuild(build),
            11 => T::DeleteBuild(build),
            12 => T::AskCache(cache),
            13 => T::RenewClaim(claim),
            14 => T::PutCache(claim, artifact),
            15 => T::UseCache(cache),
            16 => T::DeleteCache(cache),
            17 => T::AskTask(task),
            18 => T::PublishTask(task, artifact),
            19 => T::AddOwner(artifact, build),
            20 => T::RemoveOwner(artifact, build),
            _ => T::DeleteTask(task),
        }
    }

    fn workload(&mut self) -> Vec<Operation> {
        let workload = self.workloads_made;
        self.workloads_made += 1;
        let build = self.some_build();
        let pins = self.pins();
        let mut script = Vec::new();
        let worker = self.worker();
        if self.chance(95) {
            script.push(Operation::Accept { workload, pins: pins.clone(), build });
        }
        let mut tasks = Vec::new();
        if self.chance(25) {
            tasks.extend((0..1 + self.below(2)).map(|_| self.below(TASKS)));
            tasks.sort_unstable();
            tasks.dedup();
            if self.chance(50) {
                script.extend(tasks.iter().map(|task| Operation::AskTask { task: *task }));
            }
            script.push(Operation::UseTasks { workload, tasks: tasks.clone() });
        }
        let mut attempt = 0;
        let mut candidate = None;
        // A lease may have several containers, each with an attempt.
        let is_lease = self.chance(25);
        let mut others = None;
        while self.chance(90) {
            for artifact in &pins {
                let sealed = self.sealed.iter().find(|(sealed, _)| sealed == artifact).copied();
                if let Some((artifact, content)) = sealed.filter(|_| self.chance(50)) {
                    script.extend(self.copy_to(artifact, content, worker));
                }
            }
            let make = if self.chance(85) { Make::Now } else { Make::Later };
            script.push(Operation::Prepare { workload, attempt, worker, make });
            if let Some((task, (artifact, _))) = tasks.first().copied().zip(self.some_sealed())
                && self.chance(50)
            {
                // It is prepared again after another version was published.
                script.push(Operation::PublishTask { task, artifact });
                script.push(Operation::Prepare { workload, attempt, worker, make });
            }
            if self.chance(8) {
                // The disk is full at first.
                script.push(Operation::Fail { workload, attempt });
                script.push(Operation::Prepare { workload, attempt, worker, make });
            }
            if make == Make::Later && self.chance(60) {
                script.push(Operation::Make { worker });
            }
            if self.chance(90) {
                script.push(Operation::Prepared { workload, attempt });
            }
            if self.chance(15) {
                script.push(Operation::Touch { workload, attempt });
            }
            // Which one of two equal candidates is sealed is not specified.
            candidate = self.chance(80).then(|| self.content()).filter(|content| Some(*content) != others);
            if let Some(content) = candidate {
                script.push(Operation::Finish { workload, attempt, content });
            }
            if self.chance(10) {
                let gateway = self.chance(50);
                script.push(Operation::MarkContainer { workload, attempt, gateway });
            }
            if self.chance(10) {
                let (which, gateway) = (self.below(4), self.chance(50));
                script.push(Operation::MarkVolume { workload, attempt, which, gateway });
            }
            if self.chance(80) {
                break;
            }
            // A second attempt.
            if !is_lease {
                script.push(Operation::EndAttempt { workload, attempt });
            } else if attempt > 0 {
                break;
            }
            attempt += 1;
            others = candidate.take().filter(|_| is_lease);
        }
        let mut settled = attempt;
        if is_lease {
            settled = EVERY_ATTEMPT;
            candidate = others.filter(|_| self.chance(50)).or(candidate);
        }
        let status = self.status();
        let owners = self.owners(&mut script);
        let outputs = match candidate {
            Some(content) if matches!(status, Status::Succeeded | Status::Failed) || self.chance(10) => {
                if owners.is_empty() {
                    Outputs::With(content)
                } else {
                    Outputs::Given(content, owners)
                }
            }
            // The scheduler would never name it, and the store must reject it.
            None if self.chance(10) => Outputs::With(0),
            _ => Outputs::NoOutput,
        };
        let leaves_something = outputs != Outputs::NoOutput;
        script.push(Operation::Settle { workload, attempt: settled, status, outputs, build });
        if self.chance(15) {
            // A user attaches to its container after its end.
            script.push(Operation::Touch { workload, attempt });
        }
        if leaves_something && self.chance(50) {
            // The store rejected it, so that the scheduler settles without outputs.
            let (status, outputs) = (Status::Errored, Outputs::NoOutput);
            script.push(Operation::Settle { workload, attempt: settled, status, outputs, build });
        }
        script
    }

    /// Returns owners of an output, some of which are created first.
    fn owners(&mut self, script: &mut Vec<Operation>) -> Vec<Owner> {
        let mut owners = Vec::new();
        if let Some(build) = self.some_build().filter(|_| self.chance(20)) {
            owners.push(Owner::ForBuild(build));
        }
        if self.chance(25) {
            let task = self.below(TASKS);
            if self.chance(80) {
                script.push(Operation::AskTask { task });
            }
            owners.push(Owner::ForTask(task));
        }
        if self.chance(25) {
            let (cache, claim) = (self.below(CACHES), self.claims_made);
            self.claims_made += 1;
            script.push(Operation::AskCache { cache, claim, user: self.user().filter(|_| self.chance(50)) });
            owners.push(Owner::UnderClaim(claim));
        }
        owners
    }

    fn chance(&mut self, percent: u32) -> bool {
        self.random.random_range(0..100) < percent
    }

    fn below(&mut self, end: u8) -> u8 {
        self.random.random_range(0..end)
    }

    fn content(&mut self) -> u8 {
        self.below(CONTENTS)
    }

    fn worker(&mut self) -> u8 {
        let worker = self.below(WORKERS);
        if self.away == Some(worker) { (worker + 1) % WORKERS } else { worker }
    }

    fn make(&mut self) -> Make {
        match self.random.random_range(0..10) {
            0 => Make::Never,
            1 => Make::Later,
            _ => Make::Now,
        }
    }

    fn left(&mut self) -> Remains {
        match self.random.random_range(0..10) {
            0..6 => Remains::Everything,
            6..8 => Remains::Half,
            _ => Remains::Nothing,
        }
    }

    fn status(&mut self) -> Status {
        match self.random.random_range(0..6) {
            0 => Status::Failed,
            1 => Status::Errored,
            2 => Status::Aborted,
            _ => Status::Succeeded,
        }
    }

    fn transfer(&mut self) -> u16 {
        self.transfers_made += 1;
        self.transfers_made - 1
    }

    fn some_build(&mut self) -> Option<u16> {
        let build = self.builds.choose(&mut self.random).copied();
        build.filter(|_| self.chance(75))
    }

    fn some_sealed(&mut self) -> Option<(Artifact, u8)> {
        self.sealed.choose(&mut self.random).copied()
    }

    fn pins(&mut self) -> Vec<Artifact> {
        let mut pins: Vec<_> = (0..self.below(3)).filter_map(|_| Some(self.some_sealed()?.0)).collect();
        pins.sort_unstable();
        pins.dedup();
        pins
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seed_generates_same_operations_again() {
        assert_eq!(Generator::generate(7, 500), Generator::generate(7, 500));
        assert_ne!(Generator::generate(7, 500), Generator::generate(8, 500));
    }

    #[test]
    fn generator_generates_every_operation() {
        let operations = Generator::generate(1, 5000);
        let name = |operation: &Operation| {
            let text = format!("{operation:?}");
            text.split([' ', '(']).next().unwrap_or_default().to_owned()
        };
        let made: std::collections::BTreeSet<_> = operations.iter().map(name).collect();
        assert_eq!(made.len(), 56, "{made:?}");
    }
}
